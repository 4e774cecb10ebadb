"""The virtual ring: what one rank of several GPUs launches, on one GPU, with the other ranks' rows already there.

    python benchmarks/cp_virtual.py --out result.json     # one GPU, within a minute
    python benchmarks/cp_virtual.py --device cpu --quick  # tiny sizes, to see that it runs

Nothing is transferred: a time is that of the kernels between the transfers, of the slower of the first and the last
rank, beside what `cp_model` says of a link without end. Causal, zigzag chunks. The GPU waits until the host has queued
the whole call, so that the time is its own; what the host takes stands beside.
"""

from __future__ import annotations

import argparse
import itertools
import json
import math
import statistics
import sys
import time
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent))  # absent under PYTHONSAFEPATH

import cp_model
import torch
from environment import describe_origin
from shared import row_bar

from flash_attn import flash_attn_func
from flash_attn.context_parallel import CpPlan, flash_attn_cp_func
from flash_attn.context_parallel.transport import Pending

TOKENS, QUICK_TOKENS = (1 << 15, 1 << 17), (96, 256)
RANKS = (2, 4, 8)
MACHINE = cp_model.Machine(link=math.inf, message=0.0)
ROUNDS, MOST_SECONDS = 5, 1.0  # of one row's rounds
HELD = 4  # buffers of one shape: keys and values of the step that computes and of the one under way
CYCLES_PER_SECOND = 2e9


class PresentRank:
    """A rank of a group whose messages have arrived before they are asked for: random rows."""

    checks_on_host = True

    def __init__(self, rank: int, size: int):
        self.rank, self.size, self._held = rank, size, {}

    def connect(self, device) -> None:
        """Nobody else is there."""

    def buffer(self, like: torch.Tensor, shape) -> torch.Tensor:
        """One of a few tensors that are made once: their contents stay."""
        key = (*shape, like.dtype)
        if key not in self._held:
            made = [torch.randn(shape, dtype=like.dtype, device=like.device) for _ in range(HELD)]
            self._held[key] = itertools.cycle(made)
        return next(self._held[key])

    def exchange(self, sends, receives) -> Pending:
        return Pending((), ())

    def all_gather_ints(self, values: list[int], seconds: float | None = None) -> list[list[int]]:
        return [list(values)] * self.size


def calls(function, shape: cp_model.Shape, tokens: int, device, dtype):
    """{mode: call} of a function of q, k and v with so many tokens."""
    heads = (shape.heads, shape.heads_k, shape.heads_k, shape.heads)
    q, k, v, dout = (torch.randn(1, tokens, h, shape.head_dim, device=device, dtype=dtype) for h in heads)
    leaves = [x.detach().requires_grad_() for x in (q, k, v)]

    def forward():
        with torch.no_grad():
            return function(q, k, v)

    return {"forward": forward, "both": lambda: torch.autograd.grad(function(*leaves), leaves, dout)}


class Timer:
    """Medians of a call: the device's time and that of the host."""

    def __init__(self, device, rounds: int):
        self.device, self.rounds = device, rounds

    def once(self, call, expected_host: float = 0.0):
        """(seconds of the device, of the host). expected_host: how long the device waits before it begins."""
        if self.device.type == "cpu":
            started = time.perf_counter()
            call()
            taken = time.perf_counter() - started
            return taken, taken
        begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        torch.cuda.synchronize(self.device)
        torch.cuda._sleep(int(CYCLES_PER_SECOND * 1.5 * expected_host))
        started = time.perf_counter()
        begin.record()
        call()
        end.record()
        host = time.perf_counter() - started
        torch.cuda.synchronize(self.device)
        return begin.elapsed_time(end) / 1000, host

    def medians(self, call) -> dict:
        call()  # warm-up: index tensors, buffers
        seconds, host = self.once(call)
        rounds = max(2, min(self.rounds, int(MOST_SECONDS / max(1e-6, seconds))))
        found = [self.once(call, host) for _ in range(rounds)]
        return {
            "seconds": statistics.median(device for device, _ in found),
            "host_seconds": statistics.median(host for _, host in found), "rounds": rounds,
        }  # fmt: skip


def virtual_rank(method: str, ranks: int, rank: int, tokens: int, shape, device, dtype):
    """{mode: call} of one rank."""
    plan = CpPlan.dense(tokens, group=PresentRank(rank, ranks), method=method, check="none")

    def function(q, k, v):
        return flash_attn_cp_func(q, k, v, plan=plan, causal=True)

    return calls(function, shape, plan.num_tokens, device, dtype)


def predicted(method: str, tokens: int, ranks: int, shape, mode: str) -> float:
    pairs, received = cp_model.causal_zigzag(tokens, ranks)
    passes = (False, True) if mode == "both" else (False,)
    return sum(cp_model.seconds(method, MACHINE, shape, pairs, tokens, ranks, received, p) for p in passes)


def measure_row(tokens: int, ranks: int, method: str | None, options, timer: Timer) -> dict:
    """method None: one GPU with all tokens."""
    device, dtype = timer.device, torch.bfloat16 if timer.device.type == "cuda" else torch.float32
    shape = cp_model.Shape(8, 8, 16) if options.quick else cp_model.Shape()
    row = {"tokens": tokens, "ranks": ranks, "method": method}
    for rank in sorted({0, 0 if method == "ulysses" else ranks - 1}):  # there all have the same
        if method is None:
            own = calls(lambda q, k, v: flash_attn_func(q, k, v, causal=True), shape, tokens, device, dtype)
        else:
            own = virtual_rank(method, ranks, rank, tokens, shape, device, dtype)
        for mode, call in own.items():
            found = timer.medians(call)
            if mode not in row or found["seconds"] > row[mode]["seconds"]:
                row[mode] = {
                    **found,
                    "rank": rank,
                    "predicted": predicted(method or "ring", tokens, ranks, shape, mode),
                }
    return row


def main(arguments=None) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--device", choices=("cpu", "cuda"), default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--quick", action="store_true", help="tiny sizes")
    parser.add_argument("--methods", nargs="+", choices=tuple(cp_model.METHODS), default=list(cp_model.METHODS))
    parser.add_argument("--rounds", type=int, default=ROUNDS, help="at most, of each row")
    parser.add_argument("--out", type=Path, help="write the result here, after every row")
    options = parser.parse_args(arguments)
    device = torch.device(options.device, 0) if options.device == "cuda" else torch.device("cpu")
    timer, result = Timer(device, options.rounds), {"kind": "cp_virtual", **describe_origin(device), "rows": []}
    rows = [
        (tokens, ranks, method)
        for tokens in (QUICK_TOKENS if options.quick else TOKENS)
        for ranks in (1, *RANKS)
        for method in (options.methods if ranks > 1 else (None,))
    ]
    with row_bar(len(rows)) as done:
        for tokens, ranks, method in rows:
            row = measure_row(tokens, ranks, method, options, timer)
            result["rows"].append(row)
            if options.out:
                options.out.write_text(json.dumps(result, indent=1) + "\n")
            told = ", ".join(f"{m} {1e3 * row[m]['seconds']:.3f} ms" for m in ("forward", "both"))
            done(f"{tokens} tokens, {ranks} GPUs, {method or 'one call'}: {told}")


if __name__ == "__main__":
    main()
