"""Speed of the e4m3 forward at head dim 128 beside bf16, V's transposition included:

    python benchmarks/fp8_forward.py [--quick] [--json FILE]

Each row measures all kernels in turns, so that they share the clock of the chip; a figure is the median of the turns.
"""

from __future__ import annotations

import argparse
import json
from pathlib import Path

import torch

from flash_attn import backends, flash_attn_func
from flash_attn.fp8 import quantize

HEADS, D, TOKENS = 16, 128, 16384
SEQLENS = (512, 1024, 2048, 4096, 8192, 16384)
TURNS, WARM_UP_SECONDS, TURN_SECONDS = 7, 0.5, 0.06


def calls(seqlen, causal, heads_k):
    """Name -> call, of one problem."""
    batch = max(TOKENS // seqlen, 1)
    q, k, v = (
        torch.randn(batch, seqlen, heads, D, device="cuda", dtype=torch.bfloat16) for heads in (HEADS, heads_k, heads_k)
    )
    codes, descales = zip(*(quantize(x, "head") for x in (q, k, v)))
    descales = dict(zip(("q_descale", "k_descale", "v_descale"), descales))

    def fp8(exp):
        return flash_attn_func(*codes, causal=causal, exp=exp, **descales)

    return {
        "bf16": lambda: flash_attn_func(q, k, v, causal=causal),
        "fp8": lambda: fp8("exact"),
        "fp8 fast": lambda: fp8("fast"),
    }


def graph_of(call, count):
    """A CUDA graph of `count` calls."""
    stream = torch.cuda.Stream()
    with torch.cuda.stream(stream):
        call()
    stream.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        for _ in range(count):
            call()
    return graph


def milliseconds(run):
    begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    begin.record()
    run()
    end.record()
    end.synchronize()
    return begin.elapsed_time(end)


def measure(functions):
    """Name -> median milliseconds of a call."""
    graphs, times = {}, {name: [] for name in functions}
    for name, call in functions.items():
        call()
        once = max(min(milliseconds(call) for _ in range(3)), 1e-3)
        count = max(1, min(50, round(1e3 * TURN_SECONDS / once)))
        graphs[name] = graph_of(call, count), count
        for _ in range(max(1, round(1e3 * WARM_UP_SECONDS / (once * count) / len(functions)))):
            graphs[name][0].replay()
    for _ in range(TURNS):
        for name, (graph, count) in graphs.items():
            times[name].append(milliseconds(graph.replay) / count)
    return {name: sorted(values)[TURNS // 2] for name, values in times.items()}


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--quick", action="store_true", help="two lengths only")
    parser.add_argument("--json", type=Path, help="write the rows here")
    arguments = parser.parse_args()
    print(torch.cuda.get_device_name(), backends.get("cuda").build_info())
    rows = []
    for heads_k in (HEADS, HEADS // 4):
        for causal in (False, True):
            for seqlen in SEQLENS[2::3] if arguments.quick else SEQLENS:
                times = measure(calls(seqlen, causal, heads_k))
                flops = 4 * max(TOKENS // seqlen, 1) * HEADS * D * seqlen**2 / (2 if causal else 1)
                rates = {name: flops / value / 1e9 for name, value in times.items()}
                rows.append({"seqlen": seqlen, "causal": causal, "heads_k": heads_k, "ms": times, "tflops": rates})
                label = f"{'causal' if causal else 'full':6} h{HEADS}/{heads_k:<2} s{seqlen:<5}"
                print(label, "  ".join(f"{name} {rate:6.0f} TF {times[name]:.4f} ms" for name, rate in rates.items()))
    if arguments.json:
        arguments.json.write_text(json.dumps(rows, indent=1) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
