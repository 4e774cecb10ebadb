// Checks and times the kernels of a ladder, for its main.cu. Before it comes the ladder: for_each_rung(visit),
// kernel_of<T>(), launch_rung<T>(grid, problem, shape) and kDynamicBytes, shared memory that a launch asks for.
#pragma once

#include <cstdio>
#include <cstdlib>
#include <memory>
#include <string>

#include "check.h"
#include "reference.h"

constexpr int kLaunches = 30;

// Normal numbers in bf16, as many as a prime, so that no two rows of a tensor of millions are alike.
inline std::vector<uint16_t> random_bits(unsigned seed) {
  RandomNormal random(seed);
  std::vector<uint16_t> bits(1000003);
  for (uint16_t& number : bits) {
    const float value = random();
    uint32_t word;
    std::memcpy(&word, &value, 4);
    number = static_cast<uint16_t>(word >> 16);
  }
  return bits;
}

// Inputs and output of one shape on host and device, uint16 holding bf16 bits.
struct Tensors {
  Shape shape;
  std::vector<uint16_t> host[4];  // q, k, v, out
  bf16* device[4] = {};

  explicit Tensors(const Shape& shape_) : shape(shape_) {
    const std::vector<uint16_t> numbers = random_bits(shape.seqlen);
    for (int i = 0; i < 4; ++i) {
      host[i].assign(shape.elements(), 0x7fff);  // NaN
      for (size_t j = 0; i < 3 && j < host[i].size(); ++j) host[i][j] = numbers[(j + 333337 * i) % numbers.size()];
      CHECK(cudaMalloc(&device[i], bytes()));
      CHECK(cudaMemcpy(device[i], host[i].data(), bytes(), cudaMemcpyHostToDevice));
    }
  }
  ~Tensors() {
    for (bf16* pointer : device) cudaFree(pointer);
  }
  Tensors(const Tensors&) = delete;
  Tensors& operator=(const Tensors&) = delete;

  size_t bytes() const { return shape.elements() * sizeof(bf16); }
};

// A problem whose result is known.
struct Known {
  Tensors tensors;
  bool causal;
  Reference reference;

  Known(int seqlen, int head_dim, bool causal_) : tensors({2, seqlen, 3, head_dim}), causal(causal_) {
    const auto& host = tensors.host;
    reference = reference_attention(tensors.shape, causal, host[0].data(), host[1].data(), host[2].data());
  }
};

template <class T>
void launch(const Tensors& tensors, bool causal) {
  const Shape& shape = tensors.shape;
  const float scale_log2 = 1.44269504f / std::sqrt(static_cast<float>(shape.head_dim));
  const Problem problem{tensors.device[0], tensors.device[1], tensors.device[2], tensors.device[3],
                        shape.seqlen,      shape.heads,       scale_log2,        causal};
  launch_rung<T>(dim3((shape.seqlen + T::kBlockM - 1) / T::kBlockM, shape.heads, shape.batch), problem, shape);
  CHECK(cudaGetLastError());
}

// Largest error over its bound (reference.h). The output is NaN before.
template <class T>
double worst_error(const std::vector<std::unique_ptr<Known>>& known) {
  double worst = 0.0;
  for (const auto& problem : known) {
    const Tensors& tensors = problem->tensors;
    std::vector<uint16_t> out = tensors.host[3];
    CHECK(cudaMemcpy(tensors.device[3], out.data(), tensors.bytes(), cudaMemcpyHostToDevice));
    launch<T>(tensors, problem->causal);
    CHECK(cudaMemcpy(out.data(), tensors.device[3], tensors.bytes(), cudaMemcpyDeviceToHost));
    worst = std::max(worst, error_in_bounds(problem->reference, out.data()));
  }
  return worst;
}

