"""The steps of one rank: which keys it receives and sends in each, and which (query, key) pairs it computes with them.

Masks are aligned to the bottom right corner of a pair. Its last query and last key may be at different positions, so
the window of the pair is the call's window moved by their distance. Rows and keys that see nothing are left out, so
neither side of the moved window becomes negative.
"""

from __future__ import annotations

from bisect import bisect_left, bisect_right
from collections.abc import Iterable, Sequence
from typing import NamedTuple

from flash_attn.context_parallel.plan import layouts
from flash_attn.context_parallel.plan.layouts import Layout, Segment, Span, Spans, Window
from flash_attn.dropout import MASK_COLUMNS

KEY_METHODS = ("all_gather", "ring")  # move keys, of a mesh of two dimensions along the first
METHODS = (*KEY_METHODS, "ulysses")
CHUNK_METHODS = ("ring",)  # the keys of a step begin where a rank's chunk does, not with a document
_ROWS = 128  # a segment is divided at a multiple of it
_LEAST_WORK = 1 / 16  # a separate call during the transfer of keys has at least this part of a rank's work
_WORTH_COMBINING = 0.5  # split own keys off if remote tokens exceed this fraction of local ones
_MORE_CALLS = 2  # how many more kernel calls a backward in two steps may have than one in one step

Ranges = tuple[tuple[int, int], ...]  # (first row, count), ascending
Transfers = tuple[tuple[int, Ranges], ...]  # (peer, rows)


class Kind(NamedTuple):
    """What the steps of a call depend on.

    exact_positions: each pair is a contiguous part of one document, for dropout and ALiBi. Its keys begin at a multiple
    of MASK_COLUMNS, or at the first key of a rank. If False, a pair may hold keys or rows that touch in the buffer but
    not in the document, where the window masks nothing between them.
    """

    method: str
    window: Window
    exact_positions: bool = False
    batch: int = 1


class Pair(NamedTuple):
    """Query rows [q0, q1) of a rank, key rows [k0, k1) of a step's buffer, and the window between them, -1 for
    unbounded. row, col: the positions of the first query and the first key in their document."""

    document: int
    q0: int
    q1: int
    k0: int
    k1: int
    left: int
    right: int
    row: int
    col: int

    @property
    def is_full(self) -> bool:
        return self.left < 0 and self.right < 0

    @property
    def is_aligned(self) -> bool:
        """Whether the last query and the last key have the same position."""
        return self.row + self.q1 - self.q0 == self.col + self.k1 - self.k0


class Step(NamedTuple):
    """The transfers and the pairs of one step. Local rows count this rank's tokens, key rows those in the buffer.

    key_rows: of the buffer. is_local: the buffer is this rank's own K and V, nothing is received.
    sends, receives: K and V, in local rows and in key rows.
    own: (local rows, key rows) of the rank's own keys, which are copied into the buffer.
    returns: gradients of keys, (sends in key rows, receives in local rows) for each distance between ranks.
    """

    key_rows: int
    is_local: bool
    sends: Transfers
    receives: Transfers
    own: tuple[Ranges, Ranges]
    returns: tuple[tuple[Transfers, Transfers], ...]
    pairs: tuple[Pair, ...]


def make_steps(layout: Layout, rank: int, kind: Kind, backward: bool = False) -> tuple[Step, ...]:
    """ring: a step for each distance between ranks, own keys first. all_gather: a step during the transfer of keys and
    one after it. layout: of all batch entries.

    The first step of an all_gather forward has the rows that need no keys of other ranks. If there are no such rows and
    many keys to receive, it has all rows with the rank's own keys, and their results are combined with those of the
    second step. The first step of a backward has the rank's own keys, unless that costs too many calls. Rows are
    divided to make such a first step only if the batch has one entry: more would cost too many calls.
    """
    maker, divides_rows = _StepMaker(layout, rank, kind), kind.batch == 1
    everyone = list(range(layout.ranks))
    own = list(layouts.segments(layout.spans[rank], layout.cu))
    parts = _halves(own) if backward and divides_rows and maker.missing() else own
    if kind.method == "ring":
        return tuple(maker.step([d], parts if d == 0 else own) for d in everyone)
    divides_keys = not kind.exact_positions or layouts.begin_at_multiples(layout.spans, layout.cu, MASK_COLUMNS)
    if backward and divides_keys:
        divided = maker.step([0], parts), maker.step(everyone[1:], own)
        together = maker.step([], ()), maker.step(everyone, own)
        calls = [sum(len(groups(step.pairs, True)) for step in found) for found in (divided, together)]
        return divided if calls[0] <= calls[1] + _MORE_CALLS else together
    first, others = maker.independent(own) if divides_rows and not backward else ([], own)
    if not first and not backward and divides_keys and maker.missing() > _WORTH_COMBINING * layout.tokens_of(rank):
        return maker.step([0], own), maker.step(everyone[1:], own)
    return maker.step([0], first), maker.step(everyone, others)


