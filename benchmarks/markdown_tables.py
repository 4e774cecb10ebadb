"""Markdown that pages are generated of: tables, wrapped prose, blocks between markers."""

from __future__ import annotations

import re
import textwrap

COLUMNS = 118  # of prose


def rewritten(text, name, block):
    """`text` with the lines between its markers <!-- NAME:begin --> and <!-- NAME:end --> replaced."""
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


def mask(causal):
    return "causal" if causal else "full"
