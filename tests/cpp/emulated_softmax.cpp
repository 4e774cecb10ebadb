// The online softmax of a warp (Softmax::update()) on the CPU (emulated_cuda.h) against double: a row max that lags,
// one that never does and one that falls to the maximum of each block, over scores that grow, fall, are large or
// masked.
#include "check.h"
#include "emulated_device.h"
#include "kernels/common/softmax.h"

namespace {

constexpr int kRowsOfWarp = 16, kKeys = 16, kDim = 2;  // of a block
constexpr float kScale = 0.18033688f;                  // log2(e) / 8

std::mt19937 generator(3);
std::normal_distribution<float> normal;

// What a thread has of rows g and g + 8.
template <int kCols_>
struct View {
  static constexpr int kRows = 2, kCols = kCols_;
  float values[2][kCols_] = {};
  float& operator()(int mi, int ni) { return values[mi][ni]; }
  float operator()(int mi, int ni) const { return values[mi][ni]; }
};

struct Scores {
  int blocks;
  std::vector<float> values;  // (block, row, key)

  float& at(int block, int row, int key) { return values[(block * kRowsOfWarp + row) * kKeys + key]; }
};

// slope: added to the scores from one block to the next. hidden(row, block): masked.
template <class Hidden>
Scores make_scores(int blocks, float deviation, float slope, const Hidden& hidden) {
  Scores scores{blocks, std::vector<float>(blocks * kRowsOfWarp * kKeys)};
  for (int block = 0; block < blocks; ++block) {
    for (int row = 0; row < kRowsOfWarp; ++row) {
      for (int key = 0; key < kKeys; ++key) {
        const float score = deviation * normal(generator) + slope * static_cast<float>(block);
        scores.at(block, row, key) = hidden(row, block) ? -INFINITY : score;
      }
    }
  }
  return scores;
}

float value_of(int block, int key, int col) { return std::sin(static_cast<float>(7 * block + 3 * key + col)); }

struct Result {
  float out[kRowsOfWarp][kDim], lse[kRowsOfWarp];
  std::vector<float> largest;  // P of each block and row

