"""The minimal kernels (examples/minimal) on an emulated GPU, their build, their tables; commands of learners' pages."""

from __future__ import annotations

import json
import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
MINIMAL = ROOT / "examples" / "minimal"
sys.path[:] = [str(ROOT / "tools"), *sys.path, str(MINIMAL)]

import fresh_process
import table
import worked_example
from toolchain import find_cutlass, find_toolkit

# [(commands, what they print; … is any text)]
BLOCKS = re.compile(r"^```sh\n((?:(?!```).*\n)*)```\n\n```text\n((?:(?!```).*\n)*)```", re.MULTILINE)
PAGES = (MINIMAL / "learn.md", ROOT / "benchmarks" / "lab" / "README.md")
LEARN = [pair for page in PAGES for pair in BLOCKS.findall(page.read_text(encoding="utf-8"))]
# A rung alone, or the table of all: `report` has what it prints.
OF_PROGRAM = re.compile(r"^mkdir -p build\n(g\+\+ \S+ -O\d (-DRUNG=\d )?tests/cpp/minimal_attention\.cpp .*\n)+$")
PYTHON = re.compile(r"^python (?:-c \"(.*)\"|- <<'END'\n(.*)\nEND)\n$", re.DOTALL)


def block_of(name):
    text = (MINIMAL / "README.md").read_text(encoding="utf-8")
    return text.split(f"<!-- {name}:begin -->\n")[1].split(f"\n<!-- {name}:end -->")[0]


@pytest.fixture(scope="module")
def report(tmp_path_factory):
    """What the kernels print, and their table of shared memory."""
    if shutil.which("g++") is None:
        pytest.skip("g++ is not installed")
    program = tmp_path_factory.mktemp("minimal") / "minimal_attention"
    flags = ["-std=c++17", "-O2", "-Wall", "-Wextra", "-Werror", "-Wno-unknown-pragmas"]
    source = ROOT / "tests" / "cpp" / "minimal_attention.cpp"
    built = subprocess.run(["g++", *flags, str(source), "-o", str(program)], capture_output=True, text=True)
    assert built.returncode == 0, built.stderr[-4000:]
    ran, budget = (subprocess.run([program, *more], capture_output=True, text=True) for more in ([], ["--budget"]))
    assert ran.returncode == budget.returncode == 0, ran.stdout + ran.stderr
    return ran.stdout, budget.stdout


def test_kernels_are_exact_up_to_rounding_on_an_emulated_gpu(report):
    """And have the bank conflicts and the votes that they should: the program checks it."""
    assert {line.split()[0] for line in report[0].splitlines()} >= {*table.RUNGS, *table.SIDE_STEPS}


def test_the_table_of_shared_memory_is_what_the_kernels_have(report):
    assert block_of("budget") == report[1].strip(), "run.sh and table.py --write --budget FILE write it anew"
    names = re.findall(r"^\| `(\w+)`", report[1], re.MULTILINE)
    assert names == [*table.RUNGS, *table.SIDE_STEPS]


def test_the_worked_example():
    assert block_of("worked_example") == worked_example.block()


def marks(commands):
    return [pytest.mark.compiles] if "CUDA_HOME" in commands else []  # 18 seconds


@pytest.mark.parametrize("number", [pytest.param(i, marks=marks(pair[0])) for i, pair in enumerate(LEARN)])
def test_commands_of_the_path(number, tmp_path, request):
    (commands, printed), toolkit = LEARN[number], find_toolkit(sys.path)
    if shutil.which("g++") is None or ("CUDA_HOME" in commands and toolkit is None):
        pytest.skip("g++ or nvcc is not installed")
    for name in ("benchmarks", "csrc", "docs", "examples", "tests"):
        (tmp_path / name).symlink_to(ROOT / name)
    environment = {**os.environ, "PATH": os.pathsep.join([str(Path(sys.executable).parent), os.environ["PATH"]])}
    if "CUDA_HOME" in commands:
        cutlass = find_cutlass(ROOT, sys.path, ROOT / "build" / "cutlass")
        environment |= {"CUDA_HOME": str(toolkit.include.parent), "CUTLASS_PATH": str(cutlass.include.parent)}
    if OF_PROGRAM.match(commands):
        text = "".join(request.getfixturevalue("report"))
    else:
        command, python = ["bash", "-ec", commands], PYTHON.match(commands)
        options = {"env": environment, "cwd": tmp_path}
        result = (
            fresh_process.run(python[1] or python[2], **options)
            if python
            else subprocess.run(command, **options, capture_output=True, text=True)
        )
        assert result.returncode == 0, result.stderr[-4000:]
        text = result.stdout
    for line in printed.splitlines():
        assert re.search(re.escape(line).replace("…", ".*"), text), (line, text)


@pytest.mark.compiles  # 40 seconds
@pytest.mark.parametrize("arch, knobs", [("sm_90", ""), ("sm_80", "-DRUNG=5 -DHEAD_DIM=128 -DBLOCK_N=32")])
def test_it_builds(tmp_path, arch, knobs):
    toolkit = find_toolkit(sys.path)
    if toolkit is None:
        pytest.skip("nvcc is not installed")
    environment = {**os.environ, "ARCH": arch, "BUILD_ONLY": "1", "KNOBS": f"-Xptxas -v {knobs}"}
    environment["CUDA_HOME"] = str(toolkit.nvcc.parent.parent)
    command = ["bash", str(MINIMAL / "run.sh"), str(tmp_path)]
    result = subprocess.run(command, env=environment, capture_output=True, text=True)
    assert result.returncode == 0, result.stderr[-4000:]
    assert "warning" not in result.stderr
    spilled = [int(count) for count in re.findall(r"(\d+) bytes spill stores", result.stdout + result.stderr)]
    budget = (tmp_path / "budget.md").read_text()
    assert len(spilled) == len(re.findall(r"^\| `", budget, re.MULTILINE)) > 0
    assert max(spilled) <= 8  # the address of a vector of a swizzled row, outside of the loops


@pytest.mark.devices("cuda")
def test_it_is_exact_on_the_gpu(device, tmp_path):
    if find_toolkit(sys.path) is None:
        pytest.skip("nvcc is not installed")
    environment = {**os.environ, "PYTHON": sys.executable}
    command = ["bash", str(MINIMAL / "run.sh"), str(tmp_path)]
    result = subprocess.run(command, env=environment, capture_output=True, text=True)
    assert result.returncode == 0, result.stdout + result.stderr
    measured = json.loads((tmp_path / "minimal.json").read_text())
    ladder = [*table.RUNGS, *table.SIDE_STEPS, "mma_sync"]
    assert [entry["name"] for entry in measured["variants"]][: len(ladder)] == ladder
