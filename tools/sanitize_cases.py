"""Small forward and backward problems that cover the kernels' code paths, each checked, to run under compute-sanitizer.

compute-sanitizer --tool memcheck python tools/sanitize_cases.py [--device cuda|cpu] [--only TEXT] [--nan-outputs]

The problems are made and checked by the tests' own harness (tests/harness.py), so unused rows and pages are NaN. The
exit status is 1 when a result is wrong.

--nan-outputs is for initcheck, which does not see what TMA stores write and reports every later read of it: outputs and
gradients are then NaN before the call. What initcheck cannot find so, an element that is never written, is a wrong
result of its case instead.
"""

from __future__ import annotations

import argparse
import dataclasses
import functools
import os
import sys
from pathlib import Path
from unittest import mock

HERE = Path(__file__).resolve().parent
sys.path[:0] = [str(HERE.parent / "tests"), str(HERE)]

import sanitize_kvcache
import torch
from cases import Case
from harness import check_forward, check_gradients, make_problem, run

import flash_attn
from flash_attn.ops import calls

CASES = (
    Case(1, 65, 129, 2, 2, 40, "float16"),
    Case(2, 129, 129, 2, 1, 64, "bfloat16", causal=True, sinks=True),
    Case(1, 200, 73, 2, 2, 96, "float16", causal=True),
    Case(1, 130, 257, 3, 1, 128, "bfloat16", window=(30, 40), softcap=15.0),
    Case(1, 128, 300, 2, 2, 128, "float16", causal=True, window=(100, -1), alibi="batch"),
    Case(1, 65, 130, 2, 2, 192, "bfloat16", causal=True, alibi="heads"),
    Case(1, 63, 129, 2, 1, 256, "float16"),
    Case(3, 65, 129, 4, 2, 64, "bfloat16", causal=True, kind="padded", sinks=True),
    Case(3, 70, 150, 2, 2, 128, "float16", causal=True, kind="seqused"),
    Case(3, 40, 100, 2, 1, 96, "bfloat16", kind="leftpad", page_size=7),
    Case(3, 65, 300, 4, 1, 128, "bfloat16", causal=True, kind="packed", page_size=16),
    Case(2, 33, 500, 2, 2, 256, "float16", kind="seqused", page_size=256),
    # Few rows over many keys: by the kernels of the KV cache.
    Case(1, 1, 900, 8, 2, 128, "bfloat16"),
    Case(4, 3, 1200, 8, 2, 64, "float16", causal=True, kind="packed", page_size=16),
    Case(1, 129, 100, 2, 1, 64, "float16", causal=True, dropout=0.17),
    Case(2, 65, 130, 2, 2, 128, "bfloat16", dropout=0.5, kind="packed"),
    Case(2, 130, 257, 2, 1, 192, "bfloat16", causal=True, head_dim_v=128),
    Case(1, 65, 129, 2, 2, 64, "float16", head_dim_v=96),
    # More heads than an H200 has multiprocessors, of few rows: dQ summed up in shared memory.
    Case(2, 130, 200, 70, 70, 64, "bfloat16", causal=True),
    # Blocks of keys that no row sees, several of them for a thread block.
    Case(2, 1, 1000, 12, 12, 256, "bfloat16", window=(0, 0)),
    # More row blocks than an H200 has multiprocessors: thread blocks that take several, and the counter.
    Case(1, 1100, 300, 24, 24, 64, "float16", causal=True),
    Case(3, 380, 400, 24, 12, 128, "bfloat16", window=(100, 30), softcap=15.0),
    Case(1, 1100, 500, 24, 24, 128, "bfloat16", window=(200, 0)),
    Case(3, 600, 400, 24, 12, 128, "bfloat16", causal=True, kind="packed", page_size=16),
    Case(1, 520, 300, 30, 30, 128, "float16"),
    Case(4, 300, 300, 24, 24, 192, "bfloat16", causal=True, kind="padded"),
    Case(2, 300, 200, 32, 32, 128, "float16", causal=True, dropout=0.2, kind="packed"),
    Case(2, 300, 200, 32, 8, 256, "bfloat16", causal=True, sinks=True),
)
# By the wgmma family, with scores beyond what goes ahead of its references: with the kernels for many waves of row
# blocks, for one wave, and with shares of the keys.
FAR_CASES = (
    ("wgmma", Case(1, 1100, 400, 2, 2, 64, "bfloat16")),
    ("wgmma", Case(1, 1100, 400, 2, 1, 128, "float16", causal=True)),
    ("wgmma", Case(1, 200, 400, 2, 2, 128, "bfloat16", alibi="heads")),
    ("wgmma", Case(1, 200, 300, 2, 1, 256, "float16")),
    ("wgmma:1", Case(1, 200, 400, 2, 2, 64, "bfloat16")),
    ("wgmma:1", Case(1, 200, 400, 2, 1, 128, "float16", causal=True)),
    ("wgmma:1", Case(3, 70, 150, 2, 1, 96, "bfloat16", causal=True, kind="packed", page_size=16, sinks=True)),
    ("wgmma:3", Case(2, 150, 400, 2, 1, 128, "bfloat16", causal=True)),
)


