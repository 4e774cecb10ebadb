"""Masks of random content, with rows that see nothing and keys that nothing sees."""

from __future__ import annotations

import torch

from flash_attn.masks import AttentionMask


def ints(*values, device):
    return torch.tensor(values, dtype=torch.int32, device=device)


def ranges_mask(batch: int, sq: int, sk: int, device) -> AttentionMask:
    """Two ranges of keys for each query, of two mask heads."""
    lo, hi, lo2, hi2 = torch.randint(-20, sk + 20, (4, batch, 2, sq), device=device).sort(0).values
    rows = torch.arange(sq, device=device) % 7 == 3
    return AttentionMask.query_ranges(lo, hi.where(~rows, 0), lo2, hi2.where(~rows, 0))


def startend_mask(batch: int, sq: int, sk: int, device) -> AttentionMask:
    """Two ranges of hidden queries for each key, of three mask heads."""
    bounds = torch.randint(0, sq + 1, (batch, 3, sk, 4), device=device)
    bounds[:, :, 5::11] = ints(0, sq, 0, 0, device=device)
    return AttentionMask.from_startend_row_indices(bounds, False, sq)
