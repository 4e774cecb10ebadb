"""Which tokens each rank holds: spans [start, stop) of the global order, and how much attention they are.

Plain integers, no torch: every rank computes the same from the same lengths. A window here is (left, right) with None
for unbounded; documents are given by their bounds `cu`, ascending from 0 to the number of tokens.
"""

from __future__ import annotations

import math
from bisect import bisect_right
from collections.abc import Iterator, Sequence
from typing import NamedTuple, Optional

Span = tuple[int, int]
Window = tuple[Optional[int], Optional[int]]

LAYOUTS = ("zigzag", "contiguous", "balanced")
_CHUNKS_PER_RANK = 8  # of the balanced layout, at least
_LONGEST_CHUNKS = (2048, 512)  # tokens of the balanced layout; the next one if the first is not even
_CUT_DOCUMENTS = (0, 1, 2, 4, 8, 16)  # of the longest, the next number if what remains is not even
_ROUNDED = 32  # a chunk ends at a multiple of the tile only if it is this many tiles long: else of a part of the tile
_EVEN = 1.05  # largest load and number of tokens over the mean that count as balanced


class Segment(NamedTuple):
    """Consecutive tokens [start, stop) of one document that a rank holds, its local rows from `row` on."""

    document: int
    row: int
    start: int
    stop: int


def layout_spans(layout: str, cu: Sequence[int], ranks: int, tile: int, window: Window) -> tuple[tuple[Span, ...], ...]:
    """The spans of every rank, ascending and disjoint; together they are all tokens."""
    total = cu[-1]
    if layout == "contiguous":
        return _contiguous(total, ranks, tile)
    if layout == "zigzag":
        return _zigzag(total, ranks, tile)
    candidates = [lambda: _contiguous(total, ranks, tile), lambda: _zigzag(total, ranks, tile)]
    if len(cu) > 2:
        candidates[1:1] = [lambda cut=cut: _by_documents(cu, ranks, tile, window, cut) for cut in _CUT_DOCUMENTS]
    candidates += [lambda longest=longest: _by_load(cu, ranks, tile, window, longest) for longest in _LONGEST_CHUNKS]
    best, best_load = None, math.inf
    for make in candidates:  # those with less to send and fewer calls first
        spans = make()
        load = max(imbalance(spans, cu, window), _unevenness(spans, total))
        if load < best_load:
            best, best_load = spans, load
        if load <= _EVEN:
            break
    return best


def divided(count: int, parts: int, tile: int) -> tuple[tuple[Span, ...], ...]:
    """Rows [0, count) as nearly equal spans, at most one for each part."""
    return _contiguous(count, parts, tile)


def tokens_of_rows(spans, rows) -> tuple[Span, ...]:
    """The tokens of some rows of those that lie in `spans`; both ascending."""
    result, first = [], 0
    for start, stop in spans:
        own = intersection(rows, [(first, first + stop - start)])
        result += [(start + a - first, start + b - first) for a, b in own]
        first += stop - start
    return tuple(result)


def imbalance(spans, cu: Sequence[int], window: Window) -> float:
    """The largest number of visible (query, key) pairs of a rank over the mean; 1 without any."""
    areas = [sum(visible_pairs(start, stop, cu, window) for start, stop in own) for own in spans]
    return max(areas) * len(areas) / sum(areas) if sum(areas) else 1.0


def joined(spans) -> tuple[Span, ...]:
    """Ascending spans without empty ones, those that touch or overlap as one."""
    result: list[Span] = []
    for start, stop in spans:
        if start >= stop:
            continue
        if result and start <= result[-1][1]:
            result[-1] = (result[-1][0], max(stop, result[-1][1]))
        else:
            result.append((start, stop))
    return tuple(result)


def intersection(a, b) -> tuple[Span, ...]:
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


def segments(spans, cu: Sequence[int]) -> Iterator[Segment]:
    """The spans of a rank, divided at the ends of documents."""
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
    """The keys that some query of a segment sees; its own are among them. They begin at a multiple of `multiple` in the
    document, with keys that none sees."""
    left, right = window
    first, last = cu[segment.document], cu[segment.document + 1]
    lo = first if left is None else max(first, rounded_down(segment.start - left, first, multiple))
    hi = last if right is None else min(last, segment.stop + right)
    return lo, hi


def required_keys(spans, cu: Sequence[int], window: Window, multiple: int = 1) -> tuple[Span, ...]:
    """The keys that the queries in `spans` see, of each segment from a multiple of `multiple` in the document on."""
    return joined(sorted(visible_keys(segment, cu, window, multiple) for segment in segments(spans, cu)))


