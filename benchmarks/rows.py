"""What is measured: the 36 cells of the shared table (tests/cases.py) and the rows beyond them."""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass

from shared import BENCH_CELLS, Case

GROUPS = ("cells", "gqa", "window", "varlen", "features")
HOST_CASE = Case(1, 128, 128, 16, 16, 64, "bfloat16")
MODE_FLOPS = {"fwd": 1.0, "bwd": 2.5, "fwd+bwd": 3.5}
QUICK_SEQLENS = (1024, 8192)

# 16 sequences of 128 to 4096 tokens, 28788 in all.
VARLEN_SEQLENS = (2245, 3638, 623, 2455, 472, 128, 351, 1467, 1689, 1637, 4096, 1958, 370, 2039, 2228, 3392)


@dataclass(frozen=True)
class Row:
    """One measured problem: a case, the group it is reported in, and the sequence lengths when they differ (varlen)."""

    group: str
    case: Case
    seqlens: tuple[int, ...] = ()

    @property
    def id(self):
        return self.case.id + (f"-{len(self.seqlens)}seqs{sum(self.seqlens)}" if self.seqlens else "")

    @property
    def label(self):
        case = self.case
        parts = [f"d{case.head_dim}", "causal" if case.causal else "full"]
        parts += [f"h{case.nheads}/{case.nheads_k}"] if case.nheads != case.nheads_k else []
        parts += [f"window {case.window[0]}"] if case.window[0] >= 0 else []
        parts += [f"softcap {case.softcap:g}"] if case.softcap else []
        parts += ["alibi"] if case.alibi != "none" else []
        parts += [f"dropout {case.dropout:g}"] if case.dropout else []
        parts += [f"{sum(self.seqlens)} tokens" if self.seqlens else f"b{case.batch} s{case.seqlen_q}"]
        return " ".join(parts)

    def flops(self, mode="fwd"):
        """4·h·d per visible (query, key) pair, ×2.5 for bwd, ×3.5 for both.

        Causal counts as half of the square (the convention), a window by its exact number of pairs.
        """
        case = self.case
        if self.seqlens:
            pairs = sum(n * n for n in self.seqlens) * (0.5 if case.causal else 1.0)
            forward = 4.0 * case.nheads * case.head_dim * pairs
        elif case.window != (-1, -1):
            forward = 4.0 * case.batch * case.nheads * case.head_dim * visible_pairs(case)
        else:
            forward = case.flops
        return forward * MODE_FLOPS[mode]


def visible_pairs(case):
    """Number of (query, key) pairs that the case's window (with causal) leaves visible in one head."""
    left, right = case.window
    if case.causal:
        right = min(right, 0) if right >= 0 else 0
    total = 0
    for i in range(case.seqlen_q):
        diagonal = i + case.seqlen_k - case.seqlen_q
        first = max(0, diagonal - left) if left >= 0 else 0
        last = min(case.seqlen_k - 1, diagonal + right) if right >= 0 else case.seqlen_k - 1
        total += max(0, last - first + 1)
    return total


def extra_rows():
    """GQA 32/8, causal windows, sequences of different lengths, and one row per feature of the forward."""
    bf16 = "bfloat16"
    feature = Case(4, 4096, 4096, 16, 16, 128, bf16, causal=True)
    longest = max(VARLEN_SEQLENS)
    rows = [
        Row("gqa", Case(8, 2048, 2048, 32, 8, 128, bf16, causal=True)),
        Row("gqa", Case(2, 8192, 8192, 32, 8, 128, bf16, causal=True)),
        Row("window", Case(2, 8192, 8192, 16, 16, 128, bf16, causal=True, window=(1024, -1))),
        Row("window", Case(1, 16384, 16384, 16, 16, 128, bf16, causal=True, window=(4096, -1))),
    ]
    rows += [
        Row("varlen", Case(16, longest, longest, 16, 16, 128, bf16, causal=causal, kind="packed"), VARLEN_SEQLENS)
        for causal in (False, True)
    ]
    variants = ({}, {"softcap": 30.0}, {"alibi": "heads"}, {"dropout": 0.1})
    return rows + [Row("features", dataclasses.replace(feature, **variant)) for variant in variants]


def scale_down(row):
    """The row at a size that a CPU computes in milliseconds: batch 1, 4 query heads, sequences 16 times shorter."""
    case = row.case
    ratio = case.nheads // case.nheads_k
    seqlens = tuple(max(1, n // 16) for n in row.seqlens)
    small = dataclasses.replace(
        case,
        batch=len(seqlens) or 1,
        nheads=4,
        nheads_k=4 // ratio,
        seqlen_q=case.seqlen_q // 16,
        seqlen_k=case.seqlen_k // 16,
        window=tuple(w // 16 if w >= 0 else w for w in case.window),
    )
    return Row(row.group, small, seqlens)


def select(groups, quick, device_type, dtype):
    """The rows to measure, in the order of the report."""
    rows = [Row("cells", case) for case in BENCH_CELLS] + extra_rows()
    rows = [row for row in rows if row.group in groups]
    if quick:
        rows = [row for row in rows if row.group != "cells" or row.case.seqlen_q in QUICK_SEQLENS]
    if device_type == "cpu":
        rows = [scale_down(row) for row in rows]
    return [dataclasses.replace(row, case=dataclasses.replace(row.case, dtype=dtype)) for row in rows]
