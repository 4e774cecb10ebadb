// The softcap of scores well below it, as a polynomial. Plain C++17, checked by tests/cpp.
#pragma once

#include <cmath>

#include "core/host_device.h"

namespace flash {

// Two terms P(score^2) for small scores, with nodes of their own.
struct ShortSoftcapSeries {
  float coefficient[2] = {};

  FLASH_HOST_DEVICE float factor(float score) const { return coefficient[1] * (score * score) + coefficient[0]; }
};

// softcap log2(e) tanh(scale score / softcap) = score P(score^2) for score^2 <= bound, to a relative 1.2e-6. Up to
// short_bound the short series is as good as the LSE has to be: to kShortError of a logit.
struct SoftcapSeries {
  static constexpr int kTerms = 3;
  static constexpr double kReach = 0.3;  // largest |tanh argument|
  static constexpr double kShortError = 9e-5;
  // tanh(x) / x in powers of x^2: least relative error up to the reach.
  static constexpr double kTanh[kTerms] = {0.999998839, -0.333100216, 0.12633946};
  float coefficient[kTerms] = {};
  ShortSoftcapSeries short_series;
  float bound = -1.0f, short_bound = -1.0f;  // negative: for no score
  float inverse_steepness = 0.0f;            // 1 / (the steepest slope)^2, which is that of scores near 0

  // P(score^2).
  FLASH_HOST_DEVICE float factor(float score) const {
    const float square = score * score;
    float sum = coefficient[kTerms - 1];
#if defined(__CUDACC__)
#pragma unroll
#endif
    for (int i = kTerms - 2; i >= 0; --i) sum = sum * square + coefficient[i];
    return sum;
  }

  FLASH_HOST_DEVICE float cap(float score) const { return score * factor(score); }
};

// Of a ratio scale / softcap whose powers leave the range of floats there is no series.
inline SoftcapSeries softcap_series(float scale, float softcap) {
  constexpr double kLog2e = 1.4426950408889634, kLeastRatio = 1.0 / 2048, kMostRatio = 2048;
  SoftcapSeries series;
  const double ratio = softcap > 0.0f ? static_cast<double>(scale) / softcap : 0.0, size = std::fabs(ratio);
  if (!(size >= kLeastRatio && size <= kMostRatio)) return series;
  const double slope = softcap * kLog2e * ratio, square = ratio * ratio;
  double power = slope;
  for (int i = 0; i < SoftcapSeries::kTerms; ++i, power *= square) {
    series.coefficient[i] = static_cast<float>(SoftcapSeries::kTanh[i] * power);
  }
  series.bound = static_cast<float>(SoftcapSeries::kReach * SoftcapSeries::kReach / square);
  series.inverse_steepness = static_cast<float>(1.0 / (slope * slope));
  // tanh(x) / x as a line in u = x^2 through its values at two nodes leaves out the term 2/15 u^2, so that tanh(x) is
  // off by 2/15 x (u - near) (u - far): least over [-r, r] where that is the Chebyshev polynomial of degree 5, whose
  // nodes are r^2 (5 -+ sqrt(5)) / 8. Then it is r^5 / 120 at most.
  const double reach = std::fmin(std::pow(120.0 * SoftcapSeries::kShortError / softcap, 0.2), SoftcapSeries::kReach);
  const double near = reach * reach * (5.0 - std::sqrt(5.0)) / 8.0, far = reach * reach * (5.0 + std::sqrt(5.0)) / 8.0;
  const auto tanh_ratio = [](double u) { return std::tanh(std::sqrt(u)) / std::sqrt(u); };
  const double tilt = (tanh_ratio(far) - tanh_ratio(near)) / (far - near);
  series.short_series.coefficient[0] = static_cast<float>(slope * (tanh_ratio(near) - tilt * near));
  series.short_series.coefficient[1] = static_cast<float>(slope * square * tilt);
  series.short_bound = static_cast<float>(reach * reach / square);
  return series;
}

}  // namespace flash
