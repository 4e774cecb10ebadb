// Bools as bits, 32 to a word, for masks as data.
#include <atomic>

#include "kernels/common/launch.h"
#include "params/mask.h"

namespace flash {
namespace {

constexpr int kThreads = 256;
constexpr int kVectorBytes = 16;

// Bits 0 to 3: which bytes are not 0.
__device__ __forceinline__ uint32_t bits_of(uint32_t bytes) {
  return ((__vcmpne4(bytes, 0u) & 0x08040201u) * 0x01010101u) >> 24;
}

// Whole words of aligned rows: a vector a thread, half a word.
__global__ void __launch_bounds__(kThreads) pack_vectors_kernel(const __grid_constant__ PackBitsParams params) {
  const int64_t i = static_cast<int64_t>(blockIdx.x) * kThreads + threadIdx.x;
  const bool exists = i < params.words() * 2;
  const uint4 bytes = exists ? reinterpret_cast<const uint4*>(params.bools)[i] : uint4{};
  const uint32_t half = bits_of(bytes.x) | bits_of(bytes.y) << 4 | bits_of(bytes.z) << 8 | bits_of(bytes.w) << 12;
  const uint32_t other = __shfl_down_sync(0xffffffffu, half, 1);
  if (exists && i % 2 == 0) params.bits[i / 2] = half | other << 16;
}

// Any rows: a word a thread.
__global__ void __launch_bounds__(kThreads) pack_bytes_kernel(const __grid_constant__ PackBitsParams params) {
  const int64_t i = static_cast<int64_t>(blockIdx.x) * kThreads + threadIdx.x;
  if (i >= params.words()) return;
  const int64_t row = i / params.row_words(), col = (i - row * params.row_words()) * kMaskWordKeys;
  const uint8_t* const bools = params.bools + row * params.cols + col;
  uint32_t word = 0u;
  for (int bit = 0; bit < kMaskWordKeys && col + bit < params.cols; ++bit) word |= uint32_t{bools[bit] != 0} << bit;
  params.bits[i] = word;
}

}  // namespace

cudaError_t run_pack_bits(const PackBitsParams& params, cudaStream_t stream) {
  static std::atomic<uint64_t> configured_devices{0};
  const bool vectors =
      params.cols % kMaskWordKeys == 0 && reinterpret_cast<uintptr_t>(params.bools) % kVectorBytes == 0;
  const int64_t threads = params.words() * (vectors ? 2 : 1);
  return launch(vectors ? pack_vectors_kernel : pack_bytes_kernel, (threads + kThreads - 1) / kThreads, kThreads, 0,
                params, params.device, stream, configured_devices);
}

}  // namespace flash
