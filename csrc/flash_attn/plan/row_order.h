// The order in which the wgmma forward hands out row blocks, as plain arithmetic. Plain C++17.
#pragma once

#include <cstdint>

#include "core/block_range.h"
#include "core/bwd_schedule.h"
#include "core/fast_div.h"

namespace flash {
namespace plan {

// Heads that are worked on together. A section should hold several row blocks for each of the teams that run at a time,
// so that short ones even out the long ones at its end; beyond that it should be small: few heads are read by many
// teams at the same time, and their keys and values stay in the L2 cache (docs/tuning/fwd_sm90.md).
constexpr int kTilesPerTeam = 4;
constexpr int64_t kSectionBytes = 16 << 20;

constexpr int section_heads(int64_t heads, int64_t tiles_of_head, int64_t head_bytes, int teams) {
  const int64_t evening = kTilesPerTeam * teams / (tiles_of_head > 0 ? tiles_of_head : 1);
  const int64_t cached = kSectionBytes / (head_bytes > 0 ? head_bytes : 1);
  const int64_t shared = teams / kTilesPerTeam;
  const int64_t small = cached > shared ? cached : shared;
  int64_t section = evening < small ? evening : small;
  if (heads < section) section = heads;
  if (section < 1) return 1;
  // All of about that size: a third larger at most, or a little smaller.
  const int64_t fewer = heads / section, larger = (heads + fewer - 1) / fewer;
  return static_cast<int>(3 * larger <= 4 * section ? larger : (heads + fewer) / (fewer + 1));
}

// Row blocks of a dense head whose rows see less than half as many keys as others. Few of them behind a window are none
// where row blocks are not drawn late: beside so many equal row blocks they even out nothing (docs/tuning/fwd_sm90.md).
constexpr int kFewRowBlocks = 4;

constexpr int64_t short_row_blocks(int seqlen_q, int seqlen_k, const Window& window, int block_m, bool draws_late) {
  if (window.right == kUnbounded) return 0;
  const int64_t shown = int64_t{window.right} + (window.left != kUnbounded ? int64_t{window.left} + 1 : seqlen_k);
  const int64_t most = shown < seqlen_k ? shown : seqlen_k;
  // Row i sees i + seqlen_k - seqlen_q + right + 1 keys, as long as its window begins before the first.
  int64_t rows = most / 2 - Visibility{seqlen_q, seqlen_k, window}.diagonal(0) - window.right;
  if (rows > seqlen_q) rows = seqlen_q;
  const int64_t blocks = rows > 0 ? rows / block_m : 0;
  return window.left != kUnbounded && !draws_late && blocks < kFewRowBlocks ? 0 : blocks;
}

// How many of the last row blocks of each head, which see the fewest keys, are handed out behind those of all heads, so
// that the multiprocessors are done at about the same time.
constexpr int late_row_blocks(int tiles_of_head, int short_ones) {
  return short_ones < tiles_of_head / 4 ? short_ones : tiles_of_head / 4;
}

// Heads in sections; within a section the first row block of all heads, then the second; and behind all sections the
// `late` last ones of each head, in the same way. Few heads left for the last section would leave multiprocessors idle:
// the first section has the odd number. A kernel's first row block waits for this: the host makes the divisors.
struct RowOrder {
  int early = 1;  // row blocks of each head that go by sections
  FastDiv heads, section, first_section;
  FastDiv section_blocks;  // row blocks of a whole section

  RowOrder() = default;
  RowOrder(int heads_, int tiles_of_head, int section_, int late)
      : heads(heads_), section(section_), first_section(section_ - (section_ - heads_ % section_) % section_) {
    set_blocks(tiles_of_head, late);
    section_blocks = FastDiv(early > 0 ? section.divisor * early : 1);
  }

  // Of other numbers of row blocks of each head. Making a divisor of them would take longer than dividing a few times.
  FLASH_HOST_DEVICE void set_blocks(int tiles_of_head, int late) { early = tiles_of_head - late; }

  FLASH_HOST_DEVICE int section_of(int place) const {
    const int blocks = section.divisor * early;
    return section_blocks.divisor == blocks ? section_blocks.divide(place) : place / blocks;
  }

  // The row block at place `index`: its head, of all sequences, and its place among those of the head.
  FLASH_HOST_DEVICE HeadBlock at(int index) const {
    const int beyond = index - heads.divisor * early;
    if (beyond >= 0) {
      const int block = heads.divide(beyond);
      return {beyond - block * heads.divisor, early + block};
    }
    const int missing = section.divisor - first_section.divisor;  // of the first section
    const int number = section_of(index + missing * early);
    const int first_head = number == 0 ? 0 : number * section.divisor - missing;
    const FastDiv together = number == 0 ? first_section : section;
    const int within = index - first_head * early;
    const int block = together.divide(within);
    return {first_head + within - block * together.divisor, block};
  }
};

}  // namespace plan
}  // namespace flash
