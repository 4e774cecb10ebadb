// The softmax of the wgmma decode kernel, and where its results go.
#pragma once

#include "kernels/common/exact_softmax.h"
#include "kernels/common/mask.h"
#include "kernels/decode/output.h"
#include "kernels/decode/wgmma_products.h"
#include "kernels/decode/work_iterator.h"
#include "kernels/sm80/warp_ops.h"

namespace flash {
namespace decode {

// Consumer `index` has every second n_block of a work part, and all of O; at the end the first one adds both up.
template <class Config>
struct KvWgmmaConsumer {
  using Element = typename Config::Element;
  static constexpr int kBoth = 1;  // named barrier of both consumers
  static constexpr int kThreads = Config::kConsumerThreads, kQuads = Config::kHeadDim / 4;
  static constexpr int kThreadRows = 2, kThreadValues = Config::kRows * Config::kHeadDim / 128;

  const Flash_kvcache_params& params;
  KvWgmmaStorage<Config>& storage;
  WorkIterator<false> work;
  const int index, warp = threadIdx.x % 128 / 32, lane = threadIdx.x % 32;

  KvWgmmaProducts<Config> products;
  ExactSoftmax<kThreadRows> softmax;

  __device__ __forceinline__ KvWgmmaConsumer(const Flash_kvcache_params& params_, KvWgmmaStorage<Config>& storage_,
                                             int index_)
      : params(params_), storage(storage_), work(params_, blockIdx.x, storage_.cta_work), index(index_) {}

  // Among both consumers.
  __device__ __forceinline__ int thread() const { return index * 128 + threadIdx.x % 128; }
  __device__ __forceinline__ int first_row() const { return work.part.row_tile * Config::kRows; }
  __device__ __forceinline__ KvQueries queries() const { return kv_queries<true>(params, work.part.request.index); }
  __device__ __forceinline__ int rows() const { return min(kv_rows(params, queries()) - first_row(), Config::kRows); }

  __device__ __forceinline__ void copy_query() const {
    const int vector = thread() % Config::kVectors, last = rows() - 1;
    const KvQueries tokens = queries();
#pragma unroll 1
    for (int row = thread() / Config::kVectors; row < Config::kRows; row += kThreads / Config::kVectors) {
      const PackedRow at = packed_row(params, work.part.head_tile, first_row() + min(row, last));
      const Element* const from = static_cast<const Element*>(params.q_ptr) + tokens.batch * params.q_strides.batch +
                                  (tokens.first + at.token) * params.q_strides.row + at.head * params.q_strides.head;
      sm80::copy16_async(storage.q + Config::vector_offset(Config::kRows, row, vector),
                         from + vector * tma::kVectorCols, row <= last);
    }
    sm80::commit_copies();
  }

  // Whether the request may not be used. The parts of a tile share the pages that the request needs, so that every tile
  // comes to the same verdict. Invalid pages of packed sequences are zeros instead.
  __device__ __forceinline__ bool finds_invalid() const {
    const WorkPart& part = work.part;
    const KvRequest& request = part.request;
    if (!request.is_valid() || params.paged.block_table == nullptr || params.is_varlen()) return request.invalid;
    KvRows needed = kv_required_rows(params, request);
    if (part.span.from > 0) needed.begin = max(needed.begin, request.first_row + part.block_begin() * Config::kKeys);
    if (part.span.to < part.count()) needed.end = min(needed.end, request.first_row + part.block_end() * Config::kKeys);
    return KvPages(params, request.index).has_invalid_page(needed.begin, needed.end, thread(), kThreads);
  }

  // `step`: of the thread block's n_blocks.
  __device__ __forceinline__ void run_step(int block, int step, const KvTokens& tokens, const Visibility& visibility) {
    const int stage = step % Config::kStages;
    storage.full[stage].wait(step / Config::kStages & 1);
    tma::fence_buffer();  // between the copies and wgmma
    products.multiply_keys(storage.k[stage]);
    auto scores = products.scores();
    auto out = products.out();
    const int key = block * Config::kKeys;
    if (key < visibility.key_begin(tokens.end - 1) || key + Config::kKeys > visibility.key_end(tokens.begin)) {
      const PackedCoords coords{params.tile_group, first_row() + warp * 16, tokens.begin};
      apply_mask(scores, coords, visibility, tokens.begin, tokens.end, key, key + Config::kKeys);
    }
    softmax.update(scores, out, params.softmax_scale_log2);
    products.multiply_values(storage.v[stage]);
    if (lane == 0) storage.empty[stage].arrive();
  }

  // Returns the number of n_blocks.
  __device__ __forceinline__ int run_part(int first_step) {
    const WorkPart& part = work.part;
    copy_query();
    const bool invalid = finds_invalid();
    products.clear_out();
    softmax.clear();
    sm80::wait_for_copies_but(0);
    const bool is_valid = !sm80::any_named(kBoth, kThreads, invalid);
    products.load_query(storage.q, warp, lane);
    const KvTokens tokens = kv_tokens(params, queries(), part.row_tile);
    const Visibility visibility{queries().count, part.request.seqlen_k, params.window};
    const int begin = part.block_begin(), count = part.block_end() - begin;
#pragma unroll 1
    for (int i = index; i < count; i += Config::kConsumers) run_step(begin + i, first_step + i, tokens, visibility);
    combine(is_valid);
    store();
    return count;
  }

