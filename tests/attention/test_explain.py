"""Plans as the extension tells them: explain_fwd() and the like, flash_attn.explain() and FLASH_ATTN_TRACE."""

from __future__ import annotations

import os
import subprocess
import sys

import pytest
import torch

import flash_attn
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
q = torch.zeros(2, 64, 3, 64, device="cuda", dtype=torch.float16, requires_grad=True)
k = q[:, :40, :1]
flash_attn_func(q, k, k).sum().backward()
"""


def qkv(device, head_dim=64, head_dim_v=None, seqlen=500):
    shape = (2, seqlen, 4)
    q, k = (torch.randn(*shape, head_dim, device=device, dtype=torch.bfloat16) for _ in range(2))
    return q, k, torch.randn(*shape, head_dim_v or head_dim, device=device, dtype=torch.bfloat16)


def allocations():
    return torch.cuda.memory_stats()["allocation.all.allocated"]


@pytest.mark.parametrize("head_dims", [(64, 64), (128, 64), (40, 36), (192, 128), (320, 512)], ids=str)
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


MAKE = """
import torch, flash_attn
def random(*shape, grad=False):
    return torch.randn(*shape, dtype=torch.bfloat16, device="cuda", requires_grad=grad)
def lengths(*values, dtype=torch.int32):
    return torch.tensor(values, dtype=dtype, device="cuda")
"""
# (function, arguments) by name: calls of every form, with copies on their way to the kernels.
CALLS = {
    "dense": ("flash_attn_func", "random(2, 500, 4, 64, grad=True), *[random(2, 500, 2, 64)] * 2, causal=True"),
    "padded": ("flash_attn_func", "*[random(2, 500, 4, 36, grad=True)] * 3, softcap=9.0"),
    "strided": ("flash_attn_func", "random(2, 64, 4, 500, grad=True).transpose(1, 3), *[random(2, 500, 4, 64)] * 2"),
    "values": (
        "flash_attn_func", "*[random(2, 900, 4, 192, grad=True)] * 2, random(2, 900, 4, 128), deterministic=True"
    ),
    "qkvpacked": ("flash_attn_qkvpacked_func", "random(2, 500, 3, 4, 128, grad=True), 0.1"),
    "kvpacked": ("flash_attn_kvpacked_func", "random(2, 1, 8, 128), random(2, 9000, 2, 2, 128)"),
    "varlen": (
        "flash_attn_varlen_func",
        "*[random(1000, 4, 64, grad=True)] * 3, *[lengths(0, 300, 1000, dtype=torch.int64)] * 2, 700, 700, causal=True",
    ),
    "varlen_qkvpacked": (
        "flash_attn_varlen_qkvpacked_func", "random(1000, 3, 4, 40, grad=True), lengths(0, 300, 1000), 700"
    ),
    "varlen_kvpacked": (
        "flash_attn_varlen_kvpacked_func",
        "random(1000, 4, 60, grad=True), random(1000, 2, 4, 60), *[lengths(0, 300, 1000)] * 2, 700, 700",
    ),
    "kvcache": ("flash_attn_with_kvcache", "random(4, 1, 16, 128), *[random(4, 8192, 4, 128)] * 2, cache_seqlens=5000"),
    "appending": (
        "flash_attn_with_kvcache",
        "random(2, 3, 8, 64), random(2, 4096, 2, 64), random(2, 4096, 2, 64), random(2, 64, 2, 3).transpose(1, 3), "
        "random(2, 3, 2, 64), cache_seqlens=lengths(7, 4000, dtype=torch.int64), causal=True, out=random(2, 3, 8, 64)",
    ),
}  # fmt: skip


def made(name):
    """The function and its (args, kwargs)."""
    function, arguments = CALLS[name]
    scope = {}
    exec(MAKE, scope)
    return getattr(flash_attn, function), eval(f"(lambda *args, **kwargs: (args, kwargs))({arguments})", scope)


@pytest.mark.parametrize("name", CALLS)
def test_explain_touches_nothing_on_the_gpu(device, name):
    function, (args, kwargs) = made(name)
    tensors = [x for x in (*args, *kwargs.values()) if isinstance(x, torch.Tensor)]
    values, versions = [x.detach().clone() for x in tensors], [x._version for x in tensors]
    torch.cuda.synchronize()
    before, random_state = allocations(), torch.cuda.get_rng_state()
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CUDA]) as profile:
        plans = flash_attn.explain(function, *args, **kwargs)
    assert allocations() == before
    assert not [event for event in profile.events() if event.device_type == torch.autograd.DeviceType.CUDA]
    assert torch.equal(torch.cuda.get_rng_state(), random_state)
    assert all(torch.equal(x, value) for x, value in zip(tensors, values))
    assert [x._version for x in tensors] == versions
    assert plans["forward"]["backend"] == "cuda" and plans["forward"]["kernel"] != "none"
    assert ("backward" in plans) == (name not in ("kvcache", "appending"))
    assert (plans.get("backward") is not None) == any(x.requires_grad for x in tensors)


def test_calls_do_as_explained(device):
    """The lines of FLASH_ATTN_TRACE begin with the plans of explain(), forward and backward; the sizes follow."""
    program = [MAKE, "import sys"]
    for name, (function, arguments) in CALLS.items():
        program += [f"print('call', {name!r}, file=sys.stderr, flush=True)"]
        program += [f"out = flash_attn.{function}({arguments})"]
        program += ["if out.requires_grad: out.float().sum().backward()"]
    environment = {**os.environ, "FLASH_ATTN_TRACE": "1"}
    result = subprocess.run([sys.executable, "-c", "\n".join(program)], capture_output=True, text=True, env=environment)
    assert result.returncode == 0, result.stderr[-2000:]
    lines = [line for line in result.stderr.splitlines() if line.startswith(("call ", "flash_attn: direction="))]
    said = [line.partition(" batch=")[0] for line in lines]
    expected = []
    for name in CALLS:
        function, (args, kwargs) = made(name)
        plans = flash_attn.explain(function, *args, **kwargs).values()
        expected += [f"call {name}", *(trace_line(plan) for plan in plans if plan is not None)]
    assert said == expected


def trace_line(plan):
    values = {name: int(x) if isinstance(x, bool) else x for name, x in plan.items() if name != "backend"}
    return "flash_attn: " + " ".join(f"{name}={value}" for name, value in values.items())


@pytest.mark.parametrize("traced", [True, False])
def test_trace(device, traced):
    environment = {key: value for key, value in os.environ.items() if key != "FLASH_ATTN_TRACE"}
    if traced:
        environment["FLASH_ATTN_TRACE"] = "1"
    result = subprocess.run([sys.executable, "-c", CALL], capture_output=True, text=True, env=environment)
    assert result.returncode == 0, result.stderr[-2000:]
    lines = [line for line in result.stderr.splitlines() if line.startswith("flash_attn: ")]
    assert [line.split()[1] for line in lines] == (["direction=forward", "direction=backward"] if traced else [])
    strides = " ".join(f"{name}_strides=12288,192,64" for name in "qkv")
    assert all(line.endswith(f" batch=2 seqlen_q=64 seqlen_k=40 heads=3 heads_k=1 {strides}") for line in lines)
