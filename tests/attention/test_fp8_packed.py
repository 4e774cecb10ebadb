"""8-bit K and V of packed and paged calls with 16-bit queries: a GPU reads them as they are or dequantises them.

Values, and descales of rows, that no query sees are NaN. The reference is float64 attention, one sequence at a time.
"""

from __future__ import annotations

import dataclasses

import pytest
import torch
from cases import Case
from fp8_cache_harness import FORMATS, as_8_bit
from fp8_harness import E4M3, INT8, LSE, WIDE_P, lse_error, relative_rmse
from harness import captured, make_problem, run
from reference import Varlen, attention_varlen

import flash_attn
from flash_attn import flash_attn_varlen_func

MANY = ((70, 300), (1, 129), (0, 40), (33, 0), (128, 257))
FEW = ((1, 700), (2, 300), (1, 5), (1, 0))
SHAPES = {  # of descales, by (k, batch)
    "none": lambda k, batch: None,
    "tensor": lambda k, batch: (),
    "head": lambda k, batch: (2,),
    "batch": lambda k, batch: (batch, 2),
    "page": lambda k, batch: (k.shape[0], 1, 2),
    "token": lambda k, batch: (*k.shape[:-2], 2) if k.dim() == 4 else (k.shape[0], 1, 2),
    "channel": lambda k, batch: (batch, 2, k.shape[-1]),
}
FAMILIES = (None, "wgmma", "mma_sync", "split_kv")


@pytest.fixture(params=FAMILIES, ids=str)
def family(request, device, monkeypatch):
    """Forced where it supports the call."""
    if device == "cpu" and request.param is not None:
        pytest.skip("the CPU backend has no families")
    if request.param is not None:
        monkeypatch.setenv("FLASH_ATTN_FAMILY", request.param)
    return request.param


def problem_of(device, stored, shape, lengths=MANY, **options):
    """(problem with 8-bit k and v, {descales}): of K by sequence where those of V are by channel."""
    values = {"nheads": 4, "nheads_k": 2, "head_dim": 64, "dtype": "float16", "kind": "packed", **options}
    problem = make_problem(Case(len(lengths), 0, 0, **values), device, list(lengths))
    unseen = [x.isnan().all(-1) for x in (problem.k, problem.v)]
    problem.k, problem.v = (as_8_bit(x, stored) for x in (problem.k, problem.v))
    descales = []
    for name, rows in zip((shape if shape != "channel" else "batch", shape), unseen):
        size = SHAPES[name](problem.k, len(lengths))
        descale = None if size is None else torch.rand(size, device=device) * 0.02 + 0.01
        if name == "token":
            descale[rows if descale.shape == rows.shape else rows[:, None]] = float("nan")
        descales.append(descale)
    given = dict(zip(("k_descale", "v_descale"), descales))
    return problem, {**given, "v_descale_axis": "channel"} if shape == "channel" else given


def dequantized(x, descale, i, by_channel=False):
    """K or V of sequence i in float64, in the layout of x."""
    x = x.double()
    if descale is None or descale.numel() == 1:
        return x if descale is None else x * descale.double()
    if by_channel:
        return x * descale[i]
    if descale.dim() < 3:
        return x * (descale if descale.dim() == 1 else descale[i])[:, None]
    return x * (descale if x.dim() == 4 else descale.transpose(1, 2)[:, :, :1].reshape(len(x), -1))[..., None]


def check(problem, out, lse, descales, sequences=None, bound=WIDE_P, lse_bound=LSE):
    layout, options = problem.layout, problem.options
    for i, (start, n) in enumerate(zip(layout.starts_q, layout.lens_q)):
        if n == 0 or (sequences is not None and i not in sequences):
            continue
        by_channel = "v_descale_axis" in descales
        k = dequantized(problem.k, descales["k_descale"], i)
        v = dequantized(problem.v, descales["v_descale"], i, by_channel)
        one = Varlen([0], [n], [layout.starts_k[i]], [layout.lens_k[i]], n)
        table = None if problem.block_table is None else problem.block_table[i : i + 1]
        slopes = problem.alibi_slopes
        slopes = slopes[i : i + 1] if slopes is not None and slopes.dim() == 2 else slopes
        q = problem.q[start : start + n]
        expected = attention_varlen(q, k, v, one, block_table=table, **{**options, "alibi_slopes": slopes})
        if layout.lens_k[i] > 0:
            assert relative_rmse(out[start : start + n], expected.out) <= bound
        else:
            assert (out[start : start + n] == 0).all()
        assert lse_error(lse[:, start : start + n], expected.lse) <= lse_bound


