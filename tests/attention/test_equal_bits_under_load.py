"""Equal bits while other processes load the GPU: a missing order between kernels shows as poison or as other bits.

Every round overwrites the inputs with poison, restores them and calls at once, several calls in a row, so that kernels
of consecutive calls overlap wherever programmatic dependent launches let them. FLASH_ATTN_LOAD_ROUNDS and
FLASH_ATTN_LOAD_PROCESSES make a longer run of it.
"""

from __future__ import annotations

import fcntl
import os
import subprocess
import sys
from collections.abc import Callable
from typing import NamedTuple

import pytest
import torch
from harness import captured

from flash_attn import KvCachePlan, flash_attn_combine, flash_attn_func, flash_attn_varlen_func, flash_attn_with_kvcache
from flash_attn.fp8 import quantize_qkv

pytestmark = pytest.mark.devices("cuda")

ROUNDS = int(os.environ.get("FLASH_ATTN_LOAD_ROUNDS", "50"))
PROCESSES = int(os.environ.get("FLASH_ATTN_LOAD_PROCESSES", "3"))
LAYERS = 3  # calls in a row, each with the output of the one before as its queries

LOAD = """
import sys, threading, torch
stop = threading.Event()
threading.Thread(target=lambda: (sys.stdin.read(), stop.set()), daemon=True).start()
a = torch.randn(2048, 2048, device="cuda", dtype=torch.bfloat16)
b = torch.empty(1 << 26, device="cuda", dtype=torch.uint8)
torch.cuda.synchronize()
print("ready", flush=True)
while not stop.is_set():
    for _ in range(20):
        c = a @ a
        b.copy_(b.flip(0))
        c.sum()
    torch.cuda.synchronize()
"""


@pytest.fixture(scope="module")
def load(tmp_path_factory):
    """Other processes that keep the GPU busy during the tests of this module. One worker of a run starts them."""
    if not torch.cuda.is_available():
        pytest.skip("torch.cuda is not available")
    with open(tmp_path_factory.getbasetemp().parent / "gpu_load.lock", "w") as lock:
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)  # until it is closed
        except OSError:
            yield
            return
        yield from load_processes()


def load_processes():
    command = [sys.executable, "-c", LOAD]
    processes = [
        subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) for _ in range(PROCESSES)
    ]
    try:
        for process in processes:
            assert process.stdout.readline() == "ready\n"
        yield
        assert all(process.poll() is None for process in processes), "the load ended before the tests"
    finally:
        for process in processes:
            process.stdin.close()
            process.wait(60)


class Workload(NamedTuple):
    """call: of the inputs by name -> results. The first input is overwritten by the first result between two calls."""

    inputs: dict[str, torch.Tensor]
    call: Callable[..., list[torch.Tensor]]


def randn(*shape, dtype=torch.bfloat16):
    return torch.randn(*shape, device="cuda", dtype=dtype)


def ints(*values):
    return torch.tensor(values, device="cuda", dtype=torch.int32)


