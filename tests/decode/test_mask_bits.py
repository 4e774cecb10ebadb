"""mask_bits of flash_attn_with_kvcache: trees of drafts over dense and paged caches; float64 is the reference."""

from __future__ import annotations

import dataclasses

import pytest
import torch
from fp8_cache_harness import FORMATS, call, check, eight_bit_problem
from kvcache_harness import KvCase, check_append, check_attention, check_call, make_problem, places, plan_for, run
from test_kvcache_graphs import captured, fill
from test_kvcache_ops import BACKENDS, CORE, OPTIONS, compiled
from torch.library import opcheck

from flash_attn import explain, flash_attn_with_kvcache
from flash_attn.masks.factors import pack_bits

TREE = {"seqlen_q": 6, "seqlen_new": 6, "mask_keys": 6}
FEATURES = ({}, {"causal": True}, {"window": (20, 0)}, {"window": (7, 2)}, {"softcap": 4.0}, {"alibi": True},
            {"sinks": True}, {"leftpad": (3, 0, 93, 17)}, {"rotary_dim": 32, "causal": True}, {"mask_heads": 2},
            {"mask_heads": 4, "mask_shared": True}, {"mask_shared": True})  # fmt: skip


def test_no_heads(device):
    q, cache = (torch.randn(2, n, 0, 64, device=device).bfloat16() for n in (3, 40))
    seen = torch.ones(2, 0, 3, 5, dtype=torch.bool, device=device)
    assert flash_attn_with_kvcache(q, cache, cache, cache_seqlens=9, mask_bits=seen).shape == q.shape


def test_no_keys(device):
    q, cache = (torch.randn(2, n, 4, 64, device=device).half() for n in (3, 40))
    expected = flash_attn_with_kvcache(q, cache, cache, cache_seqlens=9)
    for dtype in (torch.bool, torch.uint8, torch.int32):
        none = torch.empty(1, 3, 0, dtype=dtype, device=device)
        out = flash_attn_with_kvcache(q, cache, cache, cache_seqlens=9, mask_bits=none, mask_keys=0)
        torch.testing.assert_close(out, expected, rtol=1e-2, atol=1e-3)


@pytest.mark.parametrize("features", FEATURES, ids=str)
@pytest.mark.parametrize("page_size", (0, 16, 7))
def test_features(device, features, page_size):
    """Rows that see no key have result 0, or the sink."""
    lengths = (40, 0, 90, -1)
    check_call(KvCase(lengths, page_size=page_size, **TREE, **features), device)


@pytest.mark.parametrize("seqlen_q", (1, 2, 31, 33, 64))
@pytest.mark.parametrize("nheads,nheads_k", ((4, 4), (8, 2), (12, 4), (16, 1)))
@pytest.mark.parametrize("page_size", (0, 32))
def test_tokens_and_heads(device, seqlen_q, nheads, nheads_k, page_size):
    """Packed rows of every tile, of one K/V head and of two, and several tiles."""
    case = KvCase((300, 17, 0), seqlen_q, seqlen_q, 400, nheads, nheads_k, mask_keys=seqlen_q, page_size=page_size)
    check_call(case, device)


@pytest.mark.parametrize("head_dim", (32, 64, 96, 100, 128, 192, 256, 512))
@pytest.mark.parametrize("mask_keys", (1, 16, 45, 700))
def test_head_dims_and_keys(device, head_dim, mask_keys):
    """Masks of fewer and of more keys than queries, and of more than a sequence has."""
    case = KvCase((600, 33, 5), 5, capacity=640, head_dim=head_dim, mask_keys=mask_keys, nheads=8)
    check_call(case, device)


@pytest.mark.parametrize("num_splits", (0, 1, 3, 40))
@pytest.mark.parametrize("seqlen_q", (4, 20))
def test_splits(device, num_splits, seqlen_q):
    """Splits of which a row sees nothing."""
    case = KvCase((3000, 0, 511), seqlen_q, capacity=3001, nheads=8, mask_keys=1500)
    problem = make_problem(case, device)
    problem.mask[:, :, 0] = False
    problem.mask[:, :, 1, :1490] = False
    check_attention(problem, *run(problem, num_splits=num_splits))


