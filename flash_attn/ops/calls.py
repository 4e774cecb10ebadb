"""Forward, backward and KV cache: each takes the record of a call and calls the backend of its device, or a fake.

The output has v's head dim. Gradients come back in the packing of the inputs. backend: in place of the device's.
"""

from __future__ import annotations

from types import ModuleType
from typing import TYPE_CHECKING, Any

import torch

from flash_attn import backends
from flash_attn.eight_bit import result_dtype
from flash_attn.ops import context, latent, outputs, scaled
from flash_attn.ops.attention_args import AttentionArgs, AttentionBackwardArgs, KvCacheArgs, KvCachePlanArgs

if TYPE_CHECKING:
    from flash_attn.ops.rows import RowsInUse

_KVCACHE_WRITTEN = ("out", "k_cache", "v_cache", "k_descale", "v_descale")
_BLOCK = 128  # S_dmask and softmax_d are padded to multiples of this many rows and columns


def round_up(x: int, multiple: int) -> int:
    return (x + multiple - 1) // multiple * multiple


def unpack(q: torch.Tensor, k: torch.Tensor | None, v: torch.Tensor | None) -> tuple[torch.Tensor, ...]:
    """Views (q, k, v) of the inputs in any packing."""
    if k is None:
        return q.unbind(-3)
    if v is None:
        return (q, *k.unbind(-3))
    return q, k, v


def rows_contiguous(x: torch.Tensor) -> torch.Tensor:
    """x with a contiguous last dimension, copied if it has to be."""
    return x if x.is_contiguous() or has_contiguous_rows(x) else x.contiguous()


def has_contiguous_rows(x: torch.Tensor) -> bool:
    return x.is_contiguous() or x.stride(-1) == 1 or x.shape[-1] <= 1


def as_index(name: str, x: torch.Tensor | None) -> torch.Tensor | None:
    """An index tensor as the backends want it: contiguous, int64 converted to int32. None passes."""
    if x is None or (x.dtype is torch.int32 and x.is_contiguous()):
        return x
    return (_to_int32(name, x) if x.dtype == torch.int64 else x).contiguous()


def _to_int32(name: str, x: torch.Tensor) -> torch.Tensor:
    """int64 as int32: values beyond it are an error on the CPU and the nearest int32, out of every range, on a GPU."""
    limits = torch.iinfo(torch.int32)
    if x.is_cpu:
        beyond = x[(x < limits.min) | (x > limits.max)]
        if beyond.numel() > 0:
            raise RuntimeError(f"{name}: expected values of at most 32 bits, got {beyond[0].item()}")
        return x.to(torch.int32)
    return x.clamp(limits.min, limits.max).to(torch.int32)


def forward(
    args: AttentionArgs, backend: ModuleType | None = None, out: torch.Tensor | None = None
) -> tuple[torch.Tensor, ...]:
    """Attention forward -> (out, lse, S_dmask, rng_state), and max_logit if wanted.

    out: for the result, if given. A call that makes copies of 8-bit tensors returns another tensor.
    """
    if args.qv is not None:
        latent.check_packed(args)
    backend = backend or backends.of(args.q)
    named = args.named()
    if args.is_scaled():
        if args.q.is_cpu:
            scaled.check_unpacked(args)
            named.update(args.scaling())
        else:
            scaled.check(args)
            if scaled.needs_copies(args):
                return scaled.attend_copies(args, lambda copies: forward(copies, backend))
            named.update(scaled.by_name(args))
    if args.qv is not None:
        named["qv"] = rows_contiguous(args.qv)
    q, k, v = args.q, args.k, args.v
    if v is None or k is None:
        q, k, v = unpack(q, k, v)
    if args.cu_seqlens_q is None:
        return _flash_attn_forward(
            q,
            k,
            v,
            args.dropout_p,
            args.softmax_scale,
            args.causal,
            args.window_left,
            args.window_right,
            args.softcap,
            args.alibi_slopes,
            args.return_softmax,
            out=out,
            return_max_logit=args.return_max_logit,
            batch_invariant=args.batch_invariant,
            flash_attn_gpu=backend,
            named=named,
        )
    return _flash_attn_varlen_forward(
        q,
        k,
        v,
        args.cu_seqlens_q,
        args.cu_seqlens_k,
        args.max_seqlen_q,
        args.max_seqlen_k,
        args.dropout_p,
        args.softmax_scale,
        args.causal,
        args.window_left,
        args.window_right,
        args.softcap,
        args.alibi_slopes,
        args.return_softmax,
        args.block_table,
        args.leftpad_k,
        args.seqused_k,
        out=out,
        flash_attn_gpu=backend,
        return_max_logit=args.return_max_logit,
        batch_invariant=args.batch_invariant,
        named=named,
    )


