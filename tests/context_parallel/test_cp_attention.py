"""Context-parallel attention against the reference: features x layouts x methods; ranks are threads of one process."""

import dataclasses
import gc

import pytest
import torch
from cases import DTYPES, Case, pairwise
from cp_harness import call_options, check_gradients_of_some_ranks, check_result, make_plan, run_local, self_attention

from flash_attn import flash_attn_func
from flash_attn.context_parallel import CpPlan, LocalGroup, attention_call, flash_attn_cp_func, operators
from flash_attn.context_parallel.compute import kernel_calls
from flash_attn.context_parallel.plan.steps import KEY_METHODS, METHODS

FEATURES = {
    "method": METHODS,
    "layout": ("zigzag", "contiguous", "balanced"),
    "ranks": (1, 2, 3, 5),
    "kind": ("dense", "packed"),
    "heads": ((4, 2), (3, 3), (6, 1), (5, 5), (8, 4)),
    "head_dims": ((8, 8), (16, 24)),
    "window": ((-1, -1), (0, 0), (7, -1), (-1, 5), (30, 2)),
    "causal": (False, True),
    "alibi": ("none", "heads", "batch"),
    "softcap": (0.0, 15.0),
    "sinks": (False, True),
    "dropout": (0.0, 0.17),
}


def pairwise_problems():
    for row in pairwise({**FEATURES, "dtype": DTYPES["cpu"]}):
        (nheads, nheads_k), (head_dim, head_dim_v) = row.pop("heads"), row.pop("head_dims")
        method, layout, ranks = row.pop("method"), row.pop("layout"), row.pop("ranks")
        batch = 4 if row["kind"] == "packed" else 2
        case = Case(batch, 37, 37, nheads, nheads_k, head_dim, head_dim_v=head_dim_v, **row)
        yield pytest.param(case, method, layout, ranks, id=f"{method}-{layout}-{ranks}-{case.id}")


@pytest.mark.parametrize("problem_case, method, layout, ranks", list(pairwise_problems()))
def test_pairwise(device, problem_case, method, layout, ranks):
    case_ = problem_case
    if case_.dtype not in DTYPES[device]:
        case_ = dataclasses.replace(case_, dtype="bfloat16")
    problem, weights = self_attention(case_, device)
    options = {"method": method, "layout": layout}
    check_result(problem, weights, run_local(problem, weights, ranks, **options))


@pytest.mark.parametrize("method", METHODS)
def test_errors_do_not_grow_with_the_number_of_ranks(device, method):
    """bfloat16: partial results are float32 or rounded once."""
    problem, weights = self_attention(Case(1, 257, 257, 16, 16, 32, "bfloat16", causal=True), device)
    for ranks in (2, 16):
        check_result(problem, weights, run_local(problem, weights, ranks, method=method))


@pytest.mark.devices("cpu")
@pytest.mark.parametrize("sinks", [False, True])
@pytest.mark.parametrize("method", KEY_METHODS)
def test_errors_of_parts_that_are_rounded_once(device, method, sinks, monkeypatch):
    """As CUDA kernels round them: each part to q's dtype, their sums to float32."""
    monkeypatch.setattr(kernel_calls, "part_dtype", lambda x: x.dtype)
    case = Case(1, 257, 257, 16, 16, 32, "bfloat16", causal=True, sinks=sinks)
    problem, weights = self_attention(case, device)
    for ranks in (2, 8):
        check_result(problem, weights, run_local(problem, weights, ranks, method=method))


@pytest.mark.parametrize("method", METHODS)
def test_equal_bits_in_each_run(device, method):
    problem, weights = self_attention(Case(2, 130, 130, 4, 2, 32, "bfloat16", causal=True), device)
    first, second = (run_local(problem, weights, 3, method=method, deterministic=True) for _ in range(2))
    for a, b in zip((first.out, first.lse, *first.grads), (second.out, second.lse, *second.grads)):
        assert torch.equal(a, b)


