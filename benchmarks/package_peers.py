"""Attention of other packages, where they are installed, and the Triton comparator. Builders as in torch_peers.py."""

from __future__ import annotations

import importlib.metadata
import os
import sys

from shared import ROOT


def first(result):
    return result[0] if isinstance(result, (tuple, list)) else result


def triton_comparator(row, inputs):
    sys.path.append(str(ROOT / "benchmarks" / "lab"))
    from triton_attention import triton_attention

    q, k, v, causal = inputs.q, inputs.k, inputs.v, row.case.causal
    return lambda: triton_attention(q, k, v, causal=causal)[0]


def flash_attn_3(row, inputs, pick=first, **more):
    """FlashAttention-3 by its own interface, the top-level module flash_attn_interface."""
    import flash_attn_interface as fa3

    case, q, k, v, cu = row.case, inputs.q, inputs.k, inputs.v, inputs.cu_seqlens
    options = {"causal": case.causal, "window_size": case.window, "softcap": case.softcap, **more}
    if row.seqlens:
        longest = max(row.seqlens)
        return lambda: pick(fa3.flash_attn_varlen_func(q, k, v, cu, cu, longest, longest, **options))
    return lambda: pick(fa3.flash_attn_func(q, k, v, **options))


def flash_attn_4_functions():
    """The module flash_attn.cute of the distribution flash-attn-4.

    It is a part of this package's name, which is extended by its folder in this process only.
    """
    import flash_attn

    folder = str(importlib.metadata.distribution("flash-attn-4").locate_file("flash_attn"))
    if folder not in flash_attn.__path__:
        flash_attn.__path__.append(folder)
    os.environ.setdefault("FLASH_ATTENTION_CUTE_DSL_CACHE_ENABLED", "1")  # what it compiles is there in the next run
    import flash_attn.cute

    return flash_attn.cute


def flash_attn_4(row, inputs, pick=first, **more):
    """FlashAttention-4, which compiles a kernel in its first call of a kind."""
    fa4, case, q, k, v, cu = flash_attn_4_functions(), row.case, inputs.q, inputs.k, inputs.v, inputs.cu_seqlens
    window = tuple(None if bound < 0 else bound for bound in case.window)
    options = {"causal": case.causal, "window_size": window, "softcap": case.softcap, **more}
    if row.seqlens:
        options.update(cu_seqlens_q=cu, cu_seqlens_k=cu, max_seqlen_q=max(row.seqlens), max_seqlen_k=max(row.seqlens))
        return lambda: pick(fa4.flash_attn_varlen_func(q, k, v, **options))
    return lambda: pick(fa4.flash_attn_func(q, k, v, **options))
