// The products of a consumer of the wgmma backward of head dims above 256, and the registers that they read and write.
#pragma once

#include <cute/arch/copy_sm75.hpp>
#include <cute/tensor.hpp>

#include "kernels/common/accumulator.h"
#include "kernels/common/convert.h"
#include "kernels/sm90/gemm.h"
#include "kernels/sm90/stage_o.h"
#include "kernels/sm90/wide_bwd/config.h"

namespace flash {
namespace sm90 {

template <class Config>
struct WideBwdProducts {
  using Element = typename Config::Element;
  template <int kCols>
  using Shape = cute::Shape<cute::_64, cute::Int<kCols>, cute::_16>;
  static constexpr cute::GMMA::Major kKMajor = cute::GMMA::Major::K, kMnMajor = cute::GMMA::Major::MN;
  using MmaScores = decltype(cute::make_tiled_mma(
      cute::GMMA::ss_op_selector<Element, Element, float, Shape<64>, kKMajor, kKMajor>()));
  using MmaHeldScores = decltype(cute::make_tiled_mma(
      cute::GMMA::rs_op_selector<Element, Element, float, Shape<64>, kKMajor, kKMajor>()));
  using MmaHalf = decltype(cute::make_tiled_mma(
      cute::GMMA::rs_op_selector<Element, Element, float, Shape<Config::kHalf>, kKMajor, kMnMajor>()));
  using MmaChunk = decltype(cute::make_tiled_mma(
      cute::GMMA::ss_op_selector<Element, Element, float, Shape<64>, kKMajor, kMnMajor>()));
  // kChunks chunks, as columns of a matrix.
  template <int kCount>
  using Chunks = decltype(cute::tile_to_shape(cute::GMMA::Layout_K_SW128_Atom<Element>{},
                                              cute::Shape<cute::_64, cute::Int<kCount * Config::kAtomCols>>{}));
  // Chunks of a ring, each a matrix.
  template <int kSlots>
  using Ring = decltype(cute::tile_to_shape(cute::GMMA::Layout_K_SW128_Atom<Element>{},
                                            cute::Shape<cute::_64, cute::_64, cute::Int<kSlots>>{}));
  // The same bytes as (columns, rows).
  template <int kCount>
  using Transposed = decltype(cute::tile_to_shape(cute::GMMA::Layout_MN_SW128_Atom<Element>{},
                                                  cute::Shape<cute::Int<kCount * Config::kAtomCols>, cute::_64>{},
                                                  cute::Step<cute::_2, cute::_1>{}));
  template <int kSlices>  // of 16 columns: an A operand in the registers of an accumulator
  using Fragment = decltype(cute::make_tensor<Element>(
      cute::Layout<cute::Shape<cute::Shape<cute::_2, cute::_2, cute::_2>, cute::_1, cute::Int<kSlices>>>{}));

  using Scores = decltype(cute::partition_fragment_C(MmaScores{}, cute::Shape<cute::_64, cute::_64>{}));
  Scores acc_s;  // S or dP
  decltype(cute::partition_fragment_C(MmaHalf{}, cute::Shape<cute::_64, cute::Int<Config::kHalf>>{})) gradient;
  Fragment<Config::kHeldSlices> held;
  Fragment<4> operand;  // P or dS

  __device__ __forceinline__ void clear_gradient() { cute::clear(gradient); }

  __device__ __forceinline__ void hold(int chunk, const Element* from) {
    const int lane = threadIdx.x % 32, row = threadIdx.x % 128 / 32 * 16 + lane % 16;
    auto registers = cute::recast<uint32_t>(held);
#pragma unroll
    for (int i = 0; i < Config::kChunkSlices; ++i) {
      const Element* const at = from + tma::swizzle_offset(Config::kAtomCols, row, 2 * i + lane / 16);
      const int first = (chunk * Config::kChunkSlices + i) * 4;
      cute::SM75_U32x4_LDSM_N::copy(*reinterpret_cast<const cute::uint128_t*>(at), registers(first),
                                    registers(first + 1), registers(first + 2), registers(first + 3));
    }
  }

