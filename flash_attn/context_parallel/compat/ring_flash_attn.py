"""Functions of ring-flash-attention 0.1.8 on `flash_attn_cp_func`: code written for that package changes its imports.

Signatures, layouts and results are the same. All functions have this in common:

- Every rank of `group` (a ProcessGroup; default: all ranks) calls them with its own tokens, and calls backward.
- Dense: q (batch, seqlen, nheads, head_dim), k and v (batch, seqlen, nheads_k, head_dim), kv with another axis of 2
  before the heads, qkv of 3; seqlen is that of one rank, equal on all. Packed: (tokens, ...) instead of
  (batch, seqlen, ...). dtypes are those of `flash_attn_cp_func`: float16 and bfloat16, on CPU tensors float32 and
  float64 too.
- Results: out, like q; with return_attn_probs (out, softmax_lse, None), softmax_lse (batch, nheads, seqlen) or
  (nheads, tokens), float32 (float64 for float64).
- Beyond that package: dropout_p, window_size and alibi_slopes, by positions in the whole document, and zigzag with
  causal=False. alibi_slopes: float32 (nheads,) or (batch, nheads); packed (nheads,) or (documents, nheads), for llama3
  only (nheads,).
- A function's name says the layout. K and V move as by method="auto" of a plan.
- A plan is made, and compared across ranks, when lengths are new. A group keeps its last 16 plans. cu_seqlens on a GPU
  is read once per tensor, and again after it is written to.
- Raise RuntimeError, TypeError or ValueError, on every rank if the group has a CPU backend.

Not supported: `stripe_flash_attn_func` and its packed forms (spans of one token: as many sequences per call), and the
adapter to transformers, which replaces functions there.
"""

from __future__ import annotations

import inspect
from bisect import bisect_left
from collections.abc import Sequence
from typing import Callable, Optional, TypeVar, cast

import torch
import torch.distributed as dist
from torch import Tensor

from flash_attn._docstrings import documented
from flash_attn._types import TensorOrTuple, WindowSize
from flash_attn.context_parallel.compat import plan_cache
from flash_attn.context_parallel.compat.plan_cache import Bounds, BoundsOfTensors, GroupCache
from flash_attn.context_parallel.exchange.consistency import compare_on_all_ranks
from flash_attn.context_parallel.exchange.groups import Communicator
from flash_attn.context_parallel.function import flash_attn_cp_func
from flash_attn.ops import arguments

__all__ = [
    "llama3_flash_attn_prepare_cu_seqlens",
    "ring_flash_attn_qkvpacked_func",
    "ring_flash_attn_kvpacked_func",
    "ring_flash_attn_func",
    "zigzag_ring_flash_attn_qkvpacked_func",
    "zigzag_ring_flash_attn_kvpacked_func",
    "zigzag_ring_flash_attn_func",
    "ring_flash_attn_varlen_qkvpacked_func",
    "ring_flash_attn_varlen_kvpacked_func",
    "ring_flash_attn_varlen_func",
    "zigzag_ring_flash_attn_varlen_qkvpacked_func",
    "zigzag_ring_flash_attn_varlen_kvpacked_func",
    "zigzag_ring_flash_attn_varlen_func",
    "llama3_flash_attn_varlen_qkvpacked_func",
    "llama3_flash_attn_varlen_kvpacked_func",
    "llama3_flash_attn_varlen_func",
]


_on_host = BoundsOfTensors()  # cu_seqlens of GPUs
_prepared = BoundsOfTensors()  # bounds of all ranks' documents by the cu_seqlens_q made from them
_ABSENT = cast(Tensor, object())  # in place of k or v, which are in one tensor with q or k

Function = Callable[..., TensorOrTuple]
# dropout_p, softmax_scale, causal, window_size, alibi_slopes, deterministic
_Options = tuple[float, Optional[float], bool, WindowSize, Optional[Tensor], bool]
_AnyFunction = TypeVar("_AnyFunction", bound=Function)


def _uncompiled(function: _AnyFunction) -> _AnyFunction:
    """torch.compiler.disable with a type."""
    disabled: _AnyFunction = torch.compiler.disable(function)
    return disabled


