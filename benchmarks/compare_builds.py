"""Measures two builds of the extension in turns in one process: ratio of each row, geometric mean, worst.

python benchmarks/compare_builds.py --old SITE_DIR --new SITE_DIR              within about four minutes
python benchmarks/compare_builds.py --old A --new B --groups cells decode      some groups of the table
python benchmarks/compare_builds.py --device cpu                               a trial: the CPU backend against itself

A SITE_DIR holds flash_attn_2_cuda*.so: `pip install --target SITE_DIR` makes one; the module's file does too. Both
builds need this interpreter's torch. Only the calls of the extension are compared, on the same tensors.

Method: as of run.py; single calls by device events after the L2 cache was overwritten, or graphs of one call or of 20,
in rounds A B, B A, ... A row's ratio is the median time of the old build over that of the new one: above 1 the new one
is faster. Rows below --limit are measured again, longer, with all samples counted, since among 200 rows some are below
it by chance; the interval is where the median of the rounds' own ratios lies with a probability of 95 %. The exit
status is 1 if a row is below its limit then, or if the builds' results differ by more than rounding.
"""

from __future__ import annotations

import argparse
import contextlib
import datetime
import json
import math
import statistics
import sys
from dataclasses import replace
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent))  # absent under PYTHONSAFEPATH

import torch
from builds import Build, load_build, make_call, modes_of, results_of
from environment import describe_device
from implementations import make_inputs
from rows import CACHE_TIMING, GROUPS, select
from shared import ROOT, row_bar
from timing import CALLS_PER_GRAPH, Allowance, Budget, captured, interleave, make_timers, summarize

LEFT_OUT = ("dims", "features", "value_dim", "deterministic", "one_wave", "small_eager", "decode_eager", "decode_mla")
DEFAULT_GROUPS = [group for group in (*GROUPS, *CACHE_TIMING) if group not in LEFT_OUT]
SECONDS = 200.0  # of the rows; the second look comes on top
AGAIN = 3.0  # rows below the limit are measured again for so many times as long
AGAIN_MAX_MS = 3000.0
MAX_DIFFERENCE = 2e-2  # of the results, relative; as check.py's bound for a wrong result
OLD, NEW = "old", "new"


def parse(arguments):
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--old", type=Path, metavar="SITE_DIR", help="folder of the build to compare against")
    parser.add_argument("--new", type=Path, metavar="SITE_DIR", help="folder of the build that is judged")
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu", type=torch.device)
    parser.add_argument("--groups", nargs="+", default=DEFAULT_GROUPS, choices=(*GROUPS, *CACHE_TIMING))
    parser.add_argument("--mode", nargs="+", default=["fwd", "bwd"], choices=("fwd", "bwd"))
    parser.add_argument("--dtype", default="bfloat16", choices=("bfloat16", "float16", "float32"))
    parser.add_argument("--quick", action="store_true", help="a third of the cells")
    parser.add_argument("--budget", type=float, default=SECONDS, metavar="SECONDS", help=f"of the rows ({SECONDS:g})")
    parser.add_argument("--limit", type=float, default=0.99, help="least ratio of a row (0.99)")
    parser.add_argument("--out", type=Path, default=ROOT / "build" / "benchmarks" / "builds.json", help="JSON")
    options = parser.parse_args(arguments)
    if options.device.type == "cuda" and not (options.old and options.new):
        parser.error("--old and --new: expected the folders of two builds")
    return options


def load_builds(options):
    if options.device.type == "cuda":
        return [load_build(OLD, options.old), load_build(NEW, options.new)]
    import flash_attn.cpu

    return [Build(name, flash_attn.cpu, Path(flash_attn.__file__).parents[1], {}) for name in (OLD, NEW)]


def difference(row, mode, pairs):
    """||new - old|| / ||old||, the largest of the results; None for dropout, whose masks may be drawn anew."""
    if row.case.dropout:
        return None
    norm = torch.linalg.norm
    return max((norm(new.double() - old.double()) / norm(old.double())).item() for old, new in pairs)


def prepare(builds, row, mode, inputs, device):
    """({build: (context, call)}, difference of the results, whether their bits are equal)."""
    saved = None
    if mode == "bwd":
        first = make_call(builds[0], row, "fwd", inputs, None)()
        saved = first[0], first[1], first[3]
    calls, results = {}, []
    for build in builds:
        call = make_call(build, row, mode, inputs, saved)
        results.append([x.clone() for x in results_of(mode, call())])
        if row.timing in ("graph", "replay"):
            call = captured(call, contextlib.nullcontext, CALLS_PER_GRAPH if row.timing == "graph" else 1)
        calls[build.name] = contextlib.nullcontext, call
    pairs = list(zip(*results))
    return calls, difference(row, mode, pairs), all(torch.equal(old, new) for old, new in pairs)


def measure(builds, row, mode, timers, device, budget):
    """({build: [ms, ...]}, facts) of one row."""
    inputs = make_inputs(row, device)
    with torch.no_grad():
        calls, differs, equal = prepare(builds, row, mode, inputs, device)
        samples, clock = interleave(timers[row.timing], calls, budget)
    return samples, {"difference": differs, "equal_bits": equal, "sm_mhz": clock}


