"""Combining partial results of attention: the call, its gradient, the operators `flash_attn_core::combine{,_out}`.

With weights w_i = exp(lse_i - lse), out = sum_i w_i out_i and lse = log sum_i exp(lse_i) have the derivatives
d out / d out_i = w_i, d out / d lse_i = w_i (out_i - out) and d lse / d lse_i = w_i.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, TypeVar

import torch
from torch import Tensor

from flash_attn import backends
from flash_attn._types import Batched, Context, VmapInfo
from flash_attn.ops import arguments, context, outputs
from flash_attn.ops.calls import has_contiguous_rows, rows_contiguous

if TYPE_CHECKING:
    from torch._library.custom_ops import CustomOpDef

_T = TypeVar("_T")
_SCHEMA = "(Tensor out_partial, Tensor lse_partial, ScalarType? out_dtype) -> (Tensor, Tensor)"
_OUT_SCHEMA = "(Tensor out_partial, Tensor lse_partial, Tensor(a!) out) -> Tensor"


def combine(
    out_partial: Tensor, lse_partial: Tensor, out: Tensor | None, out_dtype: torch.dtype | None
) -> tuple[Tensor, Tensor]:
    """(out, lse), differentiable unless out is given."""
    tensors = (out_partial, lse_partial)
    needs_dispatch, differentiating = context.survey(("out_partial", "lse_partial", "out"), (*tensors, out))
    if differentiating and out is not None:
        raise RuntimeError("out: expected None where gradients are recorded, got a tensor (use torch.no_grad())")
    transformed = context.transformed()
    if out is not None:
        context.reject_batched("flash_attn_combine with out", ("out_partial", "lse_partial", "out"), (*tensors, out))
    if needs_dispatch or (transformed and out is not None):
        return _combine_op(*tensors, out_dtype) if out is None else (out, _combine_out_op(*tensors, out))
    if differentiating or transformed:
        return _Combine.apply(*tensors, out_dtype)  # type: ignore[no-any-return]  # of torch
    return _call(*tensors, out, out_dtype)


def _call(
    out_partial: Tensor, lse_partial: Tensor, out: Tensor | None, out_dtype: torch.dtype | None
) -> tuple[Tensor, Tensor]:
    given = out
    if given is not None:
        context.check_writable(("out",), (given,))
        if not has_contiguous_rows(out_partial):
            outputs.check_apart({"out": given}, {"out_partial": out_partial})
    if out is None and out_dtype is not None:
        out = torch.empty(out_partial.shape[1:], dtype=out_dtype, device=out_partial.device)
    out, lse = backends.of(out_partial, "out_partial").combine(rows_contiguous(out_partial), lse_partial, out)
    if given is not None:
        context.written((given,))
    return out, lse


def _new(out_partial: Tensor, lse_partial: Tensor, out_dtype: torch.dtype | None) -> tuple[Tensor, Tensor]:
    return _call(out_partial, lse_partial, None, out_dtype)


def _new_fake(out_partial: Tensor, lse_partial: Tensor, out_dtype: torch.dtype | None) -> tuple[Tensor, Tensor]:
    out = out_partial.new_empty(out_partial.shape[1:], dtype=out_dtype or out_partial.dtype)
    return out, lse_partial.new_empty(lse_partial.shape[1:])


def _into(out_partial: Tensor, lse_partial: Tensor, out: Tensor) -> Tensor:
    return _call(out_partial, lse_partial, out, None)[1]


def _into_fake(out_partial: Tensor, lse_partial: Tensor, out: Tensor) -> Tensor:
    return lse_partial.new_empty(lse_partial.shape[1:])


def _setup_context(ctx: Context, inputs: tuple[Tensor, Tensor, object], output: tuple[Tensor, Tensor]) -> None:
    out_partial, lse_partial, _ = inputs
    ctx.save_for_backward(out_partial, lse_partial, *output)
    ctx.set_materialize_grads(False)


def _backward(ctx: Context, dout: Tensor | None, dlse: Tensor | None) -> tuple[Tensor | None, Tensor | None, None]:
    """Gradients of out_partial and lse_partial; 0 for the splits that mask a row fully, for any contents."""
    out_partial, lse_partial, out, lse = ctx.saved_tensors
    if dout is None and dlse is None:
        return None, None, None
    dtype = lse_partial.dtype
    valid = ~lse_partial.isinf()
    exponent = torch.where(valid, lse_partial - lse, 0.0)
    weights = torch.where(valid, exponent.exp(), 0.0)
    dpartial = dlse_partial = None
    if dout is not None:
        dout = dout.to(dtype)
        dpartial = (weights.unsqueeze(-1) * dout).to(out_partial.dtype)
        partial = torch.where(valid.unsqueeze(-1), out_partial.to(dtype), 0.0)
        dlse_partial = weights * ((partial - out.to(dtype)) * dout).sum(-1)
    if dlse is not None:
        from_lse = weights * dlse
        dlse_partial = from_lse if dlse_partial is None else dlse_partial + from_lse
    return dpartial, dlse_partial, None


class _Combine(torch.autograd.Function):
    """The eager path with gradients, also of torch.func."""

    forward = staticmethod(_new)
    setup_context = staticmethod(_setup_context)
    backward = staticmethod(_backward)
    jvp = staticmethod(context.no_jvp)

    @staticmethod
    def vmap(info: VmapInfo, in_dims: tuple[int | None, ...], *args: object) -> Batched:
        return context.by_sample(_Combine, info, in_dims, args)


def _register(
    name: str, schema: str, function: Callable[..., _T], fake: Callable[..., _T], mutates: Sequence[str] = ()
) -> tuple[CustomOpDef, Callable[..., _T]]:
    op = torch.library.custom_op(f"flash_attn_core::{name}", function, mutates_args=mutates, schema=schema)
    op.register_fake(fake)
    return op, getattr(torch.ops.flash_attn_core, name).default


_definition, _combine_op = _register("combine", _SCHEMA, _new, _new_fake)
_definition.register_autograd(_backward, setup_context=_setup_context)
_combine_out_op = _register("combine_out", _OUT_SCHEMA, _into, _into_fake, ("out",))[1]


def check_arguments(
    out_partial: Tensor, lse_partial: Tensor, out: Tensor | None, out_dtype: torch.dtype | None
) -> None:
    arguments.check_tensors(("out_partial", "lse_partial"), (out_partial, lse_partial))
    if out_dtype is not None and not isinstance(out_dtype, torch.dtype):
        raise TypeError(f"out_dtype: expected a torch.dtype or None, got {arguments.shown(out_dtype)}")
    if out is not None:
        arguments.check_tensors(("out",), (out,))
        if out_dtype not in (None, out.dtype):
            raise RuntimeError(f"out_dtype: expected None or the dtype of out ({out.dtype}), got {out_dtype}")
