"""Machine code as cuobjdump lists it: the instructions of each kernel and of its loops."""

from __future__ import annotations

import re
import shutil
import subprocess
from collections.abc import Iterator
from importlib.util import find_spec
from pathlib import Path

Code = list[tuple[int, str]]  # (address, instruction)


def find_cuobjdump(toolkit_root: Path | str | None = None) -> Path | None:
    """cuobjdump of the toolkit, of PATH, or the one that triton brings; None if there is none."""
    triton = find_spec("triton")
    folders = [
        Path(toolkit_root, "bin") if toolkit_root else None,
        None,  # PATH
        Path(triton.origin).parent / "backends" / "nvidia" / "bin" if triton and triton.origin else None,
    ]
    for folder in folders:
        if found := shutil.which("cuobjdump", path=folder and str(folder)):
            return Path(found)
    return None


def listing(cuobjdump: Path, file: Path, *options: str) -> str:
    """What cuobjdump -sass prints of an object or library."""
    command = [str(cuobjdump), "-sass", *options, str(file)]
    return subprocess.run(command, capture_output=True, text=True, check=True).stdout


def functions(text: str) -> dict[str, Code]:
    """Of a listing: {mangled kernel name: its code}; of one without names: that of ""."""
    found: dict[str, Code] = {}
    name = ""
    for line in text.splitlines():
        if header := re.match(r"\s*Function : (\S+)", line):
            name = header[1]
        elif instruction := re.match(r"\s*/\*([0-9a-f]{4,})\*/\s+(.+?)\s*;", line):
            found.setdefault(name, []).append((int(instruction[1], 16), instruction[2]))
    return found


def loops(code: Code) -> Iterator[list[str]]:
    """Instructions of each loop: the range from a backward branch's target to the branch."""
    for address, text in code:
        branch = re.search(r"\bBRA\S*\s.*?(0x[0-9a-f]+)", text)
        if branch and int(branch[1], 16) < address:
            yield [t for a, t in code if int(branch[1], 16) <= a <= address]


def opcode(text: str) -> str:
    """HGMMA of "@P0 HGMMA.64x64x16.F32 R24, …"."""
    return re.sub(r"^@!?U?P\w+\s+", "", text).split()[0].split(".")[0]
