"""The operators torch.ops.flash_attn_3.{fwd, bwd, fwd_combine, get_scheduler_metadata}, registered by the import.

Clients call them by position and compare their schemas, so these are FlashAttention-3's. Where it returns scratch
memory there are empty tensors here. `fwd` writes k and v, the cache, where k_new is given; its schema does not say so,
as that of FlashAttention-3 does not.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, TypeVar

import torch
from torch import Tensor

from flash_attn import flash_attn_combine
from flash_attn.eight_bit import result_dtype
from flash_attn.ops import arguments, calls
from flash_attn.ops.lse import mark_masked_rows
from flash_attn.utils.after_import import import_after
from flash_attn_3 import _checks
from flash_attn_3._backward import backward
from flash_attn_3._forward import forward

_Result = TypeVar("_Result")
_SCHEMAS = {
    "fwd": "(Tensor q, Tensor k, Tensor v, Tensor(k_new!)? k_new=None, Tensor(v_new!)? v_new=None, Tensor? q_v=None, "
    "Tensor(out!)? out=None, Tensor? cu_seqlens_q=None, Tensor? cu_seqlens_k=None, Tensor? cu_seqlens_k_new=None, "
    "Tensor? seqused_q=None, Tensor? seqused_k=None, int? max_seqlen_q=None, int? max_seqlen_k=None, "
    "Tensor? page_table=None, Tensor? kv_batch_idx=None, Tensor? leftpad_k=None, Tensor? rotary_cos=None, "
    "Tensor? rotary_sin=None, Tensor? seqlens_rotary=None, Tensor? q_descale=None, Tensor? k_descale=None, "
    "Tensor? v_descale=None, float? softmax_scale=None, bool is_causal=False, int window_size_left=-1, "
    "int window_size_right=-1, int attention_chunk=0, float softcap=0.0, bool is_rotary_interleaved=False, "
    "Tensor? scheduler_metadata=None, int num_splits=0, bool? pack_gqa=None, int sm_margin=0) "
    "-> (Tensor(out!), Tensor, Tensor, Tensor)",
    "bwd": "(Tensor dout, Tensor q, Tensor k, Tensor v, Tensor out, Tensor softmax_lse, Tensor(dq!)? dq=None, "
    "Tensor(dk!)? dk=None, Tensor(dv!)? dv=None, Tensor? cu_seqlens_q=None, Tensor? cu_seqlens_k=None, "
    "Tensor? seqused_q=None, Tensor? seqused_k=None, int? max_seqlen_q=None, int? max_seqlen_k=None, "
    "float? softmax_scale=None, bool is_causal=False, int window_size_left=-1, int window_size_right=-1, "
    "float softcap=0.0, bool deterministic=False, int sm_margin=0) -> (Tensor, Tensor, Tensor, Tensor, Tensor)",
    "fwd_combine": "(Tensor out_partial, Tensor lse_partial, Tensor(out!)? out=None, ScalarType? out_dtype=None) "
    "-> (Tensor(out!), Tensor)",
    "get_scheduler_metadata": "(int batch_size, int max_seqlen_q, int max_seqlen_k, int num_heads, int num_heads_k, "
    "int headdim, int headdim_v, ScalarType qkv_dtype, Tensor seqused_k, Tensor? cu_seqlens_q=None, "
    "Tensor? cu_seqlens_k=None, Tensor? cu_seqlens_k_new=None, Tensor? seqused_q=None, Tensor? leftpad_k=None, "
    "int? page_size=None, int max_seqlen_k_new=0, bool is_causal=False, int window_size_left=-1, "
    "int window_size_right=-1, int attention_chunk=0, bool has_softcap=False, int num_splits=0, bool? pack_gqa=None, "
    "int sm_margin=0) -> Tensor",
}


def no_scratch(like: Tensor) -> Tensor:
    """An empty tensor in place of the scratch memory that an operator of FlashAttention-3 returns."""
    return like.new_empty(0, dtype=torch.float32)


def _fwd(*args: object) -> tuple[Tensor, ...]:
    out, lse = forward(*args)
    return out, lse, no_scratch(lse), no_scratch(lse)


def fwd_fake(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    k_new: Tensor | None = None,
    v_new: Tensor | None = None,
    q_v: Tensor | None = None,
    out: Tensor | None = None,
    cu_seqlens_q: Tensor | None = None,
    *_: object,
) -> tuple[Tensor, ...]:
    """Results of `fwd` by shape, dtype and device alone."""
    dtype = result_dtype(q, v, None)
    result = q.new_empty((*q.shape[:-1], v.shape[-1]), dtype=dtype) if out is None else out
    rows = (q.shape[0], q.shape[2], q.shape[1]) if cu_seqlens_q is None else (q.shape[1], q.shape[0])
    lse = q.new_empty(rows, dtype=torch.float64 if q.dtype == torch.float64 else torch.float32)
    return result, lse, no_scratch(lse), no_scratch(lse)


def _bwd(*args: Any) -> tuple[Tensor, ...]:
    softmax_d = backward(*args)
    return softmax_d, *(no_scratch(softmax_d) for _ in range(4))


def softmax_d_fake(
    q: Tensor,
    cu_seqlens_q: Tensor | None,
    cu_seqlens_k: Tensor | None,
    seqused_q: Tensor | None,
    seqused_k: Tensor | None,
) -> Tensor:
    """softmax_d by shape, dtype and device alone: (batch, nheads, rows), or (nheads, rows) if anything is packed."""
    if all(x is None for x in (cu_seqlens_q, cu_seqlens_k, seqused_q, seqused_k)):
        return calls.softmax_d_fake(q, None)
    if cu_seqlens_q is None:
        return calls.softmax_d_fake(q.flatten(0, 1), q.new_empty(q.shape[0] + 1))
    return calls.softmax_d_fake(q, cu_seqlens_q)


def _bwd_fake(
    dout: Tensor,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    out: Tensor,
    softmax_lse: Tensor,
    dq: Tensor | None = None,
    dk: Tensor | None = None,
    dv: Tensor | None = None,
    *rest: Any,
) -> tuple[Tensor, ...]:
    lengths = (*rest, None, None, None, None)[:4]
    softmax_d = softmax_d_fake(q, *lengths)
    return softmax_d, *(no_scratch(softmax_d) for _ in range(4))


def _fwd_combine(
    out_partial: Tensor, lse_partial: Tensor, out: Tensor | None = None, out_dtype: torch.dtype | None = None
) -> tuple[Tensor, Tensor]:
    with torch.no_grad():
        out, lse = flash_attn_combine(out_partial, lse_partial, out, out_dtype)
    return out, mark_masked_rows(lse)


def _fwd_combine_fake(
    out_partial: Tensor, lse_partial: Tensor, out: Tensor | None = None, out_dtype: torch.dtype | None = None
) -> tuple[Tensor, Tensor]:
    if out is None:
        out = out_partial.new_empty(out_partial.shape[1:], dtype=out_dtype or out_partial.dtype)
    return out, lse_partial.new_empty(lse_partial.shape[1:])


def scheduler_metadata(
    batch_size: int,
    max_seqlen_q: int,
    max_seqlen_k: int,
    num_heads: int,
    num_heads_k: int,
    headdim: int,
    headdim_v: int,
    qkv_dtype: torch.dtype,
    seqused_k: Tensor,
    cu_seqlens_q: Tensor | None = None,
    cu_seqlens_k: Tensor | None = None,
    cu_seqlens_k_new: Tensor | None = None,
    seqused_q: Tensor | None = None,
    leftpad_k: Tensor | None = None,
    page_size: int | None = None,
    max_seqlen_k_new: int = 0,
    is_causal: bool = False,
    window_size_left: int = -1,
    window_size_right: int = -1,
    attention_chunk: int = 0,
    has_softcap: bool = False,
    num_splits: int = 0,
    pack_gqa: bool | None = None,
    sm_margin: int = 0,
) -> Tensor:
    """Nothing has to be scheduled before a call: an empty tensor, which every function here ignores."""
    _checks.reject_unsupported(attention_chunk=attention_chunk)
    _checks.unused(num_splits, pack_gqa)
    arguments.sm_margin(sm_margin)
    _checks.sizes(batch_size, max_seqlen_q, max_seqlen_k, num_heads, num_heads_k, headdim, headdim_v, page_size)
    arguments.integer("max_seqlen_k_new", max_seqlen_k_new, least=0)
    if not isinstance(qkv_dtype, torch.dtype):
        raise TypeError(f"qkv_dtype: expected a torch.dtype, got {arguments.shown(qkv_dtype)}")
    for name, flag in (("is_causal", is_causal), ("has_softcap", has_softcap)):
        arguments.flag(name, flag)
    arguments.check_tensors(("seqused_k",), (seqused_k,))
    vectors = {"seqused_k": seqused_k, "seqused_q": seqused_q, "leftpad_k": leftpad_k}
    bounds = {"cu_seqlens_q": cu_seqlens_q, "cu_seqlens_k": cu_seqlens_k, "cu_seqlens_k_new": cu_seqlens_k_new}
    for given, length in ((vectors, batch_size), (bounds, batch_size + 1)):
        for name, value in given.items():
            if value is not None:
                arguments.check_lengths(name, value, length, seqused_k.device)
    return seqused_k.new_empty(0, dtype=torch.int32)


def on_one_device(fake: Callable[..., _Result], names: Sequence[str]) -> Callable[..., _Result]:
    """`fake`, but an error where some of the tensors are on meta and others are not. names: of the arguments."""

    def checked(*args: object, **kwargs: object) -> _Result:
        _checks.reject_meta((*names[: len(args)], *kwargs), (*args, *kwargs.values()))
        return fake(*args, **kwargs)

    return checked


_library = torch.library.Library("flash_attn_3", "DEF")


def _register(name: str, function: Callable[..., object], fake: Callable[..., object]) -> None:
    _library.define(name + _SCHEMAS[name])
    _library.impl(name, function, "CompositeExplicitAutograd")
    names = [x.name for x in getattr(torch.ops.flash_attn_3, name).default._schema.arguments]
    torch.library.register_fake(f"flash_attn_3::{name}", on_one_device(fake, names), lib=_library)


_register("fwd", _fwd, fwd_fake)
_register("bwd", _bwd, _bwd_fake)
_register("fwd_combine", _fwd_combine, _fwd_combine_fake)
_register("get_scheduler_metadata", scheduler_metadata, scheduler_metadata)

import_after("torch.utils.flop_counter", "flash_attn_3._flops")  # which registers formulas there
