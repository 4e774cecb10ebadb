"""The calls of a step as index tensors: what `varlen_fwd` and `varlen_bwd` of a backend take.

A gap between rows of a call is a sequence of its own, with queries and no keys or keys and no queries.
"""

from __future__ import annotations

import bisect
import math
from typing import NamedTuple

import torch
from torch import Tensor

from flash_attn.context_parallel.layouts import intersection, joined
from flash_attn.context_parallel.schedule import Pair, Step, groups

DQ_TILE = 64  # rows: where calls with one sum of dq may begin


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


class Pushes(NamedTuple):
    """Rows of all batch entries that a rank writes into others' buffers: ((peer, ((row, row there, count)...))...), and
    how many rows the buffer of any rank may have."""

    most_rows: int
    parts: tuple[tuple[int, tuple[tuple[int, int, int], ...]], ...]


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
    which gradients go back. pushes: in place of messages of keys, where all ranks have some."""

    key_rows: int
    is_local: bool
    keys: Moves
    own: tuple[Ranges, Ranges]
    calls: tuple[PlacedCall, ...]
    rounds: tuple[Moves, ...]
    pushes: Pushes | None


class DqRows(NamedTuple):
    """How the rows of every call of a backward are divided, so that all add to one sum of dq.

    Where the kernels keep the sum and softmax_d of a sequence follows from its number, its first row and all calls'
    `rows`. spans: what the rows of each call are parts of, one of each at most. A span is as many sequences in every
    call: `ahead` of them for what no pair has, then its pair.
    """

    rows: int
    spans: tuple[tuple[int, int], ...]
    ahead: tuple[int, ...]
    cu_seqlens: Tensor
    longest: int
    origins: Tensor


class PassTables(NamedTuple):
    """A forward or a backward.

    late: calls of the first step that wait until the gradients of all others are on their way. slots, depth: how many
    results the rows have, gaps counted or not. begins_whole: whether the calls of slot 0 have keys for every row.
    dq_rows: of a backward whose calls are over all rows; None: over those alone that they have keys for.
    """

    steps: tuple[StepTables, ...]
    late: tuple[PlacedCall, ...]
    slots: int
    depth: int
    begins_whole: bool
    dq_rows: DqRows | None


def pass_tables(
    steps: tuple[Step, ...], backward: bool, own_rows: int, batch: int, device, keeps_dq: bool = False, pushes=None
) -> PassTables:
    """Of a dense batch every entry has the same pairs; its rows follow those of the entry before. keeps_dq: with
    dq_rows, where some rows are in several calls and all calls can have them. pushes: None or of each step."""
    found = [_calls(step, backward, own_rows, batch) for step in steps]
    early = _early(found[0]) if backward and any(found[1:]) else len(found[0])
    found = [found[0][:early], *found[1:], found[0][early:]]
    every, depth = [call for calls in found for call in calls], _depth(found)
    dq_rows = _dq_rows([pairs for pairs, _ in every], batch * own_rows, device) if keeps_dq and depth > 1 else None
    placed = iter(_placed(every, device, dq_rows))
    *made, late = [tuple(next(placed) for _ in calls) for calls in found]
    all_calls = [call for calls in (*made, late) for call in calls]
    seen = sum(q1 - q0 for call, (pairs, _) in zip(all_calls, every) if not call.slot for _, q0, q1, *_ in pairs)
    return PassTables(
        tuple(
            _step_tables(step, calls, own_rows, batch, pushed)
            for step, calls, pushed in zip(steps, made, pushes or (None,) * len(steps))
        ),
        late,
        max((call.slot + 1 for call in all_calls), default=0), depth, seen == batch * own_rows, dq_rows,
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


def pushes_of(rank: int, all_steps, own_rows: int, batch: int, most_rows: int) -> tuple[Pushes | None, ...]:
    """Of each step of a rank. all_steps: those of every rank, in which it is found where its rows arrive."""

    def places(messages, peer, rows):
        return [
            (entry * rows + m.start, m.stop - m.start) for entry in range(batch) for m in messages if m.peer == peer
        ]

    found = []
    for index, own in enumerate(all_steps[rank]):
        parts = []
        for peer in dict.fromkeys(m.peer for m in own.sends):
            theirs = all_steps[peer][index]
            sources, targets = places(own.sends, peer, own_rows), places(theirs.receives, rank, theirs.key_rows)
            parts.append((peer, _common_parts(sources, targets)))
        moves = any(steps[index].receives for steps in all_steps)
        found.append(Pushes(most_rows, tuple(parts)) if moves and batch else None)
    return tuple(found)


def _common_parts(sources, targets) -> tuple[tuple[int, int, int], ...]:
    """(row, row there, count) of the same rows in the same order on both ranks, however each has divided them."""
    result: list[tuple[int, int, int]] = []
    targets = iter(targets)
    target = room = 0
    for row, count in sources:
        while count:
            if not room:
                target, room = next(targets)
            part, last = min(count, room), result[-1] if result else None
            if last and (last[0] + last[2], last[1] + last[2]) == (row, target):
                result[-1] = *last[:2], last[2] + part
            else:
                result.append((row, target, part))
            row, target, count, room = row + part, target + part, count - part, room - part
    return tuple(result)


def _step_tables(step: Step, calls, own_rows: int, batch: int, pushes: Pushes | None) -> StepTables:
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
        pushes,
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


def _dq_rows(calls, rows: int, device) -> DqRows | None:
    """None where a span would have two sequences of a call, or one that begins within a tile of another's."""
    spans: list[tuple[int, int]] = []
    for q0, q1 in sorted({(pair.q0, pair.q1) for pairs in calls for pair in pairs}):
        if spans and q0 < spans[-1][1]:
            spans[-1] = spans[-1][0], max(q1, spans[-1][1])
        else:
            spans.append((q0, q1))
    for pairs in calls:
        owners = [_owner(spans, pair) for pair in pairs]
        if len(set(owners)) < len(owners) or any((pair.q0 - spans[i][0]) % DQ_TILE for i, pair in zip(owners, pairs)):
            return None
    ahead = [max(counts) for counts in zip(*(_gaps(spans, pairs) for pairs in calls))]
    cu = [0]
    for (start, stop), count in zip(spans, ahead):
        cu += [start] * count + [stop]
    longest = max(stop - start for start, stop in spans)
    origins = torch.zeros(len(cu) - 1, 4, dtype=torch.int64, device=device)
    cu_seqlens = torch.tensor(cu, dtype=torch.int32, device=device)
    return DqRows(rows, tuple(spans), tuple(ahead), cu_seqlens, longest, origins)


