"""FlashAttention-3's public functions, computed by flash_attn: the same arguments, results and conventions.

softmax_lse of a fully masked row is -inf here. Descales are (batch, nheads_k), or what `flash_attn.flash_attn_func`
takes; those of wider tensors have no effect. num_splits, pack_gqa and scheduler_metadata have none on the result;
attention_chunk, cu_seqlens_k_new, rotary_seqlens and, but for `flash_attn_with_kvcache`, qv raise NotImplementedError.
sinks, also named s_aux and learnable_sink, and out are keyword only.
"""

from __future__ import annotations

import torch
from torch import Tensor

import flash_attn
from flash_attn import explanation
from flash_attn._docstrings import documented
from flash_attn._types import TensorOrTuple, WindowSize
from flash_attn.flash_attn_interface import attend, attend_rows_in_use
from flash_attn.ops import arguments, context
from flash_attn.ops.attention_args import DENSE, Options, Sequences
from flash_attn.ops.lse import mark_masked_rows
from flash_attn.ops.quant_args import NO_QUANT
from flash_attn.ops.rows import RowsInUse
from flash_attn_3 import _checks
from flash_attn_3._C import no_scratch, scheduler_metadata
from flash_attn_3._forward import over_cache, packed_over_cache
from flash_attn_3._operators import _flash_attn_backward as _flash_attn_backward
from flash_attn_3._operators import _flash_attn_forward as _flash_attn_forward

__all__ = [
    "flash_attn_combine",
    "flash_attn_func",
    "flash_attn_qkvpacked_func",
    "flash_attn_varlen_func",
    "flash_attn_with_kvcache",
    "get_scheduler_metadata",
]

flash_attn_3_gpu = torch.ops.flash_attn_3


# flash_attn's name of an argument: the one here, where they differ.
_CACHE_NAMES = {"block_table": "page_table"}
_PACKED_NAMES = {
    "k": "k_cache",
    "v": "v_cache",
    "seqused_k": "cache_seqlens",
    "leftpad_k": "cache_leftpad",
    "kv_batch_idx": "cache_batch_idx",
}

_PARTS_OF_QKV = {"q": "qkv", "k": "qkv", "v": "qkv"}
_METADATA_NAMES = {
    "num_heads": "num_heads_q",
    "num_heads_k": "num_heads_kv",
    "seqused_k": "cache_seqlens",
    "leftpad_k": "cache_leftpad",
    "is_causal": "causal",
}


def _result(result: TensorOrTuple, wanted: bool) -> TensorOrTuple:
    """What a function returns from (out, lse, ...) of flash_attn if the LSE is wanted, else out."""
    return (result[0], mark_masked_rows(result[1])) if wanted else result


@documented(out="(batch, seqlen_q, nheads, head_dim_v)", lse="(batch, nheads, seqlen_q)")
def flash_attn_func(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    softmax_scale: float | None = None,
    causal: bool = False,
    qv: Tensor | None = None,
    q_descale: Tensor | None = None,
    k_descale: Tensor | None = None,
    v_descale: Tensor | None = None,
    window_size: WindowSize = (-1, -1),
    attention_chunk: int = 0,
    softcap: float = 0.0,
    num_splits: int = 1,
    pack_gqa: bool | None = None,
    deterministic: bool = False,
    sm_margin: int = 0,
    return_attn_probs: bool = False,
    *,
    sinks: Tensor | None = None,
    s_aux: Tensor | None = None,
    learnable_sink: Tensor | None = None,
    out: Tensor | None = None,
) -> TensorOrTuple:
    """Exact attention over a batch of sequences of one length: softmax(softmax_scale * Q K^T + mask) V.

    Arguments:
        q: (batch, seqlen_q, nheads, head_dim), float16, bfloat16 or float8_e4m3fn; on the CPU float32 and float64 too.
        k: (batch, seqlen_k, nheads_k, head_dim) of q's dtype. Query head i reads K/V head i // (nheads / nheads_k).
        v: (batch, seqlen_k, nheads_k, head_dim_v) of q's dtype. Any strides. Head dims up to 512, of 8-bit tensors
            on CUDA 256.
        <fa3_descales>
        <fa3_options>
        <fa3_unserved>

    Keyword arguments:
        <fa3_keywords>

    <fa3_result>
    """
    _checks.reject_unsupported(qv, attention_chunk)
    _checks.unused(num_splits, pack_gqa)
    sinks = arguments.named_sinks(sinks, s_aux, learnable_sink)
    arguments.check_tensors(("q", "k", "v"), (q, k, v))
    options = Options(
        quant=_checks.quant_args(q, k, v, q_descale, k_descale, v_descale, out), sm_margin=sm_margin, out=out
    )
    result = attend(
        (q, k, v),
        DENSE,
        0.0,
        softmax_scale,
        causal,
        window_size,
        softcap,
        None,
        deterministic,
        return_attn_probs,
        True,
        sinks,
        options,
    )
    return _result(result, return_attn_probs)


