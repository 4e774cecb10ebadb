"""The public attention functions and the autograd functions under them, by the names of FlashAttention-2.

All compute exact attention, softmax(softmax_scale * Q K^T + bias + mask) V, by the tiled online-softmax algorithm of
FlashAttention-2 (Dao, 2023, arXiv:2307.08691), whose memory grows linearly with the sequence length; gradients
recompute the probabilities from Q, K and the log-sum-exp.

Common to all of them:

dtypes       q, k, v of one dtype: float16 or bfloat16; on CPU tensors float32 and float64 too. Sums are kept in
             float32 (float64 for float64 inputs). Under torch.autocast float32 inputs become its dtype.
8 bits       k and v may be float8_e4m3fn or int8, and q float8_e4m3fn where k is: exact attention of the values
             stored value * descale, without gradient and dropout. CUDA multiplies float8_e4m3fn q, k and v of head_dim
             64, 128 and 256 on compute capability 9.0, reads 8-bit k and v in decode, and converts them to float16 for
             many queries (docs/fp8.md).
heads        nheads divisible by nheads_k; query head i reads K/V head i // (nheads / nheads_k).
head_dim     up to 512. On CUDA one that is no multiple of 8 costs a padded copy of the inputs.
head_dim_v   that of v and out, where a function names it; up to 512 too. If it differs from head_dim, a CUDA call takes
             the time of the larger one. On Hopper 192 with 128 is faster, except for a forward with dropout, softcap or
             ALiBi. The narrower tensors are padded by a copy on other GPUs, if the larger head dim is at most 32, for
             small problems, and for few queries over many keys.
strides      any; a head dim with a stride other than 1 costs a copy.
positions    aligned to the bottom right corner: query i of sq is at position i + sk - sq among sk keys.
masked rows  a query that sees no key has output 0, gradients 0 and LSE +inf (with sinks: LSE the sink).
gradients    of out and softmax_lse with respect to q, k, v, sinks, attn_bias and rel_bias. alibi_slopes, or a number
             given as a tensor, must not require one. Second derivatives and forward mode work without mask and biases
             (docs/derivatives.md). torch.vmap loops over the samples.

Bad arguments raise RuntimeError, TypeError or NotImplementedError: the message names the argument, what was expected
and what it was; nothing is computed then.
"""

from __future__ import annotations

import contextlib
from typing import Any, Optional, cast

import torch
from torch import Tensor
from torch.nn import Parameter

from flash_attn import backends, observation
from flash_attn._docstrings import documented
from flash_attn._types import Descale, TensorOrTuple, WindowSize
from flash_attn.batch_invariance import is_batch_invariant
from flash_attn.inference import flash_attn_combine, flash_attn_with_kvcache  # noqa: F401
from flash_attn.masks import AttentionMask
from flash_attn.masks.documents import dense_results, is_by_head, packed_documents
from flash_attn.ops import arguments, calls, context, eager, library, normalize, outputs
from flash_attn.ops.attention_args import (
    ATTENTION_INPUTS,
    BIASES,
    DENSE,
    PLAIN,
    AttentionArgs,
    Options,
    Sequences,
    replaced,
)
from flash_attn.ops.library import AttentionContext
from flash_attn.ops.lse import check_convention, converted
from flash_attn.ops.public import (
    _flash_attn_backward,
    _flash_attn_forward,
    _flash_attn_varlen_backward,
    _flash_attn_varlen_forward,
)
from flash_attn.ops.quant_args import NO_QUANT, QuantArgs
from flash_attn.ops.rows import RowsInUse

_wrapped_flash_attn_forward = _flash_attn_forward
_wrapped_flash_attn_backward = _flash_attn_backward
_wrapped_flash_attn_varlen_forward = _flash_attn_varlen_forward
_wrapped_flash_attn_varlen_backward = _flash_attn_varlen_backward

flash_attn_gpu = backends.cuda_extension() or backends.get("cpu")

_is_compiling = torch.compiler.is_compiling
_EAGER = cast(AttentionContext, object())  # the ctx of calls that nothing records or observes
_Rare = tuple[bool, Optional[Tensor], Options]  # is_grad_enabled, sinks, options


