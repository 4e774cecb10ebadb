"""The virtual ring in docs/context_parallel.md: a result of cp_virtual.py beside the model."""

from __future__ import annotations

import cp_page
from markdown_tables import markdown_table, rewritten, wrapped
from scores import environment_line, significant, stored_path

PAGE = cp_page.PAGE
RESULT = stored_path("cp_virtual")
BLOCK = "cp-virtual"
NOTHING = "The virtual ring has not been measured yet."
MODES = ("forward", "both")
INTRODUCTION = """\
The virtual ring: what the slower of the first and the last rank launches, measured on one GPU to which the other ranks'
rows have come before, and the model's time with links that take none. Milliseconds of the GPU: predicted / measured,
and by how much the latter is longer; in the last column what the host takes to queue forward and backward.
"""
HEADER = ["tokens", "GPUs", "method", "forward", "difference", "forward and backward", "difference", "host"]


def milliseconds(seconds):
    return significant(1e3 * seconds)


def line(row):
    entries = [cp_page.size(row["tokens"]), str(row["ranks"]), f"`{row['method']}`" if row["method"] else "one call"]
    for mode in MODES:
        found = row[mode]
        difference = found["seconds"] / found["predicted"] - 1
        entries += [
            f"{milliseconds(found['predicted'])} / {milliseconds(found['seconds'])}",
            f"{100 * difference:+.0f}%",
        ]
    return [*entries, milliseconds(row["both"]["host_seconds"])]


def block(result):
    """The lines between the markers; `result` None: there is none."""
    if result is None:
        return [NOTHING]
    rows = [line(row) for row in result["rows"]]
    return [*wrapped(INTRODUCTION), "", *markdown_table(HEADER, rows), "", *wrapped(f"{environment_line(result)}.")]


def page(text, result):
    """docs/context_parallel.md's `text` with its block written anew."""
    return rewritten(text, BLOCK, block(result))
