"""Limits that both backends have."""

MAX_HEAD_DIM = 256  # csrc/flash_attn/plan/tiles.h has the same: kMaxHeadDim
MAX_LATENT_DIM = 512  # of v in a call with qv
