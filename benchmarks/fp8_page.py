"""The speeds in docs/fp8.md: the e4m3 forward beside bf16, from a result of fp8_forward.py."""

from __future__ import annotations

import re
from pathlib import Path

from markdown_tables import markdown_table, rewritten, wrapped
from scores import environment_line, score_line, stored_path

PAGE = Path("docs", "fp8.md")
RESULT = stored_path("fp8_forward")
BLOCK = "fp8_speed"
NOTHING = "Nothing has been measured yet."
BASE = "bf16"
# Case.id of a dense problem with as many queries as keys.
CASE = re.compile(
    r"b(?P<batch>\d+)-q(?P<s>\d+)-k(?P=s)-h(?P<h>\d+)x(?P<h_k>\d+)-d(?P<d>\d+)-\w+(?P<causal>-causal)?-dense"
)
CUDNN = "`cudnn` is cuDNN's e4m3 forward."
NOTE = "†: no kernel of e4m3 serves the call, 16-bit copies or the kernels over codes do."
LEGEND = """\
`fp8` is of e4m3 q, k and v with descales of heads, the pass over V included; `fp8 fast` is the same with
`exp="fast"`.
"""


def attention_rows(result):
    """[(shape: head dim, heads, K/V heads, causal; seqlen; row)]"""
    found = []
    for row in result["rows"]:
        if match := CASE.fullmatch(row["id"]):
            d, heads, heads_k, seqlen = (int(match[name]) for name in ("d", "h", "h_k", "s"))
            found.append(((d, heads, heads_k, bool(match["causal"])), seqlen, row))
    return found


def columns(rows):
    """The calls that were measured, in their order."""
    return list(dict.fromkeys(name for _, _, row in rows for name in row["tflops"]))


def cell(row, names):
    """TFLOPS by call, bold where no other is higher."""
    rates = {name: round(rate) for name, rate in row["tflops"].items()}
    highest = max(rates.values())
    shown = {name: f"**{rate}**" if rate == highest else str(rate) for name, rate in rates.items()}
    return " / ".join(shown.get(name, "–") for name in names) + "†" * (not row["has_kernels"])


def mask(causal):
    return "causal" if causal else "full"


def speed_table(rows, names):
    """A line per head dim, heads and mask, a column per sequence length."""
    lengths = sorted({seqlen for _, seqlen, _ in rows})
    cells = {(shape, seqlen): cell(row, names) for shape, seqlen, row in rows}
    lines = [
        [str(d), f"{heads}/{heads_k}", mask(causal)]
        + [cells.get(((d, heads, heads_k, causal), seqlen), "–") for seqlen in lengths]
        for d, heads, heads_k, causal in sorted({shape for shape, _, _ in rows})
    ]
    return markdown_table(["head dim", "heads", "mask", *(f"s {length}" for length in lengths)], lines)


def score_lines(rows, names):
    """Speed of each call relative to bf16."""
    lines = []
    for name in names:
        ratios = [
            (f"d {d}, {heads}/{heads_k}, {mask(causal)}, s {seqlen}", row["tflops"][name] / row["tflops"][BASE])
            for (d, heads, heads_k, causal), seqlen, row in rows
            if name in row["tflops"] and name != BASE
        ]
        lines += [f"- {score_line(ratios, f'`{name}` against `{BASE}`')}"] if ratios else []
    return lines


def matrix_lines(result):
    """The matrix products of the same run."""
    lines = []
    for row in result["rows"]:
        if row["id"].startswith("matmul-"):
            size = row["id"].removeprefix("matmul-")
            rates = ", ".join(f"`{name}` {rate:.0f}" for name, rate in row["tflops"].items())
            lines.append(f"- torch's product of e4m3 matrices, {size} × {size}, TFLOPS: {rates}")
    return lines


def block(result):
    """The lines between the markers; `result` None: there is none."""
    if result is None:
        return [NOTHING]
    rows = attention_rows(result)
    names = columns(rows)
    tokens = sorted({int(CASE.fullmatch(row["id"])["batch"]) * seqlen for _, seqlen, row in rows})
    shown, sizes = " / ".join(f"`{name}`" for name in names), " or ".join(map(str, tokens))
    told = [f"TFLOPS of {shown}, the fastest in bold, batch × s = {sizes}.", LEGEND]
    told += [CUDNN] if "cudnn" in names else []
    told += [] if all(row["has_kernels"] for _, _, row in rows) else [NOTE]
    lines = [*wrapped(" ".join(told)), "", *speed_table(rows, names), ""]
    lines += [*score_lines(rows, names), *matrix_lines(result)]
    return [*lines, "", *wrapped(f"{environment_line(result)}.")]


def page(text, result):
    """docs/fp8.md's `text` with its block written anew."""
    return rewritten(text, BLOCK, block(result))
