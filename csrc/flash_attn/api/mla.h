// A call with qv, over a KV cache or of packed queries over pages: check -> plan -> set_params -> launch.
#pragma once

#include <ATen/core/Tensor.h>
#include <c10/cuda/CUDAStream.h>

#include <algorithm>
#include <type_traits>
#include <utility>
#include <vector>

#include "api/decode.h"
#include "api/forward.h"
#include "api/set_params.h"
#include "params/combine.h"
#include "params/mla.h"
#include "plan/mla_plan.h"

namespace flash {

struct LatentOptions {
  OptionalTensor qv;

  template <class Visitor>
  void visit_named(Visitor&& visit) {
    visit("qv", qv, "a Tensor");
  }
};

// Either kind of call.
struct MlaCall {
  const at::Tensor& q;   // (batch, seqlen_q, heads, kMlaRopeDim) or (total_q, heads, kMlaRopeDim)
  const at::Tensor& qv;  // the same with kMlaLatentDim
  const at::Tensor& k;   // (pages, page_size, 1, kMlaRopeDim)
  const at::Tensor& v;   // (pages, page_size, 1, kMlaLatentDim)
  const OptionalTensor& out;
  const OptionalTensor& block_table;
  const ScoreOptions& scores;
  int64_t num_splits;
  bool batch_invariant;
  int64_t sm_margin;
  const OptionalTensor& seqlens;  // of a cache
  const OptionalTensor& leftpad;  // likewise
  const OptionalTensor& plan;     // likewise: workspace
  const OptionalTensor& scales;   // (pages, page_size, 1, kMlaScales) where v is e4m3
  Flash_fwd_params sequences;     // of packed queries

  bool is_packed() const { return sequences.is_varlen(); }
  int64_t batch() const { return block_table->size(0); }
  int64_t heads() const { return q.size(-2); }
  int64_t capacity() const { return std::min<int64_t>(block_table->size(1) * k.size(1), kMaxLength); }

