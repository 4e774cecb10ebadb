// A call over a KV cache with qv: check -> plan -> set_params -> launch.
#pragma once

#include <ATen/core/Tensor.h>
#include <c10/cuda/CUDAStream.h>

#include <vector>

#include "api/decode.h"
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

namespace checks {

// The kernel reads rows of kMlaRopeDim and kMlaLatentDim columns through a block_table, without ScoreMod and window.
inline void mla(const KvCacheCall& call, const at::Tensor& qv) {
  const at::Tensor& q = call.q;
  query(q, 4, "batch, seqlen, heads, head_dim");
  if (q.size(3) != kMlaRopeDim) fail("q", "expected a head dim of ", int64_t{kMlaRopeDim}, " with qv, got ", q.size(3));
  like_query("qv", qv, q, {q.size(0), q.size(1), q.size(2), kMlaLatentDim}, "batch, seqlen, heads, head_dim");
  const char* axes = "blocks, page_size, heads, head_dim";
  like_query("k_cache", call.k_cache, q, {-1, -1, 1, kMlaRopeDim}, axes);
  like_query("v_cache", call.v_cache, q, {call.k_cache.size(0), call.k_cache.size(1), 1, kMlaLatentDim}, axes);
  sizes("k_cache", call.k_cache, "pages");
  packed_rows("q", q.size(1), q.size(2), 1);
  check_scores(call.scores, q, q.size(0), 0.0);
  num_splits(call.num_splits);
  output(call.out, q, qv.sizes());
  const std::pair<const char*, bool> none[] = {{"k", call.k.has_value()},
                                               {"rotary_cos", call.rotary_cos.has_value()},
                                               {"cache_batch_idx", call.cache_batch_idx.has_value()},
                                               {"plan", call.plan.has_value()},
                                               {"q_descale", call.quant.q.has_value()},
                                               {"k_descale", call.quant.k.has_value()},
                                               {"v_descale", call.quant.v.has_value()}};
  for (const auto& [name, given] : none) {
    if (given) fail(name, "expected None with qv on CUDA, got a tensor");
  }
  if (!call.block_table.has_value()) fail("block_table", "expected a tensor with qv on CUDA, got None");
  if (!call.seqlens.has_value()) fail("cache_seqlens", "expected a tensor with qv on CUDA, got None");
  lengths("cache_seqlens", call.seqlens, q, q.size(0));
  cache_location(q, call.k_cache, call.cache_batch_idx, call.leftpad, call.block_table);
  const Window window = make_window(call.scores);
  if (window.left != kUnbounded || (window.right != kUnbounded && window.right != 0)) {
    fail("window_size", "expected none with qv on CUDA, got one");
  }
  if (has_score_mod(call.scores))
    fail("softcap", "expected no softcap and ALiBi, and a scale above 0, with qv on CUDA");
  const std::pair<const char*, const at::Tensor*> rows[] = {
      {"q", &q}, {"qv", &qv}, {"k_cache", &call.k_cache}, {"v_cache", &call.v_cache}};
  for (const auto& [name, tensor] : rows) {
    if (vector_bytes(*tensor) != 16) fail(name, "expected rows at multiples of 16 bytes with qv on CUDA");
  }
  const OptionalTensor given_qv = qv;
  overlap::check({{"out", call.out}}, {{"q", q},
                                       {"qv", given_qv},
                                       {"k_cache", call.k_cache},
                                       {"v_cache", call.v_cache},
                                       {"cache_seqlens", call.seqlens},
                                       {"cache_leftpad", call.leftpad},
                                       {"block_table", call.block_table},
                                       {"sinks", call.scores.sinks}});
}

}  // namespace checks

inline plan::MlaPlan mla_plan(const KvCacheCall& call) {
  // The combine of splits would give inactive requests a sink.
  const bool may_split = !call.batch_invariant && !call.scores.sinks.has_value();
  const plan::Device device = device_of(call.q.device().index(), call.sm_margin);
  return plan::plan_mla(device, static_cast<int>(call.q.size(0)), call.q.size(1) * call.q.size(2), call.capacity(),
                        call.num_splits, may_split);
}

