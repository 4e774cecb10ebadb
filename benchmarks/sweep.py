"""Compiles and times tile configurations of the forward: `python benchmarks/sweep.py --head-dims 64,128 --out DIR`.

The configurations are data (sweep_configs.py); the tile in use comes from csrc/flash_attn/plan/tiles.h. Compiles all
on all cores; then, for each head dim, compares each with float64 attention, times them interleaved on the cells of the
head dim, prints scores and the effect of each choice, writes DIR/sweep_d64.json, and with --write-docs puts the table
into docs/tuning/sweeps.md.
Needs nvcc, the CUTLASS headers (CUTLASS_PATH or the pip package), torch and a GPU; --compile-only needs no GPU.
"""

from __future__ import annotations

import argparse
import contextlib
import dataclasses
import itertools
import json
import sys
from functools import partial
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
sys.path[:0] = [str(ROOT / "benchmarks"), str(ROOT / "tests")]

import sweep_report
from sweep_build import BuildError, Kernel, compile_all, table_tile
from sweep_configs import ALTERNATIVES

SWEEPS = ROOT / "docs" / "tuning" / "sweeps.md"
SEQLENS = (512, 1024, 4096, 16384)
CHECKED_SEQLENS = (1, 200, 577)


def say(line):
    print(line, flush=True)


def tiles_of(head_dim, only):
    """The tile of plan/tiles.h, then the alternatives, or those of them whose names are in `only`."""
    others = [tile for tile in ALTERNATIVES[head_dim] if not only or tile.name in only]
    return list(dict.fromkeys([table_tile(head_dim), *others]))


def outputs(torch, q):
    batch, seqlen, heads, _ = q.shape
    return torch.empty_like(q), torch.empty(batch, heads, seqlen, device=q.device, dtype=torch.float32)


def refusal(torch, attention, kernel, head_dim):
    """Why not to time a kernel, None if it is as exact as tests demand: twice the error of plain bf16 attention."""
    generator = torch.Generator(device="cuda").manual_seed(0)
    stream = torch.cuda.current_stream().cuda_stream
    for seqlen, causal in itertools.product(CHECKED_SEQLENS, (False, True)):
        shape = (2, seqlen, 3, head_dim)
        q, k, v = (torch.randn(shape, device="cuda", dtype=torch.bfloat16, generator=generator) for _ in range(3))
        out, lse = outputs(torch, q)
        status = kernel(q, k, v, out, lse, causal, stream)
        if status != 0:
            return f"CUDA error {status}"
        exact = attention(q, k, v, causal=causal)
        plain = attention(q, k, v, causal=causal, dtype=torch.bfloat16)
        error = (out.double() - exact.out).abs().max().item()
        bound = 2 * (plain.out.double() - exact.out).abs().max().item() + 1e-5
        lse_error = (lse.double() - exact.lse).abs().max().item()
        if not (error <= bound and lse_error <= 1e-3):
            return f"s {seqlen}, causal {causal}: error {error:.2e} (bound {bound:.2e}), LSE error {lse_error:.2e}"
    return None


def time_cells(torch, kernels, head_dim, budget):
    """({cell: flops}, {tile: {cell: median ms}}) of kernels {tile: Kernel}, interleaved."""
    from cases import bench_cells
    from timing import CudaTimer, interleave, summarize

    timer = CudaTimer(torch.device("cuda"))
    flops, medians = {}, {tile: {} for tile in kernels}
    for case in bench_cells((head_dim,)):
        if case.seqlen_q not in SEQLENS:
            continue
        cell = f"{'causal' if case.causal else 'full'} {case.seqlen_q}"
        shape = (case.batch, case.seqlen_q, case.nheads, case.head_dim)
        q, k, v = (torch.randn(shape, device="cuda", dtype=torch.bfloat16) for _ in range(3))
        out, lse = outputs(torch, q)
        stream = torch.cuda.current_stream().cuda_stream
        arguments = (q, k, v, out, lse, case.causal, stream)
        calls = {tile: (contextlib.nullcontext, partial(kernel, *arguments)) for tile, kernel in kernels.items()}
        samples, _ = interleave(timer, calls, budget)
        flops[cell] = case.flops
        for tile, values in samples.items():
            medians[tile][cell] = summarize(values)["median"]
        say(f"d {head_dim} {cell}: best {case.flops / min(m[cell] for m in medians.values()) / 1e9:.0f} TFLOPS")
    return flops, medians