def _packed_forms(function: Function) -> tuple[Function, Function]:
    """The forms of a function that take q, k and v in one tensor, and k and v."""

    def qkvpacked(qkv: Tensor, *args: object, **kwargs: object) -> TensorOrTuple:
        return function(qkv, _ABSENT, _ABSENT, *args, **kwargs)

    def kvpacked(q: Tensor, kv: Tensor, *args: object, **kwargs: object) -> TensorOrTuple:
        return function(q, kv, _ABSENT, *args, **kwargs)

    for form, note in ((qkvpacked, "qkv: q, k and v along an axis of 3"), (kvpacked, "kv: k and v along an axis of 2")):
        first = [p for p in inspect.signature(form).parameters.values() if p.kind is p.POSITIONAL_OR_KEYWORD]
        signature = inspect.signature(function)
        parameters = [*first, *[*signature.parameters.values()][3:]]
        form.__name__ = form.__qualname__ = function.__name__.replace("func", f"{form.__name__}_func")
        if function.__doc__ is not None:
            form.__doc__ = function.__doc__.replace("\n\n", f"\n\n    {note} before the heads.\n", 1)
        vars(form)["__signature__"] = signature.replace(parameters=parameters)
    return qkvpacked, kvpacked


# ---- dense ----


@documented(slopes="(nheads,) or (batch, nheads)", lse="(batch, nheads, seqlen)")
def ring_flash_attn_func(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    dropout_p: float = 0.0,
    softmax_scale: float | None = None,
    causal: bool = False,
    window_size: WindowSize = (-1, -1),
    alibi_slopes: Tensor | None = None,
    deterministic: bool = False,
    return_attn_probs: bool = False,
    group: dist.ProcessGroup | None = None,
) -> TensorOrTuple:
    """Sequences in contiguous chunks: rank r has the tokens [r * seqlen, (r + 1) * seqlen) of each.

    q: (batch, seqlen, nheads, head_dim). seqlen is that of one rank, equal on all.
    k, v: (batch, seqlen, nheads_k, head_dim).
    <ring>
    """
    options = dropout_p, softmax_scale, causal, window_size, alibi_slopes, deterministic
    return _dense((q, k, v), "contiguous", options, return_attn_probs, group)


ring_flash_attn_qkvpacked_func, ring_flash_attn_kvpacked_func = _packed_forms(ring_flash_attn_func)


@documented(slopes="(nheads,) or (batch, nheads)", lse="(batch, nheads, seqlen)")
def zigzag_ring_flash_attn_func(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    dropout_p: float = 0.0,
    softmax_scale: float | None = None,
    causal: bool = False,
    window_size: WindowSize = (-1, -1),
    alibi_slopes: Tensor | None = None,
    deterministic: bool = False,
    return_attn_probs: bool = False,
    group: dist.ProcessGroup | None = None,
) -> TensorOrTuple:
    """Sequences in 2 * ranks chunks; rank r has the r-th and then the r-th last.

    q: (batch, seqlen, nheads, head_dim). seqlen is that of one rank, equal on all, and even.
    k, v: (batch, seqlen, nheads_k, head_dim).
    <ring>
    """
    options = dropout_p, softmax_scale, causal, window_size, alibi_slopes, deterministic
    return _dense((q, k, v), "zigzag", options, return_attn_probs, group)


zigzag_ring_flash_attn_qkvpacked_func, zigzag_ring_flash_attn_kvpacked_func = _packed_forms(zigzag_ring_flash_attn_func)


# ---- packed, each document divided among all ranks ----


@documented(slopes="(nheads,) or (documents, nheads)", lse="(nheads, tokens)")
def ring_flash_attn_varlen_func(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    cu_seqlens: Tensor,
    max_seqlen: int,
    dropout_p: float = 0.0,
    softmax_scale: float | None = None,
    causal: bool = False,
    window_size: WindowSize = (-1, -1),
    alibi_slopes: Tensor | None = None,
    deterministic: bool = False,
    return_attn_probs: bool = False,
    group: dist.ProcessGroup | None = None,
) -> TensorOrTuple:
    """Packed documents, each divided into one contiguous chunk of equal length per rank.

    q: (tokens, nheads, head_dim). k, v: (tokens, nheads_k, head_dim).
    cu_seqlens: int32 or int64 (documents + 1,), bounds of one rank's tokens, the same on all. max_seqlen: no effect.
    <ring>
    """
    options = dropout_p, softmax_scale, causal, window_size, alibi_slopes, deterministic
    return _packed((q, k, v), cu_seqlens, "contiguous", options, return_attn_probs, group)


