// The pybind11 module flash_attn_2_cuda: check -> describe -> allocate -> launch -> return.
#include <ATen/core/Tensor.h>
#include <ATen/ops/full.h>
#include <ATen/ops/sum.h>
#include <c10/cuda/CUDAGuard.h>
#include <c10/cuda/CUDAStream.h>
#include <torch/csrc/utils/pybind.h>
#include <torch/version.h>

#include <algorithm>
#include <array>
#include <limits>
#include <string>
#include <utility>

#include "api/allocate.h"
#include "api/checks.h"
#include "api/combine.h"
#include "api/kvcache.h"
#include "api/launch_check.h"
#include "api/overlap.h"
#include "api/prepare.h"
#include "api/run_fwd.h"
#include "api/set_params.h"
#include "core/static_switch.h"
#include "params/flash.h"
#include "plan/grid.h"
#include "plan/tiles.h"

namespace flash {
namespace {

constexpr int64_t kProbabilityTile = 128;  // S_dmask is padded to multiples of it, as FlashAttention-2 does

int64_t round_up(int64_t value, int64_t multiple) { return (value + multiple - 1) / multiple * multiple; }

// A maximum length that a caller names may be loose: no sequence is longer than kMaxLength.
int probability_rows(int64_t max_seqlen) {
  return static_cast<int>(round_up(std::min<int64_t>(max_seqlen, kMaxLength), kProbabilityTile));
}

// ---- V of another head dim than Q and K ----

// The wgmma family takes V and O as they are, if their rows consist of whole 16-byte chunks.
bool takes_value_dim(plan::Family family, const at::Tensor& v) {
  return family == plan::Family::kWgmma && v.size(-1) % 8 == 0;
}

// Columns that both are given elsewhere. Zeros there add nothing to Q K^T, and make columns of O that nobody wants.
int64_t common_head_dim(const at::Tensor& q, const at::Tensor& v) {
  return round_up(std::max(q.size(-1), v.size(-1)), 8);
}

at::Tensor padded_head_dim(const at::Tensor& tensor, int64_t head_dim) {
  const int64_t own = tensor.size(-1);
  if (own == head_dim) return tensor;
  at::DimVector shape(tensor.sizes().begin(), tensor.sizes().end());
  shape.back() = head_dim;
  at::Tensor wide = new_empty(tensor, shape, tensor.scalar_type());
  wide.narrow(-1, 0, own).copy_(tensor);
  wide.narrow(-1, own, head_dim - own).zero_();
  return wide;
}

// The first columns of a widened result, in the tensor that the caller gave or in a new one.
at::Tensor sliced_head_dim(const at::Tensor& wide, int64_t head_dim, const OptionalTensor& given) {
  if (wide.size(-1) == head_dim) return wide;
  const at::Tensor columns = wide.narrow(-1, 0, head_dim);
  if (!given.has_value()) return columns.contiguous();
  given->copy_(columns);
  return *given;
}

// ---- forward ----

// The slack of 0 makes the references of the softmax its maxima, at the price of more rescaling.
at::Tensor allocate_max_logit(Flash_fwd_params& params, const at::TensorOptions& options) {
  at::Tensor max_logit = at::full({params.h}, -std::numeric_limits<float>::infinity(), options);
  params.max_logit_ptr = max_logit.mutable_data_ptr<float>();
  params.rescale_threshold_log2 = 0.0f;
  return max_logit;
}

std::vector<at::Tensor> forward(const Flash_fwd_params& sequences, const at::Tensor& q, const at::Tensor& k,
                                const at::Tensor& v, const OptionalTensor& out_, at::IntArrayRef lse_shape,
                                const Scores& scores, double p_dropout, bool return_softmax,
                                const OptionalGenerator& gen, bool return_max_logit);

// The same with q, k and v of one head dim.
std::vector<at::Tensor> padded_forward(const Flash_fwd_params& sequences, const at::Tensor& q, const at::Tensor& k,
                                       const at::Tensor& v, const OptionalTensor& out, at::IntArrayRef lse_shape,
                                       const Scores& scores, double p_dropout, bool return_softmax,
                                       const OptionalGenerator& gen, bool return_max_logit) {
  const int64_t wide = common_head_dim(q, v);
  std::vector<at::Tensor> results = forward(sequences, padded_head_dim(q, wide), padded_head_dim(k, wide),
                                            padded_head_dim(v, wide), v.size(-1) == wide ? out : std::nullopt,
                                            lse_shape, scores, p_dropout, return_softmax, gen, return_max_logit);
  results[0] = sliced_head_dim(results[0], v.size(-1), out);
  return results;
}

// The outputs of a forward and the launch that fills them; dense and variable-length calls differ in `sequences`, whose
// tensors and scores are set here.
std::vector<at::Tensor> forward(const Flash_fwd_params& sequences, const at::Tensor& q, const at::Tensor& k,
                                const at::Tensor& v, const OptionalTensor& out_, at::IntArrayRef lse_shape,
                                const Scores& scores, double p_dropout, bool return_softmax,
                                const OptionalGenerator& gen, bool return_max_logit) {
  const bool one_head_dim = v.size(-1) == q.size(-1);
  auto padded_call = [&] {
    return padded_forward(sequences, q, k, v, out_, lse_shape, scores, p_dropout, return_softmax, gen,
                          return_max_logit);
  };
  Flash_fwd_params params = sequences;
  const at::Tensor q_aligned = aligned(q), k_aligned = aligned(k), v_aligned = aligned(v);
  const bool direct = out_.has_value() && is_aligned(*out_);
  at::Tensor out = direct ? *out_ : new_empty(q, checks::output_shape(q, v), q.scalar_type());
  at::Tensor lse = new_empty(q, lse_shape, at::kFloat);
  const bool returns_probabilities = return_softmax && p_dropout > 0.0;
  const bool launches = q.numel() > 0;
  at::Tensor probabilities;
  if (returns_probabilities) {
    const std::array<int64_t, 4> shape{params.b, q.size(-2), params.p_rows, params.p_cols};
    probabilities = launches ? new_empty(q, shape, q.scalar_type()) : new_zeros(q, shape, q.scalar_type());
  } else {
    probabilities = new_empty(q, {0}, q.scalar_type());
  }
  at::Tensor rng_state = launches ? new_empty(q, {2}, at::kLong) : new_zeros(q, {2}, at::kLong);

  set_params_tensors(params, q_aligned, k_aligned, v_aligned, out, lse);
  set_params_scores(params, scores);
  if (returns_probabilities) params.p_ptr = probabilities.mutable_data_ptr();
  std::vector<at::Tensor> results{out, lse, probabilities, rng_state};
  if (return_max_logit) results.push_back(allocate_max_logit(params, lse.options()));
  if (launches) {
    set_params_dropout(params, p_dropout);
    const plan::FamilyChoice choice = choose_family(params);
    if (!one_head_dim && !takes_value_dim(choice.family, v)) return padded_call();
    params.dropout.rng_state = rng_state.mutable_data_ptr<int64_t>();
    if (params.has_dropout) draw_philox_state(params, gen);
    if (choice.family == plan::Family::kDecode) {
      check_launch(run_decode_forward(params, q_aligned, k_aligned, v_aligned, out), "flash_fwd_split_kernel", q);
    } else if (!run_mha_fwd(choice, params, q)) {
      return padded_call();
    }
  }
  if (out_.has_value() && !direct) {
    out_->copy_(out);
    results[0] = *out_;
  }
  return results;
}

// ---- backward ----

template <Dtype kDtype, int kHeadDim>
cudaError_t run_mha_bwd_family(plan::Family family, const Flash_bwd_params& params, cudaStream_t stream) {
  if (family == plan::Family::kMmaSync) return run_mha_bwd_<kDtype, kHeadDim>(params, stream);
  constexpr plan::Sm90BwdTile kPair = plan::kSm90BwdValueDimTile;
  if constexpr (kHeadDim == kPair.head_dim) {
    if (plan::is_value_dim_pair(params.d, params.d_v)) {
      return run_mha_bwd_wgmma_<kDtype, kPair.head_dim, kPair.value_dim()>(params, stream);
    }
  }
  if constexpr (kHeadDim > 32) {
    return run_mha_bwd_wgmma_<kDtype, plan::sm90_bwd_tile(kHeadDim, kHeadDim).head_dim>(params, stream);
  }
  return cudaErrorNotSupported;
}

// Where a gradient is computed: the caller's tensor if the kernels can write it, else a new one that is copied there.
struct Gradient {
  at::Tensor result;
  at::Tensor computed;

