"""Multi-head attention with its projections (Vaswani et al., 2017, arXiv:1706.03762): self- and cross-attention,
grouped queries, rotary embedding, generation with a KV cache, and context parallelism."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any, Union

import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from flash_attn._types import WindowSize
from flash_attn.context_parallel import CpPlan, flash_attn_cp_func
from flash_attn.context_parallel.exchange.consistency import compare_on_all_ranks, raise_on_ranks_of_last_plan
from flash_attn.context_parallel.exchange.groups import Communicator, Group, communicator_of
from flash_attn.flash_attn_interface import (
    flash_attn_kvpacked_func,
    flash_attn_qkvpacked_func,
    flash_attn_varlen_kvpacked_func,
    flash_attn_varlen_qkvpacked_func,
)
from flash_attn.inference import flash_attn_with_kvcache
from flash_attn.layers.rotary import RotaryEmbedding, apply_rotary_emb_qkv_
from flash_attn.modules.inner_attention import (
    CrossAttention,
    FlashCrossAttention,
    FlashSelfAttention,
    SelfAttention,
    get_alibi_slopes,
)
from flash_attn.ops import arguments, conditions
from flash_attn.utils.generation import InferenceParams
from flash_attn.utils.refused import tensor_parallel_class

Index = Union[int, slice, Tensor]  # of positions

__all__ = [
    "MHA",
    "CrossAttention",
    "FlashCrossAttention",
    "FlashSelfAttention",
    "LinearResidual",
    "ParallelMHA",
    "SelfAttention",
    "flash_attn_kvpacked_func",
    "flash_attn_qkvpacked_func",
    "flash_attn_varlen_kvpacked_func",
    "flash_attn_varlen_qkvpacked_func",
    "flash_attn_with_kvcache",
    "get_alibi_slopes",
]


class LinearResidual(nn.Linear):
    """A linear layer that also returns its input."""

    def forward(self, input: Tensor) -> tuple[Tensor, Tensor]:  # type: ignore[override]
        return super().forward(input), input


ParallelMHA = tensor_parallel_class("ParallelMHA", "projections around flash_attn_func", "ColwiseParallel")


def _require(condition: bool, name: str, expected: str, got: object) -> None:
    if not condition:
        raise RuntimeError(f"{name}: expected {expected}, got {got}")


def _update_kv_cache(kv: Tensor, inference_params: InferenceParams, layer_idx: int | None) -> Tensor:
    """Write kv (batch, seqlen, 2, nheads_k, head_dim) at seqlen_offset -> the keys and values in the cache so far."""
    caches = inference_params.key_value_memory_dict
    if layer_idx not in caches:
        shape = (inference_params.max_batch_size, inference_params.max_seqlen, *kv.shape[2:])
        caches[layer_idx] = torch.empty(shape, dtype=kv.dtype, device=kv.device)
    cache = caches[layer_idx]
    first, start = inference_params.batch_size_offset, inference_params.seqlen_offset
    last, end = first + kv.shape[0], start + kv.shape[1]
    _require(last <= cache.shape[0], "batch", f"at most {cache.shape[0]} sequences in the cache", last)
    _require(end <= cache.shape[1], "seqlen", f"at most {cache.shape[1]} tokens in the cache", end)
    cache[first:last, start:end] = kv
    return cache[first:last, :end]


class MHA(nn.Module):
    """Multi-head self-attention or cross-attention.

    Arguments:
        embed_dim: int, features of the input and output, divisible by num_heads.
        num_heads: int.
        num_heads_kv: int, a divisor of num_heads: the heads of keys and values (grouped queries). Default: num_heads.
        cross_attn: bool. Keys and values from another sequence; not with rotary or a KV cache.
        qkv_proj_bias, out_proj_bias: bool.
        dropout: float in [0, 1), of the attention matrix, in training alone.
        softmax_scale: float. Default: 1 / sqrt(head_dim).
        causal: bool.
        layer_idx: int, the key of this layer's cache; needed for generation.
        rotary_emb_dim: int, features of each head that are rotated; 0: no rotary embedding.
        rotary_emb_base: float. Feature pair i turns by position / base^(2 i / rotary_emb_dim).
        rotary_emb_scale_base: float, of xPos, which also scales q and k by their positions; None: no scaling.
        rotary_emb_interleaved: bool. Rotate the pairs (0, 1), (2, 3), ... (GPT-J) instead of two halves (GPT-NeoX).
        use_alibi: bool. ALiBi with the slopes of `get_alibi_slopes`; needs use_flash_attn.
        window_size: (left, right); needs use_flash_attn unless (-1, -1).
        fused_bias_fc: bool, without effect: the projections are `nn.Linear`.
        use_flash_attn: bool. Attention by `flash_attn` instead of its definition.
        return_residual: bool. Return (out, input).
        checkpointing: bool. Compute the attention anew in the backward instead of saving its inputs.
        dwconv: bool, has to be False.
        device, dtype: of the parameters.

    Raises RuntimeError naming the argument that does not fit, NotImplementedError for dwconv.
    """

    # of the modules by flash_attn, or by the definition of attention
    inner_attn: Any
    inner_cross_attn: Any

    def __init__(
        self,
        embed_dim: int,
        num_heads: int,
        num_heads_kv: int | None = None,
        cross_attn: bool = False,
        qkv_proj_bias: bool = True,
        out_proj_bias: bool = True,
        dropout: float = 0.0,
        softmax_scale: float | None = None,
        causal: bool = False,
        layer_idx: int | None = None,
        dwconv: bool = False,
        rotary_emb_dim: int = 0,
        rotary_emb_base: float = 10000.0,
        rotary_emb_scale_base: float | None = None,
        rotary_emb_interleaved: bool = False,
        use_alibi: bool = False,
        window_size: WindowSize = (-1, -1),
        fused_bias_fc: bool = False,
        use_flash_attn: bool = False,
        return_residual: bool = False,
        checkpointing: bool = False,
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
    ) -> None:
        super().__init__()
        num_heads_kv = num_heads if num_heads_kv is None else num_heads_kv
        _require(embed_dim % num_heads == 0, "embed_dim", f"a multiple of num_heads ({num_heads})", embed_dim)
        _require(num_heads % num_heads_kv == 0, "num_heads_kv", f"a divisor of num_heads ({num_heads})", num_heads_kv)
        _require(use_flash_attn or not use_alibi, "use_alibi", "False without use_flash_attn", use_alibi)
        full = tuple(window_size) == (-1, -1)
        _require(use_flash_attn or full, "window_size", "(-1, -1) without use_flash_attn", window_size)
        _require(not (cross_attn and rotary_emb_dim), "rotary_emb_dim", "0 with cross_attn", rotary_emb_dim)
        if dwconv:
            raise NotImplementedError("dwconv: expected False, got True: no convolution of q, k and v is built")
        self.embed_dim = embed_dim
        self.num_heads = num_heads
        self.num_heads_kv = num_heads_kv
        self.head_dim = embed_dim // num_heads
        self.cross_attn = cross_attn
        self.causal = causal
        self.layer_idx = layer_idx
        self.dwconv = dwconv
        self.rotary_emb_dim = rotary_emb_dim
        self.use_flash_attn = use_flash_attn
        self.return_residual = return_residual
        self.checkpointing = checkpointing
        if rotary_emb_dim > 0:
            self.rotary_emb = RotaryEmbedding(
                rotary_emb_dim, rotary_emb_base, rotary_emb_interleaved, rotary_emb_scale_base, device
            )
        linear = partial(nn.Linear, device=device, dtype=dtype)
        linear_of_input = partial(LinearResidual, device=device, dtype=dtype) if return_residual else linear
        kv_dim = 2 * self.head_dim * num_heads_kv
        if cross_attn:
            self.Wq = linear(embed_dim, embed_dim, bias=qkv_proj_bias)
            self.Wkv = linear_of_input(embed_dim, kv_dim, bias=qkv_proj_bias)
        else:
            self.Wqkv = linear_of_input(embed_dim, embed_dim + kv_dim, bias=qkv_proj_bias)
        slopes = get_alibi_slopes(num_heads) if use_alibi else None
        flash = {"alibi_slopes": slopes, "window_size": window_size} if use_flash_attn else {}
        common: dict[str, Any] = {
            "causal": causal,
            "softmax_scale": softmax_scale,
            "attention_dropout": dropout,
            **flash,
        }
        self.inner_attn = (FlashSelfAttention if use_flash_attn else SelfAttention)(**common).to_empty(device=device)
        self.inner_cross_attn = (FlashCrossAttention if use_flash_attn else CrossAttention)(**common).to_empty(
            device=device
        )
        self.out_proj = linear(embed_dim, embed_dim, bias=out_proj_bias)
        self._cp_group: Group | None = None
        self._cp_communicator: Communicator | None = None
        self._cp_plan: CpPlan | None = None
        self._cp_layout_and_method = "zigzag", "auto"

    def set_context_parallel_group(self, group: Group | None, layout: str = "zigzag", method: str = "auto") -> None:
        """Let forward attend over the tokens of all ranks of a group: x is then this rank's equal part of them.

        The module makes a `CpPlan.dense` of (tokens of x) * ranks, which compares that number across ranks, and keeps
        it until x has another length. Where ranks have unequal parts, documents are packed, or layers shall share one
        plan, give forward a plan instead, as `cp_plan`, which needs no group.

        Arguments:
            group: a ProcessGroup or a rank of a LocalGroup; None: attention over x alone again.
            layout: "zigzag", "contiguous" or "balanced", of the plan: what tokens x has to hold, `plan.shard(x, 1)`;
                with "zigzag" of 2R equal chunks the r-th and the r-th from the end.
            method: "all_gather", "ring", "ulysses" or "auto": how K and V, or heads, move.

        Raises RuntimeError with cross_attn, without use_flash_attn, and for a group without this rank.
        """
        if group is not None:
            self._require_context_parallel("group")
        self._cp_group, self._cp_communicator = group, None if group is None else communicator_of(None, group)
        self._cp_layout_and_method, self._cp_plan = (layout, method), None

    def _require_context_parallel(self, name: str) -> None:
        _require(not self.cross_attn, name, "None with cross_attn", "a value")
        _require(self.use_flash_attn, name, "None without use_flash_attn", "a value")

    def allocate_inference_cache(self, batch_size: int, max_seqlen: int, dtype: torch.dtype | None = None) -> Tensor:
        """An uninitialised cache (batch_size, max_seqlen, 2, num_heads_kv, head_dim), for `key_value_memory_dict`."""
        weight = self.out_proj.weight
        shape = (batch_size, max_seqlen, 2, self.num_heads_kv, self.head_dim)
        return torch.empty(shape, dtype=dtype or weight.dtype, device=weight.device)

    def forward(
        self,
        x: Tensor,
        x_kv: Tensor | None = None,
        key_padding_mask: Tensor | None = None,
        cu_seqlens: Tensor | None = None,
        max_seqlen: int | Tensor | None = None,
        mixer_subset: Index | None = None,
        inference_params: InferenceParams | None = None,
        **kwargs: Any,
    ) -> Tensor | tuple[Tensor, Tensor]:
        """
        Arguments:
            x: (batch, seqlen, embed_dim), or (total, embed_dim) with cu_seqlens.
            x_kv: with cross_attn the input of keys and values, (batch, seqlen_k, embed_dim) or (total_k, embed_dim).
                Default: x.
            key_padding_mask: bool (batch, seqlen_k), True where a key is kept; without use_flash_attn alone.
            cu_seqlens, max_seqlen: int32 (batch + 1,) and int: the sequences in x, see `flash_attn_varlen_func`; with
                use_flash_attn alone, not with rotary. With cross_attn also cu_seqlens_k and max_seqlen_k, of x_kv.
            mixer_subset: index or slice of the positions of x that are queries; with cross_attn alone.
            inference_params: `flash_attn.utils.generation.InferenceParams`. The keys and values of x are appended to
                this layer's cache, which is made if it does not exist, and x attends to all of them.
            kwargs: passed on to the inner attention: causal; with use_flash_attn, and neither inference_params nor
                context parallelism, mask, attn_bias and rel_bias of `flash_attn_func`. cp_plan, a
                `flash_attn.context_parallel.CpPlan`: x holds this rank's tokens of the plan, (batch, num_tokens,
                embed_dim), or (num_tokens, embed_dim) of a packed one, and attends to those of all ranks; rotary
                embedding goes by their positions. Self-attention with use_flash_attn alone, without cu_seqlens and
                inference_params. `set_context_parallel_group` makes one.

        Returns out, like x; with return_residual (out, x).
        """
        plan = kwargs.pop("cp_plan", None)
        over_ranks = plan is not None or self._cp_group is not None
        try:
            self._check_call(x_kv, key_padding_mask, cu_seqlens, max_seqlen, mixer_subset, inference_params)
            self._check_scores(kwargs, inference_params, over_ranks)
            if over_ranks:
                self._check_over_ranks(x, plan, cu_seqlens, inference_params)
        except Exception as error:
            if over_ranks:
                self._tell_ranks(plan, error)
            raise
        if over_ranks:
            plan = plan or self._plan_of_group(x)
        else:
            padding = {"key_padding_mask": key_padding_mask}
            sequences = {"cu_seqlens": cu_seqlens, "max_seqlen": max_seqlen}
            kwargs = {**(sequences if self.use_flash_attn else padding), **kwargs}
        if self.cross_attn:
            q, kv, x = self._project_cross(x, x_kv, mixer_subset)
            context = self._run(self.inner_cross_attn, q, kv, **kwargs)
        else:
            projected = self.Wqkv(x)
            projected, x = projected if self.return_residual else (projected, x)
            heads = torch.unflatten(projected, -1, (-1, self.head_dim))  # q, k and v heads, one after the other
            if plan is not None:
                context = self._attend_over_ranks(heads, plan, **kwargs)
            elif inference_params is None:
                context = self._attend(heads, kwargs)
            else:
                context = self._attend_with_cache(heads, inference_params)
        out = self.out_proj(context.flatten(-2))
        return (out, x) if self.return_residual else out

    def _check_call(
        self,
        x_kv: Tensor | None,
        key_padding_mask: Tensor | None,
        cu_seqlens: Tensor | None,
        max_seqlen: int | Tensor | None,
        mixer_subset: Index | None,
        inference_params: InferenceParams | None,
    ) -> None:
        def no(name: str, value: object, when: str) -> None:
            _require(value is None, name, f"None {when}", "a value")

        if cu_seqlens is not None:
            _require(self.use_flash_attn, "cu_seqlens", "None without use_flash_attn", "a tensor")
            _require(self.rotary_emb_dim == 0, "cu_seqlens", "None with rotary_emb_dim > 0", "a tensor")
            _require(max_seqlen is not None, "max_seqlen", "a value with cu_seqlens", None)
        if self.use_flash_attn:
            no("key_padding_mask", key_padding_mask, "with use_flash_attn")
        if not self.cross_attn:
            no("x_kv", x_kv, "without cross_attn")
            no("mixer_subset", mixer_subset, "without cross_attn")
        if inference_params is not None:
            no("key_padding_mask", key_padding_mask, "with inference_params")
            no("cu_seqlens", cu_seqlens, "with inference_params")
            _require(not self.cross_attn, "inference_params", "None with cross_attn", "a value")
            _require(self.layer_idx is not None, "layer_idx", "an int in the constructor for inference_params", None)

    def _check_scores(
        self, kwargs: dict[str, object], inference_params: InferenceParams | None, over_ranks: bool
    ) -> None:
        for name in ("mask", "attn_bias", "rel_bias"):
            if kwargs.get(name) is not None:
                _require(self.use_flash_attn, name, "None without use_flash_attn", "a value")
                _require(inference_params is None, name, "None with inference_params", "a value")
                _require(not over_ranks, name, "None with context parallelism", "a value")

    def _project_cross(
        self, x: Tensor, x_kv: Tensor | None, mixer_subset: Index | None
    ) -> tuple[Tensor, Tensor, Tensor]:
        """-> (q, kv, the input to return as the residual)."""
        kv = self.Wkv(x if x_kv is None else x_kv)
        if self.return_residual:
            kv, source = kv
            x = source if x_kv is None else x
        q = self.Wq(x if mixer_subset is None else x[:, mixer_subset])
        q = torch.unflatten(q, -1, (-1, self.head_dim))
        return q, torch.unflatten(kv, -1, (2, -1, self.head_dim)), x

    def _run(self, attention: Callable[..., Tensor], *args: Tensor, **kwargs: Any) -> Tensor:
        out: Tensor
        if self.checkpointing:
            out = checkpoint(attention, *args, use_reentrant=False, **kwargs)
        else:
            out = attention(*args, **kwargs)
        return out

    def _split(self, heads: Tensor) -> tuple[Tensor, Tensor]:
        """(q, kv) of heads (..., num_heads + 2 num_heads_kv, head_dim)."""
        return heads[..., : self.num_heads, :], torch.unflatten(heads[..., self.num_heads :, :], -2, (2, -1))

    def _attend(self, heads: Tensor, kwargs: dict[str, object]) -> Tensor:
        if self.rotary_emb_dim > 0:
            heads = self.rotary_emb(heads, num_heads_q=self.num_heads)
        if self.num_heads_kv == self.num_heads:
            return self._run(self.inner_attn, torch.unflatten(heads, -2, (3, -1)), **kwargs)
        if kwargs.get("cu_seqlens") is not None:
            kwargs = {"cu_seqlens_k": kwargs["cu_seqlens"], "max_seqlen_k": kwargs["max_seqlen"], **kwargs}
        return self._run(self.inner_cross_attn, *self._split(heads), **kwargs)

    def _check_over_ranks(
        self, x: Tensor, plan: CpPlan | None, cu_seqlens: Tensor | None, inference_params: InferenceParams | None
    ) -> None:
        self._require_context_parallel("cp_plan")
        _require(inference_params is None, "inference_params", "None with context parallelism", "a value")
        expected = "None with context parallelism, whose documents are those of cp_plan"
        _require(cu_seqlens is None, "cu_seqlens", expected, "a tensor")
        if plan is None:
            _require(x.dim() == 3, "x", "(batch, tokens, embed_dim) with a context parallel group", list(x.shape))
        elif not isinstance(plan, CpPlan):
            raise TypeError(f"cp_plan: expected a CpPlan, got {arguments.shown(plan)}")
        elif x.dim() != (2 if plan.is_packed else 3) or x.shape[-2] != plan.num_tokens:
            shape = "(num_tokens, embed_dim)" if plan.is_packed else "(batch, num_tokens, embed_dim)"
            text = f"x: expected {shape} with the {plan.num_tokens} tokens of rank {plan.rank}, got {list(x.shape)}"
            raise RuntimeError(text)
        _require(x.shape[-1] == self.embed_dim, "x", f"embed_dim {self.embed_dim}", list(x.shape))

    def _tell_ranks(self, plan: CpPlan | None, error: Exception) -> None:
        """Raise this rank's error on all ranks that wait for this one."""
        if isinstance(plan, CpPlan):
            plan.compare("MHA", "", error)
        elif self._cp_communicator is not None:
            compare_on_all_ranks(self._cp_communicator, "", error, "MHA")
        raise_on_ranks_of_last_plan("MHA", error)

    def _plan_of_group(self, x: Tensor) -> CpPlan:
        assert self._cp_communicator is not None
        tokens = x.shape[1] * self._cp_communicator.size
        if self._cp_plan is None or self._cp_plan.cu_seqlens[-1] != tokens:
            layout, method = self._cp_layout_and_method
            self._cp_plan = CpPlan.dense(tokens, group=self._cp_group, layout=layout, method=method)
        return self._cp_plan

    def _attend_over_ranks(self, heads: Tensor, plan: CpPlan, causal: bool | None = None) -> Tensor:
        if self.rotary_emb_dim > 0:
            tables = self.rotary_emb._tables(plan.positions(heads.device), plan.cu_seqlens[-1], heads.dtype)
            rows = heads.unsqueeze(0) if plan.is_packed else heads
            rows = apply_rotary_emb_qkv_(rows, *tables, self.rotary_emb.interleaved, num_heads_q=self.num_heads)
            heads = rows.squeeze(0) if plan.is_packed else rows
        q, k, v = heads.split((self.num_heads, self.num_heads_kv, self.num_heads_kv), -2)
        return self._run(flash_attn_cp_func, q, k, v, plan=plan, **self.inner_attn._options(causal, q.device))

    def _attend_with_cache(self, heads: Tensor, params: InferenceParams) -> Tensor:
        prefill = conditions.is_known(params.seqlen_offset == 0)
        lengths = params.lengths_per_sample
        if lengths is not None:
            lengths = lengths[params.batch_size_offset :][: heads.shape[0]]
        rotary = self.rotary_emb_dim > 0
        # The kernel that appends to the cache rotates, too; it knows neither xPos nor odd sizes.
        fused = self.use_flash_attn and not prefill and rotary
        fused = fused and self.rotary_emb.scale is None and self.rotary_emb_dim % 16 == 0
        if rotary and not fused:
            offset = params.seqlen_offset if lengths is None else lengths
            heads = self.rotary_emb(
                heads, seqlen_offset=offset, max_seqlen=params.max_seqlen, num_heads_q=self.num_heads
            )
        q, kv = self._split(heads)
        if prefill or not self.use_flash_attn:
            _require(prefill or lengths is None, "lengths_per_sample", "None without use_flash_attn", "a tensor")
            out: Tensor = self.inner_cross_attn(q, _update_kv_cache(kv, params, self.layer_idx))
            return out
        return self._decode(q, kv, params, params.seqlen_offset if lengths is None else lengths, fused)

    def _decode(
        self, q: Tensor, kv: Tensor, params: InferenceParams, cache_seqlens: int | Tensor, rotate: bool
    ) -> Tensor:
        """Append kv to the cache at cache_seqlens, rotated before with `rotate`, and attend to all of it."""
        caches = params.key_value_memory_dict
        _require(self.layer_idx in caches, "key_value_memory_dict", f"a cache of layer {self.layer_idx}", list(caches))
        cache = caches[self.layer_idx][params.batch_size_offset :][: q.shape[0]]
        rotary: dict[str, Any] = {}
        if rotate:
            cos, sin, *_ = self.rotary_emb._tables_covering(params.max_seqlen, q.device, q.dtype)
            rotary = {"rotary_cos": cos, "rotary_sin": sin, "rotary_interleaved": self.rotary_emb.interleaved}
        inner = self.inner_cross_attn
        k, v = kv.unbind(2)
        return flash_attn_with_kvcache(
            q,
            cache[:, :, 0],
            cache[:, :, 1],
            k,
            v,
            cache_seqlens=cache_seqlens,
            softmax_scale=inner.softmax_scale,
            causal=inner.causal,
            window_size=inner.window_size,
            alibi_slopes=inner._slopes_on(q.device),
            **rotary,
        )
