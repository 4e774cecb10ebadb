// The loads of the wgmma MLA decode kernel: 16-bit keys, by TMA where boxes fit into pages.
#pragma once

#include "kernels/mla/wgmma_config.h"
#include "kernels/mla/wgmma_launch_params.h"
#include "kernels/mla/work.h"
#include "kernels/sm80/warp_ops.h"
#include "kernels/tma/tile_copy.h"

namespace flash {
namespace mla {

// The halves of the latent columns come in the order in which consumers release them: of each step the half of the
// consumer that has it, with the rotated columns, then the other. All warps copy keys, a quarter each; one lane or a
// few of the first warp ask for boxes. A consumer releases its half, which the other has read before by then, see
// MlaConsumer.
template <class Config>
struct MlaProducer {
  using Element = typename Config::Element;
  static constexpr int kGroups = Config::kKeys / 32;                        // a lane looks up one key of each
  static constexpr int kWarpKeys = Config::kKeys / Config::kProducerWarps;  // keys that a warp copies
  static constexpr int kRowsAtATime = 32 / kCopyLanes;
  static_assert(32 % kWarpKeys == 0);

  const MlaWgmmaLaunch& launch;
  const Flash_mla_params& params;
  MlaWgmmaStorage<Config>& storage;
  const MlaWork& work;
  const int warp, lane = threadIdx.x % 32;
  uint32_t exists[kGroups];  // a bit for each key
  int page[kGroups], row[kGroups];

  __device__ __forceinline__ MlaProducer(const MlaWgmmaLaunch& launch_, MlaWgmmaStorage<Config>& storage_,
                                         const MlaWork& work_, int warp_)
      : launch(launch_), params(launch_.params), storage(storage_), work(work_), warp(warp_) {}

  __device__ __forceinline__ void find_keys(int step) {
    const int* const table = work.table(params);
#pragma unroll
    for (int i = 0; i < kGroups; ++i) {
      const int key = step * Config::kKeys + i * 32 + lane;
      const PageRow at = page_row(params.paged, table, key, step < work.to && key >= work.begin && key < work.end);
      page[i] = at.valid ? at.page : 0;
      row[i] = at.valid ? at.row : 0;
      exists[i] = __ballot_sync(0xffffffffu, at.valid);
    }
  }

  __device__ __forceinline__ bool fits_boxes() const {
    uint32_t all = params.box_rows > 0 ? 0xffffffffu : 0u;
#pragma unroll
    for (int i = 0; i < kGroups; ++i) all &= exists[i];
    return all == 0xffffffffu;
  }

  // A lane asks for the boxes that begin with a key which it looked up.
  __device__ __forceinline__ void load_atom(const CUtensorMap& map, int stage, int atom, int first_col) const {
    tma::Barrier& full = storage.kv_full[stage][atom];
    if (lane == 0) full.arrive_and_expect(Config::kAtomBytes);
    __syncwarp();
#pragma unroll
    for (int i = 0; i < kGroups; ++i) {
      const int key = i * 32 + lane;
      if ((key & (params.box_rows - 1)) != 0) continue;
      tma::load_tile<1, Config::kAtomCols, Config::kKeys>(
          map, full, storage.kv[stage] + atom * Config::kAtomElements + key * Config::kAtomCols,
          tma::TmaRows(false, page[i], 0, 0), row[i], 0, cute::TMA::CacheHintSm90::EVICT_NORMAL, first_col);
    }
  }

  // All keys of the step exist. The other warps arrive too: one that no consumer waited for could miss a phase.
  __device__ __forceinline__ void load_boxes(int stage, int half) const {
    if (warp > 0) return arrive_landed(storage, stage, half);
#pragma unroll 1
    for (int i = 0; i < Config::kHalfAtoms; ++i) {
      const int atom = half * Config::kHalfAtoms + i;
      load_atom(launch.latent_map, stage, atom, atom * Config::kAtomCols);
    }
    if (half == stage) load_atom(launch.rope_map, stage, Config::kRopeAtom, 0);
  }

  // The warp's quarter. Keys that do not exist become 0: NaN there would pass a probability of 0.
  __device__ __forceinline__ void copy_keys(int stage, int half) const {
    const int vector = lane % kCopyLanes, first_key = warp * kWarpKeys;
    const int group = first_key / 32;
    const uint32_t bits = group == 0 ? exists[0] : exists[1];
    const int own_page = group == 0 ? page[0] : page[1], own_row = group == 0 ? row[0] : row[1];
    const int64_t latent_at = own_page * params.latent_strides.batch + own_row * params.latent_strides.row;
    const int64_t rope_at = own_page * params.rope_strides.batch + own_row * params.rope_strides.row;
    const Element* const latent =
        static_cast<const Element*>(params.latent_ptr) + half * Config::kHalf + vector * tma::kVectorCols;
    const Element* const rope = static_cast<const Element*>(params.rope_ptr) + vector * tma::kVectorCols;
#pragma unroll
    for (int i = 0; i < kWarpKeys / kRowsAtATime; ++i) {
      const int key = first_key + i * kRowsAtATime + lane / kCopyLanes;
      const bool is_key = bits >> key % 32 & 1;
      const Element* const from = latent + __shfl_sync(0xffffffffu, latent_at, key % 32);
      Element* const to = vector_in_atom<Config>(storage.kv[stage], half * Config::kHalfAtoms, key, vector);
#pragma unroll
      for (int atom = 0; atom < Config::kHalfAtoms; ++atom) {
        sm80::copy16_async(to + atom * Config::kAtomElements, from + atom * Config::kAtomCols, is_key);
      }
      if (half == stage) {
        sm80::copy16_async(vector_in_atom<Config>(storage.kv[stage], Config::kRopeAtom, key, vector),
                           rope + __shfl_sync(0xffffffffu, rope_at, key % 32), is_key);
      }
    }
    sm80::commit_copies();
  }

  // No warp sees another one's copies complete: each waits for its own and arrives.
  __device__ __forceinline__ void finish_copies(int stage) const {
    sm80::wait_for_copies_but(1);
    arrive_landed(storage, stage, stage);
    sm80::wait_for_copies_but(0);
    arrive_landed(storage, stage, 1 - stage);
  }

  __device__ __forceinline__ void run() {
    const int count = work.to - work.from;
    find_keys(work.from);
#pragma unroll 1
    for (int i = 0; i < count; ++i) {
      const int stage = i % Config::kStages;
      const uint32_t free = (i / Config::kStages & 1) ^ 1;
      const bool in_boxes = fits_boxes();
#pragma unroll 1
      for (int part = 0; part < 2; ++part) {
        const int half = part == 0 ? stage : 1 - stage;
        storage.kv_empty[stage][half].wait(free);
        if (in_boxes) {
          load_boxes(stage, half);
        } else {
          copy_keys(stage, half);
        }
      }
      find_keys(work.from + i + 1);
      if (!in_boxes) finish_copies(stage);
    }
  }
};

}  // namespace mla
}  // namespace flash
