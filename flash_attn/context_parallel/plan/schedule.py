"""The kernel calls of one forward or backward of a rank, in order, and which rows of the results each one writes."""

from __future__ import annotations

import math
from bisect import bisect_right
from collections.abc import Iterator, Sequence
from typing import NamedTuple

from flash_attn.context_parallel.plan.layouts import Layout, Span, Spans, intersection, joined
from flash_attn.context_parallel.plan.steps import Kind, Pair, Ranges, Step, groups, make_steps

DQ_TILE = 64  # rows; calls that share one sum of dq begin at multiples of it

Copies = tuple[tuple[int, tuple[tuple[int, int, int], ...]], ...]  # (peer, ((local row, peer's key row, count), ...))


class Call(NamedTuple):
    """One kernel call. has_ascending_keys: no two pairs share keys, as backward kernels need it.

    slot: of a forward; results in one slot have no rows in common. parts: of a backward, the rows of dq as (first row,
    count, whether no call has written them before).
    """

    pairs: list[Pair]
    has_ascending_keys: bool
    slot: int = 0
    parts: tuple[tuple[int, int, bool], ...] = ()

    @property
    def rows(self) -> Span:
        return self.pairs[0].q0, self.pairs[-1].q1


class DqRows(NamedTuple):
    """The division of all rows into sequences, equal in all calls of a backward, so that they add to one sum of dq.

    Kernels find the sum and softmax_d of a sequence by its number and its first row. Each pair's rows are part of one
    of the spans. In every call a span has the same number of sequences: `gaps` for rows and keys without a pair, then
    one for its pair.
    """

    rows: int
    spans: Spans
    gaps: tuple[int, ...]

    def owner(self, pair: Pair) -> int:
        """The span with the pair's rows."""
        return _owner(self.spans, pair)


class Schedule(NamedTuple):
    """One forward or backward of one rank.

    calls: of each step, then the late calls, which run while the last gradients are sent. slots: the number of results
    to combine. depth: the largest number of pairs per row. slot_0_is_full: whether slot 0 has a result for every row.
    dq_rows: given if all calls of a backward cover all rows. copies: for each step the rows that this rank copies into
    the others' buffers, None for messages.
    """

    steps: tuple[Step, ...]
    calls: tuple[tuple[Call, ...], ...]
    slots: int
    depth: int
    slot_0_is_full: bool
    dq_rows: DqRows | None
    copies: tuple[Copies | None, ...]

    @property
    def moves(self) -> bool:
        """Whether this rank sends or receives anything."""
        return any(s.sends or s.receives or any(map(any, s.returns)) for s in self.steps) or any(
            copies is not None for copies in self.copies
        )


def make_schedule(
    layout: Layout, rank: int, kind: Kind, backward: bool = False, keeps_dq: bool = False, by_copies: bool = False
) -> Schedule:
    """layout: of each batch entry. keeps_dq: make dq_rows if some rows are in several calls and the calls can cover all
    rows. by_copies: copy keys to the other ranks."""
    layout, rows = layout.batched(kind.batch), kind.batch * layout.tokens_of(rank)
    steps = make_steps(layout, rank, kind, backward)
    calls = [_calls(step, backward) for step in steps]
    early = _early(calls[0]) if backward and any(calls[1:]) else len(calls[0])
    calls = [calls[0][:early], *calls[1:], calls[0][early:]]
    every = [call for own in calls for call in own]
    depth = _depth(every)
    dq_rows = _dq_rows(every, rows) if keeps_dq and depth > 1 else None
    placed = list(_placed(every))
    seen = sum(pair.q1 - pair.q0 for call in placed if call.slot == 0 for pair in call.pairs)
    slots = max((call.slot + 1 for call in placed), default=0)
    copies: tuple[Copies | None, ...] = (None,) * len(steps)
    if by_copies:
        copies = _copies(rank, [make_steps(layout, other, kind, backward) for other in range(layout.ranks)])
    remaining = iter(placed)
    placed_calls = tuple(tuple(next(remaining) for _ in own) for own in calls)
    return Schedule(steps, placed_calls, slots, depth, seen == rows, dq_rows, copies)


def whole_schedule(layout: Layout, kind: Kind) -> Schedule:
    """All documents with all their keys in one call, as one GPU computes them."""
    left, right = (-1 if side is None else side for side in kind.window)
    cu = layout.batched(kind.batch).cu
    pairs = [Pair(i, a, b, a, b, left, right, 0, 0) for i, (a, b) in enumerate(zip(cu, cu[1:])) if a < b]
    calls = (Call(pairs, True, 0, ((0, cu[-1], True),)),) if pairs else ()
    step = Step(cu[-1], True, (), (), ((), ()), (), ())
    return Schedule((step,), (calls, ()), len(calls), len(calls), True, None, (None,))


