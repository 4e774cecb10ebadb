"""Gradients against autograd through the float64 reference."""

from __future__ import annotations

import dataclasses

import pytest
import torch
from cases import GQA_RATIOS, HEAD_DIMS, Case
from harness import Problem, check_gradients, gradients, make_problem, run

from flash_attn import (
    AttentionMask,
    backends,
    flash_attn_func,
    flash_attn_kvpacked_func,
    flash_attn_qkvpacked_func,
    flash_attn_varlen_func,
    flash_attn_varlen_qkvpacked_func,
)
from flash_attn.flash_attn_interface import _flash_attn_backward, _flash_attn_forward, _flash_attn_varlen_backward

pytestmark = pytest.mark.by_both_paths

DTYPE = "bfloat16"
# The dtype of tests that compare closely: the CPU has float32.
CLOSE_DTYPE = {"cpu": "float32", "cuda": "bfloat16"}


def check_training_step(problem: Problem, dout=None, **overrides):
    leaves = {name: x.detach().clone().requires_grad_() for name, x in problem.inputs.items()}
    out, _, dmask = run(dataclasses.replace(problem, **leaves), **overrides)
    dout = torch.randn_like(out) if dout is None else dout
    grads = torch.autograd.grad(out, list(leaves.values()), dout)
    check_gradients(problem, dout, grads, dmask >= 0 if problem.case.dropout else None,
                    **{("scale" if k == "softmax_scale" else k): v for k, v in overrides.items()})  # fmt: skip
    return grads


def test_feature_combinations(device, training_case):
    check_training_step(make_problem(training_case, device))


@pytest.mark.parametrize("seqlen_q,seqlen_k", [(0, 5), (5, 0), (1, 1), (1, 300), (300, 1), (129, 127), (700, 600)])
def test_sequence_lengths(device, seqlen_q, seqlen_k):
    for causal, window in ((False, (-1, -1)), (True, (-1, -1)), (False, (40, 20))):
        case = Case(2, seqlen_q, seqlen_k, 4, 2, 64, DTYPE, causal=causal, window=window)
        check_training_step(make_problem(case, device))


@pytest.mark.parametrize(
    "features", ({"causal": True}, {"window": (900, 300), "softcap": 9.0}, {"dropout": 0.2}), ids=str
)
def test_many_key_blocks(device, features):
    check_training_step(make_problem(Case(1, 300, 2000, 2, 1, 32, DTYPE, **features), device))


@pytest.mark.parametrize("head_dim,head_dim_v", ((64, 0), (128, 0), (192, 128), (256, 0), (512, 0)))
def test_key_blocks_that_no_row_sees(device, head_dim, head_dim_v):
    """Most thread blocks take only such blocks, one after the other, where there are more than run at once."""
    batch, heads, keys = (4, 4, 4000) if device == "cuda" else (1, 2, 1000)
    case = Case(batch, 70, keys, heads, heads, head_dim, DTYPE, window=(30, 0), head_dim_v=head_dim_v)
    _, dk, dv = check_training_step(make_problem(case, device))
    assert (dk[:, : keys - 100] == 0).all() and (dv[:, : keys - 100] == 0).all()


# Calls with so many heads that the Hopper kernel prepares most of them itself. On a CPU they have two K/V heads.
MANY_HEADS = (
    Case(4, 600, 300, 80, 80, 128, DTYPE),
    Case(4, 580, 300, 160, 80, 96, DTYPE, causal=True),
    Case(2, 650, 300, 160, 160, 64, DTYPE, window=(200, 90)),
    Case(1, 600, 520, 200, 200, 40, DTYPE, causal=True),
    Case(24, 600, 300, 16, 16, 128, DTYPE),
    Case(5, 700, 900, 128, 64, 128, DTYPE, causal=True, kind="packed"),
    Case(6, 600, 300, 64, 64, 64, DTYPE, kind="padded"),
    Case(4, 600, 300, 80, 80, 128, DTYPE, sinks=True),
)