@documented(out="(batch, seqlen, nheads, head_dim)", lse="(batch, nheads, seqlen)")
def flash_attn_qkvpacked_func(
    qkv: Tensor,
    softmax_scale: float | None = None,
    causal: bool = False,
    q_descale: Tensor | None = None,
    k_descale: Tensor | None = None,
    v_descale: Tensor | None = None,
    window_size: WindowSize = (-1, -1),
    attention_chunk: int = 0,
    softcap: float = 0.0,
    deterministic: bool = False,
    num_heads_q: int | None = None,
    sm_margin: int = 0,
    return_attn_probs: bool = False,
    *,
    sinks: Tensor | None = None,
    s_aux: Tensor | None = None,
    learnable_sink: Tensor | None = None,
) -> TensorOrTuple:
    """Exact attention with q, k and v in one tensor: softmax(softmax_scale * Q K^T + mask) V.

    Arguments:
        qkv: (batch, seqlen, 3, nheads, head_dim), or (batch, seqlen, num_heads_q + 2 * nheads_k, head_dim); float16,
            bfloat16 or float8_e4m3fn, on the CPU float32 and float64 too. Head dims up to 512, of 8-bit tensors on
            CUDA 256.
        <fa3_descales>
        <fa3_options>
        attention_chunk: int, has to be 0, others raise NotImplementedError.
        num_heads_q: int. Heads of q among those of the second form.

    Keyword arguments:
        <sinks>

    <fa3_result>
    """
    _checks.reject_unsupported(None, attention_chunk)
    arguments.check_tensors(("qkv",), (qkv,))
    sinks = arguments.named_sinks(sinks, s_aux, learnable_sink)
    quant = _checks.quant_args(qkv, qkv, qkv, q_descale, k_descale, v_descale)
    score = (0.0, softmax_scale, causal, window_size, softcap, None, deterministic, return_attn_probs, True, sinks)
    options = (*score, Options(quant=quant, sm_margin=sm_margin))
    if num_heads_q is not None:
        arguments.integer("num_heads_q", num_heads_q)
    if qkv.dim() == 5 and quant is not NO_QUANT and qkv.shape[2] == 3:
        return _result(attend(qkv.unbind(2), DENSE, *options), return_attn_probs)
    if qkv.dim() != 4:
        return _result(attend((qkv,), DENSE, *options), return_attn_probs)
    heads = _checks.split_heads(qkv, num_heads_q)
    try:
        return _result(attend(heads, DENSE, *options), return_attn_probs)
    except _checks.ERRORS as error:
        raise _checks.renamed(error, _PARTS_OF_QKV) from None


