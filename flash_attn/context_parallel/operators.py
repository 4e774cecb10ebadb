"""The operators `flash_attn_core::cp_fwd` and `::cp_bwd`: what compiled code has of `flash_attn_cp_func`, in one graph.

Messages go and plans are compared when the operators run: all ranks must run the same graph. A plan is named by a
tensor, so that another batch's plan is no other code; whoever compiles keeps it until the backward.
"""

from __future__ import annotations

import itertools
import weakref
from typing import NamedTuple

import torch
from torch import Tensor

from flash_attn.context_parallel.compute import sum_dtype

_NAMESPACE = "flash_attn_core"
_OPTIONS = (
    "Tensor? sinks, Tensor? alibi_slopes, Tensor plan, float dropout_p, float softmax_scale, bool causal, "
    "int window_left, int window_right, float softcap, bool deterministic, int sm_margin"
)
_plans: weakref.WeakValueDictionary = weakref.WeakValueDictionary()  # by the numbers in their handles
_numbers = itertools.count()


class CpArgs(NamedTuple):
    """The operators' arguments. plan: a handle; lengths of the window as `flash_attn_cp_func` takes them."""

    q: Tensor
    k: Tensor
    v: Tensor
    sinks: Tensor | None
    alibi_slopes: Tensor | None
    plan: Tensor
    dropout_p: float
    softmax_scale: float
    causal: bool
    window_left: int
    window_right: int
    softcap: float
    deterministic: bool
    sm_margin: int

    def of_function(self):
        """As function.request() and function.agreed_call() take them."""
        return (
            self.q, self.k, self.v, self.dropout_p, self.softmax_scale, self.causal,
            (self.window_left, self.window_right), self.softcap, self.alibi_slopes, self.deterministic,
            plan_of(self.plan), self.sinks, self.sm_margin,
        )  # fmt: skip


def handle_of(plan) -> Tensor:
    """int64 (1,) on the CPU: a number that names the plan as long as it lives."""
    number = next(_numbers)
    _plans[number] = plan
    return torch.tensor([number])


def plan_of(handle: Tensor):
    plan = _plans.get(handle.item())
    if plan is None:
        raise RuntimeError("plan: expected one that lasts until the backward of compiled code, got one that is gone")
    return plan


def attention(args: CpArgs):
    """(out, softmax_lse, rng_state), differentiable in q, k, v and sinks."""
    return torch.ops.flash_attn_core.cp_fwd.default(*args)


def _forward(*values):
    from flash_attn.context_parallel.function import agreed_call, forward_rows

    call, inputs = agreed_call(*CpArgs(*values).of_function(), wants_state=True)
    out, lse, _ = forward_rows(call, *inputs)
    out, lse = call.tokens(out), call.head_tokens(lse)
    return out[..., : call.padded_from or None].contiguous(), lse, call.options.rng_state


def _forward_fake(*values):
    args = CpArgs(*values)
    tokens, heads = args.q.shape[:-2], args.q.shape[-2]
    lse = args.q.new_empty((*tokens[:-1], heads, tokens[-1]), dtype=sum_dtype(args.q.dtype))
    return args.q.new_empty((*tokens, heads, args.v.shape[-1])), lse, args.q.new_empty(2, dtype=torch.int64)


def _backward(dout, dlse, out, lse, rng_state, *values):
    from flash_attn.context_parallel import ulysses
    from flash_attn.context_parallel.function import gradients, request

    args = CpArgs(*values)
    call, (q, k, v, sinks) = request(*args.of_function())
    if args.dropout_p > 0:
        call.options = call.options._replace(rng_state=rng_state)
    if call.padded_from:
        out, dout = (
            None if x is None else torch.nn.functional.pad(x, (0, v.shape[-1] - x.shape[-1])) for x in (out, dout)
        )
    out, lse = call.rows(out), call.head_rows(lse)
    kept = ()
    if call.moves_heads:
        kept = ulysses.kept(call.plan.head_ranks, call.batch, *(call.rows(x) for x in (q, k, v)), out, lse)
    grads = gradients(call, dout, dlse, q, k, v, out, lse, kept, sinks)
    return [
        grad[..., : x.shape[-1]].contiguous() for grad, x in zip(grads, (args.q, args.k, args.v, args.sinks))
    ]  # fmt: skip


def _backward_fake(dout, dlse, out, lse, rng_state, *values):
    return [torch.empty_like(x, memory_format=torch.contiguous_format) for x in CpArgs(*values)[:4] if x is not None]


def _setup_context(ctx, inputs, output):
    args = CpArgs(*inputs)
    out, lse, rng_state = output
    ctx.save_for_backward(out, lse, rng_state, *args[:6])
    ctx.options = args[6:]
    ctx.mark_non_differentiable(rng_state)
    ctx.set_materialize_grads(False)


def _autograd_backward(ctx, dout, dlse, _):
    out, lse, rng_state, *tensors = ctx.saved_tensors
    grads = torch.ops.flash_attn_core.cp_bwd.default(dout, dlse, out, lse, rng_state, *tensors, *ctx.options)
    dq, dk, dv, dsinks = (*grads, None)[:4]
    return (dq, dk, dv, dsinks, *(None,) * (len(CpArgs._fields) - 4))


def _reject_double_backward(ctx, *grads):
    raise RuntimeError(
        "flash_attn_cp_func: expected one backward, got a second: attention's gradients are not differentiable"
    )


_library = torch.library.Library(_NAMESPACE, "FRAGMENT")


def _register(name, schema, function, fake, tags=()):
    _library.define(name + schema, tags=(*tags, torch.Tag.pt2_compliant_tag))
    _library.impl(name, function, "CompositeExplicitAutograd")
    torch.library.register_fake(f"{_NAMESPACE}::{name}", fake, lib=_library)


_register(
    "cp_fwd", f"(Tensor q, Tensor k, Tensor v, {_OPTIONS}) -> (Tensor, Tensor, Tensor)", _forward, _forward_fake,
    tags=(torch.Tag.nondeterministic_seeded,),
)  # fmt: skip
_register(
    "cp_bwd",
    "(Tensor? dout, Tensor? dlse, Tensor out, Tensor lse, Tensor rng_state, Tensor q, Tensor k, Tensor v, "
    f"{_OPTIONS}) -> Tensor[]",
    _backward, _backward_fake,
)  # fmt: skip
torch.library.register_autograd(f"{_NAMESPACE}::cp_fwd", _autograd_backward, setup_context=_setup_context, lib=_library)
torch.library.register_autograd(f"{_NAMESPACE}::cp_bwd", _reject_double_backward, lib=_library)
