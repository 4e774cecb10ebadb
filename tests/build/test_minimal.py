"""The minimal kernel (examples/minimal): its source run on an emulated GPU, its build, its table."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
MINIMAL = ROOT / "examples" / "minimal"
sys.path[:] = [str(ROOT / "tools"), *sys.path, str(MINIMAL)]

import table
from toolchain import find_toolkit

RESULT = {
    "device": "GPU",
    "batch": 4,
    "seqlen": 4096,
    "heads": 32,
    "head_dim": 64,
    "variants": [
        {"name": "minimal", "full": 150.0, "causal": 140.0, "error_in_bounds": 0.5},
        {"name": "full", "full": 300.0, "causal": 280.0},
    ],
}


@pytest.fixture(scope="module")
def emulated(tmp_path_factory):
    """{configuration: (largest error in units of its bound, bank conflicts)} of the kernel run on the CPU."""
    if shutil.which("g++") is None:
        pytest.skip("g++ is not installed")
    program = tmp_path_factory.mktemp("minimal") / "minimal_attention"
    flags = ["-std=c++17", "-O2", "-Wall", "-Wextra", "-Werror", "-Wno-unknown-pragmas"]
    source = ROOT / "tests" / "cpp" / "minimal_attention.cpp"
    built = subprocess.run(["g++", *flags, str(source), "-o", str(program)], capture_output=True, text=True)
    assert built.returncode == 0, built.stderr[-4000:]
    ran = subprocess.run([str(program)], capture_output=True, text=True)
    assert ran.returncode == 0, ran.stderr
    lines = [line.split() for line in ran.stdout.splitlines()]
    return {name: (float(error), int(conflicts)) for name, error, conflicts in lines}


def test_every_configuration_is_exact_up_to_rounding(emulated):
    assert set(table.VARIANTS) - {"full"} <= set(emulated)
    for name, (error, _) in emulated.items():
        assert 0 < error <= 1, (name, error)


def test_padding_removes_every_bank_conflict(emulated):
    assert all(conflicts == 0 for name, (_, conflicts) in emulated.items() if name != "unpadded")
    assert emulated["unpadded"][1] > 0


def test_it_builds(tmp_path):
    toolkit = find_toolkit(sys.path)
    if toolkit is None:
        pytest.skip("nvcc is not installed")
    environment = {**os.environ, "ARCH": "sm_90", "BUILD_ONLY": "1", "CUDA_HOME": str(toolkit.nvcc.parent.parent)}
    command = ["bash", str(MINIMAL / "run.sh"), str(tmp_path)]
    result = subprocess.run(command, env=environment, capture_output=True, text=True)
    assert result.returncode == 0, result.stderr[-4000:]
    assert "warning" not in result.stderr
    assert (tmp_path / "minimal").is_file()


@pytest.mark.devices("cuda")
def test_it_is_exact_on_the_gpu(device, tmp_path):
    if find_toolkit(sys.path) is None:
        pytest.skip("nvcc is not installed")
    environment = {**os.environ, "PYTHON": sys.executable}
    command = ["bash", str(MINIMAL / "run.sh"), str(tmp_path)]
    result = subprocess.run(command, env=environment, capture_output=True, text=True)
    assert result.returncode == 0, result.stdout + result.stderr
    measured = json.loads((tmp_path / "minimal.json").read_text())
    assert {entry["name"] for entry in measured["variants"]} >= set(table.VARIANTS) - {"full"}


def test_table_states_shares_of_the_full_kernel():
    text = table.table(RESULT)
    assert "| 150 | 140 | 50% |" in text and "| 300 | 280 | 100% |" in text
    without = table.table({**RESULT, "variants": RESULT["variants"][:1]})
    assert "| 150 | 140 | – |" in without


def test_readme_takes_the_table_and_keeps_the_rest():
    text = (MINIMAL / "README.md").read_text(encoding="utf-8")
    once = table.written(text, "first")
    assert once != text and table.written(once, "second") == table.written(text, "second")
    assert once.split(table.MARKERS[0])[0] == text.split(table.MARKERS[0])[0]
    assert once.split(table.MARKERS[1])[1] == text.split(table.MARKERS[1])[1]
