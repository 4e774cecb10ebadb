// Attention forward in one file: out = softmax(Q K^T / sqrt(d)) V, causal or not, for bf16 tensors (batch, seqlen,
// heads, d). One fused kernel; the seqlen x seqlen scores never leave the registers. README.md explains it line by
// line. Rungs 2 to 6 of its ladder are arguments of Tile. instructions.h: the instructions, and where a lane's elements
// of a matrix are (lane = 4 g + t).
#include "instructions.h"

// Layouts of a shared tile: the distance of its rows, and where element (row, col) is. Eight rows of an 8 x 8
// matrix are read at once, 16 bytes each: without conflicts if they fall on eight different groups of four banks.
template <int kHeadDim>
struct RowMajor {  // all eight on one group where rows are 128 bytes apart, or a multiple of them
  static constexpr int kStride = kHeadDim;
  __device__ static int offset(int row, int col) { return row * kStride + col; }
};
template <int kHeadDim>
struct Padded {  // each row is shifted by one group, at the price of 16 bytes a row
  static constexpr int kStride = kHeadDim + 8;
  __device__ static int offset(int row, int col) { return row * kStride + col; }
};
template <int kHeadDim>
struct Swizzled {  // the eight vectors of 64 columns change places, differently in each of eight rows; no memory
  static_assert(kHeadDim % 64 == 0, "the swizzle permutes eight vectors of eight elements");
  static constexpr int kStride = kHeadDim;
  __device__ static int offset(int row, int col) { return row * kStride + (col ^ row % 8 * 8); }
};

// kBands: 16-row bands of Q per warp. kStages: buffers of K and of V. kLaggingMax: the row maximum that exponentials
// refer to moves only when a score would exceed 2^kThresholdLog2.
template <int kHeadDim_, int kBlockN_ = 64, int kBands_ = 1, int kStages_ = 1, template <int> class Layout_ = Padded,
          bool kLaggingMax_ = false>
struct Tile {
  using Layout = Layout_<kHeadDim_>;
  static constexpr bool kTensorCores = true, kLaggingMax = kLaggingMax_;
  static constexpr int kHeadDim = kHeadDim_, kBlockN = kBlockN_, kBands = kBands_, kStages = kStages_;
  static constexpr int kWarps = 4, kThreads = 32 * kWarps, kBlockM = 16 * kBands * kWarps;
  static constexpr int kTileElements = kBlockN * Layout::kStride;
  static constexpr int kKvBytes = 2 * kStages * kTileElements * 2, kScoreBytes = 0;
  static constexpr int kBlocksPerSm = kBands > 1 || kHeadDim > 64 ? 2 : kBlockN > 64 ? 3 : 4;  // what registers allow
  static constexpr float kThresholdLog2 = 8.0f;
  static_assert(kHeadDim % 16 == 0 && kBlockN % 16 == 0 && (kStages == 1 || kStages == 2));
  static_assert(kKvBytes <= 48 * 1024, "static shared memory ends at 48 KB");
};

// What a lane keeps of one band of 16 rows: of rows g and g + 8 the softmax so far, and its columns of Q and out.
template <class T>
struct Band {
  uint32_t q[T::kHeadDim / 16][4];     // A operands
  float out[T::kHeadDim / 8][4] = {};  // not yet divided by the row sum
  float row_max[2] = {-INFINITY, -INFINITY};
  float row_sum[2] = {};  // over this lane's columns

  __device__ void load_q(const Problem& p, const bf16* q_head, int64_t row_stride, int row) {
    for (int k = 0; k < T::kHeadDim / 16; ++k) {
      for (int i = 0; i < 4; ++i) {
        const int r = row + i % 2 * 8, col = 16 * k + i / 2 * 8 + threadIdx.x % 4 * 2;
        q[k][i] = r < p.seqlen ? *reinterpret_cast<const uint32_t*>(q_head + r * row_stride + col) : 0;
      }
    }
  }

