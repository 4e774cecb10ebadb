"""flash_attn.fp8.quantize and quantize_qkv: quantized and descales to the bit, bounds, smoothing and rotation."""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch
from reference import attention

from flash_attn import eight_bit, fp8

E4M3, INT8 = torch.float8_e4m3fn, torch.int8
FORMATS = (E4M3, INT8)
GRANULARITIES = ("tensor", "head", "token", "channel")


def every_half(dtype, device):
    """All values of a 16-bit format, NaN and infinities among them, as (1, 128, 8, 64)."""
    return torch.arange(-(2**15), 2**15, dtype=torch.int32).to(torch.int16).view(dtype).view(1, 128, 8, 64).to(device)


def e4m3_table():
    """The 127 finite values that are not negative, by their bits, from the definition of the format."""
    exponent, mantissa = np.divmod(np.arange(127), 8)
    return np.where(exponent == 0, mantissa * 2.0**-9, (1 + mantissa / 8) * 2.0 ** (exponent - 7.0))


def nearest_even(x, table):
    """Indices of the nearest entries of an ascending table for float64 values; even indices win ties."""
    above = np.clip(np.searchsorted(table, x), 1, len(table) - 1)
    low, high = table[above - 1], table[above]
    upper = (x - low > high - x) | ((x - low == high - x) & (above % 2 == 0))
    return above - 1 + upper


def expected_values(x, descale, dtype):
    """8-bit values by the documented arithmetic in numpy: x and descale float32, of one shape."""
    with np.errstate(all="ignore"):
        scaled = x * (np.float32(1) / descale)
    assert scaled.dtype == np.float32
    if dtype is INT8:
        return np.where(np.isnan(scaled), 0, np.rint(np.clip(scaled, -127, 127))).astype(np.int8)
    magnitude = np.where(np.isnan(scaled), 0, np.minimum(np.abs(scaled), 448)).astype(np.float64)
    found = nearest_even(magnitude, e4m3_table()) | np.where(np.signbit(scaled), 0x80, 0)
    return np.where(np.isnan(scaled), 0x7F, found).astype(np.uint8)


def bits(quantized):
    return quantized.cpu().contiguous().view(torch.int8 if quantized.dtype is INT8 else torch.uint8).numpy()


def broadcast_descale(descale, granularity, x):
    """The descale of `quantize` in a shape that broadcasts to x."""
    if granularity == "tensor":
        return descale
    if granularity == "token":
        return descale.unsqueeze(-1) if x.dim() == 4 else descale.transpose(1, 2)
    return descale.unsqueeze(x.dim() - 3) if granularity == "channel" else descale.unsqueeze(-1).unsqueeze(x.dim() - 3)


def test_table_is_that_of_torch():
    assert np.array_equal(e4m3_table(), torch.arange(127, dtype=torch.uint8).view(E4M3).double().numpy())


@pytest.mark.parametrize("dtype", FORMATS)
@pytest.mark.parametrize("half", (torch.float16, torch.bfloat16))
@pytest.mark.parametrize("scale", (1.0, 0.0137, 3.0e-5, 2.0**-126, 1e30))
def test_every_half_precision_value_is_rounded_to_nearest(device, dtype, half, scale):
    x = every_half(half, device)
    descale = torch.tensor(scale, device=device)
    expected = expected_values(x.float().cpu().numpy(), np.float32(scale), dtype)
    assert np.array_equal(bits(eight_bit.encode(x, descale, dtype)), expected)


