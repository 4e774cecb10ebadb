"""Eager dense attention of plain CPU tensors: torch's fused operators, and one node around them.

The twin of `csrc/flash_attn/api/eager.h`, in installs without the extension. It has the results of `FlashAttnFunc`,
whose checks take longer than the products of a short call. Every other call, and every backward that something takes
part in, is that of `FlashAttnFunc`.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor

from flash_attn import observation
from flash_attn._types import Context, TensorOrTuple, WindowSize
from flash_attn.cpu import torch_flash
from flash_attn.cpu.checks import DTYPES
from flash_attn.cpu.scores import ScoreRule
from flash_attn.limits import MAX_HEAD_DIM
from flash_attn.ops import context

_LEAST_SCALE = torch.finfo(torch.float32).tiny


class _FlashAttnContext(Context):
    rule: ScoreRule


class FlashAttnFunc(torch.autograd.Function):
    """The node of `attention`; its name is that of other attention nodes."""

    @staticmethod
    def forward(
        ctx: _FlashAttnContext, q: Tensor, k: Tensor, v: Tensor, rule: ScoreRule, results: tuple[Tensor, Tensor]
    ) -> Tensor:
        """results: out and lse, already computed."""
        out, lse = results
        ctx.save_for_backward(q, k, v, out, lse)
        ctx.set_materialize_grads(False)
        ctx.rule = rule
        return out

    @staticmethod
    def backward(ctx: _FlashAttnContext, dout: Tensor | None) -> tuple[Tensor | None, ...]:
        from flash_attn.ops import eager

        if dout is None:
            return None, None, None, None, None
        rule, saved = ctx.rule, ctx.saved_tensors
        q, k, v, out, lse = saved
        grads = None
        if not (torch.is_grad_enabled() or _is_seen()) and type(dout) is Tensor:
            context.reject_batched_gradients(dout)
            grads = torch_flash.gradients(dout, q, k, v, out, lse, rule)
        if grads is None:
            sides = (-1, -1 if rule.right is None else rule.right)
            grads = eager.backward(dout, list(saved), 0.0, rule.scale, rule.right == 0, *sides, 0.0, False, False)
        return (*(x.to(q.dtype, memory_format=torch.contiguous_format) for x in grads), None, None)

    jvp = staticmethod(context.no_jvp)


def _is_seen() -> bool:
    """Whether a compiler, transform, mode, profiler or autocast takes part in what happens now."""
    return (
        torch.compiler.is_compiling()
        or context.is_watched()
        or observation.profiler._is_profiler_enabled
        or torch.is_autocast_enabled("cpu")
    )


def _is_operand(x: object, dtype: torch.dtype) -> bool:
    """A CPU tensor of memory at strides, and nothing else."""
    if type(x) is not Tensor or x.dtype is not dtype or x.layout is not torch.strided or not x.is_cpu:
        return False
    return x.dim() == 4 and not x.is_nested and not x.is_inference()


def attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    dropout_p: float,
    softmax_scale: float | None,
    causal: bool,
    window_size: WindowSize,
    softcap: float,
    alibi_slopes: Tensor | None,
    deterministic: bool,
    return_attn_probs: bool,
    batch_invariant: bool,
) -> TensorOrTuple:
    """The result of a dense call, or NotImplemented where `FlashAttnFunc` has to take it."""
    is_plain = (
        type(dropout_p) is type(softcap) is float
        and dropout_p == softcap == 0.0
        and type(causal) is type(deterministic) is bool
        and return_attn_probs is batch_invariant is False
        and alibi_slopes is None
        and type(window_size) is tuple
        and window_size == (-1, -1)
        and type(window_size[0]) is type(window_size[1]) is int
        and (softmax_scale is None or type(softmax_scale) is float)
    )
    if not is_plain or _is_seen() or type(q) is not Tensor or q.dtype not in DTYPES:
        return NotImplemented
    if not all(_is_operand(x, q.dtype) for x in (q, k, v)) or k.shape != v.shape:
        return NotImplemented
    batch, _, heads, head_dim = q.shape
    heads_k = k.shape[2]
    fits = k.shape[0] == batch and k.shape[3] == head_dim and heads_k > 0 and heads % heads_k == 0
    if not fits or not 0 < head_dim <= MAX_HEAD_DIM:
        return NotImplemented
    scale = head_dim**-0.5 if softmax_scale is None else softmax_scale
    if not _LEAST_SCALE <= scale < math.inf:
        return NotImplemented
    rule = ScoreRule(scale, 0.0, None, 0 if causal else None, None)
    with torch.no_grad():
        results = torch_flash.attend(q, k, v, rule)
    if results is None:
        return NotImplemented
    if torch.is_grad_enabled() and (q.requires_grad or k.requires_grad or v.requires_grad):
        return FlashAttnFunc.apply(q, k, v, rule, results)
    return results[0]
