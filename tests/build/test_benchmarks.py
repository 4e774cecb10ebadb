"""The benchmark suite: its rows, its timing, its peers, its reports, and the Triton comparator."""

import contextlib
import dataclasses
import gc
import itertools
import json
import os
import re
import subprocess
import sys
import weakref
from pathlib import Path

import pytest
import torch
from cases import BENCH_CELLS, BENCH_GROUPS, VARLEN_SEQLENS, Case
from reference import assert_accurate, assert_gradient_accurate, attention
from triton_compiled import compile_launch

import flash_attn

ROOT = Path(__file__).resolve().parents[2]
sys.path.append(str(ROOT / "benchmarks"))

import check
import fp8_forward
import fp8_page
import implementations
import measure
import plots
import rows
import shared
import timing
import torch_peers

CPU = torch.device("cpu")
TINY = rows.Row("cells", Case(2, 40, 40, 4, 2, 32, "float32", causal=True))


def run_script(name, *arguments):
    """A program of benchmarks/, in a process of its own as its module names are not unique in this repository."""
    paths = os.pathsep.join([str(Path(flash_attn.__file__).parents[1]), os.environ.get("PYTHONPATH", "")])
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": paths}
    command = [sys.executable, str(ROOT / "benchmarks" / name), *map(str, arguments)]
    return subprocess.run(command, env=environment, capture_output=True, text=True, timeout=300)


