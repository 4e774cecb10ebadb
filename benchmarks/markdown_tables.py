"""Markdown of results: the figures block of a document, tables of scores, of rows, and of attention over a KV cache."""

from __future__ import annotations

import re
import textwrap
from statistics import geometric_mean

from plots import PLOTTED_GROUPS
from scores import (
    OUT_OF_MEMORY,
    PLAIN,
    environment_line,
    gigabytes_per_second,
    judged_pairs,
    memory_lines,
    modes,
    overhead_lines,
    ratios,
    rows_of,
    score_lines,
    share_of_plain,
    significant,
    speed,
)

README_PEERS = ("sdpa_flash", "sdpa_cudnn")
COLUMNS = 118  # of prose


def rewritten(text, name, block):
    """`text` with what stands between its markers <!-- NAME:begin --> and <!-- NAME:end --> replaced."""
    begin, end = f"<!-- {name}:begin -->", f"<!-- {name}:end -->"
    before, found_begin, rest = text.partition(begin)
    _, found_end, after = rest.partition(end)
    if not (found_begin and found_end):
        raise SystemExit(f"expected the markers {begin} and {end}")
    return "".join((before, begin, "\n", "\n".join(block), "\n", end, after))


def wrapped(text):
    """A paragraph in lines; code spans stay whole."""
    whole = re.sub(r"`[^`]*`", lambda span: span[0].replace(" ", "\0"), " ".join(text.split()))
    lines = textwrap.wrap(whole, COLUMNS, break_long_words=False, break_on_hyphens=False)
    return [line.replace("\0", " ") for line in lines]


def markdown_table(header, rows):
    lines = [header, ["---"] * len(header), *rows]
    return ["| " + " | ".join(line) + " |" if line[0] != "---" else "|---" * len(line) + "|" for line in lines]


def cell_tables(result, peers):
    """A table per mode: a line per head dim and mask, a column per sequence length."""
    lines = []
    for mode in modes(result):
        cells = [row for row in rows_of(result, PLOTTED_GROUPS, mode) if "ours" in row["results"]]
        lengths = sorted({row["seqlen_k"] for row in cells})
        entries = {(row["head_dim"], row["causal"], row["seqlen_k"]): cell_entry(row, peers) for row in cells}
        rows = [
            [str(head_dim), "causal" if causal else "full", *(entries.get((head_dim, causal, n), "") for n in lengths)]
            for head_dim, causal in sorted({(row["head_dim"], row["causal"]) for row in cells})
        ]
        lines += ["", *markdown_table([f"{mode}: head dim", "mask", *(f"s {length}" for length in lengths)], rows)]
    return lines


def cell_entry(row, peers):
    mine = row["results"]["ours"]
    against = [f"{row['results'][peer]['ms'] / mine['ms']:.2f}×" if peer in row["results"] else "–" for peer in peers]
    return f"{significant(mine['tflops'])} ({', '.join(against)})"


def figures_block(result, source, command=None):
    """The cells of a result with scores, host time and memory, for a document. command: what measures it again."""
    peers = [name for name in result["implementations"] if name in README_PEERS]
    lines = [
        f"{result['dtype']}, {environment_line(result)}.",
        f"Each entry: TFLOPS of this package (its speed relative to {', '.join(f'`{name}`' for name in peers)}).",
        *cell_tables(result, peers),
        "",
    ]
    lines += [f"- {line}" for line in score_lines(result) + overhead_lines(result) + memory_lines(result)]
    command = command or f"python benchmarks/run.py --mode {' '.join(modes(result))}"
    return lines + ["", f"From `{source}`; reproduce with `{command}`."]


def grid_tables(result, group):
    """A table per mode: a line per row, TFLOPS of every implementation, or that its memory did not suffice."""
    lines = []
    for mode in modes(result):
        rows = [row for row in rows_of(result, group, mode) if row["results"]]
        names = [name for name in result["implementations"] if any(name in row["results"] for row in rows)]
        if rows:
            table = [[row["label"], *(implementation_cell(row, name) for name in names)] for row in rows]
            lines += ["", *markdown_table([f"{mode}, TFLOPS", *(f"`{name}`" for name in names)], table)]
    return lines


def implementation_cell(row, name):
    if name in row["results"]:
        return speed(row, name)
    return OUT_OF_MEMORY if row["notes"].get(name) == OUT_OF_MEMORY else "–"


def score_table(result, groups=None):
    """Geometric mean and worst ratio of every group, mode and pair."""
    rows = []
    for group in groups or result["groups"]:
        for mode in modes(result):
            for name, peer in judged_pairs(result):
                found = ratios(result, result, peer, mode, group, name)
                if found:
                    label, worst = min(found, key=lambda item: item[1])
                    mean = geometric_mean([ratio for _, ratio in found])
                    score = [f"{mean:.2f}×", f"{worst:.2f}× ({label})", str(len(found))]
                    rows.append([f"`{group}` {mode}", f"`{name}`", f"`{peer}`", *score])
    return markdown_table(["rows", "speed of", "relative to", "geometric mean", "worst", "count"], rows)


