// Attention over a KV cache: interface between the binding and the kernel archive.
#pragma once

#include "core/kv_schedule.h"
#include "core/mask_bits.h"
#include "params/flash.h"

namespace flash {

// Rotary embedding of the first 2 * pairs dimensions (Su et al., "RoFormer", 2021).
struct Rotary {
  const void* __restrict__ cos_ptr = nullptr;  // (rows, pairs), dtype of q; null: none
  const void* __restrict__ sin_ptr = nullptr;  // as cos
  int64_t cos_stride = 0, sin_stride = 0;      // of a row
  int rows = 0;
  int pairs = 0;
  bool interleaved = false;   // pairs (2 i, 2 i + 1), else (i, i + pairs)
  bool one_position = false;  // all queries are rotated as the first one: no mask
};

// Descales of an 8-bit K or V: value = 8-bit value * descale. A stride is 0 along an axis that they do not vary along.
struct KvDescale {
  const float* ptr = nullptr;  // null: 1
  bool by_row = false;         // of pages or rows: an element of the batch is a page or sequence of the cache
  int64_t batch = 0, row = 0, head = 0, col = 0;

  // Of a request and K/V head, unless they are by row.
  FLASH_HOST_DEVICE const float* of_head(int64_t request, int64_t head_k) const {
    return ptr + request * batch + head_k * head;
  }
  FLASH_HOST_DEVICE const float* of_row(int64_t page, int64_t at_row, int64_t head_k) const {
    return ptr + page * batch + at_row * row + head_k * head;
  }
};

// In the inherited fields, k and v are the caches (cache_batch, capacity, h_k, d) or pages (pages, page_size, h_k, d).
struct Flash_kvcache_params : Flash_fwd_params {
  const int* __restrict__ seqlens_k = nullptr;        // (b) rows cached before the call; null: capacity
  const int* __restrict__ cache_batch_idx = nullptr;  // (b) or null
  const int* __restrict__ leftpad_k = nullptr;        // (b) or null
  int cache_batch = 0;                                // sequences of a cache that is not paged
  int capacity = 0;                                   // rows that a sequence can hold

  const void* __restrict__ knew_ptr = nullptr;  // (b, seqlen_new, h_k, d) or null
  const void* __restrict__ vnew_ptr = nullptr;  // as knew
  void* kcache_ptr = nullptr;                   // where knew goes: k_ptr
  void* vcache_ptr = nullptr;
  MatrixStrides knew_strides, vnew_strides;
  int seqlen_new = 0;
  Rotary rotary;

  FastDiv group;           // query heads of a K/V head
  int row_tiles = 0;       // row tiles of one head tile and sequence of a dense batch
  int work_items = 0;      // work items: row tiles of all sequences, or slots of a packed batch; each of all K/V heads
  bool q_vectors = false;  // rows of q may be read in 16-byte vectors
  bool o_vectors = false;  // rows of o may be written in 8-byte vectors
  int kv_vector_bytes = 16;  // bytes of the vectors in which k and v may be read: 16, 4 or 2
  bool new_vectors = false;  // new rows and caches may be read and written in 16-byte vectors
  bool is_plain = false;     // KvVariant::kPlain (kernels/decode/variant.h),
  bool swaps_ab = false;     // and kSwapAb

  int tile_size = 0;  // index into plan::kKvTiles; the next fields are that tile's
  int tile_rows = 0, block_n = 0, padded_dim = 0;
  int stages = 0;
  int thread_blocks = 0;
  int64_t min_blocks_per_cta = 1;
  SplitPoints split_points;
  int split_blocks = kUnbounded;  // n_blocks of a fixed split (batch-invariant); else unbounded
  int max_splits = 0;             // workspace slots of a tile when the split rule is kFixedSplits
  int slot_rows = 0;
  bool combines = false;          // some tile may be split
  bool in_clusters = false;       // CTAs are launched as clusters of two (kernels/decode/cluster_pair.h)
  bool combines_one_row = false;  // all warps of a CTA of the combine add up one row
  const SchedHeader* __restrict__ schedule = nullptr;  // header and entries; null: every CTA finds its own range
  float* partial_o = nullptr;                          // (slots, slot_rows, padded head dim)
  float* partial_stats = nullptr;                      // (slots, slot_rows, 2): row max of the raw scores, row sum

