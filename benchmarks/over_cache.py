"""Attention over a KV cache: inputs of such rows, the calls of the implementations, the check of their results.

Builders take (row, inputs) and return the function to call, as in torch_peers.py. In rows timed by the replay of a
graph of several calls, these act as the layers of a model: each reads another cache, so that no call finds its
keys in the L2 cache, and what a model computes once per step (our plan) is computed once per CALLS_PER_GRAPH calls.
"""

from __future__ import annotations

import itertools
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from rows import windows
from shared import attention
from timing import CALLS_PER_GRAPH

CACHED_BYTES = 256 * 2**20  # more than any L2 cache
CHECKED_QUERIES = 64
SPARE_PAGES = 7


@dataclass
class CacheInputs:
    """q (b, sq, h, d); caches: one (k, v) per layer, (b, n, h_k, d) or pages with table (b, pages), and of 8 bits with
    `descales` of k and v for all layers; lengths int32 (b) without the new keys; new: None or (k, v) (b, append, h_k,
    d); cos and sin of all positions; qv (b, sq, h, d_v) where k and v are views of latent rows."""

    q: torch.Tensor
    caches: list
    lengths: torch.Tensor
    table: torch.Tensor | None
    new: tuple | None
    cos: torch.Tensor | None
    sin: torch.Tensor | None
    alibi_slopes: torch.Tensor | None
    descales: tuple | None = None
    qv: torch.Tensor | None = None


