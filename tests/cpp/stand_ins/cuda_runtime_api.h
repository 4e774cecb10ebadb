// The names of the CUDA runtime that declarations need.
#pragma once

enum cudaError_t { cudaSuccess, cudaErrorInvalidValue };
using cudaStream_t = void*;
