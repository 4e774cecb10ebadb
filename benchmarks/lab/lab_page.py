"""The generated parts of the laboratory's page (README.md), of docs/hopper.md and of examples/minimal/README.md."""

from __future__ import annotations

import sys

import step_model
import study_report
import theory
import triton_report
from markdown import markdown_table, mask, wrapped
from results import ROOT, environment_line, run_line, stored
from scores import rows_of, significant

TILE_TABLES = {"fwd": "kSm90FwdTiles", "bwd": "kSm90BwdTiles"}


def theory_kernels():
    return theory.kernels_block(theory.machine_of(stored("grid")))


def ablation_ladder():
    result = stored("ablate")
    return [*study_report.ladder_table(result), "", run_line(result)]


def ablation_switches():
    result = stored("ablate")
    tables = [study_report.switch_table(result, family) for family in result["families"]]
    return [*tables[0], "", *tables[1]]


def sweep():
    result = stored("sweep")
    return [*study_report.summary(result), "", run_line(result)]


def triton_ladder():
    return triton_report.block(stored("triton_ladder"))


def limit():
    """The parts of the data sheet's rate that the longest rows reach, as a product of three."""
    result = stored("grid")
    machine, steps, rows = theory.machine_of(result), step_model.steps(), []
    cells = [row for row in rows_of(result, "cells") if "ours" in row["results"]]
    longest = max(row["seqlen_k"] for row in cells)
    for row in cells:
        if row["seqlen_k"] != longest or row["mode"] not in steps:
            continue
        reached = row["results"]["ours"]["tflops"] * 1e12 / machine.flops
        clock = row["sm_mhz"] * 1e6 / machine.clock
        unit, share = steps[row["mode"]][row["head_dim"]].bound
        shape = [str(row["head_dim"]), mask(row["causal"]), row["mode"], significant(row["results"]["ours"]["tflops"])]
        parts = [f"{clock:.0%}", f"{share:.0%} ({unit})", f"{reached / clock / share:.0%}"]
        rows.append([*shape, f"{reached:.0%}", *parts])
    header = ["d", "mask", "mode", "TFLOPS", "of the data sheet", "clock", "bound", "rest"]
    told = f"Data sheet of an {machine.name}: {machine.flops / 1e12:.0f} TFLOPS at {machine.clock / 1e6:.0f} MHz. "
    told += f"s {longest}, {result['dtype']}, {environment_line(result)}."
    return [*markdown_table(header, rows), "", *wrapped(told)]


def bound_rows(mode, units):
    """Head dim, tile and the clocks of some units, of each row of a table of plan/tiles.h."""
    steps = step_model.steps()[mode]
    tiles = step_model.tile_rows(TILE_TABLES[mode])
    return [
        [str(d), f"{tiles[d][1]} × {tiles[d][2]}", *(f"{steps[d].clocks[unit]:.0f}" for unit in units)]
        for d in sorted(tiles)
    ]


def forward_bounds():
    rows = bound_rows("fwd", ("tensor cores", "exp2", "shared memory"))
    rows = [[*row, f"{4096 / int(row[1].split()[0]):.1f}"] for row in rows]
    header = ["d", "M × N", "tensor cores 4 M N d / 4096", "exp2 M N / 16", "shared memory, operands"]
    return markdown_table([*header, "L2, B per clock 4096 / M"], rows)


def backward_bounds():
    units = ("tensor cores", "shared memory", "exp2", "additions to dQ")
    return markdown_table(["d", "M × N", *units[:3], "additions to dQ, 4 M d / 16"], bound_rows("bwd", units))


def minimal():
    sys.path.append(str(ROOT / "examples" / "minimal"))
    from table import table

    return table(stored("minimal")).splitlines()


BLOCKS = {
    "benchmarks/lab/README.md": {
        "theory_kernels": theory_kernels,
        "ablation_ladder": ablation_ladder,
        "ablation_switches": ablation_switches,
        "sweep": sweep,
        "triton_ladder": triton_ladder,
        "limit": limit,
    },
    "examples/minimal/README.md": {"minimal": minimal},
    "docs/hopper.md": {"forward_bounds": forward_bounds, "backward_bounds": backward_bounds},
}
