// Runs the wgmma forward of head dims above 256 thread by thread on the CPU (emulated_cuda.h) against attention in
// double: causal and windows, odd lengths, packed sequences, rows without keys, sinks, grouped heads, smaller head dims
// of K and V, scores that raise the row max. Rows that no query sees are NaN.
#include "emulated_cuda.h"

#include <random>

#include "check.h"
#include "emulated_device.h"
#include "kernels/sm90/wide_fwd_consumer.h"
#include "kernels/sm90/wide_fwd_producer.h"

namespace {

using flash::Dtype;
using flash::Window;
using flash::sm90::WideFwdConfig;
using flash::sm90::WideFwdConsumer;
using flash::sm90::WideFwdLaunch;
using flash::sm90::WideFwdProducer;
using flash::sm90::WideFwdStorage;
using flash::sm90::WideFwdWork;

std::mt19937 generator(7);

struct Lengths {
  int queries, keys;
};

struct Case {
  std::vector<Lengths> sequences;  // equal ones unless packed
  int heads, heads_k;
  Window window;
  int dim = 512, dim_v = 512;
  bool packed = false, sinks = false, exact = false;
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

// One side of the call: rows of all sequences, (rows, heads, dim).
struct Matrix {
  std::vector<bf16> values;
  int heads, dim;

  bf16* at(int row, int head) { return values.data() + (static_cast<int64_t>(row) * heads + head) * dim; }
  CUtensorMap map(bool packed, int rows) {
    const int64_t row_stride = int64_t{heads} * dim;
    return {values.data(), packed ? 0 : rows * row_stride, row_stride, dim, rows, dim};
  }
};

struct Call {
  const Case& c;
  int total_q = 0, total_k = 0;
  std::vector<int> first_q, first_k;
  Matrix q, k, v, out;
  std::vector<float> lse, sinks, max_logit;
  double scale;

  explicit Call(const Case& c_) : c(c_), scale(1.0 / std::sqrt(c_.dim)) {
    for (const Lengths& lengths : c.sequences) {
      first_q.push_back(total_q), first_k.push_back(total_k);
      total_q += lengths.queries, total_k += lengths.keys;
    }
    q = {normal(static_cast<size_t>(total_q) * c.heads * c.dim), c.heads, c.dim};
    k = {normal(static_cast<size_t>(total_k) * c.heads_k * c.dim), c.heads_k, c.dim};
    v = {normal(static_cast<size_t>(total_k) * c.heads_k * c.dim_v), c.heads_k, c.dim_v};
    out = {std::vector<bf16>(static_cast<size_t>(total_q) * c.heads * c.dim_v, bf16{0x7fff}), c.heads, c.dim_v};
    lse.assign(static_cast<size_t>(total_q) * c.heads, NAN);
    max_logit.assign(c.heads, -INFINITY);
    for (int head = 0; head < c.heads; ++head) sinks.push_back(c.sinks ? static_cast<float>(head) - 1.0f : -INFINITY);
    for (size_t i = 0; i < c.sequences.size(); ++i) prepare_keys(static_cast<int>(i));
  }

  void prepare_keys(int i) {
    const Lengths lengths = c.sequences[i];
    const flash::Visibility visibility{lengths.queries, lengths.keys, c.window};
    const int unseen = lengths.queries == 0 ? lengths.keys : visibility.key_begin(0);
    for (int key = 0; key < lengths.keys; ++key) {
      for (int head = 0; head < c.heads_k; ++head) {
        bf16* const row = k.at(first_k[i] + key, head);
        for (int col = 0; col < c.dim; ++col)
          row[col].bits =
              key < unseen ? 0x7fff : to_bf16(to_float(row[col]) * (1.0f + static_cast<float>(key) * c.growth));
        for (int col = 0; col < c.dim_v && key < unseen; ++col) v.at(first_k[i] + key, head)[col].bits = 0x7fff;
      }
    }
  }

