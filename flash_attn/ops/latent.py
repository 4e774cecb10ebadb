"""`qv`: second queries, multiplied with the values: scores are softmax_scale * (q k^T + qv v^T).

Multi-head latent attention decodes so: a cached row has a rotated part, K, and a latent part, V, and scores take both.
"""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor

from flash_attn.ops import arguments
from flash_attn.ops.attention_args import KVCACHE_OPTIONS, AttentionArgs, KvCacheArgs, KvCachePlanArgs

KERNEL_DIMS = (64, 512)  # head dims of q and of qv that CUDA kernels have
_NOT_OVER_A_CACHE = (
    "k",
    "v",
    "rotary_cos",
    "rotary_sin",
    "cache_batch_idx",
    "k_token_descale",
    "v_token_descale",
    *KVCACHE_OPTIONS[2:],
)


def is_computed(device_type: str, head_dim: int, head_dim_v: int) -> bool:
    """Whether plain calls over pages with a qv of these sizes are computed on the device."""
    return device_type != "cuda" or (head_dim, head_dim_v) == KERNEL_DIMS


def check_packed(args: AttentionArgs) -> None:
    """Raise NotImplementedError for a call of packed queries with a qv that no kernel computes."""
    if args.cu_seqlens_q is None:
        raise RuntimeError("qv: expected None without cu_seqlens_q, got a tensor")
    more = {"dropout_p": args.dropout_p > 0, "mask": args.has_score_tensors(), **args.further_results()}
    _check(args, args.k, args.v, more)


def check_cached(args: KvCacheArgs) -> None:
    """Raise NotImplementedError for a call over a cache with a qv that no kernel computes."""
    _check(args, args.k_cache, args.v_cache, args.given(_NOT_OVER_A_CACHE))


def check_plan(args: KvCachePlanArgs) -> None:
    """Raise NotImplementedError for a plan of calls with a qv where no kernel reads one."""
    device = args.cache_seqlens.device.type
    if args.head_dim_v and not is_computed(device, args.head_dim, args.head_dim_v):
        raise NotImplementedError(f"head_dim_v: expected 0 on {device}, got {args.head_dim_v}")


def _check(args: AttentionArgs | KvCacheArgs, k: Tensor | None, v: Tensor | None, more: Mapping[str, object]) -> None:
    reason = _reason(args, k, v, more) if args.q.device.type == "cuda" else None
    if reason is not None:
        raise NotImplementedError(f"qv: expected None on cuda, got a tensor: {reason}")


def _reason(
    args: AttentionArgs | KvCacheArgs, k: Tensor | None, v: Tensor | None, more: Mapping[str, object]
) -> str | None:
    """Why no CUDA kernel computes the call. The backend checks ranks and shapes."""
    if k is None or v is None or args.block_table is None:
        return "kernels read pages, by block_table"
    dims = args.q.shape[-1], v.shape[-1]
    if dims != KERNEL_DIMS:
        return f"kernels have head dims of q and v of {KERNEL_DIMS}, got {dims}"
    if k.dim() == 4 and k.shape[2] != 1:
        return f"kernels have one K/V head, got {k.shape[2]}"
    if args.window_left >= 0 or (args.window_right > 0 and not args.causal):
        return "kernels have no window"
    if args.softcap > 0 or args.alibi_slopes is not None or args.softmax_scale <= 0:
        return "kernels have no softcap, ALiBi and scales of at most 0"
    if args.is_scaled() and not has_fp8_rows(args):
        return "kernels have no 8-bit tensors, descales and out_dtype"
    name = next((name for name, value in more.items() if value is not None and value is not False), None)
    return None if name is None else f"kernels have no {name}"


def has_fp8_rows(args: AttentionArgs | KvCacheArgs) -> bool:
    """Whether the values are e4m3 and their descales (pages, page_size, 1, groups), as `flash_mla` gives them."""
    if not isinstance(args, KvCacheArgs) or args.v_descale is None or args.v_cache.dtype != torch.float8_e4m3fn:
        return False
    others = (args.q_descale, args.k_descale, args.k_token_descale, args.v_token_descale, args.out_dtype)
    return args.v_descale.dim() == 4 and args.k_cache.dtype == args.q.dtype and all(x is None for x in others)


def score_dim(q: Tensor, qv: Tensor) -> int:
    """How many products a score adds up: the head dim of q, which may be 0, and that of qv."""
    return (q.shape[-1] if q.dim() else 1) + arguments.head_dim("qv", qv)
