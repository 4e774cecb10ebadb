"""Limits that both backends have."""

MAX_HEAD_DIM = 256  # csrc/flash_attn/plan/tiles.h has the same: kMaxHeadDim
