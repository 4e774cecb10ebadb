// Tile of the wgmma forward of head dims above 256: 64 rows against 64 keys a step.
#pragma once

#include "kernels/common/element.h"
#include "plan/tiles.h"

namespace flash {
namespace sm90 {

// Two consumer warpgroups of the same 64 rows. S by keys: consumer w has the steps of parity w. O by columns: consumer
// w has half w. So each needs the probabilities of the other: they pass through shared memory.
template <Dtype kDtype_>
struct WideFwdConfig {
  static constexpr Dtype kDtype = kDtype_;
  using Element = ElementOf<kDtype>;
  static constexpr int kHeadDim = plan::kSm90WideHeadDim;
  static constexpr int kBlockM = plan::kSm90WideBlockM, kBlockN = plan::kSm90WideBlockN;
  static constexpr int kConsumers = 2, kHalf = kHeadDim / kConsumers;  // kHalf: columns of O of a consumer
  static constexpr int kThreads = plan::kSm90WideThreads;
  static constexpr int kProducerRegisters = 40, kConsumerRegisters = 232;
  static_assert(kThreads == 128 * (1 + kConsumers) && kBlockM == 64 && kBlockN == 64);
  static_assert(128 * kProducerRegisters + 128 * kConsumers * kConsumerRegisters <= 65536);

  // Q and K are sequences of chunks of 64 columns, in which 128-byte rows are swizzled. P is such a chunk.
  static constexpr int kChunkCols = plan::kSm90WideChunkCols, kChunks = kHeadDim / kChunkCols;
  static constexpr int kChunkElements = kBlockM * kChunkCols, kChunkSlices = kChunkCols / 16;  // slices: of a wgmma

  // Half of the columns of V is a sequence of parts of 16 keys, in a ring of slots.
  static constexpr int kPartKeys = plan::kSm90WidePartKeys, kParts = kBlockN / kPartKeys;
  static constexpr int kSlots = plan::kSm90WideValueSlots;
  static constexpr int kHalfAtoms = kHalf / kChunkCols;
  static_assert(kPartKeys * kHalf == kChunkElements && kSlots > kParts);

  // Consumers hold these first chunks of Q in registers: a product with both operands in shared memory takes all of its
  // bandwidth, which copies and the other consumer need. Their memory becomes the last slot of each ring of V.
  static constexpr int kHeldChunks = plan::kSm90WideHeldChunks, kHeldSlices = kHeldChunks * kChunkSlices;
  static_assert(kHeldChunks == kConsumers);
};

}  // namespace sm90
}  // namespace flash
