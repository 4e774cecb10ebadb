"""The tiles that a sweep tries: shipped kernels with another row of their table in csrc/flash_attn/plan/tiles.h.

`entries()` lists them, by kernel, head dim and dtype; the first of each group is in use. Few of each: more are a line
here. Rows of the wgmma forward, whose policy matters too, are designs of sm90_designs.py.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

import sm90_designs
from plan_headers import CSRC, TILES, fits, shipped_row, with_first_return
from sm80_designs import DTYPES, REGISTERS_PER_SM, SMEM_BYTES_PER_BLOCK, SMEM_BYTES_PER_SM, SOURCES, Entry

BOTH = ("full", "causal")
SOFTMAX_D = CSRC / "kernels" / "auxiliary" / "bwd_preprocess.cu"


@dataclass(frozen=True)
class Table:
    """A table of plan/tiles.h: its struct, the function that looks a row up, and the columns after the head dim."""

    struct: str
    lookup: str
    columns: tuple[str, ...]
    launcher: str
    wgmma: bool = False


BWD_COLUMNS = ("warps", "sdp_warps_m", "dkv_warps_m", "dq_warps_m", "blocks_per_sm")
TABLES = {
    "fwd_mma_sync": Table(
        "FwdTile", "constexpr FwdTile fwd_tile(int head_dim, FwdVariant variant) {\n",
        ("block_m", "block_n", "warps", "blocks_per_sm"), "sm80_launcher.cu",
    ),
    "bwd_mma_sync": Table(
        "BwdTile", "constexpr BwdTile bwd_tile(int head_dim, bool is_small = false) {\n",
        ("block_m", "block_n", *BWD_COLUMNS), "bwd_launcher.cu",
    ),
    "bwd_wgmma": Table(
        "Sm90BwdTile", "constexpr Sm90BwdTile sm90_bwd_tile(int head_dim, int value_dim, bool is_general = false) {\n",
        ("block_m", "block_n", "stages", "head_dim_v"), "bwd_launcher.cu", wgmma=True,
    ),
}  # fmt: skip


@dataclass(frozen=True)
class TileDesign:
    """One kernel. head_dim: of the problem; row: of the table, its own head dim first."""

    kernel: str  # of TABLES
    head_dim: int
    row: tuple[int, ...]
    dtype: str = "bf16"

    masks = BOTH
    options = ()
    mma_per_step = 0  # its loop is not counted

    @property
    def table(self):
        return TABLES[self.kernel]

    @property
    def family(self):
        return "wgmma" if self.table.wgmma else "mma_sync"

    @property
    def launcher(self):
        return SOURCES / self.table.launcher

    @property
    def arch_suffix(self):
        return "a" if self.table.wgmma else ""

    @property
    def is_backward(self):
        return self.kernel.startswith("bwd")

    @property
    def more_sources(self):
        return (SOFTMAX_D,) if self.is_backward else ()

    @property
    def entry(self):
        """What the name of its main kernel has in it."""
        if not self.is_backward:
            return ""
        has_dq_pass = self.table.wgmma and (self.column("block_n") == 64 or self.row[0] > 128)  # has_dq_pass()
        return "flash_bwd_dkv_kernel" if has_dq_pass else "flash_bwd_kernel"

    @property
    def name(self):
        return f"{self.kernel}_d{self.head_dim}_{self.dtype}_" + "_".join(map(str, self.row))

    def column(self, name):
        return self.row[1 + self.table.columns.index(name)]

    @property
    def threads(self):
        if not self.table.wgmma:
            return 32 * self.column("warps")
        return 128 * (4 if self.column("block_n") == 128 and self.row[0] <= 64 else 3)  # sm90_bwd_threads()

    @property
    def smem_bytes(self):
        return fits(self.kernel, *self.row)[0]

    def problems(self):
        """Why there is no such kernel at full occupancy, a line for each reason; empty if there is one."""
        memory, problem = fits(self.kernel, *self.row)
        found = [problem] if problem else []
        ctas = 1 if self.table.wgmma else self.column("blocks_per_sm")
        if memory > SMEM_BYTES_PER_BLOCK or ctas * (memory + 1024) > SMEM_BYTES_PER_SM:
            found.append(f"shared memory: {ctas} CTAs of {memory} bytes do not fit an SM")
        if not self.table.wgmma and ctas * self.threads * 64 > REGISTERS_PER_SM:
            found.append("registers: fewer than 64 per thread")
        if self.kernel == "fwd_mma_sync":
            found += self.copy_problems()
        return found

    def copy_problems(self):
        """The mma.sync forward copies whole rows in passes of 16-byte vectors, and a warp has whole bands of 16."""
        m, n = self.column("block_m"), self.column("block_n")
        pass_rows = self.threads * 8 // (64 if self.row[0] % 64 == 0 else 32)
        found = [] if m % (16 * self.column("warps")) == 0 else ["block_m: expected whole 16-row bands for each warp"]
        if n % 16 or n % pass_rows or m % pass_rows:
            found.append(f"block_m and block_n: expected multiples of 16 and of {pass_rows} (rows of one copy pass)")
        return found

    @property
    def table_line(self):
        """The design as a line of plan/tiles.h."""
        return self.braces() + ","

    def braces(self):
        return "{" + ", ".join(map(str, self.row)) + "}"

    def header(self):
        """What is included before the launcher."""
        dtype = DTYPES[self.dtype].split("::")[1]
        variables = {"HEAD_DIM": self.head_dim, "DTYPE": dtype, "TILE": self.braces(), "WGMMA": int(self.table.wgmma)}
        return "".join(f"#define LAB_{name} {value}\n" for name, value in variables.items())

    def overlay(self):
        """{path below csrc/flash_attn: text} of the header in place of the shipped one."""
        return {TILES: with_first_return(TILES, self.table.lookup, self.table.struct + self.braces())}


# kernel -> head dim -> rows besides the one in use, without their head dim where it is the same
OTHERS = {
    "fwd_mma_sync": {
        32: ((128, 128, 4, 2), (64, 128, 4, 4)),
        64: ((64, 64, 2, 4), (64, 128, 4, 3)),
        96: ((64, 64, 4, 3), (64, 96, 4, 3)),
        128: ((64, 64, 2, 4), (128, 48, 4, 2)),
        192: ((64, 64, 4, 2), (128, 96, 8, 1)),
        256: ((64, 48, 4, 2), (128, 64, 8, 1)),
    },
    "bwd_mma_sync": {
        32: ((64, 64, 4, 2, 2, 2, 3),),
        64: ((64, 128, 8, 2, 4, 2, 1), (128, 64, 8, 4, 2, 4, 1)),
        96: ((64, 64, 8, 4, 4, 4, 1),),
        128: ((64, 96, 8, 4, 2, 2, 1), (64, 128, 8, 2, 4, 2, 1)),
        192: ((64, 64, 8, 4, 2, 2, 1),),
        256: ((64, 32, 8, 4, 2, 2, 1),),
    },
    # V and O have the same head dim: 0. At 256 only the tile in use fits; at 96 and 128 there is no other kernel
    # (wgmma_bwd_problem() of kernels/plan_check.cpp).
    "bwd_wgmma": {64: ((64, 128, 2, 0), (64, 64, 2, 0)), 96: (), 128: (), 192: ((256, 64, 64, 2, 0),)},
}
KERNELS = ("fwd_mma_sync", "fwd_wgmma", "bwd_mma_sync", "bwd_wgmma")
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


def tiles_of(kernel, head_dim, dtype):
    """{Group: [Entry]} of the rows of a table."""
    own = shipped_row(kernel, head_dim)
    others = OTHERS[kernel][head_dim][: MOST_OTHERS[dtype]]
    rows = [own, *(row if len(row) == len(own) else (head_dim, *row) for row in others)]
    designs = [TileDesign(kernel, head_dim, row, dtype) for row in dict.fromkeys(rows)]
    kinds = ["in use", *["other"] * (len(designs) - 1)]
    entries = [Entry(kind, described(design), design) for kind, design in zip(kinds, designs)]
    return {Group(kernel, head_dim, dtype, BOTH): entries}


def tiles_of_wgmma_forward(head_dim, dtype):
    found = {}
    for (dim, variant, masks), others in sm90_designs.OTHER_TILES.items():
        if dim == head_dim:
            base = replace(sm90_designs.shipped(dim, variant, masks), dtype=dtype)
            more = sm90_designs.tile_entries(base, others[: MOST_OTHERS[dtype]])
            designs = [base, *(entry.design for entry in more)]
            kinds = ["in use", *["other"] * len(more)]
            entries = [Entry(kind, described(design), design) for kind, design in zip(kinds, designs)]
            found[Group("fwd_wgmma", dim, dtype, masks)] = entries
    return found


def described(design):
    """A tile in words."""
    if isinstance(design, sm90_designs.Sm90Design):
        return f"{design.block_m} × {design.block_n}, {design.kv_stages} stages"
    size = f"{design.column('block_m')} × {design.column('block_n')}"
    if design.table.wgmma:
        kernel = f"kernel of {design.row[0]}: " if design.row[0] != design.head_dim else ""
        return f"{kernel}{size}, {design.column('stages')} stages"
    grids = [str(design.column(name)) for name in BWD_COLUMNS[1:4]] if design.is_backward else []
    warps = f"{design.column('warps')} warps" + (f" ({'/'.join(grids)} along M)" if grids else "")
    return f"{size}, {warps}, {design.column('blocks_per_sm')} CTA an SM"


def head_dims(kernel):
    dims = {dim for dim, _, _ in sm90_designs.OTHER_TILES} if kernel == "fwd_wgmma" else set(OTHERS[kernel])
    return sorted(dims)


def groups(kernels=KERNELS, dims=None, dtypes=tuple(DTYPES)):
    """{Group: [Entry]}: all head dims in bf16, and one in fp16."""
    found = {}
    for dtype in dtypes:
        for kernel in kernels:
            for dim in head_dims(kernel):
                if (dims and dim not in dims) or (dtype == "fp16" and dim != FP16_HEAD_DIM):
                    continue
                of_wgmma = kernel == "fwd_wgmma"
                found.update(tiles_of_wgmma_forward(dim, dtype) if of_wgmma else tiles_of(kernel, dim, dtype))
    return found
