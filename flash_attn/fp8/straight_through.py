"""Training through 8-bit attention: quantised inside, gradients passed straight through the rounding.

The forward is attention of the e4m3 values; the backward that of the same values in 16 bits, whose gradients count as
those of the inputs. Descales are powers of two, so that both see the same numbers. Saved are 8-bit tensors, the output
and the LSE.
"""

from __future__ import annotations

from typing import Any, cast

import torch
from torch import Tensor

from flash_attn import eight_bit
from flash_attn._docstrings import documented
from flash_attn._types import Context, TensorOrTuple, WindowSize
from flash_attn.batch_invariance import is_batch_invariant
from flash_attn.fp8.quantization import quantize
from flash_attn.ops import arguments, context, library
from flash_attn.ops.attention_args import (
    BACKWARD_OPTIONS,
    DENSE,
    AttentionArgs,
    AttentionBackwardArgs,
    Sequences,
)
from flash_attn.ops.triton.dispatch import once_differentiable

_NAMES = ("q", "k", "v")
# The arguments of the forward that the backward needs, by name alone, which torch.compile traces.
_TENSORS = (*_NAMES, "cu_seqlens_q", "cu_seqlens_k", "alibi_slopes", "sinks")


@documented()
def flash_attn_straight_through_func(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    softmax_scale: float | None = None,
    causal: bool = False,
    window_size: WindowSize = (-1, -1),
    softcap: float = 0.0,
    alibi_slopes: Tensor | None = None,
    deterministic: bool = False,
    return_attn_probs: bool = False,
    *,
    sinks: Tensor | None = None,
) -> TensorOrTuple:
    """Exact attention of q, k and v rounded to e4m3, with gradients as if they had not been rounded.

    They are quantised with a descale for each batch entry and head, a power of two; the tensors saved for the backward
    have 8 bits, but for out and the LSE.

    Arguments:
        q: (batch, seqlen_q, nheads, head_dim), float16 or bfloat16.
        k: (batch, seqlen_k, nheads_k, head_dim) of q's dtype. Query head i reads K/V head i // (nheads / nheads_k).
        v: (batch, seqlen_k, nheads_k, head_dim_v) of q's dtype. Head dims up to 512.
        <straight_through>

    Returns:
        out: (batch, seqlen_q, nheads, head_dim_v) of q's dtype; with return_attn_probs (out, softmax_lse).
        softmax_lse: (batch, nheads, seqlen_q) float32, natural logarithm, differentiable; +inf in a row that sees no
            key, whose out is 0.

    There is no dropout.
    <errors>
    """
    options = softmax_scale, causal, window_size, softcap, alibi_slopes, deterministic, return_attn_probs, sinks
    return _attend(q, k, v, DENSE, *options)


@documented()
def flash_attn_varlen_straight_through_func(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    cu_seqlens_q: Tensor,
    cu_seqlens_k: Tensor,
    max_seqlen_q: int | Tensor,
    max_seqlen_k: int | Tensor,
    softmax_scale: float | None = None,
    causal: bool = False,
    window_size: WindowSize = (-1, -1),
    softcap: float = 0.0,
    alibi_slopes: Tensor | None = None,
    deterministic: bool = False,
    return_attn_probs: bool = False,
    *,
    sinks: Tensor | None = None,
) -> TensorOrTuple:
    """Exact attention of packed q, k and v rounded to e4m3, with gradients as if they had not been rounded.

    They are quantised with a descale for each head of all sequences, a power of two; the tensors saved for the backward
    have 8 bits, but for out and the LSE.

    Arguments:
        q: (total_q, nheads, head_dim), float16 or bfloat16.
        k: (total_k, nheads_k, head_dim) of q's dtype. Query head i reads K/V head i // (nheads / nheads_k).
        v: (total_k, nheads_k, head_dim_v) of q's dtype. Head dims up to 512.
        cu_seqlens_q: int32 or int64 (batch + 1,). Sequence i has the rows cu_seqlens_q[i] to cu_seqlens_q[i + 1] of q.
        cu_seqlens_k: int32 or int64 (batch + 1,), the same for k and v.
        max_seqlen_q, max_seqlen_k: int, or integer tensor of one element: upper bounds of the lengths.
        <straight_through>

    Returns:
        out: (total_q, nheads, head_dim_v) of q's dtype; with return_attn_probs (out, softmax_lse).
        softmax_lse: (nheads, total_q) float32, natural logarithm, differentiable; +inf in a row that sees no key, whose
            out is 0.

    There is no dropout.
    <errors>
    """
    sequences = Sequences(cu_seqlens_q, cu_seqlens_k, max_seqlen_q, max_seqlen_k)
    options = softmax_scale, causal, window_size, softcap, alibi_slopes, deterministic, return_attn_probs, sinks
    return _attend(q, k, v, sequences, *options)


