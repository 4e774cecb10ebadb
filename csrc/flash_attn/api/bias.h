// Biases as data: their checks and parameters, and their gradients after a backward.
#pragma once

#include <ATen/core/Tensor.h>
#include <ATen/ops/narrow.h>
#include <ATen/ops/sum.h>

#include <algorithm>
#include <limits>
#include <vector>

#include "api/checks.h"
#include "api/device.h"
#include "api/tensors.h"
#include "params/bias.h"
#include "plan/bwd_plan.h"
#include "plan/grid.h"
#include "plan/problem.h"

namespace flash {

struct BiasTensors {
  OptionalTensor attn_bias;  // (b | 1, h | 1, sq | 1, sk | 1), or packed (h | 1, total_q, max_seqlen_k)
  OptionalTensor rel_bias;   // (h, 2 R + 1)

  bool given() const { return attn_bias.has_value() || rel_bias.has_value(); }
  // An attn_bias without columns says that no packed sequence has keys: kernels do not get it.
  bool has_data() const { return attn_bias.has_value() && attn_bias->numel() > 0; }
  bool is_read() const { return has_data() || rel_bias.has_value(); }
};

// ---- checks ----

namespace checks {

inline void bias_dtype(const at::Tensor& bias, const at::Tensor& q) {
  const at::ScalarType own = bias.scalar_type();
  if (own == at::kFloat || (!is_8bit(q) && own == q.scalar_type())) return;
  if (is_8bit(q)) return dtype("attn_bias", bias, at::kFloat);
  fail("attn_bias", "expected dtype ", dtype_name(q.scalar_type()), " or float32, got ", dtype_name(own));
}

inline void rel_bias(const at::Tensor& bias, const at::Tensor& q) {
  device("rel_bias", bias, q);
  dtype("rel_bias", bias, at::kFloat);
  const bool fits =
      bias.dim() == 2 && bias.size(0) == q.size(-2) && bias.size(1) % 2 == 1 && bias.size(1) <= kMaxLength;
  if (!fits) fail("rel_bias", "expected shape [", q.size(-2), ", 2 R + 1], got ", bias.sizes());
}

// "1 or 4", as each size of attn_bias may be.
inline std::string size_or_one(int64_t size) {
  if (size == 1) return "1";
  return size < 1 ? text(size) + " or 1" : "1 or " + text(size);
}

// Of a dense call.
inline void biases(const BiasTensors& bias, const at::Tensor& q, int64_t seqlen_k) {
  if (bias.attn_bias.has_value()) {
    const at::Tensor& given = *bias.attn_bias;
    device("attn_bias", given, q);
    bias_dtype(given, q);
    const int64_t sizes[4] = {q.size(0), q.size(2), q.size(1), seqlen_k};
    bool fits = given.dim() == 4;
    std::string shown;
    for (int axis = 0; axis < 4; ++axis) {
      fits = fits && (given.size(axis) == 1 || given.size(axis) == sizes[axis]);
      shown += (axis ? ", " : "") + size_or_one(sizes[axis]);
    }
    if (!fits) fail("attn_bias", "expected shape [", shown, "], got ", given.sizes());
  }
  if (bias.rel_bias.has_value()) rel_bias(*bias.rel_bias, q);
}

// Of a packed one.
inline void packed_biases(const BiasTensors& bias, const at::Tensor& q, int64_t max_seqlen_k) {
  if (bias.attn_bias.has_value()) {
    const at::Tensor& given = *bias.attn_bias;
    device("attn_bias", given, q);
    bias_dtype(given, q);
    const int64_t heads = q.size(1), total_q = q.size(0);
    const bool fits = given.dim() == 3 && (given.size(0) == 1 || given.size(0) == heads) && given.size(1) == total_q &&
                      given.size(2) == max_seqlen_k;
    if (!fits) {
      fail("attn_bias", "expected shape [", size_or_one(heads), ", ", total_q, ", ", max_seqlen_k, "], got ",
           given.sizes());
    }
  }
  if (bias.rel_bias.has_value()) rel_bias(*bias.rel_bias, q);
}

}  // namespace checks

// ---- parameters ----

inline bool has_scores(const Flash_fwd_params& params) {
  return params.b > 0 && params.h > 0 && params.seqlen_q > 0 && params.seqlen_k > 0;
}

// Whether a tensor map describes attn_bias: axes along which it is broadcast have length 1 there.
inline bool loads_boxes(const ScoreBias& bias, bool is_packed) {
  const int64_t halves = bias.element_bytes() / 2;
  const auto length = [](int64_t stride) { return stride == 0 ? 1 : 2; };
  const plan::MatrixShape shape{is_packed,
                                length(bias.batch_stride),
                                length(bias.row_stride),
                                length(bias.head_stride),
                                halves * bias.batch_stride,
                                halves * bias.row_stride,
                                halves * bias.head_stride};
  return bias.col_stride == 1 && reinterpret_cast<uintptr_t>(bias.data) % 16 == 0 &&
         !(is_packed && bias.row_stride == 0) && plan::tensor_map_holds(shape, Dtype::kFp16);
}

// Of calls that have scores.
inline ScoreBias bias_params(const BiasTensors& bias) {
  ScoreBias params;
  if (bias.has_data()) {
    const at::Tensor& given = *bias.attn_bias;
    const auto stride = [&given](int64_t axis) { return given.size(axis) == 1 ? 0 : given.stride(axis); };
    params.data = given.const_data_ptr();
    params.is_float = given.scalar_type() == at::kFloat;
    params.batch_stride = given.dim() == 4 ? stride(0) : 0;
    params.head_stride = stride(-3);
    params.row_stride = stride(-2);
    params.col_stride = stride(-1);
    const bool has_cols = given.dim() == 3 || given.size(-1) > 1;
    params.cols = has_cols ? static_cast<int>(given.size(-1)) : std::numeric_limits<int>::max();
    const bool even = params.batch_stride % 2 == 0 && params.head_stride % 2 == 0 && params.row_stride % 2 == 0;
    const auto address = reinterpret_cast<uintptr_t>(params.data);
    params.loads_pairs = params.col_stride == 1 && even && address % (2 * given.element_size()) == 0;
    params.loads_boxes = loads_boxes(params, given.dim() == 3);
  }
  if (bias.rel_bias.has_value()) {
    params.table = bias.rel_bias->const_data_ptr<float>();
    params.reach = static_cast<int>(bias.rel_bias->size(1) / 2);
  }
  return params;
}

// The table as kernels read it.
inline BiasTensors readable(const BiasTensors& bias) {
  BiasTensors result = bias;
  if (bias.rel_bias.has_value()) result.rel_bias = bias.rel_bias->contiguous();  // the caller's if it is
  return result;
}

// ---- gradients ----

// Thread blocks that keep every multiprocessor busy, about.
constexpr int64_t kWantedBiasBlocks = 1024;

inline BiasTiles score_tiles(const Flash_bwd_params& call) {
  BiasTiles tiles;
  tiles.all_batches = call.is_varlen() ? 1 : call.b;
  tiles.all_heads = call.h;
  tiles.m_blocks = plan::m_blocks(call.is_varlen(), call.is_varlen() ? call.b : 1, call.seqlen_q, BiasTiles::kBlockM);
  return tiles;
}

inline void set_chunks(BiasTiles& tiles) {
  constexpr int64_t kMostFloats = int64_t{1} << 24;
  const int64_t wanted = (kWantedBiasBlocks + tiles.owners() - 1) / tiles.owners();
  tiles.chunks = std::clamp<int64_t>(wanted, 1, tiles.items());
  while (tiles.chunks > 1 && tiles.partial_floats() > kMostFloats) tiles.chunks = (tiles.chunks + 1) / 2;
}

inline BiasTiles attn_bias_tiles(const at::Tensor& bias, const Flash_bwd_params& call) {
  BiasTiles tiles = score_tiles(call);
  tiles.batches = bias.dim() == 4 ? bias.size(0) : 1;
  tiles.heads = bias.size(-3);
  tiles.rows = bias.size(-2);
  tiles.cols = bias.size(-1);
  tiles.sums_rows = bias.dim() == 4 && tiles.rows != call.seqlen_q;
  tiles.sums_cols = bias.dim() == 4 && tiles.cols != call.seqlen_k;
  const int64_t cols = tiles.sums_cols ? call.seqlen_k : tiles.cols;
  tiles.n_blocks = (cols + BiasTiles::kBlockN - 1) / BiasTiles::kBlockN;
  set_chunks(tiles);
  return tiles;
}

inline BiasTiles rel_bias_tiles(const at::Tensor& bias, const Flash_bwd_params& call) {
  BiasTiles tiles = score_tiles(call);
  tiles.of_table = true;
  tiles.heads = call.h;
  tiles.reach = static_cast<int>(bias.size(1) / 2);
  tiles.set_near(call.seqlen_q, call.seqlen_k, call.origins_ptr != nullptr);
  // The sums far from the diagonal are the most work, and belong to few owners.
  constexpr int64_t kMostFloats = int64_t{1} << 24;
  tiles.chunks = std::clamp<int64_t>(kWantedBiasBlocks / (2 * tiles.heads), 1, tiles.items());
  while (tiles.chunks > 1 && tiles.partial_floats() > kMostFloats) tiles.chunks = (tiles.chunks + 1) / 2;
  return tiles;
}

// Bytes of a dS that is stored to be summed. A larger one is computed again, tile by tile.
constexpr int64_t kMostStoredBytes = int64_t{1} << 31;

// How the gradient of rel_bias is summed from a stored dS. No parts, so that dS is computed again: without a rel_bias,
// in packed calls and calls with origins, whose sequences differ in diagonals, and for a long table.
inline DiagonalParts diagonal_parts(const BiasTensors& bias, const Flash_bwd_params& call) {
  constexpr int64_t kMostFloats = int64_t{1} << 26;
  DiagonalParts parts;
  if (!bias.rel_bias.has_value() || call.is_varlen() || call.origins_ptr != nullptr) return parts;
  parts.set(call.b, call.seqlen_q, call.seqlen_k, static_cast<int>(bias.rel_bias->size(1) / 2));
  return call.h * parts.parts * parts.strip_floats() <= kMostFloats ? parts : DiagonalParts();
}

// Whether the gradient of attn_bias sums matrices of dS, or is dS.
inline bool sums_matrices(const at::Tensor& bias, const Flash_bwd_params& call) {
  return bias.dim() == 3 || (bias.size(-2) == call.seqlen_q && bias.size(-1) == call.seqlen_k);
}

// Whether what no kernel writes must be 0: scores that a window hides are left out of sums of matrices.
inline bool clears_ds(const Flash_bwd_params& call, const BiasTensors& bias, bool has_mask) {
  if (call.is_varlen() || has_mask) return true;
  return call.window.may_mask() && (bias.rel_bias.has_value() || !sums_matrices(*bias.attn_bias, call));
}

// dS for the gradients of biases where it is stored, of rows of whole vectors: call.ds describes it. Undefined
// otherwise.
inline at::Tensor allocate_ds(Flash_bwd_mask_params& call, const BiasTensors& bias, const plan::BwdPlan& plan,
                              bool has_mask, const at::Tensor& q) {
  const bool of_data = bias.has_data(), is_packed = call.is_varlen();
  if (!has_scores(call) || (!of_data && diagonal_parts(bias, call).parts == 0)) return at::Tensor();
  constexpr int64_t kVector = 8;
  const int64_t batch = is_packed ? 1 : call.b, heads = call.h, rows = call.seqlen_q;
  const int64_t cols = is_packed ? bias.attn_bias->size(2) : call.seqlen_k;
  const int64_t pitch = (cols + kVector - 1) / kVector * kVector, elements = batch * heads * rows * pitch;
  const bool has_size = of_data && pitch == cols && bias.attn_bias->numel() == elements;
  const bool may_be_float = plan.may_store_float_ds && !is_packed && !bias.rel_bias.has_value();
  const bool is_float = has_size && may_be_float && bias.attn_bias->scalar_type() == at::kFloat;
  const bool is_result = is_float || (has_size && bias.attn_bias->scalar_type() == q.scalar_type());
  const MatrixStrides strides{heads * rows * pitch, pitch, rows * pitch};
  const bool fits =
      plan::tensor_map_holds({is_packed, batch, rows, heads, strides.batch, strides.row, strides.head}, plan.dtype);
  if (!fits || (!is_result && dtype_bytes(plan.dtype) * elements > kMostStoredBytes)) return at::Tensor();
  at::DimVector shape{batch, heads, rows, pitch};
  if (is_packed) shape.erase(shape.begin());
  const bool clears = clears_ds(call, bias, has_mask);
  const at::ScalarType type = is_float ? at::kFloat : q.scalar_type();
  const at::Tensor ds = clears ? new_zeros(q, shape, type) : new_empty(q, shape, type);
  call.ds = {ds.mutable_data_ptr(), strides, static_cast<int>(cols), is_float};
  return ds;
}

// The gradient of attn_bias from a stored dS: sums of its matrices, or dS itself.
inline at::Tensor sum_matrices(const at::Tensor& given, const at::Tensor& ds, const Flash_bwd_mask_params& call,
                               Dtype dtype) {
  const bool is_packed = given.dim() == 3;
  const int64_t batches = is_packed ? 1 : call.b, heads = call.h;
  const bool all_batches = is_packed || given.size(0) == batches, all_heads = given.size(-3) == heads;
  ScoreSum sum;
  sum.cols = call.ds.cols;
  const bool is_result = all_batches && all_heads && given.scalar_type() == ds.scalar_type() && ds.size(-1) == sum.cols;
  if (is_result && (is_packed || !call.window.may_mask())) return ds;
  const at::Tensor result = is_result ? ds : new_empty(ds, given.sizes(), given.scalar_type());
  sum.data = ds.const_data_ptr();
  sum.out_ptr = result.mutable_data_ptr();
  sum.out_is_float = given.scalar_type() == at::kFloat;
  sum.dtype = dtype;
  sum.device = call.device;
  sum.row_vectors = call.ds.strides.row / 8;
  sum.visibility = {static_cast<int>(ds.size(-2)), sum.cols, is_packed ? Window() : call.window};
  sum.matrices = (all_batches ? batches : 1) * (all_heads ? heads : 1);
  sum.first_step = all_heads ? 1 : all_batches ? heads : 0;
  sum.step = all_heads ? heads : 1;
  sum.count = static_cast<int>((all_batches ? 1 : batches) * (all_heads ? 1 : heads));
  check_launch(run_sum_scores(sum, c10::cuda::getCurrentCUDAStream().stream()), "sum_scores_kernel", ds);
  return result;
}

// The same along all axes along which the bias is broadcast.
inline at::Tensor sum_scores(const at::Tensor& given, const at::Tensor& ds, const Flash_bwd_mask_params& call,
                             Dtype dtype) {
  if (sums_matrices(given, call)) return sum_matrices(given, ds, call, dtype);
  const int64_t cols = call.ds.cols;
  at::DimVector axes;
  for (int64_t axis = 0; axis < given.dim(); ++axis) {
    if (given.size(axis) != (axis + 1 < given.dim() ? ds.size(axis) : cols)) axes.push_back(axis);
  }
  return at::sum(ds.size(-1) == cols ? ds : at::narrow(ds, -1, 0, cols), axes, true, given.scalar_type());
}

// That of rel_bias.
inline void sum_diagonals(const at::Tensor& result, const DiagonalParts& parts, const Flash_bwd_mask_params& call,
                          Dtype dtype, const at::Tensor& q) {
  DiagonalSum sum;
  sum.ds = call.ds;
  sum.dtype = dtype;
  sum.device = call.device;
  sum.heads = call.h;
  sum.rows = call.seqlen_q;
  sum.parts = parts;
  const at::Tensor partial = new_empty(q, {call.h * parts.parts * parts.strip_floats()}, at::kFloat);
  sum.partial_ptr = partial.mutable_data_ptr<float>();
  sum.out_ptr = result.mutable_data_ptr<float>();
  check_launch(run_sum_diagonals(sum, c10::cuda::getCurrentCUDAStream().stream()), "sum_diagonals_kernel", q);
}

// The gradients of those given, after the backward's launches: params has its segments and softmax_d, and `ds` is
// allocate_ds().
inline std::vector<at::Tensor> bias_gradients(const BiasTensors& bias, const Flash_bwd_mask_params& call, Dtype dtype,
                                              const at::Tensor& q, const at::Tensor& ds) {
  std::vector<at::Tensor> results;
  const auto add = [&](const at::Tensor& given, const auto& tiles_of) {
    const bool is_sum = has_scores(call) && given.numel() > 0, of_table = given.dim() == 2;
    if (ds.defined() && !of_table) {
      results.push_back(sum_scores(given, ds, call, dtype));
      return;
    }
    at::Tensor result =
        is_sum ? new_empty(q, given.sizes(), given.scalar_type()) : new_zeros(q, given.sizes(), given.scalar_type());
    results.push_back(result);
    if (!is_sum) return;
    const DiagonalParts parts = diagonal_parts(bias, call);
    if (ds.defined() && parts.parts > 0) return sum_diagonals(result, parts, call, dtype, q);
    BiasGradientParams params;
    params.call = call;
    params.factors = call.mask.factors;
    params.bias = call.mask.bias;
    params.dtype = dtype;
    params.tiles = tiles_of(given, call);
    params.out_ptr = result.mutable_data_ptr();
    params.out_is_float = given.scalar_type() == at::kFloat;
    at::Tensor partial;
    if (params.tiles.partial_floats() > 0) {
      partial = new_empty(q, {params.tiles.partial_floats()}, at::kFloat);
      params.partial_ptr = partial.mutable_data_ptr<float>();
    }
    check_launch(run_bias_gradient(params, c10::cuda::getCurrentCUDAStream().stream()), "bias_gradient_kernel", q);
  };
  if (bias.attn_bias.has_value()) add(*bias.attn_bias, attn_bias_tiles);
  if (bias.rel_bias.has_value()) add(*bias.rel_bias, rel_bias_tiles);
  return results;
}

}  // namespace flash
