"""Attention of several tokens over a KV cache by the wgmma decode kernel, whose tile has up to 64 packed rows of a K/V
head: drafts of speculative decoding and short chunks of a prompt."""

from __future__ import annotations

import itertools

import harness
import pytest
import torch
from cases import Case
from kvcache_harness import NO_PAGE, KvCase, check_attention, check_call, make_problem, plan_for, run
from reference import assert_accurate, attention

import flash_attn
from flash_attn import flash_attn_varlen_func, flash_attn_with_kvcache

LENGTHS = (700, 0, 37, 1025, -1, 64, 16)
LONG = [(20, 300), (12, 200)]  # of queries and keys
SHAPES = ({"seqlen_q": 16, "nheads": 8}, {"seqlen_q": 9, "nheads": 8}, {"seqlen_q": 7, "nheads": 14},
          {"seqlen_q": 40, "nheads": 2}, {"seqlen_q": 33, "nheads": 8}, {"nheads": 96},
          {"seqlen_q": 3, "nheads": 71, "nheads_k": 1})  # fmt: skip
FEATURES = (
    {"causal": True}, {}, {"window": (100, 0)}, {"window": (30, 10)}, {"sinks": True, "causal": True},
    {"page_size": 16, "causal": True}, {"page_size": 1}, {"page_size": 24, "window": (80, 3)}, {"page_size": 256},
    {"leftpad": (100, 0, 5, 3, 0, 64, 0), "causal": True}, {"leftpad": (9, 0, 5, 3, 0, 1, 0), "page_size": 16},
    {"seqlen_new": 16, "causal": True}, {"seqlen_new": 3, "page_size": 16}, {"layout": "permuted"},
    {"layout": "heads_first", "causal": True}, {"dtype": "float16", "causal": True},
)  # fmt: skip


@pytest.fixture(autouse=True)
def decode_kernels(device, monkeypatch):
    if device == "cpu":
        pytest.skip("the CPU backend computes any number of rows alike")
    monkeypatch.setenv("FLASH_ATTN_FAMILY", "split_kv")


def case_of(**sizes):
    return KvCase(**{"lengths": LENGTHS, "capacity": 1280, "head_dim": 128, "seqlen_q": 1, **sizes})


def variant(problem):
    options = {"cache_seqlens": problem.lengths, "block_table": problem.table, "causal": problem.case.causal}
    options["cache_batch_idx"] = problem.rows
    tensors = problem.q, problem.k_cache, problem.v_cache
    return flash_attn.explain(flash_attn_with_kvcache, *tensors, **options)["forward"]["variant"]


@pytest.mark.each
@pytest.mark.parametrize("features", FEATURES, ids=str)
@pytest.mark.parametrize("shape", SHAPES, ids=str)
@pytest.mark.parametrize("head_dim", (64, 128))
def test_features(device, head_dim, shape, features):
    check_call(case_of(head_dim=head_dim, **shape, **features), device)


@pytest.mark.parametrize("head_dim", (64, 128))
def test_taken(device, head_dim):
    if torch.cuda.get_device_capability() != (9, 0):
        pytest.skip("the kernel is for compute capability 9.0")
    for rows, expected in ((8, False), (9, True), (16, True), (40, True)):
        problem = make_problem(case_of(head_dim=head_dim, seqlen_q=rows, nheads=8), device)
        assert (variant(problem) == "wgmma") == expected, rows


@pytest.mark.parametrize("num_splits", (1, 2, 7, 128, 2**31 - 1))
def test_splits(device, num_splits):
    for features in ({"causal": True, "sinks": True}, {"window": (200, 20), "page_size": 16}):
        problem = make_problem(case_of(seqlen_q=16, nheads=8, **features), device)
        check_attention(problem, *run(problem, num_splits=num_splits))


def test_long_and_many(device):
    """A tile over many thread blocks, and a thread block with many tiles."""
    long = case_of(lengths=(20000,), capacity=20480, seqlen_q=16, nheads=8, causal=True, page_size=16)
    check_call(long, device)
    many = case_of(lengths=(40, 0, 91, 17) * 40, capacity=96, seqlen_q=16, nheads=32, nheads_k=8, causal=True)
    check_call(many, device)


def test_plan_made_before(device):
    problem = make_problem(case_of(seqlen_q=16, nheads=8, causal=True, page_size=16), device)
    expected = run(problem)
    planned = run(problem, plan=plan_for(problem))
    assert all(torch.equal(a, b) for a, b in zip(planned, expected, strict=True))


