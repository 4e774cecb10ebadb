"""Many query rows over 8-bit caches: on a GPU a pass dequantises the keys that they see, for the forward's families."""

from __future__ import annotations

import dataclasses

import pytest
import torch
from fp8_cache_harness import FORMATS, SHAPES, call, check, eight_bit_problem, scale
from fp8_harness import E4M3, INT8, LSE, PLAIN, WIDE_P, decode, dequantized, lse_error, relative_rmse
from harness import captured
from kvcache_harness import KvCase, make_problem, plan_for, rotated_queries, run
from reference import attention

import flash_attn
from flash_attn import flash_attn_with_kvcache

LENGTHS = (700, 0, -1, 333, 64)
MOST = 800


@pytest.fixture(params=("wgmma", "wgmma:1", "mma_sync"))
def family(request, device, monkeypatch):
    """Forced where it supports the call."""
    if device == "cpu" and request.param != "wgmma":
        pytest.skip("the CPU backend has no families")
    monkeypatch.setenv("FLASH_ATTN_FAMILY", request.param)
    return request.param


def problem_of(device, stored, shape="token", **case):
    case = {"lengths": LENGTHS, "seqlen_q": 70, "capacity": MOST, "causal": True, "dtype": "float16", **case}
    return eight_bit_problem(KvCase(**case), device, stored, shape)


def check_chunk(problem, device, descales, **options):
    out, lse = call(problem, device, *descales, **options)
    queries = None
    if problem.cos is not None:
        lengths = problem.case.lengths
        queries = torch.stack([x if n < 0 else rotated_queries(problem, i)
                               for i, (x, n) in enumerate(zip(problem.q, lengths))])  # fmt: skip
    check(problem, out, lse, *descales, queries)
    return out, lse


@pytest.mark.parametrize("stored", FORMATS)
@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("page_size", (0, 16))
@pytest.mark.parametrize("dtype", ("float16", "bfloat16"))
def test_descales(device, family, stored, shape, page_size, dtype):
    problem, *descales = problem_of(device, stored, shape, page_size=page_size, dtype=dtype)
    check_chunk(problem, device, descales)


FEATURES = (
    {"causal": False}, {"window": (200, 0)}, {"window": (3, 5), "causal": False}, {"softcap": 5.0}, {"alibi": True},
    {"leftpad": (3, 0, 0, 300, 64)}, {"sinks": True}, {"rotary_dim": 32, "seqlen_new": 70, "capacity": MOST},
    {"rotary_dim": 64, "seqlen_new": 3, "interleaved": True, "window": (100, 0)},
)  # fmt: skip


@pytest.mark.parametrize("features", FEATURES, ids=str)
@pytest.mark.parametrize("stored,shape", ((E4M3, "inline"), (INT8, "batch")))
@pytest.mark.parametrize("page_size", (0, 1, 48))
def test_features(device, family, features, stored, shape, page_size):
    for head_dim, heads, dtype in ((64, (4, 2), "float16"), (128, (6, 1), "bfloat16")):
        case = {"head_dim": head_dim, "nheads": heads[0], "nheads_k": heads[1], "page_size": page_size, **features}
        case["dtype"] = dtype
        problem, *descales = problem_of(device, stored, shape, **case)
        check_chunk(problem, device, descales)


@pytest.mark.parametrize("layout", ("contiguous", "permuted", "heads_first", "sliced", "unaligned"))
@pytest.mark.parametrize(
    "head_dim,dtype", ((32, "bfloat16"), (72, "float16"), (96, "bfloat16"), (192, "float16"), (256, "bfloat16"))
)
def test_layouts(device, family, layout, head_dim, dtype):
    """8-bit values are read in vectors of 8 bytes, in words, or one by one, by their alignment."""
    case = {"seqlen_new": 40, "seqlen_q": 40, "layout": layout, "head_dim": head_dim, "dtype": dtype}
    problem, *descales = problem_of(device, INT8, **case)
    check_chunk(problem, device, descales)


@pytest.mark.parametrize("axes", ("head", "batch"))
@pytest.mark.parametrize("page_size", (0, 16))
@pytest.mark.parametrize("dtype", ("float16", "bfloat16"))
def test_v_descales_of_channels(device, family, axes, page_size, dtype):
    problem, k_descale, _ = problem_of(device, E4M3, "batch", page_size=page_size, dtype=dtype)
    shape = (2, 64) if axes == "head" else (len(LENGTHS), 2, 64)
    v_descale = scale(device, *shape)
    by_channel, _ = call(problem, device, k_descale, v_descale, v_descale_axis="channel")
    plain, _ = call(problem, device, k_descale, 1.0)
    factor = v_descale if axes == "head" else v_descale[:, None]
    expected = plain.double() * factor.repeat_interleave(2, -2)
    assert relative_rmse(by_channel, expected) <= 3e-3


