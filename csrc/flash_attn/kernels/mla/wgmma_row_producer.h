// The loads of the wgmma MLA decode kernel: 16-bit keys one by one, where no boxes fit into pages.
#pragma once

#include "kernels/mla/wgmma_config.h"
#include "kernels/mla/work.h"
#include "kernels/sm80/warp_ops.h"

namespace flash {
namespace mla {

// Copies of part of the keys of a step by a warp. Each lane knows one key.
template <class Config>
struct MlaRowCopies {
  using Element = typename Config::Element;
  static constexpr int kParts = 2, kKeys = Config::kKeys / kParts;
  static constexpr int kRowsAtATime = 32 / kCopyLanes, kRows = kKeys / kRowsAtATime;  // kRows: of a lane
  static_assert(kKeys == 32 && kRowsAtATime == 4, "a lane has one key, and two sums of row and vector");

  const Flash_mla_params& params;
  MlaWgmmaStorage<Config>& storage;
  const int part, lane = threadIdx.x % 32, vector = lane % kCopyLanes, first_row = lane / kCopyLanes;
  int64_t latent_at, rope_at;  // of the lane's key, in elements
  uint32_t exists;             // a bit for each key

  __device__ __forceinline__ MlaRowCopies(const Flash_mla_params& params_, MlaWgmmaStorage<Config>& storage_, int part_)
      : params(params_), storage(storage_), part(part_) {}

  // A key that does not exist has any page and row.
  __device__ __forceinline__ void set_key(int page, int row, bool key_exists) {
    const int64_t known_page = key_exists ? page : 0, known_row = key_exists ? row : 0;
    latent_at = known_page * params.latent_strides.batch + known_row * params.latent_strides.row;
    rope_at = known_page * params.rope_strides.batch + known_row * params.rope_strides.row;
    exists = __ballot_sync(0xffffffffu, key_exists);
  }

  // The lane's vectors of its rows.
  struct Vectors {
    const Element* of[kRows];
  };

  __device__ __forceinline__ Vectors vectors(const void* pages, int64_t at, int first_col) const {
    const Element* const columns = static_cast<const Element*>(pages) + first_col + vector * tma::kVectorCols;
    Vectors result;
#pragma unroll
    for (int i = 0; i < kRows; ++i) {
      result.of[i] = columns + __shfl_sync(0xffffffffu, at, i * kRowsAtATime + first_row);
    }
    return result;
  }

  __device__ __forceinline__ Vectors latent_vectors(int half) const {
    return vectors(params.latent_ptr, latent_at, half * Config::kHalf);
  }

  // Columns `first_col` on of the vectors' matrix. Keys that do not exist become 0: NaN there would pass a probability
  // of 0.
  __device__ __forceinline__ void copy_atom(const Vectors& from, int stage, int atom, int first_col) const {
    const uint32_t bits = exists >> first_row;
#pragma unroll
    for (int i = 0; i < kRows; ++i) {
      // The swizzle repeats after eight rows.
      Element* const to = vector_in_atom<Config>(storage.kv[stage], atom, i % 2 * kRowsAtATime + first_row, vector) +
                          (part * kKeys + i / 2 * 2 * kRowsAtATime) * Config::kAtomCols;
      sm80::copy16_async(to, from.of[i] + first_col, bits >> i * kRowsAtATime & 1);
    }
  }

  __device__ __forceinline__ void copy_rope(int stage) const {
    copy_atom(vectors(params.rope_ptr, rope_at, 0), stage, Config::kRopeAtom, 0);
  }
};

// Two warps have a half of the latent columns, in every step, and the rotated ones that come with it: no half waits for
// the release of the other. They announce each atom of columns as it lands. Pages are looked up a step before.
template <class Config>
struct MlaRowProducer {
  using Copies = MlaRowCopies<Config>;
  static_assert(Config::kProducerWarps == 2 * Copies::kParts);

  const Flash_mla_params& params;
  MlaWgmmaStorage<Config>& storage;
  const MlaWork& work;
  const int half;
  Copies copies;

  __device__ __forceinline__ MlaRowProducer(const Flash_mla_params& params_, MlaWgmmaStorage<Config>& storage_,
                                            const MlaWork& work_, int warp)
      : params(params_),
        storage(storage_),
        work(work_),
        half(warp / Copies::kParts),
        copies(params_, storage_, warp % Copies::kParts) {}

  __device__ __forceinline__ int key_of(int step) const {
    return step * Config::kKeys + copies.part * Copies::kKeys + copies.lane;
  }

  __device__ __forceinline__ void set_keys(int step, int page) {
    const FastDiv& page_size = params.paged.page_size;
    const int key = key_of(step), row = key - page_size.divide(key) * page_size.divisor;
    copies.set_key(page, row, static_cast<unsigned>(page) < static_cast<unsigned>(params.paged.num_pages));
  }

  // Arrives for an atom after all but the `newest` groups of copies have landed.
  __device__ __forceinline__ void announce(int stage, int atom, int newest) const {
    sm80::wait_for_copies_but(newest);
    tma::fence_buffer();
    __syncwarp();
    if (copies.lane == 0) storage.kv_full[stage][atom].arrive();
  }

  __device__ __forceinline__ void load(int stage, uint32_t free) const {
    const typename Copies::Vectors latent = copies.latent_vectors(half);
    const int first_atom = half * Config::kHalfAtoms;
    storage.kv_empty[stage][half].wait(free);
#pragma unroll
    for (int i = 0; i < Config::kHalfAtoms; ++i) {
      copies.copy_atom(latent, stage, first_atom + i, i * Config::kAtomCols);
      sm80::commit_copies();
    }
    const bool has_rope = half == stage;
    if (has_rope) copies.copy_rope(stage);
    sm80::commit_copies();
#pragma unroll
    for (int i = 0; i < Config::kHalfAtoms; ++i) announce(stage, first_atom + i, Config::kHalfAtoms - i);
    if (has_rope) announce(stage, Config::kRopeAtom, 0);
  }

  __device__ __forceinline__ void run() {
    int page = work.find_page(params, key_of(work.from), work.from);
#pragma unroll 1
    for (int step = work.from; step < work.to; ++step) {
      const int i = step - work.from;
      set_keys(step, page);
      page = work.find_page(params, key_of(step + 1), step + 1);
      load(i % Config::kStages, (i / Config::kStages & 1) ^ 1);
    }
  }
};

}  // namespace mla
}  // namespace flash
