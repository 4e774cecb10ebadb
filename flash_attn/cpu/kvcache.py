"""Inference with a K/V cache: append, rotate, attend."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import replace
from typing import TYPE_CHECKING, NamedTuple

import torch

from ..eight_bit import EIGHT_BIT, FLOAT8, Descales
from . import checks
from .entry import entry_point
from .explain import Problem, explain_attention
from .forward import DENSE_Q_AXES, attend
from .invariant import BLOCK_KEYS, attend_invariant
from .kvcache_plan import PlanKey, check_plan
from .kvcache_scaling import Quantizer, TokenDescales, check_new_dtypes, check_tokens
from .latent import check_qv
from .mask_bits import MaskBits
from .overlap import check_written, same_view
from .scaling import EightBit, check_descales, check_operands, output_dtype, result_like, scaling_of
from .scores import NamedScores, ScoreOptions, ScoreRule, compute_dtype, is_unbounded
from .varlen import PAGED_AXES, MaybeTensor, check_pages, gather_pages

if TYPE_CHECKING:
    from typing_extensions import Unpack

PADDING_REQUEST = -1  # the length of a batch entry that is skipped


class CacheEntry(NamedTuple):
    """One batch entry: its cache row, the first key in use, the first row that some query sees or the call writes,
    cached and total length."""

    index: int  # type: ignore[assignment]
    row: int
    start: int
    needed: int
    cached: int
    total: int

    @property
    def is_padding(self) -> bool:
        return self.cached == PADDING_REQUEST


def rotate(x: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor, interleaved: bool) -> torch.Tensor:
    """Rotary embedding (Su et al., "RoFormer", 2021) of x (s, heads, d) in its first 2 * cos.shape[-1] dimensions.

    cos, sin: (s, rotary_dim / 2), or (1, rotary_dim / 2) for one angle for all rows. Pairs are (2i, 2i + 1) when
    interleaved, else (i, i + rotary_dim / 2). Returns a new tensor of x's dtype.
    """
    dtype, half = compute_dtype(x.dtype), cos.shape[-1]
    cos, sin = cos.to(dtype)[:, None], sin.to(dtype)[:, None]
    first = slice(0, 2 * half, 2) if interleaved else slice(0, half)
    second = slice(1, 2 * half, 2) if interleaved else slice(half, 2 * half)
    a, b = x[..., first].to(dtype), x[..., second].to(dtype)
    rotated = x.clone(memory_format=torch.contiguous_format)
    rotated[..., first] = a * cos - b * sin
    rotated[..., second] = a * sin + b * cos
    return rotated


def rotary_rows(cached: int, queries: int, new: int, one_position: bool) -> int:
    """Rows that the rotary tables need for a sequence: the new keys use the rows from `cached` on, and so do the
    queries, one row each or, if one_position, all the first."""
    return cached + max(min(queries, 1) if one_position else queries, new)


def _rotate_at(
    x: torch.Tensor, row: int, count: int, cos: torch.Tensor, sin: torch.Tensor, interleaved: bool
) -> torch.Tensor:
    """Rotate x by the angles in rows [row, row + count) of the tables."""
    return rotate(x, cos[row : row + count], sin[row : row + count], interleaved)


class Cache(NamedTuple):
    """K and V cache: (cache_batch, seqlen, h_k, d), or pages (blocks, page_size, h_k, d) with a block_table."""

    k: torch.Tensor
    v: torch.Tensor
    block_table: torch.Tensor | None

    @property
    def capacity(self) -> int:
        """Rows that one sequence can hold."""
        pages = 1 if self.block_table is None else self.block_table.shape[1]
        return min(pages * self.k.shape[1], checks.MAX_LENGTH)

    def row_indices(self, row: int, start: int, stop: int) -> torch.Tensor:
        """Indices, among all rows of the cache, of the rows [start, stop) of an entry."""
        size, positions = self.k.shape[1], torch.arange(start, max(start, stop), device="cpu")
        if self.block_table is None:
            return row * size + positions
        return self.block_table[row].long()[positions // size] * size + positions % size

    def read(self, entry: CacheEntry) -> tuple[torch.Tensor, torch.Tensor]:
        """Keys and values in use of one entry: (rows, h_k, d) each."""
        return self.rows(self.k, entry), self.rows(self.v, entry)

    def rows(self, x: MaybeTensor, entry: CacheEntry) -> MaybeTensor:
        """The rows in use of one entry of x, which is laid out as the cache is; None for None."""
        if x is None:
            return None
        if self.block_table is None:
            return x[entry.row, entry.start : entry.total]
        return gather_pages(x, self.block_table, entry.row, entry.start, entry.total)

    def append(self, entry: CacheEntry, k: torch.Tensor, v: torch.Tensor) -> None:
        """Write the new rows (rows, h_k, d) after the cached ones."""
        row_indices = self.row_indices(entry.row, entry.cached, entry.total)
        for cache, rows in ((self.k, k), (self.v, v)):
            if cache.dtype in FLOAT8:
                cache, rows = cache.view(torch.uint8), rows.view(torch.uint8)
            cache[row_indices // cache.shape[1], row_indices % cache.shape[1]] = rows


@entry_point
def fwd_kvcache(
    q: torch.Tensor,
    kcache: torch.Tensor,
    vcache: torch.Tensor,
    k: torch.Tensor | None,
    v: torch.Tensor | None,
    seqlens_k: torch.Tensor | None,
    rotary_cos: torch.Tensor | None,
    rotary_sin: torch.Tensor | None,
    cache_batch_idx: torch.Tensor | None,
    leftpad_k: torch.Tensor | None,
    block_table: torch.Tensor | None,
    alibi_slopes: torch.Tensor | None,
    out: torch.Tensor | None,
    softmax_scale: float,
    is_causal: bool,
    window_left: int,
    window_right: int,
    softcap: float,
    rotary_interleaved: bool,
    num_splits: int,
    plan: torch.Tensor | None = None,
    batch_invariant: bool = False,
    *,
    explain: bool = False,
    q_descale: torch.Tensor | None = None,
    k_descale: torch.Tensor | None = None,
    v_descale: torch.Tensor | None = None,
    v_per_channel: bool = False,
    out_dtype: torch.dtype | None = None,
    k_token_descale: torch.Tensor | None = None,
    v_token_descale: torch.Tensor | None = None,
    qv: torch.Tensor | None = None,
    mask_bits: torch.Tensor | None = None,
    mask_keys: int = 0,
    **named: Unpack[NamedScores],
) -> list[torch.Tensor] | dict[str, object]:
    """Attention of new queries over a cache that is first extended, in place, by new keys and values.

    The arguments that `fwd` has mean the same; masks are aligned to the end of the extended cache.

    Arguments:
        q: (b, sq, h, d).
        kcache, vcache: (cache_batch, seqlen, h_k, d), or (blocks, page_size, h_k, d) with block_table.
        k, v: None, or (b, s_new, h_k, d) that are written at rows seqlens_k .. of each sequence; need seqlens_k.
        seqlens_k: None (the whole cache is in use) or int32 (b): rows in use before the append. -1 skips the entry:
            nothing is read or written for it, its out is 0 and its lse +inf.
        rotary_cos, rotary_sin: None or (rows, rotary_dim / 2), q's dtype; need k and v. New keys are rotated by their
            cache row; query i by row seqlens_k + i under a causal or window mask, else by row seqlens_k.
        cache_batch_idx: None or int32 (b): the cache row of each batch entry (not with block_table). The rows that are
            written for one entry must not be read or written for another, here and through the pages of a block_table.
        leftpad_k: None or int32 (b): rows to skip at the start of each sequence.
        block_table: None or int32 (b, max_blocks); only entries in use are read.
        rotary_interleaved: rotate pairs (2i, 2i + 1) instead of halves.
        num_splits: at least 0; without effect, nothing is split here.
        plan: None, or the result of `kvcache_plan` for the same sizes and lengths; it is only checked.
        batch_invariant: compute every row by `attend_invariant`.
        q_descale, k_descale, v_descale, v_per_channel, out_dtype: as in `fwd`, k and v being the caches. Wider new rows
            are quantised by the descale that they will be read with.
        k_token_descale, v_token_descale: in place of k_descale, v_descale with new rows: float32 (cache_batch, seqlen,
            h_k), or (blocks, page_size, h_k), of each row. Those of the new rows are computed and written.
        qv: None or (b, sq, h, d_v), whose products with the values add to the scores; vcache then has a head dim d_v of
            its own, up to 512, and d may be 0.
        mask_bits, mask_keys: see MaskBits; mask_bits is None or its words.
        explain, named: as in `fwd`. A skipped entry has no sink.

    Returns [out, lse] as in `fwd`.

    Raises RuntimeError naming the argument as flash_attn_with_kvcache does, also when the cache has no room or a table
    entry in use names no page; nothing is written then.
    """
    one_position = not is_causal and is_unbounded(window_left) and is_unbounded(window_right)
    options = ScoreOptions(softmax_scale, softcap, is_causal, window_left, window_right, alibi_slopes, **named)
    tokens = TokenDescales(k_token_descale, v_token_descale)
    given = Descales(q_descale, k_descale, v_descale, v_per_channel)
    descales = given._replace(k=given.k if tokens.k is None else tokens.k, v=given.v if tokens.v is None else tokens.v)
    call = EightBit.of(q, kcache, vcache, descales, out_dtype)
    quantizer = Quantizer(given, tokens)
    cache = _check_tensors(q, kcache, vcache, seqlens_k, block_table, options, out, plan, call, qv)
    _check_new_keys(q, cache, k, v, seqlens_k, rotary_cos, call)
    mask = MaskBits(mask_bits, mask_keys)
    mask.check(q)
    check_tokens(kcache, vcache, k, v, given, tokens)
    checks.require(num_splits >= 0, "num_splits", "a value >= 0", num_splits)
    entries = check_entries(q, cache, k, seqlens_k, cache_batch_idx, leftpad_k, window_left)
    _check_rotary(q, k, entries, rotary_cos, rotary_sin, one_position)
    read = {
        "q": q,
        "k": k,
        "v": v,
        "cache_seqlens": seqlens_k,
        "rotary_cos": rotary_cos,
        "rotary_sin": rotary_sin,
        "cache_batch_idx": cache_batch_idx,
        "cache_leftpad": leftpad_k,
        "block_table": block_table,
        "alibi_slopes": alibi_slopes,
        "sinks": options.sinks,
        "qv": qv,
        "mask_bits": mask_bits,
        **dict(zip(("q_descale", "k_descale", "v_descale"), given[:3])),
    }
    alike = rotary_cos is None and (call is None or k is None or k.dtype in EIGHT_BIT or quantizer.is_alike())
    _check_written(cache, out, plan, tokens, alike, read)
    if plan is not None:
        head_dim_v = 0 if qv is None else qv.shape[3]
        key = _plan_key(q, cache, k, is_causal, window_left, window_right, num_splits, batch_invariant, head_dim_v)
        check_plan(plan, key, [entry.cached for entry in entries], leftpad_k)

    batch, sq, heads, _ = q.shape
    rule = ScoreRule.create(options, batch, q)
    if explain:
        problems = [Problem(1, sq, entry.total - entry.start) for entry in entries if not entry.is_padding]
        block_keys = BLOCK_KEYS if batch_invariant else 0
        is_plain = options.sinks is None and qv is None and mask_bits is None
        fields = explain_attention("kvcache", q, kcache, vcache, rule, problems, is_plain, block_keys)
        return {**fields, "appends": k is not None, "rotates": rotary_cos is not None}
    if out is None:
        out = q.new_empty(checks.output_shape(q, vcache), dtype=output_dtype(q, vcache, call))
    scaling = scaling_of(q, kcache, vcache, call)
    lse = q.new_empty((batch, heads, sq), dtype=compute_dtype(q.dtype))
    attend_entry: Callable[..., object] = attend_invariant if batch_invariant else attend
    for entry in entries:
        i = entry.index
        if entry.is_padding:
            out[i].zero_()
            lse[i].fill_(math.inf)
            continue
        queries = q[i]
        if k is not None and v is not None:
            new_k, new_v = k[i], v[i]
            if rotary_cos is not None and rotary_sin is not None:
                angles = (rotary_cos, rotary_sin, rotary_interleaved)
                new_k = _rotate_at(new_k, entry.cached, k.shape[1], *angles)
                queries = _rotate_at(queries, entry.cached, 1 if one_position else sq, *angles)
            if call is not None:
                new_k, new_v = quantizer.quantized(cache, entry, new_k, new_v)
            cache.append(entry, new_k, new_v)
        keys, values = cache.read(entry)
        if scaling is not None:
            queries = scaling.queries(queries, i)
            keys = scaling.scaled(keys, cache.rows(scaling.k_rows, entry))
            values = scaling.scaled(values, cache.rows(scaling.v_rows, entry))
        if qv is not None:
            queries, keys = torch.cat([queries, qv[i]], -1), torch.cat([keys, values], -1)
        result = result_like(out[i], scaling)
        operands = [x.unsqueeze(0) for x in (queries, keys, values, result, lse[i])]
        rule_i = replace(rule.for_batch(i), tensors=mask.of_entry(i, keys.shape[0], heads))
        attend_entry(*operands, rule_i, sinks=options.sinks)
        if scaling is not None:
            scaling.store(out[i], result, i)
    return [out, lse]


def _check_tensors(
    q: torch.Tensor,
    kcache: torch.Tensor,
    vcache: torch.Tensor,
    seqlens_k: torch.Tensor | None,
    block_table: torch.Tensor | None,
    options: ScoreOptions,
    out: torch.Tensor | None,
    plan: torch.Tensor | None,
    call: EightBit | None,
    qv: torch.Tensor | None,
) -> Cache:
    cache_axes, has_qv = DENSE_Q_AXES if block_table is None else PAGED_AXES, qv is not None
    check_operands(q, kcache, vcache, DENSE_Q_AXES, cache_axes, call, names=("k_cache", "v_cache"), has_qv=has_qv)
    check_qv(qv, q, vcache, call)
    if not has_qv:
        checks.check_shape("v_cache", vcache, kcache.shape)
    if kcache.shape[2] > 0:
        checks.check_at_most("q", q.shape[1] * (q.shape[2] // kcache.shape[2]), "rows for each K/V head")
    options.check(q, q.shape[0], 0.0)
    checks.require(options.origins is None, "origins", "None over a KV cache", "a tensor")
    for name in ("mask", "attn_bias", "rel_bias"):
        checks.require(getattr(options, name) is None, name, "None over a KV cache", "one")
    check_descales(q, kcache, vcache, call, q.shape[0])
    if out is not None:
        checks.check_like_query("out", out, q, checks.output_shape(q, vcache), dtype=output_dtype(q, vcache, call))
    if plan is not None:
        checks.check_strided("plan", plan)
    cache = Cache(kcache, vcache, block_table)
    checks.check_block_table(block_table, q.shape[0])
    checks.check_lengths("cache_seqlens", seqlens_k, [q.shape[0]])
    return cache


def _check_written(
    cache: Cache,
    out: torch.Tensor | None,
    plan: torch.Tensor | None,
    tokens: TokenDescales,
    alike: bool,
    read: dict[str, torch.Tensor | None],
) -> None:
    """The caches count as outputs if there are new rows. One cache for k and v does not overlap if both get equal rows.

    alike: equal rows of k and v become equal rows of the caches.
    """
    k, v = read["k"], read["v"]
    written, caches = {"out": out, "plan": plan}, {"k_cache": cache.k, "v_cache": cache.v}
    written.update(k_descale=tokens.k, v_descale=tokens.v)
    if k is None or v is None or k.numel() == 0:
        check_written(written, {**read, **caches})
        return
    if alike and same_view(cache.k, cache.v) and same_view(k, v):
        del caches["v_cache"]
    check_written({**written, **caches}, read)


def _plan_key(
    q: torch.Tensor,
    cache: Cache,
    k: torch.Tensor | None,
    is_causal: bool,
    window_left: int,
    window_right: int,
    num_splits: int,
    batch_invariant: bool,
    head_dim_v: int,
) -> PlanKey:
    batch, seqlen_q, heads, head_dim = q.shape
    sizes = batch, seqlen_q, 0 if k is None else k.shape[1], heads, cache.k.shape[2], head_dim, cache.capacity
    return PlanKey.of(sizes, is_causal, (window_left, window_right), num_splits, batch_invariant, head_dim_v)


def _check_new_keys(
    q: torch.Tensor,
    cache: Cache,
    k: torch.Tensor | None,
    v: torch.Tensor | None,
    seqlens_k: torch.Tensor | None,
    rotary_cos: torch.Tensor | None,
    call: EightBit | None,
) -> None:
    if k is None:
        checks.require(v is None, "v", "None when k is None", "a tensor")
        return
    checks.require(v is not None, "v", "a tensor when k is given", None)
    checks.require(seqlens_k is not None, "cache_seqlens", "cache lengths when k is given", None)
    dtypes: tuple[torch.dtype | None, torch.dtype | None] = (None, None)
    assert v is not None
    if call is not None:
        checks.check_on_cpu("k", k)
        checks.check_on_cpu("v", v)
        check_new_dtypes(q, cache.k, cache.v, k, v, rotary_cos)
        dtypes = (k.dtype, v.dtype)
    value_dim = cache.v.shape[3]
    checks.check_key_value(q, k, v, DENSE_Q_AXES, batch=q.shape[0], dtypes=dtypes)
    checks.check_shape("k", k, [q.shape[0], k.shape[1], *cache.k.shape[2:]])
    checks.check_shape("v", v, [*k.shape[:3], value_dim])


def check_entries(
    q: torch.Tensor,
    cache: Cache,
    k: torch.Tensor | None,
    seqlens_k: torch.Tensor | None,
    cache_batch_idx: torch.Tensor | None,
    leftpad_k: torch.Tensor | None,
    window_left: int,
) -> list[CacheEntry]:
    """Resolve every batch entry to its cache row and lengths, and check that they fit."""
    batch, paged = q.shape[0], cache.block_table is not None
    checks.check_lengths("cache_leftpad", leftpad_k, [batch])
    checks.check_lengths("cache_batch_idx", cache_batch_idx, [batch])
    none_with_pages = not (paged and cache_batch_idx is not None)
    checks.require(none_with_pages, "cache_batch_idx", "None when block_table is given", "a tensor")
    rows = list(range(batch)) if cache_batch_idx is None else cache_batch_idx.tolist()
    if not paged and cache_batch_idx is None:
        count = cache.k.shape[0]
        checks.require(count == batch, "k_cache", f"batch size {batch} (that of q) without cache_batch_idx", count)
    lengths = [cache.capacity] * batch if seqlens_k is None else seqlens_k.tolist()
    padding = [0] * batch if leftpad_k is None else leftpad_k.tolist()
    new = 0 if k is None else k.shape[1]
    entries = []
    for i, (row, cached) in enumerate(zip(rows, lengths)):
        total = cached + new
        start = min(max(padding[i], 0), max(total, 0))
        seen = start if is_unbounded(window_left) else max(start, total - q.shape[1] - window_left)
        entry = CacheEntry(
            index=i, row=row, start=start, needed=min(seen, cached) if new else seen, cached=cached, total=total
        )
        if not entry.is_padding:
            _check_entry(entry, cache, new)
        entries.append(entry)
    if new > 0 and (paged or cache_batch_idx is not None):
        _check_own_rows([entry for entry in entries if not entry.is_padding], cache)
    return entries


def _check_entry(entry: CacheEntry, cache: Cache, new: int) -> None:
    """A length that the cache holds, and a cache row, or pages of the rows that some query sees or the call writes."""
    known = f"lengths >= 0, or {PADDING_REQUEST} for an inactive request"
    checks.require(entry.cached >= 0, "cache_seqlens", known, entry.cached)
    fits = f"cache length plus {new} new rows of at most {cache.capacity}"
    checks.require(entry.total <= cache.capacity, "cache_seqlens", fits, f"{entry.cached} + {new}")
    count, rows = cache.k.shape[:2]
    if cache.block_table is None:
        checks.require(0 <= entry.row < count, "cache_batch_idx", f"entries in [0, {count})", entry.row)
    else:
        check_pages(cache.block_table, entry.row, entry.needed, entry.total, rows, count)


def _check_own_rows(entries: list[CacheEntry], cache: Cache) -> None:
    """Rows that the call writes for one sequence must not be rows that it reads or writes for another."""
    name = "cache_batch_idx" if cache.block_table is None else "block_table"
    writer = cache.k.new_empty(cache.k.shape[0] * cache.k.shape[1], dtype=torch.int32)  # of the rows that are needed
    needed = [cache.row_indices(entry.row, entry.needed, entry.total) for entry in entries]
    for row_indices in needed:
        writer[row_indices] = -1
    for entry in entries:
        writer[cache.row_indices(entry.row, entry.cached, entry.total)] = entry.index
    for entry, row_indices in zip(entries, needed):
        others = writer[row_indices]
        others = others[(others >= 0) & (others != entry.index)]
        got = f"rows of sequence {others[0].item()} that sequence {entry.index} uses" if others.numel() else None
        checks.require(got is None, name, "new rows that no other sequence uses", got)


def _check_rotary(
    q: torch.Tensor,
    k: torch.Tensor | None,
    entries: list[CacheEntry],
    cos: torch.Tensor | None,
    sin: torch.Tensor | None,
    one_position: bool,
) -> None:
    if cos is None:
        checks.require(sin is None, "rotary_sin", "None when rotary_cos is None", "a tensor")
        return
    checks.require(sin is not None, "rotary_sin", "a tensor when rotary_cos is given", None)
    checks.require(k is not None, "k", "new keys when rotary_cos is given", None)
    assert k is not None and sin is not None
    checks.check_rank("rotary_cos", cos, "rows, rotary_dim / 2")
    checks.check_like_query("rotary_cos", cos, q, cos.shape)
    checks.check_like_query("rotary_sin", sin, q, cos.shape)
    fits = 2 * cos.shape[1] <= q.shape[3]
    checks.require(fits, "rotary_cos", f"at most {q.shape[3] // 2} columns (half the head dim)", cos.shape[1])
    check_rotary_rows(q, k, entries, cos, one_position)


def check_rotary_rows(
    q: torch.Tensor, k: torch.Tensor, entries: list[CacheEntry], cos: torch.Tensor, one_position: bool
) -> None:
    """The tables have an angle for every position."""
    lengths = [0, *(entry.cached for entry in entries if not entry.is_padding)]
    needed = max(rotary_rows(cached, q.shape[1], k.shape[1], one_position) for cached in lengths)
    checks.require(cos.shape[0] >= needed, "rotary_cos", f"at least {needed} rows", cos.shape[0])
