"""What a sweep found: scores, the effect of each choice, and the table in docs/tuning/sweeps.md. Plain data."""

from __future__ import annotations

import re
from statistics import geometric_mean

from sweep_configs import Alternative, neighbours

HEADING = "## Sweeps"


def scored(result):
    """[(tile, entry, score, worst)] best first. score: geometric mean over the cells of (time of the tile of
    plan/tiles.h / time of this one); worst: the least of these ratios."""
    entries = {Alternative(**entry["tile"]): entry for entry in result["alternatives"]}
    base = entries[Alternative(**result["table_tile"])]["ms"]
    rows = []
    for tile, entry in entries.items():
        ratios = [base[cell] / milliseconds for cell, milliseconds in entry["ms"].items()]
        rows.append((tile, entry, geometric_mean(ratios), min(ratios)))
    return sorted(rows, key=lambda row: -row[2])


def effects(result):
    """Lines: what each single change of the winner's fields costs or gains."""
    rows = scored(result)
    scores = {tile: score for tile, _, score, _ in rows}
    winner = rows[0][0]
    return [
        f"{field} {getattr(winner, field)} → {getattr(tile, field)}: {scores[tile] / scores[winner] - 1:+.1%}"
        for field, tile in neighbours(scores, winner)
    ]


def tflops(result, entry, cell):
    return result["flops"][cell] / entry["ms"][cell] / 1e9


def section(result):
    """The result of one head dim as Markdown."""
    rows, head_dim = scored(result), result["head_dim"]
    winner, _, score, _ = rows[0]
    in_use = Alternative(**result["table_tile"])
    cells = list(result["flops"])
    lines = [
        f"### Sweep, forward, head dim {head_dim}",
        "",
        f"{result['device']}, commit {result['commit']}: `python benchmarks/sweep.py --head-dims {head_dim}`.",
        "Score: geometric mean of the speed relative to the tile in use, over full and causal at s "
        f"{', '.join(map(str, result['seqlens']))}; worst: the least of these.",
        "",
        "| block_m × block_n, warps, blocks per SM | registers, spill bytes | score | worst | "
        + " | ".join(cells)
        + " |",
        "|---|---|---|---|" + "---|" * len(cells),
    ]
    for tile, entry, tile_score, worst in rows:
        name = f"**{tile}**" if tile == winner else str(tile)
        name += " (in use)" if tile == in_use else ""
        figures = " | ".join(f"{tflops(result, entry, cell):.0f}" for cell in cells)
        resources = f"{entry['registers']}, {entry['spills']}"
        lines.append(f"| {name} | {resources} | {tile_score:.3f} | {worst:.3f} | {figures} |")
    verdict = "which is in use" if winner == in_use else f"{score:.3f} × the tile in use"
    lines += [
        "",
        f"Winner: {winner}, {verdict}. One change of it at a time: {'; '.join(effects(result)) or 'not tried'}.",
    ]
    return "\n".join(lines)


def table_line(result):
    """The winner as a line of plan/tiles.h."""
    tile = scored(result)[0][0]
    return f"{{{result['head_dim']}, {tile.block_m}, {tile.block_n}, {tile.warps}, {tile.blocks_per_sm}, 1}},"


def written(text, result):
    """The document `text` with the section of this head dim put in the place of an earlier one, or at the end."""
    begin, end = (f"<!-- sweep:d{result['head_dim']} {side} -->" for side in ("begin", "end"))
    block = f"{begin}\n{section(result)}\n{end}"
    if begin in text:
        return re.sub(re.escape(begin) + ".*?" + re.escape(end), lambda _: block, text, flags=re.DOTALL)
    heading = "" if HEADING in text else f"\n{HEADING}\n"
    return f"{text.rstrip()}\n{heading}\n{block}\n"
