"""Plots of the rows over a KV cache: one PNG per group and heads, GB/s of every row, with the read ceiling."""

from __future__ import annotations

from pathlib import Path

from scores import gigabytes_per_second


def panels(result):
    """{(group, heads): rows} of the rows over a cache that have something to plot."""
    found = {}
    for row in result["rows"]:
        if row.get("bytes") and row["results"] and row["timing"] != "eager":
            key = row["group"], f"{row['nheads']}-{row['nheads_k']}"
            found.setdefault(key, []).append(row)
    return found


def draw(axes, rows, names, colors):
    width = 0.8 / len(names)
    for index, name in enumerate(names):
        places = [i + (index - (len(names) - 1) / 2) * width for i in range(len(rows))]
        axes.bar(places, [gigabytes_per_second(row, name) for row in rows], width, color=colors[name], label=name)
    labels = [row["label"].replace(" page", "\npage").replace(f"h{row['nheads']} ", "") for row in rows]
    axes.set_xticks(range(len(rows)), labels, rotation=60, ha="right", fontsize=7)
    axes.set_ylabel("GB/s of keys and values")
    axes.grid(axis="y", alpha=0.3)


def write_kvcache_plots(result, folder, caption):
    """Writes the PNGs into `folder` and returns their paths; ImportError without matplotlib."""
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    names = list(result["implementations"])
    colors = {name: f"C{index}" for index, name in enumerate(names)}
    ceiling = result.get("read_ceiling")
    paths = []
    for (group, heads), rows in panels(result).items():
        figure = Figure(figsize=(max(7, 1 + 0.55 * len(rows)), 4.8), layout="constrained")
        FigureCanvasAgg(figure)
        axes = figure.subplots()
        draw(axes, rows, [name for name in names if any(name in row["results"] for row in rows)], colors)
        if ceiling:
            label = f"read ceiling, {ceiling['gbs']:.0f} GB/s"
            axes.axhline(ceiling["gbs"], color="black", linewidth=0.8, linestyle="--", label=label)
        axes.legend(fontsize=8, loc="upper left", bbox_to_anchor=(1, 1), frameon=False)
        figure.suptitle(f"{group}, {heads} heads, {result['dtype']}\n{caption}", fontsize=8)
        Path(folder).mkdir(parents=True, exist_ok=True)
        paths.append(Path(folder) / f"{group}_h{heads}.png")
        figure.savefig(paths[-1], dpi=110)
    return paths
