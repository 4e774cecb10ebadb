"""Theory and measurement: attention in six kernels and in one, by the constants of a machine and on a GPU.

python benchmarks/lab/theory.py [--machine h200]            what the model predicts (theory_model.py); needs no GPU
python benchmarks/lab/theory.py --measure --out FILE.json   measures both on the GPU of this machine
python benchmarks/lab/theory.py --result FILE.json          the predictions with the measurement

Standard attention is what transformers' "eager" attention does: two products, scaling, mask, a softmax in float32 and
its rounding, each a kernel of PyTorch; without a mask one less. In float16, of which PyTorch's softmax makes float32
in one kernel. The fused kernel is `flash_attn_func`. Both take turns as in benchmarks/run.py; kernels are counted by
torch's profiler, memory is what a call adds at its peak.
"""

from __future__ import annotations

import argparse
import contextlib
import gc
import json
import statistics
import sys
from pathlib import Path

HERE = Path(__file__).resolve().parent
sys.path[:0] = [str(HERE), str(HERE.parent)]  # absent under PYTHONSAFEPATH

import theory_model as model
import theory_report
from results import load

MIN_ROUNDS, MIN_MS, WARMUP_MS, MAX_MS = 7, 30.0, 10.0, 1500.0
MAX_RELATIVE_ERROR = 2e-2  # rounding leaves 1e-3; a wrong mask or scale is far above


class Tiny(model.Problem):
    """For the CPU."""

    batch, heads = 1, 2


def standard_attention(torch, q, k, v, mask):
    """softmax(q kᵀ / √d + mask) v of (batch, heads, seqlen, d), in six kernels, in five without a mask."""
    scores = torch.matmul(q, k.transpose(-1, -2))
    scores = scores * q.shape[-1] ** -0.5
    if mask is not None:
        scores = scores + mask
    probabilities = torch.softmax(scores, dim=-1, dtype=torch.float32)
    del scores
    return torch.matmul(probabilities.to(q.dtype), v)


def make_calls(torch, problem, device, dtype):
    """{"standard": function, "fused": function} of one problem; both return (batch, seqlen, heads, d)."""
    import flash_attn

    shape = (problem.batch, problem.seqlen, problem.heads, problem.head_dim)
    q, k, v = (torch.randn(shape, device=device, dtype=dtype) for _ in range(3))
    heads_first = [tensor.transpose(1, 2).contiguous() for tensor in (q, k, v)]  # else products copy their operands
    mask = None
    if problem.causal:
        mask = torch.full((problem.seqlen, problem.seqlen), float("-inf"), device=device, dtype=dtype).triu_(1)
    return {
        "standard": lambda: standard_attention(torch, *heads_first, mask).transpose(1, 2),
        "fused": lambda: flash_attn.flash_attn_func(q, k, v, causal=problem.causal),
    }


def count_kernels(torch, call):
    """Kernels of one call by torch's profiler; None where that has no access to the GPU."""
    from torch.autograd import DeviceType
    from torch.profiler import ProfilerActivity, profile

    torch.cuda.synchronize()  # kernels of the inputs would count
    with profile(activities=[ProfilerActivity.CUDA]) as trace:
        call()
        torch.cuda.synchronize()
    names = [event.name for event in trace.events() if event.device_type == DeviceType.CUDA]
    return sum(not name.startswith(("Memset", "Memcpy")) for name in names) or None


def describe_call(torch, call, device):
    """(result, {kernels, peak_bytes}) of one call on a GPU; (None, None) if its memory does not suffice."""
    if device.type == "cpu":
        return call(), {"kernels": None, "peak_bytes": 0}
    try:
        kernels = count_kernels(torch, call)  # the first call, whose libraries allocate workspaces that they keep
        torch.cuda.reset_peak_memory_stats()
        before = torch.cuda.memory_allocated()
        out = call()
        torch.cuda.synchronize()
    except torch.cuda.OutOfMemoryError:
        return None, None
    return out, {"kernels": kernels, "peak_bytes": torch.cuda.max_memory_allocated() - before}


