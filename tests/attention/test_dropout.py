"""Dropout: the public mask is the one applied, its statistics, S_dmask, and the random state."""

from __future__ import annotations

import pytest
import torch
from cases import Case
from harness import check_forward, make_problem, run
from reference import assert_accurate

from flash_attn import dropout_mask
from flash_attn.flash_attn_interface import _flash_attn_forward, _flash_attn_varlen_forward

PROBABILITIES = (1e-3, 0.1, 0.5, 0.99, 0.999)


def forward_with_state(problem, p):
    """(out, lse, S_dmask, rng_state) through the operators that return the random state."""
    c, q = problem.case, problem.q
    scale = q.shape[-1] ** -0.5
    if problem.layout is None:
        return _flash_attn_forward(q, problem.k, problem.v, p, scale, c.causal, *c.window, c.softcap,
                                   problem.alibi_slopes, True)  # fmt: skip
    return _flash_attn_varlen_forward(
        q, problem.k, problem.v, problem.cu_seqlens_q, problem.cu_seqlens_k, problem.max_seqlen_q,
        problem.max_seqlen_k, p, scale, c.causal, *c.window, c.softcap, problem.alibi_slopes, True,
        problem.block_table, problem.leftpad_k, problem.seqused_k,
    )  # fmt: skip


def case_of(p, kind="dense", **options):
    values = {"batch": 3, "seqlen_q": 150, "seqlen_k": 210, "nheads": 4, "nheads_k": 2, "head_dim": 64,
              "dtype": "bfloat16", **options}  # fmt: skip
    return Case(dropout=p, kind=kind, **values)


@pytest.mark.parametrize("p", PROBABILITIES)
@pytest.mark.parametrize("kind", ("dense", "packed", "padded", "seqused", "leftpad"))
@pytest.mark.parametrize("head_dim, dtype", ((64, "bfloat16"), (128, "float16"), (256, "bfloat16"), (32, "float16")))
def test_out_is_the_reference_under_the_public_mask(device, head_dim, dtype, kind, p):
    problem = make_problem(case_of(p, kind, head_dim=head_dim, dtype=dtype, causal=True), device)
    out, lse, _, rng_state = forward_with_state(problem, p)
    assert rng_state.dtype == torch.int64 and rng_state.shape == (2,)
    assert rng_state.device.type == device
    check_forward(problem, out, lse, keep=dropout_mask(rng_state, p, 3, 4, 150, 210))


@pytest.mark.each
@pytest.mark.parametrize("dtype", ("float16", "bfloat16"))
@pytest.mark.parametrize("window", ((-1, -1), (100, 20), (-1, 0)))
def test_out_of_several_row_blocks(device, window, dtype):
    """Some rows of a row block let key blocks pass that others compute, and the last one is not full."""
    seqlens = {"batch": 2, "seqlen_q": 600, "seqlen_k": 570}
    problem = make_problem(case_of(0.3, **seqlens, window=window, head_dim=128, dtype=dtype), device)
    out, lse, _, rng_state = forward_with_state(problem, 0.3)
    check_forward(problem, out, lse, keep=dropout_mask(rng_state, 0.3, 2, 4, 600, 570))


@pytest.mark.each
@pytest.mark.parametrize("p", PROBABILITIES)
@pytest.mark.parametrize("dtype", ("float16", "bfloat16"))
def test_s_dmask(device, p, dtype):
    """|S_dmask| is the softmax before dropout and its sign is the mask, also where no key is visible."""
    case = case_of(p, causal=True, seqlen_q=230, dtype=dtype, window=(70, -1), softcap=9.0, alibi="batch")
    problem = make_problem(case, device)
    out, lse, dmask, rng_state = forward_with_state(problem, p)
    reference = check_forward(problem, out, lse, keep=dropout_mask(rng_state, p, 3, 4, 230, 210))
    assert dmask.shape == (3, 4, 256, 256) and dmask.dtype == problem.q.dtype
    inside = dmask[:, :, :230, :210]
    assert torch.equal(inside < 0, ~dropout_mask(rng_state, p, 3, 4, 230, 210))
    assert (dmask[:, :, 230:] == 0).all() and (dmask[:, :, :, 210:] == 0).all()
    assert_accurate(inside.abs(), reference.probs, reference.probs.to(dmask.dtype), "S_dmask")
    unseen = reference.probs == 0
    smallest = torch.finfo(dmask.dtype).smallest_normal * torch.finfo(dmask.dtype).eps
    assert set(inside[unseen].unique().tolist()) <= {0.0, -smallest}


