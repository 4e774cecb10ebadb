// How long a load takes and how much can be loaded, from each memory of the GPU at hand: prints a table. One thread
// that follows pointers measures latency: each load needs the one before. All threads together measure bandwidth.
//
//   nvcc -std=c++17 -O3 -arch=native examples/minimal/latency.cu -o latency && ./latency
#include <algorithm>
#include <cmath>
#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <numeric>
#include <random>
#include <vector>

#include "check.h"

enum class Memory { kShared, kL1, kL2, kDevice };

constexpr int kSteps = 4096, kLine = 32;          // words of a cache line of 128 bytes
constexpr int kThreads = 256, kVectors = 8;       // of 16 bytes that a thread has on their way
constexpr int kChunk = kThreads * kVectors;       // vectors that a block reads at a time, 32 KB
constexpr size_t kChunkBytes = 16 * kChunk;       // two fit shared memory and L1, two for each SM fit L2
constexpr size_t kL2Bytes = 4 << 20;              // fits any L2 cache from Ampere on, not L1
constexpr size_t kDeviceBytes = size_t{1} << 29;  // fits none, nor does half of it

// Not two blocks read one chunk: the same line asked for by several SMs at a time leaves L2 once.
template <Memory kMemory>
constexpr bool kOwnChunk = kMemory != Memory::kDevice;

template <Memory kMemory>
__device__ uint32_t load_word(const uint32_t* from) {
  if constexpr (kMemory == Memory::kL1) return __ldca(from);
  if constexpr (kMemory == Memory::kShared) return *from;
  return __ldcg(from);  // past L1
}
template <Memory kMemory>
__device__ uint4 load_vector(const uint4* from) {
  if constexpr (kMemory == Memory::kL1) return __ldca(from);
  if constexpr (kMemory == Memory::kShared) return *from;
  return __ldcg(from);
}

// Follows next[] from word 0 on. The first round fills the cache where there is one.
template <Memory kMemory>
__global__ void chase(const uint32_t* next, int rounds, long long* clocks, uint32_t* last) {
  __shared__ uint32_t words[kChunkBytes / 4];
  if (kMemory == Memory::kShared) {
    for (int i = 0; i < static_cast<int>(kChunkBytes / 4); ++i) words[i] = next[i];
    next = words;
  }
  for (int round = 0; round < rounds; ++round) {
    uint32_t at = 0;
    const long long start = clock64();
    for (int i = 0; i < kSteps; ++i) at = load_word<kMemory>(next + at);
    *last = at;  // also the end of the last load
    *clocks = clock64() - start;
  }
}

// Reads chunks `repeats` times. Each block reads one chunk; of device memory the blocks together read all chunks.
template <Memory kMemory>
__global__ void __launch_bounds__(kThreads) read_all(const uint4* from, size_t chunks, int repeats, uint32_t* sink) {
  __shared__ uint4 window[kChunk];
  if (kMemory == Memory::kShared) {
    for (int i = threadIdx.x; i < kChunk; i += kThreads) window[i] = from[i];
    from = window;
    __syncthreads();
  } else if (kOwnChunk<kMemory>) {
    from += blockIdx.x * kChunk;
  }
  uint32_t sum = 0;
  for (int repeat = 0; repeat < repeats; ++repeat) {
    const size_t first = kOwnChunk<kMemory> ? 0 : blockIdx.x, step = kOwnChunk<kMemory> ? 1 : gridDim.x;
    for (size_t chunk = first; chunk < chunks; chunk += step) {
      uint4 vectors[kVectors];  // all on their way at once
#pragma unroll
      for (int j = 0; j < kVectors; ++j) {
        vectors[j] = load_vector<kMemory>(from + chunk * kChunk + j * kThreads + threadIdx.x);
      }
      for (const uint4& vector : vectors) sum += vector.x ^ vector.y ^ vector.z ^ vector.w;
    }
    asm volatile("" ::: "memory");  // each repeat loads again
  }
  if (sum == 0x12345678) *sink = sum;  // so that the loads are needed
}

struct Device {
  uint32_t* words;  // kDeviceBytes
  long long* clocks;
  uint32_t* last;
  int multiprocessors, kilohertz;

