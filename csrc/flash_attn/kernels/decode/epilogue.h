// End of a split: the warp groups' results are combined through the free stages of their K/V rings and become output
// rows, a partial result in the workspace, a sum to accumulate the next split onto, or a DSMEM half of a 2-CTA cluster.
#pragma once

#include "kernels/common/partial.h"
#include "kernels/decode/cluster_pair.h"
#include "kernels/decode/mainloop.h"
#include "kernels/decode/output.h"

namespace flash {
namespace decode {

// Where a split's result goes.
enum class PartialKind { kOutput, kPartial, kAccumulate, kHalf };

template <class Config>
struct KvEpilogue {
  using Element = typename Config::Element;
  using Mainloop = KvMainloop<Config>;
  static constexpr int kHeadDim = Config::kHeadDim;
  static constexpr int kQuads = kHeadDim / 4;  // float4 of a row
  static constexpr int kKeyMask = Config::Swizzle::kMask;

  const Flash_kvcache_params& params;
  const WorkPart& part;
  const KvRing<Config>& ring;
  RowStats* const stats;  // shared: (kGroups + 1, 16), the last row for the accumulated sum

  // All threads together. slot: of the workspace, for partial and accumulated results; accumulates: the previous split
  // of the tile left its sum there.
  __device__ __forceinline__ void finish(Mainloop& mainloop, PartialKind kind, int64_t slot, bool accumulates) const {
    const KvQueries queries = kv_queries<!Config::kPlain>(params, part.request.index);
    const int rows = min(kv_rows(params, queries) - part.row_tile * Config::kRows, Config::kRows);
#pragma unroll
    for (int row_warp = 0; row_warp < Config::kRowWarps; ++row_warp) {
#pragma unroll
      for (int mi = 0; mi < Config::kRowTiles; ++mi) {
        const int first = (row_warp * Config::kRowTiles + mi) * 16;
        if (first >= rows) break;
        if (row_warp == ring.row_warp()) stage_result(mainloop, mi, rows - first);
        if (accumulates && threadIdx.x < min(rows - first, 16)) {
          stats[Config::kGroups * 16 + threadIdx.x] = accumulated_stats(slot, first + threadIdx.x);
        }
        __syncthreads();
        combine_groups(queries, first, min(rows - first, 16), kind, slot, accumulates);
        __syncthreads();
      }
    }
  }

  // The tile of at most 16 rows whose halves the two CTAs of the cluster hold in shared memory. Each CTA finishes every
  // second range of kThreads vectors.
  __device__ __forceinline__ void combine_halves() const {
    const KvQueries queries = kv_queries<!Config::kPlain>(params, part.request.index);
    const int rows = min(kv_rows(params, queries) - part.row_tile * Config::kRows, Config::kRows);
    for (int i = ClusterPair::rank() * Config::kThreads + threadIdx.x; i < rows * kQuads; i += 2 * Config::kThreads) {
      const int row = i / kQuads, col = i % kQuads * 4;
      RowStats total = ClusterPair::at(half_stats(), 0)[row];
      float4 value = *ClusterPair::at(half_o(row, col), 0);
      combine_partials(total, value, ClusterPair::at(half_stats(), 1)[row], *ClusterPair::at(half_o(row, col), 1),
                       params.softmax_scale_log2);
      write_output(queries, row, col, total, value);
    }
  }

 private:
  // The 8-column vectors of a row are swizzled against bank conflicts.
  __device__ __forceinline__ static int smem_offset(int row, int col) {
    return row * kHeadDim + (col / 8 ^ (row & kKeyMask)) * 8 + col % 8;
  }

