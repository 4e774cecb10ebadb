"""FlashAttention-3's functions and operators with 8-bit tensors: what flash_attn computes, in their conventions."""

from __future__ import annotations

import pytest
import torch
from flash_attn_3_harness import OPS, fa3
from fp8_harness import E4M3, decode, relative_rmse

import flash_attn
from flash_attn.fp8 import quantize_qkv

B, SQ, SK, H, HK, D = 2, 20, 30, 4, 2, 32


def inputs(device, heads_k=HK, seqlen_k=SK):
    """(q, k, v), {descales of (batch, nheads_k)}: FlashAttention-3 has those of q by K/V head too."""
    shapes = ((B, SQ, H, D), (B, seqlen_k, heads_k, D), (B, seqlen_k, heads_k, D))
    x = quantize_qkv(*(torch.randn(shape, device=device) for shape in shapes))
    q_descale = x.q_descale.unflatten(-1, (heads_k, -1)).amax(-1)
    return (x.q, x.k, x.v), {"q_descale": q_descale, "k_descale": x.k_descale, "v_descale": x.v_descale}


def equal(ours, expected):
    out, lse = ours[:2]
    assert out.dtype == torch.bfloat16 and torch.equal(out, expected[0])
    assert torch.equal(lse, expected[1].masked_fill(expected[1].isposinf(), -float("inf")))


def test_dense(device):
    qkv, descales = inputs(device)
    expected = flash_attn.flash_attn_func(*qkv, causal=True, return_attn_probs=True, **descales)
    equal(fa3.flash_attn_func(*qkv, causal=True, return_attn_probs=True, **descales), expected)
    equal(OPS.fwd(*qkv, is_causal=True, **descales), expected)
    equal(fa3._flash_attn_forward(*qkv, causal=True, **descales), expected)
    out = torch.empty_like(expected[0])
    assert fa3.flash_attn_func(*qkv, causal=True, out=out, **descales) is out and torch.equal(out, expected[0])
    assert torch.equal(OPS.fwd(*qkv, out=out.zero_(), is_causal=True, **descales)[0], expected[0])
    half = torch.empty_like(out, dtype=torch.float16)
    fa3.flash_attn_func(*qkv, causal=True, out=half, **descales)
    assert torch.equal(half, flash_attn.flash_attn_func(*qkv, causal=True, out_dtype=torch.float16, **descales))


def test_packed_with_rows_in_use(device):
    (q, k, v), descales = inputs(device)
    cu_q, cu_k = (torch.tensor([0, n, 2 * n], dtype=torch.int32, device=device) for n in (SQ, SK))
    flat = [x.flatten(0, 1) for x in (q, k, v)]
    used = torch.tensor([7, 20], dtype=torch.int32, device=device)
    lengths = {"seqused_q": used, "seqused_k": used + 5}
    ours = fa3.flash_attn_varlen_func(
        *flat, cu_q, cu_k, SQ, SK, causal=True, return_attn_probs=True, **lengths, **descales
    )
    equal(OPS.fwd(*flat, cu_seqlens_q=cu_q, cu_seqlens_k=cu_k, is_causal=True, **lengths, **descales), ours)
    for i, n in enumerate(used.tolist()):
        single = {name: x[i : i + 1] for name, x in descales.items()}
        tensors = q[i : i + 1, :n], k[i : i + 1, : n + 5], v[i : i + 1, : n + 5]
        expected = flash_attn.flash_attn_func(*tensors, causal=True, **single)
        assert relative_rmse(ours[0][i * SQ : i * SQ + n], expected[0]) <= 1e-2  # one by copies in bf16
        assert (ours[0][i * SQ + n : (i + 1) * SQ] == 0).all()


