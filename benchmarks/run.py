"""Measures attention side by side with its peers as docs/benchmarks.md says; prints a table, writes a JSON result.

python benchmarks/run.py --mode fwd bwd fwd+bwd     the modes to measure, on the GPU or without one on the CPU
python benchmarks/run.py --groups decode decode_layers prefill_cache   attention over a KV cache, not in the default

--budget is the time that the rows may take, in seconds. It takes away repeats, then what needs compilation (flex), and
at last rows. --max-ms bounds the repeats of each row.
"""

from __future__ import annotations

import argparse
import json
import math
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent))  # absent under PYTHONSAFEPATH

import torch
from ceilings import fp8_products, read_ceiling
from environment import describe_origin
from implementations import DEFAULT_PEERS, IMPLEMENTATIONS, choose, make_inputs
from measure import measure, prepare, skipped
from report import full_report
from results import ROOT
from rows import ALL_GROUPS, CACHE_HOST_CASE, CACHE_TIMING, GROUPS, HOST_CASE, MODE_FLOPS, Row, modes_of, select
from scores import OURS, PLAIN, speed
from shared import row_teller
from timing import Allowance, Budget, host_overhead_us, make_timers, summarize

SECONDS_PER_MODE = 65.0  # with the default peers; more peers get more
SECONDS_PER_EXTRA_PEER = 18.0
MANY_PEERS_SECONDS = 180.0


def parse(arguments):
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu", type=torch.device)
    parser.add_argument("--mode", nargs="+", default=["fwd"], choices=list(MODE_FLOPS))
    parser.add_argument("--groups", nargs="+", default=list(GROUPS), choices=ALL_GROUPS)
    peers = f"all, or some of {', '.join(list(IMPLEMENTATIONS)[1:])}"
    parser.add_argument("--peers", nargs="*", default=list(DEFAULT_PEERS), metavar="PEER", help=peers)
    parser.add_argument("--also", nargs="*", default=[], metavar="PEER", help="peers too, where they are installed")
    parser.add_argument("--dtype", default="bfloat16", choices=("bfloat16", "float16", "float32"))
    parser.add_argument("--quick", action="store_true", help="a third of the cells, fewer rounds; shorter on a CPU")
    parser.add_argument(
        "--budget", type=float, metavar="SECONDS", help="time for the rows (70 s a mode; 180 with many peers)"
    )
    parser.add_argument("--min-rounds", type=int, help="rounds per row, if the budget allows them (20; quick 5)")
    parser.add_argument("--min-ms", type=float, help="ms per implementation and row, likewise (60; 15 with --quick)")
    parser.add_argument(
        "--max-ms", type=float, default=math.inf, help="ms at most per row, all implementations together"
    )
    parser.add_argument(
        "--out", type=Path, default=ROOT / "build" / "benchmarks", help="folder of the JSON (build/benchmarks)"
    )
    parser.add_argument("--name", default="result", help="file name of the result without .json (result)")
    options = parser.parse_args(arguments)
    try:
        measured_groups = [group for group in options.groups if set(modes_of(group)) & set(options.mode)]
        also = [name for name in options.also if name not in IMPLEMENTATIONS or IMPLEMENTATIONS[name].installed]
        options.implementations = choose([*options.peers, *also], measured_groups)
    except ValueError as error:
        parser.error(str(error))
    return options


def default_seconds(modes, implementations):
    peers = [item for item in implementations if item.name not in ("ours", PLAIN)]  # few rows have the latter
    extra = max(0, len(peers) - len(DEFAULT_PEERS))
    return len(modes) * min(MANY_PEERS_SECONDS, SECONDS_PER_MODE + SECONDS_PER_EXTRA_PEER * extra)


def measure_host_overhead(implementations, device, case=HOST_CASE):
    row = Row("host", case)
    inputs = make_inputs(row, device)
    with torch.no_grad():
        calls, _, _, _ = prepare(implementations, row, inputs, "fwd", device)
        return {name: summarize(samples) for name, samples in host_overhead_us(device, calls).items()}


def progress_text(entry):
    figures = "  ".join(f"{name} {speed(entry, name)}" for name in entry["results"])
    told = [name for name in entry["notes"] if name == "ours" or name in entry["failed"]]
    missing = "".join(f"  [{name}: {entry['notes'][name]}]" for name in told)
    unit = "GB/s" if entry.get("bytes") else "TFLOPS"
    return f"{entry['label']} {entry['mode']}, {unit}: {figures or 'none'}{missing}"


def measure_all(options, device, budget, timers, keep):
    """The rows of the result, one per row of the table and mode; `keep` gets those so far, after each."""
    rows = select(options.groups, options.quick, device.type, options.dtype)
    work = [(row, mode) for mode in options.mode for row in rows if mode in row.modes]
    implementations = options.implementations
    allowance = Allowance(options.budget or default_seconds(options.mode, implementations), len(work))
    entries = []
    done = row_teller(len(work))
    for index, (row, mode) in enumerate(work):
        if allowance.exhausted():
            entries.append(skipped(row, mode, implementations, allowance.seconds))
        else:
            own, may_compile = allowance.budget(budget, index), not allowance.is_late(index)
            entries.append(measure(row, mode, implementations, timers, device, own, may_compile))
        keep(entries)
        done(progress_text(entries[-1]))
    return entries, {"budget_s": allowance.seconds, "spent_s": round(allowance.spent(), 1)}


def describe_run(options, device, budget):
    return {
        "schema": 2,
        **describe_origin(device),
        "dtype": options.dtype,
        "implementations": {item.name: item.title for item in options.implementations},
        "groups": options.groups,
        "method": {"min_rounds": budget.min_rounds, "min_ms": budget.min_ms},
    }


def main(arguments=None):
    options = parse(arguments)
    device = options.device
    if device.type == "cuda" and device.index is None:
        device = torch.device("cuda", torch.cuda.current_device())
    if device.type == "cuda":
        torch.cuda.set_device(device)  # events are recorded on the current device's stream
    standard = Budget(5, 15.0, 5.0) if options.quick else Budget()
    budget = Budget(
        options.min_rounds or standard.min_rounds, options.min_ms or standard.min_ms, standard.warmup_ms, options.max_ms
    )  # fmt: skip
    timers = make_timers(device)
    result = describe_run(options, device, budget)
    path = options.out / f"{options.name}.json"
    path.parent.mkdir(parents=True, exist_ok=True)

    def keep(entries):  # so that a run that is cut off leaves something
        path.write_text(json.dumps({**result, "rows": entries}, indent=1) + "\n", encoding="utf-8")

    result["rows"], spent = measure_all(options, device, budget, timers, keep)
    result["method"].update(spent)
    if device.type == "cuda":
        result["host_overhead"] = measure_host_overhead(options.implementations, device)
        if any(group in CACHE_TIMING for group in options.groups):
            result["read_ceiling"] = read_ceiling(device)
            result["host_overhead_cache"] = measure_host_overhead(options.implementations, device, CACHE_HOST_CASE)
        if "fp8" in options.groups:
            result["fp8_products"] = fp8_products(device)
    keep(result["rows"])
    print("\n".join([f"{path} ({spent['spent_s']} s)"] + full_report(result)))
    return 1 if any(set(OURS) & set(entry["failed"]) for entry in result["rows"]) else 0


if __name__ == "__main__":
    sys.exit(main())
