"""The instructions of a kernel's inner loop, from its machine code."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

_INSTRUCTION = re.compile(r"/\*([0-9a-f]{4,})\*/\s+(?:@!?U?P\w+\s+)?([A-Z][A-Z0-9_.]*)([^;]*);")
_TARGET = re.compile(r"\b0x([0-9a-f]+)")
COUNTED = ("HMMA", "HGMMA", "LDSM", "MUFU", "LDGSTS", "LDG", "STS", "SHFL")


def find_cuobjdump(toolkit_root=None):
    """cuobjdump of the toolkit, of PATH, or the one that Triton brings; None if there is none."""
    folders = [Path(toolkit_root, "bin")] if toolkit_root else []
    folders += [Path(site, "triton/backends/nvidia/bin") for site in sys.path if site]
    for folder in folders:
        if os.access(folder / "cuobjdump", os.X_OK):
            return folder / "cuobjdump"
    found = shutil.which("cuobjdump")
    return Path(found) if found else None


def instructions(text):
    """[(address, opcode, operands)] of a listing with one kernel."""
    return [(int(address, 16), opcode, rest) for address, opcode, rest in _INSTRUCTION.findall(text)]


def loops(code):
    """[(first, last)]: indices into `code` of every backward branch's target and the branch."""
    index = {address: i for i, (address, _, _) in enumerate(code)}
    found = []
    for i, (address, opcode, rest) in enumerate(code):
        target = _TARGET.search(rest) if opcode.split(".")[0] == "BRA" else None
        if target and int(target[1], 16) < address and int(target[1], 16) in index:
            found.append((index[int(target[1], 16)], i))
    return found


def inner_loop(text, opcode, at_least):
    """{"all": instructions, "HMMA": of them, …} of the shortest loop with `at_least` instructions `opcode`: the one
    over unmasked blocks, since masks only add to it. None if there is no such loop."""
    code = instructions(text)
    best = None
    for first, last in loops(code):
        names = [name.split(".")[0] for _, name, _ in code[first : last + 1]]
        if names.count(opcode) >= at_least and (best is None or len(names) < len(best)):
            best = names
    if best is None:
        return None
    counts = {name: best.count(name) for name in COUNTED if name in best}
    return {"all": len(best), **counts}


def disassemble(cuobjdump, library):
    done = subprocess.run([str(cuobjdump), "-sass", str(library)], capture_output=True, text=True, check=True)
    return done.stdout
