"""The generated parts of README.md and of documents.

Each block is a function of stored results (results.py) and gives lines of Markdown. BLOCKS says which page has which;
`python benchmarks/report.py --docs` writes them, --check compares them.
"""

from __future__ import annotations

import itertools
import math
from functools import partial
from statistics import geometric_mean

import accuracy_table
import cp_tables
from markdown_tables import markdown_table, mask, rewritten, wrapped
from plots import PLOTTED_GROUPS
from results import ROOT, device_name, environment_line, measured_commit, stored
from scores import (
    PEERS,
    PLAIN,
    best_ratios,
    gigabytes_per_second,
    judged_pairs,
    memory_lines,
    modes,
    overhead_lines,
    ratios,
    rows_of,
    score_line,
    share_of_plain,
    significant,
    speed,
)

PAYS, SLOWER = 1.03, 0.97
SHORT = 1024  # tokens of the longest sequence of a short call
FP8 = {"ours": "`bf16`", "ours_fp8": "`fp8`", "ours_fp8_fast": "`fp8 fast`"}


def origin(result, name):
    """Where the figures of a table are from, and the command that measures them again."""
    again = f"`python benchmarks/lab/run_all.py {name}`"
    return wrapped(f"{result['dtype']}, {environment_line(result)}; `benchmarks/results/{name}.json`, {again}.")


def gain(ratio):
    return "–" if ratio is None else f"{ratio:.2f}×"


def mean_and_worst(values, shapes=0):
    """Geometric mean and worst of ratios in a cell; how many they are, if they are not of all `shapes`."""
    if not values:
        return "–"
    of = f", {len(values)} of {shapes}" if shapes not in (0, len(values)) else ""
    return f"{geometric_mean(values):.2f}× ({min(values):.2f}×{of})"


def against_best(rows):
    """Ratios to the fastest peer of each row in a cell, and how often it is faster than ours."""
    values = [ratio for _, ratio, _ in best_ratios(rows)]
    slower = sum(value < 1 for value in values)
    return mean_and_worst(values) + f", {slower} of {len(values)} slower" * (slower > 0)


# ---- forward and backward --------------------------------------------------------------------------------------------


def cell_entry(row):
    """TFLOPS, and the speed relative to the fastest peer, which is named."""
    against = "".join(f" ({gain(ratio)} {PEERS[peer][0]})" for _, ratio, peer in best_ratios([row]))
    return significant(row["results"]["ours"]["tflops"]) + against


def cell_tables(result):
    """A table per mode: a line per head dim and mask, a column per sequence length."""
    lines = []
    for mode in modes(result):
        cells = [row for row in rows_of(result, PLOTTED_GROUPS, mode) if "ours" in row["results"]]
        lengths = sorted({row["seqlen_k"] for row in cells})
        entries = {(row["head_dim"], row["causal"], row["seqlen_k"]): cell_entry(row) for row in cells}
        rows = [
            [str(head_dim), mask(causal), *(entries.get((head_dim, causal, n), "") for n in lengths)]
            for head_dim, causal in sorted({(row["head_dim"], row["causal"]) for row in cells})
        ]
        lines += ["", *markdown_table([f"{mode}: head dim", "mask", *(f"s {length}" for length in lengths)], rows)]
    return lines


def peer_table(*sources):
    """Speed relative to each implementation: geometric mean and worst. sources: (result, groups); None: all groups."""
    peers = list(dict.fromkeys(peer for result, _ in sources for _, peer in judged_pairs(result)))
    lines = []
    for result, groups in sources:
        pairs = judged_pairs(result)
        for group, mode in itertools.product(groups or result["groups"], modes(result)):
            shapes = len(rows_of(result, group, mode))
            for name in dict.fromkeys(name for name, _ in pairs):
                found = [
                    [ratio for _, ratio in ratios(result, peer, mode, group, name) if (name, peer) in pairs]
                    for peer in peers
                ]
                if any(found):
                    title = f"`{group}` {mode}" if name == "ours" else f"`{group}` {mode}, `{name}`"
                    lines.append([title, *(mean_and_worst(values, shapes) for values in found)])
    return markdown_table(["rows", *(f"`{peer}`" for peer in peers)], lines)