@documented(out="(total_q, nheads, head_dim_v)", lse="(nheads, total_q)")
def flash_attn_varlen_func(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    cu_seqlens_q: Tensor,
    cu_seqlens_k: Tensor,
    max_seqlen_q: int | Tensor,
    max_seqlen_k: int | Tensor,
    seqused_q: Tensor | None = None,
    seqused_k: Tensor | None = None,
    softmax_scale: float | None = None,
    causal: bool = False,
    qv: Tensor | None = None,
    q_descale: Tensor | None = None,
    k_descale: Tensor | None = None,
    v_descale: Tensor | None = None,
    window_size: WindowSize = (-1, -1),
    attention_chunk: int = 0,
    softcap: float = 0.0,
    num_splits: int = 1,
    pack_gqa: bool | None = None,
    deterministic: bool = False,
    sm_margin: int = 0,
    return_attn_probs: bool = False,
    *,
    sinks: Tensor | None = None,
    s_aux: Tensor | None = None,
    learnable_sink: Tensor | None = None,
    out: Tensor | None = None,
) -> TensorOrTuple:
    """Exact attention over sequences of different lengths, concatenated without padding.

    Rows of q that belong to no sequence, or are not in use, have output 0 and LSE -inf. Nothing waits for the GPU.

    Arguments:
        q: (total_q, nheads, head_dim), float16, bfloat16 or float8_e4m3fn; on the CPU float32 and float64 too.
        k: (total_k, nheads_k, head_dim) of q's dtype. Query head i reads K/V head i // (nheads / nheads_k).
        v: (total_k, nheads_k, head_dim_v) of q's dtype. Any strides. Head dims up to 512, of 8-bit tensors
            on CUDA 256.
        cu_seqlens_q: int32 or int64 (batch + 1,). Sequence i has the rows cu_seqlens_q[i] to cu_seqlens_q[i + 1] of q.
        cu_seqlens_k: int32 or int64 (batch + 1,), the same for k and v.
        max_seqlen_q, max_seqlen_k: int, or integer tensor of one element: upper bounds of the lengths.
        seqused_q: int32 (batch,). How many of the first rows of each sequence of q are in use. Costs copies of q and
            of the result.
        seqused_k: int32 (batch,). The same for k and v, at no cost; in training it costs copies of them.
        <fa3_descales>
        <fa3_options>
        <fa3_unserved>

    Keyword arguments:
        <fa3_keywords>

    <fa3_result>
    """
    _checks.reject_unsupported(qv, attention_chunk)
    _checks.unused(num_splits, pack_gqa)
    sinks = arguments.named_sinks(sinks, s_aux, learnable_sink)
    arguments.check_tensors(("q", "k", "v"), (q, k, v))
    quant = _checks.quant_args(q, k, v, q_descale, k_descale, v_descale, out)
    if seqused_k is not None and context.records_gradients(q, k, v, sinks):
        _checks.packed(q, k, v, cu_seqlens_q, cu_seqlens_k)
        keys = RowsInUse(cu_seqlens_k, seqused_k, k, "k")
        k, v, cu_seqlens_k, seqused_k = keys.gather(k), keys.gather(v), keys.cu_seqlens, None
    sequences = Sequences(cu_seqlens_q, cu_seqlens_k, max_seqlen_q, max_seqlen_k, seqused_k)
    result = attend_rows_in_use(
        seqused_q,
        (q, k, v),
        sequences,
        0.0,
        softmax_scale,
        causal,
        window_size,
        softcap,
        None,
        deterministic,
        return_attn_probs,
        True,
        sinks,
        Options(quant=quant, sm_margin=sm_margin, out=out),
    )
    return _result(result, return_attn_probs)


