"""Which module computes attention for tensors of a device: one set of functions, two implementations."""

from __future__ import annotations

import importlib
from functools import cache
from types import ModuleType
from typing import cast

from torch import Tensor

from flash_attn import observation

_MODULES = {"cuda": "flash_attn_2_cuda", "cpu": "flash_attn.cpu"}


@cache
def get(device_type: str, name: str = "q") -> ModuleType:
    """Return the module that implements `fwd`, `varlen_fwd`, `bwd`, `varlen_bwd`, `fwd_kvcache`, ... on `device_type`.

    device_type is `torch.Tensor.device.type` of the argument `name`. Raises RuntimeError for a device without a
    backend, and for CUDA tensors when the CUDA extension is not installed.
    """
    if device_type not in _MODULES:
        raise RuntimeError(f"{name}: expected a tensor on cuda or cpu, got one on {device_type}")
    try:
        module = importlib.import_module(_MODULES[device_type])
        if is_stand_in(module):
            raise ImportError("it is the stand-in of an install without CUDA kernels")
        return module
    except ImportError as error:
        if device_type == "cpu":
            raise
        raise RuntimeError(
            f"{name}: expected a CPU tensor, got one on cuda: this flash_attn has only the CPU backend "
            f"(importing the extension flash_attn_2_cuda failed: {error}). Reinstall on a machine with nvcc and a "
            "CUDA build of torch: pip install --no-build-isolation --force-reinstall --no-deps ."
        ) from error


def is_stand_in(module: ModuleType) -> bool:
    """Whether a module named flash_attn_2_cuda is that of a CPU-only install, whose functions all raise."""
    return getattr(module, "CPU_ONLY", False) is True


def of(tensor: Tensor, name: str = "q") -> ModuleType:
    """`get` for the device of a tensor; `device.type` makes a string, which costs as much as the rest of a look-up."""
    backend = get("cuda" if tensor.is_cuda else "cpu" if tensor.is_cpu else tensor.device.type, name)
    if observation.DEBUG or observation.profiler._is_profiler_enabled:
        return cast(ModuleType, observation.Observed(backend))
    return backend


def cuda_extension() -> ModuleType | None:
    """Return the module `flash_attn_2_cuda`, or None where it is not installed."""
    try:
        return get("cuda")
    except RuntimeError:
        return None
