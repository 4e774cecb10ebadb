"""The Triton comparator: our FlashAttention-2 in Triton, forward and backward, one of the peers of run.py.

Algorithm: Dao 2023 (FlashAttention-2). Tiles come from short lists per head dim (triton_forward.py,
triton_backward.py) and are tuned once per kernel, head dim, mask and length class. Tensors are read through TMA tensor
descriptors where GPU and tensors allow it, else through pointers. Triton 3.3 or newer.
"""

from __future__ import annotations

import torch
from triton_backward import DKDV_TILES, DQ_TILES, backward_launches, row_terms
from triton_common import can_use_tma, chosen_tile, describable
from triton_forward import TILES, forward_launch
from triton_variants import Variant

LISTS = (TILES, DKDV_TILES, DQ_TILES)
COMPARATOR = Variant()


def candidates(variant, block_d):
    """The tiles to choose from, of the forward, of dK and dV and of dQ."""
    return variant.tiles or tuple(tiles[block_d] for tiles in LISTS)


class TritonAttention(torch.autograd.Function):
    @staticmethod
    def forward(ctx, q, k, v, causal, softmax_scale, variant):
        out = torch.empty_like(q, memory_format=torch.contiguous_format)
        lse = torch.empty(q.shape[0], q.shape[2], q.shape[1], dtype=torch.float32, device=q.device)
        ctx.causal, ctx.softmax_scale, ctx.variant = causal, softmax_scale, variant
        ctx.save_for_backward(q, k, v, out, lse)
        ctx.mark_non_differentiable(lse)
        ctx.set_materialize_grads(False)  # no zeros for the LSE
        if q.numel() == 0 or k.numel() == 0:
            return out.zero_(), lse.fill_(float("inf"))
        use_tma = can_use_tma(q, k, v) if variant.use_tma is None else variant.use_tma
        launch = forward_launch(q, k, v, out, lse, causal, softmax_scale, use_tma)
        launch.run(chosen_tile(launch, candidates(variant, launch.block_d)[0]))
        return out, lse

    @staticmethod
    def backward(ctx, dout, _):
        q, k, v, out, lse = ctx.saved_tensors
        variant = ctx.variant
        gradients = [torch.empty_like(x, memory_format=torch.contiguous_format) for x in (q, k, v)]
        if q.numel() == 0 or k.numel() == 0:
            return *(gradient.zero_() for gradient in gradients), None, None, None
        dout = dout if dout.stride(-1) == 1 else dout.contiguous()
        use_tma = can_use_tma(q, k, v, dout) if variant.use_tma is None else variant.use_tma and describable(dout)
        terms = row_terms(out, dout, lse) if variant.shared_delta else (lse, out)
        launches = backward_launches(
            q, k, v, dout, terms, gradients, ctx.causal, ctx.softmax_scale, use_tma, **variant.backward_constants
        )
        for launch, tiles in zip(launches, candidates(variant, launches[0].block_d)[1:]):
            launch.run(chosen_tile(launch, tiles))
        return *gradients, None, None, None


def triton_attention(q, k, v, causal=False, softmax_scale=None, variant=COMPARATOR):
    """softmax(scale q k^T) v with bottom-right causal masking; differentiable in q, k and v.

    q (b, sq, h, d), k and v (b, sk, h_k, d) with h divisible by h_k, d at most 256 and a contiguous last dimension;
    float16 or bfloat16 on CUDA (CPU tensors under Triton's interpreter). softmax_scale: 1/sqrt(d) by default.
    variant: another way to the same result (triton_variants.py). Returns out (b, sq, h, d) and lse fp32 (b, h, sq),
    natural logarithm and without a gradient; a row that sees no key has out 0 and lse +inf. ValueError for tensors it
    cannot take.
    """
    if q.dtype not in (torch.float16, torch.bfloat16):
        raise ValueError(f"q: expected dtype float16 or bfloat16, got {q.dtype}")
    if q.shape[-1] > 256 or any(x.stride(-1) != 1 for x in (q, k, v)):
        raise ValueError(f"q, k, v: expected a contiguous head dim of at most 256, got {q.shape[-1]}")
    scale = q.shape[-1] ** -0.5 if softmax_scale is None else softmax_scale
    return TritonAttention.apply(q, k, v, causal, scale, variant)
