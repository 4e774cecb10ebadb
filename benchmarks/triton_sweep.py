"""Times candidate tiles of the Triton comparator on this GPU and prints them, fastest first.

python benchmarks/triton_sweep.py [--head-dims 64 128] [--kernels forward dkdv dq] [--jobs 8] [--out RESULT.json]

Every kernel is timed alone, with batch · seqlen = 16384 and heads · head dim = 2048, bf16, full and causal. The score
of a tile is the geometric mean of its speed relative to the fastest tile of each column. Candidates are compiled
beforehand, in as many processes as --jobs says.
"""

from __future__ import annotations

import argparse
import itertools
import json
import multiprocessing
import os
import sys
from pathlib import Path
from statistics import geometric_mean

sys.path.insert(0, str(Path(__file__).resolve().parent))  # absent under PYTHONSAFEPATH

import torch
from triton_backward import backward_launches, row_terms
from triton_common import milliseconds
from triton_forward import forward_launch
from triton_variants import Tile

SEQLENS = (1024, 8192)  # one of each length class that the comparator tunes for
MASKS = (False, True)
COLUMNS = tuple(itertools.product(MASKS, SEQLENS))

# Queries, keys, warps and stages. Tiles that spill much or exceed the shared memory of an H200 are not listed.
CANDIDATES = {
    "forward": {
        64: ((128, 128, 8, 2), (128, 128, 8, 3), (128, 64, 8, 3), (128, 64, 4, 3), (64, 128, 4, 2), (64, 64, 4, 3)),
        128: ((128, 128, 8, 2), (128, 64, 8, 3), (128, 64, 8, 2), (64, 64, 4, 3), (64, 128, 4, 2)),
        256: ((128, 64, 8, 2), (128, 32, 8, 3), (128, 32, 8, 2), (64, 64, 4, 2), (64, 32, 4, 2)),
    },
    "dkdv": {
        64: (
            (64, 128, 8, 2), (64, 128, 8, 3), (128, 128, 8, 2), (64, 64, 4, 2), (64, 64, 4, 3), (32, 128, 4, 3),
            (128, 64, 4, 2), (32, 64, 4, 3), (64, 256, 8, 2), (32, 128, 8, 3),
        ),
        128: (
            (64, 128, 8, 2), (64, 64, 4, 2), (32, 128, 8, 2), (32, 128, 8, 3), (32, 64, 4, 2), (32, 64, 4, 3),
            (128, 64, 8, 2), (64, 64, 8, 2),
        ),
        256: ((32, 64, 8, 2), (32, 64, 8, 3), (64, 64, 8, 2), (16, 64, 8, 3), (64, 32, 8, 2), (32, 32, 4, 2)),
    },
    "dq": {
        64: (
            (128, 128, 8, 2), (128, 128, 8, 3), (128, 64, 8, 2), (128, 64, 8, 3), (64, 128, 4, 2), (64, 64, 4, 2),
            (64, 64, 4, 3), (128, 64, 4, 3),
        ),
        128: (
            (128, 128, 8, 2), (128, 64, 8, 2), (128, 64, 8, 3), (128, 32, 8, 3), (64, 128, 4, 2), (64, 64, 4, 2),
            (64, 32, 4, 3), (64, 64, 4, 3),
        ),
        256: ((64, 64, 8, 2), (128, 32, 8, 2), (64, 32, 4, 2), (64, 32, 8, 2), (64, 32, 8, 3), (128, 32, 8, 3)),
    },
}  # fmt: skip


