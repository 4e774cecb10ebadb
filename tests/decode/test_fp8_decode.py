"""The decode kernels over 8-bit caches: splits, pages, tiles, plans, graphs, descales of any size."""

from __future__ import annotations

import dataclasses

import pytest
import torch
from fp8_cache_harness import FORMATS, call, check, eight_bit_problem
from fp8_harness import E4M3, INT8, relative_rmse
from kvcache_harness import KvCase, get_rows, plan_for

import flash_attn
from flash_attn import eight_bit, flash_attn_with_kvcache

LENGTHS = (1100, 0, 37, 700, -1, 255, 256)
MOST = 1200


def problem_of(device, stored, shape="token", **case):
    case = {"lengths": LENGTHS, "capacity": MOST, "causal": True, **case}
    return eight_bit_problem(KvCase(**case), device, stored, shape)


@pytest.mark.parametrize("stored", FORMATS)
@pytest.mark.parametrize("head_dim", (64, 96, 128, 256))
@pytest.mark.parametrize("page_size", (0, 16, 48, 256))
@pytest.mark.parametrize("dtype,shape", (("float16", "token"), ("bfloat16", "head")))
def test_head_dims_and_pages(device, stored, head_dim, page_size, dtype, shape):
    """Whole steps, halves of them, and pages that straddle both."""
    problem, *descales = problem_of(device, stored, shape, head_dim=head_dim, page_size=page_size, dtype=dtype)
    check(problem, *call(problem, device, *descales), *descales)


@pytest.mark.each
@pytest.mark.parametrize("stored", FORMATS)
@pytest.mark.parametrize("shape", ("token", "page", "batch"))
@pytest.mark.parametrize("num_splits", (0, 1, 3))
@pytest.mark.parametrize("sinks", (False, True))
def test_splits(device, stored, shape, num_splits, sinks):
    case = {"head_dim": 128, "nheads": 8, "nheads_k": 1, "page_size": 16, "sinks": sinks}
    problem, *descales = problem_of(device, stored, shape, **case)
    check(problem, *call(problem, device, *descales, num_splits=num_splits), *descales)


@pytest.mark.each
@pytest.mark.parametrize("stored", FORMATS)
@pytest.mark.parametrize("head_dim", (64, 128, 256))
@pytest.mark.parametrize("seqlen_q,nheads", ((1, 2), (2, 16), (5, 8), (9, 16), (70, 4)))
def test_packed_rows(device, stored, head_dim, seqlen_q, nheads, monkeypatch):
    """1 to 140 rows of a K/V head: every tile, and several of them."""
    monkeypatch.setenv("FLASH_ATTN_FAMILY", "split_kv")
    problem, *descales = problem_of(
        device, stored, lengths=(300, 70, -1), capacity=320, head_dim=head_dim, seqlen_q=seqlen_q, nheads=nheads,
        window=(150, 0),
    )  # fmt: skip
    check(problem, *call(problem, device, *descales), *descales)


FEATURES = (
    {"softcap": 3.0}, {"alibi": True}, {"window": (300, 0)}, {"leftpad": (100, 0, 5, 3, 0, 250, 0)},
    {"layout": "heads_first"}, {"layout": "unaligned", "head_dim": 100}, {"head_dim": 72}, {"sinks": True},
    {"rotary_dim": 32, "seqlen_new": 2, "seqlen_q": 2},
)  # fmt: skip


