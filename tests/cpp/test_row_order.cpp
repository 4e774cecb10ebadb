// The order of work tiles of the wgmma forward: each once, full bands of heads but for the first one.
#include <algorithm>
#include <vector>

#include "check.h"
#include "plan/grid.h"
#include "plan/tiles.h"
#include "plan/work_tile_order.h"

namespace {

using flash::plan::band_heads;
using flash::plan::paired_strip;
using flash::plan::StaticTileOrder;
using flash::plan::WorkTileOrder;

void check_order(int heads, int tiles_of_head, int band, int tail) {
  const int tiles = heads * tiles_of_head, first_tail_row = tiles_of_head - tail;
  std::vector<int> seen(tiles, 0), bands(heads, 0);
  const WorkTileOrder order(heads, tiles_of_head, band, tail);
  int last_head = -1;  // number of the current band
  for (int index = 0; index < tiles; ++index) {
    const auto [head, row] = order.at(index);
    const bool exists = head >= 0 && head < heads && row >= 0 && row < tiles_of_head;
    check::that(exists, "the m_block exists", heads, tiles_of_head, band, index, head, row);
    if (!exists) return;
    ++seen[head * tiles_of_head + row];
    const bool is_tail = index >= heads * first_tail_row;
    check::that(is_tail == (row >= first_tail_row), "tail tiles after all others", heads, tiles_of_head, band, tail);
    if (is_tail) {
      const int offset = index - heads * first_tail_row;
      check::that(row == first_tail_row + offset / heads, "of all heads together", heads, tiles_of_head, band, tail);
      continue;
    }
    if (band == 1) continue;
    const int odd = heads % band, number = (head + (band - odd) % band) / band;
    check::that(number >= last_head, "band after band", heads, tiles_of_head, band, index);
    if (number > last_head) std::fill(bands.begin(), bands.end(), 0);
    last_head = number;
    check::that(bands[head]++ == row, "m_blocks of a head in their order", heads, tiles_of_head, band, index);
    for (int other = std::max(number * band - (band - odd) % band, 0);
         other < (number + 1) * band - (band - odd) % band; ++other) {
      check::that(bands[other] >= row, "all heads of a band advance together", heads, tiles_of_head, band);
    }
  }
  check::that(std::all_of(seen.begin(), seen.end(), [](int count) { return count == 1; }), "each m_block once", heads,
              tiles_of_head, band);
}

// set_tiles_per_head() on the device against the same order built on the host.
void check_resized() {
  WorkTileOrder resized(12, 100, 5, 0);
  resized.set_tiles_per_head(7, 2);
  const WorkTileOrder expected(12, 7, 5, 2);
  for (int index = 0; index < 12 * 7; ++index) {
    const auto [head, row] = resized.at(index);
    check::that(head == expected.at(index).head && row == expected.at(index).block, "resized order", index);
  }
}

// The thread blocks of kStatic: each work tile once, one of each wave; where tiles get shorter in equal steps, two
// whole waves are equally long for all.
void check_static_order(int tiles, int thread_blocks) {
  std::vector<int> seen(tiles, 0), sums;
  for (int block = 0; block < thread_blocks; ++block) {
    int wave = 0, sum = 0;
    for (StaticTileOrder at(block, thread_blocks); at.index < tiles; at.advance(), ++wave) {
      check::that(at.index / thread_blocks == wave && wave < 5, "a tile of each wave", tiles, thread_blocks, at.index);
      ++seen[at.index];
      sum += tiles - at.index;
    }
    sums.push_back(sum);
  }
  check::that(std::all_of(seen.begin(), seen.end(), [](int count) { return count == 1; }), "each work tile once", tiles,
              thread_blocks);
  const auto [least, most] = std::minmax_element(sums.begin(), sums.end());
  check::that(tiles % (2 * thread_blocks) != 0 || *least == *most, "equal sums", tiles, thread_blocks, *least, *most);
}

// The strips of kDirect: each once, the second one of a thread block never before the first; where strips see keys up
// to their diagonals, all thread blocks see as many.
void check_pairs() {
  for (int m_blocks = 1; m_blocks <= 40; ++m_blocks) {
    std::vector<int> seen(2 * m_blocks, 0);
    for (int m_block = 0; m_block < m_blocks; ++m_block) {
      const int first = paired_strip(m_blocks, m_block, 0), last = paired_strip(m_blocks, m_block, 1);
      check::that(first >= 0 && first < last && last < 2 * m_blocks, "strips of the head", m_blocks, m_block);
      check::that(first + last == 2 * m_blocks - 1, "as many keys", m_blocks, m_block);
      ++seen[first], ++seen[last];
    }
    check::that(std::all_of(seen.begin(), seen.end(), [](int count) { return count == 1; }), "each once", m_blocks);
  }
}

// Of the benchmark's cells (16384 tokens, 2048 columns) on 132 multiprocessors, causal.
void check_bands() {
  const auto band = [](int head_dim, int seqlen, int block_m, int consumer_groups) {
    const int64_t heads = 16384 / seqlen * (2048 / head_dim);
    return band_heads(heads, (seqlen + block_m - 1) / block_m, int64_t{4} * seqlen * head_dim, consumer_groups);
  };
  check::that(band(128, 512, 128, 132) == 64 && band(128, 1024, 128, 132) == 37, "short", band(128, 512, 128, 132),
              band(128, 1024, 128, 132));
  check::that(band(128, 4096, 128, 132) == 16 && band(128, 16384, 128, 132) == 4, "long");
  check::that(band(64, 512, 128, 264) == 128 && band(64, 4096, 128, 264) == 43, "two teams");
  check::that(band(256, 512, 128, 132) == 37 && band(256, 8192, 128, 132) == 8, "head dim 256");
  check::that(band_heads(5, 4, 1, 132) == 5 && band_heads(9, 100000, 1, 132) == 1, "at most all, at least one");
  check::that(band_heads(0, 0, 0, 132) == 1, "nothing to do");
  check::that(band(128, 8192, 192, 132) == 16 && band(256, 2048, 128, 132) == 32, "of equal size");
  for (int heads = 1; heads <= 300; ++heads) {
    for (int tiles_of_head : {1, 3, 8, 16, 43, 200}) {
      const int size = band_heads(heads, tiles_of_head, 1 << 20, 132), bands = (heads + size - 1) / size;
      check::that(size >= 1 && size <= heads && size * bands - heads < bands, "of equal size", heads, size);
    }
  }
}

// Tail tiles: a quarter of the m_blocks under a causal mask, none where all see about as many keys.
void check_tail() {
  using flash::kUnbounded;
  using flash::plan::num_short_tiles;
  using flash::plan::num_tail_tiles;
  const auto tail = [](int seqlen_q, int seqlen_k, int left, int right, int block_m, bool fetches_late = true) {
    const int tiles = (seqlen_q + block_m - 1) / block_m;
    const int64_t short_tiles = num_short_tiles(seqlen_q, seqlen_k, {left, right}, block_m, fetches_late);
    return num_tail_tiles(tiles, static_cast<int>(short_tiles));
  };
  check::that(tail(8192, 8192, kUnbounded, 0, 192) == 10 && tail(512, 512, kUnbounded, 0, 128) == 1, "causal");
  check::that(tail(8192, 8192, kUnbounded, kUnbounded, 192) == 0 && tail(8192, 8192, 1024, kUnbounded, 192) == 0,
              "no mask on the right");
  check::that(tail(512, 8192, kUnbounded, 0, 128) == 0, "a chunk of a long sequence");
  check::that(tail(8192, 512, kUnbounded, 0, 128) == 16, "rows that see no key", tail(8192, 512, kUnbounded, 0, 128));
  check::that(tail(8192, 8192, 1024, 0, 192) == 2 && tail(8192, 8192, 4096, 0, 192) == 10, "windows");
  check::that(tail(8192, 8192, 1024, 0, 192, false) == 0 && tail(8192, 8192, 4096, 0, 192, false) == 10 &&
                  tail(512, 512, kUnbounded, 0, 128, false) == 1,
              "windows, and a causal mask, whose row blocks are drawn first_tail_row");
  check::that(tail(8192, 8192, kUnbounded, 8192, 192) == 0, "a mask that hides nothing");
  const int most = 0x3fffffff;
  check::that(num_short_tiles(most, most, {most, most}, 64, true) == 0, "the greatest numbers");
  check::that(num_short_tiles(most, 1, {kUnbounded, 0}, 64, false) == most / 64, "all rows");
}

void check_page_boxes() {
  using flash::plan::page_box_rows;
  for (int block_n : {64, 96, 128}) {
    for (int page_size = 1; page_size <= 1100; ++page_size) {
      int expected = 0;
      for (int rows = 8; rows <= block_n; rows += 8) {
        if (page_size % rows == 0 && block_n % rows == 0) expected = rows;
      }
      check::that(page_box_rows(page_size, block_n) == expected, "rows of a page's boxes", page_size, block_n);
    }
  }
}

}  // namespace

int main() {
  check_page_boxes();
  for (int heads : {1, 2, 3, 7, 16, 33, 40}) {
    for (int tiles_of_head : {1, 2, 5, 16}) {
      for (int band = 1; band <= heads; ++band) {
        for (int tail = 0; tail <= tiles_of_head; tail += 1 + tail / 3) {
          check_order(heads, tiles_of_head, band, tail);
        }
      }
    }
  }
  check_order(1 << 10, 1 << 10, 33, 100);
  for (int thread_blocks : {1, 2, 7, 78, 132}) {
    for (int tiles = 1; tiles <= 4 * thread_blocks; ++tiles) check_static_order(tiles, thread_blocks);
  }
  // The greatest numbers: no overflow.
  const int heads = 1 << 15, tiles_of_head = 1 << 15;
  for (int tail : {0, 1, tiles_of_head}) {
    const auto [head, row] = WorkTileOrder(heads, tiles_of_head, heads - 1, tail).at(heads * tiles_of_head - 1);
    check::that(head == heads - 1 && row == tiles_of_head - 1, "the last one", tail, head, row);
  }
  check_resized();
  check_pairs();
  check_bands();
  check_tail();
  return check::report();
}
