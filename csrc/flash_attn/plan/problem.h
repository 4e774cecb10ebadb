// What a call asks for, as far as its plan depends on it. Plain C++17.
#pragma once

#include <cstdint>

#include "core/block_range.h"
#include "params/dtype.h"
#include "params/modifiers.h"

namespace flash {
namespace plan {

// A product of counts, kMany at most. The sizes of expanded tensors multiply to more than 64 bits hold; a launch of
// kMany blocks fails as well, and kMany costs of a block can still be added up.
constexpr int64_t kMany = int64_t{1} << 44;

template <class... Counts>
constexpr int64_t product(int64_t count, Counts... counts) {
  ((count = counts > 0 && count > kMany / counts ? kMany : count * counts), ...);
  return count < kMany ? count : kMany;
}

// What forward and backward have in common.
struct Problem {
  Dtype dtype = Dtype::kBf16;
  bool is_varlen = false;
  int64_t batch = 0, heads = 0, heads_k = 0;
  int head_dim = 0, head_dim_v = 0;    // of Q and K, of V and O
  int64_t seqlen_q = 0, seqlen_k = 0;  // of a sequence; of all sequences of a packed batch; of a page
  Window window;
  Modifiers modifiers = Modifiers::kNone;
  bool has_dropout = false;
  bool has_origins = false;      // ALiBi and dropout count from other positions than those of the sequence
  bool batch_invariant = false;  // only options and head dims may choose a kernel

  constexpr int max_head_dim() const { return head_dim > head_dim_v ? head_dim : head_dim_v; }
  constexpr int64_t group() const { return heads_k > 0 ? heads / heads_k : 1; }
  constexpr bool has_score_mod() const { return modifiers != Modifiers::kNone; }
};

// A forward. Packed sequences count with their mean length: a dense batch and the same sequences packed are one
// problem, and take kernels with the same bits.
struct FwdProblem : Problem {
  bool returns_max_logit = false;

  bool has_key_ranges = false;  // a dense batch of queries over packed or paged keys of device-side lengths
  bool is_paged = false;
  int64_t num_pages = 0, pages_per_sequence = 0;
  int page_size = 1;

  bool fits_tensor_maps = true;  // strides of Q, O and of keys that are not paged (tensor_map_holds())
  bool fits_page_maps = true;    // of K and V in pages

  // Of K and V. Codes are what the decode kernels read; ahead of the other families a pass makes fp16 of them, which is
  // then `dtype`, and the strides and lengths here are those of what it writes.
  Dtype kv_dtype = Dtype::kBf16;
  bool converts_queries = false;  // passes make fp16 of Q ahead, and O's own dtype of fp16 afterwards
  bool gathers_keys = false;  // it gathers them from pages or a cache: room for the longest sequence that there may be

  constexpr int64_t dequantized_bytes() const {
    if (!is_eight_bit(kv_dtype)) return 0;
    return product(is_varlen ? 1 : batch, seqlen_k, heads_k, dtype_bytes(dtype) * (head_dim + head_dim_v));
  }
  constexpr int64_t sequences() const { return batch > 0 ? batch : 1; }
  constexpr int64_t rows() const { return is_varlen ? (seqlen_q + sequences() - 1) / sequences() : seqlen_q; }
  // Maximum lengths of packed calls and the width of a block table may be loose: they change no bit of a result.
  constexpr int64_t keys() const {
    const int64_t own = is_varlen ? seqlen_k / sequences() : seqlen_k;
    if (!is_paged) return own;
    const int64_t paged = product(num_pages, page_size) / sequences();
    return is_varlen || paged < own ? paged : own;
  }
  // Rows of the LSE.
  constexpr int64_t all_rows() const { return product(heads, is_varlen ? 1 : batch, seqlen_q); }
  // Blocks of `rows_of_block` rows, of all sequences and heads.
  constexpr int64_t blocks(int rows_of_block) const {
    return product(batch, heads, (rows() + rows_of_block - 1) / rows_of_block);
  }
  constexpr bool masked_right() const { return window.may_mask_right(); }
  // Whether m_blocks have different trip counts.
  constexpr bool has_variable_trip_count() const { return masked_right() || is_varlen || has_key_ranges; }
  // Keys of one head in all sequences of a packed batch, or in one sequence; of pages, at most as many as the block
  // table can list.
  constexpr int64_t keys_of_head() const {
    if (!is_paged) return seqlen_k;
    const int64_t listed = product(batch, pages_per_sequence);
    return product(listed < num_pages ? listed : num_pages, page_size);
  }
};

// What a backward runs: everything, or one stage of several calls whose sums of dQ are one fp32 tensor. kBegin clears
// it and computes softmax_d, kAdd adds dQ of the call's keys, kEnd converts it.
enum class BwdStage { kAll, kBegin, kAdd, kEnd };

struct BwdProblem : Problem {
  BwdStage stage = BwdStage::kAll;
  bool deterministic = false;
  bool accumulates_dkv = false;  // dK and dV are added to fp32 tensors
  bool fits_tensor_maps = true;  // strides of all inputs and gradients

  constexpr bool is_plain() const { return !has_dropout && !has_score_mod(); }
};

// Head dim that Q, K and V are padded to where kernels know one head dim. Zero columns add nothing to Q K^T, and make
// columns of O that are sliced off.
constexpr int padded_head_dim(int max_head_dim) { return (max_head_dim + 7) / 8 * 8; }

// A (batch, rows, heads, d) or packed (rows, heads, d) matrix; strides in elements.
struct MatrixShape {
  bool is_packed;
  int64_t batch, rows, heads;
  int64_t batch_stride, row_stride, head_stride;
};

// Whether a tensor map can describe it: strides of 16-byte vectors, below 2^40 bytes, no empty axes. Packed rows are an
// axis of kPackedRows rows, whose origin has a stride of 2^34 bytes less that of a row (TmaRows).
constexpr bool tensor_map_holds(const MatrixShape& matrix, Dtype dtype) {
  constexpr int64_t kVector = 16, kMaxStride = int64_t{1} << 40, kMaxPackedStride = int64_t{1} << 34;
  const int64_t bytes = dtype_bytes(dtype);
  const auto holds = [bytes](int64_t length, int64_t stride) {
    if (length == 1) return true;  // its stride is never used
    return length > 1 && 0 <= stride && stride < kMaxStride / bytes && stride * bytes % kVector == 0;
  };
  if (!holds(matrix.heads, matrix.head_stride)) return false;
  if (!matrix.is_packed) return holds(matrix.rows, matrix.row_stride) && holds(matrix.batch, matrix.batch_stride);
  return holds(2, matrix.row_stride) && matrix.row_stride <= kMaxPackedStride / bytes;
}

}  // namespace plan
}  // namespace flash
