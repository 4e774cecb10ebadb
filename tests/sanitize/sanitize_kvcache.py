"""Small calls of the KV cache functions for sanitize_cases.py, requests that do not fit the cache among them."""

from __future__ import annotations

import functools

import torch
from fp8_cache_harness import call, eight_bit_problem
from fp8_cache_harness import check as check_values
from fp8_harness import E4M3, INT8, LSE, PLAIN, dequantized, lse_error, relative_rmse
from harness import on_cpu
from kvcache_harness import KvCase, check_append, check_attention, make_problem, plan_for, run

from flash_attn import flash_attn_combine

PAIRS = {"nheads": 128, "nheads_k": 128}
LATENT = {"nheads_k": 1, "head_dim": 64, "head_dim_v": 512, "layout": "latent"}
CASES = (
    (KvCase(seqlen_new=1), {}),
    (KvCase((300, 0, -1, 17), seqlen_new=1, capacity=330, page_size=16, rotary_dim=32, nheads=8), {"num_splits": 4}),
    (KvCase((300, 0, -1, 17), 3, 3, 330, page_size=3, causal=True, head_dim=128, rotary_dim=32), {}),
    (KvCase((40, 7), 2, 2, head_dim=37, layout="unaligned", causal=True, dtype="float16"), {}),
    (KvCase((90, 5), 70, 70, 200, head_dim=256, page_size=17, causal=True), {}),
    (KvCase((200, 31), capacity=260, window=(50, 0), alibi=True, leftpad=(20, 40), nheads=6, dtype="float16"), {}),
    (KvCase((260, 31), 2, 2, 300, head_dim=192, softcap=5.0, causal=True, page_size=1), {"num_splits": 3}),
    (KvCase((260, 31), 2, 2, 300, head_dim=96, causal=True), {"batch_invariant": True}),
    # Many rows: by the families of the forward.
    (KvCase((300, 0, -1, 64), 40, 40, 400, causal=True, head_dim=128, rotary_dim=32), {}),
    (KvCase((300, 0, -1, 64), 130, None, 400, page_size=16, leftpad=(7, 0, 0, 64), dtype="float16"), {}),
    # Several fixed splits of the keys to a thread block.
    (KvCase((20000,), capacity=20000, nheads=16, nheads_k=16, head_dim=32), {"batch_invariant": True}),
    # Many splits, which several warps combine; pages of whole KV blocks.
    (KvCase((2500,), capacity=2600, nheads=8, head_dim=128), {}),
    (KvCase((2500,), capacity=2560, nheads=8, head_dim=128, seqlen_new=1, page_size=16), {}),
    (KvCase((1200, 700), capacity=1300, nheads=2, head_dim=256, dtype="float16"), {}),
    # More splits than there are blocks of keys, and as many as an int holds.
    (KvCase((700, 0, 64), capacity=720, nheads=2), {"num_splits": 128}),
    (KvCase((700, 0, 64), capacity=720, nheads=2), {"num_splits": 2**31 - 1}),
    (KvCase((700, 3, 64), capacity=720, page_size=16, head_dim=128), {"num_splits": 2**31 - 1}),
    (KvCase((700, 3, 64), 2, 2, 720, page_size=5, head_dim=128, causal=True), {"num_splits": 2**31 - 1}),
    # Pages of any size, new keys, rotary and several queries at once.
    (KvCase((300, 0, -1, 17), 2, 2, 330, page_size=5, causal=True, rotary_dim=64, interleaved=True), {}),
    (KvCase((300, 0, -1, 17), 2, 2, 330, page_size=48, window=(70, 3), rotary_dim=32, head_dim=96), {}),
    # Sinks: tiles that are split and not, fixed splits, and the families of the forward.
    (KvCase((700, 0, -1, 17), 1, 1, 720, page_size=16, head_dim=128, sinks=True), {"num_splits": 4}),
    (KvCase((700, 3), capacity=720, nheads=2, sinks=True), {}),
    (KvCase((1200, 31), 2, 2, 1300, head_dim=96, causal=True, sinks=True), {"batch_invariant": True}),
    (KvCase((300, 0, -1, 64), 40, 40, 400, causal=True, head_dim=128, page_size=16, sinks=True), {}),
    # So many tiles that each has two K/V heads.
    (KvCase((150, 0, -1, 17), 1, 1, 160, page_size=16, **PAIRS), {}),
    (KvCase((150, 17, 64, 0), 2, 2, 160, head_dim=24, layout="unaligned", causal=True, **PAIRS), {"num_splits": 3}),
    # 33 to 64 packed rows, by the wgmma decode kernel on compute capability 9.0.
    (KvCase((700, 0, -1, 64), 17, 17, 800, nheads=6, page_size=16, head_dim=128, causal=True), {"num_splits": 3}),
    (KvCase((700, 0, -1, 64), 17, None, 800, 6, leftpad=(30, 0, 0, 64), window=(90, 3), sinks=True), {"num_splits": 2}),
    # Trees of drafts: several tiles, mask heads, pages that a mask straddles, two K/V heads of a tile.
    (KvCase((300, 0, -1, 17), 9, 9, 330, page_size=5, head_dim=128, mask_keys=9), {"num_splits": 3}),
    (KvCase((300, 3), 40, None, 330, nheads=8, mask_keys=70, mask_heads=4, leftpad=(7, 0)), {}),
    (KvCase((150, 17), 2, 2, 160, page_size=16, mask_keys=2, mask_shared=True, **PAIRS), {"batch_invariant": True}),
    # Latent rows: many query rows to a key, and few.
    (KvCase((300, 0, -1, 17), 3, capacity=330, page_size=1, causal=True, sinks=True, nheads=40, **LATENT), {}),
    (KvCase((400, 64), capacity=420, page_size=16, nheads=16, **LATENT), {"num_splits": 3}),
    (KvCase((400, 64), 2, capacity=420, page_size=5, causal=True, nheads=6, dtype="float16", **LATENT), {}),
)
# Over 8-bit caches: (case, dtype, shape of descales, options).
EIGHT_BIT_CASES = (
    (KvCase((300, 0, -1, 17), 1, 1, 330, page_size=16, head_dim=128, nheads=8), E4M3, "token", {"num_splits": 4}),
    (KvCase((300, 0, -1, 17), 3, 3, 330, page_size=3, causal=True, rotary_dim=32, head_dim=72), INT8, "token", {}),
    (KvCase((300, 0, -1, 17), 2, 2, 330, page_size=48, window=(70, 3), head_dim=256), E4M3, "page", {}),
    (KvCase((40, 7), 2, 2, head_dim=37, layout="unaligned", causal=True, dtype="float16"), INT8, "inline", {}),
    (KvCase((200, 31), capacity=260, window=(50, 0), alibi=True, leftpad=(20, 40), nheads=6), E4M3, "inline", {}),
    (KvCase((260, 31), 70, 70, 400, head_dim=64, causal=True, softcap=5.0, dtype="float16"), INT8, "batch", {}),
    (KvCase((260, 31), 40, 2, 300, head_dim=128, nheads=8, nheads_k=1, causal=True), E4M3, "head", {}),
    (KvCase((1200, 31), 2, 2, 1300, head_dim=128, causal=True, sinks=True), INT8, "token", {"batch_invariant": True}),
    (KvCase((2500,), capacity=2560, nheads=8, head_dim=128, page_size=16), INT8, "expanded", {}),
    (KvCase((1200, 700), capacity=1300, nheads=2, head_dim=256, sinks=True), E4M3, "tensor", {}),
    # Many rows: a pass dequantises keys for the families of the forward.
    (KvCase((300, 0, -1, 64), 90, 90, 400, causal=True, head_dim=128, rotary_dim=32), E4M3, "batch", {}),
    (KvCase((300, 0, -1, 64), 130, None, 400, page_size=16, leftpad=(7, 0, 0, 64), dtype="float16"), INT8, "token", {}),
    (KvCase((300, 64), 90, 3, 400, page_size=7, window=(50, 0), head_dim=72, sinks=True), E4M3, "page", {}),
    (KvCase((300, 64), 90, None, 400, layout="unaligned", causal=True, nheads_k=4), INT8, "inline", {}),
    (KvCase((300, 64), 9, 3, 400, page_size=7, head_dim=72, mask_keys=40), E4M3, "token", {}),
    (KvCase((300, 64), 2, None, 400, head_dim=256, mask_keys=2, mask_heads=2), INT8, "head", {"num_splits": 2}),
    # So many tiles that each has two K/V heads.
    (KvCase((150, 0, -1, 17), 1, 1, 160, page_size=16, head_dim=128, **PAIRS), E4M3, "token", {"num_splits": 3}),
    (KvCase((150, 0, -1, 17), 2, 2, 160, page_size=3, causal=True, rotary_dim=32, **PAIRS), INT8, "inline", {}),
    (KvCase((150, 17, 64, 0), capacity=160, head_dim=100, alibi=True, sinks=True, **PAIRS), E4M3, "head", {}),
    (KvCase((600, 64, 1, 17), capacity=640, head_dim=64, **PAIRS), INT8, "batch", {}),
)
# Queries of e4m3: (case, out_dtype).
E4M3_QUERIES = (
    (KvCase((300, 0, -1, 17), 2, None, 330, page_size=16, head_dim=128), None),
    (KvCase((300, 64), 90, 90, 400, causal=True, head_dim=64), torch.float16),
    (KvCase((40, 7), 3, 2, head_dim=37, layout="unaligned", causal=True), None),
)


