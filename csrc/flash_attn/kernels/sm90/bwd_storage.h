// Shared memory of the wgmma backward: tiles, mbarriers, and the producers and consumers of each mbarrier.
#pragma once

#include <cuda.h>

#include "core/dropout_mask.h"
#include "kernels/common/sequence.h"
#include "kernels/sm90/bwd_config.h"
#include "kernels/tma/mbarrier.h"
#include "kernels/tma/pipeline_state.h"

namespace flash {
namespace sm90 {

using namespace tma;

struct BwdLaunch {
  Flash_bwd_params params;
  BwdGrid grid;
  int* tile_count_semaphore;  // null: static scheduler
  CUtensorMap q_map, do_map, k_map, v_map, dk_map, dv_map;
  CUtensorMap dq_map;  // for DqLocation::kShared
};

// The phase of one buffer of V beside one or two of K: both are filled once for each work tile with m_blocks.
__device__ __forceinline__ uint32_t v_phase(const PipelineState<1>& k_state) { return k_state.phase; }
__device__ __forceinline__ uint32_t v_phase(const PipelineState<2>& k_state) { return k_state.stage; }

// What a DqReduceWarp that converts tiles has no registers for.
struct DqReduceTile {
  BwdWorkTile tile;
  QBlockOrder order;
};

template <class Config>
struct BwdStorage {
  using Element = typename Config::Element;

  alignas(1024) Element k[Config::kKBuffers][Config::kSmemK];
  alignas(1024) Element v[Config::kVBuffers][Config::kSmemK];
  alignas(1024) Element q[Config::kStages][Config::kSmemQ];
  alignas(1024) Element dout[Config::kStages][Config::kSmemQ];
  alignas(1024) Element ds[2][Config::kSmemDs];  // a ring of two stages, each with the dS of both consumers
  alignas(1024) float dq[Config::kSmemDq];
  alignas(1024) Element dkv[Config::kSeparateDkvSmem ? 2 * Config::kSmemK : 1];
  alignas(16) float lse_log2[Config::kStages][Config::kBlockM];   // stages of Q; +inf for rows beyond the sequence
  alignas(16) float softmax_d[Config::kStages][Config::kBlockM];  // stages of dO

  // Stages of Q, with dropout: random bits of the rows and of the pairs of columns.
  static constexpr bool kMayDrop = Config::kIsGeneral;
  alignas(16) RandomBits dropout_row_bits[Config::kStages][kMayDrop ? Config::kBlockM : 2];
  RandomBits dropout_col_bits[Config::kStages][kMayDrop ? Config::kBlockN / 2 : 1];

  // Barrier: arrivals of a phase -> waited for by.
  // k_full, v_full: load warp (1, plus the TMA bytes) -> consumers, dQ warpgroup (k_full).
  // k_empty: every thread of the consumers (of this part's consumer) and of the dQ warpgroup -> load warp. Beside a dQ
  // warpgroup it is for V too; v_empty, else: every consumer thread -> load warp.
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
  Barrier k_full[Config::kKBuffers][Config::kKvParts], v_full[Config::kVBuffers][Config::kKvParts];
  Barrier k_empty[Config::kKBuffers][Config::kKvParts];
  Barrier ds_full[2], ds_empty[2], dq_full[2], dq_empty[2];
  Barrier q_full[Config::kStages], q_empty[Config::kStages];
  Barrier do_full[Config::kStages], do_empty[Config::kStages];
  Barrier work_full[2], work_empty[2];
  Barrier pre_clear_full;

  int work[2];  // work tile indices: the current one and the next
  Barrier v_empty;
  DqReduceTile dq_reduce_tile[Config::kConvertsDq ? 2 : 1];

  // Where dK and dV are staged for their TMA store, if they are. With kDqInSmem that is a consumer's own rows of dS.
  static_assert(!Config::kDqInSmem || Config::kSmemDs == Config::kSmemK,
                "a consumer's rows of dK and dV take its rows of dS");
  __device__ __forceinline__ Element* staged_dkv(int index) {
    if constexpr (Config::kStoresDkvFromRegs) return nullptr;
    return (Config::kSeparateDkvSmem ? dkv : ds[0]) + index * Config::kSmemK;
  }
  __device__ __forceinline__ Element* staged_dk() { return staged_dkv(1); }
  __device__ __forceinline__ Element* staged_dv() { return staged_dkv(0); }

  // The buffer of stage `index` of the dQ tiles that DqReduceWarp reduces.
  __device__ __forceinline__ float* dq_tile(int index) { return dq + index % Config::kDqBuffers * Config::kDqTile; }

  __device__ __forceinline__ void init_barriers() {
    constexpr int kDqWarpgroup = Config::kHasDqWarpgroup ? 128 : 0;
    for (int i = 0; i < Config::kKBuffers; ++i) {
      for (int part = 0; part < Config::kKvParts; ++part) {
        k_full[i][part].init(1);
        if (i < Config::kVBuffers) v_full[i][part].init(1);
        k_empty[i][part].init(Config::kConsumers / Config::kKvParts + kDqWarpgroup);
      }
    }
    if (!Config::kHasDqWarpgroup) v_empty.init(Config::kConsumers);
    for (int i = 0; i < Config::kStages; ++i) {
      q_full[i].init(1 + 32);
      do_full[i].init(1 + 32);
      q_empty[i].init(Config::kConsumers);
      do_empty[i].init(Config::kConsumers);
    }
    pre_clear_full.init(1);
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