def median_interval(values):
    """(low, high): between these order statistics the median lies with a probability of about 95 %."""
    ordered = sorted(values)
    outside = max(0, int(len(ordered) / 2 - 0.98 * math.sqrt(len(ordered))))
    return ordered[outside], ordered[-1 - outside]


def judged(samples, limit):
    """What a result says of the samples {old: [...], new: [...]} of one row; the i-th of both are of one round."""
    old, new = summarize(samples[OLD]), summarize(samples[NEW])
    ratio = old["median"] / new["median"]
    interval = median_interval([a / b for a, b in zip(samples[OLD], samples[NEW])])
    return {OLD: old, NEW: new, "ratio": ratio, "interval": list(interval), "below": ratio < limit}


def describe(row, mode):
    return {"group": row.group, "mode": mode, "timing": row.timing, "id": row.id, "label": row.label, "unit": "ms"}


def is_wrong(entry):
    """Whether the builds' results differ by more than rounding; NaN is no number that is close."""
    return entry.get("difference") is not None and not entry["difference"] <= MAX_DIFFERENCE


def measure_rows(builds, options, device, timers):
    """The rows' entries; those below the limit are measured a second time."""
    rows = select(options.groups, options.quick, device.type, options.dtype)
    work = [(row, mode) for row in rows for mode in modes_of(row) if mode in options.mode]
    base, allowance = Budget(min_ms=150.0), Allowance(options.budget, max(1, len(work)))
    entries, samples = [], []
    with row_bar(len(work)) as done:
        for index, (row, mode) in enumerate(work):
            found, facts = measure(builds, row, mode, timers, device, allowance.budget(base, index))
            samples.append(found)
            entries.append({**describe(row, mode), **judged(found, options.limit), **facts})
            done(line_of(entries[-1]))
    again = replace(base, min_ms=AGAIN * base.min_ms, min_rounds=int(AGAIN * base.min_rounds), max_ms=AGAIN_MAX_MS)
    for index, (row, mode) in enumerate(work):
        if entries[index]["below"]:
            first = entries[index]["ratio"]
            found, _ = measure(builds, row, mode, timers, device, again)
            pooled = {name: samples[index][name] + found[name] for name in (OLD, NEW)}
            entries[index].update(judged(pooled, options.limit), first_ratio=first)
            print(f"again: {line_of(entries[index])}, first {first:.4f}", file=sys.stderr)
    return entries


def scores(entries):
    """One record per group and mode: geometric mean, worst row, rows below the limit, rows with equal results."""
    found = {}
    for entry in entries:
        found.setdefault((entry["group"], entry["mode"]), []).append(entry)
    return [
        {
            "group": group,
            "mode": mode,
            "rows": len(members),
            "mean": statistics.geometric_mean([e["ratio"] for e in members]),
            "worst": min(e["ratio"] for e in members),
            "worst_label": min(members, key=lambda e: e["ratio"])["label"],
            "below": [e["label"] for e in members if e["below"]],
            "equal_bits": sum(e.get("equal_bits", False) for e in members),
        }
        for (group, mode), members in found.items()
    ]


def line_of(entry):
    low, high = entry["interval"]
    times = f"{entry[OLD]['median']:.4g} -> {entry[NEW]['median']:.4g} {entry['unit']}"
    text = f"{entry['group']} {entry['mode']} {entry['label']}: {times}, {entry['ratio']:.4f} [{low:.4f}, {high:.4f}]"
    return text + f", results differ by {entry['difference']:.3g}" * is_wrong(entry)


def report_lines(result):
    lines = [f"{name}: {result[name]['commit']} of {result[name]['site']}" for name in (OLD, NEW)]
    lines += [f"speed of new relative to old, limit {result['limit']:g}"]
    for score in result["scores"]:
        line = f"{score['group']} {score['mode']}: geometric mean {score['mean']:.4f}, worst {score['worst']:.4f} "
        line += f"({score['worst_label']}), {score['equal_bits']} of {score['rows']} bitwise equal"
        lines.append(line + (f", below the limit: {'; '.join(score['below'])}" if score["below"] else ""))
    return lines + [f"wrong: {line_of(entry)}" for entry in result["rows"] if is_wrong(entry)]


def main(arguments=None):
    options = parse(arguments)
    device = options.device
    if device.type == "cuda":
        device = torch.device("cuda", torch.cuda.current_device() if device.index is None else device.index)
        torch.cuda.set_device(device)
    started = datetime.datetime.now(datetime.timezone.utc).isoformat(timespec="seconds")
    builds = load_builds(options)
    entries = measure_rows(builds, options, device, make_timers(device))
    result = {
        "schema": 1,
        "started": started,
        "device": describe_device(device),
        "versions": {"torch": torch.__version__, "cuda": torch.version.cuda},
        **{b.name: {"commit": b.commit, "site": b.site and b.site.name, "build": b.info} for b in builds},
        "limit": options.limit,
        "rows": entries,
        "scores": scores(entries),
    }
    options.out.parent.mkdir(parents=True, exist_ok=True)
    options.out.write_text(json.dumps(result, indent=1) + "\n")
    print("\n".join([str(options.out), *report_lines(result)]))
    return 1 if any(entry["below"] or is_wrong(entry) for entry in entries) else 0


if __name__ == "__main__":
    sys.exit(main())