@pytest.mark.parametrize("head_dim", (64, 128, 256))
@pytest.mark.parametrize("page_size", (0, 16))
@pytest.mark.parametrize("options", ({}, {"batch_invariant": True}), ids=str)
def test_keys_that_no_query_sees_may_be_nan(device, head_dim, page_size, options):
    """Rows of a draft that a sequence does not fill: some heads see the others."""
    problem = make_problem(KvCase((90, 40), 5, head_dim=head_dim, page_size=page_size, mask_keys=5), device)
    problem.mask[:, :, :, 1] = problem.mask[:, :, :, 4] = False
    expected = run(problem, **options)
    for i, length in enumerate(problem.case.lengths):
        for cache in (problem.k_cache, problem.v_cache):
            row, positions = places(problem, i, length - 5, length)
            cache[row if page_size == 0 else row[1::3], positions[1::3]] = float("nan")
    assert all(torch.equal(a, b) for a, b in zip(run(problem, **options), expected))
    problem.k_cache, problem.v_cache = problem.k_cache.nan_to_num(), problem.v_cache.nan_to_num()
    check_attention(problem, *run(problem, **options))


def test_forms_of_a_mask(device):
    """A bool tensor, words and bytes; an axis of heads may be missing."""
    problem = make_problem(KvCase((60, 9), 5, mask_keys=45, capacity=64), device)
    words = pack_bits(problem.mask)
    octets = words.view(torch.uint8)[..., :6]
    expected = run(problem)
    check_attention(problem, *expected)
    permuted = words.view(torch.uint8).mT.contiguous().mT
    for form in (words, octets, permuted, words[:, 0], words.expand(-1, 4, -1, -1)):
        assert all(torch.equal(a, b) for a, b in zip(run(problem, mask_bits=form, mask_keys=45), expected))
    for form in (problem.mask[:, 0], problem.mask.expand(-1, 2, -1, -1)):
        assert all(torch.equal(a, b) for a, b in zip(run(problem, mask_bits=form), expected))
    tree = make_problem(KvCase(**{**TREE, "capacity": 128}), device)
    before = tree.clone()
    out, lse = run(tree, mask_bits=pack_bits(tree.mask))
    check_append(tree, before)
    check_attention(tree, out, lse)


def test_all_seen_is_no_mask(device):
    problem = make_problem(KvCase((90, 40, 7), 3, nheads=8, mask_keys=3), device)
    problem.mask[:] = True
    assert torch.equal(run(problem)[0], run(problem, mask_bits=problem.mask[..., :0])[0])
    for options in ({}, {"mask_bits": None}):
        check_attention(problem, *run(problem, **options))


def test_batch_invariant(device):
    """A token of a tree equals the same token alone, with its row of the mask."""
    problem = make_problem(KvCase((700, 130), 4, capacity=704, nheads=8, mask_keys=40), device)
    out, lse = run(problem, batch_invariant=True)
    check_attention(problem, out, lse)
    for token in range(4):
        one = dataclasses.replace(problem, q=problem.q[:, token : token + 1].contiguous())
        alone = run(one, batch_invariant=True, mask_bits=problem.mask[:, :, token : token + 1])
        assert torch.equal(alone[0][:, 0], out[:, token]) and torch.equal(alone[1][..., 0], lse[..., token])


def test_a_plan_knows_no_mask(device):
    problem = make_problem(KvCase((700, 0, 130), 4, capacity=704, nheads=8, mask_keys=4, page_size=16), device)
    plan, out = plan_for(problem), torch.empty_like(problem.q)
    check_attention(problem, *run(problem, plan=plan, out=out))
    check_attention(dataclasses.replace(problem, mask=None), *run(problem, plan=plan, out=out, mask_bits=None))


@pytest.mark.parametrize("stored", FORMATS)
@pytest.mark.parametrize("head_dim", (64, 96, 128, 256))
@pytest.mark.parametrize("seqlen_q,page_size,shape", ((2, 0, "token"), (9, 16, "head"), (30, 16, "token")))
def test_eight_bits(device, stored, head_dim, seqlen_q, page_size, shape):
    case = KvCase((1100, 0, 300), seqlen_q, capacity=1200, head_dim=head_dim, page_size=page_size, mask_keys=40)
    problem, *descales = eight_bit_problem(dataclasses.replace(case, dtype="float16"), device, stored, shape)
    check(problem, *call(problem, device, *descales), *descales)


def test_opcheck(device):
    problem = make_problem(KvCase((13, 5, 0, -1), 5, capacity=32, mask_keys=5, dtype="float16"), device)
    caches = problem.k_cache.nan_to_num(), problem.v_cache.nan_to_num()
    arguments = (
        problem.q, *caches, None, None, None, None, problem.lengths, problem.rows, *[None] * 7, *OPTIONS
    )  # fmt: skip
    opcheck(CORE.kvcache_fwd.default, arguments, {"mask_bits": pack_bits(problem.mask), "mask_keys": 5})


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("packed", (False, True))
def test_compiled(device, backend, packed):
    problem = make_problem(KvCase(**{**TREE, "capacity": 128}), device)
    mask = pack_bits(problem.mask) if packed else problem.mask
    expected = run(problem.clone(), mask_bits=mask)

    def step(q, k_cache, v_cache, k, v, lengths, rows, mask):
        return flash_attn_with_kvcache(
            q, k_cache, v_cache, k, v, cache_seqlens=lengths, cache_batch_idx=rows, mask_bits=mask,
            return_softmax_lse=True,
        )  # fmt: skip

    p = problem
    found = compiled(step, backend)(p.q, p.k_cache, p.v_cache, p.k, p.v, p.lengths, p.rows, mask)
    assert all(torch.equal(a, b) for a, b in zip(found, expected))