@documented()
def flash_attn_with_kvcache(
    q: Tensor,
    k_cache: Tensor,
    v_cache: Tensor,
    k: Tensor | None = None,
    v: Tensor | None = None,
    qv: Tensor | None = None,
    rotary_cos: Tensor | None = None,
    rotary_sin: Tensor | None = None,
    cache_seqlens: int | Tensor | None = None,
    cache_batch_idx: Tensor | None = None,
    cache_leftpad: Tensor | None = None,
    page_table: Tensor | None = None,
    cu_seqlens_q: Tensor | None = None,
    cu_seqlens_k_new: Tensor | None = None,
    max_seqlen_q: int | None = None,
    rotary_seqlens: Tensor | None = None,
    q_descale: Tensor | None = None,
    k_descale: Tensor | None = None,
    v_descale: Tensor | None = None,
    softmax_scale: float | None = None,
    causal: bool = False,
    window_size: WindowSize = (-1, -1),
    attention_chunk: int = 0,
    softcap: float = 0.0,
    rotary_interleaved: bool = True,
    scheduler_metadata: Tensor | None = None,
    num_splits: int = 0,
    pack_gqa: bool | None = None,
    sm_margin: int = 0,
    return_softmax_lse: bool = False,
    *,
    sinks: Tensor | None = None,
    s_aux: Tensor | None = None,
    learnable_sink: Tensor | None = None,
    out: Tensor | None = None,
) -> TensorOrTuple:
    """Exact attention of new queries over a KV cache, which first receives the new k and v in place. No backward.

    Keys of sequence i: cache_seqlens[i] cached ones, then the seqlen_new rows of k; seqlen_k is their sum. Other rows
    of the cache are neither read nor written. A sequence with cache_seqlens[i] = -1 is an inactive request: its out is
    0, its LSE -inf. The call does not wait for the GPU; there a sequence that does not fit into the cache, or needs a
    page that does not exist, is such a request, which on the CPU is an error.

    Arguments:
        q: (batch, seqlen_q, nheads, head_dim), or (total_q, nheads, head_dim) with cu_seqlens_q; float16, bfloat16 or
            float8_e4m3fn, on the CPU float32 and float64 too. Head dims up to 512, of 8-bit tensors on CUDA 256.
        k_cache: (batch_cache, seqlen_cache, nheads_k, head_dim), or (num_pages, page_size, nheads_k, head_dim) with
            page_table, of any page size; q's dtype or float8_e4m3fn. Any strides with a contiguous last dimension.
        v_cache: like k_cache; without new keys its head dim may be another.
        k: (batch, seqlen_new, nheads_k, head_dim). Written to rows cache_seqlens[i] onwards of k_cache.
        v: like k.
        qv: (batch, seqlen_q, nheads, head_dim_v), or packed like q, of q's dtype. Scores are then Q K^T + QV V^T, and
            the default softmax_scale 1 / sqrt(head_dim + head_dim_v). On CUDA head_dim is 64, head_dim_v 512, nheads_k
            1 and page_table given, and new keys, a window and softcap are not.
        cu_seqlens_k_new, rotary_seqlens: None: not supported, tensors raise NotImplementedError.
        rotary_cos: (seqlen_rotary, rotary_dim / 2). Rotates k, and q, by their positions before use: from
            cache_seqlens[i] onwards (all queries by cache_seqlens[i] if neither causal nor a window is asked).
        rotary_sin: like rotary_cos.
        cache_seqlens: int, or int32 or int64 (batch,). Keys in the cache before the new ones. Default: the capacity.
        cache_batch_idx: int32 (batch,). The row of the cache of each sequence. Default: 0 .. batch - 1.
        cache_leftpad: int32 (batch,). Rows skipped at the start of each cached sequence; they count in cache_seqlens.
        page_table: int32 (batch, max_pages). The pages of each sequence in k_cache and v_cache.
        cu_seqlens_q: int32 (batch + 1,). Where each sequence of packed queries begins: prefill and decode in one call.
            Not with new keys (k, v) or rotary embedding.
        q_descale, k_descale, v_descale: float32 (batch, nheads_k), of float8_e4m3fn q, k_cache and v_cache: values are
            stored value * descale. One element, or a number, too. None is 1; of wider tensors without effect.
        <scores>
        attention_chunk: int, has to be 0, others raise NotImplementedError.
        rotary_interleaved: bool. Rotate the pairs (0, 1), (2, 3), ... (GPT-J) instead of the two halves (GPT-NeoX).
        num_splits: int. The most splits of a sequence's keys; 0 chooses. Does not change what is computed.
        scheduler_metadata, pack_gqa, max_seqlen_q: accepted for FlashAttention-3's sake, without effect on the result.
        sm_margin: int. Multiprocessors that persistent grids leave to other kernels; on CPU tensors no effect.
        return_softmax_lse: bool. Also return the LSE.

    Keyword arguments:
        <sinks>
        out: a tensor for the result, which is returned. float16 or bfloat16 for float8_e4m3fn q.

    Returns:
        out: (batch, seqlen_q, nheads, head_dim_v), or (total_q, nheads, head_dim_v); with return_softmax_lse
            (out, softmax_lse, empty, empty).
        softmax_lse: (batch, nheads, seqlen_q) or (nheads, total_q) float32 (float64 for float64 q), natural logarithm
            of the sum of exp(scores) of each row, the sink included; -inf in a row that sees no key, whose out is 0.
        empty: tensors in the place of the partial results that FlashAttention-3 has of its splits.

    <errors>
    """
    _checks.reject_unsupported(None, attention_chunk, cu_seqlens_k_new, rotary_seqlens)
    num_splits = _checks.unused(num_splits, pack_gqa, scheduler_metadata, max_seqlen_q)
    rotary_interleaved = arguments.flag("rotary_interleaved", rotary_interleaved)
    arguments.check_tensors(("q", "k_cache", "v_cache"), (q, k_cache, v_cache))
    arguments.check_optional_tensors(("qv",), (qv,))
    quant = _checks.quant_args(q, k_cache, v_cache, q_descale, k_descale, v_descale, out)
    sinks = arguments.named_sinks(sinks, s_aux, learnable_sink)
    score = (softmax_scale, causal, window_size, softcap)
    options = Options(quant=quant, sm_margin=sm_margin, out=out, qv=qv)
    where = (cache_seqlens, cache_batch_idx, cache_leftpad, page_table)
    new = (k, v, rotary_cos, rotary_sin)
    appends = any(x is not None for x in new)
    if appends:
        _checks.reject_beside("with new keys or rotary embedding", cu_seqlens_q=cu_seqlens_q)
    has_one_dim = qv is not None or v_cache.shape[-1:] == q.shape[-1:]
    if appends or (cu_seqlens_q is None and has_one_dim):
        result, lse = over_cache(
            q,
            k_cache,
            v_cache,
            *new,
            *where,
            *score,
            rotary_interleaved,
            num_splits,
            options,
            sinks,
            names=_CACHE_NAMES,
        )
    else:
        result, lse = packed_over_cache(
            q, k_cache, v_cache, *where, cu_seqlens_q, None, score, options, sinks, names=_PACKED_NAMES
        )
    if not return_softmax_lse:
        return result
    return result, mark_masked_rows(lse), no_scratch(lse), no_scratch(lse)


