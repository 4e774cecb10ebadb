"""The operators `flash_attn::_flash_attn_*`, which distributed-attention clients call directly.

They are not differentiable, need a contiguous head dim and no padding, and follow the FlashAttention-2 names;
batch-invariant where `set_batch_invariant` says so.
Annotations stay objects (no postponed evaluation): torch.library infers the schemas from them.
"""

import functools
import inspect
from collections.abc import Callable
from typing import TYPE_CHECKING, Any, Optional

import torch
from torch import Tensor

from flash_attn.batch_invariance import is_batch_invariant
from flash_attn.ops import calls, context
from flash_attn.ops.attention_args import DENSE, AttentionArgs, AttentionBackwardArgs, Sequences

if TYPE_CHECKING:
    from torch._library.custom_ops import CustomOpDef

_NAMESPACE = "flash_attn"
_SCORES = ("dropout_p", "softmax_scale", "causal", "window_left", "window_right", "softcap")


# dropout_p, softmax_scale, causal, window_left, window_right, softcap
_Scores = tuple[float, float, bool, int, int, float]
_Results = tuple[Tensor, Tensor, Tensor, Tensor]


def _forward_args(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    sequences: Sequences,
    scores: _Scores,
    alibi_slopes: Optional[Tensor],
    return_softmax: bool,
) -> AttentionArgs:
    given: dict[str, Any] = dict(zip(_SCORES, scores))
    return AttentionArgs(
        q=q,
        k=k,
        v=v,
        alibi_slopes=alibi_slopes,
        sinks=None,
        deterministic=False,
        return_softmax=return_softmax,
        return_max_logit=False,
        batch_invariant=is_batch_invariant(),
        **sequences._asdict(),
        **given,
    )


def _backward_args(
    tensors: tuple[Tensor, Tensor, Tensor, Tensor, Tensor, Tensor],
    sequences: Sequences,
    scores: _Scores,
    alibi_slopes: Optional[Tensor],
    deterministic: bool,
    rng_state: Optional[Tensor],
) -> AttentionBackwardArgs:
    """tensors: dout, q, k, v, out, lse."""
    given: dict[str, Any] = dict(zip(("dout", "q", "k", "v", "out", "lse", *_SCORES), (*tensors, *scores)))
    return AttentionBackwardArgs(
        dlse=None,
        rng_state=rng_state,  # type: ignore[arg-type]  # None without dropout
        cu_seqlens_q=sequences.cu_seqlens_q,
        cu_seqlens_k=sequences.cu_seqlens_k,
        alibi_slopes=alibi_slopes,
        sinks=None,
        max_seqlen_q=sequences.max_seqlen_q,  # type: ignore[arg-type]  # the operators have ints
        max_seqlen_k=sequences.max_seqlen_k,  # type: ignore[arg-type]
        deterministic=deterministic,
        batch_invariant=is_batch_invariant(),
        **given,
    )


def _forward_operator(make_args: Callable[..., AttentionArgs]) -> "CustomOpDef":
    """The operator of this name and parameters, which computes the forward of the arguments that make_args returns."""
    name = make_args.__name__

    def forward(*args: object, **options: object) -> _Results:
        context.reject_forward_mode(name)
        out, lse, dmask, state = calls.forward(make_args(*args, **options))
        return out, lse, dmask, state

    functools.update_wrapper(forward, make_args)
    forward.__signature__ = inspect.signature(make_args).replace(return_annotation=_Results)  # type: ignore[attr-defined]
    operator = torch.library.custom_op(f"{_NAMESPACE}::{name}", forward, mutates_args=())
    operator.register_fake(lambda *args, **options: calls.forward_fake(make_args(*args, **options)))
    return operator


@_forward_operator
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
) -> AttentionArgs:
    """Dense forward -> (out, lse (b, h, sq), S_dmask, rng_state int64 (2,)). Shapes as in `flash_attn_func`."""
    scores = dropout_p, softmax_scale, causal, window_size_left, window_size_right, softcap
    return _forward_args(q, k, v, DENSE, scores, alibi_slopes, return_softmax)


@_forward_operator
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
) -> AttentionArgs:
    """Varlen forward -> (out, lse (h, total_q), S_dmask, rng_state int64 (2,)). Shapes as in `flash_attn_varlen_func`.

    zero_tensors and num_splits are accepted for compatibility: every output row is written in any case, and the
    number of splits does not change the result.
    """
    lengths = max_seqlen_q, max_seqlen_k
    sequences = Sequences(cu_seqlens_q, cu_seqlens_k, *lengths, seqused_k, leftpad_k, block_table)
    scores = dropout_p, softmax_scale, causal, window_size_left, window_size_right, softcap
    return _forward_args(q, k, v, sequences, scores, alibi_slopes, return_softmax)


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
    scores = dropout_p, softmax_scale, causal, window_size_left, window_size_right, softcap
    tensors = dout, q, k, v, out, softmax_lse
    args = _backward_args(tensors, DENSE, scores, alibi_slopes, deterministic, rng_state)
    return calls.backward_into(args, dq, dk, dv)


@_flash_attn_backward.register_fake
def _(dout: Tensor, q: Tensor, *rest: object, **options: object) -> Tensor:
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
    scores = dropout_p, softmax_scale, causal, window_size_left, window_size_right, softcap
    tensors = dout, q, k, v, out, softmax_lse
    args = _backward_args(tensors, sequences, scores, alibi_slopes, deterministic, rng_state)
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
    *rest: object,
    **options: object,
) -> Tensor:
    return calls.softmax_d_fake(q, cu_seqlens_q)
