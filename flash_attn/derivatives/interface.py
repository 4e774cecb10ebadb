"""Attention together with its derivative in a given direction, as one function of explicit tangents."""

from __future__ import annotations

from torch import Tensor

from flash_attn._docstrings import documented
from flash_attn._types import WindowSize
from flash_attn.derivatives import rules
from flash_attn.eight_bit import EIGHT_BIT, named
from flash_attn.ops import arguments, normalize
from flash_attn.ops.attention_args import DENSE, PLAIN, TANGENT_INPUTS, Sequences, Tangents


@documented()
def flash_attn_jvp(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    tq: Tensor | None = None,
    tk: Tensor | None = None,
    tv: Tensor | None = None,
    *,
    cu_seqlens_q: Tensor | None = None,
    cu_seqlens_k: Tensor | None = None,
    max_seqlen_q: int | Tensor | None = None,
    max_seqlen_k: int | Tensor | None = None,
    dropout_p: float = 0.0,
    softmax_scale: float | None = None,
    causal: bool = False,
    window_size: WindowSize = (-1, -1),
    softcap: float = 0.0,
    alibi_slopes: Tensor | None = None,
    deterministic: bool = False,
    sinks: Tensor | None = None,
    tsinks: Tensor | None = None,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Attention and its derivative in the direction (tq, tk, tv, tsinks): torch.func.jvp of it, for compiled code too.

    Arguments:
        q: (batch, seqlen_q, nheads, head_dim), float16 or bfloat16, on the CPU also float32 and float64; packed
            (total_q, nheads, head_dim).
        k: (batch, seqlen_k, nheads_k, head_dim) of q's dtype; packed (total_k, nheads_k, head_dim).
        v: (batch, seqlen_k, nheads_k, head_dim_v) of q's dtype; packed (total_k, nheads_k, head_dim_v).
        tq, tk, tv: tangents of the shape and dtype of q, k and v, any strides; None is zero.

    Keyword arguments:
        cu_seqlens_q, cu_seqlens_k: int32 or int64 (batch + 1,), of packed sequences; None: a batch. They are read on
            the host.
        max_seqlen_q, max_seqlen_k: int or tensor of one element: upper bounds of the lengths, or None.
        <dropout>
            One mask for out and t_out.
        <scores>
        <alibi>
        <deterministic>
        sinks: (nheads,) float32 or half precision, a further logit in the softmax of every row, without a value.
        tsinks: tangent of sinks, like it, or None.

    Returns:
        out: (batch, seqlen_q, nheads, head_dim_v), packed (total_q, nheads, head_dim_v), contiguous.
        lse: (batch, nheads, seqlen_q), packed (nheads, total_q), float32 (float64 for float64 q), natural logarithm,
            +inf in a row that sees no key.
        t_out, t_lse: their derivatives, like them. 0 in a row that sees no key; with sinks its t_lse is the sink's.

    Gradients: of all four with respect to q, k, v, sinks and the tangents, once.
    <errors>
    """
    arguments.check_tensors(normalize.NAMES[2], (q, k, v))
    sequences = DENSE
    if cu_seqlens_q is not None or cu_seqlens_k is not None:
        most_q, most_k = (len(x) if most is None else most for x, most in ((q, max_seqlen_q), (k, max_seqlen_k)))
        sequences = Sequences(cu_seqlens_q, cu_seqlens_k, most_q, most_k)
    inputs = (q, k, v)
    try:
        for name, x in zip(TANGENT_INPUTS, inputs):
            if x.dtype in EIGHT_BIT:
                raise NotImplementedError(f"{name}: expected at least 16 bits with tangents, got {named(x.dtype)}")
        args = normalize.attention(
            inputs,
            sequences,
            dropout_p,
            softmax_scale,
            causal,
            window_size,
            softcap,
            alibi_slopes,
            deterministic,
            False,
            sinks,
            PLAIN,
        )
        given = zip(TANGENT_INPUTS, (*inputs, sinks), args.differentiable(), (tq, tk, tv, tsinks))
        directions = Tangents(*(_direction(*values) for values in given))
        out, lse, t_out, t_lse = rules.attention_with_tangents(args, directions)
    except (RuntimeError, TypeError) as error:
        arguments.rename(error, normalize.callers_names(inputs, sequences, PLAIN))
        raise
    if out.shape[-1] != v.shape[-1]:
        out, t_out = (x[..., : v.shape[-1]].contiguous() for x in (out, t_out))
    return out, lse, t_out, t_lse


def _direction(name: str, x: Tensor | None, used: Tensor | None, tangent: Tensor | None) -> Tensor | None:
    """The tangent of x, checked, in the dtype and with the padding of `used`, which the operators get for x."""
    if tangent is None:
        return None
    arguments.check_tensors((f"t{name}",), (tangent,))
    if x is None or used is None:
        raise RuntimeError(f"t{name}: expected None without {name}, got {arguments.shown(tangent)}")
    if tangent.shape != x.shape or tangent.dtype != x.dtype or tangent.device != x.device:
        expected = f"shape {list(x.shape)}, dtype {named(x.dtype)} and device {x.device}, those of {name}"
        raise RuntimeError(f"t{name}: expected {expected}, got {arguments.shown(tangent)} on {tangent.device}")
    return normalize.like(tangent, used)
