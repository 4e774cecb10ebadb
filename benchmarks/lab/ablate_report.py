"""What an ablation found, as tables in Markdown."""

from __future__ import annotations

from statistics import geometric_mean

from markdown import markdown_table
from results import run_line

TITLES = {"mma_sync": "mma.sync forward", "wgmma": "Hopper forward"}


def measured(found, kind):
    return [entry for entry in found["entries"] if entry["kind"] == kind and entry["ms"]]


def in_use(found):
    """{"ms": …} of the design in use: the last of the ladder, or both kernels of a head dim that has one for each mask;
    None if it was left out."""
    entries = [entry for entry in found["entries"] if entry["kind"] == "ladder"]
    kernels = [entry for entry in entries if entry["label"].endswith("in use")] or entries[-1:]
    times = {cell: ms for entry in kernels for cell, ms in entry["ms"].items()}
    return {"ms": times} if times else None


def speed(entry, base):
    """Geometric mean over the cells that both have of (time of base / time of entry); None without such a cell."""
    ratios = [base["ms"][cell] / entry["ms"][cell] for cell in entry["ms"] if base and cell in base["ms"]]
    return geometric_mean(ratios) if ratios else None


def percent(ratio):
    return "–" if ratio is None else f"{100 * (ratio - 1):+.1f}"


def tflops(found, entry, cell):
    return f"{found['flops'][cell] / entry['ms'][cell] / 1e9:.0f}" if cell in entry["ms"] else "–"


def loop_text(loop):
    """Instructions of the inner loop, and how many of them come with each MMA."""
    if not loop:
        return "–"
    mma = loop.get("HMMA") or loop.get("HGMMA")
    return f"{loop['all']} ({loop['all'] / mma:.1f})" if mma else str(loop["all"])


def resource_cells(entry):
    facts = entry.get("facts")
    if not facts:
        return ["–"] * 4
    occupancy = f"{facts['ctas_per_sm']} × {facts['threads'] // 32}"
    note = ", serialised" if facts["serialized"] else ""
    memory = f"{facts['smem_bytes'] / 1024:.1f}"
    return [f"{facts['registers']}, {facts['spills']}{note}", memory, occupancy, loop_text(facts["loop"])]


def table(found, kind):
    """All of one kind: a step of the ladder against the row before it, a switch against the design in use."""
    cells, entries, base, rows = list(found["flops"]), measured(found, kind), in_use(found), []
    for index, entry in enumerate(entries):
        if kind == "ladder":
            base = entries[index - 1] if index else None
        figures = [tflops(found, entry, cell) for cell in cells]
        rows.append([entry["label"], *figures, percent(speed(entry, base)), *resource_cells(entry)])
    return markdown_table(
        ["design", *cells, "Δ %", "registers, spills", "KB", "CTAs × warps", "loop (an MMA)"], rows
    )  # fmt: skip


def section(found, family, head_dim):
    """One head dim of one family, with everything that was measured."""
    lines = ["", f"### {TITLES[family]}, head dim {head_dim}: TFLOPS, and the change of speed", ""]
    lines += [*table(found, "ladder"), "", *table(found, "switch")]
    left_out = [f"{entry['label']}: {entry['failed']}" for entry in found["entries"] if entry["failed"]]
    return [*lines, *(["", "Left out: " + "; ".join(left_out) + "."] if left_out else [])]


def report(result):
    """All families and head dims."""
    lines = [run_line(result)]
    for family, dims in result["families"].items():
        for head_dim, found in dims.items():
            lines += section(found, family, head_dim)
    return "\n".join(lines)


def ladder_table(result):
    """The ladder of each head dim: TFLOPS, geometric mean of its cells, and the change against the row before."""
    columns = {}
    for head_dim, found in result["families"]["mma_sync"].items():
        entries, cells = measured(found, "ladder"), {}
        for index, entry in enumerate(entries):
            rate = geometric_mean(found["flops"][cell] / ms / 1e9 for cell, ms in entry["ms"].items())
            change = f" ({percent(speed(entry, entries[index - 1]))})" if index else ""
            cells[entry["label"]] = f"{rate:.0f}{change}"
        columns[f"d {head_dim}"] = cells
    return side_by_side("each row adds", columns)


def switch_table(result, family):
    """Change of speed in percent with one thing changed, a column for each kernel in use."""
    columns = {}
    for head_dim, found in result["families"][family].items():
        base = in_use(found)
        for entry in measured(found, "switch"):
            kernel, _, label = entry["label"].rpartition(": ")
            cells = columns.setdefault(f"d {head_dim} {kernel}".strip(), {})
            cells[label] = percent(speed(entry, base))
    return side_by_side(f"{TITLES[family]}: one thing changed", columns)


def side_by_side(title, columns):
    """{column: {label: cell}} as one table."""
    labels = dict.fromkeys(label for cells in columns.values() for label in cells)
    rows = [[label, *(cells.get(label, "–") for cells in columns.values())] for label in labels]
    return markdown_table([title, *columns], rows)
