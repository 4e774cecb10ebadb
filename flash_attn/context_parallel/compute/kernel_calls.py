"""Kernel calls as index tensors, which `varlen_fwd` and `varlen_bwd` of a backend take, and calls of these.

A gap between the rows of a call is a sequence without keys, a gap between its keys one without queries.
On CPU tensors every partial result and gradient is float32 or wider. CUDA kernels add dk and dv to float32 sums, and
round out and dq to q's dtype once.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from flash_attn import backends
from flash_attn.context_parallel.plan.layouts import Span, Window
from flash_attn.context_parallel.plan.schedule import DQ_TILE, Call, DqRows, Schedule
from flash_attn.context_parallel.plan.steps import Kind, Pair
from flash_attn.ops.calls import rows_contiguous

Grads = tuple[Tensor, Tensor, Tensor]


class Options(NamedTuple):
    """The options of an attention call, equal on every rank. first_head: where heads of slopes and dropout begin."""

    method: str
    batch: int
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
    def kind(self) -> Kind:
        return Kind(self.method, self.window, self.alibi_slopes is not None or self.dropout_p > 0, self.batch)


class ForwardInputs(NamedTuple):
    """Tensors of a forward; k and v are this rank's or those of a step."""

    q: Tensor
    k: Tensor
    v: Tensor
    sinks: Tensor | None
    options: Options


class BackwardInputs(NamedTuple):
    """Tensors of a backward; k and v are this rank's or those of a step."""

    dout: Tensor
    q: Tensor
    k: Tensor
    v: Tensor
    out: Tensor
    lse: Tensor
    dlse: Tensor | None
    options: Options


class KernelCall(NamedTuple):
    """A call with its sequences, whose bounds are relative to rows, a span of q, and keys, a span of the step's keys.

    seqused_k: given if keys of sequences overlap, which only a forward allows. longest: (max_seqlen_q, max_seqlen_k).
    window: (left, right), -1 for unbounded. origins: int64 (sequences, 4), the document, 0, row and column at which the
    scores begin. is_aligned: whether ALiBi needs no origins.
    """

    call: Call
    rows: Span
    keys: Span
    cu_seqlens_q: Tensor
    cu_seqlens_k: Tensor
    seqused_k: Tensor | None
    longest: tuple[int, int]
    window: tuple[int, int]
    origins: Tensor
    is_aligned: bool


class KernelCalls:
    """The calls of a schedule with index tensors on a device: steps, and late ones."""

    def __init__(self, schedule: Schedule, device: torch.device):
        self.schedule = schedule
        rows = schedule.dq_rows
        make = _packed_rows if rows is None else lambda call, device: _all_rows(call, rows, device)
        *self.steps, self.late = [[make(call, device) for call in calls] for calls in schedule.calls]
        self.all_rows = None if rows is None else _dq_call(rows, device)

    @property
    def only_call(self) -> KernelCall | None:
        """The call of a rank that neither sends nor receives anything, if it has only one."""
        calls = [call for step in self.steps for call in step]
        return calls[0] if len(calls) == 1 and not self.schedule.moves and not self.late else None


def _packed_rows(call: Call, device: torch.device) -> KernelCall:
    """Sequences over the rows from the first pair to the last one."""
    pairs, q0 = call.pairs, call.pairs[0].q0
    k0, k1 = min(pair.k0 for pair in pairs), max(pair.k1 for pair in pairs)
    cu_q, starts_k, used_k, origins = [0], [], [], []

    def add(queries: int, first_key: int, keys: int, pair: Pair) -> None:
        cu_q.append(cu_q[-1] + queries)
        starts_k.append(first_key - k0)
        used_k.append(keys)
        origins.append(pair)

    next_key = k0
    for pair in pairs:
        if pair.q0 - q0 > cu_q[-1]:
            add(pair.q0 - q0 - cu_q[-1], next_key, 0, pair)
        if call.has_ascending_keys and pair.k0 > next_key:
            add(0, next_key, pair.k0 - next_key, pair)
        add(pair.q1 - pair.q0, pair.k0, pair.k1 - pair.k0, pair)
        next_key = pair.k1
    used = None if call.has_ascending_keys else used_k
    return _kernel_call(call, call.rows, (k0, k1), cu_q, [*starts_k, k1 - k0], used, origins, device)


