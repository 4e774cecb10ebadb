"""What is measured: the problems of the shared table (tests/cases.py), each with the way its calls are timed."""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass

from shared import BENCH_CELLS, BENCH_GROUPS, Case, cache_groups

GROUPS = (
    "cells", "dims", "gqa", "window", "varlen", "varlen_equal", "features", "value_dim", "deterministic", "small",
    "one_wave", "small_eager",
)  # fmt: skip
GRIDS = ("cells", "b4h8")  # cells: equal tokens in every row; b4h8: equal batch size
BACKWARD_GROUPS, FORWARD_GROUPS = ("deterministic",), ("fp8", "tangents")
GRAPH_GROUPS = ("small", "one_wave", "fp8")  # timed without the host
# How the rows over a KV cache are timed; they are measured only on request.
CACHE_TIMING = {
    "decode": "replay",
    "decode_layers": "graph",
    "decode_eager": "eager",
    "decode_tokens": "replay",
    "decode_append": "replay",
    "decode_invariant": "replay",
    "decode_8bit": "graph",
    "decode_features": "replay",
    "decode_mla": "graph",
    "prefill_cache": "event",
}
ALL_GROUPS = GROUPS + GRIDS[1:] + FORWARD_GROUPS + tuple(CACHE_TIMING)
HOST_CASE = Case(1, 128, 128, 16, 16, 64, "bfloat16")
CACHE_HOST_CASE = Case(1, 1, 1024, 32, 8, 128, "bfloat16", kind="cache")
MODE_FLOPS = {"fwd": 1.0, "bwd": 2.5, "fwd+bwd": 3.5}
QUICK_SEQLENS = (1024, 8192)
THINNED_GROUPS = (*GRIDS, "dims", "deterministic", "fp8", "tangents")


def modes_of(group):
    """The modes that the rows of a group are measured in."""
    if group in FORWARD_GROUPS:
        return ("fwd",)
    return ("bwd",) if group in BACKWARD_GROUPS else tuple(MODE_FLOPS)


