// What the emulations of the kernels of head dims above 256 have in common: instructions, tensors, and packed or dense
// sequences.
#pragma once

#include "emulated_cuda.h"

#include <random>

#include "check.h"
#include "emulated_device.h"

struct float2 {
  float x, y;
};
inline float __ldcg(const float* value) { return *value; }
template <class T>
T __ldg(const T* value) {
  return *value;
}
inline float __fdividef(float a, float b) { return a / b; }

#include <cuda.h>

#include "emulated_wgmma.h"
#include "params/flash.h"

namespace wide {

using flash::Window;

static std::mt19937 generator(7);

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

inline std::vector<bf16> normal(size_t count) {
  std::normal_distribution<float> distribution;
  std::vector<bf16> values(count);
  for (bf16& value : values) value.bits = to_bf16(distribution(generator));
  return values;
}

// One side of the call: rows of all sequences, (rows, heads, dim).
struct Matrix {
  std::vector<bf16> values;
  int heads, dim;

  static Matrix random(int rows, int heads, int dim) {
    return {normal(static_cast<size_t>(rows) * heads * dim), heads, dim};
  }
  static Matrix nan(int rows, int heads, int dim) {
    return {std::vector<bf16>(static_cast<size_t>(rows) * heads * dim, bf16{0x7fff}), heads, dim};
  }

  bf16* at(int row, int head) { return values.data() + (static_cast<int64_t>(row) * heads + head) * dim; }
  void clear_to_nan(int row, int head) { std::fill(at(row, head), at(row, head) + dim, bf16{0x7fff}); }
  flash::MatrixStrides strides(bool packed, int rows) const {
    return {packed ? 0 : int64_t{rows} * heads * dim, int64_t{heads} * dim, dim};
  }
  CUtensorMap map(bool packed, int rows) {
    const flash::MatrixStrides of_rows = strides(packed, rows);
    return {values.data(), of_rows.batch, of_rows.row, of_rows.head, rows, dim};
  }
};

// A call's inputs. Rows that no query or key sees are NaN.
struct Inputs {
  const Case& c;
  int total_q = 0, total_k = 0;
  std::vector<int> first_q, first_k, segments_q{0}, segments_k{0}, key_ranges;
  Matrix q, k, v;
  double scale;

  explicit Inputs(const Case& c_) : c(c_), scale(1.0 / std::sqrt(c_.dim)) {
    for (const Lengths& lengths : c.sequences) {
      first_q.push_back(total_q), first_k.push_back(total_k);
      segments_q.push_back(total_q), segments_k.push_back(total_k);
      key_ranges.insert(key_ranges.end(), {total_k, lengths.keys});
      total_q += lengths.queries, total_k += lengths.keys;
    }
    segments_q.insert(segments_q.end(), 2, total_q), segments_k.insert(segments_k.end(), 2, total_k);
    q = Matrix::random(total_q, c.heads, c.dim);
    k = Matrix::random(total_k, c.heads_k, c.dim);
    v = Matrix::random(total_k, c.heads_k, c.dim_v);
    for (size_t i = 0; i < c.sequences.size(); ++i) prepare_keys(static_cast<int>(i));
  }

  flash::Visibility visibility(int sequence) const {
    return {c.sequences[sequence].queries, c.sequences[sequence].keys, c.window};
  }

  void prepare_keys(int i) {
    const int unseen = c.sequences[i].queries == 0 ? c.sequences[i].keys : visibility(i).key_begin(0);
    for (int key = 0; key < c.sequences[i].keys; ++key) {
      for (int head = 0; head < c.heads_k; ++head) {
        bf16* const row = k.at(first_k[i] + key, head);
        for (int col = 0; col < c.dim; ++col)
          row[col].bits = to_bf16(to_float(row[col]) * (1.0f + static_cast<float>(key) * c.growth));
        if (key < unseen) k.clear_to_nan(first_k[i] + key, head), v.clear_to_nan(first_k[i] + key, head);
      }
    }
  }

  int rows_q() const { return c.packed ? total_q : c.sequences[0].queries; }
  int rows_k() const { return c.packed ? total_k : c.sequences[0].keys; }
  int batch() const { return static_cast<int>(c.sequences.size()); }
  int all_heads() const { return c.heads * (c.packed ? 1 : batch()); }
  int head_k(int head) const { return head / (c.heads / c.heads_k); }
  int64_t lse_at(int sequence, int row, int head) const {
    if (c.packed) return int64_t{head} * total_q + first_q[sequence] + row;
    return (int64_t{sequence} * c.heads + head) * c.sequences[0].queries + row;
  }

  // Of the keys that a row sees, in double.
  std::vector<double> scores(int sequence, int row, int head) {
    const flash::Visibility seen = visibility(sequence);
    std::vector<double> result;
    for (int key = seen.key_begin(row); key < seen.key_end(row); ++key) {
      double score = 0.0;
      const bf16 *const a = q.at(first_q[sequence] + row, head), *const b = k.at(first_k[sequence] + key, head_k(head));
      for (int col = 0; col < c.dim; ++col) score += static_cast<double>(to_float(a[col])) * to_float(b[col]);
      result.push_back(score * scale);
    }
    return result;
  }

  void set(flash::Flash_fwd_params& params) {
    params.b = batch(), params.h = c.heads, params.h_k = c.heads_k, params.h_h_k_ratio = c.heads / c.heads_k;
    params.d = c.dim, params.d_v = c.dim_v;
    params.seqlen_q = rows_q(), params.seqlen_k = rows_k();
    params.window = c.window;
    params.scale_softmax = static_cast<float>(scale);
    params.softmax_scale_log2 = static_cast<float>(scale * 1.4426950408889634);
    params.dropout.keep_scale = 1.0f;
    if (!c.packed) return;
    params.varlen.cu_seqlens_q = params.varlen.segments_q = segments_q.data();
    params.varlen.cu_seqlens_k = params.varlen.segments_k = segments_k.data();
    params.varlen.key_ranges = key_ranges.data();
  }
};

inline void set(const Timing& timing) {
  emulation::computes_late = timing.computes_late;
  emulation::lands_early = timing.lands_early;
  emulation::at_random = timing.at_random;
}

// Runs the kernel of each thread block: work(), between whose calls all copies must have landed.
template <class Storage, class Work>
void run_blocks(int blocks, int threads, Storage& storage, const Work& work) {
  for (blockIdx.x = 0; blockIdx.x < blocks; ++blockIdx.x) {
    std::memset(static_cast<void*>(&storage), 0xff, sizeof(storage));
    storage.init_barriers();
    emulation::run_block(threads, work);
    check::that(emulation::copies.empty(), "a copy that nobody waits for");
    emulation::copies.clear();
  }
}

// The largest error of a row, over its largest number.
inline double error(const bf16* ours, const std::vector<double>& expected) {
  double worst = 0.0, largest = 1e-3;
  for (size_t col = 0; col < expected.size(); ++col) {
    const double value = to_float(ours[col]);
    worst = std::max(worst, std::isnan(value) ? INFINITY : std::abs(value - expected[col]));
    largest = std::max(largest, std::abs(expected[col]));
  }
  return worst / largest;
}

}  // namespace wide
