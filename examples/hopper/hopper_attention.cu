// Attention forward for Hopper in one file: out = softmax(Q K^T / sqrt(d)) V, causal or not, for bf16 tensors (batch,
// seqlen, heads, 128). README.md explains it. What a kernel has beyond wgmma are switches of Rung.
#include "hopper_instructions.h"

// kTma: one thread copies boxes, else all threads copy vectors. kProducer: a warpgroup that only copies, else the
// consumers share the buffers in step. kOverlap: P V runs during the softmax of the next tile. kPingPong: the two
// consumers start their products in turns, so that one exponentiates while the other multiplies.
template <bool kTma_, bool kProducer_, bool kOverlap_, bool kPingPong_>
struct Rung {
  static constexpr bool kTma = kTma_, kProducer = kProducer_, kOverlap = kOverlap_, kPingPong = kPingPong_;
  static constexpr int kHeadDim = 128, kBlockM = 128, kBlockN = 128, kStages = 2;
  static constexpr int kConsumers = 2;  // warpgroups, 64 rows each
  static constexpr int kThreads = 128 * (kConsumers + kProducer);
  static_assert(kTma || !kProducer, "a producer of one thread");
  static_assert(kProducer || !kPingPong, "without a producer the consumers wait for each other in every tile");
};

constexpr int kTileElements = 128 * 128;

struct Shared {  // at a multiple of 1024 bytes, as the swizzle has it
  bf16 q[kTileElements], k[2][kTileElements], v[2][kTileElements];
  Mbarrier q_full, k_full[2], v_full[2], k_empty[2], v_empty[2];
};

struct Maps {
  TensorMap q, k, v;
};

// Element (row, col) of a tile of 128 rows.
__device__ inline int tile_offset(int row, int col) {
  return col / kAtomCols * 128 * kAtomCols + row * kAtomCols + (col % kAtomCols ^ row % 8 * 8);
}

// What a thread block computes.
struct Work {
  int block_row, tiles;
  int64_t head, row_stride;

  template <class T>
  __device__ static Work of(const Problem& p, T) {
    Work work;
    work.block_row = (gridDim.x - 1 - blockIdx.x) * T::kBlockM;  // those with the most visible keys come first
    work.row_stride = static_cast<int64_t>(p.heads) * T::kHeadDim;
    work.head = blockIdx.z * p.seqlen * work.row_stride + blockIdx.y * T::kHeadDim;
    const int keys = p.visible_keys(min(work.block_row + T::kBlockM, p.seqlen) - 1);
    work.tiles = (keys + T::kBlockN - 1) / T::kBlockN;
    return work;
  }
};

// Rows [first, first + 128) into a tile, by TMA: one thread.
__device__ inline void copy_tile(bf16* tile, const TensorMap& map, int first, Mbarrier& full) {
  full.arrive_and_expect(kTileElements * 2);
  copy_box(tile, map, 0, blockIdx.y, first, blockIdx.z, full);
  copy_box(tile + kTileElements / 2, map, kAtomCols, blockIdx.y, first, blockIdx.z, full);
}

// The same by 256 threads, 16 bytes at a time.
__device__ inline void copy_tile(bf16* tile, const bf16* head, int64_t row_stride, int first, int seqlen) {
  const int row = threadIdx.x / 16, col = threadIdx.x % 16 * 8;
  const bf16* from = head + (first + row) * row_stride + col;
#pragma unroll
  for (int i = 0; i < 128; i += 16, from += 16 * row_stride) {
    copy_async(tile + tile_offset(row + i, col), from, first + row + i < seqlen);
  }
}

// The copies of K and V, tile n into buffer n mod 2. Without a producer K is copied two tiles early, V one.
template <class T>
struct Copies {
  const Problem& p;
  const Maps& maps;
  const Work& work;
  Shared& shared;

  __device__ void load_q() const {
    if constexpr (!T::kTma) {
      copy_tile(shared.q, p.q + work.head, work.row_stride, work.block_row, p.seqlen);
    } else {
      copy_tile(shared.q, maps.q, work.block_row, shared.q_full);
    }
  }
  __device__ void load_k(int n) const { load(shared.k[n % 2], p.k, maps.k, shared.k_full[n % 2], n); }
  __device__ void load_v(int n) const { load(shared.v[n % 2], p.v, maps.v, shared.v_full[n % 2], n); }
  __device__ void load(bf16* tile, const bf16* from, const TensorMap& map, Mbarrier& full, int n) const {
    if constexpr (!T::kTma) {
      if (n < work.tiles) copy_tile(tile, from + work.head, work.row_stride, n * T::kBlockN, p.seqlen);
      commit_copies();  // of nothing beyond the last tile, so that waits count the same groups in every step
    } else if (n < work.tiles) {
      copy_tile(tile, map, n * T::kBlockN, full);
    }
  }