@dataclass(frozen=True)
class Row:
    """One measured problem: a case, the group it is reported in, and how its calls are timed.

    timing: "event" times single calls by device events, "replay" a CUDA graph of one call by device events, "graph"
    the replay of a CUDA graph of several calls (no host time at all), "eager" several calls from Python until the
    device is done, by the host's clock.
    """

    group: str
    case: Case
    timing: str = "event"

    @property
    def modes(self):
        """The modes that it is measured in."""
        return modes_of(self.group)

    @property
    def seqlens(self):
        return self.case.seqlens

    @property
    def id(self):
        return self.case.id + (f"-{self.timing}" if self.timing != "event" else "")

    @property
    def equal_sequences(self):
        """Whether it has packed sequences, all of one length."""
        return bool(self.seqlens) and self.seqlens == (self.case.seqlen_q,) * self.case.batch

    @property
    def plain(self):
        """The same problem without features and packed sequences; the row itself may be it."""
        plain = {"softcap": 0.0, "alibi": "none", "dropout": 0.0, "sinks": False, "max_logit": False}
        case = dataclasses.replace(self.case, window=(-1, -1), kind="dense", seqlens=(), **plain)
        return dataclasses.replace(self, case=case)

    @property
    def label(self):
        case, timed = self.case, self.timing != "event"
        length = f"s{case.seqlen_q}" if case.seqlen_q == case.seqlen_k else f"q{case.seqlen_q} k{case.seqlen_k}"
        ragged = case.seqlens and not self.equal_sequences
        parts = (
            (f"d{case.head_dim}" + f"/{case.head_dim_v}" * (case.head_dim_v > 0), True),
            ("causal" if case.causal else "full", True),
            (f"h{case.nheads}/{case.nheads_k}", case.nheads != case.nheads_k),
            (f"h{case.nheads}", timed),
            (f"window {case.window[0]}", case.window[0] >= 0),
            (f"softcap {case.softcap:g}", case.softcap),
            ("alibi", case.alibi != "none"),
            (f"dropout {case.dropout:g}", case.dropout),
            ("sinks", case.sinks),
            ("max_logit", case.max_logit),
            (f"{sum(case.seqlens)} tokens" if ragged else f"b{case.batch} {length}", True),
            ("packed", self.equal_sequences),
            (f"page {case.page_size}", case.page_size),
            (f"append {case.append}", case.append),
            ("invariant", case.invariant),
            (case.cache_dtype, case.cache_dtype),
            (self.timing, timed),
        )
        return " ".join(text for text, applies in parts if applies)

    @property
    def over_cache(self):
        return self.case.kind == "cache"

    @property
    def bytes(self):
        """Keys, values and descales by token that a call over a cache has to read; None for rows rated by TFLOPS."""
        case = self.case
        if not self.over_cache or self.group == "prefill_cache":
            return None
        left = windows(case)[0]
        keys = case.seqlen_k if left < 0 else min(case.seqlen_k, left + case.seqlen_q)
        element = 1 if case.cache_dtype else 4 if case.dtype == "float32" else 2
        descale = 4 if case.cache_dtype == "int8" else 0
        if case.head_dim_v:  # of latent rows, whose values are keys too
            return case.batch * keys * case.nheads_k * (case.head_dim + case.head_dim_v) * element
        return 2 * case.batch * keys * case.nheads_k * (case.head_dim * element + descale)

    def flops(self, mode="fwd"):
        """2·h·(d + d_v) per visible (query, key) pair, over latent rows d + 2·d_v; ×2.5 for bwd, ×3.5 for both.

        Causal counts as half of the square (the convention), a window by its exact number of pairs.
        """
        case = self.case
        if case.seqlens:
            pairs = sum(n * n for n in case.seqlens) * (0.5 if case.causal else 1.0)
            forward = 2.0 * case.nheads * (case.head_dim + case.value_dim) * pairs
        elif case.window != (-1, -1) or self.over_cache:
            pairs = case.batch * visible_pairs(case)
            scored = case.head_dim + case.head_dim_v * self.over_cache
            forward = 2.0 * case.nheads * (scored + case.value_dim) * pairs
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
    for group, cases in BENCH_GROUPS.items():
        rows += [Row(group, case, "graph" if group in GRAPH_GROUPS else "event") for case in cases]
    rows += [Row("small_eager", case, "eager") for case in BENCH_GROUPS["small"]]
    return rows + [Row(group, case, CACHE_TIMING[group]) for group, cases in cache_groups().items() for case in cases]


def scale_down(row, shorter):
    """The row at a size that a CPU computes in milliseconds: batch 1, 4 query heads, sequences and windows shorter."""
    case = row.case
    ratio = case.nheads // case.nheads_k
    seqlens = tuple(max(1, n // shorter) for n in case.seqlens)
    small = dataclasses.replace(
        case,
        batch=len(seqlens) or 1,
        nheads=4,
        nheads_k=max(1, 4 // ratio),
        seqlen_q=max(1, case.seqlen_q // shorter),
        seqlen_k=max(1, case.seqlen_k // shorter),
        window=tuple(w // shorter if w >= 0 else w for w in case.window),
        seqlens=seqlens,
    )
    return dataclasses.replace(row, case=small, timing="eager" if row.timing == "eager" else "event")


def select(groups, quick, device_type, dtype):
    """The rows to measure, in the order of the report."""
    rows = [row for row in all_rows() if row.group in groups]
    if quick:
        rows = [row for row in rows if row.group not in THINNED_GROUPS or row.case.seqlen_q in QUICK_SEQLENS]
        rows = [row for row in rows if row.group != "decode" or (row.case.nheads == 32 and row.case.page_size < 256)]
    if device_type == "cpu":
        full_size = ("small_eager",)
        shorter = 64 if quick else 16
        rows = [row for row in rows if row.timing != "graph" or row.group in FORWARD_GROUPS]  # others need CUDA graphs
        rows = [row if row.group in full_size else scale_down(row, shorter) for row in rows]
    return [dataclasses.replace(row, case=dataclasses.replace(row.case, dtype=dtype)) for row in rows]
