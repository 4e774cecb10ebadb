"""A mask of the last keys over a KV cache, in bits: the tree of a draft."""

from __future__ import annotations

from typing import NamedTuple

import torch

from ..masks.factors import WORD_BITS, MaskFactors, pack_bits, unpack_bits
from . import checks
from .score_tensors import ScoreTensors


class MaskBits(NamedTuple):
    """words: int32 (1 or b, h_m, sq, ceil(keys / 32)), or None: there is no mask. keys: how many keys it covers, the
    last ones of each sequence; all earlier keys are seen."""

    words: torch.Tensor | None
    keys: int

    def check(self, q: torch.Tensor) -> None:
        """Raise RuntimeError naming the argument that does not suit these queries."""
        words = self.words
        if words is None:
            return
        batch, sq, heads, _ = q.shape
        checks.check_on_cpu("mask_bits", words)
        checks.check_dtype("mask_bits", words, torch.int32)
        in_range = 0 <= self.keys <= checks.MAX_LENGTH
        checks.require(in_range, "mask_keys", f"a value from 0 to {checks.MAX_LENGTH}", self.keys)
        got = f"shape {list(words.shape)}"
        checks.require(words.dim() == 4, "mask_bits", "4 dimensions", got)
        divides = words.shape[1] == heads or (words.shape[1] > 0 and heads % words.shape[1] == 0)
        checks.require(divides, "mask_bits", f"a head count that divides {heads}", got)
        checks.require(words.is_contiguous(), "mask_bits", "a contiguous tensor", f"strides {list(words.stride())}")
        checks.require(words.shape[0] in (1, batch), "mask_bits", f"a batch of 1 or {batch}", got)
        count = -(-self.keys // WORD_BITS)
        checks.require(words.shape[2:] == (sq, count), "mask_bits", f"{sq} x {count} as its last two sizes", got)

    def of_entry(self, index: int, sk: int, heads: int) -> ScoreTensors | None:
        """What hides scores of a batch entry, which has sk keys."""
        if self.words is None:
            return None
        words = self.words[index if self.words.shape[0] > 1 else 0]
        count = min(self.keys, sk)
        seen = torch.ones(*words.shape[:2], sk, dtype=torch.bool, device="cpu")
        seen[..., sk - count :] = unpack_bits(words)[..., self.keys - count : self.keys]
        return ScoreTensors(MaskFactors(bits=pack_bits(seen)[None]), None, None, heads, hides=False)
