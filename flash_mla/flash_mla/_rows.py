"""Rows of a latent cache, as they are stored: 16-bit numbers, or e4m3 with scales and a part in bfloat16."""

from __future__ import annotations

from functools import cache
from typing import NamedTuple

import torch
from torch import Tensor

import flash_attn
from flash_attn.ops import head_tables, latent

_BYTES = (torch.float8_e4m3fn, torch.int8, torch.uint8)
_ROPE = 64  # columns in bfloat16


class _Layout(NamedTuple):
    """Bytes of a page: rows of `stride` bytes, in each e4m3 values and columns in bfloat16, and scales."""

    columns: int  # of e4m3
    group: int  # columns of a scale
    stride: int
    rope: int  # where the columns in bfloat16 begin
    scales: int  # bytes of a row's scales: in the row after e4m3, or after all rows of the page

    @property
    def groups(self) -> int:
        return self.columns // self.group


# by the bytes of a row, the scales included
_LAYOUTS = {656: _Layout(512, 128, 656, 528, 16), 584: _Layout(448, 64, 576, 448, 8)}


class Rows:
    """A cache (pages, page_size, 1, columns), or of bytes (pages, page_size, 1, 656 or 584), by the index of a row."""

    def __init__(self, name: str, cache: Tensor, is_fp8: bool) -> None:
        if cache.dim() != 4:
            raise RuntimeError(f"{name}: expected 4 dimensions (pages, page_size, heads, head_dim), got {cache.dim()}")
        self.cache, self.page_size = cache, cache.shape[1]
        self.count = cache.shape[0] * cache.shape[1]
        self._layout: _Layout | None = None
        if not is_fp8:
            return
        if cache.dtype not in _BYTES:
            raise RuntimeError(f"{name}: expected dtype float8_e4m3fn, int8 or uint8 of FP8 rows, got {cache.dtype}")
        pages, size, heads, width = cache.shape
        if heads != 1 or width not in _LAYOUTS:
            raise RuntimeError(f"{name}: expected FP8 rows (pages, page_size, 1, 656 or 584), got {list(cache.shape)}")
        if cache.numel() > 0 and (cache.stride(3) != 1 or (size > 1 and cache.stride(1) != width)):
            raise RuntimeError(f"{name}: expected pages of contiguous bytes, got strides {list(cache.stride())}")
        self._layout = _LAYOUTS[width]
        self._bytes = cache.view(torch.uint8).as_strided((pages, size * width), (cache.stride(0), 1))

    @property
    def is_fp8(self) -> bool:
        return self._layout is not None

    @property
    def columns(self) -> int:
        """Of a row as numbers."""
        return self.cache.shape[3] if self._layout is None else self._layout.columns + _ROPE

    @property
    def stored(self) -> Tensor:
        """The cache as 16-bit numbers or uint8."""
        return self.cache.view(torch.uint8) if self.is_fp8 else self.cache

    def pool(self) -> tuple[Tensor, int, int]:
        """(pages of one row each, their distance from a page to the next, from a row to the next)."""
        return head_tables.pool_of_heads(self.stored.transpose(1, 2))

    def has_kernel(self, q: Tensor, head_dim_v: int) -> bool:
        """Whether attention reads the rows as they are stored."""
        if not self.is_fp8:
            return True
        if q.device.type != "cuda" or q.dtype != torch.bfloat16 or self._layout != _LAYOUTS[656]:
            return False
        return head_dim_v == self._layout.columns and _has_fp8_kernel(q.device.index or 0)

    def gather(self, indices: Tensor, dtype: torch.dtype) -> Tensor:
        """The rows (..., columns) of indices (...) that exist, as numbers."""
        page, row = indices // self.page_size, indices % self.page_size
        if self._layout is None:
            return self.cache[page, row, 0].to(dtype)
        layout = self._layout
        values = self._at(page, row * layout.stride, layout.columns).view(torch.float8_e4m3fn).float()
        rope = self._at(page, row * layout.stride + layout.rope, 2 * _ROPE).view(torch.bfloat16)
        scaled = values.unflatten(-1, (layout.groups, layout.group)) * self._scales(page, row)[..., None]
        return torch.cat([scaled.flatten(-2).to(dtype), rope.to(dtype)], -1)

    def _scales(self, page: Tensor, row: Tensor) -> Tensor:
        assert self._layout is not None
        layout = self._layout
        if layout.scales == 4 * layout.groups:
            return self._at(page, row * layout.stride + layout.columns, layout.scales).view(torch.float32)
        first = self.page_size * layout.stride
        exponent = self._at(page, first + row * layout.scales, layout.groups).int()
        bits = (exponent << 23).masked_fill(exponent == 0, 1 << 22)  # 2^-127 is denormal
        return bits.view(torch.float32).masked_fill(exponent == 255, float("nan"))

    def _at(self, page: Tensor, first: Tensor, count: int) -> Tensor:
        """`count` bytes of each page from `first` on."""
        return self._bytes[page[..., None], first[..., None] + torch.arange(count, device=page.device)]


@cache
def _has_fp8_kernel(index: int) -> bool:
    """Whether the wgmma kernel, which alone reads FP8 rows, runs on a GPU."""
    build = flash_attn.__build__
    is_built = "90" in build["archs"] and latent.KERNEL_DIMS[0] in build["head_dims"]
    return torch.cuda.get_device_capability(index) == (9, 0) and is_built


def parts(rows: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """(e4m3 values, their scales, columns in bfloat16) of rows (pages, page_size, 1, 656) of uint8: views."""
    layout = _LAYOUTS[656]
    values, scales, rope = rows.split((layout.columns, layout.scales, 2 * _ROPE), -1)
    return values.view(torch.float8_e4m3fn), scales.view(torch.float32), rope.view(torch.bfloat16)
