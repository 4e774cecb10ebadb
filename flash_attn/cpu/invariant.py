"""Attention whose rows are computed one by one, by operations of fixed shapes: the batch-invariant mode.

The last bits of a matrix product or a sum depend on the shapes of its operands. Here every operation on a row of
queries has a shape that depends on the number of heads and the head dim alone: keys come in blocks of BLOCK_KEYS that
begin at its multiples, the last one filled up with zeros. So a row's result is a function of the row and of the keys
that it sees.
"""

from __future__ import annotations

import math
from dataclasses import replace

import torch

from .forward import _RowState, fill_fully_masked_lse
from .scores import LOG2E, ScoreRule, Tile, compute_dtype

BLOCK_KEYS = 256


def attend_invariant(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    out: torch.Tensor,
    lse: torch.Tensor,
    rule: ScoreRule,
    sinks: torch.Tensor | None = None,
) -> None:
    """As `forward.attend`, for one sequence: q (1, sq, h, d), k/v (1, sk, h_k, d), out like q, lse (1, h, sq)."""
    sq, sk, heads = q.shape[1], k.shape[1], q.shape[2]
    if heads == 0:
        return
    dtype = compute_dtype(q.dtype)
    keys, values = _key_blocks(k, dtype), _key_blocks(v, dtype)
    sink_logits = None if sinks is None else (sinks.to(dtype) * LOG2E).view(k.shape[2], -1, 1)
    for row in range(sq):
        lo, hi = rule.key_range(row, row + 1, sq, sk)
        if lo == hi:
            out[:, row].zero_()
            fill_fully_masked_lse(lse[:, :, row : row + 1], sinks)
            continue
        queries = q[0, row].to(dtype, copy=True, memory_format=torch.contiguous_format).mul_(rule.query_scale)
        rows = queries.view(k.shape[2], heads // k.shape[2], q.shape[3])
        state = _RowState(rows, values[0])
        for block in range(lo // BLOCK_KEYS, -(-hi // BLOCK_KEYS)):
            _update_by_block(
                state, queries, keys[block], values[block], block * BLOCK_KEYS, (lo, hi), row, sq, sk, rule
            )
        if sink_logits is not None:
            state.add_sink_(sink_logits)
        row_out, row_lse = state.finalize(1.0)
        out[0, row].copy_(row_out.view(out.shape[2:]))
        lse[0, :, row].copy_(row_lse.view(-1))


def _key_blocks(x: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """Keys or values (1, sk, h_k, d) as (blocks, h_k, BLOCK_KEYS, d), contiguous, zeros after the last row."""
    count = -(-x.shape[1] // BLOCK_KEYS)
    blocks = x.new_zeros(count, x.shape[2], BLOCK_KEYS, x.shape[3], dtype=dtype)
    for index, block in enumerate(blocks):
        rows = x[0, index * BLOCK_KEYS : (index + 1) * BLOCK_KEYS]
        block[:, : rows.shape[0]] = rows.transpose(0, 1)
    return blocks


def _update_by_block(
    state: _RowState,
    queries: torch.Tensor,
    keys: torch.Tensor,
    values: torch.Tensor,
    col0: int,
    visible: tuple[int, int],
    row: int,
    sq: int,
    sk: int,
    rule: ScoreRule,
) -> None:
    """Online softmax over one more block of keys, of which the row sees those in `visible`."""
    first, last = max(visible[0] - col0, 0), min(visible[1] - col0, BLOCK_KEYS)
    s = torch.bmm(queries.view(keys.shape[0], -1, keys.shape[2]), keys.transpose(1, 2))
    tile = Tile(slice(0, 1), slice(0, queries.shape[0]), row, row + 1, col0, col0 + BLOCK_KEYS)
    rule.logits_(s.view(1, queries.shape[0], 1, BLOCK_KEYS), tile, sq, sk, None)
    heads, cols = queries.shape[0], min(BLOCK_KEYS, sk - col0)
    seen_keys = rule.visible(replace(tile, col1=col0 + cols), sq, sk)
    if seen_keys is not None:
        hidden = ~seen_keys.expand(1, heads, 1, cols).view(keys.shape[0], -1, cols)
        s[..., :cols].masked_fill_(hidden, -math.inf)
        values = values.clone()
        values[:, :cols].masked_fill_(hidden.all(1)[..., None], 0.0)
    if last - first < BLOCK_KEYS:
        s[..., :first] = -math.inf
        s[..., last:] = -math.inf
        # a weight of 0 does not silence a value that is NaN
        seen = torch.zeros_like(values)
        seen[:, first:last] = values[:, first:last]
        values = seen
    state.update_(s, values, None)
