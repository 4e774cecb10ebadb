// A dense batch and the same sequences packed take the same kernels, cut keys at the same places and walk them alike;
// batch-invariant calls do whatever else is in the batch.
#include <string>

#include "check.h"
#include "plan/decode_plan.h"
#include "plan/family.h"

namespace {

using flash::kUnbounded;
using flash::KvBlockOrder;
using flash::Window;
using flash::plan::DecodePlan;
using flash::plan::Device;
using flash::plan::FamilyChoice;
using flash::plan::FamilyQuery;
using flash::plan::FwdShape;
using flash::plan::FwdVariant;

constexpr int kMultiprocessors[] = {58, 108, 132};
constexpr int kHeadDims[] = {8, 32, 64, 96, 128, 192, 256};
constexpr Window kWindows[] = {{}, {kUnbounded, 0}, {300, 0}, {64, 64}};

FwdShape packed_shape(const FwdShape& dense) {
  FwdShape shape = dense;
  shape.is_varlen = true;
  shape.seqlen_q *= dense.batch;
  shape.seqlen_k *= dense.batch;
  return shape;
}

FamilyChoice chosen(const FwdShape& shape, int capability, bool may_use_decode, const char* forced = nullptr) {
  return flash::plan::choose_family(flash::plan::family_query(shape, capability, may_use_decode, true), forced);
}

bool same(const FamilyChoice& a, const FamilyChoice& b) {
  return a.family == b.family && a.num_splits == b.num_splits && a.is_one_wave == b.is_one_wave;
}

bool takes_short(const FwdShape& shape, bool sm90) {
  using flash::plan::fwd_tile, flash::plan::sm90_fwd_tile;
  const int head_dim = shape.head_dim;
  if (!sm90) return flash::plan::takes_short_tile(shape, fwd_tile(head_dim, FwdVariant::kPlain).block_m);
  const int wide = flash::plan::wgmma_head_dim(head_dim);
  return flash::plan::sm90_takes_short_tile(shape, sm90_fwd_tile(wide, FwdVariant::kPlain),
                                            sm90_fwd_tile(wide, FwdVariant::kShort));
}

// What decides where the kernels of the KV cache cut a tile and in which order its parts are added up. `work`: of the
// line, at most that of full sequences.
void check_split(const FwdShape& dense, const Device& device) {
  const auto plan_of = [&device](const FwdShape& shape) {
    const int keys = static_cast<int>(shape.seqlen_k);
    return flash::plan::plan_decode({static_cast<int>(shape.batch), static_cast<int>(shape.seqlen_q),
                                     static_cast<int>(shape.heads), static_cast<int>(shape.heads_k), shape.head_dim,
                                     keys, 0, false, shape.is_varlen, static_cast<int>(shape.keys())},
                                    device);
  };
  const DecodePlan a = plan_of(dense), b = plan_of(packed_shape(dense));
  check::that(a.tile_size == b.tile_size && a.row_tiles == b.row_tiles, "tile", dense.batch, dense.seqlen_q);
  check::that(a.split_points.rule == b.split_points.rule && a.split_points.value == b.split_points.value, "cuts",
              dense.batch, dense.seqlen_q);
  check::that(a.combines_one_row == b.combines_one_row, "merge", dense.batch, dense.seqlen_q, dense.seqlen_k);
  const int block_n = flash::plan::kv_block_n(flash::plan::kv_tile(dense.head_dim, a.tile_size));
  const int64_t tiles = dense.batch * dense.heads_k * a.row_tiles;
  const int64_t full = tiles * flash::plan::kv_most_blocks(static_cast<int>(dense.seqlen_k), block_n);
  for (int64_t work = tiles; work <= full; work += full / 7 + 1) {
    check::that(flash::blocks_per_cta(work, a.thread_blocks, a.min_blocks_per_cta) ==
                    flash::blocks_per_cta(work, b.thread_blocks, b.min_blocks_per_cta),
                "share", dense.batch, dense.seqlen_q, dense.seqlen_k, work);
  }
}

void check_shape(const FwdShape& dense) {
  const FwdShape packed = packed_shape(dense);
  for (int capability : {80, 90}) {
    for (bool may_use_decode : {false, true}) {
      for (const char* forced : {static_cast<const char*>(nullptr), "wgmma", "wgmma:1", "wgmma:3", "mma_sync"}) {
        check::that(
            same(chosen(dense, capability, may_use_decode, forced), chosen(packed, capability, may_use_decode, forced)),
            "family", capability, dense.head_dim, dense.batch, dense.seqlen_q, dense.seqlen_k, dense.heads);
      }
    }
    check::that(takes_short(dense, capability == 90) == takes_short(packed, capability == 90), "tile", capability,
                dense.head_dim, dense.batch, dense.seqlen_q, dense.heads);
  }
  if (dense.window.left == kUnbounded && dense.head_dim >= 32) {
    check_split(dense, {90, dense.multiprocessors, 233472, 232448});
  }
}

// Nothing but the head dim: not the sizes, not the mask, not whether keys could be split.
void check_invariant(FwdShape shape) {
  shape.batch_invariant = true;
  for (int capability : {80, 90}) {
    for (bool may_use_decode : {false, true}) {
      for (const char* forced : {static_cast<const char*>(nullptr), "split_kv", "wgmma", "wgmma:1", "wgmma:8"}) {
        const FamilyChoice choice = chosen(shape, capability, may_use_decode, forced);
        const auto expected = capability == 90 ? flash::plan::Family::kWgmma : flash::plan::Family::kMmaSync;
        check::that(choice.family == expected && choice.num_splits == 1 && !choice.is_one_wave, "invariant", capability,
                    shape.head_dim, shape.batch, shape.seqlen_q, shape.seqlen_k);
      }
    }
    check::that(!takes_short(shape, capability == 90), "invariant tile", capability, shape.head_dim, shape.seqlen_q);
  }
  flash::plan::BwdShape backward{false,          true,           shape.batch,    shape.heads,           shape.heads,
                                 shape.seqlen_q, shape.seqlen_k, shape.head_dim, shape.multiprocessors, true};
  check::that(!flash::plan::prefers_dq_in_smem(backward), "invariant dQ", shape.head_dim, shape.seqlen_q);
}

void check_shapes() {
  for (int multiprocessors : kMultiprocessors) {
    for (int head_dim : kHeadDims) {
      for (int64_t batch : {1, 2, 5, 16, 129}) {
        for (int64_t rows : {1, 2, 17, 64, 128, 129, 500, 1024, 2048, 5000}) {
          for (int64_t keys : {1, 129, 500, 2048, 16384}) {
            for (int64_t heads : {1, 4, 16, 32}) {
              for (int64_t heads_k : {int64_t{1}, heads}) {
                for (const Window& window : kWindows) {
                  const FwdShape dense{false, batch, heads, heads_k, head_dim, rows, keys, window, multiprocessors};
                  check_shape(dense);
                  check_invariant(dense);
                }
              }
            }
          }
        }
      }
    }
  }
}

// The walk behind a window is that of the window: keys of other sequences beside those of one, or room for more of
// them, change no step of it.
void check_walk() {
  for (int block_m : {64, 128, 192}) {
    for (int block_n : {64, 80, 128}) {
      for (int left : {0, 63, 200, 1000, 4096}) {
        for (int right : {0, 100}) {
          const Window window{left, right};
          const flash::FastDiv apart(flash::max_unmasked_blocks(window, 0x3fffffff, block_m, block_n));
          for (int seqlen_q : {1, 100, 700, 3000}) {
            for (int seqlen_k : {1, 130, 700, 2999, 6000}) {
              const flash::FastDiv own(flash::max_unmasked_blocks(window, seqlen_k, block_m, block_n));
              for (int row = 0; row < seqlen_q; row += block_m) {
                const int row_end = row + block_m < seqlen_q ? row + block_m : seqlen_q;
                KvBlockOrder walk{flash::block_range({seqlen_q, seqlen_k, window}, row, row_end, block_n)},
                    other = walk;
                walk.align_unmasked(apart);
                other.align_unmasked(own);
                check::that(walk.shift == other.shift, "walk", block_m, block_n, left, right, seqlen_q, seqlen_k, row);
              }
            }
          }
        }
      }
    }
  }
}

// Packed sequences of other lengths are so many of their mean length.
void check_means() {
  const FwdShape packed{true, 3, 4, 2, 64, 301, 901, {}, 132};
  check::that(packed.rows() == 101 && packed.keys() == 300 && packed.blocks(128) == 12 && packed.all_rows() == 1204,
              "means", packed.rows(), packed.keys());
  FwdShape paged = packed;
  paged.page_rows = 6000;
  check::that(paged.keys() == 2000, "keys in pages", paged.keys());
  paged.is_varlen = false;
  check::that(paged.keys() == 901, "no more keys than a table lists", paged.keys());
  const FwdShape none{true, 0, 4, 2, 64, 301, 0, {}, 132};
  check::that(none.rows() == 301 && none.keys() == 0 && none.blocks(128) == 0, "no sequences", none.rows());
}

}  // namespace

int main() {
  check_shapes();
  check_walk();
  check_means();
  return check::report();
}