class _Attention(torch.autograd.Function):
    """Base of FlashAttention-2's autograd functions.

    `apply` takes these by position, as in flash_attn 2.8: the inputs; of packed sequences cu_seqlens and the largest
    lengths; dropout_p, softmax_scale, causal, window_size, softcap, alibi_slopes, deterministic, return_softmax and
    is_grad_enabled=True. Then sinks and `Options`, which flash_attn 2.8 does not have. `forward` also gets the biases
    of the options, because autograd sees no tensor within a record. With is_grad_enabled False nothing is recorded.
    """

    num_inputs, num_lengths = 3, 0

    @classmethod
    def apply(cls, *args: Any) -> TensorOrTuple:
        if _is_compiling():  # compiled code traces `forward` alone, unless it was left before
            return cls.forward(None, *args)
        sinks, options = args[-2:] if type(args[-1]) is Options else (None, PLAIN)
        inputs, records = args[: cls.num_inputs], False
        for x in inputs:
            if type(x) is not Tensor:
                return cls.forward(None, *args)
            if x.requires_grad:
                records = True
        if sinks is not None:
            if type(sinks) is not Tensor and type(sinks) is not Parameter:
                return cls.forward(None, *args)
            records = records or sinks.requires_grad
        biases: tuple[Tensor | None, ...] = ()
        if options is not PLAIN and any(x is not None for x in options.biases()):
            biases = options.biases()
            for x in biases:
                if x is not None and type(x) is not Tensor and type(x) is not Parameter:
                    return cls.forward(None, *args)
            records = records or context.records_gradients(*biases)
        if (options is not PLAIN and (options.out is not None or options.qv is not None)) or context.is_watched():
            return cls.forward(None, *args)
        if records and torch.is_grad_enabled():
            if normalize.converts(inputs, sinks):
                return cls._apply_converted(args, sinks, options, biases)
            args = (*args, *biases) if biases else args
            return super().apply(*args)  # type: ignore[no-untyped-call]  # of torch
        return cls.forward(_EAGER, *args)

    @classmethod
    def _apply_converted(
        cls, args: tuple[Any, ...], sinks: Tensor | None, options: Options, biases: tuple[Tensor | None, ...]
    ) -> TensorOrTuple:
        """`apply` where kernels need converted inputs: autograd records the conversions, and saves what they return."""
        inputs, rest = args[: cls.num_inputs], list(args[cls.num_inputs :])
        try:
            if options is not PLAIN:
                normalize.check_score_tensors(options, inputs[0])  # before anything is launched
            operands = normalize.operands(inputs, cls.num_lengths > 0)
            if sinks is not None:
                rest[-2] = arguments.sinks(sinks)
        except (RuntimeError, TypeError) as error:
            arguments.rename(error, normalize.callers_names(inputs, DENSE, options))
            raise
        is_padded = operands[0].shape != inputs[0].shape
        if is_padded and rest[cls.num_lengths + 1] is None:  # softmax_scale
            rest[cls.num_lengths + 1] = inputs[0].shape[-1] ** -0.5
        result = super().apply(*operands, *rest, *biases)  # type: ignore[no-untyped-call]  # of torch
        if not is_padded:
            return result
        out, *others = result if isinstance(result, tuple) else (result,)
        out = out[..., : inputs[-1].shape[-1]].contiguous()
        return (out, *others) if others else out

    @staticmethod
    def backward(ctx: AttentionContext, dout: Tensor | None, *others: Tensor | None) -> tuple[Tensor | None, ...]:
        if ctx.head_dims is not None and dout is not None:
            dout = normalize.pad(dout, ctx.surplus_columns)
        needed = ctx.needs_input_grad
        num_biases = len(BIASES)
        wants_biases = ctx.has_biases and any(needed[-num_biases:])
        dlse = others[0] if ctx.returns_lse else None
        every = library.input_gradients(ctx, dout, dlse, wants_biases)
        grads, dsinks, dbiases = every[: -num_biases - 1], every[-num_biases - 1], every[-num_biases:]
        if ctx.head_dims is not None:
            grads = [None if x is None else x[..., :size] for x, size in zip(grads, ctx.head_dims)]
        rest: list[Tensor | None] = [None] * (len(needed) - ctx.num_inputs)
        if ctx.has_biases:
            rest[-num_biases - 2], rest[-num_biases:] = dsinks, dbiases
        elif dsinks is not None:
            rest[-2] = dsinks
        return (*grads[: ctx.num_inputs], *rest)


class FlashAttnFunc(_Attention):
    """q, k, v."""

    @staticmethod
    def forward(ctx: AttentionContext | None, q: Tensor, k: Tensor, v: Tensor, *options: Any) -> TensorOrTuple:
        return _attention(ctx, (q, k, v), DENSE, *options)


class FlashAttnQKVPackedFunc(_Attention):
    """qkv."""

    num_inputs = 1

    @staticmethod
    def forward(ctx: AttentionContext | None, qkv: Tensor, *options: Any) -> TensorOrTuple:
        return _attention(ctx, (qkv,), DENSE, *options)


class FlashAttnKVPackedFunc(_Attention):
    """q, kv."""

    num_inputs = 2

    @staticmethod
    def forward(ctx: AttentionContext | None, q: Tensor, kv: Tensor, *options: Any) -> TensorOrTuple:
        return _attention(ctx, (q, kv), DENSE, *options)


