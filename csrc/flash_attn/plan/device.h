// A GPU as plain numbers. Plain C++17.
#pragma once

namespace flash {
namespace plan {

struct Device {
  int capability = 0;  // 10 * major + minor
  int multiprocessors = 0;
  int smem_per_multiprocessor = 0;  // bytes
  int smem_per_block = 0;           // bytes that one thread block may ask for
};

}  // namespace plan
}  // namespace flash
