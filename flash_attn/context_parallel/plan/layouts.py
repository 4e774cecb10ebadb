"""Which tokens each rank holds, and how many (query, key) pairs they are.

A span is (start, stop) in tokens of the whole batch. A window is (left, right), None for unbounded. Documents are given
by their bounds `cu`, ascending from 0 to the number of tokens.
"""

from __future__ import annotations

import math
from bisect import bisect_right
from collections.abc import Iterable, Iterator, Sequence
from functools import partial
from typing import Callable, NamedTuple, Optional, Union

Span = tuple[int, int]
Spans = tuple[Span, ...]
GivenLayout = Union[str, Sequence[Sequence[Span]]]  # a name, or the spans of each rank
Window = tuple[Optional[int], Optional[int]]

LAYOUTS = ("zigzag", "contiguous", "balanced")
_CHUNKS_PER_RANK = 8  # least number of chunks per rank in the balanced layout
_LONGEST_CHUNKS = (2048, 512)  # tokens of its chunks; the second if the first is not even
_CUT_DOCUMENTS = (0, 1, 2, 4, 8, 16)  # how many of the longest documents to cut, until the rest is even
_ROUNDED = 32  # chunks shorter than this many tiles end at a multiple of a part of the tile
_EVEN = 1.05  # a layout is balanced if its largest load and token count are within this factor of the mean


class Layout(NamedTuple):
    """The tokens of every rank, ascending and disjoint, and the bounds of the documents."""

    spans: tuple[Spans, ...]
    cu: tuple[int, ...]

    @property
    def ranks(self) -> int:
        return len(self.spans)

    def tokens_of(self, rank: int) -> int:
        return sum(stop - start for start, stop in self.spans[rank])

    def batched(self, batch: int) -> Layout:
        """This layout for each of `batch` entries, one after the other."""
        if batch == 1:
            return self
        total = self.cu[-1]
        first_tokens = [entry * total for entry in range(batch)]
        spans = tuple(tuple((t + start, t + stop) for t in first_tokens for start, stop in own) for own in self.spans)
        return Layout(spans, (0, *(t + bound for t in first_tokens for bound in self.cu[1:])))


class Segment(NamedTuple):
    """Consecutive tokens [start, stop) of one document that a rank holds as its local rows from `row` on."""

    document: int
    row: int
    start: int
    stop: int

    def part(self, start: int, stop: int) -> Segment:
        return Segment(self.document, self.row + start - self.start, start, stop)


def layout_spans(layout: str, cu: Sequence[int], ranks: int, tile: int, window: Window) -> tuple[Spans, ...]:
    """The spans of every rank, ascending and disjoint; together they cover all tokens."""
    total = cu[-1]
    if layout == "contiguous":
        return _contiguous(total, ranks, tile)
    if layout == "zigzag":
        return _zigzag(total, ranks, tile)
    candidates: list[Callable[[], tuple[Spans, ...]]] = [partial(_contiguous, total, ranks, tile)]
    if len(cu) > 2:
        candidates += [partial(_by_documents, cu, ranks, tile, window, cut) for cut in _CUT_DOCUMENTS]
    candidates.append(partial(_zigzag, total, ranks, tile))
    candidates += [partial(_by_load, cu, ranks, tile, window, longest) for longest in _LONGEST_CHUNKS]
    best: tuple[Spans, ...] = ()
    best_load = math.inf
    for make in candidates:  # those with fewer messages and fewer kernel calls first
        spans = make()
        load = max(imbalance(spans, cu, window), _token_imbalance(spans, total))
        if load < best_load:
            best, best_load = spans, load
        if load <= _EVEN:
            break
    return best


def divided(count: int, parts: int, tile: int) -> tuple[Spans, ...]:
    """Rows [0, count) as nearly equal spans, at most one per part."""
    return _contiguous(count, parts, tile)