inline Flash_mla_params set_params_mla(const KvCacheCall& call, const at::Tensor& qv, const plan::MlaPlan& plan,
                                       const at::Tensor& out, const at::Tensor& lse) {
  constexpr double kLog2e = 1.4426950408889634;
  Flash_mla_params params;
  params.q_ptr = call.q.const_data_ptr();
  params.qv_ptr = qv.const_data_ptr();
  params.rope_ptr = call.k_cache.const_data_ptr();
  params.latent_ptr = call.v_cache.const_data_ptr();
  params.o_ptr = out.mutable_data_ptr();
  params.softmax_lse_ptr = lse.mutable_data_ptr<float>();
  params.q_strides = cache_strides(call.q);
  params.qv_strides = cache_strides(qv);
  params.rope_strides = cache_strides(call.k_cache);
  params.latent_strides = cache_strides(call.v_cache);
  params.o_strides = cache_strides(out);
  params.paged = cache_pages(call);
  params.seqlens_k = int_or_null(call.seqlens);
  params.leftpad_k = int_or_null(call.leftpad);
  if (call.scores.sinks.has_value()) params.sinks_ptr = call.scores.sinks->const_data_ptr<float>();
  params.b = static_cast<int>(call.q.size(0));
  params.h = static_cast<int>(call.q.size(2));
  params.seqlen_q = static_cast<int>(call.q.size(1));
  params.splits = plan.splits;
  params.row_tiles = plan.row_tiles;
  params.heads = FastDiv(std::max(params.h, 1));
  params.is_causal = make_window(call.scores).right == 0;
  params.scale_softmax = normal_float(call.scores.softmax_scale);
  params.softmax_scale_log2 = static_cast<float>(call.scores.softmax_scale * kLog2e);
  params.device = call.q.device().index();
  return params;
}

// Of the partial results that the kernel writes.
inline Flash_combine_params set_params_combine(const Flash_mla_params& params, Dtype dtype) {
  const int64_t tokens = params.seqlen_q, heads = params.h, rows = tokens * heads * params.b;
  Flash_combine_params combine;
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
  combine.outer = params.b;
  combine.middle = params.h;
  combine.inner = params.seqlen_q;
  combine.d = kMlaLatentDim;
  combine.o_type = combine_type(dtype);
  combine.partial_vectors = true;
  combine.device = params.device;
  return combine;
}

inline std::vector<at::Tensor> mha_fwd_mla(const KvCacheCall& call, const at::Tensor& qv) {
  checks::mla(call, qv);
  const at::Tensor& q = call.q;
  const CallDevice guard(q.device());
  check_device_supported(q);
  const plan::MlaPlan plan = mla_plan(call);
  at::Tensor out = call.out.has_value() ? *call.out : new_empty(q, qv.sizes(), q.scalar_type());
  at::Tensor lse = new_empty(q, {q.size(0), q.size(2), q.size(1)}, at::kFloat), workspace;
  Flash_mla_params params = set_params_mla(call, qv, plan, out, lse);
  const cudaStream_t stream = c10::cuda::getCurrentCUDAStream().stream();
  if (plan.splits > 1) {
    workspace = new_empty(q, {plan.splits * lse.numel() * (kMlaLatentDim + 1)}, at::kFloat);
    params.partial_o = workspace.mutable_data_ptr<float>();
    params.partial_lse = params.partial_o + plan.splits * lse.numel() * kMlaLatentDim;
  }
  check_launch(run_mla_decode(params, dtype_of(q), plan.tile_rows, stream), "mla_decode_kernel", q);
  if (plan.splits > 1) {
    Flash_combine_params combine = set_params_combine(params, dtype_of(q));
    combine.o_vectors = is_aligned(out, 8);
    check_launch(run_combine(combine, CombineType::kFp32, stream), "combine_kernel", q);
  }
  return {out, lse};
}

// The plan of mha_fwd_mla(): nothing is launched.
inline plan::Explanation explain_mla(const KvCacheCall& call, const at::Tensor& qv) {
  checks::mla(call, qv);
  check_device_supported(call.q);
  const plan::MlaPlan plan = mla_plan(call);
  plan::Explanation fields;
  fields["direction"] = std::string("kvcache");
  fields["kernel"] = std::string("mla_mma_sync");
  fields["dtype"] = std::string(dtype_name(dtype_of(call.q)));
  fields["head_dim"] = int64_t{kMlaRopeDim};
  fields["head_dim_v"] = int64_t{kMlaLatentDim};
  fields["block_m"] = int64_t{plan.tile_rows};
  fields["block_n"] = int64_t{plan::kMlaKeys};
  fields["grid"] = call.q.size(0) * plan.row_tiles * plan.splits;
  fields["num_splits"] = int64_t{plan.splits};
  return fields;
}

}  // namespace flash
