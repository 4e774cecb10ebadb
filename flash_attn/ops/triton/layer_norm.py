"""Layer norm (Ba, Kiros and Hinton, 2016, arXiv:1607.06450) and RMS norm (Zhang and Sennrich, 2019, arXiv:1910.07467)
of a sum: with dropout, a residual stream and a second input, as transformer blocks have it. A Triton kernel on CUDA,
PyTorch elsewhere. Importing this module needs neither triton nor a GPU.

    sum = dropout(rowscale * x) + dropout(x1) + residual
    out = (sum - mean(sum)) / sqrt(var(sum) + eps) * weight + bias          layer norm
    out = sum / sqrt(mean(sum^2) + eps) * weight + bias                     RMS norm
"""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from flash_attn._types import TensorOrTuple
from flash_attn.ops import arguments, context
from flash_attn.ops.triton.dispatch import kernel_serves
from flash_attn.ops.triton.layer_norm_launch import MAX_COLUMNS, FusedNorm, _Targets


class NormOptions(NamedTuple):
    eps: float
    dropout_p: float
    prenorm: bool
    zero_centered_weight: bool
    is_rms_norm: bool
    return_dropout_mask: bool
    out_dtype: torch.dtype
    sum_dtype: torch.dtype
    sum_differs: bool  # from x, so that it needs separate memory


def layer_norm_fn(
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    residual: Tensor | None = None,
    x1: Tensor | None = None,
    weight1: Tensor | None = None,
    bias1: Tensor | None = None,
    eps: float = 1e-6,
    dropout_p: float = 0.0,
    rowscale: Tensor | None = None,
    prenorm: bool = False,
    residual_in_fp32: bool = False,
    zero_centered_weight: bool = False,
    is_rms_norm: bool = False,
    return_dropout_mask: bool = False,
    out_dtype: torch.dtype | None = None,
    out: Tensor | None = None,
    residual_out: Tensor | None = None,
) -> TensorOrTuple:
    """Normalise dropout(rowscale * x) + dropout(x1) + residual over the last dimension.

    Sums are taken in float32 (float64 for float64 x). The gradients of weights and biases are bitwise reproducible.

    Arguments:
        x: (..., features), any floating point dtype and strides.
        weight: (features,).
        bias: (features,) or None.
        residual: like x, of any floating point dtype, or None.
        x1: like x or None: a second input, with a separate dropout. Not together with rowscale.
        weight1, bias1: (features,) or None: a second output of the same sum.
        eps: float, added to the variance.
        dropout_p: float in [0, 1), probability of zeroing an element of x and of x1; kept ones are divided by
            1 - dropout_p. Pass 0.0 in evaluation.
        rowscale: x.shape[:-1] or None, factor of each row of x. Not differentiable.
        prenorm: bool. Also return the sum, to be the next residual.
        residual_in_fp32: bool. Without a residual, keep the sum in float32 instead of x's dtype.
        zero_centered_weight: bool. Multiply by 1 + weight.
        is_rms_norm: bool. RMS norm: subtract no mean.
        return_dropout_mask: bool. Also return the dropout masks.
        out_dtype: dtype of the outputs. Default: x's.
        out, residual_out: like x, of any floating point dtype, or None: tensors to write the output and the sum into,
            for autograd an operation in place. A copy where gradients are recorded.

    Returns out, or a tuple of those that apply, contiguous but for those given and a sum that is x itself:
        out: like x.
        out1 (with weight1): like out.
        sum (with prenorm): like x, in the dtype of residual_out, else of residual, else see residual_in_fp32.
        dropout_mask, dropout_mask1 (with return_dropout_mask): bool like x, True where kept; None without dropout,
            the second None without x1.

    Raises RuntimeError naming the argument that does not fit. Not twice differentiable on CUDA.
    """
    eps, dropout_p = arguments.number("eps", eps), arguments.number("dropout_p", dropout_p)
    prenorm = arguments.flag("prenorm", prenorm)
    return_dropout_mask = arguments.flag("return_dropout_mask", return_dropout_mask)
    _check(x, weight, bias, residual, x1, weight1, bias1, dropout_p, rowscale, out, residual_out)
    if out_dtype is not None and not isinstance(out_dtype, torch.dtype):
        raise TypeError(f"out_dtype: expected a torch.dtype or None, got {arguments.shown(out_dtype)}")
    context.check_writable(("out", "residual_out"), (out, residual_out))
    out_dtype = out.dtype if out is not None else out_dtype or x.dtype
    sum_dtype = next((t.dtype for t in (residual_out, residual) if t is not None), None)
    sum_dtype = sum_dtype or (torch.float32 if arguments.flag("residual_in_fp32", residual_in_fp32) else x.dtype)
    altered = any(t is not None for t in (residual_out, residual, x1, rowscale)) or dropout_p > 0.0
    options = NormOptions(
        eps,
        dropout_p,
        prenorm,
        arguments.flag("zero_centered_weight", zero_centered_weight),
        arguments.flag("is_rms_norm", is_rms_norm),
        return_dropout_mask,
        out_dtype,
        sum_dtype,
        altered or sum_dtype != x.dtype,
    )
    tensors = (x, weight, bias, residual, x1, weight1, bias1, rowscale)
    compute = _fused if kernel_serves(x) and x.shape[-1] <= MAX_COLUMNS else _compose
    results = compute(*tensors, (out, residual_out), options)
    wanted = (True, weight1 is not None, prenorm, return_dropout_mask, return_dropout_mask)
    results = tuple(result for result, want in zip(results, wanted) if want)
    return results if len(results) > 1 else results[0]