@pytest.mark.parametrize("features", FEATURES, ids=str)
@pytest.mark.parametrize("stored,shape", ((E4M3, "inline"), (INT8, "token"), (E4M3, "head")))
@pytest.mark.parametrize("page_size", (0, 16))
@pytest.mark.parametrize("dtype", ("float16", "bfloat16"))
def test_features(device, features, stored, shape, page_size, dtype):
    case = {"head_dim": 128, "page_size": page_size, "dtype": dtype, **features}
    problem, *descales = problem_of(device, stored, shape, **case)
    if problem.cos is None:
        check(problem, *call(problem, device, *descales), *descales)
        return
    out, lse = call(problem, device, *descales)
    queries = problem.q.double()
    for i, length in enumerate(problem.case.lengths):
        if length >= 0:
            cos, sin = (x[length : length + 2].double()[:, None] for x in (problem.cos, problem.sin))
            a, b = queries[i, ..., :16].clone(), queries[i, ..., 16:32].clone()
            queries[i, ..., :16], queries[i, ..., 16:32] = a * cos - b * sin, a * sin + b * cos
    check(problem, out, lse, *descales, queries.to(problem.q.dtype))


@pytest.mark.parametrize("axes", ("head", "batch"))
def test_v_descales_of_channels(device, axes):
    problem, k_descale, _ = problem_of(device, E4M3, "batch", head_dim=128, lengths=(300, 70), capacity=320)
    shape = (2, 128) if axes == "head" else (2, 2, 128)
    v_descale = torch.rand(shape, device=device) * 0.02 + 0.01
    by_channel, _ = call(problem, device, k_descale, v_descale, v_descale_axis="channel")
    plain, _ = call(problem, device, k_descale, 1.0)
    factor = v_descale if axes == "head" else v_descale[:, None]
    expected = plain.double() * factor.repeat_interleave(2, -2)
    assert relative_rmse(by_channel, expected) <= 6e-3  # both results are rounded to bfloat16


@pytest.mark.parametrize("stored", FORMATS)
@pytest.mark.parametrize("seqlen_q", (1, 3))
@pytest.mark.parametrize("page_size,sinks", ((0, False), (16, False), (16, True)))
def test_batch_invariant(device, stored, seqlen_q, page_size, sinks):
    """The last token of a chunk alone, though the descales of tokens differ by orders of magnitude."""
    case = {"lengths": (1100, 37, 700), "head_dim": 128, "page_size": page_size, "dtype": "float16", "sinks": sinks}
    problem, *descales = problem_of(device, stored, seqlen_q=seqlen_q, **case)
    for descale in descales:
        descale.mul_(torch.exp2(torch.randint(-12, 4, descale.shape, device=device).float()))
    out, lse = call(problem, device, *descales, batch_invariant=True)
    check(problem, out, lse, *descales)
    for i, length in enumerate(problem.case.lengths):
        for token in range(seqlen_q):
            one = dataclasses.replace(
                problem, q=problem.q[i : i + 1, token : token + 1].contiguous(),
                lengths=problem.lengths[i : i + 1] - (seqlen_q - 1 - token),
                rows=None if problem.rows is None else problem.rows[i : i + 1].contiguous(),
                table=None if problem.table is None else problem.table[i : i + 1].contiguous(),
                case=dataclasses.replace(problem.case, lengths=(length,), seqlen_q=1),
            )  # fmt: skip
            alone, alone_lse = call(one, device, *descales, batch_invariant=True)
            assert torch.equal(alone[0, 0], out[i, token]) and torch.equal(alone_lse[0, :, 0], lse[i, :, token])


@pytest.mark.parametrize("stored", FORMATS)
@pytest.mark.parametrize("factor", (2.0**-80, 2.0**-20, 1.0, 2.0**8))
def test_descales_of_any_size(device, stored, factor):
    """Results of tiny values are as exact as those of others; a growing descale rescales what came before."""
    problem, k_descale, v_descale = problem_of(device, stored, lengths=(1100, 300), head_dim=128, dtype="bfloat16")
    growth = torch.exp2(torch.linspace(-20, 0, MOST, device=device))[None, :, None]
    for growing in (torch.ones_like(growth), growth, growth.flip(1)):
        scaled = v_descale * factor * growing
        check(problem, *call(problem, device, k_descale, scaled), k_descale, scaled)


