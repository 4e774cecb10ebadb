"""Attention of other packages, where they are installed, and the Triton comparator. Builders as in torch_peers.py."""

from __future__ import annotations

import sys

import torch
from rows import windows
from shared import ROOT

FLASHINFER_WORKSPACE_BYTES = 256 * 2**20


def first(result):
    return result[0] if isinstance(result, (tuple, list)) else result


def triton_comparator(row, inputs):
    sys.path.append(str(ROOT / "benchmarks" / "lab"))
    from triton_attention import triton_attention

    q, k, v, causal = inputs.q, inputs.k, inputs.v, row.case.causal
    return lambda: triton_attention(q, k, v, causal=causal)[0]


def flash_attn_3(row, inputs):
    """FlashAttention-3 by its own interface, the top-level module flash_attn_interface."""
    import flash_attn_interface as fa3

    case, q, k, v, cu = row.case, inputs.q, inputs.k, inputs.v, inputs.cu_seqlens
    options = {"causal": case.causal, "window_size": case.window, "softcap": case.softcap}
    if row.seqlens:
        longest = max(row.seqlens)
        return lambda: first(fa3.flash_attn_varlen_func(q, k, v, cu, cu, longest, longest, **options))
    return lambda: first(fa3.flash_attn_func(q, k, v, **options))


def flashinfer_prefill(row, inputs):
    """FlashInfer's ragged prefill; its plan is made once, outside of the timed call."""
    import flashinfer

    case, device = row.case, inputs.q.device

    def starts(count, length):
        return torch.arange(0, (count + 1) * length, length, dtype=torch.int32, device=device)

    cu_q = inputs.cu_seqlens if row.seqlens else starts(case.batch, case.seqlen_q)
    cu_k = inputs.cu_seqlens if row.seqlens else starts(case.batch, case.seqlen_k)
    workspace = torch.empty(FLASHINFER_WORKSPACE_BYTES, dtype=torch.uint8, device=device)
    wrapper = flashinfer.BatchPrefillWithRaggedKVCacheWrapper(workspace, "NHD")
    wrapper.plan(
        cu_q, cu_k, case.nheads, case.nheads_k, case.head_dim, causal=case.causal, window_left=windows(case)[0],
        logits_soft_cap=case.softcap or None, q_data_type=inputs.q.dtype, kv_data_type=inputs.k.dtype,
    )  # fmt: skip
    q, k, v = (x.reshape(-1, *x.shape[-2:]) for x in (inputs.q, inputs.k, inputs.v))
    return lambda: wrapper.run(q, k, v).view(inputs.q.shape)


def flashinfer_limits(row, device_type, mode):
    return "right windows are not offered" if row.case.window[1] > 0 else None


def xformers_attention(row, inputs):
    from xformers.ops import memory_efficient_attention
    from xformers.ops.fmha.attn_bias import BlockDiagonalMask, LowerTriangularMask

    case = row.case
    packed = bool(row.seqlens)
    bias = LowerTriangularMask() if case.causal else None
    if packed:
        bias = BlockDiagonalMask.from_seqlens(list(row.seqlens))
        bias = bias.make_causal() if case.causal else bias
    q, k, v = (x.unsqueeze(0) if packed else x for x in (inputs.q, inputs.k, inputs.v))

    def call():
        out = memory_efficient_attention(q, k, v, attn_bias=bias, p=case.dropout)
        return out.squeeze(0) if packed else out

    return call


def cudnn_fp8(row, inputs):
    """cuDNN's forward of q, k and v quantised by tensor, by nvidia-cudnn-frontend; its result is bf16."""
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
    out = torch.empty(*q.shape[:-1], v.shape[-1], device=q.device, dtype=torch.bfloat16)
    shape, stride = heads_first(out).shape, heads_first(out).stride()
    result.set_output(True).set_dim(shape).set_stride(stride).set_data_type(cudnn.data_type.BFLOAT16)
    maxima = [torch.empty(1, 1, 1, 1, device=q.device) for _ in range(2)]
    for tensor, memory in zip((amax_s, amax_o), maxima):
        tensor.set_output(True).set_dim(memory.shape).set_stride(memory.stride()).set_data_type(single)
    graph.validate()
    graph.build_operation_graph()
    graph.create_execution_plans([cudnn.heur_mode.A, cudnn.heur_mode.FALLBACK])
    graph.check_support()
    graph.build_plans()
    workspace = torch.empty(graph.get_workspace_size(), device=q.device, dtype=torch.uint8)
    operands = dict(zip((*matrices, *named, result, amax_s, amax_o), (*values, *scalars, out, *maxima)))

    def call():
        cudnn.set_stream(handle=handle, stream=torch.cuda.current_stream().cuda_stream)
        graph.execute(operands, workspace, handle=handle)
        return out

    return call


def heads_first(x):
    return x.transpose(1, 2)