def row_table(result, group, base=None):
    """Every row of a group. base: a group whose row over the same cache is what its time is compared with."""
    rows = [row for row in rows_of(result, group) if "ours" in row["results"]]
    peers = [name for name in result["implementations"] if name not in ("ours", PLAIN)]
    peers = [name for name in peers if any(name in row["results"] for row in rows)]
    plain = any(share_of_plain(row) is not None for row in rows)
    unit = "GB/s" if rows[0].get("bytes") else "TFLOPS"
    header = ["problem", "µs", unit, *(["of plain"] if plain else []), *([f"`time of {base}`"] if base else [])]
    found = {cache_key(row): row["results"]["ours"]["ms"] for row in rows_of(result, base or ())}
    lines = []
    for row in rows:
        mine, share = row["results"]["ours"], share_of_plain(row)
        line = [f"{row['label']} {row['mode']}", significant(1000 * mine["ms"]), speed(row, "ours")]
        line += [f"{share:.2f}" if share else "–"] if plain else []
        other = found.get(cache_key(row))
        line += [f"{mine['ms'] / other:.2f}×" if other else "–"] if base else []
        times = [row["results"][peer]["ms"] / mine["ms"] if peer in row["results"] else None for peer in peers]
        lines.append(line + [f"{ratio:.2f}×" if ratio else "–" for ratio in times])
    return markdown_table([*header, *(f"relative to `{peer}`" for peer in peers)], lines)


def cache_key(row):
    """What a row over a cache shares with the plain row beside it."""
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
        dense = rows[0]
        beside = [layers.get(cache_key(row)) for row in rows[:2]]
        share = f"{gigabytes_per_second(dense, 'ours') / ceiling:.0%}"
        share += f" (layers {gigabytes_per_second(beside[0], 'ours') / ceiling:.0%})" if beside[0] else ""
        layer = times(beside, "ours") if any(beside) else "–"
        lines.append(
            [f"{heads}/{heads_k}, {batch} × {keys}", times(rows, "ours"), share, times([dense], "sdpa_flash"), layer]
        )
    pages = " / ".join(f"pages of {row['page_size']}" if row.get("page_size") else "dense" for row in rows)
    header = ["heads, batch × keys", f"one call, µs: {pages}", "share of the read ceiling, dense"]
    return markdown_table([*header, "`sdpa_flash`, µs", "a layer, µs: dense / pages of 16"], lines)


def loss_table(result):
    """The runs of examples/train_char_lm.py."""
    lines = []
    for name, run in result["runs"].items():
        gaps = result["difference_to_plain"].get(name)
        curve = [f"{run['losses'][0]:.3f}", f"{run['losses'][-1]:.3f}", f"{run['validation']:.3f}"]
        lines.append([f"`{name}`", *curve, *([f"{gap:.1e}" for gap in gaps] if gaps else ["–", "–"])])
    header = ["attention", "first loss", "last loss", "held out", "rms difference to plain", "largest"]
    return markdown_table(header, lines)


def speed_block(trained, other, decoded):
    """Six rows of speed for the README."""

    def score(found):
        values = [ratio for _, ratio in found]
        return f"{geometric_mean(values):.2f}× ({min(values):.2f}×)" if values else "–"

    def line(title, result, group, mode):
        rows = [row for row in rows_of(result, group, mode) if "ours" in row["results"]]
        fastest = max(row["results"]["ours"]["tflops"] for row in rows)
        against = [score(ratios(result, result, peer, mode, group)) for peer in README_PEERS]
        return [f"{title}, {len(rows)} shapes", f"up to {fastest:.0f} TFLOPS", *against]

    decode = rows_of(decoded, "decode", "fwd")
    share = max(gigabytes_per_second(row, "ours") for row in decode) / decoded["read_ceiling"]["gbs"]
    beside = score(ratios(decoded, decoded, "sdpa_flash", "fwd", "decode"))
    rows = [
        line("forward", trained, "cells", "fwd"),
        line("backward", trained, "cells", "bwd"),
        line("forward and backward", trained, "cells", "fwd+bwd"),
        line("packed sequences, forward", other, "varlen", "fwd"),
        [f"decoding, {len(decode)} caches", f"up to {share:.0%} of the read ceiling", beside, "–"],
        line("prompts over a cache", decoded, "prefill_cache", "fwd"),
    ]
    header = ["", "this package", "FlashAttention-2 (SDPA)", "cuDNN (SDPA)"]
    told = f"Geometric mean of our speed relative to theirs (worst shape). {environment_line(trained)}."
    return [*markdown_table(header, rows), "", told, "All shapes: [docs/benchmarks.md](docs/benchmarks.md)."]


def steps_block(result):
    """Steps of a transformers model by SDPA (benchmarks/sdpa_step.py): milliseconds, and what the provider gains."""
    header = ["layers × width, heads, tokens", "PyTorch's choice", "its flash attention", "`register`", "`use`"]
    lines = []
    for row in result["rows"]:
        ms, tokens = row["ms"], f"{row['batch']} × {row['seqlen']}"
        shape = f"{row['layers']} × {row['dim']}, {row['heads']}/{row['heads_k']}, {tokens}"
        gained = [f"{ms[name]:.1f} ({ms[name] / ms['provider']:.2f}×)" for name in ("torch", "flash")]
        lines.append([shape, *gained, *(f"{ms[name]:.1f}" for name in ("provider", "scope"))])
    told = "Milliseconds of a training step of transformers' Llama with *sdpa* attention (relative to `register`); "
    told += f"{environment_line(result)}, transformers {result['versions']['transformers']}."
    return [*markdown_table(header, lines), "", *textwrap.wrap(told, 118, break_on_hyphens=False)]
