"""Tables, scores and plots of a benchmark result, and the published figures.

python benchmarks/report.py RESULT.json                 print the table and the scores
python benchmarks/report.py --plots RESULT.json OUTDIR  draw the plots (needs matplotlib)
python benchmarks/report.py --readme RESULT.json        rewrite the figures block of README.md from the result
python benchmarks/report.py --docs                      write docs/benchmarks.md, and blocks of README.md and of
                                                        docs/{theory,retrospective,fp8,context_parallel,tuning/*}.md
"""

from __future__ import annotations

import argparse
import sys
from collections import Counter
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent))  # absent under PYTHONSAFEPATH

from benchmarks_page import ROOT, write_docs
from kvcache_plots import write_kvcache_plots
from markdown_tables import figures_block, rewritten
from plots import write_plots
from scores import (
    PLAIN,
    ceiling_lines,
    environment_line,
    load,
    memory_lines,
    overhead_lines,
    score_lines,
    share_of_plain,
    speed,
)


def row_cell(row, name):
    """TFLOPS or GB/s, and (speed of ours to it), of one implementation in one row."""
    entry, mine = row["results"].get(name), row["results"].get("ours")
    if entry is None:
        return "–"
    ratio = f"({entry['ms'] / mine['ms']:.2f}x)" if mine and name != "ours" else ""
    return f"{speed(row, name):>8} {ratio:>8}"


def table(result):
    """One line per row: ms of ours, then a column for each implementation that gave any result."""
    names = [name for name in result["implementations"] if name != PLAIN]
    names = [name for name in names if any(name in row["results"] for row in result["rows"])]
    lines, group = [f"{'ms, TFLOPS (speed of ours to it)':<57}" + "".join(f"{name:>18}" for name in names)], None
    for row in result["rows"]:
        if row["group"] != group:
            group = row["group"]
            lines.append(f"-- {group}" + (" (GB/s of keys and values)" if row.get("bytes") else ""))
        ours = f"{row['results']['ours']['ms']:9.4f}" if "ours" in row["results"] else f"{'–':>9}"
        clock = f" {row['sm_mhz']:6.0f} MHz" if row.get("sm_mhz") else ""
        cells = "".join(f"{row_cell(row, name):>18}" for name in names)
        lines.append(f"{row['label']:<38} {row['mode']:<8} {ours}{cells}{clock}")
    return lines + missing_lines(result)


def missing_lines(result):
    """What was not measured and why, one line per implementation."""
    reasons = {}
    for row in result["rows"]:
        for name, reason in row["notes"].items():
            reasons.setdefault(name, Counter())[f"{row['mode']}: {reason}"] += 1
    return [
        f"not measured: {name}, " + "; ".join(f"{count} rows {reason}" for reason, count in counts.items())
        for name, counts in reasons.items()
    ]


def time_lines(result):
    """What the rows took, set-up included."""
    seconds = Counter()
    for row in result["rows"]:
        seconds[f"{row['group']} {row['mode']}"] += row.get("seconds", 0.0)
    figures = ", ".join(f"{key} {value:.1f}" for key, value in seconds.items() if value)
    return [f"seconds, set-up included: {figures}"] if figures else []


def relative_lines(result):
    """Speed of ours in rows with features or packed sequences, relative to its plain dense call beside it."""
    shares = [(row, share_of_plain(row)) for row in result["rows"]]
    lines = [f"  {share:.3f} {row['label']} {row['mode']}" for row, share in shares if share is not None]
    return ["speed of ours relative to its plain dense call (TFLOPS)", *lines] if lines else []


def full_report(result):
    """The whole report; the scores of the cells are the last lines."""
    lines = table(result) + [environment_line(result)] + overhead_lines(result) + memory_lines(result)
    lines += time_lines(result) + ceiling_lines(result) + relative_lines(result)
    for group in sorted(result["groups"], key=lambda group: group == "cells"):
        lines += score_lines(result, group)
    return lines


def plot_lines(result, folder):
    """Draws the plots and returns what to tell about them."""
    try:
        caption = environment_line(result)
        paths = write_plots(result, folder, caption) + write_kvcache_plots(result, folder, caption)
        return [str(path) for path in paths]
    except ImportError as error:
        return [f"no plots: {error}; draw them later: python benchmarks/report.py --plots RESULT.json OUTDIR"]


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("result", nargs="?", type=Path, help="JSON written by benchmarks/run.py")
    parser.add_argument("outdir", nargs="?", help="folder of the plots (default: beside the result)")
    parser.add_argument("--plots", action="store_true", help="draw the plots instead of printing")
    parser.add_argument("--readme", action="store_true", help="rewrite the figures block instead of printing")
    parser.add_argument("--docs", action="store_true", help="write the documents instead of printing")
    parser.add_argument("--file", type=Path, default=ROOT / "README.md", help="the file with the figures block")
    options = parser.parse_args()
    if options.docs:
        print("\n".join(f"{path}: written" for path in write_docs()))
        return
    if options.result is None:
        parser.error("a result is needed, or --docs")
    result = load(options.result)
    if options.plots:
        print("\n".join(plot_lines(result, options.outdir or options.result.with_suffix(""))))
    elif options.readme:
        path = options.result.resolve()
        source = path.relative_to(ROOT) if ROOT in path.parents else path.name
        options.file.write_text(rewritten(options.file.read_text(), "figures", figures_block(result, source)))
        print(f"{options.file}: figures rewritten from {source}")
    else:
        print("\n".join(full_report(result)))


if __name__ == "__main__":
    main()
