"""What tools/gpu_check.sh runs under the sanitizers: its cases on the CPU, and its stages with stand-ins."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
sys.path.insert(0, str(ROOT / "tests" / "sanitize"))

import sanitize_cases

TOOLS = ("memcheck", "racecheck", "initcheck", "synccheck")
DIMS = {(32, 32), (64, 64), (96, 96), (128, 128), (192, 192), (192, 128), (256, 256)}


# ---- cases -----------------------------------------------------------------------------------------------------------


def dims_of(cases, family):
    return {(c.head_dim, c.value_dim) for forced, c in cases if forced == family}


def test_every_family_has_every_head_dim():
    """Those of the wgmma family are above 32; the backward follows the forward's."""
    assert dims_of(sanitize_cases.FAMILY_CASES, "mma_sync") == DIMS
    assert dims_of(sanitize_cases.FAMILY_CASES, "wgmma") == DIMS
    assert all(sanitize_cases.has_backward(case) for _, case in sanitize_cases.FAMILY_CASES)
    for family in ("wgmma:1", "wgmma:3"):
        assert dims_of(sanitize_cases.FORWARD_CASES, family) == DIMS - {(32, 32)}
    assert {(c.head_dim, c.head_dim_v or c.head_dim) for c in sanitize_cases.SMALL_CASES} == {
        d for d in DIMS if d[0] == 32 or d[0] > 128
    }
    assert dims_of(sanitize_cases.FORWARD_CASES, "split_kv") == DIMS - {(192, 128)}


ONLY = ("mma_sync-b2-q65", "wgmma:3-b3", "num_splits': 4", "num_splits': 128", "combine", "cp ")


@pytest.mark.parametrize("only", ONLY)
@pytest.mark.parametrize("nan_outputs", [False, True])
def test_cases_run(only, nan_outputs, capsys, monkeypatch):
    for module in sanitize_cases.CALLERS:
        monkeypatch.setattr(module, "backends", module.backends)
    monkeypatch.setattr(sanitize_cases.sums, "_StackedResults", sanitize_cases.sums._StackedResults)
    arguments = ["--device", "cpu", "--only", only] + ["--nan-outputs"] * nan_outputs
    assert sanitize_cases.main(arguments) == 0
    lines = capsys.readouterr().out.splitlines()
    assert lines[-1] == "0 wrong results"
    assert len(lines) > 2 and all(line.startswith("ok ") for line in lines[1:-1])


def test_shards_have_every_case_once(capsys, monkeypatch):
    monkeypatch.setattr(sanitize_cases, "checks", lambda device: ((f"case {i}", "", lambda: None) for i in range(8)))
    ran = []
    for i in range(3):
        assert sanitize_cases.main(["--device", "cpu", "--shard", f"{i}/3"]) == 0
        ran += [line.split("  ")[-1] for line in capsys.readouterr().out.splitlines()[1:-1]]
    assert sorted(ran) == [f"case {i}" for i in range(8)]


# ---- stages ----------------------------------------------------------------------------------------------------------

# Stands in for Python: its pip and its package do nothing, its scripts fail where FAIL names the tool that runs them.
PYTHON = """\
#!/usr/bin/env bash
case "$*" in
*__build__*) echo "{'backends': ['cuda']}" ;;
*sanitize_cases*) echo "cases: $*"; [ "${TOOL:-}" != "${FAIL:-none}" ] || exit 3 ;;
esac
"""
SANITIZER = """\
#!/usr/bin/env bash
echo "options: $*"
[ "$2" != "${SLOW:-none}" ] || sleep 5
while [[ $1 != */python ]]; do [[ $1 != --tool ]] || export TOOL=$2; shift; done
exec "$@"
"""


@pytest.fixture
def gpu_check(tmp_path):
    """Returns a function that runs the sanitizer's stage with stand-ins -> (exit status, {stage: result}, folder)."""
    folder = tmp_path / "bin"
    folder.mkdir()
    for name, text in {"python": PYTHON, "compute-sanitizer": SANITIZER}.items():
        (folder / name).write_text(text)
        (folder / name).chmod(0o755)

    def run(**variables):
        environment = {**os.environ, "PATH": f"{folder}:{os.environ['PATH']}", "PYTHON": str(folder / "python")}
        out = tmp_path / "out"
        command = ["bash", str(ROOT / "tools" / "gpu_check.sh"), str(out), "sanitize"]
        done = subprocess.run(command, env={**environment, **variables}, capture_output=True, text=True)
        lines = (out / "summary.txt").read_text().splitlines()[1:]
        return done.returncode, {line[:18].strip(): line[19:28].strip() for line in lines}, out

    return run


def test_every_tool_is_a_stage(gpu_check):
    status, found, out = gpu_check()
    assert (status, found) == (0, dict.fromkeys(("install", *TOOLS), "passed"))
    options = {tool: (out / f"{tool}.log").read_text() for tool in TOOLS}
    assert all(f"--tool {tool} --error-exitcode 3" in text for tool, text in options.items())
    assert ["--nan-outputs" in options[tool] for tool in TOOLS] == [False, False, True, False]
    assert ["kernel_substring=flash" in options[tool] for tool in TOOLS] == [False, True, False, True]


@pytest.mark.parametrize("tool", TOOLS)
def test_a_tool_that_reports_fails_its_stage(gpu_check, tool):
    status, found, _ = gpu_check(FAIL=tool)
    assert status == 1
    assert found == {**dict.fromkeys(("install", *TOOLS), "passed"), tool: "rc 123"}  # of xargs


def test_a_tool_has_its_own_limit_and_runs_all_shards(gpu_check):
    variables = {"SANITIZE_SHARDS": "3", "SYNCCHECK_LIMIT": "1", "SANITIZE_TOOLS": "memcheck synccheck"}
    status, found, out = gpu_check(SLOW="synccheck", **variables)
    assert (status, found) == (1, {"install": "passed", "memcheck": "passed", "synccheck": "timeout"})
    ran = [line.split("--shard ")[1] for line in (out / "memcheck.log").read_text().splitlines() if "cases: " in line]
    assert sorted(ran) == ["0/3", "1/3", "2/3"]