@pytest.mark.parametrize("dtype", FORMATS)
@pytest.mark.parametrize("granularity", GRANULARITIES)
@pytest.mark.parametrize("packed", (False, True))
def test_random_values_to_the_bit(device, dtype, granularity, packed):
    x = torch.randn(3, 17, 4, 24) * torch.logspace(-6, 6, 24)
    x = x.flatten(0, 1) if packed else x
    axes = {"tensor": None, "head": (x.dim() - 3, x.dim() - 1), "token": x.dim() - 1, "channel": x.dim() - 3}
    largest = np.abs(x.numpy()).max(axes[granularity], keepdims=True)
    expected = np.maximum(largest * np.float32(1 / (127 if dtype is INT8 else 448)), np.float32(2.0**-126))
    quantized, descale = fp8.quantize(x.to(device), granularity, dtype)
    shapes = {"tensor": (), "head": (3, 4), "token": (3, 17, 4), "channel": (3, 4, 24)}
    if packed:
        shapes = {"tensor": (), "head": (4,), "token": (51, 1, 4), "channel": (4, 24)}
    assert descale.shape == shapes[granularity] and descale.dtype == torch.float32 and quantized.dtype is dtype
    shown = broadcast_descale(descale.cpu(), granularity, x).numpy()
    assert np.array_equal(shown.reshape(expected.shape), expected.astype(np.float32))
    assert np.array_equal(bits(quantized), expected_values(x.numpy(), np.broadcast_to(expected, x.shape), dtype))


@pytest.mark.parametrize("packed", (False, True))
def test_descales_of_tokens_lie_heads_first(device, packed):
    """Else a kernel reads a sector of memory for each token of a head."""
    x = torch.randn(3, 17, 4, 24, device=device)
    descale = fp8.quantize(x.flatten(0, 1) if packed else x, "token")[1]
    tokens, heads = (0, 2) if packed else (1, 2)
    assert (descale.stride(tokens), descale.stride(heads)) == (1, descale.shape[tokens])


@pytest.mark.parametrize("granularity", GRANULARITIES)
def test_round_trip_error_bounds(device, granularity):
    """Half a unit of e4m3, half a step of int8; the products in float32 add 2^-22 of the value."""
    for seed in range(20):
        generator = torch.Generator().manual_seed(seed)
        x = torch.randn(2, 9, 3, 16, generator=generator, dtype=torch.float32) * 10.0 ** (seed - 10)
        x = (x * (torch.rand(x.shape, generator=generator) < 0.9)).to(device)
        for dtype in FORMATS:
            quantized, descale = fp8.quantize(x, granularity, dtype)
            scale = broadcast_descale(descale, granularity, x).double()
            value = quantized.double() * scale
            step = scale * 0.5 if dtype is INT8 else torch.maximum(value.abs() * 2.0**-4, scale * 2.0**-10)
            assert ((value - x.double()).abs() <= step * (1 + 2.0**-19) + value.abs() * 2.0**-22).all()


@pytest.mark.parametrize("dtype", FORMATS)
@pytest.mark.parametrize("granularity", GRANULARITIES)
def test_zeros_empty_and_subnormals(device, dtype, granularity):
    quantized, descale = fp8.quantize(torch.zeros(2, 3, 2, 8, device=device), granularity, dtype)
    assert (quantized.float() == 0).all() and (descale == 2.0**-126).all()
    tiny = torch.full((2, 3, 2, 8), 1e-45, device=device)
    quantized, descale = fp8.quantize(tiny, granularity, dtype)
    assert (descale == 2.0**-126).all() and (quantized.float() == 0).all()
    for shape in ((2, 0, 2, 8), (0, 3, 2, 8), (2, 3, 2, 0)):
        quantized, descale = fp8.quantize(torch.zeros(shape, device=device), granularity, dtype)
        assert quantized.shape == shape and not descale.isnan().any()