  // Stores MMA tile mi of this warp, as far as it has rows, to its group's free stage.
  __device__ __forceinline__ void stage_result(Mainloop& mainloop, int mi, int rows) const {
    const int lane = threadIdx.x % 32, first_col = ring.col_warp() * Config::kCols;
    float* const to = ring.free_stage(ring.group());
#pragma unroll
    for (int half = 0; half < (Config::kSwapAb ? 1 : 2); ++half) {
      if (8 * half >= rows) break;
      const int row = lane / 4 + 8 * half;
      if constexpr (Config::kSwapAb) {
        stage_transposed(mainloop, to);
      } else if constexpr (Config::kEightBit) {
        stage_dequantized(mainloop, mi, half, to);
      } else {
#pragma unroll
        for (int ni = 0; ni < Config::kCols / 8; ++ni) {
          const float2 pair{mainloop.acc_o(2 * half, mi, ni), mainloop.acc_o(2 * half + 1, mi, ni)};
          *reinterpret_cast<float2*>(to + smem_offset(row, first_col + ni * 8 + lane % 4 * 2)) = pair;
        }
      }
      const float sum = quad_sum(mainloop.softmax.row_sum[2 * mi + half]);
      if (lane % 4 == 0 && first_col == 0) {
        stats[ring.group() * 16 + row] = {mainloop.softmax.row_max[2 * mi + half],
                                          mainloop.has_invalid_page ? RowStats::kInvalid : sum};
      }
    }
  }

  // Multiplies a row by V's descales: from here on results are those of dequantised values.
  __device__ __forceinline__ void stage_dequantized(Mainloop& mainloop, int mi, int half, float* to) const {
    const int row = threadIdx.x % 32 / 4 + 8 * half, first_col = eight_bit::o_col(threadIdx.x % 4);
    const KvDescale& descale = params.v_descale;
    const float factor = value_factor(mainloop, 2 * mi + half);
#pragma unroll
    for (int vector = 0; vector < kHeadDim / eight_bit::kVectorCols; ++vector) {
      const int col = vector * eight_bit::kVectorCols + first_col;
      float4 value = scaled(
          factor, {mainloop.acc_o(2 * half, mi, 2 * vector), mainloop.acc_o(2 * half, mi, 2 * vector + 1),
                   mainloop.acc_o(2 * half + 1, mi, 2 * vector), mainloop.acc_o(2 * half + 1, mi, 2 * vector + 1)});
      if (!Config::kPlain && descale.col != 0) scale_channels(value, col);
      *reinterpret_cast<float4*>(to + smem_offset(row, col)) = value;
    }
  }

  __device__ __forceinline__ float value_factor(const Mainloop& mainloop, int mi) const {
    return params.v_descale.by_row ? mainloop.block_scales.factor(mi) : mainloop.v_descale;
  }

  // The same for O^T.
  __device__ __forceinline__ void stage_transposed(Mainloop& mainloop, float* to) const {
    const int row = threadIdx.x % 4 * 2, col = threadIdx.x % 32 / 4 * 2;
    const float2 factors = Mainloop::of_out_rows(value_factor(mainloop, 0));
#pragma unroll
    for (int vector = 0; vector < kHeadDim / eight_bit::kVectorCols; ++vector) {
      const auto o = [&](int i) { return mainloop.acc_o(i, 0, vector); };
      const int at = vector * eight_bit::kVectorCols + col;
      *reinterpret_cast<float2*>(to + smem_offset(row, at)) = {factors.x * o(0), factors.x * o(2)};
      *reinterpret_cast<float2*>(to + smem_offset(row + 1, at)) = {factors.y * o(1), factors.y * o(3)};
    }
  }

  __device__ __forceinline__ void scale_channels(float4& value, int col) const {
    const float* const descales = params.v_descale.of_head(part.request.index, ring.head(part));
    float* const values = &value.x;
#pragma unroll
    for (int i = 0; i < 4; ++i) {
      if (col + i < params.d) values[i] *= descales[(col + i) * params.v_descale.col];
    }
  }

