"""What a sweep found: the tables of docs/tuning/sweeps.md, and lines for plan/tiles.h. Plain data."""

from __future__ import annotations

from pathlib import Path
from statistics import geometric_mean

from markdown_tables import markdown_table, rewritten
from scores import run_line, stored_path

PAGE = Path("docs", "tuning", "sweeps.md")
RESULT = stored_path("sweep")
BLOCK = "sweeps"
TITLES = {
    "fwd_mma_sync": "mma.sync forward",
    "fwd_wgmma": "Hopper forward",
    "bwd_mma_sync": "mma.sync backward",
    "bwd_wgmma": "Hopper backward",
}
MARGIN = 1.01  # what a tile must gain over the one in use to be proposed


def scored(group):
    """[(entry, score, worst)] best first, of those that were timed. score: geometric mean over the cells of (time of
    the tile in use / time of this one); worst: the least of these ratios. Without the tile in use: []."""
    base = next((entry["ms"] for entry in group["entries"] if entry["kind"] == "in use"), {})
    rows = []
    for entry in group["entries"]:
        ratios = [base[cell] / ms for cell, ms in entry["ms"].items() if cell in base]
        if ratios:
            rows.append((entry, geometric_mean(ratios), min(ratios)))
    return sorted(rows, key=lambda row: -row[1])


def cells_of(groups):
    return list(dict.fromkeys(cell for group in groups for cell in group["flops"]))


def kernel_table(groups):
    """All groups of one kernel."""
    cells = cells_of(groups)
    rows = []
    for group in groups:
        name = f"{group['head_dim']} {group['dtype']}"
        found = scored(group)
        for index, (entry, score, worst) in enumerate(found):
            label = f"**{entry['label']}**" if index == 0 else entry["label"]
            label += " (in use)" if entry["kind"] == "in use" else ""
            facts = entry["facts"]
            resources = f"{facts['registers']}, {facts['spills']}" + (", serialised" if facts["serialized"] else "")
            speeds = [f"{group['flops'][cell] / entry['ms'][cell] / 1e9:.0f}" if cell in entry["ms"] else "–"
                      for cell in cells]  # fmt: skip
            memory = f"{facts['smem_bytes'] / 1024:.0f}"
            rows.append([name, label, resources, memory, f"{score:.3f}", f"{worst:.3f}", *speeds])
    return markdown_table(["head dim", "tile", "registers, spills", "KB", "score", "worst", *cells], rows)


def proposals(result):
    """Lines: what tiles are faster than those in use, as lines of plan/tiles.h."""
    lines = []
    for group in result["groups"]:
        found = scored(group)
        if found and found[0][0]["kind"] != "in use" and found[0][1] >= MARGIN:
            entry, score, worst = found[0]
            masks = "" if len(group["masks"]) > 1 else f", {group['masks'][0]}"
            what = f"{TITLES[group['kernel']]}, {group['head_dim']} {group['dtype']}{masks}"
            lines.append(f"- {what}: `{entry['line']}` {score:.3f} × the tile in use, worst {worst:.3f}")
    return lines or ["- none"]


def left_out(result):
    entries = [(group, entry) for group in result["groups"] for entry in group["entries"] if entry["failed"]]
    return [f"- left out: {TITLES[group['kernel']]}, {group['head_dim']} {group['dtype']}, {entry['label']}: "
            f"{entry['failed']}" for group, entry in entries]  # fmt: skip


def report(result):
    """The tables as Markdown."""
    lengths = ", ".join(map(str, result["seqlens"]))
    lines = [
        run_line(result),
        f"Score: geometric mean of the speed relative to the tile in use, over full and causal at s {lengths}; worst: "
        "the least of these; then TFLOPS.",
    ]
    for kernel, title in TITLES.items():
        groups = [group for group in result["groups"] if group["kernel"] == kernel]
        if groups:
            lines += ["", f"### {title}", "", *kernel_table(groups)]
    lines += ["", f"### Faster than the tile in use by {100 * MARGIN - 100:.0f} % or more", "", *proposals(result)]
    return [*lines, *left_out(result)]


def block(result):
    return report(result) if result else ["Not measured yet: `python benchmarks/lab.py sweep` does."]


def page(text, result):
    return rewritten(text, BLOCK, block(result))
