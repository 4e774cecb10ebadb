"""The ladder's block of docs/tuning/triton.md and its plot, from a result of triton_ladder.py; needs no Triton."""

from __future__ import annotations

from pathlib import Path
from statistics import geometric_mean

from markdown_tables import markdown_table, rewritten
from plots import curves, draw_panel
from scores import environment_line, ratios, score_line, significant, stored_path
from triton_variants import MODES, RUNGS

PAGE = Path("docs", "tuning", "triton.md")
RESULT = stored_path("triton_ladder")
PLOT = Path("benchmarks", "results", "plots_triton", "ladder.png")
BLOCK = "triton_ladder"
TILES_TOLD = "Tiles are queries × keys (warps, stages), of the forward / of dK and dV / of dQ."
HEAD_DIMS = (64, 128)
MASKS = ((False, "full"), (True, "causal"))
PEERS = ("sdpa_flash", "sdpa_cudnn", "ours")


def described_rungs():
    """The rungs as entries of a result."""
    fields = ("name", "adds", "over", "kept", "modes")
    return [{field: getattr(rung, field) for field in fields} for rung in RUNGS]


def last_rung(mode):
    """The comparator in a mode: what differs from it only where the mode does not show it is not measured."""
    return [rung.name for rung in RUNGS if rung.kept and mode in rung.modes][-1]


def steps_table():
    """The rungs and how they are configured."""
    rows = []
    for rung in RUNGS:
        place = "the start" if not rung.over else f"`{rung.over}`" + ("" if rung.kept else ", not kept")
        rows.append([f"`{rung.name}`", rung.adds, place, ", ".join(rung.modes), configuration(rung.variant)])
    return markdown_table(["step", "adds", "on top of", "measured", "configuration"], rows)


def configuration(variant):
    flags = [name for name in ("transposed_k", "warp_specialize") if getattr(variant, name)]
    loads = "TMA" if variant.use_tma else "pointers"
    delta = "delta shared" if variant.shared_delta else "delta twice"
    return "; ".join([loads, *(flags or [delta]), f"tiles {tiles_told(variant)}"])


def tiles_told(variant):
    """The tiles to choose from, of each kernel; of the forward alone where the variant is one of the forward."""
    if not variant.tiles:
        return "tuned among the kernels' lists"
    lists = variant.tiles[:1] if variant.warp_specialize else variant.tiles
    return " / ".join(" or ".join(f"{m} × {n} ({warps}, {stages})" for m, n, warps, stages in own) for own in lists)


def columns(result):
    """The (mode, head dim, causal) that have rows."""
    found = {(row["mode"], row["head_dim"], row["causal"]) for row in result["rows"] if row["results"]}
    return sorted(found, key=lambda cell: (MODES.index(cell[0]), *cell[1:]))


def relative(result, name, base, cell):
    """Speed of `name` relative to `base`, geometric mean over the lengths; None where there is none."""
    mode, head_dim, causal = cell
    lines = curves(result, head_dim, mode, causal)
    mine, theirs = dict(lines.get(name, ())), dict(lines.get(base, ()))
    both = [mine[length] / theirs[length] for length in mine if length in theirs]
    return geometric_mean(both) if both else None


def entry(result, name, base, cell):
    """TFLOPS at the longest sequence, and the relative speed."""
    mode, head_dim, causal = cell
    points = curves(result, head_dim, mode, causal).get(name)
    if not points:
        return "–"
    ratio = relative(result, name, base, cell) if base else None
    return significant(points[-1][1]) + (f" ({ratio:.2f}×)" if ratio else "")


def measured_table(result):
    cells = columns(result)
    names = [rung["name"] for rung in result["rungs"]]
    over = {rung["name"]: rung["over"] for rung in result["rungs"]}
    lines = [[f"`{name}`", *(entry(result, name, over[name], cell) for cell in cells)] for name in names]
    for peer in PEERS:
        if peer in result["implementations"]:
            peers = [entry_of_peer(result, peer, cell) for cell in cells]
            lines.append([f"`{peer}`", *peers])
    header = ["TFLOPS"] + [f"{mode} d{head_dim} {'causal' if causal else 'full'}" for mode, head_dim, causal in cells]
    return markdown_table(header, lines)


def entry_of_peer(result, peer, cell):
    """TFLOPS at the longest sequence, and how near the comparator comes to it."""
    ratio = relative(result, last_rung(cell[0]), peer, cell)
    return entry(result, peer, None, cell) + (f" ({ratio:.2f}×)" if ratio else "")