def _all_rows(call: Call, dq_rows: DqRows, device: torch.device) -> KernelCall:
    """Sequences over all rows. A span without a pair has empty sequences; its rows go to the next span's gap."""
    pairs = call.pairs
    owned = {dq_rows.owner(pair): pair for pair in pairs}
    k0, k1, cu_q, cu_k, origins = pairs[0].k0, pairs[-1].k1, [0], [0], []
    for i, gaps in enumerate(dq_rows.gaps):
        pair, row, key = owned.get(i), cu_q[-1], cu_k[-1]
        if pair is None:
            pair = pairs[0]._replace(q0=row, q1=row, k0=key + k0, k1=key + k0)
        cu_q += [pair.q0] * gaps + [pair.q1]
        cu_k += [key, pair.k0 - k0][2 - gaps :] + [pair.k1 - k0]  # rows, then keys: never both in one sequence
        origins += [pair] * (gaps + 1)
    return _kernel_call(call, (0, dq_rows.rows), (k0, k1), cu_q, cu_k, None, origins, device)


def _kernel_call(
    call: Call,
    rows: Span,
    keys: Span,
    cu_q: list[int],
    cu_k: list[int],
    used_k: list[int] | None,
    pairs: Sequence[Pair],
    device: torch.device,
) -> KernelCall:
    """pairs: where the scores of each sequence begin."""

    def int32(values: list[int]) -> Tensor:
        return torch.tensor(values, dtype=torch.int32, device=device)

    origins = torch.tensor([(p.document, 0, p.row, p.col) for p in pairs], dtype=torch.int64, device=device)
    longest = max(pair.q1 - pair.q0 for pair in call.pairs), max(pair.k1 - pair.k0 for pair in call.pairs)
    return KernelCall(
        call=call,
        rows=rows,
        keys=keys,
        cu_seqlens_q=int32(cu_q),
        cu_seqlens_k=int32(cu_k),
        seqused_k=None if used_k is None else int32(used_k),
        longest=longest,
        window=(call.pairs[0].left, call.pairs[0].right),
        origins=origins,
        is_aligned=all(pair.is_aligned for pair in call.pairs),
    )


def _dq_call(dq_rows: DqRows, device: torch.device) -> KernelCall:
    """The call that begins and ends a sum of dq, over all keys."""
    cu = [0]
    for (start, stop), gaps in zip(dq_rows.spans, dq_rows.gaps):
        cu += [start] * gaps + [stop]
    longest, rows = max(stop - start for start, stop in dq_rows.spans), (0, dq_rows.rows)
    cu_seqlens = torch.tensor(cu, dtype=torch.int32, device=device)
    origins = torch.zeros(len(cu) - 1, 4, dtype=torch.int64, device=device)
    none = Call([], True)
    return KernelCall(
        call=none,
        rows=rows,
        keys=rows,
        cu_seqlens_q=cu_seqlens,
        cu_seqlens_k=cu_seqlens,
        seqused_k=None,
        longest=(longest, longest),
        window=(-1, -1),
        origins=origins,
        is_aligned=True,
    )


def sum_dtype(dtype: torch.dtype) -> torch.dtype:
    """The dtype of LSE and of sums."""
    return torch.float64 if dtype == torch.float64 else torch.float32


def part_dtype(x: Tensor) -> torch.dtype:
    """The dtype of a call's results that are added to others."""
    return sum_dtype(x.dtype) if x.is_cpu else x.dtype


def _wide(*tensors: Tensor) -> list[Tensor]:
    """Half precision CPU tensors as float32, so that the results are float32."""
    return [x.to(part_dtype(x)) for x in tensors]


def rows_of(x: Tensor, rows: Span) -> Tensor:
    start, stop = rows
    return x if stop - start == x.shape[0] else x.narrow(0, start, stop - start)


