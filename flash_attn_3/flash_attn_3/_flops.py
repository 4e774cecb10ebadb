"""FLOP formulas of torch.ops.flash_attn_3, by the rule of flash_attn.ops.flops."""

from __future__ import annotations

import torch

from flash_attn.ops import flops
from flash_attn_3 import _operators  # noqa: F401  # registers two of them

_ops = torch.ops.flash_attn_3


def _pairs(call: flops.Call) -> int:
    """Pairs of query and key of dense, packed, cached or paged tensors: those in use, of what the tensors can hold."""
    q, k, table = call["q"], call["k"], call.get("page_table")
    cu_seqlens_q, cu_seqlens_k, new = call.get("cu_seqlens_q"), call.get("cu_seqlens_k"), call.get("k_new")
    batch = q.shape[0] if cu_seqlens_q is None else cu_seqlens_q.shape[0] - 1
    appended = 0 if new is None else new.shape[1]
    most_q = call.get("max_seqlen_q") or q.shape[-3]
    most_k = call.get("max_seqlen_k") or k.shape[-3] * (1 if table is None else table.shape[1])
    lengths_q = [most_q] * batch if cu_seqlens_q is None else flops.packed_lengths(cu_seqlens_q, most_q)
    lengths_k = [most_k - appended] * batch if cu_seqlens_k is None else flops.packed_lengths(cu_seqlens_k, most_k)
    used_q, used_k = call.get("seqused_q", call.get("sequed_q")), call.get("seqused_k", call.get("sequed_k"))
    if used_q is not None:
        lengths_q = flops.values(used_q, batch, most_q)
    if used_k is not None:
        lengths_k = flops.values(used_k, batch, most_k - appended)
    padding = flops.values(call.get("leftpad_k"), batch, 0)
    keys = (n + appended - pad if n >= 0 else 0 for n, pad in zip(lengths_k, padding))
    return flops.count_pairs(lengths_q, keys)


def _forward(call: flops.Call) -> int:
    pairs = _pairs(call)
    return flops.forward_flops(call["q"], call["v"], pairs) + flops.latent_flops(call.get("qv", call.get("q_v")), pairs)


def _backward(call: flops.Call) -> int:
    return flops.backward_flops(call["q"], call["v"], _pairs(call))


for _operator in (_ops.fwd, _ops._flash_attn_forward):
    flops.register_by_name(_operator, _forward)
for _operator in (_ops.bwd, _ops._flash_attn_backward):
    flops.register_by_name(_operator, _backward)
