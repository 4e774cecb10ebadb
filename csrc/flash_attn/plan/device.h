// A GPU, and what this build holds for it, as plain numbers. Plain C++17.
#pragma once

#include <cstdint>

namespace flash {
namespace plan {

constexpr uint32_t kAllHeadDims = 0xffffffffu;

struct Device {
  int capability = 0;  // 10 * major + minor
  int multiprocessors = 0;
  int smem_per_multiprocessor = 0;          // bytes
  int smem_per_block = 0;                   // bytes that one CTA may ask for
  uint32_t wgmma_head_dims = kAllHeadDims;  // bit i: this build has wgmma kernels of the i-th head dim of kFwdTiles
};

}  // namespace plan
}  // namespace flash
