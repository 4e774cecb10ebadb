"""The public functions of inference: attention over a KV cache, combining partial results. Without autograd.

Rules of all attention functions (dtypes, heads, positions, masked rows): `flash_attn.flash_attn_interface`.
"""

from __future__ import annotations

import torch
from torch import Tensor

from flash_attn import observation
from flash_attn._docstrings import documented
from flash_attn._types import Descale, TensorOrTuple, WindowSize
from flash_attn.batch_invariance import is_batch_invariant
from flash_attn.kvcache_plan import KvCachePlan
from flash_attn.masks import arguments as mask_arguments
from flash_attn.ops import arguments, eager, head_tables, latent, library
from flash_attn.ops import combine as combine_ops
from flash_attn.ops import lse as lse_ops
from flash_attn.ops.attention_args import KvCacheArgs
from flash_attn.ops.quant_args import NO_QUANT, QuantArgs

_is_compiling = torch.compiler.is_compiling
_OPTIONAL_TENSORS = ("k", "v", "rotary_cos", "rotary_sin", "cache_batch_idx", "cache_leftpad", "block_table", "out")


@documented()
def flash_attn_with_kvcache(
    q: Tensor,
    k_cache: Tensor,
    v_cache: Tensor,
    k: Tensor | None = None,
    v: Tensor | None = None,
    rotary_cos: Tensor | None = None,
    rotary_sin: Tensor | None = None,
    cache_seqlens: int | Tensor | None = None,
    cache_batch_idx: Tensor | None = None,
    cache_leftpad: Tensor | None = None,
    block_table: Tensor | None = None,
    softmax_scale: float | None = None,
    causal: bool = False,
    window_size: WindowSize = (-1, -1),
    softcap: float = 0.0,
    rotary_interleaved: bool = True,
    alibi_slopes: Tensor | None = None,
    num_splits: int = 0,
    return_softmax_lse: bool = False,
    *,
    out: Tensor | None = None,
    plan: KvCachePlan | None = None,
    batch_invariant: bool = False,
    lse_convention: str = "fa2",
    sinks: Tensor | None = None,
    s_aux: Tensor | None = None,
    learnable_sink: Tensor | None = None,
    q_descale: Descale = None,
    k_descale: Descale = None,
    v_descale: Descale = None,
    v_descale_axis: str | None = None,
    out_dtype: torch.dtype | None = None,
    k_descale_axis: str | None = None,
    qv: Tensor | None = None,
    mask_bits: Tensor | None = None,
    mask_keys: int | None = None,
) -> TensorOrTuple:
    """Exact attention of new queries over a KV cache, which first receives the new k and v in place. No backward.

    Keys of sequence i: cache_seqlens[i] cached ones, then the seqlen_new rows of k; seqlen_k is their sum. Rows of the
    cache that are not among the keys are never read; written are rows cache_seqlens[i] to cache_seqlens[i] + seqlen_new
    alone. The call does not wait for the GPU.

    A sequence with cache_seqlens[i] = -1 is an inactive request: nothing is read or written for it, its out is 0, its
    LSE +inf, and its row of block_table may hold anything. On the GPU the same holds for a sequence that does not
    fit into the cache or needs a page, cache row or rotary angle that does not exist; where the host sees that (an
    int, CPU tensors), it is an error.

    Arguments:
        q: (batch, seqlen_q, nheads, head_dim), float16 or bfloat16, on the CPU also float32 and float64. Head dims up
            to 512, over an 8-bit cache on CUDA 256.
        k_cache: (batch_cache, seqlen_cache, nheads_k, head_dim), or (num_pages, page_size, nheads_k, head_dim) with
            block_table, of any page size; q's dtype, or float8_e4m3fn or int8. nheads a multiple of nheads_k. Any
            strides with a contiguous last dimension; never copied.
        v_cache: like k_cache; with qv of another head dim, up to 512.
        k: (batch, seqlen_new, nheads_k, head_dim). Written to rows cache_seqlens[i] onwards of k_cache, and quantised
            after the rotation where the cache has 8 bits.
        v: like v_cache, of k's rows.
        rotary_cos: (seqlen_rotary, rotary_dim / 2). Rotates k, and q, by their positions before use: from
            cache_seqlens[i] onwards (all queries by cache_seqlens[i] if neither causal nor a window is asked). Rows up
            to the last position that is used.
        rotary_sin: like rotary_cos.
        cache_seqlens: int, or int32 or int64 (batch,). Keys in the cache before the new ones. Default: the capacity.
        cache_batch_idx: int32 (batch,). The row of the cache of each sequence. Default: 0 .. batch - 1. Rows that are
            written for one sequence must not be read or written for another, neither through equal entries here nor
            through common pages: undefined on the GPU, an error on the CPU.
        cache_leftpad: int32 (batch,). Rows skipped at the start of each cached sequence; they count in cache_seqlens.
        block_table: int32 (batch, max_pages). The pages of each sequence in k_cache and v_cache. Entries beyond the
            keys are not read. Or (batch, nheads_k, max_pages): pages of each K/V head, as block-sparse attention
            selects them, at the cost of a pass over the table and, for more than one query, of copies of q and out.
            cache_seqlens and cache_leftpad may then be (batch, nheads_k); a plan is one for batch * nheads_k requests
            of nheads / nheads_k heads and one K/V head; descales are numbers or (batch, nheads_k). New rows, rotation
            and sinks are refused.
        <scores>
        rotary_interleaved: bool. Rotate the pairs (0, 1), (2, 3), ... (GPT-J) instead of the two halves (GPT-NeoX).
        <alibi>
        num_splits: int. The most splits of a sequence's keys, which are computed in parallel and combined;
            1 for none, 0 chooses by the lengths.
        return_softmax_lse: bool. Also return the LSE.

    Keyword arguments:
        out: like q, in any strides with a contiguous last dimension. Receives the result and is returned.
        plan: `KvCachePlan` made for these sizes and updated for these lengths. Brings its num_splits, batch_invariant
            and sm_margin. With plan and out nothing but the LSE is allocated (for chunks of prompts also some
            bytes a sequence, and queries that are rotated).
        batch_invariant: bool. Make each row of out and LSE independent, to the last bit, of the other sequences, of
            batch, seqlen_q, page size and num_splits: a decoded token equals the same token in a longer chunk.
        <lse_convention>
        <sinks>
            A row without keys has out 0 and LSE the sink; an inactive request has none.
        q_descale: of float8_e4m3fn q, whose k_cache is float8_e4m3fn too: values are stored value * descale. A number,
            or float32 of one element, (nheads,) or (batch, nheads).
        k_descale: of an 8-bit k_cache: a number, or float32 on its device of one element, (nheads_k,),
            (batch, nheads_k), of each page or row (num_pages, 1 or page_size, nheads_k), without pages
            (batch_cache, 1 or seqlen_cache, nheads_k). If each row has a descale, those of the new rows are
            written: largest value / 448 (int8: 127). Otherwise new rows are quantised by the given one. None is 1.
        v_descale: the same of v_cache.
        v_descale_axis: None; "channel" for a v_descale of (nheads_k, head_dim) or (batch, nheads_k, head_dim); "row" or
            "page" if v_descale has a value for each row or page.
        <out_dtype>
        k_descale_axis: None, or "row" or "page" if k_descale has a value for each row or page. New rows of at least 16
            bits in pages of one row need it, because both shapes are equal: values of rows are written, those of pages
            are not.
        qv: (batch, seqlen_q, nheads, head_dim_v), of q's dtype. Scores are then Q K^T + QV V^T, the default
            softmax_scale 1 / sqrt(head_dim + head_dim_v), and head_dim may be 0: multi-head latent attention in its
            absorbed form, where v_cache has the latent rows and k_cache the rotated ones (two views of one tensor). Not
            with 8 bits. On CUDA head_dim is 64, head_dim_v 512, nheads_k 1 and block_table given, and k, v, rotary_cos,
            cache_batch_idx, a window, softcap and alibi_slopes are not.
        mask_bits: which of the last mask_keys keys of its sequence each query sees, such as the tree of a draft;
            earlier keys are seen. Bool (batch or 1, seqlen_q, mask_keys), or with an axis of mask heads, which divide
            nheads, in second place; or its bits, the first key in the lowest one, as int32 (..., ceil(mask_keys / 32))
            or uint8 (..., ceil(mask_keys / 8)), which saves packing them in each layer. Causal and window hide further
            keys. NaN in rows of keys that no query sees reaches no result. Not with qv on CUDA, and not with a
            block_table of each K/V head.
        mask_keys: int, the keys that bits of mask_bits are of. Default: seqlen_q, the drafted tokens themselves.

    Returns:
        out: (batch, seqlen_q, nheads, head_dim), with qv head_dim_v; contiguous unless given; with return_softmax_lse
            (out, softmax_lse). A row that sees no key has out 0.
        softmax_lse: (batch, nheads, seqlen_q) float32 (float64 for float64 q). Logarithm of the sum of exp(scores) of
            each row, the sink included.

    <errors>
    """
    quant = NO_QUANT
    if not (
        q_descale is k_descale is v_descale is None and v_descale_axis is k_descale_axis is None and out_dtype is None
    ):
        quant = QuantArgs(q_descale, k_descale, v_descale, v_descale_axis, out_dtype, k_descale_axis=k_descale_axis)
    is_plain = (
        rotary_cos is rotary_sin is cache_batch_idx is cache_leftpad is alibi_slopes is None
        and sinks is s_aux is learnable_sink is mask_bits is None
        and plan is None
        and mask_keys is None
        and quant is NO_QUANT
        and batch_invariant is False
        and type(return_softmax_lse) is type(rotary_interleaved) is bool
        and lse_convention == "fa2"
    )
    if is_plain and not (_is_compiling() or observation.DEBUG):
        result = eager.attention_over_cache(
            q, k_cache, v_cache, k, v, cache_seqlens, block_table, out, qv, softmax_scale, causal, window_size, softcap,
            is_batch_invariant(), num_splits,
        )  # fmt: skip
        if result is not NotImplemented:
            return result if return_softmax_lse else result[0]
    try:
        return attend_over_cache(
            q, k_cache, v_cache, k, v, rotary_cos, rotary_sin, cache_seqlens, cache_batch_idx, cache_leftpad,
            block_table, softmax_scale, causal, window_size, softcap, rotary_interleaved, alibi_slopes, num_splits,
            return_softmax_lse, out=out, plan=plan, batch_invariant=batch_invariant, lse_convention=lse_convention,
            sinks=arguments.named_sinks(sinks, s_aux, learnable_sink), quant=quant, qv=qv, mask_bits=mask_bits,
            mask_keys=mask_keys,
        )  # fmt: skip
    except (RuntimeError, TypeError) as error:
        arguments.rename(error, {"sinks": arguments.name_of_sinks(sinks, s_aux, learnable_sink)})
        raise


