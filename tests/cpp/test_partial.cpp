// Partial results of a row and their combination (kernels/common/partial.h), compiled for the host, against softmax
// over all keys in double.
#include <algorithm>
#include <cmath>
#include <random>
#include <vector>

#include "check.h"

#define __device__
#define __forceinline__ inline

struct float4 {
  float x, y, z, w;
};

inline float __fmul_rn(float a, float b) { return a * b; }
inline float __fadd_rn(float a, float b) { return a + b; }
inline float __fmaf_rn(float a, float b, float c) { return std::fma(a, b, c); }
inline float __frcp_rn(float a) { return 1.0f / a; }

#include "kernels/common/partial.h"

namespace {

using Row = flash::CombinedRow<1>;
using Value = flash::RowValue<1>;
using flash::RowEnd;
using flash::RowStats;

constexpr float kInf = INFINITY, kNan = NAN;
constexpr float kLog2e = Row::kLog2e;

// One column, four times over.
Value value_of(double x) {
  const float v = static_cast<float>(x);
  return {{{v, v, v, v}}};
}

struct Key {
  double score, value;
};

struct Exact {
  double out = 0.0, lse = INFINITY;
};

Exact attention(const std::vector<Key>& keys, double sink = -INFINITY) {
  double top = sink, sum = 0.0, out = 0.0;
  for (const Key& key : keys) top = std::max(top, key.score);
  if (top == -INFINITY) return {};
  for (const Key& key : keys) {
    sum += std::exp(key.score - top);
    out += std::exp(key.score - top) * key.value;
  }
  sum += std::exp(sink - top);
  return {out / sum, top + std::log(sum)};
}

struct Split {
  float lse;
  double out;
};

// In batches, as a kernel loads them.
Row combined(const std::vector<Split>& splits, size_t batch, float sink = -kInf) {
  Row row;
  for (size_t begin = 0; begin < splits.size(); begin += batch) {
    const size_t end = std::min(begin + batch, splits.size());
    float top = -kInf;
    for (size_t i = begin; i < end; ++i) top = std::fmax(top, flash::partial_lse(splits[i].lse));
    row.update_max(top);
    for (size_t i = begin; i < end; ++i) row.add(flash::partial_lse(splits[i].lse), value_of(splits[i].out));
  }
  row.add_sink(sink);
  return row;
}

bool is_near(double a, double b, double tolerance) {
  return a == b || std::abs(a - b) <= tolerance * (1.0 + std::abs(b));
}

void check_row(Row row, const Exact& exact, const char* what, size_t splits) {
  check::that(is_near(row.lse(), exact.lse, 4e-7), what, "lse", splits, row.lse(), exact.lse);
  row.normalize();
  const float4& quad = row.value.quads[0];
  check::that(is_near(quad.x, exact.out, 1e-6), what, "out", splits, quad.x, exact.out);
  check::that(quad.x == quad.y && quad.y == quad.z && quad.z == quad.w, what, "columns");
}

// The same row by unnormalised partial results: raw scores, which `scale` turns into those of the softmax.
void check_unnormalised(const std::vector<std::vector<Key>>& splits, const Exact& exact, float sink = -kInf) {
  const float scale = 0.125f;
  flash::RowStats total{-kInf, 0.0f};
  float4 out{};
  for (const std::vector<Key>& keys : splits) {
    flash::RowStats stats{-kInf, 0.0f};
    float4 value{};
    for (const Key& key : keys) stats.max = std::max(stats.max, static_cast<float>(key.score) / scale);
    for (const Key& key : keys) {
      const float p = std::exp(static_cast<float>(key.score) - stats.max * scale);
      stats.sum += p;
      value.x += p * static_cast<float>(key.value);
    }
    flash::combine_partials(total, out, stats, value, scale * kLog2e);
  }
  const RowEnd row{total, scale * kLog2e, sink};
  check::that(is_near(row.lse(), exact.lse, 1e-6), "unnormalised", "lse", exact.lse, sink);
  const float result = row.has_keys() ? out.x * row.o_scale() : 0.0f;
  check::that(is_near(result, exact.out, 3e-6), "unnormalised", "out", exact.out, sink);
}

void check_random_rows() {
  std::mt19937 random(1);
  std::normal_distribution<double> normal;
  for (size_t count : {1, 2, 3, 7, 8, 9, 16, 17, 130}) {
    for (int repeat = 0; repeat < 20; ++repeat) {
      std::vector<Key> all;
      std::vector<std::vector<Key>> keys(count);
      std::vector<Split> splits;
      for (auto& split : keys) {
        const size_t length = random() % 6;  // of some splits 0
        for (size_t i = 0; i < length; ++i) split.push_back({static_cast<float>(4 * normal(random)), normal(random)});
        all.insert(all.end(), split.begin(), split.end());
        const Exact own = attention(split);
        splits.push_back({static_cast<float>(own.lse), split.empty() ? kNan : own.out});
        if (split.empty() && random() % 2) splits.back().lse = -kInf;
      }
      for (size_t batch : {1, 3, 8}) check_row(combined(splits, batch), attention(all), "row", count);
      const float sink = static_cast<float>(6 * normal(random));
      check_row(combined(splits, 8, sink), attention(all, sink), "row with a sink", count);
      check_unnormalised(keys, attention(all));
      for (float other : {sink, -90.0f, 40.0f, 300.0f}) check_unnormalised(keys, attention(all, other), other);
    }
  }
}

// The greatest LSE decides: nothing overflows, and no precision is lost to their magnitude.
void check_large() {
  for (double shift : {-1e4, 1e4, 3e37}) {
    const float large = static_cast<float>(shift);
    Row row = combined({{large, 1.0}, {large, 3.0}, {-3e37f, 100.0}}, 8);
    row.normalize();
    check::that(is_near(row.value.quads[0].x, 2.0, 1e-7), "large LSEs", shift, row.value.quads[0].x);
    check::that(is_near(row.lse(), large + std::log(2.0), 1e-7), "LSE of large ones", shift, row.lse());
  }
}

void check_special() {
  Row row = combined({{0.3f, 0.7}, {kInf, kNan}, {-kInf, kInf}}, 8);
  check::that(row.lse() == 0.3f, "the only split with keys: its LSE", row.lse());
  row.normalize();
  check::that(row.value.quads[0].x == 0.7f, "the only split with keys: its out", row.value.quads[0].x);

  for (const std::vector<Split>& splits : {std::vector<Split>{}, {{kInf, kNan}}, {{-kInf, kNan}, {kInf, 1.0}}}) {
    row = combined(splits, 8);
    check::that(row.lse() == kInf, "no key: LSE", row.lse());
    row.normalize();
    check::that(row.value.quads[0].x == 0.0f, "no key: out", row.value.quads[0].x);
    row = combined(splits, 8, 2.5f);
    check::that(row.lse() == 2.5f, "a sink alone: LSE", row.lse());
    row.normalize();
    check::that(row.value.quads[0].x == 0.0f, "a sink alone: out", row.value.quads[0].x);
  }
  for (size_t batch : {1, 2, 8}) {
    for (const std::vector<Split>& splits :
         {std::vector<Split>{{kNan, 1.0}}, {{1.0f, 1.0}, {kNan, 1.0}}, {{kNan, 1.0}, {kInf, 1.0}, {2.0f, 1.0}}}) {
      row = combined(splits, batch);
      check::that(std::isnan(row.lse()), "a NaN LSE: LSE", row.lse());
      row.normalize();
      check::that(std::isnan(row.value.quads[0].x), "a NaN LSE: out", row.value.quads[0].x);
    }
  }
  row = combined({{1.0f, 1.0}}, 8, kNan);
  check::that(std::isnan(row.lse()), "a NaN sink", row.lse());
  for (const std::vector<Split>& splits : {std::vector<Split>{}, {{1.0f, 1.0}}, {{1.0f, 1.0}, {-kInf, kNan}}}) {
    row = combined(splits, 8, kInf);
    check::that(row.lse() == kInf, "an infinite sink: LSE", row.lse());
    row.normalize();
    check::that(row.value.quads[0].x == 0.0f, "an infinite sink: out", row.value.quads[0].x);
  }
}

// An invalid request stays invalid, whichever side it is on, and has out 0 and LSE +inf.
void check_invalid() {
  for (bool first : {false, true}) {
    flash::RowStats a{1.0f, first ? flash::RowStats::kInvalid : 2.0f};
    const flash::RowStats b{3.0f, first ? 2.0f : flash::RowStats::kInvalid};
    float4 value{1.0f, 1.0f, 1.0f, 1.0f};
    flash::combine_partials(a, value, b, value, 1.0f);
    const RowEnd row{a, 1.0f, -kInf};
    check::that(a.invalid() && !row.has_keys(), "invalid", first);
    check::that(row.lse() == kInf, "LSE of an invalid row", first);
  }
}

// -inf changes no bit; a sink far above is the LSE, and leaves nothing of the values.
void check_extreme_sinks() {
  const RowStats stats{3.0f, 1.75f};
  const RowEnd none{stats, 0.5f, -kInf}, low{stats, 0.5f, -200.0f}, high{stats, 0.5f, 300.0f}, all{stats, 0.5f, kInf};
  check::that(none.o_scale() == 1.0f / 1.75f && low.o_scale() == none.o_scale() && low.lse() == none.lse(), "low");
  check::that(high.o_scale() == 0.0f && high.lse() == 300.0f, "high", high.o_scale(), high.lse());
  check::that(all.o_scale() == 0.0f && all.lse() == kInf, "infinite", all.o_scale(), all.lse());
  check::that(all.has_keys() && high.has_keys(), "a value of NaN is still seen");
}

void check_ends_with_nan() {
  for (const RowStats stats : {RowStats{-kInf, kNan}, RowStats{2.0f, kNan}, RowStats{kInf, kNan}}) {
    for (float sink : {-kInf, 0.0f, 1e4f}) {
      const RowEnd row{stats, 0.5f, sink};
      check::that(row.has_keys() && std::isnan(row.o_scale()) && std::isnan(row.lse()), "NaN score", sink);
    }
  }
  const RowStats stats{2.0f, 1.5f};
  check::that(std::isnan(RowEnd(stats, 0.5f, kNan).o_scale()) && std::isnan(RowEnd(stats, 0.5f, kNan).lse()), "sink");
}

void check_rows_without_keys() {
  for (const RowStats stats : {RowStats{-kInf, 0.0f}, RowStats{-3.4e38f, 0.0f}}) {
    for (float sink : {-500.0f, 0.0f, 1.5f, 1e4f}) {
      const RowEnd row{stats, 0.5f, sink};
      check::that(!row.has_keys() && row.lse() == sink, "the sink alone", sink, row.lse());
    }
    check::that(RowEnd(stats, 0.5f, -kInf).lse() == kInf, "neither");
  }
  const RowStats invalid{-kInf, RowStats::kInvalid};
  for (float sink : {-kInf, 0.0f, 1e4f}) {
    const RowEnd row{invalid, 0.5f, sink};
    check::that(!row.has_keys() && row.lse() == kInf, "invalid", sink);
  }
}

}  // namespace

int main() {
  check_random_rows();
  check_large();
  check_special();
  check_invalid();
  check_extreme_sinks();
  check_ends_with_nan();
  check_rows_without_keys();
  return check::report();
}
