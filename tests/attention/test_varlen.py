"""Concatenated sequences: lengths, padding rows, bounds, and independence of the sequences from each other."""

from __future__ import annotations

import random

import pytest
import torch
from cases import Case
from harness import backend_varlen_forward, check_forward, check_public_call, make_problem, run

from flash_attn import (
    flash_attn_func,
    flash_attn_kvpacked_func,
    flash_attn_qkvpacked_func,
    flash_attn_varlen_func,
    flash_attn_varlen_kvpacked_func,
    flash_attn_varlen_qkvpacked_func,
)

DTYPE = "bfloat16"
KINDS = ("packed", "padded", "seqused", "leftpad")
NAN = float("nan")


def case_of(batch, kind="packed", page_size=0, **options):
    values = {"head_dim": 64, "dtype": DTYPE, "nheads": 2, "nheads_k": 1, **options}
    return Case(batch=batch, seqlen_q=0, seqlen_k=0, kind=kind, page_size=page_size, **values)


def random_lengths(batch, most_q, most_k):
    return [(random.choice((0, 1, random.randint(0, most_q))), random.choice((0, 1, random.randint(0, most_k))))
            for _ in range(batch)]  # fmt: skip


@pytest.mark.each
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("page_size", (0, 16))
@pytest.mark.parametrize("batch", (1, 2, 5, 32, 33, 65))
def test_random_lengths(device, kind, page_size, batch):
    for causal, window in ((True, (-1, -1)), (False, (20, 35))):
        case = case_of(batch, kind, page_size, causal=causal, window=window)
        check_public_call(make_problem(case, device, random_lengths(batch, 150, 200)))


@pytest.mark.each
@pytest.mark.parametrize("lengths", ([(0, 0)], [(0, 5)], [(5, 0)], [(0, 0), (3, 4), (0, 0)], [(0, 9)] * 4,
                                     [(129, 0), (0, 129), (1, 1)], [(64, 64)] * 3 + [(0, 0)] * 40 + [(1, 300)]),
                         ids=lambda x: f"{len(x)}seqs{x[0]}")  # fmt: skip
@pytest.mark.parametrize("kind", KINDS)
def test_zero_lengths(device, kind, lengths):
    for causal in (False, True):
        check_public_call(make_problem(case_of(len(lengths), kind, causal=causal), device, lengths))


@pytest.mark.parametrize("total_q", (0, 5))
@pytest.mark.parametrize("total_k", (0, 7))
def test_batch_of_no_sequences(device, total_q, total_k):
    """cu_seqlens = [0]: every row is padding, gradients included."""
    dtype = getattr(torch, DTYPE)
    q = torch.randn(total_q, 4, 64, device=device, dtype=dtype, requires_grad=True)
    k = torch.randn(total_k, 2, 64, device=device, dtype=dtype, requires_grad=True)
    zero = torch.zeros(1, dtype=torch.int32, device=device)
    out, lse, _ = flash_attn_varlen_func(q, k, k, zero, zero, 0, 0, return_attn_probs=True)
    assert out.shape == q.shape and (out == 0).all()
    assert lse.shape == (4, total_q) and torch.isposinf(lse).all()
    for deterministic in (False, True):
        out = flash_attn_varlen_func(q, k, k, zero, zero, 0, 0, deterministic=deterministic)
        dq, dk = torch.autograd.grad(out, (q, k), torch.randn_like(out))
        assert (dq == 0).all() and (dk == 0).all()


def test_rows_before_the_first_sequence_are_padding(device):
    """cu_seqlens[0] > 0: the rows before it belong to no sequence."""
    lengths = [(40, 50), (150, 60)]
    problem = make_problem(case_of(2, causal=True), device, [(30, 30), (300, 33)] + lengths)
    out_all, lse_all, _ = run(problem)
    cu_q, cu_k = problem.cu_seqlens_q[2:].contiguous(), problem.cu_seqlens_k[2:].contiguous()
    first = int(cu_q[0])
    out, lse = backend_varlen_forward(problem, cu_seqlens_q=cu_q, cu_seqlens_k=cu_k)[:2]
    assert torch.equal(out[first:], out_all[first:]) and torch.equal(lse[:, first:], lse_all[:, first:])
    assert (out[:first] == 0).all()
    assert torch.isposinf(lse[:, :first]).all()


