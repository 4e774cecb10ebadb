"""What ptxas says about a kernel, and what a kernel may take: the budget of resource_budget.json."""

from __future__ import annotations

import json
import re
from collections.abc import Iterable
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
_VARIANTS = re.compile(r"^enum class (\w*Variant) \{([^}]*)\}", re.MULTILINE)
_NAMESPACE = re.compile(r"^namespace (\w+) \{$|^\}  // namespace", re.MULTILINE)
_VARIANT_NUMBER = re.compile(r"\(((?:\w+::)*\w*Variant)\)(\d+)")


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


def variants_of(headers: Iterable[str]) -> dict[str, list[str]]:
    """The enumerators of every enum of kernel variants that one of the headers defines, by its qualified name: families
    have enums of one name."""
    found = {}
    for header in headers:
        text = Path(header).read_text(encoding="utf-8", errors="replace")
        for enum in _VARIANTS.finditer(text):
            namespaces: list[str] = []
            for bound in _NAMESPACE.finditer(text, 0, enum.start()):
                namespaces = [*namespaces, bound[1]] if bound[1] else namespaces[:-1]
            found["::".join([*namespaces, enum[1]])] = re.findall(r"\bk\w+", enum[2])
    return found


def with_variant_names(name: str, variants: dict[str, list[str]]) -> str:
    """A demangled kernel name with FwdVariant::kDropout for (flash::plan::FwdVariant)2."""

    def named(number: re.Match) -> str:
        enumerators = variants.get(number[1])
        return f"{number[1].split('::')[-1]}::{enumerators[int(number[2])]}" if enumerators else number[0]

    return _VARIANT_NUMBER.sub(named, name)


def is_kernel_of(rule: dict, name: str) -> bool:
    """Whether a kernel has the rule's part of a name (shell-style) and its variant, as far as it states them."""
    variant = rule.get("variant")
    is_named = fnmatchcase(name, f"*{rule.get('kernel', '')}*")
    return is_named and (variant is None or re.search(rf"Variant::{variant}\b", name) is not None)


def load_budget(path: Path) -> dict:
    return json.loads(path.read_text(encoding="utf-8"))


def spill_bytes(kernel: dict) -> int:
    """Bytes that a kernel spills: stores or loads, whichever is more."""
    return max(kernel["spill_stores"], kernel["spill_loads"])


def spill_budget(budget: dict, file_stem: str, kernel: dict) -> int:
    """Bytes that `kernel` may spill: the first rule that is for its file, variant and arch, or the default; at least
    untuned_spill_bytes on an architecture that kernels are not tuned for."""
    is_tuned = kernel["arch"] in budget.get("tuned_archs", [kernel["arch"]])
    least = 0 if is_tuned else budget["untuned_spill_bytes"]
    for rule in budget["rules"]:
        if (
            fnmatchcase(file_stem, rule["file"])
            and is_kernel_of(rule, kernel["name"])
            and fnmatchcase(kernel["arch"], rule.get("arch", "*"))
        ):
            return max(least, rule["spill_bytes"])
    return max(least, budget["default_spill_bytes"])


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
