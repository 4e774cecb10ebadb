// cp.async ring of K and V of a warp group: it prefetches steps, across tiles too. Groups of two heads meet in pairs.
#pragma once

#include "core/visible_range.h"
#include "kernels/common/pdl.h"
#include "kernels/decode/config.h"
#include "kernels/decode/descales.h"
#include "kernels/decode/query.h"
#include "kernels/decode/row_copies.h"
#include "kernels/decode/warp_group.h"
#include "kernels/decode/work_iterator.h"
#include "kernels/sm80/warp_ops.h"

namespace flash {
namespace decode {

template <class Config>
struct KvRing : RowCopies<Config> {
  using Element = typename Config::Element;
  using Stored = typename Config::Stored;
  using Swizzle = typename Config::KvSwizzle;
  static constexpr bool kHasFullSteps =
      Config::kPlain && Config::kEightBit && (Config::kHeadDim < 256 || Config::kSwapAb);  // else spills

  using Base = RowCopies<Config>;
  using Base::copy, Base::copy_rows, Base::copy_vector, Base::kBounded, Base::kWhole;
  using Base::group, Base::group_warp, Base::row_warp, Base::lane, Base::params, Base::group_step;
  using Row = typename Base::Row;

  Element* const q_rows;              // shared: Q of the first tile is copied after its first keys (kPlain)
  Stored* const stages;               // of this warp group
  WorkPart* const parts;              // of this warp group: the work parts of the steps in flight
  WorkIterator<Config::kPlain> work;  // at the part of the next step to load
  int block = 0, block_end = 0;       // n_blocks of the next steps to load
  int free_stages;                    // free stages, and one more until the first step is found
  int pending_steps = 0;              // steps loaded, not yet computed
  int parts_loaded = 0;               // parts begun by the loads
  int parts_computed = 0;             // parts begun by the MMAs
  int fill_stage = 0;                 // the stage that the next step is loaded into
  int use_stage = 0;                  // the stage of the current step
  const Stored* k_head = nullptr;     // row 0 of the sequence's K/V head that this thread copies, or of its page 0
  const Stored* v_head = nullptr;
  const float* k_descale_head = nullptr;  // kHasFullSteps: of the rows from k_head on
  const float* v_descale_head = nullptr;
  int page = 0;  // page of this lane's row (lane % kStep) of the next step; kPlain: see first_page_block
  int page_row = 0;
  int full_block_end = 0;    // kHasFullSteps: the steps before it are whole, without pages or new rows
  int first_page_block = 0;  // kPlain: of this n_block on, a lane holds each page of a step; no pages: a later one
  uint32_t invalid_page_bits = 0;  // bit i: the step loaded i steps ago has keys in invalid pages
  bool append_done = false;        // the append kernel has finished

  __device__ __forceinline__ KvRing(const Flash_kvcache_params& params_, const CtaWork& cta_work, char* smem)
      : Base{params_, GroupStep<Config>(params_)},
        q_rows(reinterpret_cast<Element*>(smem)),
        stages(reinterpret_cast<Stored*>(smem + Config::kStagesAt) + group() * params_.stages * Config::kStageElements),
        parts(reinterpret_cast<WorkPart*>(smem + Config::kPartsAt) + group() * plan::kKvParts),
        work(params_, blockIdx.x, cta_work),
        free_stages(params_.stages + 1) {
    static_assert(sizeof(WorkPart) * plan::kKvParts * plan::kKvGroups == plan::kKvPartBytes, "plan and kernel agree");
  }

  // K/V head of this group.
  __device__ __forceinline__ int head(const WorkPart& part) const { return first_head(part) + group_step.head(); }
  __device__ __forceinline__ int block_n() const { return Config::kMayPairHeads ? params.block_n : Config::kBlockN; }
  // The first key of this group's step of an n_block.
  __device__ __forceinline__ int first_key(int n_block) const { return n_block * block_n() + group_step.first_key(); }
  __device__ __forceinline__ bool is_paged() const { return params.paged.block_table != nullptr; }

  __device__ __forceinline__ const Stored* k_stage() const { return stages + use_stage * Config::kStageElements; }
  __device__ __forceinline__ const Stored* v_stage() const { return k_stage() + Config::kValuesAt; }

  // Descales of the step's keys, where they are by row.
  __device__ __forceinline__ const float* k_descales() const {
    return reinterpret_cast<const float*>(k_stage() + Config::kDescalesAt);
  }
  __device__ __forceinline__ const float* v_descales() const { return k_descales() + Config::kStep; }

