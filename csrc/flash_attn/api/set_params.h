// Tensors and options -> the plain parameters of params/flash.h, and these -> the problems that plans take.
#pragma once

#include <ATen/core/Generator.h>
#include <ATen/core/Tensor.h>
#include <ATen/cuda/CUDAGeneratorImpl.h>
#include <c10/cuda/CUDAStream.h>

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <limits>
#include <mutex>
#include <optional>

#include "api/scores.h"
#include "api/tensors.h"
#include "params/flash.h"
#include "plan/fwd_plan.h"
#include "plan/problem.h"

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

// ---- memory that the kernels of one call share ----

inline int64_t varlen_words(const Flash_fwd_params& params) { return plan::varlen_words(params.is_varlen(), params.b); }

// Points the parameters of a packed batch to varlen_words() of memory.
inline void set_params_varlen_workspace(Flash_fwd_params& params, int* words) {
  if (!params.is_varlen()) return;
  params.varlen.segments_q = words;
  params.varlen.segments_k = params.varlen.segments_q + params.b + 3;
  params.varlen.key_ranges = params.varlen.segments_k + params.b + 3;
}

// `workspace` must outlive the launches that read it.
inline cudaError_t prepare(Flash_fwd_params& params, bool takes_semaphore, const at::Tensor& q, at::Tensor& workspace) {
  const int64_t words = varlen_words(params) + takes_semaphore;
  if (words == 0) return cudaSuccess;
  workspace = new_empty(q, {words}, at::kInt);
  int* const begin = workspace.mutable_data_ptr<int>();
  set_params_varlen_workspace(params, begin);
  if (takes_semaphore) params.tile_count_semaphore = begin + words - 1;
  return run_prepare(params, c10::cuda::getCurrentCUDAStream().stream());
}

// ---- problems ----

inline plan::MatrixShape matrix_shape(const Flash_fwd_params& params, const MatrixStrides& strides, bool is_query,
                                      bool is_packed) {
  return {is_packed,
          params.b,
          is_query ? params.seqlen_q : params.seqlen_k,
          is_query ? params.h : params.h_k,
          strides.batch,
          strides.row,
          strides.head};
}

inline void set_problem(plan::Problem& problem, const Flash_fwd_params& params, Dtype dtype) {
  problem.dtype = dtype;
  problem.is_varlen = params.is_varlen();
  problem.batch = params.b;
  problem.heads = params.h;
  problem.heads_k = params.h_k;
  problem.head_dim = params.d;
  problem.head_dim_v = params.d_v;
  problem.seqlen_q = params.seqlen_q;
  problem.seqlen_k = params.seqlen_k;
  problem.window = params.window;
  problem.modifiers = params.modifiers();
  problem.has_softcap = params.softcap > 0.0f;
  problem.has_dropout = params.has_dropout;
  problem.has_origins = params.origins_ptr != nullptr;
  problem.batch_invariant = params.batch_invariant;
}

inline int clamped_int(int64_t value) {
  return static_cast<int>(std::min<int64_t>(value, std::numeric_limits<int>::max()));
}

// has_key_ranges: the keys of a cache, whose lengths only the device knows.
inline plan::FwdProblem fwd_problem(const Flash_fwd_params& params, Dtype dtype, bool has_key_ranges = false) {
  plan::FwdProblem problem;
  set_problem(problem, params, dtype);
  problem.has_sinks = params.sinks_ptr != nullptr;
  problem.has_key_ranges = has_key_ranges;
  problem.is_paged = params.is_paged();
  problem.num_pages = params.paged.num_pages;
  problem.pages_per_sequence = params.paged.pages_per_sequence;
  problem.page_size = params.paged.page_size.divisor;

  const bool keys_packed = params.is_varlen() || has_key_ranges;
  const auto holds = [&](const MatrixStrides& strides, bool is_query) {
    const bool is_packed = is_query ? params.is_varlen() : keys_packed;
    return plan::tensor_map_holds(matrix_shape(params, strides, is_query, is_packed), dtype);
  };
  const auto holds_pages = [&](const MatrixStrides& strides) {
    return plan::tensor_map_holds(
        {false, problem.num_pages, problem.page_size, problem.heads_k, strides.batch, strides.row, strides.head},
        dtype);
  };
  const bool loads_keys = params.seqlen_k > 0 && !params.is_paged();
  problem.fits_tensor_maps = holds(params.q_strides, true) && holds(params.o_strides, true) &&
                             (!loads_keys || (holds(params.k_strides, false) && holds(params.v_strides, false)));
  problem.fits_page_maps = params.is_paged() && holds_pages(params.k_strides) && holds_pages(params.v_strides);
  return problem;
}

// Rows of a cache from one sequence to the next; -1: not a whole number, so the cache is no packed tensor.
inline int64_t rows_per_sequence(const MatrixStrides& strides) {
  return strides.row > 0 && strides.batch % strides.row == 0 ? strides.batch / strides.row : -1;
}

// Keys that a sequence of a forward may have.
inline int split_capacity(const Flash_fwd_params& params) {
  const PagedKv& paged = params.paged;
  if (paged.block_table == nullptr) return params.seqlen_k;
  return static_cast<int>(
      std::min<int64_t>(static_cast<int64_t>(paged.pages_per_sequence) * paged.page_size.divisor, kMaxLength));
}

// A forward as the decode kernels see it: a dense batch is a full cache; of a packed one the schedule kernel linearises
// the work. keys: of a sequence, on average. Q has 16-byte vectors.
inline plan::DecodeProblem decode_problem(const Flash_fwd_params& params, Dtype kv_dtype, int64_t keys) {
  plan::DecodeProblem problem;
  problem.is_forward = true;
  problem.batch = params.b;
  problem.seqlen_q = params.seqlen_q;
  problem.heads = params.h;
  problem.heads_k = params.h_k;
  problem.head_dim = params.d;
  problem.capacity = split_capacity(params);
  problem.is_packed = params.is_varlen();
  problem.packed_keys = clamped_int(keys);
  problem.kv_dtype = kv_dtype;
  problem.options.window = params.window;
  problem.options.has_score_mod = params.has_score_mod;
  problem.options.page_size = params.is_paged() ? params.paged.page_size.divisor : 0;
  return problem;
}

inline plan::BwdProblem bwd_problem(const Flash_bwd_params& params, Dtype dtype, bool deterministic,
                                    plan::BwdStage stage) {
  plan::BwdProblem problem;
  set_problem(problem, params, dtype);
  problem.stage = stage;
  problem.deterministic = deterministic;
  problem.accumulates_dkv = params.accumulates_dkv;
  problem.fits_tensor_maps = true;
  for (const MatrixStrides* strides : {&params.q_strides, &params.do_strides, &params.dq_strides}) {
    problem.fits_tensor_maps &= plan::tensor_map_holds(matrix_shape(params, *strides, true, params.is_varlen()), dtype);
  }
  for (const MatrixStrides* strides : {&params.k_strides, &params.v_strides, &params.dk_strides, &params.dv_strides}) {
    problem.fits_tensor_maps &=
        plan::tensor_map_holds(matrix_shape(params, *strides, false, params.is_varlen()), dtype);
  }
  return problem;
}

}  // namespace flash
