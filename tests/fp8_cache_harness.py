"""Problems over 8-bit caches: values and descales in the layouts of kvcache_harness, and the check against float64.

Keys that no query may see are NaN.
"""

from __future__ import annotations

import dataclasses

import torch
from fp8_harness import E4M3, LSE, WIDE_P, decode, lse_bound, lse_error, nan_code, relative_rmse, set_nan
from kvcache_harness import get_rows, make_problem, run, seen_by_mask
from reference import attention

from flash_attn.eight_bit import EIGHT_BIT

FORMATS = EIGHT_BIT


def scale(device, *shape):
    return torch.rand(shape, device=device) * 0.02 + 0.01


SHAPES = {  # of descales, by (problem, device)
    "tensor": lambda p, device: scale(device),
    "expanded": lambda p, device: scale(device).expand(p.q.shape[0], p.case.nheads_k),
    "head": lambda p, device: scale(device, p.case.nheads_k),
    "batch": lambda p, device: scale(device, p.q.shape[0], p.case.nheads_k),
    "page": lambda p, device: scale(device, p.k_cache.shape[0], 1, p.case.nheads_k),
    "token": lambda p, device: scale(device, *p.k_cache.shape[:3]),
    # after each row of values, as some servers store them
    "inline": lambda p, device: scale(device, *p.k_cache.shape[:3], 5)[..., 4],
}


def as_8_bit(cache, stored):
    """An 8-bit cache in its layout: values times 30, rounded; NaN stays NaN, or the largest int8."""
    unseen = cache.isnan()
    values = (cache.float() * 30).nan_to_num(nan=0).round().clamp(-127, 127)
    elements = cache.untyped_storage().nbytes() // cache.element_size()
    storage = torch.full((elements,), nan_code(stored), dtype=torch.uint8, device=cache.device).view(stored)
    quantized = storage.as_strided(cache.shape, cache.stride(), cache.storage_offset()).copy_(values)
    set_nan(quantized, unseen)
    return quantized


def eight_bit_problem(case, device, stored, shape):
    """(problem with 8-bit caches, k_descale, v_descale): values of about 1, rotary angles of whole quarter turns.

    Those rotate without rounding, which else moves the only score of a row by more than the bound of its LSE.
    """
    problem = make_problem(case, device)
    if problem.cos is not None:
        turns = torch.randint(4, problem.cos.shape, device=device)
        problem.cos, problem.sin = (
            ((t % 2 == 0) * (1 - t)).to(x.dtype) for t, x in ((turns, problem.cos), ((turns - 1) % 4, problem.sin))
        )
    descales = [SHAPES[shape](problem, device) for _ in "kv"]
    caches = [as_8_bit(cache, stored) for cache in (problem.k_cache, problem.v_cache)]
    return dataclasses.replace(problem, k_cache=caches[0], v_cache=caches[1]), *descales


def rows_of(problem, cache, descale, i, first, stop):
    """Dequantised rows of a sequence in float64."""
    rows = get_rows(problem, cache.view(torch.uint8), i, first, stop).contiguous().view(cache.dtype).double()
    if not isinstance(descale, torch.Tensor) or descale.dim() == 0:
        return rows * descale
    if descale.dim() == 1:
        return rows * descale[:, None]
    if descale.dim() == 2:
        return rows * descale[i][:, None]
    return rows * get_rows(problem, descale.expand(cache.shape[:3]), i, first, stop)[..., None]


def can_join(q_descale, k_descale, heads_k):
    """Whether CUDA takes one scale of K for both: of the tensor or of K/V heads."""
    given = [x for x in (q_descale, k_descale) if x is not None and x.numel() != 1]
    return all(x.dim() < 3 and x.shape[-1] == heads_k for x in given)


def of_lse(problem, device, max_logit, q_descale, k_descale):
    """The bound of the LSE. CUDA rounds e4m3 queries times their scales if K's cannot hold both."""
    if problem.q.dtype is not E4M3 or q_descale is None:
        return LSE
    joins = problem.k is None and can_join(q_descale, k_descale, problem.case.nheads_k)
    return LSE if joins else lse_bound(device, max_logit)


def check(problem, out, lse, k_descale, v_descale, queries=None, bound=WIDE_P, q_descale=None):
    """out and LSE against float64 over the caches as they are now."""
    case = problem.case
    queries = problem.q if queries is None else queries
    for i, length in enumerate(case.lengths):
        if length < 0:
            assert (out[i] == 0).all() and lse[i].isposinf().all()
            continue
        first, stop = case.leftpad[i] if case.leftpad else 0, length + case.new
        k = rows_of(problem, problem.k_cache, k_descale, i, first, stop)[None]
        v = rows_of(problem, problem.v_cache, v_descale, i, first, stop)[None]
        slopes = None if problem.slopes is None else problem.slopes[i : i + 1]
        expected = attention(
            queries[i : i + 1], k, v, causal=case.causal, window=case.window, softcap=case.softcap,
            alibi_slopes=slopes, sinks=problem.sinks, mask=seen_by_mask(problem, i, k.shape[1]),
        )  # fmt: skip
        lse_limit = of_lse(problem, out.device.type, expected.max_logit, q_descale, k_descale)
        error = lse_error(lse[i : i + 1], expected.lse)
        assert error <= lse_limit, f"LSE of sequence {i}: {error}"
        if stop > first:
            error = relative_rmse(out[i : i + 1], expected.out)
            assert error <= bound, f"out of sequence {i}: {error}"
        else:
            assert (out[i] == 0).all()


def call(problem, device, k_descale, v_descale, **options):
    """Descales of pages of one row are taken for those of rows."""
    if problem.k_cache.shape[1] == 1:
        for name, descale in (("k", k_descale), ("v", v_descale)):
            if isinstance(descale, torch.Tensor) and descale.dim() == 3:
                options.setdefault(f"{name}_descale_axis", "row")
    return decode(run, device, problem, k_descale=k_descale, v_descale=v_descale, **options)
