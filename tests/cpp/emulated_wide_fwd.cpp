// Runs the wgmma forward of head dims above 256 thread by thread on the CPU (emulated_cuda.h) against attention in
// double: causal and windows, odd lengths, packed sequences, rows without keys, sinks, grouped heads, smaller head dims
// of K and V, scores that raise the row max. Rows that no query sees are NaN.
#include "emulated_wide.h"

#include "kernels/sm90/wide_fwd_consumer.h"
#include "kernels/sm90/wide_fwd_producer.h"

namespace {

using namespace wide;
using flash::Dtype;
using flash::sm90::WideFwdConfig;
using flash::sm90::WideFwdConsumer;
using flash::sm90::WideFwdLaunch;
using flash::sm90::WideFwdProducer;
using flash::sm90::WideFwdStorage;
using flash::sm90::WideFwdWork;

struct Results {
  Matrix out;
  std::vector<float> lse, sinks, max_logit;
};

void check_row(Inputs& in, Results& results, int sequence, int row, int head, double& largest_logit) {
  const double sink = results.sinks[head];
  const std::vector<double> scores = in.scores(sequence, row, head);
  double top = sink, sum = 0.0;
  for (const double score : scores) top = std::max(top, score), largest_logit = std::max(largest_logit, score);
  if (top > -INFINITY) sum = std::exp(sink - top);
  for (const double score : scores) sum += std::exp(score - top);
  std::vector<double> expected(in.c.dim_v);
  const int begin = in.visibility(sequence).key_begin(row);
  for (size_t i = 0; i < scores.size(); ++i) {
    const bf16* const value = in.v.at(in.first_k[sequence] + begin + static_cast<int>(i), in.head_k(head));
    for (int col = 0; col < in.c.dim_v; ++col) expected[col] += std::exp(scores[i] - top) / sum * to_float(value[col]);
  }
  const double worst = error(results.out.at(in.first_q[sequence] + row, head), expected);
  check::that(worst <= 0.01, "out: sequence", sequence, "row", row, "head", head, worst);
  const double lse = top == -INFINITY ? INFINITY : top + std::log(sum),
               ours = results.lse[in.lse_at(sequence, row, head)];
  check::that(lse == ours || std::abs(lse - ours) < 1e-3, "lse: sequence", sequence, "row", row, "head", head, ours,
              lse);
}

void check_results(Inputs& in, Results& results) {
  for (int head = 0; head < in.c.heads; ++head) {
    double largest_logit = -INFINITY;
    for (int i = 0; i < in.batch(); ++i) {
      for (int row = 0; row < in.c.sequences[i].queries; ++row) check_row(in, results, i, row, head, largest_logit);
    }
    const bool holds = !in.c.exact || std::abs(results.max_logit[head] - largest_logit) < 1e-3;
    check::that(holds, "max_logit", head, results.max_logit[head]);
  }
}

void run(const Case& c, const Timing& timing) {
  using Config = WideFwdConfig<Dtype::kBf16>;
  static WideFwdStorage<Config> storage;
  set(timing);
  Inputs in(c);
  Results results{Matrix::nan(in.total_q, c.heads, c.dim_v),
                  std::vector<float>(static_cast<size_t>(in.total_q) * c.heads, NAN),
                  {},
                  std::vector<float>(c.heads, -INFINITY)};
  for (int head = 0; head < c.heads; ++head)
    results.sinks.push_back(c.sinks ? static_cast<float>(head - 1) : -INFINITY);
  WideFwdLaunch launch;
  flash::Flash_fwd_params& params = launch.params;
  in.set(params);
  if (c.exact) params.rescale_threshold_log2 = 0.0f, params.max_logit_ptr = results.max_logit.data();
  params.softmax_lse_ptr = results.lse.data();
  params.sinks_ptr = c.sinks ? results.sinks.data() : nullptr;
  const int tiles = c.packed ? flash::varlen_slot_count(in.total_q, in.batch(), Config::kBlockM)
                             : (in.rows_q() + Config::kBlockM - 1) / Config::kBlockM;
  launch.order = flash::plan::WorkTileOrder(in.all_heads(), tiles, 1, 0);
  launch.heads_of_batch = flash::FastDiv(c.heads), launch.group = flash::FastDiv(params.h_h_k_ratio);
  launch.q_map = in.q.map(c.packed, in.rows_q()), launch.o_map = results.out.map(c.packed, in.rows_q());
  launch.k_map = in.k.map(c.packed, in.rows_k()), launch.v_map = in.v.map(c.packed, in.rows_k());
  run_blocks(in.all_heads() * tiles, Config::kThreads, storage, [&] {
    const WideFwdWork work(launch, blockIdx.x, Config::kBlockM, Config::kBlockN);
    const int warp = threadIdx.x / 32;
    if (work.tile.empty()) return;
    if (warp < 4) WideFwdProducer<Config>(launch, storage, work).run(warp);
    if (warp / 4 == 1) WideFwdConsumer<Config, 0>(launch, storage, work).run();
    if (warp / 4 == 2) WideFwdConsumer<Config, 1>(launch, storage, work).run();
  });
  check_results(in, results);
}

}  // namespace

int main() {
  const Window full{}, causal{flash::kUnbounded, 0}, sliding{90, 20}, left{70, 0};
  const Timing early{false, true, false}, late{true, false, false}, mixed{true, true, true}, random{false, false, true};
  for (const Timing& timing : {early, late, mixed, random}) {
    run({{{70, 330}}, 1, 1, full}, timing);
    run({{{130, 130}}, 1, 1, causal}, timing);
  }
  for (int i = 0; i < 8; ++i) run({{{1, 190}}, 1, 1, full}, i % 2 == 0 ? mixed : random);  // other orders of landing
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