@pytest.fixture(scope="module")
def result_path(tmp_path_factory):
    """The result of a short run on CPU tensors."""
    folder = tmp_path_factory.mktemp("bench")
    done = run_script(
        "run.py", "--device", "cpu", "--dtype", "float32", "--quick", "--min-rounds", 2, "--min-ms", 0.1,
        "--budget", 60, "--groups", "cells", "varlen", "small", "small_eager", "--mode", "fwd", "bwd",
        "--peers", "sdpa_flash", "naive", "--out", folder, "--name", "short",
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    return folder / "short.json"


@pytest.fixture(scope="module")
def result(result_path):
    return json.loads(result_path.read_text())


def test_every_group_has_rows_and_every_row_its_own_id():
    found = rows.all_rows()
    assert {row.group for row in found} == set(rows.ALL_GROUPS)
    for group in rows.ALL_GROUPS:
        ids = [row.id for row in found if row.group == group]
        assert len(ids) == len(set(ids))
    assert {row.case.head_dim for row in found if row.group in ("cells", "dims")} == {64, 96, 128, 192, 256}
    assert len(BENCH_CELLS) == 36
    assert min(case.seqlen_q for case in BENCH_GROUPS["small"]) == 1
    assert max(case.seqlen_q for case in BENCH_GROUPS["small"]) == 512
    assert all(case.batch == 1 for case in BENCH_GROUPS["small"])


def test_flops_follow_the_convention():
    square = Case(2, 8, 8, 3, 3, 4, "bfloat16")
    assert rows.Row("cells", square).flops() == 4 * 2 * 3 * 8 * 8 * 4
    causal = Case(2, 8, 8, 3, 3, 4, "bfloat16", causal=True)
    assert rows.Row("cells", causal).flops("bwd") == 2.5 * 4 * 2 * 3 * 8 * 8 * 4 / 2
    window = Case(1, 4, 4, 1, 1, 1, "bfloat16", causal=True, window=(1, -1))
    assert rows.Row("window", window).flops("fwd+bwd") == 3.5 * 4 * (1 + 2 + 2 + 2)
    packed = Case(2, 3, 3, 1, 1, 1, "bfloat16", kind="packed", seqlens=(1, 3))
    assert rows.Row("varlen", packed).flops() == 4 * (1 + 9)
    assert rows.Row("features", dataclasses.replace(square, head_dim_v=8)).flops() == 2 * 2 * 3 * 8 * 8 * (4 + 8)
    assert sum(VARLEN_SEQLENS) == 28788


def test_cpu_rows_are_small_and_use_no_graphs():
    found = rows.select(rows.GROUPS, quick=False, device_type="cpu", dtype="float32")
    assert {row.timing for row in found} == {"event", "eager"}
    assert max(row.flops() for row in found) < 1e10
    assert {row.case.dtype for row in found} == {"float32"}


def test_rounds_stay_within_the_budget():
    budget = timing.Budget(min_rounds=20, min_ms=60.0)
    assert budget.rounds({"a": 1.0, "b": 2.0}) == {"a": 61, "b": 61}
    slow = budget.rounds({"a": 1.0, "slow": 40.0})
    assert slow["a"] == 61 and slow["slow"] == 6
    assert budget.rounds({"a": 1.0, "slow": 4000.0})["slow"] == timing.FEWEST_ROUNDS
    tight = timing.Budget(20, 60.0, max_ms=61.0).rounds({"a": 1.0, "b": 1.0})
    assert tight == {"a": 30, "b": 30}
    assert timing.Budget(20, 60.0, max_ms=0.1).rounds({"a": 1.0}) == {"a": timing.FEWEST_ROUNDS}


def test_allowance_shares_what_is_left(monkeypatch):
    now = [100.0]
    monkeypatch.setattr(timing.time, "monotonic", lambda: now[0])
    allowance = timing.Allowance(seconds=10.0, rows=5)
    assert allowance.budget(timing.Budget(), 0).max_ms == pytest.approx(1000.0)
    assert allowance.budget(timing.Budget(max_ms=30.0), 0).max_ms == 30.0
    now[0] = 106.0
    assert allowance.budget(timing.Budget(), 3).max_ms == pytest.approx(1000.0)
    assert allowance.behind(1) and not allowance.behind(3)
    assert not allowance.exhausted()
    now[0] = 112.5
    assert allowance.exhausted()


class RecordedTimer(timing.HostTimer):
    """A host timer whose calls take as many ms as they say."""

    def __init__(self):
        super().__init__(CPU)
        self.leads = []

    def record(self, call, lead_ms=0.0):
        self.leads.append(lead_ms)
        return call()

    def milliseconds(self, records):
        return records


def test_a_dry_run_of_the_fp8_forward(tmp_path, monkeypatch):
    monkeypatch.setenv("FLASH_ATTN_FAMILY", "")  # the program sets it
    out = tmp_path / "result.json"
    assert fp8_forward.main(["--device", "cpu", "--quick", "--head-dims", "64", "--out", str(out)]) == 0
    result = json.loads(out.read_text(encoding="utf-8"))
    written = result["rows"]
    assert [line.count("†") for line in fp8_page.block(result) if line.startswith("| 64 | 32/32 | ")] == [1, 1]
    assert len(written) == 2 and all(set(row["tflops"]) == {"bf16", "fp8", "fp8 fast"} for row in written)
    assert not any(row["has_kernels"] for row in written)


def test_interleave_rotates_and_spares_slow_calls():
    order = []

    def call(name, ms):
        return lambda: order.append(name) or ms

    calls = {name: (measure.contextlib.nullcontext, call(name, ms)) for name, ms in (("a", 1), ("b", 2), ("slow", 50))}
    times, clock = timing.interleave(RecordedTimer(), calls, timing.Budget(min_rounds=4, min_ms=11.5, warmup_ms=0.0))
    assert {name: len(samples) for name, samples in times.items()} == {"a": 12, "b": 12, "slow": 3}
    timed = [name for name in order[3:] if name != "slow"]
    assert timed[:6] == ["a", "b", "b", "a", "a", "b"]
    assert clock is None


def test_calls_that_the_host_is_slow_to_enqueue_get_a_lead(monkeypatch):
    """The host takes 0.3 ms for each call, the device 0.1 or 5."""
    now = [0.0]
    monkeypatch.setattr(timing.time, "perf_counter", lambda: now[0])
    monkeypatch.setattr(RecordedTimer, "lead_ms", timing.CudaTimer.lead_ms)

    def call(ms):
        now[0] += 3e-4
        return ms

    calls = {
        name: (measure.contextlib.nullcontext, lambda ms=ms: call(ms)) for name, ms in (("short", 0.1), ("long", 5))
    }
    timer = RecordedTimer()
    times, _ = timing.interleave(timer, calls, timing.Budget(min_rounds=3, min_ms=0.0, warmup_ms=0.0))
    assert times == {"short": [0.1, 0.1, 0.1], "long": [5, 5, 5]}
    assert timer.leads == pytest.approx([0, 0, 0.6, 0, 0, 0.6, 0.6, 0])  # a warm-up of each, then rounds in turns
    assert timing.CudaTimer.lead_ms(timer, 5000.0, 5000.0) == 2.0  # a call that compiled


def test_eager_timer_reports_one_call():
    done = []
    timer = timing.HostTimer(CPU, calls=7)
    assert timer.milliseconds([timer.record(lambda: done.append(1))])[0] >= 0
    assert len(done) == 7
    assert timing.HostTimer(CPU, calls=4).milliseconds([(1.0, 1.002)]) == pytest.approx([0.5])


def test_true_clock_is_cycles_over_time():
    before, after = {0: (1000, 0), 1: (0, 0), 2: (5, 5)}, {0: (2_701_000, 1500_000), 1: (2_700_000, 1500_000)}
    assert timing.mean_clock_mhz(before, after) == pytest.approx(1800.0)
    assert timing.mean_clock_mhz(before, {}) is None


def features():
    """Small rows, one per feature that some peer has."""
    base = {"batch": 2, "seqlen_q": 48, "seqlen_k": 48, "nheads": 4, "nheads_k": 4, "head_dim": 16, "dtype": "float32"}
    packed = {"kind": "packed", "seqlens": (20, 48), "causal": True}
    variants = (
        {}, {"causal": True}, {"nheads_k": 2}, {"window": (5, 7)}, {"window": (9, -1), "causal": True},
        {"softcap": 3.0}, {"alibi": "heads", "causal": True}, packed, {"seqlen_q": 32, "causal": True},
    )  # fmt: skip
    return [rows.Row("features", Case(**{**base, **variant})) for variant in variants]


def own_features():
    """Of no peer."""
    case = features()[1].case
    return [rows.Row("features", dataclasses.replace(case, **{name: True})) for name in ("sinks", "max_logit")]


@pytest.mark.parametrize("name", ["ours", "sdpa_flash", "sdpa_math", "naive"])
@pytest.mark.parametrize("row", features() + own_features(), ids=lambda row: row.id)
def test_cpu_peers_agree_with_the_reference(name, row):
    implementation = implementations.IMPLEMENTATIONS[name]
    for mode in ("fwd", "bwd", "fwd+bwd"):
        if implementation.limits(row, "cpu", mode):
            continue
        inputs = implementations.make_inputs(row, CPU, requires_grad=mode != "fwd")
        with torch.set_grad_enabled(mode != "fwd"):
            _, facts = measure.probe(implementation, row, inputs, mode, CPU)
        assert facts["relative_error"] < 1e-5


def plain_rows():
    """Rows that have a plain problem beside them."""
    plain = features()[1].case
    variants = ({"dropout": 0.2}, {"kind": "packed", "seqlens": (48, 48)}, {"window": (7, -1), "softcap": 3.0})
    return own_features() + [rows.Row("features", dataclasses.replace(plain, **variant)) for variant in variants]


@pytest.mark.parametrize("row", plain_rows(), ids=lambda row: row.id)
def test_the_plain_problem_is_computed_on_the_same_tensors(row):
    """Checked by its own reference and counted by its own FLOPs."""
    implementation = implementations.IMPLEMENTATIONS["ours_plain"]
    for mode in ("fwd", "bwd", "fwd+bwd"):
        assert implementation.limits(row, "cpu", mode) is None
        inputs = implementations.make_inputs(row, CPU, requires_grad=mode != "fwd")
        _, beside = implementation.problem(row, inputs)
        assert beside.q.shape == (2, 48, 4, 16) and beside.dout.data_ptr() == inputs.dout.data_ptr()
        assert [x.data_ptr() for x in (beside.q, beside.k, beside.v)] == [
            x.data_ptr() for x in (inputs.q, inputs.k, inputs.v)
        ]
        with torch.set_grad_enabled(mode != "fwd"):
            call, facts = measure.probe(implementation, row, inputs, mode, CPU)
            results = [call()] if mode == "fwd" else call()
        assert facts["relative_error"] < 1e-5
        assert facts["flops"] == rows.Row("cells", features()[1].case).flops(mode)
        assert {x.shape for x in results} == {(2, 48, 4, 16)}


def test_what_has_no_plain_problem_beside_it():
    implementation = implementations.IMPLEMENTATIONS["ours_plain"]
    assert implementation.limits(TINY, "cpu", "fwd") == "plain itself"
    ragged = rows.Row("varlen", dataclasses.replace(TINY.case, kind="packed", seqlens=(20, 40)))
    assert implementation.limits(ragged, "cpu", "fwd") == "no plain problem of the same size"
    assert implementation.limits(rows.Row("decode", Case(1, 1, 8, 1, 1, 8, "float32", kind="cache")), "cpu", "fwd")


@pytest.mark.parametrize("row", features(), ids=lambda row: row.id)
def test_flex_agrees_with_the_reference(row):
    """Its masks and score functions, by FlexAttention uncompiled."""
    from torch.nn.attention.flex_attention import flex_attention

    inputs = implementations.make_inputs(row, CPU)
    with torch.no_grad():
        out = torch_peers.flex(row, inputs, attention=flex_attention)()
    assert out.shape == inputs.q.shape
    assert check.relative_error(row, inputs, "fwd", out) < 1e-5


def test_wrong_results_are_not_timed():
    inputs = implementations.make_inputs(TINY, CPU, requires_grad=True)
    right = implementations.IMPLEMENTATIONS["naive"]

    def doubled(row, inputs):
        return lambda: 2 * right.build(row, inputs)()

    wrong = implementations.Implementation("ours", "wrong by a factor", doubled)
    for mode in ("fwd", "bwd"):
        calls, _, notes, failures = measure.prepare([wrong, right], TINY, inputs, mode, CPU)
        assert list(calls) == ["naive"]
        assert "wrong result" in notes["ours"] and failures == {"ours"}


def test_missing_pieces_become_notes():
    def unfinished(row, inputs):
        raise NotImplementedError("no backward yet")

    def broken(row, inputs):
        raise OSError("no compiler")

    def large(row, inputs):
        raise torch.cuda.OutOfMemoryError("CUDA out of memory. Tried to allocate 64.00 GiB")

    inputs = implementations.make_inputs(TINY, CPU)
    peers = [implementations.Implementation(f.__name__, "", f) for f in (unfinished, broken, large)]
    calls, _, notes, failures = measure.prepare(peers, TINY, inputs, "fwd", CPU)
    assert not calls and failures == {"broken"}
    assert notes == {
        "unfinished": "not implemented: no backward yet", "broken": "failed: no compiler", "large": "out of memory"
    }  # fmt: skip
    flex = implementations.IMPLEMENTATIONS["flex"]
    _, _, notes, failures = measure.prepare([flex], TINY, inputs, "fwd", CPU, may_compile=False)
    assert notes == {"flex": "skipped: no time left to compile"} and not failures


def test_choice_of_peers():
    assert [impl.name for impl in implementations.choose(["naive"])] == ["ours", "naive"]
    everything = [impl.name for impl in implementations.choose(["all"])]
    assert not {"ours_deterministic", "ours_plain"} & set(everything)
    assert everything[0] == "ours" and {"sdpa_flash", "sdpa_cudnn", "sdpa_math", "flex", "naive"} <= set(everything)
    with pytest.raises(ValueError, match="nobody: expected one of all, ours"):
        implementations.choose(["nobody"])
    absent = implementations.Implementation("absent", "", None, package="no_such_module_here")
    assert not absent.installed


def test_result_states_what_was_measured(result):
    assert result["schema"] == 2
    assert set(result["implementations"]) == {"ours", "sdpa_flash", "naive"}
    assert result["versions"]["torch"] == torch.__version__
    assert result["device"]["type"] == "cpu" and result["git"].keys() == {"commit", "dirty"}
    assert result["method"]["budget_s"] == 60
    expected = rows.select(["cells", "varlen", "small_eager"], True, "cpu", "float32")
    assert [row["id"] for row in result["rows"]] == [row.id for row in expected] * 2
    for row in result["rows"]:
        ours = row["results"]["ours"]
        assert ours["tflops"] == pytest.approx(row["flops"] / ours["ms"] / 1e9)
        assert ours["rounds"] >= 2 and ours["p10"] <= ours["ms"] <= ours["p90"]
        assert ours["relative_error"] < 1e-4


def test_deterministic_rows(tmp_path):
    """A group of its own, backward only, which two implementations join; elsewhere they run when they are named."""
    done = run_script(
        "run.py", "--device", "cpu", "--dtype", "float32", "--quick", "--min-rounds", 2, "--min-ms", 0.1, "--max-ms", 5,
        "--groups", "gqa", "deterministic", "--mode", "fwd", "bwd", "--peers", "--out", tmp_path, "--name", "both",
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    found = json.loads((tmp_path / "both.json").read_text())
    assert list(found["implementations"]) == ["ours", "ours_deterministic", "sdpa_flash_deterministic"]
    rows_of = {group: [row for row in found["rows"] if row["group"] == group] for group in ("gqa", "deterministic")}
    assert [row["mode"] for row in rows_of["gqa"]] == ["fwd"] * 2 + ["bwd"] * 2
    assert {row["mode"] for row in rows_of["deterministic"]} == {"bwd"} and len(rows_of["deterministic"]) == 7
    assert all(set(row["results"]) == {"ours"} for row in rows_of["gqa"])
    assert all({"ours", "ours_deterministic"} <= set(row["results"]) for row in rows_of["deterministic"])
    assert "deterministic bwd, ours_deterministic vs ours: geometric mean" in done.stdout
    assert "gqa bwd, ours_deterministic" not in done.stdout
    assert re.search(r"^seconds, set-up included: gqa fwd \d", done.stdout, re.MULTILINE)
    named = implementations.choose(["ours_deterministic"], ["deterministic"])
    assert [impl.limits(TINY, "cpu", "bwd") for impl in named if impl.name == "ours_deterministic"] == [None]


def test_plain_runs_beside_the_features(tmp_path):
    """It joins its groups in every mode, and is a peer nowhere."""
    done = run_script(
        "run.py", "--device", "cpu", "--dtype", "float32", "--quick", "--min-rounds", 2, "--min-ms", 0.1, "--max-ms", 5,
        "--groups", "varlen", "varlen_equal", "features", "deterministic", "--mode", "fwd", "fwd+bwd", "--peers",
        "sdpa_math", "--out", tmp_path, "--name", "plain",
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    found = json.loads((tmp_path / "plain.json").read_text())
    assert list(found["implementations"]) == ["ours", "sdpa_math", "ours_plain"]
    beside = [row for row in found["rows"] if "ours_plain" in row["results"]]
    assert {(row["group"], row["mode"]) for row in beside} == set(
        itertools.product(("varlen_equal", "features"), ("fwd", "fwd+bwd"))
    )
    assert all(row["plain_id"] != row["id"] and not row["failed"] for row in beside)
    for row in found["rows"]:
        reason = row["notes"].get("ours_plain", "")
        assert ("ours_plain" in row["results"]) == (not reason)
        assert (reason == "plain itself") == (row["group"] != "varlen" and row["plain_id"] == row["id"])
    lines = done.stdout.splitlines()
    first = lines.index("speed of ours relative to its plain dense call (TFLOPS)") + 1
    assert [line.split(maxsplit=1)[1] for line in lines[first : first + len(beside)]] == [
        f"{row['label']} {row['mode']}" for row in beside
    ]
    told = [line for line in lines if "ours_plain" in line]
    assert len(told) == 1 and told[0].startswith("not measured: ours_plain, ")


def test_spent_budget_skips_rows(tmp_path):
    done = run_script(
        "run.py", "--device", "cpu", "--groups", "gqa", "--peers", "naive", "--budget", 1e-9, "--out", tmp_path,
        "--name", "none",
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    skipped = json.loads((tmp_path / "none.json").read_text())["rows"]
    assert len(skipped) == 2
    assert all(row["results"] == {} and "budget" in row["notes"]["ours"] for row in skipped)
    assert "not measured: naive, 2 rows fwd: skipped" in done.stdout


@pytest.mark.devices("cuda")
def test_run_on_the_gpu(device, tmp_path):
    """Graph replay, eager loops, device events and the in-kernel clock."""
    done = run_script(
        "run.py", "--device", device, "--quick", "--budget", 30, "--groups", "gqa", "window", "small", "small_eager",
        "--peers", "sdpa_flash", "sdpa_math", "--mode", "fwd", "--out", tmp_path, "--name", "gpu",
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    measured = json.loads((tmp_path / "gpu.json").read_text())
    assert {row["timing"] for row in measured["rows"]} == {"event", "graph", "eager"}
    assert set(measured["host_overhead"]) == {"ours", "sdpa_flash", "sdpa_math"}
    for row in measured["rows"]:
        assert row["results"]["ours"]["peak_bytes"] > 0 and row["failed"] == []
        assert ("ours_plain" in row["results"]) == (row["group"] == "window")
        assert row["sm_mhz"] is None if row["timing"] == "eager" else 200 < row["sm_mhz"] < 4000


def test_compare_against_peers_and_earlier_results(result_path, tmp_path):
    done = run_script("compare.py", result_path, "--group", "all")
    assert done.returncode == 0, done.stdout
    assert re.search(
        r"^cells bwd, ours vs naive: geometric mean [\d.]+x, worst [\d.]+x \(d\d+", done.stdout, re.MULTILINE
    )
    assert "small_eager fwd, ours vs sdpa_flash" in done.stdout
    faster = json.loads(result_path.read_text())
    for row in faster["rows"]:
        row["results"]["ours"]["ms"] /= 2
    (tmp_path / "faster.json").write_text(json.dumps(faster))
    done = run_script("compare.py", tmp_path / "faster.json", result_path, "--min-mean", 1.999, "--min-worst", 1.999)
    assert done.returncode == 0 and "cells fwd, ours vs ours of the old result: geometric mean 2.000x" in done.stdout
    assert run_script("compare.py", result_path, tmp_path / "faster.json", "--min-mean", 0.51).returncode == 1


def fabricated(speeds, group="cells", mode="bwd"):
    """Rows of a result in which `speeds` gives {implementation: speed relative to ours}, one row per list entry."""
    return [
        {"group": group, "mode": mode, "id": f"row {i}", "label": f"row {i}",
         "results": {"ours": {"ms": 1.0}, **{name: {"ms": 1 / speed} for name, speed in entry.items()}}}
        for i, entry in enumerate(speeds)
    ]  # fmt: skip


def test_targets(result, tmp_path):
    """One is met, one is missed by its worst row, and rows of another group with the same problem do not count."""
    names = ("ours", "ours_deterministic", "ours_plain", "sdpa_flash", "triton")
    changed = {**result, "implementations": dict.fromkeys(names, "")}
    changed["rows"] = fabricated([{"sdpa_flash": 0.9, "triton": 0.9}, {"sdpa_flash": 1.04, "triton": 1.01}])
    changed["rows"] += fabricated(
        [{"ours_deterministic": 0.7, "ours_plain": 0.1}, {"ours_deterministic": 0.95}], "deterministic"
    )
    changed["rows"] += fabricated([{"sdpa_flash": 5.0, "triton": 5.0}], "features")
    (tmp_path / "made.json").write_text(json.dumps(changed))
    done = run_script("compare.py", tmp_path / "made.json", "--targets")
    assert done.returncode == 1
    assert "met     cells bwd, ours vs sdpa_flash: geometric mean 1.034x, worst 0.962x (row 1)" in done.stdout
    assert "missed  cells bwd, ours vs triton: geometric mean 1.049x, worst 0.990x (row 1)" in done.stdout
    assert "met     deterministic bwd, ours_deterministic vs ours: geometric mean 0.815x" in done.stdout
    assert "unknown gqa bwd, ours vs sdpa_flash: not measured" in done.stdout


def test_report_prints_the_table(result_path, result):
    done = run_script("report.py", result_path)
    assert done.returncode == 0, done.stderr
    assert done.stdout.startswith("ms, TFLOPS (speed of ours to it)")
    lines = done.stdout.splitlines()
    assert sum(line.startswith("d64 ") for line in lines) == sum(row["head_dim"] == 64 for row in result["rows"])


def test_report_states_speeds_relative_to_the_plain_call(result, tmp_path):
    plain = Case(2, 48, 48, 4, 4, 16, "float32", causal=True)
    variants = ({}, {"softcap": 3.0}, {"kind": "packed", "seqlens": (48, 48)})
    made = [rows.Row("features", dataclasses.replace(plain, **variant)) for variant in variants]
    described = [measure.describe(row, "fwd") for row in made]
    for entry, tflops, beside in zip(described, (8.0, 4.0, 6.0), (None, 8.0, 7.5)):
        entry["results"] = {"ours": {"ms": 1.0, "tflops": tflops}}
        if beside:
            entry["results"]["ours_plain"] = {"ms": 1.0, "tflops": beside}
    assert made[2].label.endswith("b2 s48 packed")
    (tmp_path / "made.json").write_text(json.dumps({**result, "rows": described}))
    done = run_script("report.py", tmp_path / "made.json")
    assert done.returncode == 0, done.stderr
    lines = done.stdout.splitlines()
    expected = [f"  {share} {made[i].label} fwd" for i, share in ((1, "0.500"), (2, "0.800"))]
    first = lines.index("speed of ours relative to its plain dense call (TFLOPS)") + 1
    assert [line for line in lines[first:] if line.startswith("  ")] == expected


@pytest.mark.parametrize(
    "built,shown",
    [("0123456789abcdef", "0123456789ab"), ("0123456789abcdef-dirty", "0123456789ab+changes"),
     ("unknown", "fedcba987654+changes"), (None, "fedcba987654+changes")],
)  # fmt: skip
def test_report_states_the_commit_of_the_package(result, tmp_path, built, shown):
    """The tree's only where the build does not know its own; changed files are named either way."""
    changed = {
        **result,
        "build": {**result["build"], "commit": built},
        "git": {"commit": "fedcba9876543", "dirty": True},
    }
    (tmp_path / "made.json").write_text(json.dumps(changed))
    done = run_script("report.py", tmp_path / "made.json")
    assert done.returncode == 0, done.stderr
    assert any(line.endswith(f", commit {shown}") for line in done.stdout.splitlines())


def test_curves_hold_every_cell(result):
    assert plots.figures(result) == [("", mode, d) for mode in ("bwd", "fwd") for d in (64, 128, 256)]
    lines = plots.curves(result, 128, "fwd", True)
    assert set(lines) == {"ours", "sdpa_flash", "naive"}
    assert [length for length, _ in lines["ours"]] == [16, 128]


def with_second_grid(result):
    """The result with a grid of another group, in which one implementation runs out of memory at the longest rows."""
    rows = [json.loads(json.dumps(row)) for row in result["rows"] if row["group"] == "cells" and row["head_dim"] == 64]
    longest = max(row["seqlen_k"] for row in rows)
    for row in rows:
        row["group"] = "b4h8"
        if row["seqlen_k"] == longest:
            del row["results"]["naive"]
            row["notes"]["naive"] = "out of memory"
    return {**result, "groups": [*result["groups"], "b4h8"], "rows": result["rows"] + rows}


def test_a_curve_ends_where_memory_does(result):
    both = with_second_grid(result)
    panel = (64, "fwd", True, plots.GRIDS["b4h8"])
    assert [length for length, _ in plots.curves(both, *panel)["naive"]] == [16]
    assert plots.out_of_memory(both, *panel) == {"naive": 128}
    assert plots.out_of_memory(result, 64, "fwd", True) == {}
    assert ("b4h8", "bwd", 64) in plots.figures(both) and len(plots.figures(both)) == len(plots.figures(result)) + 2


def test_plots_are_png(result, tmp_path):
    pytest.importorskip("matplotlib")
    (tmp_path / "both.json").write_text(json.dumps(with_second_grid(result)))
    done = run_script("report.py", "--plots", tmp_path / "both.json", tmp_path)
    assert done.returncode == 0, done.stderr
    names = {path.name for path in tmp_path.glob("*.png")}
    wanted = {f"{mode}_d{d}.png" for mode in ("fwd", "bwd") for d in (64, 128, 256)}
    assert names == wanted | {"b4h8_fwd_d64.png", "b4h8_bwd_d64.png"}
    assert all((tmp_path / name).read_bytes().startswith(b"\x89PNG") for name in names)


def test_every_row_is_told_where_no_bar_is_drawn(capsys):
    with shared.row_bar(2) as done:
        done("first row")
        done("second row")
    assert capsys.readouterr().err.splitlines() == ["1/2 first row", "2/2 second row"]


# The Triton comparator. Triton's interpreter has no bfloat16.
TRITON_CASES = [  # sq, sk, heads, K/V heads, head dim, causal
    (40, 40, 2, 2, 64, False),
    (37, 53, 4, 2, 64, True),
    (53, 37, 2, 1, 96, True),
    (1, 70, 2, 2, 40, False),
    (33, 33, 1, 1, 128, True),
    (16, 0, 1, 1, 64, False),
]


def attention_and_gradients(tensors, dout, causal, dtype):
    """(out, lse, dq, dk, dv) of plain attention computed in `dtype`."""
    leaves = [x.detach().to(dtype).requires_grad_() for x in tensors]
    found = attention(*leaves, causal=causal, dtype=dtype)
    return found.out, found.lse, *torch.autograd.grad(found.out, leaves, dout.to(dtype))


def triton_inputs(case, dtype, device, strided):
    """([q, k, v], dout) of an entry of TRITON_CASES; strided: heads before positions, dout with strides 0."""
    sq, sk, h, h_k, d, _ = case
    tensors = [torch.randn(2, s, n, d, dtype=dtype, device=device) for s, n in ((sq, h), (sk, h_k), (sk, h_k))]
    dout = torch.randn_like(tensors[0])
    if strided:
        tensors = [x.transpose(1, 2).contiguous().transpose(1, 2) for x in tensors]
        dout = dout.new_ones(()).expand(dout.shape)
    return [x.requires_grad_() for x in tensors], dout


def check_triton(triton_attention, device, dtype, variant, cases=TRITON_CASES):
    """A variant of the comparator against float64 at small cases, by the error criterion: output, log-sum-exp and
    gradients."""
    for case, strided in itertools.product(cases, (False, True)):
        tensors, dout = triton_inputs(case, dtype, device, strided)
        causal = case[-1]
        out, lse = triton_attention.triton_attention(*tensors, causal=causal, variant=variant)
        found = (out, lse, *torch.autograd.grad(out, tensors, dout))
        expected, plain = (attention_and_gradients(tensors, dout, causal, t) for t in (torch.float64, dtype))
        assert [x.dtype for x in found] == [dtype, torch.float32, dtype, dtype, dtype]
        for name, *triple in zip(("out", "lse"), found, expected, plain):
            assert_accurate(*triple, name)
        for name, *triple in zip(("dq", "dk", "dv"), found[2:], expected[2:], plain[2:]):
            assert_gradient_accurate(*triple, name)


def patch_interpreter():
    """NumPy 2.4 and newer refuse int() of the arrays of one element that the interpreter keeps scalars in."""
    from triton.runtime import interpreter

    patch_tensor = interpreter._patch_lang_tensor

    def patch_tensor_and_index(tensor, scope):
        patch_tensor(tensor, scope)
        scope.set_attr(tensor, "__index__", lambda self: self.handle.data.item())

    interpreter._patch_lang_tensor = patch_tensor_and_index


def interpret_triton():
    """What test_triton_by_the_interpreter runs in a process of its own."""
    import triton_attention

    patch_interpreter()
    torch.manual_seed(0)
    for use_tma in (True, False):
        check_triton(triton_attention, "cpu", torch.float16, triton_attention.Variant(use_tma))


def run_interpreted(code):
    """Runs code of this folder's modules by Triton's interpreter, in a process of its own; returns its output."""
    triton = pytest.importorskip("triton")
    if tuple(map(int, triton.__version__.split(".")[:2])) < (3, 6):
        pytest.skip("the patch of the interpreter is made for Triton 3.6")
    paths = os.pathsep.join(
        [str(Path(flash_attn.__file__).parents[1]), str(ROOT / "tests"), str(Path(__file__).parent)]
    )
    environment = {**os.environ, "TRITON_INTERPRET": "1", "OMP_NUM_THREADS": "1", "PYTHONPATH": paths}
    done = subprocess.run([sys.executable, "-c", code], env=environment, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stderr
    return done.stdout


def test_triton_by_the_interpreter():
    run_interpreted("import test_benchmarks; test_benchmarks.interpret_triton()")


@pytest.mark.devices("cuda")
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_triton_on_the_gpu(device, dtype):
    pytest.importorskip("triton")
    import triton_attention

    for tma in {False, torch.cuda.get_device_capability()[0] >= 9}:
        check_triton(triton_attention, device, dtype, triton_attention.Variant(tma))
    for head_dim, causal in itertools.product((64, 128, 256), (False, True)):
        row = rows.Row("cells", Case(2, 1000, 1000, 8, 2, head_dim, "bfloat16", causal=causal))
        inputs = implementations.make_inputs(row, torch.device(device), requires_grad=True)
        implementation = implementations.IMPLEMENTATIONS["triton"]
        _, facts = measure.probe(implementation, row, inputs, "fwd+bwd", torch.device(device))
        assert facts["relative_error"] < 1e-2


@pytest.mark.devices("cuda")
def test_triton_backward_needs_no_large_temporaries(device):
    """Beyond the gradients: two numbers per row and head."""
    pytest.importorskip("triton")
    row = rows.Row("cells", Case(1, 4096, 4096, 8, 8, 64, "bfloat16", causal=True))
    inputs = implementations.make_inputs(row, torch.device(device), requires_grad=True)
    _, facts = measure.probe(implementations.IMPLEMENTATIONS["triton"], row, inputs, "bwd", torch.device(device))
    assert facts["peak_bytes"] - facts["result_bytes"] <= 2 * 4 * 4096 * 8


@pytest.mark.parametrize("use_tma", [True, False])
@pytest.mark.parametrize("block_d", [64, 128, 256])
def test_triton_compiles_for_hopper(block_d, use_tma):
    triton = pytest.importorskip("triton")
    if tuple(map(int, triton.__version__.split(".")[:2])) < (3, 6):
        pytest.skip("compiling ahead of time is written for Triton 3.6")
    import triton_ladder
    import triton_sweep
    from triton_variants import Variant

    for causal in (False, True):
        for launch, tiles in triton_ladder.make_launches(Variant(use_tma), block_d, causal, "cpu", torch.bfloat16):
            candidates = triton_sweep.CANDIDATES[launch.kernel.__name__.replace("_kernel", "")][block_d]
            assert set(tiles) <= set(candidates)
            ptx = compile_launch(launch, tiles[0]).asm["ptx"]
            assert "wgmma.mma_async" in ptx
            assert ("cp.async.bulk.tensor" in ptx) == use_tma


def test_triton_sweep_scores_and_sorts(monkeypatch, capsys):
    pytest.importorskip("triton")
    import triton_sweep

    small, large, big = (32, 64, 4, 2), (64, 64, 4, 2), (128, 64, 8, 2)
    monkeypatch.setitem(triton_sweep.CANDIDATES["dq"], 64, (large, small, big))
    resources = dict.fromkeys((("dq", 64, True, tile) for tile in (small, large)), "99 registers")
    resources["dq", 64, True, big] = "out of resource"

    def time_column(kernel, head_dim, causal, seqlen, compiled):
        return {tile: 1.0 if tile == small else 3.0 if causal else 0.5 for tile in compiled if tile != big}

    monkeypatch.setattr(triton_sweep, "time_column", time_column)
    entries = triton_sweep.sweep("dq", 64, resources)
    assert [tuple(entry["tile"]) for entry in entries] == [small, large, big]
    assert [entry["score"] for entry in entries] == [pytest.approx(2**-0.5), pytest.approx(3**-0.5), 0.0]
    triton_sweep.print_table("dq", 64, entries)
    assert "(128, 64, 8, 2)     0.000          inf" in capsys.readouterr().out


# ---- graphs ----------------------------------------------------------------------------------------------------------


@pytest.mark.devices("cuda")
def test_a_graph_keeps_what_its_calls_use(device):
    """Else the memory may be unmapped when the next graph is captured."""
    numbers = torch.zeros(4, device=device)
    seen = weakref.ref(numbers)
    replay = timing.captured(lambda numbers=numbers: numbers.add_(1), contextlib.nullcontext, 2)
    del numbers
    gc.collect()
    torch.cuda.empty_cache()
    before = seen().sum().item()
    replay()
    assert seen().sum().item() == before + 8


# ---- SDPA ------------------------------------------------------------------------------------------------------------


def test_steps_by_sdpa_are_timed_in_every_way(tmp_path):
    pytest.importorskip("transformers")
    import sdpa_step

    path = tmp_path / "steps.json"
    assert sdpa_step.main(["--device", "cpu", "--steps", "1", "--out", str(path)]) == 0
    result = json.loads(path.read_text())
    assert [set(row["ms"]) for row in result["rows"]] == [{"torch", "scope"}] * len(sdpa_step.TINY)
    assert all(ms > 0 for row in result["rows"] for ms in row["ms"].values())
    assert result["versions"]["transformers"] and result["device"]["type"] == "cpu"
