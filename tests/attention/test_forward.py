"""Every pair of features, forward, against the float64 reference (--full: the product of features)."""

from __future__ import annotations

import pytest
import torch
from cases import FEATURES, GQA_RATIOS, HEAD_DIMS, SEQLENS_Q, Case, pairwise
from harness import check_forward, check_public_call, make_problem, run
from reference import assert_accurate

DTYPE = "bfloat16"


def test_pairwise_rows_hold_every_pair():
    rows = pairwise(FEATURES)
    names = list(FEATURES)
    for i, a in enumerate(names):
        for b in names[i + 1 :]:
            seen = {(row[a], row[b]) for row in rows}
            wanted = {(x, y) for x in FEATURES[a] for y in FEATURES[b]}
            impossible = {("page_size", "kind"): {(page, "dense") for page in FEATURES["page_size"] if page}}
            assert seen == wanted - impossible.get((a, b), set())


def test_feature_combinations(device, case):
    problem = make_problem(case, device)
    out, lse, dmask = run(problem)
    if not case.dropout:
        assert dmask.shape == (0,)
        check_forward(problem, out, lse)
        return
    reference = check_forward(problem, out, lse, keep=dmask >= 0)
    if problem.layout is None:
        sq, sk = case.seqlen_q, case.seqlen_k
        rounded = reference.probs.to(dmask.dtype)
        assert_accurate(dmask[:, :, :sq, :sk].abs(), reference.probs, rounded, "S_dmask")


@pytest.mark.each
@pytest.mark.parametrize("seqlen_q", SEQLENS_Q)
@pytest.mark.parametrize("seqlen_k", (0, 1, 128, 321))
def test_sequence_lengths(device, seqlen_q, seqlen_k):
    for causal, window in ((False, (-1, -1)), (True, (-1, -1)), (False, (100, 30))):
        case = Case(2, seqlen_q, seqlen_k, 2, 1, 64, DTYPE, causal=causal, window=window)
        check_public_call(make_problem(case, device))


@pytest.mark.parametrize("head_dim", HEAD_DIMS + (1, 4, 37, 44, 100, 251, 300))
def test_head_dims(device, head_dim):
    for dtype in ("float16", "bfloat16"):
        check_public_call(make_problem(Case(1, 70, 150, 2, 2, head_dim, dtype, causal=True), device))


@pytest.mark.parametrize("ratio", GQA_RATIOS)
def test_gqa_ratios(device, ratio):
    for heads_k in (1, 2):
        check_public_call(make_problem(Case(2, 33, 80, ratio * heads_k, heads_k, 64, DTYPE, causal=True), device))


WINDOWS = ((0, 0), (0, -1), (-1, 0), (5, -1), (-1, 5), (64, 64), (127, 0), (0, 300), (300, 0), (10**9, 3), (3, 10**9),
           (2**31 - 1, 2**31 - 1), (-7, -3))  # fmt: skip


@pytest.mark.parametrize("window", WINDOWS, ids=str)
def test_windows(device, window):
    for seqlen_q, seqlen_k in ((100, 100), (130, 260), (300, 70)):
        for causal in (False, True):
            case = Case(1, seqlen_q, seqlen_k, 2, 2, 64, DTYPE, causal=causal, window=window)
            check_public_call(make_problem(case, device))


@pytest.mark.parametrize("left,right", [(-1, 60), (20, 70), (-1, 69), (200, -1), (20, -1)])
def test_window_beyond_the_keys_when_queries_outnumber_them(device, left, right):
    """FlashAttention-2 clamps such windows to unbounded, or cuts early rows; the definition does neither."""
    check_public_call(make_problem(Case(2, 257, 60, 2, 1, 128, DTYPE, window=(left, right)), device))


@pytest.mark.parametrize("kind", ("dense", "packed"))
def test_causal_with_a_right_window_is_causal(device, kind):
    """transformers passes (w - 1, w - 1) together with causal."""
    problem = make_problem(Case(4, 150, 200, 2, 2, 64, DTYPE, causal=True, kind=kind), device)
    both = run(problem, window_size=(31, 31))
    left = run(problem, window_size=(31, 0), causal=False)
    check_forward(problem, both[0], both[1], window=(31, 31))
    assert torch.equal(both[0], left[0]) and torch.equal(both[1], left[1])


def test_fully_masked_rows_are_zero_with_infinite_lse(device):
    problem = make_problem(Case(2, 200, 50, 2, 1, 64, DTYPE, causal=True), device)
    out, lse = check_public_call(problem)
    assert (out[:, :150] == 0).all()
    assert torch.isposinf(lse[:, :, :150]).all() and torch.isfinite(lse[:, :, 150:]).all()


