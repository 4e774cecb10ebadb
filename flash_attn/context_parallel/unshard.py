"""Putting the ranks' parts of a tensor together, differentiable."""

from __future__ import annotations

import torch

from flash_attn.context_parallel.layouts import Span


def unshard(y: torch.Tensor, dim: int, stages, compare_backward) -> torch.Tensor:
    """stages: (layout, communicator) of the ranks that exchange rows, each over the rows of the stage before.

    compare_backward: what a backward calls before it sends anything.
    """
    return _Unshard.apply(y, dim, stages, compare_backward)


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


def sum_rows(rows: torch.Tensor, dtype: torch.dtype, layout, transport) -> torch.Tensor:
    """(all tokens, ...) of every rank -> (own tokens, ...), the sum of what all have for them in the order of ranks."""
    own = rows_of(rows, layout.spans[transport.rank]).contiguous()
    others = [r for r in range(layout.ranks) if r != transport.rank]
    sends = [(r, rows_of(rows, layout.spans[r]).contiguous()) for r in others]
    parts = [own if r == transport.rank else torch.empty_like(own) for r in range(layout.ranks)]
    receives = [(r, parts[r]) for r in others if own.numel()]
    transport.exchange([(r, x) for r, x in sends if x.numel()], receives).wait()
    total = torch.zeros(own.shape, dtype=dtype, device=own.device)
    for part in parts:
        total += part
    return total


class _Unshard(torch.autograd.Function):
    @staticmethod
    def forward(ctx, y, dim, stages, compare_backward):
        ctx.dim, ctx.stages, ctx.compare_backward = dim, stages, compare_backward
        rows = y.movedim(dim, 0)
        for layout, transport in stages:
            rows = gather_rows(rows, layout, transport)
        return rows.movedim(0, dim)

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx, grad):
        """The sum over ranks of what each has for this one's rows, rounded once."""
        ctx.compare_backward()
        exact = torch.promote_types(grad.dtype, torch.float32) if grad.is_floating_point() else grad.dtype
        rows = grad.movedim(ctx.dim, 0)
        for layout, transport in reversed(ctx.stages):
            rows = sum_rows(rows, exact, layout, transport)
        return rows.to(grad.dtype).movedim(0, ctx.dim), None, None, None
