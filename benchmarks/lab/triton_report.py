"""The tables of a result of triton_ladder.py; needs no Triton."""

from __future__ import annotations

from statistics import geometric_mean

from markdown_tables import markdown_table, mask, wrapped
from plots import curves, ends
from results import OUT_OF_MEMORY, environment_line
from scores import significant
from triton_variants import MODES, RUNGS

PEERS = ("sdpa_flash", "sdpa_cudnn", "naive", "ours")


def last_rung(mode):
    """The comparator in a mode: what differs from it only where the mode does not show it is not measured."""
    return [rung.name for rung in RUNGS if mode in rung.modes][-1]


def steps_table():
    """The rungs."""
    rows = []
    for rung in RUNGS:
        place = f"`{rung.over}`" if rung.over else "the start"
        rows.append([f"`{rung.name}`", rung.adds, place, ", ".join(rung.modes)])
    return markdown_table(["step", "adds", "on top of", "measured"], rows)


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


def longest(result):
    return max(row["seqlen_k"] for row in result["rows"])


def entry(result, name, base, cell):
    """TFLOPS at the longest sequence, and the relative speed."""
    mode, head_dim, causal = cell
    tflops = dict(curves(result, head_dim, mode, causal).get(name, ())).get(longest(result))
    if tflops is None:
        return OUT_OF_MEMORY if (name, longest(result)) in ends(result, head_dim, mode, causal) else "–"
    ratio = relative(result, name, base, cell) if base else None
    return significant(tflops) + (f" ({ratio:.2f}×)" if ratio else "")


def measured_table(result):
    cells = columns(result)
    lines = [[f"`{rung.name}`", *(entry(result, rung.name, rung.over, cell) for cell in cells)] for rung in RUNGS]
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


def measured(result):
    """What was measured, in words and as a table."""
    told = f"TFLOPS at s {longest(result)}; in brackets, over all lengths, the speed relative to what the step is on "
    told += "top of, and in the rows of peers that of the comparator relative to them. "
    told += f"{result['dtype']}, {environment_line(result)}."
    return [*wrapped(told), "", *measured_table(result)]
