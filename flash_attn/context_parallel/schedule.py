"""What one rank computes and sends: steps, each with keys from some ranks, the pairs of query and key rows in them.

Masks are aligned to the bottom right corner of each pair, whose last query and last key may stand apart: the window of
the call is the one asked for, moved by their distance. Rows and keys that the window hides from the whole pair are left
out, which keeps both sides of the moved window from becoming negative.
"""

from __future__ import annotations

from typing import NamedTuple

from flash_attn.context_parallel.layouts import (
    Segment,
    Span,
    Window,
    begin_at_multiples,
    intersection,
    joined,
    required_keys,
    rounded_down,
    segments,
    visible_keys,
    visible_pairs,
)
from flash_attn.dropout import MASK_COLUMNS

METHODS = ("all_gather", "ring", "ulysses")
_ROWS = 128  # a segment is divided at a multiple of it
_LEAST_WORK = 1 / 16  # of a rank's, to be computed while keys are under way
_WORTH_COMBINING = 0.5  # more tokens to come than this part of one's own take longer than combining two parts of out
_MORE_CALLS = 2  # of a backward in two steps than in one


class Pair(NamedTuple):
    """Query rows [q0, q1) of a rank and rows [k0, k1) of a step's keys, of one document, and the window of the call.

    row, col: the position in the document of the first query and of the first key.
    """

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
        """Whether the last query and the last key have one position, as in a call of its own."""
        return self.row + self.q1 - self.q0 == self.col + self.k1 - self.k0


class Message(NamedTuple):
    """Rows [start, stop) of a buffer that go to, or come from, a peer."""

    peer: int
    start: int
    stop: int


class Step(NamedTuple):
    """Keys from some ranks. Local rows are those of a rank's own tokens, key rows those of the step's buffer.

    sends, receives: of K and V, the former in local rows, the latter in key rows. own: ((local row, key row, count)...)
    of keys that this rank has itself. is_local: the buffer is the rank's own K and V, nothing moves.
    rounds: of the gradients' way back, for each distance between ranks (sends in key rows, receives in local rows).
    """

    key_rows: int
    is_local: bool
    sends: tuple[Message, ...]
    receives: tuple[Message, ...]
    own: tuple[tuple[int, int, int], ...]
    rounds: tuple[tuple[tuple[Message, ...], tuple[Message, ...]], ...]
    pairs: tuple[Pair, ...]


class Layout(NamedTuple):
    """What every rank holds: spans of tokens, and the bounds of documents."""

    spans: tuple[tuple[Span, ...], ...]
    cu: tuple[int, ...]

    @property
    def ranks(self) -> int:
        return len(self.spans)

    def tokens_of(self, rank: int) -> int:
        return sum(stop - start for start, stop in self.spans[rank])


def steps(
    layout: Layout, rank: int, method: str, window: Window, exact_positions: bool, backward=False, divides_rows=True
) -> tuple[Step, ...]:
    """all_gather: a step while keys are under way and one with all of them. ring: one step for each distance, one's own
    keys first.

    In the forward of all_gather the first step has the rows that see no keys of other ranks or, where there are none
    and much is to come, one's own keys, whose results have to be combined with the others'; in the backward one's own
    keys where that costs few calls. divides_rows: whether rows of a call may be divided for the sake of that, which
    several entries of a batch make costly.
    exact_positions: each pair is a contiguous part of one document, as dropout and ALiBi need it, whose keys begin at a
    multiple of MASK_COLUMNS, or where those of a rank do; otherwise a pair may join keys or rows that stand apart,
    where no mask falls between them.
    """
    maker = _Maker(layout, rank, window, MASK_COLUMNS if exact_positions else 1)
    everyone = list(range(layout.ranks))
    own = list(segments(layout.spans[rank], layout.cu))
    parts = _halves(own) if backward and divides_rows and maker.missing() else own
    if method == "ring":
        return tuple(maker.step([d], parts if d == 0 else own) for d in everyone)
    divides_keys = not exact_positions or begin_at_multiples(layout.spans, layout.cu, MASK_COLUMNS)
    if backward and divides_keys:
        divided = maker.step([0], parts), maker.step(everyone[1:], own)
        together = maker.step([], ()), maker.step(everyone, own)
        calls = [sum(len(groups(step.pairs, True)) for step in found) for found in (divided, together)]
        return divided if calls[0] <= calls[1] + _MORE_CALLS else together
    first, others = maker.alone(own) if divides_rows and not backward else ((), own)
    if not first and not backward and divides_keys and maker.missing() > _WORTH_COMBINING * layout.tokens_of(rank):
        return maker.step([0], own), maker.step(everyone[1:], own)
    return maker.step([0], first), maker.step(everyone, others)


