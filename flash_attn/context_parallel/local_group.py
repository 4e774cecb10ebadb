"""Ranks as threads of one process: context parallelism without processes, for tests and for one GPU."""

from __future__ import annotations

import queue
import threading
import time

import torch

from flash_attn.context_parallel.transport import Pending

_POLL_SECONDS = 0.05
_thread = threading.local()  # rank: that of a LocalGroup which this thread runs


def current_rank() -> LocalRank | None:
    """The rank of a LocalGroup that this thread is."""
    return getattr(_thread, "rank", None)


class RankLost(RuntimeError):
    """Another rank has failed: what its error leads to."""


class LocalGroup:
    """`size` ranks that run the same function, a thread each; what they send each other is copied in memory.

    On a GPU all of them queue their work on the default stream of one device.

    timeout: seconds for which a rank waits for another, after which it raises RuntimeError.
    """

    def __init__(self, size: int, timeout: float = 1800.0):
        if size < 1:
            raise RuntimeError(f"size: expected at least 1, got {size}")
        self.size, self.timeout = size, timeout

    def run(self, function) -> list:
        """[function(rank) for every rank], each called with its LocalRank, which serves as `group`; its
        `mesh(outer, inner)` as `mesh`.

        The first exception of a rank is raised, after all have ended: those that wait for it give up.
        """
        results, errors = [None] * self.size, [None] * self.size
        links = _Links(self.size, self.timeout)

        def target(index):
            _thread.rank = LocalRank(links, index)
            try:
                # one worker per device runs the backwards of all threads; ranks that wait for each other need their own
                with torch.autograd.set_multithreading_enabled(False):
                    results[index] = function(_thread.rank)
            except BaseException as error:
                errors[index] = error
                links.failed.set()
            _thread.rank = None
            links.ended[index].set()

        if self.size == 1:
            target(0)  # without a GPU, torch.compile in a thread that ends leaves torch a pointer into it
        else:
            threads = [threading.Thread(target=target, args=(index,)) for index in range(self.size)]
            for thread in threads:
                thread.start()
            for thread in threads:
                thread.join()
        caused = [error for error in errors if error is not None and not isinstance(error, RankLost)]
        for error in caused or [error for error in errors if error is not None]:
            raise error
        return results


class _Links:
    """What the ranks of one run have in common."""

    def __init__(self, size: int, timeout: float):
        self._timeout = timeout
        self.failed, self.ended = threading.Event(), [threading.Event() for _ in range(size)]
        self._boxes = {
            (kind, i, j): queue.Queue() for kind in ("tensors", "ints") for i in range(size) for j in range(size)
        }

    def put(self, kind: str, source: int, target: int, message) -> None:
        self._boxes[kind, source, target].put(message)

    def get(self, kind: str, source: int, target: int, seconds: float | None = None):
        box = self._boxes[kind, source, target]
        seconds = self._timeout if seconds is None else seconds
        end = time.monotonic() + seconds
        while True:
            has_ended = self.ended[source].is_set()  # read first: what it sent before is in the box by now
            try:
                return box.get_nowait() if has_ended else box.get(timeout=_POLL_SECONDS)
            except queue.Empty:
                if self.failed.is_set():
                    raise RankLost("another rank of the LocalGroup has failed") from None
                if has_ended:
                    raise RuntimeError(f"rank {source} of the LocalGroup has ended before it sent {kind}") from None
                if time.monotonic() > end:
                    text = f"rank {source} of the LocalGroup has sent no {kind} for {seconds:g} seconds"
                    raise RuntimeError(text) from None


class LocalMesh:
    """Ranks of a LocalGroup in rows, as a DeviceMesh of two dimensions is seen by one of them."""

    ndim = 2

    def __init__(self, mesh: torch.Tensor, groups):
        self.mesh, self._groups = mesh, groups

    def get_group(self, dim: int) -> LocalRank:
        return self._groups[dim]


class LocalRank:
    """One rank of a LocalGroup, or of those of its ranks that `members` names."""

    checks_on_host = True

    def __init__(self, links: _Links, rank: int, members=None):
        self._links, self.rank = links, rank
        self._members = range(len(links.ended)) if members is None else members
        self.size = len(self._members)

    def mesh(self, outer: int, inner: int) -> LocalMesh:
        """This rank in `outer` rows of `inner` ranks, for a plan's `mesh`; every rank of the group asks for the same.

        Raises RuntimeError where that is not the number of ranks.
        """
        if outer * inner != self.size:
            raise RuntimeError(f"outer * inner: expected {self.size} ranks, got {outer} * {inner}")
        ranks = torch.arange(self.size, device="cpu").view(outer, inner)
        row, column = divmod(self.rank, inner)
        columns = LocalRank(self._links, row, ranks[:, column].tolist())
        return LocalMesh(ranks, (columns, LocalRank(self._links, column, ranks[row].tolist())))

    def connect(self, device) -> None:
        """Nothing to do: memory is shared."""

    def buffer(self, like: torch.Tensor, shape) -> torch.Tensor:
        return like.new_empty(shape)

    def exchange(self, sends, receives) -> Pending:
        for peer, tensor in sends:
            self._links.put("tensors", self._index, self._members[peer], tensor.clone())
        return Pending([_Receipt(self._links, self._members[peer], self._index, x) for peer, x in receives], receives)

    def all_gather_ints(self, values: list[int], seconds: float | None = None) -> list[list[int]]:
        for peer in self._members:
            self._links.put("ints", self._index, peer, list(values))
        return [self._links.get("ints", peer, self._index, seconds) for peer in self._members]

    @property
    def _index(self) -> int:
        """In the whole LocalGroup."""
        return self._members[self.rank]


class _Receipt:
    """One message to be received."""

    def __init__(self, links: _Links, source: int, target: int, tensor: torch.Tensor):
        self._links, self._source, self._target, self._tensor = links, source, target, tensor

    def wait(self) -> None:
        message = self._links.get("tensors", self._source, self._target)
        if message.shape != self._tensor.shape or message.dtype != self._tensor.dtype:
            raise RuntimeError(f"message: expected {self._tensor.shape}, {self._tensor.dtype}, got {message.shape}")
        self._tensor.copy_(message)
