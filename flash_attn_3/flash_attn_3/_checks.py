"""Checks of the arguments that only FlashAttention-3 has; flash_attn's functions check the others."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from flash_attn._types import Descale
from flash_attn.eight_bit import EIGHT_BIT, OF_QUERIES, named
from flash_attn.ops import arguments
from flash_attn.ops.quant_args import NO_QUANT, QuantArgs

_HALF = (torch.float16, torch.bfloat16)
ERRORS = (RuntimeError, TypeError, NotImplementedError)


def renamed(error: Exception, names: Mapping[str, str]) -> Exception:
    """The error for the caller, who knows flash_attn's arguments by other names: {flash_attn's: the caller's}."""
    text = str(error)
    if type(error) not in ERRORS or not re.match(r"\w+: expected ", text):
        return error
    return type(error)(re.sub(r"\w+", lambda word: names.get(word[0], word[0]), text))


def unused(
    num_splits: int = 0,
    pack_gqa: bool | None = None,
    scheduler_metadata: Tensor | None = None,
    max_seqlen_q: int | None = None,
    max_seqlen_k: int | None = None,
) -> int:
    """Check the types of arguments that have no effect; returns num_splits, of any sign."""
    if pack_gqa is not None:
        arguments.flag("pack_gqa", pack_gqa)
    arguments.check_optional_tensors(("scheduler_metadata",), (scheduler_metadata,))
    for name, value in (("max_seqlen_q", max_seqlen_q), ("max_seqlen_k", max_seqlen_k)):
        if value is not None:
            arguments.integer(name, value, least=0)
    return num_splits if type(num_splits) is int else arguments.integer("num_splits", num_splits)


def reject_unsupported(
    qv: Tensor | None = None,
    attention_chunk: int = 0,
    cu_seqlens_k_new: Tensor | None = None,
    seqlens_rotary: Tensor | None = None,
) -> None:
    """Raise NotImplementedError for the first given argument that no call supports, by name."""
    tensors = {"qv": qv, "cu_seqlens_k_new": cu_seqlens_k_new, "rotary_seqlens": seqlens_rotary}
    for name, value in tensors.items():
        if value is not None:
            raise NotImplementedError(f"{name}: expected None, got a tensor: it is not supported")
    if arguments.integer("attention_chunk", attention_chunk) != 0:
        raise NotImplementedError(f"attention_chunk: expected 0, got {attention_chunk}: it is not supported")


def quant_args(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    q_descale: Descale,
    k_descale: Descale,
    v_descale: Descale,
    out: Tensor | None = None,
) -> QuantArgs:
    """The arguments of flash_attn for 8-bit tensors; NO_QUANT where all are wider, whose descales have no effect."""
    given = {"q_descale": (q, q_descale), "k_descale": (k, k_descale), "v_descale": (v, v_descale)}
    for name, (_, descale) in given.items():
        if descale is not None and not isinstance(descale, Tensor):
            arguments.number(name, descale)
    if all(x.dtype not in EIGHT_BIT for x, _ in given.values()):
        return NO_QUANT
    descales: dict[str, Any] = {name: descale if x.dtype in EIGHT_BIT else None for name, (x, descale) in given.items()}
    return QuantArgs(**descales, out_dtype=None if out is None else _out_dtype(out, q))


def _out_dtype(out: Tensor, q: Tensor) -> torch.dtype:
    """The dtype of the result, which out decides where q has 8 bits."""
    arguments.check_tensors(("out",), (out,))
    if q.dtype in OF_QUERIES and out.dtype not in _HALF:
        raise RuntimeError(f"out: expected dtype float16 or bfloat16, got {named(out.dtype)}")
    if q.dtype not in EIGHT_BIT and out.dtype != q.dtype:
        raise RuntimeError(f"out: expected the dtype of q ({named(q.dtype)}), got {named(out.dtype)}")
    return out.dtype


def reject_training(q: Tensor, k: Tensor, v: Tensor) -> None:
    for name, x in (("q", q), ("k", k), ("v", v)):
        if x.dtype in EIGHT_BIT:
            raise NotImplementedError(f"{name}: expected at least 16 bits in training, got {x.dtype}: no backward")


