"""Small forward and backward problems that cover the kernels' code paths, each checked, to run under compute-sanitizer.

compute-sanitizer --tool memcheck python tests/sanitize/sanitize_cases.py [--device cuda|cpu] [--only TEXT]
    [--shard I/N] [--nan-outputs]

The problems are made and checked by the tests' own harness (tests/harness.py), so unused rows and pages are NaN; each
has the same values in every run, with --only and --shard too. The exit status is 1 when a result is wrong. Shards run
side by side. A sanitizer spends most of its time patching the modules that a process loads, so a shard has few head
dims.

--nan-outputs is for initcheck, which does not see what TMA stores write and reports every later read of it: outputs and
gradients are then NaN before the call. What initcheck cannot find so, an element that is never written, is a wrong
result of its case instead.
"""

from __future__ import annotations

import argparse
import functools
import itertools
import os
import re
import sys
import time
from pathlib import Path
from unittest import mock

HERE = Path(__file__).resolve().parent
sys.path[:0] = [str(HERE.parent), str(HERE)]

import cp_kernel_harness
import dq_stage_harness
import kernel_tables
import sanitize_8_bit
import sanitize_cp
import sanitize_kvcache
import sanitize_masks
import sanitize_varlen
import torch
from cases import Case
from harness import check_forward, check_gradients, make_problem, on_cpu, run

import flash_attn
from flash_attn import eight_bit
from flash_attn.context_parallel.compute import kernel_calls, sums
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
    # Fully masked KV blocks, several of them for a thread block.
    Case(2, 1, 1000, 12, 12, 256, "bfloat16", window=(0, 0)),
    # More work tiles than an H200 has multiprocessors: thread blocks that take several, and the tile scheduler.
    Case(1, 1100, 300, 24, 24, 64, "float16", causal=True),
    Case(3, 380, 400, 24, 12, 128, "bfloat16", window=(100, 30), softcap=15.0),
    Case(1, 1100, 500, 24, 24, 128, "bfloat16", window=(200, 0)),
    Case(3, 600, 400, 24, 12, 128, "bfloat16", causal=True, kind="packed", page_size=16),
    Case(1, 520, 300, 30, 30, 128, "float16"),
    Case(4, 300, 300, 24, 24, 192, "bfloat16", causal=True, kind="padded"),
    Case(2, 300, 200, 32, 32, 128, "float16", causal=True, dropout=0.2, kind="packed"),
    Case(2, 300, 200, 32, 8, 256, "bfloat16", causal=True, sinks=True),
    # So many short sequences that the backward has two passes.
    Case(4, 200, 230, 50, 25, 128, "bfloat16", causal=True),
    Case(4, 210, 150, 50, 50, 128, "float16", window=(70, 40)),
    Case(5, 200, 200, 50, 50, 96, "bfloat16", causal=True, kind="packed", sinks=True),
)
HEAD_DIMS = tuple(sorted([(192, 128), *((d, 0) for d in kernel_tables.MMA_SYNC)]))  # of q and k, of v
# By a family that is forced, with its backward; fp16 and bf16, causal and full, deterministic and not alternate.
FAMILY_CASES = tuple(
    (family, Case(2, 130, 200, 2, 1, d, dtype, causal, head_dim_v=d_v))
    for (family, (d, d_v)), dtype, causal in zip(
        itertools.product(("mma_sync", "wgmma"), HEAD_DIMS),
        itertools.cycle(("float16", "bfloat16")),
        itertools.cycle((True, True, False, False)),
    )
) + (
    ("mma_sync", Case(2, 65, 130, 2, 2, 64, "bfloat16", dropout=0.3, sinks=True, kind="padded")),
    ("mma_sync", Case(2, 65, 130, 4, 2, 128, "float16", window=(40, 20), softcap=15.0, alibi="heads")),
    ("wgmma", Case(2, 130, 200, 2, 1, 128, "bfloat16", causal=True, dropout=0.3, sinks=True, kind="padded")),
    ("wgmma", Case(2, 130, 200, 4, 2, 64, "float16", window=(40, 20), softcap=15.0, alibi="heads")),
)
# The tiles and stages of GPUs with 99 KB of shared memory for a thread block.
SMALL_SHARED_MEMORY = {"FLASH_ATTN_FAMILY": "mma_sync", "FLASH_ATTN_SMEM_LIMIT": "101376"}
SMALL_CASES = tuple(
    Case(2, 130, 200, 4, 2, d, dtype, head_dim_v=d_v, **features)
    for (d, d_v), dtype in (
        ((32, 0), "bfloat16"),
        ((192, 0), "float16"),
        ((192, 128), "bfloat16"),
        ((256, 0), "bfloat16"),
    )
    for features in (
        {},
        {"causal": True, "sinks": True, "kind": "padded"},
        {"dropout": 0.3, "kind": "packed"},
        {"window": (40, 20), "softcap": 15.0, "alibi": "heads"},
    )
)
# Enough heads for the main kernel of the backward to prepare most of them itself.
MANY_HEADS = Case(4, 520, 300, 80, 80, 128, "bfloat16")

