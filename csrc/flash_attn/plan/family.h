// Which kernel family runs a call. Plain C++17.
#pragma once

#include <cstddef>
#include <cstdint>
#include <cstdlib>
#include <cstring>

#include "plan/bwd_tiles.h"
#include "plan/grid.h"
#include "plan/kv_wgmma.h"

namespace flash {
namespace plan {

enum class Family {
  kMmaSync,  // sm_80 and newer: every feature
  kWgmma,    // compute capability 9.0 only
  kDecode,   // the decode kernels: many CTAs split the keys of a row
};

constexpr const char* family_name(Family family) {
  switch (family) {
    case Family::kMmaSync: return "mma_sync";
    case Family::kWgmma: return "wgmma";
    case Family::kDecode: return "split_kv";
  }
  return "";
}

// What the choice depends on.
struct FamilyQuery {
  int capability;  // 10 * major + minor
  int head_dim;
  int64_t row_tiles;  // m_blocks of 128 rows, of all heads
  int multiprocessors;
  bool may_use_decode;             // without dropout, max_logit and origins
  int64_t decode_rows;             // packed rows of a K/V head
  int64_t decode_tiles;            // tiles of these, of all sequences and K/V heads: kv_row_tiles()
  int64_t seen_keys;               // of an m_block, at most
  int64_t mean_keys;               // of an m_block, on average
  int64_t split_kv_tiles = 0;      // m_blocks of 128 rows, at mean length, whose keys wgmma may split
  int64_t split_kv_rows = 0;       // of all heads
  bool has_direct_kernel = false;  // packed calls choose as dense ones do, for the same bits
  bool pairs_rows = false;         // of kDirect
  bool has_wide_kernel = false;    // may_use_wide_kernel()
  bool batch_invariant = false;    // only options and head dims may choose
  Dtype kv_dtype = Dtype::kBf16;
  int64_t pass_cost = 0;         // dequantize_cost(), which the decode kernels save
  bool is_pass_large = false;    // needs too much memory for it
  bool decode_by_wgmma = false;  // kv_takes_wgmma()
};

// The kernels of this head dim run smaller ones too: missing columns are never read or written.
constexpr int kLeastWgmmaHeadDim = kSm90FwdTiles[0][0].head_dim;

constexpr int wgmma_head_dim(int head_dim) { return head_dim < kLeastWgmmaHeadDim ? kLeastWgmmaHeadDim : head_dim; }

// The decode kernels have no dropout, no max_logit and the like, no origins, no mask and no bias, and count packed rows
// in 32 bits.
constexpr bool may_use_decode_kernels(const FwdProblem& problem) {
  const int64_t rows = product(problem.is_varlen ? 1 : problem.batch, problem.seqlen_q);
  const bool is_plain = !problem.has_dropout && !problem.returns_more() && !problem.has_origins &&
                        !problem.has_mask() && !problem.has_bias;
  return is_plain && product(rows, problem.group()) <= kMaxLength;
}

// Whether a dense call of one wave is kDirect.
constexpr bool has_direct_kernel(const FwdProblem& problem) {
  if (problem.max_head_dim() > kMaxWgmmaHeadDim) return false;
  const int head_dim = wgmma_head_dim(fwd_tile(problem.max_head_dim(), FwdVariant::kPlain).head_dim);
  return sm90_has_variant(head_dim, FwdVariant::kDirect) && !problem.has_dropout && !problem.has_score_mod();
}

// Whether the wgmma kernel of head dims above kMaxWgmmaHeadDim supports the call.
constexpr bool may_use_wide_kernel(const FwdProblem& problem) {
  return is_wide(problem.max_head_dim()) && !problem.is_paged && !problem.has_dropout && !problem.has_score_mod() &&
         !problem.has_mask();
}

// KV splits: not with dropout or a mask as data, nor where the kernel cannot read pages.
constexpr bool may_split_kv(const FwdProblem& problem) {
  if (problem.max_head_dim() > kMaxWgmmaHeadDim) return false;
  const FwdVariant variant = problem.has_score_mod() ? FwdVariant::kScoreMod : FwdVariant::kOneWave;
  const Sm90FwdTile tile = sm90_fwd_tile(wgmma_head_dim(problem.max_head_dim()), variant);
  const bool reads_keys = !problem.is_paged || sm90_reads_pages(tile, variant);
  return !problem.has_dropout && !problem.has_mask() && reads_keys && problem.all_rows() <= kMaxLength;
}

// Time of dequantising K and V, and of converting Q and O if they are, in picoseconds on an H200. It moves three bytes
// of memory for an 8-bit value of the visible keys, and four for each number of Q and O. Estimated, not measured.
constexpr int64_t dequantize_cost(const FwdProblem& problem, int64_t seen_keys) {
  constexpr int64_t kCall = 3000000, kBytesPerMicrosecond = 3600000;
  if (!is_eight_bit(problem.kv_dtype)) return 0;
  const int head_dims = problem.head_dim + problem.head_dim_v;
  const int64_t values = product(problem.batch, seen_keys, problem.heads_k, head_dims);
  const int64_t numbers =
      problem.converts_queries ? product(problem.batch, problem.rows(), problem.heads, head_dims) : 0;
  const int64_t bytes = product(values, 3) + product(numbers, 4);
  return (problem.converts_queries ? 3 : 1) * kCall + bytes / (kBytesPerMicrosecond / 1000) * 1000;
}

// Keys that an m_block of 128 rows sees, at most and on average, and those that a sequence sees.
struct SeenKeys {
  int64_t most, mean, of_sequence;
};

constexpr SeenKeys seen_keys(const FwdProblem& problem) {
  constexpr int64_t kMaxKeys = kUnbounded / 2;  // sums of two lengths are ints
  const int rows = static_cast<int>(problem.rows()), last = rows > 0 ? rows - 1 : 0;
  const int keys = static_cast<int>(problem.keys() < kMaxKeys ? problem.keys() : kMaxKeys);
  const Visibility sequence{rows, keys, problem.window};
  const int64_t most = sequence.key_end(last) - sequence.key_begin(last > 127 ? last - 127 : 0);
  const int64_t first = sequence.key_end(last < 127 ? last : 127) - sequence.key_begin(0);
  const int64_t all = sequence.key_end(last) - sequence.key_begin(0);
  return {most, ((first > 0 ? first : 0) + most) / 2, all > 0 ? all : 0};
}

// Above this, gathered keys leave too little of the GPU's memory to the cache that they come from.
constexpr int64_t kMaxGatheredBytes = int64_t{2} << 30;

constexpr FamilyQuery family_query(const FwdProblem& problem, const Device& device) {
  const SeenKeys seen = seen_keys(problem);
  FamilyQuery query{};
  query.capability = device.capability;
  query.head_dim = problem.max_head_dim();
  query.row_tiles = problem.blocks(128);
  query.multiprocessors = device.multiprocessors;
  query.has_direct_kernel = has_direct_kernel(problem);
  query.pairs_rows = problem.masked_right() && !problem.window.may_mask_left();  // packed calls choose as dense ones
  query.has_wide_kernel = may_use_wide_kernel(problem);
  query.may_use_decode = may_use_decode_kernels(problem);
  query.decode_rows = problem.heads_k > 0 ? product(problem.rows(), problem.group()) : 0;
  const int pad = problem.head_dim == problem.head_dim_v ? 0 : padded_head_dim(query.head_dim);
  query.decode_by_wgmma = kv_takes_wgmma(padded(problem.decode, pad), device);
  query.kv_dtype = problem.kv_dtype;
  const int64_t decode_tiles = kv_row_tiles(query.head_dim, query.decode_rows, problem.kv_dtype);
  query.decode_tiles = product(problem.batch, problem.heads_k, decode_tiles);
  query.seen_keys = seen.most;
  query.mean_keys = seen.mean;
  if (may_split_kv(problem)) {
    query.split_kv_tiles = query.row_tiles;
    query.split_kv_rows = problem.all_rows();
  }
  query.batch_invariant = problem.batch_invariant;
  query.pass_cost = dequantize_cost(problem, seen.of_sequence);
  query.is_pass_large = problem.gathers_keys && problem.dequantized_bytes() > kMaxGatheredBytes;
  return query;
}

constexpr bool may_use_wgmma(const FamilyQuery& query) {
  return query.capability == kWgmmaCapability && (!is_wide(query.head_dim) || query.has_wide_kernel);
}

// Time of one wave of m_blocks in each family, in picoseconds on an H200: fitted to 507 calls, at head dims with
// kDirect anew to 88 and to 15 of paired rows; only the ratios count (docs/tuning/fwd_sm90.md).
struct FamilyCosts {
  int head_dim;
  struct {
    int64_t call, key;  // key: each of seen_keys
  } mma_sync;
  struct {
    int64_t call, tile, key;
  } wgmma, direct;     // direct: kDirect
  int64_t paired_key;  // of direct with paired rows (paired_strip())
  struct {
    int64_t call, tile, key, results;  // results: a thousand fp32 numbers written, read and combined
  } splits;
  struct {
    int64_t call_16, work_16, call, work_32, work;  // tiles of up to 16, of up to 32 and of more packed rows
  } decode;
};

constexpr FamilyCosts kFamilyCosts[kNumHeadDims] = {
    {32,
     {3450000, 6273},
     {5050000, 12100, 8133},
     {},
     0,
     {6840000, 12000, 8164, 1529},
     {7680000, 209, 14100000, 130, 147}},
    {64,
     {3390000, 9019},
     {5080000, 13100, 8212},
     {3300000, 4000, 8500},
     6250,
     {6400000, 8000, 8400, 1650},
     {7080000, 98, 12000000, 130, 241}},
    {96,
     {3570000, 15200},
     {5380000, 12100, 8741},
     {},
     0,
     {7360000, 9666, 9007, 1696},
     {9720000, 86, 13900000, 130, 182}},
    {128,
     {3610000, 17200},
     {4920000, 13700, 11400},
     {4100000, 5000, 11230},
     8800,
     {7000000, 4000, 13800, 1000},
     {7030000, 113, 14200000, 130, 228}},
    {192,
     {3980000, 23700},
     {6230000, 16400, 13700},
     {},
     0,
     {8100000, 11800, 14300, 1639},
     {8660000, 71, 12700000, 130, 289}},
    {256,
     {4360000, 31000},
     {5160000, 19800, 18400},
     {},
     0,
     {7440000, 19600, 21100, 1627},
     {7230000, 126, 13100000, 130, 198}},
    // Estimated: from the row above, of wgmma from the clocks of a step.
    {512, {4800000, 90000}, {5500000, 19800, 24300}, {}, 0, {}, {7600000, 126, 7600000, 126, 126}},
};

constexpr const FamilyCosts& family_costs(const FamilyQuery& query) {
  return kFamilyCosts[head_dim_index(query.head_dim)];
}

constexpr int64_t waves_of(int64_t tiles, const FamilyQuery& query) {
  return (tiles + query.multiprocessors - 1) / query.multiprocessors;
}

// CTAs of 64 rows while all of them are one wave: two on a multiprocessor slow each other down.
constexpr int64_t mma_sync_cost(const FamilyQuery& query) {
  const auto& cost = family_costs(query).mma_sync;
  const int64_t alone = product(waves_of(query.row_tiles, query), query.seen_keys) * cost.key;
  return cost.call + (2 * query.row_tiles > query.multiprocessors ? alone * 8 / 5 : alone);
}

// The more CTAs wait for their first keys at the same time, the longer they wait.
constexpr int64_t wgmma_cost(const FamilyQuery& query) {
  const FamilyCosts& costs = family_costs(query);
  const bool is_direct = query.has_direct_kernel && waves_of(query.row_tiles, query) == 1;
  const auto& cost = is_direct ? costs.direct : costs.wgmma;
  const int64_t key = is_direct && query.pairs_rows ? costs.paired_key : cost.key;
  const int64_t row_tiles = (query.has_wide_kernel ? 2 : 1) * query.row_tiles;  // of 64 rows, or of 128
  const int64_t at_a_time = row_tiles < query.multiprocessors ? row_tiles : query.multiprocessors;
  return cost.call + cost.tile * at_a_time + product(waves_of(row_tiles, query), query.seen_keys) * key;
}

// KV splits are work tiles too, in separate waves; if m_blocks have different trip counts, the longest tiles go
// to the CTAs that are free first.
constexpr int kMaxSplits = 32;

// Without the keys: more splits cost more of it.
constexpr int64_t splits_call_cost(const FamilyQuery& query, int splits) {
  const auto& cost = family_costs(query).splits;
  const int64_t results = query.split_kv_rows * splits * query.head_dim / 1000;
  return cost.call + cost.tile * query.split_kv_tiles * splits + cost.results * results;
}

constexpr int64_t splits_cost(const FamilyQuery& query, int splits) {
  const int block_n = sm90_fwd_tile(wgmma_head_dim(query.head_dim), FwdVariant::kOneWave).block_n;
  const int64_t blocks = (query.seen_keys + block_n - 1) / block_n;
  const int64_t longest = (blocks + splits - 1) / splits * block_n;
  const int64_t tiles = query.split_kv_tiles * splits, waves = waves_of(tiles, query);
  const int64_t dynamic_keys = query.split_kv_tiles * query.mean_keys / query.multiprocessors + longest / 2;
  const bool is_dynamic = waves > 1 && query.mean_keys < query.seen_keys;
  const int64_t keys = !is_dynamic ? waves * longest : dynamic_keys < longest ? longest : dynamic_keys;
  return splits_call_cost(query, splits) + family_costs(query).splits.key * keys;
}

// The fastest number of splits, and its time. More than one wave of m_blocks is not split.
struct SplitsCost {
  int splits;
  int64_t cost;
};

constexpr SplitsCost best_num_splits(const FamilyQuery& query) {
  SplitsCost best{1, wgmma_cost(query)};
  if (query.split_kv_tiles == 0 || query.split_kv_tiles > query.multiprocessors) return best;
  for (int splits = 2; splits <= kMaxSplits && splits_call_cost(query, splits) < best.cost; ++splits) {
    const int64_t cost = splits_cost(query, splits);
    if (cost < best.cost) best = {splits, cost};
  }
  return best;
}

// The time of all tiles over all multiprocessors, and of the combine, which is slow for tiles of more than 16 packed
// rows.
constexpr int64_t decode_cost(const FamilyQuery& query) {
  const auto& costs = family_costs(query);
  const auto& cost = costs.decode;
  const int size = kv_tile_size(query.head_dim, query.decode_rows, query.kv_dtype);
  const int rows = kv_tile(query.head_dim, size, query.kv_dtype).rows();
  const int64_t work = product(query.seen_keys, query.decode_tiles, costs.head_dim) / query.multiprocessors;
  if (rows <= 16) return cost.call_16 + cost.work_16 * work;
  return cost.call + (rows <= 32 || query.decode_by_wgmma ? cost.work_32 : cost.work) * work;
}

// What runs a call.
struct FamilyChoice {
  Family family;
  int num_splits = 1;        // KV splits of each m_block (wgmma)
  bool is_one_wave = false;  // whether wgmma takes its kernels for one wave of m_blocks
};

// The fastest by these estimates. More than one wave of m_blocks goes to wgmma.
constexpr FamilyChoice fastest_family(const FamilyQuery& query) {
  const bool in_one_wave = query.row_tiles <= query.multiprocessors;
  const SplitsCost best = best_num_splits(query);
  const bool wgmma = may_use_wgmma(query) && (!in_one_wave || best.cost < mma_sync_cost(query));
  const int64_t forward_cost = wgmma ? best.cost : mma_sync_cost(query);
  if (query.may_use_decode && decode_cost(query) < forward_cost + query.pass_cost) return {Family::kDecode};
  return wgmma ? FamilyChoice{Family::kWgmma, best.splits, in_one_wave} : FamilyChoice{Family::kMmaSync};
}

// The number of splits that `forced` asks for as in "wgmma:8", 1 for "wgmma"; 0: it does not name that family.
inline int forced_num_splits(const char* forced) {
  constexpr char kName[] = "wgmma";
  constexpr std::size_t kLength = sizeof(kName) - 1;
  if (forced == nullptr || std::strncmp(forced, kName, kLength) != 0) return 0;
  if (forced[kLength] == '\0') return 1;
  const int splits = forced[kLength] == ':' ? std::atoi(forced + kLength + 1) : 0;
  return 1 <= splits && splits <= kMaxSplits ? splits : 0;
}

// A batch-invariant call's family, whatever its sizes: no KV splits, and one kernel for any number of m_blocks.
constexpr FamilyChoice invariant_family(const FamilyQuery& query) {
  return {may_use_wgmma(query) ? Family::kWgmma : Family::kMmaSync};
}

// `forced`: the value of FLASH_ATTN_FAMILY, or null. "mma_sync", "wgmma", "wgmma:8" and "split_kv" take that family
// wherever it can run the call, "wgmma" with the kernels for many waves of m_blocks and "wgmma:1" with those for one;
// anything else leaves the choice as it is. In a batch-invariant call it chooses the family alone.
inline FamilyChoice choose_family(const FamilyQuery& query, const char* forced) {
  const auto is_forced = [forced](const char* name) { return forced != nullptr && std::strcmp(forced, name) == 0; };
  const int requested = forced_num_splits(forced);
  if (is_forced("mma_sync")) return {Family::kMmaSync};
  if (query.batch_invariant) return invariant_family(query);
  if (query.is_pass_large && query.may_use_decode) return {Family::kDecode};
  if (requested > 0 && may_use_wgmma(query)) {
    return {Family::kWgmma, query.split_kv_tiles == 0 ? 1 : requested, std::strchr(forced, ':') != nullptr};
  }
  if (is_forced("split_kv") && query.may_use_decode) return {Family::kDecode};
  return fastest_family(query);
}

// Of a call with a mask or a bias as data.
inline Family choose_listed_family(const Problem& problem, const Device& device, const char* forced) {
  const bool declined = forced != nullptr && std::strcmp(forced, "mma_sync") == 0;
  const bool has_kernel = device.capability == kWgmmaCapability && problem.max_head_dim() <= kMaxWgmmaHeadDim;
  const bool takes_lengths = problem.has_mask() || !problem.has_key_lengths;
  return has_kernel && !declined && takes_lengths ? Family::kWgmma : Family::kMmaSync;
}

// The same call where the family visits blocks by list: without a mask they are those of one that hides nothing.
template <class AnyProblem>
constexpr AnyProblem with_lists(AnyProblem problem, Family family) {
  if (problem.has_bias && !problem.has_mask() && family == Family::kWgmma) {
    problem.mask_matrices = 1;
    problem.hides_nothing = true;
  }
  return problem;
}

// wgmma for head dims above 32 that it has, in deterministic mode too.
inline Family choose_backward_family(int capability, int head_dim, const char* forced) {
  const bool declined = forced != nullptr && std::strcmp(forced, "mma_sync") == 0;
  const bool has_kernel = capability == kWgmmaCapability && head_dim > 32;
  return has_kernel && !declined ? Family::kWgmma : Family::kMmaSync;
}

// The fp32 tiles in which a family's backward accumulates dQ.
struct DqTile {
  int block_m;
  int head_dim;
};

constexpr DqTile dq_tile(Family family, int head_dim, int value_dim) {
  if (family == Family::kWgmma) {
    const Sm90BwdTile tile = sm90_bwd_tile(head_dim, value_dim);
    return {tile.block_m, tile.head_dim};
  }
  return {bwd_tile(head_dim).block_m, bwd_tile(head_dim).head_dim};
}

}  // namespace plan
}  // namespace flash
