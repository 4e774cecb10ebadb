// Block lists: the blocks of scores that a work tile visits where a mask is given as data. Of each tile of rows the
// n_blocks, of each tile of keys the m_blocks: first those that are whole for all strips of the tile, upwards, then
// partial ones, upwards. kernels/auxiliary/mask_plan.cu makes them on the device.
#pragma once

#include <cstdint>

#include "core/host_device.h"
#include "core/mask_factors.h"
#include "core/visibility.h"

namespace flash {

constexpr int kMaxTileStrips = 4;  // strips of kMaskStrip rows or keys of a work tile

// A block index and two bits for each strip of the tile, its BlockClass.
struct BlockEntry {
  static constexpr int kIndexBits = 32 - 2 * kMaxTileStrips;

  uint32_t bits = 0;

  FLASH_HOST_DEVICE static constexpr BlockEntry of_block(int block) { return {static_cast<uint32_t>(block)}; }
  FLASH_HOST_DEVICE constexpr void set(int strip, BlockClass value) {
    bits |= static_cast<uint32_t>(value) << (kIndexBits + 2 * strip);
  }
  FLASH_HOST_DEVICE constexpr int block() const { return static_cast<int>(bits & ((1u << kIndexBits) - 1u)); }
  FLASH_HOST_DEVICE constexpr BlockClass strip(int strip) const {
    return static_cast<BlockClass>(bits >> (kIndexBits + 2 * strip) & 3u);
  }
  // Whether the first `strips` strips see all of it.
  FLASH_HOST_DEVICE constexpr bool has_whole_strips(int strips) const {
    for (int strip = 0; strip < strips; ++strip) {
      if (this->strip(strip) != BlockClass::kWhole) return false;
    }
    return true;
  }
  // Then all its rows see something, and all its keys are seen.
  FLASH_HOST_DEVICE constexpr bool has_whole_strip() const {
    constexpr uint32_t kWholeBits = 0xaaaaaaaau << kIndexBits;
    static_assert(static_cast<int>(BlockClass::kWhole) == 2 && static_cast<int>(BlockClass::kPartial) == 1);
    return (bits & kWholeBits) != 0u;
  }
};

struct BlockCount {
  int whole = 0, partial = 0;
};

// Lists of all tiles of all mask matrices: of tile t the entries [t * capacity, (t + 1) * capacity), whole blocks from
// the front, partial ones from the back.
struct BlockLists {
  uint32_t* __restrict__ entries = nullptr;
  BlockCount* __restrict__ counts = nullptr;
  int tiles = 0;     // of a mask matrix
  int capacity = 0;  // blocks of a tile at most
};

// What some query sees, and which queries see something: a bit for each key and row of each mask matrix, in strips of
// kMaskStrip of a sequence. Other keys and rows may hold anything, NaN too, and 0 * NaN is NaN.
struct SeenBits {
  uint32_t* __restrict__ rows = nullptr;
  uint32_t* __restrict__ keys = nullptr;
  int row_strips = 0, key_strips = 0;  // of a mask matrix
};

// With seqused_k, where sequences may share keys: of each sequence of a packed batch of `keys` keys.
FLASH_HOST_DEVICE constexpr int key_strips_of_sequence(int keys) { return (keys + kMaskStrip - 1) / kMaskStrip; }

// The blocks of one tile in the order of visits.
struct BlockList {
  const uint32_t* __restrict__ entries = nullptr;
  int whole = 0, total = 0, capacity = 0;

  FLASH_HOST_DEVICE constexpr int count() const { return total; }
  FLASH_HOST_DEVICE BlockEntry at(int step) const {
    return {entries[step < whole ? step : capacity - 1 - (step - whole)]};
  }
  // Whole blocks downwards, then partial ones downwards: n_blocks of a head that start together read the same rows.
  FLASH_HOST_DEVICE BlockEntry downwards(int step) const {
    return {entries[step < whole ? whole - 1 - step : capacity - total + step]};
  }
};

// The same where a call may have no mask as data (shows_all_keys()): without entries, block i is step i.
struct BiasedBlockList : BlockList {
  FLASH_HOST_DEVICE BlockEntry at(int step) const {
    return entries == nullptr ? BlockEntry::of_block(step) : BlockList::at(step);
  }
};

// Without entries: the class of a strip of rows from `row` on and the block [key, key + block_n).
FLASH_HOST_DEVICE constexpr BlockClass class_by_window(const Visibility& window, int row, int key, int block_n) {
  if (row >= window.seqlen_q || window.key_end(row) >= key + block_n) return BlockClass::kWhole;
  const int end = row + kMaskStrip < window.seqlen_q ? row + kMaskStrip : window.seqlen_q;
  return window.key_end(end - 1) <= key ? BlockClass::kHidden : BlockClass::kPartial;
}

}  // namespace flash
