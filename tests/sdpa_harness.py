"""Tensors in SDPA's layout, its reference in float64, and a count of the calls that reach a backend."""

from __future__ import annotations

from contextlib import contextmanager

import pytest
import torch
from harness import by_function
from reference import assert_accurate, assert_gradient_accurate, attention

from flash_attn import backends

LAYOUTS = {
    "bhsd": lambda b, h, s, d, **kw: torch.randn(b, h, s, d, **kw),
    "bshd": lambda b, h, s, d, **kw: torch.randn(b, s, h, d, **kw).transpose(1, 2),
    "sbhd": lambda b, h, s, d, **kw: torch.randn(s, b, h, d, **kw).permute(1, 2, 0, 3),
    "packed": lambda b, h, s, d, **kw: torch.randn(b, s, 3, h, d, **kw)[:, :, 1].transpose(1, 2),
    "expanded": lambda b, h, s, d, **kw: torch.randn(b, 1, s, d, **kw).expand(b, h, s, d),
    "columns": lambda b, h, s, d, **kw: torch.randn(b, h, d, s, **kw).transpose(2, 3),
}


def make(
    device, seqlen_q=40, seqlen_k=40, heads=4, heads_k=2, dim=16, value_dim=None, layout="bshd", dtype=torch.float16
):
    """q, k, v (2, heads, seqlen, dim) that require gradients."""
    shapes = ((heads, seqlen_q, dim), (heads_k, seqlen_k, dim), (heads_k, seqlen_k, value_dim or dim))
    tensors = [LAYOUTS[layout](2, *shape, device=device, dtype=dtype) for shape in shapes]
    return [x.detach().requires_grad_() for x in tensors]


def expected(inputs, dtype=torch.float64, **options):
    """SDPA by its definition, differentiable; options of `reference.attention`."""
    return attention(*(x.transpose(1, 2) for x in inputs), dtype=dtype, **options).out.transpose(1, 2)


def check(out, inputs, **options):
    """out, and its gradients with respect to the inputs, against the reference."""
    dout = torch.randn_like(out)
    ours = torch.autograd.grad(out, inputs, dout)
    results = []
    for dtype in (torch.float64, out.dtype):
        result = expected(inputs, dtype, **options)
        results.append((result, torch.autograd.grad(result, inputs, dout.to(dtype))))
    (reference, reference_grads), (plain, plain_grads) = results
    assert_accurate(out, reference, plain)
    for name, *grads in zip(("dq", "dk", "dv"), ours, reference_grads, plain_grads):
        assert_gradient_accurate(*grads, name)


def run_with_gradients(function, inputs, dout):
    """[out, dq, dk, dv] from a fixed seed."""
    torch.manual_seed(5)
    out = function(*inputs)
    return [out, *torch.autograd.grad(out, inputs, dout)]


@contextmanager
def recorded(device, name):
    """The positional arguments of each call of the function `name` of the device's backend."""
    backend, calls = backends.get(device), []
    function = getattr(backend, name)

    def recording(*args, **named):
        calls.append(args)
        return function(*args, **named)

    with pytest.MonkeyPatch.context() as patch, by_function():
        patch.setattr(backend, name, recording)
        yield calls
