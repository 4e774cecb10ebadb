"""Calls with 8-bit tensors on CUDA: by kernels of 8 bits, or over codes of K and V, else by operands made here.

The kernels take 16-bit queries. Where they serve no call, all operands have 16 bits, in which codes are exact: descales
of heads go into the queries before and into the output after, those of rows and pages into copies of K and V.
"""

import torch

from flash_attn import eight_bit
from flash_attn.ops import arguments
from flash_attn.ops.attention_args import AttentionArgs, KvCacheArgs
from flash_attn.ops.rows import sequence_of_rows


def check_unpacked(args: AttentionArgs):
    for name, x in (("k", args.k), ("v", args.v)):
        if x is None:
            raise RuntimeError(f"{name}: expected a Tensor beside 8-bit tensors and descales, got None: one is packed")


def may_have_kernels(args: AttentionArgs) -> bool:
    """Whether kernels of 8 bits serve such calls of some head dims on some GPUs."""
    descales = (args.q_descale, args.k_descale, args.v_descale)
    return (
        all(x.dtype is eight_bit.E4M3 for x in (args.q, args.k, args.v))
        and not any(eight_bit.is_by_row(x) and x.numel() > 1 for x in descales)
        and not args.v_per_channel
        and all(x is None for x in (args.seqused_k, args.leftpad_k, args.block_table, args.alibi_slopes))
        and args.softcap == 0.0
        and not args.return_max_logit
    )


def reads_codes(args: AttentionArgs) -> bool:
    """Whether kernels of 16-bit queries take K and V as codes in such a call."""
    q, k, v = args.q, args.k, args.v
    by_sequence = any(x is not None and x.dim() == 2 and x.shape[0] > 1 for x in (args.k_descale, args.v_descale))
    by_sequence = by_sequence or (args.v_per_channel and args.v_descale.dim() == 3)
    overlap = args.seqused_k is not None and args.block_table is None  # a row may be a key of two sequences
    return (
        k.dtype in eight_bit.EIGHT_BIT
        and v.dtype is k.dtype
        and v.shape[-1] == q.shape[-1]
        and q.shape[-1] % 8 == 0
        and not (overlap and by_sequence)
    )


def forward(args: AttentionArgs, attend_fp8, attend):
    """The result of a call: of `attend_fp8`, which may be empty, or attend(args, scaling), of 16-bit queries.

    scaling: what codes of K and V have beside them, by name; empty where these have 16 bits too.
    """
    check_unpacked(args)
    q, k, v = args.q, args.k, args.v
    _check_shapes(args)
    eight_bit.check_dtypes(q, k, v, args.out_dtype, args.dropout_p)
    varlen = args.cu_seqlens_q is not None
    eight_bit.check_descales(q, k, v, args.descales(), args.cu_seqlens_q.shape[0] - 1 if varlen else q.shape[0])
    if may_have_kernels(args):
        result = attend_fp8()
        if result:
            return result
    dtype = eight_bit.result_dtype(q, v, args.out_dtype)
    over_codes = reads_codes(args)
    if over_codes and q.dtype not in eight_bit.EIGHT_BIT:
        return attend(args.without_scaling(q, k, v), _of_codes(args))
    sequence = sequence_of_rows(args.cu_seqlens_q, q.shape[0]) if varlen else None
    if over_codes:
        of_codes = _of_codes(args)
        if eight_bit.can_join(args.q_descale, args.k_descale, k.shape[-2]):
            of_codes["k_descale"] = eight_bit.joined(args.q_descale, args.k_descale)
            queries = q.to(dtype)  # exact
        else:
            own = eight_bit.Scaling.of(q, k, v, eight_bit.Descales(q=args.q_descale), dtype)
            queries = own.queries(q, sequence)
        return attend(args.without_scaling(queries, k, v), of_codes)
    scaling = eight_bit.Scaling.of(q, k, v, args.descales(), dtype)
    operands = scaling.queries(q, sequence), scaling.scaled(k, scaling.k_rows), scaling.scaled(v, scaling.v_rows)
    operands = tuple(x.to(dtype) for x in operands)
    if q.shape[-1] % 8 != 0 and q.shape[-1] < 256:
        operands = arguments.padded(operands, q.shape[-1])
    result, *others = attend(args.without_scaling(*operands), {})
    out = result.new_empty((*q.shape[:-1], v.shape[-1]))
    scaling.store(out, result[..., : v.shape[-1]], sequence)
    return (out, *others)


def _of_codes(args: AttentionArgs):
    return {"k_descale": args.k_descale, "v_descale": args.v_descale, "v_per_channel": args.v_per_channel}


def kvcache_arguments(args: KvCacheArgs):
    """What CUDA's kernels over an 8-bit cache take by name."""
    q, k_cache, v_cache = args.q, args.k_cache, args.v_cache
    eight_bit.check_dtypes(q, k_cache, v_cache, args.out_dtype, names=("k_cache", "v_cache"))
    if v_cache.dtype is not k_cache.dtype:
        raise NotImplementedError(
            f"v_cache: expected the dtype of k_cache ({eight_bit.named(k_cache.dtype)}) on {q.device.type}, got "
            f"{eight_bit.named(v_cache.dtype)}: decoding has no kernels for 8 bits of keys alone there"
        )
    result = {name: value for name, value in args.scaling().items() if name != "out_dtype"}
    if q.dtype in eight_bit.EIGHT_BIT:
        result["fp16_out"] = args.out_dtype is torch.float16
        # New rows are quantised by k_descale, those of rows stand elsewhere.
        reads_only = args.k is None and args.k_token_descale is None
        if reads_only and eight_bit.can_join(args.q_descale, args.k_descale, k_cache.shape[-2]):
            result["k_descale"] = eight_bit.joined(args.q_descale, args.k_descale)
            result["q_descale"] = None
    return result


def _check_shapes(args: AttentionArgs):
    """The shapes that scaling relies on, in the words of the backends; they check the others."""
    q, k, v = args.q, args.k, args.v
    dense, packed = "batch, seqlen, heads, head_dim", "total, heads, head_dim"
    paged = "blocks, page_size, heads, head_dim"
    q_axes = dense if args.cu_seqlens_q is None else packed
    kv_axes = q_axes if args.block_table is None else paged
    for name, x, axes in (("q", q, q_axes), ("k", k, kv_axes), ("v", v, kv_axes)):
        rank = axes.count(",") + 1
        if x.dim() != rank:
            raise RuntimeError(f"{name}: expected {rank} dimensions ({axes}), got {x.dim()}")
    if v.shape[:-1] != k.shape[:-1]:
        raise RuntimeError(f"v: expected shape {[*k.shape[:-1], v.shape[-1]]}, got {list(v.shape)}")
    heads, heads_k = q.shape[-2], k.shape[-2]
    if heads % heads_k != 0 if heads_k > 0 else heads != 0:
        raise RuntimeError(f"q: expected a head count divisible by the K/V head count {heads_k}, got {heads}")
