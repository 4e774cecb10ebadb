"""FlashAttention-3's public functions, computed by flash_attn: the same arguments, results and conventions.

The rules of `flash_attn` hold (dtypes, heads, head dims, positions, errors), but:

softmax_lse  of a fully masked row is -inf here.
8 bits       q, k and v of float8_e4m3fn with q_descale, k_descale, v_descale (batch, nheads_k), and all else that
             `flash_attn.flash_attn_func` takes. Descales of wider tensors have no effect, as there.
accepted     and without effect on the result: num_splits, pack_gqa, scheduler_metadata.
sm_margin    int: multiprocessors that persistent grids leave to other kernels; on CPU tensors no effect.
rejected     with NotImplementedError that names it: qv, attention_chunk, cu_seqlens_k_new, rotary_seqlens.
sinks        (nheads,), also named s_aux and learnable_sink: as in `flash_attn.flash_attn_func`; keyword only.
out          a tensor for the result, which is returned; keyword only, without gradients.
"""

from __future__ import annotations

from typing import Any, Union

import torch
from torch import Tensor

import flash_attn
from flash_attn import explanation
from flash_attn._types import WindowSize
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

TensorOrTuple = Union[Tensor, Any]


# flash_attn's name of an argument: the one here, where they differ.
_CACHE_NAMES = {"block_table": "page_table"}
_PACKED_NAMES = {
    "k": "k_cache", "v": "v_cache", "seqused_k": "cache_seqlens", "leftpad_k": "cache_leftpad",
    "kv_batch_idx": "cache_batch_idx",
}  # fmt: skip

_PARTS_OF_QKV = {"q": "qkv", "k": "qkv", "v": "qkv"}
_METADATA_NAMES = {
    "num_heads": "num_heads_q", "num_heads_k": "num_heads_kv", "seqused_k": "cache_seqlens",
    "leftpad_k": "cache_leftpad", "is_causal": "causal",
}  # fmt: skip


