"""Masks as data from transformers' mask functions, whose closures say what they are: chunks, blocks of images and of
prefixes, packed sequences, windows, and their unions and intersections.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from flash_attn._types import Device
from flash_attn.integrations import token_layout
from flash_attn.masks import AttentionMask
from flash_attn.masks.ranges import run_bounds

_FAR = 2**40  # beyond all keys
# Parts of mask functions that are no window, by the beginnings of their names.
_OTHER_MASKS = ("or_masks", "chunked_overlay", "blockwise_overlay")
MaskFunction = Callable[..., object]
_Range = tuple[Tensor, Tensor]  # begin and end of keys, int64, each broadcastable to (batch, queries)


class _NoRanges(Exception):
    """The mask is no union of two ranges of keys for each query."""


class _Queries(NamedTuple):
    place: Tensor  # (queries,): the index of each query among the keys
    position: Tensor  # (queries,) or (batch, queries): in their packed sequence
    tokens: Tensor | None  # bool (batch, n): which keys are no padding


def other_mask(function: object) -> str | None:
    """The part of a mask function that is no causal mask, window or packed sequence, by name, if there is one."""
    return next((part.split(".")[0] for part in _parts(function) if part.startswith(_OTHER_MASKS)), None)


def _parts(function: object) -> Iterator[str]:
    """The qualified names of a mask function and of the functions that it is made of."""
    if isinstance(function, (tuple, list)):
        for one in function:
            yield from _parts(one)
    elif callable(function):
        yield getattr(function, "__qualname__", "")
        for cell in getattr(function, "__closure__", None) or ():
            yield from _parts(cell.cell_contents)


def mask_of(
    function: MaskFunction,
    batch_size: int,
    q_length: int,
    kv_length: int,
    q_offset: int | Tensor,
    kv_offset: int,
    tokens: Tensor | None,
    use_vmap: bool,
    device: Device,
) -> AttentionMask | Tensor:
    """What a mask function and padding leave visible; of a single query a bool (batch, keys).

    tokens: bool (batch, columns), which keys are no padding; missing columns are padding. use_vmap: the
    function takes single indices.

    The mask has two ranges of keys for each query if they suffice, else bits, for which transformers evaluates all
    scores. Waits for the GPU once if there are blocks.
    """
    if q_length > 1 and not torch.compiler.is_compiling():  # compiled code cannot look into closures
        try:
            return _ranges_mask(function, q_length, kv_length, q_offset, kv_offset, tokens, device)
        except _NoRanges:
            pass
    from transformers.masking_utils import sdpa_mask

    seen = sdpa_mask(
        batch_size=batch_size,
        q_length=q_length,
        kv_length=kv_length,
        q_offset=q_offset,  # type: ignore[arg-type]  # a Tensor of a static cache
        kv_offset=kv_offset,
        mask_function=function,
        attention_mask=tokens,
        allow_is_causal_skip=False,
        use_vmap=use_vmap,
        device=device,  # type: ignore[arg-type]  # or None
    )
    assert seen is not None  # because it may not be skipped
    return seen[:, 0, 0] if q_length == 1 else AttentionMask.from_tensor(seen)


def _ranges_mask(
    function: MaskFunction,
    q_length: int,
    kv_length: int,
    q_offset: int | Tensor,
    kv_offset: int,
    tokens: Tensor | None,
    device: Device,
) -> AttentionMask:
    index = torch.arange(q_length, device=device) + q_offset
    bounds = [x - kv_offset for one in _ranges(function, _Queries(index, index, tokens)) for x in one]
    factors = AttentionMask.query_ranges(*torch.broadcast_tensors(*bounds)).factors
    mask = AttentionMask(factors, q_length, kv_length)
    if tokens is None:
        return mask
    missing = kv_length + kv_offset - tokens.shape[1]
    keep = torch.nn.functional.pad(tokens, (0, missing)) if missing > 0 else tokens
    return mask & AttentionMask.key_padding(keep[:, kv_offset : kv_offset + kv_length])


def _ranges(function: MaskFunction, queries: _Queries) -> list[_Range]:
    """The keys that the queries see, as a union. Raises _NoRanges."""
    known = _KNOWN.get(getattr(function, "__qualname__", "").split(".")[0])
    if known is None:
        raise _NoRanges
    cells = getattr(function, "__closure__", None) or ()
    return known(queries, **dict(zip(function.__code__.co_freevars, (cell.cell_contents for cell in cells))))


def _causal(queries: _Queries) -> list[_Range]:
    return [(queries.place.new_full((1,), -_FAR), queries.place + 1)]


def _full(queries: _Queries) -> list[_Range]:
    return [(queries.place.new_full((1,), -_FAR), queries.place.new_full((1,), _FAR))]


def _window(queries: _Queries, sliding_window: int) -> list[_Range]:
    return [(queries.place - sliding_window + 1, queries.place.new_full((1,), _FAR))]


def _both_sides(queries: _Queries, sliding_window: int) -> list[_Range]:
    return [(queries.place - sliding_window, queries.place + sliding_window + 1)]


def _chunks(queries: _Queries, chunk_size: int, left_padding: Tensor) -> list[_Range]:
    begin = queries.place - (queries.position - left_padding[:, None]) % chunk_size
    return [(begin, begin + chunk_size)]


def _blocks(queries: _Queries, block_sequence_ids: Tensor) -> list[_Range]:
    ids = block_sequence_ids
    if queries.tokens is not None and queries.tokens.shape[1] <= ids.shape[1]:
        ids = ids.where(torch.nn.functional.pad(queries.tokens, (0, ids.shape[1] - queries.tokens.shape[1])), -1)
    begin, end = run_bounds(ids)
    if not _each_is_a_run(ids, begin):
        raise _NoRanges
    is_block = ids >= 0
    return [(begin.where(is_block, 0)[:, queries.place], end.where(is_block, 0)[:, queries.place])]


def _each_is_a_run(ids: Tensor, begin: Tensor) -> bool:
    """Whether the keys of each block follow each other. Blocks that are not in ascending order count as if not."""
    if token_layout.is_traced():
        return False
    before = torch.nn.functional.pad(ids.cummax(-1).values, (1, 0), value=-1)
    return bool(((ids < 0) | (before.gather(-1, begin) < ids)).all())


def _packed(queries: _Queries, packed_sequence_mask: Tensor) -> list[_Range]:
    begin, end = run_bounds(packed_sequence_mask)
    return [(begin[:, queries.place], end[:, queries.place])]


def _in_sequence(queries: _Queries, mask_function: MaskFunction, position_ids: Tensor) -> list[_Range]:
    """A mask that counts positions within packed sequences, which another mask keeps apart."""
    return _ranges(mask_function, queries._replace(position=position_ids[:, queries.place]))


def _intersection(queries: _Queries, mask_functions: Sequence[MaskFunction]) -> list[_Range]:
    seen = _full(queries)
    for function in mask_functions:
        others = _ranges(function, queries)
        seen = [(torch.maximum(a, c), torch.minimum(b, d)) for a, b in seen for c, d in others]
    return _at_most_two(seen)


def _union(queries: _Queries, mask_functions: Sequence[MaskFunction]) -> list[_Range]:
    return _at_most_two([one for function in mask_functions for one in _ranges(function, queries)])


def _at_most_two(ranges: list[_Range]) -> list[_Range]:
    if len(ranges) > 2:
        raise _NoRanges
    return ranges


_KNOWN: dict[str, Callable[..., list[_Range]]] = {
    "causal_mask_function": _causal,
    "bidirectional_mask_function": _full,
    "sliding_window_overlay": _window,
    "sliding_window_bidirectional_overlay": _both_sides,
    "chunked_overlay": _chunks,
    "blockwise_overlay": _blocks,
    "packed_sequence_mask_function": _packed,
    "remap_positions_for_packed_sequence": _in_sequence,
    "and_masks": _intersection,
    "or_masks": _union,
}
