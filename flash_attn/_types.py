"""Types of the public functions' arguments and results, for annotations alone."""

from collections.abc import Sequence
from typing import Any, Optional, Union

from torch import Tensor

# A tensor, or where options ask for more results a tuple that begins with it. Any spares callers of the plain form an
# isinstance for their type checker.
TensorOrTuple = Union[Tensor, Any]

WindowSize = Union[Sequence[int], Tensor]  # (left, right) in keys, -1 for unbounded

Descale = Optional[Union[float, Tensor]]  # of 8-bit tensors: value = stored value * descale
