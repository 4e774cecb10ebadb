// Host/device qualifier of the headers in core/, so that a host compiler can build them and tests/cpp brute-force them.
#pragma once

#if defined(__CUDACC__)
#define FLASH_HOST_DEVICE __host__ __device__ __forceinline__
#else
#define FLASH_HOST_DEVICE inline
#endif