def reject_beside(reason: str, **arguments: object) -> None:
    """Raise NotImplementedError for the first argument that is given. reason: of the error, such as "in training"."""
    for name, value in arguments.items():
        if value is not None:
            raise NotImplementedError(f"{name}: expected None {reason}, got a tensor: it is not supported")


def packed(
    q: Tensor, k: Tensor, v: Tensor, cu_seqlens_q: Tensor | None = None, cu_seqlens_k: Tensor | None = None
) -> None:
    """Check the shapes of tensors whose rows are rearranged before flash_attn sees them; cu_seqlens: of packed ones."""
    given = (("cu_seqlens_q", cu_seqlens_q, k, cu_seqlens_k), ("cu_seqlens_k", cu_seqlens_k, q, cu_seqlens_q))
    for name, x, cu_seqlens in (("q", q, cu_seqlens_q), ("k", k, cu_seqlens_k), ("v", v, cu_seqlens_k)):
        dense = cu_seqlens is None
        arguments.check_rank(name, x, "batch, seqlen, heads, head_dim" if dense else "total, heads, head_dim")
        on_device_of_q(name, x, q)
    if v.shape[:-1] != k.shape[:-1]:
        raise RuntimeError(f"v: expected shape {[*k.shape[:-1], v.shape[-1]]}, got {list(v.shape)}")
    for name, cu_seqlens, other, other_cu in given:
        if cu_seqlens is not None:
            arguments.check_tensors((name,), (cu_seqlens,))
            if other_cu is None:  # a batch
                arguments.check_lengths(name, cu_seqlens, other.shape[0] + 1, q.device)


def split_heads(qkv: Tensor, num_heads_q: int | None) -> tuple[Tensor, ...]:
    """(q, k, v), views of qkv (batch, seqlen, num_heads_q + 2 * nheads_k, head_dim)."""
    count = arguments.integer("num_heads_q", num_heads_q, expected="an int for qkv of 4 dimensions")
    others = qkv.shape[2] - count
    if count < 0 or others < 0 or others % 2:
        raise RuntimeError(f"num_heads_q: expected qkv's {qkv.shape[2]} heads less twice those of k, got {count}")
    parts: tuple[Tensor, ...] = qkv.split([count, others // 2, others // 2], dim=2)
    return parts


def sizes(
    batch_size: int,
    max_seqlen_q: int,
    max_seqlen_k: int,
    num_heads: int,
    num_heads_k: int,
    headdim: int,
    headdim_v: int,
    page_size: int | None,
) -> None:
    """Check sizes for which there are no tensors."""
    least = {
        "batch_size": (batch_size, 0),
        "max_seqlen_q": (max_seqlen_q, 0),
        "max_seqlen_k": (max_seqlen_k, 0),
        "num_heads": (num_heads, 1),
        "num_heads_k": (num_heads_k, 1),
        "headdim": (headdim, 1),
        "headdim_v": (headdim_v, 1),
        "page_size": (1 if page_size is None else page_size, 1),
    }
    for name, (value, smallest) in least.items():
        arguments.integer(name, value, least=smallest)
    if num_heads % num_heads_k:
        raise RuntimeError(
            f"num_heads: expected a head count divisible by the K/V head count {num_heads_k}, got {num_heads}"
        )


def reject_meta(names: Sequence[str], values: Sequence[object]) -> None:
    """Raise RuntimeError for a meta tensor among others, for which torch calls the fake: its result has no contents."""
    given = [(name, x) for name, x in zip(names, values) if isinstance(x, Tensor)]
    for name, x in given:
        if x.is_meta != given[0][1].is_meta:
            first, device = given[0][0], given[0][1].device
            raise RuntimeError(f"{name}: expected a tensor on {first}'s device ({device}), got one on {x.device}")


def on_device_of_q(name: str, x: Tensor, q: Tensor) -> None:
    if x.device != q.device:
        raise RuntimeError(f"{name}: expected a tensor on q's device ({q.device}), got one on {x.device}")
