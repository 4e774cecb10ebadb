"""What a sweep found, as tables in Markdown, and lines for plan/tiles.h."""

from __future__ import annotations

from statistics import geometric_mean

from markdown import markdown_table
from results import run_line

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


def group_title(group):
    masks = "" if len(group["masks"]) > 1 else f", {group['masks'][0]}"
    return f"{TITLES[group['kernel']]}, d {group['head_dim']} {group['dtype']}{masks}"


def resources(entry):
    facts = entry["facts"]
    return f"{facts['registers']}, {facts['spills']}" + (", serialised" if facts["serialized"] else "")


def group_table(group):
    """All tiles of a group, the fastest first."""
    cells, rows = list(group["flops"]), []
    for entry, score, worst in scored(group):
        label = entry["label"] + (" (in use)" if entry["kind"] == "in use" else "")
        speeds = [f"{group['flops'][cell] / entry['ms'][cell] / 1e9:.0f}" if cell in entry["ms"] else "–"
                  for cell in cells]  # fmt: skip
        memory = f"{entry['facts']['smem_bytes'] / 1024:.0f}"
        rows.append([label, resources(entry), memory, f"{score:.3f}", f"{worst:.3f}", *speeds])
    return markdown_table([group_title(group), "registers, spills", "KB", "score", "worst", *cells], rows)


def summary(result):
    """A line a group: the tile in use, and the fastest of the others with its score and worst cell."""
    rows = []
    for group in result["groups"]:
        found = scored(group)
        in_use = next((entry["label"] for entry, *_ in found if entry["kind"] == "in use"), "–")
        others = [(entry["label"], f"{score:.3f} ({worst:.3f})") for entry, score, worst in found
                  if entry["kind"] != "in use"]  # fmt: skip
        rows.append([group_title(group), in_use, *(others[0] if others else ("–", "–"))])
    return markdown_table(["kernel", "tile in use", "fastest other", "its score (worst)"], rows)


def proposals(result):
    """Lines: what tiles are faster than those in use, as lines of plan/tiles.h."""
    lines = []
    for group in result["groups"]:
        found = scored(group)
        if found and found[0][0]["kind"] != "in use" and found[0][1] >= MARGIN:
            entry, score, worst = found[0]
            lines.append(f"- {group_title(group)}: `{entry['line']}` {score:.3f} × the tile in use, worst {worst:.3f}")
    return lines or ["- none"]


def report(result):
    """All tables, then what is faster and what was left out."""
    lines = [
        run_line(result),
        f"Score: geometric mean of the speed relative to the tile in use, s {', '.join(map(str, result['seqlens']))}.",
    ]
    for group in result["groups"]:
        lines += ["", *group_table(group)]
    lines += ["", f"Faster than the tile in use by {100 * MARGIN - 100:.0f} % or more:", *proposals(result)]
    left_out = [(group, entry) for group in result["groups"] for entry in group["entries"] if entry["failed"]]
    lines += [f"- left out: {group_title(group)}, {e['label']}: {e['failed']}" for group, e in left_out]
    return "\n".join(lines)
