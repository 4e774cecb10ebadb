"""What the ranks of a group must have in common: compared by a hash, so that what differs raises on all of them."""

from __future__ import annotations

import hashlib
import itertools
import threading
from typing import NoReturn

import torch

from flash_attn.context_parallel.communicator import communicator_of, reachable
from flash_attn.ops import arguments

CHECKS = ("calls", "plan", "none")
_TEXT_BYTES = 240  # of an error that the other ranks are told
_TELLING_SECONDS = 20.0  # for which a rank waits to be heard where it does not know whether the others listen
_plan_numbers = itertools.count(1)
_thread = threading.local()  # agreement: the last one that this thread made


def compare_on_all_ranks(
    transport, text: str, error: BaseException | None, what: str, extra: int = 0, seconds: float | None = None
) -> list[int]:
    """Raise on every rank if one has an error or another text; else the `extra` of every rank.

    Every rank of the group calls it, in the same order: nobody waits for a rank that has given up. seconds: for which
    to wait for the others, None: as long as the group does.
    """
    digest = int.from_bytes(hashlib.sha256(text.encode()).digest()[:8], "big", signed=True)
    answers = transport.all_gather_ints([digest, extra, *_as_ints(error)], seconds)
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


def _as_ints(error: BaseException | None) -> list[int]:
    """The error's text in a number of int64 that all ranks know, zeros without one."""
    data = b"" if error is None else f"{type(error).__name__}: {error}".encode()[:_TEXT_BYTES]
    data = data.ljust(_TEXT_BYTES, b"\0")
    return [int.from_bytes(data[i : i + 8], "big", signed=True) for i in range(0, _TEXT_BYTES, 8)]


def _as_text(values: list[int]) -> str:
    data = b"".join(value.to_bytes(8, "big", signed=True) for value in values)
    return data.rstrip(b"\0").decode(errors="ignore")


def agreed_communicator(what: str, check: str | None, mesh, group, copies=False, dimensions: tuple[int, ...] = (1,)):
    """`communicator_of`; its errors raise on every rank that waits in a communicator of these arguments."""
    try:
        return communicator_of(mesh, group, arguments.flag("copies", copies), dimensions)
    except Exception as error:
        if check != "none":
            any(_tell(transport, what, error) for transport in reachable(mesh, group, error))  # until one answers
        raise


def raise_on_ranks_of_last_plan(what: str, error: BaseException) -> NoReturn:
    """Raise the error of a call that names no plan: also on the ranks that compare a call of this thread's last one."""
    agreement = getattr(_thread, "agreement", None)
    if agreement is not None and agreement.check == "calls":
        _tell(agreement.transport, what, error)
    raise error


def _tell(transport, what: str, error: BaseException) -> bool:
    """Whether the other ranks were there to be told."""
    try:
        compare_on_all_ranks(transport, "", error, what, seconds=_TELLING_SECONDS)
    except Exception as raised:
        return raised is error
    return False


class Agreement:
    """What was agreed upon when a plan was made, and which calls have been compared since.

    check: "calls" compares every call and every backward (the default where the group has a CPU backend), "plan" what
    is agreed upon, the first call of each kind and the first backward of each kind (the default elsewhere: comparing
    waits for the GPU), "none" nothing.
    """

    def __init__(self, transport, what: str, name: str, check: str | None, text: str, error: BaseException | None):
        """what, name: of errors: who compares, and the argument that users give calls. text: what every rank must have;
        error: why this one has none. Raises on every rank, as `check` says."""
        default = "calls" if transport.checks_on_host else "plan"
        check = default if check is None else check
        if error is None and check not in CHECKS:
            error = RuntimeError(f"check: expected one of {', '.join(CHECKS)}, got {arguments.shown(check)}")
        text, number = f"{check} {text}", 0
        if check != "none":
            number = compare_on_all_ranks(transport, text, error, what, next(_plan_numbers))[0]
        elif error is not None:
            raise error
        self.transport, self.check, self._name = transport, check, name
        self._text = hashlib.sha256(f"{number} {text}".encode()).hexdigest()  # equal plans are told apart
        self._compared: set[str] = set()
        self._calls = 0
        self._thread, self._lock = threading.current_thread(), threading.Lock()
        _thread.agreement = self

    def compare(self, what: str, request: str, error: BaseException | None, seed: int | None = None):
        """Agree with all ranks on a call, as `check` says.

        Returns (its number among the plan's calls, the seed of rank 0, which a call with dropout has).
        """
        if threading.get_ident() != self._thread.ident:
            error = self._other_thread() or error
        with self._lock:  # another thread tells all ranks of its error
            seeds = self._compare(what, request, f"{self._text} {request}", error, seed)
            self._calls += self.check != "none"  # where nothing is compared results do not depend on what was before
            return self._calls, None if seed is None else seeds[0]

    def compare_backward(self, what: str, request: str, number: int, error: BaseException | None) -> None:
        """Agree with all ranks on the backward of a call, whose request and number are those of `compare`."""
        self._compare(what, f"backward of {request}", f"{self._text} backward of call {number}", error)

    def _compare(self, what: str, kind: str, text: str, error: BaseException | None, seed: int | None = None):
        """The seeds of all ranks, None where nothing was compared."""
        is_new = error is not None or kind not in self._compared
        if self.check == "calls" or seed is not None or (self.check == "plan" and is_new):
            seeds = compare_on_all_ranks(self.transport, text, error, what, seed or 0)
            self._compared.add(kind)
            return seeds
        if error is not None:
            raise error
        return None

    def _other_thread(self) -> RuntimeError | None:
        """The error of a thread that did not make the plan: ranks cannot know which of two threads sends a message."""
        if torch._C._current_graph_task_id() != -1:
            return None  # autograd's own threads recompute checkpoints
        error = RuntimeError(
            f"{self._name}: expected calls from the thread that made it, {self._thread.name!r}, got one from "
            f"{threading.current_thread().name!r}: each thread needs a process group and a plan or cache that it made"
        )
        if self.check != "calls":
            raise error  # told to nobody: the thread that made the plan may be sending
        return error
