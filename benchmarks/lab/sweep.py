"""Other tiles of the kernels in use: `python benchmarks/lab/sweep.py --out sweep.json`.

Both forwards and both backwards, every head dim in bf16 and one in fp16; the tiles are data, tile_designs.py. Compiles
what is missing on all cores (build/lab/kernels keeps it), compares each kernel with float64 attention, times those of a
group in turns, and writes the JSON after each group; then prints the tables and, where another tile won, its line for
csrc/flash_attn/plan/tiles.h. Otherwise as ablate.py; --without takes names of kernels.
"""

from __future__ import annotations

import argparse
import contextlib
import itertools
import sys
from functools import partial
from pathlib import Path

HERE = Path(__file__).resolve().parent
sys.path[:0] = [str(HERE), str(HERE.parent)]  # absent under PYTHONSAFEPATH

import ablate
import sweep_report
import tile_designs
from ablate import TORCH_DTYPES
from kernel_library import BuildError, backward, forward, make_compiler
from results import ROOT, load
from resumable import Ended, Progress, say

SEQLENS = (1024, 8192)
CHECKED = ((1, 1), (200, 200), (577, 577), (70, 333))  # (seqlen_q, seqlen_k)
BACKWARD_FLOPS = 2.5  # times the forward's


def gradients(torch, attention, tensors, dout, causal, dtype):
    """(out, lse, [dq, dk, dv]) by the definition, in a dtype."""
    leaves = [tensor.to(dtype).requires_grad_() for tensor in tensors]
    found = attention(*leaves, causal=causal, dtype=dtype)
    return found.out.detach(), found.lse.detach(), torch.autograd.grad(found.out, leaves, dout.to(dtype))


def backward_refusal(torch, attention, design):
    """Why not to time a backward; None if it is as exact as plain 16-bit attention, within twice its error."""
    generator = torch.Generator(device=ablate.DEVICE).manual_seed(0)
    dtype = getattr(torch, TORCH_DTYPES[design.dtype])
    for (seqlen_q, seqlen_k), mask in itertools.product(CHECKED, design.masks):
        causal = mask == "causal"
        shapes = [(2, length, 3, design.head_dim) for length in (seqlen_q, seqlen_k, seqlen_k, seqlen_q)]
        *tensors, dout = (torch.randn(shape, device=ablate.DEVICE, generator=generator).to(dtype) for shape in shapes)
        out, lse, exact = gradients(torch, attention, tensors, dout, causal, torch.float64)
        _, _, plain = gradients(torch, attention, tensors, dout, causal, dtype)
        found = [torch.full_like(tensor, float("nan")) for tensor in tensors]
        out, lse = out.to(dtype).contiguous(), lse.float().contiguous()
        try:
            backward(design, *tensors, out, lse, dout, *found, causal=causal)
        except (BuildError, RuntimeError) as error:
            return str(error)
        for name, own, right, other in zip(("dq", "dk", "dv"), found, exact, plain):
            error = (own.double() - right).abs().max().item()
            bound = 2 * (other.double() - right).abs().max().item() + 1e-5
            if not error <= bound:
                return f"s {seqlen_q}, {seqlen_k}, {mask}: {name}: error {error:.2e} (bound {bound:.2e})"
    return None


def refusal(torch, attention, design):
    check = backward_refusal if is_backward(design) else ablate.refusal
    return check(torch, attention, design)


def is_backward(design):
    return getattr(design, "is_backward", False)


def flash_attention(torch, q, k, v, causal):
    """O (b, s, h, d) and LSE (b, h, s) of torch's flash attention."""
    views = [tensor.transpose(1, 2) for tensor in (q, k, v)]
    out, lse, *_ = torch.ops.aten._scaled_dot_product_flash_attention(*views, 0.0, causal)
    return out.transpose(1, 2).contiguous(), lse.contiguous()


def make_call(torch, design, tensors, causal):
    """The function that is timed: the forward, or the backward with O and LSE of torch's flash attention."""
    q, k, v, dout = tensors
    if not is_backward(design):
        return partial(forward, design, q, k, v, torch.empty_like(q), causal=causal)
    out, lse = flash_attention(torch, q, k, v, causal)
    found = [torch.empty_like(tensor) for tensor in (q, k, v)]
    return partial(backward, design, q, k, v, out, lse, dout, *found, causal=causal)


def time_cell(torch, timer, designs, case, budget):
    """{design: median ms} on one problem, interleaved."""
    from timing import interleave, summarize

    shape = (case.batch, case.seqlen_q, case.nheads, case.head_dim)
    dtype = getattr(torch, TORCH_DTYPES[designs[0].dtype])
    tensors = [torch.randn(shape, device=ablate.DEVICE).to(dtype) for _ in range(4)]
    calls = {design: (contextlib.nullcontext, make_call(torch, design, tensors, case.causal)) for design in designs}
    samples, _ = interleave(timer, calls, budget)
    return {design: summarize(values)["median"] for design, values in samples.items()}


