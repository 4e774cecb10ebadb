"""The benchmark of context parallelism: a dry run on gloo, its model, the table of the documents."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch
import torch.distributed as dist

import flash_attn

ROOT = Path(__file__).resolve().parents[2]
sys.path.append(str(ROOT / "benchmarks"))

import context_parallel
import cp_model
import cp_page
import cp_timeline
import cp_virtual
import cp_virtual_page
from scores import load_stored

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
    own = {key for key in measured if key[2] in cp_model.METHODS}  # others: peers that can be imported
    assert own == {(*problem, name) for problem in problems for name in cp_model.METHODS}
    for row in measured.values():
        assert row["error"] < 1e-5  # of the results, against one rank
        for mode in ("forward", "both"):
            assert row[mode]["rounds"] == 2 and row[mode]["per_gpu"] > 0 and 0 < row[mode]["predicted"] <= 1.01
    refused = {row["name"] for row in result["rows"] if "forward" not in row}
    assert "torch_context_parallel" in refused
    assert picture.is_file() or "--plot" not in command
    assert any(line.startswith("| packed | 192 | ") for line in cp_page.block(result))
    assert any("calls that follow each other" in line for line in cp_page.block(result))
    assert f"| causal | 96 | ring | {100 * measured['causal', 96, 'ring']['forward']['per_gpu']:.1f}% |" in done.stdout


def traced(*kernels):
    """A trace of torch.profiler: (name, stream, begin, duration, when it was launched)."""
    events = [{"ph": "X", "cat": "cpu_op", "name": "other", "ts": 0, "dur": 1000}]
    for i, (name, stream, begin, duration, launched) in enumerate(kernels):
        kind = "gpu_memcpy" if name.startswith("Memcpy") else "kernel"
        given = {"correlation": i, "stream": stream, "grid": [132, 1, 1]}
        events.append({"ph": "X", "cat": kind, "name": name, "ts": begin, "dur": duration, "args": given})
        call = {"cat": "cuda_runtime", "name": "cudaLaunchKernel", "args": {"correlation": i}}
        events.append({"ph": "X", "ts": launched - 1, "dur": 1, **call})
    return {"baseTimeNanoseconds": 5_000_000, "traceEvents": events}


def test_a_timeline_says_what_attention_waits_for():
    """A copy ahead, a message beside the first kernel and alone, a second kernel that the host launched late."""
    events = cp_timeline.events_of(traced(
        ("multi_tensor_apply", 7, 100, 50, 10), ("void flash::flash_fwd_kernel<>", 7, 152, 1000, 20),
        ("ncclDevKernel_SendRecv", 21, 600, 1200, 30), ("void flash::flash_fwd_kernel<>", 7, 1810, 4000, 40),
        ("void flash::flash_fwd_kernel<>", 7, 5900, 100, 5896), ("Memcpy PtoP", 22, 5900, 50, 40),
    ))  # fmt: skip
    kinds = ["elementwise", "attention", "message", "attention", "attention", "copy"]
    assert sorted(event["kind"] for event in events) == sorted(kinds)
    assert [event["begin"] for event in events] == [5100, 5152, 5600, 6810, 10900, 10900]
    found = cp_timeline.summary(events, 1)
    assert found["call"] == 5.9 and found["attention"] == 5.1 and found["transfers"] == 1.25
    assert found["attention_beside_transfers"] == 0.602 and found["transfers_alone"] == 0.648
    assert (found["idle_for_launch"], found["idle_for_event"], found["idle_for_host"]) == (0.002, 0.658, 0.09)
    assert found["message_grids"] == ["[132, 1, 1]"] and cp_timeline.summary(events[:1], 1) == {}
    assert cp_timeline.compact(events, 5100.0)[0][:5] == ["elementwise", 7, 0.0, 50, 90]


def test_turns_of_variants_run(tmp_path):
    if not (dist.is_available() and dist.is_gloo_available()):
        pytest.skip("torch.distributed has no gloo")
    out = tmp_path / "result.json"
    paths = os.pathsep.join([str(Path(flash_attn.__file__).parents[1]), os.environ.get("PYTHONPATH", "")])
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": paths, "GLOO_SOCKET_IFNAME": "lo"}
    command = [sys.executable, str(ROOT / "benchmarks" / "cp_timeline.py"), "--device", "cpu", "--ranks", "2", "--toy"]
    command += ["--rounds", "2", "--variants", "messages", "margin_16", "--out", str(out)]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stderr
    (row,) = json.loads(out.read_text())["rows"]
    assert list(row["both"]) == ["one_gpu", "messages", "margin_16"] and max(row["errors"].values()) < 1e-5
    assert all(x["fastest"] <= x["seconds"] <= x["slowest"] for x in row["forward"].values())
    shown = subprocess.run([*command[:2], "--show", str(out)], env=environment, capture_output=True, text=True)
    assert "| margin_16 | " in done.stdout and done.stdout.strip() in shown.stdout


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
    lines = cp_page.block(measured())
    assert [line for line in lines if line.startswith("| ")] == [
        "| problem | tokens | one GPU, TFLOPS | `all_gather` | `ring` | `peer` |",
        "| causal | 8k | 500 / 500 | 40 / **60** | 30 / 20 | **45** / 50 |",
        "| causal | 16k | 500 / 500 | **80** / **90** | – | 70 / **90** |",
        "| packed | 1000 | 500 / 500 | – | **50** / **60** | – |",
    ]
    text = " ".join(lines)
    where = "faster than the best of our methods in"
    assert f"Forward: a peer is {where} 1 of 2 rows with peers: causal 8k (`peer` 45.0, `all_gather` 40.0)." in text
    assert f"Forward and backward: a peer is {where} 0 of 2 rows with peers." in text
    assert "12 times of methods and peers in 3 problems, each the median of 5 rounds; the slowest rank's." in text
    assert "4 × NVIDIA X, driver 1.2, torch 2.0, commit 0123456789ab+changes." in text
    assert "1 MiB at a time: 20 GB/s by messages of the group." in text
    assert "Ran nowhere: `absent` (TypeError: no; OSError: no)." in text and "for time: window 8k." in text


def test_document_has_what_was_measured():
    text = (ROOT / cp_page.PAGE).read_text(encoding="utf-8")
    assert cp_page.WINDOW == context_parallel.WINDOW and set(context_parallel.METHODS) == set(cp_page.METHODS)
    assert cp_page.NOTHING in cp_page.page(text, None)
    assert cp_virtual_page.NOTHING in cp_virtual_page.page(text, None)
    if not (ROOT / "benchmarks" / "results").is_dir():
        pytest.skip("a source distribution has no results")
    for page in (cp_page, cp_virtual_page):
        assert page.page(text, load_stored(ROOT / page.RESULT)) == text, "python benchmarks/report.py --docs"


def test_dry_run_of_the_virtual_ring(tmp_path):
    out = tmp_path / "result.json"
    cp_virtual.main(["--device", "cpu", "--quick", "--rounds", "2", "--out", str(out)])
    rows = json.loads(out.read_text())["rows"]
    expected = [(1, None), *((ranks, method) for ranks in cp_virtual.RANKS for method in cp_model.METHODS)]
    for tokens in cp_virtual.QUICK_TOKENS:
        assert [(row["ranks"], row["method"]) for row in rows if row["tokens"] == tokens] == expected
    for row in rows:
        for mode in ("forward", "both"):
            found = row[mode]
            assert found["seconds"] > 0 and found["host_seconds"] > 0 and found["rounds"] == 2
            assert 0 < found["predicted"] and 0 <= found["rank"] < row["ranks"]


def test_a_present_rank_sends_and_receives_nothing():
    rank = cp_virtual.PresentRank(1, 4)
    x = torch.zeros(3, 2)
    first, *others = (rank.buffer(x, (5, 2)) for _ in range(2 * cp_virtual.HELD))
    assert first.shape == (5, 2) and first.std() > 0.1
    assert sum(other is first for other in others) == 1  # of the buffers of two turns
    rank.exchange([(0, x)], [(2, first)]).wait()
    assert rank.all_gather_ints([7, 8]) == [[7, 8]] * 4


def test_the_table_of_the_virtual_ring():
    modes = {"forward": (1e-3, 1.1e-3, 2e-4), "both": (4e-3, 3.8e-3, 5e-4)}
    found = {m: dict(zip(("predicted", "seconds", "host_seconds"), values)) for m, values in modes.items()}
    rows = [{"tokens": 32768, "ranks": ranks, "method": name, **found} for ranks, name in ((1, None), (8, "ring"))]
    device, git = {"name": "X", "type": "cpu", "threads": 1}, {"commit": "0123", "dirty": False}
    origin = {"device": device, "versions": {"torch": "2.0"}, "git": git, "build": {}}
    lines = cp_virtual_page.block({**origin, "rows": rows})
    assert [line for line in lines if line.startswith("| 32k")] == [
        "| 32k | 1 | one call | 1.00 / 1.10 | +10% | 4.00 / 3.80 | -5% | 0.500 |",
        "| 32k | 8 | `ring` | 1.00 / 1.10 | +10% | 4.00 / 3.80 | -5% | 0.500 |",
    ]
