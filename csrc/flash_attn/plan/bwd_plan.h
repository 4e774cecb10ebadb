// The plan of a backward: kernels, grids and block order. Plain C++17.
#pragma once

#include <algorithm>
#include <cstdint>

#include "core/bwd_schedule.h"
#include "plan/bwd_policy_sm90.h"
#include "plan/fwd_plan.h"

namespace flash {
namespace plan {

// kDropout: of the mma.sync family, which has score modifiers in all of its kernels; origins, biases and masks too.
// kGeneral: of the wgmma family, dropout and score modifiers. kAccumulate: dK and dV are added to fp32 tensors, in the
// mma.sync family with or without dropout, in the wgmma family by plain calls; there kGeneral adds for the others.
// kListed: of the wgmma family, all calls with a mask or a bias as data. kBiased: in its place with a bias, in one
// pass, at head dim 128 without dropout. kListedPlain: in its place with a mask and nothing else, in one pass.
enum class BwdVariant { kPlain, kDropout, kAccumulate, kGeneral, kListed, kBiased, kListedPlain };

constexpr const char* variant_name(BwdVariant variant) {
  switch (variant) {
    case BwdVariant::kPlain: return "plain";
    case BwdVariant::kDropout: return "dropout";
    case BwdVariant::kAccumulate: return "accumulate";
    case BwdVariant::kGeneral: return "general";
    case BwdVariant::kListed: return "listed";
    case BwdVariant::kBiased: return "biased";
    case BwdVariant::kListedPlain: return "listed_plain";
  }
  return "";
}

// Whether its wgmma kernels have room for the random bits of dropout.
constexpr bool may_drop(BwdVariant variant, const Sm90BwdTile& tile) {
  if (variant == BwdVariant::kBiased) return sm90_biased_bwd_may_drop(tile);
  return variant == BwdVariant::kGeneral || variant == BwdVariant::kListed;
}

struct BwdPlan {
  Family family = Family::kMmaSync;
  BwdVariant variant = BwdVariant::kPlain;
  Dtype dtype = Dtype::kBf16;
  int head_dim = 0, head_dim_v = 0;  // of the kernels
  int pad_head_dim = 0;              // columns that Q, K and V are padded to; 0: not padded
  bool small_tile = false;           // of kSmallBwdTiles
  bool dq_in_smem = false;           // CTAs take whole heads and accumulate dQ in shared memory, not in global
  bool dq_pass = false;              // a separate kernel computes dQ, which is not accumulated
  bool deterministic = false;
  bool may_store_ds = false;        // the kernel that computes dQ, for gradients of biases as data
  bool may_store_float_ds = false;  // in fp32 too
  bool long_rows = false;           // the tile is sm90_long_bwd_tile()
  BwdStage stage = BwdStage::kAll;

  int block_m = 0, block_n = 0;  // rows of a step, keys of a CTA
  int stages = 0;                // of Q and of dO; 0: the GPU has too little shared memory for any
  int threads = 0;
  int smem_bytes = 0;
  BwdGrid order;             // of the n_blocks
  int running_n_blocks = 0;  // n_blocks of a head that run at a time
  int64_t grid = 0;          // CTAs
  bool is_dynamic = false;   // n_blocks are handed out by a semaphore

  bool has_dq_sum = false;     // whether dQ has an fp32 accumulator in global memory, which several calls may add to
  int64_t dq_tiles = 0;        // of the fp32 accumulator of dQ in global memory, or work tiles of its separate kernel
  int64_t dq_tile_floats = 0;  // of the accumulator
  int64_t dq_grid = 0;         // CTAs of its conversion or separate kernel
  bool dq_is_dynamic = false;
  bool dq_overlaps = false;  // its kernel may begin on multiprocessors that have no n_block left
  int dq_threads = 0, dq_smem_bytes = 0;
  MaskPlan mask;                 // of calls with a mask
  MaskPlan dq_mask;              // of dQ's separate kernel
  int64_t softmax_d_rows = 0;    // of one head
  int64_t softmax_d_blocks = 0;  // CTAs of its kernel for each head (and sequence of a dense batch)
  int64_t workspace_bytes = 0;
  BwdBands bands;            // the main kernel prepares all but the first
  int preparing_shares = 0;  // of that work, about one for each CTA that does it

