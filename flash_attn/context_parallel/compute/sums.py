"""The sums of several kernel calls' results for the same rows: out and LSE, and gradients.

Sums are float32 (float64 for float64), in the order of the calls.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch
from torch import Tensor

from flash_attn import backends
from flash_attn.context_parallel.compute import kernel_calls
from flash_attn.context_parallel.compute.kernel_calls import BackwardInputs, ForwardInputs, KernelCall, KernelCalls

_MOST_SLOTS = 4  # parts of out kept in q's dtype: no more memory than two float32 tensors


def new_sums(k: Tensor, v: Tensor) -> tuple[Tensor, Tensor]:
    """Zeros like both in the dtype of sums."""
    dtype = kernel_calls.sum_dtype(k.dtype)
    if k.shape == v.shape:
        dk, dv = torch.zeros((2, *k.shape), dtype=dtype, device=k.device).unbind(0)
        return dk, dv
    return torch.zeros(k.shape, dtype=dtype, device=k.device), torch.zeros(v.shape, dtype=dtype, device=v.device)


def forward_sums(calls: KernelCalls, inputs: ForwardInputs) -> _SingleResults | _StackedResults | _RunningSums:
    """Adds up the results of a forward's calls: one, few or many for each row. Sinks are one more key."""
    schedule = calls.schedule
    if schedule.slots <= 1:
        return _SingleResults(calls, inputs)
    if schedule.slots <= _MOST_SLOTS and (inputs.sinks is None or schedule.slot_0_is_full):
        return _StackedResults(calls, inputs)
    return _RunningSums(inputs)


class _SingleResults:
    """Each row is in one call."""

    def __init__(self, calls: KernelCalls, inputs: ForwardInputs):
        q, v = inputs.q, inputs.v
        self._is_one_call = sum(map(len, calls.steps)) == 1
        if not self._is_one_call:
            self._out = q.new_empty((*q.shape[:2], v.shape[2]))
            self._lse = torch.empty(q.shape[1], q.shape[0], dtype=kernel_calls.sum_dtype(q.dtype), device=q.device)

    def compute(self, call: KernelCall, inputs: ForwardInputs) -> None:
        if self._is_one_call:
            self._out, self._lse = kernel_calls.forward_call(call, inputs)
        else:
            own = kernel_calls.rows_of(self._out, call.rows)
            self._lse[:, slice(*call.rows)] = kernel_calls.forward_call(call, inputs, out=own)[1]

    def result(self) -> tuple[Tensor, Tensor]:
        """out and LSE (heads, rows)."""
        return self._out, self._lse


class _StackedResults:
    """Each row has a result in some of the slots; all are combined at once. Sinks are in slot 0, which has all rows."""

    def __init__(self, calls: KernelCalls, inputs: ForwardInputs):
        q, slots = inputs.q, calls.schedule.slots
        shape = (slots, *q.shape[:2], inputs.v.shape[2])
        self._dtype, self._out = q.dtype, torch.empty(shape, dtype=kernel_calls.part_dtype(q), device=q.device)
        self._lse = torch.full(
            (slots, q.shape[1], q.shape[0]), -math.inf, dtype=kernel_calls.sum_dtype(q.dtype), device=q.device
        )

    def compute(self, call: KernelCall, inputs: ForwardInputs) -> None:
        slot = call.call.slot
        inputs = inputs._replace(sinks=None) if slot else inputs
        _, lse = kernel_calls.forward_call(
            call, inputs, is_partial=True, out=kernel_calls.rows_of(self._out[slot], call.rows)
        )
        self._lse[slot, :, slice(*call.rows)] = lse

    def result(self) -> tuple[Tensor, Tensor]:
        out = torch.empty((1, *self._out.shape[1:]), dtype=self._dtype, device=self._out.device)
        _, lse = backends.of(out).combine(self._out.unsqueeze(1), self._lse.transpose(1, 2).unsqueeze(1), out)
        return out[0], lse[0].t().contiguous()