def _attend(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    sequences: Sequences,
    softmax_scale: float | None,
    causal: bool,
    window_size: WindowSize,
    softcap: float,
    alibi_slopes: Tensor | None,
    deterministic: bool,
    return_attn_probs: bool,
    sinks: Tensor | None,
) -> TensorOrTuple:
    arguments.check_tensors(_NAMES, (q, k, v))
    context.reject_transforms(f"flash_attn{'' if sequences is DENSE else '_varlen'}_straight_through_func")
    context.reject_tangents(_NAMES, (q, k, v))
    varlen = sequences is not DENSE
    for name, x in zip(_NAMES, (q, k, v)):
        if x.dtype not in (torch.float16, torch.bfloat16) or x.dtype != q.dtype:
            expected = "dtype float16 or bfloat16" if name == "q" else f"the dtype of q ({eight_bit.named(q.dtype)})"
            raise RuntimeError(f"{name}: expected {expected}, got {eight_bit.named(x.dtype)}")
        if x.dim() != (3 if varlen else 4):
            raise RuntimeError(f"{name}: expected {3 if varlen else 4} dimensions, got {x.dim()}")
    return_attn_probs = arguments.flag("return_attn_probs", return_attn_probs)
    max_seqlens = (0, 0)
    if varlen:
        arguments.check_sequences(sequences)
        max_seqlens = arguments.max_seqlens((q, k, v), sequences, False)
    head_dim, value_dim = arguments.head_dim("q", q), arguments.head_dim("v", v)
    scale = arguments.scale(softmax_scale, head_dim)
    arguments.check_constant("alibi_slopes", alibi_slopes)
    sinks = None if sinks is None else arguments.sinks(sinks)
    if q.is_cuda:
        q, k, v = arguments.padded((q, k, v), head_dim)
    left, right = arguments.window(window_size)
    args = AttentionArgs(
        q=cast(Tensor, None),  # the forward adds q, k and v
        k=None,
        v=None,
        cu_seqlens_q=sequences.cu_seqlens_q,
        cu_seqlens_k=sequences.cu_seqlens_k,
        seqused_k=None,
        leftpad_k=None,
        block_table=None,
        alibi_slopes=alibi_slopes,
        sinks=None,
        max_seqlen_q=max_seqlens[0],
        max_seqlen_k=max_seqlens[1],
        dropout_p=0.0,
        softmax_scale=scale,
        causal=arguments.flag("causal", causal),
        window_left=left,
        window_right=right,
        softcap=arguments.number("softcap", softcap),
        deterministic=arguments.flag("deterministic", deterministic),
        return_softmax=False,
        return_max_logit=False,
        batch_invariant=is_batch_invariant(),
        out_dtype=q.dtype,
    )
    out, lse = _StraightThrough.apply(args, q, k, v, sinks)
    if out.shape[-1] != value_dim:
        out = out[..., :value_dim].contiguous()
    return (out, lse) if return_attn_probs else out


class _Context(Context):
    options: dict[str, Any]  # by name


class _StraightThrough(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: _Context, args: AttentionArgs, q: Tensor, k: Tensor, v: Tensor, sinks: Tensor | None
    ) -> tuple[Tensor, Tensor]:
        """args: all but these tensors."""
        quantized, descales = zip(*(quantize(x, "head", power_of_two=True) for x in (q, k, v)))
        args = args._replace(sinks=sinks, **dict(zip(_NAMES, quantized)))
        out, lse, _, rng_state, *_ = library.attention(
            args._replace(**{f"{name}_descale": descale for name, descale in zip(_NAMES, descales)})
        )
        ctx.options = {name: getattr(args, name) for name in BACKWARD_OPTIONS}
        ctx.save_for_backward(
            *descales, out, lse, rng_state, *(context.savable(getattr(args, name)) for name in _TENSORS)
        )
        ctx.set_materialize_grads(False)
        return out, lse

    @staticmethod
    @once_differentiable("flash_attn_straight_through_func")
    def backward(ctx: _Context, dout: Tensor | None, dlse: Tensor | None) -> tuple[Tensor | None, ...]:
        if dout is None and dlse is None:
            return (None,) * 5
        q_descale, k_descale, v_descale, out, lse, rng_state, *tensors = ctx.saved_tensors
        saved: dict[str, Any] = dict(zip(_TENSORS, tensors), out=out, lse=lse, rng_state=rng_state)
        for name, descale in zip(_NAMES, (q_descale, k_descale, v_descale)):
            x = saved[name]
            saved[name] = eight_bit.decode(x, descale.unsqueeze(-1).unsqueeze(x.dim() - 3), out.dtype)
        dout = torch.zeros_like(out) if dout is None else dout
        dq, dk, dv, *dsinks = library.attention_backward(AttentionBackwardArgs(dout, dlse, **saved, **ctx.options))
        return None, dq, dk, dv, dsinks[0] if dsinks else None
