"""Decoding by so many tiles that each has two K/V heads (csrc/flash_attn/plan/decode_plan.h), where rows of a head are
short: every feature, over 8 and over 16 bits, and the calls whose tiles have one head all the same."""

from __future__ import annotations

import dataclasses

import pytest
import torch
from fp8_cache_harness import FORMATS, call, check, eight_bit_problem
from fp8_harness import E4M3, INT8, relative_rmse
from kvcache_harness import KvCase, check_call, make_problem, plan_for, rotated_queries, run

import flash_attn
from flash_attn import flash_attn_with_kvcache

HEADS_K = {"cuda": 80, "cpu": 4}  # 7 sequences of them have more pairs than 155 multiprocessors have thread blocks
LENGTHS = (150, 0, 37, 100, -1, 1, 64)
LONG = (1100, 0, 37, 700, -1, 255, 256)


def case_of(device, group=1, **case):
    case = {"lengths": LENGTHS, "capacity": 160, "head_dim": 128, "causal": True, "nheads_k": HEADS_K[device], **case}
    return KvCase(nheads=group * case["nheads_k"], **case)


def problem_of(device, stored, shape="head", **case):
    return eight_bit_problem(case_of(device, **case), device, stored, shape)


def explained(problem, **options):
    problem_options = {"cache_seqlens": problem.lengths, "cache_batch_idx": problem.rows, "block_table": problem.table}
    caches = problem.k_cache, problem.v_cache
    return flash_attn.explain(flash_attn_with_kvcache, problem.q, *caches, **problem_options, **options)["forward"]


PAIRED = (
    {}, {"page_size": 1}, {"page_size": 16}, {"page_size": 48}, {"page_size": 64}, {"page_size": 256, "capacity": 256},
    {"softcap": 3.0}, {"alibi": True, "group": 2}, {"sinks": True}, {"window": (40, 0)}, {"group": 4}, {"group": 8},
    {"window": (40, 0), "page_size": 16, "group": 8}, {"seqlen_q": 2, "group": 4}, {"seqlen_q": 5},
    {"leftpad": (100, 0, 5, 3, 0, 1, 0)}, {"leftpad": (100, 0, 5, 3, 0, 1, 0), "page_size": 16},
    {"layout": "heads_first"}, {"layout": "permuted", "head_dim": 64}, {"layout": "unaligned", "head_dim": 100},
    {"head_dim": 64, "page_size": 16, "group": 4}, {"head_dim": 40}, {"head_dim": 72}, {"dtype": "float16"},
)  # fmt: skip
ONE_HEAD = ({"group": 16}, {"seqlen_q": 3, "group": 4}, {"nheads_k": 81}, {"head_dim": 256})


@pytest.mark.each
@pytest.mark.parametrize("stored,shape", ((E4M3, "token"), (INT8, "inline"), (E4M3, "tensor"), (INT8, "head")))
@pytest.mark.parametrize("sizes", PAIRED + ONE_HEAD, ids=str)
def test_over_8_bits(device, sizes, stored, shape):
    problem, *descales = problem_of(device, stored, shape, **sizes)
    if device == "cuda":
        assert explained(problem)["tile_heads"] == (1 if sizes in ONE_HEAD else 2)
    check(problem, *call(problem, device, *descales), *descales)


@pytest.mark.parametrize("sizes", (
    {}, {"head_dim": 32, "group": 8}, {"page_size": 1}, {"page_size": 16, "group": 4}, {"page_size": 64, "sinks": True},
    {"softcap": 3.0, "alibi": True}, {"window": (40, 0), "seqlen_q": 2, "group": 4}, {"layout": "unaligned"},
    {"leftpad": (100, 0, 5, 3, 0, 1, 0)}, {"rotary_dim": 32, "seqlen_new": 3, "seqlen_q": 3}, {"dtype": "float16"},
), ids=str)  # fmt: skip
def test_over_16_bits(device, sizes):
    problem, *_ = check_call(case_of(device, **{"head_dim": 64, **sizes}), device)
    if device == "cuda":
        assert explained(problem)["tile_heads"] == 2


@pytest.mark.parametrize("stored,shape", ((E4M3, "token"), (INT8, "token"), (E4M3, "head")))
@pytest.mark.parametrize("page_size", (0, 16))
def test_appended_and_rotated(device, stored, shape, page_size):
    case = {"rotary_dim": 32, "seqlen_new": 2, "seqlen_q": 2, "group": 2, "page_size": page_size}
    problem, *descales = problem_of(device, stored, shape, **case)
    out, lse = call(problem, device, *descales)
    queries = problem.q.clone()
    for i, length in enumerate(LENGTHS):
        if length >= 0:
            queries[i] = rotated_queries(problem, i)
    check(problem, out, lse, *descales, queries)


