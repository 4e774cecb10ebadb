"""RMS norms of a sum with dropout by flash_attn 2.8.3's older names; see `flash_attn.ops.layer_norm`."""

from __future__ import annotations

import torch
from torch import Tensor

from flash_attn._types import TensorOrTuple
from flash_attn.ops import arguments
from flash_attn.ops.layer_norm import DropoutAddNorm, _dropout_add_norm
from flash_attn.ops.triton import layer_norm as norms


def rms_norm(x: Tensor, weight: Tensor, epsilon: float) -> Tensor:
    """The RMS norm of x (..., features). weight: (features,). epsilon: added to the mean square."""
    try:
        return norms.rms_norm_fn(x, weight, None, eps=epsilon)
    except (RuntimeError, TypeError) as error:
        arguments.rename(error, {"eps": "epsilon"})
        raise


def dropout_add_rms_norm(
    x0: Tensor,
    residual: Tensor | None,
    weight: Tensor,
    bias: Tensor | None,
    dropout_p: float,
    epsilon: float,
    rowscale: Tensor | None = None,
    layerscale: Tensor | None = None,
    prenorm: bool = False,
    residual_in_fp32: bool = False,
    return_dropout_mask: bool = False,
) -> TensorOrTuple:
    """`flash_attn.ops.layer_norm.dropout_add_layer_norm` with the RMS norm."""
    options = prenorm, residual_in_fp32, return_dropout_mask, True
    return _dropout_add_norm(x0, residual, weight, bias, dropout_p, epsilon, rowscale, layerscale, *options)


def dropout_add_rms_norm_parallel_residual(
    x0: Tensor,
    x1: Tensor | None,
    residual: Tensor | None,
    weight0: Tensor,
    bias0: Tensor | None,
    weight1: Tensor | None,
    bias1: Tensor | None,
    dropout_p: float,
    epsilon: float,
    prenorm: bool = False,
    residual_in_fp32: bool = False,
    return_dropout_mask: bool = False,
) -> TensorOrTuple:
    """`flash_attn.ops.layer_norm.dropout_add_layer_norm_parallel_residual` with the RMS norm."""
    options, second = (prenorm, residual_in_fp32, return_dropout_mask, True), (x1, weight1, bias1)
    return _dropout_add_norm(x0, residual, weight0, bias0, dropout_p, epsilon, None, None, *options, second)


class RMSNorm(norms.RMSNorm):
    """RMS norm over the last dimension. Arguments: hidden_size, int; eps, float; device and dtype of the weight."""

    def __init__(
        self,
        hidden_size: int,
        eps: float = 1e-5,
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
    ) -> None:
        super().__init__(hidden_size, eps, device=device, dtype=dtype)


class DropoutAddRMSNorm(DropoutAddNorm):
    """`dropout_add_rms_norm` as a module, with dropout in training alone.

    Arguments:
        hidden_size: int.
        prenorm: bool. Also return the sum.
        residual_in_fp32: bool. Without a residual, the sum is float32.
        p: float in [0, 1), its dropout_p. eps: float, its epsilon.
        device, dtype: of weight.
    """

    _is_rms_norm = True
