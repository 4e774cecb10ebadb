"""docs/retrospective.md: its blocks are what the stored results of grid, ablation and Triton ladder say."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
sys.path.append(str(ROOT / "benchmarks"))

import ablate_report
import retrospective_page
import step_model
from theory_model import MACHINES

MACHINE = MACHINES["h200"]
PEAK = MACHINE.flops / 1e12


def origin():
    versions = {"torch": "2.11", "cuda": "13.0", "cudnn": 1, "nvcc": "13.0"}
    device = {"type": "cuda", "name": "GPU", "driver": "1"}
    return {"device": device, "versions": versions, "git": {"commit": "0123456789abcdef", "dirty": None}}


def cell(mode, seqlen, results, causal=False):
    row = {"group": "cells", "mode": mode, "head_dim": 128, "causal": causal, "seqlen_k": seqlen, "notes": {}}
    entries = {name: {"tflops": tflops, "ms": 1e3 / tflops} for name, tflops in results.items()}
    label = f"d128 s{seqlen}"
    return {**row, "id": f"{seqlen}{causal}", "label": label, "sm_mhz": 0.8 * MACHINE.clock / 1e6, "results": entries}


def grid():
    rows = [cell("fwd", 4096, {"ours": 1.0}), cell("fwd", 16384, {"ours": 0.6 * PEAK})]
    rows += [cell("bwd", 16384, {"ours": 0.4 * PEAK}), cell("fwd", 16384, {"naive": 5.0}, causal=True)]
    return {**origin(), "build": {}, "dtype": "bfloat16", "rows": rows}


def ladder():
    names = ("baseline", "autotuned", "descriptors")
    rungs = [{"name": name, "over": over, "kept": True, "modes": ["fwd"]} for name, over in zip(names, ("", *names))]
    rows = [cell("fwd", s, {"baseline": 100.0, "autotuned": 200.0, "descriptors": 300.0, "ours": 600.0})
            for s in (1024, 2048)]  # fmt: skip
    return {**origin(), "build": {}, "dtype": "bfloat16", "rungs": rungs, "rows": rows}


def ablation():
    """Two kernels of the Hopper forward, one for each mask, and a ladder of the other family."""

    def entry(kind, label, **times):
        return {"kind": kind, "label": label, "ms": {f"{mask} 1024": ms for mask, ms in times.items()}}

    hopper = [
        entry("ladder", "full: in use", full=1.0),
        entry("switch", "full: no speculation", full=1.25),
        entry("ladder", "causal: in use", causal=2.0),
        entry("switch", "causal: no speculation", causal=2.5),
    ]
    other = [entry("ladder", "plain loads", full=4.0), entry("ladder", "today's tile", full=1.0)]
    families = {"wgmma": {"128": {"entries": hopper}}, "mma_sync": {"64": {"entries": other}}}
    return {**origin(), "families": families}


def test_the_backward_is_compared_with_the_forward_and_with_the_bounds():
    lines = retrospective_page.backward_block(grid())
    steps = step_model.steps()
    (unit, share), (_, forward) = (steps[mode][128].bound for mode in ("bwd", "fwd"))
    wanted = f"| 128 | full | {0.6 * PEAK:.0f} | {0.4 * PEAK:.0f} | 0.67 | {share / forward:.2f} | {unit} |"
    assert lines[2] == wanted and lines[3] == ""  # causal has no backward of ours
    assert "commit 0123456789ab" in lines[-1]


def test_the_limit_is_a_product_of_three():
    lines = retrospective_page.limit_block(grid())
    _, share = step_model.steps()["bwd"][128].bound
    assert lines[2].endswith("| 60% | 80% | 100% (tensor cores) | 75% |")
    assert lines[3].endswith(f"| 40% | 80% | {share:.0%} (shared memory) | {0.4 / 0.8 / share:.0%} |")


def test_steps_of_the_ladder_and_how_near_it_comes():
    lines = retrospective_page.triton_block(ladder())
    assert "| fwd | `autotuned` | `baseline` | 2.00× | 2.00× (d128 s1024) |" in lines
    assert "| fwd | `descriptors` | `ours` | 0.50× | 0.50× (d128 s1024) |" in lines


def test_switches_are_compared_with_the_kernel_of_their_mask():
    lines = retrospective_page.techniques_block(ablation())
    assert "| Hopper forward, d 128 | full: no speculation | -20.0 |" in lines
    assert "| Hopper forward, d 128 | causal: no speculation | -20.0 |" in lines
    assert "| mma.sync forward, d 64 | the whole ladder, from plain loads to today's tile | 4.00× |" in lines
    assert ablate_report.in_use({"entries": []}) is None


def test_without_results_there_are_no_figures():
    blocks = retrospective_page.blocks(None, None, None)
    assert all(len(lines) == 1 and lines[0].startswith("Not measured yet: ") for lines in blocks.values())


def test_the_page_is_what_the_results_say():
    if not (ROOT / "benchmarks" / "results").is_dir():
        pytest.skip("a source distribution has no results")
    text = (ROOT / retrospective_page.PAGE).read_text(encoding="utf-8")
    assert retrospective_page.page(text, ROOT) == text, "python benchmarks/report.py --docs"