// Median of single launches, in TFLOPS: 4 b h s^2 d operations, half of them when causal.
template <class T>
double tflops(const Tensors& tensors, bool causal) {
  cudaEvent_t start, stop;
  CHECK(cudaEventCreate(&start));
  CHECK(cudaEventCreate(&stop));
  std::vector<float> times;
  for (int i = 0; i < kLaunches + 3; ++i) {
    CHECK(cudaEventRecord(start));
    launch<T>(tensors, causal);
    CHECK(cudaEventRecord(stop));
    CHECK(cudaEventSynchronize(stop));
    float milliseconds;
    CHECK(cudaEventElapsedTime(&milliseconds, start, stop));
    if (i >= 3) times.push_back(milliseconds);
  }
  CHECK(cudaEventDestroy(start));
  CHECK(cudaEventDestroy(stop));
  std::sort(times.begin(), times.end());
  const double flops = 4.0 * tensors.shape.elements() * tensors.shape.seqlen * (causal ? 0.5 : 1.0);
  return flops / (times[times.size() / 2] * 1e9);
}

// One line of the table on the terminal and one entry of the JSON list.
template <class T>
bool report(const char* name, const Tensors& timed, const std::vector<std::unique_ptr<Known>>& known,
            std::string& json) {
  const double error = worst_error<T>(known), full = tflops<T>(timed, false), causal = tflops<T>(timed, true);
  cudaFuncAttributes attributes;
  CHECK(cudaFuncGetAttributes(&attributes, kernel_of<T>()));
  int blocks;
  CHECK(cudaOccupancyMaxActiveBlocksPerMultiprocessor(&blocks, kernel_of<T>(), T::kThreads, kDynamicBytes));
  std::printf("%-14s %8.1f %8.1f   %.3f of the error bound, %d registers, %d bytes spilled, %d blocks an SM\n", name,
              full, causal, error, attributes.numRegs, static_cast<int>(attributes.localSizeBytes), blocks);
  char entry[240];
  std::snprintf(entry, sizeof(entry),
                "%s\n  {\"name\": \"%s\", \"full\": %.1f, \"causal\": %.1f, \"error_in_bounds\": %.4f, "
                "\"registers\": %d, \"local_bytes\": %d, \"blocks_per_sm\": %d}",
                json.empty() ? "" : ",", name, full, causal, error, attributes.numRegs,
                static_cast<int>(attributes.localSizeBytes), blocks);
  json += entry;
  return error <= 1.0;
}

// Each rung once, for a profiler; prints their names.
inline int launch_each(const Shape& shape) {
  const Tensors tensors(shape);
  for_each_rung([&](const char* name, auto tile) {
    launch<decltype(tile)>(tensors, false);
    CHECK(cudaDeviceSynchronize());
    std::printf("%s\n", name);
  });
  return 0;
}

// All rungs on `shape`; the figures go to `path` unless that is null. Exit status 1 if a result is wrong.
inline int measure(const Shape& shape, const char* path) {
  cudaDeviceProp device;
  CHECK(cudaGetDeviceProperties(&device, 0));
  std::vector<std::unique_ptr<Known>> known;
  for (const int seqlen : {1, 63, 64, 200, 577}) {
    for (const bool causal : {false, true}) known.push_back(std::make_unique<Known>(seqlen, shape.head_dim, causal));
  }
  const Tensors timed(shape);
  std::setvbuf(stdout, nullptr, _IOLBF, 0);
  std::printf("%s: TFLOPS at b%d s%d h%d d%d bf16, full and causal\n", device.name, shape.batch, shape.seqlen,
              shape.heads, shape.head_dim);
  std::string variants;
  bool good = true;
  for_each_rung([&](const char* name, auto tile) { good &= report<decltype(tile)>(name, timed, known, variants); });
  std::printf("%s\n", good ? "all results within their error bound" : "WRONG RESULTS");
  if (path != nullptr) {
    std::FILE* file = std::fopen(path, "w");
    if (file == nullptr) return 2;
    std::fprintf(
        file,
        "{\"device\": \"%s\", \"batch\": %d, \"seqlen\": %d, \"heads\": %d, \"head_dim\": %d, \"variants\": [%s\n]}\n",
        device.name, shape.batch, shape.seqlen, shape.heads, shape.head_dim, variants.c_str());
    std::fclose(file);
  }
  return good ? 0 : 1;
}
