"""Calls of SDPA with an attn_mask by the provider: PyTorch's memory-efficient operators by our backends.

On the CPU, for which PyTorch has none of these, the operators are called by name; on CUDA also by SDPA.
"""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from reference import assert_accurate, assert_gradient_accurate
from sdpa_harness import LAYOUTS, expected, make, recorded
from test_sdpa_provider import compare_to_fake, provider  # noqa: F401  # a fixture

from flash_attn.dropout import dropout_mask

FORWARD = torch.ops.aten._scaled_dot_product_efficient_attention.default
BACKWARD = torch.ops.aten._scaled_dot_product_efficient_attention_backward.default
SHAPES = {"of scores": (2, 4, 37, 50), "of heads": (1, 4, 37, 50), "of rows": (1, 1, 37, 50), "of keys": (2, 1, 1, 50)}


def bias_of(device, shape, dtype=torch.float16, hidden=0.3):
    """Numbers, some of them -inf as of a bool mask, of rows whose distance is a multiple of 16; as torch expands it."""
    bias = torch.randn(*shape[:-1], 64, device=device).to(dtype)[..., : shape[-1]]
    bias[torch.rand(shape, device=device) < hidden] = float("-inf")
    return bias.detach().requires_grad_()


@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("layout", LAYOUTS)
def test_biases(device, provider, shape, layout):  # noqa: F811
    """With their gradients; a row without keys has result 0."""
    inputs = make(device, 37, 50, heads_k=4, layout=layout)
    bias = bias_of(device, SHAPES[shape])
    with torch.no_grad():
        bias[..., 5 % bias.shape[2], :] = float("-inf")
    given = bias.expand(2, 4, 37, 50)
    with recorded(device, "fwd") as forwards, recorded(device, "bwd") as backwards:
        out = FORWARD(*inputs, given, True)[0]
        dout = torch.randn_like(out)
        grads = torch.autograd.grad(out, (*inputs, bias), dout)
    assert len(forwards) == len(backwards) == 1
    results = []
    for dtype in (torch.float64, torch.float16):
        leaf = bias.detach().to(dtype).masked_fill(bias == float("-inf"), 0.0).requires_grad_()
        result = expected(inputs, dtype, attn_bias=leaf, mask=(bias != float("-inf")).detach())
        results.append((result, *torch.autograd.grad(result, (*inputs, leaf), dout.to(dtype))))
    reference, plain = results
    assert_accurate(out, reference[0], plain[0])
    for name, *of_input in zip(("dq", "dk", "dv", "dbias"), grads, reference[1:], plain[1:]):
        assert_gradient_accurate(*of_input, name)


@pytest.mark.parametrize("compute_lse", (False, True))
@pytest.mark.parametrize("seqlen_k", (48, 50))
def test_results_are_as_meta_functions_say(device, provider, compute_lse, seqlen_k):  # noqa: F811
    inputs = [x.detach() for x in make(device, 37, seqlen_k, heads_k=4)]
    bias = bias_of(device, (2, 4, 37, seqlen_k)).detach()
    results = FORWARD(*inputs, bias, compute_lse)
    compare_to_fake(FORWARD, (*inputs, bias, compute_lse), results)
    if compute_lse:
        out, lse, *random = results
        args = (torch.randn_like(out), *inputs, bias, out, lse, *random, 0.0, [True] * 4)
        compare_to_fake(BACKWARD, args, BACKWARD(*args))
        without = BACKWARD(*args[:-1], [True, True, True, False])
        assert without[3] is None and all(torch.equal(a, b) for a, b in zip(without[:3], BACKWARD(*args)))


def test_dropout(device, provider):  # noqa: F811
    inputs, bias = make(device, 37, 50, heads_k=4), bias_of(device, SHAPES["of scores"], hidden=0.0)
    out, lse, seed, offset = FORWARD(*inputs, bias, True, 0.4)
    keep = dropout_mask(torch.stack((seed, offset)), 0.4, 2, 4, 37, 50)
    options = {"keep": keep, "rp_dropout": 1 / 0.6, "attn_bias": bias}
    reference, plain = (expected(inputs, dtype, **options) for dtype in (torch.float64, torch.float16))
    assert_accurate(out, reference, plain)
    grads, others = (torch.autograd.grad(x, inputs, torch.ones_like(x)) for x in (out, reference))
    plain_grads = torch.autograd.grad(plain, inputs, torch.ones_like(plain))
    for name, *of_input in zip(("dq", "dk", "dv"), grads, others, plain_grads):
        assert_gradient_accurate(*of_input, name)


@pytest.mark.devices("cuda")
@pytest.mark.parametrize("kind", ("bool", "numbers"))
def test_scaled_dot_product_attention(device, provider, kind):  # noqa: F811
    """Eager and compiled: as without the provider."""
    inputs = make(device, 40, 40, heads_k=4)
    mask = torch.rand(2, 1, 40, 40, device=device) < 0.7
    mask[..., 0] = True
    mask = mask if kind == "bool" else torch.where(mask, 0.5, float("-inf")).half()
    torch._dynamo.reset()
    for function in (F.scaled_dot_product_attention, torch.compile(F.scaled_dot_product_attention, fullgraph=True)):
        with recorded(device, "fwd") as forwards:
            out = function(*inputs, attn_mask=mask)
        assert len(forwards) == 1
        with torch.nn.attention.sdpa_kernel(torch.nn.attention.SDPBackend.MATH):
            reference = F.scaled_dot_product_attention(*(x.double() for x in inputs), attn_mask=(
                mask if kind == "bool" else mask.double()))  # fmt: skip
        torch.testing.assert_close(out.double(), reference, atol=2e-3, rtol=1e-2)


@pytest.mark.devices("cuda")
@pytest.mark.parametrize("dtype", (torch.float32, torch.float16))
@pytest.mark.parametrize("kind", ("bias", "none", "causal"))
def test_other_calls_stay_with_torch(device, provider, dtype, kind):  # noqa: F811
    """float32, and calls without a mask or with is_causal: the bits of PyTorch's own operators."""
    inputs = [x.detach().to(dtype) for x in make(device, 40, 40, heads_k=4)]
    bias = bias_of(device, (2, 4, 40, 40), dtype, hidden=0.0).detach() if kind == "bias" else None
    if kind == "bias" and dtype == torch.float16:
        pytest.skip("ours")
    with recorded(device, "fwd") as forwards:
        out, lse, *random = FORWARD(*inputs, bias, True, 0.0, kind == "causal")
        dout = torch.randn_like(out)
        grads = BACKWARD(dout, *inputs, bias, out, lse, *random, 0.0, [True] * 3 + [bias is not None], kind == "causal")
    assert forwards == []
    torch.nn.attention.restore_flash_attention_impl(_raise_warn=False)
    expected_out, expected_lse, *random = FORWARD(*inputs, bias, True, 0.0, kind == "causal")
    args = (dout, *inputs, bias, expected_out, expected_lse, *random, 0.0, [True] * 3 + [bias is not None])
    assert torch.equal(out, expected_out)
    for a, b in zip(grads, BACKWARD(*args, kind == "causal")):
        assert (a is None and b is None) or torch.allclose(a.float(), b.float(), atol=1e-3)