def forward_into(args: AttentionArgs, out: torch.Tensor, inputs: tuple[torch.Tensor, ...]) -> tuple[torch.Tensor, ...]:
    """`forward` with its result in out. inputs: (q, k, v) as the caller gave them, without padding."""
    *_, v = inputs
    is_padded = args.v is not None and args.v.shape[-1:] != v.shape[-1:]
    if is_padded or args.is_scaled() or _has_copies(args, inputs):
        outputs.check_result(out, args.q, v, args.out_dtype, {**args._asdict(), **dict(zip("qkv", inputs))})
    context.check_writable(("out",), (out,))
    result, *others = forward(args, out=None if is_padded else out)
    if result is out:
        context.written((out,))
    else:
        out.copy_(result[..., : out.shape[-1]])
    return (out, *others)


def _has_copies(args: AttentionArgs, inputs: tuple[torch.Tensor, ...]) -> bool:
    """Whether the backend gets copies of what the caller gave, and so cannot see what shares memory with them."""
    index = (args.cu_seqlens_q, args.cu_seqlens_k, args.seqused_k, args.leftpad_k, args.block_table)
    return (
        any(x is not given or not has_contiguous_rows(x) for x, given in zip((args.q, args.k, args.v), inputs))
        or (args.qv is not None and not has_contiguous_rows(args.qv))
        or any(x is not None and not (x.dtype is torch.int32 and x.is_contiguous()) for x in index)
    )


def _flash_attn_forward(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    dropout_p: float,
    softmax_scale: float,
    causal: bool,
    window_size_left: int,
    window_size_right: int,
    softcap: float,
    alibi_slopes: torch.Tensor | None,
    return_softmax: bool,
    *,
    flash_attn_gpu: ModuleType,
    out: torch.Tensor | None,
    return_max_logit: bool,
    batch_invariant: bool,
    named: dict[str, object],
) -> tuple[torch.Tensor, ...]:
    """Dense forward by FlashAttention-2's arguments. flash_attn_gpu: the backend. named: the options that it takes by
    name, of those that are given."""
    q, k, v = rows_contiguous(q), rows_contiguous(k), rows_contiguous(v)
    result = flash_attn_gpu.fwd(
        q,
        k,
        v,
        out,
        alibi_slopes,
        dropout_p,
        softmax_scale,
        causal,
        window_size_left,
        window_size_right,
        softcap,
        return_softmax,
        None,
        return_max_logit,
        batch_invariant,
        **named,
    )
    return tuple(result)


def _flash_attn_varlen_forward(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    cu_seqlens_q: torch.Tensor,
    cu_seqlens_k: torch.Tensor | None,
    max_seqlen_q: int,
    max_seqlen_k: int,
    dropout_p: float,
    softmax_scale: float,
    causal: bool,
    window_size_left: int,
    window_size_right: int,
    softcap: float,
    alibi_slopes: torch.Tensor | None,
    return_softmax: bool,
    block_table: torch.Tensor | None,
    leftpad_k: torch.Tensor | None,
    seqused_k: torch.Tensor | None,
    *,
    flash_attn_gpu: ModuleType,
    out: torch.Tensor | None,
    return_max_logit: bool,
    batch_invariant: bool,
    named: dict[str, object],
) -> tuple[torch.Tensor, ...]:
    """`_flash_attn_forward` of packed sequences."""
    q, k, v = rows_contiguous(q), rows_contiguous(k), rows_contiguous(v)
    result = flash_attn_gpu.varlen_fwd(
        q,
        k,
        v,
        out,
        as_index("cu_seqlens_q", cu_seqlens_q),
        as_index("cu_seqlens_k", cu_seqlens_k),
        as_index("seqused_k", seqused_k),
        as_index("leftpad_k", leftpad_k),
        as_index("block_table", block_table),
        alibi_slopes,
        max_seqlen_q,
        max_seqlen_k,
        dropout_p,
        softmax_scale,
        False,
        causal,
        window_size_left,
        window_size_right,
        softcap,
        return_softmax,
        None,
        0,
        return_max_logit,
        batch_invariant,
        **named,
    )
    return tuple(result)


