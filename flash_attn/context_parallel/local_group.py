"""Ranks as threads of one process: context parallelism without processes, for tests and for one GPU."""

from __future__ import annotations

import queue
import threading

import torch

from flash_attn.context_parallel.transport import Pending

_POLL_SECONDS = 0.05


class LocalGroup:
    """`size` ranks that run the same function, a thread each; what they send each other is copied in memory.

    On a GPU all of them queue their work on the default stream of one device.
    """

    def __init__(self, size: int):
        if size < 1:
            raise RuntimeError(f"size: expected at least 1, got {size}")
        self.size = size
        self._failed = threading.Event()
        self._barrier = threading.Barrier(size)
        self._boxes = {(i, j): queue.Queue() for i in range(size) for j in range(size)}
        self._gathered: list = [None] * size

    def run(self, function) -> list:
        """[function(rank) for every rank], each called with its LocalRank, which serves as `group`.

        The first exception of a rank is raised, after all have ended: those that wait for it give up.
        """
        results, errors = [None] * self.size, [None] * self.size

        def target(index):
            try:
                # one worker per device runs the backwards of all threads; ranks that wait for each other need their own
                with torch.autograd.set_multithreading_enabled(False):
                    results[index] = function(LocalRank(self, index))
            except BaseException as error:
                errors[index] = error
                self._failed.set()
                self._barrier.abort()

        threads = [threading.Thread(target=target, args=(index,)) for index in range(self.size)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        caused = [error for error in errors if error is not None and not isinstance(error, RankLost)]
        for error in caused or [error for error in errors if error is not None]:
            raise error
        return results


class RankLost(RuntimeError):
    """Another rank has failed."""


class LocalRank:
    """One rank of a LocalGroup."""

    checks_on_host = True

    def __init__(self, group: LocalGroup, rank: int):
        self._group, self.rank, self.size = group, rank, group.size

    def exchange(self, sends, receives) -> Pending:
        for peer, tensor in sends:
            self._group._boxes[self.rank, peer].put(tensor.clone())
        return Pending([_Receipt(self._group, self._group._boxes[p, self.rank], x) for p, x in receives], receives)

    def all_gather_ints(self, values: list[int]) -> list[list[int]]:
        self._group._gathered[self.rank] = list(values)
        self._meet()
        result = list(self._group._gathered)
        self._meet()
        return result

    def _meet(self):
        try:
            self._group._barrier.wait()
        except threading.BrokenBarrierError:
            raise RankLost("another rank of the LocalGroup has failed") from None


class _Receipt:
    """One message to be received."""

    def __init__(self, group: LocalGroup, box: queue.Queue, tensor: torch.Tensor):
        self._group, self._box, self._tensor = group, box, tensor

    def wait(self) -> None:
        while True:
            try:
                message = self._box.get(timeout=_POLL_SECONDS)
                break
            except queue.Empty:
                if self._group._failed.is_set():
                    raise RankLost("another rank of the LocalGroup has failed") from None
        if message.shape != self._tensor.shape or message.dtype != self._tensor.dtype:
            raise RuntimeError(f"message: expected {self._tensor.shape}, {self._tensor.dtype}, got {message.shape}")
        self._tensor.copy_(message)
