// Shared memory of the wgmma forward of head dims above 256: tiles, mbarriers, and who waits for whom at each.
#pragma once

#include "kernels/sm90/wide_fwd_config.h"
#include "kernels/tma/mbarrier.h"

namespace flash {
namespace sm90 {

// The lagging row max of a row, and the factor to it from that of the step before.
struct RowReference {
  float max, correction;
};

// A wait by parity takes a phase for the one two before: who waits for one phase of a barrier has to wait for all.
// Hence the chunks of K, which the consumers read in turn, have full barriers for each consumer.
template <class Config>
struct WideFwdStorage {
  using Element = typename Config::Element;

  alignas(1024) Element v[Config::kConsumers][Config::kSlots][Config::kChunkElements];  // by half of the columns
  alignas(1024) Element q[Config::kChunks - Config::kHeldChunks][Config::kChunkElements];
  alignas(1024) Element k[Config::kChunks][Config::kChunkElements];  // O is staged over it
  alignas(1024) Element probs[Config::kChunkElements];
  RowReference references[Config::kBlockM];  // with `probs`
  bool is_large[4];                          // Softmax::is_large of each warp, with `probs`
  float row_sums[Config::kConsumers][2][128];
  // full: 1 arrival plus the bytes. empty: one arrival of each warp that reads.
  tma::Barrier q_full, q_held;  // q_held: the first chunks are in registers
  tma::Barrier k_full[Config::kConsumers][Config::kChunks], k_empty[Config::kChunks];
  tma::Barrier v_full[Config::kConsumers][Config::kSlots], v_empty[Config::kConsumers][Config::kSlots];
  tma::Barrier v_landed[Config::kConsumers];    // of parts with rows to clear before they are full
  tma::Barrier probs_full[Config::kConsumers];  // by the consumer that wrote them

  // The memory of a chunk of Q: the held ones become slots of V.
  __device__ __forceinline__ Element* query(int chunk) {
    return chunk < Config::kHeldChunks ? v[chunk][Config::kSlots - 1] : q[chunk - Config::kHeldChunks];
  }

  // Called by one thread, before Barrier::fence_init().
  __device__ __forceinline__ void init_barriers() {
    constexpr int kReaders = 4;  // warps of a consumer
    q_full.init(1);
    q_held.init(kReaders * Config::kConsumers);
#pragma unroll 1
    for (int chunk = 0; chunk < Config::kChunks; ++chunk) {
      for (int consumer = 0; consumer < Config::kConsumers; ++consumer) k_full[consumer][chunk].init(1);
      k_empty[chunk].init(kReaders);
    }
#pragma unroll 1
    for (int half = 0; half < Config::kConsumers; ++half) {
      for (int slot = 0; slot < Config::kSlots; ++slot) {
        v_full[half][slot].init(1);
        v_empty[half][slot].init(kReaders);
      }
      v_landed[half].init(1);
      probs_full[half].init(kReaders);
    }
  }
};

}  // namespace sm90
}  // namespace flash
