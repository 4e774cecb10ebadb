"""Times attention with masks and biases, of this package and of peers, and the kernels that plan a mask.

python benchmarks/lab/masks.py --out FILE.json [--peers cudnn_flex]    a minute, and what peers compile; on a CPU in
                                                                       miniature

FLOPs count visible scores. A peer prepares its mask once, before the timed calls; our calls plan theirs each time. The
last rows of a head are checked against float64, and all results against ours.
"""

from __future__ import annotations

import argparse
import itertools
import json
import re
import statistics
import sys
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import Callable

sys.path[:0] = map(str, Path(__file__).resolve().parents[:2])  # absent under PYTHONSAFEPATH

import torch
import torch.nn.functional as F
import torch_peers
from check import relative, relative_error
from environment import describe_origin
from implementations import BACKWARD, IMPLEMENTATIONS, Implementation, Inputs, make_inputs
from measure import measure
from report import full_report
from rows import MODE_FLOPS, Row
from shared import Case, row_teller
from timing import Budget, make_timers

import flash_attn.sdpa
from flash_attn import AttentionMask

DTYPE, BLOCK, ROWS = "bfloat16", 128, 30
PLANNED = (32768, 131072)  # keys


@dataclass
class Mask:
    """ours: of a call with `causal`, or a bool tensor; intervals: int32 (n, 2, sq), ascending, of keys that each query
    sees, not of a bool tensor; block_mask(module): FlexAttention's, of its module; cu_seqlens: of documents."""

    ours: AttentionMask | torch.Tensor
    intervals: torch.Tensor | None = None
    block_mask: Callable | None = None
    causal: bool = False
    cu_seqlens: torch.Tensor | None = None

    @property
    def pairs(self):
        return int(self.ours.sum() if self.intervals is None else self.intervals.long().diff(dim=1).sum())

    def seen(self, queries):
        """Of the last queries."""
        if self.intervals is None:
            return self.ours[-queries:]
        keys = torch.arange(self.intervals.shape[-1], device=self.intervals.device)
        begin, end = self.intervals[:, :, -queries:, None].unbind(1)
        return ((keys >= begin) & (keys < end)).any(0)


@dataclass
class MaskInputs(Inputs):
    mask: Mask | None = None
    bias: torch.Tensor | None = None
    found: list = field(default_factory=list)  # the results of ours

    @property
    def leaves(self):
        return super().leaves if self.bias is None else (*super().leaves, self.bias)

    def sample_options(self, queries):
        bias = None if self.bias is None else self.bias[:, -1:, -queries:].detach()
        return {"mask": None if self.mask is None else self.mask.seen(queries), "attn_bias": bias}


@dataclass(frozen=True)
class MaskRow(Row):
    """pairs: visible ones of a head; bias_heads: 1 where heads share one, 0 without a bias."""

    label: str = ""
    pairs: int = 0
    bias_heads: int = 0

    def flops(self, mode="fwd"):
        return 4.0 * self.case.nheads * self.case.head_dim * self.pairs * MODE_FLOPS[mode]


def error(row, inputs, mode, result):
    """The largest of the errors relative to float64 and to the first result for these inputs, which is ours."""
    results = [result] if isinstance(result, torch.Tensor) else result
    errors = [relative_error(row, inputs, mode, result)]
    if inputs.mask is not None or inputs.bias is not None:
        inputs.found = inputs.found or results
        errors += map(relative, results, inputs.found)
    return max(errors, key=lambda x: (x != x, x))


# ---- the problems ----------------------------------------------------------------------------------------------------


def of_ranges(begin, end, mask_mod, ours=None, **more):
    """One interval a query."""
    s = len(end)
    ours = AttentionMask.query_ranges(begin, end) if ours is None else ours
    return Mask(
        ours, torch.stack((begin, end))[None],
        lambda module: module.create_block_mask(mask_mod, None, None, s, s, device=end.device), **more,
    )  # fmt: skip


