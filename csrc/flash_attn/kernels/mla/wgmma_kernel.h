// MLA decode by wgmma, compute capability 9.0: a thread block has a tile of 64 rows (tokens x heads) and a split of the
// keys. Steps of 64 keys alternate between two consumers:
//
//   [C0]  S0 │ P0 │ O += P0 V0 │ O += P1 V1 │ S2 │ P2 │ …      columns 0 to 255 of O
//   [C1]  S1 │ O += P0 V0 │ P1 │ O += P1 V1 │ S3 │ O += P2 V2 │ P3 │ …      the others
//
// Both add the steps up in ascending order, whatever the tile, so that a row's result does not depend on its tile.
//
// Clocks of a step, of an SM: tensor cores 2176 (S 1152, O 1024); shared memory 2240 (S 1024, O 576, keys written 576,
// P 64); exp2 256; L2, 72 KB, 1992 at 37 bytes each. So products bind where rows fill the tile, memory where they do
// not. Two stages hold all that fits, so latency is exposed: from O += P V of a step to S of the next but one, whose
// keys take its place. Hence halves, each asked for again as soon as its consumer is done, and products of an atom of
// columns as soon as it has landed.
#pragma once

#include "kernels/mla/wgmma_config.h"
#include "kernels/mla/wgmma_products.h"
#include "kernels/mla/work.h"
#include "kernels/sm80/warp_ops.h"

namespace flash {
namespace mla {

// kIndex: it has the steps of that parity, in the stage of that number, and that half of the columns of O.
//
// It releases its half of a stage after its own O += P V of the step. By then the other has computed S of it, if it had
// to: P is of that S. By the same waits nobody reads P when it is written: the writer has added the P before to O, and
// its own S comes from keys that took the place of the keys of its last P.
template <class Config, int kIndex>
struct MlaConsumer {
  using Element = typename Config::Element;
  using Storage = MlaWgmmaStorage<Config>;
  static constexpr int kOther = 1 - kIndex;
  static constexpr int kThreadRows = 2;  // g and g + 8 of the warp's 16
  static constexpr int kEightsOfHalf = Config::kHalf / 8, kEightsOfKeys = Config::kKeys / 8;
  // Named barriers: of both consumers; of the hand-over of the probabilities that the first or the second one wrote.
  static constexpr int kBarrier = 1, kProbsBarrier = 2, kConsumerThreads = 128 * Config::kConsumers;

  const Flash_mla_params& params;
  Storage& storage;
  const MlaWork& work;
  const int warp = threadIdx.x % 128 / 32, lane = threadIdx.x % 32;

  MlaProducts<Config> products;
  float reference[kThreadRows];  // of P and O: a score that no score exceeds by more than the threshold
  float row_sum[kThreadRows];    // of own steps and, until the end, this thread's keys
  int key_end[kThreadRows];
  int unmasked_end;  // every row sees the keys before

  __device__ __forceinline__ MlaConsumer(const Flash_mla_params& params_, Storage& storage_, const MlaWork& work_)
      : params(params_), storage(storage_), work(work_) {
#pragma unroll
    for (int i = 0; i < kThreadRows; ++i) {
      reference[i] = -INFINITY;
      row_sum[i] = 0.0f;
      key_end[i] = work.key_end(params, work.first_row + row_of(i));
    }
    unmasked_end = work.key_end(params, work.first_row);
  }

  __device__ __forceinline__ int row_of(int i) const { return warp * 16 + i * 8 + lane / 4; }
  __device__ __forceinline__ const Element* half_of_stage(int stage) const {
    return storage.kv[stage] + kIndex * Config::kHalfAtoms * Config::kAtomElements;
  }

  __device__ __forceinline__ void load_query() const {
    const int thread = threadIdx.x % 128 + kIndex * 128, vector = thread % kCopyLanes;
#pragma unroll 1
    for (int row = thread / kCopyLanes; row < Config::kRows; row += kConsumerThreads / kCopyLanes) {
      const bool exists = work.first_row + row < work.rows;
      const int at = exists ? work.first_row + row : 0;
      const Element* const latent = static_cast<const Element*>(params.qv_ptr) +
                                    work.query_offset(params, params.qv_strides, at) + vector * tma::kVectorCols;
      const Element* const rope = static_cast<const Element*>(params.q_ptr) +
                                  work.query_offset(params, params.q_strides, at) + vector * tma::kVectorCols;
#pragma unroll
      for (int atom = 0; atom < Config::kAtoms; ++atom) {
        sm80::copy16_async(vector_in_atom<Config>(storage.q, atom, row, vector),
                           atom == Config::kRopeAtom ? rope : latent + atom * Config::kAtomCols, exists);
      }
    }
    sm80::commit_copies();
  }

