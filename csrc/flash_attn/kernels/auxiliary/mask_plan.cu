// Plans of masks as data: bounds of strips, then the list of blocks of each work tile. Two launches.
#include <algorithm>
#include <atomic>

#include "core/block_class.h"
#include "kernels/common/find_seen.h"
#include "kernels/common/launch.h"
#include "kernels/common/pdl.h"
#include "kernels/common/seen_bits.h"
#include "kernels/common/sequence.h"
#include "params/mask.h"

namespace flash {
namespace {

constexpr int kThreads = 256, kWarps = kThreads / 32;
constexpr int64_t kManyTiles = 512;   // of more, half as many threads make a list: all lists are one wave
constexpr int kColumnsAtOnce = 2048;  // of a tile
#if defined(__CUDA_ARCH__) && __CUDA_ARCH__ < 900
constexpr int kListBlocks = 2;  // thread blocks an SM; of more, registers spill
#else
constexpr int kListBlocks = 4;
#endif

// A sequence of the call: where its rows and keys begin in packed tensors and in the strips, and how many there are.
struct MaskSequence {
  int q_begin = 0, seqlen_q = 0, k_begin = 0, seqlen_k = 0;
  int first_row_strip = 0, first_key_strip = 0;
  MaskFactors factors;

  __device__ Visibility window(const Flash_fwd_params& call) const { return {seqlen_q, seqlen_k, call.window}; }
};

// `segment`: of a packed batch, for whose rows or keys outside of all sequences the lengths are 0.
__device__ MaskSequence mask_sequence(const MaskPlanParams& params, int matrix, int segment) {
  const Flash_fwd_params& call = params.call;
  MaskSequence sequence;
  if (call.is_varlen()) {
    if (segment < 1 || segment > call.b) return sequence;
    sequence.q_begin = call.varlen.segments_q[segment];
    sequence.seqlen_q = call.varlen.segments_q[segment + 1] - sequence.q_begin;
    sequence.k_begin = call.varlen.key_ranges[2 * (segment - 1)];
    sequence.seqlen_k = call.varlen.key_ranges[2 * (segment - 1) + 1];
    sequence.first_row_strip = first_strip(call, sequence.q_begin, segment);
    sequence.first_key_strip = first_key_strip(call, sequence.k_begin, segment);
  } else {
    sequence.seqlen_q = call.seqlen_q;
    sequence.seqlen_k = call.seqlen_k;
  }
  const MaskMatrices& matrices = params.mask.matrices;
  sequence.factors = params.mask.factors.of(matrices.batch_of(matrix), matrices.first_head_of(matrix), call.seqlen_q,
                                            call.seqlen_k, sequence.q_begin, sequence.k_begin);
  return sequence;
}

// The segment that owns a strip, by all lanes of a warp.
__device__ int segment_of_strip(const Flash_fwd_params& call, bool of_rows, int strip) {
  if (!call.is_varlen()) return 0;
  if (!of_rows && call.varlen.seqused_k != nullptr) return 1 + strip / key_strips_of_sequence(call.seqlen_k);
  return find_segment(of_rows ? call.varlen.segments_q : call.varlen.segments_k, call.b, strip, kMaskStrip);
}

// A warp for each strip of the rows and of the keys of a mask matrix, a thread block for each group of them: bounds,
// and cleared seen bits.
__global__ void __launch_bounds__(kThreads) mask_bounds_kernel(const __grid_constant__ MaskPlanParams params) {
  static_assert(kGroupStrips == kWarps);
  alignas(16) __shared__ char memory[kWarps * sizeof(IntervalBounds)];
  IntervalBounds* const of_warps = reinterpret_cast<IntervalBounds*>(memory);
  const Flash_fwd_params& call = params.call;
  const SeenBits& seen = params.mask.seen;
  allow_next_kernel();
  const int lane = threadIdx.x % 32, warp = threadIdx.x / 32, strips = seen.row_strips + seen.key_strips;
  const int64_t count = static_cast<int64_t>(params.matrices) * strips;
  for (int64_t group = blockIdx.x; group * kGroupStrips < count; group += gridDim.x) {
    const int64_t i = group * kGroupStrips + warp;
    IntervalBounds bounds;
    if (i < count) {
      const int matrix = static_cast<int>(i / strips),
                index = static_cast<int>(i - static_cast<int64_t>(matrix) * strips);
      const bool of_rows = index < seen.row_strips;
      const int strip = of_rows ? index : index - seen.row_strips;
      const MaskSequence sequence = mask_sequence(params, matrix, segment_of_strip(call, of_rows, strip));
      const int first = kMaskStrip * (strip - (of_rows ? sequence.first_row_strip : sequence.first_key_strip));
      const int end = min(first + kMaskStrip, of_rows ? sequence.seqlen_q : sequence.seqlen_k);
      const MaskFactors& factors = sequence.factors;
      if ((of_rows ? factors.query_ranges : factors.key_hidden) != nullptr) {
        for (int member = first + lane; member < end; member += 32) {
          bounds.add(of_rows ? factors.keys_of(member) : factors.hidden_rows_of(member));
        }
      }
      bounds = warp_bounds(bounds);
      if (lane == 0) params.bounds.set(i, bounds);
      const int64_t at = static_cast<int64_t>(matrix) * (of_rows ? seen.row_strips : seen.key_strips) + strip;
      if (lane < kStripWords) (of_rows ? seen.rows : seen.keys)[at * kStripWords + lane] = 0u;
    }
    if (lane == 0) of_warps[warp] = bounds;
    __syncthreads();
    if (warp == 0) {
      bounds = warp_bounds(lane < kWarps ? of_warps[lane] : IntervalBounds());
      if (lane == 0) params.group_bounds.set(group, bounds);
    }
    __syncthreads();  // of_warps may be overwritten
  }
}

// Of 32 blocks a bit each: those that are visited.
struct BlockVotes {
  uint32_t whole, partial;
};

struct ListStorage {
  TilePart strips[kMaxTileStrips], tile, next_tile;
  StripRuns runs[kMaxTileStrips][2];  // of both numbers of intervals
  uint32_t own_seen[kMaxTileStrips * kStripWords];
  bool sees_whole;                        // a column
  Span chunk;                             // columns of `classes`
  Span visited;                           // of these columns, those that are not hidden
  BlockCount count, warp_counts[kWarps];  // of all entries written, and of those that a warp appends
  BlockVotes votes[kColumnsAtOnce / 32];
  int open_groups, open_columns;
  uint16_t groups[kColumnsAtOnce / kGroupStrips + 1], columns[kColumnsAtOnce];  // of which scores are open
  alignas(16) uint8_t classes[kColumnsAtOnce];                                  // StripClasses
};

// Appends the values of some lanes to a list.
__device__ __forceinline__ void push(bool chosen, int value, uint16_t* list, int& count) {
  const int lane = threadIdx.x % 32;
  const uint32_t lanes = __ballot_sync(0xffffffffu, chosen);
  if (lanes == 0u) return;
  int at = lane == 0 ? atomicAdd(&count, __popc(lanes)) : 0;
  at = __shfl_sync(0xffffffffu, at, 0) + __popc(lanes & ((1u << lane) - 1u));
  if (chosen) list[at] = static_cast<uint16_t>(value);
}

// Of a chunk of columns the classes of a tile's strips, and what is seen of them and of the tile.
struct Classifier {
  const MaskPlanParams& params;
  const int matrix;
  const MaskSequence sequence;
  const Visibility window;
  const ListedTile tile;
  ListStorage& shared;

