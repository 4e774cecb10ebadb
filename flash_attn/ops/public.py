"""The operators `flash_attn::_flash_attn_*`, which distributed-attention clients call directly.

They are not differentiable, need a contiguous head dim and no padding, and follow the FlashAttention-2 names;
batch-invariant where `set_batch_invariant` says so.
Annotations stay objects (no postponed evaluation): torch.library infers the schemas from them.
"""

from typing import Any, Optional

import torch
from torch import Tensor

from flash_attn.batch_invariance import is_batch_invariant
from flash_attn.ops import calls, context
from flash_attn.ops.attention_args import DENSE, AttentionArgs, AttentionBackwardArgs, Sequences

_NAMESPACE = "flash_attn"


def _forward_args(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    sequences: Sequences,
    dropout_p: float,
    softmax_scale: float,
    causal: bool,
    window_left: int,
    window_right: int,
    softcap: float,
    alibi_slopes: Optional[Tensor],
    return_softmax: bool,
) -> AttentionArgs:
    return AttentionArgs(
        q=q, k=k, v=v, cu_seqlens_q=sequences.cu_seqlens_q, cu_seqlens_k=sequences.cu_seqlens_k,
        seqused_k=sequences.seqused_k, leftpad_k=sequences.leftpad_k, block_table=sequences.block_table,
        alibi_slopes=alibi_slopes, sinks=None,
        max_seqlen_q=sequences.max_seqlen_q, max_seqlen_k=sequences.max_seqlen_k,  # type: ignore[arg-type]
        dropout_p=dropout_p, softmax_scale=softmax_scale, causal=causal,
        window_left=window_left, window_right=window_right, softcap=softcap, deterministic=False,
        return_softmax=return_softmax, return_max_logit=False, batch_invariant=is_batch_invariant(),
    )  # fmt: skip


def _backward_args(
    dout: Tensor,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    out: Tensor,
    lse: Tensor,
    sequences: Sequences,
    dropout_p: float,
    softmax_scale: float,
    causal: bool,
    window_left: int,
    window_right: int,
    softcap: float,
    alibi_slopes: Optional[Tensor],
    deterministic: bool,
    rng_state: Optional[Tensor],
) -> AttentionBackwardArgs:
    # mypy sees no defaults in this record; the operators have ints as lengths, and need a state with dropout alone
    return AttentionBackwardArgs(  # type: ignore[call-arg]
        dout=dout, dlse=None, q=q, k=k, v=v, out=out, lse=lse, rng_state=rng_state,  # type: ignore[arg-type]
        cu_seqlens_q=sequences.cu_seqlens_q, cu_seqlens_k=sequences.cu_seqlens_k, alibi_slopes=alibi_slopes,
        sinks=None, dropout_p=dropout_p,
        max_seqlen_q=sequences.max_seqlen_q, max_seqlen_k=sequences.max_seqlen_k,  # type: ignore[arg-type]
        softmax_scale=softmax_scale, causal=causal, window_left=window_left, window_right=window_right,
        softcap=softcap, deterministic=deterministic, batch_invariant=is_batch_invariant(),
    )  # fmt: skip


