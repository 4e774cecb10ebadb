"""The classes behind FlashAttention-2's functions, for clients that call their `apply`.

Each has the positional order of flash_attn 2.8. They are no torch.autograd.Function themselves: `apply` is the public
function of the same inputs, which records gradients and is seen by compilers and transforms as that is.
return_softmax is its return_attn_probs; with is_grad_enabled False nothing is recorded.
"""

from __future__ import annotations

import torch
from torch import Tensor

from flash_attn._types import TensorOrTuple, WindowSize
from flash_attn.ops.attend import attend
from flash_attn.ops.attention_args import DENSE, Sequences


def _apply(is_grad_enabled, *args):
    if is_grad_enabled:
        return attend(*args)
    with torch.no_grad():
        return attend(*args)


class FlashAttnFunc:
    """`flash_attn_func`."""

    @staticmethod
    def apply(
        q: Tensor,
        k: Tensor,
        v: Tensor,
        dropout_p: float,
        softmax_scale: float | None,
        causal: bool,
        window_size: WindowSize,
        softcap: float,
        alibi_slopes: Tensor | None,
        deterministic: bool,
        return_softmax: bool,
        is_grad_enabled: bool = True,
    ) -> TensorOrTuple:
        return _apply(
            is_grad_enabled, (q, k, v), DENSE, dropout_p, softmax_scale, causal, window_size, softcap, alibi_slopes,
            deterministic, return_softmax,
        )  # fmt: skip


class FlashAttnQKVPackedFunc:
    """`flash_attn_qkvpacked_func`."""

    @staticmethod
    def apply(
        qkv: Tensor,
        dropout_p: float,
        softmax_scale: float | None,
        causal: bool,
        window_size: WindowSize,
        softcap: float,
        alibi_slopes: Tensor | None,
        deterministic: bool,
        return_softmax: bool,
        is_grad_enabled: bool = True,
    ) -> TensorOrTuple:
        return _apply(
            is_grad_enabled, (qkv,), DENSE, dropout_p, softmax_scale, causal, window_size, softcap, alibi_slopes,
            deterministic, return_softmax,
        )  # fmt: skip


class FlashAttnKVPackedFunc:
    """`flash_attn_kvpacked_func`."""

    @staticmethod
    def apply(
        q: Tensor,
        kv: Tensor,
        dropout_p: float,
        softmax_scale: float | None,
        causal: bool,
        window_size: WindowSize,
        softcap: float,
        alibi_slopes: Tensor | None,
        deterministic: bool,
        return_softmax: bool,
        is_grad_enabled: bool = True,
    ) -> TensorOrTuple:
        return _apply(
            is_grad_enabled, (q, kv), DENSE, dropout_p, softmax_scale, causal, window_size, softcap, alibi_slopes,
            deterministic, return_softmax,
        )  # fmt: skip


class FlashAttnVarlenFunc:
    """`flash_attn_varlen_func`."""

    @staticmethod
    def apply(
        q: Tensor,
        k: Tensor,
        v: Tensor,
        cu_seqlens_q: Tensor,
        cu_seqlens_k: Tensor,
        max_seqlen_q: int | Tensor,
        max_seqlen_k: int | Tensor,
        dropout_p: float,
        softmax_scale: float | None,
        causal: bool,
        window_size: WindowSize,
        softcap: float,
        alibi_slopes: Tensor | None,
        deterministic: bool,
        return_softmax: bool,
        block_table: Tensor | None = None,
        is_grad_enabled: bool = True,
    ) -> TensorOrTuple:
        sequences = Sequences(cu_seqlens_q, cu_seqlens_k, max_seqlen_q, max_seqlen_k, block_table=block_table)
        return _apply(
            is_grad_enabled, (q, k, v), sequences, dropout_p, softmax_scale, causal, window_size, softcap, alibi_slopes,
            deterministic, return_softmax,
        )  # fmt: skip


class FlashAttnVarlenQKVPackedFunc:
    """`flash_attn_varlen_qkvpacked_func`."""

    @staticmethod
    def apply(
        qkv: Tensor,
        cu_seqlens: Tensor,
        max_seqlen: int | Tensor,
        dropout_p: float,
        softmax_scale: float | None,
        causal: bool,
        window_size: WindowSize,
        softcap: float,
        alibi_slopes: Tensor | None,
        deterministic: bool,
        return_softmax: bool,
        is_grad_enabled: bool = True,
    ) -> TensorOrTuple:
        sequences = Sequences(cu_seqlens, cu_seqlens, max_seqlen, max_seqlen)
        return _apply(
            is_grad_enabled, (qkv,), sequences, dropout_p, softmax_scale, causal, window_size, softcap, alibi_slopes,
            deterministic, return_softmax,
        )  # fmt: skip


class FlashAttnVarlenKVPackedFunc:
    """`flash_attn_varlen_kvpacked_func`."""

    @staticmethod
    def apply(
        q: Tensor,
        kv: Tensor,
        cu_seqlens_q: Tensor,
        cu_seqlens_k: Tensor,
        max_seqlen_q: int | Tensor,
        max_seqlen_k: int | Tensor,
        dropout_p: float,
        softmax_scale: float | None,
        causal: bool,
        window_size: WindowSize,
        softcap: float,
        alibi_slopes: Tensor | None,
        deterministic: bool,
        return_softmax: bool,
        is_grad_enabled: bool = True,
    ) -> TensorOrTuple:
        sequences = Sequences(cu_seqlens_q, cu_seqlens_k, max_seqlen_q, max_seqlen_k)
        return _apply(
            is_grad_enabled, (q, kv), sequences, dropout_p, softmax_scale, causal, window_size, softcap, alibi_slopes,
            deterministic, return_softmax,
        )  # fmt: skip
