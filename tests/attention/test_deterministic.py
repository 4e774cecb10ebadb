"""The deterministic backward on a GPU: right, and equal in every bit whatever the thread blocks' timing is."""

from __future__ import annotations

import dataclasses

import pytest
import torch
from cases import KERNEL_HEAD_DIMS, Case
from harness import check_gradients, make_problem, run

DTYPE = "bfloat16"
# Each with more thread blocks than a head has key blocks, and with row blocks to which many of them add.
SHAPES = {
    "full": Case(2, 700, 1100, 6, 6, 0, DTYPE),
    "causal": Case(2, 1100, 1100, 8, 8, 0, DTYPE, causal=True),
    "causal gqa": Case(3, 900, 1300, 12, 3, 0, DTYPE, causal=True),
    "mqa": Case(1, 600, 1000, 16, 1, 0, DTYPE),
    "window gqa": Case(2, 1500, 1400, 8, 4, 0, DTYPE, window=(300, 90)),
    "packed causal gqa": Case(6, 900, 800, 6, 2, 0, DTYPE, causal=True, kind="padded"),
    "packed window": Case(5, 900, 1100, 4, 4, 0, DTYPE, window=(200, -1), kind="packed"),
    "dropout gqa": Case(2, 700, 900, 6, 2, 0, DTYPE, causal=True, dropout=0.2),
}


def disturb(stream):
    """Keeps a part of the GPU busy, so that thread blocks of another stream find other places and times."""
    with torch.cuda.stream(stream):
        x = torch.randn(2048, 2048, device="cuda", dtype=torch.bfloat16)
        for _ in range(4):
            x = (x @ x).clamp(-1, 1)


@pytest.mark.devices("cuda")
@pytest.mark.parametrize("shape", SHAPES, ids=lambda name: name.replace(" ", "-"))
@pytest.mark.parametrize("head_dim", KERNEL_HEAD_DIMS)
def test_gradients_repeat_bitwise(device, head_dim, shape):
    problem = make_problem(dataclasses.replace(SHAPES[shape], head_dim=head_dim), device)
    leaves = [x.detach().clone().requires_grad_() for x in (problem.q, problem.k, problem.v)]
    out, _, dmask = run(dataclasses.replace(problem, q=leaves[0], k=leaves[1], v=leaves[2]), deterministic=True)
    dout, side = torch.randn_like(out), torch.cuda.Stream()
    runs = []
    for i in range(4):
        if i >= 2:
            disturb(side)
        runs.append(torch.autograd.grad(out, leaves, dout, retain_graph=True))
    torch.cuda.synchronize()
    assert all(torch.equal(a, b) for other in runs[1:] for a, b in zip(runs[0], other))
    check_gradients(problem, dout, runs[0], dmask >= 0 if problem.case.dropout else None)
