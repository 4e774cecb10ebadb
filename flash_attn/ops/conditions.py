"""Conditions on numbers, some of which compiled code learns only when it runs (`.item()`)."""

from __future__ import annotations

from typing import Union, cast

import torch

_is_compiling = torch.compiler.is_compiling
Condition = Union[bool, torch.SymBool, torch.Tensor]  # a tensor under torch.jit.trace, where sizes are tensors


def may_hold(condition: Condition) -> bool:
    """A condition on numbers; True where compiled code cannot tell."""
    return _guard("guard_or_true", condition)


def holds(condition: Condition) -> bool:
    """A condition on numbers that a call requires: where compiled code cannot tell, it checks that when it runs."""
    if not may_hold(condition):
        return False
    if _is_compiling() and not is_known(condition):
        torch._check(condition)
    return True


def is_known(condition: Condition) -> bool:
    """A condition on numbers; False where compiled code cannot tell."""
    return _guard("guard_or_false", condition)


def is_decided(condition: Condition) -> bool:
    """Whether compiled code can tell if a condition on numbers holds."""
    return is_known(condition) or not may_hold(condition)


def _guard(name: str, condition: Condition) -> bool:
    if type(condition) is bool and not _is_compiling():
        return condition
    if isinstance(condition, torch.Tensor):
        return bool(condition)
    from torch.fx.experimental import symbolic_shapes  # sympy, which eager code has no need of

    guard = getattr(symbolic_shapes, name, None)  # torch 2.8 and newer; before, such numbers break the graph
    return cast(bool, condition if guard is None else guard(condition))
