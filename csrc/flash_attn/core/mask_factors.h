// Masks as data: which keys a query sees by tensors of the call (flash_attn.AttentionMask). All factors hold together,
// and together with the window. Blocks of scores are hidden, partial or whole; kernels visit the last two and apply the
// factors to partial ones alone (core/block_list.h). tests/cpp/test_mask_factors.cpp checks this file by brute force.
#pragma once

#include <cstdint>

#include "core/fast_div.h"
#include "core/host_device.h"
#include "core/visibility.h"

namespace flash {

constexpr int kMaskStrip = 64;  // rows, and keys, of a strip: the unit of the summaries
constexpr int kGroupBits = 3;
constexpr int kGroupStrips = 1 << kGroupBits;  // of a plan: strips whose bounds it has together
constexpr int kMaskWordKeys = 32;              // keys of a word of bits

// What a block of the block map says; greater values are kWhole.
enum class MappedBlock : uint8_t { kHidden = 0, kPartial = 1, kWhole = 2 };

enum class BlockClass : int { kHidden = 0, kPartial = 1, kWhole = 2 };

constexpr FLASH_HOST_DEVICE BlockClass both(BlockClass a, BlockClass b) { return a < b ? a : b; }

// Up to two intervals [begin, end), whose union counts. Empty where end <= begin.
struct Intervals {
  int begin[2] = {0, 0};
  int end[2] = {0, 0};

  FLASH_HOST_DEVICE constexpr bool contain(int i) const {
    return (begin[0] <= i && i < end[0]) || (begin[1] <= i && i < end[1]);
  }
  // Whether one of both contains [first, last). Without branches, as meet().
  FLASH_HOST_DEVICE constexpr bool contain(int first, int last) const {
    return ((begin[0] <= first) & (end[0] >= last)) | ((begin[1] <= first) & (end[1] >= last));
  }
  // False only if none meets [first, last).
  FLASH_HOST_DEVICE constexpr bool meet(int first, int last) const {
    return ((begin[0] < last) & (end[0] > first)) | ((begin[1] < last) & (end[1] > first));
  }
};

// Of the intervals of several rows or keys, for each number i: `outer` contains all of them, `inner` lies in all of
// them. An empty interval leaves `outer` as it is, and `inner` empty.
struct alignas(16) IntervalBounds {
  static constexpr int kFar = 0x7fffffff;

  Intervals outer{{kFar, kFar}, {-1, -1}};
  Intervals inner{{-1, -1}, {kFar, kFar}};

  FLASH_HOST_DEVICE constexpr void add(const Intervals& outer_ends, const Intervals& inner_ends) {
    for (int i = 0; i < 2; ++i) {
      if (outer_ends.begin[i] < outer.begin[i]) outer.begin[i] = outer_ends.begin[i];
      if (outer_ends.end[i] > outer.end[i]) outer.end[i] = outer_ends.end[i];
      if (inner_ends.begin[i] > inner.begin[i]) inner.begin[i] = inner_ends.begin[i];
      if (inner_ends.end[i] < inner.end[i]) inner.end[i] = inner_ends.end[i];
    }
  }
  FLASH_HOST_DEVICE constexpr void add(const IntervalBounds& other) { add(other.outer, other.inner); }
  FLASH_HOST_DEVICE constexpr void add(Intervals intervals) {
    for (int i = 0; i < 2; ++i) {
      if (intervals.end[i] <= intervals.begin[i]) intervals.begin[i] = kFar, intervals.end[i] = -1;
    }
    add(intervals, intervals);
  }

  // Whether an interval of each member contains [first, last).
  FLASH_HOST_DEVICE constexpr bool all_contain(int first, int last) const { return inner.contain(first, last); }

