"""The MLP of a transformer block, plain and gated."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from flash_attn.ops.activations import swiglu
from flash_attn.ops.fused_dense import (
    ColumnParallelLinear,
    FusedMLP,
    ParallelFusedMLP,
    RowParallelLinear,
)
from flash_attn.utils.refused import tensor_parallel_class

__all__ = [
    "ColumnParallelLinear",
    "FusedMLP",
    "GatedMlp",
    "Mlp",
    "ParallelFusedMLP",
    "ParallelGatedMlp",
    "ParallelMLP",
    "RowParallelLinear",
]


class Mlp(nn.Module):
    """fc2(activation(fc1(x))).

    Arguments:
        in_features: int.
        hidden_features: int. Default: 4 * in_features.
        out_features: int. Default: in_features.
        activation: function of a tensor.
        bias1, bias2: bool.
        return_residual: bool. Return (out, x).
        device, dtype: of the parameters.
    """

    def __init__(
        self,
        in_features: int,
        hidden_features: int | None = None,
        out_features: int | None = None,
        activation: Callable[[Tensor], Tensor] = F.gelu,
        bias1: bool = True,
        bias2: bool = True,
        return_residual: bool = False,
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
    ) -> None:
        super().__init__()
        out_features = in_features if out_features is None else out_features
        hidden_features = 4 * in_features if hidden_features is None else hidden_features
        linear = partial(nn.Linear, device=device, dtype=dtype)
        self.return_residual = return_residual
        self.fc1 = linear(in_features, hidden_features, bias=bias1)
        self.activation = activation
        self.fc2 = linear(hidden_features, out_features, bias=bias2)

    def forward(self, x: Tensor) -> Tensor | tuple[Tensor, Tensor]:
        """x: (..., in_features) -> (..., out_features), or with return_residual (out, x)."""
        out = self.fc2(self.activation(self.fc1(x)))
        return (out, x) if self.return_residual else out


class GatedMlp(nn.Module):
    """fc2(y * activation(gate)), where fc1 of x is y followed by the gate (Shazeer, 2020, arXiv:2002.05202).

    Arguments:
        in_features: int.
        hidden_features: int, of y and of the gate; rounded up to a multiple of multiple_of. Default: 8/3 in_features.
        out_features: int. Default: in_features.
        activation: function of a tensor, of the gate.
        bias1, bias2: bool.
        multiple_of: int.
        return_residual: bool. Return (out, x).
        device, dtype: of the parameters.
    """

    def __init__(
        self,
        in_features: int,
        hidden_features: int | None = None,
        out_features: int | None = None,
        activation: Callable[[Tensor], Tensor] = F.sigmoid,
        bias1: bool = True,
        bias2: bool = True,
        multiple_of: int = 128,
        return_residual: bool = False,
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
    ) -> None:
        super().__init__()
        out_features = in_features if out_features is None else out_features
        hidden_features = int(8 * in_features / 3) if hidden_features is None else hidden_features
        hidden_features = -(-hidden_features // multiple_of) * multiple_of
        linear = partial(nn.Linear, device=device, dtype=dtype)
        self.return_residual = return_residual
        self.fc1 = linear(in_features, 2 * hidden_features, bias=bias1)
        self.activation = activation
        self.fc2 = linear(hidden_features, out_features, bias=bias2)

    def forward(self, x: Tensor) -> Tensor | tuple[Tensor, Tensor]:
        """x: (..., in_features) -> (..., out_features), or with return_residual (out, x)."""
        y, gate = self.fc1(x).chunk(2, dim=-1)
        y = swiglu(gate, y) if self.activation is F.silu else y * self.activation(gate)
        out = self.fc2(y)
        return (out, x) if self.return_residual else out


_STYLES = "fc1 ColwiseParallel, fc2 RowwiseParallel"
ParallelMLP = tensor_parallel_class("ParallelMLP", "Mlp", _STYLES)
ParallelGatedMlp = tensor_parallel_class(
    "ParallelGatedMlp", "Mlp or a gated MLP of two linear layers", "ColwiseParallel, RowwiseParallel"
)
