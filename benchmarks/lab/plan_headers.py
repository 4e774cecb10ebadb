"""The plan headers of the shipped kernels as the laboratory reads and replaces them.

A kernel with another row of a table is compiled from the shipped sources: a copy of the header, in which the function
that looks the row up returns another one first, is found before the shipped one. kernels/plan_check.cpp tells what the
tables hold and what does not fit, by the shipped plan itself.
"""

from __future__ import annotations

import functools
import re
import subprocess
import tempfile
from pathlib import Path

from sm80_designs import SOURCES

CSRC = Path(__file__).resolve().parents[2] / "csrc" / "flash_attn"
TILES, POLICY = "plan/tiles.h", "plan/fwd_policy_sm90.h"


@functools.lru_cache(None)
def names(header, enum):
    """The enumerators of a plan header's enum, in order."""
    text = re.sub(r"//.*", "", (CSRC / header).read_text(encoding="utf-8"))
    body = re.search(rf"enum (?:class )?{enum}\b[^{{]*\{{(.*?)\}}", text, re.DOTALL)[1]
    return [word.split("=")[0].strip() for word in body.split(",") if word.strip()]


@functools.lru_cache(None)
def checker():
    """A function that runs kernels/plan_check.cpp, compiled once, and returns what it prints."""
    folder = tempfile.TemporaryDirectory()
    program = Path(folder.name, "plan_check")
    command = ["g++", "-std=c++17", "-O1", f"-I{CSRC}", str(SOURCES / "plan_check.cpp"), "-o", str(program)]
    subprocess.run(command, check=True)

    def run(*words, _keeps=folder):
        return subprocess.run([str(program), *map(str, words)], capture_output=True, text=True, check=True).stdout

    return run


def shipped_row(*words):
    """The numbers of a row in use."""
    return tuple(map(int, checker()("shipped", *words).split()))


@functools.lru_cache(None)
def fits(*words):
    """(bytes of shared memory, what is wrong or "")."""
    memory, _, problem = checker()("fits", *words).partition("\n")
    return int(memory), problem


def with_first_return(path, function, value):
    """The text of a shipped header in which `function` returns `value`."""
    text = (CSRC / path).read_text(encoding="utf-8")
    if text.count(function) != 1:
        raise ValueError(f"{path}: expected one line {function.strip()!r}, found {text.count(function)}")
    return text.replace(function, f"{function}  if (head_dim > 0) return {value};\n")
