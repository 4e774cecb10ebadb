// Runs the wgmma decode kernel thread by thread on the CPU (emulated_cuda.h) against attention in double, with its
// combine in double: any split of tiles over thread blocks, masks, pages of any size, left padding, invalid requests,
// missing pages, sinks, packed queries. Rows that no query sees are NaN.
#include "emulated_cuda.h"

#include <map>
#include <random>
#include <tuple>

#include "check.h"
#include "emulated_device.h"

struct float2 {
  float x, y;
};
struct uint2 {
  uint32_t x, y;
};
inline float __fmul_rn(float a, float b) { return a * b; }
inline float __fadd_rn(float a, float b) { return a + b; }
inline float __frcp_rn(float a) { return 1.0f / a; }
inline float __fdividef(float a, float b) { return a / b; }
inline int __ffs(int bits) { return __builtin_ffs(bits); }
inline int64_t __shfl_up_sync(uint32_t mask, int64_t value, int distance) {
  const int lane = static_cast<int>(threadIdx.x) % 32;
  return __shfl_sync(mask, value, lane < distance ? lane : lane - distance);
}

#include "kernels/decode/wgmma_consumer.h"
#include "kernels/decode/wgmma_producer.h"

namespace {

using flash::Dtype;
using flash::Flash_kvcache_params;
using flash::SplitPoints;
using flash::SplitRule;
using flash::Window;
using flash::decode::CtaWork;
using flash::decode::KvWgmmaConfig;
using flash::decode::KvWgmmaConsumer;
using flash::decode::KvWgmmaProducer;
using flash::decode::KvWgmmaStorage;
using flash::decode::WorkPart;

std::mt19937 generator(7);

struct Case {
  std::vector<int> lengths, tokens;  // tokens: of the queries of each request, -n for n rows of no sequence
  int heads, heads_k, thread_blocks;
  SplitPoints split_points;
  Window window;
  int page_size = 0;
  std::vector<int> leftpad = {};
  bool sinks = false, packed = false;
  int missing = -1;     // the request without its first page
  float growth = 0.0f;  // of the keys from one to the next
};

// When products are computed, when copies land, and in which order threads run.
struct Timing {
  bool computes_late, lands_early, at_random;
};

std::vector<bf16> normal(size_t count) {
  std::normal_distribution<float> distribution;
  std::vector<bf16> values(count);
  for (bf16& value : values) value.bits = to_bf16(distribution(generator));
  return values;
}

// The parts of a tile, added up in double.
struct Row {
  double top = -INFINITY, sum = 0.0;
  bool invalid = false;
  std::vector<double> out;
};
using Tile = std::tuple<int, int, int>;  // request, row tile, head tile

struct Part {
  WorkPart part;
  int thread_block;
};

template <int kDim>
struct Call {
  using Config = KvWgmmaConfig<Dtype::kBf16, kDim>;
  const Case& c;
  const int batch = static_cast<int>(c.lengths.size()), group = c.heads / c.heads_k, capacity = 700;
  int total = 0, slots = 1, page_rows = capacity, pages = 0, seqlen_q = 0;
  std::vector<int> first, counts, segments{0}, key_ranges, table, order;
  std::vector<bf16> q, k, v, out;
  std::vector<float> lse, sinks, partial_o, partial_stats;
  std::vector<flash::SchedHeader> schedule;  // and entries, of the same size
  Flash_kvcache_params params;