  Gradient(const OptionalTensor& given, const at::Tensor& forward)
      : result(given.has_value() ? *given : new_empty(forward, forward.sizes(), forward.scalar_type())),
        computed(is_aligned(result) ? result : new_empty(forward, forward.sizes(), forward.scalar_type())) {}

  void finish() {
    if (!computed.is_same(result)) result.copy_(computed);
  }
};

bool sums_dq_in_shared(plan::Family family, const Flash_bwd_params& params) {
  const bool is_plain = !params.has_dropout && !params.has_score_mod;
  return family == plan::Family::kWgmma &&
         plan::prefers_dq_in_smem({params.is_varlen(), is_plain, params.b, params.h, params.h_k, params.seqlen_q,
                                   params.seqlen_k, params.max_head_dim(), params.multiprocessors,
                                   params.batch_invariant});
}

// fp32 accumulators of dQ, one tile for each block of rows, in deterministic mode a turn counter for each of them, and
// the semaphore of work tiles.
at::Tensor allocate_bwd_workspace(plan::Family family, Flash_bwd_params& params, const at::Tensor& q,
                                  bool deterministic) {
  constexpr int64_t kWordsOfVector = 4;
  const plan::DqTile tile = plan::dq_tile(family, params.d, params.d_v);
  const int64_t tiles = params.h * plan::m_blocks(params.is_varlen(), params.b, params.seqlen_q, tile.block_m);
  const int64_t accum_words = tiles * tile.block_m * tile.head_dim, semaphore_words = deterministic ? tiles : 0;
  params.workspace_vectors = (accum_words + semaphore_words + 1 + kWordsOfVector - 1) / kWordsOfVector;
  at::Tensor workspace = new_empty(q, {params.workspace_vectors, kWordsOfVector}, at::kFloat);
  params.workspace_ptr = static_cast<float4*>(workspace.mutable_data_ptr());
  params.dq_accum_ptr = workspace.mutable_data_ptr<float>();
  int* const counters = reinterpret_cast<int*>(params.dq_accum_ptr + accum_words);
  params.dq_semaphore_ptr = deterministic ? counters : nullptr;
  params.tile_count_semaphore = counters + semaphore_words;
  return workspace;
}

// The launches of one family.
cudaError_t launch_backward(plan::Family family, Flash_bwd_params& params, const at::Tensor& q, bool deterministic) {
  at::Tensor workspace;
  if (!sums_dq_in_shared(family, params)) workspace = allocate_bwd_workspace(family, params, q, deterministic);
  const cudaStream_t stream = c10::cuda::getCurrentCUDAStream().stream();
  return FP16_SWITCH(q.scalar_type() == at::kHalf, [&] {
    return HEADDIM_SWITCH(params.max_head_dim(),
                          [&] { return run_mha_bwd_family<kDtype, kHeadDim>(family, params, stream); });
  });
}

// False: the head dims differ and the family does not serve them; nothing was launched.
bool run_mha_bwd(plan::Family family, Flash_bwd_params& params, const at::Tensor& q, bool deterministic) {
  at::Tensor workspace;
  check_launch(prepare(params, false, q, workspace), "prepare_kernel", q);
  cudaError_t status = launch_backward(family, params, q, deterministic);
  if (status == cudaErrorNotSupported && params.d != params.d_v) return false;
  if (status == cudaErrorNotSupported && family == plan::Family::kWgmma) {
    status = launch_backward(plan::Family::kMmaSync, params, q, deterministic);
  }
  check_launch(status, "flash_bwd_kernel", q);
  return true;
}

// Sums of the sinks' gradient, one of each thread block of the softmax_d pass, in the order of its grid.
at::Tensor allocate_dsinks(Flash_bwd_params& params, const at::Tensor& q) {
  const int64_t batch = params.is_varlen() ? 1 : params.b;
  const int64_t blocks = plan::m_blocks(params.is_varlen(), params.is_varlen() ? params.b : 1, params.seqlen_q,
                                        static_cast<int>(plan::kSoftmaxDGap));
  at::Tensor sums = new_zeros(q, {batch, params.h, blocks}, at::kFloat);
  params.dsinks_ptr = sums.mutable_data_ptr<float>();
  return sums;
}

struct Gradients {
  const at::Tensor& dout;
  const OptionalTensor& dlse;
  const OptionalTensor& dq;
  const OptionalTensor& dk;
  const OptionalTensor& dv;
};

void check_gradients(const Gradients& gradients, const at::Tensor& q, const at::Tensor& k, const at::Tensor& v,
                     const at::Tensor& out, const at::Tensor& softmax_lse, at::IntArrayRef lse_shape) {
  const at::DimVector out_shape = checks::output_shape(q, v);
  checks::like("dout", gradients.dout, out_shape, q);
  checks::like("out", out, out_shape, q);
  if (gradients.dq.has_value()) checks::like("dq", *gradients.dq, q.sizes(), q);
  if (gradients.dk.has_value()) checks::like("dk", *gradients.dk, k.sizes(), q);
  if (gradients.dv.has_value()) checks::like("dv", *gradients.dv, v.sizes(), q);
  checks::lse("softmax_lse", softmax_lse, q, lse_shape);
  if (gradients.dlse.has_value()) checks::lse("dlse", *gradients.dlse, q, lse_shape);
}

void check_written(const Gradients& gradients, const at::Tensor& q, const at::Tensor& k, const at::Tensor& v,
                   const at::Tensor& out, const at::Tensor& softmax_lse, const OptionalTensor& alibi_slopes,
                   const OptionalTensor& sinks) {
  const overlap::Operands read = {{"dout", gradients.dout},
                                  {"q", q},
                                  {"k", k},
                                  {"v", v},
                                  {"out", out},
                                  {"softmax_lse", softmax_lse},
                                  {"dlse", gradients.dlse},
                                  {"alibi_slopes", alibi_slopes},
                                  {"sinks", sinks}};
  overlap::check({{"dq", gradients.dq}, {"dk", gradients.dk}, {"dv", gradients.dv}}, read);
}

std::vector<at::Tensor> backward(const Flash_bwd_params& sequences, const Gradients& gradients, const at::Tensor& q,
                                 const at::Tensor& k, const at::Tensor& v, const at::Tensor& out, const at::Tensor& lse,
                                 const Scores& scores, double p_dropout, bool deterministic,
                                 const OptionalTensor& rng_state);

// The same with q, k and v of one head dim.
std::vector<at::Tensor> padded_backward(const Flash_bwd_params& sequences, const Gradients& gradients,
                                        const at::Tensor& q, const at::Tensor& k, const at::Tensor& v,
                                        const at::Tensor& out, const at::Tensor& lse, const Scores& scores,
                                        double p_dropout, bool deterministic, const OptionalTensor& rng_state) {
  const int64_t wide = common_head_dim(q, v);
  auto direct = [wide](const OptionalTensor& given, const at::Tensor& forward) {
    return forward.size(-1) == wide ? given : std::nullopt;
  };
  const at::Tensor dout = padded_head_dim(gradients.dout, wide);
  const OptionalTensor dq = direct(gradients.dq, q), dk = direct(gradients.dk, k), dv = direct(gradients.dv, v);
  std::vector<at::Tensor> results =
      backward(sequences, {dout, gradients.dlse, dq, dk, dv}, padded_head_dim(q, wide), padded_head_dim(k, wide),
               padded_head_dim(v, wide), padded_head_dim(out, wide), lse, scores, p_dropout, deterministic, rng_state);
  results[0] = sliced_head_dim(results[0], q.size(-1), gradients.dq);
  results[1] = sliced_head_dim(results[1], k.size(-1), gradients.dk);
  results[2] = sliced_head_dim(results[2], v.size(-1), gradients.dv);
  return results;
}

std::vector<at::Tensor> backward(const Flash_bwd_params& sequences, const Gradients& gradients, const at::Tensor& q,
                                 const at::Tensor& k, const at::Tensor& v, const at::Tensor& out, const at::Tensor& lse,
                                 const Scores& scores, double p_dropout, bool deterministic,
                                 const OptionalTensor& rng_state) {
  auto padded_call = [&] {
    return padded_backward(sequences, gradients, q, k, v, out, lse, scores, p_dropout, deterministic, rng_state);
  };
  const int head_dim = static_cast<int>(std::max(q.size(-1), v.size(-1)));
  const plan::Family family =
      plan::choose_backward_family(compute_capability(q.device().index()), head_dim, forced_family());
  if (v.size(-1) != q.size(-1) && !takes_value_dim(family, v)) return padded_call();
  Flash_bwd_params params = sequences;
  const at::Tensor q_aligned = aligned(q), k_aligned = aligned(k), v_aligned = aligned(v), out_aligned = aligned(out),
                   dout_aligned = aligned(gradients.dout), lse_contiguous = lse.contiguous(),
                   dlse = gradients.dlse.has_value() ? gradients.dlse->contiguous() : at::Tensor();
  Gradient dq(gradients.dq, q), dk(gradients.dk, k), dv(gradients.dv, v);
  params.d_rows = plan::softmax_d_rows(params.is_varlen(), params.b, q.size(-3));
  at::Tensor softmax_d = params.is_varlen() ? new_zeros(q, {q.size(-2), params.d_rows}, at::kFloat)
                                            : new_empty(q, {params.b, q.size(-2), params.d_rows}, at::kFloat);
  set_params_tensors(params, q_aligned, k_aligned, v_aligned, out_aligned, lse_contiguous);
  set_params_scores(params, scores);
  set_params_dropout(params, p_dropout);
  if (params.has_dropout) reuse_philox_state(params, *rng_state);
  params.do_ptr = dout_aligned.const_data_ptr();
  params.dq_ptr = dq.computed.mutable_data_ptr();
  params.dk_ptr = dk.computed.mutable_data_ptr();
  params.dv_ptr = dv.computed.mutable_data_ptr();
  params.do_strides = matrix_strides(dout_aligned);
  params.dq_strides = matrix_strides(dq.computed);
  params.dk_strides = matrix_strides(dk.computed);
  params.dv_strides = matrix_strides(dv.computed);
  if (dlse.defined()) params.dlse_ptr = dlse.const_data_ptr<float>();
  params.softmax_d_ptr = softmax_d.mutable_data_ptr<float>();
  at::Tensor dsinks;
  if (scores.sinks.has_value()) dsinks = allocate_dsinks(params, q);
  if (!run_mha_bwd(family, params, q, deterministic)) return padded_call();
  dq.finish();
  dk.finish();
  dv.finish();
  std::vector<at::Tensor> results{dq.result, dk.result, dv.result, softmax_d};
  if (dsinks.defined()) results.push_back(at::sum(dsinks, at::OptionalIntArrayRef({0, 2})));
  return results;
}

// ---- entry points ----

std::vector<at::Tensor> fwd(const at::Tensor& q, const at::Tensor& k, const at::Tensor& v, const OptionalTensor& out,
                            const OptionalTensor& alibi_slopes, double p_dropout, double softmax_scale, bool is_causal,
                            int64_t window_left, int64_t window_right, double softcap, bool return_softmax,
                            const OptionalGenerator& gen, const OptionalTensor& sinks, bool return_max_logit,
                            bool batch_invariant) {
  const char* axes = "batch, seqlen, heads, head_dim";
  checks::query(q, 4, axes);
  checks::whole_chunks(q);
  const int64_t batch = q.size(0), seqlen_q = q.size(1), heads = q.size(2);
  checks::key_value(k, v, q, {batch, -1, -1, q.size(3)}, axes);
  checks::output(out, q, checks::output_shape(q, v));
  checks::numbers(p_dropout, softmax_scale, softcap);
  checks::alibi(alibi_slopes, q, batch);
  checks::sinks(sinks, q);
  checks::generator(gen);
  overlap::check({{"out", out}}, {{"q", q}, {"k", k}, {"v", v}, {"alibi_slopes", alibi_slopes}, {"sinks", sinks}});
  const c10::cuda::CUDAGuard guard(q.device());
  check_device_supported(q);

  Flash_fwd_params params;
  params.b = static_cast<int>(batch);
  params.batch_invariant = batch_invariant;
  params.p_rows = probability_rows(seqlen_q);
  params.p_cols = probability_rows(k.size(1));
  return forward(params, q, k, v, out, {batch, heads, seqlen_q},
                 {softmax_scale, is_causal, window_left, window_right, softcap, alibi_slopes, sinks}, p_dropout,
                 return_softmax, gen, return_max_logit);
}

const int* int_pointer(const OptionalTensor& tensor) {
  return tensor.has_value() ? tensor->const_data_ptr<int>() : nullptr;
}

PagedKv describe_pages(const OptionalTensor& block_table, const at::Tensor& k) {
  PagedKv paged;
  if (!block_table.has_value()) return paged;
  paged.block_table = int_pointer(block_table);
  paged.block_table_stride = block_table->stride(0);
  if (k.size(1) == 0) return paged;  // pages of no rows hold no keys: pages_per_sequence stays 0
  paged.pages_per_sequence = static_cast<int>(block_table->size(1));
  paged.num_pages = static_cast<int>(k.size(0));
  paged.page_size = FastDiv(static_cast<int>(k.size(1)));
  return paged;
}

std::vector<at::Tensor> varlen_fwd(const at::Tensor& q, const at::Tensor& k, const at::Tensor& v,
                                   const OptionalTensor& out, const at::Tensor& cu_seqlens_q,
                                   const at::Tensor& cu_seqlens_k, const OptionalTensor& seqused_k,
                                   const OptionalTensor& leftpad_k, const OptionalTensor& block_table,
                                   const OptionalTensor& alibi_slopes, int64_t max_seqlen_q, int64_t max_seqlen_k,
                                   double p_dropout, double softmax_scale, bool /*zero_tensors: always done*/,
                                   bool is_causal, int64_t window_left, int64_t window_right, double softcap,
                                   bool return_softmax, const OptionalGenerator& gen, int64_t /*num_splits*/,
                                   const OptionalTensor& sinks, bool return_max_logit, bool batch_invariant) {
  const char* axes = "total, heads, head_dim";
  checks::query(q, 3, axes);
  checks::whole_chunks(q);
  const int64_t batch = checks::cu_seqlens(cu_seqlens_q, cu_seqlens_k, q);
  if (block_table.has_value()) {
    checks::key_value(k, v, q, {-1, -1, -1, q.size(2)}, "blocks, page_size, heads, head_dim");
  } else {
    checks::key_value(k, v, q, {-1, -1, q.size(2)}, axes);
  }
  checks::output(out, q, checks::output_shape(q, v));
  checks::lengths("seqused_k", seqused_k, q, batch);
  checks::lengths("leftpad_k", leftpad_k, q, batch);
  checks::block_table(block_table, q, batch);
  checks::max_seqlen("max_seqlen_q", max_seqlen_q);
  checks::max_seqlen("max_seqlen_k", max_seqlen_k);
  checks::numbers(p_dropout, softmax_scale, softcap);
  checks::alibi(alibi_slopes, q, batch);
  checks::sinks(sinks, q);
  checks::generator(gen);
  const overlap::Operands read = {{"q", q},
                                  {"k", k},
                                  {"v", v},
                                  {"cu_seqlens_q", cu_seqlens_q},
                                  {"cu_seqlens_k", cu_seqlens_k},
                                  {"seqused_k", seqused_k},
                                  {"leftpad_k", leftpad_k},
                                  {"block_table", block_table},
                                  {"alibi_slopes", alibi_slopes},
                                  {"sinks", sinks}};
  overlap::check({{"out", out}}, read);
  const c10::cuda::CUDAGuard guard(q.device());
  check_device_supported(q);

  Flash_fwd_params params;
  params.b = static_cast<int>(batch);
  params.batch_invariant = batch_invariant;
  params.p_rows = probability_rows(max_seqlen_q);
  params.p_cols = probability_rows(max_seqlen_k);
  params.varlen = {int_pointer(cu_seqlens_q), int_pointer(cu_seqlens_k), int_pointer(seqused_k),
                   int_pointer(leftpad_k)};
  params.paged = describe_pages(block_table, k);
  return forward(params, q, k, v, out, {q.size(1), q.size(0)},
                 {softmax_scale, is_causal, window_left, window_right, softcap, alibi_slopes, sinks}, p_dropout,
                 return_softmax, gen, return_max_logit);
}

std::vector<at::Tensor> bwd(const at::Tensor& dout, const at::Tensor& q, const at::Tensor& k, const at::Tensor& v,
                            const at::Tensor& out, const at::Tensor& softmax_lse, const OptionalTensor& dq,
                            const OptionalTensor& dk, const OptionalTensor& dv, const OptionalTensor& alibi_slopes,
                            double p_dropout, double softmax_scale, bool is_causal, int64_t window_left,
                            int64_t window_right, double softcap, bool deterministic, const OptionalGenerator& /*gen*/,
                            const OptionalTensor& rng_state, const OptionalTensor& dlse, const OptionalTensor& sinks,
                            bool batch_invariant) {
  const char* axes = "batch, seqlen, heads, head_dim";
  checks::query(q, 4, axes);
  checks::whole_chunks(q);
  const int64_t batch = q.size(0);
  checks::key_value(k, v, q, {batch, -1, -1, q.size(3)}, axes);
  const Gradients gradients{dout, dlse, dq, dk, dv};
  check_gradients(gradients, q, k, v, out, softmax_lse, {batch, q.size(2), q.size(1)});
  checks::numbers(p_dropout, softmax_scale, softcap);
  checks::alibi(alibi_slopes, q, batch);
  checks::sinks(sinks, q);
  checks::rng_state(rng_state, p_dropout, q);
  check_written(gradients, q, k, v, out, softmax_lse, alibi_slopes, sinks);
  const c10::cuda::CUDAGuard guard(q.device());
  check_device_supported(q);

  Flash_bwd_params params;
  params.b = static_cast<int>(batch);
  params.batch_invariant = batch_invariant;
  return backward(params, gradients, q, k, v, out, softmax_lse,
                  {softmax_scale, is_causal, window_left, window_right, softcap, alibi_slopes, sinks}, p_dropout,
                  deterministic, rng_state);
}

std::vector<at::Tensor> varlen_bwd(const at::Tensor& dout, const at::Tensor& q, const at::Tensor& k,
                                   const at::Tensor& v, const at::Tensor& out, const at::Tensor& softmax_lse,
                                   const OptionalTensor& dq, const OptionalTensor& dk, const OptionalTensor& dv,
                                   const at::Tensor& cu_seqlens_q, const at::Tensor& cu_seqlens_k,
                                   const OptionalTensor& alibi_slopes, int64_t max_seqlen_q, int64_t max_seqlen_k,
                                   double p_dropout, double softmax_scale, bool /*zero_tensors: always done*/,
                                   bool is_causal, int64_t window_left, int64_t window_right, double softcap,
                                   bool deterministic, const OptionalGenerator& /*gen*/,
                                   const OptionalTensor& rng_state, const OptionalTensor& dlse,
                                   const OptionalTensor& sinks, bool batch_invariant) {
  const char* axes = "total, heads, head_dim";
  checks::query(q, 3, axes);
  checks::whole_chunks(q);
  const int64_t batch = checks::cu_seqlens(cu_seqlens_q, cu_seqlens_k, q);
  checks::key_value(k, v, q, {-1, -1, q.size(2)}, axes);
  const Gradients gradients{dout, dlse, dq, dk, dv};
  check_gradients(gradients, q, k, v, out, softmax_lse, {q.size(1), q.size(0)});
  checks::max_seqlen("max_seqlen_q", max_seqlen_q);
  checks::max_seqlen("max_seqlen_k", max_seqlen_k);
  checks::numbers(p_dropout, softmax_scale, softcap);
  checks::alibi(alibi_slopes, q, batch);
  checks::sinks(sinks, q);
  checks::rng_state(rng_state, p_dropout, q);
  check_written(gradients, q, k, v, out, softmax_lse, alibi_slopes, sinks);
  const c10::cuda::CUDAGuard guard(q.device());
  check_device_supported(q);

  Flash_bwd_params params;
  params.b = static_cast<int>(batch);
  params.batch_invariant = batch_invariant;
  params.varlen = {int_pointer(cu_seqlens_q), int_pointer(cu_seqlens_k), nullptr, nullptr};
  return backward(params, gradients, q, k, v, out, softmax_lse,
                  {softmax_scale, is_causal, window_left, window_right, softcap, alibi_slopes, sinks}, p_dropout,
                  deterministic, rng_state);
}

// Of every entry point that launches: what needs the GIL first, then without it.
struct CallGuard {
  ForcedFamily family;
  py::gil_scoped_release release;
};

std::string build_info() {
  std::string info = kernel_build_info();
  info.insert(info.rfind('}'),
              std::string(", \"torch\": \"") + TORCH_VERSION + "\", \"commit\": \"" + FLASH_ATTN_BUILD_COMMIT + "\"");
  return info;
}

}  // namespace
}  // namespace flash

