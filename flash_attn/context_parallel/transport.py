"""How ranks reach each other: point-to-point messages and a small all-gather of a process group.

No reduction is ever left to the group, so that sums have an order of their own. A communicator has `rank`, `size`,
`checks_on_host`, `connect`, `buffer`, `exchange` and `all_gather_ints`; `local_group` has another one, of threads. That
of a mesh of two dimensions is two of them.
"""

from __future__ import annotations

import weakref
from datetime import timedelta

import torch
import torch.distributed as dist


class Pending:
    """Messages under way; their tensors live until wait()."""

    def __init__(self, works, tensors):
        self._works, self._tensors = works, tensors

    def wait(self) -> None:
        """After it the received tensors may be used in the current stream."""
        for work in self._works:
            work.wait()
        self._works, self._tensors = (), ()


class GroupTransport:
    """A process group of torch.distributed."""

    def __init__(self, group):
        self._group = weakref.ref(group)  # torch.distributed keeps it: what is kept for a group must not keep the group
        self.rank, self.size = dist.get_rank(group), dist.get_world_size(group)
        backends = dict(part.split(":") for part in str(dist.get_backend_config(group)).split(",") if ":" in part)
        self.checks_on_host = backends.get("cpu") is not None  # an all-gather there waits for no GPU
        self._device = "cpu" if self.checks_on_host else torch.device("cuda", torch.cuda.current_device())
        self._is_connected = False

    @property
    def group(self):
        group = self._group()
        if group is None:  # which torch.distributed would take for all ranks
            raise RuntimeError("group: expected a process group that exists, got one that has been destroyed")
        return group

    def connect(self, device: torch.device) -> None:
        """All ranks call it before the first exchange of tensors of a device.

        NCCL makes its communicator in the first call of a group, which all ranks must take part in; in an exchange
        only those do that have something to send.
        """
        if device.type == "cuda" and not self._is_connected:
            token = torch.zeros(1, dtype=torch.int32, device=device)
            dist.all_gather([torch.empty_like(token) for _ in range(self.size)], token, group=self.group)
            self._is_connected = True

    def buffer(self, like: torch.Tensor, shape) -> torch.Tensor:
        """Memory in which rows of other ranks arrive."""
        return like.new_empty(shape)

    def exchange(self, sends, receives) -> Pending:
        """Send and receive [(peer, contiguous tensor)]; the messages of two ranks match in their order."""
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
        """The values of every rank, each list as long as one's own; a host synchronisation.

        seconds: for which to wait, None: the group's timeout. Raises RuntimeError after it.
        """
        own = torch.tensor(values, dtype=torch.int64, device=self._device)
        all_values = [torch.empty_like(own) for _ in range(self.size)]
        work = dist.all_gather(all_values, own, group=self.group, async_op=True)
        work.wait() if seconds is None else work.wait(timedelta(seconds=seconds))
        return torch.stack(all_values).tolist()


class MeshTransport:
    """Ranks in rows: K and V move along `outer`, heads along `inner`; no message goes between other ranks.

    It has `rank`, `size`, `checks_on_host`, `connect` and `all_gather_ints` of all of them, without a group of its own.
    """

    def __init__(self, outer, inner):
        self.outer, self.inner = outer, inner
        self.rank, self.size = outer.rank * inner.size + inner.rank, outer.size * inner.size
        self.checks_on_host = outer.checks_on_host and inner.checks_on_host

    def connect(self, device: torch.device) -> None:
        self.inner.connect(device)
        self.outer.connect(device)

    def all_gather_ints(self, values: list[int], seconds: float | None = None) -> list[list[int]]:
        row = [value for own in self.inner.all_gather_ints(values, seconds) for value in own]
        every = [value for own in self.outer.all_gather_ints(row, seconds) for value in own]
        return [every[i : i + len(values)] for i in range(0, len(every), len(values))]
