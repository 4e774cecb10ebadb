"""Cross-entropy against a float64 reference: options, dtypes, strides, ignored rows, a vocabulary over processes."""

from __future__ import annotations

import cp_workers
import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from harness import no_synchronisation
from interpreted import run_interpreted

from flash_attn.losses.cross_entropy import CrossEntropyLoss
from flash_attn.ops.triton.cross_entropy import cross_entropy_loss

DTYPES = (torch.float32, torch.bfloat16, torch.float16)
FLOAT32_EPS = torch.finfo(torch.float32).eps
OPTIONS = {
    "plain": {},
    "smoothing": {"label_smoothing": 0.1},
    "scale": {"logit_scale": 0.7},
    "z": {"lse_square_scale": 1e-2},
    "all": {"label_smoothing": 0.3, "logit_scale": -1.5, "lse_square_scale": 1e-3, "ignore_index": 3},
}


def problem(rows, classes, dtype, device, ignore_index=-100, **options):
    """Logits, labels with some ignored, and the gradient of the losses."""
    logits = (3 * torch.randn(rows, classes, device=device)).to(dtype)
    labels = torch.randint(classes, (rows,), device=device)
    labels[torch.rand(rows, device=device) < 0.2] = ignore_index
    return logits, labels, torch.randn(rows, device=device)


def reference(logits, labels, label_smoothing=0.0, logit_scale=1.0, lse_square_scale=0.0, ignore_index=-100):
    """(losses, z_losses) in float64."""
    scores = logits.double() * logit_scale
    live = labels != ignore_index
    target = F.one_hot(labels.long().where(live, 0), logits.shape[1]).double()
    target = (1 - label_smoothing) * target + label_smoothing / logits.shape[1]
    z_losses = lse_square_scale * scores.logsumexp(1).square()
    terms = torch.where(target > 0, target * scores.log_softmax(1), 0.0)  # no 0 times -inf
    losses = z_losses - terms.sum(1)
    return losses * live, z_losses * live


def reference_gradient(logits, labels, dlosses, **options):
    exact = logits.double().requires_grad_()
    return torch.autograd.grad(reference(exact, labels, **options)[0], exact, dlosses.double())[0]


def assert_losses(actual, expected):
    """float32 arithmetic on scores and log-sum-exps of at most a few tens."""
    assert actual.dtype == torch.float32
    torch.testing.assert_close(actual.double(), expected, rtol=8 * FLOAT32_EPS, atol=64 * FLOAT32_EPS)


def assert_gradient(actual, labels, dlosses, expected, label_smoothing=0.0, logit_scale=1.0, **_):
    """One rounding to the dtype after float32 arithmetic in which terms have errors of 2^-17 of their size: exponents
    reach 45, where float32 has steps of 2^-18. At the label a probability of up to 1 is subtracted from."""
    info = torch.finfo(actual.dtype)
    factor = (dlosses * logit_scale).double().abs()[:, None]
    label = torch.arange(actual.shape[1], device=actual.device) == labels[:, None]
    bound = (0.51 * info.eps + 2**-17) * expected.abs() + info.tiny * info.eps
    bound += 2**-17 * factor * (2 * label_smoothing / actual.shape[1] + label)
    worst = ((actual.double() - expected).abs() / bound).max() if actual.numel() else 0.0
    assert worst <= 1, f"{float(worst)} times the bound"


def check(logits, labels, dlosses, **options):
    given = logits.detach().requires_grad_()
    losses, z_losses = cross_entropy_loss(given, labels, **options)
    expected, expected_z = reference(logits, labels, **options)
    assert_losses(losses.detach(), expected)
    assert_losses(z_losses, expected_z)
    (grad,) = torch.autograd.grad(losses, given, dlosses)
    assert grad.dtype == logits.dtype and grad.shape == logits.shape
    assert_gradient(grad, labels, dlosses, reference_gradient(logits, labels, dlosses, **options), **options)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("classes", (1, 7, 1000, 4096, 50257))