def make_launch(kernel, head_dim, causal, seqlen, run_forward=True):
    """A launch of the kernel on fresh tensors; without run_forward what the backward gets from it is undefined."""
    shape = (16384 // seqlen, seqlen, 2048 // head_dim, head_dim)
    q, k, v, out, dout = torch.randn((5, *shape), dtype=torch.bfloat16, device="cuda")
    lse = torch.empty(shape[0], shape[2], seqlen, dtype=torch.float32, device="cuda")
    forward = forward_launch(q, k, v, out, lse, causal, head_dim**-0.5, True)
    if kernel == "forward":
        return forward
    if run_forward:
        forward.run(Tile(*CANDIDATES["forward"][head_dim][0]))
    terms = row_terms(out, dout, lse)
    gradients = [torch.empty_like(x) for x in (q, k, v)]
    launches = backward_launches(q, k, v, dout, terms, gradients, causal, head_dim**-0.5, True)
    return launches[("dkdv", "dq").index(kernel)]


def compile_tile(job):
    """Compiles one candidate into Triton's cache on disk; what does not compile is left out when it is timed."""
    kernel, head_dim, causal, tile = job
    launch = make_launch(kernel, head_dim, causal, SEQLENS[0], run_forward=False)
    tile = Tile(*tile)
    arguments = (*launch.described(tile), *launch.arguments)
    try:
        compiled = launch.kernel.warmup(*arguments, grid=launch.grid(tile), **launch.options(tile))
        compiled._init_handles()
        return f"{compiled.n_regs} registers, {compiled.n_spills} spilled, {compiled.metadata.shared} bytes shared"
    except Exception as error:  # the compiler raises types of its own; one candidate must not end the sweep
        return str(error).splitlines()[0][:120]


def time_column(kernel, head_dim, causal, seqlen, compiled):
    launch = make_launch(kernel, head_dim, causal, seqlen)
    return milliseconds(launch, [tile for tile in compiled if " registers" in compiled[tile]])


def sweep(kernel, head_dim, resources):
    """One entry per candidate: its resources, its ms per column and its score, the best first."""
    tiles = {Tile(*t): resources[kernel, head_dim, True, t] for t in CANDIDATES[kernel][head_dim]}
    columns = {(mask, s): time_column(kernel, head_dim, mask, s, tiles) for mask, s in COLUMNS}
    best = {column: min(times.values()) for column, times in columns.items()}
    entries = []
    for tile, resource in tiles.items():
        times = [columns[column].get(tile, float("inf")) for column in COLUMNS]
        speeds = [best[column] / ms for column, ms in zip(COLUMNS, times)]
        score = geometric_mean(speeds) if min(speeds) > 0 else 0.0
        entries.append({"tile": list(tile), "resources": resource, "ms": times, "score": score})
    return sorted(entries, key=lambda entry: -entry["score"])


def print_table(kernel, head_dim, entries):
    names = [f"{'causal' if mask else 'full'} {s}" for mask, s in COLUMNS]
    print(f"{kernel}, head dim {head_dim}: ms per launch")
    print(f"{'tile':<18} {'score':>6} " + " ".join(f"{name:>12}" for name in names))
    for entry in entries:
        times = " ".join(f"{ms:12.4f}" for ms in entry["ms"])
        print(f"{str(tuple(entry['tile'])):<18} {entry['score']:6.3f} {times}  {entry['resources']}", flush=True)


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--head-dims", nargs="+", type=int, default=[64, 128, 256], choices=(64, 128, 256))
    parser.add_argument("--kernels", nargs="+", default=list(CANDIDATES), choices=list(CANDIDATES))
    parser.add_argument("--jobs", type=int, default=max(1, min(12, (os.cpu_count() or 2) - 2)))
    parser.add_argument("--out", type=Path, help="JSON of the figures")
    options = parser.parse_args()
    chosen = list(itertools.product(options.kernels, options.head_dims))
    jobs = [(kernel, d, mask, tile) for kernel, d in chosen for mask in MASKS for tile in CANDIDATES[kernel][d]]
    with multiprocessing.get_context("spawn").Pool(options.jobs) as pool:
        resources = dict(zip(jobs, pool.map(compile_tile, jobs, chunksize=1)))
    found = {}
    for kernel, head_dim in chosen:
        found[f"{kernel}_d{head_dim}"] = sweep(kernel, head_dim, resources)
        print_table(kernel, head_dim, found[f"{kernel}_d{head_dim}"])
    if options.out:
        options.out.write_text(json.dumps({"gpu": torch.cuda.get_device_name(), "columns": COLUMNS, **found}) + "\n")


if __name__ == "__main__":
    main()
