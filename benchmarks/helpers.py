"""Speed of the other operators: cross-entropy, layer norm and RMS norm against PyTorch on the same GPU.

    python benchmarks/helpers.py [--out FILE.json] [--eager-only]

Device events around single calls on a cold L2 cache, interleaved, medians; bfloat16. GB/s counts the bytes that the
operation has to move: logits once forward and twice backward; four matrices for a norm of a sum, either way.
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
from contextlib import nullcontext
from functools import partial
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent))

import torch
import torch._functorch.config
import torch.nn.functional as F
from timing import Budget, CudaTimer, interleave

from flash_attn.ops.triton.cross_entropy import cross_entropy_loss
from flash_attn.ops.triton.layer_norm import layer_norm_fn, rms_norm_fn

CLASSES = (32000, 50257, 128256)
LOGIT_ROWS = 8192
FEATURES = (1024, 4096, 8192)
NORM_ELEMENTS = 2**26
BUDGET = Budget(min_rounds=20, min_ms=0.0)


def cross_entropy_problem(classes):
    """-> ({name: function of the logits}, inputs, bytes forward, bytes backward)."""
    logits = torch.randn(LOGIT_ROWS, classes, device="cuda").to(torch.bfloat16).requires_grad_()
    labels = torch.randint(classes, (LOGIT_ROWS,), device="cuda")
    functions = {
        "ours": lambda x: cross_entropy_loss(x, labels)[0],
        "torch": lambda x: F.cross_entropy(x.float(), labels, reduction="none"),
    }
    size = 2 * logits.numel()
    return functions, (logits,), size, 2 * size


def norm_problem(ours, theirs, parameters, features):
    """norm(x + residual) and the sum, as a block of a transformer wants them."""
    shape = (NORM_ELEMENTS // features, features)
    x, residual = (torch.randn(shape, device="cuda").to(torch.bfloat16).requires_grad_() for _ in range(2))
    weights = [torch.randn(features, device="cuda", dtype=torch.bfloat16).requires_grad_() for _ in range(parameters)]

    def ours_of(x, residual, weight, bias=None):
        return ours(x, weight, bias, residual, prenorm=True)

    def theirs_of(x, residual, *weights):
        total = x + residual
        return theirs(total, (features,), *weights), total

    size = 4 * 2 * NORM_ELEMENTS
    return {"ours": ours_of, "torch": theirs_of}, (x, residual, *weights), size, size


def problems():
    for classes in CLASSES:
        yield f"cross_entropy {LOGIT_ROWS} x {classes}", lambda n=classes: cross_entropy_problem(n)
    for name, ours, theirs, parameters in (
        ("layer_norm", layer_norm_fn, F.layer_norm, 2),
        ("rms_norm", rms_norm_fn, F.rms_norm, 1),
    ):
        for features in FEATURES:
            yield (
                f"{name} {NORM_ELEMENTS // features} x {features}",
                lambda o=ours, t=theirs, p=parameters, n=features: norm_problem(o, t, p, n),
            )


def backward_of(function, inputs):
    outputs = function(*inputs)
    outputs = outputs if isinstance(outputs, tuple) else (outputs,)
    douts = [torch.randn_like(out) for out in outputs]
    return lambda: torch.autograd.grad(outputs, inputs, douts, retain_graph=True)


def measure(timer, calls):
    """{name: median ms}, the calls in turn."""
    for call in calls.values():  # the first compiles, which must not count as its time
        for _ in range(3):
            call()
    times, _ = interleave(timer, {name: (nullcontext, call) for name, call in calls.items()}, BUDGET)
    return {name: statistics.median(samples) for name, samples in times.items()}


def measure_problem(name, make, timer, compiled):
    """The rows of one problem, forward and backward."""
    functions, inputs, *sizes = make()
    if compiled:
        torch._dynamo.reset()
        functions["compiled"] = torch.compile(functions["torch"], dynamic=False)
    rows = []
    for mode, size in zip(("fwd", "bwd"), sizes):
        calls = {
            key: partial(function, *inputs) if mode == "fwd" else backward_of(function, inputs)
            for key, function in functions.items()
        }
        ms = measure(timer, calls)
        rows.append({"name": name, "mode": mode, "ms": ms, "bytes": size})
        told = ", ".join(f"{key} {value / ms['ours']:.2f}x" for key, value in ms.items() if key != "ours")
        print(f"{name:32} {mode:4} {ms['ours']:8.3f} ms {size / ms['ours'] / 1e6:6.0f} GB/s, {told}", flush=True)
    return rows


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, help="write the result as JSON")
    parser.add_argument("--eager-only", action="store_true", help="leave torch.compile out")
    arguments = parser.parse_args()
    if not torch.cuda.is_available():
        sys.exit("error: no GPU: torch.cuda is not available")
    torch._functorch.config.donated_buffer = False  # it forbids the repeated backward of compiled code
    timer = CudaTimer(torch.device("cuda"))
    result = {"device": torch.cuda.get_device_name(), "torch": torch.__version__, "rows": []}
    print(f"{result['device']}, torch {result['torch']}; ratio: time of the peer over ours")
    for name, make in problems():
        result["rows"] += measure_problem(name, make, timer, not arguments.eager_only)
        torch.cuda.empty_cache()  # the next problem needs the memory
    if arguments.out:
        arguments.out.write_text(json.dumps(result, indent=1) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
