"""PyTorch's fused attention operators, where they compute the same as the tiles."""

from __future__ import annotations

import functools
import math

import torch

from .scores import ScoreRule, compute_dtype

_CACHE_LINE_BYTES = 64
_FEW_QUERIES = 32  # rows that the forward multiplies at once
_FORWARD = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu
_BACKWARD = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu_backward


def attend(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, rule: ScoreRule
) -> tuple[torch.Tensor, torch.Tensor] | None:
    """out (b, sq, h, d) and lse (b, h, sq), new and contiguous, of calls without dropout, sinks and max_logit; None
    where the tiles must do it.

    The few queries of a group are stacked as rows of one head: the operator reads K and V anew for each head.
    """
    if not _fits(q, k, v, rule) or not keeps_scores(q.dtype):
        return None
    q, k, v = _aligned(q), _aligned(k), _aligned(v)
    if not _scores_are_finite(q, k, rule):
        return None
    sq, kv_heads, group, is_causal = q.shape[1], k.shape[2], q.shape[2] // k.shape[2], _is_causal(q, k, rule)
    is_stacked = group > 1 and sq < _FEW_QUERIES and not is_causal
    if is_stacked:
        q = q.unflatten(2, (kv_heads, group)).transpose(2, 3).flatten(1, 2)
    k, v = _for_operator(k, q), _for_operator(v, q)
    out, lse = _FORWARD(q.transpose(1, 2), k.transpose(1, 2), v.transpose(1, 2), 0.0, is_causal, scale=rule.scale)
    out = out.transpose(1, 2)
    if is_stacked:
        out = out.unflatten(1, (sq, group)).transpose(2, 3).flatten(2, 3)
        lse = lse.unflatten(2, (sq, group)).transpose(2, 3).flatten(1, 2)
    return out.contiguous(), lse.contiguous()


def gradients(
    dout: torch.Tensor,
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    out: torch.Tensor,
    lse: torch.Tensor,
    rule: ScoreRule,
) -> list[torch.Tensor] | None:
    """dq, dk, dv of calls without dropout and dlse, new tensors in the compute dtype; None where the tiles must do it.

    The operator adds up the gradients in the dtype of its operands, so they are given in the compute dtype: sums of
    16 bits were up to 4.6 times as far off as plain attention. An infinite LSE, which another call's keys may bring,
    has no meaning for it. Scores that are not finite need no look: NaN goes through this operator.
    """
    if not _fits(q, k, v, rule) or not math.isfinite(lse.sum()):
        return None
    kv_heads, group, dtype = k.shape[2], q.shape[2] // k.shape[2], compute_dtype(q.dtype)
    q, k, v = (_aligned(x) if x.dtype == dtype else _by_head(x, dtype) for x in (q, k, v))
    dout, out = (_aligned(x.to(dtype)) for x in (dout, out))
    operands = (x.transpose(1, 2) for x in (dout, q, _for_operator(k, q), _for_operator(v, q), out))
    grads = _BACKWARD(*operands, lse, 0.0, _is_causal(q, k, rule), scale=rule.scale)
    dq, dk, dv = (grad.transpose(1, 2) for grad in grads)
    if dk.shape != k.shape:
        dk, dv = (grad.unflatten(2, (kv_heads, group)).sum(3) for grad in (dk, dv))
    return [dq, dk, dv]


@functools.cache
def keeps_scores(dtype: torch.dtype) -> bool:
    """Whether the forward's scores of inputs of this dtype are those of its compute dtype: torch 2.4 rounds them to
    float16."""
    x = torch.full((1, 1, 1, 8), 200.0, dtype=dtype, device="cpu")  # a score beyond float16
    return bool(_FORWARD(x, x, x)[1].isfinite().all())


@functools.cache
def _takes_groups() -> bool:
    """Whether the operators take fewer heads of K and V than of Q; those of old releases read beyond K and V."""
    kv = torch.arange(2.0, device="cpu").view(1, 2, 1, 1).repeat(1, 1, 1, 8)
    first = kv[:, :1]  # reads beyond it stay inside kv
    try:
        return not _FORWARD(kv, first, first)[0].any()
    except RuntimeError:
        return False


def _for_operator(x: torch.Tensor, q: torch.Tensor) -> torch.Tensor:
    """K or V with as many heads as q, where the operators need them."""
    group = q.shape[2] // x.shape[2]
    return x if group == 1 or _takes_groups() else x.repeat_interleave(group, 2)


def _fits(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, rule: ScoreRule) -> bool:
    same_dtype, same_dim = q.dtype == k.dtype == v.dtype, q.shape[-1] == v.shape[-1]
    has_scores = q.numel() > 0 and k.numel() > 0
    return has_scores and same_dtype and same_dim and rule.fits_torch_kernel(q.shape[1], k.shape[1])


def _is_causal(q: torch.Tensor, k: torch.Tensor, rule: ScoreRule) -> bool:
    return not rule.is_unmasked(q.shape[1], k.shape[1])


def _scores_are_finite(q: torch.Tensor, k: torch.Tensor, rule: ScoreRule) -> bool:
    """Whether no score of q and k can be NaN or infinite: torch's kernel gives out 0 for some of those."""
    bound = q.shape[-1] * max(rule.scale, 1.0) * _magnitude(q) * _magnitude(k)
    return bound < torch.finfo(compute_dtype(q.dtype)).max  # not if it is NaN


def _magnitude(x: torch.Tensor) -> float:
    """At least that of every element; NaN if there is one."""
    if x.dtype.itemsize > 2:  # there aminmax takes longer
        return float(torch.linalg.vector_norm(x))
    low, high = torch.aminmax(x)
    return max(abs(low.item()), abs(high.item()))


def _aligned(x: torch.Tensor) -> torch.Tensor:
    """x in the one layout for which the matrix products of equal values are bitwise equal."""
    if x.is_contiguous() and x.data_ptr() % _CACHE_LINE_BYTES == 0:
        return x
    return x.clone(memory_format=torch.contiguous_format)


def _by_head(x: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """x in another dtype, the rows of a head adjacent: products are faster then, by less than a copy alone takes."""
    return x.transpose(1, 2).to(dtype, memory_format=torch.contiguous_format).transpose(1, 2)
