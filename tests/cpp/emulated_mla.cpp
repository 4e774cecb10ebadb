// Runs the MLA decode kernels thread by thread on the CPU (emulated_cuda.h) against attention in double: pages
// of any size, causal tokens, splits with their combine in double, left padding, invalid requests, missing pages,
// sinks, packed queries, FP8 rows. Rows that are no keys are NaN.
#include "emulated_cuda.h"

#include <numeric>
#include <random>

#include "check.h"

#define __forceinline__ inline
#define __grid_constant__
#define __align__(bytes) __attribute__((aligned(bytes)))
#undef __shared__
#define __shared__

struct float2 {
  float x, y;
};
struct uint4 {
  uint32_t x, y, z, w;
};
struct float4 {
  float x, y, z, w;
};
using std::max;
inline float __fmul_rn(float a, float b) { return a * b; }
inline float __fadd_rn(float a, float b) { return a + b; }
inline float __fmaf_rn(float a, float b, float c) { return std::fma(a, b, c); }
inline float __frcp_rn(float a) { return 1.0f / a; }

#include "kernels/mla/kernel.h"
#include "kernels/mla/wgmma_fp8_producer.h"
#include "kernels/mla/wgmma_kernel.h"
#include "kernels/mla/wgmma_producer.h"
#include "kernels/mla/wgmma_row_producer.h"