  int64_t lse_at(int sequence, int row, int head) const {
    if (c.packed) return int64_t{head} * total_q + first_q[sequence] + row;
    return (int64_t{sequence} * c.heads + head) * c.sequences[0].queries + row;
  }

  void check_row(int sequence, int row, int head) {
    const Lengths lengths = c.sequences[sequence];
    const flash::Visibility visibility{lengths.queries, lengths.keys, c.window};
    const int head_k = head / (c.heads / c.heads_k), begin = visibility.key_begin(row), end = visibility.key_end(row);
    std::vector<double> scores, expected(c.dim_v);
    double top = sinks[head], sum = 0.0;
    for (int key = begin; key < end; ++key) {
      double score = 0.0;
      const bf16 *const a = q.at(first_q[sequence] + row, head), *const b = k.at(first_k[sequence] + key, head_k);
      for (int col = 0; col < c.dim; ++col) score += static_cast<double>(to_float(a[col])) * to_float(b[col]);
      scores.push_back(score * scale);
      top = std::max(top, scores.back());
    }
    if (top > -INFINITY) sum = std::exp(sinks[head] - top);
    for (const double score : scores) sum += std::exp(score - top);
    for (int key = begin; key < end; ++key) {
      const double weight = std::exp(scores[key - begin] - top) / sum;
      const bf16* const value = v.at(first_k[sequence] + key, head_k);
      for (int col = 0; col < c.dim_v; ++col) expected[col] += weight * to_float(value[col]);
    }
    double worst = 0.0, largest = 1e-3;
    for (int col = 0; col < c.dim_v; ++col) {
      const double ours = to_float(out.at(first_q[sequence] + row, head)[col]);
      worst = std::max(worst, std::isnan(ours) ? INFINITY : std::abs(ours - expected[col]));
      largest = std::max(largest, std::abs(expected[col]));
    }
    check::that(worst <= 0.01 * largest, "out: sequence", sequence, "row", row, "head", head, worst);
    const double expected_lse = top == -INFINITY ? INFINITY : top + std::log(sum),
                 ours = lse[lse_at(sequence, row, head)];
    check::that(expected_lse == ours || std::abs(expected_lse - ours) < 1e-3, "lse: sequence", sequence, "row", row,
                "head", head, ours, expected_lse);
    if (!scores.empty())
      largest_logit[head] = std::max(largest_logit[head], *std::max_element(scores.begin(), scores.end()));
  }
  std::vector<double> largest_logit = std::vector<double>(c.heads, -INFINITY);

