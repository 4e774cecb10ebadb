"""softmax(Q K^T) V as modules without parameters: by `flash_attn` (Flash...) or by its definition.

Those by definition materialise the matrix of scores; they are for key_padding_mask, and for comparison.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch
from torch import Tensor, nn

from flash_attn._docstrings import documented
from flash_attn._types import AttentionOptions, Device, WindowSize
from flash_attn.flash_attn_interface import (
    flash_attn_kvpacked_func,
    flash_attn_qkvpacked_func,
    flash_attn_varlen_kvpacked_func,
    flash_attn_varlen_qkvpacked_func,
)
from flash_attn.masks import AttentionMask
from flash_attn.ops import arguments
from flash_attn.utils.derived_buffers import DerivedBuffers


def get_alibi_slopes(nheads: int) -> list[float]:
    """The ALiBi slopes of Press, Smith and Lewis (2022, arXiv:2108.12409), a list of nheads floats.

    2^(-8 i / n) for i = 1 .. n if n is a power of two; else those of the next lower power, followed by every other one
    of the next higher.

    Arguments:
        nheads: int, number of query heads, at least 1.
    """
    power = 1 << (nheads.bit_length() - 1)
    slopes = [2.0 ** (-8.0 * (i + 1) / power) for i in range(power)]
    return slopes + [2.0 ** (-8.0 * (i + 0.5) / power) for i in range(nheads - power)]


class _FlashAttention(DerivedBuffers):
    """The options that both modules by `flash_attn` have."""

    _stays_float32 = True  # rounded slopes would change the scores of far keys
    alibi_slopes: Tensor | None
    _slopes: list[float] | None = None  # that the buffer was made from

    def __init__(
        self,
        causal: bool,
        softmax_scale: float | None,
        attention_dropout: float,
        window_size: WindowSize,
        alibi_slopes: Tensor | Sequence[float] | None,
        deterministic: bool,
    ) -> None:
        super().__init__()
        self.causal = causal
        self.softmax_scale = softmax_scale
        self.drop = nn.Dropout(attention_dropout)
        if alibi_slopes is not None and not isinstance(alibi_slopes, Tensor):
            self._slopes = list(alibi_slopes)
            alibi_slopes = self._derived(None)["alibi_slopes"]
        self._register_derived(alibi_slopes=alibi_slopes)
        self.window_size = window_size
        self.deterministic = deterministic

    def _derived(self, device: Device) -> dict[str, Tensor | None]:
        if self._slopes is None:
            return {}
        return {"alibi_slopes": torch.tensor(self._slopes, dtype=torch.float32, device=device)}

    def _slopes_on(self, device: torch.device) -> Tensor | None:
        self._ensure_filled(device)
        return self.alibi_slopes

    def _options(self, causal: bool | None, device: torch.device) -> AttentionOptions:
        return {
            "dropout_p": self.drop.p if self.training else 0.0,
            "softmax_scale": self.softmax_scale,
            "causal": self.causal if causal is None else causal,
            "window_size": self.window_size,
            "alibi_slopes": self._slopes_on(device),
            "deterministic": self.deterministic,
        }


class FlashSelfAttention(_FlashAttention):
    """`flash_attn_qkvpacked_func` and `flash_attn_varlen_qkvpacked_func`, whose arguments these are.

    Arguments:
        causal: bool.
        softmax_scale: float or None.
        attention_dropout: float in [0, 1), in training alone.
        window_size: (left, right).
        alibi_slopes: float32 (nheads,) or (batch, nheads), or None; a buffer that is not saved. Or nheads floats, which
            a module built on the meta device remembers.
        deterministic: bool.
    """

    def __init__(
        self,
        causal: bool = False,
        softmax_scale: float | None = None,
        attention_dropout: float = 0.0,
        window_size: WindowSize = (-1, -1),
        alibi_slopes: Tensor | Sequence[float] | None = None,
        deterministic: bool = False,
    ) -> None:
        super().__init__(causal, softmax_scale, attention_dropout, window_size, alibi_slopes, deterministic)

    @documented(
        of_scores="that broadcasts to (batch, nheads, seqlen, seqlen),\n"
        "                with cu_seqlens (1 or nheads, total, max_seqlen)"
    )
    def forward(
        self,
        qkv: Tensor,
        causal: bool | None = None,
        cu_seqlens: Tensor | None = None,
        max_seqlen: int | Tensor | None = None,
        *,
        mask: AttentionMask | Tensor | None = None,
        attn_bias: Tensor | None = None,
        rel_bias: Tensor | None = None,
    ) -> Tensor:
        """
        Arguments:
            qkv: (batch, seqlen, 3, nheads, head_dim), or (total, 3, nheads, head_dim) with cu_seqlens.
            causal: bool, instead of the module's, or None.
            cu_seqlens: int32 (batch + 1,): sequence i has the rows cu_seqlens[i] to cu_seqlens[i + 1]; or None.
            max_seqlen: int, the longest sequence; needed with cu_seqlens.
            <score_tensors>

        Returns (batch, seqlen, nheads, head_dim), or (total, nheads, head_dim).
        """
        options = self._options(causal, qkv.device)
        if cu_seqlens is None:
            return flash_attn_qkvpacked_func(qkv, mask=mask, attn_bias=attn_bias, rel_bias=rel_bias, **options)
        _require_given(max_seqlen=max_seqlen)
        assert max_seqlen is not None
        return flash_attn_varlen_qkvpacked_func(
            qkv, cu_seqlens, max_seqlen, mask=mask, attn_bias=attn_bias, rel_bias=rel_bias, **options
        )


class FlashCrossAttention(_FlashAttention):
    """`flash_attn_kvpacked_func` and `flash_attn_varlen_kvpacked_func`; arguments of `FlashSelfAttention`."""

    def __init__(
        self,
        causal: bool = False,
        softmax_scale: float | None = None,
        attention_dropout: float = 0.0,
        alibi_slopes: Tensor | Sequence[float] | None = None,
        window_size: WindowSize = (-1, -1),
        deterministic: bool = False,
    ) -> None:
        super().__init__(causal, softmax_scale, attention_dropout, window_size, alibi_slopes, deterministic)

    @documented(
        of_scores="that broadcasts to (batch, nheads, seqlen, seqlen_k),\n"
        "                with cu_seqlens (1 or nheads, total, max_seqlen_k)"
    )
    def forward(
        self,
        q: Tensor,
        kv: Tensor,
        causal: bool | None = None,
        cu_seqlens: Tensor | None = None,
        max_seqlen: int | Tensor | None = None,
        cu_seqlens_k: Tensor | None = None,
        max_seqlen_k: int | Tensor | None = None,
        *,
        mask: AttentionMask | Tensor | None = None,
        attn_bias: Tensor | None = None,
        rel_bias: Tensor | None = None,
    ) -> Tensor:
        """
        Arguments:
            q: (batch, seqlen_q, nheads, head_dim), or (total_q, nheads, head_dim) with cu_seqlens.
            kv: (batch, seqlen_k, 2, nheads_k, head_dim), or (total_k, 2, nheads_k, head_dim) with cu_seqlens.
            causal: bool, instead of the module's, or None.
            cu_seqlens, max_seqlen: int32 (batch + 1,) and int, of q; or None.
            cu_seqlens_k, max_seqlen_k: the same of kv; needed with cu_seqlens.
            <score_tensors>

        Returns a tensor like q.
        """
        options = self._options(causal, q.device)
        if cu_seqlens is None:
            return flash_attn_kvpacked_func(q, kv, mask=mask, attn_bias=attn_bias, rel_bias=rel_bias, **options)
        _require_given(max_seqlen=max_seqlen, cu_seqlens_k=cu_seqlens_k, max_seqlen_k=max_seqlen_k)
        assert max_seqlen is not None and cu_seqlens_k is not None and max_seqlen_k is not None
        return flash_attn_varlen_kvpacked_func(
            q,
            kv,
            cu_seqlens,
            cu_seqlens_k,
            max_seqlen,
            max_seqlen_k,
            mask=mask,
            attn_bias=attn_bias,
            rel_bias=rel_bias,
            **options,
        )


def _require_given(**arguments: object) -> None:
    for name, value in arguments.items():
        if value is None:
            raise RuntimeError(f"{name}: expected a value with cu_seqlens, got None")


class CrossAttention(nn.Module):
    """Attention by its definition. Arguments: causal, softmax_scale and attention_dropout of `FlashSelfAttention`."""

    def __init__(
        self, causal: bool = False, softmax_scale: float | None = None, attention_dropout: float = 0.0
    ) -> None:
        super().__init__()
        self.causal = causal
        self.softmax_scale = softmax_scale
        self.drop = nn.Dropout(attention_dropout)

    def forward(
        self, q: Tensor, kv: Tensor, causal: bool | None = None, key_padding_mask: Tensor | None = None
    ) -> Tensor:
        """
        Arguments:
            q: (batch, seqlen_q, nheads, head_dim).
            kv: (batch, seqlen_k, 2, nheads_k, head_dim).
            causal: bool, instead of the module's, or None. Aligned to the last query and the last key; that is the
                last one kept with key_padding_mask, which then keeps the first keys of each sequence.
            key_padding_mask: bool (batch, seqlen_k), True where a key is kept, or None.

        Returns (batch, seqlen_q, nheads, head_dim); 0 for a query that sees no key. The softmax is taken in float32.
        """
        _check_inputs(q, kv, key_padding_mask)
        causal = self.causal if causal is None else causal
        scale = 1.0 / math.sqrt(q.shape[-1]) if self.softmax_scale is None else self.softmax_scale
        group = q.shape[2] // kv.shape[3]
        k, v = (x.repeat_interleave(group, dim=2) if group > 1 else x for x in kv.unbind(2))
        scores = torch.einsum("bthd,bshd->bhts", q * scale, k)
        scores = scores.to(torch.promote_types(scores.dtype, torch.float32))
        seen = _visible(q.shape[1], kv.shape[1], causal, key_padding_mask, q.device)
        if seen is not None:
            scores = scores.masked_fill(~seen, torch.finfo(scores.dtype).min)
        probs = torch.softmax(scores, dim=-1)
        if seen is not None:
            probs = probs.masked_fill(~seen, 0.0)
        return torch.einsum("bhts,bshd->bthd", self.drop(probs.to(v.dtype)), v)


class SelfAttention(CrossAttention):
    """`CrossAttention` of packed projections."""

    def forward(  # type: ignore[override]
        self, qkv: Tensor, causal: bool | None = None, key_padding_mask: Tensor | None = None
    ) -> Tensor:
        """qkv: (batch, seqlen, 3, nheads, head_dim) -> (batch, seqlen, nheads, head_dim).

        causal: bool, instead of the module's, or None. key_padding_mask: bool (batch, seqlen), True where a key is
        kept, or None.
        """
        _check_packed(qkv, key_padding_mask)
        causal = self.causal if causal is None else causal
        if causal and key_padding_mask is not None:
            position = torch.arange(qkv.shape[1], device=qkv.device)
            key_padding_mask = key_padding_mask[:, None] & (position <= position[:, None])
            causal = False
        return super().forward(qkv[:, :, 0], qkv[:, :, 1:], causal, key_padding_mask)


def _check_packed(qkv: Tensor, key_padding_mask: Tensor | None) -> None:
    arguments.check_tensors(("qkv",), (qkv,))
    if qkv.dim() != 5 or qkv.shape[2] != 3:
        raise RuntimeError(f"qkv: expected shape (batch, seqlen, 3, nheads, head_dim), got {list(qkv.shape)}")
    _check_mask(key_padding_mask, [[*qkv.shape[:2]]])


def _check_inputs(q: Tensor, kv: Tensor, key_padding_mask: Tensor | None) -> None:
    arguments.check_tensors(("q", "kv"), (q, kv))
    if q.dim() != 4:
        raise RuntimeError(f"q: expected shape (batch, seqlen_q, nheads, head_dim), got {list(q.shape)}")
    batch, seqlen_q, heads, head_dim = q.shape
    if kv.dim() != 5 or kv.shape[0] != batch or kv.shape[2] != 2 or kv.shape[4] != head_dim:
        expected = f"({batch}, seqlen_k, 2, nheads_k, {head_dim})"
        raise RuntimeError(f"kv: expected shape {expected}, got {list(kv.shape)}")
    if kv.shape[3] == 0 or heads % kv.shape[3] != 0:
        raise RuntimeError(f"q: expected a head count divisible by the K/V head count {kv.shape[3]}, got {heads}")
    _check_mask(key_padding_mask, [[batch, kv.shape[1]], [batch, seqlen_q, kv.shape[1]]])


def _check_mask(mask: Tensor | None, shapes: list[list[int]]) -> None:
    if mask is not None:
        arguments.check_tensors(("key_padding_mask",), (mask,))
        if mask.dtype != torch.bool or list(mask.shape) not in shapes:
            expected = f"bool of shape {shapes[0]}"
            raise RuntimeError(f"key_padding_mask: expected {expected}, got {arguments.shown(mask)}")


def _visible(
    seqlen_q: int, seqlen_k: int, causal: bool, key_padding_mask: Tensor | None, device: torch.device
) -> Tensor | None:
    """Bool, broadcastable to (batch, nheads, seqlen_q, seqlen_k): True where a query sees a key; None: everywhere.

    key_padding_mask (batch, seqlen_k), or (batch, seqlen_q, seqlen_k).
    """
    kept = None
    if key_padding_mask is not None:
        kept = key_padding_mask[:, None] if key_padding_mask.dim() == 3 else key_padding_mask[:, None, None]
    if not causal:
        return kept
    keys = seqlen_k if kept is None else kept.sum(-1, keepdim=True)
    query = torch.arange(seqlen_q, device=device)[:, None]
    seen = torch.arange(seqlen_k, device=device) <= query + keys - seqlen_q
    return seen if kept is None else seen & kept