def tokens_of_rows(spans: Spans, rows: Spans) -> Spans:
    """The tokens that rows of a buffer hold, which has the tokens of `spans` in ascending order."""
    result, first = [], 0
    for start, stop in spans:
        own = intersection(rows, [(first, first + stop - start)])
        result += [(start + a - first, start + b - first) for a, b in own]
        first += stop - start
    return tuple(result)


def imbalance(spans: Sequence[Spans], cu: Sequence[int], window: Window) -> float:
    """The largest number of visible (query, key) pairs of a rank over the mean; 1 without pairs."""
    areas = [sum(visible_pairs(start, stop, cu, window) for start, stop in own) for own in spans]
    return max(areas) * len(areas) / sum(areas) if sum(areas) else 1.0


def _token_imbalance(spans: Sequence[Spans], total: int) -> float:
    """The largest number of tokens of a rank over the mean; a difference of one token does not count."""
    most = max(sum(stop - start for start, stop in own) for own in spans)
    return (most - 1) * len(spans) / total if total else 1.0


def joined(spans: Iterable[Span]) -> Spans:
    """Ascending spans without empty ones; spans that touch or overlap become one."""
    result: list[Span] = []
    for start, stop in spans:
        if start >= stop:
            continue
        if result and start <= result[-1][1]:
            result[-1] = (result[-1][0], max(stop, result[-1][1]))
        else:
            result.append((start, stop))
    return tuple(result)


def intersection(a: Sequence[Span], b: Sequence[Span]) -> Spans:
    """The common tokens of two lists of ascending disjoint spans."""
    result, i, j = [], 0, 0
    while i < len(a) and j < len(b):
        start, stop = max(a[i][0], b[j][0]), min(a[i][1], b[j][1])
        if start < stop:
            result.append((start, stop))
        if a[i][1] < b[j][1]:
            i += 1
        else:
            j += 1
    return tuple(result)


def segments(spans: Iterable[Span], cu: Sequence[int]) -> Iterator[Segment]:
    """The spans of a rank, divided at the bounds of documents."""
    row = 0
    for start, stop in spans:
        document = bisect_right(cu, start) - 1
        while start < stop:
            end = min(stop, cu[document + 1])
            if end > start:
                yield Segment(document, row, start, end)
                row += end - start
            start, document = max(start, end), document + 1


def visible_keys(segment: Segment, cu: Sequence[int], window: Window, multiple: int = 1) -> Span:
    """The keys that the queries of a segment see, its own included; they begin at a multiple of `multiple` tokens in
    the document, so the first ones may be invisible."""
    left, right = window
    first, last = cu[segment.document], cu[segment.document + 1]
    lo = first if left is None else max(first, rounded_down(segment.start - left, first, multiple))
    hi = last if right is None else min(last, segment.stop + right)
    return lo, hi


def required_keys(spans: Iterable[Span], cu: Sequence[int], window: Window, multiple: int = 1) -> Spans:
    """The keys that the queries in `spans` see; see `visible_keys`."""
    return joined(sorted(visible_keys(segment, cu, window, multiple) for segment in segments(spans, cu)))


def rounded_down(token: int, first: int, multiple: int) -> int:
    """The last token up to this one at a multiple of `multiple` tokens from the first one of the document."""
    return token - (token - first) % multiple


def begin_at_multiples(spans: Iterable[Spans], cu: Sequence[int], multiple: int) -> bool:
    """Whether every segment of every rank begins at a multiple of `multiple` tokens in its document."""
    return all((s.start - cu[s.document]) % multiple == 0 for own in spans for s in segments(own, cu))


def visible_pairs(start: int, stop: int, cu: Sequence[int], window: Window) -> int:
    """The number of visible (query, key) pairs of the queries [start, stop)."""
    left, right = window
    count = 0
    for document, _, a, b in segments(((start, stop),), cu):
        first, last = cu[document], cu[document + 1]
        ends = (b - a) * last if right is None else _sum_min(last, right + 1, a, b)
        begins = (b - a) * first if left is None else -_sum_min(-first, left, 1 - b, 1 - a)
        count += ends - begins
    return count


