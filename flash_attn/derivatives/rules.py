"""The rules of tangents and second derivatives: autograd functions for eager calls, operators for compiled ones.

A tangent is the derivative J t of attention, `bwd` is J^T g. The product H t with the Hessian of <g, attention> is also
the gradient of <g, J t> for the inputs, so that three functions have every second derivative:

    backward of the backward         J t for dout, H t for the inputs
    backward of the tangent          J^T g for the tangents, H t for the inputs
    tangent of the backward          H t, and J^T of the tangent of dout
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple, NoReturn, cast

import torch
from torch import Tensor

from flash_attn._types import Batched, Context, VmapInfo
from flash_attn.derivatives import blocks, kernel
from flash_attn.ops import calls, context, library
from flash_attn.ops.attention_args import (
    ATTENTION_INPUTS,
    BACKWARD_INPUTS,
    TANGENT_INPUTS,
    AttentionArgs,
    AttentionBackwardArgs,
    Tangents,
    attention_gradients,
    backward_args,
    made,
    saved_for_backward,
)
from flash_attn.ops.library import ValuesContext

_record: Any = NamedTuple  # type checkers want a literal list of fields
# Arguments of the operators: the tangents, then those of the forward or the backward.
JvpArgs = _record("JvpArgs", [*Tangents.__annotations__.items(), *AttentionArgs.__annotations__.items()])
HvpArgs = _record("HvpArgs", [*Tangents.__annotations__.items(), *AttentionBackwardArgs.__annotations__.items()])
_COUNT = len(Tangents._fields)
computed_of_duals = kernel.computed_of_duals


def forward_with_tangents(
    args: AttentionArgs, directions: Tangents, known: Sequence[Tensor] | None = None
) -> tuple[Tensor, ...]:
    """(out, lse, t_out, t_lse, rng_state) of a call, by one kernel where there is one.

    known: (out, lse, rng_state) where the forward has run.
    """
    results = kernel.forward(args, directions)
    if results is not None:
        return results
    if known is None:
        out, lse, _, rng_state, *_ = calls.forward(args)
    else:
        out, lse, rng_state = known
    return out, lse, *blocks.tangents(args, directions, lse, rng_state), rng_state


def attention_with_tangents(args: AttentionArgs, directions: Tangents) -> tuple[Tensor, ...]:
    """(out, lse, t_out, t_lse), differentiable once more."""
    names, inputs = (*TANGENT_INPUTS, *Tangents._fields), args.differentiable()[: len(TANGENT_INPUTS)]
    needs_dispatch, differentiating = context.survey(names, (*inputs, *directions))
    if needs_dispatch:
        return tuple(_jvp_op(*directions, *args)[:4])
    if not (differentiating or context.transforms()):
        return forward_with_tangents(args, directions)[:4]
    # Two nodes: gradients of out keep no tangents.
    computed = None if context.transforms() else kernel.computed(args, directions)
    results = library.attention(args) if computed is None else library.computed_attention(args, computed)
    out, lse, _, rng_state, *_ = results
    call = backward_args(out, None, *saved_for_backward(args, out, lse, rng_state))
    return out, lse, *tangents(directions, call, computed)


def tangents(
    directions: Tangents, args: AttentionBackwardArgs, computed: kernel.Computed | None = None
) -> tuple[Tensor, Tensor]:
    """(t_out, t_lse) of a forward that has run; dout and dlse are not read. computed: has the results, if given."""
    return _Tangents.apply(*directions, *args, computed)  # type: ignore[no-any-return]  # of torch


def second_derivatives(directions: Tangents, args: AttentionBackwardArgs) -> list[Tensor]:
    """`blocks.hessian_product`: as an operator where a compiler or a mode watches, recorded where autograd does."""
    names, tensors = (*BACKWARD_INPUTS, *Tangents._fields), (*args.differentiable(), *directions)
    if context.survey(names, tensors, carries_tangents=True)[0]:
        return _hvp_op(*directions, *args)
    if torch.is_grad_enabled() or context.transforms():
        return _SecondDerivatives.apply(*directions, *args)  # type: ignore[no-any-return]  # of torch
    return blocks.hessian_product(args, directions)


def tangents_of_gradients(args: AttentionBackwardArgs, given: Sequence[Tensor | None]) -> tuple[Tensor | None, ...]:
    """The tangents of the gradients that the backward returns, from the tangents of its arguments."""
    along = dict(zip(AttentionBackwardArgs._fields, given))
    parts = []
    if along["dout"] is not None or along["dlse"] is not None:
        parts.append(library.attention_backward(_with_gradients(args, along["dout"], along["dlse"])))
    directions = Tangents(*(along[name] for name in TANGENT_INPUTS))
    if any(along[name] is not None for name in ATTENTION_INPUTS):  # with those of biases, which raise there
        parts.append(second_derivatives(directions, args)[2:])
    return tuple(_total(parts))


def _with_gradients(args: AttentionBackwardArgs, dout: Tensor | None, dlse: Tensor | None) -> AttentionBackwardArgs:
    return args._replace(dout=torch.zeros_like(args.out) if dout is None else dout, dlse=dlse)


def _total(parts: Sequence[Sequence[Tensor | None]]) -> Sequence[Tensor | None]:
    """The sums of one or two lists of tensors, or of None in the same places."""
    return parts[0] if len(parts) == 1 else [None if x is None else x + y for x, y in zip(*parts)]


def _gradients(
    args: AttentionBackwardArgs, directions: Tangents, needs_input_grad: Sequence[bool]
) -> list[Tensor | None]:
    """The gradients of <dout, t_out> + <dlse, t_lse>: of the directions, then of q, k, v and sinks."""
    needed = [None if x is None else needs for x, needs in zip(directions, needs_input_grad)]
    grads: list[Tensor | None] = [None] * _COUNT
    if any(needed):
        grads = library.by_input(args, library.attention_backward(args))
    of_directions = [grad if needs else None for grad, needs in zip(grads, needed)]
    return [*of_directions, *library.by_input(args, second_derivatives(directions, args)[2:])]


def _split(values: Sequence[object]) -> tuple[Tangents, AttentionBackwardArgs]:
    return made(Tangents, values[:_COUNT]), made(AttentionBackwardArgs, values[_COUNT:])


class _Tangents(torch.autograd.Function):
    """`tangents`. Its arguments: the fields of HvpArgs, and `computed`."""

    @staticmethod
    def forward(*values: object) -> tuple[Tensor, ...]:
        computed = cast("kernel.Computed | None", values[-1])
        if computed is not None:
            return computed.take_tangents()
        directions, args = _split(values[:-1])
        return forward_with_tangents(args.forward_args(), directions, (args.out, args.lse, args.rng_state))[2:4]

    @staticmethod
    def setup_context(ctx: ValuesContext, inputs: tuple[object, ...], output: object) -> None:
        library.save_values(ctx, inputs[:-1])

    @staticmethod
    def backward(ctx: ValuesContext, dout: Tensor | None, dlse: Tensor | None) -> tuple[Tensor | None, ...]:
        directions, args = _split(library.saved_values(ctx))
        grads: list[Tensor | None] = [None] * (2 * _COUNT)
        if dout is not None or dlse is not None:
            grads = _gradients(_with_gradients(args, dout, dlse), directions, ctx.needs_input_grad)
        rest = attention_gradients(grads[_COUNT:], AttentionBackwardArgs)
        return *grads[:_COUNT], *rest, None

    @staticmethod
    def jvp(ctx: Context, *_: object) -> NoReturn:
        raise NotImplementedError("flash_attn: expected one level of forward mode, got a tangent of a tangent")

    @staticmethod
    def vmap(info: VmapInfo, in_dims: tuple[int | None, ...], *values: object) -> Batched:
        return context.by_sample(_Tangents, info, in_dims, values)


class _SecondDerivatives(torch.autograd.Function):
    """`second_derivatives`. Its arguments: the fields of HvpArgs."""

    @staticmethod
    def forward(*values: object) -> tuple[Tensor, ...]:
        directions, args = _split(values)
        return tuple(blocks.hessian_product(args, directions))

    @staticmethod
    def setup_context(ctx: Context, inputs: object, output: object) -> None:
        pass

    @staticmethod
    def backward(ctx: Context, *grads: object) -> NoReturn:
        _reject_third(ctx, *grads)

    @staticmethod
    def jvp(ctx: Context, *tangents: object) -> NoReturn:
        _reject_third(ctx, *tangents)

    @staticmethod
    def vmap(info: VmapInfo, in_dims: tuple[int | None, ...], *values: object) -> Batched:
        return context.by_sample(_SecondDerivatives, info, in_dims, values)


def _reject_third(ctx: Context, *_: object) -> NoReturn:
    raise NotImplementedError("flash_attn: expected at most two derivatives of attention, got a third")


# ---- operators ----


def _jvp(*values: object) -> tuple[Tensor, ...]:
    return forward_with_tangents(made(AttentionArgs, values[_COUNT:]), made(Tangents, values[:_COUNT]))


def _jvp_fake(*values: object) -> tuple[Tensor, ...]:
    out, lse, _, rng_state, *_ = calls.forward_fake(made(AttentionArgs, values[_COUNT:]))
    return out, lse, torch.empty_like(out), torch.empty_like(lse), rng_state


def _jvp_setup_context(ctx: ValuesContext, inputs: tuple[object, ...], output: tuple[Tensor, ...]) -> None:
    args = made(AttentionArgs, inputs[_COUNT:])
    out, lse, _, _, rng_state = output
    call = backward_args(out, None, *saved_for_backward(args, out, lse, rng_state))
    library.save_values(ctx, (*inputs[:_COUNT], *call))
    ctx.mark_non_differentiable(rng_state)


def _jvp_backward(
    ctx: ValuesContext,
    dout: Tensor | None,
    dlse: Tensor | None,
    dt_out: Tensor | None,
    dt_lse: Tensor | None,
    _: None,
) -> tuple[Tensor | None, ...]:
    directions, args = _split(library.saved_values(ctx))
    of_directions: list[Tensor | None] = [None] * _COUNT
    parts: list[Sequence[Tensor | None]] = []
    if dout is not None or dlse is not None:
        call = _with_gradients(args, dout, dlse)
        parts.append(library.by_input(call, library.attention_backward(call)))
    if dt_out is not None or dt_lse is not None:
        grads = _gradients(_with_gradients(args, dt_out, dt_lse), directions, ctx.needs_input_grad)
        of_directions = grads[:_COUNT]
        parts.append(grads[_COUNT:])
    return *of_directions, *attention_gradients(_total(parts) if parts else [])


def _hvp(*values: object) -> list[Tensor]:
    directions, args = _split(values)
    return blocks.hessian_product(args, directions)


def _hvp_fake(*values: object) -> list[Tensor]:
    _, args = _split(values)
    t_out = torch.empty_like(args.out, memory_format=torch.contiguous_format)
    return [t_out, torch.empty_like(args.lse, memory_format=torch.contiguous_format), *calls.backward_fake(args)]


_jvp_op = library.register(
    "jvp",
    JvpArgs,
    "(Tensor, Tensor, Tensor, Tensor, Tensor)",
    _jvp,
    _jvp_fake,
    tags=(torch.Tag.nondeterministic_seeded,),
)
_hvp_op = library.register("hvp", HvpArgs, "Tensor[]", _hvp, _hvp_fake)
library.register_autograd("jvp", _jvp_backward, _jvp_setup_context)
library.register_autograd("hvp", _reject_third)
