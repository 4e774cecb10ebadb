"""Masks and biases as data, with gradients, and tangents, for sanitize_cases.py. The CPU's results are compared."""

from __future__ import annotations

import functools
import itertools

import torch
from mask_harness import ranges_mask, startend_mask

from flash_attn import flash_attn_func, flash_attn_jvp

BATCH, HEADS, HEADS_K, SQ, SK = 2, 6, 2, 205, 300  # several tiles of rows and of keys, the last ones not full
MASKS = {"": None, "ranges": ranges_mask, "startend": startend_mask}
BIASES = {"": None, "full": (BATCH, HEADS, SQ, SK), "heads": (1, HEADS, SQ, SK), "keys": (BATCH, 1, 1, SK)}
# Head dim, mask, attn_bias, R of rel_bias or 0, features.
CALLS = (
    (64, "ranges", "", 0, {}),
    (128, "startend", "", 0, {"causal": True}),
    (256, "ranges", "", 0, {"softcap": 5.0}),
    (512, "startend", "", 0, {}),
    (64, "", "full", 0, {"causal": True}),
    (128, "", "heads", 0, {}),
    (128, "ranges", "keys", 0, {"window_size": (90, 20)}),
    (256, "", "full", 0, {}),
    (64, "", "", 7, {}),
    (128, "startend", "", 400, {"softcap": 5.0}),
)
TANGENTS = ((64, {}), (128, {"causal": True}), (128, {"window_size": (60, 20)}), (96, {}))


def compare(ours, theirs, names):
    for name, a, b in zip(names, ours, theirs):
        a, b = (x.detach().cpu().double().nan_to_num(posinf=0.0, neginf=0.0) for x in (a, b))
        error = torch.linalg.norm(a - b) / torch.linalg.norm(b)
        assert error <= 1.5e-2, f"{name}: {error:.1e}"


def operands(dim, dtype):
    return [torch.randn(BATCH, *size, dim).to(dtype) for size in ((SQ, HEADS), (SK, HEADS_K), (SK, HEADS_K))]


def check_step(dim, mask, bias, reach, features, dtype, device):
    make_mask, shape = MASKS[mask], BIASES[bias]
    leaves = dict(zip("qkv", operands(dim, dtype)))
    if shape:
        leaves["attn_bias"] = torch.randn(shape).to(dtype)
    if reach:
        leaves["rel_bias"] = torch.randn(HEADS, 2 * reach + 1)
    dout, dlse = torch.randn(BATCH, SQ, HEADS, dim), torch.randn(BATCH, HEADS, SQ)
    seen = make_mask and make_mask(BATCH, SQ, SK, "cpu")

    def run(place):
        given = {name: x.to(place).requires_grad_() for name, x in leaves.items()}
        named = {**given, **features, "mask": seen and seen.to(place)}
        out, lse, _ = flash_attn_func(**named, return_attn_probs=True)
        return out, lse, *torch.autograd.grad((out, lse), list(given.values()), (dout.to(out), dlse.to(lse)))

    compare(run(device), run("cpu"), ("out", "lse", *leaves))


def check_tangents(dim, features, dtype, device):
    primals_and_tangents = operands(dim, dtype) + operands(dim, dtype)
    ours, theirs = (flash_attn_jvp(*(x.to(p) for x in primals_and_tangents), **features) for p in (device, "cpu"))
    compare(ours, theirs, ("out", "lse", "t_out", "t_lse"))


def steps(device):
    """(name, forced family, check) of every case."""
    dtypes = itertools.cycle((torch.float16, torch.bfloat16))
    for family, call in itertools.product(("wgmma", "mma_sync"), CALLS):
        dim, mask, bias, reach, features = call
        told = f"{family}, mask {mask or 'none'}, bias {bias or reach or 'none'}, d{dim}"
        yield told, family, functools.partial(check_step, *call, next(dtypes), device)
    for family, (dim, features) in itertools.product(("wgmma", "mma_sync"), TANGENTS):
        told = f"{family}, tangents, d{dim}"
        yield told, family, functools.partial(check_tangents, dim, features, next(dtypes), device)
