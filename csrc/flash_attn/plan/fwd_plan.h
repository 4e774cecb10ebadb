// The plan of a forward, and its prefill kernel: variant, tile, grid and tile order. plan/call_plan.h plans the whole
// call. Plain C++17.
#pragma once

#include <cstdint>
#include <optional>

#include "plan/decode_plan.h"
#include "plan/family.h"
#include "plan/fwd_policy_sm90.h"
#include "plan/mask_plan.h"
#include "plan/sm90_smem.h"
#include "plan/work_tile_order.h"

namespace flash {
namespace plan {

// What a call launches.
enum class Stage : uint8_t {
  kAppend,        // new rows of K and V into the cache
  kPrepare,       // segments of packed sequences; clears the semaphore
  kSchedule,      // packed sequences by the decode kernels: segments, and each CTA's range
  kWidenQuery,    // e4m3 Q to 16 bits
  kFindKeys,      // the keys of each request in a cache
  kDequantize,    // 8-bit K and V to fp16
  kTransposeV,    // V^T for e4m3 products; clears the semaphore of a dense call
  kRotate,        // Q
  kConvertQuery,  // Q to fp16
  kMaskPlan,      // block lists of a mask as data
  kAttention,     // by the family; the decode kernels combine their splits themselves
  kCombine,       // KV splits
  kDropoutProbs,  // S_dmask
  kRescale,       // fp16 results to bf16
  kMarkInactive,  // LSE of +inf for inactive requests
  kRecompute,     // by the decode kernels, if a sequence has more keys than were gathered
};

constexpr const char* stage_name(Stage stage) {
  switch (stage) {
    case Stage::kAppend: return "append";
    case Stage::kPrepare: return "prepare";
    case Stage::kSchedule: return "schedule";
    case Stage::kWidenQuery: return "widen_query";
    case Stage::kFindKeys: return "find_keys";
    case Stage::kDequantize: return "dequantize";
    case Stage::kTransposeV: return "transpose_v";
    case Stage::kRotate: return "rotate";
    case Stage::kConvertQuery: return "convert_query";
    case Stage::kMaskPlan: return "mask_plan";
    case Stage::kAttention: return "attention";
    case Stage::kCombine: return "combine";
    case Stage::kDropoutProbs: return "dropout_probs";
    case Stage::kRescale: return "rescale";
    case Stage::kMarkInactive: return "mark_inactive";
    case Stage::kRecompute: return "recompute";
  }
  return "";
}

// In the order of the launches.
class Stages {
 public:
  constexpr void add(Stage stage, bool condition = true) {
    if (condition) stages_[size_++] = stage;
  }
  constexpr bool has(Stage stage) const {
    for (const Stage own : *this) {
      if (own == stage) return true;
    }
    return false;
  }
  constexpr bool empty() const { return size_ == 0; }
  constexpr const Stage* begin() const { return stages_; }
  constexpr const Stage* end() const { return stages_ + size_; }

 private:
  Stage stages_[16] = {};
  int size_ = 0;
};

struct FwdPlan {
  Family family = Family::kMmaSync;
  FwdVariant variant = FwdVariant::kPlain;
  Dtype dtype = Dtype::kBf16;
  int head_dim = 0, head_dim_v = 0;  // of the kernel
  int pad_head_dim = 0;              // columns that Q, K and V are padded to; 0: not padded

  int block_m = 0, block_n = 0;  // rows of a work tile, keys of a step
  int kv_stages = 1, q_stages = 1;
  int consumer_groups = 1;  // of one multiprocessor, each with separate work tiles
  int threads = 0;
  int smem_bytes = 0;
  int64_t grid = 0;            // CTAs
  int64_t num_work_tiles = 0;  // m_blocks of all heads times num_splits
  int num_splits = 1;          // KV splits of each m_block; with several, a combine follows
  int64_t partial_rows = 0;    // rows of the partial results of a split, of all heads

  WorkTileOrder order;     // of the m_blocks, in persistent kernels
  int band_heads = 1;      // heads of a band, whose K and V stay in L2 together
  int short_tiles = 0;     // of each head that see few keys, at most
  int num_tail_tiles = 0;  // of each head, handed out last
  bool sort_varlen_tiles = false;
  bool pairs_rows = false;     // thread blocks take rows from both ends of a head (paired_strip())
  bool in_clusters = false;    // of two thread blocks, which load K and V for each other
  int unmasked_blocks = 1;     // max_unmasked_blocks()
  bool is_dynamic = false;     // work tiles are handed out by a semaphore
  bool pdl = false;            // programmatic dependent launch
  bool exact_row_max = false;  // the row max follows every score, at the price of more rescaling
  bool row_max_falls = false;  // and the maximum of each block, down too
  int page_box_rows = 0;       // rows of a TMA box within a page; 0: rows are copied one by one
  bool small_tile = false;     // with tangents: kSmallJvpFwdTile
  MaskPlan mask;               // of variants that visit by list
  int64_t workspace_bytes = 0;

