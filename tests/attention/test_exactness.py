"""FLASH_ATTN_ROW_MAX=exact: errors against float64 as FlashAttention-2's, since no row's largest weight is rounded.

Yardsticks of out are SDPA's flash backend and an emulation: P relative to the exact row max, rounded to the dtype of V,
over the sum of unrounded P. On a GPU SDPA is more exact by up to 3 %: its blocks of keys are shorter, and the largest
weight so far of each is not rounded either. LSE and gradients are compared with SDPA's.
"""

from __future__ import annotations

from pathlib import Path

import kernel_tables
import pytest
import torch
from reference import attention, attention_by_rows
from torch.nn.attention import SDPBackend, sdpa_kernel

from flash_attn import explain, flash_attn_func

NORM, LARGEST, OTHERS = 1.02, 1.1, 1.05  # of out; of the largest thousandth of its errors; norms of gradients and LSE
DTYPES = (torch.bfloat16, torch.float16)
# Of gradients that are compared. The error of a row of dq is mostly that of its delta, one number: two roundings of P
# alone change the norm over n rows by 0.42 / sqrt(n), standard deviation of an emulation. OTHERS is seven times that.
ROWS = 4096
BOUNDS = {"out": NORM, "largest thousandth": LARGEST, "lse": OTHERS, "dq": OTHERS, "dk": OTHERS, "dv": OTHERS}
SINK, DOMINANT = 10.0, 12.0  # nats
HALF_ULP = 2.0**-24  # of float32
LAB = Path(__file__).resolve().parents[2] / "benchmarks" / "lab"


@pytest.fixture(autouse=True)
def exact_row_max(monkeypatch):
    monkeypatch.setenv("FLASH_ATTN_ROW_MAX", "exact")


def tensors(device, dtype, head_dim, seqlen_q, seqlen_k, std=1.0, heads=4):
    q = std * torch.randn(1, seqlen_q, heads, head_dim, device=device)
    k, v = (torch.randn(1, seqlen_k, heads, head_dim, device=device) for _ in "kv")
    return q.to(dtype), k.to(dtype), v.to(dtype)


def raised(q, k, key, nats):
    """Adds `nats` to the logits of one key in all rows, by the first column of q and k."""
    q, k = q.clone(), k.clone()
    q[..., 0], k[..., 0] = 1.0, 0.0
    k[:, key, :, 0] = nats * q.shape[-1] ** 0.5
    return q, k


def flash_backend(q, k, v, causal=False):
    with sdpa_kernel(SDPBackend.FLASH_ATTENTION):
        out = torch.nn.functional.scaled_dot_product_attention(
            *(x.transpose(1, 2) for x in (q, k, v)), is_causal=causal
        )
    return out.transpose(1, 2)


def flash_backend_lse(q, k, v):
    operators = torch.ops.aten
    operator = operators._scaled_dot_product_flash_attention
    if not q.is_cuda:
        operator = operators._scaled_dot_product_flash_attention_for_cpu
    return operator(*(x.transpose(1, 2) for x in (q, k, v)))[1]


def assert_as_exact(ours, others, exact):
    ours, *others = (x.double() - exact for x in (ours, *others))
    assert ours.norm() <= NORM * max(x.norm() for x in others)
    assert largest(ours) <= LARGEST * max(map(largest, others))


