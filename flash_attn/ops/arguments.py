"""Arguments of the public functions, checked and normalised for the operators; the backends check shapes.

A number may be a Python, NumPy or symbolic one or a tensor of one element. Errors name the argument, the expected and
the given value, the same for CPU and GPU.
"""

from __future__ import annotations

import math
import operator
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Optional, TypeVar, cast

import torch
from torch import Tensor

from flash_attn._types import WindowSize
from flash_attn.eight_bit import EIGHT_BIT, named
from flash_attn.limits import MAX_HEAD_DIM
from flash_attn.ops import conditions

if TYPE_CHECKING:
    from flash_attn.ops.attention_args import Sequences

_MaybeTensor = TypeVar("_MaybeTensor", Tensor, Optional[Tensor])

_BELOW, _BEYOND = -(2**63), 2**63
_UNBOUNDED = 2**31 - 1
_STRIDED, _FLOAT32 = torch.strided, torch.float32  # a look-up in torch costs as much as one in the tensor
_LARGEST = torch.finfo(torch.float32).max
_AN_INT_OR_TENSOR = "an int or an integer tensor"
_is_compiling = torch.compiler.is_compiling


def rename(error: BaseException, names: Mapping[str, str]) -> None:
    """Replace the backends' name of an argument, at the beginning of an error's message, by the caller's."""
    name, colon, rest = str(error).partition(": expected")
    if colon and names.get(name, name) != name:
        error.args = (f"{names[name]}{colon}{rest}",)


# ---- tensors ----


def attention_inputs(names: Sequence[str], values: tuple[Tensor, ...]) -> tuple[Tensor, ...]:
    """The values, which must be tensors, in the dtype of torch.autocast if one is float32."""
    has_float32 = False
    for value in values:
        if not isinstance(value, Tensor) or value.layout is not _STRIDED or value.is_nested:
            _reject_first(names, values)
        if value.dtype is _FLOAT32:
            has_float32 = True
    return autocast(values) if has_float32 else values


def autocast(inputs: tuple[Tensor, ...]) -> tuple[Tensor, ...]:
    """Inputs, one of them float32, in the dtype of autocast if that is on; float64 and 8-bit ones stay.

    Not called if all inputs have half precision: they stay, whatever the dtype of autocast.
    """
    if not autocasts(inputs[0]):
        return inputs
    dtype = torch.get_autocast_dtype(inputs[0].device.type)
    return tuple(x if x.dtype == torch.float64 or x.dtype in EIGHT_BIT else x.to(dtype) for x in inputs)


def autocasts(x: Tensor) -> bool:
    """Whether autocast is on for the device of x."""
    device_type = x.device.type
    return device_type != "meta" and torch.is_autocast_enabled(device_type)


def check_tensors(names: Sequence[str], values: Sequence[object]) -> None:
    """Raise TypeError unless all are strided tensors: neither sparse nor nested."""
    for value in values:
        if not isinstance(value, Tensor) or value.layout is not _STRIDED or value.is_nested:
            _reject_first(names, values)


def check_optional_tensors(names: Sequence[str], values: Sequence[object]) -> None:
    """`check_tensors` of those that are not None."""
    for value in values:
        if value is not None and (not isinstance(value, Tensor) or value.layout is not _STRIDED or value.is_nested):
            _reject_first(*zip(*[(name, value) for name, value in zip(names, values) if value is not None]))


def _reject_first(names: Sequence[str], values: Sequence[object]) -> None:
    for name, value in zip(names, values):
        if not isinstance(value, Tensor):
            raise TypeError(f"{name}: expected a Tensor, got {type(value).__name__}")
        if value.layout is not _STRIDED or value.is_nested:
            layout = "nested" if value.is_nested else str(value.layout).replace("torch.", "")
            raise TypeError(f"{name}: expected a strided Tensor, got a {layout} one")


def check_floating(name: str, x: Tensor) -> None:
    """Raise an error unless x is a floating point tensor of at least 16 bits."""
    check_tensors((name,), (x,))
    if not x.is_floating_point() or x.element_size() == 1:
        raise RuntimeError(f"{name}: expected a floating point tensor of at least 16 bits, got {shown(x)}")


def check_sequences(sequences: Sequences) -> None:
    """Raise TypeError unless the arguments of varlen attention are strided tensors, the optional ones if given."""
    check_tensors(("cu_seqlens_q", "cu_seqlens_k"), (sequences.cu_seqlens_q, sequences.cu_seqlens_k))
    check_optional_tensors(
        ("seqused_k", "leftpad_k", "block_table"), (sequences.seqused_k, sequences.leftpad_k, sequences.block_table)
    )


