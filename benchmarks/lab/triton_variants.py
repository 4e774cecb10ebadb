"""The steps of the Triton comparator as data, from the form of the textbooks to its own; needs no Triton."""

from __future__ import annotations

from typing import NamedTuple


class Tile(NamedTuple):
    """Queries and keys per tile, warps per thread block, stages of the load pipeline."""

    block_m: int
    block_n: int
    num_warps: int
    num_stages: int


class Variant(NamedTuple):
    """A way to run the kernels; the defaults are the comparator's.

    use_tma: tensor descriptors, wherever they are possible if None. tiles: to choose from for the forward, for dK and
    dV and for dQ, at every head dim; None: the lists of the kernels. shared_delta: the backward's row terms by a launch
    of their own.
    """

    use_tma: bool | None = None
    tiles: tuple[tuple[Tile, ...], ...] | None = None
    shared_delta: bool = True

    @property
    def backward_constants(self):
        """What differs from the kernels' defaults."""
        return {} if self.shared_delta else {"SHARED_DELTA": False}


class Rung(NamedTuple):
    """adds: what differs from the rung `over`; modes: where that shows."""

    name: str
    adds: str
    variant: Variant
    modes: tuple[str, ...]
    over: str = ""


MODES = ("fwd", "fwd+bwd")
# One tile a kernel that has no spills at head dims 64 and 128, full and causal.
FIXED_TILES = ((Tile(128, 64, 8, 2),), (Tile(64, 64, 8, 2),), (Tile(128, 64, 8, 2),))

RUNGS = (
    Rung(
        "baseline", "one tile a kernel, loads by pointers, delta computed in both backward kernels",
        Variant(False, FIXED_TILES, shared_delta=False), MODES,
    ),
    Rung(
        "autotuned", "tile, warps and stages tuned per kernel, head dim, mask and length class",
        Variant(False, shared_delta=False), MODES, "baseline",
    ),
    Rung(
        "descriptors", "tiles that stream through the loop are loaded by TMA tensor descriptors",
        Variant(True, shared_delta=False), MODES, "autotuned",
    ),
    Rung(
        "shared_delta", "delta and the log-sum-exp in units of log2 computed once, by a launch of their own: "
        "the comparator", Variant(True), ("fwd+bwd",), "descriptors",
    ),
)  # fmt: skip
