"""Norms of a sum with dropout by flash_attn 2.8.3's older names: `flash_attn.ops.triton.layer_norm` computes them."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from flash_attn._types import TensorOrTuple
from flash_attn.ops import arguments
from flash_attn.ops.triton.layer_norm import layer_norm_fn

_NAMES = {"x": "x0", "weight": "weight0", "bias": "bias0", "eps": "epsilon"}  # of the parallel functions


def _dropout_add_norm(
    x0: Tensor,
    residual: Tensor | None,
    weight: Tensor,
    bias: Tensor | None,
    dropout_p: float,
    epsilon: float,
    rowscale: Tensor | None,
    layerscale: Tensor | None,
    prenorm: bool,
    residual_in_fp32: bool,
    return_dropout_mask: bool,
    is_rms_norm: bool,
    second: tuple[Tensor | None, Tensor | None, Tensor | None] | None = None,
) -> TensorOrTuple:
    """What all functions of this module and of `flash_attn.ops.rms_norm` compute. second: x1, weight1 and bias1."""
    x1, weight1, bias1 = second or (None, None, None)
    try:
        x = x0
        if layerscale is not None:
            arguments.check_tensors(("x0", "layerscale"), (x0, layerscale))
            if layerscale.shape != x0.shape[-1:]:
                shape = list(x0.shape[-1:])
                raise RuntimeError(f"layerscale: expected shape {shape}, got {list(layerscale.shape)}")
            x = (x0 * layerscale).to(x0.dtype)  # before dropout, which it commutes with
        results = layer_norm_fn(
            x,
            weight,
            bias,
            residual,
            x1,
            weight1,
            bias1,
            epsilon,
            dropout_p,
            rowscale,
            prenorm,
            residual_in_fp32,
            is_rms_norm=is_rms_norm,
            return_dropout_mask=return_dropout_mask,
        )
    except (RuntimeError, TypeError) as error:
        arguments.rename(error, _NAMES if second else {"x": "x0", "eps": "epsilon"})
        raise
    results = list(results) if isinstance(results, tuple) else [results]
    if second and weight1 is None:
        results.insert(1, None)
    if return_dropout_mask:
        masks = [m if m is not None else torch.ones_like(x0, dtype=torch.bool) for m in results[-2:]]
        results[-2:] = masks if second else masks[:1]
    return tuple(results) if len(results) > 1 else results[0]


def layer_norm(x: Tensor, weight: Tensor, bias: Tensor | None, epsilon: float) -> Tensor:
    """The layer norm of x (..., features). weight, bias: (features,). epsilon: added to the variance."""
    try:
        return layer_norm_fn(x, weight, bias, eps=epsilon)
    except (RuntimeError, TypeError) as error:
        arguments.rename(error, {"eps": "epsilon"})
        raise


def dropout_add_layer_norm(
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
    """The layer norm of dropout(rowscale * x0) * layerscale + residual.

    Arguments:
        x0, residual: (..., features); residual may be None.
        weight, bias: (features,); bias may be None.
        dropout_p: float in [0, 1). epsilon: float, added to the variance.
        rowscale: x0.shape[:-1], not differentiable. layerscale: (features,). Both may be None.
        prenorm: bool. Also return the sum.
        residual_in_fp32: bool. Without a residual, the sum is float32.
        return_dropout_mask: bool. Also return the mask, bool like x0, True where kept.

    Returns out, (out, sum), (out, mask) or (out, sum, mask). Raises RuntimeError naming the argument that does not fit.
    """
    options = prenorm, residual_in_fp32, return_dropout_mask, False
    return _dropout_add_norm(x0, residual, weight, bias, dropout_p, epsilon, rowscale, layerscale, *options)


def dropout_add_layer_norm_parallel_residual(
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
    """Two layer norms, of weight0 and weight1, of dropout(x0) + dropout(x1) + residual.

    Arguments:
        x0, x1, residual: (..., features); x1 and residual may be None.
        weight0, bias0, weight1, bias1: (features,); all but weight0 may be None.
        dropout_p: float in [0, 1). epsilon: float, added to the variance.
        prenorm: bool. Also return the sum.
        residual_in_fp32: bool. Without a residual, the sum is float32.
        return_dropout_mask: bool. Also return the masks, bool like x0, True where kept.

    Returns (out0, out1), followed by the sum with prenorm and by two masks with return_dropout_mask; out1 is None
    without weight1. Raises RuntimeError naming the argument that does not fit.
    """
    options, second = (prenorm, residual_in_fp32, return_dropout_mask, False), (x1, weight1, bias1)
    return _dropout_add_norm(x0, residual, weight0, bias0, dropout_p, epsilon, None, None, *options, second)


class DropoutAddNorm(nn.Module):
    """The parameters and options of `DropoutAddLayerNorm` and `DropoutAddRMSNorm`."""

    _is_rms_norm = False
    bias: nn.Parameter | None

    def __init__(
        self,
        hidden_size: int,
        prenorm: bool = False,
        p: float = 0.0,
        eps: float = 1e-5,
        residual_in_fp32: bool = False,
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
    ) -> None:
        super().__init__()
        self.prenorm = prenorm
        self.p = p
        self.eps = eps
        self.residual_in_fp32 = residual_in_fp32
        self.weight = nn.Parameter(torch.empty(hidden_size, device=device, dtype=dtype))
        bias = None if self._is_rms_norm else nn.Parameter(torch.empty(hidden_size, device=device, dtype=dtype))
        self.register_parameter("bias", bias)
        self.reset_parameters()

    def reset_parameters(self) -> None:
        nn.init.ones_(self.weight)
        if self.bias is not None:
            nn.init.zeros_(self.bias)

    def forward(self, x0: Tensor, residual: Tensor | None = None) -> TensorOrTuple:
        """x0, residual: (..., hidden_size) -> out, or (out, sum) with prenorm."""
        options = self.prenorm, self.residual_in_fp32, False, self._is_rms_norm
        dropout_p = self.p if self.training else 0.0
        return _dropout_add_norm(x0, residual, self.weight, self.bias, dropout_p, self.eps, None, None, *options)


class DropoutAddLayerNorm(DropoutAddNorm):
    """`dropout_add_layer_norm` as a module, with dropout in training alone.

    Arguments:
        hidden_size: int.
        prenorm: bool. Also return the sum.
        residual_in_fp32: bool. Without a residual, the sum is float32.
        p: float in [0, 1), its dropout_p. eps: float, its epsilon.
        device, dtype: of weight and bias.
    """
