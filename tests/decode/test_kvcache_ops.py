"""The operators of inference: schemas, fakes, opcheck, torch.compile."""

from __future__ import annotations

import pytest
import torch
from harness import Recorder
from kvcache_harness import KvCase, make_problem, plan_for
from torch._dynamo.testing import CompileCounterWithBackend
from torch.library import opcheck

from flash_attn import flash_attn_combine, flash_attn_with_kvcache
from flash_attn.ops import library

CORE = torch.ops.flash_attn_core
BACKENDS = ("aot_eager", "inductor")
OPTIONS = (0.25, True, -1, -1, 0.0, False, 0, False)  # softmax_scale ... batch_invariant


def problem_of(device, **options):
    dtype = "float32" if device == "cpu" else "float16"
    small = {"lengths": (13, 5, 0, -1), "capacity": 32, "seqlen_q": 2, "causal": True, "dtype": dtype}
    return make_problem(KvCase(**{**small, **options}), device)


@pytest.mark.parametrize("page_size", (0, 16))
@pytest.mark.parametrize("append", (False, True))
@pytest.mark.parametrize("given,sinks", ((False, False), (False, True), (True, False), (True, True)))
def test_opcheck_kvcache(device, page_size, append, given, sinks):
    problem = problem_of(device, page_size=page_size, seqlen_new=2 if append else None, sinks=sinks)
    op = CORE.kvcache_append_fwd if append else CORE.kvcache_fwd
    extra = (torch.empty_like(problem.q), plan_for(problem).tensor) if given else (None, None)
    arguments = (
        problem.q, problem.k_cache.nan_to_num(), problem.v_cache.nan_to_num(), problem.k, problem.v, None, None,
        problem.lengths, problem.rows, None, problem.table, None, *extra, None, None, *OPTIONS, problem.sinks,
    )  # fmt: skip
    opcheck(op.default, arguments)


def test_opcheck_plan(device):
    problem = problem_of(device)
    plan = plan_for(problem)
    opcheck(CORE.kvcache_plan.default, plan._args(problem.lengths, None, plan.tensor))


@pytest.mark.parametrize("grad", (False, True))
@pytest.mark.parametrize("out_dtype", (None, torch.bfloat16))
def test_opcheck_combine(device, grad, out_dtype):
    out_partial = torch.randn(3, 2, 5, 4, 16, device=device, requires_grad=grad)
    lse_partial = torch.randn(3, 2, 5, 4, device=device, requires_grad=grad)
    opcheck(CORE.combine.default, (out_partial, lse_partial, out_dtype))
    with torch.no_grad():
        out = torch.empty(2, 5, 4, 16, device=device, dtype=out_dtype or torch.float32)
        opcheck(CORE.combine_out.default, (out_partial.detach(), lse_partial.detach(), out))


def written(op):
    return [a.name for a in op._schema.arguments if a.alias_info is not None and a.alias_info.is_write]


def test_schemas_tell_what_is_written():
    """A plan holds workspace, which every call that uses it writes."""
    assert written(CORE.kvcache_fwd.default) == ["out", "plan"]
    descales = ["k_token_descale", "v_token_descale"]
    assert written(CORE.kvcache_append_fwd.default) == ["k_cache", "v_cache", "out", "plan", *descales]
    assert written(CORE.kvcache_plan.default) == ["plan"]
    assert written(CORE.combine.default) == []
    assert written(CORE.combine_out.default) == ["out"]


def compiled(function, backend, dynamic=None):
    torch._dynamo.reset()
    return torch.compile(function, backend=backend, fullgraph=True, dynamic=dynamic)


def step(problem, function, with_out, with_plan, **options):
    """One call of a function on copies -> everything that it returns or writes."""
    problem = problem.clone()
    out = torch.empty_like(problem.q) if with_out else None
    plan = plan_for(problem) if with_plan else None
    result = function(
        problem.q, problem.k_cache, problem.v_cache, problem.k, problem.v, cache_seqlens=problem.lengths,
        cache_batch_idx=problem.rows, block_table=problem.table, causal=True, return_softmax_lse=True, out=out,
        plan=plan, sinks=problem.sinks, **options,
    )  # fmt: skip
    assert not with_out or result[0] is out
    return *result, problem.k_cache.nan_to_num(7), problem.v_cache.nan_to_num(7)


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("with_out,with_plan", ((False, False), (True, True)))
@pytest.mark.parametrize(
    "page_size,seqlen_new,sinks", ((0, None, False), (0, None, True), (0, 2, False), (16, 2, True))
)
def test_compiled_step(device, backend, with_out, with_plan, page_size, seqlen_new, sinks):
    problem = problem_of(device, page_size=page_size, seqlen_new=seqlen_new, sinks=sinks)
    function = compiled(flash_attn_with_kvcache, backend)
    for a, b in zip(
        step(problem, function, with_out, with_plan), step(problem, flash_attn_with_kvcache, with_out, with_plan)
    ):
        assert torch.equal(a, b)


