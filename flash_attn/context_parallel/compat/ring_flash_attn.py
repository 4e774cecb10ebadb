"""Functions of ring-flash-attention 0.1.8 on `flash_attn_cp_func`: code written for that package needs another import.

Same signatures, layouts and results. What they have in common:

- Every rank of `group` (a ProcessGroup; default: all ranks) calls them with its own tokens, and calls backward.
- Dense: q (batch, seqlen, nheads, head_dim), k and v (batch, seqlen, nheads_k, head_dim), kv with another axis of 2
  before the heads, qkv of 3; seqlen is that of one rank, equal on all. Packed: (tokens, ...) in place of
  (batch, seqlen, ...). dtypes are those of `flash_attn_cp_func`: float16 and bfloat16 on CUDA, float32 and float64 on
  CPU tensors too.
- Results: out, like q; with return_attn_probs (out, softmax_lse, None), softmax_lse (batch, nheads, seqlen) or
  (nheads, tokens), float32 (float64 of float64).
- More works than there: dropout_p, window_size and alibi_slopes, by positions in the whole document, and zigzag with
  causal=False. alibi_slopes: float32 (nheads,) or (batch, nheads); packed (nheads,) or (documents, nheads), of llama3
  the former alone.
- K and V move as method="auto" of a plan has it, whatever a function's name says: the name is that of a layout.
- Plans are made when lengths are new, where all ranks compare them, and kept as long as the group: the last
  16. cu_seqlens on a GPU is read once for each tensor, and again after it is written to.
- Raise RuntimeError, TypeError or ValueError, on every rank where the group has a CPU backend.

Left out: `stripe_flash_attn_func` and its packed forms (a span of one token each: calls of as many sequences), and the
adapter to transformers, which replaces functions there.
"""

from __future__ import annotations

from bisect import bisect_left

import torch
import torch.distributed as dist
from torch import Tensor

from flash_attn._types import TensorOrTuple, WindowSize
from flash_attn.context_parallel.agreement import compare_on_all_ranks
from flash_attn.context_parallel.compat.kept import Kept, OfTensors, kept_for, plan_of, raise_on_all_ranks
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


_on_host = OfTensors()  # cu_seqlens of GPUs
_prepared = OfTensors()  # bounds of all ranks' documents by the cu_seqlens_q made of them


# ---- dense ----


def ring_flash_attn_qkvpacked_func(
    qkv: Tensor,
    dropout_p: float = 0.0, softmax_scale: float | None = None, causal: bool = False,
    window_size: WindowSize = (-1, -1), alibi_slopes: Tensor | None = None, deterministic: bool = False,
    return_attn_probs: bool = False, group: dist.ProcessGroup | None = None,
) -> TensorOrTuple:  # fmt: skip
    """`ring_flash_attn_func` of q, k and v in one tensor."""
    return _dense(
        (qkv,), "contiguous",
        group, return_attn_probs, dropout_p, softmax_scale, causal, window_size, alibi_slopes, deterministic
    )  # fmt: skip


def ring_flash_attn_kvpacked_func(
    q: Tensor, kv: Tensor,
    dropout_p: float = 0.0, softmax_scale: float | None = None, causal: bool = False,
    window_size: WindowSize = (-1, -1), alibi_slopes: Tensor | None = None, deterministic: bool = False,
    return_attn_probs: bool = False, group: dist.ProcessGroup | None = None,
) -> TensorOrTuple:  # fmt: skip
    """`ring_flash_attn_func` of k and v in one tensor."""
    return _dense(
        (q, kv), "contiguous",
        group, return_attn_probs, dropout_p, softmax_scale, causal, window_size, alibi_slopes, deterministic
    )  # fmt: skip


def ring_flash_attn_func(
    q: Tensor, k: Tensor, v: Tensor,
    dropout_p: float = 0.0, softmax_scale: float | None = None, causal: bool = False,
    window_size: WindowSize = (-1, -1), alibi_slopes: Tensor | None = None, deterministic: bool = False,
    return_attn_probs: bool = False, group: dist.ProcessGroup | None = None,
) -> TensorOrTuple:  # fmt: skip
    """Sequences in contiguous chunks: rank r has the tokens [r * seqlen, (r + 1) * seqlen) of each.

    Shapes, results and errors are those of the module's docstring.
    """
    return _dense(
        (q, k, v), "contiguous",
        group, return_attn_probs, dropout_p, softmax_scale, causal, window_size, alibi_slopes, deterministic
    )  # fmt: skip


