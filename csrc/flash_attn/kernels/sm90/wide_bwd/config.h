// Tiles of the wgmma backward of head dims above 256: 64 rows against 64 keys a step, in two kernels.
#pragma once

#include "kernels/common/element.h"
#include "plan/tiles.h"

namespace flash {
namespace sm90 {

// Two consumer warpgroups split a step by role: the first computes S and P, the second dP and dS. In the kernel of dK
// and dV a thread block has half of the columns of both, since registers hold no more: dV in the first consumer, dK in
// the second. In the kernel of dQ each consumer has half of its columns.
template <Dtype kDtype_>
struct WideBwdConfig {
  static constexpr Dtype kDtype = kDtype_;
  using Element = ElementOf<kDtype>;
  static constexpr bool kListed = false;  // BwdSteps
  static constexpr int kHeadDim = plan::kSm90WideHeadDim, kBlockM = 64, kBlockN = 64;
  static constexpr int kConsumers = 2, kHalf = kHeadDim / kConsumers, kThreads = plan::kSm90WideThreads;
  static constexpr int kProducerRegisters = 40, kConsumerRegisters = 232;

  // All matrices are sequences of chunks of 64 rows and 64 columns, in which 128-byte rows are swizzled.
  static constexpr int kAtomCols = plan::kSm90WideChunkCols, kChunks = kHeadDim / kAtomCols;
  static constexpr int kHalfChunks = kHalf / kAtomCols;
  static constexpr int kChunkElements = 64 * kAtomCols, kChunkSlices = kAtomCols / 16;

  // Of the resident operands of S and dP a consumer holds the first chunks in registers, see WideFwdConfig.
  static constexpr int kHeldChunks = plan::kSm90WideHeldChunks, kHeldSlices = kHeldChunks * kChunkSlices;
  static constexpr int kLoadedChunks = kChunks - kHeldChunks;

  static constexpr int kOtherSlots = plan::kSm90WideOtherSlots;     // dK and dV: chunks of the other half of Q, of dO
  static constexpr int kValueSlots = plan::kSm90WideBwdValueSlots;  // dQ: chunks of V
  static constexpr int kStatisticsStages = 2;
  static_assert(kOtherSlots >= kHeldChunks && kValueSlots >= 2 * kHeldChunks, "held chunks land in these rings");
};

}  // namespace sm90
}  // namespace flash