def _sum_min(limit: int, offset: int, a: int, b: int) -> int:
    """The sum of min(limit, i + offset) over i in [a, b)."""
    turn = min(max(limit - offset, a), b)  # i + offset is the smaller one below it
    return (turn - a) * offset + (a + turn - 1) * (turn - a) // 2 + (b - turn) * limit


def _chunks(total: int, count: int, tile: int) -> list[Span]:
    """`count` nearly equal chunks; long ones end at multiples of the tile."""
    step = max(1, tile)
    while step > 1 and _ROUNDED * step > total // count:
        step //= 2
    inner = [min(total, (2 * i * total + step * count) // (2 * step * count) * step) for i in range(1, count)]
    return list(zip([0, *inner], [*inner, total]))


def _contiguous(total: int, ranks: int, tile: int) -> tuple[Spans, ...]:
    return tuple(joined([chunk]) for chunk in _chunks(total, ranks, tile))


def _zigzag(total: int, ranks: int, tile: int) -> tuple[Spans, ...]:
    """Rank r has chunk r and the r-th last of 2 * ranks: equal work for all under a causal mask."""
    chunks = _chunks(total, 2 * ranks, tile)
    return tuple(joined([chunks[r], chunks[2 * ranks - 1 - r]]) for r in range(ranks))


def _by_documents(cu: Sequence[int], ranks: int, tile: int, window: Window, cut: int) -> tuple[Spans, ...]:
    """Whole documents, except for the `cut` longest, each a zigzag over all ranks. The longest document goes first, to
    the rank whose larger share, of work or of tokens, stays the smallest. Whole documents need no keys of others."""
    order = sorted(range(len(cu) - 1), key=lambda i: (cu[i] - cu[i + 1], i))
    owned: list[list[Span]] = [[] for _ in range(ranks)]
    for i in order[:cut]:
        for own, spans in zip(owned, _zigzag(cu[i + 1] - cu[i], ranks, tile)):
            own += [(cu[i] + start, cu[i] + stop) for start, stop in spans]
    works = [sum(visible_pairs(start, stop, cu, window) for start, stop in own) for own in owned]
    counts = [sum(stop - start for start, stop in own) for own in owned]
    weights = {i: visible_pairs(cu[i], cu[i + 1], cu, window) for i in order[cut:]}
    all_work, total = max(1, sum(works) + sum(weights.values())), max(1, cu[-1])
    for i, work in weights.items():
        count = cu[i + 1] - cu[i]
        shares = [max((works[r] + work) / all_work, (counts[r] + count) / total) for r in range(ranks)]
        rank = shares.index(min(shares))
        works[rank] += work
        counts[rank] += count
        owned[rank].append((cu[i], cu[i + 1]))
    return tuple(joined(sorted(own)) for own in owned)


def _by_load(cu: Sequence[int], ranks: int, tile: int, window: Window, longest: int) -> tuple[Spans, ...]:
    """Chunks in rounds of one per rank, the heaviest first; the heaviest of a round goes to the rank with least load.

    Ranks get equal numbers of chunks, and their loads differ by one chunk's load at most: a round adds w_1 >= ... >=
    w_R to loads in ascending order, so their spread becomes max(spread, w_1 - w_R) at most.
    """
    rounds = max(_CHUNKS_PER_RANK, -(-cu[-1] // (ranks * longest)))
    chunks = _chunks(cu[-1], rounds * ranks, tile)
    weights = [visible_pairs(start, stop, cu, window) for start, stop in chunks]
    order = sorted(range(len(chunks)), key=lambda i: (-weights[i], i))
    loads = [0] * ranks
    owned: list[list[Span]] = [[] for _ in range(ranks)]
    for first in range(0, len(order), ranks):
        receivers = sorted(range(ranks), key=lambda r: (loads[r], r))
        for rank, chunk in zip(receivers, order[first : first + ranks]):
            loads[rank] += weights[chunk]
            owned[rank].append(chunks[chunk])
    return tuple(joined(sorted(own)) for own in owned)
