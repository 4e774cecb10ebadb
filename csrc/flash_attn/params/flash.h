// Interface between the binding and the kernel archive: plain data and C++ functions, no torch, no CuTe.
#pragma once

#include <cuda_runtime_api.h>

#include <cstdint>

#include "core/block_list.h"
#include "core/block_range.h"
#include "core/fast_div.h"
#include "core/host_device.h"
#include "core/mask_factors.h"
#include "core/score_bias.h"
#include "core/softcap_series.h"
#include "params/dtype.h"
#include "params/modifiers.h"

namespace flash {

namespace plan {
struct FwdPlan;  // plan/fwd_plan.h
struct BwdPlan;  // plan/bwd_plan.h
}  // namespace plan

// The row max of the online softmax may be below the true maximum by this many powers of 2: probabilities up to 2^8 are
// as exact as those up to 1.
constexpr float kRescaleThresholdLog2 = 8.0f;

// Of an origin: document, first head, first row, first column.
constexpr int kOriginWords = 4;

// Strides count elements and are 64 bits wide: tensors may hold more than 2^31 elements.
struct MatrixStrides {
  int64_t batch = 0;  // unused for packed variable-length tensors; of a page for a paged K/V
  int64_t row = 0;
  int64_t head = 0;
};

// A random state that the host knows, or that lies on the device while a CUDA graph is captured.
struct PhiloxState {
  uint64_t seed = 0;
  uint64_t offset = 0;
  const int64_t* seed_ptr = nullptr;    // when set, it replaces seed
  const int64_t* offset_ptr = nullptr;  // when set, *offset_ptr is added to offset
};

struct Dropout {
  uint32_t threshold = 0;   // an element is kept iff its 32-bit uniform is >= threshold
  float keep_scale = 1.0f;  // 1 / P(kept)
  PhiloxState state;
  int64_t* rng_state = nullptr;  // (2,) int64: the seed and offset used, written by the forward; zeros without dropout
};

// K and V in pages: key j of sequence i is row j % page_size of page block_table[i][j / page_size].
struct PagedKv {
  const int* block_table = nullptr;  // (b, pages_per_sequence) int32; null when K/V are not paged
  int64_t block_table_stride = 0;
  int pages_per_sequence = 0;
  int num_pages = 0;
  FastDiv page_size;
};

// Packed batches. All device arrays are int32. Only run_prepare() reads the caller's arrays, whose values are
// unchecked: the other kernels read one sanitised copy, in which every row belongs to exactly one segment (see
// varlen_first_slot).
struct Varlen {
  const int* cu_seqlens_q = nullptr;  // (b + 1); null for dense batches
  const int* cu_seqlens_k = nullptr;  // (b + 1)
  const int* seqused_k = nullptr;     // (b) or null
  const int* leftpad_k = nullptr;     // (b) or null

  int* segments_q = nullptr;  // (b + 3) first row of each segment of q, non-decreasing; the last is total_q
  int* segments_k = nullptr;  // (b + 3) the same of k; of pages without an upper limit
  // (b, 2) first row and count of each sequence's keys, in a packed tensor or within the pages of the sequence; of a
  // dense batch null: all of k
  int* key_ranges = nullptr;
};

struct Qkv_params {
  const void* __restrict__ q_ptr = nullptr;  // (b, seqlen_q, h, d) or (total_q, h, d)
  const void* __restrict__ k_ptr = nullptr;  // (b, seqlen_k, h_k, d), (total_k, h_k, d) or (pages, page_size, h_k, d)
  const void* __restrict__ v_ptr = nullptr;  // as K
};

struct Flash_fwd_params : Qkv_params {
  void* __restrict__ o_ptr = nullptr;             // as Q
  float* __restrict__ softmax_lse_ptr = nullptr;  // (b, h, seqlen_q) or (h, total_q)
  float* __restrict__ max_logit_ptr = nullptr;    // (h), -inf before the launch; null: not wanted
  void* __restrict__ p_ptr = nullptr;             // S_dmask (b, h, p_rows, p_cols) or null
  MatrixStrides q_strides, k_strides, v_strides, o_strides;

