"""`layer_norm_fn` by its Triton kernels, with gradients."""

from __future__ import annotations

from collections.abc import Sequence
from functools import cache
from typing import TYPE_CHECKING, Optional, TypeVar

import torch

from flash_attn._types import Context
from flash_attn.ops import context
from flash_attn.ops.triton.dispatch import device_of, once_differentiable, power_of_two

if TYPE_CHECKING:
    from flash_attn.ops.triton.layer_norm import NormOptions

_Targets = tuple[Optional[torch.Tensor], Optional[torch.Tensor]]  # (out, sum) to write into

_MaybeTensor = TypeVar("_MaybeTensor", torch.Tensor, Optional[torch.Tensor])

MAX_COLUMNS = 32768  # a row is one tile


class _NormContext(Context):
    dtypes: list[torch.dtype | None]
    shape: torch.Size
    options: NormOptions


class FusedNorm(torch.autograd.Function):
    """(x, weight, bias, residual, x1, weight1, bias1, rowscale, targets, options) -> (out, out1, sum, mask, mask1).

    targets: tensors to write (out, sum) into, or None each, where no gradient is recorded. options:
    `layer_norm.NormOptions`.
    """

    @staticmethod
    def forward(
        ctx: _NormContext,
        x: torch.Tensor,
        weight: torch.Tensor,
        bias: torch.Tensor | None,
        residual: torch.Tensor | None,
        x1: torch.Tensor | None,
        weight1: torch.Tensor | None,
        bias1: torch.Tensor | None,
        rowscale: torch.Tensor | None,
        targets: _Targets,
        options: NormOptions,
    ) -> tuple[torch.Tensor | None, ...]:
        for name, target in zip(("out", "residual_out"), targets):
            context.check_distinct(name, target)
        out, total = targets
        out = torch.empty(x.shape, dtype=options.out_dtype, device=x.device) if out is None else out
        out1 = None if weight1 is None else torch.empty(x.shape, dtype=out.dtype, device=x.device)
        if total is None and options.sum_differs:
            total = torch.empty(x.shape, dtype=options.sum_dtype, device=x.device)
        masks = [
            torch.empty(x.shape, dtype=torch.bool, device=x.device) if given and options.return_dropout_mask else None
            for given in (options.dropout_p > 0, options.dropout_p > 0 and x1 is not None)
        ]
        seed = torch.randint(2**62, (1,), device=x.device) if options.dropout_p > 0 else None
        inputs = _rows(x), _rows(residual), _rows(x1)
        # Detached: a saved view of an output would keep this node alive through its base, and the error for a saved
        # view of an input would not name the write in place that spoiled it.
        outputs = [None if t is None else _rows(t.detach()) for t in (out, out1, total)]
        parameters = [None if t is None else t.contiguous() for t in (weight, bias, weight1, bias1, rowscale)]
        launch_forward(inputs, parameters, seed, outputs, masks, options)
        for target, written in zip((out, total), (outputs[0], outputs[2])):
            if target is not None and written is not None and target.data_ptr() != written.data_ptr():
                target.copy_(written.view(target.shape))
        context.written(targets)
        normalised = inputs[0].detach() if total is None else outputs[2]
        ctx.save_for_backward(normalised, parameters[0], parameters[2], parameters[4], seed)
        ctx.dtypes = [None if t is None else t.dtype for t in (x, residual, x1, weight, bias, weight1, bias1)]
        ctx.shape, ctx.options = x.shape, options
        ctx.mark_non_differentiable(*[mask for mask in masks if mask is not None])
        ctx.set_materialize_grads(False)
        if not options.prenorm:
            total = None
        elif total is None:
            total = x
        return out, out1, total, *masks

    @staticmethod
    @once_differentiable("layer_norm_fn")
    def backward(
        ctx: _NormContext,
        dout: torch.Tensor | None,
        dout1: torch.Tensor | None,
        dsum: torch.Tensor | None,
        *_: torch.Tensor | None,
    ) -> tuple[torch.Tensor | None, ...]:
        context.reject_batched_gradients(dout, dout1, dsum)
        total = ctx.saved_tensors[0]
        dout = torch.zeros(ctx.shape, dtype=total.dtype, device=total.device) if dout is None else dout
        grads, sums = launch_backward(
            (_rows(dout), _rows(dout1), _rows(dsum)), ctx.saved_tensors, ctx.dtypes, ctx.options
        )
        dx, dresidual, dx1 = (None if t is None else t.view(ctx.shape) for t in grads)
        dweight, dbias, dweight1, dbias1 = sums
        return dx, dweight, dbias, dresidual, dx1, dweight1, dbias1, None, None, None


def _rows(x: _MaybeTensor) -> _MaybeTensor:
    """x as a matrix of its rows, each contiguous; a copy where x has no such view. None passes."""
    if x is None:
        return None
    x = x.reshape(-1, x.shape[-1])
    return x if x.stride(1) == 1 or x.shape[1] == 1 else x.contiguous()


