"""Argument checks of masks: shapes and dtypes, never values, which only the device may know."""

from __future__ import annotations

from typing import Optional

import torch
from torch import Tensor

from flash_attn.ops import arguments

from .factors import WORD_BITS, MaskFactors

INTEGERS = (torch.uint8, torch.int8, torch.int16, torch.int32, torch.int64)
_Sizes = tuple[Optional[int], tuple[int, ...]]  # of the next to last axis; what the last one may be


def require(condition: bool, name: str, expected: str, got: object) -> None:
    """Raise RuntimeError "<name>: expected <expected>, got <got>" unless the condition holds."""
    if not condition:
        raise RuntimeError(f"{name}: expected {expected}, got {got}")


def dtype_name(dtype: torch.dtype) -> str:
    return str(dtype).replace("torch.", "")


def check_tensor(name: str, x: object, dtypes: tuple[torch.dtype, ...], axes: tuple[str, ...]) -> None:
    """A strided tensor of one of these dtypes, with the axes of one of these lists."""
    arguments.check_tensors((name,), (x,))
    assert isinstance(x, Tensor)
    names = "an integer dtype" if dtypes == INTEGERS else f"dtype {' or '.join(dtype_name(d) for d in dtypes)}"
    require(x.dtype in dtypes, name, names, dtype_name(x.dtype))
    ranks = [len(a.split(",")) if a else 0 for a in axes]
    require(x.dim() in ranks, name, f"shape {' or '.join(f'({a})' for a in axes)}", list(x.shape))


def check_length(name: str, value: object) -> int:
    """A length that the caller has to give."""
    return arguments.integer(name, value, least=0)


def check_factors(mask: MaskFactors, batch: int, heads: int, sq: int, sk: int, device: torch.device) -> None:
    """A dense mask for a call of these sizes."""
    require(not mask.is_packed, "mask", "a mask of dense sequences", "one of packed sequences")
    _check_common(mask, heads, device)
    words, (block_q, block_k) = -(-sk // WORD_BITS), mask.block_size
    sizes: dict[str, _Sizes] = {"query_ranges": (sq, (2, 4)), "key_hidden": (sk, (2, 4)), "bits": (sq, (words,))}
    if mask.block_map is not None:
        require(block_q > 0 and block_k > 0, "mask", "a block_size of positive ints", mask.block_size)
        sizes["block_map"] = -(-sq // block_q), (-(-sk // block_k),)
    for name, x in mask.tensors().items():
        require(x.dim() == 4, f"mask.{name}", "4 dimensions", list(x.shape))
        fits = x.shape[0] in (1, batch)
        require(fits, f"mask.{name}", f"a batch of 1 or {batch}", f"shape {list(x.shape)}")
        _check_sizes(name, x, sizes[name])


def check_packed_factors(
    mask: MaskFactors, heads: int, total_q: int, total_k: int | None, max_seqlen_k: int, device: torch.device
) -> None:
    """A packed mask for a call of these sizes; total_k None is that of pages, whose keys have no rows in common."""
    require(mask.is_packed or not mask.tensors(), "mask", "a mask of packed sequences", "one of dense sequences")
    require(mask.block_map is None, "mask", "no block_map for packed sequences", "one")
    require(total_k is not None or mask.key_hidden is None, "mask", "no key_hidden with block_table", "one")
    _check_common(mask, heads, device)
    sizes: dict[str, _Sizes] = {"query_ranges": (total_q, (2, 4)), "key_hidden": (total_k, (2, 4))}
    sizes["bits"] = total_q, (-(-max_seqlen_k // WORD_BITS),)
    for name, x in mask.tensors().items():
        require(x.dim() == 3, f"mask.{name}", "3 dimensions", list(x.shape))
        _check_sizes(name, x, sizes[name])


def _check_common(mask: MaskFactors, heads: int, device: torch.device) -> None:
    for name, x in mask.tensors().items():
        require(x.device == device, f"mask.{name}", f"a tensor on q's device ({device})", f"one on {x.device}")
        dtype = torch.uint8 if name == "block_map" else torch.int32
        require(x.dtype == dtype, f"mask.{name}", f"dtype {dtype_name(dtype)}", dtype_name(x.dtype))
        mask_heads = x.shape[-3]
        divides = mask_heads == heads or (mask_heads > 0 and heads % mask_heads == 0)
        require(divides, f"mask.{name}", f"a head count that divides {heads}", f"shape {list(x.shape)}")
        require(x.is_contiguous(), f"mask.{name}", "a contiguous tensor", f"strides {list(x.stride())}")


def _check_sizes(name: str, x: Tensor, sizes: _Sizes) -> None:
    rows, last = sizes
    shown = f"{rows} x {' or '.join(str(size) for size in last)}"
    fits = x.shape[-2] == rows and x.shape[-1] in last
    require(fits, f"mask.{name}", f"{shown} as its last two sizes", f"shape {list(x.shape)}")
