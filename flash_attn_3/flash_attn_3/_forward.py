"""FlashAttention-3's one forward over all forms of q, k and v, by the functions of flash_attn, which check and compute.

It has one function where flash_attn has three: queries and keys may each be packed or a batch, keys of the call or of
a cache, with pages or without. `forward` takes FlashAttention-3's arguments, in its order, and picks the function.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any, Optional, TypeVar, cast

import torch
from torch import Tensor

from flash_attn import observation
from flash_attn._types import Descale, WindowSize
from flash_attn.batch_invariance import is_batch_invariant
from flash_attn.flash_attn_interface import attend, attend_rows_in_use
from flash_attn.inference import attend_over_cache, flash_attn_with_kvcache
from flash_attn.ops import arguments, context, eager, outputs
from flash_attn.ops.attention_args import DENSE, Options, Sequences, replaced
from flash_attn.ops.lse import mark_masked_rows
from flash_attn.ops.quant_args import NO_QUANT
from flash_attn.ops.rows import equal_steps, pack, sequence_of_rows, unpack
from flash_attn_3 import _checks

_Result = TypeVar("_Result")
# softmax_scale, causal, window_size, softcap
_Score = tuple[Optional[float], bool, WindowSize, float]

_NAMES = {  # flash_attn's name of an argument over a cache: the operator's
    "k_cache": "k",
    "v_cache": "v",
    "k": "k_new",
    "v": "v_new",
    "cache_seqlens": "seqused_k",
    "block_table": "page_table",
    "cache_batch_idx": "kv_batch_idx",
    "cache_leftpad": "leftpad_k",
    "rotary_interleaved": "is_rotary_interleaved",
}


def without_autograd(function: Callable[..., _Result]) -> Callable[..., _Result]:
    """`function` as the body of an operator: without autograd and autocast."""

    @functools.wraps(function)
    def call(q: Tensor, *args: object, **kwargs: object) -> _Result:
        with torch.no_grad():
            if q.device.type == "meta" or not torch.is_autocast_enabled(q.device.type):
                return function(q, *args, **kwargs)
            with torch.autocast(q.device.type, enabled=False):
                return function(q, *args, **kwargs)

    return call


@without_autograd
def forward(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    k_new: Tensor | None = None,
    v_new: Tensor | None = None,
    qv: Tensor | None = None,
    out: Tensor | None = None,
    cu_seqlens_q: Tensor | None = None,
    cu_seqlens_k: Tensor | None = None,
    cu_seqlens_k_new: Tensor | None = None,
    seqused_q: Tensor | None = None,
    seqused_k: Tensor | None = None,
    max_seqlen_q: int | None = None,
    max_seqlen_k: int | None = None,
    page_table: Tensor | None = None,
    kv_batch_idx: Tensor | None = None,
    leftpad_k: Tensor | None = None,
    rotary_cos: Tensor | None = None,
    rotary_sin: Tensor | None = None,
    seqlens_rotary: Tensor | None = None,
    q_descale: Descale = None,
    k_descale: Descale = None,
    v_descale: Descale = None,
    softmax_scale: float | None = None,
    causal: bool = False,
    window_size_left: int = -1,
    window_size_right: int = -1,
    attention_chunk: int = 0,
    softcap: float = 0.0,
    rotary_interleaved: bool = False,
    scheduler_metadata: Tensor | None = None,
    num_splits: int = 0,
    pack_gqa: bool | None = None,
    sm_margin: int = 0,
) -> tuple[Tensor, Tensor]:
    """(out, softmax_lse) of `torch.ops.flash_attn_3.fwd`.

    LSE is (batch, nheads, seqlen_q), with cu_seqlens_q (nheads, total_q), and -inf in fully masked rows.
    """
    context.reject_forward_mode("flash_attn_3.fwd")
    _checks.reject_unsupported(qv, attention_chunk, cu_seqlens_k_new, seqlens_rotary)
    arguments.check_tensors(("q", "k", "v"), (q, k, v))
    num_splits = _checks.unused(num_splits, pack_gqa, scheduler_metadata, max_seqlen_q, max_seqlen_k)
    quant = _checks.quant_args(q, k, v, q_descale, k_descale, v_descale, out)
    score = (softmax_scale, causal, (window_size_left, window_size_right), softcap)
    own_rows = {"cu_seqlens_q": cu_seqlens_q, "cu_seqlens_k": cu_seqlens_k, "seqused_q": seqused_q}
    appends = not _all_none(k_new, v_new, rotary_cos, rotary_sin)
    if appends:
        _checks.reject_beside("with new keys or rotary embedding", **own_rows)
    of_cache = not _all_none(seqused_k, page_table, kv_batch_idx, leftpad_k)
    options = Options(quant=quant, sm_margin=sm_margin, out=out)
    if appends or (of_cache and _all_none(*own_rows.values()) and v.shape[-1:] == q.shape[-1:]):
        new = (k_new, v_new, rotary_cos, rotary_sin)
        where = (seqused_k, kv_batch_idx, leftpad_k, page_table)
        result, lse = over_cache(q, k, v, *new, *where, *score, rotary_interleaved, num_splits, options, names=_NAMES)
    elif cu_seqlens_k is not None:
        _checks.reject_beside("with cu_seqlens_k", page_table=page_table, kv_batch_idx=kv_batch_idx)
        lengths = (cu_seqlens_q, cu_seqlens_k, seqused_q, seqused_k, leftpad_k, max_seqlen_q, max_seqlen_k)
        result, lse = _packed(q, k, v, *lengths, score, options)
    elif of_cache or not _all_none(*own_rows.values()):
        where = (seqused_k, kv_batch_idx, leftpad_k, page_table)
        result, lse = packed_over_cache(q, k, v, *where, cu_seqlens_q, seqused_q, score, options, names={})
    else:
        result, lse, _ = attend((q, k, v), DENSE, *_options(score), None, options)
        if not _some_row_is_masked(q.shape[1], k.shape[1], causal, window_size_right):
            return result, lse
    return result, mark_masked_rows(lse)


def _all_none(*values: object) -> bool:
    return all(x is None for x in values)


def _options(score: _Score) -> tuple[object, ...]:
    """The arguments of `attend` from dropout_p to is_grad_enabled, for a call that returns the LSE."""
    return (0.0, *score, None, False, True, True)


def _some_row_is_masked(seqlen_q: int, seqlen_k: int, causal: bool, right: int) -> bool:
    """Whether a row of a batch of such lengths sees no key: the first one sees the fewest to its right."""
    beyond_first = seqlen_k - seqlen_q + (0 if causal else right) < 0
    return seqlen_k == 0 or ((causal or right >= 0) and beyond_first)


def _packed(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    cu_seqlens_q: Tensor | None,
    cu_seqlens_k: Tensor,
    seqused_q: Tensor | None,
    seqused_k: Tensor | None,
    leftpad_k: Tensor | None,
    max_seqlen_q: int | None,
    max_seqlen_k: int | None,
    score: _Score,
    options: Options,
) -> tuple[Tensor, Tensor]:
    """(out, lse) of queries, packed or in a batch, over packed keys."""
    _checks.packed(q, k, v, cu_seqlens_q, cu_seqlens_k)
    rows, cu_rows = pack(q, cu_seqlens_q)
    sequences = Sequences(
        cu_rows,
        cu_seqlens_k,
        rows.shape[0] if max_seqlen_q is None else max_seqlen_q,
        k.shape[0] if max_seqlen_k is None else max_seqlen_k,
        seqused_k,
        leftpad_k,
    )
    return _of_rows(q, k, v, rows, cu_seqlens_q, seqused_q, sequences, score, options)


def _of_rows(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    rows: Tensor,
    cu_seqlens_q: Tensor | None,
    seqused_q: Tensor | None,
    sequences: Sequences,
    score: _Score,
    options: Options,
    sinks: Tensor | None = None,
) -> tuple[Tensor, Tensor]:
    """(out, lse) in the form of q, packed or a batch. rows, and qv of the options: packed."""
    out = options.out
    packed_out = out if cu_seqlens_q is not None else None
    if out is not None and packed_out is None:
        outputs.reject_gradients(out, q, k, v, sinks)
        read = {"q": q, "k": k, "v": v, "seqused_q": seqused_q, "sinks": sinks, **sequences._asdict()}
        outputs.check_result(out, q, v, options.quant.out_dtype, read)
    options = replaced(options, out=packed_out)
    result, lse, _ = attend_rows_in_use(seqused_q, (rows, k, v), sequences, *_options(score), sinks, options)
    result, lse = unpack(q, cu_seqlens_q, result, lse)
    return (result if out is None or packed_out is not None else out.copy_(result)), lse


def over_cache(
    q: Tensor,
    k_cache: Tensor,
    v_cache: Tensor,
    k: Tensor | None,
    v: Tensor | None,
    rotary_cos: Tensor | None,
    rotary_sin: Tensor | None,
    cache_seqlens: int | Tensor | None,
    cache_batch_idx: Tensor | None,
    cache_leftpad: Tensor | None,
    block_table: Tensor | None,
    softmax_scale: float | None,
    causal: bool,
    window_size: WindowSize,
    softcap: float,
    rotary_interleaved: bool,
    num_splits: int,
    options: Options,
    sinks: Tensor | None = None,
    *,
    names: dict[str, str],
) -> tuple[Tensor, Tensor]:
    """(out, lse) of `flash_attn.flash_attn_with_kvcache`. names: the caller's, see `_checks.renamed`."""
    try:
        more: dict[str, Any] = {}
        if options.quant is not NO_QUANT or options.sm_margin != 0:
            more = {"quant": options.quant, "sm_margin": options.sm_margin}
        out, lse = (attend_over_cache if more else flash_attn_with_kvcache)(
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
            block_table=block_table,
            softmax_scale=softmax_scale,
            causal=causal,
            window_size=window_size,
            softcap=softcap,
            rotary_interleaved=rotary_interleaved,
            num_splits=max(num_splits, 0),
            return_softmax_lse=True,
            out=options.out,
            sinks=sinks,
            qv=options.qv,
            **more,
        )
    except _checks.ERRORS as error:
        raise _checks.renamed(error, names) from None
    return out, lse