  // Of the tile's axis, or of the columns', the first strip in the order of bounds.
  __device__ int64_t first_strip(bool of_keys) const {
    const SeenBits& seen = params.mask.seen;
    const int64_t of_matrix = static_cast<int64_t>(matrix) * (seen.row_strips + seen.key_strips);
    return of_matrix + (of_keys ? seen.row_strips + sequence.first_key_strip : sequence.first_row_strip);
  }
  __device__ bool has_bounds(bool of_keys) const {
    return (of_keys ? sequence.factors.key_hidden : sequence.factors.query_ranges) != nullptr;
  }
  __device__ uint32_t* seen_words(bool of_keys, int strip) const {
    const SeenBits& seen = params.mask.seen;
    const int64_t first = of_keys ? static_cast<int64_t>(matrix) * seen.key_strips + sequence.first_key_strip
                                  : static_cast<int64_t>(matrix) * seen.row_strips + sequence.first_row_strip;
    return (of_keys ? seen.keys : seen.rows) + (first + strip) * kStripWords;
  }
  __device__ BlockClass by_bounds(const TilePart& part, Span columns, const IntervalBounds& others) const {
    return part.class_by_bounds(sequence.factors, tile.of_keys, tile.columns(columns), others);
  }

  // Each of a few threads makes one. A part that does not exist sees nothing.
  __device__ void make_parts() const {
    const int thread = threadIdx.x;
    if (thread >= kMaxTileStrips + 2) return;
    const bool is_tile = thread == kMaxTileStrips, is_strip = thread < kMaxTileStrips;
    const Span own = is_strip ? tile.strip(thread) : is_tile ? tile.own() : tile.next().own();
    const bool given = has_bounds(tile.of_keys);
    const int64_t first = first_strip(tile.of_keys) + own.begin / kMaskStrip;
    IntervalBounds all;
#pragma unroll
    for (int i = 0; i < kMaxTileStrips; ++i) {
      if (given && kMaskStrip * i < own.size()) all.add(params.bounds.at(first + i));
    }
    TilePart& part = is_strip ? shared.strips[thread] : is_tile ? shared.tile : shared.next_tile;
    part = own.empty() ? TilePart() : TilePart(sequence.factors, window, tile.of_keys, own, all);
  }