def zigzag_ring_flash_attn_qkvpacked_func(
    qkv: Tensor,
    dropout_p: float = 0.0, softmax_scale: float | None = None, causal: bool = False,
    window_size: WindowSize = (-1, -1), alibi_slopes: Tensor | None = None, deterministic: bool = False,
    return_attn_probs: bool = False, group: dist.ProcessGroup | None = None,
) -> TensorOrTuple:  # fmt: skip
    """`zigzag_ring_flash_attn_func` of q, k and v in one tensor."""
    return _dense(
        (qkv,), "zigzag",
        group, return_attn_probs, dropout_p, softmax_scale, causal, window_size, alibi_slopes, deterministic
    )  # fmt: skip


def zigzag_ring_flash_attn_kvpacked_func(
    q: Tensor, kv: Tensor,
    dropout_p: float = 0.0, softmax_scale: float | None = None, causal: bool = False,
    window_size: WindowSize = (-1, -1), alibi_slopes: Tensor | None = None, deterministic: bool = False,
    return_attn_probs: bool = False, group: dist.ProcessGroup | None = None,
) -> TensorOrTuple:  # fmt: skip
    """`zigzag_ring_flash_attn_func` of k and v in one tensor."""
    return _dense(
        (q, kv), "zigzag",
        group, return_attn_probs, dropout_p, softmax_scale, causal, window_size, alibi_slopes, deterministic
    )  # fmt: skip


def zigzag_ring_flash_attn_func(
    q: Tensor, k: Tensor, v: Tensor,
    dropout_p: float = 0.0, softmax_scale: float | None = None, causal: bool = False,
    window_size: WindowSize = (-1, -1), alibi_slopes: Tensor | None = None, deterministic: bool = False,
    return_attn_probs: bool = False, group: dist.ProcessGroup | None = None,
) -> TensorOrTuple:  # fmt: skip
    """Sequences in 2 * ranks chunks, of which rank r has the r-th and, after it, the r-th from the end.

    seqlen is even; shapes, results and errors are those of the module's docstring.
    """
    return _dense(
        (q, k, v), "zigzag",
        group, return_attn_probs, dropout_p, softmax_scale, causal, window_size, alibi_slopes, deterministic
    )  # fmt: skip


# ---- packed, each document divided among all ranks ----


def ring_flash_attn_varlen_qkvpacked_func(
    qkv: Tensor, cu_seqlens: Tensor, max_seqlen: int,
    dropout_p: float = 0.0, softmax_scale: float | None = None, causal: bool = False,
    window_size: WindowSize = (-1, -1), alibi_slopes: Tensor | None = None, deterministic: bool = False,
    return_attn_probs: bool = False, group: dist.ProcessGroup | None = None,
) -> TensorOrTuple:  # fmt: skip
    """`ring_flash_attn_varlen_func` of q, k and v in one tensor."""
    return _packed(
        (qkv,), cu_seqlens, "contiguous",
        group, return_attn_probs, dropout_p, softmax_scale, causal, window_size, alibi_slopes, deterministic
    )  # fmt: skip


def ring_flash_attn_varlen_kvpacked_func(
    q: Tensor, kv: Tensor, cu_seqlens: Tensor, max_seqlen: int,
    dropout_p: float = 0.0, softmax_scale: float | None = None, causal: bool = False,
    window_size: WindowSize = (-1, -1), alibi_slopes: Tensor | None = None, deterministic: bool = False,
    return_attn_probs: bool = False, group: dist.ProcessGroup | None = None,
) -> TensorOrTuple:  # fmt: skip
    """`ring_flash_attn_varlen_func` of k and v in one tensor."""
    return _packed(
        (q, kv), cu_seqlens, "contiguous",
        group, return_attn_probs, dropout_p, softmax_scale, causal, window_size, alibi_slopes, deterministic
    )  # fmt: skip


