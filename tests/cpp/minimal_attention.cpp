// Runs examples/minimal/minimal_attention.cu thread by thread on the CPU and compares it with float64 attention.
// Prints one line per configuration: largest error in units of its bound, bank conflicts.
#include "emulated_cuda.h"

#include "../../examples/minimal/minimal_attention.cu"
#include "../../examples/minimal/reference.h"

constexpr int kBatch = 2, kHeads = 2;

// Rows around the tensors are NaN, so that a read out of bounds shows.
struct Tensor {
  std::vector<uint16_t> bits;
  size_t guard;

  Tensor(size_t elements, size_t row) : bits(elements + 2 * 256 * row, 0x7fff), guard(256 * row) {}
  bf16* data() { return reinterpret_cast<bf16*>(bits.data() + guard); }
  uint16_t* begin() { return bits.data() + guard; }
};

template <class T>
double worst_error(int seqlen, bool causal) {
  const size_t row = kHeads * T::kHeadDim, elements = kBatch * seqlen * row;
  Tensor q(elements, row), k(elements, row), v(elements, row), out(elements, row);
  RandomNormal random(seqlen);
  for (Tensor* tensor : {&q, &k, &v}) {
    for (size_t i = 0; i < elements; ++i) tensor->begin()[i] = to_bf16(random());
  }
  const float scale = 1.0f / std::sqrt(static_cast<float>(T::kHeadDim));
  const Problem problem{q.data(), k.data(), v.data(), out.data(), seqlen, kHeads, scale * 1.44269504f, causal};
  gridDim = {(seqlen + T::kBlockM - 1) / T::kBlockM, kHeads, kBatch};
  for (blockIdx.z = 0; blockIdx.z < gridDim.z; ++blockIdx.z) {
    for (blockIdx.y = 0; blockIdx.y < gridDim.y; ++blockIdx.y) {
      for (blockIdx.x = 0; blockIdx.x < gridDim.x; ++blockIdx.x) {
        emulation::run_block(T::kThreads, [&] { attention_kernel<T>(problem); });
      }
    }
  }
  for (size_t i = 0; i < out.guard; ++i) {
    if (out.bits[i] != 0x7fff || out.bits[out.bits.size() - 1 - i] != 0x7fff) emulation::fail("write outside of out");
  }
  const Shape shape{kBatch, seqlen, kHeads, T::kHeadDim};
  return error_in_bounds(shape, causal, q.begin(), k.begin(), v.begin(), out.begin());
}

template <class T>
void report(const char* name) {
  double worst = 0.0;
  emulation::bank_conflicts = 0;
  for (const int seqlen : {1, 63, 64, 150}) {
    for (const bool causal : {false, true}) worst = std::max(worst, worst_error<T>(seqlen, causal));
  }
  std::printf("%s %.4f %ld\n", name, worst, emulation::bank_conflicts);
}

int main() {
  report<Tile<64>>("minimal");
  report<Tile<64, 64, 1, 1, 0>>("unpadded");
  report<Tile<64, 64, 1, 2>>("two_stages");
  report<Tile<64, 64, 2, 1>>("two_bands");
  report<Tile<64, 128, 1, 1>>("wide_tile");
  report<Tile<128>>("head_dim_128");
}
