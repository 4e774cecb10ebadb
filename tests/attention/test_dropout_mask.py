"""The dropout mask: generator against published vectors, independence of tiling, statistics."""

from __future__ import annotations

import math

import pytest
import torch

from flash_attn.dropout import (
    dropout_mask,
    dropout_streams,
    dropout_threshold,
    keep_mask,
    keep_scale,
    philox4x32,
)

WORD = 0xFFFFFFFF
Z_BOUND = 4.5


def words(*values):
    return tuple(torch.tensor(value, dtype=torch.int64) for value in values)


# Known-answer vectors of Random123 (Salmon et al. 2011): rounds, counter, key, result.
PHILOX4_VECTORS = [
    (10, (0, 0, 0, 0), (0, 0), (0x6627E8D5, 0xE169C58D, 0xBC57AC4C, 0x9B00DBD8)),
    (10, (WORD,) * 4, (WORD,) * 2, (0x408F276D, 0x41C83B0E, 0xA20BC7C6, 0x6D5451FD)),
    (
        10,
        (0x243F6A88, 0x85A308D3, 0x13198A2E, 0x03707344),
        (0xA4093822, 0x299F31D0),
        (0xD16CFE09, 0x94FDCCEB, 0x5001E420, 0x24126EA1),
    ),
]


@pytest.mark.parametrize("rounds, counter, key, result", PHILOX4_VECTORS)
def test_philox4x32_known_answers(rounds, counter, key, result):
    assert tuple(int(word) for word in philox4x32(words(*counter), words(*key), rounds)) == result


def scramble(word):
    """The finalizer of MurmurHash3 in Python integers."""
    word = (word ^ word >> 16) * 0x85EBCA6B & WORD
    word = (word ^ word >> 13) * 0xC2B2AE35 & WORD
    return word ^ word >> 16


def test_scrambler_known_answers():
    assert [scramble(word) for word in (0, 1, 2, WORD)] == [0, 0x514E28B7, 0x30F4C306, 0x81F16F39]


