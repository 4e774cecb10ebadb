"""The kernel families of the backward: wgmma, which compute capability 9.0 takes above head dim 32, and mma.sync.

FLASH_ATTN_FAMILY=mma_sync forces the second; both are checked against the float64 reference, on the same inputs.
"""

from __future__ import annotations

import dataclasses

import kernel_tables
import pytest
import torch
from cases import Case
from harness import check_gradients, make_problem, run
from test_families import FEATURES

pytestmark = pytest.mark.devices("cuda")

DTYPE = "bfloat16"


def gradients(problem, monkeypatch, family, seed=17, **options):
    """(gradients, dout, dlse, kept) of one training step with out and LSE in the loss."""
    monkeypatch.setenv("FLASH_ATTN_FAMILY", family)
    torch.manual_seed(seed)
    leaves = {name: x.detach().clone().requires_grad_() for name, x in problem.inputs.items()}
    out, lse, dmask = run(dataclasses.replace(problem, **leaves), **options)
    dout, dlse = torch.randn_like(out), torch.randn_like(lse)
    results = torch.autograd.grad((out, lse), list(leaves.values()), (dout, dlse))
    monkeypatch.delenv("FLASH_ATTN_FAMILY")
    return results, dout, dlse, dmask >= 0 if problem.case.dropout else None


def check_both(case, device, monkeypatch):
    problem = make_problem(case, device)
    for family in ("wgmma", "mma_sync"):
        results, dout, dlse, kept = gradients(problem, monkeypatch, family)
        check_gradients(problem, dout, results, kept, dlse)


def test_the_two_families_are_two(hopper, monkeypatch):
    """They sum in different orders, so equal bits would mean that one of them ran twice."""
    problem = make_problem(Case(1, 512, 512, 2, 2, 128, DTYPE), hopper)
    dk = [gradients(problem, monkeypatch, family)[0][1] for family in ("wgmma", "mma_sync")]
    assert not torch.equal(*dk)


@pytest.mark.parametrize("features", FEATURES.values(), ids=FEATURES)
@pytest.mark.parametrize("head_dim", (40, 160, *kernel_tables.WGMMA, 320, 512))
def test_dense(hopper, monkeypatch, head_dim, features):
    check_both(Case(2, 333, 401, 4, 2, head_dim, DTYPE, **features), hopper, monkeypatch)


@pytest.mark.parametrize("head_dim", (64, 128, 256, 512))
def test_float16(hopper, monkeypatch, head_dim):
    check_both(Case(1, 300, 300, 6, 2, head_dim, "float16", causal=True), hopper, monkeypatch)


@pytest.mark.parametrize("kind", ("packed", "padded"))
@pytest.mark.parametrize("features", ("full", "causal", "window", "everything"))
@pytest.mark.parametrize("head_dim", (64, 128, 256, 512))
def test_packed(hopper, monkeypatch, head_dim, features, kind):
    """Sequences without queries, without keys, and short ones between long ones."""
    options = dict(FEATURES[features], alibi="batch") if features == "everything" else FEATURES[features]
    check_both(Case(7, 200, 350, 4, 2, head_dim, DTYPE, kind=kind, **options), hopper, monkeypatch)


@pytest.mark.parametrize("head_dim", (64, 128, 256, 512))
@pytest.mark.parametrize(
    "seqlen_q, seqlen_k", [(1, 1), (1, 1500), (64, 129), (65, 127), (129, 64), (193, 20), (500, 0)]
)
@pytest.mark.parametrize("causal", (False, True))
def test_lengths(hopper, monkeypatch, head_dim, seqlen_q, seqlen_k, causal):
    """One row, one key, more queries than keys (rows without keys), no key."""
    check_both(Case(2, seqlen_q, seqlen_k, 4, 1, head_dim, DTYPE, causal=causal), hopper, monkeypatch)


@pytest.mark.parametrize(
    "features",
    ({}, {"causal": True}, {"window": (100, 20)}, {"window": (64, 0)}, {"sinks": True, "causal": True}),
    ids=str,
)
@pytest.mark.parametrize(
    "seqlen_q, seqlen_k, head_dim, dtype",
    [
        (512, 512, 64, DTYPE),
        (449, 300, 64, DTYPE),
        (64, 700, 64, DTYPE),
        (257, 129, 40, DTYPE),
        (300, 300, 64, "float16"),
    ],
)
def test_heads_with_dq_in_shared_memory(hopper, monkeypatch, seqlen_q, seqlen_k, head_dim, dtype, features):
    """Enough heads that each thread block takes whole ones, and more than one: it adds alone, in one order."""
    problem = make_problem(Case(2, seqlen_q, seqlen_k, 132, 132, head_dim, dtype, **features), hopper)
    first, dout, dlse, _ = gradients(problem, monkeypatch, "wgmma")
    check_gradients(problem, dout, first, None, dlse)
    again = gradients(problem, monkeypatch, "wgmma")[0]
    assert all(torch.equal(a, b) for a, b in zip(first[:3], again[:3]))


@pytest.mark.parametrize("head_dim", (64, 128, 256))
def test_deterministic_twice(hopper, monkeypatch, head_dim):
    """More blocks of keys than multiprocessors; equal bits, within the criterion of the other order."""
    problem = make_problem(Case(2, 700, 1100, 16, 16, head_dim, DTYPE, causal=True), hopper)
    first, dout, dlse, _ = gradients(problem, monkeypatch, "wgmma", deterministic=True)
    again = gradients(problem, monkeypatch, "wgmma", deterministic=True)[0]
    assert all(torch.equal(a, b) for a, b in zip(first, again))
    check_gradients(problem, dout, first, None, dlse)


def test_held_operands_are_loaded_before_others_land(hopper, monkeypatch):
    """Head dims above 256: without a fence all calls of this size had wrong rows of dQ, each other ones."""
    problem = make_problem(Case(4, 2048, 2048, 8, 8, 512, DTYPE), hopper)
    first = gradients(problem, monkeypatch, "wgmma")[0]
    for _ in range(5):
        again = gradients(problem, monkeypatch, "wgmma")[0]
        assert all(torch.equal(a, b) for a, b in zip(first, again))


@pytest.mark.parametrize("features", ({}, {"sinks": True}), ids=str)
@pytest.mark.parametrize(
    "seqlen_q, seqlen_k, head_dim, dtype",
    [(4096, 4096, 64, DTYPE), (4100, 4300, 64, DTYPE), (4300, 1700, 64, DTYPE), (4225, 4225, 40, "float16")],
)
def test_steps_of_128_rows(hopper, monkeypatch, seqlen_q, seqlen_k, head_dim, dtype, features):
    """Long causal sequences at head dim 64; equal bits in deterministic mode."""
    problem = make_problem(Case(1, seqlen_q, seqlen_k, 2, 1, head_dim, dtype, causal=True, **features), hopper)
    results, dout, dlse, _ = gradients(problem, monkeypatch, "wgmma")
    check_gradients(problem, dout, results, None, dlse)
    ordered = [gradients(problem, monkeypatch, "wgmma", deterministic=True)[0] for _ in range(2)]
    check_gradients(problem, dout, ordered[0], None, dlse)
    assert all(torch.equal(a, b) for a, b in zip(*ordered))
