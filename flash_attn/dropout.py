"""The dropout mask: one definition for CPU and GPU.

Whether a score is dropped depends only on (seed, offset, batch, head, row, column), never on how a kernel tiles the
matrix. Philox4x32-10 (Salmon, Moraes, Dror and Shaw, "Parallel random numbers: as easy as 1, 2, 3", SC 2011) derives
the keys of each (batch, head), the finalizer of MurmurHash3 (Appleby 2011) two random values for every row and every
pair of columns under them, and the sum of their products, one of which has its halves swapped, the uniforms of the two
scores.
Unsigned 32-bit values are held in int64 tensors.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import NamedTuple

import torch

from flash_attn.ops import arguments

MASK_COLUMNS = 16  # CUDA kernels make so many columns at a time: a part of a mask begins at a multiple of them
_WORD = 0xFFFFFFFF
_PHILOX4_MULTIPLIERS = (0xD2511F53, 0xCD9E8D57)
_PHILOX4_BUMPS = (0x9E3779B9, 0xBB67AE85)
_UNIFORM_BITS = 15
_UNIFORM = 2**_UNIFORM_BITS - 1


class DropoutStreams(NamedTuple):
    """The keys that select the random stream of each (batch, head); each int64 of shape (batches, heads)."""

    row_key: tuple[torch.Tensor, torch.Tensor]
    col_key: tuple[torch.Tensor, torch.Tensor]


def dropout_threshold(p: float) -> int:
    """The 32-bit threshold T for drop probability p: a score is dropped with probability T / 2^32."""
    return min(round(p * 2.0**32), 2**32 - 1)


def keep_scale(p: float) -> float:
    """The scale of kept scores: one over the exact keep probability (2^32 - T) / 2^32."""
    return 2.0**32 / (2**32 - dropout_threshold(p))


def _multiply_wide(multiplier: int, word: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """High and low 32 bits of multiplier * word; the int64 product wraps modulo 2^64, which keeps all 64 bits."""
    product = word * multiplier
    return (product >> 32) & _WORD, product & _WORD


def philox4x32(
    counter: Sequence[torch.Tensor], key: Sequence[torch.Tensor], rounds: int = 10
) -> tuple[torch.Tensor, ...]:
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


def _scramble(word: torch.Tensor) -> torch.Tensor:
    """The finalizer of MurmurHash3, a permutation of the 32-bit integers."""
    word = ((word ^ (word >> 16)) * 0x85EBCA6B) & _WORD
    word = ((word ^ (word >> 13)) * 0xC2B2AE35) & _WORD
    return word ^ (word >> 16)


def _row_bits(key: tuple[torch.Tensor, torch.Tensor], first: int, stop: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Fine and coarse random bits of rows [first, stop): int64 (batches, heads, rows)."""
    index = torch.arange(first, stop, device=key[0].device)
    coarse = (_scramble(index ^ key[0][..., None]) + key[1][..., None]) & _WORD
    return _scramble(coarse) | 1, coarse


