"""`qv`: queries that meet the values. Scores q k^T + qv v^T are those of [q, qv] and [k, v]."""

from __future__ import annotations

import torch

from . import checks
from .scaling import EightBit


def check_qv(qv: torch.Tensor | None, q: torch.Tensor, v: torch.Tensor, call: EightBit | None) -> None:
    """Of operands that `check_operands` has passed."""
    if qv is not None:
        checks.require(call is None, "qv", "None with 8-bit tensors, descales or out_dtype", "a tensor")
        checks.check_like_query("qv", qv, q, checks.output_shape(q, v))
