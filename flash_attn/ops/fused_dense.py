"""Linear layers and two-layer MLPs with the parameters of flash_attn 2.8.3's fused ones, by PyTorch's own operations.

cuBLASLt fuses the bias of `torch.nn.functional.linear` already; torch.compile fuses the activation.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from flash_attn.ops.activations import gelu_fwd, sqrelu_fwd
from flash_attn.utils.refused import refuse_process_group, tensor_parallel_class

ACTIVATIONS: dict[str, Callable[[Tensor], Tensor]] = {"gelu_approx": gelu_fwd, "relu": F.relu, "sqrelu": sqrelu_fwd}


def fused_dense_func(
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None = None,
    return_residual: bool = False,
    process_group: object = None,
    sequence_parallel: bool = True,
) -> Tensor | tuple[Tensor, Tensor]:
    """x (..., in_features) times weight (out_features, in_features), plus bias (out_features,).

    Returns out, or (out, x) with return_residual. Raises NotImplementedError for a process_group.
    """
    refuse_process_group(process_group)
    out = F.linear(x, weight, bias)
    return (out, x) if return_residual else out


class FusedDense(nn.Linear):
    """`nn.Linear`, which also returns its input with return_residual."""

    def __init__(
        self,
        in_features: int,
        out_features: int,
        bias: bool = True,
        return_residual: bool = False,
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
    ) -> None:
        super().__init__(in_features, out_features, bias=bias, device=device, dtype=dtype)
        self.return_residual = return_residual

    def forward(  # type: ignore[override]
        self, x: Tensor, process_group: object = None
    ) -> Tensor | tuple[Tensor, Tensor]:
        """x: (..., in_features) -> (..., out_features), or with return_residual (out, x)."""
        return fused_dense_func(x, self.weight, self.bias, self.return_residual, process_group)


def fused_mlp_func(
    x: Tensor,
    weight1: Tensor,
    weight2: Tensor,
    bias1: Tensor | None = None,
    bias2: Tensor | None = None,
    activation: str = "gelu_approx",
    save_pre_act: bool = True,
    return_residual: bool = False,
    checkpoint_lvl: int = 0,
    heuristic: int | str = 0,
    process_group: object = None,
    sequence_parallel: bool = True,
) -> Tensor | tuple[Tensor, Tensor]:
    """activation(x weight1^T + bias1) weight2^T + bias2.

    Arguments:
        x: (..., in_features).
        weight1, bias1: (hidden_features, in_features), (hidden_features,) or None.
        weight2, bias2: (out_features, hidden_features), (out_features,) or None.
        activation: "gelu_approx", "relu" or "sqrelu".
        return_residual: bool. Return (out, x).
        checkpoint_lvl: 0: keep all that the backward needs; 1: compute the activation anew; 2: the first product too.
        save_pre_act, heuristic, sequence_parallel: without effect.

    Raises RuntimeError naming the argument that does not fit, NotImplementedError for a process_group.
    """
    refuse_process_group(process_group)
    if activation not in ACTIVATIONS:
        raise RuntimeError(f"activation: expected one of {sorted(ACTIVATIONS)}, got {activation!r}")
    if checkpoint_lvl not in (0, 1, 2):
        raise RuntimeError(f"checkpoint_lvl: expected 0, 1 or 2, got {checkpoint_lvl!r}")

    def first(x: Tensor) -> Tensor:
        return F.linear(x, weight1, bias1)

    def second(hidden: Tensor) -> Tensor:
        return F.linear(ACTIVATIONS[activation](hidden), weight2, bias2)

    anew = partial(checkpoint, use_reentrant=False)
    if checkpoint_lvl == 2:
        out = anew(lambda x: second(first(x)), x)
    else:
        out = anew(second, first(x)) if checkpoint_lvl == 1 else second(first(x))
    return (out, x) if return_residual else out


class FusedMLP(nn.Module):
    """fc2(activation(fc1(x))).

    Arguments:
        in_features: int.
        hidden_features: int. Default: 4 * in_features.
        out_features: int. Default: in_features.
        bias1, bias2: bool.
        activation: "gelu_approx", "relu" or "sqrelu".
        return_residual: bool. Return (out, x).
        checkpoint_lvl: 0: keep all that the backward needs; 1: compute the activation anew; 2: the first product too.
        heuristic: without effect.
        device, dtype: of the parameters.
    """

    def __init__(
        self,
        in_features: int,
        hidden_features: int | None = None,
        out_features: int | None = None,
        bias1: bool = True,
        bias2: bool = True,
        activation: str = "gelu_approx",
        return_residual: bool = False,
        checkpoint_lvl: int = 0,
        heuristic: int | str = "auto",
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
    ) -> None:
        super().__init__()
        hidden_features = hidden_features or 4 * in_features
        self.activation = activation
        self.return_residual = return_residual
        self.checkpoint_lvl = checkpoint_lvl
        self.heuristic = heuristic
        linear = partial(nn.Linear, device=device, dtype=dtype)
        self.fc1 = linear(in_features, hidden_features, bias=bias1)
        self.fc2 = linear(hidden_features, out_features or in_features, bias=bias2)

    def forward(self, x: Tensor, process_group: object = None) -> Tensor | tuple[Tensor, Tensor]:
        """x: (..., in_features) -> (..., out_features), or with return_residual (out, x)."""
        return fused_mlp_func(
            x,
            self.fc1.weight,
            self.fc2.weight,
            self.fc1.bias,
            self.fc2.bias,
            self.activation,
            return_residual=self.return_residual,
            checkpoint_lvl=self.checkpoint_lvl,
            process_group=process_group,
        )


ColumnParallelLinear = tensor_parallel_class("ColumnParallelLinear", "nn.Linear", "ColwiseParallel")
RowParallelLinear = tensor_parallel_class("RowParallelLinear", "nn.Linear", "RowwiseParallel")
ParallelFusedMLP = tensor_parallel_class("ParallelFusedMLP", "FusedMLP", "ColwiseParallel and RowwiseParallel")
