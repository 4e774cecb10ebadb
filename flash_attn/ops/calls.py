"""One call per pass: normalise the arguments, call the backend of the device; and the same as fakes.

Dense and varlen attention share each function: `cu_seqlens_q is None` means dense.
Packed inputs share them too: (qkv, None, None) with qkv (..., 3, heads, head_dim), or (q, kv, None) with
kv (..., 2, heads_k, head_dim). Gradients come back in the packing of the inputs. The output has v's head dim.
"""

import torch

from flash_attn import backends
from flash_attn.ops import context

_BLOCK = 128  # S_dmask and softmax_d are padded to multiples of this many rows and columns


def round_up(x, multiple):
    return (x + multiple - 1) // multiple * multiple


def unpack(q, k, v):
    """Views (q, k, v) of the inputs in any packing."""
    if k is None:
        return q.unbind(-3)
    if v is None:
        return (q, *k.unbind(-3))
    return q, k, v


def _rows_contiguous(x):
    """x with a contiguous last dimension, copied if it has to be."""
    return x if x.is_contiguous() or x.stride(-1) == 1 or x.shape[-1] <= 1 else x.contiguous()


def _index(name, x):
    """An index tensor as the backends want it: contiguous, int64 narrowed to int32. None passes."""
    if x is None or (x.dtype is torch.int32 and x.is_contiguous()):
        return x
    return (_narrowed(name, x) if x.dtype == torch.int64 else x).contiguous()


def _narrowed(name, x):
    """int64 as int32: values beyond it are an error on the CPU and the nearest int32, out of every range, on a GPU."""
    limits = torch.iinfo(torch.int32)
    if x.is_cpu:
        beyond = x[(x < limits.min) | (x > limits.max)]
        if beyond.numel() > 0:
            raise RuntimeError(f"{name}: expected values of at most 32 bits, got {beyond[0].item()}")
        return x.to(torch.int32)
    return x.clamp(limits.min, limits.max).to(torch.int32)


def forward(
    q, k, v, cu_seqlens_q, cu_seqlens_k, seqused_k, leftpad_k, block_table, alibi_slopes, sinks, max_seqlen_q,
    max_seqlen_k, dropout_p, softmax_scale, causal, window_left, window_right, softcap, deterministic, return_softmax,
    return_max_logit, batch_invariant=False,
):  # fmt: skip
    """Attention forward -> (out, lse, S_dmask, rng_state), and max_logit if wanted.

    `deterministic` matters to the backward alone.
    """
    backend = backends.of(q)
    q, k, v = map(_rows_contiguous, unpack(q, k, v))
    if cu_seqlens_q is None:
        result = backend.fwd(
            q, k, v, None, alibi_slopes, dropout_p, softmax_scale, causal, window_left, window_right, softcap,
            return_softmax, None, sinks, return_max_logit, batch_invariant,
        )  # fmt: skip
    else:
        result = backend.varlen_fwd(
            q, k, v, None, _index("cu_seqlens_q", cu_seqlens_q), _index("cu_seqlens_k", cu_seqlens_k),
            _index("seqused_k", seqused_k), _index("leftpad_k", leftpad_k), _index("block_table", block_table),
            alibi_slopes, max_seqlen_q, max_seqlen_k, dropout_p, softmax_scale, False, causal, window_left,
            window_right, softcap, return_softmax, None, 0, sinks, return_max_logit,
            batch_invariant,
        )  # fmt: skip
    return tuple(result)


