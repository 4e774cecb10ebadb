"""lse_convention: the log-sum-exp as FlashAttention-2, FlashAttention-3 and FlashInfer return it."""

from __future__ import annotations

import math

import pytest
import torch

import flash_attn

INF = math.inf
HEADS, HEAD_DIM = 4, 32


def tensors(device, seqlen_q=20, seqlen_k=9, grad=False):
    """More queries than keys: under a causal mask the first rows see none."""
    dtype = torch.float32 if device == "cpu" else torch.bfloat16
    sizes = (seqlen_q, seqlen_k, seqlen_k)
    return [torch.randn(2, n, HEADS, HEAD_DIM, device=device, dtype=dtype, requires_grad=grad) for n in sizes]


def expected(lse, convention):
    """By the definitions, from FlashAttention-2's."""
    lse = lse.clone()
    if convention != "fa2":
        lse[lse == INF] = -INF
    return lse / math.log(2) if convention == "flashinfer" else lse


def dense(q, k, v, **options):
    return flash_attn.flash_attn_func(q, k, v, causal=True, return_attn_probs=True, **options)[1]


def packed(q, k, v, **options):
    cu_q, cu_k = (torch.arange(3, dtype=torch.int32, device=q.device) * x.shape[1] for x in (q, k))
    q, k, v = (x.flatten(0, 1) for x in (q, k, v))
    return flash_attn.flash_attn_varlen_func(
        q, k, v, cu_q, cu_k, 20, 9, causal=True, return_attn_probs=True, **options
    )[1]  # fmt: skip


def cached(q, k, v, **options):
    return flash_attn.flash_attn_with_kvcache(q, k, v, causal=True, return_softmax_lse=True, **options)[1]


@pytest.mark.parametrize("function", (dense, packed, cached))
@pytest.mark.parametrize("convention", ("fa2", "fa3", "flashinfer"))
def test_definitions(device, function, convention):
    inputs = tensors(device)
    lse = function(*inputs)
    assert (lse == INF).any() and (lse != INF).any()
    torch.testing.assert_close(function(*inputs, lse_convention=convention), expected(lse, convention))
    assert torch.equal(function(*inputs, lse_convention="fa2"), lse)


@pytest.mark.parametrize("convention", ("fa3", "flashinfer"))
def test_gradient(device, convention):
    """The derivative of the converted value; rows without keys have none."""
    inputs = tensors(device, grad=True)[:2]
    v = torch.zeros_like(inputs[1])
    lse, theirs = dense(*inputs, v), dense(*inputs, v, lse_convention=convention)
    weights = torch.randn_like(lse)
    factor = 1 / math.log(2) if convention == "flashinfer" else 1
    right = torch.autograd.grad(lse, inputs, weights * factor)
    for grad, other in zip(torch.autograd.grad(theirs, inputs, weights), right):
        torch.testing.assert_close(grad, other, atol=1e-5 if device == "cpu" else 2e-2, rtol=1e-4)
        assert grad.isfinite().all() and (grad != 0).any()


@pytest.mark.parametrize("convention", ("fa2", "fa3", "flashinfer"))
def test_combine_takes_and_gives_it(device, convention):
    q, k, v = tensors(device, seqlen_q=5, seqlen_k=30)
    whole, lse, _ = flash_attn.flash_attn_func(q, k, v, return_attn_probs=True, lse_convention=convention)
    options = {"return_attn_probs": True, "lse_convention": convention}
    parts = [flash_attn.flash_attn_func(q, k[:, part], v[:, part], **options) for part in (slice(12), slice(12, 30))]
    parts.append(flash_attn.flash_attn_func(q, k[:, :0], v[:, :0], **options))  # no keys: its output does not count
    outs = torch.stack([out.float() for out, *_ in parts])
    lses = torch.stack([lse.transpose(1, 2) for _, lse, _ in parts])
    out, combined = flash_attn.flash_attn_combine(outs, lses, lse_convention=convention)
    assert (lses[2] == (INF if convention == "fa2" else -INF)).all()
    torch.testing.assert_close(out, whole.float(), atol=1e-5 if device == "cpu" else 2e-2, rtol=1e-2)
    torch.testing.assert_close(combined, lse.transpose(1, 2), atol=1e-4, rtol=1e-4)
    _, none = flash_attn.flash_attn_combine(outs[2:], lses[2:], lse_convention=convention)
    assert torch.equal(none, lses[2])


def test_rows_of_no_sequence_and_nan(device):
    q, k, v = tensors(device)
    q[0, 15] = math.nan
    lse = dense(q, k, v, lse_convention="flashinfer")
    assert lse[0, :, 15].isnan().all() and not lse[1].isnan().any() and (lse[1, :, :11] == -INF).all()
    cu = torch.tensor([0, 5], dtype=torch.int32, device=device)
    _, lse, _ = flash_attn.flash_attn_varlen_func(
        q[1], k[1], v[1], cu, cu, 5, 5, return_attn_probs=True, lse_convention="fa3"
    )  # fmt: skip
    assert lse[:, :5].isfinite().all() and (lse[:, 5:] == -INF).all()


@pytest.mark.parametrize("value", ("base2", "", None, 2))
def test_other_names_are_rejected(device, value):
    for function in (dense, packed, cached):
        with pytest.raises(ValueError, match="lse_convention: expected one of 'fa2', 'fa3', 'flashinfer', got"):
            function(*tensors(device), lse_convention=value)
