"""Renamed registers: programs store the same numbers, and ptxas makes the same machine code."""

import itertools
import random
import re
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
sys.path.insert(0, str(ROOT / "tools"))

import sass
import toolchain
from ptx_registers import renamed

SCOPE = "// begin inline asm\n\t{ \n.reg .pred \t%p1; \nsetp.lt.s32 %p1, %r, 5; \n@%p1 mov.u32 %r, 7; \n}"
REGISTERS, PREDICATES, BLOCKS, STEPS = 24, 4, 4, 400


def random_program(seed):
    """PTX of jumps back and forth, with predicated writes, side exits, values of one use, and scopes that declare a %p1
    of their own."""
    choose, fresh = random.Random(seed), itertools.count(REGISTERS)
    r, p = (lambda: f"%r{choose.randrange(REGISTERS)}"), (lambda: f"%p{choose.randrange(PREDICATES)}")
    makers = (
        lambda: f"mov.u32 \t{r()}, {choose.randrange(9)};",
        lambda: f"add.s32 \t{r()}, {r()}, {r()};",
        lambda: f"@{p()} add.s32 \t{r()}, {r()}, 1;",
        lambda: f"setp.lt.s32 \t{p()}, {r()}, {r()};",
        lambda: f"st.global.u32 \t[%rd0], {r()};",
        lambda: f"{{ add.s32 {r()}, {r()}, 2; mov.u32 {r()}, {r()}; }}",
        lambda: f"@{p()} bra \t$L{choose.randrange(BLOCKS)};",
        lambda: SCOPE.replace("%r", r()),
        lambda: f"add.s32 \t%T, {r()}, 3;\n\tadd.s32 \t{r()}, %T, %T;".replace("%T", f"%r{next(fresh)}"),
    )
    blocks = ("".join(f"\n\t{choose.choice(makers)()}" for _ in range(7)) for _ in range(BLOCKS))
    start = "".join(f"\n\tmov.u32 \t%r{i}, {i};" for i in range(REGISTERS))
    start += "".join(f"\n\tsetp.lt.s32 \t%p{i}, %r{i}, %r1;" for i in range(PREDICATES))
    body = "".join(f"\n\n$L{i}:{block}" for i, block in enumerate(blocks))
    declared = f"\t.reg .pred \t%p<{PREDICATES}>;\n\t.reg .b32 \t%r<99>;\n\t.reg .b64 \t%rd<1>;\n"
    return f".version 9.0\n\n.visible .entry f()\n{{\n{declared}\n\tmov.u64 \t%rd0, 0;{start}{body}\n\tret;\n\n}}\n"


RESULTS = {"mov": lambda a: a, "add": int.__add__, "setp": int.__lt__}


def stored(ptx):
    """What STEPS instructions of the program store; in a scope, its registers hide those of the same name."""
    code = re.sub(r"//[^\n]*|\t", " ", ptx[ptx.index("{\n") + 2 : ptx.rindex("}")])
    code = re.sub(r"\.reg[^;]*<\d+>;", "", code)
    scopes = iter(range(10**6))
    code = re.sub(r"\{\s*\.reg \.pred\s+(%?\w+);.*?\}",
                  lambda m: re.sub(rf"{m[1]}\b", f"%scope{next(scopes)}", m[0]), code, flags=re.DOTALL)  # fmt: skip
    code = re.sub(r"([$\w]+):", r"label \1;", code)
    program = [words for text in re.split(r"[;{}]", code) if (words := text.replace(",", " ").split())]
    at = {words[1]: i for i, words in enumerate(program) if words[0] == "label"}
    values, found, i = {}, [], 0
    number = lambda word: int(word) if word.lstrip("-").isdigit() else values[word]  # noqa: E731
    for _ in range(STEPS):
        words = program[i]
        i += 1
        if words[0].startswith("@") and not values[words[0][1:]]:
            continue
        words = words[1:] if words[0].startswith("@") else words
        operation = words[0].split(".")[0]
        if operation == "ret":
            break
        if operation == "bra":
            i = at[words[1]]
        elif operation == "st":
            found.append(number(words[2]))
        elif operation in RESULTS:
            values[words[1]] = RESULTS[operation](*map(number, words[2:]))
    return found


@pytest.mark.parametrize("first", range(0, 400, 100))
def test_a_program_stores_the_same(first):
    lengths = []
    for seed in range(first, first + 100):
        program = random_program(seed)
        expected = stored(program)
        assert stored(renamed(program)) == expected, seed
        lengths.append(len(expected))
    assert max(lengths) > 20


KERNEL = """
__global__ void sums(float* x, int n) {
  float sum = 0, top = x[0];
  for (int i = threadIdx.x; i < n; i += 32) {
    const float y = x[i];
    if (y > top) { sum *= __expf(top - y); top = y; }
    sum += __expf(y - top);
  }
  if (__syncthreads_or(sum > 3)) x[n] = sum * __shfl_xor_sync(~0u, top, 1);
}
"""


@pytest.mark.skipif(toolchain.find_toolkit(sys.path) is None or sass.find_cuobjdump() is None, reason="no CUDA toolkit")
def test_ptxas_makes_the_same_machine_code(tmp_path):
    nvcc = toolchain.find_toolkit(sys.path).nvcc
    (tmp_path / "a.cu").write_text(KERNEL)
    run = lambda *command: subprocess.run([nvcc, "-arch=sm_80", *command], cwd=tmp_path, check=True)  # noqa: E731
    run("-ptx", "a.cu", "-o", "a.ptx")
    text = (tmp_path / "a.ptx").read_text()
    assert "_of_scope" in renamed(text) and "%R0" in renamed(text) and renamed(text) != text
    (tmp_path / "b.ptx").write_text(renamed(text))
    code = {}
    for name in "ab":
        run("-cubin", f"{name}.ptx", "-o", f"{name}.cubin")
        code[name] = sass.functions(sass.listing(sass.find_cuobjdump(), tmp_path / f"{name}.cubin"))
    assert len(code["a"]) == 1 and code["a"] == code["b"]
