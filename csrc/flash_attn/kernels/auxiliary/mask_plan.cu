// Plans of masks as data: bounds of strips, then the list of blocks of each work tile. Two launches.
#include <algorithm>
#include <atomic>

#include "kernels/common/launch.h"
#include "kernels/common/sequence.h"
#include "params/mask.h"

namespace flash {
namespace {

constexpr int kThreads = 256, kWarps = kThreads / 32;
constexpr int kWordsPerStrip = kMaskStrip / kMaskWordKeys;

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
    sequence.first_row_strip = varlen_first_slot(sequence.q_begin, segment, kMaskStrip);
    sequence.first_key_strip = varlen_first_slot(sequence.k_begin, segment, kMaskStrip);
  } else {
    sequence.seqlen_q = call.seqlen_q;
    sequence.seqlen_k = call.seqlen_k;
  }
  sequence.factors =
      params.mask.factors.of_matrix(matrix, call.seqlen_q, call.seqlen_k, sequence.q_begin, sequence.k_begin);
  return sequence;
}

__device__ __forceinline__ IntervalBounds warp_bounds(IntervalBounds bounds) {
  for (int i = 0; i < 2; ++i) {
    bounds.min_begin[i] = __reduce_min_sync(0xffffffffu, bounds.min_begin[i]);
    bounds.max_begin[i] = __reduce_max_sync(0xffffffffu, bounds.max_begin[i]);
    bounds.min_end[i] = __reduce_min_sync(0xffffffffu, bounds.min_end[i]);
    bounds.max_end[i] = __reduce_max_sync(0xffffffffu, bounds.max_end[i]);
  }
  return bounds;
}

// A warp for each strip of the rows and of the keys of a mask matrix: its bounds, and cleared seen bits.
__global__ void __launch_bounds__(kThreads) mask_bounds_kernel(const __grid_constant__ MaskPlanParams params) {
  const Flash_fwd_params& call = params.call;
  const SeenBits& seen = params.mask.seen;
  const int lane = threadIdx.x % 32, strips = seen.row_strips + seen.key_strips;
  const int64_t warps = static_cast<int64_t>(gridDim.x) * kWarps, count = static_cast<int64_t>(params.matrices) * strips;
  for (int64_t i = static_cast<int64_t>(blockIdx.x) * kWarps + threadIdx.x / 32; i < count; i += warps) {
    const int matrix = static_cast<int>(i / strips), index = static_cast<int>(i - static_cast<int64_t>(matrix) * strips);
    const bool of_rows = index < seen.row_strips;
    const int strip = of_rows ? index : index - seen.row_strips;
    const int* const segments = of_rows ? call.varlen.segments_q : call.varlen.segments_k;
    const int segment = call.is_varlen() ? find_segment(segments, call.b, strip, kMaskStrip) : 0;
    const MaskSequence sequence = mask_sequence(params, matrix, segment);
    const int first = kMaskStrip * (strip - (of_rows ? sequence.first_row_strip : sequence.first_key_strip));
    const int end = min(first + kMaskStrip, of_rows ? sequence.seqlen_q : sequence.seqlen_k);
    const MaskFactors& factors = sequence.factors;
    IntervalBounds bounds;
    if ((of_rows ? factors.query_ranges : factors.key_hidden) != nullptr) {
      for (int member = first + lane; member < end; member += 32) {
        bounds.add(of_rows ? factors.keys_of(member) : factors.hidden_rows_of(member));
      }
    }
    bounds = warp_bounds(bounds);
    const int64_t at = static_cast<int64_t>(matrix) * (of_rows ? seen.row_strips : seen.key_strips) + strip;
    if (lane == 0) (of_rows ? params.row_bounds : params.key_bounds)[at] = bounds;
    if (lane < kWordsPerStrip) (of_rows ? seen.rows : seen.keys)[at * kWordsPerStrip + lane] = 0u;
  }
}

// At most kMaskStrip rows and keys of a sequence; empty where an end is not beyond its begin.
struct Rectangle {
  int row_begin, row_end, key_begin, key_end;

  __device__ bool empty() const { return row_end <= row_begin || key_end <= key_begin; }
};

