"""Two builds in turns: the calls of each build, wrong results, and a run on the CPU."""

import dataclasses
import json
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from cases import Case

import flash_attn.cpu

ROOT = Path(__file__).resolve().parents[2]
sys.path.append(str(ROOT / "benchmarks"))

import compare_builds
import implementations
import rows
import timing

CPU = torch.device("cpu")


def small_row(group="cells", **options):
    values = {"batch": 2, "seqlen_q": 40, "seqlen_k": 40, "nheads": 4, "nheads_k": 2, "head_dim": 32, **options}
    return rows.Row(group, Case(dtype="float32", **values))


@pytest.mark.parametrize(
    "options",
    [
        {},
        {"causal": True, "softcap": 3.0, "alibi": "heads"},
        {"sinks": True, "window": (9, 4)},
        {"kind": "packed", "seqlens": (40, 17)},
        {"head_dim_v": 16},
    ],
    ids=str,
)
def test_calls_are_those_of_the_public_functions(options):
    row = small_row(**options)
    inputs = implementations.make_inputs(row, CPU, requires_grad=True)
    expected = implementations.ours(row, inputs)()
    gradients = torch.autograd.grad(expected, (inputs.q, inputs.k, inputs.v), inputs.dout)
    with torch.no_grad():
        first = compare_builds.make_call(flash_attn.cpu, row, "fwd", inputs, None)()
        results = compare_builds.make_call(flash_attn.cpu, row, "bwd", inputs, first)()
    assert torch.equal(first[0], expected)
    assert all(map(torch.equal, results[:3], gradients))


@pytest.mark.parametrize("timing_of_row", ["event", "graph"])
@pytest.mark.parametrize(
    "options",
    [{}, {"page_size": 16}, {"append": 1}, {"seqlen_q": 3, "causal": True}, {"head_dim_v": 24, "nheads_k": 1}],
    ids=str,
)
def test_calls_over_a_cache(options, timing_of_row):
    """With a plan and a given result where rows are timed as the layers of a model."""
    row = small_row("decode", **{"seqlen_q": 1, "seqlen_k": 90, "kind": "cache", **options})
    row = dataclasses.replace(row, timing=timing_of_row)
    inputs = implementations.make_inputs(row, CPU)
    inputs.caches = inputs.caches[:2]
    expected = implementations.IMPLEMENTATIONS["ours"].call(row, inputs)()
    call = compare_builds.make_call(flash_attn.cpu, row, "fwd", inputs, None)
    assert all(torch.equal(call()[0], expected) for _ in range(timing.CALLS_PER_GRAPH + 1))


@pytest.mark.parametrize("factor, wrong", [(1.0, False), (1.001, False), (1.1, True), (float("nan"), True)])
def test_results_of_the_builds_are_compared(factor, wrong):
    def fwd(*arguments, **named):
        return [x * factor for x in flash_attn.cpu.fwd(*arguments, **named)[:1]]

    builds = {"old": flash_attn.cpu, "new": SimpleNamespace(fwd=fwd)}
    timer, budget = timing.HostTimer(CPU), timing.Budget(1, 0.0, 0.0)
    entry = compare_builds.measure(builds, small_row(causal=True), "fwd", timer, CPU, budget)
    assert entry["wrong"] == wrong and (entry["difference"] == 0.0) == (factor == 1.0)
    assert ("refused" in compare_builds.report_lines([entry], 0.0)[-1]) == wrong


def test_a_run_on_the_cpu(tmp_path, capsys):
    arguments = "--device cpu --dtype float32 --quick --budget 1 --groups cells decode_append --limit 0".split()
    assert compare_builds.main([*arguments, "--out", str(tmp_path / "builds.json")]) == 0
    printed = capsys.readouterr().out
    entries = json.loads((tmp_path / "builds.json").read_text())
    assert list(dict.fromkeys((entry["group"], entry["mode"]) for entry in entries)) == [
        ("cells", "fwd"), ("cells", "bwd"), ("decode_append", "fwd"),
    ]  # fmt: skip
    assert all(entry["ratio"] == entry["old"] / entry["new"] and not entry["difference"] for entry in entries)
    assert "cells fwd, new against old: geometric mean" in printed
    assert f"{len(entries)} of {len(entries)} with equal results" in printed
