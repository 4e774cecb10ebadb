"""Activations with their gradients, as flash_attn 2.8.3 names them. GELU is the tanh approximation throughout."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

from flash_attn._types import Context


def gelu_fwd(x: Tensor) -> Tensor:
    """0.5 x (1 + tanh(sqrt(2 / pi) (x + 0.044715 x^3)))."""
    return F.gelu(x, approximate="tanh")


def gelu_bwd(g: Tensor, x: Tensor) -> Tensor:
    """The gradient of `gelu_fwd` at x, for the gradient g of its result."""
    gradient: Tensor = torch.ops.aten.gelu_backward(g, x, approximate="tanh")
    return gradient.to(x.dtype)


def bias_gelu(y: Tensor, bias: Tensor) -> Tensor:
    """`gelu_fwd` of y + bias, in y's dtype. y: (..., features), bias: (features,)."""
    return gelu_fwd(y + bias).to(y.dtype)


def bias_gelu_back(g: Tensor, y: Tensor, bias: Tensor) -> Tensor:
    """The gradient of `bias_gelu` for y; summed over rows it is that for the bias."""
    return gelu_bwd(g, y + bias).to(y.dtype)


def relu_bwd(g: Tensor, x: Tensor) -> Tensor:
    """g where x >= 0, else 0."""
    return torch.where(x >= 0, g, 0.0).to(x.dtype)


def sqrelu_fwd(x: Tensor) -> Tensor:
    """max(x, 0)^2 (So et al., 2021, arXiv:2109.08668)."""
    return F.relu(x).square()


def sqrelu_bwd(g: Tensor, x: Tensor) -> Tensor:
    """The gradient of `sqrelu_fwd` at x, for the gradient g of its result."""
    return (2.0 * g * F.relu(x)).to(x.dtype)


def swiglu_fwd(x: Tensor, y: Tensor) -> Tensor:
    """silu(x) * y (Shazeer, 2020, arXiv:2002.05202)."""
    return F.silu(x) * y


def swiglu_bwd(x: Tensor, y: Tensor, g: Tensor) -> tuple[Tensor, Tensor]:
    """The gradients of `swiglu_fwd` for x and y."""
    sigmoid = torch.sigmoid(x)
    return g * y * sigmoid * (1.0 + x * (1.0 - sigmoid)), g * x * sigmoid


class SwiGLUFunction(torch.autograd.Function):
    """`swiglu_fwd`, keeping x and y alone for its backward."""

    generate_vmap_rule = True

    @staticmethod
    def forward(x: Tensor, y: Tensor) -> Tensor:
        return swiglu_fwd(x, y)

    @staticmethod
    def setup_context(ctx: Context, inputs: tuple[Tensor, ...], output: Tensor) -> None:
        ctx.save_for_backward(*inputs)

    @staticmethod
    def backward(ctx: Context, g: Tensor) -> tuple[Tensor, Tensor]:
        x, y = ctx.saved_tensors
        return swiglu_bwd(x, y, g)


swiglu = SwiGLUFunction.apply
bias_gelu_impl = bias_gelu
fast_gelu_impl = gelu_fwd
