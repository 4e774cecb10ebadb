"""The operators `flash_attn_core::cp_fwd` and `::cp_bwd`: `flash_attn_cp_func` in compiled code, in one graph.

The ranks exchange messages and compare plans when the operators run: all ranks must run the same graph. A tensor names
the plan, so the plan of another batch needs no recompilation; the caller keeps the plan alive until the backward.
Annotations stay objects (no postponed evaluation): the schemas are made of them.
"""

from typing import Any, NamedTuple, NoReturn, Optional, cast

import torch
from torch import Tensor

from flash_attn._types import Context
from flash_attn.context_parallel.attention_call import Arguments, agreed_call, checked_call, forward_rows, gradients
from flash_attn.context_parallel.compute.kernel_calls import sum_dtype
from flash_attn.context_parallel.cp_plan import plan_of
from flash_attn.ops import library
from flash_attn.ops.attention_args import ATTENTION_INPUTS, attention_gradients


class CpArgs(NamedTuple):
    """Arguments of `cp_fwd`, tensors first. plan: a handle. window_left, window_right: of `window_size`."""

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


_record: Any = NamedTuple  # type checkers want a literal list of fields
# Arguments of `cp_bwd`: the gradients of the results, the results, and the forward's arguments.
CpBackwardArgs = _record(
    "CpBackwardArgs",
    [
        ("dout", Optional[Tensor]),
        ("dlse", Optional[Tensor]),
        *((name, Tensor) for name in ("out", "lse", "rng_state", "number")),
        *CpArgs.__annotations__.items(),
    ],
)
_TENSORS = sum(kind in (Tensor, Optional[Tensor]) for kind in CpArgs.__annotations__.values())


def _of_function(args: CpArgs) -> Arguments:
    """The fields of either record as arguments of `flash_attn_cp_func`."""
    window = args.window_left, args.window_right
    return Arguments(
        q=args.q,
        k=args.k,
        v=args.v,
        sinks=args.sinks,
        plan=plan_of(args.plan),
        dropout_p=args.dropout_p,
        softmax_scale=args.softmax_scale,
        causal=args.causal,
        window_size=window,
        softcap=args.softcap,
        alibi_slopes=args.alibi_slopes,
        deterministic=args.deterministic,
        sm_margin=args.sm_margin,
    )


def attention(args: CpArgs) -> tuple[Tensor, Tensor, Tensor]:
    """(out, softmax_lse, rng_state), differentiable in q, k, v and sinks."""
    out, lse, rng_state, _ = _forward_op(*args)
    return out, lse, rng_state


def _forward(args: CpArgs) -> tuple[Tensor, ...]:
    """(out, softmax_lse, rng_state, number of the call): the number, on the CPU, names the call in the backward."""
    call, number, inputs = agreed_call(_of_function(args), wants_state=True)
    out, lse, _ = forward_rows(call, *inputs)
    out, lse = call.tokens(out), call.head_tokens(lse)
    out = out[..., : call.padded_from or None].contiguous()
    rng_state = call.options.rng_state
    assert rng_state is not None  # because of wants_state
    return out, lse, rng_state, torch.tensor([number], device="cpu")


def _forward_fake(args: CpArgs) -> tuple[Tensor, ...]:
    tokens, heads = args.q.shape[:-2], args.q.shape[-2]
    lse = args.q.new_empty((*tokens[:-1], heads, tokens[-1]), dtype=sum_dtype(args.q.dtype))
    out, state = args.q.new_empty((*tokens, heads, args.v.shape[-1])), args.q.new_empty(2, dtype=torch.int64)
    return out, lse, state, torch.empty_like(args.plan)


def _backward(args: Any) -> list[Tensor]:
    call, inputs = checked_call(_of_function(args))
    call.compare_backward(int(args.number.item()))
    if args.dropout_p > 0:
        call.options = call.options._replace(rng_state=args.rng_state)
    out, dout = args.out, args.dout
    if call.padded_from:
        padding = (0, inputs[2].shape[-1] - out.shape[-1])
        out = torch.nn.functional.pad(out, padding)
        dout = None if dout is None else torch.nn.functional.pad(dout, padding)
    out, lse = call.rows(out), call.head_rows(args.lse)
    grads = gradients(call, dout, args.dlse, inputs, out, lse, saved=())
    return [grad[..., : x.shape[-1]].contiguous() for grad, x in zip(grads, _differentiable(args))]


def _backward_fake(args: CpArgs) -> list[Tensor]:
    return [torch.empty_like(x, memory_format=torch.contiguous_format) for x in _differentiable(args)]


def _differentiable(args: CpArgs) -> list[Tensor]:
    return [x for x in (getattr(args, name, None) for name in ATTENTION_INPUTS) if x is not None]


class _OperatorContext(Context):
    options: tuple[float, ...]


def _setup_context(ctx: _OperatorContext, inputs: tuple[object, ...], output: tuple[Tensor, ...]) -> None:
    ctx.save_for_backward(*output, *cast("tuple[Tensor | None, ...]", inputs[:_TENSORS]))
    ctx.options = cast("tuple[float, ...]", inputs[_TENSORS:])
    ctx.mark_non_differentiable(*output[2:])
    ctx.set_materialize_grads(False)


def _autograd_backward(
    ctx: _OperatorContext, dout: Optional[Tensor], dlse: Optional[Tensor], *_: None
) -> tuple[Optional[Tensor], ...]:
    return attention_gradients(_backward_op(dout, dlse, *ctx.saved_tensors, *ctx.options), CpArgs)


def reject_double_backward(ctx: Context, *grads: Optional[Tensor]) -> NoReturn:
    raise RuntimeError(
        "flash_attn_cp_func: expected one backward, got a second: attention's gradients are not differentiable"
    )


_forward_op = library.register(
    "cp_fwd",
    CpArgs,
    "(Tensor, Tensor, Tensor, Tensor)",
    library.takes(CpArgs, _forward),
    library.takes(CpArgs, _forward_fake),
    tags=(torch.Tag.nondeterministic_seeded,),
)
_backward_op = library.register(
    "cp_bwd",
    CpBackwardArgs,
    "Tensor[]",
    library.takes(CpBackwardArgs, _backward),
    library.takes(CpBackwardArgs, _backward_fake),
)
library.register_autograd("cp_fwd", _autograd_backward, _setup_context)
library.register_autograd("cp_bwd", reject_double_backward)
