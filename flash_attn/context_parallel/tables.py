"""The calls of a step as index tensors: what `varlen_fwd` and `varlen_bwd` of a backend take.

A gap between rows of a call is a sequence of its own, with queries and no keys or keys and no queries.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from flash_attn.context_parallel.layouts import intersection, joined
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


Ranges = tuple[tuple[int, int], ...]  # (first row, count), ascending


class Moves(NamedTuple):
    """Rows of all batch entries that go to peers or come from them: ((peer, ranges)...)."""

    sends: tuple[tuple[int, Ranges], ...]
    receives: tuple[tuple[int, Ranges], ...]


class PlacedCall(NamedTuple):
    """A call and where its results go.

    slot: of the forward; results of one slot have no rows in common. parts: of the backward, its rows as
    (first row, count, whether nothing has been written there before).
    """

    table: CallTable
    slot: int
    parts: tuple[tuple[int, int, bool], ...]


class StepTables(NamedTuple):
    """A step: its keys, those of them that this rank has itself (source rows, target rows), its calls, the rounds in
    which gradients go back."""

    key_rows: int
    is_local: bool
    keys: Moves
    own: tuple[Ranges, Ranges]
    calls: tuple[PlacedCall, ...]
    rounds: tuple[Moves, ...]


class PassTables(NamedTuple):
    """A forward or a backward.

    late: calls of the first step that wait until the gradients of all others are on their way. slots, depth: how many
    results the rows have, gaps counted or not. begins_whole: whether the first call has keys for every row.
    """

    steps: tuple[StepTables, ...]
    late: tuple[PlacedCall, ...]
    slots: int
    depth: int
    begins_whole: bool


def pass_tables(steps: tuple[Step, ...], backward: bool, own_rows: int, batch: int, device) -> PassTables:
    """Of a dense batch every entry has the same pairs; its rows follow those of the entry before."""
    found = [_calls(step, backward, own_rows, batch) for step in steps]
    early = _early(found[0]) if backward and any(found[1:]) else len(found[0])
    found = [found[0][:early], *found[1:], found[0][early:]]
    placed = iter(_placed([call for calls in found for call in calls], device))
    *made, late = [tuple(next(placed) for _ in calls) for calls in found]
    return PassTables(
        tuple(_step_tables(step, calls, own_rows, batch) for step, calls in zip(steps, made)), late,
        max((call.slot + 1 for calls in (*made, late) for call in calls), default=0),
        _depth([(pair.q0, pair.q1) for calls in found for pairs, _ in calls for pair in pairs]),
        sum(pair.q1 - pair.q0 for pairs, _ in found[0][:1] for pair in pairs) == batch * own_rows,
    )  # fmt: skip


def _calls(step: Step, backward: bool, own_rows: int, batch: int):
    """[(pairs, whether their keys ascend)...]; forwards may have overlapping keys where that saves calls."""
    ascending, fewer = groups(step.pairs, True), groups(step.pairs, False)
    is_ascending = backward or len(fewer) == len(ascending)
    return [
        (_repeated(pairs, own_rows, step.key_rows, batch), is_ascending)
        for pairs in (ascending if is_ascending else fewer)
        if batch
    ]


def _step_tables(step: Step, calls, own_rows: int, batch: int) -> StepTables:
    def moves(messages, rows):
        peers = dict.fromkeys(m.peer for m in messages) if batch else ()
        return tuple(
            (peer, _ranges([(m.start, m.stop) for m in messages if m.peer == peer], rows, batch)) for peer in peers
        )

    own = tuple(
        tuple((entry * rows + part[i], part[2]) for entry in range(batch) for part in step.own)
        for i, rows in enumerate((own_rows, step.key_rows))
    )
    return StepTables(
        batch * step.key_rows, step.is_local, Moves(moves(step.sends, own_rows), moves(step.receives, step.key_rows)),
        own, tuple(calls),
        tuple(Moves(moves(sends, step.key_rows), moves(received, own_rows)) for sends, received in step.rounds),
    )  # fmt: skip


def _ranges(spans, rows: int, batch: int) -> Ranges:
    """Rows of all entries, those that touch as one."""
    every = joined((entry * rows + start, entry * rows + stop) for entry in range(batch) for start, stop in spans)
    return tuple((start, stop - start) for start, stop in every)


def _early(calls) -> int:
    """How many of the calls are a third of the work, one at least: keys take half as long as gradients."""
    work = [sum((pair.q1 - pair.q0) * (pair.k1 - pair.k0) for pair in pairs) for pairs, _ in calls]
    count = min(1, len(calls))
    while count < len(calls) and 3 * sum(work[:count]) < sum(work):
        count += 1
    return count


def _placed(calls, device):
    """Calls in the order in which they run."""
    slots: list[tuple] = []
    written: tuple = ()
    for pairs, is_ascending in calls:
        rows = pairs[0].q0, pairs[-1].q1
        slot = next((i for i, taken in enumerate(slots) if not intersection(taken, [rows])), len(slots))
        if slot == len(slots):
            slots.append(())
        slots[slot] = joined(sorted([*slots[slot], rows]))
        again = intersection(written, [rows])
        written = joined(sorted([*written, rows]))
        bounds = [rows[0], *(bound for span in again for bound in span), rows[1]]
        fresh = joined(zip(bounds[::2], bounds[1::2]))
        parts = sorted([(a, b - a, False) for a, b in again] + [(a, b - a, True) for a, b in fresh])
        yield PlacedCall(_table(pairs, is_ascending, device), slot, tuple(parts))


def _depth(spans) -> int:
    """The largest number of spans with a row in common."""
    depth = most = 0
    for _, change in sorted([(a, 1) for a, b in spans] + [(b, -1) for a, b in spans]):
        depth += change
        most = max(most, depth)
    return most


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
