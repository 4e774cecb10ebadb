// Tile of the wgmma MLA decode kernel: 64 rows against 64 keys a step.
#pragma once

#include "kernels/common/element.h"
#include "kernels/tma/mbarrier.h"
#include "params/mla.h"

namespace flash {
namespace mla {

// Two consumer warpgroups of the same 64 rows. S by keys: consumer w has the steps of parity w. O by columns: consumer
// w has half w. So each needs the probabilities of the other: they pass through shared memory.
template <Dtype kDtype_>
struct MlaWgmmaConfig {
  static constexpr Dtype kDtype = kDtype_;
  using Element = ElementOf<kDtype>;
  static constexpr int kRows = 64, kKeys = 64, kStages = 2;
  static constexpr int kLatent = kMlaLatentDim, kDim = kMlaLatentDim + kMlaRopeDim;
  static constexpr int kConsumers = 2, kHalf = kLatent / kConsumers;  // kHalf: columns of O of a consumer
  static constexpr int kThreads = 128 * (1 + kConsumers);
  static constexpr int kProducerRegisters = 40, kConsumerRegisters = 232;
  static_assert(128 * kProducerRegisters + 128 * kConsumers * kConsumerRegisters <= 65536);

  // Q, K and P are sequences of matrices of 64 columns, in which 128-byte rows are swizzled.
  static constexpr int kAtomCols = 64, kAtoms = kDim / kAtomCols, kHalfAtoms = kHalf / kAtomCols;
  static constexpr int kAtomElements = 64 * kAtomCols;  // of 64 rows or keys
  static constexpr int kRopeAtom = kLatent / kAtomCols;

  // A consumer holds some slices of 16 columns of Q in registers: the rotated columns and the first atom of its half.
  // A product with both operands in shared memory takes all of its bandwidth, which copies and the other consumer need.
  static constexpr int kSlices = kAtomCols / 16, kHeldSlices = 2 * kSlices;
  static constexpr int held_slice(int half, int k) {
    return k < kSlices ? kRopeAtom * kSlices + k : half * kHalfAtoms * kSlices + k - kSlices;
  }
  static_assert(kRows == 64 && kKeys == 64 && kMlaRopeDim == kAtomCols && kStages == kConsumers);
};

// The running reference of a row's probabilities, and the factor from the reference of the step before.
struct MlaReference {
  float max, correction;
};

template <class Config>
struct MlaWgmmaStorage {
  using Element = typename Config::Element;
  alignas(1024) Element q[Config::kAtoms * Config::kAtomElements];
  alignas(1024) Element kv[Config::kStages][Config::kAtoms * Config::kAtomElements];  // latent columns, then rotated
  alignas(1024) Element probs[Config::kAtomElements];
  MlaReference references[Config::kRows];  // with `probs`
  float row_sums[Config::kConsumers][Config::kRows];
  // Of a stage and a half of the latent columns; the rotated ones come with the half of the consumer that has the step.
  tma::Barrier kv_full[Config::kStages][2], kv_empty[Config::kStages][2];
  tma::Barrier kv_begun[Config::kStages];       // the half with the rotated columns has been asked for
  tma::Barrier probs_full[Config::kConsumers];  // by the consumer that wrote them
};

}  // namespace mla
}  // namespace flash
