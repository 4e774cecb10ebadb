"""The Python environment that was active around a front end which runs the build in an environment of its own.

Such a front end replaces VIRTUAL_ENV, so the user's own may be left only in the environment of an ancestor process.
An interpreter named there is run, so it must be one that this user, or root, has put there: an ancestor of another
user, or with other rights than its caller's, ends the search, and a path that others can write to is passed over,
aloud.
"""

from __future__ import annotations

import os
import stat
import sys
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path

from report import say

VARIABLES = ("VIRTUAL_ENV", "CONDA_PREFIX")
MAX_LINKS = 40  # of one path, as the kernel's own limit


@dataclass(frozen=True)
class Candidate:
    """An interpreter to ask for its torch, and where it was found."""

    executable: str
    source: str


def interpreter(prefix: str) -> str:
    return os.path.join(prefix, "bin", "python")


def own_environments(environment: Mapping[str, str]) -> Iterator[Candidate]:
    """Environments that this process's own variables name, by themselves or by their bin folder on PATH."""
    for name in VARIABLES:
        if environment.get(name):
            yield Candidate(interpreter(environment[name]), name)
    for folder in map(Path, environment.get("PATH", "").split(os.pathsep)):
        prefix = folder.parent
        if folder.is_absolute() and ((prefix / "pyvenv.cfg").exists() or (prefix / "conda-meta").exists()):
            yield Candidate(interpreter(str(prefix)), "PATH")


def ancestor_environments(pid: int | None = None, proc: Path = Path("/proc")) -> Iterator[Candidate]:
    """Environments that an ancestor's variables name, nearest first, as far as other users have no hand in them."""
    pid = os.getpid() if pid is None else pid
    while pid > 0:
        try:
            ancestor = read_process(proc / str(pid))
        except OSError:
            return
        if ancestor is None:
            return
        for name, prefix in ancestor.variables.items():
            candidate = Candidate(interpreter(prefix), f"{name} of process {pid}, {ancestor.name}")
            if not os.path.exists(candidate.executable):
                continue
            culprit = next(filter(None, map(replaceable_part, startup_files(prefix))), None)
            if culprit is None:
                yield candidate
            else:
                say(f"passed over: {candidate.executable} ({candidate.source}), as another user owns {culprit} or can")
                say("        write to it. FLASH_ATTN_PYTHON=... names an interpreter to take all the same.")
        pid = ancestor.parent


def startup_files(prefix: str) -> list[str]:
    """What the interpreter of an environment runs or follows before any program: itself, its settings, .pth files."""
    site = "lib/python{}.{}/site-packages".format(*sys.version_info[:2])
    optional = [os.path.join(prefix, name) for name in ("pyvenv.cfg", site)]
    return [interpreter(prefix), *filter(os.path.exists, optional)]


@dataclass(frozen=True)
class Process:
    name: str
    parent: int
    variables: dict[str, str]  # those of VARIABLES that are set


def read_process(folder: Path) -> Process | None:
    """What is needed of a process; None if another user may have chosen its variables. OSError if it is gone.

    The folder is held open: its process id may be given to another process meanwhile.
    """
    descriptor = os.open(folder, os.O_RDONLY | os.O_DIRECTORY)
    try:
        status = dict(line.split(":", 1) for line in read_at(descriptor, "status").splitlines() if ":" in line)
        users = set(map(int, status["Uid"].split()))  # real, effective, saved, of the file system
        program = os.stat("exe", dir_fd=descriptor).st_mode
        # A set-user-ID program that has given up its caller's identity still has its caller's environment.
        raised = program & (stat.S_ISUID | stat.S_ISGID)
        if users != {os.geteuid()} or os.fstat(descriptor).st_uid != os.geteuid() or raised:
            return None
        entries = (entry.partition("=") for entry in read_at(descriptor, "environ").split("\0"))
        variables = {name: value for name, _, value in entries if name in VARIABLES and value}
        return Process(status["Name"].strip(), int(status["PPid"]), variables)
    finally:
        os.close(descriptor)


def read_at(descriptor: int, name: str) -> str:
    with open(os.open(name, os.O_RDONLY, dir_fd=descriptor), "rb") as file:
        return file.read().decode(errors="replace")


def replaceable_part(path: str) -> Path | None:
    """The first folder, link or file on the way to `path`, links followed, that another user owns or can replace; the
    path itself if it is not absolute or does not exist. None: whatever runs is this user's or root's."""
    parts, current, links = list(reversed(Path(path).parts)), Path("/"), 0
    if not os.path.isabs(path):
        return Path(path)
    while True:
        try:
            facts = os.lstat(current)
            target = os.readlink(current) if stat.S_ISLNK(facts.st_mode) else None
        except OSError:
            return current
        if not is_trusted(facts) or links > MAX_LINKS:
            return current
        if target is not None:
            links += 1
            parts += reversed(Path(target).parts)
            current = current.parent
        if not parts:
            return None
        current = Path(os.path.normpath(current / parts.pop()))


def is_trusted(facts: os.stat_result) -> bool:
    """Whether only this user and root decide what is at this place of a path."""
    user = os.geteuid()
    if facts.st_uid not in (0, user):
        return False
    if stat.S_ISLNK(facts.st_mode):
        return True
    if stat.S_ISDIR(facts.st_mode) and facts.st_mode & stat.S_ISVTX:
        return True  # entries belong to who made them; the next part of the path is looked at itself
    private_group = facts.st_gid == user == os.getegid()
    writers = stat.S_IWOTH if private_group else stat.S_IWOTH | stat.S_IWGRP
    return not facts.st_mode & writers
