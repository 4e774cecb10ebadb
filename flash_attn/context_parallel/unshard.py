"""Putting the ranks' parts of a tensor together, differentiable."""

from __future__ import annotations

import torch

from flash_attn.context_parallel.layouts import Span


def unshard(y: torch.Tensor, dim: int, layout, transport) -> torch.Tensor:
    return _Unshard.apply(y, dim, layout, transport)


def gather_rows(y: torch.Tensor, layout, transport) -> torch.Tensor:
    """(own tokens, ...) of every rank -> (all tokens, ...)."""
    y = y.contiguous()
    parts = [
        y if r == transport.rank else y.new_empty((layout.tokens_of(r), *y.shape[1:])) for r in range(layout.ranks)
    ]
    others = [r for r in range(layout.ranks) if r != transport.rank]
    sends = [(r, y) for r in others if y.numel()]
    transport.exchange(sends, [(r, parts[r]) for r in others if parts[r].numel()]).wait()
    result = y.new_empty((layout.cu[-1], *y.shape[1:]))
    for spans, part in zip(layout.spans, parts):
        _scatter(result, part, spans)
    return result


def rows_of(x: torch.Tensor, spans: tuple[Span, ...]) -> torch.Tensor:
    """The rows of x that are in spans, contiguous."""
    parts = [x[start:stop] for start, stop in spans]
    return torch.cat(parts) if parts else x[:0]


def _scatter(target: torch.Tensor, part: torch.Tensor, spans: tuple[Span, ...]) -> None:
    row = 0
    for start, stop in spans:
        target[start:stop] = part[row : row + stop - start]
        row += stop - start


class _Unshard(torch.autograd.Function):
    @staticmethod
    def forward(ctx, y, dim, layout, transport):
        ctx.dim, ctx.layout, ctx.transport = dim, layout, transport
        return gather_rows(y.movedim(dim, 0), layout, transport).movedim(0, dim)

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx, grad):
        """The sum over ranks of what each has for this one's rows, in the order of ranks."""
        layout, transport = ctx.layout, ctx.transport
        rows = grad.movedim(ctx.dim, 0)
        own = rows_of(rows, layout.spans[transport.rank]).contiguous()
        others = [r for r in range(layout.ranks) if r != transport.rank]
        sends = [(r, rows_of(rows, layout.spans[r]).contiguous()) for r in others]
        parts = [own if r == transport.rank else torch.empty_like(own) for r in range(layout.ranks)]
        receives = [(r, parts[r]) for r in others if own.numel()]
        transport.exchange([(r, x) for r, x in sends if x.numel()], receives).wait()
        exact = torch.promote_types(grad.dtype, torch.float32) if grad.is_floating_point() else grad.dtype
        total = torch.zeros(own.shape, dtype=exact, device=own.device)
        for part in parts:
            total += part
        return total.to(grad.dtype).movedim(0, ctx.dim), None, None, None