  explicit Call(const Case& c_) : c(c_) {
    for (const int count : c.tokens) {
      if (count >= 0) first.push_back(total), counts.push_back(count), segments.push_back(total);
      total += std::abs(count);
    }
    segments.push_back(first.back() + counts.back()), segments.push_back(total);
    seqlen_q = c.packed ? total : counts[0];
    if (c.page_size > 0) slots = (capacity + c.page_size - 1) / c.page_size, page_rows = c.page_size;
    pages = batch * slots + 2;
    for (int i = 0; i < pages; ++i) order.push_back(i);
    std::shuffle(order.begin(), order.end(), generator);
    q = normal(static_cast<size_t>(total) * c.heads * kDim);
    const size_t elements = static_cast<size_t>(pages) * page_rows * c.heads_k * kDim;
    k.assign(elements, bf16{0x7fff}), v = k;
    for (int i = 0; i < batch; ++i) fill(i);
    out.assign(q.size(), bf16{0x7fff});
    lse.assign(static_cast<size_t>(total) * c.heads, NAN);
    for (int i = 0; i < c.heads; ++i)
      sinks.push_back(c.sinks ? std::normal_distribution<float>(2.0f)(generator) : -INFINITY);
    set_params();
  }

  int pad(int i) const { return c.leftpad.empty() ? 0 : std::min(c.leftpad[i], std::max(c.lengths[i], 0)); }
  int keys(int i) const { return std::max(c.lengths[i] - pad(i), 0); }
  bool takes_part(int i) const { return c.packed || (c.lengths[i] >= 0 && c.lengths[i] <= capacity && i != c.missing); }
  flash::Visibility visibility(int i) const { return {counts[i], keys(i), c.window}; }
  size_t place(int i, int row, int head) const {
    const size_t page = order[i * slots + row / page_rows];
    return ((page * page_rows + row % page_rows) * c.heads_k + head) * kDim;
  }

  // Keys that no query sees stay NaN, and their pages do not exist.
  void fill(int i) {
    const int begin = pad(i) + visibility(i).key_begin(0), end = c.lengths[i] > capacity ? 0 : pad(i) + keys(i);
    key_ranges.insert(key_ranges.end(), {pad(i), keys(i)});
    for (int row = counts[i] == 0 ? end : begin; row < end; ++row) {
      for (int head = 0; head < c.heads_k; ++head) {
        const std::vector<bf16> key = normal(kDim), value = normal(kDim);
        for (int col = 0; col < kDim; ++col) {
          k[place(i, row, head) + col].bits = to_bf16(to_float(key[col]) * (1.0f + static_cast<float>(row) * c.growth));
          v[place(i, row, head) + col] = value[col];
        }
      }
    }
    for (int slot = 0; slot < slots; ++slot) {
      const bool used = slot * page_rows < end && (slot + 1) * page_rows > begin;
      table.push_back(used ? order[i * slots + slot] : slot % 2 ? -1 : 1 << 20);
    }
    if (i == c.missing) table[i * slots + begin / page_rows] = c.page_size > 0 ? pages : table[i * slots];
  }

  void set_params() {
    const flash::MatrixStrides rows{int64_t{seqlen_q} * c.heads * kDim, int64_t{c.heads} * kDim, kDim};
    const flash::MatrixStrides cache{int64_t{page_rows} * c.heads_k * kDim, int64_t{c.heads_k} * kDim, kDim};
    params.q_ptr = q.data(), params.o_ptr = out.data(), params.k_ptr = k.data(), params.v_ptr = v.data();
    params.q_strides = params.o_strides = rows, params.k_strides = params.v_strides = cache;
    params.softmax_lse_ptr = lse.data(), params.sinks_ptr = c.sinks ? sinks.data() : nullptr;
    params.b = batch, params.h = c.heads, params.h_k = c.heads_k, params.d = params.d_v = kDim;
    params.seqlen_q = seqlen_q, params.window = c.window, params.capacity = slots * page_rows;
    params.softmax_scale_log2 = 1.44269504f / std::sqrt(static_cast<float>(kDim));
    params.seqlens_k = c.lengths.data(), params.leftpad_k = c.leftpad.empty() ? nullptr : c.leftpad.data();
    params.cache_batch = pages, params.cache_batch_idx = order.data();
    if (c.page_size > 0) {
      params.paged.block_table = table.data(), params.paged.block_table_stride = slots;
      params.paged.pages_per_sequence = slots, params.paged.num_pages = pages;
      params.paged.page_size = flash::FastDiv(c.page_size);
    }
    const int row_count = seqlen_q * group;
    params.tile_rows = Config::kRows, params.block_n = Config::kKeys, params.padded_dim = kDim;
    params.head_tiles = c.heads_k, params.tile_query_heads = group, params.tile_group = flash::FastDiv(group);
    params.row_tiles = (row_count + Config::kRows - 1) / Config::kRows;
    params.work_items = batch * params.row_tiles;
    params.slot_rows = c.packed ? Config::kRows : std::min<int>(row_count, Config::kRows);
    if (c.packed) {
      params.varlen.cu_seqlens_q = params.varlen.segments_q = segments.data();
      params.varlen.cu_seqlens_k = segments.data(), params.varlen.key_ranges = key_ranges.data();
      params.work_items = flash::varlen_slot_count(row_count, batch, Config::kRows);
    }
    params.thread_blocks = c.thread_blocks, params.split_points = c.split_points;
    params.o_vectors = params.q_vectors = true;
    partial_o.assign(size_t{2} * c.thread_blocks * params.slot_rows * kDim, NAN);
    partial_stats.assign(size_t{4} * c.thread_blocks * params.slot_rows, NAN);
    params.partial_o = partial_o.data(), params.partial_stats = partial_stats.data();
  }

