// Attention forward in one file: out = softmax(Q K^T / sqrt(d)) V, causal or not, for bf16 tensors (batch, seqlen,
// heads, d). One fused kernel; the seqlen x seqlen scores never leave the registers. README.md explains it line by
// line.
//
// Notation: lane = 4 g + t. A warp's 16 x 8 accumulator lies in its lanes so that lane (g, t) holds rows g and g + 8,
// columns 2 t and 2 t + 1: the four floats {(g, 2t), (g, 2t+1), (g+8, 2t), (g+8, 2t+1)}.
#include <cstdint>

#ifdef __CUDACC__  // the test suite runs this kernel on a CPU and brings its own versions of these seven instructions
#include <cuda_bf16.h>
using bf16 = __nv_bfloat16;

__device__ inline uint32_t shared_address(const void* p) { return static_cast<uint32_t>(__cvta_generic_to_shared(p)); }

// acc (16 x 8) += a (16 x 16) b (16 x 8) on the tensor cores.
__device__ inline void mma(float (&acc)[4], const uint32_t (&a)[4], uint32_t b0, uint32_t b1) {
  asm("mma.sync.aligned.m16n8k16.row.col.f32.bf16.bf16.f32 {%0, %1, %2, %3}, {%4, %5, %6, %7}, {%8, %9}, {%0, %1, %2, "
      "%3};"
      : "+f"(acc[0]), "+f"(acc[1]), "+f"(acc[2]), "+f"(acc[3])
      : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b0), "r"(b1));
}

// Four 8 x 8 matrices; lane l names row l % 8 of matrix l / 8. Register i gets elements (g, 2 t), (g, 2 t + 1) of
// matrix i, or (2 t, g), (2 t + 1, g) when transposed.
__device__ inline void load_matrices(uint32_t (&r)[4], const bf16* row) {
  asm volatile("ldmatrix.sync.aligned.m8n8.x4.shared.b16 {%0, %1, %2, %3}, [%4];"
               : "=r"(r[0]), "=r"(r[1]), "=r"(r[2]), "=r"(r[3])
               : "r"(shared_address(row))
               : "memory");
}
__device__ inline void load_matrices_transposed(uint32_t (&r)[4], const bf16* row) {
  asm volatile("ldmatrix.sync.aligned.m8n8.x4.trans.shared.b16 {%0, %1, %2, %3}, [%4];"
               : "=r"(r[0]), "=r"(r[1]), "=r"(r[2]), "=r"(r[3])
               : "r"(shared_address(row))
               : "memory");
}

// 16 bytes from global to shared memory in the background; zeros, and nothing read, when not valid.
__device__ inline void copy_async(bf16* to, const bf16* from, bool valid) {
  asm volatile("cp.async.cg.shared.global [%0], [%1], 16, %2;" ::"r"(shared_address(to)), "l"(from), "r"(valid ? 16 : 0)
               : "memory");
}
__device__ inline void commit_copies() { asm volatile("cp.async.commit_group;" ::: "memory"); }
template <int kNewest>
__device__ inline void wait_for_copies_but() {
  asm volatile("cp.async.wait_group %0;" ::"n"(kNewest) : "memory");
}

__device__ inline uint32_t pack(float low, float high) {
  const __nv_bfloat162 pair = __floats2bfloat162_rn(low, high);
  return reinterpret_cast<const uint32_t&>(pair);
}
#endif

// kBands: 16-row bands of Q per warp. kStages: buffers of K and of V. kPad: elements that shift each shared row, so
// that the eight 16-byte rows of an 8 x 8 matrix fall on eight different groups of banks.
template <int kHeadDim_, int kBlockN_ = 64, int kBands_ = 1, int kStages_ = 1, int kPad_ = 8>
struct Tile {
  static constexpr int kHeadDim = kHeadDim_, kBlockN = kBlockN_, kBands = kBands_, kStages = kStages_;
  static constexpr int kWarps = 4, kThreads = 32 * kWarps, kBlockM = 16 * kBands * kWarps;
  static constexpr int kStride = kHeadDim + kPad_;  // of a shared row, in elements
  static constexpr int kBlocksPerSm = kBands > 1 ? 2 : kHeadDim + kBlockN > 128 ? 3 : 4;  // what registers allow
  static_assert(kHeadDim % 16 == 0 && kBlockN % 16 == 0 && kPad_ % 8 == 0 && (kStages == 1 || kStages == 2));
};

struct Problem {
  const bf16 *q, *k, *v;  // (batch, seqlen, heads, d)
  bf16* out;
  int seqlen, heads;
  float scale_log2;  // log2(e) / sqrt(d): exp(x) is computed as exp2(x log2(e))
  bool causal;

  __device__ int visible_keys(int row) const { return causal ? min(row + 1, seqlen) : seqlen; }
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

