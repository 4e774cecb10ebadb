// The names of the CUDA runtime that declarations need.
#pragma once

enum cudaError_t { cudaSuccess };
using cudaStream_t = void*;
