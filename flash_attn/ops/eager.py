"""Eager attention of plain CUDA tensors in one call of the extension, which records its autograd node in C++.

`csrc/flash_attn/api/autograd_node.h` says which calls it serves; `FlashAttnFunc` has the same results for all of them.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from flash_attn import backends, observation
from flash_attn.batch_invariance import is_batch_invariant
from flash_attn.ops import library
from flash_attn.ops.attention_args import backward_args

_extension: Any = backends.cuda_extension()
_attention: Any = getattr(_extension, "attention", None)

if _attention is not None:  # torch finds only its own types of nodes
    torch.autograd.graph.Node.register(_extension.FlashAttnFuncBackward)


def attention(*args: Any) -> Any:
    """The result of a dense call, or NotImplemented where `FlashAttnFunc` has to take it. args: of flash_attn_func, up
    to return_attn_probs."""
    if _attention is None or observation.DEBUG:
        return NotImplemented
    return _attention(*args, is_batch_invariant())


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
) -> Any:
    """The gradients of q, k and v where something takes part in the backward of the node, such as another derivative.

    saved: q, k, v, out, lse and rng_state, as FlashAttnFunc saves them.
    """
    tensors = (*saved, None, None, None, None)
    options = (
        0, 0, dropout_p, softmax_scale, causal, window_left, window_right, softcap, deterministic, batch_invariant, 0,
    )  # fmt: skip
    return library.attention_backward(backward_args(dout, None, tensors, options))
