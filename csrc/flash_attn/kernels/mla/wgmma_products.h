// The products of a consumer of the wgmma MLA decode kernel, and the registers that they read and write.
#pragma once

#include <cute/tensor.hpp>

#include "kernels/mla/wgmma_config.h"
#include "kernels/sm90/gemm.h"

namespace flash {
namespace mla {

template <class Config>
struct MlaProducts {
  using Element = typename Config::Element;
  template <int kN>
  using Shape = cute::Shape<cute::_64, cute::Int<kN>, cute::_16>;
  static constexpr cute::GMMA::Major kKMajor = cute::GMMA::Major::K, kMnMajor = cute::GMMA::Major::MN;
  using MmaScores = decltype(cute::make_tiled_mma(
      cute::GMMA::ss_op_selector<Element, Element, float, Shape<Config::kKeys>, kKMajor, kKMajor>()));
  using MmaHeldScores = decltype(cute::make_tiled_mma(
      cute::GMMA::rs_op_selector<Element, Element, float, Shape<Config::kKeys>, kKMajor, kKMajor>()));
  using MmaOwn = decltype(cute::make_tiled_mma(
      cute::GMMA::rs_op_selector<Element, Element, float, Shape<Config::kHalf>, kKMajor, kMnMajor>()));
  using MmaOther = decltype(cute::make_tiled_mma(
      cute::GMMA::ss_op_selector<Element, Element, float, Shape<Config::kHalf>, kKMajor, kMnMajor>()));
  static_assert(decltype(cute::tile_size<1>(MmaScores{}))::value == Config::kKeys, "there is a wgmma of this width");
  static_assert(decltype(cute::tile_size<1>(MmaOwn{}))::value == Config::kHalf, "there is a wgmma of this width");
  template <int kCols>
  using Tile = decltype(cute::tile_to_shape(cute::GMMA::Layout_K_SW128_Atom<Element>{},
                                            cute::Shape<cute::_64, cute::Int<kCols>>{}));
  // The same bytes of half of the latent columns as (columns, keys).
  using HalfTransposed = decltype(cute::tile_to_shape(cute::GMMA::Layout_MN_SW128_Atom<Element>{},
                                                      cute::Shape<cute::Int<Config::kHalf>, cute::Int<Config::kKeys>>{},
                                                      cute::Step<cute::_2, cute::_1>{}));
  template <int kSlices>  // of 16 columns: an A operand in registers, those of the accumulator of S
  using Fragment = decltype(cute::make_tensor<Element>(
      cute::Layout<cute::Shape<cute::Shape<cute::_2, cute::_2, cute::_2>, cute::_1, cute::Int<kSlices>>>{}));

  decltype(cute::partition_fragment_C(MmaScores{}, cute::Shape<cute::_64, cute::Int<Config::kKeys>>{})) scores;
  decltype(cute::partition_fragment_C(MmaOwn{}, cute::Shape<cute::_64, cute::Int<Config::kHalf>>{})) acc_o;
  Fragment<Config::kKeys / 16> probs;
  Fragment<Config::kHeldSlices> held_query;

  // Of 8 keys or columns `eight`: row lane / 4 + 8 i, column lane % 4 * 2 + col.
  __device__ __forceinline__ float& score(int eight, int i, int col) { return scores(eight * 4 + i * 2 + col); }
  __device__ __forceinline__ float& out(int eight, int i, int col) { return acc_o(eight * 4 + i * 2 + col); }

  __device__ __forceinline__ void clear_out() { cute::clear(acc_o); }

  __device__ __forceinline__ void pack_probs() {
    auto pairs = cute::recast<uint32_t>(probs);
#pragma unroll
    for (int i = 0; i < cute::size(pairs); ++i) pairs(i) = pack_pair(scores(2 * i), scores(2 * i + 1), Element{});
  }

