"""Meshes of two dimensions, of threads and of processes: heads move along the second, K and V along the first."""

import dataclasses

import cp_workers
import pytest
import torch
import torch.distributed as dist
from cases import DTYPES, Case
from cp_harness import call_options, check_gradients_of_some_ranks, check_result, make_plan, run_local, self_attention

from flash_attn.context_parallel import CpPlan, LocalGroup, attention_call, flash_attn_cp_func, operators
from flash_attn.context_parallel.compute.kernel_calls import Options
from flash_attn.context_parallel.plan.layouts import LAYOUTS, imbalance, layout_spans
from flash_attn.context_parallel.plan.steps import KEY_METHODS

SHAPES = [(2, 2), (2, 3), (3, 2)]
CASES = [
    Case(2, 37, 37, 4, 2, 8, "float64", causal=True),
    Case(2, 37, 37, 5, 5, 8, "float64", head_dim_v=24, sinks=True),
    Case(2, 37, 37, 6, 1, 16, "float64", causal=True, window=(7, -1), softcap=15.0, alibi="batch"),
    Case(1, 64, 64, 4, 4, 8, "float64", window=(30, 2), sinks=True, dropout=0.17, alibi="heads"),
    Case(4, 0, 0, 8, 4, 8, "float64", causal=True, kind="packed", dropout=0.17, sinks=True),
    Case(4, 0, 0, 3, 1, 16, "float64", causal=True, window=(9, 0), kind="packed", alibi="batch"),
    Case(4, 0, 0, 1, 1, 8, "float64", kind="packed", softcap=15.0),
]


def of_device(case, device):
    return case if case.dtype in DTYPES[device] else dataclasses.replace(case, dtype="bfloat16")


@pytest.mark.each
@pytest.mark.parametrize("shape", SHAPES, ids=str)
@pytest.mark.parametrize("method", KEY_METHODS)
@pytest.mark.parametrize("index", range(len(CASES)), ids=[case.id for case in CASES])
def test_results_equal_those_of_one_gpu(device, index, method, shape):
    problem, weights = self_attention(of_device(CASES[index], device), device)
    layout = LAYOUTS[(index + shape[1]) % 3]
    check_result(problem, weights, run_local(problem, weights, shape, method=method, layout=layout))


@pytest.mark.parametrize("shape", [(1, 1), (1, 3), (3, 1), (4, 3)], ids=str)
def test_one_row_one_column_and_fewer_tokens_than_rows(device, shape):
    for tokens in (0, 1, 5):
        case = Case(2, tokens, tokens, 2, 1, 8, "float64", causal=True)
        problem, weights = self_attention(of_device(case, device), device)
        result = run_local(problem, weights, shape)
        if tokens:
            check_result(problem, weights, result)


@pytest.mark.parametrize("dtype", ["bfloat16", "float32"])
def test_gradients_of_shared_heads_are_rounded_once(device, dtype):
    """One K/V head for the four ranks of a row, also if the row needs no keys of others."""
    dtype = dtype if dtype in DTYPES[device] else "float16"
    problem, weights = self_attention(Case(1, 257, 257, 8, 1, 32, dtype, causal=True), device)
    for shape in ((1, 4), (3, 4)):
        check_result(problem, weights, run_local(problem, weights, shape))


@pytest.mark.parametrize("method", KEY_METHODS)
def test_equal_bits_in_each_run(device, method):
    problem, weights = self_attention(Case(2, 130, 130, 3, 1, 32, "bfloat16", causal=True), device)
    first, second = (run_local(problem, weights, (2, 2), method=method, deterministic=True) for _ in range(2))
    for a, b in zip((first.out, first.lse, *first.grads), (second.out, second.lse, *second.grads)):
        assert torch.equal(a, b)