def measure(torch, problem, timer, budget, device):
    """The row of one problem: {standard, fused: {kernels, peak_bytes, ms} or None, ...}."""
    from timing import interleave

    calls = make_calls(torch, problem, device, torch.float16)
    with torch.no_grad():
        described = {name: describe_call(torch, call, device) for name, call in calls.items()}
        outs = [out for out, _ in described.values() if out is not None]
        if len(outs) == 2:
            error = ((outs[0].float() - outs[1].float()).norm() / outs[0].float().norm()).item()
            if not error <= MAX_RELATIVE_ERROR:
                raise SystemExit(f"{problem}: the results differ by {error:.1e} (bound {MAX_RELATIVE_ERROR})")
        del outs
        entries = {name: entry for name, (_, entry) in described.items()}
        del described
        timed = {name: (contextlib.nullcontext, calls[name]) for name, entry in entries.items() if entry}
        samples, clock = interleave(timer, timed, budget)
    for name, values in samples.items():
        entries[name]["ms"] = statistics.median(values)
    shape = {"seqlen": problem.seqlen, "head_dim": problem.head_dim, "causal": problem.causal}
    return {**shape, "batch": problem.batch, "heads": problem.heads, "sm_mhz": clock, **entries}


def measure_all(out, device_name="cuda"):
    """Measures every problem of the tables and writes the result after each; tiny ones on the CPU."""
    import torch
    from ceilings import read_ceiling
    from environment import describe_origin
    from shared import row_bar
    from timing import Budget, make_timers

    cuda = device_name == "cuda"
    if cuda and not torch.cuda.is_available():
        raise SystemExit("error: --measure needs a GPU")
    device = torch.device("cuda", torch.cuda.current_device()) if cuda else torch.device("cpu")
    budget = Budget(MIN_ROUNDS, MIN_MS, WARMUP_MS, MAX_MS) if cuda else Budget(1, 0.0, 0.0)
    timer = make_timers(device)["event"]
    problems = model.problems() if cuda else [Tiny(64, 64, False), Tiny(64, 64, True)]
    result = {**describe_origin(device), "dtype": "float16", "rows": []}
    if cuda:
        result["read_ceiling"] = read_ceiling(device)
    out.parent.mkdir(parents=True, exist_ok=True)
    with row_bar(len(problems)) as done:
        for problem in problems:
            result["rows"].append(measure(torch, problem, timer, budget, device))
            gc.collect()
            torch.cuda.empty_cache()
            entries = {name: result["rows"][-1][name] for name in ("standard", "fused")}
            told = ", ".join(f"{name} {e['ms']:.3f} ms" if e else f"{name}: memory" for name, e in entries.items())
            done(f"{problem}: {told}")
            out.write_text(json.dumps(result, indent=1) + "\n", encoding="utf-8")
    return result


def main(arguments=None):
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--machine", choices=list(model.MACHINES), help="default: that of the result")
    parser.add_argument("--device", choices=("cpu", "cuda"), default="cuda", help="cpu: tiny problems, to try it")
    parser.add_argument("--measure", action="store_true", help="measure on the GPU of this machine; needs --out")
    parser.add_argument("--out", type=Path, help="the JSON that --measure writes")
    parser.add_argument("--result", type=Path, help="a JSON of --measure to show with the predictions")
    options = parser.parse_args(arguments)
    if options.measure and options.out is None:
        parser.error("--measure needs --out FILE.json")
    device = options.device
    result = measure_all(options.out, device) if options.measure else load(options.result) if options.result else None
    machine = model.MACHINES[options.machine] if options.machine else model.machine_of(result)
    for block in (theory_report.kernels_block(machine), theory_report.speed_block(machine, result)):
        print("\n".join([*block, ""]))
    return 0


if __name__ == "__main__":
    sys.exit(main())
