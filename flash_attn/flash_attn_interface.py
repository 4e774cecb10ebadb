"""The public attention functions: one signature, one docstring, one call each.

All compute exact attention, softmax(softmax_scale * Q K^T + bias + mask) V, by the tiled online-softmax algorithm of
FlashAttention-2 (Dao, 2023, arXiv:2307.08691), whose memory grows linearly with the sequence length; gradients
recompute the probabilities from Q, K and the log-sum-exp.

Common to all of them:

dtypes       q, k, v of one dtype: float16 or bfloat16; on CPU tensors float32 and float64 too. Sums are kept in
             float32 (float64 for float64 inputs). Under torch.autocast float32 inputs become its dtype.
8 bits       k and v may be float8_e4m3fn or int8, and q float8_e4m3fn where k is, without gradient and dropout: exact
             attention of code * descale. CUDA has kernels for float8_e4m3fn q, k and v of head_dim 64, 128 and 256 (and
             an equal head_dim_v) on compute capability 9.0 (docs/fp8.md), decodes over codes of k and v, and converts
             what many queries see.
heads        nheads divisible by nheads_k; query head i reads K/V head i // (nheads / nheads_k).
head_dim     up to 256. On CUDA a head_dim that is no multiple of 8 costs a padded copy of the inputs.
head_dim_v   of v and out, where a function names it: up to 256, head_dim or another. Where it differs, CUDA takes the
             time of the larger head dim for both; on Hopper 192 and 128 do not, but for a forward with dropout, softcap
             or ALiBi. Where the larger is up to 32, on GPUs other than Hopper, for small problems and few queries over
             many keys, those of q, k and v with the smaller one are padded by a copy.
strides      any; a head dim with a stride other than 1 costs a copy.
positions    aligned to the bottom right corner: query i of sq stands at position i + sk - sq among sk keys.
masked rows  a fully masked row (a query that sees no key) has output 0, gradients 0 and LSE +inf (with sinks: LSE the
             sink).
gradients    of out and softmax_lse with respect to q, k, v and sinks; what else asks for one (alibi_slopes, numbers as
             tensors) is rejected. Not twice differentiable, no forward mode. torch.vmap computes one
             sample after the other.

Bad arguments raise RuntimeError, TypeError or NotImplementedError: the message names the argument, what was expected
and what it was; nothing is computed then.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, TypeVar

import torch
from torch import Tensor

from flash_attn import backends
from flash_attn._types import Descale, TensorOrTuple, WindowSize
from flash_attn.autograd_functions import (  # noqa: F401
    FlashAttnFunc,
    FlashAttnKVPackedFunc,
    FlashAttnQKVPackedFunc,
    FlashAttnVarlenFunc,
    FlashAttnVarlenKVPackedFunc,
    FlashAttnVarlenQKVPackedFunc,
)
from flash_attn.inference import flash_attn_combine, flash_attn_with_kvcache  # noqa: F401
from flash_attn.ops.attend import attend, attend_rows_in_use
from flash_attn.ops.attention_args import DENSE, Sequences
from flash_attn.ops.public import (
    _flash_attn_backward,
    _flash_attn_forward,
    _flash_attn_varlen_backward,
    _flash_attn_varlen_forward,
)

_wrapped_flash_attn_forward = _flash_attn_forward
_wrapped_flash_attn_backward = _flash_attn_backward
_wrapped_flash_attn_varlen_forward = _flash_attn_varlen_forward
_wrapped_flash_attn_varlen_backward = _flash_attn_varlen_backward

flash_attn_gpu = backends.cuda_extension() or backends.get("cpu")

_OPTIONS_DOC = """
        dropout_p: float in [0, 1). Probability of dropping an entry of the attention matrix; kept entries are scaled
            by 1 / (1 - dropout_p). The mask is that of `flash_attn.dropout_mask`. Pass 0.0 in evaluation.
        softmax_scale: float, factor of Q K^T before the softmax. Default: 1 / sqrt(head_dim).
        causal: bool. A query at position p sees the keys j <= p (positions as above: aligned bottom right).
        window_size: (left, right), any pair of ints, in keys. A query at position p sees the keys
            p - left <= j <= p + right; a negative value is unbounded on its side. causal caps right at 0.
        softcap: float >= 0. If > 0, scores become softcap * tanh(softmax_scale * Q K^T / softcap).
        alibi_slopes: float32 (nheads,) or (batch, nheads). Subtracts slope * |p - j| from the score of a query at
            position p and key j.
        deterministic: bool. Makes the backward bitwise reproducible from run to run; the forward always is.
        return_attn_probs: bool. Also return softmax_lse and S_dmask.
        sinks: (nheads,), float32 (half precision is converted); keyword only. One more logit in the softmax of every
            row of a head, in natural-log units (softmax_scale and softcap do not apply), without a value: it takes
            probability and adds nothing to the output. -inf is no sink. Learnable.
        return_max_logit: bool; keyword only. Also return max_logit, as the last result.
        batch_invariant: bool; keyword only. Make out, softmax_lse, dk and dv of a sequence, and with deterministic dq,
            independent to the last bit of the other sequences, of their number and of its position among them, whether
            the batch is dense or packed; slower where sequences are few or short. `set_batch_invariant` asks for it
            in all calls.
        s_aux, learnable_sink: other names of sinks, which clients look for in the signature; keyword only. At most one
            of the three is given (or the same tensor).
        lse_convention: str, of softmax_lse; keyword only. "fa2": natural logarithm, +inf in a fully masked row. "fa3":
            the same with -inf there. "flashinfer": logarithm to base 2, -inf there.
