"""The instructions of a kernel's inner loop, from its machine code."""

from __future__ import annotations

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "tools"))

import sass

COUNTED = ("HMMA", "HGMMA", "LDSM", "MUFU", "LDGSTS", "LDG", "STS", "SHFL")


def inner_loop(text, opcode, at_least):
    """{"all": instructions, "HMMA": of them, …} of the shortest loop with `at_least` instructions `opcode` in a listing
    of one kernel: the one over unmasked blocks, since masks only add to it. None if there is no such loop."""
    best = None
    for code in sass.functions(text).values():
        for loop in sass.loops(code):
            names = [sass.opcode(instruction) for instruction in loop]
            if names.count(opcode) >= at_least and (best is None or len(names) < len(best)):
                best = names
    if best is None:
        return None
    counts = {name: best.count(name) for name in COUNTED if name in best}
    return {"all": len(best), **counts}
