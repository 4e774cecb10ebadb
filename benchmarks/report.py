"""Tables, scores and plots of a benchmark result, and the figures block of the README.

python benchmarks/report.py RESULT.json                 print the table and the scores
python benchmarks/report.py --plots RESULT.json OUTDIR  draw the plots (needs matplotlib)
python benchmarks/report.py --readme RESULT.json        rewrite the figures block of README.md from the result
"""

from __future__ import annotations

import argparse
import json
import math
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent))  # absent under PYTHONSAFEPATH

from kvcache_plots import gigabytes_per_second, write_kvcache_plots
from plots import PLOTTED_GROUPS, write_plots

ROOT = Path(__file__).resolve().parents[1]
BEGIN, END = "<!-- figures:begin -->", "<!-- figures:end -->"


def load(path):
    return json.loads(Path(path).read_text())


def geometric_mean(values):
    return math.exp(sum(math.log(value) for value in values) / len(values))


def significant(value):
    """Three significant digits without an exponent: 0.0712, 4.31, 648."""
    return f"{value:.{max(0, 2 - math.floor(math.log10(value)))}f}" if value > 0 else "0"


def ratios(result, baseline, peer, mode, group="cells", name="ours"):
    """[(label, time of `peer` in `baseline` ÷ time of `name` in `result`)] of the rows that both have."""
    wanted = (group, mode)  # a problem may be a row of several groups
    theirs = {row["id"]: row["results"] for row in baseline["rows"] if (row["group"], row["mode"]) == wanted}
    found = []
    for row in result["rows"]:
        other = theirs.get(row["id"], {})
        if (row["group"], row["mode"]) == wanted and name in row["results"] and peer in other:
            found.append((row["label"], other[peer]["ms"] / row["results"][name]["ms"]))
    return found


def modes(result):
    return list(dict.fromkeys(row["mode"] for row in result["rows"]))


def score_line(found, title):
    """'title: geometric mean …, worst …' of the (label, ratio) pairs."""
    worst = min(found, key=lambda item: item[1])
    mean = geometric_mean([ratio for _, ratio in found])
    slower = sum(ratio < 1 for _, ratio in found)
    return f"{title}: geometric mean {mean:.3f}x, worst {worst[1]:.3f}x ({worst[0]}), {slower} of {len(found)} slower"


PLAIN = "ours_plain"  # computes another problem than the row's: what the row's share of plain is measured by, no peer
DETERMINISTIC = "ours_deterministic"
OURS = ("ours", DETERMINISTIC, PLAIN)


def compared_names(result):
    """The implementations that compute the rows' own problems."""
    return [name for name in result["implementations"] if name != PLAIN]


def judged_pairs(result):
    """(implementation, peer) of the scores: ours against every peer, our deterministic backward against all others."""
    names = compared_names(result)
    pairs = [("ours", peer) for peer in names if peer not in OURS]
    return pairs + [(DETERMINISTIC, peer) for peer in names if peer != DETERMINISTIC and DETERMINISTIC in names]


def score_lines(result, group="cells"):
    """The scores of a group within one run, one line per mode and pair."""
    lines = []
    for mode in modes(result):
        for name, peer in judged_pairs(result):
            found = ratios(result, result, peer, mode, group, name)
            if found:
                lines.append(score_line(found, f"{group} {mode}, {name} vs {peer}"))
    return lines


def measured_commit(result):
    """The commit of the package that was measured, where its build knows it; else of the tree beside it."""
    built = result["build"].get("commit") or "unknown"
    commit, changed = built.removesuffix("-dirty"), built.endswith("-dirty")
    if commit == "unknown":
        commit, changed = result["git"]["commit"] or "unknown commit", result["git"]["dirty"]
    return commit[:12] + ("+changes" if changed else "")


def environment_line(result):
    device, versions = result["device"], result["versions"]
    parts = [device["name"]]
    parts += [f"driver {device['driver']}"] if device.get("driver") else []
    parts += [f"CUDA {versions['cuda']}"] if device["type"] == "cuda" else [f"{device['threads']} threads"]
    parts += [f"torch {versions['torch']}"]
    parts += [f"cuDNN {versions['cudnn']}"] if device["type"] == "cuda" else []
    clocks = [row["sm_mhz"] for row in result["rows"] if row.get("sm_mhz")]
    parts += [f"SM clock {min(clocks):.0f}–{max(clocks):.0f} MHz"] if clocks else []
    return ", ".join(parts + [f"commit {measured_commit(result)}"])


WIDE_COLUMNS = 4  # with more implementations the table leaves out the milliseconds


def speed(row, name):
    """TFLOPS of an implementation, or GB/s in rows over a KV cache."""
    return significant(gigabytes_per_second(row, name) if row.get("bytes") else row["results"][name]["tflops"])


