"""Inputs of 8-bit attention, their dequantised values, and the error measure of their tests.

The reference is attention in float64 of the dequantised values, so that quantising itself is no error. The measure is
the relative root mean square, for a largest error says little where P has three bits of mantissa.
"""

from __future__ import annotations

import math

import pytest
import torch

E4M3, INT8 = torch.float8_e4m3fn, torch.int8


def nan_code(dtype):
    """The bits of NaN, or of the largest int8."""
    return torch.tensor(127 if dtype is INT8 else math.nan).to(dtype).view(torch.uint8).item()


NAN_CODE = nan_code(E4M3)
# Bounds of e4m3 P, of P in 16 bits, of V with a mean, of few keys or large logits.
PLAIN, WIDE_P, MEAN, PEAKED = 3.5e-2, 3e-3, 5e-3, 2e-2
LSE = 1e-3
PRODUCTS, PRODUCT_BITS = 32, 13  # that wgmma adds up at a time, and keeps below the largest of them


def relative_rmse(ours, expected):
    ours, expected = ours.double(), expected.double()
    return ((ours - expected).square().mean() / expected.square().mean()).sqrt().item()


def lse_error(ours, expected):
    """The largest error where both are finite; infinities must agree."""
    finite = expected.isfinite()
    assert torch.equal(ours.double()[~finite], expected.double()[~finite])
    return max((ours.double() - expected.double())[finite].abs().tolist(), default=0.0)


def products_lse(q, k, scale):
    """How far the tensor cores may put scores of e4m3 off, in nats; q and k dequantised (batch, seqlen, heads, d).

    wgmma cuts what it adds to 13 bits below the largest of it, 32 products and the sum so far: d errors, each between
    -cut and cut. Three standard deviations of their sum.
    """
    k = k.repeat_interleave(q.shape[-2] // k.shape[-2], -2)
    steps = zip(q.split(PRODUCTS, -1), k.split(PRODUCTS, -1))
    sums = torch.stack([torch.einsum("bqhd,bkhd->bqhk", *step) for step in steps]).cumsum(0).abs().max().item()
    products = (q.abs().amax((0, 1)) * k.abs().amax((0, 1))).max().item()
    cut = 2.0 ** (math.floor(math.log2(max(sums, products))) - PRODUCT_BITS)
    return math.sqrt(3 * q.shape[-1]) * cut * scale


def lse_bound(device, max_logit):
    """CUDA converts e4m3 queries to bf16 before some kernels: products with descales are rounded.

    That puts scores off by up to 2^-9 of their products' absolute values, which are taken as twice the largest score.
    """
    return LSE if device == "cpu" else max(1e-2, 2.0**-8 * max_logit.max().item())


def heads_first(descale, x):
    """A descale of one element, (heads,), (batch, heads), or of rows, as it broadcasts to x (.., heads, head_dim)."""
    if not isinstance(descale, torch.Tensor) or descale.numel() == 1:
        return descale
    if descale.dim() == 3:
        return descale[..., None] if x.dim() == 4 else descale.transpose(1, 2)
    return descale.unsqueeze(-1) if descale.dim() == 1 else descale[:, None, :, None]


def dequantized(x, descale):
    """stored value * descale in float64; x as it is where descale is None."""
    return x.double() if descale is None else x.double() * heads_first(descale, x)


def of_query_heads(descale, heads):
    """A descale of K/V heads for q of more heads."""
    if not isinstance(descale, torch.Tensor) or descale.dim() == 0 or descale.shape[-1] in (1, heads):
        return descale
    return descale.repeat_interleave(heads // descale.shape[-1], -1)


def set_nan(x, where):
    """NaN at rows of an 8-bit tensor, the largest value of int8."""
    x.view(torch.uint8)[where] = nan_code(x.dtype)


def decode(function, device, *args, **options):
    """A call over an 8-bit cache: expected to fail where there are no kernels for it, and nothing else."""
    try:
        return function(*args, **options)
    except NotImplementedError as error:
        if device == "cpu" or "no kernels for 8 bits" not in str(error):
            raise
        pytest.xfail("CUDA has no kernels for 8-bit caches yet")