def grid_block():
    result = stored("grid")
    lines = [*origin(result, "grid"), *cell_tables(result), ""]
    return lines + [f"- {line}" for line in overhead_lines(result) + memory_lines(result)]


def everyone_block():
    lines = peer_table((stored("grid"), ("cells", "gqa")), (stored("grid_b4h8"), ("b4h8",)))
    return [*lines, "", *origin(stored("grid_b4h8"), "grid_b4h8")]


# ---- features --------------------------------------------------------------------------------------------------------


def row_table(result, groups, mode=None):
    """Every row of some groups: time, TFLOPS or GB/s, the share of its plain call, peers."""
    rows = [row for row in rows_of(result, groups, mode) if "ours" in row["results"]]
    peers = [name for name in result["implementations"] if name not in ("ours", PLAIN)]
    peers = [name for name in peers if any(name in row["results"] for row in rows)]
    lines = []
    for row in rows:
        mine, share = row["results"]["ours"], share_of_plain(row)
        times = [row["results"][peer]["ms"] / mine["ms"] if peer in row["results"] else None for peer in peers]
        cells = [row["label"], significant(1000 * mine["ms"]), speed(row, "ours"), f"{share:.2f}" if share else "–"]
        lines.append([*cells, *map(gain, times)])
    title, unit = (
        f"{groups} {mode}" if mode else "problem",
        "GB/s" if any(row.get("bytes") for row in rows) else "TFLOPS",
    )
    return markdown_table([title, "µs", unit, "of plain", *(f"against `{peer}`" for peer in peers)], lines)


def features_block():
    result = stored("fwd_other")
    groups = ("window", "varlen_equal", "features", "value_dim")
    scored = ["gqa", "varlen", "small", "one_wave", "small_eager"]
    return [*origin(result, "fwd_other"), "", *row_table(result, groups), "", *peer_table((result, scored))]


def deterministic_block():
    result = stored("deterministic")
    return [*peer_table((result, None)), "", *origin(result, "deterministic")]


def mma_sync_block():
    result = stored("fwd_bwd")
    return [*peer_table((result, None)), "", *origin(result, "fwd_bwd")]


# ---- masks and biases ------------------------------------------------------------------------------------------------


def against(peer, row):
    times = row["results"]
    return gain(times[peer]["ms"] / times["ours"]["ms"] if peer in times else None)


def mask_table(result, groups, title, texts):
    """A line for each problem, forward and backward in each cell. texts: {column: text of a row}; then ours relative to
    each peer."""
    problems = {}
    for row in rows_of(result, groups):
        if "ours" in row["results"]:
            problems.setdefault(row["label"], []).append(row)
    measured = {name for rows in problems.values() for row in rows for name in row["results"]} - {"ours", PLAIN}
    peers = {f"`{x}`": partial(against, x) for x in result["implementations"] if x in measured}
    lines = []
    for label, rows in problems.items():
        cells = ([text(row) for row in rows] for text in (*texts.values(), *peers.values()))
        lines.append([label, *(", ".join(cell) if set(cell) != {"–"} else "–" for cell in cells)])
    return markdown_table([title, *texts, *peers], lines)


def masks_block():
    result = stored("masks")
    times = {"µs": lambda row: significant(1000 * row["results"]["ours"]["ms"])}
    rates = {"TFLOPS": lambda row: speed(row, "ours")}
    shares = {**times, "of plain": lambda row: f"{share:.2f}" if (share := share_of_plain(row)) else "–"}
    lines = [*mask_table(result, "masks", "mask", rates), "", *mask_table(result, ("bool", "bias"), "tensor", shares)]
    planned = []
    for row in result["plan"]:
        us = ", ".join(f"{times['together']:.0f}" for times in row["us"].values() if times)
        planned.append(f"{row['label']}, {row['keys']} keys {us}")
    told = f"µs of the plan of one head: {'; '.join(planned)}." if planned else ""
    of = f"{device_name(result)}, torch {result['versions']['torch']}, commit {measured_commit(result)}"
    return [*lines, "", *wrapped(f"{told} {of}; `python benchmarks/lab/run_all.py masks`.")]


