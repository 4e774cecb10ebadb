"""The tile configurations that a sweep tries, as data, and what a configuration must fulfil."""

from __future__ import annotations

from dataclasses import dataclass, fields

# Shared memory of one SM that thread blocks can use, sm_90; each of them takes 1 KB more than it asks for.
SMEM_BYTES_PER_SM = 228 * 1024
SMEM_BYTES_PER_BLOCK = 227 * 1024
REGISTERS_PER_SM = 65536


@dataclass(frozen=True)
class Alternative:
    """A tile of the mma.sync forward, the fields of FwdTile in csrc/flash_attn/plan/tiles.h."""

    block_m: int
    block_n: int
    warps: int
    blocks_per_sm: int

    def __str__(self):
        return f"{self.block_m} × {self.block_n}, {self.warps}, {self.blocks_per_sm}"

    @property
    def name(self):
        return f"m{self.block_m}_n{self.block_n}_w{self.warps}_b{self.blocks_per_sm}"

    @property
    def defines(self):
        names = ("M", "N", "WARPS", "BLOCKS_PER_SM")
        values = (self.block_m, self.block_n, self.warps, self.blocks_per_sm)
        return [f"-DFLASH_ATTN_SWEEP_{name}={value}" for name, value in zip(names, values)]

    def smem_bytes(self, head_dim):
        """As fwd_smem_bytes() in plan/tiles.h with one stage."""
        return 2 * head_dim * (self.block_m + 2 * self.block_n)

    def problems(self, head_dim):
        """Why this tile cannot run at full occupancy; empty if it can."""
        threads = 32 * self.warps
        copied_columns = 64 if head_dim % 64 == 0 else 32
        rows_per_pass = threads * 8 // copied_columns  # of 16-byte copies
        found = []
        if self.block_m % (16 * self.warps):
            found.append("block_m: expected whole 16-row bands for each warp")
        if self.block_n % 16 or self.block_n % rows_per_pass or self.block_m % rows_per_pass:
            found.append(
                f"block_m and block_n: expected multiples of 16 and of {rows_per_pass} (rows of one copy pass)"
            )
        smem = self.smem_bytes(head_dim)
        if smem > SMEM_BYTES_PER_BLOCK or self.blocks_per_sm * (smem + 1024) > SMEM_BYTES_PER_SM:
            found.append(f"shared memory: {self.blocks_per_sm} blocks of {smem} bytes do not fit an SM")
        if self.blocks_per_sm * threads * 64 > REGISTERS_PER_SM:
            found.append("registers: fewer than 64 per thread")
        return found


def _alternatives(*tiles):
    return [Alternative(*tile) for tile in tiles]


# head dim -> tiles beside the one of plan/tiles.h: (block_m, block_n, warps, blocks_per_sm)
ALTERNATIVES = {
    32: _alternatives(
        (128, 64, 4, 3),
        (128, 64, 4, 2),
        (128, 64, 4, 4),
        (128, 128, 4, 2),
        (128, 128, 4, 3),
        (64, 128, 4, 4),
        (64, 64, 4, 4),
        (64, 64, 2, 6),
        (128, 128, 8, 2),
    ),
    64: _alternatives(
        (128, 128, 4, 2),
        (128, 64, 4, 2),
        (128, 64, 4, 3),
        (128, 96, 4, 2),
        (64, 128, 4, 3),
        (64, 128, 4, 4),
        (64, 64, 4, 3),
        (64, 64, 4, 4),
        (64, 128, 2, 4),
        (64, 64, 2, 4),
        (128, 128, 8, 2),
        (256, 128, 8, 1),
    ),
    96: _alternatives(
        (128, 64, 4, 2),
        (128, 32, 4, 2),
        (128, 96, 4, 2),
        (64, 64, 4, 3),
        (64, 96, 4, 3),
        (64, 64, 2, 4),
        (128, 64, 8, 1),
        (128, 128, 8, 1),
    ),
    128: _alternatives(
        (128, 64, 4, 2),
        (128, 48, 4, 2),
        (128, 32, 4, 2),
        (128, 80, 4, 2),
        (64, 64, 4, 3),
        (64, 128, 4, 2),
        (64, 64, 2, 4),
        (64, 48, 2, 4),
        (128, 64, 8, 1),
        (128, 128, 8, 1),
        (256, 64, 8, 1),
    ),
    192: _alternatives(
        (128, 64, 8, 1),
        (128, 96, 8, 1),
        (128, 32, 8, 1),
        (128, 128, 8, 1),
        (64, 64, 4, 2),
        (64, 48, 4, 2),
        (64, 32, 4, 2),
        (64, 80, 4, 2),
        (64, 64, 4, 1),
    ),
    256: _alternatives(
        (64, 64, 4, 2),
        (64, 48, 4, 2),
        (64, 32, 4, 2),
        (64, 64, 4, 1),
        (64, 96, 4, 1),
        (128, 64, 8, 1),
        (128, 32, 8, 1),
        (128, 96, 8, 1),
    ),
}


def neighbours(measured, centre):
    """[(field, tile)] of the measured tiles that differ from `centre` in exactly one field."""
    found = []
    for tile in measured:
        changed = [field.name for field in fields(tile) if getattr(tile, field.name) != getattr(centre, field.name)]
        if len(changed) == 1:
            found.append((changed[0], tile))
    return sorted(found, key=lambda pair: pair[0])