  void run_kernel() {
    static KvWgmmaStorage<Config> storage;
    std::memset(static_cast<void*>(&storage), 0xff, sizeof(storage));
    for (auto& barrier : storage.full) barrier.init(Config::kProducerThreads);
    for (auto& barrier : storage.empty) barrier.init(4);
    emulation::run_block(Config::kThreads, [&] {
      const CtaWork cta_work = flash::decode::find_cta_work(params, blockIdx.x, storage.scratch);
      if (threadIdx.x == 0) storage.cta_work = cta_work;
      __syncthreads();
      const int warp = threadIdx.x / 32;
      if (warp < Config::kProducerWarps) {
        KvWgmmaProducer<Config>(params, storage, warp).run();
      } else {
        KvWgmmaConsumer<Config>(params, storage, warp / 4 - 1).run();
      }
    });
  }

  // As decode_schedule.cu.
  void make_schedule() {
    std::vector<int64_t> ends;
    emulation::run_block(32, [&] {
      for (int item = 0; item < params.work_items; ++item) {
        const auto [request, row_tile] = flash::decode::packed_work_item(params, item);
        if (threadIdx.x != 0) continue;
        const auto queries = flash::decode::kv_queries<true>(params, request.index);
        const bool has_rows = row_tile * Config::kRows < flash::decode::kv_rows(params, queries);
        const int64_t work = has_rows ? flash::decode::kv_work(params, queries, row_tile, request.seqlen_k) : 0;
        ends.push_back((ends.empty() ? 0 : ends.back()) + work);
      }
    });
    schedule.resize(1 + c.thread_blocks);
    const flash::SchedHeader header{flash::blocks_per_cta(ends.back(), c.thread_blocks, 1), ends.back()};
    std::memcpy(static_cast<void*>(&schedule[0]), &header, sizeof(header));
    for (int i = 0; i < c.thread_blocks; ++i) {
      const int item =
          static_cast<int>(std::upper_bound(ends.begin(), ends.end(), i * header.cta_blocks) - ends.begin());
      const flash::SchedEntry entry{item == 0 ? 0 : ends[item - 1], item, 0};
      std::memcpy(static_cast<void*>(&schedule[1 + i]), &entry, sizeof(entry));
    }
    params.schedule = schedule.data();
  }

  void run() {
    if (c.packed) make_schedule();
    std::vector<Part> parts;
    int64_t scratch[3];
    for (blockIdx.x = 0; blockIdx.x < c.thread_blocks; ++blockIdx.x) {
      run_kernel();
      emulation::run_block(32, [&] {
        flash::decode::WorkIterator<false> work(params, blockIdx.x,
                                                flash::decode::find_cta_work(params, blockIdx.x, scratch));
        for (work.next(); !work.done(); work.next())
          if (threadIdx.x == 0) parts.push_back({work.part, blockIdx.x});
      });
    }
    combine(parts);
    check_results();
  }