def rms_norm_fn(
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    residual: Tensor | None = None,
    x1: Tensor | None = None,
    weight1: Tensor | None = None,
    bias1: Tensor | None = None,
    eps: float = 1e-6,
    dropout_p: float = 0.0,
    rowscale: Tensor | None = None,
    prenorm: bool = False,
    residual_in_fp32: bool = False,
    zero_centered_weight: bool = False,
    return_dropout_mask: bool = False,
    out_dtype: torch.dtype | None = None,
    out: Tensor | None = None,
    residual_out: Tensor | None = None,
) -> TensorOrTuple:
    """`layer_norm_fn` with is_rms_norm=True."""
    inputs = x, weight, bias, residual, x1, weight1, bias1
    options = eps, dropout_p, rowscale, prenorm, residual_in_fp32, zero_centered_weight
    return layer_norm_fn(*inputs, *options, True, return_dropout_mask, out_dtype, out, residual_out)


def layer_norm_linear_fn(
    x: Tensor,
    norm_weight: Tensor,
    norm_bias: Tensor | None,
    linear_weight: Tensor,
    linear_bias: Tensor | None,
    residual: Tensor | None = None,
    eps: float = 1e-6,
    prenorm: bool = False,
    residual_in_fp32: bool = False,
    is_rms_norm: bool = False,
) -> TensorOrTuple:
    """A norm followed by a linear layer.

    Arguments:
        x: (..., features), any floating point dtype and strides.
        norm_weight, norm_bias: (features,); norm_bias may be None.
        linear_weight: (out_features, features); the norm's output is cast to its dtype, or autocast's.
        linear_bias: (out_features,) or None.
        residual: like x, of any floating point dtype, or None: added to x before the norm.
        eps: float, added to the variance.
        prenorm: bool. Also return the sum, to be the next residual.
        residual_in_fp32: bool. Without a residual, keep the sum in float32 instead of x's dtype.
        is_rms_norm: bool. RMS norm: subtract no mean.

    Returns (..., out_features); with prenorm also the sum.
    """
    prenorm = arguments.flag("prenorm", prenorm)
    arguments.check_floating("x", x)
    _check_linear(x, linear_weight, linear_bias)
    try:
        normed = layer_norm_fn(
            x,
            norm_weight,
            norm_bias,
            residual,
            eps=eps,
            prenorm=True,
            residual_in_fp32=residual_in_fp32,
            is_rms_norm=is_rms_norm,
        )
    except (RuntimeError, TypeError) as error:
        arguments.rename(error, {"weight": "norm_weight", "bias": "norm_bias"})
        raise
    out = F.linear(normed[0].to(linear_weight.dtype), linear_weight, linear_bias)
    return (out, normed[1]) if prenorm else out


def _check_linear(x: Tensor, weight: Tensor, bias: Tensor | None) -> None:
    arguments.check_floating("linear_weight", weight)
    if weight.dim() != 2 or weight.shape[1:] != x.shape[-1:]:
        expected = f"(out_features, {', '.join(map(str, x.shape[-1:]))})"
        raise RuntimeError(f"linear_weight: expected shape {expected}, got {list(weight.shape)}")
    if bias is not None:
        arguments.check_floating("linear_bias", bias)
        if bias.shape != weight.shape[:1]:
            raise RuntimeError(f"linear_bias: expected shape {list(weight.shape[:1])}, got {list(bias.shape)}")


