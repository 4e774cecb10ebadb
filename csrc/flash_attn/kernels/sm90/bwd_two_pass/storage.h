// Shared memory of the two-pass wgmma backward, with the producers and consumers of each mbarrier.
#pragma once

#include "core/dropout_mask.h"
#include "kernels/common/sequence.h"
#include "kernels/sm90/bwd_launch_params.h"
#include "kernels/sm90/bwd_two_pass/config.h"
#include "kernels/tma/mbarrier.h"
#include "kernels/tma/pipeline_state.h"
#include "plan/sm90_smem.h"

namespace flash {
namespace sm90 {

using namespace tma;

// The dK and dV kernel. Barrier: arrivals of a phase -> waited for by.
// k_full, v_full, of each tile: load warp (1, plus the TMA bytes) -> the one consumer that reads it. k_empty, v_empty:
// its 128 threads, when the last scores of the n_block are complete -> load warp.
// q_full, do_full: load warp (1, plus the TMA bytes) and the 32 lanes of the statistics warp -> consumers.
// q_empty, do_empty: every consumer thread -> load warp, statistics warp.
// p_full: the 128 threads of consumer 0 -> consumer 1. p_empty: those of consumer 1 -> consumer 0. With consumers split
// by keys the thread that wrote P reads it.
// work_full: load warp (1) -> all other warps. work_empty: their threads -> load warp.
// pre_clear_full: load warp (1, plus the TMA bytes) -> load warp, which clears fully masked rows of the tile before it
// arrives on the tile's full barrier.
template <class Config>
struct DkvStorage {
  using Element = typename Config::Element;

  alignas(1024) Element k[Config::kKeyTiles][Config::kSmemK];
  alignas(1024) Element v[Config::kKeyTiles][Config::kSmemV];
  alignas(1024) Element q[Config::kStages][Config::kSmemK];
  alignas(1024) Element dout[Config::kStages][Config::kSmemV];
  alignas(16) float p[Config::kKeyTiles][Config::kSmemP];         // in register order, the same in both consumers
  alignas(16) float lse_log2[Config::kStages][Config::kBlockM];   // stages of Q; +inf for rows beyond the sequence
  alignas(16) float softmax_d[Config::kStages][Config::kBlockM];  // stages of dO
  // Stages of Q, with dropout: random bits of the rows and of the pairs of columns.
  alignas(16) RandomBits dropout_row_bits[Config::kStages][Config::kIsGeneral ? Config::kBlockM : 2];
  RandomBits dropout_col_bits[Config::kStages][Config::kIsGeneral ? Config::kBlockN / 2 : 1];
  Barrier k_full[Config::kKeyTiles], k_empty[Config::kKeyTiles], v_full[Config::kKeyTiles], v_empty[Config::kKeyTiles];
  Barrier p_full, p_empty, pre_clear_full;
  Barrier q_full[Config::kStages], q_empty[Config::kStages];
  Barrier do_full[Config::kStages], do_empty[Config::kStages];
  Barrier work_full[2], work_empty[2];
  int work[2];  // work tile indices: the current one and the next

  __device__ __forceinline__ void init_barriers() {
    for (int i = 0; i < Config::kKeyTiles; ++i) {
      k_full[i].init(1);
      v_full[i].init(1);
      k_empty[i].init(128);
      v_empty[i].init(128);
    }
    p_full.init(128);
    p_empty.init(128);
    pre_clear_full.init(1);
    for (int i = 0; i < Config::kStages; ++i) {
      q_full[i].init(1 + 32);
      do_full[i].init(1 + 32);
      q_empty[i].init(Config::kConsumers);
      do_empty[i].init(Config::kConsumers);
    }
    for (int i = 0; i < 2; ++i) {
      work_full[i].init(1);
      work_empty[i].init(Config::kConsumers + 32);
    }
    Barrier::fence_init();
  }
};

// The dQ kernel.
// q_full, do_full: load warp (1, plus the TMA bytes) -> the consumer of these rows. q_empty, do_empty: its 128 threads,
// when the last scores of the work tile are complete -> load warp.
// k_full: load warp (1, plus the TMA bytes) and, kIsGeneral, the 32 lanes of the dropout warp; v_full: load warp ->
// consumers. k_empty, v_empty: every consumer thread -> load warp, k_empty also -> dropout warp.
// work_full, work_empty, pre_clear_full: as above.
template <class Config>
struct DqStorage {
  using Element = typename Config::Element;

  alignas(1024) Element q[2][Config::kSmemK];  // of each consumer's rows
  alignas(1024) Element dout[2][Config::kSmemV];
  alignas(1024) Element k[Config::kDqStages][Config::kSmemK];
  alignas(1024) Element v[Config::kDqVStages][Config::kDqBlockN * Config::kVPartCols];
  // With dropout: random bits of the rows, which only their warp reads; of the pairs of columns, in stages of K.
  RandomBits dropout_row_bits[Config::kIsGeneral ? Config::kDqBlockM : 2];
  RandomBits dropout_col_bits[Config::kDqStages][Config::kIsGeneral ? Config::kDqBlockN / 2 : 1];
  Barrier q_full[2], q_empty[2], do_full[2], do_empty[2];
  Barrier k_full[Config::kDqStages], k_empty[Config::kDqStages];
  Barrier v_full[Config::kDqVStages], v_empty[Config::kDqVStages];
  Barrier work_full[2], work_empty[2];
  Barrier pre_clear_full;
  int work[2];

  __device__ __forceinline__ void init_barriers() {
    constexpr int kDropoutLanes = Config::kIsGeneral ? 32 : 0;
    for (int i = 0; i < 2; ++i) {
      q_full[i].init(1);
      do_full[i].init(1);
      q_empty[i].init(128);
      do_empty[i].init(128);
      work_full[i].init(1);
      work_empty[i].init(Config::kConsumers + kDropoutLanes);
    }
    for (int i = 0; i < Config::kDqStages; ++i) {
      k_full[i].init(1 + kDropoutLanes);
      k_empty[i].init(Config::kConsumers);
    }
    for (int i = 0; i < Config::kDqVStages; ++i) {
      v_full[i].init(1);
      v_empty[i].init(Config::kConsumers);
    }
    pre_clear_full.init(1);
    Barrier::fence_init();
  }
};

}  // namespace sm90
}  // namespace flash
