// FLASH_ATTN_TRACE=1: one line to stderr for each attention launch, with its plan.
#pragma once

#include <cstdio>

#include "api/environment.h"
#include "plan/explain.h"

namespace flash {

template <class... Plans>
void trace(const Plans&... plans) {
  if (CallEnvironment::is_traced()) std::fprintf(stderr, "flash_attn: %s\n", one_line(plan::explain(plans...)).c_str());
}

}  // namespace flash
