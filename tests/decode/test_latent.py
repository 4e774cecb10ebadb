"""qv of flash_attn_with_kvcache and of packed calls over pages: multi-head latent attention in its absorbed form."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from kvcache_harness import KvCase, check_attention, check_call, make_problem, plan_for, run
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.utils.flop_counter import FlopCounterMode

import flash_attn
from flash_attn import flash_attn_varlen_func, flash_attn_with_kvcache
from flash_attn.ops import latent

LATENT = {"nheads": 16, "nheads_k": 1, "head_dim": 64, "head_dim_v": 512}
SMALL = {"nheads": 12, "nheads_k": 1, "head_dim": 16, "head_dim_v": 48}
CASES = (
    KvCase(page_size=1, layout="latent", **LATENT),
    KvCase((40, -1), 3, page_size=64, causal=True, layout="latent", **{**LATENT, "nheads": 128}),
    KvCase((17, 40), 8, page_size=1, causal=True, sinks=True, layout="latent", **{**LATENT, "nheads": 20}),
    KvCase((1000, 129), 2, page_size=1, causal=True, leftpad=(70, 3), capacity=1024, **{**LATENT, "nheads": 70}),
    KvCase((333, 64), page_size=3, capacity=336, layout="latent", **{**LATENT, "nheads": 128}),
    KvCase((2000, 0, 700, 31), page_size=64, capacity=2048, layout="latent", **LATENT),
    KvCase((513, 1200), 2, page_size=512, causal=True, leftpad=(100, 7), capacity=1536, **{**LATENT, "nheads": 8}),
    KvCase((1000, 200), 3, page_size=24, causal=True, leftpad=(130, 7), capacity=1008, **{**LATENT, "nheads": 40}),
    KvCase((300, 90), 90, page_size=16, causal=True, sinks=True, capacity=320, layout="latent", **LATENT),
    KvCase((31, 64), page_size=16, dtype="float16", layout="sliced", **{**LATENT, "nheads": 1}),
    KvCase(page_size=7, layout="latent", **{**LATENT, "nheads": 1, "head_dim": 0}),
    KvCase((40, 0, 90, 17), 2, 2, page_size=16, causal=True, rotary_dim=16, **SMALL),
    KvCase(seqlen_q=2, leftpad=(3, 0, 90, 20), window=(30, 2), sinks=True, **SMALL),
    KvCase((9, 800), 9, page_size=784, causal=True, softcap=5.0, capacity=800, **SMALL),
    KvCase(nheads=6, nheads_k=3, head_dim=40, head_dim_v=24, alibi=True, layout="sliced", dtype="float32"),
)


def has_kernel(device, case):
    sizes = case.nheads_k, case.head_dim, case.head_dim_v
    return device == "cpu" or (case.page_size > 0 and sizes == (1, *latent.KERNEL_DIMS))


@pytest.mark.each
@pytest.mark.parametrize("options", ({}, {"num_splits": 5}, {"batch_invariant": True}), ids=str)
@pytest.mark.parametrize("latent_case", CASES, ids=str)
def test_scores_of_keys_and_values(device, latent_case, options):
    """CUDA has kernels for the rows of DeepSeek's models in pages, and refuses the rest by name."""
    if has_kernel(device, latent_case):
        check_call(latent_case, device, **options)
        return
    with pytest.raises(NotImplementedError, match="^qv: expected None on cuda, got a tensor: kernels "):
        run(make_problem(latent_case, device), **options)


@pytest.mark.devices("cuda")
@pytest.mark.parametrize("family", ("mma_sync", "wgmma"))
@pytest.mark.parametrize("num_splits", (0, 3))
@pytest.mark.parametrize("latent_case", [case for case in CASES if has_kernel("cuda", case)], ids=str)
def test_either_kernel(device, latent_case, num_splits, family, monkeypatch):
    monkeypatch.setenv("FLASH_ATTN_FAMILY", family)
    check_call(latent_case, device, num_splits=num_splits)


