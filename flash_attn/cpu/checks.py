"""Argument checks of the CPU backend: each rule once; a message names argument, expectation and value.

An argument has the name of the public functions, also where the backends' own differs (p_dropout).
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import cast

import torch

from flash_attn.limits import MAX_HEAD_DIM

DTYPES = (torch.float16, torch.bfloat16, torch.float32, torch.float64)
MAX_LENGTH = 2**30 - 1  # the kernels count in 32 bits; the same limit here, so that both accept a call or neither does
MAX_INT = 2**31 - 1
MAX_SCALE = {torch.float32: 2e38, torch.float64: 1e308}  # by the dtype of the scores, where scale log2(e) is finite
MIN_SOFTCAP, MAX_SOFTCAP = 1e-15, 1e15  # scale / softcap times a head's sum of products is finite in float32


def require(condition: bool, name: str, expected: str, got: object) -> None:
    """Raise RuntimeError "<name>: expected <expected>, got <got>" unless the condition holds."""
    if not condition:
        raise RuntimeError(f"{name}: expected {expected}, got {got}")


def _dtype_name(dtype: torch.dtype) -> str:
    return str(dtype).replace("torch.", "")


def check_strided(name: str, tensor: object) -> None:
    """A tensor whose elements lie in memory at strides. Raises TypeError for any other object."""
    if not isinstance(tensor, torch.Tensor):
        raise TypeError(f"{name}: expected a Tensor, got {type(tensor).__name__}")
    kind = "a sparse one" if str(tensor.layout).startswith("torch.sparse") else "one of another layout"
    kind = "a nested one" if tensor.is_nested else kind
    require(tensor.layout == torch.strided and not tensor.is_nested, name, "a strided tensor", kind)


def check_device(name: str, tensor: object) -> None:
    check_on_cpu(name, tensor, "a tensor on q's device (cpu)")


def check_on_cpu(name: str, tensor: object, expected: str = "a CPU tensor") -> None:
    if isinstance(tensor, torch.Tensor):
        require(tensor.device.type == "cpu", name, expected, f"one on {tensor.device}")
    check_strided(name, tensor)


def check_at_most(name: str, value: int, what: str) -> None:
    require(value <= MAX_LENGTH, name, f"at most {MAX_LENGTH} {what}", value)


def check_sizes(name: str, tensor: torch.Tensor, first: str) -> None:
    """Sequences or pages (of four dimensions), rows and heads; expanded tensors have such sizes without the memory."""
    if tensor.dim() == 4:
        check_at_most(name, tensor.shape[0], first)
    check_at_most(name, tensor.shape[-3], "rows")
    check_at_most(name, tensor.shape[-2], "heads")


def check_dtype(name: str, tensor: torch.Tensor, *dtypes: torch.dtype) -> None:
    *first, last = [_dtype_name(dtype) for dtype in dtypes]
    expected = f"{', '.join(first)} or {last}" if first else last
    require(tensor.dtype in dtypes, name, f"dtype {expected}", _dtype_name(tensor.dtype))


def check_shape(name: str, tensor: torch.Tensor, shape: Sequence[int]) -> None:
    require(list(tensor.shape) == list(shape), name, f"shape {list(shape)}", list(tensor.shape))


def check_last_stride(name: str, tensor: torch.Tensor) -> None:
    unit = tensor.shape[-1] <= 1 or tensor.stride(-1) == 1 or tensor.numel() == 0
    require(unit, name, "a contiguous last dimension (stride 1)", f"stride {tensor.stride(-1)}")


def check_query(q: torch.Tensor, axes: str, *further_dtypes: torch.dtype, least_dim: int = 1) -> None:
    check_on_cpu("q", q)
    check_dtype("q", q, *DTYPES, *further_dtypes)
    check_rank("q", q, axes)
    check_last_stride("q", q)
    require(q.shape[-1] <= MAX_HEAD_DIM, "q", f"a head dim of at most {MAX_HEAD_DIM}", q.shape[-1])
    require(q.shape[-1] >= least_dim, "q", f"a head dim of at least {least_dim}", q.shape[-1])
    check_sizes("q", q, "sequences")


def check_rank(name: str, tensor: torch.Tensor, axes: str) -> None:
    rank = axes.count(",") + 1
    require(tensor.dim() == rank, name, f"{rank} dimensions ({axes})", tensor.dim())


def check_like_query(
    name: str,
    tensor: torch.Tensor,
    q: torch.Tensor,
    shape: Sequence[int],
    any_stride: bool = False,
    dtype: torch.dtype | None = None,
) -> None:
    """A tensor of q's device, of the given shape and of q's dtype or another one."""
    check_device(name, tensor)
    if dtype in (None, q.dtype):
        same = tensor.dtype == q.dtype
        require(same, name, f"the dtype of q ({_dtype_name(q.dtype)})", _dtype_name(tensor.dtype))
    else:
        check_dtype(name, tensor, dtype)
    check_shape(name, tensor, shape)
    if not any_stride:
        check_last_stride(name, tensor)


def check_key_value(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    axes: str,
    batch: int | None = None,
    names: tuple[str, str] = ("k", "v"),
    dtypes: tuple[torch.dtype | None, torch.dtype | None] = (None, None),
) -> None:
    """k and v against q; the axes that k itself decides (sequence or pages, heads) are read from k. v follows k, but
    may have another head dim. dtypes: those of k and v where they are not q's.
    """
    k_name, v_name = names
    check_device(k_name, k)
    check_device(v_name, v)
    same = k.dtype == (dtypes[0] or q.dtype)
    require(same, k_name, f"the dtype of q ({_dtype_name(q.dtype)})", _dtype_name(k.dtype))
    check_rank(k_name, k, axes)
    leading = list(k.shape[:-1])
    if batch is not None:
        leading[0] = batch
    check_like_query(k_name, k, q, [*leading, q.shape[-1]], dtype=dtypes[0])
    check_sizes(k_name, k, "pages")
    value_dim = v.shape[-1] if v.dim() == k.dim() else q.shape[-1]
    check_like_query(v_name, v, q, [*k.shape[:-1], value_dim], dtype=dtypes[1])
    in_range = 1 <= value_dim <= MAX_HEAD_DIM
    require(in_range, v_name, f"a head dim from 1 to {MAX_HEAD_DIM}", value_dim)
    h, h_k = q.shape[-2], k.shape[-2]
    divisible = h % h_k == 0 if h_k > 0 else h == 0
    require(divisible, "q", f"a head count divisible by the K/V head count {h_k}", h)


def check_numbers(dropout_p: float, softmax_scale: float, softcap: float, scores: torch.dtype) -> None:
    """scores: the dtype that scores are computed in."""
    require(0.0 <= dropout_p < 1.0, "dropout_p", "a value in [0, 1)", dropout_p)
    require(math.isfinite(softmax_scale), "softmax_scale", "a finite value", softmax_scale)
    require(softcap >= 0.0, "softcap", "a value >= 0", softcap)
    in_range = softcap == 0.0 or MIN_SOFTCAP <= softcap <= MAX_SOFTCAP
    require(in_range, "softcap", f"0 or a value from {MIN_SOFTCAP:g} to {MAX_SOFTCAP:g}", softcap)
    most = MAX_SOFTCAP if softcap else MAX_SCALE[scores]
    expected = f"a magnitude of at most {most:g}{' with a softcap' if softcap else ''}"
    require(abs(softmax_scale) <= most, "softmax_scale", expected, softmax_scale)


def check_alibi(slopes: torch.Tensor | None, batch: int, heads: int) -> None:
    if slopes is None:
        return
    check_device("alibi_slopes", slopes)
    require(slopes.dtype == torch.float32, "alibi_slopes", "dtype float32", _dtype_name(slopes.dtype))
    fits = list(slopes.shape) in ([heads], [batch, heads])
    require(fits, "alibi_slopes", f"shape [{heads}] or [{batch}, {heads}]", list(slopes.shape))
    check_last_stride("alibi_slopes", slopes)


def check_sinks(sinks: torch.Tensor | None, q: torch.Tensor) -> None:
    if sinks is None:
        return
    check_device("sinks", sinks)
    dtypes = (torch.float32, torch.float64) if q.dtype == torch.float64 else (torch.float32,)
    names = " or ".join(_dtype_name(dtype) for dtype in dtypes)
    require(sinks.dtype in dtypes, "sinks", f"dtype {names}", _dtype_name(sinks.dtype))
    check_shape("sinks", sinks, [q.shape[-2]])
    check_last_stride("sinks", sinks)


def check_origins(origins: torch.Tensor | None, batch: int) -> None:
    if origins is None:
        return
    check_on_cpu("origins", origins)
    check_dtype("origins", origins, torch.int64)
    check_shape("origins", origins, [batch, 4])
    require(origins.is_contiguous(), "origins", "a contiguous tensor", f"strides {list(origins.stride())}")


def check_lengths(name: str, lengths: torch.Tensor | None, shape: Sequence[int]) -> None:
    """An optional contiguous int32 vector: cu_seqlens, seqused_k, leftpad_k, cache lengths."""
    if lengths is None:
        return
    check_device(name, lengths)
    require(lengths.dtype == torch.int32, name, "dtype int32", _dtype_name(lengths.dtype))
    check_shape(name, lengths, shape)
    require(lengths.is_contiguous(), name, "a contiguous tensor", f"strides {list(lengths.stride())}")


def check_cu_seqlens(cu_seqlens_q: torch.Tensor, cu_seqlens_k: torch.Tensor) -> int:
    """Check both cumulative length vectors and return the number of sequences."""
    check_device("cu_seqlens_q", cu_seqlens_q)
    check_device("cu_seqlens_k", cu_seqlens_k)
    one_dimensional = cu_seqlens_q.dim() == 1 and cu_seqlens_q.numel() >= 1
    require(one_dimensional, "cu_seqlens_q", "shape [b + 1]", list(cu_seqlens_q.shape))
    shape = [cu_seqlens_q.numel()]
    check_at_most("cu_seqlens_q", shape[0] - 1, "sequences")
    check_lengths("cu_seqlens_q", cu_seqlens_q, shape)
    check_lengths("cu_seqlens_k", cu_seqlens_k, shape)
    return shape[0] - 1


def check_block_table(block_table: torch.Tensor | None, batch: int) -> None:
    if block_table is None:
        return
    check_device("block_table", block_table)
    require(block_table.dtype == torch.int32, "block_table", "dtype int32", _dtype_name(block_table.dtype))
    fits = block_table.dim() == 2 and block_table.shape[0] == batch
    require(fits, "block_table", f"shape [{batch}, max_blocks]", list(block_table.shape))
    check_last_stride("block_table", block_table)
    check_at_most("block_table", block_table.shape[1], "columns")


def check_max_seqlen(name: str, value: int) -> None:
    require(value >= 0, name, "a value >= 0", value)


def output_shape(q: torch.Tensor, v: torch.Tensor) -> tuple[int, ...]:
    return (*q.shape[:-1], v.shape[-1])


def check_gradients(
    dout: torch.Tensor,
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    out: torch.Tensor,
    dq: torch.Tensor | None,
    dk: torch.Tensor | None,
    dv: torch.Tensor | None,
    sums: torch.dtype | None = None,
) -> None:
    """The backward's tensors: dout, the output, and the optional gradients. sums: the dtype of dk and dv where the call
    adds to them."""
    of_output = output_shape(q, v)
    expected = {"dout": (dout, of_output), "out": (out, of_output), "dq": (dq, q.shape), "dk": (dk, k.shape)}
    for name, (tensor, shape) in {**expected, "dv": (dv, v.shape)}.items():
        is_sum = sums is not None and name in ("dk", "dv")
        if is_sum:
            require(tensor is not None, name, "a tensor with accumulate_dkv", None)
        if tensor is not None or name in ("dout", "out"):
            check_like_query(
                name, cast(torch.Tensor, tensor), q, shape, any_stride=True, dtype=sums if is_sum else None
            )


def check_lse(lse: torch.Tensor, dlse: torch.Tensor | None, q: torch.Tensor, shape: Sequence[int]) -> None:
    """The LSE and its optional gradient."""
    dtypes = (torch.float32, torch.float64) if q.dtype == torch.float64 else (torch.float32,)
    names = " or ".join(_dtype_name(dtype) for dtype in dtypes)
    for name, tensor in (("softmax_lse", lse), ("dlse", dlse)):
        if tensor is not None or name == "softmax_lse":
            check_device(name, tensor)
            assert tensor is not None
            require(tensor.dtype in dtypes, name, f"dtype {names}", _dtype_name(tensor.dtype))
            check_shape(name, tensor, shape)


def without_padding(lse: torch.Tensor, total_q: int) -> torch.Tensor:
    """xformers passes the LSE of another forward, whose rows are padded."""
    return lse[:, :total_q] if isinstance(lse, torch.Tensor) and lse.dim() == 2 else lse


def check_rng_state(rng_state: torch.Tensor | None, dropout_p: float) -> None:
    if dropout_p == 0.0:
        return
    expected = "the int64 (2,) state that the forward returned when dropout_p > 0"
    require(rng_state is not None, "rng_state", expected, None)
    assert rng_state is not None
    check_device("rng_state", rng_state)
    fits = rng_state.dtype == torch.int64 and tuple(rng_state.shape) == (2,)
    require(fits, "rng_state", expected, f"{_dtype_name(rng_state.dtype)} {list(rng_state.shape)}")


def check_generator(gen: torch.Generator | None) -> None:
    if gen is not None:
        require(gen.device.type == "cpu", "gen", "a CPU generator", f"one on {gen.device}")
