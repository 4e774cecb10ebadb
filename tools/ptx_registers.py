"""Gives the registers and labels of PTX few names, so that like code of kernels is equal text, which compresses.

nvcc numbers all values of a kernel: these numbers are four fifths of compressed PTX. Values that no label separates
from their uses share a few names here. Labels and the other values have those of the same lines of an earlier kernel,
else are numbered as they appear. ptxas finds the live ranges again.
"""

from __future__ import annotations

import heapq
import re
from collections import Counter, defaultdict
from collections.abc import Iterator
from difflib import SequenceMatcher
from itertools import count

BODY = re.compile(r"^\{\n.*?\n\n\}$", re.MULTILINE | re.DOTALL)  # of a function
SCOPE = re.compile(r"^\{\n.*?^\}$", re.MULTILINE | re.DOTALL)  # in it, with registers of its own
REGISTER = re.compile(r"%(rs|rd|r|p|fd|f)(\d+)\b")
DECLARATION = re.compile(r"^\.reg (\.\w+) %(rs|rd|r|p|fd|f)<\d+>;$", re.MULTILINE)
LABEL = re.compile(r"^(?=[$\w]+:)", re.MULTILINE)
SHARED = re.compile(r"((%[A-Z]+|\$)(?:\d+|L\w+))\b")  # by blocks: a register or a label
WRITES = re.compile(  # its first operand, whatever came before; a predicated instruction may not
    r"(?:abs|add|and|bfe|bfi|brev|clz|cvt|cvta|div|ex2|fma|ld|ldmatrix|lg2|lop3|mad|max|min|mma|mov|mul|neg|not|or|popc"
    r"|prmt|rcp|rem|rsqrt|selp|set|setp|shf|shfl|shl|shr|sqrt|sub|tanh|xor)\.[\w.:]*\s+(\{[^}]*\}|[^,\[{]+),(.*)"
)


def used_first(block: str) -> set[tuple]:
    """The registers that a block may read before it writes them."""
    used: set[tuple] = set()
    written: set[tuple] = set()
    for statement in block.replace("\n", ";").split(";"):
        found = WRITES.fullmatch(statement.lstrip("{ "))
        own = set(REGISTER.findall(statement)) - written - used
        new = own & set(REGISTER.findall(found[1])) - set(REGISTER.findall(found[2])) if found else set()
        written |= new
        used |= own - new
    return used


def renamed_block(block: str, names: dict[tuple, str]) -> Iterator[str]:
    """Its lines: `names`, and for what these lack the lowest number that is free again."""
    lines = block.splitlines()
    last = {register: i for i, line in enumerate(lines) for register in REGISTER.findall(line)}
    free: dict[str, list[int]] = defaultdict(list)
    unused: dict[str, count] = defaultdict(count)
    held: dict[tuple, int] = {}
    for i, line in enumerate(lines):
        for register in (found := dict.fromkeys(REGISTER.findall(line))):
            if register not in names and register not in held:
                kind = register[0]
                held[register] = heapq.heappop(free[kind]) if free[kind] else next(unused[kind])
        yield REGISTER.sub(lambda m: names.get(m.groups()) or f"%{m[1]}{held[m.groups()]}", line)
        for register in found:
            if register in held and last[register] == i:
                heapq.heappush(free[register[0]], held[register])


def without_percent(scope: str) -> str:
    """Registers that a scope declares, under names that no other has."""
    for name in re.findall(r"\.reg \.\w+ %(\w+)", scope):
        scope = re.sub(rf"%{name}\b", f"{name}_of_scope", scope)
    return scope


def shapes(lines: list[str]) -> list[str]:
    return SHARED.sub(r"\2", "\n".join(lines)).splitlines()


def shared_names(lines: list[str], like: list[str]) -> dict[str, str]:
    """Of each register and label that blocks share: that in the same line of `like`, else the first free name."""
    names: dict[str, str] = {}
    taken: dict[str, str] = {}
    for i, j, length in SequenceMatcher(None, shapes(like), shapes(lines)).get_matching_blocks():
        pairs = zip(*(SHARED.findall("\n".join(part)) for part in (like[i : i + length], lines[j : j + length])))
        for (name, _), (own, _) in pairs:
            if own not in names and taken.setdefault(name, own) == own:
                names[own] = name
    unused: dict[str, count] = defaultdict(count)
    for own, kind in SHARED.findall("\n".join(lines)):
        if own not in names:
            names[own] = next(name for n in unused[kind] if (name := f"{kind}{n}") not in taken)
    return names


def renamed_body(body: str, earlier: list[list[str]]) -> str:
    code = "\n".join(" ".join(line.split("//")[0].split()) for line in body.splitlines()[1:])
    code = SCOPE.sub(lambda found: without_percent(found[0]), re.sub(r"\n+", "\n", code))
    types = {kind: kind_of for kind_of, kind in DECLARATION.findall(code)}
    code = DECLARATION.sub("", code).lstrip()
    if re.search(r"\.reg [^;]*%\w+\d", code):
        raise ValueError(f"registers declared in a scope of another form:\n{code[:400]}")
    blocks = LABEL.split(code)
    crossing = set().union(*map(used_first, blocks))
    names = {(kind, number): f"%{kind.upper()}{number}" for kind, number in crossing}
    lines = [line for block in blocks for line in renamed_block(block, names)]
    own = Counter(shapes(lines))
    like = max(earlier, key=lambda other: (Counter(shapes(other)) & own).total(), default=[])
    shared = shared_names(lines, like)
    code = SHARED.sub(lambda found: shared[found[0]], "\n".join(lines))
    earlier.append(code.splitlines())
    held: dict[str, int] = {}
    for kind, number in re.findall(r"%((?:rs|rd|r|p|fd|f)|(?:RS|RD|R|P|FD|F))(\d+)\b", code):
        held[kind] = max(held.get(kind, 0), int(number) + 1)
    return "\n".join(["{", *(f".reg {types[kind.lower()]} %{kind}<{n}>;" for kind, n in held.items()), code])


def renamed(ptx: str) -> str:
    earlier: list[list[str]] = []
    return BODY.sub(lambda found: renamed_body(found[0], earlier), ptx)
