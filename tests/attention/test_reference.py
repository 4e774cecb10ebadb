"""The reference and the error criterion themselves, on problems small enough to check by hand."""

from __future__ import annotations

import math

import pytest
import torch
from reference import assert_accurate, attention, attention_by_rows, gather_pages, visible


def test_pages_of_the_reference():
    """The reference's own page gather, on a hand-made pool."""
    pages = torch.arange(12.0).view(3, 4, 1, 1)
    rows = gather_pages(pages, torch.tensor([2, 0, -1]), 6)
    assert rows.flatten().tolist() == [8.0, 9.0, 10.0, 11.0, 0.0, 1.0]


def test_reference_on_a_hand_made_problem():
    """Two keys, weights 3/4 and 1/4, by hand."""
    q = torch.ones(1, 1, 1, 1)
    k = torch.tensor([3.0, 1.0]).log().view(1, 2, 1, 1)
    v = torch.tensor([4.0, 8.0]).view(1, 2, 1, 1)
    result = attention(q, k, v, scale=1.0)
    assert abs(result.out.item() - 5.0) < 1e-6
    assert abs(result.lse.exp().item() - 4.0) < 1e-6
    causal = attention(torch.ones(1, 2, 1, 1), k, v, scale=1.0, causal=True)
    assert causal.out[0, 0].item() == 4.0 and abs(causal.out[0, 1].item() - 5.0) < 1e-6


def test_visible_keys_by_hand():
    assert visible(2, 4, causal=True).int().tolist() == [[1, 1, 1, 0], [1, 1, 1, 1]]
    assert visible(3, 2, causal=True).int().tolist() == [[0, 0], [1, 0], [1, 1]]
    assert visible(2, 4, window=(1, 0)).int().tolist() == [[0, 1, 1, 0], [0, 0, 1, 1]]
    assert visible(2, 4, causal=True, window=(1, 3)).int().tolist() == [[0, 1, 1, 0], [0, 0, 1, 1]]
    assert visible(4, 2, window=(0, 1)).int().tolist() == [[0, 0], [1, 0], [1, 1], [0, 1]]


def test_masked_rows_and_their_gradients():
    q, k, v = (torch.randn(1, n, 2, 4, dtype=torch.float64, requires_grad=True) for n in (5, 3, 3))
    result = attention(q, k, v, causal=True)
    result.out.sum().backward()
    assert (result.out[:, :2] == 0).all() and torch.isposinf(result.lse[:, :, :2]).all()
    assert (q.grad[:, :2] == 0).all() and not any(x.grad.isnan().any() for x in (q, k, v))
    empty = attention(q, k[:, :0], v[:, :0])
    assert (empty.out == 0).all() and torch.isposinf(empty.lse).all()


@pytest.mark.parametrize("options", ({}, {"causal": True, "window": (4, -1)}, {"window": (3, 2)}), ids=str)
def test_rows_by_rows_are_the_whole(options):
    q, k, v, dout = (torch.randn(2, n, h, 4, dtype=torch.float64) for n, h in ((7, 4), (9, 2), (9, 2), (7, 4)))
    leaves = [x.requires_grad_() for x in (q, k, v)]
    options = {**options, "alibi_slopes": torch.rand(4), "keep": torch.rand(2, 4, 7, 9) > 0.2, "rp_dropout": 1.25}
    whole = attention(*leaves, **options)
    expected = [whole.out, whole.lse, *torch.autograd.grad(whole.out, leaves, dout)]
    found = attention_by_rows(q, k, v, dout, at_once=2 * 4 * 9 * 2, **options)
    for name, value in zip(("out", "lse", "dq", "dk", "dv"), expected, strict=True):
        torch.testing.assert_close(found[name], value.detach())
    del options["keep"], options["rp_dropout"]
    rounded = attention_by_rows(q, k, v, **options)  # to the dtype of v: not at all
    torch.testing.assert_close(rounded["emulated"], rounded["out"])


def test_sinks_by_hand():
    """Two keys of weights 3 and 1, a sink of weight 4; a row without keys has the sink alone."""
    q = torch.ones(1, 1, 1, 1)
    k = torch.tensor([3.0, 1.0]).log().view(1, 2, 1, 1)
    v = torch.tensor([4.0, 8.0]).view(1, 2, 1, 1)
    sinks = torch.tensor([4.0]).log()
    result = attention(q, k, v, scale=1.0, sinks=sinks)
    assert abs(result.out.item() - 20 / 8) < 1e-6 and abs(result.lse.exp().item() - 8.0) < 1e-5
    assert abs(result.max_logit.item() - math.log(3)) < 1e-6
    empty = attention(q, k[:, :0], v[:, :0], sinks=sinks)
    assert empty.max_logit.item() == -math.inf
    assert empty.out.item() == 0.0 and abs(empty.lse.exp().item() - 4.0) < 1e-6


def test_alibi_and_softcap_by_hand():
    zero = torch.zeros(1, 3, 1, 2)
    result = attention(zero[:, :1], zero, zero, alibi_slopes=torch.tensor([0.5]))
    expected = torch.softmax(torch.tensor([-1.0, -0.5, 0.0], dtype=torch.float64), -1)
    torch.testing.assert_close(result.probs.flatten(), expected)
    ones = torch.full((1, 1, 1, 1), 10.0)
    assert abs(attention(ones, ones, ones, scale=1.0, softcap=2.0).lse.item() - 2.0) < 1e-6


NAN, INF = float("nan"), float("inf")


@pytest.mark.parametrize(
    "ours,expected",
    [
        ([NAN, 1.0], [0.0, 1.0]),
        ([0.0, 1.0], [NAN, 1.0]),
        ([NAN, 1.0], [1.0, NAN]),
        ([INF, 1.0], [0.0, 1.0]),
        ([-INF, 1.0], [INF, 1.0]),
        ([1.1, 1.0], [1.0, 1.0]),
    ],
)
def test_criterion_rejects(ours, expected):
    plain = torch.tensor([1.04, 1.0])
    with pytest.raises(AssertionError, match="x: "):
        assert_accurate(
            torch.tensor(ours), torch.tensor(expected), torch.where(torch.tensor(expected) == 1, plain, 1.0), "x"
        )


def test_criterion_accepts():
    values = torch.tensor([1.0, NAN, INF, -INF])
    assert_accurate(values, values, values)
    assert_accurate(torch.tensor([1.079]), torch.tensor([1.0]), torch.tensor([1.04]))
    assert_accurate(torch.empty(0, 3), torch.empty(0, 3), torch.empty(0, 3))


@pytest.mark.parametrize("dtype", (torch.bfloat16, torch.float16, torch.float32))
def test_criterion_allows_two_roundings(dtype):
    """Where plain attention happens to be exact: two halves of a unit of the largest value, but not three."""
    expected = torch.tensor([2.0, -4.0, 1.0], dtype=torch.float64)
    half = 4 * torch.finfo(dtype).eps / 2
    assert_accurate(expected + 2 * half, expected, expected.to(dtype), slack=0.0)
    with pytest.raises(AssertionError):
        assert_accurate(expected + 3 * half, expected, expected.to(dtype), slack=0.0)
