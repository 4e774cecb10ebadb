"""Tiling: ranges of (batch, K/V head) pairs, blocks of queries, blocks of keys.

A tile of scores has at most about TILE_ELEMENTS elements for any problem, which bounds the temporary memory and
keeps a tile in the processor's cache. The query heads of a group, which have one K/V head, are stacked as rows of one
matrix, so K and V are never repeated and their gradients are summed by the matrix product.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import torch

from .scores import ScoreRule, Tile

TILE_ELEMENTS = 1 << 20
STACKED_ROWS = 256
MIN_COLS = 512
MAX_COLS = 8192


def blocks(start: int, stop: int, size: int) -> Iterator[tuple[int, int]]:
    """[start, stop) as consecutive blocks (lo, hi) of at most `size`."""
    for lo in range(start, stop, size):
        yield lo, min(lo + size, stop)


def tile_shape(sq: int, sk: int, group: int) -> tuple[int, int]:
    """Query rows and key columns of one tile, for `group` query heads per K/V head."""
    rows = max(1, min(sq, max(16, STACKED_ROWS // group // 16 * 16)))
    cols = min(MAX_COLS, max(MIN_COLS, TILE_ELEMENTS // (16 * rows * group)))
    return rows, max(1, min(sk, cols))


@dataclass(frozen=True)
class HeadRange:
    """Some batch entries and K/V heads that are computed together, and the layout of their matrices."""

    b0: int
    b1: int
    kv0: int
    kv1: int
    group: int

    @property
    def pairs(self) -> int:
        return (self.b1 - self.b0) * (self.kv1 - self.kv0)

    @property
    def heads(self) -> slice:
        return slice(self.kv0 * self.group, self.kv1 * self.group)

    def tile(self, row0: int, row1: int, col0: int, col1: int) -> Tile:
        return Tile(slice(self.b0, self.b1), self.heads, row0, row1, col0, col1)

    def keys(self, x: torch.Tensor, lo: int, hi: int, dtype: torch.dtype) -> torch.Tensor:
        """Rows [lo, hi) of k or v (b, sk, h_k, d) as (pairs, hi - lo, d) in the compute dtype, a new tensor."""
        view = x[self.b0 : self.b1, lo:hi, self.kv0 : self.kv1].transpose(1, 2)
        stacked = view.to(dtype, copy=True, memory_format=torch.contiguous_format)
        return stacked.view(self.pairs, hi - lo, x.shape[-1])

    def queries(self, x: torch.Tensor, row0: int, row1: int, dtype: torch.dtype) -> torch.Tensor:
        """Rows [row0, row1) of a (b, sq, h, d) tensor as a new (pairs, group * rows, d) in the compute dtype."""
        view = x[self.b0 : self.b1, row0:row1, self.heads].transpose(1, 2)
        stacked = view.to(dtype, copy=True, memory_format=torch.contiguous_format)
        return stacked.view(self.pairs, self.group * (row1 - row0), x.shape[-1])

    def key_values(self, x: torch.Tensor, lo: int, hi: int) -> torch.Tensor:
        """Keys [lo, hi) of a (b, h_k, sk) tensor as (pairs, hi - lo, 1)."""
        return x[self.b0 : self.b1, self.kv0 : self.kv1, lo:hi].reshape(self.pairs, hi - lo, 1)

    def row_values(self, x: torch.Tensor, row0: int, row1: int) -> torch.Tensor:
        """Rows [row0, row1) of a (b, h, sq) tensor as (pairs, group * rows, 1)."""
        return x[self.b0 : self.b1, self.heads, row0:row1].reshape(self.pairs, self.group * (row1 - row0), 1)

    def store_rows(self, target: torch.Tensor, row0: int, row1: int, x: torch.Tensor) -> None:
        """Write (pairs, group * rows, d) into rows [row0, row1) of a (b, sq, h, d) tensor."""
        view = target[self.b0 : self.b1, row0:row1, self.heads].transpose(1, 2)
        view.copy_(x.view(view.shape))

    def store_row_values(self, target: torch.Tensor, row0: int, row1: int, x: torch.Tensor) -> None:
        """Write (pairs, group * rows, 1) into rows [row0, row1) of a (b, h, sq) tensor."""
        view = target[self.b0 : self.b1, self.heads, row0:row1]
        view.copy_(x.view(view.shape))

    def store_keys(self, target: torch.Tensor, lo: int, hi: int, x: torch.Tensor) -> None:
        """Write (pairs, hi - lo, d) into rows [lo, hi) of a (b, sk, h_k, d) tensor."""
        view = target[self.b0 : self.b1, lo:hi, self.kv0 : self.kv1].transpose(1, 2)
        view.copy_(x.view(view.shape))

    def by_head(self, s: torch.Tensor, rows: int) -> torch.Tensor:
        """A (pairs, group * rows, cols) tile seen as (batches, heads, rows, cols)."""
        return s.view(self.b1 - self.b0, (self.kv1 - self.kv0) * self.group, rows, s.shape[-1])


def visited_tiles(
    rule: ScoreRule, head_range: HeadRange, row0: int, row1: int, cols: int, sq: int, sk: int
) -> Iterator[tuple[Tile, torch.Tensor | None]]:
    """(tile, visible) of each tile of these rows of which a score takes part; visible: see ScoreRule.visible."""
    lo, hi = rule.key_range(row0, row1, sq, sk)
    if rule.tensors is not None:
        first, stop = rule.tensors.key_bounds(head_range.tile(row0, row1, lo, hi), sk)
        lo, hi = max(lo, first), min(hi, stop)
    for col0, col1 in blocks(lo, hi, cols):
        tile = head_range.tile(row0, row1, col0, col1)
        visible = rule.visible(tile, sq, sk)
        if visible is None or visible.any():
            yield tile, visible


def head_ranges(batch: int, kv_heads: int, group: int, rows: int, cols: int) -> Iterator[HeadRange]:
    """Cover batch x kv_heads; whole batch entries go together when several fit into one tile budget."""
    pairs = max(1, TILE_ELEMENTS // (group * rows * cols))
    batch_step = max(1, pairs // kv_heads)
    kv_step = min(kv_heads, pairs)
    for b0, b1 in blocks(0, batch, batch_step):
        for kv0, kv1 in blocks(0, kv_heads, kv_step):
            yield HeadRange(b0, b1, kv0, kv1, group)
