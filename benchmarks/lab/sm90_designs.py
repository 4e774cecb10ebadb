"""The designs of the Hopper forward that an ablation runs: the shipped kernel with another tile, policy or scheduler.

The sources are the shipped ones. Two headers are replaced by copies of themselves in which the functions that look up
the tile and the policy row return this design's first (`overlay()`); the scheduler and the rescale threshold are chosen
at the launch. What the mainloop is written around is a ladder of its own, examples/hopper.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

from gpu import gpu
from plan_headers import POLICY, TILES, fits, names, shipped_row, with_first_return
from sm80_designs import DTYPES, SOURCES, Entry

TILE_FUNCTION = "constexpr Sm90FwdTile sm90_fwd_tile(int head_dim, FwdVariant variant) {\n"
POLICY_FUNCTION = "constexpr FwdPolicy sm90_fwd_policy(int head_dim, int head_dim_v, FwdVariant variant) {\n"
SCHEDULERS = ("kPlanned", "kStatic", "kNone")
THRESHOLD = 8.0  # kRescaleThresholdLog2


@dataclass(frozen=True)
class Sm90Design:
    """One kernel: a row of kSm90FwdTiles, the names of its policy's features, how its tiles are handed out."""

    head_dim: int
    variant: str  # of FwdVariant
    masks: tuple[str, ...]
    block_m: int
    block_n: int
    kv_stages: int
    q_stages: int
    overlaps: bool
    consumer_groups: int
    o_cols: int
    features: frozenset[str]
    scheduler: str = "kPlanned"
    threshold: float = THRESHOLD  # log2 of how far the row max may lag
    dtype: str = "bf16"

    launcher = SOURCES / "sm90_launcher.cu"
    arch_suffix = "a"

    @property
    def name(self):
        tile = f"m{self.block_m}_n{self.block_n}_kv{self.kv_stages}_q{self.q_stages}_g{self.consumer_groups}"
        return f"d{self.head_dim}_{self.dtype}_{self.variant}_{tile}"

    @property
    def threads(self):
        return 128 * (self.consumer_groups * (self.block_m // 64) + 1)

    @property
    def tile(self):
        numbers = (self.block_m, self.block_n, self.kv_stages, self.q_stages, self.overlaps, self.consumer_groups)
        return (*numbers, self.o_cols)

    def row(self):
        """A row of kSm90FwdTiles but for its head dim."""
        *numbers, o_cols = self.tile
        return ", ".join(str(x).lower() for x in (*numbers, 0, o_cols))

    @property
    def feature_bits(self):
        known = names(POLICY, "Feature")
        return sum(1 << known.index(name) for name in self.features)

    @property
    def smem_bytes(self):
        return self.checked()[0]

    @property
    def options(self):
        """What the launch is told, by lab_options(), rather than the compiler."""
        return SCHEDULERS.index(self.scheduler), self.threshold

    def checked(self):
        """(bytes of shared memory, what is wrong) by the shipped plan."""
        variant = names(TILES, "FwdVariant").index(self.variant)
        return fits(self.head_dim, *map(int, self.tile), variant, self.feature_bits)

    def header(self):
        variables = {
            "HEAD_DIM": self.head_dim, "DTYPE": DTYPES[self.dtype].split("::")[1], "VARIANT": self.variant,
            "BLOCK_M": self.block_m, "BLOCK_N": self.block_n, "FEATURES": f"{self.feature_bits}u",
        }  # fmt: skip
        return "".join(f"#define LAB_{name} {value}\n" for name, value in variables.items())

    def overlay(self):
        """{path below csrc/flash_attn: text} of the headers in place of the shipped ones."""
        return {
            TILES: with_first_return(TILES, TILE_FUNCTION, f"Sm90FwdTile{{head_dim, {self.row()}}}"),
            POLICY: with_first_return(POLICY, POLICY_FUNCTION, f"FwdPolicy{{head_dim, {self.feature_bits}u, 1}}"),
        }

    def problems(self):
        """Why there is no such kernel, a line for each reason; empty if there is one."""
        unknown = sorted(self.features - set(names(POLICY, "Feature")))
        if unknown or self.scheduler not in SCHEDULERS:
            expected = f"features: expected those of {POLICY}; scheduler: expected one of {', '.join(SCHEDULERS)}"
            return [f"{expected}; got {', '.join([*unknown, self.scheduler])}"]
        memory, problem = self.checked()
        return [*([problem] if problem else []), *gpu().problems(1, self.threads, memory)]


def shipped(head_dim, variant, masks):
    """The design of a shipped kernel."""
    *tile, o_cols, bits = shipped_row("fwd_wgmma", head_dim, names(TILES, "FwdVariant").index(variant))
    tile[4] = bool(tile[4])
    features = frozenset(name for i, name in enumerate(names(POLICY, "Feature")) if bits >> i & 1)
    return Sm90Design(head_dim, variant, masks, *tile, o_cols, features)


def changed(design, without=(), plus=(), **fields):
    """The design without some features and with others; other fields by name."""
    return replace(design, features=design.features - set(without) | set(plus), **fields)


SPECULATIVE = ("kSpeculativeExp", "kSpeculativeOnMasked", "kExpAfterPvWait")
COMMON = (
    ("no speculative exponentials", lambda d: changed(d, SPECULATIVE)),
    ("exact row max in every step", lambda d: replace(d, threshold=0.0)),
    ("consumers in ping-pong", lambda d: changed(d, plus=["kPingPong"])),
    ("exponentials forced before the wait for P V", lambda d: changed(d, ["kExpAfterPvWait"], ["kExpBeforePvWait"])),
    ("tiles handed out statically", lambda d: replace(d, scheduler="kStatic")),
    ("a CTA for each tile", lambda d: replace(d, scheduler="kNone")),
)
AFTER_PV = ("softmax beside its own P V", lambda d: changed(d, ["kExpAfterPvWait"]))
NOT_EARLY = ("next tile's Q K^T behind the store of O",
             lambda d: changed(d, ["kIssueNextQkEarly", "kHasStoreWarp"]))  # fmt: skip


# (head dim, variant, masks) of the kernels in use for long sequences -> block_m, block_n, K/V stages of other tiles
OTHER_TILES = {
    (64, "kPlain", ("full", "causal")): ((192, 128, 2), (192, 128, 4), (192, 64, 6), (128, 128, 3)),
    (96, "kPlain", ("full", "causal")): ((128, 128, 3), (192, 96, 2)),
    (128, "kPlain", ("full",)): ((192, 80, 2), (192, 64, 4), (128, 128, 2)),
    (128, "kMasked", ("causal",)): ((192, 64, 3), (192, 80, 3), (128, 128, 2)),
    (192, "kPlain", ("full", "causal")): ((128, 96, 2), (128, 80, 2)),
    (256, "kPlain", ("full", "causal")): ((128, 32, 4),),
}


def tile_entries(base, others, kernel=""):
    """[Entry] of a kernel with other tiles."""
    return [
        Entry("switch", f"{kernel}{m} × {n}, {stages} stages", replace(base, block_m=m, block_n=n, kv_stages=stages))
        for m, n, stages in others
    ]


# The same -> changes in addition to COMMON, and other tiles
KERNELS = {
    (64, "kPlain", ("full", "causal")): [
        AFTER_PV,
        ("next tile's Q K^T not beside P V", lambda d: replace(d, overlaps=False)),
        ("one Q stage, O staged apart", lambda d: replace(d, overlaps=False, q_stages=1, o_cols=64)),
        ("two consumer groups of 128 rows", lambda d: replace(d, block_m=128, block_n=64, kv_stages=4, q_stages=2,
                                                              consumer_groups=2)),
    ],
    (128, "kPlain", ("full",)): [
        AFTER_PV,
        ("an epilogue warp, next Q K^T early", lambda d: changed(d, plus=["kIssueNextQkEarly", "kHasStoreWarp"])),
    ],
    (128, "kMasked", ("causal",)): [
        ("no speculation on masked blocks", lambda d: changed(d, ["kSpeculativeOnMasked"])),
        ("softmax behind P V", lambda d: changed(d, plus=["kExpAfterPvWait"])),
        NOT_EARLY,
        ("next tile fetched early", lambda d: changed(d, ["kFetchNextTileLate"])),
    ],
}  # fmt: skip


def entries(head_dim):
    """[Entry] of a head dim; those of kind "ladder" are the kernels in use, one for each mask where they differ."""
    found = []
    for (dim, variant, masks), more in KERNELS.items():
        if dim == head_dim:
            base = shipped(dim, variant, masks)
            kernel = "" if len(masks) > 1 else f"{masks[0]}: "
            found.append(Entry("ladder", f"{kernel}in use", base))
            found += [Entry("switch", f"{kernel}{label}", change(base)) for label, change in (*COMMON, *more)]
            found += tile_entries(base, OTHER_TILES[dim, variant, masks], kernel)
    return found