class FlashAttnVarlenFunc(_Attention):
    """q, k, v, cu_seqlens_q, cu_seqlens_k, max_seqlen_q, max_seqlen_k; block_table follows return_softmax."""

    num_lengths = 4

    @staticmethod
    def forward(
        ctx: AttentionContext | None,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        cu_seqlens_q: Tensor,
        cu_seqlens_k: Tensor,
        max_seqlen_q: int | Tensor,
        max_seqlen_k: int | Tensor,
        dropout_p: float,
        softmax_scale: float | None,
        causal: bool,
        window_size: WindowSize,
        softcap: float,
        alibi_slopes: Tensor | None,
        deterministic: bool,
        return_softmax: bool,
        block_table: Tensor | None = None,
        is_grad_enabled: bool = True,
        sinks: Tensor | None = None,
        options: Options = PLAIN,
        *biases: Tensor | None,
    ) -> TensorOrTuple:
        sequences = Sequences(
            cu_seqlens_q, cu_seqlens_k, max_seqlen_q, max_seqlen_k, options.seqused_k, options.leftpad_k, block_table
        )
        return _attention(
            ctx, (q, k, v), sequences, dropout_p, softmax_scale, causal, window_size, softcap, alibi_slopes,
            deterministic, return_softmax, is_grad_enabled, sinks, options, *biases,
        )  # fmt: skip


class FlashAttnVarlenQKVPackedFunc(_Attention):
    """qkv, cu_seqlens, max_seqlen."""

    num_inputs, num_lengths = 1, 2

    @staticmethod
    def forward(
        ctx: AttentionContext | None, qkv: Tensor, cu_seqlens: Tensor, max_seqlen: int | Tensor, *options: Any
    ) -> TensorOrTuple:
        return _attention(ctx, (qkv,), Sequences(cu_seqlens, cu_seqlens, max_seqlen, max_seqlen), *options)


class FlashAttnVarlenKVPackedFunc(_Attention):
    """q, kv, cu_seqlens_q, cu_seqlens_k, max_seqlen_q, max_seqlen_k."""

    num_inputs, num_lengths = 2, 4

    @staticmethod
    def forward(
        ctx: AttentionContext | None,
        q: Tensor,
        kv: Tensor,
        cu_seqlens_q: Tensor,
        cu_seqlens_k: Tensor,
        max_seqlen_q: int | Tensor,
        max_seqlen_k: int | Tensor,
        *options: Any,
    ) -> TensorOrTuple:
        return _attention(ctx, (q, kv), Sequences(cu_seqlens_q, cu_seqlens_k, max_seqlen_q, max_seqlen_k), *options)


def _attention(
    ctx: AttentionContext | None,
    inputs: tuple[Tensor, ...],
    sequences: Sequences,
    dropout_p: float,
    softmax_scale: float | None,
    causal: bool,
    window_size: WindowSize,
    softcap: float,
    alibi_slopes: Tensor | None,
    deterministic: bool,
    return_softmax: bool,
    is_grad_enabled: bool = True,
    sinks: Tensor | None = None,
    options: Options = PLAIN,
    *biases: Tensor | None,
) -> TensorOrTuple:
    """The forward of all classes. biases: those of options, where autograd records them. ctx: that of an
    autograd.Function; _EAGER where nothing is recorded and nobody watches; None where neither is sure."""
    try:
        if type(return_softmax) is not bool:
            return_softmax = arguments.flag("return_attn_probs", return_softmax)
        args = normalize.attention(
            inputs, sequences, dropout_p, softmax_scale, causal, window_size, softcap, alibi_slopes, deterministic,
            return_softmax, sinks, options,
        )  # fmt: skip
        if ctx is _EAGER:
            output = calls.forward(args)
            if args.q is inputs[0] and not (return_softmax or args.return_max_logit):
                return output[0]
        elif ctx is None:
            with contextlib.nullcontext() if is_grad_enabled else torch.no_grad():
                out = options.out
                output = library.attention(args) if out is None else library.attention_into(args, out, inputs)
        else:
            output = _recorded(args, inputs)
        out, lse, dmask, _, *max_logit = output
        padded = args.q is not inputs[0] and args.q.shape[-1] != inputs[0].shape[-1]
        if padded and options.out is None:
            out = out[..., : inputs[-1].shape[-1]].contiguous()
        results = (out, lse, dmask) if return_softmax else (out,)
        if args.return_max_logit:
            results = (*results, *max_logit)
        if ctx is not _EAGER and ctx is not None:
            library.save_for_backward(ctx, args, output)
            ctx.num_inputs, ctx.returns_lse, ctx.has_biases = len(inputs), return_softmax, bool(biases)
            ctx.head_dims = None
            if padded:  # in compiled code alone
                ctx.head_dims = (*[inputs[0].shape[-1]] * 2, inputs[-1].shape[-1])
                ctx.surplus_columns = output[0].shape[-1] - inputs[-1].shape[-1]
            constant = results[2 if return_softmax else 1 :] if is_grad_enabled else results
            if constant:
                ctx.mark_non_differentiable(*constant)
        return results if len(results) > 1 else out
    except (RuntimeError, TypeError) as error:
        arguments.rename(error, normalize.callers_names(inputs, sequences, options))
        raise