def make_inputs(row, device, seed=0):
    """Standard-normal inputs; the layers' caches hold the same values."""
    case = row.case
    generator = torch.Generator(device=device).manual_seed(seed)
    dtype = getattr(torch, case.dtype)

    def randn(*shape):
        return torch.randn(*shape, device=device, dtype=dtype, generator=generator)

    q = randn(case.batch, case.seqlen_q, case.nheads, case.head_dim)
    shape, table = (case.batch, case.seqlen_k, case.nheads_k), None
    if case.page_size:
        pages = -(-case.seqlen_k // case.page_size)
        pool = torch.randperm(case.batch * pages + SPARE_PAGES, device=device, generator=generator, dtype=torch.int32)
        table = pool[:-SPARE_PAGES].view(case.batch, pages)
        shape = (len(pool), case.page_size, case.nheads_k)
    layers = min(CALLS_PER_GRAPH, -(-CACHED_BYTES // row.bytes)) if row.timing == "graph" else 1
    dims = (case.head_dim + case.head_dim_v,) if case.head_dim_v else (case.head_dim, case.head_dim)
    first, descales = tuple(randn(*shape, dim) for dim in dims), None
    if case.cache_dtype:
        import flash_attn.fp8
        from flash_attn.eight_bit import E4M3, INT8

        dtype = {"e4m3": E4M3, "int8": INT8}[case.cache_dtype]
        granularity = "tensor" if dtype.is_floating_point else "token"
        first, descales = zip(*(flash_attn.fp8.quantize(x, granularity, dtype) for x in first))
    caches = [first] + [tuple(x.clone() for x in first) for _ in range(layers - 1)]
    lengths = torch.full((case.batch,), case.seqlen_k - case.append, dtype=torch.int32, device=device)
    new = cos = sin = slopes = qv = None
    if case.head_dim_v:
        qv = randn(case.batch, case.seqlen_q, case.nheads, case.head_dim_v)
        caches = [(rows[..., case.head_dim_v :], rows[..., : case.head_dim_v]) for (rows,) in caches]
    if case.append:
        new = tuple(randn(case.batch, case.append, case.nheads_k, case.head_dim) for _ in "kv")
        frequencies = 10000.0 ** (-torch.arange(0, case.head_dim, 2, device=device) / case.head_dim)
        angles = torch.arange(case.seqlen_k, device=device)[:, None] * frequencies
        cos, sin = angles.cos().to(dtype), angles.sin().to(dtype)
    if case.alibi != "none":
        slopes = torch.tensor([2.0 ** (-8.0 * (i + 1) / case.nheads) for i in range(case.nheads)], device=device)
    return CacheInputs(q, caches, lengths, table, new, cos, sin, slopes, descales, qv)


def ours(row, inputs):
    """Rows of several layers get what a serving loop has: a plan, updated once per step, and a given result."""
    import flash_attn

    case, plan, out = row.case, None, None
    new = inputs.new or (None, None)
    options = {
        "rotary_cos": inputs.cos, "rotary_sin": inputs.sin, "rotary_interleaved": False, "block_table": inputs.table,
        "cache_seqlens": inputs.lengths, "causal": case.causal, "window_size": case.window, "softcap": case.softcap,
        "alibi_slopes": inputs.alibi_slopes, "batch_invariant": case.invariant, "qv": inputs.qv,
    }  # fmt: skip
    if inputs.descales is not None:
        options["k_descale"], options["v_descale"] = inputs.descales
    if row.timing == "graph":
        capacity = case.seqlen_k if inputs.table is None else inputs.table.shape[1] * case.page_size
        plan = flash_attn.KvCachePlan(
            inputs.lengths, case.seqlen_q, case.nheads, case.nheads_k, case.head_dim, capacity, case.append,
            case.causal, case.window, batch_invariant=case.invariant,
            kv_cache_dtype=inputs.caches[0][0].dtype if case.cache_dtype else None,
            head_dim_v=case.head_dim_v,
        )  # fmt: skip
        out = torch.empty_like(inputs.q if inputs.qv is None else inputs.qv)
    layers, count = itertools.cycle(inputs.caches), itertools.count()

    def call():
        if plan is not None and next(count) % CALLS_PER_GRAPH == 0:
            plan.update(inputs.lengths)
        return flash_attn.flash_attn_with_kvcache(inputs.q, *next(layers), *new, **options, out=out, plan=plan)

    return call


def flash_attn_3(row, inputs):
    import flash_attn_interface as fa3

    case, new = row.case, inputs.new or (None, None)
    options = {
        "rotary_cos": inputs.cos, "rotary_sin": inputs.sin, "rotary_interleaved": False, "page_table": inputs.table,
        "cache_seqlens": inputs.lengths, "causal": case.causal, "window_size": case.window, "softcap": case.softcap,
        "qv": inputs.qv,
    }  # fmt: skip
    layers = itertools.cycle(inputs.caches)

    def call():
        result = fa3.flash_attn_with_kvcache(inputs.q, *next(layers), *new, **options)
        return result[0] if isinstance(result, tuple) else result

    return call


def sdpa(row, inputs):
    """SDPA over the whole dense cache; the backend is chosen by the context."""
    q = inputs.q.transpose(1, 2)
    layers = itertools.cycle([tuple(x.transpose(1, 2) for x in cache) for cache in inputs.caches])
    options = {"enable_gqa": True} if row.case.nheads != row.case.nheads_k else {}
    return lambda: F.scaled_dot_product_attention(q, *next(layers), **options).transpose(1, 2)


def sdpa_flash(row, inputs):
    """torch's FlashAttention-2 operator, whose causal mask is aligned to the last key, and which has windows."""
    case = row.case
    if not case.causal and case.window == (-1, -1) and inputs.alibi_slopes is None:
        return sdpa(row, inputs)
    left, right = windows(case)
    extra = {"alibi_slopes": inputs.alibi_slopes}
    if case.window != (-1, -1):
        extra.update(window_size_left=left, window_size_right=right)
    layers, op = itertools.cycle(inputs.caches), torch.ops.aten._flash_attention_forward
    sizes = (None, None, case.seqlen_q, case.seqlen_k, 0.0, case.causal, False)
    return lambda: op(inputs.q, *next(layers), *sizes, **extra)[0]


BUILDERS = {
    "ours": ours,
    "sdpa_flash": sdpa_flash,
    "sdpa_cudnn": sdpa,
    "sdpa_efficient": sdpa,
    "sdpa_math": sdpa,
    "flash_attn_3": flash_attn_3,
}


def limits(name, row, device_type, mode):
    """Why an implementation does not run on a row over a cache, or None."""
    case = row.case
    if name not in BUILDERS:
        return "no KV cache"
    if mode != "fwd":
        return "forward only"
    if name == "ours":
        return None
    masked = case.causal or case.window != (-1, -1)
    refusals = {
        "no batch-invariant mode": case.invariant,
        "no cache of 8 bits": bool(case.cache_dtype),
        "no append": bool(case.append) and name != "flash_attn_3",
        "no latent rows": case.head_dim_v > 0 and name.startswith("sdpa"),
        "no pages": bool(case.page_size) and name.startswith("sdpa"),
        "no softcap": case.softcap > 0 and name.startswith("sdpa"),
        "no ALiBi": case.alibi != "none" and name != "sdpa_flash",
        "no mask aligned to the last key": masked and name.startswith("sdpa") and name != "sdpa_flash",
        "needs a GPU": device_type == "cpu" and (not name.startswith("sdpa") or masked or case.alibi != "none"),
    }
    return next((reason for reason, applies in refusals.items() if applies), None)


def last_sequence(inputs, cache, rows):
    """The first `rows` rows of the last sequence, for its last K/V head: (1, rows, 1, d)."""
    if inputs.table is None:
        return cache[-1:, :rows, -1:]
    return cache[inputs.table[-1].long()].flatten(0, 1)[None, :rows, -1:]


def dequantized(inputs, cache, descale, rows):
    """last_sequence() in float64; descale: None, of the tensor, or of each token and head."""
    values = last_sequence(inputs, cache, rows).double()
    if descale is None:
        return values
    return values * (last_sequence(inputs, descale.unsqueeze(-1), rows) if descale.dim() else descale)


def relative_error(row, inputs, result):
    """||result - ref|| / ||ref|| for the last queries of the last sequence, for the heads of its last K/V head.

    The reference reads the keys from the cache after the call, so new keys count as they were written.
    """
    case = row.case
    heads, queries = case.nheads // case.nheads_k, min(CHECKED_QUERIES, case.seqlen_q)
    q = inputs.q[-1:, -queries:, -heads:].double()
    if inputs.cos is not None:
        position = case.seqlen_k - case.append  # neither causal nor a window: one angle for all queries
        q1, q2 = q.chunk(2, dim=-1)
        cos, sin = inputs.cos[position].double(), inputs.sin[position].double()
        q = torch.cat([q1 * cos - q2 * sin, q1 * sin + q2 * cos], dim=-1)
    descales = inputs.descales or (None, None)
    keys, values = (dequantized(inputs, x, d, case.seqlen_k) for x, d in zip(inputs.caches[0], descales))
    if inputs.qv is not None:
        q, keys = torch.cat([q, inputs.qv[-1:, -queries:, -heads:]], -1), torch.cat([keys, values], -1)
    slopes = None if inputs.alibi_slopes is None else inputs.alibi_slopes[-heads:]
    options = {"causal": case.causal, "window": case.window, "softcap": case.softcap, "alibi_slopes": slopes}
    reference = attention(q, keys, values, **options).out
    ours = result[-1:, -queries:, -heads:]
    return (torch.linalg.norm(ours - reference) / torch.linalg.norm(reference)).item()
