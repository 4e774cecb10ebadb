"""Accuracy of 8-bit attention against float64 on the dequantised inputs, where formats and orders of keys go wrong.

Plain inputs show neither an accumulator that loses bits nor probabilities that underflow next to a sink: V with a mean,
sinks, large and rising logits and outliers do.
"""

from __future__ import annotations

import math

import pytest
import torch
from fp8_harness import (
    E4M3,
    INT8,
    LSE,
    MEAN,
    PEAKED,
    PLAIN,
    PRODUCT_BITS,
    PRODUCTS,
    WIDE_P,
    dequantized,
    lse_error,
    products_lse,
    relative_rmse,
)  # fmt: skip
from reference import attention

from flash_attn import flash_attn_func
from flash_attn.fp8 import quantize

HALVES = (torch.float16, torch.bfloat16)


def inputs(kind, seqlen_k, device, seqlen_q=64, heads=2, heads_k=1, head_dim=128):
    """Float q, k, v of a kind: plain; mean: V around 0.5; sink12: four keys 12 nats above the rest with hardly a value;
    std3: logits of this deviation; outliers: one of a thousand values ten times as large; rising2: each block of 128
    keys 2 / 4 nats above the last one."""
    q = torch.randn(1, seqlen_q, heads, head_dim, device=device)
    k, v = (torch.randn(1, seqlen_k, heads_k, head_dim, device=device) for _ in "kv")
    name = kind.rstrip("0123456789")
    size = float(kind[len(name) :] or 0)
    if name == "mean":
        v += 0.5
    elif name == "std":
        q *= size
    elif name == "outliers":
        for x in (q, k, v):
            x += 10 * torch.randn_like(x) * (torch.rand_like(x) < 0.001)
    elif name in ("sink", "rising"):
        # The first channel alone makes the offsets: a query of 4 there, keys of offset * sqrt(d) / 4.
        steps = torch.arange(seqlen_k, device=device) // 128 * (size / 4)
        offsets = steps if name == "rising" else size * (torch.arange(seqlen_k, device=device) < 4)
        q[..., 0], k[..., 0] = 4.0, offsets[:, None] * math.sqrt(head_dim) / 4
        v += 0.5
        if name == "sink":
            v[:, :4] *= 0.02
    else:
        assert kind == "plain"
    return q, k, v


def quantized(x, dtype=E4M3):
    """Powers of two, so that what converts operands to 16 bits loses nothing."""
    return quantize(x, "head", dtype, power_of_two=True)


def check(q, k, v, bound, lse_bound=LSE, **options):
    """One call of (quantized, descale) or wide tensors -> the relative RMSE, which must be within the bound."""
    (q, q_descale), (k, k_descale), (v, v_descale) = (x if isinstance(x, tuple) else (x, None) for x in (q, k, v))
    wide_q, wide_k = dequantized(q, q_descale), dequantized(k, k_descale)
    exact = attention(wide_q, wide_k, dequantized(v, v_descale), **options)
    if q.is_cuda and q.dtype is k.dtype is v.dtype is E4M3:
        lse_bound = max(lse_bound, products_lse(wide_q, wide_k, q.shape[-1] ** -0.5))
    out, lse, _ = flash_attn_func(
        q, k, v, return_attn_probs=True, q_descale=q_descale, k_descale=k_descale, v_descale=v_descale, **options
    )
    assert out.dtype == (q.dtype if q.element_size() > 1 else v.dtype if v.element_size() > 1 else torch.bfloat16)
    assert lse_error(lse, exact.lse) <= lse_bound
    error = relative_rmse(out, exact.out)
    assert error <= bound, f"relative RMSE {error:.2e}, bound {bound:.1e}"


@pytest.mark.parametrize("causal", (False, True))
@pytest.mark.parametrize("head_dim", (64, 128, 256))
def test_plain(device, head_dim, causal):
    q, k, v = inputs("plain", 1024, device, seqlen_q=256, heads=4, heads_k=2, head_dim=head_dim)
    check(quantized(q), quantized(k), quantized(v), PLAIN, causal=causal)


