// Masks as data: their tensors, checks, and the block lists that a pass makes of them before the attention kernel.
#pragma once

#include <ATen/core/Tensor.h>

#include <algorithm>
#include <array>
#include <cstdint>
#include <numeric>
#include <optional>
#include <utility>

#include "api/checks.h"
#include "api/device.h"
#include "api/tensors.h"
#include "params/mask.h"
#include "plan/mask_plan.h"

namespace flash {

// flash_attn.masks.factors.MaskFactors, which says what each tensor means.
struct MaskTensors {
  OptionalTensor query_ranges, key_hidden, bits, block_map;
  int64_t block_q = 0, block_k = 0;  // of block_map

  struct Named {
    const char* name;
    const OptionalTensor& tensor;
  };
  std::array<Named, 4> named() const {
    return {{{"mask.query_ranges", query_ranges},
             {"mask.key_hidden", key_hidden},
             {"mask.bits", bits},
             {"mask.block_map", block_map}}};
  }
  bool given() const {
    return query_ranges.has_value() || key_hidden.has_value() || bits.has_value() || block_map.has_value();
  }
};

namespace checks {

inline void mask_factor(const char* name, const at::Tensor& tensor, const at::Tensor& q, int64_t dims,
                        at::ScalarType type) {
  device(name, tensor, q);
  dtype(name, tensor, type);
  if (tensor.dim() != dims) fail(name, "expected ", dims, " dimensions, got ", tensor.sizes());
  const int64_t heads = q.size(-2), own = tensor.size(-3);
  if (own != heads && (own == 0 || heads % own != 0)) {
    fail(name, "expected a head count that divides ", heads, ", got shape ", tensor.sizes());
  }
  if (!tensor.is_contiguous()) fail(name, "expected a contiguous tensor, got strides ", tensor.strides());
}

// rows, last: of the last two axes; two_ranges: the last one may be 4 too.
inline void mask_sizes(const char* name, const at::Tensor& tensor, int64_t rows, int64_t last, bool two_ranges) {
  const int64_t own = tensor.size(-1);
  if (tensor.size(-2) == rows && (own == last || (two_ranges && own == 2 * last))) return;
  fail(name, "expected ", rows, " x ", last, two_ranges ? " or 4" : "", " as its last two sizes, got shape ",
       tensor.sizes());
}

inline int64_t mask_words(int64_t keys) { return (keys + kMaskWordKeys - 1) / kMaskWordKeys; }

inline void mask_blocks(const MaskTensors& mask, const at::Tensor& q, int64_t seqlen_k) {
  if (!mask.block_map.has_value()) return;
  const std::string got = "(" + text(mask.block_q) + ", " + text(mask.block_k) + ")";
  if (mask.block_q <= 0 || mask.block_k <= 0) fail("mask", "expected a block_size of positive ints, got ", got);
  if (mask.block_q % kMaskStrip != 0 || mask.block_k % kMaskStrip != 0) {
    fail("mask", "expected a block_size of multiples of ", int64_t{kMaskStrip}, " on CUDA, got ", got);
  }
  const auto blocks = [](int64_t length, int64_t size) { return length / size + (length % size != 0); };
  mask_sizes("mask.block_map", *mask.block_map, blocks(q.size(1), mask.block_q), blocks(seqlen_k, mask.block_k), false);
}

inline void mask_overlap(const MaskTensors& mask, overlap::Operands written) {
  overlap::check(written, {{"mask.query_ranges", mask.query_ranges},
                           {"mask.key_hidden", mask.key_hidden},
                           {"mask.bits", mask.bits},
                           {"mask.block_map", mask.block_map}});
}

// The mask of a dense batch. The values of its tensors are not read here: whatever they are, kernels stay inside
// memory.
inline void mask(const MaskTensors& mask, const at::Tensor& q, int64_t seqlen_k) {
  for (const auto& [name, tensor] : mask.named()) {
    if (tensor.has_value() && tensor->dim() == 3) {
      fail("mask", "expected a mask of dense sequences, got one of packed sequences");
    }
  }
  const int64_t batch = q.size(0);
  for (const auto& [name, tensor] : mask.named()) {
    if (!tensor.has_value()) continue;
    mask_factor(name, *tensor, q, 4, &tensor == &mask.block_map ? at::kByte : at::kInt);
    if (tensor->size(0) != 1 && tensor->size(0) != batch) {
      fail(name, "expected a batch of 1 or ", batch, ", got shape ", tensor->sizes());
    }
  }
  if (mask.query_ranges.has_value()) mask_sizes("mask.query_ranges", *mask.query_ranges, q.size(1), 2, true);
  if (mask.key_hidden.has_value()) mask_sizes("mask.key_hidden", *mask.key_hidden, seqlen_k, 2, true);
  if (mask.bits.has_value()) mask_sizes("mask.bits", *mask.bits, q.size(1), mask_words(seqlen_k), false);
  mask_blocks(mask, q, seqlen_k);
}

// Of a packed one.
inline void packed_mask(const MaskTensors& mask, const at::Tensor& q, int64_t total_k, int64_t max_seqlen_k) {
  bool is_packed = false;
  for (const auto& [name, tensor] : mask.named()) is_packed |= tensor.has_value() && tensor->dim() == 3;
  if (!is_packed) fail("mask", "expected a mask of packed sequences, got one of dense sequences");
  if (mask.block_map.has_value()) fail("mask", "expected no block_map for packed sequences, got one");
  for (const auto& [name, tensor] : mask.named()) {
    if (tensor.has_value()) mask_factor(name, *tensor, q, 3, at::kInt);
  }
  if (mask.query_ranges.has_value()) mask_sizes("mask.query_ranges", *mask.query_ranges, q.size(0), 2, true);
  if (mask.key_hidden.has_value()) mask_sizes("mask.key_hidden", *mask.key_hidden, total_k, 2, true);
  if (mask.bits.has_value()) mask_sizes("mask.bits", *mask.bits, q.size(0), mask_words(max_seqlen_k), false);
}

}  // namespace checks

// ---- parameters ----

// Of a factor whose tensor is (b_m, h_m, ...), or packed (h_m, ...).
inline MaskMatrices mask_matrices(const at::Tensor& tensor, int heads) {
  MaskMatrices matrices;
  matrices.heads = static_cast<int>(tensor.size(-3));
  matrices.per_batch = tensor.dim() == 4 && tensor.size(0) > 1;
  matrices.group = FastDiv(std::max(heads / matrices.heads, 1));
  return matrices;
}

// Mask matrices of all factors together: heads or batch entries share one only if they do so in every factor.
inline MaskMatrices mask_matrices(const MaskTensors& mask, int heads) {
  MaskMatrices all;
  for (const auto& [name, tensor] : mask.named()) {
    if (!tensor.has_value()) continue;
    const MaskMatrices own = mask_matrices(*tensor, heads);
    all.heads = std::lcm(all.heads, own.heads);
    all.per_batch |= own.per_batch;
  }
  all.group = FastDiv(std::max(heads / all.heads, 1));
  return all;
}

// The number that a plan needs; 0 where it hides nothing because there are no scores.
inline int64_t mask_matrix_count(const MaskTensors& mask, const Flash_fwd_params& params) {
  if (params.b == 0 || params.seqlen_q == 0 || params.seqlen_k == 0 || params.h == 0) return 0;
  const MaskMatrices matrices = mask_matrices(mask, params.h);
  return plan::product(matrices.per_batch ? params.b : 1, matrices.heads);
}

inline MaskParams mask_params(const MaskTensors& mask, int heads) {
  MaskParams params;
  params.matrices = mask_matrices(mask, heads);
  MaskFactors& factors = params.factors;
  if (mask.query_ranges.has_value()) {
    factors.query_ranges = mask.query_ranges->const_data_ptr<int>();
    factors.query_intervals = static_cast<int>(mask.query_ranges->size(-1) / 2);
    factors.of_ranges = mask_matrices(*mask.query_ranges, heads);
  }
  if (mask.key_hidden.has_value()) {
    factors.key_hidden = mask.key_hidden->const_data_ptr<int>();
    factors.key_intervals = static_cast<int>(mask.key_hidden->size(-1) / 2);
    factors.of_hidden = mask_matrices(*mask.key_hidden, heads);
  }
  if (mask.bits.has_value()) {
    factors.bits = reinterpret_cast<const uint32_t*>(mask.bits->const_data_ptr<int>());
    factors.row_words = static_cast<int>(mask.bits->size(-1));
    factors.of_bits = mask_matrices(*mask.bits, heads);
  }
  if (mask.block_map.has_value()) {
    const auto block = [](int64_t size) { return FastDiv(static_cast<int>(std::min<int64_t>(size, kMaxLength + 1))); };
    factors.block_map = mask.block_map->const_data_ptr<uint8_t>();
    factors.map_rows = static_cast<int>(mask.block_map->size(-2));
    factors.map_cols = static_cast<int>(mask.block_map->size(-1));
    factors.map_block_rows = block(mask.block_q);
    factors.map_block_keys = block(mask.block_k);
    factors.of_map = mask_matrices(*mask.block_map, heads);
  }
  return params;
}

// ---- the pass ----

// Makes the lists of `plan` for the kernels after it, which get them in `mask`. call: with the segments of a packed
// batch. The result is the memory of the lists: it must outlive the launches that read them.
inline at::Tensor make_block_lists(MaskParams& mask, const plan::MaskPlan& plan, const Flash_fwd_params& call,
                                   const at::Tensor& q) {
  at::Tensor workspace = new_empty(q, {plan.words()}, at::kInt);
  int* const words = workspace.mutable_data_ptr<int>();
  auto* const bounds = reinterpret_cast<StripBounds::Stored*>(words);  // first: 16 bytes at a time
  uint32_t* const seen = reinterpret_cast<uint32_t*>(words + plan.bounds_words());
  mask.seen.rows = seen;
  mask.seen.keys = seen + plan.matrices * plan.row_strips * plan::kStripSeenWords;
  mask.seen.row_strips = static_cast<int>(plan.row_strips);
  mask.seen.key_strips = static_cast<int>(plan.key_strips);
  mask.lists.entries = seen + plan.seen_words();
  mask.lists.counts = reinterpret_cast<BlockCount*>(mask.lists.entries + plan.entry_words());
  mask.lists.tiles = static_cast<int>(plan.tiles);
  mask.lists.capacity = static_cast<int>(plan.capacity);
  MaskPlanParams params;
  params.call = call;
  params.mask = mask;
  params.matrices = static_cast<int>(plan.matrices);
  params.of_keys = plan.of_keys;
  params.tile = plan.tile;
  params.block = plan.block;
  params.bounds = {bounds, bounds + plan.strips()};
  params.group_bounds = {bounds + 2 * plan.strips(), bounds + 2 * plan.strips() + plan.groups()};
  check_launch(run_mask_plan(params, c10::cuda::getCurrentCUDAStream().stream()), "mask_plan_kernel", q);
  return workspace;
}

// Bool (..., n) as int32 words (..., ceil(n / 32)), the first one in the lowest bit.
inline at::Tensor pack_bits(const at::Tensor& bools) {
  if (!bools.is_cuda()) checks::fail("bools", "expected a CUDA tensor, got one on ", bools.device());
  checks::strided("bools", bools);
  checks::dtype("bools", bools, at::kBool);
  if (bools.dim() == 0 || !bools.is_contiguous()) checks::fail("bools", "expected contiguous rows");
  PackBitsParams params;
  params.cols = bools.size(-1);
  params.rows = params.cols == 0 ? 0 : bools.numel() / params.cols;
  at::DimVector shape(bools.sizes());
  shape.back() = params.row_words();
  const CallDevice device(bools.device());
  const at::Tensor bits = new_empty(bools, shape, at::kInt);
  params.bools = static_cast<const uint8_t*>(bools.const_data_ptr());
  params.bits = reinterpret_cast<uint32_t*>(bits.mutable_data_ptr<int>());
  params.device = bools.device().index();
  check_launch(run_pack_bits(params, c10::cuda::getCurrentCUDAStream().stream()), "pack_bits_kernel", bools);
  return bits;
}

}  // namespace flash