def forward_in_use(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    rows: RowsInUse,
    cu_seqlens_k: torch.Tensor,
    seqused_k: torch.Tensor | None = None,
    leftpad_k: torch.Tensor | None = None,
    block_table: torch.Tensor | None = None,
    alibi_slopes: torch.Tensor | None = None,
    max_seqlen_q: int | None = None,
    max_seqlen_k: int | None = None,
    *,
    scores: tuple[float, bool, int, int, float],
    dropout_p: float = 0.0,
    batch_invariant: bool = False,
    sinks: torch.Tensor | None = None,
    scaling: dict[str, Any] | None = None,
    out: torch.Tensor | None = None,
    sm_margin: int = 0,
    qv: torch.Tensor | None = None,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Forward of packed queries of which `rows`, a RowsInUse, are in use -> (out, lse); without autograd.

    scores: (softmax_scale, causal, window_left, window_right, softcap). scaling: those of SCALING that a call with
    8-bit tensors has, by name. out: written and returned, packed. A maximum that is None is the largest possible.
    """
    most_keys = k.shape[0] if block_table is None else block_table.shape[1] * k.shape[1]
    args = AttentionArgs(
        rows.gather(q),
        k,
        v,
        rows.cu_seqlens,
        cu_seqlens_k,
        seqused_k,
        leftpad_k,
        block_table,
        alibi_slopes,
        sinks,
        max_seqlen_q or q.shape[0],
        max_seqlen_k or most_keys,
        dropout_p,
        *scores,
        False,
        False,
        False,
        batch_invariant,
        sm_margin=sm_margin,
        qv=None if qv is None else rows.gather(qv),
        **(scaling or {}),
    )
    if out is None:
        result, lse = forward(args)[:2]
        return rows.scatter(result), rows.scatter(lse, 1)
    if rows.order is None:
        result, lse, *_ = forward_into(args, out, (q, k, v))
        return result, lse
    outputs.check_result(out, q, v, args.out_dtype, {**args._asdict(), "q": q, "qv": qv})
    result, lse = forward(args)[:2]
    return out.copy_(rows.scatter(result)), rows.scatter(lse, 1)


def forward_fake(args: AttentionArgs) -> tuple[torch.Tensor, ...]:
    """Outputs of `forward` by shape, dtype, strides and device alone."""
    if args.qv is not None:
        latent.check_packed(args)
    q, k, v = unpack(args.q, args.k, args.v)
    if args.cu_seqlens_q is None:
        batch, max_seqlen_q, heads = q.shape[:3]
        max_seqlen_k = k.shape[1]
        lse_shape: tuple[int, ...] = (batch, heads, max_seqlen_q)
    else:
        batch, max_seqlen_q, max_seqlen_k = args.cu_seqlens_q.shape[0] - 1, args.max_seqlen_q, args.max_seqlen_k
        heads = q.shape[1]
        lse_shape = (heads, q.shape[0])
    dmask_shape: tuple[int, ...] = (0,)
    if args.return_softmax and args.dropout_p > 0:
        dmask_shape = (batch, heads, round_up(max_seqlen_q, _BLOCK), round_up(max_seqlen_k, _BLOCK))
    dtype = result_dtype(q, v, args.out_dtype)
    return (
        q.new_empty((*q.shape[:-1], v.shape[-1]), dtype=dtype),
        q.new_empty(lse_shape, dtype=_accumulator(q)),
        q.new_empty(dmask_shape, dtype=dtype),
        q.new_empty((2,), dtype=torch.int64),
        *([q.new_empty(heads, dtype=_accumulator(q))] if args.return_max_logit else []),
    )


def backward(args: AttentionBackwardArgs, backend: ModuleType | None = None) -> list[torch.Tensor]:
    """Attention backward -> the gradients of those of `args.learned()` that are given, each a new contiguous tensor."""
    packed = []
    if args.v is None:
        given = (args.q,) if args.k is None else (args.q, args.k)
        packed = [torch.empty_like(x, memory_format=torch.contiguous_format) for x in given]
    targets: tuple[torch.Tensor | None, ...] = (None, None, None)
    if packed:
        targets = unpack(packed[0], packed[1] if len(packed) > 1 else None, None)
    dq, dk, dv, _, *others = _backward_into(args, targets[0], targets[1], targets[2], backend)
    if others and args.attn_bias is not None and args.bias_grad:  # backends see one with all axes
        index = 0 if args.sinks is None else 1
        others[index] = others[index].view(args.attn_bias.shape)
    return [*(packed or (dq, dk, dv)), *others]


def backward_fake(args: AttentionBackwardArgs) -> list[torch.Tensor]:
    """Outputs of `backward` by shape, dtype, strides and device alone."""
    return [x.new_empty(x.shape) for x in args.learned() if x is not None]


def backward_into(
    args: AttentionBackwardArgs, dq: torch.Tensor | None, dk: torch.Tensor | None, dv: torch.Tensor | None
) -> torch.Tensor:
    """Attention backward into the given dq, dk, dv of any strides (None: allocated and dropped) -> softmax_d."""
    tensors = (args.dout, args.q, args.k, args.v, args.out, dq, dk, dv)
    if not all(x is None or has_contiguous_rows(x) for x in tensors):  # the backend gets copies
        read = {**args._asdict(), "lse": None, "softmax_lse": args.lse}
        outputs.check_apart({"dq": dq, "dk": dk, "dv": dv}, read)
    return _backward_into(args, dq, dk, dv)[3]


def _backward_into(
    args: AttentionBackwardArgs,
    dq: torch.Tensor | None,
    dk: torch.Tensor | None,
    dv: torch.Tensor | None,
    backend: ModuleType | None = None,
) -> list[torch.Tensor]:
    """-> [dq, dk, dv, softmax_d], and the gradients of sinks and biases, of those there are; a gradient that is not
    given is new and contiguous."""
    backend = backend or backends.of(args.q)
    wanted = (dq, dk, dv)
    context.check_writable(("dq", "dk", "dv"), wanted)
    dout, q, k, v, out = map(rows_contiguous, (args.dout, *unpack(args.q, args.k, args.v), args.out))
    written = [
        x if x is None or x.stride(-1) == 1 else torch.empty_like(x, memory_format=torch.contiguous_format)
        for x in wanted
    ]
    if args.cu_seqlens_q is None:
        result: list[torch.Tensor] = backend.bwd(
            dout,
            q,
            k,
            v,
            out,
            args.lse.contiguous(),
            *written,
            args.alibi_slopes,
            args.dropout_p,
            args.softmax_scale,
            args.causal,
            args.window_left,
            args.window_right,
            args.softcap,
            args.deterministic,
            None,
            args.rng_state,
            args.dlse,
            args.batch_invariant,
            **args.named(),
        )
    else:
        result = backend.varlen_bwd(
            dout,
            q,
            k,
            v,
            out,
            args.lse.contiguous(),
            *written,
            as_index("cu_seqlens_q", args.cu_seqlens_q),
            as_index("cu_seqlens_k", args.cu_seqlens_k),
            args.alibi_slopes,
            args.max_seqlen_q,
            args.max_seqlen_k,
            args.dropout_p,
            args.softmax_scale,
            False,
            args.causal,
            args.window_left,
            args.window_right,
            args.softcap,
            args.deterministic,
            None,
            args.rng_state,
            args.dlse,
            args.batch_invariant,
            **args.named(),
        )
    for target, source in zip(wanted, written):
        if target is not source and target is not None and source is not None:
            target.copy_(source)
    context.written(wanted)
    return result


def softmax_d_fake(q: torch.Tensor, cu_seqlens_q: torch.Tensor | None) -> torch.Tensor:
    """The fourth result of a backend's backward by shape, dtype and device alone."""
    if cu_seqlens_q is None:
        shape: tuple[int, ...] = (q.shape[0], q.shape[2], round_up(q.shape[1], _BLOCK))
    else:
        shape = (q.shape[1], q.shape[0] + _BLOCK * (cu_seqlens_q.shape[0] - 1))
    return q.new_empty(shape, dtype=_accumulator(q))


def _pages(block_table: torch.Tensor | None) -> torch.Tensor | None:
    """A block table as the backends want it: rows of contiguous int32, at any distance. None passes."""
    if block_table is None or (block_table.dtype == torch.int32 and block_table.stride(-1) == 1):
        return block_table
    return as_index("block_table", block_table)


def kvcache_forward(args: KvCacheArgs, backend: ModuleType | None = None) -> tuple[torch.Tensor, torch.Tensor]:
    """Attention over a KV cache, which receives k and v first when they are given -> (out, lse)."""
    rotary_cos, rotary_sin, k, v = args.rotary_cos, args.rotary_sin, args.k, args.v
    if rotary_cos is not None and rotary_sin is not None:
        rotary_cos, rotary_sin = rows_contiguous(rotary_cos), rows_contiguous(rotary_sin)
    overwritten: tuple[torch.Tensor | None, ...] = () if args.out is None else (args.out,)
    if k is not None and v is not None:
        k, v = rows_contiguous(k), rows_contiguous(v)
        overwritten = (args.out, args.k_cache, args.v_cache, args.k_token_descale, args.v_token_descale)
    if overwritten:
        context.check_writable(_KVCACHE_WRITTEN, overwritten)
        copied = {"q": args.q, "k": args.k, "v": args.v, "qv": args.qv}
        if not all(x is None or has_contiguous_rows(x) for x in copied.values()):
            outputs.check_apart_from_copied(zip(_KVCACHE_WRITTEN, overwritten), copied)
    if args.qv is not None:
        latent.check_cached(args)
    backend, scaling = backend or backends.of(args.q), {}
    if args.is_scaled():
        if not args.q.is_cpu and args.qv is None:
            scaled.check_cache(args)
        scaling = args.scaling()
    if args.qv is not None:
        scaling = {**scaling, "qv": rows_contiguous(args.qv)}
    out, lse = backend.fwd_kvcache(
        rows_contiguous(args.q),
        args.k_cache,
        args.v_cache,
        k,
        v,
        as_index("cache_seqlens", args.cache_seqlens),
        rotary_cos,
        rotary_sin,
        as_index("cache_batch_idx", args.cache_batch_idx),
        as_index("cache_leftpad", args.cache_leftpad),
        _pages(args.block_table),
        args.alibi_slopes,
        args.out,
        args.softmax_scale,
        args.causal,
        args.window_left,
        args.window_right,
        args.softcap,
        args.rotary_interleaved,
        args.num_splits,
        args.plan,
        args.batch_invariant,
        **args.named(),
        **scaling,
    )
    if overwritten or args.plan is not None:
        context.written((args.plan, *overwritten))
    return out, lse


def kvcache_operator(args: KvCacheArgs) -> tuple[torch.Tensor, torch.Tensor]:
    """`kvcache_forward` as an operator, which cannot return what it is given: with `out` the first result is empty."""
    out, lse = kvcache_forward(args)
    return (out if args.out is None else out.new_empty(0)), lse


def kvcache_operator_fake(args: KvCacheArgs) -> tuple[torch.Tensor, torch.Tensor]:
    """Outputs of `kvcache_operator` by shape, dtype, strides and device alone."""
    q = args.q
    if args.qv is not None:
        latent.check_cached(args)
    lse = q.new_empty((q.shape[0], q.shape[2], q.shape[1]), dtype=_accumulator(q))
    dtype = result_dtype(q, args.v_cache, args.out_dtype)
    shape = q.shape if args.qv is None else args.qv.shape
    return q.new_empty(shape if args.out is None else 0, dtype=dtype), lse


def kvcache_plan(args: KvCachePlanArgs) -> torch.Tensor:
    """Fill the plan of calls of `kvcache_forward`, or make one where it is None -> plan."""
    lengths, leftpad = as_index("cache_seqlens", args.cache_seqlens), as_index("cache_leftpad", args.cache_leftpad)
    latent.check_plan(args)
    backend = backends.of(args.cache_seqlens, "cache_seqlens")
    # On the CPU nothing is scheduled.
    named: dict[str, object] = {"eight_bit": args.eight_bit, "sm_margin": args.sm_margin}
    if args.cache_seqlens.is_cpu:
        named = {"head_dim_v": args.head_dim_v}
    elif args.head_dim_v:
        named["head_dim_v"] = args.head_dim_v
    plan: torch.Tensor = backend.kvcache_plan(lengths, leftpad, *args.sizes(), args.plan, **named)
    context.written((args.plan,))
    return plan


def _accumulator(q: torch.Tensor) -> torch.dtype:
    return torch.float64 if q.dtype == torch.float64 else torch.float32
