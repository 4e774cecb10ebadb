"""Limits of context parallelism: few tokens, errors of some ranks, memory in use, threads."""

import threading
import weakref
from concurrent.futures import ThreadPoolExecutor

import pytest
import torch
from cases import Case
from cp_harness import check_result, make_plan, run_local, self_attention
from cp_kernel_harness import half

from flash_attn import flash_attn_func, flash_attn_varlen_func
from flash_attn.context_parallel import (
    CpCache,
    CpPlan,
    LocalGroup,
    attention_call,
    flash_attn_cp_func,
    flash_attn_cp_kvcache,
)
from flash_attn.context_parallel.compute import sums
from flash_attn.context_parallel.exchange import transfers
from flash_attn.context_parallel.exchange.local_group import LocalRank
from flash_attn.context_parallel.plan.steps import METHODS, Kind

RANKS = 4
SHAPES = [(0, 3), (1, 0), (2, 1), (2, 3), (1, 5)]  # batch, tokens
DOCUMENTS = [(0,), (0, 0), (0, 1), (0, 0, 1, 1, 2, 2), (0, 1, 2, 3, 4), (0, 3, 3, 4, 7)]


def attention(function, inputs):
    """(out, LSE, dq, dk, dv) of a function of q, k and v; gradients of all results together."""
    leaves = [x.detach().requires_grad_() for x in inputs]
    out, lse = function(*leaves)
    (out.double().sum() + lse[lse.isfinite()].double().sum()).backward()
    return [out.detach(), lse.detach(), *(x.grad for x in leaves)]


def compare(make, leading, alone, device, **options):
    """The joined results of RANKS ranks equal those of one."""
    dtype = torch.float64 if device == "cpu" else torch.bfloat16
    whole = [torch.randn(*leading, heads, 8, dtype=dtype, device=device) for heads in (4, 2, 2)]
    axis = len(leading) - 1
    expected = attention(alone, whole)

    def run(rank):
        plan = make(rank)

        def function(q, k, v):
            return flash_attn_cp_func(q, k, v, plan=plan, return_attn_probs=True, **options)[:2]

        found = attention(function, [plan.shard(x, axis) for x in whole])
        return [plan.unshard(x, -1 if i == 1 else axis) for i, x in enumerate(found)]

    for found in LocalGroup(RANKS).run(run):
        for ours, theirs in zip(found, expected):
            assert torch.equal(ours.isinf(), theirs.isinf())
            tolerance = 1e-10 if device == "cpu" else 5e-2
            torch.testing.assert_close(ours.nan_to_num(posinf=0), theirs.nan_to_num(posinf=0), atol=tolerance, rtol=0)


MASKS = [{"causal": True}, {"window_size": (1, 1)}]


@pytest.mark.parametrize("method", METHODS)
@pytest.mark.parametrize("mask", MASKS, ids=["causal", "window"])
@pytest.mark.parametrize("batch, tokens", SHAPES)
def test_few_tokens(device, method, mask, batch, tokens):
    """Ranks without tokens, no batch, and no tokens."""

    def alone(q, k, v):
        return flash_attn_func(q, k, v, return_attn_probs=True, **mask)[:2]

    compare(lambda rank: CpPlan.dense(tokens, group=rank, method=method), (batch, tokens), alone, device, **mask)


@pytest.mark.each
@pytest.mark.parametrize("method", METHODS)
@pytest.mark.parametrize("layout", ["zigzag", "balanced"])
@pytest.mark.parametrize("cu", DOCUMENTS, ids=str)
def test_documents_of_zero_and_one_tokens(device, method, layout, cu):
    bounds, longest = (
        torch.tensor(cu, dtype=torch.int32, device=device),
        max(map(lambda a, b: b - a, cu, cu[1:]), default=0),
    )

    def alone(q, k, v):
        options = {"causal": True, "return_attn_probs": True}
        return flash_attn_varlen_func(q, k, v, bounds, bounds, longest, longest, **options)[:2]

    def make(rank):
        return CpPlan.varlen(cu, group=rank, method=method, layout=layout)

    compare(make, (cu[-1],), alone, device, causal=True)


def raises_on_all(tokens, call, message, size=3):
    """Every rank raises its error."""

    def run(rank):
        plan = CpPlan.dense(tokens, group=rank)
        q = torch.randn(1, plan.num_tokens, 2, 8)
        with pytest.raises((RuntimeError, TypeError, ValueError, NotImplementedError), match=message):
            call(q, plan)
        return True

    assert LocalGroup(size).run(run) == [True] * size