  // The whole work of a producer: each buffer once the consumers are done with the tile before.
  __device__ void produce() const {
    load_q();
    for (int n = 0; n < work.tiles; ++n) {
      const int before = n / 2 % 2 ^ 1;  // parity of the round before; a new barrier has completed that
      shared.k_empty[n % 2].wait(before);
      load_k(n);
      shared.v_empty[n % 2].wait(before);
      load_v(n);
    }
  }

  // Of all threads without a producer: before the first step, and at the end of each.
  __device__ void begin() const {
    if (T::kTma && threadIdx.x != 0) return;
    load_q();
    load_k(0);
    load_k(1);
    load_v(0);
  }
  __device__ void refill(int n) const {
    __syncthreads();  // everyone is done with K of tile n and V of the one before
    if (T::kTma && threadIdx.x != 0) return;
    load_k(n + 2);
    load_v(n + 1);
  }

  // K of tile n and V of tile n - 1 are there.
  __device__ void wait_for_tile(int n) const {
    if constexpr (!T::kTma) {
      wait_for_copies_but<2>();  // K of the next tile and V of this one
      fence_before_wgmma();
      __syncthreads();
    } else {
      if (n == 0) shared.q_full.wait(0);
      if (n < work.tiles) shared.k_full[n % 2].wait(n / 2 % 2);
      if (n > 0) shared.v_full[(n - 1) % 2].wait((n - 1) / 2 % 2);
    }
  }
  __device__ void release(Mbarrier& empty) const {
    if (T::kProducer && threadIdx.x % 32 == 0) empty.arrive();
  }
};

// A warpgroup's 64 rows: lane (g, t) of a warp has rows g and g + 8 of the warp's 16.
template <class T>
struct Consumer {
  const Problem& p;
  const Work& work;
  const int warp_row;
  float s[16][4], out[16][4] = {};  // out is not yet divided by the row sum
  uint32_t probabilities[8][4];     // in bf16: the A operand of P V, 16 keys each
  float row_max[2] = {-INFINITY, -INFINITY}, row_sum[2] = {}, correction[2];

  __device__ Consumer(const Problem& p_, const Work& work_)
      : p(p_), work(work_), warp_row(work_.block_row + threadIdx.x / 32 * 16) {}

  // S = Q K^T, in eight slices of 16 columns.
  __device__ void start_scores(const bf16* q, const bf16* k) {
    hold(s);
    begin_products();
#pragma unroll
    for (int i = 0; i < T::kHeadDim / 16; ++i) {
      const int slice = i / 4 * 128 * kAtomCols + i % 4 * 16;
      start_product(s, q + slice, k + slice, i > 0);
    }
    commit_products();
  }

  // out += P V, in eight slices of 16 keys.
  __device__ void start_values(const bf16* v) {
    hold(out);
    begin_products();
#pragma unroll
    for (int i = 0; i < T::kBlockN / 16; ++i) {
      start_product_transposed<128>(out, probabilities[i], v + 16 * i * kAtomCols);
    }
    commit_products();
  }

  __device__ void mask(int first_key) {
    if (first_key + T::kBlockN <= p.visible_keys(warp_row)) return;  // the first row sees the fewest keys
    const int lane = threadIdx.x % 32;
#pragma unroll
    for (int i = 0; i < 64; ++i) {
      const int key = first_key + i / 4 * 8 + lane % 4 * 2 + i % 2;
      if (key >= p.visible_keys(warp_row + lane / 4 + i / 2 % 2 * 8)) s[i / 4][i % 4] = -INFINITY;
    }
  }