  int b = 0, h = 0, h_k = 0, h_h_k_ratio = 1, d = 0;  // d: head dim of Q and K
  int seqlen_q = 0, seqlen_k = 0;                     // dense: the lengths; varlen: total_q, total_k
  int p_rows = 0, p_cols = 0;

  Window window;
  float scale_softmax = 0.0f;  // multiplies Q K^T
  float softcap = 0.0f;        // 0: none
  SoftcapSeries softcap_series;
  // Softcap, ALiBi, biases as data or a scale that is not positive: scores pass through ScoreMod before the softmax,
  // which takes maxima of raw scores otherwise.
  bool has_score_mod = false;
  bool accumulates_dkv = false;     // of a backward: dk and dv are fp32, and the call adds to them
  bool keeps_dq = false;            // of a backward: softmax_d is for calls over other keys too
  float softmax_scale_log2 = 0.0f;  // the softmax multiplies scores by it: scale log2(e), or 1 after a ScoreMod
  // 0: the row max never lags. Below 0, in the mma.sync family: it falls to the maximum of a block too.
  float rescale_threshold_log2 = kRescaleThresholdLog2;
  const float* __restrict__ alibi_slopes_ptr = nullptr;  // (h) or (b, h)
  int64_t alibi_slopes_batch_stride = 0;
  const float* __restrict__ sinks_ptr = nullptr;  // (h): logits of keys without values, not scaled; null: none

  Varlen varlen;
  PagedKv paged;
  bool has_dropout = false;
  bool batch_invariant = false;  // kernels are chosen by options and head dims alone
  int16_t device = 0;            // it, d_v and accumulates_dkv fill padding: no other parameter's offset changes
  int d_v = 0;                   // head dim of V and O
  Dropout dropout;

  int* tile_count_semaphore = nullptr;  // work tiles handed out so far, cleared before the launch; null: none

  // (b, kOriginWords): where the scores of each sequence begin in a larger matrix of which they are a part. ALiBi and
  // dropout count from there, the window does not (kernels/common/origin.h). Null: they are the whole matrix.
  const int64_t* __restrict__ origins_ptr = nullptr;

  FLASH_HOST_DEVICE int max_head_dim() const { return d > d_v ? d : d_v; }
  FLASH_HOST_DEVICE bool is_varlen() const { return varlen.cu_seqlens_q != nullptr; }
  FLASH_HOST_DEVICE bool keys_packed() const { return is_varlen() || varlen.key_ranges != nullptr; }
  FLASH_HOST_DEVICE bool is_paged() const { return paged.block_table != nullptr; }

  // Softcap alone and ALiBi alone have dedicated kernels.
  Modifiers modifiers() const {
    if (!has_score_mod) return Modifiers::kNone;
    const bool softcaps = softcap > 0.0f, biases = alibi_slopes_ptr != nullptr;
    if (softcaps == biases || !(scale_softmax > 0.0f)) return Modifiers::kAny;
    return softcaps ? Modifiers::kSoftcap : Modifiers::kAlibi;
  }
};

// KV splits of each m_block. A split is a separate work tile, whose partial result run_combine() combines with the
// others.
struct KvSplits {
  int count = 1;
  int64_t rows = 0;                       // of all heads, in the order of the LSE; at most kMaxLength
  float* __restrict__ out_ptr = nullptr;  // (count, rows, d_v); unused where a split has no key that the row sees
  float* __restrict__ lse_ptr = nullptr;  // (count, rows), without sinks; +inf there
};

// Of a kernel that visits the blocks of its work tiles by list.
struct MaskParams {
  MaskFactors factors;
  MaskMatrices matrices;  // of lists and seen
  BlockLists lists;
  SeenBits seen;
  ScoreBias bias;  // of the mma.sync family too
};

struct Flash_fwd_split_params : Flash_fwd_params {
  KvSplits splits;
  MaskParams mask;
};

// The backward takes the parameters of the forward too: O and LSE may come from another call.
struct Flash_bwd_params : Flash_fwd_params {
  const void* __restrict__ do_ptr = nullptr;  // as O
  void* __restrict__ dq_ptr = nullptr;        // as Q
  void* __restrict__ dk_ptr = nullptr;        // as K
  void* __restrict__ dv_ptr = nullptr;        // as V
  MatrixStrides do_strides, dq_strides, dk_strides, dv_strides;