@pytest.mark.parametrize("stored", FORMATS)
def test_bfloat16_queries_beyond_half_range(device, stored):
    """Finite ones become the largest number of fp16; infinities and NaN stay what they are."""
    problem, *descales = problem_of(device, stored, "head", dtype="bfloat16", lengths=(60,), capacity=64)
    k_descale = descales[0] * 2.0**-14
    problem.q = problem.q * 5e4
    clamped = problem.q.float().clamp(-65504, 65504)
    assert (problem.q != clamped).any()
    out, lse = call(problem, device, k_descale, descales[1])
    check(problem, out, lse, k_descale, descales[1], problem.q if device == "cpu" else clamped, bound=1e-2)
    problem.q[0, 0, 1, 0] = float("nan")
    out, _ = call(problem, device, k_descale, descales[1])
    assert out[0, 0, 1].isnan().all() and not out[0, 0, 0].isnan().any() and not out[0, 0, 2:].isnan().any()


def test_nan_in_visible_keys(device):
    """NaN in a key makes NaN of the row, in a value of the column; e4m3 has two bit patterns of it, int8 none."""
    for bits in (0x7F, 0xFF):
        problem, *descales = problem_of(device, E4M3, "head", lengths=(300, 300), capacity=320)
        rows = [0, 1] if problem.rows is None else problem.rows.tolist()
        problem.k_cache.view(torch.uint8)[rows[0], 77, 0, 5] = bits
        problem.v_cache.view(torch.uint8)[rows[1], 77, 1, 6] = bits
        out, lse = call(problem, device, *descales)
        nan = out.isnan()
        assert nan[0, 0, :2].all() and not nan[0, 0, 2:].any() and lse[0, :2].isnan().all()
        assert nan[1, 0, 2:, 6].all() and nan[1].sum() == 2 and not lse[1].isnan().any()


@pytest.mark.parametrize("stored", FORMATS)
@pytest.mark.parametrize("head_dim", (64, 72, 128, 256))
@pytest.mark.parametrize("dtype", ("float16", "bfloat16"))
def test_appended_rows_equal_the_reference_bits(device, stored, head_dim, dtype):
    case = {"lengths": (1100, 0, 37), "seqlen_q": 1, "seqlen_new": 7, "head_dim": head_dim, "dtype": dtype}
    problem, *descales = problem_of(device, stored, **case)
    problem.k[0, 0, 0] = 0
    problem.k[1, 1] *= 1e-3 if dtype == "float16" else 1e-30
    problem.v[2, 2, 1, 3] = float("inf")
    out, lse = call(problem, device, *descales)
    for i, length in enumerate(problem.case.lengths):
        pairs = ((problem.k, problem.k_cache, descales[0]), (problem.v, problem.v_cache, descales[1]))
        for new, cache, descale in pairs:
            expected = eight_bit.descale_of(new[i], (-1,), stored)
            written = get_rows(problem, descale, i, length, length + 7)
            assert torch.equal(written, expected.squeeze(-1))
            stored_bits = get_rows(problem, cache.view(torch.uint8), i, length, length + 7)
            assert torch.equal(stored_bits, eight_bit.encode(new[i], expected, stored).view(torch.uint8))
    finite = dataclasses.replace(problem, case=dataclasses.replace(problem.case, lengths=problem.case.lengths[:2]))
    check(finite, out[:2], lse[:2], *descales)


