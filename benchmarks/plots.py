"""Plots of a result: TFLOPS over sequence length for each grid, head dim and mode."""

from __future__ import annotations

from pathlib import Path

from markdown import mask
from scores import rows_of

PLOTTED_GROUPS = ("cells", "dims")
DPI = 80  # pages show them as wide as their text
GRIDS = {"": PLOTTED_GROUPS, "b4h8": ("b4h8",)}  # prefix of a file's name: groups whose rows are one grid


def curves(result, head_dim, mode, causal, groups=PLOTTED_GROUPS):
    """{implementation: [(seqlen, TFLOPS), …] by seqlen} of the rows of one panel."""
    found, wanted = {}, (head_dim, mode, causal)
    rows = [row for row in rows_of(result, groups) if (row["head_dim"], row["mode"], row["causal"]) == wanted]
    for row in sorted(rows, key=lambda row: row["seqlen_k"]):
        for name, entry in row["results"].items():
            found.setdefault(name, []).append((row["seqlen_k"], entry["tflops"]))
    return found


def grid_figures(result):
    """The (grid, mode, head dim) triples that have something to plot."""
    found = {
        (grid, row["mode"], row["head_dim"])
        for row in result["rows"]
        for grid, groups in GRIDS.items()
        if row["group"] in groups and row["results"]
    }
    return sorted(found)


def new_figure(width, height):
    """ImportError without matplotlib."""
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    figure = Figure(figsize=(width, height), layout="constrained")
    FigureCanvasAgg(figure)
    return figure


def colors_of(result):
    return {name: f"C{index}" for index, name in enumerate(result["implementations"])}


def draw_panel(axes, lines, colors, title):
    """The curves of one mask; that of an implementation whose memory ended is shorter."""
    for name in [name for name in colors if name in lines]:
        lengths, tflops = zip(*lines[name])
        style = {"linewidth": 2.6, "zorder": 3} if name == "ours" else {"linewidth": 1.4}
        axes.plot(lengths, tflops, marker="o", markersize=4, color=colors[name], label=name, **style)
    lengths = sorted({length for points in lines.values() for length, _ in points})
    axes.set_xscale("log", base=2)
    axes.set_xticks(lengths, [str(length) for length in lengths])
    axes.minorticks_off()
    axes.set_ylim(bottom=0)
    axes.set_title(title)
    axes.set_xlabel("sequence length")
    axes.grid(alpha=0.3)


def draw_grid(result, grid, mode, head_dim, caption):
    """The figure of both masks."""
    figure, colors, entries = new_figure(11, 4.6), colors_of(result), {}
    panels = figure.subplots(1, 2, sharey=True)
    for axes, causal in zip(panels, (False, True)):
        draw_panel(axes, curves(result, head_dim, mode, causal, GRIDS[grid]), colors, mask(causal))
        handles, labels = axes.get_legend_handles_labels()
        entries.update(zip(labels, handles))
    panels[0].set_ylabel("TFLOPS")
    figure.legend(entries.values(), entries.keys(), loc="outside right center", frameon=False)
    shape = f"{grid}, " if grid else ""
    figure.suptitle(f"{shape}{mode}, head dim {head_dim}, {result['dtype']}\n{caption}", fontsize=9)
    return figure


def write_plots(result, folder, caption, only=None):
    """Writes PNGs into `folder`, of all figures or of those whose names are in `only`; returns their paths."""
    makers = {}
    for grid, mode, head_dim in grid_figures(result):
        name = "_".join(part for part in (grid, mode.replace("+", "_"), f"d{head_dim}.png") if part)
        makers[name] = lambda key=(grid, mode, head_dim): draw_grid(result, *key, caption)
    Path(folder).mkdir(parents=True, exist_ok=True)
    paths = [Path(folder) / name for name in makers if only is None or name in only]
    for path in paths:
        makers[path.name]().savefig(path, dpi=DPI)
    return paths
