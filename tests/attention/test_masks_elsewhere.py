"""Calls that refuse some of mask, attn_bias, rel_bias and mask_bits: over caches, across ranks, with 8 bits."""

from __future__ import annotations

import flash_attn_3_harness  # noqa: F401  # has flash_attn_interface
import pytest
import torch
from fp8_harness import E4M3, relative_rmse

import flash_attn
import flash_attn_interface
from flash_attn import backends, context_parallel, flash_attn_func, fp8
from flash_attn.integrations import sglang, vllm
from flash_attn.masks import AttentionMask
from flash_attn.masks.factors import pack_bits

NAMES = ("mask", "attn_bias", "rel_bias")
FUNCTIONS = {
    flash_attn.flash_attn_with_kvcache: NAMES,
    context_parallel.flash_attn_cp_func: (*NAMES, "mask_bits"),
    context_parallel.flash_attn_cp_kvcache: (*NAMES, "mask_bits"),
    fp8.flash_attn_straight_through_func: NAMES,
    fp8.flash_attn_varlen_straight_through_func: NAMES,
    flash_attn.flash_attn_jvp: NAMES,
    flash_attn_func: ("mask_bits",),
    flash_attn.flash_attn_varlen_func: ("mask_bits",),
    flash_attn_interface.flash_attn_func: NAMES,
    flash_attn_interface.flash_attn_varlen_func: NAMES,
    flash_attn_interface.flash_attn_with_kvcache: (*NAMES, "mask_bits"),
    sglang.flash_attn_with_kvcache: ("mask", "attn_bias", "mask_bits"),
    vllm.flash_attn_varlen_func: (*NAMES, "mask_bits"),
}


@pytest.mark.parametrize("function", FUNCTIONS, ids=lambda f: f"{f.__module__}.{f.__name__}")
def test_functions_that_take_none(function):
    """Python names the argument, before it counts those that are missing."""
    for name in FUNCTIONS[function]:
        with pytest.raises(TypeError, match=f"unexpected keyword argument '{name}'"):
            function(**{name: torch.ones(1)})


@pytest.mark.parametrize("name", NAMES)
def test_backends_over_a_cache(device, name):
    q = torch.zeros(1, 1, 2, 64, device=device, dtype=torch.bfloat16)
    mask = AttentionMask.key_padding(torch.ones(1, dtype=torch.bool, device=device)).factors
    given = {"mask": mask, "attn_bias": torch.zeros(1, 1, 1, 1, device=device),
             "rel_bias": torch.zeros(2, 3, device=device)}[name]  # fmt: skip
    arguments = (q, q.clone(), q.clone(), *[None] * 10, 0.125, False, -1, -1, 0.0, True, 0)
    with pytest.raises(RuntimeError, match=f"^{name}: expected None"):
        backends.of(q).fwd_kvcache(*arguments, **{name: given})


@pytest.mark.parametrize("name", NAMES)
def test_eight_bits(device, name):
    """The CPU takes them; CUDA names the tensors that it has no kernels for with a mask or a bias."""
    q, k, v = (torch.randn(2, 30, 4, 64, device=device).to(E4M3) for _ in "qkv")
    value = {"mask": torch.rand(2, 1, 30, 30, device=device) < 0.7, "attn_bias": torch.randn(4, 30, 30, device=device),
             "rel_bias": torch.randn(4, 9, device=device)}[name]  # fmt: skip
    scales = {"q_descale": 0.5, "k_descale": 0.5, "v_descale": 2.0, "out_dtype": torch.bfloat16}
    if device == "cuda":
        with pytest.raises((RuntimeError, NotImplementedError), match="^[qk]: expected (dtype )?float16"):
            flash_attn_func(q, k, v, **scales, **{name: value})
        return
    out = flash_attn_func(q, k, v, **scales, **{name: value})
    wide = (q.float() * 0.5, k.float() * 0.5, v.float() * 2.0)
    assert relative_rmse(out, flash_attn_func(*wide, **{name: value})) < 4e-3


def test_mask_bits_with_qv(device):
    """The CPU takes both together; CUDA refuses the call by the name of qv."""
    q, qv = (torch.randn(1, 3, 16, d, device=device).bfloat16() for d in (64, 512))
    caches = [torch.randn(4, 16, 1, d, device=device).bfloat16() for d in (64, 512)]
    table = torch.tensor([[2, 0, 1]], dtype=torch.int32, device=device)
    mask = torch.tril(torch.ones(1, 3, 3, dtype=torch.bool, device=device))

    def call(**options):
        return flash_attn.flash_attn_with_kvcache(
            q, *caches, cache_seqlens=40, block_table=table, qv=qv, mask_bits=pack_bits(mask), **options
        )

    if device == "cuda":
        with pytest.raises(
            NotImplementedError, match="^qv: expected None on cuda, got a tensor: kernels have no mask_bits"
        ):
            call()
        return
    expected = flash_attn.flash_attn_with_kvcache(q, *caches, cache_seqlens=40, block_table=table, qv=qv, causal=True)
    assert torch.equal(call(), expected)
