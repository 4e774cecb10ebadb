"""FlashMLA's public functions, computed by flash_attn: the same arguments, results and conventions.

A cached row (head_dim,) is a key, and its first head_dim_v columns are the value.
"""

from __future__ import annotations

import dataclasses
from typing import Any

import torch
from torch import Tensor

from flash_attn import flash_attn_with_kvcache
from flash_attn.batch_invariance import is_batch_invariant
from flash_attn.ops import arguments, latent, library
from flash_attn.ops.attention_args import KvCacheArgs
from flash_mla._rows import Rows, parts
from flash_mla._selection import existing_first, selected_table

_CHUNK = 1 << 24  # numbers that the scores of max_logits are computed from at a time


@dataclasses.dataclass
class FlashMLASchedMeta:
    """What the calls with one metadata have in common: sizes and options of the first one, by name."""

    have_initialized: bool = False
    config: dict[str, object] | None = None
    tile_scheduler_metadata: Tensor | None = None  # a field of FlashMLA: nothing is scheduled here
    num_splits: Tensor | None = None  # likewise

    def check(self, **config: object) -> None:
        """Raise RuntimeError unless this is the first call or one like it."""
        made_for = config if self.config is None else self.config
        for name, value in config.items():
            if made_for[name] != value:
                raise RuntimeError(
                    f"tile_scheduler_metadata: expected one of calls with {name} {value}, got one with {made_for[name]}"
                )
        self.have_initialized, self.config = True, made_for


def get_mla_metadata(*args: object, **kwargs: object) -> tuple[FlashMLASchedMeta, None]:
    """An empty FlashMLASchedMeta and None, which `flash_mla_with_kvcache` takes; all arguments are unused."""
    return FlashMLASchedMeta(), None


