"""What is measured in docs/context_parallel.md: per-GPU speeds and bandwidths of a result of context_parallel.py."""

from __future__ import annotations

from pathlib import Path

import cp_model
from markdown_tables import markdown_table, rewritten, wrapped

PAGE = Path("docs", "context_parallel.md")
RESULT = Path("benchmarks", "results", "h100x2_context_parallel.json")
BLOCK = "cp-measured"
NOTHING = "Nothing has been measured yet."
PROBLEMS = ("causal", "window", "packed")
WINDOW = 4096  # that of context_parallel.py, which needs torch
METHODS = (*cp_model.METHODS, "all_gather_copies")
MODES = {"forward": "Forward", "both": "Forward and backward"}
INTRODUCTION = f"""\
Measured: per-GPU speed over that of one GPU with the whole problem, forward / forward and backward, %, each row's
fastest in bold. `causal`: in zigzag chunks; `window`: each row sees {WINDOW} keys before its own, contiguous chunks;
`packed`: documents of log-normal lengths. The one GPU runs `packed` as a single call of `flash_attn_varlen_func`; what
it reaches stands beside. Other packages are measured where `benchmarks/cp_peers.py` has a call of theirs for the
problem.
"""


def ran(result):
    """{(problem, tokens): {name: row}} of what was measured."""
    found = {}
    for row in result["rows"]:
        if "forward" in row:
            found.setdefault((row["problem"], row["tokens"]), {})[row["name"]] = row
    return dict(sorted(found.items(), key=lambda item: (PROBLEMS.index(item[0][0]), item[0][1])))


def columns(problems):
    """Our methods, then the peers that ran anywhere."""
    names = dict.fromkeys(name for entries in problems.values() for name in entries)
    return [name for name in METHODS if name in names] + [name for name in names if name not in METHODS]


def size(tokens):
    return f"{tokens >> 10}k" if tokens % 1024 == 0 else str(tokens)


def percent(row, mode):
    return round(100 * row[mode]["per_gpu"])


def cell(entries, name):
    """Forward / forward and backward, bold where no other figure of the row is higher."""
    if name not in entries:
        return "–"
    shown = []
    for mode in MODES:
        figure, highest = percent(entries[name], mode), max(percent(row, mode) for row in entries.values())
        shown.append(f"**{figure}**" if figure == highest else str(figure))
    return " / ".join(shown)


def one_gpu(entries):
    """TFLOPS of one GPU with the whole problem."""
    row = next(iter(entries.values()))
    return " / ".join(f"{row[mode]['tflops_per_gpu'] / row[mode]['per_gpu']:.0f}" for mode in MODES)


def fastest(entries, mode, names):
    return max(names, key=lambda name: entries[name][mode]["per_gpu"])


def lead_text(problems, mode):
    """Where a peer is faster than all of our methods."""
    beside, behind = 0, []
    for (problem, tokens), entries in problems.items():
        peers = [name for name in entries if name not in METHODS]
        if not peers:
            continue
        beside += 1
        chosen = [fastest(entries, mode, names) for names in (peers, [name for name in entries if name in METHODS])]
        theirs, ours = (entries[name][mode]["per_gpu"] for name in chosen)
        if theirs > ours:
            figures = (f"`{name}` {100 * speed:.1f}" for name, speed in zip(chosen, (theirs, ours)))
            behind.append(f"{problem} {size(tokens)} ({', '.join(figures)})")
    told = f"{MODES[mode]}: a peer is faster than the best of our methods in {len(behind)} of {beside} rows with peers"
    return told + (f": {', '.join(behind)}." if behind else ".")


def bandwidth_text(found):
    told = (
        f"Bandwidth in each direction, {found['bytes'] >> 20} MiB at a time: {found['messages']:.0f} GB/s by messages "
    )
    told += "of the group"
    if "copy_engine" not in found:
        return told + "."
    beside = [found[f"{name}_under_attention"] for name in ("messages", "copy_engine")]
    slower = [found[f"attention_slowdown_by_{name}"] for name in ("messages", "copy_engine")]
    told += f", {found['copy_engine']:.0f} by copies between GPUs; while attention runs {beside[0]:.0f} and "
    return told + f"{beside[1]:.0f}, and attention takes {slower[0]:.2f} and {slower[1]:.2f} times as long as alone."


def missing_lines(result, names):
    """Peers that ran nowhere and why, and what time was too short for."""
    reasons = {}
    for row in result["rows"]:
        if row["name"] not in names:
            reasons.setdefault(row["name"], {})[" ".join(str(row["error"]).split())] = None
    told = []
    for name, found in reasons.items():
        failures = [reason for reason in found if not reason.startswith("NotImplementedError")]
        told.append(f"`{name}` ({'; '.join(failures or found)})")
    lines = [f"Ran nowhere: {', '.join(told)}."] if told else []
    left_out = [f"{problem} {size(tokens)}" for problem, tokens in result["left_out"]]
    return lines + ([f"Left out, for time: {', '.join(left_out)}."] if left_out else [])


def between(numbers):
    return " to ".join(str(n) for n in sorted({min(numbers), max(numbers)}))


def count_text(problems):
    """How much was measured."""
    modes = [row[mode] for entries in problems.values() for row in entries.values() for mode in MODES]
    told = f"{len(modes)} times of methods and peers in {len(problems)} problems"
    rounds = {found["rounds"] for found in modes if "rounds" in found}
    if rounds:
        told += f", each the median of {between(rounds)} rounds"
    told += "; the slowest rank's"
    counts = {found["calls"] for found in modes if "calls" in found}
    if counts:
        told += f". A time is that of one of {between(counts)} calls that follow each other behind as many others"
    return told + "."


def origin_text(result):
    device, commit = result["device"], (result["commit"] or "unknown")[:12] + "+changes" * bool(result["dirty"])
    driver = f", driver {device['driver']}" if device.get("driver") else ""
    return f"{result['ranks']} × {device['name']}{driver}, torch {result['torch']}, commit {commit}."


def block(result):
    """The lines between the markers; `result` None: there is none."""
    if result is None:
        return [NOTHING]
    problems = ran(result)
    names = columns(problems)
    rows = [
        [problem, size(tokens), one_gpu(entries), *(cell(entries, name) for name in names)]
        for (problem, tokens), entries in problems.items()
    ]
    header = ["problem", "tokens", "one GPU, TFLOPS", *(f"`{name}`" for name in names)]
    told = [
        f"{count_text(problems)} {origin_text(result)}",
        *(lead_text(problems, mode) for mode in MODES),
        bandwidth_text(result["bandwidth"]),
    ]
    told += missing_lines(result, names)
    lines = [*wrapped(INTRODUCTION), "", *markdown_table(header, rows)]
    for text in told:
        lines += ["", *wrapped(text)]
    return lines


def page(text, result):
    """docs/context_parallel.md's `text` with its block written anew."""
    return rewritten(text, BLOCK, block(result))