  // The four registers of 16 keys.
  __device__ __forceinline__ uint32_t prob_pair(int sixteen, int i) const {
    return cute::recast<const uint32_t>(probs)(sixteen * 4 + i);
  }

  __device__ __forceinline__ void hold_query(int slice, const uint32_t (&registers)[4]) {
#pragma unroll
    for (int i = 0; i < 4; ++i) cute::recast<uint32_t>(held_query)(slice * 4 + i) = registers[i];
  }

  // Issues S = Q K^T of one step, in the order of scored_atom(kFirst, ...), each atom after landed.wait(atom).
  template <int kFirst, class Landed>
  __device__ __forceinline__ void start_scores(const Element* q, const Element* keys, const Landed& landed) {
    using namespace cute;
    MmaHeldScores held;
    MmaScores mma;
    const auto thread = mma.get_slice(threadIdx.x % 128);
    const auto a = thread.partition_fragment_A(make_tensor(make_smem_ptr(q), Tile<Config::kDim>{}));
    const auto b = thread.partition_fragment_B(make_tensor(make_smem_ptr(keys), Tile<Config::kDim>{}));
    warpgroup_fence_operand(scores);
    held.accumulate_ = mma.accumulate_ = GMMA::ScaleOut::Zero;
    bool has_landed = landed.test(Config::scored_atom(kFirst, 0));
#pragma unroll
    for (int i = 0; i < Config::kAtoms; ++i) {
      const int atom = Config::scored_atom(kFirst, i), place = Config::held_place(kFirst, atom);
      if (!has_landed) landed.wait(atom);
      landed.fence(atom);
      if (i + 1 < Config::kAtoms) has_landed = landed.test(Config::scored_atom(kFirst, i + 1));
      warpgroup_arrive();  // ptxas would add it after a loop
#pragma unroll
      for (int k = 0; k < Config::kSlices; ++k) {
        const int slice = atom * Config::kSlices + k;
        if (place >= 0) {
          gemm(held, held_query(_, _, place * Config::kSlices + k), b(_, _, slice), scores);
        } else {
          gemm(mma, a(_, _, slice), b(_, _, slice), scores);
        }
        held.accumulate_ = mma.accumulate_ = GMMA::ScaleOut::One;
      }
    }
    warpgroup_commit_batch();
    warpgroup_fence_operand(scores);
  }

  __device__ __forceinline__ static auto values(const Element* half) {
    return cute::make_tensor(cute::make_smem_ptr(half), HalfTransposed{});
  }

  // Issues O += P V of one step and half of the columns, with this consumer's own probabilities.
  __device__ __forceinline__ void start_own_values(const Element* half) {
    MmaOwn mma;
    sm90::start_gemm(mma, probs, mma.get_slice(threadIdx.x % 128).partition_fragment_B(values(half)), acc_o, false);
  }

  // The same with those that the other consumer left in shared memory.
  __device__ __forceinline__ void start_other_values(const Element* shared_probs, const Element* half) {
    using namespace cute;
    MmaOther mma;
    const auto thread = mma.get_slice(threadIdx.x % 128);
    const auto a = make_tensor(make_smem_ptr(shared_probs), Tile<Config::kKeys>{});
    sm90::start_gemm(mma, thread.partition_fragment_A(a), thread.partition_fragment_B(values(half)), acc_o, false);
  }

  __device__ __forceinline__ void wait_for_scores() { sm90::wait_for<0>(scores); }
  __device__ __forceinline__ void wait_for_out() {
    sm90::wait_for<0>(acc_o);
    cute::warpgroup_fence_operand(probs);
  }
};

// stmatrix.x4, the opposite of sm80::load_matrices().
template <class Element>
__device__ __forceinline__ void store_matrices(Element* row, uint32_t r0, uint32_t r1, uint32_t r2, uint32_t r3) {
  cute::SM90_U32x4_STSM_N::copy(r0, r1, r2, r3, *reinterpret_cast<cute::uint128_t*>(row));
}

}  // namespace mla
}  // namespace flash
