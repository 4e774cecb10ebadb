"""The benchmark of context parallelism: a dry run on gloo, its model, the table of the documents."""

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

import cp_model

MACHINE, SHAPE = cp_model.Machine(), cp_model.Shape()


def test_dry_run(tmp_path):
    if not (dist.is_available() and dist.is_gloo_available()):
        pytest.skip("torch.distributed has no gloo")
    out, picture = tmp_path / "result.json", tmp_path / "plot.png"
    paths = os.pathsep.join([str(Path(flash_attn.__file__).parents[1]), os.environ.get("PYTHONPATH", "")])
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": paths, "GLOO_SOCKET_IFNAME": "lo"}
    command = [
        sys.executable, str(ROOT / "benchmarks" / "context_parallel.py"), "--device", "cpu", "--ranks", "2", "--toy",
        "--sizes", "96", "--rounds", "2", "--out", str(out),
    ]  # fmt: skip
    try:
        import matplotlib  # noqa: F401

        command += ["--plot", str(picture)]
    except ImportError:
        pass
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stderr
    result = json.loads(out.read_text())
    assert result["ranks"] == 2 and result["bandwidth"]["messages"] > 0 and result["left_out"] == []
    measured = {(row["problem"], row["tokens"], row["name"]): row for row in result["rows"] if "forward" in row}
    problems = [("causal", 96), ("window", 96), ("packed", 192)]
    assert set(measured) == {(*problem, name) for problem in problems for name in cp_model.METHODS}
    for row in measured.values():
        assert row["error"] < 1e-5  # of the results, against one rank
        for mode in ("forward", "both"):
            assert row[mode]["per_gpu"] > 0 and 0 < row[mode]["predicted"] <= 1.01
    refused = {row["name"] for row in result["rows"] if "forward" not in row}
    assert "torch_context_parallel" in refused
    assert picture.is_file() or "--plot" not in command
    assert f"| causal | 96 | ring | {100 * measured['causal', 96, 'ring']['forward']['per_gpu']:.1f}% |" in done.stdout


@pytest.mark.parametrize("method", list(cp_model.METHODS))
@pytest.mark.parametrize("with_backward", [False, True])
def test_model(method, with_backward):
    """Long sequences hide everything, short ones do not; a faster link never hurts; one rank is one GPU."""

    def efficiency(tokens, ranks, machine=MACHINE):
        pairs, received = cp_model.causal_zigzag(tokens, ranks)
        return cp_model.efficiency(method, machine, SHAPE, pairs, tokens, ranks, received, with_backward)

    assert efficiency(1 << 14, 1) == 1.0
    values = [efficiency(1 << n, 8) for n in range(13, 24)]
    assert values == sorted(values) and values[0] < 0.7 and 0.98 < values[-1] <= 1.0
    assert efficiency(1 << 15, 8, cp_model.Machine(link=450e9)) >= efficiency(1 << 15, 8)
    assert efficiency(1 << 13, 8, cp_model.Machine(link=30e9)) < efficiency(1 << 13, 8)


def test_model_of_one_gpu():
    """The peak less the tiles' time: 128k causal in 179 ms of 790 TFLOPS."""
    pairs, _ = cp_model.causal_zigzag(1 << 17, 2)
    assert cp_model.one_gpu_seconds(MACHINE, SHAPE, pairs, 1 << 17, False) == pytest.approx(0.17876, rel=1e-3)


def test_document_has_the_predictions():
    text = (ROOT / "docs" / "context_parallel.md").read_text(encoding="utf-8")
    table = text.split("<!-- cp-predicted:begin -->\n")[1].split("\n<!-- cp-predicted:end -->")[0]
    sizes = [1 << n for n in (14, 15, 16, 17, 18, 20)]
    assert table == cp_model.predicted_table(MACHINE, SHAPE, sizes, (2, 8))