def check_rank(name: str, x: Tensor, axes: str) -> None:
    rank = axes.count(",") + 1
    if x.dim() != rank:
        raise RuntimeError(f"{name}: expected {rank} dimensions ({axes}), got {x.dim()}")


def check_cu_seqlens(name: str, value: Tensor, device: torch.device) -> int:
    """Check cumulative lengths that no backend checks; returns the number of sequences."""
    check_tensors((name,), (value,))
    if value.dim() != 1 or value.shape[0] < 1:
        raise RuntimeError(f"{name}: expected shape [b + 1], got {list(value.shape)}")
    check_lengths(name, value, value.shape[0], device)
    return value.shape[0] - 1


def check_shape(name: str, x: Tensor, expected: Sequence[int]) -> None:
    if list(x.shape) != list(expected):
        raise RuntimeError(f"{name}: expected shape {list(expected)}, got {list(x.shape)}")


def check_lengths(name: str, value: Tensor, batch: int, device: torch.device) -> None:
    """Check integers, one for each sequence, that no backend checks."""
    check_tensors((name,), (value,))
    if value.dtype not in (torch.int32, torch.int64):
        raise RuntimeError(f"{name}: expected dtype int32 or int64, got {str(value.dtype).replace('torch.', '')}")
    check_shape(name, value, (batch,))
    if value.device != device:
        raise RuntimeError(f"{name}: expected a tensor on {device}, got one on {value.device}")


def check_constant(name: str, value: Tensor | None) -> None:
    """Raise RuntimeError for an optional tensor that requires a gradient: it gets none."""
    if value is not None:
        check_tensors((name,), (value,))
        _reject_gradient(name, value)


def _reject_gradient(name: str, tensor: Tensor) -> None:
    if tensor.requires_grad and torch.is_grad_enabled():
        raise RuntimeError(
            f"{name}: expected a value that requires no gradient, for it gets none, got a tensor that requires grad "
            "(detach it)"
        )


def check_packed(name: str, x: Tensor, count: int, varlen: bool) -> None:
    """Raise an error unless x holds `count` tensors along its third axis from the right."""
    check_tensors((name,), (x,))
    if x.dim() != (4 if varlen else 5) or x.shape[-3] != count:
        rows = "total" if varlen else "batch, seqlen"
        raise RuntimeError(f"{name}: expected shape ({rows}, {count}, heads, head_dim), got {list(x.shape)}")
    if x.dtype in EIGHT_BIT:
        raise RuntimeError(f"{name}: expected at least 16 bits (8-bit q, k, v come unpacked), got {named(x.dtype)}")


def check_cache(name: str, cache: Tensor) -> None:
    if not (cache.is_contiguous() or cache.stride(-1) == 1 or cache.shape[-1] <= 1):
        stride = cache.stride(-1)
        raise RuntimeError(f"{name}: expected a contiguous last dimension (stride 1), got stride {stride}")


def check_kvcache_ranks(
    q: Tensor, k_cache: Tensor, k: Tensor | None, block_table: Tensor | None, cache_name: str = "k_cache"
) -> None:
    for name, x, axes in (("q", q, 4), (cache_name, k_cache, 4), ("k", k, 4), ("block_table", block_table, 2)):
        if x is not None and x.dim() != axes:
            raise RuntimeError(f"{name}: expected {axes} dimensions, got {x.dim()}")


def sinks(value: Tensor) -> Tensor:
    """Sinks as the backends take them: contiguous, half precision converted to float32."""
    check_tensors(("sinks",), (value,))
    return (value.float() if value.dtype in (torch.float16, torch.bfloat16) else value).contiguous()


def named_sinks(sinks: Tensor | None, s_aux: Tensor | None, learnable_sink: Tensor | None) -> Tensor | None:
    """The sinks given by any of their names, or None."""
    if s_aux is None and learnable_sink is None:
        return sinks
    return one_of_names(("sinks", "s_aux", "learnable_sink"), (sinks, s_aux, learnable_sink))


def name_of_sinks(sinks: Tensor | None, s_aux: Tensor | None, learnable_sink: Tensor | None) -> str:
    """The first of their names that is given."""
    given = (("sinks", sinks), ("s_aux", s_aux), ("learnable_sink", learnable_sink))
    for name, value in given:  # not next() with a default, which torch 2.4 does not compile
        if value is not None:
            return name
    return "sinks"