  explicit Result(int blocks) : largest(blocks * kRowsOfWarp) {}
};

// One thread of the warp.
void attend(Scores& scores, float threshold_log2, Result& result) {
  const int g = threadIdx.x / 4, t = threadIdx.x % 4;
  flash::Softmax<2> softmax;
  View<kDim> out;
  for (int block = 0; block < scores.blocks; ++block) {
    View<kKeys / 4> p;
    for (int mi = 0; mi < 2; ++mi)
      for (int ni = 0; ni < kKeys / 4; ++ni) p(mi, ni) = scores.at(block, g + 8 * mi, 4 * t + ni);
    softmax.update<true>(p, out, kScale, threshold_log2);
    for (int mi = 0; mi < 2; ++mi) {
      float largest = 0.0f;
      for (int ni = 0; ni < kKeys / 4; ++ni) largest = std::fmax(largest, p(mi, ni));
      result.largest[block * kRowsOfWarp + g + 8 * mi] = flash::quad_max(largest);
      for (int col = 0; col < kDim; ++col) {
        float sum = 0.0f;
        for (int ni = 0; ni < kKeys / 4; ++ni) sum += p(mi, ni) * value_of(block, 4 * t + ni, col);
        out(mi, col) += flash::quad_sum(sum);
      }
    }
  }
  float o_scale[2];
  softmax.finalize(o_scale, 1.0f, kScale, -INFINITY);
  for (int mi = 0; mi < 2; ++mi) {
    for (int col = 0; col < kDim; ++col) result.out[g + 8 * mi][col] = out(mi, col) * o_scale[mi];
    result.lse[g + 8 * mi] = softmax.lse(mi, kScale, 0.125f, -INFINITY);
  }
}

// The same where a bias is part of the exponents, as BoxSoftmax of the wgmma forward has it. `scores` are biased, of
// which `bias` is a part; both in units of 1 / 0.125. Counts the blocks of which it needs the scores again.
void attend_biased(Scores& scores, Scores& bias, Result& result, int& repeated) {
  constexpr float kLog2e = 1.44269504f, kLn2 = 0.693147181f, kThreshold = 8.0f;
  const int g = threadIdx.x / 4, t = threadIdx.x % 4;
  flash::Softmax<2, int> softmax;
  View<kDim> out;
  for (int block = 0; block < scores.blocks; ++block) {
    View<kKeys / 4> p, biased, added;
    for (int mi = 0; mi < 2; ++mi) {
      for (int ni = 0; ni < kKeys / 4; ++ni) {
        added(mi, ni) = 0.125f * bias.at(block, g + 8 * mi, 4 * t + ni);
        biased(mi, ni) = kScale * scores.at(block, g + 8 * mi, 4 * t + ni);
        p(mi, ni) = added(mi, ni) > -INFINITY ? (biased(mi, ni) - kLog2e * added(mi, ni)) / kScale : 0.0f;
      }
    }
    float correction[2] = {1.0f, 1.0f};
    const auto offset = [&](int mi, int ni) { return softmax.row_max[mi] - kLog2e * added(mi, ni); };
    bool done = block > 0 && softmax.may_speculate(kThreshold);
    if (done && !softmax.exp2_speculative(p, kScale, offset)) {
      done = softmax.raise_row_max(p, 1.0f, correction);
      repeated += threadIdx.x == 0 && !done;
    }
    if (!done) {
      p = biased;
      if (block == 0) softmax.set_row_max(p, 1.0f);
      if (block > 0) softmax.update_row_max(p, 1.0f, correction, kThreshold);
      softmax.exponentiate(p, 1.0f);
    }
    for (int mi = 0; mi < 2; ++mi) {
      for (int col = 0; col < kDim; ++col) {
        float sum = 0.0f;
        for (int ni = 0; ni < kKeys / 4; ++ni) sum += p(mi, ni) * value_of(block, 4 * t + ni, col);
        out(mi, col) = out(mi, col) * correction[mi] + flash::quad_sum(sum);
      }
    }
  }
  float o_scale[2];
  softmax.finalize(o_scale, 1.0f, 1.0f, -INFINITY);
  for (int mi = 0; mi < 2; ++mi) {
    for (int col = 0; col < kDim; ++col) result.out[g + 8 * mi][col] = out(mi, col) * o_scale[mi];
    result.lse[g + 8 * mi] = softmax.lse(mi, 1.0f, kLn2, -INFINITY);
  }
}

void check_row(Scores& scores, int row, const Result& result, double tolerance) {
  double top = -INFINITY, sum = 0.0, expected[kDim] = {};
  for (int i = 0; i < scores.blocks * kKeys; ++i) top = std::max(top, 0.125 * scores.at(i / kKeys, row, i % kKeys));
  for (int i = 0; i < scores.blocks * kKeys && top > -INFINITY; ++i) {
    const double weight = std::exp(0.125 * scores.at(i / kKeys, row, i % kKeys) - top);
    sum += weight;
    for (int col = 0; col < kDim; ++col) expected[col] += weight * value_of(i / kKeys, i % kKeys, col);
  }
  const double lse = top == -INFINITY ? INFINITY : top + std::log(sum), ours = result.lse[row];
  check::that(lse == ours || std::abs(lse - ours) <= 1e-6 * std::max(1.0, std::abs(lse)), "lse", row, ours, lse);
  for (int col = 0; col < kDim; ++col) {
    const double error = result.out[row][col] - (sum == 0.0 ? 0.0 : expected[col] / sum);
    check::that(std::abs(error) <= tolerance, "out", row, result.out[row][col], error);
  }
}

// A block whose maximum is within the fall of the one before has a P of 1.
void check_largest(Scores& scores, const Result& result) {
  for (int row = 0; row < kRowsOfWarp; ++row) {
    float before = -INFINITY;
    for (int block = 0; block < scores.blocks; ++block) {
      float top = -INFINITY;
      for (int key = 0; key < kKeys; ++key) top = std::max(top, scores.at(block, row, key));
      const float largest = result.largest[block * kRowsOfWarp + row];
      check::that(largest <= 1.0f, "P above 1", row, block, largest);
      const bool follows = top > -INFINITY && (before - top) * kScale < 7.9f;
      check::that(!follows || largest == 1.0f, "the largest P of a block", row, block, largest);
      if (!follows) break;
      before = top;
    }
  }
}

void run(Scores scores, double tolerance = 2e-6) {
  for (const float threshold : {8.0f, 0.0f, -8.0f}) {
    Result result(scores.blocks);
    emulation::run_block(32, [&] { attend(scores, threshold, result); });
    for (int row = 0; row < kRowsOfWarp; ++row) check_row(scores, row, result, tolerance);
    const float most = *std::max_element(result.largest.begin(), result.largest.end());
    check::that(most <= (threshold > 0.0f ? 256.0f : 1.0f), "P", threshold, most);
    if (threshold < 0.0f) check_largest(scores, result);
  }
}

// Returns how many blocks needed their scores again.
template <class Hidden>
int run_biased(int blocks, float deviation, float slope, double tolerance, const Hidden& hidden) {
  Scores bias = make_scores(blocks, deviation, slope, hidden), scores = make_scores(blocks, 8.0f, 0.0f, hidden);
  for (size_t i = 0; i < bias.values.size(); ++i) scores.values[i] += bias.values[i];
  Result result(blocks);
  int repeated = 0;
  emulation::run_block(32, [&] { attend_biased(scores, bias, result, repeated); });
  for (int row = 0; row < kRowsOfWarp; ++row) check_row(scores, row, result, tolerance);
  return repeated;
}

}  // namespace

int main() {
  const auto none = [](int, int) { return false; };
  run(make_scores(1, 8.0f, 0.0f, none));
  run(make_scores(20, 8.0f, 0.0f, none));
  run(make_scores(20, 24.0f, 0.0f, none));
  run(make_scores(12, 8.0f, 20.0f, none));
  run(make_scores(12, 8.0f, -8.0f, none));
  run(make_scores(12, 20000.0f, 0.0f, none), 2e-3);
  run(make_scores(10, 8.0f, 0.0f, [](int row, int block) { return block < row % 4; }));
  run(make_scores(10, 8.0f, 0.0f, [](int row, int block) { return row == 5 || block >= row; }));
  check::that(run_biased(20, 8.0f, 0.0f, 4e-6, none) == 0, "scores are near");
  check::that(run_biased(20, 8.0f, 100.0f, 2e-5, none) == 0, "the largest P tells the maximum");
  check::that(run_biased(12, 8.0f, 700.0f, 1e-4, none) > 0, "P overflows");
  run_biased(12, 800.0f, 0.0f, 2e-4, none);
  run_biased(12, 8.0f, 0.0f, 4e-6, [](int row, int block) { return block < row % 4 || row == 7; });
  // Scores that fall by hundreds of powers of 2: row_max stops, and float32 holds the sums.
  Scores falling = make_scores(100, 1.0f, -30.0f, none);
  Result result(falling.blocks);
  emulation::run_block(32, [&] { attend(falling, -8.0f, result); });
  for (int row = 0; row < kRowsOfWarp; ++row) check_row(falling, row, result, 2e-6);
  return check::report();
}
