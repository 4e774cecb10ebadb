"""Buffers that no state_dict has: their module computes them, also after a loader gave them memory without values."""

from __future__ import annotations

from collections.abc import Callable
from typing import cast

import torch
from torch import Tensor
from torch._subclasses import FakeTensor

from flash_attn._types import Device


def has_values(x: Tensor) -> bool:
    """Whether x is a tensor with memory: not one on the meta device, nor one of a FakeTensorMode, as exports use it."""
    return not (x.is_meta or isinstance(x, FakeTensor))


class DerivedBuffers(torch.nn.Module):
    """A module whose buffers are not saved: their values follow from its arguments.

    A module built on the meta device gets memory from to_empty() or from a loader, but no values: load_state_dict() has
    none for these buffers. They are computed when memory comes by to_empty() and the like, else on first use.
    """

    _filled = True  # False: the buffers are on meta, or were so when a loader put memory in their place
    _stays_float32 = False  # also in a module cast to half precision

    def _derived(self, device: Device) -> dict[str, Tensor | None]:
        """The buffers by name, those that follow from numbers."""
        raise NotImplementedError

    def _register_derived(self, **buffers: Tensor | None) -> None:
        for name, x in buffers.items():
            self.register_buffer(name, x, persistent=False)
        self._filled = not self._lacks_values()

    def reset_parameters(self) -> None:
        """Compute the buffers anew, where they are. FSDP calls it after to_empty()."""
        for x in self.buffers(recurse=False):
            self._fill(x.device)
            return

    def _ensure_filled(self, device: Device) -> None:
        """Before a use on `device`."""
        if not self._filled:
            self._fill(device)

    def _fill(self, device: Device) -> None:
        with torch.inference_mode(False):  # a backward may save them
            for name, x in self._derived(device).items():
                if x is not None:
                    buffer = cast(Tensor, self._buffers[name])
                    self._buffers[name] = x.to(self._dtype_like(buffer))
        self._filled = not self._lacks_values()

    def _lacks_values(self) -> bool:
        return any(not has_values(x) for x in self._buffers.values() if x is not None)

    def _dtype_like(self, buffer: Tensor) -> torch.dtype:
        return torch.float32 if self._stays_float32 else buffer.dtype

    def _apply(self, fn: Callable[[Tensor], Tensor], recurse: bool = True) -> DerivedBuffers:
        before = {name: x for name, x in self._buffers.items() if x is not None}
        super()._apply(fn, recurse)  # type: ignore[no-untyped-call]
        device = None
        for name, old in before.items():
            new = cast(Tensor, self._buffers[name])
            self._buffers[name], device = self._with_values(old, new), new.device
        self._filled = self._filled and not self._lacks_values()
        self._ensure_filled(device)
        return self

    def _with_values(self, old: Tensor, new: Tensor) -> Tensor:
        """A buffer like new, which _apply() got for old, with the values of old: new may be memory without any."""
        dtype = self._dtype_like(new)
        if not has_values(new):
            return new.to(dtype)
        return old.to(device=new.device, dtype=dtype) if has_values(old) else torch.empty_like(new, device="meta")


if tuple(map(int, torch.__version__.split(".")[:2])) < (2, 6):  # whose compiler leaves the buffers without values
    DerivedBuffers._fill = torch.compiler.disable(DerivedBuffers._fill)  # type: ignore[method-assign]
