"""What the adapters for servers have in common: one forward over packed queries and pages, into a given output."""

from __future__ import annotations

import functools
import logging
from collections.abc import Callable
from typing import Any, TypeVar, cast

import torch
from torch import Tensor

from flash_attn import observation
from flash_attn._types import WindowSize
from flash_attn.batch_invariance import is_batch_invariant
from flash_attn.eight_bit import EIGHT_BIT, OF_QUERIES, named, one_of
from flash_attn.integrations.token_layout import as_pages
from flash_attn.limits import MAX_EIGHT_BIT_HEAD_DIM
from flash_attn.ops import arguments, calls, context, eager, latent
from flash_attn.ops.rows import RowsInUse, equal_steps

_Result = TypeVar("_Result")
_is_compiling = torch.compiler.is_compiling


def reject(**given: object) -> None:
    """Raise NotImplementedError for the first given argument, by name: it is not supported. None is not given."""
    for name, value in given.items():
        if value is not None:
            raise NotImplementedError(f"{name}: expected None, got {type(value).__name__}: it is not supported")


def reject_8_bit(**tensors: Tensor) -> None:
    for name, tensor in tensors.items():
        _require(tensor.element_size() > 1, name, "float16 or bfloat16", named(tensor.dtype))


def check_8_bit(names: tuple[str, str, str], q: Tensor, k: Tensor, v: Tensor) -> bool:
    """Whether a tensor has 8 bits. names: those of q, k and v for the caller.

    Raises NotImplementedError, by name, where no kernel reads these 8 bits: k and v have one dtype, float8_e4m3fn or
    int8, q a wider one or, as k, float8_e4m3fn. Over pages all have one head dim, a multiple of 8 up to 256: any other
    needs a copy of the cache.
    """
    if q.element_size() > 1 and k.element_size() > 1 and v.element_size() > 1:
        return False
    q_name, k_name, v_name = names
    if q.element_size() == 1:
        wide = torch.float16, torch.bfloat16
        _require(q.dtype in OF_QUERIES, q_name, one_of(*wide, *OF_QUERIES), named(q.dtype))
        _require(k.dtype is q.dtype, k_name, f"the dtype of q ({named(q.dtype)})", named(k.dtype))
    _require(k.dtype in EIGHT_BIT, k_name, one_of(*EIGHT_BIT), named(k.dtype))
    _require(v.dtype is k.dtype, v_name, f"the dtype of {k_name} ({named(k.dtype)})", named(v.dtype))
    if k.dim() == 4:
        _require(v.shape[-1] == q.shape[-1], v_name, f"the head dim of q ({q.shape[-1]}) in 8 bits", v.shape[-1])
        fits = q.shape[-1] % 8 == 0 and q.shape[-1] <= MAX_EIGHT_BIT_HEAD_DIM
        _require(fits, q_name, "a head dim that is a multiple of 8 up to 256 over 8 bits", q.shape[-1])
    return True


def _require(condition: bool, name: str, expected: str, got: object) -> None:
    if not condition:
        raise NotImplementedError(f"{name}: expected {expected}, got {got}: it is not supported")


@functools.lru_cache
def warn_once(logger: logging.Logger, message: str) -> None:
    logger.warning(message)


def falling_back(
    ours: Callable[..., _Result], theirs: Callable[..., _Result], logger: logging.Logger
) -> Callable[..., _Result]:
    """A function that calls ours, or theirs where ours rejects the call (before computing); logs each reason once."""

    @functools.wraps(ours)
    def function(*args: object, **kwargs: object) -> _Result:
        try:
            return ours(*args, **kwargs)
        except NotImplementedError as error:
            warn_once(logger, f"{ours.__name__}: calls go to the server's own function ({error})")
        return theirs(*args, **kwargs)

    return function