  void combine(const std::vector<Part>& parts) {
    std::map<Tile, std::vector<Row>> tiles;
    for (const auto& [part, thread_block] : parts) {
      if (part.whole()) continue;
      const auto queries = flash::decode::kv_queries<true>(params, part.request.index);
      const int begin = part.row_tile * Config::kRows;
      const int count = std::min<int>(flash::decode::kv_rows(params, queries) - begin, Config::kRows);
      auto& rows = tiles[{part.request.index, part.row_tile, part.head_tile}];
      rows.resize(count, Row{-INFINITY, 0.0, false, std::vector<double>(kDim)});
      const int64_t slot = flash::kv_slot(thread_block, part.span);
      for (int i = 0; i < count; ++i) add(rows[i], slot * params.slot_rows + i);
    }
    for (auto& [tile, rows] : tiles) {
      const auto [request, row_tile, head_tile] = tile;
      const auto queries = flash::decode::kv_queries<true>(params, request);
      for (int i = 0; i < static_cast<int>(rows.size()); ++i) {
        const auto at = flash::decode::packed_row(params, head_tile, row_tile * Config::kRows + i);
        store(queries, at, rows[i]);
      }
    }
  }

  void add(Row& row, int64_t at) const {
    const double top = partial_stats[2 * at], sum = partial_stats[2 * at + 1];
    row.invalid |= sum < 0.0;
    const double next = std::max(row.top, top), scale = params.softmax_scale_log2;
    const double own = row.top == -INFINITY ? 0.0 : std::exp2((row.top - next) * scale);
    const double other = top == -INFINITY ? 0.0 : std::exp2((top - next) * scale);
    row.sum = row.sum * own + sum * other, row.top = next;
    for (int col = 0; col < kDim; ++col) row.out[col] = row.out[col] * own + partial_o[at * kDim + col] * other;
  }

  void store(const flash::decode::KvQueries& queries, const flash::decode::PackedRow& at, const Row& row) {
    const flash::RowStats stats{static_cast<float>(row.top), row.invalid ? -1.0f : static_cast<float>(row.sum)};
    for (int col = 0; col < kDim; col += 4) {
      const float4 value{static_cast<float>(row.out[col]), static_cast<float>(row.out[col + 1]),
                         static_cast<float>(row.out[col + 2]), static_cast<float>(row.out[col + 3])};
      flash::decode::write_output_row<bf16>(params, queries, at, col, stats, value);
    }
  }

  void check_row(int i, int row_in_out, int token, int head) const {
    const bool is_in = i >= 0 && takes_part(i);
    const double sink = is_in ? sinks[head] : -INFINITY;
    const bf16* const query = q.data() + (static_cast<size_t>(row_in_out) * c.heads + head) * kDim;
    std::vector<double> scores, expected(kDim);
    double top = sink;
    const int begin = is_in ? visibility(i).key_begin(token) : 0, end = is_in ? visibility(i).key_end(token) : 0;
    for (int key = begin; key < end; ++key) {
      double score = 0.0;
      const size_t at = place(i, pad(i) + key, head / group);
      for (int col = 0; col < kDim; ++col) score += static_cast<double>(to_float(query[col])) * to_float(k[at + col]);
      scores.push_back(score / std::sqrt(kDim));
      top = std::max(top, scores.back());
    }
    double sum = top == -INFINITY ? 0.0 : std::exp(sink - top), worst = 0.0, largest = 0.0;
    for (const double score : scores) sum += std::exp(score - top);
    for (int key = begin; key < end; ++key) {
      const size_t at = place(i, pad(i) + key, head / group);
      const double weight = std::exp(scores[key - begin] - top) / sum;
      for (int col = 0; col < kDim; ++col) expected[col] += weight * to_float(v[at + col]);
    }
    for (int col = 0; col < kDim; ++col) {
      const double ours = to_float(out[(static_cast<size_t>(row_in_out) * c.heads + head) * kDim + col]);
      worst = std::max(worst, std::isnan(ours) ? INFINITY : std::abs(ours - expected[col]));
      largest = std::max(largest, std::abs(expected[col]));
    }
    check::that(worst <= 0.015 * largest, "out: request", i, "token", token, "head", head, worst);
    const double lse_expected = top == -INFINITY ? INFINITY : top + std::log(sum);
    const size_t at = c.packed ? static_cast<size_t>(head) * total + row_in_out
                               : (static_cast<size_t>(i) * c.heads + head) * seqlen_q + token;
    const bool same = lse_expected == lse[at] || std::abs(lse_expected - lse[at]) < 1e-3;
    check::that(same, "lse: request", i, "token", token, "head", head, lse[at], lse_expected);
  }