def measure(torch, timer, progress, group, entries, compiled, budget):
    """One group as plain data."""
    from shared import attention, bench_cells

    times, flops = {entry.design: {} for entry in entries}, {}
    failed = ablate.failures(times, compiled, progress, lambda design: refusal(torch, attention, design))
    good = [design for design in times if design not in failed]
    for case in bench_cells((group.head_dim,)):
        mask = "causal" if case.causal else "full"
        if case.seqlen_q not in SEQLENS or mask not in group.masks or not good:
            continue
        cell = f"{mask} {case.seqlen_q}"
        with contextlib.suppress(Ended), progress.watched(f"timing {len(good)} kernels, {group.title}, {cell}"):
            for design, ms in time_cell(torch, timer, good, case, budget).items():
                times[design][cell] = ms
            flops[cell] = case.flops * (BACKWARD_FLOPS if is_backward(good[0]) else 1.0)
    rows = [row(entry, compiled.get(entry.design), times[entry.design], failed.get(entry.design)) for entry in entries]
    return {**sizes(group), "flops": flops, "entries": rows}


def sizes(group):
    return {"kernel": group.kernel, "head_dim": group.head_dim, "dtype": group.dtype, "masks": list(group.masks)}


def row(entry, facts, times, failed):
    """What the JSON says of an entry."""
    told = {"kind": entry.kind, "label": entry.label, "line": tile_designs.table_line(entry.design)}
    return {**told, "facts": facts, "ms": times, "failed": failed}


def work(arguments):
    """{Group: [Entry]}, except those whose name is in --without."""
    found = tile_designs.groups(arguments.kernels, arguments.head_dims, arguments.dtypes)
    known = {entry.design.name for entries in found.values() for entry in entries}
    unknown = sorted(set(arguments.without) - known)
    if unknown:
        raise BuildError(f"--without: expected names of --list, got {', '.join(unknown)}")
    return {
        group: [entry for entry in entries if entry.design.name not in arguments.without]
        for group, entries in found.items()
    }


def parse_arguments(argv):
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    kernels = tile_designs.KERNELS
    parser.add_argument("--kernels", nargs="+", choices=kernels, default=list(kernels), help="default: all")
    parser.add_argument("--head-dims", nargs="+", type=int, help="default: all")
    parser.add_argument("--dtypes", nargs="+", choices=tuple(TORCH_DTYPES), default=list(TORCH_DTYPES))
    parser.add_argument("--out", type=Path, default=ROOT / "build" / "lab" / "sweep.json", help="the JSON result")
    parser.add_argument("--jobs", type=int, help="compilers at a time; default: what cores and memory carry")
    parser.add_argument("--min-ms", type=float, default=15.0, help="time per kernel and cell")
    parser.add_argument("--list", action="store_true", help="print what would be measured")
    parser.add_argument("--without", nargs="+", default=[], metavar="NAME", help="leave out, by the names of --list")
    parser.add_argument("--compile-only", action="store_true", help="stop after compiling; needs no GPU")
    parser.add_argument("--from-json", type=Path, metavar="FILE", help="report an earlier result")
    return parser.parse_args(argv)


def run(arguments):
    if arguments.from_json:
        say("\n".join(sweep_report.report(load(arguments.from_json))))
        return
    todo = work(arguments)
    if arguments.list:
        say("\n".join(f"{group.title}: {entry.kind}: {entry.label}: {entry.design.name}"
                      for group, entries in todo.items() for entry in entries))  # fmt: skip
        return
    compiler = make_compiler()
    designs = [entry.design for entries in todo.values() for entry in entries]
    compiled = compiler.compile_all(designs, say, arguments.jobs)
    if arguments.compile_only:
        return
    import torch
    from timing import Budget, CudaTimer

    timer = CudaTimer(torch.device(ablate.DEVICE))
    budget = Budget(min_rounds=8, min_ms=arguments.min_ms, warmup_ms=2.0)
    progress = Progress(arguments.out, ablate.origin(torch, compiler), {"seqlens": SEQLENS, "groups": []})
    done = [{key: found[key] for key in sizes(next(iter(todo)))} for found in progress.result["groups"]]
    for group, entries in todo.items():
        if sizes(group) not in done:
            found = measure(torch, timer, progress, group, entries, compiled, budget)
            progress.result["groups"].append(found)
            progress.write()
    progress.finish()
    say("\n".join(sweep_report.report(progress.result)))


def main(argv=None):
    try:
        run(parse_arguments(argv))
    except BuildError as error:
        sys.exit(f"error: {error}")


if __name__ == "__main__":
    main()
