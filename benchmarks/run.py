"""Measures attention side by side with its peers; prints a table and writes a JSON result.

python benchmarks/run.py                            forward on the GPU (on the CPU without one), all groups
python benchmarks/run.py --mode fwd bwd fwd+bwd     the modes to measure
python benchmarks/run.py --quick                    a third of the cells, shorter
python benchmarks/run.py --groups cells --peers sdpa_flash sdpa_cudnn naive

Method: standard-normal inputs; all implementations get the same tensors and run in rounds A B A B with a rotated
order; every call is timed alone by device events after the L2 cache was overwritten; the median counts.
FLOPs: 4·b·h·sq·sk·d forward, half of it when causal, ×2.5 backward.
"""

from __future__ import annotations

import argparse
import datetime
import json
import re
import sys
import time
import warnings
from pathlib import Path

import torch
from check import MAX_RELATIVE_ERROR, relative_error
from environment import describe_device, describe_versions, git_state
from implementations import IMPLEMENTATIONS, make_inputs, timed_call
from report import full_report, significant
from rows import GROUPS, HOST_CASE, MODE_FLOPS, Row, select
from shared import ROOT
from timing import Budget, host_overhead_us, interleave, make_timer, summarize

REPORTED_FIELDS = ("batch", "seqlen_q", "seqlen_k", "nheads", "nheads_k", "head_dim", "causal")


def parse(arguments):
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu", type=torch.device)
    parser.add_argument("--mode", nargs="+", default=["fwd"], choices=list(MODE_FLOPS))
    parser.add_argument("--groups", nargs="+", default=list(GROUPS), choices=GROUPS)
    parser.add_argument("--peers", nargs="*", default=["sdpa_flash", "sdpa_cudnn"], choices=list(IMPLEMENTATIONS)[1:])
    parser.add_argument("--dtype", default="bfloat16", choices=("bfloat16", "float16", "float32"))
    parser.add_argument("--quick", action="store_true", help="a third of the cells, fewer rounds")
    parser.add_argument("--min-rounds", type=int, help="least rounds per case (20; 5 with --quick)")
    parser.add_argument("--min-ms", type=float, help="least ms per implementation and case (60; 15 with --quick)")
    parser.add_argument("--out", type=Path, default=ROOT / "benchmarks" / "results", help="folder of the JSON result")
    parser.add_argument("--name", help="file name of the result without .json")
    return parser.parse_args(arguments)


def probe(implementation, row, inputs, mode, device):
    """Builds the call and runs it once. Returns (call, facts) or raises what the implementation raises."""
    call = timed_call(implementation.build(row, inputs), inputs, mode)
    if device.type == "cuda":
        torch.cuda.synchronize(device)
        torch.cuda.reset_peak_memory_stats(device)
    before = torch.cuda.memory_allocated(device) if device.type == "cuda" else 0
    with implementation.context(), warnings.catch_warnings():
        warnings.simplefilter("ignore")  # an SDPA backend that refuses a row warns once per reason before it raises
        result = call()
    facts = {}
    if device.type == "cuda":
        torch.cuda.synchronize(device)
        facts["peak_bytes"] = torch.cuda.max_memory_allocated(device) - before
    if mode == "fwd":
        facts["relative_error"] = relative_error(row, inputs, result)
    return call, facts


def prepare(implementations, row, inputs, mode, device):
    """Probes every implementation on a row.

    Returns the calls to time {name: (context, call)}, {name: facts}, {name: why it is not measured} and the set of
    names that failed or gave a wrong result.
    """
    calls, facts, notes, failures = {}, {}, {}, set()
    for implementation in implementations:
        name = implementation.name
        reason = implementation.limits(row, device.type, mode)
        if reason:
            notes[name] = reason
            continue
        try:
            call, fact = probe(implementation, row, inputs, mode, device)
        except NotImplementedError as error:
            notes[name] = f"not implemented: {error}"
            continue
        except RuntimeError as error:
            notes[name] = f"failed: {str(error).splitlines()[0]}"
            failures.add(name)
            continue
        error = fact.get("relative_error")
        if error is not None and not error <= MAX_RELATIVE_ERROR:
            notes[name] = f"wrong result: relative error {error:.3g}"
            failures.add(name)
            continue
        calls[name], facts[name] = (implementation.context, call), fact
    return calls, facts, notes, failures


