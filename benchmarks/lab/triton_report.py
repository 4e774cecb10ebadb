"""The tables and the plot of a result of triton_ladder.py; needs no Triton."""

from __future__ import annotations

from statistics import geometric_mean

from markdown import markdown_table, mask, wrapped
from plots import DPI, colors_of, curves, draw_panel, new_figure
from results import environment_line
from scores import significant
from triton_variants import MODES, RUNGS

TILES_TOLD = "Tiles are queries × keys (warps, stages), of the forward / of dK and dV / of dQ."
HEAD_DIMS = (64, 128)
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
    flags = ["transposed_k"] if variant.transposed_k else []
    loads = "TMA" if variant.use_tma else "pointers"
    delta = "delta shared" if variant.shared_delta else "delta twice"
    return "; ".join([loads, *(flags or [delta]), f"tiles {tiles_told(variant)}"])


def tiles_told(variant):
    """The tiles to choose from, of each kernel."""
    if not variant.tiles:
        return "tuned among the kernels' lists"
    return " / ".join(
        " or ".join(f"{m} × {n} ({warps}, {stages})" for m, n, warps, stages in own) for own in variant.tiles
    )


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
    header = ["TFLOPS"] + [f"{mode} d{head_dim} {mask(causal)}" for mode, head_dim, causal in cells]
    return markdown_table(header, lines)


def entry_of_peer(result, peer, cell):
    """TFLOPS at the longest sequence, and how near the comparator comes to it."""
    ratio = relative(result, last_rung(cell[0]), peer, cell)
    return entry(result, peer, None, cell) + (f" ({ratio:.2f}×)" if ratio else "")


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
    return [*measured_table(result), "", *(f"- {line}" for line in failure_lines(result))]


def block(result):
    """The steps, and what was measured of them."""
    longest = max(row["seqlen_k"] for row in result["rows"])
    told = (
        f"TFLOPS at s {longest}; in brackets, over all lengths, the speed relative to what the step is on top of, and "
    )
    told += (
        f"in the rows of peers that of the comparator relative to them. {result['dtype']}, {environment_line(result)}."
    )
    return [*steps_table(), "", TILES_TOLD, "", *wrapped(told), "", *measured_lines(result)]


def draw(path, result):
    """The curves of each head dim and mask, a line of panels for each mode."""
    figure, colors, entries = new_figure(13, 6), colors_of(result), {}
    panels = figure.subplots(len(MODES), 4)
    for line, mode in zip(panels, MODES):
        for axes, (head_dim, causal) in zip(line, ((d, causal) for d in HEAD_DIMS for causal in (False, True))):
            title = f"{mode}, d {head_dim}, {mask(causal)}"
            draw_panel(axes, curves(result, head_dim, mode, causal), colors, title)
            entries.update(dict(zip(*reversed(axes.get_legend_handles_labels()))))
        line[0].set_ylabel("TFLOPS")
    figure.legend(entries.values(), entries.keys(), loc="outside lower center", ncols=len(colors), frameon=False)
    figure.suptitle(f"The Triton ladder, {result['dtype']}\n{environment_line(result)}", fontsize=10)
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path, dpi=DPI)
