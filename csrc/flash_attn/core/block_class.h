// Which blocks of scores a work tile visits under a mask as data: the arithmetic of kernels/auxiliary/mask_plan.cu.
// tests/cpp/test_block_lists.cpp checks it by brute force.
#pragma once

#include <cstdint>

#include "core/block_list.h"
#include "core/host_device.h"
#include "core/mask_factors.h"
#include "core/visibility.h"

namespace flash {

constexpr int kStripWords = kMaskStrip / kMaskWordKeys;
static_assert(kMaskWordKeys == 32 && kMaskStrip % 32 == 0, "rows and keys of a strip are whole words");

// At most kMaskStrip rows and keys of a sequence; empty where an end is not beyond its begin.
struct Rectangle {
  int row_begin, row_end, key_begin, key_end;

  FLASH_HOST_DEVICE constexpr bool empty() const { return row_end <= row_begin || key_end <= key_begin; }
  FLASH_HOST_DEVICE static constexpr uint32_t full_word(int index, int length) {
    return MaskFactors::interval_word(0, length, 32 * index);
  }
};

// What the rows of a rectangle see, a bit for each of its rows and keys.
struct Found {
  uint32_t any[kStripWords] = {};   // keys that some row sees
  uint32_t all[kStripWords];        // keys that all rows see
  uint32_t rows[kStripWords] = {};  // rows that see some key

  FLASH_HOST_DEVICE Found() {
    for (int i = 0; i < kStripWords; ++i) all[i] = ~0u;
  }

  FLASH_HOST_DEVICE static Found whole(const Rectangle& at) {
    Found found;
    for (int i = 0; i < kStripWords; ++i) {
      found.any[i] = Rectangle::full_word(i, at.key_end - at.key_begin);
      found.rows[i] = Rectangle::full_word(i, at.row_end - at.row_begin);
    }
    return found;
  }

  FLASH_HOST_DEVICE void add(int row, const uint32_t (&words)[kStripWords]) {
    uint32_t some = 0u;
    for (int i = 0; i < kStripWords; ++i) {
      any[i] |= words[i];
      all[i] &= words[i];
      some |= words[i];
    }
    if (some != 0u) rows[row / 32] |= 1u << (row % 32);
  }

  FLASH_HOST_DEVICE BlockClass class_of(const Rectangle& at) const {
    uint32_t some = 0u, missing = 0u;
    for (int i = 0; i < kStripWords; ++i) {
      some |= any[i];
      missing |= Rectangle::full_word(i, at.key_end - at.key_begin) & ~all[i];
    }
    return some == 0u ? BlockClass::kHidden : missing == 0u ? BlockClass::kWhole : BlockClass::kPartial;
  }
};

// What a row sees of a rectangle's keys by the factors of rows and the window: all but key_hidden.
FLASH_HOST_DEVICE void words_of_row(const MaskFactors& factors, const Visibility& window, const Rectangle& at, int row,
                                    uint32_t (&words)[kStripWords]) {
  const int begin = window.key_begin(row), end = window.key_end(row) < at.key_end ? window.key_end(row) : at.key_end;
  for (int i = 0; i < kStripWords; ++i) {
    const int key = at.key_begin + kMaskWordKeys * i;
    const uint32_t in_window = MaskFactors::interval_word(begin, end, key);
    words[i] = in_window == 0u ? 0u : in_window & factors.row_word(row, key);
  }
}

// The keys of a rectangle that are hidden from a row, by key_hidden.
FLASH_HOST_DEVICE void hide_keys(const MaskFactors& factors, const Rectangle& at, int row,
                                 uint32_t (&words)[kStripWords]) {
  if (factors.key_hidden == nullptr) return;
  for (int key = at.key_begin; key < at.key_end; ++key) {
    const int bit = key - at.key_begin;
    if (factors.hidden_rows_of(key).contain(row)) words[bit / 32] &= ~(1u << (bit % 32));
  }
}

FLASH_HOST_DEVICE Found find_seen(const MaskFactors& factors, const Visibility& window, const Rectangle& at) {
  Found found;
  for (int row = at.row_begin; row < at.row_end; ++row) {
    uint32_t words[kStripWords];
    words_of_row(factors, window, at, row, words);
    hide_keys(factors, at, row, words);
    found.add(row - at.row_begin, words);
  }
  return found;
}

// A work tile of `tile` rows and its blocks of `block` keys, or with of_keys of keys and its blocks of rows.
struct ListedTile {
  bool of_keys;
  int begin;  // first row or key of the tile
  int tile, block;
  int seqlen_q, seqlen_k;

  FLASH_HOST_DEVICE int own_end() const { return of_keys ? seqlen_k : seqlen_q; }
  FLASH_HOST_DEVICE int other_end() const { return of_keys ? seqlen_q : seqlen_k; }
  FLASH_HOST_DEVICE bool exists() const { return begin < own_end(); }
  FLASH_HOST_DEVICE int blocks() const { return (other_end() + block - 1) / block; }

  // Of a strip of the tile, the part of a block that is a strip too.
  FLASH_HOST_DEVICE Rectangle rectangle(int strip, int index, int part) const {
    const auto least = [](int a, int b) { return a < b ? a : b; };
    const int own = begin + kMaskStrip * strip, other = index * block + kMaskStrip * part;
    const int own_last = least(own + kMaskStrip, own_end()), other_last = least(other + kMaskStrip, other_end());
    return of_keys ? Rectangle{other, other_last, own, own_last} : Rectangle{own, own_last, other, other_last};
  }

  // The entry of a block: visited where a strip sees some of it, and is_whole where all strips see all of it. Strips
  // beyond the sequence make no block partial. Missing keys do, since they have to be masked; missing rows are never
  // stored. class_of(rectangle) is BlockClass::kHidden for empty ones; all lanes of a warp call it together.
  template <class ClassOf>
  FLASH_HOST_DEVICE BlockEntry entry(int index, const ClassOf& class_of, bool& visited, bool& is_whole) const {
    BlockEntry result = BlockEntry::of_block(index);
    visited = false;
    is_whole = true;
    for (int strip = 0; strip < tile / kMaskStrip; ++strip) {
      const bool beyond = begin + kMaskStrip * strip >= own_end();
      bool some = false, every = true;
      for (int part = 0; part < block / kMaskStrip; ++part) {
        const Rectangle at = rectangle(strip, index, part);
        const BlockClass found = class_of(at);
        some |= found != BlockClass::kHidden;
        every &= found == BlockClass::kWhole && at.key_end == at.key_begin + kMaskStrip;
      }
      const BlockClass value = beyond || every ? BlockClass::kWhole : some ? BlockClass::kPartial : BlockClass::kHidden;
      visited |= !beyond && some;
      is_whole &= value == BlockClass::kWhole;
      result.set(strip, beyond && of_keys ? BlockClass::kHidden : value);  // their dS may be stored
    }
    return result;
  }
};

}  // namespace flash
