"""What every entry point of the backend does before its arithmetic."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import TypeVar

import torch

from . import checks

_Result = TypeVar("_Result")


def entry_point(function: Callable[..., _Result]) -> Callable[..., _Result]:
    """`function` without autograd and without autocast, which would cast the operands of single products.

    sm_margin, by name, is checked and has no effect: nothing here leaves multiprocessors to anything.
    """

    @functools.wraps(function)
    def call(*args: object, sm_margin: int = 0, **kwargs: object) -> _Result:
        checks.require(sm_margin >= 0, "sm_margin", "a value >= 0", sm_margin)
        with torch.no_grad():
            if not torch.is_autocast_enabled("cpu"):
                return function(*args, **kwargs)
            with torch.autocast("cpu", enabled=False):
                return function(*args, **kwargs)

    return call