@pytest.mark.parametrize("stored", FORMATS)
@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("page_size", (0, 16))
@pytest.mark.parametrize("lengths", (MANY, FEW), ids=("many", "few"))
@pytest.mark.parametrize("dtype", ("float16", "bfloat16"))
def test_descales(device, family, stored, shape, page_size, lengths, dtype):
    if shape == "none" and stored is INT8:
        pytest.skip("scores of hundreds")
    problem, descales = problem_of(device, stored, shape, lengths, page_size=page_size, causal=True, dtype=dtype)
    if shape == "none":
        problem.q = problem.q * 0.03
    out, lse, _ = run(problem, **descales)
    check(problem, out, lse, descales)


# 8-bit values times descales in bf16: where a row may be a key of two sequences.
COPIED = {"bound": 4e-3, "lse_bound": 3e-3}
FEATURES = (
    {"window": (50, 20), "softcap": 12.0}, {"alibi": "batch", "causal": True}, {"sinks": True, "causal": True},
    {"kind": "seqused"}, {"kind": "leftpad", "causal": True}, {"head_dim": 128, "causal": True}, {"head_dim": 256},
    {"head_dim": 72, "window": (30, 0)},
)  # fmt: skip


@pytest.mark.parametrize("features", FEATURES, ids=str)
@pytest.mark.parametrize("stored,shape", ((E4M3, "token"), (INT8, "batch")))
@pytest.mark.parametrize("page_size", (0, 1, 7, 256))
def test_features(device, family, features, stored, shape, page_size):
    for lengths, dtype in ((MANY, "bfloat16"), (FEW, "float16")):
        problem, descales = problem_of(device, stored, shape, lengths, page_size=page_size, dtype=dtype, **features)
        out, lse, _ = run(problem, **descales)
        is_copied = shape == "batch" and "seqused" in features.values() and page_size == 0
        check(problem, out, lse, descales, **(COPIED if is_copied else {}))


@pytest.mark.parametrize("stored", FORMATS)
def test_pages_shared_between_sequences(device, family, stored):
    """Each sequence has another descale of the same stored values."""
    problem, descales = problem_of(device, stored, "batch", ((60, 200), (70, 200)), page_size=16)
    problem.block_table[1] = problem.block_table[0]
    out, lse, _ = run(problem, **descales)
    check(problem, out, lse, descales)


@pytest.mark.parametrize("stored", FORMATS)
def test_packed_sequences_that_overlap(device, stored):
    """With seqused_k a row may be a key of several sequences, each with its own descale."""
    problem, descales = problem_of(device, stored, "batch", ((60, 200), (70, 100)))
    problem.seqused_k = torch.tensor([200, 150], dtype=torch.int32, device=device)
    problem.cu_seqlens_k = torch.tensor([100, 50, 300], dtype=torch.int32, device=device)
    problem.layout.starts_k[:], problem.layout.lens_k[:] = [100, 50], [200, 150]
    out, lse, _ = run(problem, **descales)
    check(problem, out, lse, descales)


def test_table_wider_than_the_sequences(device, family):
    problem, descales = problem_of(device, E4M3, "token", page_size=16, causal=True)
    out, lse, _ = run(problem, **descales)
    wide = torch.full((len(MANY), 4000), -1, dtype=torch.int32, device=device)
    wide[:, : problem.block_table.shape[1]] = problem.block_table
    other = run(problem, block_table=wide, **descales)
    assert torch.equal(out, other[0]) and torch.equal(lse, other[1])


@pytest.mark.parametrize("features", ({"causal": True}, {"window": (90, 10), "softcap": 9.0}, {"sinks": True}), ids=str)
@pytest.mark.parametrize("dtype", ("float16", "bfloat16"))
@pytest.mark.parametrize("max_seqlen_k", (0, 128, 301))
def test_max_seqlen_k_may_be_too_small(device, family, features, dtype, max_seqlen_k):
    """It decides how many keys are gathered, not which are seen."""
    lengths = ((70, 300), (40, 100), (0, 290), (3, 0), (5, 1))
    problem, descales = problem_of(device, E4M3, "page", lengths, page_size=16, dtype=dtype, **features)
    wide = torch.full((len(lengths), 100), -1, dtype=torch.int32, device=device)
    wide[:, : problem.block_table.shape[1]] = problem.block_table
    problem.block_table = wide
    out, lse, _ = run(problem, max_seqlen_k=max_seqlen_k, **descales)
    check(problem, out, lse, descales)