"""

_DESCALES_DOC = """
        q_descale: of float8_e4m3fn q, whose values are then code * descale: a number, or float32 on its device of one
            element, (nheads,), (batch, nheads), or with nheads_k in place of nheads. None is 1. This and the following
            are keyword only.
        k_descale: of float8_e4m3fn or int8 k: as for q, with nheads_k; or of each row, (batch, 1 or seqlen_k,
            nheads_k), packed (total_k, 1, nheads_k), with pages (num_pages, 1 or page_size, nheads_k).
        v_descale: the same for v.
        v_descale_axis: None, or "channel" for a v_descale of (nheads_k, head_dim_v) or (batch, nheads_k, head_dim_v).
        out_dtype: dtype of out where q has 8 bits: float16 or bfloat16. Default: that of v, or bfloat16.
        exp: "fast" allows CUDA's kernels of float8_e4m3fn q, k and v (head_dim 64 or 128, compute capability 9.0) to
            round probabilities to codes whose mantissa is linear in the exponent, within 6 %: a quarter faster, the
            output hardly less exact than with probabilities in e4m3, the LSE within 0.05. Ignored elsewhere.
"""

_RESULT_DOC = """
    Returns:
        out: {out}, contiguous.
        softmax_lse (with return_attn_probs): {lse}, logarithm of the sum of exp(scores) of each row, the sink
            included, float32 (float64 for float64 inputs).
        S_dmask (with return_attn_probs): for tests. Empty (0,) unless dropout_p > 0; then
            (batch, nheads, round_up(seqlen_q, 128), round_up(seqlen_k, 128)) in q's dtype with the softmax
            probabilities before dropout, dropped entries negative.
        max_logit (with return_max_logit): (nheads,) in the dtype of softmax_lse, not differentiable. The largest logit
            of each head that enters the softmax, over batch, queries and visible keys: after softmax_scale, softcap
            and ALiBi, without the sink; -inf if no query sees a key, NaN if one of them is NaN or +inf.