@pytest.mark.devices("cuda")
@pytest.mark.parametrize("page_size", (0, 16))
@pytest.mark.parametrize("planned", (False, True))
def test_replay_with_other_trees(device, page_size, planned):
    case = KvCase((40, 0, 1900, 17), capacity=2048, nheads=8, page_size=page_size, **TREE)
    static = make_problem(case, device)
    words, out = pack_bits(static.mask), torch.empty_like(static.q)
    plan = plan_for(static) if planned else None

    def step():
        if planned:
            plan.update(static.lengths)
        return run(static, out=out, plan=plan, mask_bits=words)

    graph, (_, lse) = captured(step)
    for lengths in ((41, 1, 1901, 18), (-1, 2000, -1, 5)):
        problem = make_problem(dataclasses.replace(case, lengths=lengths), device)
        fill(static, problem)
        words.copy_(pack_bits(problem.mask))
        graph.replay()
        check_append(static, problem)
        check_attention(static, out, lse)


@pytest.mark.devices("cuda")
@pytest.mark.parametrize("seqlen_q", (2, 200))
def test_the_kernel_of_a_mask(device, seqlen_q):
    """Long chunks too stay with the decode kernels, which alone have it."""
    problem = make_problem(KvCase((300,), seqlen_q, capacity=512, mask_keys=seqlen_q), device)
    plan = explain(flash_attn_with_kvcache, problem.q, problem.k_cache, problem.v_cache, cache_seqlens=problem.lengths,
                   cache_batch_idx=problem.rows, mask_bits=problem.mask)["forward"]  # fmt: skip
    assert plan["kernel"] == "split_kv" and plan["variant"] == "mask bits"


def test_errors(device):
    problem = make_problem(KvCase((60, 9), 5, mask_keys=45, capacity=64), device)
    words = pack_bits(problem.mask)

    def fails(match, error=RuntimeError, **options):
        before = problem.clone()
        with pytest.raises(error, match=f"^{match}"):
            run(problem, **options)
        check_append(problem, before)

    fails("mask_bits: expected a Tensor, got int", TypeError, mask_bits=3)
    fails("mask_bits: expected dtype bool, int32 or uint8, got int64", mask_bits=words.long(), mask_keys=45)
    fails(r"mask_bits: expected shape \(b, sq, n\) or", mask_bits=problem.mask[0, 0])
    fails(r"mask_keys: expected None or 45, as mask_bits has, got 44", mask_keys=44)
    fails("mask_keys: expected None without mask_bits, got 3", mask_bits=None, mask_keys=3)
    fails("mask_keys: expected ", mask_bits=words, mask_keys=-1)
    fails("mask_bits: expected 5 x 1 as its last two sizes, got shape", mask_bits=words)
    fails("mask_bits: expected 5 x 3 as its last two sizes, got shape", mask_bits=words, mask_keys=65)
    fails("mask_bits: expected 5 x 2 as its last two sizes, got shape", mask_bits=problem.mask[:, :, :4])
    fails(
        "mask_bits: expected a batch of 1 or 2, got shape",
        mask_bits=problem.mask.expand(2, 1, 5, 45).repeat(2, 1, 1, 1),
    )
    fails("mask_bits: expected a head count that divides 4, got shape", mask_bits=problem.mask.expand(2, 3, 5, 45))
    out = torch.zeros(problem.q.numel() // 2, dtype=torch.int32, device=device)
    fails("out: expected memory that does not overlap mask_bits", out=out.view(problem.q.dtype).view(problem.q.shape),
          mask_bits=out[: words.numel()].view(words.shape), mask_keys=45)  # fmt: skip
    table = torch.zeros(2, 2, 4, dtype=torch.int32, device=device)
    fails("mask_bits: expected None with a block_table of each K/V head", NotImplementedError, block_table=table,
          cache_batch_idx=None)  # fmt: skip
    with pytest.raises(TypeError, match="mask_bits"):
        explain(problem.q, problem.q, problem.q, mask_bits=problem.mask)