# Forwards only: the kernels for one wave of work tiles, splits of the keys and their combine, and those of decoding.
FORWARD_CASES = (
    *(("wgmma:1", Case(1, 130, 200, 2, 1, d, "float16", head_dim_v=d_v)) for d, d_v in HEAD_DIMS if d > 32),
    *(("wgmma:1", Case(1, 450, 500, 2, 1, d, "bfloat16", causal=True)) for d in (64, 128)),
    ("wgmma:1", Case(1, 200, 448, 2, 1, 128, "bfloat16")),
    *(("wgmma:3", Case(1, 65, 300, 2, 1, d, "bfloat16", head_dim_v=d_v)) for d, d_v in HEAD_DIMS if d > 32),
    ("wgmma:3", Case(3, 65, 300, 2, 1, 64, "float16", causal=True, kind="packed", page_size=5)),
    ("wgmma:8", Case(2, 200, 73, 2, 1, 128, "bfloat16", causal=True, window=(30, -1), kind="padded")),
    *(("split_kv", Case(2, 3, 200, 4, 2, d, "bfloat16", causal=True)) for d, d_v in HEAD_DIMS if not d_v),
    ("split_kv", Case(3, 20, 300, 4, 2, 128, "float16", window=(60, 5), kind="leftpad", page_size=7)),
    ("split_kv", Case(3, 40, 900, 8, 2, 64, "bfloat16", causal=True, kind="packed", page_size=16)),
)
# By the wgmma family, with scores beyond what the speculative softmax allows for: with the kernels for many waves of
# work tiles, for one wave, and with splits of the keys.
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


# Modules that look up the backend of a call.
CALLERS = (calls, kernel_calls, sums, cp_kernel_harness, dq_stage_harness)


class NanParts(sums._StackedResults):
    """Parts of out, of which a call writes its own rows and the combining pass reads all: NaN where none is written."""

    def __init__(self, *given):
        super().__init__(*given)
        self._out.fill_(float("nan"))


def nan_output(q, v, given=None, out_dtype=None, **named):
    """What a forward writes, full of NaN."""
    if given is not None:
        return given.fill_(float("nan"))
    dtype = eight_bit.result_dtype(q, v, out_dtype)
    return q.new_full((*q.shape[:-1], v.shape[-1]), float("nan"), dtype=dtype)


def nan_gradients(tensors, given, accumulate_dkv=False, dq_stage="", **others):
    """Tensors full of NaN for the gradients that a call writes, those that are given too, except dk and dv to which it
    adds."""
    is_written = (dq_stage in ("", "end"), *(dq_stage in ("", "add"),) * 2)
    gradients = [torch.empty_like(x) if g is None and w else g for x, g, w in zip(tensors, given, is_written)]
    for gradient in gradients[: 1 if accumulate_dkv else 3]:
        if gradient is not None:
            gradient.fill_(float("nan"))
    return gradients


def with_nan_out(given, named, index=12):
    """The arguments of fwd_kvcache with a result to write that is full of NaN."""
    q, v_cache, out = given[0], given[2], given[index]
    return *given[:index], nan_output(q, v_cache, out, **named), *given[index + 1 :]


class NanOutputs:
    """A backend whose forwards and backwards get tensors to write, full of NaN."""

    def __init__(self, backend):
        self.backend = backend

    def __getattr__(self, name):
        function = getattr(self.backend, name)
        if name in ("fwd", "varlen_fwd"):
            return lambda q, k, v, out, *rest, **named: function(
                q, k, v, nan_output(q, v, out, **named), *rest, **named
            )
        if name in ("bwd", "varlen_bwd"):
            return lambda dout, q, k, v, out, lse, dq, dk, dv, *rest, **named: function(
                dout, q, k, v, out, lse, *nan_gradients((q, k, v), (dq, dk, dv), **named), *rest, **named
            )
        if name == "fwd_kvcache":
            return lambda *given, **named: function(*with_nan_out(given, named), **named)
        return function


class NanOutputBackends:
    """Takes the place of flash_attn.backends in the calls."""

    of = staticmethod(lambda tensor, *name: NanOutputs(flash_attn.backends.of(tensor, *name)))