  // ---- the whole call (plan/call_plan.h) ----
  Stages stages;
  bool is_fp8 = false;               // kWgmma: e4m3 Q K^T and P V
  bool fast_exp = false;             // is_fp8: P as e4m3 straight from the scores
  int64_t vt_keys = 0;               // is_fp8: keys of a row of V^T in global memory; 0: the kernel transposes V
  int64_t dequantized_bytes = 0;     // of the fp16 K and V
  int dequantized_rows = 0;          // of a sequence; 0: packed rows keep their places
  std::optional<DecodePlan> decode;  // kDecode, kRecompute, and every call over a cache, whose schedule it is

  constexpr bool has_value_dim() const { return head_dim_v != head_dim; }
};

// Work tiles are numbered by ints, with room for the numbers that all CTAs fetch beyond the last one.
constexpr int64_t kMaxWorkTiles = 1 << 30;

// 4-byte words of the segments and key ranges of a packed batch.
constexpr int64_t varlen_words(bool is_varlen, int64_t batch) { return is_varlen ? 2 * (batch + 3) + 2 * batch : 0; }

constexpr bool has_wgmma_kernels(const Device& device, int head_dim) {
  return device.wgmma_head_dims >> head_dim_index(head_dim) & 1;
}

// Modifiers with dropout have one kernel for all.
constexpr FwdVariant score_mod_variant(const FwdProblem& problem) {
  if (problem.has_dropout) return FwdVariant::kScoreMod;
  return problem.modifiers == Modifiers::kSoftcap ? FwdVariant::kSoftcap
         : problem.modifiers == Modifiers::kAlibi ? FwdVariant::kAlibi
                                                  : FwdVariant::kScoreMod;
}

// Whether the host knows all lengths, so that each CTA may find its m_blocks and their keys from blockIdx.
constexpr bool has_host_lengths(const FwdProblem& problem) {
  return !problem.is_varlen && !problem.has_key_ranges && !problem.is_paged;
}

// Whether a call of one wave needs no schedule.
constexpr bool runs_direct(const FwdProblem& problem, const Device& device, const FamilyChoice& choice, int head_dim) {
  return has_direct_kernel(problem) && choice.num_splits == 1 && has_host_lengths(problem) &&
         problem.blocks(sm90_fwd_tile(head_dim, FwdVariant::kDirect).block_m) <= device.multiprocessors;
}

// Whether its thread blocks pair rows from both ends of a head: every row sees keys from the first one on.
constexpr bool pairs_rows(const FwdProblem& problem) {
  const Visibility mask{static_cast<int>(problem.seqlen_q), static_cast<int>(problem.seqlen_k), problem.window};
  return mask.may_mask_right() && !mask.may_mask_left() && mask.key_end(0) > 0;
}

// Whether two thread blocks of kDirect or kStatic, with m_blocks of one head, form a cluster and load K and V for each
// other: at head dim 128, without a mask and with whole blocks of keys.
constexpr bool pairs_thread_blocks(const FwdProblem& problem, int head_dim, FwdVariant variant) {
  if (!may_pair_thread_blocks(head_dim, variant) || problem.window.may_mask()) return false;
  const Sm90FwdTile tile = sm90_fwd_tile(head_dim, variant);
  const int64_t m_blocks = (problem.rows() + tile.block_m - 1) / tile.block_m;
  return m_blocks % 2 == 0 && problem.keys() > 0 && problem.keys() % tile.block_n == 0;
}

// Whether the mma.sync family takes its short tiles, which have half the rows: if whole m_blocks leave multiprocessors
// idle, or a mask on the right wastes half of the diagonal blocks of short sequences. `block_m`: rows of whole
// m_blocks.
constexpr bool takes_short_tile(const FwdProblem& problem, const Device& device, int block_m) {
  if (problem.batch_invariant) return false;
  return problem.blocks(block_m) <= device.multiprocessors || (problem.masked_right() && problem.rows() <= kShortRows);
}

// The same for the wgmma family. Never if equal short tiles without a second consumer group are two waves and plain
// ones one.
constexpr bool sm90_takes_short_tile(const FwdProblem& problem, const Device& device, const Sm90FwdTile& plain,
                                     const Sm90FwdTile& short_tile) {
  if (problem.batch_invariant) return false;
  const bool equal_tiles = !problem.masked_right() && short_tile.consumer_groups == 1;
  if (equal_tiles && problem.blocks(plain.block_m) <= device.multiprocessors &&
      problem.blocks(short_tile.block_m) > device.multiprocessors) {
    return false;
  }
  return sm90_prefers_short_tile(plain.head_dim, problem.rows(), problem.masked_right());
}

// Time of a key of one work tile, in picoseconds on an H200; only the ratio counts (docs/tuning/fwd_sm90.md).
constexpr int64_t kStaticKeyCost = 12100, kPlainKeyCost = 14450;  // 128 rows of kStatic, 192 of kPlain
constexpr int kStaticWaves = 4;                                   // at most, of equal tiles
constexpr int kStaticMaskedWaves = 2;  // of others, which two waves in opposite orders even out
constexpr int kPairedWaves = 2;        // at most, where kShort is the alternative

// Whether a call of a few waves takes the tiles of one wave (kStatic, kOneWave) instead of the larger ones of kPlain or
// kMasked: if its whole waves, the idle multiprocessors of the last one included, take less time.
constexpr bool sm90_takes_whole_waves(const FwdProblem& problem, const Device& device, int head_dim) {
  if (problem.batch_invariant || problem.window.may_mask_left()) return false;
  const auto waves = [&](FwdVariant variant) {
    const int64_t tiles = problem.blocks(sm90_fwd_tile(head_dim, variant).block_m);
    return (tiles + device.multiprocessors - 1) / device.multiprocessors;
  };
  const int64_t small = waves(FwdVariant::kStatic), large = waves(FwdVariant::kPlain);
  if (small < 2 || small > (problem.masked_right() ? kStaticMaskedWaves : kStaticWaves)) return false;
  const SeenKeys keys = seen_keys(problem);
  const int64_t all_large = large * keys.mean, longest_large = keys.most > all_large ? keys.most : all_large;
  return small * keys.mean * kStaticKeyCost < longest_large * kPlainKeyCost;
}

// Whether equal short tiles run in pairs of thread blocks instead (kStatic). Packed calls decide as dense ones do.
constexpr bool takes_pairs_for_short(const FwdProblem& problem, const Device& device, int head_dim) {
  if (problem.is_paged || problem.has_key_ranges || !pairs_thread_blocks(problem, head_dim, FwdVariant::kStatic)) {
    return false;
  }
  const int64_t tiles = problem.blocks(sm90_fwd_tile(head_dim, FwdVariant::kStatic).block_m);
  return tiles <= kPairedWaves * device.multiprocessors && sm90_takes_whole_waves(problem, device, head_dim);
}

inline bool takes_short_variant(const FwdProblem& problem, const Device& device, int head_dim) {
  const Sm90FwdTile plain = sm90_fwd_tile(head_dim, FwdVariant::kPlain);
  const Sm90FwdTile short_tile = sm90_fwd_tile(head_dim, FwdVariant::kShort);
  const bool plain_reads = sm90_reads_pages(plain, FwdVariant::kPlain);
  const bool short_reads = sm90_reads_pages(short_tile, FwdVariant::kShort);
  if (problem.is_paged && plain_reads != short_reads) return short_reads;
  return sm90_takes_short_tile(problem, device, plain, short_tile);
}

// Whether a mask's blocks are whole tiles of kListedShort, but not of kListed.
constexpr bool takes_listed_short(const FwdProblem& problem, int head_dim) {
  const int rows = sm90_fwd_tile(head_dim, FwdVariant::kListed).block_m;
  return problem.mask_block_rows > 0 && problem.mask_block_rows % rows != 0 &&
         sm90_fwd_tile(head_dim, FwdVariant::kListedShort).block_m < rows;
}

inline FwdVariant sm90_variant(const FwdProblem& problem, const Device& device, const FamilyChoice& choice,
                               int head_dim) {
  if (problem.has_mask() && problem.has_bias) return FwdVariant::kBiased;
  if (problem.has_mask()) return takes_listed_short(problem, head_dim) ? FwdVariant::kListedShort : FwdVariant::kListed;
  if (problem.has_score_mod()) return score_mod_variant(problem);
  if (problem.has_dropout) return FwdVariant::kDropout;
  if (choice.num_splits > 1 || choice.is_one_wave) {
    return runs_direct(problem, device, choice, head_dim) ? FwdVariant::kDirect : FwdVariant::kOneWave;
  }
  const bool takes_short =
      sm90_has_variant(head_dim, FwdVariant::kShort) && takes_short_variant(problem, device, head_dim);
  if (takes_short && !problem.masked_right() && !takes_pairs_for_short(problem, device, head_dim)) {
    return FwdVariant::kShort;
  }
  if (sm90_has_variant(head_dim, FwdVariant::kStatic) && sm90_takes_whole_waves(problem, device, head_dim)) {
    return has_host_lengths(problem) ? FwdVariant::kStatic : FwdVariant::kOneWave;  // with the same bits
  }
  if (takes_short) return FwdVariant::kShort;
  const bool has_masked = sm90_has_variant(head_dim, FwdVariant::kMasked);
  return has_masked && problem.window.may_mask() ? FwdVariant::kMasked : FwdVariant::kPlain;
}

// The number of work tiles.
inline void set_work_tiles(FwdPlan& plan, const FwdProblem& problem) {
  const int64_t tiles_of_head = m_blocks(problem.is_varlen, problem.is_varlen ? static_cast<int>(problem.batch) : 1,
                                         static_cast<int>(problem.seqlen_q), plan.block_m);
  plan.num_work_tiles = product(tiles_of_head, problem.heads, problem.is_varlen ? 1 : problem.batch, plan.num_splits);
}

// Order of the work tiles of all heads, and whether a semaphore hands them out. Thread blocks of the wide kernel have
// one each.
inline void set_tile_order(FwdPlan& plan, const FwdProblem& problem, const Device& device) {
  const int64_t all_heads = problem.heads * (problem.is_varlen ? 1 : problem.batch);
  const int64_t row_tiles = plan.num_work_tiles / plan.num_splits;
  if (row_tiles == 0) return;
  const int64_t tiles_of_head = row_tiles / all_heads;
  plan.unmasked_blocks = max_unmasked_blocks(problem.window, plan.block_m, plan.block_n);
  if (has_static_tiles(plan.variant) && !plan.in_clusters) {  // the longest tiles of all heads first
    plan.band_heads = static_cast<int>(all_heads);
    plan.order = WorkTileOrder(plan.band_heads, static_cast<int>(tiles_of_head), plan.band_heads, 0);
    return;
  }
  // The query heads of one K/V head read the same K and V.
  const int64_t row_bytes = dtype_bytes(problem.dtype) * (problem.head_dim + problem.head_dim_v);
  const int64_t head_bytes = row_bytes * problem.keys_of_head() / problem.group();
  const bool in_bands =
      !plan.in_clusters && (problem.has_variable_trip_count() || sm90_dynamic_scheduler_for_equal_tiles(plan.head_dim));
  const int consumer_groups = device.multiprocessors * plan.consumer_groups;
  plan.band_heads = in_bands ? band_heads(all_heads, tiles_of_head, head_bytes, consumer_groups) : 1;
  const bool is_persistent = !is_wide(plan.head_dim);
  const bool sorts = is_persistent && problem.batch <= kSortedSequences;
  plan.sort_varlen_tiles = sorts && problem.is_varlen && problem.has_variable_trip_count();
  int64_t short_tiles = 0;
  if (!problem.is_varlen) {
    const bool fetches_late =
        is_persistent && !problem.is_paged &&
        sm90_fwd_policy(plan.head_dim, plan.head_dim_v, plan.variant).has(fwd_feature::kFetchNextTileLate);
    short_tiles = num_short_tiles(static_cast<int>(problem.seqlen_q), static_cast<int>(problem.seqlen_k),
                                  problem.window, plan.block_m, fetches_late);
  } else if (plan.sort_varlen_tiles && !problem.window.may_mask_left()) {
    short_tiles = tiles_of_head;  // the last ones, whatever the lengths
  }
  const int of_head = static_cast<int>(tiles_of_head);
  plan.short_tiles = plan.num_splits > 1 ? 0 : static_cast<int>(short_tiles);
  plan.num_tail_tiles = num_tail_tiles(of_head, plan.short_tiles);
  plan.order = WorkTileOrder(static_cast<int>(all_heads), of_head, plan.band_heads, plan.num_tail_tiles);
  plan.is_dynamic = is_persistent && in_bands && plan.num_work_tiles > consumer_groups;
}

inline FwdPlan plan_fwd_wgmma(const FwdProblem& problem, const Device& device, const FamilyChoice& choice) {
  FwdPlan plan;
  plan.family = Family::kWgmma;
  plan.dtype = problem.dtype;
  plan.num_splits = choice.num_splits;
  const bool by_pair = is_value_dim_pair(problem.head_dim, problem.head_dim_v) && !problem.has_score_mod() &&
                       !problem.has_dropout && !problem.has_mask() && choice.num_splits == 1;
  const int head_dim = wgmma_head_dim(fwd_tile(problem.max_head_dim(), FwdVariant::kPlain).head_dim);
  if (!by_pair) plan.variant = sm90_variant(problem, device, choice, head_dim);
  const Sm90FwdTile tile = by_pair ? kSm90ValueDimTile : sm90_fwd_tile(head_dim, plan.variant);
  plan.head_dim = tile.head_dim;
  plan.head_dim_v = tile.value_dim();
  plan.block_m = tile.block_m;
  plan.block_n = tile.block_n;
  plan.kv_stages = tile.kv_stages;
  plan.q_stages = tile.q_stages;
  plan.consumer_groups = tile.consumer_groups;
  plan.threads = sm90_fwd_threads(tile, plan.variant);
  plan.smem_bytes = sm90_fwd_smem_bytes(tile, plan.variant, problem.dtype);
  set_work_tiles(plan, problem);
  if (plan.num_work_tiles > kMaxWorkTiles) return plan;  // too many
  plan.in_clusters = pairs_thread_blocks(problem, head_dim, plan.variant);
  const int64_t resident = device.multiprocessors - (plan.in_clusters ? device.multiprocessors % 2 : 0);
  plan.grid = plan.num_work_tiles < resident ? plan.num_work_tiles : resident;
  set_tile_order(plan, problem, device);
  plan.pairs_rows = plan.variant == FwdVariant::kDirect && pairs_rows(problem);
  const bool is_one_wave = plan.variant == FwdVariant::kOneWave || has_static_tiles(plan.variant);
  // A mask that hides nothing needs no lists: the window tells the blocks of a tile.
  const bool has_lists = problem.has_mask() && !(problem.hides_nothing && problem.window.shows_all_keys());
  if (has_lists) plan.mask = plan_mask(problem, false, tile.block_m, tile.block_n);
  // Lists are read before the kernel would wait for the one that makes them.
  plan.pdl = !has_lists && (is_one_wave || plan.num_splits > 1 || problem.is_varlen || plan.is_dynamic);
  if (problem.is_paged && problem.seqlen_k > 0 && problem.fits_page_maps) {
    plan.page_box_rows = page_box_rows(problem.page_size, tile.block_n);
  }
  if (plan.num_splits > 1) plan.partial_rows = problem.all_rows();
  const int64_t partial_floats = plan.num_splits * plan.partial_rows * (problem.head_dim_v + 1);
  plan.workspace_bytes =
      4 * (partial_floats + varlen_words(problem.is_varlen, problem.batch) + plan.is_dynamic + plan.mask.words());
  return plan;
}

// The wide kernel.
inline FwdPlan plan_fwd_wide(const FwdProblem& problem, const Device& device) {
  FwdPlan plan;
  plan.family = Family::kWgmma;
  plan.dtype = problem.dtype;
  plan.head_dim = plan.head_dim_v = kSm90WideHeadDim;
  plan.block_m = kSm90WideBlockM;
  plan.block_n = kSm90WideBlockN;
  plan.threads = kSm90WideThreads;
  plan.smem_bytes = sm90_wide_fwd_smem_bytes(problem.dtype);
  set_work_tiles(plan, problem);
  plan.grid = plan.num_work_tiles;
  if (plan.num_work_tiles > kMaxWorkTiles) return plan;  // too many
  set_tile_order(plan, problem, device);
  plan.pdl = true;
  plan.workspace_bytes = 4 * varlen_words(problem.is_varlen, problem.batch);
  return plan;
}

// Whether the wgmma family has the kernel of its plan. V with another head dim than K must consist of whole 16-byte
// vectors.
inline bool wgmma_supports(const FwdProblem& problem, const Device& device, const FwdPlan& plan) {
  if (!problem.fits_tensor_maps || !has_wgmma_kernels(device, plan.head_dim)) return false;
  if (problem.has_mask() && device.capability != kWgmmaCapability) return false;
  if (problem.head_dim != problem.head_dim_v && problem.head_dim_v % 8 != 0) return false;
  if (plan.num_work_tiles > kMaxWorkTiles) return false;
  if (is_wide(plan.head_dim)) return may_use_wide_kernel(problem);
  const Sm90FwdTile tile = plan.has_value_dim() ? kSm90ValueDimTile : sm90_fwd_tile(plan.head_dim, plan.variant);
  return !problem.is_paged || sm90_reads_pages(tile, plan.variant);
}

// Whether an exact row max falls. FlashAttention-2 splits the keys of calls with few m_blocks, so that more weights are
// 1 and not rounded; here each block of keys has such a weight. Not with dropout or a bias, which it does not split or
// have, not where the largest logit is wanted, nor where warps that share rows would have to agree.
constexpr bool takes_falling_row_max(const FwdProblem& problem, const Device& device, const FwdPlan& plan) {
  return problem.exact_row_max && !problem.returns_more() && !problem.batch_invariant && !is_wide(plan.head_dim) &&
         plan.variant != FwdVariant::kDropout && problem.blocks(128) <= device.multiprocessors;
}

inline FwdPlan plan_fwd_mma_sync(const FwdProblem& problem, const Device& device) {
  FwdPlan plan;
  plan.dtype = problem.dtype;
  const FwdTile plain = fwd_tile(problem.head_dim, FwdVariant::kPlain);
  if (problem.has_dropout || problem.has_origins || problem.has_bias || problem.has_mask()) {
    plan.variant = FwdVariant::kDropout;
  } else if (mma_sync_has_short(problem.head_dim)) {
    const bool fits = fwd_smem_bytes(plain, problem.dtype) <= device.smem_per_block;
    if (!fits || takes_short_tile(problem, device, plain.block_m)) plan.variant = FwdVariant::kShort;
  }
  const FwdTile tile = fwd_tile(problem.head_dim, plan.variant);
  plan.head_dim = plan.head_dim_v = tile.head_dim;
  plan.block_m = tile.block_m;
  plan.block_n = tile.block_n;
  plan.threads = 32 * tile.warps;
  plan.smem_bytes = fwd_smem_bytes(tile, problem.dtype);
  plan.grid = product(problem.heads, m_blocks(problem.is_varlen, static_cast<int>(problem.batch),
                                              static_cast<int>(problem.seqlen_q), tile.block_m));
  plan.num_work_tiles = plan.grid;
  plan.row_max_falls = takes_falling_row_max(problem, device, plan);
  plan.pdl = true;
  if (problem.has_mask()) plan.mask = plan_mask(problem, false, list_size(tile.block_m), list_size(tile.block_n));
  plan.workspace_bytes = 4 * (varlen_words(problem.is_varlen, problem.batch) + plan.mask.words());
  return plan;
}

// The kernel of a call without a cache and e4m3 products. `forced`: the value of FLASH_ATTN_FAMILY, or null
// (choose_family()). If no kernel takes V with another head dim, it is the plan of the padded call.
inline FwdPlan plan_fwd_kernel(const FwdProblem& given, const Device& device, const char* forced) {
  const FamilyChoice choice = given.has_mask() || given.has_bias
                                  ? FamilyChoice{choose_listed_family(given, device, forced)}
                                  : choose_family(family_query(given, device), forced);
  const FwdProblem problem = with_lists(given, choice.family);
  if (choice.family == Family::kWgmma) {
    const bool wide = is_wide(problem.max_head_dim());
    const FwdPlan plan = wide ? plan_fwd_wide(problem, device) : plan_fwd_wgmma(problem, device, choice);
    if (wgmma_supports(problem, device, plan)) return plan;
  }
  if (problem.head_dim != problem.head_dim_v) {
    FwdProblem padded_call = given;
    padded_call.head_dim = padded_call.head_dim_v = padded_head_dim(problem.max_head_dim());
    padded_call.decode = padded(given.decode, padded_call.head_dim);
    FwdPlan plan = plan_fwd_kernel(padded_call, device, forced);
    plan.pad_head_dim = padded_call.head_dim;
    return plan;
  }
  if (choice.family != Family::kDecode) return plan_fwd_mma_sync(given, device);
  FwdPlan plan;
  plan.family = Family::kDecode;
  plan.dtype = problem.dtype;
  plan.head_dim = plan.head_dim_v = fwd_tile(problem.head_dim, FwdVariant::kPlain).head_dim;
  return plan;
}

}  // namespace plan
}  // namespace flash
