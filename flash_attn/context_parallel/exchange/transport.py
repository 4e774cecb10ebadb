"""Messages between the ranks of a process group, and a small all-gather for comparisons.

Reductions are never left to the group, so sums have the same order in every run.
"""

from __future__ import annotations

import weakref
from collections.abc import Sequence
from datetime import timedelta
from typing import Protocol

import torch
import torch.distributed as dist
from torch import Tensor

Messages = Sequence[tuple[int, Tensor]]  # (peer, contiguous tensor)


class Work(Protocol):
    """A message under way."""

    def wait(self) -> object: ...


class Pending:
    """Messages under way; keeps their tensors alive until wait()."""

    def __init__(self, works: Sequence[Work], tensors: Sequence[Sequence[object]]):
        self._works, self._tensors = works, tensors

    def wait(self) -> None:
        """The received tensors may be used in the current stream afterwards."""
        for work in self._works:
            work.wait()
        self._works, self._tensors = (), ()


class GroupTransport:
    """A process group of torch.distributed."""

    def __init__(self, group: dist.ProcessGroup):
        self._group = weakref.ref(group)  # caches keyed by the group hold this object: it must not keep the group alive
        self.rank, self.size = dist.get_rank(group), dist.get_world_size(group)
        backends = dict(part.split(":") for part in str(dist.get_backend_config(group)).split(",") if ":" in part)
        self.checks_on_host = backends.get("cpu") is not None
        self._device = torch.device("cpu") if self.checks_on_host else torch.device("cuda", torch.cuda.current_device())
        self._is_connected = False

    @property
    def group(self) -> dist.ProcessGroup:
        group = self._group()
        if group is None:  # torch.distributed would take None for the default group
            raise RuntimeError("group: expected a process group that exists, got one that has been destroyed")
        return group

    def connect(self, device: torch.device) -> None:
        """All ranks call it before the first exchange of tensors on a device.

        NCCL creates its communicator in the first call of a group, which needs all ranks; an exchange has only those
        that send or receive something.
        """
        if device.type == "cuda" and not self._is_connected:
            token = torch.zeros(1, dtype=torch.int32, device=device)
            dist.all_gather([torch.empty_like(token) for _ in range(self.size)], token, group=self.group)
            self._is_connected = True

    def exchange(self, sends: Messages, receives: Messages) -> Pending:
        """The messages between two ranks match by their order."""
        operations = []
        for operation, messages in ((dist.irecv, receives), (dist.isend, sends)):
            tags: dict[int, int] = {}
            for peer, tensor in messages:
                tag = tags[peer] = tags.get(peer, -1) + 1
                rank = dist.get_global_rank(self.group, peer)
                operations.append(dist.P2POp(operation, tensor, rank, self.group, tag))
        works = dist.batch_isend_irecv(operations) if operations else []
        return Pending(works, (sends, receives))

    def all_gather_ints(self, values: list[int], seconds: float | None = None) -> list[list[int]]:
        """The values of every rank, lists of one length; a host synchronisation.

        seconds: how long to wait, None for the group's timeout. Raises RuntimeError after it.
        """
        own = torch.tensor(values, dtype=torch.int64, device=self._device)
        all_values = [torch.empty_like(own) for _ in range(self.size)]
        work = dist.all_gather(all_values, own, group=self.group, async_op=True)
        work.wait() if seconds is None else work.wait(timedelta(seconds=seconds))
        gathered: list[list[int]] = torch.stack(all_values).tolist()
        return gathered