  // An 8-bit cache. The kernels of 16 bits know q's dtype by their template.
  Dtype q_dtype = Dtype::kBf16, kv_dtype = Dtype::kBf16;
  Dtype new_dtype = Dtype::kBf16;  // of knew and vnew: that of q or of the cache
  KvDescale k_descale, v_descale;
  float* k_token_descale_ptr = nullptr;  // where the append writes the descales of new rows, in k_descale's layout;
  float* v_token_descale_ptr = nullptr;  // null: it quantises by k_descale and v_descale

  // The schedule of a packed batch is empty unless some sequence has more keys than this; -1: it never is.
  int skip_up_to_keys = -1;

  // Attention, combine and schedule: a tile has a K/V head or two neighbouring ones, and their query heads.
  int tile_heads = 1;
  int head_tiles = 0;  // tiles of all K/V heads
  int tile_query_heads = 1;
  FastDiv tile_group;  // tile_query_heads; kernels that read the divisor from it take more registers

  MaskBits mask_bits;
};

// Where 8-bit K and V go as fp16, for kernels that do not read 8 bits.
struct DequantizedKv {
  void* k_ptr = nullptr;  // (rows, h_k, d), contiguous
  void* v_ptr = nullptr;
  int rows_per_sequence = 0;  // row 0 of sequence i is row i * rows_per_sequence, and is its key 0; 0: packed rows,
                              // at the rows of the 8-bit ones
  int* key_ranges = nullptr;  // (b, 2), written: Varlen::key_ranges of these rows; null: not wanted
  bool k_by_power = false;    // K takes the power of two of its descale alone: eight_bit::key_power()
  int multiprocessors = 0;    // of the device
};

// Queries or results, (b, seqlen_q, h, d) or packed, that are multiplied by descales and change their type: e4m3 to
// fp16 or bf16, bf16 to fp16, fp16 to bf16. Those of 16 bits may be one tensor, and then have rows of 16-byte vectors.
struct RescaledRows {
  const void* from_ptr = nullptr;
  void* to_ptr = nullptr;
  MatrixStrides from_strides, to_strides;
  Dtype from_dtype = Dtype::kBf16, to_dtype = Dtype::kFp16;
  bool from_vectors = true;        // rows of e4m3 may be read in 8-byte vectors
  KvDescale descales[2];           // by row: none
  bool without_key_power = false;  // the second one is K's, less the power of two that K takes
  bool of_kv_heads[2] = {true, true};
};

// kDtype is that of the cache; the rules of run_mha_fwd_ hold. Launches the attention and, where tiles may be split,
// the combine.
template <Dtype kDtype, int kHeadDim>
cudaError_t run_mha_fwd_split_(const Flash_kvcache_params& params, cudaStream_t stream);

// Combines the split tiles.
cudaError_t run_decode_combine(const Flash_kvcache_params& params, Dtype dtype, cudaStream_t stream);

// Appends the new rows to the cache.
cudaError_t run_kvcache_append(const Flash_kvcache_params& params, Dtype dtype, cudaStream_t stream);

// Appends the new rows to an 8-bit cache, quantised unless they have its dtype.
cudaError_t run_kvcache_append_quantized(const Flash_kvcache_params& params, cudaStream_t stream);

// Fills cached_keys (b, 2) for the forward: request i has keys from row first_row + cache row * rows_per_sequence on;
// none if it is invalid.
cudaError_t run_kvcache_keys(const Flash_kvcache_params& params, int rows_per_sequence, int* cached_keys,
                             cudaStream_t stream);

// After a forward with sinks: +inf as LSE of inactive requests.
cudaError_t run_kvcache_lse(const Flash_kvcache_params& params, cudaStream_t stream);

// Writes the rotated queries to `rotated` (b, seqlen_q, h, d), contiguous; not those of invalid requests.
cudaError_t run_kvcache_rotate(const Flash_kvcache_params& params, Dtype dtype, void* rotated, cudaStream_t stream);

// Dequantises the keys and values that some query sees; those of packed rows all. Of a sequence that has more keys than
// rows_per_sequence it takes the first ones. Finite values beyond the range of fp16 become its largest.
cudaError_t run_dequantize_kv(const Flash_kvcache_params& params, const DequantizedKv& to, cudaStream_t stream);

// Finite values beyond the range of fp16 become its largest there; zeros stay zeros whatever the descale.
cudaError_t run_rescale_rows(const Flash_kvcache_params& params, const RescaledRows& rows, cudaStream_t stream);

// Fills `schedule` (header and entries).
cudaError_t run_kvcache_plan(const Flash_kvcache_params& params, SchedHeader* schedule, cudaStream_t stream);

}  // namespace flash
