"""Tensors of the size of scores: the mask, the additive biases and their gradients, evaluated on tiles."""

from __future__ import annotations

import math
from collections.abc import Iterable
from typing import TYPE_CHECKING, NamedTuple

import torch

from ..eight_bit import EIGHT_BIT
from ..masks.checks import check_factors, check_packed_factors
from ..masks.factors import MaskFactors
from . import checks

if TYPE_CHECKING:
    from .scores import ScoreOptions, Tile
    from .varlen import Sequence


class ScoreTensors(NamedTuple):
    """mask: a dense mask. attn_bias: (b | 1, h | 1, sq | 1, sk | 1), in natural-log units. rel_bias: (h, 2 R + 1),
    added by the distance of key and query. hides: whether an entry of attn_bias is -inf, which hides as a mask does.

    Of packed sequences, before `sequence`: without the axis of batch.
    """

    mask: MaskFactors | None
    attn_bias: torch.Tensor | None
    rel_bias: torch.Tensor | None
    heads: int
    hides: bool

    @staticmethod
    def of(options: ScoreOptions, heads: int) -> ScoreTensors | None:
        """None if the call has neither a mask nor a bias."""
        mask, attn_bias, rel_bias = options.mask, options.attn_bias, options.rel_bias
        if mask is None and attn_bias is None and rel_bias is None:
            return None
        mask = mask if mask is not None and mask.tensors() else None
        hides = attn_bias is not None and bool((attn_bias == -math.inf).any())
        return ScoreTensors(mask, attn_bias, rel_bias, heads, hides)

    def entry(self, index: int) -> ScoreTensors:
        mask = None if self.mask is None else self.mask.entry(index)
        return self._replace(mask=mask, attn_bias=entry(self.attn_bias, index))

    def sequence(self, q0: int, q1: int, k0: int, k1: int) -> ScoreTensors:
        mask = None if self.mask is None else self.mask.sequence(q0, q1, k0, k1)
        return self._replace(mask=mask, attn_bias=sequence(self.attn_bias, q0, q1, k1 - k0))

    def visible(self, tile: Tile) -> torch.Tensor | None:
        """Bool, broadcastable to (batches, heads, rows, cols) of the tile; None where nothing hides a score."""
        rows, cols, seen = slice(tile.row0, tile.row1), slice(tile.col0, tile.col1), None
        if self.mask is not None:
            seen = self.mask.visible(tile.batches, tile.heads, rows, cols, self.heads)
        if self.hides and self.attn_bias is not None:
            finite = tile_of(self.attn_bias, tile) != -math.inf
            seen = finite if seen is None else seen & finite
        return seen

    def key_bounds(self, tile: Tile, sk: int) -> tuple[int, int]:
        """Keys outside of which no row of the tile sees one."""
        if self.mask is None:
            return 0, sk
        return self.mask.key_bounds(tile.batches, tile.heads, slice(tile.row0, tile.row1), sk, self.heads)

    def add_(self, s: torch.Tensor, tile: Tile, first_distance: int, unit: float) -> None:
        """Add the biases, times unit, to s (batches, heads, rows, cols). first_distance: that of key and query at the
        tile's top left.
        """
        if self.attn_bias is not None:
            s.add_(tile_of(self.attn_bias, tile), alpha=unit)
        if self.rel_bias is not None:
            rows, cols = s.shape[2:]
            by_distance = self.rel_bias[tile.heads][:, rel_indices(self.rel_bias, rows, cols, first_distance)]
            s.add_(by_distance.unfold(-1, cols, 1).flip(1), alpha=unit)


def entry(x: torch.Tensor | None, index: int) -> torch.Tensor | None:
    return x if x is None or x.shape[0] == 1 else x[index : index + 1]


def sequence(x: torch.Tensor | None, q0: int, q1: int, sk: int) -> torch.Tensor | None:
    """The part (1, h | 1, sq, sk) of a packed bias."""
    return None if x is None else x[None, :, q0:q1, :sk]


def tile_of(x: torch.Tensor, tile: Tile) -> torch.Tensor:
    """The part of (b | 1, h | 1, sq | 1, sk | 1) that belongs to a tile."""
    parts = (tile.batches, tile.heads, slice(tile.row0, tile.row1), slice(tile.col0, tile.col1))
    return x[tuple(slice(None) if size == 1 else part for size, part in zip(x.shape, parts))]


def rel_indices(rel_bias: torch.Tensor, rows: int, cols: int, first_distance: int) -> torch.Tensor:
    """Columns of rel_bias for the distances of a tile, ascending: from the last row's first key to the first row's
    last one."""
    reach = rel_bias.shape[1] // 2
    distances = torch.arange(first_distance - (rows - 1), first_distance + cols, device="cpu")
    return distances.clamp(-reach, reach) + reach