namespace {

using flash::Dtype;
using flash::Flash_mla_params;
using flash::mla::end_producer;
using flash::mla::MlaConfig;
using flash::mla::MlaConsumer;
using flash::mla::MlaFp8Producer;
using flash::mla::MlaProducer;
using flash::mla::MlaRowProducer;
using flash::mla::MlaStorage;
using flash::mla::MlaTile;
using flash::mla::MlaWgmmaConfig;
using flash::mla::MlaWgmmaLaunch;
using flash::mla::MlaWgmmaStorage;
using flash::mla::MlaWork;

constexpr int kLatent = flash::kMlaLatentDim, kRope = flash::kMlaRopeDim, kDim = kLatent + kRope;
std::mt19937 generator(7);

struct Case {
  std::vector<int> lengths, tokens;  // tokens: of the queries of each request, -n for n rows of no sequence
  int heads, page_size, splits;
  bool causal;
  std::vector<int> leftpad;
  bool sinks, packed = false;
  int missing = -1;     // the request without a page
  float growth = 0.0f;  // of the keys from one to the next
  int capacity = 128;   // in keys, rounded up to pages
  bool fp8 = false;
  int missing_key = 0;  // after the first, of the page
};

struct Queries {
  int first, count;
};

std::vector<bf16> normal(size_t count) {
  std::normal_distribution<float> distribution;
  std::vector<bf16> values(count);
  for (bf16& value : values) value.bits = to_bf16(distribution(generator));
  return values;
}

constexpr int kRowBytes = flash::kMlaRopeByte + 2 * kRope;

// Makes FP8 bytes at `bytes`, and a row of the numbers that they mean of one whose rotated columns are known.
void make_fp8_row(char* bytes, std::vector<bf16>& row) {
  float scales[flash::kMlaScales];
  for (float& scale : scales) scale = std::uniform_real_distribution<float>(0.001f, 0.005f)(generator);
  for (int i = 0; i < kLatent; ++i) {
    const int byte = static_cast<int>(generator() % 127) + 128 * static_cast<int>(generator() % 2);
    bytes[i] = static_cast<char>(byte);
    row[i].bits = to_bf16(emulation::from_e4m3(byte) * scales[i / flash::kMlaScaleCols]);
  }
  std::memcpy(bytes + kLatent, scales, sizeof(scales));
  std::memcpy(bytes + kLatent + sizeof(scales), row.data() + kLatent, 2 * kRope);
}

struct Expected {
  std::vector<double> out;
  double lse = INFINITY;
};

Expected attention(const bf16* q, const std::vector<const bf16*>& keys, double scale, double sink) {
  std::vector<double> scores;
  double top = sink;
  for (const bf16* key : keys) {
    double score = 0.0;
    for (int i = 0; i < kDim; ++i) score += static_cast<double>(to_float(q[i])) * to_float(key[i]);
    scores.push_back(score * scale);
    top = std::max(top, scores.back());
  }
  Expected result{std::vector<double>(kLatent), INFINITY};
  if (top == -INFINITY) return result;
  double sum = std::exp(sink - top);
  for (const double score : scores) sum += std::exp(score - top);
  for (size_t j = 0; j < keys.size(); ++j) {
    for (int i = 0; i < kLatent; ++i) result.out[i] += std::exp(scores[j] - top) / sum * to_float(keys[j][i]);
  }
  result.lse = top + std::log(sum);
  return result;
}

// Output and LSE of a row, whose splits are merged in double.
Expected result_of(const Flash_mla_params& params, const std::vector<bf16>& out, int64_t row, int64_t at) {
  const int64_t results = static_cast<int64_t>(out.size()) / kLatent;
  Expected ours{std::vector<double>(kLatent), params.softmax_lse_ptr[at]};
  if (params.splits == 1) {
    for (int col = 0; col < kLatent; ++col) ours.out[col] = to_float(out[row * kLatent + col]);
    return ours;
  }
  double sum = 0.0;
  for (int split = 0; split < params.splits; ++split) {
    const double part = params.partial_lse[split * results + at], weight = std::isinf(part) ? 0.0 : std::exp(part);
    if (part == INFINITY) return {std::vector<double>(kLatent), INFINITY};
    sum += weight;
    for (int col = 0; col < kLatent; ++col)
      ours.out[col] += weight * params.partial_o[(split * results + row) * kLatent + col];
  }
  for (double& value : ours.out) value /= sum == 0.0 ? 1.0 : sum;
  ours.lse = sum == 0.0 ? INFINITY : std::log(sum);
  return ours;
}

void compare(const Expected& ours, const Expected& expected, int request, int token, int head) {
  double worst = 0.0, largest = 0.0;
  for (int col = 0; col < kLatent; ++col) {
    worst = std::max(worst, std::isnan(ours.out[col]) ? INFINITY : std::abs(ours.out[col] - expected.out[col]));
    largest = std::max(largest, std::abs(expected.out[col]));
  }
  check::that(worst <= 0.01 * largest, "out: request", request, "token", token, "head", head, worst);
  const bool same = expected.lse == ours.lse || std::abs(expected.lse - ours.lse) < 1e-3;
  check::that(same, "lse: request", request, "token", token, "head", head, ours.lse, expected.lse);
}

// launch(params): all thread blocks of a kernel with tiles of `tile_rows` rows.
template <class Launch>
void run(const Case& c, int tile_rows, const Launch& launch) {
  const int batch = static_cast<int>(c.lengths.size()), h = c.heads;
  std::vector<Queries> queries;
  std::vector<int> segments{0}, key_ranges;
  int total = 0;
  for (const int count : c.tokens) {
    if (count >= 0) queries.push_back({total, count}), segments.push_back(total);
    total += std::abs(count);
  }
  segments.push_back(queries.back().first + queries.back().count), segments.push_back(total);
  const int slots = (c.capacity + c.page_size - 1) / c.page_size, pages = batch * slots + 2,
            capacity = slots * c.page_size;
  std::vector<bf16> rows(static_cast<size_t>(pages) * c.page_size * kDim, bf16{0x7fff}), q = normal(total * h * kDim);
  std::vector<int> table(batch * slots), order(pages);
  for (int i = 0; i < pages; ++i) order[i] = i;
  std::shuffle(order.begin(), order.end(), generator);
  std::vector<char> bytes(c.fp8 ? static_cast<size_t>(pages) * c.page_size * kRowBytes : 0, '\x7f');
  const auto index_of = [&](int request, int key) {
    const int page = order[request * slots + key / c.page_size];
    return static_cast<size_t>(page) * c.page_size + key % c.page_size;
  };
  const auto row_of = [&](int request, int key) { return rows.data() + index_of(request, key) * kDim; };
  for (int i = 0; i < batch; ++i) {
    const int first = c.leftpad.empty() ? 0 : c.leftpad[i], end = std::min(c.lengths[i], capacity);
    key_ranges.insert(key_ranges.end(), {first, std::max(end - first, 0)});
    for (int key = first; key < end; ++key) {
      std::vector<bf16> row = normal(kDim);
      for (bf16& value : row) value.bits = to_bf16(to_float(value) * (1.0f + static_cast<float>(key) * c.growth));
      if (c.fp8) make_fp8_row(bytes.data() + index_of(i, key) * kRowBytes, row);
      std::copy(row.begin(), row.end(), row_of(i, key));
    }
    for (int slot = 0; slot < slots; ++slot) {
      const bool used = slot * c.page_size < c.lengths[i] && (slot + 1) * c.page_size > first;
      table[i * slots + slot] = used ? order[i * slots + slot] : slot % 2 ? -1 : 1 << 20;
    }
    if (i == c.missing) table[i * slots + (first + c.missing_key) / c.page_size] = pages;
  }
  const int64_t results = static_cast<int64_t>(total) * h, seqlen_q = c.packed ? total : queries[0].count;
  std::vector<bf16> out(results * kLatent, bf16{0x7fff});
  std::vector<float> lse(results, NAN), partial_o(c.splits * results * kLatent, NAN),
      partial_lse(c.splits * results, NAN);
  std::vector<float> sinks(h);
  for (float& sink : sinks) sink = c.sinks ? std::normal_distribution<float>(2.0f)(generator) : -INFINITY;
  Flash_mla_params params;
  params.qv_ptr = q.data(), params.q_ptr = q.data() + kLatent;
  params.latent_ptr = rows.data(), params.rope_ptr = rows.data() + kLatent;
  params.q_strides = params.qv_strides = {seqlen_q * h * kDim, int64_t{h} * kDim, kDim};
  params.latent_strides = params.rope_strides = {int64_t{c.page_size} * kDim, kDim, 0};
  if (c.fp8) {
    params.latent_ptr = bytes.data(), params.has_fp8_rows = true;
    params.latent_strides = {int64_t{c.page_size} * kRowBytes, kRowBytes, 0};
  }
  params.o_ptr = out.data(), params.o_strides = {seqlen_q * h * kLatent, int64_t{h} * kLatent, kLatent};
  params.softmax_lse_ptr = lse.data(), params.partial_o = partial_o.data(), params.partial_lse = partial_lse.data();
  params.paged.block_table = table.data(), params.paged.block_table_stride = slots;
  params.paged.pages_per_sequence = slots, params.paged.num_pages = pages;
  params.paged.page_size = flash::FastDiv(c.page_size), params.heads = flash::FastDiv(h);
  params.seqlens_k = c.lengths.data(), params.leftpad_k = c.leftpad.empty() ? nullptr : c.leftpad.data();
  params.sinks_ptr = c.sinks ? sinks.data() : nullptr;
  params.b = batch, params.h = h, params.seqlen_q = static_cast<int>(seqlen_q);
  params.splits = c.splits, params.is_causal = c.causal;
  params.row_tiles = (params.seqlen_q * h + tile_rows - 1) / tile_rows;
  if (c.packed) {
    params.segments_q = segments.data(), params.key_ranges = key_ranges.data();
    params.row_tiles = flash::varlen_slot_count(total * h, batch, tile_rows);
  }
  params.softmax_scale_log2 = 1.44269504f / std::sqrt(static_cast<float>(kDim));
  const int blocks = (c.packed ? 1 : batch) * params.row_tiles * c.splits;
  gridDim.x = blocks;
  for (blockIdx.x = 0; blockIdx.x < blocks; ++blockIdx.x) launch(params);
  std::vector<bool> in_sequence(total);
  const auto compare_row = [&](int request, int first, int token, int head, const Expected& expected) {
    const int64_t row = (int64_t{first} + token) * h + head;
    const int64_t at =
        c.packed ? int64_t{head} * total + first + token : (int64_t{request} * h + head) * seqlen_q + token;
    compare(result_of(params, out, row, at), expected, request, token, head);
  };
  for (int i = 0; i < batch; ++i) {
    const bool takes_part = c.packed || (c.lengths[i] >= 0 && c.lengths[i] <= capacity && i != c.missing);
    const int begin = key_ranges[2 * i], all = takes_part ? begin + key_ranges[2 * i + 1] : begin;
    for (int token = 0; token < queries[i].count; ++token) {
      in_sequence[queries[i].first + token] = true;
      std::vector<const bf16*> keys;
      for (int key = begin; key < (c.causal ? all - queries[i].count + token + 1 : all); ++key)
        keys.push_back(row_of(i, key));
      for (int head = 0; head < h; ++head) {
        const bf16* const query = q.data() + ((int64_t{queries[i].first} + token) * h + head) * kDim;
        const double sink = c.sinks && takes_part ? sinks[head] : -INFINITY;
        compare_row(i, queries[i].first, token, head, attention(query, keys, 1.0 / std::sqrt(kDim), sink));
      }
    }
  }
  for (int row = 0; row < total; ++row) {
    for (int head = 0; head < h && !in_sequence[row]; ++head)
      compare_row(-1, row, 0, head, {std::vector<double>(kLatent), INFINITY});
  }
}

template <int kRows, int kStages>
void run_mma_sync(const Case& c) {
  using Config = MlaConfig<Dtype::kBf16, kRows, kStages>;
  static MlaStorage<Config> storage;
  run(c, kRows, [](const Flash_mla_params& params) {
    emulation::run_block(Config::kThreads, [&] { MlaTile<Config>(params, storage).run(); });
  });
}

// When products are computed, when copies land, and in which order threads run.
struct Timing {
  bool computes_late, lands_early, at_random;
};

template <bool kFp8 = false>
void run_wgmma(Case c, const Timing& timing) {
  c.capacity = 320;
  c.fp8 = kFp8;
  using Config = MlaWgmmaConfig<Dtype::kBf16, kFp8>;
  static MlaWgmmaStorage<Config> storage;
  emulation::computes_late = timing.computes_late;
  emulation::lands_early = timing.lands_early;
  emulation::at_random = timing.at_random;
  const int box_rows = std::gcd(c.page_size, Config::kKeys);
  run(c, Config::kRows, [box_rows](const Flash_mla_params& given) {
    MlaWgmmaLaunch launch{given, {}, {}};
    const Flash_mla_params& params = launch.params;
    if (!kFp8 && box_rows % 8 == 0) {
      const auto map = [&](const void* data, const flash::MatrixStrides& strides, int columns) {
        bf16* const first = const_cast<bf16*>(static_cast<const bf16*>(data));
        return CUtensorMap{first, strides.batch, strides.row, 0, given.paged.page_size.divisor, columns, box_rows};
      };
      launch.params.box_rows = box_rows;
      launch.latent_map = map(given.latent_ptr, given.latent_strides, kLatent);
      launch.rope_map = map(given.rope_ptr, given.rope_strides, kRope);
    }
    std::memset(static_cast<void*>(&storage), 0xff, sizeof(storage));
    flash::mla::init_barriers(storage, params);
    emulation::run_block(Config::kThreads, [&] {
      const MlaWork work(params, Config::kRows, Config::kKeys);
      const int warp = threadIdx.x / 32;
      if constexpr (kFp8) {
        if (warp < 4) MlaFp8Producer<Config>(params, storage, work, warp).run();
      } else {
        const bool has_boxes = launch.params.box_rows > 0;
        if (warp < 4 && has_boxes) end_producer<Config>(MlaProducer<Config>(launch, storage, work, warp).run());
        if (warp < 4 && !has_boxes) end_producer<Config>(MlaRowProducer<Config>(params, storage, work, warp).run());
      }
      if (warp / 4 == 1) MlaConsumer<Config, 0>(params, storage, work).run();
      if (warp / 4 == 2) MlaConsumer<Config, 1>(params, storage, work).run();
    });
  });
}

}  // namespace

