// Products of the two-pass wgmma backward by one warpgroup: scores of 64 x 64 from tiles in shared memory, and rows of
// a gradient from scores in registers.
#pragma once

#include <cute/tensor.hpp>

#include "kernels/sm90/bwd_two_pass/config.h"
#include "kernels/sm90/gemm.h"

namespace flash {
namespace sm90 {

template <class Element>
using MmaScores = decltype(cute::make_tiled_mma(
    cute::GMMA::ss_op_selector<Element, Element, float, cute::Shape<cute::_64, cute::_64, cute::_16>,
                               cute::GMMA::Major::K, cute::GMMA::Major::K>()));
template <class Element, int kCols>
using MmaGradient = decltype(cute::make_tiled_mma(
    cute::GMMA::rs_op_selector<Element, Element, float, cute::Shape<cute::_64, cute::Int<kCols>, cute::_16>,
                               cute::GMMA::Major::K, cute::GMMA::Major::MN>()));
template <class Config>
using AccScores = decltype(cute::partition_fragment_C(MmaScores<typename Config::Element>{},
                                                      cute::Shape<cute::_64, cute::_64>{}));  // ((2, 2, 8), 1, 1)
template <class Config, int kCols>
using AccGradient = decltype(cute::partition_fragment_C(MmaGradient<typename Config::Element, kCols>{},
                                                        cute::Shape<cute::_64, cute::Int<kCols>>{}));
// Scores as an A operand: the layout of their accumulator registers.
using LayoutOperand = cute::Layout<cute::Shape<cute::Shape<cute::_2, cute::_2, cute::_2>, cute::_1, cute::_4>>;

// Issues acc = A B^T of two tiles of 64 rows and kCols columns; does not wait. between(k): see start_gemm().
template <class Config, int kCols, class Between>
__device__ __forceinline__ void start_scores(int thread, const typename Config::Element* a,
                                             const typename Config::Element* b, AccScores<Config>& acc,
                                             const Between& between) {
  using namespace cute;
  MmaScores<typename Config::Element> mma;
  const auto slice = mma.get_slice(thread);
  const auto layout = typename Config::template Tile<kCols>{};
  start_gemm(mma, slice.partition_fragment_A(make_tensor(make_smem_ptr(a), layout)),
             slice.partition_fragment_B(make_tensor(make_smem_ptr(b), layout)), acc, true, between);
}

// Issues acc += scores * tile, of 64 rows and kCols columns; does not wait.
template <class Config, int kCols, class Scores>
__device__ __forceinline__ void start_gradient(int thread, const Scores& scores, const typename Config::Element* tile,
                                               AccGradient<Config, kCols>& acc) {
  using namespace cute;
  MmaGradient<typename Config::Element, kCols> mma;
  const auto rows = make_tensor(make_smem_ptr(tile), typename Config::template TransposedTile<kCols>{});
  start_gemm(mma, make_tensor(scores.data(), LayoutOperand{}), mma.get_slice(thread).partition_fragment_B(rows), acc,
             false);
}

}  // namespace sm90
}  // namespace flash
