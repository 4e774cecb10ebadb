"""Packed batches whose cu_seqlens are no sums, for sanitize_cases.py.

The bounds of the sequences are the running maximum, within the rows that exist: whatever cu_seqlens hold, every row of
every result is written and nothing outside is touched.
"""

from __future__ import annotations

import functools

import torch
from cases import Case
from harness import Problem
from reference import Varlen, sequence_bounds

TOTAL_Q, TOTAL_K = 170, 260
INT_MAX, INT_MIN = 2**31 - 1, -(2**31)
# Name -> cu_seqlens of the queries, of the keys.
CONTENTS = {
    "descending": ((170, 120, 60, 0), (260, 130, 7, 0)),
    "lengths": ((50, 20, 70, 30), (90, 10, 100, 60)),
    "random": ((13, 150, 40, 99, 160, 3), (200, 20, 140, 255, 0, 258)),
    "extremes": ((INT_MIN, 40, INT_MAX, -1, 170), (-1, 100, INT_MIN, INT_MAX, 261)),
    "step_back": ((0, 66, 20, 131, 170), (0, 129, 1, 200, 260)),
}
# Forced family, head dim, dtype, features; each meets all contents, deterministic in every second call.
VARIANTS = (
    ("mma_sync", 64, "float16", {"causal": True}),
    ("wgmma", 64, "bfloat16", {"window": (60, 20)}),
    ("wgmma:3", 128, "bfloat16", {"causal": True}),
    ("wgmma", 256, "float16", {}),
    ("split_kv", 32, "bfloat16", {}),
)


def make_problem(cu_q, cu_k, head_dim, dtype, features, device):
    case = Case(len(cu_q) - 1, 0, 0, 4, 2, head_dim, dtype, kind="packed", **features)
    bounds_q, bounds_k = sequence_bounds(cu_q, TOTAL_Q), sequence_bounds(cu_k, TOTAL_K)
    lens_q, lens_k = ([b - a for a, b in zip(x, x[1:])] for x in (bounds_q, bounds_k))
    like = {"device": device, "dtype": getattr(torch, dtype)}
    q = torch.randn(TOTAL_Q, case.nheads, head_dim, **like)
    k, v = (torch.randn(TOTAL_K, case.nheads_k, head_dim, **like) for _ in "kv")
    cu_seqlens = [torch.tensor(cu, dtype=torch.int32, device=device) for cu in (cu_q, cu_k)]
    layout = Varlen(bounds_q[:-1], lens_q, bounds_k[:-1], lens_k, TOTAL_Q)
    return Problem(case, q, k, v, None, None, layout, *cu_seqlens, TOTAL_Q, TOTAL_K)


def steps(device):
    """(name, forced family, function that makes the problem, deterministic) of every case."""
    index = 0
    for name, (cu_q, cu_k) in CONTENTS.items():
        for family, head_dim, dtype, features in VARIANTS:
            make = functools.partial(make_problem, cu_q, cu_k, head_dim, dtype, features, device)
            yield f"cu_seqlens {name}, {family} d{head_dim}", family, make, index % 2 == 1
            index += 1
