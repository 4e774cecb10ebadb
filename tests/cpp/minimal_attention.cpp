// Runs the kernels of examples/minimal thread by thread on the CPU and compares them with float64 attention. Prints one
// line per kernel: largest error in units of its bound, bank conflicts, votes of warps whether to move the row maximum,
// how many said yes; then error, votes and yes votes of scores that grow from tile to tile. With --budget: the table of
// their shared memory.
#include "emulated_cuda.h"

#include <string>

#include "../../examples/minimal/reference.h"
#include "../../examples/minimal/rungs.h"
#include "check.h"

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
constexpr bool has_lagging_max() {
  if constexpr (T::kTensorCores) return T::kLaggingMax;
  return false;
}

// growth: how much larger the last keys are than the first, so that the row maxima grow with every tile.
template <class T>
double worst_error(int seqlen, bool causal, float growth = 0.0f) {
  const size_t row = kHeads * T::kHeadDim, elements = kBatch * seqlen * row;
  Tensor q(elements, row), k(elements, row), v(elements, row), out(elements, row);
  RandomNormal random(seqlen);
  for (Tensor* tensor : {&q, &k, &v}) {
    for (size_t i = 0; i < elements; ++i) {
      const float larger = tensor == &k ? 1.0f + growth * (i / row % seqlen) / seqlen : 1.0f;
      tensor->begin()[i] = to_bf16(random() * larger);
    }
  }
  const float scale = 1.0f / std::sqrt(static_cast<float>(T::kHeadDim));
  const Problem problem{q.data(), k.data(), v.data(), out.data(), seqlen, kHeads, scale * 1.44269504f, causal};
  gridDim = {(seqlen + T::kBlockM - 1) / T::kBlockM, kHeads, kBatch};
  for (blockIdx.z = 0; blockIdx.z < gridDim.z; ++blockIdx.z) {
    for (blockIdx.y = 0; blockIdx.y < gridDim.y; ++blockIdx.y) {
      for (blockIdx.x = 0; blockIdx.x < gridDim.x; ++blockIdx.x) {
        emulation::run_block(T::kThreads, [&] { kernel_of<T>()(problem); });
      }
    }
  }
  for (size_t i = 0; i < out.guard; ++i) {
    if (out.bits[i] != 0x7fff || out.bits[out.bits.size() - 1 - i] != 0x7fff) emulation::fail("write outside of out");
  }
  const Shape shape{kBatch, seqlen, kHeads, T::kHeadDim};
  return error_in_bounds(reference_attention(shape, causal, q.begin(), k.begin(), v.begin()), out.begin());
}

// A maximum that lags is asked for in every tile and moves where scores grow by more than the threshold.
template <class T>
void check_votes(const char* name, double least_share) {
  const double moved = static_cast<double>(emulation::yes_votes), votes = static_cast<double>(emulation::votes);
  const bool lags = votes > moved && moved > votes * least_share;
  check::that(has_lagging_max<T>() ? lags : votes == 0, name, "votes", moved, votes);
}

template <class T>
void report(const char* name, bool conflicts) {
  double worst = 0.0;
  emulation::bank_conflicts = emulation::votes = emulation::yes_votes = 0;
  for (const int seqlen : {1, 63, 64, 150}) {
    for (const bool causal : {false, true}) worst = std::max(worst, worst_error<T>(seqlen, causal));
  }
  std::printf("%s %.4f %ld %ld %ld", name, worst, emulation::bank_conflicts, emulation::votes, emulation::yes_votes);
  check::that((emulation::bank_conflicts > 0) == conflicts, name, "bank conflicts", emulation::bank_conflicts);
  check_votes<T>(name, 0.0);
  emulation::votes = emulation::yes_votes = 0;
  const double growing = worst_error<T>(200, false, 40.0f);
  std::printf(" %.4f %ld %ld\n", growing, emulation::votes, emulation::yes_votes);
  check_votes<T>(name, 0.25);  // of four tiles the first one always moves it
  for (const double error : {worst, growing}) check::that(error > 0.0 && error <= 1.0, name, "error", error);
}

int main(int argc, char** argv) {
  if (argc > 1 && std::string(argv[1]) == "--budget") {
    print_budget();
    return 0;
  }
  for_each_rung(
      [](const char* name, auto tile) { report<decltype(tile)>(name, std::strcmp(name, "tensor_cores") == 0); });
  if constexpr (RUNG == 0) {
    report<Tile<128>>("head_dim_128", false);
    report<Tile<128, 64, 1, 1, Swizzled, true>>("swizzle_head_dim_128", false);
  }
  std::fflush(stdout);
  return check::report();
}
