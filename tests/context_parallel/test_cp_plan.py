"""Plans of context parallelism: each token is on one rank, each visible pair computed once, no key sent in vain."""

import random

import pytest
import torch

from flash_attn.context_parallel import CpPlan, LocalGroup
from flash_attn.context_parallel.plan import steps
from flash_attn.context_parallel.plan.layouts import (
    LAYOUTS,
    Layout,
    begin_at_multiples,
    imbalance,
    layout_spans,
    required_keys,
    segments,
    visible_keys,
    visible_pairs,
)
from flash_attn.context_parallel.plan.schedule import make_schedule
from flash_attn.context_parallel.plan.steps import Kind, groups, make_steps
from flash_attn.dropout import MASK_COLUMNS

WINDOWS = ((None, None), (None, 0), (3, 0), (0, 0), (20, 0), (None, 2), (5, None), (4, 7))


def random_bounds(documents, lengths=(0, 1, 2, 5, 17, 40)):
    cu = [0]
    for _ in range(documents):
        cu.append(cu[-1] + random.choice(lengths))
    return tuple(cu)


def tokens(spans):
    return [token for start, stop in spans for token in range(start, stop)]


def document_of(token, cu):
    return next(i for i in range(len(cu) - 1) if cu[i] <= token < cu[i + 1])


def sees(query, key, cu, window):
    left, right = window
    near = (left is None or query - key <= left) and (right is None or key - query <= right)
    return near and document_of(query, cu) == document_of(key, cu)


def visible_set(queries, cu, window):
    return {(i, j) for i in queries for j in range(cu[-1]) if sees(i, j, cu, window)}


def random_problems(count):
    for _ in range(count):
        cu = random_bounds(random.randint(1, 6))
        layout, ranks = random.choice(LAYOUTS), random.choice((1, 2, 3, 5, 8))
        window = random.choice(WINDOWS)
        yield Layout(layout_spans(layout, cu, ranks, random.choice((1, 4, 128)), window), cu), window


def test_each_token_is_on_one_rank():
    for layout, _ in random_problems(200):
        assert sorted(token for spans in layout.spans for token in tokens(spans)) == list(range(layout.cu[-1]))
        for spans in layout.spans:
            assert tokens(spans) == sorted(tokens(spans))


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("ranks", [64, 1024])
def test_many_ranks(layout, ranks):
    for cu in ((0, 1 << 20), random_bounds(300, (1, 100, 3000, 20000)), (0, 5), (0, 0)):
        spans = layout_spans(layout, cu, ranks, 128, (None, 0))
        every = sorted(span for own in spans for span in own)
        assert [a for a, _ in every[1:]] == [b for _, b in every[:-1]]
        assert not every or (every[0][0], every[-1][1]) == (0, cu[-1])
        counts = [sum(stop - start for start, stop in own) for own in spans]
        assert max(counts) <= 1.1 * cu[-1] / ranks + 2


def test_chunks_end_at_tiles():
    for layout in LAYOUTS:
        spans = layout_spans(layout, (0, 1 << 20), 8, 128, (None, 0))
        assert all(start % 128 == 0 and stop % 128 == 0 for own in spans for start, stop in own)


@pytest.mark.parametrize("ranks", [2, 8, 64])
def test_balance(ranks):
    for _ in range(5):
        cu = random_bounds(random.randint(1, 5 * ranks), (128, 500, 3000, 9000, 65536))
        cu = tuple(min(bound, 65536 * ranks) for bound in cu)
        for window in ((None, 0), (4096, 0), (None, None)):
            even = layout_spans("balanced", cu, ranks, 128, window)
            if cu[-1] >= 16384 * ranks:
                assert imbalance(even, cu, window) <= 1.05
    whole = (0, 65536 * ranks)
    assert imbalance(layout_spans("zigzag", whole, ranks, 128, (None, 0)), whole, (None, 0)) <= 1.001
    assert imbalance(layout_spans("contiguous", whole, ranks, 128, (None, 0)), whole, (None, 0)) > 1.4


def test_few_long_documents_get_shorter_chunks():
    """Without a mask all chunks of a document have the same work: few of them cannot be divided evenly."""
    cu = (0, 65536, 74536, 83536)
    assert imbalance(layout_spans("balanced", cu, 8, 128, (None, None)), cu, (None, None)) <= 1.05


