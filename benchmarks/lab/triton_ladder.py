"""The Triton ladder: the comparator step by step from its textbook form, each step in turns with SDPA and ours.

python benchmarks/lab/triton_ladder.py --out RESULT.json [--budget 60]

The steps are RUNGS of triton_variants.py: four that add up, and one that was tried and not kept. All run the kernels of
triton_forward.py and triton_backward.py. First every kernel is compiled, in as many processes as --jobs says; a tile
that does not compile is noted and not tried again. Then all take turns, with batch · seqlen = 16384 and
heads · head dim = 2048, each row checked against float64 (benchmarks/run.py says how). At last, with the tiles tuned
for the rows, each rung is checked on a small problem, dK and dV included. A transposed copy is part of the call that
needs it; tiles are tuned before the clock runs.
"""

from __future__ import annotations

import argparse
import itertools
import json
import os
import sys
from concurrent.futures import ProcessPoolExecutor
from multiprocessing import get_context
from pathlib import Path

HERE = Path(__file__).resolve().parent
sys.path[:0] = [str(HERE), str(HERE.parent)]  # absent under PYTHONSAFEPATH

import triton_report
from triton_variants import MODES, RUNGS

HEAD_DIMS = (64, 128)
MASKS = (False, True)
SEQLENS = (1024, 2048, 4096, 8192, 16384)
PEERS = ("sdpa_flash", "sdpa_cudnn")
CHECKED = (1, 256, 256, 16, 16)  # multiples of 16: what has been compiled for the rows
KERNELS = ("forward", "dkdv", "dq")
MAX_MS = 1200.0  # of one row, all implementations together


