// Loads the packed query rows of a tile into shared memory, rotated if the call asks for it. Over an 8-bit cache they
// have either 16-bit type, and become fp16 with the column order of the 8-bit operands (core/eight_bit.h).
#pragma once

#include "kernels/decode/config.h"
#include "kernels/decode/eight_bit.h"
#include "kernels/decode/packed_rows.h"
#include "kernels/decode/rotary.h"
#include "kernels/decode/work_iterator.h"
#include "kernels/sm80/warp_ops.h"

namespace flash {
namespace decode {

template <class Config>
struct KvQuery {
  using Element = typename Config::Element;
  using Swizzle = typename Config::Swizzle;

  const Flash_kvcache_params& params;
  const WorkPart& part;
  Element* const smem;  // (kRows, kHeadDim)

  // All threads together; on return the rows are visible to all of them. Missing rows are zeros.
  __device__ __forceinline__ void load() const {
    const int rows = min(kv_rows(params, queries()) - first_row(), Config::kRows);
    for (int i = threadIdx.x; i < Config::kRows * Swizzle::kVectors; i += Config::kThreads) {
      const int row = i / Swizzle::kVectors, vector = i % Swizzle::kVectors;
      uint4 value{};
      if (row < rows && vector * 8 < params.d) value = read_vector(row, vector * 8);
      *reinterpret_cast<uint4*>(smem + smem_offset(row, vector * 8)) = value;
    }
    __syncthreads();
    if (!Config::kPlain && params.rotary.cos_ptr != nullptr && part.request.is_valid()) {
      if (Config::kEightBit && params.q_dtype == Dtype::kBf16) {
        rotate(rows, reinterpret_cast<ElementOf<Dtype::kBf16>*>(smem));
      } else {
        rotate(rows, smem);
      }
      __syncthreads();
    }
    if constexpr (Config::kEightBit) narrow();
  }

  // For an 8-bit cache: after copy_async(), all threads together; on return the rows are visible to all of them.
  __device__ __forceinline__ void narrow() const {
    static_assert(eight_bit::q_pair_position(2) == 1 && eight_bit::q_pair_position(1) == 4, "as written here");
    constexpr int kGroups = Config::kHeadDim / eight_bit::kVectorCols;
    for (int i = threadIdx.x; i < Config::kRows * kGroups; i += Config::kThreads) {
      const int row = i / kGroups, col = i % kGroups * eight_bit::kVectorCols;
      uint4& low = *reinterpret_cast<uint4*>(smem + smem_offset(row, col));
      uint4& high = *reinterpret_cast<uint4*>(smem + smem_offset(row, col + 8));
      const uint4 a = low, b = high;
      low = {half_pair(a.x), half_pair(a.z), half_pair(b.x), half_pair(b.z)};
      high = {half_pair(a.y), half_pair(a.w), half_pair(b.y), half_pair(b.w)};
    }
    __syncthreads();
  }

  // Copies into every thread's next cp.async group; without rotary.
  __device__ __forceinline__ void copy_async() const {
    const int rows = min(kv_rows(params, queries()) - first_row(), Config::kRows);
    for (int i = threadIdx.x; i < Config::kRows * Swizzle::kVectors; i += Config::kThreads) {
      const int row = i / Swizzle::kVectors, vector = i % Swizzle::kVectors;
      copy16_async(smem + smem_offset(row, vector * 8), row_vector(min(row, rows - 1), vector * 8), row < rows);
    }
  }

 private:
  __device__ __forceinline__ KvQueries queries() const {
    return kv_queries<!Config::kPlain>(params, part.request.index);
  }

  __device__ __forceinline__ int first_row() const { return part.row_tile * Config::kRows; }

  __device__ __forceinline__ static int smem_offset(int row, int col) {
    return row * Config::kHeadDim + (col / 8 ^ Swizzle::key(row)) * 8 + col % 8;
  }

  __device__ __forceinline__ const Element* row_vector(int row, int col) const {
    const PackedRow at = packed_row(params, part.head_tile, first_row() + row);
    const KvQueries rows = queries();
    return static_cast<const Element*>(params.q_ptr) + rows.batch * params.q_strides.batch +
           (rows.first + at.token) * params.q_strides.row + at.head * params.q_strides.head + col;
  }

  __device__ __forceinline__ uint4 read_vector(int row, int col) const {
    const Element* const from = row_vector(row, col);
    if (Config::kPlain || params.q_vectors) return *reinterpret_cast<const uint4*>(from);
    uint4 value{};
    Element* const elements = reinterpret_cast<Element*>(&value);
#pragma unroll
    for (int i = 0; i < 8; ++i) {
      if (col + i < params.d) elements[i] = from[i];
    }
    return value;
  }

  // A pair of q's elements as fp16; finite ones beyond its range become its largest.
  __device__ __forceinline__ uint32_t half_pair(uint32_t pair) const {
    if (params.q_dtype != Dtype::kBf16) return pair;
    return pack_pair(in_half_range(__uint_as_float(pair << 16)), in_half_range(__uint_as_float(pair & 0xffff0000u)),
                     Element{});
  }

  template <class RowElement>
  __device__ __forceinline__ void rotate(int rows, RowElement* smem) const {
    const Rotary& rotary = params.rotary;
    for (int i = threadIdx.x; i < rows * rotary.pairs; i += Config::kThreads) {
      const int row = i / rotary.pairs, pair = i - row * rotary.pairs;
      const int token = rotary.one_position ? 0 : params.tile_group.divide(first_row() + row);
      const RotaryPair cols = rotary_pair(rotary, pair);
      rotate_pair(rotary, part.request.cached + token, pair, smem[smem_offset(row, cols.first)],
                  smem[smem_offset(row, cols.second)]);
    }
  }
};

}  // namespace decode
}  // namespace flash
