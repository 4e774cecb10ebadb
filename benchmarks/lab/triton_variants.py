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
    of their own. transposed_k: the forward reads a copy of K with keys last, which it makes.
    """

    use_tma: bool | None = None
    tiles: tuple[tuple[Tile, ...], ...] | None = None
    shared_delta: bool = True
    transposed_k: bool = False

    @property
    def forward_constants(self):
        """What differs from the kernel's defaults."""
        return {"TRANSPOSED_K": True} if self.transposed_k else {}

    @property
    def backward_constants(self):
        return {} if self.shared_delta else {"SHARED_DELTA": False}


class Rung(NamedTuple):
    """adds: what differs from the rung `over`; modes: where that shows. Where `kept` is False it was tried and is no
    part of the comparator."""

    name: str
    adds: str
    variant: Variant
    modes: tuple[str, ...]
    over: str = ""
    kept: bool = True


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
    Rung(
        "transposed_k", "a copy of K with keys last, made in every call", Variant(True, transposed_k=True), ("fwd",),
        "descriptors", kept=False,
    ),
)  # fmt: skip
