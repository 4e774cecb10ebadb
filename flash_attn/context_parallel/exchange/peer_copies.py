"""Keys copied between the GPUs of one host by their copy engines, instead of messages.

Copies use no SM: they neither wait for an attention kernel to end nor slow it down. Every rank writes rows into the
others' buffers in symmetric memory, then a signal. A kernel of one warp waits for all signals before the attention that
reads the rows.
"""

from __future__ import annotations

import math
import weakref
from collections.abc import Hashable, Sequence
from typing import Any, Callable

import torch
import torch.distributed as dist
from torch import Tensor

from flash_attn.context_parallel.exchange.transport import GroupTransport
from flash_attn.context_parallel.plan.schedule import Copies

_SLOTS = 2  # a rank writes into one while another rank still computes with the other
_ALIGNMENT = 256
_TIMEOUT_MS = 600_000  # of a signal: a lost rank raises an error, as with messages


class Arriving:
    """Buffers that other ranks write to.

    wait(): they may be read in the current stream afterwards. finish(): the sources of this rank's copies may be
    overwritten afterwards.
    """

    def __init__(self, buffers: list[Tensor], wait: Callable[[], None], finish: Callable[[], None]):
        self.buffers, self.wait, self.finish = buffers, wait, finish


class CopyTransport(GroupTransport):
    """A process group whose ranks write to each other's memory.

    The signal of copy n - 1 from a rank means that it has computed with copy n - 2, whose slot copy n reuses: so every
    rank signals all others, even without rows for them.
    """

    _of_groups: weakref.WeakKeyDictionary[dist.ProcessGroup, CopyTransport] = weakref.WeakKeyDictionary()

    @classmethod
    def of(cls, group: dist.ProcessGroup) -> CopyTransport:
        """The one of this group: its memory lasts for all plans."""
        if group not in cls._of_groups:
            cls._of_groups[group] = cls(group)
        return cls._of_groups[group]

    def __init__(self, group: dist.ProcessGroup):
        super().__init__(group)
        if not torch.cuda.is_available() or "nccl" not in str(dist.get_backend_config(group)):
            raise RuntimeError(f"copies: expected a group with NCCL, got {dist.get_backend_config(group)}")
        self._slot_bytes = self._count = 0
        self._views: dict[Hashable, Tensor] = {}
        self._memory: Tensor | None = None
        self._handle: Any = None
        self._stream: torch.cuda.Stream | None = None

    def push(self, tensors: Sequence[Tensor], key_rows: int, most_rows: int, copies: Copies) -> Arriving:
        """Copy rows of K and V; all ranks call it together. key_rows: of this rank's buffers. most_rows: of any rank's
        buffer at most, the same on all ranks."""
        offsets = self._reserve(tensors, most_rows)
        slot = self._count % _SLOTS
        self._count += 1
        assert self._stream is not None
        places = [(slot * self._slot_bytes + offset, most_rows, x) for offset, x in zip(offsets, tensors)]
        self._stream.wait_stream(torch.cuda.current_stream())
        rows_of = dict(copies)
        with torch.cuda.stream(self._stream):
            for distance in range(1, self.size):
                peer = (self.rank + distance) % self.size
                for place in places:
                    for row, target, count in rows_of.get(peer, ()):
                        self._view(peer, *place).narrow(0, target, count).copy_(place[-1].narrow(0, row, count))
                self._signal(peer, slot).copy_(self._one)
            sent = self._stream.record_event()
        buffers = [self._view(self.rank, *place).narrow(0, 0, key_rows) for place in places]
        return Arriving(buffers, lambda: self._wait(slot), lambda: torch.cuda.current_stream().wait_event(sent))

    def _wait(self, slot: int) -> None:
        for distance in range(1, self.size):
            self._handle.wait_signal((self.rank - distance) % self.size, slot, _TIMEOUT_MS)

    def _reserve(self, tensors: Sequence[Tensor], most_rows: int) -> list[int]:
        """The offset of each tensor in a slot, in bytes; enlarges the slots if they are too small."""
        offsets, end = [], 0
        for x in tensors:
            offsets.append(end)
            size = most_rows * math.prod(x.shape[1:]) * x.element_size()
            end += -(-size // _ALIGNMENT) * _ALIGNMENT
        if end > self._slot_bytes:
            self._allocate(end, tensors[0].device)
        return offsets

    def _allocate(self, slot_bytes: int, device: torch.device) -> None:
        import torch.distributed._symmetric_memory as symm_mem

        torch.cuda.synchronize(device)  # on every rank: nobody writes to the memory that is freed
        self.all_gather_ints([slot_bytes])
        self._views.clear()
        self._memory = self._handle = None
        self._memory = symm_mem.empty(_SLOTS * slot_bytes, dtype=torch.uint8, device=device)
        self._handle, self._slot_bytes = symm_mem.rendezvous(self._memory, self.group), slot_bytes
        if self._stream is None:
            self._stream = torch.cuda.Stream(device)
            self._one = torch.ones(1, dtype=torch.int32, device=device)
            self._stream.wait_stream(torch.cuda.current_stream())

    def _view(self, rank: int, offset: int, most_rows: int, like: Tensor) -> Tensor:
        """(most_rows, ...) of a rank's memory."""
        key = rank, offset, most_rows, like.shape[1:], like.dtype
        if key not in self._views:
            shape, first = (most_rows, *like.shape[1:]), offset // like.element_size()
            self._views[key] = self._handle.get_buffer(rank, shape, like.dtype, first)
        return self._views[key]

    def _signal(self, rank: int, slot: int) -> Tensor:
        """The word that `wait_signal` of another rank reads for this rank's channel."""
        key = rank, slot
        if key not in self._views:
            first = self.size * slot + self.rank
            self._views[key] = self._handle.get_signal_pad(rank, (1,), torch.int32, first)
        return self._views[key]
