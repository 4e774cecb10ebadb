"""Plots of a result: one PNG per grid, head dim and mode, TFLOPS over sequence length, one curve per implementation."""

from __future__ import annotations

from pathlib import Path

from scores import OUT_OF_MEMORY

PLOTTED_GROUPS = ("cells", "dims")
GRIDS = {"": PLOTTED_GROUPS, "b4h8": ("b4h8",)}  # what a file's name begins with: groups whose rows are one grid
MASKS = ((False, "full"), (True, "causal"))


def panel_rows(result, head_dim, mode, causal, groups):
    """The rows of one panel by sequence length."""
    wanted = (head_dim, mode, causal)
    rows = [row for row in result["rows"] if row["group"] in groups]
    rows = [row for row in rows if (row["head_dim"], row["mode"], row["causal"]) == wanted]
    return sorted(rows, key=lambda row: row["seqlen_k"])


def curves(result, head_dim, mode, causal, groups=PLOTTED_GROUPS):
    """{implementation: [(seqlen, TFLOPS), …] by seqlen} of the rows of one panel."""
    found = {}
    for row in panel_rows(result, head_dim, mode, causal, groups):
        for name, entry in row["results"].items():
            found.setdefault(name, []).append((row["seqlen_k"], entry["tflops"]))
    return found


def out_of_memory(result, head_dim, mode, causal, groups=PLOTTED_GROUPS):
    """{implementation: the shortest sequence of a panel that it ran out of memory with}."""
    found = {}
    for row in panel_rows(result, head_dim, mode, causal, groups):
        for name, note in row["notes"].items():
            if note == OUT_OF_MEMORY:
                found.setdefault(name, row["seqlen_k"])
    return found


def figures(result):
    """The (grid, mode, head dim) triples that have something to plot."""
    return sorted(
        {
            (grid, row["mode"], row["head_dim"])
            for row in result["rows"]
            for grid, groups in GRIDS.items()
            if row["group"] in groups and row["results"]
        }
    )


def draw_panel(axes, lines, names, colors, title, ends=None):
    """ends: {implementation: the length at which its memory ended}, marked behind its curve, or on the axis."""
    for name in names:
        if name in lines:
            lengths, tflops = zip(*lines[name])
            style = {"linewidth": 2.6, "zorder": 3} if name == "ours" else {"linewidth": 1.4}
            axes.plot(lengths, tflops, marker="o", markersize=4, color=colors[name], label=name, **style)
    ends = ends or {}
    for name, length in ends.items():
        height = lines[name][-1][1] if name in lines else 0.0
        axes.plot([length], [height], marker="x", markersize=9, markeredgewidth=2, color=colors[name], clip_on=False)
        axes.annotate(OUT_OF_MEMORY, (length, height), (0, 7), textcoords="offset points", ha="right", fontsize=7)
    lengths = sorted({length for points in lines.values() for length, _ in points} | set(ends.values()))
    axes.set_xscale("log", base=2)
    axes.set_xticks(lengths, [str(length) for length in lengths])
    axes.minorticks_off()
    axes.set_ylim(bottom=0)
    axes.set_title(title)
    axes.set_xlabel("sequence length")
    axes.grid(alpha=0.3)


def plot_name(grid, mode, head_dim):
    return "_".join(part for part in (grid, mode.replace("+", "_"), f"d{head_dim}.png") if part)


def write_plots(result, folder, caption):
    """Writes the PNGs into `folder` and returns their paths; ImportError without matplotlib."""
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    folder = Path(folder)
    folder.mkdir(parents=True, exist_ok=True)
    names = list(result["implementations"])
    colors = {name: f"C{index}" for index, name in enumerate(names)}
    paths = []
    for grid, mode, head_dim in figures(result):
        figure = Figure(figsize=(11, 4.6), layout="constrained")
        FigureCanvasAgg(figure)
        panels = figure.subplots(1, 2, sharey=True)
        for axes, (causal, title) in zip(panels, MASKS):
            panel = (result, head_dim, mode, causal, GRIDS[grid])
            draw_panel(axes, curves(*panel), names, colors, title, out_of_memory(*panel))
        panels[0].set_ylabel("TFLOPS")
        entries = {}
        for axes in panels:
            handles, labels = axes.get_legend_handles_labels()
            entries.update(zip(labels, handles))
        figure.legend(entries.values(), entries.keys(), loc="outside right center", frameon=False)
        shape = f"{grid}, " if grid else ""
        figure.suptitle(f"{shape}{mode}, head dim {head_dim}, {result['dtype']}\n{caption}", fontsize=9)
        paths.append(folder / plot_name(grid, mode, head_dim))
        figure.savefig(paths[-1], dpi=110)
    return paths