def gain_lines(result):
    """Every step against what it is on top of, then the comparator against its peers: all lengths, worst one named."""
    lines = []
    for mode in MODES:
        last = last_rung(mode)
        pairs = [(rung["name"], rung["over"]) for rung in result["rungs"]]
        pairs += [(last, peer) for peer in PEERS]
        for name, base in pairs:
            found = ratios(result, result, base, mode, "cells", name)
            if found:
                lines.append(score_line(found, f"{mode}, {name} over {base}"))
    return lines


def failure_lines(result):
    """Which kernels of a rung the compiler fails on, and which rungs were not right."""
    lines = []
    for rung in result["rungs"]:
        own = [found for found in result["compiled"] if found["rung"] == rung["name"]]
        failed = [found for found in own if "error" in found]
        if failed:
            kernels = ", ".join(sorted({found["kernel"] for found in failed}))
            lines.append(f"{rung['name']}: {len(failed)} of {len(own)} kernels do not compile or fit ({kernels})")
    for name, found in result["not_checked"].items():
        lines.append(f"{name}: not measured or wrong, {'; '.join(map(' '.join, found.items()))}")
    return lines


def measured_lines(result):
    return [*measured_table(result), "", *(f"- {line}" for line in [*gain_lines(result), *failure_lines(result)])]


def block(result):
    """The block of the page; without a result what will be measured, and no figure."""
    lines = steps_table()
    if result is None:
        return [*lines, "", TILES_TOLD, "", "Not measured yet: `python benchmarks/lab.py triton_ladder` does."]
    longest = max(row["seqlen_k"] for row in result["rows"])
    told = f"{result['dtype']}, {environment_line(result)}, from `{RESULT}`."
    told += f" TFLOPS at s {longest}; in brackets, over all lengths, the speed relative to what the step is on top of,"
    told += " and in the rows of peers that of the comparator relative to them."
    plot = f"![the Triton ladder](../../{PLOT})"
    return [*lines, "", TILES_TOLD, "", told, "", *measured_lines(result), "", plot]


def page(text, result):
    return rewritten(text, BLOCK, block(result))


def draw(path, result):
    """One figure: a line of panels a mode, the curves of each head dim and mask, then the gains over the baseline."""
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    names = list(result["implementations"])
    colors = {name: f"C{index}" for index, name in enumerate(names)}
    figure = Figure(figsize=(22, 8.5), layout="constrained")
    FigureCanvasAgg(figure)
    panels = figure.subplots(len(MODES), 5, width_ratios=(1, 1, 1, 1, 1.4))
    entries = {}
    for line, mode in zip(panels, MODES):
        for axes, (head_dim, (causal, mask)) in zip(line, ((d, mask) for d in HEAD_DIMS for mask in MASKS)):
            draw_panel(axes, curves(result, head_dim, mode, causal), names, colors, f"{mode}, d {head_dim}, {mask}")
            entries.update(dict(zip(*reversed(axes.get_legend_handles_labels()))))
        line[0].set_ylabel("TFLOPS")
        draw_gains(line[4], result, mode, colors)
    figure.legend(entries.values(), entries.keys(), loc="outside lower center", ncols=len(names), frameon=False)
    figure.suptitle(f"The Triton ladder, {result['dtype']}\n{environment_line(result)}", fontsize=10)
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path, dpi=100)


def draw_gains(axes, result, mode, colors):
    """Speed relative to the baseline, a group of bars a head dim and mask."""
    cells = [cell for cell in columns(result) if cell[0] == mode]
    names = [rung["name"] for rung in result["rungs"] if mode in rung["modes"]]
    width = 0.8 / max(1, len(names))
    for index, name in enumerate(names):
        gains = [relative(result, name, names[0], cell) or 0.0 for cell in cells]
        places = [place + (index - (len(names) - 1) / 2) * width for place in range(len(cells))]
        bars = axes.bar(places, gains, width, color=colors[name])
        axes.bar_label(bars, [f"{gain:.2f}" if gain else "" for gain in gains], fontsize=7)
    labels = [f"d {head_dim}\n{'causal' if causal else 'full'}" for _, head_dim, causal in cells]
    axes.set_xticks(range(len(cells)), labels)
    axes.set_title(f"{mode}: speed relative to {names[0]}")
    axes.grid(alpha=0.3, axis="y")