@pytest.mark.parametrize("backend", BACKENDS)
def test_compiled_length_as_int(device, backend):
    problem = problem_of(device, lengths=(9, 9), seqlen_new=2)
    problem.rows = None
    problem.k_cache, problem.v_cache = problem.k_cache[:2], problem.v_cache[:2]

    def call(function, length):
        copy = problem.clone()
        return function(copy.q, copy.k_cache, copy.v_cache, copy.k, copy.v, cache_seqlens=length), copy.k_cache

    function = compiled(flash_attn_with_kvcache, backend)
    for length in (9, 7, 4):
        for a, b in zip(call(function, length), call(flash_attn_with_kvcache, length)):
            assert torch.equal(a.nan_to_num(7), b.nan_to_num(7))


@pytest.mark.parametrize("backend", BACKENDS)
def test_compiled_layers_share_a_plan_that_is_updated_inside(device, backend):
    problem = problem_of(device)
    caches = [(torch.randn_like(problem.k_cache), torch.randn_like(problem.v_cache)) for _ in range(3)]
    plan = plan_for(problem)

    def layers(q, lengths):
        plan.update(lengths)
        for k_cache, v_cache in caches:
            q = q + flash_attn_with_kvcache(
                q, k_cache, v_cache, cache_seqlens=lengths, cache_batch_idx=problem.rows, causal=True, plan=plan
            )
        return q

    function = compiled(layers, backend)
    for lengths in (problem.lengths, problem.lengths + 7):
        expected, actual = layers(problem.q, lengths), function(problem.q, lengths)
        assert torch.equal(expected, actual)


def test_compiled_dynamic_shapes_do_not_recompile(device):
    torch._dynamo.reset()
    counter = CompileCounterWithBackend("aot_eager")
    function = torch.compile(flash_attn_with_kvcache, backend=counter, fullgraph=True, dynamic=True)
    graphs = []
    for capacity in (20, 33, 47):
        problem = problem_of(device, capacity=capacity, seqlen_new=2)
        for a, b in zip(step(problem, function, False, False), step(problem, flash_attn_with_kvcache, False, False)):
            assert torch.equal(a, b)
        graphs.append(counter.frame_count)
    assert graphs == graphs[:1] * 3


@pytest.mark.parametrize("backend", BACKENDS)
def test_compiled_combine(device, backend):
    parts = torch.randn(3, 2, 5, 4, 16, device=device, requires_grad=True)
    sums = torch.randn(3, 2, 5, 4, device=device, requires_grad=True)

    def run(function):
        out, lse = function(parts, sums)
        return out, lse, *torch.autograd.grad((out.sin().sum() + lse.cos().sum()), (parts, sums))

    for a, b in zip(run(compiled(flash_attn_combine, backend)), run(flash_attn_combine)):
        torch.testing.assert_close(a, b, rtol=1e-5, atol=1e-6)  # the gradient is made of operations that inductor fuses


def test_dispatch_modes_see_the_operators(device):
    with Recorder() as recorder:
        for new in (None, 2):
            step(problem_of(device, seqlen_new=new), flash_attn_with_kvcache, True, False)
        flash_attn_combine(torch.randn(2, 1, 1, 1, 8, device=device), torch.randn(2, 1, 1, 1, device=device))
    assert {library._kvcache_op, library._kvcache_append_op, CORE.combine.default} <= set(recorder.seen)


def test_fakes(device):
    with torch._subclasses.FakeTensorMode():
        q, cache = torch.empty(2, 3, 4, 16, device=device), torch.empty(2, 9, 2, 16, device=device)
        out, lse = flash_attn_with_kvcache(q, cache, cache, cache_seqlens=4, return_softmax_lse=True)
        assert out.shape == q.shape and lse.shape == (2, 4, 3)
        given = torch.empty_like(q)
        assert flash_attn_with_kvcache(q, cache, cache, q[:, :, :2], q[:, :, :2], cache_seqlens=4, out=given) is given
        out, lse = flash_attn_combine(torch.empty(5, *q.shape, device=device), torch.empty(5, 2, 3, 4, device=device))
        assert out.shape == q.shape and lse.shape == (2, 3, 4)
