// Views of the emulator's accumulators.
#pragma once

namespace flash {
namespace sm80 {

template <int kRowTiles, int kColTiles>
struct TileView {
  static constexpr int kRows = 2 * kRowTiles, kCols = 2 * kColTiles;
  float (*tiles)[kColTiles][4];
  float& operator()(int mi, int ni) const { return tiles[mi / 2][ni / 2][mi % 2 * 2 + ni % 2]; }
};

template <int kRowTiles, int kColTiles>
TileView<kRowTiles, kColTiles> tile_view(float (&tiles)[kRowTiles][kColTiles][4]) {
  return {tiles};
}

}  // namespace sm80
}  // namespace flash