def nan_output(q, v):
    return q.new_full((*q.shape[:-1], v.shape[-1]), float("nan"))


def nan_gradients(tensors, given):
    """What is given, else a tensor full of NaN for the gradient of each of the tensors."""
    return [x.new_full(x.shape, float("nan")) if gradient is None else gradient for x, gradient in zip(tensors, given)]


class NanOutputs:
    """A backend whose forwards and backwards get tensors to write, full of NaN."""

    def __init__(self, backend):
        self.backend = backend

    def __getattr__(self, name):
        function = getattr(self.backend, name)
        if name in ("fwd", "varlen_fwd"):
            return lambda q, k, v, out, *rest: function(q, k, v, nan_output(q, v), *rest)
        if name in ("bwd", "varlen_bwd"):
            return lambda dout, q, k, v, out, lse, dq, dk, dv, *rest: function(
                dout, q, k, v, out, lse, *nan_gradients((q, k, v), (dq, dk, dv)), *rest
            )
        return function


class NanOutputBackends:
    """Takes the place of flash_attn.backends in the calls."""

    of = staticmethod(lambda tensor: NanOutputs(flash_attn.backends.of(tensor)))


def on_cpu(problem):
    """The problem with its tensors on the CPU: the reference then adds no GPU kernels of other libraries to the run."""
    tensors = {name: value.cpu() for name, value in vars(problem).items() if isinstance(value, torch.Tensor)}
    return dataclasses.replace(problem, **tensors)


def has_backward(case):
    return case.kind in ("dense", "packed", "padded") and case.page_size == 0


def check(case, device, deterministic):
    problem = make_problem(case, device)
    leaves = [x.requires_grad_(has_backward(case)) for x in problem.inputs.values()]
    out, lse, dmask = run(problem, deterministic=deterministic)
    keep = dmask.cpu() >= 0 if case.dropout else None
    grads = []
    if has_backward(case):
        dout, dlse = torch.randn_like(out), torch.randn_like(lse)
        grads = [grad.cpu() for grad in torch.autograd.grad((out, lse), leaves, (dout, dlse))]
    reference = on_cpu(problem)
    check_forward(reference, out.detach().cpu(), lse.detach().cpu(), keep)
    if grads:
        check_gradients(reference, dout.cpu(), grads, keep, dlse.cpu())


def check_far(family, case, device):
    problem = make_problem(case, device)
    problem.q.mul_(16.0)
    with mock.patch.dict(os.environ, FLASH_ATTN_FAMILY=family):
        out, lse, _ = run(problem)
    check_forward(on_cpu(problem), out.cpu(), lse.cpu())


def main(arguments=None):
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--device", default="cuda", choices=("cuda", "cpu"))
    parser.add_argument("--only", default="", help="run the cases whose id contains this text")
    parser.add_argument("--nan-outputs", action="store_true", help="fill outputs and gradients with NaN beforehand")
    options = parser.parse_args(arguments)
    torch.manual_seed(0)
    if options.nan_outputs:
        calls.backends = NanOutputBackends
    print(f"flash_attn {flash_attn.__version__} {flash_attn.__build__}")
    wrong = 0
    checks = [(case.id, functools.partial(check, case, options.device, i % 2 == 1)) for i, case in enumerate(CASES)]
    for family, case in FAR_CASES:
        checks.append((f"far-{family}-{case.id}", functools.partial(check_far, family, case, options.device)))
    for name, run_check in [*checks, *sanitize_kvcache.checks(options.device)]:
        if options.only not in name:
            continue
        try:
            run_check()
            print(f"ok      {name}", flush=True)
        except AssertionError as error:
            wrong += 1
            print(f"WRONG   {name}: {error}", flush=True)
    print(f"{wrong} wrong results")
    return 1 if wrong else 0


if __name__ == "__main__":
    sys.exit(main())
