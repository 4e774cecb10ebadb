// The order in which the wgmma forward hands out work tiles. Plain C++17.
#pragma once

#include <cstdint>

#include "core/block_range.h"
#include "core/bwd_schedule.h"
#include "core/fast_div.h"

namespace flash {
namespace plan {

// Heads of a band. It should hold several work tiles for each consumer group that runs at a time, so that short ones
// even out the long ones at its end; beyond that it should be small: few heads are then read by many consumer groups at
// a time, and their K and V stay in L2 (docs/tuning/fwd_sm90.md).
constexpr int kTilesPerConsumerGroup = 4;
constexpr int64_t kBandBytes = 16 << 20;

constexpr int band_heads(int64_t heads, int64_t tiles_of_head, int64_t head_bytes, int consumer_groups) {
  const int64_t evening = kTilesPerConsumerGroup * consumer_groups / (tiles_of_head > 0 ? tiles_of_head : 1);
  const int64_t cached = kBandBytes / (head_bytes > 0 ? head_bytes : 1);
  const int64_t shared = consumer_groups / kTilesPerConsumerGroup;
  const int64_t small = cached > shared ? cached : shared;
  int64_t band = evening < small ? evening : small;
  if (heads < band) band = heads;
  if (band < 1) return 1;
  // All bands of about that size: a third larger at most, or a little smaller.
  const int64_t fewer = heads / band, larger = (heads + fewer - 1) / fewer;
  return static_cast<int>(3 * larger <= 4 * band ? larger : (heads + fewer) / (fewer + 1));
}

// m_blocks of a dense head whose rows see less than half as many keys as other rows. With a left window bound, fewer
// than kFewTiles count as 0 unless kFetchNextTileLate: they do not balance many equal tiles (docs/tuning/fwd_sm90.md).
constexpr int kFewTiles = 4;

constexpr int64_t num_short_tiles(int seqlen_q, int seqlen_k, const Window& window, int block_m, bool fetches_late) {
  if (!window.may_mask_right()) return 0;
  const int64_t max_keys = window.max_keys(seqlen_k);
  // Rows before the first one that sees this key see fewer keys, while their window begins before the first.
  const int rows = Visibility{seqlen_q, seqlen_k, window}.row_begin(static_cast<int>(max_keys / 2));
  const int64_t blocks = rows / block_m;
  return window.may_mask_left() && !fetches_late && blocks < kFewTiles ? 0 : blocks;
}

// Most sequences of a packed batch whose work tiles are sorted by trip count: one for each lane of a warp.
constexpr int kSortedSequences = 32;

// How many of the last m_blocks of each head, which see the fewest keys, are handed out after all other tiles, so that
// the multiprocessors finish at about the same time.
constexpr int num_tail_tiles(int tiles_of_head, int short_tiles) {
  return short_tiles < tiles_of_head / 4 ? short_tiles : tiles_of_head / 4;
}

// Heads in bands; within a band the first m_block of all heads, then the second; and after all bands the tail tiles of
// each head, in the same way. Few heads left for the last band would leave multiprocessors idle: the first band has the
// odd number. The host makes the divisors, because a kernel's first work tile waits for them.
struct WorkTileOrder {
  int head_tiles = 1;  // m_blocks of each head that go by bands
  FastDiv heads, band, first_band;
  FastDiv band_tiles;  // work tiles of a whole band

  WorkTileOrder() = default;
  WorkTileOrder(int heads_, int tiles_of_head, int band_, int tail)
      : heads(heads_), band(band_), first_band(band_ - (band_ - heads_ % band_) % band_) {
    set_tiles_per_head(tiles_of_head, tail);
    band_tiles = FastDiv(head_tiles > 0 ? band.divisor * head_tiles : 1);
  }

  // With other m_block counts per head. Making a divisor on the device would take longer than dividing a few times.
  FLASH_HOST_DEVICE void set_tiles_per_head(int tiles_of_head, int tail) { head_tiles = tiles_of_head - tail; }

  FLASH_HOST_DEVICE int band_of(int index) const {
    const int blocks = band.divisor * head_tiles;
    return band_tiles.divisor == blocks ? band_tiles.divide(index) : index / blocks;
  }

  // Work tile number `index`: its head, of all sequences, and its m_block number within the head.
  FLASH_HOST_DEVICE HeadBlock at(int index) const {
    const int beyond = index - heads.divisor * head_tiles;
    if (beyond >= 0) {
      const int block = heads.divide(beyond);
      return {beyond - block * heads.divisor, head_tiles + block};
    }
    const int missing = band.divisor - first_band.divisor;  // heads that the first band lacks
    const int number = band_of(index + missing * head_tiles);
    const int first_head = number == 0 ? 0 : number * band.divisor - missing;
    const FastDiv together = number == 0 ? first_band : band;
    const int within = index - first_head * head_tiles;
    const int block = together.divide(within);
    return {first_head + within - block * together.divisor, block};
  }
};

// The work tiles of a thread block of kStatic: one of each wave, every second wave in reverse. Where WorkTileOrder puts
// long ones first, two waves are thus about as long for every thread block.
struct StaticTileOrder {
  int thread_blocks;
  int index;     // of the work tile
  int wave_end;  // index after the last work tile of its wave

  FLASH_HOST_DEVICE StaticTileOrder(int thread_block, int thread_blocks_)
      : thread_blocks(thread_blocks_), index(thread_block), wave_end(thread_blocks_) {}

  FLASH_HOST_DEVICE void advance() {
    index = 2 * wave_end - 1 - index;
    wave_end += thread_blocks;
  }
};

// The strip of 64 rows of a warpgroup of kDirect if thread blocks pair rows: group 0 has one from the first half of a
// head, group 1 one from the second, equally far from the middle. Under a causal mask all thread blocks then have the
// same number of keys, and the longer strip uses the tensor cores alone most of the time.
FLASH_HOST_DEVICE constexpr int paired_strip(int m_blocks, int m_block, int group) {
  return group == 0 ? m_blocks - 1 - m_block : m_blocks + m_block;
}

}  // namespace plan
}  // namespace flash
