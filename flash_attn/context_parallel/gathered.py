"""Methods all_gather and ring: queries stay, the keys that they see come from the ranks that have them.

all_gather computes once all have come; ring computes with the keys of one rank while those of the next are under way.
Gradients of keys go straight back to their owners, in float32, which add them in the order of distances.
All tensors have the tokens of all batch entries in one axis: (batch * tokens, heads, head_dim).
"""

from __future__ import annotations

import torch

from flash_attn.context_parallel.compute import Options, PartialSums, backward_call, forward_call, sum_dtype
from flash_attn.context_parallel.tables import StepTables


def forward(plan, method, batch, q, k, v, sinks, options: Options):
    """out and LSE (heads, rows) of this rank's queries."""
    tables = plan.tables(method, options.window, options.has_exact_positions, batch, q.device)
    is_whole = sum(len(step.forward) for step in tables) == 1  # then of all rows: each sees a key, its own at least
    sums = None if is_whole else PartialSums(q, v)
    for step, (step_k, step_v) in _overlapped(plan, tables, batch, (k, v)):
        for call in step.forward:
            if is_whole:
                whole = forward_call(call, q, step_k, step_v, options, sinks)
            else:
                sums.add(slice(call.q0, call.q1), *forward_call(call, q, step_k, step_v, options, is_partial=True))
        del step_k, step_v  # before the keys after the next are asked for: two buffers, not three
    if is_whole:
        return whole
    if sinks is not None:
        sums.add_sinks(sinks)
    return sums.result(q.dtype)


def backward(plan, method, batch, dout, q, k, v, out, lse, dlse, options: Options):
    """dq, dk and dv of this rank's tokens."""
    tables = plan.tables(method, options.window, options.has_exact_positions, batch, q.device)
    dq, dk, dv = (torch.zeros(x.shape, dtype=sum_dtype(x.dtype), device=x.device) for x in (q, k, v))
    returning = None
    for step, (step_k, step_v) in _overlapped(plan, tables, batch, (k, v)):
        grads = (dk, dv) if step.step.is_local else [
            torch.zeros(x.shape, dtype=sum_dtype(x.dtype), device=x.device) for x in (step_k, step_v)
        ]  # fmt: skip
        for call in step.backward:
            dq_part, *_ = backward_call(call, dout, q, step_k, step_v, out, lse, dlse, options, grads)
            dq[call.q0 : call.q1] += dq_part
        del step_k, step_v
        if returning is not None:
            returning.finish()
        returning = _Returned(plan, step, batch, grads, (dk, dv))
        del grads
    returning.finish()
    return dq.to(q.dtype), dk.to(k.dtype), dv.to(v.dtype)


def _overlapped(plan, tables, batch, tensors):
    """(step, its keys and values), those of the next step requested before."""
    fetched = _Fetched(plan, tables[0], batch, tensors)
    for step, following in zip(tables, (*tables[1:], None)):
        current = fetched.wait()
        fetched = None if following is None else _Fetched(plan, following, batch, tensors)
        yield step, current
        del current


def _rows(tensors, entries: int, start: int, stop: int):
    """Rows [start, stop) of every entry of every tensor of (entries * rows, ...)."""
    for x in tensors:
        rows = x.shape[0] // max(1, entries)
        for first in range(0, entries * rows, max(1, rows)):
            yield x[first + start : first + stop]


class _Fetched:
    """The keys and values of a step, under way."""

    def __init__(self, plan, tables: StepTables, batch: int, tensors):
        step = tables.step
        self._buffers, self._pending = tensors, None
        if not step.is_local:
            self._buffers = [plan.transport.buffer(x, (batch * step.key_rows, *x.shape[1:])) for x in tensors]
        sends = [(m.peer, x) for m in step.sends for x in _rows(tensors, batch, m.start, m.stop)]
        receives = [(m.peer, x) for m in step.receives for x in _rows(self._buffers, batch, m.start, m.stop)]
        if sends or receives:
            self._pending = plan.transport.exchange(sends, receives)
        for row, key, count in step.own:
            targets = _rows(self._buffers, batch, key, key + count)
            for target, source in zip(targets, _rows(tensors, batch, row, row + count)):
                target.copy_(source)

    def wait(self):
        if self._pending is not None:
            self._pending.wait()
        return self._buffers


class _Returned:
    """The gradients of a step's keys on the way to their owners; one distance between ranks at a time."""

    def __init__(self, plan, tables: StepTables, batch: int, grads, targets):
        self._plan, self._step, self._batch = plan, tables.step, batch
        self._grads, self._targets = grads, targets
        for row, key, count in self._step.own:
            sources = _rows(grads, batch, key, key + count)
            for target, source in zip(_rows(targets, batch, row, row + count), sources):
                target += source
        self._rounds = list(self._step.rounds)
        self._arriving = self._start()

    def _start(self):
        if not self._rounds:
            return None
        sent, received = self._rounds.pop(0)
        sends = [(m.peer, x) for m in sent for x in _rows(self._grads, self._batch, m.start, m.stop)]
        targets = [(m.peer, x) for m in received for x in _rows(self._targets, self._batch, m.start, m.stop)]
        arrived = [(peer, torch.empty_like(x)) for peer, x in targets]
        return self._plan.transport.exchange(sends, arrived), targets, arrived

    def finish(self) -> None:
        while self._arriving is not None:
            pending, targets, arrived = self._arriving
            pending.wait()
            for (_, target), (_, part) in zip(targets, arrived):
                target += part
            self._arriving = self._start()