def rounded_down(token: int, first: int, multiple: int) -> int:
    """The last token up to this one that is a multiple of `multiple` tokens from the first one of the document."""
    return token - (token - first) % multiple


def begin_at_multiples(spans, cu: Sequence[int], multiple: int) -> bool:
    """Whether every segment of every rank begins at a multiple of `multiple` in its document."""
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
    turn = min(max(limit - offset, a), b)  # below it the second is smaller
    return (turn - a) * offset + (a + turn - 1) * (turn - a) // 2 + (b - turn) * limit


def _bounds(total: int, count: int, tile: int) -> list[int]:
    """count + 1 bounds of nearly equal chunks, at multiples of the tile where chunks are long."""
    step = max(1, tile)
    while step > 1 and _ROUNDED * step > total // count:
        step //= 2
    inner = [min(total, (2 * i * total + step * count) // (2 * step * count) * step) for i in range(1, count)]
    return [0, *inner, total]


def _contiguous(total: int, ranks: int, tile: int):
    bounds = _bounds(total, ranks, tile)
    return tuple(joined([(bounds[r], bounds[r + 1])]) for r in range(ranks))


def _zigzag(total: int, ranks: int, tile: int):
    """Rank r has chunk r and the r-th from the end of 2 * ranks: under a causal mask all have the same work."""
    bounds = _bounds(total, 2 * ranks, tile)
    chunks = list(zip(bounds, bounds[1:]))
    return tuple(joined([chunks[r], chunks[2 * ranks - 1 - r]]) for r in range(ranks))


def _unevenness(spans, total: int) -> float:
    """The largest number of tokens of a rank over the mean, where single tokens do not count."""
    most = max(sum(stop - start for start, stop in own) for own in spans)
    return (most - 1) * len(spans) / total if total else 1.0


def _by_documents(cu: Sequence[int], ranks: int, tile: int, window: Window, cut: int):
    """Whole documents, but for the `cut` longest, each in a zigzag of its own: the longest first to the rank whose
    larger share, of the work or of the tokens, stays the smallest. What is not cut needs no keys of other ranks."""
    order = sorted(range(len(cu) - 1), key=lambda i: (cu[i] - cu[i + 1], i))
    owned = [[] for _ in range(ranks)]
    for i in order[:cut]:
        for own, spans in zip(owned, _zigzag(cu[i + 1] - cu[i], ranks, tile)):
            own += [(cu[i] + start, cu[i] + stop) for start, stop in spans]
    works = [sum(visible_pairs(start, stop, cu, window) for start, stop in own) for own in owned]
    counts = [sum(stop - start for start, stop in own) for own in owned]
    weights = {i: visible_pairs(cu[i], cu[i + 1], cu, window) for i in order[cut:]}
    all_work, total = max(1, sum(works) + sum(weights.values())), max(1, cu[-1])
    for i, work in weights.items():
        count = cu[i + 1] - cu[i]

        def share(r, work=work, count=count):
            return max((works[r] + work) / all_work, (counts[r] + count) / total), r

        rank = min(range(ranks), key=share)
        works[rank] += work
        counts[rank] += count
        owned[rank].append((cu[i], cu[i + 1]))
    return tuple(joined(sorted(own)) for own in owned)


def _by_load(cu: Sequence[int], ranks: int, tile: int, window: Window, longest: int):
    """Chunks in rounds of one per rank, the heaviest first, each round's heaviest to the rank with the least load.

    So ranks have equal numbers of tokens, and their loads differ by one chunk's load at most: a round adds w_1 >= ...
    >= w_R to loads in ascending order, which makes their spread max(spread, w_1 - w_R) at most.
    """
    total = cu[-1]
    rounds = max(_CHUNKS_PER_RANK, -(-total // (ranks * longest)))
    bounds = _bounds(total, rounds * ranks, tile)
    chunks = list(zip(bounds, bounds[1:]))
    weights = [visible_pairs(start, stop, cu, window) for start, stop in chunks]
    order = sorted(range(len(chunks)), key=lambda i: (-weights[i], i))
    loads, owned = [0] * ranks, [[] for _ in range(ranks)]
    for first in range(0, len(order), ranks):
        receivers = sorted(range(ranks), key=lambda r: (loads[r], r))
        for rank, chunk in zip(receivers, order[first : first + ranks]):
            loads[rank] += weights[chunk]
            owned[rank].append(chunks[chunk])
    return tuple(joined(sorted(own)) for own in owned)