class _RunningSums:
    """Each row has many results, combined in the order of the calls."""

    def __init__(self, inputs: ForwardInputs):
        q, dtype = inputs.q, kernel_calls.sum_dtype(inputs.q.dtype)
        self._sinks, self._dtype, self._is_empty = inputs.sinks, q.dtype, True
        self._out = torch.zeros((*q.shape[:2], inputs.v.shape[2]), dtype=dtype, device=q.device)
        self._lse = torch.full((q.shape[1], q.shape[0]), -math.inf, dtype=dtype, device=q.device)

    def compute(self, call: KernelCall, inputs: ForwardInputs) -> None:
        out, lse = kernel_calls.forward_call(call, inputs._replace(sinks=None), is_partial=True)
        lse = lse.masked_fill(lse == math.inf, -math.inf)  # an infinite LSE means no keys; its out is 0
        target, before = self._out[slice(*call.rows)], self._lse[:, slice(*call.rows)]
        if self._is_empty and target.shape == self._out.shape:
            target.copy_(out)
            before.copy_(lse)
        else:
            self._rescale(target, before, lse).addcmul_(out, self._weight(lse, before))
            torch.logaddexp(before, lse, out=before)
        self._is_empty = False

    def _rescale(self, target: Tensor, before: Tensor, lse: Tensor) -> Tensor:
        return target.mul_(self._weight(before, lse))

    @staticmethod
    def _weight(lse: Tensor, other: Tensor) -> Tensor:
        """exp(lse) / (exp(lse) + exp(other)) as (rows, heads, 1): both weights sum to 1 even if LSEs are rounded."""
        return torch.sigmoid(lse - other).masked_fill_(lse == -math.inf, 0.0).t().unsqueeze(-1)

    def result(self) -> tuple[Tensor, Tensor]:
        if self._sinks is not None:  # keys with value 0
            lse = self._sinks.to(self._lse.dtype)[:, None].expand(self._lse.shape)
            self._rescale(self._out, self._lse, lse)
            self._lse = torch.logaddexp(self._lse, lse)
        return self._out.to(self._dtype), self._lse.masked_fill(self._lse == -math.inf, math.inf)


class KernelDqSum:
    """The dq of a backward's calls as one float32 sum in the kernels' own format, rounded once."""

    def __init__(self, calls: KernelCalls, inputs: BackwardInputs):
        assert calls.all_rows is not None
        self._call, self._inputs = calls.all_rows, inputs
        self._sum, _, _, self._softmax_d, *_ = kernel_calls.backward_call(self._call, inputs, dq_stage="begin")

    def add(self, call: KernelCall, inputs: BackwardInputs, grads: Sequence[Tensor]) -> None:
        """Run the call; it also adds to grads, the sums of dk and dv of the step's keys."""
        kernel_calls.backward_call(call, inputs, grads, dq_stage="add", dq_sum=self._sum, softmax_d=self._softmax_d)

    def result(self) -> Tensor:
        dq: Tensor = kernel_calls.backward_call(self._call, self._inputs, dq_stage="end", dq_sum=self._sum)[0]
        return dq.to(self._inputs.q.dtype)


class PartialDqSums:
    """The sum of each call's dq. A sum of two parts is rounded once in any dtype, so it is in q's."""

    def __init__(self, calls: KernelCalls, q: Tensor):
        self._dtype, self._part_dtype = q.dtype, kernel_calls.part_dtype(q)
        dtype = self._part_dtype if calls.schedule.depth <= 2 else kernel_calls.sum_dtype(q.dtype)
        self._sum = torch.empty(q.shape, dtype=dtype, device=q.device)

    def add(self, call: KernelCall, inputs: BackwardInputs, grads: Sequence[Tensor]) -> None:
        (start, count, is_first), *others = call.call.parts
        if is_first and not others and self._sum.dtype == self._part_dtype:
            kernel_calls.backward_call(call, inputs, grads, dq=self._sum.narrow(0, start, count))
            return
        dq = kernel_calls.backward_call(call, inputs, grads)[0]
        for start, count, is_first in call.call.parts:
            target, rows = self._sum.narrow(0, start, count), dq.narrow(0, start - call.rows[0], count)
            target.copy_(rows) if is_first else target.add_(rows)

    def result(self) -> Tensor:
        return self._sum.to(self._dtype)


def sink_gradient(sinks: Tensor, dout: Tensor, out: Tensor, lse: Tensor, dlse: Tensor | None) -> Tensor:
    """-sum of exp(sink - lse) * (rowsum(dout * out) - dlse) over the rows; dout, out (rows, h, d), lse (h, rows)."""
    delta = (dout.to(lse.dtype) * out.to(lse.dtype)).sum(-1).t()
    if dlse is not None:
        delta = delta - dlse.masked_fill(lse.isinf(), 0.0)
    weight = (sinks[:, None] - lse).exp().masked_fill(lse.isinf(), 0.0)
    return -(weight * delta).sum(1).to(sinks.dtype)
