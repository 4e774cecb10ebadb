"""seqused_q: only the first rows of each sequence of q are in use; the others belong to no sequence."""

from __future__ import annotations

import math

import pytest
import torch
from harness import no_synchronisation
from reference import sequence_bounds

from flash_attn import flash_attn_func, flash_attn_varlen_func

HEADS, HEADS_K, HEAD_DIM, HEAD_DIM_V = 4, 2, 32, 32
CU_Q, CU_K, TOTAL_Q = (0, 17, 17, 60, 81), (0, 40, 52, 70, 130), 90
USED = (9, 0, 43, 100)  # the last one says more than there are
OPTIONS = (
    {},
    {"causal": True},
    {"causal": True, "window_size": (11, 0), "softcap": 3.0},
    {"sinks": True, "softmax_scale": 0.3},
)


def as_int(device, values, dtype=torch.int32):
    return torch.tensor(values, device=device, dtype=dtype)


def problem(device, total_q=TOTAL_Q):
    dtype = torch.float32 if device == "cpu" else torch.bfloat16
    shapes = ((total_q, HEADS, HEAD_DIM), (CU_K[-1], HEADS_K, HEAD_DIM), (CU_K[-1], HEADS_K, HEAD_DIM_V))
    return [torch.randn(shape, device=device, dtype=dtype) for shape in shapes]


def call(device, tensors, used, cu_q=CU_Q, dtype=torch.int32, **options):
    return flash_attn_varlen_func(
        *tensors, as_int(device, cu_q), as_int(device, CU_K), 43, 60,
        seqused_q=None if used is None else as_int(device, used, dtype), **options,
    )  # fmt: skip


def by_sequence(q, k, v, used, cu_q=CU_Q, **options):
    """(out, lse) of every sequence by itself; rows that are not in use have 0 and +inf."""
    out = torch.zeros(q.shape[0], HEADS, HEAD_DIM_V, dtype=q.dtype, device=q.device)
    lse = torch.full((HEADS, q.shape[0]), math.inf, device=q.device)
    bounds_q, bounds_k = sequence_bounds(cu_q, q.shape[0]), sequence_bounds(CU_K, k.shape[0])
    for q0, q1, k0, k1, n in zip(bounds_q, bounds_q[1:], bounds_k, bounds_k[1:], used):
        q1 = min(q1, q0 + n)
        if q1 > q0:
            one, one_lse, _ = flash_attn_func(
                q[None, q0:q1], k[None, k0:k1], v[None, k0:k1], return_attn_probs=True, **options
            )
            out[q0:q1], lse[:, q0:q1] = one[0], one_lse[0]
    return out, lse


def with_sinks(options, device, grad=False):
    if not options.get("sinks"):
        return options
    return {**options, "sinks": torch.linspace(-1, 3, HEADS, device=device).requires_grad_(grad)}


def tolerance(device):
    return {"atol": 1e-5, "rtol": 1e-5} if device == "cpu" else {"atol": 2e-2, "rtol": 2e-2}


@pytest.mark.parametrize("options", OPTIONS)
def test_only_the_rows_in_use(device, options):
    options = with_sinks(options, device)
    q, k, v = problem(device)
    expected, expected_lse = by_sequence(q, k, v, USED, **options)
    unused = torch.ones(TOTAL_Q, dtype=torch.bool, device=device)
    for begin, end in ((0, 9), (17, 60), (60, 81)):
        unused[begin:end] = False
    q[unused] = math.nan  # whatever they hold
    out, lse, _ = call(device, (q, k, v), USED, return_attn_probs=True, **options)
    torch.testing.assert_close(out, expected, **tolerance(device))
    torch.testing.assert_close(lse, expected_lse, **tolerance(device))
    assert (out[unused] == 0).all() and (lse[:, unused] == math.inf).all()


