"""The generated tables of the laboratory's page (README.md) and of examples/minimal and examples/hopper."""

from __future__ import annotations

import sys

import study_report
import triton_report
from markdown_tables import markdown_table, mask, wrapped
from results import ROOT, environment_line, run_line, stored
from scores import rows_of

SHEET_TFLOPS, SHEET_MHZ = 989.4, 1830  # data sheet of an H100 SXM
# The tensor cores' share of a step's clocks, by the tables of docs/hopper.md; above d 128 five products of seven count.
BOUNDS = {
    ("fwd", 64): 1.0, ("fwd", 128): 1.0, ("fwd", 256): 1.0,
    ("bwd", 64): 1280 / 1536, ("bwd", 128): 2560 / 2816, ("bwd", 256): 10 / 14 * 3584 / 3840,
}  # fmt: skip


def ablation_ladder():
    result = stored("ablate")
    return [*study_report.ladder_table(result), "", run_line(result)]


def ablation_switches():
    return study_report.switch_tables(stored("ablate"))


def sweep():
    result = stored("sweep")
    return [*study_report.sweep_table(result), "", run_line(result)]


def triton_ladder():
    return [*triton_report.steps_table(), "", *triton_report.measured(stored("triton_ladder"))]


def triton_b4h8():
    plot = "![the Triton ladder, forward and backward, head dim 128](../results/plots/triton_b4h8_fwd_bwd_d128.png)"
    return [*triton_report.measured(stored("triton_b4h8")), "", plot]


def limit():
    """The longest calls of the grid as a part of the data sheet, and the parts of that part."""
    result, lines = stored("grid"), []
    longest = max(row["seqlen_k"] for row in rows_of(result, "cells"))
    for row in rows_of(result, "cells"):
        bound = BOUNDS.get((row["mode"], row["head_dim"]))
        if row["seqlen_k"] == longest and bound and row["sm_mhz"]:
            tflops, clock = row["results"]["ours"]["tflops"], row["sm_mhz"] / SHEET_MHZ
            parts = (tflops / SHEET_TFLOPS, clock, bound, tflops / SHEET_TFLOPS / clock / bound)
            cells = [row["mode"], str(row["head_dim"]), mask(row["causal"]), f"{tflops:.0f}"]
            lines.append([*cells, *(f"{part:.0%}" for part in parts)])
    told = f"s {longest}, {result['dtype']}, {environment_line(result)}."
    header = ["mode", "d", "mask", "TFLOPS", "of the data sheet", "clock", "bound", "rest"]
    return [*markdown_table(header, lines), "", *wrapped(told)]


def minimal():
    return tables().table(stored("minimal")).splitlines()


def hopper():
    return tables().hopper_table(stored("minimal")).splitlines()


def tables():
    sys.path.append(str(ROOT / "examples" / "minimal"))
    import table

    return table


BLOCKS = {
    "benchmarks/lab/README.md": {
        "ablation_ladder": ablation_ladder,
        "ablation_switches": ablation_switches,
        "sweep": sweep,
        "triton_ladder": triton_ladder,
        "triton_b4h8": triton_b4h8,
        "limit": limit,
    },
    "examples/minimal/README.md": {"minimal": minimal},
    "examples/hopper/README.md": {"hopper": hopper},
}