def _halves(own: list[Segment]) -> list[Segment]:
    """Divides a segment with more than half of the rows in two: gradients are sent during the second call."""
    rows, result = sum(s.stop - s.start for s in own), []
    for segment in own:
        half = (segment.stop - segment.start) // 2 // _ROWS * _ROWS
        if half and 2 * (segment.stop - segment.start) > rows:
            middle = segment.start + half
            result += [segment.part(segment.start, middle), segment.part(middle, segment.stop)]
        else:
            result.append(segment)
    return result


class _StepMaker:
    """Makes the steps of one rank. Keys of a pair begin at a multiple of `multiple` in the document."""

    def __init__(self, layout: Layout, rank: int, kind: Kind):
        self.layout, self.rank, self.window = layout, rank, kind.window
        self.multiple = MASK_COLUMNS if kind.exact_positions else 1
        self._required = [layouts.required_keys(spans, layout.cu, self.window, self.multiple) for spans in layout.spans]

    def missing(self) -> int:
        """How many tokens' keys come from other ranks."""
        return self._missing(self._required[self.rank])

    def _missing(self, spans: Spans) -> int:
        held = layouts.intersection(spans, self.layout.spans[self.rank])
        return sum(b - a for a, b in spans) - sum(b - a for a, b in held)

    def independent(self, own: list[Segment]) -> tuple[list[Segment], list[Segment]]:
        """(segments that see no keys of other ranks, the rest). They are taken from one end of the rows, the end
        with more work; none if that is too little work."""
        if not self.missing():
            return own, []
        cut = [part for segment in own for part in self._cut(segment)]
        needs_none = [
            not self._missing((layouts.visible_keys(s, self.layout.cu, self.window, self.multiple),)) for s in cut
        ]
        first, last = needs_none.index(False), len(cut) - needs_none[::-1].index(False)
        work = [layouts.visible_pairs(s.start, s.stop, self.layout.cu, self.window) for s in cut]
        before, after = sum(work[:first]), sum(work[last:])
        if max(before, after) < _LEAST_WORK * sum(work):
            return [], own
        return (cut[:first], cut[first:]) if before >= after else (cut[last:], cut[:last])

    def _cut(self, segment: Segment) -> list[Segment]:
        """Divides a segment where its rows stop to see keys before the rank's span, and begin to see keys after it."""
        left, right = self.window
        a, b = next(span for span in self.layout.spans[self.rank] if span[0] <= segment.start < span[1])
        bounds = [segment.start, segment.stop]
        bounds += [] if left is None else [a + left + self.multiple - 1]
        bounds += [] if right is None else [b - right]
        bounds = sorted({min(max(bound, segment.start), segment.stop) for bound in bounds})
        return [segment.part(start, stop) for start, stop in zip(bounds, bounds[1:])]

    def step(self, distances: list[int], queries: Sequence[Segment]) -> Step:
        """The queries of some segments with the keys of the ranks at these distances."""
        layout, rank, ranks = self.layout, self.rank, self.layout.ranks
        seen = layouts.joined(sorted(layouts.visible_keys(s, layout.cu, self.window, self.multiple) for s in queries))
        wanted = {d: layouts.intersection(seen, layout.spans[(rank - d) % ranks]) for d in distances}
        others = [d for d in distances if d != 0]
        is_local = not any(wanted[d] for d in others)
        if is_local:
            available = layout.spans[rank] if 0 in distances else ()
        else:
            available = layouts.joined(sorted(span for spans in wanted.values() for span in spans))
        local_rows, key_rows = _Rows(layout.spans[rank]), _Rows(available)
        incoming, outgoing = [], []
        for d in others:
            needed = layouts.intersection(self._required[(rank + d) % ranks], layout.spans[rank])
            incoming.append(key_rows.transfer((rank - d) % ranks, wanted[d]))
            outgoing.append(local_rows.transfer((rank + d) % ranks, needed))
        own = () if is_local else wanted.get(0, ())
        pairs = self._pairs(queries, key_rows)
        return Step(
            key_rows.count,
            is_local,
            tuple(transfer for transfers in outgoing for transfer in transfers),
            tuple(transfer for transfers in incoming for transfer in transfers),
            (local_rows.ranges(own), key_rows.ranges(own)),
            tuple(zip(incoming, outgoing)),
            tuple(_joined_pairs(pairs) if self.multiple == 1 else pairs),
        )

    def _pairs(self, queries: Sequence[Segment], key_rows: _Rows) -> list[Pair]:
        pairs = []
        for segment in queries:
            first_visible, _ = layouts.visible_keys(segment, self.layout.cu, self.window)
            keys = layouts.visible_keys(segment, self.layout.cu, self.window, self.multiple)
            for span in key_rows.overlap(keys):
                if span[1] > first_visible:
                    pairs.append(self._pair(segment, span, key_rows))
        return pairs

    def _pair(self, segment: Segment, span: Span, key_rows: _Rows) -> Pair:
        """The queries of a segment that see keys of a span, the keys that they see, and the moved window."""
        (left, right), first = self.window, self.layout.cu[segment.document]
        (q0, q1), (k0, k1) = (segment.start, segment.stop), span
        if right is not None:
            q0 = max(q0, k0 - right)
        if left is not None:
            q1 = min(q1, k1 + left)
            k0 = max(k0, layouts.rounded_down(q0 - left, first, self.multiple))
        if right is not None:
            k1 = min(k1, q1 + right)
        distance = q1 - k1
        moved_left = left - distance if left is not None and q1 - 1 - left > k0 else -1
        moved_right = right + distance if right is not None and q0 + right < k1 - 1 else -1
        row, (key, key_stop) = segment.part(q0, q1).row, key_rows.of((k0, k1))
        return Pair(
            segment.document, row, row + q1 - q0, key, key_stop, moved_left, moved_right, q0 - first, k0 - first
        )