def test_scores_that_rise(device):
    """Keys grow from page to page, so that the largest score of a row is often a new one."""
    problem = make_problem(KvCase((900, 200), page_size=16, capacity=1024, layout="latent", **LATENT), device)
    pages, slots = problem.k_cache.shape[0], problem.table.shape[1]
    growth = torch.ones(pages, device=device, dtype=problem.q.dtype)
    for row in problem.table.clamp(0, pages - 1):
        growth[row] = torch.linspace(0.1, 3.0, slots, device=device, dtype=problem.q.dtype)
    for keys in (problem.k_cache, problem.v_cache):
        keys.mul_(growth.view(-1, 1, 1, 1))
    check_attention(problem, *run(problem))


@pytest.mark.parametrize("options", ({"window_size": (9, 0)}, {"softcap": 1.0}, {"softmax_scale": -1.0}), ids=str)
def test_scores_without_kernels(device, options):
    problem = make_problem(KvCase(page_size=16, layout="latent", **LATENT), device)
    if device == "cpu":
        run(problem, **options)
        return
    with pytest.raises(NotImplementedError, match="^qv: expected None on cuda, got a tensor: kernels have no "):
        run(problem, **options)


def test_all_rows_of_the_pages(device):
    """Without cache_seqlens."""
    problem = make_problem(KvCase((64, 64), page_size=16, capacity=64, layout="latent", **LATENT), device)
    assert all(torch.equal(a, b) for a, b in zip(run(problem, cache_seqlens=None), run(problem)))


