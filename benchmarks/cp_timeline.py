"""Where the time of a context-parallel call goes: ways of moving keys in turns, and what runs when on each GPU.

    python benchmarks/cp_timeline.py --out result.json                # all GPUs that torch sees
    python benchmarks/cp_timeline.py --device cpu --ranks 2 --toy     # gloo, to see that it runs

Causal, zigzag. A variant is options of the plan and of the call; each has a time in each round, as in
context_parallel.py. Then torch.profiler records a few calls that follow each other on every rank: each kernel and copy
with its stream, begin and end on a clock that ranks share, and how long before its begin the host had launched it. The
tables say how much of a call attention takes, alone and beside messages, and what the stream of attention waits for in
the rest.
"""

from __future__ import annotations

import argparse
import json
import os
import sys
import tempfile
import traceback
from functools import partial
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent))  # absent under PYTHONSAFEPATH

import torch
import torch.distributed as dist
from context_parallel import HIGH_PRIORITY, Problem, Ranks, calls, surroundings, write
from torch.multiprocessing import get_context

from flash_attn.context_parallel import CpPlan, flash_attn_cp_func

VARIANTS = {  # options of the plan and of the call
    "messages": ({"method": "all_gather"}, {}),
    "margin_16": ({"method": "all_gather"}, {"sm_margin": 16}),
    "ring": ({"method": "ring"}, {}),
    "copies": ({"method": "all_gather", "copies": True}, {}),
}
MODES = ("forward", "both")
PROFILED_CALLS = 4
LATE_MICROSECONDS = 8.0  # a kernel that begins sooner after its launch did not wait for the GPU
KINDS = (  # of what the GPU runs, by the first of these words in its name
    ("message", ("nccl",)),
    ("wait", ("wait_signal",)),
    ("combine", ("combine",)),
    ("pass", ("softmax_d", "convert_dq", "prepare")),
    ("attention", ("flash",)),
)


def parse(arguments=None):
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--device", choices=("cuda", "cpu"), default="cuda")
    parser.add_argument("--ranks", type=int, help="default: all GPUs, 2 on CPU")
    parser.add_argument("--toy", action="store_true", help="tiny sizes")
    parser.add_argument("--sizes", type=int, nargs="+", help="tokens over all ranks")
    parser.add_argument("--timeline-sizes", type=int, nargs="*", help="of those that are profiled too")
    by_messages = [name for name, (given, _) in VARIANTS.items() if "copies" not in given]
    parser.add_argument("--variants", nargs="+", choices=list(VARIANTS), default=by_messages)
    parser.add_argument("--rounds", type=int, default=9)
    parser.add_argument("--row-seconds", type=float, default=6.0, help="of a size's rounds in one mode")
    parser.add_argument("--seconds", type=float, default=300, help="of all")
    parser.add_argument("--out", type=Path, help="JSON")
    parser.add_argument("--show", type=Path, help="measure nothing: all kernels of this result's forwards")
    options = parser.parse_args(arguments)
    options.ranks = options.ranks or (torch.cuda.device_count() if options.device == "cuda" else 2)
    options.sizes = options.sizes or ([64] if options.toy else [1 << 15])
    options.timeline_sizes = options.sizes[:1] if options.timeline_sizes is None else options.timeline_sizes
    return options


# ---- a profile as numbers ----


def events_of(trace: dict) -> list[dict]:
    """What a GPU ran, of a trace of torch.profiler, by its begin; times in microseconds of the host's clock."""
    base = trace.get("baseTimeNanoseconds", 0) / 1000
    launched = {
        event["args"]["correlation"]: event["ts"] + event.get("dur", 0)
        for event in trace["traceEvents"]
        if event.get("cat") in ("cuda_runtime", "cuda_driver") and "correlation" in event.get("args", {})
    }
    found = []
    for event in trace["traceEvents"]:
        if event.get("ph") != "X" or event.get("cat") not in ("kernel", "gpu_memcpy", "gpu_memset"):
            continue
        given = event.get("args", {})
        launch = launched.get(given.get("correlation"))
        found.append({
            "name": event["name"][:80], "kind": kind_of(event["name"], event["cat"]), "stream": given.get("stream"),
            "begin": base + event["ts"], "end": base + event["ts"] + event["dur"], "grid": given.get("grid"),
            "shared_memory": given.get("shared memory"), "bytes": given.get("bytes"),
            "waited": None if launch is None else event["ts"] - launch,
        })  # fmt: skip
    return sorted(found, key=lambda event: event["begin"])


def kind_of(name: str, category: str) -> str:
    if category != "kernel":
        return "copy"
    return next((kind for kind, words in KINDS if any(word in name.lower() for word in words)), "elementwise")


def union(spans) -> list[list[float]]:
    result: list[list[float]] = []
    for begin, end in sorted(spans):
        if result and begin <= result[-1][1]:
            result[-1][1] = max(end, result[-1][1])
        else:
            result.append([begin, end])
    return result


