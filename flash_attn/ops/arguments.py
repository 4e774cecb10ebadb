"""What the public functions make of their arguments before the operators see them; shapes are the backends' matter."""

import torch
from torch import Tensor


def autocast(inputs):
    """The inputs as torch.autocast wants them: with a float32 one among them, all in its dtype (float64 ones excepted).

    Half precision inputs stay as they are, whatever the dtype of autocast.
    """
    if torch.float32 not in [x.dtype for x in inputs]:
        return inputs
    device_type = inputs[0].device.type
    if not torch.is_autocast_enabled(device_type):
        return inputs
    dtype = torch.get_autocast_dtype(device_type)
    return tuple(x if x.dtype == torch.float64 else x.to(dtype) for x in inputs)


def max_seqlens(inputs, varlen, exact):
    """(max_seqlen_q, max_seqlen_k) as ints.

    A tensor is read only if S_dmask needs its value, for that waits for the GPU; a bound from shapes stands in.
    """
    total_q = inputs[0].shape[0]
    if varlen.get("block_table") is not None:
        total_k = varlen["block_table"].shape[1] * inputs[1].shape[1]
    else:
        total_k = inputs[min(1, len(inputs) - 1)].shape[0]
    result = []
    for name, bound in (("max_seqlen_q", total_q), ("max_seqlen_k", total_k)):
        value = varlen[name]
        if isinstance(value, Tensor):
            value = value.item() if exact else bound
        elif value is None:
            raise TypeError(f"{name}: expected an int or an integer tensor, got None")
        result.append(value)
    return result


def scale(softmax_scale, q):
    if softmax_scale is not None:
        return float(softmax_scale)
    return q.shape[-1] ** -0.5 if q.dim() > 0 and q.shape[-1] > 0 else 1.0


def window(window_size):
    if not isinstance(window_size, (tuple, list)) or len(window_size) != 2:
        raise TypeError(f"window_size: expected a pair (left, right), got {window_size!r}")
    return window_size


def sinks(value):
    """Sinks as the backends want them: half precision widened to float32, contiguous."""
    check_tensors(("sinks",), (value,))
    return (value.float() if value.dtype in (torch.float16, torch.bfloat16) else value).contiguous()


def check_tensors(names, values):
    for name, value in zip(names, values):
        if not isinstance(value, Tensor):
            raise TypeError(f"{name}: expected a Tensor, got {type(value).__name__}")


def check_packed(name, x, count, shape, dims):
    check_tensors((name,), (x,))
    if x.dim() != dims or x.shape[-3] != count:
        raise RuntimeError(f"{name}: expected shape {shape}, got {list(x.shape)}")


def check_cache(name, cache):
    if cache.dim() > 0 and cache.stride(-1) != 1 and cache.shape[-1] > 1:
        stride = cache.stride(-1)
        raise RuntimeError(f"{name}: expected a contiguous last dimension (stride 1), got stride {stride}")