  __device__ __forceinline__ Stored* first_stage() const {
    return stages - group() * group_step.stages * Config::kStageElements;
  }

  // 16 rows of fp32 results fit into the stage that is filled next, which is free between two steps.
  __device__ __forceinline__ float* free_stage(int of_group) const {
    Stored* const first = first_stage() + of_group * group_step.stages * Config::kStageElements;
    return reinterpret_cast<float*>(first + fill_stage * Config::kStageElements);
  }

  // Loads into every free stage, while there are steps; false: no step is left to compute. The first call only finds
  // the first step, so that loads and iteration are instantiated once (instruction cache).
  __device__ __forceinline__ bool advance() {
    do {
      if (parts_loaded > 0) load_next();
      find_next_step();
    } while (--free_stages > 0);
    return pending_steps > 0;
  }

  // advance() where one stage is free and the next step is as the one before it: of the same tile, and whole.
  __device__ __forceinline__ bool advance_full() {
    if (!kHasFullSteps || block + 1 >= full_block_end) return false;
    load_full_step();
    ++block;
    ++pending_steps;
    invalid_page_bits <<= 1;
    commit_copies();
    fill_stage = group_step.next_stage(fill_stage);
    free_stages = 0;
    return true;
  }

  // Whether the queries of the part begun last arrive with its first step.
  __device__ __forceinline__ bool loads_query() const { return Config::kPlain && parts_computed == 1; }

  // The part of the next step, if the previous part is done.
  __device__ __forceinline__ WorkPart next_part() {
    sync_group<Config>();
    return parts[parts_computed++ % plan::kKvParts];
  }

  // Waits until the oldest step in flight has landed, for all warps of the group.
  __device__ __forceinline__ void wait() {
    group_step.wait_for_oldest_copies();
    group_step.sync_copies();
  }

  // Every warp of the group is done with the step.
  __device__ __forceinline__ void release() {
    group_step.sync_copies();
    use_stage = group_step.next_stage(use_stage);
    --pending_steps;
    free_stages = 1;
  }

  __device__ __forceinline__ bool step_has_invalid_page() const {
    return invalid_page_bits >> (group_step.stages - 1) & 1;
  }

  __device__ __forceinline__ void finish() {
    if (params.seqlen_new > 0 && !append_done) wait_for_previous_kernel();
  }

 private:
  __device__ __forceinline__ int first_head(const WorkPart& part) const {
    return Config::kMayPairHeads ? part.head_tile * params.tile_heads : part.head_tile;
  }

  __device__ __forceinline__ void load_next() {
    invalid_page_bits <<= 1;
    if (work.done()) {
      allow_next_kernel();  // early enough for it to start, late enough not to take issue slots from the loop
    } else {
      load_step();
      // After the first keys, whose latency covers the address arithmetic of the queries.
      if (Config::kPlain && parts_computed == 0 && free_stages == group_step.stages)
        KvQuery<Config>{params, work.part, q_rows}.copy_async();
      ++block;
      ++pending_steps;
    }
    commit_copies();
    fill_stage = group_step.next_stage(fill_stage);
  }

  __device__ __forceinline__ void find_next_step() {
    if (block == block_end) {  // always, once the work is done
      if (work.done()) return;
      work.next();
      if (work.done()) return;
      enter_tile();
    }
    if constexpr (Config::kPlain) {
      if (block - first_page_block >= Config::kPageSteps) look_up_pages();  // there are pages
    } else {
      find_page();
    }
  }

  // Pages of the next kPageSteps steps; used one step later, which hides the latency.
  __device__ __forceinline__ void look_up_pages() {
    first_page_block = block;
    const int key = key_begin() + lane() / Config::kStepPages * block_n() +
                    lane() % Config::kStepPages * (Config::kStep / Config::kStepPages);
    const KvRequest& request = work.part.request;
    page = key < request.seqlen_k
               ? params.paged
                     .block_table[request.index * params.paged.block_table_stride + params.paged.page_size.divide(key)]
               : 0;
  }

  // A slot is overwritten at least one step after its last read.
  __device__ __forceinline__ void enter_tile() {
    const WorkPart& part = work.part;
    if (threadIdx.x % Config::kGroupThreads == 0) parts[parts_loaded % plan::kKvParts] = part;
    ++parts_loaded;
    block = part.block_begin();
    block_end = part.block_end();
    first_page_block = is_paged() ? block - Config::kPageSteps : block_end;
    full_block_end = block;  // load_step() loads the first one
    const int64_t row = is_paged() ? 0 : part.request.first_row;
    const int64_t batch = is_paged() ? 0 : part.request.cache_row;
    const int head = first_head(part) + group_step.copy_head();
    k_head = static_cast<const Stored*>(params.k_ptr) + batch * params.k_strides.batch + row * params.k_strides.row +
             head * params.k_strides.head;
    v_head = static_cast<const Stored*>(params.v_ptr) + batch * params.v_strides.batch + row * params.v_strides.row +
             head * params.v_strides.head;
    if constexpr (kHasFullSteps) {
      k_descale_head = descales_of_head(params.k_descale);
      v_descale_head = descales_of_head(params.v_descale);
    }
  }