@pytest.mark.parametrize("with_dlse", (False, True))
@pytest.mark.parametrize("large", MANY_HEADS, ids=lambda case: case.id)
def test_many_heads(device, large, with_dlse):
    few = dataclasses.replace(large, nheads=2 * large.nheads // large.nheads_k, nheads_k=2)
    problem = make_problem(few if device == "cpu" else large, device)
    leaves = {name: x.detach().clone().requires_grad_() for name, x in problem.inputs.items()}
    out, lse, _ = run(dataclasses.replace(problem, **leaves))
    dout, dlse = torch.randn_like(out), torch.randn_like(lse) if with_dlse else None
    outputs, gradient = ((out, lse), (dout, dlse)) if with_dlse else (out, dout)
    grads = torch.autograd.grad(outputs, list(leaves.values()), gradient)
    check_gradients(problem, dout, grads, dlse=dlse)


@pytest.mark.parametrize("heads,heads_k,rows,head_dim", ((32, 32, 4096, 64), (64, 64, 2048, 128), (128, 64, 1030, 128)))
def test_heads_do_not_depend_on_others(device, heads, heads_k, rows, head_dim):
    """A call with many heads prepares them in another way than a call with half of them; long rows too."""
    if device == "cpu":
        heads, heads_k, rows = heads // 16, heads_k // 16, 200
    shape = (heads, heads_k, heads_k, heads)
    x = [torch.randn(1, rows, h, head_dim, device=device, dtype=torch.bfloat16) for h in shape]

    def gradients_of(part):
        few = [t[:, :, : t.shape[2] // part].detach().requires_grad_() for t in x]
        return torch.autograd.grad(flash_attn_func(*few[:3], causal=True), few[:3], few[3].detach())

    (dq, dk, dv), (some_dq, some_dk, some_dv) = gradients_of(1), gradients_of(2)
    assert torch.equal(dk[:, :, : heads_k // 2], some_dk) and torch.equal(dv[:, :, : heads_k // 2], some_dv)
    error = (dq[:, :, : heads // 2].double() - some_dq.double()).norm()
    assert error <= 2**-9 * some_dq.double().norm()  # its sum has no order


@pytest.mark.parametrize("head_dim", (64, 128))
def test_many_heads_with_a_mask(device, head_dim):
    """Some rows see nothing: their dout does not matter."""
    batch, rows, heads = (4, 600, 80) if device == "cuda" else (1, 200, 2)
    q, k, v, dout = (
        torch.randn(batch, rows, heads, head_dim, device=device, dtype=torch.bfloat16, requires_grad=i < 3)
        for i in range(4)
    )
    at = torch.arange(rows, device=device)
    low = torch.randint(0, rows, (batch, rows), device=device)
    sees_nothing = (at % 2 == 1) & (at // 100 % 2 == 1)
    high = torch.where(sees_nothing, low, low + 90)
    out = flash_attn_func(q, k, v, mask=AttentionMask.query_ranges(low, high))
    dout[:, sees_nothing] = torch.nan
    grads = torch.autograd.grad(out, (q, k, v), dout)
    seen = (low[..., None] <= at) & (at < high[..., None])
    for entry, head in ((0, 0), (batch // 2, heads // 2), (batch - 1, heads - 1)):
        x = [t[entry, :, head].detach().double().requires_grad_() for t in (q, k, v)]
        scores = (x[0] @ x[1].T * head_dim**-0.5).masked_fill(~seen[entry], -torch.inf)
        exact = scores.softmax(-1).nan_to_num() @ x[2]
        expected = torch.autograd.grad(exact, x, dout[entry, :, head].double().nan_to_num())
        for ours, reference in zip(grads, expected):
            error = (ours[entry, :, head].double() - reference.nan_to_num()).norm()
            assert error <= 2**-7 * reference.nan_to_num().norm()


@pytest.mark.parametrize("head_dim", HEAD_DIMS + (1, 37, 251, 300))
def test_head_dims(device, head_dim):
    check_training_step(make_problem(Case(1, 50, 90, 2, 1, head_dim, "float16", causal=True), device))


@pytest.mark.parametrize("ratio", GQA_RATIOS)
def test_gqa_ratios(device, ratio):
    check_training_step(make_problem(Case(2, 40, 60, ratio * 2, 2, 64, DTYPE, causal=True), device))


@pytest.mark.parametrize("head_dim, scale", ((64, 0.0), (64, -0.3), (64, 1.0), (512, 1.0)))
def test_softmax_scales(device, head_dim, scale):
    for softcap in (0.0, 5.0):
        problem = make_problem(Case(2, 60, 80, 2, 2, head_dim, DTYPE, causal=True, softcap=softcap), device)
        check_training_step(problem, softmax_scale=scale)


def test_fully_masked_rows_have_no_gradient(device):
    problem = make_problem(Case(2, 200, 50, 2, 1, 64, DTYPE, causal=True), device)
    dq, dk, dv = check_training_step(problem)
    assert (dq[:, :150] == 0).all() and torch.isfinite(dk).all() and torch.isfinite(dv).all()


@pytest.mark.parametrize("features", ({"dropout": 0.3}, {"sinks": True}), ids=str)
@pytest.mark.parametrize("dtype,unit", [("float16", 2.0**-11), ("bfloat16", 2.0**-8)])
def test_single_key(device, dtype, unit, features):
    """dq is right but for the rounding of out, from which rowsum(dout * out) is taken, times the key, and of dS."""
    problem = make_problem(Case(2, 40, 40, 2, 2, 64, dtype, window=(0, 0), **features), device)
    leaf = problem.q.detach().clone().requires_grad_()
    out, _, dmask = run(dataclasses.replace(problem, q=leaf))
    dout = torch.randn_like(out)
    dq = torch.autograd.grad(out, leaf, dout)[0].double()
    exact = gradients(problem, dout, torch.float64, dmask >= 0 if problem.case.dropout else None)[0]
    assert problem.sinks is not None or exact.abs().max() < 1e-12
    rounding = (dout.double() * out.detach().double()).abs().sum(-1, keepdim=True) * unit
    bound = rounding * problem.k.double().abs() * 64**-0.5 * 1.01 + 2 * unit * exact.abs() + 1e-6
    assert ((dq - exact).abs() <= bound).all()


def test_lse_of_minus_120(device):
    """Columns beyond the keys must not count when exp(-LSE) is huge."""
    problem = make_problem(Case(1, 70, 67, 1, 1, 64, "float16"), device)
    problem.q.fill_(1.0)
    problem.k.copy_(-1.0 - 0.01 * torch.rand_like(problem.k))
    check_training_step(problem, softmax_scale=2.0)


@pytest.mark.parametrize("layout", ("expanded", "transposed", "strided"))
def test_dout_of_any_strides(device, layout):
    problem = make_problem(Case(2, 60, 80, 2, 2, 64, DTYPE), device)
    shape = problem.q.shape
    dout = {
        "expanded": torch.randn((), device=device, dtype=problem.q.dtype).expand(shape),
        "transposed": torch.randn(2, 2, 64, 60, device=device, dtype=problem.q.dtype).permute(0, 3, 1, 2),
        "strided": torch.randn(2, 60, 2, 128, device=device, dtype=problem.q.dtype)[..., ::2],
    }[layout]
    check_training_step(problem, dout=dout)


@pytest.mark.parametrize("causal", (False, True))
@pytest.mark.parametrize("dtype", ("bfloat16", "float32", "float64"))
@pytest.mark.parametrize("nheads_k", (1, 4))
def test_plain_calls_of_any_layout(device, dtype, nheads_k, causal):
    """Where no fully masked row, dlse or dropout asks for more than plain attention: also expanded, unaligned and
    strided inputs; the gradients of fewer keys than queries, under a causal mask those of as many."""
    if device == "cuda" and dtype != "bfloat16":
        pytest.skip("the kernels take half precision")
    problem = make_problem(Case(2, 300, 300 if causal else 170, 4, nheads_k, 40, dtype, causal=causal), device)
    q, k, v = problem.q, problem.k, problem.v
    problem.q = torch.cat((q, q), -1)[..., 8:48]
    problem.k = torch.randn_like(k[:1]).expand(k.shape)
    problem.v = torch.randn(v.numel() + 1, device=device, dtype=v.dtype)[1:].view(v.shape)
    leaves = [problem.q, problem.k, problem.v]
    for x in leaves:
        x.requires_grad_()
    out = flash_attn_func(*leaves, causal=causal)
    dout = torch.randn(2, 4, 300, 40, device=device, dtype=q.dtype).transpose(1, 2)
    check_gradients(problem, dout, torch.autograd.grad(out, leaves, dout))


@pytest.mark.devices("cpu")
def test_an_lse_of_more_keys(device):
    """Rows may have their LSE and output from another call's keys, and some of them none at all: lse is infinite."""
    q, k, v, dout = (torch.randn(1, 30, 2, 16, device=device, dtype=torch.float64) for _ in range(4))
    more, ours = torch.randn(2, 1, 20, 2, 16, device=device, dtype=torch.float64), slice(0, 30)
    leaves = [torch.cat(x, 1).requires_grad_() for x in ((q,), (k, more[0]), (v, more[1]))]
    scores = torch.einsum("bqhd,bkhd->bhqk", *leaves[:2]) / 4
    out = torch.einsum("bhqk,bkhd->bqhd", scores.softmax(-1), leaves[2])
    lse = scores.logsumexp(-1)
    exact = torch.autograd.grad(out, leaves[1:], dout)
    out, lse, keyless = out.detach(), lse.detach(), dout.clone()
    backend, tail = backends.get(device), (None, 0.0, 0.25, False, -1, -1, 0.0, True, None, None)
    grads = backend.bwd(dout, q, k, v, out, lse, None, None, None, *tail)
    for grad, reference in zip(grads[1:3], exact):
        torch.testing.assert_close(grad, reference[:, ours])
    keyless[:, :7] = 0
    rest = backend.bwd(keyless, q, k, v, out, lse, None, None, None, *tail)
    for infinity in (float("inf"), -float("inf")):
        lse[:, :, :7], dout[:, :7] = infinity, 5.0
        grads = backend.bwd(dout, q, k, v, out, lse, None, None, None, *tail)
        assert (grads[0][:, :7] == 0).all()
        for grad, reference in zip(grads[1:3], rest[1:3]):
            torch.testing.assert_close(grad, reference)


@pytest.mark.parametrize("dropout_p", (0.0, 0.3))
def test_packed_gradients_equal_the_separate_ones(device, dropout_p):
    dtype = getattr(torch, CLOSE_DTYPE[device])
    qkv = torch.randn(2, 70, 3, 4, 64, device=device, dtype=dtype)
    dout = torch.randn(2, 70, 4, 64, device=device, dtype=dtype)
    cu = torch.tensor([0, 70, 140], dtype=torch.int32, device=device)

    def gradient(function):
        leaf = qkv.clone().requires_grad_()
        torch.manual_seed(4)
        out = function(leaf)
        return torch.autograd.grad(out, leaf, dout.view(out.shape))[0]

    options = {"dropout_p": dropout_p, "causal": True, "deterministic": True}
    separate = gradient(lambda x: flash_attn_func(*x.unbind(2), **options))
    assert torch.equal(separate, gradient(lambda x: flash_attn_qkvpacked_func(x, **options)))
    assert torch.equal(separate, gradient(lambda x: flash_attn_kvpacked_func(x[:, :, 0], x[:, :, 1:], **options)))
    packed = gradient(lambda x: flash_attn_varlen_qkvpacked_func(x.flatten(0, 1), cu, 70, **options))
    tolerance = {"atol": 1e-6, "rtol": 1e-5} if device == "cpu" else {"atol": 1e-2, "rtol": 1e-2}
    torch.testing.assert_close(separate, packed, **tolerance)


@pytest.mark.parametrize("kind", ("dense", "varlen"))
def test_gradients_land_in_the_given_tensors(device, kind):
    """dq, dk and dv as views of one (..., 3, h, d) buffer, as transposed views, and as None."""
    problem = make_problem(Case(2, 50, 50, 4, 4, 64, CLOSE_DTYPE[device], causal=True), device)
    out, lse, _, state = _flash_attn_forward(
        problem.q, problem.k, problem.v, 0.0, 0.125, True, -1, -1, 0.0, None, False
    )
    dout = torch.randn_like(out)
    cu = torch.tensor([0, 50, 100], dtype=torch.int32, device=device)

    def backward(dq, dk, dv):
        tail = (0.0, 0.125, True, -1, -1, 0.0, None, True, state)
        if kind == "dense":
            return _flash_attn_backward(dout, problem.q, problem.k, problem.v, out, lse, dq, dk, dv, *tail)
        flat = [x.flatten(0, 1) for x in (dout, problem.q, problem.k, problem.v, out)]
        flat_lse = lse.transpose(0, 1).reshape(4, 100)
        return _flash_attn_varlen_backward(*flat, flat_lse, dq, dk, dv, cu, cu, 50, 50, *tail)

    def shaped(x):
        return x if kind == "dense" else x.flatten(0, 1)

    plain = [torch.empty_like(shaped(x)) for x in (problem.q, problem.k, problem.v)]
    softmax_d = backward(*plain)
    check_gradients(problem, dout, [x.view(problem.q.shape) for x in plain])
    delta = (dout.float() * out.float()).sum(-1).transpose(1, 2)
    if kind == "dense":
        assert softmax_d.shape == (2, 4, 128) and (softmax_d[..., 50:] == 0).all()
        torch.testing.assert_close(softmax_d[..., :50], delta)
    else:
        assert softmax_d.shape == (4, 100 + 2 * 128)
    poison = {"fill_value": float("nan"), "device": device, "dtype": out.dtype}
    buffer = torch.full((*plain[0].shape[:-2], 3, 4, 64), **poison)
    backward(*buffer.unbind(-3))
    assert all(torch.equal(a, b) for a, b in zip(plain, buffer.unbind(-3)))
    turned = torch.full((3, 4, 64, *plain[0].shape[:-2]), **poison)
    views = [x.movedim((0, 1), (-2, -1)) for x in turned]
    backward(*views)
    assert all(torch.equal(a, b) for a, b in zip(plain, views))
    backward(None, None, None)
    alone = torch.empty_like(plain[1])
    backward(None, alone, None)
    assert torch.equal(alone, plain[1])


def test_varlen_lse_with_padded_rows(device):
    """xformers gives the LSE of torch's memory-efficient attention, whose rows are padded to a multiple of 32."""
    q, k, v, dout = (torch.randn(50, 3, 64, device=device, dtype=torch.bfloat16) for _ in range(4))
    cu = torch.tensor([0, 20, 50], dtype=torch.int32, device=device)
    out, lse, _ = flash_attn_varlen_func(q, k, v, cu, cu, 30, 30, return_attn_probs=True)

    def backward(lse):
        grads = [torch.empty_like(x) for x in (q, k, v)]
        tail = (cu, cu, 30, 30, 0.0, 0.125, False, -1, -1, 0.0, None, True)
        _flash_attn_varlen_backward(dout, q, k, v, out, lse, *grads, *tail)
        return grads

    padded = torch.nn.functional.pad(lse, (0, 14), value=float("nan"))
    assert all(torch.equal(a, b) for a, b in zip(backward(lse), backward(padded), strict=True))
    with pytest.raises(RuntimeError, match=r"^softmax_lse: expected shape \[3, 50\], got \[3, 49\]"):
        backward(lse[:, :49])


def test_varlen_rows_of_no_sequence_have_zero_gradient(device):
    problem = make_problem(Case(4, 60, 90, 2, 1, 64, CLOSE_DTYPE[device], kind="padded", causal=True), device)
    leaves = [x.detach().clone().requires_grad_() for x in (problem.q, problem.k, problem.v)]
    ours = dataclasses.replace(problem, q=leaves[0], k=leaves[1], v=leaves[2])
    out = run(ours)[0]
    dq, dk, dv = torch.autograd.grad(out, leaves, torch.randn_like(out))
    end_q, end_k = problem.cu_seqlens_q[-1], problem.cu_seqlens_k[-1]
    assert (dq[end_q:] == 0).all() and (dk[end_k:] == 0).all() and (dv[end_k:] == 0).all()
    assert end_q < len(dq) and end_k < len(dk)


@pytest.mark.devices("cpu")
@pytest.mark.parametrize("features", ({"sinks": False}, {}, {"causal": True, "window": (2, -1)},
                                      {"softcap": 3.0, "alibi": "batch"}, {"dropout": 0.4},
                                      {"kind": "padded", "causal": True}), ids=str)  # fmt: skip
def test_gradcheck(device, features):
    """Of out and of the LSE, together; some rows see no key."""
    batch = 2 if "kind" in features else 1
    problem = make_problem(Case(batch, 7, 6, 2, 1, 3, "float64", **{"sinks": True, **features}), device)
    if problem.sinks is not None:
        problem.sinks = problem.sinks.double()
    inputs = {name: x.nan_to_num().requires_grad_() for name, x in problem.inputs.items()}

    def function(*values):
        torch.manual_seed(8)
        out, lse, _ = run(dataclasses.replace(problem, **dict(zip(inputs, values))))
        return out, lse.masked_fill(lse.isinf(), 0.0)

    assert torch.autograd.gradcheck(function, list(inputs.values()), fast_mode=True)


def test_backward_repeats_bitwise(device):
    problem = make_problem(Case(2, 200, 300, 4, 2, 64, DTYPE, causal=True), device)
    dout = torch.randn_like(problem.q)
    runs = []
    for _ in range(3):
        leaves = [x.detach().clone().requires_grad_() for x in (problem.q, problem.k, problem.v)]
        out = flash_attn_func(*leaves, causal=True, deterministic=True)
        runs.append(torch.autograd.grad(out, leaves, dout))
    assert all(torch.equal(a, b) for other in runs[1:] for a, b in zip(runs[0], other))


def test_gradients_of_single_inputs(device):
    """Only what requires a gradient gets one."""
    problem = make_problem(Case(1, 20, 30, 2, 2, 32, CLOSE_DTYPE[device]), device)
    dout = torch.randn_like(problem.q)
    exact = gradients(problem, dout, torch.float64)
    for i in range(3):
        tensors = [x.detach().clone() for x in (problem.q, problem.k, problem.v)]
        tensors[i].requires_grad_()
        flash_attn_func(*tensors).backward(dout)
        tolerance = 1e-4 if device == "cpu" else 2e-2
        torch.testing.assert_close(tensors[i].grad.double(), exact[i], atol=tolerance, rtol=tolerance)
        assert all(x.grad is None for j, x in enumerate(tensors) if j != i)


def test_gradient_of_the_lse_alone(device):
    """Never a silently missing gradient of the LSE."""
    q, k, v = (torch.randn(1, 20, 2, 32, device=device, dtype=torch.bfloat16, requires_grad=True) for _ in "qkv")
    _, lse, _ = flash_attn_func(q, k, v, return_attn_probs=True)
    assert lse.requires_grad
    dq = torch.autograd.grad(lse.sum(), q)[0]
    leaf = q.detach().double().requires_grad_()
    scores = torch.einsum("bqhd,bkhd->bhqk", leaf, k.detach().double()) / 32**0.5
    reference = torch.autograd.grad(torch.logsumexp(scores, -1).sum(), leaf)[0]
    torch.testing.assert_close(dq.double(), reference, atol=2e-3, rtol=2e-2)


LSE_CASES = (
    Case(2, 40, 90, 4, 2, 64, DTYPE),
    Case(2, 200, 130, 6, 2, 128, DTYPE, causal=True),
    Case(1, 70, 300, 2, 2, 256, "float16", causal=True, window=(50, -1)),
    Case(2, 65, 80, 2, 1, 40, "float16", softcap=5.0, alibi="heads"),
    Case(1, 100, 140, 4, 1, 96, DTYPE, dropout=0.2),
    Case(4, 129, 100, 4, 2, 64, DTYPE, kind="padded", causal=True),
    Case(4, 64, 200, 2, 2, 192, "float16", kind="packed", dropout=0.3),
    Case(2, 200, 130, 4, 2, 64, DTYPE, causal=True, sinks=True),
    Case(4, 129, 100, 4, 2, 128, "float16", kind="padded", causal=True, sinks=True, dropout=0.1),
)


@pytest.mark.parametrize("lse_case", LSE_CASES, ids=lambda case: case.id)
def test_gradients_of_output_and_lse_together(device, lse_case):
    """With every mask; a row that sees no key has a constant LSE, whose gradient is not read."""
    problem = make_problem(lse_case, device)
    leaves = {name: x.detach().clone().requires_grad_() for name, x in problem.inputs.items()}
    out, lse, dmask = run(dataclasses.replace(problem, **leaves))
    dout, dlse = torch.randn_like(out), torch.randn_like(lse) * 3
    used = dlse.masked_fill(lse.isinf(), float("nan"))
    strided = torch.stack([used, used], dim=-1)[..., 0]
    grads = torch.autograd.grad((out, lse), list(leaves.values()), (dout, strided))
    check_gradients(problem, dout, grads, dmask >= 0 if lse_case.dropout else None, dlse)


@pytest.mark.parametrize("kind", ("dense", "varlen"))
def test_backends_take_the_gradient_of_the_lse(device, kind):
    """The last argument of `bwd` and `varlen_bwd`: any strides, and softmax_d is rowsum(dout * out) - dlse."""
    q, k, v = (torch.randn(2, 50, 2, 32, device=device, dtype=torch.bfloat16) for _ in "qkv")
    backend = backends.get(device)
    out, lse, _, state = backend.fwd(q, k, v, None, None, 0.0, 0.2, True, -1, -1, 0.0, False, None)
    dout, dlse = torch.randn_like(out), torch.randn_like(lse)
    turned = dlse.transpose(1, 2).contiguous().transpose(1, 2)
    tail = (0.2, True, -1, -1, 0.0, True, None, state)
    dense = backend.bwd(dout, q, k, v, out, lse, None, None, None, None, 0.0, *tail, turned)
    delta = (dout.float() * out.float()).sum(-1).transpose(1, 2) - dlse
    torch.testing.assert_close(dense[3][..., :50], delta)
    assert (dense[3][..., 50:] == 0).all() and dense[3].shape == (2, 2, 128)
    if kind == "varlen":
        flat = [x.flatten(0, 1) for x in (dout, q, k, v, out)]
        flat_lse, flat_dlse = (x.transpose(0, 1).reshape(2, 100) for x in (lse, dlse))
        cu = torch.tensor([0, 50, 100], dtype=torch.int32, device=device)
        packed = backend.varlen_bwd(
            *flat, flat_lse, None, None, None, cu, cu, None, 50, 50, 0.0, tail[0], False, *tail[1:], flat_dlse
        )
        starts = (0, 50 + 128)
        assert all(torch.equal(packed[3][:, s : s + 50], dense[3][i, :, :50]) for i, s in enumerate(starts))
        for ours, same in zip(packed[:3], dense[:3]):
            torch.testing.assert_close(ours, same.flatten(0, 1), atol=1e-2, rtol=1e-2)


@pytest.mark.parametrize("argument", ("seqused_k", "leftpad_k", "block_table"))
def test_key_layouts_have_no_backward(device, argument):
    """A training step through them is refused by name; the forward works."""
    kind = {"seqused_k": "seqused", "leftpad_k": "leftpad", "block_table": "packed"}[argument]
    page = 16 if argument == "block_table" else 0
    problem = make_problem(Case(4, 20, 30, 2, 2, 64, DTYPE, kind=kind, page_size=page), device)
    problem.q.requires_grad_()
    out = run(problem)[0]
    with pytest.raises(NotImplementedError, match=f"^{argument}"):
        out.sum().backward()


def test_flash_attn_varlen_func_is_differentiable_in_every_input():
    x = torch.randn(9, 2, 8, requires_grad=True)
    k, v = (torch.randn(9, 2, 8, requires_grad=True) for _ in "kv")
    cu = torch.tensor([0, 4, 9], dtype=torch.int32)
    flash_attn_varlen_func(x, k, v, cu, cu, 5, 5).square().sum().backward()
    assert all(t.grad.abs().sum() > 0 for t in (x, k, v))
