// Programmatic dependent launch: a kernel launched by launch_dependent() may start while the one before it in the
// stream still runs. Without that launch attribute, and before sm_90, both functions do nothing.
#pragma once

namespace flash {

// Waits until the preceding kernels have completed: only then may their results be read or their inputs overwritten.
__device__ __forceinline__ void wait_for_previous_kernel() {
#if __CUDA_ARCH__ >= 900
  asm volatile("griddepcontrol.wait;" ::: "memory");
#endif
}

// The next kernel may start as soon as all thread blocks have called this or exited.
__device__ __forceinline__ void allow_next_kernel() {
#if __CUDA_ARCH__ >= 900
  asm volatile("griddepcontrol.launch_dependents;");
#endif
}

}  // namespace flash