def flash_mla_with_kvcache(
    q: Tensor,
    k_cache: Tensor,
    block_table: Tensor | None,
    cache_seqlens: Tensor | None,
    head_dim_v: int,
    tile_scheduler_metadata: FlashMLASchedMeta,
    num_splits: None = None,
    softmax_scale: float | None = None,
    causal: bool = False,
    is_fp8_kvcache: bool = False,
    indices: Tensor | None = None,
    attn_sink: Tensor | None = None,
    extra_k_cache: Tensor | None = None,
    extra_indices_in_kvcache: Tensor | None = None,
    topk_length: Tensor | None = None,
    extra_topk_length: Tensor | None = None,
) -> tuple[Tensor, Tensor]:
    """Decoding over a latent cache: dense by block_table and cache_seqlens, or sparse by indices.

    Arguments:
        q: (batch, seqlen_q, nheads, head_dim), float16 or bfloat16, on the CPU also float32 and float64.
        k_cache: (num_pages, page_size, nheads_k, head_dim) of q's dtype; with indices nheads_k is 1.
        block_table: int32 (batch, max_pages). The pages of each sequence; unused with indices.
        cache_seqlens: int32 (batch,). Keys of each sequence; unused with indices.
        head_dim_v: int, at most head_dim and 512.
        tile_scheduler_metadata: FlashMLASchedMeta of calls with these sizes.
        num_splits: None.
        softmax_scale: float. Default: 1 / sqrt(head_dim).
        causal: bool. Query i of seqlen_q sees all but the last seqlen_q - 1 - i keys; not with indices.
        is_fp8_kvcache: bool. k_cache has bytes (num_pages, page_size, 1, 656 or 584) in the layouts of README.md.
        indices: int32 (batch, seqlen_q, topk). The rows of k_cache that each query sees: page * page_size + row. One
            that names no row is skipped, one that comes twice counts twice.
        attn_sink: (nheads,) float32. A further logit, in natural-log units, without a value: out is scaled by
            exp(lse) / (exp(lse) + exp(attn_sink)).
        topk_length: int32 (batch,). How many of the leftmost indices count.
        extra_k_cache, extra_indices_in_kvcache, extra_topk_length: further rows, of another cache.

    Returns:
        out: (batch, seqlen_q, nheads, head_dim_v), 0 in a row without a key.
        softmax_lse: (batch, nheads, seqlen_q) float32, natural logarithm without the sink; +inf in a row without a key.

    Raises RuntimeError, TypeError or NotImplementedError that names the argument; nothing is computed then.
    """
    arguments.check_tensors(("q", "k_cache"), (q, k_cache))
    arguments.check_rank("q", q, "batch, seqlen, heads, head_dim")
    if not isinstance(tile_scheduler_metadata, FlashMLASchedMeta):
        got = type(tile_scheduler_metadata).__name__
        raise TypeError(f"tile_scheduler_metadata: expected a FlashMLASchedMeta, got {got}")
    if num_splits is not None:
        raise RuntimeError(f"num_splits: expected None, got {arguments.shown(num_splits)}")
    of_indices = {"extra_k_cache": extra_k_cache, "extra_indices_in_kvcache": extra_indices_in_kvcache,
                  "topk_length": topk_length, "extra_topk_length": extra_topk_length}  # fmt: skip
    arguments.check_optional_tensors(
        ("block_table", "cache_seqlens", "indices", "attn_sink", *of_indices),
        (block_table, cache_seqlens, indices, attn_sink, *of_indices.values()),
    )
    cache = Rows("k_cache", k_cache, arguments.flag("is_fp8_kvcache", is_fp8_kvcache))
    extra = None if extra_k_cache is None else Rows("extra_k_cache", extra_k_cache, cache.is_fp8)
    _check_columns("k_cache", cache.columns, q, head_dim_v)
    _check_sink(attn_sink, q)
    scale = arguments.scale(softmax_scale, q.shape[-1])
    if indices is None:
        _require_none("without indices", **of_indices)
        for name, value in (("block_table", block_table), ("cache_seqlens", cache_seqlens)):
            if value is None:
                raise RuntimeError(f"{name}: expected a tensor without indices, got None")
    else:
        if causal:
            raise RuntimeError("causal: expected False with indices, got True")
        _check_selection(q, cache, "k_cache", "indices", indices, "topk_length", topk_length)
        if (extra is None) != (extra_indices_in_kvcache is None):
            raise RuntimeError("extra_indices_in_kvcache: expected to be given exactly with extra_k_cache")
        if extra is not None and extra_indices_in_kvcache is not None:
            _check_columns("extra_k_cache", extra.columns, q, head_dim_v)
            _check_selection(q, extra, "extra_k_cache", "extra_indices_in_kvcache", extra_indices_in_kvcache,
                             "extra_topk_length", extra_topk_length)  # fmt: skip
        else:
            _require_none("without extra_k_cache", extra_topk_length=extra_topk_length)
    _check_kernel(q, head_dim_v, k_cache.shape[2], softmax_scale=scale)
    tile_scheduler_metadata.check(
        batch=q.shape[0], seqlen_q=q.shape[1], nheads=q.shape[2], page_size=k_cache.shape[1], nheads_k=k_cache.shape[2],
        causal=causal, is_fp8_kvcache=is_fp8_kvcache, topk=None if indices is None else indices.shape[-1],
        extra_page_size=None if extra is None else extra.page_size,
        extra_topk=None if extra_indices_in_kvcache is None else extra_indices_in_kvcache.shape[-1],
    )  # fmt: skip
    if indices is None:
        out, lse = _attend(
            q, _readable(cache, q, head_dim_v), head_dim_v, block_table=block_table, cache_seqlens=cache_seqlens,
            softmax_scale=scale, causal=causal,
        )  # fmt: skip
    else:
        out, lse = _attend_selected(
            q, cache, indices, topk_length, extra, extra_indices_in_kvcache, extra_topk_length, head_dim_v, scale
        )  # fmt: skip
    return _with_sink(out, lse, attn_sink), lse