# ---- decoding --------------------------------------------------------------------------------------------------------


def cache_key(row):
    """What a row over a cache shares with another row over the same cache."""
    return tuple(row.get(name) for name in ("batch", "seqlen_k", "nheads", "nheads_k", "head_dim", "page_size"))


def decode_table(result):
    """One token over a cache: µs by page size, the share of the read ceiling, SDPA, a layer of a model."""
    ceiling = result["read_ceiling"]["gbs"]
    layers = {cache_key(row): row for row in rows_of(result, "decode_layers")}
    by_size = {}
    for row in rows_of(result, "decode"):
        by_size.setdefault((row["nheads"], row["nheads_k"], row["batch"], row["seqlen_k"]), []).append(row)

    def times(rows, name):
        return " / ".join(significant(1000 * row["results"][name]["ms"]) if row else "–" for row in rows)

    lines = []
    for (heads, heads_k, batch, keys), rows in by_size.items():
        of_layers = [layers.get(cache_key(row)) for row in rows[:2]]
        share = f"{gigabytes_per_second(rows[0], 'ours') / ceiling:.0%}"
        share += f" (layers {gigabytes_per_second(of_layers[0], 'ours') / ceiling:.0%})" if of_layers[0] else ""
        layer = times(of_layers, "ours") if any(of_layers) else "–"
        size = f"{heads}/{heads_k}, {batch} × {keys}"
        lines.append([size, times(rows, "ours"), share, times(rows[:1], "sdpa_flash"), layer])
    pages = " / ".join(f"pages of {row['page_size']}" if row.get("page_size") else "dense" for row in rows)
    header = ["heads, batch × keys", f"one call, µs: {pages}", "share of the read ceiling, dense"]
    return markdown_table([*header, "`sdpa_flash`, µs", "a layer, µs: dense / pages of 16"], lines)


def relative_table(result):
    """Other calls over a cache relative to one token over the same cache, of 16 bits: the geometric mean of times."""
    base = {cache_key(row): row["results"]["ours"]["ms"] for row in rows_of(result, ("decode", "decode_layers"))}
    layers = {cache_key(row): row["results"]["ours"]["ms"] for row in rows_of(result, "decode_layers")}
    rows = []
    for group in ("decode_append", "decode_tokens", "decode_invariant", "decode_8bit", "decode_features"):
        others = layers if group == "decode_8bit" else base
        found = [row for row in rows_of(result, group) if "ours" in row["results"]]
        times = [(row["label"], row["results"]["ours"]["ms"] / others[cache_key(row)]) for row in found
                 if cache_key(row) in others]  # fmt: skip
        speeds = [gigabytes_per_second(row, "ours") for row in found]
        cells = [f"`{group}`", str(len(found)), f"{min(speeds):.0f} to {max(speeds):.0f}"]
        longest = max(times, key=lambda item: item[1], default=None)
        mean = f"{geometric_mean([ratio for _, ratio in times]):.2f}×" if times else "–"
        rows.append([*cells, mean, f"{longest[1]:.2f}× ({longest[0]})" if longest else "–"])
    return markdown_table(["rows", "count", "GB/s", "time of `decode`", "longest"], rows)


def decode_block():
    result = stored("decode")
    ceiling = result["read_ceiling"]
    lines = [*origin(result, "decode"), "", *decode_table(result), "", *relative_table(result), ""]
    lines += peer_table((result, ["decode", "decode_layers", "decode_eager", "prefill_cache"]))
    lines += ["", f"- read ceiling of this run: {ceiling['gbs']:.0f} GB/s of device memory ({ceiling['method']})"]
    return lines + [f"- {line}" for line in overhead_lines(result)]


# ---- training --------------------------------------------------------------------------------------------------------