def check(case, options, device, planned):
    """One call; with a plan, and an out that is given, if `planned`."""
    problem = make_problem(case, device)
    before = on_cpu(problem.clone())
    if planned:
        options = {
            "plan": plan_for(problem, **options),
            "out": torch.empty_like(problem.q if problem.qv is None else problem.qv),
        }
    out, lse = run(problem, **options)
    after = on_cpu(problem)
    check_append(after, before)
    check_attention(after, out.cpu(), lse.cpu())


def check_eight_bit(case, stored, shape, options, device, planned):
    """One call and the same on the CPU, which writes the same values and descales."""
    problem, *descales = eight_bit_problem(case, device, stored, shape)
    reference, references = on_cpu(problem.clone()), [x.cpu() for x in descales]
    expected, expected_lse = call(reference, "cpu", *references, **options)
    if planned:
        options = {"plan": plan_for(problem, **options), "out": torch.empty_like(problem.q)}
    out, lse = call(problem, device, *descales, **options)
    assert relative_rmse(out.cpu(), expected) < 6e-3
    assert lse_error(lse.cpu(), expected_lse) < LSE
    if problem.cos is None:
        for ours, theirs in ((problem.k_cache, reference.k_cache), (problem.v_cache, reference.v_cache)):
            assert torch.equal(ours.view(torch.int8).cpu(), theirs.view(torch.int8))
        assert all(torch.equal(ours.cpu(), theirs) for ours, theirs in zip(descales, references))