  __device__ __forceinline__ int key_begin() const { return first_key(block); }

  // Address of this lane's row; the block table entry is loaded one step early to hide its latency.
  __device__ __forceinline__ void find_page() {
    const int key = key_begin() + lane() % Config::kStep;
    if (!is_paged()) {
      page_row = key;  // k_head is at key 0
      return;
    }
    const int row = work.part.request.first_row + key;
    const int slot = params.paged.page_size.divide(row);
    page_row = row - slot * params.paged.page_size.divisor;
    page = key < work.part.request.seqlen_k
               ? params.paged.block_table[work.part.request.index * params.paged.block_table_stride + slot]
               : 0;
  }

  __device__ __forceinline__ void load_step() {
    const WorkPart& part = work.part;
    const int keys =
        part.request.invalid || part.empty() ? 0 : part.request.seqlen_k - key_begin();  // from this step on
    const int first = num_masked_keys();
    if (params.seqlen_new > 0 && !append_done && step_reads_new_rows()) {
      wait_for_previous_kernel();
      append_done = true;
    }
    Stored* const k_to = stages + fill_stage * Config::kStageElements;
    Stored* const v_to = k_to + Config::kValuesAt;
    if constexpr (Config::kPlain && Config::kStepPages > 1) {
      load_step_of_pages(first, keys, k_to, v_to);
      if (kHasFullSteps && !is_paged() && keys > 0) {
        const KvRequest& request = part.request;
        const bool waits = params.seqlen_new > 0 && !append_done;
        const int end = waits ? min(request.seqlen_k, request.cached - request.first_row) : request.seqlen_k;
        full_block_end = min((end - group_step.first_key() + block_n() - Config::kStep) / block_n(), block_end);
      }
    } else if constexpr (Config::kPlain) {
      load_strided_step(first, keys, k_to, v_to);
    } else {
      load_general_step(first, keys, k_to, v_to);
    }
  }

  // The most frequent step, which neither tests keys nor looks for pages.
  __device__ __forceinline__ void load_full_step() {
    Stored* const k_to = stages + fill_stage * Config::kStageElements;
    const int64_t key = key_begin();
    copy_rows(kWhole, k_head + key * params.k_strides.row, params.k_strides.row, 0, Config::kStep, k_to);
    copy_rows(kWhole, v_head + key * params.v_strides.row, params.v_strides.row, 0, Config::kStep,
              k_to + Config::kValuesAt);
    load_descales(0, static_cast<int>(key) + lane(), true, k_to);
  }

  // Number of keys, from the step's first one, before the first visible key of the request: they are zero-filled.
  // Computed only where there may be some, so that it takes no register elsewhere.
  __device__ __forceinline__ int num_masked_keys() const {
    const WorkPart& part = work.part;
    if (!params.window.may_mask_left() || block != part.first_block) return 0;
    const KvQueries queries = kv_queries<!Config::kPlain>(params, part.request.index);
    return first_visible_key({queries.count, part.request.seqlen_k, params.window}) - key_begin();
  }

  // Keys before it are masked for every query of the request and need no page, even if they share its step.
  __device__ __forceinline__ int first_required_key() const {
    const KvRequest& request = work.part.request;
    return kv_required_rows(params, request).begin - request.first_row;
  }

  // Consecutive rows: one page, or no pages.
  __device__ __forceinline__ void load_strided_step(int first_key, int keys, Stored* k_to, Stored* v_to) {
    int row = key_begin(), at = 0;
    if (is_paged()) {
      at = __shfl_sync(0xffffffffu, page, block - first_page_block);
      row -= params.paged.page_size.divide(row) * params.paged.page_size.divisor;
      if (static_cast<unsigned>(at) >= static_cast<unsigned>(params.paged.num_pages)) {
        invalid_page_bits |= keys > 0 && key_begin() + Config::kStep > first_required_key() ? 1 : 0;
        at = keys = 0;
      }
    }
    const int64_t batch = at, first = row;
    const Stored* const k_from = k_head + batch * params.k_strides.batch + first * params.k_strides.row;
    const Stored* const v_from = v_head + batch * params.v_strides.batch + first * params.v_strides.row;
    if (keys >= Config::kStep && first_key <= 0) {
      copy_rows(kWhole, k_from, params.k_strides.row, first_key, keys, k_to);
      copy_rows(kWhole, v_from, params.v_strides.row, first_key, keys, v_to);
    } else {
      copy_rows(kBounded, k_from, params.k_strides.row, first_key, keys, k_to);
      copy_rows(kBounded, v_from, params.v_strides.row, first_key, keys, v_to);
    }
  }

