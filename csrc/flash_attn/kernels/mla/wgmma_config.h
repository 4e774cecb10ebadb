// Tile of the wgmma MLA decode kernel: 64 rows against 64 keys a step.
#pragma once

#include "kernels/common/element.h"
#include "kernels/tma/mbarrier.h"
#include "kernels/tma/swizzle.h"
#include "params/mla.h"

namespace flash {
namespace mla {

// Two consumer warpgroups of the same 64 rows. S by keys: consumer w has the steps of parity w. O by columns: consumer
// w has half w. So each needs the probabilities of the other: they pass through shared memory.
//
// kFp8_: the latent columns of a cached row are e4m3 with scales, see MlaFp8Producer.
template <Dtype kDtype_, bool kFp8_ = false>
struct MlaWgmmaConfig {
  static constexpr Dtype kDtype = kDtype_;
  static constexpr bool kFp8 = kFp8_;
  using Element = ElementOf<kDtype>;
  static constexpr int kRows = 64, kKeys = 64, kStages = 2;
  static constexpr int kLatent = kMlaLatentDim, kDim = kMlaLatentDim + kMlaRopeDim;
  static constexpr int kConsumers = 2, kHalf = kLatent / kConsumers;  // kHalf: columns of O of a consumer
  static constexpr int kProducerWarps = 4, kThreads = 32 * kProducerWarps + 128 * kConsumers;
  // Named barrier at the end, with whether the request is invalid or lacks pages. Pages of FP8 rows are checked by
  // consumers: no register of the producer is left.
  static constexpr int kEndBarrier = 4, kEndThreads = kFp8 ? 128 * kConsumers : kThreads;
  static constexpr int kLaunchRegisters = 168;  // 65536 of kThreads, a multiple of 8
  static constexpr int kProducerRegisters = kFp8 ? 88 : 56, kConsumerRegisters = kFp8 ? 208 : 224;
  static_assert(kProducerRegisters + kConsumers * kConsumerRegisters <= (1 + kConsumers) * kLaunchRegisters);

  // Q, K and P are sequences of matrices of 64 columns, in which 128-byte rows are swizzled.
  static constexpr int kAtomCols = 64, kAtoms = kDim / kAtomCols, kHalfAtoms = kHalf / kAtomCols;
  static constexpr int kAtomElements = 64 * kAtomCols;  // of 64 rows or keys
  static constexpr int kAtomBytes = kAtomElements * static_cast<int>(sizeof(Element));
  static constexpr int kRopeAtom = kLatent / kAtomCols;

  // The order in which a consumer multiplies by the atoms of keys: those of half `first`, the rotated one, the others.
  static constexpr int scored_atom(int first, int i) {
    if (i == kHalfAtoms) return kRopeAtom;
    return i < kHalfAtoms ? first * kHalfAtoms + i : (1 - first) * kHalfAtoms + i - kHalfAtoms - 1;
  }

  // Keys that MlaRowProducer copies land in groups of atoms, the rotated one with the last group of half `first`. Of a
  // group the last atom's barrier tells.
  static constexpr int kGroupAtoms = 2;
  static constexpr bool begins_group(int atom) { return atom != kRopeAtom && atom % kGroupAtoms == 0; }
  static constexpr bool ends_group(int atom) { return atom % kGroupAtoms == kGroupAtoms - 1; }
  static constexpr int group_barrier(int first, int atom) {
    return atom == kRopeAtom ? (first + 1) * kHalfAtoms - 1 : atom / kGroupAtoms * kGroupAtoms + kGroupAtoms - 1;
  }
  static_assert(kHalfAtoms % kGroupAtoms == 0);

  // Of a barrier of kv_full: one of each warp that loads keys of the step, or one of each lane that copies them.
  static constexpr int landed_arrivals(bool in_groups) {
    if (kFp8) return kProducerWarps;
    return in_groups ? 32 * kProducerWarps : kProducerWarps / kStages;
  }

  // A consumer holds some atoms of Q in registers, the rotated one and the first of its half. A product with both
  // operands in shared memory takes all of its bandwidth, which loads and the other consumer need.
  static constexpr int kSlices = kAtomCols / 16, kHeldAtoms = kFp8 ? 1 : 2, kHeldSlices = kHeldAtoms * kSlices;
  static constexpr int held_atom(int half, int i) { return i == 0 ? kRopeAtom : half * kHalfAtoms; }
  static constexpr int held_place(int half, int atom) {  // -1: in shared memory
    for (int i = 0; i < kHeldAtoms; ++i) {
      if (held_atom(half, i) == atom) return i;
    }
    return -1;
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
  alignas(1024) Element first_probs[Config::kAtomElements];
  MlaReference references[Config::kRows];  // with the newest probabilities
  float row_sums[Config::kConsumers][Config::kRows];
  tma::Barrier kv_full[Config::kStages][Config::kAtoms];
  // Of a half of the latent columns; the rotated ones belong to the half of the consumer that has the step.
  tma::Barrier kv_empty[Config::kStages][2];

  // The second consumer's lie where the rotated columns of Q were, which both consumers hold in registers.
  __device__ __forceinline__ Element* probs(int consumer) {
    return consumer == 0 ? first_probs : q + Config::kRopeAtom * Config::kAtomElements;
  }
};

// Whether keys are copied by MlaRowProducer.
template <class Config>
__device__ __forceinline__ bool lands_in_groups(const Flash_mla_params& params) {
  return !Config::kFp8 && params.box_rows == 0;
}

constexpr int kCopyLanes = 8;  // of a row's 128 bytes: each 128-byte line by one instruction

template <class Config>
__device__ __forceinline__ typename Config::Element* vector_in_atom(typename Config::Element* atoms, int atom, int row,
                                                                    int vector) {
  return atoms + atom * Config::kAtomElements + tma::swizzle_offset(Config::kAtomCols, row, vector);
}

// By a producer warp, which has written its keys of a half of the latent columns, and of the rotated ones that come
// with the half of the consumer that has the step.
template <class Config>
__device__ __forceinline__ void arrive_landed(MlaWgmmaStorage<Config>& storage, int stage, int half) {
  tma::fence_buffer();
  __syncwarp();
  const int lane = threadIdx.x % 32;
  if (lane < Config::kHalfAtoms) storage.kv_full[stage][half * Config::kHalfAtoms + lane].arrive();
  if (lane == Config::kHalfAtoms && half == stage) storage.kv_full[stage][Config::kRopeAtom].arrive();
}

}  // namespace mla
}  // namespace flash
