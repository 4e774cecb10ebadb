"""Errors of out, LSE and gradients against float64, of these kernels and of peers on the same tensors.

python benchmarks/lab/accuracy.py --out FILE.json [--seed 1]      a minute on an H200; on a CPU in miniature

Logits: normal of three widths; one key 10 nats above the others in all rows (a sink: the first; dominant: any); one key
only; ALiBi. These kernels run in both families, with the lagging and with the exact row max. `emulated` has
FlashAttention-2's arithmetic: P relative to the row max, rounded, over the sum of P; `rounded` rounds the exact result.
The mask that a peer's dropout drew is read from its results for values that are rows of a unit matrix.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import sys
import warnings
from dataclasses import dataclass, replace
from operator import itemgetter
from pathlib import Path

sys.path[:0] = map(str, Path(__file__).resolve().parents[:2])  # absent under PYTHONSAFEPATH

import package_peers
import torch
import torch_peers
from accuracy_table import EMULATED, FIGURES, ROUNDED, block
from environment import describe_origin
from implementations import IMPLEMENTATIONS, make_inputs, ours
from measure import first_line
from rows import Row, scale_down
from shared import accuracy_cases, attention_by_rows, row_teller
from timing import Allowance

EXACT, MMA_SYNC = {"FLASH_ATTN_ROW_MAX": "exact"}, {"FLASH_ATTN_FAMILY": "mma_sync"}
OURS = {"ours": {}, "ours_exact": EXACT, "mma_sync": MMA_SYNC, "mma_sync_exact": {**EXACT, **MMA_SYNC}}
COMPUTED = {EMULATED: "FlashAttention-2's arithmetic in float64", ROUNDED: "the exact result, rounded"}
RAISED = 10.0  # nats of one key


@dataclass(frozen=True)
class Problem:
    logits: str
    row: Row

    @property
    def kind(self):
        case = self.row.case
        kinds = {
            "pages": case.page_size, "decode": self.row.over_cache, "packed": case.seqlens, "dropout": case.dropout,
            "window": case.window[0] >= 0, "one key": case.seqlen_k == 1, "few queries": case.seqlen_q < case.seqlen_k,
            "causal": case.causal,
        }  # fmt: skip
        return next((kind for kind, applies in kinds.items() if applies), "full")

    @property
    def has_backward(self):
        return not self.row.over_cache and self.kind != "one key"


def problems(device_type):
    """Those of the shared table; on a CPU in miniature, of one head dim."""
    if device_type == "cuda":
        return [Problem(logits, Row("accuracy", case)) for logits, case in accuracy_cases()]
    return [Problem(logits, scale_down(Row("accuracy", case), 32)) for logits, case in accuracy_cases((64,))]


def inputs_of(problem, device, seed):
    inputs = make_inputs(problem.row, device, seed=seed)
    if problem.logits.startswith("std "):
        inputs.q.mul_(float(problem.logits.removeprefix("std ")))
    elif problem.logits in ("sink", "dominant"):
        key = 0 if problem.logits == "sink" else problem.row.case.seqlen_k // 3
        inputs.q[..., 0], inputs.k[..., 0] = 1.0, 0.0
        inputs.k[:, key, :, 0] = RAISED * problem.row.case.head_dim**0.5
    return inputs


# ---- float64 ---------------------------------------------------------------------------------------------------------


def sequences(problem, inputs):
    """[(q, k, v, dout)], each (b, s, h, d), that attend within themselves; dout is None where it has no backward."""
    row = problem.row
    if row.over_cache:
        keys = inputs.caches[0]
        if inputs.table is not None:
            keys = [x[inputs.table.long()].flatten(1, 2)[:, : row.case.seqlen_k] for x in keys]
        return [(inputs.q, *keys, None)]
    tensors = inputs.q, inputs.k, inputs.v, inputs.dout
    if row.seqlens:
        return list(zip(*([x[None] for x in tensor.split(row.seqlens)] for tensor in tensors)))
    return [tensors if problem.has_backward else (*tensors[:3], None)]


def exact(problem, inputs, keep=None):
    """attention_by_rows() of the whole problem, laid out as the results of a call."""
    case = problem.row.case
    options = {"causal": case.causal, "window": case.window, "alibi_slopes": inputs.alibi_slopes}
    options.update(keep=keep, rp_dropout=1.0 if keep is None else 1 / (1 - case.dropout))
    parts = [attention_by_rows(*tensors, **options) for tensors in sequences(problem, inputs)]
    if not problem.row.seqlens:
        return parts[0]
    return {name: torch.cat([part[name][0] for part in parts], int(name == "lse")) for name in parts[0]}


# ---- the implementations ---------------------------------------------------------------------------------------------


def kept(call, inputs, case):
    """Which probabilities the dropout of a call keeps, (b, h, sq, sk)."""
    blocks = []
    for first in range(0, case.seqlen_k, case.head_dim):
        values, keys = torch.zeros_like(inputs.v), min(case.head_dim, case.seqlen_k - first)
        values[:, first : first + keys, :, :keys] = torch.eye(keys, device=values.device)[:, None]
        blocks.append(call(replace(inputs, v=values))[..., :keys])
    return torch.cat(blocks, -1).transpose(1, 2) != 0


second = itemgetter(1)


def cudnn_lse(row, inputs):
    q, k, v = (x.transpose(1, 2) for x in (inputs.q, inputs.k, inputs.v))
    operator = torch.ops.aten._scaled_dot_product_cudnn_attention
    return lambda: operator(q, k, v, None, True, 0.0, row.case.causal)[1].reshape(q.shape[:-1])


def flash_lse(row, inputs):
    if inputs.q.is_cuda:
        return torch_peers.torch_flash_op(row, inputs, second)
    q, k, v = (x.transpose(1, 2) for x in (inputs.q, inputs.k, inputs.v))
    return lambda: torch.ops.aten._scaled_dot_product_flash_attention_for_cpu(q, k, v, 0.0, row.case.causal)[1]


LSE = {
    "ours": lambda row, inputs: lambda: ours(row, inputs, return_attn_probs=True)()[1],
    "sdpa_flash": flash_lse,
    "sdpa_cudnn": cudnn_lse,
    "flash_attn_3": lambda *problem: package_peers.flash_attn_3(*problem, second, return_attn_probs=True),
    "flash_attn_4": lambda *problem: package_peers.flash_attn_4(*problem, second, return_lse=True),
}
PEERS = tuple(name for name in LSE if name != "ours")


def limits(name, problem, mode, device_type):
    case = problem.row.case
    compiled = case.head_dim == 128 and case.dtype == "bfloat16" and problem.kind in ("full", "causal")
    if name == "flash_attn_4" and not compiled:
        return "compiled for head dim 128 in bfloat16 only"
    return IMPLEMENTATIONS[name].limits(problem.row, device_type, mode)


@contextlib.contextmanager
def environment(settings):
    os.environ.update(settings)
    try:
        yield
    finally:
        for name in settings:
            del os.environ[name]


def call_all(name, problem, inputs, found, device_type):
    """Adds to `found` "out" and, as far as the implementation has them, "dq", "dk", "dv", "lse" and "keep", the mask of
    its dropout: what was added stays where a later call raises."""
    row, peer = problem.row, name if name in PEERS else "ours"
    implementation = IMPLEMENTATIONS[peer]

    def call(inputs):
        torch.manual_seed(0)  # of dropout
        return implementation.call(row, inputs)()

    with environment(OURS.get(name, {})), implementation.context(), warnings.catch_warnings():
        warnings.simplefilter("ignore")  # an SDPA backend that refuses a row warns before it raises
        with torch.no_grad():
            out = call(inputs)
            if row.case.dropout:
                found["keep"] = kept(call, inputs, row.case)
        found["out"] = out
        if problem.has_backward and not limits(peer, problem, "bwd", device_type):
            leaves = [x.detach().requires_grad_() for x in (inputs.q, inputs.k, inputs.v)]
            out = call(replace(inputs, **dict(zip("qkv", leaves))))
            found.update(zip(("dq", "dk", "dv"), torch.autograd.grad(out, leaves, inputs.dout)))
        if not row.over_cache and not row.case.dropout:
            with torch.no_grad():
                found["lse"] = LSE[peer](row, inputs)()


# ---- measuring -------------------------------------------------------------------------------------------------------


def relative_error(value, reference):
    return ((value.double() - reference).norm() / reference.norm()).item()


def largest_errors(value, reference):
    """Mean of the largest thousandth, and the largest, relative to the root mean square."""
    errors = (value.double() - reference).abs().flatten()
    largest = errors.topk(-(-len(errors) // 1000)).values
    return (torch.stack([largest.mean(), largest[0]]) * len(errors) ** 0.5 / reference.norm()).tolist()


def shortened(number):
    """Four digits; an int where those are enough."""
    value = float(f"{number:.4g}")
    return int(value) if value.is_integer() else value


def figures(found, reference):
    """The numbers of FIGURES in millionths; None for a missing number and for a result of another shape."""
    found = {name: value for name, value in found.items() if value.shape == reference[name].shape}
    errors = {name: relative_error(value, reference[name]) for name, value in found.items()}
    errors.update(zip(FIGURES[1:3], largest_errors(found["out"], reference["out"])))
    return [shortened(1e6 * errors[name]) if name in errors else None for name in FIGURES]


def measure(problem, names, device, seed):
    """One row of the result."""
    row, inputs, results, notes = problem.row, inputs_of(problem, device, seed), {}, {}
    reference = exact(problem, inputs)
    if not row.case.dropout:
        computed = {EMULATED: reference[EMULATED], ROUNDED: reference["out"].to(inputs.q.dtype)}
        results = {name: figures({"out": out}, reference) for name, out in computed.items()}
    for name in names:
        found, reason = {}, limits(name if name in PEERS else "ours", problem, "fwd", device.type)
        try:
            if reason is None:
                call_all(name, problem, inputs, found, device.type)
        except Exception as error:  # other packages raise any types; one peer must not end the run
            reason = first_line(error)
        if reason is not None:
            notes[name] = reason
        keep = found.pop("keep", None)
        if found:
            results[name] = figures(found, reference if keep is None else exact(problem, inputs, keep))
    facts = {"label": row.label, "kind": problem.kind, "logits": problem.logits, "dtype": row.case.dtype}
    return {**facts, "results": results, "notes": notes}


def parse(arguments):
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu", type=torch.device)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--peers", nargs="*", default=list(PEERS), choices=PEERS, help="as far as they are installed")
    parser.add_argument("--seconds", type=float, default=150, help="rows that would start later are left out (150)")
    parser.add_argument("--out", type=Path, required=True)
    return parser.parse_args(arguments)


def main(arguments=None):
    options = parse(arguments)
    peers = [name for name in options.peers if IMPLEMENTATIONS[name].installed]
    names, work = [*(OURS if options.device.type == "cuda" else ["ours"]), *peers], list(problems(options.device.type))
    titles = {**COMPUTED, **{name: str(OURS.get(name) or IMPLEMENTATIONS[name].title) for name in names}}
    result = {**describe_origin(options.device), "dtype": "bfloat16 and float16", "implementations": titles, "rows": []}
    allowance = Allowance(options.seconds, len(work))
    done = row_teller(len(work))
    for problem in work:
        if allowance.spent() < options.seconds:
            result["rows"].append(measure(problem, names, options.device, options.seed))
            entry = result["rows"][-1]
            told = ", ".join(f"{name} {numbers[0]:.0f}" for name, numbers in entry["results"].items())
            done(f"{entry['logits']}, {entry['dtype']} {entry['label']}: {told} {entry['notes'] or ''}")
    options.out.write_text(json.dumps(result, indent=1) + "\n", encoding="utf-8")
    print("\n".join(block(result)))
    left_out = len(work) - len(result["rows"])
    print(f"{allowance.spent():.0f} s" + f", {left_out} rows left out" * (left_out > 0))
    return 1 if left_out or any(set(OURS) & set(entry["notes"]) for entry in result["rows"]) else 0


if __name__ == "__main__":
    sys.exit(main())