ring_flash_attn_varlen_qkvpacked_func, ring_flash_attn_varlen_kvpacked_func = _packed_forms(ring_flash_attn_varlen_func)


@documented(slopes="(nheads,) or (documents, nheads)", lse="(nheads, tokens)")
def zigzag_ring_flash_attn_varlen_func(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    cu_seqlens: Tensor,
    max_seqlen: int,
    dropout_p: float = 0.0,
    softmax_scale: float | None = None,
    causal: bool = False,
    window_size: WindowSize = (-1, -1),
    alibi_slopes: Tensor | None = None,
    deterministic: bool = False,
    return_attn_probs: bool = False,
    group: dist.ProcessGroup | None = None,
) -> TensorOrTuple:
    """Packed documents, each in 2 * ranks chunks; rank r has the r-th and then the r-th last.

    q: (tokens, nheads, head_dim). k, v: (tokens, nheads_k, head_dim).
    cu_seqlens: int32 or int64 (documents + 1,), bounds of one rank's tokens, the same on all, even lengths.
    max_seqlen: no effect.
    <ring>
    """
    options = dropout_p, softmax_scale, causal, window_size, alibi_slopes, deterministic
    return _packed((q, k, v), cu_seqlens, "zigzag", options, return_attn_probs, group)


zigzag_ring_flash_attn_varlen_qkvpacked_func, zigzag_ring_flash_attn_varlen_kvpacked_func = _packed_forms(
    zigzag_ring_flash_attn_varlen_func
)


# ---- packed, all tokens in contiguous chunks ----


