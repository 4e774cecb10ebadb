// Run-time values to compile-time constants. Each macro calls the lambda with a constant of the stated name in scope.
#pragma once

#define BOOL_SWITCH(CONDITION, NAME, ...) \
  [&] {                                   \
    if (CONDITION) {                      \
      constexpr static bool NAME = true;  \
      return __VA_ARGS__();               \
    } else {                              \
      constexpr static bool NAME = false; \
      return __VA_ARGS__();               \
    }                                     \
  }()

// DTYPE: a Dtype (params/dtype.h).
#define FP16_SWITCH(DTYPE, ...)                                       \
  [&] {                                                               \
    if ((DTYPE) == ::flash::Dtype::kFp16) {                           \
      constexpr static ::flash::Dtype kDtype = ::flash::Dtype::kFp16; \
      return __VA_ARGS__();                                           \
    } else {                                                          \
      constexpr static ::flash::Dtype kDtype = ::flash::Dtype::kBf16; \
      return __VA_ARGS__();                                           \
    }                                                                 \
  }()

// Dtypes of an 8-bit cache.
#define E4M3_SWITCH(DTYPE, ...)                                       \
  [&] {                                                               \
    if ((DTYPE) == ::flash::Dtype::kE4m3) {                           \
      constexpr static ::flash::Dtype kDtype = ::flash::Dtype::kE4m3; \
      return __VA_ARGS__();                                           \
    } else {                                                          \
      constexpr static ::flash::Dtype kDtype = ::flash::Dtype::kInt8; \
      return __VA_ARGS__();                                           \
    }                                                                 \
  }()

// Head dims of kernels over an 8-bit cache.
#define HEADDIM_8BIT_SWITCH(HEAD_DIM, ...) \
  [&] {                                    \
    if (HEAD_DIM <= 64) {                  \
      constexpr static int kHeadDim = 64;  \
      return __VA_ARGS__();                \
    } else if (HEAD_DIM <= 128) {          \
      constexpr static int kHeadDim = 128; \
      return __VA_ARGS__();                \
    } else {                               \
      constexpr static int kHeadDim = 256; \
      return __VA_ARGS__();                \
    }                                      \
  }()

// HEAD_DIM is rounded up to the head dims of plan/tiles.h.
#define HEADDIM_SWITCH(HEAD_DIM, ...)      \
  [&] {                                    \
    if (HEAD_DIM <= 32) {                  \
      constexpr static int kHeadDim = 32;  \
      return __VA_ARGS__();                \
    } else if (HEAD_DIM <= 64) {           \
      constexpr static int kHeadDim = 64;  \
      return __VA_ARGS__();                \
    } else if (HEAD_DIM <= 96) {           \
      constexpr static int kHeadDim = 96;  \
      return __VA_ARGS__();                \
    } else if (HEAD_DIM <= 128) {          \
      constexpr static int kHeadDim = 128; \
      return __VA_ARGS__();                \
    } else if (HEAD_DIM <= 192) {          \
      constexpr static int kHeadDim = 192; \
      return __VA_ARGS__();                \
    } else if (HEAD_DIM <= 256) {          \
      constexpr static int kHeadDim = 256; \
      return __VA_ARGS__();                \
    } else {                               \
      constexpr static int kHeadDim = 512; \
      return __VA_ARGS__();                \
    }                                      \
  }()