def make_rows(head_dims, seqlens, device, dtype):
    """The rows of one mode; tiny ones on the CPU."""
    from rows import Row
    from shared import Case

    def shape(s, d):
        return (16384 // s, s, s, 2048 // d, 2048 // d, d) if device.type == "cuda" else (1, s // 32, s // 32, 1, 1, d)

    cells = itertools.product(head_dims, MASKS, seqlens)
    return [Row("cells", Case(*shape(s, d), dtype, causal=causal)) for d, causal, s in cells]


def implementation(rung, device_type):
    """The rung as the benchmarks take it; the CPU runs it by Triton's interpreter."""
    import implementations as known
    import torch

    def build(row, inputs):
        from triton_attention import triton_attention

        q, k, v, causal = inputs.q, inputs.k, inputs.v, row.case.causal
        return lambda: triton_attention(q, k, v, causal=causal, variant=rung.variant)[0]

    def limits(row, device, mode):
        if mode not in rung.modes:
            return f"as {rung.over} in this mode" if rung.kept else "not tried in this mode"
        if rung.variant.use_tma and device == "cuda" and torch.cuda.get_device_capability()[0] < 9:
            return "tensor descriptors need sm_90"
        return None

    offers = {known.BACKWARD, known.GQA, known.RECTANGULAR} | ({known.CPU} if device_type == "cpu" else set())
    return known.Implementation(rung.name, f"Triton: {rung.adds}", build, frozenset(offers), limits, package="triton")


def make_launches(variant, head_dim, causal, device, dtype):
    """[(launch, its tiles)] of the three kernels, on small tensors that hold nothing."""
    import torch
    from triton_attention import candidates
    from triton_backward import backward_launches
    from triton_forward import forward_launch

    heads = 2048 // head_dim
    q, k, v, out, dout = torch.empty((5, 1, 512, heads, head_dim), dtype=dtype, device=device)
    lse = torch.empty((1, heads, 512), dtype=torch.float32, device=device)
    keys = k.permute(0, 2, 3, 1).contiguous() if variant.transposed_k else k
    numbers = (causal, head_dim**-0.5, bool(variant.use_tma))
    terms = (lse, lse) if variant.shared_delta else (lse, out)
    forward = forward_launch(q, keys, v, out, lse, *numbers, **variant.forward_constants)
    backward = backward_launches(q, k, v, dout, terms, (q, k, v), *numbers, **variant.backward_constants)
    return list(zip((forward, *backward), candidates(variant, forward.block_d)))


def compilations(head_dims):
    """{(kernel key, tile): (index of the rung, head dim, causal, index of the kernel, tile)}: what has to be compiled
    for all rungs, each once; the backward of a rung that is no part of it in order to be told of."""
    import torch

    found = {}
    for index, head_dim, causal in itertools.product(range(len(RUNGS)), head_dims, MASKS):
        for kernel, (launch, tiles) in enumerate(
            make_launches(RUNGS[index].variant, head_dim, causal, "cpu", torch.bfloat16)
        ):
            for tile in tiles:
                found.setdefault((launch.kernel_key, tile), (index, head_dim, causal, kernel, tile))
    return found


def compile_kernel(job):
    """Compiles into Triton's cache on disk: {"registers", "spills", "shared"} or {"error"}."""
    import torch

    index, head_dim, causal, kernel, tile = job
    launch, _ = make_launches(RUNGS[index].variant, head_dim, causal, "cuda", torch.bfloat16)[kernel]
    arguments = (*launch.described(tile), *launch.arguments)
    try:
        compiled = launch.kernel.warmup(*arguments, grid=launch.grid(tile), **launch.options(tile))
        compiled._init_handles()
    except Exception as error:  # the compiler raises types of its own; one kernel must not end the run
        return {"error": (str(error).splitlines() or [type(error).__name__])[0][:120]}
    return {"registers": compiled.n_regs, "spills": compiled.n_spills, "shared": compiled.metadata.shared}


def compile_all(head_dims, count):
    """Entries of the result: every kernel with its resources or why it does not compile; the latter are not tried."""
    import triton_common

    wanted, entries = compilations(head_dims), []
    with ProcessPoolExecutor(count, mp_context=get_context("spawn")) as pool:
        compiled = [*pool.map(compile_kernel, wanted.values())]
    for ((key, tile), job), found in zip(wanted.items(), compiled):
        if "error" in found:
            triton_common.not_compiled.add((key, tile))
        index, head_dim, causal, kernel, _ = job
        cell = {"kernel": KERNELS[kernel], "head_dim": head_dim, "causal": causal, "tile": list(tile)}
        entries.append({"rung": RUNGS[index].name, **cell, **found})
    return entries


def check(rungs, head_dims, device, dtype):
    """({rung: {problem: relative error}}, {rung: {problem: why there is none}}) of small problems, gradients included
    but for rungs of the forward."""
    from implementations import make_inputs
    from measure import NotMeasured, probe
    from rows import Row
    from shared import Case

    errors, failures = {}, {}
    shape = CHECKED if device.type == "cuda" else (1, 40, 40, 2, 1)
    for rung in rungs:
        own = implementation(rung, device.type)
        for head_dim, causal in itertools.product(head_dims, MASKS):
            row = Row("cells", Case(*shape, head_dim, dtype, causal=causal))
            mode = rung.modes[-1]
            inputs = make_inputs(row, device, requires_grad=mode != "fwd")
            try:
                _, facts = probe(own, row, inputs, mode, device)
                errors.setdefault(rung.name, {})[f"{row.label} {mode}"] = facts["relative_error"]
            except NotMeasured as reason:
                failures.setdefault(rung.name, {})[f"{row.label} {mode}"] = str(reason)
    return errors, failures


def chosen_tiles():
    """What was tuned, as entries of the result."""
    from triton_common import tuned_tiles

    entries = []
    for (key, tiles), tile in tuned_tiles.items():
        kernel, block_d, causal, use_tma, constants, *_, long = key
        cell = {"kernel": kernel.removesuffix("_kernel"), "head_dim": block_d, "causal": causal, "long": long}
        how = {"use_tma": use_tma, "constants": dict(constants), "candidates": len(tiles)}
        entries.append({**cell, **how, "tile": list(tile)})
    return entries


def write(path, result):
    path.write_text(json.dumps(result, indent=1) + "\n", encoding="utf-8")


def measure_all(options, device, result):
    """Fills the result and writes it after each row; returns whether nothing failed that should work."""
    from implementations import choose
    from measure import measure
    from shared import row_bar
    from timing import Allowance, Budget, make_timers

    cuda = device.type == "cuda"
    rows = make_rows(options.head_dims, options.seqlens, device, result["dtype"])
    peers = choose(PEERS if cuda else PEERS[:1])
    everyone = [implementation(rung, device.type) for rung in RUNGS] + peers
    result["implementations"] = {item.name: item.title for item in everyone}
    budget = Budget(12, 40.0, 10.0, MAX_MS) if cuda else Budget(1, 0.0, 0.0)
    timers, work = make_timers(device), list(itertools.product(MODES, rows))
    allowance = Allowance(options.budget, len(work))
    with row_bar(len(work)) as done:
        for index, (mode, row) in enumerate(work):
            entry = measure(row, mode, everyone, timers, device, allowance.budget(budget, index))
            result["rows"].append(entry)
            write(options.out, {**result, "tiles": chosen_tiles(), "spent_s": round(allowance.spent(), 1)})
            figures = "  ".join(f"{name} {found['tflops']:.3g}" for name, found in entry["results"].items())
            done(f"{entry['label']} {mode}, TFLOPS: {figures}")
    result["checks"], result["not_checked"] = check(RUNGS, options.head_dims, device, result["dtype"])
    result["tiles"], result["spent_s"] = chosen_tiles(), round(allowance.spent(), 1)
    write(options.out, result)
    kept = {rung.name for rung in RUNGS if rung.kept} | {item.name for item in peers}
    failed = {name for entry in result["rows"] for name in entry["failed"]} | set(result["not_checked"])
    return not kept & failed


def measure_ladder(options):
    """Compiles, checks and measures; returns (result, whether nothing failed that should work)."""
    device_name = options.device
    if device_name == "cpu":
        os.environ["TRITON_INTERPRET"] = "1"  # read when Triton is imported
    import torch
    from environment import describe_origin

    device = torch.device(device_name)
    if device.type == "cuda":
        device = torch.device("cuda", torch.cuda.current_device())
    options.out.parent.mkdir(parents=True, exist_ok=True)
    result = {
        "schema": 1,
        **describe_origin(device),
        "rungs": triton_report.described_rungs(),
        "compiled": [],
        "rows": [],
    }
    result["dtype"] = "bfloat16" if device.type == "cuda" else "float16"  # the interpreter has no bfloat16
    if device.type == "cuda":
        result["compiled"] = compile_all(options.head_dims, options.jobs)
    return result, measure_all(options, device, result)


def parse(arguments):
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, required=True, help="the JSON result")
    parser.add_argument("--budget", type=float, default=60.0, help="seconds of the rows (60)")
    parser.add_argument("--jobs", type=int, default=max(1, min(16, (os.cpu_count() or 2) - 1)), help="processes")
    parser.add_argument("--device", default="cuda", choices=("cuda", "cpu"), help="cpu: Triton's interpreter, tiny")
    parser.add_argument("--head-dims", nargs="+", type=int, default=list(HEAD_DIMS), choices=HEAD_DIMS)
    parser.add_argument("--seqlens", nargs="+", type=int, default=list(SEQLENS), choices=SEQLENS)
    return parser.parse_args(arguments)


def main(arguments=None):
    options = parse(arguments)
    result, good = measure_ladder(options)
    print("\n".join([f"{options.out} ({result['spent_s']} s)", *triton_report.measured_lines(result)]))
    return 0 if good else 1


if __name__ == "__main__":
    sys.exit(main())