  // s becomes exp2(scale (s - row_max)); out has to be multiplied by `correction`.
  __device__ void softmax() {
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      float maximum = row_max[half];
      for (auto& tile : s) maximum = fmaxf(maximum, fmaxf(tile[2 * half], tile[2 * half + 1]));
      for (int lanes = 1; lanes < 4; lanes *= 2) maximum = fmaxf(maximum, __shfl_xor_sync(~0u, maximum, lanes));
      correction[half] = exp2f((row_max[half] - maximum) * p.scale_log2);
      row_max[half] = maximum;
      row_sum[half] *= correction[half];
      for (auto& tile : s) {
        for (int i = 2 * half; i < 2 * half + 2; ++i) {
          tile[i] = exp2f(tile[i] * p.scale_log2 - maximum * p.scale_log2);
          row_sum[half] += tile[i];
        }
      }
    }
  }

  // The compiler would move the exponentials after the wait for P V. `row_sum < 0` is never true, but the compiler
  // cannot know that. So this wait, for a phase that ended long ago, depends on every exponential.
  __device__ void finish_softmax(const Shared& shared) const {
    const bool never = row_sum[0] + row_sum[1] < 0.0f;
    shared.q_full.wait((T::kTma ? 0 : 1) ^ never);
  }

  __device__ void rescale() {
    for (auto& tile : out) {
      for (int i = 0; i < 4; ++i) tile[i] *= correction[i / 2];
    }
  }

  __device__ void pack_probabilities() {
#pragma unroll
    for (int i = 0; i < 8; ++i) {
      for (int j = 0; j < 4; ++j) {
        const float (&pair)[4] = s[2 * i + j / 2];
        probabilities[i][j] = pack(pair[j % 2 * 2], pair[j % 2 * 2 + 1]);
      }
    }
  }

  // Products of tile n and of the one before, then the softmax of tile n.
  template <bool kFirst>
  __device__ void step(const Copies<T>& copies, int n) {
    Shared& shared = copies.shared;
    const int group = threadIdx.x / 128;
    copies.wait_for_tile(n);
    if (T::kPingPong) wait_at(1 + group, 256);
    start_scores(shared.q + group * 64 * kAtomCols, shared.k[n % 2]);
    if (!kFirst) start_values(shared.v[(n - 1) % 2]);
    if (T::kPingPong && (group == 0 || n + 1 < work.tiles)) arrive_at(2 - group, 256);
    wait_for_products_but<!kFirst && T::kOverlap ? 1 : 0>();
    hold(s);
    copies.release(shared.k_empty[n % 2]);
    mask(n * T::kBlockN);
    softmax();
    if (!kFirst && T::kOverlap) finish_softmax(shared);
    if (!kFirst) finish_values(copies, n - 1);
    rescale();
    pack_probabilities();
    if (!T::kProducer) copies.refill(n);
  }

  __device__ void finish_values(const Copies<T>& copies, int n) {
    wait_for_products_but<0>();
    hold(out);
    hold(probabilities);
    copies.release(copies.shared.v_empty[n % 2]);
  }

  __device__ void run(const Copies<T>& copies) {
    if (T::kPingPong && threadIdx.x / 128 == 1) arrive_at(1, 256);  // the first turn is that of consumer 0
    step<true>(copies, 0);
    for (int n = 1; n < work.tiles; ++n) step<false>(copies, n);
    copies.wait_for_tile(work.tiles);
    start_values(copies.shared.v[(work.tiles - 1) % 2]);
    finish_values(copies, work.tiles - 1);
  }

  __device__ void store() {
    const int row = warp_row + threadIdx.x % 32 / 4;
    for (int half = 0; half < 2; ++half) {
      for (int lanes = 1; lanes < 4; lanes *= 2) row_sum[half] += __shfl_xor_sync(~0u, row_sum[half], lanes);
      const float factor = 1.0f / row_sum[half];
      bf16* const to = p.out + work.head + (row + 8 * half) * work.row_stride + threadIdx.x % 4 * 2;
      for (int j = 0; j < 16 && row + 8 * half < p.seqlen; ++j) {
        *reinterpret_cast<uint32_t*>(to + 8 * j) = pack(out[j][2 * half] * factor, out[j][2 * half + 1] * factor);
      }
    }
  }
};

template <class T>
__device__ void init_barriers(Shared& shared) {
  if (threadIdx.x == 0) {
    shared.q_full.init(1);
    for (int i = 0; i < 2; ++i) {
      shared.k_full[i].init(1);
      shared.v_full[i].init(1);
      shared.k_empty[i].init(4 * T::kConsumers);  // a lane of each warp
      shared.v_empty[i].init(4 * T::kConsumers);
    }
    fence_mbarrier_init();
  }
  __syncthreads();
}

template <class T>
__device__ void attention(const Problem& p, const Maps& maps, Shared& shared) {
  const Work work = Work::of(p, T());
  const Copies<T> copies{p, maps, work, shared};
  init_barriers<T>(shared);
  if constexpr (T::kProducer) {
    if (threadIdx.x >= 128 * T::kConsumers) {
      give_registers<24>();
      if (threadIdx.x == 128 * T::kConsumers) copies.produce();
      return;
    }
    take_registers<240>();
  } else {
    copies.begin();
  }
  Consumer<T> consumer(p, work);
  consumer.run(copies);
  consumer.store();
}

#ifdef __CUDACC__
// Grid: (ceil(seqlen / kBlockM), heads, batch).
template <class T>
__global__ void __launch_bounds__(T::kThreads, 1)
    hopper_kernel(const __grid_constant__ Problem p, const __grid_constant__ Maps maps) {
  extern __shared__ __align__(1024) char memory[];
  attention<T>(p, maps, *reinterpret_cast<Shared*>(memory));
}
#endif
