"""Speed of the e4m3 forward beside bf16, V's transposition included, cuDNN's where it can be had (cudnn_fp8.py), and of
torch's e4m3 matrix product:

    python benchmarks/fp8_forward.py [--device cuda] [--head-dims 64 128 256] [--quick]
        [--out FILE.json]

The kernels take turns, as graphs of several calls after the L2 cache was overwritten; a figure is the median.
"""

from __future__ import annotations

import argparse
import functools
import json
import statistics
import sys
from contextlib import nullcontext
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent))  # absent under PYTHONSAFEPATH

import cudnn_fp8
import torch
from environment import describe_origin
from shared import Case, row_bar
from timing import Budget, captured, interleave, make_timers

from flash_attn import explain, flash_attn_func
from flash_attn.fp8 import quantize

SEQLENS = (512, 1024, 2048, 4096, 8192, 16384)
TOKENS, HIDDEN = 16384, 2048
HEAD_DIMS = (64, 128, 256)
MAX_MS = 900.0  # of a row, all calls together
MATRIX = 8192  # rows and columns of the matrix product


def cases(head_dims, quick, device):
    """The problems; tiny ones on the CPU."""
    tokens, seqlens = (TOKENS, SEQLENS[2::3] if quick else SEQLENS) if device == "cuda" else (128, (64,))
    return [
        Case(tokens // s, s, s, HIDDEN // d, heads_k, d, "bfloat16", causal=causal)
        for d in head_dims
        for heads_k in ((HIDDEN // d, HIDDEN // d // 4) if d == 128 else (HIDDEN // d,))
        for causal in (False, True)
        for s in seqlens
    ]


def calls(case, device):
    """{name: call} of one problem, and whether e4m3 has kernels of its own there."""
    q, k, v = (
        torch.randn(case.batch, case.seqlen_q, heads, case.head_dim, device=device, dtype=torch.bfloat16)
        for heads in (case.nheads, case.nheads_k, case.nheads_k)
    )
    codes, descales = zip(*(quantize(x, "head") for x in (q, k, v)))
    options = {"causal": case.causal, **dict(zip(("q_descale", "k_descale", "v_descale"), descales))}
    plan = explain(flash_attn_func, *codes, **options)["forward"]
    functions = {
        "bf16": lambda: flash_attn_func(q, k, v, causal=case.causal),
        "fp8": lambda: flash_attn_func(*codes, exp="exact", **options),
        "fp8 fast": lambda: flash_attn_func(*codes, exp="fast", **options),
    }
    if device == "cuda":
        add_cudnn(functions, q, k, v, case.causal)
    return functions, plan.get("qkv_dtype") == "e4m3"


def add_cudnn(functions, q, k, v, causal):
    """cuDNN's forward, if its result is that of the others; else why not, once."""
    try:
        call, expected = cudnn_fp8.make_call(q, k, v, causal), functions["bf16"]().float()
        error = (call().float() - expected).square().mean().sqrt()
        if not error <= 0.2 * expected.square().mean().sqrt():
            raise RuntimeError(f"a root mean square error of {error:.3g}")
        captured(call, nullcontext)  # as it is timed
    except Exception as reason:  # whatever the package raises
        note_once(f"without cuDNN's forward: {type(reason).__name__}: {str(reason)[:300]}")
    else:
        functions["cudnn"] = call


@functools.cache
def note_once(text):
    print(text, file=sys.stderr)


def matrix_product(device):
    """{name: call} of torch's product of two e4m3 matrices, what the same tensor cores give a GEMM."""
    rows, cols = (torch.randn(MATRIX, MATRIX, device=device).to(torch.float8_e4m3fn) for _ in "ab")
    one = torch.ones((), device=device)
    return {
        "matmul": lambda: torch._scaled_mm(rows, cols.t(), one, one, out_dtype=torch.bfloat16, use_fast_accum=True),
        "matmul, exact sums": lambda: torch._scaled_mm(rows, cols.t(), one, one, out_dtype=torch.bfloat16),
    }


def measure(functions, flops, timer, device):
    """The figures of a row, by name of the call."""
    if device == "cuda":
        functions = {name: captured(call, nullcontext) for name, call in functions.items()}
    timed = {name: (nullcontext, call) for name, call in functions.items()}
    times, sm_mhz = interleave(timer, timed, Budget(max_ms=MAX_MS))
    ms = {name: statistics.median(taken) for name, taken in times.items()}
    return {"sm_mhz": sm_mhz, "ms": ms, "tflops": {name: flops / value / 1e9 for name, value in ms.items()}}


def main(arguments=None):
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--device", choices=("cpu", "cuda"), default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--head-dims", type=int, nargs="+", choices=HEAD_DIMS, default=HEAD_DIMS)
    parser.add_argument("--quick", action="store_true", help="two lengths only")
    parser.add_argument("--out", type=Path, help="write the result here, after every row")
    options = parser.parse_args(arguments)
    device = torch.device(options.device, 0) if options.device == "cuda" else torch.device("cpu")
    result = {**describe_origin(device), "rows": []}
    timer = make_timers(device)["graph" if options.device == "cuda" else "event"]
    problems = cases(options.head_dims, options.quick, options.device)
    with row_bar(len(problems) + 1) as done:

        def add(name, functions, flops, has_kernels):
            row = {"id": name, "has_kernels": has_kernels, **measure(functions, flops, timer, options.device)}
            result["rows"].append(row)
            rates = "  ".join(f"{call} {rate:.0f} TFLOPS" for call, rate in row["tflops"].items())
            done(f"{name}: {rates}" + ", e4m3 by copies in 16 bits" * (not has_kernels))
            if options.out:
                options.out.write_text(json.dumps(result, indent=1) + "\n", encoding="utf-8")

        for case in problems:
            functions, has_kernels = calls(case, options.device)
            add(case.id, functions, case.flops, has_kernels)
        if options.device == "cuda":
            add(f"matmul-{MATRIX}", matrix_product(device), 2 * MATRIX**3, True)
        else:
            done("no matrix product of e4m3 on the CPU")
    return 0


if __name__ == "__main__":
    sys.exit(main())
