"""Writes through pointers are in-place operations to autograd: who saved the tensor before gets the usual error."""

from __future__ import annotations

from functools import partial

import pytest
import torch
from interpreted import run_interpreted

from flash_attn import KvCachePlan, flash_attn_combine, flash_attn_with_kvcache
from flash_attn import flash_attn_interface as interface
from flash_attn.layers.rotary import RotaryEmbedding, apply_rotary_emb, apply_rotary_emb_kv_, apply_rotary_emb_qkv_
from flash_attn.losses.cross_entropy import CrossEntropyLoss
from flash_attn.modules.mha import MHA
from flash_attn.ops.triton.layer_norm import layer_norm_fn
from flash_attn.ops.triton.rotary import apply_rotary
from flash_attn.utils.generation import InferenceParams

BATCH, ROWS, HEADS, HEAD_DIM, CAPACITY = 2, 3, 2, 16, 24
OPTIONS = (0.0, 0.25, True, -1, -1, 0.0)


def randn(device, *shape):
    return torch.randn(*shape, device=device, dtype=torch.float32 if device == "cpu" else torch.float16)


def rows(device, count=ROWS):
    return randn(device, BATCH, count, HEADS, HEAD_DIM)


def append(device, **options):
    x, lengths = rows(device), torch.tensor([3, 9], dtype=torch.int32, device=device)
    return lambda k_cache, v_cache, **more: flash_attn_with_kvcache(
        x, k_cache, v_cache, k=x * 2, v=x * 3, cache_seqlens=lengths, **options, **more
    )


def into_out(device):
    x, cache = rows(device), rows(device, CAPACITY)
    return lambda out: flash_attn_with_kvcache(x, cache, cache, cache_seqlens=5, out=out)


def combine_into(device):
    parts, lse = randn(device, 3, BATCH, ROWS, HEADS, HEAD_DIM), torch.randn(3, BATCH, ROWS, HEADS, device=device)
    return lambda out: flash_attn_combine(parts, lse, out=out)


def backward_into(device, varlen):
    x = rows(device)
    if varlen:
        x, cu = x.flatten(0, 1), torch.tensor([0, 2, 6], dtype=torch.int32, device=device)
        lengths = (cu, cu, 4, 4)
        out, lse, _, rng_state = interface._flash_attn_varlen_forward(x, x, x, *lengths, *OPTIONS)
    else:
        out, lse, _, rng_state = interface._flash_attn_forward(x, x, x, *OPTIONS, None, False)

    def call(dq, dk, dv):
        if varlen:
            grads = [t.view_as(x) for t in (dq, dk, dv)]
            interface._flash_attn_varlen_backward(x, x, x, x, out, lse, *grads, *lengths, *OPTIONS, None, False)
        else:
            interface._flash_attn_backward(x, x, x, x, out, lse, dq, dk, dv, *OPTIONS, None, False, rng_state)

    return call


