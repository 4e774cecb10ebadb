// Shared memory of the one-pass wgmma backward: tiles, mbarriers, and the producers and consumers of each mbarrier.
#pragma once

#include "core/dropout_mask.h"
#include "core/mask_factors.h"
#include "kernels/common/sequence.h"
#include "kernels/sm90/bias_boxes.h"
#include "kernels/sm90/bwd_launch_params.h"
#include "kernels/sm90/bwd_one_pass/config.h"
#include "kernels/tma/mbarrier.h"
#include "kernels/tma/pipeline_state.h"
#include "plan/sm90_smem.h"

namespace flash {
namespace sm90 {

using namespace tma;

template <class Config>
struct BwdStorage : BiasRing<Config::kBiasStages, Config::kWarpGroups * Config::kBlockM> {
  using Element = typename Config::Element;

  alignas(1024) Element k[Config::kKStages][Config::kSmemK];
  alignas(1024) Element v[Config::kVStages][Config::kSmemK];
  alignas(1024) Element q[Config::kStages][Config::kSmemQ];
  alignas(1024) Element dout[Config::kStages][Config::kSmemQ];
  alignas(1024) Element ds[2][Config::kSmemDs];  // a ring of two stages, each with the dS of both consumers
  alignas(1024) float dq[Config::kSmemDq];
  alignas(1024) Element dkv[Config::kSeparateDkvSmem ? 2 * Config::kSmemK : 1];
  alignas(16) float lse_log2[Config::kStages][Config::kBlockM];   // stages of Q; +inf for rows beyond the sequence
  alignas(16) float softmax_d[Config::kStages][Config::kBlockM];  // stages of dO

  // Stages of Q, with dropout: random bits of the rows and of the pairs of columns.
  static constexpr bool kMayDrop = Config::kMayDrop;
  alignas(16) RandomBits dropout_row_bits[Config::kStages][kMayDrop ? Config::kBlockM : 2];
  RandomBits dropout_col_bits[Config::kStages][kMayDrop ? Config::kBlockN / 2 : 1];

  // Barrier: arrivals of a phase -> waited for by.
  // k_full, v_full: load warp (1, plus the TMA bytes) -> consumers, dQ warpgroup (k_full).
  // kv_empty: every thread of the consumers (of this part's consumer) and of the dQ warpgroup -> load warp. kEarlyK: of
  // K, in the first step of a work tile, when dK of the one before has left the other buffer.
  // v_empty: kEarlyK, every consumer thread -> load warp.
  // q_full, do_full: load warp (1, plus the TMA bytes) and the 32 lanes of the statistics warp -> consumers.
  // q_empty, do_empty: every consumer thread -> load warp, statistics warp.
  // ds_full: every consumer thread -> the warpgroup that computes dQ. ds_empty: its 128 threads -> consumers.
  // dq_full: every thread that computed the tile -> DqReduceWarp. dq_empty: DqReduceWarp (1) -> who computes the next.
  // work_full: load warp (1) -> all other warps. work_empty: their threads -> load warp.
  // pre_clear_full: load warp (1, plus the TMA bytes) -> load warp, which clears fully masked rows of the tile before
  // it arrives on the tile's full barrier.
  //
  // Empty barriers count every reading thread: racecheck does not see that a warp's lanes are ordered before one lane
  // that arrives for all, and 8 arrivals instead of 256 save no time.
  Barrier k_full[Config::kKStages][Config::kKvParts], v_full[Config::kVStages][Config::kKvParts];
  Barrier kv_empty[Config::kKStages][Config::kKvParts], v_empty;
  Barrier ds_full[2], ds_empty[2], dq_full[2], dq_empty[2];
  Barrier q_full[Config::kStages], q_empty[Config::kStages];
  Barrier do_full[Config::kStages], do_empty[Config::kStages];
  Barrier work_full[2], work_empty[2];
  Barrier pre_clear_full;

  int work[2];  // work tile indices: the current one and the next

  struct PassedStep {
    int head;
    BlockEntry entry;
  };
  // kPassesSteps: stages of Q. tile_keys: of the rows, in steps that a strip of keys does not see all of.
  PassedStep steps[Config::kStages];
  TileIntervals tile_keys[Config::kPassesSteps ? Config::kStages : 1][Config::kPassesSteps ? Config::kBlockM : 1];

  // Where dK and dV are staged for their TMA store; with kDqInSmem in the consumer's rows of dS.
  static_assert(!Config::kDqInSmem || Config::kSmemDs == Config::kSmemK,
                "a consumer's rows of dK and dV take its rows of dS");
  // `last_k`: the buffer of K that the work tile has read, or null.
  __device__ __forceinline__ Element* staged_dk(Element* last_k) {
    if constexpr (Config::kSeparateDkvSmem) return dkv + Config::kSmemK;
    if (Config::kEarlyK && last_k != nullptr) return last_k;
    return Config::kDsHoldsDkv ? ds[0] + Config::kSmemK : reinterpret_cast<Element*>(dq);
  }
  __device__ __forceinline__ Element* staged_dv() { return Config::kSeparateDkvSmem ? dkv : ds[0]; }

  // The buffer of stage `index` of the dQ tiles that DqReduceWarp reduces.
  __device__ __forceinline__ float* dq_tile(int index) { return dq + index % Config::kDqBuffers * Config::kDqTile; }

  __device__ __forceinline__ void init_barriers() {
    constexpr int kDqWarpgroup = Config::kHasDqWarpgroup ? 128 : 0;
    for (int part = 0; part < Config::kKvParts; ++part) {
      for (int i = 0; i < Config::kVStages; ++i) v_full[i][part].init(1);
      for (int i = 0; i < Config::kKStages; ++i) {
        k_full[i][part].init(1);
        kv_empty[i][part].init(Config::kConsumers / Config::kKvParts + kDqWarpgroup);
      }
    }
    for (int i = 0; i < Config::kStages; ++i) {
      q_full[i].init(1 + 32);
      do_full[i].init(1 + 32);
      q_empty[i].init(Config::kConsumers);
      do_empty[i].init(Config::kConsumers);
    }
    pre_clear_full.init(1);
    v_empty.init(Config::kConsumers);
    this->init_bias_barriers(Config::kConsumers);
    for (int i = 0; i < 2; ++i) {
      work_full[i].init(1);
      work_empty[i].init(Config::kConsumers + kDqWarpgroup + 32 * 3);
      ds_full[i].init(Config::kConsumers);
      ds_empty[i].init(128);
      dq_full[i].init(32 * Config::kDqWarps);
      dq_empty[i].init(1);
    }
    Barrier::fence_init();
  }
};

}  // namespace sm90
}  // namespace flash
