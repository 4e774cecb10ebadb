"""PyTorch's memory-efficient attention operators, to which it sends calls with an attn_mask, by our backends.

By then a bool mask has become numbers of query's dtype, 0 or -inf, which are read as a bias; their memory may have rows
of other lengths and strides of 0. Calls that our kernels do not take stay PyTorch's.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from flash_attn.batch_invariance import is_batch_invariant
from flash_attn.limits import MAX_HEAD_DIM
from flash_attn.ops import calls
from flash_attn.ops.attention_args import AttentionArgs, AttentionBackwardArgs

_LSE_ROWS = 32  # PyTorch rounds the rows of its LSE up to a multiple of this
_BIAS_COLUMNS = 16  # the same for the columns of the gradient of attn_bias


def _is_ours(query: Tensor, key: Tensor, value: Tensor, attn_bias: Tensor | None, is_causal: bool) -> bool:
    """Whether our kernels compute a call, decided by arguments that its forward and backward share."""
    return (
        attn_bias is not None
        and not is_causal
        and query.dtype in (torch.float16, torch.bfloat16)
        and attn_bias.dtype == query.dtype
        and query.shape[1] == key.shape[1] == value.shape[1]
        and all(0 < x.shape[3] <= MAX_HEAD_DIM and x.shape[3] % 8 == 0 for x in (query, value))
        and min(query.numel(), key.numel(), value.numel()) > 0
    )


def _named(q: Tensor, v: Tensor, attn_bias: Tensor | None, dropout_p: float, scale: float | None) -> dict[str, Any]:
    """The arguments that forward and backward of a call share. q, v: (batch, seqlen, heads, head_dim)."""
    return {
        "cu_seqlens_q": None,
        "cu_seqlens_k": None,
        "alibi_slopes": None,
        "sinks": None,
        "max_seqlen_q": 0,
        "max_seqlen_k": 0,
        "dropout_p": dropout_p,
        "softmax_scale": q.shape[-1] ** -0.5 if scale is None else scale,
        "causal": False,
        "window_left": -1,
        "window_right": -1,
        "softcap": 0.0,
        "deterministic": torch.are_deterministic_algorithms_enabled(),
        "batch_invariant": is_batch_invariant(),
        "attn_bias": attn_bias,
    }


def efficient_forward(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attn_bias: Tensor | None,
    compute_log_sumexp: bool,
    dropout_p: float = 0.0,
    is_causal: bool = False,
    *,
    scale: float | None = None,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """aten::_scaled_dot_product_efficient_attention: query, key and value (batch, heads, seqlen, head_dim)."""
    q, k, v = (x.transpose(1, 2) for x in (query, key, value))
    if not _is_ours(query, key, value, attn_bias, is_causal):
        options = (None, None, None, None, dropout_p, int(is_causal), compute_log_sumexp)
        out, lse, seed, offset, *_ = torch.ops.aten._efficient_attention_forward(
            q, k, v, attn_bias, *options, scale=scale
        )
        return out.transpose(1, 2), lse, seed, offset
    args = AttentionArgs(
        q=q,
        k=k,
        v=v,
        seqused_k=None,
        leftpad_k=None,
        block_table=None,
        return_softmax=False,
        return_max_logit=False,
        **_named(q, v, attn_bias, dropout_p, scale),
    )
    out, lse, _, rng_state = calls.forward(args)
    seed, offset = (x.clone() for x in rng_state)
    if not compute_log_sumexp:
        return out.transpose(1, 2), lse.new_empty(*lse.shape[:2], 0), seed, offset
    rows = torch.nn.functional.pad(lse, (0, -lse.shape[2] % _LSE_ROWS))
    return out.transpose(1, 2), rows, seed, offset


def efficient_backward(
    grad_out: Tensor | None,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attn_bias: Tensor | None,
    out: Tensor,
    logsumexp: Tensor,
    philox_seed: Tensor,
    philox_offset: Tensor,
    dropout_p: float,
    grad_input_mask: Sequence[bool],
    is_causal: bool = False,
    *,
    scale: float | None = None,
) -> tuple[Tensor | None, ...]:
    """aten::_scaled_dot_product_efficient_attention_backward; deterministic where torch's flag asks for it."""
    if grad_out is None:
        return None, None, None, None
    dout, q, k, v, o = (x.transpose(1, 2) for x in (grad_out, query, key, value, out))
    if not _is_ours(query, key, value, attn_bias, is_causal):
        lengths = (None, None, q.shape[1], k.shape[1])
        random = (dropout_p, philox_seed, philox_offset, int(is_causal), grad_input_mask[3])
        *grads, dbias = torch.ops.aten._efficient_attention_backward(
            dout, q, k, v, attn_bias, o, *lengths, logsumexp, *random, scale=scale
        )
        return *(x.transpose(1, 2) for x in grads), dbias
    args = AttentionBackwardArgs(
        dout=dout,
        dlse=None,
        q=q,
        k=k,
        v=v,
        out=o,
        lse=logsumexp[:, :, : q.shape[1]],
        rng_state=torch.stack((philox_seed, philox_offset)),
        bias_grad=grad_input_mask[3],
        **_named(q, v, attn_bias, dropout_p, scale),
    )
    dq, dk, dv, *others = calls.backward(args)
    return *(x.transpose(1, 2) for x in (dq, dk, dv)), _as_promised(others[0]) if others else None


def _as_promised(grad: Tensor) -> Tensor:
    """The gradient of attn_bias with the distance of rows that torch's meta function promises to compilers."""
    missing = -grad.shape[-1] % _BIAS_COLUMNS
    return torch.nn.functional.pad(grad, (0, missing))[..., : grad.shape[-1]] if missing else grad


OPERATORS = {
    "_scaled_dot_product_efficient_attention": efficient_forward,
    "_scaled_dot_product_efficient_attention_backward": efficient_backward,
}
