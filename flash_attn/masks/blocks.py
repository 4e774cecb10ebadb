"""Masks of blocks, and bits from functions of positions."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from .checks import dtype_name, require
from .factors import WORD_BITS, pack_bits, strips

PARTIAL = 1


def block_map(lists: Sequence[tuple[int, Tensor, Tensor]], num_blocks_k: int) -> Tensor:
    """Uint8 (b_m, h_m, nq, nk) from (class, counts, indices) of each list of blocks: the class of the last list that
    has the block, so the highest comes last.

    counts: int (b_m, h_m, nq); indices: int (b_m, h_m, nq, most). Later entries than the count, and indices of no
    block, mean nothing.
    """
    _, first_count, _ = lists[0]
    result = first_count.new_zeros(*first_count.shape, num_blocks_k + 1, dtype=torch.uint8)  # the last is for no block
    for kind, count, indices in lists:
        indices = indices.long()
        given = torch.arange(indices.shape[-1], device=indices.device) < count[..., None]
        given = given & (indices >= 0) & (indices < num_blocks_k)
        result.scatter_(-1, indices.where(given, num_blocks_k), kind)
    return result[..., :-1].contiguous()


def function_bits(
    mask_mod: Callable[..., Tensor], batch: int, heads: int, sq: int, sk: int, device: torch.device | str | None
) -> Tensor:
    """Bits of mask_mod(b, h, q_idx, kv_idx), evaluated in strips of rows."""
    b, h, cols = (torch.arange(size, device=device) for size in (batch, heads, sk))
    words = torch.empty(batch, heads, sq, -(-sk // WORD_BITS), dtype=torch.int32, device=device)
    evaluate = _over_axes(mask_mod)
    for rows in strips(sq if words.numel() else 0, batch * heads * sk):
        seen = evaluate(b, h, torch.arange(rows.start, rows.stop, device=device), cols)
        words[:, :, rows] = _as_bits(seen)
    return words


def _as_bits(seen: Tensor) -> Tensor:
    """The result of a mask_mod as bits."""
    require(seen.dtype == torch.bool, "mask_mod", "a bool tensor from it", dtype_name(seen.dtype))
    return pack_bits(seen)


def _over_axes(mask_mod: Callable[..., Tensor]) -> Callable[..., Tensor]:
    """mask_mod, which takes single indices, over (b,), (h,), (rows,), (cols,): bool (b, h, rows, cols)."""
    for axes in ((None, None, None, 0), (None, None, 0, None), (None, 0, None, None), (0, None, None, None)):
        mask_mod = torch.vmap(mask_mod, in_dims=axes)
    return mask_mod


def partial_block_bits(
    mask_mod: Callable[..., Tensor], kinds: Tensor, block_size: tuple[int, int], sq: int, sk: int
) -> Tensor:
    """Bits of mask_mod in the partial blocks of a block_map, 0 elsewhere. Reads from the device which they are."""
    batch, heads, nq, nk = kinds.shape
    block_q, block_k = block_size
    if block_k % WORD_BITS:
        return function_bits(mask_mod, batch, heads, sq, sk, kinds.device)
    blocks = (kinds == PARTIAL).nonzero()
    words_k = block_k // WORD_BITS
    words = torch.zeros(batch, heads, nq, block_q, nk, words_k, dtype=torch.int32, device=kinds.device)
    mask_mod = torch.vmap(mask_mod, in_dims=(None, None, None, 0))
    mask_mod = torch.vmap(torch.vmap(mask_mod, in_dims=(None, None, 0, None)))
    for part in strips(len(blocks), block_q * block_k):
        b, h, q, k = blocks[part].unbind(1)
        # rows and keys beyond the end are evaluated as the last one: a mask_mod may read a table at them
        rows = (q[:, None] * block_q + torch.arange(block_q, device=q.device)).clamp(max=sq - 1)
        cols = (k[:, None] * block_k + torch.arange(block_k, device=q.device)).clamp(max=sk - 1)
        words[b, h, q, :, k] = _as_bits(mask_mod(b, h, rows, cols))
    return words.view(batch, heads, nq * block_q, nk * words_k)[:, :, :sq, : -(-sk // WORD_BITS)].contiguous()
