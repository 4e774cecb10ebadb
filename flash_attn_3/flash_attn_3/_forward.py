"""FlashAttention-3's one forward over all forms of q, k and v, straight to the backend of the device.

It has one function where flash_attn has three: rows of a batch or packed, for queries and keys apart, keys of the call
or of a cache, in pages or not. `forward` takes its arguments in its order and picks the function.
"""

from __future__ import annotations

import torch

from flash_attn import backends
from flash_attn.batch_invariance import is_batch_invariant
from flash_attn.inference import attend_over_cache
from flash_attn.ops import arguments, calls, context
from flash_attn.ops.attention_args import AttentionArgs
from flash_attn.ops.calls import _index, copied, forward_in_use, rows_contiguous
from flash_attn.ops.lse import mark_masked_rows
from flash_attn.ops.rows import RowsInUse, equal_steps, pack, unpack
from flash_attn_3 import _checks


def forward(
    q, k, v, k_new=None, v_new=None, qv=None, out=None, cu_seqlens_q=None, cu_seqlens_k=None, cu_seqlens_k_new=None,
    seqused_q=None, seqused_k=None, max_seqlen_q=None, max_seqlen_k=None, page_table=None, kv_batch_idx=None,
    leftpad_k=None, rotary_cos=None, rotary_sin=None, seqlens_rotary=None, q_descale=None, k_descale=None,
    v_descale=None, softmax_scale=None, causal=False, window_size_left=-1, window_size_right=-1, attention_chunk=0,
    softcap=0.0, rotary_interleaved=False, scheduler_metadata=None, num_splits=0, pack_gqa=None, sm_margin=0, *,
    sinks=None,
):  # fmt: skip
    """(out, softmax_lse) of `torch.ops.flash_attn_3.fwd`; sinks: float32 (nheads,) or None.

    LSE is (batch, nheads, seqlen_q), with cu_seqlens_q (nheads, total_q), and -inf in fully masked rows.
    """
    context.reject_forward_mode("flash_attn_3.fwd")
    _checks.reject_unsupported(qv, attention_chunk, cu_seqlens_k_new, seqlens_rotary)
    scaling = _checks.scaling(q, k, v, q_descale, k_descale, v_descale, out)
    sm_margin = arguments.sm_margin(sm_margin)
    scale = q.shape[-1] ** -0.5 if softmax_scale is None else softmax_scale
    score = (scale, causal, window_size_left, window_size_right, softcap)
    if out is not None:
        context.check_writable(("out",), (out,))
    own_rows = _indices(cu_seqlens_q=cu_seqlens_q, cu_seqlens_k=cu_seqlens_k, seqused_q=seqused_q)
    cache = _indices(seqused_k=seqused_k, page_table=page_table, kv_batch_idx=kv_batch_idx, leftpad_k=leftpad_k)
    new = {"k": k_new, "v": v_new, "rotary_cos": rotary_cos, "rotary_sin": rotary_sin}
    appends, in_batches, some_masked = not _all_none(new), _all_none(own_rows), True
    if appends:
        _checks.reject_beside("with new keys or rotary embedding", **own_rows)
    if appends or (in_batches and not _all_none(cache) and v.shape[-1] == q.shape[-1]):
        result, lse = _over_cache(q, k, v, **new, **cache, out=out, score=score, sinks=sinks, scaling=scaling,
                                  rotary_interleaved=rotary_interleaved, num_splits=num_splits,
                                  sm_margin=sm_margin)  # fmt: skip
    elif in_batches and _all_none(cache) and not scaling:
        result, lse = backends.of(q).fwd(
            rows_contiguous(q), rows_contiguous(k), rows_contiguous(v), out, None, 0.0, *score, False, None,
            False, is_batch_invariant(), sinks=sinks, sm_margin=sm_margin,
        )[:2]  # fmt: skip
        some_masked = _some_row_is_masked(q.shape[1], k.shape[1], causal, window_size_right)
    elif in_batches and _all_none(cache):
        args = AttentionArgs(
            q, k, v, *[None] * 6, sinks, 0, 0, 0.0, *score, False, False, False, is_batch_invariant(),
            sm_margin=sm_margin, **scaling,
        )  # fmt: skip
        result, lse = calls.forward(args)[:2]
        result = copied(out, result)
    else:
        result, lse = _packed(q, k, v, **own_rows, **cache, out=out, score=score, sinks=sinks, scaling=scaling,
                              sm_margin=sm_margin)  # fmt: skip
    if out is not None:
        context.written((out,))
    return result, mark_masked_rows(lse) if some_masked else lse


