// A GPU and this build's kernels for it, as plain numbers. Plain C++17.
#pragma once

#include <cstdint>

namespace flash {
namespace plan {

constexpr uint32_t kAllHeadDims = 0xffffffffu;
constexpr int kWgmmaCapability = 90;

struct Device {
  int capability = 0;  // 10 * major + minor
  int multiprocessors = 0;
  int smem_per_multiprocessor = 0;          // bytes
  int smem_per_block = 0;                   // bytes that one CTA may ask for
  uint32_t wgmma_head_dims = kAllHeadDims;  // bit i: this build has wgmma kernels of the i-th head dim of kFwdTiles
  bool has_margin = false;  // multiprocessors beyond those counted are left to others: kernels must not overlap
};

// The device with no more than `limit` bytes of shared memory for a thread block: a GPU of fewer bytes, which runs no
// wgmma kernels.
constexpr Device limited(Device device, int limit) {
  constexpr int kReserved = 1024;  // of a thread block's shared memory, by the driver
  if (limit >= device.smem_per_block) return device;
  device.smem_per_block = limit;
  if (device.smem_per_multiprocessor > limit + kReserved) device.smem_per_multiprocessor = limit + kReserved;
  device.wgmma_head_dims = 0;
  return device;
}

// The device with `sm_margin` fewer multiprocessors, but at least one: no persistent grid takes more of them.
constexpr Device with_margin(Device device, int64_t sm_margin) {
  const bool leaves_some = sm_margin < device.multiprocessors;
  device.multiprocessors = leaves_some ? device.multiprocessors - static_cast<int>(sm_margin) : 1;
  device.has_margin = sm_margin > 0;
  return device;
}

}  // namespace plan
}  // namespace flash