def documents(lengths, rows):
    """Causal, of these lengths as far as there are rows."""
    cu = torch.tensor([0, *lengths]).cumsum(0).clamp(max=len(rows)).unique().to(rows)
    ids, ours = torch.bucketize(rows, cu, right=True) - 1, AttentionMask.documents(cu, len(rows))

    def mask_mod(b, h, i, j):
        return (ids[i] == ids[j]) & (i >= j)

    return of_ranges(cu[ids], rows + 1, mask_mod, ours, causal=True, cu_seqlens=cu)


def window(width, rows):
    return of_ranges((rows - width + 1).clamp(min=0), rows + 1, lambda b, h, i, j: (i >= j) & (i - j < width))


def prefix_lm(prefix, rows):
    ours, end = AttentionMask.prefix_lm(torch.tensor(prefix).to(rows), len(rows)), (rows + 1).clamp(min=prefix)
    return of_ranges(torch.zeros_like(end), end, lambda b, h, i, j: (i >= j) | (j < prefix), ours)


def blocks(part, rows):
    """Random blocks, as many of each row of blocks."""
    s, n = len(rows), len(rows) // BLOCK
    count = max(1, round(part * n))
    order = torch.rand(n, n, generator=torch.Generator().manual_seed(2)).argsort(-1)
    edges = F.pad(torch.zeros(n, n).scatter(1, order[:, :count], 1), (1, 1)).diff()
    begin, end = (torch.where(edges == sign, torch.arange(n + 1), n).sort(-1).values for sign in (1, -1))
    runs = BLOCK * torch.stack((begin, end))[:, :, : int((edges > 0).sum(-1).max())]
    intervals = runs.permute(2, 0, 1).repeat_interleave(BLOCK, -1).to(rows).contiguous()
    counts, order = torch.full((1, 1, n), count).to(rows), order[None, None].to(rows)
    lists = torch.zeros_like(counts), order, counts, order  # partial blocks, then whole ones
    ours = AttentionMask.from_block_lists(*lists, (BLOCK, BLOCK), seqlen_q=s, seqlen_k=s)
    return Mask(ours, intervals, lambda module: module.BlockMask.from_kv_blocks(*lists, BLOCK_SIZE=BLOCK))


def bools_of_window(width, rows):
    distance = rows[:, None] - rows
    return Mask((distance >= 0) & (distance < width))


