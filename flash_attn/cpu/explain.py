"""The plan of a call as names and values, as the extension tells its own: for flash_attn.explain()."""

from __future__ import annotations

from typing import NamedTuple

import torch

from ..eight_bit import OF_QUERIES, named
from .scores import ScoreRule
from .tiles import head_ranges, tile_shape
from .torch_flash import keeps_scores


class Problem(NamedTuple):
    """Batch entries that are computed together: queries and keys of each."""

    batch: int
    sq: int
    sk: int


class _Schedule(NamedTuple):
    """How one problem is computed. block_m, block_n: query rows of a head and keys of a tile, 0 where torch decides."""

    kernel: str
    block_m: int
    block_n: int
    tiles: int


def explain_attention(
    direction: str,
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    rule: ScoreRule,
    problems: list[Problem],
    is_plain: bool = True,
    block_keys: int = 0,
) -> dict[str, object]:
    """The plan of these problems, which have the heads, head dims and dtype of q, k and v.

    is_plain: no dropout, in the forward no sinks or max_logit, in the backward no dlse or stage. block_keys: keys of a
    block where rows are computed one by one.
    kernel is "tiled", "by_row", "none", or "torch_flash": PyTorch's own, where all scores are finite. Problems that
    differ may have several, joined by "+"; block sizes are then the largest, num_work_tiles the sum.
    """
    heads, heads_k = q.shape[-2], k.shape[-2]
    may_fuse = is_plain and q.shape[-1] == v.shape[-1] and (direction == "backward" or keeps_scores(q.dtype))
    schedules = [_schedule(problem, heads, heads_k, rule, may_fuse, block_keys) for problem in problems]
    kernels = sorted({x.kernel for x in schedules} - {"none"}) or ["none"]
    fields: dict[str, object] = {"direction": direction, "kernel": "+".join(kernels)}
    fields.update(dtype=_DTYPE_NAMES[q.dtype], head_dim=q.shape[-1], head_dim_v=v.shape[-1])
    fields["threads"] = torch.get_num_threads()
    if any(x.block_m for x in schedules):
        fields["block_m"] = max(x.block_m for x in schedules)
        fields["block_n"] = max(x.block_n for x in schedules)
        fields["num_work_tiles"] = sum(x.tiles for x in schedules)
    return fields


_DTYPE_NAMES = {
    torch.float16: "fp16",
    torch.bfloat16: "bf16",
    torch.float32: "fp32",
    torch.float64: "fp64",
    **{dtype: named(dtype).removeprefix("float8_").removesuffix("fn") for dtype in OF_QUERIES},
}
_NOTHING = _Schedule("none", 0, 0, 0)


def _schedule(
    problem: Problem, heads: int, heads_k: int, rule: ScoreRule, may_fuse: bool, block_keys: int
) -> _Schedule:
    batch, sq, sk = problem
    first_row = rule.first_unmasked_row(sq, sk)
    if batch == 0 or heads == 0 or first_row == sq:
        return _NOTHING
    if block_keys:
        return _Schedule("by_row", 1, block_keys, batch * sq)
    if may_fuse and rule.fits_torch_kernel(sq, sk):
        return _Schedule("torch_flash", 0, 0, 0)
    group = heads // heads_k
    rows, cols = tile_shape(sq, sk, group)
    m_blocks = -(-(sq - first_row) // rows)
    return _Schedule("tiled", rows, cols, m_blocks * sum(1 for _ in head_ranges(batch, heads_k, group, rows, cols)))
