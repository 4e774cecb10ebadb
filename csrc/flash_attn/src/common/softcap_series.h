// The softcap of scores well below it, as a polynomial. Plain C++17, checked by tests/cpp.
#pragma once

#include "common/host_device.h"

namespace flash {

// softcap log2(e) tanh(scale score / softcap) = score P(score^2) for score^2 <= bound, to a relative 1.2e-6. Where
// short_reaches(), two terms are as good as the LSE has to be: to a relative 1.1e-5 of a logit of at most 8.
struct SoftcapSeries {
  static constexpr int kTerms = 3;
  static constexpr double kReach = 0.3;  // largest |tanh argument|
  static constexpr double kShortReach = 0.16;
  static constexpr float kShortLogit = 8.0f;
  // tanh(x) / x in powers of x^2: least relative error up to the reach.
  static constexpr double kTanh[kTerms] = {0.999998839, -0.333100216, 0.12633946};
  static constexpr double kShortTanh[2] = {0.999989199, -0.329951442};
  float coefficient[kTerms] = {};
  float bound = -1.0f;  // negative: for no score

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

  // Two terms instead of P. Their coefficients stand in a fixed ratio to those of P.
  FLASH_HOST_DEVICE float short_factor(float score) const {
    constexpr float kFirst = static_cast<float>(kShortTanh[0] / kTanh[0]);
    constexpr float kSecond = static_cast<float>(kShortTanh[1] / kTanh[1]);
    return kSecond * coefficient[1] * (score * score) + kFirst * coefficient[0];
  }

  FLASH_HOST_DEVICE bool short_reaches(float square) const {
    constexpr float kShare = static_cast<float>(kShortReach * kShortReach / (kReach * kReach));
    constexpr float kLog2e = 1.44269504f, kMost = kShortLogit * kLog2e * kShortLogit * kLog2e;
    return square <= kShare * bound && square * (coefficient[0] * coefficient[0]) <= kMost;
  }
};

// Of a ratio scale / softcap whose powers leave the range of floats there is no series.
inline SoftcapSeries softcap_series(float scale, float softcap) {
  constexpr double kLog2e = 1.4426950408889634, kLeastRatio = 1.0 / 2048, kMostRatio = 2048;
  SoftcapSeries series;
  const double ratio = softcap > 0.0f ? static_cast<double>(scale) / softcap : 0.0, size = ratio < 0 ? -ratio : ratio;
  if (!(size >= kLeastRatio && size <= kMostRatio)) return series;
  double power = softcap * kLog2e * ratio;
  for (int i = 0; i < SoftcapSeries::kTerms; ++i, power *= ratio * ratio) {
    series.coefficient[i] = static_cast<float>(SoftcapSeries::kTanh[i] * power);
  }
  series.bound = static_cast<float>(SoftcapSeries::kReach * SoftcapSeries::kReach / (ratio * ratio));
  return series;
}

}  // namespace flash
