// The launches of a forward: launch() walks the stages of its plan.
#pragma once

#include <ATen/core/Tensor.h>
#include <c10/cuda/CUDAStream.h>

#include <algorithm>
#include <optional>

#include "api/device.h"
#include "api/mask.h"
#include "api/quantized.h"
#include "api/set_params.h"
#include "api/tensors.h"
#include "params/combine.h"
#include "params/flash.h"
#include "params/fp8.h"
#include "params/kvcache.h"
#include "plan/call_plan.h"

namespace flash {

// The instantiations that a plan names (flash_api.cpp). q_dtype: of 16 bits.
cudaError_t run_mha_fwd(const Flash_fwd_split_params& params, const plan::FwdPlan& plan, cudaStream_t stream);
cudaError_t run_mha_fwd_fp8(const Flash_fwd_fp8_params& params, const plan::FwdPlan& plan, cudaStream_t stream);
cudaError_t run_mha_fwd_split(const Flash_kvcache_params& params, bool by_wgmma, Dtype q_dtype, cudaStream_t stream);

// The plan of a call whose sizes the kernels can count.
inline plan::FwdPlan checked_plan(const plan::FwdProblem& problem, int device, int64_t sm_margin) {
  const plan::FwdPlan plan = plan::plan_fwd(problem, device_of(device, sm_margin), forced_family());
  if (plan.decode.has_value() && plan.decode->is_too_large) {
    const plan::DecodeProblem& decode = problem.decode;
    const int64_t rows = plan::kv_tile(decode.head_dim, plan.decode->tile_size, decode.kv_dtype).rows();
    checks::fail("q", "expected at most ", plan::kMaxKvTiles, " tiles of ", rows, " rows, got ",
                 plan.decode->work_items, " for each of ", int64_t{decode.heads_k}, " K/V heads");
  }
  return plan;
}

// ---- parameters of the decode kernels ----

// What every kernel of a problem reads, the schedule kernel too.
inline void set_params_sizes(Flash_kvcache_params& params, const plan::DecodeProblem& problem, int device) {
  params.b = problem.batch;
  params.h = problem.heads;
  params.h_k = problem.heads_k;
  params.h_h_k_ratio = problem.group();
  params.group = FastDiv(std::max(params.h_h_k_ratio, 1));
  params.d = params.d_v = problem.head_dim;
  params.seqlen_q = problem.seqlen_q;
  params.seqlen_new = problem.options.seqlen_new;
  params.capacity = problem.capacity;
  params.window = problem.options.window;
  params.q_vectors = problem.options.q_vectors;
  params.kv_vector_bytes = problem.options.kv_vector_bytes;
  params.kv_dtype = problem.kv_dtype;
  params.device = static_cast<int16_t>(device);
}

inline void set_params_plan(Flash_kvcache_params& params, const plan::DecodePlan& plan) {
  const plan::KvTile tile = plan::kv_tile(params.d, plan.tile_size, params.kv_dtype);
  params.tile_size = plan.tile_size;
  params.tile_rows = tile.rows();
  params.block_n = plan.block_n;
  params.tile_heads = plan.tile_heads;
  params.head_tiles = plan.head_tiles;
  params.tile_query_heads = std::max(params.h_h_k_ratio * plan.tile_heads, 1);
  params.tile_group = FastDiv(params.tile_query_heads);
  params.padded_dim = tile.head_dim;
  params.stages = plan.stages;
  params.row_tiles = plan.row_tiles;
  params.work_items = static_cast<int>(plan.work_items);
  params.thread_blocks = plan.thread_blocks;
  params.min_blocks_per_cta = plan.min_blocks_per_cta;
  params.split_points = plan.split_points;
  params.split_blocks = plan.split_blocks;
  params.max_splits = plan.max_splits;
  params.slot_rows = plan.slot_rows;
  params.combines = plan.combines;
  params.combines_one_row = plan.combines_one_row;
  params.is_plain = plan.is_plain;
  params.swaps_ab = plan.swaps_ab;
  params.in_clusters = plan.in_clusters;
}

inline void set_params_workspace(Flash_kvcache_params& params, const plan::DecodePlan& plan, float* workspace) {
  params.partial_o = workspace;
  params.partial_stats = workspace + plan.slots * plan.slot_rows * params.padded_dim;
}

inline void set_params_scales(Flash_kvcache_params& params, const KernelScales& scales, Dtype q_dtype) {
  params.q_dtype = q_dtype;
  params.k_descale = scales.k;
  params.v_descale = scales.v;
}

// ---- a call ----

// What its stages read and write, and the memory of these until it ends.
struct FwdLaunch {
  const plan::FwdProblem& problem;
  const plan::FwdPlan& plan;
  const at::Tensor&
      q;  // as the attention kernel reads it, unless it is rotated or converted; in 16 bits, e4m3 if is_fp8
  const at::Tensor& k;
  const at::Tensor& v;
  const at::Tensor& out;
  const QuantArgs& quant;
  OptionalTensor eight_bit_q = {};  // q before its conversion to 16 bits