@pytest.mark.parametrize("options", OPTIONS)
def test_losses_and_gradients(device, dtype, classes, options):
    rows = 33 if classes <= 4096 else 9
    check(*problem(rows, classes, dtype, device, **OPTIONS[options]), **OPTIONS[options])


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("options", ("plain", "all"))
def test_large_vocabulary(device, dtype, options):
    check(*problem(5, 128256, dtype, device, **OPTIONS[options]), **OPTIONS[options])


@pytest.mark.parametrize("layout", ("padded", "transposed", "expanded", "every other row"))
def test_strided_logits(device, layout):
    _, labels, dlosses = problem(11, 301, torch.bfloat16, device)
    base = torch.randn(22, 320, device=device, dtype=torch.bfloat16)
    logits = {
        "padded": base[:11, 5:306],
        "transposed": torch.randn(301, 11, device=device).to(torch.bfloat16).t(),
        "expanded": base[:1, :301].expand(11, 301),
        "every other row": base[::2, :301],
    }[layout]
    check(logits, labels, dlosses, label_smoothing=0.1)


def test_strided_labels_and_gradients(device):
    """Labels shifted by one, as language models have them: int64 at an address that is no multiple of 16."""
    logits, labels, dlosses = problem(16, 50, torch.float32, device)
    for given in (labels[1:], torch.stack([labels, labels], 1)[1:, 0], labels.int()[1:]):
        check(logits[1:], given, dlosses[:1].expand(15))


def test_ignored_rows_are_not_read(device):
    logits, labels, _ = problem(20, 300, torch.float32, device, ignore_index=7)
    ignored = labels == 7
    labels[0], ignored[0] = 7, True
    logits[ignored] = float("nan")
    logits.requires_grad_()
    losses, z_losses = cross_entropy_loss(logits, labels, ignore_index=7, label_smoothing=0.1, lse_square_scale=0.1)
    losses.sum().backward()
    assert not losses[ignored].any() and not z_losses[ignored].any() and not logits.grad[ignored].any()
    assert losses[~ignored].isfinite().all() and logits.grad[~ignored].any(1).all()


def test_infinite_logits(device):
    """Classes that a model masks with -inf have probability and gradient 0."""
    logits, labels, dlosses = problem(9, 5000, torch.float32, device)
    labels = labels % 100
    logits[:, 100:] = float("-inf")
    logits[0, :99], labels[0] = float("-inf"), 99
    given = logits.clone().requires_grad_()
    losses, _ = cross_entropy_loss(given, labels)
    (grad,) = torch.autograd.grad(losses, given, dlosses)
    assert_losses(losses.detach(), reference(logits[:, :100], labels)[0])
    assert_gradient(grad[:, :100], labels, dlosses, reference_gradient(logits[:, :100], labels, dlosses))
    assert not grad[:, 100:].any()


def test_precomputed_lse(device):
    logits, labels, dlosses = problem(12, 999, torch.bfloat16, device)
    lse = logits.float().logsumexp(1)
    for options in ({}, {"lse_square_scale": 0.1}, {"logit_scale": 2.0}, {"label_smoothing": 0.1}):
        losses, z_losses = cross_entropy_loss(logits, labels, precomputed_lse=lse, **options)
        expected, expected_z = reference(logits, labels, **options)
        assert_losses(losses, expected)
        assert_losses(z_losses, expected_z)
    shifted, _ = cross_entropy_loss(logits, labels, precomputed_lse=lse + 1)
    assert_losses(shifted, reference(logits, labels)[0] + (labels != -100))


def test_empty(device):
    logits = torch.empty(0, 10, device=device, requires_grad=True)
    losses, z_losses = cross_entropy_loss(logits, torch.empty(0, dtype=torch.int64, device=device))
    losses.sum().backward()
    assert losses.shape == z_losses.shape == (0,) and logits.grad.shape == (0, 10)