  // Online softmax: s becomes exp2(scale (s - row_max)); what was summed under the old row_max is scaled down to the
  // new one. Without kLaggingMax row_max is the maximum of all keys so far.
  __device__ void softmax(float (&s)[T::kBlockN / 8][4], float scale_log2) {
    for (int half = 0; half < 2; ++half) {
      float maximum = row_max[half];
      for (auto& tile : s) maximum = fmaxf(maximum, fmaxf(tile[2 * half], tile[2 * half + 1]));
      for (int lanes = 1; lanes < 4; lanes *= 2) maximum = fmaxf(maximum, __shfl_xor_sync(~0u, maximum, lanes));
      if (!T::kLaggingMax || __any_sync(~0u, (maximum - row_max[half]) * scale_log2 > T::kThresholdLog2)) {
        const float correction = exp2f((row_max[half] - maximum) * scale_log2);  // 0 at the first tile
        row_max[half] = maximum;
        row_sum[half] *= correction;
        for (auto& tile : out) tile[2 * half] *= correction, tile[2 * half + 1] *= correction;
      }
      for (auto& tile : s) {
        for (int i = 2 * half; i < 2 * half + 2; ++i) {
          tile[i] = exp2f(tile[i] * scale_log2 - row_max[half] * scale_log2);
          row_sum[half] += tile[i];
        }
      }
    }
  }

  __device__ void store(const Problem& p, bf16* out_head, int64_t row_stride, int row) {
    for (int half = 0; half < 2; ++half) {
      for (int lanes = 1; lanes < 4; lanes *= 2) row_sum[half] += __shfl_xor_sync(~0u, row_sum[half], lanes);
      const float factor = 1.0f / row_sum[half];
      uint32_t* to = reinterpret_cast<uint32_t*>(out_head + (row + 8 * half) * row_stride) + threadIdx.x % 4;
      for (int n = 0; n < T::kHeadDim / 8 && row + 8 * half < p.seqlen; ++n) {
        to[4 * n] = pack(out[n][2 * half] * factor, out[n][2 * half + 1] * factor);
      }
    }
  }
};

// Keys [first, first + kBlockN) of K and V into shared tiles; beyond the sequence they become 0. A thread copies one
// column of every kRows-th key, so that its next address is this one and a constant.
template <class T>
__device__ void load_tiles(bf16* k_tile, bf16* v_tile, const Problem& p, int64_t head, int64_t row_stride, int first) {
  constexpr int kVectors = T::kHeadDim / 8, kRows = T::kThreads / kVectors;  // 16 bytes each; keys copied at a time
  static_assert(T::kThreads % kVectors == 0 && T::kBlockN % kRows == 0, "whole passes of all threads");
  const int row = threadIdx.x / kVectors, col = threadIdx.x % kVectors * 8;
  int64_t from = head + (first + row) * row_stride + col;
#pragma unroll
  for (int i = 0; i < T::kBlockN; i += kRows, from += kRows * row_stride) {
    copy_async(k_tile + T::Layout::offset(row + i, col), p.k + from, first + row + i < p.seqlen);
  }
  from -= T::kBlockN * row_stride;
#pragma unroll
  for (int i = 0; i < T::kBlockN; i += kRows, from += kRows * row_stride) {
    copy_async(v_tile + T::Layout::offset(row + i, col), p.v + from, first + row + i < p.seqlen);
  }
  commit_copies();
}