def test_saturation_infinities_and_nan(device):
    x = torch.randn(1, 4, 2, 8, device=device)
    x[0, 1, 0, 3], x[0, 2, 1, 5], x[0, 3, 0, 0] = math.inf, -math.inf, math.nan
    quantized, descale = fp8.quantize(x, "token")
    largest = torch.finfo(torch.float32).max
    assert descale[0, 1, 0] == descale[0, 2, 1] == largest * torch.tensor(1 / 448).item()
    assert quantized[0, 1, 0, 3].float() == 448 and quantized[0, 2, 1, 5].float() == -448
    assert bits(quantized)[0, 3, 0, 0] == 0x7F
    assert torch.isfinite(descale).all() and quantized.float().isnan().sum() == 1
    quantized, descale = fp8.quantize(x, "token", INT8)
    assert descale.isnan().nonzero().tolist() == [[0, 3, 0]]
    assert (quantized[0, 3, 0] == 0).all() and quantized[0, 1, 0, 3] == 127 and quantized[0, 2, 1, 5] == -127
    given = eight_bit.encode(x * 1000, torch.tensor(0.5, device=device), E4M3)
    assert given.float().nan_to_num(0).abs().max() == 448 and given.float().isnan().sum() == 1


@pytest.mark.parametrize("granularity", GRANULARITIES)
@pytest.mark.parametrize("dtype", FORMATS)
def test_strides_change_nothing(device, granularity, dtype):
    x = torch.randn(2, 6, 4, 16, device=device)
    expected = fp8.quantize(x, granularity, dtype)
    layouts = [
        x.transpose(0, 1).contiguous().transpose(0, 1), x.permute(0, 2, 3, 1).contiguous().permute(0, 3, 1, 2),
        torch.stack([x, -x], -1)[..., 0], torch.cat([x, x], 1)[:, :6],
    ]  # fmt: skip
    for layout in layouts:
        assert not layout.is_contiguous()
        quantized, descale = fp8.quantize(layout, granularity, dtype)
        assert np.array_equal(bits(quantized), bits(expected[0])) and torch.equal(descale, expected[1])
    quantized, descale = fp8.quantize(x[:1].expand(2, -1, -1, -1), granularity, dtype)
    alone = fp8.quantize(x[:1], granularity, dtype)
    assert np.array_equal(bits(quantized[1:]), bits(alone[0]))


@pytest.mark.parametrize("half", (torch.float16, torch.bfloat16))
def test_powers_of_two_are_exact_in_half_precision(device, half):
    x = torch.randn(2, 50, 4, 16, device=device).to(half)
    quantized, descale = fp8.quantize(x, "head", power_of_two=True)
    exact = fp8.quantize(x, "head")[1]
    assert torch.equal(descale.log2(), exact.log2().ceil()) and (descale < 2 * exact).all()
    value = quantized.double() * descale[:, None, :, None].double()
    assert torch.equal(eight_bit.decode(quantized, descale[:, None, :, None], half).double(), value)
    assert torch.equal(fp8.quantize(torch.full((1, 1, 1, 1), 448.0), power_of_two=True)[1], torch.tensor(1.0))


FLOATS = (torch.float16, torch.bfloat16, torch.float32, torch.float64)


def of_any_size(dtype, device):
    """(1, 4, heads, 16), each head with one order of magnitude, from the largest finite values to the smallest."""
    limits = torch.finfo(torch.float32 if dtype is torch.float64 else dtype)
    sizes = [limits.max * part for part in (1.0, 0.97, 0.95, 0.9, 0.51)] + [1.0, limits.tiny, limits.tiny * limits.eps]
    x = torch.rand(1, 4, len(sizes), 16, dtype=torch.float64, device=device) * 2 - 1
    x[:, 0, :, 0], x[:, 1, :, 1] = 1.0, -1.0
    return (x * torch.tensor(sizes, dtype=torch.float64, device=device)[:, None]).to(dtype)


