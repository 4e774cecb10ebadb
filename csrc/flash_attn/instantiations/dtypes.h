// Instantiates a function of params/ for the dtypes of a kernel file. The machine code of two dtypes differs little: in
// one object it compresses to hardly more than that of one. tools/kernel_build.py defines FLASH_WITHOUT_... for the
// dtypes that a development subset leaves out.
#pragma once

#define FLASH_INSTANTIATE_ONE(FUNCTION, ...) \
  template decltype(flash::FUNCTION<__VA_ARGS__>) flash::FUNCTION<__VA_ARGS__>;

#ifdef FLASH_WITHOUT_FP16
#define FLASH_INSTANTIATE_FP16(...)
#else
#define FLASH_INSTANTIATE_FP16(FUNCTION, ...) FLASH_INSTANTIATE_ONE(FUNCTION, flash::Dtype::kFp16, __VA_ARGS__)
#endif
#ifdef FLASH_WITHOUT_BF16
#define FLASH_INSTANTIATE_BF16(...)
#else
#define FLASH_INSTANTIATE_BF16(FUNCTION, ...) FLASH_INSTANTIATE_ONE(FUNCTION, flash::Dtype::kBf16, __VA_ARGS__)
#endif
#ifdef FLASH_WITHOUT_E4M3
#define FLASH_INSTANTIATE_E4M3(...)
#else
#define FLASH_INSTANTIATE_E4M3(FUNCTION, ...) FLASH_INSTANTIATE_ONE(FUNCTION, flash::Dtype::kE4m3, __VA_ARGS__)
#endif
#ifdef FLASH_WITHOUT_INT8
#define FLASH_INSTANTIATE_INT8(...)
#else
#define FLASH_INSTANTIATE_INT8(FUNCTION, ...) FLASH_INSTANTIATE_ONE(FUNCTION, flash::Dtype::kInt8, __VA_ARGS__)
#endif

// After FUNCTION: the template's head dims.
#define FLASH_INSTANTIATE(FUNCTION, ...)        \
  FLASH_INSTANTIATE_FP16(FUNCTION, __VA_ARGS__) \
  FLASH_INSTANTIATE_BF16(FUNCTION, __VA_ARGS__)

// For the dtypes of an 8-bit cache.
#define FLASH_INSTANTIATE_8BIT(FUNCTION, ...)   \
  FLASH_INSTANTIATE_E4M3(FUNCTION, __VA_ARGS__) \
  FLASH_INSTANTIATE_INT8(FUNCTION, __VA_ARGS__)
