"""The conventions in which a log-sum-exp is returned: FlashAttention-2's, FlashAttention-3's and FlashInfer's."""

from __future__ import annotations

import math

from torch import Tensor

from flash_attn.ops import arguments

CONVENTIONS = ("fa2", "fa3", "flashinfer")


def check_convention(value: str) -> str:
    """value, if it names a convention."""
    if not isinstance(value, str) or value not in CONVENTIONS:
        expected = ", ".join(map(repr, CONVENTIONS))
        raise ValueError(f"lse_convention: expected one of {expected}, got {arguments.shown(value)}")
    return value


def mark_masked_rows(lse: Tensor) -> Tensor:
    """lse with -inf in fully masked rows, where the backends have +inf; NaN stays. Differentiable."""
    return lse.nan_to_num(nan=math.nan, posinf=-math.inf, neginf=-math.inf)


def converted(lse: Tensor, convention: str) -> Tensor:
    """The backends' lse in a convention; differentiable."""
    if convention == "fa2":
        return lse
    lse = mark_masked_rows(lse)
    return lse * math.log2(math.e) if convention == "flashinfer" else lse


def natural(lse: Tensor, convention: str) -> Tensor:
    """lse of a convention as a natural logarithm, in which an infinity of either sign is a fully masked row."""
    return lse * math.log(2) if convention == "flashinfer" else lse
