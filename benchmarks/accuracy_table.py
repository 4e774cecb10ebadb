"""Tables of what lab/accuracy.py measured: errors of out, and ratios to FlashAttention-2's on the same tensors."""

from __future__ import annotations

import math
from statistics import geometric_mean, median

from markdown_tables import markdown_table

FIGURES = ("out", "largest thousandth", "largest", "lse", "dq", "dk", "dv")
YARDSTICK, EMULATED, ROUNDED = "sdpa_flash", "emulated", "rounded"
HALF_ULP = 1e6 * 2.0**-24  # of float32, in millionths as all figures: a smaller error of an LSE is luck
BOUNDS = {"out": 1.02, "largest thousandth": 1.1, "largest": 1.1, "LSE": 1.05, "gradients": 1.05}
COLUMNS = {"out": (0,), "largest thousandth": (1,), "largest": (2,), "LSE": (3,), "gradients": (4, 5, 6)}


def ratio(mine, theirs):
    return 1.0 if mine == theirs else math.inf if theirs == 0 else max(mine / theirs, 1e-6)


def found_ratios(rows, name, columns):
    """Errors of `name` relative to FlashAttention-2's, where both have them; out of calls that SDPA does not have is
    compared with the emulation."""
    found = []
    for row in rows:
        results = row["results"]
        theirs, mine = results.get(YARDSTICK, results.get(EMULATED)), results.get(name)
        for column in columns:
            if mine and theirs and mine[column] is not None and theirs[column] is not None:
                least = HALF_ULP if columns == COLUMNS["LSE"] else 0.0
                found.append(ratio(max(mine[column], least), max(theirs[column], least)))
    return found


def mean_and_worst(values, bound=math.inf):
    """Geometric mean and largest, and how many are beyond the bound."""
    if not values:
        return "–"
    beyond = sum(value > bound for value in values)
    return f"{geometric_mean(values):.3f} ({max(values):.2f})" + f", {beyond} of {len(values)}" * (beyond > 0)


def names_of(result):
    return [name for name in result["implementations"] if any(name in row["results"] for row in result["rows"])]


def error_table(result, names):
    """Median error of out in bf16 by logits, in thousandths; of fp16 it is an eighth."""
    lines = []
    for logits in dict.fromkeys(row["logits"] for row in result["rows"]):
        rows = [row["results"] for row in result["rows"] if (row["logits"], row["dtype"]) == (logits, "bfloat16")]
        found = ([row[name][0] for row in rows if name in row] for name in names)
        lines.append([logits, *(f"{median(errors) / 1e3:.3g}" if errors else "–" for errors in found)])
    return markdown_table(["logits, bf16", *(f"`{name}`" for name in names)], lines)


def bound_table(result, names):
    lines = [
        [f"`{name}`", *(mean_and_worst(found_ratios(result["rows"], name, COLUMNS[what]), bound)
                        for what, bound in BOUNDS.items())]
        for name in names
    ]  # fmt: skip
    return markdown_table(["relative to FA2", *(f"{what}, bound {bound}" for what, bound in BOUNDS.items())], lines)


def kind_table(result, names):
    lines = []
    for kind in dict.fromkeys(row["kind"] for row in result["rows"]):
        rows = [row for row in result["rows"] if row["kind"] == kind]
        cells = (mean_and_worst(found_ratios(rows, name, COLUMNS["out"])) for name in names)
        lines.append([kind, *cells, str(len(rows))])
    return markdown_table(["error of out", *(f"`{name}`" for name in names), "rows"], lines)


def block(result):
    names = names_of(result)
    compared = [name for name in names if name not in (YARDSTICK, ROUNDED)]
    tables = error_table(result, names), bound_table(result, compared), kind_table(result, compared)
    return [line for table in tables for line in (*table, "")][:-1]