def _recorded(args: AttentionArgs, inputs: tuple[Tensor, ...]) -> tuple[Tensor, ...]:
    """The results of a call within an autograd.Function, which torch.compile traces too."""
    if _is_compiling():
        if any(x is y for i, x in enumerate(inputs) for y in inputs[:i]):
            raise NotImplementedError(
                "q, k, v: expected different tensors in compiled FlashAttnFunc.apply, got one twice, whose gradients "
                "torch does not add: compiled flash_attn_func takes it"
            )
        if any(x is not None for x in args.biases()):
            raise NotImplementedError(
                f"{', '.join(BIASES)}: expected None in compiled FlashAttnFunc.apply, got one, whose gradient torch "
                "drops: compiled flash_attn_func takes it"
            )
        return library.attention(args)
    context.check_savable(ATTENTION_INPUTS, (args.q, args.k, args.v))
    return calls.forward(args)


def attend(inputs: tuple[Tensor, ...], sequences: Sequences, *options: Any) -> TensorOrTuple:
    """`apply` of the class for these inputs. Compiled code traces the operator instead, which has a gradient.

    options: from dropout_p to `Options` as in `_Attention`, all of them; sequences: DENSE, or those of packed inputs.
    """
    if _is_compiling():
        return _attention(None, inputs, sequences, *options)
    if sequences is DENSE:
        dense = (FlashAttnQKVPackedFunc, FlashAttnKVPackedFunc, FlashAttnFunc)[len(inputs) - 1]
        return dense.apply(*inputs, *options)
    if len(inputs) == 1:
        return FlashAttnVarlenQKVPackedFunc.apply(*inputs, sequences.cu_seqlens_q, sequences.max_seqlen_q, *options)
    if len(inputs) == 2:
        return FlashAttnVarlenKVPackedFunc.apply(*inputs, *sequences[:4], *options)
    *score, is_grad_enabled, sinks, more = options
    more = more._replace(seqused_k=sequences.seqused_k, leftpad_k=sequences.leftpad_k)
    return FlashAttnVarlenFunc.apply(
        *inputs, *sequences[:4], *score, sequences.block_table, is_grad_enabled, sinks, more
    )


def _attend_masked(inputs: tuple[Tensor, ...], *options: Any) -> TensorOrTuple:
    """`attend` of a dense call with a mask. One of documents makes it a packed call where it can."""
    dropout_p, *_, alibi_slopes, _, returns_lse, _, sinks, more = options
    cu_seqlens = None
    if (
        isinstance(dropout_p, (float, int))
        and dropout_p == 0
        and (alibi_slopes is None or is_by_head(alibi_slopes, inputs[0]))
        and all(x is None for x in more.biases())
        and more.quant is NO_QUANT
        and more.batch_invariant is False
        and not is_batch_invariant()
    ):
        cu_seqlens = packed_documents(more.mask, inputs, has_sinks=sinks is not None)
    if cu_seqlens is None:
        return attend(inputs, DENSE, *options)
    batch, seqlen = shape = inputs[0].shape[:2]
    # Rows between the documents of two entries are one sequence. The bound changes no result, but is checked.
    longest = 2 * seqlen if observation.DEBUG else seqlen
    rows, sequences = tuple(x.flatten(0, 1) for x in inputs), Sequences(*cu_seqlens, longest, longest)
    result = attend(rows, sequences, *options[:-1], replaced(more, mask=None))
    return dense_results(result, shape, returns_lse)


def attend_rows_in_use(
    seqused_q: Tensor | None, inputs: tuple[Tensor, ...], sequences: Sequences, *options: Any
) -> TensorOrTuple:
    """`attend` of packed q, k and v where only the first seqused_q (batch,) rows of each sequence of q are in use, or
    all of them (None). The other rows have out 0 and LSE +inf."""
    if seqused_q is None:
        return attend(inputs, sequences, *options)
    *score, sinks, more = options
    q, k, v = inputs = arguments.attention_inputs(normalize.NAMES[2], inputs)
    normalize.check_score_tensors(more, q)
    arguments.check_sequences(sequences)
    arguments.check_rank("q", q, "total, heads, head_dim")
    assert sequences.cu_seqlens_q is not None
    rows, out, qv = RowsInUse(sequences.cu_seqlens_q, seqused_q, q), more.out, more.qv
    if qv is not None:
        arguments.check_tensors((more.qv_name,), (qv,))
        arguments.check_rank(more.qv_name, qv, "total, heads, head_dim")
    if out is not None:
        outputs.reject_gradients(out, q, k, v, sinks, qv)
        read = {"q": q, "k": k, "v": v, "qv": qv, "seqused_q": seqused_q, "sinks": sinks, **sequences._asdict()}
        outputs.check_result(out, q, v, more.quant.out_dtype, read)
    result = attend(
        (rows.gather(q), k, v),
        replaced(sequences, cu_seqlens_q=rows.cu_seqlens),
        *score,
        sinks,
        replaced(more, out=None, qv=None if qv is None else rows.gather(qv), **normalize.score_rows(rows, more, q)),
    )
    result, *others = result if isinstance(result, tuple) else (result,)
    if len(others) > 1:  # the LSE comes with S_dmask
        others = [rows.scatter(others[0], 1), *others[1:]]  # compilers make others a tuple
    result = rows.scatter(result)
    if out is not None:
        result = out.copy_(result)
    return (result, *others) if others else result


