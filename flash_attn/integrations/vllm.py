"""vLLM's flash attention by these kernels: its function, and how it comes to be called.

`flash_attn_varlen_func` and `get_scheduler_metadata` have the signatures of `vllm.vllm_flash_attn` (vLLM 0.33.0), which
its flash attention backend calls by keyword. `register` puts them in their place; name it as an entry point of the
group "vllm.general_plugins", for every process of vLLM loads these. docs/integrations.md says what is served.
"""

from __future__ import annotations

import functools
import importlib
import sys
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from flash_attn._types import TensorOrTuple
from flash_attn.integrations.serving import packed_attention, reject
from flash_attn.ops.lse import mark_masked_rows

_SOURCES = ("vllm.vllm_flash_attn", "vllm.vllm_flash_attn.flash_attn_interface", "vllm.v1.attention.backends.fa_utils")


def register() -> None:
    """Let vLLM's flash attention backend in this process call these kernels; once is enough, again changes nothing.

    Calls that they do not serve (8-bit caches, MLA's q_v, mask functions) go to vLLM's own function, as before. What
    vLLM decides by the version of its flash attention (`get_flash_attn_version`) it still does.

    Raises ImportError without vLLM, AttributeError where it has no such functions.
    """
    source = importlib.import_module(_SOURCES[0])
    attention, metadata = source.flash_attn_varlen_func, source.get_scheduler_metadata
    if attention.__module__ == __name__:
        return
    replacements = {attention: _falling_back(flash_attn_varlen_func, attention), metadata: get_scheduler_metadata}
    for name in _SOURCES[1:]:
        importlib.import_module(name)
    for name, module in list(sys.modules.items()):
        if name.split(".")[0] == "vllm":
            for attribute in ("flash_attn_varlen_func", "get_scheduler_metadata"):
                function = vars(module).get(attribute)
                if function in replacements:
                    setattr(module, attribute, replacements[function])


def _falling_back(ours: Callable[..., Any], theirs: Callable[..., Any]) -> Callable[..., Any]:
    """ours, and theirs for the calls that ours rejects, which it does before anything is computed."""

    @functools.wraps(ours)
    def function(*args: Any, **kwargs: Any) -> Any:
        try:
            return ours(*args, **kwargs)
        except NotImplementedError:
            return theirs(*args, **kwargs)

    return function


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
    window_size: Any = None,
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
    mask_mod: Any = None,
    block_sparse_tensors: Any = None,
    aux_tensors: Any = None,
    aux_tensor_leading_dims: Any = None,
    dynamic_causal: Tensor | None = None,
    gather_kv_indices: Tensor | None = None,
    gather_kv_valid_length: Tensor | None = None,
) -> TensorOrTuple:
    """Attention of packed queries over packed keys or pages, as vLLM calls it: forward only.

    Arguments:
        q: (total_q, nheads, head_dim)
        k, v: (total_k, nheads_k, head_dim) with cu_seqlens_k, or pages (num_pages, page_size, nheads_k, head_dim) with
            block_table and seqused_k. v may have a head dim of its own.
        window_size: (left, right) or None, for none.
        out: (total_q, nheads, head_dim_v). Receives the result and is returned.
        s_aux: (nheads,), sinks.
        num_splits: int. 1 asks for rows that do not depend on the rest of the batch, as vLLM's batch-invariant mode
            means it; other values change nothing.
        scheduler_metadata, deterministic, return_attn_probs, fa_version, aux_tensors, aux_tensor_leading_dims, cp_rank
            and the descales: no effect on 16-bit inputs. vLLM passes descales for these too.

    Returns out, or with return_softmax_lse (out, softmax_lse (nheads, total_q) float32), natural logarithm, -inf in
    rows without keys.

    Raises NotImplementedError, by name, for 8-bit inputs and q_v, output_scale, cp_world_size, mask_mod,
    block_sparse_tensors, dynamic_causal, gather_kv_indices.
    """
    reject(
        q_v=q_v, output_scale=output_scale, cp_world_size=None if cp_world_size == 1 else cp_world_size,
        mask_mod=mask_mod, block_sparse_tensors=block_sparse_tensors, dynamic_causal=dynamic_causal,
        gather_kv_indices=gather_kv_indices, causal=causal if isinstance(causal, Tensor) else None,
    )  # fmt: skip
    result, lse = packed_attention(
        q, k, v, cu_seqlens_q, cu_seqlens_k, None, seqused_k, None, block_table, max_seqlen_q, max_seqlen_k, dropout_p,
        softmax_scale, causal, window_size, softcap, alibi_slopes, s_aux, out, num_splits == 1,
    )  # fmt: skip
    return (result, mark_masked_rows(lse)) if return_softmax_lse else result


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
    window_size: Any = (-1, -1),
    has_softcap: bool = False,
    num_splits: int = 0,
    pack_gqa: bool | None = None,
    sm_margin: int = 0,
) -> Tensor:
    """An empty int32 tensor on the device of cache_seqlens: nothing has to be scheduled ahead of a call here."""
    return cache_seqlens.new_empty(0, dtype=torch.int32)