def masks(n):
    """[(label, rows, the function of the rows' numbers that makes the mask)], lengths divided by n."""
    mixed = (torch.randn(256, generator=torch.Generator().manual_seed(0)).exp() * 1024 / n).int().clamp(min=1)
    lengths = {f"documents of {x}": [x // n] * (32768 // x) for x in (8192, 2048)}
    lengths["documents, log-normal"] = mixed.tolist()
    return [
        *((label, 32768 // n, partial(documents, of)) for label, of in lengths.items()),
        ("window of 4096", 32768 // n, partial(window, 4096 // n)),
        ("prefix, 16k", 16384 // n, partial(prefix_lm, 4096 // n)),
        *((f"blocks, {part:.0%}", 32768 // n, partial(blocks, part)) for part in (0.1, 0.25, 0.5)),
        ("bools, causal, 8k", 8192 // n, partial(bools_of_window, 8192 // n)),
        ("bools, window of 1024, 8k", 8192 // n, partial(bools_of_window, 1024 // n)),
        ("bools at random, 8k", 8192 // n, lambda rows: Mask(torch.rand(2 * [len(rows)], device=rows.device) < 0.5)),
    ]


def problems(device):
    """(row, mask or None) in turn; on a CPU in miniature."""
    n, heads = (1, 16) if device.type == "cuda" else (64, 2)
    for label, s, make in masks(n):
        mask = make(torch.arange(s, device=device, dtype=torch.int32))
        group = "bool" if mask.intervals is None else "masks"
        yield MaskRow(group, Case(1, s, s, heads, heads, 128, DTYPE), label=label, pairs=mask.pairs), mask
    s = 4096 // n
    for head_dim, (of, bias_heads) in itertools.product((64, 128), (("each head", heads), ("all heads", 1))):
        case = Case(1, s, s, heads, heads, head_dim, DTYPE)
        yield MaskRow("bias", case, label=f"bias of {of}, 4k, d {head_dim}", pairs=s * s, bias_heads=bias_heads), None


def inputs_of(row, mask, device, requires_grad):
    inputs, bias = make_inputs(row, device, requires_grad), None
    if row.bias_heads:
        shape = 1, row.bias_heads, row.case.seqlen_q, row.case.seqlen_k
        bias = torch.randn(shape, device=device, dtype=inputs.q.dtype, requires_grad=requires_grad)
    return MaskInputs(**vars(inputs), mask=mask, bias=bias)


# ---- the implementations ---------------------------------------------------------------------------------------------


def ours(row, inputs):
    options = {} if inputs.mask is None else {"mask": inputs.mask.ours, "causal": inputs.mask.causal}
    return lambda: flash_attn.flash_attn_func(inputs.q, inputs.k, inputs.v, attn_bias=inputs.bias, **options)


def packed(row, inputs):
    q, k, v = (x.squeeze(0) for x in (inputs.q, inputs.k, inputs.v))
    cu, longest = inputs.mask.cu_seqlens, int(inputs.mask.cu_seqlens.diff().max())
    call = flash_attn.flash_attn_varlen_func
    return lambda: call(q, k, v, cu, cu, longest, longest, causal=True).unsqueeze(0)


def flex(row, inputs):
    from torch.nn.attention import flex_attention

    attention, block_mask = torch_peers.compiled_flex(), inputs.mask.block_mask(flex_attention)
    tensors = [x.transpose(1, 2) for x in (inputs.q, inputs.k, inputs.v)]
    return lambda: attention(*tensors, block_mask=block_mask).transpose(1, 2)


def cudnn_flex(row, inputs):
    from cudnn.flex_attention import create_mask_plan, flex_attn_func

    q, k, v = inputs.q, inputs.k, inputs.v
    bounds = F.pad(inputs.mask.intervals.flatten(0, 1), (0, 0, 1, 0))  # its first interval is [0, bounds[0]): empty
    plan = create_mask_plan(bounds[None].contiguous(), q, k, v)
    return lambda: flex_attn_func(q, k, v, mask_plan=plan)


def sdpa(row, inputs):
    tensors = [x.transpose(1, 2) for x in (inputs.q, inputs.k, inputs.v)]
    attn_mask = inputs.mask.ours if inputs.bias is None else inputs.bias
    return lambda: F.scaled_dot_product_attention(*tensors, attn_mask=attn_mask).transpose(1, 2)


def changed(name, build, **more):
    return replace(IMPLEMENTATIONS[name], build=build, error=error, **{"further_limits": lambda *row: None, **more})


OURS, FLEX, EFFICIENT = changed("ours", ours), changed("flex", flex), changed("sdpa_efficient", sdpa)
IN_SDPA = replace(OURS, build=sdpa, context=partial(flash_attn.sdpa.use, ("cuda", "cpu")))
PLAIN = changed("ours_plain", ours, problem=lambda row, inputs: (row, replace(inputs, bias=None)))
PACKED = replace(
    OURS, name="ours_packed", title="flash_attn (this package), packed sequences", build=packed,
    further_limits=lambda row, *call: None if "documents" in row.label else "no packed sequences",
)  # fmt: skip
CUDNN = Implementation(
    "cudnn_flex", "cudnn.flex_attention", cudnn_flex, frozenset({BACKWARD}), package="cudnn", error=error,
    further_limits=lambda *row: None if CUDNN.installed else f"needs {CUDNN.needed}",
)  # fmt: skip
MEASURED = {"masks": (OURS, PACKED, FLEX, CUDNN), "bool": (IN_SDPA, EFFICIENT), "bias": (OURS, PLAIN, EFFICIENT)}
PEERS = ("flex", "cudnn_flex", "sdpa_efficient")


def kernel_times(call, count=9):
    """{kernel of a plan, or "together": median µs}; the second one starts early."""
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CUDA]) as profile:
        for _ in range(count):
            call()
            torch.cuda.synchronize()
    events = [event for event in profile.events() if event.device_type == torch.autograd.DeviceType.CUDA]
    kernels = sorted((x.time_range.start, x.time_range.end, name[1]) for x in events
                     if (name := re.search(r"\bmask_(\w+)_kernel", x.name)))  # fmt: skip
    of_call, found = len(kernels) // count, {}
    for first in range(0, of_call * count, of_call or 1):
        call_kernels = kernels[first : first + of_call]
        found.setdefault("together", []).append(call_kernels[-1][1] - call_kernels[0][0])
        for begin, end, name in call_kernels:
            found.setdefault(name, []).append(end - begin)
    return {name: statistics.median(times) for name, times in found.items()}


def plan_times(device):
    """What the kernels of a plan take for one head; nothing on a CPU."""
    found = []
    for s in PLANNED if device.type == "cuda" else ():
        rows = torch.arange(s, device=device, dtype=torch.int32)
        inputs = make_inputs(Row("plan", Case(1, s, s, 1, 1, 64, DTYPE)), device, requires_grad=True)
        made = {"window of 4096": window(4096, rows), "documents of 8192": documents([8192] * (s // 8192), rows)}
        for label, mask in made.items():
            by_ranges = AttentionMask.query_ranges(*mask.intervals[0])  # a call of documents may need no plan
            forward = partial(flash_attn.flash_attn_func, inputs.q, inputs.k, inputs.v, mask=by_ranges)
            backward = partial(torch.autograd.grad, forward(), inputs.leaves, inputs.dout, retain_graph=True)
            us = {"fwd": kernel_times(forward), "bwd": kernel_times(backward)}
            found.append({"label": label, "keys": s, "us": us})
    return found


def parse(arguments):
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu", type=torch.device)
    parser.add_argument("--peers", nargs="*", default=PEERS, choices=PEERS, help="as far as they are installed")
    parser.add_argument("--out", type=Path, required=True)
    return parser.parse_args(arguments)


def main(arguments=None):
    options, told = parse(arguments), row_teller(ROWS)
    device, timers = options.device, make_timers(options.device)
    budget = Budget(20, 150.0, 10.0, 2000.0) if device.type == "cuda" else Budget(1, 1.0, 0.0)
    titles = {each.name: each.title for group in MEASURED.values() for each in group}
    result = {**describe_origin(device), "dtype": DTYPE, "implementations": titles, "groups": list(MEASURED)}
    result.update(rows=[], plan=[])
    for row, mask in problems(device):
        measured = [x for x in MEASURED[row.group] if x.name not in PEERS or x.name in options.peers]
        for mode in ("fwd", "bwd"):
            inputs = inputs_of(row, mask, device, requires_grad=mode != "fwd")
            entry = measure(row, mode, measured, timers, device, budget, inputs=inputs)
            result["rows"].append(entry)
            times = ", ".join(f"{name} {x['ms']:.3f}" for name, x in entry["results"].items())
            told(f"{row.label} {mode}, ms: {times} {entry['notes'] or ''}")
    result["plan"] = plan_times(device)  # last: a profiler slows what comes after it
    options.out.write_text(json.dumps(result, indent=1) + "\n", encoding="utf-8")
    print("\n".join([*full_report(result), *map(str, result["plan"])]))
    return 1 if any(x.startswith("ours") for entry in result["rows"] for x in entry["failed"]) else 0


if __name__ == "__main__":
    sys.exit(main())
