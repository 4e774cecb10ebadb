"""`flash_attn_cp_func`: attention over the tokens of all ranks of a plan."""

from __future__ import annotations

from collections.abc import Callable, Hashable

import torch
from torch import Tensor
from torch.autograd import forward_ad

from flash_attn._docstrings import documented
from flash_attn._types import Context, TensorOrTuple, WindowSize
from flash_attn.context_parallel import operators
from flash_attn.context_parallel.attention_call import Arguments, AttentionCall, agreed_call, forward_rows, gradients
from flash_attn.context_parallel.cp_plan import CpPlan
from flash_attn.ops import arguments, context
from flash_attn.ops.lse import check_convention, converted

_PLAIN = (Tensor, torch.nn.Parameter)


@documented()
def flash_attn_cp_func(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    dropout_p: float = 0.0,
    softmax_scale: float | None = None,
    causal: bool = False,
    window_size: WindowSize = (-1, -1),
    softcap: float = 0.0,
    alibi_slopes: Tensor | None = None,
    deterministic: bool = False,
    return_attn_probs: bool = False,
    *,
    plan: CpPlan,
    sinks: Tensor | None = None,
    lse_convention: str = "fa2",
    sm_margin: int = 0,
) -> TensorOrTuple:
    """Exact attention of a batch whose tokens are on several ranks; every rank of the plan's group calls it.

    All arguments but the tensors are equal on all ranks. Masks, ALiBi and dropout use positions in the whole document,
    whose lengths are seqlen_q and seqlen_k.

    Arguments:
        q: (batch, num_tokens, nheads, head_dim) with a dense plan, (num_tokens, nheads, head_dim) with a packed one:
            this rank's tokens, as `plan.shard` gives them; float16 or bfloat16, on the CPU also float32 and float64.
        k: the same tokens, (..., nheads_k, head_dim) of q's dtype, nheads a multiple of nheads_k.
        v: the same tokens, (..., nheads_k, head_dim_v) of q's dtype. Head dims up to 512.
        <dropout>
        <scores>
        alibi_slopes: float32 (nheads,) or (batch, nheads); with a packed plan (documents, nheads). Scores get
            -slope * |p - j|.
        <deterministic>
        return_attn_probs: bool. Also return softmax_lse and rng_state.

    Keyword arguments:
        plan: a `CpPlan`, which says which tokens this rank has.
        sinks: (nheads,) float32 or half precision. A further logit, in natural-log units, in the softmax of every row,
            without a value. A rank's gradient is that of its tokens; the whole is the sum over ranks.
        <lse_convention>
        sm_margin: int, number of SMs that attention leaves to NCCL in forward and backward if its grid is persistent;
            no effect on CPU tensors.

    Returns:
        out: like q with head_dim_v, this rank's rows of one GPU's result; with return_attn_probs
            (out, softmax_lse, rng_state).
        softmax_lse: (batch, nheads, num_tokens) or (nheads, num_tokens) float32 (float64 for float64), differentiable.
        rng_state: int64 (2,), the same on all ranks, in the place of S_dmask. `flash_attn.dropout_mask` makes the mask
            from it, with documents as the batch.

    Raises RuntimeError, TypeError or ValueError that names the argument, on every rank as far as the plan checks calls;
    also for backwards in another order than on the other ranks.
    """
    is_traced = isinstance(plan, CpPlan) and (torch.compiler.is_compiling() or context.dispatch_modes() > 0)
    kind = None
    if alibi_slopes is None and sinks is None and not return_attn_probs and not is_traced:
        numbers = (dropout_p, softmax_scale, causal, window_size, softcap, deterministic, lse_convention, sm_margin)
        kind = _kind((q, k, v), numbers)
        if kind is not None and isinstance(plan, CpPlan) and kind in plan.known_calls:
            call = plan.known_calls[kind]
            number, _ = plan.compare("flash_attn_cp_func", call.request, None)
            return _attend(call, number, q, k, v, None)[0]
    args = Arguments(
        q=q,
        k=k,
        v=v,
        sinks=sinks,
        plan=plan,
        dropout_p=dropout_p,
        softmax_scale=softmax_scale,
        causal=causal,
        window_size=window_size,
        softcap=softcap,
        alibi_slopes=alibi_slopes,
        deterministic=deterministic,
        sm_margin=sm_margin,
    )
    if is_traced:
        return _traced(args, lse_convention, return_attn_probs)
    call, number, inputs = agreed_call(args, lse_convention, kind, wants_state=return_attn_probs)
    out, lse = _attend(call, number, *inputs)
    if call.padded_from:
        out = out[..., : call.padded_from].contiguous()
    return (out, converted(lse, lse_convention), call.options.rng_state) if return_attn_probs else out


