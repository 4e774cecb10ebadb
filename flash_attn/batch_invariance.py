"""The process-wide switch of batch-invariant attention."""

from __future__ import annotations

import os

_enabled = os.environ.get("FLASH_ATTN_BATCH_INVARIANT", "0") not in ("", "0")


def is_batch_invariant() -> bool:
    """Whether all calls of this process are batch-invariant, whatever their own `batch_invariant` is."""
    return _enabled


class set_batch_invariant:
    """Make all attention of this process batch-invariant, or leave it to the calls' own `batch_invariant`.

    As a function it holds until the next call; as a context manager until the end of the block, where the value from
    before comes back. For all threads. The environment variable FLASH_ATTN_BATCH_INVARIANT=1, read at import, turns it
    on from the start. A backward is what its forward was.

    Arguments:
        enabled: bool.
    """

    def __init__(self, enabled: bool) -> None:
        global _enabled
        if not isinstance(enabled, bool):
            raise TypeError(f"enabled: expected a bool, got {type(enabled).__name__}")
        self._before, _enabled = _enabled, enabled

    def __enter__(self):
        return None

    def __exit__(self, *_):
        global _enabled
        _enabled = self._before
