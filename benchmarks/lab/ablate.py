"""What each technique of the forward is worth: `python benchmarks/lab/ablate.py --out ablate.json`.

Measures every entry of sm80_designs.py: the ladder from plain loads to the kernel in use, and the kernel in use with
one thing changed; full and causal. Then those of sm90_designs.py, the Hopper forward. Compiles what is missing on all
cores (build/lab/kernels keeps it), compares each kernel with float64 attention, times them in turns, writes the JSON
and prints the tables.
A kernel that hangs ends the program after half a minute; the same command continues without it. --without leaves
designs out by their labels. Needs nvcc and the CUTLASS headers, or what `run_all.py --build-only` made, torch and a
GPU; --compile-only no GPU, --list nothing, --from-json a result.
"""

from __future__ import annotations

import argparse
import contextlib
import dataclasses
import itertools
import os
import platform
import sys
from functools import partial
from pathlib import Path
from unittest import mock

HERE = Path(__file__).resolve().parent
sys.path[:0] = [str(HERE), str(HERE.parent)]  # absent under PYTHONSAFEPATH

import ablate_report
import sm80_designs
import sm90_designs
from ablate_report import LIBRARY
from kernel_library import BuildError, forward, make_compiler, source_key
from results import ROOT, load
from resumable import Ended, Progress, say

FAMILIES = {"mma_sync": sm80_designs.entries, "wgmma": sm90_designs.entries}
SEQLENS = (1024, 4096)
CHECKED = ((1, 1), (200, 200), (577, 577), (70, 333))  # (seqlen_q, seqlen_k)
DEVICE = "cuda"  # the CPU in a dry run
TORCH_DTYPES = {"bf16": "bfloat16", "fp16": "float16"}


def work(families, head_dims, without=()):
    """{(family, head dim): [Entry]}, except those whose label is in `without`."""
    found = {(family, dim): FAMILIES[family](dim) for family in families for dim in head_dims}
    labels = {entry.label for entries in found.values() for entry in entries}
    if set(without) - labels:
        raise BuildError(f"--without: expected labels of --list, got {', '.join(sorted(set(without) - labels))}")
    return {key: [entry for entry in entries if entry.label not in without] for key, entries in found.items()}


def identity(design):
    """A design in a word; names alone do not tell all apart."""
    return "-".join([design.name, source_key(design), *map(str, design.options)])


def refusal(torch, attention, design):
    """Why not to time a kernel; None if it is as exact as tests demand: twice the error of plain 16-bit attention."""
    generator = torch.Generator(device=DEVICE).manual_seed(0)
    dtype = getattr(torch, TORCH_DTYPES[design.dtype])
    for (seqlen_q, seqlen_k), mask in itertools.product(CHECKED, design.masks):
        lengths = (seqlen_q, seqlen_k, seqlen_k)
        shapes = [(2, length, 3, design.head_dim) for length in lengths]
        q, k, v = (torch.randn(shape, device=DEVICE, generator=generator).to(dtype) for shape in shapes)
        out = torch.full_like(q, float("nan"))
        try:
            forward(design, q, k, v, out, causal=mask == "causal")
        except (BuildError, RuntimeError) as error:
            return str(error)
        exact = attention(q, k, v, causal=mask == "causal").out
        plain = attention(q, k, v, causal=mask == "causal", dtype=dtype).out
        error = (out.double() - exact).abs().max().item()
        bound = 2 * (plain.double() - exact).abs().max().item() + 1e-5
        if not error <= bound:
            return f"s {seqlen_q}, {seqlen_k}, {mask}: error {error:.2e} (bound {bound:.2e})"
    return None


def library_call(family, q, k, v, causal):
    """(context, function) of the installed library; None without one, or without kernels for this GPU."""
    try:
        import flash_attn
    except ImportError:
        return None
    call = partial(flash_attn.flash_attn_func, q, k, v, causal=causal)
    try:
        with mock.patch.dict(os.environ, FLASH_ATTN_FAMILY=family):  # read at every call
            call()
    except (RuntimeError, ImportError):
        return None
    return partial(mock.patch.dict, os.environ, FLASH_ATTN_FAMILY=family), call


def time_cell(torch, timer, designs, case, family, budget):
    """{design or LIBRARY: median ms} on one problem, interleaved."""
    from timing import interleave, summarize

    calls, inputs = {}, {}
    shape = (case.batch, case.seqlen_q, case.nheads, case.head_dim)
    for name in dict.fromkeys(["bf16", *(design.dtype for design in designs)]):
        inputs[name] = [torch.randn(shape, device=DEVICE).to(getattr(torch, TORCH_DTYPES[name])) for _ in range(4)]
    for design in designs:
        call = partial(forward, design, *inputs[design.dtype], causal=case.causal)
        calls[design] = contextlib.nullcontext, call
    q, k, v, _ = inputs["bf16"]
    library = library_call(family, q, k, v, case.causal)
    if library:
        calls[LIBRARY] = library
    samples, _ = interleave(timer, calls, budget)
    return {name: summarize(values)["median"] for name, values in samples.items()}


