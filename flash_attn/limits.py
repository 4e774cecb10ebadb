"""Limits that both backends have."""

MAX_HEAD_DIM = 256  # of CUDA kernels; csrc/flash_attn/plan/tiles.h has the same: kMaxHeadDim
MAX_CPU_HEAD_DIM = 512  # also that of v in a call with qv


def max_head_dim(device_type: str) -> int:
    return MAX_CPU_HEAD_DIM if device_type == "cpu" else MAX_HEAD_DIM
