"""What an ablation and a sweep found, as tables in Markdown."""

from __future__ import annotations

from statistics import geometric_mean

from markdown_tables import markdown_table
from results import run_line

FORWARDS = {"mma_sync": "mma.sync forward", "wgmma": "Hopper forward"}


def ratios(entry, base):
    """[time of base / time of entry] of the cells that both have."""
    return [base["ms"][cell] / ms for cell, ms in entry["ms"].items() if base and cell in base["ms"]]


def measured(found, kind):
    return [entry for entry in found["entries"] if entry["kind"] == kind and entry["ms"]]


def side_by_side(title, columns):
    """{column: {label: cell}} as one table."""
    labels = dict.fromkeys(label for cells in columns.values() for label in cells)
    rows = [[label, *(cells.get(label, "–") for cells in columns.values())] for label in labels]
    return markdown_table([title, *columns], rows)


# ---- ablation --------------------------------------------------------------------------------------------------------


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


def ladder_table(result):
    """The ladder of each head dim: TFLOPS, geometric mean of its cells, and the change against the row before."""
    columns = {}
    for head_dim, found in result["families"].get("mma_sync", {}).items():
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


def switch_tables(result):
    tables = [switch_table(result, family) for family in result["families"]]
    return [line for table in tables for line in ("", *table)][1:]


def ablation(result):
    return "\n".join([run_line(result), "", *ladder_table(result), "", *switch_tables(result)])


# ---- sweep -----------------------------------------------------------------------------------------------------------


def scored(group):
    """[(entry, score, worst)] best first, of those that were timed: geometric mean and least of their speeds relative
    to the tile in use. Without the tile in use: []."""
    base = next((entry for entry in group["entries"] if entry["kind"] == "in use"), None)
    found = [(entry, ratios(entry, base)) for entry in group["entries"]]
    rows = [(entry, geometric_mean(values), min(values)) for entry, values in found if values]
    return sorted(rows, key=lambda row: -row[1])


def sweep_table(result):
    """A line a group: the tile in use, and the fastest of the others with its score and worst cell."""
    rows = []
    for group in result["groups"]:
        found = scored(group)
        used = next((entry["label"] for entry, *_ in found if entry["kind"] == "in use"), "–")
        others = [(entry["label"], f"{score:.3f} ({worst:.3f})") for entry, score, worst in found
                  if entry["kind"] != "in use"]  # fmt: skip
        rows.append([group["title"], used, *(others[0] if others else ("–", "–"))])
    return markdown_table(["Hopper forward", "tile in use", "fastest other", "its score (worst)"], rows)


def sweep(result):
    return "\n".join([run_line(result), "", *sweep_table(result)])
