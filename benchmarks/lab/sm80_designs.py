"""The designs of the configurable mma.sync forward (kernels/), as data: which exist, which an ablation runs.

A design is what the kernel takes as a value; the default of a head dim is the shipped kernel's. `entries()` lists what
an ablation measures: the ladder from plain loads to today, and today's design with one switch at another value.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from pathlib import Path

from gpu import gpu

SOURCES = Path(__file__).resolve().parent / "kernels"
HEAD_DIMS = (64, 128)
DTYPES = {"bf16": "Dtype::kBf16", "fp16": "Dtype::kFp16"}
LAYOUTS = {"none": "Layout::kNone", "padded": "Layout::kPadded", "swizzled": "Layout::kSwizzled"}
SOFTMAX_RULES = {
    "textbook": "SoftmaxRule::kTextbook", "first_apart": "SoftmaxRule::kFirstApart", "lagging": "SoftmaxRule::kLagging",
}  # fmt: skip
CHOICES = {
    "dtype": tuple(DTYPES),
    "copies": ("plain", "async"),
    "kv_loads": ("late", "eager"),
    "layout": tuple(LAYOUTS),
    "q": ("shared", "registers"),
    "softmax": tuple(SOFTMAX_RULES),
}
PADDING = 8  # elements of a row
MOST_REGISTERS = 255


@dataclass(frozen=True)
class FwdDesign:
    """One kernel: the fields of FwdDesign in kernels/fwd_design.h, where they are described."""

    head_dim: int
    block_m: int
    block_n: int
    warps: int
    blocks_per_sm: int
    dtype: str = "bf16"
    copies: str = "async"
    kv_loads: str = "eager"
    layout: str = "swizzled"
    q: str = "shared"
    slices: tuple[int, int, int] = (1, 1, 1)  # of Q, K and V, read together; 0: all before the first MMA
    double_buffered: bool = True
    softmax: str = "lagging"

    launcher = SOURCES / "fwd_launcher.cu"
    arch_suffix = ""
    masks = ("full", "causal")  # that the kernel runs
    options = ()  # what a launch is told besides the tensors

    @property
    def name(self):
        tile = f"m{self.block_m}_n{self.block_n}_w{self.warps}_b{self.blocks_per_sm}"
        words = [self.copies, self.kv_loads, self.layout, f"q_{self.q}", *map(str, self.slices), self.softmax]
        return "_".join([f"d{self.head_dim}", tile, self.dtype, *words, *["double"] * self.double_buffered])

    @property
    def threads(self):
        return 32 * self.warps

    @property
    def smem_bytes(self):
        """As smem_bytes() in kernels/fwd_design.h."""
        pitch = self.head_dim + PADDING * (self.layout == "padded")
        return 2 * pitch * (self.block_m + 2 * self.block_n)

    def header(self):
        """What is included before the launcher."""
        flags = (
            self.copies == "async", self.kv_loads == "eager", LAYOUTS[self.layout], self.q == "registers",
            *self.slices, self.double_buffered, SOFTMAX_RULES[self.softmax],
        )  # fmt: skip
        words = [str(flag).lower() if isinstance(flag, bool) else str(flag) for flag in flags]
        sizes = [self.head_dim, self.block_m, self.block_n, self.warps, self.blocks_per_sm]
        return f"#define LAB_DESIGN {{{', '.join([*map(str, sizes), DTYPES[self.dtype], *words])}}}\n"

    def overlay(self):
        """{path below csrc/flash_attn: text} of headers in place of the shipped ones: none."""
        return {}

    def problems(self):
        """Why there is no such kernel, a line for each reason; empty if there is one."""
        found = [
            f"{field}: expected {' or '.join(values)}, got {getattr(self, field)!r}"
            for field, values in CHOICES.items()
            if getattr(self, field) not in values
        ]
        if self.head_dim not in HEAD_DIMS:
            found.append(f"head_dim: expected 64 or 128, got {self.head_dim}")
        if self.warps < 1 or self.threads > 1024 or self.blocks_per_sm < 1:
            found.append("warps and blocks_per_sm: expected 1 to 32 warps and at least one block")
        return found or [*self.tile_problems(), *self.resource_problems()]

    def tile_problems(self):
        found = []
        rows = self.threads // 8  # of a copy pass: eight threads copy 64 columns
        if self.block_m < 1 or self.block_m % (16 * self.warps):
            found.append("block_m: expected whole 16-row bands for each warp")
        if self.block_n < 1 or self.block_n % 16 or self.block_n % rows or self.block_m % rows:
            found.append(f"block_m and block_n: expected multiples of 16 and of {rows}, the rows of one copy pass")
        if any(count not in (0, 1, 2) for count in self.slices):
            found.append(f"slices: expected 0, 1 or 2 of each of Q, K and V, got {self.slices}")
        if self.double_buffered and 0 in self.slices:
            found.append("double_buffered: expected False, whole fragments have no next slice")
        return found

    def resource_problems(self):
        found = gpu().problems(self.blocks_per_sm, self.threads, self.smem_bytes)
        registers = min(MOST_REGISTERS, gpu().registers_per_sm // (self.blocks_per_sm * self.threads))
        accumulators = self.block_m * (self.head_dim + self.block_n) // self.threads
        if accumulators >= registers:
            found.append(f"registers: S and O alone take {accumulators} of {registers}")
        return found


@dataclass(frozen=True)
class Entry:
    """What an ablation measures. kind: "ladder", each with one technique more than the one before; "switch", the
    design in use with one thing changed."""

    kind: str
    label: str
    design: object


# Plain loads of whole rows, late, into tiles whose rows follow each other; 16 rows a warp.
FIRST = {"copies": "plain", "kv_loads": "late", "layout": "none", "double_buffered": False, "softmax": "textbook"}
FIRST_TILE = {64: (64, 64, 4, 4), 128: (64, 64, 4, 3)}
TILE = {64: (128, 128, 4, 2), 128: (128, 64, 4, 2)}  # as in plan/tiles.h
OTHER_TILES = {
    64: ((128, 64, 4, 2), (64, 128, 4, 3), (128, 128, 8, 2), (128, 128, 4, 1)),
    128: ((128, 32, 4, 2), (64, 64, 4, 3), (128, 64, 8, 1), (128, 64, 4, 1)),
}
STEPS = (
    ("padded rows of shared memory", {"layout": "padded"}),
    ("swizzled rows instead", {"layout": "swizzled"}),
    ("cp.async", {"copies": "async"}),
    ("K and V loaded early", {"kv_loads": "eager"}),
    ("fragments double-buffered", {"double_buffered": True}),
    ("first block not rescaled", {"softmax": "first_apart"}),
    ("lagging row max", {"softmax": "lagging"}),
)
SWITCHES = (
    ("plain loads", {"copies": "plain"}),
    ("K and V loaded late", {"kv_loads": "late"}),
    ("rows not swizzled", {"layout": "none"}),
    ("rows padded", {"layout": "padded"}),
    ("Q in registers", {"q": "registers"}),
    ("fragments whole", {"slices": (0, 0, 0), "double_buffered": False}),
    ("two slices of Q at a time", {"slices": (2, 1, 1)}),
    ("two slices of K at a time", {"slices": (1, 2, 1)}),
    ("two slices of V at a time", {"slices": (1, 1, 2)}),
    ("fragments not double-buffered", {"double_buffered": False}),
    ("textbook softmax", {"softmax": "textbook"}),
    ("textbook softmax, first block apart", {"softmax": "first_apart"}),
    ("fp16", {"dtype": "fp16"}),
)


def default_design(head_dim):
    """The shipped kernel's."""
    return FwdDesign(head_dim, *TILE[head_dim])


def ladder(head_dim):
    design = FwdDesign(head_dim, *FIRST_TILE[head_dim], **FIRST)
    found = [Entry("ladder", "plain loads, 64 × 64 tiles", design)]
    for label, change in STEPS:
        design = replace(design, **change)
        found.append(Entry("ladder", label, design))
    return [*found, Entry("ladder", "today's tile", default_design(head_dim))]


def switches(head_dim):
    default = default_design(head_dim)
    found = [Entry("switch", label, replace(default, **change)) for label, change in SWITCHES]
    for tile in OTHER_TILES[head_dim]:
        design = FwdDesign(head_dim, *tile)
        found.append(Entry("switch", "{} × {}, {} warps, {} CTA an SM".format(*tile), design))
    return found


def entries(head_dim):
    """[Entry] of a head dim; the last of the ladder is the design in use."""
    return [*ladder(head_dim), *switches(head_dim)]