@pytest.mark.parametrize("seqlen_q", (1, 70))
@pytest.mark.parametrize("key", (0, 1100, 1935, 1999))
@pytest.mark.parametrize("num_splits", (1, 0))
@pytest.mark.parametrize("page_size", (1, 16))
def test_a_page_that_does_not_exist(device, page_size, num_splits, key, seqlen_q):
    """CUDA treats a request that needs one as inactive, NaN in its other pages or not; the CPU raises an error. Only
    one split reads the page; not all of 70 queries see it."""
    sizes = {"page_size": page_size, "capacity": 2048, **LATENT, "nheads": 20}
    problem = make_problem(KvCase((2000, 900), seqlen_q, causal=True, layout="latent", **sizes), device)
    problem.v_cache[problem.table[0, 1:4].long()] = float("nan")
    problem.table[0, key // page_size] = 1 << 20
    if device == "cpu":
        with pytest.raises(RuntimeError, match="^block_table: "):
            run(problem)
        return
    out, lse = run(problem, num_splits=num_splits)
    assert (out[0] == 0).all() and (lse[0] == float("inf")).all()
    check_attention(problem, out, lse, takes_part=[False, True])


@pytest.mark.devices("cuda")
@pytest.mark.parametrize("planned", (False, True))
def test_in_a_graph(device, planned):
    """Captured once, replayed with other lengths; split keys, and into a given output of any strides."""
    problem = make_problem(KvCase((2000, 700), page_size=1, capacity=2048, layout="latent", **LATENT), device)
    out = torch.full((2, 1, 16, 516), float("nan"), device=device, dtype=problem.q.dtype)[..., 1:513]
    options = {"out": out, "plan": plan_for(problem) if planned else None}
    run(problem, **options)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        _, lse = run(problem, **options)
    problem.lengths.sub_(600)
    problem.case = replace(problem.case, lengths=(1400, 100))
    out.fill_(float("nan"))
    graph.replay()
    check_attention(problem, out, lse)


@pytest.mark.parametrize("nheads", (1, 16))
def test_decoded_token_equals_that_of_a_chunk(device, nheads):
    """Batch-invariant: to the last bit, whatever the other sequences, the page size and the chunk."""
    sizes = {"page_size": 16, "capacity": 320, **LATENT, "nheads": nheads}
    chunk = make_problem(KvCase((40, 300), 40, causal=True, layout="latent", **sizes), device)
    out, lse = run(chunk, batch_invariant=True)
    pages, size = chunk.k_cache.shape[:2]
    table = chunk.table.clamp(0, pages - 1)[1:, :, None] * size + torch.arange(size, device=device, dtype=torch.int32)
    for token in (17, 39):
        one = flash_attn_with_kvcache(
            chunk.q[1:, token : token + 1], *(x.flatten(0, 1).unsqueeze(1) for x in (chunk.k_cache, chunk.v_cache)),
            cache_seqlens=chunk.lengths[1:] - 39 + token, block_table=table.flatten(1), causal=True,
            return_softmax_lse=True, batch_invariant=True, qv=chunk.qv[1:, token : token + 1],
        )  # fmt: skip
        assert torch.equal(one[0][0, 0], out[1, token]) and torch.equal(one[1][0, :, 0], lse[1, :, token])


def test_plan(device):
    lengths, size = (40, 0, 1500, 17), {"page_size": 16, "capacity": 1536}
    problem = make_problem(KvCase(lengths, 2, causal=True, layout="latent", **size, **LATENT), device)
    out = torch.full_like(problem.qv, float("nan"))
    result, lse = run(problem, plan=plan_for(problem), out=out)
    assert result is out
    check_attention(problem, out, lse)
    for made_for in (0, 256) if device == "cpu" else (0,):
        with pytest.raises(RuntimeError, match=f"^plan: expected one made for head_dim_v 512, got one for {made_for}"):
            run(problem, plan=plan_for(problem, head_dim_v=made_for))


def packed(problem, **overrides):
    """The packed call of a paged problem -> (out, lse) in the shapes of the call over a cache."""
    batch, seqlen_q = problem.q.shape[:2]
    cu_q = torch.arange(batch + 1, device=problem.q.device, dtype=torch.int32) * seqlen_q
    cu_k = torch.nn.functional.pad(problem.lengths.cumsum(0, dtype=torch.int32), (1, 0))
    options = {"causal": problem.case.causal, "block_table": problem.table, "sinks": problem.sinks, **overrides}
    if "qv" not in options:
        options.setdefault("q_v", problem.qv.flatten(0, 1))
    out, lse, _ = flash_attn_varlen_func(
        problem.q.flatten(0, 1), problem.k_cache, problem.v_cache, cu_q, cu_k, seqlen_q, int(problem.lengths.max()),
        return_attn_probs=True, **options,
    )  # fmt: skip
    return out.unflatten(0, (batch, seqlen_q)), lse.unflatten(1, (batch, seqlen_q)).transpose(0, 1)


def test_packed_queries(device):
    case = KvCase((91, 40, 17), 17, page_size=1, causal=True, sinks=True, layout="latent", **LATENT)
    problem = make_problem(case, device)
    check_attention(problem, *packed(problem))
    qv = problem.qv.flatten(0, 1)
    check_attention(problem, *packed(problem, qv=qv, seqused_q=torch.full_like(problem.lengths, 17)))
    few = packed(problem, seqused_q=torch.full_like(problem.lengths, 5), causal=False)[0]
    assert torch.equal(few[:, 5:], torch.zeros_like(few[:, 5:]))
    assert torch.allclose(few[:, :5], packed(problem, causal=False)[0][:, :5], atol=1e-2)


def test_what_is_refused(device):
    problem = make_problem(KvCase(page_size=16, layout="latent", **LATENT), device)
    qv, wide = problem.qv, torch.zeros(12, 16, 1, 520, device=device, dtype=torch.bfloat16)

    def fails(message, call=run, error=RuntimeError, **options):
        with pytest.raises(error, match="^" + message):
            call(problem, **options)

    fails(r"qv: expected shape \[4, 1, 16, 512\], got \[4, 1, 8, 512\]", qv=qv[:, :, :8])
    fails(r"qv: expected the dtype of q \(bfloat16\), got float16", qv=qv.half())
    fails("qv: expected a Tensor, got float", error=TypeError, qv=1.0)
    fails(r"v_cache: expected shape \[27, 16, 1, 64\], got \[27, 16, 1, 512\]", qv=None)
    fails("out: expected shape", out=torch.empty_like(problem.q))
    fails("out: expected memory that does not overlap qv", out=qv)
    on_cpu, no_kernel = device == "cpu", "v?: expected None on cuda, got a tensor: kernels have "
    too_wide = "v_cache: expected a head dim from 1 to 512, got 520" if on_cpu else "q" + no_kernel
    with pytest.raises(RuntimeError, match="^" + too_wide):
        table = problem.table.clamp(0, 11)
        keys, query = wide[..., :64], torch.zeros(4, 1, 16, 520, device=device, dtype=torch.bfloat16)
        flash_attn_with_kvcache(problem.q, keys, wide, block_table=table, cache_seqlens=problem.lengths, qv=query)
    fails(r"q_v: expected shape \[4, 16, 512\], got \[4, 16, 8\]", packed, q_v=qv[:, 0, :, :8])
    fails("q_v: expected None, for qv is given", packed, TypeError, q_v=qv.flatten(0, 1), qv=qv.flatten(0, 1).clone())
    fails(r"block_table: expected shape \[4, max_blocks\], got \[4\]", packed, block_table=problem.table[:, 0])
    fails("seqused_k: expected dtype int32, got float32", packed, seqused_k=problem.lengths.float())
    fails("dropout_p: expected 0 with qv, got 0.5" if on_cpu else "q_" + no_kernel, packed, dropout_p=0.5)
    eight = [x.to(torch.float8_e4m3fn) for x in (problem.k_cache, problem.v_cache)]
    with pytest.raises(RuntimeError, match="^qv: expected None with 8-bit tensors" if on_cpu else "^q" + no_kernel):
        flash_attn_with_kvcache(
            problem.q, *eight, cache_seqlens=problem.lengths, block_table=problem.table, qv=problem.qv
        )  # fmt: skip


@pytest.mark.parametrize("name", ("q", "qv"))
def test_no_backward(device, name):
    problem = make_problem(KvCase(page_size=16, layout="latent", **LATENT), device)
    getattr(problem, name).requires_grad_()
    with pytest.raises((NotImplementedError, RuntimeError)):
        run(problem)[0].sum().backward()
    with pytest.raises(NotImplementedError, match="^block_table: expected None in training"):
        packed(problem)[0].sum().backward()


def test_compiled(device):
    problem = make_problem(KvCase(page_size=16, layout="latent", **LATENT), device)
    for call in (run, packed):
        expected, result = call(problem), torch.compile(call, fullgraph=True, backend="aot_eager")(problem)
        assert all(torch.equal(a, b) for a, b in zip(result, expected))


def test_explained_and_counted(device):
    problem = make_problem(KvCase((32, 32), page_size=1, layout="latent", **LATENT), device)
    plan = flash_attn.explain(
        flash_attn_with_kvcache, problem.q, problem.k_cache, problem.v_cache, qv=problem.qv,
        cache_seqlens=problem.lengths, block_table=problem.table,
    )["forward"]  # fmt: skip
    assert (plan["head_dim"], plan["head_dim_v"]) == (64, 512)
    if device == "cuda":
        is_hopper = torch.cuda.get_device_capability(problem.q.device) == (9, 0)
        assert (plan["kernel"], plan["block_m"]) == (("mla_wgmma", 64) if is_hopper else ("mla_mma_sync", 16))
    for call in (run, packed):
        with FlopCounterMode(display=False) as counter:
            call(problem)
        assert counter.get_total_flops() == 2 * 16 * 64 * (64 + 512 + 512)


@pytest.mark.devices("cpu")
@pytest.mark.needs_torch((2, 11), "has no fake CUDA tensors without a driver")
def test_refused_where_no_kernel_is(device):
    """By name, in eager calls and where shapes alone are computed, as in compiled code."""
    refusal = "^qv: expected None on cuda, got a tensor: kernels have head dims of q and v "
    with FakeTensorMode(), pytest.raises(NotImplementedError, match=refusal):
        run(make_problem(KvCase(page_size=16, **SMALL), "cuda"))
