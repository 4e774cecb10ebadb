"""Rotary embeddings against a float64 reference by complex numbers, with gradients, in place, varlen and compiled."""

from __future__ import annotations

import pytest
import torch
import torch.utils.checkpoint
from cases import pairwise
from interpreted import run_interpreted

from flash_attn.layers.rotary import (
    RotaryEmbedding,
    apply_rotary_emb,
    apply_rotary_emb_func,
    apply_rotary_emb_kv_,
    apply_rotary_emb_qkv_,
)
from flash_attn.ops.triton.layer_norm import layer_norm_fn
from flash_attn.ops.triton.rotary import apply_rotary

BATCH, SEQLEN, HEADS, TABLE = 2, 7, 3, 40
DTYPES = (torch.float32, torch.float16, torch.bfloat16, torch.float64)
SHAPES = ((16, 16), (40, 24), (20, 6), (256, 256))  # head_dim, rotary_dim


def tables(rotary_dim, device, dtype=torch.float32):
    angle = torch.rand(TABLE, rotary_dim // 2, device=device, dtype=torch.float64) * 6.3
    return angle.cos().to(dtype), angle.sin().to(dtype)


def reference(x, cos, sin, positions, interleaved=False):
    """x (rows, heads, d) times e^(i angle), pairs as complex numbers, in float64; no rotation outside the table."""
    half = cos.shape[1]
    phase = torch.ones(x.shape[0], half, dtype=torch.complex128, device=x.device)
    known = (positions >= 0) & (positions < cos.shape[0])
    phase[known] = torch.complex(cos.double(), sin.double())[positions[known]]
    head = x[..., : 2 * half].double()
    pairs = head.unflatten(-1, (half, 2)) if interleaved else head.unflatten(-1, (2, half)).transpose(-1, -2)
    turned = torch.view_as_real(torch.view_as_complex(pairs.contiguous()) * phase[:, None])
    turned = turned.flatten(-2) if interleaved else turned.transpose(-1, -2).flatten(-2)
    return torch.cat([turned, x[..., 2 * half :].double()], dim=-1)


def assert_close(actual, expected):
    """Within two roundings of the dtype of values up to the largest (float32 arithmetic below that for half dtypes)."""
    bound = 4 * torch.finfo(actual.dtype).eps * expected.abs().max().clamp(min=1.0)
    assert (actual.double() - expected).abs().max() <= bound


def dense_reference(x, cos, sin, offsets, interleaved=False):
    steps = torch.arange(x.shape[1], device=x.device)
    offsets = [offsets] * x.shape[0] if isinstance(offsets, int) else offsets.tolist()
    return torch.stack([reference(x[b], cos, sin, steps + o, interleaved) for b, o in enumerate(offsets)])


@pytest.mark.each
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("head_dim,rotary_dim", SHAPES)
@pytest.mark.parametrize("interleaved", (False, True))
@pytest.mark.parametrize("inplace", (False, True))
def test_dense(device, dtype, head_dim, rotary_dim, interleaved, inplace):
    x = torch.randn(BATCH, SEQLEN, HEADS, head_dim, device=device).to(dtype)
    cos, sin = tables(rotary_dim, device)
    for offsets in (0, 3, torch.tensor([30, 37], device=device)):
        given = x.clone()
        out = apply_rotary_emb(given, cos, sin, interleaved, inplace, offsets)
        assert_close(out, dense_reference(x, cos, sin, offsets, interleaved))
        assert out.dtype == dtype and torch.equal(given, out if inplace else x)


@pytest.mark.parametrize("table_dtype", (torch.float16, torch.bfloat16, torch.float64))
def test_tables_of_other_dtypes(device, table_dtype):
    x = torch.randn(BATCH, SEQLEN, HEADS, 16, device=device)
    cos, sin = tables(16, device, table_dtype)
    assert_close(apply_rotary_emb(x, cos, sin), dense_reference(x, cos, sin, 0))


@pytest.mark.parametrize("interleaved", (False, True))
def test_strided_inputs(device, interleaved):
    cos, sin = tables(12, device)
    base = torch.randn(BATCH, HEADS, SEQLEN, 32, device=device)
    for x in (base.transpose(1, 2), base.transpose(1, 2)[..., ::2], base[:1].transpose(1, 2).expand(3, -1, -1, -1)):
        out = apply_rotary_emb(x, cos, sin, interleaved)
        assert_close(out, dense_reference(x, cos, sin, 0, interleaved))


@pytest.mark.parametrize("interleaved", (False, True))
@pytest.mark.parametrize("offsets", (0, 2, "tensor"))
def test_varlen(device, interleaved, offsets):
    """Sequences of different lengths, empty ones too, and rows after the last sequence, which stay as they are."""
    lengths = [5, 0, 1, 9, 0]
    cu_seqlens = torch.tensor([0, *lengths]).cumsum(0).to(device=device, dtype=torch.int32)
    x = torch.randn(sum(lengths) + 3, HEADS, 24, device=device)
    cos, sin = tables(16, device)
    shifts = [4, 1, 39, 33, 0] if offsets == "tensor" else [offsets] * len(lengths)
    given = torch.tensor(shifts, device=device) if offsets == "tensor" else offsets
    positions = torch.cat([torch.arange(n) + s for n, s in zip(lengths, shifts)] + [torch.full((3,), -1)]).to(device)
    expected = reference(x, cos, sin, positions, interleaved)
    for max_seqlen in (None, 9):
        out = apply_rotary_emb(
            x, cos, sin, interleaved, seqlen_offsets=given, cu_seqlens=cu_seqlens, max_seqlen=max_seqlen
        )
        assert_close(out, expected)
        assert torch.equal(out[-3:], x[-3:])


def test_conjugate_undoes_the_rotation(device):
    x = torch.randn(BATCH, SEQLEN, HEADS, 16, device=device)
    cos, sin = tables(16, device)
    back = apply_rotary(apply_rotary(x, cos, sin, 5), cos, sin, 5, conjugate=True)
    assert_close(back, x.double())


def test_empty(device):
    cos, sin = tables(8, device)
    for shape in ((0, 5, 2, 8), (2, 0, 2, 8), (2, 5, 0, 8)):
        assert apply_rotary_emb(torch.empty(shape, device=device), cos, sin).shape == shape
    x = torch.randn(2, 5, 3, 8, device=device)
    for interleaved in (False, True):
        assert torch.equal(apply_rotary_emb(x, cos[:, :0], sin[:, :0], interleaved=interleaved), x)
    no_sequences = torch.zeros(1, dtype=torch.int32, device=device)
    rows, offsets = x.flatten(0, 1), no_sequences[:0]
    ours = apply_rotary_emb(rows, cos, sin, seqlen_offsets=offsets, cu_seqlens=no_sequences, max_seqlen=0)
    assert torch.equal(ours, rows)


@pytest.mark.devices("cpu")
@pytest.mark.parametrize("interleaved", (False, True))
@pytest.mark.parametrize("inplace", (False, True))
@pytest.mark.parametrize("varlen", (False, True))
def test_gradcheck(device, interleaved, inplace, varlen):
    cos, sin = tables(4, device, torch.float64)
    cu_seqlens = torch.tensor([0, 2, 5], dtype=torch.int32) if varlen else None
    x = torch.randn(*((6,) if varlen else (2, 3)), 2, 6, dtype=torch.float64, requires_grad=True)

    def call(x):
        return apply_rotary_emb(x * 1, cos, sin, interleaved, inplace, torch.tensor([1, 4]), cu_seqlens)

    assert torch.autograd.gradcheck(call, (x,))
    assert torch.autograd.gradgradcheck(call, (x,))


@pytest.mark.parametrize("interleaved", (False, True))
@pytest.mark.parametrize("inplace", (False, True))
def test_gradient(device, interleaved, inplace):
    """The gradient is the rotation by the negative angle, and the incoming gradient is left alone."""
    x = torch.randn(BATCH, SEQLEN, HEADS, 24, device=device, requires_grad=True)
    cos, sin = tables(16, device)
    grad = torch.randn_like(x)
    given = grad.clone()
    apply_rotary_emb(x * 1, cos, sin, interleaved, inplace, 3).backward(given)
    assert_close(x.grad, dense_reference(grad, cos, -sin, 3, interleaved))
    assert torch.equal(given, grad)


def test_in_place_on_a_leaf_that_requires_grad(device):
    x = torch.randn(BATCH, SEQLEN, HEADS, 16, device=device, requires_grad=True)
    cos, sin = tables(16, device)
    expected = dense_reference(x.detach(), cos, sin, 0)
    out = apply_rotary_emb(x, cos, sin, inplace=True)
    out.sum().backward()
    assert out.data_ptr() == x.data_ptr()
    assert_close(out.detach(), expected)
    assert_close(x.grad, dense_reference(torch.ones_like(x), cos, -sin, 0))


def in_place_operations(device):
    """name -> (an operation in place, the shape that it takes)."""
    cos, sin = tables(16, device)
    module, weight = RotaryEmbedding(16, device=device), torch.ones(16, device=device)
    dense, packed = (BATCH, SEQLEN, HEADS, 16), (BATCH, SEQLEN, 3, HEADS, 16)
    return {
        "torch's": (lambda x: x.mul_(2), dense),
        "x": (lambda x: apply_rotary_emb(x, cos, sin, inplace=True), dense),
        "a view": (lambda x: apply_rotary_emb(x[:, 1:], cos, sin, inplace=True), dense),
        "apply_rotary": (lambda x: apply_rotary(x, cos, sin, inplace=True), dense),
        "qkv": (lambda x: apply_rotary_emb_qkv_(x, cos, sin), packed),
        "kv": (lambda x: apply_rotary_emb_kv_(x, cos, sin), (BATCH, SEQLEN, 2, HEADS, 16)),
        "RotaryEmbedding": (module, packed),
        "layer_norm_fn": (lambda x: layer_norm_fn(x, weight, None, out=x), dense),
        "residual_out": (lambda x: layer_norm_fn(x, weight, None, residual_out=x, prenorm=True)[1], dense),
    }


@pytest.mark.parametrize("use_reentrant", (False, True))
@pytest.mark.parametrize("name", in_place_operations("cpu"))
def test_in_place_on_the_input_of_a_checkpoint(device, name, use_reentrant):
    """Computed again it would be written twice: an error, as from torch's operations. A copy within is right."""
    operation, shape = in_place_operations(device)[name]
    given = torch.randn(shape, device=device)

    def gradient(function):
        x = given.clone().requires_grad_()
        function(x * 1).square().sum().backward()
        return x.grad

    def checkpointed(function):
        return lambda x: torch.utils.checkpoint.checkpoint(function, x, use_reentrant=use_reentrant)

    with pytest.raises(RuntimeError):
        gradient(checkpointed(lambda x: operation(x).square()))
    if device == "cuda" and name in ("layer_norm_fn", "residual_out"):
        return  # the kernel's backward reads what these write: an error without a checkpoint too
    torch.testing.assert_close(
        gradient(checkpointed(lambda x: operation(x.clone()).square())), gradient(lambda x: operation(x).square())
    )


def test_later_uses_of_a_tensor_rotated_in_place_see_the_rotation(device):
    x = torch.randn(BATCH, SEQLEN, HEADS, 16, device=device, requires_grad=True)
    cos, sin = tables(16, device)
    rotated = x * 1
    apply_rotary_emb(rotated, cos, sin, inplace=True)
    rotated.sum().backward()
    assert_close(x.grad, dense_reference(torch.ones_like(x), cos, -sin, 0))


def split_qkv(qkv, heads_q):
    """Views q, k, v of either packing."""
    return qkv.unbind(2) if qkv.dim() == 5 else qkv.split([heads_q, *[(qkv.shape[2] - heads_q) // 2] * 2], dim=2)


@pytest.mark.parametrize("layout", ("packed", "grouped", "strided"))
@pytest.mark.parametrize("interleaved", (False, True))
@pytest.mark.parametrize("own_key_tables", (False, True))
def test_qkv(device, layout, interleaved, own_key_tables):
    shape = {"packed": (3, 4), "grouped": (8,), "strided": (3, 4)}[layout]
    qkv = torch.randn(BATCH, SEQLEN, *shape, 16, device=device, requires_grad=True)
    given = qkv * 1
    if layout == "strided":  # q and k of one row are no longer one run of heads
        given = given.transpose(2, 3).contiguous().transpose(2, 3)
    cos, sin = tables(12, device)
    cos_k, sin_k = tables(12, device) if own_key_tables else (None, None)
    heads_q = 4 if layout == "grouped" else None
    out = apply_rotary_emb_qkv_(given, cos, sin, cos_k, sin_k, interleaved, 2, num_heads_q=heads_q)
    assert out.data_ptr() == given.data_ptr()
    key_tables = (cos_k, sin_k) if own_key_tables else (cos, sin)
    q, k, v = split_qkv(qkv.detach(), heads_q)
    out_q, out_k, out_v = split_qkv(out.detach(), heads_q)
    assert_close(out_q, dense_reference(q, cos, sin, 2, interleaved))
    assert_close(out_k, dense_reference(k, *key_tables, 2, interleaved))
    assert torch.equal(out_v, v)

    grad = torch.randn_like(qkv)
    out.backward(grad)
    (gq, gk, gv), (dq, dk, dv) = split_qkv(grad, heads_q), split_qkv(qkv.grad, heads_q)
    assert_close(dq, dense_reference(gq, cos, -sin, 2, interleaved))
    assert_close(dk, dense_reference(gk, key_tables[0], -key_tables[1], 2, interleaved))
    assert torch.equal(dv, gv)


def test_kv(device):
    kv = torch.randn(BATCH, SEQLEN, 2, HEADS, 16, device=device)
    given = kv.clone().requires_grad_()
    cos, sin = tables(16, device)
    out = apply_rotary_emb_kv_(given, cos, sin, seqlen_offsets=1)
    assert_close(out[:, :, 0].detach(), dense_reference(kv[:, :, 0], cos, sin, 1))
    assert torch.equal(out[:, :, 1], kv[:, :, 1])
    out.sum().backward()
    assert_close(given.grad[:, :, 0], dense_reference(torch.ones_like(kv[:, :, 0]), cos, -sin, 1))
    assert (given.grad[:, :, 1] == 1).all()


def expected_tables(module, seqlen, device):
    exponent = torch.arange(0, module.dim, 2, device=device, dtype=torch.float64) / module.dim
    position = torch.arange(seqlen, device=device, dtype=torch.float64)
    angle = position[:, None] * module.base**-exponent
    return angle.cos(), angle.sin(), exponent, position


@pytest.mark.parametrize("interleaved", (False, True))
@pytest.mark.parametrize("with_kv", (False, True))
@pytest.mark.parametrize("scale_base", (None, 512))
def test_module(device, interleaved, with_kv, scale_base):
    module = RotaryEmbedding(16, base=5000.0, interleaved=interleaved, scale_base=scale_base, device=device)
    qkv = torch.randn(BATCH, SEQLEN, 3, HEADS, 20, device=device)
    q, k, v = qkv.clone().unbind(2)
    seqlen = SEQLEN + 4
    cos, sin, exponent, position = expected_tables(module, seqlen, device)
    scale = torch.ones_like(cos)
    if scale_base is not None:
        scale = ((exponent + 0.4) / 1.4) ** ((position - seqlen // 2) / scale_base)[:, None]
    if with_kv:
        out_q, out_kv = module(qkv[:, :, 0], qkv[:, :, 1:], seqlen_offset=4)
        out_k, out_v = out_kv.unbind(2)
    else:
        out_q, out_k, out_v = module(qkv, seqlen_offset=4).unbind(2)
    assert_close(out_q, dense_reference(q, cos * scale, sin * scale, 4, interleaved))
    assert_close(out_k, dense_reference(k, cos / scale, sin / scale, 4, interleaved))
    assert torch.equal(out_v, v)
    assert qkv[:, :, 0].data_ptr() == out_q.data_ptr()


def test_module_tables(device):
    module = RotaryEmbedding(16, device=device)
    assert module._cos_cached is None and module._sin_cached is None and module.scale is None
    assert set(module.state_dict()) == set() and module.inv_freq.shape == (8,)
    x = torch.randn(1, 9, 3, 2, 16, device=device)
    module(x)
    first = module._cos_cached
    assert first.shape == (9, 8) and first.dtype == torch.float32
    module(x[:, :5])
    assert module._cos_cached is first
    module(x.to(torch.bfloat16))
    assert module._cos_cached.dtype == torch.bfloat16
    module(x, seqlen_offset=torch.tensor([3], device=device), max_seqlen=30)
    assert module._cos_cached.shape == (30, 8)
    with pytest.raises(RuntimeError, match="^max_seqlen: expected an int with a tensor seqlen_offset, got None"):
        RotaryEmbedding(16, device=device)(x, seqlen_offset=torch.tensor([3], device=device))


def test_module_cast_to_half_keeps_exact_angles(device):
    exact, cast = RotaryEmbedding(64, device=device), RotaryEmbedding(64, device=device).to(torch.bfloat16)
    exact._update_cos_sin_cache(4000, device=torch.device(device), dtype=torch.float32)
    cast._update_cos_sin_cache(4000, device=torch.device(device), dtype=torch.float32)
    assert torch.equal(exact._cos_cached, cast._cos_cached)


def test_tables_made_in_inference_mode_train(device):
    module = RotaryEmbedding(16, device=device)
    with torch.inference_mode():
        module(torch.randn(1, 5, 3, 2, 16, device=device))
    qkv = torch.randn(1, 5, 3, 2, 16, device=device, requires_grad=True)
    module(qkv * 1).sum().backward()
    assert qkv.grad is not None and not module._cos_cached.is_inference()


@pytest.mark.parametrize("interleaved", (False, True))
def test_compiled(device, interleaved):
    cos, sin = tables(12, device)
    qkv = torch.randn(BATCH, SEQLEN, 3, HEADS, 16, device=device, requires_grad=True)

    def call(qkv):
        return apply_rotary_emb_qkv_(qkv * 1, cos, sin, interleaved=interleaved).square() + apply_rotary_emb(
            qkv[:, :, 0], cos, sin, interleaved
        ).unsqueeze(2)

    torch._dynamo.reset()
    results = []
    for function in (call, torch.compile(call, backend="aot_eager", fullgraph=True)):
        out = function(qkv)
        results.append((out, *torch.autograd.grad(out.sum(), qkv)))
    for actual, expected in zip(*results):
        assert_close(actual, expected.double())


def test_compiled_with_kept_tables(device):
    module, qkv = RotaryEmbedding(16, device=device), torch.randn(BATCH, SEQLEN, 3, HEADS, 16, device=device)
    expected = module(qkv.clone())
    torch._dynamo.reset()
    assert_close(torch.compile(module, backend="aot_eager", fullgraph=True)(qkv.clone()), expected.double())


INTERPRETED = """
import torch
from flash_attn.ops.triton.rotary import _launch, apply_rotary

torch.manual_seed(0)
cu_seqlens = torch.tensor([0, 5, 5, 6, 20], dtype=torch.int32)
for (head_dim, rotary_dim), heads, varlen, shifted, interleaved, conjugate, inplace in CALLS:
    x = torch.randn(*((23, heads) if varlen else (4, heads, 7)), head_dim)
    x = x if varlen else x.transpose(1, 2)
    cos, sin = torch.randn(2, 30, rotary_dim // 2)
    offsets = torch.tensor([0, 3, 29, 18]) if shifted else 2
    cu = cu_seqlens if varlen else None
    expected = apply_rotary(x, cos, sin, offsets, cu, interleaved=interleaved, conjugate=conjugate)
    source = x.clone()
    out = source if inplace else x.clone()
    _launch(out, source, cos, sin, offsets, cu, interleaved, conjugate)
    assert (out - expected).abs().max() <= 1e-5, (head_dim, rotary_dim, heads, varlen, shifted, interleaved)
print("equal")
"""


def test_triton_kernel_under_the_interpreter():
    """The kernel's own code without a GPU: Triton's interpreter against the PyTorch composition."""
    pytest.importorskip("triton")
    features = {"dims": ((16, 16), (20, 6), (40, 24)), "heads": (1, 3)}
    switches = ("varlen", "shifted", "interleaved", "conjugate", "inplace")
    rows = pairwise({**features, **dict.fromkeys(switches, (False, True))})
    calls = [tuple(row[name] for name in (*features, *switches)) for row in rows]
    run_interpreted(f"CALLS = {calls}\n{INTERPRETED}")


def test_alias():
    assert apply_rotary_emb_func is apply_rotary_emb


def test_bad_arguments(device):
    x = torch.randn(2, 4, 3, 16, device=device)
    cos, sin = tables(16, device)
    cu_seqlens = torch.tensor([0, 4], dtype=torch.int32, device=device)
    cases = [
        (lambda: apply_rotary(x[0], cos, sin), "x: expected 4 dimensions (batch, seqlen, heads, head_dim), got 3"),
        (
            lambda: apply_rotary(x, cos, sin, cu_seqlens=cu_seqlens),
            "x: expected 3 dimensions (total, heads, head_dim), got 4",
        ),
        (
            lambda: apply_rotary(x[..., :8], cos, sin),
            "cos: expected shape (seqlen_rotary, rotary_dim / 2) with rotary_dim <= 8, got [40, 8]",
        ),
        (lambda: apply_rotary(x, cos, sin[:3]), "sin: expected shape [40, 8], got [3, 8]"),
        (lambda: apply_rotary(x, cos[:3], sin[:3]), "cos: expected at least 4 rows, got 3"),
        (lambda: apply_rotary(x, cos, sin, 37), "cos: expected at least 41 rows, got 40"),
        (lambda: apply_rotary(x, cos, sin, -1), "seqlen_offsets: expected a value >= 0, got -1"),
        (
            lambda: apply_rotary(x, cos, sin, torch.zeros(3, dtype=torch.int32, device=device)),
            "seqlen_offsets: expected shape [2], got [3]",
        ),
        (
            lambda: apply_rotary(x[0], cos, sin, 33, cu_seqlens=cu_seqlens, max_seqlen=8),
            "cos: expected at least 41 rows, got 40",
        ),
        (
            lambda: apply_rotary(x, cos.to("meta"), sin),
            f"cos: expected a tensor on x's device ({x.device}), got one on meta",
        ),
        (
            lambda: apply_rotary_emb_kv_(x, cos, sin),
            "kv: expected shape (batch, seqlen, 2, heads, head_dim), got [2, 4, 3, 16]",
        ),
        (
            lambda: apply_rotary_emb_qkv_(x[:, :, None, :2], cos, sin),
            "qkv: expected shape (batch, seqlen, 3, heads, head_dim), got [2, 4, 1, 2, 16]",
        ),
        (
            lambda: apply_rotary_emb_qkv_(x, cos, sin),
            "qkv: expected shape (batch, seqlen, 3, heads, head_dim), or (batch, seqlen, num_heads_q + 2 * "
            "num_heads_k, head_dim) with num_heads_q, got [2, 4, 3, 16] with num_heads_q None",
        ),
    ]
    for call, message in cases:
        with pytest.raises(RuntimeError) as caught:
            call()
        assert str(caught.value) == message
