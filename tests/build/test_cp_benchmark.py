"""The benchmark of context parallelism: a dry run on gloo, its tables."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch.distributed as dist

import flash_attn

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
    own = {key for key in measured if key[2] in cp_tables.METHODS}  # others: peers that can be imported
    assert own == {(*problem, name) for problem in problems for name in ("all_gather", "ring", "ulysses")}
    for row in measured.values():
        assert row["error"] < 1e-5  # of the results, against one rank
        for mode in ("forward", "both"):
            assert row[mode]["rounds"] == 2 and row[mode]["per_gpu"] > 0
    refused = {row["name"] for row in result["rows"] if "forward" not in row}
    assert "torch_context_parallel" in refused
    assert any(line.startswith("| packed | 192 | ") for line in cp_tables.measured_lines(result))
    assert "| causal | 96 | " in done.stdout


def measured():
    """A result of four GPUs: a peer fails at times, is the fastest at times, and another runs nowhere."""

    def row(problem, tokens, name, forward, both):
        modes = {"forward": forward, "both": both}
        speeds = {mode: {"per_gpu": x, "tflops_per_gpu": 500 * x, "rounds": 5} for mode, x in modes.items()}
        return {"problem": problem, "tokens": tokens, "name": name, "error": None, **speeds}

    absent = [{"problem": "causal", "tokens": 8192, "name": "absent", "error": f"{x}Error: no"} for x in ("Type", "OS")]
    rows = [
        row("packed", 1000, "ring", 0.5, 0.6), row("causal", 16384, "all_gather", 0.8, 0.904),
        row("causal", 16384, "peer", 0.7, 0.901), row("causal", 8192, "peer", 0.45, 0.5),
        row("causal", 8192, "all_gather", 0.4, 0.6), row("causal", 8192, "ring", 0.3, 0.2),
        {"problem": "packed", "tokens": 1000, "name": "peer", "error": "NotImplementedError: causal alone"}, *absent,
    ]  # fmt: skip
    device, bandwidth = {"name": "NVIDIA X", "driver": "1.2"}, {"bytes": 1 << 20, "messages": 20.4}
    origin = {"ranks": 4, "device": device, "commit": "0123456789abcdef", "dirty": True, "torch": "2.0"}
    return {**origin, "bandwidth": bandwidth, "rows": rows, "left_out": [["window", 8192]]}


def test_the_table_shows_where_a_peer_is_faster():
    lines = cp_tables.measured_lines(measured())
    assert [line for line in lines if line.startswith("| ")] == [
        "| problem | tokens | one GPU, TFLOPS | `all_gather` | `ring` | `peer` |",
        "| causal | 8k | 500 / 500 | 40 / **60** | 30 / 20 | **45** / 50 |",
        "| causal | 16k | 500 / 500 | **80** / **90** | – | 70 / **90** |",
        "| packed | 1000 | 500 / 500 | – | **50** / **60** | – |",
    ]
    text = " ".join(lines)
    assert "4 × NVIDIA X, driver 1.2, torch 2.0, commit 0123456789ab+changes." in text
    assert "1 MiB at a time: 20 GB/s by messages of the group." in text
    assert "Ran nowhere: `absent` (TypeError: no; OSError: no)." in text and "for time: window 8k." in text
