"""Indices of rows as a block_table of pages of one row."""

from __future__ import annotations

import torch
from torch import Tensor

from flash_attn.ops.triton.dispatch import device_of, kernel_serves, power_of_two


def existing_first(indices: Tensor, count: int, length: Tensor | None) -> tuple[Tensor, Tensor]:
    """(a permutation (..., topk) that puts the indices of rows that exist first, how many they are (...) int32).

    length: int32 that indices (..., topk) is broadcast with but for its last axis: the leftmost ones alone count.
    """
    exists = (indices >= 0) & (indices < count)
    if length is not None:
        exists = exists & (torch.arange(indices.shape[-1], device=indices.device) < length[..., None])
    counts = exists.sum(-1, keepdim=True)
    place = torch.where(exists, exists.cumsum(-1), counts + (~exists).cumsum(-1)) - 1  # a sort would be slower
    every = torch.arange(indices.shape[-1], device=indices.device).expand_as(place)
    order = torch.empty_like(place).scatter_(-1, place, every)
    return order, counts.squeeze(-1).to(torch.int32)


def selected_table(
    indices: Tensor, length: Tensor | None, count: int, page_size: int, page_step: int, row_step: int
) -> tuple[Tensor, Tensor]:
    """(block_table (queries, topk) int32, how many of its entries exist (queries,) int32) of indices (batch, seqlen_q,
    topk): entries that exist come first, those behind them have any value.

    An index is page * page_size + row, of `count` rows; its entry is page * page_step + row * row_step. length:
    (batch,) or None: how many of the leftmost indices count.
    """
    if kernel_serves(indices):
        return launch_selected_table(indices, length, count, page_size, page_step, row_step)
    order, counts = existing_first(indices, count, None if length is None else length[:, None])
    table = indices.long().gather(-1, order)
    table = table // max(page_size, 1) * page_step + table % max(page_size, 1) * row_step
    return table.flatten(0, 1).to(torch.int32), counts.flatten()


def launch_selected_table(
    indices: Tensor, length: Tensor | None, count: int, page_size: int, page_step: int, row_step: int
) -> tuple[Tensor, Tensor]:
    """The same by one kernel: PyTorch's operations, two dozen of them, take as long as attention to the rows does."""
    from flash_mla._selection_kernel import selected_table_kernel

    batch, seqlen_q, topk = indices.shape
    queries = batch * seqlen_q
    table = torch.empty(queries, topk, dtype=torch.int32, device=indices.device)
    counts = torch.empty(queries, dtype=torch.int32, device=indices.device)
    if table.numel() == 0:
        return table, counts.zero_()
    with device_of(indices):
        selected_table_kernel[(queries,)](
            table, counts, indices, counts if length is None else length.contiguous(), seqlen_q, topk, count,
            max(page_size, 1), page_step, row_step, *indices.stride(), HAS_LENGTHS=length is not None,
            BLOCK=min(power_of_two(topk), 2048),
        )  # fmt: skip
    return table, counts