  // Each warp makes the runs of one strip and one number of intervals.
  __device__ void make_runs() const {
    if (!has_bounds(tile.of_keys)) return;
    const MaskFactors& factors = sequence.factors;
    const int* const values = tile.of_keys ? factors.key_hidden : factors.query_ranges;
    const int count = tile.of_keys ? factors.key_intervals : factors.query_intervals;
    const int warp = threadIdx.x / 32, warps = blockDim.x / 32;
    for (int i = (warp + warps - 1) % warps; i < tile.strips() * count; i += warps) {  // warp 0 makes parts
      const int strip = i >> (count - 1), number = i & (count - 1);
      const Span own = tile.strip(strip);
      find_runs(values + int64_t{own.begin} * 2 * count, count, number, own.size(), shared.runs[strip][number]);
    }
  }

  __device__ void mark_column(int column, const uint32_t (&words)[kStripWords]) const {
    uint32_t* const seen = seen_words(!tile.of_keys, column);
    for (int i = 0; i < kStripWords; ++i) {
      if (words[i] != 0u) atomicOr(seen + i, words[i]);
    }
  }
  __device__ void mark_whole_column(int column) const {
    const int size = tile.column(column).size();
    mark_column(column, {full_word(0, size), full_word(1, size)});
  }
  __device__ void mark_strip(int strip, const uint32_t (&words)[kStripWords]) const {
    for (int i = 0; i < kStripWords; ++i) {
      uint32_t& seen = shared.own_seen[strip * kStripWords + i];
      if ((words[i] & ~seen) != 0u) atomicOr(&seen, words[i]);  // many threads mark the same
    }
  }

  // Adds classes of the strips by bounds and runs, and marks what they see of the columns. Returns whether some stay
  // open.
  __device__ bool classify_strips(Span columns, const IntervalBounds& others, uint32_t& classes, bool& some) const {
    bool is_open = false;
#pragma unroll 1
    for (int strip = 0; strip < tile.strips(); ++strip) {
      const TilePart& part = shared.strips[strip];
      const int size = part.own.size();
      uint32_t seen[kStripWords] = {full_word(0, size), full_word(1, size)};
      BlockClass found = by_bounds(part, columns, others);
      if (found == BlockClass::kPartial && !part.class_by_runs(sequence.factors, tile.of_keys, shared.runs[strip],
                                                               tile.columns(columns), others, found, seen)) {
        is_open = true;
        classes |= StripClasses::kOpen << 2 * strip;
      } else if (found != BlockClass::kHidden) {
        classes |= StripClasses::one(strip, found);
        mark_strip(strip, seen);
        some = true;
      }
    }
    return is_open;
  }

