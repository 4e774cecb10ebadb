"""The mask that hides what either of two masks hides."""

from __future__ import annotations

import math
from collections.abc import Callable

import torch
from torch import Tensor

from .blocks import PARTIAL
from .checks import require
from .factors import WHOLE, WORD_BITS, MaskFactors, pack_bits, strips


def conjunction(a: MaskFactors, b: MaskFactors, seqlen_q: int | None, seqlen_k: int | None) -> MaskFactors:
    """Factors of a and b together. What a factor cannot hold becomes bits, which needs dense masks of known lengths."""
    query_ranges, rest_ranges = _joined(a.query_ranges, b.query_ranges, _intersections)
    key_hidden, rest_hidden = _joined(a.key_hidden, b.key_hidden, _unions)
    rest = MaskFactors(rest_ranges, rest_hidden)
    if a.block_map is not None and b.block_map is not None and a.block_size != b.block_size:
        rest = rest._replace(bits=b.bits, block_map=b.block_map, block_size=b.block_size)
        b = b._replace(bits=None, block_map=None, block_size=(0, 0))
    block_map, block_size = _joined_maps(a, b)
    words = [_decided_bits(x, seqlen_q, seqlen_k) for x in (a, b)]
    if rest.tensors():
        words.append(bits_of(rest, seqlen_q, seqlen_k))
        block_map = None if block_map is None else block_map.clamp(max=PARTIAL)  # no block is exempt from these bits
    bits = None
    for more in words:
        bits, _ = _joined(bits, more, lambda x, y: torch.bitwise_and(*_aligned(x, y)))
    return MaskFactors(query_ranges, key_hidden, bits, block_map, block_size)


def _joined(
    x: Tensor | None, y: Tensor | None, join: Callable[[Tensor, Tensor], Tensor | None]
) -> tuple[Tensor | None, Tensor | None]:
    """(both, rest): join(x, y), or where that is None x and what remains, y."""
    if x is None or y is None:
        return (y if x is None else x), None
    both = join(x, y)
    return (x, y) if both is None else (both, None)


def _joined_maps(a: MaskFactors, b: MaskFactors) -> tuple[Tensor | None, tuple[int, int]]:
    """block_map and block_size of two masks whose maps, if both have one, are of the same blocks."""
    if a.block_map is None and b.block_map is None:
        return None, (0, 0)
    kinds = torch.minimum(*_aligned(_kinds(a, b), _kinds(b, a))).contiguous()
    return kinds, a.block_size if a.block_map is not None else b.block_size


def bits_of(mask: MaskFactors, sq: int | None, sk: int | None) -> Tensor:
    """A dense mask as bits alone, evaluated in strips of rows."""
    require(not mask.is_packed, "mask", "a combination that packed ranges hold", "one that needs bits")
    known = sq is not None and sk is not None
    require(known, "mask", "masks of known seqlen_q and seqlen_k where they have to become bits", f"{sq} and {sk}")
    assert sq is not None and sk is not None
    tensors = mask.tensors().values()
    batch, heads = _common_batch(*tensors), math.lcm(*(x.shape[1] for x in tensors))
    device = next(iter(tensors)).device
    words = torch.empty(batch, heads, sq, -(-sk // WORD_BITS), dtype=torch.int32, device=device)
    for rows in strips(sq, batch * heads * sk):
        seen = mask.visible(slice(0, batch), slice(0, heads), rows, slice(0, sk), heads)
        assert seen is not None  # some factor hides
        words[:, :, rows] = pack_bits(seen)
    return words


def _decided_bits(mask: MaskFactors, sq: int | None, sk: int | None) -> Tensor | None:
    """The bits of a mask, with those of the blocks that they do not decide."""
    if mask.bits is None or mask.block_map is None:
        return mask.bits
    return bits_of(MaskFactors(bits=mask.bits, block_map=mask.block_map, block_size=mask.block_size), sq, sk)


def _kinds(mask: MaskFactors, other: MaskFactors) -> Tensor:
    """The block_map of a mask, or that of one without, in the blocks of the other."""
    if mask.block_map is None:
        assert other.block_map is not None
        return torch.full_like(other.block_map, WHOLE if mask.bits is None else PARTIAL)
    return mask.block_map if mask.bits is not None else mask.block_map.clamp(max=1) * WHOLE


def _intersections(a: Tensor, b: Tensor) -> Tensor | None:
    """Ranges in both; None where both have two."""
    if min(a.shape[-1], b.shape[-1]) > 2:
        return None
    a, b = _aligned(a, b)
    single, ranges = (a, b) if a.shape[-1] == 2 else (b, a)
    low, high = (single[..., i : i + 1] for i in (0, 1))
    parts = [
        (torch.maximum(ranges[..., i : i + 1], low), torch.minimum(ranges[..., i + 1 : i + 2], high))
        for i in range(0, ranges.shape[-1], 2)
    ]
    return torch.cat([bound for pair in parts for bound in pair], -1)


def _unions(a: Tensor, b: Tensor) -> Tensor | None:
    """Ranges in either; None where these are more than two."""
    return torch.cat(_aligned(a, b), -1) if a.shape[-1] + b.shape[-1] == 4 else None


def _common_batch(*tensors: Tensor) -> int:
    sizes = [x.shape[0] for x in tensors]
    batch = next((size for size in sizes if size != 1), 1)
    require(all(size in (1, batch) for size in sizes), "mask", "masks of one batch", f"sizes {sizes}")
    return batch


def _aligned(a: Tensor, b: Tensor) -> tuple[Tensor, Tensor]:
    """Two tensors (b_m, h_m, ...) or (h_m, ...) with as many batch entries and mask heads."""
    heads = math.lcm(a.shape[-3], b.shape[-3])
    a, b = (x.repeat_interleave(heads // x.shape[-3], -3) if x.shape[-3] != heads else x for x in (a, b))
    if a.dim() == 4:
        batch = _common_batch(a, b)
        a, b = (x.expand(batch, *x.shape[1:]) for x in (a, b))
    return a, b