WRONG_EVERYWHERE = [
    ({"softcap": -1.0}, "softcap: expected a value >= 0"),
    ({"softmax_scale": float("inf")}, "softmax_scale: expected a finite value"),
    ({"dropout_p": float("nan")}, r"dropout_p: expected a value in \[0, 1\)"),
    ({"sinks": torch.ones(2, dtype=torch.int32)}, "sinks: expected float32"),
    ({"lse_convention": "fa4"}, "lse_convention: expected one of"),
]


@pytest.mark.parametrize("options, message", WRONG_EVERYWHERE, ids=[next(iter(o)) for o, _ in WRONG_EVERYWHERE])
def test_ranks_without_tokens_raise_too(options, message):
    """They do not call the backend, which would find the error."""
    raises_on_all(1, lambda q, plan: flash_attn_cp_func(q, q, q, plan=plan, **options), message)
    raises_on_all(1, lambda q, plan: flash_attn_cp_func(q.long(), q.long(), q.long(), plan=plan), "q: expected one of")


class Odd:
    """A window that raises an unexpected error."""

    def __iter__(self):
        raise KeyError("odd")


def test_unexpected_errors_raise_on_all_ranks():
    """A KeyError from one rank's arguments: the others do not wait."""

    def run(rank):
        odd = {"window_size": Odd()} if rank.rank == 1 else {}
        with pytest.raises(KeyError if odd else RuntimeError):
            CpPlan.dense(8, group=rank, **odd)
        plan = CpPlan.dense(8, group=rank)
        q = torch.randn(1, plan.num_tokens, 2, 8)
        with pytest.raises(KeyError if odd else RuntimeError):
            flash_attn_cp_func(q, q, q, plan=plan, **odd)
        return flash_attn_cp_func(q, q, q, plan=plan).shape == q.shape

    assert LocalGroup(3).run(run) == [True] * 3


@pytest.mark.parametrize("change", ["tokens", "dtype", "axis", "gradient"])
def test_different_unshards_raise_on_all_ranks(change):
    def run(rank):
        plan = CpPlan.dense(9, group=rank)
        y, dim = torch.zeros(plan.num_tokens, plan.num_tokens, 2), 0
        if rank.rank == 1:
            y = {"tokens": y[1:], "dtype": y.double(), "axis": y, "gradient": y.requires_grad_()}[change]
            dim = 1 if change == "axis" else 0
        with pytest.raises(RuntimeError, match="unshard: expected|y: expected"):
            plan.unshard(y, dim)
        return torch.equal(plan.unshard(plan.shard(torch.arange(9), 0), 0), torch.arange(9))

    assert LocalGroup(3).run(run) == [True] * 3


def test_the_others_do_not_wait_for_a_rank_that_has_ended():
    group = LocalGroup(3)

    def run(rank):
        plan = CpPlan.dense(8, group=rank)
        return None if rank.rank == 1 else plan.unshard(torch.zeros(plan.num_tokens), 0)

    with pytest.raises(RuntimeError, match="rank 1 of the LocalGroup has ended before it sent ints"):
        group.run(run)
    assert group.run(lambda rank: rank.all_gather_ints([rank.rank])) == [[[0], [1], [2]]] * 3


def test_all_ranks_connect_before_some_exchange(monkeypatch):
    """NCCL creates its communicator in a group's first call, which needs all ranks."""
    events = []
    exchange = LocalRank.exchange
    monkeypatch.setattr(LocalRank, "connect", lambda self, device: events.append((self.rank, "connect")))

    def logged(self, sends, receives):
        if sends or receives:
            events.append((self.rank, "exchange"))
        return exchange(self, sends, receives)

    monkeypatch.setattr(LocalRank, "exchange", logged)

    def run(rank):
        plan = CpPlan.dense(2, group=rank, layout="contiguous", method="all_gather")
        q = torch.randn(1, plan.num_tokens, 2, 8)
        return plan.unshard(flash_attn_cp_func(q, q, q, plan=plan, causal=True), 1)

    LocalGroup(3).run(run)
    for rank in range(3):
        assert next(what for who, what in events if who == rank) == "connect"
    assert [who for who, what in events if what == "exchange" and who == 1]


@pytest.mark.parametrize("ranks", [2, 5])
def test_a_ring_holds_two_ranks_keys(device, ranks, monkeypatch):
    """For any number of ranks, two buffers for the keys of other ranks."""
    alive, most = [weakref.WeakSet() for _ in range(ranks)], [0] * ranks
    transfer = transfers.KeyTransfer.__init__

    def counted(self, transport, step, *others):
        transfer(self, transport, step, *others)
        rank = transport.rank
        if not step.is_local:
            for buffer in self._buffers:
                alive[rank].add(buffer.untyped_storage())
        most[rank] = max(most[rank], len(alive[rank]))

    monkeypatch.setattr(transfers.KeyTransfer, "__init__", counted)
    problem, weights = self_attention(Case(1, 64, 64, 2, 2, 16, "bfloat16", causal=True), device)
    run_local(problem, weights, ranks, method="ring")
    assert max(most) == (2 if ranks == 2 else 4)  # a key and a value tensor each


