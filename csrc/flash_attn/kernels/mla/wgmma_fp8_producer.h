// The loads of the wgmma MLA decode kernel: keys whose latent columns are e4m3 with a scale for each 128 of them.
#pragma once

#include "kernels/decode/eight_bit.h"
#include "kernels/mla/wgmma_config.h"
#include "kernels/mla/work.h"
#include "kernels/sm80/warp_ops.h"

namespace flash {
namespace mla {

// All warps work on the same half of the latent columns, in the order in which consumers release them: of each step
// the half of the consumer that has it, then the other. A lane holds the bytes of the next half while it waits, so that
// a released half is filled at the speed of conversion alone: 12 instructions for 4 columns, 770 of a step.
//
// Loads come after all conversions of the previous half, and its fence. All loads share a scoreboard: a conversion
// after a load would wait for the newest load.
template <class Config>
struct MlaFp8Producer {
  using Element = typename Config::Element;
  static constexpr int kKeys = Config::kKeys / Config::kProducerWarps;  // of a warp
  static constexpr int kVectorBytes = 16, kRowLanes = Config::kHalf / kVectorBytes;
  static constexpr int kAtomLanes = Config::kAtomCols / kVectorBytes;
  static constexpr int kKeysAtATime = 32 / kRowLanes, kVectors = kKeys / kKeysAtATime;  // kVectors: of a lane
  static constexpr int kRowBytes = kMlaRopeByte + kMlaRopeDim * static_cast<int>(sizeof(Element));
  static constexpr int kLineBytes = 128, kRowLines = kRowBytes / kLineBytes + 1, kLineLanes = 32 / kKeys;
  static_assert(kRowLines % kLineLanes == 0 && kRowBytes % kLineBytes == kVectorBytes, "the last line is asked for");
  static_assert(kKeys % 8 == 0 && kKeys <= 32 && kRowLanes == 16 && kKeysAtATime * kAtomLanes == 8);

  const Flash_mla_params& params;
  MlaWgmmaStorage<Config>& storage;
  const MlaWork& work;
  const int warp, lane = threadIdx.x % 32;
  // Eight lanes store half of the columns of an atom of two keys: of one key, two of them would meet in a bank.
  const int key_of_lane = lane / kAtomLanes % kKeysAtATime, vector = lane / 8 * kAtomLanes + lane % kAtomLanes;

  struct Rows {
    int64_t at;       // byte offset from latent_ptr of key lane % kKeys
    uint32_t exists;  // a bit for each key
  };
  uint4 values[kVectors];
  float scales[kVectors];

  __device__ __forceinline__ MlaFp8Producer(const Flash_mla_params& params_, MlaWgmmaStorage<Config>& storage_,
                                            const MlaWork& work_, int warp_)
      : params(params_), storage(storage_), work(work_), warp(warp_) {}

  __device__ __forceinline__ int key_of(int step) const { return step * Config::kKeys + warp * kKeys + lane % kKeys; }

  __device__ __forceinline__ int find_page(int step) const { return work.find_page(params, key_of(step), step); }

  __device__ __forceinline__ Rows rows_of(int step, int page) const {
    const FastDiv& page_size = params.paged.page_size;
    const int key = key_of(step), row = key - page_size.divide(key) * page_size.divisor;
    const bool exists = static_cast<unsigned>(page) < static_cast<unsigned>(params.paged.num_pages);
    const int64_t at = page * params.latent_strides.batch + row * params.latent_strides.row;
    return {exists ? at : 0, __ballot_sync(0xffffffffu, exists)};
  }

  // Prefetches the rows into the L2 cache: load() reads them a step later.
  __device__ __forceinline__ void prefetch(const Rows& rows) const {
    if ((rows.exists >> lane % kKeys & 1) == 0) return;
    const char* const row = static_cast<const char*>(params.latent_ptr) + rows.at + lane / kKeys * kLineBytes;
#pragma unroll
    for (int i = 0; i < kRowLines; i += kLineLanes) sm80::prefetch_line(row + i * kLineBytes);
  }

  __device__ __forceinline__ const char* row_of(const Rows& rows, int key) const {
    return static_cast<const char*>(params.latent_ptr) + __shfl_sync(0xffffffffu, rows.at, key);
  }

