"""The benchmark suite: its rows, its timing, its peers, its reports."""

import contextlib
import dataclasses
import gc
import json
import sys
import weakref
from pathlib import Path

import pytest
import torch
from cases import Case

ROOT = Path(__file__).resolve().parents[2]
sys.path.append(str(ROOT / "benchmarks"))

import check
import implementations
import measure
import pages
import report
import results
import rows
import run
import scores
import timing
import torch_peers

CPU = torch.device("cpu")
TINY = rows.Row("cells", Case(2, 40, 40, 4, 2, 32, "float32", causal=True))


def measured(folder, *arguments, name="short"):
    """(exit status, result) of benchmarks/run.py on CPU tensors, as short as it can be."""
    short = "--device cpu --dtype float32 --quick --min-rounds 2 --min-ms 0.1 --max-ms 5".split()
    status = run.main([*short, "--out", str(folder), "--name", name, *map(str, arguments)])
    return status, json.loads((folder / f"{name}.json").read_text())


@pytest.fixture(scope="module")
def result_path(tmp_path_factory):
    """The result of a short run on CPU tensors."""
    folder = tmp_path_factory.mktemp("bench")
    groups = ("--groups", "cells", "varlen", "--mode", "fwd", "bwd", "--budget", 60)
    status, _ = measured(folder, *groups, "--peers", "sdpa_flash", "naive")
    assert status == 0
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


def test_rounds_stay_within_the_budget():
    budget = timing.Budget(min_rounds=20, min_ms=60.0)
    assert budget.rounds({"a": 1.0, "b": 2.0}) == {"a": 61, "b": 61}
    slow = budget.rounds({"a": 1.0, "slow": 40.0})
    assert slow["a"] == 61 and slow["slow"] == 6
    assert budget.rounds({"a": 1.0, "slow": 4000.0})["slow"] == timing.FEWEST_ROUNDS
    tight = timing.Budget(20, 60.0, max_ms=61.0).rounds({"a": 1.0, "b": 1.0})
    assert tight == {"a": 30, "b": 30}
    assert timing.Budget(20, 60.0, max_ms=0.1).rounds({"a": 1.0}) == {"a": timing.FEWEST_ROUNDS}


class RecordedTimer(timing.HostTimer):
    """A host timer whose calls take as many ms as they say."""

    def record(self, call, lead_ms=0.0):
        return call()

    def milliseconds(self, records):
        return records


def test_interleave_rotates_and_spares_slow_calls():
    order = []

    def call(name, ms):
        return lambda: order.append(name) or ms

    calls = {name: (measure.contextlib.nullcontext, call(name, ms)) for name, ms in (("a", 1), ("b", 2), ("slow", 50))}
    times, clock = timing.interleave(RecordedTimer(CPU), calls, timing.Budget(min_rounds=4, min_ms=11.5, warmup_ms=0.0))
    assert {name: len(samples) for name, samples in times.items()} == {"a": 12, "b": 12, "slow": 3}
    timed = [name for name in order[3:] if name != "slow"]
    assert timed[:6] == ["a", "b", "b", "a", "a", "b"]
    assert clock is None


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


@pytest.mark.parametrize("row", features()[4:], ids=lambda row: row.id)
def test_flex_agrees_with_the_reference(row):
    """Its masks and score functions, by FlexAttention uncompiled."""
    from torch.nn.attention.flex_attention import flex_attention

    inputs = implementations.make_inputs(row, CPU)
    with torch.no_grad():
        out = torch_peers.flex(row, inputs, attention=flex_attention)()
    assert out.shape == inputs.q.shape
    assert check.relative_error(row, inputs, "fwd", out) < 1e-5


def test_peers_that_are_missing_may_be_left_out(monkeypatch, capsys):
    monkeypatch.setattr(implementations.Implementation, "installed", property(lambda self: self.package == "torch"))
    options = run.parse(["--peers", "naive", "--also", "flash_attn_3", "sdpa_math"])
    assert [peer.name for peer in options.implementations] == ["ours", "naive", "sdpa_math"]
    with pytest.raises(SystemExit):
        run.parse(["--also", "flash_attn_33"])
    assert "flash_attn_33: expected one of" in capsys.readouterr().err


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


def test_result_states_what_was_measured(result):
    assert result["schema"] == 2
    assert set(result["implementations"]) == {"ours", "sdpa_flash", "naive"}
    assert result["versions"]["torch"] == torch.__version__
    assert result["device"]["type"] == "cpu" and result["git"].keys() == {"commit", "dirty"}
    assert result["method"]["budget_s"] == 60
    expected = rows.select(["cells", "varlen"], True, "cpu", "float32")
    assert [row["id"] for row in result["rows"]] == [row.id for row in expected] * 2
    for row in result["rows"]:
        ours = row["results"]["ours"]
        assert ours["tflops"] == pytest.approx(row["flops"] / ours["ms"] / 1e9)
        assert ours["rounds"] >= 2 and ours["p10"] <= ours["ms"] <= ours["p90"]
        assert ours["relative_error"] < 1e-4


