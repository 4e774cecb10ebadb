"""Layer norm and RMS norm of a sum against a float64 reference: every feature with its gradients, dtypes, sizes."""

from __future__ import annotations

import pytest
import torch
from harness import no_synchronisation
from interpreted import run_interpreted
from reference import assert_accurate, assert_gradient_accurate

from flash_attn.ops.triton.layer_norm import (
    RMSNorm,
    layer_norm_fn,
    layer_norm_linear_fn,
    layer_norm_ref,
    rms_norm_fn,
    rms_norm_ref,
)

DTYPES = (torch.float32, torch.bfloat16, torch.float16)
INPUTS = ("x", "weight", "bias", "residual", "x1", "weight1", "bias1")
# Inputs besides x and weight, then options.
FEATURES = {
    "plain": ("bias", {}),
    "no bias": ("", {}),
    "zero centered": ("bias", {"zero_centered_weight": True}),
    "prenorm": ("bias", {"prenorm": True}),
    "residual": ("bias residual", {}),
    "residual prenorm": ("residual", {"prenorm": True}),
    "float32 residual": ("bias residual32", {"prenorm": True}),
    "float32 sum": ("bias", {"prenorm": True, "residual_in_fp32": True}),
    "float32 out": ("bias residual", {"prenorm": True, "out_dtype": torch.float32}),
    "two inputs": ("bias x1", {"prenorm": True}),
    "two outputs": ("bias weight1 bias1", {}),
    "two of each": ("residual x1 weight1", {"prenorm": True, "zero_centered_weight": True}),
    "rowscale": ("bias rowscale", {}),
    "rowscale residual": ("residual32 rowscale", {"prenorm": True}),
    "dropout": ("bias", {"dropout_p": 0.3}),
    "dropout of two": ("bias residual x1 weight1 bias1", {"dropout_p": 0.4, "prenorm": True}),
    "dropout rowscale": ("residual rowscale", {"dropout_p": 0.1, "prenorm": True}),
}


def problem(feature, shape, dtype, device, weight_dtype=torch.float32):
    """The tensors of a feature, by name."""
    names, _ = FEATURES[feature]
    tensors = {"x": torch.randn(shape, device=device).to(dtype)}
    for name in ["weight", *names.split()]:
        if name in ("residual", "residual32", "x1"):
            tensor = torch.randn(shape, device=device).to(torch.float32 if name == "residual32" else dtype)
        else:
            size = shape[:-1] if name == "rowscale" else shape[-1:]
            tensor = torch.randn(size, device=device).to(dtype if name == "rowscale" else weight_dtype)
        tensors[name.removesuffix("32")] = tensor
    return tensors


def reference(tensors, rms, dtype, masks=(None, None), eps=1e-6, dropout_p=0.0, prenorm=False,
              zero_centered_weight=False, **_):  # fmt: skip
    """The results by definition, every operation in dtype -> list of (out, out1, sum) that apply."""
    given = {name: tensor.to(dtype) for name, tensor in tensors.items()}
    total = given["x"]
    if "rowscale" in given:
        total = total * given["rowscale"][..., None]
    addends = [total, *([given["x1"]] if "x1" in given else [])]
    if dropout_p > 0:
        addends = [x * mask / (1 - dropout_p) for x, mask in zip(addends, masks)]
    total = sum(addends) + (given["residual"] if "residual" in given else 0)
    centered = total if rms else total - total.mean(-1, keepdim=True)
    normed = centered / torch.sqrt((centered * centered).mean(-1, keepdim=True) + eps)
    results = []
    for weight, bias in (("weight", "bias"), ("weight1", "bias1")):
        if weight in given:
            results.append(normed * (given[weight] + (1 if zero_centered_weight else 0)) + given.get(bias, 0))
    return [*results, total] if prenorm else results


def gradients(results, tensors, douts):
    wanted = [tensors[name] for name in INPUTS if name in tensors]
    return torch.autograd.grad(results, wanted, [dout.to(result.dtype) for dout, result in zip(douts, results)])


def as_leaves(tensors, dtype=None):
    return {name: tensor.detach().to(dtype or tensor.dtype).requires_grad_(name in INPUTS)
            for name, tensor in tensors.items()}  # fmt: skip