  // A row of this thread and its lanes' sum.
  __device__ __forceinline__ int row_of(int i) const { return warp * 16 + i * 8 + lane / 4; }

  // O and the statistics of both consumers, in shared memory.
  __device__ __forceinline__ void combine(bool is_valid) {
    RowStats own[kThreadRows];
#pragma unroll
    for (int i = 0; i < kThreadRows; ++i) own[i] = {softmax.row_max[i], quad_sum(softmax.row_sum[i])};
    float4* const quads = reinterpret_cast<float4*>(storage.out) + threadIdx.x % 128;
    if (index == 1) {
#pragma unroll
      for (int i = 0; i < kThreadValues / 4; ++i) {
        const auto& o = products.acc_o;
        quads[i * 128] = {o(4 * i), o(4 * i + 1), o(4 * i + 2), o(4 * i + 3)};
      }
#pragma unroll
      for (int i = 0; i < kThreadRows; ++i) {
        if (lane % 4 == 0) storage.stats[0][row_of(i)] = own[i];
      }
    }
    sm80::sync_named(kBoth, kThreads);
    if (index == 0) add_second(own, quads, is_valid);
    sm80::sync_named(kBoth, kThreads);  // the second consumer's O has been read
    if (index == 0) write_out();
    sm80::sync_named(kBoth, kThreads);
  }

  __device__ __forceinline__ void add_second(const RowStats (&own)[kThreadRows], const float4* quads, bool is_valid) {
    float weights[kThreadRows][2];
#pragma unroll
    for (int i = 0; i < kThreadRows; ++i) {
      const RowStats second = storage.stats[0][row_of(i)];
      const float top = fmaxf(own[i].max, second.max);
      weights[i][0] = partial_weight(own[i].max, top, params.softmax_scale_log2);
      weights[i][1] = partial_weight(second.max, top, params.softmax_scale_log2);
      RowStats both{top, weights[i][0] * own[i].sum + weights[i][1] * second.sum};
      if (!is_valid) both.sum = RowStats::kInvalid;
      if (lane % 4 == 0) storage.stats[1][row_of(i)] = both;
    }
#pragma unroll
    for (int i = 0; i < kThreadValues / 4; ++i) {  // two columns of both rows
      const float4 second = quads[i * 128];
      const float values[4] = {second.x, second.y, second.z, second.w};
#pragma unroll
      for (int j = 0; j < 4; ++j) {
        float& value = products.acc_o(4 * i + j);
        value = value * weights[j / 2][0] + values[j] * weights[j / 2][1];
      }
    }
  }

  // The 8-column vectors of a row are swizzled against bank conflicts.
  __device__ __forceinline__ static int out_offset(int row, int col) {
    return row * Config::kHeadDim + (col / 8 ^ (row & 7)) * 8 + col % 8;
  }

  __device__ __forceinline__ void write_out() {
#pragma unroll
    for (int eight = 0; eight < Config::kHeadDim / 8; ++eight) {
#pragma unroll
      for (int i = 0; i < kThreadRows; ++i) {
        const float2 pair{products.acc_o(eight * 4 + i * 2), products.acc_o(eight * 4 + i * 2 + 1)};
        *reinterpret_cast<float2*>(storage.out + out_offset(row_of(i), eight * 8 + lane % 4 * 2)) = pair;
      }
    }
  }

  // Output rows, or a partial result in the workspace.
  __device__ __forceinline__ void store() const {
    const WorkPart& part = work.part;
    const KvQueries tokens = queries();
    const int count = rows();
    const int64_t slot = kv_slot(blockIdx.x, part.span);
#pragma unroll 1
    for (int i = thread(); i < count * kQuads; i += kThreads) {
      const int row = i / kQuads, col = i % kQuads * 4;
      const float4 value = *reinterpret_cast<const float4*>(storage.out + out_offset(row, col));
      const RowStats stats = storage.stats[1][row];
      if (part.whole()) {
        write_output_row<Element>(params, tokens, packed_row(params, part.head_tile, first_row() + row), col, stats,
                                  value);
        continue;
      }
      const int64_t at = slot * params.slot_rows + row;
      *reinterpret_cast<float4*>(params.partial_o + at * Config::kHeadDim + col) = value;
      if (col == 0) *reinterpret_cast<float2*>(params.partial_stats + 2 * at) = {stats.max, stats.sum};
    }
  }

  __device__ __forceinline__ void run() {
    int step = 0;
#pragma unroll 1
    for (work.next(); !work.done(); work.next()) step += run_part(step);
  }
};

}  // namespace decode
}  // namespace flash