  __device__ __forceinline__ void hold_query() {
#pragma unroll
    for (int k = 0; k < Config::kHeldSlices; ++k) {
      const int atom = Config::held_atom(kIndex, k / Config::kSlices), vector = k % Config::kSlices * 2 + lane / 16;
      uint32_t registers[4];
      sm80::load_matrices(registers, vector_in_atom<Config>(storage.q, atom, warp * 16 + lane % 16, vector));
      products.hold_query(k, registers);
    }
  }

  struct Landed {
    const tma::Barrier* full;  // of atoms of columns
    uint32_t parity;
    bool in_groups;

    __device__ __forceinline__ const tma::Barrier& barrier(int atom) const {
      return full[in_groups ? Config::group_barrier(kIndex, atom) : atom];
    }
    __device__ __forceinline__ bool test(int atom) const { return barrier(atom).test(parity); }
    __device__ __forceinline__ void wait(int atom) const { barrier(atom).wait(parity); }

    // After the wait, before wgmma reads. Of groups no thread that wrote has seen its copies land and fenced them.
    __device__ __forceinline__ void fence(int atom) const {
      if (in_groups && Config::begins_group(atom)) tma::fence_buffer();
    }
  };

  // Issues S of an own step, an atom of columns as soon as it has landed; does not wait for S.
  __device__ __forceinline__ void start_scores(int i) {
    const uint32_t parity = i / Config::kStages & 1;
    const Landed landed{storage.kv_full[kIndex], parity, lands_in_groups<Config>(params)};
    products.template start_scores<kIndex>(storage.q, storage.kv[kIndex], landed);
  }

  __device__ __forceinline__ void mask(int i) {
    const int first = (work.from + i) * Config::kKeys;
    if (first >= work.begin && first + Config::kKeys <= unmasked_end) return;
#pragma unroll
    for (int eight = 0; eight < kEightsOfKeys; ++eight) {
#pragma unroll
      for (int col = 0; col < 2; ++col) {
        const int key = first + eight * 8 + lane % 4 * 2 + col;
#pragma unroll
        for (int row = 0; row < kThreadRows; ++row) {
          if (key < work.begin || key >= key_end[row]) products.score(eight, row, col) = -INFINITY;
        }
      }
    }
  }

  // S becomes P. A row decides for itself whether its reference rises: its bits must not depend on its neighbours.
  // Without branches and row by row only in the last loop: the other consumer waits for P.
  __device__ __forceinline__ void exponentiate(float (&correction)[kThreadRows]) {
    const float scale = params.softmax_scale_log2;
    float largest[kThreadRows], shift[kThreadRows];
#pragma unroll
    for (int i = 0; i < kThreadRows; ++i) {
      largest[i] = products.score(0, i, 0);
#pragma unroll
      for (int eight = 0; eight < kEightsOfKeys; ++eight) {
        largest[i] = fmaxf(largest[i], fmaxf(products.score(eight, i, 0), products.score(eight, i, 1)));
      }
    }
#pragma unroll
    for (int lanes = 1; lanes <= 2; lanes *= 2) {
#pragma unroll
      for (int i = 0; i < kThreadRows; ++i) {
        largest[i] = fmaxf(largest[i], __shfl_xor_sync(0xffffffffu, largest[i], lanes));
      }
    }
#pragma unroll
    for (int i = 0; i < kThreadRows; ++i) {
      const bool rises = (largest[i] - reference[i]) * scale > kRescaleThresholdLog2;
      correction[i] = exp2f(rises ? (reference[i] - largest[i]) * scale : 0.0f);  // of -inf: 0
      if (rises) reference[i] = largest[i];
      shift[i] = reference[i] == -INFINITY ? 0.0f : reference[i] * scale;
    }
    float sum[kThreadRows][2] = {};
#pragma unroll
    for (int eight = 0; eight < kEightsOfKeys; ++eight) {
#pragma unroll
      for (int i = 0; i < kThreadRows; ++i) {
#pragma unroll
        for (int col = 0; col < 2; ++col) {
          float& score = products.score(eight, i, col);
          score = exp2f(score * scale - shift[i]);
          sum[i][col] += score;
        }
      }
    }
#pragma unroll
    for (int i = 0; i < kThreadRows; ++i) row_sum[i] = row_sum[i] * correction[i] + (sum[i][0] + sum[i][1]);
    products.pack_probs();
  }