  __device__ __forceinline__ void combine_groups(const KvQueries& queries, int first, int rows, PartialKind kind,
                                                 int64_t slot, bool accumulates) const {
    const float scale = params.softmax_scale_log2;
    for (int i = threadIdx.x; i < rows * kQuads; i += Config::kThreads) {
      const int row = i / kQuads, col = i % kQuads * 4;
      RowStats total;
      float4 value = combined_groups(first + row, row, col, scale, total);
      if (accumulates) {
        RowStats sum = stats[Config::kGroups * 16 + row];
        float4 accumulated = *reinterpret_cast<const float4*>(partial_row(slot, first + row) + col);
        combine_partials(sum, accumulated, total, value, scale);
        total = sum;
        value = accumulated;
      }
      if (kind == PartialKind::kOutput) {
        write_output(queries, first + row, col, total, value);
      } else if (Config::kMayCluster && kind == PartialKind::kHalf) {
        *half_o(row, col) = value;
        if (col == 0) half_stats()[row] = total;
      } else {
        *reinterpret_cast<float4*>(partial_row(slot, first + row) + col) = value;
        if (col == 0) {
          *reinterpret_cast<float2*>(params.partial_stats + 2 * (slot * params.slot_rows + first + row)) = {total.max,
                                                                                                            total.sum};
        }
      }
    }
  }

  // This CTA's half lies in a K/V stage. After the only part of its range all stages are free; at this offset only
  // this thread has just read.
  __device__ __forceinline__ float4* half_o(int row, int col) const {
    return reinterpret_cast<float4*>(reinterpret_cast<float*>(ring.first_stage()) + smem_offset(row, col));
  }
  __device__ __forceinline__ RowStats* half_stats() const { return stats + Config::kGroups * 16; }

  // The first warp group with the K/V head of row `tile_row`; the others follow at distances of `tile_heads`.
  __device__ __forceinline__ int first_group(int tile_row) const {
    if (ring.group_step.pair_bit() == 0) return 0;
    const int row = part.row_tile * Config::kRows + tile_row;
    return params.group.divide(row - params.tile_group.divide(row) * params.tile_query_heads);
  }

  // tile_row: of the tile; it is `row` of the 16 rows in shared memory.
  __device__ __forceinline__ float4 combined_groups(int tile_row, int row, int col, float scale,
                                                    RowStats& total) const {
    const int first = first_group(tile_row), heads = Config::kMayPairHeads ? params.tile_heads : 1;
    RowStats group[Config::kGroups];
    total.max = -INFINITY;
    bool invalid = false;
#pragma unroll
    for (int i = 0; i < Config::kGroups; ++i) {
      const int g = first + i * heads;
      if (g >= Config::kGroups) break;
      group[i] = stats[g * 16 + row];
      total.max = fmaxf(total.max, group[i].max);
      invalid |= group[i].invalid();
    }
    float4 value{};
    total.sum = 0.0f;
#pragma unroll
    for (int i = 0; i < Config::kGroups; ++i) {
      const int g = first + i * heads;
      if (g >= Config::kGroups) break;
      const float weight = partial_weight(group[i].max, total.max, scale);
      const float4 partial = *reinterpret_cast<const float4*>(ring.free_stage(g) + smem_offset(row, col));
      value = add_scaled(value, weight, partial);
      total.sum = __fmaf_rn(weight, group[i].sum, total.sum);
    }
    if (invalid) total.sum = RowStats::kInvalid;
    return value;
  }

  __device__ __forceinline__ float* partial_row(int64_t slot, int row) const {
    return params.partial_o + (slot * params.slot_rows + row) * kHeadDim;
  }

  __device__ __forceinline__ RowStats accumulated_stats(int64_t slot, int row) const {
    const float2 pair = *reinterpret_cast<const float2*>(params.partial_stats + 2 * (slot * params.slot_rows + row));
    return {pair.x, pair.y};
  }

  __device__ __forceinline__ void write_output(const KvQueries& queries, int row, int col, const RowStats& total,
                                               const float4& value) const {
    const PackedRow at = packed_row(params, part.head_tile, part.row_tile * Config::kRows + row);
    if (Config::kEightBit && params.q_dtype == Dtype::kBf16) {
      write_output_row<ElementOf<Dtype::kBf16>>(params, queries, at, col, total, value);
    } else {
      write_output_row<Element>(params, queries, at, col, total, value);
    }
  }
};

}  // namespace decode
}  // namespace flash