def length(spans) -> float:
    return sum(end - begin for begin, end in spans)


def common(a, b) -> list[list[float]]:
    found = ([max(x[0], y[0]), min(x[1], y[1])] for x in a for y in b)
    return [span for span in found if span[0] < span[1]]


def summary(events: list[dict], count: int) -> dict:
    """Milliseconds of one of `count` calls."""
    attention = [event for event in events if event["kind"] == "attention"]
    if not attention:
        return {}
    stream = attention[0]["stream"]
    own = [event for event in events if event["stream"] == stream]
    begin, end = events[0]["begin"], max(event["end"] for event in events)
    computing, messages = (
        union((event["begin"], event["end"]) for event in events if event["kind"] in kinds)
        for kinds in (("attention",), ("message", "copy"))
    )
    gaps = gaps_of(own, begin)
    idle = {name: sum(gap["length"] for gap in gaps if gap["because"] == name) for name in ("host", "event", "launch")}
    kinds = dict.fromkeys(event["kind"] for event in events)
    in_all = {kind: sum(event["end"] - event["begin"] for event in events if event["kind"] == kind) for kind in kinds}
    beside = length(common(computing, messages))
    found = {
        "call": end - begin, "attention": length(computing), "attention_beside_transfers": beside,
        "transfers": length(messages), "transfers_alone": length(messages) - beside,
        **{f"idle_for_{name}": value for name, value in idle.items()},
        **{f"all_{kind}": value for kind, value in in_all.items()},
    }  # fmt: skip
    found = {name: round(value / count / 1000, 4) for name, value in found.items()}
    found["kernels"] = round(len(events) / count, 1)
    found["message_grids"] = sorted({str(event["grid"]) for event in events if event["kind"] == "message"})
    return found


def gaps_of(events: list[dict], begin: float) -> list[dict]:
    """Where a stream has nothing to run: because the host launched late, because the next kernel waits for an event of
    another stream, or between two that follow each other at once."""
    found, before = [], begin
    for event in events:
        gap = event["begin"] - before
        if gap > 0:
            late = event["waited"] is not None and event["waited"] < LATE_MICROSECONDS
            because = "host" if late else "event" if gap > LATE_MICROSECONDS else "launch"
            found.append({"at": before, "length": gap, "because": because, "next": event["kind"]})
        before = max(before, event["end"])
    return found


def compact(events: list[dict], origin: float) -> list[list]:
    """[kind, stream, begin, duration, wait since launch, grid, bytes, name] in microseconds from the origin."""
    return [
        [
            event["kind"], event["stream"], round(event["begin"] - origin, 1), round(event["end"] - event["begin"], 1),
            None if event["waited"] is None else round(event["waited"], 1), event["grid"], event["bytes"],
            event["name"],
        ]
        for event in events
    ]  # fmt: skip


def profiled(call, device) -> list[dict]:
    """What the GPU runs in PROFILED_CALLS calls."""
    activities = torch.profiler.ProfilerActivity
    torch.cuda.synchronize(device)
    with torch.profiler.profile(activities=[activities.CPU, activities.CUDA]) as profile:
        for _ in range(PROFILED_CALLS):
            call()
        torch.cuda.synchronize(device)
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder, "trace.json")
        profile.export_chrome_trace(str(path))
        return events_of(json.loads(path.read_text()))


# ---- measuring ----


def calls_of_variants(problem: Problem, names) -> tuple[dict, dict]:
    """{name: {mode: call}}, and the error of each one's results over the largest of one GPU's."""
    made, errors, ranks = {}, {}, Ranks(problem.whole[0].device, 1)
    one = calls(problem.one_gpu, *problem.whole)
    expected = one["forward"](), *one["both"]()
    for name in names:
        of_plan, of_call = VARIANTS[name]
        plan = CpPlan.dense(problem.tokens, check="plan", **of_plan)
        function = partial(flash_attn_cp_func, plan=plan, causal=True, **of_call)
        made[name] = calls(function, *(plan.shard(x, 1) for x in problem.whole))
        for _ in range(3):  # buffers are used again
            found = made[name]["forward"](), *made[name]["both"]()
        pairs = [(ours, plan.shard(theirs, 1)) for ours, theirs in zip(found, expected)]
        error = max(((a - b).abs().max() / b.abs().max()).item() for a, b in pairs)
        errors[name] = ranks.largest(error)
        if not errors[name] < 0.05:
            raise RuntimeError(f"{name}: expected one GPU's results, got an error of {errors[name]}")
    return made, errors


