// The plan of a forward of e4m3 q, k and v by the wgmma family: a FwdPlan, of one kernel. Plain C++17.
#pragma once

#include <cstdint>
#include <cstring>

#include "core/e4m3.h"
#include "plan/fwd_plan.h"

namespace flash {
namespace plan {

// Consumers of 64 rows: three if a third has enough registers. O has a separate buffer: it takes twice the bytes of Q.
constexpr Sm90FwdTile kSm90Fp8FwdTiles[] = {
    {64, 192, 128, 4, 2, false, 1, 0, 64},
    {128, 192, 128, 4, 2, false, 1, 0, 64},
    {256, 128, 128, 2, 2, false, 1, 0, 128},
};
// Of kernels that transpose V. They hold kFp8RawVStages stages of V before it is transposed too.
constexpr Sm90FwdTile kSm90Fp8TransposingTiles[] = {
    {64, 192, 128, 4, 2, false, 1, 0, 64},
    {128, 192, 128, 3, 2, false, 1, 0, 64},
};
constexpr int kFp8RawVStages = 2;

// head_dim 0: there is none.
constexpr Sm90FwdTile sm90_fp8_fwd_tile(int head_dim, bool transposes_v = false) {
  for (const Sm90FwdTile& tile : kSm90Fp8TransposingTiles) {
    if (transposes_v && tile.head_dim == head_dim) return tile;
  }
  for (const Sm90FwdTile& tile : kSm90Fp8FwdTiles) {
    if (!transposes_v && tile.head_dim == head_dim) return tile;
  }
  return Sm90FwdTile{};
}

// Rows of V^T in shared memory; the last ones are ones, of which P V makes the row sums.
constexpr int fp8_vt_rows(const Sm90FwdTile& tile) { return tile.value_dim() + 8; }

// Columns of a swizzle atom of Q and K, and of the TMA box that writes it.
constexpr int fp8_atom_cols(int head_dim) { return head_dim < 128 ? head_dim : 128; }

// Whether a kernel takes P straight from the scores (exp="fast"): at head dim 256 the products bound both.
constexpr bool fp8_has_exp_bits(int head_dim) { return head_dim <= 128; }

// sizeof(sm90::FwdStorage) of e4m3 operands and a 16-bit O.
constexpr int sm90_fp8_fwd_smem_bytes(const Sm90FwdTile& tile, bool transposes_v) {
  const int groups = tile.block_m / 64;
  const int barriers = 4 * tile.kv_stages + 1 + 3 * tile.q_stages * groups + 2 * 3;
  const int raw_v_stages = transposes_v ? kFp8RawVStages : 0;
  SmemLayout storage;
  storage.add(raw_v_stages * tile.block_n * tile.value_dim(), kSwizzleBytes)
      .add(2 * kBarrierBytes * raw_v_stages, kBarrierBytes)
      .add(tile.q_stages * tile.block_m * tile.head_dim, kSwizzleBytes)
      .add(tile.kv_stages * tile.block_n * tile.head_dim, kSwizzleBytes)
      .add(tile.kv_stages * tile.block_n * fp8_vt_rows(tile), kSwizzleBytes)
      .add(2 * groups * 64 * tile.o_cols, kSwizzleBytes)
      .add(16 * 4, 16)
      .add(kBarrierBytes * barriers, kBarrierBytes)
      .add(2 * slot_bytes(kWorkTileBytes), 16)
      .add(2 * slot_bytes(sizeof(KvBlockOrder)), 16)
      .add(2 * groups * slot_bytes(sizeof(DescendingTripCount<ColBounds>)), 16)
      .add(2 * 4, 4)
      .add(sizeof(ShortSoftcapSeries), 4);
  return storage.size(kSwizzleBytes);
}

// Whether these kernels support the call: e4m3 q, k and v with scales of the tensor, heads, or sequences and heads.
constexpr bool fp8_fwd_supports(const FwdProblem& problem, const Device& device) {
  const Sm90FwdTile tile = sm90_fp8_fwd_tile(problem.head_dim);
  return problem.q_dtype == Dtype::kE4m3 && problem.kv_dtype == Dtype::kE4m3 && tile.head_dim > 0 &&
         device.capability == kWgmmaCapability && has_wgmma_kernels(device, tile.head_dim) &&
         problem.head_dim_v == tile.head_dim && problem.has_queries() && problem.has_keys() &&
         problem.has_head_scales && !problem.has_score_mod() && !problem.has_dropout && !problem.returns_more() &&
         !problem.is_paged && !problem.gathers_keys && !problem.has_key_lengths && problem.fits_fp8_maps;
}

// Whether other kernels are faster: the decode kernels for short queries over many keys. `forced`: the value of
// FLASH_ATTN_FAMILY, or null (choose_family()).
inline bool fp8_fwd_declines(const FwdProblem& problem, const Device& device, const char* forced) {
  FamilyQuery query = family_query(problem, device);
  query.pass_cost = 0;  // V is transposed, nothing dequantised
  const bool forces_mma_sync = forced != nullptr && std::strcmp(forced, "mma_sync") == 0;
  return forces_mma_sync || choose_family(query, forced).family == Family::kDecode;
}

// Whether the kernel transposes V, at the cost of issue slots for each tile, or a pass does, at that of memory traffic
// for each key. With few blocks a tile the kernel is slower at head dim 128.
constexpr bool fp8_kernel_transposes_v(const FwdProblem& problem, const Device& device, int64_t work_tiles) {
  constexpr int64_t kMostRows = 4096, kLeastRowsOf128 = 1024;  // that see a key
  if (sm90_fp8_fwd_tile(problem.head_dim, true).head_dim == 0) return false;
  if (work_tiles <= device.multiprocessors) return true;
  const Window& window = problem.window;
  const bool is_half = window.may_mask_left() != window.may_mask_right();
  const int64_t rows = window.max_keys(problem.rows()) * (problem.heads / problem.heads_k) / (is_half ? 2 : 1);
  return rows <= kMostRows && (problem.head_dim < 128 || rows >= kLeastRowsOf128);
}

// Keys of a row of V^T in global memory, and their blocks.
constexpr int64_t fp8_vt_blocks(const FwdProblem& problem) {
  return problem.is_varlen
             ? varlen_slot_count(static_cast<int>(problem.seqlen_k), static_cast<int>(problem.batch), e4m3::kVtKeys)
             : (problem.seqlen_k + e4m3::kVtKeys - 1) / e4m3::kVtKeys;
}

inline FwdPlan plan_fp8_fwd(const FwdProblem& problem, const Device& device) {
  FwdPlan plan;
  plan.num_work_tiles =
      product(m_blocks(problem.is_varlen, problem.is_varlen ? static_cast<int>(problem.batch) : 1,
                       static_cast<int>(problem.seqlen_q), sm90_fp8_fwd_tile(problem.head_dim).block_m),
              problem.heads, problem.is_varlen ? 1 : problem.batch);
  const bool transposes_v = fp8_kernel_transposes_v(problem, device, plan.num_work_tiles);
  const Sm90FwdTile tile = sm90_fp8_fwd_tile(problem.head_dim, transposes_v);
  plan.family = Family::kWgmma;
  plan.variant = problem.window.may_mask() ? FwdVariant::kMasked : FwdVariant::kPlain;
  plan.is_fp8 = true;
  plan.fast_exp = problem.fast_exp && fp8_has_exp_bits(problem.head_dim);
  plan.vt_keys = transposes_v ? 0 : fp8_vt_blocks(problem) * e4m3::kVtKeys;
  plan.dtype = problem.out_dtype;
  plan.head_dim = plan.head_dim_v = tile.head_dim;
  plan.block_m = tile.block_m;
  plan.block_n = tile.block_n;
  plan.kv_stages = tile.kv_stages;
  plan.q_stages = tile.q_stages;
  plan.threads = sm90_fwd_threads(tile, plan.variant);
  plan.smem_bytes = sm90_fp8_fwd_smem_bytes(tile, transposes_v);
  if (plan.num_work_tiles > kMaxWorkTiles) return plan;  // too many
  plan.grid = plan.num_work_tiles < device.multiprocessors ? plan.num_work_tiles : device.multiprocessors;
  FwdProblem bytes = problem;  // heads of half the 16-bit columns take as much of L2
  bytes.head_dim /= 2;
  bytes.head_dim_v /= 2;
  set_tile_order(plan, bytes, device);
  plan.pdl = true;
  const int64_t vt_bytes =
      product(problem.is_varlen ? 1 : problem.batch, problem.heads_k, problem.head_dim_v, plan.vt_keys);
  plan.workspace_bytes = 4 * (varlen_words(problem.is_varlen, problem.batch) + plan.is_dynamic) + vt_bytes;
  return plan;
}

}  // namespace plan
}  // namespace flash
