"""Clocks that the units of an SM need for a step of the Hopper kernels, by their tiles in plan/tiles.h.

docs/hopper.md explains what each unit does in a step; its tables of bounds are these numbers. Plain data, no torch.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from pathlib import Path

TILES = Path(__file__).resolve().parents[2] / "csrc" / "flash_attn" / "plan" / "tiles.h"
TENSOR_FLOP, SMEM_BYTES, EXP2, ADDED_BYTES = 4096, 128, 16, 16  # of an SM and clock


def tile_rows(name, text=None):
    """The rows of numbers in the initialiser of a table of plan/tiles.h, {head dim: row}; of several, the first's."""
    text = TILES.read_text(encoding="utf-8") if text is None else text
    body = re.search(rf"\b{name}\b[^=;]*= (\{{.*?\}});", text, re.DOTALL)[1]
    rows = {}
    for row in re.findall(r"\{([^{}]+)\}", re.sub(r"//[^\n]*", "", body)):
        numbers = [int(value) if value.isdigit() else value for value in row.replace(" ", "").split(",")]
        rows.setdefault(numbers[0], numbers)
    return rows


@dataclass(frozen=True)
class Step:
    """clocks: what each unit needs; useful: the tensor cores for the products that count, none of them twice."""

    clocks: dict[str, float]
    useful: float

    @property
    def bound(self):
        """(the scarcest unit, the part of its time that useful products take); the tensor cores of equal ones."""
        unit = max(self.clocks, key=lambda name: (self.clocks[name], name == "tensor cores"))
        return unit, self.useful / self.clocks[unit]


def forward_step(d, m, n):
    """Of a work tile of m rows against n keys."""
    products, operands = 4 * m * n * d / TENSOR_FLOP, m / 64 * (2 * 64 * d + 4 * n * d)
    return Step({"tensor cores": products, "exp2": m * n / EXP2, "shared memory": operands / SMEM_BYTES}, products)


def backward_step(d, m, n):
    """Of m rows of Q and dO against n keys."""
    scores = 2 * 2 * (64 * d + m * d) * 2  # both operands of S and dP, by two consumers or in two passes
    if n == 128:  # each of two consumers has 64 keys; one warpgroup has all of dQ, which is staged
        products, times, added = 10, 1, 4 * m * d
        rest = 2 * 2 * m * d * 2 + 2 * m * n + (m * n * 2 + n * d * 2) + 2 * 4 * m * d
        copies = 2 * m * d * 2
    else:  # dV and dK by a consumer each, which hand over P; then dQ in a pass of 128 rows, nothing added
        products, times, added = 14, 2, 0
        rest = 2 * m * d * 2 + 2 * 4 * m * n + n * d * 2
        copies = 2 * m * d * 2 + 2 * n * d * 2 * m // 128
    clocks = {
        "tensor cores": products * m * n * d / TENSOR_FLOP,
        "shared memory": (scores + rest + copies) / SMEM_BYTES,
        "exp2": times * m * n / EXP2,
        "additions to dQ": added / ADDED_BYTES,
    }
    return Step(clocks, 10 * m * n * d / TENSOR_FLOP)


def steps():
    """{mode: {head dim: Step}} of the kernels in use."""
    return {
        "fwd": {d: forward_step(*row[:3]) for d, row in tile_rows("kSm90FwdTiles").items()},
        "bwd": {d: backward_step(*row[:3]) for d, row in tile_rows("kSm90BwdTiles").items()},
    }