  // Issues the scores of chunk kChunk. resident: the left operand's chunks that are not held. ring: the right
  // operand's.
  template <int kChunk, int kSlots>
  __device__ __forceinline__ void start_scores(const Element* resident, const Element* ring, int slot) {
    using namespace cute;
    constexpr int kSlices = Config::kChunkSlices;
    MmaScores mma;
    MmaHeldScores mma_held;
    const auto thread = mma.get_slice(threadIdx.x % 128);
    const auto b = thread.partition_fragment_B(make_tensor(make_smem_ptr(ring), Ring<kSlots>{}))(_, _, _, slot);
    warpgroup_fence_operand(acc_s);
    warpgroup_arrive();
    if constexpr (kChunk < Config::kHeldChunks) {
#pragma unroll
      for (int i = 0; i < kSlices; ++i) {
        mma_held.accumulate_ = kChunk + i == 0 ? GMMA::ScaleOut::Zero : GMMA::ScaleOut::One;
        gemm(mma_held, held(_, _, kChunk * kSlices + i), b(_, _, i), acc_s);
      }
    } else {
      const auto a = thread.partition_fragment_A(make_tensor(make_smem_ptr(resident), Chunks<Config::kLoadedChunks>{}));
      mma.accumulate_ = GMMA::ScaleOut::One;
#pragma unroll
      for (int i = 0; i < kSlices; ++i)
        gemm(mma, a(_, _, (kChunk - Config::kHeldChunks) * kSlices + i), b(_, _, i), acc_s);
    }
    warpgroup_commit_batch();
  }

  template <int kPending>
  __device__ __forceinline__ void wait() {
    cute::warpgroup_wait<kPending>();
  }
  __device__ __forceinline__ void wait_for_scores() { wait_for<0>(acc_s); }
  __device__ __forceinline__ void wait_for_gradient() {
    wait_for<0>(gradient);
    cute::warpgroup_fence_operand(operand);
  }

  // acc_s in 16 bits.
  __device__ __forceinline__ void pack_operand() {
    auto pairs = cute::recast<uint32_t>(operand);
#pragma unroll
    for (int i = 0; i < cute::size(pairs); ++i) pairs(i) = pack_pair(acc_s(2 * i), acc_s(2 * i + 1), Element{});
  }

  __device__ __forceinline__ void store_operand(Element* chunk) const {
    const StagedRows<Config::kAtomCols> rows(chunk);
    const auto pairs = cute::recast<const uint32_t>(operand);
#pragma unroll
    for (int i = 0; i < 4; ++i) {
      rows.store(16 * i, {pairs(4 * i), pairs(4 * i + 1), pairs(4 * i + 2), pairs(4 * i + 3)});
    }
  }

  // Issues gradient += operand * chunks, of half of the columns.
  __device__ __forceinline__ void start_half(const Element* chunks) {
    using namespace cute;
    MmaHalf mma;
    const auto rows = make_tensor(make_smem_ptr(chunks), Transposed<Config::kHalfChunks>{});
    start_gemm(mma, operand, mma.get_slice(threadIdx.x % 128).partition_fragment_B(rows), gradient, false);
  }

  // Issues the same for the columns of chunk kChunk of the half, with an operand in shared memory.
  template <int kChunk>
  __device__ __forceinline__ void start_chunk(const Element* left, const Element* chunks) {
    using namespace cute;
    MmaChunk mma;
    const auto thread = mma.get_slice(threadIdx.x % 128);
    const auto a = thread.partition_fragment_A(make_tensor(make_smem_ptr(left), Chunks<1>{}));
    const auto rows = make_tensor(make_smem_ptr(chunks + kChunk * Config::kChunkElements), Transposed<1>{});
    auto part = make_tensor(gradient.data() + kChunk * 32, Scores{}.layout());
    start_gemm(mma, a, thread.partition_fragment_B(rows), part, false);
  }

  // fp32 scores in the order of registers, the same in both consumers.
  __device__ __forceinline__ void write_scores(float* buffer) const {
    auto* const vectors = reinterpret_cast<float4*>(buffer) + threadIdx.x % 128;
#pragma unroll
    for (int i = 0; i < 8; ++i) vectors[128 * i] = {acc_s(4 * i), acc_s(4 * i + 1), acc_s(4 * i + 2), acc_s(4 * i + 3)};
  }
  __device__ __forceinline__ void multiply_scores(const float* buffer) {
    const auto* const vectors = reinterpret_cast<const float4*>(buffer) + threadIdx.x % 128;
#pragma unroll
    for (int i = 0; i < 8; ++i) {
      const float4 p = vectors[128 * i];
      acc_s(4 * i) *= p.x, acc_s(4 * i + 1) *= p.y, acc_s(4 * i + 2) *= p.z, acc_s(4 * i + 3) *= p.w;
    }
  }
};

}  // namespace sm90
}  // namespace flash