def _traced(args: Arguments, lse_convention: str, return_attn_probs: bool) -> TensorOrTuple:
    """The call as one operator; the ranks compare it when it runs."""
    check_convention(lse_convention)
    q, k, v = arguments.attention_inputs(("q", "k", "v"), (args.q, args.k, args.v))
    scale = arguments.scale(args.softmax_scale, arguments.head_dim("q", q))
    left, right = arguments.window(args.window_size)
    operator_args = operators.CpArgs(
        q,
        k,
        v,
        None if args.sinks is None else arguments.sinks(args.sinks),
        args.alibi_slopes,
        args.plan.handle,
        arguments.number("dropout_p", args.dropout_p),
        scale,
        arguments.flag("causal", args.causal),
        left,
        right,
        arguments.number("softcap", args.softcap),
        arguments.flag("deterministic", args.deterministic),
        arguments.sm_margin(args.sm_margin),
    )
    out, lse, rng_state = operators.attention(operator_args)
    return (out, converted(lse, lse_convention), rng_state) if return_attn_probs else out


def _kind(inputs: tuple[Tensor, ...], numbers: tuple[object, ...]) -> tuple[Hashable, ...] | None:
    """A key of all that the checks of a call depend on, apart from values in tensors; None if they may need more."""
    dropout_p, scale, causal, window, softcap, deterministic, convention, sm_margin = numbers
    if type(dropout_p) not in (int, float) or dropout_p or type(scale) not in (type(None), float):
        return None
    if type(causal) is not bool or type(softcap) is not float or type(deterministic) is not bool or convention != "fa2":
        return None
    if type(sm_margin) is not int:
        return None
    if type(window) is not tuple or not all(type(side) is int for side in window) or forward_ad._current_level >= 0:
        return None
    kind: list[Hashable] = [torch.is_grad_enabled(), scale, causal, window, softcap, deterministic, sm_margin]
    for x in inputs:
        if type(x) not in _PLAIN or x.dtype is torch.float32 or x.layout is not torch.strided or x.is_nested:
            return None  # autocast changes the dtype of float32
        kind += (x.shape, x.dtype, x.device, x.requires_grad)
    return tuple(kind)


class _CpContext(Context):
    call: AttentionCall
    number: int
    has_sinks: bool


class _CpAttention(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: _CpContext, call: AttentionCall, number: int, q: Tensor, k: Tensor, v: Tensor, sinks: Tensor | None
    ) -> tuple[Tensor, Tensor]:
        out, lse, saved = forward_rows(call, q, k, v, sinks)
        ctx.call, ctx.number, ctx.has_sinks = call, number, sinks is not None
        ctx.save_for_backward(q, k, v, out, lse, *saved, *((sinks,) if sinks is not None else ()))
        ctx.set_materialize_grads(False)
        return call.tokens(out), call.head_tokens(lse)

    @staticmethod
    def backward(ctx: _CpContext, dout: Tensor | None, dlse: Tensor | None) -> tuple[Tensor | None, ...]:
        call, error = ctx.call, None
        saved: tuple[Tensor, ...] = ()
        try:
            saved = ctx.saved_tensors  # read once: torch.utils.checkpoint gives them no second time
        except Exception as raised:  # overwritten or freed; the other ranks wait for this one
            error = raised
        call.compare_backward(ctx.number, error)
        with torch.no_grad():
            q, k, v, out, lse, *others = saved
            sinks = others.pop() if ctx.has_sinks else None
            grads = gradients(call, dout, dlse, (q, k, v, sinks), out, lse, others)
        if torch.is_grad_enabled():  # under create_graph
            grads = _once_differentiable(len(grads), *grads, *saved[:3], dout, dlse)
        return (None, None, *grads, *(None,) * (4 - len(grads)))


class _OnceDifferentiable(torch.autograd.Function):
    """Gradients as functions of their inputs, without derivatives."""

    @staticmethod
    def forward(ctx: Context, count: int, *tensors: Tensor) -> tuple[Tensor, ...]:
        return tensors[:count]

    backward = staticmethod(operators.reject_double_backward)


_attend: Callable[..., tuple[Tensor, Tensor]] = _CpAttention.apply
_once_differentiable: Callable[..., list[Tensor]] = _OnceDifferentiable.apply