// What the rows of a rectangle see, all at once: for the class, and for the seen bits.
struct Found {
  uint32_t any[kWordsPerStrip] = {};                // keys that some row sees
  uint32_t all[kWordsPerStrip] = {~0u, ~0u};        // keys that all rows see
  uint32_t rows[kMaskStrip / 32] = {};              // rows that see some key
  static_assert(kWordsPerStrip == 2, "two words");

  __device__ __forceinline__ void add(int row, const uint32_t (&words)[kWordsPerStrip]) {
    uint32_t some = 0u;
    for (int i = 0; i < kWordsPerStrip; ++i) {
      any[i] |= words[i];
      all[i] &= words[i];
      some |= words[i];
    }
    if (some != 0u) rows[row / 32] |= 1u << (row % 32);
  }
};

// What a row sees of a rectangle's keys by everything but key_hidden.
__device__ __forceinline__ void words_of_row(const MaskFactors& factors, const Visibility& window,
                                             const Rectangle& at, int row, uint32_t (&words)[kWordsPerStrip]) {
  const int begin = window.key_begin(row), end = min(window.key_end(row), at.key_end);
  for (int i = 0; i < kWordsPerStrip; ++i) {
    const int key = at.key_begin + kMaskWordKeys * i;
    const uint32_t in_window = MaskFactors::interval_word(begin, end, key);
    words[i] = in_window == 0u ? 0u : in_window & factors.row_word(row, key);
  }
}

// By one thread, without key_hidden.
__device__ Found find_alone(const MaskFactors& factors, const Visibility& window, const Rectangle& at) {
  Found found;
#pragma unroll 4
  for (int row = at.row_begin; row < at.row_end; ++row) {
    uint32_t words[kWordsPerStrip];
    words_of_row(factors, window, at, row, words);
    found.add(row - at.row_begin, words);
  }
  return found;
}

// By a warp whose lanes have the same rectangle, 32 rows at a time.
__device__ Found find_together(const MaskFactors& factors, const Visibility& window, const Rectangle& at) {
  const int lane = threadIdx.x % 32;
  Found found;
  for (int first = at.row_begin; first < at.row_end; first += 32) {
    const int row = first + lane;
    const bool valid = row < at.row_end;
    uint32_t words[kWordsPerStrip] = {};
    if (valid) words_of_row(factors, window, at, row, words);
    for (int key = at.key_begin; key < at.key_end; ++key) {
      if (factors.hidden_rows_of(key).contain(row)) {
        words[(key - at.key_begin) / 32] &= ~(1u << ((key - at.key_begin) % 32));
      }
    }
    uint32_t some = 0u;
    for (int i = 0; i < kWordsPerStrip; ++i) {
      found.any[i] |= __reduce_or_sync(0xffffffffu, words[i]);
      found.all[i] &= __reduce_and_sync(0xffffffffu, valid ? words[i] : ~0u);
      some |= words[i];
    }
    found.rows[(first - at.row_begin) / 32] = __ballot_sync(0xffffffffu, some != 0u);
  }
  return found;
}

__device__ __forceinline__ uint32_t full_word(int index, int length) {
  return MaskFactors::interval_word(0, length, 32 * index);
}

// The lists of one direction; a thread for each block of a work tile.
template <bool kOfKeys>
struct ListMaker {
  const MaskPlanParams& params;
  const int matrix;
  const MaskSequence sequence;
  const Visibility window;
  const int tile_begin;  // first row or key of the tile

  __device__ Rectangle rectangle(int strip, int block, int part) const {
    const int own = tile_begin + kMaskStrip * strip, own_end = kOfKeys ? sequence.seqlen_k : sequence.seqlen_q;
    const int other = block * params.block + kMaskStrip * part;
    const int other_end = kOfKeys ? sequence.seqlen_q : sequence.seqlen_k;
    const int own_last = min(min(own + kMaskStrip, tile_begin + params.tile), own_end);
    const int other_last = min(other + kMaskStrip, other_end);
    return kOfKeys ? Rectangle{other, other_last, own, own_last} : Rectangle{own, own_last, other, other_last};
  }

