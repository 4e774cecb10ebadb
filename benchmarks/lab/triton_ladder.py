"""The Triton ladder: the comparator step by step from its textbook form, each step in turns with SDPA and ours.

python benchmarks/lab/triton_ladder.py --out RESULT.json [--budget 60] [--b4h8]
python benchmarks/lab/triton_ladder.py --device cpu --out RESULT.json     tiny, by Triton's interpreter, without a GPU

The steps are RUNGS of triton_variants.py, which add up. All run the kernels of triton_forward.py and
triton_backward.py. First every kernel is compiled, in as many processes as --jobs says; a tile
that does not compile is told and not tried again. Then all take turns, with batch · seqlen = 16384 and
heads · head dim = 2048, each row checked against float64 (benchmarks/run.py says how). Tiles are
tuned before the clock runs. With --b4h8 rows have batch 4 and 8 heads, one length is longer, and attention in plain
operations takes part until its scores need more memory than there is.
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
from markdown_tables import mask
from triton_variants import MODES, RUNGS

HEAD_DIMS = (64, 128)
MASKS = (False, True)
SEQLENS, LONGEST = (1024, 2048, 4096, 8192, 16384), 32768
PEERS, NAIVE = ("sdpa_flash", "sdpa_cudnn"), "naive"
KERNELS = ("forward", "dkdv", "dq")
MAX_MS = 1200.0  # of one row, all implementations together


def make_rows(head_dims, seqlens, device, dtype, b4h8=False):
    """The rows of one mode; tiny ones on the CPU."""
    from rows import Row
    from shared import Case

    def shape(s, d):
        if device.type != "cuda":
            return (1, s // 32, s // 32, 1, 1, d)
        return (4, s, s, 8, 8, d) if b4h8 else (max(1, 16384 // s), s, s, 2048 // d, 2048 // d, d)

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
            return f"as {rung.over} in this mode"
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
    numbers = (causal, head_dim**-0.5, bool(variant.use_tma))
    terms = (lse, lse) if variant.shared_delta else (lse, out)
    forward = forward_launch(q, k, v, out, lse, *numbers)
    backward = backward_launches(q, k, v, dout, terms, (q, k, v), *numbers, **variant.backward_constants)
    return list(zip((forward, *backward), candidates(variant, forward.block_d)))


def compilations(head_dims):
    """{(kernel key, tile): (index of the rung, head dim, causal, index of the kernel, tile)}: what has to be compiled
    for all rungs, each once."""
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
    """Compiles into Triton's cache on disk; returns why it failed, or None."""
    import torch
    from measure import first_line

    index, head_dim, causal, kernel, tile = job
    launch, _ = make_launches(RUNGS[index].variant, head_dim, causal, "cuda", torch.bfloat16)[kernel]
    arguments = (*launch.described(tile), *launch.arguments)
    try:
        launch.kernel.warmup(*arguments, grid=launch.grid(tile), **launch.options(tile))._init_handles()
    except Exception as error:  # Triton has its own error types; one kernel must not end the run
        return first_line(error)


def compile_all(head_dims, count):
    """Compiles every kernel; tells of those that do not compile, which are not tried."""
    import triton_common

    wanted = compilations(head_dims)
    with ProcessPoolExecutor(count, mp_context=get_context("spawn")) as pool:
        reasons = [*pool.map(compile_kernel, wanted.values())]
    for ((key, tile), (index, head_dim, causal, kernel, _)), reason in zip(wanted.items(), reasons):
        if reason is not None:
            triton_common.not_compiled.add((key, tile))
            print(f"{RUNGS[index].name}: {KERNELS[kernel]} d {head_dim}, {mask(causal)}, {tile}: {reason}")


def measure_all(options, device, result):
    """Fills the result and writes it after each row; returns whether nothing failed that should work."""
    from implementations import choose
    from measure import measure
    from shared import row_teller
    from timing import Allowance, Budget, make_timers

    cuda = device.type == "cuda"
    rows = make_rows(options.head_dims, options.seqlens, device, result["dtype"], options.b4h8)
    peers = choose((PEERS if cuda else PEERS[:1]) + (NAIVE,) * options.b4h8)
    everyone = [implementation(rung, device.type) for rung in RUNGS] + peers
    result["implementations"] = {item.name: item.title for item in everyone}
    budget = Budget(12, 40.0, 10.0, MAX_MS) if cuda else Budget(1, 0.0, 0.0)
    timers, work = make_timers(device), list(itertools.product(MODES, rows))
    allowance = Allowance(options.budget, len(work))
    done = row_teller(len(work))
    for index, (mode, row) in enumerate(work):
        entry = measure(row, mode, everyone, timers, device, allowance.budget(budget, index))
        result["rows"].append(entry)
        result["spent_s"] = round(allowance.spent(), 1)
        options.out.write_text(json.dumps(result, indent=1) + "\n", encoding="utf-8")
        figures = "  ".join(f"{name} {found['tflops']:.3g}" for name, found in entry["results"].items())
        done(f"{entry['label']} {mode}, TFLOPS: {figures}")
    return not any(entry["failed"] for entry in result["rows"])


def measure_ladder(options):
    """Compiles, checks and measures; returns (result, whether nothing failed that should work)."""
    device_name = options.device
    if device_name == "cpu":
        os.environ["TRITON_INTERPRET"] = "1"  # read when Triton is imported
    import torch
    import triton_common
    from environment import describe_origin

    device = torch.device(device_name)
    if device.type == "cpu":
        triton_common.patch_interpreter()
    if device.type == "cuda":
        device = torch.device("cuda", torch.cuda.current_device())
    options.out.parent.mkdir(parents=True, exist_ok=True)
    dtype = "bfloat16" if device.type == "cuda" else "float16"  # the interpreter has no bfloat16
    result = {"schema": 1, **describe_origin(device), "dtype": dtype, "rows": []}
    if device.type == "cuda":
        compile_all(options.head_dims, options.jobs)
    return result, measure_all(options, device, result)


def parse(arguments):
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, required=True, help="the JSON result")
    parser.add_argument("--budget", type=float, default=60.0, help="seconds of the rows (60)")
    parser.add_argument("--jobs", type=int, default=max(1, min(16, (os.cpu_count() or 2) - 1)), help="processes")
    parser.add_argument("--device", default="cuda", choices=("cuda", "cpu"), help="cpu: Triton's interpreter, tiny")
    parser.add_argument("--b4h8", action="store_true", help="batch 4 and 8 heads instead of equal work; with `naive`")
    parser.add_argument("--head-dims", nargs="+", type=int, default=list(HEAD_DIMS), choices=HEAD_DIMS)
    parser.add_argument("--seqlens", nargs="+", type=int, choices=(*SEQLENS, LONGEST), help="default: all")
    options = parser.parse_args(arguments)
    options.seqlens = options.seqlens or (*SEQLENS, *(LONGEST,) * options.b4h8)
    return options


def main(arguments=None):
    options = parse(arguments)
    result, good = measure_ladder(options)
    print("\n".join([f"{options.out} ({result['spent_s']} s)", *triton_report.measured_table(result)]))
    return 0 if good else 1


if __name__ == "__main__":
    sys.exit(main())
