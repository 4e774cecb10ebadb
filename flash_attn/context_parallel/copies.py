"""Keys by copies between the GPUs of one host, in place of messages: they take no multiprocessor, so that they neither
wait for an attention kernel to end nor slow it down.

Every rank writes rows straight into the others' buffers, which lie in symmetric memory, and a word after them; a kernel
of one warp waits for all ranks' words ahead of the attention that reads the rows.
"""

from __future__ import annotations

import math
import weakref

import torch
import torch.distributed as dist

from flash_attn.context_parallel.transport import GroupTransport

_SLOTS = 2  # a rank writes for the next pass while another still computes the last one
_ALIGNMENT = 256
_TIMEOUT_MS = 600_000  # of a word: a rank that is lost raises an error, as messages do


class CopyTransport(GroupTransport):
    """A process group whose ranks reach each other's memory.

    Word of pass n - 1 from a rank says that it has computed pass n - 2, whose slot pass n has: so all ranks send words
    to all, also those that have no rows for them.
    """

    _of_groups = weakref.WeakKeyDictionary()  # memory that lasts for all batches, as a communicator's

    @classmethod
    def of(cls, group) -> CopyTransport:
        if group not in cls._of_groups:
            cls._of_groups[group] = cls(group)
        return cls._of_groups[group]

    def __init__(self, group):
        super().__init__(group)
        if not torch.cuda.is_available() or "nccl" not in str(dist.get_backend_config(group)):
            raise RuntimeError(f"copies: expected a group with NCCL, got {dist.get_backend_config(group)}")
        self._slot_bytes, self._passes, self._views = 0, 0, {}
        self._memory = self._handle = self._stream = self._one = None

    def push(self, tensors, key_rows: int, most_rows: int, parts) -> Arriving:
        """All ranks call it together. tensors: K and V of a rank's tokens. key_rows: of the buffers of this one,
        at most most_rows, which all ranks have in common. parts: ((peer, ((row, row there, count)...))...)."""
        offsets = self._reserve(tensors, most_rows)
        slot = self._passes % _SLOTS
        self._passes += 1
        places = [(slot * self._slot_bytes + offset, most_rows, x) for offset, x in zip(offsets, tensors)]
        current = torch.cuda.current_stream()
        self._stream.wait_stream(current)
        rows_of = dict(parts)
        with torch.cuda.stream(self._stream):
            for distance in range(1, self.size):
                peer = (self.rank + distance) % self.size
                for place in places:
                    for row, target, count in rows_of.get(peer, ()):
                        self._view(peer, *place).narrow(0, target, count).copy_(place[-1].narrow(0, row, count))
                self._word(peer, slot).copy_(self._one)
            sent = self._stream.record_event()
        buffers = [self._view(self.rank, *place).narrow(0, 0, key_rows) for place in places]
        return Arriving(buffers, lambda: self._wait(slot), lambda: torch.cuda.current_stream().wait_event(sent))

    def _wait(self, slot: int) -> None:
        for distance in range(1, self.size):
            self._handle.wait_signal((self.rank - distance) % self.size, slot, _TIMEOUT_MS)

    def _reserve(self, tensors, most_rows: int) -> list[int]:
        """Where each of them begins in a slot, in bytes, which is made larger where it must be."""
        offsets, end = [], 0
        for x in tensors:
            offsets.append(end)
            size = most_rows * math.prod(x.shape[1:]) * x.element_size()
            end += -(-size // _ALIGNMENT) * _ALIGNMENT
        if end > self._slot_bytes:
            self._allocate(end, tensors[0].device)
        return offsets

    def _allocate(self, slot_bytes: int, device) -> None:
        import torch.distributed._symmetric_memory as symm_mem

        torch.cuda.synchronize(device)  # every rank: nobody writes to what is given back
        self.all_gather_ints([slot_bytes])
        self._views.clear()
        self._memory = self._handle = None
        self._memory = symm_mem.empty(_SLOTS * slot_bytes, dtype=torch.uint8, device=device)
        self._handle, self._slot_bytes = symm_mem.rendezvous(self._memory, self.group), slot_bytes
        if self._stream is None:
            self._stream, self._one = torch.cuda.Stream(device), torch.ones(1, dtype=torch.int32, device=device)
            self._stream.wait_stream(torch.cuda.current_stream())

    def _view(self, rank: int, offset: int, most_rows: int, like: torch.Tensor) -> torch.Tensor:
        """(most_rows, ...) of a rank's memory."""
        key = rank, offset, most_rows, like.shape[1:], like.dtype
        if key not in self._views:
            shape, first = (most_rows, *like.shape[1:]), offset // like.element_size()
            self._views[key] = self._handle.get_buffer(rank, shape, like.dtype, first)
        return self._views[key]

    def _word(self, rank: int, slot: int) -> torch.Tensor:
        """Where `wait_signal` of a rank looks for what this one puts into a channel."""
        key = rank, slot
        if key not in self._views:
            first = self.size * slot + self.rank
            self._views[key] = self._handle.get_signal_pad(rank, (1,), torch.int32, first)
        return self._views[key]


class Arriving:
    """Buffers that other ranks write to. wait(): after it they may be read in the current stream. finish(): after it
    what this rank has sent may be written to."""

    def __init__(self, buffers, wait, finish):
        self.buffers, self.wait, self.finish = buffers, wait, finish