  // Online softmax: s becomes exp2(scale (s - max)); what was summed under the old maximum is scaled down to the new.
  __device__ void softmax(float (&s)[T::kBlockN / 8][4], float scale_log2) {
    for (int half = 0; half < 2; ++half) {
      float maximum = row_max[half];
      for (auto& tile : s) maximum = fmaxf(maximum, fmaxf(tile[2 * half], tile[2 * half + 1]));
      for (int lanes = 1; lanes < 4; lanes *= 2) maximum = fmaxf(maximum, __shfl_xor_sync(~0u, maximum, lanes));
      const float correction = exp2f((row_max[half] - maximum) * scale_log2);  // 0 at the first tile
      row_max[half] = maximum;
      row_sum[half] *= correction;
      for (auto& tile : out) tile[2 * half] *= correction, tile[2 * half + 1] *= correction;
      for (auto& tile : s) {
        for (int i = 2 * half; i < 2 * half + 2; ++i) {
          tile[i] = exp2f(tile[i] * scale_log2 - maximum * scale_log2);
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

// Rows [first, first + kBlockN) of one head into a shared tile; rows beyond the sequence become 0.
template <class T>
__device__ void load_tile(bf16* tile, const bf16* head, int64_t row_stride, int first, int seqlen) {
  constexpr int kVectors = T::kHeadDim / 8;  // of 16 bytes in a row
  for (int i = threadIdx.x; i < T::kBlockN * kVectors; i += T::kThreads) {
    const int row = i / kVectors, col = i % kVectors * 8;
    const bool valid = first + row < seqlen;
    copy_async(tile + row * T::kStride + col, head + (valid ? first + row : 0) * row_stride + col, valid);
  }
}

// The work of one warp on one tile of keys: S = Q K^T, mask, softmax, out += P V. Each fragment of K and V that is read
// from shared memory serves all bands of the warp.
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
      load_matrices(b, k_tile + (16 * n + lane / 16 * 8 + lane % 8) * T::kStride + 16 * k + lane / 8 % 2 * 8);
#pragma unroll
      for (int band = 0; band < T::kBands; ++band) {
        mma(s[band][2 * n], bands[band].q[k], b[0], b[1]);
        mma(s[band][2 * n + 1], bands[band].q[k], b[2], b[3]);
      }
    }
  }
#pragma unroll
  for (int band = 0; band < T::kBands; ++band) {
    if (first_key + T::kBlockN > p.visible_keys(block_row)) {  // the first row of the block sees the fewest keys
#pragma unroll
      for (int i = 0; i < T::kBlockN / 2; ++i) {
        const int key = first_key + i / 4 * 8 + lane % 4 * 2 + i % 2;
        if (key >= p.visible_keys(warp_row + 16 * band + lane / 4 + i / 2 % 2 * 8)) s[band][i / 4][i % 4] = -INFINITY;
      }
    }
    bands[band].softmax(s[band], p.scale_log2);
  }
#pragma unroll
  for (int k = 0; k < T::kBlockN / 16; ++k) {
#pragma unroll
    for (int n = 0; n < T::kHeadDim / 16; ++n) {
      load_matrices_transposed(b, v_tile + (16 * k + lane % 16) * T::kStride + 16 * n + lane / 16 * 8);
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
  alignas(16) __shared__ bf16 k_tiles[T::kStages][T::kBlockN * T::kStride];
  alignas(16) __shared__ bf16 v_tiles[T::kStages][T::kBlockN * T::kStride];
  const int64_t row_stride = static_cast<int64_t>(p.heads) * T::kHeadDim;
  const int64_t head = blockIdx.z * p.seqlen * row_stride + blockIdx.y * T::kHeadDim;
  const int block_row = (gridDim.x - 1 - blockIdx.x) * T::kBlockM;
  const int warp_row = block_row + threadIdx.x / 32 * 16 * T::kBands;
  const int row = warp_row + threadIdx.x % 32 / 4;  // of this lane in the first band
  const int tiles = (p.visible_keys(min(block_row + T::kBlockM, p.seqlen) - 1) + T::kBlockN - 1) / T::kBlockN;

  const auto load = [&](int n) {
    const int stage = n % T::kStages;
    load_tile<T>(k_tiles[stage], p.k + head, row_stride, n * T::kBlockN, p.seqlen);
    load_tile<T>(v_tiles[stage], p.v + head, row_stride, n * T::kBlockN, p.seqlen);
    commit_copies();
  };
  Band<T> bands[T::kBands];
  load(0);
  for (int i = 0; i < T::kBands; ++i) bands[i].load_q(p, p.q + head, row_stride, row + 16 * i);
  for (int n = 0; n < tiles; ++n) {
    const bool prefetch = T::kStages == 2 && n + 1 < tiles;
    if (prefetch) load(n + 1);
    prefetch ? wait_for_copies_but<1>() : wait_for_copies_but<0>();
    __syncthreads();  // everyone's copies of this tile have landed
    process_tile<T>(bands, p, k_tiles[n % T::kStages], v_tiles[n % T::kStages], block_row, warp_row, n * T::kBlockN);
    __syncthreads();  // everyone is done with this tile: its buffer is free
    if (T::kStages == 1 && n + 1 < tiles) load(n + 1);
  }
  for (int i = 0; i < T::kBands; ++i) bands[i].store(p, p.out + head, row_stride, row + 16 * i);
}