def _rare(
    sinks: Tensor | None, s_aux: Tensor | None, learnable_sink: Tensor | None, lse_convention: str, **options: Any
) -> _Rare:
    """(is_grad_enabled, sinks, Options) from arguments that a call rarely gives."""
    check_convention(lse_convention)
    name = arguments.name_of_sinks(sinks, s_aux, learnable_sink)
    return True, arguments.named_sinks(sinks, s_aux, learnable_sink), Options(sinks_name=name, **options)


def _of_packed(
    sinks: Tensor | None,
    s_aux: Tensor | None,
    learnable_sink: Tensor | None,
    lse_convention: str,
    mask: AttentionMask | Tensor | None,
    attn_bias: Tensor | None,
    rel_bias: Tensor | None,
    return_max_logit: bool,
    batch_invariant: bool,
) -> _Rare | tuple[()]:
    """`_rare` of the packed functions, () where nothing of it is given. The others test in place, which is faster."""
    if (
        sinks is s_aux is learnable_sink is mask is attn_bias is rel_bias is None
        and return_max_logit is batch_invariant is False
        and lse_convention == "fa2"
    ):
        return ()
    return _rare(
        sinks,
        s_aux,
        learnable_sink,
        lse_convention,
        mask=mask,
        attn_bias=attn_bias,
        rel_bias=rel_bias,
        return_max_logit=return_max_logit,
        batch_invariant=batch_invariant,
    )


def _in_convention(result: TensorOrTuple, lse_convention: str, return_attn_probs: bool) -> TensorOrTuple:
    """The result with its LSE, the second one of several, in the convention that the caller wants."""
    if not return_attn_probs:
        return result
    out, lse, *others = result
    return (out, converted(lse, lse_convention), *others)


@documented(
    out="(batch, seqlen_q, nheads, head_dim_v)",
    lse="(batch, nheads, seqlen_q)",
    rows="(batch, 1 or seqlen_k, nheads_k)",
    of_scores="that broadcasts to (batch, nheads, seqlen_q, seqlen_k)",
)
def flash_attn_func(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    dropout_p: float = 0.0,
    softmax_scale: float | None = None,
    causal: bool = False,
    window_size: WindowSize = (-1, -1),
    softcap: float = 0.0,
    alibi_slopes: Tensor | None = None,
    deterministic: bool = False,
    return_attn_probs: bool = False,
    *,
    sinks: Tensor | None = None,
    mask: AttentionMask | Tensor | None = None,
    attn_bias: Tensor | None = None,
    rel_bias: Tensor | None = None,
    return_max_logit: bool = False,
    batch_invariant: bool = False,
    s_aux: Tensor | None = None,
    learnable_sink: Tensor | None = None,
    lse_convention: str = "fa2",
    q_descale: Descale = None,
    k_descale: Descale = None,
    v_descale: Descale = None,
    v_descale_axis: str | None = None,
    out_dtype: torch.dtype | None = None,
    exp: str = "exact",
) -> TensorOrTuple:
    """Exact attention over a batch of sequences of one length: softmax(softmax_scale * Q K^T + bias + mask) V.

    Arguments:
        q: (batch, seqlen_q, nheads, head_dim), float16 or bfloat16, on the CPU also float32 and float64.
        k: (batch, seqlen_k, nheads_k, head_dim) of q's dtype. Query head i reads K/V head i // (nheads / nheads_k).
        v: (batch, seqlen_k, nheads_k, head_dim_v) of q's dtype. Head dims up to 512, any strides.
        <options>

    Keyword arguments:
        <keywords>
        <descales>

    <result>
    """
    quant = NO_QUANT
    if not (
        q_descale is k_descale is v_descale is None and v_descale_axis is None and out_dtype is None and exp == "exact"
    ):
        quant = QuantArgs(q_descale, k_descale, v_descale, v_descale_axis, out_dtype, exp)
    more: _Rare | tuple[()] = ()
    if not (
        sinks is s_aux is learnable_sink is mask is attn_bias is rel_bias is None
        and return_max_logit is batch_invariant is False
        and lse_convention == "fa2"
        and quant is NO_QUANT
    ):
        more = _rare(
            sinks,
            s_aux,
            learnable_sink,
            lse_convention,
            mask=mask,
            attn_bias=attn_bias,
            rel_bias=rel_bias,
            return_max_logit=return_max_logit,
            batch_invariant=batch_invariant,
            quant=quant,
        )
    score = (dropout_p, softmax_scale, causal, window_size, softcap, alibi_slopes, deterministic, return_attn_probs)
    if mask is not None:
        result = _attend_masked((q, k, v), *score, *more)
    elif _is_compiling():
        result = _attention(None, (q, k, v), DENSE, *score, *more)
    else:
        result = NotImplemented if more or observation.DEBUG else eager.attention(q, k, v, *score, is_batch_invariant())
        if result is NotImplemented:
            result = FlashAttnFunc.apply(q, k, v, *score, *more)
    return result if lse_convention == "fa2" else _in_convention(result, lse_convention, return_attn_probs)