def plain_keep(seed, offset, batch, head, i, j, threshold):
    """The definition of the mask for one element, in Python integers."""
    c0, c1, c2, c3 = batch, head, offset & WORD, (offset >> 32) & WORD
    k0, k1 = seed & WORD, (seed >> 32) & WORD
    for _ in range(10):
        a, b = 0xD2511F53 * c0, 0xCD9E8D57 * c2
        c0, c1, c2, c3 = (b >> 32) ^ c1 ^ k0, b & WORD, (a >> 32) ^ c3 ^ k1, a & WORD
        k0, k1 = (k0 + 0x9E3779B9) & WORD, (k1 + 0xBB67AE85) & WORD
    row_coarse = (scramble(i ^ c0) + c1) & WORD
    row_fine = scramble(row_coarse) | 1
    odd = j // 8 % 2
    col_coarse = scramble((scramble((j // 2 - 4 * odd) ^ c2) + c3) & WORD)
    col_fine = scramble((col_coarse + odd) & WORD) & ~1 | odd
    product = row_coarse * (col_coarse | 1) & WORD
    word = (row_fine * col_fine + (product << 16 | product >> 16)) & WORD
    uniform = word >> (j % 2 * 16) & 0x7FFF
    rare_is_kept = threshold > 2**31
    rare = uniform < (min(threshold, 2**32 - threshold) + (row_fine >> 15)) >> 17
    return rare == rare_is_kept


def state(seed, offset=0):
    return torch.tensor([seed, offset], dtype=torch.int64)


@pytest.mark.parametrize(
    "seed, offset", [(0, 0), (1, 7), (2**63 - 1, 2**62 + 5), (-3, -1), (0x1234567890ABCDEF, 2**33)]
)
def test_mask_follows_its_definition(seed, offset):
    for p in (0.3, 0.8):
        threshold = dropout_threshold(p)
        mask = dropout_mask(state(seed, offset), p, 2, 3, 37, 41)
        expected = [
            [
                [[plain_keep(seed, offset, b, h, i, j, threshold) for j in range(41)] for i in range(37)]
                for h in range(3)
            ]
            for b in range(2)
        ]
        assert mask.dtype == torch.bool and mask.shape == (2, 3, 37, 41)
        assert torch.equal(mask, torch.tensor(expected))


@pytest.mark.parametrize("rows", [(0, 1), (3, 50), (16, 32), (8, 9), (95, 100), (20, 20)])
@pytest.mark.parametrize("cols", [(0, 130), (7, 9), (64, 128), (15, 17), (129, 130), (0, 0)])
def test_any_block_is_a_slice_of_the_whole(rows, cols):
    whole = dropout_mask(state(99, 3), 0.4, 4, 6, 100, 130)
    streams = dropout_streams(99, 3, range(1, 3), range(2, 6))
    block = keep_mask(streams, *rows, *cols, dropout_threshold(0.4))
    assert torch.equal(block, whole[1:3, 2:6, slice(*rows), slice(*cols)])


def test_growing_the_lengths_keeps_the_mask():
    small = dropout_mask(state(5), 0.5, 2, 2, 33, 65)
    assert torch.equal(small, dropout_mask(state(5), 0.5, 3, 4, 70, 200)[:2, :2, :33, :65])


@pytest.mark.parametrize("p", [1e-3, 0.1, 0.5, 0.9, 0.99, 0.999])
def test_drop_rate(p):
    mask = dropout_mask(state(2024), p, 2, 4, 512, 512)
    n = mask.numel()
    z = ((~mask).sum().item() - n * p) / math.sqrt(n * p * (1 - p))
    assert abs(z) < Z_BOUND
    for axes in ((0, 1, 2), (0, 1, 3)):
        per_line = (~mask).double().mean(axes)
        lines_z = (per_line - p) / math.sqrt(p * (1 - p) / (n / 512))
        # The largest of 512 standard normals stays below 6 but for a chance of 1e-6; a Poisson count has a longer tail.
        assert lines_z.abs().max().item() < (6.0 if min(p, 1 - p) >= 0.01 else 8.0)


def correlation_z(a, b, p):
    """z-score of the covariance of two masks that ought to be independent."""
    a, b = a.double() - (1 - p), b.double() - (1 - p)
    return ((a * b).mean() / (p * (1 - p)) * math.sqrt(a.numel())).item()


@pytest.mark.parametrize("p", [0.1, 0.5, 0.9])
@pytest.mark.parametrize(
    "row_step, col_step", [(0, 1), (1, 0), (1, 1), (0, 8), (8, 0), (8, 8), (0, 16), (16, 0), (7, 9)]
)
def test_neighbours_are_uncorrelated(p, row_step, col_step):
    mask = dropout_mask(state(7), p, 2, 3, 400, 400)
    shifted = mask[:, :, row_step:, col_step:]
    z = correlation_z(mask[:, :, : 400 - row_step, : 400 - col_step], shifted, p)
    assert abs(z) < Z_BOUND


@pytest.mark.parametrize("p", [0.1, 0.5, 0.9])
def test_batches_heads_seeds_and_offsets_are_uncorrelated(p):
    mask = dropout_mask(state(11), p, 3, 3, 256, 256)
    others = [
        mask.roll(1, 0),
        mask.roll(1, 1),
        mask.transpose(0, 1).roll(1, 0),
        dropout_mask(state(12), p, 3, 3, 256, 256),
        dropout_mask(state(11 + 2**32), p, 3, 3, 256, 256),
        dropout_mask(state(11, 1), p, 3, 3, 256, 256),
        dropout_mask(state(11, 2**32), p, 3, 3, 256, 256),
    ]
    for other in others:
        assert abs(correlation_z(mask, other, p)) < Z_BOUND


def check_normal(z, name):
    """Whether z-scores look standard normal: their mean square within 5 standard deviations, none beyond 6.5."""
    z = z.flatten()
    excess = (z.square().mean().item() - 1) * math.sqrt(z.numel() / 2)
    assert abs(excess) < 5 and z.abs().max().item() < 6.5, (name, excess, z.abs().max().item())


@pytest.mark.parametrize("p", [0.1, 0.5, 0.9])
def test_lines_and_pairs_of_lines_are_independent(p):
    """Rows and columns are as uneven as coins, and no two of them know of each other: all pairs of a head."""
    mask = dropout_mask(state(31), p, 1, 2, 1024, 1024)[0].double()
    for lines in (*mask, *(head.T for head in mask)):
        n = lines.shape[1]
        counts = lines.sum(1)
        check_normal((counts - n * (1 - p)) / math.sqrt(n * p * (1 - p)), "sums")
        expected = counts[:, None] * counts / n
        spread = ((n - counts[:, None]) * (n - counts) * expected / n / (n - 1)).sqrt()
        z = (lines @ lines.T - expected) / spread
        check_normal(z[torch.triu(torch.ones_like(z, dtype=torch.bool), 1)], "pairs")


@pytest.mark.parametrize("step", [1, 2, 3, 8, 16])
def test_triples_and_rectangles_are_independent(step):
    """Products of three and four entries, with those that share a row's word, a column's word, or both."""
    sign = dropout_mask(state(32), 0.5, 1, 2, 1024, 1024)[0].double() * 2 - 1
    for heads in (sign, sign.mT):
        across = heads * heads.roll(step, 2)  # products of two in a line
        n = heads.shape[2]
        check_normal((across @ heads.mT / math.sqrt(n))[:, :, ::3], "triples")
        rectangles = across @ across.mT / math.sqrt(n)
        keep = torch.triu(torch.ones_like(rectangles[0], dtype=torch.bool), 1)
        check_normal(rectangles[:, keep], "rectangles")


def test_both_columns_of_a_word_are_independent():
    """All bits of the uniforms: every 5-bit cell of (even, odd) is as full as it should be."""
    thresholds = [t << 27 for t in range(1, 16)]  # multiples of a 32nd, up to a half
    streams = dropout_streams(33, 0, range(1), range(2))
    below = torch.stack([~keep_mask(streams, 0, 512, 0, 2048, t) for t in (*thresholds, 2**31)])
    level = 16 - below.sum(0)  # 0 .. 15: the cell; 16: not below a half
    even, odd = level[..., 0::2].flatten(), level[..., 1::2].flatten()
    share = torch.tensor([1 / 32] * 16 + [0.5], dtype=torch.double)
    cells = torch.bincount(even * 17 + odd, minlength=17 * 17).view(17, 17)
    expected = even.numel() * share[:, None] * share
    chi = ((cells - expected).square() / expected).sum().item()
    assert abs(chi - 288) < 6 * math.sqrt(2 * 288)


def test_limits_of_rows_make_any_probability_exact():
    """Uniforms have 15 bits, but a row rounds its limit up or down: the rate over rows is that of 32 bits."""
    p = 2.5 / 2**15
    mask = dropout_mask(state(34), p, 1, 8, 2048, 1024)
    n = mask.numel()
    assert abs((~mask).sum().item() - n * p) < Z_BOUND * math.sqrt(n * p)


def test_zero_probability_keeps_everything():
    assert dropout_mask(state(3), 0.0, 2, 2, 50, 60).all()
    assert keep_scale(0.0) == 1.0


def test_threshold_and_scale_are_exact():
    assert [dropout_threshold(p) for p in (0.0, 0.25, 0.5, 0.75, 2.0**-32)] == [0, 2**30, 2**31, 3 * 2**30, 1]
    assert dropout_threshold(1 - 2.0**-40) == 2**32 - 1
    assert dropout_threshold(0.1) == 429496730
    assert keep_scale(0.5) == 2.0 and keep_scale(0.75) == 4.0
    assert keep_scale(1 - 2.0**-40) == 2.0**32
    assert keep_scale(0.1) == 2.0**32 / (2**32 - 429496730)


@pytest.mark.parametrize("shape", [(0, 2, 5, 5), (2, 0, 5, 5), (1, 1, 0, 5), (1, 1, 5, 0)])
def test_empty_masks(shape):
    assert dropout_mask(state(0), 0.5, *shape).shape == shape


def test_bad_arguments_are_named():
    with pytest.raises(RuntimeError, match=r"^rng_state: expected an int64 tensor of shape \[2\], got int32 \[2\]$"):
        dropout_mask(state(0).int(), 0.5, 1, 1, 2, 2)
    with pytest.raises(RuntimeError, match=r"^rng_state: expected an int64 tensor of shape \[2\], got int64 \[3\]$"):
        dropout_mask(torch.zeros(3, dtype=torch.int64), 0.5, 1, 1, 2, 2)
    for p in (-0.1, 1.0, math.nan):
        with pytest.raises(RuntimeError, match=r"^dropout_p: expected a value in \[0, 1\), got "):
            dropout_mask(state(0), p, 1, 1, 2, 2)
