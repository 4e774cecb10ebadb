"""flash_attn_with_kvcache on paged caches: page sizes, page edges, shared pages, entries that are not used."""

from __future__ import annotations

import pytest
import torch
from kvcache_harness import NO_PAGE, KvCase, check_append, check_attention, check_call, get_rows, make_problem, run

pytestmark = pytest.mark.by_both_paths

PAGE_SIZES = (1, 3, 16, 17, 256)
FEATURES = ({}, {"causal": True, "softcap": 6.0}, {"window": (40, 2), "alibi": True})


@pytest.mark.each
@pytest.mark.parametrize("page_size", PAGE_SIZES)
@pytest.mark.parametrize("features", FEATURES, ids=str)
@pytest.mark.parametrize("seqlen_q,seqlen_new", ((1, None), (1, 1), (3, 5)))
def test_page_sizes(device, page_size, features, seqlen_q, seqlen_new):
    """Page tails and unused pages are NaN, unused table entries name no page."""
    case = KvCase((40, 0, 290, 17), seqlen_q, seqlen_new, capacity=300, page_size=page_size, **features)
    check_call(case, device)


@pytest.mark.parametrize("page_size", PAGE_SIZES)
@pytest.mark.parametrize("rotary_dim", (0, 32))
def test_append_across_page_edges(device, page_size, rotary_dim):
    """The new rows begin at every distance from a page's end, and cover several pages."""
    lengths = tuple(max(0, 2 * page_size + offset) for offset in (-2, -1, 0, 1, page_size - 1, page_size + 1))
    capacity = 4 * page_size + 40
    for new in (1, 2, 5, min(page_size, 20) + 3):
        case = KvCase(lengths, 2, new, capacity, page_size=page_size, causal=True, rotary_dim=rotary_dim)
        check_call(case, device)


@pytest.mark.parametrize("page_size", (3, 16, 64))
@pytest.mark.parametrize("num_splits", (0, 1, 5))
def test_long_sequences(device, page_size, num_splits):
    lengths = (3000, 0, -1, 1, 511, 2048)
    case = KvCase(lengths, capacity=3001, nheads=8, nheads_k=1, seqlen_new=1, page_size=page_size)
    check_call(case, device, num_splits=num_splits)


@pytest.mark.parametrize("page_size", (16, 17))
@pytest.mark.parametrize("seqlen_q", (65, 130))
def test_chunks_of_a_prompt(device, page_size, seqlen_q):
    case = KvCase((0, 1, 200, 64), seqlen_q, seqlen_q, capacity=333, page_size=page_size, causal=True, rotary_dim=64)
    check_call(case, device)


@pytest.mark.parametrize("page_size", (1, 16))
def test_padding_requests_need_no_pages(device, page_size):
    """Their table rows name no page; nothing is written for them."""
    check_call(KvCase((10, -1, 20, -1), seqlen_new=1, page_size=page_size, rotary_dim=16), device)
    check_call(KvCase((-1, -1), seqlen_new=1, page_size=page_size), device)


