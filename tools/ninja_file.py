"""Writes and runs the build files of ninja."""

from __future__ import annotations

import importlib.util
import os
import shlex
import shutil
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

from errors import BuildError


def escaped(path: Path | str) -> str:
    """`path` as ninja reads it in a build line."""
    return str(path).replace("$", "$$").replace(" ", "$ ").replace(":", "$:")


def shell(command: list[str]) -> str:
    """`command` for a rule: quoted for the shell, with ninja's own $in and $out left as they are."""
    words = [word if word in ("$in", "$out", "$depfile") else shlex.quote(word).replace("$", "$$") for word in command]
    return " ".join(words)


def ninja_command() -> list[str]:
    """ninja as a pip package of this interpreter, else from PATH."""
    if importlib.util.find_spec("ninja") is not None:
        return [sys.executable, "-m", "ninja"]
    on_path = shutil.which("ninja")
    if on_path is None:
        raise BuildError("ninja: not found; pip install ninja")
    return [on_path]


def run_ninja(folder: Path, jobs: int) -> Iterator[tuple[int, int, str]]:
    """Build all of `folder`/build.ninja. Yields (finished, total, line) for each line the commands print, and
    (finished, total, "") for each command done. Raises BuildError if a command fails."""
    environment = {**os.environ, "NINJA_STATUS": "@ninja %f %t "}
    process = subprocess.Popen(
        [*ninja_command(), "-C", str(folder), "-j", str(jobs), "-k", "0"],
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        env=environment,
    )
    finished = total = 0
    failed: list[str] = []
    for line in process.stdout:
        line = line.rstrip("\n")
        if line.startswith("@ninja "):
            _, done, of, _ = line.split(" ", 3)
            finished, total = int(done), int(of)
            yield finished, total, ""
        elif line.startswith("FAILED:") or failed:
            failed.append(line)
        elif not line.startswith("ninja: "):
            yield finished, total, line
    if process.wait() != 0:
        raise BuildError("\n".join(failed) or f"ninja: failed in {folder}")
