"""PyTorch's fused attention operators, where they compute what the tiles would."""

from __future__ import annotations

import torch

from .scores import ScoreRule, compute_dtype

_CACHE_LINE_BYTES = 64
_FORWARD = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu
_BACKWARD = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu_backward


def attend(q, k, v, out, lse, rule: ScoreRule) -> bool:
    """`forward.attend` without dropout, sinks and max_logit; False, and nothing is written, where the tiles must do it.

    K and V are not repeated for the query heads of a group: without a mask these are stacked as rows of one call, under
    a causal mask each is a call.
    """
    if not _fits(q, k, v, rule):
        return False
    q, k, v = _aligned(q), _aligned(k), _aligned(v)
    if not _scores_are_finite(q, k, rule):
        return False
    sq, sk, kv_heads = q.shape[1], k.shape[1], k.shape[2]
    groups = (kv_heads, q.shape[2] // kv_heads)
    keys, values = k.transpose(1, 2), v.transpose(1, 2)
    q, out, lse = q.unflatten(2, groups), out.unflatten(2, groups), lse.unflatten(1, groups)
    if rule.is_unmasked(sq, sk):
        stacked = q.permute(0, 2, 3, 1, 4).flatten(2, 3)
        fused_out, fused_lse = _FORWARD(stacked, keys, values, 0.0, False, scale=rule.scale)
        out.copy_(fused_out.unflatten(2, (groups[1], sq)).permute(0, 3, 1, 2, 4))
        lse.copy_(fused_lse.unflatten(2, (groups[1], sq)))
        return True
    for member in range(groups[1]):
        queries = q[:, :, :, member].transpose(1, 2)
        fused_out, fused_lse = _FORWARD(queries, keys, values, 0.0, True, scale=rule.scale)
        out[:, :, :, member].copy_(fused_out.transpose(1, 2))
        lse[:, :, member].copy_(fused_lse)
    return True


def gradients(dout, q, k, v, out, lse, rule: ScoreRule) -> list[torch.Tensor] | None:
    """dq, dk, dv of calls without dropout and dlse, new tensors in the compute dtype; None where the tiles must do it.

    The operator adds up the gradients in the dtype of its operands, so they are given in the compute dtype. An infinite
    LSE, which another call's keys may bring, has no meaning for it.
    """
    if q.numel() == 0 or k.numel() == 0 or not _fits(q, k, v, rule) or not lse.isfinite().all():
        return None
    kv_heads, group, dtype = k.shape[2], q.shape[2] // k.shape[2], compute_dtype(q.dtype)
    q, k, v, dout, out = (_aligned(x.to(dtype)) for x in (q, k, v, dout, out))
    if not _scores_are_finite(q, k, rule):
        return None
    is_causal = not rule.is_unmasked(q.shape[1], k.shape[1])
    if group > 1:
        k, v = k.repeat_interleave(group, 2), v.repeat_interleave(group, 2)
    operands = (x.transpose(1, 2) for x in (dout, q, k, v, out))
    grads = _BACKWARD(*operands, lse.to(dtype), 0.0, is_causal, scale=rule.scale)
    dq, *dkv = (grad.transpose(1, 2) for grad in grads)
    return [dq, *(dkv if group == 1 else (grad.unflatten(2, (kv_heads, group)).sum(3) for grad in dkv))]


def _fits(q, k, v, rule: ScoreRule) -> bool:
    same_dtype, same_dim = q.dtype == k.dtype == v.dtype, q.shape[-1] == v.shape[-1]
    return same_dtype and same_dim and rule.fits_torch_kernel(q.shape[1], k.shape[1])


def _scores_are_finite(q, k, rule: ScoreRule) -> bool:
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