@documented(
    out="(batch, seqlen, nheads, head_dim)",
    lse="(batch, nheads, seqlen)",
    of_scores="that broadcasts to (batch, nheads, seqlen, seqlen)",
)
def flash_attn_qkvpacked_func(
    qkv: Tensor,
    dropout_p: float = 0.0,
    softmax_scale: float | None = None,
    causal: bool = False,
    window_size: WindowSize = (-1, -1),
    softcap: float = 0.0,
    alibi_slopes: Tensor | None = None,
    deterministic: bool = False,
    return_attn_probs: bool = False,
    *,
    sinks: Tensor | None = None,
    mask: AttentionMask | Tensor | None = None,
    attn_bias: Tensor | None = None,
    rel_bias: Tensor | None = None,
    return_max_logit: bool = False,
    batch_invariant: bool = False,
    s_aux: Tensor | None = None,
    learnable_sink: Tensor | None = None,
    lse_convention: str = "fa2",
) -> TensorOrTuple:
    """Exact attention with q, k and v in one tensor: softmax(softmax_scale * Q K^T + bias + mask) V.

    The gradient of qkv is written in place, without concatenation.

    Arguments:
        qkv: (batch, seqlen, 3, nheads, head_dim), float16 or bfloat16, on the CPU also float32 and float64.
        <options>

    Keyword arguments:
        <keywords>

    <result>
    """
    more = _of_packed(
        sinks, s_aux, learnable_sink, lse_convention, mask, attn_bias, rel_bias, return_max_logit, batch_invariant
    )
    score = (dropout_p, softmax_scale, causal, window_size, softcap, alibi_slopes, deterministic, return_attn_probs)
    if mask is not None:
        result = _attend_masked((qkv,), *score, *more)
    elif _is_compiling():
        result = _attention(None, (qkv,), DENSE, *score, *more)
    else:
        result = FlashAttnQKVPackedFunc.apply(qkv, *score, *more)
    return result if lse_convention == "fa2" else _in_convention(result, lse_convention, return_attn_probs)


@documented(
    out="(batch, seqlen_q, nheads, head_dim)",
    lse="(batch, nheads, seqlen_q)",
    of_scores="that broadcasts to (batch, nheads, seqlen_q, seqlen_k)",
)
def flash_attn_kvpacked_func(
    q: Tensor,
    kv: Tensor,
    dropout_p: float = 0.0,
    softmax_scale: float | None = None,
    causal: bool = False,
    window_size: WindowSize = (-1, -1),
    softcap: float = 0.0,
    alibi_slopes: Tensor | None = None,
    deterministic: bool = False,
    return_attn_probs: bool = False,
    *,
    sinks: Tensor | None = None,
    mask: AttentionMask | Tensor | None = None,
    attn_bias: Tensor | None = None,
    rel_bias: Tensor | None = None,
    return_max_logit: bool = False,
    batch_invariant: bool = False,
    s_aux: Tensor | None = None,
    learnable_sink: Tensor | None = None,
    lse_convention: str = "fa2",
) -> TensorOrTuple:
    """Exact attention with k and v in one tensor: softmax(softmax_scale * Q K^T + bias + mask) V.

    The gradient of kv is written in place, without concatenation.

    Arguments:
        q: (batch, seqlen_q, nheads, head_dim), float16 or bfloat16, on the CPU also float32 and float64.
        kv: (batch, seqlen_k, 2, nheads_k, head_dim) of q's dtype, nheads a multiple of nheads_k.
        <options>

    Keyword arguments:
        <keywords>

    <result>
    """
    more = _of_packed(
        sinks, s_aux, learnable_sink, lse_convention, mask, attn_bias, rel_bias, return_max_logit, batch_invariant
    )
    score = (dropout_p, softmax_scale, causal, window_size, softcap, alibi_slopes, deterministic, return_attn_probs)
    if mask is not None:
        result = _attend_masked((q, kv), *score, *more)
    elif _is_compiling():
        result = _attention(None, (q, kv), DENSE, *score, *more)
    else:
        result = FlashAttnKVPackedFunc.apply(q, kv, *score, *more)
    return result if lse_convention == "fa2" else _in_convention(result, lse_convention, return_attn_probs)


