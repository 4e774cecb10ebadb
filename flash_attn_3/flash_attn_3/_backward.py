"""FlashAttention-3's one backward over all forms of q, k and v: into given gradients, and as new ones."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, Optional, TypeVar

import torch

from flash_attn.batch_invariance import is_batch_invariant
from flash_attn.ops import arguments, calls, context, outputs
from flash_attn.ops.attention_args import AttentionBackwardArgs
from flash_attn.ops.rows import RowsInUse, pack
from flash_attn_3 import _checks

_MaybeTensor = TypeVar("_MaybeTensor", torch.Tensor, Optional[torch.Tensor])


def backward(
    dout: torch.Tensor,
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    out: torch.Tensor,
    softmax_lse: torch.Tensor,
    dq: torch.Tensor | None = None,
    dk: torch.Tensor | None = None,
    dv: torch.Tensor | None = None,
    cu_seqlens_q: torch.Tensor | None = None,
    cu_seqlens_k: torch.Tensor | None = None,
    seqused_q: torch.Tensor | None = None,
    seqused_k: torch.Tensor | None = None,
    max_seqlen_q: int | None = None,
    max_seqlen_k: int | None = None,
    softmax_scale: float | None = None,
    causal: bool = False,
    window_size_left: int = -1,
    window_size_right: int = -1,
    softcap: float = 0.0,
    deterministic: bool = False,
    sm_margin: int = 0,
) -> torch.Tensor:
    """softmax_d of `torch.ops.flash_attn_3.bwd`, which writes dq, dk and dv; None: computed and dropped."""
    context.reject_forward_mode("flash_attn_3.bwd")
    _checks.unused(max_seqlen_q=max_seqlen_q, max_seqlen_k=max_seqlen_k)
    arguments.check_tensors(("dout", "q", "k", "v", "out", "softmax_lse"), (dout, q, k, v, out, softmax_lse))
    arguments.check_optional_tensors(("dq", "dk", "dv"), (dq, dk, dv))
    score = (softmax_scale, causal, window_size_left, window_size_right, softcap)
    options = (*score, deterministic, sm_margin)
    args = _arguments(dout, None, q, k, v, out, softmax_lse, cu_seqlens_q, cu_seqlens_k, *options)
    if _is_one_form(args, seqused_q, seqused_k):
        return calls.backward_into(args, dq, dk, dv)
    _check(args, seqused_q, seqused_k, dq, dk, dv)
    args, restore = _packed(args, seqused_q, seqused_k)
    inputs = (args.q, *_key_and_value(args))
    grads = [torch.empty_like(x, memory_format=torch.contiguous_format) for x in inputs]
    softmax_d = calls.backward_into(args, *grads)
    for target, grad in zip((dq, dk, dv), restore(grads)):
        if target is not None:
            target.copy_(grad)
    return softmax_d


def gradients(
    dout: torch.Tensor,
    dlse: torch.Tensor | None,
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    out: torch.Tensor,
    softmax_lse: torch.Tensor,
    cu_seqlens_q: torch.Tensor | None,
    cu_seqlens_k: torch.Tensor | None,
    seqused_q: torch.Tensor | None,
    seqused_k: torch.Tensor | None,
    *options: Any,
) -> Sequence[torch.Tensor]:
    """(dq, dk, dv) from the gradients of out and LSE, by operators alone: traceable.

    options: those of `_arguments` from softmax_scale on.
    """
    no_dropout = torch.empty(2, dtype=torch.int64, device=q.device)
    args = _arguments(dout, dlse, q, k, v, out, softmax_lse, cu_seqlens_q, cu_seqlens_k, *options)
    args = args._replace(rng_state=no_dropout)
    if _is_one_form(args, seqused_q, seqused_k):
        grads: Sequence[torch.Tensor] = torch.ops.flash_attn_core.bwd(*args)
        return grads
    args, restore = _packed(args, seqused_q, seqused_k)
    return restore(torch.ops.flash_attn_core.bwd(*args))


def _arguments(
    dout: torch.Tensor,
    dlse: torch.Tensor | None,
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    out: torch.Tensor,
    lse: torch.Tensor,
    cu_seqlens_q: torch.Tensor | None,
    cu_seqlens_k: torch.Tensor | None,
    softmax_scale: float | None,
    causal: bool,
    window_left: int,
    window_right: int,
    softcap: float,
    deterministic: bool,
    sm_margin: int,
) -> AttentionBackwardArgs:
    # mypy sees no defaults in this record, whose rng_state only dropout needs
    return AttentionBackwardArgs(  # type: ignore[call-arg]
        dout=dout,
        dlse=dlse,
        q=q,
        k=k,
        v=v,
        out=out,
        lse=lse,
        rng_state=None,  # type: ignore[arg-type]
        cu_seqlens_q=cu_seqlens_q,
        cu_seqlens_k=cu_seqlens_k,
        alibi_slopes=None,
        sinks=None,
        max_seqlen_q=q.shape[0],
        max_seqlen_k=k.shape[0],
        dropout_p=0.0,
        softmax_scale=q.shape[-1] ** -0.5 if softmax_scale is None else softmax_scale,
        causal=causal,
        window_left=window_left,
        window_right=window_right,
        softcap=softcap,
        deterministic=deterministic,
        batch_invariant=is_batch_invariant(),
        sm_margin=arguments.sm_margin(sm_margin),
    )


def _key_and_value(args: AttentionBackwardArgs) -> tuple[torch.Tensor, torch.Tensor]:
    assert args.k is not None and args.v is not None  # nothing is packed in one tensor here
    return args.k, args.v


def _is_one_form(args: AttentionBackwardArgs, seqused_q: torch.Tensor | None, seqused_k: torch.Tensor | None) -> bool:
    """Whether both sides are batches, or both are packed with all rows in use: nothing has to be rearranged."""
    return (args.cu_seqlens_q is None) == (args.cu_seqlens_k is None) and seqused_q is None and seqused_k is None


def _check(
    args: AttentionBackwardArgs,
    seqused_q: torch.Tensor | None,
    seqused_k: torch.Tensor | None,
    dq: torch.Tensor | None,
    dk: torch.Tensor | None,
    dv: torch.Tensor | None,
) -> None:
    """Check arguments that the backend does not see, or sees as copies."""
    q, (k, v) = args.q, _key_and_value(args)
    out_shape = (*q.shape[:-1], *v.shape[-1:])
    arguments.check_optional_tensors(("seqused_q", "seqused_k"), (seqused_q, seqused_k))
    _checks.packed(q, k, v, args.cu_seqlens_q, args.cu_seqlens_k)
    rows = (q.shape[0], q.shape[2], q.shape[1]) if args.cu_seqlens_q is None else (q.shape[1], q.shape[0])
    of_q = {"dout": (args.dout, out_shape), "out": (args.out, out_shape)}
    for name, (x, shape) in {**of_q, "softmax_lse": (args.lse, rows)}.items():
        _checks.on_device_of_q(name, x, q)
        if x.shape != shape:
            raise RuntimeError(f"{name}: expected shape {list(shape)}, got {list(x.shape)}")
    wanted = {"dq": (dq, q), "dk": (dk, k), "dv": (dv, v)}
    for name, (given, like) in wanted.items():
        if given is not None:
            outputs.check(name, given, like.shape, q, q.dtype)
    read = {**args._asdict(), "lse": None, "softmax_lse": args.lse, "seqused_q": seqused_q, "seqused_k": seqused_k}
    outputs.check_apart({name: given for name, (given, _) in wanted.items()}, read)


def _packed(
    args: AttentionBackwardArgs, seqused_q: torch.Tensor | None, seqused_k: torch.Tensor | None
) -> tuple[AttentionBackwardArgs, Callable[[Sequence[torch.Tensor]], list[torch.Tensor]]]:
    """(args, restore) with both sides packed, rows in use first; restore: the gradients in the shapes of q, k and v."""
    given_k, given_v = _key_and_value(args)
    (q, cu_q), (k, cu_k) = pack(args.q, args.cu_seqlens_q), pack(given_k, args.cu_seqlens_k)
    rows_q, rows_k = RowsInUse(cu_q, seqused_q, q), RowsInUse(cu_k, seqused_k, k, "k")

    def queries(x: torch.Tensor) -> torch.Tensor:
        return rows_q.gather(pack(x, args.cu_seqlens_q)[0])

    def keys(x: torch.Tensor) -> torch.Tensor:
        return rows_k.gather(pack(x, args.cu_seqlens_k)[0])

    def per_row(x: _MaybeTensor) -> _MaybeTensor:
        if x is None:
            return None
        return rows_q.gather(x if args.cu_seqlens_q is not None else x.transpose(0, 1).flatten(1), 1)

    def restore(grads: Sequence[torch.Tensor]) -> list[torch.Tensor]:
        inputs = ((args.q, rows_q), (given_k, rows_k), (given_v, rows_k))
        return [rows.scatter(grad).view(x.shape) for grad, (x, rows) in zip(grads, inputs)]

    packed = args._replace(
        dout=queries(args.dout),
        dlse=per_row(args.dlse),
        q=rows_q.gather(q),
        k=rows_k.gather(k),
        v=keys(given_v),
        out=queries(args.out),
        lse=per_row(args.lse),
        cu_seqlens_q=rows_q.cu_seqlens,
        cu_seqlens_k=rows_k.cu_seqlens,
        max_seqlen_q=q.shape[0],
        max_seqlen_k=k.shape[0],
    )
    return packed, restore
