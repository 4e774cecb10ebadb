"""Types of the public functions' arguments and results, for annotations alone."""

from collections.abc import Sequence
from typing import Any, Union

from torch import Tensor

# out, or with return_attn_probs, return_max_logit or return_softmax_lse a tuple of tensors that begins with it. Any
# spares callers of the plain form an isinstance for their type checker.
AttentionResult = Union[Tensor, Any]

WindowSize = Union[Sequence[int], Tensor]  # (left, right) in keys, -1 for unbounded