def test_only_new_calls_are_checked(device, monkeypatch):
    """After a valid call: the same one, others, bad ones, and another one on one of the ranks."""
    checked = []
    check = attention_call.checked_call
    monkeypatch.setattr(attention_call, "checked_call", lambda args: checked.append(args) or check(args))

    def run(rank):
        plan = CpPlan.dense(20, group=rank, check="calls")
        q, k = (torch.randn(1, plan.num_tokens, heads, 8, dtype=half(device), device=device) for heads in (4, 2))
        first, second = (flash_attn_cp_func(q, k, k, plan=plan, causal=True) for _ in range(2))
        assert torch.equal(first, second) and len(plan.known_calls) == 1
        assert not torch.equal(first, flash_attn_cp_func(q, k, k, plan=plan))
        with pytest.raises(RuntimeError, match="k: expected a number of heads"):
            flash_attn_cp_func(q[:, :, :3], k, k, plan=plan, causal=True)
        with pytest.raises(TypeError, match="softmax_scale: expected a number"):
            flash_attn_cp_func(q, k, k, softmax_scale="1", plan=plan, causal=True)
        with pytest.raises(RuntimeError, match=r"expected the same on every rank, got others on ranks \[1\]"):
            flash_attn_cp_func(q, k, k, plan=plan, causal=rank.rank == 0)
        return True

    assert LocalGroup(2).run(run) == [True] * 2
    assert len(checked) == 2 * 4  # the last call is known


def test_kernel_calls_are_made_once(device):
    problem, _ = self_attention(Case(1, 20, 20, 2, 2, 8, "bfloat16", causal=True), device)

    def run(rank):
        plan = make_plan(problem, rank)
        args = Kind("ring", (None, 0)), device
        return plan.key_ranks.calls(*args) is plan.key_ranks.calls(*args)

    assert LocalGroup(2).run(run) == [True] * 2


@pytest.mark.parametrize("kind", ["dense", "packed"])
def test_rows_without_a_result_are_not_read(device, kind, monkeypatch):
    class NanParts(sums._StackedResults):
        def __init__(self, *given):
            super().__init__(*given)
            self._out.fill_(float("nan"))
            made.append(self)

    made = []
    monkeypatch.setattr(sums, "_StackedResults", NanParts)
    batch, rows = (1, 60) if kind == "dense" else (4, 0)
    problem, weights = self_attention(Case(batch, rows, rows, 2, 2, 16, "bfloat16", causal=True, kind=kind), device)
    check_result(problem, weights, run_local(problem, weights, 3, method="ring"))
    assert made


# ---- errors, orders and threads of some ranks ----

SECONDS = 30.0  # for which a rank waits for another, so that a test fails instead of hanging


def told_by(error, message):
    """The error on the other ranks, with that of rank 1."""
    return rf"got errors on ranks \[1\] \(rank 1: {error.__name__}: {message}"


def raise_on_all(call, error, message, size=2):
    """call(rank, is_bad) raises the error on rank 1, and an error about it on the others."""

    def run(rank):
        is_bad = rank.rank == 1
        with pytest.raises(error if is_bad else RuntimeError, match=message if is_bad else told_by(error, message)):
            call(rank, is_bad)
        return CpPlan.dense(4, group=rank).cu_seqlens  # the ranks still communicate

    assert LocalGroup(size, SECONDS).run(run) == [(0, 4)] * size


def mesh_and_group(rank, is_bad):
    CpPlan.dense(8, mesh=rank.mesh(1, 2), group=rank if is_bad else None)


NO_COMMUNICATOR = [
    (lambda rank, is_bad: CpPlan.dense(8, group=rank, copies="x" if is_bad else False), TypeError, "copies: expected"),
    (lambda rank, is_bad: CpPlan.dense(8, group="x" if is_bad else rank), RuntimeError, "group: expected"),
    (mesh_and_group, TypeError, "group: expected None"),
    (lambda rank, is_bad: CpPlan.dense(8, group=rank, mesh="x" if is_bad else None), TypeError, "group: expected None"),
    (lambda rank, is_bad: CpCache(mesh="x") if is_bad else CpCache(group=rank), NotImplementedError, "mesh: expected"),
]


@pytest.mark.parametrize("call, error, message", NO_COMMUNICATOR, ids=range(len(NO_COMMUNICATOR)))
def test_errors_of_group_and_mesh_raise_on_all_ranks(call, error, message):
    """The rank finds them before it has a communicator."""
    raise_on_all(call, error, message)