@pytest.mark.devices("cuda")
@pytest.mark.parametrize("stored", FORMATS)
@pytest.mark.parametrize("num_splits", (0, 1, 3))
@pytest.mark.parametrize("page_size", (0, 16, 64))
@pytest.mark.parametrize("sizes", ({}, {"group": 8, "sinks": True}, {"head_dim": 64, "window": (600, 0)}), ids=str)
def test_splits(device, stored, num_splits, page_size, sizes):
    """Partial results of both heads, combined; a plan made before gives the same bits."""
    case = {"lengths": LONG, "capacity": 1200, "page_size": page_size, **sizes}
    problem, *descales = problem_of(device, stored, "token", **case)
    plan = plan_for(problem, num_splits=num_splits)
    out, lse = call(problem, device, *descales, num_splits=num_splits)
    check(problem, out, lse, *descales)
    planned, planned_lse = call(problem, device, *descales, num_splits=num_splits, plan=plan)
    assert torch.equal(planned, out) and torch.equal(planned_lse, lse)
    assert explained(problem, num_splits=num_splits)["tile_heads"] == 2


@pytest.mark.devices("cuda")
def test_splits_over_16_bits(device):
    problem, *_ = check_call(case_of(device, head_dim=64, lengths=LONG, capacity=1200), device, num_splits=3)
    assert explained(problem, num_splits=3)["tile_heads"] == 2


@pytest.mark.devices("cuda")
@pytest.mark.parametrize("page_size", (0, 16))
def test_batch_invariant_has_one_head(device, page_size):
    """So that one sequence alone gives the same bits."""
    problem, *descales = problem_of(device, INT8, "token", page_size=page_size)
    assert explained(problem, batch_invariant=True)["tile_heads"] == 1
    out, _ = call(problem, device, *descales, batch_invariant=True)
    one = dataclasses.replace(
        problem, q=problem.q[:1], lengths=problem.lengths[:1],
        rows=None if problem.rows is None else problem.rows[:1],
        table=None if problem.table is None else problem.table[:1],
    )  # fmt: skip
    assert torch.equal(call(one, device, *descales, batch_invariant=True)[0], out[:1])


@pytest.mark.devices("cuda")
def test_few_tiles_have_one_head(device):
    problem, *_ = problem_of(device, E4M3, nheads_k=8, group=4)
    plan = explained(problem)
    assert (plan["tile_heads"], plan["block_n"]) == (1, 128)


def test_heads_of_a_pair_are_apart(device):
    """NaN in keys or values of one head reaches the rows of no other; descales of a head are its own."""
    problem, *descales = problem_of(device, E4M3, group=2)
    rows = problem.rows.tolist()
    problem.k_cache.view(torch.uint8)[rows[0], 77, 0, 5] = 0x7F
    problem.v_cache.view(torch.uint8)[rows[3], 77, 3, 6] = 0x7F
    out, lse = call(problem, device, *descales)
    nan = out.isnan()
    assert nan[0, 0, :2].all() and lse[0, :2].isnan().all()
    assert not nan[0, 0, 2:].any() and not lse[0, 2:].isnan().any()
    assert nan[3, 0, 6:8, 6].all() and nan[3].sum() == 2 and not lse[3].isnan().any()


def test_v_descales_of_channels(device):
    problem, k_descale, _ = problem_of(device, E4M3, "batch")
    v_descale = torch.rand(problem.case.nheads_k, 128, device=device) * 0.02 + 0.01
    by_channel, _ = call(problem, device, k_descale, v_descale, v_descale_axis="channel")
    plain, _ = call(problem, device, k_descale, 1.0)
    assert relative_rmse(by_channel, plain.double() * v_descale) <= 6e-3  # both results are rounded to bfloat16


@pytest.mark.devices("cuda")
@pytest.mark.parametrize("page_size", (16, 64))
@pytest.mark.parametrize("stored", (*FORMATS, torch.bfloat16))
def test_invalid_pages(device, stored, page_size):
    """A sequence that needs one is refused for all of its heads, wherever the page lies; the others are computed."""
    case = case_of(device, head_dim=64, page_size=page_size)
    problem = (
        make_problem(case, device) if stored is torch.bfloat16 else eight_bit_problem(case, device, stored, "head")
    )
    problem, *descales = problem if isinstance(problem, tuple) else (problem,)
    options = dict(zip(("k_descale", "v_descale"), descales))
    good, good_lse = run(problem, **options)
    for key in (0, 64, 149):
        other = dataclasses.replace(problem, table=problem.table.clone())
        other.table[0, key // page_size] = 10**6
        out, lse = run(other, **options)
        assert (out[0] == 0).all() and lse[0].isposinf().all()
        assert torch.equal(out[1:], good[1:]) and torch.equal(lse[1:], good_lse[1:])