  // P and the references for the other consumer.
  __device__ __forceinline__ void share_probs(const float (&correction)[kThreadRows]) {
#pragma unroll
    for (int sixteen = 0; sixteen < Config::kKeys / 16; ++sixteen) {
      store_matrices(vector_in_atom<Config>(storage.probs(kIndex), 0, warp * 16 + lane % 16, sixteen * 2 + lane / 16),
                     products.prob_pair(sixteen, 0), products.prob_pair(sixteen, 1), products.prob_pair(sixteen, 2),
                     products.prob_pair(sixteen, 3));
    }
    tma::fence_buffer();
    __syncwarp();  // all four lanes of a row have read the references that one of them overwrites
#pragma unroll
    for (int i = 0; i < kThreadRows; ++i) {
      if (lane % 4 == 0) storage.references[row_of(i)] = {reference[i], correction[i]};
    }
    sm80::arrive_named(kProbsBarrier + kIndex, kConsumerThreads);
  }

  __device__ __forceinline__ void rescale_out(const float (&correction)[kThreadRows]) {
    if (!__any_sync(0xffffffffu, correction[0] != 1.0f || correction[1] != 1.0f)) return;
#pragma unroll
    for (int eight = 0; eight < kEightsOfHalf; ++eight) {
#pragma unroll
      for (int i = 0; i < kThreadRows; ++i) {
        products.out(eight, i, 0) *= correction[i];
        products.out(eight, i, 1) *= correction[i];
      }
    }
  }

  // Issues O += P V of the next step of the other consumer; does not wait for it.
  __device__ __forceinline__ void start_other_values() {
    sm80::sync_named(kProbsBarrier + kOther, kConsumerThreads);
    float correction[kThreadRows];
#pragma unroll
    for (int row = 0; row < kThreadRows; ++row) {
      const MlaReference shared = storage.references[row_of(row)];
      reference[row] = shared.max;
      correction[row] = shared.correction;
      row_sum[row] *= shared.correction;
    }
    rescale_out(correction);
    products.start_other_values(storage.probs(kOther), half_of_stage(kOther));
  }

  // O is complete: this consumer's half of the stage may be overwritten.
  __device__ __forceinline__ void finish_values(int stage) {
    products.wait_for_out();
    if (lane == 0) storage.kv_empty[stage][kIndex].arrive();
  }

  // Until the other consumer's half of O is complete, too. Tensor cores that prefer the first consumer would multiply
  // by its S first, and free the keys of the other's stage later.
  __device__ __forceinline__ void wait_for_values_of_other(int i) const {
    storage.kv_empty[kOther][kOther].wait(i / Config::kStages & 1);
  }

  // An own step, and before it the step of the other consumer that precedes it. The first consumer has P of that step
  // before its own keys arrive, the second one has its keys first.
  __device__ __forceinline__ void run_step(int i) {
    if (kIndex == 0) {
      if (i > 0) {
        start_other_values();
        finish_values(kOther);
        wait_for_values_of_other(i - 1);
      }
      start_scores(i);
      products.wait_for_scores();
    } else {
      start_scores(i);
      products.wait_for_scores();  // ptxas would wait here too: O may be rescaled next
      start_other_values();
    }
    mask(i);
    float correction[kThreadRows];
    exponentiate(correction);
    share_probs(correction);
    if (kIndex == 1) finish_values(kOther);
    rescale_out(correction);
    products.start_own_values(half_of_stage(kIndex));
    finish_values(kIndex);
  }

  // Whether the request is invalid or lacks pages, but for those that producers check as they read them.
  __device__ __forceinline__ bool is_invalid() const {
    const int first = Config::kFp8 ? max(work.begin, work.from * Config::kKeys) : work.seen;
    const int own_end = Config::kFp8 ? work.to * Config::kKeys : 0;
    const int thread = threadIdx.x % 128 + kIndex * 128;
    return work.lacks_pages(params, first, own_end, thread, kConsumerThreads) || !work.is_valid;
  }

