"""Two builds of the extension in one process, and their calls by the positional entry points that both have.

Later builds may add parameters with defaults after those that are given here, so every build since these can be timed.
"""

from __future__ import annotations

import importlib.machinery
import importlib.util
import itertools
import json
import sys
from dataclasses import dataclass
from pathlib import Path
from types import ModuleType

import torch
from rows import BACKWARD_GROUPS, windows
from timing import CALLS_PER_GRAPH

MODULE = "flash_attn_2_cuda"


@dataclass(frozen=True)
class Build:
    name: str  # old or new
    module: ModuleType
    site: Path | None = None  # what holds the module
    info: dict | None = None

    @property
    def commit(self):
        return (self.info or {}).get("commit")


def module_file(place):
    """The one extension module in a folder, or the module itself."""
    found = [place] if place.is_file() else sorted(place.glob(f"{MODULE}*.so"))
    if len(found) != 1:
        raise ValueError(f"{place}: expected one {MODULE}*.so, found {len(found)}")
    return found[0].resolve()


def load_build(name, place):
    """The build in `place`, as a submodule of the build's name: pybind11 gives the module that it first made of a full
    name, whatever the file, and only the last part names the initialisation function."""
    file = module_file(Path(place))
    full_name = f"{name}.{MODULE}"
    loader = importlib.machinery.ExtensionFileLoader(full_name, str(file))
    module = importlib.util.module_from_spec(importlib.util.spec_from_loader(full_name, loader))
    loader.exec_module(module)
    for known in (full_name, MODULE):  # else whoever imports it by name gets the build that was loaded last
        sys.modules.pop(known, None)
    return Build(name, module, file.parent, json.loads(module.build_info()))


def scale_of(case):
    return case.head_dim**-0.5


def forward(build, row, inputs):
    """The call of the forward -> [out, lse, S_dmask, rng_state(, max_logit)]."""
    case = row.case
    mask = (case.causal, *case.window, case.softcap)
    last = (False, None)  # return_softmax, gen
    named = {"sinks": inputs.sinks, "return_max_logit": case.max_logit}
    if row.seqlens:
        cu, longest = inputs.cu_seqlens, max(row.seqlens)
        arguments = (
            inputs.q, inputs.k, inputs.v, None, cu, cu, None, None, None, inputs.alibi_slopes, longest, longest,
            case.dropout, scale_of(case), False, *mask, *last, 0,
        )  # fmt: skip
        return lambda: build.module.varlen_fwd(*arguments, **named)
    arguments = (
        inputs.q, inputs.k, inputs.v, None, inputs.alibi_slopes, case.dropout, scale_of(case), *mask, *last,
    )  # fmt: skip
    return lambda: build.module.fwd(*arguments, **named)


def backward(build, row, inputs, saved):
    """The call of the backward -> [dq, dk, dv, softmax_d(, dsinks)]; saved: (out, lse, rng_state) of one forward."""
    case, (out, lse, rng_state) = row.case, saved
    tensors = (inputs.dout, inputs.q, inputs.k, inputs.v, out, lse, None, None, None)
    last = (case.causal, *case.window, case.softcap, row.group in BACKWARD_GROUPS, None, rng_state)
    if row.seqlens:
        cu, longest = inputs.cu_seqlens, max(row.seqlens)
        arguments = (
            *tensors, cu, cu, inputs.alibi_slopes, longest, longest, case.dropout, scale_of(case), False, *last,
        )  # fmt: skip
        return lambda: build.module.varlen_bwd(*arguments, sinks=inputs.sinks)
    arguments = (*tensors, inputs.alibi_slopes, case.dropout, scale_of(case), *last)
    return lambda: build.module.bwd(*arguments, sinks=inputs.sinks)


def over_cache(build, row, inputs):
    """The call over a KV cache -> [out, lse]. As layers of a model, with a plan once per step, in rows timed so."""
    case, module, plan, out = row.case, build.module, None, None
    left, right = windows(case)
    capacity = case.seqlen_k if inputs.table is None else inputs.table.shape[1] * case.page_size
    sizes = (
        case.batch, case.seqlen_q, case.append, case.nheads, case.nheads_k, case.head_dim, capacity, right == 0, left,
        right, 0, case.invariant,
    )  # fmt: skip
    of_plan, of_call = {}, {}
    if inputs.qv is not None:
        of_plan, of_call = {"head_dim_v": case.head_dim_v}, {"qv": inputs.qv}
    if row.timing == "graph":
        out = torch.empty_like(inputs.q if inputs.qv is None else inputs.qv)
        plan = module.kvcache_plan(inputs.lengths, None, *sizes, None, **of_plan)
    new = inputs.new or (None, None)
    layers, count = itertools.cycle(inputs.caches), itertools.count()

    def call():
        if plan is not None and next(count) % CALLS_PER_GRAPH == 0:
            module.kvcache_plan(inputs.lengths, None, *sizes, plan, **of_plan)
        return module.fwd_kvcache(
            inputs.q, *next(layers), *new, inputs.lengths, inputs.cos, inputs.sin, None, None, inputs.table,
            inputs.alibi_slopes, out, (case.head_dim + case.head_dim_v) ** -0.5, case.causal, *case.window,
            case.softcap, False, 0, plan, case.invariant, **of_call,
        )  # fmt: skip

    return call


def modes_of(row):
    """What is measured of a row: graphs and caches have a forward only."""
    if row.over_cache or row.timing != "event":
        return ("fwd",)
    return ("bwd",) if row.group in BACKWARD_GROUPS else ("fwd", "bwd")


def make_call(build, row, mode, inputs, saved):
    if row.over_cache:
        return over_cache(build, row, inputs)
    return forward(build, row, inputs) if mode == "fwd" else backward(build, row, inputs, saved)


def results_of(mode, results):
    """The tensors of a call that are compared: out, or dq, dk and dv."""
    return list(results[: 1 if mode == "fwd" else 3])
