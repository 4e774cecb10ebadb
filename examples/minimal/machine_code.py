"""What the loop of each rung consists of: `python examples/minimal/machine_code.py [--arch 90]`.

Compiles every rung for an architecture (nvcc, cuobjdump; no GPU) and counts the instructions of a tile without those of
a mask, which most tiles skip. Per 64 mma of a warp: 16 rows by 64 keys at head dim 64.
"""

from __future__ import annotations

import argparse
import re
import subprocess
import sys
import tempfile
from collections import Counter
from pathlib import Path

HERE = Path(__file__).resolve().parent
sys.path[:0] = [str(HERE), str(HERE.parents[1] / "tools")]

import sass
from table import RUNGS, SIDE_STEPS
from toolchain import find_toolkit

FP32 = ("FFMA", "FMUL", "FADD", "FMNMX")
GROUPS = {"mma": ("HMMA",), "ldmatrix": ("LDSM",), "exp2": ("MUFU",), "fp32": FP32, "copies": ("LDGSTS",)}


def without_masks(code):
    """The code without what a branch forward skips, if that selects scores and multiplies nothing."""
    skipped = set()
    for address, text in code:
        branch = re.search(r"^@.*\bBRA\S*\s.*?(0x[0-9a-f]+)", text)
        region = [line for line in code if branch and address < line[0] < int(branch[1], 16)]
        counts = Counter(sass.opcode(text) for _, text in region)
        if counts["FSEL"] >= 32 and not counts["HMMA"]:
            skipped.update(line[0] for line in region)
    return [line for line in code if line[0] not in skipped]


def counts(listing):
    """{opcode: per 64 mma} of the longest loop of the one kernel that is listed."""
    (code,) = sass.functions(listing).values()
    loops = [Counter(map(sass.opcode, loop)) for loop in sass.loops(without_masks(code))]
    longest = max(loops, key=lambda loop: loop["HMMA"])
    return {name: count * 64 / longest["HMMA"] for name, count in longest.items()}


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--arch", default="90", help="of nvcc, as in sm_90")
    arch, toolkit = parser.parse_args().arch, find_toolkit(sys.path)
    cuobjdump = sass.find_cuobjdump(toolkit.root if toolkit else None)
    if toolkit is None or cuobjdump is None:
        sys.exit("needs nvcc and cuobjdump")
    print(f"| per 64 mma of a warp, sm_{arch} | instructions | {' | '.join(GROUPS)} | addresses, rest |")
    print("|---" * (len(GROUPS) + 3) + "|")
    for number, name in enumerate([*RUNGS, *SIDE_STEPS], 1):
        if number == 1:  # no tensor cores
            continue
        with tempfile.TemporaryDirectory() as folder:
            cubin = Path(folder, "rung.cubin")
            options = ["-std=c++17", "-O3", "--use_fast_math", f"-arch=sm_{arch}", f"-DRUNG={number}", "-cubin"]
            subprocess.run([toolkit.nvcc, *options, HERE / "main.cu", "-o", cubin], check=True)
            found = counts(sass.listing(cuobjdump, cubin))
        groups = [sum(found.get(name, 0) for name in names) for names in GROUPS.values()]
        cells = [sum(found.values()), *groups, sum(found.values()) - sum(groups)]
        print(f"| `{name}` | " + " | ".join(f"{cell:.0f}" for cell in cells) + " |")


if __name__ == "__main__":
    main()
