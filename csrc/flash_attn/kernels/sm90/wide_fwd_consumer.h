// A consumer of the wgmma forward of head dims above 256: the schedule of its steps, and its half of the output.
#pragma once

#include <cutlass/arch/barrier.h>

#include "kernels/common/fwd_epilogue.h"
#include "kernels/common/mask.h"
#include "kernels/common/max_logit.h"
#include "kernels/sm90/wide_fwd_products.h"
#include "kernels/sm90/wide_fwd_work.h"
#include "kernels/tma/pipeline_state.h"
#include "kernels/tma/tile_copy.h"

namespace flash {
namespace sm90 {

// kIndex: it has the steps of that parity, and that half of the columns of O.
//
// There is one buffer of P: the writer has added the P before to O, and nobody else has read that.
template <class Config, int kIndex>
struct WideFwdConsumer {
  using Element = typename Config::Element;
  static constexpr int kOther = 1 - kIndex;
  static constexpr int kRows = 2;          // accumulator rows per thread
  static constexpr uint32_t kBarrier = 1;  // named, of all consumers

  const WideFwdLaunch& launch;
  WideFwdStorage<Config>& storage;
  const WideFwdWork& work;
  const AccumulatorCoords<4> coords;
  const int warp = threadIdx.x % 128 / 32, lane = threadIdx.x % 32;

  WideFwdProducts<Config> products;
  Softmax<kRows> softmax;  // row_sum: of own steps
  tma::PipelineState<Config::kSlots> v_state;

  __device__ __forceinline__ WideFwdConsumer(const WideFwdLaunch& launch_, WideFwdStorage<Config>& storage_,
                                             const WideFwdWork& work_)
      : launch(launch_), storage(storage_), work(work_), coords(threadIdx.x % 128) {}

  __device__ __forceinline__ void arrive(tma::Barrier& barrier) const {
    if (lane == 0) barrier.arrive();
  }

  __device__ __forceinline__ void hold_query() {
    storage.q_full.wait(0);
#pragma unroll
    for (int chunk = 0; chunk < Config::kHeldChunks; ++chunk) products.hold_query(chunk, storage.query(chunk));
    tma::fence_buffer();  // V lands here next
    __syncwarp();
    arrive(storage.q_held);
  }

  // Issues chunk kChunk of S, and releases the K of the chunk before.
  template <int kChunk>
  __device__ __forceinline__ void compute_chunks(uint32_t parity) {
    if constexpr (kChunk < Config::kChunks) {
      storage.k_full[kIndex][kChunk].wait(parity);
      products.template start_scores<kChunk>(storage.q[0], storage.k[0]);
      if constexpr (kChunk > 0) {
        products.template wait<1>();
        arrive(storage.k_empty[kChunk - 1]);
      }
      compute_chunks<kChunk + 1>(parity);
    }
  }

  // S of an own step.
  __device__ __forceinline__ void compute_scores(int i) {
    compute_chunks<0>(i / Config::kConsumers & 1);
    products.wait_for_scores();
    arrive(storage.k_empty[Config::kChunks - 1]);
  }

  // S becomes P. Returns, warp-uniform, whether the row max was updated.
  __device__ __forceinline__ bool exponentiate(int i, float (&correction)[kRows]) {
    const Flash_fwd_params& params = launch.params;
    auto scores = products.scores();
    if (work.is_masked(i)) {
      const int key = work.block(i) * Config::kBlockN;
      apply_mask(scores, coords, work.visibility, work.tile.row_begin, work.tile.row_end, key, key + Config::kBlockN);
    }
    const bool rescales =
        softmax.update_row_max(scores, params.softmax_scale_log2, correction, params.rescale_threshold_log2);
    softmax.exponentiate(scores, params.softmax_scale_log2);
    products.pack_probs();
    return rescales;
  }

  __device__ __forceinline__ void rescale_out(const float (&correction)[kRows]) {
    auto out = products.out();
    softmax.rescale(out, correction);
  }

  // P, and the state of its rows.
  __device__ __forceinline__ void share_probs(bool rescales, const float (&correction)[kRows]) {
    products.store_probs(storage.probs);
#pragma unroll
    for (int mi = 0; mi < kRows; ++mi) {
      if (lane % 4 == 0) {
        storage.references[coords.row(mi)] = {softmax.row_max[mi], rescales ? correction[mi] : 1.0f};
      }
    }
    if (lane == 0) storage.is_large[warp] = softmax.is_large;
    tma::fence_buffer();
    __syncwarp();
    arrive(storage.probs_full[kIndex]);
  }

  // The state of the rows after step i, of the other consumer.
  __device__ __forceinline__ void receive_probs(int i) {
    storage.probs_full[kOther].wait(i / Config::kConsumers & 1);
    float correction[kRows];
    bool rescales = false;
#pragma unroll
    for (int mi = 0; mi < kRows; ++mi) {
      const RowReference shared = storage.references[coords.row(mi)];
      softmax.row_max[mi] = shared.max;
      softmax.row_sum[mi][0] *= shared.correction;
      correction[mi] = shared.correction;
      rescales |= shared.correction != 1.0f;
    }
    softmax.is_large = storage.is_large[warp];
    if (__any_sync(0xffffffffu, rescales)) rescale_out(correction);
  }

