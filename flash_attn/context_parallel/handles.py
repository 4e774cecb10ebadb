"""Tensors that name plans: another batch's plan is then no other code for a compiler."""

from __future__ import annotations

import itertools
import weakref

import torch
from torch import Tensor

_plans: weakref.WeakValueDictionary = weakref.WeakValueDictionary()  # by the numbers in their handles
_numbers = itertools.count()


def handle_of(plan) -> Tensor:
    """int64 (1,) on the CPU: a number that names the plan as long as it lives."""
    number = next(_numbers)
    _plans[number] = plan
    return torch.tensor([number], device="cpu")


def plan_of(handle: Tensor):
    plan = _plans.get(handle.item())
    if plan is None:
        raise RuntimeError("plan: expected one that lasts until the backward of compiled code, got one that is gone")
    return plan