def measure_size(tokens: int, options, ranks: Ranks) -> dict:
    problem = Problem("causal", tokens, options, ranks.device)
    made, errors = calls_of_variants(problem, options.variants)
    one, row = calls(problem.one_gpu, *problem.whole), {"tokens": tokens, "errors": errors, "timelines": {}}
    for mode in MODES:
        found = ranks.medians({"one_gpu": one[mode], **{name: each[mode] for name, each in made.items()}})
        alone = found["one_gpu"][0]
        row[mode] = {
            name: {
                "seconds": median, "rounds": rounds, "calls": count, "fastest": fastest, "slowest": slowest,
                "alloc_retries": retries, "per_gpu": alone / ranks.size / median,
            }
            for name, (median, rounds, count, (fastest, slowest, retries)) in found.items()
        }  # fmt: skip
    if tokens in options.timeline_sizes and ranks.device.type == "cuda":
        for name, each in {"one_gpu": one, **made}.items():
            row["timelines"][name] = {mode: timeline(each[mode], ranks) for mode in MODES}
    return row


def timeline(call, ranks: Ranks) -> list[dict]:
    """Of every rank, on one clock."""
    call()
    ranks.largest(0.0)
    events, everyone = profiled(call, ranks.device), [None] * ranks.size
    dist.all_gather_object(everyone, events, group=ranks_on_host())
    origin = min((each[0]["begin"] for each in everyone if each), default=0.0)
    return [{**summary(each, PROFILED_CALLS), "events": compact(each, origin)} for each in everyone]


_HOST_GROUP: list = []


def ranks_on_host():
    if not _HOST_GROUP:
        _HOST_GROUP.append(dist.new_group(backend="gloo"))
    return _HOST_GROUP[0]


def told(row: dict) -> str:
    """Tables of one size."""
    lines = [f"## {row['tokens']} tokens", "| variant | forward, ms | % of one GPU | both, ms | % of one GPU |"]
    lines.append("|---|---|---|---|---|")
    for name in row["forward"]:
        cells = []
        for x in (row[mode][name] for mode in MODES):
            median, fastest, slowest = (1e3 * x[key] for key in ("seconds", "fastest", "slowest"))
            cells.append(f"{median:.3f} ({fastest:.3f} to {slowest:.3f}) | {100 * x['per_gpu']:.1f}")
        lines.append(f"| {name} | {' | '.join(cells)} |")
    for name, modes in row["timelines"].items():
        for mode, ranks in modes.items():
            for rank, each in enumerate(ranks):
                shown = ", ".join(f"{key} {value}" for key, value in each.items() if key != "events")
                lines.append(f"{name} {mode} rank {rank}: {shown}")
    return "\n".join(lines)


def told_events(row: dict, name: str, mode: str) -> str:
    """All kernels and copies of a profile, each rank's."""
    lines = []
    for rank, each in enumerate(row["timelines"].get(name, {}).get(mode, ())):
        lines.append(f"{name} {mode} rank {rank}: begin, duration, since launch (us), stream, kind, grid")
        for kind, stream, begin, duration, waited, grid, size, _ in each["events"]:
            lines.append(f"{begin:10.1f} {duration:9.1f} {waited!s:>9} {stream!s:>4} {kind} {grid or size or ''}")
    return "\n".join(lines)


def run_rank(rank: int, options, store: str, results) -> None:
    try:
        results.put((rank, _measure(rank, options, store)))
    except BaseException:
        results.put((rank, traceback.format_exc()))
        raise


def _measure(rank: int, options, store: str):
    torch.set_num_threads(1)
    is_cuda = options.device == "cuda"
    device = torch.device("cuda", rank) if is_cuda else torch.device("cpu")
    if is_cuda:
        torch.cuda.set_device(rank)
    os.environ.setdefault(HIGH_PRIORITY, "1")
    backend = "cpu:gloo,cuda:nccl" if is_cuda else "gloo"
    dist.init_process_group(backend, init_method=f"file://{store}", rank=rank, world_size=options.ranks)
    ranks = Ranks(device, options.rounds, options.row_seconds)
    found = {**surroundings(options, device), "kind": "cp_timeline", "rows": []}
    for tokens in options.sizes:
        found["rows"].append(measure_size(tokens, options, ranks))
        if is_cuda:
            torch.cuda.empty_cache()
        if rank == 0:
            print(told(found["rows"][-1]), flush=True)
            write(found, options)
    dist.destroy_process_group()
    return None


def main(arguments=None) -> None:
    options = parse(arguments)
    if options.show:
        for row in json.loads(options.show.read_text())["rows"]:
            print(told(row), *(told_events(row, name, "forward") for name in row["timelines"]), sep="\n")
        return
    context = get_context("spawn")
    with tempfile.TemporaryDirectory() as folder:
        results = context.Queue()
        processes = [
            context.Process(target=run_rank, args=(rank, options, f"{folder}/store", results))
            for rank in range(options.ranks)
        ]
        for process in processes:
            process.start()
        try:
            for _ in processes:
                rank, error = results.get(timeout=options.seconds)
                if error is not None:
                    raise SystemExit(f"error: rank {rank}:\n{error}")
        finally:
            for process in processes:
                process.join(5)
                process.kill()


if __name__ == "__main__":
    main()
