"""Two builds in turns: the calls of each build, the statistics, and a run on the CPU."""

import dataclasses
import json
import sys
from pathlib import Path

import pytest
import torch
from cases import Case

import flash_attn
import flash_attn.cpu

ROOT = Path(__file__).resolve().parents[2]
sys.path.append(str(ROOT / "benchmarks"))

import builds
import compare_builds
import implementations
import rows
import timing

CPU = torch.device("cpu")
BUILD = builds.Build("old", flash_attn.cpu)


def small_row(group="cells", **options):
    values = {"batch": 2, "seqlen_q": 40, "seqlen_k": 40, "nheads": 4, "nheads_k": 2, "head_dim": 32, **options}
    return rows.Row(group, Case(dtype="float32", **values))


# ---- the calls of a build --------------------------------------------------------------------------------------------


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
        first = builds.make_call(BUILD, row, "fwd", inputs, None)()
        results = builds.make_call(BUILD, row, "bwd", inputs, (first[0], first[1], first[3]))()
    assert torch.equal(builds.results_of("fwd", first)[0], expected)
    assert all(map(torch.equal, builds.results_of("bwd", results), gradients))


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
    call = builds.make_call(BUILD, row, "fwd", inputs, None)
    assert all(torch.equal(call()[0], expected) for _ in range(timing.CALLS_PER_GRAPH + 1))


# ---- statistics ------------------------------------------------------------------------------------------------------


def test_results_of_the_builds_are_compared():
    row = small_row(causal=True)
    inputs = implementations.make_inputs(row, CPU)

    def scaled(factor):
        def call(*arguments, **named):
            return [x * factor for x in flash_attn.cpu.fwd(*arguments, **named)[:1]]

        return builds.Build("new", type("Module", (), {"fwd": staticmethod(call)}))

    for factor, wrong, equal in (
        (1.0, False, True),
        (1.001, False, False),
        (1.1, True, False),
        (float("nan"), True, False),
    ):
        _, difference, same = compare_builds.prepare([BUILD, scaled(factor)], row, "fwd", inputs, CPU)
        assert (compare_builds.is_wrong({"difference": difference}), same) == (wrong, equal)
    dropped = small_row(dropout=0.5)
    assert compare_builds.prepare([BUILD, BUILD], dropped, "fwd", inputs, CPU)[1] is None


# ---- a run -----------------------------------------------------------------------------------------------------------


def test_a_run_on_the_cpu(tmp_path, capsys):
    arguments = "--device cpu --dtype float32 --quick --budget 1 --groups cells decode_append --limit 0".split()
    assert compare_builds.main([*arguments, "--out", str(tmp_path / "builds.json")]) == 0
    printed = capsys.readouterr().out
    result = json.loads((tmp_path / "builds.json").read_text())
    assert {"commit", "site", "build"} == set(result["old"]) == set(result["new"])
    assert [(score["group"], score["mode"]) for score in result["scores"]] == [
        ("cells", "fwd"), ("cells", "bwd"), ("decode_append", "fwd"),
    ]  # fmt: skip
    for entry in result["rows"]:
        assert entry["ratio"] == pytest.approx(entry["old"]["median"] / entry["new"]["median"])
        assert entry["equal_bits"] and entry["difference"] == 0.0 and not entry["below"]
    assert "cells fwd: geometric mean" in printed and "12 of 12 bitwise equal" in printed