def test_the_dropout_mask_is_that_of_one_rank(device):
    dtype, limit = ("float64", 1e-12) if device == "cpu" else ("bfloat16", 3e-2)  # another mask differs by more than 1
    problem, _ = self_attention(Case(1, 256, 256, 4, 2, 8, dtype, dropout=0.3), device)

    def seeded(group, method):
        plan = make_plan(problem, group, method=method)
        plan.compare = lambda *given: (1, 1234)
        own = [plan.shard(x, 1) for x in (problem.q, problem.k, problem.v)]
        return plan.unshard(flash_attn_cp_func(*own, plan=plan, **call_options(problem)), 1)

    (expected,) = LocalGroup(1).run(lambda rank: seeded(rank, "all_gather"))
    for method in KEY_METHODS:
        for out in LocalGroup(6).run(lambda rank, method=method: seeded(rank.mesh(2, 3), method)):
            torch.testing.assert_close(out, expected, atol=limit, rtol=0)


@pytest.mark.parametrize("method", KEY_METHODS)
def test_operators(device, method):
    """Their backward exchanges heads once more, which eager code saves."""
    dtype = torch.float64 if device == "cpu" else torch.bfloat16
    whole = [torch.randn(2, 40, heads, 16, device=device, dtype=dtype) for heads in (3, 1, 1, 3)]

    def run(rank):
        plan = CpPlan.dense(40, mesh=rank.mesh(2, 2), method=method)
        *own, dout = (plan.shard(x, 1).requires_grad_() for x in whole)
        args = operators.CpArgs(*own, None, None, plan.handle, 0.0, 0.25, True, -1, -1, 0.0, True, 0)
        eager = flash_attn_cp_func(*own, plan=plan, causal=True, deterministic=True)
        for out in (operators.attention(args)[0], eager):
            yield out, *torch.autograd.grad(out, own, dout.detach())

    for ours, theirs in LocalGroup(4).run(lambda rank: list(run(rank))):
        for a, b in zip(ours, theirs):
            assert torch.equal(a, b)


def test_losses_of_some_ranks(device):
    """A rank sends gradients of its heads and keys even if its own results, or one of them, get no gradient."""
    check_gradients_of_some_ranks(device, (2, 2))


@pytest.mark.parametrize("shape", [*SHAPES, (1, 4), (4, 1), (5, 4)], ids=str)
@pytest.mark.parametrize("layout", LAYOUTS)
def test_plans(layout, shape):
    """A row of the mesh has the tokens of a rank of one dimension; shard and unshard are inverse."""
    cu = (0, 3, 3, 40, 41, 77)
    x, weights = torch.randn(2, 77, 3), torch.randn(shape[0] * shape[1], 2, 77, 3)

    def run(rank):
        plan = CpPlan.varlen(cu, mesh=rank.mesh(*shape), layout=layout)
        assert (plan.rank, plan.size) == (rank.rank, shape[0] * shape[1])
        own = plan.shard(x, 1).requires_grad_()
        assert own.shape == (2, plan.num_tokens, 3) and torch.equal(own, x[:, plan.token_indices()])
        whole = plan.unshard(own, 1)
        assert torch.equal(whole, x)
        (whole * weights[plan.rank]).sum().backward()
        torch.testing.assert_close(own.grad, plan.shard(weights.sum(0), 1))
        starts, indices = torch.tensor(cu), plan.token_indices()
        assert torch.equal(plan.positions(), indices - starts[torch.searchsorted(starts, indices, right=True) - 1])
        return plan

    plans = LocalGroup(shape[0] * shape[1]).run(run)
    rows = layout_spans(layout, cu, shape[0], 128, (None, 0))
    assert all(plan.spans == plans[0].spans for plan in plans)
    for row, spans in enumerate(rows):
        parts = [list(plan.token_indices()) for plan in plans[row * shape[1] : (row + 1) * shape[1]]]
        assert [int(i) for part in parts for i in part] == [i for start, stop in spans for i in range(start, stop)]
        assert max(map(len, parts)) - min(map(len, parts)) <= 1
    assert plans[0].imbalance() == imbalance(rows, cu, (None, 0))
    alone = LocalGroup(shape[0]).run(lambda rank: CpPlan.varlen(cu, group=rank, layout=layout))
    assert [plan.received_tokens() for plan in plans] == [p.received_tokens() for p in alone for _ in range(shape[1])]