def compare(tensors, rms, options):
    """Results and gradients against float64; the yardstick is plain PyTorch in x's dtype."""
    leaves = as_leaves(tensors)
    *results, mask, mask1 = layer_norm_fn(
        **{"bias": None, **leaves}, **options, is_rms_norm=rms, return_dropout_mask=True
    )
    masks = (mask, mask1)
    dropout = options.get("dropout_p", 0.0) > 0
    assert [mask is not None for mask in masks] == [dropout, dropout and "x1" in tensors]
    exact, plain = as_leaves(tensors, torch.float64), as_leaves(tensors, tensors["x"].dtype)
    expected = reference(exact, rms, torch.float64, masks, **options)
    yardstick = reference(plain, rms, tensors["x"].dtype, masks, **options)
    assert len(results) == len(expected)
    for result, value, rough in zip(results, expected, yardstick):
        assert_accurate(result, value, rough)
    douts = [torch.randn(value.shape, device=value.device).to(result.dtype) for value, result in zip(expected, results)]
    names = [name for name in INPUTS if name in tensors]
    grads = (gradients(r, t, douts) for r, t in ((results, leaves), (expected, exact), (yardstick, plain)))
    for name, grad, value, rough in zip(names, *grads):
        assert grad.dtype == tensors[name].dtype
        assert_gradient_accurate(grad, value, rough, f"d{name}")
    return results


@pytest.mark.each
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("rms", (False, True), ids=("layer", "rms"))
@pytest.mark.parametrize("feature", FEATURES)
def test_features(device, dtype, rms, feature):
    tensors = problem(feature, (3, 7, 96), dtype, device)
    results = compare(tensors, rms, FEATURES[feature][1])
    options = FEATURES[feature][1]
    assert results[0].dtype == options.get("out_dtype", dtype) and results[0].shape == (3, 7, 96)
    if options.get("prenorm"):
        wide = options.get("residual_in_fp32") or feature == "float32 residual" or feature == "rowscale residual"
        assert results[-1].dtype == (torch.float32 if wide else dtype)


@pytest.mark.each
@pytest.mark.parametrize("dtype", (torch.float32, torch.bfloat16))
@pytest.mark.parametrize("rms", (False, True), ids=("layer", "rms"))
@pytest.mark.parametrize("columns", (1, 5, 128, 1023, 4096, 8200, 20000, 40000))
def test_sizes(device, dtype, rms, columns):
    for rows in (1, 67):
        compare(problem("residual", (rows, columns), dtype, device), rms, {"prenorm": True})


def test_many_rows(device):
    """More rows than programs of the backward, not a multiple of anything."""
    tensors = problem("two of each", (10007, 64), torch.bfloat16, device, weight_dtype=torch.bfloat16)
    compare(tensors, False, FEATURES["two of each"][1])


@pytest.mark.parametrize("rms", (False, True), ids=("layer", "rms"))
def test_strides(device, rms):
    base = torch.randn(4, 6, 200, device=device)
    for x in (
        base.transpose(0, 1),
        base[..., ::2],
        base[..., 3:90],
        base.transpose(1, 2),
        base[:, :1].expand(4, 6, 200),
    ):
        tensors = problem("plain", x.shape, torch.float32, device)
        compare({**tensors, "x": x, "residual": torch.randn(x.shape[::-1], device=device).permute(2, 1, 0)}, rms, {})


def test_one_dimension(device):
    compare(problem("residual", (50,), torch.float32, device), False, {"prenorm": True})


def test_no_rows(device):
    tensors = as_leaves(problem("residual", (0, 4, 30), torch.bfloat16, device))
    out, total = layer_norm_fn(**tensors, prenorm=True)
    (out.sum() + total.sum()).backward()
    assert out.shape == total.shape == tensors["x"].grad.shape == (0, 4, 30)
    assert not tensors["weight"].grad.any() and not tensors["bias"].grad.any()


def test_eps_zero_and_rows_of_no_tile(device):
    """Rows that fill a tile up beyond the last one must not reach the gradients, whatever eps makes of them."""
    compare(problem("plain", (9, 40), torch.float32, device), True, {"eps": 0.0})


def test_constant_rows_in_half_precision(device):
    """Variance 0 and a sum that is rounded when it is kept: gradients as of a constant row, not of its rounding."""
    x = torch.full((4, 64), 1.0, dtype=torch.bfloat16, device=device, requires_grad=True)
    residual = torch.full((4, 64), 2.0**-9, dtype=torch.bfloat16, device=device)
    weight, bias = torch.ones(64, device=device), torch.zeros(64, device=device)
    out = layer_norm_fn(x, weight, bias, residual)
    dout = torch.randn(4, 64, device=device).to(torch.bfloat16)
    (grad,) = torch.autograd.grad(out, x, dout)
    expected = (dout.double() - dout.double().mean(1, keepdim=True)) / 1e-3
    torch.testing.assert_close(grad.double(), expected, rtol=0.01, atol=1.0)
    assert not out.any()