def test_a_call_without_a_plan_raises_on_all_ranks():
    q = torch.randn(1, 4, 2, 8)

    def function(rank, is_bad):
        plan = CpPlan.dense(8, group=rank)
        flash_attn_cp_func(q, q, q, plan=None if is_bad else plan)

    def cache(rank, is_bad):
        shards = CpCache(group=rank)
        flash_attn_cp_kvcache(q, q, q, 2, shards=3 if is_bad else shards)

    raise_on_all(function, TypeError, "plan: expected a CpPlan, got None")
    raise_on_all(cache, TypeError, "shards: expected a CpCache, got 3")


@pytest.mark.parametrize("check", ["calls", "plan"])
@pytest.mark.parametrize("method", ["all_gather", "ulysses"])
def test_backwards_in_different_orders_raise_on_all_ranks(check, method):
    """Calls of one kind, whose messages have the same shapes, of one plan or of two equal ones."""

    def run(rank):
        torch.manual_seed(rank.rank)
        first, second = (CpPlan.dense(8, group=rank, method=method, check=check) for _ in range(2))
        q = torch.randn(1, first.num_tokens, 2, 8, dtype=torch.float64)
        for plans in ((first, first), (first, second)):
            leaves = [[(scale * q).requires_grad_() for _ in range(3)] for scale in (1.0, 2.0)]
            outs = [flash_attn_cp_func(*own, plan=plan) for own, plan in zip(leaves, plans)]
            with pytest.raises(RuntimeError, match=r"flash_attn_cp_func: expected the same .* ranks \[1\]"):
                outs[rank.rank].sum().backward()
        return True

    assert LocalGroup(2, SECONDS).run(run) == [True] * 2


def test_backwards_of_unshard_are_compared():
    def run(rank):
        plan = CpPlan.dense(8, group=rank)
        leaves = [torch.zeros(plan.num_tokens, requires_grad=True) for _ in range(2)]
        wholes = [plan.unshard(x, 0) for x in leaves]
        with pytest.raises(RuntimeError, match=r"unshard: expected the same .* ranks \[1\]"):
            wholes[rank.rank].sum().backward()
        wholes[0].sum().backward()
        return leaves[0].grad.tolist()

    assert LocalGroup(2, SECONDS).run(run) == [[2.0] * 4] * 2


def test_a_backward_of_overwritten_inputs_raises_on_all_ranks():
    def backward(rank, is_bad):
        plan = CpPlan.dense(8, group=rank)
        q = torch.randn(1, plan.num_tokens, 2, 8)
        x = torch.randn_like(q).requires_grad_()
        out = flash_attn_cp_func(x, q, q, plan=plan)
        if is_bad:
            q.zero_()
        out.sum().backward()

    raise_on_all(backward, RuntimeError, "one of the variables needed for gradient computation has been modified")


def in_thread(function):
    """The result of a function in a thread, or its error."""
    with ThreadPoolExecutor(1) as pool:
        return pool.submit(function).result(SECONDS)


@pytest.mark.parametrize("check", ["calls", "plan", "none"])
def test_only_the_thread_that_made_a_plan_may_use_it(check):
    """Ranks may order the calls of two threads differently; backwards may run in autograd's threads."""

    def run(rank):
        plan, shards = CpPlan.dense(8, group=rank, check=check), CpCache(group=rank, check=check)
        q = torch.randn(1, plan.num_tokens, 2, 8, requires_grad=True)
        calls = (
            lambda: flash_attn_cp_func(q, q, q, plan=plan),
            lambda: plan.unshard(q, 1),
            lambda: flash_attn_cp_kvcache(q, q, q, 2, shards=shards),
        )
        for own_call, name in zip(calls, ("plan", "plan", "shards")):
            expected = own_call()
            with pytest.raises(RuntimeError, match=f"^{name}: expected calls from the thread that made it"):
                in_thread(own_call)
            torch.testing.assert_close(own_call(), expected)
        return True

    assert LocalGroup(2, SECONDS).run(run) == [True] * 2


def test_a_call_of_another_thread_raises_on_all_ranks():
    def call(rank, is_bad):
        plan = CpPlan.dense(8, group=rank)
        q = torch.randn(1, plan.num_tokens, 2, 8)

        def attend():
            return flash_attn_cp_func(q, q, q, plan=plan)

        in_thread(attend) if is_bad else attend()

    raise_on_all(call, RuntimeError, "plan: expected calls from the thread that made it")


def test_ranks_wait_no_longer_than_the_timeout():
    """In a LocalGroup, for a rank that does something else."""

    def run(rank):
        if rank.rank == 0:
            with pytest.raises(RuntimeError, match="rank 1 of the LocalGroup has sent no ints for 0.2 seconds"):
                rank.all_gather_ints([1])
        ended.wait(SECONDS) if rank.rank else ended.set()
        return True

    ended = threading.Event()
    assert LocalGroup(2, 0.2).run(run) == [True] * 2