  // True only if no member meets [first, last); false decides nothing.
  FLASH_HOST_DEVICE constexpr bool none_meets(int first, int last) const { return !outer.meet(first, last); }
};

// Mask matrices (batch entry, mask head): of a factor, or of what is planned for all factors together.
struct MaskMatrices {
  int heads = 1;
  bool per_batch = false;  // each sequence of a dense batch has its own
  FastDiv group;           // query heads of a mask head

  FLASH_HOST_DEVICE int count(int batch) const { return per_batch ? batch * heads : heads; }
  FLASH_HOST_DEVICE int index(int batch, int head) const {
    return (per_batch ? batch * heads : 0) + group.divide(head);
  }
  FLASH_HOST_DEVICE int batch_of(int matrix) const { return per_batch ? matrix / heads : 0; }
  FLASH_HOST_DEVICE int first_head_of(int matrix) const { return matrix % heads * group.divisor; }
};

// The factors of a call, and by of() those of one sequence and head, whose pointers are then its own. Null: there is no
// such factor.
struct MaskFactors {
  // Of each query the keys that it sees, (rows, 2 * query_intervals) int32.
  const int* __restrict__ query_ranges = nullptr;
  // Of each key the queries that it is hidden from, (keys, 2 * key_intervals) int32.
  const int* __restrict__ key_hidden = nullptr;
  // Of each query a bit for each key, (rows, row_words) little-endian words of kMaskWordKeys keys.
  const uint32_t* __restrict__ bits = nullptr;
  // Of each block of scores a MappedBlock, (map_rows, map_cols); `bits` are read only in blocks that are kPartial.
  const uint8_t* __restrict__ block_map = nullptr;
  int query_intervals = 0, key_intervals = 0;  // 1 or 2
  int row_words = 0;
  int map_rows = 0, map_cols = 0;
  FastDiv map_block_rows, map_block_keys;  // sizes of a block of the map, multiples of kMaskStrip
  MaskMatrices of_ranges, of_hidden, of_bits, of_map;

  FLASH_HOST_DEVICE bool given() const {
    return query_ranges != nullptr || key_hidden != nullptr || bits != nullptr || block_map != nullptr;
  }

  // Those of the sequence whose first row and key are given. rows, keys: of a mask matrix.
  FLASH_HOST_DEVICE MaskFactors of(int batch, int head, int64_t rows, int64_t keys, int first_row,
                                   int first_key) const {
    MaskFactors own = *this;
    if (query_ranges != nullptr) {
      own.query_ranges += (of_ranges.index(batch, head) * rows + first_row) * 2 * query_intervals;
    }
    if (key_hidden != nullptr) own.key_hidden += (of_hidden.index(batch, head) * keys + first_key) * 2 * key_intervals;
    if (bits != nullptr) own.bits += (of_bits.index(batch, head) * rows + first_row) * row_words;
    if (block_map != nullptr) own.block_map += int64_t{of_map.index(batch, head)} * map_rows * map_cols;
    return own;
  }

  FLASH_HOST_DEVICE static Intervals intervals_at(const int* values, int count, int index) {
    const int* const at = values + static_cast<int64_t>(index) * 2 * count;
    Intervals intervals;
    intervals.begin[0] = at[0];
    intervals.end[0] = at[1];
    if (count > 1) {
      intervals.begin[1] = at[2];
      intervals.end[1] = at[3];
    }
    return intervals;
  }
  FLASH_HOST_DEVICE Intervals keys_of(int row) const { return intervals_at(query_ranges, query_intervals, row); }
  FLASH_HOST_DEVICE Intervals hidden_rows_of(int key) const { return intervals_at(key_hidden, key_intervals, key); }

  FLASH_HOST_DEVICE MappedBlock mapped(int row, int key) const {
    const int map_row = map_block_rows.divide(row), map_col = map_block_keys.divide(key);
    if (map_row >= map_rows || map_col >= map_cols) return MappedBlock::kHidden;
    const uint8_t value = block_map[static_cast<int64_t>(map_row) * map_cols + map_col];
    constexpr uint8_t kWhole = static_cast<uint8_t>(MappedBlock::kWhole);
    return static_cast<MappedBlock>(value < kWhole ? value : kWhole);
  }