def _indices(**tensors):
    """Index tensors as the backends want them."""
    return {name: _index(name, x) for name, x in tensors.items()}


def _all_none(values):
    return all(x is None for x in values.values())


def _some_row_is_masked(seqlen_q, seqlen_k, causal, right):
    """Whether a row of a batch of such lengths sees no key: the first one sees the fewest to its right."""
    beyond_first = seqlen_k - seqlen_q + (0 if causal else right) < 0
    return seqlen_k == 0 or ((causal or right >= 0) and beyond_first)


def _over_cache(
    q, k_cache, v_cache, k, v, rotary_cos, rotary_sin, seqused_k, page_table, kv_batch_idx, leftpad_k, out, score,
    sinks, scaling, rotary_interleaved, num_splits, sm_margin,
):  # fmt: skip
    if scaling:
        scale, causal, *window, softcap = score
        return attend_over_cache(
            q, k_cache, v_cache, k, v, rotary_cos, rotary_sin, seqused_k, kv_batch_idx, leftpad_k, page_table, scale,
            causal, window, softcap, rotary_interleaved, None, max(num_splits, 0), True, out, None, False, "fa2", sinks,
            _checks.scaling_values(scaling), sm_margin,
        )  # fmt: skip
    arguments.check_cache("k", k_cache)  # a copy would not receive the new keys
    arguments.check_cache("v", v_cache)
    q, k, v, rotary_cos, rotary_sin = (
        x if x is None else rows_contiguous(x) for x in (q, k, v, rotary_cos, rotary_sin)
    )  # fmt: skip
    if k is not None:
        context.check_writable(("k", "v"), (k_cache, v_cache))
    result, lse = backends.of(q).fwd_kvcache(
        q, k_cache, v_cache, k, v, seqused_k, rotary_cos, rotary_sin, kv_batch_idx, leftpad_k, page_table, None, out,
        *score, rotary_interleaved, max(num_splits, 0), None, is_batch_invariant(), sinks=sinks, sm_margin=sm_margin,
    )  # fmt: skip
    if k is not None:
        context.written((k_cache, v_cache))
    return result, lse


def _packed(
    q, k, v, cu_seqlens_q, cu_seqlens_k, seqused_q, seqused_k, page_table, kv_batch_idx, leftpad_k, out, score, sinks,
    scaling, sm_margin,
):  # fmt: skip
    """Attention of packed queries over packed keys, or over those of a cache as pages."""
    packed_q, cu_rows = pack(q, cu_seqlens_q)
    in_use = RowsInUse(cu_rows, seqused_q, packed_q.shape[0])
    if cu_seqlens_k is not None:
        _checks.reject_beside("with cu_seqlens_k", page_table=page_table, kv_batch_idx=kv_batch_idx)
    else:
        page_table, cu_seqlens_k = as_pages(k, page_table, kv_batch_idx, in_use.cu_seqlens)
    packed_out = None if cu_seqlens_q is None else out
    result, lse = forward_in_use(
        packed_q, k, v, in_use, cu_seqlens_k, seqused_k, leftpad_k, page_table, scores=score,
        batch_invariant=is_batch_invariant(), sinks=sinks, scaling=scaling, out=packed_out,
        sm_margin=sm_margin,
    )  # fmt: skip
    result, lse = unpack(q, cu_seqlens_q, result, lse)
    return result if packed_out is not None else copied(out, result), lse


def as_pages(k, page_table, kv_batch_idx, cu_seqlens_q):
    """(page_table, cu_seqlens_k) for a cache: rows of a batch are pages too, of the whole length.

    cu_seqlens_k says that all rows are in use; where seqused_k is given it is not read for pages.
    """
    batch = cu_seqlens_q.shape[0] - 1
    if page_table is None:
        rows = torch.arange(batch, dtype=torch.int32, device=k.device) if kv_batch_idx is None else kv_batch_idx
        page_table = rows.unsqueeze(1)
    else:
        _checks.reject_beside("with page_table", kv_batch_idx=kv_batch_idx)
    return page_table, equal_steps(batch, page_table.shape[1] * k.shape[1], k.device)