def test_loads_differ_by_one_chunk_at_most():
    """The bound in the docstring of _by_load, if no simpler layout is even."""
    for _ in range(20):
        cu, ranks = random_bounds(20, (3, 70, 500, 4000)), random.choice((2, 3, 7))
        window = (None, 0)
        spans = layout_spans("balanced", cu, ranks, 1, window)
        loads = [sum(visible_pairs(a, b, cu, window) for a, b in own) for own in spans]
        longest = -(-cu[-1] // (8 * ranks)) + 1
        heaviest = max((visible_pairs(a, min(cu[-1], a + longest), cu, window) for a in range(0, cu[-1], 7)), default=0)
        assert max(loads) - min(loads) <= max(heaviest, 0.05 * sum(loads))


def test_documents_stay_whole_if_that_is_even():
    """No keys are sent then. A long document becomes a zigzag, the others stay whole."""
    lengths = (9000, 300, 4000, 3000, 8000, 500, 2000, 2500, 700, 4200, 1500, 300, 200, 600, 4000)
    for longest, cut in ((), 0), ((60000,), 1):
        cu = [0]
        for length in (*lengths, *longest):
            cu.append(cu[-1] + length)
        spans = layout_spans("balanced", tuple(cu), 2, 128, (None, 0))
        assert imbalance(spans, cu, (None, 0)) <= 1.05
        counts = [sum(stop - start for start, stop in own) for own in spans]
        assert max(counts) <= 1.05 * cu[-1] / 2 + 1
        parts = [{r for r, own in enumerate(spans) for x, y in own if x < b and a < y} for a, b in zip(cu, cu[1:])]
        assert sum(len(ranks) > 1 for ranks in parts) == cut


def test_visible_pairs_and_keys():
    for layout, window in random_problems(60):
        cu = layout.cu
        for own in layout.spans:
            assert sum(visible_pairs(a, b, cu, window) for a, b in own) == len(visible_set(tokens(own), cu, window))
            expected = {j for _, j in visible_set(tokens(own), cu, window)}
            assert set(tokens(required_keys(own, cu, window))) == expected
            for segment in segments(own, cu):
                lo, hi = visible_keys(segment, cu, window)
                own_tokens = range(segment.start, segment.stop)
                assert set(range(lo, hi)) == {j for _, j in visible_set(own_tokens, cu, window)}


def pairs_of_call(pair, own, keys):
    """The (query, key) tokens of a call, whose mask backends align to the bottom right."""
    rows, cols = pair.q1 - pair.q0, pair.k1 - pair.k0
    for i in range(rows):
        position = i + cols - rows
        for j in range(cols):
            if (pair.left < 0 or position - pair.left <= j) and (pair.right < 0 or j <= position + pair.right):
                yield own[pair.q0 + i], keys[pair.k0 + j]


def keys_of(layout, rank, step):
    """The tokens in a step's buffer before messages arrive."""
    own = tokens(layout.spans[rank])
    if step.is_local:
        return own[: step.key_rows]
    keys = [None] * step.key_rows
    for (row, count), (key, _) in zip(*step.own):
        keys[key : key + count] = own[row : row + count]
    return keys


def rows_of(transfers, peer):
    """The rows that go to a peer or come from it, in order."""
    return [row for start, count in dict(transfers).get(peer, ()) for row in range(start, start + count)]


@pytest.mark.parametrize("method", steps.KEY_METHODS)
@pytest.mark.parametrize("exact_positions", [False, True])
@pytest.mark.parametrize("backward, batch", [(False, 1), (True, 1), (False, 2), (True, 2)])
def test_each_visible_pair_is_computed_once(method, exact_positions, backward, batch, monkeypatch):
    monkeypatch.setattr(steps, "_ROWS", 1)  # short segments are divided too
    for layout, window in random_problems(40):
        layout = layout.batched(batch)
        kind = Kind(method, window, exact_positions, batch)
        every = [make_steps(layout, rank, kind, backward) for rank in range(layout.ranks)]
        for rank, own_steps in enumerate(every):
            own, computed, received = tokens(layout.spans[rank]), [], []
            for index, step in enumerate(own_steps):
                keys = keys_of(layout, rank, step)
                for peer in range(layout.ranks):
                    sent = rows_of(every[peer][index].sends, rank)
                    expected = rows_of(step.receives, peer)
                    assert len(sent) == len(expected)
                    theirs = tokens(layout.spans[peer])
                    for source, target in zip(sent, expected):
                        keys[target] = theirs[source]
                        received.append(theirs[source])
                assert None not in keys
                for pair in step.pairs:
                    computed += pairs_of_call(pair, own, keys)
                    first = layout.cu[pair.document]
                    assert (own[pair.q0] - first, keys[pair.k0] - first) == (pair.row, pair.col)
                    if exact_positions:
                        assert keys[pair.k1 - 1] - keys[pair.k0] == pair.k1 - 1 - pair.k0
            expected = visible_set(own, layout.cu, window)
            assert len(computed) == len(set(computed)) and set(computed) == expected
            others = {j for _, j in expected} - set(own)
            assert len(received) == len(set(received)) and set(received) >= others  # each required key once
            unseen = set(received) - others
            if not exact_positions:
                assert not unseen
            assert all(any(token < other < token + MASK_COLUMNS for other in others | set(own)) for token in unseen)


def test_every_method_has_its_own_steps():
    """make_steps() knows each: one that it does not know would run as all_gather."""
    layout = Layout(layout_spans("contiguous", (0, 768), 3, 128, (None, None)), (0, 768))
    found = {make_steps(layout, 1, Kind(method, (None, None))) for method in steps.KEY_METHODS}
    assert len(found) == len(steps.KEY_METHODS)


@pytest.mark.parametrize("method", steps.KEY_METHODS)
@pytest.mark.parametrize("backward", [False, True])
def test_keys_begin_at_mask_columns(method, backward):
    """With exact positions: all_gather always, ring if the ranks' chunks begin there."""
    checked = 0
    for layout, window in random_problems(200):
        if method in steps.CHUNK_METHODS and not begin_at_multiples(layout.spans, layout.cu, MASK_COLUMNS):
            continue
        for rank in range(layout.ranks):
            pairs = [p for step in make_steps(layout, rank, Kind(method, window, True), backward) for p in step.pairs]
            assert all(pair.col % MASK_COLUMNS == 0 for pair in pairs)
            checked += len(pairs)
    assert checked > 0


@pytest.mark.parametrize("method", steps.KEY_METHODS)
def test_gradients_go_where_keys_came_from(method):
    for layout, window in random_problems(60):
        kind = Kind(method, window)
        every = [make_steps(layout, rank, kind, backward=True) for rank in range(layout.ranks)]
        for index in range(len(every[0])):
            for rank, step in enumerate(own[index] for own in every):
                for number, (_, received) in enumerate(step.returns):
                    for peer, _ in received:
                        sent = every[peer][index].returns[number][0]
                        assert len(rows_of(sent, rank)) == len(rows_of(received, peer))
                assert sorted(x for sent, _ in step.returns for x in sent) == sorted(step.receives)
                assert sorted(x for _, received in step.returns for x in received) == sorted(step.sends)


def test_groups_have_ascending_rows():
    for layout, window in random_problems(60):
        for rank in range(layout.ranks):
            for step in make_steps(layout, rank, Kind("ring", window)):
                for ascending in (True, False):
                    found = groups(step.pairs, ascending)
                    assert sorted(pair for group in found for pair in group) == sorted(step.pairs)
                    for group in found:
                        for a, b in zip(group, group[1:]):
                            assert a.q1 <= b.q0 and (a.k1 <= b.k0 or not ascending)


@pytest.mark.parametrize("method", steps.KEY_METHODS)
@pytest.mark.parametrize("layout", LAYOUTS)
def test_a_thousand_ranks(method, layout):
    """Steps of some ranks: they have all visible pairs, and receive what the others send."""
    cu, ranks = random_bounds(400, (1, 100, 3000, 20000)), 1024
    window = random.choice(((None, 0), (4096, 0)))
    made = Layout(layout_spans(layout, cu, ranks, 128, window), cu)
    chosen = random.sample(range(ranks), 3)
    plans = {rank: make_steps(made, rank, Kind(method, window)) for rank in chosen}
    for rank, own_steps in plans.items():
        pairs = [pair for step in own_steps for pair in step.pairs]
        expected = sum(visible_pairs(start, stop, cu, window) for start, stop in made.spans[rank])
        assert sum(seen_pairs(pair) for pair in pairs) == expected
        received = sum(count for step in own_steps for _, ranges in step.receives for _, count in ranges)
        own = made.tokens_of(rank)
        assert received == sum(b - a for a, b in required_keys(made.spans[rank], cu, window)) - own
        for peer, theirs in plans.items():
            for ours, other in zip(own_steps, theirs):
                assert len(rows_of(other.sends, rank)) == len(rows_of(ours.receives, peer))


def seen_pairs(pair):
    """The number of visible scores of a pair, whose mask is aligned to the bottom right."""
    rows, cols = pair.q1 - pair.q0, pair.k1 - pair.k0
    count = 0
    for i in range(rows):
        position = i + cols - rows
        first = max(0, position - pair.left) if pair.left >= 0 else 0
        last = min(cols - 1, position + pair.right) if pair.right >= 0 else cols - 1
        count += max(0, last - first + 1)
    return count


def test_a_causal_zigzag_ring_has_one_call_per_step():
    """A rank's second chunk sees both chunks of a later rank whole, in one call."""
    layout = Layout(layout_spans("zigzag", (0, 4096), 4, 128, (None, 0)), (0, 4096))
    for rank in range(4):
        own, *others = make_steps(layout, rank, Kind("ring", (None, 0)))
        assert [len(step.pairs) for step in others] == [1, 1, 1]
        assert all(step.pairs[0].is_full for step in others)
        assert len(groups(own.pairs, False)) == 1 and len(groups(own.pairs, True)) <= 2


def test_a_causal_zigzag_computes_during_transfers():
    """all_gather: the first rank has rows that need no other keys, the last has none; all divide the backward of their
    own keys, a quarter before the others' keys and the rest after them."""
    layout = Layout(layout_spans("zigzag", (0, 4096), 2, 128, (None, 0)), (0, 4096))
    first, second = (make_steps(layout, rank, Kind("all_gather", (None, 0))) for rank in range(2))
    assert [(step.is_local, len(step.pairs)) for step in first] == [(True, 1), (False, 1)]
    assert (first[0].pairs[0].q1, first[1].pairs[0].q0) == (1024, 1024)
    assert [(step.is_local, len(step.pairs)) for step in second] == [(True, 0), (False, 1)]
    windowed = Layout(layout_spans("contiguous", (0, 4096), 2, 128, (256, 0)), (0, 4096))
    own, others = make_steps(windowed, 1, Kind("all_gather", (256, 0)))
    assert [(pair.q0, pair.q1) for pair in (*own.pairs, *others.pairs)] == [(256, 2048), (0, 256)]
    for rank in range(2):
        schedule = make_schedule(layout, rank, Kind("all_gather", (None, 0)), backward=True)
        (early,), (middle,), (late,) = schedule.calls
        assert early.parts == ((0, 1024, True),) and late.rows[0] == 1024 and schedule.depth == 2
        first_half = [] if middle.rows[0] else [(0, 1024, False)]
        assert list(middle.parts) == [*first_half, (1024, 1024, True)] and late.parts == ((1024, 1024, False),)


def test_slots_and_parts(monkeypatch):
    """Slots never overlap, and each row is written once before anything is added to it."""
    monkeypatch.setattr(steps, "_ROWS", 1)  # short segments are divided too
    for layout, window in random_problems(60):
        for rank, backward in ((r, b) for r in range(layout.ranks) for b in (False, True)):
            rows = layout.tokens_of(rank)
            for method, batch in (("ring", 1), ("all_gather", 1), ("ring", 2)):
                schedule = make_schedule(layout, rank, Kind(method, window, False, batch), backward)
                slots, results = [set() for _ in range(schedule.slots)], {}
                for call in (call for calls in schedule.calls for call in calls):
                    own = set(range(*call.rows))
                    assert not slots[call.slot] & own
                    slots[call.slot] |= own
                    for start, count, is_first in call.parts:
                        for row in range(start, start + count):
                            assert (row not in results) == is_first
                            results[row] = results.get(row, 0) + 1
                    assert own == {row for start, count, _ in call.parts for row in range(start, start + count)}
                assert set(results) == set(range(batch * rows))
                assert schedule.depth <= max(results.values(), default=0)
                assert set().union(*slots) == set(results)
                if slots and schedule.slot_0_is_full:
                    assert slots[0] == set(results)


def test_a_window_sends_only_what_it_needs():
    plans = LocalGroup(8).run(lambda rank: CpPlan.dense(1 << 17, group=rank, layout="contiguous"))
    received = [plan.received_tokens(causal=True, window_size=(4096, 0)) for plan in plans]
    assert received == [0] + [4096] * 7
    zigzag = LocalGroup(8).run(lambda rank: CpPlan.dense(1 << 17, group=rank))
    chunk = (1 << 17) // 16
    assert [plan.received_tokens(causal=True) for plan in zigzag] == [
        (16 - r) * chunk - 2 * chunk for r in range(8)
    ]  # fmt: skip


def test_shard_and_unshard_are_inverse():
    cu = (0, 3, 3, 40, 41, 77)
    x = torch.randn(2, 77, 3)

    def run(rank):
        plan = CpPlan.varlen(cu, group=rank, layout="zigzag")
        part = plan.shard(x, 1)
        assert part.shape == (2, plan.num_tokens, 3)
        assert torch.equal(part, x[:, plan.token_indices()])
        assert torch.equal(plan.unshard(part, 1), x) and torch.equal(plan.unshard(part, -2), x)
        starts = torch.tensor(cu)
        indices = plan.token_indices()
        documents = torch.searchsorted(starts, indices, right=True) - 1
        assert torch.equal(plan.positions(), indices - starts[documents])
        return plan.num_tokens

    for size in (1, 2, 5):
        assert sum(LocalGroup(size).run(run)) == 77


def test_unshard_sums_the_gradients_of_all_ranks():
    weights = torch.randn(3, 10)

    def run(rank):
        plan = CpPlan.dense(10, group=rank, layout="zigzag")
        own = plan.shard(torch.arange(10.0), 0).requires_grad_()
        (plan.unshard(own, 0) * weights[plan.rank]).sum().backward()
        assert torch.allclose(own.grad, plan.shard(weights.sum(0), 0))

    LocalGroup(3).run(run)


def test_cu_seqlens_may_be_a_tensor():
    plan = LocalGroup(1).run(lambda rank: CpPlan.varlen(torch.tensor([0, 4, 9]), group=rank))[0]
    assert plan.cu_seqlens == (0, 4, 9) and plan.is_packed
    assert "2 documents" in repr(plan)


@pytest.mark.parametrize(
    "arguments, message",
    [
        ({"cu_seqlens": [0, 5, 3]}, "cu_seqlens: expected ascending ints"),
        ({"cu_seqlens": [1, 5]}, "cu_seqlens: expected ascending ints"),
        ({"cu_seqlens": torch.tensor([0.0, 5.0])}, "cu_seqlens: expected ascending ints"),
        ({"layout": "stripe"}, "layout: expected one of zigzag, contiguous, balanced"),
        ({"method": "p2p"}, f"method: expected one of auto, {', '.join(steps.METHODS)}"),
        ({"check": "often"}, "check: expected one of calls, plan, none"),
        ({"tile": 0}, "tile: expected a value >= 1"),
        ({"window_size": 3}, "window_size: expected a pair"),
    ],
)
def test_bad_plans_raise_on_all_ranks(arguments, message):
    """Also on the ranks with valid arguments: none waits."""

    def run(rank):
        bad = {"cu_seqlens": [0, 5], **arguments} if rank.rank == 1 else {"cu_seqlens": [0, 5]}
        expected = message if rank.rank == 1 else r"CpPlan: expected valid arguments on every rank, got .* \[1\]"
        with pytest.raises((RuntimeError, TypeError), match=expected):
            CpPlan.varlen(**bad, group=rank)
        return True

    assert LocalGroup(3).run(run) == [True] * 3


def test_different_plans_raise_on_all_ranks():
    def run(rank):
        with pytest.raises(RuntimeError, match=r"CpPlan: expected the same on every rank, got others on ranks \[2\]"):
            CpPlan.varlen([0, 5 + rank.rank // 2], group=rank)
        return True

    assert LocalGroup(3).run(run) == [True] * 3


def test_a_group_is_needed():
    with pytest.raises(RuntimeError, match="group: expected torch.distributed to be initialised"):
        CpPlan.dense(10)


def test_an_error_of_a_rank_ends_the_others():
    def run(rank):
        if rank.rank == 1:
            raise ValueError("of rank 1")
        return rank.all_gather_ints([rank.rank])

    with pytest.raises(ValueError, match="of rank 1"):
        LocalGroup(3).run(run)