class RMSNorm(torch.nn.Module):
    """RMS norm over the last dimension, with dropout of its input in training.

    Arguments:
        hidden_size: int, the number of features.
        eps: float, added to the mean square.
        dropout_p: float in [0, 1).
        zero_centered_weight: bool. Multiply by 1 + weight, and start from weight 0.
        device, dtype: of the weight.
    """

    bias: None

    def __init__(
        self,
        hidden_size: int,
        eps: float = 1e-5,
        dropout_p: float = 0.0,
        zero_centered_weight: bool = False,
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
    ) -> None:
        super().__init__()
        self.eps = eps
        self.drop = torch.nn.Dropout(dropout_p) if dropout_p > 0.0 else None
        self.zero_centered_weight = zero_centered_weight
        self.weight = torch.nn.Parameter(torch.empty(hidden_size, device=device, dtype=dtype))
        self.register_parameter("bias", None)
        self.reset_parameters()

    def reset_parameters(self) -> None:
        torch.nn.init.constant_(self.weight, 0.0 if self.zero_centered_weight else 1.0)

    def forward(
        self, x: Tensor, residual: Tensor | None = None, prenorm: bool = False, residual_in_fp32: bool = False
    ) -> TensorOrTuple:
        """x, residual: (..., hidden_size) -> out, or (out, sum) with prenorm; see `layer_norm_fn`."""
        return rms_norm_fn(
            x,
            self.weight,
            self.bias,
            residual=residual,
            eps=self.eps,
            dropout_p=self.drop.p if self.drop is not None and self.training else 0.0,
            prenorm=prenorm,
            residual_in_fp32=residual_in_fp32,
            zero_centered_weight=self.zero_centered_weight,
        )


def layer_norm_ref(
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    residual: Tensor | None = None,
    x1: Tensor | None = None,
    weight1: Tensor | None = None,
    bias1: Tensor | None = None,
    eps: float = 1e-6,
    dropout_p: float = 0.0,
    rowscale: Tensor | None = None,
    prenorm: bool = False,
    zero_centered_weight: bool = False,
    dropout_mask: Tensor | None = None,
    dropout_mask1: Tensor | None = None,
    upcast: bool = False,
) -> TensorOrTuple:
    """`layer_norm_fn` in plain PyTorch in the dtypes of the inputs (float32 with upcast), with the dropout masks given,
    bool like x, True where kept; drawn anew where they are None. For tests."""
    tensors = (x, weight, bias, residual, x1, weight1, bias1)
    return _reference(
        False, tensors, eps, dropout_p, rowscale, prenorm, zero_centered_weight, (dropout_mask, dropout_mask1), upcast
    )


def rms_norm_ref(
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    residual: Tensor | None = None,
    x1: Tensor | None = None,
    weight1: Tensor | None = None,
    bias1: Tensor | None = None,
    eps: float = 1e-6,
    dropout_p: float = 0.0,
    rowscale: Tensor | None = None,
    prenorm: bool = False,
    zero_centered_weight: bool = False,
    dropout_mask: Tensor | None = None,
    dropout_mask1: Tensor | None = None,
    upcast: bool = False,
) -> TensorOrTuple:
    """`layer_norm_ref` for the RMS norm."""
    tensors = (x, weight, bias, residual, x1, weight1, bias1)
    return _reference(
        True, tensors, eps, dropout_p, rowscale, prenorm, zero_centered_weight, (dropout_mask, dropout_mask1), upcast
    )


def _reference(
    is_rms_norm: bool,
    tensors: tuple[Tensor, Tensor, Tensor | None, Tensor | None, Tensor | None, Tensor | None, Tensor | None],
    eps: float,
    dropout_p: float,
    rowscale: Tensor | None,
    prenorm: bool,
    zero_centered_weight: bool,
    masks: tuple[Tensor | None, Tensor | None],
    upcast: bool,
) -> TensorOrTuple:
    x, weight, *optional = tensors
    dtype = x.dtype
    if upcast:
        x, weight, optional = x.float(), weight.float(), [None if t is None else t.float() for t in optional]
    bias, residual, x1, weight1, bias1 = optional
    total = x if rowscale is None else x * rowscale[..., None]
    total = _drop(total, dropout_p, masks[0])[0]
    if x1 is not None:
        total = total + _drop(x1, dropout_p, masks[1])[0]
    if residual is not None:
        total = (total + residual).to(total.dtype)
    normed = _normalise(total, eps, is_rms_norm)
    outs = [
        _affine(normed, w, b, zero_centered_weight).to(dtype)
        for w, b in ((weight, bias), (weight1, bias1))
        if w is not None
    ]
    results = (*outs, total) if prenorm else tuple(outs)
    return results if len(results) > 1 else results[0]


def _drop(x: Tensor, dropout_p: float, mask: Tensor | None = None) -> tuple[Tensor, Tensor | None]:
    """-> (dropout of x, the mask or None)."""
    if dropout_p == 0.0:
        return x, None
    mask = torch.rand(x.shape, dtype=torch.float32, device=x.device) >= dropout_p if mask is None else mask
    return torch.where(mask, x / (1.0 - dropout_p), 0.0), mask


