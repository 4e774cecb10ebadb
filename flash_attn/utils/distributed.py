"""Collectives with gradients, and synchronisation of parameters that ranks share. `process_group`: of torch."""

from __future__ import annotations

import torch
import torch.distributed as dist
from torch import Tensor, nn

from flash_attn._types import Context


class _Context(Context):
    process_group: dist.ProcessGroup | None


def all_gather_raw(
    input_: Tensor, process_group: dist.ProcessGroup | None, async_op: bool = False
) -> tuple[Tensor, dist.Work | None]:
    """The inputs of all ranks along the first dimension -> (tensor, handle); without gradient."""
    size = dist.get_world_size(process_group) * input_.shape[0]
    output = input_.new_empty((size, *input_.shape[1:]))
    return output, dist.all_gather_into_tensor(output, input_.contiguous(), group=process_group, async_op=async_op)


def reduce_scatter_raw(
    input_: Tensor, process_group: dist.ProcessGroup | None, async_op: bool = False
) -> tuple[Tensor, dist.Work | None]:
    """This rank's part, along the first dimension, of the sum over ranks -> (tensor, handle); without gradient."""
    ranks = dist.get_world_size(process_group)
    if input_.shape[0] % ranks != 0:
        raise RuntimeError(f"input_: expected a first dimension divisible by {ranks} ranks, got {input_.shape[0]}")
    output = input_.new_empty((input_.shape[0] // ranks, *input_.shape[1:]))
    return output, dist.reduce_scatter_tensor(output, input_.contiguous(), group=process_group, async_op=async_op)


def all_reduce_raw(
    input_: Tensor, process_group: dist.ProcessGroup | None, async_op: bool = False
) -> tuple[Tensor, dist.Work | None]:
    """The sum over ranks, in place of a contiguous input_ -> (tensor, handle); without gradient."""
    input_ = input_.contiguous()
    return input_, dist.all_reduce(input_, group=process_group, async_op=async_op)


class AllGatherFunc(torch.autograd.Function):
    """`all_gather_raw`; the backward is `reduce_scatter_raw`."""

    @staticmethod
    def forward(ctx: _Context, input_: Tensor, process_group: dist.ProcessGroup | None) -> Tensor:
        ctx.process_group = process_group
        return all_gather_raw(input_, process_group)[0]

    @staticmethod
    def backward(ctx: _Context, grad: Tensor) -> tuple[Tensor, None]:
        return reduce_scatter_raw(grad, ctx.process_group)[0], None


class ReduceScatterFunc(torch.autograd.Function):
    """`reduce_scatter_raw`; the backward is `all_gather_raw`."""

    @staticmethod
    def forward(ctx: _Context, input_: Tensor, process_group: dist.ProcessGroup | None) -> Tensor:
        ctx.process_group = process_group
        return reduce_scatter_raw(input_, process_group)[0]

    @staticmethod
    def backward(ctx: _Context, grad: Tensor) -> tuple[Tensor, None]:
        return all_gather_raw(grad, ctx.process_group)[0], None


class AllReduceFunc(torch.autograd.Function):
    """The sum over ranks; the backward is the gradient as it is."""

    @staticmethod
    def forward(ctx: _Context, input_: Tensor, process_group: dist.ProcessGroup | None) -> Tensor:
        return all_reduce_raw(input_.clone(), process_group)[0]

    @staticmethod
    def backward(ctx: _Context, grad: Tensor) -> tuple[Tensor, None]:
        return grad, None


all_gather, reduce_scatter, all_reduce = AllGatherFunc.apply, ReduceScatterFunc.apply, AllReduceFunc.apply


def _marked(model: nn.Module, mark: str) -> list[nn.Parameter]:
    """The parameters with this attribute, in an order that all ranks agree on."""
    return [p for _, p in sorted(model.named_parameters()) if getattr(p, mark, False)]


def sync_shared_params(model: nn.Module, process_group: dist.ProcessGroup) -> None:
    """Give all ranks the first rank's values of the parameters with the attribute `_shared_params`."""
    source = dist.get_global_rank(process_group, 0)
    with torch.no_grad():
        for p in _marked(model, "_shared_params"):
            dist.broadcast(p, src=source, group=process_group)


def allreduce_sequence_parallel_grad(model: nn.Module, process_group: dist.ProcessGroup | None) -> None:
    """Sum over ranks, in place, the gradients of the parameters with the attribute `_sequence_parallel`."""
    for p in _marked(model, "_sequence_parallel"):
        if p.grad is not None:
            dist.all_reduce(p.grad, group=process_group)


def get_dim_for_local_rank(dim: int, world_size: int, local_rank: int, multiple_of: int = 1) -> int:
    """This rank's part of dim features: multiples of multiple_of, lower ranks having one more where it must be.

    Raises RuntimeError where dim is no multiple of multiple_of.
    """
    if dim % multiple_of != 0:
        raise RuntimeError(f"dim: expected a multiple of multiple_of ({multiple_of}), got {dim}")
    units, more = divmod(dim // multiple_of, world_size)
    return (units + int(local_rank < more)) * multiple_of
