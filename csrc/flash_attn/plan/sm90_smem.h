// Shared memory of the wgmma kernels, field by field as in their storage structs; the launches assert that both agree.
// Plain C++17.
#pragma once

#include <cstdint>

#include "core/block_list.h"
#include "core/block_range.h"
#include "core/dropout_mask.h"
#include "core/softcap_series.h"
#include "core/trip_count.h"
#include "plan/bwd_tiles.h"

namespace flash {
namespace plan {

constexpr int kBarrierBytes = 8;
constexpr int kSwizzleBytes = 1024;    // alignment of tiles, so that the swizzle depends on the offset alone
constexpr int kWorkTileBytes = 9 * 4;  // sizeof(WorkTile), a device-only type

// Size of a struct, field by field.
class SmemLayout {
 public:
  constexpr SmemLayout& add(int64_t bytes, int alignment) {
    bytes_ = aligned(alignment) + bytes;
    return *this;
  }
  constexpr int size(int alignment) const { return static_cast<int>(aligned(alignment)); }

 private:
  constexpr int64_t aligned(int alignment) const { return (bytes_ + alignment - 1) / alignment * alignment; }

  int64_t bytes_ = 0;
};

constexpr int slot_bytes(int bytes) { return (bytes + 15) / 16 * 16; }

// sizeof(sm90::FwdStorage), one for each consumer group.
constexpr int sm90_fwd_smem_bytes(const Sm90FwdTile& tile, FwdVariant variant, Dtype dtype) {
  const int element = dtype_bytes(dtype), groups = tile.block_m / 64;
  const bool has_dropout = variant == FwdVariant::kDropout, has_lists = visits_by_list(variant);
  const int fine_words = tile.block_n / 8, col_vectors = (fine_words + fine_words / 2 + 3) / 4;
  const int barriers = 4 * tile.kv_stages + 1 + 3 * tile.q_stages * groups + 2 * 3;
  SmemLayout storage;
  storage.add(kBiasBoxBytes * tile.bias_stages * tile.block_m, kSwizzleBytes)
      .add(2 * kBarrierBytes * tile.bias_stages * groups, kBarrierBytes)
      .add(element * tile.q_stages * tile.block_m * tile.head_dim, kSwizzleBytes)
      .add(element * tile.kv_stages * tile.block_n * tile.head_dim, kSwizzleBytes)
      .add(element * tile.kv_stages * tile.block_n * tile.value_dim(), kSwizzleBytes)
      .add(element * groups * (tile.o_cols > 0 ? 64 * tile.o_cols : 1), tile.o_cols > 0 ? kSwizzleBytes : 8)
      .add(16 * (has_dropout ? tile.kv_stages * 4 * col_vectors : 4), 16)
      .add(kBarrierBytes * barriers, kBarrierBytes)
      .add(2 * slot_bytes(kWorkTileBytes), 16)
      .add(2 * slot_bytes(has_lists ? sizeof(BlockList) : sizeof(KvBlockOrder)), 16)
      .add(2 * groups * slot_bytes(has_lists ? 1 : sizeof(WarpgroupTripCount<ColBounds>)), 16)
      .add(2 * 4, 4)
      .add(sizeof(ShortSoftcapSeries), 4);
  return tile.consumer_groups * storage.size(kSwizzleBytes);
}

// sizeof(sm90::WideFwdStorage).
constexpr int sm90_wide_fwd_smem_bytes(Dtype dtype) {
  const int chunk = dtype_bytes(dtype) * kSm90WideBlockM * kSm90WideChunkCols, consumers = 2;
  const int chunks = kSm90WideHeadDim / kSm90WideChunkCols, slots = kSm90WideValueSlots;
  const int barriers = 2 + (consumers + 1) * chunks + 2 * consumers * slots + 2 * consumers;
  SmemLayout storage;
  storage.add(chunk * (consumers * slots + chunks - kSm90WideHeldChunks + chunks + 1), kSwizzleBytes)
      .add(2 * 4 * kSm90WideBlockM, 8)
      .add(4, 1)
      .add(4 * consumers * 2 * 128, 4)
      .add(kBarrierBytes * barriers, kBarrierBytes);
  return storage.size(kSwizzleBytes);
}

// sizeof(sm90::WideDkvStorage): for Q and K, and for dO and V, chunks of the wanted half, others, and resident ones; P.
constexpr int sm90_wide_dkv_smem_bytes(Dtype dtype) {
  const int chunk = dtype_bytes(dtype) * 64 * kSm90WideChunkCols, chunks = kSm90WideHeadDim / kSm90WideChunkCols;
  const int others = kSm90WideOtherSlots, barriers = 2 * (chunks + 2 * others + 3) + 2 + 2 * 2;
  SmemLayout storage;
  storage.add(2 * chunk * (chunks / 2 + others + chunks - kSm90WideHeldChunks), kSwizzleBytes)
      .add(4 * 64 * 64, 16)
      .add(2 * 2 * 4 * 64, 16)
      .add(kBarrierBytes * barriers, kBarrierBytes);
  return storage.size(kSwizzleBytes);
}

// sizeof(sm90::WideDqStorage): resident chunks of Q and dO, K, chunks of V, P in fp32 and dS.
constexpr int sm90_wide_dq_smem_bytes(Dtype dtype) {
  const int chunk = dtype_bytes(dtype) * 64 * kSm90WideChunkCols, chunks = kSm90WideHeadDim / kSm90WideChunkCols;
  const int slots = kSm90WideBwdValueSlots, barriers = 4 + 2 * chunks + 2 * slots + 2 + 4;
  SmemLayout storage;
  storage.add(chunk * (2 * (chunks - kSm90WideHeldChunks) + chunks + slots + 1), kSwizzleBytes)
      .add(4 * 64 * 64, 16)
      .add(kBarrierBytes * barriers, kBarrierBytes);
  return storage.size(kSwizzleBytes);
}

// sizeof(sm90::DkvStorage).
constexpr int sm90_dkv_smem_bytes(const Sm90BwdTile& tile, bool may_drop, Dtype dtype) {
  const int element = dtype_bytes(dtype), m = tile.block_m, n = tile.block_n, key_tiles = n / 64;
  const int p_floats = sm90_dkv_has_p_in_smem(tile) ? m * n : 4;
  SmemLayout storage;
  storage.add(element * n * tile.head_dim, kSwizzleBytes)
      .add(element * n * tile.value_dim(), kSwizzleBytes)
      .add(element * tile.stages * m * tile.head_dim, kSwizzleBytes)
      .add(element * tile.stages * m * tile.value_dim(), kSwizzleBytes)
      .add(4 * p_floats, 16)
      .add(4 * tile.stages * m, 16)
      .add(4 * tile.stages * m, 16)
      .add(sizeof(RandomBits) * tile.stages * (may_drop ? m : 2), 16)
      .add(sizeof(RandomBits) * tile.stages * (may_drop ? n / 2 : 1), alignof(RandomBits))
      .add(kBarrierBytes * (4 * key_tiles + 3 + 4 * tile.stages + 4), kBarrierBytes)
      .add(2 * 4, 4);
  return storage.size(kSwizzleBytes);
}

// sizeof(sm90::DqStorage).
constexpr int sm90_dq_smem_bytes(const Sm90BwdTile& tile, bool may_drop, Dtype dtype) {
  const int element = dtype_bytes(dtype), n = kSm90DqBlockN, k_stages = sm90_dq_k_stages(tile);
  SmemLayout storage;
  storage.add(element * kSm90DqBlockM * tile.head_dim, kSwizzleBytes)
      .add(element * kSm90DqBlockM * tile.value_dim(), kSwizzleBytes)
      .add(element * k_stages * n * tile.head_dim, kSwizzleBytes)
      .add(element * kSm90DqVStages * n * sm90_dq_value_cols(tile), kSwizzleBytes)
      .add(sizeof(RandomBits) * (may_drop ? kSm90DqBlockM : 2), alignof(RandomBits))
      .add(sizeof(RandomBits) * k_stages * (may_drop ? n / 2 : 1), alignof(RandomBits))
      .add(kBarrierBytes * (8 + 2 * k_stages + 2 * kSm90DqVStages + 4 + 1), kBarrierBytes)
      .add(2 * 4, 4);
  return storage.size(kSwizzleBytes);
}

// kBiased: boxes of a bias for each consumer; they take the place of a dedicated buffer for dK and dV.
constexpr int kSm90BwdBiasStages = 2;
// Whether shared memory also has room for the random bits of dropout.
constexpr bool sm90_biased_bwd_may_drop(const Sm90BwdTile& tile) { return tile.head_dim <= 64; }

// Whether shared memory has room for a second K: the next one lands early, and dK is staged where the last one was.
constexpr bool has_early_k(const Sm90BwdTile& tile, bool may_drop, bool by_list) {
  return tile.head_dim > 64 && !tile.one_k && !may_drop && !by_list;
}

// sizeof(sm90::BwdStorage).
constexpr int sm90_bwd_smem_bytes(const Sm90BwdTile& tile, bool may_drop, bool dq_in_smem, Dtype dtype,
                                  bool by_list = false, bool biased = false) {
  const int element = dtype_bytes(dtype), m = tile.block_m, n = tile.block_n;
  const bool has_group = has_dq_warpgroup(tile);
  const int v_stages = tile.head_dim <= 64 && !dq_in_smem ? 2 : 1, key_parts = has_group ? 2 : 1;
  const int k_stages = has_early_k(tile, may_drop, by_list) ? 2 : v_stages;
  const int64_t staged_dq = int64_t{has_group ? 2 : 1} * m * tile.head_dim;
  const int64_t dq_floats = dq_in_smem ? int64_t{kSharedDqRows} * tile.head_dim : staged_dq;
  const int64_t gradients = has_group && !dq_in_smem && !biased ? n * (tile.head_dim + tile.value_dim()) : 1;
  const int barriers = (2 * k_stages + v_stages) * key_parts + 1 + 2 * 4 + 4 * tile.stages + 2 * 2 + 1;
  const int bias_stages = biased ? kSm90BwdBiasStages : 0;
  SmemLayout storage;
  storage.add(2 * kBiasBoxBytes * bias_stages * m, kSwizzleBytes)
      .add(2 * kBarrierBytes * bias_stages, kBarrierBytes)
      .add(element * k_stages * n * tile.head_dim, kSwizzleBytes)
      .add(element * v_stages * n * tile.value_dim(), kSwizzleBytes)
      .add(element * tile.stages * m * tile.head_dim, kSwizzleBytes)
      .add(element * tile.stages * m * tile.value_dim(), kSwizzleBytes)
      .add(element * 2 * m * n, kSwizzleBytes)
      .add(4 * dq_floats, kSwizzleBytes)
      .add(element * gradients, kSwizzleBytes)
      .add(4 * tile.stages * m, 16)
      .add(4 * tile.stages * m, 16)
      .add(sizeof(RandomBits) * tile.stages * (may_drop ? m : 2), 16)
      .add(sizeof(RandomBits) * tile.stages * (may_drop ? n / 2 : 1), alignof(RandomBits))
      .add(kBarrierBytes * barriers, kBarrierBytes)
      .add(2 * 4, 4)
      .add(2 * 4 * tile.stages, 4)
      .add(4 * (by_list ? tile.stages * m : 1), 4);
  return storage.size(kSwizzleBytes);
}

// sizeof(sm90::BandPreparation::Storage): for each group of 128 threads stages of O and dO; a dQ tile.
constexpr int sm90_band_stages(const Sm90BwdTile& tile) { return tile.block_m > 64 ? 1 : 2; }
constexpr int sm90_bands_smem_bytes(const Sm90BwdTile& tile, Dtype dtype) {
  const int stages = sm90_bwd_threads(tile) / 128 * sm90_band_stages(tile);
  SmemLayout storage;
  storage.add(dtype_bytes(dtype) * stages * 2 * tile.block_m * tile.head_dim, kSwizzleBytes)
      .add(4 * tile.block_m * tile.head_dim, kSwizzleBytes)
      .add(kBarrierBytes * stages, kBarrierBytes);
  return storage.size(kSwizzleBytes);
}

}  // namespace plan
}  // namespace flash
