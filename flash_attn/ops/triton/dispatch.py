"""Common to the operators here: whether a Triton kernel takes a call, on which device, and the end of its backward."""

from __future__ import annotations

import contextlib
import importlib.util
from collections.abc import Callable
from functools import cache
from typing import NoReturn, Optional

import torch

from flash_attn._types import Context
from flash_attn.ops import context

_Gradients = tuple[Optional[torch.Tensor], ...]
_Backward = Callable[..., _Gradients]


def kernel_serves(x: torch.Tensor) -> bool:
    """Whether a Triton kernel takes x: a plain tensor on CUDA, of at most 32 bits, in eager execution alone.

    Inductor fuses PyTorch's operations; traces and derivatives of any kind need to see them.
    """
    plain = type(x) in (torch.Tensor, torch.nn.Parameter)
    return x.is_cuda and plain and x.dtype != torch.float64 and not context.decomposes() and _has_triton()


def device_of(x: torch.Tensor) -> contextlib.AbstractContextManager[object]:
    """A context in which Triton launches on x's device, which need not be the current one."""
    return torch.cuda.device(x.device) if x.is_cuda else contextlib.nullcontext()


def power_of_two(n: int) -> int:
    """The smallest power of two that is at least n."""
    return 1 << max(n - 1, 0).bit_length()


@cache
def _has_triton() -> bool:
    return importlib.util.find_spec("triton") is not None


def once_differentiable(name: str) -> Callable[[_Backward], _Backward]:
    """Decorate the backward of an autograd.Function that is not differentiable itself: differentiating it raises.

    `torch.autograd.function.once_differentiable` instead lets a second backward pass by without a gradient where the
    incoming gradient has none.
    """

    def decorate(backward: _Backward) -> _Backward:
        def run(ctx: Context, *grad_outputs: torch.Tensor | None) -> _Gradients:
            with torch.no_grad():
                grads = backward(ctx, *grad_outputs)
            if not torch.is_grad_enabled():
                return grads
            origin = torch.ones((), dtype=torch.float32, device="cpu", requires_grad=True)
            return _Rejection.apply(name, origin, *grads)  # type: ignore[no-any-return]  # of torch

        return run

    return decorate


class _RejectionContext(Context):
    name: str


class _Rejection(torch.autograd.Function):
    """Gradients as they are, with a backward that raises. `origin` requires a gradient, so that they do."""

    @staticmethod
    def forward(
        ctx: _RejectionContext, name: str, origin: torch.Tensor, *grads: torch.Tensor | None
    ) -> tuple[torch.Tensor | None, ...]:
        ctx.name = name
        return tuple(None if grad is None else grad.view_as(grad) for grad in grads)

    @staticmethod
    def backward(ctx: _RejectionContext, *_: torch.Tensor | None) -> NoReturn:
        raise RuntimeError(f"{ctx.name}: expected one backward, got a second: its gradient is not differentiable")
