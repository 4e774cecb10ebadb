// The loads of the wgmma MLA decode kernel: 16-bit keys, by TMA where boxes fit into pages.
#pragma once

#include "kernels/mla/wgmma_config.h"
#include "kernels/mla/wgmma_launch_params.h"
#include "kernels/mla/work.h"
#include "kernels/sm80/warp_ops.h"
#include "kernels/tma/tile_copy.h"

namespace flash {
namespace mla {

// A warp loads one half of the latent columns of every second step, and the rotated columns of the steps whose consumer
// has that half. That half comes first: the scores begin with it. A consumer releases its half, which the other has
// read before by then, see MlaConsumer.
template <class Config>
struct MlaProducer {
  using Element = typename Config::Element;
  static constexpr int kGroups = Config::kKeys / 32;  // a lane looks up one key of each

  const MlaWgmmaLaunch& launch;
  const Flash_mla_params& params;
  MlaWgmmaStorage<Config>& storage;
  const MlaWork& work;
  const int stage, half;
  const int lane = threadIdx.x % 32;
  uint32_t exists[kGroups];  // a bit of each key
  int page[kGroups], row[kGroups];

  __device__ __forceinline__ MlaProducer(const MlaWgmmaLaunch& launch_, MlaWgmmaStorage<Config>& storage_,
                                         const MlaWork& work_, int warp)
      : launch(launch_),
        params(launch_.params),
        storage(storage_),
        work(work_),
        stage(warp % Config::kStages),
        half(warp / Config::kStages) {}

  __device__ __forceinline__ bool has_rope() const { return half == stage; }
  __device__ __forceinline__ int first_atom() const { return half * Config::kHalfAtoms; }

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
  __device__ __forceinline__ void load_atom(const CUtensorMap& map, int atom, int first_col) const {
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

  // All keys of the step exist.
  __device__ __forceinline__ void load_boxes() const {
#pragma unroll 1
    for (int i = 0; i < Config::kHalfAtoms; ++i) {
      load_atom(launch.latent_map, first_atom() + i, (first_atom() + i) * Config::kAtomCols);
    }
    if (has_rope()) load_atom(launch.rope_map, Config::kRopeAtom, 0);
  }

  // Keys that do not exist become 0: NaN there would pass a probability of 0.
  __device__ __forceinline__ void copy_keys() const {
    const int vector = lane % kCopyLanes, row_of_lane = lane / kCopyLanes;
    constexpr int kRowsAtATime = 32 / kCopyLanes, kSwizzleRows = 8;  // the swizzle repeats after these
    Element* const first = storage.kv[stage] + first_atom() * Config::kAtomElements;
    const Element* const latent =
        static_cast<const Element*>(params.latent_ptr) + half * Config::kHalf + vector * tma::kVectorCols;
    const Element* const rope = static_cast<const Element*>(params.rope_ptr) + vector * tma::kVectorCols;
    Element* to[kSwizzleRows / kRowsAtATime];
#pragma unroll
    for (int i = 0; i < kSwizzleRows / kRowsAtATime; ++i)
      to[i] = vector_in_atom<Config>(first, 0, i * kRowsAtATime + row_of_lane, vector);
#pragma unroll
    for (int i = 0; i < kGroups; ++i) {
      const int64_t latent_at = page[i] * params.latent_strides.batch + row[i] * params.latent_strides.row;
      const int64_t rope_at = page[i] * params.rope_strides.batch + row[i] * params.rope_strides.row;
#pragma unroll 1
      for (int eight = 0; eight < 32; eight += kSwizzleRows) {
#pragma unroll
        for (int part = 0; part < kSwizzleRows / kRowsAtATime; ++part) {
          const int key = eight + part * kRowsAtATime + row_of_lane;  // of the group
          const bool is_key = exists[i] >> key & 1;
          const Element* const from = latent + __shfl_sync(0xffffffffu, latent_at, key);
#pragma unroll
          for (int atom = 0; atom < Config::kHalfAtoms; ++atom) {
            sm80::copy16_async(to[part] + atom * Config::kAtomElements, from + atom * Config::kAtomCols, is_key);
          }
          if (has_rope()) {
            Element* const rope_to = to[part] + (Config::kRopeAtom - first_atom()) * Config::kAtomElements;
            sm80::copy16_async(rope_to, rope + __shfl_sync(0xffffffffu, rope_at, key), is_key);
          }
          to[part] += kSwizzleRows * Config::kAtomCols;
        }
      }
    }
    sm80::commit_copies();
  }

  // No lane sees another lane's copies complete: each waits for its own and fences them for the tensor cores.
  __device__ __forceinline__ void finish_copies() const {
    sm80::wait_for_copies_but(0);
    tma::fence_buffer();
    __syncwarp();
    if (lane < Config::kHalfAtoms) storage.kv_full[stage][first_atom() + lane].arrive();
    if (lane == Config::kHalfAtoms && has_rope()) storage.kv_full[stage][Config::kRopeAtom].arrive();
  }

  __device__ __forceinline__ void run() {
    const int count = work.to - work.from;
    find_keys(work.from + stage);
    for (int i = stage; i < count; i += Config::kStages) {
      const uint32_t parity = i / Config::kStages & 1;
      storage.kv_empty[stage][half].wait(parity ^ 1);
      if (!has_rope()) storage.kv_begun[stage].wait(parity);
      const bool in_boxes = fits_boxes();
      if (in_boxes) {
        load_boxes();
      } else {
        copy_keys();
      }
      if (has_rope() && lane == 0) storage.kv_begun[stage].arrive();
      find_keys(work.from + i + Config::kStages);
      if (!in_boxes) finish_copies();
    }
  }
};

}  // namespace mla
}  // namespace flash
