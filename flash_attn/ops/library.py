"""The operators behind the public functions, in a namespace of our own, and the way the functions reach them.

`flash_attn_core::fwd` and `::bwd` carry all attention with autograd; `::kvcache_fwd`, `::kvcache_append_fwd` and
`::kvcache_plan` the KV cache. The names `flash_attn::_flash_attn_*` are a public surface that clients register anew,
so nothing here depends on them. Eager calls on plain tensors skip the dispatcher, which costs more than a small kernel.
"""

import torch

from flash_attn.ops import calls, context

_FORWARD_SCHEMA = (
    "fwd(Tensor q, Tensor? k, Tensor? v, Tensor? cu_seqlens_q, Tensor? cu_seqlens_k, Tensor? seqused_k, "
    "Tensor? leftpad_k, Tensor? block_table, Tensor? alibi_slopes, Tensor? sinks, SymInt max_seqlen_q, "
    "SymInt max_seqlen_k, float dropout_p, float softmax_scale, bool causal, SymInt window_left, SymInt window_right, "
    "float softcap, bool deterministic, bool return_softmax, bool return_max_logit, bool batch_invariant=False) "
    "-> (Tensor, Tensor, Tensor, Tensor, Tensor)"
)
_BACKWARD_SCHEMA = (
    "bwd(Tensor dout, Tensor? dlse, Tensor q, Tensor? k, Tensor? v, Tensor out, Tensor lse, Tensor rng_state, "
    "Tensor? cu_seqlens_q, Tensor? cu_seqlens_k, Tensor? alibi_slopes, Tensor? sinks, SymInt max_seqlen_q, "
    "SymInt max_seqlen_k, float dropout_p, float softmax_scale, bool causal, SymInt window_left, SymInt window_right, "
    "float softcap, bool deterministic, bool batch_invariant=False) -> Tensor[]"
)
_KVCACHE_SCHEMA = (
    "(Tensor q, Tensor{0} k_cache, Tensor{1} v_cache, Tensor? k, Tensor? v, Tensor? rotary_cos, Tensor? rotary_sin, "
    "Tensor? cache_seqlens, Tensor? cache_batch_idx, Tensor? cache_leftpad, Tensor? block_table, "
    "Tensor? alibi_slopes, Tensor(c!)? out, Tensor(d!)? plan, float softmax_scale, bool causal, SymInt window_left, "
    "SymInt window_right, float softcap, bool rotary_interleaved, SymInt num_splits, bool batch_invariant) "
    "-> (Tensor, Tensor)"
)
_PLAN_SCHEMA = (
    "(Tensor cache_seqlens, Tensor? cache_leftpad, Tensor(a!) plan, SymInt batch, SymInt seqlen_q, SymInt seqlen_new, "
    "SymInt heads, SymInt heads_k, SymInt head_dim, SymInt seqlen_cache, bool causal, SymInt window_left, "
    "SymInt window_right, SymInt num_splits, bool batch_invariant) -> ()"
)

# The arguments that may have gradients, by name.
_INPUTS = ("q", "k", "v", "sinks")
_BACKWARD_INPUTS = ("dout", "dlse", "q", "k", "v")
_KVCACHE_INPUTS = ("q", "k_cache", "v_cache", "k", "v", "out")

_library = torch.library.Library("flash_attn_core", "DEF")
_forward_op = _backward_op = None  # set by _register_attention


def attention(*args):
    """`calls.forward`, differentiable in q, k, v and sinks, whatever is tracing or transforming the call."""
    needs_dispatch, differentiating = context.survey(_INPUTS, (args[0], args[1], args[2], args[9]))
    if needs_dispatch:
        return _forward_op(*args)
    if context.transformed():
        return _TransformedAttention.apply(*args)
    if differentiating:
        return _Attention.apply(*args)
    return calls.forward(*args)


def kvcache_attention(*args):
    """`calls.kvcache_forward`; not differentiable: a backward through it raises an error."""
    out, appends = args[12], args[3] is not None
    needs_dispatch, differentiating = context.survey(_KVCACHE_INPUTS, (*args[:5], out))
    if differentiating:
        if out is not None:
            raise RuntimeError("out: expected None where gradients are recorded, got a tensor (use torch.no_grad())")
        if appends and not torch.compiler.is_compiling():
            context.overwrite("k_cache", args[1])
            context.overwrite("v_cache", args[2])
    if differentiating or needs_dispatch or context.transformed():
        new_out, lse = (_kvcache_append_op if appends else _kvcache_op)(*args)
        return (new_out if out is None else out), lse
    return calls.kvcache_forward(*args)


def update_kvcache_plan(cache_seqlens, cache_leftpad, plan, *sizes):
    """`calls.kvcache_plan` in place."""
    if context.survey(("cache_seqlens",), (cache_seqlens,))[0]:
        _kvcache_plan_op(cache_seqlens, cache_leftpad, plan, *sizes)
    else:
        calls.kvcache_plan(cache_seqlens, cache_leftpad, plan, *sizes)


def _five_results(forward):
    """The operator has a fixed number of results: a max_logit that is not wanted is empty."""

    def padded(q, *args):
        results = forward(q, *args)
        return results if len(results) == 5 else (*results, results[1].new_empty(0))

    return padded


