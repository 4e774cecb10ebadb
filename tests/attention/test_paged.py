"""Paged K/V: page sizes, shared and unused pages, invalid table entries where nothing is read."""

from __future__ import annotations

import pytest
import torch
from cases import PAGE_SIZES, Case
from harness import backend_varlen_forward, check_forward, check_public_call, make_problem, run
from reference import gather_pages

DTYPE = "bfloat16"


def paged(device, page_size, lengths=((70, 300), (1, 129), (0, 40), (33, 0), (128, 257)), kind="packed", **options):
    values = {"nheads": 4, "nheads_k": 2, "head_dim": 64, "dtype": DTYPE, **options}
    case = Case(batch=len(lengths), seqlen_q=0, seqlen_k=0, kind=kind, page_size=page_size, **values)
    return make_problem(case, device, list(lengths))


@pytest.mark.parametrize("page_size", PAGE_SIZES)
@pytest.mark.parametrize("kind", ("packed", "seqused", "leftpad"))
def test_page_sizes(device, page_size, kind):
    """Unused pages, page tails and the rows before the left padding are NaN; unused table slots are invalid."""
    check_public_call(paged(device, page_size, kind=kind, causal=True))
    check_public_call(paged(device, page_size, kind=kind, window=(50, 20), softcap=12.0, alibi="batch"))


@pytest.mark.parametrize("family", ("mma_sync", "wgmma", "wgmma:1"))
@pytest.mark.parametrize("page_size", (1, 7, 16, 256))
def test_paged_equals_contiguous_bitwise(device, page_size, family, monkeypatch):
    """Within one kernel family, and at a head dim whose kernels read both: they sum in different orders."""
    monkeypatch.setenv("FLASH_ATTN_FAMILY", family)
    problem = paged(device, page_size, causal=True, head_dim=128)
    out, lse, _ = run(problem)
    k, v = (
        torch.cat([gather_pages(x, row, n) for row, n in zip(problem.block_table, problem.layout.lens_k)])
        for x in (problem.k, problem.v)
    )
    result = backend_varlen_forward(problem, k=k, v=v, block_table=None)
    assert torch.equal(out, result[0]) and torch.equal(lse, result[1])


@pytest.mark.parametrize("page_size", (7, 64))
def test_pages_shared_between_sequences(device, page_size):
    """Prefix sharing: two sequences list the same pages."""
    problem = paged(device, page_size, lengths=((60, 200), (70, 200)))
    problem.block_table[1] = problem.block_table[0]
    check_public_call(problem)


def test_block_table_as_a_strided_view(device):
    problem = paged(device, 16)
    expected = run(problem)[0]
    wide = torch.full((5, problem.block_table.shape[1] * 2), 10**7, dtype=torch.int32, device=device)
    wide[:, : problem.block_table.shape[1]] = problem.block_table
    view = wide[:, : problem.block_table.shape[1]]
    assert not view.is_contiguous()
    assert torch.equal(expected, run(problem, block_table=view)[0])


def test_cache_as_a_permuted_view(device):
    """A cache stored (blocks, heads, page, dim), and K and V as halves of one tensor."""
    problem = paged(device, 16)
    expected = run(problem)[0]
    blocks, page, heads, dim = problem.k.shape
    both = torch.stack([problem.k, problem.v]).permute(1, 0, 3, 2, 4).contiguous()
    problem.k, problem.v = (both[:, i].transpose(1, 2) for i in (0, 1))
    assert problem.k.shape == (blocks, page, heads, dim) and not problem.k.is_contiguous()
    assert torch.equal(expected, run(problem)[0])


def test_table_wider_than_the_sequences(device):
    """A table for the longest sequence that could come; the results depend on the lengths alone."""
    problem = paged(device, 16)
    out, lse, _ = run(problem)
    wide = torch.full((5, 4000), -1, dtype=torch.int32, device=device)
    wide[:, : problem.block_table.shape[1]] = problem.block_table
    other = run(problem, block_table=wide)
    assert torch.equal(out, other[0]) and torch.equal(lse, other[1])


@pytest.mark.parametrize("page_size", (1, 48))
def test_dropout_on_pages(device, page_size):
    problem = paged(device, page_size, dropout=0.3, causal=True)
    out, lse, dmask = run(problem)
    check_forward(problem, out, lse, keep=dmask >= 0)


def test_empty_table(device):
    """No page at all: every query sees no key."""
    problem = paged(device, 16, lengths=((5, 0), (130, 0)))
    problem.block_table = problem.block_table[:, :0]
    out, lse = check_public_call(problem)
    assert (out == 0).all() and torch.isposinf(lse).all()


@pytest.mark.devices("cuda")
@pytest.mark.parametrize("entry", (-1, 10**6, -(2**31), 2**31 - 1))
def test_invalid_page_in_a_used_slot_reads_as_zeros(device, entry):
    """An index in use that names no page never faults; its keys and values count as zeros."""
    problem = paged(device, 16, lengths=((40, 160),))
    pages = problem.block_table[0, 3].item()
    expected_k, expected_v = problem.k.clone(), problem.v.clone()
    expected_k[pages], expected_v[pages] = 0, 0
    expected = backend_varlen_forward(problem, k=expected_k, v=expected_v)[0]
    problem.block_table[0, 3] = entry
    assert torch.equal(expected, backend_varlen_forward(problem)[0])


@pytest.mark.devices("cpu")
@pytest.mark.parametrize("entry", (-1, 10**6))
def test_invalid_page_in_a_used_slot_is_an_error(device, entry):
    problem = paged(device, 16, lengths=((40, 160),))
    problem.block_table[0, 3] = entry
    pages = problem.k.shape[0]
    with pytest.raises(RuntimeError, match=rf"^block_table: expected entries in \[0, {pages}\).*got {entry}"):
        run(problem)
