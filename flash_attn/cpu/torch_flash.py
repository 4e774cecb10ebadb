"""PyTorch's fused attention operators, where they compute the same as the tiles."""

from __future__ import annotations

import functools

import torch

from .scores import ScoreRule, compute_dtype

_CACHE_LINE_BYTES = 64
_FORWARD = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu
_BACKWARD = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu_backward


def attend(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, rule: ScoreRule
) -> tuple[torch.Tensor, torch.Tensor] | None:
    """out (b, sq, h, d) and lse (b, h, sq), new and contiguous, of calls without dropout, sinks and max_logit; None
    where the tiles must do it.

    K and V are not repeated for the query heads of a group: without a mask these are stacked as rows of one call, under
    a causal mask each is a call.
    """
    if not _fits(q, k, v, rule) or not keeps_scores(q.dtype):
        return None
    q, k, v = _aligned(q), _aligned(k), _aligned(v)
    if not _scores_are_finite(q, k, rule):
        return None
    sq, kv_heads, group, is_causal = q.shape[1], k.shape[2], q.shape[2] // k.shape[2], _is_causal(q, k, rule)
    q, keys, values = q.unflatten(2, (kv_heads, group)).permute(0, 2, 3, 1, 4), k.transpose(1, 2), v.transpose(1, 2)
    calls = q.unbind(2) if is_causal else [q.flatten(2, 3)]
    results = [_FORWARD(rows, keys, values, 0.0, is_causal, scale=rule.scale) for rows in calls]
    out, lse = results[0] if len(results) == 1 else (torch.cat(parts, 2) for parts in zip(*results))
    out = out.unflatten(2, (group, sq)).permute(0, 3, 1, 2, 4).flatten(2, 3)
    return out.contiguous(), lse.unflatten(2, (group, sq)).flatten(1, 2).contiguous()


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

    The operator adds up the gradients in the dtype of its operands, so they are given in the compute dtype. An infinite
    LSE, which another call's keys may bring, has no meaning for it.
    """
    if not _fits(q, k, v, rule) or not lse.isfinite().all():
        return None
    kv_heads, group, dtype = k.shape[2], q.shape[2] // k.shape[2], compute_dtype(q.dtype)
    q, k, v, dout, out = (_aligned(x.to(dtype)) for x in (q, k, v, dout, out))
    if not _scores_are_finite(q, k, rule):
        return None
    is_causal = _is_causal(q, k, rule)
    if group > 1:
        k, v = k.repeat_interleave(group, 2), v.repeat_interleave(group, 2)
    operands = (x.transpose(1, 2) for x in (dout, q, k, v, out))
    grads = _BACKWARD(*operands, lse.to(dtype), 0.0, is_causal, scale=rule.scale)
    dq, *dkv = (grad.transpose(1, 2) for grad in grads)
    return [dq, *(dkv if group == 1 else (grad.unflatten(2, (kv_heads, group)).sum(3) for grad in dkv))]


@functools.cache
def keeps_scores(dtype: torch.dtype) -> bool:
    """Whether the forward's scores of inputs of this dtype are those of its compute dtype: torch 2.4 rounds them to
    float16."""
    x = torch.full((1, 1, 1, 8), 200.0, dtype=dtype, device="cpu")  # a score beyond float16
    return bool(_FORWARD(x, x, x)[1].isfinite().all())


def _fits(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, rule: ScoreRule) -> bool:
    same_dtype, same_dim = q.dtype == k.dtype == v.dtype, q.shape[-1] == v.shape[-1]
    has_scores = q.numel() > 0 and k.numel() > 0
    return has_scores and same_dtype and same_dim and rule.fits_torch_kernel(q.shape[1], k.shape[1])


def _is_causal(q: torch.Tensor, k: torch.Tensor, rule: ScoreRule) -> bool:
    return not rule.is_unmasked(q.shape[1], k.shape[1])


def _scores_are_finite(q: torch.Tensor, k: torch.Tensor, rule: ScoreRule) -> bool:
    """Whether no score of q and k can be NaN or infinite: torch's kernel gives out 0 for some of those."""
    bound = q.shape[-1] * max(rule.scale, 1.0)
    for x in (q, k):
        low, high = torch.aminmax(x)  # NaN if there is one
        bound *= max(abs(low.item()), abs(high.item()))
    return bound < torch.finfo(compute_dtype(q.dtype)).max  # not if it is NaN


def _aligned(x: torch.Tensor) -> torch.Tensor:
    """x in the one layout for which the matrix products of equal values are bitwise equal."""
    if x.is_contiguous() and x.data_ptr() % _CACHE_LINE_BYTES == 0:
        return x
    return x.clone(memory_format=torch.contiguous_format)