def test_packed_heads(device):
    (q, k, v), descales = inputs(device, heads_k=H, seqlen_k=SQ)
    expected = flash_attn.flash_attn_func(q, k, v, return_attn_probs=True, **descales)
    stacked = torch.stack([x.view(torch.uint8) for x in (q, k, v)], 2)  # torch 2.4 stacks no e4m3
    concatenated = stacked.flatten(2, 3).view(q.dtype)
    equal(fa3.flash_attn_qkvpacked_func(stacked.view(q.dtype), return_attn_probs=True, **descales), expected)
    equal(fa3.flash_attn_qkvpacked_func(concatenated, num_heads_q=H, return_attn_probs=True, **descales), expected)


@pytest.mark.parametrize("q_dtype", (E4M3, torch.bfloat16))
def test_cache(device, q_dtype):
    (q, k, v), descales = inputs(device)
    q = q.to(q_dtype)
    lengths = torch.tensor([25, 11], dtype=torch.int32, device=device)
    new = {"k": k[:, :3].clone(), "v": v[:, :3].clone()}
    results = []
    for function, name in ((fa3.flash_attn_with_kvcache, "cache_seqlens"), (OPS.fwd, "seqused_k")):
        caches = k.clone(), v.clone()
        added = new if name == "cache_seqlens" else {f"{x}_new": y for x, y in new.items()}
        options = {"return_softmax_lse": True, "causal": True} if name == "cache_seqlens" else {"is_causal": True}
        out, lse, *_ = decode(function, device, q, *caches, **added, **{name: lengths}, **options, **descales)
        results.append((out, lse, *(x.view(torch.int8) for x in caches)))
        assert torch.equal(caches[0][1, 11:14].view(torch.int8), new["k"][1].view(torch.int8))
    for a, b in zip(*results):
        assert torch.equal(a, b)


def test_sinks_over_a_cache(device):
    (q, k, v), descales = inputs(device)
    q, descales = q.bfloat16() / 200, {name: descales[name] for name in ("k_descale", "v_descale")}
    options = {"cache_seqlens": torch.tensor([25, 0], dtype=torch.int32, device=device), "causal": True}
    options.update(return_softmax_lse=True, sinks=torch.linspace(-1, 2, H, device=device), **descales)
    ours = decode(fa3.flash_attn_with_kvcache, device, q, k, v, **options)
    expected = decode(flash_attn.flash_attn_with_kvcache, device, q, k, v, **options)
    assert torch.equal(ours[0], expected[0]) and torch.equal(ours[1][0], expected[1][0])
    plain = flash_attn.flash_attn_with_kvcache(q, k, v, **{**options, "sinks": None})
    assert not torch.equal(plain[0], expected[0])


def test_packed_queries_over_pages(device):
    (q, k, v), descales = inputs(device)
    cu_q = torch.tensor([0, 4, 24], dtype=torch.int32, device=device)
    lengths = torch.tensor([25, 30], dtype=torch.int32, device=device)
    out = fa3.flash_attn_with_kvcache(
        q.flatten(0, 1)[:24], k, v, cache_seqlens=lengths, cu_seqlens_q=cu_q, causal=True, **descales
    )
    single = {name: x[:1] for name, x in descales.items()}
    expected = flash_attn.flash_attn_func(q[:1, :4], k[:1, :25], v[:1, :25], causal=True, **single)
    torch.testing.assert_close(out[:4], expected[0], rtol=2e-2, atol=2e-3)


def test_descales_of_wider_tensors_have_no_effect(device):
    q = torch.randn(B, SQ, H, D, device=device, dtype=torch.bfloat16)
    descales = {f"{name}_descale": torch.full((B, H), 3.0, device=device) for name in "qkv"}
    assert torch.equal(fa3.flash_attn_func(q, q, q, **descales), fa3.flash_attn_func(q, q, q))


def test_no_backward(device):
    q = torch.randn(B, SQ, H, D, device=device, dtype=torch.bfloat16, requires_grad=True)
    k = torch.randn(B, SK, HK, D, device=device).to(E4M3)
    for function in (fa3.flash_attn_func, lambda *x: fa3._flash_attn_forward(*x)[0]):
        with pytest.raises(NotImplementedError, match="^k: expected at least 16 bits in training"):
            function(q, k, k).sum().backward()
