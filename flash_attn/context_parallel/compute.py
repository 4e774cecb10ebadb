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
from flash_attn.context_parallel.tables import DQ_TILE, CallTable, DqRows, PassTables, PlacedCall
from flash_attn.ops.calls import rows_contiguous

_MOST_SLOTS = 4  # parts of out kept in q's dtype: no more than two float32 tensors


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
    sm_margin: int = 0

    @property
    def has_exact_positions(self) -> bool:
        return self.alibi_slopes is not None or self.dropout_p > 0


def sum_dtype(dtype: torch.dtype) -> torch.dtype:
    """The dtype of LSE and of sums."""
    return torch.float64 if dtype == torch.float64 else torch.float32


def _part_dtype(x: Tensor) -> torch.dtype:
    """That of a call's results which are added to others."""
    return sum_dtype(x.dtype) if x.is_cpu else x.dtype


def _wide(*tensors):
    """Half precision CPU tensors as float32, so that the results are."""
    return [x.to(_part_dtype(x)) for x in tensors]


def _named(table: CallTable, options: Options):
    """(slopes, keyword arguments) of a call."""
    slopes = options.alibi_slopes
    if slopes is not None and slopes.dim() == 2:
        slopes = slopes[table.origins[:, 0]]
    named = {"sm_margin": options.sm_margin} if options.sm_margin else {}
    if options.dropout_p == 0 and (slopes is None or table.is_aligned):
        return slopes, named
    origins = table.origins
    if options.first_head:
        origins = origins.clone()
        origins[:, 1] += options.first_head
    return slopes, {"origins": origins, **named}


def _rows(x: Tensor, start: int, stop: int) -> Tensor:
    return x if stop - start == x.shape[0] else x.narrow(0, start, stop - start)


def forward_call(table: CallTable, q, k, v, options: Options, sinks=None, is_partial=False, out=None):
    """out and LSE (heads, rows) of the table's query rows; is_partial: to be added to others. out: where to write."""
    q, k, v = _rows(q, table.q0, table.q1), _rows(k, table.k0, table.k1), _rows(v, table.k0, table.k1)
    if is_partial:
        q, k, v = _wide(q, k, v)
    slopes, named = _named(table, options)
    if options.dropout_p > 0:
        named["rng_state"] = options.rng_state
    if sinks is not None:
        named["sinks"] = sinks
    out, lse, *_ = backends.of(q).varlen_fwd(
        *map(rows_contiguous, (q, k, v)), out, table.cu_seqlens_q, table.cu_seqlens_k, table.seqused_k, None, None,
        slopes, table.max_seqlen_q, table.max_seqlen_k, options.dropout_p, options.softmax_scale, False, False,
        table.left, table.right, options.softcap, False, None, **named,
    )  # fmt: skip
    return out, lse


def backward_call(table: CallTable, dout, q, k, v, out, lse, dlse, options: Options, sums=None, dq=None, **stage):
    """dq of the table's query rows, dk and dv of its key rows, from the LSE and out of all keys; and softmax_d.

    sums: None, or dk and dv of all key rows in `sum_dtype`, to which the call adds and of which it returns its rows.
    dq: where to write it. stage: of a backend's backward that keeps dq.
    """
    return _backward(backends.of(q).varlen_bwd, table, dout, q, k, v, out, lse, dlse, options, sums, dq, stage)


def has_dq_sum(tables: PassTables, *given) -> bool:
    """Whether the kernels of these calls have a sum of dq that several calls may add to. given: as of a call."""
    dout, *_ = given
    if tables.dq_rows is None or dout.is_cpu:
        return tables.dq_rows is not None
    explain = backends.of(dout).explain_varlen_bwd
    fields = _backward(explain, _row_table(tables.dq_rows), *given, None, None, {"dq_stage": "begin"})
    return fields["has_dq_sum"] and DQ_TILE % fields["block_m"] == 0