def _gaps(spans, pairs: list[Pair]) -> list[int]:
    """How many sequences of a call stand ahead of each span: for rows that no pair has, and for such keys."""
    gaps, row, key = [0] * len(spans), 0, pairs[0].k0
    for pair in pairs:
        gaps[_owner(spans, pair)] = (pair.q0 > row) + (pair.k0 > key)
        row, key = pair.q1, pair.k1
    return gaps


def _owner(spans, pair: Pair) -> int:
    """Which of the spans has the pair's rows."""
    return bisect.bisect_right(spans, (pair.q0, math.inf)) - 1


def _placed(calls, device, dq_rows: DqRows | None):
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
        table = _table(pairs, is_ascending, device) if dq_rows is None else _whole_rows(pairs, dq_rows, device)
        yield PlacedCall(table, slot, tuple(parts))


def _depth(found) -> int:
    """The largest number of pairs with a row in common."""
    spans = [(pair.q0, pair.q1) for calls in found for pairs, _ in calls for pair in pairs]
    depth = most = 0
    for _, change in sorted([(a, 1) for a, b in spans] + [(b, -1) for a, b in spans]):
        depth += change
        most = max(most, depth)
    return most


def whole_pass(cu, batch: int, window, device) -> PassTables:
    """All documents with all keys, in one call."""
    left, right = (-1 if side is None else side for side in window)
    pairs = [Pair(i, a, b, a, b, left, right, 0, 0) for i, (a, b) in enumerate(zip(cu, cu[1:])) if a < b]
    pairs = _repeated(pairs, cu[-1], cu[-1], batch)
    rows = batch * cu[-1]
    calls = (PlacedCall(_table(pairs, True, device), 0, ((0, rows, True),)),) if pairs else ()
    step = StepTables(rows, True, Moves((), ()), ((), ()), calls, (), None)
    return PassTables((step,), (), len(calls), len(calls), True, None)


