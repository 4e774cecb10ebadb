"""FLOP formulas of the operators, for `torch.utils.flop_counter.FlopCounterMode`, by the rule of torch's own for SDPA:
two per multiplication and addition of the products, five in the backward; masks are not accounted for.

Packed sequences count by cu_seqlens, caches by the keys that they hold, which waits for a GPU; where these tensors have
no values, every sequence has the most that it can.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any, TypeVar

import torch
from torch import Tensor
from torch._ops import OpOverloadPacket
from torch._subclasses.functional_tensor import FunctionalTensor
from torch.utils.flop_counter import flop_registry, register_flop_formula

from flash_attn.ops.attention_args import AttentionArgs, AttentionBackwardArgs, KvCacheArgs, Tangents
from flash_attn.ops.calls import unpack
from flash_attn.utils.derived_buffers import has_values

Call = dict[str, Any]  # arguments of an operator, by name
_Record = TypeVar("_Record")
_core, _public = torch.ops.flash_attn_core, torch.ops.flash_attn


def _products(q: Tensor, v: Tensor, pairs: int, of_queries: int, of_values: int) -> int:
    """FLOPs of `of_queries` products over q's head dim and `of_values` over v's, for `pairs` of query and key."""
    return 2 * q.shape[-2] * pairs * (of_queries * q.shape[-1] + of_values * v.shape[-1])


def forward_flops(q: Tensor, v: Tensor, pairs: int) -> int:
    return _products(q, v, pairs, 1, 1)


def latent_flops(qv: Tensor | None, pairs: int) -> int:
    """Those of scores of qv, in addition to those of q."""
    return 0 if qv is None else _products(qv, qv, pairs, 1, 0)


def backward_flops(q: Tensor, v: Tensor, pairs: int) -> int:
    return _products(q, v, pairs, 3, 2)


def values(x: Tensor | None, count: int, otherwise: int) -> list[int]:
    """The elements of x, or `otherwise` repeated `count` times if x has no values."""
    return x.tolist() if x is not None and is_known(x) else [otherwise] * count


def is_known(x: Tensor) -> bool:
    """Whether x has values now: it has none while a graph is traced."""
    return not isinstance(x, FunctionalTensor) and has_values(x)


def packed_lengths(cu_seqlens: Tensor, most: int) -> list[int]:
    count = cu_seqlens.shape[0] - 1
    return values(cu_seqlens.diff(), count, most)


def count_pairs(lengths_q: Iterable[int], lengths_k: Iterable[int]) -> int:
    return sum(max(q, 0) * max(k, 0) for q, k in zip(lengths_q, lengths_k))


def _packed_pairs(
    cu_seqlens_q: Tensor,
    cu_seqlens_k: Tensor,
    max_seqlen_q: int,
    max_seqlen_k: int,
    seqused_k: Tensor | None = None,
    leftpad_k: Tensor | None = None,
) -> int:
    lengths_q = packed_lengths(cu_seqlens_q, max_seqlen_q)
    lengths_k = packed_lengths(cu_seqlens_k, max_seqlen_k)
    if seqused_k is not None:
        lengths_k = values(seqused_k, len(lengths_q), max_seqlen_k)
    padding = values(leftpad_k, len(lengths_q), 0)
    return count_pairs(lengths_q, (k - pad for k, pad in zip(lengths_k, padding)))


def _pairs_of(args: AttentionArgs | AttentionBackwardArgs, q: Tensor, k: Tensor) -> int:
    if args.cu_seqlens_q is None or args.cu_seqlens_k is None:
        return q.shape[0] * q.shape[1] * k.shape[1]
    used, padding = (args.seqused_k, args.leftpad_k) if isinstance(args, AttentionArgs) else (None, None)
    return _packed_pairs(args.cu_seqlens_q, args.cu_seqlens_k, args.max_seqlen_q, args.max_seqlen_k, used, padding)


def register(
    record: Callable[..., _Record], *operators: OpOverloadPacket
) -> Callable[[Callable[[_Record], int]], Callable[[_Record], int]]:
    """Decorates the formula of these operators, which takes the record of their arguments."""

    def registered(formula: Callable[[_Record], int]) -> Callable[[_Record], int]:
        def flops(*args: object, out_val: object = None, **kwargs: object) -> int:
            return formula(record(*args, **kwargs))

        for operator in operators:
            register_flop_formula(operator, get_raw=True)(flops)
            flop_registry.setdefault(operator, flops)  # torch 2.4 registers overloads, and looks for the operator
        return formula

    return registered


def _without_tangents(record: Callable[..., _Record]) -> Callable[..., _Record]:
    return lambda *args, **kwargs: record(*args[len(Tangents._fields) :], **kwargs)


@register(AttentionArgs, _core.fwd)
def _forward(call: AttentionArgs) -> int:
    q, k, v = unpack(call.q, call.k, call.v)
    pairs = _pairs_of(call, q, k)
    return forward_flops(q, v, pairs) + latent_flops(call.qv, pairs)


@register(AttentionBackwardArgs, _core.bwd)
def _backward(call: AttentionBackwardArgs) -> int:
    q, k, v = unpack(call.q, call.k, call.v)
    return backward_flops(q, v, _pairs_of(call, q, k))


@register(_without_tangents(AttentionArgs), _core.jvp)
def _jvp(call: AttentionArgs) -> int:
    q, k, v = unpack(call.q, call.k, call.v)
    return _products(q, v, _pairs_of(call, q, k), 3, 3)


@register(_without_tangents(AttentionBackwardArgs), _core.hvp)
def _hvp(call: AttentionBackwardArgs) -> int:
    q, k, v = unpack(call.q, call.k, call.v)
    return _products(q, v, _pairs_of(call, q, k), 7, 5)


@register(KvCacheArgs, _core.kvcache_fwd, _core.kvcache_append_fwd)
def _kvcache(call: KvCacheArgs) -> int:
    batch, seqlen_q = call.q.shape[:2]
    pages = 1 if call.block_table is None else call.block_table.shape[1]
    new = 0 if call.k is None else call.k.shape[1]
    cached = values(call.cache_seqlens, batch, pages * call.k_cache.shape[1] - new)
    padding = values(call.cache_leftpad, batch, 0)
    keys = (n + new - pad if n >= 0 else 0 for n, pad in zip(cached, padding))
    pairs = count_pairs([seqlen_q] * batch, keys)
    return forward_flops(call.q, call.v_cache, pairs) + latent_flops(call.qv, pairs)


# ---- the operators that distributed-attention clients call ----


def register_by_name(operator: OpOverloadPacket, flops: Callable[[Call], int]) -> None:
    """The formula of an operator: flops of its arguments by name, without those that have their default."""
    names = [argument.name for argument in operator.default._schema.arguments]
    register(lambda *args, **kwargs: {**dict(zip(names, args)), **kwargs}, operator)(flops)


def _pairs_by_name(call: Call) -> int:
    q, k = call["q"], call["k"]
    if "cu_seqlens_q" not in call:
        return int(q.shape[0] * q.shape[1] * k.shape[1])
    longest = call["max_seqlen_q"], call["max_seqlen_k"]
    used, padding = call.get("seqused_k"), call.get("leftpad_k")
    return _packed_pairs(call["cu_seqlens_q"], call["cu_seqlens_k"], *longest, used, padding)


for _name in ("_flash_attn_forward", "_flash_attn_varlen_forward"):
    register_by_name(getattr(_public, _name), lambda call: forward_flops(call["q"], call["v"], _pairs_by_name(call)))
for _name in ("_flash_attn_backward", "_flash_attn_varlen_backward"):
    register_by_name(getattr(_public, _name), lambda call: backward_flops(call["q"], call["v"], _pairs_by_name(call)))
