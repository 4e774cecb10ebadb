"""The blocks of docs/retrospective.md, from the results of the grid, the ablation and the Triton ladder."""

from __future__ import annotations

from pathlib import Path
from statistics import geometric_mean

import ablate_report
import step_model
import theory_model
import triton_ladder_page as ladder
from markdown_tables import markdown_table, rewritten
from scores import environment_line, load_stored, ratios, rows_of, run_line, significant, stored_path

PAGE = Path("docs", "retrospective.md")
GRID = stored_path("grid")
MOST_TECHNIQUES = 5  # of each kernel


def missing(experiment):
    return [f"Not measured yet: `python benchmarks/lab.py {experiment}` does."]


def longest_rows(result):
    """[(head dim, causal, {mode: row})] of the cells at their longest sequence, where ours has forward and backward."""
    cells = [row for row in rows_of(result, "cells") if "ours" in row["results"]]
    longest = max(row["seqlen_k"] for row in cells)
    found = {}
    for row in cells:
        if row["seqlen_k"] == longest:
            found.setdefault((row["head_dim"], row["causal"]), {})[row["mode"]] = row
    return [(*cell, rows) for cell, rows in sorted(found.items()) if {"fwd", "bwd"} <= set(rows)]


def mask(causal):
    return "causal" if causal else "full"


def told_of_grid(result):
    longest = max(row["seqlen_k"] for row in rows_of(result, "cells"))
    return f"s {longest}, {result['dtype']}, {environment_line(result)}, from `{GRID}`."


def backward_block(result):
    """Forward and backward of the longest rows, and what the bounds of a step explain of their ratio."""
    if result is None:
        return missing("grid")
    steps, rows = step_model.steps(), []
    for head_dim, causal, row in longest_rows(result):
        tflops = {mode: row[mode]["results"]["ours"]["tflops"] for mode in ("fwd", "bwd")}
        bounds = {mode: steps[mode][head_dim].bound for mode in ("fwd", "bwd")}
        cells = [significant(tflops["fwd"]), significant(tflops["bwd"]), f"{tflops['bwd'] / tflops['fwd']:.2f}"]
        unit, share = bounds["bwd"]
        cells += [f"{share / bounds['fwd'][1]:.2f}", unit]
        rows.append([str(head_dim), mask(causal), *cells])
    header = ["d", "mask", "forward, TFLOPS", "backward", "backward ÷ forward", "by the bounds", "bound by"]
    return [*markdown_table(header, rows), "", told_of_grid(result)]


def triton_block(result):
    """What each step of the ladder gave, and how near the comparator comes to its peers."""
    if result is None:
        return missing("triton_ladder")
    names = [rung for rung in result["rungs"] if rung["over"]]
    rows = []
    for mode in ladder.MODES:
        pairs = [(rung["name"], rung["over"], "" if rung["kept"] else ", not kept") for rung in names]
        pairs += [(ladder.last_rung(mode), peer, "") for peer in ladder.PEERS]
        for name, base, kept in pairs:
            found = ratios(result, result, base, mode, "cells", name)
            if found:
                label, worst = min(found, key=lambda item: item[1])
                mean = geometric_mean([ratio for _, ratio in found])
                rows.append([mode, f"`{name}`{kept}", f"`{base}`", f"{mean:.2f}×", f"{worst:.2f}× ({label})"])
    table = markdown_table(["mode", "speed of", "relative to", "geometric mean", "worst"], rows)
    return [*table, "", f"{result['dtype']}, {environment_line(result)}, from `{ladder.RESULT}`."]


def techniques_block(result):
    """The switches that cost most, of each kernel, and what the ladder of the mma.sync forward gives in all."""
    if result is None:
        return missing("ablate")
    rows = []
    for family, dims in result["families"].items():
        for head_dim, found in dims.items():
            base = ablate_report.in_use(found)
            switches = ablate_report.measured(found, "switch")
            speeds = [(entry["label"], ablate_report.speed(entry, base)) for entry in switches]
            known = sorted((pair for pair in speeds if pair[1] is not None), key=lambda pair: pair[1])
            title = f"{ablate_report.TITLES[family]}, d {head_dim}"
            rows += [[title, label, ablate_report.percent(ratio)] for label, ratio in known[:MOST_TECHNIQUES]]
            ladder_entries = ablate_report.measured(found, "ladder")
            if family == "mma_sync" and len(ladder_entries) > 1:
                gain = ablate_report.speed(ladder_entries[-1], ladder_entries[0])
                rows.append([title, "the whole ladder, from plain loads to today's tile", f"{gain:.2f}×"])
    table = markdown_table(["kernel", "one thing changed", "speed, %"], rows)
    return [*table, "", f"{run_line(result)} From `{ablate_report.RESULT}`."]


def limit_block(result):
    """The parts of the data sheet's rate that the longest rows reach, as a product of three."""
    if result is None:
        return missing("grid")
    machine, steps, rows = theory_model.machine_of(result), step_model.steps(), []
    for head_dim, causal, by_mode in longest_rows(result):
        for mode in ("fwd", "bwd"):
            row = by_mode[mode]
            tflops = row["results"]["ours"]["tflops"]
            reached = tflops * 1e12 / machine.flops
            clock = row["sm_mhz"] * 1e6 / machine.clock if row.get("sm_mhz") else None
            unit, share = steps[mode][head_dim].bound
            rest = f"{reached / clock / share:.0%}" if clock else "–"
            cells = [significant(tflops), f"{reached:.0%}", f"{clock:.0%}" if clock else "–", f"{share:.0%} ({unit})"]
            rows.append([str(head_dim), mask(causal), mode, *cells, rest])
    header = ["d", "mask", "mode", "TFLOPS", "of the data sheet", "clock", "bound", "rest"]
    told = f"Data sheet of an {machine.name}: {machine.flops / 1e12:.0f} TFLOPS at {machine.clock / 1e6:.0f} MHz. "
    return [*markdown_table(header, rows), "", told + told_of_grid(result)]


def blocks(grid, ablation, triton):
    return {
        "retrospective_backward": backward_block(grid),
        "retrospective_triton": triton_block(triton),
        "retrospective_techniques": techniques_block(ablation),
        "retrospective_limit": limit_block(grid),
    }


def page(text, root):
    """The page's `text` with its blocks written anew from what is stored below `root`."""
    results = (load_stored(root / path) for path in (GRID, ablate_report.RESULT, ladder.RESULT))
    for name, block in blocks(*results).items():
        text = rewritten(text, name, block)
    return text
