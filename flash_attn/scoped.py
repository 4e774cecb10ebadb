"""Values that `with` blocks set, for a thread or an asyncio task, also in compiled code."""

from __future__ import annotations

from contextvars import ContextVar
from threading import _DummyThread, current_thread
from types import ModuleType
from typing import Any, Generic, TypeVar

import torch

_Value = TypeVar("_Value")


class Scoped(ModuleType, Generic[_Value]):
    """The value of the innermost block that this thread or asyncio task is in.

    Backwards on a GPU run in threads of autograd's, in which checkpoints are recomputed: they have the value of the
    block that was opened last, of any thread.

    A module, for torch.compile: it cannot trace a ContextVar, but reads an attribute of a module, also one that is a
    property, before each call of compiled code, and compiles anew for another value.
    """

    def __init__(self, name: str) -> None:
        super().__init__(name)
        self._blocks: ContextVar[tuple[_Value, Any] | None] = ContextVar(
            name, default=None
        )  # (value, blocks around it)
        self._open: list[_Value] = []  # values of all blocks

    @property
    def value(self) -> _Value | None:
        """None outside of blocks."""
        blocks = self._blocks.get()
        if blocks is not None:
            return blocks[0]
        return self._open[-1] if self._open and _is_thread_of_autograd() else None

    @property
    def is_open(self) -> bool:
        """Whether any thread or task is in a block."""
        return bool(self._open)

    def enter(self, value: _Value) -> None:
        self._open.append(value)
        self._blocks.set((value, self._blocks.get()))

    def leave(self, value: _Value) -> None:
        self._open.remove(value)
        blocks = self._blocks.get()
        if blocks is not None:  # a generator may be closed where its block is not known
            self._blocks.set(blocks[1])


def _is_thread_of_autograd() -> bool:
    """Whether this is a thread of autograd's, which runs a backward and cannot know the block that called it."""
    return torch._C._current_graph_task_id() != -1 and isinstance(current_thread(), _DummyThread)
