"""What moves between ranks in a step: keys and values to those that need them, their gradients back.

A peer gets one message for each tensor, whatever the number of spans: each costs the host about as much as a kernel.
"""

from __future__ import annotations

import torch
from torch import Tensor

from flash_attn.context_parallel.tables import Ranges, StepTables


def _views(x: Tensor, ranges: Ranges) -> list[Tensor]:
    return [x.narrow(0, start, count) for start, count in ranges]


def _packed(x: Tensor, ranges: Ranges) -> Tensor:
    """The rows as one contiguous tensor."""
    return x.narrow(0, *ranges[0]) if len(ranges) == 1 else torch.cat(_views(x, ranges))


def _room(x: Tensor, ranges: Ranges, transport) -> Tensor:
    return transport.buffer(x, (sum(count for _, count in ranges), *x.shape[1:]))


def _divided(x: Tensor, ranges: Ranges):
    """The reverse of `_packed`, as views."""
    return x.split([count for _, count in ranges])


class Fetched:
    """The keys and values of a step, under way."""

    def __init__(self, passes, step: StepTables, tensors):
        self._buffers, self._pending, self._pushed, self._targets, self._sources = tensors, None, None, [], []
        if step.pushes is not None:
            self._pushed = passes.transport.push(tensors, step.key_rows, step.pushes.most_rows, step.pushes.parts)
            if not step.is_local:
                self._buffers = self._pushed.buffers
        else:
            self._exchange(passes, step, tensors)
        rows, keys = step.own
        if rows:
            targets = [view for x in self._buffers for view in _views(x, keys)]
            torch._foreach_copy_(targets, [view for x in tensors for view in _views(x, rows)])

    def _exchange(self, passes, step: StepTables, tensors):
        if not step.is_local:
            self._buffers = [passes.transport.buffer(x, (step.key_rows, *x.shape[1:])) for x in tensors]
        sends = [(peer, _packed(x, ranges)) for peer, ranges in step.keys.sends for x in tensors]
        arriving = [(peer, x, ranges) for peer, ranges in step.keys.receives for x in self._buffers]
        receives = [(peer, self._arrival(x, ranges, passes)) for peer, x, ranges in arriving]
        if sends or receives:
            self._pending = passes.transport.exchange(sends, receives)

    def _arrival(self, buffer: Tensor, ranges: Ranges, passes) -> Tensor:
        """Where a message arrives: in its place, where that is one."""
        if len(ranges) == 1:
            return buffer.narrow(0, *ranges[0])
        arrived = _room(buffer, ranges, passes.transport)
        self._targets += _views(buffer, ranges)
        self._sources += _divided(arrived, ranges)
        return arrived

    def wait(self):
        if self._pushed is not None:
            self._pushed.wait()
        if self._pending is not None:
            self._pending.wait()
        if self._targets:
            torch._foreach_copy_(self._targets, self._sources)
        buffers = self._buffers
        self._buffers = self._pending = self._targets = self._sources = None  # memory that need not live until finish()
        return buffers

    def finish(self) -> None:
        """After it the tensors whose rows were sent may be written to."""
        if self._pushed is not None:
            self._pushed.finish()


class Returned:
    """The gradients of a step's keys on the way to their owners; one distance between ranks at a time."""

    def __init__(self, passes, step: StepTables, grads, targets):
        self._transport, self._grads, self._targets = passes.transport, grads, targets
        rows, keys = step.own
        if rows:
            own = [view for x in targets for view in _views(x, rows)]
            torch._foreach_add_(own, [view for x in grads for view in _views(x, keys)])
        self._rounds = list(step.rounds)
        self._arriving = self._start()

    def _start(self):
        if not self._rounds:
            return None
        moves = self._rounds.pop(0)
        sends = [(peer, _packed(x, ranges)) for peer, ranges in moves.sends for x in self._grads]
        arriving = [(peer, x, ranges) for peer, ranges in moves.receives for x in self._targets]
        arrived = [(peer, _room(x, ranges, self._transport)) for peer, x, ranges in arriving]
        pending = self._transport.exchange(sends, arrived) if sends or arrived else None
        return pending, arriving, arrived

    def finish(self) -> None:
        while self._arriving is not None:
            pending, arriving, arrived = self._arriving
            if pending is not None:
                pending.wait()
            targets = [view for _, x, ranges in arriving for view in _views(x, ranges)]
            if targets:
                parts = [part for (_, x), (*_, ranges) in zip(arrived, arriving) for part in _divided(x, ranges)]
                torch._foreach_add_(targets, parts)
            self._arriving = self._start()
