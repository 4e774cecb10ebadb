// Runs both kernels of the wgmma backward of head dims above 256 thread by thread on the CPU (emulated_cuda.h) against
// gradients in double: causal and windows, odd lengths, packed sequences, rows without keys, grouped heads, smaller
// head dims of K and V. Rows that no query or key sees are NaN.
#include "emulated_wide.h"

#include "kernels/sm90/wide_bwd/dkv_kernel.h"
#include "kernels/sm90/wide_bwd/dq_kernel.h"

namespace {

using namespace wide;
using Config = flash::sm90::WideBwdConfig<flash::Dtype::kBf16>;
using flash::sm90::BwdTwoPassLaunch;

using Sums = std::vector<std::vector<double>>;  // of each row and head

struct Gradients {
  Sums q, k, v;
};

// LSE and softmax_d of the rows, and the gradients that follow from them.
Gradients differentiate(Inputs& in, Matrix& dout, std::vector<float>& lse, std::vector<float>& softmax_d,
                        const flash::Flash_bwd_params& params) {
  const Case& c = in.c;
  Gradients sums{Sums(in.total_q * c.heads, std::vector<double>(c.dim)),
                 Sums(in.total_k * c.heads_k, std::vector<double>(c.dim)),
                 Sums(in.total_k * c.heads_k, std::vector<double>(c.dim_v))};
  for (int i = 0; i < in.batch(); ++i) {
    for (int row = 0; row < c.sequences[i].queries; ++row) {
      for (int head = 0; head < c.heads; ++head) {
        const std::vector<double> scores = in.scores(i, row, head);
        const int at = in.first_q[i] + row, head_k = in.head_k(head);
        const int first = in.first_k[i] + in.visibility(i).key_begin(row);
        double top = -INFINITY, sum = 0.0, delta = 0.0;
        for (const double score : scores) top = std::max(top, score);
        for (const double score : scores) sum += std::exp(score - top);
        std::vector<double> p, dp;
        for (size_t j = 0; j < scores.size(); ++j) {
          p.push_back(std::exp(scores[j] - top) / sum), dp.push_back(0.0);
          for (int col = 0; col < c.dim_v; ++col) {
            const double gradient = to_float(dout.at(at, head)[col]);
            dp[j] += gradient * to_float(in.v.at(first + static_cast<int>(j), head_k)[col]);
            sums.v[(first + j) * c.heads_k + head_k][col] += p[j] * gradient;
          }
          delta += p[j] * dp[j];
        }
        for (size_t j = 0; j < scores.size(); ++j) {
          const double ds = p[j] * (dp[j] - delta) * in.scale;
          for (int col = 0; col < c.dim; ++col) {
            sums.q[at * c.heads + head][col] += ds * to_float(in.k.at(first + static_cast<int>(j), head_k)[col]);
            sums.k[(first + j) * c.heads_k + head_k][col] += ds * to_float(in.q.at(at, head)[col]);
          }
        }
        lse[in.lse_at(i, row, head)] = static_cast<float>(scores.empty() ? INFINITY : top + std::log(sum));
        softmax_d[flash::softmax_d_offset(params, i, head, in.first_q[i]) + row] = static_cast<float>(delta);
        if (scores.empty()) in.q.clear_to_nan(at, head), dout.clear_to_nan(at, head);
      }
    }
  }
  return sums;
}

void compare(const char* name, Matrix& ours, const Sums& expected) {
  for (size_t i = 0; i < expected.size(); ++i) {
    double largest = 0.0;
    for (const double value : expected[i]) largest = std::max(largest, std::abs(value));
    const double worst = error(ours.values.data() + i * ours.dim, expected[i]) * std::max(largest, 1e-3);
    check::that(worst <= 0.03 * std::max(largest, 0.3), name, i / ours.heads, "head", i % ours.heads, worst, largest);
  }
}

template <class Storage>
void run_dkv(const BwdTwoPassLaunch& launch, int blocks) {
  static Storage storage;
  run_blocks(blocks, Config::kThreads, storage, [&] {
    const int half = blockIdx.x % 2, warp = threadIdx.x / 32;
    const auto tile = flash::bwd_work_tile_at(launch.params, Config::kBlockN, blockIdx.x / 2, launch.grid);
    if (tile.empty(Config::kBlockN)) return;
    if (warp < 2) flash::sm90::WideDkvLoader<Config>(launch, storage, warp, half).run(tile);
    if (warp == 2) flash::sm90::load_wide_statistics<Config>(launch, storage, tile);
    if (warp / 4 == 1) flash::sm90::WideDkvConsumer<Config, 0>(launch, storage, half).run(tile);
    if (warp / 4 == 2) flash::sm90::WideDkvConsumer<Config, 1>(launch, storage, half).run(tile);
  });
}

template <class Storage>
void run_dq(const BwdTwoPassLaunch& launch, int blocks) {
  static Storage storage;
  run_blocks(blocks, Config::kThreads, storage, [&] {
    const flash::WorkTile tile = flash::work_tile_at(launch.params, Config::kBlockM, blockIdx.x);
    if (tile.empty()) return;
    const auto range =
        flash::block_range(flash::mask_of<Config>(launch.params, tile), tile.row_begin, tile.row_end, Config::kBlockN);
    const int warp = threadIdx.x / 32;
    if (warp < 2 && range.count() > 0) flash::sm90::WideDqLoader<Config>(launch, storage, warp).run(tile, range);
    if (warp / 4 == 1) flash::sm90::WideDqConsumer<Config, 0>(launch, storage).run(tile, range);
    if (warp / 4 == 2) flash::sm90::WideDqConsumer<Config, 1>(launch, storage).run(tile, range);
  });
}

void run(const Case& c, const Timing& timing) {
  set(timing);
  Inputs in(c);
  Matrix dout = Matrix::random(in.total_q, c.heads, c.dim_v), dq = Matrix::nan(in.total_q, c.heads, c.dim),
         dk = Matrix::nan(in.total_k, c.heads_k, c.dim), dv = Matrix::nan(in.total_k, c.heads_k, c.dim_v);
  BwdTwoPassLaunch launch{};
  flash::Flash_bwd_params& params = launch.params;
  in.set(params);
  params.d_rows = flash::plan::softmax_d_rows(c.packed, in.batch(), in.rows_q());
  std::vector<float> lse(in.total_q * c.heads, NAN), softmax_d(params.d_rows * in.all_heads(), NAN);
  const Gradients expected = differentiate(in, dout, lse, softmax_d, params);
  params.softmax_lse_ptr = lse.data(), params.softmax_d_ptr = softmax_d.data();
  params.dq_ptr = dq.values.data(), params.dq_strides = dq.strides(c.packed, in.rows_q());
  params.dk_ptr = dk.values.data(), params.dk_strides = dk.strides(c.packed, in.rows_k());
  params.dv_ptr = dv.values.data(), params.dv_strides = dv.strides(c.packed, in.rows_k());
  launch.q_map = in.q.map(c.packed, in.rows_q()), launch.do_map = dout.map(c.packed, in.rows_q());
  launch.k_map = in.k.map(c.packed, in.rows_k()), launch.v_map = in.v.map(c.packed, in.rows_k());
  launch.grid = flash::plan::bwd_grid(c.packed, in.batch(), c.heads_k, in.rows_k(), Config::kBlockN, 132, 1);
  run_dkv<flash::sm90::WideDkvStorage<Config>>(launch, static_cast<int>(2 * launch.grid.blocks));
  const int tiles = static_cast<int>(flash::plan::m_blocks(c.packed, in.batch(), in.rows_q(), Config::kBlockM));
  run_dq<flash::sm90::WideDqStorage<Config>>(launch, tiles * c.heads);
  compare("dq", dq, expected.q);
  compare("dk", dk, expected.k);
  compare("dv", dv, expected.v);
}

}  // namespace

int main() {
  const Window full{}, causal{flash::kUnbounded, 0}, sliding{90, 20};
  const Timing early{false, true, false}, late{true, false, false}, mixed{true, true, true}, random{false, false, true};
  for (const Timing& timing : {early, late, mixed, random}) run({{{70, 130}}, 1, 1, full}, timing);
  run({{{130, 130}}, 2, 1, causal}, mixed);
  run({{{100, 40}}, 1, 1, causal}, late);
  run({{{40, 260}}, 1, 1, sliding}, random);
  run({{{1, 65}}, 2, 2, full, 264, 320}, late);
  run({{{70, 70}, {0, 9}, {3, 0}, {20, 150}}, 2, 1, causal, 320, 512, true}, mixed);
  return check::report();
}
