"""Plots of a result: TFLOPS over sequence length for each grid, head dim and mode; GB/s of the rows over a KV cache."""

from __future__ import annotations

from pathlib import Path

from markdown import mask
from results import OUT_OF_MEMORY
from scores import gigabytes_per_second

PLOTTED_GROUPS = ("cells", "dims")
DPI = 80  # pages show them as wide as their text
GRIDS = {"": PLOTTED_GROUPS, "b4h8": ("b4h8",)}  # prefix of a file's name: groups whose rows are one grid


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
    """{implementation: the shortest sequence of a panel at which it ran out of memory}."""
    found = {}
    for row in panel_rows(result, head_dim, mode, causal, groups):
        for name, note in row["notes"].items():
            if note == OUT_OF_MEMORY:
                found.setdefault(name, row["seqlen_k"])
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


def draw_panel(axes, lines, colors, title, ends=None):
    """ends: {implementation: the length at which its memory ended}, marked at the end of its curve, or on the axis."""
    for name in [name for name in colors if name in lines]:
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


def draw_grid(result, grid, mode, head_dim, caption):
    """The figure of both masks."""
    figure, colors, entries = new_figure(11, 4.6), colors_of(result), {}
    panels = figure.subplots(1, 2, sharey=True)
    for axes, causal in zip(panels, (False, True)):
        panel = (result, head_dim, mode, causal, GRIDS[grid])
        draw_panel(axes, curves(*panel), colors, mask(causal), out_of_memory(*panel))
        handles, labels = axes.get_legend_handles_labels()
        entries.update(zip(labels, handles))
    panels[0].set_ylabel("TFLOPS")
    figure.legend(entries.values(), entries.keys(), loc="outside right center", frameon=False)
    shape = f"{grid}, " if grid else ""
    figure.suptitle(f"{shape}{mode}, head dim {head_dim}, {result['dtype']}\n{caption}", fontsize=9)
    return figure


def cache_panels(result):
    """{(group, heads): rows} of the rows over a cache that have something to plot."""
    found = {}
    for row in result["rows"]:
        if row.get("bytes") and row["results"] and row["timing"] != "eager":
            key = row["group"], f"{row['nheads']}-{row['nheads_k']}"
            found.setdefault(key, []).append(row)
    return found


def draw_cache(result, group, heads, rows, caption):
    """Bars of GB/s, with the read ceiling."""
    figure, colors = new_figure(max(7, 1 + 0.55 * len(rows)), 4.8), colors_of(result)
    axes, names = figure.subplots(), [name for name in colors if any(name in row["results"] for row in rows)]
    width = 0.8 / len(names)
    for index, name in enumerate(names):
        places = [i + (index - (len(names) - 1) / 2) * width for i in range(len(rows))]
        axes.bar(places, [gigabytes_per_second(row, name) for row in rows], width, color=colors[name], label=name)
    labels = [row["label"].replace(" page", "\npage").replace(f"h{row['nheads']} ", "") for row in rows]
    axes.set_xticks(range(len(rows)), labels, rotation=60, ha="right", fontsize=7)
    axes.set_ylabel("GB/s of keys and values")
    axes.grid(axis="y", alpha=0.3)
    ceiling = result.get("read_ceiling")
    if ceiling:
        label = f"read ceiling, {ceiling['gbs']:.0f} GB/s"
        axes.axhline(ceiling["gbs"], color="black", linewidth=0.8, linestyle="--", label=label)
    axes.legend(fontsize=8, loc="upper left", bbox_to_anchor=(1, 1), frameon=False)
    figure.suptitle(f"{group}, {heads} heads, {result['dtype']}\n{caption}", fontsize=8)
    return figure


def write_plots(result, folder, caption, only=None):
    """Writes PNGs into `folder`, of all figures or of those whose names are in `only`; returns their paths."""
    makers = {}
    for grid, mode, head_dim in grid_figures(result):
        name = "_".join(part for part in (grid, mode.replace("+", "_"), f"d{head_dim}.png") if part)
        makers[name] = lambda key=(grid, mode, head_dim): draw_grid(result, *key, caption)
    for (group, heads), rows in cache_panels(result).items():
        makers[f"{group}_h{heads}.png"] = lambda key=(group, heads, rows): draw_cache(result, *key, caption)
    Path(folder).mkdir(parents=True, exist_ok=True)
    paths = [Path(folder) / name for name in makers if only is None or name in only]
    for path in paths:
        makers[path.name]().savefig(path, dpi=DPI)
    return paths
