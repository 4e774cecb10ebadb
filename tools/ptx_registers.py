"""Gives the registers of PTX few names, so that equal code of two kernels is equal text and compresses.

nvcc names every value anew: four fifths of compressed PTX are these numbers. ptxas allocates registers by live ranges
and makes the same machine code of either (tests/build/test_resources.py).
"""

from __future__ import annotations

import heapq
import re
from collections import defaultdict
from collections.abc import Iterator
from itertools import count

BODY = re.compile(r"^\{\n.*?\n\n\}$", re.MULTILINE | re.DOTALL)
SCOPE = re.compile(r"^\{\n.*?^\}$", re.MULTILINE | re.DOTALL)  # of instructions with registers of their own
REGISTER = re.compile(r"%(rs|rd|r|p|fd|f)(\d+)\b")
DECLARATION = re.compile(r"^\.reg (\.\w+) %(rs|rd|r|p|fd|f)<\d+>;$")
LABEL = re.compile(r"^([$\w]+):")
BRANCH = re.compile(r"\bbra(?:\.uni)?\s+([$\w]+)")
# An instruction that writes its first operand, whatever its predicate: it has none.
WRITES = re.compile(
    r"^\{? ?(?:abs|add|and|bfe|bfi|brev|clz|cvt|cvta|div|ex2|fma|ld|ldmatrix|lg2|lop3|mad|max|min|mma|mov|mul|neg|not|or"
    r"|popc|prmt|rcp|rem|rsqrt|selp|set|setp|shf|shfl|shl|shr|sqrt|sub|tanh|xor)\.[\w.:]*\s+(\{[^}]*\}|[^,\[{]+),([^;]*);"
    r"[ }]*$"
)


def blocks_of(lines: list[str]) -> tuple[list[list[str]], list[list[int]]]:
    """The basic blocks of a function, and those that may follow each."""
    blocks: list[list[str]] = [[]]
    for line in lines:
        if LABEL.match(line) and blocks[-1]:
            blocks.append([])
        blocks[-1].append(line)
        if BRANCH.search(line):
            blocks.append([])
    begins = {found[1]: i for i, block in enumerate(blocks) if block and (found := LABEL.match(block[0]))}
    follow = []
    for i, block in enumerate(blocks):
        last = block[-1] if block else ""
        found = BRANCH.search(last)
        falls_through = not re.match(r"bra|ret|exit", last) and i + 1 < len(blocks)
        follow.append(([begins[found[1]]] if found else []) + ([i + 1] if falls_through else []))
    return blocks, follow


def used_and_written(block: list[str]) -> tuple[set, set]:
    """The registers that a block reads before it writes them, and those that it writes before it reads them."""
    used: set = set()
    written: set = set()
    for line in block:
        found = WRITES.match(line)
        own = set(REGISTER.findall(line)) - written
        new = (set(REGISTER.findall(found[1])) - set(REGISTER.findall(found[2]))) & own if found else set()
        written |= new - used
        used |= own - new
    return used, written


def live_blocks(blocks: list[list[str]], follow: list[list[int]]) -> dict[tuple, set[int]]:
    """For each register that crosses a border of blocks, those in which it is live or occurs."""
    facts = [used_and_written(block) for block in blocks]
    entering = [used for used, _ in facts]
    changed = True
    while changed:
        changed = False
        for i in reversed(range(len(blocks))):
            used, written = facts[i]
            new = used.union(*(entering[j] for j in follow[i])) - (written - used)
            if len(new) != len(entering[i]):
                entering[i] = new
                changed = True
    crossing = set().union(*entering)
    live = {register: set() for block in blocks for line in block for register in REGISTER.findall(line)}
    for i, (used, written) in enumerate(facts):
        for register in (used | written | entering[i].union(*(entering[j] for j in follow[i]))) & crossing:
            live[register].add(i)
    return {register: where for register, where in live.items() if where}


def shared_names(live: dict[tuple, set[int]]) -> dict[tuple, str]:
    """Names of registers that cross a border: one for all that are never live in the same block."""
    taken: dict[str, list[set[int]]] = defaultdict(list)
    names = {}
    for register, where in live.items():
        kind = register[0]
        number = next((n for n, held in enumerate(taken[kind]) if held.isdisjoint(where)), len(taken[kind]))
        if number == len(taken[kind]):
            taken[kind].append(set())
        taken[kind][number] |= where
        names[register] = f"%{kind.upper()}{number}"
    return names


def local_names(block: list[str], names: dict[tuple, str]) -> Iterator[str]:
    """The lines of a block in names of its own for what `names` lacks: the lowest that is free again."""
    last = {register: i for i, line in enumerate(block) for register in REGISTER.findall(line)}
    free: dict[str, list[int]] = defaultdict(list)
    unused: dict[str, count] = defaultdict(count)
    held: dict[tuple, int] = {}
    for i, line in enumerate(block):
        for register in (found := dict.fromkeys(REGISTER.findall(line))):
            if register not in names and register not in held:
                kind = register[0]
                held[register] = heapq.heappop(free[kind]) if free[kind] else next(unused[kind])
        yield REGISTER.sub(lambda m: names.get(m.groups()) or f"%{m[1]}{held[m.groups()]}", line)
        for register in found:
            if register in held and last[register] == i:
                heapq.heappush(free[register[0]], held[register])


def without_percent(scope: str) -> str:
    """Registers that a scope declares for itself, under names that no other has."""
    for name in re.findall(r"\.reg \.\w+ %(\w+)", scope):
        scope = re.sub(rf"%{name}\b", f"{name}_of_scope", scope)
    return scope


def with_few_names(body: str) -> str:
    """One function, from { to }."""
    code = "\n".join(" ".join(line.split("//")[0].split()) for line in body.splitlines()[1:])
    lines = SCOPE.sub(lambda found: without_percent(found[0]), code).splitlines()
    types = {found[2]: found[1] for line in lines if (found := DECLARATION.match(line))}
    lines = [line for line in lines if line and not DECLARATION.match(line)]
    labels = [found[1] for line in lines if (found := LABEL.match(line))]
    declared_inside = any(".reg" in line and REGISTER.search(line) for line in lines)
    if declared_inside or len(set(labels)) != len(labels) or "brx" in code or "call" in code:
        return body  # more than this file knows
    blocks, follow = blocks_of(lines)
    names = shared_names(live_blocks(blocks, follow))
    renamed = "\n".join(line for block in blocks for line in local_names(block, names))
    held: dict[str, int] = {}
    for kind, number in re.findall(r"%([a-zA-Z]+)(\d+)\b", renamed):
        held[kind] = max(held.get(kind, 0), int(number) + 1)
    declared = [f".reg {types[kind.lower()]} %{kind}<{n}>;" for kind, n in held.items() if kind.lower() in types]
    return "\n".join(["{", *declared, renamed])


def renamed(ptx: str) -> str:
    return BODY.sub(lambda found: with_few_names(found[0]), ptx)
