"""Types of the public functions' arguments and results and of what torch passes in, for annotations alone."""

from collections.abc import Sequence
from typing import Any, Optional, Protocol, TypedDict, Union

import torch
from torch import Tensor

# A tensor, or where options ask for more results a tuple that begins with it. Any spares callers of the plain form an
# isinstance for their type checker.
TensorOrTuple = Union[Tensor, Any]

WindowSize = Union[Sequence[int], Tensor]  # (left, right) in keys, -1 for unbounded

Descale = Optional[Union[float, Tensor]]  # of 8-bit tensors: value = stored value * descale

Device = Union[torch.device, str, None]


class Scores(TypedDict):
    """How scores are made of q and k, by the names of the public functions."""

    softmax_scale: Optional[float]
    causal: bool
    window_size: WindowSize
    softcap: float


class AttentionOptions(TypedDict):
    """Options of a call without `softcap`, by the names of the public functions."""

    dropout_p: float
    softmax_scale: Optional[float]
    causal: bool
    window_size: WindowSize
    alibi_slopes: Optional[Tensor]
    deterministic: bool


class Context(Protocol):
    """The ctx of an autograd.Function. A subclass declares what the forward keeps there for the backward."""

    saved_tensors: tuple[Tensor, ...]  # some None
    needs_input_grad: tuple[bool, ...]

    def save_for_backward(self, *tensors: Optional[Tensor]) -> None: ...
    def save_for_forward(self, *tensors: Optional[Tensor]) -> None: ...
    def mark_dirty(self, *tensors: Tensor) -> None: ...
    def mark_non_differentiable(self, *tensors: Tensor) -> None: ...
    def set_materialize_grads(self, value: bool) -> None: ...


class VmapInfo(Protocol):
    """What torch.vmap tells the rule of an autograd.Function."""

    @property
    def batch_size(self) -> int: ...
    @property
    def randomness(self) -> str: ...


Batched = tuple[tuple[Tensor, ...], tuple[int, ...]]  # a rule's results, and their axes of samples