  __device__ __forceinline__ void run() {
    load_query();
    const bool invalid = is_invalid();
    products.clear_out();
    sm80::wait_for_copies_but(0);
    tma::fence_buffer();
    sm80::sync_named(kBarrier, kConsumerThreads);
    hold_query();
    const int count = work.to - work.from;
#pragma unroll 1
    for (int i = kIndex; i < count; i += Config::kStages) run_step(i);
    if (count > 0 && (count - 1) % Config::kStages != kIndex) {
      start_other_values();
      finish_values(kOther);
    }
    finish(invalid);
  }

  __device__ __forceinline__ void finish(bool invalid) {
#pragma unroll
    for (int i = 0; i < kThreadRows; ++i) {
      row_sum[i] += __shfl_xor_sync(0xffffffffu, row_sum[i], 1);
      row_sum[i] += __shfl_xor_sync(0xffffffffu, row_sum[i], 2);
      if (lane % 4 == 0) storage.row_sums[kIndex][row_of(i)] = row_sum[i];
    }
    // After it, too, nobody reads keys any more.
    const bool is_valid = !sm80::any_named(Config::kEndBarrier, Config::kEndThreads, invalid);
    Element* outs[kThreadRows];
#pragma unroll
    for (int i = 0; i < kThreadRows; ++i) {
      const int row = work.first_row + row_of(i);
      const float sum = storage.row_sums[0][row_of(i)] + storage.row_sums[1][row_of(i)];
      outs[i] = row < work.rows ? finish_row(i, row, {reference[i], is_valid ? sum : RowStats::kInvalid}) : nullptr;
    }
    if (params.splits == 1) store_out(outs);
  }

  // Returns where the output goes, for which O is scaled. Partial results are stored.
  __device__ __forceinline__ Element* finish_row(int i, int row, const RowStats& stats) {
    const MlaRowEnd<Element> end(params, work, row, stats, kIndex == 0 && lane % 4 == 0);
#pragma unroll
    for (int eight = 0; eight < kEightsOfHalf; ++eight) {
      float &low = products.out(eight, i, 0), &high = products.out(eight, i, 1);
      low = end.scaled(low), high = end.scaled(high);
      if (end.partial == nullptr) continue;
      *reinterpret_cast<float2*>(end.partial + kIndex * Config::kHalf + eight * 8 + lane % 4 * 2) = {low, high};
    }
    return end.out;
  }

  // Through the memory of the keys, so that a row's half leaves by one instruction. outs: of this thread's rows.
  __device__ __forceinline__ void store_out(Element* const (&outs)[kThreadRows]) {
    Element* const staged = storage.kv[kIndex] + warp * 16 * Config::kHalf;
    const auto vector_of = [&](int row, int vector) { return staged + row * Config::kHalf + (vector ^ row % 8) * 8; };
#pragma unroll
    for (int sixteen = 0; sixteen < kEightsOfHalf / 2; ++sixteen) {
      uint32_t pairs[4];
#pragma unroll
      for (int i = 0; i < 4; ++i) {
        const int eight = sixteen * 2 + i / 2;
        pairs[i] = pack_pair(products.out(eight, i % 2, 0), products.out(eight, i % 2, 1), Element{});
      }
      store_matrices(vector_of(lane % 16, sixteen * 2 + lane / 16), pairs[0], pairs[1], pairs[2], pairs[3]);
    }
    __syncwarp();
#pragma unroll
    for (int row = 0; row < 16; ++row) {
      const auto own = reinterpret_cast<uint64_t>(outs[row / 8]);
      auto* const to = reinterpret_cast<Element*>(__shfl_sync(0xffffffffu, own, row % 8 * 4));
      if (to == nullptr) continue;
      *reinterpret_cast<uint4*>(to + kIndex * Config::kHalf + lane * 8) =
          *reinterpret_cast<const uint4*>(vector_of(row, lane));
    }
  }
};

// By each producer thread after its last copy, with whether its keys lack a page.
template <class Config>
__device__ __forceinline__ void end_producer(bool lacks_pages) {
  sm80::any_named(Config::kEndBarrier, Config::kEndThreads, lacks_pages);
}

template <class Config>
__device__ __forceinline__ void init_barriers(MlaWgmmaStorage<Config>& storage, const Flash_mla_params& params) {
  const int landed = Config::landed_arrivals(lands_in_groups<Config>(params));
  for (int stage = 0; stage < Config::kStages; ++stage) {
    for (tma::Barrier& barrier : storage.kv_full[stage]) barrier.init(landed);
    for (tma::Barrier& barrier : storage.kv_empty[stage]) barrier.init(4);
  }
  tma::Barrier::fence_init();
}

}  // namespace mla
}  // namespace flash
