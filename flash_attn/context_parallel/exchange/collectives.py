"""All-gather, reduce-scatter and all-to-all of rows, made of messages: sums have the order of ranks.

Tensors are (batch, rows, ...); rows of different ranks may differ in number.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Callable

import torch
from torch import Tensor

from flash_attn._types import Context
from flash_attn.context_parallel.exchange.groups import Transport
from flash_attn.context_parallel.plan.layouts import Layout, Spans

Stages = tuple[tuple[Layout, Transport], ...]


def _all_to_all(transport: Transport, sends: Sequence[Tensor], shapes: Sequence[Sequence[int]]) -> list[Tensor]:
    """What every rank sends to this one, of these shapes; sends[r] goes to rank r. Empty tensors are not sent."""
    rank, peers = transport.rank, [r for r in range(transport.size) if r != transport.rank]
    parts = [x if r == rank else x.new_empty(shape) for r, (x, shape) in enumerate(zip(sends, shapes))]
    outgoing = [(r, sends[r].contiguous()) for r in peers if sends[r].numel()]
    transport.exchange(outgoing, [(r, parts[r]) for r in peers if parts[r].numel()]).wait()
    return parts


def all_gather_tensors(x: Tensor, transport: Transport) -> Tensor:
    """(size, ...): x of every rank."""
    x = x.contiguous()
    return torch.stack(_all_to_all(transport, [x] * transport.size, [x.shape] * transport.size))


def gather_rows(sends: Sequence[Tensor], layout: Layout, transport: Transport) -> Tensor:
    """All rows from all ranks. sends: for each rank its part of this rank's rows, (batch, own rows, ...)."""
    batch, _, *shape = sends[transport.rank].shape
    shapes = [(batch, layout.tokens_of(r), *shape) for r in range(layout.ranks)]
    result = sends[transport.rank].new_empty((batch, layout.cu[-1], *shape))
    for spans, part in zip(layout.spans, _all_to_all(transport, sends, shapes)):
        row = 0
        for start, stop in spans if part.numel() else ():
            result[:, start:stop] = part[:, row : row + stop - start]
            row += stop - start
    return result


def scatter_rows(x: Tensor, layout: Layout, transport: Transport, widths: Sequence[int] = ()) -> list[Tensor]:
    """From every rank's tensor over all rows, this rank's rows (batch, own rows, ...). x: the tensor of this rank.

    widths: the size of axis 2 on every rank, if it differs.
    """
    sends = [_rows_of(x, spans) for spans in layout.spans]
    batch, count, *shape = sends[transport.rank].shape
    shapes = [(batch, count, width, *shape[1:]) for width in widths] or [(batch, count, *shape)] * layout.ranks
    return _all_to_all(transport, sends, shapes)


def _rows_of(x: Tensor, spans: Spans) -> Tensor:
    parts = [x[:, start:stop] for start, stop in spans]
    return torch.cat(parts, 1) if parts else x[:, :0]


class HeadExchange:
    """All-to-all between own tokens of all heads and all tokens of own heads; heads: those of every rank."""

    def __init__(self, transport: Transport, layout: Layout, batch: int):
        self._transport, self._layout, self._batch = transport, layout, batch

    def to_heads(self, x: Tensor, heads: Spans) -> Tensor:
        """(batch * own tokens, all heads, d) -> (batch * all tokens, own heads, d)."""
        x = x.view(self._batch, self._layout.tokens_of(self._transport.rank), *x.shape[1:])
        return gather_rows([x[:, :, a:b] for a, b in heads], self._layout, self._transport).flatten(0, 1)

    def add_to_tokens(self, x: Tensor, heads: Spans, target: Tensor) -> Tensor:
        """Adds every rank's x (batch * all tokens, own heads, d) to target (batch * own tokens, all heads, d)."""
        x = x.view(self._batch, self._layout.cu[-1], *x.shape[1:])
        parts = scatter_rows(x, self._layout, self._transport, [b - a for a, b in heads])
        for (a, b), part in zip(heads, parts):
            if part.numel():
                target[:, a:b] += part.flatten(0, 1)
        return target


def unshard(y: Tensor, dim: int, stages: Stages, compare_backward: Callable[[], None]) -> Tensor:
    """All rows of y along `dim`, differentiable. stages: the ranks that exchange rows, each over the rows of the stage
    before. compare_backward: called by the backward before it sends anything."""
    whole: Tensor = _Unshard.apply(y, dim, stages, compare_backward)
    return whole


class _UnshardContext(Context):
    dim: int
    stages: Stages
    compare_backward: Callable[[], None]


class _Unshard(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: _UnshardContext, y: Tensor, dim: int, stages: Stages, compare_backward: Callable[[], None]
    ) -> Tensor:
        ctx.dim, ctx.stages, ctx.compare_backward = dim, stages, compare_backward
        rows = y.movedim(dim, 0).unsqueeze(0).contiguous()
        for layout, transport in stages:
            rows = gather_rows([rows] * layout.ranks, layout, transport)
        return rows[0].movedim(0, dim)

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx: _UnshardContext, grad: Tensor) -> tuple[Tensor, None, None, None]:
        """The sum of every rank's gradient of this rank's rows, rounded once."""
        ctx.compare_backward()
        dtype = torch.promote_types(grad.dtype, torch.float32) if grad.is_floating_point() else grad.dtype
        rows = grad.movedim(ctx.dim, 0).unsqueeze(0)
        for layout, transport in reversed(ctx.stages):
            parts = scatter_rows(rows, layout, transport)
            rows = torch.zeros(parts[0].shape, dtype=dtype, device=grad.device)
            for part in parts:
                rows += part
        return rows[0].to(grad.dtype).movedim(0, ctx.dim), None, None, None