def tables(device, dtype=None):
    return torch.randn(2, CAPACITY, HEAD_DIM // 2, device=device).to(dtype).unbind(0)


def writers(device):
    """name -> (function that writes its arguments in place, the arguments)."""
    x, weight = rows(device), torch.ones(HEAD_DIM, device=device)
    cos, sin = tables(device)
    module = RotaryEmbedding(HEAD_DIM, device=device)
    packed, kv = randn(device, BATCH, ROWS, 3, HEADS, HEAD_DIM), randn(device, BATCH, ROWS, 2, HEADS, HEAD_DIM)
    caches = [rows(device, CAPACITY) for _ in "kv"]
    return {
        "caches": (append(device), caches),
        "out": (into_out(device), [rows(device)]),
        "combine": (combine_into(device), [rows(device)]),
        "gradients": (backward_into(device, False), [rows(device) for _ in "qkv"]),
        "varlen gradients": (backward_into(device, True), [rows(device) for _ in "qkv"]),
        "raw rotary": (lambda x: apply_rotary(x, cos, sin, inplace=True), [x]),
        "rotary": (lambda x: apply_rotary_emb(x, cos, sin, inplace=True), [x]),
        "rotary of qkv": (lambda x: apply_rotary_emb_qkv_(x, cos, sin), [packed]),
        "rotary of kv": (lambda x: apply_rotary_emb_kv_(x, cos, sin), [kv]),
        "rotary module": (module, [packed]),
        "layer norm": (lambda out: layer_norm_fn(x, weight, None, out=out), [rows(device)]),
        "layer norm in place": (lambda x: layer_norm_fn(x, weight, None, out=x), [rows(device)]),
        "sum of layer norm": (lambda out: layer_norm_fn(x, weight, None, residual_out=out), [rows(device)]),
    }


NAMES = tuple(writers("cpu"))


@pytest.mark.parametrize("view", (False, True))
@pytest.mark.parametrize("grad_mode", (False, True))
@pytest.mark.parametrize("name", NAMES)
def test_written_tensors_get_a_new_version(device, name, grad_mode, view):
    """A view shares its version with its base; a product that saved the base refuses its backward."""
    function, written = writers(device)[name]
    bases = [torch.stack([x, x]) if view else x for x in written]
    factors = [torch.ones_like(base, requires_grad=True) for base in bases]
    products = [base * factor for base, factor in zip(bases, factors)]
    versions = [base._version for base in bases]
    with torch.set_grad_enabled(grad_mode):
        function(*(base[0] if view else base for base in bases))
    assert all(base._version > version for base, version in zip(bases, versions))
    for product in products:
        with pytest.raises(RuntimeError, match="modified by an inplace operation"):
            product.sum().backward()


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.needs_torch((2, 11), "has another error")
def test_inference_tensors_are_written_in_inference_mode_alone(device, name):
    function, written = writers(device)[name]
    with torch.inference_mode():
        inside = [x.clone() for x in written]
        function(*inside)
        outside = [x.clone() for x in written]
    assert not any(torch.equal(a, b) for a, b in zip(inside, written))
    with pytest.raises(
        RuntimeError, match=r"^\w+: expected a tensor that may be written in place, got one made in inf"
    ):
        function(*outside)
    assert all(torch.equal(a, b) for a, b in zip(outside, written))


def test_nothing_is_written_without_new_keys(device):
    x, cache = rows(device), rows(device, CAPACITY)
    flash_attn_with_kvcache(x, cache, cache, cache_seqlens=5)
    assert cache._version == 0


def test_plans_get_a_new_version(device):
    lengths = torch.tensor([3, 9], dtype=torch.int32, device=device)
    plan = KvCachePlan(lengths, ROWS, HEADS, HEADS, HEAD_DIM, CAPACITY, seqlen_new=ROWS)
    version = plan.tensor._version
    plan.update(lengths + 1)
    assert plan.tensor._version > version


@pytest.mark.needs_torch((2, 11), "lets a leaf be written")
def test_caches_that_are_leaves_are_refused(device):
    """As by torch's in-place operations, and before anything is written."""
    for name in ("k_cache", "v_cache"):
        for view in (False, True):
            leaf = torch.stack([rows(device, CAPACITY)] * 2).requires_grad_()
            before, other = leaf.detach().clone(), rows(device, CAPACITY)
            target = leaf[0] if view else leaf[0].detach().requires_grad_()
            caches = {"k_cache": other, "v_cache": other, name: target}
            with pytest.raises(RuntimeError, match=f"^{name}: expected a tensor that may be written in place.*leaf"):
                append(device)(**caches)
            assert torch.equal(leaf, before)
            with torch.no_grad():
                append(device)(**caches)
            assert not torch.equal(target, before[0])


def test_caches_in_a_graph_lose_their_history_with_an_error(device):
    source = rows(device, CAPACITY).requires_grad_()
    k_cache = source * 1
    append(device)(k_cache, rows(device, CAPACITY))
    with pytest.raises(RuntimeError, match="^k_cache: expected no backward through a tensor that was written"):
        k_cache.sum().backward()


def test_module_generates_where_gradients_are_recorded(device):
    """Its cache is in a graph then; the results are those without gradients."""
    dtype = torch.float32 if device == "cpu" else torch.float16
    module = MHA(32, 2, layer_idx=0, causal=True, rotary_emb_dim=16, use_flash_attn=True, device=device, dtype=dtype)
    x = randn(device, BATCH, 6, 32)
    steps = []
    for grad_mode in (False, True):
        params = InferenceParams(max_seqlen=8, max_batch_size=BATCH)
        with torch.set_grad_enabled(grad_mode):
            results = [module(x[:, :4], inference_params=params)]
            for step in (4, 5):
                params.seqlen_offset = step
                results.append(module(x[:, step : step + 1], inference_params=params))
        steps.append(torch.cat(results, dim=1))
    assert torch.equal(*steps) and steps[1].requires_grad


def test_outputs_that_ask_for_a_gradient_are_refused(device):
    for function in (into_out(device), combine_into(device)):
        out = rows(device).requires_grad_()
        before = out.detach().clone()
        with pytest.raises(RuntimeError, match="^out: expected None where gradients are recorded"):
            function(out)
        assert torch.equal(out, before)


VIEWS = {
    "whole": (lambda base: base, lambda base: base),
    "reshaped": (lambda base: base.flatten(1), lambda base: base.view(BATCH, ROWS, 3, HEADS, HEAD_DIM)),
    "part": (lambda base: torch.stack([base, base]), lambda base: base[1]),
}


@pytest.mark.parametrize("view", VIEWS)
@pytest.mark.parametrize("result_is_used", (False, True))
@pytest.mark.parametrize("packed", (False, True))
def test_views_rotated_in_place_carry_the_rotation_to_their_base(device, view, result_is_used, packed):
    """The gradient of the base, of the view and of the result are all those of the rotation by operations of torch."""
    make_base, make_view = VIEWS[view]
    source = randn(device, BATCH, ROWS, 3, HEADS, HEAD_DIM).float()
    cos, sin = tables(device)
    weight = torch.randn_like(make_base(source))
    gradients = []
    for exact in (True, False):
        leaf = source.clone().requires_grad_()
        base = make_base(leaf * 1)
        x = make_view(base)
        target = x if packed else x[:, :, 0]
        if exact:
            for part in (x[:, :, 0], x[:, :, 1]) if packed else (target,):
                part.copy_(apply_rotary_emb(part.clone(), cos, sin))
            result = target
        else:
            rotate = apply_rotary_emb_qkv_ if packed else partial(apply_rotary_emb, inplace=True)
            result = rotate(target, cos, sin)
        used = result.square().sum() if result_is_used else target.square().sum()
        gradients.append(torch.autograd.grad(used + (base * weight).sum(), leaf)[0])
    torch.testing.assert_close(*gradients, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("in_leaf", (True, False))
def test_leaves_and_shared_views_are_rotated_all_the_same(device, in_leaf):
    """FlashAttention-2 rotates them, and the result has the gradient; the saved value of others is found changed."""
    cos, sin = tables(device)
    leaf = rows(device).requires_grad_()
    shared = leaf if in_leaf else torch.stack([leaf, leaf], dim=2).unbind(2)[0]
    factor = torch.ones_like(leaf, requires_grad=True)
    product = shared.detach() * factor
    expected = torch.autograd.grad(apply_rotary_emb(leaf * 1, cos, sin).sum(), leaf)[0]
    (actual,) = torch.autograd.grad(apply_rotary_emb(shared, cos, sin, inplace=True).sum(), leaf)
    torch.testing.assert_close(actual, expected)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        product.sum().backward()


@pytest.mark.parametrize("target", ("out", "residual_out"))
def test_layer_norm_in_training_over_its_input(device, target):
    """The gradient is right, or an error where the backward needs the input, as in half precision."""
    leaf, weight = rows(device).requires_grad_(), torch.ones(HEAD_DIM, device=device, requires_grad=True)
    with pytest.raises(RuntimeError, match="leaf Variable that requires grad"):
        layer_norm_fn(leaf, weight, None, **{target: leaf})
    factor = rows(device)
    expected = torch.autograd.grad((layer_norm_fn(leaf * 1, weight, None) * factor).sum(), leaf)[0]
    x = leaf * 1
    result = layer_norm_fn(x, weight, None, **{target: x})
    try:
        (actual,) = torch.autograd.grad((result * factor).sum(), leaf)
    except RuntimeError as error:
        assert "modified by an inplace operation" in str(error)
    else:
        torch.testing.assert_close(actual, expected, rtol=1e-2, atol=1e-2)


@pytest.mark.devices("cuda")
def test_cross_entropy_over_its_logits(device):
    logits = torch.randn(4, 50, device=device, requires_grad=True)
    x = logits * 1
    factor = torch.ones_like(x, requires_grad=True)
    product = x.detach() * factor
    labels = torch.randint(50, (4,), device=device)
    CrossEntropyLoss(inplace_backward=True)(x, labels).backward()
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        product.sum().backward()


INTERPRETED = """
import torch
from flash_attn.ops.triton import layer_norm, rotary
from flash_attn.layers.rotary import apply_rotary_emb, apply_rotary_emb_qkv_

layer_norm.kernel_serves = rotary.kernel_serves = lambda x: True
cos, sin = torch.randn(2, 8, 4)
weight = torch.ones(8, requires_grad=True)

def refuses(product):
    try:
        product.sum().backward()
    except RuntimeError as error:
        return "modified by an inplace operation" in str(error)

def saved(base):
    return base.detach() * torch.ones_like(base, requires_grad=True)

for requires_grad in (False, True):
    for function, shape in (
        (lambda x: apply_rotary_emb(x, cos, sin, inplace=True), (2, 3, 2, 8)),
        (lambda x: apply_rotary_emb_qkv_(x, cos, sin), (2, 3, 3, 2, 8)),
        (lambda x: layer_norm.layer_norm_fn(torch.randn(2, 3, 8), weight.detach(), None, out=x), (2, 3, 8)),
        (lambda x: layer_norm.layer_norm_fn(torch.randn(2, 3, 8), weight, None, residual_out=x), (2, 3, 8)),
    ):
        for view in (False, True):
            base = torch.randn(2, *shape, requires_grad=requires_grad) * 1
            x = base[0] if view else base[0].clone()
            product = saved(base if view else x)
            function(x)
            assert refuses(product), (requires_grad, view, shape)

x = torch.randn(2, 3, 8, requires_grad=True) * 1
assert refuses(layer_norm.layer_norm_fn(x, weight, None, out=x))
total, out = torch.empty(2, 3, 8), torch.empty(2, 3, 8)
result = layer_norm.layer_norm_fn(x.detach(), weight, None, out=out, residual_out=total)
assert result.data_ptr() == out.data_ptr() and result.requires_grad and torch.equal(total, x.detach())
plain = layer_norm.layer_norm_fn(x.detach(), weight, None)
assert torch.equal(result, plain)
try:
    apply_rotary_emb(torch.randn(1, 3, 2, 8).expand(2, -1, -1, -1), cos, sin, inplace=True)
except RuntimeError as error:
    assert str(error).startswith("x: expected elements that share no memory"), error
else:
    raise AssertionError("overlap was not refused")
print("equal")
"""


def test_triton_kernels_under_the_interpreter():
    """The same of the paths that only a GPU takes."""
    pytest.importorskip("triton")
    run_interpreted(INTERPRETED)