def _row_table(rows: DqRows) -> CallTable:
    """Of the stages that are for all keys."""
    return CallTable(
        0, rows.rows, 0, rows.rows, rows.cu_seqlens, rows.cu_seqlens, None, rows.longest, rows.longest, -1, -1,
        rows.origins, True,
    )  # fmt: skip


def _backward(function, table: CallTable, dout, q, k, v, out, lse, dlse, options: Options, sums, dq, stage):
    rows, cols = (table.q0, table.q1), (table.k0, table.k1)
    dout, q, k, v, out = _wide(_rows(dout, *rows), _rows(q, *rows), _rows(k, *cols), _rows(v, *cols), _rows(out, *rows))
    slopes, named = _named(table, options)
    named.update(stage)
    dk = dv = None
    if sums is not None:
        dk, dv = (_rows(grad, *cols) for grad in sums)
        named["accumulate_dkv"] = True
    lse = lse[:, slice(*rows)].contiguous()
    dlse = None if dlse is None else dlse[:, slice(*rows)].contiguous()
    rng_state = options.rng_state if options.dropout_p > 0 else None
    return function(
        *map(rows_contiguous, (dout, q, k, v, out)), lse, dq, dk, dv, table.cu_seqlens_q,
        table.cu_seqlens_k, slopes, table.max_seqlen_q, table.max_seqlen_k, options.dropout_p, options.softmax_scale,
        False, False, table.left, table.right, options.softcap, options.deterministic, None, rng_state, dlse,
        **named,
    )  # fmt: skip


def new_sums(k: Tensor, v: Tensor) -> tuple[Tensor, Tensor]:
    """Zeros like both in the dtype of sums."""
    dtype = sum_dtype(k.dtype)
    if k.shape == v.shape:
        return torch.zeros((2, *k.shape), dtype=dtype, device=k.device).unbind(0)
    return tuple(torch.zeros(x.shape, dtype=dtype, device=x.device) for x in (k, v))


def result_sums(tables: PassTables, q: Tensor, v: Tensor, sinks):
    """What takes the results of a forward's calls: each row has one, or few, or many."""
    if tables.slots <= 1:
        return _WholeRows(tables, q, v, sinks)
    if tables.slots <= _MOST_SLOTS and (sinks is None or tables.begins_whole):
        return _Parts(tables, q, v, sinks)
    return PartialSums(q, v, sinks)


class _WholeRows:
    """out and LSE of rows that one call each computes."""

    def __init__(self, tables: PassTables, q: Tensor, v: Tensor, sinks):
        self._sinks = sinks
        self._is_one_call = sum(len(step.calls) for step in tables.steps) == 1
        if not self._is_one_call:
            self._out = q.new_empty((*q.shape[:2], v.shape[2]))
            self._lse = torch.empty(q.shape[1], q.shape[0], dtype=sum_dtype(q.dtype), device=q.device)

    def compute(self, call: PlacedCall, q, k, v, options: Options) -> None:
        table = call.table
        if self._is_one_call:
            self._out, self._lse = forward_call(table, q, k, v, options, self._sinks)
            return
        own = _rows(self._out, table.q0, table.q1)
        self._lse[:, table.q0 : table.q1] = forward_call(table, q, k, v, options, self._sinks, out=own)[1]

    def result(self):
        return self._out, self._lse


class _Parts:
    """out and LSE of rows of which each call saw some keys: kept in as many slots as overlap, then combined at once."""

    def __init__(self, tables: PassTables, q: Tensor, v: Tensor, sinks):
        self._sinks = sinks  # one more key of every row: of slot 0, which then has all rows
        self._dtype, exact = q.dtype, sum_dtype(q.dtype)
        shape = (tables.slots, *q.shape[:2], v.shape[2])
        self._out = torch.empty(shape, dtype=_part_dtype(q), device=q.device)
        self._lse = torch.full((tables.slots, q.shape[1], q.shape[0]), -math.inf, dtype=exact, device=q.device)

    def compute(self, call: PlacedCall, q, k, v, options: Options) -> None:
        table = call.table
        own = _rows(self._out[call.slot], table.q0, table.q1)
        sinks = None if call.slot else self._sinks
        _, lse = forward_call(table, q, k, v, options, sinks, is_partial=True, out=own)
        self._lse[call.slot, :, table.q0 : table.q1] = lse

    def result(self):
        out = torch.empty((1, *self._out.shape[1:]), dtype=self._dtype, device=self._out.device)
        _, lse = backends.of(out).combine(self._out.unsqueeze(1), self._lse.transpose(1, 2).unsqueeze(1), out)
        return out[0], lse[0].t().contiguous()