def ring_flash_attn_varlen_func(
    q: Tensor, k: Tensor, v: Tensor, cu_seqlens: Tensor, max_seqlen: int,
    dropout_p: float = 0.0, softmax_scale: float | None = None, causal: bool = False,
    window_size: WindowSize = (-1, -1), alibi_slopes: Tensor | None = None, deterministic: bool = False,
    return_attn_probs: bool = False, group: dist.ProcessGroup | None = None,
) -> TensorOrTuple:  # fmt: skip
    """Packed documents, each in contiguous chunks of equal length, one a rank.

    cu_seqlens: int32 or int64 (documents + 1,), bounds of one rank's tokens, the same on all. max_seqlen: no effect.
    Shapes, results and errors are those of the module's docstring.
    """
    return _packed(
        (q, k, v), cu_seqlens, "contiguous",
        group, return_attn_probs, dropout_p, softmax_scale, causal, window_size, alibi_slopes, deterministic
    )  # fmt: skip


def zigzag_ring_flash_attn_varlen_qkvpacked_func(
    qkv: Tensor, cu_seqlens: Tensor, max_seqlen: int,
    dropout_p: float = 0.0, softmax_scale: float | None = None, causal: bool = False,
    window_size: WindowSize = (-1, -1), alibi_slopes: Tensor | None = None, deterministic: bool = False,
    return_attn_probs: bool = False, group: dist.ProcessGroup | None = None,
) -> TensorOrTuple:  # fmt: skip
    """`zigzag_ring_flash_attn_varlen_func` of q, k and v in one tensor."""
    return _packed(
        (qkv,), cu_seqlens, "zigzag",
        group, return_attn_probs, dropout_p, softmax_scale, causal, window_size, alibi_slopes, deterministic
    )  # fmt: skip


def zigzag_ring_flash_attn_varlen_kvpacked_func(
    q: Tensor, kv: Tensor, cu_seqlens: Tensor, max_seqlen: int,
    dropout_p: float = 0.0, softmax_scale: float | None = None, causal: bool = False,
    window_size: WindowSize = (-1, -1), alibi_slopes: Tensor | None = None, deterministic: bool = False,
    return_attn_probs: bool = False, group: dist.ProcessGroup | None = None,
) -> TensorOrTuple:  # fmt: skip
    """`zigzag_ring_flash_attn_varlen_func` of k and v in one tensor."""
    return _packed(
        (q, kv), cu_seqlens, "zigzag",
        group, return_attn_probs, dropout_p, softmax_scale, causal, window_size, alibi_slopes, deterministic
    )  # fmt: skip


def zigzag_ring_flash_attn_varlen_func(
    q: Tensor, k: Tensor, v: Tensor, cu_seqlens: Tensor, max_seqlen: int,
    dropout_p: float = 0.0, softmax_scale: float | None = None, causal: bool = False,
    window_size: WindowSize = (-1, -1), alibi_slopes: Tensor | None = None, deterministic: bool = False,
    return_attn_probs: bool = False, group: dist.ProcessGroup | None = None,
) -> TensorOrTuple:  # fmt: skip
    """Packed documents, each in 2 * ranks chunks, of which rank r has the r-th and, after it, the r-th from the end.

    cu_seqlens: int32 or int64 (documents + 1,), bounds of one rank's tokens, the same on all, even lengths.
    max_seqlen: no effect. Shapes, results and errors are those of the module's docstring.
    """
    return _packed(
        (q, k, v), cu_seqlens, "zigzag",
        group, return_attn_probs, dropout_p, softmax_scale, causal, window_size, alibi_slopes, deterministic
    )  # fmt: skip


# ---- packed, the stream of all documents in contiguous chunks ----


