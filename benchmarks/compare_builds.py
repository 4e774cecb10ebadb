"""Measures two builds of the extension in turns in one process: ratio of each row, geometric mean, worst.

python benchmarks/compare_builds.py --old SITE_DIR --new SITE_DIR              within about four minutes
python benchmarks/compare_builds.py --old A --new B --groups cells decode      some groups of the table
python benchmarks/compare_builds.py --device cpu                               a trial: the CPU backend against itself

A SITE_DIR holds flash_attn_2_cuda*.so: `pip install --target SITE_DIR` makes one; the module's file does too. Both
builds need this interpreter's torch. Only the calls of the extension are compared, on the same tensors, by positional
entry points: later builds add parameters with defaults after these.

Method: as of run.py, in rounds A B, B A, ... A row's ratio is the median time of the old build over that of the new
one: above 1 the new one is faster. Rows below --limit are measured once more and longer, since among 200 rows some are
below it by chance. The exit status is 1 if a row is below its limit then, or if the builds' results differ by more than
rounding.
"""

from __future__ import annotations

import argparse
import contextlib
import importlib.machinery
import importlib.util
import itertools
import json
import sys
from dataclasses import replace
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent))  # absent under PYTHONSAFEPATH

import torch
from check import MAX_RELATIVE_ERROR, relative
from implementations import make_inputs
from rows import BACKWARD_GROUPS, CACHE_TIMING, GROUPS, select, windows
from scores import score_line
from shared import row_teller
from timing import CALLS_PER_GRAPH, Allowance, Budget, captured, interleave, make_timers, summarize

MODULE = "flash_attn_2_cuda"
LEFT_OUT = ("dims", "features", "value_dim", "deterministic", "one_wave", "small_eager", "decode_eager", "decode_mla")
DEFAULT_GROUPS = [group for group in (*GROUPS, *CACHE_TIMING) if group not in LEFT_OUT]
SECONDS = 200.0  # of the rows; the second look comes on top
BUDGET = Budget(min_ms=150.0)
AGAIN = replace(BUDGET, min_ms=450.0, min_rounds=3 * BUDGET.min_rounds, max_ms=3000.0)


def load_build(name, place):
    """The extension module in a folder, or at a file, as a submodule of `name`: pybind11 gives the module that it first
    made of a full name, whatever the file, and only the last part names the initialisation function."""
    found = [place] if place.is_file() else sorted(place.glob(f"{MODULE}*.so"))
    if len(found) != 1:
        raise ValueError(f"{place}: expected one {MODULE}*.so, found {len(found)}")
    loader = importlib.machinery.ExtensionFileLoader(f"{name}.{MODULE}", str(found[0].resolve()))
    module = importlib.util.module_from_spec(importlib.util.spec_from_loader(loader.name, loader))
    loader.exec_module(module)
    for known in (loader.name, MODULE):  # else whoever imports it by name gets the build that was loaded last
        sys.modules.pop(known, None)
    print(f"{name}: {json.loads(module.build_info())['commit']} of {place}")
    return module


# ---- the calls of a build --------------------------------------------------------------------------------------------


def forward(module, row, inputs):
    """The call of the forward -> [out, lse, S_dmask, rng_state(, max_logit)]."""
    case = row.case
    scores = case.dropout, case.head_dim**-0.5
    mask = (case.causal, *case.window, case.softcap, False, None)  # return_softmax, gen
    named = {"sinks": inputs.sinks, "return_max_logit": case.max_logit}
    if row.seqlens:
        cu, longest = inputs.cu_seqlens, max(row.seqlens)
        sequences = (cu, cu, None, None, None, inputs.alibi_slopes, longest, longest)
        arguments = (inputs.q, inputs.k, inputs.v, None, *sequences, *scores, False, *mask, 0)
        return lambda: module.varlen_fwd(*arguments, **named)
    arguments = (inputs.q, inputs.k, inputs.v, None, inputs.alibi_slopes, *scores, *mask)
    return lambda: module.fwd(*arguments, **named)


def backward(module, row, inputs, saved):
    """The call of the backward -> [dq, dk, dv, softmax_d(, dsinks)]; saved: what one forward returned."""
    case, (out, lse, _, rng_state, *_) = row.case, saved
    tensors = (inputs.dout, inputs.q, inputs.k, inputs.v, out, lse, None, None, None)
    scores = case.dropout, case.head_dim**-0.5
    mask = (case.causal, *case.window, case.softcap, row.group in BACKWARD_GROUPS, None, rng_state)
    if row.seqlens:
        cu, longest = inputs.cu_seqlens, max(row.seqlens)
        arguments = (*tensors, cu, cu, inputs.alibi_slopes, longest, longest, *scores, False, *mask)
        return lambda: module.varlen_bwd(*arguments, sinks=inputs.sinks)
    return lambda: module.bwd(*tensors, inputs.alibi_slopes, *scores, *mask, sinks=inputs.sinks)