@pytest.mark.parametrize("options", OPTIONS)
def test_gradients(device, options):
    leaves = [x.requires_grad_() for x in problem(device)]
    mine, theirs = (with_sinks(options, device, grad=True) for _ in range(2))
    dout = torch.randn(TOTAL_Q, HEADS, HEAD_DIM_V, device=device, dtype=leaves[0].dtype)
    inputs = [*leaves, *([mine["sinks"]] if "sinks" in mine else [])]
    grads = torch.autograd.grad(call(device, leaves, USED, deterministic=True, **mine), inputs, dout)
    inputs = [*leaves, *([theirs["sinks"]] if "sinks" in theirs else [])]
    expected = torch.autograd.grad(by_sequence(*leaves, USED, **theirs)[0], inputs, dout)
    for grad, right in zip(grads, expected):
        scale = right.abs().max()
        torch.testing.assert_close(grad / scale, right / scale, **tolerance(device))
    assert (grads[0][9:17] == 0).all() and (grads[0][81:] == 0).all()


def test_all_rows_in_use_are_no_other_call(device):
    tensors = problem(device)
    plain = call(device, tensors, None, causal=True)
    for dtype in (torch.int32, torch.int64):
        assert torch.equal(call(device, tensors, (100,) * 4, dtype=dtype, causal=True), plain)
    assert (call(device, tensors, (-3, 0, 0, 0)) == 0).all()


@pytest.mark.parametrize("cu_q", ((0, 50, 20, 60, 30), (5, 5, 90, 500, 3)))
def test_any_contents(device, cu_q):
    """cu_seqlens_q counts as its running maximum, as without seqused_q."""
    tensors = problem(device)
    used = (12, 3, 7, 200)
    expected, _ = by_sequence(*tensors, used, cu_q=cu_q, causal=True)
    torch.testing.assert_close(call(device, tensors, used, cu_q=cu_q, causal=True), expected, **tolerance(device))


def test_other_results(device):
    """The largest logit is that of the rows in use; the S_dmask is by sequence."""
    q, k, v = problem(device)
    q[9:17] *= 1000
    _, max_logit = call(device, (q, k, v), USED, return_max_logit=True)
    assert max_logit.max() < 1000 < call(device, (q, k, v), None, return_max_logit=True)[1].max()
    out, lse, dmask, _ = call(
        device, (q, k, v), USED, return_max_logit=True, return_attn_probs=True, dropout_p=0.5
    )  # fmt: skip
    assert out.shape == q.shape and lse.shape == (HEADS, TOTAL_Q) and dmask.shape == (4, HEADS, 128, 128)
    assert (dmask[0, :, 9:] == 0).all() and (dmask[0, :, :9, :40] != 0).any()


def test_compiled(device):
    tensors = problem(device)

    @torch.compile(backend="aot_eager", fullgraph=True)
    def compiled(q, k, v, cu_q, cu_k, used):
        return flash_attn_varlen_func(q, k, v, cu_q, cu_k, 43, 60, causal=True, return_attn_probs=True, seqused_q=used)

    lengths = (as_int(device, CU_Q), as_int(device, CU_K), as_int(device, USED))
    expected = call(device, tensors, USED, causal=True, return_attn_probs=True)
    assert all(map(torch.equal, compiled(*tensors, *lengths), expected))


@pytest.mark.parametrize(
    "used, message",
    [
        ([1, 2, 3], r"seqused_q: expected shape \[4\], got \[3\]"),
        ([1.0, 2.0, 3.0, 4.0], "seqused_q: expected dtype int32 or int64, got float32"),
    ],
)
def test_wrong_ones_are_named(device, used, message):
    tensors = problem(device)
    lengths = (as_int(device, CU_Q), as_int(device, CU_K), 43, 60)
    with pytest.raises(RuntimeError, match=message):
        flash_attn_varlen_func(*tensors, *lengths, seqused_q=torch.tensor(used, device=device))
    with pytest.raises(TypeError, match="seqused_q: expected a Tensor, got list"):
        flash_attn_varlen_func(*tensors, *lengths, seqused_q=used)


@pytest.mark.devices("cuda")
def test_nothing_waits_for_the_gpu(device):
    tensors, lengths = problem(device), (as_int(device, CU_Q), as_int(device, CU_K), 43, 60)
    used = as_int(device, USED)
    flash_attn_varlen_func(*tensors, *lengths, seqused_q=used)
    with no_synchronisation():
        flash_attn_varlen_func(*tensors, *lengths, seqused_q=used)
