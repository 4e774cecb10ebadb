"""The operators flash_attn_3::_flash_attn_forward and ::_flash_attn_backward, which distributed clients call.

Annotations stay objects (no postponed evaluation): torch.library infers the schemas from them.
"""

import inspect
from typing import Any, Optional

import torch
from torch import Tensor

from flash_attn._types import Context
from flash_attn_3 import _C, _checks
from flash_attn_3._backward import backward, gradients
from flash_attn_3._forward import forward

_FUNCTIONAL = "(flash_attn_with_kvcache and torch.ops.flash_attn_3.fwd write)"


@torch.library.custom_op("flash_attn_3::_flash_attn_forward", mutates_args=())
def _flash_attn_forward(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    k_new: Optional[Tensor] = None,
    v_new: Optional[Tensor] = None,
    qv: Optional[Tensor] = None,
    out_: Optional[Tensor] = None,
    cu_seqlens_q: Optional[Tensor] = None,
    cu_seqlens_k: Optional[Tensor] = None,
    cu_seqlens_k_new: Optional[Tensor] = None,
    seqused_q: Optional[Tensor] = None,
    seqused_k: Optional[Tensor] = None,
    max_seqlen_q: Optional[int] = None,
    max_seqlen_k: Optional[int] = None,
    page_table: Optional[Tensor] = None,
    kv_batch_idx: Optional[Tensor] = None,
    leftpad_k: Optional[Tensor] = None,
    rotary_cos: Optional[Tensor] = None,
    rotary_sin: Optional[Tensor] = None,
    seqlens_rotary: Optional[Tensor] = None,
    q_descale: Optional[Tensor] = None,
    k_descale: Optional[Tensor] = None,
    v_descale: Optional[Tensor] = None,
    softmax_scale: Optional[float] = None,
    causal: bool = False,
    window_size_left: int = -1,
    window_size_right: int = -1,
    attention_chunk: int = 0,
    softcap: float = 0.0,
    rotary_interleaved: bool = True,
    scheduler_metadata: Optional[Tensor] = None,
    num_splits: int = 1,
    pack_gqa: Optional[bool] = None,
    sm_margin: int = 0,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """(out, softmax_lse, two empty tensors) of `torch.ops.flash_attn_3.fwd`, differentiable in q, k and v.

    It writes nothing, as its schema says: k_new, v_new and out_ are NotImplementedError.
    """
    _checks.reject_beside(f"in an operator without side effects {_FUNCTIONAL}", k_new=k_new, v_new=v_new, out_=out_)
    out, lse = forward(
        q,
        k,
        v,
        None,
        None,
        qv,
        None,
        cu_seqlens_q,
        cu_seqlens_k,
        cu_seqlens_k_new,
        seqused_q,
        seqused_k,
        max_seqlen_q,
        max_seqlen_k,
        page_table,
        kv_batch_idx,
        leftpad_k,
        rotary_cos,
        rotary_sin,
        seqlens_rotary,
        q_descale,
        k_descale,
        v_descale,
        softmax_scale,
        causal,
        window_size_left,
        window_size_right,
        attention_chunk,
        softcap,
        rotary_interleaved,
        scheduler_metadata,
        num_splits,
        pack_gqa,
        sm_margin,
    )
    return out, lse, _C.no_scratch(lse), _C.no_scratch(lse)


def _forward_fake(*args: Any, **options: Any) -> tuple[Tensor, ...]:
    return _C.fwd_fake(*args, **{name: value for name, value in options.items() if name == "cu_seqlens_q"})


# What the backward reads of the forward's arguments.
_LENGTHS = ("cu_seqlens_q", "cu_seqlens_k", "seqused_q", "seqused_k")
_OPTIONS = ("softmax_scale", "causal", "window_size_left", "window_size_right", "softcap")
_FORWARD_ONLY = ("page_table", "kv_batch_idx", "leftpad_k")
_PARAMETERS = tuple(inspect.signature(_flash_attn_forward._init_fn).parameters)

_flash_attn_forward.register_fake(_C.on_one_device(_forward_fake, _PARAMETERS))


class _Context(Context):
    options: list[float]  # the values of _OPTIONS
    sm_margin: int
    forward_only: dict[str, Optional[Tensor]]


def _setup_context(ctx: _Context, inputs: tuple[Any, ...], output: tuple[Tensor, ...]) -> None:
    out, lse, *scratch = output
    given = dict(zip(_PARAMETERS, inputs))
    ctx.save_for_backward(*inputs[:3], out, lse, *(given[name] for name in _LENGTHS))
    ctx.options = [given[name] for name in _OPTIONS]
    ctx.sm_margin = given["sm_margin"]
    ctx.forward_only = {name: given[name] for name in _FORWARD_ONLY}
    ctx.mark_non_differentiable(*scratch)
    ctx.set_materialize_grads(False)


def _backward(ctx: _Context, dout: Optional[Tensor], dlse: Optional[Tensor], *_: None) -> tuple[Optional[Tensor], ...]:
    _checks.reject_beside("in training", **ctx.forward_only)
    q, k, v, out, lse, *lengths = ctx.saved_tensors
    _checks.reject_training(q, k, v)
    dout = torch.zeros_like(out) if dout is None else dout
    grads = gradients(dout, dlse, q, k, v, out, lse, *lengths, *ctx.options, False, ctx.sm_margin)
    return (*grads, *[None] * (len(_PARAMETERS) - 3))


_flash_attn_forward.register_autograd(_backward, setup_context=_setup_context)


@torch.library.custom_op("flash_attn_3::_flash_attn_backward", mutates_args=("dq", "dk", "dv"))
def _flash_attn_backward(
    dout: Tensor,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    out: Tensor,
    softmax_lse: Tensor,
    cu_seqlens_q: Optional[Tensor] = None,
    cu_seqlens_k: Optional[Tensor] = None,
    sequed_q: Optional[Tensor] = None,
    sequed_k: Optional[Tensor] = None,
    max_seqlen_q: Optional[int] = None,
    max_seqlen_k: Optional[int] = None,
    dq: Optional[Tensor] = None,
    dk: Optional[Tensor] = None,
    dv: Optional[Tensor] = None,
    softmax_scale: Optional[float] = None,
    is_causal: bool = False,
    window_size_left: int = -1,
    window_size_right: int = -1,
    softcap: float = 0.0,
    deterministic: bool = False,
    sm_margin: int = 0,
) -> Tensor:
    """Backward into the given dq, dk, dv, of any strides -> softmax_d, as `torch.ops.flash_attn_3.bwd` has it."""
    return backward(
        dout,
        q,
        k,
        v,
        out,
        softmax_lse,
        dq,
        dk,
        dv,
        cu_seqlens_q,
        cu_seqlens_k,
        sequed_q,
        sequed_k,
        max_seqlen_q,
        max_seqlen_k,
        softmax_scale,
        is_causal,
        window_size_left,
        window_size_right,
        softcap,
        deterministic,
        sm_margin,
    )


def _backward_fake(
    dout: Tensor,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    out: Tensor,
    softmax_lse: Tensor,
    cu_seqlens_q: Optional[Tensor] = None,
    cu_seqlens_k: Optional[Tensor] = None,
    sequed_q: Optional[Tensor] = None,
    sequed_k: Optional[Tensor] = None,
    *_: object,
    **__: object,
) -> Tensor:
    return _C.softmax_d_fake(q, cu_seqlens_q, cu_seqlens_k, sequed_q, sequed_k)


_flash_attn_backward.register_fake(
    _C.on_one_device(_backward_fake, tuple(inspect.signature(_flash_attn_backward._init_fn).parameters))
)