  constexpr bool has_value_dim() const { return head_dim_v != head_dim; }
  constexpr bool runs(BwdStage part) const { return stage == BwdStage::kAll || stage == part; }
  // A tile's floats have the order of the family's accumulators: in the wgmma family each warp has its own.
  constexpr int dq_tile_parts() const { return family == Family::kWgmma ? dq_threads / 32 : 1; }
  constexpr int64_t accum_words() const { return dq_tiles * dq_tile_floats; }
  constexpr bool has_dq_semaphores() const { return deterministic && !dq_in_smem && !dq_pass; }
  constexpr int64_t semaphore_words() const { return has_dq_semaphores() ? dq_tiles : 0; }
  // dq_accum, in deterministic mode a dq_semaphore for each of its tiles, and the tile_count_semaphore of each kernel:
  // cleared together, 16 bytes at a time. With bands, the counters come first and fill whole lines of memory: the
  // tile_count_semaphore, one counter for each band but the first, and one of shares. One clear covers them and the
  // first band.
  constexpr int64_t leading_words() const { return bands.count > 1 ? (bands.count + 1 + 31) / 32 * 32 : 0; }
  constexpr int64_t workspace_vectors() const {
    if (bands.count > 1) return (leading_words() + accum_words()) / 4;
    return dq_in_smem ? 0 : (accum_words() + semaphore_words() + (dq_pass ? 2 : 1) + 3) / 4;
  }
  constexpr int64_t cleared_vectors() const {
    return bands.count > 1 ? (leading_words() + bands.end_dq_tile(0) * dq_tile_floats) / 4 : workspace_vectors();
  }
};

inline void set_dq_accumulator(BwdPlan& plan, const BwdProblem& problem) {
  plan.has_dq_sum = true;
  plan.dq_tiles = product(problem.heads, m_blocks(problem.is_varlen, static_cast<int>(problem.batch),
                                                  static_cast<int>(problem.seqlen_q), plan.block_m));
  plan.dq_tile_floats = static_cast<int64_t>(plan.block_m) * plan.head_dim;
  plan.dq_grid = plan.dq_tiles;
  plan.dq_smem_bytes = dtype_bytes(problem.dtype) * plan.block_m * plan.head_dim;
}

inline BwdGrid n_block_grid(const BwdProblem& problem, int block_n, int64_t resident_blocks, int running) {
  return bwd_grid(problem.is_varlen, static_cast<int>(problem.batch), static_cast<int>(problem.heads_k),
                  static_cast<int>(problem.seqlen_k), block_n, resident_blocks, running);
}

// Whether a tile of keys begins with a strip of a mask.
constexpr bool may_be_listed(const BwdTile& tile) {
  return tile.block_n % kMaskStrip == 0 || kMaskStrip % tile.block_n == 0;
}

inline BwdPlan plan_bwd_mma_sync(const BwdProblem& problem, const Device& device) {
  BwdPlan plan;
  const BwdTile wanted = bwd_tile(problem.head_dim);
  const int wanted_smem_bytes = wanted.blocks_per_sm * bwd_smem_bytes(wanted, 1, problem.dtype);
  const bool fits = wanted_smem_bytes <= device.smem_per_block && (!problem.has_mask() || may_be_listed(wanted));
  plan.small_tile = small_bwd_tile(problem.head_dim) && !fits;
  const BwdTile tile = bwd_tile(problem.head_dim, plan.small_tile);
  const bool is_general = problem.has_dropout || problem.has_origins || problem.has_bias || problem.has_mask();
  plan.variant = problem.accumulates_dkv ? BwdVariant::kAccumulate
                 : is_general            ? BwdVariant::kDropout
                                         : BwdVariant::kPlain;
  plan.may_store_ds = problem.has_bias && !problem.has_softcap;
  plan.head_dim = plan.head_dim_v = tile.head_dim;
  plan.block_m = tile.block_m;
  plan.block_n = tile.block_n;
  for (int stages = 1; stages <= (tile.v_register_cols > 0 ? 1 : 2); ++stages) {
    if (bwd_smem_bytes(tile, stages, problem.dtype) <= device.smem_per_block) plan.stages = stages;
  }
  plan.threads = 32 * tile.warps;
  plan.smem_bytes = bwd_smem_bytes(tile, plan.stages, problem.dtype);
  plan.running_n_blocks = kRunningNBlocks;
  const int64_t resident =
      static_cast<int64_t>(device.multiprocessors) * bwd_blocks_per_sm(tile, plan.variant != BwdVariant::kPlain);
  plan.order = n_block_grid(problem, tile.block_n, resident, plan.running_n_blocks);
  plan.grid = plan.order.blocks;
  set_dq_accumulator(plan, problem);
  plan.dq_threads = plan.threads;
  if (problem.has_mask()) plan.mask = plan_mask(problem, true, list_size(tile.block_n), list_size(tile.block_m));
  return plan;
}

inline void set_dq_in_smem(BwdPlan& plan, const BwdProblem& problem, const Device& device) {
  plan.dq_in_smem = true;
  plan.order.heads_k = FastDiv(static_cast<int>(problem.heads_k));
  const int64_t heads = problem.batch * problem.heads_k;
  plan.grid = plan.order.blocks = heads < device.multiprocessors ? heads : device.multiprocessors;
}

// CTAs for so many work tiles, and whether a semaphore hands them out. More tiles than can be numbered: the launch
// fails.
inline int64_t persistent_grid(int64_t tiles, const Device& device, bool& is_dynamic) {
  is_dynamic = tiles > device.multiprocessors;
  return is_dynamic && tiles <= kMaxGridBlocks ? device.multiprocessors : tiles;
}

inline void set_dq_pass(BwdPlan& plan, const BwdProblem& problem, const Device& device, const Sm90BwdTile& tile) {
  plan.dq_pass = true;
  plan.dq_tiles = product(problem.heads, m_blocks(problem.is_varlen, static_cast<int>(problem.batch),
                                                  static_cast<int>(problem.seqlen_q), kSm90DqBlockM));
  plan.dq_grid = persistent_grid(plan.dq_tiles, device, plan.dq_is_dynamic);
  plan.dq_overlaps = !device.has_margin;
  plan.dq_threads = plan.threads;
  plan.dq_smem_bytes = sm90_dq_smem_bytes(tile, may_drop(plan.variant, tile), problem.dtype);
  if (problem.has_mask()) plan.dq_mask = plan_mask(problem, false, kSm90DqBlockM, kSm90DqBlockN);
}

// Whether its one-pass kernels can prepare bands.
constexpr bool may_have_bands(BwdVariant variant) {
  return variant == BwdVariant::kPlain || variant == BwdVariant::kListedPlain;
}

// Call after set_dq_accumulator(). A band has at least about one wave of work tiles. An eighth of the CTAs prepare
// bands, then take work tiles. Where work tiles are short, an eighth is too slow and a quarter prepares. Few bands gain
// nothing.
inline void set_bands(BwdPlan& plan, const BwdProblem& problem, const Device& device) {
  constexpr int kFewestBands = 8, kShortKeys = 512;
  if (problem.deterministic || problem.stage != BwdStage::kAll) return;
  if (!plan.is_dynamic || plan.order.blocks > kMaxGridBlocks || plan.dq_tiles > kMaxGridBlocks) return;
  const HeadOrder& order = plan.order.order;
  const int64_t width_tiles = order.band_size.divisor, n_blocks = width_tiles / order.width.divisor;
  const int64_t wave = (device.multiprocessors * 7 + 7) / 8;
  const int64_t heads = order.width.divisor * ((wave + width_tiles - 1) / width_tiles);
  if (heads * (kFewestBands - 1) >= order.heads) return;
  plan.bands = BwdBands(static_cast<int>(heads), order.heads, static_cast<int>(n_blocks),
                        static_cast<int>(plan.dq_tiles / order.heads));
  plan.preparing_shares = std::max(1, device.multiprocessors / (problem.keys() <= kShortKeys ? 4 : 8));
}

// Of calls with a mask or a bias. The kernels of one pass keep no scores, from which a softcap would be differentiated,
// and read no bias twice.
constexpr Sm90BwdTile listed_tile(const BwdProblem& problem) {
  return sm90_listed_bwd_tile(problem.max_head_dim(),
                              problem.deterministic || (problem.has_bias && problem.has_softcap));
}

constexpr BwdVariant wgmma_bwd_variant(const BwdProblem& problem) {
  if (problem.has_mask()) {
    const Sm90BwdTile tile = listed_tile(problem);
    if (has_dq_pass(tile)) return BwdVariant::kListed;
    if (problem.is_plain() && !problem.has_bias) return BwdVariant::kListedPlain;
    const bool drops = !problem.has_dropout || sm90_biased_bwd_may_drop(tile);
    return problem.has_bias && drops ? BwdVariant::kBiased : BwdVariant::kListed;
  }
  if (!problem.is_plain()) return BwdVariant::kGeneral;
  return problem.accumulates_dkv ? BwdVariant::kAccumulate : BwdVariant::kPlain;
}

inline BwdPlan plan_bwd_wgmma(const BwdProblem& problem, const Device& device) {
  BwdPlan plan;
  plan.family = Family::kWgmma;
  plan.variant = wgmma_bwd_variant(problem);
  const bool dq_in_smem = prefers_dq_in_smem(problem, device);
  const bool dq_pass = !dq_in_smem && prefers_dq_pass(problem);
  plan.long_rows = !dq_in_smem && !dq_pass && prefers_long_tile(problem);
  const Sm90BwdTile tile =
      dq_in_smem           ? kSm90SharedDqTile
      : problem.has_mask() ? listed_tile(problem)
      : dq_pass            ? kSm90TwoPassTile
      : plan.long_rows     ? sm90_long_bwd_tile(problem.max_head_dim())
                           : sm90_bwd_tile(problem.head_dim, problem.head_dim_v, plan.variant == BwdVariant::kGeneral);
  const bool has_random_bits = may_drop(plan.variant, tile);
  plan.head_dim = tile.head_dim;
  plan.head_dim_v = tile.value_dim();
  plan.block_m = tile.block_m;
  plan.block_n = tile.block_n;
  plan.stages = tile.stages;
  plan.threads = sm90_bwd_threads(tile);
  plan.smem_bytes = has_dq_pass(tile) ? sm90_dkv_smem_bytes(tile, has_random_bits, problem.dtype)
                                      : sm90_bwd_smem_bytes(tile, has_random_bits, dq_in_smem, problem.dtype,
                                                            problem.has_mask(), plan.variant == BwdVariant::kBiased);
  if (dq_in_smem) {
    set_dq_in_smem(plan, problem, device);
    return plan;
  }
  plan.may_store_ds =
      problem.has_bias && (plan.variant == BwdVariant::kBiased || (has_dq_pass(tile) && !problem.has_softcap));
  plan.may_store_float_ds = plan.variant == BwdVariant::kBiased;
  const int64_t rows = problem.rows();
  if (problem.has_mask()) plan.mask = plan_mask(problem, true, tile.block_n, tile.block_m);
  const bool is_ordered = problem.deterministic && !has_dq_pass(tile);
  plan.running_n_blocks =
      problem.mask_block_rows > 0 && !has_dq_pass(tile)
          ? kRunningOutOfStep
          : running_n_blocks(is_ordered, problem.window.may_mask_right(), rows / 64, problem.group(), tile.block_n);
  plan.order = n_block_grid(problem, tile.block_n, device.multiprocessors, plan.running_n_blocks);
  plan.grid = persistent_grid(plan.order.blocks, device, plan.is_dynamic);
  if (has_dq_pass(tile)) {
    set_dq_pass(plan, problem, device, tile);
  } else {
    set_dq_accumulator(plan, problem);
    plan.dq_threads = 32 * kSm90DqWarps;
    // The same in every call: allow_shared_memory() sets a kernel's limit once.
    if (may_have_bands(plan.variant)) {
      plan.smem_bytes = std::max(plan.smem_bytes, sm90_bands_smem_bytes(tile, problem.dtype));
      set_bands(plan, problem, device);
    }
  }
  return plan;
}

// Of head dims above kMaxWgmmaHeadDim: both kernels have a thread block for each work tile, that of dK and dV two.
inline BwdPlan plan_bwd_wide(const BwdProblem& problem, const Device& device) {
  BwdPlan plan;
  plan.family = Family::kWgmma;
  plan.head_dim = plan.head_dim_v = kSm90WideHeadDim;
  plan.block_m = plan.block_n = 64;
  plan.stages = 1;
  plan.threads = plan.dq_threads = kSm90WideThreads;
  plan.smem_bytes = sm90_wide_dkv_smem_bytes(problem.dtype);
  plan.dq_smem_bytes = sm90_wide_dq_smem_bytes(problem.dtype);
  plan.dq_pass = true;
  const int64_t rows = problem.rows();
  plan.running_n_blocks =
      running_n_blocks(false, problem.window.may_mask_right(), rows / plan.block_m, problem.group(), plan.block_n);
  plan.order = n_block_grid(problem, plan.block_n, device.multiprocessors, plan.running_n_blocks);
  plan.grid = product(plan.order.blocks, 2);
  plan.dq_tiles = product(problem.heads, m_blocks(problem.is_varlen, static_cast<int>(problem.batch),
                                                  static_cast<int>(problem.seqlen_q), plan.block_m));
  plan.dq_grid = plan.dq_tiles;
  return plan;
}

// Whether its kernels support the call. They keep no sum of dQ for other calls.
constexpr bool may_use_wide_backward(const BwdProblem& problem) {
  return is_wide(problem.max_head_dim()) && problem.is_plain() && !problem.has_mask() && !problem.accumulates_dkv &&
         problem.stage == BwdStage::kAll;
}

// Whether the wgmma family has a kernel for a backward. V with another head dim than K must consist of whole 16-byte
// vectors.
inline bool wgmma_supports(const BwdProblem& problem, const Device& device) {
  if (!problem.fits_tensor_maps || problem.seqlen_q == 0 || problem.seqlen_k == 0) return false;
  const bool whole_vectors = problem.head_dim == problem.head_dim_v || problem.head_dim_v % 8 == 0;
  if (is_wide(problem.max_head_dim())) {
    return may_use_wide_backward(problem) && has_wgmma_kernels(device, kSm90WideHeadDim) && whole_vectors;
  }
  const Sm90BwdTile tile =
      problem.has_mask() ? listed_tile(problem) : sm90_bwd_tile(problem.head_dim, problem.head_dim_v);
  if (problem.has_mask() && device.capability != kWgmmaCapability) return false;
  return has_wgmma_kernels(device, tile.head_dim) && whole_vectors;
}

// `forced`: the value of FLASH_ATTN_FAMILY, or null (choose_backward_family()). If no kernel takes V with another head
// dim, it is the plan of the padded call.
inline BwdPlan plan_bwd(const BwdProblem& given, const Device& device, const char* forced) {
  const Family family = given.has_mask() || given.has_bias
                            ? choose_listed_family(given, device, forced)
                            : choose_backward_family(device.capability, given.max_head_dim(), forced);
  const BwdProblem problem = with_lists(given, family);
  const bool by_wgmma = family == Family::kWgmma && wgmma_supports(problem, device);
  if (!by_wgmma && problem.head_dim != problem.head_dim_v) {
    BwdProblem padded = given;
    padded.head_dim = padded.head_dim_v = padded_head_dim(problem.max_head_dim());
    BwdPlan plan = plan_bwd(padded, device, forced);
    plan.pad_head_dim = padded.head_dim;
    return plan;
  }
  BwdPlan plan = !by_wgmma                         ? plan_bwd_mma_sync(given, device)
                 : is_wide(problem.max_head_dim()) ? plan_bwd_wide(problem, device)
                                                   : plan_bwd_wgmma(problem, device);
  plan.dtype = problem.dtype;
  plan.deterministic = problem.deterministic;
  plan.stage = problem.stage;
  plan.softmax_d_rows = softmax_d_rows(problem.is_varlen, problem.batch, problem.seqlen_q);
  plan.softmax_d_blocks = m_blocks(problem.is_varlen, problem.is_varlen ? static_cast<int>(problem.batch) : 1,
                                   static_cast<int>(problem.seqlen_q), static_cast<int>(kSoftmaxDGap));
  plan.workspace_bytes = 16 * plan.workspace_vectors() + 4 * (varlen_words(problem.is_varlen, problem.batch) +
                                                              plan.mask.words() + plan.dq_mask.words());
  return plan;
}

}  // namespace plan
}  // namespace flash
