"""vLLM's flash attention by these kernels: its function, and how it comes to be called.

`flash_attn_varlen_func` has the signature of the one of `vllm.vllm_flash_attn` (vLLM 0.33.0), which vLLM's flash
attention backend calls by keyword. `register` puts it in its place; name it as an entry point of the group
"vllm.general_plugins", for every process of vLLM loads these. docs/integrations.md lists the supported calls.
"""

from __future__ import annotations

import functools
import importlib
import logging
import sys
from collections.abc import Callable
from typing import Any

from torch import Tensor

from flash_attn._types import TensorOrTuple, WindowSize
from flash_attn.integrations.serving import falling_back, packed_attention, reject, warn_once
from flash_attn.ops import latent
from flash_attn.ops.lse import mark_masked_rows

logger = logging.getLogger(__name__)
_SOURCE = "vllm.vllm_flash_attn"
_NAMES = ("flash_attn_varlen_func", "get_scheduler_metadata")
_METADATA_SIZES = (  # the first arguments of get_scheduler_metadata
    "batch_size",
    "max_seqlen_q",
    "max_seqlen_k",
    "num_heads_q",
    "num_heads_kv",
    "headdim",
    "cache_seqlens",
)


def register() -> bool:
    """Let vLLM's flash attention backend in this process call these kernels; once is enough, again changes nothing.

    Calls that they do not support (mask functions, an MLA's q_v where no kernel reads it) go to vLLM's own function, as
    before. vLLM still decides by the version of its flash attention (`get_flash_attn_version`).

    Returns whether the kernels are called from now on. Where vLLM's flash attention is missing, as on a machine without
    CUDA, vLLM stays as it is, and one warning says why.
    """
    try:
        source = importlib.import_module(_SOURCE)
        attention, metadata = (getattr(source, name) for name in _NAMES)
    except Exception as error:  # a plugin that raises ends vLLM
        warn_once(logger, f"vLLM's own attention is called: {_SOURCE} cannot be used ({error})")
        return False
    if attention.__module__ == __name__:
        return True
    replacements = {
        attention: falling_back(flash_attn_varlen_func, attention, logger),
        metadata: _metadata_of_fallbacks(metadata),
    }
    for name, module in list(sys.modules.items()):
        if name.split(".")[0] == "vllm":
            for attribute in _NAMES:
                function = vars(module).get(attribute)
                if function in replacements:
                    setattr(module, attribute, replacements[function])
    return True


def _metadata_of_fallbacks(theirs: Callable[..., Tensor | None]) -> Callable[..., Tensor | None]:
    """vLLM's get_scheduler_metadata for MLA whose calls with q_v go to its own function in every layer, else None.

    None lets its function schedule a call by itself. The answer for one metadata builder is always of one kind: CUDA
    graphs hold the buffer that the builder copies metadata into, and replay the launches that were captured without it.
    """

    @functools.wraps(theirs)
    def get_scheduler_metadata(*args: Any, headdim_v: int | None = None, **kwargs: Any) -> Tensor | None:
        if headdim_v is None:
            return None
        given = {**dict(zip(_METADATA_SIZES, args)), **kwargs}
        if latent.is_computed(given["cache_seqlens"].device.type, given["headdim"], headdim_v):
            return None
        return theirs(*args, headdim_v=headdim_v, **kwargs)

    return get_scheduler_metadata


def flash_attn_varlen_func(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    max_seqlen_q: int,
    cu_seqlens_q: Tensor,
    max_seqlen_k: int,
    cu_seqlens_k: Tensor | None = None,
    seqused_k: Tensor | None = None,
    q_v: Tensor | None = None,
    dropout_p: float = 0.0,
    softmax_scale: float | None = None,
    causal: bool = False,
    window_size: WindowSize | None = None,
    softcap: float = 0.0,
    alibi_slopes: Tensor | None = None,
    deterministic: bool = False,
    return_attn_probs: bool = False,
    block_table: Tensor | None = None,
    return_softmax_lse: bool = False,
    out: Tensor | None = None,
    scheduler_metadata: Tensor | None = None,
    q_descale: Tensor | None = None,
    k_descale: Tensor | None = None,
    v_descale: Tensor | None = None,
    num_splits: int = 0,
    output_scale: Tensor | None = None,
    fa_version: int = 2,
    s_aux: Tensor | None = None,
    cp_world_size: int = 1,
    cp_rank: int = 0,
    cp_tot_seqused_k: Tensor | None = None,
    mask_mod: object = None,
    block_sparse_tensors: object = None,
    aux_tensors: object = None,
    aux_tensor_leading_dims: object = None,
    dynamic_causal: Tensor | None = None,
    gather_kv_indices: Tensor | None = None,
    gather_kv_valid_length: Tensor | None = None,
) -> TensorOrTuple:
    """Attention of packed queries over packed keys or pages, as vLLM calls it: forward only.

    Arguments:
        q: (total_q, nheads, head_dim)
        k, v: (total_k, nheads_k, head_dim) with cu_seqlens_k, or pages (num_pages, page_size, nheads_k, head_dim) with
            block_table and seqused_k. v may have another head dim.
        window_size: (left, right) or None, for none.
        out: (total_q, nheads, head_dim_v). Receives the result and is returned.
        q_v: (total_q, nheads, head_dim_v), whose products with v add to the scores. On CUDA over pages alone, by the
            head dims of the models that have it (64 of q, 512 of v).
        s_aux: (nheads,), sinks.
        num_splits: int. 1 asks for rows that do not depend on the rest of the batch, as vLLM's batch-invariant mode
            means it; other values change nothing.
        q_descale, k_descale, v_descale: (batch, nheads_k), of float8_e4m3fn q, k and v. No effect on those of 16-bit
            ones, which vLLM passes too. k and v have one dtype; where these are float8_e4m3fn, q may be 16-bit.
        scheduler_metadata, deterministic, return_attn_probs, fa_version, aux_tensors, aux_tensor_leading_dims, cp_rank:
            no effect.

    Returns out, or with return_softmax_lse (out, softmax_lse (nheads, total_q) float32), natural logarithm, -inf in
    rows without keys.

    Raises NotImplementedError, by name, for output_scale, cp_world_size, mask_mod, block_sparse_tensors,
    dynamic_causal, gather_kv_indices, for a q_v, float8_e5m2 and other 8-bit tensors without kernels.
    """
    reject(
        output_scale=output_scale,
        cp_world_size=None if cp_world_size == 1 else cp_world_size,
        mask_mod=mask_mod,
        block_sparse_tensors=block_sparse_tensors,
        dynamic_causal=dynamic_causal,
        gather_kv_indices=gather_kv_indices,
        causal=causal if isinstance(causal, Tensor) else None,
    )
    result, lse = packed_attention(
        q,
        k,
        v,
        cu_seqlens_q,
        cu_seqlens_k,
        None,
        seqused_k,
        None,
        block_table,
        max_seqlen_q,
        max_seqlen_k,
        dropout_p,
        softmax_scale,
        causal,
        window_size,
        softcap,
        alibi_slopes,
        s_aux,
        out,
        num_splits == 1,
        q_descale=q_descale,
        k_descale=k_descale,
        v_descale=v_descale,
        qv=q_v,
        qv_name="q_v",
    )
    return (result, mark_masked_rows(lse)) if return_softmax_lse else result