@pytest.mark.parametrize("layout", ("contiguous", "padded", "transposed"))
def test_given_outputs(device, layout):
    def target():
        if layout == "transposed":
            return torch.empty(5, 40, 3, device=device).transpose(1, 2)
        return torch.empty(5, 3, 40 if layout == "contiguous" else 60, device=device)[..., :40]

    tensors = as_leaves(problem("residual", (5, 3, 40), torch.bfloat16, device))
    out, residual_out = target(), target().to(torch.float16)
    results = layer_norm_fn(**tensors, prenorm=True, out=out, residual_out=residual_out)
    expected = reference(as_leaves(tensors, torch.float64), False, torch.float64, prenorm=True)
    for result, given, value, tolerance in zip(results, (out, residual_out), expected, (1e-5, 1e-3)):
        assert result.data_ptr() == given.data_ptr() and result.dtype == given.dtype and result.requires_grad
        torch.testing.assert_close(given.detach().double(), value.detach(), rtol=tolerance, atol=tolerance)
    results[0].sum().backward()
    assert tensors["x"].grad is not None and tensors["weight"].grad is not None
    x, weight = tensors["x"].detach(), tensors["weight"].detach()
    plain = target()
    assert rms_norm_fn(x, weight, None, out=plain) is plain


def test_unused_outputs(device):
    """Gradients through one of several outputs alone."""
    tensors = problem("two outputs", (6, 50), torch.float32, device)
    for used in range(3):
        leaves, exact = as_leaves(tensors), as_leaves(tensors, torch.float64)
        result = layer_norm_fn(**leaves, prenorm=True)[used]
        expected = reference(exact, False, torch.float64, prenorm=True)[used]
        dout = torch.randn(6, 50, device=device)
        (grad,) = torch.autograd.grad(result, leaves["x"], dout, retain_graph=True)
        (value,) = torch.autograd.grad(expected, exact["x"], dout.double(), retain_graph=True)
        torch.testing.assert_close(grad.double(), value, rtol=1e-4, atol=1e-5)


def test_dropout_masks(device):
    """Kept with probability 1 - p, independently for x and x1, anew with each call, repeatable by the seed."""
    x, weight = torch.ones(400, 512, device=device), torch.ones(512, device=device)

    def masks():
        return layer_norm_fn(x, weight, None, x1=x, dropout_p=0.25, return_dropout_mask=True)[1:]

    torch.manual_seed(1)
    first, second, third = masks(), masks(), None
    torch.manual_seed(1)
    third = masks()
    for mask in (*first, *second):
        assert abs(mask.float().mean().item() - 0.75) < 5 * (0.25 * 0.75 / mask.numel()) ** 0.5
        for dim in (0, 1):
            assert (mask.float().mean(dim) - 0.75).abs().max() < 6 * (0.25 * 0.75 / mask.shape[dim]) ** 0.5
    agree = 0.75**2 + 0.25**2
    for a, b in ((*first,), (first[0], second[0])):
        assert abs((a == b).float().mean().item() - agree) < 0.01
    assert torch.equal(first[0], third[0]) and torch.equal(first[1], third[1])


@pytest.mark.parametrize("columns", (128, 4096))
def test_weight_gradients_are_reproducible(device, columns):
    tensors = as_leaves(problem("two outputs", (3001, columns), torch.bfloat16, device))
    dout = torch.randn(3001, columns, device=device)
    results = []
    for _ in range(3):
        out, out1 = layer_norm_fn(**tensors)
        results.append(gradients([out, out1], tensors, [dout, dout]))
    for again in results[1:]:
        assert all(torch.equal(a, b) for a, b in zip(results[0], again))


