// The loads of the wgmma MLA decode kernel: 16-bit keys by TMA, in boxes that cross no page.
#pragma once

#include "kernels/mla/wgmma_config.h"
#include "kernels/mla/wgmma_launch_params.h"
#include "kernels/mla/wgmma_row_producer.h"
#include "kernels/mla/work.h"
#include "kernels/sm80/warp_ops.h"
#include "kernels/tma/tile_copy.h"

namespace flash {
namespace mla {

// Two warps have the steps of a stage. The halves of the latent columns come in the order in which consumers release
// them: of each step the half of the consumer that has it, with the rotated columns, then the other. A lane asks for
// one box of every second atom of columns; where keys are missing, a warp copies half of the others. A consumer
// releases its half, which the other has read before by then, see MlaConsumer.
template <class Config>
struct MlaProducer {
  using Element = typename Config::Element;
  static constexpr int kStageWarps = Config::kProducerWarps / Config::kStages;
  static constexpr int kWarpKeys = Config::kKeys / kStageWarps;  // keys that a warp copies
  static constexpr int kWarpAtoms = Config::kHalfAtoms / kStageWarps;
  static_assert(kWarpKeys == 32 && kStageWarps == 2, "a lane looks up one key of either warp");

  // A key's row of the pages.
  struct Row {
    int page, row;
  };

  const MlaWgmmaLaunch& launch;
  const Flash_mla_params& params;
  MlaWgmmaStorage<Config>& storage;
  const MlaWork& work;
  const int stage, part, lane = threadIdx.x % 32;  // part: the warp, of those of the stage
  const int box_key, box_turn;                     // the lane's box: its first key, and which of the warp's atoms
  uint32_t exists[kStageWarps];                    // a bit for each key
  Row rows[kStageWarps];                           // of keys lane and lane + 32
  Row box;                                         // of box_key
  bool lacks_pages = false;                        // of keys lane and lane + 32 of a step

  __device__ __forceinline__ MlaProducer(const MlaWgmmaLaunch& launch_, MlaWgmmaStorage<Config>& storage_,
                                         const MlaWork& work_, int warp)
      : launch(launch_),
        params(launch_.params),
        storage(storage_),
        work(work_),
        stage(warp / kStageWarps),
        part(warp % kStageWarps),
        box_key(lane * launch_.params.box_rows % Config::kKeys),
        box_turn(lane * launch_.params.box_rows / Config::kKeys) {}

  __device__ __forceinline__ void find_keys(int step) {
    const int* const table = work.table(params);
#pragma unroll
    for (int i = 0; i < kStageWarps; ++i) {
      const int key = step * Config::kKeys + i * 32 + lane;
      const PageRow at = page_row(params.paged, table, key, step < work.to && key >= work.begin && key < work.end);
      rows[i] = {at.page, at.row};
      exists[i] = __ballot_sync(0xffffffffu, at.valid);
      lacks_pages |= work.lacks_page(params, key, step, at.page);
    }
    const auto of_key = [this](int first, int second) {
      const int low = __shfl_sync(0xffffffffu, first, box_key % 32);
      const int high = __shfl_sync(0xffffffffu, second, box_key % 32);
      return box_key < 32 ? low : high;
    };
    box = {of_key(rows[0].page, rows[1].page), of_key(rows[0].row, rows[1].row)};
  }

  __device__ __forceinline__ bool fits_boxes() const { return (exists[0] & exists[1]) == 0xffffffffu; }

  __device__ __forceinline__ void load_box(const CUtensorMap& map, int atom, int first_col) const {
    tma::load_tile<1, Config::kAtomCols, Config::kKeys>(
        map, storage.kv_full[stage][atom],
        storage.kv[stage] + atom * Config::kAtomElements + box_key * Config::kAtomCols,
        tma::TmaRows(false, box.page, 0, 0), box.row, 0, cute::TMA::CacheHintSm90::EVICT_NORMAL, first_col);
  }

  // All keys of the step exist. The other warp arrives too: both copy keys elsewhere.
  __device__ __forceinline__ void load_boxes(int half) const {
    if (lane < Config::kHalfAtoms || (lane == Config::kHalfAtoms && half == stage)) {
      const int atom = lane == Config::kHalfAtoms ? Config::kRopeAtom : half * Config::kHalfAtoms + lane;
      tma::Barrier& full = storage.kv_full[stage][atom];
      if (lane % kStageWarps == part) {
        full.arrive_and_expect(Config::kAtomBytes);
      } else {
        full.arrive();
      }
    }
    __syncwarp();
    const int atom = half * Config::kHalfAtoms + box_turn * kStageWarps + part;
    if (box_turn < kWarpAtoms) load_box(launch.latent_map, atom, atom * Config::kAtomCols);
    if (half == stage && part == 0 && box_turn == 0) load_box(launch.rope_map, Config::kRopeAtom, 0);
  }

  __device__ __forceinline__ void copy_keys(int half) const {
    MlaRowCopies<Config, kWarpKeys> copies(params, storage, part);
    const Row row = part == 0 ? rows[0] : rows[1];
    copies.set_key(row.page, row.row, (part == 0 ? exists[0] : exists[1]) >> lane & 1);
    const auto latent = copies.latent_vectors(half);
#pragma unroll
    for (int i = 0; i < Config::kHalfAtoms; ++i) {
      copies.copy_atom(latent, stage, half * Config::kHalfAtoms + i, i * Config::kAtomCols);
    }
    if (half == stage) copies.copy_atom(copies.rope_vectors(), stage, Config::kRopeAtom, 0);
    sm80::commit_copies();
  }

  // No warp sees another one's copies complete: each waits for its own and arrives.
  __device__ __forceinline__ void finish_copies() const {
    sm80::wait_for_copies_but(1);
    arrive_landed(storage, stage, stage);
    sm80::wait_for_copies_but(0);
    arrive_landed(storage, stage, 1 - stage);
  }

  // Returns whether keys of this thread lack a page.
  __device__ __forceinline__ bool run() {
    const int count = work.to - work.from;
    find_keys(work.from + stage);
#pragma unroll 1
    for (int i = stage; i < count; i += Config::kStages) {
      const uint32_t free = (i / Config::kStages & 1) ^ 1;
      const bool in_boxes = fits_boxes();
#pragma unroll 1
      for (int turn = 0; turn < 2; ++turn) {
        const int half = turn == 0 ? stage : 1 - stage;
        storage.kv_empty[stage][half].wait(free);
        if (in_boxes) {
          load_boxes(half);
        } else {
          copy_keys(half);
        }
      }
      if (!in_boxes) finish_copies();
      find_keys(work.from + i + Config::kStages);
    }
    return lacks_pages;
  }
};

}  // namespace mla
}  // namespace flash
