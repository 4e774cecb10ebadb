// core/score_bias.h and core/bias_tiles.h against brute force: addresses of elements, and that every score of a call is
// added to its element of a bias's gradient exactly once.
#include <algorithm>
#include <cstdint>
#include <vector>

#include "check.h"
#include "core/bias_tiles.h"
#include "core/score_bias.h"

namespace {

using flash::BiasTiles;
using flash::ScoreBias;

int ceil_divide(int a, int b) { return (a + b - 1) / b; }

// The sums of a dense call as the kernel and the passes after it make them, of a 1 for each score.
struct Call {
  int batch, heads, seqlen_q, seqlen_k;

  BiasTiles tiles() const {
    BiasTiles tiles;
    tiles.all_batches = batch;
    tiles.all_heads = heads;
    tiles.m_blocks = ceil_divide(seqlen_q, BiasTiles::kBlockM);
    return tiles;
  }
};

// Scores of rows [row_begin, ...) and keys [key_begin, ...) that exist: visit(row, col) within the tile.
template <class Visit>
void for_each_score(const Call& call, int64_t row_begin, int64_t key_begin, const Visit& visit) {
  for (int row = 0; row < BiasTiles::kBlockM; ++row) {
    for (int col = 0; col < BiasTiles::kBlockN; ++col) {
      const int64_t key = key_begin + col;
      if (row_begin + row < call.seqlen_q && key >= 0 && key < call.seqlen_k) visit(row, col);
    }
  }
}

void check_attn_bias(const Call& call, bool by_batch, bool by_head, bool by_row, bool by_col, int chunks) {
  BiasTiles tiles = call.tiles();
  tiles.batches = by_batch ? call.batch : 1;
  tiles.heads = by_head ? call.heads : 1;
  tiles.rows = by_row ? call.seqlen_q : 1;
  tiles.cols = by_col ? call.seqlen_k : 1;
  tiles.sums_rows = !by_row;
  tiles.sums_cols = !by_col;
  tiles.n_blocks = ceil_divide(call.seqlen_k, BiasTiles::kBlockN);
  tiles.chunks = std::min<int64_t>(chunks, tiles.items());
  std::vector<int> sums(tiles.results());
  std::vector<int> visits(static_cast<size_t>(call.batch) * call.heads * call.seqlen_q * call.seqlen_k);
  for (int64_t index = 0; index < tiles.owners(); ++index) {
    const BiasTiles::Owner owner = tiles.owner(index);
    for (int64_t chunk = 0; chunk < tiles.chunks; ++chunk) {
      for (int64_t item = tiles.first_item(chunk); item < tiles.first_item(chunk + 1); ++item) {
        const BiasTiles::Owner at = tiles.item(owner, item);
        const int64_t row_begin = at.m_block * BiasTiles::kBlockM, key_begin = at.n_block * BiasTiles::kBlockN;
        for_each_score(call, row_begin, key_begin, [&](int row, int col) {
          const int64_t matrix = owner.batch * tiles.heads + owner.head;
          const int64_t out_row = tiles.sums_rows ? 0 : owner.m_block * BiasTiles::kBlockM + row;
          const int64_t out_col = tiles.sums_cols ? 0 : owner.n_block * BiasTiles::kBlockN + col;
          ++sums[(matrix * tiles.rows + out_row) * tiles.cols + out_col];
          const int64_t score = ((at.batch * call.heads + at.head) * call.seqlen_q + row_begin + row) * call.seqlen_k;
          ++visits[score + key_begin + col];
          check::that(!by_batch || at.batch == owner.batch, "batch entry");
          check::that(!by_head || at.head == owner.head, "head");
        });
      }
    }
  }
  const int scores = static_cast<int>(visits.size() / sums.size());
  check::that(std::all_of(visits.begin(), visits.end(), [](int n) { return n == 1; }), "each score once");
  check::that(std::all_of(sums.begin(), sums.end(), [&](int n) { return n == scores; }), "sums", call.seqlen_q,
              call.seqlen_k);
}

void check_rel_bias(const Call& call, int reach, int chunks) {
  BiasTiles tiles = call.tiles();
  tiles.of_table = true;
  tiles.heads = call.heads;
  tiles.reach = reach;
  tiles.set_near(call.seqlen_q, call.seqlen_k, false);
  tiles.chunks = std::min<int64_t>(chunks, tiles.items());
  ScoreBias bias;
  bias.reach = reach;
  std::vector<int> sums(tiles.results()), expected(tiles.results());
  for (int64_t index = 0; index < tiles.owners(); ++index) {
    const BiasTiles::Owner owner = tiles.owner(index);
    for (int64_t chunk = 0; chunk < tiles.chunks; ++chunk) {
      for (int64_t item = tiles.first_item(chunk); item < tiles.first_item(chunk + 1); ++item) {
        const BiasTiles::Owner at = tiles.item(owner, item);
        const int64_t row_begin = at.m_block * BiasTiles::kBlockM;
        const int64_t diagonal = row_begin + call.seqlen_k - call.seqlen_q;
        const BiasTiles::Keys keys = tiles.keys_of_class(owner.n_block, diagonal, call.seqlen_k);
        for (int key_begin = keys.begin; key_begin < keys.end; key_begin += BiasTiles::kBlockN) {
          for_each_score(call, row_begin, key_begin, [&](int row, int col) {
            const int64_t distance = key_begin + col - diagonal - row;
            if (owner.n_block < tiles.near_count) {
              check::that(tiles.distance(owner.n_block, col - row + BiasTiles::kBlockM - 1) == distance, "distance");
            } else {
              check::that(owner.n_block == tiles.near_count ? distance <= -reach : distance >= reach, "a far distance");
            }
            ++sums[owner.head * bias.table_cols() + bias.table_col(static_cast<int>(distance))];
          });
        }
      }
    }
  }
  for (int head = 0; head < call.heads; ++head) {
    for (int row = 0; row < call.seqlen_q; ++row) {
      for (int key = 0; key < call.seqlen_k; ++key) {
        const int distance = key - row - call.seqlen_k + call.seqlen_q;
        expected[head * bias.table_cols() + bias.table_col(distance)] += call.batch;
      }
    }
  }
  check::that(sums == expected, "sums by distance", call.seqlen_q, call.seqlen_k, reach);
}

void check_addresses() {
  const int64_t elements = int64_t{1} << 34;
  ScoreBias bias;
  bias.data = reinterpret_cast<const void*>(uintptr_t{1} << 40);
  bias.batch_stride = elements;
  bias.head_stride = elements / 4;
  bias.row_stride = 70001;
  bias.col_stride = 1;
  bias.cols = 70000;
  const auto address = [](const ScoreBias& of) { return reinterpret_cast<uintptr_t>(of.data) - (uintptr_t{1} << 40); };
  check::that(address(bias.of(3, 2, 5)) == 2 * (3 * elements + elements / 2 + 5 * 70001), "address");
  bias.is_float = true;
  check::that(address(bias.of(3, 2, 5)) == 4 * (3 * elements + elements / 2 + 5 * 70001), "address");
  check::that(bias.offset(1 << 29, 69999) == (int64_t{1} << 29) * 70001 + 69999, "address");
  check::that(bias.last_col(80000) == 69999 && bias.last_col(10) == 9, "address");
  bias.reach = 3;
  check::that(bias.table_col(-1000) == 0 && bias.table_col(-3) == 0 && bias.table_col(0) == 3 && bias.table_col(9) == 6,
              "address");
  check::that(
      flash::floor_divide(-1, 64) == -1 && flash::floor_divide(-64, 64) == -1 && flash::floor_divide(63, 64) == 0,
      "address");
}

}  // namespace

int main() {
  check_addresses();
  const Call calls[] = {{1, 1, 1, 1}, {2, 3, 130, 70}, {3, 2, 40, 200}, {1, 2, 300, 65}};
  for (const Call& call : calls) {
    for (const int chunks : {1, 3, 50}) {
      for (int axes = 0; axes < 16; ++axes) {
        check_attn_bias(call, axes & 1, axes & 2, axes & 4, axes & 8, chunks);
      }
      for (const int reach : {0, 1, 5, 63, 64, 127, 128, 1000}) check_rel_bias(call, reach, chunks);
    }
  }
  return check::report();
}
