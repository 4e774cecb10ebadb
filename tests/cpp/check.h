// The smallest test harness: count failures, print the first few, return them as the exit status.
#pragma once

#include <cstdint>
#include <iostream>
#include <sstream>
#include <string>

namespace check {

inline int64_t failures = 0;
inline int64_t checks = 0;

template <typename... Args>
void that(bool condition, const char* what, const Args&... context) {
  ++checks;
  if (condition) return;
  if (++failures > 20) return;
  std::ostringstream text;
  ((text << ' ' << context), ...);
  std::cout << "FAILED " << what << ':' << text.str() << '\n';
}

inline int report() {
  std::cout << checks << " checks, " << failures << " failures\n";
  return failures == 0 && checks > 0 ? 0 : 1;
}

}  // namespace check