def test_one_rank_equals_one_gpu(device):
    problem, weights = self_attention(Case(2, 130, 130, 4, 2, 64, "bfloat16", causal=True), device)
    out, lse, _ = flash_attn_func(problem.q, problem.k, problem.v, causal=True, return_attn_probs=True)
    result = run_local(problem, weights, 1, method="all_gather")
    if device == "cuda":
        assert torch.equal(result.lse, lse) and torch.equal(result.out, out)
    torch.testing.assert_close(result.lse, lse, atol=1e-5, rtol=0)
    torch.testing.assert_close(result.out, out, atol=2e-2, rtol=0)


@pytest.mark.parametrize("alibi", ["none", "heads"])
@pytest.mark.parametrize("batch, seqlen, kind", [(4, 0, "packed"), (1, 256, "dense")], ids=["packed", "dense"])
def test_the_dropout_mask_does_not_depend_on_ranks(device, batch, seqlen, kind, alibi):
    """One seed, one result for each number of ranks, layout and method."""
    dtype, limit = ("float64", 1e-12) if device == "cpu" else ("bfloat16", 3e-2)  # another mask differs by more than 1
    problem, _ = self_attention(
        Case(batch, seqlen, seqlen, 4, 2, 8, dtype, dropout=0.3, kind=kind, alibi=alibi), device
    )
    results = []
    for ranks, layout, method in ((1, "contiguous", "all_gather"), (3, "zigzag", "ring"), (2, "balanced", "ulysses")):
        results += LocalGroup(ranks).run(lambda rank, o=(layout, method): _seeded(problem, rank, *o))
    for other in results[1:]:
        torch.testing.assert_close(other, results[0], atol=limit, rtol=0)


def test_all_gather_replaces_a_ring_between_mask_columns(device):
    """CUDA kernels make dropout masks by MASK_COLUMNS, so chunks of a ring must begin at multiples of it."""
    q = torch.randn(1, 96, 2, 8, dtype=torch.float64 if device == "cpu" else torch.bfloat16, device=device)

    def methods(rank):
        found = []
        for tokens in (96, 99):
            plan = CpPlan.dense(tokens, group=rank, method="ring", layout="contiguous")
            options = kernel_calls.Options("ring", 1, (None, 0), 1.0, 0.0, 0.5, False, None, None)
            found.append(attention_call._method(plan, q, q, q, options))
            assert attention_call._method(plan, q, q, q, options._replace(dropout_p=0.0)) == "ring"
        return found

    assert LocalGroup(3).run(methods) == [["ring", "ring" if device == "cpu" else "all_gather"]] * 3


def _seeded(problem, rank, layout, method):
    plan = make_plan(problem, rank, layout=layout, method=method)
    plan.compare = lambda *given: (1, 1234)
    axis = problem.q.dim() - 3
    own = [plan.shard(x, axis) for x in (problem.q, problem.k, problem.v)]
    return plan.unshard(flash_attn_cp_func(*own, plan=plan, **call_options(problem)), axis)


@pytest.mark.parametrize("method", METHODS)
def test_losses_of_some_ranks(device, method):
    """A rank sends gradients of its keys even if its own results, or one of them, get no gradient."""
    check_gradients_of_some_ranks(device, 3, method=method)


def test_not_twice_differentiable(device):
    problem, _ = self_attention(Case(1, 9, 9, 2, 2, 16, "bfloat16"), device)

    def run(rank):
        plan = make_plan(problem, rank)
        q = problem.q.clone().requires_grad_()
        out = flash_attn_cp_func(q, problem.k, problem.v, plan=plan)
        (grad,) = torch.autograd.grad(out.sum(), q, create_graph=True)
        with pytest.raises(RuntimeError, match="expected one backward, got a second"):
            grad.sum().backward()

    LocalGroup(1).run(run)


def test_autocast_casts_float32(device):
    q = torch.randn(1, 16, 2, 16, device=device)

    def run(rank):
        plan = CpPlan.dense(16, group=rank)
        own = plan.shard(q, 1)
        with torch.autocast(device, dtype=torch.bfloat16):
            return flash_attn_cp_func(own, own, own, plan=plan).dtype

    assert LocalGroup(2).run(run) == [torch.bfloat16] * 2


