"""The switch of batch-invariant attention: of the process, and of `with` blocks."""

from __future__ import annotations

import os
from threading import RLock, get_ident

from flash_attn.scoped import Scoped

_process = os.environ.get("FLASH_ATTN_BATCH_INVARIANT", "0") not in ("", "0")
_is_scoped = False  # whether a block is open or an object kept, in any thread: without them the process's value holds
_lock = RLock()  # the garbage collector may end an object while it is held


class _Switch(Scoped[bool]):
    """calls: (id of the object, value) of each thread's last call of `set_batch_invariant`, as long as no block has
    entered that object and nobody has dropped it."""

    def __init__(self) -> None:
        super().__init__("flash_attn.batch_invariant")
        self.calls: dict[int | None, tuple[int, bool]] = {}

    @property
    def enabled(self) -> bool:
        value = self.value
        if value is not None:
            return value
        call = self.calls.get(get_ident())
        return _process if call is None else call[1]


_switch = _Switch()


def is_batch_invariant() -> bool:
    """Whether calls here are batch-invariant, whatever their own `batch_invariant` is: see `set_batch_invariant`."""
    return _switch.enabled if _is_scoped else _process


def _survey() -> None:
    """Set `_is_scoped` anew, after every change of `_switch`."""
    global _is_scoped
    with _lock:
        _is_scoped = bool(_switch.calls) or _switch.is_open


class set_batch_invariant:
    """Make all attention batch-invariant, or leave it to the calls' own `batch_invariant`.

    A call by itself, `set_batch_invariant(True)`, sets the mode of the whole process until the next one: in all threads
    and tasks, also in those that run already, except in `with` blocks. The environment variable
    FLASH_ATTN_BATCH_INVARIANT=1, read at import, has the same effect.

    A block, `with set_batch_invariant(True):`, sets the mode of the thread or asyncio task that is in it, and of tasks
    started in it, until it ends; threads started in it do not have the mode. Blocks may be nested, and one object may
    be entered many times, also at once. On a GPU a checkpoint that a backward recomputes has the mode of the block
    opened last in any thread, because autograd computes it in a separate thread.

    An object that is kept (`mode = set_batch_invariant(True)`) holds for the thread that made it, until it is entered
    or the thread makes another; dropped before, it holds for the process.

    A backward is batch-invariant if its forward was.

    Arguments:
        enabled: bool.
    """

    _thread: int | None = None

    def __init__(self, enabled: bool) -> None:
        if not isinstance(enabled, bool):
            raise TypeError(f"enabled: expected a bool, got {type(enabled).__name__}")
        self._enabled, self._thread = enabled, get_ident()
        with _lock:
            _switch.calls[self._thread] = id(self), enabled
            _survey()

    def __enter__(self) -> None:
        self._take_back()
        _switch.enter(self._enabled)
        _survey()

    def __exit__(self, *_: object) -> None:
        _switch.leave(self._enabled)
        _survey()

    def __del__(self) -> None:
        global _process
        if _switch is not None and self._take_back():  # None where the process ends
            _process = self._enabled
            _survey()

    def _take_back(self) -> bool:
        """Forget the call, and return whether it was the last one of its thread."""
        with _lock:
            call = _switch.calls.get(self._thread)
            if call is None or call[0] != id(self):
                return False
            del _switch.calls[self._thread]
            return True
