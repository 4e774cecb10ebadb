"""Quantising tensors to 8 bits for the attention functions."""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from flash_attn import eight_bit
from flash_attn.ops import arguments

_GRANULARITIES = ("tensor", "head", "token", "channel")


def quantize(
    x: Tensor, granularity: str = "tensor", dtype: torch.dtype = torch.float8_e4m3fn, *, power_of_two: bool = False
) -> tuple[Tensor, Tensor]:
    """(quantized, descale): x = quantized * descale up to rounding. Saturates, rounds to nearest even; no gradient.

    The error of an element is at most descale * max(2^-4 * |quantized|, 2^-10), of int8 descale / 2.

    Arguments:
        x: (batch, seqlen, heads, head_dim) or packed (total, heads, head_dim), floating point, any strides.
        granularity: the part of x with one descale, and the descale's shape, which the attention functions take:
            "tensor" (); "head" (batch, heads), packed (heads,); "token" (batch, seqlen, heads), packed
            (total, 1, heads), not for q, and heads first in memory, so that kernels read those of a head as one run;
            "channel" (batch, heads, head_dim), packed (heads, head_dim), for v with v_descale_axis="channel".
        dtype: torch.float8_e4m3fn or torch.int8 (-127 to 127).
        power_of_two: bool. Round descales up to powers of two: then quantized * descale is exact in half
            precision, within its exponents, and finite in x's dtype where x is: values that would be rounded beyond
            its largest one saturate (float16 at 61440, of int8 at 64512).

    Raises RuntimeError or TypeError that names the argument.
    """
    _check_input("x", x)
    if not isinstance(granularity, str) or granularity not in _GRANULARITIES:
        raise RuntimeError(f"granularity: expected one of {', '.join(_GRANULARITIES)}, got {granularity!r}")
    if not isinstance(dtype, torch.dtype) or dtype not in eight_bit.EIGHT_BIT:
        expected = " or ".join(map(str, eight_bit.EIGHT_BIT))
        raise RuntimeError(f"dtype: expected {expected}, got {dtype}")
    rows = 1 if x.dim() == 4 else 0
    axes = {"tensor": tuple(range(x.dim())), "head": (rows, -1), "token": (-1,), "channel": (rows,)}[granularity]
    power_of_two = arguments.flag("power_of_two", power_of_two)
    descale = eight_bit.descale_of(x, axes, dtype, power_of_two)
    quantized = eight_bit.encode(
        x, descale, dtype, eight_bit.largest_stored(descale, dtype, x.dtype) if power_of_two else None
    )
    if granularity == "tensor":
        return quantized, descale.reshape(())
    if granularity == "token":
        heads_first = descale.transpose(-3, -2).contiguous()  # a sector then holds 8 tokens of one head
        return quantized, heads_first.squeeze(-1).transpose(1, 2) if rows else heads_first.permute(1, 2, 0)
    return quantized, descale.squeeze(rows) if granularity == "channel" else descale.squeeze(-1).squeeze(rows)


def _check_input(name: str, x: Tensor) -> None:
    arguments.check_tensors((name,), (x,))
    if x.dim() not in (3, 4):
        raise RuntimeError(f"{name}: expected 3 or 4 dimensions (.., heads, head_dim), got {x.dim()}")
    if not x.is_floating_point() or x.element_size() == 1:
        expected = "a floating point dtype of at least 16 bits"
        raise RuntimeError(f"{name}: expected {expected}, got {eight_bit.named(x.dtype)}")


def _check_shapes(q: Tensor, k: Tensor, v: Tensor) -> None:
    for name, x in (("k", k), ("v", v)):
        if x.dim() != q.dim():
            raise RuntimeError(f"{name}: expected {q.dim()} dimensions, as q has, got {x.dim()}")
        if x.device != q.device:
            raise RuntimeError(f"{name}: expected a tensor on q's device ({q.device}), got one on {x.device}")
    heads, heads_k = q.shape[-2], k.shape[-2]
    if heads != heads_k and (heads_k == 0 or heads % heads_k != 0):
        raise RuntimeError(f"q: expected a head count divisible by that of k ({heads_k}), got {heads}")
    expected = [*q.shape[: q.dim() - 3], *k.shape[-3:-1], q.shape[-1]]
    if list(k.shape) != expected:
        raise RuntimeError(f"k: expected shape {expected}, got {list(k.shape)}")
    if v.shape[:-1] != k.shape[:-1]:
        raise RuntimeError(f"v: expected shape {[*k.shape[:-1], v.shape[-1]]}, got {list(v.shape)}")