PYBIND11_MODULE(TORCH_EXTENSION_NAME, m) {
  using namespace flash;
  m.doc() = "Exact attention on CUDA tensors: the kernels behind flash_attn.";
  m.def("fwd", &fwd, "Forward of dense batches: [out, softmax_lse, S_dmask, rng_state(, max_logit)]", py::arg("q"),
        py::arg("k"), py::arg("v"), py::arg("out"), py::arg("alibi_slopes"), py::arg("p_dropout"),
        py::arg("softmax_scale"), py::arg("is_causal"), py::arg("window_size_left"), py::arg("window_size_right"),
        py::arg("softcap"), py::arg("return_softmax"), py::arg("gen"), py::arg("sinks") = py::none(),
        py::arg("return_max_logit") = false, py::arg("batch_invariant") = false, py::call_guard<CallGuard>());
  m.def("varlen_fwd", &varlen_fwd, "Forward of packed batches: [out, softmax_lse, S_dmask, rng_state(, max_logit)]",
        py::arg("q"), py::arg("k"), py::arg("v"), py::arg("out"), py::arg("cu_seqlens_q"), py::arg("cu_seqlens_k"),
        py::arg("seqused_k"), py::arg("leftpad_k"), py::arg("block_table"), py::arg("alibi_slopes"),
        py::arg("max_seqlen_q"), py::arg("max_seqlen_k"), py::arg("p_dropout"), py::arg("softmax_scale"),
        py::arg("zero_tensors"), py::arg("is_causal"), py::arg("window_size_left"), py::arg("window_size_right"),
        py::arg("softcap"), py::arg("return_softmax"), py::arg("gen"), py::arg("num_splits") = 0,
        py::arg("sinks") = py::none(), py::arg("return_max_logit") = false, py::arg("batch_invariant") = false,
        py::call_guard<CallGuard>());
  m.def("bwd", &bwd, "Backward of dense batches: [dq, dk, dv, softmax_d(, dsinks)]", py::arg("dout"), py::arg("q"),
        py::arg("k"), py::arg("v"), py::arg("out"), py::arg("softmax_lse"), py::arg("dq"), py::arg("dk"), py::arg("dv"),
        py::arg("alibi_slopes"), py::arg("p_dropout"), py::arg("softmax_scale"), py::arg("is_causal"),
        py::arg("window_size_left"), py::arg("window_size_right"), py::arg("softcap"), py::arg("deterministic"),
        py::arg("gen"), py::arg("rng_state"), py::arg("dlse") = py::none(), py::arg("sinks") = py::none(),
        py::arg("batch_invariant") = false, py::call_guard<CallGuard>());
  m.def("varlen_bwd", &varlen_bwd, "Backward of packed batches: [dq, dk, dv, softmax_d(, dsinks)]", py::arg("dout"),
        py::arg("q"), py::arg("k"), py::arg("v"), py::arg("out"), py::arg("softmax_lse"), py::arg("dq"), py::arg("dk"),
        py::arg("dv"), py::arg("cu_seqlens_q"), py::arg("cu_seqlens_k"), py::arg("alibi_slopes"),
        py::arg("max_seqlen_q"), py::arg("max_seqlen_k"), py::arg("p_dropout"), py::arg("softmax_scale"),
        py::arg("zero_tensors"), py::arg("is_causal"), py::arg("window_size_left"), py::arg("window_size_right"),
        py::arg("softcap"), py::arg("deterministic"), py::arg("gen"), py::arg("rng_state"),
        py::arg("dlse") = py::none(), py::arg("sinks") = py::none(), py::arg("batch_invariant") = false,
        py::call_guard<CallGuard>());
  const auto def_kvcache = [&m](const char* name, auto function, const char* doc) {
    m.def(name, function, doc, py::arg("q"), py::arg("kcache"), py::arg("vcache"), py::arg("k"), py::arg("v"),
          py::arg("seqlens_k"), py::arg("rotary_cos"), py::arg("rotary_sin"), py::arg("cache_batch_idx"),
          py::arg("leftpad_k"), py::arg("block_table"), py::arg("alibi_slopes"), py::arg("out"),
          py::arg("softmax_scale"), py::arg("is_causal"), py::arg("window_size_left"), py::arg("window_size_right"),
          py::arg("softcap"), py::arg("rotary_interleaved"), py::arg("num_splits"), py::arg("plan") = py::none(),
          py::arg("batch_invariant") = false, py::call_guard<CallGuard>());
  };
  def_kvcache("fwd_kvcache", &with_kvcache_call<mha_fwd_kvcache>,
              "Forward against a KV cache, which receives k and v first: [out, softmax_lse]");
  def_kvcache("explain_kvcache", &with_kvcache_call<explain_kvcache>,
              "How fwd_kvcache would run with the same arguments, as a dict; launches nothing");
  m.def("kvcache_plan", &kvcache_plan, "Schedule and workspace of fwd_kvcache for given lengths: int32 (n,)",
        py::arg("seqlens_k"), py::arg("leftpad_k"), py::arg("batch"), py::arg("seqlen_q"), py::arg("seqlen_new"),
        py::arg("heads"), py::arg("heads_k"), py::arg("head_dim"), py::arg("seqlen_cache"), py::arg("is_causal"),
        py::arg("window_size_left"), py::arg("window_size_right"), py::arg("num_splits"), py::arg("batch_invariant"),
        py::arg("plan") = py::none(), py::call_guard<CallGuard>());
  m.def("combine", &combine, "Merge of attention over disjoint sets of keys: [out, lse]", py::arg("out_partial"),
        py::arg("lse_partial"), py::arg("out"), py::call_guard<CallGuard>());
  m.def("build_info", &build_info, "Identity of this build as JSON text");
}