def test_a_causal_zigzag_is_even_in_each_mesh():
    for shape in ((2, 4), (4, 2)):
        plan = LocalGroup(8).run(lambda rank, shape=shape: CpPlan.dense(4096, mesh=rank.mesh(*shape)))[0]
        assert plan.imbalance(causal=True) == 1.0
        assert {sum(stop - start for start, stop in spans) for spans in plan.spans} == {512}


def test_auto_counts_keys_of_a_ranks_heads(monkeypatch):
    """It never chooses ulysses, by which rows exchange heads anyway."""
    monkeypatch.setattr(attention_call, "_MOST_GATHERED_BYTES", 64 * 8 * 32 * 4 // 2)  # half of K and V

    def run(rank):
        plan = CpPlan.dense(64, mesh=rank.mesh(2, 2))
        found = []
        for heads_k in (8, 1):  # one head is on both ranks of a row
            q, k = (torch.empty(1, plan.num_tokens, h, 16) for h in (8, heads_k))
            options = Options("auto", 1, (None, 0), 1.0, 0.0, 0.0, False, None, None)
            batches = [options._replace(batch=batch) for batch in (1, 2, 4, 5)]
            found.append([attention_call._method(plan, q, k, k, options) for options in batches])
        return found

    of_eight, of_one = ["all_gather", "ring", "ring", "ring"], ["all_gather", "all_gather", "all_gather", "ring"]
    assert LocalGroup(4).run(run) == [[of_eight, of_one]] * 4


def test_bad_plans_and_calls_raise_on_all_ranks():
    def run(rank):
        mesh, is_bad = rank.mesh(2, 2), rank.rank == 2
        told = r"expected valid arguments on every rank, got errors on ranks \[2\] \(rank 2: RuntimeError: "
        with pytest.raises(
            RuntimeError, match=f"method: expected one of {', '.join(('auto', *KEY_METHODS))}, got" if is_bad else told
        ):
            CpPlan.dense(9, mesh=mesh, method="ulysses" if is_bad else "ring")
        with pytest.raises(RuntimeError, match=r"CpPlan: expected the same on every rank, got others on ranks \[2\]"):
            CpPlan.dense(9 + is_bad, mesh=mesh)
        plan = CpPlan.dense(9, mesh=mesh)
        q = torch.randn(1, plan.num_tokens, 2, 8)
        with pytest.raises(RuntimeError, match="q: expected the . tokens of rank 2" if is_bad else told):
            flash_attn_cp_func(q[:, 1:] if is_bad else q, q, q, plan=plan)
        with pytest.raises(RuntimeError, match=r"flash_attn_cp_func: expected the same .* \[2\]"):
            flash_attn_cp_func(q, q, q, plan=plan, causal=is_bad)
        with pytest.raises(RuntimeError, match="y: expected" if is_bad else told):
            plan.unshard(q, 0 if is_bad else 1)
        return flash_attn_cp_func(q, q, q, plan=plan).shape == q.shape

    assert LocalGroup(4).run(run) == [True] * 4


def test_a_mesh_needs_all_ranks_of_its_group():
    with pytest.raises(RuntimeError, match=r"outer \* inner: expected 3 ranks, got 2 \* 2"):
        LocalGroup(3).run(lambda rank: rank.mesh(2, 2))


def test_processes(device):
    if device == "cuda" and torch.cuda.device_count() < 4:
        pytest.skip("needs 4 GPUs")
    backend = {"cpu": "gloo", "cuda": "cpu:gloo,cuda:nccl"}[device]
    if not dist.is_available() or not getattr(dist, f"is_{backend.split(':')[-1]}_available")():
        pytest.skip(f"torch.distributed has no {backend}")
    cp_workers.run_processes(cp_workers.rows_and_columns, 4, backend)