def one_of_names(names: Sequence[str], values: Sequence[Tensor | None]) -> Tensor:
    """The tensor that is given by one of the names of an argument; the others are None."""
    given = [(name, value) for name, value in zip(names, values) if value is not None]
    check_tensors(*zip(*given))
    first, tensor = given[0]
    for name, value in given[1:]:
        if value is not tensor:
            raise TypeError(f"{name}: expected None, for {first} is given and both are the same argument, got a Tensor")
    return tensor


def padded(tensors: tuple[_MaybeTensor, ...], head_dim: int) -> tuple[_MaybeTensor, ...]:
    """Tensors of this head dim padded with zeros to a multiple of 8, as the CUDA kernels need it; others and None stay.
    Nothing is padded beyond MAX_HEAD_DIM, where the backend refuses the call."""
    if head_dim % 8 == 0 or head_dim > MAX_HEAD_DIM:
        return tensors
    pad = torch.nn.functional.pad
    return tuple(x if x is None or x.size(-1) != head_dim else pad(x, (0, -head_dim % 8)) for x in tensors)


def head_dim(name: str, x: Tensor) -> int:
    """The last size of x, or 1 of a tensor without dimensions, which the backends reject."""
    sizes = x.shape
    size = sizes[-1] if sizes else 1
    if size == 0:
        raise RuntimeError(f"{name}: expected a head dim of at least 1, got 0")
    return size


# ---- numbers ----


def shown(value: object) -> str:
    """A value in a message."""
    if isinstance(value, Tensor):
        return f"a tensor of dtype {str(value.dtype).replace('torch.', '')} and shape {list(value.shape)}"
    text = repr(value)
    return text if len(text) <= 80 else f"{type(value).__name__} {text[:80]}..."


def integer(name: str, value: object, least: int | None = None, expected: str = "an int") -> int:
    """value as an int; one that torch.compile keeps symbolic stays so. least: the least value allowed, if any."""
    if type(value) is not int and not isinstance(value, torch.SymInt):
        try:
            value = operator.index(value)  # type: ignore[arg-type]  # or TypeError
        except (TypeError, ValueError, RuntimeError):
            raise TypeError(f"{name}: expected {expected}, got {shown(value)}") from None
    if type(value) is int and not _is_compiling():
        within, enough = _BELOW < value < _BEYOND, least is None or value >= least
    else:
        within = conditions.may_hold(value > _BELOW) and conditions.may_hold(value < _BEYOND)
        enough = least is None or conditions.holds(value >= least)
    if not within:
        raise RuntimeError(f"{name}: expected {expected} of at most 64 bits, got {value}")
    if not enough:
        raise RuntimeError(f"{name}: expected a value >= {least}, got {value}")
    return cast(int, value)


def sm_margin(value: int) -> int:
    return value if type(value) is int and value == 0 else integer("sm_margin", value, least=0)


def number(name: str, value: object) -> float:
    """value as a float."""
    if type(value) is float:
        return value
    if isinstance(value, Tensor) and value.numel() == 1 and not (value.is_complex() or value.is_meta):
        _reject_gradient(name, value)
        return float(value)
    if value is not None and not isinstance(value, (str, bytes, Tensor)):
        try:
            return float(value)  # type: ignore[arg-type]  # or TypeError
        except (TypeError, ValueError, OverflowError):
            pass
    raise TypeError(f"{name}: expected a number, got {shown(value)}")


def float32(name: str, value: object) -> float:
    """value as a float; a finite one beyond the range of float32 raises an error."""
    result = number(name, value)
    if _LARGEST < abs(result) < math.inf:
        raise RuntimeError(f"{name}: expected a number of at most {_LARGEST:g}, got {result}")
    return result


def flag(name: str, value: object) -> bool:
    """value, which must equal 0 or 1 or be None (False), as a bool."""
    if type(value) is bool:
        return value
    try:
        if value is None or isinstance(value, torch.SymBool) or value == 0 or value == 1:
            return bool(value)
    except (TypeError, ValueError, RuntimeError):
        pass
    raise TypeError(f"{name}: expected a bool, got {shown(value)}")


def device(name: str, value: torch.device | str) -> torch.device:
    """value as a torch.device."""
    try:
        return torch.device(value)
    except (TypeError, RuntimeError, ValueError, OverflowError):
        raise TypeError(f"{name}: expected a device or its name, got {shown(value)}") from None


