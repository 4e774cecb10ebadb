// Runs the mma.sync forward with tangents thread by thread on the CPU (emulated_cuda.h) against attention in double and
// its derivative: causal and windows, odd lengths, packed sequences, rows without keys, grouped heads, smaller head
// dims of K and V, tangents that are missing, scores that raise the row max. Rows that no query sees are NaN.
#include "emulated_wide.h"

#include "kernels/sm80/jvp_fwd_tile.h"

namespace {

using namespace wide;
using flash::Dtype;
using flash::sm80::JvpFwdConfig;
using flash::sm80::JvpFwdStorage;
using flash::sm80::JvpFwdTile;

// Which tangents a call has.
struct Given {
  bool q = true, k = true, v = true;
};

double dot(const bf16* a, const bf16* b, int dim) {
  double sum = 0.0;
  for (int i = 0; i < dim; ++i) sum += static_cast<double>(to_float(a[i])) * to_float(b[i]);
  return sum;
}

struct Tangents {
  const Given& given;
  Matrix q, k, v;

  Tangents(Inputs& in, const Given& given_)
      : given(given_),
        q(Matrix::random(in.total_q, in.c.heads, in.c.dim)),
        k(Matrix::random(in.total_k, in.c.heads_k, in.c.dim)),
        v(Matrix::random(in.total_k, in.c.heads_k, in.c.dim_v)) {
    for (int i = 0; i < in.batch(); ++i) {
      const int unseen = in.c.sequences[i].queries == 0 ? in.c.sequences[i].keys : in.visibility(i).key_begin(0);
      for (int key = 0; key < unseen; ++key) {
        for (int head = 0; head < in.c.heads_k; ++head) {
          k.clear_to_nan(in.first_k[i] + key, head), v.clear_to_nan(in.first_k[i] + key, head);
        }
      }
    }
  }
};

struct Results {
  Matrix out, t_out;
  std::vector<float> lse, t_lse;

