"""One call of a backend on the rows of a table, and the exact sums of what several calls give.

On CPU tensors every partial result and gradient is float32 or wider. The CUDA kernels add dk and dv to float32 sums,
and round out and dq to q's dtype once; sums are float32 in any case, in the order of the calls.
"""

from __future__ import annotations

import math
from typing import NamedTuple

import torch
from torch import Tensor

from flash_attn import backends
from flash_attn.context_parallel.layouts import Window
from flash_attn.context_parallel.tables import CallTable
from flash_attn.ops.calls import rows_contiguous


class Options(NamedTuple):
    """What a call is asked for, the same on every rank; heads of alibi_slopes and of dropout begin at first_head."""

    window: Window
    softmax_scale: float
    softcap: float
    dropout_p: float
    deterministic: bool
    alibi_slopes: Tensor | None
    rng_state: Tensor | None
    first_head: int = 0

    @property
    def has_exact_positions(self) -> bool:
        return self.alibi_slopes is not None or self.dropout_p > 0


def sum_dtype(dtype: torch.dtype) -> torch.dtype:
    """The dtype of LSE and of sums."""
    return torch.float64 if dtype == torch.float64 else torch.float32


def _wide(*tensors):
    """Half precision CPU tensors as float32, so that the results are."""
    return [x.to(sum_dtype(x.dtype)) if x.is_cpu else x for x in tensors]


def _named(table: CallTable, options: Options):
    """(slopes, keyword arguments) of a call."""
    slopes = options.alibi_slopes
    if slopes is not None and slopes.dim() == 2:
        slopes = slopes[table.origins[:, 0]]
    if options.dropout_p == 0 and (slopes is None or table.is_aligned):
        return slopes, {}
    origins = table.origins
    if options.first_head:
        origins = origins.clone()
        origins[:, 1] += options.first_head
    return slopes, {"origins": origins}


def forward_call(table: CallTable, q, k, v, options: Options, sinks=None, is_partial=False):
    """out and LSE (heads, rows) of the table's query rows; is_partial: to be added to others."""
    q, k, v = q[table.q0 : table.q1], k[table.k0 : table.k1], v[table.k0 : table.k1]
    if is_partial:
        q, k, v = _wide(q, k, v)
    slopes, named = _named(table, options)
    if options.dropout_p > 0:
        named["rng_state"] = options.rng_state
    if sinks is not None:
        named["sinks"] = sinks
    out, lse, *_ = backends.of(q).varlen_fwd(
        *map(rows_contiguous, (q, k, v)), None, table.cu_seqlens_q, table.cu_seqlens_k, table.seqused_k, None, None,
        slopes, table.max_seqlen_q, table.max_seqlen_k, options.dropout_p, options.softmax_scale, False, False,
        table.left, table.right, options.softcap, False, None, **named,
    )  # fmt: skip
    return out, lse


def backward_call(table: CallTable, dout, q, k, v, out, lse, dlse, options: Options, sums=None):
    """dq of the table's query rows, dk and dv of its key rows, from the LSE and out of all keys.

    sums: None, or dk and dv of all key rows in `sum_dtype`, to which the call adds and of which it returns its rows.
    """
    rows, cols = slice(table.q0, table.q1), slice(table.k0, table.k1)
    dout, q, k, v, out = _wide(dout[rows], q[rows], k[cols], v[cols], out[rows])
    slopes, named = _named(table, options)
    dk = dv = None
    if sums is not None:
        dk, dv = (grad[cols] for grad in sums)
        named["accumulate_dkv"] = True
    dlse = None if dlse is None else dlse[:, rows].contiguous()
    rng_state = options.rng_state if options.dropout_p > 0 else None
    dq, dk, dv, *_ = backends.of(q).varlen_bwd(
        *map(rows_contiguous, (dout, q, k, v, out)), lse[:, rows].contiguous(), None, dk, dv, table.cu_seqlens_q,
        table.cu_seqlens_k, slopes, table.max_seqlen_q, table.max_seqlen_k, options.dropout_p, options.softmax_scale,
        False, False, table.left, table.right, options.softcap, options.deterministic, None, rng_state, dlse,
        **named,
    )  # fmt: skip
    return dq, dk, dv


class PartialSums:
    """out and LSE of rows of which each call saw some keys, combined in the order of the calls."""

    def __init__(self, q: Tensor, v: Tensor):
        dtype = sum_dtype(q.dtype)
        self.out = torch.zeros((*q.shape[:2], v.shape[2]), dtype=dtype, device=q.device)
        self.lse = torch.full((q.shape[1], q.shape[0]), -math.inf, dtype=dtype, device=q.device)
        self._is_empty = True

    def add(self, rows: slice, out: Tensor, lse: Tensor) -> None:
        """One more result of these rows; an infinite LSE stands for no keys, and has out 0."""
        lse = lse.masked_fill(lse == math.inf, -math.inf)
        target, before = self.out[rows], self.lse[:, rows]
        if self._is_empty and target.shape == self.out.shape:
            target.copy_(out)
            before.copy_(lse)
        else:
            self._rescale(target, before, lse).addcmul_(out, self._weight(lse, before))
            torch.logaddexp(before, lse, out=before)
        self._is_empty = False

    def add_sinks(self, sinks: Tensor) -> None:
        """One more key of every row, whose value is 0."""
        lse = sinks.to(self.lse.dtype)[:, None].expand(self.lse.shape)
        self._rescale(self.out, self.lse, lse)
        self.lse = torch.logaddexp(self.lse, lse)

    def _rescale(self, target, before, lse):
        return target.mul_(self._weight(before, lse))

    @staticmethod
    def _weight(lse, other):
        """exp(lse) / (exp(lse) + exp(other)) as (rows, heads, 1): both weights' sum is 1 however LSEs are rounded."""
        return torch.sigmoid(lse - other).masked_fill_(lse == -math.inf, 0.0).t().unsqueeze(-1)

    def result(self, dtype: torch.dtype):
        return self.out.to(dtype), self.lse.masked_fill(self.lse == -math.inf, math.inf)


def sink_gradient(sinks, dout, out, lse, dlse):
    """-sum of exp(sink - lse) * (rowsum(dout * out) - dlse) over the rows; dout, out (rows, h, d), lse (h, rows)."""
    delta = (dout.to(lse.dtype) * out.to(lse.dtype)).sum(-1).t()
    if dlse is not None:
        delta = delta - dlse.masked_fill(lse.isinf(), 0.0)
    weight = (sinks[:, None] - lse).exp().masked_fill(lse.isinf(), 0.0)
    return -(weight * delta).sum(1).to(sinks.dtype)
