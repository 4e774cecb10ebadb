"""`flash_attn_cp_func`: attention over the tokens of all ranks of a plan."""

from __future__ import annotations

import torch
from torch import Tensor
from torch.autograd import forward_ad

from flash_attn._types import TensorOrTuple, WindowSize
from flash_attn.context_parallel import operators
from flash_attn.context_parallel.call import Call, agreed_call, forward_rows, gradients
from flash_attn.context_parallel.plan import CpPlan
from flash_attn.ops import arguments
from flash_attn.ops.lse import check_convention, converted

_PLAIN = (Tensor, torch.nn.Parameter)


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
    """Exact attention of a batch whose tokens lie on several ranks; every rank of the plan's group calls it.

    Arguments:
        q: (batch, num_tokens, nheads, head_dim) with a dense plan, (num_tokens, nheads, head_dim) with a packed one:
            the tokens that `plan.spans[plan.rank]` names, as `plan.shard` gives them.
        k, v: the same tokens, (..., nheads_k, head_dim) and (..., nheads_k, head_dim_v).
        plan: a CpPlan. The other arguments are those of `flash_attn_func` and equal on all ranks; positions, and with
            them masks, ALiBi and dropout, are those in the whole document.
        alibi_slopes: float32 (nheads,) or (batch, nheads); of a packed plan (documents, nheads).
        sinks: (nheads,); each rank's gradient is that of its own tokens: all ranks' sum is the whole.
        lse_convention: that of softmax_lse, as in `flash_attn_func`.
        sm_margin: int. Multiprocessors that attention leaves to NCCL, in forward and backward, where its grid is
            persistent; on CPU tensors no effect.

    Returns:
        out: like q with head_dim_v, this rank's rows of what one GPU would compute.
        softmax_lse (with return_attn_probs): (batch, nheads, num_tokens) or (nheads, num_tokens), differentiable.
        rng_state (with return_attn_probs, in the place of S_dmask): int64 (2,), the same on all ranks: what
            `flash_attn.dropout_mask` makes of it is the mask, with documents as the batch.

    Raises RuntimeError, TypeError or ValueError; as far as the plan checks calls, on every rank if on one, and so do
    backwards that run in another order than on the other ranks.
    """
    if torch.compiler.is_compiling() and isinstance(plan, CpPlan):
        return _traced(
            q, k, v, dropout_p, softmax_scale, causal, window_size, softcap, alibi_slopes, deterministic,
            return_attn_probs, plan, sinks, lse_convention, sm_margin,
        )  # fmt: skip
    kind = None
    if alibi_slopes is None and sinks is None and not return_attn_probs:
        numbers = (dropout_p, softmax_scale, causal, window_size, softcap, deterministic, lse_convention, sm_margin)
        kind = _kind((q, k, v), numbers)
        if kind is not None and isinstance(plan, CpPlan) and kind in plan.known_calls:
            call = plan.known_calls[kind]
            number, _ = plan.compare("flash_attn_cp_func", call.request, None)
            return _CpAttention.apply(call, number, q, k, v, None)[0]
    call, number, inputs = agreed_call(
        q, k, v, dropout_p, softmax_scale, causal, window_size, softcap, alibi_slopes, deterministic, plan, sinks,
        sm_margin, lse_convention=lse_convention, kind=kind, wants_state=return_attn_probs,
    )  # fmt: skip
    out, lse = _CpAttention.apply(call, number, *inputs)
    if call.padded_from:
        out = out[..., : call.padded_from].contiguous()
    return (out, converted(lse, lse_convention), call.options.rng_state) if return_attn_probs else out


def _traced(
    q, k, v, dropout_p, softmax_scale, causal, window_size, softcap, alibi_slopes, deterministic, return_attn_probs,
    plan, sinks, lse_convention, sm_margin,
):  # fmt: skip
    """The call as one operator, in which the ranks agree when it runs."""
    check_convention(lse_convention)
    q, k, v = arguments.attention_inputs(("q", "k", "v"), (q, k, v))
    scale = arguments.scale(softmax_scale, arguments.head_dim("q", q))
    left, right = arguments.window(window_size)
    args = operators.CpArgs(
        q, k, v, None if sinks is None else arguments.sinks(sinks), alibi_slopes, plan.handle,
        arguments.number("dropout_p", dropout_p), scale, arguments.flag("causal", causal), left, right,
        arguments.number("softcap", softcap), arguments.flag("deterministic", deterministic),
        arguments.sm_margin(sm_margin),
    )  # fmt: skip
    out, lse, rng_state = operators.attention(args)
    return (out, converted(lse, lse_convention), rng_state) if return_attn_probs else out


def _kind(inputs, numbers):
    """All that a call's checks look at, contents excepted, where they would find nothing else; None: they may."""
    dropout_p, scale, causal, window, softcap, deterministic, convention, sm_margin = numbers
    if type(dropout_p) not in (int, float) or dropout_p or type(scale) not in (type(None), float):
        return None
    if type(causal) is not bool or type(softcap) is not float or type(deterministic) is not bool or convention != "fa2":
        return None
    if type(sm_margin) is not int:
        return None
    if type(window) is not tuple or not all(type(side) is int for side in window) or forward_ad._current_level >= 0:
        return None
    kind = [torch.is_grad_enabled(), scale, causal, window, softcap, deterministic, sm_margin]
    for x in inputs:
        if type(x) not in _PLAIN or x.dtype is torch.float32 or x.layout is not torch.strided or x.is_nested:
            return None  # of float32 autocast makes another dtype
        kind += (x.shape, x.dtype, x.device, x.requires_grad)
    return tuple(kind)


class _CpAttention(torch.autograd.Function):
    @staticmethod
    def forward(ctx, call: Call, number: int, q, k, v, sinks):
        out, lse, kept = forward_rows(call, q, k, v, sinks)
        ctx.call, ctx.number, ctx.has_sinks = call, number, sinks is not None
        ctx.save_for_backward(q, k, v, out, lse, *kept, *((sinks,) if sinks is not None else ()))
        ctx.set_materialize_grads(False)
        return call.tokens(out), call.head_tokens(lse)

    @staticmethod
    def backward(ctx, dout, dlse):
        call: Call = ctx.call
        saved, error = (), None
        try:
            saved = ctx.saved_tensors  # read once: torch.utils.checkpoint gives them no second time
        except Exception as raised:  # written to since, or freed: the other ranks wait to be told
            error = raised
        call.compare_backward(ctx.number, error)
        with torch.no_grad():
            q, k, v, out, lse, *kept = saved
            kept, sinks = (kept[:-1], kept[-1]) if ctx.has_sinks else (kept, None)
            grads = gradients(call, dout, dlse, q, k, v, out, lse, kept, sinks)
        if torch.is_grad_enabled():  # under create_graph
            grads = _OnceDifferentiable.apply(len(grads), *grads, *saved[:3], dout, dlse)
        return (None, None, *grads, *(None,) * (4 - len(grads)))


class _OnceDifferentiable(torch.autograd.Function):
    """Gradients as functions of what they depend on, whose derivatives do not exist."""

    @staticmethod
    def forward(ctx, count, *tensors):
        return tensors[:count]

    backward = staticmethod(operators.reject_double_backward)