@documented()
def flash_attn_combine(
    out_partial: Tensor, lse_partial: Tensor, out: Tensor | None = None, out_dtype: torch.dtype | None = None
) -> tuple[Tensor, Tensor]:
    """Attention over all keys from its partial results over disjoint splits of them.

    With w_i = exp(lse_i - lse): out = sum of w_i out_i, lse = log of the sum of exp(lse_i). An LSE of +inf or -inf
    marks a split that masks the row fully; its out_partial is not read. A row that every split masks fully has out 0
    and LSE -inf. Differentiable in out_partial and lse_partial, unless out is given.

    Arguments:
        out_partial: (num_splits, batch, seqlen, nheads, head_dim), float16, bfloat16 or float32; float64 on the CPU.
        lse_partial: (num_splits, batch, seqlen, nheads) float32 (float64 for float64), natural logarithm, any strides.
        out: (batch, seqlen, nheads, head_dim) of any of these dtypes. Receives the result and is returned.
        out_dtype: torch.dtype of the result. Default: that of out_partial.

    Returns:
        out: (batch, seqlen, nheads, head_dim)
        lse: (batch, seqlen, nheads), of the dtype of lse_partial.

    <errors>
    """
    out, lse = flash_attn.flash_attn_combine(out_partial, lse_partial, out, out_dtype)
    return out, mark_masked_rows(lse)


@documented()
def get_scheduler_metadata(
    batch_size: int,
    max_seqlen_q: int,
    max_seqlen_k: int,
    num_heads_q: int,
    num_heads_kv: int,
    headdim: int,
    cache_seqlens: Tensor,
    qkv_dtype: torch.dtype = torch.bfloat16,
    headdim_v: int | None = None,
    cu_seqlens_q: Tensor | None = None,
    cu_seqlens_k_new: Tensor | None = None,
    cache_leftpad: Tensor | None = None,
    page_size: int | None = None,
    max_seqlen_k_new: int = 0,
    causal: bool = False,
    window_size: WindowSize = (-1, -1),
    attention_chunk: int = 0,
    has_softcap: bool = False,
    num_splits: int = 0,
    pack_gqa: bool | None = None,
    sm_margin: int = 0,
) -> Tensor:
    """An empty int32 tensor on the device of cache_seqlens: nothing has to be scheduled before a call here.

    Passing it as scheduler_metadata has no effect. `flash_attn.KvCachePlan` plans calls.

    The arguments are checked and have no other effect.

    Arguments:
        batch_size, max_seqlen_q, max_seqlen_k, num_heads_q, num_heads_kv, headdim, headdim_v, page_size: int, sizes.
        cache_seqlens: int32 (batch_size,).
        cu_seqlens_q, cache_leftpad: tensors or None.
        qkv_dtype: torch.dtype.
        max_seqlen_k_new, num_splits, sm_margin: int.
        causal, has_softcap, pack_gqa: bool.
        window_size: (left, right) in keys.
        cu_seqlens_k_new: None; others raise NotImplementedError.
        attention_chunk: 0; others raise NotImplementedError.

    <errors>
    """
    try:
        return scheduler_metadata(
            batch_size,
            max_seqlen_q,
            max_seqlen_k,
            num_heads_q,
            num_heads_kv,
            headdim,
            headdim if headdim_v is None else headdim_v,
            qkv_dtype,
            cache_seqlens,
            cu_seqlens_q,
            None,
            cu_seqlens_k_new,
            None,
            cache_leftpad,
            page_size,
            max_seqlen_k_new,
            causal,
            *arguments.window(window_size),
            attention_chunk,
            has_softcap,
            num_splits,
            pack_gqa,
            sm_margin,
        )
    except _checks.ERRORS as error:
        raise _checks.renamed(error, _METADATA_NAMES) from None


explanation.add_functions(flash_attn_func, flash_attn_qkvpacked_func, flash_attn_varlen_func, flash_attn_with_kvcache)