@pytest.mark.parametrize("format", FORMATS)
@pytest.mark.parametrize("dtype", FLOATS)
def test_powers_of_two_of_values_of_any_size(device, dtype, format):
    """quantized * descale is finite in x's dtype, and within the bound or the largest finite multiple of descale."""
    x = of_any_size(dtype, device)
    quantized, descale = fp8.quantize(x, "head", format, power_of_two=True)
    scale = descale[:, None, :, None]
    value = eight_bit.decode(quantized, scale, dtype)
    largest = min(torch.finfo(dtype).max, torch.finfo(torch.float32).max)
    assert (value.double().abs() <= largest).all()
    step = scale.double() * 0.5
    if format is E4M3:
        step = torch.maximum(value.double().abs() * 2.0**-4, scale.double() * 2.0**-10)
    next_value = value.double().abs() + 2 * step
    assert (((value.double() - x.double()).abs() <= step) | (next_value > largest)).all()


@pytest.mark.parametrize("rotate", (False, True))
@pytest.mark.parametrize("dtype", FLOATS)
def test_quantize_qkv_of_values_of_any_size(device, dtype, rotate):
    x = of_any_size(dtype, device)
    result = fp8.quantize_qkv(x, x.abs(), -x, rotate=rotate)
    for name in ("q", "k", "v", "q_descale", "k_descale", "v_descale"):
        assert torch.isfinite(getattr(result, name).float()).all(), name
    if dtype is torch.float16:
        assert torch.isfinite(result.lse_shift).all()
    exact = x.abs().double().mean(1, keepdim=True)
    smooth = x.abs().double() - exact if not rotate else fp8.hadamard(x.abs().double() - exact)
    value = dequantized(result.k, result.k_descale)
    largest = smooth.abs().amax((1, 3), keepdim=True).clamp(min=2.0**-120)
    fits = largest < torch.finfo(torch.float32).max  # rotated ones may not
    assert ((value - smooth).abs() <= largest * 2.0**-4).logical_or(~fits).all()


def test_half_and_double_inputs(device):
    x = torch.randn(2, 6, 4, 16, device=device)
    for wide, same in ((x.half(), x.half().float()), (x.bfloat16(), x.bfloat16().float()), (x.double(), x)):
        for ours, expected in zip(fp8.quantize(wide, "head"), fp8.quantize(same, "head")):
            assert torch.equal(ours.float(), expected.float())


def test_no_gradient(device):
    x = torch.randn(2, 6, 4, 16, device=device, requires_grad=True)
    assert not any(y.requires_grad for y in fp8.quantize(x, "head"))


@pytest.mark.parametrize("given,message", [
    ({"x": [1.0]}, "x: expected a Tensor, got list"),
    ({"x": torch.zeros(4, 4)}, "x: expected 3 or 4 dimensions"),
    ({"x": torch.zeros(1, 4, 4, 4, dtype=torch.int32)}, "x: expected a floating point dtype .*, got int32"),
    ({"x": torch.zeros(1, 4, 4, 4).to(E4M3)}, "x: expected a floating point dtype .*, got float8_e4m3fn"),
    ({"granularity": "page"}, "granularity: expected one of tensor, head, token, channel, got 'page'"),
    ({"dtype": torch.float8_e5m2}, "dtype: expected torch.float8_e4m3fn or torch.int8, got torch.float8_e5m2"),
    ({"power_of_two": 3}, "power_of_two: expected a bool"),
])  # fmt: skip
def test_bad_arguments_are_named(given, message):
    with pytest.raises((RuntimeError, TypeError), match=f"^{message}"):
        fp8.quantize(**{"x": torch.zeros(1, 4, 4, 4), **given})


# ---- quantize_qkv ----


@pytest.mark.parametrize("head_dim", (16, 64, 96, 40))
def test_hadamard_is_orthogonal_and_spreads(device, head_dim):
    matrix = fp8.hadamard(torch.eye(head_dim, dtype=torch.float64, device=device))
    torch.testing.assert_close(matrix @ matrix.T, torch.eye(head_dim, dtype=torch.float64, device=device))
    size = head_dim & -head_dim
    assert (matrix.abs() < size**-0.5 + 1e-9).all()
    flat = fp8.hadamard(torch.ones(head_dim, dtype=torch.float64, device=device))
    assert flat.abs().max() <= 2**0.5 + 1e-9


