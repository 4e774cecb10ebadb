"""Checks and normal forms of the arguments `mask`, `attn_bias` and `rel_bias`; the backends check shapes."""

from __future__ import annotations

import torch
from torch import Tensor

from flash_attn.ops import conditions, context

from .attention_mask import AttentionMask
from .checks import dtype_name, require
from .factors import WORD_BITS, MaskFactors, pack_bits

DEVICES = ("cpu", "cuda")  # whose backends take them


def mask_factors(
    mask: AttentionMask | Tensor | None, packed: bool = False, seqlen_q: int | None = None, seqlen_k: int | None = None
) -> MaskFactors | None:
    """The normal form of an AttentionMask, or of a bool tensor as SDPA has it.

    seqlen_q, seqlen_k: those of the call; packed: None and max_seqlen_k.
    """
    if mask is None:
        return None
    if isinstance(mask, Tensor):
        expected = "an AttentionMask or dtype bool; numbers are an attn_bias"
        require(mask.dtype == torch.bool, "mask", expected, f"dtype {dtype_name(mask.dtype)}")
        if packed and mask.dim() == 3:
            _check_length("max_seqlen_k", mask.shape[2], seqlen_k)
        mask = AttentionMask.from_tensor(mask, seqlen_q, packed=packed)
    elif not isinstance(mask, AttentionMask):
        raise TypeError(f"mask: expected an AttentionMask or a bool Tensor, got {type(mask).__name__}")
    if not packed:
        _check_length("seqlen_q", mask.seqlen_q, seqlen_q)
        _check_length("seqlen_k", mask.seqlen_k, seqlen_k)
    return mask._factors


def _check_length(name: str, of_mask: int | None, of_call: int | None) -> None:
    """Words of bits and blocks have the same shape for many lengths."""
    if not (of_mask is None or of_call is None or conditions.holds(of_mask == of_call)):
        require(False, "mask", f"a mask for {name} {of_call}", f"one for {of_mask}")


def score_columns(mask: AttentionMask | Tensor | None, attn_bias: Tensor | None) -> int | None:
    """The most keys of a sequence that a packed mask of bits or bias has columns for; None without both."""
    if attn_bias is not None:
        return attn_bias.shape[-1] if attn_bias.dim() else None
    if isinstance(mask, Tensor):
        return mask.shape[-1] if mask.dim() else None
    bits = None if mask is None else mask._factors.bits
    return None if bits is None else bits.shape[-1] * WORD_BITS


def mask_bits(bits: Tensor, keys: int | None, seqlen_q: int) -> tuple[Tensor, int]:
    """(int32 words (1 or b, h_m, sq, ceil(keys / 32)), keys) of a mask of the last keys, from any of its forms."""
    if not isinstance(bits, Tensor):
        raise TypeError(f"mask_bits: expected a Tensor, got {type(bits).__name__}")
    require(bits.dim() in (3, 4), "mask_bits", "shape (b, sq, n) or (b, h_m, sq, n)", list(bits.shape))
    dtypes = (torch.bool, torch.int32, torch.uint8)
    require(bits.dtype in dtypes, "mask_bits", "dtype bool, int32 or uint8", dtype_name(bits.dtype))
    bits = bits[:, None] if bits.dim() == 3 else bits
    if bits.dtype == torch.bool:
        columns = bits.shape[-1]
        require(keys in (None, columns), "mask_keys", f"None or {columns}, as mask_bits has", keys)
        return pack_bits(bits), columns
    if bits.dtype == torch.uint8:
        bits = torch.nn.functional.pad(bits, (0, -bits.shape[-1] % 4)).contiguous()
        if context.is_tracing():  # which cannot record a view of another dtype
            words = torch.unflatten(bits, -1, (bits.shape[-1] // 4, 4)).int()
            bits = (words << torch.arange(0, 32, 8, device=bits.device)).sum(-1).to(torch.int32)
        else:  # rows of no bytes have no distance of words
            bits = bits.view(torch.int32) if bits.shape[-1] else bits.int()
    return bits.contiguous(), seqlen_q if keys is None else keys


def check_bias(attn_bias: Tensor | None) -> None:
    """A strided tensor of numbers, if there is one."""
    if attn_bias is not None:
        floating = attn_bias.dtype.is_floating_point
        require(floating, "attn_bias", "numbers (a bool tensor is a mask)", f"dtype {dtype_name(attn_bias.dtype)}")


def with_all_axes(attn_bias: Tensor, packed: bool) -> Tensor:
    """attn_bias as backends take it: (b | 1, h | 1, sq | 1, sk | 1), or packed (h | 1, total_q, max_seqlen_k)."""
    missing = (3 if packed else 4) - attn_bias.dim()
    return attn_bias[(None,) * missing] if missing > 0 else attn_bias