@pytest.mark.devices("cuda")
def test_run_on_the_gpu(device, tmp_path):
    """Graph replay, eager loops, device events and the in-kernel clock."""
    groups = ["--groups", "gqa", "window", "small", "small_eager", "--peers", "sdpa_flash", "sdpa_math"]
    place = ["--out", str(tmp_path), "--name", "gpu"]
    limits = ["--budget", "600", "--max-ms", "60"]  # on a busy GPU no row may be left out
    assert run.main(["--device", device, "--quick", *limits, *groups, *place]) == 0
    measured = json.loads((tmp_path / "gpu.json").read_text())
    assert {row["timing"] for row in measured["rows"]} == {"event", "graph", "eager"}
    assert set(measured["host_overhead"]) == {"ours", "sdpa_flash", "sdpa_math"}
    for row in measured["rows"]:
        assert row["results"]["ours"]["peak_bytes"] > 0 and row["failed"] == []
        assert ("ours_plain" in row["results"]) == (row["group"] == "window")
        assert row["sm_mhz"] is None if row["timing"] == "eager" else 200 < row["sm_mhz"] < 4000


def test_a_stored_result_is_reported(result_path, result, capsys):
    assert report.main([str(result_path)]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert sum(line.startswith("| d64 ") for line in lines) == sum(row["head_dim"] == 64 for row in result["rows"])


@pytest.mark.parametrize(
    "built, shown",
    [("0123456789abcdef", "0123456789ab"), ("0123456789ab-dirty", "0123456789ab+changes"),
     ("unknown", "fedcba987654+changes"), (None, "fedcba987654+changes")],
)  # fmt: skip
def test_the_commit_is_that_of_the_package(result, built, shown):
    """The tree's only where the build does not know its own; the compact form of a result says the same."""
    git = {"commit": "fedcba9876543", "dirty": True}
    changed = {**result, "build": {**result["build"], "commit": built}, "git": git}
    assert results.measured_commit(changed) == results.measured_commit(results.compact(changed)) == shown
    assert results.environment_line(changed).endswith(f", commit {shown}")


def test_pages_name_the_fastest_peer_of_each_row():
    def row(length, **ms):
        times = {name: {"ms": time, "tflops": 8 / time} for name, time in ms.items()}
        return {"group": "cells", "mode": "fwd", "id": str(length), "label": f"s{length}", "seqlen_k": length,
                "results": times}  # fmt: skip

    found = [row(512, ours=2.0, sdpa_flash=8.0, flash_attn_3=1.0), row(2048, ours=2.0, sdpa_flash=8.0, triton=1.0),
             row(4096, sdpa_flash=1.0)]  # fmt: skip
    assert scores.best_ratios(found) == [("s512", 0.5, "flash_attn_3"), ("s2048", 4.0, "sdpa_flash")]
    assert pages.cell_entry(found[0]) == "4.00 (0.50× FA3)"
    cells = pages.speed_line("title", {"rows": found}, ["sdpa_flash", "flash_attn_3"], groups="cells")
    flash, fa3 = "4.00× (4.00×)", "0.50× (0.50×, 1 of 2)"
    assert cells == ["title, 2 shapes", "up to 4 TFLOPS", flash, fa3, "1.41× (0.50×), 1 of 2 slower"]
    short = pages.speed_line("title", {"rows": found}, ["sdpa_flash"], groups="cells", longest=1024)
    assert short[-1] == "0.50× (0.50×), 1 of 1 slower"


# ---- publishing ------------------------------------------------------------------------------------------------------


@pytest.fixture
def finished_run(result, tmp_path):
    """A folder as lab/run_all.py leaves it."""
    folder = tmp_path / "run"
    folder.mkdir()
    for name in ("grid", "deterministic"):
        (folder / f"{name}.json").write_text(json.dumps(result))
    return folder


def test_results_of_one_run_are_stored(finished_run, tmp_path):
    pytest.importorskip("matplotlib")
    stored = report.publish(finished_run, tmp_path / "results")
    names = {path.relative_to(tmp_path / "results").as_posix() for path in stored}
    assert names == {"grid.json", "deterministic.json", "plots/fwd_d128.png", "plots/bwd_d128.png"}
    assert {path.name for path in (tmp_path / "results").iterdir()} == {"grid.json", "deterministic.json", "plots"}


@pytest.mark.parametrize(
    "change, reason",
    [
        ({"build": {"commit": 40 * "b"}}, "results of one commit"),
        ({"device": {"name": "NVIDIA H200", "type": "cuda"}}, "results of one GPU"),
    ],
)
def test_results_of_several_runs_are_refused(finished_run, tmp_path, change, reason):
    path = finished_run / "deterministic.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | change))
    with pytest.raises(SystemExit, match=reason):
        report.publish(finished_run, tmp_path / "results")
    with pytest.raises(SystemExit, match="no results"):
        report.publish(tmp_path, tmp_path / "results")


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