def measure(torch, head_dim, compiled, budget):
    """The result of one head dim as plain data. compiled: [Compiled], the tile in use among them."""
    from environment import git_state
    from reference import attention

    kernels = {}
    for entry in compiled:
        kernel = Kernel(entry)
        reason = refusal(torch, attention, kernel, head_dim)
        if reason is None:
            kernels[entry.tile] = kernel
        else:
            say(f"LEFT OUT: d {head_dim}, {entry.tile}: {reason}")
    if table_tile(head_dim) not in kernels:
        raise BuildError(f"d {head_dim}: the tile in use failed")
    flops, medians = time_cells(torch, kernels, head_dim, budget)
    commit, dirty = git_state()
    return {
        "head_dim": head_dim,
        "device": torch.cuda.get_device_name(),
        "commit": (commit or "unknown")[:12] + ("-dirty" if dirty else ""),
        "seqlens": SEQLENS,
        "table_tile": dataclasses.asdict(table_tile(head_dim)),
        "flops": flops,
        "alternatives": [
            {
                "tile": dataclasses.asdict(entry.tile),
                "registers": entry.registers,
                "spills": entry.spills,
                "ms": medians[entry.tile],
            }
            for entry in compiled
            if entry.tile in kernels
        ],
    }


def report(result, folder, write_docs):
    head_dim = result["head_dim"]
    (folder / f"sweep_d{head_dim}.json").write_text(json.dumps(result, indent=1), encoding="utf-8")
    say("\n" + sweep_report.section(result))
    say(f"\nplan/tiles.h: {sweep_report.table_line(result)}")
    if write_docs:
        text = SWEEPS.read_text(encoding="utf-8")
        SWEEPS.write_text(sweep_report.written(text, result), encoding="utf-8")


def parse_arguments(argv):
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--head-dims", default="64,128,256", help="like 64,128")
    parser.add_argument("--out", type=Path, default=ROOT / "build" / "sweep", help="folder of libraries and JSON")
    parser.add_argument("--arch", help="like 90; default: of the visible GPU")
    parser.add_argument("--only", default="", help="names of alternatives, like m64_n64_w4_b3; default: all")
    parser.add_argument("--compile-only", action="store_true", help="stop after compiling; needs no GPU")
    parser.add_argument("--write-docs", action="store_true", help="put the tables into docs/tuning/sweeps.md")
    parser.add_argument("--min-ms", type=float, default=40.0, help="time per alternative and cell")
    parser.add_argument("--from-json", type=Path, nargs="*", help="report earlier results instead of measuring")
    return parser.parse_args(argv)


def default_arch():
    from machine import visible_gpu_archs

    visible = visible_gpu_archs()
    if not visible:
        raise BuildError("no GPU: state what to compile for with --arch")
    return visible[0]


def run(arguments):
    if arguments.from_json:
        for path in arguments.from_json:
            report(json.loads(path.read_text(encoding="utf-8")), path.parent, arguments.write_docs)
        return
    head_dims = [int(word) for word in arguments.head_dims.replace(",", " ").split()]
    only = set(arguments.only.replace(",", " ").split())
    work = [(head_dim, tile) for head_dim in head_dims for tile in tiles_of(head_dim, only)]
    arch = arguments.arch or default_arch()
    compiled = compile_all(work, arch, arguments.out, say)
    if arguments.compile_only:
        return
    import torch
    from timing import Budget

    budget = Budget(min_rounds=10, min_ms=arguments.min_ms, warmup_ms=5.0)
    for head_dim in head_dims:
        entries = [entry for (dim, _), entry in compiled.items() if dim == head_dim]
        report(measure(torch, head_dim, entries, budget), arguments.out, arguments.write_docs)


def main(argv=None):
    try:
        run(parse_arguments(argv))
    except BuildError as error:
        sys.exit(f"error: {error}")


if __name__ == "__main__":
    main()