def test_max_logit_with_a_small_max_seqlen_k(device, family):
    problem, descales = problem_of(device, E4M3, "head", ((70, 300), (40, 100)), page_size=16)
    expected = run(problem, return_max_logit=True, **descales)
    got = run(problem, return_max_logit=True, max_seqlen_k=100, **descales)
    for ours, other in zip(got, expected):
        assert torch.equal(ours, other)


@pytest.mark.parametrize("stored", FORMATS)
@pytest.mark.parametrize("forced", ("wgmma", "mma_sync"))
def test_extreme_descales_of_heads(device, stored, forced, monkeypatch):
    """They multiply queries and results: no 16-bit number has to hold stored value * descale."""
    monkeypatch.setenv("FLASH_ATTN_FAMILY", forced)
    problem, descales = problem_of(device, stored, "batch", dtype="bfloat16", causal=True)
    q = problem.q
    for of_k, of_v in ((2.0**-30, 2.0**40), (2.0**30, 2.0**-60)):
        problem.q = q / of_k
        scaled = {"k_descale": descales["k_descale"] * of_k, "v_descale": descales["v_descale"] * of_v}
        out, lse, _ = run(problem, **scaled)
        check(problem, out, lse, scaled)


@pytest.mark.devices("cuda")
@pytest.mark.parametrize("family", FAMILIES[1:])
def test_pages_that_do_not_exist(device, family, monkeypatch):
    """Keys in them are zeros, as over 16 bits; lengths and offsets may hold anything."""
    monkeypatch.setenv("FLASH_ATTN_FAMILY", family)
    problem, descales = problem_of(device, E4M3, "page", ((70, 300), (40, 100)), page_size=16)
    problem.block_table[0, 3] = 10**6
    out, lse, _ = run(problem, **descales)
    check(problem, out, lse, descales, [1])
    pages = torch.zeros_like(problem.k.float()), torch.zeros_like(problem.v.float())
    wide = [torch.cat((x.float().nan_to_num(nan=0), y[:1])) for x, y in zip((problem.k, problem.v), pages)]
    filled = dataclasses.replace(problem, k=wide[0], v=wide[1], block_table=problem.block_table.clone())
    filled.block_table[0, 3] = len(problem.k)
    check(filled, out, lse, {x: torch.cat((y, y[:1])) for x, y in descales.items()}, [0])
    for cu_seqlens in ([-5, 10**9, 3], [60, 20, 90], [0, -1, -(2**31)]):
        bad = torch.tensor(cu_seqlens, dtype=torch.int32, device=device)
        for name in ("cu_seqlens_k", "cu_seqlens_q"):
            run(problem, **{name: bad}, **descales)
        run(problem, seqused_k=bad[:2], leftpad_k=bad[1:], **descales)
    torch.cuda.synchronize()


@pytest.mark.devices("cuda")
@pytest.mark.parametrize("page_size", (0, 16))
def test_graph_with_changed_lengths(device, page_size):
    problem, descales = problem_of(device, E4M3, "head", ((70, 300), (40, 100)), page_size=page_size, kind="seqused")
    graph, (out, lse, _) = captured(lambda: run(problem, **descales))
    for used in ((200, 90), (3, 100), (0, 1)):
        problem.seqused_k.copy_(torch.tensor(used))
        problem.layout.lens_k[:] = used
        graph.replay()
        check(problem, out, lse, descales)


@pytest.mark.devices("cuda")
def test_explained(device):
    """Few rows read 8-bit values by the decode kernels, many read a dequantised copy."""
    for lengths, name in ((FEW, "decode"), (((2000, 2000),) * 4, "chunk")):
        problem, descales = problem_of(device, E4M3, "token", lengths, page_size=16, head_dim=128, causal=True)
        plan = flash_attn.explain(
            flash_attn_varlen_func, problem.q, problem.k, problem.v, problem.cu_seqlens_q, problem.cu_seqlens_k,
            problem.max_seqlen_q, problem.max_seqlen_k, causal=True, block_table=problem.block_table, **descales,
        )["forward"]  # fmt: skip
        assert plan["kv_dtype"] == "e4m3"
        assert (plan["kernel"] == "split_kv") == (name == "decode")
        assert ("dequantized_bytes" in plan) == (name == "chunk")