def loss_block():
    """The runs of examples/train_char_lm.py."""
    result = stored("train_char_lm")
    lines = []
    for name, run in result["runs"].items():
        gaps = result["difference_to_plain"].get(name)
        curve = [f"{run['losses'][0]:.3f}", f"{run['losses'][-1]:.3f}", f"{run['validation']:.3f}"]
        lines.append([f"`{name}`", *curve, *([f"{x:.1e}" for x in gaps] if gaps else ["–", "–"])])
    header = ["attention", "first loss", "last loss", "held out", "rms difference to plain", "largest"]
    config = ", ".join(f"{key} {value}" for key, value in result["config"].items())
    told = f"{device_name(result)}, commit {measured_commit(result)}; {config}."
    return [*markdown_table(header, lines), "", *wrapped(told)]


def gains_block():
    """Whole models (examples/gains.py): milliseconds by each way, memory, and what does not pay."""
    result = stored("gains")
    lines, equal, slower = [], [], []
    for row in result["rows"]:
        before, others = row["ms"]["torch"], {name: ms for name, ms in row["ms"].items() if name != "torch"}
        fastest = min(others, key=others.get)
        what = f"{row['what']}, {row['batch']} × {row['seqlen']}" + f" + {row['new_tokens']}" * (row["new_tokens"] > 0)
        cells = (f"{others[name]:.1f}" if name in others else "–" for name in ("use", "fa_native", "kvcache"))
        memory = [row["gib"][name] for name in ("torch", fastest)]  # None on a CPU
        gib = " → ".join(f"{x:.1f}" if x else "–" for x in memory)
        lines.append([what, f"{before:.1f}", *cells, gain(before / others[fastest]), gib])
        slower += [f"`{name}` in {what} ({gain(before / ms)})" for name, ms in others.items() if before < SLOWER * ms]
        if before / others[fastest] < PAYS:
            equal.append(what)
    header = ["", "PyTorch's SDPA, ms", "`use`", "`fa_native`", "`kvcache`", "gain of the fastest", "peak memory, GiB"]
    told = f"Where it does not pay (a gain below {PAYS}): {'; '.join(equal) or 'none of these'}."
    told += f" Slower than SDPA: {'; '.join(slower) or 'none'}."
    versions = f"{environment_line(result)}, transformers {result['versions']['transformers']}."
    return [*markdown_table(header, lines), "", *wrapped(told), "", *wrapped(versions)]


# ---- errors ----------------------------------------------------------------------------------------------------------


def accuracy_block():
    result = stored("accuracy")
    return [*accuracy_table.block(result), "", *origin(result, "accuracy")]


# ---- 8 bits ----------------------------------------------------------------------------------------------------------


def fp8_cell(row, names):
    """TFLOPS by call, bold where no other is higher."""
    rates = {name: round(row["results"][name]["tflops"]) for name in names if name in row["results"]}
    highest = max(rates.values())
    shown = {name: f"**{rate}**" if rate == highest else str(rate) for name, rate in rates.items()}
    return " / ".join(shown.get(name, "–") for name in names)


def fp8_block():
    result = stored("fp8")
    rows = rows_of(result, "fp8")
    names = [name for name in FP8 if any(name in row["results"] for row in rows)]
    lengths = sorted({row["seqlen_k"] for row in rows})
    by_shape = {}
    for row in rows:
        shape = row["head_dim"], row["nheads"], row["nheads_k"], row["causal"]
        by_shape.setdefault(shape, {})[row["seqlen_k"]] = fp8_cell(row, names)
    lines = [
        [str(d), f"{heads}/{heads_k}", mask(causal), *(cells.get(length, "–") for length in lengths)]
        for (d, heads, heads_k, causal), cells in sorted(by_shape.items())
    ]
    tokens = sorted({row["batch"] * row["seqlen_k"] for row in rows})
    told = f"TFLOPS of {' / '.join(FP8[name] for name in names)}, the fastest in bold, batch × s = "
    told += f"{' or '.join(map(str, tokens))}. `fp8`: e4m3 q, k and v with descales of heads, the transposition of V "
    told += 'included; `fp8 fast`: the same with `exp="fast"`.'
    scores = [
        f"- {score_line(found, f'{FP8[name]} against `bf16`')}"
        for name in names[1:]
        if (found := ratios(result, "ours", "fwd", "fp8", name))
    ]
    products = ", ".join(f"`{name}` {rate:.0f}" for name, rate in result["fp8_products"]["tflops"].items())
    size = result["fp8_products"]["size"]
    scores.append(f"- torch's product of e4m3 matrices, {size} × {size}, TFLOPS: {products}")
    table = markdown_table(["head dim", "heads", "mask", *(f"s {length}" for length in lengths)], lines)
    return [*wrapped(told), "", *table, "", *scores, "", *wrapped(f"{environment_line(result)}.")]


