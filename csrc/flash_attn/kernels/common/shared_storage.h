// Dynamic shared memory as a kernel's storage.
#pragma once

namespace flash {

// kPlanned: its bytes as the plan counts them.
template <class Storage, int kPlanned>
__device__ __forceinline__ Storage& shared_storage() {
  static_assert(sizeof(Storage) == kPlanned, "plan and kernel agree on the shared memory");
  extern __shared__ __align__(1024) char smem[];
  return *reinterpret_cast<Storage*>(smem);
}

}  // namespace flash