def compiled_and_plain(*positional, backend="aot_eager", **options):
    def layer(q, k, v, plan, sinks=None):
        return flash_attn_cp_func(q * 2, k, v, *positional, plan=plan, causal=True, sinks=sinks, **options)

    return torch.compile(layer, backend=backend, fullgraph=True), layer


@pytest.mark.parametrize("packed", [False, True])
@pytest.mark.parametrize("method", METHODS)
def test_compiled_code_has_no_graph_break(device, method, packed):
    dtype = torch.bfloat16 if device == "cuda" else torch.float64
    shape = (24,) if packed else (2, 24)
    q, dout = (torch.randn(*shape, 4, 16, device=device, dtype=dtype) for _ in range(2))
    k, v = (torch.randn(*shape, 2, 16, device=device, dtype=dtype) for _ in "kv")
    sinks = torch.randn(4, device=device)
    both = compiled_and_plain(window_size=(9, 0), softcap=20.0, deterministic=True)

    def run(rank):
        made = CpPlan.varlen([0, 15, 24], group=rank, method=method) if packed else None
        plan = made or CpPlan.dense(24, group=rank, method=method)
        results = []
        for layer in both:
            leaves = [x.detach().requires_grad_() for x in (q, k, v, sinks)]
            out = layer(*leaves[:3], plan, leaves[3])
            results.append((out, *torch.autograd.grad(out, leaves, dout)))
        for traced, eager in zip(*results):
            torch.testing.assert_close(traced, eager, rtol=1e-6, atol=1e-6)

    LocalGroup(1).run(run)


@pytest.mark.parametrize("method", METHODS)
def test_opcheck(device, method):
    dtype = torch.bfloat16 if device == "cuda" else torch.float64
    q, k, v = (torch.randn(1, 24, heads, 16, device=device, dtype=dtype, requires_grad=True) for heads in (4, 2, 2))

    def run(rank):
        plan = CpPlan.dense(24, group=rank, method=method, check="none")  # calls have no numbers: equal results
        args = operators.CpArgs(q, k, v, None, None, plan.handle, 0.0, 0.25, True, -1, -1, 0.0, True, 0)
        forward = torch.ops.flash_attn_core.cp_fwd.default
        torch.library.opcheck(forward, args)
        saved = [x.detach() for x in (*forward(*args), q, k, v)]
        torch.library.opcheck(torch.ops.flash_attn_core.cp_bwd.default, (saved[0], saved[1], *saved, *args[3:]))

    LocalGroup(1).run(run)


@pytest.mark.needs_torch((2, 11), "recompiles")
def test_another_plan_needs_no_recompilation(device):
    q = torch.randn(32, 2, 16, device=device, dtype=torch.bfloat16)
    counts = torch._dynamo.testing.CompileCounter()
    compiled, plain = compiled_and_plain(backend=counts)

    def run(rank):
        for lengths in ([0, 32], [0, 11, 32], [0, 31, 32]):
            plan = CpPlan.varlen(lengths, group=rank)
            assert torch.equal(compiled(q, q, q, plan), plain(q, q, q, plan))

    LocalGroup(1).run(run)
    assert counts.frame_count == 1


def test_compiled_dropout(device):
    q = torch.randn(1, 32, 2, 16, device=device, dtype=torch.bfloat16, requires_grad=True)

    both = compiled_and_plain(0.3, return_attn_probs=True)

    def run(rank):
        plan = CpPlan.dense(32, group=rank)
        results = []
        for layer in both:
            torch.manual_seed(5)
            out, lse, state = layer(q, q, q, plan)
            results.append((out, lse, state, *torch.autograd.grad(out.sum() + lse.sum(), (q,))))
        for traced, eager in zip(*results):
            torch.testing.assert_close(traced, eager, rtol=1e-2, atol=1e-2)

    LocalGroup(1).run(run)


def test_a_freed_plan_raises_in_the_backward(device):
    q = torch.randn(1, 16, 2, 16, device=device, dtype=torch.bfloat16, requires_grad=True)
    compiled, _ = compiled_and_plain()

    def run(rank):
        out = compiled(q, q, q, CpPlan.dense(16, group=rank))
        gc.collect()
        with pytest.raises(RuntimeError, match="plan: expected one that lasts until the backward"):
            out.sum().backward()

    LocalGroup(1).run(run)