def _slopes_and_keywords(call: KernelCall, options: Options) -> tuple[Tensor | None, dict[str, object]]:
    slopes = options.alibi_slopes
    if slopes is not None and slopes.dim() == 2:
        slopes = slopes[call.origins[:, 0]]
    keywords: dict[str, object] = {"sm_margin": options.sm_margin} if options.sm_margin else {}
    if options.dropout_p == 0 and (slopes is None or call.is_aligned):
        return slopes, keywords
    origins = call.origins
    if options.first_head:
        origins = origins.clone()
        origins[:, 1] += options.first_head
    return slopes, {"origins": origins, **keywords}


def forward_call(
    call: KernelCall, inputs: ForwardInputs, is_partial: bool = False, out: Tensor | None = None
) -> tuple[Tensor, Tensor]:
    """out and LSE (heads, rows) of the call's query rows. is_partial: to be added to others. out: where to write."""
    q, k, v, sinks, options = inputs
    q, k, v = rows_of(q, call.rows), rows_of(k, call.keys), rows_of(v, call.keys)
    if is_partial:
        q, k, v = _wide(q, k, v)
    slopes, keywords = _slopes_and_keywords(call, options)
    if options.dropout_p > 0:
        keywords["rng_state"] = options.rng_state
    if sinks is not None:
        keywords["sinks"] = sinks
    out, lse, *_ = backends.of(q).varlen_fwd(
        *map(rows_contiguous, (q, k, v)),
        out,
        call.cu_seqlens_q,
        call.cu_seqlens_k,
        call.seqused_k,
        None,
        None,
        slopes,
        *call.longest,
        options.dropout_p,
        options.softmax_scale,
        False,
        False,
        *call.window,
        options.softcap,
        False,
        None,
        **keywords,
    )
    return out, lse


def backward_call(
    call: KernelCall,
    inputs: BackwardInputs,
    sums: Sequence[Tensor] | None = None,
    dq: Tensor | None = None,
    function: Callable[..., object] | None = None,
    **stage: object,
) -> Any:
    """dq of the call's query rows, dk and dv of its key rows, from the LSE and out of all keys; and softmax_d.

    sums: None, or dk and dv of all key rows in `sum_dtype`: the call adds to them and returns its rows. dq: where to
    write it. function: in place of `varlen_bwd`. stage: the keywords of a backward that keeps its sum of dq.
    """
    dout, q, k, v, out, lse, dlse, options = inputs
    dout, q, out = (rows_of(x, call.rows) for x in (dout, q, out))
    k, v = rows_of(k, call.keys), rows_of(v, call.keys)
    slopes, keywords = _slopes_and_keywords(call, options)
    keywords.update(stage)
    dk = dv = None
    if sums is not None:
        dk, dv = (rows_of(grad, call.keys) for grad in sums)
        keywords["accumulate_dkv"] = True
    lse = lse[:, slice(*call.rows)].contiguous()
    dlse = None if dlse is None else dlse[:, slice(*call.rows)].contiguous()
    return (function or backends.of(dout).varlen_bwd)(
        *map(rows_contiguous, _wide(dout, q, k, v, out)),
        lse,
        dq,
        dk,
        dv,
        call.cu_seqlens_q,
        call.cu_seqlens_k,
        slopes,
        *call.longest,
        options.dropout_p,
        options.softmax_scale,
        False,
        False,
        *call.window,
        options.softcap,
        options.deterministic,
        None,
        options.rng_state if options.dropout_p > 0 else None,
        dlse,
        **keywords,
    )


def has_dq_sum(calls: KernelCalls, inputs: BackwardInputs) -> bool:
    """Whether the kernels of these calls keep a sum of dq to which several calls may add."""
    if calls.all_rows is None or inputs.dout.is_cpu:
        return calls.all_rows is not None
    explain = backends.of(inputs.dout).explain_varlen_bwd
    fields = backward_call(calls.all_rows, inputs, function=explain, dq_stage="begin")
    return bool(fields["has_dq_sum"]) and DQ_TILE % fields["block_m"] == 0
