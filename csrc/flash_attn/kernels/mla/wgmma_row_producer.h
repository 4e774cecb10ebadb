// The loads of the wgmma MLA decode kernel: 16-bit keys one by one, where no boxes fit into pages.
#pragma once

#include "kernels/mla/wgmma_config.h"
#include "kernels/mla/work.h"
#include "kernels/sm80/warp_ops.h"

namespace flash {
namespace mla {

// Copies of kKeys keys of a step by a warp. A lane knows one key.
template <class Config, int kKeys>
struct MlaRowCopies {
  using Element = typename Config::Element;
  static constexpr int kRowsAtATime = 32 / kCopyLanes, kRows = kKeys / kRowsAtATime;  // kRows: of a lane
  static_assert(32 % kKeys == 0 && kKeys % 8 == 0 && kRowsAtATime == 4,
                "the swizzle repeats after two of a lane's rows");

  const Flash_mla_params& params;
  MlaWgmmaStorage<Config>& storage;
  const int first_key, lane = threadIdx.x % 32, vector = lane % kCopyLanes, first_row = lane / kCopyLanes;
  int64_t latent_at, rope_at;  // of the lane's key, in elements
  uint32_t exists;             // a bit for each key

  __device__ __forceinline__ MlaRowCopies(const Flash_mla_params& params_, MlaWgmmaStorage<Config>& storage_, int part)
      : params(params_), storage(storage_), first_key(part * kKeys) {}

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

  __device__ __forceinline__ Vectors rope_vectors() const { return vectors(params.rope_ptr, rope_at, 0); }

  // Columns `first_col` on of what the vectors were made for. Keys that do not exist become 0: NaN there would pass a
  // probability of 0.
  __device__ __forceinline__ void copy_atom(const Vectors& from, int stage, int atom, int first_col) const {
    const uint32_t bits = exists >> first_row;
#pragma unroll
    for (int i = 0; i < kRows; ++i) {
      Element* const to = vector_in_atom<Config>(storage.kv[stage], atom, i % 2 * kRowsAtATime + first_row, vector) +
                          (first_key + i / 2 * 2 * kRowsAtATime) * Config::kAtomCols;
      sm80::copy16_async(to, from.of[i] + first_col, bits >> i * kRowsAtATime & 1);
    }
  }
};

// Each warp copies a quarter of the keys of each half of the latent columns, in the order in which consumers release
// the halves: in each step first the half of the consumer that has the step, with the rotated columns, then the other
// half. No warp waits for its copies. When a lane's copies of a group of atoms have landed, the hardware arrives at the
// group's barrier. Each warp looks up the pages of the next step early, and computes addresses before it waits for a
// half to be released.
template <class Config>
struct MlaRowProducer {
  static constexpr int kKeys = Config::kKeys / Config::kProducerWarps;
  using Copies = MlaRowCopies<Config, kKeys>;

  const Flash_mla_params& params;
  MlaWgmmaStorage<Config>& storage;
  const MlaWork& work;
  Copies copies;

  __device__ __forceinline__ MlaRowProducer(const Flash_mla_params& params_, MlaWgmmaStorage<Config>& storage_,
                                            const MlaWork& work_, int warp)
      : params(params_), storage(storage_), work(work_), copies(params_, storage_, warp) {}

  __device__ __forceinline__ int key_of(int step) const {
    return step * Config::kKeys + copies.first_key + copies.lane % kKeys;
  }

  __device__ __forceinline__ void set_keys(int step, int page) {
    const FastDiv& page_size = params.paged.page_size;
    const int key = key_of(step), row = key - page_size.divide(key) * page_size.divisor;
    copies.set_key(page, row, static_cast<unsigned>(page) < static_cast<unsigned>(params.paged.num_pages));
  }

  // kIsFirst: the half of the consumer that has the step.
  template <bool kIsFirst>
  __device__ __forceinline__ void load_half(int stage, uint32_t free) const {
    const int half = kIsFirst ? stage : 1 - stage;
    const typename Copies::Vectors latent = copies.latent_vectors(half), rope = copies.rope_vectors();
    storage.kv_empty[stage][half].wait(free);
#pragma unroll
    for (int i = 0; i < Config::kHalfAtoms; ++i) {
      const int atom = half * Config::kHalfAtoms + i;
      copies.copy_atom(latent, stage, atom, i * Config::kAtomCols);
      if (kIsFirst && i + 1 == Config::kHalfAtoms) copies.copy_atom(rope, stage, Config::kRopeAtom, 0);
      if (Config::ends_group(i)) storage.kv_full[stage][atom].arrive_after_copies();
    }
  }

  // Returns whether keys of this thread lack a page.
  __device__ __forceinline__ bool run() {
    bool lacks_pages = false;
    int page = work.find_page(params, key_of(work.from), work.from);
#pragma unroll 1
    for (int step = work.from; step < work.to; ++step) {
      const int i = step - work.from, stage = i % Config::kStages;
      const uint32_t free = (i / Config::kStages & 1) ^ 1;
      lacks_pages |= work.lacks_page(params, key_of(step), step, page);
      set_keys(step, page);
      page = work.find_page(params, key_of(step + 1), step + 1);
      load_half<true>(stage, free);
      load_half<false>(stage, free);
    }
    sm80::wait_for_copies_but(0);  // no thread exits with copies in flight
    return lacks_pages;
  }
};

}  // namespace mla
}  // namespace flash
