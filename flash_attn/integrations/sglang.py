"""SGLang's FlashAttention backend by these kernels: its functions, and the attention backend that calls them.

`flash_attn_with_kvcache` and `flash_attn_varlen_func` have the signatures of sglang.kernels.ops.attention
.flash_attention (SGLang 0.5.23), which has those of sgl_kernel.flash_attn and more. `register` makes an attention
backend of them, `replace_fa3` makes them that of the name "fa3"; name one as an entry point of the group
"sglang.srt.plugins". docs/integrations.md lists the supported calls.
"""

from __future__ import annotations

import importlib
import logging

from torch import Tensor

from flash_attn._types import Scores, TensorOrTuple, WindowSize
from flash_attn.inference import attend_over_cache
from flash_attn.integrations.serving import falling_back, packed_attention, reject, reject_8_bit, warn_once
from flash_attn.ops.lse import mark_masked_rows
from flash_attn.ops.rows import length_of_each, pack, unpack

logger = logging.getLogger(__name__)
NAME = "fa_native"
_CACHE_NAMES = ("q", "k_cache", "v_cache")
_FUNCTIONS = ("flash_attn_with_kvcache", "flash_attn_varlen_func")
_LAYERS = "sglang.srt.layers.attention"
# SGLang's lists of backends by what they may do, and its functions that extend these.
_CHOICES = {
    "ATTENTION_BACKEND_CHOICES": "add_attention_backend_choices",
    "DRAFT_ATTENTION_BACKEND_CHOICES": "add_draft_attention_backend_choices",
    "DETERMINISTIC_ATTENTION_BACKEND_CHOICES": "add_deterministic_attention_backend_choices",
    "RADIX_SUPPORTED_DETERMINISTIC_ATTENTION_BACKEND": "add_radix_supported_deterministic_attention_backend_choices",
}
_CHUNKED_PREFIX = "CHUNKED_PREFIX_CACHE_SUPPORTED_ATTENTION_BACKENDS", "add_chunked_prefix_cache_attention_backend"


def register(name: str = NAME) -> bool:
    """Make an attention backend of SGLang, for `--attention-backend NAME`: its FlashAttention backend on these kernels.

    The name is one of those that SGLang admits for draft models, deterministic inference, with a radix cache too, and
    chunked prefixes. Models and features that ask for "fa3" by name do not know it: `replace_fa3`.

    Returns whether it is registered. Where SGLang or its registry is missing nothing changes, and one warning says why.
    """
    try:
        registry = importlib.import_module(f"{_LAYERS}.attention_registry")
        choices = importlib.import_module("sglang.srt.server_args")
        for listed, add in _CHOICES.items():
            if name not in getattr(choices, listed):
                getattr(choices, add)([name])
        listed, add = _CHUNKED_PREFIX
        if name not in getattr(choices, listed):
            getattr(choices, add)(name)
        registry.register_attention_backend(name)(_create_backend)
    except Exception as error:  # a plugin does not end the server
        warn_once(logger, f"attention backend {name} is not registered: SGLang's registry cannot be used ({error})")
        return False
    return True


def replace_fa3() -> bool:
    """Make these kernels SGLang's backend "fa3": for models and features that admit backends by that name alone."""
    return register("fa3")


