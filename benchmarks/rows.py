"""What is measured: the problems of the shared table (tests/cases.py), each with the way its calls are timed."""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass

from shared import BENCH_CELLS, BENCH_GROUPS, Case

GROUPS = ("cells", "dims", "gqa", "window", "varlen", "features", "deterministic", "small", "small_eager")
BACKWARD_GROUPS = ("deterministic",)
HOST_CASE = Case(1, 128, 128, 16, 16, 64, "bfloat16")
MODE_FLOPS = {"fwd": 1.0, "bwd": 2.5, "fwd+bwd": 3.5}
QUICK_SEQLENS = (1024, 8192)
THINNED_GROUPS = ("cells", "dims", "deterministic")


@dataclass(frozen=True)
class Row:
    """One measured problem: a case, the group it is reported in, and how its calls are timed.

    timing: "event" times single calls by device events, "graph" the replay of a CUDA graph of several calls (no host
    time at all), "eager" several calls from Python until the device is done, by the host's clock.
    """

    group: str
    case: Case
    timing: str = "event"

    @property
    def modes(self):
        """The modes that it is measured in."""
        return ("bwd",) if self.group in BACKWARD_GROUPS else tuple(MODE_FLOPS)

    @property
    def seqlens(self):
        return self.case.seqlens

    @property
    def id(self):
        return self.case.id + (f"-{self.timing}" if self.timing != "event" else "")

    @property
    def label(self):
        case = self.case
        parts = [f"d{case.head_dim}", "causal" if case.causal else "full"]
        parts += [f"h{case.nheads}/{case.nheads_k}"] if case.nheads != case.nheads_k else []
        parts += [f"h{case.nheads}"] if self.timing != "event" else []
        parts += [f"window {case.window[0]}"] if case.window[0] >= 0 else []
        parts += [f"softcap {case.softcap:g}"] if case.softcap else []
        parts += ["alibi"] if case.alibi != "none" else []
        parts += [f"dropout {case.dropout:g}"] if case.dropout else []
        length = f"s{case.seqlen_q}" if case.seqlen_q == case.seqlen_k else f"q{case.seqlen_q} k{case.seqlen_k}"
        parts += [f"{sum(case.seqlens)} tokens" if case.seqlens else f"b{case.batch} {length}"]
        parts += [self.timing] if self.timing != "event" else []
        return " ".join(parts)

    def flops(self, mode="fwd"):
        """4·h·d per visible (query, key) pair, ×2.5 for bwd, ×3.5 for both.

        Causal counts as half of the square (the convention), a window by its exact number of pairs.
        """
        case = self.case
        if case.seqlens:
            pairs = sum(n * n for n in case.seqlens) * (0.5 if case.causal else 1.0)
            forward = 4.0 * case.nheads * case.head_dim * pairs
        elif case.window != (-1, -1):
            forward = 4.0 * case.batch * case.nheads * case.head_dim * visible_pairs(case)
        else:
            forward = case.flops
        return forward * MODE_FLOPS[mode]


def windows(case):
    """(left, right) of the case with causal folded in; negative is unbounded."""
    left, right = case.window
    if case.causal:
        right = min(right, 0) if right >= 0 else 0
    return left, right


def visible_pairs(case):
    """Number of (query, key) pairs that the case's window (with causal) leaves visible in one head."""
    left, right = windows(case)
    total = 0
    for i in range(case.seqlen_q):
        diagonal = i + case.seqlen_k - case.seqlen_q
        first = max(0, diagonal - left) if left >= 0 else 0
        last = min(case.seqlen_k - 1, diagonal + right) if right >= 0 else case.seqlen_k - 1
        total += max(0, last - first + 1)
    return total


def all_rows():
    """Every row, in the order of the report. The small shapes are timed twice: with and without the host."""
    rows = [Row("cells", case) for case in BENCH_CELLS]
    rows += [Row(group, case) for group, cases in BENCH_GROUPS.items() if group != "small" for case in cases]
    rows += [Row("small", case, "graph") for case in BENCH_GROUPS["small"]]
    return rows + [Row("small_eager", case, "eager") for case in BENCH_GROUPS["small"]]


def scale_down(row):
    """The row at a size that a CPU computes in milliseconds: batch 1, 4 query heads, sequences 16 times shorter."""
    case = row.case
    ratio = case.nheads // case.nheads_k
    seqlens = tuple(max(1, n // 16) for n in case.seqlens)
    small = dataclasses.replace(
        case,
        batch=len(seqlens) or 1,
        nheads=4,
        nheads_k=4 // ratio,
        seqlen_q=max(1, case.seqlen_q // 16),
        seqlen_k=max(1, case.seqlen_k // 16),
        window=tuple(w // 16 if w >= 0 else w for w in case.window),
        seqlens=seqlens,
    )
    return dataclasses.replace(row, case=small)


def select(groups, quick, device_type, dtype):
    """The rows to measure, in the order of the report."""
    rows = [row for row in all_rows() if row.group in groups]
    if quick:
        rows = [row for row in rows if row.group not in THINNED_GROUPS or row.case.seqlen_q in QUICK_SEQLENS]
    if device_type == "cpu":
        rows = [row if row.timing == "eager" else scale_down(row) for row in rows if row.timing != "graph"]
    return [dataclasses.replace(row, case=dataclasses.replace(row.case, dtype=dtype)) for row in rows]
