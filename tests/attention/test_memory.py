"""Peak memory of a call = inputs + out + LSE (+ S_dmask when asked), nothing else that grows with the sequence."""

from __future__ import annotations

import subprocess
import sys
import time
from pathlib import Path

import pytest
import torch

from flash_attn import flash_attn_func, flash_attn_varlen_func

ROOT = Path(__file__).resolve().parents[2]
MIB = 2**20

SEQLEN = 4096
OPTIONS = {
    "plain": {},
    "softcap": {"causal": True, "softcap": 5.0},
    "window_dropout": {"window_size": (700, 0), "dropout_p": 0.1},
}
# Prints the growth of the resident set in bytes over one call, after a small call that loads all code: a line for every
# case, each in a process forked from one that has only imported what it needs.
CPU_PROGRAM = """
import gc, os, resource, sys, torch
sys.path.insert(0, sys.argv[1])
import flash_attn
torch.set_num_threads(1)
def call(n, train, options):
    q, k, v = (torch.randn(1, n, 2, 64, requires_grad=train) for _ in range(3))
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    out = flash_attn.flash_attn_func(q, k, v, **options)
    if train:
        out.sum().backward()
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before
for name, options in eval(sys.argv[3]).items():
    for mode in ("forward", "train"):
        child = os.fork()
        if child == 0:
            call(1200, mode == "train", options)
            gc.collect()
            print(name, mode, call(int(sys.argv[2]), mode == "train", options) * 1024, flush=True)
            os._exit(0)
        os.waitpid(child, 0)
"""


@pytest.fixture(scope="module")
def growth():
    """{(options, mode): bytes}."""
    command = [sys.executable, "-c", CPU_PROGRAM, str(ROOT), str(SEQLEN), repr(OPTIONS)]
    result = subprocess.run(command, capture_output=True, text=True)
    assert result.returncode == 0, result.stderr[-2000:]
    lines = [line.split() for line in result.stdout.splitlines()]
    return {(name, mode): int(size) for name, mode, size in lines}


@pytest.mark.devices("cpu")
@pytest.mark.parametrize("mode", ("forward", "train"))
@pytest.mark.parametrize("options", OPTIONS)
def test_cpu_peak_memory_is_linear(device, growth, mode, options):
    """At 4096 keys and 2 heads the score matrix would take 134 MB; out and LSE take 2 MB, each gradient as much."""
    outputs = SEQLEN * 2 * (64 + 1) * 4
    tensors = outputs if mode == "forward" else 6 * outputs
    assert 0 < growth[options, mode] <= tensors + 64 * MIB


def settled_bytes() -> int:
    """Bytes requested at present, once autograd's thread has let go of the last backward's results: it may hold them a
    little longer than the caller."""
    previous, current = None, torch.cuda.memory_stats()["requested_bytes.all.current"]
    while current != previous:
        time.sleep(0.05)
        previous, current = current, torch.cuda.memory_stats()["requested_bytes.all.current"]
    return current


def cuda_peak(call) -> int:
    """Bytes requested at the peak of a call beyond what was requested before it, and the call's results are kept.
    Requested, not allocated: the allocator may hand out a block of up to 1 MiB more."""
    call()
    torch.cuda.synchronize()
    before = settled_bytes()
    torch.cuda.reset_peak_memory_stats()
    results = call()
    peak = torch.cuda.memory_stats()["requested_bytes.all.peak"] - before
    del results
    return peak


def rounded(bytes_: int) -> int:
    """The allocator hands out multiples of 512 bytes."""
    return (bytes_ + 511) // 512 * 512


RNG_STATE = 512


@pytest.mark.devices("cuda")
@pytest.mark.parametrize("options", ({}, {"causal": True, "softcap": 5.0, "window_size": (99, 0)}, {"dropout_p": 0.1}),
                         ids=("plain", "features", "dropout"))  # fmt: skip
@pytest.mark.parametrize("head_dim", (64, 256))
def test_cuda_peak_memory_is_out_and_lse(device, options, head_dim):
    q, k, v = (torch.randn(2, 5000, 4, head_dim, device=device, dtype=torch.bfloat16) for _ in "qkv")
    expected = rounded(q.numel() * 2) + rounded(2 * 4 * 5000 * 4) + RNG_STATE
    assert cuda_peak(lambda: flash_attn_func(q, k, v, return_attn_probs=False, **options)) <= expected


@pytest.mark.devices("cuda")
def test_cuda_peak_memory_with_s_dmask(device):
    q, k, v = (torch.randn(2, 700, 4, 64, device=device, dtype=torch.bfloat16) for _ in "qkv")
    expected = rounded(q.numel() * 2) + rounded(2 * 4 * 700 * 4) + RNG_STATE + rounded(2 * 4 * 768 * 768 * 2)
    assert cuda_peak(lambda: flash_attn_func(q, k, v, dropout_p=0.2, return_attn_probs=True)) <= expected


@pytest.mark.devices("cuda")
def test_cuda_peak_memory_of_sequences(device):
    """Lengths and pages in every form: no workspace."""
    q = torch.randn(6000, 4, 64, device=device, dtype=torch.bfloat16)
    pages = torch.randn(500, 16, 2, 64, device=device, dtype=torch.bfloat16)
    cu_q = torch.tensor([0, 1000, 1001, 6000], device=device, dtype=torch.int32)
    cu_k = torch.tensor([0, 2000, 4000, 7000], device=device, dtype=torch.int32)
    table = torch.randint(0, 500, (3, 200), device=device, dtype=torch.int32)
    expected = rounded(q.numel() * 2) + rounded(6000 * 4 * 4) + RNG_STATE

    def call():
        return flash_attn_varlen_func(q, pages, pages, cu_q, cu_k, 4999, 3000, causal=True, block_table=table)

    assert cuda_peak(call) <= expected


@pytest.mark.devices("cuda")
def test_unaligned_inputs_cost_one_copy_of_each(device):
    shape = (1, 3000, 4, 64)
    q, k, v = (
        torch.randn(torch.Size(shape).numel() + 1, device=device, dtype=torch.bfloat16)[1:].view(shape) for _ in "qkv"
    )
    expected = 4 * rounded(q.numel() * 2) + rounded(4 * 3000 * 4) + RNG_STATE
    assert cuda_peak(lambda: flash_attn_func(q, k, v)) <= expected
