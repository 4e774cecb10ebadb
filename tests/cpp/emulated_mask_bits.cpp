// Runs what the decode kernels do with mask bits thread by thread on the CPU (emulated_cuda.h): which scores of a warp
// are hidden, the keys that some row sees, and the values of the others, against each bit alone.
#include "emulated_cuda.h"

#include <random>

#include "check.h"

#define __forceinline__ inline
struct float4 {
  float x, y, z, w;
};
bool __all_sync(uint32_t, bool);  // of functions that nothing here calls
inline float __fdividef(float a, float b) { return a / b; }
inline uint32_t __reduce_or_sync(uint32_t mask, uint32_t value) {
  uint32_t all = 0;
  for (int lane = 0; lane < 32; ++lane) all |= __shfl_sync(mask, value, lane);
  return all;
}

#include "kernels/decode/mask_bits.h"

namespace {

using flash::FastDiv;
using flash::Flash_kvcache_params;

constexpr int kStep = 32, kWarpRows = 32;
std::mt19937 generator(11);

struct Scores {
  static constexpr int kRows = kWarpRows / 8, kCols = kStep / 4;  // of a thread
  float values[kRows][kCols];
  float& operator()(int mi, int ni) { return values[mi][ni]; }
};

// heads: of a head tile; first: the mask's key of the step's first one; hidden: keys that other masks hide.
void check_warp(int tokens, int heads, int mask_heads, int head_tile, int row0, int first, uint32_t hidden) {
  constexpr int kBatch = 3, kRequest = 1, kKeys = 70, kHeadTiles = 2;
  Flash_kvcache_params params;
  params.h = kHeadTiles * heads;
  params.tile_query_heads = heads;
  params.tile_group = FastDiv(heads);
  flash::MaskBits& mask = params.mask_bits;
  mask.rows = tokens;
  mask.keys = kKeys;
  mask.row_words = (kKeys + 31) / 32;
  mask.matrices.heads = mask_heads;
  mask.matrices.per_batch = true;
  mask.matrices.group = FastDiv(params.h / mask_heads);
  std::vector<uint32_t> words(static_cast<size_t>(kBatch) * mask_heads * tokens * mask.row_words);
  for (uint32_t& word : words) word = generator() & generator() & generator();
  mask.words = words.data();
  const auto sees = [&](int row, int key) {  // packed row
    const int token = min(row / heads, tokens - 1), head = min(head_tile * heads + row % heads, params.h - 1);
    return (mask.word(kRequest, head, token, first) >> key & 1u) != 0 && (hidden >> key & 1u) == 0;
  };
  uint32_t expected = 0;
  for (int row = 0; row < kWarpRows; ++row) {
    for (int key = 0; key < kStep; ++key) expected |= static_cast<uint32_t>(sees(row0 + row, key)) << key;
  }
  alignas(16) static bf16 values[kStep * 16];  // (key, column): the key's number and one more
  for (int i = 0; i < kStep * 16; ++i) values[i].bits = to_bf16(static_cast<float>(i / 16 + 1));

  emulation::run_block(32, [&] {
    const flash::decode::PackedCoords coords{params.tile_group, row0, 0};
    const int lane = threadIdx.x;
    Scores scores;
    for (int mi = 0; mi < Scores::kRows; ++mi) {
      for (int ni = 0; ni < Scores::kCols; ++ni) {
        const bool is_hidden = hidden >> coords.col(ni) & 1u;
        scores(mi, ni) = is_hidden ? -INFINITY : mi == 0 ? NAN : 1.0f;  // of K that is NaN
      }
    }
    const uint32_t seen = flash::decode::apply_mask_bits(scores, params, coords, kRequest, head_tile, first);
    check::that(seen == expected, "seen keys", first, lane);
    for (int mi = 0; mi < Scores::kRows; ++mi) {
      for (int ni = 0; ni < Scores::kCols; ++ni) {
        const bool is_seen = scores(mi, ni) != -INFINITY;
        check::that(is_seen == sees(coords.packed(mi), coords.col(ni)), "score", first, lane, mi, ni);
      }
    }
    for (int slice = 0; slice < kStep / 16; ++slice) {
      uint32_t b[4];
      load_matrices_transposed(b, values + (slice * 16 + lane % 16) * 16 + lane / 16 * 8);
      for (int i = 0; i < 4; ++i) {
        const int key = slice * 16 + i % 2 * 8 + lane % 4 * 2;
        b[i] &= flash::decode::seen_pair(seen, key);
        for (int half = 0; half < 2; ++half) {
          const float value = to_float(static_cast<uint16_t>(b[i] >> 16 * half));
          const bool is_seen = seen >> (key + half) & 1u;
          check::that(value == (is_seen ? static_cast<float>(key + half + 1) : 0.0f), "value of key", key + half, lane);
        }
      }
    }
  });
}

}  // namespace

int main() {
  for (const int heads : {1, 3, 4, 8}) {
    for (const int first : {-40, -31, -5, 0, 17, 32, 50, 69, 80}) {
      for (const int mask_heads : {1, 2, 2 * heads}) {
        check_warp(5, heads, mask_heads, 1, 0, first, 0);
        check_warp(40, heads, mask_heads, 0, 32, first, 0xf00000ffu);
      }
    }
  }
  return check::report();
}
