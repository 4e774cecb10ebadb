"""flash_attn_combine: merging results over parts of the keys, and its gradient."""

from __future__ import annotations

import math

import pytest
import torch
from cases import DTYPES
from reference import assert_accurate, attention

from flash_attn import flash_attn_combine, flash_attn_func

INF = math.inf


def partials(device, splits=3, batch=2, seqlen=5, heads=4, head_dim=64, dtype=torch.float32):
    out = torch.randn(splits, batch, seqlen, heads, head_dim, device=device).to(dtype)
    lse_dtype = torch.float64 if dtype == torch.float64 else torch.float32
    return out, torch.randn(splits, batch, seqlen, heads, device=device, dtype=lse_dtype) * 3


def plain_combine(out_partial, lse_partial, dtype=torch.float64):
    """The definition in a dtype; no part may be empty."""
    lse_partial = lse_partial.to(dtype)
    lse = torch.logsumexp(lse_partial, dim=0)
    weights = torch.exp(lse_partial - lse)
    return (weights.unsqueeze(-1) * out_partial.to(dtype)).sum(0), lse


def check(out_partial, lse_partial, out, lse, dtype):
    """float32 arithmetic, then one rounding to the result's dtype."""
    exact, exact_lse = plain_combine(out_partial, lse_partial)
    tight = torch.float64 if out_partial.dtype == torch.float64 else torch.float32
    assert out.dtype == dtype and lse.dtype == tight
    assert_accurate(out, exact, plain_combine(out_partial, lse_partial, tight)[0].to(dtype))
    assert_accurate(lse, exact_lse, plain_combine(out_partial, lse_partial, tight)[1], "lse")


@pytest.mark.parametrize("splits", (1, 2, 3, 17, 130))
@pytest.mark.parametrize("head_dim", (8, 37, 64, 128, 256, 512))
def test_against_the_definition(device, splits, head_dim):
    out_partial, lse_partial = partials(device, splits, head_dim=head_dim)
    check(out_partial, lse_partial, *flash_attn_combine(out_partial, lse_partial), torch.float32)


@pytest.mark.parametrize("dtype", ("float16", "float32"))
@pytest.mark.parametrize("head_dim", (1, 4, 12, 37, 520, 1100, 2056))
def test_any_number_of_columns(device, head_dim, dtype):
    """Whole 16-byte vectors or not, of the results or of out alone; rows longer than a thread block."""
    out_partial, lse_partial = partials(device, 9, 1, 3, 5, head_dim, getattr(torch, dtype))
    for out_dtype in (torch.float16, torch.float32):
        result = flash_attn_combine(out_partial, lse_partial, out_dtype=out_dtype)
        check(out_partial, lse_partial, *result, out_dtype)


@pytest.mark.parametrize("dtype", sorted(set(DTYPES["cpu"])))
@pytest.mark.parametrize("out_dtype", (None, "float16", "bfloat16", "float32"))
def test_dtypes(device, dtype, out_dtype):
    if device == "cuda" and dtype == "float64":
        pytest.skip("float64 tensors are for the CPU")
    dtype, out_dtype = getattr(torch, dtype), getattr(torch, out_dtype) if out_dtype else None
    out_partial, lse_partial = partials(device, dtype=dtype)
    result = flash_attn_combine(out_partial, lse_partial, out_dtype=out_dtype)
    check(out_partial, lse_partial, *result, out_dtype or dtype)
    out = torch.empty(out_partial.shape[1:], device=device, dtype=out_dtype or dtype)
    given, lse = flash_attn_combine(out_partial, lse_partial, out=out)
    assert given is out and torch.equal(out, result[0]) and torch.equal(lse, result[1])


def test_parts_without_keys(device):
    """Either infinity; their out_partial is not read."""
    out_partial, lse_partial = partials(device, splits=4)
    lse_partial[1, 0], lse_partial[2, 0], lse_partial[0, 1] = INF, -INF, -INF
    out_partial[1, 0], out_partial[2, 0], out_partial[0, 1] = math.nan, INF, math.nan
    out, lse = flash_attn_combine(out_partial, lse_partial)
    check(out_partial[[0, 3], :1], lse_partial[[0, 3], :1], out[:1], lse[:1], torch.float32)
    check(out_partial[1:, 1:], lse_partial[1:, 1:], out[1:], lse[1:], torch.float32)