def packed_over_cache(*args: Any, names: dict[str, str]) -> tuple[Tensor, Tensor]:
    """(out, lse) of packed queries, or of those of a batch, over a cache of pages or of rows, of any V head dim.

    Inactive requests are those of `flash_attn.flash_attn_with_kvcache`: the length is -1 or does not fit, or the row of
    the cache does not exist. names: the caller's, see `_checks.renamed`.
    """
    try:
        return _packed_over_cache(*args)
    except _checks.ERRORS as error:
        raise _checks.renamed(error, {"block_table": "page_table", **names}) from None


def _packed_over_cache(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    seqused_k: int | Tensor | None,
    kv_batch_idx: Tensor | None,
    leftpad_k: Tensor | None,
    page_table: Tensor | None,
    cu_seqlens_q: Tensor | None,
    seqused_q: Tensor | None,
    score: _Score,
    options: Options,
    sinks: Tensor | None = None,
) -> tuple[Tensor, Tensor]:
    _check_cache(q, k, v, kv_batch_idx, page_table, cu_seqlens_q)
    rows, cu_rows = pack(q, cu_seqlens_q)
    batch = arguments.check_cu_seqlens("cu_seqlens_q", cu_rows, q.device)
    page_table = _pages(k, page_table, kv_batch_idx, batch)
    capacity = page_table.shape[1] * k.shape[1]
    if (
        isinstance(seqused_k, Tensor)
        and seqused_k.is_cuda
        and cu_seqlens_q is not None
        and kv_batch_idx is leftpad_k is seqused_q is sinks is options.out is None
        and options.quant is NO_QUANT
        and not (torch.compiler.is_compiling() or observation.DEBUG)
    ):
        arguments.check_lengths("seqused_k", seqused_k, batch, q.device)
        fitting = seqused_k.masked_fill(seqused_k > capacity, 0)  # kernels take one below 0 as 0
        result = eager.packed_attention(
            q, k, v, cu_rows, None, fitting, page_table, None, options.qv, None, *score, is_batch_invariant(),
            options.sm_margin,
        )  # fmt: skip
        if result is not NotImplemented:
            return cast("tuple[Tensor, Tensor]", result)
    lengths, absent = _lengths(seqused_k, cu_rows[1:], k, page_table)
    if kv_batch_idx is not None and not kv_batch_idx.is_cpu:  # there the backend rejects rows that do not exist
        missing = (kv_batch_idx < 0) | (kv_batch_idx >= k.shape[0])
        absent = missing if absent is None else absent | missing
        lengths = torch.full_like(cu_rows[1:], capacity) if lengths is None else lengths
    if absent is not None and lengths is not None:
        lengths = lengths.masked_fill(absent, 0)
        if options.out is not None:  # which may be memory of the lengths that are copied here
            arguments.check_tensors(("out",), (options.out,))
            outputs.check_apart({"out": options.out}, {"seqused_k": seqused_k})
    sequences = Sequences(
        cu_rows, equal_steps(batch, capacity, q.device), rows.shape[0], capacity, lengths, leftpad_k, page_table
    )
    result, lse = _of_rows(q, k, v, rows, cu_seqlens_q, seqused_q, sequences, score, options, sinks)
    if sinks is not None and absent is not None and batch > 0:  # an inactive request has no sink
        rows_absent = absent[sequence_of_rows(cu_rows, rows.shape[0])]
        rows_absent = rows_absent if cu_seqlens_q is not None else rows_absent.view(batch, 1, -1)
        lse = lse.masked_fill(rows_absent, float("inf"))
    return result, lse