  void check_results() const {
    std::vector<bool> in_sequence(total);
    for (int i = 0; i < batch; ++i) {
      for (int token = 0; token < counts[i]; ++token) {
        in_sequence[first[i] + token] = true;
        for (int head = 0; head < c.heads; ++head) check_row(i, first[i] + token, token, head);
      }
    }
    for (int row = 0; row < total; ++row) {
      for (int head = 0; head < c.heads && !in_sequence[row]; ++head) check_row(-1, row, 0, head);
    }
  }
};

void run(const Case& c, const Timing& timing) {
  emulation::computes_late = timing.computes_late;
  emulation::lands_early = timing.lands_early;
  emulation::at_random = timing.at_random;
  Call<128>(c).run();
  Call<64>(c).run();
}

}  // namespace

int main() {
  const Window full{}, causal{flash::kUnbounded, 0}, sliding{90, 20}, left{70, 0};
  const SplitPoints anywhere{SplitRule::kAnywhere, 2}, nowhere{}, thrice{SplitRule::kEqualSplits, 3};
  const Timing early{false, true, false}, late{true, false, false}, mixed{true, true, true}, random{false, false, true};
  for (const Timing& timing : {early, late, mixed, random}) {
    run({{700, 0, -1, 130}, {5, 5, 5, 5}, 14, 2, 3, anywhere, causal}, timing);
    run({{300, 31, 701}, {3, 3, 3}, 13, 1, 2, anywhere, causal, 7, {20, 31, 0}, true}, timing);
  }
  run({{64, 1, 63, 65, 0, 5}, {9, 9, 9, 9, 9, 9}, 4, 1, 1, nowhere, full}, random);      // one thread block
  run({{64, 1, 63, 65, 0, 5}, {9, 9, 9, 9, 9, 9}, 4, 2, 1, anywhere, sliding}, random);  // short parts
  run({{640}, {40}, 2, 1, 4, thrice, sliding, 48, {32}}, late);                          // two row tiles
  run({{640, 20}, {33, 33}, 2, 1, 4, anywhere, left, 5, {30, 0}}, mixed);
  run({{600, 500}, {4, 4}, 12, 1, 5, anywhere, causal, 16, {}, true, false, 0}, random);  // a missing page
  run({{700}, {34}, 1, 1, 9, anywhere, causal, 1, {}, false, false, -1, 0.02f}, mixed);
  run({{10, 700}, {40, 40}, 1, 1, 2, anywhere, causal}, late);  // rows without keys
  run({{270, 9, 0, 400}, {-2, 17, 0, 3, 40, -1}, 4, 2, 3, anywhere, causal, 16, {}, true, true}, late);
  run({{270, 9, 0, 400}, {-2, 17, 0, 3, 40, -1}, 4, 2, 3, thrice, full, 16, {1, 9, 0, 30}, false, true}, mixed);
  return check::report();
}
