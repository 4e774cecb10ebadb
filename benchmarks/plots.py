"""Plots of a result: TFLOPS over sequence length for each grid, head dim and mode."""

from __future__ import annotations

from markdown_tables import mask
from results import OUT_OF_MEMORY
from scores import rows_of

PLOTTED_GROUPS = ("cells", "dims")
DPI = 80  # pages show them as wide as their text
SHADES = 64  # of a file's palette: curves, text, and their smooth edges


def panel_rows(result, head_dim, mode, causal):
    wanted = (head_dim, mode, causal)
    rows = [row for row in rows_of(result, PLOTTED_GROUPS) if (row["head_dim"], row["mode"], row["causal"]) == wanted]
    return sorted(rows, key=lambda row: row["seqlen_k"])


def ends(result, head_dim, mode, causal):
    """[(implementation, seqlen)] where memory was not enough."""
    rows = panel_rows(result, head_dim, mode, causal)
    return [(name, row["seqlen_k"]) for row in rows for name, note in row.get("notes", {}).items()
            if note == OUT_OF_MEMORY]  # fmt: skip


def curves(result, head_dim, mode, causal):
    """{implementation: [(seqlen, TFLOPS), …] by seqlen} of the rows of one panel."""
    found = {}
    for row in panel_rows(result, head_dim, mode, causal):
        for name, entry in row["results"].items():
            found.setdefault(name, []).append((row["seqlen_k"], entry["tflops"]))
    return found


def new_figure(width, height):
    """ImportError without matplotlib."""
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    figure = Figure(figsize=(width, height), layout="constrained")
    FigureCanvasAgg(figure)
    return figure


def save(figure, path):
    """As a PNG with a palette, a third of the bytes that one of all colours takes."""
    from PIL import Image

    figure.savefig(path, dpi=DPI)
    with Image.open(path) as image:
        with_palette = image.convert("RGB").quantize(SHADES)
    with_palette.save(path, optimize=True)


def colors_of(result):
    return {name: f"C{index}" for index, name in enumerate(result["implementations"])}


def draw_panel(axes, lines, ended, colors, title):
    """The curves of one mask, and a cross where the memory of an implementation ended."""
    for name in [name for name in colors if name in lines]:
        lengths, tflops = zip(*lines[name])
        style = {"linewidth": 2.6, "zorder": 3} if name == "ours" else {"linewidth": 1.4}
        axes.plot(lengths, tflops, marker="o", markersize=4, color=colors[name], label=name, **style)
    for name, length in ended:
        axes.plot(length, 0, marker="x", markersize=8, color=colors[name], clip_on=False)
    lengths = sorted({length for points in lines.values() for length, _ in points})
    axes.set_xscale("log", base=2)
    axes.set_xticks(lengths, [str(length) for length in lengths])
    axes.minorticks_off()
    axes.set_ylim(bottom=0)
    axes.set_title(title)
    axes.set_xlabel("sequence length")
    axes.grid(alpha=0.3)


def draw_grid(result, mode, head_dim, caption):
    """The figure of both masks."""
    figure, colors, entries = new_figure(11, 4.6), colors_of(result), {}
    panels = figure.subplots(1, 2, sharey=True)
    for axes, causal in zip(panels, (False, True)):
        panel = (result, head_dim, mode, causal)
        draw_panel(axes, curves(*panel), ends(*panel), colors, mask(causal))
        handles, labels = axes.get_legend_handles_labels()
        entries.update(zip(labels, handles))
    panels[0].set_ylabel("TFLOPS")
    figure.legend(entries.values(), entries.keys(), loc="outside right center", frameon=False)
    figure.suptitle(f"{mode}, head dim {head_dim}, {result['dtype']}\n{caption}", fontsize=9)
    return figure


def write_plots(result, folder, caption, names, prefix=""):
    """Writes the figures of these names, after `prefix`, as PNGs into `folder`; returns their paths."""
    folder.mkdir(parents=True, exist_ok=True)
    paths = []
    for mode, head_dim in sorted({(row["mode"], row["head_dim"]) for row in rows_of(result, PLOTTED_GROUPS)}):
        path = folder / f"{prefix}{mode.replace('+', '_')}_d{head_dim}.png"
        if path.name in names:
            save(draw_grid(result, mode, head_dim, caption), path)
            paths.append(path)
    return paths