@pytest.mark.parametrize("kind", KINDS)
def test_padding_rows_are_written(device, kind):
    """A poisoned out tensor has no poison left: padding rows are 0, their LSE is +inf."""
    problem = make_problem(case_of(4, kind), device, [(65, 80), (0, 3), (10, 0), (129, 200)])
    if kind != "padded":
        problem.q = torch.cat([problem.q, torch.full_like(problem.q[:300], NAN)])
    out = torch.full_like(problem.q, NAN)
    result, lse = backend_varlen_forward(problem, out=out)[:2]
    end = problem.layout.starts_q[-1] + problem.layout.lens_q[-1]
    assert result.data_ptr() == out.data_ptr()
    assert (out[end:] == 0).all() and torch.isfinite(out).all()
    assert torch.isposinf(lse[:, end:]).all() and not lse.isnan().any()


@pytest.mark.parametrize("maxima", ((1, 1), (10**6, 10**6), (0, 0), (64, 2**31 - 1)), ids=str)
def test_max_seqlens_do_not_change_the_result(device, maxima):
    """An over- or under-estimate skips no row."""
    problem = make_problem(case_of(3, causal=True), device, [(150, 200), (1, 300), (260, 30)])
    out, lse, _ = run(problem)
    other_out, other_lse, _ = run(problem, max_seqlen_q=maxima[0], max_seqlen_k=maxima[1])
    check_forward(problem, out, lse)
    assert torch.equal(out, other_out) and torch.equal(lse, other_lse)


