"""Plans as the extension tells them: explain_fwd() and the like, and FLASH_ATTN_TRACE."""

from __future__ import annotations

import os
import subprocess
import sys

import pytest
import torch

from flash_attn import backends

pytestmark = pytest.mark.devices("cuda")

FORWARD = {
    "out": None,
    "alibi_slopes": None,
    "p_dropout": 0.0,
    "softmax_scale": 0.125,
    "is_causal": True,
    "window_size_left": -1,
    "window_size_right": -1,
    "softcap": 0.0,
    "return_softmax": False,
    "gen": None,
}
BACKWARD = {
    "dq": None,
    "dk": None,
    "dv": None,
    "alibi_slopes": None,
    "p_dropout": 0.0,
    "softmax_scale": 0.125,
    "is_causal": True,
    "window_size_left": -1,
    "window_size_right": -1,
    "softcap": 0.0,
    "deterministic": False,
    "gen": None,
    "rng_state": None,
}
CALL = """
import torch
from flash_attn import flash_attn_func
q = torch.zeros(1, 64, 2, 64, device="cuda", dtype=torch.float16, requires_grad=True)
flash_attn_func(q, q, q).sum().backward()
"""


def qkv(device, head_dim=64, head_dim_v=None, seqlen=500):
    shape = (2, seqlen, 4)
    q, k = (torch.randn(*shape, head_dim, device=device, dtype=torch.bfloat16) for _ in range(2))
    return q, k, torch.randn(*shape, head_dim_v or head_dim, device=device, dtype=torch.bfloat16)


def allocations():
    return torch.cuda.memory_stats()["allocation.all.allocated"]


@pytest.mark.parametrize("head_dims", [(64, 64), (128, 64), (40, 36), (192, 128)], ids=str)
def test_explaining_launches_and_allocates_nothing(device, head_dims):
    extension = backends.get("cuda")
    q, k, v = qkv(device, *head_dims)
    out, lse = extension.fwd(q, k, v, **FORWARD)[:2]
    unaligned = torch.empty(q.numel() + 1, device=device, dtype=q.dtype)[1:].view_as(q)
    before = allocations()
    forward = extension.explain_fwd(q, k, v, **FORWARD)
    backward = extension.explain_bwd(out, q, k, v, out, lse, **BACKWARD)
    assert extension.explain_fwd(unaligned, k, v, **FORWARD) == forward
    assert allocations() == before
    for plan, direction in ((forward, "forward"), (backward, "backward")):
        assert plan["direction"] == direction and plan["kernel"] in ("mma_sync", "wgmma", "split_kv")
        assert plan["head_dim"] >= head_dims[0] and plan["dtype"] == "bf16"


def test_packed_batches_are_explained(device):
    extension = backends.get("cuda")
    q, k, v = (x.flatten(0, 1) for x in qkv(device))
    starts = torch.tensor([0, 500, 1000], device=device, dtype=torch.int32)
    options = {key: value for key, value in FORWARD.items() if key not in ("out", "alibi_slopes")}
    plan = extension.explain_varlen_fwd(
        q, k, v, None, starts, starts, None, None, None, None, 500, 500, zero_tensors=False, **options
    )
    assert plan["sort_varlen_tiles"] == (plan["kernel"] == "wgmma")
    assert plan["workspace_bytes"] > 0


def test_hopper_takes_its_kernels(hopper):
    """Where the build has them."""
    plan = backends.get("cuda").explain_fwd(*qkv(hopper, 128, seqlen=8192), **FORWARD)
    assert plan["kernel"] == "wgmma" and plan["variant"] == "masked" and plan["dynamic_scheduler"]
    assert plan["grid"] <= torch.cuda.get_device_properties(hopper).multi_processor_count


def test_a_forced_family_is_explained(device, monkeypatch):
    monkeypatch.setenv("FLASH_ATTN_FAMILY", "mma_sync")
    q, k, v = qkv(device)
    plan = backends.get("cuda").explain_fwd(q, k, v, **FORWARD)
    assert plan["kernel"] == "mma_sync" and plan["variant"] == "short" and plan["num_splits"] == 1


def test_a_call_without_queries(device):
    q, k, v = qkv(device)
    assert backends.get("cuda").explain_fwd(q[:, :0], k, v, **FORWARD)["kernel"] == "none"


def test_wrong_calls_are_refused_as_the_call_is(device):
    q, k, v = qkv(device)
    with pytest.raises(RuntimeError, match="q: expected a head count divisible"):
        backends.get("cuda").explain_fwd(q[:, :, :3], k, v, **FORWARD)


@pytest.mark.parametrize("traced", [True, False])
def test_trace(device, traced):
    environment = {key: value for key, value in os.environ.items() if key != "FLASH_ATTN_TRACE"}
    if traced:
        environment["FLASH_ATTN_TRACE"] = "1"
    result = subprocess.run([sys.executable, "-c", CALL], capture_output=True, text=True, env=environment)
    assert result.returncode == 0, result.stderr[-2000:]
    lines = [line for line in result.stderr.splitlines() if line.startswith("flash_attn: ")]
    assert [line.split()[1] for line in lines] == (["direction=forward", "direction=backward"] if traced else [])