def has_backward(case):
    return case.kind in ("dense", "packed", "padded") and case.page_size == 0


def check_step(problem, deterministic, backward, with_dlse=True):
    """out and LSE, and if asked for the gradients, of one call."""
    leaves = [x.requires_grad_(backward) for x in problem.inputs.values()]
    out, lse, dmask = run(problem, deterministic=deterministic)
    keep = dmask.cpu() >= 0 if problem.case.dropout else None
    grads = []
    if backward:
        dout, dlse = torch.randn_like(out), torch.randn_like(lse) if with_dlse else torch.zeros_like(lse)
        outputs, given = ((out, lse), (dout, dlse)) if with_dlse else (out, dout)
        grads = [grad.cpu() for grad in torch.autograd.grad(outputs, leaves, given)]
    reference = on_cpu(problem)
    check_forward(reference, out.detach().cpu(), lse.detach().cpu(), keep)
    if grads:
        check_gradients(reference, dout.cpu(), grads, keep, dlse.cpu())


def check(case, device, deterministic=False, backward=None, grow=1.0):
    """grow: factor of q. backward: where it has one, unless said otherwise."""
    problem = make_problem(case, device)
    problem.q.mul_(grow)
    check_step(problem, deterministic, has_backward(case) if backward is None else backward)


def check_small(case, device, deterministic):
    with mock.patch.dict(os.environ, SMALL_SHARED_MEMORY):
        check(case, device, deterministic)


def checks(device):
    """(name, forced family or "", check) of every case."""
    for i, case in enumerate(CASES):
        yield case.id, "", functools.partial(check, case, device, i % 2 == 1)
    yield f"many heads, {MANY_HEADS.id}", "", lambda: check_step(make_problem(MANY_HEADS, device), False, True, False)
    for i, (family, case) in enumerate(FAMILY_CASES):
        yield f"{family}-{case.id}", family, functools.partial(check, case, device, i % 2 == 1)
    for i, case in enumerate(SMALL_CASES):
        yield f"99 KB, {case.id}", "", functools.partial(check_small, case, device, i % 2 == 1)
    for family, case in FORWARD_CASES:
        yield f"{family}-{case.id}", family, functools.partial(check, case, device, backward=False)
    for family, case in FAR_CASES:
        yield f"far-{family}-{case.id}", family, functools.partial(check, case, device, backward=False, grow=16.0)
    for name, family, problem, deterministic in sanitize_varlen.steps(device):
        yield name, family, lambda make=problem, d=deterministic: check_step(make(), d, True)
    yield from sanitize_8_bit.steps(device)
    yield from sanitize_cp.steps(device)
    yield from sanitize_masks.steps(device)
    for name, run_check in sanitize_kvcache.checks(device):
        yield name, "", run_check


def loaded(name):
    """Cases of equal value load about the same modules."""
    return re.search(r"\bd(\d+(x\d+)?)|$", name)[0], "mma_sync" in name


def shard(text):
    """(index, count) of "I/N"."""
    index, count = map(int, text.split("/"))
    if not 0 <= index < count:
        raise ValueError(f"expected I/N with 0 <= I < N, got {text}")
    return index, count


def main(arguments=None):
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--device", default="cuda", choices=("cuda", "cpu"))
    parser.add_argument("--only", default="", help="run the cases whose name contains this text")
    parser.add_argument("--shard", type=shard, default=(0, 1), metavar="I/N", help="run part I of N")
    parser.add_argument("--nan-outputs", action="store_true", help="fill outputs and gradients with NaN beforehand")
    options = parser.parse_args(arguments)
    if options.nan_outputs:
        for module in CALLERS:
            module.backends = NanOutputBackends
        sums._StackedResults = NanParts
    print(f"flash_attn {flash_attn.__version__} {flash_attn.__build__}")
    wrong = 0
    cases = sorted(
        (case for case in checks(options.device) if options.only in case[0]), key=lambda case: loaded(case[0])
    )
    part, parts = options.shard
    for name, family, run_check in cases[len(cases) * part // parts : len(cases) * (part + 1) // parts]:
        torch.manual_seed(0)
        started = time.monotonic()
        try:
            with mock.patch.dict(os.environ, {"FLASH_ATTN_FAMILY": family} if family else {}):
                run_check()
            verdict, told = "ok", ""
        except AssertionError as error:
            wrong += 1
            verdict, told = "WRONG", f": {error}"
        print(f"{verdict:<6}{time.monotonic() - started:6.2f} s  {name}{told}", flush=True)
    print(f"{wrong} wrong results")
    return 1 if wrong else 0


if __name__ == "__main__":
    sys.exit(main())
