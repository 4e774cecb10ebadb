// CuTe by the tensors of the mma.sync forward at head dim 128 in bf16: every line is printed with its value. It runs on
// the CPU; learn.md has the command and what it prints.
#ifndef __CUDACC__  // what kernels have and g++ does not
struct {
  unsigned x;
} threadIdx;
float __shfl_xor_sync(unsigned, float value, int) { return value; }
#endif

#include <cstdio>
#include <cute/tensor.hpp>
#include <vector>

#include "kernels/sm80/fwd_config.h"

using namespace cute;
using Config = flash::sm80::FwdConfig<flash::Dtype::kBf16, 128, flash::plan::FwdVariant::kPlain>;
using Element = Config::Element;
using KvTile = Shape<Int<Config::kBlockN>, Int<Config::kHeadDim>>;    // 64 keys
using ScoreTile = Shape<Int<Config::kBlockM>, Int<Config::kBlockN>>;  // 128 queries x 64 keys

#define SHOW(...) (std::printf("%-58s ", #__VA_ARGS__), print(__VA_ARGS__), std::printf("\n"))

void layouts() {
  std::printf("Layout: a function from coordinates to an offset, (shape):(strides)\n");
  const auto rows = make_layout(Shape<_4, _8>{}, LayoutRight{});
  SHOW(rows);
  SHOW(rows(1, 2));
  SHOW(size(rows));
  const Config::SmemLayoutKv swizzled;
  SHOW(shape(swizzled));
  SHOW(swizzled(0, 8));
  SHOW(swizzled(1, 0));
  SHOW(swizzled(1, 8));
}

void tensors() {
  std::printf("\nTensor: a pointer and a layout. Every number of a key is its index here\n");
  std::vector<Element> keys(256 * Config::kHeadDim), memory(Config::kSmemKv);
  for (size_t i = 0; i < keys.size(); ++i) keys[i] = Element(float(i / Config::kHeadDim));
  const auto k = make_tensor(make_gmem_ptr(keys.data()), make_layout(Shape<_256, _128>{}, LayoutRight{}));
  auto smem_k = make_tensor(make_smem_ptr(memory.data()), Config::SmemLayoutKv{});
  SHOW(float(k(65, 0)));
  const auto block = local_tile(k, KvTile{}, make_coord(1, 0));
  SHOW(shape(block));
  SHOW(float(block(1, 0)));
  SHOW(shape(local_tile(k, KvTile{}, make_coord(_, 0))));
  SHOW(shape(block(_, 0)));
  copy(block, smem_k);
  SHOW(float(smem_k(1, 0)));
  SHOW(float(memory[72]));
}

void copies() {
  std::printf("\nTiledCopy: a copy instruction and which vectors a thread copies\n");
  const Config::RowCopyT::TiledCopy row_copy;
  std::vector<Element> memory(2 * Config::kSmemKv);
  const auto block = make_tensor(make_gmem_ptr(memory.data()), make_layout(KvTile{}, LayoutRight{}));
  const auto smem_k = make_tensor(make_smem_ptr(memory.data() + Config::kSmemKv), Config::SmemLayoutKv{});
  const auto thread_copy = row_copy.get_thread_slice(9);
  SHOW(size(row_copy));
  SHOW(shape(thread_copy.partition_S(block)));
  SHOW(shape(thread_copy.partition_D(smem_k)));
  const auto copied = thread_copy.partition_D(make_identity_tensor(KvTile{}));
  SHOW(copied(0, 0, 0));
  SHOW(copied(7, 0, 0));
  SHOW(copied(0, 1, 0));
  SHOW(copied(0, 0, 1));
}

void products() {
  std::printf("\nTiledMMA: a product instruction and the grid of warps that issue it\n");
  const Config::TiledMma mma;
  std::vector<Element> memory(Config::kSmemQ);
  const auto smem_q = make_tensor(make_smem_ptr(memory.data()), Config::SmemLayoutQ{});
  const auto smem_k = make_tensor(make_smem_ptr(memory.data()), Config::SmemLayoutKv{});
  SHOW(size(mma));
  SHOW(Config::TiledMma::AtomShape_MNK{});
  SHOW(tile_shape(mma));
  auto acc_s = partition_fragment_C(mma, ScoreTile{});
  SHOW(shape(acc_s));
  SHOW(size(acc_s));
  const auto thread_mma = mma.get_slice(37);
  const auto owned = thread_mma.partition_C(make_identity_tensor(ScoreTile{}));
  SHOW(owned(0));
  SHOW(owned(1));
  SHOW(owned(2));
  SHOW(shape(thread_mma.partition_fragment_A(smem_q)));
  SHOW(shape(thread_mma.partition_fragment_B(smem_k)));
  SHOW(shape(flash::row_col_view(acc_s)));
  SHOW(flash::AccumulatorCoords<Config::kWarps>(37u).row(1));
  SHOW(shape(flash::a_operand_layout(acc_s.layout())));
}

int main() {
  layouts();
  tensors();
  copies();
  products();
}
