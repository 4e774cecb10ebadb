"""GPUs with 99 KB of shared memory for a thread block (sm_86, 89, 120), which FLASH_ATTN_SMEM_LIMIT makes of any.

At head dim 32 and above 128 their backward has other tiles, above 256 the forward too. Forward and cache take fewer
stages.
"""

from __future__ import annotations

import kernel_tables
import pytest
import torch
from cases import Case
from cp_kernel_harness import Call, P, close
from harness import check_gradients, make_problem
from reference import assert_accurate, attention
from test_backward_families import gradients
from test_families import FEATURES

from flash_attn import explain, flash_attn_func, flash_attn_with_kvcache

pytestmark = pytest.mark.devices("cuda")

DTYPE = "bfloat16"
LIMIT = 99 * 1024
SMALL_TILES = kernel_tables.head_dims("kSmallBwdTiles", "bwd_tiles.h")
HEAD_DIMS = (136, 160, 224, *SMALL_TILES)


@pytest.fixture(autouse=True)
def small(monkeypatch):
    monkeypatch.setenv("FLASH_ATTN_SMEM_LIMIT", str(LIMIT))


def check(case, device, monkeypatch):
    problem = make_problem(case, device)
    results, dout, dlse, kept = gradients(problem, monkeypatch, "mma_sync")
    check_gradients(problem, dout, results, kept, dlse)


@pytest.mark.parametrize("features", FEATURES.values(), ids=FEATURES)
@pytest.mark.parametrize("head_dim", HEAD_DIMS)
def test_dense(device, monkeypatch, head_dim, features):
    check(Case(2, 333, 401, 4, 2, head_dim, DTYPE, **features), device, monkeypatch)


@pytest.mark.parametrize("head_dim", SMALL_TILES)
def test_float16(device, monkeypatch, head_dim):
    check(Case(1, 300, 300, 6, 2, head_dim, "float16", causal=True), device, monkeypatch)


@pytest.mark.parametrize("kind", ("packed", "padded"))
@pytest.mark.parametrize("features", ("full", "causal", "window", "everything"))
@pytest.mark.parametrize("head_dim", SMALL_TILES)
def test_packed(device, monkeypatch, head_dim, features, kind):
    options = dict(FEATURES[features], alibi="batch") if features == "everything" else FEATURES[features]
    check(Case(7, 200, 350, 4, 2, head_dim, DTYPE, kind=kind, **options), device, monkeypatch)


@pytest.mark.parametrize("head_dim", SMALL_TILES)
@pytest.mark.parametrize(
    "seqlen_q, seqlen_k", [(1, 1), (1, 1500), (64, 129), (65, 127), (129, 64), (193, 20), (500, 0), (63, 33)]
)
@pytest.mark.parametrize("causal", (False, True))
def test_lengths(device, monkeypatch, head_dim, seqlen_q, seqlen_k, causal):
    check(Case(2, seqlen_q, seqlen_k, 4, 1, head_dim, DTYPE, causal=causal), device, monkeypatch)


@pytest.mark.parametrize("dropout", (0.0, 0.2))
@pytest.mark.parametrize("head_dim", SMALL_TILES)
def test_deterministic_twice(device, monkeypatch, head_dim, dropout):
    problem = make_problem(Case(2, 700, 1100, 8, 4, head_dim, DTYPE, causal=True, dropout=dropout), device)
    first, dout, dlse, kept = gradients(problem, monkeypatch, "mma_sync", deterministic=True)
    again = gradients(problem, monkeypatch, "mma_sync", deterministic=True)[0]
    assert all(torch.equal(a, b) for a, b in zip(first, again))
    check_gradients(problem, dout, first, kept, dlse)


@pytest.mark.parametrize("is_packed", (False, True), ids=("dense", "packed"))
@pytest.mark.parametrize("slopes, dropout, window", [(False, 0.0, (-1, 0)), (True, P, (-1, -1))])
@pytest.mark.parametrize("head_dim", (160, *SMALL_TILES))
def test_origins_and_sums_in_float32(device, monkeypatch, head_dim, slopes, dropout, window, is_packed):
    monkeypatch.setenv("FLASH_ATTN_FAMILY", "mma_sync")
    call = Call(device, is_packed, (4, 2), (head_dim, head_dim))
    call.origins[1, 3] = 32  # bias within reach of all scores
    slopes = torch.rand(4, device=device) * 0.02 if slopes else None
    features = {"dropout": dropout, "window": window, "scale": head_dim**-0.5}
    out, lse, *_ = call.forward(slopes, **features)
    sums = [torch.ones_like(x, dtype=torch.float32) for x in (call.k, call.v)]
    dq, *_ = call.backward(out, lse, slopes, grads=(None, *sums), accumulate_dkv=True, **features)
    reference, their_slopes = call.reference(), None if slopes is None else slopes.cpu()
    expected = reference.forward(their_slopes, **features)
    theirs = reference.backward(*expected[:2], their_slopes, **features)
    for name, ours, other in zip(("dq", "dk", "dv"), (dq, *(x - 1 for x in sums)), theirs):
        close(ours, other, name)


@pytest.mark.parametrize("head_dim", (32, 64, 128, 192, 256, 512))
def test_plans_fit(device, head_dim):
    q, k, v = (torch.randn(2, 200, 2, head_dim, device=device, dtype=torch.bfloat16) for _ in "qkv")
    plans = explain(flash_attn_func, *(x.requires_grad_() for x in (q, k, v)), dropout_p=0.1)
    for plan in plans.values():
        assert plan["kernel"] == "mma_sync" and 0 < plan["smem_bytes"] <= LIMIT
    small_tile = {256: (32, 64), 512: (16, 32)}.get(head_dim, (64, 64))
    assert (plans["backward"]["block_m"], plans["backward"]["block_n"]) == small_tile


@pytest.mark.parametrize("head_dim", (64, 128, 256, 512))
@pytest.mark.parametrize("seqlen_q", (1, 8, 40))
def test_cache(device, head_dim, seqlen_q):
    q = torch.randn(3, seqlen_q, 8, head_dim, device=device, dtype=torch.bfloat16)
    k, v = (torch.randn(3, 1000, 2, head_dim, device=device, dtype=torch.bfloat16) for _ in "kv")
    lengths = torch.tensor([40, 700, 1000], device=device, dtype=torch.int32)
    out = flash_attn_with_kvcache(q, k, v, cache_seqlens=lengths, causal=True)
    right, plain = (
        torch.cat([attention(q[[i]], k[[i], :n], v[[i], :n], causal=True, dtype=dtype).out
                   for i, n in enumerate(lengths.tolist())])
        for dtype in (torch.float64, q.dtype)
    )  # fmt: skip
    assert_accurate(out, right, plain)


@pytest.mark.parametrize("value", ("", "lots", "0", "-5", "99KB"))
def test_a_limit_is_a_number(device, monkeypatch, value):
    monkeypatch.setenv("FLASH_ATTN_SMEM_LIMIT", value)
    q = torch.randn(1, 10, 1, 64, device=device, dtype=torch.bfloat16)
    with pytest.raises(RuntimeError, match="^FLASH_ATTN_SMEM_LIMIT: expected a number of bytes, got"):
        flash_attn_func(q, q, q)