@documented(
    out="(total_q, nheads, head_dim_v)",
    lse="(nheads, total_q)",
    rows="(total_k, 1, nheads_k), with pages (num_pages, 1 or page_size, nheads_k)",
    of_scores="(1 or nheads, total_q, max_seqlen_k)",
)
def flash_attn_varlen_func(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    cu_seqlens_q: Tensor,
    cu_seqlens_k: Tensor,
    max_seqlen_q: int | Tensor,
    max_seqlen_k: int | Tensor,
    dropout_p: float = 0.0,
    softmax_scale: float | None = None,
    causal: bool = False,
    window_size: WindowSize = (-1, -1),
    softcap: float = 0.0,
    alibi_slopes: Tensor | None = None,
    deterministic: bool = False,
    return_attn_probs: bool = False,
    block_table: Tensor | None = None,
    *,
    seqused_q: Tensor | None = None,
    seqused_k: Tensor | None = None,
    leftpad_k: Tensor | None = None,
    sinks: Tensor | None = None,
    mask: AttentionMask | Tensor | None = None,
    attn_bias: Tensor | None = None,
    rel_bias: Tensor | None = None,
    return_max_logit: bool = False,
    batch_invariant: bool = False,
    s_aux: Tensor | None = None,
    learnable_sink: Tensor | None = None,
    lse_convention: str = "fa2",
    q_descale: Descale = None,
    k_descale: Descale = None,
    v_descale: Descale = None,
    v_descale_axis: str | None = None,
    out_dtype: torch.dtype | None = None,
    exp: str = "exact",
    qv: Tensor | None = None,
    q_v: Tensor | None = None,
) -> TensorOrTuple:
    """Exact attention over sequences of different lengths, concatenated without padding.

    Rows of q that belong to no sequence (beyond cu_seqlens_q[-1]) have output 0 and LSE +inf. The call does not wait
    for the GPU: cu_seqlens are replaced by their running maximum, clamped to the number of rows.

    Arguments:
        q: (total_q, nheads, head_dim), float16 or bfloat16, on the CPU also float32 and float64.
        k: (total_k, nheads_k, head_dim) of q's dtype, or (num_pages, page_size, nheads_k, head_dim) with block_table.
        v: like k, its last axis head_dim_v. Head dims up to 512; nheads a multiple of nheads_k; any strides.
        cu_seqlens_q: int32 or int64 (batch + 1,). Sequence i has the rows cu_seqlens_q[i] to cu_seqlens_q[i + 1] of q.
        cu_seqlens_k: int32 or int64 (batch + 1,), the same for k and v (lengths of keys, when paged).
        max_seqlen_q, max_seqlen_k: int, or integer tensor of one element: upper bounds of the lengths, which size
            S_dmask. One that is too small changes no result, but the time over 8-bit pages.
        block_table: int32 (batch, max_pages). The pages of each sequence in k and v. Forward only.
        <options>

    Keyword arguments:
        <keywords>
        seqused_q: int32 or int64 (batch,). How many of the first rows of each sequence of q are in use; the others
            belong to no sequence. Costs a sort of the rows and copies of q and out.
        seqused_k: int32 (batch,). Number of keys of each sequence, of which cu_seqlens_k then gives the first row
            alone. Forward only.
        leftpad_k: int32 (batch,). Keys skipped at the start of each sequence, which count in its length. Forward only.
        <descales>
        qv, q_v: (total_q, nheads, head_dim_v) of q's dtype, by either name. Scores are then Q K^T + QV V^T, the default
            softmax_scale 1 / sqrt(head_dim + head_dim_v), head dims of v up to 512, and that of q may be 0: multi-head
            latent attention in its absorbed form. Forward only, without dropout and 8 bits. On CUDA the head dims are
            64 and 512, there is one K/V head and a block_table, and no window, softcap and alibi_slopes.

    <result>
    """
    quant = NO_QUANT
    if not (
        q_descale is k_descale is v_descale is None and v_descale_axis is None and out_dtype is None and exp == "exact"
    ):
        quant = QuantArgs(q_descale, k_descale, v_descale, v_descale_axis, out_dtype, exp)
    more: _Rare | tuple[()] = ()
    if not (
        sinks is s_aux is learnable_sink is mask is attn_bias is rel_bias is None
        and return_max_logit is batch_invariant is False
        and lse_convention == "fa2"
        and quant is NO_QUANT
        and seqused_k is leftpad_k is qv is q_v is None
    ):
        more = _rare(
            sinks,
            s_aux,
            learnable_sink,
            lse_convention,
            mask=mask,
            attn_bias=attn_bias,
            rel_bias=rel_bias,
            return_max_logit=return_max_logit,
            batch_invariant=batch_invariant,
            quant=quant,
            seqused_k=seqused_k,
            leftpad_k=leftpad_k,
            qv=qv if q_v is None else arguments.one_of_names(("qv", "q_v"), (qv, q_v)),
            qv_name="q_v" if qv is None else "qv",
        )
    score = (dropout_p, softmax_scale, causal, window_size, softcap, alibi_slopes, deterministic, return_attn_probs)
    if seqused_q is not None or _is_compiling():
        sequences = Sequences(cu_seqlens_q, cu_seqlens_k, max_seqlen_q, max_seqlen_k, seqused_k, leftpad_k, block_table)
        result = attend_rows_in_use(seqused_q, (q, k, v), sequences, *score, *(more or (True, None, PLAIN)))
    else:
        result = FlashAttnVarlenFunc.apply(
            q, k, v, cu_seqlens_q, cu_seqlens_k, max_seqlen_q, max_seqlen_k, *score, block_table, *more
        )
    return result if lse_convention == "fa2" else _in_convention(result, lse_convention, return_attn_probs)