def _create_backend(runner: object) -> object:
    """SGLang's FlashAttention backend for a model runner; its module calls these functions from now on.

    Calls that they do not support go to SGLang's functions.
    """
    module = importlib.import_module(f"{_LAYERS}.flashattention_backend")
    backend = module.FlashAttentionBackend(runner)
    for name in _FUNCTIONS:
        for owner in (module, backend):
            theirs = getattr(owner, name)
            if theirs.__module__ != __name__:
                setattr(owner, name, falling_back(globals()[name], theirs, logger))
    backend._get_scheduler_metadata = None  # nothing has to be scheduled before a call
    return backend


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
    attention_chunk: int | None = None,
    softcap: float = 0.0,
    rotary_interleaved: bool = True,
    scheduler_metadata: Tensor | None = None,
    num_splits: int = 0,
    pack_gqa: bool | None = None,
    only_qv: bool = False,
    sm_margin: int = 0,
    return_softmax_lse: bool = False,
    sinks: Tensor | None = None,
    score_mod: object = None,
    aux_tensors: object = None,
    sfq: Tensor | None = None,
    sfk: Tensor | None = None,
    sfv: Tensor | None = None,
    rel_bias: object = None,
    rel_bias_prep_cache: object = None,
    ver: int = 3,
    out: Tensor | None = None,
    max_seqlen_k: int | None = None,
    mask_mod: object = None,
) -> TensorOrTuple:
    """Attention over a KV cache as SGLang calls it: packed queries, prompts and decoding in one, over pages.

    Arguments:
        q: (total_q, nheads, head_dim) with cu_seqlens_q, or (batch, seqlen_q, nheads, head_dim).
        k_cache, v_cache: pages with page_table, else (batch_cache, seqlen_cache, nheads_k, head_dim). v_cache may have
            another head dim where there are no new keys.
        k, v: (batch, seqlen_new, nheads_k, head_dim) new rows, appended in place at cache_seqlens; q is then a batch.
        rotary_cos, rotary_sin: (seqlen_rotary, rotary_dim / 2) of q's dtype. Rotate q, which is then a batch, and k.
        cache_seqlens: int, or int32 or int64 (batch,). Keys of each sequence, without the new ones.
        cache_batch_idx: int32 or int64 (batch,). The cache row of each sequence, for q in a batch.
        cache_leftpad: int32 (batch,). Rows of padding before the keys; cache_seqlens includes them.
        page_table: int32 (batch, max_pages). The pages of each sequence.
        cu_seqlens_q: int32 or int64 (batch + 1,). Sequence i has the rows cu_seqlens_q[i] to cu_seqlens_q[i + 1] of q.
        window_size: (left, right), -1 for unbounded. softcap: 0 for none, else softcap * tanh(score / softcap).
        rotary_interleaved: pairs of features (2c, 2c + 1), else (c, c + rotary_dim / 2).
        cu_seqlens_k_new: no effect without k.
        scheduler_metadata, pack_gqa, max_seqlen_q, max_seqlen_k, aux_tensors, rel_bias_prep_cache: no effect.
        q_descale, k_descale, v_descale: (batch, nheads_k), of float8_e4m3fn q, k_cache and v_cache; None is 1. No
            effect on those of 16-bit ones. The caches have one dtype; where it is float8_e4m3fn, q may be 16-bit.
        qv: like q with the head dim of v_cache. Its products with v_cache add to the scores. On CUDA without new keys,
            over pages alone, by the head dims of the models that have it (64 of q, 512 of v_cache).
        sinks: (nheads,).
        num_splits: int. 1 asks for rows that do not depend on the rest of the batch, as SGLang's deterministic mode
            means it; other values change nothing.
        sm_margin: int. Multiprocessors left to other kernels, where the grid is persistent.
        out: like the result. Receives it and is returned.

    Returns out, or with return_softmax_lse (out, softmax_lse, two empty tensors): softmax_lse (nheads, total_q) or
    (batch, nheads, seqlen_q) float32, natural logarithm, -inf in rows without keys.

    Raises NotImplementedError, by name, for only_qv, attention_chunk, score_mod, mask_mod, sfq, sfk, sfv, rel_bias,
    rotary_seqlens, a ver other than 3, a qv, float8_e5m2 and other 8-bit tensors without kernels; with new keys also
    for cu_seqlens_k_new, cu_seqlens_q and 8-bit tensors.
    """
    _reject_scores(only_qv, attention_chunk, score_mod, mask_mod, rel_bias, ver)
    reject(sfq=sfq, sfk=sfk, sfv=sfv, rotary_seqlens=rotary_seqlens)
    options: Scores = {"softmax_scale": softmax_scale, "causal": causal, "window_size": window_size, "softcap": softcap}
    if any(x is not None for x in (k, v, rotary_cos, rotary_sin, cache_batch_idx)):
        reject(cu_seqlens_q=cu_seqlens_q, cu_seqlens_k_new=cu_seqlens_k_new)
        reject_8_bit(q=q, k_cache=k_cache, v_cache=v_cache)
        result, lse = attend_over_cache(
            q,
            k_cache,
            v_cache,
            k=k,
            v=v,
            rotary_cos=rotary_cos,
            rotary_sin=rotary_sin,
            cache_seqlens=cache_seqlens,
            cache_batch_idx=cache_batch_idx,
            cache_leftpad=cache_leftpad,
            block_table=page_table,
            rotary_interleaved=rotary_interleaved,
            return_softmax_lse=True,
            out=out,
            batch_invariant=num_splits == 1,
            sinks=sinks,
            sm_margin=sm_margin,
            qv=qv,
            **options,
        )
        return _result(result, lse, return_softmax_lse)
    rows, cu_rows = pack(q, cu_seqlens_q)
    packed_out = out if out is None or cu_seqlens_q is not None else out.flatten(0, 1)
    result, lse = packed_attention(
        rows,
        k_cache,
        v_cache,
        cu_rows,
        seqused_k=length_of_each(cache_seqlens, cu_rows),
        leftpad_k=cache_leftpad,
        block_table=page_table,
        sinks=sinks,
        out=packed_out,
        batch_invariant=num_splits == 1,
        sm_margin=sm_margin,
        q_descale=q_descale,
        k_descale=k_descale,
        v_descale=v_descale,
        names=_CACHE_NAMES,
        qv=qv if qv is None else pack(qv, cu_seqlens_q)[0],
        **options,
    )
    result, lse = unpack(q, cu_seqlens_q, result, lse)
    if out is not None and packed_out is not None:
        result = out if packed_out.data_ptr() == out.data_ptr() else out.copy_(result)
    return _result(result, lse, return_softmax_lse)


