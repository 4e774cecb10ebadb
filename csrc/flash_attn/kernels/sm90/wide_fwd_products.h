// The products of a consumer of the wgmma forward of head dims above 256, and the registers that they read and write.
#pragma once

#include <cute/arch/copy_sm75.hpp>
#include <cute/tensor.hpp>

#include "kernels/common/accumulator.h"
#include "kernels/common/convert.h"
#include "kernels/sm90/gemm.h"
#include "kernels/sm90/stage_o.h"
#include "kernels/sm90/wide_fwd_config.h"

namespace flash {
namespace sm90 {

template <class Config>
struct WideFwdProducts {
  using Element = typename Config::Element;
  static constexpr int kN = Config::kBlockN, kHalf = Config::kHalf;
  template <int kCols>
  using Shape = cute::Shape<cute::_64, cute::Int<kCols>, cute::_16>;
  static constexpr cute::GMMA::Major kKMajor = cute::GMMA::Major::K, kMnMajor = cute::GMMA::Major::MN;
  using MmaScores = decltype(cute::make_tiled_mma(
      cute::GMMA::ss_op_selector<Element, Element, float, Shape<kN>, kKMajor, kKMajor>()));
  using MmaHeldScores = decltype(cute::make_tiled_mma(
      cute::GMMA::rs_op_selector<Element, Element, float, Shape<kN>, kKMajor, kKMajor>()));
  using MmaOwn = decltype(cute::make_tiled_mma(
      cute::GMMA::rs_op_selector<Element, Element, float, Shape<kHalf>, kKMajor, kMnMajor>()));
  using MmaOther = decltype(cute::make_tiled_mma(
      cute::GMMA::ss_op_selector<Element, Element, float, Shape<kHalf>, kKMajor, kMnMajor>()));
  static_assert(decltype(cute::tile_size<1>(MmaScores{}))::value == kN, "there is a wgmma of this width");
  static_assert(decltype(cute::tile_size<1>(MmaOwn{}))::value == kHalf, "there is a wgmma of this width");
  template <int kCols>
  using Tile = decltype(cute::tile_to_shape(cute::GMMA::Layout_K_SW128_Atom<Element>{},
                                            cute::Shape<cute::_64, cute::Int<kCols>>{}));
  // All slots of a ring of V as (columns, keys, slot).
  using Values = decltype(cute::tile_to_shape(
      cute::GMMA::Layout_MN_SW128_Atom<Element>{},
      cute::Shape<cute::Int<kHalf>, cute::Int<Config::kPartKeys>, cute::Int<Config::kSlots>>{},
      cute::Step<cute::_2, cute::_1, cute::_3>{}));
  template <int kSlices>  // of 16 columns: an A operand in registers, those of the accumulator of S
  using Fragment = decltype(cute::make_tensor<Element>(
      cute::Layout<cute::Shape<cute::Shape<cute::_2, cute::_2, cute::_2>, cute::_1, cute::Int<kSlices>>>{}));

  decltype(cute::partition_fragment_C(MmaScores{}, cute::Shape<cute::_64, cute::Int<kN>>{})) acc_s;
  decltype(cute::partition_fragment_C(MmaOwn{}, cute::Shape<cute::_64, cute::Int<kHalf>>{})) acc_o;
  Fragment<kN / 16> probs;
  Fragment<Config::kHeldSlices> held_query;

  __device__ __forceinline__ auto scores() { return row_col_view(acc_s); }
  __device__ __forceinline__ auto out() { return row_col_view(acc_o); }
  __device__ __forceinline__ void clear_out() { cute::clear(acc_o); }

  __device__ __forceinline__ void pack_probs() {
    auto pairs = cute::recast<uint32_t>(probs);
#pragma unroll
    for (int i = 0; i < cute::size(pairs); ++i) pairs(i) = pack_pair(acc_s(2 * i), acc_s(2 * i + 1), Element{});
  }

  // P for the other consumer. No fence.
  __device__ __forceinline__ void store_probs(Element* shared_probs) const {
    const StagedRows<Config::kChunkCols> rows(shared_probs);
    const auto pairs = cute::recast<const uint32_t>(probs);
#pragma unroll
    for (int i = 0; i < kN / 16; ++i) {
      rows.store(16 * i, {pairs(4 * i), pairs(4 * i + 1), pairs(4 * i + 2), pairs(4 * i + 3)});
    }
  }

  // O times o_scale, in chunks of columns. No fence.
  __device__ __forceinline__ void stage_out(Element* chunks, const float (&o_scale)[2]) const {
    stage_o<Config::kChunkCols, kHalf>(acc_o, chunks, o_scale);
  }

