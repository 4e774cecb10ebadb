"""What ptxas says about a kernel, and what a kernel may take: the budget of resource_budget.json."""

from __future__ import annotations

import json
import re
from fnmatch import fnmatchcase
from pathlib import Path

# A wgmma that runs one by one, or a register reallocation that is dropped, costs most of a Hopper kernel's speed
# and is only an "info" line to ptxas.
FATAL_DIAGNOSTICS = re.compile(
    r"\(C75(?:08|10|11|15|17)\)|setmaxnreg[^\n]*ignored|wgmma[^\n]*serialized", re.IGNORECASE
)

_ENTRY = re.compile(r"Compiling entry function '(?P<name>[^']+)' for '(?P<arch>[^']+)'")
_PROPERTIES = re.compile(r"Function properties for (?P<name>\S+)")
_STACK = re.compile(r"(\d+) bytes stack frame, (\d+) bytes spill stores, (\d+) bytes spill loads")
_REGISTERS = re.compile(r"Used (\d+) registers")
_SHARED = re.compile(r"(\d+) bytes smem")


def parse_ptxas_log(log: str) -> list[dict]:
    """Resources of every kernel in the output of `ptxas -v`: name (mangled), arch, registers, and bytes of
    spill_stores, spill_loads, stack and static smem. Functions that ptxas did not inline count for their kernel."""
    kernels: list[dict] = []
    for line in log.splitlines():
        if entry := _ENTRY.search(line):
            empty = {"registers": 0, "spill_stores": 0, "spill_loads": 0, "stack": 0, "smem": 0}
            kernels.append({"name": entry["name"], "arch": entry["arch"], **empty})
        elif not kernels or _PROPERTIES.search(line):
            continue
        elif stack := _STACK.search(line):
            kernel = kernels[-1]
            frame, stores, loads = map(int, stack.groups())
            kernel["stack"] = max(kernel["stack"], frame)
            kernel["spill_stores"] += stores
            kernel["spill_loads"] += loads
        elif registers := _REGISTERS.search(line):
            kernels[-1]["registers"] = int(registers[1])
            if shared := _SHARED.search(line):
                kernels[-1]["smem"] = int(shared[1])
    return kernels


def fatal_diagnostics(log: str) -> list[str]:
    """Lines of a ptxas log that report a serialised wgmma or an ignored setmaxnreg."""
    return [line.strip() for line in log.splitlines() if FATAL_DIAGNOSTICS.search(line)]


def load_budget(path: Path) -> dict:
    return json.loads(path.read_text(encoding="utf-8"))


def spill_bytes(kernel: dict) -> int:
    """Bytes that a kernel spills: stores or loads, whichever is more."""
    return max(kernel["spill_stores"], kernel["spill_loads"])


def spill_budget(budget: dict, file_stem: str, kernel: dict) -> int:
    """Bytes that `kernel` may spill: the first rule whose patterns match file, kernel name and arch, or the default."""
    for rule in budget["rules"]:
        if (
            fnmatchcase(file_stem, rule["file"])
            and fnmatchcase(kernel["name"], rule.get("kernel", "*"))
            and fnmatchcase(kernel["arch"], rule.get("arch", "*"))
        ):
            return rule["spill_bytes"]
    return budget["default_spill_bytes"]


def over_budget(budget: dict, file_stem: str, kernels: list[dict]) -> list[str]:
    """One line for each kernel that spills more than its budget."""
    lines = []
    for kernel in kernels:
        allowed = spill_budget(budget, file_stem, kernel)
        spilled = spill_bytes(kernel)
        if spilled > allowed:
            lines.append(
                f"{file_stem}: {kernel['name']} ({kernel['arch']}) spills {spilled} bytes, budget {allowed} bytes"
            )
    return lines
