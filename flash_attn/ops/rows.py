"""Batches as packed rows, and packed sequences of which only the first rows are in use.

All are differentiable torch operations whose sizes the host knows: nothing waits for the GPU.
"""

from __future__ import annotations

import torch
from torch import Tensor

from flash_attn.ops import arguments


def equal_steps(batch: int, step: int, device: torch.device) -> Tensor:
    """cu_seqlens (batch + 1) of sequences of one length."""
    return torch.arange(batch + 1, dtype=torch.int32, device=device) * step


def pack(x: Tensor, cu_seqlens: Tensor | None) -> tuple[Tensor, Tensor]:
    """(x as (total, heads, head_dim), its cu_seqlens): x may be a batch (batch, seqlen, heads, head_dim)."""
    if cu_seqlens is not None:
        return x, cu_seqlens
    return x.flatten(0, 1), equal_steps(x.shape[0], x.shape[1], x.device)


def unpack(q: Tensor, cu_seqlens: Tensor | None, out: Tensor, lse: Tensor) -> tuple[Tensor, Tensor]:
    """(out, lse) of packed rows as those of q, which `pack` was given with cu_seqlens."""
    if cu_seqlens is not None:
        return out, lse
    return torch.unflatten(out, 0, q.shape[:2]), torch.unflatten(lse, 1, q.shape[:2]).transpose(0, 1).contiguous()


def sequence_of_rows(cu_seqlens: Tensor, rows: int) -> Tensor:
    """The index of the sequence of each packed row; that of a row without a sequence is arbitrary, but valid."""
    bounds = cu_seqlens.clamp(0, rows).cummax(0).values[1:]
    index = torch.arange(rows, dtype=bounds.dtype, device=bounds.device)
    return torch.searchsorted(bounds, index, right=True).clamp(max=max(bounds.shape[0] - 1, 0))


def length_of_each(length: int | Tensor | None, cu_seqlens: Tensor) -> Tensor | None:
    """Lengths (batch,), from one int for all too; None passes."""
    if length is None or isinstance(length, torch.Tensor):
        return length
    return cu_seqlens.new_full((cu_seqlens.shape[0] - 1,), length)


class RowsInUse:
    """The rows in use of packed sequences, put before all others.

    cu_seqlens: (batch + 1,), of any contents: the running maximum counts, within the rows that exist.
    seqused: None (all), or int32 or int64 (batch,): how many of the first rows of each sequence are in use, at most its
    length. Results of the other rows are those of rows that belong to no sequence.
    """

    def __init__(self, cu_seqlens: Tensor, seqused: Tensor | None, x: Tensor, side: str = "q") -> None:
        """x: the packed tensor. side: q or k, as in the names of both arguments, which no backend sees unchanged."""
        self.cu_seqlens, self.order = cu_seqlens, None
        if seqused is None:
            return
        total = x.shape[0]
        batch = arguments.check_cu_seqlens(f"cu_seqlens_{side}", cu_seqlens, x.device)
        arguments.check_lengths(f"seqused_{side}", seqused, batch, x.device)
        if total == 0 or batch == 0:
            return
        bounds = cu_seqlens.clamp(0, total).cummax(0).values
        lengths = torch.minimum(seqused.clamp(min=0), bounds.diff())
        rows = torch.arange(total, dtype=bounds.dtype, device=bounds.device)
        sequence = torch.searchsorted(bounds, rows, right=True) - 1
        known = sequence.clamp(0, lengths.shape[0] - 1)
        unused = (sequence != known) | (rows - bounds[known] >= lengths[known])
        self.order = torch.argsort(unused.to(torch.int8), stable=True)
        self.cu_seqlens = torch.nn.functional.pad(lengths.cumsum(0, dtype=torch.int32), (1, 0))

    def gather(self, x: Tensor, axis: int = 0) -> Tensor:
        """x with the rows in use first."""
        if self.order is None:
            return x
        if x.element_size() == 1:  # no index_select of float8
            return x.view(torch.int8).index_select(axis, self.order).view(x.dtype)
        return x.index_select(axis, self.order)

    def scatter(self, x: Tensor, axis: int = 0) -> Tensor:
        """The inverse of gather."""
        return x if self.order is None else torch.empty_like(x).index_copy(axis, self.order, x)