def dense(seqlen_q, seqlen_k, head_dim, batch=2, heads=4, **options):
    inputs = {"q": randn(batch, seqlen_q, heads, head_dim), "sinks": randn(heads, dtype=torch.float32)}
    inputs |= {name: randn(batch, seqlen_k, heads // 2, head_dim) for name in "kv"}
    return Workload(
        inputs,
        lambda q, k, v, sinks: list(flash_attn_func(q, k, v, sinks=sinks, return_attn_probs=True, **options)[:2]),
    )


def packed(lengths, head_dim, page_size=0, **options):
    total, heads = sum(lengths), 4
    ends = torch.tensor([0, *lengths]).cumsum(0).to("cuda", torch.int32)
    inputs = {"q": randn(total, heads, head_dim), "ends": ends, "sinks": randn(heads, dtype=torch.float32)}
    longest = max(lengths)
    if page_size:
        pages_each = -(-longest // page_size)
        pages = len(lengths) * pages_each
        order = torch.randperm(pages, device="cuda", dtype=torch.int32).view(len(lengths), pages_each)
        inputs |= {name: randn(pages, page_size, heads // 2, head_dim) for name in "kv"} | {"block_table": order}
    else:
        inputs |= {name: randn(total, heads // 2, head_dim) for name in "kv"}

    def call(q, k, v, ends, sinks, block_table=None):
        out, lse, _ = flash_attn_varlen_func(
            q, k, v, ends, ends, longest, longest, causal=True, sinks=sinks, block_table=block_table,
            return_attn_probs=True, **options,
        )  # fmt: skip
        return [out, lse]

    return Workload(inputs, call)


def cached(
    seqlen_q, append=0, page_size=0, dtype=torch.bfloat16, head_dim=128, with_plan=False, row_descales=False, **options
):
    batch, heads, heads_k, capacity = 4, 16, 4, 2048
    shape = (batch * capacity // page_size, page_size) if page_size else (batch, capacity)
    inputs = {"q": randn(batch, seqlen_q, heads, head_dim), "lengths": ints(5, 700, 1500, 2000)}
    for name in ("k_cache", "v_cache"):
        inputs[name] = randn(*shape, heads_k, head_dim).clamp(-100, 100).to(dtype)
    if page_size:
        order = torch.randperm(shape[0], device="cuda", dtype=torch.int32)
        inputs["block_table"] = order.view(batch, capacity // page_size)
    if append:
        inputs |= {name: randn(batch, append, heads_k, head_dim) for name in "kv"}
        inputs |= {name: randn(2 * capacity, head_dim // 2) for name in ("rotary_cos", "rotary_sin")}
    if row_descales:
        inputs |= {name: torch.rand(batch, capacity, heads_k, device="cuda") for name in ("k_descale", "v_descale")}
    plan = None
    if with_plan:
        plan = KvCachePlan(inputs["lengths"], seqlen_q, heads, heads_k, head_dim, capacity, causal=True)

    def call(q, k_cache, v_cache, lengths, **tensors):
        out, lse = flash_attn_with_kvcache(
            q, k_cache, v_cache, cache_seqlens=lengths, causal=True, return_softmax_lse=True, plan=plan, **tensors,
            **options,
        )  # fmt: skip
        written = (k_cache, v_cache, *(tensors[name] for name in ("k_descale", "v_descale") if name in tensors))
        return [out, lse, *(written if append else ())]

    return Workload(inputs, call)


def e4m3_forward(causal):
    q, k, v = quantize_qkv(*(randn(2, 640, 4, 128) for _ in "qkv"))[:3]
    return Workload({"q": q, "k": k, "v": v}, lambda q, k, v: [flash_attn_func(q, k, v, causal=causal)])


def combined():
    inputs = {"parts": randn(5, 3, 130, 4, 64, dtype=torch.float32), "lse": randn(5, 3, 130, 4, dtype=torch.float32)}
    return Workload(inputs, lambda parts, lse: list(flash_attn_combine(parts, lse)))


def training(seqlen, head_dim, deterministic, lengths=(), **options):
    """Gradients; dq only in deterministic mode, for its sums have no fixed order in the other one."""
    heads = 4
    shape = (sum(lengths), heads, head_dim) if lengths else (2, seqlen, heads, head_dim)
    inputs = {name: randn(*shape) for name in ("q", "k", "v", "dout")}
    if lengths:
        inputs["ends"] = torch.tensor([0, *lengths]).cumsum(0).to("cuda", torch.int32)

    def call(q, k, v, dout, ends=None):
        q, k, v = (x.detach().requires_grad_() for x in (q, k, v))
        if ends is None:
            out = flash_attn_func(q, k, v, deterministic=deterministic, **options)
        else:
            longest = max(lengths)
            out = flash_attn_varlen_func(q, k, v, ends, ends, longest, longest, deterministic=deterministic, **options)
        dq, dk, dv = torch.autograd.grad(out, (q, k, v), dout)
        return [out.detach(), dk, dv, *([dq] if deterministic else [])]

    return Workload(inputs, call)


WORKLOADS = {
    "one_wave": lambda: dense(300, 300, 128, causal=True),
    "pairs": lambda: dense(1024, 1024, 128, batch=4, heads=8),
    "whole_waves": lambda: dense(1000, 1000, 128, batch=4, heads=6, causal=True),
    "many_tiles": lambda: dense(1500, 1500, 128, batch=4, heads=8),
    "splits": lambda: dense(64, 6000, 64, batch=1),
    "few_rows": lambda: dense(4, 3000, 128),
    "head_dim_96": lambda: dense(200, 200, 96, window_size=(64, 0)),
    "packed": lambda: packed((700, 1, 333, 64, 900), 128),
    "packed_pages": lambda: packed((700, 1, 333, 64, 900), 64, page_size=16),
    "e4m3": lambda: e4m3_forward(True),
    "decode": lambda: cached(1),
    "decode_pages": lambda: cached(1, page_size=16, with_plan=True),
    "decode_append": lambda: cached(2, append=2),
    "decode_append_int8": lambda: cached(1, append=1, page_size=64, dtype=torch.int8, k_descale=0.02, v_descale=0.02),
    "decode_append_row_descales": lambda: cached(2, append=2, dtype=torch.int8, row_descales=True),
    "decode_e4m3": lambda: cached(1, dtype=torch.float8_e4m3fn),
    "prefill_append": lambda: cached(130, append=40, page_size=32),
    "prefill_e4m3": lambda: cached(100, dtype=torch.float8_e4m3fn, page_size=16),
    "batch_invariant_decode": lambda: cached(1, batch_invariant=True),
    "combine": combined,
    "train_64": lambda: training(500, 64, False, causal=True),
    "train_64_deterministic": lambda: training(500, 64, True, causal=True),
    "train_128_two_passes": lambda: training(512, 128, False),
    "train_128_deterministic": lambda: training(1500, 128, True, causal=True),
    "train_256": lambda: training(400, 256, False, causal=True),
    "train_packed": lambda: training(0, 128, False, lengths=(700, 1, 333, 64, 900), causal=True),
    "train_packed_deterministic": lambda: training(0, 64, True, lengths=(700, 1, 333, 64, 900)),
}


def poison_(x):
    """Values that no result survives: NaN, or indices and lengths out of range, which kernels refuse."""
    x.fill_(float("nan") if x.is_floating_point() else -1)


class Replay:
    """Rounds of a workload whose results are compared on the GPU; the host does not wait for them."""

    def __init__(self, workload: Workload):
        self.values = workload.inputs
        self.inputs = {name: x.clone() for name, x in self.values.items()}
        self.call = workload.call
        self.wrong = torch.zeros((), device="cuda", dtype=torch.int64)
        self.expected = self.chain()

    def chain(self):
        """Results of calls in a row after all inputs were poison."""
        for x in self.inputs.values():
            poison_(x)
        for name, x in self.inputs.items():
            x.copy_(self.values[name])
        results = self.call(**self.inputs)
        kept = list(results)
        first = next(iter(self.inputs))
        for _ in range(LAYERS - 1):
            if results[0].shape == self.inputs[first].shape and results[0].dtype == self.inputs[first].dtype:
                results = self.call(**{**self.inputs, first: results[0]})
            else:
                results = self.call(**self.inputs)
            kept += results
        return [x.clone() for x in kept]

    def round(self):
        for result, expected in zip(self.chain(), self.expected):
            self.wrong += (result.view(torch.uint8) != expected.view(torch.uint8)).any()
            poison_(result)  # what the allocator gives to the next call


@pytest.mark.parametrize("mode", ("eager", "graph", "two streams"))
@pytest.mark.parametrize("name", WORKLOADS)
def test_bits_are_those_of_the_first_call(device, load, name, mode):
    streams = [torch.cuda.Stream() for _ in range(2 if mode == "two streams" else 1)]
    replays = [Replay(WORKLOADS[name]()) for _ in streams]
    assert not any(x.isnan().any() for replay in replays for x in replay.expected if x.is_floating_point())
    torch.cuda.synchronize()
    if mode == "graph":
        graph, _ = captured(replays[0].round)
        for _ in range(ROUNDS):
            graph.replay()
    else:
        for _ in range(ROUNDS):
            for stream, replay in zip(streams, replays):
                with torch.cuda.stream(stream):
                    replay.round()
    torch.cuda.synchronize()
    assert [int(replay.wrong) for replay in replays] == [0] * len(replays)