@pytest.mark.parametrize("num_splits", (0, 1, 5))
def test_missing_page(device, num_splits):
    """A request with a page that the pool does not have is inactive, in whichever part of a tile; others keep their
    results."""
    problem = make_problem(case_of(seqlen_q=40, nheads=8, causal=True, page_size=16), device)
    out, lse = run(problem, num_splits=num_splits)
    for page, slot in itertools.product(NO_PAGE, (0, 30, 43)):
        own = problem.table[0, slot].item()
        problem.table[0, slot] = page
        other_out, other_lse = run(problem, num_splits=num_splits)
        problem.table[0, slot] = own
        assert torch.equal(other_out[1:], out[1:]) and torch.equal(other_lse[1:], lse[1:])
        assert (other_out[0] == 0).all() and (other_lse[0] == float("inf")).all()


def test_cache_row_out_of_range(device):
    """A request whose row the cache does not have is inactive."""
    problem = make_problem(case_of(seqlen_q=16, nheads=8, causal=True, sinks=True), device)
    out, lse = run(problem)
    for row in (-1, len(problem.k_cache), 2**31 - 1):
        problem.rows[3] = row
        other_out, other_lse = run(problem)
        assert (other_out[3] == 0).all() and (other_lse[3] == float("inf")).all()
        for i in (0, 1, 2, 4, 5, 6):
            assert torch.equal(other_out[i], out[i]) and torch.equal(other_lse[i], lse[i])


@pytest.mark.each
@pytest.mark.parametrize("kind", ("packed", "padded", "seqused", "leftpad"))
@pytest.mark.parametrize(
    "features", ({}, {"sinks": True, "causal": True}, {"window": (60, 5)}, {"page_size": 7}), ids=str
)
@pytest.mark.parametrize("head_dim", (64, 128))
def test_packed_lengths(device, head_dim, features, kind):
    """Packed sequences of several lengths, 0 among them."""
    if kind == "padded" and "page_size" in features:
        pytest.skip("rows after the last key lie in no page")
    case = Case(9, 40, 900, 8, 2, head_dim, "bfloat16", kind=kind, **features)
    problem = harness.make_problem(case, device)
    harness.check_forward(problem, *harness.run(problem)[:2])


def test_packed_missing_page(device):
    """Packed keys in pages that the pool does not have are zeros."""
    problem = harness.make_problem(Case(2, 16, 300, 8, 2, 128, "bfloat16", kind="packed", page_size=16), device, LONG)
    zeroed = problem.block_table[0, 3].item()
    for x in (problem.k, problem.v):
        x[zeroed] = 0
    out, lse, _ = harness.run(problem)
    for page in NO_PAGE:
        problem.block_table[0, 3] = page
        other_out, other_lse, _ = harness.run(problem)
        assert torch.equal(other_out, out) and torch.equal(other_lse, lse)


@pytest.mark.parametrize("page_size", (0, 16))
@pytest.mark.parametrize("head_dim", (64, 128))
def test_packed(device, head_dim, page_size):
    """Packed sequences as dense ones, bit for bit where they are equally long."""
    batch, rows, keys = 3, 16, 512
    q = torch.randn(batch, rows, 8, head_dim, device=device, dtype=torch.bfloat16)
    k, v = (torch.randn(batch, keys, 2, head_dim, device=device, dtype=torch.bfloat16) for _ in range(2))
    cu_q, cu_k = (torch.arange(batch + 1, device=device, dtype=torch.int32) * n for n in (rows, keys))
    pages = {}
    packed_k, packed_v = k.flatten(0, 1), v.flatten(0, 1)
    if page_size:
        packed_k, packed_v = (x.view(-1, page_size, 2, head_dim) for x in (k, v))
        pages["block_table"] = torch.arange(len(packed_k), device=device, dtype=torch.int32).view(batch, -1)
    out = flash_attn_varlen_func(q.flatten(0, 1), packed_k, packed_v, cu_q, cu_k, rows, keys, causal=True, **pages)
    expected, plain = (attention(q, k, v, causal=True, dtype=dtype).out for dtype in (torch.float64, q.dtype))
    assert_accurate(out.view_as(q), expected, plain)
    if not page_size:
        assert torch.equal(out.view_as(q), flash_attn.flash_attn_func(q, k, v, causal=True))