def _halves(own: list[Segment]) -> list[Segment]:
    """A segment with more than half of the rows as two: two calls, with time between them for what is to be sent."""
    rows, result = sum(s.stop - s.start for s in own), []
    for segment in own:
        half = (segment.stop - segment.start) // 2 // _ROWS * _ROWS
        if half and 2 * (segment.stop - segment.start) > rows:
            middle = segment.start + half
            result += [segment._replace(stop=middle), segment._replace(row=segment.row + half, start=middle)]
        else:
            result.append(segment)
    return result


class _Maker:
    """Makes the steps of one rank."""

    def __init__(self, layout: Layout, rank: int, window: Window, multiple: int):
        self.layout, self.rank, self.window, self.multiple = layout, rank, window, multiple
        self.required = [required_keys(spans, layout.cu, window, multiple) for spans in layout.spans]

    def step(self, distances, queries) -> Step:
        """With keys from these distances, of the queries of some segments."""
        return _step(self, distances, queries)

    def missing(self) -> int:
        """How many tokens' keys come from other ranks."""
        return self._missing(self.required[self.rank])

    def alone(self, own: list[Segment]):
        """(the first segments that see no keys of other ranks, the others), or the last ones; none if they are few."""
        if not self.missing():
            return own, ()
        cut = [part for segment in own for part in self._cut(segment)]
        is_alone = [not self._missing([visible_keys(s, self.layout.cu, self.window, self.multiple)]) for s in cut]
        first, last = is_alone.index(False), len(cut) - is_alone[::-1].index(False)
        work = [visible_pairs(s.start, s.stop, self.layout.cu, self.window) for s in cut]
        ahead, behind = sum(work[:first]), sum(work[last:])
        if max(ahead, behind) < _LEAST_WORK * sum(work):
            return (), own
        return (cut[:first], cut[first:]) if ahead >= behind else (cut[last:], cut[:last])

    def _cut(self, segment: Segment) -> list[Segment]:
        """A segment without empty parts, divided where its rows see the first of one's own keys and the last."""
        left, right = self.window
        a, b = next(span for span in self.layout.spans[self.rank] if span[0] <= segment.start < span[1])
        bounds = [segment.start, segment.stop]
        bounds += [] if left is None else [a + left + self.multiple - 1]
        bounds += [] if right is None else [b - right]
        bounds = sorted({min(max(bound, segment.start), segment.stop) for bound in bounds})
        return [
            segment._replace(row=segment.row + start - segment.start, start=start, stop=stop)
            for start, stop in zip(bounds, bounds[1:])
        ]

    def _missing(self, spans) -> int:
        """How many of the tokens are on other ranks."""
        held = intersection(spans, self.layout.spans[self.rank])
        return sum(b - a for a, b in spans) - sum(b - a for a, b in held)


def _step(maker: _Maker, distances, queries) -> Step:
    layout, rank, window, multiple, ranks = maker.layout, maker.rank, maker.window, maker.multiple, maker.layout.ranks
    required = maker.required
    sources = [(rank - d) % ranks for d in distances]
    seen = joined(sorted(visible_keys(segment, layout.cu, window, multiple) for segment in queries))
    wanted = {source: intersection(seen, layout.spans[source]) for source in sources}
    others = [d for d in distances if d != 0]
    is_local = all(not wanted[(rank - d) % ranks] for d in others)
    available = layout.spans[rank] if is_local else joined(sorted(span for spans in wanted.values() for span in spans))
    if is_local and 0 not in distances:
        available = ()
    own_rows, key_rows = _Rows(layout.spans[rank]), _Rows(available)

    def messages(rows, peer, spans):
        return tuple(Message(peer, *rows.of(span)) for span in spans)

    sends, receives, rounds = [], [], []
    for distance in others:
        source, consumer = (rank - distance) % ranks, (rank + distance) % ranks
        asked = intersection(required[consumer], layout.spans[rank])
        sends += messages(own_rows, consumer, asked)
        receives += messages(key_rows, source, wanted[source])
        rounds.append((messages(key_rows, source, wanted[source]), messages(own_rows, consumer, asked)))
    own = () if is_local else tuple(
        (own_rows.of(span)[0], key_rows.of(span)[0], span[1] - span[0]) for span in wanted.get(rank, ())
    )  # fmt: skip
    pairs = _pairs(layout, queries, key_rows, window, multiple)
    if multiple == 1:
        pairs = _joined(pairs)
    return Step(key_rows.count, is_local, tuple(sends), tuple(receives), own, tuple(rounds), tuple(pairs))


