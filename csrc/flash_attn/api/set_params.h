// Tensors and options -> the plain parameters of params/flash.h.
#pragma once

#include <ATen/core/Generator.h>
#include <ATen/core/Tensor.h>
#include <ATen/cuda/CUDAGeneratorImpl.h>

#include <cmath>
#include <mutex>
#include <optional>

#include "api/scores.h"
#include "api/tensors.h"
#include "params/flash.h"

namespace flash {

using OptionalGenerator = std::optional<at::Generator>;

// Dense or packed: the sequences of a call, in the forward and the backward.
template <class Params>
Params dense_sequences(int64_t batch, bool batch_invariant) {
  Params params;
  params.b = static_cast<int>(batch);
  params.batch_invariant = batch_invariant;
  return params;
}

template <class Params>
Params packed_sequences(int64_t batch, bool batch_invariant, const at::Tensor& cu_seqlens_q,
                        const at::Tensor& cu_seqlens_k) {
  Params params = dense_sequences<Params>(batch, batch_invariant);
  params.varlen.cu_seqlens_q = cu_seqlens_q.const_data_ptr<int>();
  params.varlen.cu_seqlens_k = cu_seqlens_k.const_data_ptr<int>();
  return params;
}

// P(dropped) = threshold / 2^32 and the kept entries are scaled by the reciprocal of the true keep probability.
inline void set_params_dropout(Flash_fwd_params& params, double p_dropout) {
  if (p_dropout == 0.0) return;
  constexpr double kRange = 4294967296.0;
  const double threshold = std::min(std::nearbyint(p_dropout * kRange), kRange - 1.0);
  params.has_dropout = true;
  params.dropout.threshold = static_cast<uint32_t>(threshold);
  params.dropout.keep_scale = static_cast<float>(kRange / (kRange - threshold));
}

inline const int* int_or_null(const OptionalTensor& tensor) {
  return tensor.has_value() ? tensor->const_data_ptr<int>() : nullptr;
}

// k: the pages; of a page size of 0 no pages remain.
inline PagedKv set_params_pages(const OptionalTensor& block_table, const at::Tensor& k) {
  PagedKv paged;
  if (!block_table.has_value()) return paged;
  paged.block_table = int_or_null(block_table);
  paged.block_table_stride = block_table->stride(0);
  if (k.size(1) == 0) return paged;
  paged.pages_per_sequence = static_cast<int>(block_table->size(1));
  paged.num_pages = static_cast<int>(k.size(0));
  paged.page_size = FastDiv(static_cast<int>(k.size(1)));
  return paged;
}

// Operands that a forward reads.
inline void set_params_qkv(Flash_fwd_params& params, const at::Tensor& q, const at::Tensor& k, const at::Tensor& v) {
  params.q_ptr = q.const_data_ptr();
  params.k_ptr = k.const_data_ptr();
  params.v_ptr = v.const_data_ptr();
  params.q_strides = matrix_strides(q);
  params.k_strides = matrix_strides(k);
  params.v_strides = matrix_strides(v);
  params.h = static_cast<int>(q.size(-2));
  params.h_k = static_cast<int>(k.size(-2));
  params.h_h_k_ratio = params.h_k > 0 ? params.h / params.h_k : 1;
  params.d = static_cast<int>(q.size(-1));
  params.d_v = static_cast<int>(v.size(-1));
  params.seqlen_q = static_cast<int>(q.size(-3));
  params.seqlen_k = static_cast<int>(k.size(-3));
}

// Options of a call, and its operands; packed batches and pages are set by the caller.
inline void set_params_fprop(Flash_fwd_params& params, const at::Tensor& q, const at::Tensor& k, const at::Tensor& v,
                             const ScoreOptions& scores, double p_dropout) {
  set_params_qkv(params, q, k, v);
  set_params_scores(params, scores);
  set_params_dropout(params, p_dropout);
  set_params_origins(params, scores);
}

inline void set_params_out(Flash_fwd_params& params, const at::Tensor& out, const at::Tensor& lse) {
  params.o_ptr = out.mutable_data_ptr();
  params.o_strides = matrix_strides(out);
  params.softmax_lse_ptr = lse.mutable_data_ptr<float>();
}

// Gradients that a backward reads and writes; some may be undefined.
inline void set_params_dgrad(Flash_bwd_params& params, const at::Tensor& dout, const at::Tensor& dq,
                             const at::Tensor& dk, const at::Tensor& dv) {
  params.do_ptr = dout.const_data_ptr();
  params.do_strides = matrix_strides(dout);
  const auto set = [](auto& pointer, MatrixStrides& strides, const at::Tensor& gradient) {
    if (!gradient.defined()) return;
    pointer = gradient.mutable_data_ptr();
    strides = matrix_strides(gradient);
  };
  set(params.dq_ptr, params.dq_strides, dq);
  set(params.dk_ptr, params.dk_strides, dk);
  set(params.dv_ptr, params.dv_strides, dv);
}

// Draws a new state from the generator; the kernel writes it to rng_state.
inline void draw_philox_state(Flash_fwd_params& params, const OptionalGenerator& gen) {
  auto* generator =
      at::get_generator_or_default<at::CUDAGeneratorImpl>(gen, at::cuda::detail::getDefaultCUDAGenerator());
  const std::lock_guard<std::mutex> lock(generator->mutex_);
  // The mask is keyed by the whole offset, so the least step that torch allows makes a new one.
  const at::PhiloxCudaState state = generator->philox_cuda_state(4);
  PhiloxState& philox = params.dropout.state;
  if (state.captured_) {
    philox.seed_ptr = state.seed_.ptr;
    philox.offset_ptr = state.offset_.ptr;
    philox.offset = state.offset_intragraph_;
  } else {
    philox.seed = state.seed_.val;
    philox.offset = state.offset_.val;
  }
}

// The state that a forward left in rng_state.
inline void reuse_philox_state(Flash_fwd_params& params, const at::Tensor& rng_state) {
  params.dropout.state.seed_ptr = rng_state.const_data_ptr<int64_t>();
  params.dropout.state.offset_ptr = rng_state.const_data_ptr<int64_t>() + 1;
}

}  // namespace flash
