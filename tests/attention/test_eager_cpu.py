"""Plain dense calls of CPU tensors with one node: equal bits to FlashAttnFunc, which every other call is left to."""

from __future__ import annotations

import math

import pytest
import torch
from harness import by_function

from flash_attn import flash_attn_func
from flash_attn.ops import eager_cpu

PLAIN = (0.0, None, False, (-1, -1), 0.0, None, False, False, False)


def inputs(dtype=torch.float32, sq=40, sk=40, heads_k=4, head_dim=32):
    return [
        torch.randn(2, rows, heads, head_dim, dtype=dtype, requires_grad=True)
        for rows, heads in ((sq, 4), (sk, heads_k), (sk, heads_k))
    ]


def call(*tensors, **options):
    arguments = dict(zip(("dropout_p", "softmax_scale", "causal", "window_size"), PLAIN))
    arguments.update(options)
    return eager_cpu.attention(*tensors, *arguments.values(), *PLAIN[4:])


@pytest.mark.parametrize("dtype", (torch.float16, torch.bfloat16, torch.float32, torch.float64))
@pytest.mark.parametrize("options", ({}, {"causal": True}, {"softmax_scale": 0.3}), ids=str)
@pytest.mark.parametrize("heads_k", (4, 2))
def test_equal_bits(dtype, options, heads_k):
    tensors = inputs(dtype, heads_k=heads_k)
    out = call(*tensors, **options)
    dout = torch.randn_like(out)
    with by_function():
        expected = flash_attn_func(*tensors, **options)
    assert torch.equal(out, expected) and out.is_contiguous()
    assert type(out.grad_fn).__name__ == type(expected.grad_fn).__name__
    for actual, wanted in zip(*(torch.autograd.grad(x, tensors, dout) for x in (out, expected))):
        assert torch.equal(actual, wanted) and actual.stride() == wanted.stride()


def test_a_graph_is_recorded_where_it_is_wanted():
    q, k, v = inputs()
    with torch.no_grad():
        assert not call(q, k, v).requires_grad
    assert call(q.detach(), k, v).requires_grad
    assert not call(q.detach(), k.detach(), v.detach()).requires_grad


def test_second_derivatives_are_those_of_the_function():
    tensors = inputs(torch.float64, 8, 8)

    def second(out):
        dq, dk, dv = torch.autograd.grad(out.square().sum(), tensors, create_graph=True)
        return torch.autograd.grad((dq * dk * dv).sum(), tensors)

    with by_function():
        expected = second(flash_attn_func(*tensors))
    for actual, wanted in zip(second(call(*tensors)), expected):
        assert torch.equal(actual, wanted)


class Wrapped(torch.Tensor):
    pass


class Mode(torch.overrides.TorchFunctionMode):
    def __torch_function__(self, func, types, args=(), kwargs=None):
        raise AssertionError("the call was seen")


def other_calls():
    """name -> (tensors, options) that `FlashAttnFunc` takes."""
    q, k, v = inputs()
    nan = q.detach().clone()
    nan[0, 0, 0, 0] = math.nan
    return {
        "window": ((q, k, v), {"window_size": (3, 0)}),
        "dropout": ((q, k, v), {"dropout_p": 0.1}),
        "scale": ((q, k, v), {"softmax_scale": 0.0}),
        "number of another type": ((q, k, v), {"softmax_scale": 1}),
        "head dims": ((q, k, v[..., :8]), {}),
        "dtypes": ((q, k, v.double()), {}),
        "heads": ((q[:, :, :3], k, v), {}),
        "rank": ((q[0], k[0], v[0]), {}),
        "no keys": ((q, k[:, :0], v[:, :0]), {}),
        "rectangle, causal": ((q, k[:, :9], v[:, :9]), {"causal": True}),
        "not finite": ((nan, k, v), {}),
        "subclass": ((q.detach().as_subclass(Wrapped), k, v), {}),
        "meta": (tuple(x.to("meta") for x in (q, k, v)), {}),
    }


@pytest.mark.parametrize("name", other_calls())
def test_other_calls_are_left_to_the_function(name):
    tensors, options = other_calls()[name]
    assert call(*tensors, **options) is NotImplemented


def test_calls_that_something_takes_part_in_are_left_to_the_function():
    tensors = inputs()
    with torch.autocast("cpu", torch.bfloat16):
        assert call(*tensors) is NotImplemented
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU]):
        assert call(*tensors) is NotImplemented
    with Mode():
        assert call(*tensors) is NotImplemented
    with torch.autograd.forward_ad.dual_level():
        assert call(*tensors) is NotImplemented