def test_inplace_backward(device):
    logits, labels, dlosses = problem(10, 700, torch.bfloat16, device)
    expected = reference_gradient(logits, labels, dlosses)
    given = logits.clone().requires_grad_()
    losses, _ = cross_entropy_loss(given, labels, inplace_backward=True)
    (grad,) = torch.autograd.grad(losses, given, dlosses, retain_graph=True)
    assert_gradient(grad, labels, dlosses, expected)
    if device == "cuda":
        assert grad.data_ptr() == given.data_ptr()
        with pytest.raises(RuntimeError, match="modified by an inplace operation"):
            torch.autograd.grad(losses, given, dlosses)


def test_inplace_backward_leaves_overlapping_rows_alone(device):
    row = torch.randn(1, 64, device=device)
    given = row.expand(8, 64).requires_grad_()
    labels, dlosses = torch.arange(8, device=device), torch.ones(8, device=device)
    losses, _ = cross_entropy_loss(given, labels, inplace_backward=True)
    (grad,) = torch.autograd.grad(losses, given, dlosses)
    assert_gradient(grad, labels, dlosses, reference_gradient(given.detach(), labels, dlosses))


@pytest.mark.devices("cpu")
def test_gradcheck(device):
    for options in OPTIONS.values():
        logits, labels, _ = problem(5, 9, torch.float64, device, **options)
        logits.requires_grad_()
        assert torch.autograd.gradcheck(lambda x, y=labels, o=options: cross_entropy_loss(x, y, **o)[0], logits)


def test_second_backward_is_refused(device):
    logits, labels, _ = problem(5, 9, torch.float32, device)
    logits.requires_grad_()
    loss = cross_entropy_loss(logits, labels)[0].sum()
    (grad,) = torch.autograd.grad(loss, logits, create_graph=True)
    with pytest.raises(RuntimeError, match="^cross_entropy_loss: expected one backward, got a second"):
        (loss + grad.square().sum()).backward()


@pytest.mark.parametrize("reduction", ("mean", "sum", "none"))
@pytest.mark.parametrize("smoothing", (0.0, 0.1))
def test_module(device, reduction, smoothing):
    logits, labels, _ = problem(40, 123, torch.float32, device)
    logits.requires_grad_()
    exact = logits.detach().double().requires_grad_()
    loss = CrossEntropyLoss(reduction=reduction, label_smoothing=smoothing)(logits, labels)
    expected = F.cross_entropy(exact, labels, reduction=reduction, label_smoothing=smoothing)
    torch.testing.assert_close(loss.detach().double(), expected.detach(), rtol=1e-6, atol=1e-5)
    (grad,) = torch.autograd.grad(loss.sum(), logits)
    exact_grad = torch.autograd.grad(expected.sum(), exact)[0]
    assert_gradient(grad, labels, torch.ones(40, device=device), exact_grad, label_smoothing=smoothing)
    with_z = CrossEntropyLoss(reduction=reduction, lse_square_scale=0.1, return_z_loss=True)(logits, labels)
    plain = CrossEntropyLoss(reduction=reduction)(logits, labels)
    torch.testing.assert_close(with_z[0] - with_z[1], plain, rtol=1e-5, atol=1e-4)
    assert with_z[0].requires_grad and not with_z[1].requires_grad


def test_module_mean_over_nothing_is_nan(device):
    logits, labels = torch.randn(3, 5, device=device), torch.full((3,), -100, device=device)
    assert CrossEntropyLoss()(logits, labels).isnan() and F.cross_entropy(logits, labels).isnan()


def test_labels_out_of_range(device):
    logits, labels, dlosses = problem(6, 10, torch.float32, device)
    labels[2], labels[4] = 10, -1
    if device == "cpu":
        with pytest.raises(RuntimeError, match=r"^labels: expected values in \[0, 10\) or ignore_index -100, got 10$"):
            cross_entropy_loss(logits, labels)
        return
    logits.requires_grad_()
    losses, _ = cross_entropy_loss(logits, labels)
    (grad,) = torch.autograd.grad(losses, logits, dlosses)
    wrong = torch.tensor([2, 4], device=device)
    assert losses[wrong].isnan().all() and grad[wrong].isnan().all()
    assert losses.isnan().sum() == 2 and grad.isnan().any(1).sum() == 2


