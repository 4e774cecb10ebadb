// V^T for the e4m3 forward, whose P V reads both operands along the keys: a thread block transposes 128 keys of a head,
// at most 128 columns of them, so that all multiprocessors have several thread blocks until the end.
// Bound by memory: it reads V once and writes as many bytes.
#include <algorithm>
#include <atomic>

#include "core/e4m3.h"
#include "core/visible_range.h"
#include "kernels/common/dropout.h"
#include "kernels/common/launch.h"
#include "kernels/common/mask.h"
#include "kernels/common/pdl.h"
#include "params/fp8.h"

namespace flash {
namespace {

constexpr int kThreads = 256, kKeys = e4m3::kVtKeys;
constexpr int kBlocksPerSm = 8;  // all threads of a multiprocessor: loads in flight hide latency

// kCols columns of 128 keys, in words of four columns.
template <int kCols>
struct KeyWords {
  static constexpr int kRowWords = kCols / 4, kPaddedWords = kRowWords + 1;
  static constexpr int kWords = kKeys * kPaddedWords + 9;

  // The first word of a key. Lanes of a warp read keys 16 i + 2 t, i < 8 and t < 4, of one column quad: the additional
  // words after each 32 keys put them into 32 banks, since kPaddedWords is 1 above a multiple of 16.
  __device__ __forceinline__ static int word_of(int key) {
    const int chunk = key / 32;
    return key * kPaddedWords + chunk % 2 + chunk / 2 * 8;
  }
};

// A block of keys of one K/V head, of which its queries see [begin, end).
struct VtTile {
  int head = 0, batch = 0;
  int begin = 0, end = 0;  // within the block; none when end <= begin
  int64_t source = 0;      // element offset of key 0 in V
  int64_t target = 0;      // of column 0, key 0 in V^T
};

__device__ __forceinline__ VtTile vt_tile(const Flash_fwd_fp8_params& params, int index) {
  const int blocks = static_cast<int>(params.vt_keys / kKeys), matrix = index / blocks, slot = index - matrix * blocks;
  VtTile at;
  Visibility mask{params.seqlen_q, params.seqlen_k, params.window};
  int first = slot * kKeys, k_begin = 0;
  at.batch = matrix / params.h_k;
  at.head = matrix - at.batch * params.h_k;
  if (params.is_varlen()) {
    const int* const segments = params.varlen.segments_k;
    const int segment = find_segment(segments, params.b, slot, kKeys);
    if (segment < 1 || segment > params.b) return at;
    k_begin = segments[segment];
    mask.seqlen_k = segments[segment + 1] - k_begin;
    mask.seqlen_q = params.varlen.segments_q[segment + 1] - params.varlen.segments_q[segment];
    first = (slot - varlen_first_slot(k_begin, segment, kKeys)) * kKeys;
  }
  at.begin = mask.may_mask_left() ? max(first_visible_key(mask) - first, 0) : 0;
  at.end = min(mask.seqlen_k - first, kKeys);
  at.source = matrix_offset(params.v_strides, params.is_varlen(), at.batch, k_begin + first, at.head);
  at.target = static_cast<int64_t>(matrix) * params.d_v * params.vt_keys + static_cast<int64_t>(slot) * kKeys;
  return at;
}

// Transposes four words: word j becomes byte j of each.
__device__ __forceinline__ void transpose_bytes(uint32_t (&words)[4]) {
  const uint32_t low01 = __byte_perm(words[0], words[1], 0x5140), low23 = __byte_perm(words[2], words[3], 0x5140);
  const uint32_t high01 = __byte_perm(words[0], words[1], 0x7362), high23 = __byte_perm(words[2], words[3], 0x7362);
  words[0] = __byte_perm(low01, low23, 0x5410);
  words[1] = __byte_perm(low01, low23, 0x7632);
  words[2] = __byte_perm(high01, high23, 0x5410);
  words[3] = __byte_perm(high01, high23, 0x7632);
}

template <int kCols>
__device__ __forceinline__ void load_keys(const Flash_fwd_fp8_params& params, const VtTile& at, uint32_t* words) {
  constexpr int kVectors = kCols / 16, kSteps = kKeys * kVectors / kThreads;
  const auto* const v = static_cast<const uint8_t*>(params.v_ptr) + at.source;
  uint4 vectors[kSteps];
#pragma unroll
  for (int i = 0; i < kSteps; ++i) {
    const int key = (threadIdx.x + i * kThreads) / kVectors, vector = threadIdx.x % kVectors;
    vectors[i] = key >= at.begin && key < at.end
                     ? __ldg(reinterpret_cast<const uint4*>(v + key * params.v_strides.row + 16 * vector))
                     : uint4{};
  }
#pragma unroll
  for (int i = 0; i < kSteps; ++i) {
    uint32_t* const to =
        words + KeyWords<kCols>::word_of((threadIdx.x + i * kThreads) / kVectors) + 4 * (threadIdx.x % kVectors);
    to[0] = vectors[i].x;
    to[1] = vectors[i].y;
    to[2] = vectors[i].z;
    to[3] = vectors[i].w;
  }
}

// A warp writes 128 keys of a column at a time.
template <int kCols>
__device__ __forceinline__ void store_columns(const Flash_fwd_fp8_params& params, const VtTile& at,
                                              const uint32_t* words) {
  const int lane = threadIdx.x % 32, key = lane / 4 * 16;
  uint8_t* const to = params.vt_ptr + at.target + 4 * lane;
#pragma unroll 4
  for (int quad = threadIdx.x / 32; quad < KeyWords<kCols>::kRowWords; quad += kThreads / 32) {
    uint32_t bytes[4];
#pragma unroll
    for (int j = 0; j < 4; ++j) bytes[j] = words[KeyWords<kCols>::word_of(key + e4m3::key_at(lane % 4 * 4 + j)) + quad];
    transpose_bytes(bytes);
#pragma unroll
    for (int j = 0; j < 4; ++j) {
      *reinterpret_cast<uint32_t*>(to + static_cast<int64_t>(4 * quad + j) * params.vt_keys) = bytes[j];
    }
  }
}

template <int kCols>
__global__ void __launch_bounds__(kThreads, kBlocksPerSm)
    transpose_v_kernel(const __grid_constant__ Flash_fwd_fp8_params params) {
  __shared__ uint32_t words[KeyWords<kCols>::kWords];
  wait_for_previous_kernel();
  allow_next_kernel();  // it calls wait_for_previous_kernel() before it reads any of this
  if (blockIdx.x == 0 && threadIdx.x == 0 && params.tile_count_semaphore != nullptr) *params.tile_count_semaphore = 0;
  store_rng_state(params.dropout);
  if (params.vt_keys == 0) return;
  const int parts = params.d_v / kCols, index = reversed_block();
  VtTile at = vt_tile(params, index / parts);
  if (at.end <= 0) return;  // no sequence has these keys: V^T is never read there
  const int first_col = index % parts * kCols;
  at.source += first_col;
  at.target += first_col * params.vt_keys;
  load_keys<kCols>(params, at, words);
  __syncthreads();
  store_columns<kCols>(params, at, words);
}

template <int kCols>
cudaError_t launch_transpose_v(const Flash_fwd_fp8_params& params, cudaStream_t stream) {
  static std::atomic<uint64_t> configured_devices{0};
  const int64_t matrices = static_cast<int64_t>(params.is_varlen() ? 1 : params.b) * params.h_k;
  const int64_t tiles = matrices * (params.vt_keys / kKeys) * (params.d_v / kCols);
  const int64_t blocks = std::max<int64_t>(tiles, 1);  // one clears the semaphore
  return launch_dependent(transpose_v_kernel<kCols>, blocks, kThreads, 0, params, params.device, stream,
                          configured_devices);
}

}  // namespace

cudaError_t run_transpose_v(const Flash_fwd_fp8_params& params, cudaStream_t stream) {
  switch (params.d_v) {
    case 64: return launch_transpose_v<64>(params, stream);
    case 128:
    case 256: return launch_transpose_v<128>(params, stream);
    default: return cudaErrorInvalidValue;  // plan::sm90_fp8_fwd_tile() has no other
  }
}

}  // namespace flash
