"""What Nsight Compute counts in each rung: `python examples/minimal/counters.py build/minimal/minimal [--write]`.

The program, main.cu of this folder or of ../hopper, launches each rung once (`--once`) under ncu, which reads the
hardware counters. --write puts the table into the page of the ladder. Needs ncu and a machine that allows counters.
"""

from __future__ import annotations

import argparse
import csv
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent))  # absent under PYTHONSAFEPATH

from table import HOPPER_README, HOPPER_RUNGS, README, write_block

PERCENT = ".avg.pct_of_peak_sustained_active"
# column -> the counters that say it: the largest of those that a GPU has
COLUMNS = {
    "tensor cores, %": (
        f"sm__pipe_tensor_cycles_active{PERCENT}",
        f"sm__inst_executed_pipe_tensor_op_gmma{PERCENT}",
        f"sm__inst_executed_pipe_tensor_op_hmma{PERCENT}",
    ),
    "issue, %": (f"smsp__issue_active{PERCENT}",),
    "shared memory, %": (f"l1tex__data_pipe_lsu_wavefronts{PERCENT}",),
    "exp2, %": (f"sm__inst_executed_pipe_xu{PERCENT}",),
    "L2, %": ("lts__t_sectors.avg.pct_of_peak_sustained_elapsed",),
    "warps on an SM": ("sm__warps_active.avg.per_cycle_active",),
    "bank conflicts of loads": ("l1tex__data_bank_conflicts_pipe_lsu_mem_shared_op_ld.sum",),
}
# warps that wait per instruction issued, by reason
STALLED, PER_ISSUE = "smsp__average_warps_issue_stalled_", "_per_issue_active.ratio"
MOST_REASONS = 3


def ncu(*words):
    """What it says; SystemExit if it fails."""
    done = subprocess.run([shutil.which("ncu") or sys.exit("needs ncu"), *words], capture_output=True, text=True)
    if done.returncode:
        sys.exit(f"ncu: exit status {done.returncode}: {(done.stdout + done.stderr).strip()[-600:]}")
    return done.stdout


def known_counters():
    """Those of COLUMNS that this GPU has; ncu refuses a name that it does not know."""
    known = {line.split()[0] for line in ncu("--query-metrics").splitlines() if line.strip()}
    return [name for names in COLUMNS.values() for name in names if name.split(".")[0] in known]


def profile(program):
    """[(rung, {counter: its value})], in the order of the launches."""
    with tempfile.TemporaryDirectory() as folder:
        log = Path(folder, "counters.csv")
        options = ["--csv", "--page", "raw", "--clock-control", "none", "--section", "WarpStateStats"]
        options += ["--metrics", ",".join(known_counters()), "--log-file", str(log)]
        names = ncu(*options, str(program), "--once").split()
        return list(zip(names, values(log.read_text(encoding="utf-8")), strict=True))


def values(text):
    """[{counter: value}] of ncu's table of raw values, whose second line has the units."""
    lines = [line for line in text.splitlines() if line.startswith('"')]
    rows = list(csv.DictReader(lines))[1:]
    if not rows:
        sys.exit(f"ncu: no counters: {text.strip()[-600:]}")
    return [{name: float(value.replace(",", "")) for name, value in row.items() if is_number(value)} for row in rows]


def is_number(text):
    return (text or "").replace(",", "").replace(".", "", 1).isdigit()


def cell(found, names):
    value = max((found[name] for name in names if name in found), default=None)
    return "–" if value is None else f"{value:.0f}" if value >= 10 or value == 0 else f"{value:.1f}"


def reasons(found):
    """What most warps wait for, and how many for each instruction that is issued."""
    waits = {name[len(STALLED) : -len(PER_ISSUE)]: value for name, value in found.items()
             if name.startswith(STALLED) and name.endswith(PER_ISSUE)}  # fmt: skip
    first = sorted(waits, key=waits.get, reverse=True)[:MOST_REASONS]
    return ", ".join(f"{name} {waits[name]:.1f}" for name in first) or "–"


def table(profiled):
    """As Markdown."""
    header = ["kernel", *COLUMNS, "warps waiting per instruction issued"]
    lines = [header, ["---"] * len(header)]
    for name, found in profiled:
        lines.append([f"`{name}`", *(cell(found, names) for names in COLUMNS.values()), reasons(found)])
    return "\n".join("| " + " | ".join(line) + " |" for line in lines)


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("program", type=Path, help="what run.sh built: minimal, or hopper")
    parser.add_argument("--write", action="store_true", help="put the table into the page of the ladder")
    options = parser.parse_args()
    profiled = profile(options.program)
    device = subprocess.run(
        ["nvidia-smi", "--query-gpu=name", "--format=csv,noheader"], capture_output=True, text=True, check=True
    ).stdout.splitlines()[0]
    text = f"{device}, one launch of each, not causal:\n\n{table(profiled)}"
    print(text)
    if options.write:
        write_block(text, "counters", HOPPER_README if profiled[0][0] in HOPPER_RUNGS else README)


if __name__ == "__main__":
    main()
