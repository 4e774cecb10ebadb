"""FlashAttention-3's module of this repository, and problems for it: calls, conventions, caches."""

from __future__ import annotations

import sys
from pathlib import Path

import torch
from cases import Case
from harness import check_forward, check_gradients
from reference import attention

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "flash_attn_3"))

import flash_attn_interface as fa3
from flash_attn_3 import _C  # noqa: F401

OPS = torch.ops.flash_attn_3


def as_flash_attn(lse):
    """The LSE in flash_attn's convention, after the check that it is in FlashAttention-3's."""
    assert not lse.isposinf().any()
    return lse.masked_fill(lse.isneginf(), float("inf"))


DENSE = Case(2, 70, 90, 4, 2, 64, "bfloat16", causal=True)
CASES = {
    "causal": DENSE,
    "masked rows": Case(2, 90, 70, 4, 2, 64, "bfloat16", causal=True),
    "window, softcap": Case(2, 70, 90, 4, 4, 32, "bfloat16", window=(20, 3), softcap=2.0),
    "padded head dim": Case(2, 30, 50, 4, 2, 36, "bfloat16", causal=True),
    "head dim of v": Case(1, 70, 90, 4, 2, 96, "bfloat16", head_dim_v=64),
    "sinks": Case(2, 70, 90, 4, 2, 64, "bfloat16", causal=True, sinks=True),
    "varlen": Case(4, 70, 90, 4, 2, 64, "bfloat16", kind="packed", causal=True),
    "varlen, rows of no sequence": Case(4, 70, 90, 4, 2, 64, "bfloat16", kind="padded", window=(9, 5)),
    "varlen, keys in use": Case(4, 70, 90, 4, 2, 64, "bfloat16", kind="seqused", causal=True),
}


def run(problem, **options):
    c = problem.case
    options = {"causal": c.causal, "window_size": c.window, "softcap": c.softcap, "return_attn_probs": True, **options}
    if problem.sinks is not None:
        options["s_aux"] = problem.sinks
    if problem.layout is None:
        return fa3.flash_attn_func(problem.q, problem.k, problem.v, **options)
    lengths = (problem.cu_seqlens_q, problem.cu_seqlens_k, problem.max_seqlen_q, problem.max_seqlen_k)
    return fa3.flash_attn_varlen_func(
        problem.q, problem.k, problem.v, *lengths, seqused_k=problem.seqused_k, **options
    )  # fmt: skip


def with_leaves(problem):
    for name, x in problem.inputs.items():
        setattr(problem, name, x.detach().requires_grad_())
    return list(problem.inputs.values())


def check_forward_and_gradients(problem, **options):
    """out and LSE of run(), checked, and so are the gradients through both."""
    leaves = with_leaves(problem)
    out, lse = run(problem, **options)
    dout, dlse = torch.randn_like(out), torch.randn_like(lse)
    grads = torch.autograd.grad((out, lse), leaves, (dout, dlse))
    for key, x in list(problem.inputs.items()):
        setattr(problem, key, x.detach())
    check_forward(problem, out.detach(), as_flash_attn(lse.detach()))
    check_gradients(problem, dout, grads, dlse=dlse)
    return out, lse


def cache_problem(device, value_dim=32, pages=9, page_size=16, head_dim=32, nheads_k=2):
    """Queries of three sequences, packed, and a cache in pages with random lengths and NaN beyond them."""
    lengths_q, lengths_k = [5, 1, 12], [30, 48, 20]
    q = torch.randn(sum(lengths_q), 4, head_dim, device=device, dtype=torch.bfloat16)
    k = torch.full((pages, page_size, nheads_k, head_dim), float("nan"), device=device, dtype=torch.bfloat16)
    v = torch.full((pages, page_size, nheads_k, value_dim), float("nan"), device=device, dtype=torch.bfloat16)
    table = torch.randperm(pages)[: 3 * 3].view(3, 3).int().to(device)
    for row, n in zip(table.long(), lengths_k):
        for x in (k, v):
            rows = torch.full((48, *x.shape[2:]), float("nan"), device=device, dtype=x.dtype)
            rows[:n] = torch.randn(n, *x.shape[2:], device=device, dtype=x.dtype)
            x[row] = rows.view(3, page_size, *x.shape[2:])
    cu = torch.tensor([0, 5, 6, 18], dtype=torch.int32, device=device)
    return q, k, v, table, cu, torch.tensor(lengths_k, dtype=torch.int32, device=device)


def by_sequence(q, k, v, table, cu, lengths, sinks=None):
    """out and LSE of each sequence alone in float64, and in bfloat16, with FlashAttention-3's -inf."""
    results = []
    for dtype in (torch.float64, torch.bfloat16):
        outs, lses = [], []
        for i, n in enumerate(lengths.tolist()):
            keys, values = (x[table[i].long()].flatten(0, 1)[None, :n] for x in (k, v))
            one = attention(q[None, cu[i] : cu[i + 1]], keys, values, causal=True, sinks=sinks, dtype=dtype)
            outs.append(one.out[0])
            lses.append(one.lse[0])
        results.append((torch.cat(outs), torch.cat(lses, 1)))
    return results