class BiasGradients:
    """Sums of dS over the axes along which the biases are broadcast, in the dtype of the scores."""

    def __init__(self, attn_bias: torch.Tensor | None, rel_bias: torch.Tensor | None) -> None:
        self.attn_bias, self.rel_bias = attn_bias, rel_bias

    @staticmethod
    def like(tensors: ScoreTensors | None, dtype: torch.dtype) -> BiasGradients | None:
        """Zeros for the biases of a call, None if it has none."""
        if tensors is None or (tensors.attn_bias is None and tensors.rel_bias is None):
            return None
        zeros = (
            None if x is None else x.new_zeros(x.shape, dtype=dtype) for x in (tensors.attn_bias, tensors.rel_bias)
        )
        return BiasGradients(*zeros)

    def entry(self, index: int) -> BiasGradients:
        return BiasGradients(entry(self.attn_bias, index), self.rel_bias)

    def sequence(self, q0: int, q1: int, k0: int, k1: int) -> BiasGradients:
        return BiasGradients(sequence(self.attn_bias, q0, q1, k1 - k0), self.rel_bias)

    def add_(self, ds: torch.Tensor, tile: Tile, first_distance: int) -> None:
        """ds: (batches, heads, rows, cols), the gradients of a tile's logits in natural-log units."""
        if self.attn_bias is not None:
            target = tile_of(self.attn_bias, tile)
            target.add_(ds.sum_to_size(target.shape))
        if self.rel_bias is not None:
            sums = _diagonal_sums(ds.sum(0))
            rows, cols = ds.shape[2:]
            indices = rel_indices(self.rel_bias, rows, cols, first_distance).expand(sums.shape)
            self.rel_bias[tile.heads].scatter_add_(1, indices, sums)

    def results(self, options: ScoreOptions) -> list[torch.Tensor]:
        """Of each bias that there is, its gradient in its dtype."""
        pairs = ((self.attn_bias, options.attn_bias), (self.rel_bias, options.rel_bias))
        return [grad.to(bias.dtype) for grad, bias in pairs if grad is not None and bias is not None]


def _diagonal_sums(x: torch.Tensor) -> torch.Tensor:
    """(n, rows, cols) -> (n, rows + cols - 1): sums over equal col - row, ascending, each in the order of the rows."""
    n, rows, cols = x.shape
    # rows one element longer than those of the view: row r of the view begins r elements further left
    skewed = x.new_zeros(n, rows, rows + cols)
    skewed[:, :, :cols] = x.flip(1)
    return skewed.view(n, -1)[:, : rows * (rows + cols - 1)].view(n, rows, rows + cols - 1).sum(1)


# ---- checks ----


def check_dense(options: ScoreOptions, q: torch.Tensor, sk: int) -> None:
    """Raise RuntimeError naming the argument that does not suit a dense call."""
    batch, sq, heads, _ = q.shape
    if options.mask is not None:
        _check_type(options.mask)
        check_factors(options.mask, batch, heads, sq, sk, q.device)
    _check_bias(options.attn_bias, q, ((1, batch), (1, heads), (1, sq), (1, sk)))
    _check_rel_bias(options.rel_bias, q)


def check_packed(options: ScoreOptions, q: torch.Tensor, total_k: int | None, max_seqlen_k: int) -> None:
    total_q, heads, _ = q.shape
    if options.mask is not None:
        _check_type(options.mask)
        check_packed_factors(options.mask, heads, total_q, total_k, max_seqlen_k, q.device)
    _check_bias(options.attn_bias, q, ((1, heads), (total_q,), (max_seqlen_k,)))
    _check_rel_bias(options.rel_bias, q)


def check_columns(options: ScoreOptions, layout: Iterable[Sequence], max_seqlen_k: int) -> None:
    """Bits and a packed bias have max_seqlen_k columns, which must be enough."""
    has_columns = options.attn_bias is not None or (options.mask is not None and options.mask.bits is not None)
    longest = max((s.k1 - s.k0 for s in layout), default=0) if has_columns else 0
    expected = f"at least the longest sequence ({longest} keys) if a mask or attn_bias has that many columns"
    checks.require(longest <= max_seqlen_k, "max_seqlen_k", expected, max_seqlen_k)


def _check_type(mask: object) -> None:
    if not isinstance(mask, MaskFactors):
        raise TypeError(f"mask: expected MaskFactors, got {type(mask).__name__}")


def _check_bias(bias: torch.Tensor | None, q: torch.Tensor, sizes: tuple[tuple[int, ...], ...]) -> None:
    if bias is None:
        return
    checks.check_device("attn_bias", bias)
    dtypes = (torch.float32,) if q.dtype in EIGHT_BIT or q.dtype == torch.float32 else (q.dtype, torch.float32)
    checks.check_dtype("attn_bias", bias, *dtypes)
    fits = bias.dim() == len(sizes) and all(n in of for n, of in zip(bias.shape, sizes))
    shown = ", ".join(" or ".join(str(n) for n in sorted(set(of))) for of in sizes)
    checks.require(fits, "attn_bias", f"shape [{shown}]", list(bias.shape))


def _check_rel_bias(rel_bias: torch.Tensor | None, q: torch.Tensor) -> None:
    if rel_bias is None:
        return
    checks.check_device("rel_bias", rel_bias)
    dtypes = (torch.float32, torch.float64) if q.dtype == torch.float64 else (torch.float32,)
    checks.check_dtype("rel_bias", rel_bias, *dtypes)
    fits = rel_bias.dim() == 2 and rel_bias.shape[0] == q.shape[-2] and rel_bias.shape[1] % 2 == 1
    checks.require(fits, "rel_bias", f"shape [{q.shape[-2]}, 2 R + 1]", list(rel_bias.shape))


def tensors_read(options: ScoreOptions) -> dict[str, torch.Tensor | None]:
    """Those of a call, by name, for `overlap.check_written`."""
    tensors = {} if options.mask is None else options.mask.tensors()
    mask = {f"mask.{name}": x for name, x in tensors.items()}
    return {"attn_bias": options.attn_bias, "rel_bias": options.rel_bias, **mask}
