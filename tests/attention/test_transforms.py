"""Whoever looks on at a call gets to see it: torch.jit.trace, torch.func transforms, forward-mode differentiation,
inference mode, modes of torch."""

from __future__ import annotations

import warnings

import pytest
import torch
from torch.autograd import forward_ad

from flash_attn import (
    KvCachePlan,
    explain,
    flash_attn_combine,
    flash_attn_func,
    flash_attn_qkvpacked_func,
    flash_attn_varlen_func,
    flash_attn_with_kvcache,
)
from flash_attn import flash_attn_interface as interface
from flash_attn.fp8 import flash_attn_straight_through_func
from flash_attn.layers.rotary import apply_rotary_emb, apply_rotary_emb_qkv_
from flash_attn.ops import library
from flash_attn.ops.triton.cross_entropy import cross_entropy_loss
from flash_attn.ops.triton.layer_norm import layer_norm_fn

pytestmark = pytest.mark.by_both_paths

HEADS, HEAD_DIM, CAPACITY = 2, 16, 24


def randn(device, *shape):
    return torch.randn(*shape, device=device, dtype=torch.float32 if device == "cpu" else torch.float16)


def ints(device, *values):
    return torch.tensor(values, dtype=torch.int32, device=device)


def heads(device, *rows):
    return randn(device, *rows, HEADS, HEAD_DIM)


def decode(q, cache, lengths, **options):
    k_cache, v_cache = cache.clone(), cache.clone()
    out = flash_attn_with_kvcache(q, k_cache, v_cache, k=q * 1, v=q * 2, cache_seqlens=lengths, causal=True, **options)
    return out, k_cache, v_cache


def decode_into(q, cache, lengths):
    out = torch.empty_like(q)
    flash_attn_with_kvcache(q, cache, cache, cache_seqlens=lengths, out=out)
    return out


def decode_with_plan(q, cache, lengths):
    plan = KvCachePlan(lengths, q.shape[1], HEADS, HEADS, HEAD_DIM, CAPACITY)
    return flash_attn_with_kvcache(q, cache, cache, cache_seqlens=lengths, plan=plan)