// The work of one warp on one tile of keys: S = Q K^T, mask, softmax, out += P V. Each fragment of K and V that is read
// from shared memory is used by all bands of the warp.
template <class T>
__device__ void process_tile(Band<T> (&bands)[T::kBands], const Problem& p, const bf16* k_tile, const bf16* v_tile,
                             int block_row, int warp_row, int first_key) {
  const int lane = threadIdx.x % 32;
  float s[T::kBands][T::kBlockN / 8][4] = {};
  uint32_t b[4];
#pragma unroll
  for (int k = 0; k < T::kHeadDim / 16; ++k) {
#pragma unroll
    for (int n = 0; n < T::kBlockN / 16; ++n) {
      load_matrices(b, k_tile + T::Layout::offset(16 * n + lane / 16 * 8 + lane % 8, 16 * k + lane / 8 % 2 * 8));
#pragma unroll
      for (int band = 0; band < T::kBands; ++band) {
        mma(s[band][2 * n], bands[band].q[k], b[0], b[1]);
        mma(s[band][2 * n + 1], bands[band].q[k], b[2], b[3]);
      }
    }
  }
  if (first_key + T::kBlockN > p.visible_keys(block_row)) {  // the first row of the block sees the fewest keys
#pragma unroll
    for (int band = 0; band < T::kBands; ++band) {
#pragma unroll
      for (int i = 0; i < T::kBlockN / 2; ++i) {
        const int key = first_key + i / 4 * 8 + lane % 4 * 2 + i % 2;
        if (key >= p.visible_keys(warp_row + 16 * band + lane / 4 + i / 2 % 2 * 8)) s[band][i / 4][i % 4] = -INFINITY;
      }
    }
  }
#pragma unroll
  for (int band = 0; band < T::kBands; ++band) bands[band].softmax(s[band], p.scale_log2);
#pragma unroll
  for (int k = 0; k < T::kBlockN / 16; ++k) {
#pragma unroll
    for (int n = 0; n < T::kHeadDim / 16; ++n) {
      load_matrices_transposed(b, v_tile + T::Layout::offset(16 * k + lane % 16, 16 * n + lane / 16 * 8));
#pragma unroll
      for (int band = 0; band < T::kBands; ++band) {
        const float (&even)[4] = s[band][2 * k], (&odd)[4] = s[band][2 * k + 1];
        const uint32_t a[4] = {pack(even[0], even[1]), pack(even[2], even[3]), pack(odd[0], odd[1]),
                               pack(odd[2], odd[3])};
        mma(bands[band].out[2 * n], a, b[0], b[1]);
        mma(bands[band].out[2 * n + 1], a, b[2], b[3]);
      }
    }
  }
}

// Grid: (ceil(seqlen / kBlockM), heads, batch). Blocks with the most visible keys come first.
template <class T>
__global__ void __launch_bounds__(T::kThreads, T::kBlocksPerSm) attention_kernel(Problem p) {
  alignas(16) __shared__ bf16 k_tiles[T::kStages][T::kTileElements];
  alignas(16) __shared__ bf16 v_tiles[T::kStages][T::kTileElements];
  const int64_t row_stride = static_cast<int64_t>(p.heads) * T::kHeadDim;
  const int64_t head = blockIdx.z * p.seqlen * row_stride + blockIdx.y * T::kHeadDim;
  const int block_row = (gridDim.x - 1 - blockIdx.x) * T::kBlockM;
  const int warp_row = block_row + threadIdx.x / 32 * 16 * T::kBands;
  const int row = warp_row + threadIdx.x % 32 / 4;  // of this lane in the first band
  const int tiles = (p.visible_keys(min(block_row + T::kBlockM, p.seqlen) - 1) + T::kBlockN - 1) / T::kBlockN;

  const auto load = [&](int n, int stage) {
    load_tiles<T>(k_tiles[stage], v_tiles[stage], p, head, row_stride, n * T::kBlockN);
  };
  Band<T> bands[T::kBands];
  load(0, 0);
  for (int i = 0; i < T::kBands; ++i) bands[i].load_q(p, p.q + head, row_stride, row + 16 * i);
  for (int first = 0; first < tiles; first += T::kStages) {
#pragma unroll  // so that the address of a buffer is a constant
    for (int stage = 0; stage < T::kStages; ++stage) {
      const int n = first + stage;
      if (n >= tiles) break;
      const bool prefetch = T::kStages == 2 && n + 1 < tiles;
      if (prefetch) load(n + 1, 1 - stage);
      prefetch ? wait_for_copies_but<1>() : wait_for_copies_but<0>();
      __syncthreads();  // everyone's copies of this tile have landed
      process_tile<T>(bands, p, k_tiles[stage], v_tiles[stage], block_row, warp_row, n * T::kBlockN);
      __syncthreads();  // everyone is done with this tile: its buffer is free
      if (T::kStages == 1 && n + 1 < tiles) load(n + 1, 0);
    }
  }
  for (int i = 0; i < T::kBands; ++i) bands[i].store(p, p.out + head, row_stride, row + 16 * i);
}
