// Runs the kernels of examples/hopper thread by thread on the CPU and compares them with float64 attention: products
// that are computed when they are issued or not before the wait, copies that land early or late, threads in any order.
// Prints one line per kernel: its name and the largest error in units of its bound.
#include "emulated_cuda.h"

#include "check.h"
#include "emulated_wgmma.h"
#include "kernels/tma/mbarrier.h"

// A tensor (batch, rows, heads, cols).
struct TensorMap {
  const bf16* data;
  int rows, heads, cols;
};

using Mbarrier = flash::tma::Barrier;
inline void fence_mbarrier_init() {}
inline void fence_before_wgmma() {}
template <int kCount>
void give_registers() {}
template <int kCount>
void take_registers() {}

// What the hardware makes of an address in a matrix of 64 columns: bits 4 to 6 are XORed with bits 7 to 9.
inline bf16* swizzled(const bf16* address) {
  const uintptr_t bits = reinterpret_cast<uintptr_t>(address);
  return reinterpret_cast<bf16*>(bits ^ (bits >> 7 & 7) << 4);
}

inline void copy_box(bf16* to, const TensorMap& map, int col, int head, int row, int batch, Mbarrier& full) {
  emulation::start_copy([=, &full] {
    for (int i = 0; i < 128; ++i) {
      const bf16* const from = map.data + ((int64_t{batch} * map.rows + row + i) * map.heads + head) * map.cols + col;
      for (int j = 0; j < 64; ++j) *swizzled(to + i * 64 + j) = row + i < map.rows ? from[j] : bf16{0};
    }
    full.complete(2 * 128 * 64);
  });
}

// Of some warps of a block.
struct NamedBarrier {
  int arrived;
  long phase;

  void arrive(int threads) {
    ++emulation::progress;
    if (++arrived == threads) arrived = 0, ++phase;
  }
};
static NamedBarrier named[16];
inline void arrive_at(int barrier, int threads) { named[barrier].arrive(threads); }
inline void wait_at(int barrier, int threads) {
  const long phase = named[barrier].phase;
  named[barrier].arrive(threads);
  emulation::wait_until([=] { return named[barrier].phase != phase; });
}

struct Products {
  emulation::Wgmma groups;
  std::vector<std::function<void()>> open;
};
static Products products[512];
inline Products& mine() { return products[threadIdx.x]; }

inline void begin_products() {}
inline void commit_products() {
  mine().groups.issue([open = std::move(mine().open)] {
    for (const auto& product : open) product();
  });
  mine().open.clear();
}
template <int kNewest>
void wait_for_products_but() {
  mine().groups.wait_but(kNewest);
}
template <class Registers>
void hold(Registers&) {}

// acc += rows * cols of a slice of 16: two rows of this thread, and for each of its columns 16 elements, kStride apart.
template <int kStride, class Column>
void multiply(float (&acc)[16][4], const float* rows, const Column& column) {
  for (int j = 0; j < 16; ++j) {
    for (int i = 0; i < 2; ++i) {
      const bf16* const first = column(8 * j + threadIdx.x % 4 * 2 + i);
      for (int k = 0; k < 16; ++k) {
        const float value = to_float(*swizzled(first + k * kStride));
        acc[j][i] += rows[k] * value;
        acc[j][2 + i] += rows[16 + k] * value;
      }
    }
  }
}

inline void start_product(float (&acc)[16][4], const bf16* a, const bf16* b, bool adds) {
  mine().open.push_back([=, &acc] {
    float rows[32];
    for (int i = 0; i < 32; ++i) rows[i] = to_float(*swizzled(a + emulation::Wgmma::row(i / 16) * 64 + i % 16));
    if (!adds) std::memset(acc, 0, sizeof(acc));
    multiply<1>(acc, rows, [b](int col) { return b + col * 64; });
  });
}

template <int kRows>
void start_product_transposed(float (&acc)[16][4], const uint32_t (&a)[4], const bf16* b) {
  mine().open.push_back([=, &acc, rows = emulation::Wgmma::rows_of(a, 1)] {
    multiply<64>(acc, rows.data(), [b](int col) { return b + col / 64 * kRows * 64 + col % 64; });
  });
}

#include "../../examples/hopper/rungs.h"

struct Timing {
  bool computes_late, lands_early, at_random;
};

template <class T>
double worst_error(const Shape& shape, bool causal, const Timing& timing) {
  emulation::computes_late = timing.computes_late;
  emulation::lands_early = timing.lands_early;
  emulation::at_random = timing.at_random;
  alignas(1024) static Shared shared;
  std::vector<uint16_t> tensors[4];
  RandomNormal random(shape.seqlen);
  for (auto& tensor : tensors) {
    tensor.assign(shape.elements(), 0x7fff);
    for (auto& bits : tensor) bits = &tensor == &tensors[3] ? bits : to_bf16(random());
  }
  const auto data = [&](int i) { return reinterpret_cast<bf16*>(tensors[i].data()); };
  const float scale_log2 = 1.44269504f / std::sqrt(static_cast<float>(shape.head_dim));
  const Problem problem{data(0), data(1), data(2), data(3), shape.seqlen, shape.heads, scale_log2, causal};
  const auto map = [&](int i) { return TensorMap{data(i), shape.seqlen, shape.heads, shape.head_dim}; };
  const Maps maps{map(0), map(1), map(2)};
  gridDim = {(shape.seqlen + T::kBlockM - 1) / T::kBlockM, shape.heads, shape.batch};
  for (blockIdx.z = 0; blockIdx.z < gridDim.z; ++blockIdx.z) {
    for (blockIdx.y = 0; blockIdx.y < gridDim.y; ++blockIdx.y) {
      for (blockIdx.x = 0; blockIdx.x < gridDim.x; ++blockIdx.x) {
        std::memset(static_cast<void*>(&shared), 0xff, sizeof(shared));
        for (NamedBarrier& barrier : named) barrier = {};
        emulation::run_block(T::kThreads, [&] { attention<T>(problem, maps, shared); });
        if (!emulation::copies.empty()) emulation::fail("a copy that nobody waits for");
        for (const NamedBarrier& barrier : named) {
          if (barrier.arrived != 0) emulation::fail("an arrival that nobody waits for");
        }
      }
    }
  }
  const Reference reference =
      reference_attention(shape, causal, tensors[0].data(), tensors[1].data(), tensors[2].data());
  return error_in_bounds(reference, tensors[3].data());
}

template <class T>
void report(const char* name) {
  const Timing early{false, true, false}, late{true, false, false}, mixed{true, true, true};
  double worst = 0.0;
  for (const bool causal : {false, true}) {
    worst = std::max(worst, worst_error<T>({2, 1, 1, 128}, causal, mixed));
    worst = std::max(worst, worst_error<T>({1, 130, 2, 128}, causal, early));
    worst = std::max(worst, worst_error<T>({1, causal ? 400 : 280, 1, 128}, causal, late));
    worst = std::max(worst, worst_error<T>({1, 280, 1, 128}, causal, mixed));
  }
  std::printf("%s %.4f\n", name, worst);
  check::that(worst > 0.0 && worst <= 1.0, name, "error", worst);
}

int main() {
  for_each_rung([](const char* name, auto rung) { report<decltype(rung)>(name); });
  std::fflush(stdout);
  return check::report();
}