def _normalise(total: Tensor, eps: float, is_rms_norm: bool) -> Tensor:
    if not is_rms_norm:
        total = total - total.mean(-1, keepdim=True)
    return total * torch.rsqrt(total.square().mean(-1, keepdim=True) + eps)


def _affine(normed: Tensor, weight: Tensor, bias: Tensor | None, zero_centered_weight: bool) -> Tensor:
    out = normed * (1.0 + weight if zero_centered_weight else weight)
    return out if bias is None else out + bias


def _fused(*inputs: Any) -> tuple[Tensor | None, ...]:
    """What `_compose` computes, by a kernel. It writes into the targets itself where no gradient is recorded."""
    *tensors, targets, options = inputs
    recorded = any(t is not None and t.requires_grad for t in (*tensors, *targets)) and torch.is_grad_enabled()
    if not recorded or targets == (None, None):
        results: tuple[Tensor | None, ...] = FusedNorm.apply(*tensors, targets, options)
        return results
    options = options._replace(prenorm=options.prenorm or targets[1] is not None)
    out, out1, total, *masks = FusedNorm.apply(*tensors, (None, None), options)
    out, total = _into_targets(targets, (out, total))
    return out, out1, total, *masks


def _into_targets(targets: _Targets, values: tuple[Tensor, Tensor]) -> list[Tensor]:
    return [value if target is None else target.copy_(value) for target, value in zip(targets, values)]


def _compose(
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    residual: Tensor | None,
    x1: Tensor | None,
    weight1: Tensor | None,
    bias1: Tensor | None,
    rowscale: Tensor | None,
    targets: _Targets,
    options: NormOptions,
) -> tuple[Tensor | None, ...]:
    """What `FusedNorm` computes, by differentiable PyTorch operations."""
    wide = torch.promote_types(x.dtype, torch.float32)
    weight, total = weight.to(wide), x.to(wide)
    bias, x1, weight1, bias1 = (None if t is None else t.to(wide) for t in (bias, x1, weight1, bias1))
    if rowscale is not None:
        total = total * rowscale.detach().reshape(*x.shape[:-1], 1)
    total, mask = _drop(total, options.dropout_p)
    mask1 = None
    if x1 is not None:
        dropped, mask1 = _drop(x1, options.dropout_p)
        total = total + dropped
    if residual is not None:
        total = total + residual
    normed = _normalise(total, options.eps, options.is_rms_norm)
    out = _affine(normed, weight, bias, options.zero_centered_weight).to(options.out_dtype).contiguous()
    out1 = None
    if weight1 is not None:
        out1 = _affine(normed, weight1, bias1, options.zero_centered_weight).to(out.dtype).contiguous()
    total = total.to(options.sum_dtype).contiguous() if options.sum_differs else x
    out, total = _into_targets(targets, (out, total))
    return out, out1, total, mask, mask1


def _check(
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    residual: Tensor | None,
    x1: Tensor | None,
    weight1: Tensor | None,
    bias1: Tensor | None,
    dropout_p: float,
    rowscale: Tensor | None,
    out: Tensor | None,
    residual_out: Tensor | None,
) -> None:
    arguments.check_floating("x", x)
    if x.dim() == 0 or x.shape[-1] == 0:
        raise RuntimeError(f"x: expected at least one feature (..., features), got shape {list(x.shape)}")
    like_x = {"residual": residual, "x1": x1, "out": out, "residual_out": residual_out}
    like_weight = {"weight": weight, "bias": bias, "weight1": weight1, "bias1": bias1}
    given = {**like_x, **like_weight, "rowscale": rowscale}
    arguments.check_optional_tensors(tuple(given), tuple(given.values()))
    for tensors, shape in ((like_x, x.shape), (like_weight, x.shape[-1:])):
        for name, tensor in tensors.items():
            if tensor is not None and tensor.shape != shape:
                raise RuntimeError(f"{name}: expected shape {list(shape)}, got {list(tensor.shape)}")
    for name, tensor in given.items():
        if tensor is not None and tensor.device != x.device:
            raise RuntimeError(f"{name}: expected a tensor on x's device ({x.device}), got one on {tensor.device}")
    if weight is None:
        raise RuntimeError(f"weight: expected a tensor of shape {list(x.shape[-1:])}, got None")
    if bias1 is not None and weight1 is None:
        raise RuntimeError("bias1: expected None without weight1, got a tensor")
    if rowscale is not None and x1 is not None:
        raise RuntimeError("rowscale: expected None with x1, got a tensor")
    if rowscale is not None and rowscale.shape.numel() != x.shape[:-1].numel():
        raise RuntimeError(f"rowscale: expected shape {list(x.shape[:-1])}, got {list(rowscale.shape)}")
    if not 0.0 <= dropout_p < 1.0:
        raise RuntimeError(f"dropout_p: expected a value in [0, 1), got {dropout_p}")
