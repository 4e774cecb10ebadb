"""Ranges of keys and queries that the constructors of masks need. Nothing here reads a device but `merged_slices`."""

from __future__ import annotations

import torch
from torch import Tensor

from .checks import INTEGERS, check_tensor, require
from .factors import INT_MAX

MOST_RANGES = 2


def stacked(*bounds: Tensor) -> Tensor:
    """Bounds as the last axis of int32; values beyond 32 bits count as the nearest ones."""
    bounds = torch.broadcast_tensors(*bounds)
    return torch.stack([as_int32(x) for x in bounds], -1)


def as_int32(x: Tensor) -> Tensor:
    return x.clamp(-INT_MAX - 1, INT_MAX).int() if x.dtype == torch.int64 else x.int()


def document_bounds(cu: Tensor, seqlen: int) -> tuple[Tensor, Tensor]:
    """Begin and end, (..., seqlen) each, of the document of each row; rows of none have an empty one.

    cu: int64 (..., n + 1), cumulative lengths that do not decrease.
    """
    rows = torch.arange(seqlen, device=cu.device, dtype=cu.dtype).expand(*cu.shape[:-1], seqlen).contiguous()
    index = torch.searchsorted(cu, rows, right=True)
    inside = (index > 0) & (index < cu.shape[-1])
    begin, end = (cu.gather(-1, (index - shift).clamp(0, cu.shape[-1] - 1)) for shift in (1, 0))
    return begin.where(inside, 0), end.where(inside, 0)


def run_bounds(ids: Tensor) -> tuple[Tensor, Tensor]:
    """Begin and end, like ids, of the run of equal consecutive ids that each element of the last axis is in."""
    size = ids.shape[-1]
    rows = torch.arange(size, device=ids.device).expand(ids.shape)
    changes = torch.ones_like(ids, dtype=torch.bool)
    changes[..., 1:] = ids[..., 1:] != ids[..., :-1]
    begin = rows.where(changes, 0).cummax(-1).values
    next_begin = rows.where(changes, size).roll(-1, -1)
    next_begin[..., -1:] = size
    return begin, next_begin.flip(-1).cummin(-1).values.flip(-1)


def sequence_bounds(name: str, cu_seqlens: Tensor) -> Tensor:
    """Where the packed sequences of an argument begin and end, (b + 1,). No sequences are one without rows."""
    check_tensor(name, cu_seqlens, INTEGERS, ("b + 1",))
    require(cu_seqlens.shape[0] > 0, name, "shape (b + 1)", list(cu_seqlens.shape))
    cu = cu_seqlens.long().cummax(0).values
    return cu if cu.shape[0] > 1 else cu.repeat(2)


class PackedRows:
    """The rows of packed sequences: `index` of the sequence and `position` in it, (total,) each.

    Rows of no sequence have the index of the first or the last one and what positions it has there. `segment` tells
    them apart: 1 + index, 0 before the first sequence and b + 1 after the last one.
    """

    def __init__(self, cu: Tensor, total: int):
        """cu: of `sequence_bounds`."""
        self.cu = cu
        rows = torch.arange(total, device=self.cu.device)
        self.segment = torch.searchsorted(self.cu, rows, right=True)
        self.index = (self.segment - 1).clamp(0, self.cu.shape[0] - 2)
        self.position = rows - self.begin

    @property
    def inside(self) -> Tensor:
        """Whether the row belongs to a sequence."""
        return self.segment == self.index + 1

    @property
    def begin(self) -> Tensor:
        return self.cu[self.index]

    @property
    def length(self) -> Tensor:
        """Of each row's sequence."""
        return self.cu[self.index + 1] - self.begin


def tree_queries(tin: Tensor, tout: Tensor, rows: PackedRows | None) -> tuple[Tensor, Tensor]:
    """The queries [begin, end) that see each key: those in the subtree of the key's node.

    tin, tout: (..., s) or packed (total,), with tin ascending along each sequence and 0 in rows of none.
    """
    tin, tout = tin.long(), tout.long()
    if rows is None:
        sorted_tin = tin.contiguous()
        return torch.searchsorted(sorted_tin, sorted_tin), torch.searchsorted(sorted_tin, tout.contiguous())
    # one ascending list for all sequences: each has its own 2^32 numbers
    tin, tout, offset = as_int32(tin), as_int32(tout), rows.segment << 32
    sorted_tin = tin + offset
    begin, end = torch.searchsorted(sorted_tin, sorted_tin), torch.searchsorted(sorted_tin, tout + offset)
    return begin - rows.begin, end - rows.begin


def slice_rows(q_ranges: Tensor, k_ranges: Tensor, types: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """(row, lo, hi) for each row of each slice, of those that see keys.

    types: 0 full, 1 causal (aligned at the bottom right), 2 inverse causal (aligned at the top left), 3 both.
    """
    lengths = (q_ranges[:, 1] - q_ranges[:, 0]).clamp(min=0)
    part = torch.repeat_interleave(torch.arange(len(lengths), device="cpu"), lengths)
    within = torch.arange(len(part), device="cpu") - (lengths.cumsum(0) - lengths)[part]
    row, (lo, hi) = q_ranges[part, 0] + within, k_ranges[part].unbind(1)
    is_causal, is_inverse = types[part] % 2 == 1, types[part] >= 2
    lo, hi = lo + within * is_inverse, hi - (q_ranges[part, 1] - 1 - row) * is_causal
    filled = lo < hi
    return row[filled], lo[filled], hi[filled]


def merged_slices(row: Tensor, lo: Tensor, hi: Tensor, seqlen_q: int) -> Tensor:
    """Int32 (seqlen_q, 2) or (seqlen_q, 4): the union of the ranges of each row, where two are enough. CPU tensors.

    Raises RuntimeError naming the first row that needs more.
    """
    order = (row * (INT_MAX + 1) + lo).argsort()
    row, lo, hi = row[order], lo[order], hi[order]
    first = torch.ones_like(row, dtype=torch.bool)
    first[1:] = row[1:] != row[:-1]
    reached = (row * (INT_MAX + 1) + hi).cummax(0).values - row * (INT_MAX + 1)  # the largest end so far, of the row
    begins = first.clone()
    begins[1:] |= lo[1:] > reached[:-1]
    number = begins.cumsum(0) - 1
    number -= number.where(first, 0).cummax(0).values  # within the row
    wrong = number >= MOST_RANGES
    if wrong.any():
        worst = int(row[wrong][0])
        needed = int(number[row == worst].max()) + 1
        expected = f"at most {MOST_RANGES} ranges of keys for each query"
        require(False, "q_ranges", expected, f"{needed} for query {worst}")
    width = 2 * (int(number.max()) + 1) if len(number) else 2
    result = row.new_zeros(seqlen_q, width)
    result[row[begins], 2 * number[begins]] = lo[begins]
    result.view(-1).scatter_reduce_(0, row * width + 2 * number + 1, reached, "amax")
    return result.int()