def _col_bits(key: tuple[torch.Tensor, torch.Tensor], first: int, stop: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Fine and coarse random bits of the pairs of columns [first, stop): int64 (batches, heads, pairs)."""
    index = torch.arange(first, stop, device=key[0].device)
    odd = index // 4 % 2
    coarse = _scramble((_scramble((index - 4 * odd) ^ key[0][..., None]) + key[1][..., None]) & _WORD)
    return (_scramble((coarse + odd) & _WORD) & ~1) | odd, coarse | 1


def dropout_streams(
    seed: int,
    offset: int,
    batches: Iterable[int] | torch.Tensor,
    heads: Iterable[int] | torch.Tensor,
    device: torch.device | str | None = None,
) -> DropoutStreams:
    """The streams of every (batch, head) in batches x heads; seed and offset are taken modulo 2^64."""

    def words(values: Iterable[int] | torch.Tensor) -> torch.Tensor:
        values = values if isinstance(values, torch.Tensor) else list(values)
        return torch.as_tensor(values, dtype=torch.int64, device=device) & _WORD

    def constant(value: int) -> torch.Tensor:
        return torch.tensor(value & _WORD, dtype=torch.int64, device=device)

    counter = (words(batches)[:, None], words(heads)[None, :], constant(offset), constant(offset >> 32))
    word = philox4x32(counter, (constant(seed), constant(seed >> 32)))
    return DropoutStreams(row_key=(word[0], word[1]), col_key=(word[2], word[3]))


def keep_mask(streams: DropoutStreams, row0: int, row1: int, col0: int, col1: int, threshold: int) -> torch.Tensor:
    """The mask of rows [row0, row1) and columns [col0, col1): bool (batches, heads, rows, cols), True = kept."""
    first_pair = col0 // 2
    row_fine, row_coarse = _row_bits(streams.row_key, row0, row1)
    col_fine, col_coarse = _col_bits(streams.col_key, first_pair, (col1 + 1) // 2)
    uniforms = row_coarse[..., None] * col_coarse[..., None, :]  # modulo 2^64, of which the lower word counts
    uniforms = ((uniforms << 16) & _WORD) | ((uniforms >> 16) & 0xFFFF)
    uniforms += row_fine[..., None] * col_fine[..., None, :]

    kept_is_rarer = threshold > 2**31
    rarer = 2**32 - threshold if kept_is_rarer else threshold
    limit = ((rarer + (row_fine >> _UNIFORM_BITS)) >> (32 - _UNIFORM_BITS))[..., None]
    keep = torch.empty((*uniforms.shape, 2), dtype=torch.bool, device=uniforms.device)
    for odd in range(2):
        below = ((uniforms >> (16 * odd)) & _UNIFORM) < limit
        keep[..., odd] = below if kept_is_rarer else ~below
    first_col = 2 * first_pair
    return keep.flatten(-2)[..., col0 - first_col : col1 - first_col]


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
        rng_state: int64 (2,), [seed, offset]: the fourth result of `flash_attn_interface._flash_attn_forward`.
        dropout_p: drop probability of that call, in [0, 1).
        batch_size, nheads: batch (for variable length: number of sequences) and number of query heads.
        seqlen_q, seqlen_k: query rows and key columns to generate; the mask of a shorter sequence is a slice of it.
        device: where to generate it; default: the device of rng_state.

    Returns: bool (batch_size, nheads, seqlen_q, seqlen_k), True where the score was kept. Kept scores were scaled by
        ``keep_scale(dropout_p)``.

    Raises RuntimeError or TypeError that names the argument: rng_state not int64 (2,), dropout_p outside [0, 1), a
        negative size.
    """
    arguments.check_tensors(("rng_state",), (rng_state,))
    if rng_state.is_meta:
        raise RuntimeError("rng_state: expected a tensor with values, got one on meta")
    if rng_state.dtype != torch.int64 or tuple(rng_state.shape) != (2,):
        got = f"{str(rng_state.dtype).replace('torch.', '')} {list(rng_state.shape)}"
        raise RuntimeError(f"rng_state: expected an int64 tensor of shape [2], got {got}")
    dropout_p = arguments.number("dropout_p", dropout_p)
    if not 0.0 <= dropout_p < 1.0:
        raise RuntimeError(f"dropout_p: expected a value in [0, 1), got {dropout_p}")
    sizes = {"batch_size": batch_size, "nheads": nheads, "seqlen_q": seqlen_q, "seqlen_k": seqlen_k}
    batch_size, nheads, seqlen_q, seqlen_k = (arguments.integer(name, size, least=0) for name, size in sizes.items())
    seed, offset = rng_state.tolist()
    device = rng_state.device if device is None else arguments.device("device", device)
    batches, heads = (torch.arange(count, device=device) for count in (batch_size, nheads))
    streams = dropout_streams(seed, offset, batches, heads, device)
    return keep_mask(streams, 0, seqlen_q, 0, seqlen_k, dropout_threshold(dropout_p)).contiguous()
