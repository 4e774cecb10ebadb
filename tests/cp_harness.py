"""Tests of context parallelism: a problem for one GPU, the ranks that solve it, and their joined results."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from cases import Case
from harness import Problem, check_forward, make_problem, reference_gradients, sink_gradient_error
from reference import assert_accurate, assert_gradient_accurate

from flash_attn import dropout_mask, flash_attn_func
from flash_attn.context_parallel import CpPlan, LocalGroup, flash_attn_cp_func


@dataclass
class Weights:
    """The gradients of a problem's results."""

    dout: torch.Tensor
    dlse: torch.Tensor


@dataclass
class Result:
    """The joined results of all ranks; dsinks summed."""

    out: torch.Tensor
    lse: torch.Tensor
    grads: list
    rng_state: torch.Tensor


def self_attention(case: Case, device: str, lengths=(40, 1, 23, 0)) -> tuple[Problem, Weights]:
    """A problem with the same tokens as queries and keys. lengths: of the documents, if packed."""
    problem = make_problem(case, device, [(n, n) for n in lengths] if case.kind == "packed" else None)
    if case.kind == "packed":
        problem.k, problem.v = problem.k[: sum(lengths)], problem.v[: sum(lengths)]
    out_shape = (*problem.q.shape[:-1], problem.v.shape[-1])
    lse_shape = problem.q.shape[:-1]
    lse_shape = (lse_shape[1], lse_shape[0]) if case.kind == "packed" else (lse_shape[0], lse_shape[2], lse_shape[1])
    dtype = torch.float64 if problem.q.dtype == torch.float64 else torch.float32
    dout = torch.randn(out_shape, dtype=problem.q.dtype, device=device)
    return problem, Weights(dout, torch.randn(lse_shape, dtype=dtype, device=device))


def make_plan(problem: Problem, group, **options) -> CpPlan:
    """group: a group or a mesh."""
    options["mesh" if hasattr(group, "get_group") else "group"] = group
    if problem.layout is None:
        return CpPlan.dense(problem.q.shape[1], **options)
    return CpPlan.varlen(problem.cu_seqlens_q.cpu(), **options)


def call_options(problem: Problem) -> dict:
    options = dict(problem.options, dropout_p=problem.case.dropout)
    options["window_size"] = options.pop("window")
    return options


def run_rank(problem: Problem, weights: Weights, group, deterministic=False, **plan_options) -> Result:
    """One rank's call and backward. The result has all tokens, but dsinks of this rank's tokens."""
    plan = make_plan(problem, group, **plan_options)
    axis = 0 if plan.is_packed else 1
    own = [plan.shard(x, axis).requires_grad_() for x in (problem.q, problem.k, problem.v)]
    options = call_options(problem)
    if problem.sinks is not None:
        own.append(problem.sinks.clone().requires_grad_())
        options["sinks"] = own[-1]
    out, lse, rng_state = flash_attn_cp_func(
        *own[:3], plan=plan, return_attn_probs=True, deterministic=deterministic, **options
    )
    assert out.is_contiguous() and lse.is_contiguous()
    given = [plan.shard(weights.dout, axis), plan.shard(weights.dlse, -1)]
    grads = torch.autograd.grad([out, lse], own, given)
    whole = [plan.unshard(x, axis) for x in (out.detach(), *grads[:3])]
    return Result(whole[0], plan.unshard(lse.detach(), -1), [*whole[1:], *grads[3:]], rng_state)


def on_ranks(ranks: int | tuple[int, int], function) -> list:
    """function(group) on ranks as threads; for a pair of ranks function(mesh)."""
    if isinstance(ranks, int):
        return LocalGroup(ranks).run(function)
    return LocalGroup(ranks[0] * ranks[1]).run(lambda rank: function(rank.mesh(*ranks)))


def run_local(problem: Problem, weights: Weights, ranks: int | tuple[int, int], **options) -> Result:
    """All ranks as threads, in a mesh for a pair. Asserts that all have the same result."""
    results = on_ranks(ranks, lambda group: run_rank(problem, weights, group, **options))
    first = results[0]
    for other in results[1:]:
        for a, b in zip((first.out, first.lse, *first.grads[:3]), (other.out, other.lse, *other.grads[:3])):
            assert torch.equal(a.nan_to_num(), b.nan_to_num())
        assert torch.equal(first.rng_state, other.rng_state)
    for result in results[1:]:
        first.grads[3:] = [a + b for a, b in zip(first.grads[3:], result.grads[3:])]
    return first


def combined_out(problem: Problem, exact) -> torch.Tensor:
    """The exact out, rounded to q's dtype like a sum of parts: once without the sink, once with it."""
    dtype = problem.q.dtype
    if problem.sinks is None:
        return exact.out.to(dtype)
    of_keys = (1 - torch.exp(problem.sinks[:, None] - exact.lse)).transpose(-1, -2)[..., None]
    part = torch.where(of_keys > 0, exact.out / of_keys, 0.0).to(dtype)
    return (part.double() * of_keys).to(dtype)


def check_result(problem: Problem, weights: Weights, result: Result) -> None:
    """The error criterion of one GPU; gradients in float64 within 1e-10."""
    case, keep = problem.case, None
    if case.dropout > 0:
        rows = problem.max_seqlen_q if problem.layout is not None else problem.q.shape[1]
        entries = len(problem.layout.lens_q) if problem.layout is not None else case.batch
        keep = dropout_mask(result.rng_state, case.dropout, entries, case.nheads, rows, rows, problem.q.device)
    saved_out = combined_out(problem, check_forward(problem, result.out, result.lse, keep))
    exact, plain, results = reference_gradients(problem, weights.dout, keep, weights.dlse, saved_out)
    for name, ours, reference, same in zip(("dq", "dk", "dv"), result.grads, exact, plain):
        if problem.q.dtype == torch.float64:
            assert_accurate(ours, reference, same, name, slack=1e-10)
        else:
            assert_gradient_accurate(ours, reference, same, name)
    if problem.sinks is not None:
        allowed = sink_gradient_error(problem, results, weights.dout, weights.dlse)
        assert ((result.grads[3].double() - exact[3]).abs() <= allowed + 1e-4).all()


def check_gradients_of_some_ranks(device: str, ranks: int | tuple[int, int], **options) -> None:
    """Gradients if each rank has its own loss: that of the second depends on the LSE, that of the third is 0."""
    problem, _ = self_attention(Case(1, 65, 65, 2, 2, 16, "float64" if device == "cpu" else "bfloat16"), device)
    whole = [x.requires_grad_() for x in (problem.q, problem.k, problem.v)]

    def loss(plan, out, lse):
        return [out.double().sum(), lse.double().sum(), 0.0 * out.double().sum(), out.double().sum()][plan.rank]

    def run(group):
        plan = make_plan(problem, group, **options)
        own = [plan.shard(x.detach(), 1).requires_grad_() for x in whole]
        results = flash_attn_cp_func(*own, plan=plan, causal=True, return_attn_probs=True)
        loss(plan, *results[:2]).backward()
        return plan, [x.grad for x in own]

    results = on_ranks(ranks, run)
    out, lse, _ = flash_attn_func(*whole, causal=True, return_attn_probs=True)
    total = sum(loss(plan, plan.shard(out, 1), plan.shard(lse, 2)) for plan, _ in results)
    expected_grads = torch.autograd.grad(total, whole)
    for plan, grads in results:
        for ours, theirs in zip(grads, expected_grads):
            tolerance = 1e-10 if device == "cpu" else 3e-2
            torch.testing.assert_close(ours, plan.shard(theirs, 1), atol=tolerance, rtol=0)