  // Chunk `chunk` of Q into registers.
  __device__ __forceinline__ void hold_query(int chunk, const Element* q) {
    const int lane = threadIdx.x % 32, row = threadIdx.x % 128 / 32 * 16 + lane % 16;
    auto registers = cute::recast<uint32_t>(held_query);
#pragma unroll
    for (int i = 0; i < Config::kChunkSlices; ++i) {
      const Element* const from = q + tma::swizzle_offset(Config::kChunkCols, row, 2 * i + lane / 16);
      const int first = (chunk * Config::kChunkSlices + i) * 4;
      cute::SM75_U32x4_LDSM_N::copy(*reinterpret_cast<const cute::uint128_t*>(from), registers(first),
                                    registers(first + 1), registers(first + 2), registers(first + 3));
    }
  }

  // Issues S (+)= Q K^T of chunk kChunk of the columns. q: the chunks that are not held.
  template <int kChunk>
  __device__ __forceinline__ void start_scores(const Element* q, const Element* k) {
    using namespace cute;
    constexpr int kSlices = Config::kChunkSlices, kHeld = Config::kHeldSlices;
    const auto scale = [](int slice) { return slice == 0 ? GMMA::ScaleOut::Zero : GMMA::ScaleOut::One; };
    MmaScores mma;
    MmaHeldScores held;
    const auto thread = mma.get_slice(threadIdx.x % 128);
    const auto b = thread.partition_fragment_B(make_tensor(make_smem_ptr(k), Tile<Config::kHeadDim>{}));
    warpgroup_fence_operand(acc_s);
    warpgroup_arrive();
    if constexpr (kChunk < Config::kHeldChunks) {
#pragma unroll
      for (int i = kChunk * kSlices; i < (kChunk + 1) * kSlices; ++i) {
        held.accumulate_ = scale(i);
        gemm(held, held_query(_, _, i), b(_, _, i), acc_s);
      }
    } else {
      constexpr int kCols = Config::kHeadDim - Config::kHeldChunks * Config::kChunkCols;
      const auto a = thread.partition_fragment_A(make_tensor(make_smem_ptr(q), Tile<kCols>{}));
      mma.accumulate_ = GMMA::ScaleOut::One;
#pragma unroll
      for (int i = kChunk * kSlices; i < (kChunk + 1) * kSlices; ++i) gemm(mma, a(_, _, i - kHeld), b(_, _, i), acc_s);
    }
    warpgroup_commit_batch();
  }

  // Issues O += P V of part kPart of the keys, from a slot of the ring, with this consumer's own probabilities.
  template <int kPart>
  __device__ __forceinline__ void start_own_values(const Element* ring, int slot) {
    using namespace cute;
    MmaOwn mma;
    const auto thread = mma.get_slice(threadIdx.x % 128);
    const auto v = thread.partition_fragment_B(make_tensor(make_smem_ptr(ring), Values{}));
    start_values(mma, probs(_, _, kPart), v(_, _, 0, slot));
  }

  // The same with those that the other consumer left in shared memory.
  template <int kPart>
  __device__ __forceinline__ void start_other_values(const Element* shared_probs, const Element* ring, int slot) {
    using namespace cute;
    MmaOther mma;
    const auto thread = mma.get_slice(threadIdx.x % 128);
    const auto a = thread.partition_fragment_A(make_tensor(make_smem_ptr(shared_probs), Tile<kN>{}));
    const auto v = thread.partition_fragment_B(make_tensor(make_smem_ptr(ring), Values{}));
    start_values(mma, a(_, _, kPart), v(_, _, 0, slot));
  }

  template <class Mma, class A, class B>
  __device__ __forceinline__ void start_values(Mma& mma, const A& a, const B& b) {
    cute::warpgroup_fence_operand(acc_o);
    cute::warpgroup_arrive();
    mma.accumulate_ = cute::GMMA::ScaleOut::One;
    cute::gemm(mma, a, b, acc_o);
    cute::warpgroup_commit_batch();
  }

  // Until all but the last kPending parts or chunks are multiplied.
  template <int kPending>
  __device__ __forceinline__ void wait() {
    cute::warpgroup_wait<kPending>();
  }
  __device__ __forceinline__ void wait_for_scores() { wait_for<0>(acc_s); }
  __device__ __forceinline__ void wait_for_out() {
    wait_for<0>(acc_o);
    cute::warpgroup_fence_operand(probs);
  }
};

}  // namespace sm90
}  // namespace flash
