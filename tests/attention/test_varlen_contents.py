"""Packed batches whose int32 vectors hold anything: every row of every result is written.

What they mean is their running maximum. The memory of the results is NaN beforehand where the allocator hands it out
again. On a GPU each family is forced; a kernel that waits for a turn that never comes would hang.
"""

from __future__ import annotations

import dataclasses
import random

import pytest
import torch
from cases import Case
from harness import Problem, check_forward, check_gradients, run
from reference import Varlen, sequence_bounds

from flash_attn import flash_attn_varlen_func

DTYPE = "bfloat16"
INT_MAX, INT_MIN = 2**31 - 1, -(2**31)
FAMILIES = ("", "mma_sync", "wgmma", "wgmma:1", "wgmma:3", "split_kv")
TOTAL_Q, TOTAL_K = 337, 430


def lengths_instead_of_sums(total, count):
    return [random.randint(0, total // count) for _ in range(count)]


def descending(total, count):
    return sorted((random.randint(0, total) for _ in range(count)), reverse=True)


def unsorted(total, count):
    return [random.randint(0, total) for _ in range(count)]


def extremes(total, count):
    values = (INT_MIN, -1, 0, 1, total - 1, total, total + 1, INT_MAX, random.randint(0, total))
    return [random.choice(values) for _ in range(count)]


def any_int32(total, count):
    return [random.randint(INT_MIN, INT_MAX) for _ in range(count)]


def one_step_back(total, count):
    """Sorted, but for one value that is far below the previous one."""
    values = [0, *sorted(random.randint(0, total) for _ in range(count - 2)), total]
    values[random.randrange(1, count)] = random.randint(0, total // 4)
    return values


CONTENTS = (lengths_instead_of_sums, descending, unsorted, extremes, any_int32, one_step_back)


def layout_of(cu_q, cu_k, seqused=None, leftpad=None, total_q=TOTAL_Q, total_k=TOTAL_K):
    """What docs/semantics.md says of such vectors."""
    bounds_q, bounds_k = sequence_bounds(cu_q, total_q), sequence_bounds(cu_k, total_k)
    batch = len(cu_q) - 1
    starts = list(bounds_k[:-1])
    lens = [b - a for a, b in zip(bounds_k, bounds_k[1:])]
    if seqused is not None:
        starts = [min(max(value, 0), total_k) for value in cu_k[:-1]]
        lens = [min(max(used, 0), total_k - start) for used, start in zip(seqused, starts)]
    pads = [min(max(pad, 0), n) for pad, n in zip(leftpad or [0] * batch, lens)]
    return Varlen(
        bounds_q[:-1], [b - a for a, b in zip(bounds_q, bounds_q[1:])],
        [start + pad for start, pad in zip(starts, pads)], [n - pad for n, pad in zip(lens, pads)], total_q,
    )  # fmt: skip


def problem_of(case, device, cu_q, cu_k, seqused=None, leftpad=None):
    dtype = getattr(torch, case.dtype)

    def int32(values):
        return None if values is None else torch.tensor(values, dtype=torch.int32, device=device)

    q = torch.randn(TOTAL_Q, case.nheads, case.head_dim, device=device, dtype=dtype)
    k, v = (torch.randn(TOTAL_K, case.nheads_k, case.head_dim, device=device, dtype=dtype) for _ in "kv")
    slopes = torch.rand(case.nheads, device=device) * 0.3 if case.alibi != "none" else None
    return Problem(
        case, q, k, v, slopes, layout=layout_of(cu_q, cu_k, seqused, leftpad), cu_seqlens_q=int32(cu_q),
        cu_seqlens_k=int32(cu_k), max_seqlen_q=TOTAL_Q, max_seqlen_k=TOTAL_K, seqused_k=int32(seqused),
        leftpad_k=int32(leftpad),
    )  # fmt: skip


def case_of(batch, **options):
    values = {"head_dim": 64, "nheads": 4, "nheads_k": 2, **options}
    return Case(batch=batch, seqlen_q=0, seqlen_k=0, dtype=DTYPE, kind="packed", **values)


def poison(*likes):
    """The next tensors of these shapes lie in memory full of NaN, where the allocator gives it out again."""
    for like in likes:
        torch.full_like(like, float("nan"))


def check_training_step(problem, deterministic):
    leaves = {name: x.detach().clone().requires_grad_() for name, x in problem.inputs.items()}
    out, lse, _ = run(dataclasses.replace(problem, **leaves), deterministic=deterministic)
    dout = torch.randn_like(out)
    poison(*leaves.values())
    grads = torch.autograd.grad(out, list(leaves.values()), dout)
    check_forward(problem, out, lse)
    if problem.layout.lens_q:
        check_gradients(problem, dout, grads)
    else:  # the reference has no graph
        assert all((grad == 0).all() for grad in grads)


@pytest.fixture(params=FAMILIES, ids=lambda family: family or "chosen")
def family(request, device, monkeypatch):
    """Forces the forward's family; the CPU backend has one, and GPUs other than Hopper have no wgmma."""
    forced = request.param
    if forced and device == "cpu":
        pytest.skip("the CPU backend has no families")
    if forced.startswith("wgmma") and torch.cuda.get_device_capability() != (9, 0):
        pytest.skip("the wgmma family supports compute capability 9.0 only")
    if forced:
        monkeypatch.setenv("FLASH_ATTN_FAMILY", forced)
    return forced


FEATURES = {"full": {}, "causal": {"causal": True}, "window": {"window": (60, 20)}}


@pytest.mark.parametrize("batch", (3, 40))
@pytest.mark.parametrize("features", FEATURES)
@pytest.mark.parametrize("contents", CONTENTS, ids=lambda function: function.__name__)
def test_forward(device, family, contents, features, batch):
    for _ in range(2):
        cu_q, cu_k = (contents(total, batch + 1) for total in (TOTAL_Q, TOTAL_K))
        problem = problem_of(case_of(batch, **FEATURES[features]), device, cu_q, cu_k)
        poison(problem.q, problem.q[..., 0].t().float())
        out, lse, _ = run(problem)
        check_forward(problem, out, lse)


@pytest.mark.each
@pytest.mark.parametrize("deterministic", (False, True))
@pytest.mark.parametrize("head_dim", (32, 64, 128, 256))
@pytest.mark.parametrize("contents", CONTENTS, ids=lambda function: function.__name__)
def test_backward(device, monkeypatch, contents, head_dim, deterministic):
    if device == "cpu" and (head_dim != 64 or deterministic):
        pytest.skip("the CPU backend has one way for all of them")
    for family in ("wgmma", "mma_sync") if device == "cuda" else ("",):
        monkeypatch.setenv("FLASH_ATTN_FAMILY", family)
        for batch, features in ((3, {}), (5, {"causal": True}), (40, {"window": (60, 20)})):
            cu_q, cu_k = (contents(total, batch + 1) for total in (TOTAL_Q, TOTAL_K))
            case = case_of(batch, head_dim=head_dim, **features)
            check_training_step(problem_of(case, device, cu_q, cu_k), deterministic)


@pytest.mark.parametrize("batch", (0, 1, 31, 32, 33, 1023, 1024, 3000))
def test_any_number_of_sequences(device, batch):
    """The running maximum passes from lane to lane, from warp to warp and from round to round."""
    if device == "cpu" and batch > 33:
        pytest.skip("the CPU backend has no rounds")
    cu_q, cu_k = (unsorted(total, batch + 1) for total in (TOTAL_Q, TOTAL_K))
    if batch > 40:  # of many random values the first ones take it all
        cu_q, cu_k = (sorted(cu) for cu in (cu_q, cu_k))
        for cu in (cu_q, cu_k):
            for i in random.sample(range(batch + 1), batch // 10):
                cu[i] = random.randint(0, cu[i])
    check_training_step(problem_of(case_of(batch, causal=True), device, cu_q, cu_k), False)


@pytest.mark.parametrize("features", FEATURES)
def test_seqused_k_is_the_length_alone(device, family, features):
    """Keys beyond the beginning of the next sequence, beginnings in any order, as xformers' gappy masks have them."""
    starts_q = [0, 100, 220, 337]
    for starts_k, used in (([0, 40, 80, 90], [300, 200, 350]), ([350, 10, 0, 0], [77, 412, 260])):
        problem = problem_of(case_of(3, **FEATURES[features]), device, starts_q, starts_k, used)
        assert problem.layout.lens_k == [min(n, TOTAL_K - start) for n, start in zip(used, starts_k)]
        poison(problem.q)
        out, lse, _ = run(problem)
        check_forward(problem, out, lse)


def test_seqused_k_and_leftpad_k_hold_anything(device, family):
    starts_q, starts_k = [0, 100, 220, 437], [5, 100, 50, 430]
    for values in ((INT_MAX, INT_MIN, -1), (0, 431, 7), (430, 1, INT_MAX)):
        for pads in (None, (INT_MAX, INT_MIN, 3), (7, 600, 0)):
            problem = problem_of(case_of(3, causal=True), device, starts_q, starts_k, list(values), pads and list(pads))
            poison(problem.q)
            out, lse, _ = run(problem)
            check_forward(problem, out, lse)


@pytest.mark.big
@pytest.mark.devices("cuda")
@pytest.mark.parametrize("deterministic", (False, True))
def test_backward_beyond_2_to_the_31_elements(device, monkeypatch, deterministic):
    """(total_q + 128 b) h d passes 2^31, where FlashAttention-2 faults: the last sequence is as it is alone."""
    length, batch, heads = 1000, 1060, 16
    total = length * batch
    assert total * heads * 128 > 2**31
    q, dout = (torch.randn(total, heads, 128, device=device, dtype=torch.bfloat16) for _ in range(2))
    k, v = (torch.randn(total, 1, 128, device=device, dtype=torch.bfloat16) for _ in "kv")
    cu = torch.arange(batch + 1, device=device, dtype=torch.int32) * length

    def gradients(rows, cu):
        leaves = [x[rows].detach().requires_grad_() for x in (q, k, v)]
        out = flash_attn_varlen_func(*leaves, cu, cu, length, length, causal=True, deterministic=deterministic)
        return torch.autograd.grad(out, leaves, dout[rows])

    for family in ("wgmma", "mma_sync"):
        monkeypatch.setenv("FLASH_ATTN_FAMILY", family)
        last = slice(total - length, total)
        alone = gradients(last, cu[:2])
        for ours, wanted in zip(gradients(slice(0, total), cu), alone):
            assert (ours[last].float() - wanted.float()).abs().max() <= 0.02 * wanted.float().abs().max()
            assert torch.isfinite(ours).all()
