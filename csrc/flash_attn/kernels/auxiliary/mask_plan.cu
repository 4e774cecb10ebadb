// Plans of masks as data: bounds of strips, then the list of blocks of each work tile. Two launches.
#include <algorithm>
#include <atomic>

#include "core/block_class.h"
#include "kernels/common/launch.h"
#include "kernels/common/pdl.h"
#include "kernels/common/seen_bits.h"
#include "kernels/common/sequence.h"
#include "kernels/common/transpose_bits.h"
#include "params/mask.h"

namespace flash {
namespace {

constexpr int kThreads = 256, kWarps = kThreads / 32;
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
  allow_next_kernel();
  const int lane = threadIdx.x % 32, strips = seen.row_strips + seen.key_strips;
  const int64_t warps = static_cast<int64_t>(gridDim.x) * kWarps,
                count = static_cast<int64_t>(params.matrices) * strips;
  for (int64_t i = static_cast<int64_t>(blockIdx.x) * kWarps + threadIdx.x / 32; i < count; i += warps) {
    const int matrix = static_cast<int>(i / strips),
              index = static_cast<int>(i - static_cast<int64_t>(matrix) * strips);
    const bool of_rows = index < seen.row_strips;
    const int strip = of_rows ? index : index - seen.row_strips;
    const MaskSequence sequence = mask_sequence(params, matrix, segment_of_strip(call, of_rows, strip));
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
    if (lane < kStripWords) (of_rows ? seen.rows : seen.keys)[at * kStripWords + lane] = 0u;
  }
}

// find_seen() by a warp whose lanes have the same rectangle: a row a lane, 32 rows at a time, and of key_hidden two
// keys.
__device__ Found find_together(const MaskFactors& factors, const Visibility& window, const Rectangle& at) {
  const int lane = threadIdx.x % 32;
  Intervals hidden[kStripWords];
  for (int i = 0; i < kStripWords; ++i) {
    const int key = at.key_begin + 32 * i + lane;
    if (factors.key_hidden != nullptr && key < at.key_end) hidden[i] = factors.hidden_rows_of(key);
  }
  Intervals keys[kStripWords];  // of both rows, read before either is looked at
  if (factors.query_ranges != nullptr) {
    for (int i = 0; i < kStripWords; ++i) keys[i] = factors.keys_of(min(at.row_begin + 32 * i + lane, at.row_end - 1));
  }
  MaskFactors others = factors;
  others.query_ranges = nullptr;
  Found found;
#pragma unroll
  for (int half = 0; half < kMaskStrip / 32; ++half) {
    const int first = at.row_begin + 32 * half, row = first + lane;
    if (first >= at.row_end) break;
    const bool valid = row < at.row_end;
    uint32_t words[kStripWords] = {};
    if (valid) words_of_row(others, window, at, row, words);
    uint32_t some = 0u;
    for (int i = 0; i < kStripWords; ++i) {
      if (factors.query_ranges != nullptr)
        words[i] &= MaskFactors::word_of(keys[half], at.key_begin + kMaskWordKeys * i);
      if (factors.key_hidden != nullptr) {
        words[i] &= ~transpose_bits(MaskFactors::word_of(hidden[i], first));
      }
      found.any[i] |= __reduce_or_sync(0xffffffffu, words[i]);
      found.all[i] &= __reduce_and_sync(0xffffffffu, valid ? words[i] : ~0u);
      some |= words[i];
    }
    found.rows[half] = __ballot_sync(0xffffffffu, some != 0u);
  }
  return found;
}

// The same by one thread without key_hidden: with several rows at a time, since each waits for its loads.
__device__ Found find_alone(const MaskFactors& factors, const Visibility& window, const Rectangle& at) {
  Found found;
#pragma unroll 4
  for (int row = at.row_begin; row < at.row_end; ++row) {
    uint32_t words[kStripWords];
    words_of_row(factors, window, at, row, words);
    found.add(row - at.row_begin, words);
  }
  return found;
}

// Classes of the rectangles of a mask matrix's sequence, and its seen bits.
struct Classifier {
  const MaskPlanParams& params;
  const int matrix;
  const MaskSequence sequence;
  const Visibility window;

  __device__ int64_t row_strip(const Rectangle& at) const {
    return static_cast<int64_t>(matrix) * params.mask.seen.row_strips + sequence.first_row_strip +
           at.row_begin / kMaskStrip;
  }
  __device__ int64_t key_strip(const Rectangle& at) const {
    return static_cast<int64_t>(matrix) * params.mask.seen.key_strips + sequence.first_key_strip +
           at.key_begin / kMaskStrip;
  }

  __device__ BlockClass by_bounds(const Rectangle& at) const {
    return class_by_bounds(sequence.factors, window, params.row_bounds[row_strip(at)], params.key_bounds[key_strip(at)],
                           at.row_begin, at.row_end, at.key_begin, at.key_end);
  }

