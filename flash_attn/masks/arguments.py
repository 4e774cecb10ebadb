"""What calls make of their arguments `mask`, `attn_bias` and `rel_bias`; shapes are the backends' matter."""

from __future__ import annotations

import torch
from torch import Tensor

from .attention_mask import AttentionMask
from .checks import dtype_name, require
from .factors import MaskFactors

DEVICES = ("cpu",)  # whose backends take all three


def mask_factors(
    mask: AttentionMask | Tensor | None, packed: bool = False, seqlen_q: int | None = None
) -> MaskFactors | None:
    """The normal form of an AttentionMask, or of a bool tensor as SDPA has it. seqlen_q: that of the call (dense)."""
    if mask is None:
        return None
    if isinstance(mask, AttentionMask):
        return mask.factors
    if not isinstance(mask, Tensor):
        raise TypeError(f"mask: expected an AttentionMask or a bool Tensor, got {type(mask).__name__}")
    expected = "an AttentionMask or dtype bool; numbers are an attn_bias"
    require(mask.dtype == torch.bool, "mask", expected, f"dtype {dtype_name(mask.dtype)}")
    return AttentionMask.from_tensor(mask, seqlen_q, packed=packed).factors


def bias_tensor(attn_bias: Tensor | None, packed: bool = False) -> Tensor | None:
    """attn_bias with all axes, (b | 1, h | 1, sq | 1, sk | 1) or packed (h | 1, total_q, max_seqlen_k), of which
    expanded ones have size 1, so that backends sum along them. A view, through which autograd goes on.
    """
    if attn_bias is None:
        return None
    if not isinstance(attn_bias, Tensor):
        raise TypeError(f"attn_bias: expected a Tensor, got {type(attn_bias).__name__}")
    floating = attn_bias.dtype.is_floating_point
    require(floating, "attn_bias", "numbers (a bool tensor is a mask)", f"dtype {dtype_name(attn_bias.dtype)}")
    if packed:
        return attn_bias[(None,) * (3 - attn_bias.dim())]
    bias = attn_bias[(None,) * (4 - attn_bias.dim())]
    for axis, (size, stride) in enumerate(zip(bias.shape, bias.stride())):
        if size > 1 and stride == 0:
            bias = bias.narrow(axis, 0, 1)
    return bias