def _result(result: Any, wanted: Any) -> TensorOrTuple:
    """What a function returns from (out, lse, ...) of flash_attn if the LSE is wanted, else out."""
    return (result[0], mark_masked_rows(result[1])) if wanted else result


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
    """Attention over a batch of sequences of one length; MHA, GQA and MQA.

    Arguments:
        q: (batch, seqlen_q, nheads, head_dim)
        k: (batch, seqlen_k, nheads_k, head_dim)
        v: (batch, seqlen_k, nheads_k, head_dim_v)
        softmax_scale, causal, window_size, softcap, deterministic: as in `flash_attn.flash_attn_func`.
        return_attn_probs: bool. Also return the LSE.

    Returns:
        out: (batch, seqlen_q, nheads, head_dim_v)
        softmax_lse (with return_attn_probs): (batch, nheads, seqlen_q) float32.
    """
    _checks.reject_unsupported(qv, attention_chunk)
    _checks.unused(num_splits, pack_gqa)
    sinks = arguments.named_sinks(sinks, s_aux, learnable_sink)
    arguments.check_tensors(("q", "k", "v"), (q, k, v))
    options = Options(
        quant=_checks.quant_args(q, k, v, q_descale, k_descale, v_descale, out), sm_margin=sm_margin, out=out
    )
    result = attend(
        (q, k, v), DENSE, 0.0, softmax_scale, causal, window_size, softcap, None, deterministic, return_attn_probs,
        True, sinks, options,
    )  # fmt: skip
    return _result(result, return_attn_probs)


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
    """`flash_attn_func` with q, k and v in one tensor.

    Arguments:
        qkv: (batch, seqlen, 3, nheads, head_dim), or (batch, seqlen, num_heads_q + 2 * nheads_k, head_dim).
        num_heads_q: int. Heads of q among those of the second form.
        All others and the results: as in `flash_attn_func`.
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
    """Attention over sequences of different lengths, concatenated without padding.

    Rows of q that belong to no sequence, or are not in use, have output 0 and LSE -inf.

    Arguments:
        q: (total_q, nheads, head_dim)
        k: (total_k, nheads_k, head_dim)
        v: (total_k, nheads_k, head_dim_v)
        cu_seqlens_q, cu_seqlens_k, max_seqlen_q, max_seqlen_k: as in `flash_attn.flash_attn_varlen_func`.
        seqused_q: int32 (batch,). How many of the first rows of each sequence of q are in use. Costs copies of q and
            of the result.
        seqused_k: int32 (batch,). The same for k and v, at no cost; in training it costs copies of them.
        All others: as in `flash_attn_func`.

    Returns:
        out: (total_q, nheads, head_dim_v)
        softmax_lse (with return_attn_probs): (nheads, total_q) float32.
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
        seqused_q, (q, k, v), sequences, 0.0, softmax_scale, causal, window_size, softcap, None, deterministic,
        return_attn_probs, True, sinks, Options(quant=quant, sm_margin=sm_margin, out=out),
    )  # fmt: skip
    return _result(result, return_attn_probs)


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
    """Attention of new queries over a KV cache, which first receives the new k and v in place. No backward.

    Arguments:
        q: (batch, seqlen_q, nheads, head_dim), or (total_q, nheads, head_dim) with cu_seqlens_q.
        v_cache: like k_cache; without new keys it may have another head dim.
        page_table: int32 (batch, max_pages), the block_table of `flash_attn.flash_attn_with_kvcache`, whose arguments
            the others are, and whose rules hold.
        cu_seqlens_q: int32 (batch + 1,). Where each sequence of packed queries begins: prefill and decode in one call.
            Not with new keys (k, v) or rotary embedding; no more is another head dim of v_cache.
        max_seqlen_q: int; not needed.
        num_splits: int. As there; does not change what is computed.

    Returns:
        out: (batch, seqlen_q, nheads, head_dim_v), or (total_q, nheads, head_dim_v).
        with return_softmax_lse: out, softmax_lse (batch, nheads, seqlen_q) or (nheads, total_q) float32, and two empty
            tensors where FlashAttention-3 has the partial results of its splits.
    """
    _checks.reject_unsupported(qv, attention_chunk, cu_seqlens_k_new, rotary_seqlens)
    num_splits = _checks.unused(num_splits, pack_gqa, scheduler_metadata, max_seqlen_q)
    rotary_interleaved = arguments.flag("rotary_interleaved", rotary_interleaved)
    arguments.check_tensors(("q", "k_cache", "v_cache"), (q, k_cache, v_cache))
    quant = _checks.quant_args(q, k_cache, v_cache, q_descale, k_descale, v_descale, out)
    sinks = arguments.named_sinks(sinks, s_aux, learnable_sink)
    score = (softmax_scale, causal, window_size, softcap)
    options: dict[str, Any] = {"quant": quant, "sm_margin": sm_margin, "out": out, "sinks": sinks}
    where = (cache_seqlens, cache_batch_idx, cache_leftpad, page_table)
    new = (k, v, rotary_cos, rotary_sin)
    appends = any(x is not None for x in new)
    if appends:
        _checks.reject_beside("with new keys or rotary embedding", cu_seqlens_q=cu_seqlens_q)
    if appends or (cu_seqlens_q is None and v_cache.shape[-1:] == q.shape[-1:]):
        result, lse = over_cache(
            q, k_cache, v_cache, *new, *where, *score, rotary_interleaved, num_splits, names=_CACHE_NAMES, **options
        )  # fmt: skip
    else:
        result, lse = packed_over_cache(
            q, k_cache, v_cache, *where, cu_seqlens_q, None, *score, names=_PACKED_NAMES, **options
        )  # fmt: skip
    if not return_softmax_lse:
        return result
    return result, mark_masked_rows(lse), no_scratch(lse), no_scratch(lse)


def flash_attn_combine(
    out_partial: Tensor, lse_partial: Tensor, out: Tensor | None = None, out_dtype: torch.dtype | None = None
) -> tuple[Tensor, Tensor]:
    """`flash_attn.flash_attn_combine`, with LSE -inf where every split masks the row fully."""
    out, lse = flash_attn.flash_attn_combine(out_partial, lse_partial, out, out_dtype)
    return out, mark_masked_rows(lse)


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
    """
    try:
        return scheduler_metadata(
            batch_size, max_seqlen_q, max_seqlen_k, num_heads_q, num_heads_kv, headdim,
            headdim if headdim_v is None else headdim_v, qkv_dtype, cache_seqlens, cu_seqlens_q, None, cu_seqlens_k_new,
            None, cache_leftpad, page_size, max_seqlen_k_new, causal, *arguments.window(window_size), attention_chunk,
            has_softcap, num_splits, pack_gqa, sm_margin,
        )  # fmt: skip
    except _checks.ERRORS as error:
        raise _checks.renamed(error, _METADATA_NAMES) from None


explanation.add_functions(
    flash_attn_func, flash_attn_qkvpacked_func, flash_attn_varlen_func, flash_attn_with_kvcache
)  # fmt: skip
