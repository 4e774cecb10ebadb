"""The public arguments of calls with 8-bit tensors, and the fields of the operators' records made from them."""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
from torch import Tensor

from flash_attn._types import Descale
from flash_attn.eight_bit import EIGHT_BIT, OF_QUERIES
from flash_attn.ops import arguments


class QuantArgs(NamedTuple):
    """The arguments of the public functions for 8-bit tensors: value = stored value * descale."""

    q_descale: Descale = None
    k_descale: Descale = None
    v_descale: Descale = None
    v_descale_axis: str | None = None
    out_dtype: torch.dtype | None = None
    exp: str = "exact"
    k_descale_axis: str | None = None

    def fields(self, q: Tensor) -> dict[str, Any]:
        """The given fields of an operator's record, by name; numbers become tensors on q's device."""
        axis, out_dtype = self.v_descale_axis, self.out_dtype
        if axis is not None:
            if not isinstance(axis, str) or axis != "channel":
                raise RuntimeError(f"v_descale_axis: expected None or 'channel', got {arguments.shown(axis)}")
            if self.v_descale is None:
                raise RuntimeError("v_descale_axis: expected None without v_descale, got 'channel'")
        if out_dtype is not None and not isinstance(out_dtype, torch.dtype):
            raise TypeError(f"out_dtype: expected a torch.dtype, got {arguments.shown(out_dtype)}")
        fields: dict[str, object] = {"v_per_channel": True} if axis is not None else {}
        if out_dtype is not None:
            fields["out_dtype"] = out_dtype
        for name in ("q_descale", "k_descale", "v_descale"):
            descale = getattr(self, name)
            if descale is not None:
                fields[name] = _descale(name, q, descale)
        return fields

    def allows_fast_exp(self, q: Tensor) -> bool:
        """Whether a call allows approximate exponentials, which only kernels of 8 bits have."""
        if not isinstance(self.exp, str) or self.exp not in ("exact", "fast"):
            raise RuntimeError(f"exp: expected 'exact' or 'fast', got {arguments.shown(self.exp)}")
        return self.exp == "fast" and q.dtype in OF_QUERIES

    def cache_fields(self, q: Tensor, caches: tuple[Tensor, Tensor], new: Tensor | None) -> dict[str, Any]:
        """`fields` of a call that appends `new` (None: nothing) to the caches (k, v). Descales of each row, which the
        append writes, are named k_token_descale and v_token_descale instead of k_descale and v_descale."""
        per_channel = isinstance(self.v_descale_axis, str) and self.v_descale_axis == "channel"
        fields = self._replace(v_descale_axis="channel" if per_channel else None).fields(q)
        axes = (self.k_descale_axis, None if per_channel else self.v_descale_axis)
        for name, axis, cache in zip("kv", axes, caches):
            descale = fields.get(f"{name}_descale")
            _check_descale_axis(name, axis, descale, cache)
            is_channel = per_channel and name == "v"
            if new is not None and not is_channel and _is_written(name, axis, descale, cache, new):
                fields[f"{name}_token_descale"] = fields.pop(f"{name}_descale")
        return fields


NO_QUANT = QuantArgs()


def _descale(name: str, q: Tensor, value: float | Tensor) -> Tensor:
    """A number becomes a tensor on q's device, without waiting for it."""
    if isinstance(value, Tensor):
        arguments.check_constant(name, value)
        return value
    return torch.full((), arguments.float32(name, value), dtype=torch.float32, device=q.device)


def _check_descale_axis(name: str, axis: str | None, descale: Tensor | None, cache: Tensor) -> None:
    if axis is None:
        return
    if not isinstance(axis, str) or axis not in ("page", "row"):
        known = "None, 'page' or 'row'" if name == "k" else "None, 'channel', 'page' or 'row'"
        raise RuntimeError(f"{name}_descale_axis: expected {known}, got {arguments.shown(axis)}")
    if descale is None:
        raise RuntimeError(f"{name}_descale_axis: expected None without {name}_descale, got {axis!r}")
    if cache.dim() == 4:
        shape = [cache.shape[0], cache.shape[1] if axis == "row" else 1, cache.shape[2]]
        if list(descale.shape) != shape:
            raise RuntimeError(
                f"{name}_descale: expected shape {shape} with {name}_descale_axis={axis!r}, got {list(descale.shape)}"
            )


def _is_written(name: str, axis: str | None, descale: Tensor | None, cache: Tensor, new: Tensor) -> bool:
    """Whether the descale is one of each row, which an append computes and writes."""
    if descale is None or descale.dim() != 3 or descale.shape != cache.shape[:3] or axis == "page":
        return False
    if axis is None and cache.shape[1] == 1:
        if new.dtype in EIGHT_BIT:
            return False  # nothing is to be written: one of the page
        raise RuntimeError(
            f"{name}_descale: expected {name}_descale_axis='row', for descales that an append writes, or 'page', for "
            "fixed ones, where pages have one row and both have one shape, got None"
        )
    return True
