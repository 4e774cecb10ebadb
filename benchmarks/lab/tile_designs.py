"""The tiles that a sweep tries: shipped kernels with another row of their table in csrc/flash_attn/plan/tiles.h.

`groups()` lists them, by kernel, head dim and dtype; the first of each group is in use. Few of each: more are a line
here. Rows of the wgmma forward, whose policy matters too, are designs of sm90_designs.py.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

import sm90_designs
from gpu import gpu
from plan_headers import TILES, fits, shipped_row, with_first_return
from sm80_designs import DTYPES, SOURCES, Entry

BOTH = ("full", "causal")
LOOKUP = "constexpr FwdTile fwd_tile(int head_dim, FwdVariant variant) {\n"  # of a row of plan/tiles.h


@dataclass(frozen=True)
class TileDesign:
    """An mma.sync forward of `head_dim`; dim: that of its row of the table."""

    head_dim: int
    dim: int
    block_m: int
    block_n: int
    warps: int
    blocks_per_sm: int
    dtype: str = "bf16"

    kernel = "fwd_mma_sync"
    family = "mma_sync"
    launcher = SOURCES / "sm80_launcher.cu"
    arch_suffix = ""
    masks = BOTH
    options = ()
    mma_per_step = 0  # its loop is not counted

    @property
    def row(self):
        return self.dim, self.block_m, self.block_n, self.warps, self.blocks_per_sm

    @property
    def name(self):
        return f"{self.kernel}_d{self.head_dim}_{self.dtype}_" + "_".join(map(str, self.row))

    @property
    def threads(self):
        return 32 * self.warps

    @property
    def smem_bytes(self):
        return fits(self.kernel, *self.row)[0]

    def problems(self):
        """Why there is no such kernel at full occupancy, a line for each reason; empty if there is one."""
        memory, problem = fits(self.kernel, *self.row)
        found = [*([problem] if problem else []), *gpu().problems(self.blocks_per_sm, self.threads, memory)]
        if self.blocks_per_sm * self.threads * 64 > gpu().registers_per_sm:
            found.append("registers: fewer than 64 per thread")
        # Whole rows are copied in passes of 16-byte vectors, and a warp has whole bands of 16.
        m, n, pass_rows = self.block_m, self.block_n, self.threads * 8 // (64 if self.dim % 64 == 0 else 32)
        if m % (16 * self.warps):
            found.append("block_m: expected whole 16-row bands for each warp")
        if n % 16 or n % pass_rows or m % pass_rows:
            found.append(f"block_m and block_n: expected multiples of 16 and of {pass_rows} (rows of one copy pass)")
        return found

    def braces(self):
        return "{" + ", ".join(map(str, self.row)) + "}"

    def header(self):
        """What is included before the launcher."""
        dtype = DTYPES[self.dtype].split("::")[1]
        variables = {"HEAD_DIM": self.head_dim, "DTYPE": dtype, "TILE": self.braces()}
        return "".join(f"#define LAB_{name} {value}\n" for name, value in variables.items())

    def overlay(self):
        """{path below csrc/flash_attn: text} of the header in place of the shipped one."""
        return {TILES: with_first_return(TILES, LOOKUP, "FwdTile" + self.braces())}


# head dim -> rows besides the one in use, without their head dim
OTHERS = {
    32: ((128, 128, 4, 2), (64, 128, 4, 4)),
    64: ((64, 64, 2, 4), (64, 128, 4, 3)),
    96: ((64, 64, 4, 3), (64, 96, 4, 3)),
    128: ((64, 64, 2, 4), (128, 48, 4, 2)),
    192: ((64, 64, 4, 2), (128, 96, 8, 1)),
    256: ((64, 48, 4, 2), (128, 64, 8, 1)),
}
KERNELS = ("fwd_mma_sync", "fwd_wgmma")
FP16_HEAD_DIM = 128
MOST_OTHERS = {"bf16": 2, "fp16": 1}  # tiles besides the one in use


@dataclass(frozen=True)
class Group:
    """What is timed in turns: the tile in use and others."""

    kernel: str
    head_dim: int
    dtype: str
    masks: tuple[str, ...]

    @property
    def title(self):
        masks = "" if len(self.masks) > 1 else f", {self.masks[0]}"
        return f"{self.kernel}, head dim {self.head_dim}, {self.dtype}{masks}"


def entries(designs):
    kinds = ["in use", *["other"] * (len(designs) - 1)]
    return [Entry(kind, described(design), design) for kind, design in zip(kinds, designs)]


def tiles_of_mma_sync_forward(head_dim, dtype):
    """{Group: [Entry]} of the rows of a table."""
    own = shipped_row("fwd_mma_sync", head_dim)
    rows = [own, *((head_dim, *row) for row in OTHERS[head_dim][: MOST_OTHERS[dtype]])]
    designs = [TileDesign(head_dim, *row, dtype) for row in dict.fromkeys(rows)]
    return {Group("fwd_mma_sync", head_dim, dtype, BOTH): entries(designs)}


def tiles_of_wgmma_forward(head_dim, dtype):
    found = {}
    for (dim, variant, masks), others in sm90_designs.OTHER_TILES.items():
        if dim == head_dim:
            base = replace(sm90_designs.shipped(dim, variant, masks), dtype=dtype)
            more = sm90_designs.tile_entries(base, others[: MOST_OTHERS[dtype]])
            found[Group("fwd_wgmma", dim, dtype, masks)] = entries([base, *(entry.design for entry in more)])
    return found


def described(design):
    """A tile in words."""
    size = f"{design.block_m} × {design.block_n}"
    if isinstance(design, sm90_designs.Sm90Design):
        return f"{size}, {design.kv_stages} stages"
    return f"{size}, {design.warps} warps, {design.blocks_per_sm} CTA an SM"


def head_dims(kernel):
    dims = {dim for dim, _, _ in sm90_designs.OTHER_TILES} if kernel == "fwd_wgmma" else set(OTHERS)
    return sorted(dims)


def groups(kernels=KERNELS, dims=None, dtypes=tuple(DTYPES)):
    """{Group: [Entry]}: all head dims in bf16, and one in fp16."""
    found = {}
    for dtype in dtypes:
        for kernel in kernels:
            for dim in head_dims(kernel):
                if (dims and dim not in dims) or (dtype == "fp16" and dim != FP16_HEAD_DIM):
                    continue
                tiles = tiles_of_wgmma_forward if kernel == "fwd_wgmma" else tiles_of_mma_sync_forward
                found.update(tiles(dim, dtype))
    return found