def over_cache(module, row, inputs):
    """The call over a KV cache -> [out, lse]. As layers of a model, with a plan once per step, in rows timed so."""
    case, plan, out = row.case, None, None
    left, right = windows(case)
    capacity = case.seqlen_k if inputs.table is None else inputs.table.shape[1] * case.page_size
    sizes = (
        case.batch, case.seqlen_q, case.append, case.nheads, case.nheads_k, case.head_dim, capacity, right == 0, left,
        right, 0, case.invariant,
    )  # fmt: skip
    of_plan, of_call = {}, {}
    if inputs.qv is not None:
        of_plan, of_call = {"head_dim_v": case.head_dim_v}, {"qv": inputs.qv}
    if row.timing == "graph":
        out = torch.empty_like(inputs.q if inputs.qv is None else inputs.qv)
        plan = module.kvcache_plan(inputs.lengths, None, *sizes, None, **of_plan)
    new = inputs.new or (None, None)
    layers, count = itertools.cycle(inputs.caches), itertools.count()

    def call():
        if plan is not None and next(count) % CALLS_PER_GRAPH == 0:
            module.kvcache_plan(inputs.lengths, None, *sizes, plan, **of_plan)
        return module.fwd_kvcache(
            inputs.q, *next(layers), *new, inputs.lengths, inputs.cos, inputs.sin, None, None, inputs.table,
            inputs.alibi_slopes, out, (case.head_dim + case.head_dim_v) ** -0.5, case.causal, *case.window,
            case.softcap, False, 0, plan, case.invariant, **of_call,
        )  # fmt: skip

    return call


def make_call(module, row, mode, inputs, saved):
    if row.over_cache:
        return over_cache(module, row, inputs)
    return forward(module, row, inputs) if mode == "fwd" else backward(module, row, inputs, saved)


def modes_of(row):
    """What is measured of a row: graphs and caches have a forward only."""
    if row.over_cache or row.timing != "event":
        return ("fwd",)
    return ("bwd",) if row.group in BACKWARD_GROUPS else ("fwd", "bwd")


# ---- measuring -------------------------------------------------------------------------------------------------------


def prepare(builds, row, mode, inputs):
    """({build: (context, call)}, the largest difference of the results relative to the old ones)."""
    saved = forward(builds["old"], row, inputs)() if mode == "bwd" else None
    calls, results = {}, []
    for name, module in builds.items():
        call = make_call(module, row, mode, inputs, saved)
        results.append([x.double() for x in call()[: 1 if mode == "fwd" else 3]])
        if row.timing in ("graph", "replay"):
            call = captured(call, contextlib.nullcontext, CALLS_PER_GRAPH if row.timing == "graph" else 1)
        calls[name] = contextlib.nullcontext, call
    return calls, max(relative(new, old) for old, new in zip(*results))


def measure(builds, row, mode, timer, device, budget):
    """One row: medians of both builds in ms, the ratio, the difference of the results."""
    inputs = make_inputs(row, device)
    with torch.no_grad():
        calls, difference = prepare(builds, row, mode, inputs)
        samples, _ = interleave(timer, calls, budget)
    old, new = (summarize(samples[name])["median"] for name in builds)
    found = {"group": row.group, "mode": mode, "label": row.label, "old": old, "new": new, "ratio": old / new}
    # NaN differs from everything. The masks of dropout may be drawn anew.
    return {**found, "difference": difference, "wrong": not (row.case.dropout or difference <= MAX_RELATIVE_ERROR)}


def line_of(entry):
    text = f"{entry['group']} {entry['mode']} {entry['label']}: {entry['old']:.4g} -> {entry['new']:.4g} ms, "
    return text + f"{entry['ratio']:.4f}" + f", WRONG: results differ by {entry['difference']:.3g}" * entry["wrong"]


def measure_rows(builds, options, device):
    """The rows' entries; those below the limit are measured a second time."""
    rows, timers = select(options.groups, options.quick, device.type, options.dtype), make_timers(device)
    work = [(row, mode) for row in rows for mode in modes_of(row) if mode in options.mode]
    allowance, entries = Allowance(options.budget, max(1, len(work))), []
    done = row_teller(len(work))
    for index, (row, mode) in enumerate(work):
        entry = measure(builds, row, mode, timers[row.timing], device, allowance.budget(BUDGET, index))
        entries.append(entry)
        done(line_of(entry))
    for index, (row, mode) in enumerate(work):
        if entries[index]["ratio"] < options.limit:
            entries[index] = measure(builds, row, mode, timers[row.timing], device, AGAIN)
            print(f"again: {line_of(entries[index])}", file=sys.stderr)
    return entries


def report_lines(entries, limit):
    """A line for each group and mode, then the rows that are below the limit or wrong."""
    groups = {}
    for entry in entries:
        groups.setdefault(f"{entry['group']} {entry['mode']}, new against old", []).append(entry)
    lines = [score_line([(e["label"], e["ratio"]) for e in found], title) for title, found in groups.items()]
    equal = sum(entry["difference"] == 0 for entry in entries)
    told = [f"refused: {line_of(entry)}" for entry in entries if entry["ratio"] < limit or entry["wrong"]]
    return [*lines, f"{equal} of {len(entries)} with equal results", *told]


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
    parser.add_argument("--out", type=Path, help="JSON of the rows")
    options = parser.parse_args(arguments)
    if options.device.type == "cuda" and not (options.old and options.new):
        parser.error("--old and --new: expected the folders of two builds")
    return options


def main(arguments=None):
    options = parse(arguments)
    device = options.device
    if device.type == "cuda":
        device = torch.device("cuda", torch.cuda.current_device() if device.index is None else device.index)
        torch.cuda.set_device(device)
        builds = {name: load_build(name, getattr(options, name)) for name in ("old", "new")}
    else:
        import flash_attn.cpu

        builds = dict.fromkeys(("old", "new"), flash_attn.cpu)
    entries = measure_rows(builds, options, device)
    if options.out:
        options.out.write_text(json.dumps(entries, indent=1) + "\n")
    print("\n".join(report_lines(entries, options.limit)))
    return 1 if any(entry["ratio"] < options.limit or entry["wrong"] for entry in entries) else 0


if __name__ == "__main__":
    sys.exit(main())