def largest(errors):
    """Mean of the largest thousandth: the one largest error is luck."""
    return errors.abs().flatten().topk(-(-errors.numel() // 1000)).values.mean()


def check(q, k, v, **kwargs):
    exact = attention_by_rows(q, k, v, **kwargs)
    others = [exact["emulated"]]
    if "alibi_slopes" not in kwargs:
        others.append(flash_backend(q, k, v, **kwargs))
    assert_as_exact(flash_attn_func(q, k, v, **kwargs), others, exact["out"])


def sizes(device):
    return (128, 512, 2048, 4096, 16384) if device == "cuda" else (192,)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("head_dim", kernel_tables.WGMMA)
@pytest.mark.parametrize("std", (1.0, 3.0, 8.0))
@pytest.mark.parametrize("causal", (False, True), ids=("full", "causal"))
def test_out(device, dtype, head_dim, std, causal):
    for seqlen in sizes(device):
        check(*tensors(device, dtype, head_dim, seqlen, seqlen, std), causal=causal)


@pytest.mark.devices("cuda")
@pytest.mark.parametrize("head_dim", (64, 96, 128, 192, 256))
@pytest.mark.parametrize("kind", ("full", "causal", "window", "packed", "few queries", "decode", "pages", "dropout"))
def test_kinds_of_calls(device, monkeypatch, kind, head_dim):
    """The benchmark's problems in both families."""
    monkeypatch.syspath_prepend(str(LAB))
    import accuracy

    problems = [x for x in accuracy.problems(device) if x.kind == kind and x.row.case.head_dim == head_dim]
    assert problems
    for problem in problems:
        if problem.row.case.seqlen_q <= 4096:
            check_problem(accuracy, problem, device)


def check_problem(accuracy, problem, device):
    names, first, case = ("ours_exact", "mma_sync_exact"), int(torch.randint(2**30, ())), problem.row.case
    calls = -(-ROWS // (case.batch * case.nheads * case.seqlen_q)) if problem.has_backward else 1
    entries = [
        accuracy.measure(problem, (*names, "sdpa_flash"), torch.device(device), seed)
        for seed in range(first, first + calls)
    ]
    results = {name: mean_figures(accuracy.FIGURES, entries, name) for name in entries[0]["results"]}
    theirs = results.get("sdpa_flash") or results["emulated"]
    for name in names:
        for figure, bound in BOUNDS.items():
            mine, other = results[name][figure], theirs[figure]
            if mine is not None and other is not None:
                least = 1e6 * HALF_ULP if figure == "lse" else 0.0
                assert mine <= bound * other + least, (name, figure, entries[0]["label"], problem.logits, first)


def mean_figures(figures, entries, name):
    """Root mean squares over several measurements; None where a figure was not measured."""
    columns = zip(*(entry["results"][name] for entry in entries))
    return {
        figure: None if None in values else (sum(x * x for x in values) / len(values)) ** 0.5
        for figure, values in zip(figures, columns)
    }


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("nats", (SINK, DOMINANT), ids=("sink", "dominant"))
def test_one_large_weight(device, dtype, nats):
    for seqlen in sizes(device):
        q, k, v = tensors(device, dtype, 128, seqlen, seqlen)
        key = 0 if nats == SINK else int(torch.randint(seqlen, ()))
        check(*raised(q, k, key, nats), v)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("head_dim", (64, 128, 160, 256))
def test_rows_of_one_key_return_its_value(device, dtype, head_dim):
    q, k, v = tensors(device, dtype, head_dim, 339, 1)
    slopes = torch.rand(q.shape[2], device=device)
    for kwargs in ({}, {"alibi_slopes": slopes}):
        assert torch.equal(flash_attn_func(q, k, v, **kwargs), v.expand_as(q))
    q, k, v = tensors(device, dtype, head_dim, 256, 256)
    assert torch.equal(flash_attn_func(q, k, v, causal=True)[:, 0], v[:, 0])


@pytest.mark.parametrize("row_max", ("exact", "lagging"))
@pytest.mark.parametrize("family", ("", "mma_sync"))
@pytest.mark.parametrize("heads_k", (12, 4, 1))
def test_one_key_far_away_returns_its_value(device, monkeypatch, row_max, family, heads_k):
    """A case of FlashAttention-2's suite: biases down to -100 nats, of a head dim between those of the kernels."""
    monkeypatch.setenv("FLASH_ATTN_ROW_MAX", row_max)
    if family:
        monkeypatch.setenv("FLASH_ATTN_FAMILY", family)
    q = torch.randn(1, 339, 12, 160, device=device, dtype=torch.float16)
    k, v = (torch.randn(1, 1, heads_k, 160, device=device, dtype=torch.float16) for _ in "kv")
    slopes = 0.3 * torch.rand(1, 12, device=device)
    expected = v.repeat_interleave(12 // heads_k, dim=2)
    assert torch.equal(flash_attn_func(q, k, v, alibi_slopes=slopes), expected.expand_as(q))
    causal = flash_attn_func(q, k, v, alibi_slopes=slopes, causal=True)
    assert torch.equal(causal[:, -1:], expected) and not causal[:, :-1].any()


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("causal", (False, True), ids=("full", "causal"))
def test_alibi(device, dtype, causal):
    for seqlen in sizes(device):
        q, k, v = tensors(device, dtype, 128, seqlen, seqlen, 3.0)
        slopes = 0.3 * torch.rand(q.shape[2], device=device)
        check(q, k, v, causal=causal, alibi_slopes=slopes)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("std", (1.0, 3.0, 8.0))
def test_lse(device, dtype, std):
    for seqlen in sizes(device):
        q, k, v = tensors(device, dtype, 128, seqlen, seqlen, std)
        exact = attention_by_rows(q, k, v)["lse"]
        ours = flash_attn_func(q, k, v, return_attn_probs=True)[1]
        theirs = flash_backend_lse(q, k, v)
        assert (ours - exact).norm() <= OTHERS * (theirs - exact).norm() + HALF_ULP * exact.norm()


@pytest.mark.devices("cuda")
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("std", (1.0, 3.0, 8.0))
@pytest.mark.parametrize("causal", (False, True), ids=("full", "causal"))
def test_gradients(device, dtype, std, causal):
    q, k, v = tensors(device, dtype, 128, 1024, 1024, std)
    dout = torch.randn_like(q)
    calls = {
        "exact": lambda *x: attention(*x, causal=causal).out,
        "ours": lambda *x: flash_attn_func(*x, causal=causal),
        "theirs": lambda *x: flash_backend(*x, causal),
    }
    grads = {}
    for name, call in calls.items():
        inputs = [(x.double() if name == "exact" else x.clone()).requires_grad_() for x in (q, k, v)]
        out = call(*inputs)
        grads[name] = torch.autograd.grad(out, inputs, dout.to(out.dtype))
    for ours, theirs, exact in zip(grads["ours"], grads["theirs"], grads["exact"], strict=True):
        assert (ours.double() - exact).norm() <= OTHERS * (theirs.double() - exact).norm()


@pytest.mark.devices("cuda")
def test_the_plan_tells_it_and_other_words_are_refused(device, monkeypatch):
    q, k, v = tensors(device, torch.bfloat16, 128, 512, 512)
    assert explain(flash_attn_func, q, k, v)["forward"]["row_max"] == "exact"
    with monkeypatch.context() as patch:
        patch.setenv("FLASH_ATTN_FAMILY", "mma_sync")
        assert explain(flash_attn_func, q, k, v)["forward"]["row_max"] == "of each block"
        assert explain(flash_attn_func, q, k, v, return_max_logit=True)["forward"]["row_max"] == "exact"
    monkeypatch.setenv("FLASH_ATTN_ROW_MAX", "lagging")
    assert explain(flash_attn_func, q, k, v)["forward"]["row_max"] == "lagging"
    assert explain(flash_attn_func, q, k, v, return_max_logit=True)["forward"]["row_max"] == "exact"
    monkeypatch.setenv("FLASH_ATTN_ROW_MAX", "late")
    with pytest.raises(RuntimeError, match='^FLASH_ATTN_ROW_MAX: expected "exact" or "lagging", got "late"'):
        flash_attn_func(q, k, v)
