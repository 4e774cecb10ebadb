// Tile and shared memory of the wgmma decode kernel: 64 packed rows.
#pragma once

#include "kernels/common/element.h"
#include "kernels/common/partial.h"
#include "kernels/decode/cta_work.h"
#include "kernels/tma/mbarrier.h"
#include "kernels/tma/swizzle.h"
#include "params/kvcache.h"
#include "plan/kv_wgmma.h"

namespace flash {
namespace decode {

// Two consumer warpgroups of the same 64 rows take n_blocks in turn; four producer warps copy K and V.
template <Dtype kDtype_, int kHeadDim_>
struct KvWgmmaConfig {
  static constexpr Dtype kDtype = kDtype_;
  using Element = ElementOf<kDtype>;
  static constexpr plan::KvTile kTile = plan::kv_tile(kHeadDim_, plan::kKvSizes - 1);
  static constexpr int kHeadDim = kTile.head_dim, kRows = kTile.rows(), kKeys = plan::kv_block_n(kTile);
  static constexpr int kStages = plan::kKvWgmmaStages;
  static constexpr int kConsumers = 2, kConsumerThreads = 128 * kConsumers;
  static constexpr int kProducerWarps = 4, kProducerThreads = 32 * kProducerWarps,
                       kThreads = kProducerThreads + kConsumerThreads;
  static constexpr int kProducerRegisters = 88, kConsumerRegisters = 208;  // 168 of each thread at launch
  static_assert(kHeadDim == kHeadDim_ && kRows == 64 && kHeadDim * kKeys == 8192, "both products have 32 KB operands");

  // Q, K and V are sequences of matrices of 64 columns, in which 128-byte rows are swizzled.
  static constexpr int kAtomCols = 64, kVectors = kHeadDim / tma::kVectorCols, kSlices = kHeadDim / 16;

  // Element offset of a 16-byte vector of a tile of `rows` rows.
  __device__ __forceinline__ static int vector_offset(int rows, int row, int vector) {
    constexpr int kAtomVectors = kAtomCols / tma::kVectorCols;
    return vector / kAtomVectors * rows * kAtomCols + tma::swizzle_offset(kAtomCols, row, vector % kAtomVectors);
  }
};

template <class Config>
struct KvWgmmaStorage {
  using Element = typename Config::Element;
  alignas(1024) Element q[Config::kRows * Config::kHeadDim];
  alignas(1024) Element k[Config::kStages][Config::kKeys * Config::kHeadDim];
  alignas(1024) Element v[Config::kStages][Config::kKeys * Config::kHeadDim];
  alignas(16) float out[Config::kRows * Config::kHeadDim];  // of the second consumer, then of both
  RowStats stats[2][Config::kRows];                         // of the second consumer, and of both
  int64_t scratch[Config::kThreads / 32 + 2];               // find_cta_work()
  CtaWork cta_work;
  tma::Barrier full[Config::kStages];   // arrivals: one of each producer thread
  tma::Barrier empty[Config::kStages];  // arrivals: one of each warp of the consumer
};

}  // namespace decode
}  // namespace flash