"""


_Function = TypeVar("_Function", bound=Callable[..., Any])


def _documented(out: str, lse: str) -> Callable[[_Function], _Function]:
    """Fill the common sections into a docstring, so that each is written once."""

    def fill(function: _Function) -> _Function:
        if function.__doc__ is not None:  # None under python -OO
            result = _RESULT_DOC.format(out=out, lse=lse).strip()
            sections = {"<options>": _OPTIONS_DOC, "<descales>": _DESCALES_DOC, "<result>": result}
            for place, text in sections.items():
                function.__doc__ = function.__doc__.replace(place, text.strip())
        return function

    return fill


@_documented(out="(batch, seqlen_q, nheads, head_dim_v)", lse="(batch, nheads, seqlen_q)")
def flash_attn_func(
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
    sinks: Tensor | None = None,
    return_max_logit: bool = False,
    batch_invariant: bool = False,
    s_aux: Tensor | None = None,
    learnable_sink: Tensor | None = None,
    lse_convention: str = "fa2",
    q_descale: Descale = None,
    k_descale: Descale = None,
    v_descale: Descale = None,
    v_descale_axis: str | None = None,
    out_dtype: torch.dtype | None = None,
    exp: str = "exact",
) -> TensorOrTuple:
    """Attention over a batch of sequences of one length; MHA, GQA and MQA.

    Arguments:
        q: (batch, seqlen_q, nheads, head_dim)
        k: (batch, seqlen_k, nheads_k, head_dim)
        v: (batch, seqlen_k, nheads_k, head_dim_v)
        <options>
        <descales>

    <result>
    """
    return attend(
        (q, k, v), DENSE, dropout_p, softmax_scale, causal, window_size, softcap, alibi_slopes, deterministic,
        return_attn_probs, sinks, return_max_logit, batch_invariant, s_aux, learnable_sink, lse_convention,
        (q_descale, k_descale, v_descale, v_descale_axis, out_dtype, exp),
    )  # fmt: skip


@_documented(out="(batch, seqlen, nheads, head_dim)", lse="(batch, nheads, seqlen)")
def flash_attn_qkvpacked_func(
    qkv: Tensor,
    dropout_p: float = 0.0,
    softmax_scale: float | None = None,
    causal: bool = False,
    window_size: WindowSize = (-1, -1),
    softcap: float = 0.0,
    alibi_slopes: Tensor | None = None,
    deterministic: bool = False,
    return_attn_probs: bool = False,
    *,
    sinks: Tensor | None = None,
    return_max_logit: bool = False,
    batch_invariant: bool = False,
    s_aux: Tensor | None = None,
    learnable_sink: Tensor | None = None,
    lse_convention: str = "fa2",
) -> TensorOrTuple:
    """`flash_attn_func` with q, k and v in one tensor; its gradient is written in place, without concatenation.

    Arguments:
        qkv: (batch, seqlen, 3, nheads, head_dim)
        <options>

    <result>
    """
    return attend(
        (qkv,), DENSE, dropout_p, softmax_scale, causal, window_size, softcap, alibi_slopes, deterministic,
        return_attn_probs, sinks, return_max_logit, batch_invariant, s_aux, learnable_sink, lse_convention,
    )  # fmt: skip


@_documented(out="(batch, seqlen_q, nheads, head_dim)", lse="(batch, nheads, seqlen_q)")
def flash_attn_kvpacked_func(
    q: Tensor,
    kv: Tensor,
    dropout_p: float = 0.0,
    softmax_scale: float | None = None,
    causal: bool = False,
    window_size: WindowSize = (-1, -1),
    softcap: float = 0.0,
    alibi_slopes: Tensor | None = None,
    deterministic: bool = False,
    return_attn_probs: bool = False,
    *,
    sinks: Tensor | None = None,
    return_max_logit: bool = False,
    batch_invariant: bool = False,
    s_aux: Tensor | None = None,
    learnable_sink: Tensor | None = None,
    lse_convention: str = "fa2",
) -> TensorOrTuple:
    """`flash_attn_func` with k and v in one tensor; its gradient is written in place, without concatenation.

    Arguments:
        q: (batch, seqlen_q, nheads, head_dim)
        kv: (batch, seqlen_k, 2, nheads_k, head_dim)
        <options>

    <result>
    """
    return attend(
        (q, kv), DENSE, dropout_p, softmax_scale, causal, window_size, softcap, alibi_slopes, deterministic,
        return_attn_probs, sinks, return_max_logit, batch_invariant, s_aux, learnable_sink, lse_convention,
    )  # fmt: skip


@_documented(out="(total_q, nheads, head_dim_v)", lse="(nheads, total_q)")
def flash_attn_varlen_func(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    cu_seqlens_q: Tensor,
    cu_seqlens_k: Tensor,
    max_seqlen_q: int | Tensor,
    max_seqlen_k: int | Tensor,
    dropout_p: float = 0.0,
    softmax_scale: float | None = None,
    causal: bool = False,
    window_size: WindowSize = (-1, -1),
    softcap: float = 0.0,
    alibi_slopes: Tensor | None = None,
    deterministic: bool = False,
    return_attn_probs: bool = False,
    block_table: Tensor | None = None,
    *,
    seqused_q: Tensor | None = None,
    seqused_k: Tensor | None = None,
    leftpad_k: Tensor | None = None,
    sinks: Tensor | None = None,
    return_max_logit: bool = False,
    batch_invariant: bool = False,
    s_aux: Tensor | None = None,
    learnable_sink: Tensor | None = None,
    lse_convention: str = "fa2",
    q_descale: Descale = None,
    k_descale: Descale = None,
    v_descale: Descale = None,
    v_descale_axis: str | None = None,
    out_dtype: torch.dtype | None = None,
    exp: str = "exact",
) -> TensorOrTuple:
    """Attention over sequences of different lengths, concatenated without padding.

    Rows of q that belong to no sequence (beyond cu_seqlens_q[-1]) have output 0 and LSE +inf. Sequences of length 0
    are allowed. Nothing here synchronises with the GPU: cu_seqlens that are not sorted, or beyond the rows that exist,
    count as their running maximum within these, so that every row is written and none is read from outside.

    Arguments:
        q: (total_q, nheads, head_dim), total_q the number of queries of all sequences.
        k: (total_k, nheads_k, head_dim), or (num_pages, page_size, nheads_k, head_dim) with block_table.
        v: like k, its last axis head_dim_v.
        cu_seqlens_q: int32 or int64 (batch + 1,). Sequence i has the rows cu_seqlens_q[i] to cu_seqlens_q[i + 1] of q.
        cu_seqlens_k: int32 or int64 (batch + 1,), the same for k and v (lengths of keys, when paged).
        max_seqlen_q: int, or integer tensor of one element: an upper bound of the query lengths. It sizes S_dmask;
            no query is skipped if it is too small.
        max_seqlen_k: the same for the key lengths; no key is skipped either. Over 8-bit pages CUDA has memory for so
            many keys of a sequence; a call of longer ones is computed twice.
        <options>
        block_table: int32 (batch, max_pages). The pages of each sequence in k and v. Forward only.
        seqused_q: int32 or int64 (batch,). How many of the first rows of each sequence of q are in use, at most its
            length; keyword only. The others belong to no sequence, whatever they hold. Costs a sort of the rows and
            copies of q and out; nothing waits for the GPU.
        seqused_k: int32 (batch,). Number of keys of each sequence, of which cu_seqlens_k then gives the first row
            alone: they may go beyond the next sequence's. Keyword only. Forward only.
        leftpad_k: int32 (batch,). Number of keys skipped at the start of each sequence; they count in its length and
            in seqused_k; keyword only. Forward only.
        <descales>

    <result>
    """
    sequences = Sequences(cu_seqlens_q, cu_seqlens_k, max_seqlen_q, max_seqlen_k, seqused_k, leftpad_k, block_table)
    return attend_rows_in_use(
        seqused_q, (q, k, v), sequences, dropout_p, softmax_scale, causal, window_size, softcap, alibi_slopes,
        deterministic, return_attn_probs, sinks, return_max_logit, batch_invariant, s_aux, learnable_sink,
        lse_convention, (q_descale, k_descale, v_descale, v_descale_axis, out_dtype, exp),
    )  # fmt: skip


@_documented(out="(total, nheads, head_dim)", lse="(nheads, total)")
def flash_attn_varlen_qkvpacked_func(
    qkv: Tensor,
    cu_seqlens: Tensor,
    max_seqlen: int | Tensor,
    dropout_p: float = 0.0,
    softmax_scale: float | None = None,
    causal: bool = False,
    window_size: WindowSize = (-1, -1),
    softcap: float = 0.0,
    alibi_slopes: Tensor | None = None,
    deterministic: bool = False,
    return_attn_probs: bool = False,
    *,
    sinks: Tensor | None = None,
    return_max_logit: bool = False,
    batch_invariant: bool = False,
    s_aux: Tensor | None = None,
    learnable_sink: Tensor | None = None,
    lse_convention: str = "fa2",
) -> TensorOrTuple:
    """`flash_attn_varlen_func` with q, k and v in one tensor; its gradient is written in place.

    Arguments:
        qkv: (total, 3, nheads, head_dim), total the number of tokens of all sequences.
        cu_seqlens: int32 or int64 (batch + 1,). Sequence i has the rows cu_seqlens[i] to cu_seqlens[i + 1].
        max_seqlen: int, or integer tensor of one element: an upper bound of the lengths.
        <options>

    <result>
    """
    sequences = Sequences(cu_seqlens, cu_seqlens, max_seqlen, max_seqlen)
    return attend(
        (qkv,), sequences, dropout_p, softmax_scale, causal, window_size, softcap, alibi_slopes, deterministic,
        return_attn_probs, sinks, return_max_logit, batch_invariant, s_aux, learnable_sink, lse_convention,
    )  # fmt: skip


@_documented(out="(total_q, nheads, head_dim)", lse="(nheads, total_q)")
def flash_attn_varlen_kvpacked_func(
    q: Tensor,
    kv: Tensor,
    cu_seqlens_q: Tensor,
    cu_seqlens_k: Tensor,
    max_seqlen_q: int | Tensor,
    max_seqlen_k: int | Tensor,
    dropout_p: float = 0.0,
    softmax_scale: float | None = None,
    causal: bool = False,
    window_size: WindowSize = (-1, -1),
    softcap: float = 0.0,
    alibi_slopes: Tensor | None = None,
    deterministic: bool = False,
    return_attn_probs: bool = False,
    *,
    sinks: Tensor | None = None,
    return_max_logit: bool = False,
    batch_invariant: bool = False,
    s_aux: Tensor | None = None,
    learnable_sink: Tensor | None = None,
    lse_convention: str = "fa2",
) -> TensorOrTuple:
    """`flash_attn_varlen_func` with k and v in one tensor; its gradient is written in place.

    Arguments:
        q: (total_q, nheads, head_dim)
        kv: (total_k, 2, nheads_k, head_dim)
        cu_seqlens_q, cu_seqlens_k, max_seqlen_q, max_seqlen_k: as in `flash_attn_varlen_func`.
        <options>

    <result>
    """
    sequences = Sequences(cu_seqlens_q, cu_seqlens_k, max_seqlen_q, max_seqlen_k)
    return attend(
        (q, kv), sequences, dropout_p, softmax_scale, causal, window_size, softcap, alibi_slopes, deterministic,
        return_attn_probs, sinks, return_max_logit, batch_invariant, s_aux, learnable_sink, lse_convention,
    )  # fmt: skip
