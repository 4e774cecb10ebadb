"""New rows of an 8-bit cache: which may come, and how they are quantised where they are appended."""

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple

import torch

from .. import eight_bit
from ..eight_bit import EIGHT_BIT, OF_QUERIES, Descales
from . import checks
from .overlap import same_view

if TYPE_CHECKING:
    from .kvcache import Cache, CacheEntry


class TokenDescales(NamedTuple):
    """Descales (cache_batch or blocks, rows, h_k) of each row of K and of V, which an append computes and writes."""

    k: torch.Tensor | None
    v: torch.Tensor | None


class Quantizer(NamedTuple):
    """How rows (rows, h_k, d) of wider tensors become rows of an 8-bit cache."""

    descales: Descales
    tokens: TokenDescales

    def quantized(self, cache: Cache, entry: CacheEntry, k: torch.Tensor, v: torch.Tensor) -> tuple[torch.Tensor, ...]:
        """New rows of an entry as the cache stores them; writes the descales that they bring."""
        new = (
            (cache.k, k, self.descales.k, self.tokens.k, False),
            (cache.v, v, self.descales.v, self.tokens.v, self.descales.v_per_channel),
        )
        return tuple(self._quantized(cache, entry, *x) for x in new)

    def is_alike(self) -> bool:
        """Whether rows of K and V that are equal become equal 8-bit rows."""
        k, v = self.descales.k, self.descales.v
        if self.tokens.k is not None or self.tokens.v is not None or self.descales.v_per_channel:
            return False
        return k is v if k is None or v is None else same_view(k, v)

    @staticmethod
    def _quantized(
        cache: Cache,
        entry: CacheEntry,
        stored: torch.Tensor,
        rows: torch.Tensor,
        descale: torch.Tensor | None,
        tokens: torch.Tensor | None,
        per_channel: bool,
    ) -> torch.Tensor:
        if rows.dtype == stored.dtype:
            return rows
        indices = cache.row_indices(entry.row, entry.cached, entry.total)
        place = indices // stored.shape[1], indices % stored.shape[1]
        if tokens is not None:
            descale = eight_bit.descale_of(rows, (-1,), stored.dtype)
            tokens[place] = descale.squeeze(-1)
        elif descale is None:
            descale = rows.new_ones((), dtype=torch.float32)
        elif per_channel:
            descale = descale if descale.dim() == 2 else descale[entry.index]
        elif eight_bit.is_by_row(descale):
            descale = eight_bit.by_row(descale, stored)[place]
        else:
            factor = eight_bit.by_head(descale, stored.shape[2])
            descale = factor[entry.index if factor.shape[0] > 1 else 0].unsqueeze(-1)
        return eight_bit.encode(rows, descale, stored.dtype)


def check_new_dtypes(
    q: torch.Tensor,
    kcache: torch.Tensor,
    vcache: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    rotary_cos: torch.Tensor | None,
) -> None:
    """New rows have the cache's dtype or q's, any wider one if q has 8 bits."""
    if k.dtype != kcache.dtype:
        wide = checks.DTYPES if q.dtype in OF_QUERIES else (q.dtype,)
        checks.check_dtype("k", k, *wide, kcache.dtype)
    checks.check_dtype("v", v, k.dtype if vcache.dtype in EIGHT_BIT else vcache.dtype)
    for name, x in (("q", q), ("k", k)):
        rotates_8bit = rotary_cos is not None and x.dtype in EIGHT_BIT
        checks.require(not rotates_8bit, "rotary_cos", f"None with {name} of 8 bits", "a tensor")


def check_tokens(
    kcache: torch.Tensor,
    vcache: torch.Tensor,
    k: torch.Tensor | None,
    v: torch.Tensor | None,
    descales: Descales,
    tokens: TokenDescales,
) -> None:
    caches = (("k", kcache, k, descales.k, tokens.k), ("v", vcache, v, descales.v, tokens.v))
    for name, cache, new, descale, token in caches:
        if token is None:
            continue
        argument = f"{name}_descale"
        checks.require(descale is None, argument, f"None with {name}_token_descale", "a tensor")
        checks.check_device(argument, token)
        checks.check_dtype(argument, token, torch.float32)
        checks.check_shape(argument, token, cache.shape[:3])
        checks.require(cache.dtype in EIGHT_BIT, argument, "None for a cache of at least 16 bits", "a tensor")
        is_wide = new is not None and new.dtype not in EIGHT_BIT
        got = None if new is None else eight_bit.named(new.dtype)
        checks.require(is_wide, name, f"new rows of at least 16 bits with {argument} of each row", got)