  // Consecutive rows in each of the step's pages, or no pages.
  __device__ __forceinline__ void load_step_of_pages(int first_key, int keys, Stored* k_to, Stored* v_to) {
    constexpr int kPages = Config::kStepPages, kPageRows = Config::kStep / kPages;
    static_assert(Config::kGroupWarps == 1 && kPages <= 2, "as written here");
    unsigned pages[kPages], rows[kPages];  // of the page's first key of the step
    unsigned in_pool = 0xffffffffu;        // by key of the step
#pragma unroll
    for (int i = 0; i < kPages; ++i) {
      pages[i] = 0;
      rows[i] = key_begin() + i * kPageRows;
    }
    if (is_paged()) {
#pragma unroll
      for (int i = 0; i < kPages; ++i) {
        pages[i] = __shfl_sync(0xffffffffu, page, (block - first_page_block) * kPages + i);
        rows[i] -= params.paged.page_size.divide(rows[i]) * params.paged.page_size.divisor;
        if (pages[i] >= static_cast<unsigned>(params.paged.num_pages)) {
          const int last = min((i + 1) * kPageRows, keys) - 1;
          invalid_page_bits |= i * kPageRows <= last && key_begin() + last >= first_required_key() ? 1 : 0;
          in_pool &= ~(((1u << (kPageRows - 1)) * 2 - 1) << i * kPageRows);
          pages[i] = 0;
        }
      }
    }
    const auto load = [&](const Stored* head, const MatrixStrides& strides, Stored* to) {
      const Stored* from[kPages];
#pragma unroll
      for (int i = 0; i < kPages; ++i) {
        from[i] = head + int64_t{pages[i]} * strides.batch + int64_t{rows[i] + group_step.copy_row()} * strides.row;
      }
      const int64_t iteration_stride = Config::kRowsPerIteration * strides.row;
      const auto row_at = [&](int row, int i) {
        constexpr int kIterations = Config::kRowIterations / kPages;
        return Row{from[i / kIterations] + i % kIterations * iteration_stride,
                   row >= first_key && row < keys && (in_pool >> row & 1)};
      };
      if (keys >= Config::kStep && first_key <= 0 && in_pool == 0xffffffffu) {
        copy(kWhole, row_at, to);
      } else {
        copy(kBounded, row_at, to);
      }
    };
    load(k_head, params.k_strides, k_to);
    load(v_head, params.v_strides, v_to);
    const int own_page = lane() / kPageRows;
    load_descales(kPages == 1 || own_page == 0 ? pages[0] : pages[kPages - 1],
                  (kPages == 1 || own_page == 0 ? rows[0] : rows[kPages - 1]) + lane() % kPageRows,
                  lane() >= first_key && lane() < keys && (in_pool >> lane() & 1), k_to);
  }

  // Those of row 0 of the sequence, or of its page 0.
  __device__ __forceinline__ const float* descales_of_head(const KvDescale& descale) const {
    const KvRequest& request = work.part.request;
    return descale.of_row(is_paged() ? 0 : request.cache_row, is_paged() ? 0 : request.first_row, head(work.part));
  }

  // The descales of this lane's key, if they are by row. row: of page `at`, or a key if there are no pages.
  __device__ __forceinline__ void load_descales(unsigned at, unsigned row, bool valid, Stored* stage) const {
    float* const to = reinterpret_cast<float*>(stage + Config::kDescalesAt) + lane();
    const auto load = [&](const KvDescale& descale, const float* head, float* to) {
      if (!descale.by_row) return;
      if constexpr (!kHasFullSteps) head = descales_of_head(descale);
      copy4_async(to, head + int64_t{at} * descale.batch + int64_t{row} * descale.row, valid);
    };
    if (row_warp() == 0) load(params.k_descale, k_descale_head, to);
    if (row_warp() == Config::kRowWarps - 1) load(params.v_descale, v_descale_head, to + Config::kStep);
  }

