"""What ablate.py and sweep.py have in common: compile designs, check them against float64, time them in turns.

A group of designs is timed on the benchmark's cells of its head dim. Its result is {"flops": {cell: ...}, "peer_ms":
{cell: ...}, "entries": [{kind, label, ms: {cell: ...}, failed}]}, with a cell like "causal 4096".
"""

from __future__ import annotations

import argparse
import contextlib
import itertools
import json
import platform
import sys
from functools import partial
from pathlib import Path

from kernel_library import BuildError, Compiler, forward
from results import ROOT

CHECKED = ((1, 1), (200, 200), (577, 577), (70, 333))  # (seqlen_q, seqlen_k)
DEVICE = "cuda"  # the CPU in a dry run
TORCH_DTYPES = {"bf16": "bfloat16", "fp16": "float16"}


def say(line):
    print(line, flush=True)


# ---- checks ----------------------------------------------------------------------------------------------------------


def refusal(design):
    """Why not to time a kernel; None if it is as exact as tests demand: twice the error of plain 16-bit attention."""
    import torch
    from shared import attention

    generator = torch.Generator(device=DEVICE).manual_seed(0)
    dtype = getattr(torch, TORCH_DTYPES[design.dtype])
    for (seqlen_q, seqlen_k), mask in itertools.product(CHECKED, design.masks):
        shapes = [(2, length, 3, design.head_dim) for length in (seqlen_q, seqlen_k, seqlen_k)]
        tensors, causal = (
            [torch.randn(x, device=DEVICE, generator=generator).to(dtype) for x in shapes],
            mask == "causal",
        )
        exact, plain = (attention(*tensors, causal=causal, dtype=x).out.double() for x in (torch.float64, dtype))
        out = torch.full_like(tensors[0], float("nan"))
        try:
            forward(design, *tensors, out, causal=causal)
        except (BuildError, RuntimeError) as error:
            return str(error)
        error, bound = (out.double() - exact).abs().max().item(), 2 * (plain - exact).abs().max().item() + 1e-5
        if not error <= bound:
            return f"s {seqlen_q}, {seqlen_k}, {mask}: error {error:.2e} (bound {bound:.2e})"
    return None


def failures(designs, compiled):
    """{design: why it is not timed}."""
    failed = {}
    for design in dict.fromkeys(designs):
        reason = refusal(design) if design in compiled else "does not compile"
        if reason is not None:
            failed[design] = reason
            say(f"LEFT OUT: {design.name}: {reason}")
    return failed


# ---- times -----------------------------------------------------------------------------------------------------------


PEER = "FlashAttention-2"  # as PyTorch has it


def time_cell(timer, designs, case, budget):
    """{design, or PEER: median ms} on one problem, in turns."""
    import torch
    from timing import interleave, summarize
    from torch.nn.attention import SDPBackend, sdpa_kernel

    shape, tensors = (case.batch, case.seqlen_q, case.nheads, case.head_dim), {}
    for dtype in dict.fromkeys(design.dtype for design in designs):
        tensors[dtype] = [torch.randn(shape, device=DEVICE).to(getattr(torch, TORCH_DTYPES[dtype])) for _ in "qkvo"]
    calls = {d: (contextlib.nullcontext, partial(forward, d, *tensors[d.dtype], causal=case.causal)) for d in designs}
    attention, q_k_v = torch.nn.functional.scaled_dot_product_attention, tensors[designs[0].dtype][:3]
    call = partial(attention, *(x.transpose(1, 2) for x in q_k_v), is_causal=case.causal)
    calls[PEER] = (partial(sdpa_kernel, SDPBackend.FLASH_ATTENTION), call)
    samples, _ = interleave(timer, calls, budget)
    return {design: summarize(values)["median"] for design, values in samples.items()}


def measure(entries, compiled, seqlens, timer, budget):
    """One group as plain data."""
    from shared import bench_cells

    designs = list(dict.fromkeys(entry.design for entry in entries))
    failed, flops, times = failures(designs, compiled), {}, {}
    for case in bench_cells((designs[0].head_dim,)):
        mask = "causal" if case.causal else "full"
        good = [design for design in designs if design not in failed and mask in design.masks]
        if case.seqlen_q not in seqlens or not good:
            continue
        cell = f"{mask} {case.seqlen_q}"
        for design, ms in time_cell(timer, good, case, budget).items():
            times.setdefault(design, {})[cell] = ms
        flops[cell] = float(case.flops)
    rows = [
        {"kind": e.kind, "label": e.label, "ms": times.get(e.design, {}), "failed": failed.get(e.design)}
        for e in entries
    ]
    return {"flops": flops, "peer_ms": times.get(PEER, {}), "entries": rows}


# ---- the programs ----------------------------------------------------------------------------------------------------


def parser(description, name, min_ms):
    """The options of both programs."""
    made = argparse.ArgumentParser(description=description, formatter_class=argparse.RawDescriptionHelpFormatter)
    made.add_argument("--out", type=Path, default=ROOT / "build" / "lab" / f"{name}.json", help="the JSON result")
    made.add_argument("--jobs", type=int, help="compilers at a time; default: what cores and memory carry")
    made.add_argument("--min-ms", type=float, default=min_ms, help="time per kernel and cell")
    made.add_argument("--list", action="store_true", help="print what would be measured")
    made.add_argument("--compile-only", action="store_true", help="stop after compiling; needs no GPU")
    return made


def run(options, todo, seqlens, store, report):
    """Measures {title: [Entry]}. store(result, title, found): adds a group to the result; report(result): the text that
    is printed."""
    if options.list:
        say("\n".join(f"{title}: {e.kind}: {e.label}: {e.design.name}" for title, es in todo.items() for e in es))
        return
    try:
        compiler = Compiler()
    except BuildError as error:
        sys.exit(f"error: {error}")
    compiled = compiler.compile_all([e.design for entries in todo.values() for e in entries], say, options.jobs)
    if options.compile_only:
        return
    import torch
    from environment import describe_run
    from timing import Budget, CudaTimer

    timer = CudaTimer(torch.device(DEVICE))
    budget = Budget(min_rounds=8, min_ms=options.min_ms, warmup_ms=3.0)
    versions = {**compiler.versions, "torch": torch.__version__, "python": platform.python_version()}
    result = {**describe_run(torch.device(DEVICE), versions), "seqlens": seqlens}
    options.out.parent.mkdir(parents=True, exist_ok=True)
    for title, entries in todo.items():
        say(title)
        store(result, title, measure(entries, compiled, seqlens, timer, budget))
        options.out.write_text(json.dumps(result, indent=1) + "\n", encoding="utf-8")
    say("\n" + report(result))