  // Classifies groups of columns, then single columns of open groups, and lists open columns. Only the last tile that
  // sees all of a column marks it.
  __device__ void classify_tile() const {
    const int threads = blockDim.x, lane = threadIdx.x % 32;
    const Span all = shared.chunk;
    const int64_t first_strip = this->first_strip(!tile.of_keys);
    const int offset = static_cast<int>(first_strip % kGroupStrips), first_group = (all.begin + offset) / kGroupStrips;
#pragma unroll 1
    for (int bits = kGroupBits; bits >= 0; bits -= kGroupBits) {
      const bool of_groups = bits > 0;
      const int count =
          of_groups ? (all.end - 1 + offset) / kGroupStrips - first_group + 1 : kGroupStrips * shared.open_groups;
#pragma unroll 1
      for (int i = threadIdx.x; i - lane < count; i += threads) {
        int group = 0, column = all.end;
        if (i < count) {
          group = of_groups ? i : shared.groups[i / kGroupStrips];
          column = kGroupStrips * (first_group + group) - offset + (of_groups ? 0 : i % kGroupStrips);
        }
        const Span columns = Span{column, column + (1 << bits)}.both(all);
        bool is_open = false;
        if (!columns.empty()) {
          IntervalBounds others;
          if (has_bounds(!tile.of_keys)) {
            const StripBounds& stored = of_groups ? params.group_bounds : params.bounds;
            others = stored.at((first_strip + column) >> bits);
          }
          const BlockClass found = by_bounds(shared.tile, columns, others);
          uint32_t classes = 0u;
          bool marks = false;
          if (found == BlockClass::kWhole) {
            classes = StripClasses::kWhole;
            shared.sees_whole = true;
            marks = by_bounds(shared.next_tile, columns, others) != BlockClass::kWhole;
          } else if (found == BlockClass::kPartial) {
            is_open = classify_strips(columns, others, classes, marks);
          }
          if (classes != 0u && !(of_groups && is_open)) {
            atomicMin(&shared.visited.begin, columns.begin);
            atomicMax(&shared.visited.end, columns.end);
#pragma unroll 1
            for (int i = columns.begin; i < columns.end; ++i) {
              shared.classes[i - shared.chunk.begin] = static_cast<uint8_t>(classes);
              if (marks) mark_whole_column(i);
            }
          }
        }
        push(is_open, of_groups ? group : column - shared.chunk.begin, of_groups ? shared.groups : shared.columns,
             of_groups ? shared.open_groups : shared.open_columns);
      }
      __syncthreads();
    }
  }

  // Classifies open strips by their scores: find(rectangle). writes: true in one of the threads that find the same.
  template <class Find>
  __device__ void read_scores(int column, bool writes, const Find& find) const {
    const uint32_t bounded = shared.classes[column - shared.chunk.begin];
    uint32_t classes = bounded, column_seen[kStripWords] = {};
#pragma unroll 1
    for (int strip = 0; strip < tile.strips(); ++strip) {
      if (!StripClasses::is_open(bounded, strip)) continue;
      const Rectangle at = tile.rectangle(tile.strip(strip), tile.column(column));
      const Found found = find(at);
      classes ^= StripClasses::kOpen << 2 * strip ^ StripClasses::one(strip, found.class_of(at));
      uint32_t strip_seen[kStripWords];
      for (int i = 0; i < kStripWords; ++i) {
        strip_seen[i] = tile.of_keys ? found.any[i] : found.rows[i];
        column_seen[i] |= tile.of_keys ? found.rows[i] : found.any[i];
      }
      if (writes) mark_strip(strip, strip_seen);
    }
    if (!writes) return;
    mark_column(column, column_seen);
    shared.classes[column - shared.chunk.begin] = static_cast<uint8_t>(classes);
  }

