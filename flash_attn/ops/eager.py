"""Eager attention of plain tensors with no more around the kernels than an autograd node: CUDA tensors in one call of
the extension, which records the node in C++; without it dense CPU tensors by `eager_cpu`.

`csrc/flash_attn/api/eager.h` and `csrc/flash_attn/api/eager_inference.h` decide which calls it takes. `FlashAttnFunc`,
over a cache `attend_over_cache`, of packed queries `calls.forward_in_use` compute the same results for all of them.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from flash_attn import backends
from flash_attn._types import TensorOrTuple
from flash_attn.ops import eager_cpu, library
from flash_attn.ops.attention_args import backward_args

_extension = backends.cuda_extension()

if _extension is not None and hasattr(_extension, "attention"):
    torch.autograd.graph.Node.register(_extension.FlashAttnFuncBackward)  # torch finds only its own types of nodes


def _declines(*args: object) -> TensorOrTuple:
    return NotImplemented


# The result of a dense call, or NotImplemented where `FlashAttnFunc` has to take it. Takes the arguments of
# flash_attn_func up to return_attn_probs, then whether the call is batch-invariant.
attention: Callable[..., TensorOrTuple] = getattr(_extension, "attention", eager_cpu.attention)

# (out, lse) of a call over a cache, or NotImplemented where `attend_over_cache` has to take it.
attention_over_cache: Callable[..., TensorOrTuple] = getattr(_extension, "attention_over_cache", _declines)

# (out, lse) of packed queries over packed keys or pages, without autograd, or NotImplemented.
packed_attention: Callable[..., TensorOrTuple] = getattr(_extension, "packed_attention", _declines)


def backward(
    dout: Tensor,
    saved: list[Tensor],
    dropout_p: float,
    softmax_scale: float,
    causal: bool,
    window_left: int,
    window_right: int,
    softcap: float,
    deterministic: bool,
    batch_invariant: bool,
) -> list[Tensor]:
    """The gradients of q, k and v where something takes part in the backward of the node, such as another derivative.

    saved: q, k, v, out and lse, and with dropout rng_state.
    """
    q, k, v, out, lse, *drawn = saved
    rng_state = drawn[0] if drawn else dout.new_zeros(2, dtype=torch.int64)
    tensors = (q, k, v, out, lse, rng_state, None, None, None, None)
    options = (
        0, 0, dropout_p, softmax_scale, causal, window_left, window_right, softcap, deterministic, batch_invariant, 0,
    )  # fmt: skip
    return library.attention_backward(backward_args(dout, None, tensors, options))