@pytest.mark.parametrize("splits", (1, 3, 20))
def test_nan_among_the_sums(device, splits):
    """NaN in its row and in no other."""
    out_partial, lse_partial = partials(device, splits)
    lse_partial[splits // 2, 1, 2, 3] = math.nan
    out, lse = flash_attn_combine(out_partial, lse_partial)
    assert out[1, 2, 3].isnan().all() and lse[1, 2, 3].isnan()
    assert out.isnan().sum() == out.shape[-1] and lse.isnan().sum() == 1


def test_rows_without_keys(device):
    out_partial, lse_partial = partials(device, splits=3)
    lse_partial[:, :, 2] = -INF
    lse_partial[1, :, 2] = INF
    out_partial[:, :, 2] = math.nan
    out, lse = flash_attn_combine(out_partial, lse_partial)
    assert (out[:, 2] == 0).all() and (lse[:, 2] == INF).all()
    assert torch.isfinite(out).all() and torch.isfinite(lse[:, [0, 1, 3, 4]]).all()


def test_large_sums(device):
    """Sums far apart and far from 0: the largest decides, nothing overflows."""
    out_partial, lse_partial = partials(device)
    lse_partial[0] += 1e4
    lse_partial[1] -= 1e4
    check(out_partial, lse_partial, *flash_attn_combine(out_partial, lse_partial), torch.float32)


@pytest.mark.parametrize("shift", (-1e4, 1e5))
def test_large_sums_lose_no_precision(device, shift):
    """Weights come from differences of sums: rounding the lse of the whole would cost 5e-4 of them at 1e4."""
    out_partial, lse_partial = partials(device)
    lse_partial += shift
    exact, _ = plain_combine(out_partial, lse_partial)
    out, _ = flash_attn_combine(out_partial, lse_partial)
    torch.testing.assert_close(out.double(), exact, rtol=0, atol=3e-6)


@pytest.mark.parametrize("causal", (False, True))
def test_parts_of_the_keys_give_the_whole(device, causal):
    """The parts' LSEs come as the attention functions return them: (batch, heads, seqlen), +inf for no key."""
    dtype = torch.float32 if device == "cpu" else torch.float16
    q, k, v = (torch.randn(2, n, 4, 64, device=device, dtype=dtype) for n in (70, 150, 150))
    parts = [(k[:, :50], v[:, :50], {"window_size": (-1, -1)}), (k[:, 50:], v[:, 50:], {"causal": causal})]
    # of the first 50 keys every query sees all, as the queries are at the last 70 of 150 keys
    results = [flash_attn_func(q, ki, vi, return_attn_probs=True, **options)[:2] for ki, vi, options in parts]
    out_partial = torch.stack([out for out, _ in results])
    lse_partial = torch.stack([lse for _, lse in results]).transpose(2, 3)
    out, lse = flash_attn_combine(out_partial, lse_partial)
    exact, plain = (attention(q, k, v, causal=causal, dtype=t) for t in (torch.float64, dtype))
    assert_accurate(out, exact.out, plain.out)
    assert_accurate(lse.transpose(1, 2), exact.lse, plain.lse, "lse")


def test_strided_inputs_are_left_alone(device):
    out_partial, lse_partial = partials(device)
    wide = torch.full((*out_partial.shape[:-1], 80), math.nan, device=device)
    wide[..., 9:73] = out_partial
    views = (wide[..., 9:73], lse_partial.transpose(1, 3).contiguous().transpose(1, 3))
    expected = flash_attn_combine(out_partial, lse_partial)
    copies = [x.clone() for x in views]
    out = torch.zeros(2, 5, 4, 80, device=device)
    for inputs in (views, (out_partial, lse_partial)):
        for given in (None, out[..., 9:73]):
            result = flash_attn_combine(*inputs, out=given)
            assert all(torch.equal(a, b) for a, b in zip(result, expected))
    assert all(torch.equal(a, b) for a, b in zip(views, copies))
    transposed = out_partial.transpose(-1, -2).contiguous().transpose(-1, -2)
    assert torch.equal(flash_attn_combine(transposed, lse_partial)[0], expected[0])


def test_empty(device):
    out, lse = flash_attn_combine(torch.empty(0, 2, 3, 4, 8, device=device), torch.empty(0, 2, 3, 4, device=device))
    assert (out == 0).all() and (lse == INF).all() and out.shape == (2, 3, 4, 8)
    out, lse = flash_attn_combine(torch.empty(3, 2, 0, 4, 8, device=device), torch.empty(3, 2, 0, 4, device=device))
    assert out.shape == (2, 0, 4, 8) and lse.shape == (2, 0, 4)


@pytest.mark.devices("cpu")
def test_gradcheck(device):
    out_partial, lse_partial = (x.requires_grad_() for x in partials(device, 3, 1, 2, 2, 4, torch.float64))
    assert torch.autograd.gradcheck(flash_attn_combine, (out_partial, lse_partial))
    assert torch.autograd.gradgradcheck(flash_attn_combine, (out_partial, lse_partial))


def leaves(*tensors):
    return [x.detach().clone().requires_grad_() for x in tensors]


@pytest.mark.parametrize("wanted", ("out", "lse", "both"))
@pytest.mark.parametrize("dtype", ("float32", "float16"))
def test_gradients_against_the_definition(device, wanted, dtype):
    """One part of some rows has no key: gradients 0 there, as if the part did not exist."""
    out_partial, lse_partial = partials(device, 4, dtype=getattr(torch, dtype))
    ours, exact = leaves(out_partial, lse_partial), leaves(out_partial.double(), lse_partial.double())
    with torch.no_grad():
        ours[0][1, 0], ours[1][1, 0] = math.nan, INF

    def total(out, lse):
        chosen = {"out": (out,), "lse": (lse,), "both": (out, lse)}[wanted]
        return sum(x.double().sin().sum() for x in chosen)

    total(*flash_attn_combine(*ours)).backward()
    full = plain_combine(exact[0][:, 1:], exact[1][:, 1:])
    partly = plain_combine(exact[0][[0, 2, 3], :1], exact[1][[0, 2, 3], :1])
    total(*(torch.cat(pair) for pair in zip(partly, full))).backward()
    for name, mine, theirs in zip(("out_partial", "lse_partial"), ours, exact):
        grad = torch.zeros_like(mine) if mine.grad is None else mine.grad
        expected = torch.zeros_like(theirs) if theirs.grad is None else theirs.grad
        assert grad.dtype == mine.dtype and (grad[1, 0] == 0).all(), name
        tolerance = 2e-2 if dtype == "float16" else 1e-5
        torch.testing.assert_close(grad.double(), expected, rtol=tolerance, atol=tolerance)


def test_gradient_of_a_row_without_keys_is_zero(device):
    out_partial, lse_partial = partials(device)
    lse_partial[:, 0, 1] = -INF
    out_partial[:, 0, 1] = math.nan
    inputs = leaves(out_partial, lse_partial)
    out, lse = flash_attn_combine(*inputs)
    (out.sum() + lse[:, [0, 2, 3, 4]].sum() + lse[0, 1].sum()).backward()
    assert all(torch.isfinite(x.grad).all() and (x.grad[:, 0, 1] == 0).all() for x in inputs)


def test_gradients_under_torch_func(device):
    out_partial, lse_partial = partials(device)
    grad = torch.func.grad(lambda x, y: flash_attn_combine(x, y)[0].sin().sum(), argnums=(0, 1))(
        out_partial, lse_partial
    )
    inputs = leaves(out_partial, lse_partial)
    flash_attn_combine(*inputs)[0].sin().sum().backward()
    assert all(torch.equal(a, b.grad) for a, b in zip(grad, inputs))


def test_refusals(device):
    out_partial, lse_partial = partials(device)
    for message, arguments in (
        ("out_partial: expected 5 dimensions", (out_partial[0], lse_partial)),
        ("lse_partial: expected shape", (out_partial, lse_partial[:2])),
        ("lse_partial: expected shape", (out_partial, lse_partial.transpose(2, 3))),
        ("lse_partial: expected dtype float32", (out_partial, lse_partial.half())),
        ("out_partial: expected dtype", (out_partial.int(), lse_partial)),
        ("out: expected shape", (out_partial, lse_partial, out_partial)),
        ("out: expected dtype", (out_partial, lse_partial, out_partial[0].int())),
        ("out_dtype: expected None or the dtype of out", (out_partial, lse_partial, out_partial[0], torch.float16)),
    ):
        with pytest.raises(RuntimeError, match="^" + message):
            flash_attn_combine(*arguments)
    with pytest.raises(RuntimeError, match="^out: expected None where gradients are recorded"):
        flash_attn_combine(out_partial.clone().requires_grad_(), lse_partial, out_partial[0])
    with pytest.raises(TypeError, match="^lse_partial: expected a Tensor, got list"):
        flash_attn_combine(out_partial, [lse_partial])