  // Keys that do not exist become 0: NaN there would pass a probability of 0.
  __device__ __forceinline__ void load(const Rows& rows, int half) {
    const int first_col = half * Config::kHalf + vector * kVectorBytes;
    const int scale_byte = kMlaLatentDim + first_col / kMlaScaleCols * static_cast<int>(sizeof(float));
    const uint32_t exists = rows.exists >> key_of_lane;
#pragma unroll
    for (int i = 0; i < kVectors; ++i) {
      const char* const row = row_of(rows, i * kKeysAtATime + key_of_lane);
      values[i] = uint4{};
      scales[i] = 0.0f;
      if (exists & 1u << i * kKeysAtATime) {
        values[i] = *reinterpret_cast<const uint4*>(row + first_col);
        scales[i] = *reinterpret_cast<const float*>(row + scale_byte);
      }
    }
  }

  __device__ __forceinline__ static uint4 dequantise(uint32_t first, uint32_t second, float scale) {
    const auto two = [scale](float2 pair) { return pack_pair(pair.x * scale, pair.y * scale, Element{}); };
    return {two(decode::e4m3_to_floats<false>(first)), two(decode::e4m3_to_floats<true>(first)),
            two(decode::e4m3_to_floats<false>(second)), two(decode::e4m3_to_floats<true>(second))};
  }

  // Stores the loaded half. Keys of a lane are an even number of rows apart, so that the swizzle is an XOR of
  // constants.
  __device__ __forceinline__ void store(int stage, int half) const {
    const int atom = half * Config::kHalfAtoms + vector / kAtomLanes, first = vector % kAtomLanes * 2;
    const int at = tma::swizzle_offset(Config::kAtomCols, warp * kKeys + key_of_lane, first);
    Element* const atom_begin = storage.kv[stage] + atom * Config::kAtomElements;
#pragma unroll
    for (int i = 0; i < kVectors; ++i) {
      const int row = i * kKeysAtATime;
      const auto store_vector = [&](int place, uint32_t low, uint32_t high) {
        Element* const to = atom_begin + (at ^ (row % 8 ^ place) * tma::kVectorCols) + row * Config::kAtomCols;
        *reinterpret_cast<uint4*>(to) = dequantise(low, high, scales[i]);
      };
      store_vector(0, values[i].x, values[i].y);
      store_vector(1, values[i].z, values[i].w);
    }
  }

  __device__ __forceinline__ void copy_rope(const Rows& rows, int stage) const {
    const int copied = lane % kCopyLanes;
#pragma unroll
    for (int i = 0; i < kKeys * kCopyLanes / 32; ++i) {
      const int key = i * (32 / kCopyLanes) + lane / kCopyLanes;
      const char* const from = row_of(rows, key) + kMlaRopeByte + copied * kVectorBytes;
      sm80::copy16_async(vector_in_atom<Config>(storage.kv[stage], Config::kRopeAtom, warp * kKeys + key, copied), from,
                         rows.exists >> key & 1);
    }
    sm80::commit_copies();
  }

  __device__ __forceinline__ void run() {
    const int count = work.to - work.from;
    Rows rows = rows_of(work.from, find_page(work.from));
    Rows next = rows_of(work.from + 1, find_page(work.from + 1));
    int page = find_page(work.from + 2);  // read a step before the row is asked for
    prefetch(next);
    load(rows, 0);
#pragma unroll 1
    for (int i = 0; i < count; ++i) {
      const int stage = i % Config::kStages, other = 1 - stage;
      const uint32_t free = (i / Config::kStages & 1) ^ 1;
      storage.kv_empty[stage][stage].wait(free);
      copy_rope(rows, stage);
      store(stage, stage);
      sm80::wait_for_copies_but(0);
      arrive_landed(storage, stage, stage);
      load(rows, other);
      rows = next;
      next = rows_of(work.from + i + 2, page);
      prefetch(next);
      page = find_page(work.from + i + 3);
      storage.kv_empty[stage][other].wait(free);
      store(stage, other);
      arrive_landed(storage, stage, other);
      load(rows, other);  // the first half of the next step
    }
  }
};

}  // namespace mla
}  // namespace flash
