"""Measures one row: probes and checks every implementation on the same tensors, then times them in turn."""

from __future__ import annotations

import contextlib
import time
import warnings

import torch
from implementations import make_inputs, timed_call
from results import OUT_OF_MEMORY
from timing import CALLS_PER_GRAPH, captured, interleave, summarize

REPORTED_FIELDS = ("batch", "seqlen_q", "seqlen_k", "nheads", "nheads_k", "head_dim", "causal")
REFUSALS = ("No available kernel",)  # how SDPA says that a backend does not take a row


class NotMeasured(Exception):
    """Why an implementation is not measured on a row; `failed`: it should have worked."""

    def __init__(self, reason, failed=False):
        super().__init__(reason)
        self.failed = failed


def probe(implementation, row, inputs, mode, device):
    """Builds the call, runs it once and checks its result. Returns (call, facts); NotMeasured otherwise.

    The facts are of the problem that the implementation computes, which need not be the row's.
    """
    reason = implementation.limits(row, device.type, mode)
    if reason:
        raise NotMeasured(reason)
    row, inputs = implementation.problem(row, inputs)
    try:
        with implementation.context(), warnings.catch_warnings():
            # an SDPA backend that refuses a row warns once per reason before it raises
            warnings.simplefilter("ignore")
            call = timed_call(implementation.call(row, inputs), inputs, mode)
            result, facts = first_run(call, device)
    except NotImplementedError as error:
        raise NotMeasured(f"not implemented: {error}") from error
    except torch.cuda.OutOfMemoryError as error:
        raise NotMeasured(OUT_OF_MEMORY) from error
    except Exception as error:  # other packages and compilers raise any types; one peer must not end the run
        text = first_line(error)
        refused = text.startswith(REFUSALS)
        raise NotMeasured(f"{'refused' if refused else 'failed'}: {text}", failed=not refused) from error
    error = facts["relative_error"] = implementation.error(row, inputs, mode, result)
    if error is not None and not error <= implementation.max_error:
        raise NotMeasured(f"wrong result: relative error {error:.3g}", failed=True)
    return call, {**facts, "flops": row.flops(mode)}


def first_line(error):
    return (str(error).strip() or type(error).__name__).splitlines()[0][:160]


def first_run(call, device):
    """(result, {"peak_bytes": device memory that the second call adds, "result_bytes": its result's part of them}).

    The first call may compile and tune.
    """
    if device.type != "cuda":
        return call(), {}
    call()
    torch.cuda.synchronize(device)
    torch.cuda.reset_peak_memory_stats(device)
    before = torch.cuda.memory_allocated(device)
    result = call()
    torch.cuda.synchronize(device)
    tensors = [result] if isinstance(result, torch.Tensor) else result
    result_bytes = sum(tensor.numel() * tensor.element_size() for tensor in tensors)
    return result, {"peak_bytes": torch.cuda.max_memory_allocated(device) - before, "result_bytes": result_bytes}


def replayable(implementation, call, mode, calls):
    """(context, function) that replays so many calls from a CUDA graph."""
    if mode == "bwd":
        raise NotMeasured("graph replay times fwd and fwd+bwd")
    try:
        return contextlib.nullcontext, captured(call, implementation.context, calls)
    except Exception as error:  # as in probe
        raise NotMeasured(f"not captured: {first_line(error)}", failed=True) from error


def prepare(implementations, row, inputs, mode, device, may_compile=True):
    """Probes every implementation on a row, without those that would have to compile if there is no time for it.

    Returns the calls to time {name: (context, call)}, {name: facts}, {name: why it is not measured} and the set of
    names that failed or gave a wrong result.
    """
    calls, facts, notes, failures = {}, {}, {}, set()
    for implementation in implementations:
        name = implementation.name
        try:
            if implementation.compiles and not may_compile:
                raise NotMeasured("skipped: no time left to compile")
            call, fact = probe(implementation, row, inputs, mode, device)
            timed = implementation.context, call
            if row.timing in ("graph", "replay"):
                timed = replayable(implementation, call, mode, CALLS_PER_GRAPH if row.timing == "graph" else 1)
            calls[name], facts[name] = timed, fact
        except NotMeasured as reason:
            notes[name] = str(reason)
            if reason.failed:
                failures.add(name)
    return calls, facts, notes, failures


def describe(row, mode):
    """What the result says of a row before anything is measured."""
    return {
        **{field: getattr(row.case, field) for field in REPORTED_FIELDS},
        "group": row.group,
        "timing": row.timing,
        "id": row.id,
        "plain_id": row.plain.id,
        "label": row.label,
        "mode": mode,
        "flops": row.flops(mode),
        **({"bytes": row.bytes, "page_size": row.case.page_size} if row.over_cache else {}),
        "sm_mhz": None,
        "results": {},
        "notes": {},
        "failed": [],
    }


def measure(row, mode, implementations, timers, device, budget, may_compile=True, inputs=None):
    """One row of the result; its "seconds" include all set-up. inputs: others than make_inputs() makes."""
    started = time.monotonic()
    entry = describe(row, mode)
    if inputs is None:
        inputs = make_inputs(row, device, requires_grad=mode != "fwd")
    with torch.set_grad_enabled(mode != "fwd"):
        calls, facts, entry["notes"], failures = prepare(implementations, row, inputs, mode, device, may_compile)
        times, entry["sm_mhz"] = interleave(timers[row.timing], calls, budget) if calls else ({}, None)
    for name, samples in times.items():
        summary = summarize(samples)
        summary["ms"] = summary.pop("median")
        entry["results"][name] = {**summary, "tflops": facts[name]["flops"] / summary["ms"] / 1e9, **facts[name]}
    entry["failed"] = sorted(failures)
    entry["seconds"] = round(time.monotonic() - started, 3)
    return entry


def skipped(row, mode, implementations, seconds):
    entry = describe(row, mode)
    entry["notes"] = {impl.name: f"skipped: the budget of {seconds:g} s is spent" for impl in implementations}
    return entry
