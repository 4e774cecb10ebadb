"""The benchmark suite: its rows, its timing, its peers, its reports."""

import contextlib
import dataclasses
import gc
import itertools
import json
import sys
import weakref
from pathlib import Path

import pytest
import torch
from cases import Case

ROOT = Path(__file__).resolve().parents[2]
sys.path.append(str(ROOT / "benchmarks"))

import implementations
import measure
import over_cache
import pages
import report
import results
import rows
import run
import scores
import timing

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


def test_every_group_has_rows():
    assert {row.group for row in rows.all_rows()} == set(rows.ALL_GROUPS)


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


class RecordedTimer(timing.HostTimer):
    """A host timer whose calls take as many ms as they say."""

    def record(self, call, lead_ms=0.0):
        return call()

    def milliseconds(self, records):
        return records


def test_interleave_shuffles_and_spares_slow_calls():
    order = []

    def call(name, ms):
        return lambda: order.append(name) or ms

    calls = {name: (measure.contextlib.nullcontext, call(name, ms)) for name, ms in (("a", 1), ("b", 2), ("slow", 50))}
    times, clock = timing.interleave(RecordedTimer(CPU), calls, timing.Budget(min_rounds=4, min_ms=11.5, warmup_ms=0.0))
    assert {name: len(samples) for name, samples in times.items()} == {"a": 12, "b": 12, "slow": 3}
    timed = [name for name in order[3:] if name != "slow"]
    assert set(zip(timed, timed[1:])) == set(itertools.product("ab", "ab"))
    assert clock is None


FEATURES = (
    {}, {"causal": True}, {"nheads_k": 2}, {"window": (5, 7)}, {"window": (9, -1), "causal": True}, {"softcap": 3.0},
    {"alibi": "heads", "causal": True}, {"kind": "packed", "seqlens": (20, 48), "causal": True},
    {"seqlen_q": 32, "causal": True}, {"sinks": True}, {"max_logit": True},
)  # fmt: skip


@pytest.mark.parametrize("name", ["ours", "sdpa_flash", "naive"])
@pytest.mark.parametrize("feature", FEATURES, ids=str)
def test_cpu_peers_agree_with_the_reference(name, feature):
    base = {"batch": 2, "seqlen_q": 48, "seqlen_k": 48, "nheads": 4, "nheads_k": 4, "head_dim": 16, "dtype": "float32"}
    row, implementation = rows.Row("features", Case(**{**base, **feature})), implementations.IMPLEMENTATIONS[name]
    for mode in ("fwd", "bwd", "fwd+bwd"):
        if not implementation.limits(row, "cpu", mode):
            inputs = implementations.make_inputs(row, CPU, requires_grad=mode != "fwd")
            with torch.set_grad_enabled(mode != "fwd"):
                _, facts = measure.probe(implementation, row, inputs, mode, CPU)
            assert facts["relative_error"] < 1e-5


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
    expected = rows.select(result["groups"], True, "cpu", "float32")
    assert [row["id"] for row in result["rows"]] == [row.id for row in expected] * 2
    assert not any(row["failed"] for row in result["rows"]), "each result is compared with float64"
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


# ---- over a KV cache ------------------------------------------------------------------------------------------------

BASE = Case(3, 1, 50, 8, 2, 32, "float32", kind="cache")
VARIANTS = (
    {}, {"page_size": 16}, {"page_size": 7, "seqlen_q": 3, "causal": True}, {"window": (20, 0)}, {"softcap": 5.0},
    {"alibi": "heads"}, {"append": 1}, {"append": 1, "page_size": 16}, {"invariant": True},
    {"seqlen_q": 40, "causal": True, "page_size": 16}, {"nheads": 2},
    {"nheads_k": 1, "head_dim_v": 48, "page_size": 16},
)  # fmt: skip