def attend_over_cache(
    q: Tensor,
    k_cache: Tensor,
    v_cache: Tensor,
    k: Tensor | None = None,
    v: Tensor | None = None,
    rotary_cos: Tensor | None = None,
    rotary_sin: Tensor | None = None,
    cache_seqlens: int | Tensor | None = None,
    cache_batch_idx: Tensor | None = None,
    cache_leftpad: Tensor | None = None,
    block_table: Tensor | None = None,
    softmax_scale: float | None = None,
    causal: bool = False,
    window_size: WindowSize = (-1, -1),
    softcap: float = 0.0,
    rotary_interleaved: bool = True,
    alibi_slopes: Tensor | None = None,
    num_splits: int = 0,
    return_softmax_lse: bool = False,
    *,
    out: Tensor | None = None,
    plan: KvCachePlan | None = None,
    batch_invariant: bool = False,
    lse_convention: str = "fa2",
    sinks: Tensor | None = None,
    quant: QuantArgs = NO_QUANT,
    sm_margin: int = 0,
    qv: Tensor | None = None,
    mask_bits: Tensor | None = None,
    mask_keys: int | None = None,
) -> TensorOrTuple:
    """What `flash_attn_with_kvcache` returns for its arguments.

    sm_margin: multiprocessors that persistent grids leave to other kernels; 0 is the plan's.
    """
    arguments.check_tensors(("q", "k_cache", "v_cache"), (q, k_cache, v_cache))
    arguments.check_optional_tensors(
        _OPTIONAL_TENSORS, (k, v, rotary_cos, rotary_sin, cache_batch_idx, cache_leftpad, block_table, out)
    )
    if not (alibi_slopes is rotary_cos is rotary_sin is None):
        for name, x in (("alibi_slopes", alibi_slopes), ("rotary_cos", rotary_cos), ("rotary_sin", rotary_sin)):
            arguments.check_constant(name, x)
    if mask_keys is not None:
        mask_keys = arguments.integer("mask_keys", mask_keys, least=0)
        if mask_bits is None:
            raise RuntimeError(f"mask_keys: expected None without mask_bits, got {mask_keys}")
    if block_table is not None and block_table.dim() == 3:
        names = ("k", "v", "rotary_cos", "rotary_sin", "sinks", "cache_batch_idx", "mask_bits")
        reject = dict(zip(names, (k, v, rotary_cos, rotary_sin, sinks, cache_batch_idx, mask_bits)))
        return head_tables.attend(
            attend_over_cache,
            q,
            k_cache,
            v_cache,
            block_table=block_table,
            cache_seqlens=cache_seqlens,
            cache_leftpad=cache_leftpad,
            alibi_slopes=alibi_slopes,
            qv=qv,
            out=out,
            plan=plan,
            return_softmax_lse=return_softmax_lse,
            reject=reject,
            softmax_scale=softmax_scale,
            causal=causal,
            window_size=window_size,
            softcap=softcap,
            num_splits=num_splits,
            batch_invariant=batch_invariant,
            lse_convention=lse_convention,
            sm_margin=sm_margin,
            quant=quant,
        )
    if sinks is not None:
        sinks = arguments.sinks(sinks)
    if qv is not None:
        arguments.check_tensors(("qv",), (qv,))
    arguments.check_cache("k_cache", k_cache)
    arguments.check_cache("v_cache", v_cache)
    lse_ops.check_convention(lse_convention)
    left, right = arguments.window(window_size)
    return_softmax_lse = arguments.flag("return_softmax_lse", return_softmax_lse)
    causal, num_splits = arguments.flag("causal", causal), arguments.integer("num_splits", num_splits, least=0)
    batch_invariant = arguments.flag("batch_invariant", batch_invariant) or is_batch_invariant()
    sm_margin = arguments.sm_margin(sm_margin)
    if plan is not None:
        if not isinstance(plan, KvCachePlan):
            raise TypeError(f"plan: expected a KvCachePlan, got {type(plan).__name__}")
        arguments.check_kvcache_ranks(q, k_cache, k, block_table)
        plan.check(q, k_cache, k, block_table, causal, (left, right), num_splits, batch_invariant, sm_margin, qv)
        num_splits, batch_invariant, sm_margin = plan.num_splits, plan.batch_invariant, plan.sm_margin
    if cache_seqlens is None or isinstance(cache_seqlens, Tensor):
        arguments.check_optional_tensors(("cache_seqlens",), (cache_seqlens,))
        lengths = cache_seqlens
    else:
        arguments.check_kvcache_ranks(q, k_cache, k, block_table)
        lengths = arguments.cache_lengths(cache_seqlens, q, k_cache, k, block_table)
    if mask_bits is not None:
        arguments.check_kvcache_ranks(q, k_cache, k, block_table)
        mask_bits, mask_keys = mask_arguments.mask_bits(mask_bits, mask_keys, q.shape[1])
    score_dim = arguments.head_dim("q", q) if qv is None else latent.score_dim(q, qv)
    scale = arguments.scale(softmax_scale, score_dim)
    fields = {} if quant is NO_QUANT else quant.cache_fields(q, (k_cache, v_cache), k)
    args = KvCacheArgs(
        q=q,
        k_cache=k_cache,
        v_cache=v_cache,
        k=k,
        v=v,
        rotary_cos=rotary_cos,
        rotary_sin=rotary_sin,
        cache_seqlens=lengths,
        cache_batch_idx=cache_batch_idx,
        cache_leftpad=cache_leftpad,
        block_table=block_table,
        alibi_slopes=alibi_slopes,
        out=out,
        plan=None if plan is None else plan.tensor,
        k_token_descale=fields.pop("k_token_descale", None),
        v_token_descale=fields.pop("v_token_descale", None),
        softmax_scale=scale,
        causal=causal,
        window_left=left,
        window_right=right,
        softcap=arguments.number("softcap", softcap),
        rotary_interleaved=arguments.flag("rotary_interleaved", rotary_interleaved),
        num_splits=num_splits,
        batch_invariant=batch_invariant,
        sinks=sinks,
        sm_margin=sm_margin,
        qv=qv,
        mask_bits=mask_bits,
        mask_keys=mask_keys or 0,
        **fields,
    )
    out, lse = library.kvcache_attention(args)
    return (out, lse_ops.converted(lse, lse_convention)) if return_softmax_lse else out