  explicit Results(const Inputs& in)
      : out(Matrix::nan(in.total_q, in.c.heads, in.c.dim_v)),
        t_out(Matrix::nan(in.total_q, in.c.heads, in.c.dim_v)),
        lse(static_cast<size_t>(in.total_q) * in.c.heads, NAN),
        t_lse(lse) {}
};

void check_row(Inputs& in, Tangents& tangents, Results& results, int sequence, int row, int head) {
  const std::vector<double> scores = in.scores(sequence, row, head);
  const int at_q = in.first_q[sequence] + row, begin = in.visibility(sequence).key_begin(row);
  const int head_k = in.head_k(head);
  double top = -INFINITY, sum = 0.0, mean = 0.0;
  for (const double score : scores) top = std::max(top, score);
  for (const double score : scores) sum += std::exp(score - top);
  std::vector<double> probs, t_scores, out(in.c.dim_v), t_out(in.c.dim_v), terms(in.c.dim_v);
  for (size_t i = 0; i < scores.size(); ++i) {
    const int at_k = in.first_k[sequence] + begin + static_cast<int>(i);
    double t_score = 0.0;
    if (tangents.given.q) t_score += dot(tangents.q.at(at_q, head), in.k.at(at_k, head_k), in.c.dim);
    if (tangents.given.k) t_score += dot(in.q.at(at_q, head), tangents.k.at(at_k, head_k), in.c.dim);
    probs.push_back(std::exp(scores[i] - top) / sum);
    t_scores.push_back(t_score * in.scale);
    mean += probs[i] * t_scores[i];
  }
  double spread = 0.0;  // bound of the distances of an S' and of their mean from the row's center
  for (const double t_score : t_scores) spread = std::max(spread, 3.0 * std::abs(t_score - mean));
  for (size_t i = 0; i < scores.size(); ++i) {
    const int at_k = in.first_k[sequence] + begin + static_cast<int>(i);
    for (int col = 0; col < in.c.dim_v; ++col) {
      const double value = to_float(in.v.at(at_k, head_k)[col]);
      out[col] += probs[i] * value;
      const double tangent = tangents.given.v ? to_float(tangents.v.at(at_k, head_k)[col]) : 0.0;
      t_out[col] += probs[i] * ((t_scores[i] - mean) * value + tangent);
      terms[col] += probs[i] * (std::abs(spread * value) + std::abs(tangent));
    }
  }
  const auto near = [&](const char* name, double ours, double expected, double tolerance) {
    check::that(ours == expected || std::abs(ours - expected) <= tolerance, name, "sequence", sequence, "row", row,
                "head", head, ours, expected);
  };
  const int64_t at = in.lse_at(sequence, row, head);
  near("out", error(results.out.at(at_q, head), out), 0.0, 0.01);
  for (int col = 0; col < in.c.dim_v; ++col) {  // terms of either sign, each rounded to 8 bits
    const double ours = to_float(results.t_out.at(at_q, head)[col]), expected = t_out[col];
    near("t_out", ours, expected, 0x1p-8 * (terms[col] + std::abs(expected)) + 1e-4);
  }
  near("lse", results.lse[at], scores.empty() ? INFINITY : top + std::log(sum), 1e-3);
  near("t_lse", results.t_lse[at], mean, 1e-3);
}

template <int kHeadDim, bool kSmallTile = false>
void run(const Case& c, const Timing& timing, const Given& given = {}) {
  using Config = JvpFwdConfig<Dtype::kBf16, kHeadDim, kSmallTile>;
  static JvpFwdStorage<Config> storage;
  set(timing);
  Inputs in(c);
  Tangents tangents(in, given);
  Results results(in);
  flash::Flash_fwd_jvp_params params;
  in.set(params);
  if (c.exact) params.rescale_threshold_log2 = 0.0f;
  const auto strides_q = [&](const Matrix& x) { return x.strides(c.packed, in.rows_q()); };
  const auto strides_k = [&](const Matrix& x) { return x.strides(c.packed, in.rows_k()); };
  params.q_ptr = in.q.values.data(), params.q_strides = strides_q(in.q);
  params.k_ptr = in.k.values.data(), params.k_strides = strides_k(in.k);
  params.v_ptr = in.v.values.data(), params.v_strides = strides_k(in.v);
  if (given.q) params.tq_ptr = tangents.q.values.data(), params.tq_strides = strides_q(tangents.q);
  if (given.k) params.tk_ptr = tangents.k.values.data(), params.tk_strides = strides_k(tangents.k);
  if (given.v) params.tv_ptr = tangents.v.values.data(), params.tv_strides = strides_k(tangents.v);
  params.o_ptr = results.out.values.data(), params.o_strides = strides_q(results.out);
  params.to_ptr = results.t_out.values.data(), params.to_strides = strides_q(results.t_out);
  params.softmax_lse_ptr = results.lse.data(), params.t_lse_ptr = results.t_lse.data();
  const int blocks = c.packed ? flash::varlen_slot_count(in.total_q, in.batch(), Config::kBlockM)
                              : (in.rows_q() + Config::kBlockM - 1) / Config::kBlockM;
  for (blockIdx.x = 0; blockIdx.x < in.all_heads() * blocks; ++blockIdx.x) {
    std::memset(static_cast<void*>(&storage), 0xff, sizeof(storage));
    emulation::run_block(Config::kThreads, [&] {
      const flash::WorkTile tile = flash::work_tile_at(params, Config::kBlockM, blockIdx.x);
      if (!tile.empty()) JvpFwdTile<Config>(params, tile, storage).run();
    });
  }
  for (int head = 0; head < c.heads; ++head) {
    for (int i = 0; i < in.batch(); ++i) {
      for (int row = 0; row < c.sequences[i].queries; ++row) check_row(in, tangents, results, i, row, head);
    }
  }
}

}  // namespace

int main() {
  const Window full{}, causal{flash::kUnbounded, 0}, sliding{40, 20}, left{30, 0};
  const Timing early{false, true, false}, late{false, false, false}, mixed{false, true, true},
      random{false, false, true};
  run<64>({{{140, 100}}, 1, 1, full, 64, 64}, early);
  run<64>({{{150, 150}}, 2, 1, causal, 64, 64}, random);
  run<64>({{{5, 90}, {5, 90}}, 2, 1, sliding, 40, 64}, late);
  run<64>({{{70, 30}}, 1, 1, causal, 64, 16}, mixed, {true, false, true});
  run<128>({{{70, 100}}, 1, 1, full, 128, 128}, late);
  run<128>({{{64, 200}}, 1, 1, left, 128, 128}, random);
  run<128>({{{40, 60}}, 1, 1, sliding, 96, 72}, mixed, {false, true, true});
  run<128>({{{20, 50}}, 1, 1, full, 128, 128}, early, {true, true, false});
  run<128>({{{64, 100}}, 1, 1, full, 128, 128, false, false, true, 0.05f}, random);
  run<128>({{{64, 100}}, 1, 1, full, 128, 128, false, false, false, 0.05f}, late, {false, false, true});
  run<128>({{{70, 70}, {0, 9}, {3, 0}, {20, 50}, {1, 1}}, 2, 1, causal, 104, 128, true}, random);
  run<128, true>({{{130, 130}}, 1, 1, causal, 128, 128}, mixed);
  check::that(emulation::bank_conflicts == 0, "bank conflicts", emulation::bank_conflicts);
  return check::report();
}