@torch.library.custom_op(f"{_NAMESPACE}::_flash_attn_forward", mutates_args=())
def _flash_attn_forward(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    dropout_p: float,
    softmax_scale: float,
    causal: bool,
    window_size_left: int,
    window_size_right: int,
    softcap: float,
    alibi_slopes: Optional[Tensor],
    return_softmax: bool,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Dense forward -> (out, lse (b, h, sq), S_dmask, rng_state int64 (2,)). Shapes as in `flash_attn_func`."""
    context.reject_forward_mode("_flash_attn_forward")
    args = _forward_args(
        q, k, v, DENSE, dropout_p, softmax_scale, causal, window_size_left, window_size_right, softcap, alibi_slopes,
        return_softmax,
    )  # fmt: skip
    out, lse, dmask, state = calls.forward(args)
    return out, lse, dmask, state


@_flash_attn_forward.register_fake
def _(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    dropout_p: float,
    softmax_scale: float,
    causal: bool,
    window_size_left: int,
    window_size_right: int,
    softcap: float,
    alibi_slopes: Optional[Tensor],
    return_softmax: bool,
) -> tuple[Tensor, ...]:
    return calls.forward_fake(
        _forward_args(
            q, k, v, DENSE, dropout_p, softmax_scale, causal, window_size_left, window_size_right, softcap,
            alibi_slopes, return_softmax,
        )
    )  # fmt: skip


@torch.library.custom_op(f"{_NAMESPACE}::_flash_attn_varlen_forward", mutates_args=())
def _flash_attn_varlen_forward(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    cu_seqlens_q: Tensor,
    cu_seqlens_k: Tensor,
    max_seqlen_q: int,
    max_seqlen_k: int,
    dropout_p: float,
    softmax_scale: float,
    causal: bool,
    window_size_left: int = -1,
    window_size_right: int = -1,
    softcap: float = 0.0,
    alibi_slopes: Optional[Tensor] = None,
    return_softmax: bool = False,
    block_table: Optional[Tensor] = None,
    leftpad_k: Optional[Tensor] = None,
    seqused_k: Optional[Tensor] = None,
    zero_tensors: bool = False,
    num_splits: int = 0,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Varlen forward -> (out, lse (h, total_q), S_dmask, rng_state int64 (2,)). Shapes as in `flash_attn_varlen_func`.

    zero_tensors and num_splits are accepted for compatibility: every output row is written in any case, and the
    number of splits does not change the result.
    """
    context.reject_forward_mode("_flash_attn_varlen_forward")
    sequences = Sequences(
        cu_seqlens_q, cu_seqlens_k, max_seqlen_q, max_seqlen_k, seqused_k, leftpad_k, block_table
    )  # fmt: skip
    args = _forward_args(
        q, k, v, sequences, dropout_p, softmax_scale, causal, window_size_left, window_size_right, softcap,
        alibi_slopes, return_softmax,
    )  # fmt: skip
    out, lse, dmask, state = calls.forward(args)
    return out, lse, dmask, state


@_flash_attn_varlen_forward.register_fake
def _(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    cu_seqlens_q: Tensor,
    cu_seqlens_k: Tensor,
    max_seqlen_q: int,
    max_seqlen_k: int,
    dropout_p: float,
    softmax_scale: float,
    causal: bool,
    window_size_left: int = -1,
    window_size_right: int = -1,
    softcap: float = 0.0,
    alibi_slopes: Optional[Tensor] = None,
    return_softmax: bool = False,
    block_table: Optional[Tensor] = None,
    leftpad_k: Optional[Tensor] = None,
    seqused_k: Optional[Tensor] = None,
    zero_tensors: bool = False,
    num_splits: int = 0,
) -> tuple[Tensor, ...]:
    sequences = Sequences(
        cu_seqlens_q, cu_seqlens_k, max_seqlen_q, max_seqlen_k, seqused_k, leftpad_k, block_table
    )  # fmt: skip
    return calls.forward_fake(
        _forward_args(
            q, k, v, sequences, dropout_p, softmax_scale, causal, window_size_left, window_size_right, softcap,
            alibi_slopes, return_softmax,
        )
    )  # fmt: skip


@torch.library.custom_op(f"{_NAMESPACE}::_flash_attn_backward", mutates_args=("dq", "dk", "dv"))
def _flash_attn_backward(
    dout: Tensor,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    out: Tensor,
    softmax_lse: Tensor,
    dq: Optional[Tensor],
    dk: Optional[Tensor],
    dv: Optional[Tensor],
    dropout_p: float,
    softmax_scale: float,
    causal: bool,
    window_size_left: int,
    window_size_right: int,
    softcap: float,
    alibi_slopes: Optional[Tensor],
    deterministic: bool,
    rng_state: Optional[Tensor] = None,
) -> Tensor:
    """Dense backward into the given dq, dk, dv, of any strides -> softmax_d (b, h, round_up(sq, 128))."""
    context.reject_forward_mode("_flash_attn_backward")
    args = _backward_args(
        dout, q, k, v, out, softmax_lse, DENSE, dropout_p, softmax_scale, causal, window_size_left,
        window_size_right, softcap, alibi_slopes, deterministic, rng_state,
    )  # fmt: skip
    return calls.backward_into(args, dq, dk, dv)


@_flash_attn_backward.register_fake
def _(dout: Tensor, q: Tensor, *rest: Any, **options: Any) -> Tensor:
    return calls.softmax_d_fake(q, None)


@torch.library.custom_op(f"{_NAMESPACE}::_flash_attn_varlen_backward", mutates_args=("dq", "dk", "dv"))
def _flash_attn_varlen_backward(
    dout: Tensor,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    out: Tensor,
    softmax_lse: Tensor,
    dq: Optional[Tensor],
    dk: Optional[Tensor],
    dv: Optional[Tensor],
    cu_seqlens_q: Tensor,
    cu_seqlens_k: Tensor,
    max_seqlen_q: int,
    max_seqlen_k: int,
    dropout_p: float,
    softmax_scale: float,
    causal: bool,
    window_size_left: int,
    window_size_right: int,
    softcap: float,
    alibi_slopes: Optional[Tensor],
    deterministic: bool,
    rng_state: Optional[Tensor] = None,
    zero_tensors: bool = False,
) -> Tensor:
    """Varlen backward into the given dq, dk, dv, of any strides -> softmax_d (h, total_q + 128 b).

    zero_tensors is accepted for compatibility: rows that belong to no sequence are written as 0 in any case.
    """
    context.reject_forward_mode("_flash_attn_varlen_backward")
    sequences = Sequences(cu_seqlens_q, cu_seqlens_k, max_seqlen_q, max_seqlen_k)
    args = _backward_args(
        dout, q, k, v, out, softmax_lse, sequences, dropout_p, softmax_scale, causal, window_size_left,
        window_size_right, softcap, alibi_slopes, deterministic, rng_state,
    )  # fmt: skip
    return calls.backward_into(args, dq, dk, dv)


@_flash_attn_varlen_backward.register_fake
def _(
    dout: Tensor,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    out: Tensor,
    softmax_lse: Tensor,
    dq: Optional[Tensor],
    dk: Optional[Tensor],
    dv: Optional[Tensor],
    cu_seqlens_q: Tensor,
    *rest: Any,
    **options: Any,
) -> Tensor:
    return calls.softmax_d_fake(q, cu_seqlens_q)