def scale(softmax_scale: float | None, head_dim: int) -> float:
    return head_dim**-0.5 if softmax_scale is None else number("softmax_scale", softmax_scale)


def window(window_size: WindowSize) -> tuple[int, int]:
    """(left, right) as ints, from any pair of them."""
    pair: WindowSize | None = window_size
    if type(pair) is not tuple and not isinstance(pair, (str, bytes, dict)):
        try:
            pair = tuple(window_size.tolist() if isinstance(window_size, Tensor) else window_size)
        except (TypeError, NotImplementedError):  # of a tensor on meta
            pair = None
    if type(pair) is not tuple or len(pair) != 2:
        raise TypeError(f"window_size: expected a pair (left, right), got {shown(window_size)}")
    left, right = pair
    if type(left) is int and type(right) is int and not _is_compiling():
        if _BELOW < left < _BEYOND and _BELOW < right < _BEYOND:
            return pair
    try:
        return integer("window_size", left), integer("window_size", right)
    except (TypeError, RuntimeError):
        expected = "a pair of ints (left, right), -1 for unbounded"
        raise TypeError(f"window_size: expected {expected}, got {shown(window_size)}") from None


def normal_window(causal: bool, window_size: WindowSize) -> tuple[int, int]:
    """(left, right) including the causal mask; -1 for unbounded, also in place of 2^31 - 1, as in the backends."""
    left, right = map(_side, window(window_size))
    return left, 0 if causal else right


def _side(width: int) -> int:
    if type(width) is not int:  # symbolic: without a guard
        return max(width, -1)
    return width if 0 <= width < _UNBOUNDED else -1


def max_seqlens(
    inputs: tuple[Tensor, ...], sequences: Sequences, exact: bool, columns: int | None = None
) -> tuple[int, int]:
    """(max_seqlen_q, max_seqlen_k) as ints.

    A tensor is read, which waits for the GPU, only if S_dmask needs its value; else a bound from shapes is used, for
    keys the columns of a mask or bias if there are any.
    """
    max_seqlen_q, max_seqlen_k, table = sequences.max_seqlen_q, sequences.max_seqlen_k, sequences.block_table
    if isinstance(max_seqlen_q, Tensor):
        max_seqlen_q = _max_seqlen("max_seqlen_q", max_seqlen_q, _size(inputs[0], 0), exact)
    if isinstance(max_seqlen_k, Tensor):
        k = inputs[min(1, len(inputs) - 1)]
        total_k = _size(k, 0) if table is None else _size(table, 1) * _size(k, 1)
        max_seqlen_k = _max_seqlen("max_seqlen_k", max_seqlen_k, total_k if columns is None else columns, exact)
    max_seqlen_q = integer("max_seqlen_q", max_seqlen_q, expected=_AN_INT_OR_TENSOR)
    return max_seqlen_q, integer("max_seqlen_k", max_seqlen_k, expected=_AN_INT_OR_TENSOR)


def _size(x: Tensor, axis: int) -> int:
    return x.shape[axis] if x.dim() > axis else 0  # the backends reject too few dimensions


def _max_seqlen(name: str, value: Tensor, bound: int, exact: bool) -> int:
    if value.numel() != 1:
        raise TypeError(f"{name}: expected an int or a tensor of one element, got {shown(value)}")
    if value.is_floating_point() or value.is_complex():
        raise TypeError(f"{name}: expected {_AN_INT_OR_TENSOR}, got {shown(value)}")
    return cast(int, value.item()) if exact else bound


def cache_lengths(
    cache_seqlens: int, q: Tensor, k_cache: Tensor, k: Tensor | None, block_table: Tensor | None
) -> Tensor:
    """int32 (batch,) of one int for all sequences, checked here because the host knows it."""
    length = integer("cache_seqlens", cache_seqlens, expected=_AN_INT_OR_TENSOR)
    capacity = k_cache.shape[1] if block_table is None else block_table.shape[1] * k_cache.shape[1]
    new = 0 if k is None else k.shape[1]
    if not (conditions.holds(length >= -1) and conditions.holds(length <= capacity - new)):
        raise RuntimeError(
            f"cache_seqlens: expected cache length plus {new} new rows of at most {capacity}, got {length} + {new}"
        )
    return torch.full((q.shape[0],), length, dtype=torch.int32, device=q.device)
