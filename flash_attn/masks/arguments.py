"""What calls make of their arguments `mask`, `attn_bias` and `rel_bias`; shapes are the backends' matter."""

from __future__ import annotations

import torch
from torch import Tensor

from .attention_mask import AttentionMask
from .checks import dtype_name, require
from .factors import MaskFactors

DEVICES = ("cpu", "cuda")  # whose backends take them
MAX_MASKED_HEAD_DIM = 256  # of the kernels with a mask on CUDA


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


def check_bias(attn_bias: Tensor | None) -> None:
    """A strided tensor of numbers, if there is one."""
    if attn_bias is not None:
        floating = attn_bias.dtype.is_floating_point
        require(floating, "attn_bias", "numbers (a bool tensor is a mask)", f"dtype {dtype_name(attn_bias.dtype)}")


def with_all_axes(attn_bias: Tensor, packed: bool) -> Tensor:
    """attn_bias as backends take it: (b | 1, h | 1, sq | 1, sk | 1), or packed (h | 1, total_q, max_seqlen_k)."""
    missing = (3 if packed else 4) - attn_bias.dim()
    return attn_bias[(None,) * missing] if missing > 0 else attn_bias
