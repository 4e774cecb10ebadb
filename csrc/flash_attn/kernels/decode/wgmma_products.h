// The products of the wgmma decode kernel.
#pragma once

#include <cute/tensor.hpp>

#include "kernels/common/accumulator.h"
#include "kernels/decode/wgmma_config.h"
#include "kernels/sm80/warp_ops.h"
#include "kernels/sm90/gemm.h"

namespace flash {
namespace decode {

// The accumulators of a consumer: S of 64 rows and an n_block's keys, O of 64 rows.
template <class Config>
struct KvWgmmaProducts {
  using Element = typename Config::Element;
  static constexpr cute::GMMA::Major kKMajor = cute::GMMA::Major::K, kMnMajor = cute::GMMA::Major::MN;
  template <int kN, cute::GMMA::Major kMajor>
  using Mma = decltype(cute::make_tiled_mma(
      cute::GMMA::rs_op_selector<Element, Element, float, cute::Shape<cute::_64, cute::Int<kN>, cute::_16>, kKMajor,
                                 kMajor>()));
  using MmaScores = Mma<Config::kKeys, kKMajor>;
  using MmaOut = Mma<Config::kHeadDim, kMnMajor>;
  using Keys = decltype(cute::tile_to_shape(cute::GMMA::Layout_K_SW128_Atom<Element>{},
                                            cute::Shape<cute::Int<Config::kKeys>, cute::Int<Config::kHeadDim>>{}));
  // The same bytes as (columns, keys).
  using Values = decltype(cute::tile_to_shape(cute::GMMA::Layout_MN_SW128_Atom<Element>{},
                                              cute::Shape<cute::Int<Config::kHeadDim>, cute::Int<Config::kKeys>>{},
                                              cute::Step<cute::_2, cute::_1>{}));
  template <int kSlices>  // of 16 columns: an A operand in registers
  using Fragment = decltype(cute::make_tensor<Element>(
      cute::Layout<cute::Shape<cute::Shape<cute::_2, cute::_2, cute::_2>, cute::_1, cute::Int<kSlices>>>{}));

  decltype(cute::partition_fragment_C(MmaScores{}, cute::Shape<cute::_64, cute::Int<Config::kKeys>>{})) acc_s;
  decltype(cute::partition_fragment_C(MmaOut{}, cute::Shape<cute::_64, cute::Int<Config::kHeadDim>>{})) acc_o;
  Fragment<Config::kSlices> query;
  Fragment<Config::kKeys / 16> probs;

  __device__ __forceinline__ void load_query(const Element* q, int warp, int lane) {
    auto registers = cute::recast<uint32_t>(query);
#pragma unroll
    for (int slice = 0; slice < Config::kSlices; ++slice) {
      uint32_t matrices[4];
      sm80::load_matrices(matrices,
                          q + Config::vector_offset(Config::kRows, warp * 16 + lane % 16, slice * 2 + lane / 16));
#pragma unroll
      for (int i = 0; i < 4; ++i) registers(slice * 4 + i) = matrices[i];
    }
  }

  __device__ __forceinline__ auto scores() { return row_col_view(acc_s); }
  __device__ __forceinline__ auto out() { return row_col_view(acc_o); }
  __device__ __forceinline__ void clear_out() { cute::clear(acc_o); }

  __device__ __forceinline__ void multiply_keys(const Element* k) {
    MmaScores mma;
    const auto keys = cute::make_tensor(cute::make_smem_ptr(k), Keys{});
    sm90::start_gemm(mma, query, mma.get_slice(threadIdx.x % 128).partition_fragment_B(keys), acc_s, true);
    sm90::wait_for<0>(acc_s);
  }

  __device__ __forceinline__ void multiply_values(const Element* v) {
    auto pairs = cute::recast<uint32_t>(probs);
#pragma unroll
    for (int i = 0; i < cute::size(pairs); ++i) pairs(i) = pack_pair(acc_s(2 * i), acc_s(2 * i + 1), Element{});
    MmaOut mma;
    const auto values = cute::make_tensor(cute::make_smem_ptr(v), Values{});
    sm90::start_gemm(mma, probs, mma.get_slice(threadIdx.x % 128).partition_fragment_B(values), acc_o, false);
    sm90::wait_for<0>(acc_o);
    cute::warpgroup_fence_operand(probs);
  }
};

}  // namespace decode
}  // namespace flash
