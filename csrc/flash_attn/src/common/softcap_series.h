// The softcap of scores well below it, as a polynomial. Plain C++17, checked by tests/cpp.
#pragma once

#include "common/host_device.h"

namespace flash {

// softcap log2(e) tanh(scale score / softcap) = score P(score^2) for score^2 <= bound, to a relative 1.2e-6.
struct SoftcapSeries {
  static constexpr int kTerms = 3;
  static constexpr double kReach = 0.3;  // largest |tanh argument|
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
};

// tanh(x) / x as a polynomial in x^2: least relative error for |x| <= kReach. Of a ratio scale / softcap whose powers
// leave the range of floats there is no series.
inline SoftcapSeries softcap_series(float scale, float softcap) {
  constexpr double kTanh[SoftcapSeries::kTerms] = {0.999998839, -0.333100216, 0.12633946};
  constexpr double kLog2e = 1.4426950408889634, kLeastRatio = 1.0 / 2048, kMostRatio = 2048;
  SoftcapSeries series;
  const double ratio = softcap > 0.0f ? static_cast<double>(scale) / softcap : 0.0, size = ratio < 0 ? -ratio : ratio;
  if (!(size >= kLeastRatio && size <= kMostRatio)) return series;
  double power = softcap * kLog2e * ratio;
  for (int i = 0; i < SoftcapSeries::kTerms; ++i, power *= ratio * ratio) {
    series.coefficient[i] = static_cast<float>(kTanh[i] * power);
  }
  series.bound = static_cast<float>(SoftcapSeries::kReach * SoftcapSeries::kReach / (ratio * ratio));
  return series;
}

}  // namespace flash
