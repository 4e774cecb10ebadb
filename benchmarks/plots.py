"""Plots of a result: one PNG per head dim and mode, TFLOPS over sequence length, one curve per implementation."""

from __future__ import annotations

from pathlib import Path

PLOTTED_GROUPS = ("cells", "dims")
MASKS = ((False, "full"), (True, "causal"))


def curves(result, head_dim, mode, causal):
    """{implementation: [(seqlen, TFLOPS), …] by seqlen} of the cells of one panel."""
    found = {}
    for row in result["rows"]:
        if row["group"] in PLOTTED_GROUPS and (row["head_dim"], row["mode"], row["causal"]) == (head_dim, mode, causal):
            for name, entry in row["results"].items():
                found.setdefault(name, []).append((row["seqlen_k"], entry["tflops"]))
    return {name: sorted(points) for name, points in found.items()}


def figures(result):
    """The (mode, head dim) pairs that have something to plot."""
    rows = [row for row in result["rows"] if row["group"] in PLOTTED_GROUPS and row["results"]]
    return sorted({(row["mode"], row["head_dim"]) for row in rows})


def draw_panel(axes, lines, names, colors, title):
    for name in names:
        if name in lines:
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


def write_plots(result, folder, caption):
    """Writes the PNGs into `folder` and returns their paths; ImportError without matplotlib."""
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    folder = Path(folder)
    folder.mkdir(parents=True, exist_ok=True)
    names = list(result["implementations"])
    colors = {name: f"C{index}" for index, name in enumerate(names)}
    paths = []
    for mode, head_dim in figures(result):
        figure = Figure(figsize=(11, 4.6), layout="constrained")
        FigureCanvasAgg(figure)
        panels = figure.subplots(1, 2, sharey=True)
        for axes, (causal, title) in zip(panels, MASKS):
            draw_panel(axes, curves(result, head_dim, mode, causal), names, colors, title)
        panels[0].set_ylabel("TFLOPS")
        entries = {}
        for axes in panels:
            handles, labels = axes.get_legend_handles_labels()
            entries.update(zip(labels, handles))
        figure.legend(entries.values(), entries.keys(), loc="outside right center", frameon=False)
        figure.suptitle(f"{mode}, head dim {head_dim}, {result['dtype']}\n{caption}", fontsize=9)
        paths.append(folder / f"{mode.replace('+', '_')}_d{head_dim}.png")
        figure.savefig(paths[-1], dpi=110)
    return paths