  __device__ __forceinline__ void load_general_step(int first, int keys, Stored* k_to, Stored* v_to) {
    int lane_page = page;  // -1: no page
    if (is_paged()) {
      const bool in_pool = static_cast<unsigned>(page) < static_cast<unsigned>(params.paged.num_pages);
      const int at = lane() % Config::kStep;
      const bool invalid = !in_pool && at < keys && !params.is_varlen();  // packed batches: invalid pages are zeros
      if (__any_sync(0xffffffffu, invalid)) {
        invalid_page_bits |= __any_sync(0xffffffffu, invalid && key_begin() + at >= first_required_key()) ? 1 : 0;
      }
      if (!in_pool) lane_page = -1;
    }
    if constexpr (Config::kEightBit) {
      const bool valid = lane_page >= 0 && lane() >= first && lane() < keys;
      load_descales(max(lane_page, 0), valid ? page_row : 0, valid, k_to);
    }
    if (params.kv_vector_bytes == 16 && step_is_strided()) {
      // If any row of the step has a key, the first one has.
      lane_page = __shfl_sync(0xffffffffu, lane_page, 0);
      const int64_t row = page_row - lane() % Config::kStep, at = max(lane_page, 0);
      const int rows = lane_page >= 0 ? keys : 0;
      copy_rows(kBounded, k_head + at * params.k_strides.batch + row * params.k_strides.row, params.k_strides.row,
                first, rows, k_to);
      copy_rows(kBounded, v_head + at * params.v_strides.batch + row * params.v_strides.row, params.v_strides.row,
                first, rows, v_to);
    } else if (params.kv_vector_bytes == 16) {
      copy_scattered(k_head, params.k_strides, lane_page, first, keys, k_to);
      copy_scattered(v_head, params.v_strides, lane_page, first, keys, v_to);
    } else {
      copy_narrow(k_head, params.k_strides, lane_page, first, keys, k_to);
      copy_narrow(v_head, params.v_strides, lane_page, first, keys, v_to);
    }
  }

  // Reads of less than 16 bytes, also of descales, go through L1, which may keep a stale line of old and new rows.
  __device__ __forceinline__ bool step_reads_new_rows() const {
    const KvRequest& request = work.part.request;
    if (Config::kEightBit && (params.k_descale.by_row || params.v_descale.by_row)) return true;
    return request.first_row + key_begin() + Config::kStep > request.cached || params.kv_vector_bytes < 16;
  }

  // The rows of a step are consecutive, within one page. (Rows without a key may lie anywhere: they are not read.)
  __device__ __forceinline__ bool step_is_strided() const {
    return !is_paged() ||
           (params.paged.page_size.divisor % Config::kStep == 0 && work.part.request.first_row % Config::kStep == 0);
  }

  // Lane `row` holds the address of a row: `found` is its page.
  __device__ __forceinline__ Row scattered_row(const Stored* head, const MatrixStrides& strides, int lane_page,
                                               int first, int keys, int row) const {
    const int at = __shfl_sync(0xffffffffu, lane_page, row);
    const int at_row = __shfl_sync(0xffffffffu, page_row, row);
    const int64_t offset = at < 0 ? 0 : at * strides.batch + at_row * strides.row;
    return {head + offset, at >= 0 && row >= first && row < keys};
  }

  __device__ __forceinline__ void copy_scattered(const Stored* head, const MatrixStrides& strides, int lane_page,
                                                 int first, int keys, Stored* to) const {
    copy(kBounded, [&](int row, int) { return scattered_row(head, strides, lane_page, first, keys, row); }, to);
  }

  // Rows without 16-byte alignment, in copies of 4 bytes or of an element, each group for itself; small code rather
  // than fast.
  __device__ __forceinline__ void copy_narrow(const Stored* head, const MatrixStrides& strides, int lane_page,
                                              int first, int keys, Stored* to) const {
    const int first_row = group_warp() * Config::kWarpRows;
    head += (group_step.head() - group_step.copy_head()) * strides.head;
#pragma unroll 1
    for (int row = first_row; row < first_row + Config::kWarpRows; ++row) {
      const Row from = scattered_row(head, strides, lane_page, first, keys, row);
#pragma unroll 1
      for (int vector = lane(); vector < Swizzle::kVectors; vector += 32) {
        copy_vector(from.data + vector * Config::kVectorCols, from.valid ? params.d - vector * Config::kVectorCols : 0,
                    to + row * Config::kHeadDim + (vector ^ Swizzle::key(row)) * Config::kVectorCols);
      }
    }
  }
};

}  // namespace decode
}  // namespace flash