@pytest.mark.parametrize("head_dim, scale", ((64, 0.0), (64, -0.3), (64, 1.0), (64, 1e-4), (512, -0.3), (512, 1.0)))
def test_softmax_scales(device, head_dim, scale):
    for softcap, alibi in ((0.0, "none"), (10.0, "heads"), (0.0, "batch")):
        case = Case(2, 90, 140, 2, 2, head_dim, DTYPE, causal=True, softcap=softcap, alibi=alibi)
        problem = make_problem(case, device)
        out, lse, _ = run(problem, softmax_scale=scale)
        check_forward(problem, out, lse, scale=scale)
    for seqlen_q, causal, window in ((90, False, (-1, -1)), (140, True, (-1, -1)), (90, False, (30, 9))):
        case = Case(2, seqlen_q, 140, 2, 2, head_dim, DTYPE, causal=causal, window=window)
        problem = make_problem(case, device)
        out, lse, _ = run(problem, softmax_scale=scale)
        check_forward(problem, out, lse, scale=scale)


@pytest.mark.parametrize("dtype", ("float16", "bfloat16"))
@pytest.mark.parametrize("size", (1e4, -1e4))
@pytest.mark.parametrize("causal", (False, True))
def test_large_logits(device, dtype, size, causal):
    """Logits of +-1e4: sums of exponentials neither overflow nor vanish."""
    problem = make_problem(Case(1, 100, 180, 2, 2, 64, dtype, causal=causal), device)
    problem.q.copy_(torch.sign(problem.q) * 4)
    out, lse, _ = run(problem, softmax_scale=abs(size) / 40)
    check_forward(problem, out, lse, scale=abs(size) / 40)
    problem.k.copy_(problem.k.abs())
    problem.q.fill_(size / 1e4)
    out, lse, _ = run(problem, softmax_scale=200.0)
    check_forward(problem, out, lse, scale=200.0)


@pytest.mark.parametrize("softcap", (0.5, 30.0, 1e4))
def test_softcaps(device, softcap):
    for scale in (None, 5.0):
        problem = make_problem(Case(1, 130, 200, 3, 1, 64, DTYPE, causal=True, softcap=softcap), device)
        out, lse, _ = run(problem, softmax_scale=scale)
        check_forward(problem, out, lse, scale=scale)


@pytest.mark.parametrize("trend", ("rising", "falling", "level"))
@pytest.mark.parametrize(
    "features",
    (
        {},
        {"causal": True, "softcap": 20.0},
        {"alibi": "heads", "window": (1500, 200)},
        {"dropout": 0.2},
        {"kind": "packed", "page_size": 16, "causal": True},
        {"head_dim": 512},
    ),
    ids=str,
)
def test_running_maximum_over_many_key_blocks(device, trend, features):
    """The maximum of a row rises with every block, or is in the first one."""
    problem = make_problem(Case(1, 140, 2600, 2, 1, **{"head_dim": 64, "dtype": DTYPE, **features}), device)
    size = {"rising": (0.1, 3.0), "falling": (3.0, 0.1), "level": (1.0, 1.0)}[trend]
    if problem.layout is None:
        problem.k.mul_(torch.linspace(*size, 2600, device=device)[:, None, None])
    out, lse, dmask = run(problem)
    check_forward(problem, out, lse, keep=dmask >= 0 if problem.case.dropout else None)


@pytest.mark.parametrize("slope", (0.0, 1.0, 30.0, -0.1))
def test_alibi_slopes(device, slope):
    for seqlen_q, seqlen_k in ((150, 90), (90, 150)):
        problem = make_problem(Case(2, seqlen_q, seqlen_k, 4, 2, 64, DTYPE, alibi="batch"), device)
        problem.alibi_slopes.fill_(slope)[0, 1] = 0.5
        check_public_call(problem)


def test_alibi_slopes_expanded_over_the_batch(device):
    problem = make_problem(Case(3, 50, 60, 4, 2, 64, DTYPE, alibi="heads"), device)
    problem.alibi_slopes = problem.alibi_slopes.expand(3, 4)
    check_public_call(problem)


@pytest.mark.devices("cuda")
@pytest.mark.parametrize("head_dim", (64, 128, 256, 512))
@pytest.mark.parametrize("causal", (False, True))
def test_large_problems(device, head_dim, causal):
    check_public_call(make_problem(Case(2, 2048, 3000, 4, 2, head_dim, DTYPE, causal=causal), device))
    case = Case(2, 3000, 2048, 4, 2, head_dim, "float16", causal=causal, window=(700, 300), softcap=20.0, alibi="batch")
    check_public_call(make_problem(case, device))