def dequantized(x, descale):
    return x.double() * descale.double().unsqueeze(-1).unsqueeze(x.dim() - 3)


@pytest.mark.parametrize("rotate", (False, True))
@pytest.mark.parametrize("smooth_k", (False, True))
@pytest.mark.parametrize("packed", (False, True))
def test_quantised_inputs_give_the_same_attention(device, smooth_k, rotate, packed):
    """Keys with a large mean: out and, with the shift, LSE are those of the inputs within the error of 8 bits."""
    q, k, v = (
        torch.randn(2, 40, 4, 32),
        torch.randn(2, 70, 2, 32) + 2 * torch.randn(1, 1, 2, 32),
        torch.randn(2, 70, 2, 32),
    )
    if packed:
        q, k, v = (x[0] for x in (q, k, v))
    x = fp8.quantize_qkv(*(t.to(device) for t in (q, k, v)), smooth_k=smooth_k, rotate=rotate)
    assert x.q.dtype == x.k.dtype == x.v.dtype == E4M3
    assert x.q_descale.shape == ((4,) if packed else (2, 4)) and x.k_descale.shape == ((2,) if packed else (2, 2))
    values = (dequantized(x.q, x.q_descale), dequantized(x.k, x.k_descale), dequantized(x.v, x.v_descale))
    ours = attention(*(t.cpu()[None] if packed else t.cpu() for t in values))
    exact = attention(*(t[None] if packed else t for t in (q, k, v)))
    error = (ours.out - exact.out).square().mean().sqrt() / exact.out.square().mean().sqrt()
    assert error < (0.12 if smooth_k else 0.5)
    assert (x.lse_shift is not None) == smooth_k
    if smooth_k:
        shift = x.lse_shift.cpu()[None] if packed else x.lse_shift.cpu()
        assert (ours.lse + 32**-0.5 * shift.double() - exact.lse).abs().max() < 0.5
        assert shift.abs().max() > 1  # it matters


def test_smoothing_is_exact_but_for_rounding(device):
    """The shift is that of the quantised queries: scores of smoothed keys plus it are scores of the unsmoothed ones."""
    q, k, v = torch.randn(1, 9, 2, 16), torch.randn(1, 13, 1, 16) + 3, torch.randn(1, 13, 1, 16)
    x = fp8.quantize_qkv(q.to(device), k.to(device), v.to(device))
    queries, smoothed = dequantized(x.q, x.q_descale).cpu(), dequantized(x.k, x.k_descale).cpu()
    restored = attention(queries, smoothed + k.double().mean(1, keepdim=True), v)
    ours = attention(queries, smoothed, v).lse + 0.25 * x.lse_shift.double().cpu()
    torch.testing.assert_close(ours, restored.lse, rtol=0, atol=1e-5)


@pytest.mark.parametrize("shapes,message", [
    (((1, 4, 3, 8), (1, 4, 2, 8), (1, 4, 2, 8)), "q: expected a head count divisible by that of k .2., got 3"),
    (((1, 4, 2, 8), (4, 2, 8), (1, 4, 2, 8)), "k: expected 4 dimensions"),
    (((1, 4, 2, 8), (1, 4, 2, 8), (4, 2, 8)), "v: expected 4 dimensions"),
    (((4, 8), (4, 8), (4, 8)), "q: expected 3 or 4 dimensions"),
])  # fmt: skip
def test_bad_shapes_are_named(shapes, message):
    with pytest.raises(RuntimeError, match=f"^{message}"):
        fp8.quantize_qkv(*(torch.zeros(shape) for shape in shapes), smooth_k=False)


def test_no_heads(device):
    q, k = torch.zeros(2, 4, 0, 8, device=device), torch.zeros(2, 5, 0, 8, device=device)
    x = fp8.quantize_qkv(q, k, k)
    assert (x.q.shape, x.v.shape, x.lse_shift.shape) == (q.shape, k.shape, (2, 0, 4))
