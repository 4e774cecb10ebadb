"""What tools/gpu_check.sh runs under the sanitizers: its cases on the CPU."""

import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
sys.path.insert(0, str(ROOT / "tests" / "sanitize"))

import sanitize_cases

DIMS = {(32, 32), (64, 64), (96, 96), (128, 128), (192, 192), (192, 128), (256, 256)}


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


@pytest.mark.parametrize("only, nan_outputs", [*((only, True) for only in ONLY), (ONLY[0], False)])
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