def flash_attn_varlen_func(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    cu_seqlens_q: Tensor,
    cu_seqlens_k: Tensor,
    max_seqlen_q: int | None = None,
    max_seqlen_k: int | None = None,
    seqused_q: Tensor | None = None,
    seqused_k: Tensor | None = None,
    page_table: Tensor | None = None,
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
    only_qv: bool = False,
    sm_margin: int = 0,
    return_softmax_lse: bool = False,
    sinks: Tensor | None = None,
    score_mod: object = None,
    aux_tensors: object = None,
    sfq: Tensor | None = None,
    sfk: Tensor | None = None,
    sfv: Tensor | None = None,
    rel_bias: object = None,
    rel_bias_prep_cache: object = None,
    ver: int = 3,
    out: Tensor | None = None,
    mask_mod: object = None,
) -> TensorOrTuple:
    """Attention of packed queries over packed keys or pages, as SGLang calls it: forward only.

    Arguments:
        q: (total_q, nheads, head_dim)
        k, v: (total_k, nheads_k, head_dim) with cu_seqlens_k, or pages (num_pages, page_size, nheads_k, head_dim) with
            page_table and seqused_k. v may have another head dim.
        cu_seqlens_q, cu_seqlens_k: int32 or int64 (batch + 1,). Sequence i has the rows cu_seqlens[i] to
            cu_seqlens[i + 1].
        seqused_q, seqused_k: int32 or int64 (batch,). How many of the first rows of each sequence are in use.
        page_table: int32 (batch, max_pages). The pages of each sequence.
        softmax_scale: float, 1 / sqrt(head_dim) if None. causal: query i of sq sees the keys up to i + sk - sq.
        window_size: (left, right), -1 for unbounded. softcap: 0 for none, else softcap * tanh(score / softcap).
        q_descale, k_descale, v_descale: (batch, nheads_k), of float8_e4m3fn q, k and v; None is 1. No effect on those
            of 16-bit ones.
        qv: (total_q, nheads, head_dim_v). Its products with v add to the scores. On CUDA over pages alone, with
            head dims 64 of q and 512 of v.
        sinks: (nheads,). A logit of each query head in the softmax.
        sm_margin: int. Multiprocessors left to other kernels, where the grid is persistent.
        out: (total_q, nheads, head_dim_v). Receives the result and is returned.
        max_seqlen_q, max_seqlen_k, num_splits, pack_gqa, aux_tensors, rel_bias_prep_cache: no effect on the result.

    Returns out, or with return_softmax_lse (out, softmax_lse, two empty tensors): softmax_lse (nheads, total_q)
    float32, natural logarithm, -inf in rows without keys.

    Raises NotImplementedError, by name, for only_qv, attention_chunk, score_mod, mask_mod, sfq, sfk, sfv, rel_bias, a
    ver other than 3, a qv, float8_e5m2 and other 8-bit tensors without kernels.
    """
    _reject_scores(only_qv, attention_chunk, score_mod, mask_mod, rel_bias, ver)
    reject(sfq=sfq, sfk=sfk, sfv=sfv)
    result, lse = packed_attention(
        q,
        k,
        v,
        cu_seqlens_q,
        cu_seqlens_k,
        seqused_q,
        seqused_k,
        None,
        page_table,
        max_seqlen_q,
        max_seqlen_k,
        0.0,
        softmax_scale,
        causal,
        window_size,
        softcap,
        None,
        sinks,
        out,
        sm_margin=sm_margin,
        q_descale=q_descale,
        k_descale=k_descale,
        v_descale=v_descale,
        qv=qv,
    )
    return _result(result, lse, return_softmax_lse)


def _result(result: Tensor, lse: Tensor, with_lse: bool) -> TensorOrTuple:
    return (result, mark_masked_rows(lse), lse.new_empty(0), lse.new_empty(0)) if with_lse else result


def _reject_scores(
    only_qv: object,
    attention_chunk: object,
    score_mod: object,
    mask_mod: object,
    rel_bias: object,
    ver: object,
) -> None:
    reject(
        only_qv=only_qv or None,
        attention_chunk=attention_chunk or None,
        score_mod=score_mod,
        mask_mod=mask_mod,
        rel_bias=rel_bias,
    )
    if ver != 3:
        raise NotImplementedError(f"ver: expected 3, got {ver}: it is not supported")
