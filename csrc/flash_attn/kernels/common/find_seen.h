// What core/block_class.h takes of strips, and find_seen(), on the device.
#pragma once

#include "core/block_class.h"
#include "kernels/common/transpose_bits.h"

namespace flash {

// Bounds of what the lanes of a warp have.
__device__ __forceinline__ IntervalBounds warp_bounds(IntervalBounds bounds) {
  for (int i = 0; i < 2; ++i) {
    bounds.outer.begin[i] = __reduce_min_sync(0xffffffffu, bounds.outer.begin[i]);
    bounds.outer.end[i] = __reduce_max_sync(0xffffffffu, bounds.outer.end[i]);
    bounds.inner.begin[i] = __reduce_max_sync(0xffffffffu, bounds.inner.begin[i]);
    bounds.inner.end[i] = __reduce_min_sync(0xffffffffu, bounds.inner.end[i]);
  }
  return bounds;
}

// The runs of a strip by a warp. values: the intervals of the strip's members, interval_count of each.
__device__ __forceinline__ void find_runs(const int* values, int interval_count, int number, int size,
                                          StripRuns& runs) {
  const int lane = threadIdx.x % 32;
  Span intervals[kStripWords];
  for (int i = 0; i < kStripWords; ++i) {
    const int* const at = values + 2 * (interval_count * min(32 * i + lane, size - 1) + number);
    intervals[i] = {at[0], at[1]};
  }
  Span last;  // of the 32 before
  int count = 0;
#pragma unroll
  for (int i = 0; i < kStripWords; ++i) {
    const Span own = intervals[i];
    Span before{__shfl_up_sync(0xffffffffu, own.begin, 1), __shfl_up_sync(0xffffffffu, own.end, 1)};
    if (lane == 0) before = last;
    last = {__shfl_sync(0xffffffffu, own.begin, 31), __shfl_sync(0xffffffffu, own.end, 31)};
    const int member = 32 * i + lane;
    const bool differs = own.begin != before.begin || own.end != before.end;
    const uint32_t begins = __ballot_sync(0xffffffffu, member < size && (member == 0 || differs));
    const int run = count + __popc(begins & ((1u << lane) - 1u));
    if ((begins >> lane & 1u) != 0u && run < StripRuns::kMost) {
      runs.first[run] = static_cast<uint8_t>(member);
      runs.intervals[run] = own;
    }
    count += __popc(begins);
  }
  if (lane != 0) return;
  runs.count = count <= StripRuns::kMost ? count : 0;
  runs.first[runs.count] = static_cast<uint8_t>(size);
}

// find_seen() by a warp whose lanes have the same rectangle: a row a lane, 32 rows at a time, and of key_hidden two
// keys.
__device__ Found find_together(const MaskFactors& factors, const Visibility& window, const Rectangle& at) {
  __syncwarp();  // for racecheck: one lane will write what all have read
  const int lane = threadIdx.x % 32, last = at.rows.end - 1;
  uint32_t sees[kStripWords] = {~0u, ~0u}, next_sees[kStripWords] = {~0u, ~0u};  // a row, and that of the next 32
  if (factors.query_ranges != nullptr) {
    const Intervals keys = factors.keys_of(min(at.rows.begin + lane, last)),
                    next_keys = factors.keys_of(min(at.rows.begin + 32 + lane, last));
    for (int i = 0; i < kStripWords; ++i) {
      sees[i] = MaskFactors::word_of(keys, at.keys.begin + kMaskWordKeys * i);
      next_sees[i] = MaskFactors::word_of(next_keys, at.keys.begin + kMaskWordKeys * i);
    }
  }
  if (factors.key_hidden != nullptr) {
    Intervals hidden_rows[kStripWords];
    for (int i = 0; i < kStripWords; ++i) {
      const int key = at.keys.begin + 32 * i + lane;
      if (key < at.keys.end) hidden_rows[i] = factors.hidden_rows_of(key);
    }
    for (int i = 0; i < kStripWords; ++i) {
      const Intervals& rows = hidden_rows[i];
      const bool from_all = rows.contain(at.rows.begin, at.rows.end);
      uint32_t hidden = __ballot_sync(0xffffffffu, from_all), next_hidden = hidden;
      if (__any_sync(0xffffffffu, !from_all && rows.meet(at.rows.begin, at.rows.end))) {  // rows differ
        hidden = transpose_bits(MaskFactors::word_of(rows, at.rows.begin));
        next_hidden = transpose_bits(MaskFactors::word_of(rows, at.rows.begin + 32));
      }
      sees[i] &= ~hidden, next_sees[i] &= ~next_hidden;
    }
  }
  MaskFactors others = factors;
  others.query_ranges = nullptr;
  const bool has_others = factors.bits != nullptr || factors.block_map != nullptr || window.window.may_mask();
  Found found;
#pragma unroll 1  // less code, which is read from memory
  for (int first = at.rows.begin; first <= last; first += 32) {
    const bool valid = first + lane <= last;
    const int size = valid ? at.keys.size() : 0;
    uint32_t words[kStripWords] = {full_word(0, size), full_word(1, size)};
    if (valid && has_others) words_of_row(others, window, at, first + lane, words);
    uint32_t some = 0u;
    for (int i = 0; i < kStripWords; ++i) {
      words[i] &= sees[i];
      found.any[i] |= __reduce_or_sync(0xffffffffu, words[i]);
      found.all[i] &= __reduce_and_sync(0xffffffffu, valid ? words[i] : ~0u);
      some |= words[i];
      sees[i] = next_sees[i];
    }
    (first == at.rows.begin ? found.rows[0] : found.rows[1]) = __ballot_sync(0xffffffffu, some != 0u);
  }
  return found;
}

// The same by one thread without key_hidden: with several rows at a time, since each waits for its loads.
__device__ Found find_alone(const MaskFactors& factors, const Visibility& window, const Rectangle& at) {
  Found found;
#pragma unroll 4
  for (int row = at.rows.begin; row < at.rows.end; ++row) {
    uint32_t words[kStripWords];
    words_of_row(factors, window, at, row, words);
    found.add(row - at.rows.begin, words);
  }
  return found;
}

}  // namespace flash
