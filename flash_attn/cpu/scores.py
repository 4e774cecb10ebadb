"""From q·k to attention logits on one tile: scale, softcap, ALiBi, biases and masks.

Logits are kept in base 2 (multiplied by log2 e), because exp2 is the cheaper exponential.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from typing import NamedTuple, TypedDict, cast

import torch

from ..masks.factors import MaskFactors, strips
from . import checks, score_tensors
from .score_tensors import ScoreTensors

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


class NamedScores(TypedDict, total=False):
    """The fields of `ScoreOptions` that the functions of the backend take by name."""

    sinks: torch.Tensor | None
    origins: torch.Tensor | None
    mask: MaskFactors | None
    attn_bias: torch.Tensor | None
    rel_bias: torch.Tensor | None


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
    mask: MaskFactors | None = None
    attn_bias: torch.Tensor | None = None
    rel_bias: torch.Tensor | None = None

    def check(self, q: torch.Tensor, batch: int, p_dropout: float) -> None:
        """Raise RuntimeError naming the argument that does not suit a call over these queries."""
        checks.check_numbers(p_dropout, self.softmax_scale, self.softcap, compute_dtype(q.dtype))
        checks.check_alibi(self.alibi_slopes, batch, q.shape[-2])
        checks.check_sinks(self.sinks, q)
        checks.check_origins(self.origins, batch)

    def check_dense(self, q: torch.Tensor, k: torch.Tensor) -> None:
        """The same for tensors of the size of the scores, of checked q and k."""
        if self.has_score_tensors:
            score_tensors.check_dense(self, q, k.shape[1])

    def check_packed(self, q: torch.Tensor, k: torch.Tensor, max_seqlen_k: int) -> None:
        if self.has_score_tensors:
            score_tensors.check_packed(self, q, k.shape[0] if k.dim() == 3 else None, max_seqlen_k)

    @property
    def has_score_tensors(self) -> bool:
        return self.mask is not None or self.attn_bias is not None or self.rel_bias is not None

    def tensors_read(self) -> dict[str, torch.Tensor | None]:
        """All tensors that a call may read, by name."""
        more = score_tensors.tensors_read(self) if self.has_score_tensors else {}
        return {"alibi_slopes": self.alibi_slopes, "sinks": self.sinks, **more}

    def origin(self, index: int) -> Origin | None:
        """That of a sequence, or None where the scores are the whole matrix."""
        return None if self.origins is None else Origin(*self.origins[index].tolist())


class Unused(NamedTuple):
    """Queries (b, h, sq) that see no key, and keys (b, h_k, sk) that no query sees: bool."""

    rows: torch.Tensor
    keys: torch.Tensor


@dataclass(frozen=True)
class ScoreRule:
    """How q·k becomes a logit, and which keys a query sees.

    Query i of sq sees key j of sk iff -left <= j - (i + sk - sq) <= right, where None is unbounded, and no tensor hides
    the score. slopes: ALiBi slopes (b, h) in the compute dtype, or None. position_shift: added to query positions for
    ALiBi and rel_bias alone.
    """

    scale: float
    softcap: float
    left: int | None
    right: int | None
    slopes: torch.Tensor | None
    position_shift: int = 0
    tensors: ScoreTensors | None = None

    @staticmethod
    def create(options: ScoreOptions, batch: int, q: torch.Tensor) -> ScoreRule:
        left = None if is_unbounded(options.window_left) else options.window_left
        right = None if is_unbounded(options.window_right) else options.window_right
        if options.is_causal:
            right = 0
        slopes = options.alibi_slopes
        if slopes is not None:
            slopes = slopes.to(compute_dtype(q.dtype)).expand(batch, slopes.shape[-1])
        # A denormal scale counts as 0, as it does on the GPU: torch's fused kernel would make NaN of a masked -inf.
        scale = float(options.softmax_scale)
        scale = scale if abs(scale) >= torch.finfo(compute_dtype(q.dtype)).tiny else 0.0
        tensors = ScoreTensors.of(options, q.shape[-2]) if options.has_score_tensors else None
        return ScoreRule(scale, float(options.softcap), left, right, slopes, tensors=tensors)

    def for_batch(self, index: int) -> ScoreRule:
        """The rule of one batch entry (slopes (1, h))."""
        return self._of_entry(index, None if self.tensors is None else self.tensors.entry(index))

    def for_sequence(self, index: int, q0: int, q1: int, k0: int, k1: int) -> ScoreRule:
        """The rule of one packed sequence, query rows [q0, q1) and key rows [k0, k1)."""
        return self._of_entry(index, None if self.tensors is None else self.tensors.sequence(q0, q1, k0, k1))

    def _of_entry(self, index: int, tensors: ScoreTensors | None) -> ScoreRule:
        if self.slopes is None and tensors is None:
            return self
        slopes = None if self.slopes is None else self.slopes[index : index + 1]
        return replace(self, slopes=slopes, tensors=tensors)

    def at(self, origin: Origin | None, sq: int, sk: int) -> ScoreRule:
        """The rule of sq rows and sk columns that begin at an origin."""
        return self if origin is None else replace(self, position_shift=origin.row - origin.col - (sk - sq))

    @property
    def query_scale(self) -> float:
        """The scale that q is multiplied by before the product with k."""
        return self.scale / self.softcap if self.softcap else self.scale * LOG2E

    @property
    def scale_over_query_scale(self) -> float:
        """softmax scale / query_scale, exact also for a scale of zero."""
        return self.softcap if self.softcap else LN2

    def first_unmasked_row(self, sq: int, sk: int) -> int:
        """The window hides all keys from the rows before it; it shows at least one key to every row from it on."""
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
        return mask_fits and self.scale > 0 and not self.softcap and self.slopes is None and self.tensors is None

    def key_range(self, row0: int, row1: int, sq: int, sk: int) -> tuple[int, int]:
        """The keys [lo, hi) that the window shows to at least one of the rows [row0, row1)."""
        lo = 0 if self.left is None else max(0, row0 + sk - sq - self.left)
        hi = sk if self.right is None else min(sk, row1 + sk - sq + self.right)
        return lo, max(lo, hi)

    @property
    def hides_by_tensors(self) -> bool:
        return self.tensors is not None and (self.tensors.mask is not None or self.tensors.hides)

    def visible(self, tile: Tile, sq: int, sk: int) -> torch.Tensor | None:
        """Which scores of a tile take part, bool that broadcasts to (batches, heads, rows, cols); None where the window
        alone decides.
        """
        if self.tensors is None or not self.hides_by_tensors:
            return None
        seen = cast(torch.Tensor, self.tensors.visible(tile))  # one of them hides
        left, right = self._masking_sides(tile, sq, sk)
        if left is not None or right is not None:
            distance = self._distance(tile, sq, sk)
            if right is not None:
                seen = seen & (distance <= right)
            if left is not None:
                seen = seen & (distance >= -left)
        return seen

    def unused(self, batch: int, heads: int, kv_heads: int, sq: int, sk: int) -> Unused | None:
        """Rows and keys that take no part, evaluated in strips of rows; None where the window alone decides."""
        if not self.hides_by_tensors:
            return None
        rows_seen = torch.zeros(batch, heads, sq, dtype=torch.bool, device="cpu")
        keys_seen = torch.zeros(batch, heads, sk, dtype=torch.bool, device="cpu")
        for rows in strips(sq, batch * heads * sk):
            seen = self.visible(Tile(slice(0, batch), slice(0, heads), rows.start, rows.stop, 0, sk), sq, sk)
            assert seen is not None
            rows_seen[:, :, rows] = seen.any(-1)
            keys_seen |= seen.any(-2)
        return Unused(~rows_seen, ~keys_seen.view(batch, kv_heads, heads // max(1, kv_heads), sk).any(2))

    def logits_(
        self, s: torch.Tensor, tile: Tile, sq: int, sk: int, visible: torch.Tensor | None, with_derivative: bool = False
    ) -> torch.Tensor | None:
        """Make logits of products q·k, in place; s: (batches, heads, rows, cols) of the tile, of q times query_scale.

        Softcap, then ALiBi and biases; masked ones become -inf. visible: that of `visible` for the tile. On request
        returns d(logit) / d(scaled product), like s, or None where it is 1.
        """
        derivative = self._cap_(s, with_derivative)
        left, right = self._masking_sides(tile, sq, sk) if visible is None else (None, None)
        if self.slopes is not None or left is not None or right is not None:
            distance = self._distance(tile, sq, sk)
        if self.slopes is not None:
            slopes = self.slopes[tile.batches, tile.heads][:, :, None, None]
            s.addcmul_(slopes, (distance - self.position_shift).abs().to(s.dtype), value=-LOG2E)
        if self.tensors is not None:
            self.tensors.add_(s, tile, self.first_distance(tile, sq, sk), LOG2E)
        if right is not None:
            s.masked_fill_(distance > right, -math.inf)
        if left is not None:
            s.masked_fill_(distance < -left, -math.inf)
        if visible is not None:
            s.masked_fill_(~visible, -math.inf)
        return derivative

    def _cap_(self, s: torch.Tensor, with_derivative: bool) -> torch.Tensor | None:
        if not self.softcap:
            return None
        s.tanh_()
        derivative = 1 - s * s if with_derivative else None
        s.mul_(self.softcap * LOG2E)
        return derivative

    def _masking_sides(self, tile: Tile, sq: int, sk: int) -> tuple[int | None, int | None]:
        """left and right, None where that side of the window hides no score of the tile."""
        lowest = tile.col0 - (tile.row1 - 1 + sk - sq)
        highest = tile.col1 - 1 - (tile.row0 + sk - sq)
        left = self.left if self.left is not None and lowest < -self.left else None
        return left, self.right if self.right is not None and highest > self.right else None

    def _distance(self, tile: Tile, sq: int, sk: int) -> torch.Tensor:
        """j - (i + sk - sq), (rows, cols)."""
        rows = torch.arange(tile.row0, tile.row1, device="cpu")[:, None] + (sk - sq)
        return torch.arange(tile.col0, tile.col1, device="cpu")[None, :] - rows

    def first_distance(self, tile: Tile, sq: int, sk: int) -> int:
        """That of the tile's top left score, from the query's position in the whole matrix."""
        return tile.col0 - tile.row0 - (sk - sq) - self.position_shift
