"""FlashAttention-3's one backward over all forms of q, k and v."""

from __future__ import annotations

import torch

from flash_attn.batch_invariance import is_batch_invariant
from flash_attn.ops import calls, context
from flash_attn.ops.attention_args import AttentionBackwardArgs
from flash_attn_3._rows import RowsInUse, pack


def backward(
    dout, q, k, v, out, softmax_lse, dq=None, dk=None, dv=None, cu_seqlens_q=None, cu_seqlens_k=None, seqused_q=None,
    seqused_k=None, max_seqlen_q=None, max_seqlen_k=None, softmax_scale=None, causal=False, window_size_left=-1,
    window_size_right=-1, softcap=0.0, deterministic=False, sm_margin=0, *, dlse=None,
):  # fmt: skip
    """softmax_d of `torch.ops.flash_attn_3.bwd`, which writes dq, dk and dv; dlse: the gradient of softmax_lse."""
    context.reject_forward_mode("flash_attn_3.bwd")
    scale = q.shape[-1] ** -0.5 if softmax_scale is None else softmax_scale
    window = (window_size_left, window_size_right)
    lengths = (cu_seqlens_q, cu_seqlens_k, seqused_q, seqused_k)

    def into(dout, dlse, q, k, v, out, lse, cu_seqlens_q, cu_seqlens_k, dq, dk, dv):
        args = AttentionBackwardArgs(
            dout=dout, dlse=dlse, q=q, k=k, v=v, out=out, lse=lse, rng_state=None, cu_seqlens_q=cu_seqlens_q,
            cu_seqlens_k=cu_seqlens_k, alibi_slopes=None, sinks=None, max_seqlen_q=q.shape[0], max_seqlen_k=k.shape[0],
            dropout_p=0.0, softmax_scale=scale, causal=causal, window_left=window[0], window_right=window[1],
            softcap=softcap, deterministic=deterministic, batch_invariant=is_batch_invariant(),
        )  # fmt: skip
        return calls.backward_into(args, dq, dk, dv)

    both_packed = cu_seqlens_q is not None and cu_seqlens_k is not None
    if all(x is None for x in lengths) or (both_packed and seqused_q is seqused_k is None):
        return into(dout, dlse, q, k, v, out, softmax_lse, cu_seqlens_q, cu_seqlens_k, dq, dk, dv)
    return _backward_of_rows_in_use(into, dout, dlse, q, k, v, out, softmax_lse, *lengths, (dq, dk, dv))


def _backward_of_rows_in_use(
    into, dout, dlse, q, k, v, out, lse, cu_seqlens_q, cu_seqlens_k, seqused_q, seqused_k, wanted
):  # fmt: skip
    """The same with copies of the rows: batches are packed, and the rows in use come first."""
    rows_q = RowsInUse(pack(q, cu_seqlens_q)[1], seqused_q, pack(q, cu_seqlens_q)[0].shape[0])
    rows_k = RowsInUse(pack(k, cu_seqlens_k)[1], seqused_k, pack(k, cu_seqlens_k)[0].shape[0])

    def queries(x):
        return rows_q.gather(pack(x, cu_seqlens_q)[0])

    def keys(x):
        return rows_k.gather(pack(x, cu_seqlens_k)[0])

    def per_row(x):
        return x if x is None else rows_q.gather(x if cu_seqlens_q is not None else x.transpose(0, 1).flatten(1), 1)

    inputs = (queries(q), keys(k), keys(v))
    grads = tuple(torch.empty_like(x, memory_format=torch.contiguous_format) for x in inputs)
    softmax_d = into(
        queries(dout), per_row(dlse), *inputs, queries(out), per_row(lse), rows_q.cu_seqlens, rows_k.cu_seqlens, *grads
    )  # fmt: skip
    for target, grad, rows in zip(wanted, grads, (rows_q, rows_k, rows_k)):
        if target is not None:
            target.copy_(rows.scatter(grad).view(target.shape))
    return softmax_d
