// Checks and times the minimal kernel and its variants: `main [RESULT.json]`. Exit status 1 if a result is wrong.
#include <cstdio>
#include <cstdlib>
#include <string>

#include "minimal_attention.cu"
#include "reference.h"

#define CHECK(call)                                                        \
  do {                                                                     \
    const cudaError_t status = (call);                                     \
    if (status != cudaSuccess) {                                           \
      std::fprintf(stderr, "%s: %s\n", #call, cudaGetErrorString(status)); \
      std::exit(2);                                                        \
    }                                                                      \
  } while (0)

constexpr int kHeadDim = 64;
constexpr int kLaunches = 30;
constexpr Shape kTimed{4, 4096, 32, kHeadDim};

// Inputs and output of one shape on host and device, uint16 holding bf16 bits.
struct Tensors {
  Shape shape;
  std::vector<uint16_t> host[4];  // q, k, v, out
  bf16* device[4] = {};

  explicit Tensors(const Shape& shape_) : shape(shape_) {
    RandomNormal random(shape.seqlen);
    for (int i = 0; i < 4; ++i) {
      host[i].assign(shape.elements(), 0x7fff);  // NaN
      for (auto& bits : host[i]) {
        if (i == 3) break;
        const float value = random();
        uint32_t word;
        std::memcpy(&word, &value, 4);
        bits = static_cast<uint16_t>(word >> 16);
      }
      CHECK(cudaMalloc(&device[i], shape.elements() * sizeof(bf16)));
      CHECK(cudaMemcpy(device[i], host[i].data(), shape.elements() * sizeof(bf16), cudaMemcpyHostToDevice));
    }
  }
  ~Tensors() {
    for (bf16* pointer : device) cudaFree(pointer);
  }
  Tensors(const Tensors&) = delete;
  Tensors& operator=(const Tensors&) = delete;
};

template <class T>
void launch(const Tensors& tensors, bool causal) {
  const Shape& shape = tensors.shape;
  const float scale_log2 = 1.44269504f / std::sqrt(static_cast<float>(shape.head_dim));
  const Problem problem{tensors.device[0], tensors.device[1], tensors.device[2], tensors.device[3],
                        shape.seqlen,      shape.heads,       scale_log2,        causal};
  const dim3 grid((shape.seqlen + T::kBlockM - 1) / T::kBlockM, shape.heads, shape.batch);
  attention_kernel<T><<<grid, T::kThreads>>>(problem);
  CHECK(cudaGetLastError());
}

// Largest error over its bound (reference.h) for several lengths.
template <class T>
double worst_error() {
  double worst = 0.0;
  for (const int seqlen : {1, 63, 64, 200, 577}) {
    for (const bool causal : {false, true}) {
      Tensors tensors({2, seqlen, 3, kHeadDim});
      launch<T>(tensors, causal);
      auto& out = tensors.host[3];
      CHECK(cudaMemcpy(out.data(), tensors.device[3], out.size() * sizeof(bf16), cudaMemcpyDeviceToHost));
      worst = std::max(worst, error_in_bounds(tensors.shape, causal, tensors.host[0].data(), tensors.host[1].data(),
                                              tensors.host[2].data(), out.data()));
    }
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
bool report(const char* name, const Tensors& timed, std::string& json) {
  const double error = worst_error<T>(), full = tflops<T>(timed, false), causal = tflops<T>(timed, true);
  std::printf("%-12s %8.1f %8.1f   %.3f of the error bound\n", name, full, causal, error);
  char entry[160];
  std::snprintf(entry, sizeof(entry),
                "%s\n  {\"name\": \"%s\", \"full\": %.1f, \"causal\": %.1f, \"error_in_bounds\": %.4f}",
                json.empty() ? "" : ",", name, full, causal, error);
  json += entry;
  return error <= 1.0;
}

int main(int argc, char** argv) {
  cudaDeviceProp device;
  CHECK(cudaGetDeviceProperties(&device, 0));
  const Tensors timed(kTimed);
  std::printf("%s: TFLOPS at b%d s%d h%d d%d bf16, full and causal\n", device.name, kTimed.batch, kTimed.seqlen,
              kTimed.heads, kTimed.head_dim);
  std::string variants;
  bool good = report<Tile<64>>("minimal", timed, variants);
  good &= report<Tile<64, 64, 1, 1, 0>>("unpadded", timed, variants);
  good &= report<Tile<64, 64, 1, 2>>("two_stages", timed, variants);
  good &= report<Tile<64, 64, 2, 1>>("two_bands", timed, variants);
  good &= report<Tile<64, 128, 1, 1>>("wide_tile", timed, variants);
  std::printf("%s\n", good ? "all results within their error bound" : "WRONG RESULTS");
  if (argc > 1) {
    std::FILE* file = std::fopen(argv[1], "w");
    if (file == nullptr) return 2;
    std::fprintf(
        file,
        "{\"device\": \"%s\", \"batch\": %d, \"seqlen\": %d, \"heads\": %d, \"head_dim\": %d, \"variants\": [%s\n]}\n",
        device.name, kTimed.batch, kTimed.seqlen, kTimed.heads, kTimed.head_dim, variants.c_str());
    std::fclose(file);
  }
  return good ? 0 : 1;
}
