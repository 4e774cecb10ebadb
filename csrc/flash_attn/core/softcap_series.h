// Softcap as a polynomial, for scores well below the cap. Plain C++17, checked by tests/cpp.
#pragma once

#include <cmath>

#include "core/host_device.h"

namespace flash {

// Two-term P(score^2) for small scores, interpolated at other nodes.
struct ShortSoftcapSeries {
  float coefficient[2] = {};

  FLASH_HOST_DEVICE float factor(float score) const { return coefficient[1] * (score * score) + coefficient[0]; }
};

// softcap log2(e) tanh(scale score / softcap) = score P(score^2) for score^2 <= bound, to a relative 1.2e-6. Up to
// short_bound the two-term series is as accurate as the LSE has to be: kShortError of a logit.
struct SoftcapSeries {
  static constexpr int kTerms = 3;
  static constexpr double kReach = 0.3;  // largest |tanh argument|
  static constexpr double kShortError = 9e-5;
  // tanh(x) / x in powers of x^2: minimax in relative error up to kReach.
  static constexpr double kTanh[kTerms] = {0.999998839, -0.333100216, 0.12633946};
  float coefficient[kTerms] = {};
  ShortSoftcapSeries short_series;
  float bound = -1.0f, short_bound = -1.0f;  // negative: the series holds for no score
  float inverse_steepness = 0.0f;            // 1 / slope^2 of the capped score at 0, where it is steepest

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

// Disabled (negative bounds) where powers of scale / softcap leave the range of floats.
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
  // tanh(x) / x as a line in u = x^2 through its values at two nodes drops the term 2/15 u^2: the error of tanh(x) is
  // 2/15 x (u - near) (u - far), least over [-r, r] when that is the Chebyshev polynomial of degree 5, with nodes r^2
  // (5 -+ sqrt(5)) / 8. Its maximum is then r^5 / 120.
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