def row_cell(row, name, wide):
    """ms, TFLOPS or GB/s, and (speed of ours to it) of one implementation in one row."""
    entry, mine = row["results"].get(name), row["results"].get("ours")
    if entry is None:
        return "–"
    ratio = f"({entry['ms'] / mine['ms']:.2f}x)" if mine and name != "ours" else ""
    return (f"{entry['ms']:9.4f} " if wide else "") + f"{speed(row, name):>8} {ratio:>8}"


def table(result):
    """One line per row; the columns are the implementations that gave any result."""
    names = [name for name in compared_names(result) if any(name in row["results"] for row in result["rows"])]
    wide = len(names) <= WIDE_COLUMNS
    width = 27 if wide else 17
    title = ("ms, " if wide else "") + "TFLOPS (speed of ours to it)"
    lines, group = [f"{title:<47}" + " ".join(f"{name:>{width}}" for name in names) + f" {'MHz':>6}"], None
    for row in result["rows"]:
        if row["group"] != group:
            group = row["group"]
            lines.append(f"-- {group}" + (" (GB/s of keys and values)" if row.get("bytes") else ""))
        cells = " ".join(f"{row_cell(row, name, wide):>{width}}" for name in names)
        clock = f"{row['sm_mhz']:6.0f}" if row.get("sm_mhz") else f"{'–':>6}"
        lines.append(f"{row['label']:<38} {row['mode']:<8}{cells} {clock}")
    return lines + missing_lines(result)


def missing_lines(result):
    """What was not measured and why, one line per implementation."""
    reasons = {}
    for row in result["rows"]:
        for name, reason in row["notes"].items():
            counts = reasons.setdefault(name, {})
            key = f"{row['mode']}: {reason}"
            counts[key] = counts.get(key, 0) + 1
    return [
        f"not measured: {name}, " + "; ".join(f"{count} rows {reason}" for reason, count in counts.items())
        for name, counts in reasons.items()
    ]


def memory_lines(result):
    """Device memory that one call adds, per mode and head dim, at the row with most implementations, or the longest."""
    lines = []
    measured = [row for row in result["rows"] if any_peak(row)]
    for mode, head_dim in dict.fromkeys((row["mode"], row["head_dim"]) for row in measured):
        rows = [row for row in measured if (row["mode"], row["head_dim"]) == (mode, head_dim)]
        row = max(rows, key=lambda item: (len(item["results"].keys() - {PLAIN}), item["seqlen_q"]))
        entries = {name: entry for name, entry in row["results"].items() if name != PLAIN}
        figures = ", ".join(f"{name} {memory_text(entry)}" for name, entry in entries.items())
        lines.append(f"memory added by one call ({row['label']} {mode}), MiB of results + other: {figures}")
    return lines


def memory_text(entry):
    peak, results = entry["peak_bytes"] / 2**20, entry["result_bytes"] / 2**20
    return f"{results:.1f} + {peak - results:.1f}"


def any_peak(row):
    return any("result_bytes" in entry for entry in row["results"].values())


def overhead_lines(result):
    lines = []
    for key, problem in (("host_overhead", "b1 s128 h16 d64"), ("host_overhead_cache", "cache, b1 k1024 h32/8 d128")):
        entries = result.get(key)
        if entries:
            figures = ", ".join(f"{name} {entry['median']:.1f}" for name, entry in entries.items())
            lines.append(f"host time of one eager call ({problem}), us: {figures}")
    return lines


def ceiling_lines(result):
    """Share of the read ceiling that ours reaches in each row over a cache."""
    ceiling = result.get("read_ceiling")
    if not ceiling:
        return []
    lines = [f"read ceiling of this run: {ceiling['gbs']:.0f} GB/s ({ceiling['method']}); ours reaches"]
    for row in result["rows"]:
        if row.get("bytes") and row["timing"] != "eager" and "ours" in row["results"]:
            share = gigabytes_per_second(row, "ours") / ceiling["gbs"]
            lines.append(f"  {share:5.1%} {row['group']:<17} {row['label']}")
    return lines


def time_lines(result):
    """What the rows took, set-up included."""
    seconds = {}
    for row in result["rows"]:
        key = f"{row['group']} {row['mode']}"
        seconds[key] = seconds.get(key, 0.0) + row.get("seconds", 0.0)
    figures = ", ".join(f"{key} {value:.1f}" for key, value in seconds.items() if value)
    return [f"seconds, set-up included: {figures}"] if figures else []


