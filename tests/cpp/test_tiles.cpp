// The tile table against the limits of the hardware and of the kernels.
#include "check.h"
#include "plan/bwd_tiles.h"

namespace {

using flash::Dtype;
using flash::plan::FwdTile;

constexpr int kSmallestSmemBytes = 99 * 1024;  // a thread block's limit on sm_86, sm_89 and sm_120
constexpr int kA100SmemBytes = 163 * 1024;

// is_everywhere: the variant runs on every GPU.
void check_tile(const FwdTile& tile, bool is_everywhere) {
  const int d = tile.head_dim;
  check::that(tile.block_n > 0 && tile.block_n % 16 == 0, "block_n is a multiple of the MMA depth", d, tile.block_n);
  check::that(tile.warps > 0 && tile.block_m * tile.col_warps % (16 * tile.warps) == 0, "each warp owns whole MMA rows",
              d, tile.block_m, tile.warps);
  check::that(tile.warps * 32 <= 1024, "threads", d, tile.warps);
  check::that(tile.blocks_per_sm >= 1, "blocks", d);
  check::that(flash::plan::fwd_smem_bytes(tile, Dtype::kBf16) <= (is_everywhere ? kSmallestSmemBytes : kA100SmemBytes),
              "shared memory", d, flash::plan::fwd_smem_bytes(tile, Dtype::kBf16));
  check::that(tile.blocks_per_sm * tile.warps * 32 * 255 <= 65536 * 2, "register file", d, tile.blocks_per_sm);
  check::that(d % 32 == 0 && d <= flash::plan::kMaxHeadDim, "head dim", d);
}

void check_backward_tile(const flash::plan::BwdTile& tile, bool is_small) {
  const int d = tile.head_dim;
  auto check_grid = [&](const char* what, int rows, int cols, int warps_m, int warps) {
    check::that(warps % warps_m == 0 && rows % (16 * warps_m) == 0 && cols % (16 * (warps / warps_m)) == 0, what, d,
                rows, cols, warps_m);
  };
  check_grid("S and dP split into whole warp tiles", tile.block_m, tile.block_n, tile.sdp_warps_m, tile.sdp_warps());
  check::that(tile.half_warps == 0 || 2 * tile.half_warps <= tile.warps, "warps of S and others of dP", d);
  check_grid("dK and dV split into whole warp tiles", tile.block_n, d, tile.dkv_warps_m, tile.warps);
  check_grid("dQ splits into whole warp tiles", tile.block_m, d, tile.dq_warps_m, tile.warps);
  const bool is_everywhere = is_small || d <= 128;
  check::that(
      flash::plan::bwd_smem_bytes(tile, 1, Dtype::kBf16) <= (is_everywhere ? kSmallestSmemBytes : kA100SmemBytes),
      "one stage fits", d, flash::plan::bwd_smem_bytes(tile, 1, Dtype::kBf16));
  check::that(flash::plan::bwd_smem_bytes(tile, 2, Dtype::kBf16) * tile.blocks_per_sm <= 227 * 1024,
              "two stages fit sm_90", d);
  check::that(128 % tile.block_m == 0, "softmax_d is padded to whole m_blocks", d, tile.block_m);
}

constexpr flash::plan::FwdVariant kVariants[] = {flash::plan::FwdVariant::kPlain, flash::plan::FwdVariant::kShort,
                                                 flash::plan::FwdVariant::kDropout};

void check_head_dim_choice(flash::plan::FwdVariant variant) {
  for (int head_dim = 1; head_dim <= flash::plan::kMaxHeadDim; ++head_dim) {
    const FwdTile chosen = flash::plan::fwd_tile(head_dim, variant);
    check::that(chosen.head_dim >= head_dim, "the tile holds the head dim", head_dim, chosen.head_dim);
    for (const FwdTile& other : flash::plan::kFwdTiles[static_cast<int>(variant)]) {
      check::that(other.head_dim < head_dim || other.head_dim >= chosen.head_dim, "no smaller tile would do", head_dim,
                  chosen.head_dim, other.head_dim);
    }
  }
}

}  // namespace

int main() {
  for (flash::plan::FwdVariant variant : kVariants) {
    int previous = 0;
    for (const FwdTile& tile : flash::plan::kFwdTiles[static_cast<int>(variant)]) {
      const bool has_short = flash::plan::mma_sync_has_short(tile.head_dim);
      check_tile(tile, variant != flash::plan::FwdVariant::kPlain || !has_short || tile.head_dim < 512);
      check::that(tile.head_dim > previous, "head dims grow", tile.head_dim, previous);
      previous = tile.head_dim;
    }
    check::that(previous == flash::plan::kMaxHeadDim, "the last tile is for the largest head dim", previous);
    check_head_dim_choice(variant);
  }
  for (const flash::plan::BwdTile& tile : flash::plan::kBwdTiles) check_backward_tile(tile, false);
  for (const flash::plan::BwdTile& tile : flash::plan::kSmallBwdTiles) {
    check_backward_tile(tile, true);
    const flash::plan::BwdTile other = flash::plan::bwd_tile(tile.head_dim);
    check::that(other.head_dim == tile.head_dim, "same head dim", tile.head_dim, other.head_dim);
    check::that(
        flash::plan::bwd_smem_bytes(tile, 1, Dtype::kBf16) < flash::plan::bwd_smem_bytes(other, 1, Dtype::kBf16),
        "a small tile", tile.head_dim);
  }
  for (int i = 0; i < flash::plan::kNumHeadDims; ++i) {
    check::that(flash::plan::kBwdTiles[i].head_dim == flash::plan::kFwdTiles[0][i].head_dim, "same head dims", i);
    for (const auto& tiles : flash::plan::kFwdTiles) {
      check::that(tiles[i].head_dim == flash::plan::kFwdTiles[0][i].head_dim, "same head dims", i);
    }
    check::that(flash::plan::kFwdTiles[1][i].block_m <= flash::plan::kFwdTiles[0][i].block_m, "short tiles are", i);
  }
  return check::report();
}