def llama3_flash_attn_prepare_cu_seqlens(
    cu_seqlens: Tensor, causal: bool, rank: int, world_size: int
) -> tuple[Tensor, Tensor, int, int, slice]:
    """The documents of one rank as arguments of `llama3_flash_attn_varlen_func`.

    Arguments:
        cu_seqlens: int32 or int64 (documents + 1,), bounds of all ranks' tokens, a multiple of world_size.
        causal: whether a rank's keys end with its last query.
        rank, world_size: of the group.

    Returns:
        cu_seqlens_q, cu_seqlens_k: like cu_seqlens, bounds of the documents with tokens on this rank: of its tokens,
            and of the keys that they see.
        max_seqlen_q, max_seqlen_k: the longest of each.
        local_k_slice: these keys among all ranks' tokens.

    Raises RuntimeError or TypeError.
    """
    bounds = _read("cu_seqlens", cu_seqlens)
    ranks = arguments.integer("world_size", world_size, least=1)
    rank = arguments.integer("rank", rank, least=0)
    if rank >= ranks:
        raise RuntimeError(f"rank: expected one of {ranks}, got {rank}")
    if bounds[-1] % ranks:
        raise RuntimeError(f"cu_seqlens: expected a number of tokens that {ranks} divides, got {bounds[-1]}")
    start, stop = (bounds[-1] // ranks * r for r in (rank, rank + 1))
    first, last = bisect_left(bounds, start), bisect_left(bounds, stop)
    first -= bounds[first] > start
    own = bounds[first : last + 1]
    of_queries = [min(max(bound, start), stop) - start for bound in own]
    end = min(own[-1], stop) if arguments.flag("causal", causal) else own[-1]
    of_keys = [min(bound, end) - own[0] for bound in own]
    with torch.inference_mode(False):  # inference tensors have no version: ranks would gather documents in every call
        cu_seqlens_q, cu_seqlens_k = (cu_seqlens.new_tensor(values) for values in (of_queries, of_keys))
    _prepared.put(cu_seqlens_q, bounds)
    return cu_seqlens_q, cu_seqlens_k, _longest(of_queries), _longest(of_keys), slice(own[0], end)


@documented(slopes="(nheads,)", lse="(nheads, tokens)")
def llama3_flash_attn_varlen_func(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    cu_seqlens_q: Tensor,
    cu_seqlens_k: Tensor,
    max_seqlen_q: int,
    max_seqlen_k: int,
    heads_k_stride: int,
    local_k_slice: slice,
    dropout_p: float = 0.0,
    softmax_scale: float | None = None,
    causal: bool = False,
    window_size: WindowSize = (-1, -1),
    alibi_slopes: Tensor | None = None,
    deterministic: bool = False,
    return_attn_probs: bool = False,
    group: dist.ProcessGroup | None = None,
) -> TensorOrTuple:
    """Packed documents of any lengths, their tokens divided into one contiguous chunk of equal length per rank.

    q: (tokens, nheads, head_dim). k, v: (tokens, nheads_k, head_dim).
    cu_seqlens_q, local_k_slice: from `llama3_flash_attn_prepare_cu_seqlens`, which knows all documents. For a copy of
    cu_seqlens_q the ranks gather their documents, once per tensor: all ranks pass a copy, or none.
    cu_seqlens_k, max_seqlen_q, max_seqlen_k, heads_k_stride: no effect.
    <ring>
    """
    options = dropout_p, softmax_scale, causal, window_size, alibi_slopes, deterministic
    return _llama3((q, k, v), cu_seqlens_q, local_k_slice, options, return_attn_probs, group)


llama3_flash_attn_varlen_qkvpacked_func, llama3_flash_attn_varlen_kvpacked_func = _packed_forms(
    llama3_flash_attn_varlen_func
)


# ---- common to all ----


@_uncompiled
def _dense(
    inputs: tuple[Tensor, ...],
    division: str,
    options: _Options,
    return_attn_probs: bool,
    group: dist.ProcessGroup | None,
) -> TensorOrTuple:
    cache = plan_cache.cache_of(group)
    documents: Bounds = ()
    error = None
    try:
        inputs = _separate(inputs, is_packed=False)
        documents = 0, inputs[0].shape[1] * cache.communicator.size
        if division == "zigzag" and inputs[0].shape[1] % 2:
            raise RuntimeError(f"q: expected two chunks of one length, got {inputs[0].shape[1]} tokens")
    except Exception as raised:  # of any type: the other ranks wait for this one
        error = raised
    plan_cache.raise_on_all_ranks(cache, error)
    return _attend(cache, inputs, False, division, documents, options, return_attn_probs)


@_uncompiled
def _packed(
    inputs: tuple[Tensor, ...],
    cu_seqlens: Tensor,
    division: str,
    options: _Options,
    return_attn_probs: bool,
    group: dist.ProcessGroup | None,
) -> TensorOrTuple:
    cache = plan_cache.cache_of(group)
    documents: Bounds = ()
    error = None
    try:
        inputs = _separate(inputs, is_packed=True)
        bounds = _read("cu_seqlens", cu_seqlens)
        documents = tuple(bound * cache.communicator.size for bound in bounds)
        if division == "zigzag" and any(bound % 2 for bound in bounds):
            raise RuntimeError(
                f"cu_seqlens: expected two chunks of one length in each document, got bounds {arguments.shown(bounds)}"
            )
    except Exception as raised:
        error = raised
    plan_cache.raise_on_all_ranks(cache, error)
    return _attend(cache, inputs, True, division, documents, options, return_attn_probs)


@_uncompiled
def _llama3(
    inputs: tuple[Tensor, ...],
    cu_seqlens_q: Tensor,
    local_k_slice: slice,
    options: _Options,
    return_attn_probs: bool,
    group: dist.ProcessGroup | None,
) -> TensorOrTuple:
    cache = plan_cache.cache_of(group)
    documents = error = None
    starts: list[int] = []
    tokens = 0
    try:
        inputs = _separate(inputs, is_packed=True)
        tokens, slopes = inputs[0].shape[0], options[4]
        if isinstance(slopes, Tensor) and slopes.dim() != 1:  # a rank does not know the number of all documents
            raise RuntimeError(f"alibi_slopes: expected shape (nheads,), got {list(slopes.shape)}")
        arguments.check_tensors(("cu_seqlens_q",), (cu_seqlens_q,))
        documents = _prepared.get(cu_seqlens_q) or cache.documents.get(cu_seqlens_q)
        if documents is None:
            starts = _document_starts(cu_seqlens_q, local_k_slice, cache.communicator.rank, tokens)
    except Exception as raised:
        error = raised
    plan_cache.raise_on_all_ranks(cache, error)
    if documents is None:
        documents = _gathered_documents(cache.communicator, starts, tokens)
        cache.documents.put(cu_seqlens_q, documents)
    return _attend(cache, inputs, True, "stream", documents, options, return_attn_probs)


def _attend(
    cache: GroupCache,
    inputs: tuple[Tensor, ...],
    is_packed: bool,
    division: str,
    documents: Bounds,
    options: _Options,
    return_attn_probs: bool,
) -> TensorOrTuple:
    plan = plan_cache.cached_plan(cache, is_packed, division, documents)
    q, k, v = inputs
    dropout_p, softmax_scale, causal, window_size, alibi_slopes, deterministic = options
    score = dropout_p, softmax_scale, causal, window_size, 0.0
    result = flash_attn_cp_func(q, k, v, *score, alibi_slopes, deterministic, return_attn_probs, plan=plan)
    return (*result[:2], None) if return_attn_probs else result


def _separate(inputs: tuple[Tensor, ...], is_packed: bool) -> tuple[Tensor, Tensor, Tensor]:
    """(q, k, v) of (qkv,), (q, kv) or (q, k, v), which _ABSENT fills to three."""
    axis = 1 if is_packed else 2
    inputs = tuple(x for x in inputs if x is not _ABSENT)
    *first, last = inputs
    if len(inputs) < 3:
        arguments.check_packed("qkv" if not first else "kv", last, 3 - len(first), is_packed)
        inputs = *first, *last.unbind(axis)
    arguments.check_tensors(("q", "k", "v"), inputs)
    if inputs[0].dim() != axis + 2:
        axes = "tokens, nheads, head_dim" if is_packed else "batch, seqlen, nheads, head_dim"
        raise RuntimeError(f"q: expected shape ({axes}), got {list(inputs[0].shape)}")
    q, k, v = inputs
    return q, k, v


def _read(name: str, x: Tensor) -> Bounds:
    """Bounds of documents, on the host."""
    arguments.check_tensors((name,), (x,))
    bounds = None if x.is_cpu else _on_host.get(x)
    if bounds is not None:
        return bounds
    if x.dim() != 1 or not x.numel() or x.dtype not in (torch.int32, torch.int64):
        raise RuntimeError(f"{name}: expected int32 or int64 of shape (documents + 1,), got {arguments.shown(x)}")
    bounds = tuple(x.tolist())
    if bounds[0] != 0 or any(b < a for a, b in zip(bounds, bounds[1:])):
        raise RuntimeError(f"{name}: expected ascending values from 0, got {arguments.shown(bounds)}")
    if not x.is_cpu:
        _on_host.put(x, bounds)
    return bounds


def _longest(bounds: Sequence[int]) -> int:
    return max((b - a for a, b in zip(bounds, bounds[1:])), default=0)


def _document_starts(cu_seqlens_q: Tensor, local_k_slice: slice, rank: int, tokens: int) -> list[int]:
    """The first tokens of the documents on this rank, as far as it knows them."""
    bounds = _read("cu_seqlens_q", cu_seqlens_q)
    if bounds[-1] != tokens:
        raise RuntimeError(f"cu_seqlens_q: expected the {tokens} tokens of q as last value, got {bounds[-1]}")
    start = local_k_slice.start if isinstance(local_k_slice, slice) else None
    if not isinstance(start, int) or not 0 <= start <= rank * tokens:
        raise RuntimeError(
            f"local_k_slice: expected a slice that starts in 0 to {rank * tokens}, got {arguments.shown(local_k_slice)}"
        )
    return sorted({start, *(rank * tokens + bound for bound in bounds[1:-1])})


def _gathered_documents(communicator: Communicator, starts: list[int], tokens: int) -> Bounds:
    """Bounds of all ranks' documents without empty ones; all ranks call it."""
    counts = compare_on_all_ranks(communicator, f"tokens {tokens}", None, "q", len(starts))
    everyone = communicator.all_gather_ints(starts + [0] * (max(counts) - len(starts)))
    total = tokens * communicator.size
    return (0, *sorted({start for own in everyone for start in own if 0 < start < total}), total)
