"""Chunks of a prompt against a cache: many query rows, which the prefill kernels compute on a GPU."""

from __future__ import annotations

import pytest
import torch
from harness import captured
from kvcache_harness import KvCase, check_append, check_attention, check_call, make_problem, plan_for, run

LENGTHS = (700, 0, -1, 333, 64)
FEATURES = {
    "full": {},
    "causal": {"causal": True},
    "window": {"window": (200, 0)},
    "softcap": {"softcap": 5.0, "causal": True},
    "alibi": {"alibi": True, "causal": True},
    "leftpad": {"leftpad": (3, 0, 0, 300, 64), "causal": True},
    "sinks": {"sinks": True, "causal": True},
}


@pytest.fixture(params=("wgmma", "wgmma:1", "mma_sync"))
def family(request, device, monkeypatch):
    """Forced where it supports the call."""
    if device == "cpu" and request.param != "wgmma":
        pytest.skip("the CPU backend has no families")
    monkeypatch.setenv("FLASH_ATTN_FAMILY", request.param)
    return request.param


@pytest.mark.each
@pytest.mark.parametrize("features", FEATURES.values(), ids=FEATURES)
@pytest.mark.parametrize("page_size", (0, 1, 16, 48, 256))
def test_accuracy(device, family, page_size, features):
    for head_dim, heads in ((64, (4, 2)), (128, (6, 1))):
        options = {"head_dim": head_dim, "nheads": heads[0], "nheads_k": heads[1], "page_size": page_size, **features}
        check_call(KvCase(LENGTHS, 70, 70, 800, **options), device)
        check_call(KvCase(LENGTHS, 33, None, 800, **options), device)


@pytest.mark.devices("cuda")
@pytest.mark.parametrize("features", FEATURES.values(), ids=FEATURES)
@pytest.mark.parametrize("page_size", (0, 1, 48))
def test_shares_of_keys(device, monkeypatch, page_size, features):
    monkeypatch.setenv("FLASH_ATTN_FAMILY", "wgmma:3")
    for head_dim, heads in ((64, (4, 2)), (128, (6, 1))):
        options = {"head_dim": head_dim, "nheads": heads[0], "nheads_k": heads[1], "page_size": page_size, **features}
        check_call(KvCase(LENGTHS, 70, 70, 800, **options), device)


@pytest.mark.parametrize("layout", ("contiguous", "permuted", "heads_first", "sliced", "unaligned"))
@pytest.mark.parametrize("head_dim", (32, 96, 192, 256))
def test_layouts(device, family, layout, head_dim):
    """Those that are no packed tensor of aligned rows stay with the kernels of the cache."""
    check_call(KvCase(LENGTHS, 40, 40, 800, layout=layout, head_dim=head_dim, causal=True), device)


@pytest.mark.parametrize("interleaved", (False, True))
@pytest.mark.parametrize("rotary_dim", (32, 64))
@pytest.mark.parametrize("mask", ({}, {"causal": True}, {"window": (100, 0)}), ids=str)
def test_rotary(device, family, mask, rotary_dim, interleaved):
    options = {"rotary_dim": rotary_dim, "interleaved": interleaved, **mask}
    check_call(KvCase(LENGTHS, 50, 50, 800, head_dim=64, **options), device)
    check_call(KvCase(LENGTHS, 50, 3, 800, head_dim=128, page_size=16, leftpad=(3, 0, 0, 300, 64), **options), device)


@pytest.mark.parametrize("dtype", ("float16", "bfloat16"))
def test_one_token_of_many_heads(device, family, dtype):
    check_call(KvCase(LENGTHS, 1, 1, 800, nheads=40, nheads_k=2, head_dim=64, dtype=dtype), device)


@pytest.mark.devices("cuda")
@pytest.mark.parametrize("page_size", (0, 16))
@pytest.mark.parametrize("sinks", (False, True))
def test_misfits(device, family, page_size, sinks):
    """A length, and a page or cache row, that do not exist."""
    problem = make_problem(KvCase((40, 90, 17, 0), 40, 2, 200, page_size=page_size, causal=True, sinks=sinks), device)
    before = problem.clone()
    problem.lengths[1] = 10**6
    place = problem.table if page_size else problem.rows
    kept = place.clone()
    place[2] = 10**6
    out, lse = run(problem)
    place.copy_(kept)
    takes_part = (True, False, False, True)
    check_append(problem, before, takes_part)
    check_attention(problem, out, lse, takes_part)


@pytest.mark.devices("cuda")
@pytest.mark.parametrize("page_size", (0, 16))
@pytest.mark.parametrize("sinks", (False, True))
def test_graph_with_changed_lengths(device, page_size, sinks):
    capacity = 1500
    case = KvCase((1000, 3, 0), 100, None, capacity, page_size=page_size, causal=True, sinks=sinks)
    problem = make_problem(case, device)
    torch.nn.init.normal_(problem.k_cache), torch.nn.init.normal_(problem.v_cache)
    if page_size:
        pages = problem.k_cache.shape[0]
        problem.table.copy_(torch.randint(pages, problem.table.shape))
    graph, (out, lse) = captured(lambda: run(problem))
    for lengths in ((1500, 700, 100), (5, -1, 1499)):
        problem.lengths.copy_(torch.tensor(lengths))
        out.fill_(float("nan"))
        graph.replay()
        expected = run(problem)
        assert torch.equal(out, expected[0]) and torch.equal(lse, expected[1])
        serial = run(problem, num_splits=1)  # by the kernels of the cache
        assert torch.linalg.norm(out - serial[0]) < 0.01 * torch.linalg.norm(serial[0])
        assert torch.equal(lse.isinf(), serial[1].isinf())


@pytest.mark.devices("cuda")
@pytest.mark.parametrize("page_size", (0, 16))
def test_chosen_without_being_asked_for(device, monkeypatch, page_size):
    """With a plan too; neither in batch-invariant mode nor where the call chooses the splits."""
    case = KvCase((4000, 2000), 512, None, 4096, nheads=32, nheads_k=8, head_dim=128, page_size=page_size, causal=True)
    problem = make_problem(case, device)
    out = run(problem)[0]
    assert torch.equal(out, run(problem, plan=plan_for(problem))[0])
    monkeypatch.setenv("FLASH_ATTN_FAMILY", "split_kv")
    assert not torch.equal(out, run(problem)[0])
    monkeypatch.setenv("FLASH_ATTN_FAMILY", "mma_sync")
    for options in ({"batch_invariant": True}, {"num_splits": 1}):
        kept = run(problem, **options)[0]
        monkeypatch.setenv("FLASH_ATTN_FAMILY", "split_kv")
        assert torch.equal(kept, run(problem, **options)[0])
        monkeypatch.setenv("FLASH_ATTN_FAMILY", "mma_sync")
