"""What the public functions make of their arguments before the operators see them; shapes are the backends' matter."""

from typing import NamedTuple

import torch
from torch import Tensor


class Sequences(NamedTuple):
    """How rows belong to sequences: the arguments of varlen attention that dense attention does not have."""

    cu_seqlens_q: Tensor
    cu_seqlens_k: Tensor
    max_seqlen_q: int
    max_seqlen_k: int
    seqused_k: Tensor = None
    leftpad_k: Tensor = None
    block_table: Tensor = None


DENSE = Sequences(None, None, 0, 0)


def attention_inputs(names, values):
    """The values, which must be tensors, as torch.autocast wants them."""
    has_float32 = False
    for name, value in zip(names, values):
        if not isinstance(value, Tensor):
            refuse(name, value)
        has_float32 = has_float32 or value.dtype is torch.float32
    return autocast(values) if has_float32 else values


def autocast(inputs):
    """Inputs of which one is float32, all in the dtype of autocast where it is on (float64 ones excepted).

    Half precision inputs alone stay as they are, whatever the dtype of autocast.
    """
    device_type = inputs[0].device.type
    if not torch.is_autocast_enabled(device_type):
        return inputs
    dtype = torch.get_autocast_dtype(device_type)
    return tuple(x if x.dtype == torch.float64 else x.to(dtype) for x in inputs)


def max_seqlens(inputs, sequences, exact):
    """(max_seqlen_q, max_seqlen_k) as ints.

    A tensor is read only if S_dmask needs its value, for that waits for the GPU; a bound from shapes stands in.
    """
    total_q = inputs[0].shape[0]
    if sequences.block_table is not None:
        total_k = sequences.block_table.shape[1] * inputs[1].shape[1]
    else:
        total_k = inputs[min(1, len(inputs) - 1)].shape[0]
    result = []
    for name, value, bound in (
        ("max_seqlen_q", sequences.max_seqlen_q, total_q),
        ("max_seqlen_k", sequences.max_seqlen_k, total_k),
    ):
        if isinstance(value, Tensor):
            value = value.item() if exact else bound
        elif value is None:
            raise TypeError(f"{name}: expected an int or an integer tensor, got None")
        result.append(value)
    return result


def head_dim(q):
    return q.size(-1) if q.dim() > 0 else 0


def scale(softmax_scale, head_dim):
    if softmax_scale is not None:
        return float(softmax_scale)
    return head_dim**-0.5 if head_dim > 0 else 1.0


def window(window_size):
    if not isinstance(window_size, (tuple, list)) or len(window_size) != 2:
        raise TypeError(f"window_size: expected a pair (left, right), got {window_size!r}")
    return window_size


def normal_window(causal, window_size):
    """(left, right) with the causal mask in it and -1 for unbounded: equal for equal masks."""
    left, right = window(window_size)
    return max(left, -1), 0 if causal else max(right, -1)


def check_kvcache_ranks(q, k_cache, k, block_table):
    for name, x, axes in (("q", q, 4), ("k_cache", k_cache, 4), ("k", k, 4), ("block_table", block_table, 2)):
        if x is not None:
            check_tensors((name,), (x,))
            if x.dim() != axes:
                raise RuntimeError(f"{name}: expected {axes} dimensions, got {x.dim()}")


def cache_lengths(cache_seqlens, q, k_cache, k, block_table):
    """A length that is one int for all sequences as int32 (batch,); it is checked here, where the host can see it."""
    if not isinstance(cache_seqlens, int):
        raise TypeError(f"cache_seqlens: expected an int or an integer tensor, got {type(cache_seqlens).__name__}")
    capacity = k_cache.shape[1] if block_table is None else block_table.shape[1] * k_cache.shape[1]
    new = 0 if k is None else k.shape[1]
    if not -1 <= cache_seqlens <= capacity - new:
        raise RuntimeError(
            f"cache_seqlens: expected cache length plus {new} new rows of at most {capacity}, "
            f"got {cache_seqlens} + {new}"
        )
    return torch.full((q.shape[0],), cache_seqlens, dtype=torch.int32, device=q.device)


def sinks(value):
    """Sinks as the backends want them: half precision widened to float32, contiguous."""
    check_tensors(("sinks",), (value,))
    return (value.float() if value.dtype in (torch.float16, torch.bfloat16) else value).contiguous()


def check_tensors(names, values):
    for name, value in zip(names, values):
        if not isinstance(value, Tensor):
            refuse(name, value)


def refuse(name, value):
    raise TypeError(f"{name}: expected a Tensor, got {type(value).__name__}")


def check_packed(name, x, count, shape, dims):
    check_tensors((name,), (x,))
    if x.dim() != dims or x.shape[-3] != count:
        raise RuntimeError(f"{name}: expected shape {shape}, got {list(x.shape)}")


def check_cache(name, cache):
    if cache.dim() > 0 and cache.stride(-1) != 1 and cache.shape[-1] > 1:
        stride = cache.stride(-1)
        raise RuntimeError(f"{name}: expected a contiguous last dimension (stride 1), got stride {stride}")
