// Shared memory of the wgmma backward: tiles, barriers, and who waits for whom at each of them.
#pragma once

#include "common/sequence.h"
#include "sm90/barrier.h"
#include "sm90/bwd_config.h"
#include "sm90/ring.h"

namespace flash {
namespace sm90 {

template <class Config>
struct BwdStorage {
  using Element = typename Config::Element;

  alignas(1024) Element k[Config::kSmemKv];  // in the end dK
  alignas(1024) Element v[Config::kSmemKv];  // in the end dV
  alignas(1024) Element q[Config::kStages][Config::kSmemQ];
  alignas(1024) Element dout[Config::kStages][Config::kSmemQ];
  // dS^T of both consumers. Two of them: a consumer that writes one has passed the barrier behind which the other one
  // had finished reading it. Consumers with the same keys have one each.
  alignas(1024) Element ds[2][Config::kSmemDs];
  alignas(128) float dq[Config::kConsumerWarps][Config::kDqStaged > 0 ? Config::kDqStaged : 1];  // of each warp
  alignas(16) float lse_log2[Config::kStages][Config::kBlockM];   // beside Q; +inf for rows beyond the sequence
  alignas(16) float softmax_d[Config::kStages][Config::kBlockM];  // beside dO

  // full: the bytes of the tile, 1 arrival for them and 1 of each lane that writes statistics. empty: every thread that
  // read (racecheck does not see that a warp's lanes are ordered before one of them that arrives for all, and eight
  // arrivals instead of 256 save no time). turn_added: each consumer warp, turn_passed: the warp that passes turns.
  Barrier k_full, v_full;
  Barrier q_full[Config::kStages], q_empty[Config::kStages];
  Barrier do_full[Config::kStages], do_empty[Config::kStages];
  Barrier turn_added[2], turn_passed[2];

  __device__ __forceinline__ void init_barriers() {
    k_full.init(1);
    v_full.init(1);
    for (int i = 0; i < Config::kStages; ++i) {
      q_full[i].init(1 + 32);
      do_full[i].init(1 + 32);
      q_empty[i].init(Config::kConsumers);
      do_empty[i].init(Config::kConsumers);
    }
    for (int i = 0; i < 2; ++i) {
      turn_added[i].init(Config::kConsumerWarps);
      turn_passed[i].init(1);
    }
    Barrier::fence_init();
  }
};

}  // namespace sm90
}  // namespace flash