def _setup_context(ctx, inputs, output):
    out, lse, dmask, rng_state, *max_logit = output
    q, k, v, cu_seqlens_q, cu_seqlens_k, *key_layout, alibi_slopes, sinks = inputs[:10]
    ctx.save_for_backward(q, k, v, out, lse, rng_state, cu_seqlens_q, cu_seqlens_k, alibi_slopes, sinks)
    ctx.config = (*inputs[10:19], inputs[21])
    ctx.key_layout = [
        name for name, x in zip(("seqused_k", "leftpad_k", "block_table"), key_layout) if x is not None
    ]  # fmt: skip
    ctx.mark_non_differentiable(dmask, rng_state, *max_logit)
    ctx.set_materialize_grads(False)


def _backward(ctx, dout, dlse, *_):
    if ctx.key_layout:
        raise NotImplementedError(f"{ctx.key_layout[0]}: expected None in training, got a tensor: it has no backward")
    saved = ctx.saved_tensors
    q, k, v, out = saved[:4]
    if dout is None and dlse is None:
        return (None,) * 22
    if dout is None:
        dout = torch.zeros_like(out)
    grads = iter(_attention_backward(dout, dlse, *saved, *ctx.config))
    dq, dk, dv, dsinks = (None if x is None else next(grads) for x in (q, k, v, saved[9]))
    return (dq, dk, dv, *(None,) * 6, dsinks, *(None,) * 12)


def _attention_backward(*args):
    if context.survey(_BACKWARD_INPUTS, args[:5])[0]:
        return _backward_op(*args)
    if torch.is_grad_enabled():
        return _AttentionBackward.apply(*args)
    return calls.backward(*args)


class _Attention(torch.autograd.Function):
    """The eager path: what the registered operator does, without its dispatch."""

    @staticmethod
    def forward(ctx, *args):
        output = calls.forward(*args)
        _setup_context(ctx, args, output)
        return output

    backward = staticmethod(_backward)


class _TransformedAttention(torch.autograd.Function):
    """The same for torch.func, which needs setup_context; that costs eager calls 15 us of argument binding."""

    @staticmethod
    def forward(*args):
        return calls.forward(*args)

    setup_context = staticmethod(_setup_context)
    backward = staticmethod(_backward)


class _AttentionBackward(torch.autograd.Function):
    """The backward under create_graph: gradients that refuse to be differentiated once more."""

    @staticmethod
    def forward(*args):
        return tuple(calls.backward(*args))

    @staticmethod
    def setup_context(ctx, inputs, output):
        pass

    @staticmethod
    def backward(ctx, *grads):
        _refuse_double_backward(ctx, *grads)


def _refuse_double_backward(ctx, *grads):
    raise RuntimeError("flash_attn: expected one backward, got a second: attention's gradients are not differentiable")


def _register_attention():
    global _forward_op, _backward_op
    # The tag keeps dropout out of common subexpression elimination, and makes compiled checkpointing replay the RNG.
    tags = (torch.Tag.nondeterministic_seeded, torch.Tag.pt2_compliant_tag)
    _library.define(_FORWARD_SCHEMA, tags=tags)
    _library.define(_BACKWARD_SCHEMA, tags=torch.Tag.pt2_compliant_tag)
    _library.impl("fwd", _five_results(calls.forward), "CompositeExplicitAutograd")
    _library.impl("bwd", calls.backward, "CompositeExplicitAutograd")
    torch.library.register_fake("flash_attn_core::fwd", _five_results(calls.forward_fake), lib=_library)
    torch.library.register_fake("flash_attn_core::bwd", calls.backward_fake, lib=_library)
    torch.library.register_autograd("flash_attn_core::fwd", _backward, setup_context=_setup_context, lib=_library)
    torch.library.register_autograd("flash_attn_core::bwd", _refuse_double_backward, lib=_library)
    _forward_op = torch.ops.flash_attn_core.fwd.default
    _backward_op = torch.ops.flash_attn_core.bwd.default


def _register_kvcache(name, caches):
    """The operator over a KV cache; caches: those of its arguments that it writes beside out and plan."""
    marks = ("(a!)", "(b!)") if caches else ("", "")
    op = torch.library.custom_op(
        f"flash_attn_core::{name}",
        calls.kvcache_operator,
        mutates_args=(*caches, "out", "plan"),
        schema=_KVCACHE_SCHEMA.format(*marks),
    )
    op.register_fake(calls.kvcache_operator_fake)
    return getattr(torch.ops.flash_attn_core, name).default


def _register_plan():
    def update(*args):
        calls.kvcache_plan(*args)

    op = torch.library.custom_op("flash_attn_core::kvcache_plan", update, mutates_args=("plan",), schema=_PLAN_SCHEMA)
    op.register_fake(lambda *args: None)
    return torch.ops.flash_attn_core.kvcache_plan.default


_register_attention()
_kvcache_op = _register_kvcache("kvcache_fwd", ())
_kvcache_append_op = _register_kvcache("kvcache_append_fwd", ("k_cache", "v_cache"))
_kvcache_plan_op = _register_plan()