@pytest.mark.devices("cuda")
@pytest.mark.parametrize("stored", FORMATS)
@pytest.mark.parametrize("page_size", (0, 16, 256))
def test_graph_with_plan_and_append(device, stored, page_size):
    """A captured step that plans, quantises and attends, replayed for other lengths."""
    steps = ((40, 0, 900, 17), (41, 1, 901, 18), (-1, 1000, -1, 5), (1100,) * 4)
    case = {"seqlen_q": 2, "seqlen_new": 2, "head_dim": 128, "nheads": 8, "page_size": page_size, "dtype": "float16"}
    static, *descales = problem_of(device, stored, lengths=(1100,) * 4, **case)
    plan, out = plan_for(static), torch.empty_like(static.q)

    def step():
        plan.update(static.lengths)
        return call(static, device, *descales, out=out, plan=plan)

    stream, graph = torch.cuda.Stream(), torch.cuda.CUDAGraph()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        step()
        with torch.cuda.graph(graph, stream=stream):
            _, lse = step()
    torch.cuda.current_stream().wait_stream(stream)
    for lengths in steps:
        static.lengths.copy_(torch.tensor(lengths, dtype=torch.int32))
        graph.replay()
        moved = dataclasses.replace(static, case=dataclasses.replace(static.case, lengths=lengths))
        check(moved, out, lse, *descales)


@pytest.mark.devices("cuda")
def test_plan_of_the_other_width_is_rejected(device):
    problem, *descales = problem_of(device, INT8, head_dim=128, dtype="float16")
    plan = plan_for(problem, kv_cache_dtype=None)
    with pytest.raises(RuntimeError, match="^plan: expected one made for kv_cache_dtype int8, got one for at least 16"):
        call(problem, device, *descales, plan=plan)
    assert plan.tensor.numel() != plan_for(problem).tensor.numel()


@pytest.mark.devices("cuda")
def test_a_head_dim_without_kernels_is_named(device):
    problem, *descales = problem_of(device, INT8, head_dim=320, dtype="float16")
    with pytest.raises(RuntimeError, match="^k_cache: expected a head dim of at most 256 with 8 bits, got 320"):
        call(problem, device, *descales)
    with pytest.raises(RuntimeError, match="^head_dim: expected a head dim of at most 256 with 8 bits, got 320"):
        plan_for(problem)


def test_plan_names_its_dtype(device):
    lengths = torch.tensor([5], dtype=torch.int32, device=device)
    with pytest.raises(TypeError, match="^kv_cache_dtype: expected None or a torch.dtype, got 'int8'"):
        flash_attn.KvCachePlan(lengths, 1, 4, 2, 64, 100, kv_cache_dtype="int8")
    plan = flash_attn.KvCachePlan(lengths, 1, 4, 2, 64, 100, kv_cache_dtype=E4M3)
    q = torch.zeros(1, 1, 4, 64, device=device, dtype=torch.float16)
    cache = torch.zeros(1, 100, 2, 64, device=device, dtype=torch.float16)
    with pytest.raises(RuntimeError, match="^plan: expected one made for kv_cache_dtype float16, got one for 8 bits"):
        flash_attn_with_kvcache(q, cache, cache.clone(), cache_seqlens=lengths, plan=plan)


@pytest.mark.devices("cuda")
@pytest.mark.parametrize("stored,name", ((E4M3, "e4m3"), (INT8, "int8")))
def test_explained(device, stored, name):
    problem, *descales = problem_of(device, stored, head_dim=128, seqlen_q=1)
    descales = {"k_descale": descales[0], "v_descale": descales[1]}
    options = {"cache_seqlens": problem.lengths, "cache_batch_idx": problem.rows, **descales}

    def plan_of(q):
        return flash_attn.explain(flash_attn_with_kvcache, q, problem.k_cache, problem.v_cache, **options)["forward"]

    plan = plan_of(problem.q)
    assert (plan["kernel"], plan["kv_dtype"], plan["block_n"]) == ("split_kv", name, 128)
    assert plan["variant"] == "plain, swapped operands"  # of at most 8 packed rows
    few = plan_of(problem.q.repeat(1, 8, 1, 1))
    assert (few["kernel"], few["kv_dtype"], few["block_m"]) == ("split_kv", name, 16)
    chunk = plan_of(problem.q.repeat(1, 500, 1, 1))
    assert chunk["kernel"] != "split_kv" and chunk["kv_dtype"] == name
    assert chunk["dequantized_bytes"] == 2 * 2 * len(LENGTHS) * MOST * 2 * 128  # K and V of all that there may be
