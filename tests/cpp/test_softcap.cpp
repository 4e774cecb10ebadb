// The polynomial of the softcap against tanh, over its range and for many ratios of scale and cap.
#include <cmath>
#include <initializer_list>

#include "check.h"
#include "core/softcap_series.h"

namespace {

constexpr double kLog2e = 1.4426950408889634;

void check_range(float scale, float softcap) {
  const flash::SoftcapSeries series = flash::softcap_series(scale, softcap);
  const double ratio = static_cast<double>(scale) / softcap;
  check::that(series.bound > 0.0f, "there is a series", scale, softcap);
  const double reach = flash::SoftcapSeries::kReach;
  check::that(std::fabs(series.bound * ratio * ratio / (reach * reach) - 1.0) < 1e-6, "its range", scale, softcap);
  check::that(series.short_bound > 0.0f && series.short_bound <= series.bound, "two terms reach no further", scale,
              softcap);
  const double short_square = series.short_bound * ratio * ratio;  // of the tanh argument
  double most_error = 0.0;                                         // of two terms
  for (int i = -1000; i <= 1000; ++i) {
    const float score = static_cast<float>(i / 1000.0 * reach / ratio);
    if (score * score > series.bound) continue;
    const double exact = softcap * kLog2e * std::tanh(score * ratio);
    check::that(std::fabs(series.cap(score) - exact) <= 1.4e-6 * std::fabs(exact), "relative error", scale, softcap, i,
                series.cap(score), exact);
    if (score * score > series.short_bound) continue;
    const double short_cap = static_cast<double>(score) * series.short_series.factor(score);
    check::that(std::fabs(short_cap - exact) <= 1e-4 * kLog2e, "error of two terms", scale, softcap, i, short_cap,
                exact);
    check::that(std::fabs(short_cap - exact) <= (short_square * short_square / 24 + 4e-7) * std::fabs(exact),
                "its relative error", scale, softcap, i, short_cap, exact);
    most_error = std::fmax(most_error, std::fabs(short_cap - exact));
    check::that(std::fabs(score) <= std::fabs(exact) * std::sqrt(series.inverse_steepness) * 1.04, "steepest near 0",
                scale, softcap, i);
    check::that(std::fabs(exact) * std::sqrt(series.inverse_steepness) <= std::fabs(score) * 1.000001,
                "nowhere steeper", scale, softcap, i);
  }
  // Two terms reach as far as their error lets them.
  if (series.short_bound < series.bound) check::that(most_error > 0.8e-4 * kLog2e, "reach", scale, softcap, most_error);
}

void check_none(float scale, float softcap) {
  check::that(flash::softcap_series(scale, softcap).bound < 0.0f, "there is no series", scale, softcap);
}

}  // namespace

int main() {
  for (float scale : {1.0f, 0.125f, 0.0883883f, 0.0625f, -0.0883883f, 3.0f}) {
    for (float softcap : {1.0f, 12.0f, 15.0f, 30.0f, 50.0f, 0.01f}) check_range(scale, softcap);
  }
  check_range(2048.0f, 1.0f);
  check_range(1.0f, 2048.0f);
  for (float softcap : {0.0f, 1e6f, 1e-8f}) check_none(1.0f, softcap);
  check_none(0.0f, 30.0f);
  return check::report();
}
