// Attention by its definition in float64, and the error that bf16 rounding explains. Plain C++.
#pragma once

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <cstring>
#include <random>
#include <vector>

struct Shape {
  int batch, seqlen, heads, head_dim;

  size_t elements() const { return static_cast<size_t>(batch) * seqlen * heads * head_dim; }
  size_t index(int b, int row, int head) const {
    return ((static_cast<size_t>(b) * seqlen + row) * heads + head) * head_dim;
  }
};

struct RandomNormal {
  std::mt19937 engine;
  std::normal_distribution<float> normal;

  explicit RandomNormal(unsigned seed) : engine(seed) {}
  float operator()() { return normal(engine); }
};

inline double bf16_to_double(uint16_t bits) {
  const uint32_t word = static_cast<uint32_t>(bits) << 16;
  float value;
  std::memcpy(&value, &word, 4);
  return value;
}

inline double dot(const uint16_t* a, const uint16_t* b, int count) {
  double sum = 0.0;
  for (int i = 0; i < count; ++i) sum += bf16_to_double(a[i]) * bf16_to_double(b[i]);
  return sum;
}

// Probabilities of one query row over its visible keys.
inline std::vector<double> softmax_row(const Shape& shape, bool causal, const uint16_t* q, const uint16_t* k, int b,
                                       int row, int head) {
  std::vector<double> p(causal ? row + 1 : shape.seqlen);
  double maximum = -INFINITY, sum = 0.0;
  for (size_t key = 0; key < p.size(); ++key) {
    p[key] = dot(q + shape.index(b, row, head), k + shape.index(b, static_cast<int>(key), head), shape.head_dim) /
             std::sqrt(static_cast<double>(shape.head_dim));
    maximum = std::max(maximum, p[key]);
  }
  for (double& value : p) sum += value = std::exp(value - maximum);
  for (double& value : p) value /= sum;
  return p;
}

// What attention gives, and how far rounding may move it.
struct Reference {
  std::vector<double> out, bound;
};

// Probabilities and output are each rounded to bf16 (2^-8), which moves an element by at most 2^-7 sum(p |v|); 1 % more
// for everything kept in float.
inline Reference reference_attention(const Shape& shape, bool causal, const uint16_t* q, const uint16_t* k,
                                     const uint16_t* v) {
  Reference reference{std::vector<double>(shape.elements()), std::vector<double>(shape.elements())};
  for (int i = 0; i < shape.batch * shape.heads * shape.seqlen; ++i) {
    const int b = i / shape.seqlen / shape.heads, head = i / shape.seqlen % shape.heads, row = i % shape.seqlen;
    const std::vector<double> p = softmax_row(shape, causal, q, k, b, row, head);
    for (int col = 0; col < shape.head_dim; ++col) {
      double expected = 0.0, magnitude = 0.0;
      for (size_t key = 0; key < p.size(); ++key) {
        const double value = bf16_to_double(v[shape.index(b, static_cast<int>(key), head) + col]);
        expected += p[key] * value;
        magnitude += p[key] * std::fabs(value);
      }
      reference.out[shape.index(b, row, head) + col] = expected;
      reference.bound[shape.index(b, row, head) + col] = 1.01 / 128 * magnitude;
    }
  }
  return reference;
}

// Largest error of `out` over its bound. NaN counts as infinite.
inline double error_in_bounds(const Reference& reference, const uint16_t* out) {
  double worst = 0.0;
  for (size_t i = 0; i < reference.out.size(); ++i) {
    const double error = std::fabs(bf16_to_double(out[i]) - reference.out[i]);
    worst = std::max(worst, std::isnan(error) ? INFINITY : error / reference.bound[i]);
  }
  return worst;
}