def forward_fake(
    q, k, v, cu_seqlens_q, cu_seqlens_k, seqused_k, leftpad_k, block_table, alibi_slopes, sinks, max_seqlen_q,
    max_seqlen_k, dropout_p, softmax_scale, causal, window_left, window_right, softcap, deterministic, return_softmax,
    return_max_logit, batch_invariant=False,
):  # fmt: skip
    """Outputs of `forward` by shape, dtype, strides and device alone."""
    q, k, v = unpack(q, k, v)
    if cu_seqlens_q is None:
        batch, max_seqlen_q, heads = q.shape[:3]
        max_seqlen_k = k.shape[1]
        lse_shape = (batch, heads, max_seqlen_q)
    else:
        batch = cu_seqlens_q.shape[0] - 1
        heads = q.shape[1]
        lse_shape = (heads, q.shape[0])
    dmask_shape = (0,)
    if return_softmax and dropout_p > 0:
        dmask_shape = (batch, heads, round_up(max_seqlen_q, _BLOCK), round_up(max_seqlen_k, _BLOCK))
    return (
        q.new_empty((*q.shape[:-1], v.shape[-1])),
        q.new_empty(lse_shape, dtype=_accumulator(q)),
        q.new_empty(dmask_shape),
        q.new_empty((2,), dtype=torch.int64),
        *([q.new_empty(heads, dtype=_accumulator(q))] if return_max_logit else []),
    )


def backward(
    dout, dlse, q, k, v, out, lse, rng_state, cu_seqlens_q, cu_seqlens_k, alibi_slopes, sinks, max_seqlen_q,
    max_seqlen_k, dropout_p, softmax_scale, causal, window_left, window_right, softcap, deterministic,
    batch_invariant=False,
):  # fmt: skip
    """Attention backward -> the gradients of those of (q, k, v, sinks) that are given, each a new contiguous tensor."""
    packed = [torch.empty_like(x, memory_format=torch.contiguous_format) for x in (q, k) if x is not None and v is None]
    targets = unpack(*packed, *[None] * (3 - len(packed))) if packed else (None, None, None)
    dq, dk, dv, _, *dsinks = _backward_into(
        dout, *unpack(q, k, v), out, lse, *targets, cu_seqlens_q, cu_seqlens_k, alibi_slopes, max_seqlen_q,
        max_seqlen_k, dropout_p, softmax_scale, causal, window_left, window_right, softcap, deterministic, rng_state,
        dlse, sinks, batch_invariant,
    )  # fmt: skip
    return [*(packed or (dq, dk, dv)), *dsinks]


def backward_fake(
    dout, dlse, q, k, v, out, lse, rng_state, cu_seqlens_q, cu_seqlens_k, alibi_slopes, sinks, *rest
):  # fmt: skip
    """Outputs of `backward` by shape, dtype, strides and device alone."""
    return [x.new_empty(x.shape) for x in (q, k, v, sinks) if x is not None]


def backward_into(*args, batch_invariant):
    """Attention backward into the given dq, dk, dv of any strides (None: allocated and dropped) -> softmax_d."""
    return _backward_into(*args, batch_invariant=batch_invariant)[3]


def _backward_into(
    dout, q, k, v, out, lse, dq, dk, dv, cu_seqlens_q, cu_seqlens_k, alibi_slopes, max_seqlen_q, max_seqlen_k,
    dropout_p, softmax_scale, causal, window_left, window_right, softcap, deterministic, rng_state, dlse=None,
    sinks=None, batch_invariant=False,
):  # fmt: skip
    """-> [dq, dk, dv, softmax_d], and with sinks their gradient; a gradient that is not given is new and contiguous."""
    backend = backends.of(q)
    context.check_writable(("dq", "dk", "dv"), (dq, dk, dv))
    dout, q, k, v, out = map(_rows_contiguous, (dout, q, k, v, out))
    wanted = (dq, dk, dv)
    written = [x if x is None or x.stride(-1) == 1 else torch.empty_like(x, memory_format=torch.contiguous_format)
               for x in wanted]  # fmt: skip
    if cu_seqlens_q is None:
        result = backend.bwd(
            dout, q, k, v, out, lse.contiguous(), *written, alibi_slopes, dropout_p, softmax_scale, causal, window_left,
            window_right, softcap, deterministic, None, rng_state, dlse, sinks, batch_invariant,
        )  # fmt: skip
    else:
        result = backend.varlen_bwd(
            dout, q, k, v, out, lse.contiguous(), *written, _index("cu_seqlens_q", cu_seqlens_q),
            _index("cu_seqlens_k", cu_seqlens_k), alibi_slopes, max_seqlen_q, max_seqlen_k, dropout_p, softmax_scale,
            False, causal, window_left, window_right, softcap, deterministic, None, rng_state, dlse, sinks,
            batch_invariant,
        )  # fmt: skip
    for target, source in zip(wanted, written):
        if target is not source:
            target.copy_(source)
    context.written(wanted)
    return result