def flash_mla_sparse_fwd(
    q: Tensor,
    kv: Tensor,
    indices: Tensor,
    sm_scale: float,
    d_v: int = 512,
    attn_sink: Tensor | None = None,
    topk_length: Tensor | None = None,
) -> tuple[Tensor, Tensor, Tensor]:
    """Prefill over the rows that indices name.

    Arguments:
        q: (seqlen_q, nheads, head_dim), float16 or bfloat16, on the CPU also float32 and float64.
        kv: (seqlen_kv, 1, head_dim) of q's dtype.
        indices: int32 (seqlen_q, 1, topk). The rows of kv that each query sees. One that names no row is skipped, one
            that comes twice counts twice.
        sm_scale: float, factor of the scores.
        d_v: int, at most head_dim and 512.
        attn_sink: (nheads,) float32. A further logit, in natural-log units, without a value: out is scaled by
            exp(lse) / (exp(lse) + exp(attn_sink)).
        topk_length: int32 (seqlen_q,). How many of the leftmost indices count.

    Returns:
        out: (seqlen_q, nheads, d_v), 0 in a row without a key.
        max_logits: (seqlen_q, nheads) float32, the largest scaled score; -inf in a row without a key.
        lse: (seqlen_q, nheads) float32, natural logarithm without the sink; +inf in a row without a key.

    Raises RuntimeError, TypeError or NotImplementedError that names the argument; nothing is computed then.
    """
    arguments.check_tensors(("q", "kv", "indices"), (q, kv, indices))
    arguments.check_optional_tensors(("attn_sink", "topk_length"), (attn_sink, topk_length))
    arguments.check_rank("q", q, "seqlen, heads, head_dim")
    arguments.check_rank("kv", kv, "seqlen, heads, head_dim")
    if kv.shape[1] != 1:
        raise RuntimeError(f"kv: expected shape (seqlen_kv, 1, head_dim), got {list(kv.shape)}")
    _check_columns("kv", kv.shape[-1], q, d_v, "d_v")
    _check_sink(attn_sink, q)
    arguments.check_rank("indices", indices, "seqlen, 1, topk")
    rows, queries = Rows("kv", kv.unsqueeze(1), False), q.unsqueeze(1)
    _check_selection(queries, rows, "kv", "indices", indices, "topk_length", topk_length)
    scale = arguments.number("sm_scale", sm_scale)
    _check_kernel(q, d_v, 1, "d_v", sm_scale=scale)
    out, lse = _attend_selected(queries, rows, indices, topk_length, None, None, None, d_v, scale)
    max_logits = _max_logits(q, rows, indices.flatten(0, 1), topk_length, scale, lse.dtype)
    return _with_sink(out, lse, attn_sink).squeeze(1), max_logits, lse.squeeze(2)


def _check_kernel(q: Tensor, head_dim_v: int, nheads_k: int, name_v: str = "head_dim_v", **scale: float) -> None:
    """Raise NotImplementedError for sizes, and a scale by its name, that CUDA has no kernel for."""
    if q.device.type != "cuda":
        return
    rotated, values = latent.KERNEL_DIMS
    if head_dim_v != values or q.shape[-1] - values not in (0, rotated):
        raise NotImplementedError(
            f"q: expected head dim {values} or {rotated + values} with {name_v} {values} on cuda, got {q.shape[-1]} "
            f"with {name_v} {head_dim_v}"
        )
    if nheads_k != 1:
        raise NotImplementedError(f"k_cache: expected one K/V head on cuda, got {nheads_k}")
    for name, value in scale.items():
        if value <= 0:
            raise NotImplementedError(f"{name}: expected a number above 0 on cuda, got {value}")


def _require_none(reason: str, **given: object) -> None:
    for name, value in given.items():
        if value is not None:
            raise RuntimeError(f"{name}: expected None {reason}, got a tensor")


def _check_columns(name: str, columns: int, q: Tensor, head_dim_v: int, name_v: str = "head_dim_v") -> None:
    if columns != q.shape[-1]:
        raise RuntimeError(f"{name}: expected rows of q's head dim ({q.shape[-1]}), got {columns}")
    if not 1 <= arguments.integer(name_v, head_dim_v) <= columns:
        raise RuntimeError(f"{name_v}: expected a value from 1 to {columns}, got {head_dim_v}")


def _check_sink(sink: Tensor | None, q: Tensor) -> None:
    if sink is not None and (list(sink.shape) != [q.shape[-2]] or sink.device != q.device):
        raise RuntimeError(f"attn_sink: expected shape [{q.shape[-2]}] on {q.device}, got {arguments.shown(sink)}")


