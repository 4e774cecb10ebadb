"""The benchmark's rows over a KV cache: inputs, peers, checks, reports."""

from __future__ import annotations

import dataclasses
import json
import sys
from pathlib import Path

import pytest
import torch
from cases import Case

ROOT = Path(__file__).resolve().parents[2]
sys.path.append(str(ROOT / "benchmarks"))

import implementations
import measure
import over_cache
import report
import rows
import run
import scores

CPU = torch.device("cpu")
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


def test_flops_count_the_visible_keys():
    row = rows.Row("prefill_cache", dataclasses.replace(BASE, seqlen_q=2, causal=True))
    assert row.flops() == 4 * 3 * 8 * 32 * (49 + 50)
    latent = rows.Row("decode_mla", dataclasses.replace(BASE, nheads_k=1, head_dim_v=48))
    assert latent.flops() == 2 * 3 * 8 * 50 * (32 + 48 + 48)


@pytest.mark.parametrize("variant", VARIANTS, ids=str)
@pytest.mark.parametrize("name", ("ours", "sdpa_flash", "sdpa_math"))
@pytest.mark.parametrize("timing", ("event", "graph"))
def test_peers_agree_with_the_reference(variant, name, timing):
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


@pytest.fixture(scope="module")
def result_path(tmp_path_factory):
    folder = tmp_path_factory.mktemp("bench")
    short = "--device cpu --dtype float32 --quick --min-rounds 2 --min-ms 0.1 --budget 60 --name cache".split()
    groups = "--groups decode decode_tokens prefill_cache --peers sdpa_math".split()
    assert run.main([*short, *groups, "--out", str(folder)]) == 0
    return folder / "cache.json"


def test_report_shows_the_bandwidth(result_path):
    result = json.loads(result_path.read_text())
    assert {row["group"] for row in result["rows"]} == {"decode", "decode_tokens", "prefill_cache"}
    lines = report.full_report(result)
    assert any(line.startswith("| decode fwd | µs | GB/s | ") for line in lines)
    assert any(line.startswith("| prefill_cache fwd | µs | TFLOPS | ") for line in lines)
    row = next(row for row in result["rows"] if row["group"] == "decode")
    row["results"]["ours"]["ms"] = row["bytes"] / 1e6 / 2000.0
    assert scores.speed(row, "ours") == "2000"
    result["host_overhead_cache"] = {"ours": {"median": 12.34}}
    assert "host time of one eager call (cache, b1 k1024 h32/8 d128), us: ours 12.3" in scores.overhead_lines(result)


@pytest.mark.devices("cuda")
def test_run_on_the_gpu(device, tmp_path):
    groups = "decode decode_layers decode_eager decode_append decode_invariant decode_8bit".split()
    options = ["--device", device, "--quick", "--budget", "25", "--peers", "sdpa_flash", "--groups", *groups]
    assert run.main([*options, "--out", str(tmp_path), "--name", "cache"]) == 0
    measured = json.loads((tmp_path / "cache.json").read_text())
    assert {row["timing"] for row in measured["rows"]} == {"replay", "graph", "eager"}
    assert all("ours" in row["results"] or "budget" in row["notes"]["ours"] for row in measured["rows"])
    assert measured["read_ceiling"]["gbs"] > 100 and measured["host_overhead_cache"]["ours"]["median"] > 0
