"""Attention under masks as data and additive biases, forward and backward, against the float64 reference."""

from __future__ import annotations

import math
from dataclasses import dataclass, field

import pytest
import torch
from harness import exact_keep_scale
from reference import assert_accurate, assert_gradient_accurate, attention

from flash_attn import backends
from flash_attn.cpu.scores import ScoreOptions, ScoreRule
from flash_attn.masks import AttentionMask

pytestmark = pytest.mark.devices("cpu")  # until the kernels take masks
NAN, INF = float("nan"), math.inf
BATCH, HEADS, SQ, SK, DIM = 2, 6, 75, 530, 8  # two tiles of keys


def ints(*values, device):
    return torch.tensor(values, dtype=torch.int32, device=device)


def make_mask(kind: str, device) -> AttentionMask:
    """All leave some rows without keys and some keys without rows."""
    if kind == "documents":
        return AttentionMask.documents(ints(3, 40, 41, 70, device=device), SQ)
    if kind == "ranges":
        lo, hi, lo2, hi2 = torch.randint(-20, SK + 20, (4, BATCH, 2, SQ), device=device).sort(0).values
        rows = torch.arange(SQ, device=device) % 7 == 3
        return AttentionMask.query_ranges(lo, hi.where(~rows, 0), lo2, hi2.where(~rows, 0))
    if kind == "startend":
        bounds = torch.randint(0, SQ + 1, (BATCH, 3, SK, 4), device=device)
        bounds[:, :, 5::11] = ints(0, SQ, 0, 0, device=device)
        return AttentionMask.from_startend_row_indices(bounds, False, SQ)
    if kind == "padding":
        return AttentionMask.key_padding(ints([1] * 500 + [0] * (SK - 500), [0] * SK, device=device))
    if kind == "blocks":
        cnt, idx = torch.randint(0, 3, (1, 6, 5), device=device), torch.randint(0, 9, (1, 6, 5, 3), device=device)
        return AttentionMask.from_block_lists(cnt, idx, block_size=(16, 64), seqlen_q=SQ, seqlen_k=SK)
    seen = torch.rand(1, 3, SQ, SK, device=device) > 0.6
    seen[:, :, 7:60:9] = False
    seen[..., 100:103] = False
    bits = AttentionMask.from_tensor(seen)
    return bits if kind == "bits" else bits & make_mask("blocks", device) & make_mask("ranges", device)


BIASES = {"full": (BATCH, HEADS, SQ, SK), "heads": (1, HEADS, SQ, SK), "keys": (BATCH, 1, 1, SK), "one": (1, 1, 1, 1)}


@dataclass
class Call:
    """One call of the backend: what it takes beside q, k, v."""

    mask: str | None = None
    bias: str | None = None
    rel: int = 0  # R
    causal: bool = False
    window: tuple = (-1, -1)
    softcap: float = 0.0
    alibi: bool = False
    dropout: float = 0.0
    sinks: bool = False
    heads_k: int = 2
    batch_invariant: bool = False
    dtype: torch.dtype = torch.float64
    options: dict = field(default_factory=dict)

    def tensors(self, device) -> dict:
        """The options that are tensors, by the names of backend and reference."""
        found = {"alibi_slopes": torch.rand(BATCH, HEADS, device=device) * 0.2 if self.alibi else None}
        found["sinks"] = torch.randn(HEADS, device=device) if self.sinks else None
        found["attn_bias"] = torch.randn(BIASES[self.bias], device=device).to(self.dtype) if self.bias else None
        found["rel_bias"] = torch.randn(HEADS, 2 * self.rel + 1, device=device) if self.rel else None
        return found


CALLS = [
    Call("documents", causal=True, sinks=True),
    Call("ranges", window=(90, 200), softcap=2.0, alibi=True, dropout=0.3),
    Call("startend", bias="heads", sinks=True, softcap=3.0, heads_k=6),
    Call("padding", bias="keys", rel=5, causal=True, dropout=0.2),
    Call("blocks", alibi=True, rel=40, sinks=True, window=(400, -1), heads_k=1),
    Call("bits", bias="full", batch_invariant=True, dropout=0.1),
    Call("all", causal=True, softcap=2.0, bias="one", heads_k=3),
    Call(None, bias="full", alibi=True, causal=True, softcap=2.0),
    Call(None, rel=700, dropout=0.4, sinks=True),
    Call("ranges", bias="heads", rel=3, dtype=torch.bfloat16, causal=True),
    Call("bits", bias="full", dtype=torch.float16, sinks=True, batch_invariant=True),
    Call("documents", dtype=torch.float32, rel=9, window=(30, 30)),
]


def inputs(call, device, sizes=((BATCH, SQ, HEADS), (BATCH, SK, 0), (BATCH, SK, 0))):
    shapes = ((*size[:-1], size[-1] or call.heads_k, DIM) for size in sizes)
    return [torch.randn(shape, device=device).to(call.dtype) for shape in shapes]


def numbers(call):
    """(p_dropout, scale, causal, window, softcap) in the order of the backend."""
    return call.dropout, DIM**-0.5, call.causal, *call.window, call.softcap


def forward(call, device, q, k, v, mask, tensors):
    """out, LSE, S_dmask, rng_state, max_logit of the backend."""
    named = {name: x for name, x in tensors.items() if x is not None and name != "alibi_slopes"}
    return backends.get(device).fwd(
        q, k, v, None, tensors["alibi_slopes"], *numbers(call), True, None, return_max_logit=True,
        batch_invariant=call.batch_invariant, mask=None if mask is None else mask.factors, **named,
    )  # fmt: skip


