"""What every entry point of the backend does before its arithmetic."""

from __future__ import annotations

import functools

import torch


def entry_point(function):
    """`function` without autograd and without autocast, which would cast the operands of single products."""

    @functools.wraps(function)
    def call(*args, **kwargs):
        with torch.no_grad():
            if not torch.is_autocast_enabled("cpu"):
                return function(*args, **kwargs)
            with torch.autocast("cpu", enabled=False):
                return function(*args, **kwargs)

    return call
