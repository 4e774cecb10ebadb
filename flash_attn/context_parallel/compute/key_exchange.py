"""Methods all_gather and ring: queries stay, each rank receives the keys that its queries see.

all_gather receives all keys at once and meanwhile computes with local keys. ring computes with the keys of one
rank while it receives those of the next. Gradients of keys go straight back to their owners, in float32, and are added
in the order of distances.
All tensors have the tokens of all batch entries in one axis: (batch * tokens, heads, head_dim).
"""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch import Tensor

from flash_attn.context_parallel.compute import kernel_calls
from flash_attn.context_parallel.compute.kernel_calls import (
    BackwardInputs,
    ForwardInputs,
    Grads,
    KernelCall,
    KernelCalls,
)
from flash_attn.context_parallel.compute.sums import KernelDqSum, PartialDqSums, forward_sums, new_sums
from flash_attn.context_parallel.exchange.groups import Transport
from flash_attn.context_parallel.exchange.transfers import GradientTransfer, KeyTransfer
from flash_attn.context_parallel.plan.layouts import Layout
from flash_attn.context_parallel.plan.schedule import make_schedule, whole_schedule
from flash_attn.context_parallel.plan.steps import Kind, Step


class KeyRanks:
    """Ranks that exchange keys, and the calls of this rank's forwards and backwards, made once each.

    With method ulysses no keys move: each rank has all tokens.
    """

    def __init__(self, layout: Layout, transport: Transport):
        self.layout, self.transport = layout, transport
        self._calls: dict[tuple[Kind, torch.device, bool, bool], KernelCalls] = {}

    def calls(self, kind: Kind, device: torch.device, backward: bool = False, keeps_dq: bool = False) -> KernelCalls:
        """keeps_dq: see `make_schedule`."""
        key = kind, device, backward, keeps_dq
        found = self._calls.get(key)
        if found is None:
            if kind.method == "ulysses":
                schedule = whole_schedule(self.layout, kind)
            else:
                by_copies = kind.method == "all_gather" and hasattr(self.transport, "push")
                schedule = make_schedule(self.layout, self.transport.rank, kind, backward, keeps_dq, by_copies)
            found = self._calls[key] = KernelCalls(schedule, device)
        return found


def forward(ranks: KeyRanks, inputs: ForwardInputs) -> tuple[Tensor, Tensor]:
    """out and LSE (heads, rows) of this rank's queries."""
    q, _, _, sinks, options = inputs
    calls = ranks.calls(options.kind, q.device)
    sums = forward_sums(calls, inputs)
    for _, own_calls, (k, v) in _steps(ranks, calls, inputs):
        for call in own_calls:
            sums.compute(call, ForwardInputs(q, k, v, sinks, options))
        del k, v  # free them before the transfer after the next: two buffers, not three
    return sums.result()


def backward(ranks: KeyRanks, inputs: BackwardInputs, keeps_sums: bool = False) -> Grads:
    """dq, dk and dv of this rank's tokens. keeps_sums: dk and dv in the dtype of sums."""
    q, k, v, kind = inputs.q, inputs.k, inputs.v, inputs.options.kind
    calls = ranks.calls(kind, q.device, backward=True, keeps_dq=True)
    keeps_dq = kernel_calls.has_dq_sum(calls, inputs)
    if calls.all_rows is not None and not keeps_dq:
        calls = ranks.calls(kind, q.device, backward=True)
    if calls.only_call is not None and not keeps_sums:
        dq, dk, dv, *_ = kernel_calls.backward_call(calls.only_call, inputs)
        return dq.to(q.dtype), dk.to(k.dtype), dv.to(v.dtype)
    dq_sums = KernelDqSum(calls, inputs) if keeps_dq else PartialDqSums(calls, q)
    dk, dv = new_sums(k, v)
    returning = None
    for step, own_calls, (step_k, step_v) in _steps(ranks, calls, inputs):
        grads = (dk, dv) if step.is_local else new_sums(step_k, step_v)
        for call in own_calls:
            dq_sums.add(call, inputs._replace(k=step_k, v=step_v), grads)
        del step_k, step_v
        if returning is not None:
            returning.finish()
        returning = GradientTransfer(ranks.transport, step, grads, (dk, dv))
        del grads
    for call in calls.late:
        dq_sums.add(call, inputs, (dk, dv))
    if returning is not None:
        returning.finish()
    return (dq_sums.result(), dk, dv) if keeps_sums else (dq_sums.result(), dk.to(k.dtype), dv.to(v.dtype))


def _steps(
    ranks: KeyRanks, calls: KernelCalls, inputs: ForwardInputs | BackwardInputs
) -> Iterator[tuple[Step, list[KernelCall], list[Tensor]]]:
    """(step, its calls, its keys and values); the transfer of the next step has started by then."""
    steps, copies, tensors = calls.schedule.steps, calls.schedule.copies, (inputs.k, inputs.v)
    most_rows = inputs.options.batch * ranks.layout.cu[-1]
    transfers = [KeyTransfer(ranks.transport, steps[0], copies[0], tensors, most_rows)]
    for index, own_calls in enumerate(calls.steps, 1):
        current = transfers[-1].wait()
        if index < len(steps):
            transfers.append(KeyTransfer(ranks.transport, steps[index], copies[index], tensors, most_rows))
        yield steps[index - 1], own_calls, current
        del current
    for transfer in transfers:
        transfer.finish()
