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
  bool has_origins = false;     // ALiBi and dropout count from other positions than those of the sequence
  int64_t mask_matrices = 0;    // of a mask as data (batch entries x mask heads); 0: no mask
  int64_t mask_block_rows = 0;  // of its block map; 0: it has none
  bool hides_nothing = false;   // has_mask(), but of a mask that hides nothing (with_lists())
  bool has_bias = false;        // as data
  bool has_softcap = false;
  bool has_key_lengths = false;  // seqused_k or leftpad_k
  bool batch_invariant = false;  // only options and head dims may choose a kernel

  constexpr int max_head_dim() const { return head_dim > head_dim_v ? head_dim : head_dim_v; }
  constexpr int64_t group() const { return heads_k > 0 ? heads / heads_k : 1; }
  constexpr int64_t sequences() const { return batch > 0 ? batch : 1; }
  constexpr bool has_score_mod() const { return modifiers != Modifiers::kNone; }
  constexpr bool has_mask() const { return mask_matrices > 0; }
};

// Options that narrow the choice of a decode kernel. A KvCachePlan is made without them, so no split point may depend
// on them.
struct DecodeOptions {
  int seqlen_new = 0;  // rows that the call appends to each sequence
  Window window;
  bool has_score_mod = false;
  bool has_rotary = false;
  bool has_leftpad = false;
  int page_size = 0;           // 0: the cache is not paged
  bool q_vectors = true;       // rows of q may be read in 16-byte vectors
  int kv_vector_bytes = 16;    // bytes of the vectors in which k and v may be read
  bool v_per_channel = false;  // V has a scale for each column
  bool has_mask_bits = false;
};

// A call as the decode kernels see it, without the lengths, which only the device reads.
struct DecodeProblem {
  int batch = 0;
  int seqlen_q = 0;
  int heads = 0;
  int heads_k = 0;
  int head_dim = 0;
  int capacity = 0;    // rows that the cache holds per sequence
  int num_splits = 0;  // 0: the linearised work is split evenly; n: at most n splits per sequence
  bool batch_invariant = false;
  bool is_packed = false;         // a packed forward: seqlen_q is then the sum of the queries of all sequences
  int packed_keys = 0;            // keys of a packed sequence, on average
  Dtype kv_dtype = Dtype::kBf16;  // of the cache; 8-bit dtypes have one plan
  bool is_forward = false;        // not over a cache: the same bits dense and packed
  DecodeOptions options = {};

  constexpr int group() const { return heads_k > 0 ? heads / heads_k : 1; }
  // Packed rows of one K/V head and sequence, in a packed batch on average.
  constexpr int64_t all_rows() const { return static_cast<int64_t>(seqlen_q) * group(); }
  constexpr int64_t rows() const {
    const int64_t sequences = is_packed && batch > 0 ? batch : 1;
    return (all_rows() + sequences - 1) / sequences;
  }
  constexpr bool has_queries() const { return batch > 0 && seqlen_q > 0 && heads > 0; }
  constexpr bool appends() const { return batch > 0 && options.seqlen_new > 0 && heads_k > 0; }
};

// A forward. Packed sequences count with their mean length: a dense batch and the same sequences packed are one
// problem, and take kernels with the same bits.
struct FwdProblem : Problem {
  bool returns_max_logit = false;
  bool exact_row_max = false;  // the row max of the softmax must not lag

  bool has_key_ranges = false;  // a dense batch of queries over packed or paged keys of device-side lengths
  bool is_paged = false;
  int64_t num_pages = 0, pages_per_sequence = 0;
  int page_size = 1;

  bool fits_tensor_maps = true;  // strides of Q, O and of keys that are not paged (tensor_map_holds())
  bool fits_page_maps = true;    // of K and V in pages

  bool returns_probabilities = false;  // S_dmask
  bool has_sinks = false;

  // The dtypes as the caller gave them, and that of O. Prefill kernels take 8-bit K and V dequantised to fp16, which is
  // then `dtype`; the strides and lengths here are those of the dequantised rows.
  Dtype q_dtype = Dtype::kBf16, kv_dtype = Dtype::kBf16, out_dtype = Dtype::kBf16;
  bool converts_queries = false;  // Q becomes fp16 before the prefill kernel, and O bf16 after it
  bool gathers_keys = false;      // from pages or a cache: the buffer has room for dequantized_rows of each sequence
  int dequantized_rows = 0;       // 0: packed rows keep their places
  bool fits_fp8_maps = false;     // strides of 8-bit Q and K and of O
  bool has_head_scales = true;    // no scale per row, page or channel

  bool fast_exp = false;  // wanted: P as e4m3 straight from the scores

  DecodeProblem decode;          // the call as the decode kernels see it
  bool is_cached = false;        // K and V are a KV cache, which may receive new rows first
  bool has_prefill_view = true;  // the prefill kernels can read q and the cache, and write out

  // Results besides O, LSE and S_dmask, which the decode and the e4m3 kernels do not have.
  constexpr bool returns_more() const { return returns_max_logit; }
  constexpr bool has_queries() const { return seqlen_q > 0 && heads > 0 && (is_varlen || batch > 0); }
  constexpr bool has_keys() const { return seqlen_k > 0 && heads_k > 0 && (is_varlen || batch > 0); }
  constexpr int64_t dequantized_bytes() const {
    if (!is_eight_bit(kv_dtype)) return 0;
    return product(is_varlen ? 1 : batch, seqlen_k, heads_k, dtype_bytes(dtype) * (head_dim + head_dim_v));
  }
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
  constexpr bool has_variable_trip_count() const { return masked_right() || is_varlen || has_key_ranges || has_mask(); }
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
  // Of a sequence; packed ones count with their mean length.
  constexpr int64_t rows() const { return is_varlen ? seqlen_q / sequences() : seqlen_q; }
  constexpr int64_t keys() const { return is_varlen ? seqlen_k / sequences() : seqlen_k; }
};

// Head dim that Q, K and V are padded to where kernels know one head dim. Zero columns add nothing to Q K^T, and make
// columns of O that are sliced off.
constexpr int padded_head_dim(int max_head_dim) { return (max_head_dim + 7) / 8 * 8; }

constexpr DecodeProblem padded(DecodeProblem problem, int head_dim) {
  if (head_dim == 0) return problem;
  problem.head_dim = head_dim;
  problem.options.q_vectors = true;  // of the copies
  problem.options.kv_vector_bytes = 16;
  return problem;
}

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
