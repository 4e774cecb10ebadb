"""A mask of documents as a packed call, whose work tiles begin where documents do."""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn import Parameter

from flash_attn._types import TensorOrTuple
from flash_attn.ops import conditions, context

from .attention_mask import AttentionMask
from .factors import INT_MAX

_TOKENS_PER_SEQUENCE = 64  # at least, of more than _MOST_SEQUENCES: each costs a work tile, which may be empty
_MOST_SEQUENCES = 32
_is_exporting = getattr(torch.compiler, "is_exporting", lambda: False)  # torch 2.7 and newer


def packed_documents(mask: object, inputs: tuple[Tensor, ...], has_sinks: bool) -> tuple[Tensor, Tensor] | None:
    """cu_seqlens of q and k of the packed call that computes a dense one, without copies of its inputs: q, k and v, or
    two or one of them packed. None where there is no such call, and for shapes that no call takes.

    The packed call numbers rows, columns and batch entries otherwise. So the dense call may have no dropout, no bias
    and no values for each batch entry. It may not be batch-invariant, because the choice here depends on the batch.
    """
    documents = mask._documents if isinstance(mask, AttentionMask) else None
    if documents is None or not all(type(x) in (Tensor, Parameter) for x in inputs) or not _have_one_form(inputs):
        return None
    assert isinstance(mask, AttentionMask) and mask.seqlen_q is not None
    first = inputs[0]
    batch, seqlen = first.shape[:2]
    entries, bounds = documents.shape
    rows = batch * seqlen
    fits = (
        _is_known(seqlen == mask.seqlen_q)
        and (_is_known(entries == 1) or _is_known(entries == batch))
        and _is_known(bounds > 1)
        and _is_known(rows > 0)
        and _is_known(rows <= INT_MAX)
        and (_is_known(batch * bounds <= _MOST_SEQUENCES) or _is_known(batch * bounds * _TOKENS_PER_SEQUENCE <= rows))
        and first.dtype.itemsize > 1
        and all(_is_packable(x, first, documents) for x in inputs)
    )
    if not fits:
        return None
    # With sinks, rows of no document need a sequence, whose LSE is the sink. A trace may run with more entries.
    if _is_known(batch == 1) and not has_sinks and (torch.compiler.is_compiling() or not context.is_tracing()):
        return documents[0], documents[0]
    return None if len(inputs) == 1 else _with_gaps(documents, batch, seqlen)


def _have_one_form(inputs: tuple[Tensor, ...]) -> bool:
    """Whether ranks, heads of k and v and the head dim of q and k fit, so that errors show shapes of the dense call."""
    first, *others = inputs
    if len(inputs) == 1:
        return first.dim() == 5 and _is_known(first.shape[2] == 3)
    rank = 5 if len(inputs) == 2 else 4
    k, v = others[0], others[-1]
    return (
        first.dim() == 4
        and k.dim() == v.dim() == rank
        and (rank == 4 or _is_known(k.shape[2] == 2))
        and _is_known(k.shape[-1] == first.shape[-1])
        and _is_known(k.shape[-2] == v.shape[-2])
    )


def _is_packable(x: Tensor, first: Tensor, documents: Tensor) -> bool:
    return (
        (x.dtype, x.device, x.layout) == (first.dtype, documents.device, torch.strided)
        and all(x is first or _is_known(x.shape[i] == first.shape[i]) for i in (0, 1))
        and (_is_known(x.shape[0] == 1) or _is_known(x.stride(0) == x.shape[1] * x.stride(1)))
    )


def _is_known(condition: conditions.Condition) -> bool:
    """Whether a condition on sizes holds; exported code must not guard on those that its caller calls dynamic."""
    if not _is_exporting():
        return conditions.is_known(condition)
    from torch.fx.experimental import symbolic_shapes

    return symbolic_shapes.statically_known_true(condition)  # type: ignore[arg-type]  # no tensor outside of traces


def _with_gaps(documents: Tensor, batch: int, seqlen: int) -> tuple[Tensor, Tensor]:
    """cu_seqlens of queries and keys. Rows between documents are two sequences: queries without keys, and the keys."""
    bounds = (
        documents.expand(batch, -1)
        + torch.arange(batch, device=documents.device, dtype=documents.dtype)[:, None] * seqlen
    )
    first, ends = bounds.new_zeros(1), bounds[:, -1]
    before = torch.cat((first, ends[:-1]))[:, None]
    twice = torch.cat((bounds[:, :1], bounds), 1).flatten()  # each entry's first bound ends both sequences before it
    queries = torch.cat((first, twice, torch.full_like(first, batch * seqlen)))
    keys = torch.cat((first, torch.cat((before, bounds), 1).flatten(), ends[-1:]))
    return queries.int(), keys.int()


def dense_results(result: TensorOrTuple, shape: torch.Size, returns_lse: bool) -> TensorOrTuple:
    """The results of a packed call as those of the dense one. shape: (batch, seqlen)."""
    if not isinstance(result, tuple):
        return _writable(result.unflatten(0, shape))
    out, *others = result
    if returns_lse:
        lse, *others = others
        lse = lse.unflatten(1, shape).transpose(0, 1).contiguous()
        others = [_writable(lse), *others]  # compilers make others a tuple
    return (_writable(out.unflatten(0, shape)), *others)


def _writable(x: Tensor) -> Tensor:
    """A result that is a view. One made without gradients may not be written later with them, so it becomes none."""
    if torch.is_grad_enabled() or (not torch.compiler.is_compiling() and context.is_tracing()):
        return x
    alias: Tensor = torch.ops.aten._unsafe_view(x, x.shape)
    return alias


def is_by_head(alibi_slopes: object, q: Tensor) -> bool:
    """Whether slopes are (nheads,), for all batch entries. q: or qkv."""
    return isinstance(alibi_slopes, Tensor) and q.dim() > 1 and alibi_slopes.shape == q.shape[-2:-1]
