"""Comparisons of the ranks' arguments by a hash: bad or different arguments raise on every rank, so that none hangs."""

from __future__ import annotations

import hashlib
import itertools
import threading
from typing import NoReturn, Optional

import torch

from flash_attn.context_parallel.exchange.groups import Communicator, Group, Mesh, communicator_of, reachable
from flash_attn.ops import arguments

CHECKS = ("calls", "plan", "none")
Error = Optional[BaseException]
_TEXT_BYTES = 240  # of an error's text that the other ranks receive
_TELLING_SECONDS = 20.0  # to wait for the other ranks if it is unknown whether they listen
_plan_numbers = itertools.count(1)
_thread = threading.local()  # comparison: the last one that this thread made


def compare_on_all_ranks(
    communicator: Communicator, text: str, error: Error, what: str, extra: int = 0, seconds: float | None = None
) -> list[int]:
    """Raise on every rank if one has an error or another text; otherwise return every rank's `extra`.

    Every rank of the group calls it, in the same order. seconds: how long to wait for the others, None for the group's
    timeout.
    """
    digest = int.from_bytes(hashlib.sha256(text.encode()).digest()[:8], "big", signed=True)
    answers = communicator.all_gather_ints([digest, extra, *_as_ints(error)], seconds)
    if error is not None:
        raise error
    errors = {rank: _as_text(answer[2:]) for rank, answer in enumerate(answers) if any(answer[2:])}
    if errors:
        told = "; ".join(f"rank {rank}: {message}" for rank, message in errors.items())
        raise RuntimeError(f"{what}: expected valid arguments on every rank, got errors on ranks {[*errors]} ({told})")
    different = [rank for rank, answer in enumerate(answers) if answer[0] != answers[0][0]]
    if different:
        raise RuntimeError(f"{what}: expected the same on every rank, got others on ranks {different} than on rank 0")
    return [answer[1] for answer in answers]


def _as_ints(error: Error) -> list[int]:
    """The error's text as int64, as many on every rank; zeros without an error."""
    data = b"" if error is None else f"{type(error).__name__}: {error}".encode()[:_TEXT_BYTES]
    data = data.ljust(_TEXT_BYTES, b"\0")
    return [int.from_bytes(data[i : i + 8], "big", signed=True) for i in range(0, _TEXT_BYTES, 8)]


def _as_text(values: list[int]) -> str:
    data = b"".join(value.to_bytes(8, "big", signed=True) for value in values)
    return data.rstrip(b"\0").decode(errors="ignore")


def checked_communicator(
    what: str,
    check: str | None,
    mesh: Mesh | None,
    group: Group | None,
    copies: bool = False,
    dimensions: tuple[int, ...] = (1,),
) -> Communicator:
    """`communicator_of`. Its errors are raised on the other ranks of mesh and group too, which would wait."""
    try:
        return communicator_of(mesh, group, arguments.flag("copies", copies), dimensions)
    except Exception as error:
        if check != "none":
            any(_tell(communicator, what, error) for communicator in reachable(mesh, group, error))  # until one answers
        raise


def raise_on_ranks_of_last_plan(what: str, error: BaseException) -> NoReturn:
    """Raise the error of a call without a valid plan, also on the ranks that wait in a call of this thread's last
    plan."""
    comparison = getattr(_thread, "comparison", None)
    if comparison is not None and comparison.check == "calls":
        _tell(comparison.communicator, what, error)
    raise error


def _tell(communicator: Communicator, what: str, error: BaseException) -> bool:
    """Whether the other ranks were there to receive the error."""
    try:
        compare_on_all_ranks(communicator, "", error, what, seconds=_TELLING_SECONDS)
    except Exception as raised:
        return raised is error
    return False


class Comparison:
    """Compares a plan or a cache across ranks when it is made, and its calls afterwards.

    check: "calls" compares every call and every backward (the default if the group has a CPU backend), "plan" the plan
    and the first call and backward of each kind (the default otherwise, since comparing waits for the GPU), "none"
    nothing.
    """

    def __init__(self, communicator: Communicator, what: str, name: str, check: str | None, text: str, error: Error):
        """what, name: for errors, the function or class and the argument by which users pass the plan. text: what every
        rank must have; error: why this rank has none. Raises on every rank, as `check` says."""
        default = "calls" if communicator.checks_on_host else "plan"
        check = default if check is None else check
        if error is None and check not in CHECKS:
            error = RuntimeError(f"check: expected one of {', '.join(CHECKS)}, got {arguments.shown(check)}")
        text, number = f"{check} {text}", 0
        if check != "none":
            number = compare_on_all_ranks(communicator, text, error, what, next(_plan_numbers))[0]
        elif error is not None:
            raise error
        self.communicator, self.check, self._name = communicator, check, name
        self._text = hashlib.sha256(f"{number} {text}".encode()).hexdigest()  # differs between two equal plans
        self._compared: set[str] = set()
        self._calls = 0
        self._thread, self._lock = threading.current_thread(), threading.Lock()
        _thread.comparison = self

    def call(self, what: str, request: str, error: Error, seed: int | None = None) -> tuple[int, int | None]:
        """Compare a call across ranks, as `check` says.

        Returns (the number of the call, the seed of rank 0 if seed is not None).
        """
        if threading.get_ident() != self._thread.ident:
            error = self._other_thread() or error
        with self._lock:  # a call of another thread compares its error
            seeds = self._compare(what, request, f"{self._text} {request}", error, seed)
            self._calls += self.check != "none"  # without comparisons results must not depend on earlier calls
            return self._calls, None if seed is None or seeds is None else seeds[0]

    def backward(self, what: str, request: str, number: int, error: Error) -> None:
        """Compare the backward of a call, whose request and number are those of `call`."""
        self._compare(what, f"backward of {request}", f"{self._text} backward of call {number}", error)

    def _compare(self, what: str, kind: str, text: str, error: Error, seed: int | None = None) -> list[int] | None:
        """The seeds of all ranks, None if nothing was compared."""
        is_new = error is not None or kind not in self._compared
        if self.check == "calls" or seed is not None or (self.check == "plan" and is_new):
            seeds = compare_on_all_ranks(self.communicator, text, error, what, seed or 0)
            self._compared.add(kind)
            return seeds
        if error is not None:
            raise error
        return None

    def _other_thread(self) -> RuntimeError | None:
        """The error of a thread that did not make the plan: ranks may order the messages of two threads differently."""
        if torch._C._current_graph_task_id() != -1:
            return None  # autograd's threads recompute checkpoints
        error = RuntimeError(
            f"{self._name}: expected calls from the thread that made it, {self._thread.name!r}, got one from "
            f"{threading.current_thread().name!r}: each thread needs a process group and a plan or cache that it made"
        )
        if self.check != "calls":
            raise error  # without a comparison: the thread that made the plan may be sending
        return error