def test_bytes_are_the_keys_and_values_in_sight():
    assert rows.Row("decode", BASE).bytes == 2 * 3 * 50 * 2 * 32 * 4
    assert rows.Row("decode_mla", dataclasses.replace(BASE, nheads_k=1, head_dim_v=48)).bytes == 3 * 50 * (32 + 48) * 4
    windowed = dataclasses.replace(BASE, window=(20, 0), dtype="bfloat16")
    assert rows.Row("decode", windowed).bytes == 2 * 3 * 21 * 2 * 32 * 2
    assert rows.Row("prefill_cache", dataclasses.replace(BASE, seqlen_q=40)).bytes is None
    assert rows.Row("cells", Case(1, 8, 8, 1, 1, 8, "bfloat16")).bytes is None


def test_flops_over_a_cache_count_the_visible_keys():
    row = rows.Row("prefill_cache", dataclasses.replace(BASE, seqlen_q=2, causal=True))
    assert row.flops() == 4 * 3 * 8 * 32 * (49 + 50)
    latent = rows.Row("decode_mla", dataclasses.replace(BASE, nheads_k=1, head_dim_v=48))
    assert latent.flops() == 2 * 3 * 8 * 50 * (32 + 48 + 48)


@pytest.mark.parametrize("variant", VARIANTS, ids=str)
@pytest.mark.parametrize("name", ("ours", "sdpa_flash", "sdpa_math"))
@pytest.mark.parametrize("timing", ("event", "graph"))
def test_peers_over_a_cache_agree_with_the_reference(variant, name, timing):
    row = rows.Row("decode", dataclasses.replace(BASE, **variant), timing)
    implementation = implementations.IMPLEMENTATIONS[name]
    if timing == "graph" and row.bytes is None:
        return
    inputs = implementations.make_inputs(row, CPU)
    assert len(inputs.caches) == (over_cache.CALLS_PER_GRAPH if timing == "graph" else 1)
    reason = implementation.limits(row, "cpu", "fwd")
    assert (reason is None) == (name == "ours" or variant in ({}, {"nheads": 2}))
    if reason is None:
        with torch.no_grad():
            _, facts = measure.probe(implementation, row, inputs, "fwd", CPU)
        assert facts["relative_error"] < 1e-5


def test_report_shows_the_bandwidth(tmp_path):
    groups = ("--groups", "decode", "decode_tokens", "prefill_cache", "--peers", "sdpa_math", "--budget", 60)
    status, result = measured(tmp_path, *groups)
    assert status == 0 and {row["group"] for row in result["rows"]} == {"decode", "decode_tokens", "prefill_cache"}
    lines = report.full_report(result)
    assert any(line.startswith("| decode fwd | µs | GB/s | ") for line in lines)
    assert any(line.startswith("| prefill_cache fwd | µs | TFLOPS | ") for line in lines)
    row = next(row for row in result["rows"] if row["group"] == "decode")
    row["results"]["ours"]["ms"] = row["bytes"] / 1e6 / 2000.0
    assert scores.speed(row, "ours") == "2000"
    result["host_overhead_cache"] = {"ours": {"median": 12.34}}
    assert "host time of one eager call (cache, b1 k1024 h32/8 d128), us: ours 12.3" in scores.overhead_lines(result)


@pytest.mark.devices("cuda")
def test_run_over_a_cache_on_the_gpu(device, tmp_path):
    groups = "decode decode_layers decode_eager decode_append decode_invariant decode_8bit".split()
    options = ["--device", device, "--quick", "--budget", "25", "--peers", "sdpa_flash", "--groups", *groups]
    assert run.main([*options, "--out", str(tmp_path), "--name", "cache"]) == 0
    measured = json.loads((tmp_path / "cache.json").read_text())
    assert {row["timing"] for row in measured["rows"]} == {"replay", "graph", "eager"}
    assert all("ours" in row["results"] or "budget" in row["notes"]["ours"] for row in measured["rows"])
    assert measured["read_ceiling"]["gbs"] > 100 and measured["host_overhead_cache"]["ours"]["median"] > 0


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