class PartialSums:
    """out and LSE of rows of which each call saw some keys, combined in the order of the calls."""

    def __init__(self, q: Tensor, v: Tensor, sinks):
        dtype = sum_dtype(q.dtype)
        self._sinks, self._dtype = sinks, q.dtype
        self.out = torch.zeros((*q.shape[:2], v.shape[2]), dtype=dtype, device=q.device)
        self.lse = torch.full((q.shape[1], q.shape[0]), -math.inf, dtype=dtype, device=q.device)
        self._is_empty = True

    def compute(self, call: PlacedCall, q, k, v, options: Options) -> None:
        part = forward_call(call.table, q, k, v, options, is_partial=True)
        self.add(slice(call.table.q0, call.table.q1), *part)

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

    def result(self):
        if self._sinks is not None:
            self.add_sinks(self._sinks)
        return self.out.to(self._dtype), self.lse.masked_fill(self.lse == -math.inf, math.inf)


class KeptQuerySums:
    """dq in the kernels' own float32 sum, which is rounded once."""

    def __init__(self, tables: PassTables, *given):
        self._table, self._given = _row_table(tables.dq_rows), given
        self._dtype = given[1].dtype
        self._sum, _, _, self._softmax_d, *_ = self._stage("begin")

    def _stage(self, stage, **kept):
        return backward_call(self._table, *self._given, dq_stage=stage, **kept)

    def add(self, call: PlacedCall, compute) -> None:
        compute(None, dq_stage="add", dq_sum=self._sum, softmax_d=self._softmax_d)

    def result(self) -> Tensor:
        return self._stage("end", dq_sum=self._sum)[0].to(self._dtype)


class QuerySums:
    """dq of rows of which each call has a part: of up to two, whose sum is rounded once in any dtype, in q's own."""

    def __init__(self, tables: PassTables, q: Tensor):
        self._dtype = q.dtype
        self._part_dtype = _part_dtype(q)
        dtype = self._part_dtype if tables.depth <= 2 else sum_dtype(q.dtype)
        self._sum = torch.empty(q.shape, dtype=dtype, device=q.device)

    def add(self, call: PlacedCall, compute) -> None:
        """compute: a function of where to write the part, or None, that returns it."""
        (start, count, is_first), *others = call.parts
        if is_first and not others and self._sum.dtype == self._part_dtype:
            compute(self._sum.narrow(0, start, count))
            return
        part = compute(None)
        for start, count, is_first in call.parts:
            target, rows = self._sum.narrow(0, start, count), part.narrow(0, start - call.table.q0, count)
            target.copy_(rows) if is_first else target.add_(rows)

    def result(self) -> Tensor:
        return self._sum.to(self._dtype)


def sink_gradient(sinks, dout, out, lse, dlse):
    """-sum of exp(sink - lse) * (rowsum(dout * out) - dlse) over the rows; dout, out (rows, h, d), lse (h, rows)."""
    delta = (dout.to(lse.dtype) * out.to(lse.dtype)).sum(-1).t()
    if dlse is not None:
        delta = delta - dlse.masked_fill(lse.isinf(), 0.0)
    weight = (sinks[:, None] - lse).exp().masked_fill(lse.isinf(), 0.0)
    return -(weight * delta).sum(1).to(sinks.dtype)
