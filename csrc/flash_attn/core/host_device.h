// Host/device qualifier of the pure arithmetic headers, so that plain g++ can compile and brute-force them.
#pragma once

#if defined(__CUDACC__)
#define FLASH_HOST_DEVICE __host__ __device__ __forceinline__
#else
#define FLASH_HOST_DEVICE inline
#endif
