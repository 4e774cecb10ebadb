"""Scores that are a part of a larger matrix: ALiBi and dropout of the CPU backend count from the part's origin."""

import pytest
import torch

import flash_attn.cpu as backend
from flash_attn.dropout import dropout_streams, dropout_threshold, keep_mask

HEADS, ROWS, P = 3, 20, 0.4
STATE = torch.tensor([12345, 6], dtype=torch.int64)


def inputs():
    q, k, v, dout = (torch.randn(ROWS, HEADS, 8, dtype=torch.float64) for _ in range(4))
    return q, k, v, dout, torch.rand(HEADS)


def bounds(*values):
    return torch.tensor(values, dtype=torch.int32)


def forward(q, k, v, slopes, origins, left=-1, right=-1):
    q_rows, k_rows = bounds(0, len(q)), bounds(0, len(k))
    return backend.varlen_fwd(
        q, k, v, None, q_rows, k_rows, None, None, None, slopes, len(q), len(k), P, 0.3, False, False, left, right,
        0.0, False, None, origins=origins, rng_state=STATE,
    )  # fmt: skip


def backward(dout, q, k, v, out, lse, slopes, origins, left=-1, right=-1):
    q_rows, k_rows = bounds(0, len(q)), bounds(0, len(k))
    return backend.varlen_bwd(
        dout, q, k, v, out, lse, None, None, None, q_rows, k_rows, slopes, len(q), len(k), P, 0.3, False, False, left,
        right, 0.0, True, None, STATE, origins=origins,
    )  # fmt: skip


def origin(*values):
    return torch.tensor([values], dtype=torch.int64)


def test_a_part_equals_that_of_the_whole():
    """Rows 7 to 13 and heads 1 to 3 of document 5 with all keys; then gradients of calls over parts of the keys."""
    q, k, v, dout, slopes = inputs()
    whole = origin(5, 0, 0, 0)
    out, lse, _, state = forward(q, k, v, slopes, whole)
    assert torch.equal(state, STATE)
    rows, heads = slice(7, 13), slice(1, 3)
    part = [x[:, heads].contiguous() for x in (q[rows], k, v)]
    here = origin(5, 1, 7, 0)
    part_out, part_lse, *_ = forward(*part, slopes[heads].contiguous(), here)
    torch.testing.assert_close(part_out, out[rows, heads], atol=1e-12, rtol=0)
    torch.testing.assert_close(part_lse, lse[heads, rows], atol=1e-12, rtol=0)

    dq, dk, dv, _ = backward(dout, q, k, v, out, lse, slopes, whole)
    sums = [torch.zeros_like(x) for x in (q, k, v)]
    for rows in (slice(0, 7), slice(7, ROWS)):
        for keys in (slice(0, 4), slice(4, ROWS)):
            here = origin(5, 0, rows.start, keys.start)
            grads = backward(
                dout[rows], q[rows], k[keys], v[keys], out[rows], lse[:, rows].contiguous(), slopes, here
            )  # fmt: skip
            sums[0][rows] += grads[0]
            sums[1][keys] += grads[1]
            sums[2][keys] += grads[2]
    for ours, expected in zip(sums, (dq, dk, dv)):
        torch.testing.assert_close(ours, expected, atol=1e-12, rtol=0)


def test_the_window_counts_from_the_part():
    q, k, v, _, slopes = inputs()
    out, *_ = forward(q, k, v, slopes, origin(0, 0, 0, 0), right=0)
    part, *_ = forward(q[5:9], k[:9], v[:9], slopes, origin(0, 0, 5, 0), right=0)
    torch.testing.assert_close(part, out[5:9], atol=1e-12, rtol=0)


def test_another_origin_gives_another_mask():
    q, k, v, _, slopes = inputs()
    outs = [
        forward(q, k, v, slopes, origin(*where))[0]
        for where in ((0, 0, 0, 0), (1, 0, 0, 0), (0, 1, 0, 0), (0, 0, 4, 4), (0, 0, 0, 2))
    ]
    assert all(not torch.equal(a, b) for i, a in enumerate(outs) for b in outs[:i])


@pytest.mark.parametrize(
    "origins, message",
    [(torch.zeros(1, 3, dtype=torch.int64), "origins: expected"), (torch.zeros(1, 4), "origins: expected")],
)
def test_bad_origins(origins, message):
    q, k, v, _, slopes = inputs()
    with pytest.raises(RuntimeError, match=message):
        forward(q, k, v, slopes, origins)


def test_dense_batches_equal_packed_ones():
    q, k, v, dout, slopes = inputs()
    here, rest = origin(5, 1, 7, 4), (P, 0.3, False, -1, 3, 0.0)
    dense = [x.unsqueeze(0) for x in (q, k, v)]
    out, lse, s_dmask, _ = backend.fwd(*dense, None, slopes, *rest, True, None, origins=here, rng_state=STATE)
    packed_out, packed_lse, *_ = forward(q, k, v, slopes, here, right=3)
    assert torch.equal(out[0], packed_out) and torch.equal(lse[0], packed_lse)
    streams = dropout_streams(*STATE.tolist(), [5], range(1, 1 + HEADS))
    kept = keep_mask(streams, 7, 7 + ROWS, 4, 4 + ROWS, dropout_threshold(P))
    assert torch.equal(s_dmask[:, :, :ROWS, :ROWS].signbit(), ~kept)
    grads = backend.bwd(
        dout[None], *dense, out, lse, None, None, None, slopes, *rest, True, None, STATE, origins=here
    )  # fmt: skip
    expected = backward(dout, q, k, v, packed_out, packed_lse, slopes, here, right=3)
    for ours, theirs in zip(grads[:3], expected):
        assert torch.equal(ours[0], theirs)