  // marks_tile: also the rows or keys of the work tile, in strips of which all lanes of a warp have the same.
  __device__ void mark_seen(const Rectangle& at, const Found& found, bool marks_tile) const {
    const SeenBits& seen = params.mask.seen;
    const bool marks_rows = marks_tile || params.of_keys, marks_keys = marks_tile || !params.of_keys;
    uint32_t* const rows = seen.rows + row_strip(at) * kStripWords;
    uint32_t* const keys = seen.keys + key_strip(at) * kStripWords;
    // Bits are only ever added, so an old value saves atomics and loses nothing. All are read before any is looked at.
    uint32_t old_rows[kStripWords], old_keys[kStripWords];
    for (int i = 0; i < kStripWords; ++i) {
      old_rows[i] = marks_rows ? static_cast<const volatile uint32_t*>(rows)[i] : ~0u;
      old_keys[i] = marks_keys ? static_cast<const volatile uint32_t*>(keys)[i] : ~0u;
    }
    for (int i = 0; i < kStripWords; ++i) {
      if ((found.rows[i] & ~old_rows[i]) != 0u) atomicOr(rows + i, found.rows[i]);
      if ((found.any[i] & ~old_keys[i]) != 0u) atomicOr(keys + i, found.any[i]);
    }
  }

  // By all lanes of a warp, each for its own rectangle. Those whose scores have to be read: by all lanes together, one
  // after the other, or each alone where there are many of them: lanes next to each other read neighbouring words.
  __device__ BlockClass operator()(const Rectangle& at) const {
    constexpr int kMostTogether = 8;
    const BlockClass bounded = at.empty() ? BlockClass::kHidden : by_bounds(at);
    const int lane = threadIdx.x % 32;
    const uint32_t whole = __ballot_sync(0xffffffffu, bounded == BlockClass::kWhole);
    const uint32_t partial = __ballot_sync(0xffffffffu, bounded == BlockClass::kPartial);
    Found found = Found::whole(at);
    if (sequence.factors.key_hidden == nullptr && __popc(partial) > kMostTogether) {
      if (bounded == BlockClass::kPartial) found = find_alone(sequence.factors, window, at);
    } else {
      for (uint32_t left = partial; left != 0u; left &= left - 1) {
        const int source = __ffs(left) - 1;
        Rectangle common;
        common.row_begin = __shfl_sync(0xffffffffu, at.row_begin, source);
        common.row_end = __shfl_sync(0xffffffffu, at.row_end, source);
        common.key_begin = __shfl_sync(0xffffffffu, at.key_begin, source);
        common.key_end = __shfl_sync(0xffffffffu, at.key_end, source);
        const Found of_source = find_together(sequence.factors, window, common);
        if (lane == source) found = of_source;
      }
    }
    if (bounded == BlockClass::kHidden) return bounded;
    mark_seen(at, found, bounded != BlockClass::kWhole || lane == __ffs(whole) - 1);
    return found.class_of(at);
  }
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
__global__ void __launch_bounds__(kThreads, kListBlocks)
    mask_lists_kernel(const __grid_constant__ MaskPlanParams params) {
  __shared__ int warp_sums[kWarps];
  wait_for_previous_kernel();
  const Flash_fwd_params& call = params.call;
  const BlockLists& lists = params.mask.lists;
  const int matrix = blockIdx.x / lists.tiles, tile = blockIdx.x - matrix * lists.tiles;
  const int* const segments = params.of_keys ? call.varlen.segments_k : call.varlen.segments_q;
  const int segment = call.is_varlen() ? find_segment(segments, call.b, tile, params.tile) : 0;
  const MaskSequence sequence = mask_sequence(params, matrix, segment);
  const int first = params.of_keys ? sequence.k_begin : sequence.q_begin;
  const int index = call.is_varlen() ? tile - varlen_first_slot(first, segment, params.tile) : tile;
  const ListedTile own{params.of_keys, index * params.tile, params.tile,
                       params.block,   sequence.seqlen_q,   sequence.seqlen_k};
  const Classifier classify{params, matrix, sequence, sequence.window(call)};
  const int blocks = own.exists() ? min(own.blocks(), lists.capacity) : 0;
  uint32_t* const entries = lists.entries + static_cast<int64_t>(blockIdx.x) * lists.capacity;
  constexpr int kPartialUnit = 1 << 16;  // both counts in one sum
  BlockCount count;
  for (int base = 0; base < blocks; base += kThreads) {
    const int block = base + threadIdx.x;
    bool visited = false, is_whole = false;
    const BlockEntry entry = own.entry(block, classify, visited, is_whole);
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
  return launch_dependent(mask_lists_kernel, tiles, kThreads, 0, params, params.call.device, stream,
                          configured_devices);
}

}  // namespace flash
