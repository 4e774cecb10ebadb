"""From q·k to attention logits on one tile: scale, softcap, ALiBi and the window mask.

Logits are kept in base 2 (multiplied by log2 e), because exp2 is the cheaper exponential.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from typing import NamedTuple

import torch

from . import checks

LOG2E = math.log2(math.e)
LN2 = math.log(2.0)


def compute_dtype(dtype: torch.dtype) -> torch.dtype:
    """The dtype of scores, accumulators and LSE: float64 for float64 inputs, else float32."""
    return torch.float64 if dtype == torch.float64 else torch.float32


def is_unbounded(width: int) -> bool:
    """Whether a side of a window has no end; the GPU counts in 32 bits."""
    return not 0 <= width < 2**31 - 1


@dataclass(frozen=True)
class Tile:
    """A block of the score matrix: slices of batch and query heads, bounds of rows and columns."""

    batches: slice
    heads: slice
    row0: int
    row1: int
    col0: int
    col1: int


class Origin(NamedTuple):
    """Where the scores of a sequence begin in a larger matrix, of which they are a part: ALiBi and dropout count from
    there. The mask does not: its window is that of the part."""

    document: int
    head: int
    row: int
    col: int


class ScoreOptions(NamedTuple):
    """What a call says about scores: arguments of `forward.fwd` and its twins, which describe them.

    FlashAttention-2 has no others than the first ones: the functions take those that have a default by name.
    """

    softmax_scale: float
    softcap: float
    is_causal: bool
    window_left: int
    window_right: int
    alibi_slopes: torch.Tensor | None
    sinks: torch.Tensor | None = None
    origins: torch.Tensor | None = None

    def check(self, q: torch.Tensor, batch: int, p_dropout: float) -> None:
        """Raise RuntimeError naming the argument that does not suit a call over these queries."""
        checks.check_numbers(p_dropout, self.softmax_scale, self.softcap, compute_dtype(q.dtype))
        checks.check_alibi(self.alibi_slopes, batch, q.shape[-2])
        checks.check_sinks(self.sinks, q)
        checks.check_origins(self.origins, batch)

    def origin(self, index: int) -> Origin | None:
        """That of a sequence, or None where the scores are the whole matrix."""
        return None if self.origins is None else Origin(*self.origins[index].tolist())


@dataclass(frozen=True)
class ScoreRule:
    """How q·k becomes a logit, and which keys a query sees.

    Query i of sq sees key j of sk iff -left <= j - (i + sk - sq) <= right; None is unbounded.
    slopes: ALiBi slopes (b, h) in the compute dtype, or None. alibi_shift: added to query positions for ALiBi alone.
    """

    scale: float
    softcap: float
    left: int | None
    right: int | None
    slopes: torch.Tensor | None
    alibi_shift: int = 0

    @staticmethod
    def create(options: ScoreOptions, batch: int, dtype: torch.dtype) -> ScoreRule:
        left = None if is_unbounded(options.window_left) else options.window_left
        right = None if is_unbounded(options.window_right) else options.window_right
        if options.is_causal:
            right = 0
        slopes = options.alibi_slopes
        if slopes is not None:
            slopes = slopes.to(compute_dtype(dtype)).expand(batch, slopes.shape[-1])
        # A denormal scale counts as 0, as it does on the GPU: torch's fused kernel would make NaN of a masked -inf.
        scale = float(options.softmax_scale)
        scale = scale if abs(scale) >= torch.finfo(compute_dtype(dtype)).tiny else 0.0
        return ScoreRule(scale, float(options.softcap), left, right, slopes)

    def for_batch(self, index: int) -> ScoreRule:
        """The rule of one batch entry (slopes (1, h))."""
        return self if self.slopes is None else replace(self, slopes=self.slopes[index : index + 1])

    def at(self, origin: Origin | None, sq: int, sk: int) -> ScoreRule:
        """The rule of sq rows and sk columns that begin at an origin."""
        return self if origin is None else replace(self, alibi_shift=origin.row - origin.col - (sk - sq))

    @property
    def query_scale(self) -> float:
        """The scale that q is multiplied by before the product with k."""
        return self.scale / self.softcap if self.softcap else self.scale * LOG2E

    @property
    def scale_over_query_scale(self) -> float:
        """softmax scale / query_scale, exact also for a scale of zero."""
        return self.softcap if self.softcap else LN2

    def first_unmasked_row(self, sq: int, sk: int) -> int:
        """The rows before it are fully masked; every row from it on sees at least one key."""
        if sk == 0:
            return sq
        return 0 if self.right is None else min(sq, max(0, sq - sk - self.right))

    def is_unmasked(self, sq: int, sk: int) -> bool:
        """Whether the mask masks nothing: every row sees every key."""
        return (self.left is None or self.left >= sk - 1) and (self.right is None or self.right >= sq - 1)

    def is_square_causal(self, sq: int, sk: int) -> bool:
        """Whether row i sees exactly the keys up to i of as many keys as rows."""
        return sq == sk and self.right == 0 and (self.left is None or self.left >= sk - 1)

    def fits_torch_kernel(self, sq: int, sk: int) -> bool:
        """Whether torch's fused kernel has this mask and these scores: no mask, or causal where its top-left alignment
        is ours too.

        Its mask is applied before the scale, so a scale of zero or below would make NaN or +inf of -inf.
        """
        mask_fits = self.is_unmasked(sq, sk) or self.is_square_causal(sq, sk)
        return mask_fits and self.scale > 0 and not self.softcap and self.slopes is None

    def key_range(self, row0: int, row1: int, sq: int, sk: int):
        """The keys [lo, hi) that at least one of the rows [row0, row1) sees."""
        lo = 0 if self.left is None else max(0, row0 + sk - sq - self.left)
        hi = sk if self.right is None else min(sk, row1 + sk - sq + self.right)
        return lo, max(lo, hi)

    def logits_(self, s: torch.Tensor, tile: Tile, sq: int, sk: int, with_derivative: bool = False):
        """Make logits of products q·k, in place; s: (batches, heads, rows, cols) of the tile, of q times query_scale.

        Softcap, then ALiBi; masked ones become -inf. On request returns d(logit) / d(scaled product), like s, or None
        where it is 1.
        """
        derivative = self._cap_(s, with_derivative)
        self._bias_and_mask_(s, tile, sq, sk)
        return derivative

    def _cap_(self, s: torch.Tensor, with_derivative: bool):
        if not self.softcap:
            return None
        s.tanh_()
        derivative = 1 - s * s if with_derivative else None
        s.mul_(self.softcap * LOG2E)
        return derivative

    def _bias_and_mask_(self, s: torch.Tensor, tile: Tile, sq: int, sk: int) -> None:
        lowest = tile.col0 - (tile.row1 - 1 + sk - sq)
        highest = tile.col1 - 1 - (tile.row0 + sk - sq)
        masks_left = self.left is not None and lowest < -self.left
        masks_right = self.right is not None and highest > self.right
        if self.slopes is None and not masks_left and not masks_right:
            return
        rows = torch.arange(tile.row0, tile.row1, device=s.device)[:, None] + (sk - sq)
        distance = torch.arange(tile.col0, tile.col1, device=s.device)[None, :] - rows
        if self.slopes is not None:
            slopes = self.slopes[tile.batches, tile.heads][:, :, None, None]
            s.addcmul_(slopes, (distance - self.alibi_shift).abs().to(s.dtype), value=-LOG2E)
        if masks_right:
            s.masked_fill_(distance > self.right, -math.inf)
        if masks_left:
            s.masked_fill_(distance < -self.left, -math.inf)
