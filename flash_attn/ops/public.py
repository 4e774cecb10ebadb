"""The operators `flash_attn::_flash_attn_*`, which distributed-attention clients call directly.

They are not differentiable, need a contiguous head dim and no padding, and follow the FlashAttention-2 names;
batch-invariant where `set_batch_invariant` says so.
Annotations stay objects (no postponed evaluation): torch.library infers the schemas from them.
"""

from typing import Optional

import torch
from torch import Tensor

from flash_attn.batch_invariance import is_batch_invariant
from flash_attn.ops import calls, context

_NAMESPACE = "flash_attn"


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
    context.refuse_forward_mode("_flash_attn_forward")
    return calls.forward(
        q, k, v, None, None, None, None, None, alibi_slopes, None, 0, 0, dropout_p, softmax_scale, causal,
        window_size_left, window_size_right, softcap, False, return_softmax, False, is_batch_invariant(),
    )  # fmt: skip


@_flash_attn_forward.register_fake
def _(
    q, k, v, dropout_p, softmax_scale, causal, window_size_left, window_size_right, softcap, alibi_slopes,
    return_softmax,
):  # fmt: skip
    return calls.forward_fake(
        q, k, v, None, None, None, None, None, alibi_slopes, None, 0, 0, dropout_p, softmax_scale, causal,
        window_size_left, window_size_right, softcap, False, return_softmax, False,
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
    context.refuse_forward_mode("_flash_attn_varlen_forward")
    return calls.forward(
        q, k, v, cu_seqlens_q, cu_seqlens_k, seqused_k, leftpad_k, block_table, alibi_slopes, None, max_seqlen_q,
        max_seqlen_k, dropout_p, softmax_scale, causal, window_size_left, window_size_right, softcap, False,
        return_softmax, False, is_batch_invariant(),
    )  # fmt: skip


@_flash_attn_varlen_forward.register_fake
def _(
    q, k, v, cu_seqlens_q, cu_seqlens_k, max_seqlen_q, max_seqlen_k, dropout_p, softmax_scale, causal,
    window_size_left=-1, window_size_right=-1, softcap=0.0, alibi_slopes=None, return_softmax=False, block_table=None,
    leftpad_k=None, seqused_k=None, zero_tensors=False, num_splits=0,
):  # fmt: skip
    return calls.forward_fake(
        q, k, v, cu_seqlens_q, cu_seqlens_k, seqused_k, leftpad_k, block_table, alibi_slopes, None, max_seqlen_q,
        max_seqlen_k, dropout_p, softmax_scale, causal, window_size_left, window_size_right, softcap, False,
        return_softmax, False,
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
    context.refuse_forward_mode("_flash_attn_backward")
    return calls.backward_into(
        dout, q, k, v, out, softmax_lse, dq, dk, dv, None, None, alibi_slopes, 0, 0, dropout_p, softmax_scale,
        causal, window_size_left, window_size_right, softcap, deterministic, rng_state,
        batch_invariant=is_batch_invariant(),
    )  # fmt: skip


@_flash_attn_backward.register_fake
def _(dout, q, *rest, **options):
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
    context.refuse_forward_mode("_flash_attn_varlen_backward")
    return calls.backward_into(
        dout, q, k, v, out, softmax_lse, dq, dk, dv, cu_seqlens_q, cu_seqlens_k, alibi_slopes, max_seqlen_q,
        max_seqlen_k, dropout_p, softmax_scale, causal, window_size_left, window_size_right, softcap, deterministic,
        rng_state, batch_invariant=is_batch_invariant(),
    )  # fmt: skip


@_flash_attn_varlen_backward.register_fake
def _(dout, q, k, v, out, softmax_lse, dq, dk, dv, cu_seqlens_q, *rest, **options):
    return calls.softmax_d_fake(q, cu_seqlens_q)