@pytest.mark.parametrize("heads, method", [((8, 8), "ulysses"), ((8, 2), "all_gather"), ((7, 7), "all_gather")])
def test_auto(heads, method):
    """The method that moves fewer bytes, the same on all ranks."""

    def run(rank):
        plan = CpPlan.dense(64, group=rank)
        q, k = (torch.empty(1, plan.num_tokens, h, 16) for h in heads)
        options = kernel_calls.Options("auto", 1, (None, 0), 1.0, 0.0, 0.0, False, None, None)
        return attention_call._method(plan, q, k, k, options)

    assert LocalGroup(4).run(run) == [method] * 4


BAD_CALLS = [
    (lambda q, k, v: ((q[:, :-1], k, v), {}), "q: expected the .* tokens of rank 1"),
    (lambda q, k, v: ((q[0], k, v), {}), r"q: expected shape \(batch, num_tokens"),
    (lambda q, k, v: ((q, k[..., :3], v), {}), "k: expected head dim 8"),
    (lambda q, k, v: ((q, k, v[:, :, :1]), {}), "v: expected 2 heads as k"),
    (lambda q, k, v: ((q, k.float(), v), {}), "k: expected torch.float64"),
    (lambda q, k, v: ((q, k, v), {"window_size": 3}), "window_size: expected a pair"),
    (lambda q, k, v: ((q, k, v), {"alibi_slopes": torch.ones(3)}), "alibi_slopes: expected float32 of shape"),
    (lambda q, k, v: ((q, k, v), {"sinks": torch.ones(3)}), "sinks: expected shape"),
    (lambda q, k, v: ((q, k, v), {"dropout_p": 1.0}), "dropout_p: expected a value in"),
    (lambda q, k, v: ((q, k, v), {"softcap": "x"}), "softcap: expected a number"),
    (lambda q, k, v: ((q, k, v), {"sm_margin": -1}), "sm_margin: expected a value >= 0, got -1"),
]


@pytest.mark.parametrize("bad, message", BAD_CALLS, ids=[message.split(":")[0] for _, message in BAD_CALLS])
def test_bad_calls_raise_on_all_ranks(bad, message):
    def run(rank):
        plan = CpPlan.dense(9, group=rank)
        q, k, v = (torch.randn(1, plan.num_tokens, h, 8, dtype=torch.float64) for h in (4, 2, 2))
        inputs, options = bad(q, k, v) if rank.rank == 1 else ((q, k, v), {})
        expected = message if rank.rank == 1 else r"flash_attn_cp_func: expected valid arguments .* \[1\]"
        with pytest.raises((RuntimeError, TypeError), match=expected):
            flash_attn_cp_func(*inputs, plan=plan, **options)
        return True

    assert LocalGroup(3).run(run) == [True] * 3


DIFFERENT = [
    {"causal": True}, {"window_size": (3, 3)}, {"softcap": 2.0}, {"deterministic": True}, {"sm_margin": 8}
]  # fmt: skip


@pytest.mark.parametrize("check", ["calls", "plan"])
@pytest.mark.parametrize("different", DIFFERENT, ids=[next(iter(options)) for options in DIFFERENT])
def test_different_calls_raise_on_all_ranks(different, check):
    def run(rank):
        plan = CpPlan.dense(9, group=rank, check=check)
        q, k, v = (torch.randn(1, plan.num_tokens, h, 8, dtype=torch.float64) for h in (4, 2, 2))
        with pytest.raises(RuntimeError, match=r"flash_attn_cp_func: expected the same .* \[2\]"):
            flash_attn_cp_func(q, k, v, plan=plan, **(different if rank.rank == 2 else {}))
        return True

    assert LocalGroup(3).run(run) == [True] * 3


def test_the_plan_is_required():
    q = torch.randn(1, 4, 2, 8)
    with pytest.raises(TypeError, match="plan: expected a CpPlan, got None"):
        flash_attn_cp_func(q, q, q, plan=None)
