"""What context parallelism asks of the kernels, for sanitize_cases.py: scores that begin at an origin, gradients
of keys added to float32 sums, sums of dq kept over calls, and calls of ranks as threads, whose parts are combined.
"""

from __future__ import annotations

import functools
import itertools

import torch
from cases import Case
from cp_harness import check_result, run_local, self_attention
from cp_kernel_harness import LENGTHS, Call, P, close
from dq_stage_harness import FEATURES as STAGE_FEATURES
from dq_stage_harness import Chunks
from harness import on_cpu

EXTRA_ROWS = 5  # of no sequence
FEATURES = {
    "alibi, window": {"slopes": True, "window": (100, 30)},
    "dropout": {"dropout": P},
    "both, causal": {"slopes": True, "dropout": P, "window": (-1, 0)},
}
# Heads of q and of k, head dims of q and of v.
SHAPES = (((4, 2), (64, 64)), ((3, 3), (128, 128)), ((2, 1), (40, 24)))
FAMILIES = ("wgmma", "mma_sync")
# Method, ranks, case; documents of a packed one have odd lengths, one of them none.
RANKS = (
    ("ring", 3, Case(1, 300, 300, 4, 2, 64, "bfloat16", causal=True)),
    ("ring", 2, Case(2, 150, 150, 2, 1, 128, "float16", window=(70, 0), sinks=True)),
    ("ring", 2, Case(1, 512, 512, 4, 2, 128, "bfloat16", causal=True)),  # whole tiles: one sum of dq
    ("ring", 5, Case(4, 0, 0, 2, 2, 64, "bfloat16", causal=True, kind="packed")),
    ("all_gather", 2, Case(1, 260, 260, 4, 2, 128, "bfloat16", causal=True, dropout=0.2)),
    ("all_gather", 3, Case(4, 0, 0, 4, 2, 64, "float16", causal=True, alibi="heads", kind="packed")),
    ("ulysses", 3, Case(1, 130, 130, 4, 2, 64, "bfloat16", causal=True, alibi="heads")),
)
DOCUMENTS = (130, 1, 200, 0)


def slopes_of(call, features):
    """(slopes, the other features)."""
    features = dict(features)
    wanted = features.pop("slopes", False)
    return torch.rand(len(LENGTHS), call.heads[0], device=call.device) * 0.02 if wanted else None, features


def check_origins(shape, features, is_packed, device):
    """Results and gradients against the reference's."""
    call = Call(device, is_packed, *shape)
    call.origins[1, 3] = 32  # bias within reach of all scores
    slopes, features = slopes_of(call, features)
    reference, their_slopes = call.reference(), None if slopes is None else slopes.cpu()
    out, lse, *_ = call.forward(slopes, **features)
    expected = reference.forward(their_slopes, **features)
    ours = (out, lse, *call.backward(out, lse, slopes, **features))
    theirs = (*expected[:2], *reference.backward(*expected[:2], their_slopes, **features))
    for name, a, b in zip(("out", "lse", "dq", "dk", "dv"), ours, theirs):
        close(a, b, name)


def check_sums(shape, features, is_packed, device):
    """Twice what a call adds; rows of no sequence stay."""
    call = Call(device, is_packed, *shape, extra_rows=EXTRA_ROWS if is_packed else 0)
    slopes, features = slopes_of(call, features)
    out, lse, *_ = call.forward(slopes, **features)
    _, *expected = call.backward(out, lse, slopes, **features)
    sums = [torch.zeros(x.shape, dtype=lse.dtype, device=device) for x in (call.k, call.v)]
    if is_packed:
        for x in sums:
            x[-EXTRA_ROWS:] = 7.0
    for _ in range(2):
        call.backward(out, lse, slopes, grads=(None, *sums), accumulate_dkv=True, **features)
    for name, ours, theirs in zip(("dk", "dv"), sums, expected):
        rows = slice(0, -EXTRA_ROWS if is_packed else None)
        close(ours[rows], 2 * theirs[rows].cpu().double(), name)
        assert not is_packed or (ours[-EXTRA_ROWS:] == 7.0).all(), f"{name}: rows of no sequence have changed"


def check_stages(shape, features, is_packed, deterministic, device):
    """Three chunks of keys, whose dq has one sum."""
    chunks = Chunks(device, is_packed, *shape, features)
    if not chunks.has_sum:
        return
    ours = chunks.in_stages((0, 64, 192), deterministic=deterministic)
    for name, a, b in zip(("dq", "dk", "dv"), ours, chunks.reference().backward()):
        close(a, b, name)


def check_ranks(method, ranks, case, deterministic, device):
    problem, weights = self_attention(case, device, DOCUMENTS)
    result = run_local(problem, weights, ranks, method=method, deterministic=deterministic)
    check_result(*map(on_cpu, (problem, weights, result)))


def steps(device):
    """(name, forced family, check) of every case."""
    for i, (family, (kind, features), shape) in enumerate(itertools.product(FAMILIES, FEATURES.items(), SHAPES)):
        packing = "packed" if i % 2 else "dense"
        for name, run_check in (("origins", check_origins), ("sums", check_sums)):
            told = f"cp {name}, {family} d{shape[1][0]} {kind}, {packing}"
            yield told, family, functools.partial(run_check, shape, features, i % 2 == 1, device)
    cases = itertools.product(FAMILIES, STAGE_FEATURES.items(), SHAPES)
    for i, (family, (kind, features), shape) in enumerate(cases):
        told = f"cp dq sum, {family} d{shape[1][0]} {kind}, {'packed' if i % 2 else 'dense'}"
        run_check = functools.partial(check_stages, shape, features, i % 2 == 1, i % 4 < 2, device)
        yield told, family, run_check
    for i, (method, ranks, case) in enumerate(RANKS):
        told = f"cp {method} of {ranks}, {case.id}"
        yield told, "", functools.partial(check_ranks, method, ranks, case, i % 2 == 1, device)