def check_e4m3_queries(case, out_dtype, device):
    problem, *descales = eight_bit_problem(case, device, E4M3, "head")
    problem.q = problem.q.to(E4M3)
    q_descale = torch.linspace(0.3, 0.9, case.nheads, device=device)
    out, lse = call(problem, device, *descales, q_descale=q_descale, out_dtype=out_dtype)
    check_values(problem, out, lse, *descales, dequantized(problem.q, q_descale), PLAIN, q_descale)


def check_eight_bit_misfits(page_size, device):
    """Many rows over an 8-bit cache, on a GPU: a length, and a page or cache row, that do not exist."""
    if device == "cpu":
        return
    case = KvCase((40, 90, 17, 0), 90, 2, 200, page_size=page_size, causal=True)
    problem, *descales = eight_bit_problem(case, device, E4M3, "page")
    problem.lengths[1] = 10**6
    indices = problem.table if page_size else problem.rows
    indices[2] = 10**6
    out, lse = call(problem, device, *descales)
    assert (out[1:3] == 0).all() and lse[1:3].isposinf().all() and not out.isnan().any()


def check_misfits(page_size, device):
    """On a GPU: a length, and a page or cache row, that do not exist."""
    if device == "cpu":
        return
    problem = make_problem(KvCase((40, 90, 17, 0), seqlen_new=2, page_size=page_size), device)
    before = on_cpu(problem.clone())
    problem.lengths[1] = 10**6
    indices = problem.table if page_size else problem.rows
    indices[2] = 10**6
    out, lse = run(problem)
    indices.copy_(before.table if page_size else before.rows)
    valid = (True, False, False, True)
    after = on_cpu(problem)
    check_append(after, before, valid)
    check_attention(after, out.cpu(), lse.cpu(), valid)


def check_combine(device):
    out_partial, lse_partial = torch.randn(5, 2, 3, 4, 40, device=device), torch.randn(5, 2, 3, 4, device=device)
    lse_partial[1:3], out_partial[1:3] = float("-inf"), float("nan")
    out, lse = flash_attn_combine(out_partial, lse_partial)
    weights = torch.softmax(lse_partial.cpu()[[0, 3, 4]].double(), dim=0)
    expected = (weights.unsqueeze(-1) * out_partial.cpu()[[0, 3, 4]].double()).sum(0)
    assert (out.cpu() - expected).abs().max() < 1e-5


def checks(device):
    """(name, check) of every case."""
    for index, (case, options) in enumerate(CASES):
        for planned in {index % 2 == 1, "num_splits" in options}:
            name = f"kvcache {case} {options}" + ", planned" * planned
            yield name, functools.partial(check, case, options, device, planned)
    for index, (case, stored, shape, options) in enumerate(EIGHT_BIT_CASES):
        name = f"kvcache {str(stored)[6:]} {shape} {case} {options}" + ", planned" * (index % 2)
        yield name, functools.partial(check_eight_bit, case, stored, shape, options, device, index % 2 == 1)
    for case, out_dtype in E4M3_QUERIES:
        yield f"kvcache queries of e4m3 {case}", functools.partial(check_e4m3_queries, case, out_dtype, device)
    for page_size in (0, 16):
        name = f"kvcache misfits over 8 bits, page size {page_size}"
        yield name, functools.partial(check_eight_bit_misfits, page_size, device)
        yield f"kvcache misfits, page size {page_size}", functools.partial(check_misfits, page_size, device)
    yield "combine", functools.partial(check_combine, device)
