// The loads of the wgmma forward of head dims above 256: a warp for Q and K, and one for each half of the columns of V.
#pragma once

#include "core/visible_range.h"
#include "kernels/sm90/wide_fwd_work.h"
#include "kernels/tma/clear_rows.h"
#include "kernels/tma/pipeline_state.h"
#include "kernels/tma/tile_copy.h"

namespace flash {
namespace sm90 {

// One lane issues; the whole warp runs the loops.
template <class Config>
struct WideFwdProducer {
  using Element = typename Config::Element;
  static constexpr int kChunkBytes = Config::kChunkElements * static_cast<int>(sizeof(Element));

  const WideFwdLaunch& launch;
  WideFwdStorage<Config>& storage;
  const WideFwdWork& work;
  const tma::TmaRows keys;
  const int head_k;
  const bool issues = threadIdx.x % 32 == 0;

  __device__ __forceinline__ WideFwdProducer(const WideFwdLaunch& launch_, WideFwdStorage<Config>& storage_,
                                             const WideFwdWork& work_)
      : launch(launch_),
        storage(storage_),
        work(work_),
        keys(launch_.params.keys_packed(), work_.tile.batch, work_.tile.k_begin, work_.tile.seqlen_k),
        head_k(launch_.group.divide(work_.tile.head)) {}

  __device__ __forceinline__ void load_query() const {
    if (!issues) return;
    const WorkTile& tile = work.tile;
    const tma::TmaRows rows(launch.params.is_varlen(), tile.batch, tile.q_begin, tile.seqlen_q);
    storage.q_full.arrive_and_expect(Config::kChunks * kChunkBytes);
#pragma unroll
    for (int chunk = 0; chunk < Config::kChunks; ++chunk) {
      tma::load_tile<1, Config::kChunkCols, Config::kBlockM>(
          launch.q_map, storage.q_full, storage.query(chunk), rows, tile.row_begin, tile.head,
          cute::TMA::CacheHintSm90::EVICT_FIRST, chunk * Config::kChunkCols);
    }
  }

  // A chunk is loaded as soon as the consumer of the step before has multiplied by it.
  __device__ __forceinline__ void load_keys() const {
    for (int i = 0; i < work.count(); ++i) {
      const int first_key = work.block(i) * Config::kBlockN;
#pragma unroll 1
      for (int chunk = 0; chunk < Config::kChunks; ++chunk) {
        storage.k_empty[chunk].wait((i & 1) ^ 1);
        if (!issues) continue;
        tma::Barrier& full = storage.k_full[i % Config::kConsumers][chunk];
        full.arrive_and_expect(kChunkBytes);
        tma::load_tile<1, Config::kChunkCols, Config::kBlockN>(launch.k_map, full, storage.k[chunk], keys, first_key,
                                                               head_k, cute::TMA::CacheHintSm90::EVICT_LAST,
                                                               chunk * Config::kChunkCols);
      }
    }
  }

  // Keys before a window's first visible key, possibly NaN, share a block with visible ones: their V is cleared. For K
  // the mask suffices.
  __device__ __forceinline__ void load_values(int half) const {
    const Visibility visibility = work.visibility;
    const int first_seen = visibility.may_mask_left() ? first_visible_key(visibility) : 0;
    tma::PipelineState<Config::kSlots> state;
    uint32_t landed_phase = 0;
    bool waits_for_query = true;  // whose held chunks are in the last slots
    for (int i = 0; i < work.count(); ++i) {
#pragma unroll 1
      for (int part = 0; part < Config::kParts; ++part) {
        const int first_key = work.block(i) * Config::kBlockN + part * Config::kPartKeys;
        const bool clears = first_key < first_seen;
        tma::Barrier& full = storage.v_full[half][state.stage];
        Element* const slot = storage.v[half][state.stage];
        if (waits_for_query && state.stage == Config::kSlots - 1) {
          storage.q_held.wait(0);
          waits_for_query = false;
        }
        storage.v_empty[half][state.stage].wait(state.phase ^ 1);
        if (issues) {
          tma::Barrier& landed = clears ? storage.v_landed[half] : full;
          landed.arrive_and_expect(kChunkBytes);
          tma::load_tile<Config::kHalfAtoms, Config::kChunkCols, Config::kPartKeys>(
              launch.v_map, landed, slot, keys, first_key, head_k, cute::TMA::CacheHintSm90::EVICT_LAST,
              half * Config::kHalf);
        }
        if (clears) {
          storage.v_landed[half].wait(landed_phase);
          landed_phase ^= 1;
          tma::clear_rows<Config::kPartKeys, Config::kHalfAtoms, Config::kChunkCols>(
              slot, min(first_seen - first_key, Config::kPartKeys));
          if (issues) full.arrive();
        }
        state.advance();
      }
    }
  }

  __device__ __forceinline__ void run(int warp) const {
    if (warp == 0) {
      load_query();
      load_keys();
    } else if (warp <= Config::kConsumers) {
      load_values(warp - 1);
    }
  }
};

}  // namespace sm90
}  // namespace flash
