"""Limits of the kernels and of the CPU backend."""

MAX_HEAD_DIM = 512  # csrc/flash_attn/plan/tiles.h has the same: kMaxHeadDim
MAX_EIGHT_BIT_HEAD_DIM = 256  # of 8-bit k and v that CUDA kernels read; csrc/flash_attn/plan/kv_tiles.h: kMaxKv8HeadDim
