"""Combining the partial results of attention over splits of the keys."""

from __future__ import annotations

import math

import torch

from . import checks
from .entry import entry_point
from .overlap import check_written
from .scores import compute_dtype

PARTIAL_AXES = "splits, batch, seqlen, heads, head_dim"


@entry_point
def combine(
    out_partial: torch.Tensor, lse_partial: torch.Tensor, out: torch.Tensor | None = None
) -> list[torch.Tensor]:
    """Attention over all keys from its partial results over disjoint splits of them.

    Arguments:
        out_partial: (splits, b, s, h, d), float16, bfloat16, float32 or float64, any head dim.
        lse_partial: (splits, b, s, h), float32 (float64 for float64). +inf or -inf marks a split that masks the row
            fully: its out_partial is not read.
        out: None (out_partial's dtype) or (b, s, h, d) of any of these dtypes, which is written and returned.

    Returns [out, lse]: lse (b, s, h); rows that every split masks fully have out 0 and lse +inf.

    Raises RuntimeError naming the argument; nothing is written then.
    """
    for name, tensor in (("out_partial", out_partial), ("lse_partial", lse_partial), ("out", out)):
        if tensor is not None or name != "out":
            checks.check_on_cpu(name, tensor)
    checks.check_dtype("out_partial", out_partial, *checks.DTYPES)
    checks.check_rank("out_partial", out_partial, PARTIAL_AXES)
    splits, *counts, columns = out_partial.shape
    checks.check_at_most("out_partial", splits, "splits")
    checks.check_at_most("out_partial", columns, "columns")
    checks.check_at_most("out_partial", math.prod(counts), "rows of all heads")
    dtype = compute_dtype(out_partial.dtype)
    checks.check_dtype("lse_partial", lse_partial, dtype)
    checks.check_shape("lse_partial", lse_partial, out_partial.shape[:-1])
    if out is not None:
        checks.check_dtype("out", out, *checks.DTYPES)
        checks.check_shape("out", out, out_partial.shape[1:])
        checks.check_last_stride("out", out)
    check_written({"out": out}, {"out_partial": out_partial, "lse_partial": lse_partial})

    weights, lse = partial_weights(lse_partial)
    total = out_partial.new_zeros(out_partial.shape[1:], dtype=dtype)
    is_counted = ~lse_partial.isinf()
    for weight, partial, counted in zip(weights.unsqueeze(-1), out_partial, is_counted.unsqueeze(-1)):
        total += torch.where(counted, partial.to(dtype), 0.0) * weight
    out = total.to(out_partial.dtype) if out is None else out.copy_(total)
    return [out, lse]


def partial_weights(lse_partial: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """(weights (splits, ...) that sum to 1, or are all 0, along the splits; lse (...) of the whole)."""
    sums = lse_partial.masked_fill(lse_partial == math.inf, -math.inf)
    lse = torch.logsumexp(sums, dim=0)
    empty = lse == -math.inf
    weights = torch.softmax(sums, dim=0).masked_fill(empty, 0.0)  # not exp(sums - lse), where lse is rounded
    return weights, lse.masked_fill(empty, math.inf)