def _calls(step: Step, backward: bool) -> list[Call]:
    """The pairs of each call; keys of a forward's call may overlap if that saves calls."""
    ascending, fewer = groups(step.pairs, True), groups(step.pairs, False)
    is_ascending = backward or len(fewer) == len(ascending)
    return [Call(pairs, is_ascending) for pairs in (ascending if is_ascending else fewer)]


def _early(calls: Sequence[Call]) -> int:
    """How many calls make up a third of the work, at least one: keys take half as long to send as their gradients."""
    work = [sum((pair.q1 - pair.q0) * (pair.k1 - pair.k0) for pair in call.pairs) for call in calls]
    count = min(1, len(calls))
    while count < len(calls) and 3 * sum(work[:count]) < sum(work):
        count += 1
    return count


def _placed(calls: Sequence[Call]) -> Iterator[Call]:
    """The calls with their slots and parts, in the order in which they run."""
    slots: list[Spans] = []
    written: Spans = ()
    for call in calls:
        rows = call.rows
        slot = next((i for i, taken in enumerate(slots) if not intersection(taken, [rows])), len(slots))
        if slot == len(slots):
            slots.append(())
        slots[slot] = joined(sorted([*slots[slot], rows]))
        again = intersection(written, [rows])
        written = joined(sorted([*written, rows]))
        bounds = [rows[0], *(bound for span in again for bound in span), rows[1]]
        first = joined(zip(bounds[::2], bounds[1::2]))
        parts = sorted([(a, b - a, False) for a, b in again] + [(a, b - a, True) for a, b in first])
        yield call._replace(slot=slot, parts=tuple(parts))


def _depth(calls: Sequence[Call]) -> int:
    """The largest number of pairs with a row in common."""
    spans = [(pair.q0, pair.q1) for call in calls for pair in call.pairs]
    depth = most = 0
    for _, change in sorted([(a, 1) for a, b in spans] + [(b, -1) for a, b in spans]):
        depth += change
        most = max(most, depth)
    return most


def _dq_rows(calls: Sequence[Call], rows: int) -> DqRows | None:
    """None if a call has two sequences in one span, or one that begins inside a tile of the span."""
    spans: list[Span] = []
    for q0, q1 in sorted({(pair.q0, pair.q1) for call in calls for pair in call.pairs}):
        if spans and q0 < spans[-1][1]:
            spans[-1] = spans[-1][0], max(q1, spans[-1][1])
        else:
            spans.append((q0, q1))
    for call in calls:
        owners = [_owner(spans, pair) for pair in call.pairs]
        is_inside_tile = any((pair.q0 - spans[i][0]) % DQ_TILE for i, pair in zip(owners, call.pairs))
        if len(set(owners)) < len(owners) or is_inside_tile:
            return None
    gaps = [max(counts) for counts in zip(*(_gaps(spans, call.pairs) for call in calls))]
    return DqRows(rows, tuple(spans), tuple(gaps))


def _gaps(spans: Sequence[Span], pairs: Sequence[Pair]) -> list[int]:
    """How many sequences a call has before the pair of each span: for rows without a pair, and for such keys."""
    gaps, row, key = [0] * len(spans), 0, pairs[0].k0
    for pair in pairs:
        gaps[_owner(spans, pair)] = (pair.q0 > row) + (pair.k0 > key)
        row, key = pair.q1, pair.k1
    return gaps


def _owner(spans: Sequence[Span], pair: Pair) -> int:
    return bisect_right(spans, (pair.q0, math.inf)) - 1


def _copies(rank: int, all_steps: Sequence[Sequence[Step]]) -> tuple[Copies | None, ...]:
    """What a rank copies in each step, to where its peers' steps receive it. None if no rank receives anything."""
    result: list[Copies | None] = []
    for index, step in enumerate(all_steps[rank]):
        parts = []
        for peer, sources in step.sends:
            targets = dict(all_steps[peer][index].receives)[rank]
            parts.append((peer, _matching_rows(sources, targets)))
        moves = any(steps[index].receives for steps in all_steps)
        result.append(tuple(parts) if moves else None)
    return tuple(result)


def _matching_rows(sources: Ranges, targets: Ranges) -> tuple[tuple[int, int, int], ...]:
    """(local row, peer's row, count) of the same tokens in the same order on both ranks."""
    result: list[tuple[int, int, int]] = []
    remaining = iter(targets)
    target = room = 0
    for row, count in sources:
        while count:
            if not room:
                target, room = next(remaining)
            part = min(count, room)
            result.append((row, target, part))
            row, target, count, room = row + part, target + part, count - part, room - part
    return tuple(result)
