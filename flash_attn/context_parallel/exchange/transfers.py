"""The transfers of one step: keys and values to the ranks that need them, their gradients back to the owners.

A peer gets one message per tensor, for any number of ranges: a message costs the host about as much as a kernel.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import cast

import torch
from torch import Tensor

from flash_attn.context_parallel.exchange.groups import Transport
from flash_attn.context_parallel.exchange.peer_copies import Arriving, CopyTransport
from flash_attn.context_parallel.exchange.transport import Pending
from flash_attn.context_parallel.plan.schedule import Copies
from flash_attn.context_parallel.plan.steps import Ranges, Step, Transfers


def _views(x: Tensor, ranges: Ranges) -> list[Tensor]:
    return [x.narrow(0, start, count) for start, count in ranges]


def _packed(x: Tensor, ranges: Ranges) -> Tensor:
    """The rows as one contiguous tensor."""
    return x.narrow(0, *ranges[0]) if len(ranges) == 1 else torch.cat(_views(x, ranges))


def _unpacked(x: Tensor, ranges: Ranges) -> Sequence[Tensor]:
    """The reverse of `_packed`, as views."""
    parts: Sequence[Tensor] = x.split([count for _, count in ranges])
    return parts


def _empty_rows(x: Tensor, ranges: Ranges) -> Tensor:
    return x.new_empty((sum(count for _, count in ranges), *x.shape[1:]))


def _messages(transfers: Transfers, tensors: Sequence[Tensor]) -> list[tuple[int, Tensor]]:
    return [(peer, _packed(x, ranges)) for peer, ranges in transfers for x in tensors]


class KeyTransfer:
    """Keys and values of a step under way. most_rows: of any rank's buffer at most, for copies."""

    def __init__(
        self, transport: Transport, step: Step, copies: Copies | None, tensors: Sequence[Tensor], most_rows: int
    ):
        self._buffers = list(tensors)
        self._pending: Pending | None = None
        self._copies: Arriving | None = None
        self._targets: list[Tensor] = []
        self._sources: list[Tensor] = []
        if copies is not None:
            self._copies = cast(CopyTransport, transport).push(tensors, step.key_rows, most_rows, copies)
            if not step.is_local:
                self._buffers = self._copies.buffers
        else:
            self._exchange(transport, step, tensors)
        rows, keys = step.own
        if rows:
            targets = [view for x in self._buffers for view in _views(x, keys)]
            torch._foreach_copy_(targets, [view for x in tensors for view in _views(x, rows)])

    def _exchange(self, transport: Transport, step: Step, tensors: Sequence[Tensor]) -> None:
        if not step.is_local:
            self._buffers = [x.new_empty((step.key_rows, *x.shape[1:])) for x in tensors]
        sends = _messages(step.sends, tensors)
        receives = [(peer, self._arrival(x, ranges)) for peer, ranges in step.receives for x in self._buffers]
        if sends or receives:
            self._pending = transport.exchange(sends, receives)

    def _arrival(self, buffer: Tensor, ranges: Ranges) -> Tensor:
        """Where a message arrives: in the buffer if it is one range of it."""
        if len(ranges) == 1:
            return buffer.narrow(0, *ranges[0])
        arrived = _empty_rows(buffer, ranges)
        self._targets += _views(buffer, ranges)
        self._sources += _unpacked(arrived, ranges)
        return arrived

    def wait(self) -> list[Tensor]:
        """The keys and values of the step, complete."""
        if self._copies is not None:
            self._copies.wait()
        if self._pending is not None:
            self._pending.wait()
        if self._targets:
            torch._foreach_copy_(self._targets, self._sources)
        buffers = self._buffers
        self._buffers, self._pending, self._targets, self._sources = [], None, [], []  # frees them before finish()
        return buffers

    def finish(self) -> None:
        """The tensors whose rows were sent may be overwritten afterwards."""
        if self._copies is not None:
            self._copies.finish()


class GradientTransfer:
    """Gradients of a step's keys on the way to their owners, one distance between ranks at a time."""

    def __init__(self, transport: Transport, step: Step, grads: Sequence[Tensor], targets: Sequence[Tensor]):
        self._transport, self._grads, self._targets = transport, grads, targets
        rows, keys = step.own
        if rows:
            own = [view for x in targets for view in _views(x, rows)]
            torch._foreach_add_(own, [view for x in grads for view in _views(x, keys)])
        self._returns = list(step.returns)
        self._start()

    def _start(self) -> None:
        self._pending: Pending | None = None
        self._arriving: list[tuple[Tensor, Ranges, Tensor]] | None = None
        if not self._returns:
            return
        sends, receives = self._returns.pop(0)
        outgoing = _messages(sends, self._grads)
        self._arriving = [(x, ranges, _empty_rows(x, ranges)) for _, ranges in receives for x in self._targets]
        peers = [peer for peer, _ in receives for _ in self._targets]
        incoming = list(zip(peers, (arrived for *_, arrived in self._arriving)))
        if outgoing or incoming:
            self._pending = self._transport.exchange(outgoing, incoming)

    def finish(self) -> None:
        """Add the tensors received, in the order of distances."""
        while self._arriving is not None:
            if self._pending is not None:
                self._pending.wait()
            targets = [view for x, ranges, _ in self._arriving for view in _views(x, ranges)]
            if targets:
                parts = [part for _, ranges, arrived in self._arriving for part in _unpacked(arrived, ranges)]
                torch._foreach_add_(targets, parts)
            self._start()