  // Scores are read by a warp for each column, or by a thread where there are many: lanes next to each other then read
  // neighbouring words.
  __device__ void read_open_columns() const {
    constexpr int kMostTogether = 8;  // of a warp
    const int thread = threadIdx.x, threads = blockDim.x, warps = threads / 32, count = shared.open_columns;
    if (sequence.factors.key_hidden == nullptr && count > kMostTogether * warps) {
      const auto find = [&](const Rectangle& at) { return find_alone(sequence.factors, window, at); };
      for (int i = thread; i < count; i += threads) read_scores(shared.chunk.begin + shared.columns[i], true, find);
    } else {
      const auto find = [&](const Rectangle& at) { return find_together(sequence.factors, window, at); };
      for (int i = thread / 32; i < count; i += warps) {
        read_scores(shared.chunk.begin + shared.columns[i], thread % 32 == 0, find);
      }
    }
  }
};

// Appends the entries of visited blocks.
__device__ void write_entries(const Classifier& classify) {
  ListStorage& shared = classify.shared;
  const ListedTile& tile = classify.tile;
  const Span visited = shared.visited;
  if (visited.empty()) return;
  const int bits = tile.column_bits();
  const Span blocks{visited.begin >> bits, (visited.end + bits) >> bits};
  const int lane = threadIdx.x % 32, warp = threadIdx.x / 32, threads = blockDim.x;
  const int size = (blocks.size() + threads - 1) / threads * 32;  // of a warp
  const Span own = blocks.part(warp, size);
  uint8_t* const classes = shared.classes - shared.chunk.begin;
  BlockVotes* const votes = shared.votes - blocks.begin / 32;
  BlockCount at = shared.count, of_warp;
#pragma unroll 1
  for (int first = own.begin; first < own.end; first += 32) {
    const int block = first + lane, column = block << bits;
    bool is_whole = false, some = block < own.end && (classes[column] | classes[column + bits]) != 0;
    if (some) {
      const BlockEntry entry = tile.entry(block, [&](int i) { return uint32_t{classes[i]}; }, some, is_whole);
      classes[column] = static_cast<uint8_t>(entry.bits >> BlockEntry::kIndexBits);
    }
    const BlockVotes found{__ballot_sync(0xffffffffu, some && is_whole), __ballot_sync(0xffffffffu, some && !is_whole)};
    if (lane == 0) votes[first / 32] = found;
    of_warp.whole += __popc(found.whole), of_warp.partial += __popc(found.partial);
  }
  if (lane == 0) shared.warp_counts[warp] = of_warp;
  __syncthreads();
  BlockCount all = at;
#pragma unroll 1
  for (int i = 0; i < threads / 32; ++i) {
    const BlockCount other = shared.warp_counts[i];
    if (i < warp) at.whole += other.whole, at.partial += other.partial;
    all.whole += other.whole, all.partial += other.partial;
  }
  if (threadIdx.x == 0) shared.count = all;
  const uint32_t own_bit = 1u << lane, before = own_bit - 1u;
  const BlockLists& lists = classify.params.mask.lists;
  uint32_t* const entries = lists.entries + static_cast<int64_t>(blockIdx.x) * lists.capacity;
#pragma unroll 1
  for (int first = own.begin; first < own.end; first += 32) {
    const BlockVotes found = votes[first / 32];
    const int block = first + lane;
    if (((found.whole | found.partial) & own_bit) != 0u) {
      const uint32_t entry = BlockEntry::of_block(block).bits | uint32_t{classes[block << bits]}
                                                                    << BlockEntry::kIndexBits;
      const bool is_whole = (found.whole & own_bit) != 0u;
      entries[is_whole ? at.whole + __popc(found.whole & before)
                       : lists.capacity - 1 - at.partial - __popc(found.partial & before)] = entry;
    }
    at.whole += __popc(found.whole), at.partial += __popc(found.partial);
  }
}

// A thread block for each work tile of each mask matrix.
__global__ void __launch_bounds__(kThreads, kListBlocks)
    mask_lists_kernel(const __grid_constant__ MaskPlanParams params) {
  alignas(16) __shared__ char memory[sizeof(ListStorage)];
  ListStorage& shared = *reinterpret_cast<ListStorage*>(memory);
  const int thread = threadIdx.x;
  if (thread < kMaxTileStrips * kStripWords) shared.own_seen[thread] = 0u;
  const Flash_fwd_params& call = params.call;
  if (call.is_varlen()) wait_for_previous_kernel();  // segments
  const BlockLists& lists = params.mask.lists;
  const int matrix = blockIdx.x / lists.tiles, index = blockIdx.x - matrix * lists.tiles;
  const int* const segments = params.of_keys ? call.varlen.segments_k : call.varlen.segments_q;
  const int segment = call.is_varlen() ? find_segment(segments, call.b, index, params.tile) : 0;
  const MaskSequence sequence = mask_sequence(params, matrix, segment);
  const int first_slot =
      call.is_varlen() ? varlen_first_slot(params.of_keys ? sequence.k_begin : sequence.q_begin, segment, params.tile)
                       : 0;
  const ListedTile tile{params.of_keys,    (index - first_slot) * params.tile,
                        params.tile,       params.block,
                        sequence.seqlen_q, sequence.seqlen_k};
  if (thread == 0) shared.count = {}, shared.sees_whole = false;
  wait_for_previous_kernel();
  if (tile.exists()) {
    Classifier classify{params, matrix, sequence, sequence.window(call), tile, shared};
    classify.make_parts();
    classify.make_runs();
    __syncthreads();
    const Span seen = shared.tile.some.both({0, tile.other_end()});
    const int first = seen.begin / kMaskStrip & ~tile.column_bits(),
              end = min((seen.end + kMaskStrip - 1) / kMaskStrip, lists.capacity << tile.column_bits());
    for (int base = first; base < end; base += kColumnsAtOnce) {
      if (thread == 0) {
        shared.chunk = Span{base, end}.part(0, kColumnsAtOnce), shared.visited = {IntervalBounds::kFar, 0};
        shared.open_groups = shared.open_columns = 0;
      }
      for (int i = thread; i < kColumnsAtOnce / 8; i += blockDim.x) reinterpret_cast<uint64_t*>(shared.classes)[i] = 0u;
      __syncthreads();
      classify.classify_tile();
      classify.read_open_columns();
      __syncthreads();
      write_entries(classify);
      __syncthreads();  // classes may be overwritten
    }
    if (thread < tile.strips() * kStripWords) {
      const uint32_t full = full_word(thread % kStripWords, tile.strip(thread / kStripWords).size());
      const uint32_t word = shared.sees_whole ? full : shared.own_seen[thread];
      classify.seen_words(tile.of_keys, tile.begin / kMaskStrip)[thread] = word;
    }
  }
  if (thread == 0) lists.counts[blockIdx.x] = shared.count;
}

}  // namespace

cudaError_t run_mask_plan(const MaskPlanParams& params, cudaStream_t stream) {
  static std::atomic<uint64_t> configured_devices{0};
  const SeenBits& seen = params.mask.seen;
  const int64_t strips = static_cast<int64_t>(params.matrices) * (seen.row_strips + seen.key_strips);
  const int64_t most = 8 * 1024;  // a wave or more of any GPU
  const cudaError_t status = launch(mask_bounds_kernel, std::min((strips + kWarps - 1) / kWarps, most), kThreads, 0,
                                    params, params.call.device, stream, configured_devices);
  if (status != cudaSuccess) return status;
  const int64_t tiles = static_cast<int64_t>(params.matrices) * params.mask.lists.tiles;
  if (params.block > ListedTile::kMostColumns * kMaskStrip) return cudaErrorInvalidValue;
  return launch_dependent(mask_lists_kernel, tiles, tiles > kManyTiles ? kThreads / 2 : kThreads, 0, params,
                          params.call.device, stream, configured_devices);
}

}  // namespace flash
