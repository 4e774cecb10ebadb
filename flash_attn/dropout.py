"""The dropout mask: one definition for CPU and GPU.

Whether a score is dropped depends only on (seed, offset, batch, head, row, column), never on how a kernel tiles the
matrix. The bits come from the counter-based generators of Salmon, Moraes, Dror and Shaw, "Parallel random numbers: as
easy as 1, 2, 3" (SC 2011): Philox4x32-10 derives three words per (batch, head), Philox2x32-7 derives two words per four
scores. Unsigned 32-bit words are held in int64 tensors.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import NamedTuple

import torch

_WORD = 0xFFFFFFFF
_PHILOX4_MULTIPLIERS = (0xD2511F53, 0xCD9E8D57)
_PHILOX4_BUMPS = (0x9E3779B9, 0xBB67AE85)
_PHILOX2_MULTIPLIER = 0xD256D193
_PHILOX2_BUMP = 0x9E3779B9
_MASK_ROUNDS = 7
# One random word pair serves the 2 x 2 scores (i, j), (i, j + 8), (i + 8, j), (i + 8, j + 8) of a 16 x 16 square,
# the four that one thread of a tensor-core fragment holds.
_SQUARE = 16


class DropoutStreams(NamedTuple):
    """The words that select the random stream of each (batch, head); each int64 of shape (batches, heads)."""

    key: torch.Tensor
    row_word: torch.Tensor
    col_word: torch.Tensor


def dropout_threshold(p: float) -> int:
    """The 32-bit threshold T for drop probability p: a score is dropped iff its random word is below T."""
    return min(round(p * 2.0**32), 2**32 - 1)


def keep_scale(p: float) -> float:
    """The factor for kept scores: one over the exact keep probability (2^32 - T) / 2^32."""
    return 2.0**32 / (2**32 - dropout_threshold(p))


def _multiply_wide(multiplier: int, word: torch.Tensor):
    """High and low 32 bits of multiplier * word; the int64 product wraps modulo 2^64, which keeps all 64 bits."""
    product = word * multiplier
    return (product >> 32) & _WORD, product & _WORD


def philox4x32(counter, key, rounds: int = 10):
    """Philox4x32: four counter words and two key words (int64 tensors, broadcastable) -> four words."""
    c0, c1, c2, c3 = counter
    k0, k1 = key
    for _ in range(rounds):
        hi0, lo0 = _multiply_wide(_PHILOX4_MULTIPLIERS[0], c0)
        hi1, lo1 = _multiply_wide(_PHILOX4_MULTIPLIERS[1], c2)
        c0, c1, c2, c3 = hi1 ^ c1 ^ k0, lo1, hi0 ^ c3 ^ k1, lo0
        k0 = (k0 + _PHILOX4_BUMPS[0]) & _WORD
        k1 = (k1 + _PHILOX4_BUMPS[1]) & _WORD
    return c0, c1, c2, c3


def philox2x32(counter, key, rounds: int = 10):
    """Philox2x32: two counter words and one key word (int64 tensors, broadcastable) -> two words."""
    c0, c1 = counter
    for _ in range(rounds):
        # In place and with one mask for both shift and xor: the mask of every score passes through here.
        product = c0 * _PHILOX2_MULTIPLIER
        c0 = (product >> 32) ^ (key ^ c1)
        c0 &= _WORD
        c1 = product.bitwise_and_(_WORD)
        key = (key + _PHILOX2_BUMP) & _WORD
    return c0, c1


def dropout_streams(
    seed: int, offset: int, batches: Iterable[int], heads: Iterable[int], device=None
) -> DropoutStreams:
    """The streams of every (batch, head) in batches x heads; seed and offset are taken modulo 2^64."""

    def words(values):
        return torch.tensor(list(values), dtype=torch.int64, device=device) & _WORD

    def constant(value):
        return torch.tensor(value & _WORD, dtype=torch.int64, device=device)

    counter = (words(batches)[:, None], words(heads)[None, :], constant(offset), constant(offset >> 32))
    return DropoutStreams(*philox4x32(counter, (constant(seed), constant(seed >> 32)))[:3])


def keep_block(streams: DropoutStreams, row0: int, row1: int, col0: int, col1: int, threshold: int) -> torch.Tensor:
    """The mask of rows [row0, row1) and columns [col0, col1): bool (batches, heads, rows, cols), True = kept."""
    square_rows = range(row0 // _SQUARE, -(-row1 // _SQUARE))
    square_cols = range(col0 // _SQUARE, -(-col1 // _SQUARE))
    device = streams.key.device
    half = _SQUARE // 2
    row_group = torch.arange(square_rows.start * half, square_rows.stop * half, device=device)
    col_group = torch.arange(square_cols.start * half, square_cols.stop * half, device=device)
    counter = (
        row_group[:, None] ^ streams.row_word[..., None, None],
        col_group[None, :] ^ streams.col_word[..., None, None],
    )
    upper, lower = philox2x32(counter, streams.key[..., None, None], _MASK_ROUNDS)

    shape = (*streams.key.shape, len(square_rows), 2, half, len(square_cols), 2, half)
    keep = torch.empty(shape, dtype=torch.bool, device=device)
    for row_half, word in enumerate((upper, lower)):
        word = word.view(*streams.key.shape, len(square_rows), half, len(square_cols), half)
        keep[:, :, :, row_half, :, :, 0] = word >= threshold
        keep[:, :, :, row_half, :, :, 1] = (((word << 16) & _WORD) | (word >> 16)) >= threshold
    keep = keep.view(*streams.key.shape, len(square_rows) * _SQUARE, len(square_cols) * _SQUARE)
    first_row, first_col = square_rows.start * _SQUARE, square_cols.start * _SQUARE
    return keep[:, :, row0 - first_row : row1 - first_row, col0 - first_col : col1 - first_col]


def dropout_mask(
    rng_state: torch.Tensor,
    dropout_p: float,
    batch_size: int,
    nheads: int,
    seqlen_q: int,
    seqlen_k: int,
    device: torch.device | None = None,
) -> torch.Tensor:
    """Regenerate the dropout mask that a forward call used.

    Arguments:
        rng_state: int64 (2,), [seed, offset], as the forward returned it.
        dropout_p: drop probability of that call, in [0, 1).
        batch_size, nheads: batch (for variable length: number of sequences) and number of query heads.
        seqlen_q, seqlen_k: query rows and key columns to generate; the mask of a shorter sequence is a slice of it.
        device: where to generate it; default: the device of rng_state.

    Returns: bool (batch_size, nheads, seqlen_q, seqlen_k), True where the score was kept. Kept scores were scaled by
        ``keep_scale(dropout_p)``.

    Raises RuntimeError when rng_state is not int64 (2,) or dropout_p is outside [0, 1).
    """
    if rng_state.dtype != torch.int64 or tuple(rng_state.shape) != (2,):
        got = f"{str(rng_state.dtype).replace('torch.', '')} {list(rng_state.shape)}"
        raise RuntimeError(f"rng_state: expected an int64 tensor of shape [2], got {got}")
    if not 0.0 <= dropout_p < 1.0:
        raise RuntimeError(f"p_dropout: expected a value in [0, 1), got {dropout_p}")
    seed, offset = rng_state.tolist()
    device = rng_state.device if device is None else device
    streams = dropout_streams(seed, offset, range(batch_size), range(nheads), device)
    return keep_block(streams, 0, seqlen_q, 0, seqlen_k, dropout_threshold(dropout_p)).contiguous()
