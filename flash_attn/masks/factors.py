"""The normal form of a mask: up to four tensors, each of which hides scores; a score takes part where none does.

CPU backend, kernels and tests share this definition. Causal and window of the call hide further scores.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import NamedTuple

import torch
from torch import Tensor

from flash_attn import backends
from flash_attn.ops import context

WORD_BITS = 32
INT_MAX = 2**31 - 1
STRIP_ELEMENTS = 1 << 22  # scores that are evaluated at a time
OF_QUERIES = ("query_ranges", "bits")  # packed, their rows are queries; rows of other factors are keys
WHOLE = 2  # class of a block that bits do not hide
_GATHER_BITS = 0x0102040810204080  # moves bit 8 i to bit 56 + i, for i from 0 to 7


class MaskFactors(NamedTuple):
    """Tensors of one device, contiguous. b_m is 1 or the batch size; h_m divides the number h of query heads, and head
    i takes mask head i // (h / h_m); each tensor has its own b_m and h_m.

    query_ranges: int32 (b_m, h_m, sq, 2) or (..., 4). Query i sees keys in [lo, hi) or [lo2, hi2).
    key_hidden: int32 (b_m, h_m, sk, 2) or (..., 4). Key j is hidden from queries in [a, b) and in [c, d).
    bits: int32 (b_m, h_m, sq, ceil(sk / 32)). Bit j % 32 of word j // 32 is 1 where query i sees key j.
    block_map: uint8 (b_m, h_m, ceil(sq / block_q), ceil(sk / block_k)), of blocks of block_size = (block_q, block_k)
        scores: 0 is hidden, 1 is for `bits` to decide, 2 is not hidden whatever `bits` says.

    Packed sequences: (h_m, total_q, 2 or 4), (h_m, total_k, 2 or 4), (h_m, total_q, ceil(max_seqlen_k / 32)), no
    block_map; ranges and bits count from the first row of each sequence. Ranges may have any values: what lies outside
    of the sequence means nothing, and an inverted range is empty. So do bits beyond sk.
    """

    query_ranges: Tensor | None = None
    key_hidden: Tensor | None = None
    bits: Tensor | None = None
    block_map: Tensor | None = None
    block_size: tuple[int, int] = (0, 0)

    def tensors(self) -> dict[str, Tensor]:
        """The factors that there are, by name."""
        return {name: x for name, x in zip(self._fields, self) if isinstance(x, Tensor)}

    def with_tensors(self, tensors: dict[str, Tensor]) -> MaskFactors:
        return self._replace(**tensors)  # type: ignore[arg-type]  # none is block_size

    @property
    def is_packed(self) -> bool:
        return any(x.dim() == 3 for x in self.tensors().values())

    def entry(self, index: int) -> MaskFactors:
        """The mask of one batch entry."""
        return self._of_each(lambda x: x if x.shape[0] == 1 else x[index : index + 1])

    def sequence(self, q0: int, q1: int, k0: int, k1: int) -> MaskFactors:
        """The mask of one packed sequence, query rows [q0, q1) and key rows [k0, k1), as that of a batch of one."""
        rows, keys = slice(q0, q1), slice(k0, k1)
        return self.with_tensors(
            {name: x[None, :, rows if name in OF_QUERIES else keys] for name, x in self.tensors().items()}
        )

    def _of_each(self, function: Callable[[Tensor], Tensor]) -> MaskFactors:
        return self.with_tensors({name: function(x) for name, x in self.tensors().items()})

    def visible(self, batches: slice, heads: slice, rows: slice, cols: slice, num_heads: int) -> Tensor | None:
        """The scores that a dense mask leaves to batch entries, query heads (of num_heads), rows and keys: bool, with
        the sizes of these slices, or 1 on the first two axes; None for all.
        """
        seen = None
        for factor, evaluate in (
            (self.query_ranges, _in_query_ranges),
            (self.key_hidden, _not_key_hidden),
            (self.bits if self.block_map is None else self.block_map, self._in_blocks_or_bits),
        ):
            if factor is not None:
                part = evaluate(factor, batches, heads, rows, cols, num_heads)
                seen = part if seen is None else seen & part
        return seen

    def _in_blocks_or_bits(
        self, _: Tensor, batches: slice, heads: slice, rows: slice, cols: slice, num_heads: int
    ) -> Tensor:
        bits = None
        if self.bits is not None:
            words = slice(cols.start // WORD_BITS, -(-cols.stop // WORD_BITS))
            part, by_head = _select(self.bits, batches, heads, num_heads)
            first = cols.start - words.start * WORD_BITS
            bits = by_head(unpack_bits(part[:, :, rows, words])[..., first : first + cols.stop - cols.start])
        if self.block_map is None:
            assert bits is not None  # one of both is there
            return bits
        part, by_head = _select(self.block_map, batches, heads, num_heads)
        row_blocks = torch.arange(rows.start, rows.stop, device=part.device) // self.block_size[0]
        col_blocks = torch.arange(cols.start, cols.stop, device=part.device) // self.block_size[1]
        kind = by_head(part[:, :, row_blocks[:, None], col_blocks])
        return kind > 0 if bits is None else (kind >= WHOLE) | ((kind > 0) & bits)

    def key_bounds(self, batches: slice, heads: slice, rows: slice, sk: int, num_heads: int) -> tuple[int, int]:
        """Keys [lo, hi) outside of which query_ranges hides everything from these rows. Reads the tensor."""
        if self.query_ranges is None:
            return 0, sk
        part, _ = _select(self.query_ranges, batches, heads, num_heads)
        ranges = part[:, :, rows].unflatten(-1, (-1, 2)).clamp(0, sk)
        lo, hi = ranges.unbind(-1)
        filled = lo < hi
        if not filled.any():
            return 0, 0
        return int(lo[filled].min()), int(hi[filled].max())


def _select(x: Tensor, batches: slice, heads: slice, num_heads: int) -> tuple[Tensor, Callable[[Tensor], Tensor]]:
    """The mask heads of a factor that these query heads take, and a function that makes one head each of them."""
    x = x if x.shape[0] == 1 else x[batches]
    if x.shape[1] == 1:
        return x, lambda seen: seen
    if x.shape[1] == num_heads:
        return x[:, heads], lambda seen: seen
    group = num_heads // x.shape[1]
    first, stop = heads.start // group, -(-heads.stop // group)
    of_head = torch.arange(heads.start, heads.stop, device=x.device) // group - first
    return x[:, first:stop], lambda seen: seen[:, of_head]


def _in_query_ranges(x: Tensor, batches: slice, heads: slice, rows: slice, cols: slice, num_heads: int) -> Tensor:
    part, by_head = _select(x, batches, heads, num_heads)
    return by_head(_inside(part[:, :, rows, None], torch.arange(cols.start, cols.stop, device=x.device)))


def _not_key_hidden(x: Tensor, batches: slice, heads: slice, rows: slice, cols: slice, num_heads: int) -> Tensor:
    part, by_head = _select(x, batches, heads, num_heads)
    return by_head(~_inside(part[:, :, None, cols], torch.arange(rows.start, rows.stop, device=x.device)[:, None]))


def _inside(ranges: Tensor, positions: Tensor) -> Tensor:
    """Whether positions lie in one of the one or two ranges on the last axis."""
    inside = [(positions >= ranges[..., i]) & (positions < ranges[..., i + 1]) for i in range(0, ranges.shape[-1], 2)]
    return inside[0] if len(inside) == 1 else inside[0] | inside[1]


def pack_bits(seen: Tensor) -> Tensor:
    """Bool (..., n) as int32 words (..., ceil(n / 32)), the first element in the lowest bit."""
    is_plain = not (torch.compiler.is_compiling() or context.is_tracing() or context.transformed())
    extension = backends.cuda_extension() if is_plain and seen.is_cuda and type(seen) is Tensor else None
    if extension is not None:
        words: Tensor = extension.pack_bits(seen.contiguous())
        return words
    missing = -seen.shape[-1] % WORD_BITS
    padded = torch.nn.functional.pad(seen, (0, missing)) if missing else seen
    # torch.jit.trace cannot record a view of another dtype.
    if padded.numel() and is_plain:
        # Eight bytes of 0 or 1 are an int64, whose product has their bits in its highest byte. Memory of others may be
        # unaligned, and its bools any bytes.
        ones = padded.reshape(-1).view(torch.uint8).ne(0)
        bits = (ones.view(torch.int64) * _GATHER_BITS).view(torch.uint8)[7::8]
        return bits.contiguous().view(torch.int32).view(*padded.shape[:-1], padded.shape[-1] // WORD_BITS)
    # The method of tensors does not compile where torch has a default device.
    words = torch.unflatten(padded, -1, (padded.shape[-1] // WORD_BITS, WORD_BITS))
    shifts = torch.arange(WORD_BITS, dtype=torch.int32, device=seen.device)
    shifted: Tensor = words.int() << shifts
    return shifted.sum(-1, dtype=torch.int32)


def unpack_bits(words: Tensor) -> Tensor:
    """Int32 words (..., w) as bool (..., 32 w)."""
    shifts = torch.arange(WORD_BITS, dtype=torch.int32, device=words.device)
    return ((words[..., None] >> shifts) & 1).bool().flatten(-2)


def strips(rows: int, elements_per_row: int) -> Iterator[slice]:
    """[0, rows) in parts of about STRIP_ELEMENTS elements."""
    step = max(1, STRIP_ELEMENTS // max(1, elements_per_row))
    for start in range(0, rows, step):
        yield slice(start, min(start + step, rows))