def _repeated(pairs, own_rows: int, key_rows: int, batch: int) -> list[Pair]:
    return [
        pair._replace(
            document=pair.document + entry, q0=pair.q0 + entry * own_rows, q1=pair.q1 + entry * own_rows,
            k0=pair.k0 + entry * key_rows, k1=pair.k1 + entry * key_rows,
        )
        for entry in range(batch)
        for pair in pairs
    ]  # fmt: skip


def _whole_rows(pairs: list[Pair], dq_rows: DqRows, device) -> CallTable:
    """A span without a pair is empty sequences, and its rows stand ahead of the next one's."""
    owned = {_owner(dq_rows.spans, pair): pair for pair in pairs}
    k0, k1, cu_q, cu_k, origins = pairs[0].k0, pairs[-1].k1, [0], [0], []
    for i, ahead in enumerate(dq_rows.ahead):
        pair, row, key = owned.get(i), cu_q[-1], cu_k[-1]
        if pair is None:
            pair = pairs[0]._replace(q0=row, q1=row, k0=key + k0, k1=key + k0)
        cu_q += [pair.q0] * ahead + [pair.q1]
        cu_k += [key, pair.k0 - k0][2 - ahead :] + [pair.k1 - k0]  # rows first, then keys: never both in one sequence
        origins += [_origin(pair)] * (ahead + 1)
    return _call_table((0, dq_rows.rows), (k0, k1), cu_q, cu_k, None, origins, pairs, device)


def _origin(pair: Pair):
    return pair.document, 0, pair.row, pair.col


def _table(pairs: list[Pair], ascending_keys: bool, device) -> CallTable:
    q0, q1 = pairs[0].q0, pairs[-1].q1
    k0, k1 = min(pair.k0 for pair in pairs), max(pair.k1 for pair in pairs)
    cu_q, starts_k, used_k, owners = [0], [], [], []

    def add(queries, first_key, keys, pair):
        cu_q.append(cu_q[-1] + queries)
        starts_k.append(first_key - k0)
        used_k.append(keys)
        owners.append(_origin(pair))

    next_key = k0
    for pair in pairs:
        if pair.q0 - q0 > cu_q[-1]:
            add(pair.q0 - q0 - cu_q[-1], next_key, 0, pair)
        if ascending_keys and pair.k0 > next_key:
            add(0, next_key, pair.k0 - next_key, pair)
        add(pair.q1 - pair.q0, pair.k0, pair.k1 - pair.k0, pair)
        next_key = pair.k1

    used = None if ascending_keys else used_k
    return _call_table((q0, q1), (k0, k1), cu_q, [*starts_k, k1 - k0], used, owners, pairs, device)


def _call_table(rows, keys, cu_q, cu_k, used_k, origins, pairs: list[Pair], device) -> CallTable:
    def int32(values):
        return torch.tensor(values, dtype=torch.int32, device=device)

    return CallTable(
        *rows, *keys, int32(cu_q), int32(cu_k), None if used_k is None else int32(used_k),
        max(pair.q1 - pair.q0 for pair in pairs), max(pair.k1 - pair.k0 for pair in pairs), pairs[0].left,
        pairs[0].right, torch.tensor(origins, dtype=torch.int64, device=device), all(pair.is_aligned for pair in pairs),
    )  # fmt: skip
