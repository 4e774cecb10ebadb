// Parameters -> the problems that plans take.
#pragma once

#include <algorithm>
#include <cstdint>
#include <limits>

#include "params/flash.h"
#include "plan/problem.h"

namespace flash {

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
