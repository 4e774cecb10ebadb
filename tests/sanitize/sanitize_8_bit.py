"""Packed and paged calls with 8-bit K and V, for sanitize_cases.py: cu_seqlens that are no sums, and table entries
that name no page. A GPU reads the values or a dequantised copy; the CPU's results are the reference.
"""

from __future__ import annotations

import functools

import torch
from fp8_harness import E4M3, INT8, lse_error
from sanitize_varlen import CONTENTS, TOTAL_K, TOTAL_Q

from flash_attn import flash_attn_varlen_func

PAGE_SIZE, PAGES, TABLE_WIDTH = 16, 40, 18
# Forced family, head dim, dtype of k and v, descales, dtype of q, features.
VARIANTS = (
    ("mma_sync", 64, E4M3, "row", torch.float16, {"causal": True}),
    ("mma_sync", 128, INT8, "batch", torch.bfloat16, {"causal": True}),
    ("wgmma", 128, INT8, "batch", torch.float16, {"window_size": (60, 20)}),
    ("wgmma", 64, E4M3, "row", torch.bfloat16, {"window_size": (60, 20)}),
    ("wgmma:1", 72, E4M3, "tensor", torch.bfloat16, {"causal": True, "softcap": 5.0}),
    ("split_kv", 128, INT8, "row", torch.bfloat16, {"causal": True}),
)
# Three blocks of keys: the first keys, which a window hides from all queries, take the place of the last ones.
THREE_BLOCKS = ((0, TOTAL_Q), (0, TOTAL_K))
# Head dim, exponentials and mask of calls whose queries are e4m3 too.
E4M3_VARIANTS = (
    (64, "fast", {"causal": True}),
    (128, "exact", {"causal": True}),
    (128, "fast", {"window_size": (60, 20)}),
    (256, "exact", {}),
)


def check(cu_q, cu_k, head_dim, stored, rows, dtype, options, paged, device):
    batch, keys = len(cu_q) - 1, (PAGES, PAGE_SIZE) if paged else (TOTAL_K,)
    q = torch.randn(TOTAL_Q, 4, head_dim).to(dtype)
    k, v = ((torch.randn(*keys, 2, head_dim) * 30).clamp(-120, 120).to(stored) for _ in "kv")
    shape = {"tensor": (), "batch": (batch, 2), "row": (*keys, 2) if paged else (*keys, 1, 2)}[rows]
    k_descale, v_descale = (torch.rand(shape) * 0.02 + 0.01 for _ in "kv")
    tensors = {"k_descale": k_descale, "v_descale": v_descale}
    if paged:
        tensors["block_table"] = torch.randint(PAGES, (batch, TABLE_WIDTH), dtype=torch.int32)
    cu_seqlens = [torch.tensor(cu, dtype=torch.int32) for cu in (cu_q, cu_k)]
    maxima = TOTAL_Q, PAGE_SIZE * TABLE_WIDTH if paged else TOTAL_K

    def run(place):
        given = [x.to(place) for x in (q, k, v, *cu_seqlens)]
        named = {name: x.to(place) for name, x in tensors.items()}
        return flash_attn_varlen_func(*given, *maxima, return_attn_probs=True, **named, **options)[:2]

    expected, expected_lse = run("cpu")
    out, lse = run(device)
    error, size = torch.linalg.norm(out.cpu().double() - expected), torch.linalg.norm(expected.double())
    assert error <= 3e-3 * size, f"out: {error / size:.1e}"
    assert lse_error(lse.cpu(), expected_lse) < 2e-3
    if paged and device != "cpu":
        tensors["block_table"][:, ::3] = 10**6
        tensors["block_table"][:, 1::5] = -1
        out, lse = run(device)
        assert not out.isnan().any()
        maxima = TOTAL_Q, 40  # too few for some sequences: the decode kernels compute the call once more
        other, other_lse = run(device)
        assert torch.linalg.norm(other.double() - out) <= 3e-3 * torch.linalg.norm(out.double())
        assert lse_error(other_lse, lse) < 2e-3


def check_e4m3(cu_q, cu_k, head_dim, exp, options, device):
    q, k, v = (
        torch.randn(rows, heads, head_dim).to(E4M3) for rows, heads in ((TOTAL_Q, 4), (TOTAL_K, 2), (TOTAL_K, 2))
    )
    cu_seqlens = [torch.tensor(cu, dtype=torch.int32) for cu in (cu_q, cu_k)]
    descales = {"q_descale": torch.rand(2) * 0.02, "k_descale": torch.rand(2) * 0.02, "v_descale": torch.rand(2)}

    def run(place):
        given = [x.to(place) for x in (q, k, v, *cu_seqlens)]
        named = {name: x.to(place) for name, x in descales.items()}
        return flash_attn_varlen_func(*given, TOTAL_Q, TOTAL_K, exp=exp, **named, **options)

    expected = run("cpu").double()
    error, size = torch.linalg.norm(run(device).cpu().double() - expected), torch.linalg.norm(expected)
    assert error <= 4e-2 * size, f"out: {error / size:.1e}"


def steps(device):
    """(name, forced family, check) of every case."""
    for head_dim in 64, 128:
        for exp in "fast", "exact":
            run_check = functools.partial(check_e4m3, *THREE_BLOCKS, head_dim, exp, {"window_size": (60, 20)}, device)
            yield f"8 bits three blocks, e4m3 d{head_dim} {exp}", "wgmma", run_check
    for name, (cu_q, cu_k) in CONTENTS.items():
        for head_dim, exp, options in E4M3_VARIANTS:
            run_check = functools.partial(check_e4m3, cu_q, cu_k, head_dim, exp, options, device)
            yield f"8 bits {name}, e4m3 d{head_dim} {exp}", "wgmma", run_check
        for family, head_dim, stored, rows, dtype, options in VARIANTS:
            for paged in (False, True):
                run_check = functools.partial(check, cu_q, cu_k, head_dim, stored, rows, dtype, options, paged, device)
                yield f"8 bits {name}, {family} d{head_dim} {'pages' if paged else 'packed'}", family, run_check
