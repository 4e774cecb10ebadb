// The softcap of scores that do not pass it, as a polynomial. Plain C++17, checked by tests/cpp.
#pragma once

#include "common/host_device.h"

namespace flash {

// softcap log2(e) tanh(scale score / softcap) = score P(score^2) for score^2 <= bound, to a relative 1e-6.
struct SoftcapSeries {
  static constexpr int kTerms = 6;
  float coefficient[kTerms] = {};
  float bound = -1.0f;  // negative: for no score

  FLASH_HOST_DEVICE float cap(float score) const {
    const float square = score * score;
    float sum = coefficient[kTerms - 1];
#if defined(__CUDACC__)
#pragma unroll
#endif
    for (int i = kTerms - 2; i >= 0; --i) sum = sum * square + coefficient[i];
    return score * sum;
  }
};

// tanh(x) / x as a polynomial in x^2: least relative error for |x| <= 1. Of a ratio scale / softcap whose powers leave
// the range of floats there is no series.
inline SoftcapSeries softcap_series(float scale, float softcap) {
  constexpr double kTanh[SoftcapSeries::kTerms] = {0.999999414,  -0.333290424, 0.132814339,
                                                   -0.051605674, 0.0167431151, -0.00306706032};
  constexpr double kLog2e = 1.4426950408889634, kLeastRatio = 1.0 / 2048, kMostRatio = 2048;
  SoftcapSeries series;
  const double ratio = softcap > 0.0f ? static_cast<double>(scale) / softcap : 0.0, size = ratio < 0 ? -ratio : ratio;
  if (!(size >= kLeastRatio && size <= kMostRatio)) return series;
  double power = softcap * kLog2e * ratio;
  for (int i = 0; i < SoftcapSeries::kTerms; ++i, power *= ratio * ratio) {
    series.coefficient[i] = static_cast<float>(kTanh[i] * power);
  }
  series.bound = static_cast<float>(1.0 / (ratio * ratio));
  return series;
}

}  // namespace flash