@pytest.mark.parametrize("rms", (False, True), ids=("layer", "rms"))
@pytest.mark.parametrize("feature", ("two of each", "rowscale residual", "dropout of two"))
def test_reference_functions(device, rms, feature):
    tensors = problem(feature, (4, 60), torch.bfloat16, device)
    options = FEATURES[feature][1]
    masks = [torch.rand(4, 60, device=device) > options["dropout_p"] for _ in "ab"] if "dropout_p" in options else ()
    named = dict(zip(("dropout_mask", "dropout_mask1"), masks))
    function = rms_norm_ref if rms else layer_norm_ref
    results = function(**{"bias": None, **tensors}, **options, **named, upcast=True)
    expected = reference(tensors, rms, torch.float64, masks, **options)
    for result, value in zip(results, expected):
        torch.testing.assert_close(result.double(), value, rtol=2**-7, atol=2**-7)
    assert [r.dtype for r in results] == [torch.bfloat16] * (len(results) - 1) + [torch.float32]


@pytest.mark.parametrize("zero_centered", (False, True))
def test_module(device, zero_centered):
    module = RMSNorm(70, eps=1e-5, zero_centered_weight=zero_centered, device=device)
    expected = torch.nn.RMSNorm(70, eps=1e-5, device=device)
    assert set(module.state_dict()) == {"weight"} and module.bias is None
    x, residual = torch.randn(2, 3, 9, 70, device=device)
    torch.testing.assert_close(module(x), expected(x))
    out, total = module(x, residual, prenorm=True, residual_in_fp32=True)
    torch.testing.assert_close(total, x + residual)
    torch.testing.assert_close(out, expected(x + residual))
    dropped = RMSNorm(70, dropout_p=0.5, device=device)
    assert torch.equal(dropped.eval()(x), dropped.eval()(x))
    assert not torch.equal(dropped.train()(x), dropped.train()(x))


@pytest.mark.parametrize("rms", (False, True), ids=("layer", "rms"))
def test_norm_and_linear(device, rms):
    x, residual = torch.randn(2, 5, 32, device=device, requires_grad=True).unbind(0)
    weight, bias = torch.randn(2, 32, device=device).unbind(0)
    matrix = torch.randn(24, 32, device=device, requires_grad=True)
    shift = torch.randn(24, device=device)
    out, total = layer_norm_linear_fn(x, weight, bias, matrix, shift, residual, 1e-5, True, False, rms)
    normed, expected_total = reference(
        {"x": x, "weight": weight, "bias": bias, "residual": residual}, rms, torch.float64, eps=1e-5, prenorm=True
    )
    expected = normed @ matrix.double().t() + shift
    torch.testing.assert_close(out.double(), expected, rtol=1e-4, atol=1e-4)
    torch.testing.assert_close(total.double(), expected_total)
    grads = (torch.autograd.grad(y.sum(), (x, matrix), retain_graph=True) for y in (out, expected))
    for grad, value in zip(*grads):
        torch.testing.assert_close(grad, value, rtol=1e-3, atol=1e-3)
    assert torch.equal(layer_norm_linear_fn(x, weight, bias, matrix, shift, residual, 1e-5, is_rms_norm=rms), out)


def test_compiled(device):
    tensors = as_leaves(problem("residual", (6, 96), torch.bfloat16, device))
    torch._dynamo.reset()
    compiled = torch.compile(
        lambda t: layer_norm_fn(**t, prenorm=True),
        backend="inductor" if device == "cuda" else "aot_eager",
        fullgraph=True,
    )
    results, eager = compiled(tensors), layer_norm_fn(**tensors, prenorm=True)
    douts = torch.randn(2, 6, 96, device=device).unbind(0)
    for actual, expected in zip(
        (*results, *gradients(results, tensors, douts)), (*eager, *gradients(eager, tensors, douts))
    ):
        torch.testing.assert_close(actual, expected, rtol=2**-6, atol=2**-5)


@pytest.mark.devices("cuda")
def test_no_synchronisation(device):
    tensors = as_leaves(problem("dropout of two", (50, 96), torch.bfloat16, device))
    layer_norm_fn(**tensors, dropout_p=0.5)[0].sum().backward()
    with no_synchronisation():
        layer_norm_fn(**tensors, dropout_p=0.5)[0].sum().backward()
    assert tensors["x"].grad.any()


@pytest.mark.devices("cuda")
def test_second_backward_is_refused(device):
    tensors = as_leaves(problem("plain", (5, 30), torch.float32, device))
    loss = layer_norm_fn(**tensors).square().sum()
    (grad,) = torch.autograd.grad(loss, tensors["x"], create_graph=True)
    with pytest.raises(RuntimeError, match="^layer_norm_fn: expected one backward, got a second"):
        (loss + grad.square().sum()).backward()