@documented()
def flash_attn_combine(
    out_partial: Tensor,
    lse_partial: Tensor,
    out: Tensor | None = None,
    out_dtype: torch.dtype | None = None,
    *,
    lse_convention: str = "fa2",
) -> tuple[Tensor, Tensor]:
    """Attention over all keys from its partial results over disjoint splits of them.

    With w_i = exp(lse_i - lse): out = sum of w_i out_i, lse = log of the sum of exp(lse_i). An LSE of +inf or -inf
    marks a split that masks the row fully; its out_partial is not read, even if it is NaN. A row that every split masks
    fully has out 0 and LSE +inf.

    Differentiable in out_partial and lse_partial, unless out is given.

    Arguments:
        out_partial: (num_splits, batch, seqlen, nheads, head_dim), float16, bfloat16 or float32; float64 on the CPU.
        lse_partial: (num_splits, batch, seqlen, nheads) float32 (float64 for float64), natural logarithm, any strides:
            torch.stack of LSEs of the attention functions has its last two dimensions swapped, transpose them.
        out: (batch, seqlen, nheads, head_dim) of any of these dtypes. Receives the result and is returned.
        out_dtype: torch.dtype of the result. Default: that of out_partial.
        <lse_convention>
            Keyword only; of lse_partial, where an infinity of either sign is a fully masked row, and of lse.

    Returns:
        out: (batch, seqlen, nheads, head_dim)
        lse: (batch, seqlen, nheads), like lse_partial.

    Raises RuntimeError or TypeError that names the argument; nothing is computed then.
    """
    combine_ops.check_arguments(out_partial, lse_partial, out, out_dtype)
    lse_ops.check_convention(lse_convention)
    out, lse = combine_ops.combine(out_partial, lse_ops.natural(lse_partial, lse_convention), out, out_dtype)
    return out, lse_ops.converted(lse, lse_convention)
