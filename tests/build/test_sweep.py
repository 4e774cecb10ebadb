"""The sweep of tile configurations (benchmarks/sweep.py): its data, its report, and a build without a GPU."""

from __future__ import annotations

import ctypes
import dataclasses
import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
sys.path[:] = [str(ROOT / "tools"), *sys.path, str(ROOT / "benchmarks")]

from errors import BuildError
from sweep_configs import ALTERNATIVES, Alternative
from sweep_report import effects, scored, section, table_line, written
from toolchain import find_cutlass, find_toolkit

IN_USE, BETTER, WORSE = Alternative(128, 64, 4, 2), Alternative(64, 64, 4, 2), Alternative(64, 32, 4, 3)


@pytest.fixture
def result():
    def entry(tile, factor):
        times = {"full 512": 1.0 * factor, "causal 512": 0.5 * factor}
        return {"tile": dataclasses.asdict(tile), "registers": 128, "spills": 0, "ms": times}

    return {
        "head_dim": 64,
        "device": "GPU",
        "commit": "0123",
        "seqlens": [512],
        "table_tile": dataclasses.asdict(IN_USE),
        "flops": {"full 512": 2e11, "causal 512": 1e11},
        "alternatives": [entry(WORSE, 2.0), entry(IN_USE, 1.0), entry(BETTER, 0.8)],
    }


@pytest.mark.parametrize("head_dim", ALTERNATIVES)
def test_alternatives_can_run(head_dim):
    tiles = ALTERNATIVES[head_dim]
    assert {tile: tile.problems(head_dim) for tile in tiles if tile.problems(head_dim)} == {}
    assert len(set(tiles)) == len(tiles) >= 5


def test_impossible_tiles_are_refused():
    assert Alternative(96, 64, 4, 2).problems(64) != []
    assert Alternative(128, 256, 4, 2).problems(128) != []
    assert Alternative(128, 64, 8, 5).problems(32) != []


def test_scores_are_relative_to_the_tile_in_use(result):
    rows = [(tile, pytest.approx(score)) for tile, _, score, _ in scored(result)]
    assert rows == [(BETTER, 1.25), (IN_USE, 1.0), (WORSE, 0.5)]
    assert effects(result) == ["block_m 64 → 128: -20.0%"]
    assert table_line(result) == "{64, 64, 64, 4, 2, 1},"


def test_section_states_figures(result):
    text = section(result)
    assert "| **64 × 64, 4, 2** | 128, 0 | 1.250 | 1.250 | 250 | 250 |" in text
    assert "| 128 × 64, 4, 2 (in use) | 128, 0 | 1.000 | 1.000 | 200 | 200 |" in text


def test_tuning_log_keeps_everything_else(result):
    log = "# Tuning log\n\ntext\n"
    once = written(log, result)
    assert once.startswith(log) and once.count("## Sweeps") == 1
    other = {**result, "head_dim": 128}
    both = written(once, other)
    assert both.startswith(once.rstrip()) and both.count("## Sweeps") == 1
    again = written(both, {**result, "device": "another"})
    assert again.count("sweep:d64 begin") == 1 and "another" in again and section(other) in again


def test_one_alternative_compiles_and_links(tmp_path):
    if find_toolkit(sys.path) is None or shutil.which("g++") is None:
        pytest.skip("nvcc or g++ is not installed")
    try:
        find_cutlass(ROOT, sys.path, ROOT / "build" / "cutlass")
    except BuildError:
        if "FLASH_ATTN_KERNEL_ARCHIVE" not in os.environ:
            raise
        pytest.skip("no CUTLASS headers, which an install from a kernel archive does not need")
    tile = Alternative(64, 64, 4, 4)
    program = (
        "import sys; sys.path.insert(0, sys.argv[1]); from pathlib import Path\n"
        "import sweep_build, sweep_configs\n"
        f"tile = sweep_configs.{tile!r}\n"
        "assert sweep_build.table_tile(32).problems(32) == []\n"
        "compiled = sweep_build.compile_all([(32, tile)], '90', Path(sys.argv[2]), print)\n"
        "sweep_build.Kernel(compiled[32, tile])\n"
    )
    command = [sys.executable, "-c", program, str(ROOT / "benchmarks"), str(tmp_path)]
    done = subprocess.run(command, capture_output=True, text=True)
    assert done.returncode == 0, (done.stdout + done.stderr)[-4000:]
    fields = (ctypes.c_int * 5)()
    ctypes.CDLL(str(tmp_path / f"fwd_d32_{tile.name}.so")).sweep_tile(fields)
    assert list(fields) == [64, 64, 4, 4, tile.smem_bytes(32)]