def test_compiled(device):
    logits, labels, dlosses = problem(8, 130, torch.bfloat16, device)
    options = {"label_smoothing": 0.1, "lse_square_scale": 1e-2}
    torch._dynamo.reset()
    backend = "inductor" if device == "cuda" else "aot_eager"
    compiled = torch.compile(
        lambda x: cross_entropy_loss(x, labels, **options)[0] * dlosses, backend=backend, fullgraph=True
    )
    given = logits.clone().requires_grad_()
    losses = compiled(given)
    losses.sum().backward()
    assert_losses(losses.detach(), reference(logits, labels, **options)[0] * dlosses)
    expected = reference_gradient(logits, labels, dlosses, **options)
    assert_gradient(given.grad, labels, dlosses, expected, **options)
    module = torch.compile(CrossEntropyLoss(), backend=backend)
    expected = F.cross_entropy(logits.double(), labels)
    torch.testing.assert_close(module(logits, labels).double(), expected, rtol=1e-6, atol=1e-5)


@pytest.mark.devices("cuda")
def test_no_synchronisation(device):
    logits, labels, _ = problem(8, 130, torch.bfloat16, device)
    logits.requires_grad_()
    with no_synchronisation():
        CrossEntropyLoss(label_smoothing=0.1)(logits, labels).backward()
    assert logits.grad.any()


@pytest.mark.big
@pytest.mark.devices("cuda")
def test_more_than_2_31_elements(device):
    rows, classes = 16500, 131072
    logits = torch.empty(rows, classes, dtype=torch.bfloat16, device=device).normal_().requires_grad_()
    labels = torch.randint(classes, (rows,), device=device)
    losses, _ = cross_entropy_loss(logits, labels)
    losses.sum().backward()
    for part in (slice(0, 3), slice(rows - 3, rows)):
        ones = torch.ones(3, device=device)
        assert_losses(losses[part].detach(), reference(logits[part].detach(), labels[part])[0])
        expected = reference_gradient(logits[part].detach(), labels[part], ones)
        assert_gradient(logits.grad[part], labels[part], ones, expected)


def split_vocabulary(device):
    """The losses and gradients of a vocabulary of which each of two processes has a half."""
    rank = dist.get_rank()
    torch.manual_seed(0)
    logits = (3 * torch.randn(20, 600)).to(device)
    labels = torch.randint(600, (20,))
    labels[3] = -100
    labels, dlosses = labels.to(device), torch.randn(20).to(device)
    part = slice(rank * 300, rank * 300 + 300)
    for options in ({}, {"label_smoothing": 0.1, "logit_scale": 0.7, "lse_square_scale": 1e-2}):
        whole = logits.double().requires_grad_()
        expected, expected_z = cross_entropy_loss(whole, labels, **options)
        (expected_grad,) = torch.autograd.grad(expected, whole, dlosses.double())
        mine = logits[:, part].clone().requires_grad_()
        losses, z_losses = cross_entropy_loss(mine, labels, process_group=dist.group.WORLD, **options)
        (grad,) = torch.autograd.grad(losses, mine, dlosses)
        torch.testing.assert_close(losses.double(), expected, rtol=1e-6, atol=1e-5)
        torch.testing.assert_close(z_losses.double(), expected_z, rtol=1e-6, atol=1e-5)
        torch.testing.assert_close(grad.double(), expected_grad[:, part], rtol=1e-5, atol=1e-6)
        mean = CrossEntropyLoss(process_group=dist.group.WORLD, **options)(mine, labels)
        torch.testing.assert_close(mean.double(), expected.sum() / 19, rtol=1e-6, atol=1e-5)
    lse = logits[:, part].logsumexp(1)
    losses, _ = cross_entropy_loss(logits[:, part], labels, precomputed_lse=lse, process_group=dist.group.WORLD)
    torch.testing.assert_close(losses, cross_entropy_loss(logits, labels)[0], rtol=1e-6, atol=1e-5)


