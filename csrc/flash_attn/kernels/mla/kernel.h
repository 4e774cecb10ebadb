// MLA decode by mma.sync, sm_80 and newer: a thread block has a tile of rows (tokens x heads) and a split of the keys.
#pragma once

#include "kernels/mla/config.h"
#include "kernels/mla/work.h"
#include "kernels/sm80/warp_ops.h"

namespace flash {
namespace mla {

template <class Config>
struct MlaTile {
  using Element = typename Config::Element;
  using Rows = typename Config::RowSwizzle;
  using Probs = typename Config::ProbsSwizzle;
  static constexpr int kLoadThreads = 8;  // of a row: each 128-byte line by one instruction
  static constexpr int kLoadRows = Config::kThreads / kLoadThreads;
  static constexpr int kRowsPerThread = Config::kKeys / kLoadRows;
  static constexpr int kLines = Config::kDim / 64, kLatentLines = Config::kLatent / 64;
  static constexpr int kThreadRows = 2 * Config::kRowTiles;  // g and g + 8 of each 16 rows

  const Flash_mla_params& params;
  MlaStorage<Config>& storage;
  const MlaWork work;
  const int* const table;  // the request's pages
  const int warp = threadIdx.x / 32, lane = threadIdx.x % 32;

  PageRow pages[kRowsPerThread];  // of the next load
  bool lacks_pages = false;       // so far
  float acc_o[Config::kRowTiles][Config::kColTiles][4] = {};
  float row_max[kThreadRows];
  float row_sum[kThreadRows];  // of this warp's keys and, until the end, this thread's columns
  int key_end[kThreadRows];

  __device__ __forceinline__ MlaTile(const Flash_mla_params& params_, MlaStorage<Config>& storage_)
      : params(params_), storage(storage_), work(params_, Config::kRows, Config::kKeys), table(work.table(params_)) {
#pragma unroll
    for (int i = 0; i < kThreadRows; ++i) {
      row_max[i] = -INFINITY;
      row_sum[i] = 0.0f;
      key_end[i] = work.key_end(params, work.first_row + row_of(i));
    }
  }

  // The row, within the tile, of the thread's i-th row of accumulators.
  __device__ __forceinline__ int row_of(int i) const { return i * 8 + lane / 4; }

  __device__ __forceinline__ static Element* vector_of(Element* rows, int row, int vector) {
    return rows + row * Config::kDim + (vector ^ Rows::key(row)) * 8;
  }

  __device__ __forceinline__ void load_query() const {
#pragma unroll 1
    for (int row = threadIdx.x / kLoadThreads; row < Config::kRows; row += kLoadRows) {
      const int at = work.first_row + row;
      const bool exists = at < work.rows;
      const int row_of_request = exists ? at : 0;
      const Element* const latent =
          static_cast<const Element*>(params.qv_ptr) + work.query_offset(params, params.qv_strides, row_of_request);
      const Element* const rope =
          static_cast<const Element*>(params.q_ptr) + work.query_offset(params, params.q_strides, row_of_request);
      copy_row(storage.q, row, latent, rope, exists);
    }
  }

  __device__ __forceinline__ void copy_row(Element* rows, int row, const Element* latent, const Element* rope,
                                           bool exists) const {
    const int vector = threadIdx.x % kLoadThreads;
#pragma unroll
    for (int line = 0; line < kLines; ++line) {
      const Element* const from = line < kLatentLines ? latent + line * 64 : rope + (line - kLatentLines) * 64;
      sm80::copy16_async(vector_of(rows, row, line * 8 + vector), from + vector * 8, exists);
    }
  }

  // The table is read one step before the rows: one step is too short to hide two dependent reads.
  __device__ __forceinline__ void find_pages(int step) {
#pragma unroll
    for (int i = 0; i < kRowsPerThread; ++i) {
      const int key = step * Config::kKeys + threadIdx.x / kLoadThreads + i * kLoadRows;
      pages[i] = page_row(params.paged, table, key, key >= work.begin && key < work.end);
    }
  }

  // Rows that are no keys become 0: NaN there would pass a probability of 0.
  __device__ __forceinline__ void load_keys(int step, int stage) {
    if (step < work.to) {
#pragma unroll
      for (int i = 0; i < kRowsPerThread; ++i) {
        const PageRow at = pages[i];
        const int row_of_step = threadIdx.x / kLoadThreads + i * kLoadRows;
        lacks_pages |= work.lacks_page(params, step * Config::kKeys + row_of_step, step, at.page);
        const int64_t page = at.valid ? at.page : 0, row = at.valid ? at.row : 0;
        copy_row(storage.kv[stage], row_of_step,
                 static_cast<const Element*>(params.latent_ptr) + page * params.latent_strides.batch +
                     row * params.latent_strides.row,
                 static_cast<const Element*>(params.rope_ptr) + page * params.rope_strides.batch +
                     row * params.rope_strides.row,
                 at.valid);
      }
    }
    sm80::commit_copies();
  }

