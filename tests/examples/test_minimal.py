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

import counters
import table
import worked_example
from toolchain import find_cutlass, find_toolkit

# [(commands, what they print; … is any text)]
BLOCKS = re.compile(r"^```sh\n((?:(?!```).*\n)*)```\n\n```text\n((?:(?!```).*\n)*)```", re.MULTILINE)
PAGES = (MINIMAL / "learn.md", ROOT / "benchmarks" / "lab" / "README.md")
LEARN = [pair for page in PAGES for pair in BLOCKS.findall(page.read_text(encoding="utf-8"))]


def block_of(name):
    text = (MINIMAL / "README.md").read_text(encoding="utf-8")
    return text.split(f"<!-- {name}:begin -->\n")[1].split(f"\n<!-- {name}:end -->")[0]


@pytest.fixture(scope="module")
def program(tmp_path_factory):
    if shutil.which("g++") is None:
        pytest.skip("g++ is not installed")
    program = tmp_path_factory.mktemp("minimal") / "minimal_attention"
    flags = ["-std=c++17", "-O2", "-Wall", "-Wextra", "-Werror", "-Wno-unknown-pragmas"]
    source = ROOT / "tests" / "cpp" / "minimal_attention.cpp"
    built = subprocess.run(["g++", *flags, str(source), "-o", str(program)], capture_output=True, text=True)
    assert built.returncode == 0, built.stderr[-4000:]
    return program


def test_kernels_are_exact_up_to_rounding_on_an_emulated_gpu(program):
    """And have the bank conflicts and the votes that they should: the program checks it."""
    ran = subprocess.run([str(program)], capture_output=True, text=True)
    assert ran.returncode == 0, ran.stdout + ran.stderr
    assert {line.split()[0] for line in ran.stdout.splitlines()} >= {*table.RUNGS, *table.SIDE_STEPS}


def test_the_table_of_shared_memory_is_what_the_kernels_have(program):
    ran = subprocess.run([str(program), "--budget"], capture_output=True, text=True, check=True)
    assert block_of("budget") == ran.stdout.strip(), "run.sh and table.py --write --budget FILE write it anew"
    names = re.findall(r"^\| `(\w+)`", ran.stdout, re.MULTILINE)
    assert names == [*table.RUNGS, *table.SIDE_STEPS]


def test_the_worked_example():
    assert block_of("worked_example") == worked_example.block()


@pytest.mark.parametrize("number", range(len(LEARN)))
def test_commands_of_the_path(number, tmp_path):
    (commands, printed), toolkit = LEARN[number], find_toolkit(sys.path)
    if shutil.which("g++") is None or ("CUDA_HOME" in commands and toolkit is None):
        pytest.skip("g++ or nvcc is not installed")
    for name in ("benchmarks", "csrc", "docs", "examples", "tests"):
        (tmp_path / name).symlink_to(ROOT / name)
    environment = {**os.environ, "PATH": os.pathsep.join([str(Path(sys.executable).parent), os.environ["PATH"]])}
    if "CUDA_HOME" in commands:
        cutlass = find_cutlass(ROOT, sys.path, ROOT / "build" / "cutlass")
        environment |= {"CUDA_HOME": str(toolkit.include.parent), "CUTLASS_PATH": str(cutlass.include.parent)}
    command = ["bash", "-ec", commands]
    result = subprocess.run(command, env=environment, cwd=tmp_path, capture_output=True, text=True)
    assert result.returncode == 0, result.stderr[-4000:]
    for line in printed.splitlines():
        assert re.search(re.escape(line).replace("…", ".*"), result.stdout), (line, result.stdout)


NCU = """#!/bin/bash
[ "$1" = --query-metrics ] && echo "smsp__issue_active  counter" && exit
while [ "$1" != --log-file ]; do shift; done
cat > "$2" <<END
==PROF== Connected
"ID","smsp__issue_active.avg.pct_of_peak_sustained_active","smsp__average_warps_issue_stalled_wait_per_issue_active.ratio"
"","%","inst"
"0","61.5","1.25"
END
"$3" --once
"""


def test_counters_are_a_table(tmp_path, monkeypatch):
    for name, text in {"ncu": NCU, "program": "#!/bin/bash\necho padding\n"}.items():
        (tmp_path / name).write_text(text)
        (tmp_path / name).chmod(0o755)
    monkeypatch.setenv("PATH", str(tmp_path), prepend=os.pathsep)
    lines = counters.table(counters.profile(tmp_path / "program")).splitlines()
    assert lines[-1] == "| `padding` | – | 62 | – | – | – | – | – | wait 1.2 |"


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
