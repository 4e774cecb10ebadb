"""The head dims of the kernels, from the tables of the plans (csrc/flash_attn/plan/), the only list of them."""

from __future__ import annotations

import re
from pathlib import Path

PLAN = Path(__file__).resolve().parents[1] / "csrc" / "flash_attn" / "plan"


def head_dims(table: str, header: str = "tiles.h") -> tuple[int, ...]:
    """Ascending; each row of a table begins with its head dim."""
    text = re.sub(r"//.*", "", (PLAN / header).read_text(encoding="utf-8"))
    found = re.search(rf"\b{table}(?:\[\w*\])* = \{{(.*?)\}};", text, re.DOTALL)
    assert found, f"{header} has no table {table}"
    return tuple(sorted({int(dim) for dim in re.findall(r"\{\s*(\d+),", found[1])}))


MMA_SYNC = head_dims("kFwdTiles")
WGMMA = head_dims("kSm90FwdTiles")
NARROW = tuple(dim for dim in MMA_SYNC if dim <= WGMMA[-1])  # without the head dims of the wide kernel
