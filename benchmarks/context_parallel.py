"""Context-parallel attention on N GPUs of one machine: speed per GPU, bandwidths.

    python benchmarks/context_parallel.py --out result.json               # all GPUs that torch sees
    python benchmarks/context_parallel.py --device cpu --ranks 2 --toy    # gloo, to see that it runs

Starts a process per rank. Each row is one problem and one method: the time of a forward, and of forward and backward,
the slowest rank's median; and the time in which one GPU does the whole problem, in turns with it, on all GPUs at once.
As many calls as take LEAST_SECONDS follow each other like layers, after as many that are not timed, so that the host
is faster than the GPU; a time is that of one. A GPU whose last calls took less power has a higher clock for a while, so
each round has another order. `per_gpu` is one GPU's time over ranks times ours. Peers are measured if they can be
imported.
"""

from __future__ import annotations

import argparse
import json
import math
import os
import random
import statistics
import sys
import tempfile
import time
import traceback
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent))  # absent under PYTHONSAFEPATH

import cp_tables
import torch
import torch.distributed as dist
from cp_peers import PEERS
from environment import describe_device, git_state
from torch.multiprocessing import get_context

from flash_attn import flash_attn_func, flash_attn_varlen_func
from flash_attn.context_parallel import CpPlan, flash_attn_cp_func
from flash_attn.context_parallel.plan import steps

SIZES = tuple(1 << n for n in range(13, 19))  # 8k to 256k tokens over all ranks
TOY_SIZES = (64, 160)
WINDOW, TOY_WINDOW = 4096, 16
PACKED_PER_RANK, TOY_PACKED_PER_RANK = 65536, 96
HEADS, HEADS_K, HEAD_DIM = 32, 8, 128
TOY_SHAPE = (4, 2, 16)
METHODS = (*steps.METHODS, "all_gather_copies")  # _copies: CpPlan(copies=True), where there is NCCL
BANDWIDTH_BYTES = 1 << 30  # milliseconds, so that starting one takes no part
MOST_SECONDS = 6.0  # of a row's rounds
LEAST_SECONDS, MOST_CALLS = 0.03, 16  # of a round's calls that follow each other
LONG_SECONDS = 0.25  # of a call: its rounds follow each other, with memory that no other method has in its cache
HIGH_PRIORITY = "TORCH_NCCL_HIGH_PRIORITY"  # "1": messages need not wait for the end of a kernel that fills the GPU


def parse(arguments=None):
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--device", choices=("cuda", "cpu"), default="cuda")
    parser.add_argument("--ranks", type=int, help="default: all GPUs, 2 on CPU")
    parser.add_argument("--toy", action="store_true", help="tiny sizes")
    parser.add_argument("--sizes", type=int, nargs="+", help="tokens over all ranks")
    parser.add_argument("--problems", nargs="+", default=["causal", "window", "packed"])
    parser.add_argument("--methods", nargs="+", choices=METHODS)
    parser.add_argument("--peers", nargs="*", choices=list(PEERS), default=list(PEERS))
    parser.add_argument("--rounds", type=int, default=7, help="at most, of each row; fewer where they take long")
    parser.add_argument("--row-seconds", type=float, default=MOST_SECONDS, help="of a row's rounds, of which 2 are run")
    parser.add_argument("--seconds", type=float, default=480, help="rows that would start later are left out")
    parser.add_argument("--out", type=Path, help="JSON")
    options = parser.parse_args(arguments)
    options.ranks = options.ranks or (torch.cuda.device_count() if options.device == "cuda" else 2)
    if options.ranks < 1 or (options.device == "cuda" and torch.cuda.device_count() < options.ranks):
        parser.error(f"--ranks: expected at most the {torch.cuda.device_count()} GPUs, got {options.ranks}")
    options.sizes = options.sizes or (TOY_SIZES if options.toy else SIZES)
    able = [method for method in METHODS if options.device == "cuda" or not method.endswith("_copies")]
    options.methods = options.methods or able
    return options