  __device__ BlockClass by_bounds(const Rectangle& at) const {
    const SeenBits& seen = params.mask.seen;
    const int64_t row_strip = static_cast<int64_t>(matrix) * seen.row_strips + sequence.first_row_strip;
    const int64_t key_strip = static_cast<int64_t>(matrix) * seen.key_strips + sequence.first_key_strip;
    return class_by_bounds(sequence.factors, window, params.row_bounds[row_strip + at.row_begin / kMaskStrip],
                           params.key_bounds[key_strip + at.key_begin / kMaskStrip], at.row_begin, at.row_end,
                           at.key_begin, at.key_end);
  }

  __device__ void mark_seen(const Rectangle& at, const Found& found) const {
    const SeenBits& seen = params.mask.seen;
    const int64_t row_strip =
        static_cast<int64_t>(matrix) * seen.row_strips + sequence.first_row_strip + at.row_begin / kMaskStrip;
    const int64_t key_strip =
        static_cast<int64_t>(matrix) * seen.key_strips + sequence.first_key_strip + at.key_begin / kMaskStrip;
    for (int i = 0; i < kWordsPerStrip; ++i) {
      add_bits(seen.rows + row_strip * kWordsPerStrip + i, found.rows[i]);
      add_bits(seen.keys + key_strip * kWordsPerStrip + i, found.any[i]);
    }
  }

  // Bits are only ever added, so an old value saves atomics and loses nothing.
  __device__ static void add_bits(uint32_t* word, uint32_t bits) {
    if ((bits & ~*static_cast<const volatile uint32_t*>(word)) != 0u) atomicOr(word, bits);
  }

  __device__ static BlockClass class_of(const Rectangle& at, const Found& found) {
    uint32_t any = 0u, missing = 0u;
    for (int i = 0; i < kWordsPerStrip; ++i) {
      any |= found.any[i];
      missing |= full_word(i, at.key_end - at.key_begin) & ~found.all[i];
    }
    return any == 0u ? BlockClass::kHidden : missing == 0u ? BlockClass::kWhole : BlockClass::kPartial;
  }

  __device__ static Found whole(const Rectangle& at) {
    Found found;
    for (int i = 0; i < kWordsPerStrip; ++i) {
      found.any[i] = full_word(i, at.key_end - at.key_begin);
      found.rows[i] = full_word(i, at.row_end - at.row_begin);
    }
    return found;
  }

  // By all lanes of a warp, each for its own rectangle.
  __device__ BlockClass exact_class(const Rectangle& at) const {
    BlockClass result = at.empty() ? BlockClass::kHidden : by_bounds(at);
    if (result == BlockClass::kWhole) mark_seen(at, whole(at));
    if (sequence.factors.key_hidden == nullptr) {
      if (result != BlockClass::kPartial) return result;
      const Found found = find_alone(sequence.factors, window, at);
      mark_seen(at, found);
      return class_of(at, found);
    }
    const int lane = threadIdx.x % 32;
    for (uint32_t left = __ballot_sync(0xffffffffu, result == BlockClass::kPartial); left != 0u; left &= left - 1) {
      const int source = __ffs(left) - 1;
      Rectangle common;
      common.row_begin = __shfl_sync(0xffffffffu, at.row_begin, source);
      common.row_end = __shfl_sync(0xffffffffu, at.row_end, source);
      common.key_begin = __shfl_sync(0xffffffffu, at.key_begin, source);
      common.key_end = __shfl_sync(0xffffffffu, at.key_end, source);
      const Found found = find_together(sequence.factors, window, common);
      if (lane == source) {
        mark_seen(common, found);
        result = class_of(common, found);
      }
    }
    return result;
  }

  // The entry of a block, with no class but kHidden where the tile need not visit it. A strip beyond the sequence is
  // whole, so that it makes no block partial. By all lanes of a warp.
  __device__ BlockEntry entry(int block, bool& visited, bool& is_whole) const {
    BlockEntry result = BlockEntry::of_block(block);
    visited = false;
    is_whole = true;
    const int own_end = kOfKeys ? sequence.seqlen_k : sequence.seqlen_q;
    for (int strip = 0; strip < params.tile / kMaskStrip; ++strip) {
      const bool beyond = tile_begin + kMaskStrip * strip >= own_end;
      int most = static_cast<int>(BlockClass::kHidden), least = static_cast<int>(BlockClass::kWhole);
      for (int part = 0; part < params.block / kMaskStrip; ++part) {
        const Rectangle at = rectangle(strip, block, part);
        const int found = static_cast<int>(exact_class(at));
        most = max(most, found);
        least = min(least, is_padding(at) ? static_cast<int>(BlockClass::kPartial) : found);
      }
      const BlockClass value = beyond ? BlockClass::kWhole
                               : most == static_cast<int>(BlockClass::kHidden) ? BlockClass::kHidden
                               : least == static_cast<int>(BlockClass::kWhole) ? BlockClass::kWhole
                                                                               : BlockClass::kPartial;
      visited |= !beyond && value != BlockClass::kHidden;
      is_whole &= value == BlockClass::kWhole;
      result.set(strip, value);
    }
    return result;
  }

