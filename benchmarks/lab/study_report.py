"""What an ablation and a sweep found, as tables in Markdown."""

from __future__ import annotations

from statistics import geometric_mean

from markdown_tables import markdown_table
from results import run_line

FORWARDS = {"mma_sync": "mma.sync forward", "wgmma": "Hopper forward"}
KERNELS = {f"fwd_{family}": title for family, title in FORWARDS.items()}


# ---- both ------------------------------------------------------------------------------------------------------------


def ratios(entry, base):
    """[time of base / time of entry] of the cells that both have."""
    return [base["ms"][cell] / ms for cell, ms in entry["ms"].items() if base and cell in base["ms"]]


def resource_cells(entry):
    """Registers and spills, shared memory, CTAs of how many warps, instructions of the loop and of them for an MMA."""
    facts = entry.get("facts")
    if not facts:
        return ["–"] * 4
    loop = facts["loop"] or {}
    mma, text = loop.get("HMMA") or loop.get("HGMMA"), str(loop.get("all", "–"))
    note = ", serialised" if facts["serialized"] else ""
    occupancy = f"{facts['ctas_per_sm']} × {facts['threads'] // 32}"
    loop_text = f"{text} ({loop['all'] / mma:.1f})" if mma else text
    return [f"{facts['registers']}, {facts['spills']}{note}", f"{facts['smem_bytes'] / 1024:.1f}", occupancy, loop_text]


def table(title, found, rows, scores):
    """rows: [(entry, label, a cell for each of `scores`)]; TFLOPS of each cell of the problem, resources."""
    lines = []
    for entry, label, figures in rows:
        speeds = [f"{flops / entry['ms'][cell] / 1e9:.0f}" if cell in entry["ms"] else "–"
                  for cell, flops in found["flops"].items()]  # fmt: skip
        lines.append([label, *figures, *speeds, *resource_cells(entry)])
    resources = ["registers, spills", "KB", "CTAs × warps", "loop (an MMA)"]
    return markdown_table([title, *scores, *found["flops"], *resources], lines)


def left_out(title, found):
    return [f"- left out: {title}, {e['label']}: {e['failed']}" for e in found["entries"] if e.get("failed")]


# ---- ablation --------------------------------------------------------------------------------------------------------


def measured(found, kind):
    return [entry for entry in found["entries"] if entry["kind"] == kind and entry["ms"]]


def in_use(found):
    """{"ms": …} of the design in use: the last of the ladder, or both kernels of a head dim that has one for each mask;
    None if it was left out."""
    entries = [entry for entry in found["entries"] if entry["kind"] == "ladder"]
    kernels = [entry for entry in entries if entry["label"].endswith("in use")] or entries[-1:]
    times = {cell: ms for entry in kernels for cell, ms in entry["ms"].items()}
    return {"ms": times} if times else None


def percent(entry, base):
    """Change of speed, geometric mean over the cells that both have."""
    found = ratios(entry, base)
    return f"{100 * (geometric_mean(found) - 1):+.1f}" if found else "–"


def ladder(found):
    """[(entry, the one before it or None)]"""
    entries = measured(found, "ladder")
    return list(zip(entries, [None, *entries]))


def ablation(result):
    """Every family and head dim: steps of the ladder against the row before, switches against the design in use."""
    lines = [run_line(result)]
    for family, dims in result["families"].items():
        for head_dim, found in dims.items():
            title, base = f"{FORWARDS[family]}, head dim {head_dim}", in_use(found)
            for pairs in (ladder(found), [(entry, base) for entry in measured(found, "switch")]):
                rows = [(entry, entry["label"], [percent(entry, other)]) for entry, other in pairs]
                lines += ["", *table(title, found, rows, ["Δ %"])]
            lines += ["", *left_out(title, found)]
    return "\n".join(lines)


def ladder_table(result):
    """The ladder of each head dim: TFLOPS, geometric mean of its cells, and the change against the row before."""
    columns = {}
    for head_dim, found in result["families"]["mma_sync"].items():
        cells = columns.setdefault(f"d {head_dim}", {})
        for entry, before in ladder(found):
            rate = geometric_mean(found["flops"][cell] / ms / 1e9 for cell, ms in entry["ms"].items())
            cells[entry["label"]] = f"{rate:.0f}" + (f" ({percent(entry, before)})" if before else "")
            shares = ratios(entry, {"ms": found.get("peer_ms", {})})
            if shares:
                of_peer = columns.setdefault(f"d {head_dim}, % of FlashAttention-2", {})
                of_peer[entry["label"]] = f"{100 * geometric_mean(shares):.0f}"
    return side_by_side("each row adds", columns)


def switch_table(result, family):
    """Change of speed in percent with one thing changed, a column for each kernel in use."""
    columns = {}
    for head_dim, found in result["families"][family].items():
        for entry in measured(found, "switch"):
            kernel, _, label = entry["label"].rpartition(": ")
            cells = columns.setdefault(f"d {head_dim} {kernel}".strip(), {})
            cells[label] = percent(entry, in_use(found))
    return side_by_side(f"{FORWARDS[family]}: one thing changed", columns)


def side_by_side(title, columns):
    """{column: {label: cell}} as one table."""
    labels = dict.fromkeys(label for cells in columns.values() for label in cells)
    rows = [[label, *(cells.get(label, "–") for cells in columns.values())] for label in labels]
    return markdown_table([title, *columns], rows)


# ---- sweep -----------------------------------------------------------------------------------------------------------


def scored(group):
    """[(entry, score, worst)] best first, of those that were timed: geometric mean and least of their speeds relative
    to the tile in use. Without the tile in use: []."""
    base = next((entry for entry in group["entries"] if entry["kind"] == "in use"), None)
    found = [(entry, ratios(entry, base)) for entry in group["entries"]]
    rows = [(entry, geometric_mean(values), min(values)) for entry, values in found if values]
    return sorted(rows, key=lambda row: -row[1])


def group_title(group):
    masks = "" if len(group["masks"]) > 1 else f", {group['masks'][0]}"
    return f"{KERNELS[group['kernel']]}, d {group['head_dim']} {group['dtype']}{masks}"


def summary(result):
    """A line a group: the tile in use, and the fastest of the others with its score and worst cell."""
    rows = []
    for group in result["groups"]:
        found = scored(group)
        used = next((entry["label"] for entry, *_ in found if entry["kind"] == "in use"), "–")
        others = [(entry["label"], f"{score:.3f} ({worst:.3f})") for entry, score, worst in found
                  if entry["kind"] != "in use"]  # fmt: skip
        rows.append([group_title(group), used, *(others[0] if others else ("–", "–"))])
    return markdown_table(["kernel", "tile in use", "fastest other", "its score (worst)"], rows)


def sweep(result):
    """All tables, the fastest tile first; then what was left out."""
    lines, missing = [run_line(result)], []
    for group in result["groups"]:
        title, found, rows = group_title(group), scored(group), []
        for entry, score, worst in found:
            label = entry["label"] + (" (in use)" if entry["kind"] == "in use" else "")
            rows.append((entry, label, [f"{score:.3f}", f"{worst:.3f}"]))
        lines += ["", *table(title, group, rows, ["score", "worst"])]
        missing += left_out(title, group)
    return "\n".join([*lines, "", *missing])
