"""Calls with 8-bit tensors on CUDA: checks, arguments by name, and 16-bit copies for unsupported layouts.

The binding plans which kernels run. It takes 8-bit k and v of one dtype and head dim, a multiple of 8, and q of 16 bits
or as k.
"""

from __future__ import annotations

from collections.abc import Callable

from torch import Tensor

from flash_attn import eight_bit
from flash_attn.limits import MAX_EIGHT_BIT_HEAD_DIM
from flash_attn.ops import arguments
from flash_attn.ops.attention_args import AttentionArgs, KvCacheArgs
from flash_attn.ops.rows import sequence_of_rows


def check_unpacked(args: AttentionArgs) -> None:
    for name, x in (("k", args.k), ("v", args.v)):
        if x is None:
            raise RuntimeError(f"{name}: expected a separate Tensor with 8 bits or descales, got packed inputs")


def check(args: AttentionArgs) -> None:
    """Dtypes and scales, and the shapes that scaling relies on; the binding checks the rest."""
    check_unpacked(args)
    q, k, v = _operands(args)
    _check_shapes(args, q, k, v)
    eight_bit.check_dtypes(q, k, v, args.out_dtype, args.dropout_p)
    eight_bit.check_descales(q, k, v, args.descales(), _batch(args))


def by_name(args: AttentionArgs) -> dict[str, object]:
    """The keyword arguments of the binding."""
    return {**args.scaling(), "fast_exp": args.fast_exp}


def needs_copies(args: AttentionArgs) -> bool:
    """Whether the binding cannot take k and v as they are, by their shapes and dtypes."""
    _, k, v = _operands(args)
    if k.dtype not in eight_bit.EIGHT_BIT:
        return False
    by_sequence = any(x is not None and x.dim() == 2 and x.shape[0] > 1 for x in (args.k_descale, args.v_descale))
    by_sequence = by_sequence or (args.v_per_channel and args.v_descale is not None and args.v_descale.dim() == 3)
    may_overlap = args.seqused_k is not None and args.block_table is None  # a row may be a key of two sequences
    has_kernel = k.shape[-1] % 8 == 0 and k.shape[-1] <= MAX_EIGHT_BIT_HEAD_DIM
    return v.dtype is not k.dtype or v.shape[-1] != k.shape[-1] or not has_kernel or (may_overlap and by_sequence)


def attend_copies(args: AttentionArgs, attend: Callable[[AttentionArgs], tuple[Tensor, ...]]) -> tuple[Tensor, ...]:
    """The result of attend(args) with 16-bit copies, in which 8-bit values are exact.

    Scales of heads go into q before and into the output after, those of rows and pages into the copies of k and v.
    """
    q, k, v = _operands(args)
    dtype = eight_bit.result_dtype(q, v, args.out_dtype)
    sequence = sequence_of_rows(args.cu_seqlens_q, q.shape[0]) if args.cu_seqlens_q is not None else None
    scaling = eight_bit.Scaling.of(q, k, v, args.descales(), dtype)
    wide = scaling.queries(q, sequence), scaling.scaled(k, scaling.k_rows), scaling.scaled(v, scaling.v_rows)
    operands = tuple(x.to(dtype) for x in wide)
    operands = arguments.padded(operands, q.shape[-1])
    result, *others = attend(args.without_scaling(*operands))
    out = result.new_empty((*q.shape[:-1], v.shape[-1]))
    scaling.store(out, result[..., : v.shape[-1]], sequence)
    return (out, *others)


def check_cache(args: KvCacheArgs) -> None:
    """Dtypes of a call over an 8-bit cache."""
    q, k_cache, v_cache = args.q, args.k_cache, args.v_cache
    eight_bit.check_dtypes(q, k_cache, v_cache, args.out_dtype, names=("k_cache", "v_cache"))
    if v_cache.dtype is not k_cache.dtype:
        raise NotImplementedError(
            f"v_cache: expected the dtype of k_cache ({eight_bit.named(k_cache.dtype)}) on {q.device.type}, got "
            f"{eight_bit.named(v_cache.dtype)}: decoding has no kernels for 8 bits of keys alone there"
        )


def _batch(args: AttentionArgs) -> int:
    return args.q.shape[0] if args.cu_seqlens_q is None else args.cu_seqlens_q.shape[0] - 1


def _operands(args: AttentionArgs) -> tuple[Tensor, Tensor, Tensor]:
    """q, k and v of a call that `check_unpacked` has passed."""
    k, v = args.k, args.v
    assert k is not None and v is not None
    return args.q, k, v


def _check_shapes(args: AttentionArgs, q: Tensor, k: Tensor, v: Tensor) -> None:
    dense, packed = "batch, seqlen, heads, head_dim", "total, heads, head_dim"
    paged = "blocks, page_size, heads, head_dim"
    q_axes = dense if args.cu_seqlens_q is None else packed
    kv_axes = q_axes if args.block_table is None else paged
    for name, x, axes in (("q", q, q_axes), ("k", k, kv_axes), ("v", v, kv_axes)):
        rank = axes.count(",") + 1
        if x.dim() != rank:
            raise RuntimeError(f"{name}: expected {rank} dimensions ({axes}), got {x.dim()}")
    arguments.check_shape("v", v, (*k.shape[:-1], v.shape[-1]))
    heads, heads_k = q.shape[-2], k.shape[-2]
    if heads % heads_k != 0 if heads_k > 0 else heads != 0:
        raise RuntimeError(f"q: expected a head count divisible by the K/V head count {heads_k}, got {heads}")
