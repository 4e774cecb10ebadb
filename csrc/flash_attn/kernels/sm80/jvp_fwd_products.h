// Products of a warp in the forward with tangents. Each square of an operand is loaded once for all products that need
// it: from shared memory alone, three separate products would wait for their operands.
#pragma once

#include "kernels/sm80/jvp_fwd_config.h"
#include "kernels/sm80/warp_ops.h"

namespace flash {
namespace sm80 {

template <class Config>
struct JvpFwdProducts {
  using Element = typename Config::Element;
  static constexpr int kRowTiles = Config::kBlockM / (16 * Config::kWarps);
  static constexpr int kKeyTiles = Config::kBlockN / 8, kColTiles = Config::kHeadDim / 8;
  static constexpr int kPairs = 2 / kRowTiles;  // of tiles of columns at a time: a sum waits for the one before
  using Scores = float[kRowTiles][kKeyTiles][4];
  using Out = float[kRowTiles][kColTiles][4];
  using Probs = uint32_t[Config::kBlockN / 16][kRowTiles][4];  // an A operand of each 16 keys
  using Tiles = uint32_t[kPairs][4];                           // squares of a B operand

  const JvpFwdStorage<Config>& storage;
  const int lane = threadIdx.x % 32, warp = threadIdx.x / 32;

  __device__ __forceinline__ explicit JvpFwdProducts(const JvpFwdStorage<Config>& storage_) : storage(storage_) {}

  // Element offset of the vector that this lane passes to ldmatrix for the first square of 16 x 16 of a tile: as the A
  // operand or the transposed B operand take it, and as the B operand does. Opaque, or the compiler
  // computes the offsets of all squares before the loop over blocks, and spills.
  __device__ __forceinline__ int rows_first() const {
    return opaque(Config::template offset<16>(lane % 16, lane / 16));
  }
  __device__ __forceinline__ int cols_first() const {
    return opaque(Config::template offset<16>(lane / 16 * 8 + lane % 8, lane / 8 % 2));
  }
  __device__ __forceinline__ static int opaque(int offset) {
    asm volatile("" : "+r"(offset));
    return offset;
  }

  // The same for the square at `row`, a multiple of 16, and `vector`, one of 2.
  template <int kRows>
  __device__ __forceinline__ static const Element* square(const Element* tile, int first, int row, int vector) {
    return tile + (vector / 8 * kRows + row) * Config::kAtomCols + (first ^ vector % 8 * Config::kVectorCols);
  }

  __device__ __forceinline__ static void add(float (&acc)[4], const uint32_t (&a)[4], const Tiles& b, int tile) {
    multiply(acc, a, b[tile / 2][tile % 2 * 2], b[tile / 2][tile % 2 * 2 + 1], Element{});
  }

  // S += Q K^T and S' += Q' K^T + Q K'^T.
  __device__ __forceinline__ void add_scores(Scores& acc_s, Scores& acc_ts) const {
    const int first_q = rows_first() + warp * 16 * Config::kAtomCols, first_k = cols_first();
#pragma unroll
    for (int slice = 0; slice < Config::kHeadDim / 16; ++slice) {
      uint32_t q[2][kRowTiles][4];
#pragma unroll
      for (int of = 0; of < 2; ++of) {
#pragma unroll
        for (int m = 0; m < kRowTiles; ++m) {
          const int row = m * Config::kWarps * 16;
          load_matrices(q[of][m], square<Config::kBlockM>(storage.q[of], first_q, row, 2 * slice));
        }
      }
#pragma unroll
      for (int first = 0; first < kKeyTiles; first += 2 * kPairs) {
        Tiles k[2];
#pragma unroll
        for (int of = 0; of < 2; ++of) {
#pragma unroll
          for (int pair = 0; pair < kPairs; ++pair) {
            const int row = 8 * first + 16 * pair;
            load_matrices(k[of][pair], square<Config::kBlockN>(storage.k[of], first_k, row, 2 * slice));
          }
        }
#pragma unroll
        for (int tile = 0; tile < 2 * kPairs; ++tile) {
#pragma unroll
          for (int m = 0; m < kRowTiles; ++m) {
            add(acc_s[m][first + tile], q[0][m], k[0], tile);
            add(acc_ts[m][first + tile], q[1][m], k[0], tile);
          }
        }
#pragma unroll
        for (int tile = 0; tile < 2 * kPairs; ++tile) {
#pragma unroll
          for (int m = 0; m < kRowTiles; ++m) add(acc_ts[m][first + tile], q[0][m], k[1], tile);
        }
      }
    }
  }

  // O += P V and O' += H V + P V'.
  __device__ __forceinline__ void add_values(Out& acc_o, Out& acc_to, const Probs& p, const Probs& h) const {
    const int first_v = rows_first();
#pragma unroll
    for (int slice = 0; slice < Config::kBlockN / 16; ++slice) {
#pragma unroll
      for (int first = 0; first < kColTiles; first += 2 * kPairs) {
        Tiles v[2];
#pragma unroll
        for (int of = 0; of < 2; ++of) {
#pragma unroll
          for (int pair = 0; pair < kPairs; ++pair) {
            const int vector = first + 2 * pair;
            load_matrices_transposed(v[of][pair], square<Config::kBlockN>(storage.v[of], first_v, 16 * slice, vector));
          }
        }
#pragma unroll
        for (int tile = 0; tile < 2 * kPairs; ++tile) {
#pragma unroll
          for (int m = 0; m < kRowTiles; ++m) {
            add(acc_o[m][first + tile], p[slice][m], v[0], tile);
            add(acc_to[m][first + tile], h[slice][m], v[0], tile);
          }
        }
#pragma unroll
        for (int tile = 0; tile < 2 * kPairs; ++tile) {
#pragma unroll
          for (int m = 0; m < kRowTiles; ++m) add(acc_to[m][first + tile], p[slice][m], v[1], tile);
        }
      }
    }
  }

  // Scores in 16 bits, as the A operand.
  __device__ __forceinline__ static void pack(const Scores& scores, Probs& probs) {
#pragma unroll
    for (int slice = 0; slice < Config::kBlockN / 16; ++slice) {
#pragma unroll
      for (int m = 0; m < kRowTiles; ++m) {
#pragma unroll
        for (int i = 0; i < 4; ++i) {
          const float (&tile)[4] = scores[m][2 * slice + i / 2];
          probs[slice][m][i] = pack_pair(tile[i % 2 * 2], tile[i % 2 * 2 + 1], Element{});
        }
      }
    }
  }

  // Accumulators in 16 bits over the warp's rows of a tile of Q.
  __device__ __forceinline__ void stage(Element* rows, const Out& acc) const {
#pragma unroll
    for (int m = 0; m < kRowTiles; ++m) {
#pragma unroll
      for (int tile = 0; tile < kColTiles; ++tile) {
#pragma unroll
        for (int half = 0; half < 2; ++half) {
          const int row = 16 * (m * Config::kWarps + warp) + 8 * half + lane / 4;
          auto* const to = rows + Config::template offset<Config::kBlockM>(row, tile) + lane % 4 * 2;
          const float (&values)[4] = acc[m][tile];
          *reinterpret_cast<uint32_t*>(to) = pack_pair(values[2 * half], values[2 * half + 1], Element{});
        }
      }
    }
  }
};

}  // namespace sm80
}  // namespace flash
