"""The operators `flash_attn_core::cp_fwd` and `::cp_bwd`: what compiled code has of `flash_attn_cp_func`, in one graph.

Messages go and plans are compared when the operators run: all ranks must run the same graph. A plan is named by a
tensor, so that another batch's plan is no other code; whoever compiles keeps it until the backward.
Annotations stay objects (no postponed evaluation): the schemas are made of them.
"""

from typing import NamedTuple, Optional

import torch
from torch import Tensor

from flash_attn.context_parallel import ulysses
from flash_attn.context_parallel.call import agreed_call, forward_rows, gradients, request
from flash_attn.context_parallel.compute import sum_dtype
from flash_attn.context_parallel.handles import plan_of
from flash_attn.ops import library
from flash_attn.ops.attention_args import ATTENTION_INPUTS, attention_gradients


class CpArgs(NamedTuple):
    """Of `cp_fwd`. plan: a handle; the window's sides as `flash_attn_cp_func` takes them. Tensors come first."""

    q: Tensor
    k: Tensor
    v: Tensor
    sinks: Optional[Tensor]
    alibi_slopes: Optional[Tensor]
    plan: Tensor
    dropout_p: float
    softmax_scale: float
    causal: bool
    window_left: int
    window_right: int
    softcap: float
    deterministic: bool
    sm_margin: int


# Of `cp_bwd`: gradients of the results, the results, and the forward's arguments.
CpBackwardArgs = NamedTuple(
    "CpBackwardArgs",
    [
        ("dout", Optional[Tensor]),
        ("dlse", Optional[Tensor]),
        *((name, Tensor) for name in ("out", "lse", "rng_state", "number")),
        *CpArgs.__annotations__.items(),
    ],
)
_TENSORS = sum(kind in (Tensor, Optional[Tensor]) for kind in CpArgs.__annotations__.values())


def _of_function(args):
    """The arguments of either as request() and agreed_call() take them."""
    return (
        args.q, args.k, args.v, args.dropout_p, args.softmax_scale, args.causal,
        (args.window_left, args.window_right), args.softcap, args.alibi_slopes, args.deterministic,
        plan_of(args.plan), args.sinks, args.sm_margin,
    )  # fmt: skip


def attention(args: CpArgs):
    """(out, softmax_lse, rng_state), differentiable in q, k, v and sinks."""
    return _forward_op(*args)[:3]


def _forward(args: CpArgs):
    """(out, softmax_lse, rng_state, number): the last is that of the call, on the CPU, by which backwards are told."""
    call, number, inputs = agreed_call(*_of_function(args), wants_state=True)
    out, lse, _ = forward_rows(call, *inputs)
    out, lse = call.tokens(out), call.head_tokens(lse)
    return (
        out[..., : call.padded_from or None].contiguous(),
        lse,
        call.options.rng_state,
        torch.tensor([number], device="cpu"),
    )


def _forward_fake(args: CpArgs):
    tokens, heads = args.q.shape[:-2], args.q.shape[-2]
    lse = args.q.new_empty((*tokens[:-1], heads, tokens[-1]), dtype=sum_dtype(args.q.dtype))
    out, state = args.q.new_empty((*tokens, heads, args.v.shape[-1])), args.q.new_empty(2, dtype=torch.int64)
    return out, lse, state, torch.empty_like(args.plan)


def _backward(args: CpBackwardArgs):
    call, (q, k, v, sinks) = request(*_of_function(args))
    call.compare_backward(args.number.item())
    if args.dropout_p > 0:
        call.options = call.options._replace(rng_state=args.rng_state)
    out, dout = args.out, args.dout
    if call.padded_from:
        out, dout = (
            None if x is None else torch.nn.functional.pad(x, (0, v.shape[-1] - x.shape[-1])) for x in (out, dout)
        )
    out, lse = call.rows(out), call.head_rows(args.lse)
    kept = ()
    if call.moves_heads:
        kept = ulysses.kept(call.plan.head_ranks, call.batch, *(call.rows(x) for x in (q, k, v)), out, lse)
    grads = gradients(call, dout, args.dlse, q, k, v, out, lse, kept, sinks)
    return [grad[..., : x.shape[-1]].contiguous() for grad, x in zip(grads, _differentiable(args))]


def _backward_fake(args: CpBackwardArgs):
    return [torch.empty_like(x, memory_format=torch.contiguous_format) for x in _differentiable(args)]


def _differentiable(args):
    return [x for x in (getattr(args, name) for name in ATTENTION_INPUTS) if x is not None]


def _setup_context(ctx, inputs, output):
    ctx.save_for_backward(*output, *inputs[:_TENSORS])
    ctx.options = inputs[_TENSORS:]
    ctx.mark_non_differentiable(*output[2:])
    ctx.set_materialize_grads(False)


def _autograd_backward(ctx, dout, dlse, *_):
    return attention_gradients(_backward_op(dout, dlse, *ctx.saved_tensors, *ctx.options), CpArgs)


def reject_double_backward(ctx, *grads):
    raise RuntimeError(
        "flash_attn_cp_func: expected one backward, got a second: attention's gradients are not differentiable"
    )


_forward_op = library.register(
    "cp_fwd", CpArgs, "(Tensor, Tensor, Tensor, Tensor)", library.takes(CpArgs, _forward),
    library.takes(CpArgs, _forward_fake), tags=(torch.Tag.nondeterministic_seeded,),
)  # fmt: skip
_backward_op = library.register(
    "cp_bwd", CpBackwardArgs, "Tensor[]", library.takes(CpBackwardArgs, _backward),
    library.takes(CpBackwardArgs, _backward_fake),
)  # fmt: skip
library.register_autograd("cp_fwd", _autograd_backward, _setup_context)
library.register_autograd("cp_bwd", reject_double_backward)