@pytest.mark.parametrize("maxima", ((1, 1), (130, 1), (1, 130), (500, 600)), ids=str)
def test_max_seqlens_size_s_dmask(device, maxima):
    """Too small a bound cuts S_dmask and nothing else; too large a one pads it with zeros."""
    problem = make_problem(case_of(2, dropout=0.3), device, [(150, 200), (90, 300)])
    torch.manual_seed(0)
    out, lse, dmask = run(problem)
    torch.manual_seed(0)
    other_out, other_lse, other_dmask = run(problem, max_seqlen_q=maxima[0], max_seqlen_k=maxima[1])
    assert torch.equal(out, other_out) and torch.equal(lse, other_lse)
    shape = [(n + 127) // 128 * 128 for n in maxima]
    assert list(other_dmask.shape[2:]) == shape
    rows, columns = min(shape[0], dmask.shape[2]), min(shape[1], dmask.shape[3])
    assert torch.equal(dmask[:, :, :rows, :columns], other_dmask[:, :, :rows, :columns])
    assert (other_dmask[:, :, rows:] == 0).all() and (other_dmask[:, :, :, columns:] == 0).all()


def test_max_seqlen_as_tensors(device):
    problem = make_problem(case_of(3, dropout=0.2), device, [(50, 70), (0, 3), (130, 90)])
    results = []
    for convert in (int, lambda n: torch.tensor(n, dtype=torch.int32, device=device), torch.tensor):
        torch.manual_seed(1)
        results.append(run(problem, max_seqlen_q=convert(130), max_seqlen_k=convert(90)))
    for result in results[1:]:
        assert all(torch.equal(a, b) for a, b in zip(result, results[0]))


def test_int64_lengths(device):
    problem = make_problem(case_of(3), device, [(50, 70), (0, 3), (130, 90)])
    out, lse, _ = run(problem)
    long_q, long_k = problem.cu_seqlens_q.long(), problem.cu_seqlens_k.long()
    other = run(problem, cu_seqlens_q=long_q, cu_seqlens_k=long_k)
    assert torch.equal(out, other[0]) and torch.equal(lse, other[1])


def test_lengths_as_strided_views(device):
    """A column of a table of lengths is no contiguous vector."""
    problem = make_problem(case_of(3), device, [(50, 70), (0, 3), (130, 90)])
    out = run(problem)[0]
    column = torch.stack([problem.cu_seqlens_q] * 3, dim=1)[:, 1]
    assert torch.equal(out, run(problem, cu_seqlens_q=column)[0])


@pytest.mark.parametrize("page_size", (0, 16))
def test_lengths_beyond_the_storage_are_clamped(device, page_size):
    """cu_seqlens, seqused_k and leftpad_k past the allocation read nothing beyond it."""
    problem = make_problem(case_of(2, "seqused", page_size), device, [(40, 60), (70, 80)])
    if page_size:
        problem.block_table = problem.block_table[:, :5].contiguous()
    capacity = 80 if page_size else None
    k = problem.k.nan_to_num()
    v = problem.v.nan_to_num()
    huge = torch.full_like(problem.seqused_k, 10**9)
    if page_size:
        problem.block_table.fill_(0)
        limit = torch.full_like(problem.seqused_k, capacity)
    else:
        limit = len(k) - problem.cu_seqlens_k[:-1]
    clamped = backend_varlen_forward(problem, k=k, v=v, seqused_k=huge)
    exact = backend_varlen_forward(problem, k=k, v=v, seqused_k=limit)
    assert torch.equal(clamped[0], exact[0]) and torch.equal(clamped[1], exact[1])
    none = backend_varlen_forward(problem, k=k, v=v, leftpad_k=huge)
    assert (none[0] == 0).all() and torch.isposinf(none[1]).all()
    negative = backend_varlen_forward(problem, k=k, v=v, seqused_k=-huge)
    assert (negative[0] == 0).all() and torch.isposinf(negative[1]).all()


def test_total_smaller_than_cu_seqlens_is_clamped(device):
    """cu_seqlens that run past the rows of q and k: the rows that exist are attended, nothing else is touched."""
    problem = make_problem(case_of(2), device, [(40, 60), (70, 80)])
    short = backend_varlen_forward(problem, q=problem.q[:90].contiguous(), k=problem.k[:100].contiguous(),
                                   v=problem.v[:100].contiguous())  # fmt: skip
    exact_q = torch.tensor([0, 40, 90], dtype=torch.int32, device=device)
    exact_k = torch.tensor([0, 60, 100], dtype=torch.int32, device=device)
    exact = backend_varlen_forward(problem, q=problem.q[:90].contiguous(), cu_seqlens_q=exact_q, cu_seqlens_k=exact_k)
    assert torch.equal(short[0], exact[0]) and torch.equal(short[1], exact[1])


@pytest.mark.parametrize("kind", KINDS)
def test_a_sequence_does_not_depend_on_its_neighbours(device, kind):
    """Batch-composition bit equality: alone and among others, a sequence gives the same bits."""
    lengths = [(100, 130), (17, 300), (200, 64)]
    problem = make_problem(case_of(3, kind, causal=True), device, lengths)
    out, lse, _ = run(problem)
    for i in range(3):
        q0, sq = problem.layout.starts_q[i], lengths[i][0]
        k0, sk = problem.layout.starts_k[i], lengths[i][1]
        single = flash_attn_func(
            problem.q[None, q0 : q0 + sq], problem.k[None, k0 : k0 + sk], problem.v[None, k0 : k0 + sk],
            causal=True, return_attn_probs=True,
        )  # fmt: skip
        assert torch.equal(out[q0 : q0 + sq], single[0][0])
        assert torch.equal(lse[:, q0 : q0 + sq], single[1][0])


def test_dense_equals_varlen(device):
    case = Case(3, 140, 200, 4, 2, 64, DTYPE, causal=True, window=(90, -1), softcap=20.0, alibi="batch")
    problem = make_problem(case, device)
    out, lse, _ = run(problem)
    cu_q, cu_k = (torch.arange(4, device=device, dtype=torch.int32) * n for n in (140, 200))
    packed = flash_attn_varlen_func(
        *(x.flatten(0, 1) for x in (problem.q, problem.k, problem.v)), cu_q, cu_k, 140, 200, causal=True,
        window_size=(90, -1), softcap=20.0, alibi_slopes=problem.alibi_slopes, return_attn_probs=True,
    )  # fmt: skip
    assert torch.equal(out.flatten(0, 1), packed[0])
    assert torch.equal(lse, packed[1].view(4, 3, 140).transpose(0, 1))


def test_packed_forms_equal_the_separate_form(device):
    qkv = torch.randn(2, 90, 3, 4, 64, device=device, dtype=getattr(torch, DTYPE))
    q, k, v = qkv.unbind(2)
    out = flash_attn_func(q, k, v, causal=True)
    assert torch.equal(out, flash_attn_qkvpacked_func(qkv, causal=True))
    assert torch.equal(out, flash_attn_kvpacked_func(q, qkv[:, :, 1:], causal=True))
    cu = torch.tensor([0, 90, 180], device=device, dtype=torch.int32)
    flat = qkv.flatten(0, 1)
    assert torch.equal(out.flatten(0, 1), flash_attn_varlen_qkvpacked_func(flat, cu, 90, causal=True))
    kvpacked = flash_attn_varlen_kvpacked_func(flat[:, 0], flat[:, 1:], cu, cu, 90, 90, causal=True)
    assert torch.equal(out.flatten(0, 1), kvpacked)


@pytest.mark.devices("cuda")
def test_many_sequences(device):
    """More sequences than a search probes at once, at each depth of the search."""
    for batch in (1023, 1025, 3000):
        lengths = [(random.choice((0, 0, 1, 3, 130)), random.choice((0, 1, 40))) for _ in range(batch)]
        problem = make_problem(case_of(batch, causal=True, nheads=1), device, lengths)
        check_public_call(problem)