def rotated(device, in_place):
    cos, sin = torch.randn(2, CAPACITY, HEAD_DIM // 2, device=device)
    return lambda x: apply_rotary_emb(x * 1, cos, sin, inplace=in_place)


def rotated_qkv(device):
    cos, sin = torch.randn(2, CAPACITY, HEAD_DIM // 2, device=device)
    return lambda x: apply_rotary_emb_qkv_(x * 1, cos, sin)


def normed(device):
    weight = torch.randn(HEAD_DIM, device=device)
    return lambda x: layer_norm_fn(x, weight, None, residual=x * 1, prenorm=True)


def traced_calls(device):
    """name -> (function, its arguments in the trace, other arguments)."""

    def cache_arguments(*lengths):
        return heads(device, 2, 3), heads(device, 2, CAPACITY), ints(device, *lengths)

    dense = [(heads(device, batch, rows),) for batch, rows in ((2, 5), (3, 9))]
    varlen = [(heads(device, n[-1]), ints(device, *n)) for n in ((0, 4, 9), (0, 2, 3, 11))]
    packed = [(randn(device, batch, rows, 3, HEADS, HEAD_DIM),) for batch, rows in ((2, 5), (3, 9))]
    lengths = [cache_arguments(3, 9), cache_arguments(11, 0)]
    parts = [(heads(device, n, 2, 4).float(), torch.randn(n, 2, 4, HEADS, device=device)) for n in (3, 2)]
    masked = [(heads(device, 2, n), torch.rand(2, 1, n, n, device=device) < 0.7) for n in (5, 40)]
    drafted = [
        (heads(device, n, 5), torch.rand(n, 5, 5, device=device) < 0.7) for n in (2, 3)
    ]  # mask_keys is a constant
    logits = [(randn(device, n, 40), torch.randint(40, (n,), device=device)) for n in (6, 3)]
    return {
        "dense": (lambda q: flash_attn_func(q, q, q, causal=True), *dense),
        "dense with lse": (lambda q: flash_attn_func(q, q, q, return_attn_probs=True)[:2], *dense),
        "packed": (flash_attn_qkvpacked_func, *packed),
        "mask": (lambda q, mask: flash_attn_func(q, q, q, mask=mask), *masked),
        "mask_bits": (lambda q, bits: flash_attn_with_kvcache(q, q, q, mask_bits=bits), *drafted),
        "mask_bits of bytes": (
            lambda q, bits: flash_attn_with_kvcache(q, q, q, mask_bits=bits[..., :1].to(torch.uint8) * 29),
            *drafted,
        ),
        "varlen": (lambda q, cu: flash_attn_varlen_func(q, q, q, cu, cu, 5, 5), *varlen),
        "varlen, tensor lengths": (
            lambda q, cu: flash_attn_varlen_func(q, q, q, cu, cu, cu.diff().max(), cu.diff().max()),
            *varlen,
        ),
        "cache": (decode, *lengths),
        "cache, one length": (lambda q, cache, _: flash_attn_with_kvcache(q, cache, cache, cache_seqlens=7), *lengths),
        "cache into out": (decode_into, *lengths),
        "cache with plan": (decode_with_plan, *lengths),
        "combine": (flash_attn_combine, *parts),
        "rotary": (rotated(device, False), *dense),
        "rotary in place": (rotated(device, True), *dense),
        "rotary of qkv": (rotated_qkv(device), *packed),
        "layer norm": (normed(device), *dense),
        "cross entropy": (cross_entropy_loss, *logits),
    }


@pytest.mark.parametrize("name", traced_calls("cpu"))
def test_trace_computes_other_inputs(device, name):
    function, first, second = traced_calls(device)[name]
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # of sizes that the trace keeps, such as the head dim
        traced = torch.jit.trace(function, first, check_trace=False)
    for arguments in (second, first):
        results = [call(*arguments) for call in (traced, function)]
        results = [result if isinstance(result, tuple) else (result,) for result in results]
        for actual, expected in zip(*results):
            torch.testing.assert_close(actual, expected, rtol=1e-3, atol=1e-3)


def test_trace_records_the_operator_and_its_gradient(device):
    q = heads(device, 2, 5).requires_grad_()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        traced = torch.jit.trace(lambda q: flash_attn_func(q, q, q, causal=True), (q,), check_trace=False)
    assert [node.kind() for node in traced.graph.nodes() if "flash_attn" in node.kind()] == ["flash_attn_core::fwd"]
    other = heads(device, 1, 9).requires_grad_()
    (actual,) = torch.autograd.grad(traced(other).sum(), other)
    (expected,) = torch.autograd.grad(flash_attn_func(other, other, other, causal=True).sum(), other)
    assert torch.equal(actual, expected)


def refusing_calls(device):
    """name -> (function of one tensor, the tensor, the argument that is named)."""
    cu, cache, lse = ints(device, 0, 4, 9), heads(device, 2, CAPACITY), torch.randn(3, 2, 4, HEADS, device=device)
    lengths, x = ints(device, 3, 5), heads(device, 2, 4)
    raw = (0.0, 0.3, False, -1, -1, 0.0, None)
    cu_raw = (cu, cu, 5, 5, *raw[:3])

    out, softmax_lse, _, rng_state = interface._flash_attn_forward(x, x, x, *raw, False)

    def raw_backward(dout):
        dq = torch.zeros_like(x)
        interface._flash_attn_backward(dout, x, x, x, out, softmax_lse, dq, None, None, *raw, False, rng_state)
        return dq

    return {
        "cache query": (lambda q: flash_attn_with_kvcache(q, cache, cache, cache_seqlens=lengths), x, "q"),
        "cache": (lambda c: flash_attn_with_kvcache(x, c, cache, cache_seqlens=lengths), cache, "k_cache"),
        "new keys": (lambda k: decode(x, cache, lengths)[0] + flash_attn_with_kvcache(
            x, cache.clone(), cache.clone(), k=k, v=x, cache_seqlens=lengths), x, "k"),
        "combine": (lambda p: flash_attn_combine(p, lse)[0], heads(device, 3, 2, 4), "out_partial"),
        "operator": (lambda q: interface._flash_attn_forward(q, x, x, *raw, False)[0], x, "_flash_attn_forward"),
        "varlen operator": (lambda q: interface._flash_attn_varlen_forward(q, q, q, *cu_raw)[0], heads(device, 9),
                            "_flash_attn_varlen_forward"),
        "backward operator": (raw_backward, x, "_flash_attn_backward"),
    }  # fmt: skip


@pytest.mark.parametrize("grad_mode", (True, False))
@pytest.mark.parametrize("name", refusing_calls("cpu"))
@pytest.mark.needs_torch((2, 11), "refuses them by other errors")
def test_forward_mode_tangents_are_refused(device, name, grad_mode):
    function, x, argument = refusing_calls(device)[name]
    message = f"^{argument}: expected .*forward-mode"
    with torch.set_grad_enabled(grad_mode):
        with forward_ad.dual_level(), pytest.raises(NotImplementedError, match=message):
            function(forward_ad.make_dual(x, torch.ones_like(x)))
        with pytest.raises(NotImplementedError, match=message):
            torch.func.jvp(function, (x,), (torch.ones_like(x),))


@pytest.mark.parametrize("name", ("cache query", "combine"))
def test_tangents_of_an_outer_transform_are_refused(device, name):
    function, x, _ = refusing_calls(device)[name]
    one = torch.ones((), device=device)

    def outer(x):
        return torch.func.jvp(lambda y: function(x) * y, (one,), (one,))[0]

    with pytest.raises(NotImplementedError):
        torch.func.jvp(outer, (x,), (torch.ones_like(x),))


def test_constants_under_forward_mode(device):
    """Tensors without a tangent are served where others have one."""
    q = heads(device, 2, 5)
    expected = flash_attn_func(q, q, q)
    with forward_ad.dual_level():
        x = forward_ad.make_dual(torch.ones_like(q), torch.full_like(q, 2.0))
        out = forward_ad.unpack_dual(x * flash_attn_func(q, q, q))
    assert torch.equal(out.primal, expected) and torch.equal(out.tangent, expected * 2)
    assert torch.equal(torch.func.jvp(lambda x: x * flash_attn_func(q, q, q), (q,), (q,))[1], q * expected)


@pytest.mark.parametrize("name", ("rotary", "rotary in place", "rotary of qkv", "layer norm"))
def test_forward_mode_of_the_layers_is_right(device, name):
    function, (x,), _ = traced_calls(device)[name]
    x = x.float()
    direction = torch.randn_like(x)

    def call(x):
        result = function(x)
        return result[0] if isinstance(result, tuple) else result

    with forward_ad.dual_level():
        tangent = forward_ad.unpack_dual(call(forward_ad.make_dual(x, direction))).tangent
    leaf = x.clone().requires_grad_()
    weight = torch.randn_like(tangent)
    (gradient,) = torch.autograd.grad(call(leaf), leaf, weight)
    torch.testing.assert_close((tangent * weight).sum(), (gradient * direction).sum(), rtol=1e-3, atol=1e-2)
    torch.testing.assert_close(torch.func.jvp(call, (x,), (direction,))[1], tangent)


# ---- torch.func, batches of backwards ----


def batched_calls(device):
    """name -> (function of one tensor, a batch of tensors for torch.vmap)."""
    cu, lse = ints(device, 0, 4, 9), torch.randn(3, 2, 4, HEADS, device=device)
    slopes = torch.rand(2, HEADS, device=device)
    return {
        "dense": (lambda q: flash_attn_func(q, q, q, causal=True, alibi_slopes=slopes), heads(device, 3, 2, 5)),
        "packed": (flash_attn_qkvpacked_func, randn(device, 3, 2, 5, 3, HEADS, HEAD_DIM)),
        "varlen": (lambda q: flash_attn_varlen_func(q, q, q, cu, cu, 5, 5), heads(device, 3, 9)),
        "combine": (lambda p: flash_attn_combine(p, lse)[0], heads(device, 2, 3, 2, 4)),
    }


def close(device):
    return {"rtol": 1e-3, "atol": 1e-5 if device == "cpu" else 1e-2}


@pytest.mark.parametrize("name", batched_calls("cpu"))
def test_vmap_is_a_loop_over_samples(device, name):
    """Of values and of gradients of each sample."""
    function, batch = batched_calls(device)[name]

    def gradient(x):
        return torch.func.grad(lambda x: function(x).square().sum())(x)

    for call in (function, gradient):
        expected = torch.stack([call(x) for x in batch])
        torch.testing.assert_close(torch.vmap(call)(batch), expected, **close(device))
        torch.testing.assert_close(torch.vmap(torch.vmap(call))(batch[None])[0], expected, **close(device))


def test_vmap_gives_each_sample_its_gradient_of_sinks(device):
    q, sinks = heads(device, 3, 2, 5), torch.randn(HEADS, device=device)

    def gradient(q):
        return torch.func.grad(lambda sinks: flash_attn_func(q, q, q, sinks=sinks).square().sum())(sinks)

    expected = torch.stack([gradient(x) for x in q])
    torch.testing.assert_close(torch.vmap(gradient)(q), expected, **close(device))


def test_jacobian(device):
    q = heads(device, 1, 3)
    jacobian = torch.func.jacrev(lambda q: flash_attn_func(q, q, q))(q)
    expected = torch.autograd.functional.jacobian(lambda q: flash_attn_func(q, q, q), q)
    torch.testing.assert_close(jacobian, expected, **close(device))


def batch_of_backwards(function, x, create_graph=False):
    leaf = x.clone().requires_grad_()
    out = function(leaf)
    ones = out.new_ones(3, *out.shape)
    return torch.autograd.grad(out, leaf, ones, is_grads_batched=True, create_graph=create_graph)


def calls_without_a_rule(device):
    """name -> (call, the beginning of its error)."""
    x, cache, lengths = heads(device, 2, 5).half(), heads(device, 2, CAPACITY).half(), ints(device, 3, 5)
    plan = KvCachePlan(lengths, 5, HEADS, HEADS, HEAD_DIM, CAPACITY)
    logits, labels = torch.randn(6, 40, device=device), torch.randint(40, (6,), device=device)
    cos, sin = torch.randn(2, CAPACITY, HEAD_DIM // 2, device=device)

    def loss(logits):
        return cross_entropy_loss(logits, labels)[0].sum()

    def over_cache(q, lengths=lengths):
        return flash_attn_with_kvcache(q, cache, cache, cache_seqlens=lengths)

    def over_planned(lengths):
        plan.update(lengths)
        return lengths

    def attention(q):
        return flash_attn_func(q, q, q)

    def combined(lse):
        return flash_attn_combine(torch.stack((x, x)).float(), lse)[0].sum()

    def straight(q):
        return flash_attn_straight_through_func(q, q, q)

    def dropped(q):
        return flash_attn_func(q, q, q, 0.5)

    vmap, grad = torch.vmap, torch.func.grad
    outside = "expected a call outside of torch.func transforms"
    batch = "flash_attn: expected the gradients of one backward, got a batch"
    return {
        "cache query": (lambda: vmap(over_cache)(x[None]), "q: expected a tensor without a dimension of torch.vmap"),
        "cache lengths": (lambda: vmap(lambda n: over_cache(x, n))(lengths[None]), "cache_seqlens: expected a tensor"),
        "cache gradient": (lambda: grad(lambda q: over_cache(q).sum())(x), "flash_attn_with_kvcache: expected no"),
        "plan": (lambda: vmap(over_planned)(lengths[None]), "cache_seqlens: expected a tensor without a dimension"),
        "explain": (lambda: vmap(lambda q: explain(q, q, q) and q)(x[None]), f"explain: {outside}"),
        "straight through": (lambda: vmap(straight)(x[None]), f"flash_attn_straight_through_func: {outside}"),
        "loss": (lambda: grad(loss)(logits), f"cross_entropy_loss: {outside}"),
        "hessian": (lambda: torch.func.hessian(combined)(torch.randn(2, 2, 5, HEADS, device=device)),
                    "flash_attn: expected inputs without"),
        "no samples": (lambda: vmap(attention)(x[None][:0]), "torch.vmap: expected at least one sample"),
        "batch of backwards": (lambda: batch_of_backwards(attention, x), batch),
        "batch of recorded backwards": (lambda: batch_of_backwards(attention, x, create_graph=True), batch),
        "batch of second backwards": (
            lambda: torch.autograd.functional.hessian(lambda q: attention(q).float().sum(), x, vectorize=True), batch,
        ),
        "straight through, batch of backwards": (lambda: batch_of_backwards(straight, x), batch),
        "rotary, batch of backwards": (lambda: batch_of_backwards(lambda x: apply_rotary_emb(x, cos, sin), x), batch),
        "dropout": (lambda: vmap(dropped)(x[None]), r"dropout_p: expected 0 under torch.vmap\(randomness='error'\)"),
    }  # fmt: skip


@pytest.mark.parametrize("name", calls_without_a_rule("cpu"))
def test_what_has_no_rule_is_refused_by_name(device, name):
    call, message = calls_without_a_rule(device)[name]
    with pytest.raises((NotImplementedError, RuntimeError), match=f"^{message}"):
        call()


def test_vmap_draws_a_dropout_mask_for_each_sample(device):
    q = heads(device, 5).expand(3, 2, -1, -1, -1)
    out = torch.vmap(lambda q: flash_attn_func(q, q, q, 0.5), randomness="different")(q)
    assert out.isfinite().all() and not torch.equal(out[0], out[1])


# ---- inference mode, compiled code ----


def test_lengths_and_slopes_made_in_inference_mode(device):
    """A backward saves copies of them; q, k and v have to be cloned by the caller, as for torch's operations."""
    with torch.inference_mode():
        made = ints(device, 0, 4, 9), torch.rand(HEADS, device=device), torch.randn(HEADS, device=device)
        keys = heads(device, 9)

    def gradient(cu, slopes, sinks, k):
        q = x.clone().requires_grad_()
        out = flash_attn_varlen_func(q, q if k is None else k, q, cu, cu, 5, 5, alibi_slopes=slopes, sinks=sinks)
        return torch.autograd.grad(out.square().sum(), q)[0]

    x = heads(device, 9)
    torch.testing.assert_close(gradient(*made, None), gradient(*(y.clone() for y in made), None), **close(device))
    with pytest.raises(RuntimeError, match="^k: expected a tensor that a backward may read, got one made in inf"):
        gradient(*made, keys)
    logits = torch.randn(6, 40, device=device, requires_grad=True)
    with torch.inference_mode():
        labels = torch.randint(40, (6,), device=device)
    assert torch.autograd.grad(cross_entropy_loss(logits, labels)[0].sum(), logits)[0].isfinite().all()


@pytest.mark.needs_torch((2, 11), "has another error")
def test_a_plan_is_made_outside_of_compiled_code(device):
    q, cache, lengths = heads(device, 2, 5), heads(device, 2, CAPACITY), ints(device, 3, 5)
    torch._dynamo.reset()
    with pytest.raises(torch._dynamo.exc.Unsupported, match="KvCachePlan: expected to be made outside of compiled"):
        torch.compile(decode_with_plan, backend="eager", fullgraph=True)(q, cache, lengths)
    torch._dynamo.reset()
    out = torch.compile(decode_with_plan, backend="eager")(q, cache, lengths)  # leaves compiled code for it
    assert torch.equal(out, decode_with_plan(q, cache, lengths))


def test_function_modes_see_the_operator(device):
    class Recorder(torch.overrides.TorchFunctionMode):
        def __init__(self):
            super().__init__()
            self.seen = []

        def __torch_function__(self, function, types, args=(), kwargs=None):
            self.seen.append(function)
            return function(*args, **(kwargs or {}))

    q = heads(device, 2, 5)
    expected = flash_attn_func(q, q, q)
    with Recorder() as recorder:
        out = flash_attn_func(q, q, q)
    assert library._forward_op in recorder.seen and torch.equal(out, expected)


def test_a_default_device_costs_no_dispatch(device, monkeypatch):
    """It is a function mode too, but one that only redirects factory functions."""
    monkeypatch.setattr(library, "_forward_op", None)
    q = heads(device, 2, 5)
    with torch.device(device):
        assert flash_attn_func(q, q, q).shape == q.shape
