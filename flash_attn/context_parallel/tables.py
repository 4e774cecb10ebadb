"""The calls of a step as index tensors: what `varlen_fwd` and `varlen_bwd` of a backend take.

A gap between rows of a call is a sequence of its own, with queries and no keys or keys and no queries.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from flash_attn.context_parallel.schedule import Pair, Step, groups


class CallTable(NamedTuple):
    """One call: query rows [q0, q1), key rows [k0, k1), and how they are divided into sequences.

    seqused_k is given where keys of sequences overlap, which only a forward may do. origins int64 (sequences, 4):
    document, 0, row and column of the document where the scores begin.
    """

    q0: int
    q1: int
    k0: int
    k1: int
    cu_seqlens_q: Tensor
    cu_seqlens_k: Tensor
    seqused_k: Tensor | None
    max_seqlen_q: int
    max_seqlen_k: int
    left: int
    right: int
    origins: Tensor
    is_aligned: bool


class StepTables(NamedTuple):
    """A step and its calls."""

    step: Step
    forward: tuple[CallTable, ...]
    backward: tuple[CallTable, ...]


def step_tables(step: Step, own_rows: int, batch: int, device) -> StepTables:
    """Of a dense batch every entry has the same pairs; its rows follow those of the entry before."""

    def tables(ascending_keys):
        found = groups(step.pairs, ascending_keys)
        return tuple(_table(_repeated(g, own_rows, step.key_rows, batch), ascending_keys, device) for g in found)

    if batch == 0:
        return StepTables(step, (), ())
    backward = tables(True)
    forward = tables(False)
    if len(forward) == len(backward):
        forward = backward  # without overlapping keys
    return StepTables(step, forward, backward)


def whole_table(cu, batch: int, window, device) -> tuple[CallTable, ...]:
    """All documents with all keys, in one call."""
    left, right = (-1 if side is None else side for side in window)
    pairs = [Pair(i, a, b, a, b, left, right, 0, 0) for i, (a, b) in enumerate(zip(cu, cu[1:])) if a < b]
    pairs = _repeated(pairs, cu[-1], cu[-1], batch)
    return (_table(pairs, True, device),) if pairs else ()


def _repeated(pairs, own_rows: int, key_rows: int, batch: int) -> list[Pair]:
    return [
        pair._replace(
            document=pair.document + entry, q0=pair.q0 + entry * own_rows, q1=pair.q1 + entry * own_rows,
            k0=pair.k0 + entry * key_rows, k1=pair.k1 + entry * key_rows,
        )
        for entry in range(batch)
        for pair in pairs
    ]  # fmt: skip


def _table(pairs: list[Pair], ascending_keys: bool, device) -> CallTable:
    q0, q1 = pairs[0].q0, pairs[-1].q1
    k0, k1 = min(pair.k0 for pair in pairs), max(pair.k1 for pair in pairs)
    cu_q, starts_k, used_k, owners = [0], [], [], []

    def add(queries, first_key, keys, pair):
        cu_q.append(cu_q[-1] + queries)
        starts_k.append(first_key - k0)
        used_k.append(keys)
        owners.append((pair.document, 0, pair.row, pair.col))

    next_key = k0
    for pair in pairs:
        if pair.q0 - q0 > cu_q[-1]:
            add(pair.q0 - q0 - cu_q[-1], next_key, 0, pair)
        if ascending_keys and pair.k0 > next_key:
            add(0, next_key, pair.k0 - next_key, pair)
        add(pair.q1 - pair.q0, pair.k0, pair.k1 - pair.k0, pair)
        next_key = pair.k1

    def int32(values):
        return torch.tensor(values, dtype=torch.int32, device=device)

    return CallTable(
        q0, q1, k0, k1, int32(cu_q), int32([*starts_k, k1 - k0]), None if ascending_keys else int32(used_k),
        max(pair.q1 - pair.q0 for pair in pairs), max(pair.k1 - pair.k0 for pair in pairs), pairs[0].left,
        pairs[0].right, torch.tensor(owners, dtype=torch.int64, device=device), all(pair.is_aligned for pair in pairs),
    )  # fmt: skip