def test_powers_of_two_are_exact(device, family):
    """The pass writes what an fp16 cache of the same values holds: results have the same bits."""
    wide = make_problem(KvCase(LENGTHS, 70, None, MOST, causal=True, head_dim=128, dtype="float16"), device)
    narrow = dataclasses.replace(wide)
    for name in ("k_cache", "v_cache"):
        values = getattr(wide, name).nan_to_num(nan=0.0).to(E4M3)
        setattr(narrow, name, values)
        setattr(wide, name, (values.float() / 4).to(wide.q.dtype))
    out, lse = run(wide)
    ours = call(narrow, device, 0.25, 0.25)
    if device == "cuda":
        assert torch.equal(ours[0], out) and torch.equal(ours[1], lse)
    else:  # descales multiply scores and sums there
        assert relative_rmse(ours[0], out) < 2e-3 and (ours[1] - lse)[lse.isfinite()].abs().max() < 1e-5


@pytest.mark.parametrize("stored", FORMATS)
@pytest.mark.parametrize("k_descale", (1e-8, 1e-6, 1e-4, 1.0, 1e3))
@pytest.mark.parametrize("seqlen_q,through", ((70, "cache"), (70, "dense"), (1, "cache")))
def test_descales_of_k_of_any_size(device, stored, k_descale, seqlen_q, through):
    """bf16 queries become fp16 on a GPU: products with k_descale are beyond its range, or below its normal numbers."""
    heads_k, head_dim, keys = 2, 64, 300
    v, k = ((torch.randn(2, keys, heads_k, head_dim, device=device) * 30).round().clamp(-127, 127) for _ in "vk")
    k, v = k.to(stored), v.to(stored)
    descale = torch.tensor([[1.0, 0.7], [0.3, 0.9]], device=device) * k_descale
    exact = (k.double() * descale[:, None, :, None].double(), v.double() * 0.02)
    for magnitude in (1e-3, 1.0, 1e3):
        q = (torch.randn(2, seqlen_q, 4, head_dim, device=device) * magnitude).bfloat16()
        softmax_scale = min(0.5 / (magnitude * k_descale * 30 * head_dim**0.5), 1e6)  # scores are below 1
        options = {"softmax_scale": softmax_scale, "causal": True, "k_descale": descale, "v_descale": 0.02}
        if through == "cache":
            out, lse = decode(flash_attn_with_kvcache, device, q, k, v, return_softmax_lse=True, **options)
        else:
            out, lse, _ = flash_attn.flash_attn_func(q, k, v, return_attn_probs=True, **options)
        expected = attention(q, *exact, causal=True, scale=softmax_scale)
        assert relative_rmse(out, expected.out) <= WIDE_P, magnitude
        assert lse_error(lse, expected.lse) <= LSE, magnitude


@pytest.mark.parametrize("stored,out_dtype", ((E4M3, None), (E4M3, torch.float16)))
@pytest.mark.parametrize("of_q", ("none", "tensor", "kv_head", "head", "batch_kv", "batch"))
@pytest.mark.parametrize("seqlen_q,page_size", ((3, 0), (70, 16)))
@pytest.mark.parametrize("of_k", ("page", "batch"))
def test_8_bit_queries(device, stored, out_dtype, of_q, of_k, seqlen_q, page_size):
    problem, *descales = problem_of(device, stored, of_k, seqlen_q=seqlen_q, page_size=page_size, dtype="bfloat16")
    shape = {"none": None, "tensor": (), "kv_head": (2,), "head": (4,), "batch_kv": (5, 2), "batch": (5, 4)}[of_q]
    q_descale = None if shape is None else scale(device, *shape) * 40
    problem.q = problem.q.to(E4M3)
    out, lse = call(problem, device, *descales, q_descale=q_descale, out_dtype=out_dtype)
    assert out.dtype == (out_dtype or torch.bfloat16)
    wide = q_descale if shape is None or len(shape) == 0 or shape[-1] == 4 else q_descale.repeat_interleave(2, -1)
    check(problem, out, lse, *descales, dequantized(problem.q, wide), PLAIN, q_descale)


def test_8_bit_queries_of_any_layout(device):
    problem, *descales = problem_of(device, E4M3, head_dim=37, dtype="bfloat16", seqlen_q=5)
    wide = torch.randn(5, 4, 5, 41, device=device).to(E4M3)
    problem.q = wide[..., 1:38].transpose(1, 2)
    check(problem, *call(problem, device, *descales), *descales, bound=PLAIN)


def test_8_bit_queries_with_new_rows_of_any_width(device):
    for new in (torch.float16, torch.bfloat16, E4M3):
        problem, *descales = problem_of(device, E4M3, "head", seqlen_new=70, dtype="bfloat16")
        problem.q, problem.k, problem.v = problem.q.to(E4M3), problem.k.to(new), problem.v.to(new)
        check(problem, *call(problem, device, *descales), *descales, bound=PLAIN)