def _check_selection(
    q: Tensor, rows: Rows, rows_name: str, name: str, indices: Tensor, length_name: str, length: Tensor | None
) -> None:
    """indices (batch, seqlen_q, topk) and their lengths (batch,)."""
    if rows.cache.shape[2] != 1:
        raise RuntimeError(f"{rows_name}: expected one K/V head with {name}, got {rows.cache.shape[2]}")
    if rows.cache.device != q.device:
        raise RuntimeError(f"{rows_name}: expected a tensor on q's device ({q.device}), got one on {rows.cache.device}")
    if not rows.is_fp8 and rows.cache.dtype != q.dtype:
        raise RuntimeError(f"{rows_name}: expected the dtype of q ({q.dtype}), got {rows.cache.dtype}")
    if indices.dim() != 3 or indices.shape[:2] != q.shape[:2] or indices.device != q.device:
        shape = [*q.shape[:2], "topk"]
        raise RuntimeError(f"{name}: expected shape {shape} on {q.device}, got {arguments.shown(indices)}")
    if indices.dtype not in (torch.int32, torch.int64):
        raise RuntimeError(f"{name}: expected dtype int32 or int64, got {indices.dtype}")
    if length is not None:
        arguments.check_lengths(length_name, length, q.shape[0], q.device)


def _attend(q: Tensor, rows: Tensor, head_dim_v: int, **options: Any) -> tuple[Tensor, Tensor]:
    """(out, lse) of q (batch, seqlen_q, nheads, head_dim) over rows (pages, page_size, nheads_k, head_dim or bytes)."""
    try:
        if rows.dtype == torch.uint8:
            return _attend_to_bytes(q, rows, head_dim_v, **options)
        result = flash_attn_with_kvcache(
            _rotated(q, head_dim_v), _rotated(rows, head_dim_v), rows.narrow(-1, 0, head_dim_v),
            qv=q.narrow(-1, 0, head_dim_v), return_softmax_lse=True, **options,
        )  # fmt: skip
    except (RuntimeError, TypeError) as error:
        arguments.rename(error, {"v_cache": "k_cache", "qv": "q"})
        raise
    return result[0], result[1]


def _attend_to_bytes(
    q: Tensor,
    rows: Tensor,
    head_dim_v: int,
    *,
    block_table: Tensor,
    cache_seqlens: Tensor,
    softmax_scale: float,
    causal: bool = False,
) -> tuple[Tensor, Tensor]:
    """The same over rows (pages, page_size, 1, 656) of uint8, which the kernel converts as it reads them."""
    values, scales, rope = parts(rows)
    names = ("k", "v", "rotary_cos", "rotary_sin", "cache_batch_idx", "cache_leftpad", "alibi_slopes", "out", "plan",
              "k_token_descale", "v_token_descale")  # fmt: skip
    absent: dict[str, Any] = dict.fromkeys(names)
    args = KvCacheArgs(
        q=q[..., head_dim_v:], qv=q[..., :head_dim_v], k_cache=rope, v_cache=values, v_descale=scales,
        block_table=block_table, cache_seqlens=cache_seqlens, softmax_scale=softmax_scale, causal=causal,
        window_left=-1, window_right=-1, softcap=0.0, rotary_interleaved=False, num_splits=0,
        batch_invariant=is_batch_invariant(), **absent,
    )  # fmt: skip
    return library.kvcache_attention(args)


def _rotated(x: Tensor, head_dim_v: int) -> Tensor:
    """The columns after the values; without any, zeros of those that CUDA kernels read."""
    columns = x.narrow(-1, head_dim_v, x.shape[-1] - head_dim_v)
    if not x.is_cuda or columns.shape[-1] > 0:
        return columns
    return x.new_zeros(latent.KERNEL_DIMS[0]).expand(*x.shape[:-1], -1)


def _readable(cache: Rows, q: Tensor, head_dim_v: int) -> Tensor:
    """All rows of a cache as `_attend` reads them: not copied where there is a kernel for that."""
    if cache.has_kernel(q, head_dim_v):
        return cache.stored
    indices = torch.arange(cache.count, device=q.device)
    return cache.gather(indices, q.dtype).view(*cache.cache.shape[:3], cache.columns)


