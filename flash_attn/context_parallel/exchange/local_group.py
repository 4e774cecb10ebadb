"""Ranks as threads of one process: context parallelism without processes, for tests and for one GPU."""

from __future__ import annotations

import queue
import threading
import time
from collections.abc import Sequence
from typing import Any, Callable, TypeVar, cast

import torch

from flash_attn.context_parallel.exchange.transport import Messages, Pending

_POLL_SECONDS = 0.05
_thread = threading.local()  # rank: the LocalRank that this thread runs
_Result = TypeVar("_Result")


def current_rank() -> LocalRank | None:
    """The rank of a LocalGroup that this thread runs."""
    return getattr(_thread, "rank", None)


class RankLost(RuntimeError):
    """Another rank has failed; the consequence of its error, not the cause."""


class LocalGroup:
    """`size` ranks that run the same function, each in a thread; messages are copies in memory.

    On a GPU all ranks use the default stream of one device.

    timeout: seconds for which a rank waits for another one before it raises RuntimeError.
    """

    def __init__(self, size: int, timeout: float = 1800.0):
        if size < 1:
            raise RuntimeError(f"size: expected at least 1, got {size}")
        self.size, self.timeout = size, timeout

    def run(self, function: Callable[[LocalRank], _Result]) -> list[_Result]:
        """[function(rank) for every rank]. Each rank is a LocalRank, which plans take as `group`; `rank.mesh(outer,
        inner)` is a `mesh`.

        Raises the first exception of a rank after all have ended; ranks that wait for that one give up.
        """
        results: list[_Result | None] = [None] * self.size
        errors: list[BaseException | None] = [None] * self.size
        links = _Links(self.size, self.timeout)

        def target(index: int) -> None:
            _thread.rank = LocalRank(links, index)
            try:
                # otherwise one worker per device runs the backwards of all threads, and ranks wait for each other there
                with torch.autograd.set_multithreading_enabled(False):
                    results[index] = function(_thread.rank)
            except BaseException as error:
                errors[index] = error
                links.failed.set()
            _thread.rank = None
            links.ended[index].set()

        if self.size == 1:
            target(0)  # without a GPU, torch.compile in a thread that ends leaves torch with a pointer into it
        else:
            threads = [threading.Thread(target=target, args=(index,)) for index in range(self.size)]
            for thread in threads:
                thread.start()
            for thread in threads:
                thread.join()
        found = [error for error in errors if error is not None]
        for error in [error for error in found if not isinstance(error, RankLost)] or found:
            raise error
        return cast("list[_Result]", results)


class _Links:
    """The queues between the ranks of one run."""

    def __init__(self, size: int, timeout: float):
        self._timeout = timeout
        self.failed, self.ended = threading.Event(), [threading.Event() for _ in range(size)]
        self._boxes: dict[tuple[str, int, int], queue.Queue[object]] = {
            (kind, i, j): queue.Queue() for kind in ("tensors", "ints") for i in range(size) for j in range(size)
        }

    def put(self, kind: str, source: int, target: int, message: object) -> None:
        self._boxes[kind, source, target].put(message)

    def get(self, kind: str, source: int, target: int, seconds: float | None = None) -> Any:
        box = self._boxes[kind, source, target]
        seconds = self._timeout if seconds is None else seconds
        end = time.monotonic() + seconds
        while True:
            has_ended = self.ended[source].is_set()  # read before the box, which then has all that the rank sent
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
    """Ranks of a LocalGroup in rows, with the interface of a DeviceMesh of two dimensions."""

    ndim = 2

    def __init__(self, mesh: torch.Tensor, groups: Sequence[LocalRank]):
        self.mesh, self._groups = mesh, groups

    def get_group(self, dim: int) -> LocalRank:
        return self._groups[dim]


class LocalRank:
    """One rank of a LocalGroup, or of the subgroup of its ranks that `members` names."""

    checks_on_host = True

    def __init__(self, links: _Links, rank: int, members: Sequence[int] | None = None):
        self._links, self.rank = links, rank
        self._members = range(len(links.ended)) if members is None else members
        self.size = len(self._members)

    def mesh(self, outer: int, inner: int) -> LocalMesh:
        """The `mesh` of a plan: `outer` rows of `inner` ranks; every rank of the group asks for the same one.

        Raises RuntimeError if that is not the number of ranks.
        """
        if outer * inner != self.size:
            raise RuntimeError(f"outer * inner: expected {self.size} ranks, got {outer} * {inner}")
        ranks = torch.arange(self.size, device="cpu").view(outer, inner)
        row, column = divmod(self.rank, inner)
        columns = LocalRank(self._links, row, ranks[:, column].tolist())
        return LocalMesh(ranks, (columns, LocalRank(self._links, column, ranks[row].tolist())))

    def connect(self, device: torch.device) -> None:
        """Nothing to do: memory is shared."""

    def exchange(self, sends: Messages, receives: Messages) -> Pending:
        for peer, tensor in sends:
            self._links.put("tensors", self._index, self._members[peer], tensor.clone())
        return Pending([_Receipt(self._links, self._members[peer], self._index, x) for peer, x in receives], receives)

    def all_gather_ints(self, values: list[int], seconds: float | None = None) -> list[list[int]]:
        for peer in self._members:
            self._links.put("ints", self._index, peer, list(values))
        return [self._links.get("ints", peer, self._index, seconds) for peer in self._members]

    @property
    def _index(self) -> int:
        """This rank's number in the whole LocalGroup."""
        return self._members[self.rank]


class _Receipt:
    """One message to receive."""

    def __init__(self, links: _Links, source: int, target: int, tensor: torch.Tensor):
        self._links, self._source, self._target, self._tensor = links, source, target, tensor

    def wait(self) -> None:
        message = self._links.get("tensors", self._source, self._target)
        if message.shape != self._tensor.shape or message.dtype != self._tensor.dtype:
            raise RuntimeError(f"message: expected {self._tensor.shape}, {self._tensor.dtype}, got {message.shape}")
        self._tensor.copy_(message)