def backward(call, device, dout, dlse, q, k, v, results, mask, tensors, **more):
    named = {name: x for name, x in tensors.items() if x is not None and name != "alibi_slopes"}
    out, lse, _, rng_state, _ = results
    return backends.get(device).bwd(
        dout, q, k, v, out, lse, None, None, None, tensors["alibi_slopes"], *numbers(call), False, None, rng_state,
        dlse=dlse, batch_invariant=call.batch_invariant, mask=None if mask is None else mask.factors, **named, **more,
    )  # fmt: skip


def expected(call, q, k, v, dense, tensors, keep, dout, dlse, dtype):
    """(Attention, gradients of q, k, v, sinks, attn_bias and rel_bias) by the definition, in a dtype."""
    leaves = {"q": q, "k": k, "v": v, **{n: x for n, x in tensors.items() if x is not None and n != "alibi_slopes"}}
    leaves = {name: x.detach().to(dtype).requires_grad_() for name, x in leaves.items()}
    result = attention(
        **leaves, causal=call.causal, window=call.window, softcap=call.softcap, alibi_slopes=tensors["alibi_slopes"],
        keep=keep, rp_dropout=exact_keep_scale(call.dropout) if call.dropout else 1.0, mask=dense, dtype=dtype,
    )  # fmt: skip
    lse_grad = dlse.to(dtype).masked_fill(result.lse.isinf(), 0.0)
    grads = torch.autograd.grad(
        (result.out, result.lse), list(leaves.values()), (dout.to(dtype), lse_grad), allow_unused=True
    )
    return result, dict(zip(leaves, grads))


def dense_of(mask, seqlen_k):
    dense = mask.to_dense(SQ, seqlen_k)
    return dense.repeat_interleave(HEADS // dense.shape[1], 1)


def check(call, device, q, k, v, mask, tensors):
    """One training step against the reference; returns results and gradients."""
    results = forward(call, device, q, k, v, mask, tensors)
    out, lse, s_dmask, _, max_logit = results
    keep = s_dmask[:, :, :SQ, : k.shape[1]] >= 0 if call.dropout else None
    dout, dlse = torch.randn_like(out), torch.randn_like(lse)
    grads = backward(call, device, dout, dlse, q, k, v, results, mask, tensors)
    dense = None if mask is None else dense_of(mask, k.shape[1])
    arguments = (call, q, k, v, dense, tensors, keep, dout, dlse)
    right, right_grads = plain, plain_grads = expected(*arguments, torch.float64)
    if call.dtype != torch.float64:
        plain, plain_grads = expected(*arguments, call.dtype)
    slack = 1e-10 if call.dtype == torch.float64 else 1e-5
    assert_accurate(out, right.out, plain.out, slack=slack)
    assert_accurate(lse, right.lse, plain.lse.to(lse.dtype), "lse", slack=slack)
    assert_accurate(max_logit, right.max_logit, plain.max_logit.to(lse.dtype), "max_logit", slack=slack)
    assert len(grads) == len(right_grads) + 1  # softmax_d
    for ours, name in zip([*grads[:3], *grads[4:]], right_grads):
        given = tensors.get(name)
        assert given is None or (ours.dtype == given.dtype and ours.shape == given.shape)
        assert_gradient_accurate(ours, right_grads[name], plain_grads[name], name)
        if call.dtype == torch.float64:
            assert_accurate(ours, right_grads[name], plain_grads[name].to(ours.dtype), name, slack=slack)
    return results, grads, dout, dlse


@pytest.mark.parametrize("call", CALLS, ids=lambda c: "-".join(f"{k}={v}" for k, v in vars(c).items() if v)[:60])
def test_masks_and_biases(device, call):
    """With the other features; NaN in what takes no part changes nothing."""
    mask = None if call.mask is None else make_mask(call.mask, device)
    q, k, v = inputs(call, device)
    if call.mask == "documents":
        k, v = k[:, :SQ].contiguous(), v[:, :SQ].contiguous()
    tensors = call.tensors(device)
    if tensors["attn_bias"] is not None and call.bias != "one":
        tensors["attn_bias"][..., 3::17] = -INF
    results, grads, dout, dlse = check(call, device, q, k, v, mask, tensors)
    rule = ScoreRule.create(
        ScoreOptions(1.0, 0.0, call.causal, *call.window, None, mask=mask and mask.factors,
                     attn_bias=tensors["attn_bias"]), BATCH, q)  # fmt: skip
    unused = rule.unused(BATCH, HEADS, k.shape[2], SQ, k.shape[1])
    if unused is None:
        return
    assert call.mask is None or unused.rows.any() or unused.keys.any()
    q, dout, out = (x.masked_fill(unused.rows.transpose(1, 2)[..., None], NAN) for x in (q, dout, results[0]))
    k, v = (x.masked_fill(unused.keys.transpose(1, 2)[..., None], NAN) for x in (k, v))
    again = forward(call, device, q, k, v, mask, tensors)
    if call.dropout == 0:
        for ours, before in zip((*again[:2], again[4]), (*results[:2], results[4])):
            assert torch.equal(ours, before)
    again = backward(call, device, dout, dlse, q, k, v, [out, *results[1:]], mask, tensors)
    for ours, before in zip(again, grads):
        assert torch.equal(ours, before)
