"""Tables of what context_parallel.py measured."""

from __future__ import annotations

from markdown_tables import markdown_table, wrapped
from results import measured_commit, stored

PROBLEMS = ("causal", "window", "packed")
METHODS = ("all_gather", "ring", "ulysses", "all_gather_copies")
MODES = ("forward", "both")
INTRODUCTION = """\
Speed per GPU relative to one GPU with the whole problem, forward / forward and backward, in percent, the fastest of
each row in bold. `causal`: zigzag chunks; `window`: each row sees 4096 keys before its own, contiguous chunks;
`packed`: documents of log-normal lengths, on one GPU a single call of `flash_attn_varlen_func`.
"""


def ran(rows):
    """{(problem, tokens): {name: row}} of what was measured."""
    found = {}
    for row in rows:
        if "forward" in row:
            found.setdefault((row["problem"], row["tokens"]), {})[row["name"]] = row
    return dict(sorted(found.items(), key=lambda item: (PROBLEMS.index(item[0][0]), item[0][1])))


def size(tokens):
    return f"{tokens >> 10}k" if tokens % 1024 == 0 else str(tokens)


def cell(entries, name):
    """Forward / forward and backward, bold where no other figure of the row is higher."""
    if name not in entries:
        return "–"
    shown = []
    for mode in MODES:
        figures = {other: round(100 * row[mode]["per_gpu"]) for other, row in entries.items()}
        shown.append(f"**{figures[name]}**" if figures[name] == max(figures.values()) else str(figures[name]))
    return " / ".join(shown)


def one_gpu(entries):
    """TFLOPS of one GPU with the whole problem."""
    row = next(iter(entries.values()))
    return " / ".join(f"{row[mode]['tflops_per_gpu'] / row[mode]['per_gpu']:.0f}" for mode in MODES)


def bandwidth_text(found):
    told = f"Bandwidth in each direction, {found['bytes'] >> 20} MiB at a time: {found['messages']:.0f} GB/s by "
    told += "messages of the group"
    return told + (f", {found['copy_engine']:.0f} by copies between GPUs." if "copy_engine" in found else ".")


def missing_text(result, names):
    """Peers that ran nowhere and why, and problems that the time did not suffice for."""
    reasons = {}
    for row in result["rows"]:
        if row["name"] not in names:
            reasons.setdefault(row["name"], {})[" ".join(str(row["error"]).split())] = None
    told = [f"`{name}` ({'; '.join(found)})" for name, found in reasons.items()]
    left_out = [f"{problem} {size(tokens)}" for problem, tokens in result["left_out"]]
    lines = [f"Ran nowhere: {', '.join(told)}."] if told else []
    return " ".join(lines + ([f"Left out, for time: {', '.join(left_out)}."] if left_out else []))


def origin_text(result):
    device = result["device"]
    driver = f", driver {device['driver']}" if device.get("driver") else ""
    return f"{result['ranks']} × {device['name']}{driver}, torch {result['torch']}, commit {measured_commit(result)}."


def columns(rows):
    """Our methods, then the peers that ran anywhere."""
    found = dict.fromkeys(row["name"] for row in rows if "forward" in row)
    return [name for name in METHODS if name in found] + [name for name in found if name not in METHODS]


def table(rows):
    names = columns(rows)
    lines = [
        [problem, size(tokens), one_gpu(entries), *(cell(entries, name) for name in names)]
        for (problem, tokens), entries in ran(rows).items()
    ]
    return markdown_table(["problem", "tokens", "one GPU, TFLOPS", *(f"`{name}`" for name in names)], lines)


def measured_lines(result):
    rows = result["rows"]
    told = [bandwidth_text(result["bandwidth"]), missing_text(result, columns(rows)), origin_text(result)]
    return [*wrapped(INTRODUCTION), "", *table(rows), "", *wrapped(" ".join(told))]


def measured_block():
    return measured_lines(stored("context_parallel"))
