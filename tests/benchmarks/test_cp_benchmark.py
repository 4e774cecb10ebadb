"""The benchmark of context parallelism: a dry run on gloo."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch.distributed as dist

import flash_attn
from flash_attn.context_parallel.plan.steps import METHODS

ROOT = Path(__file__).resolve().parents[2]
sys.path.append(str(ROOT / "benchmarks"))

import cp_tables


def test_dry_run(tmp_path):
    if not (dist.is_available() and dist.is_gloo_available()):
        pytest.skip("torch.distributed has no gloo")
    out = tmp_path / "result.json"
    paths = os.pathsep.join([str(Path(flash_attn.__file__).parents[1]), os.environ.get("PYTHONPATH", "")])
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": paths, "GLOO_SOCKET_IFNAME": "lo"}
    command = [
        sys.executable, str(ROOT / "benchmarks" / "context_parallel.py"), "--device", "cpu", "--ranks", "2", "--toy",
        "--sizes", "96", "--rounds", "2", "--out", str(out),
    ]  # fmt: skip
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stderr
    result = json.loads(out.read_text())
    assert result["ranks"] == 2 and result["bandwidth"]["messages"] > 0 and result["left_out"] == []
    measured = {(row["problem"], row["tokens"], row["name"]): row for row in result["rows"] if "forward" in row}
    problems = [("causal", 96), ("window", 96), ("packed", 192)]
    own = {key for key in measured if key[2] in METHODS}  # others: peers that can be imported
    assert own == {(*problem, name) for problem in problems for name in METHODS}
    for row in measured.values():
        assert row["error"] < 1e-5  # of the results, against one rank
        for mode in ("forward", "both"):
            assert row[mode]["rounds"] == 2 and row[mode]["per_gpu"] > 0
    refused = {row["name"] for row in result["rows"] if "forward" not in row}
    assert "torch_context_parallel" in refused
    assert any(line.startswith("| packed | 192 | ") for line in cp_tables.measured_lines(result))
    assert "| causal | 96 | " in done.stdout
