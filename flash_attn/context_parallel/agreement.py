"""What the ranks of a group must have in common: compared by a hash, so that what differs raises on all of them."""

from __future__ import annotations

import hashlib

from flash_attn.ops import arguments

CHECKS = ("calls", "plan", "none")


def compare_on_all_ranks(transport, text: str, error: BaseException | None, what: str, extra: int = 0) -> list[int]:
    """Raise on every rank if one has an error or another text; else the `extra` of every rank.

    Every rank of the group calls it, in the same order: nobody waits for a rank that has given up.
    """
    digest = int.from_bytes(hashlib.sha256(text.encode()).digest()[:8], "big", signed=True)
    answers = transport.all_gather_ints([digest, int(error is not None), extra])
    if error is not None:
        raise error
    failed = [rank for rank, (_, has_failed, _) in enumerate(answers) if has_failed]
    if failed:
        raise RuntimeError(f"{what}: expected valid arguments on every rank, got errors on ranks {failed}")
    different = [rank for rank, answer in enumerate(answers) if answer[0] != answers[0][0]]
    if different:
        raise RuntimeError(f"{what}: expected the same on every rank, got others on ranks {different} than on rank 0")
    return [answer[2] for answer in answers]


class Agreement:
    """What was agreed upon when a plan was made, and which calls have been compared since.

    check: "calls" compares every call (the default where the group has a CPU backend), "plan" what is agreed upon and
    the first call of each kind (the default elsewhere: comparing waits for the GPU), "none" nothing.
    """

    def __init__(self, transport, what: str, check: str | None, text: str, error: BaseException | None):
        """text: what every rank must have; error: why this one has none. Raises on every rank, as `check` says."""
        default = "calls" if transport.checks_on_host else "plan"
        check = default if check is None else check
        if error is None and check not in CHECKS:
            error = RuntimeError(f"check: expected one of {', '.join(CHECKS)}, got {arguments.shown(check)}")
        text = f"{check} {text}"
        if check != "none":
            compare_on_all_ranks(transport, text, error, what)
        elif error is not None:
            raise error
        self._transport, self._check = transport, check
        self._text = hashlib.sha256(text.encode()).hexdigest()
        self._compared: set[str] = set()

    def compare(self, what: str, request: str, error: BaseException | None, seed: int | None = None) -> int | None:
        """Agree with all ranks on a call, as `check` says; the seed of rank 0, which a call with dropout has."""
        text = f"{self._text} {request}"
        is_new = error is not None or text not in self._compared
        if self._check == "calls" or seed is not None or (self._check == "plan" and is_new):
            seeds = compare_on_all_ranks(self._transport, text, error, what, seed or 0)
            self._compared.add(text)
            return None if seed is None else seeds[0]
        if error is not None:
            raise error
        return None