  Flash_fwd_split_params params;           // of the prefill kernels
  std::optional<Flash_kvcache_params> kv;  // of the decode kernels, and of the stages before and after a cached call
  KernelScales scales;

  at::Tensor workspace, decode_workspace, key_ranges, dequantized, rotated, converted, vt, partials, block_lists;

  cudaStream_t stream() const { return c10::cuda::getCurrentCUDAStream().stream(); }
  bool runs(plan::Stage stage) const { return plan.stages.has(stage); }
  // The call as its stages see it, which may have redirected q, k and v.
  Flash_fwd_params& forward() {
    return plan.family == plan::Family::kDecode ? static_cast<Flash_fwd_params&>(*kv) : params;
  }
};

// A forward without a cache, by the decode kernels. skip_up_to_keys: they exit unless a sequence has more.
inline Flash_kvcache_params set_params_decode(const FwdLaunch& launch, const Flash_fwd_params& forward,
                                              int skip_up_to_keys = -1) {
  Flash_kvcache_params params;
  static_cast<Flash_fwd_params&>(params) = forward;
  set_params_sizes(params, plan::padded(launch.problem.decode, launch.plan.pad_head_dim), forward.device);
  set_params_plan(params, *launch.plan.decode);
  set_params_scales(params, launch.scales, dtype_of(launch.q));
  params.cache_batch = forward.b;
  params.skip_up_to_keys = skip_up_to_keys;
  params.o_vectors = vector_bytes(launch.out) == 16;
  return params;
}

// Its memory: a schedule and segments of packed sequences, and the partial results.
inline at::Tensor allocate_decode_workspace(Flash_kvcache_params& params, const plan::DecodePlan& plan,
                                            const at::Tensor& q) {
  const int64_t schedule_words = params.is_varlen() ? plan.schedule_words : 0;
  const int64_t workspace_words = plan.combines ? plan.workspace_words : 0;
  const int64_t all_words = schedule_words + workspace_words + varlen_words(params);
  if (all_words == 0) return at::Tensor();
  at::Tensor workspace = new_empty(q, {all_words}, at::kInt);
  int* const words = workspace.mutable_data_ptr<int>();
  if (workspace_words > 0) set_params_workspace(params, plan, reinterpret_cast<float*>(words + schedule_words));
  if (schedule_words > 0) params.schedule = reinterpret_cast<const SchedHeader*>(words);
  set_params_varlen_workspace(params, words + schedule_words + workspace_words);  // filled by the schedule kernel
  return workspace;
}

inline void schedule(const Flash_kvcache_params& params, const at::Tensor& q, cudaStream_t stream) {
  if (params.schedule == nullptr) return;
  check_launch(run_kvcache_plan(params, const_cast<SchedHeader*>(params.schedule), stream), "kvcache_plan_kernel", q,
               params.kv_dtype);
}

inline void decode(const Flash_kvcache_params& params, const plan::DecodePlan& plan, const at::Tensor& q,
                   cudaStream_t stream) {
  const char* const kernel = plan.by_wgmma ? "flash_fwd_split_wgmma_kernel" : "flash_fwd_split_kernel";
  check_launch(run_mha_fwd_split(params, plan.by_wgmma, dtype_of(q), stream), kernel, q, params.kv_dtype);
}

// ---- stages ----

inline void append(FwdLaunch& launch) {
  const bool quantizes = is_eight_bit(launch.kv->kv_dtype);
  check_launch(quantizes ? run_kvcache_append_quantized(*launch.kv, launch.stream())
                         : run_kvcache_append(*launch.kv, dtype_of(launch.q), launch.stream()),
               quantizes ? "kvcache_quantize_kernel" : "kvcache_append_kernel", launch.q);
}

inline void find_keys(FwdLaunch& launch) {
  const MatrixStrides& k = launch.kv->k_strides;
  const int64_t rows = launch.kv->is_paged() ? 0 : rows_per_sequence(k);
  check_launch(run_kvcache_keys(*launch.kv, static_cast<int>(rows), launch.params.varlen.key_ranges, launch.stream()),
               "kvcache_keys_kernel", launch.q);
}

inline void rotate(FwdLaunch& launch) {
  launch.rotated = new_empty(launch.q, launch.q.sizes(), launch.q.scalar_type());
  launch.params.q_ptr = launch.rotated.const_data_ptr();
  launch.params.q_strides = matrix_strides(launch.rotated);
  check_launch(run_kvcache_rotate(*launch.kv, dtype_of(launch.q), launch.rotated.mutable_data_ptr(), launch.stream()),
               "kvcache_rotate_kernel", launch.q);
}

// What the dequantising kernel reads in a call without a cache.
inline Flash_kvcache_params dequantized_source(const FwdLaunch& launch) {
  if (launch.kv.has_value()) return *launch.kv;
  Flash_kvcache_params params;
  static_cast<Flash_fwd_params&>(params) = launch.params;
  params.group = FastDiv(std::max(params.h_h_k_ratio, 1));
  params.capacity = params.seqlen_k;
  params.cache_batch = params.b;
  params.kv_vector_bytes = std::min(vector_bytes(launch.k), vector_bytes(launch.v));
  params.kv_dtype = dtype_of(launch.k);
  set_params_scales(params, launch.scales, dtype_of(launch.q));
  return params;
}

// The prefill kernel's view of K and V once they are dequantised.
inline void set_params_dequantized(Flash_fwd_params& params, int rows) {
  params.k_strides = params.v_strides = dequantized_strides(params.h_k, params.d, rows);
  if (!params.is_paged()) return;
  params.seqlen_k = static_cast<int>(std::min<int64_t>(static_cast<int64_t>(params.b) * rows, kMaxLength));
  params.paged = PagedKv{};
}

// Gathers and dequantises the visible rows of K and V. A converted Q and the rescaled O take the scales that are not
// per row: products of bf16 with these would lose bits. K takes the power of two of its scale, as far as it stays exact
// in fp16: Q times the whole scale could leave the range of fp16.
inline void dequantize(FwdLaunch& launch) {
  const bool converts = launch.runs(plan::Stage::kConvertQuery);
  Flash_kvcache_params source = dequantized_source(launch);
  Flash_fwd_params& params = launch.params;
  const int rows = launch.plan.dequantized_rows;
  const int64_t bytes = launch.plan.dequantized_bytes;
  if (!launch.kv.has_value()) {
    set_params_dequantized(params, rows);
    if (source.is_paged()) {
      launch.key_ranges = new_empty(launch.q, {params.b, 2}, at::kInt);
      params.varlen.key_ranges = launch.key_ranges.mutable_data_ptr<int>();
    }
  }
  launch.dequantized = new_empty(launch.q, {bytes}, at::kByte);
  DequantizedKv to;
  to.k_ptr = launch.dequantized.mutable_data_ptr();
  to.v_ptr = static_cast<char*>(to.k_ptr) + bytes / 2;
  to.rows_per_sequence = rows;
  to.key_ranges = rows > 0 ? params.varlen.key_ranges : nullptr;
  to.multiprocessors = device_facts(source.device).multiprocessors;
  if (converts) {
    to.k_by_power = !source.k_descale.by_row;
    if (!source.v_descale.by_row) source.v_descale = KvDescale{};
  }
  if (source.b > 0) {
    check_launch(run_dequantize_kv(source, to, launch.stream()), "dequantize_kv_kernel", launch.q);
  }
  params.k_ptr = to.k_ptr;
  params.v_ptr = to.v_ptr;
  params.k_strides = params.v_strides = dequantized_strides(source.h_k, source.d, rows);
  params.paged = PagedKv{};
}

inline void rescale_rows(FwdLaunch& launch, const RescaledRows& rows) {
  Flash_kvcache_params params;
  static_cast<Flash_fwd_params&>(params) = launch.forward();
  params.group = FastDiv(std::max(params.h_h_k_ratio, 1));
  check_launch(run_rescale_rows(params, rows, launch.stream()), "rescale_rows_kernel", launch.q);
}

// 8-bit queries, times their scale unless K took it.
inline RescaledRows eight_bit_query_rows(const FwdLaunch& launch) {
  RescaledRows rows;
  const at::Tensor& q = *launch.eight_bit_q;
  rows.from_ptr = q.const_data_ptr();
  rows.from_strides = q.dim() == 4 ? cache_strides(q) : matrix_strides(q);
  rows.from_dtype = dtype_of(q);
  rows.from_vectors = is_aligned(q, 8);
  rows.descales[0] = launch.scales.q;
  rows.of_kv_heads[0] = launch.scales.q_of_kv_heads;
  return rows;
}

inline void widen_query(FwdLaunch& launch) {
  RescaledRows rows = eight_bit_query_rows(launch);
  rows.to_ptr = launch.q.mutable_data_ptr();
  rows.to_strides = launch.forward().q_strides;
  rows.to_dtype = dtype_of(launch.q);
  rescale_rows(launch, rows);
}

// Q as fp16, times the part of its scale that is not folded into K's.
inline void convert_query(FwdLaunch& launch) {
  RescaledRows rows;
  if (launch.eight_bit_q.has_value() && !launch.runs(plan::Stage::kWidenQuery)) {
    rows = eight_bit_query_rows(launch);
  } else {
    rows.from_ptr = launch.params.q_ptr;
    rows.from_strides = launch.params.q_strides;
    rows.from_dtype = Dtype::kBf16;
  }
  launch.converted = new_empty(launch.q, launch.q.sizes(), at::kHalf);
  rows.to_ptr = launch.converted.mutable_data_ptr();
  rows.to_strides = converted_query_strides(launch.params);
  rows.to_dtype = Dtype::kFp16;
  if (!launch.scales.k.by_row) rows.descales[1] = launch.scales.k;
  rows.without_key_power = true;
  rescale_rows(launch, rows);
  launch.params.q_ptr = rows.to_ptr;
  launch.params.q_strides = rows.to_strides;
}

// Rescales O in place, fp16 to bf16, by V's scale unless that is per row.
inline void rescale_output(FwdLaunch& launch) {
  RescaledRows rows;
  rows.from_ptr = rows.to_ptr = launch.params.o_ptr;
  rows.from_strides = rows.to_strides = launch.params.o_strides;
  rows.from_dtype = Dtype::kFp16;
  rows.to_dtype = Dtype::kBf16;
  if (!launch.scales.v.by_row) rows.descales[0] = launch.scales.v;
  rescale_rows(launch, rows);
}

inline Flash_fwd_fp8_params fp8_params(const FwdLaunch& launch) {
  Flash_fwd_fp8_params params;
  static_cast<Flash_fwd_params&>(params) = launch.params;
  params.q_descale = fp8_descale(launch.quant.q, params.h);
  params.k_descale = fp8_descale(launch.quant.k, params.h);
  params.v_descale = fp8_descale(launch.quant.v, params.h);
  params.exp_bits = launch.plan.fast_exp;
  params.vt_keys = launch.plan.vt_keys;
  if (params.vt_keys > 0) params.vt_ptr = launch.vt.mutable_data_ptr<uint8_t>();
  return params;
}

inline void transpose_v(FwdLaunch& launch) {
  Flash_fwd_params& params = launch.params;
  if (launch.plan.is_dynamic && !params.is_varlen()) {
    launch.workspace = new_empty(launch.q, {1}, at::kInt);
    params.tile_count_semaphore = launch.workspace.mutable_data_ptr<int>();
  }
  const int64_t matrices = static_cast<int64_t>(params.is_varlen() ? 1 : params.b) * params.h_k;
  launch.vt = new_empty(launch.q, {matrices, params.d_v, launch.plan.vt_keys}, at::kByte);
  check_launch(run_transpose_v(fp8_params(launch), launch.stream()), "transpose_v_kernel", launch.q);
}

// Memory for the partial results of the KV splits, if there are several.
inline void set_params_splits(FwdLaunch& launch) {
  const plan::FwdPlan& plan = launch.plan;
  KvSplits& splits = launch.params.splits;
  splits.count = plan.num_splits;
  if (plan.num_splits == 1) return;
  splits.rows = plan.partial_rows;
  const int64_t results = plan.num_splits * plan.partial_rows;
  launch.partials = new_empty(launch.q, {results * (launch.params.d_v + 1)}, at::kFloat);
  splits.out_ptr = launch.partials.mutable_data_ptr<float>();
  splits.lse_ptr = splits.out_ptr + results * launch.params.d_v;
}

inline void attention(FwdLaunch& launch) {
  if (launch.plan.family == plan::Family::kDecode)
    return decode(*launch.kv, *launch.plan.decode, launch.q, launch.stream());
  if (launch.plan.is_fp8) {
    return check_launch(run_mha_fwd_fp8(fp8_params(launch), launch.plan, launch.stream()), "flash_fwd_fp8_kernel",
                        launch.q);
  }
  set_params_splits(launch);
  if (launch.plan.exact_row_max) {
    launch.params.rescale_threshold_log2 = launch.plan.row_max_falls ? -kRescaleThresholdLog2 : 0.0f;
  }
  const at::Tensor& q = launch.converted.defined() ? launch.converted : launch.q;
  check_launch(run_mha_fwd(launch.params, launch.plan, launch.stream()), "flash_fwd_kernel", q);
}

// The combine of the partial results. Their family requires 16-byte vectors everywhere.
inline Flash_combine_params set_params_combine(const Flash_fwd_split_params& params, Dtype dtype) {
  const KvSplits& splits = params.splits;
  const int64_t matrix_rows = params.seqlen_q, head_rows = matrix_rows * params.h;
  Flash_combine_params combine;
  combine.partial_ptr = splits.out_ptr;
  combine.lse_partial_ptr = splits.lse_ptr;
  combine.o_ptr = params.o_ptr;
  combine.lse_ptr = params.softmax_lse_ptr;
  const int64_t row_strides[4] = {splits.rows, head_rows, matrix_rows, 1};
  for (int axis = 0; axis < 4; ++axis) {
    combine.partial_strides[axis] = row_strides[axis] * params.d_v;
    combine.lse_partial_strides[axis] = row_strides[axis];
  }
  combine.o_strides[0] = params.o_strides.batch;
  combine.o_strides[1] = params.o_strides.head;
  combine.o_strides[2] = params.o_strides.row;
  combine.splits = splits.count;
  combine.outer = params.is_varlen() ? 1 : params.b;
  combine.middle = params.h;
  combine.inner = params.seqlen_q;
  combine.d = params.d_v;
  combine.o_type = combine_type(dtype);
  combine.partial_vectors = combine.o_vectors = true;
  combine.sinks_ptr = params.sinks_ptr;
  combine.segments_q = params.varlen.segments_q;
  combine.segments = params.b;
  combine.device = params.device;
  return combine;
}

// If max_seqlen_k was too small for some sequence, the decode kernels recompute the call; otherwise they exit at once.
// given: the call before it was dequantised.
inline void recompute(const FwdLaunch& launch, const Flash_fwd_params& given) {
  Flash_kvcache_params params = set_params_decode(launch, given, launch.plan.dequantized_rows);
  const at::Tensor workspace = allocate_decode_workspace(params, *launch.plan.decode, launch.q);
  schedule(params, launch.q, launch.stream());
  decode(params, *launch.plan.decode, launch.q, launch.stream());
}

inline void launch(FwdLaunch& launch) {
  using plan::Stage;
  const std::optional<Flash_fwd_params> given =
      launch.runs(Stage::kRecompute) ? std::optional<Flash_fwd_params>(launch.params) : std::nullopt;
  const plan::FwdPlan& plan = launch.plan;
  Flash_fwd_split_params& params = launch.params;
  for (const Stage stage : plan.stages) {
    switch (stage) {
      case Stage::kAppend: append(launch); break;
      case Stage::kPrepare:
        check_launch(prepare(params, plan.is_dynamic, launch.q, launch.workspace), "prepare_kernel", launch.q);
        break;
      case Stage::kSchedule: schedule(*launch.kv, launch.q, launch.stream()); break;
      case Stage::kWidenQuery: widen_query(launch); break;
      case Stage::kFindKeys: find_keys(launch); break;
      case Stage::kDequantize: dequantize(launch); break;
      case Stage::kTransposeV: transpose_v(launch); break;
      case Stage::kRotate: rotate(launch); break;
      case Stage::kConvertQuery: convert_query(launch); break;
      case Stage::kMaskPlan: launch.block_lists = make_block_lists(params.mask, plan.mask, params, launch.q); break;
      case Stage::kAttention: attention(launch); break;
      case Stage::kCombine:
        check_launch(run_combine(set_params_combine(params, plan.dtype), CombineType::kFp32, launch.stream()),
                     "combine_kernel", launch.q);
        break;
      case Stage::kDropoutProbs:
        check_launch(run_dropout_probs(params, plan.dtype, launch.stream()), "dropout_probs_kernel", launch.q);
        break;
      case Stage::kRescale: rescale_output(launch); break;
      case Stage::kMarkInactive:
        check_launch(run_kvcache_lse(*launch.kv, launch.stream()), "kvcache_lse_kernel", launch.q);
        break;
      case Stage::kRecompute: recompute(launch, *given); break;
    }
  }
}

}  // namespace flash