def failures(designs, compiled, progress, check):
    """{design: why it is not timed}."""
    failed = {}
    for design in dict.fromkeys(designs):
        reason = "does not compile"
        if design in compiled:
            try:
                with progress.watched(f"checking {identity(design)}"):
                    reason = check(design)
            except Ended as error:
                reason = str(error)
        if reason is not None:
            failed[design] = reason
            say(f"LEFT OUT: {design.name}: {reason}")
    return failed


def measure(torch, timer, progress, family, head_dim, entries, compiled, budget):
    """One head dim of a family as plain data."""
    from shared import attention, bench_cells

    designs = list(dict.fromkeys(entry.design for entry in entries))
    failed = failures(designs, compiled, progress, lambda design: refusal(torch, attention, design))
    flops, times = {}, {}
    for case in bench_cells((head_dim,)):
        mask = "causal" if case.causal else "full"
        good = [design for design in designs if design not in failed and mask in design.masks]
        if case.seqlen_q not in SEQLENS or not good:
            continue
        cell = f"{mask} {case.seqlen_q}"
        with contextlib.suppress(Ended), progress.watched(f"timing {len(good)} kernels, {family} d {head_dim} {cell}"):
            medians = time_cell(torch, timer, good, case, family, budget)
            flops[cell] = case.flops
            for name, ms in medians.items():
                times.setdefault(name, {})[cell] = ms
    rows = [row(entry, compiled.get(entry.design), times.get(entry.design, {}), failed.get(entry.design))
            for entry in entries]  # fmt: skip
    if LIBRARY in times:
        rows.append({"kind": LIBRARY, "label": LIBRARY, "failed": None, "facts": None, "ms": times[LIBRARY]})
    return {"flops": flops, "entries": rows}


def row(entry, facts, times, failed):
    """What the JSON says of an entry."""
    design = dataclasses.asdict(entry.design)
    design = {field: sorted(value) if isinstance(value, frozenset) else value for field, value in design.items()}
    return {"kind": entry.kind, "label": entry.label, "design": design, "facts": facts, "ms": times, "failed": failed}


def origin(torch, compiler):
    from environment import describe_run

    versions = {**compiler.versions, "torch": torch.__version__, "python": platform.python_version()}
    return describe_run(torch.device(DEVICE), versions)


def listing(families, head_dims):
    """What would be measured, a line each."""
    return [
        f"{family} d {dim} {entry.kind}: {entry.label}: {entry.design.name}"
        for (family, dim), entries in work(families, head_dims).items()
        for entry in entries
    ]


def parse_arguments(argv):
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--family", nargs="+", choices=tuple(FAMILIES), default=list(FAMILIES), help="default: all")
    parser.add_argument("--head-dims", nargs="+", type=int, choices=sm80_designs.HEAD_DIMS, default=[64, 128])
    parser.add_argument("--out", type=Path, default=ROOT / "build" / "lab" / "ablate.json", help="the JSON result")
    parser.add_argument("--jobs", type=int, help="compilers at a time; default: what cores and memory carry")
    parser.add_argument("--min-ms", type=float, default=25.0, help="time per kernel and cell")
    parser.add_argument("--list", action="store_true", help="print what would be measured")
    parser.add_argument("--without", nargs="+", default=[], metavar="LABEL", help="leave out, like 'plain loads'")
    parser.add_argument("--compile-only", action="store_true", help="stop after compiling; needs no GPU")
    parser.add_argument("--from-json", type=Path, metavar="FILE", help="report an earlier result")
    return parser.parse_args(argv)


def run(arguments):
    if arguments.list:
        print("\n".join(listing(arguments.family, arguments.head_dims)))
        return
    if arguments.from_json:
        say(ablate_report.report(load(arguments.from_json)))
        return
    todo = work(arguments.family, arguments.head_dims, arguments.without)
    compiler = make_compiler()
    designs = [entry.design for entries in todo.values() for entry in entries]
    compiled = compiler.compile_all(designs, say, arguments.jobs)
    if arguments.compile_only:
        return
    import torch
    from timing import Budget, CudaTimer

    timer = CudaTimer(torch.device(DEVICE))
    budget = Budget(min_rounds=8, min_ms=arguments.min_ms, warmup_ms=3.0)
    progress = Progress(arguments.out, origin(torch, compiler), {"seqlens": SEQLENS, "families": {}})
    for (family, head_dim), entries in todo.items():
        parts = progress.result["families"].setdefault(family, {})
        if str(head_dim) not in parts:
            found = measure(torch, timer, progress, family, head_dim, entries, compiled, budget)
            parts[str(head_dim)] = found
            progress.write()
    progress.finish()
    say("\n" + ablate_report.report(progress.result))


def main(argv=None):
    try:
        run(parse_arguments(argv))
    except BuildError as error:
        sys.exit(f"error: {error}")


if __name__ == "__main__":
    main()