class _Rows:
    """The rows of tokens that lie in a buffer in ascending order, those of `spans` alone."""

    def __init__(self, spans):
        self.spans, self.count, self._starts = spans, 0, []
        for start, stop in spans:
            self._starts.append(self.count)
            self.count += stop - start

    def of(self, span: Span) -> Span:
        """The rows of a span of tokens that all lie here."""
        for (start, stop), row in zip(self.spans, self._starts):
            if start <= span[0] and span[1] <= stop:
                return row + span[0] - start, row + span[1] - start
        raise AssertionError(f"{span} is not in {self.spans}")


def _pairs(layout: Layout, queries, key_rows: _Rows, window: Window, multiple: int) -> list[Pair]:
    pairs = []
    for segment in queries:
        first_visible, _ = visible_keys(segment, layout.cu, window)
        for span in intersection([visible_keys(segment, layout.cu, window, multiple)], key_rows.spans):
            if span[1] <= first_visible:
                continue
            pairs.append(_pair(segment, span, layout.cu[segment.document], key_rows, window, multiple))
    return pairs


def _pair(segment: Segment, span: Span, first: int, key_rows: _Rows, window: Window, multiple: int) -> Pair:
    """The queries of a segment that see keys of a span, the keys that they see, and the window moved to the corner."""
    left, right = window
    (q0, q1), (k0, k1) = (segment.start, segment.stop), span
    if right is not None:
        q0 = max(q0, k0 - right)
    if left is not None:
        q1 = min(q1, k1 + left)
        k0 = max(k0, rounded_down(q0 - left, first, multiple))
    if right is not None:
        k1 = min(k1, q1 + right)
    distance = q1 - k1
    masks_left = left is not None and q1 - 1 - left > k0
    masks_right = right is not None and q0 + right < k1 - 1
    row, rows = segment.row + q0 - segment.start, key_rows.of((k0, k1))
    return Pair(
        segment.document, row, row + q1 - q0, *rows, left - distance if masks_left else -1,
        right + distance if masks_right else -1, q0 - first, k0 - first,
    )  # fmt: skip


def _joined(pairs: list[Pair]) -> list[Pair]:
    """Pairs of the same queries and adjacent keys as one, where no mask falls between them, and then pairs without a
    mask of the same keys and adjacent queries.

    A rank's chunks lie side by side in the buffer, however far apart their tokens are.
    """
    result: list[Pair] = []
    for pair in pairs:
        last = result[-1] if result else None
        if last and _are_one_row(last, pair):
            left = last.left + pair.k1 - pair.k0 if last.left >= 0 else -1  # counted from the last key
            result[-1] = last._replace(k1=pair.k1, left=left, right=pair.right)
        else:
            result.append(pair)
    pairs, result = result, []
    for pair in pairs:
        last = result[-1] if result else None
        if last and _are_one_column(last, pair):
            result[-1] = last._replace(q1=pair.q1)
        else:
            result.append(pair)
    return result


def _are_one_row(last: Pair, pair: Pair) -> bool:
    is_adjacent = (last.document, last.q0, last.q1, last.k1) == (pair.document, pair.q0, pair.q1, pair.k0)
    return is_adjacent and last.right < 0 and pair.left < 0


def _are_one_column(last: Pair, pair: Pair) -> bool:
    is_adjacent = (last.document, last.k0, last.k1, last.q1) == (pair.document, pair.k0, pair.k1, pair.q0)
    return is_adjacent and last.is_full and pair.is_full


def groups(pairs, ascending_keys: bool) -> list[list[Pair]]:
    """Pairs that one call computes: of one window, with ascending rows that no two share, and with ascending_keys such
    keys too. Each pair joins the first group that takes it.
    """
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