def document_bounds(total: int, longest: int) -> list[int]:
    """Log-normal lengths from an eighth of a tile's 1024 up to `longest`; the same on every rank."""
    generator, bounds = random.Random(0), [0]
    while bounds[-1] < total:
        length = int(min(longest, max(min(128, longest // 8), generator.lognormvariate(8.0, 1.3))))
        bounds.append(min(total, bounds[-1] + length))
    return bounds


class Problem:
    """One row's problem: kind, tokens over all ranks; this rank's tensors and, of the whole, those for one GPU."""

    def __init__(self, kind: str, tokens: int, options, device):
        self.kind, self.tokens = kind, tokens
        heads, heads_k, head_dim = self.shape = TOY_SHAPE if options.toy else (HEADS, HEADS_K, HEAD_DIM)
        self.dtype = torch.bfloat16 if device.type == "cuda" else torch.float32
        self.window = (TOY_WINDOW if options.toy else WINDOW, 0) if kind == "window" else (-1, -1)
        longest = TOY_PACKED_PER_RANK if options.toy else PACKED_PER_RANK
        self.cu = document_bounds(tokens, longest) if kind == "packed" else None
        generator = torch.Generator(device=device).manual_seed(tokens)
        axes = (tokens,) if self.cu else (1, tokens)
        self.whole = [
            torch.randn(*axes, h, head_dim, device=device, dtype=self.dtype, generator=generator)
            for h in (heads, heads_k, heads_k, heads)
        ]
        self.cu_tensor = torch.tensor(self.cu, dtype=torch.int32, device=device) if self.cu else None

    def plan(self, method: str) -> CpPlan:
        copies = method.endswith("_copies")
        options = {"method": method.removesuffix("_copies"), "copies": copies}
        options.update(window_size=self.window, check="plan")
        if self.cu:
            return CpPlan.varlen(self.cu, **options)
        return CpPlan.dense(self.tokens, layout="contiguous" if self.kind == "window" else "zigzag", **options)

    def one_gpu(self, q, k, v):
        if self.cu:
            cu, longest = self.cu_tensor, self.tokens
            return flash_attn_varlen_func(q, k, v, cu, cu, longest, longest, causal=True)
        return flash_attn_func(q, k, v, causal=True, window_size=self.window)


def calls(function, q, k, v, dout):
    """(forward, forward and backward) of a function of q, k and v."""
    leaves = [x.detach().requires_grad_() for x in (q, k, v)]

    def forward():
        with torch.no_grad():
            return function(q, k, v)

    def both():
        return torch.autograd.grad(function(*leaves), leaves, dout)

    return {"forward": forward, "both": both}


class Ranks:
    """What ranks do together besides attention: they meet on the host, and take the slowest one's time."""

    def __init__(self, device, rounds: int, most_seconds: float = MOST_SECONDS):
        self.device, self.size, self.rank = device, dist.get_world_size(), dist.get_rank()
        self.rounds, self.most_seconds = rounds, most_seconds

    def largest(self, value: float) -> float:
        everyone = torch.zeros(self.size, dtype=torch.float64)
        everyone[self.rank] = value
        dist.all_reduce(everyone)  # on the host, where it also is a barrier
        return everyone.max().item()

    def time(self, call, count: int = 1, ahead: int = 0) -> float:
        """Seconds of one of `count` calls that follow each other, and `ahead` others, on the slowest rank."""
        self.largest(0.0)
        if self.device.type == "cpu":
            started = time.perf_counter()
            for _ in range(count):
                call()
            return self.largest((time.perf_counter() - started) / count)
        begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        torch.cuda.synchronize()
        for _ in range(ahead):
            call()
        begin.record()
        for _ in range(count):
            call()
        end.record()
        torch.cuda.synchronize()
        return self.largest(begin.elapsed_time(end) / count / 1000)

    def medians(self, implementations: dict) -> dict:
        """{name: (median, rounds, fastest, slowest)}: every round times each once, in a random order."""
        times, counts = {}, {}
        for name, call in implementations.items():
            if self.device.type == "cuda":
                torch.cuda.empty_cache()
            call()  # warm-up: communicators, index tensors
            times[name] = [self.time(call)]
            counts[name] = max(1, min(MOST_CALLS, math.ceil(LEAST_SECONDS / times[name][0])))
            if times[name][0] > LONG_SECONDS:
                more = min(self.rounds, int(self.most_seconds / len(implementations) / times[name][0]))
                times[name] += [self.time(call) for _ in range(max(2, more) - 1)]
        in_turns = [name for name in implementations if times[name][0] <= LONG_SECONDS]
        in_all = sum(2 * times[name][0] * counts[name] for name in in_turns)
        rounds = max(2, min(self.rounds, int(self.most_seconds / max(1e-6, in_all))))
        times.update((name, []) for name in in_turns)
        for index in range(rounds):
            for name in random.Random(index).sample(in_turns, len(in_turns)):  # the same on all ranks
                times[name].append(self.time(implementations[name], counts[name], ahead=counts[name]))
        return {name: (statistics.median(found), len(found), min(found), max(found)) for name, found in times.items()}


def measure_row(kind: str, tokens: int, options, ranks: Ranks):
    """Rows of one problem, one for each method and peer."""
    problem = Problem(kind, tokens, options, ranks.device)
    axis = 0 if problem.cu else 1
    implementations, errors, shards = {}, {}, {}
    one = calls(problem.one_gpu, *problem.whole)
    expected = one["forward"]()
    for method in options.methods:
        plan = problem.plan(method)
        places = tuple(plan.spans[ranks.rank])  # memory of this rank is short at the longest sequences
        if places not in shards:
            shards[places] = [plan.shard(x, axis) for x in problem.whole]

        def function(q, k, v, plan=plan):
            return flash_attn_cp_func(q, k, v, plan=plan, causal=True, window_size=problem.window)

        implementations[method] = calls(function, *shards[places])
        error = (implementations[method]["forward"]() - plan.shard(expected, axis)).abs().max().item()
        errors[method] = ranks.largest(error)
    for name in options.peers:
        try:
            peer = calls(*PEERS[name](problem, ranks.rank, ranks.size))
            peer["forward"](), peer["both"]()
        except Exception as error:  # a peer that cannot be carried leaves its reason
            errors[name] = f"{type(error).__name__}: {str(error)[:200]}"
        if ranks.largest(float(name in errors)):  # of any rank: the others would wait for it
            errors.setdefault(name, "failed on another rank")
        else:
            implementations[name] = peer
        peer = None
    del expected
    seconds = {
        mode: ranks.medians({"one_gpu": one[mode], **{name: each[mode] for name, each in implementations.items()}})
        for mode in ("forward", "both")
    }
    return [
        row_of(problem, name, seconds, errors.get(name), ranks.size)
        for name in [*implementations, *(name for name in errors if name not in implementations)]
    ]


def row_of(problem: Problem, name: str, seconds, error, ranks: int) -> dict:
    row = {"problem": problem.kind, "tokens": problem.tokens, "name": name, "error": error}
    if name not in seconds["forward"]:
        return row
    heads, _, head_dim = problem.shape
    operations = 4.0 * visible_pairs(problem) * heads * head_dim
    for mode, factor in (("forward", 1.0), ("both", 3.5)):
        (ours, rounds, fastest, slowest), (alone, *_) = seconds[mode][name], seconds[mode]["one_gpu"]
        row[mode] = {
            "seconds": ours, "one_gpu_seconds": alone, "rounds": rounds, "fastest": fastest, "slowest": slowest,
            "per_gpu": alone / ranks / ours, "tflops_per_gpu": operations * factor / ranks / ours / 1e12,
        }  # fmt: skip
    return row


def visible_pairs(problem: Problem) -> int:
    from flash_attn.context_parallel.plan import layouts

    cu = problem.cu or [0, problem.tokens]
    left = problem.window[0]
    return layouts.visible_pairs(0, problem.tokens, cu, (left if left >= 0 else None, 0))


def bandwidths(options, ranks: Ranks) -> dict:
    """GB/s per direction: messages of the group both ways, copies between GPUs."""
    count = (1 << 16) if options.toy else BANDWIDTH_BYTES
    plan = CpPlan.dense(ranks.size * 8)
    sent, received = (torch.zeros(count, dtype=torch.uint8, device=ranks.device) for _ in range(2))
    following, previous = (ranks.rank + 1) % ranks.size, (ranks.rank - 1) % ranks.size

    def messages():
        plan.communicator.exchange([(following, sent)], [(previous, received)]).wait()

    result = {"bytes": count}
    if ranks.size > 1:
        result["messages"] = count / ranks.medians({"x": messages})["x"][0] / 1e9
    if ranks.device.type != "cuda" or ranks.size == 1:
        return result
    source = torch.zeros(count, dtype=torch.uint8, device=f"cuda:{(ranks.rank + 1) % ranks.size}")

    def copies():
        received.copy_(source, non_blocking=True)

    result["copy_engine"] = count / ranks.medians({"x": copies})["x"][0] / 1e9
    return result


def run_rank(rank: int, options, store: str, results) -> None:
    try:
        results.put((rank, _measure(rank, options, store)))
    except BaseException:
        results.put((rank, traceback.format_exc()))
        raise


def _measure(rank: int, options, store: str):
    torch.set_num_threads(1)
    if options.device == "cuda":
        torch.cuda.set_device(rank)
    device = torch.device(options.device, rank) if options.device == "cuda" else torch.device("cpu")
    os.environ.setdefault(HIGH_PRIORITY, "1")
    backend = "cpu:gloo,cuda:nccl" if options.device == "cuda" else "gloo"
    dist.init_process_group(backend, init_method=f"file://{store}", rank=rank, world_size=options.ranks)
    ranks, started = Ranks(device, options.rounds, options.row_seconds), time.monotonic()
    rows, left_out = [], []
    found = {**surroundings(options, device), "bandwidth": bandwidths(options, ranks), "rows": rows}
    found["left_out"] = left_out
    for kind in options.problems:
        per_rank = TOY_PACKED_PER_RANK if options.toy else PACKED_PER_RANK
        for tokens in [per_rank * ranks.size] if kind == "packed" else options.sizes:
            if ranks.largest(time.monotonic() - started) > options.seconds:
                left_out.append([kind, tokens])
                continue
            found_rows = measure_row(kind, tokens, options, ranks)
            rows += found_rows
            if device.type == "cuda":
                torch.cuda.empty_cache()
            if rank == 0:
                print("\n".join(cp_tables.table(found_rows)), flush=True)
                write(found, options)  # after each row: a later one may meet a limit of time or memory
    dist.destroy_process_group()
    return found


def surroundings(options, device) -> dict:
    commit, dirty = git_state()
    return {
        "kind": "context_parallel", "ranks": options.ranks, "device": describe_device(device), "commit": commit,
        "dirty": dirty, "torch": torch.__version__, "nccl_high_priority": os.environ.get(HIGH_PRIORITY),
    }  # fmt: skip


def write(document: dict, options) -> None:
    if options.out:
        options.out.write_text(json.dumps(document, indent=1) + "\n")


def main(arguments=None) -> None:
    options = parse(arguments)
    context = get_context("forkserver")
    context.set_forkserver_preload(["torch", "torch.distributed"])
    with tempfile.TemporaryDirectory() as folder:
        results = context.Queue()
        processes = [
            context.Process(target=run_rank, args=(rank, options, f"{folder}/store", results))
            for rank in range(options.ranks)
        ]
        for process in processes:
            process.start()
        answers = {}
        try:
            while len(answers) < options.ranks:
                rank, answer = results.get(timeout=options.seconds + 300)
                if isinstance(answer, str):
                    raise SystemExit(f"error: rank {rank}:\n{answer}")
                answers[rank] = answer
        finally:
            for process in processes:
                process.join(10 if len(answers) == options.ranks else 0)
                process.kill()
    document = answers[0]
    write(document, options)
    print("\n".join(cp_tables.measured_lines(document)))


if __name__ == "__main__":
    main()
