"""What observes the calls of a backend: a profiler, which shows kernel family and shapes in the name of each call, and
FLASH_ATTN_DEBUG=1, which checks values on the device.

If one of them is on, `backends.of` returns an observed backend; other calls only pay for this test.
"""

from __future__ import annotations

import inspect
import os
from collections.abc import Callable
from functools import cache
from types import ModuleType

from torch import Tensor
from torch.autograd import profiler as profiler  # whose _is_profiler_enabled is for checks without latency

DEBUG = os.environ.get("FLASH_ATTN_DEBUG", "0") not in ("", "0")

# functions of a backend -> those that answer the same arguments with the plan of the call
EXPLAINED_BY = {
    "fwd": "explain_fwd",
    "varlen_fwd": "explain_varlen_fwd",
    "bwd": "explain_bwd",
    "varlen_bwd": "explain_varlen_bwd",
    "fwd_kvcache": "explain_kvcache",
}
_OBSERVED = (*EXPLAINED_BY, "kvcache_plan", "combine")


class Observed:
    """A backend whose calls are checked (FLASH_ATTN_DEBUG=1) and named (profiler)."""

    def __init__(self, backend: ModuleType) -> None:
        self._backend = backend

    def __getattr__(self, name: str) -> Callable[..., object]:
        function = getattr(self._backend, name)
        return self._observed(name, function) if name in _OBSERVED else function

    def _observed(self, name: str, function: Callable[..., object]) -> Callable[..., object]:
        def call(*args: object, **kwargs: object) -> object:
            named = {**dict(zip(_names(name), args)), **kwargs}
            if DEBUG:
                from flash_attn import value_checks

                value_checks.check(name, named)
            if profiler._is_profiler_enabled:
                with profiler.record_function(self._label(name, named, args, kwargs)):
                    result = function(*args, **kwargs)
            else:
                result = function(*args, **kwargs)
            if DEBUG and name == "kvcache_plan" and isinstance(result, Tensor):
                value_checks.remember_plan(result, named)
            return result

        return call

    def _label(self, name: str, named: dict[str, object], args: tuple[object, ...], kwargs: dict[str, object]) -> str:
        """Such as "flash_attn.fwd wgmma bf16 q[2, 4096, 16, 128] k[2, 4096, 4, 128] causal"."""
        parts = [f"flash_attn.{name}"]
        explain = getattr(self._backend, EXPLAINED_BY.get(name, ""), None)
        plan = explain(*args, **kwargs) if explain is not None else None
        parts += [plan[key] for key in ("kernel", "dtype") if plan and key in plan]
        for key in ("q", "k", "kcache"):
            x = named.get(key)
            if isinstance(x, Tensor):
                parts.append(f"{key}{list(x.shape)}")
        window = named.get("window_left", -1), named.get("window_right", -1)
        if named.get("is_causal"):
            parts.append("causal")
        elif window != (-1, -1):
            parts.append(f"window{list(window)}")
        return " ".join(parts)


@cache
def _names(name: str) -> tuple[str, ...]:
    """The names of a function's arguments: those of the CPU backend, which has the same."""
    from flash_attn import cpu

    return tuple(inspect.signature(getattr(cpu, name)).parameters)