def measure(row, mode, implementations, timer, device, budget):
    """One row of the result."""
    inputs = make_inputs(row, device, requires_grad=mode != "fwd")
    with torch.set_grad_enabled(mode != "fwd"):
        calls, facts, notes, failures = prepare(implementations, row, inputs, mode, device)
        times, clock = interleave(timer, calls, budget) if calls else ({}, None)
    flops, case = row.flops(mode), row.case
    results = {}
    for name, samples in times.items():
        summary = summarize(samples)
        summary["ms"] = summary.pop("median")
        results[name] = {**summary, "tflops": flops / summary["ms"] / 1e9, **facts[name]}
    return {
        **{field: getattr(case, field) for field in REPORTED_FIELDS},
        "group": row.group,
        "id": row.id,
        "label": row.label,
        "mode": mode,
        "flops": flops,
        "sm_mhz": clock,
        "results": results,
        "notes": notes,
        "failed": sorted(failures),
    }


def measure_host_overhead(implementations, device):
    row = Row("host", HOST_CASE)
    inputs = make_inputs(row, device)
    with torch.no_grad():
        calls, _, _, _ = prepare(implementations, row, inputs, "fwd", device)
        return {name: summarize(samples) for name, samples in host_overhead_us(device, calls).items()}


def progress(index, count, entry, started):
    figures = "  ".join(f"{name} {significant(result['tflops'])}" for name, result in entry["results"].items())
    told = [name for name in entry["notes"] if name == "ours" or name in entry["failed"]]
    missing = "".join(f"  [{name}: {entry['notes'][name]}]" for name in told)
    seconds = time.monotonic() - started
    line = f"[{index}/{count}] {seconds:4.0f} s  {entry['label']} {entry['mode']}, TFLOPS: {figures or 'none'}{missing}"
    print(line, file=sys.stderr, flush=True)


def result_path(options, result):
    slug = re.sub(r"[^a-z0-9]+", "_", result["device"]["name"].lower()).strip("_")
    modes = "_".join(mode.replace("+", "_") for mode in options.mode)
    commit = (result["git"]["commit"] or "nocommit")[:12]
    return options.out / f"{options.name or f'{slug}_{modes}_{commit}'}.json"


def main(arguments=None):
    options = parse(arguments)
    device = options.device
    if device.type == "cuda" and device.index is None:
        device = torch.device("cuda", torch.cuda.current_device())
    if device.type == "cuda":
        torch.cuda.set_device(device)  # events are recorded on the current device's stream
    budget = Budget(
        options.min_rounds or (5 if options.quick else 20), options.min_ms or (15.0 if options.quick else 60.0)
    )
    implementations = [IMPLEMENTATIONS[name] for name in ["ours", *options.peers]]
    rows = select(options.groups, options.quick, device.type, options.dtype)
    timer = make_timer(device)
    versions, build = describe_versions()
    commit, dirty = git_state()
    result = {
        "schema": 1,
        "started": datetime.datetime.now(datetime.timezone.utc).isoformat(timespec="seconds"),
        "device": describe_device(device),
        "versions": versions,
        "build": build,
        "git": {"commit": commit or build.get("commit"), "dirty": dirty},
        "dtype": options.dtype,
        "implementations": {item.name: item.title for item in implementations},
        "groups": options.groups,
        "method": {"budget": vars(budget), "clock_source": timer.clock.source if device.type == "cuda" else None},
        "rows": [],
    }
    started = time.monotonic()
    work = [(row, mode) for mode in options.mode for row in rows]
    for index, (row, mode) in enumerate(work, 1):
        entry = measure(row, mode, implementations, timer, device, budget)
        result["rows"].append(entry)
        progress(index, len(work), entry, started)
    if device.type == "cuda":
        result["host_overhead"] = measure_host_overhead(implementations, device)
    result["seconds"] = round(time.monotonic() - started, 1)
    path = result_path(options, result)
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps(result, indent=1) + "\n")
    print("\n".join([f"{path} ({result['seconds']} s)"] + full_report(result)))
    return 1 if any("ours" in entry["failed"] for entry in result["rows"]) else 0


if __name__ == "__main__":
    sys.exit(main())
