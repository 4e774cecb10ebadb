"""Keys copied into other ranks' buffers: ranks are threads with the slots and signals of GPUs."""

from __future__ import annotations

import random
import threading

import pytest
import torch
from cases import Case
from cp_harness import check_result, run_rank, self_attention

from flash_attn.context_parallel import CpPlan, LocalGroup, flash_attn_cp_func
from flash_attn.context_parallel.exchange.local_group import LocalMesh, LocalRank
from flash_attn.context_parallel.exchange.peer_copies import Arriving
from flash_attn.context_parallel.plan.layouts import LAYOUTS, Layout, layout_spans
from flash_attn.context_parallel.plan.schedule import make_schedule
from flash_attn.context_parallel.plan.steps import Kind

SLOTS = 2


class Shared:
    """Memory that all ranks reach, with a signal for each slot and pair of ranks."""

    def __init__(self):
        self.lock, self.buffers, self.signals = threading.Condition(), {}, set()

    def buffer(self, rank, slot, index, rows, like):
        key = rank, slot, index, rows, like.shape[1:], like.dtype
        with self.lock:
            if key not in self.buffers:
                self.buffers[key] = like.new_full((rows, *like.shape[1:]), float("nan"))
            return self.buffers[key]


class PushingRank(LocalRank):
    def __init__(self, rank: LocalRank, shared: Shared):
        super().__init__(rank._links, rank.rank, rank._members)
        self.shared, self.count, self.unfinished = shared, 0, 0

    def push(self, tensors, key_rows, most_rows, copies):
        slot, shared = self.count % SLOTS, self.shared
        self.count += 1
        self.unfinished += 1
        rows_of = dict(copies)
        for peer in range(self.size):
            if peer == self.rank:
                continue
            for index, x in enumerate(tensors):
                there = shared.buffer(peer, slot, index, most_rows, x)
                for row, target, count in rows_of.get(peer, ()):
                    there[target : target + count] = x[row : row + count]
            with shared.lock:
                assert (peer, slot, self.rank) not in shared.signals  # the peer has read the last one
                shared.signals.add((peer, slot, self.rank))
                shared.lock.notify_all()
        buffers = [shared.buffer(self.rank, slot, i, most_rows, x)[:key_rows] for i, x in enumerate(tensors)]
        return Arriving(buffers, lambda: self.wait(slot), self.finish)

    def wait(self, slot):
        signals = {(self.rank, slot, peer) for peer in range(self.size) if peer != self.rank}
        with self.shared.lock:
            assert self.shared.lock.wait_for(lambda: signals <= self.shared.signals, timeout=30)
            self.shared.signals -= signals

    def finish(self):
        self.unfinished -= 1


def with_copies(size, function):
    shared = Shared()
    return LocalGroup(size).run(lambda rank: function(PushingRank(rank, shared)))


@pytest.mark.each
@pytest.mark.devices("cpu")
@pytest.mark.parametrize("ranks", [1, 2, 3, 5])
@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("options", [{"causal": True}, {"causal": True, "window_size": (9, 0)}, {}], ids=str)
def test_results_equal_those_of_messages(device, layout, ranks, options):
    whole = [torch.randn(2, 130, heads, 16, dtype=torch.float64) for heads in (4, 2, 2, 4)]

    def run(rank):
        plan = CpPlan.dense(130, group=rank, layout=layout, method="all_gather", tile=4)
        found = []
        for _ in range(3):  # layers
            *own, dout = (plan.shard(x, 1).requires_grad_() for x in whole)
            out = flash_attn_cp_func(*own, plan=plan, **options)
            found += [out.detach(), *torch.autograd.grad(out, own, dout.detach())]
        assert getattr(rank, "unfinished", 0) == 0
        return found

    for ours, theirs in zip(with_copies(ranks, run), LocalGroup(ranks).run(run)):
        assert all(torch.equal(a, b) for a, b in zip(ours, theirs))


@pytest.mark.devices("cpu")
@pytest.mark.parametrize("dropout", [0.0, 0.3])
def test_packed_documents(device, dropout):
    case = Case(3, 37, 37, 4, 2, 16, "float64", causal=True, kind="packed", dropout=dropout)
    problem, weights = self_attention(case, device)
    results = with_copies(3, lambda rank: run_rank(problem, weights, rank, method="all_gather"))
    check_result(problem, weights, results[0])


@pytest.mark.devices("cpu")
@pytest.mark.parametrize("heads", [(4, 2), (3, 1)], ids=str)
def test_the_first_dimension_of_a_mesh(device, heads):
    """Also if a rank's heads are several calls, each with copies."""
    problem, weights = self_attention(Case(2, 60, 60, *heads, 16, "float64", causal=True), device)
    shared = [Shared() for _ in range(2)]

    def run(rank):
        mesh = rank.mesh(3, 2)
        columns, row = mesh.get_group(0), mesh.get_group(1)
        pushing = PushingRank(columns, shared[row.rank])
        result = run_rank(problem, weights, LocalMesh(mesh.mesh, (pushing, row)), method="all_gather")
        assert pushing.count >= 2 and pushing.unfinished == 0
        return result

    check_result(problem, weights, LocalGroup(6).run(run)[0])


def test_rows_arrive_where_the_peer_reads_them():
    for _ in range(200):
        cu = (0, *sorted(random.sample(range(1, 200), random.randint(1, 5))))
        ranks, batch = random.choice((2, 3, 5)), random.choice((1, 2))
        layout = Layout(layout_spans(random.choice(LAYOUTS), cu, ranks, random.choice((1, 4)), (None, 0)), cu)
        window, backward = random.choice(((None, 0), (None, None), (7, 0))), random.choice((False, True))
        kind = Kind("all_gather", window, batch=batch)
        schedules = [make_schedule(layout, rank, kind, backward, by_copies=True) for rank in range(ranks)]
        for index in range(len(schedules[0].steps)):
            for rank in range(ranks):
                arrived, expected = {}, {}
                for peer, schedule in enumerate(schedules):
                    for row, target, count in dict(schedule.copies[index] or ()).get(rank, ()):
                        arrived.update({target + i: (peer, row + i) for i in range(count)})
                    sent = rows_of(schedule.steps[index].sends, rank)
                    received = rows_of(schedules[rank].steps[index].receives, peer)
                    expected.update(zip(received, ((peer, row) for row in sent)))
                assert arrived == expected


def rows_of(transfers, peer):
    return [row for start, count in dict(transfers).get(peer, ()) for row in range(start, start + count)]
