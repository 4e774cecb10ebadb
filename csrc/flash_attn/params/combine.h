// Combine of normalised partial results: interface between the binding and the kernel archive.
#pragma once

#include <cuda_runtime_api.h>

#include <cstdint>

#include "params/dtype.h"

namespace flash {

// kFp32, or 1 + the number of a Dtype.
enum class CombineType { kFp32 };

constexpr CombineType combine_type(Dtype dtype) { return static_cast<CombineType>(1 + static_cast<int>(dtype)); }
constexpr Dtype dtype_of(CombineType type) { return static_cast<Dtype>(static_cast<int>(type) - 1); }

constexpr int64_t kCombineVectorBytes = 16;

// Partial results of the same rows over disjoint splits of their keys. A row is (outer, middle, inner): (b, s, h) of
// the caller's, (b, h, seqlen_q) or (1, h, total_q) of a forward's. Strides count elements.
struct Flash_combine_params {
  const void* __restrict__ partial_ptr = nullptr;       // (splits, outer, middle, inner, d)
  const float* __restrict__ lse_partial_ptr = nullptr;  // (splits, outer, middle, inner); an infinity: no key
  void* __restrict__ o_ptr = nullptr;                   // (outer, middle, inner, d)
  float* __restrict__ lse_ptr = nullptr;                // (outer, middle, inner) contiguous
  int64_t partial_strides[4] = {};                      // splits, outer, middle, inner
  int64_t lse_partial_strides[4] = {};                  // the same
  int64_t o_strides[3] = {};                            // outer, middle, inner
  int splits = 0, outer = 0, middle = 0, inner = 0, d = 0;
  CombineType o_type = CombineType::kFp32;
  bool partial_vectors = false;  // partial results may be read in vectors of kCombineVectorBytes
  bool o_vectors = false;        // the same columns of o may be written in vectors of at most kCombineVectorBytes

  const float* __restrict__ sinks_ptr = nullptr;  // (middle), which no partial LSE has in it; null: none
  const int* __restrict__ segments_q = nullptr;   // (segments + 3), as of Varlen: rows of no sequence have no sink
  int segments = 0;
  bool inf_is_invalid = false;  // +inf, but not -inf, makes the row one without keys and sink

  int device = 0;
};

cudaError_t run_combine(const Flash_combine_params& params, CombineType partial_type, cudaStream_t stream);

}  // namespace flash