def _check_cache(
    q: Tensor, k: Tensor, v: Tensor, kv_batch_idx: Tensor | None, page_table: Tensor | None, cu_seqlens_q: Tensor | None
) -> None:
    """The checks of a cache in `flash_attn.flash_attn_with_kvcache` that attention over pages does not make."""
    arguments.check_optional_tensors(
        ("cu_seqlens_q", "kv_batch_idx", "page_table"), (cu_seqlens_q, kv_batch_idx, page_table)
    )
    arguments.check_rank("q", q, "batch, seqlen, heads, head_dim" if cu_seqlens_q is None else "total, heads, head_dim")
    for name, cache in (("k", k), ("v", v)):
        axes = "batch, seqlen" if page_table is None else "blocks, page_size"
        arguments.check_rank(name, cache, f"{axes}, heads, head_dim")
        _checks.on_device_of_q(name, cache, q)
        arguments.check_cache(name, cache)  # a copy of a cache is never what is meant
    if v.shape[:-1] != k.shape[:-1]:
        raise RuntimeError(f"v: expected shape {[*k.shape[:-1], v.shape[-1]]}, got {list(v.shape)}")


def _pages(k: Tensor, page_table: Tensor | None, kv_batch_idx: Tensor | None, batch: int) -> Tensor:
    """The pages of each sequence: rows of a cache are pages too, of the whole length."""
    if page_table is not None:
        _checks.reject_beside("with page_table", kv_batch_idx=kv_batch_idx)
        arguments.check_rank("page_table", page_table, "batch, max_pages")
        return page_table
    if kv_batch_idx is not None:
        arguments.check_lengths("kv_batch_idx", kv_batch_idx, batch, k.device)
        return kv_batch_idx.unsqueeze(1)
    if k.shape[0] != batch:
        raise RuntimeError(f"k: expected batch size {batch} (that of q) without kv_batch_idx, got {k.shape[0]}")
    return torch.arange(batch, dtype=torch.int32, device=k.device).unsqueeze(1)


def _lengths(
    seqused_k: int | Tensor | None, like: Tensor, k: Tensor, page_table: Tensor
) -> tuple[Tensor | None, Tensor | None]:
    """(lengths (batch,), whether each is inactive (batch,)), None for the full length and no inactive one.

    A length that does not fit is an error where the host sees it: an int, a CPU tensor.
    """
    if seqused_k is None:
        return None, None
    capacity = page_table.shape[1] * k.shape[1]
    if isinstance(seqused_k, Tensor):
        arguments.check_lengths("seqused_k", seqused_k, like.shape[0], like.device)
        if seqused_k.is_cpu and not context.survey(("seqused_k",), (seqused_k,))[0]:
            for length in seqused_k.tolist():
                if not -1 <= length <= capacity:
                    raise RuntimeError(f"seqused_k: expected lengths from -1 to {capacity}, got {length}")
    else:
        seqused_k = arguments.cache_lengths(seqused_k, like, k, None, page_table)
    return seqused_k, (seqused_k < 0) | (seqused_k > capacity)
