"""Under torch.autocast: float32 inputs become its dtype, half precision ones are computed as without it."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F

from flash_attn import (
    flash_attn_func,
    flash_attn_kvpacked_func,
    flash_attn_qkvpacked_func,
    flash_attn_varlen_func,
    flash_attn_varlen_qkvpacked_func,
    flash_attn_with_kvcache,
)

pytestmark = pytest.mark.by_both_paths

HALF = (torch.float16, torch.bfloat16)
OPTIONS = {"causal": True, "softcap": 5.0, "deterministic": True}


def tensors(device, *dtypes, shape=(2, 20, 2, 16), grad=True):
    return [torch.randn(shape, device=device).to(dtype).requires_grad_(grad) for dtype in dtypes]


def result_and_gradients(call, leaves):
    torch.manual_seed(2)
    out = call(*leaves)
    return out, *torch.autograd.grad(out, leaves, torch.ones_like(out))


@pytest.mark.parametrize("dtype", HALF)
@pytest.mark.parametrize("given", ("float32", "mixed"))
def test_float32_inputs_are_cast(device, dtype, given):
    """Results are those of an explicit cast, gradients come back in the inputs' dtypes."""
    other = HALF[dtype == HALF[0]]
    leaves = tensors(device, torch.float32, *([torch.float32] * 2 if given == "float32" else [dtype, other]))

    def call(q, k, v):
        return flash_attn_func(q, k, v, dropout_p=0.2, **OPTIONS)

    with torch.autocast(device, dtype):
        actual = result_and_gradients(call, leaves)
    expected = result_and_gradients(lambda *x: call(*(t.to(dtype) for t in x)), leaves)
    assert actual[0].dtype == dtype and [x.dtype for x in actual[1:]] == [x.dtype for x in leaves]
    assert all(torch.equal(a, b) for a, b in zip(actual, expected))


@pytest.mark.parametrize("dtype", HALF)
def test_every_function_casts(device, dtype):
    qkv = torch.randn(1, 20, 3, 2, 16, device=device)
    q, k, v = qkv.unbind(2)
    cu = torch.tensor([0, 20], dtype=torch.int32, device=device)
    expected = flash_attn_func(*(x.to(dtype) for x in (q, k, v)), causal=True)
    with torch.autocast(device, dtype):
        results = [
            flash_attn_qkvpacked_func(qkv, causal=True),
            flash_attn_kvpacked_func(q, qkv[:, :, 1:], causal=True),
            flash_attn_varlen_func(q[0], k[0], v[0], cu, cu, 20, 20, causal=True)[None],
            flash_attn_varlen_qkvpacked_func(qkv[0], cu, 20, causal=True)[None],
        ]
        assert F.scaled_dot_product_attention(q, k, v).dtype == expected.dtype
    assert all(torch.equal(x, expected) for x in results)


@pytest.mark.parametrize("dtype", HALF)
def test_half_precision_inputs_are_computed_as_without_autocast(device, dtype):
    """Autocast to the other half precision changes neither dtype nor bits, in the backward neither."""
    leaves = tensors(device, dtype, dtype, dtype)

    def call(q, k, v):
        return flash_attn_func(q, k, v, **OPTIONS)

    expected = result_and_gradients(call, leaves)
    with torch.autocast(device, HALF[dtype == HALF[0]]):
        actual = result_and_gradients(call, leaves)
    assert all(torch.equal(a, b) for a, b in zip(actual, expected))


@pytest.mark.devices("cpu")
def test_kvcache_is_computed_as_without_autocast(device):
    q, k_cache, v_cache, k, v = tensors(device, *[torch.float16] * 5, grad=False)
    expected = flash_attn_with_kvcache(q, k_cache.clone(), v_cache.clone(), k[:, :3], v[:, :3], cache_seqlens=10)
    with torch.autocast(device, torch.bfloat16):
        actual = flash_attn_with_kvcache(q, k_cache, v_cache, k[:, :3], v[:, :3], cache_seqlens=10)
    assert torch.equal(actual, expected)


@pytest.mark.devices("cpu")
def test_what_autocast_leaves_alone(device):
    """float64 inputs, and float32 ones where autocast is off."""
    for dtype, enabled in ((torch.float64, True), (torch.float32, False)):
        leaves = tensors(device, dtype, dtype, dtype)
        expected = flash_attn_func(*leaves)
        with torch.autocast(device, torch.bfloat16, enabled=enabled):
            actual = flash_attn_func(*leaves)
        assert actual.dtype == dtype and torch.equal(actual, expected)


def test_compiled_autocast_equals_eager(device):
    leaves = tensors(device, torch.float32, torch.float32, torch.float32)

    def call(q, k, v):
        with torch.autocast(device, torch.bfloat16):
            return flash_attn_func(q, k, v, **OPTIONS)

    torch._dynamo.reset()
    expected = result_and_gradients(call, leaves)
    actual = result_and_gradients(torch.compile(call, backend="aot_eager", fullgraph=True), leaves)
    assert actual[0].dtype == torch.bfloat16
    assert all(torch.equal(a, b) for a, b in zip(actual, expected))


def test_compiled_function_follows_autocast(device):
    """A function compiled before is recompiled where autocast is on."""
    q, k, v = tensors(device, torch.float32 if device == "cpu" else torch.bfloat16, *[torch.bfloat16] * 2, grad=False)
    k, v = k.to(q.dtype), v.to(q.dtype)
    torch._dynamo.reset()
    function = torch.compile(flash_attn_func, backend="aot_eager", fullgraph=True)
    assert function(q, k, v).dtype == q.dtype
    with torch.autocast(device, torch.float16):
        result = function(q.float(), k, v)
        assert result.dtype == torch.float16
        assert torch.equal(result, flash_attn_func(q.float(), k, v))


@pytest.mark.devices("cuda")
def test_float32_without_autocast_is_still_an_error(device):
    q, k, v = tensors(device, *[torch.float32] * 3, grad=False)
    with pytest.raises(RuntimeError, match="^q: expected dtype float16 or bfloat16, got float32"):
        flash_attn_func(q, k, v)
