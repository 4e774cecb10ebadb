"""The operators that the public functions call, in a separate namespace, and the calls of them.

`flash_attn_core::fwd` and `::bwd` carry all attention with autograd; `::kvcache_fwd`, `::kvcache_append_fwd` and
`::kvcache_plan` the KV cache. The names `flash_attn::_flash_attn_*` are a public surface that clients register anew,
so nothing here depends on them. Eager calls on plain tensors skip the dispatcher, which costs more than a small kernel.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from types import ModuleType
from typing import TYPE_CHECKING, NamedTuple, NoReturn, TypeVar, cast

import torch
from torch import Tensor
from torch.autograd import forward_ad

from flash_attn._types import Batched, Context, VmapInfo
from flash_attn.ops import calls, context, outputs
from flash_attn.ops.attention_args import (
    ATTENTION_INPUTS,
    BACKWARD_INPUTS,
    BIASES,
    KVCACHE_INPUTS,
    TANGENT_INPUTS,
    AttentionArgs,
    AttentionBackwardArgs,
    KvCacheArgs,
    KvCachePlanArgs,
    Tangents,
    attention_gradients,
    backward_args,
    made,
    saved_for_backward,
    schema,
)

if TYPE_CHECKING:
    from flash_attn.derivatives.kernel import Computed

_NAMESPACE = "flash_attn_core"
_library = torch.library.Library(_NAMESPACE, "DEF")
_forward_op: Callable[..., tuple[Tensor, ...]]  # set by _register_attention, as is the next
_backward_op: Callable[..., list[Tensor]]
_Record = TypeVar("_Record", bound=NamedTuple)
_Result = TypeVar("_Result")


class AttentionContext(Context):
    """What `save_for_backward` keeps, and the attention functions."""

    options: tuple[float, ...]
    forward_only: str | None
    num_inputs: int
    returns_lse: bool
    has_biases: bool
    head_dims: tuple[int, ...] | None  # of q, k and v before they are padded
    surplus_columns: int


class _TransformedContext(AttentionContext):
    computed: Computed | None
    constants: int  # results without a tangent


class ValuesContext(Context):
    """What `save_values` keeps."""

    values: list[object]
    places: list[int]


def attention(args: AttentionArgs) -> tuple[Tensor, ...]:
    """The results of `calls.forward`, for a call outside of an autograd.Function. The operator is called where a
    compiler or a mode watches and where gradients are recorded; within torch.func and forward mode an
    autograd.Function, which has no rule for qv."""
    names: tuple[str, ...] = ATTENTION_INPUTS
    given = args.differentiable()
    if args.qv is not None:
        names, given = (*names, "qv"), (*given, args.qv)
    needs_dispatch, differentiating = context.survey(names, given, carries_tangents=args.qv is None)
    if needs_dispatch:
        return _forward_op(*args)
    if context.transforms():
        return _TransformedAttention.apply(*args, derived().computed_of_duals(args))  # type: ignore[no-any-return]  # of torch
    return _forward_op(*args) if differentiating else calls.forward(args)


def computed_attention(args: AttentionArgs, computed: Computed) -> tuple[Tensor, ...]:
    """`attention` of a call whose results are known: only records it for autograd."""
    return _TransformedAttention.apply(*args, computed)  # type: ignore[no-any-return]  # of torch


def attention_into(args: AttentionArgs, out: Tensor, inputs: tuple[Tensor, ...]) -> tuple[Tensor, ...]:
    """`attention` that writes its result into out; without gradients. inputs: (q, k, v) as the caller gave them."""
    given = (*args.differentiable(), args.qv)
    outputs.reject_gradients(out, *given)
    needs_dispatch = context.survey((*ATTENTION_INPUTS, "qv", "out"), (*given, out))[0]
    if not needs_dispatch and not context.transformed():
        return calls.forward_into(args, out, inputs)
    *_, v = inputs
    outputs.check_result(out, args.q, v, args.out_dtype, {})
    result, *others = attention(args)
    return (out.copy_(result[..., : out.shape[-1]]), *others)


def kvcache_attention(args: KvCacheArgs) -> tuple[Tensor, Tensor]:
    """`calls.kvcache_forward`; not differentiable: a backward through it raises an error."""
    out, appends = args.out, args.k is not None
    needs_dispatch, differentiating = context.survey(KVCACHE_INPUTS, args.differentiable())
    if differentiating:
        if out is not None:
            raise RuntimeError("out: expected None where gradients are recorded, got a tensor (use torch.no_grad())")
        if appends and not torch.compiler.is_compiling():
            context.overwrite("k_cache", args.k_cache)
            context.overwrite("v_cache", args.v_cache)
    if context.transformed():
        context.reject_batched("flash_attn_with_kvcache", args._fields, args)
        if differentiating:
            raise NotImplementedError("flash_attn_with_kvcache: expected no torch.func gradient, got one: no backward")
    if differentiating or needs_dispatch or context.transformed():
        new_out, lse = (_kvcache_append_op if appends else _kvcache_op)(*args)
        return (new_out if out is None else out), lse
    return calls.kvcache_forward(args)


def update_kvcache_plan(args: KvCachePlanArgs) -> None:
    """`calls.kvcache_plan` in place."""
    context.reject_batched("KvCachePlan", args._fields, args)
    context.check_writable(("plan",), (args.plan,))
    if context.survey(("cache_seqlens",), (args.cache_seqlens,))[0]:
        _kvcache_plan_op(*args)
    else:
        calls.kvcache_plan(args)


def save_for_backward(ctx: AttentionContext, args: AttentionArgs, output: Sequence[Tensor]) -> Sequence[Tensor | None]:
    """Save the tensors of a forward that `input_gradients` needs in the ctx of an autograd.Function; returns them."""
    out, lse, _, rng_state, *_ = output
    tensors, ctx.options = saved_for_backward(args, out, lse, rng_state)
    saved = context.all_savable(tensors)
    ctx.save_for_backward(*saved)
    ctx.forward_only = args.forward_only()
    ctx.set_materialize_grads(False)
    return saved


def input_gradients(
    ctx: AttentionContext, dout: Tensor | None, dlse: Tensor | None, bias_grad: bool = True
) -> Sequence[Tensor | None]:
    """The gradients of ATTENTION_INPUTS, None for those that are not given. bias_grad: whether biases want theirs."""
    if ctx.forward_only is not None:
        _reject_forward_only(ctx.forward_only, "training", "backward")
    if dout is None and dlse is None:
        return (None,) * len(ATTENTION_INPUTS)
    args = backward_args(dout, dlse, ctx.saved_tensors, ctx.options)
    if dout is None:
        args = args._replace(dout=torch.zeros_like(args.out))
    if not bias_grad and any(x is not None for x in args.biases()):
        args = args._replace(bias_grad=False)
    return by_input(args, attention_backward(args))


def _reject_forward_only(name: str, where: str, missing: str) -> NoReturn:
    expected = "at least 16 bits" if name == "k" else "None"
    raise NotImplementedError(f"{name}: expected {expected} in {where}, got a tensor: it has no {missing}")


def by_input(args: AttentionBackwardArgs, grads: Sequence[Tensor | None]) -> list[Tensor | None]:
    """A gradient for each of ATTENTION_INPUTS, or None. grads: of those that get one."""
    rest = iter(grads)
    return [None if x is None else next(rest) for x in args.learned()]


def attention_backward(args: AttentionBackwardArgs) -> list[Tensor]:
    """The gradients of those of `args.learned()` that are given."""
    if context.survey(BACKWARD_INPUTS, args.differentiable(), carries_tangents=True)[0]:
        return _backward_op(*args)
    differentiated = torch.is_grad_enabled() or forward_ad._current_level >= 0
    if not (differentiated and context.transformed()):
        context.reject_batched_gradients(args.dout, args.dlse)
    return _AttentionBackward.apply(*args) if differentiated else calls.backward(args)


def _setup_context(
    ctx: AttentionContext, inputs: Sequence[object], output: tuple[Tensor, ...]
) -> Sequence[Tensor | None]:
    ctx.mark_non_differentiable(*output[2:])
    return save_for_backward(ctx, made(AttentionArgs, inputs), output)


def _backward(ctx: AttentionContext, dout: Tensor | None, dlse: Tensor | None, *_: None) -> tuple[Tensor | None, ...]:
    wanted = dict(zip(AttentionArgs._fields, ctx.needs_input_grad))  # without trailing arguments that have defaults
    bias_grad = any(wanted.get(name) for name in BIASES)
    return attention_gradients(input_gradients(ctx, dout, dlse, bias_grad))


class _TransformedAttention(torch.autograd.Function):
    """For torch.func and forward mode: they need setup_context, which costs eager calls 15 us of argument binding.

    Its arguments are those of the operator, and what a kernel has computed already (`derivatives.kernel.Computed`).
    """

    @staticmethod
    def forward(*values: object) -> tuple[Tensor, ...]:
        computed = cast("Computed | None", values[-1])
        return calls.forward(made(AttentionArgs, values[:-1])) if computed is None else computed.take_results()

    @staticmethod
    def setup_context(ctx: _TransformedContext, inputs: tuple[object, ...], output: tuple[Tensor, ...]) -> None:
        ctx.computed = cast("Computed | None", inputs[-1])
        ctx.save_for_forward(*_setup_context(ctx, inputs[:-1], output))
        ctx.constants = len(output) - 2

    @staticmethod
    def backward(
        ctx: _TransformedContext, dout: Tensor | None, dlse: Tensor | None, *_: None
    ) -> tuple[Tensor | None, ...]:
        return *_backward(ctx, dout, dlse), None

    @staticmethod
    def jvp(ctx: _TransformedContext, *tangents: Tensor | None) -> tuple[Tensor | None, ...]:
        given = dict(zip(AttentionArgs._fields, tangents))
        directions = Tangents(*(given[name] for name in TANGENT_INPUTS))
        if ctx.forward_only is not None:
            _reject_forward_only(ctx.forward_only, "forward mode", "tangent")
        _, _, _, out, *_ = saved = ctx.saved_tensors
        args = backward_args(out, None, saved, ctx.options)
        return *derived().tangents(directions, args, ctx.computed), *[None] * ctx.constants

    @staticmethod
    def vmap(info: VmapInfo, in_dims: tuple[int | None, ...], *values: object) -> Batched:
        dropout_p = made(AttentionArgs, values[:-1]).dropout_p
        if dropout_p > 0 and info.randomness != "different":
            raise RuntimeError(
                f"dropout_p: expected 0 under torch.vmap(randomness={info.randomness!r}), got {dropout_p} "
                "(randomness='different' draws a mask for each sample)"
            )
        return context.by_sample(_TransformedAttention, info, in_dims, values)


class _AttentionBackward(torch.autograd.Function):
    """The backward where it is differentiated once more."""

    @staticmethod
    def forward(*args: object) -> tuple[Tensor, ...]:
        return tuple(calls.backward(made(AttentionBackwardArgs, args)))

    @staticmethod
    def setup_context(ctx: ValuesContext, inputs: tuple[object, ...], output: object) -> None:
        ctx.save_for_forward(*save_values(ctx, inputs))

    @staticmethod
    def backward(ctx: ValuesContext, *grads: Tensor | None) -> tuple[Tensor | None, ...]:
        return _second_backward(ctx, *grads)

    @staticmethod
    def jvp(ctx: ValuesContext, *tangents: Tensor | None) -> tuple[Tensor | None, ...]:
        args = made(AttentionBackwardArgs, saved_values(ctx))
        gradients: tuple[Tensor | None, ...] = derived().tangents_of_gradients(args, tangents)
        return gradients

    @staticmethod
    def vmap(info: VmapInfo, in_dims: tuple[int | None, ...], *args: object) -> Batched:
        return context.by_sample(_AttentionBackward, info, in_dims, args)


def save_values(ctx: ValuesContext, values: Sequence[object]) -> Sequence[Tensor | None]:
    """Save arguments of any types in the ctx of an autograd.Function for `saved_values`; returns the tensors."""
    ctx.values = [None if isinstance(x, Tensor) else x for x in values]
    ctx.places = [i for i, x in enumerate(values) if isinstance(x, Tensor)]
    tensors = context.all_savable([x for x in values if isinstance(x, Tensor)])
    ctx.save_for_backward(*tensors)
    ctx.set_materialize_grads(False)
    return tensors


def saved_values(ctx: ValuesContext) -> list[object]:
    values = list(ctx.values)
    for i, x in zip(ctx.places, ctx.saved_tensors):
        values[i] = x
    return values


def _second_setup_context(ctx: ValuesContext, inputs: tuple[object, ...], output: object) -> None:
    save_values(ctx, inputs)


def _second_backward(ctx: ValuesContext, *results: object) -> tuple[Tensor | None, ...]:
    of_list = len(results) == 1 and isinstance(results[0], (list, tuple))  # an operator with a list of results
    grads = cast("Sequence[Tensor | None]", results[0] if of_list else results)
    given = len(ctx.needs_input_grad)  # without trailing arguments that have defaults
    if all(x is None for x in grads):
        return (None,) * given
    if not context.transformed():
        context.reject_batched_gradients(*grads)
    args = made(AttentionBackwardArgs, saved_values(ctx))
    directions = Tangents(*by_input(args, grads)[: len(TANGENT_INPUTS)])
    t_out, t_lse, *inputs = derived().second_derivatives(directions, args)
    found = {"dout": t_out, "dlse": None if args.dlse is None else t_lse}
    return attention_gradients(by_input(args, inputs), AttentionBackwardArgs, found)[:given]


def derived() -> ModuleType:
    """The rules of derivatives, which are made of the operators here and loaded with the first one."""
    from flash_attn.derivatives import rules

    return rules


def takes(record: Callable[..., _Record], function: Callable[[_Record], _Result]) -> Callable[..., _Result]:
    """`function` of a record as an operator calls it: with the fields by position."""
    return lambda *args: function(record(*args))


def _five_results(forward: Callable[[AttentionArgs], tuple[Tensor, ...]]) -> Callable[..., tuple[Tensor, ...]]:
    """The operator has a fixed number of results: a max_logit that is not wanted is empty."""

    def padded(args: AttentionArgs) -> tuple[Tensor, ...]:
        out, lse, *results = forward(args)
        return (out, lse, *results) if args.return_max_logit else (out, lse, *results, lse.new_empty(0))

    return takes(AttentionArgs, padded)


def register(
    name: str,
    record: type[NamedTuple],
    returns: str,
    function: Callable[..., _Result],
    fake: Callable[..., _Result],
    tags: Sequence[torch.Tag] = (),
) -> Callable[..., _Result]:
    """The functional operator `name` over the fields of a record. function, fake: of these fields by position.

    A call within forward mode raises: torch.compile and torch.library would drop the tangents silently.
    """

    def checked(*args: object) -> _Result:
        context.reject_forward_mode(f"{_NAMESPACE}::{name}")
        return function(*args)

    # The compliant tag lets compilers trust the fake.
    _library.define(name + schema(record, returns), tags=(*tags, torch.Tag.pt2_compliant_tag))
    _library.impl(name, checked, "CompositeExplicitAutograd")
    torch.library.register_fake(f"{_NAMESPACE}::{name}", fake, lib=_library)
    operator: Callable[..., _Result] = getattr(getattr(torch.ops, _NAMESPACE), name).default
    return operator


def register_autograd(
    name: str, backward: Callable[..., object], setup_context: Callable[..., object] | None = None
) -> None:
    torch.library.register_autograd(f"{_NAMESPACE}::{name}", backward, setup_context=setup_context, lib=_library)


def _register_attention() -> None:
    global _forward_op, _backward_op
    # The tag keeps dropout out of common subexpression elimination, and makes compiled checkpointing replay the RNG.
    _forward_op = register(
        "fwd",
        AttentionArgs,
        "(Tensor, Tensor, Tensor, Tensor, Tensor)",
        _five_results(calls.forward),
        _five_results(calls.forward_fake),
        tags=(torch.Tag.nondeterministic_seeded,),
    )
    _backward_op = register(
        "bwd",
        AttentionBackwardArgs,
        "Tensor[]",
        takes(AttentionBackwardArgs, calls.backward),
        takes(AttentionBackwardArgs, calls.backward_fake),
    )
    register_autograd("fwd", _backward, _setup_context)
    register_autograd("bwd", _second_backward, _second_setup_context)


def _register_writing(
    name: str,
    record: type[_Record],
    returns: str,
    function: Callable[[_Record], _Result],
    fake: Callable[[_Record], _Result],
    written: Mapping[str, str],
) -> Callable[..., _Result]:
    """The operator `name` over the fields of a record that writes those of `written`: see `schema`."""
    op = torch.library.custom_op(
        f"{_NAMESPACE}::{name}",
        takes(record, function),
        mutates_args=tuple(written),
        schema=schema(record, returns, written),
    )
    op.register_fake(takes(record, fake))
    operator: Callable[..., _Result] = getattr(getattr(torch.ops, _NAMESPACE), name).default
    return operator


def _register_kvcache(name: str, written: Mapping[str, str]) -> Callable[..., tuple[Tensor, Tensor]]:
    functions = calls.kvcache_operator, calls.kvcache_operator_fake
    return _register_writing(name, KvCacheArgs, "(Tensor, Tensor)", *functions, written)


def _fill_plan(args: KvCachePlanArgs) -> None:
    calls.kvcache_plan(args)  # an operator that writes its argument must not return it


_register_attention()
_kvcache_op = _register_kvcache("kvcache_fwd", {"out": "c", "plan": "d"})
_kvcache_append_op = _register_kvcache(
    "kvcache_append_fwd",
    dict(zip(("k_cache", "v_cache", "out", "plan", "k_token_descale", "v_token_descale"), "abcdef")),
)
_kvcache_plan_op = _register_writing(
    "kvcache_plan", KvCachePlanArgs, "()", _fill_plan, lambda args: None, {"plan": "a"}
)