def softmax_d_fake(q, cu_seqlens_q):
    """The fourth result of a backend's backward by shape, dtype and device alone."""
    if cu_seqlens_q is None:
        shape = (q.shape[0], q.shape[2], round_up(q.shape[1], _BLOCK))
    else:
        shape = (q.shape[1], q.shape[0] + _BLOCK * (cu_seqlens_q.shape[0] - 1))
    return q.new_empty(shape, dtype=_accumulator(q))


def _pages(block_table):
    """A block table as the backends want it: rows of contiguous int32, at any distance. None passes."""
    if block_table is None or (block_table.dtype == torch.int32 and block_table.stride(-1) == 1):
        return block_table
    return _index("block_table", block_table)


def kvcache_forward(
    q, k_cache, v_cache, k, v, rotary_cos, rotary_sin, cache_seqlens, cache_batch_idx, cache_leftpad, block_table,
    alibi_slopes, out, plan, softmax_scale, causal, window_left, window_right, softcap, rotary_interleaved, num_splits,
    batch_invariant,
):  # fmt: skip
    """Attention over a KV cache, which receives k and v first when they are given -> (out, lse)."""
    if rotary_cos is not None and rotary_sin is not None:
        rotary_cos, rotary_sin = _rows_contiguous(rotary_cos), _rows_contiguous(rotary_sin)
    overwritten = () if out is None else (out,)
    if k is not None and v is not None:
        k, v = _rows_contiguous(k), _rows_contiguous(v)
        overwritten = (out, k_cache, v_cache)
    if overwritten:
        context.check_writable(("out", "k_cache", "v_cache"), overwritten)
    result, lse = backends.of(q).fwd_kvcache(
        _rows_contiguous(q), k_cache, v_cache, k, v, _index("cache_seqlens", cache_seqlens), rotary_cos, rotary_sin,
        _index("cache_batch_idx", cache_batch_idx), _index("cache_leftpad", cache_leftpad), _pages(block_table),
        alibi_slopes, out, softmax_scale, causal, window_left, window_right, softcap, rotary_interleaved, num_splits,
        plan, batch_invariant,
    )  # fmt: skip
    if overwritten or plan is not None:
        context.written((plan, *overwritten))
    return result, lse


def kvcache_operator(q, *rest):
    """`kvcache_forward` as an operator, which cannot return what it is given: with `out` the first result is empty."""
    out, lse = kvcache_forward(q, *rest)
    return (out if rest[11] is None else q.new_empty(0)), lse


def kvcache_operator_fake(q, *rest):
    """Outputs of `kvcache_operator` by shape, dtype, strides and device alone."""
    lse = q.new_empty((q.shape[0], q.shape[2], q.shape[1]), dtype=_accumulator(q))
    return q.new_empty(q.shape if rest[11] is None else 0), lse


def kvcache_plan(cache_seqlens, cache_leftpad, plan, *sizes):
    """Fill a plan for calls of `kvcache_forward`, or make one (plan None); sizes: from batch to batch_invariant."""
    lengths, leftpad = _index("cache_seqlens", cache_seqlens), _index("cache_leftpad", cache_leftpad)
    result = backends.of(cache_seqlens, "cache_seqlens").kvcache_plan(lengths, leftpad, *sizes, plan)
    context.written((plan,))
    return result


def _accumulator(q):
    return torch.float64 if q.dtype == torch.float64 else torch.float32