  Device() {
    CHECK(cudaMalloc(&words, kDeviceBytes));
    CHECK(cudaMallocManaged(&clocks, sizeof(*clocks)));
    CHECK(cudaMallocManaged(&last, sizeof(*last)));
    CHECK(cudaDeviceGetAttribute(&multiprocessors, cudaDevAttrMultiProcessorCount, 0));
    CHECK(cudaDeviceGetAttribute(&kilohertz, cudaDevAttrClockRate, 0));
  }
};

// Cache lines of the first `bytes` bytes, linked in random order, as many as there are steps or fewer.
void link_lines(const Device& device, size_t bytes) {
  std::vector<uint32_t> lines(bytes / 4 / kLine);
  std::iota(lines.begin(), lines.end(), 0u);
  std::shuffle(lines.begin() + 1, lines.end(), std::mt19937(1));
  lines.resize(std::min<size_t>(lines.size(), kSteps));
  std::vector<uint32_t> next(bytes / 4);
  for (size_t i = 0; i < lines.size(); ++i) next[lines[i] * kLine] = lines[(i + 1) % lines.size()] * kLine;
  CHECK(cudaMemcpy(device.words, next.data(), bytes, cudaMemcpyHostToDevice));
}

template <Memory kMemory>
double latency(const Device& device, size_t bytes) {
  link_lines(device, kMemory == Memory::kDevice ? bytes / 2 : bytes);
  if (kMemory == Memory::kDevice) {  // the other half takes the place of this one in L2
    CHECK(cudaMemset(device.words + bytes / 8, 0, bytes / 2));
  }
  chase<kMemory><<<1, 1>>>(device.words, kMemory == Memory::kDevice ? 1 : 2, device.clocks, device.last);
  CHECK(cudaDeviceSynchronize());
  return static_cast<double>(*device.clocks) / kSteps;
}

// GB/s of all SMs together.
template <Memory kMemory>
double bandwidth(const Device& device) {
  const int blocks = device.multiprocessors * (kOwnChunk<kMemory> ? 2 : 4), repeats = kOwnChunk<kMemory> ? 2000 : 1;
  const size_t bytes = kOwnChunk<kMemory> ? kChunkBytes : kDeviceBytes;
  cudaEvent_t start, stop;
  CHECK(cudaEventCreate(&start));
  CHECK(cudaEventCreate(&stop));
  float best = INFINITY;
  for (int i = 0; i < 5; ++i) {
    CHECK(cudaEventRecord(start));
    read_all<kMemory>
        <<<blocks, kThreads>>>(reinterpret_cast<const uint4*>(device.words), bytes / kChunkBytes, repeats, device.last);
    CHECK(cudaEventRecord(stop));
    CHECK(cudaEventSynchronize(stop));
    float milliseconds;
    CHECK(cudaEventElapsedTime(&milliseconds, start, stop));
    best = std::min(best, milliseconds);
  }
  return static_cast<double>(bytes) * repeats * (kOwnChunk<kMemory> ? blocks : 1) / best / 1e6;
}

template <Memory kMemory>
void report(const Device& device, const char* name, size_t bytes) {
  const double clocks = latency<kMemory>(device, bytes), rate = bandwidth<kMemory>(device);
  const double ns = clocks * 1e6 / device.kilohertz, of_sm = rate / device.multiprocessors * 1e6 / device.kilohertz;
  std::printf("| %s | %.0f | %.0f | %.0f | %.1f | %.1f |\n", name, clocks, ns, rate, of_sm, clocks * of_sm / 1024);
}

int main() {
  cudaDeviceProp properties;
  CHECK(cudaGetDeviceProperties(&properties, 0));
  const Device device;
  std::printf("%s, clocks of %.2f GHz:\n\n", properties.name, device.kilohertz / 1e6);
  std::printf(
      "| memory | latency, clocks | ns | GB/s, all SMs | bytes a clock, an SM | KB in flight for that, an SM |\n");
  std::printf("|---|---|---|---|---|---|\n");
  report<Memory::kShared>(device, "shared memory", kChunkBytes);
  report<Memory::kL1>(device, "L1 cache", kChunkBytes);
  report<Memory::kL2>(device, "L2 cache", kL2Bytes);
  report<Memory::kDevice>(device, "device memory", kDeviceBytes);
}