  plan::MlaProblem problem() const {
    // Of requests, the combine of splits would give inactive ones a sink.
    const bool may_split = !batch_invariant && (is_packed() || !scores.sinks.has_value());
    const int64_t tokens = is_packed() ? q.size(0) : q.size(1);
    const auto fits_map = [](const at::Tensor& pages) {
      const MatrixStrides strides = cache_strides(pages);
      return plan::tensor_map_holds({false, pages.size(0), pages.size(1), 1, strides.batch, strides.row, 0},
                                    dtype_of(pages));
    };
    return {batch(),
            tokens,
            heads(),
            capacity(),
            is_packed(),
            num_splits,
            may_split,
            batch_invariant,
            static_cast<int>(k.size(1)),
            fits_map(k) && fits_map(v),
            scales.has_value()};
  }
};

inline MlaCall mla_call(const KvCacheCall& call, const at::Tensor& qv) {
  return {call.q,           qv,           call.k_cache,    call.v_cache,         call.out,
          call.block_table, call.scores,  call.num_splits, call.batch_invariant, call.sm_margin,
          call.seqlens,     call.leftpad, call.plan,       call.quant.v,         {}};
}

namespace checks {

inline void absent(const char* name, bool given) {
  if (given) fail(name, "expected None with qv on CUDA, got one");
}

// The parts of FP8 rows.
inline void fp8_rows(const MlaCall& call, const char* k_name, const char* v_name) {
  const at::Tensor &k = call.k, &v = call.v, &scales = *call.scales;
  if (v.scalar_type() != at::kFloat8_e4m3fn) {
    fail(v_name, "expected dtype float8_e4m3fn with v_descale, got ", dtype_name(v.scalar_type()));
  }
  like_query("v_descale", scales, call.q, {v.size(0), v.size(1), 1, kMlaScales}, "blocks, page_size, heads, groups",
             true);
  if (scales.scalar_type() != at::kFloat) {
    fail("v_descale", "expected dtype float32, got ", dtype_name(scales.scalar_type()));
  }
  const char* const row = static_cast<const char*>(v.const_data_ptr());
  if (v.numel() > 0 && (scales.const_data_ptr() != row + kMlaLatentDim || k.const_data_ptr() != row + kMlaRopeByte)) {
    fail("v_descale", "expected it in rows of bytes: ", v_name, ", v_descale, ", k_name);
  }
  for (const int axis : {0, 1}) {
    const int64_t step = v.stride(axis);
    const bool is_same = k.stride(axis) * k.element_size() == step && scales.stride(axis) * 4 == step;
    if (v.size(axis) > 1 && !is_same) fail(k_name, "expected the strides of ", v_name, " and v_descale in bytes");
  }
  if (call.plan.has_value()) fail("plan", "expected None with v_descale, got one");
}

// The kernel reads rows of kMlaRopeDim and kMlaLatentDim columns through a block_table, without ScoreMod and window.
inline void mla(const MlaCall& call, const char* k_name, const char* v_name) {
  const at::Tensor& q = call.q;
  const bool is_packed = call.is_packed();
  const char* q_axes = is_packed ? kPackedAxes : kDenseAxes;
  const char* axes = "blocks, page_size, heads, head_dim";
  query(q, is_packed ? 3 : 4, q_axes);
  if (q.size(-1) != kMlaRopeDim)
    fail("q", "expected a head dim of ", int64_t{kMlaRopeDim}, " with qv, got ", q.size(-1));
  std::vector<int64_t> shape = q.sizes().vec();
  shape.back() = kMlaLatentDim;
  like_query("qv", call.qv, q, shape, q_axes);
  if (!call.block_table.has_value()) fail("block_table", "expected a tensor with qv on CUDA, got None");
  like_query(k_name, call.k, q, {-1, -1, 1, kMlaRopeDim}, axes);
  like_query(v_name, call.v, q, {call.k.size(0), call.k.size(1), 1, kMlaLatentDim}, axes, call.scales.has_value());
  if (call.scales.has_value()) fp8_rows(call, k_name, v_name);
  sizes(k_name, call.k, "pages");
  for (const auto& [name, cache] : {std::pair{k_name, call.k}, std::pair{v_name, call.v}}) {
    if (!is_aligned(cache)) fail(name, "expected rows at multiples of 16 bytes with qv on CUDA");
  }
  block_table(call.block_table, q, is_packed ? call.sequences.b : q.size(0));
  packed_rows("q", q.size(-3), q.size(-2), 1);
  check_scores_with_sinks_alone(call.scores, q, call.batch(), " with qv on CUDA");
  const Window window = make_window(call.scores);
  absent("window_size", window.left != kUnbounded || (window.right != kUnbounded && window.right != 0));
  if (has_score_mod(call.scores))
    fail("softcap", "expected no softcap and ALiBi, and a scale above 0, with qv on CUDA");
  num_splits(call.num_splits);
  output(call.out, q, shape);
}

inline void mla(const KvCacheCall& call, const at::Tensor& qv) {
  absent("k", call.k.has_value());
  absent("rotary_cos", call.rotary_cos.has_value());
  absent("cache_batch_idx", call.cache_batch_idx.has_value());
  absent("q_descale", call.quant.q.has_value());
  absent("k_descale", call.quant.k.has_value());
  absent("mask_bits", call.mask_bits.mask_bits.has_value());
  mla(mla_call(call, qv), "k_cache", "v_cache");
  lengths("cache_seqlens", call.seqlens, call.q, call.q.size(0));
  lengths("cache_leftpad", call.leftpad, call.q, call.q.size(0));
  if (call.plan.has_value()) strided("plan", *call.plan);
  const OptionalTensor given_qv = qv;
  overlap::check({{"out", call.out}, {"plan", call.plan}}, {{"q", call.q},
                                                            {"qv", given_qv},
                                                            {"k_cache", call.k_cache},
                                                            {"v_cache", call.v_cache},
                                                            {"cache_seqlens", call.seqlens},
                                                            {"cache_leftpad", call.leftpad},
                                                            {"block_table", call.block_table},
                                                            {"v_descale", call.quant.v},
                                                            {"sinks", call.scores.sinks}});
}

inline void packed_mla(const MlaCall& call, const FwdCall& given, const PackedArgs& packed) {
  absent("q_descale", given.quant.q.has_value());
  absent("k_descale", given.quant.k.has_value());
  absent("v_descale", given.quant.v.has_value());
  mla(call, "k", "v");
  lengths("seqused_k", packed.seqused_k, call.q, call.batch());
  lengths("leftpad_k", packed.leftpad_k, call.q, call.batch());
  const OptionalTensor given_qv = call.qv;
  overlap::check({{"out", call.out}}, {{"q", call.q},
                                       {"qv", given_qv},
                                       {"k", call.k},
                                       {"v", call.v},
                                       {"cu_seqlens_q", packed.cu_seqlens_q},
                                       {"cu_seqlens_k", packed.cu_seqlens_k},
                                       {"seqused_k", packed.seqused_k},
                                       {"leftpad_k", packed.leftpad_k},
                                       {"block_table", packed.block_table},
                                       {"sinks", call.scores.sinks}});
  absent("p_dropout", given.p_dropout > 0.0);
  absent("return_max_logit", given.return_max_logit);
}

// The sizes of a plan.
inline void mla_schedule(const ScheduleSizes& sizes, int64_t head_dim_v) {
  if (head_dim_v != kMlaLatentDim)
    fail("head_dim_v", "expected 0 or ", int64_t{kMlaLatentDim}, " on CUDA, got ", head_dim_v);
  if (sizes.head_dim != kMlaRopeDim) {
    fail("head_dim", "expected ", int64_t{kMlaRopeDim}, " with head_dim_v on CUDA, got ", sizes.head_dim);
  }
  if (sizes.heads_k != 1) fail("nheads_k", "expected 1 with head_dim_v on CUDA, got ", sizes.heads_k);
  if (sizes.seqlen_new != 0) fail("seqlen_new", "expected 0 with head_dim_v on CUDA, got ", sizes.seqlen_new);
}

}  // namespace checks

inline plan::MlaPlan plan_of(const plan::MlaProblem& problem, const at::Device& device, int64_t sm_margin) {
  const plan::MlaPlan plan = plan::plan_mla(device_of(device.index(), sm_margin), problem, forced_family());
  if (problem.has_fp8_rows && plan.family != plan::Family::kWgmma) {
    checks::fail("v_descale", "expected None on this GPU, got a tensor: it has no kernel of FP8 rows");
  }
  return plan;
}

// Floats of the partial results.
inline int64_t mla_workspace(const plan::MlaProblem& problem, const plan::MlaPlan& plan) {
  const int64_t rows = problem.tokens * problem.heads * (problem.is_packed ? 1 : problem.batch);
  return plan.splits > 1 ? plan.splits * rows * (kMlaLatentDim + 1) : 0;
}

inline Flash_mla_params set_params_mla(const MlaCall& call, const plan::MlaPlan& plan, const at::Tensor& q,
                                       const at::Tensor& qv, const at::Tensor& out, const at::Tensor& lse) {
  constexpr double kLog2e = 1.4426950408889634;
  Flash_mla_params params;
  params.q_ptr = q.const_data_ptr();
  params.qv_ptr = qv.const_data_ptr();
  params.rope_ptr = call.k.const_data_ptr();
  params.latent_ptr = call.v.const_data_ptr();
  params.o_ptr = out.mutable_data_ptr();
  params.softmax_lse_ptr = lse.mutable_data_ptr<float>();
  params.q_strides = matrix_strides(q);
  params.qv_strides = matrix_strides(qv);
  params.has_fp8_rows = call.scales.has_value();
  params.rope_strides = cache_strides(call.k);
  params.latent_strides = cache_strides(call.v);
  params.o_strides = matrix_strides(out);
  params.paged = set_params_pages(call.block_table, call.k);
  params.seqlens_k = int_or_null(call.seqlens);
  params.leftpad_k = int_or_null(call.leftpad);
  if (call.scores.sinks.has_value()) params.sinks_ptr = call.scores.sinks->const_data_ptr<float>();
  params.b = static_cast<int>(call.batch());
  params.h = static_cast<int>(call.heads());
  params.seqlen_q = static_cast<int>(call.problem().tokens);
  params.splits = plan.splits;
  params.row_tiles = plan.row_tiles;
  params.box_rows = plan.box_rows;
  params.heads = FastDiv(std::max(params.h, 1));
  params.is_causal = make_window(call.scores).right == 0;
  params.softmax_scale_log2 = static_cast<float>(call.scores.softmax_scale * kLog2e);
  params.device = call.q.device().index();
  return params;
}

// Of the partial results that the kernel writes.
inline Flash_combine_params set_params_combine(const Flash_mla_params& params, Dtype dtype) {
  const int64_t tokens = params.seqlen_q, heads = params.h;
  Flash_combine_params combine;
  combine.outer = params.segments_q == nullptr ? params.b : 1;
  const int64_t rows = tokens * heads * combine.outer;
  combine.partial_ptr = params.partial_o;
  combine.lse_partial_ptr = params.partial_lse;
  combine.o_ptr = params.o_ptr;
  combine.lse_ptr = params.softmax_lse_ptr;
  const int64_t o_rows[4] = {rows, tokens * heads, 1, heads}, lse_rows[4] = {rows, tokens * heads, tokens, 1};
  for (int axis = 0; axis < 4; ++axis) {
    combine.partial_strides[axis] = o_rows[axis] * kMlaLatentDim;
    combine.lse_partial_strides[axis] = lse_rows[axis];
  }
  combine.o_strides[0] = params.o_strides.batch;
  combine.o_strides[1] = params.o_strides.head;
  combine.o_strides[2] = params.o_strides.row;
  combine.splits = params.splits;
  combine.middle = params.h;
  combine.inner = params.seqlen_q;
  combine.d = kMlaLatentDim;
  combine.o_type = combine_type(dtype);
  combine.partial_vectors = combine.o_vectors = true;
  combine.sinks_ptr = params.segments_q == nullptr ? nullptr : params.sinks_ptr;
  combine.segments_q = params.segments_q;
  combine.segments = params.b;
  combine.inf_is_invalid = true;
  combine.device = params.device;
  return combine;
}

// -> [out, lse]
inline std::vector<at::Tensor> mla_forward(const MlaCall& call) {
  const CallDevice guard(call.q.device());
  check_device_supported(call.q);
  const plan::MlaProblem problem = call.problem();
  const plan::MlaPlan plan = plan_of(problem, call.q.device(), call.sm_margin);
  const at::Tensor q = aligned(call.q), qv = aligned(call.qv);
  Output out(call.out, q, q.scalar_type(), call.qv.sizes(), 0);
  at::Tensor lse, workspace, segments;
  lse = call.is_packed() ? new_empty(q, {call.heads(), q.size(0)}, at::kFloat)
                         : new_empty(q, {q.size(0), call.heads(), q.size(1)}, at::kFloat);
  Flash_mla_params params = set_params_mla(call, plan, q, qv, out.computed, lse);
  const int64_t floats = mla_workspace(problem, plan);
  if (floats > 0 && call.plan.has_value()) {
    params.partial_o = reinterpret_cast<float*>(call.plan->mutable_data_ptr<int>());
  } else if (floats > 0) {
    workspace = new_empty(q, {floats}, at::kFloat);
    params.partial_o = workspace.mutable_data_ptr<float>();
  }
  if (floats > 0) params.partial_lse = params.partial_o + plan.splits * lse.numel() * kMlaLatentDim;
  const cudaStream_t stream = c10::cuda::getCurrentCUDAStream().stream();
  if (lse.numel() == 0) return {out.finish(), lse};
  if (call.is_packed()) {
    Flash_fwd_params sequences = call.sequences;
    sequences.seqlen_q = params.seqlen_q;
    sequences.device = params.device;
    check_launch(prepare(sequences, false, q, segments), "prepare_kernel", q);
    params.segments_q = sequences.varlen.segments_q;
    params.key_ranges = sequences.varlen.key_ranges;
  }
  check_launch(run_mla_decode(params, dtype_of(q), plan.tile_rows, plan.stages, stream), "mla_decode_kernel", q);
  if (plan.splits > 1) {
    const Flash_combine_params combine = set_params_combine(params, dtype_of(q));
    check_launch(run_combine(combine, CombineType::kFp32, stream), "combine_kernel", q);
  }
  return {out.finish(), lse};
}

// The plan of mla_forward(): nothing is launched.
inline plan::Explanation explain(const MlaCall& call, const char* direction) {
  check_device_supported(call.q);
  const plan::MlaProblem problem = call.problem();
  const plan::MlaPlan plan = plan_of(problem, call.q.device(), call.sm_margin);
  plan::Explanation fields;
  fields["direction"] = std::string(direction);
  fields["kernel"] = std::string("mla_") + plan::family_name(plan.family);
  fields["dtype"] = std::string(dtype_name(dtype_of(call.q)));
  fields["head_dim"] = int64_t{kMlaRopeDim};
  fields["head_dim_v"] = int64_t{kMlaLatentDim};
  fields["block_m"] = int64_t{plan.tile_rows};
  fields["block_n"] = int64_t{plan.keys};
  fields["kv_stages"] = int64_t{plan.stages};
  fields["box_rows"] = int64_t{plan.box_rows};
  fields["grid"] = (problem.is_packed ? 1 : problem.batch) * plan.row_tiles * plan.splits;
  fields["num_splits"] = int64_t{plan.splits};
  return fields;
}

// ---- over a KV cache ----

// A plan has the workspace of calls without sinks, over any pages.
inline int64_t mla_plan_elements(plan::MlaProblem problem, const at::Device& device, int64_t sm_margin,
                                 bool batch_invariant) {
  problem.may_split = !batch_invariant;
  problem.batch_invariant = batch_invariant;
  problem.page_size = plan::kMlaWgmmaKeys;
  int64_t most = 0;
  for (const bool fits_page_maps : {false, true}) {
    problem.fits_page_maps = fits_page_maps;
    most = std::max(most, mla_workspace(problem, plan_of(problem, device, sm_margin)));
  }
  return most;
}

// Packed queries with qv, which have the results of mha_fwd().
template <class Result>
Result packed_mla(const FwdCall& given, const PackedArgs& packed, const at::Tensor& qv) {
  checks::query(given.q, 3, kPackedAxes);
  const int64_t batch = checks::cu_seqlens(packed.cu_seqlens_q, packed.cu_seqlens_k, given.q);
  const OptionalTensor none;
  MlaCall call{
      given.q,
      qv,
      given.k,
      given.v,
      given.out,
      packed.block_table,
      given.scores,
      0,
      given.batch_invariant,
      given.launch.sm_margin,
      none,
      none,
      none,
      none,
      packed_sequences<Flash_fwd_params>(batch, given.batch_invariant, packed.cu_seqlens_q, packed.cu_seqlens_k)};
  checks::packed_mla(call, given, packed);
  call.sequences.varlen.seqused_k = int_or_null(packed.seqused_k);
  call.sequences.varlen.leftpad_k = int_or_null(packed.leftpad_k);
  call.sequences.paged = set_params_pages(packed.block_table, given.k);
  if constexpr (std::is_same_v<Result, plan::Explanation>) {
    return explain(call, "forward");
  } else {
    Tensors results = mla_forward(call);
    if (!given.returns_dropout) return results;
    results.push_back(new_empty(call.q, {0}, call.q.scalar_type()));  // S_dmask
    results.push_back(new_empty(call.q, {2}, at::kLong));             // rng_state
    return results;
  }
}

inline std::vector<at::Tensor> mha_fwd_mla(const KvCacheCall& call, const at::Tensor& qv) {
  checks::mla(call, qv);
  const MlaCall mla = mla_call(call, qv);
  if (call.plan.has_value()) {
    const CallDevice guard(call.q.device());
    const at::Device device = call.q.device();
    checks::plan(*call.plan, device, mla_plan_elements(mla.problem(), device, call.sm_margin, call.batch_invariant));
  }
  return mla_forward(mla);
}

inline plan::Explanation explain_mla(const KvCacheCall& call, const at::Tensor& qv) {
  checks::mla(call, qv);
  return explain(mla_call(call, qv), "kvcache");
}

// The plan of calls with qv: nothing depends on the lengths.
inline at::Tensor mla_kvcache_plan(const at::Tensor& seqlens_k, const checks::ScheduleSizes& sizes, int64_t head_dim_v,
                                   bool batch_invariant, int64_t sm_margin, const OptionalTensor& given) {
  checks::mla_schedule(sizes, head_dim_v);
  const CallDevice guard(seqlens_k.device());
  check_device_supported(seqlens_k);
  const int64_t capacity = std::min<int64_t>(sizes.seqlen_cache, kMaxLength);
  const plan::MlaProblem problem{sizes.batch, sizes.seqlen_q, sizes.heads, capacity, false, sizes.num_splits, true};
  const int64_t elements = mla_plan_elements(problem, seqlens_k.device(), sm_margin, batch_invariant);
  if (given.has_value()) checks::plan(*given, seqlens_k.device(), elements);
  return given.has_value() ? *given : new_empty(seqlens_k, {elements}, at::kInt);
}

// head_dim_v: of calls with qv, else 0.
inline at::Tensor any_kvcache_plan(const at::Tensor& seqlens_k, const OptionalTensor& leftpad_k, int64_t batch,
                                   int64_t seqlen_q, int64_t seqlen_new, int64_t heads, int64_t heads_k,
                                   int64_t head_dim, int64_t seqlen_cache, bool is_causal, int64_t window_left,
                                   int64_t window_right, int64_t num_splits, bool batch_invariant,
                                   const OptionalTensor& plan, bool eight_bit, int64_t sm_margin, int64_t head_dim_v) {
  if (head_dim_v == 0) {
    return kvcache_plan(seqlens_k, leftpad_k, batch, seqlen_q, seqlen_new, heads, heads_k, head_dim, seqlen_cache,
                        is_causal, window_left, window_right, num_splits, batch_invariant, plan, eight_bit, sm_margin);
  }
  const checks::ScheduleSizes sizes{batch, seqlen_q, seqlen_new, heads, heads_k, head_dim, seqlen_cache, num_splits};
  checks::kvcache_schedule(seqlens_k, leftpad_k, sizes, plan);
  return mla_kvcache_plan(seqlens_k, sizes, head_dim_v, batch_invariant, sm_margin, plan);
}

}  // namespace flash