class _Rows:
    """The rows of a buffer that has the tokens of `spans` in ascending order."""

    def __init__(self, spans: Spans):
        self.spans, self.count = spans, 0
        self._starts, self._rows = [start for start, _ in spans], []
        for start, stop in spans:
            self._rows.append(self.count)
            self.count += stop - start

    def overlap(self, span: Span) -> Spans:
        """The tokens of a span that are in the buffer."""
        first, stop = bisect_right(self._starts, span[0]) - 1, bisect_left(self._starts, span[1])
        return layouts.intersection([span], self.spans[max(first, 0) : stop])

    def of(self, span: Span) -> Span:
        """The rows of a span of tokens that are all in the buffer."""
        index = bisect_right(self._starts, span[0]) - 1
        first = self._rows[index] - self._starts[index]
        return span[0] + first, span[1] + first

    def ranges(self, spans: Iterable[Span]) -> Ranges:
        return tuple((start, stop - start) for start, stop in map(self.of, spans))

    def transfer(self, peer: int, spans: Iterable[Span]) -> Transfers:
        """Nothing or the rows of these tokens for one peer; rows that touch become one range."""
        rows = layouts.joined(map(self.of, spans))
        return ((peer, tuple((start, stop - start) for start, stop in rows)),) if rows else ()


def _joined_pairs(pairs: list[Pair]) -> list[Pair]:
    """Joins pairs of the same queries and adjacent keys if no mask falls between them, then pairs without a mask of the
    same keys and adjacent queries. A rank's chunks are adjacent in the buffer, however far apart in the document."""
    for join in (_with_adjacent_keys, _with_adjacent_queries):
        result: list[Pair] = []
        for pair in pairs:
            both = join(result[-1], pair) if result else None
            result[-1:] = [both] if both else [*result[-1:], pair]
        pairs = result
    return pairs


def _with_adjacent_keys(last: Pair, pair: Pair) -> Pair | None:
    is_adjacent = (last.document, last.q0, last.q1, last.k1) == (pair.document, pair.q0, pair.q1, pair.k0)
    if not is_adjacent or last.right >= 0 or pair.left >= 0:
        return None
    left = last.left + pair.k1 - pair.k0 if last.left >= 0 else -1  # counted from the last key
    return last._replace(k1=pair.k1, left=left, right=pair.right)


def _with_adjacent_queries(last: Pair, pair: Pair) -> Pair | None:
    is_adjacent = (last.document, last.k0, last.k1, last.q1) == (pair.document, pair.k0, pair.k1, pair.q0)
    return last._replace(q1=pair.q1) if is_adjacent and last.is_full and pair.is_full else None


def groups(pairs: Iterable[Pair], ascending_keys: bool) -> list[list[Pair]]:
    """The pairs of each kernel call: one window, ascending rows that no two pairs share and, with ascending_keys, such
    keys too. Each pair joins the first group that takes it."""
    result: list[list[Pair]] = []
    for pair in sorted(pairs, key=lambda pair: (pair.q0, pair.k0)):
        for group in result:
            last = group[-1]
            if (last.left, last.right) == (pair.left, pair.right) and last.q1 <= pair.q0:
                if last.k1 <= pair.k0 or not ascending_keys:
                    group.append(pair)
                    break
        else:
            result.append([pair])
    return result
