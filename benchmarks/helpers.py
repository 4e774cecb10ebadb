"""Speed of the other operators: cross-entropy, layer norm and RMS norm against PyTorch on the same GPU.

    python benchmarks/helpers.py

Device events around single calls on a cold L2 cache, interleaved, medians; bfloat16. GB/s counts the bytes that the
operation has to move: logits once forward and twice backward; four matrices for a norm of a sum, either way.
"""

from __future__ import annotations

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

CLASSES, LOGIT_ROWS = (32000, 50257, 128256), 8192
FEATURES, NORM_ELEMENTS = (1024, 4096, 8192), 2**26
NORMS = {"layer_norm": (layer_norm_fn, F.layer_norm, 2), "rms_norm": (rms_norm_fn, F.rms_norm, 1)}
BUDGET = Budget(min_rounds=20, min_ms=0.0)


def randn(*shape):
    return torch.randn(shape, device="cuda").to(torch.bfloat16).requires_grad_()


def cross_entropy_problem(classes):
    """-> (ours, torch's, inputs, bytes forward, bytes backward)."""
    logits, labels = randn(LOGIT_ROWS, classes), torch.randint(classes, (LOGIT_ROWS,), device="cuda")
    size = 2 * logits.numel()

    def torch_loss(x):
        return F.cross_entropy(x.float(), labels, reduction="none")

    return lambda x: cross_entropy_loss(x, labels)[0], torch_loss, (logits,), size, 2 * size


def norm_problem(ours, theirs, parameters, features):
    """norm(x + residual) and the sum, as a block of a transformer wants them."""
    inputs = *(randn(NORM_ELEMENTS // features, features) for _ in "xr"), *(randn(features) for _ in range(parameters))

    def torch_norm(x, residual, *weights):
        total = x + residual
        return theirs(total, (features,), *weights), total

    def own_norm(x, residual, weight, bias=None):
        return ours(x, weight, bias, residual, prenorm=True)

    size = 4 * 2 * NORM_ELEMENTS
    return own_norm, torch_norm, inputs, size, size


def problems():
    """{name: function that makes the problem}"""
    found = {f"cross_entropy {LOGIT_ROWS} x {n}": partial(cross_entropy_problem, n) for n in CLASSES}
    for name, norm in NORMS.items():
        found.update({f"{name} {NORM_ELEMENTS // n} x {n}": partial(norm_problem, *norm, n) for n in FEATURES})
    return found


def backward_of(function, inputs):
    outputs = function(*inputs)
    outputs = outputs if isinstance(outputs, tuple) else (outputs,)
    return partial(torch.autograd.grad, outputs, inputs, [torch.randn_like(x) for x in outputs], retain_graph=True)


def measure(name, make, timer):
    """Prints the rows of one problem, forward and backward."""
    ours, theirs, inputs, *sizes = make()
    torch._dynamo.reset()
    functions = {"ours": ours, "torch": theirs, "compiled": torch.compile(theirs, dynamic=False)}
    for mode, size in zip(("fwd", "bwd"), sizes):
        make_call = partial if mode == "fwd" else lambda function, *given: backward_of(function, given)
        calls = {key: make_call(function, *inputs) for key, function in functions.items()}
        for call in calls.values():  # the first compiles, which must not count as its time
            for _ in range(3):
                call()
        times, _ = interleave(timer, {key: (nullcontext, call) for key, call in calls.items()}, BUDGET)
        ms = {key: statistics.median(samples) for key, samples in times.items()}
        told = ", ".join(f"{key} {value / ms['ours']:.2f}x" for key, value in ms.items() if key != "ours")
        print(f"{name:32} {mode:4} {ms['ours']:8.3f} ms {size / ms['ours'] / 1e6:6.0f} GB/s, {told}", flush=True)


if __name__ == "__main__":
    if not torch.cuda.is_available():
        sys.exit("error: no GPU: torch.cuda is not available")
    torch._functorch.config.donated_buffer = False  # it forbids the repeated backward of compiled code
    print(f"{torch.cuda.get_device_name()}, torch {torch.__version__}; ratio: time of the peer over ours")
    timer = CudaTimer(torch.device("cuda"))
    for name, make in problems().items():
        measure(name, make, timer)
        torch.cuda.empty_cache()  # the next problem needs the memory
