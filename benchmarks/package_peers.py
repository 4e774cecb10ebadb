"""Attention of other packages, where they are installed, and the Triton comparator. Builders as in torch_peers.py."""

from __future__ import annotations

import importlib.metadata
import os
import sys

import torch
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


def cudnn_fp8(row, inputs):
    """cuDNN's forward of q, k and v quantised by tensor, by nvidia-cudnn-frontend; its result is e4m3 (Hopper)."""
    import cudnn

    from flash_attn.fp8 import quantize

    q, v = inputs.q, inputs.v
    values, descales = zip(*(quantize(x, "tensor") for x in (q, inputs.k, v)))
    e4m3, single = cudnn.data_type.FP8_E4M3, cudnn.data_type.FLOAT
    handle = cudnn.create_handle()
    graph = cudnn.pygraph(
        io_data_type=e4m3, intermediate_data_type=single, compute_data_type=single, handle=handle
    )  # fmt: skip
    matrices = [graph.tensor(dim=heads_first(x).shape, stride=heads_first(x).stride(), data_type=e4m3) for x in values]
    one = torch.ones(1, 1, 1, 1, device=q.device)
    scalars = [*(descale.reshape(1, 1, 1, 1) for descale in descales), one, one.clone(), one.clone()]
    named = [graph.tensor(dim=x.shape, stride=x.stride(), data_type=single) for x in scalars]
    result, _, amax_s, amax_o = graph.sdpa_fp8(
        *matrices, *named, generate_stats=False, attn_scale=q.shape[-1] ** -0.5, use_causal_mask=row.case.causal
    )
    out = torch.empty(*q.shape[:-1], v.shape[-1], device=q.device, dtype=values[0].dtype)
    shape, stride = heads_first(out).shape, heads_first(out).stride()
    result.set_output(True).set_dim(shape).set_stride(stride).set_data_type(e4m3)
    maxima = [torch.empty(1, 1, 1, 1, device=q.device) for _ in range(2)]
    for tensor, memory in zip((amax_s, amax_o), maxima):
        tensor.set_output(True).set_dim(memory.shape).set_stride(memory.stride()).set_data_type(single)
    graph.validate()
    graph.build_operation_graph()
    graph.create_execution_plans([cudnn.heur_mode.A, cudnn.heur_mode.FALLBACK])
    graph.check_support()
    graph.build_plans()
    workspace = torch.empty(max(graph.get_workspace_size(), 1), device=q.device, dtype=torch.uint8)
    operands = dict(zip((*matrices, *named, result, amax_s, amax_o), (*values, *scalars, out, *maxima)))

    def call():
        cudnn.set_stream(handle=handle, stream=torch.cuda.current_stream().cuda_stream)
        graph.execute(operands, workspace, handle=handle)
        return out

    return call


def heads_first(x):
    return x.transpose(1, 2)