  void check() {
    for (size_t i = 0; i < c.sequences.size(); ++i) {
      for (int row = 0; row < c.sequences[i].queries; ++row) {
        for (int head = 0; head < c.heads; ++head) check_row(static_cast<int>(i), row, head);
      }
    }
    for (int head = 0; head < c.heads && c.exact; ++head)
      check::that(std::abs(max_logit[head] - largest_logit[head]) < 1e-3, "max_logit", head, max_logit[head]);
  }
};

void run(const Case& c, const Timing& timing) {
  using Config = WideFwdConfig<Dtype::kBf16>;
  static WideFwdStorage<Config> storage;
  emulation::computes_late = timing.computes_late;
  emulation::lands_early = timing.lands_early;
  emulation::at_random = timing.at_random;
  Call call(c);
  const int batch = static_cast<int>(c.sequences.size()), rows = c.sequences[0].queries;
  WideFwdLaunch launch;
  flash::Flash_fwd_params& params = launch.params;
  params.b = batch, params.h = c.heads, params.h_k = c.heads_k, params.h_h_k_ratio = c.heads / c.heads_k;
  params.d = c.dim, params.d_v = c.dim_v;
  params.seqlen_q = c.packed ? call.total_q : rows, params.seqlen_k = c.packed ? call.total_k : c.sequences[0].keys;
  params.window = c.window;
  params.scale_softmax = static_cast<float>(call.scale);
  params.softmax_scale_log2 = static_cast<float>(call.scale * 1.4426950408889634);
  if (c.exact) params.rescale_threshold_log2 = 0.0f, params.max_logit_ptr = call.max_logit.data();
  params.softmax_lse_ptr = call.lse.data();
  params.sinks_ptr = c.sinks ? call.sinks.data() : nullptr;
  params.dropout.keep_scale = 1.0f;
  std::vector<int> segments{0}, key_ranges;
  for (int i = 0; i < batch; ++i) {
    segments.push_back(call.first_q[i]);
    key_ranges.insert(key_ranges.end(), {call.first_k[i], c.sequences[i].keys});
  }
  segments.push_back(call.total_q), segments.push_back(call.total_q);
  if (c.packed) {
    params.varlen.cu_seqlens_q = params.varlen.segments_q = segments.data();
    params.varlen.key_ranges = key_ranges.data();
  }
  const int all_heads = c.heads * (c.packed ? 1 : batch);
  const int tiles = c.packed ? flash::varlen_slot_count(call.total_q, batch, Config::kBlockM)
                             : (rows + Config::kBlockM - 1) / Config::kBlockM;
  launch.order = flash::plan::WorkTileOrder(all_heads, tiles, 1, 0);
  launch.heads_of_batch = flash::FastDiv(c.heads), launch.group = flash::FastDiv(params.h_h_k_ratio);
  launch.q_map = call.q.map(c.packed, params.seqlen_q), launch.o_map = call.out.map(c.packed, params.seqlen_q);
  launch.k_map = call.k.map(c.packed, params.seqlen_k), launch.v_map = call.v.map(c.packed, params.seqlen_k);
  for (blockIdx.x = 0; blockIdx.x < all_heads * tiles; ++blockIdx.x) {
    std::memset(static_cast<void*>(&storage), 0xff, sizeof(storage));
    storage.init_barriers();
    emulation::run_block(Config::kThreads, [&] {
      const WideFwdWork work(launch, blockIdx.x, Config::kBlockM, Config::kBlockN);
      const int warp = threadIdx.x / 32;
      if (work.tile.empty()) return;
      if (warp < 4) WideFwdProducer<Config>(launch, storage, work).run(warp);
      if (warp / 4 == 1) WideFwdConsumer<Config, 0>(launch, storage, work).run();
      if (warp / 4 == 2) WideFwdConsumer<Config, 1>(launch, storage, work).run();
    });
    check::that(emulation::copies.empty(), "a copy that nobody waits for");
    emulation::copies.clear();
  }
  call.check();
}

}  // namespace

int main() {
  const Window full{}, causal{flash::kUnbounded, 0}, sliding{90, 20}, left{70, 0};
  const Timing early{false, true, false}, late{true, false, false}, mixed{true, true, true}, random{false, false, true};
  for (const Timing& timing : {early, late, mixed, random}) {
    run({{{70, 330}}, 1, 1, full}, timing);
    run({{{130, 130}}, 1, 1, causal}, timing);
  }
  run({{{1, 64}}, 2, 1, full}, late);
  run({{{65, 1}}, 1, 1, full}, random);
  run({{{5, 200}, {5, 200}}, 2, 1, causal, 512, 512, false, true}, mixed);
  run({{{100, 40}}, 1, 1, causal}, late);
  run({{{40, 400}}, 1, 1, sliding}, mixed);
  run({{{64, 260}}, 1, 1, left}, late);
  run({{{64, 300}}, 1, 1, full, 512, 512, false, false, true, 0.05f}, random);
  run({{{64, 300}}, 1, 1, full, 512, 512, false, false, false, 0.05f}, late);
  run({{{40, 100}}, 1, 1, full, 264, 320}, random);
  run({{{70, 70}, {0, 9}, {3, 0}, {20, 150}}, 2, 1, causal, 320, 512, true, true}, mixed);
  return check::report();
}