def test_s_dmask_of_sequences(device):
    problem = make_problem(case_of(0.4, "leftpad", page_size=7, causal=True), device)
    _, _, dmask, rng_state = forward_with_state(problem, 0.4)
    layout = problem.layout
    assert list(dmask.shape[:2]) == [3, 4]
    keep = dropout_mask(rng_state, 0.4, 3, 4, *dmask.shape[2:])
    for i, (sq, sk) in enumerate(zip(layout.lens_q, layout.lens_k)):
        assert torch.equal(dmask[i, :, :sq, :sk] < 0, ~keep[i, :, :sq, :sk])
        assert (dmask[i, :, sq:] == 0).all() and (dmask[i, :, :, sk:] == 0).all()


def test_no_s_dmask_unless_asked_with_dropout(device):
    problem = make_problem(case_of(0.0), device)
    assert run(problem)[2].shape == (0,)
    result = _flash_attn_forward(problem.q, problem.k, problem.v, 0.3, 0.1, False, -1, -1, 0.0, None, False)
    assert result[2].shape == (0,)
    assert isinstance(run(problem, dropout_p=0.3, return_attn_probs=False), torch.Tensor)


@pytest.mark.parametrize("p", PROBABILITIES)
def test_dropped_fraction(device, p):
    """The exact threshold: the count of dropped entries lies within 6 standard deviations of n p."""
    problem = make_problem(case_of(p, batch=4, seqlen_q=1024, seqlen_k=1024, nheads=2, head_dim=32), device)
    dropped = (forward_with_state(problem, p)[2] < 0).sum().item()
    n = 4 * 2 * 1024 * 1024
    assert abs(dropped - n * p) <= 6 * (n * p * (1 - p)) ** 0.5


def test_mask_entries_are_uncorrelated(device):
    """Neighbours, the entries that share a random draw, heads, batches, and consecutive offsets."""
    state = torch.randint(0, 2**62, (2,), device=device)
    mask = dropout_mask(state, 0.5, 3, 3, 512, 512).double() * 2 - 1
    n = mask[0, 0].numel()
    bound = 6 / n**0.5
    for rows, columns in ((1, 0), (0, 1), (8, 0), (0, 8), (8, 8), (16, 0), (0, 16), (1, 1), (2, 0), (0, 2), (7, 9)):
        shifted = mask.roll((rows, columns), (2, 3))
        assert ((mask * shifted).mean((2, 3)).abs() < bound).all(), (rows, columns)
    flat = mask.flatten(0, 1).flatten(1)
    correlation = flat @ flat.T / n - torch.eye(9, device=device, dtype=torch.double)
    assert (correlation.abs() < bound).all()
    other = dropout_mask(state + torch.tensor([0, 1], device=device), 0.5, 1, 1, 512, 512).double() * 2 - 1
    assert (mask[0, 0] * other[0, 0]).mean().abs() < bound


@pytest.mark.parametrize("p", (1e-12, 2.0**-32, 1 - 1e-7, 1 - 2.0**-40))
def test_extreme_probabilities(device, p):
    problem = make_problem(case_of(p, head_dim=128), device)
    out, lse, dmask, rng_state = forward_with_state(problem, p)
    check_forward(problem, out, lse, keep=dropout_mask(rng_state, p, 3, 4, 150, 210))
    if p == 1e-12:
        assert (dmask >= 0).all(), "a probability below half a step of the threshold drops nothing"


@pytest.mark.parametrize("kind", ("dense", "packed"))
def test_seed_decides_the_mask(device, kind):
    problem = make_problem(case_of(0.3, kind), device)
    torch.manual_seed(11)
    first, second = forward_with_state(problem, 0.3), forward_with_state(problem, 0.3)
    torch.manual_seed(11)
    again = forward_with_state(problem, 0.3)
    assert all(torch.equal(a, b) for a, b in zip(first, again))
    assert not torch.equal(first[3], second[3]) and not torch.equal(first[2], second[2])


def test_no_dropout_draws_nothing(device):
    """Without dropout the state is zeros and the generator does not advance."""
    problem = make_problem(case_of(0.0), device)
    torch.manual_seed(5)
    expected = torch.rand(4, device=device)
    torch.manual_seed(5)
    result = forward_with_state(problem, 0.0)
    assert torch.equal(result[3].cpu(), torch.zeros(2, dtype=torch.int64))
    assert torch.equal(expected, torch.rand(4, device=device))


@pytest.mark.parametrize("p", (0.17, 0.999))
def test_mask_is_the_same_on_every_device_and_for_slices(device, p):
    state = torch.randint(-(2**62), 2**62, (2,))
    mask = dropout_mask(state, p, 2, 3, 100, 131)
    assert torch.equal(mask, dropout_mask(state.to(device), p, 2, 3, 100, 131).cpu())
    assert torch.equal(mask, dropout_mask(state, p, 2, 3, 100, 131, device=device).cpu())
    assert torch.equal(mask[:1, :2, :37, :90], dropout_mask(state, p, 1, 2, 37, 90))