def _forward_tile(columns: int) -> dict[str, int]:
    """Rows and columns of a tile, and its warps."""
    block = power_of_two(columns)
    rows = max(2048 // block, 1)
    return {"ROWS": rows, "COLUMNS": block, "num_warps": min(max(rows * block // 512, 4), 32)}


def _backward_tile(
    total: torch.Tensor, dout: torch.Tensor, dout1: torch.Tensor | None, dsum: torch.Tensor | None
) -> dict[str, int]:
    """The same for a backward, and how many tiles of its inputs are in flight, as far as shared memory holds them."""
    block = power_of_two(total.shape[1])
    rows = max(8192 // block, 1)
    tile_bytes = rows * block * sum(t.element_size() for t in (total, dout, dout1, dsum) if t is not None)
    shared = _shared_memory(total.device) - 8192  # which the reductions need
    stages = 1 + min(max(shared // tile_bytes, 0), 2)
    warps = min(max(rows * block // 1024, 8) * (1 if dout1 is None else 2), 32)
    return {"ROWS": rows, "COLUMNS": block, "STAGES": stages, "num_warps": warps}


def _stride(x: torch.Tensor | None) -> int:
    return 0 if x is None else x.stride(0)


def launch_forward(
    inputs: tuple[torch.Tensor, torch.Tensor | None, torch.Tensor | None],
    parameters: Sequence[torch.Tensor | None],
    seed: torch.Tensor | None,
    outputs: Sequence[torch.Tensor | None],
    masks: Sequence[torch.Tensor | None],
    options: NormOptions,
) -> None:
    """Write outputs (out, out1, sum) and masks from inputs (x, residual, x1)."""
    from flash_attn.ops.triton.layer_norm_kernels import norm_forward_kernel

    x, residual, x1 = inputs
    out, out1, total = outputs
    weight, bias, weight1, bias1, rowscale = parameters
    rows, columns = x.shape
    tile = _forward_tile(columns)
    if rows > 0:
        with device_of(x):
            norm_forward_kernel[(-(-rows // tile["ROWS"]),)](
                x,
                residual,
                x1,
                weight,
                bias,
                weight1,
                bias1,
                rowscale,
                seed,
                out,
                out1,
                total,
                *masks,
                rows,
                columns,
                _stride(x),
                _stride(residual),
                _stride(x1),
                _stride(out),
                _stride(out1),
                _stride(total),
                options.eps,
                options.dropout_p,
                1.0 / (1.0 - options.dropout_p),
                IS_RMS=options.is_rms_norm,
                ZERO_CENTERED=options.zero_centered_weight,
                **tile,
            )


def launch_backward(
    douts: tuple[torch.Tensor, torch.Tensor | None, torch.Tensor | None],
    saved: Sequence[torch.Tensor],
    dtypes: Sequence[torch.dtype | None],
    options: NormOptions,
) -> tuple[tuple[torch.Tensor | None, ...], list[torch.Tensor | None]]:
    """-> the gradients of (x, residual, x1), and those of (weight, bias, weight1, bias1), summed in a fixed order."""
    from flash_attn.ops.triton.layer_norm_kernels import norm_backward_kernel

    dout, dout1, dsum = douts
    total, weight, weight1, rowscale, seed = saved
    x_dtype, residual_dtype, x1_dtype, *parameter_dtypes = dtypes
    rows, columns = total.shape

    dx = torch.empty(rows, columns, dtype=x_dtype, device=total.device)
    # A gradient that has dx's numbers and dtype is dx itself.
    dresidual = dx if residual_dtype == x_dtype and seed is None and rowscale is None else None
    if residual_dtype is not None and dresidual is None:
        dresidual = torch.empty_like(dx, dtype=residual_dtype)
    dx1 = dx if x1_dtype == x_dtype and seed is None else None
    if x1_dtype is not None and dx1 is None:
        dx1 = torch.empty_like(dx, dtype=x1_dtype)
    tile = _backward_tile(total, dout, dout1, dsum)
    tiles = -(-rows // tile["ROWS"])
    programs = min(tiles, _programs(total.device))
    wanted = [dtype is not None and (i < 2 or dout1 is not None) for i, dtype in enumerate(parameter_dtypes)]
    partial = torch.empty(sum(wanted), programs, columns, dtype=torch.float32, device=total.device)
    parts = iter(partial.unbind(0))
    if rows > 0:
        with device_of(total):
            norm_backward_kernel[(programs,)](
                dout,
                dout1,
                dsum,
                total,
                weight,
                weight1,
                rowscale,
                seed,
                dx,
                None if dresidual is dx else dresidual,
                None if dx1 is dx else dx1,
                *[next(parts) if want else None for want in wanted],
                rows,
                columns,
                _stride(dout),
                _stride(dout1),
                _stride(dsum),
                _stride(total),
                -(-tiles // programs) * tile["ROWS"],
                options.eps,
                options.dropout_p,
                1.0 / (1.0 - options.dropout_p),
                IS_RMS=options.is_rms_norm,
                ZERO_CENTERED=options.zero_centered_weight,
                **tile,
            )
    sums = iter(partial.sum(1).unbind(0))
    return (dx, dresidual, dx1), [next(sums).to(d) if want else None for d, want in zip(parameter_dtypes, wanted)]


@cache
def _programs(device: torch.device) -> int:
    """How many programs share the rows of a backward: one per SM."""
    return torch.cuda.get_device_properties(device).multi_processor_count if device.type == "cuda" else 3


@cache
def _shared_memory(device: torch.device) -> int:
    """Bytes of shared memory that a program may have; the least of all GPUs from sm_80 on where torch does not tell."""
    properties = torch.cuda.get_device_properties(device) if device.type == "cuda" else None
    return getattr(properties, "shared_memory_per_block_optin", 99 * 1024)