  // Scores of the warp's 8 keys. Two sums each: one would be a chain of 36 products, each waiting for the one before.
  __device__ __forceinline__ void multiply_keys(const Element* keys, float (&acc_s)[Config::kRowTiles][4]) {
    Element* const k = const_cast<Element*>(keys);
    const int key_row = warp * 8 + lane % 8, q_row = lane % 16;
    float acc[2][Config::kRowTiles][4] = {};
#pragma unroll 6
    for (int pair = 0; pair < Config::kDim / 32; ++pair) {
      uint32_t b[4];
      sm80::load_matrices(b, vector_of(k, key_row, pair * 4 + lane / 8));
#pragma unroll
      for (int tile = 0; tile < Config::kRowTiles; ++tile) {
#pragma unroll
        for (int half = 0; half < 2; ++half) {
          uint32_t a[4];
          sm80::load_matrices(a, vector_of(storage.q, tile * 16 + q_row, pair * 4 + half * 2 + lane / 16));
          sm80::multiply(acc[half][tile], a, b[2 * half], b[2 * half + 1], Element{});
        }
      }
    }
#pragma unroll
    for (int tile = 0; tile < Config::kRowTiles; ++tile) {
#pragma unroll
      for (int i = 0; i < 4; ++i) acc_s[tile][i] = acc[0][tile][i] + acc[1][tile][i];
    }
  }

  __device__ __forceinline__ void mask(int step, float (&acc_s)[Config::kRowTiles][4]) const {
    const int first = step * Config::kKeys + warp * 8 + lane % 4 * 2;
#pragma unroll
    for (int i = 0; i < kThreadRows; ++i) {
#pragma unroll
      for (int col = 0; col < 2; ++col) {
        const bool sees = first + col >= work.begin && first + col < key_end[i];
        if (!sees) acc_s[i / 2][i % 2 * 2 + col] = -INFINITY;
      }
    }
  }

  // The largest score of each row among the warp's keys, for the other warps.
  __device__ __forceinline__ void share_max(const float (&acc_s)[Config::kRowTiles][4]) const {
#pragma unroll
    for (int i = 0; i < kThreadRows; ++i) {
      float largest = fmaxf(acc_s[i / 2][i % 2 * 2], acc_s[i / 2][i % 2 * 2 + 1]);
      largest = fmaxf(largest, __shfl_xor_sync(0xffffffffu, largest, 1));
      largest = fmaxf(largest, __shfl_xor_sync(0xffffffffu, largest, 2));
      if (lane % 4 == 0) storage.row_max[warp][row_of(i)] = largest;
    }
  }

  __device__ __forceinline__ void update_rows(const float (&acc_s)[Config::kRowTiles][4]) {
#pragma unroll
    for (int i = 0; i < kThreadRows; ++i) {
      const int row = row_of(i);
      float top = row_max[i];
#pragma unroll
      for (int w = 0; w < Config::kWarps; ++w) top = fmaxf(top, storage.row_max[w][row]);
      const float shift = top == -INFINITY ? 0.0f : top * params.softmax_scale_log2;
      const float correction = partial_weight(row_max[i], top, params.softmax_scale_log2);  // 1 where top stays
      const float low = exp2f(acc_s[i / 2][i % 2 * 2] * params.softmax_scale_log2 - shift);
      const float high = exp2f(acc_s[i / 2][i % 2 * 2 + 1] * params.softmax_scale_log2 - shift);
      row_sum[i] = row_sum[i] * correction + low + high;
      row_max[i] = top;
#pragma unroll
      for (int col = 0; col < Config::kColTiles; ++col) {
        acc_o[i / 2][col][i % 2 * 2] *= correction;
        acc_o[i / 2][col][i % 2 * 2 + 1] *= correction;
      }
      Element* const probs = storage.probs + row * Config::kKeys + (warp ^ Probs::key(row)) * 8 + lane % 4 * 2;
      *reinterpret_cast<uint32_t*>(probs) = pack_pair(low, high, Element{});
    }
  }