def llama3_flash_attn_prepare_cu_seqlens(
    cu_seqlens: Tensor, causal: bool, rank: int, world_size: int
) -> tuple[Tensor, Tensor, int, int, slice]:
    """What `llama3_flash_attn_varlen_func` is given about the documents of one rank.

    Arguments:
        cu_seqlens: int32 or int64 (documents + 1,), bounds of all ranks' tokens, a multiple of world_size.
        causal: whether keys after a rank's last query are left out of its keys.
        rank, world_size: of the group.

    Returns:
        cu_seqlens_q, cu_seqlens_k: like cu_seqlens, bounds of the documents that have tokens on this rank: of its
            tokens, and of the keys that they see.
        max_seqlen_q, max_seqlen_k: the longest of each.
        local_k_slice: where these keys are among all ranks' tokens.

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
    with torch.inference_mode(False):  # whose tensors count no versions: ranks would ask each other in every call
        cu_seqlens_q, cu_seqlens_k = (cu_seqlens.new_tensor(values) for values in (of_queries, of_keys))
    _prepared.put(cu_seqlens_q, bounds)
    return cu_seqlens_q, cu_seqlens_k, _longest(of_queries), _longest(of_keys), slice(own[0], end)


def llama3_flash_attn_varlen_qkvpacked_func(
    qkv: Tensor, cu_seqlens_q: Tensor, cu_seqlens_k: Tensor, max_seqlen_q: int,
    max_seqlen_k: int, heads_k_stride: int, local_k_slice: slice,
    dropout_p: float = 0.0, softmax_scale: float | None = None, causal: bool = False,
    window_size: WindowSize = (-1, -1), alibi_slopes: Tensor | None = None, deterministic: bool = False,
    return_attn_probs: bool = False, group: dist.ProcessGroup | None = None,
) -> TensorOrTuple:  # fmt: skip
    """`llama3_flash_attn_varlen_func` of q, k and v in one tensor."""
    return _llama3(
        (qkv,), cu_seqlens_q, local_k_slice,
        group, return_attn_probs, dropout_p, softmax_scale, causal, window_size, alibi_slopes, deterministic
    )  # fmt: skip


def llama3_flash_attn_varlen_kvpacked_func(
    q: Tensor, kv: Tensor, cu_seqlens_q: Tensor, cu_seqlens_k: Tensor, max_seqlen_q: int,
    max_seqlen_k: int, heads_k_stride: int, local_k_slice: slice,
    dropout_p: float = 0.0, softmax_scale: float | None = None, causal: bool = False,
    window_size: WindowSize = (-1, -1), alibi_slopes: Tensor | None = None, deterministic: bool = False,
    return_attn_probs: bool = False, group: dist.ProcessGroup | None = None,
) -> TensorOrTuple:  # fmt: skip
    """`llama3_flash_attn_varlen_func` of k and v in one tensor."""
    return _llama3(
        (q, kv), cu_seqlens_q, local_k_slice,
        group, return_attn_probs, dropout_p, softmax_scale, causal, window_size, alibi_slopes, deterministic
    )  # fmt: skip


def llama3_flash_attn_varlen_func(
    q: Tensor, k: Tensor, v: Tensor, cu_seqlens_q: Tensor, cu_seqlens_k: Tensor, max_seqlen_q: int,
    max_seqlen_k: int, heads_k_stride: int, local_k_slice: slice,
    dropout_p: float = 0.0, softmax_scale: float | None = None, causal: bool = False,
    window_size: WindowSize = (-1, -1), alibi_slopes: Tensor | None = None, deterministic: bool = False,
    return_attn_probs: bool = False, group: dist.ProcessGroup | None = None,
) -> TensorOrTuple:  # fmt: skip
    """Packed documents of any lengths, their stream in contiguous chunks of equal length, one a rank.

    cu_seqlens_q and local_k_slice are of `llama3_flash_attn_prepare_cu_seqlens`, which knows all documents. Of a copy
    of this cu_seqlens_q the ranks ask each other for theirs, once for each tensor: all ranks copy it, or none.
    cu_seqlens_k, max_seqlen_q, max_seqlen_k and heads_k_stride: no effect. Shapes, results and errors are those of the
    module's docstring.
    """
    return _llama3(
        (q, k, v), cu_seqlens_q, local_k_slice,
        group, return_attn_probs, dropout_p, softmax_scale, causal, window_size, alibi_slopes, deterministic
    )  # fmt: skip


# ---- what they have in common ----


@torch.compiler.disable
def _dense(inputs, division, group, return_attn_probs, *options):
    found = kept_for(group)
    documents = error = None
    try:
        inputs = _separate(inputs, is_packed=False)
        documents = 0, inputs[0].shape[1] * found.transport.size
        if division == "zigzag" and inputs[0].shape[1] % 2:
            raise RuntimeError(f"q: expected two chunks of one length, got {inputs[0].shape[1]} tokens")
    except Exception as raised:  # of any kind: the other ranks wait to be told
        error = raised
    raise_on_all_ranks(found, error)
    return _attend(found, inputs, False, division, documents, return_attn_probs, options)


@torch.compiler.disable
def _packed(inputs, cu_seqlens, division, group, return_attn_probs, *options):
    found = kept_for(group)
    documents = error = None
    try:
        inputs = _separate(inputs, is_packed=True)
        bounds = _read("cu_seqlens", cu_seqlens)
        documents = tuple(bound * found.transport.size for bound in bounds)
        if division == "zigzag" and any(bound % 2 for bound in bounds):
            raise RuntimeError(
                f"cu_seqlens: expected two chunks of one length in each document, got bounds {arguments.shown(bounds)}"
            )
    except Exception as raised:
        error = raised
    raise_on_all_ranks(found, error)
    return _attend(found, inputs, True, division, documents, return_attn_probs, options)


@torch.compiler.disable
def _llama3(inputs, cu_seqlens_q, local_k_slice, group, return_attn_probs, *options):
    found = kept_for(group)
    documents = starts = error = None
    tokens = 0
    try:
        inputs = _separate(inputs, is_packed=True)
        tokens, slopes = inputs[0].shape[0], options[4]
        if isinstance(slopes, Tensor) and slopes.dim() != 1:  # a rank does not know the number of all documents
            raise RuntimeError(f"alibi_slopes: expected shape (nheads,), got {list(slopes.shape)}")
        arguments.check_tensors(("cu_seqlens_q",), (cu_seqlens_q,))
        documents = _prepared.get(cu_seqlens_q) or found.documents.get(cu_seqlens_q)
        if documents is None:
            starts = _document_starts(cu_seqlens_q, local_k_slice, found.transport.rank, tokens)
    except Exception as raised:
        error = raised
    raise_on_all_ranks(found, error)
    if documents is None:
        documents = _gathered_documents(found.transport, starts, tokens)
        found.documents.put(cu_seqlens_q, documents)
    return _attend(found, inputs, True, "stream", documents, return_attn_probs, options)


def _attend(found: Kept, inputs, is_packed: bool, division: str, documents, return_attn_probs, options):
    plan = plan_of(found, is_packed, division, documents)
    dropout_p, softmax_scale, causal, window_size, alibi_slopes, deterministic = options
    result = flash_attn_cp_func(
        *inputs, dropout_p, softmax_scale, causal, window_size, 0.0, alibi_slopes, deterministic, return_attn_probs,
        plan=plan,
    )  # fmt: skip
    return (*result[:2], None) if return_attn_probs else result


def _separate(inputs, is_packed: bool):
    """(q, k, v) of (qkv,), (q, kv) or (q, k, v)."""
    axis = 1 if is_packed else 2
    *first, last = inputs
    if len(inputs) < 3:
        arguments.check_packed("qkv" if not first else "kv", last, 3 - len(first), is_packed)
        inputs = *first, *last.unbind(axis)
    arguments.check_tensors(("q", "k", "v"), inputs)
    if inputs[0].dim() != axis + 2:
        axes = "tokens, nheads, head_dim" if is_packed else "batch, seqlen, nheads, head_dim"
        raise RuntimeError(f"q: expected shape ({axes}), got {list(inputs[0].shape)}")
    return inputs


def _read(name: str, x) -> tuple[int, ...]:
    """Bounds of documents on the host."""
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


def _longest(bounds) -> int:
    return max((b - a for a, b in zip(bounds, bounds[1:])), default=0)


def _document_starts(cu_seqlens_q, local_k_slice, rank: int, tokens: int) -> list[int]:
    """Where documents with tokens of this rank begin in the stream, as far as it knows."""
    bounds = _read("cu_seqlens_q", cu_seqlens_q)
    if bounds[-1] != tokens:
        raise RuntimeError(f"cu_seqlens_q: expected the {tokens} tokens of q as last value, got {bounds[-1]}")
    start = local_k_slice.start if isinstance(local_k_slice, slice) else None
    if not isinstance(start, int) or not 0 <= start <= rank * tokens:
        raise RuntimeError(
            f"local_k_slice: expected a slice that starts in 0 to {rank * tokens}, got {arguments.shown(local_k_slice)}"
        )
    return sorted({start, *(rank * tokens + bound for bound in bounds[1:-1])})


def _gathered_documents(transport, starts: list[int], tokens: int) -> tuple[int, ...]:
    """Bounds of all ranks' documents, those without tokens left out; all ranks call it."""
    counts = compare_on_all_ranks(transport, f"tokens {tokens}", None, "q", len(starts))
    everyone = transport.all_gather_ints(starts + [0] * (max(counts) - len(starts)))
    total = tokens * transport.size
    return (0, *sorted({start for own in everyone for start in own if 0 < start < total}), total)
