"""Where the microseconds of a short call go that starts from cold caches: data, code, or the cache's own write-backs.

python benchmarks/lab/cold.py                          batch 4, 8 heads, forward and backward, with SDPA's backends
python benchmarks/lab/cold.py --device cpu --rounds 1  a trial: whether it runs

Every call is timed alone by device events, in rounds of all states and implementations. States, by what ran before it:
    warm                    the same call
    zeros, reads            a buffer larger than the L2 cache was overwritten: all lines are dirty; or read
    zeros_code, reads_code  then the same call on other tensors: instructions, constants and tensor maps are cached
Then code = reads - reads_code, data = reads_code - warm, write_back = zeros - reads, in microseconds of medians.
"""

from __future__ import annotations

import argparse
import itertools
import json
import statistics
import sys
from contextlib import nullcontext
from pathlib import Path

sys.path[:0] = map(str, Path(__file__).resolve().parents[:2])  # absent under PYTHONSAFEPATH

import torch
from environment import describe_device
from implementations import backend
from timing import L2_FLUSH_BYTES, SLEEP_CYCLES_PER_MS, HostTimer
from torch.nn.attention import SDPBackend
from torch.nn.functional import scaled_dot_product_attention

from flash_attn import flash_attn_func

LEAD_CYCLES = int(0.4 * SLEEP_CYCLES_PER_MS)  # the device sleeps while the host enqueues the call
STATES = ("warm", "zeros", "zeros_code", "reads", "reads_code")
PEERS = {"sdpa_flash": SDPBackend.FLASH_ATTENTION, "sdpa_cudnn": SDPBackend.CUDNN_ATTENTION}


def sdpa(q, k, v, causal):
    return scaled_dot_product_attention(*(x.transpose(1, 2) for x in (q, k, v)), is_causal=causal)


def make_call(function, shape, causal, mode, device, seed):
    """One call on its own tensors of (batch, seqlen, heads, head dim)."""
    torch.manual_seed(seed)
    q, k, v = (torch.randn(shape, device=device).bfloat16().requires_grad_(mode == "bwd") for _ in "qkv")
    if mode == "fwd":
        return lambda: function(q, k, v, causal=causal)
    out = function(q, k, v, causal=causal)
    dout = torch.randn_like(out)
    return lambda: torch.autograd.grad(out, (q, k, v), dout, retain_graph=True)


class CudaTimer:
    def __init__(self, device):
        self.device = device
        self.buffer = torch.zeros(L2_FLUSH_BYTES // 8, dtype=torch.int64, device=device)

    def prepare(self, state, call, other):
        if state != "warm":
            self.buffer.zero_() if state.startswith("zeros") else self.buffer.max()
        if state == "warm" or state.endswith("_code"):
            (call if state == "warm" else other)()
        torch.cuda._sleep(LEAD_CYCLES)

    def record(self, call):
        start, stop = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
        start.record()
        call()
        stop.record()
        return start, stop

    def milliseconds(self, records):
        torch.cuda.synchronize()
        return [start.elapsed_time(stop) for start, stop in records]


def measure(timer, shape, causal, mode, rounds):
    """{implementation: {state or part: microseconds}}"""
    is_cuda, calls = timer.device.type == "cuda", {}
    peers = {name: (backend(which), sdpa) for name, which in PEERS.items()} if is_cuda else {}
    for name, (context, function) in {"ours": (nullcontext, flash_attn_func), **peers}.items():
        with context():
            calls[name] = context, *(make_call(function, shape, causal, mode, timer.device, seed) for seed in (0, 1))
    records = {key: [] for key in itertools.product(calls, STATES)}
    for _, ((name, state), taken) in itertools.product(range(rounds), records.items()):
        context, call, other = calls[name]
        with context():
            if is_cuda:
                timer.prepare(state, call, other)
            taken.append(timer.record(call))
    results = {name: {} for name in calls}
    for (name, state), taken in records.items():
        results[name][state] = statistics.median(timer.milliseconds(taken)) * 1e3
    for us in results.values():
        us["code"], us["data"] = us["reads"] - us["reads_code"], us["reads_code"] - us["warm"]
        us["write_back"] = us["zeros"] - us["reads"]
    return results


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu", type=torch.device)
    parser.add_argument("--rounds", type=int, default=60)
    parser.add_argument("--out", type=Path, help="JSON")
    options = parser.parse_args()
    make_timer, seqlens = (CudaTimer, (512, 1024)) if options.device.type == "cuda" else (HostTimer, (64,))
    timer, rows = make_timer(options.device), []
    for mode, head_dim, seqlen, causal in itertools.product(("fwd", "bwd"), (64, 128), seqlens, (False, True)):
        results = measure(timer, (4, seqlen, 8, head_dim), causal, mode, options.rounds)
        rows.append({"mode": mode, "head_dim": head_dim, "seqlen": seqlen, "causal": causal, "us": results})
        for name, us in results.items():
            title = f"{mode} d{head_dim} s{seqlen} {'causal' if causal else 'full'} {name}"
            print(f"{title:36}", *(f"{key} {value:.1f}" for key, value in us.items()), flush=True)
    if options.out:
        options.out.write_text(json.dumps({"device": describe_device(options.device), "rows": rows}, indent=1))


if __name__ == "__main__":
    main()