@pytest.mark.parametrize("page_size", (3, 16))
def test_left_padding(device, page_size):
    """Pages that hold nothing but padding are not needed."""
    problem = make_problem(KvCase(leftpad=(33, 0, 90, 17), seqlen_q=2, seqlen_new=2, page_size=page_size), device)
    before = problem.clone()
    problem.table[0, : 33 // page_size] = NO_PAGE[1]
    problem.table[2, : 90 // page_size] = NO_PAGE[0]
    out, lse = run(problem)
    problem.table[0, : 33 // page_size] = problem.table[2, : 90 // page_size] = 0
    check_append(problem, before)
    check_attention(problem, out, lse)


@pytest.mark.each
@pytest.mark.parametrize("options", ({}, {"num_splits": 1}, {"num_splits": 5}, {"batch_invariant": True}), ids=str)
@pytest.mark.parametrize("page_size", (3, 16))
@pytest.mark.parametrize("seqlen_q,seqlen_new", ((1, None), (1, 1), (64, None), (130, 2)))
def test_pages_before_the_window(device, page_size, seqlen_q, seqlen_new, options):
    """Pages that no query sees are not needed, also where a kernel's first step of keys begins in them."""
    lengths, left = (1000, 700, 333), 200
    case = KvCase(lengths, seqlen_q, seqlen_new, capacity=1010, page_size=page_size, window=(left, 0))
    problem = make_problem(case, device)
    before, whole_table = problem.clone(), problem.table.clone()
    dead = [max(0, n + (seqlen_new or 0) - seqlen_q - left) // page_size for n in lengths]
    for i, pages in enumerate(dead):
        problem.table[i, :pages] = NO_PAGE[i % 2]
    out, lse = run(problem, **options)
    problem.table.copy_(whole_table)
    if seqlen_new:
        check_append(problem, before)
    check_attention(problem, out, lse)


@pytest.mark.parametrize("page_size", (16, 17))
def test_pages_shared_between_sequences(device, page_size):
    """Sequences with a common beginning list the same pages."""
    problem = make_problem(KvCase((60, 85, 70), seqlen_q=2, page_size=page_size, causal=True), device)
    problem.table[:, :3] = problem.table[0, :3]
    check_attention(problem, *run(problem))


@pytest.mark.parametrize("layout", ("heads_first", "sliced", "unaligned", "permuted"))
@pytest.mark.parametrize("head_dim", (64, 37))
def test_layouts_of_pages(device, layout, head_dim):
    case = KvCase(seqlen_q=2, seqlen_new=2, page_size=16, layout=layout, head_dim=head_dim, causal=True)
    check_call(case, device)


@pytest.mark.parametrize("head_dim", (8, 72, 100, 192, 256, 512))
def test_head_dims(device, head_dim):
    """Few rows, and more than any tile holds."""
    for new in (2, 70):
        case = KvCase((40, 0, 20, 17), new, new, 140, head_dim=head_dim, page_size=7, causal=True)
        check_call(case, device)


def test_table_as_a_view(device):
    problem = make_problem(KvCase(page_size=16, seqlen_new=1), device)
    expected = run(problem.clone())
    wide = torch.full((4, problem.table.shape[1] + 9), 10**7, dtype=torch.int32, device=device)
    wide[:, : problem.table.shape[1]] = problem.table
    for table in (wide[:, : problem.table.shape[1]], problem.table.long(), problem.table.t().contiguous().t()):
        result = run(problem.clone(), block_table=table)
        assert all(torch.equal(a, b) for a, b in zip(result, expected))


@pytest.mark.parametrize("page_size", (1, 16))
def test_table_wider_than_the_pool(device, page_size):
    """The capacity is what the table could list; the pages that are used exist."""
    problem = make_problem(KvCase((40, 3, 0), page_size=page_size, seqlen_new=2), device)
    before = problem.clone()
    unused = torch.full((3, 500), NO_PAGE[0], dtype=torch.int32, device=device)
    problem.table = torch.cat([problem.table, unused], dim=1)
    out, lse = run(problem)
    check_append(problem, before)
    check_attention(problem, out, lse)


def test_paged_equals_dense(device):
    """The same keys once dense, once in pages."""
    paged = make_problem(KvCase((40, 7, 91, 17), seqlen_q=3, page_size=16, causal=True, dtype="float16"), device)
    dense = make_problem(KvCase((40, 7, 91, 17), seqlen_q=3, causal=True, dtype="float16"), device)
    for i, n in enumerate(paged.case.lengths):
        for name in ("k_cache", "v_cache"):
            getattr(dense, name)[dense.rows[i], :n] = get_rows(paged, getattr(paged, name), i, 0, n)
    dense.q = paged.q
    for ours, theirs in zip(run(paged), run(dense)):
        assert (ours - theirs).abs().max() < 2e-3
