// Rung 1, the algorithm without the hardware: out = softmax(Q K^T / sqrt(d)) V as loops over single numbers. One thread
// block owns 64 query rows of one head, two threads a row. S and then P, 64 x 64 of them, are in shared memory, where
// both threads of a row see them; the seqlen x seqlen scores exist nowhere.
#include "instructions.h"

template <int kHeadDim_, int kBlockN_ = 64>
struct PlainLoops {
  static constexpr bool kTensorCores = false;
  static constexpr int kHeadDim = kHeadDim_, kBlockN = kBlockN_, kBlockM = 64, kThreads = 2 * kBlockM;
  static constexpr int kKvBytes = 2 * kBlockN * kHeadDim * 2;  // K and V, bf16
  static constexpr int kScoreBytes = 4 * kBlockN * kBlockM;    // S, overwritten by P, float
  static_assert(kBlockN % 2 == 0 && kHeadDim % 2 == 0, "two threads share a row's keys and its columns of out");
  static_assert(kKvBytes + kScoreBytes <= 48 * 1024, "static shared memory ends at 48 KB");
};

// Grid: (ceil(seqlen / kBlockM), heads, batch).
template <class T>
__global__ void __launch_bounds__(T::kThreads) plain_loops_kernel(Problem p) {
  __shared__ bf16 k_tile[T::kBlockN][T::kHeadDim], v_tile[T::kBlockN][T::kHeadDim];
  __shared__ float s_tile[T::kBlockN][T::kBlockM];  // transposed: the rows of neighbouring threads are neighbours
  constexpr int kColumns = T::kHeadDim / 2;         // of out, in each thread
  const int my_row = threadIdx.x % T::kBlockM, half = threadIdx.x / T::kBlockM;
  const int block_row = blockIdx.x * T::kBlockM, row = min(block_row + my_row, p.seqlen - 1);
  const int64_t row_stride = static_cast<int64_t>(p.heads) * T::kHeadDim;
  const int64_t head = blockIdx.z * p.seqlen * row_stride + blockIdx.y * T::kHeadDim;

  float q[T::kHeadDim], out[kColumns] = {}, row_max = -INFINITY, row_sum = 0.0f;
#pragma unroll
  for (int d = 0; d < T::kHeadDim; ++d) q[d] = to_float(p.q[head + row * row_stride + d]) * p.scale_log2;

  const int keys = p.visible_keys(min(block_row + T::kBlockM, p.seqlen) - 1);  // what the last row sees
  for (int first_key = 0; first_key < keys; first_key += T::kBlockN) {
    __syncthreads();  // everyone is done with the tiles before
    for (int i = threadIdx.x; i < T::kBlockN * T::kHeadDim; i += T::kThreads) {
      const int key = i / T::kHeadDim, d = i % T::kHeadDim;
      const int64_t from = head + min(first_key + key, p.seqlen - 1) * row_stride + d;  // beyond the end: any number
      k_tile[key][d] = p.k[from];
      v_tile[key][d] = p.v[from];
    }
    __syncthreads();  // K and V are there

    for (int key = half; key < T::kBlockN; key += 2) {  // S = Q K^T; this thread: every second key
      float sum = 0.0f;
#pragma unroll
      for (int d = 0; d < T::kHeadDim; ++d) sum += q[d] * to_float(k_tile[key][d]);
      s_tile[key][my_row] = first_key + key < p.visible_keys(row) ? sum : -INFINITY;
    }
    __syncthreads();  // S is there

    float maximum = row_max;
    for (int key = 0; key < T::kBlockN; ++key) maximum = fmaxf(maximum, s_tile[key][my_row]);
    const float correction = exp2f(row_max - maximum);  // 0 at the first tile
    row_max = maximum;
    row_sum *= correction;
    __syncthreads();  // both threads of the row have read S
    for (int key = half; key < T::kBlockN; key += 2) s_tile[key][my_row] = exp2f(s_tile[key][my_row] - maximum);
    __syncthreads();  // P is there

#pragma unroll
    for (int d = 0; d < kColumns; ++d) out[d] *= correction;
    for (int key = 0; key < T::kBlockN; ++key) {  // O += P V; this thread: half of the columns
      const float probability = s_tile[key][my_row];
      row_sum += probability;
#pragma unroll
      for (int d = 0; d < kColumns; ++d) out[d] += probability * to_float(v_tile[key][half * kColumns + d]);
    }
  }
  if (block_row + my_row >= p.seqlen) return;
  uint32_t* to = reinterpret_cast<uint32_t*>(p.out + head + row * row_stride + half * kColumns);
#pragma unroll
  for (int d = 0; d < kColumns; d += 2) to[d / 2] = pack(out[d] / row_sum, out[d + 1] / row_sum);
}