@pytest.mark.big
@pytest.mark.devices("cuda")
def test_more_than_2_31_elements(device):
    rows, columns = 70000, 32768
    x = torch.empty(rows, columns, dtype=torch.bfloat16, device=device).normal_().requires_grad_()
    weight = torch.randn(columns, device=device)
    rms_norm_fn(x, weight, None).backward(torch.ones((), dtype=torch.bfloat16, device=device).expand(rows, columns))
    last = {"x": x.detach()[-3:].requires_grad_(), "weight": weight}
    (expected,) = torch.autograd.grad(reference(last, True, torch.float64)[0].sum(), last["x"])
    torch.testing.assert_close(x.grad[-3:], expected, rtol=2**-7, atol=2**-7)


INTERPRETED = """
import itertools, torch
from flash_attn.ops.triton.layer_norm import NormOptions, layer_norm_ref, rms_norm_ref
from flash_attn.ops.triton.layer_norm_launch import FusedNorm

torch.manual_seed(0)
def leaf(*shape):
    return torch.randn(*shape, requires_grad=True)

for columns, rms, full, dropout_p in itertools.product((1, 24, 300), (False, True), (False, True), (0.0, 0.3)):
    x, weight, bias = leaf(3, 5, columns), leaf(columns), leaf(columns)
    residual, x1 = (leaf(3, 5, columns) if full else None for _ in "ab")
    weight1, bias1 = (leaf(columns) if full else None for _ in "ab")
    rowscale = None if full else torch.randn(3, 5)
    options = NormOptions(1e-3, dropout_p, True, full, rms, True, torch.float32, torch.float32, True)
    tensors = (x, weight, bias, residual, x1, weight1, bias1)
    *outs, mask, mask1 = FusedNorm.apply(*tensors, rowscale, (None, None), options)
    expected = (rms_norm_ref if rms else layer_norm_ref)(
        *tensors, 1e-3, dropout_p, rowscale, True, full, dropout_mask=mask, dropout_mask1=mask1
    )
    outs = [out for out in outs if out is not None]
    inputs = [tensor for tensor in tensors if tensor is not None]
    douts = [torch.randn(3, 5, columns) for _ in outs]
    outs += torch.autograd.grad(outs, inputs, douts)
    for actual, exact in zip(outs, [*expected, *torch.autograd.grad(expected, inputs, douts)]):
        torch.testing.assert_close(actual, exact, rtol=1e-3, atol=1e-3)
print("equal")
"""


def test_triton_kernels_under_the_interpreter():
    pytest.importorskip("triton")
    run_interpreted(INTERPRETED)


def test_bad_arguments(device):
    x, weight = torch.randn(2, 3, 8, device=device), torch.ones(8, device=device)
    cases = [
        (lambda: layer_norm_fn(x.int(), weight, None),
         "x: expected a floating point tensor of at least 16 bits, got a tensor of dtype int32 and shape [2, 3, 8]"),
        (lambda: layer_norm_fn(x, weight[:7], None), "weight: expected shape [8], got [7]"),
        (lambda: layer_norm_fn(x, None, None), "weight: expected a tensor of shape [8], got None"),
        (lambda: layer_norm_fn(x, weight, x[0]), "bias: expected shape [8], got [3, 8]"),
        (lambda: layer_norm_fn(x, weight, None, x[0]), "residual: expected shape [2, 3, 8], got [3, 8]"),
        (lambda: layer_norm_fn(x, weight, None, x1=x[:1]), "x1: expected shape [2, 3, 8], got [1, 3, 8]"),
        (lambda: layer_norm_fn(x, weight, None, out=x[0]), "out: expected shape [2, 3, 8], got [3, 8]"),
        (lambda: layer_norm_fn(x, weight, None, bias1=weight), "bias1: expected None without weight1, got a tensor"),
        (lambda: layer_norm_fn(x, weight, None, x1=x, rowscale=x[..., 0]),
         "rowscale: expected None with x1, got a tensor"),
        (lambda: layer_norm_fn(x, weight, None, rowscale=weight), "rowscale: expected shape [2, 3], got [8]"),
        (lambda: layer_norm_fn(x, weight, None, dropout_p=1.0), "dropout_p: expected a value in [0, 1), got 1.0"),
        (lambda: layer_norm_fn(x, weight.to("meta"), None),
         f"weight: expected a tensor on x's device ({x.device}), got one on meta"),
    ]  # fmt: skip
    for call, message in cases:
        with pytest.raises(RuntimeError) as caught:
            call()
        assert str(caught.value) == message