  // Whether one block of the map has these rows and keys.
  FLASH_HOST_DEVICE bool in_one_block(int first_row, int last_row, int first_key, int last_key) const {
    return map_block_rows.divide(first_row) == map_block_rows.divide(last_row) &&
           map_block_keys.divide(first_key) == map_block_keys.divide(last_key);
  }

  FLASH_HOST_DEVICE uint32_t bits_word(int row, int key) const {
    const int index = key / kMaskWordKeys;
    return index < row_words ? bits[static_cast<int64_t>(row) * row_words + index] : 0u;
  }

  // A bit for each of the kMaskWordKeys keys from `key`, a multiple of kMaskWordKeys: whether `row` sees it. key_hidden
  // is not applied.
  FLASH_HOST_DEVICE uint32_t row_word(int row, int key) const {
    uint32_t word = ~0u;
    MappedBlock block = MappedBlock::kPartial;
    if (block_map != nullptr) {
      block = mapped(row, key);
      if (block == MappedBlock::kHidden) return 0;
    }
    if (bits != nullptr && block != MappedBlock::kWhole) word = bits_word(row, key);
    if (query_ranges != nullptr) {
      word &= word_of(keys_of(row), key);
    }
    return word;
  }

  // Bits of the kMaskWordKeys numbers from `first` (>= 0) on that are in [begin, end). Clamped before the subtraction:
  // of `begin <= first ? 0 : begin - first` nvcc makes max(begin - first, 0), which wraps around for INT_MIN.
  FLASH_HOST_DEVICE static constexpr uint32_t interval_word(int begin, int end, int first) {
    const int low = (begin > first ? begin : first) - first, high = (end > first ? end : first) - first;
    if (low >= kMaskWordKeys || high <= low) return 0u;
    const uint32_t below_high = high >= kMaskWordKeys ? ~0u : (1u << high) - 1u;
    return below_high & (~0u << low);
  }

  // Of those in either interval.
  FLASH_HOST_DEVICE static constexpr uint32_t word_of(const Intervals& intervals, int first) {
    return interval_word(intervals.begin[0], intervals.end[0], first) |
           interval_word(intervals.begin[1], intervals.end[1], first);
  }

  FLASH_HOST_DEVICE bool sees(int row, int key) const {
    if (key_hidden != nullptr && hidden_rows_of(key).contain(row)) return false;
    return row_word(row, key / kMaskWordKeys * kMaskWordKeys) >> (key % kMaskWordKeys) & 1u;
  }
};

// Up to two intervals of the keys of a tile, counted from its first one, a byte for each end.
struct TileIntervals {
  static constexpr int kMostKeys = 128;

  uint32_t bytes;

  // What `keys` and the keys [begin, end) share.
  FLASH_HOST_DEVICE static constexpr TileIntervals of(const Intervals& keys, int begin, int end, int first) {
    const auto offset = [first](int key) {
      return static_cast<uint32_t>((key < first ? first : key > first + kMostKeys ? first + kMostKeys : key) - first);
    };
    uint32_t bytes = 0;
    for (int i = 0; i < 2; ++i) {
      const uint32_t low = offset(keys.begin[i] > begin ? keys.begin[i] : begin);
      const uint32_t high = offset(keys.end[i] < end ? keys.end[i] : end);
      bytes |= (low | high << 8) << 16 * i;
    }
    return {bytes};
  }

  // MaskFactors::word_of() of these keys.
  FLASH_HOST_DEVICE constexpr uint32_t word(int first) const {
    const auto end = [this](int i) { return static_cast<int>(bytes >> 8 * i & 0xffu); };
    return MaskFactors::word_of({{end(0), end(2)}, {end(1), end(3)}}, first);
  }
};

}  // namespace flash