@pytest.mark.parametrize("rotary", (False, True))
def test_bad_8_bit_queries_are_named(device, rotary):
    q, cache = torch.zeros(1, 2, 2, 32, device=device).to(E4M3), torch.zeros(1, 9, 2, 32, device=device).to(E4M3)
    new, angles = torch.zeros(1, 2, 2, 32, device=device, dtype=torch.bfloat16), None
    if rotary:
        angles = torch.ones(20, 8, device=device, dtype=torch.bfloat16)
        options = {"k": new, "v": new, "rotary_cos": angles, "rotary_sin": angles}
        message = "rotary_cos: expected None with q of 8 bits, got a tensor"
    else:
        options = {"q_descale": torch.ones(1, 3, device=device)}
        message = r"q_descale: expected one element or shape \[2\] or \[1, 2\].*, got \[1, 3\]"
    with pytest.raises(RuntimeError, match=f"^{message}"):
        decode(flash_attn_with_kvcache, device, q, cache, cache.clone(), cache_seqlens=4, **options)


@pytest.mark.devices("cuda")
@pytest.mark.parametrize("page_size", (0, 16))
@pytest.mark.parametrize("sinks", (False, True))
@pytest.mark.parametrize("dtype", ("float16", "bfloat16"))
def test_misfits(device, family, page_size, sinks, dtype):
    """A length, and a page or cache row, that do not exist."""
    case = {"lengths": (40, 90, 17, 0), "seqlen_q": 40, "seqlen_new": 2, "capacity": 200, "dtype": dtype}
    problem, *descales = problem_of(device, E4M3, "page", page_size=page_size, sinks=sinks, **case)
    problem.lengths[1] = 10**6
    place = problem.table if page_size else problem.rows
    kept = place.clone()
    place[2] = 10**6
    out, lse = call(problem, device, *descales)
    place.copy_(kept)
    for i in (1, 2):
        assert (out[i] == 0).all() and lse[i].isposinf().all()
    for i in (0, 3):
        single = dataclasses.replace(
            problem, q=problem.q[i : i + 1], lengths=problem.lengths[i : i + 1],
            rows=None if page_size else problem.rows[i : i + 1],
            table=problem.table[i : i + 1] if page_size else None,
            case=dataclasses.replace(problem.case, lengths=problem.case.lengths[i : i + 1]),
        )  # fmt: skip
        check(single, out[i : i + 1], lse[i : i + 1], *descales)


@pytest.mark.devices("cuda")
@pytest.mark.parametrize("page_size,dtype", ((0, "bfloat16"), (16, "bfloat16"), (16, "float16")))
def test_graph_with_changed_lengths(device, page_size, dtype):
    case = {"lengths": (1000, 3, 0), "seqlen_q": 100, "capacity": 1500, "page_size": page_size, "dtype": dtype}
    problem, *descales = problem_of(device, INT8, "page", **case)
    for cache in (problem.k_cache, problem.v_cache):
        cache.random_(-127, 128)
    if page_size:
        problem.table.copy_(torch.randint(problem.k_cache.shape[0], problem.table.shape))
    graph, (out, lse) = captured(lambda: call(problem, device, *descales))
    for lengths in ((1500, 700, 100), (5, -1, 1499)):
        problem.lengths.copy_(torch.tensor(lengths))
        out.fill_(float("nan"))
        graph.replay()
        expected = call(problem, device, *descales)
        assert torch.equal(out, expected[0]) and torch.equal(lse, expected[1])
        decoded = call(problem, device, *descales, num_splits=1)
        assert torch.linalg.norm(out - decoded[0]) < 0.01 * torch.linalg.norm(decoded[0])
        assert torch.equal(lse.isinf(), decoded[1].isinf())


@pytest.mark.devices("cuda")
@pytest.mark.parametrize("page_size", (0, 16))
def test_chosen_without_being_asked_for(device, page_size):
    """With a plan too; neither in batch-invariant mode nor where the call chooses the splits."""
    case = {"lengths": (4000, 2000), "seqlen_q": 512, "capacity": 4096, "nheads": 32, "nheads_k": 8, "head_dim": 128}
    problem, *descales = problem_of(device, E4M3, page_size=page_size, **case)
    given = dict(zip(("k_descale", "v_descale"), descales))
    place = {"cache_batch_idx": problem.rows, "block_table": problem.table, "cache_seqlens": problem.lengths}

    def plan_of(**options):
        options = {**place, **given, **options}
        return flash_attn.explain(flash_attn_with_kvcache, problem.q, problem.k_cache, problem.v_cache, **options)

    assert plan_of()["forward"]["dequantized_bytes"] == 2 * 2 * 2 * 4096 * 8 * 128
    for options in ({"batch_invariant": True}, {"num_splits": 1}):
        assert plan_of(**options)["forward"]["kernel"] == "split_kv"
    out = check_chunk(problem, device, descales)[0]
    assert torch.equal(out, call(problem, device, *descales, plan=plan_for(problem))[0])
