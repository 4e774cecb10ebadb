"""What an ablation found: tables and a bar plot. Plain data in, text or a PNG out."""

from __future__ import annotations

from pathlib import Path
from statistics import geometric_mean

from scores import run_line, stored_path

RESULT = stored_path("ablate")
PLOTS = Path("benchmarks", "results", "plots_ablate")
LIBRARY = "library"
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


def row_before(index, entries):
    """What a step of the ladder is compared with: None for the first."""
    return entries[index - 1] if index else None


def of_mask(entry, mask):
    """The entry with the cells of one mask."""
    return {**entry, "ms": {cell: ms for cell, ms in entry["ms"].items() if cell.split()[0] == mask}}


def speed(entry, base):
    """Geometric mean over the cells that both have of (time of base / time of entry); None without such a cell."""
    ratios = [base["ms"][cell] / entry["ms"][cell] for cell in entry["ms"] if base and cell in base["ms"]]
    return geometric_mean(ratios) if ratios else None


def percent(ratio):
    return "–" if ratio is None else f"{100 * (ratio - 1):+.1f}"


def tflops(found, entry, cell):
    return found["flops"][cell] / entry["ms"][cell] / 1e9 if cell in entry["ms"] else None


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
    memory = f"{facts['smem_bytes'] / 1024:.1f}"
    note = ", serialised" if facts["serialized"] else ""
    return [f"{facts['registers']}, {facts['spills']}{note}", memory, occupancy, loop_text(facts["loop"])]


def table(found, kind, delta_name, base_of):
    """Rows of one kind; base_of(index, entries) is what an entry is compared with."""
    cells = list(found["flops"])
    heads = ["design", *cells, delta_name, "registers, spills", "KB", "CTAs × warps", "loop (an MMA)"]
    lines = ["| " + " | ".join(heads) + " |", "|---" * len(heads) + "|"]
    entries = measured(found, kind)
    for index, entry in enumerate(entries):
        speeds = [tflops(found, entry, cell) for cell in cells]
        figures = ["–" if value is None else f"{value:.0f}" for value in speeds]
        base = base_of(index, entries)
        delta = percent(speed(entry, base)) if base else "–"
        lines.append("| " + " | ".join([entry["label"], *figures, delta, *resource_cells(entry)]) + " |")
    return lines


def section(result, family, head_dim):
    """One head dim of one family as Markdown."""
    found = result["families"][family][head_dim]
    base = in_use(found)
    title = f"### {TITLES[family]}, head dim {head_dim}"
    lines = [title, "", "TFLOPS by mask and sequence length; Δ %: speed, geometric mean over these cells.", ""]
    if len(measured(found, "ladder")) > 1:
        lines += ["From plain loads to the design in use, each row with one technique more than the one before:", ""]
        lines += table(found, "ladder", "Δ %, row before", row_before)
        lines += ["", "The design in use with one thing changed:", ""]
    else:
        lines += ["The design in use:", "", *table(found, "ladder", "Δ %", lambda *_: None)]
        lines += ["", "With one thing changed:", ""]
    lines += table(found, "switch", "Δ %", lambda *_: base)
    library = measured(found, LIBRARY)
    if library:
        figures = ", ".join(f"{cell} {tflops(found, library[0], cell):.0f}" for cell in library[0]["ms"])
        lines += ["", f"The library, with all its features, on the same cells: {figures}."]
    left_out = [f"{entry['label']}: {entry['failed']}" for entry in found["entries"] if entry["failed"]]
    return "\n".join([*lines, *(["", "Left out: " + "; ".join(left_out) + "."] if left_out else [])])


def report(result):
    """All families and head dims as Markdown."""
    parts = [run_line(result)]
    for family, dims in result["families"].items():
        parts += [section(result, family, head_dim) for head_dim in dims]
    return "\n\n".join(parts)


def bars(found, mask):
    """([(label, TFLOPS)] of the ladder, [(label, Δ %)] of the switches) over the cells of one mask."""
    ladder = []
    for entry in (of_mask(entry, mask) for entry in measured(found, "ladder")):
        if entry["ms"]:
            ladder.append((entry["label"], geometric_mean(tflops(found, entry, cell) for cell in entry["ms"])))
    base = in_use(found)
    switches = measured(found, "switch") if base else []
    ratios = [(entry["label"], speed(of_mask(entry, mask), base)) for entry in switches]
    return ladder, [(label, 100 * (ratio - 1)) for label, ratio in ratios if ratio is not None]


def draw(axes, by_mask, title, unit):
    """Grouped horizontal bars of {mask: [(label, value)]}, the first label on top."""
    labels = list(dict.fromkeys(label for values in by_mask.values() for label, _ in values))
    height = 0.8 / max(1, len(by_mask))
    for index, (mask, values) in enumerate(by_mask.items()):
        places = [labels.index(label) + (index - (len(by_mask) - 1) / 2) * height for label, _ in values]
        drawn = axes.barh(places, [value for _, value in values], height, label=mask)
        axes.bar_label(drawn, fmt="%.0f" if unit == "TFLOPS" else "%+.1f", fontsize=7, padding=2)
    axes.set_yticks(range(len(labels)), labels, fontsize=8)
    axes.invert_yaxis()
    axes.margins(x=0.12)
    axes.axvline(0, color="black", linewidth=0.8)
    axes.set_title(title, fontsize=9)
    axes.set_xlabel(unit)
    axes.grid(axis="x", alpha=0.3)


def write_plot(result, family, path):
    """One row of panels for each head dim: the ladder in TFLOPS, the switches in %; ImportError without matplotlib."""
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    dims = result["families"][family]
    figure = Figure(figsize=(13, 5.2 * len(dims)), layout="constrained")
    FigureCanvasAgg(figure)
    panels = figure.subplots(len(dims), 2, squeeze=False)
    for row, (head_dim, found) in zip(panels, dims.items()):
        masks = list(dict.fromkeys(cell.split()[0] for cell in found["flops"]))
        drawn = {mask: bars(found, mask) for mask in masks}
        draw(row[0], {mask: both[0] for mask, both in drawn.items()}, f"head dim {head_dim}: the ladder", "TFLOPS")
        title = f"head dim {head_dim}: the design in use with one thing changed"
        draw(row[1], {mask: both[1] for mask, both in drawn.items()}, title, "speed, %")
        row[0].legend(fontsize=8)
    figure.suptitle(f"{TITLES[family]}: {run_line(result)}", fontsize=9)
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path, dpi=110)