def on_the_gpu(_):
    """Both processes on one GPU, with messages by gloo."""
    split_vocabulary("cuda")


def test_vocabulary_over_two_processes(device):
    if not dist.is_available() or not dist.is_gloo_available():
        pytest.skip("torch is built without gloo")
    cp_workers.run_processes(split_vocabulary if device == "cpu" else on_the_gpu, 2, "gloo")


INTERPRETED = """
import itertools, torch
from flash_attn.ops.triton import cross_entropy as module

torch.manual_seed(0)
values = itertools.product((1, 300, 5000), (torch.float32, torch.bfloat16), (0.0, 0.1), (0.0, 1e-2))
for columns, dtype, smoothing, lse_square_scale in values:
    logits = (3 * torch.randn(6, columns + 3)).to(dtype)[:, :columns]
    labels = torch.randint(columns, (7,))[1:]
    labels[1], logits[1] = -100, float("nan")
    dlosses = torch.randn(1).expand(6)
    rule = module._Loss(smoothing, 0.7, lse_square_scale, -100, 0, columns)
    expected = module._losses(logits, labels, None, rule, None, 1)
    losses, z_losses, lse = module._launch_forward(logits, labels, None, rule)
    grad = torch.empty_like(logits, memory_format=torch.contiguous_format)
    module._launch_backward(grad, dlosses, logits, labels, lse, rule)
    for actual, exact in zip((losses, z_losses), expected):
        torch.testing.assert_close(actual, exact, rtol=1e-5, atol=1e-5)
    torch.testing.assert_close(grad, module._compose_backward(dlosses, logits, labels, expected[2], rule))
    part = rule._replace(first_class=4, classes=2 * columns)
    subtracted, _, lse = module._launch_forward(logits, labels, None, part, partial=True)
    live = labels != -100
    for actual, exact in zip((lse, subtracted), module._compose_forward(logits, labels, None, part)):
        torch.testing.assert_close(actual[live], exact[live], rtol=1e-5, atol=1e-5)
    given = rule._replace(logit_scale=1.0, smoothing=0.0)
    expected = module._losses(logits, labels, None, given, None, 1)
    losses, _, _ = module._launch_forward(logits, labels, expected[2], given)
    torch.testing.assert_close(losses, expected[0], rtol=1e-5, atol=1e-5)
print("equal")
"""


def test_triton_kernels_under_the_interpreter():
    pytest.importorskip("triton")
    run_interpreted(INTERPRETED)


def test_bad_arguments(device):
    logits, labels, _ = problem(4, 10, torch.float32, device)
    cases = [
        (
            lambda: cross_entropy_loss(logits[0], labels),
            "logits: expected shape (batch, classes) with at least one class, got [10]",
        ),
        (
            lambda: cross_entropy_loss(logits.int(), labels),
            "logits: expected a floating point tensor of at least 16 bits, "
            "got a tensor of dtype int32 and shape [4, 10]",
        ),
        (lambda: cross_entropy_loss(logits, labels[:3]), "labels: expected int64 or int32 of shape [4], got int64 [3]"),
        (
            lambda: cross_entropy_loss(logits, labels.float()),
            "labels: expected int64 or int32 of shape [4], got float32 [4]",
        ),
        (
            lambda: cross_entropy_loss(logits, labels.to("meta")),
            f"labels: expected a tensor on logits' device ({logits.device}), got meta",
        ),
        (
            lambda: cross_entropy_loss(logits, labels, precomputed_lse=logits[:, :2]),
            "precomputed_lse: expected shape [4], got [4, 2]",
        ),
        (
            lambda: cross_entropy_loss(logits, labels, label_smoothing=1.5),
            "label_smoothing: expected a value in [0, 1], got 1.5",
        ),
    ]
    for call, message in cases:
        with pytest.raises(RuntimeError) as caught:
            call()
        assert str(caught.value) == message
    with pytest.raises(NotImplementedError, match="^reduction: expected 'mean', 'none' or 'sum', got 'max'$"):
        CrossEntropyLoss(reduction="max")