def packed_attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    cu_seqlens_q: Tensor,
    cu_seqlens_k: Tensor | None = None,
    seqused_q: Tensor | None = None,
    seqused_k: Tensor | None = None,
    leftpad_k: Tensor | None = None,
    block_table: Tensor | None = None,
    max_seqlen_q: int | None = None,
    max_seqlen_k: int | None = None,
    dropout_p: float = 0.0,
    softmax_scale: float | None = None,
    causal: bool = False,
    window_size: WindowSize | None = None,
    softcap: float = 0.0,
    alibi_slopes: Tensor | None = None,
    sinks: Tensor | None = None,
    out: Tensor | None = None,
    batch_invariant: bool = False,
    sm_margin: int = 0,
    q_descale: Tensor | None = None,
    k_descale: Tensor | None = None,
    v_descale: Tensor | None = None,
    names: tuple[str, str, str] = ("q", "k", "v"),
    qv: Tensor | None = None,
    qv_name: str = "qv",
) -> tuple[Tensor, Tensor]:
    """(out (total_q, nheads, head_dim_v), lse (nheads, total_q)) of packed queries.

    Forward only. k and v: packed with cu_seqlens_k, pages with block_table, or a batch (batch, seqlen_k, nheads_k,
    head_dim); of the last two seqused_k says how many keys there are, all of them where it is None. out: written and
    returned. max_seqlen_q and max_seqlen_k need not be right. sm_margin: multiprocessors left to other kernels.
    Descales: (batch, nheads_k) of 8-bit tensors; those of 16-bit tensors, which servers pass too, have no effect.
    names: those of q, k and v in errors. qv: (total_q, nheads, head_dim_v), qv_name in errors; NotImplementedError
    if no kernel reads it.
    """
    window = (-1, -1) if window_size is None else arguments.window(window_size)
    softcap, causal = arguments.number("softcap", softcap), arguments.flag("causal", causal)
    batch_invariant = batch_invariant or is_batch_invariant()
    try:
        if (
            seqused_q is leftpad_k is alibi_slopes is None
            and type(dropout_p) is float
            and dropout_p == 0.0
            and not (_is_compiling() or observation.DEBUG)
        ):
            result = eager.packed_attention(
                q, k, v, cu_seqlens_q, cu_seqlens_k, seqused_k, block_table, sinks, qv, out, softmax_scale, causal,
                window, softcap, batch_invariant, sm_margin,
            )  # fmt: skip
            if result is not NotImplemented:
                return cast("tuple[Tensor, Tensor]", result)
        arguments.check_tensors((*names, "cu_seqlens_q"), (q, k, v, cu_seqlens_q))
        arguments.check_optional_tensors(
            ("cu_seqlens_k", "seqused_q", "seqused_k", "leftpad_k", "block_table", "alibi_slopes", "out", qv_name),
            (cu_seqlens_k, seqused_q, seqused_k, leftpad_k, block_table, alibi_slopes, out, qv),
        )
        scaling = None
        if qv is not None:
            reject_8_bit(**dict(zip(names, (q, k, v))))
        if check_8_bit(names, q, k, v):
            scaling = _scaling(q, k, v, q_descale, k_descale, v_descale, out)
        if k.dim() == 4:
            arguments.check_cache(names[1], k)  # a copy of a cache is never what is meant
            arguments.check_cache(names[2], v)
            if block_table is None:
                block_table, cu_seqlens_k = as_pages(k.shape[0], k.shape[1], q.device)
        if cu_seqlens_k is None:
            if block_table is None:
                raise ValueError("cu_seqlens_k: expected a tensor where k is packed, got None")
            cu_seqlens_k = equal_steps(block_table.shape[0], block_table.shape[1] * k.shape[1], q.device)
        score_dim = q.shape[-1] if qv is None else latent.score_dim(q, qv)
        scale = arguments.scale(softmax_scale, score_dim)
        if out is not None:
            context.check_writable(("out",), (out,))
        result, lse = calls.forward_in_use(
            q,
            k,
            v,
            RowsInUse(cu_seqlens_q, seqused_q, q),
            cu_seqlens_k,
            seqused_k,
            leftpad_k,
            block_table,
            alibi_slopes,
            max_seqlen_q,
            max_seqlen_k,
            scores=(scale, causal, *window, softcap),
            dropout_p=dropout_p,
            batch_invariant=batch_invariant,
            sinks=None if sinks is None else arguments.sinks(sinks),
            scaling=scaling,
            out=out,
            sm_margin=arguments.sm_margin(sm_margin),
            qv=qv,
        )
        if out is not None:
            context.written((out,))
        return result, lse
    except (RuntimeError, TypeError) as error:  # NotImplementedError is a RuntimeError
        arguments.rename(error, {"qv": qv_name})
        raise


def _scaling(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    q_descale: Tensor | None,
    k_descale: Tensor | None,
    v_descale: Tensor | None,
    out: Tensor | None,
) -> dict[str, Any]:
    """The options of a call with 8-bit tensors, by name."""
    given = {"q_descale": (q, q_descale), "k_descale": (k, k_descale), "v_descale": (v, v_descale)}
    descales = {name: descale if x.dtype in EIGHT_BIT else None for name, (x, descale) in given.items()}
    arguments.check_optional_tensors(tuple(descales), tuple(descales.values()))
    if out is None or q.dtype not in EIGHT_BIT:
        return descales
    if out.dtype not in (torch.float16, torch.bfloat16):
        raise RuntimeError(f"out: expected dtype float16 or bfloat16, got {named(out.dtype)}")
    return {**descales, "out_dtype": out.dtype}
