"""A mask of documents as a packed call, whose work tiles begin where documents do."""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn import Parameter

from .attention_mask import AttentionMask
from .factors import INT_MAX

_TOKENS_PER_SEQUENCE = 64  # at least, of more than _MOST_SEQUENCES: each costs a work tile, which may be empty
_MOST_SEQUENCES = 32


def packed_documents(mask: object, inputs: tuple[Tensor, ...], has_sinks: bool) -> tuple[Tensor, Tensor] | None:
    """cu_seqlens of q and k of the packed call that computes a dense one, without copies of its inputs: q, k and v, or
    two or one of them packed. None where there is no such call.

    Rows, columns and batch entries have other numbers there, so the call may have no dropout, no bias and no numbers of
    batch entries.
    """
    documents = mask._documents if isinstance(mask, AttentionMask) else None
    if documents is None or not all(type(x) in (Tensor, Parameter) and x.dim() >= 4 for x in inputs):
        return None
    assert isinstance(mask, AttentionMask)
    first = inputs[0]
    batch, seqlen = first.shape[:2]
    entries, bounds = documents.shape
    fits = (
        seqlen == mask.seqlen_q
        and entries in (1, batch)
        and bounds > 1
        and 0 < batch * seqlen <= INT_MAX
        and batch * bounds <= max(batch * seqlen // _TOKENS_PER_SEQUENCE, _MOST_SEQUENCES)
        and first.dtype.itemsize > 1
        and all(_is_packable(x, first, documents) for x in inputs)
    )
    if not fits:
        return None
    if batch == 1 and not has_sinks:  # with sinks rows of no document have them as LSE
        return documents[0], documents[0]
    return None if len(inputs) == 1 else _with_gaps(documents, batch, seqlen)


def _is_packable(x: Tensor, first: Tensor, documents: Tensor) -> bool:
    return (
        (x.dtype, x.device, x.shape[:2]) == (first.dtype, documents.device, first.shape[:2])
        and x.layout == torch.strided
        and (x.shape[0] == 1 or x.stride(0) == x.shape[1] * x.stride(1))
    )


def _with_gaps(documents: Tensor, batch: int, seqlen: int) -> tuple[Tensor, Tensor]:
    """cu_seqlens of queries and keys. Rows between documents are two sequences: queries without keys, and the keys."""
    bounds = documents.clamp(0, seqlen).cummax(-1).values.expand(batch, -1)
    bounds = bounds + torch.arange(batch, device=documents.device, dtype=bounds.dtype)[:, None] * seqlen
    first, ends = bounds.new_zeros(1), bounds[:, -1]
    before = torch.cat((first, ends[:-1]))[:, None]
    twice = torch.cat((bounds[:, :1], bounds), 1).flatten()  # each entry's first bound ends both sequences before it
    queries = torch.cat((first, twice, torch.full_like(first, batch * seqlen)))
    keys = torch.cat((first, torch.cat((before, bounds), 1).flatten(), ends[-1:]))
    return queries.int(), keys.int()