  // Keys beyond the sequence have to be masked; rows beyond it are never stored.
  __device__ bool is_padding(const Rectangle& at) const { return at.key_end < at.key_begin + kMaskStrip; }
};

// Exclusive prefix of a block's threads, and the block's sum.
__device__ int block_prefix(int value, int& sum, int* warp_sums) {
  const int lane = threadIdx.x % 32, warp = threadIdx.x / 32;
  int inclusive = value;
  for (int distance = 1; distance < 32; distance *= 2) {
    const int lower = __shfl_up_sync(0xffffffffu, inclusive, distance);
    if (lane >= distance) inclusive += lower;
  }
  if (lane == 31) warp_sums[warp] = inclusive;
  __syncthreads();
  int before = 0;
  sum = 0;
  for (int i = 0; i < kWarps; ++i) {
    if (i < warp) before += warp_sums[i];
    sum += warp_sums[i];
  }
  __syncthreads();  // warp_sums may be overwritten
  return before + inclusive - value;
}

// A thread block for each work tile of each mask matrix.
template <bool kOfKeys>
__global__ void __launch_bounds__(kThreads) mask_lists_kernel(const __grid_constant__ MaskPlanParams params) {
  __shared__ int warp_sums[kWarps];
  const Flash_fwd_params& call = params.call;
  const BlockLists& lists = params.mask.lists;
  const int matrix = blockIdx.x / lists.tiles, tile = blockIdx.x - matrix * lists.tiles;
  const int* const segments = kOfKeys ? call.varlen.segments_k : call.varlen.segments_q;
  const int segment = call.is_varlen() ? find_segment(segments, call.b, tile, params.tile) : 0;
  const MaskSequence sequence = mask_sequence(params, matrix, segment);
  const int first = kOfKeys ? sequence.k_begin : sequence.q_begin;
  const int index = call.is_varlen() ? tile - varlen_first_slot(first, segment, params.tile) : tile;
  const ListMaker<kOfKeys> maker{params, matrix, sequence, sequence.window(call), index * params.tile};
  const int length = kOfKeys ? sequence.seqlen_q : sequence.seqlen_k;
  const int blocks = min((length + params.block - 1) / params.block, lists.capacity);
  const bool exists = maker.tile_begin < (kOfKeys ? sequence.seqlen_k : sequence.seqlen_q);
  uint32_t* const entries = lists.entries + static_cast<int64_t>(blockIdx.x) * lists.capacity;
  constexpr int kPartialUnit = 1 << 16;  // both counts in one sum
  BlockCount count;
  for (int base = 0; exists && base < blocks; base += kThreads) {
    const int block = base + threadIdx.x;
    bool visited = false, is_whole = false;
    BlockEntry entry = maker.entry(block, visited, is_whole);
    visited &= block < blocks;
    int sum;
    const int before = block_prefix(!visited ? 0 : is_whole ? 1 : kPartialUnit, sum, warp_sums);
    if (visited && is_whole) entries[count.whole + before % kPartialUnit] = entry.bits;
    if (visited && !is_whole) entries[lists.capacity - 1 - count.partial - before / kPartialUnit] = entry.bits;
    count.whole += sum % kPartialUnit;
    count.partial += sum / kPartialUnit;
  }
  if (threadIdx.x == 0) lists.counts[blockIdx.x] = count;
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
  return launch(params.of_keys ? mask_lists_kernel<true> : mask_lists_kernel<false>, tiles, kThreads, 0, params,
                params.call.device, stream, configured_devices);
}

}  // namespace flash