  const float* __restrict__ dlse_ptr = nullptr;  // gradient of the LSE, as the LSE; null: none
  float* __restrict__ softmax_d_ptr = nullptr;   // rowsum(dO * O) - dlse: (b, h, d_rows), or (h, d_rows) and zeroed
  int64_t d_rows = 0;                            // rows of one head, see softmax_d_rows()
  float* __restrict__ dsinks_ptr = nullptr;      // sums per CTA of softmax_d_kernel; zeroed; null: none
  float* __restrict__ dq_accum_ptr = nullptr;    // fp32 dQ in tiles in accumulator order, where the plan has tiles
  int* __restrict__ dq_semaphore_ptr = nullptr;  // deterministic: contributions to each tile so far
  float4* workspace_ptr = nullptr;               // what run_softmax_d() clears of dq_accum and the counters
  int64_t workspace_vectors = 0;
};

// dS of all scores, of Q's dtype or fp32: (b, h, rows, cols), or packed (h, total_q, cols). Rows are whole 16-byte
// vectors.
struct ScoreGradients {
  void* __restrict__ data = nullptr;  // null: not stored
  MatrixStrides strides;
  int cols = 0;
  bool is_float = false;
};

struct Flash_bwd_mask_params : Flash_bwd_params {
  MaskParams mask;     // lists of the kernel for dK and dV
  MaskParams dq_mask;  // of a separate one for dQ
  ScoreGradients ds;   // where the plan may store it
};

// Before every other kernel of a call with packed sequences or a tile_count_semaphore: fills segments_q, segments_k and
// key_ranges, and clears the semaphore. The next kernel of the stream may be launched as its dependent
// (kernels/common/pdl.h).
cudaError_t run_prepare(const Flash_fwd_params& params, cudaStream_t stream);

// Instantiated by the files of instantiations/. Launches the planned kernel on `stream` of the current
// device, which must be params.device; returns the launch status. cudaErrorNotSupported: not in this build.
template <Dtype kDtype, int kHeadDim>
cudaError_t run_mha_fwd_(const Flash_fwd_split_params& params, const plan::FwdPlan& plan, cudaStream_t stream);

// The same by the wgmma family, for GPUs of compute capability 9.0. Q and K have up to kHeadDim columns, V and O up to
// kHeadDimV. With several KV splits it writes their partial results.
template <Dtype kDtype, int kHeadDim, int kHeadDimV = kHeadDim>
cudaError_t run_mha_fwd_wgmma_(const Flash_fwd_split_params& params, const plan::FwdPlan& plan, cudaStream_t stream);

// What run_mha_fwd_wgmma_ leaves to other files: variants with modified scores, and with a mask or biases as data.
template <Dtype kDtype, int kHeadDim>
cudaError_t run_mha_fwd_modified_wgmma_(const Flash_fwd_split_params& params, const plan::FwdPlan& plan,
                                        cudaStream_t stream);
template <Dtype kDtype, int kHeadDim>
cudaError_t run_mha_fwd_listed_wgmma_(const Flash_fwd_split_params& params, const plan::FwdPlan& plan,
                                      cudaStream_t stream);

template <Dtype kDtype, int kHeadDim>
cudaError_t run_mha_bwd_(const Flash_bwd_mask_params& params, const plan::BwdPlan& plan, cudaStream_t stream);

// The same by the wgmma family, for head dims of plan::sm90_bwd_tile().
template <Dtype kDtype, int kHeadDim, int kHeadDimV = kHeadDim>
cudaError_t run_mha_bwd_wgmma_(const Flash_bwd_mask_params& params, const plan::BwdPlan& plan, cudaStream_t stream);

// softmax_d, before the kernels of run_mha_bwd_.
cudaError_t run_softmax_d(const Flash_bwd_params& params, Dtype dtype, cudaStream_t stream);
cudaError_t run_softmax_d(const Flash_bwd_mask_params& params, Dtype dtype, cudaStream_t stream);

// S_dmask from Q, K and a finished LSE.
cudaError_t run_dropout_probs(const Flash_fwd_split_params& params, Dtype dtype, cudaStream_t stream);

// JSON text: architectures, head dims, dtypes and CUDA version of the archive (generated with it).
const char* kernel_build_info();

}  // namespace flash