  // Issues O += P V of part kPart and releases V of kLag parts before. kOwn: P is in registers.
  template <bool kOwn, int kPart, int kLag>
  __device__ __forceinline__ void add_parts(tma::PipelineState<Config::kSlots>& released) {
    if constexpr (kPart < Config::kParts) {
      storage.v_full[kIndex][v_state.stage].wait(v_state.phase);
      const Element* const ring = storage.v[kIndex][0];
      if constexpr (kOwn) {
        products.template start_own_values<kPart>(ring, v_state.stage);
      } else {
        products.template start_other_values<kPart>(storage.probs, ring, v_state.stage);
      }
      v_state.advance();
      if constexpr (kPart >= kLag) {
        products.template wait<kLag>();
        release_part(released);
      }
      add_parts<kOwn, kPart + 1, kLag>(released);
    }
  }

  __device__ __forceinline__ void release_part(tma::PipelineState<Config::kSlots>& released) const {
    arrive(storage.v_empty[kIndex][released.stage]);
    released.advance();
  }

  // Waits for the last kLag parts, and releases their V.
  template <int kLag>
  __device__ __forceinline__ void finish_values(tma::PipelineState<Config::kSlots>& released) {
    products.wait_for_out();
#pragma unroll
    for (int part = 0; part < kLag; ++part) release_part(released);
  }

  __device__ __forceinline__ void add_own_values() {
    tma::PipelineState<Config::kSlots> released = v_state;
    add_parts<true, 0, 1>(released);
    finish_values<1>(released);
  }

  __device__ __forceinline__ void add_other_values(int i) {
    tma::PipelineState<Config::kSlots> released = v_state;
    receive_probs(i);
    add_parts<false, 0, 1>(released);
    finish_values<1>(released);
  }

  // An own step, and before its softmax the step of the other consumer that precedes it. The first consumer has P of
  // that step before its own keys are free, the second one has its scores first; while it exponentiates them, the other
  // values are still being added.
  __device__ __forceinline__ void run_step(int i) {
    constexpr int kLag = 2;
    float correction[kRows];
    bool rescales;
    if constexpr (kIndex == 0) {
      if (i > 0) add_other_values(i - 1);
      compute_scores(i);
      rescales = exponentiate(i, correction);
    } else {
      compute_scores(i);
      tma::PipelineState<Config::kSlots> released = v_state;
      receive_probs(i - 1);
      add_parts<false, 0, kLag>(released);
      rescales = exponentiate(i, correction);
      finish_values<kLag>(released);
    }
    share_probs(rescales, correction);
    if (rescales) rescale_out(correction);
    add_own_values();
  }

  __device__ __forceinline__ void run() {
    products.clear_out();
    hold_query();
    const int count = work.count();
#pragma unroll 1
    for (int i = kIndex; i < count; i += Config::kConsumers) run_step(i);
    if (count > 0 && (count - 1) % Config::kConsumers != kIndex) add_other_values(count - 1);
    store();
  }

  // Both consumers add the same two numbers: their rows have one sum.
  __device__ __forceinline__ void add_row_sums() {
    const int thread = threadIdx.x % 128;
#pragma unroll
    for (int mi = 0; mi < kRows; ++mi) storage.row_sums[kIndex][mi][thread] = softmax.row_sum[mi][0];
    cutlass::arch::NamedBarrier::sync(128 * Config::kConsumers, kBarrier);  // after it nobody reads K any more
#pragma unroll
    for (int mi = 0; mi < kRows; ++mi) {
      softmax.row_sum[mi][0] = storage.row_sums[0][mi][thread] + storage.row_sums[1][mi][thread];
    }
  }

  __device__ __forceinline__ void store() {
    const Flash_fwd_params& params = launch.params;
    const WorkTile& tile = work.tile;
    add_row_sums();
    float o_scale[kRows];
    const float sink = row_sink(params, tile);
    if (kIndex == 0) store_max_logit(softmax, params, tile, coords, tile.row_begin);
    finalize_rows(softmax, o_scale, params, sink);
    if (kIndex == 0) store_lse(softmax, params, tile, coords, tile.row_begin, sink);
    constexpr int kFirstCol = kIndex * Config::kHalf;
    Element* const staged = storage.k[kFirstCol / Config::kChunkCols];
    products.stage_out(staged, o_scale);
    tma::fence_buffer();
    __syncwarp();
    if (lane != 0) return;
    const tma::TmaRows rows(params.is_varlen(), tile.batch, tile.q_begin, tile.seqlen_q);
    tma::store_tile<Config::kHalfAtoms, Config::kChunkCols, Config::kBlockM>(
        launch.o_map, staged + 16 * warp * Config::kChunkCols, rows, tile.row_begin + 16 * warp, tile.head, kFirstCol);
    cute::tma_store_wait<0>();  // shared memory must outlive the reads
  }
};

}  // namespace sm90
}  // namespace flash