# ---- the README ------------------------------------------------------------------------------------------------------


def speed_line(title, measured, peers, speed="", groups=None, mode="fwd", longest=math.inf):
    """A row of the table: our speed, ours relative to each of `peers`, and to the fastest of each shape."""
    rows = [row for row in rows_of(measured, groups, mode) if "ours" in row["results"] and row["seqlen_k"] <= longest]
    fastest = max(row["results"]["ours"]["tflops"] for row in rows)
    each = ([ratio for _, ratio, _ in best_ratios(rows, (peer,))] for peer in peers)
    cells = [mean_and_worst(values, len(rows)) for values in each]
    return [f"{title}, {len(rows)} shapes", speed or f"up to {fastest:.0f} TFLOPS", *cells, against_best(rows)]


def speed_block():
    """A row of speed for each kind of call; peers that were not measured have no column."""
    names = ("grid", "grid_b4h8", "fwd_other", "fwd_bwd", "decode")
    trained, short, other, mma_sync, decoded = map(stored, names)
    peers = [name for name in PEERS if name in trained["implementations"]]
    decode = rows_of(decoded, "decode", "fwd")
    share = max(gigabytes_per_second(row, "ours") for row in decode) / decoded["read_ceiling"]["gbs"]
    rows = [
        speed_line("forward", trained, peers, groups="cells"),
        speed_line("backward", trained, peers, groups="cells", mode="bwd"),
        speed_line(f"short forward, s ≤ {SHORT}", short, peers, groups="b4h8", longest=SHORT),
        speed_line(f"short backward, s ≤ {SHORT}", short, peers, groups="b4h8", mode="bwd", longest=SHORT),
        speed_line("eager calls where the host decides", other, peers, groups="small_eager"),
        speed_line("packed sequences, forward", other, peers, groups="varlen"),
        *(
            speed_line(f"mma.sync kernels, {title}", mma_sync, peers, groups="cells", mode=mode)
            for title, mode in (("forward", "fwd"), ("backward", "bwd"))
            if rows_of(mma_sync, "cells", mode)
        ),
        speed_line("decoding", decoded, peers, f"up to {share:.0%} of the read ceiling", "decode"),
        speed_line("prompts over a cache", decoded, peers, groups="prefill_cache"),
    ]
    header = ["", "this package", *(PEERS[peer][1] for peer in peers), "the fastest of them, shape by shape"]
    told = "Geometric mean of our speed relative to theirs (worst shape), and how often ours is slower. "
    told += f"{environment_line(trained)}."
    return [*markdown_table(header, rows), "", f"{told} All shapes: [docs/benchmarks.md](docs/benchmarks.md)."]


def plot_block():
    return ["![forward, head dim 128, and its peers](benchmarks/results/plots/fwd_d128.png)"]


BLOCKS = {
    "README.md": {"plot": plot_block, "speed": speed_block},
    "docs/benchmarks.md": {
        "grid": grid_block,
        "everyone": everyone_block,
        "features": features_block,
        "deterministic": deterministic_block,
        "mma_sync": mma_sync_block,
        "decode": decode_block,
        "accuracy": accuracy_block,
        "loss": loss_block,
    },
    "docs/gains.md": {"gains": gains_block},
    "docs/masks.md": {"masks": masks_block},
    "docs/fp8.md": {"fp8_speed": fp8_block},
    "docs/context_parallel.md": {"cp-measured": cp_tables.measured_block},
}


def pages(blocks, root=ROOT):
    """{path: (text, text with its blocks written anew)}."""
    found = {}
    for name, of_page in blocks.items():
        text = written = (root / name).read_text(encoding="utf-8")
        for block, lines in of_page.items():
            written = rewritten(written, block, lines())
        found[root / name] = text, written
    return found