class QuantizedQKV(NamedTuple):
    """The result of `quantize_qkv`: arguments of the attention functions, and the shift of the LSE by smoothing.

    lse_shift: None, or float32 like the LSE: `softmax_lse + softmax_scale * lse_shift` is that of unsmoothed keys.
    """

    q: Tensor
    k: Tensor
    v: Tensor
    q_descale: Tensor
    k_descale: Tensor
    v_descale: Tensor
    lse_shift: Tensor | None


def quantize_qkv(q: Tensor, k: Tensor, v: Tensor, smooth_k: bool = True, rotate: bool = False) -> QuantizedQKV:
    """q, k and v as e4m3 with a descale for each head (and batch entry), for attention of 8-bit q. No gradient.

    Arguments:
        q: (batch, seqlen_q, heads, head_dim) or packed (total_q, heads, head_dim), floating point.
        k, v: (batch, seqlen_k, heads_k, head_dim) or packed. All rows must be keys: none may be padding.
        smooth_k: bool. Subtract the mean over keys from k (of each batch entry, of all sequences when packed). It
            changes no probability, for it adds the same number to all scores of a row, and the LSE by lse_shift. Not
            for calls with softcap, which is no function of differences; max_logit changes too.
        rotate: bool. Multiply q and k by an orthogonal Hadamard matrix along head_dim (of the largest power of two that
            divides it, in blocks) with fixed signs: scores stay, and channels with outliers are spread over all.

    Raises RuntimeError or TypeError that names the argument.
    """
    for name, x in (("q", q), ("k", k), ("v", v)):
        _check_input(name, x)
    _check_shapes(q, k, v)
    heads, heads_k = q.shape[-2], k.shape[-2]
    queries, keys = q.detach().float(), k.detach().float()
    mean = None
    if arguments.flag("smooth_k", smooth_k):
        mean = keys.new_zeros(1)
        if k.numel():  # in float64: a sum of bfloat16 keys may overflow float32
            mean = keys.mean(q.dim() - 3, keepdim=True, dtype=torch.float64).float().nan_to_num(nan=0.0)
        keys = keys - mean
    if arguments.flag("rotate", rotate):
        queries, keys, mean = hadamard(queries), hadamard(keys), mean if mean is None else hadamard(mean)
    (q8, q_descale), (k8, k_descale), (v8, v_descale) = (quantize(x, "head") for x in (queries, keys, v))
    lse_shift = None
    if mean is not None:
        rounded = eight_bit.decode(q8, q_descale.unsqueeze(-1).unsqueeze(q.dim() - 3), torch.float32)
        by_query_head = mean.repeat_interleave(heads // max(heads_k, 1), -2) if mean.dim() > 1 else mean
        lse_shift = (rounded * by_query_head).sum(-1).transpose(-1, -2).contiguous()
    return QuantizedQKV(q8, k8, v8, q_descale, k_descale, v_descale, lse_shift)


def hadamard(x: Tensor) -> Tensor:
    """x (.., head_dim) times signs and an orthogonal Hadamard matrix, in blocks of the power of two in head_dim.

    The signs are those of Rudin and Shapiro, -1 to the number of pairs of adjacent ones in the index: without them
    equal channels would all go to one.

    Arguments:
        x: (..., head_dim), floating point. Sums are in float32 (float64 for float64).

    Returns: like x, of its dtype.
    """
    size = x.shape[-1] & -x.shape[-1]
    index = torch.arange(size, device=x.device)
    pairs = index & (index >> 1)
    parity = torch.zeros_like(pairs)
    for bit in range(size.bit_length()):
        parity ^= (pairs >> bit) & 1
    wide = x.to(torch.promote_types(x.dtype, torch.float32))
    signs = (1 - 2 * parity).to(wide.dtype) / size  # sums of x / size cannot overflow
    y = wide.unflatten(-1, (-1, size)) * signs
    width = 1
    while width < size:
        a, b = y.unflatten(-1, (-1, 2, width)).unbind(-2)
        y = torch.stack((a + b, a - b), -2).flatten(-3)
        width *= 2
    scaled: Tensor = y * size**0.5
    return scaled.flatten(-2).to(x.dtype)