KINDS = {
    "mean": MEAN, "sink6": PEAKED, "sink12": PEAKED, "sink14": PEAKED, "std2": PEAKED, "std3": PEAKED,
    "outliers": PLAIN, "rising3": PLAIN, "rising8": PLAIN, "rising12": PLAIN,
}  # fmt: skip


@pytest.mark.parametrize("kind", KINDS)
def test_hard_inputs(device, kind):
    seqlen_k = 16384 if kind.startswith(("mean", "sink")) else 4096
    q, k, v = inputs(kind, seqlen_k, device)
    if kind.startswith("std"):
        v += 0.5
    check(quantized(q), quantized(k), quantized(v), KINDS[kind])


def of_tensor_cores(q, k):
    """q @ k^T in float64 with what wgmma cuts off: a model of the chip, whose errors on sinks it has."""
    scores = torch.zeros(q.shape[-2], k.shape[-2], dtype=torch.float64)
    for q_step, k_step in zip(q.split(PRODUCTS, -1), k.split(PRODUCTS, -1)):
        terms = torch.cat([q_step[:, None] * k_step, scores[..., None]], -1)
        cut = 2.0 ** (terms.abs().amax(-1, keepdim=True).log2().floor() - PRODUCT_BITS)
        scores = ((terms / cut).trunc() * cut).sum(-1)
    return scores


@pytest.mark.devices("cpu")
@pytest.mark.parametrize("head_dim", (64, 128, 256))
@pytest.mark.parametrize("kind", ("sink6", "sink12", "rising8"))
def test_bound_of_products(device, kind, head_dim):
    """It holds for what tensor cores cut off, and is no more than ten times that where a sink decides."""
    q, k, _ = (dequantized(*quantized(x)) for x in inputs(kind, 512, device, heads=1, head_dim=head_dim))
    scale = head_dim**-0.5
    bound = products_lse(q, k, scale)
    q, k = q[0, :, 0], k[0, :, 0]
    exact, cut = (torch.logsumexp(scores * scale, -1) for scores in (q @ k.T, of_tensor_cores(q, k)))
    assert lse_error(cut, exact) < bound
    if kind == "sink12":
        assert bound < 10 * lse_error(cut, exact)


@pytest.mark.devices("cuda")
@pytest.mark.parametrize("kind", ("mean", "sink12"))
def test_128k_keys(device, kind):
    q, k, v = inputs(kind, 131072, device)
    check(quantized(q), quantized(k), quantized(v), KINDS[kind])


@pytest.mark.parametrize("kind", ("plain", "mean", "sink12", "std2"))
@pytest.mark.parametrize("half", HALVES)
def test_hybrid_of_8_bit_scores_and_16_bit_values(device, kind, half):
    q, k, v = inputs(kind, 4096, device)
    check(quantized(q), quantized(k), v.to(half), WIDE_P)


@pytest.mark.parametrize("kind", ("plain", "mean", "sink12", "std2"))
@pytest.mark.parametrize("stored", (E4M3, INT8))
@pytest.mark.parametrize("half", HALVES)
def test_16_bit_queries_over_8_bit_keys(device, kind, stored, half):
    q, k, v = inputs(kind, 4096, device)
    check(q.to(half), quantized(k, stored), quantized(v, stored), WIDE_P)


def test_int8_by_token_is_the_more_accurate_storage(device):
    """Of the unquantised inputs: the reason to offer int8."""
    q, k, v = inputs("plain", 2048, device)
    exact = attention(q.half(), k, v).out
    errors = []
    for stored in (E4M3, INT8):
        (k8, k_descale), (v8, v_descale) = (quantize(x, "token", stored) for x in (k, v))
        errors.append(relative_rmse(flash_attn_func(q.half(), k8, v8, k_descale=k_descale, v_descale=v_descale), exact))
    assert errors[1] < 1.5e-2 < 3 * errors[1] < errors[0] < 6e-2
