"""A block_table for each K/V head, (batch, nheads_k, max_pages): K/V heads become requests of one head each.

The pages of all heads are one pool of overlapping views, so that nothing of the cache is copied and no kernel knows.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping

import torch
from torch import Tensor

from flash_attn._types import Descale, TensorOrTuple
from flash_attn.ops import arguments, outputs
from flash_attn.ops.attention_args import replaced
from flash_attn.ops.quant_args import QuantArgs


def attend(
    call: Callable[..., TensorOrTuple],
    q: Tensor,
    k_cache: Tensor,
    v_cache: Tensor,
    *,
    block_table: Tensor,
    cache_seqlens: int | Tensor | None,
    cache_leftpad: Tensor | None,
    alibi_slopes: Tensor | None,
    qv: Tensor | None,
    out: Tensor | None,
    quant: QuantArgs,
    return_softmax_lse: bool,
    reject: Mapping[str, object],
    **options: object,
) -> TensorOrTuple:
    """`inference.attend_over_cache`, which is `call`, by one request for each sequence and K/V head.

    reject: arguments that such a call does not take, by name.
    """
    axes = {"k_descale_axis": quant.k_descale_axis, "v_descale_axis": quant.v_descale_axis}
    for name, value in {**reject, **axes}.items():
        if value is not None:
            raise NotImplementedError(f"{name}: expected None with a block_table of each K/V head, got a value")
    arguments.check_optional_tensors(("qv",), (qv,))
    arguments.check_kvcache_ranks(q, k_cache, None, None)
    arguments.check_kvcache_ranks(q, v_cache, None, None, "v_cache")
    batch, heads_k = q.shape[0], k_cache.shape[2]
    if list(block_table.shape[:2]) != [batch, heads_k]:
        got = list(block_table.shape)
        raise RuntimeError(f"block_table: expected shape [{batch}, {heads_k}, max_blocks], got {got}")
    if heads_k == 0 or q.shape[2] % heads_k:
        raise RuntimeError(f"q: expected a head count divisible by the K/V head count {heads_k}, got {q.shape[2]}")
    arguments.check_shape("k_cache", k_cache, [*k_cache.shape[:3], q.shape[3]])
    arguments.check_shape("v_cache", v_cache, [*k_cache.shape[:3], q.shape[3] if qv is None else v_cache.shape[3]])
    if qv is not None:
        arguments.check_shape("qv", qv, [*q.shape[:3], v_cache.shape[3]])
    if alibi_slopes is not None:
        if alibi_slopes.dim() != 1 or alibi_slopes.shape[0] != q.shape[2]:
            arguments.check_shape("alibi_slopes", alibi_slopes, [batch, q.shape[2]])
        alibi_slopes = alibi_slopes.expand(batch, -1).reshape(batch * heads_k, q.shape[2] // heads_k)
    if out is not None:
        outputs.reject_gradients(out, q, qv)
        read = {
            "q": q,
            "k_cache": k_cache,
            "v_cache": v_cache,
            "qv": qv,
            "block_table": block_table,
            "cache_seqlens": cache_seqlens,
            "cache_leftpad": cache_leftpad,
        }
        outputs.check_result(out, q, v_cache, quant.out_dtype, read)
    (keys, *steps), (values, *v_steps) = pool_of_heads(k_cache), pool_of_heads(v_cache)
    if steps != v_steps:
        raise NotImplementedError(
            f"v_cache: expected pages and heads at the distances of k_cache's (strides {list(k_cache.stride())}), got "
            f"strides {list(v_cache.stride())}"
        )
    names = ("q_descale", "k_descale", "v_descale")
    scales = {name: _scale(name, getattr(quant, name), batch, heads_k) for name in names}
    try:
        result, lse = call(
            _by_head(q, heads_k),
            keys,
            values,
            block_table=_pages(block_table, k_cache.shape[0], *steps),
            cache_seqlens=_lengths("cache_seqlens", cache_seqlens, batch, heads_k),
            cache_leftpad=_lengths("cache_leftpad", cache_leftpad, batch, heads_k),
            alibi_slopes=alibi_slopes,
            qv=None if qv is None else _by_head(qv, heads_k),
            quant=replaced(quant, **scales),
            return_softmax_lse=True,
            **options,
        )
    except RuntimeError as error:
        if str(error).startswith("block_table: expected entries"):  # of the pool
            expected = f"block_table: expected entries in [0, {k_cache.shape[0]}) for the pages in use"
            raise RuntimeError(f"{expected}, got others") from None
        raise
    result = torch.unflatten(result, 0, (batch, heads_k)).transpose(1, 2).flatten(2, 3)
    result = result if out is None else out.copy_(result)
    return (result, lse.view(batch, q.shape[2], q.shape[1])) if return_softmax_lse else result


def _by_head(x: Tensor, heads_k: int) -> Tensor:
    """(batch, seqlen_q, nheads, d) as (batch * heads_k, seqlen_q, nheads / heads_k, d): a view of one query."""
    heads: Tensor = torch.unflatten(x, 2, (heads_k, -1))
    return heads.transpose(1, 2).flatten(0, 1)


def pool_of_heads(cache: Tensor) -> tuple[Tensor, int, int]:
    """(pages of one head (count, page_size, 1, d), pages from a page to the next, from a head to the next)."""
    pages, size, heads, dim = cache.shape
    page, row, head, col = cache.stride()
    page, head = (page if pages > 1 else 0), (head if heads > 1 else 0)
    unit = _common_divisor(page, head) or max(cache.stride(0), 1)
    steps = page // unit, head // unit
    count = (pages - 1) * steps[0] + (heads - 1) * steps[1] + 1 if pages else 0
    return cache.as_strided((count, size, 1, dim), (unit, row, unit, col)), *steps


def _common_divisor(a: int, b: int) -> int:
    """math.gcd, which compilers do not know for symbolic sizes."""
    while b:
        a, b = b, a % b
    return a


def _pages(block_table: Tensor, count: int, page_step: int, head_step: int) -> Tensor:
    """The table of the pool's pages: entries that name no page name none there."""
    heads = torch.arange(block_table.shape[1], dtype=block_table.dtype, device=block_table.device)
    pages = block_table * page_step + heads[:, None] * head_step
    return pages.masked_fill((block_table < 0) | (block_table >= count), -1).flatten(0, 1)


def _lengths(name: str, lengths: int | Tensor | None, batch: int, heads_k: int) -> int | Tensor | None:
    """(batch,) or (batch, nheads_k) for each request; an int or None for all of them passes."""
    if not isinstance(lengths, Tensor):
        return lengths
    if list(lengths.shape) not in ([batch], [batch, heads_k]):
        raise RuntimeError(f"{name}: expected shape [{batch}] or [{batch}, {heads_k}], got {list(lengths.shape)}")
    return (lengths if lengths.dim() == 2 else lengths[:, None]).expand(batch, heads_k).reshape(-1)


def _scale(name: str, descale: Descale, batch: int, heads_k: int) -> Descale:
    """A number for all requests passes; (batch, nheads_k) becomes one of each."""
    if not isinstance(descale, Tensor) or descale.numel() == 1:
        return descale
    if list(descale.shape) != [batch, heads_k]:
        raise NotImplementedError(
            f"{name}: expected a number or shape [{batch}, {heads_k}] with a block_table of each K/V head, got "
            f"{list(descale.shape)}"
        )
    return descale.reshape(-1, 1)