@documented(out="(total, nheads, head_dim)", lse="(nheads, total)", of_scores="(1 or nheads, total, max_seqlen)")
def flash_attn_varlen_qkvpacked_func(
    qkv: Tensor,
    cu_seqlens: Tensor,
    max_seqlen: int | Tensor,
    dropout_p: float = 0.0,
    softmax_scale: float | None = None,
    causal: bool = False,
    window_size: WindowSize = (-1, -1),
    softcap: float = 0.0,
    alibi_slopes: Tensor | None = None,
    deterministic: bool = False,
    return_attn_probs: bool = False,
    *,
    sinks: Tensor | None = None,
    mask: AttentionMask | Tensor | None = None,
    attn_bias: Tensor | None = None,
    rel_bias: Tensor | None = None,
    return_max_logit: bool = False,
    batch_invariant: bool = False,
    s_aux: Tensor | None = None,
    learnable_sink: Tensor | None = None,
    lse_convention: str = "fa2",
) -> TensorOrTuple:
    """Exact attention over concatenated sequences of different lengths, with q, k and v in one tensor.

    The gradient of qkv is written in place, without concatenation. Rows beyond the last sequence have output 0 and
    LSE +inf.

    Arguments:
        qkv: (total, 3, nheads, head_dim), float16 or bfloat16, on the CPU also float32 and float64.
        cu_seqlens: int32 or int64 (batch + 1,). Sequence i has the rows cu_seqlens[i] to cu_seqlens[i + 1].
        max_seqlen: int, or integer tensor of one element: an upper bound of the lengths.
        <options>

    Keyword arguments:
        <keywords>

    <result>
    """
    more = _of_packed(
        sinks, s_aux, learnable_sink, lse_convention, mask, attn_bias, rel_bias, return_max_logit, batch_invariant
    )
    score = (dropout_p, softmax_scale, causal, window_size, softcap, alibi_slopes, deterministic, return_attn_probs)
    if _is_compiling():
        sequences = Sequences(cu_seqlens, cu_seqlens, max_seqlen, max_seqlen)
        result = _attention(None, (qkv,), sequences, *score, *more)
    else:
        result = FlashAttnVarlenQKVPackedFunc.apply(qkv, cu_seqlens, max_seqlen, *score, *more)
    return result if lse_convention == "fa2" else _in_convention(result, lse_convention, return_attn_probs)


@documented(
    out="(total_q, nheads, head_dim)",
    lse="(nheads, total_q)",
    of_scores="(1 or nheads, total_q, max_seqlen_k)",
)
def flash_attn_varlen_kvpacked_func(
    q: Tensor,
    kv: Tensor,
    cu_seqlens_q: Tensor,
    cu_seqlens_k: Tensor,
    max_seqlen_q: int | Tensor,
    max_seqlen_k: int | Tensor,
    dropout_p: float = 0.0,
    softmax_scale: float | None = None,
    causal: bool = False,
    window_size: WindowSize = (-1, -1),
    softcap: float = 0.0,
    alibi_slopes: Tensor | None = None,
    deterministic: bool = False,
    return_attn_probs: bool = False,
    *,
    sinks: Tensor | None = None,
    mask: AttentionMask | Tensor | None = None,
    attn_bias: Tensor | None = None,
    rel_bias: Tensor | None = None,
    return_max_logit: bool = False,
    batch_invariant: bool = False,
    s_aux: Tensor | None = None,
    learnable_sink: Tensor | None = None,
    lse_convention: str = "fa2",
) -> TensorOrTuple:
    """Exact attention over concatenated sequences of different lengths, with k and v in one tensor.

    The gradient of kv is written in place, without concatenation. Rows beyond the last sequence have output 0 and
    LSE +inf.

    Arguments:
        q: (total_q, nheads, head_dim), float16 or bfloat16, on the CPU also float32 and float64.
        kv: (total_k, 2, nheads_k, head_dim) of q's dtype, nheads a multiple of nheads_k.
        cu_seqlens_q, cu_seqlens_k: int32 or int64 (batch + 1,). Sequence i has the rows cu_seqlens_q[i] to
            cu_seqlens_q[i + 1] of q, and the same of kv.
        max_seqlen_q, max_seqlen_k: int, or integer tensor of one element: upper bounds of the lengths.
        <options>

    Keyword arguments:
        <keywords>

    <result>
    """
    more = _of_packed(
        sinks, s_aux, learnable_sink, lse_convention, mask, attn_bias, rel_bias, return_max_logit, batch_invariant
    )
    score = (dropout_p, softmax_scale, causal, window_size, softcap, alibi_slopes, deterministic, return_attn_probs)
    if _is_compiling():
        sequences = Sequences(cu_seqlens_q, cu_seqlens_k, max_seqlen_q, max_seqlen_k)
        result = _attention(None, (q, kv), sequences, *score, *more)
    else:
        result = FlashAttnVarlenKVPackedFunc.apply(
            q, kv, cu_seqlens_q, cu_seqlens_k, max_seqlen_q, max_seqlen_k, *score, *more
        )
    return result if lse_convention == "fa2" else _in_convention(result, lse_convention, return_attn_probs)