  __device__ __forceinline__ void multiply_values(const Element* values) {
    Element* const v = const_cast<Element*>(values);
    const int row = lane % 16;
#pragma unroll
    for (int half = 0; half < Config::kKeys / 16; ++half) {
      uint32_t a[Config::kRowTiles][4];
#pragma unroll
      for (int tile = 0; tile < Config::kRowTiles; ++tile) {
        const int at = tile * 16 + row, vector = half * 2 + lane / 16;
        sm80::load_matrices(a[tile], storage.probs + at * Config::kKeys + (vector ^ Probs::key(at)) * 8);
      }
#pragma unroll
      for (int pair = 0; pair < Config::kColTiles / 2; ++pair) {
        uint32_t b[4];
        const int vector = warp * (Config::kColsPerWarp / 8) + pair * 2 + lane / 16;
        sm80::load_matrices_transposed(b, vector_of(v, half * 16 + row, vector));
#pragma unroll
        for (int tile = 0; tile < Config::kRowTiles; ++tile) {
          sm80::multiply(acc_o[tile][2 * pair], a[tile], b[0], b[1], Element{});
          sm80::multiply(acc_o[tile][2 * pair + 1], a[tile], b[2], b[3], Element{});
        }
      }
    }
  }

  __device__ __forceinline__ void run() {
    load_query();
#pragma unroll
    for (int i = 0; i < Config::kStages - 1; ++i) {
      find_pages(work.from + i);
      load_keys(work.from + i, i);
    }
    find_pages(work.from + Config::kStages - 1);
    lacks_pages |=
        work.lacks_pages(params, work.seen, 0, threadIdx.x, Config::kThreads);  // while the first rows arrive
    int stage = 0;
#pragma unroll 1
    for (int step = work.from; step < work.to; ++step) {
      sm80::wait_for_copies_but(Config::kStages - 2);
      __syncthreads();  // the step's rows have landed, and all warps are done with those of the step before
      const int free = stage == 0 ? Config::kStages - 1 : stage - 1;
      load_keys(step + Config::kStages - 1, free);
      find_pages(step + Config::kStages);
      float acc_s[Config::kRowTiles][4];
      multiply_keys(storage.kv[stage], acc_s);
      mask(step, acc_s);
      share_max(acc_s);
      __syncthreads();
      update_rows(acc_s);
      __syncthreads();
      multiply_values(storage.kv[stage]);
      stage = stage == Config::kStages - 1 ? 0 : stage + 1;
    }
    sm80::wait_for_copies_but(0);
    const bool is_complete = !__syncthreads_or(lacks_pages);
    finish(work.is_valid && is_complete);
  }

  __device__ __forceinline__ void finish(bool is_valid) {
#pragma unroll
    for (int i = 0; i < kThreadRows; ++i) {
      row_sum[i] += __shfl_xor_sync(0xffffffffu, row_sum[i], 1);
      row_sum[i] += __shfl_xor_sync(0xffffffffu, row_sum[i], 2);
      if (lane % 4 == 0) storage.row_sum[warp][row_of(i)] = row_sum[i];
    }
    __syncthreads();
#pragma unroll
    for (int i = 0; i < kThreadRows; ++i) {
      float sum = 0.0f;
#pragma unroll
      for (int w = 0; w < Config::kWarps; ++w) sum += storage.row_sum[w][row_of(i)];
      const int row = work.first_row + row_of(i);
      if (row < work.rows) store_row(i, row, {row_max[i], is_valid ? sum : RowStats::kInvalid});
    }
  }

  __device__ __forceinline__ void store_row(int i, int row, const RowStats& stats) const {
    const MlaRowEnd<Element> end(params, work, row, stats, warp == 0 && lane % 4 == 0);
    const int first_col = warp * Config::kColsPerWarp + lane % 4 * 2;
#pragma unroll
    for (int col = 0; col < Config::kColTiles; ++col) {
      const float* const o = &acc_o[i / 2][col][i % 2 * 2];
      const float low = end.scaled(o[0]), high = end.scaled(o[1]);
      if (end.partial != nullptr) {
        *reinterpret_cast<float2*>(end.partial + first_col + col * 8) = {low, high};
      } else {
        *reinterpret_cast<uint32_t*>(end.out + first_col + col * 8) = pack_pair(low, high, Element{});
      }
    }
  }
};

template <class Config>
__global__ void __launch_bounds__(Config::kThreads) mla_decode_kernel(const __grid_constant__ Flash_mla_params params) {
  extern __shared__ __align__(128) char smem[];
  MlaTile<Config>(params, *reinterpret_cast<MlaStorage<Config>*>(smem)).run();
}

}  // namespace mla
}  // namespace flash
