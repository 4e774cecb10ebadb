"""What the adapters for servers have in common: one forward over packed queries and pages, into a given output."""

from __future__ import annotations

from typing import Any

from torch import Tensor

from flash_attn.batch_invariance import is_batch_invariant
from flash_attn.integrations.token_layout import as_pages
from flash_attn.ops import arguments, calls, context
from flash_attn.ops.rows import RowsInUse, equal_steps


def reject(**given: Any) -> None:
    """Raise NotImplementedError for the first argument given that is not served, by name; None is not given."""
    for name, value in given.items():
        if value is not None:
            raise NotImplementedError(f"{name}: expected None, got {type(value).__name__}: it is not supported")


def reject_8_bit(**tensors: Tensor) -> None:
    for name, tensor in tensors.items():
        if tensor.element_size() < 2:
            dtype = str(tensor.dtype).replace("torch.", "")
            raise NotImplementedError(f"{name}: expected float16 or bfloat16, got {dtype}: it is not supported")


def packed_attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    cu_seqlens_q: Tensor,
    cu_seqlens_k: Tensor | None = None,
    seqused_q: Tensor | None = None,
    seqused_k: Tensor | None = None,
    leftpad_k: Tensor | None = None,
    block_table: Tensor | None = None,
    max_seqlen_q: int | None = None,
    max_seqlen_k: int | None = None,
    dropout_p: float = 0.0,
    softmax_scale: float | None = None,
    causal: bool = False,
    window_size: Any = None,
    softcap: float = 0.0,
    alibi_slopes: Tensor | None = None,
    sinks: Tensor | None = None,
    out: Tensor | None = None,
    batch_invariant: bool = False,
    sm_margin: int = 0,
) -> tuple[Tensor, Tensor]:
    """(out (total_q, nheads, head_dim_v), lse (nheads, total_q)) of packed queries, as `flash_attn_varlen_func`.

    Forward only. k and v: packed with cu_seqlens_k, pages with block_table, or a batch (batch, seqlen_k, nheads_k,
    head_dim); of the last two seqused_k says how many keys there are, all of them where it is None. out: written and
    returned. max_seqlen_q and max_seqlen_k need not be right. sm_margin: multiprocessors left to other kernels.
    """
    arguments.check_tensors(("q", "k", "v", "cu_seqlens_q"), (q, k, v, cu_seqlens_q))
    arguments.check_optional_tensors(
        ("cu_seqlens_k", "seqused_q", "seqused_k", "leftpad_k", "block_table", "alibi_slopes", "out"),
        (cu_seqlens_k, seqused_q, seqused_k, leftpad_k, block_table, alibi_slopes, out),
    )
    reject_8_bit(q=q, k=k, v=v)
    if k.dim() == 4:
        arguments.check_cache("k", k)  # a copy of a cache is never what is meant
        arguments.check_cache("v", v)
        if block_table is None:
            block_table, cu_seqlens_k = as_pages(*k.shape[:2], q.device)
    if cu_seqlens_k is None:
        if block_table is None:
            raise ValueError("cu_seqlens_k: expected a tensor where k is packed, got None")
        cu_seqlens_k = equal_steps(block_table.shape[0], block_table.shape[1] * k.shape[1], q.device)
    window = (-1, -1) if window_size is None else arguments.window(window_size)
    scale, softcap = arguments.scale(softmax_scale, q.shape[-1]), arguments.number("softcap", softcap)
    if out is not None:
        context.check_writable(("out",), (out,))
    result, lse = calls.forward_in_use(
        q, k, v, RowsInUse(cu_seqlens_q, seqused_q, q), cu_seqlens_k, seqused_k, leftpad_k, block_table,
        alibi_slopes, max_seqlen_q, max_seqlen_k, scores=(scale, arguments.flag("causal", causal), *window, softcap),
        dropout_p=dropout_p, batch_invariant=batch_invariant or is_batch_invariant(),
        sinks=None if sinks is None else arguments.sinks(sinks), out=out, sm_margin=arguments.sm_margin(sm_margin),
    )  # fmt: skip
    if out is not None:
        context.written((out,))
    return result, lse