def _attend_selected(
    q: Tensor,
    cache: Rows,
    indices: Tensor,
    length: Tensor | None,
    extra: Rows | None,
    extra_indices: Tensor | None,
    extra_length: Tensor | None,
    head_dim_v: int,
    scale: float,
) -> tuple[Tensor, Tensor]:
    """(out, lse) of queries (batch, seqlen_q, nheads, head_dim), each a request over its own rows."""
    batch, seqlen_q = q.shape[:2]
    options: dict[str, Any] = {"softmax_scale": scale}
    if extra is None and cache.has_kernel(q, head_dim_v):
        rows, *steps = cache.pool()
        options["block_table"], lengths = selected_table(indices, length, cache.count, cache.page_size, *steps)
    else:
        rows, lengths = _gathered(q, ((cache, indices, length), (extra, extra_indices, extra_length)))
        options["block_table"] = torch.arange(batch * seqlen_q, dtype=torch.int32, device=q.device).unsqueeze(1)
    out, lse = _attend(q.flatten(0, 1).unsqueeze(1), rows, head_dim_v, cache_seqlens=lengths.flatten(), **options)
    return out.view(batch, seqlen_q, *out.shape[2:]), lse.view(batch, seqlen_q, q.shape[2]).transpose(1, 2).contiguous()


def _gathered(q: Tensor, parts: Any) -> tuple[Tensor, Tensor]:
    """(rows (requests, rows, 1, head_dim) of which the first exist, how many (batch, seqlen_q)) of several caches."""
    rows, orders, counts, first = [], [], [], 0
    for cache, indices, length in parts:
        if cache is None:
            continue
        order, count = existing_first(indices, cache.count, None if length is None else length[:, None])
        known = indices.clamp(0, max(cache.count - 1, 0)).long()
        if cache.count > 0:
            rows.append(cache.gather(known, q.dtype))
        else:
            rows.append(q.new_zeros(*indices.shape, cache.columns))
        place = torch.arange(indices.shape[-1], device=q.device)
        orders.append(torch.where(place < count[..., None], first + order, -1))
        counts.append(count)
        first += indices.shape[-1]
    joined = torch.cat(orders, -1)
    front, _ = existing_first(joined, max(first, 1), None)
    places = joined.gather(-1, front).clamp(min=0)[..., None]
    every = torch.cat(rows, -2)
    selected = every.gather(-2, places.expand(*places.shape[:-1], every.shape[-1]))
    return selected.flatten(0, 1).unsqueeze(2), torch.stack(counts).sum(0, dtype=torch.int32)


def _with_sink(out: Tensor, lse: Tensor, sink: Tensor | None) -> Tensor:
    """out (..., seqlen_q, nheads, d) scaled by exp(lse) / (exp(lse) + exp(sink)); lse (..., nheads, seqlen_q)."""
    if sink is None:
        return out
    share = torch.sigmoid(lse.transpose(-1, -2) - sink.to(lse.dtype))
    share = share.masked_fill(sink == float("inf"), 0.0)  # the difference of two infinities is NaN
    return (out * share[..., None]).to(out.dtype)


def _max_logits(
    q: Tensor, rows: Rows, indices: Tensor, length: Tensor | None, scale: float, dtype: torch.dtype
) -> Tensor:
    """The largest scaled score of each query and head (seqlen_q, nheads) over rows that exist."""
    result = q.new_full(q.shape[:2], float("-inf"), dtype=dtype)
    topk = indices.shape[1]
    if topk == 0 or rows.count == 0:
        return result
    exists = (indices >= 0) & (indices < rows.count)
    if length is not None:
        exists = exists & (torch.arange(topk, device=q.device) < length[:, None])
    step = max(1, _CHUNK // (topk * max(q.shape[1], q.shape[2])))
    for first in range(0, q.shape[0], step):
        part = slice(first, first + step)
        keys = rows.gather(indices[part].clamp(0, rows.count - 1).long(), dtype)
        scores = torch.bmm(q[part].to(dtype), keys.transpose(1, 2)) * scale
        result[part] = scores.masked_fill(~exists[part, None], float("-inf")).amax(-1)
    return result