int main() {
  run_mma_sync<16, 3>({{70, 0, -1, 128}, {1, 1, 1, 1}, 16, 1, 1, false, {}, false});
  run_mma_sync<16, 2>({{33, 200}, {3, 3}, 12, 16, 1, true, {}, true});
  run_mma_sync<32, 3>({{90, 31}, {4, 4}, 8, 7, 1, true, {20, 31}, true});
  run_mma_sync<32, 3>({{100, 5}, {2, 2}, 20, 64, 3, true, {}, false});
  run_mma_sync<16, 3>({{70, 60}, {1, 1}, 4, 16, 2, false, {3, 17}, false, false, 1});
  run_mma_sync<16, 3>({{70, 9, 0, 200}, {-2, 1, 0, 3, 5, -1}, 12, 16, 1, true, {}, true, true});
  run_mma_sync<32, 3>({{40, 100, 33}, {4, 1, 2}, 16, 1, 3, true, {4, 0, 33}, false, true});
  const Timing early{false, true, false}, late{true, false, false}, mixed{true, true, true}, random{false, false, true};
  for (const Timing& timing : {early, late, mixed, random}) {
    run_wgmma({{70, 0, -1, 330}, {1, 1, 1, 1}, 16, 1, 1, false, {}, false}, timing);
    run_wgmma({{300, 31}, {4, 4}, 20, 7, 1, true, {20, 31}, true}, timing);
  }
  for (const Timing& timing : {early, late, mixed}) {
    run_wgmma<true>({{70, 0, -1, 320}, {1, 1, 1, 1}, 16, 1, 1, false, {}, false}, timing);
    run_wgmma<true>({{300, 31}, {4, 4}, 20, 16, 2, true, {20, 31}, false}, timing);
  }
  run_wgmma({{280, 5}, {1, 1}, 70, 64, 2, true, {}, false}, mixed);
  run_wgmma({{320, 200}, {2, 2}, 3, 64, 1, true, {70, 0}, false}, late);
  run_wgmma({{320, 300}, {1, 1}, 3, 16, 1, false, {0, 9}, false, false, 0}, mixed);
  run_wgmma({{70, 60}, {1, 1}, 4, 16, 2, false, {3, 17}, false, false, 1}, random);
  run_wgmma({{70, 9, 0, 270}, {-2, 1, 0, 3, 5, -1}, 12, 16, 1, true, {}, true, true}, late);
  run_wgmma({{300, 190}, {2, 2}, 3, 1, 1, true, {5, 64}, false, false, 1}, mixed);
  run_wgmma({{150, 320}, {1, 1}, 3, 2, 2, false, {}, false, false, 0}, random);
  run_wgmma({{257, 1, 130}, {2, 0, 1}, 3, 3, 1, true, {}, false, true}, late);
  run_wgmma({{300, 150}, {1, 1}, 3, 64, 1, false, {}, false, false, -1, 0.02f}, mixed);
  // A page of the first, a middle or the last split, of the first half of a step, and one that the first tile of causal
  // queries does not see.
  for (const int key : {63, 150, 319}) {
    run_wgmma({{320, 300}, {1, 1}, 3, 1, 3, false, {}, false, false, 0, 0.0f, 320, false, key}, late);
    run_wgmma({{320, 300}, {1, 1}, 3, 16, 3, false, {}, false, false, 0, 0.0f, 320, false, key}, random);
    run_wgmma<true>({{320, 300}, {1, 1}, 3, 1, 3, false, {}, false, false, 0, 0.0f, 320, true, key}, mixed);
    run_mma_sync<16, 3>({{320, 300}, {1, 1}, 3, 1, 3, false, {}, false, false, 0, 0.0f, 320, false, key});
  }
  for (const int splits : {1, 7}) {
    run_wgmma({{300, 190}, {70, 70}, 3, 1, splits, true, {5, 64}, false, false, 1, 0.0f, 320, false, 125}, mixed);
    run_wgmma({{300, 190}, {70, 70}, 3, 16, splits, true, {}, false, false, 1, 0.0f, 320, false, 189}, early);
    run_wgmma<true>({{300, 190}, {70, 70}, 3, 1, splits, true, {}, false, false, 0, 0.0f, 320, true, 299}, late);
    run_mma_sync<32, 3>({{100, 90}, {40, 40}, 3, 1, splits, true, {}, false, false, 0, 0.0f, 128, false, 99});
  }
  check::that(emulation::bank_conflicts == 0, "bank conflicts", emulation::bank_conflicts);
  return check::report();
}