def relative_lines(result):
    """Speed of ours in rows with features or packed sequences, relative to the plain dense problem of the same size.

    Results without PLAIN have plain figures of other rows only, which ran at another time and so at other clocks.
    """
    speeds = {(row["id"], row["mode"]): row["results"].get("ours", {}).get("tflops") for row in result["rows"]}
    lines = []
    for row in result["rows"]:
        beside = row["results"].get(PLAIN, {}).get("tflops")
        plain = beside or speeds.get((row.get("plain_id"), row["mode"]))
        if row.get("plain_id") != row["id"] and plain and "ours" in row["results"]:
            share = f"  {row['results']['ours']['tflops'] / plain:.3f} {row['label']} {row['mode']}"
            lines.append(share + ("" if beside else ", plain from a row of its own"))
    return ["speed of ours relative to its plain dense call (TFLOPS)", *lines] if lines else []


def full_report(result):
    """The whole report; the scores are the last lines."""
    lines = table(result) + [environment_line(result)] + overhead_lines(result) + memory_lines(result)
    lines += time_lines(result)
    lines += ceiling_lines(result) + relative_lines(result)
    for group in result["groups"]:
        lines += score_lines(result, group) if group != "cells" else []
    return lines + score_lines(result)


def readme_block(result, source):
    """Markdown of the figures: a table per mode, one row per head dim and mask, one column per sequence length."""
    peers = [name for name in result["implementations"] if name in ("sdpa_flash", "sdpa_cudnn")]
    lines = [
        f"{result['dtype']}, {environment_line(result)}.",
        f"Each entry: TFLOPS of this package (its speed relative to {', '.join(f'`{name}`' for name in peers)}).",
    ]
    for mode in modes(result):
        lines += readme_table(result, mode, peers)
    lines += [""] + [f"- {line}" for line in score_lines(result) + overhead_lines(result) + memory_lines(result)]
    return lines + ["", f"From `{source}`; reproduce with `python benchmarks/run.py --mode {' '.join(modes(result))}`."]


def readme_table(result, mode, peers):
    cells = [row for row in result["rows"] if row["group"] in PLOTTED_GROUPS and row["mode"] == mode]
    cells = [row for row in cells if "ours" in row["results"]]
    lengths = sorted({row["seqlen_k"] for row in cells})
    lines = [
        "",
        f"| {mode}: head dim | mask | " + " | ".join(f"s {length}" for length in lengths) + " |",
        "|---|---|" + "---|" * len(lengths),
    ]
    for head_dim, causal in sorted({(row["head_dim"], row["causal"]) for row in cells}):
        entries = {row["seqlen_k"]: row for row in cells if (row["head_dim"], row["causal"]) == (head_dim, causal)}
        texts = [readme_entry(entries[length], peers) if length in entries else "" for length in lengths]
        lines.append(f"| {head_dim} | {'causal' if causal else 'full'} | " + " | ".join(texts) + " |")
    return lines


def readme_entry(row, peers):
    mine = row["results"]["ours"]
    against = [f"{row['results'][peer]['ms'] / mine['ms']:.2f}×" if peer in row["results"] else "–" for peer in peers]
    return f"{significant(mine['tflops'])} ({', '.join(against)})"


def plot_lines(result, folder):
    """Draws the plots and returns what to tell about them."""
    try:
        caption = environment_line(result)
        paths = write_plots(result, folder, caption) + write_kvcache_plots(result, folder, caption)
        return [str(path) for path in paths]
    except ImportError as error:
        return [f"no plots: {error}; draw them later: python benchmarks/report.py --plots RESULT.json OUTDIR"]


def rewrite_readme(path, block):
    text = path.read_text()
    before, found_begin, rest = text.partition(BEGIN)
    _, found_end, after = rest.partition(END)
    if not (found_begin and found_end):
        raise SystemExit(f"{path}: expected the markers {BEGIN} and {END}")
    path.write_text(before + BEGIN + "\n" + "\n".join(block) + "\n" + END + after)


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("result", help="JSON written by benchmarks/run.py")
    parser.add_argument("outdir", nargs="?", help="folder of the plots (default: beside the result)")
    parser.add_argument("--plots", action="store_true", help="draw the plots instead of printing")
    parser.add_argument("--readme", action="store_true", help="rewrite the figures block instead of printing")
    parser.add_argument("--file", type=Path, default=ROOT / "README.md", help="the file with the figures block")
    arguments = parser.parse_args()
    result = load(arguments.result)
    if arguments.plots:
        folder = arguments.outdir or Path(arguments.result).with_suffix("")
        print("\n".join(plot_lines(result, folder)))
        return
    if not arguments.readme:
        print("\n".join(full_report(result)))
        return
    path = Path(arguments.result).resolve()
    source = path.relative_to(ROOT) if ROOT in path.parents else path.name
    rewrite_readme(arguments.file, readme_block(result, source))
    print(f"{arguments.file}: figures rewritten from {source}")


if __name__ == "__main__":
    main()
