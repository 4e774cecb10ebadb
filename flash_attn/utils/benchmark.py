"""Times of a function and of its backward, by `torch.utils.benchmark`, as flash_attn 2.8.3 names them.

`benchmarks/` of the repository has the method by which this package is measured.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.utils import benchmark

Timed = tuple[benchmark.Timer, benchmark.Measurement]


def _timed(call: Callable[[], object], repeats: int, text: str, verbose: bool) -> Timed:
    timer = benchmark.Timer("call()", globals={"call": call}, num_threads=torch.get_num_threads())
    measurement = timer.timeit(repeats)
    if verbose:
        print(text)
        print(measurement)
    return timer, measurement


def _caller(
    fn: Callable[..., Any], inputs: tuple[object, ...], kwinputs: dict[str, object], amp: bool, amp_dtype: torch.dtype
) -> Callable[[], Tensor]:
    device = next((x.device.type for x in inputs if isinstance(x, Tensor)), "cuda")

    def call() -> Tensor:
        with torch.autocast(device, dtype=amp_dtype, enabled=amp):
            result = fn(*inputs, **kwinputs)
            out: Tensor = result[0] if isinstance(result, tuple) else result
            return out

    return call


def _clear_gradients(inputs: tuple[object, ...]) -> None:
    for x in inputs:
        if isinstance(x, Tensor):
            x.grad = None


def _gradient(out: Tensor, grad: Tensor | None) -> Tensor:
    if grad is None:
        return torch.randn_like(out)
    if grad.shape != out.shape:
        raise RuntimeError(f"grad: expected shape {list(out.shape)}, got {list(grad.shape)}")
    return grad


def benchmark_forward(
    fn: Callable[..., object],
    *inputs: object,
    repeats: int = 10,
    desc: str = "",
    verbose: bool = True,
    amp: bool = False,
    amp_dtype: torch.dtype = torch.float16,
    **kwinputs: object,
) -> Timed:
    """Time fn(*inputs, **kwinputs) -> (timer, measurement). amp: under autocast to amp_dtype. verbose: print it."""
    return _timed(_caller(fn, inputs, kwinputs, amp, amp_dtype), repeats, f"{desc} - Forward pass", verbose)


def benchmark_backward(
    fn: Callable[..., object],
    *inputs: object,
    grad: Tensor | None = None,
    repeats: int = 10,
    desc: str = "",
    verbose: bool = True,
    amp: bool = False,
    amp_dtype: torch.dtype = torch.float16,
    **kwinputs: object,
) -> Timed:
    """Time the backward of fn's (first) result, for the gradient grad or a random one. See `benchmark_forward`."""
    out = _caller(fn, inputs, kwinputs, amp, amp_dtype)()
    grad = _gradient(out, grad)

    def backward() -> None:
        _clear_gradients(inputs)  # accumulating would be timed too
        out.backward(grad, retain_graph=True)

    return _timed(backward, repeats, f"{desc} - Backward pass", verbose)


def benchmark_combined(
    fn: Callable[..., object],
    *inputs: object,
    grad: Tensor | None = None,
    repeats: int = 10,
    desc: str = "",
    verbose: bool = True,
    amp: bool = False,
    amp_dtype: torch.dtype = torch.float16,
    **kwinputs: object,
) -> Timed:
    """Time forward and backward together. See `benchmark_backward`."""
    forward = _caller(fn, inputs, kwinputs, amp, amp_dtype)
    grad = _gradient(forward(), grad)

    def both() -> None:
        _clear_gradients(inputs)
        forward().backward(grad)

    return _timed(both, repeats, f"{desc} - Forward + Backward pass", verbose)


def benchmark_fwd_bwd(fn: Callable[..., object], *inputs: object, **options: Any) -> tuple[Timed, Timed]:
    """(`benchmark_forward`, `benchmark_backward`), whose arguments these are."""
    forward = {name: x for name, x in options.items() if name != "grad"}
    return benchmark_forward(fn, *inputs, **forward), benchmark_backward(fn, *inputs, **options)


def benchmark_all(fn: Callable[..., object], *inputs: object, **options: Any) -> tuple[Timed, Timed, Timed]:
    """(`benchmark_forward`, `benchmark_backward`, `benchmark_combined`), whose arguments these are."""
    return *benchmark_fwd_bwd(fn, *inputs, **options), benchmark_combined(fn, *inputs, **options)


def pytorch_profiler(
    fn: Callable[..., object],
    *inputs: object,
    trace_filename: str | None = None,
    backward: bool = False,
    amp: bool = False,
    amp_dtype: torch.dtype = torch.float16,
    cpu: bool = False,
    verbose: bool = True,
    **kwinputs: object,
) -> None:
    """Profile a call, and its backward, after 30 calls that are not. verbose: print the table. cpu: its events too."""
    call = _caller(fn, inputs, kwinputs, amp, amp_dtype)

    def run() -> None:
        out = call()
        if backward:
            _clear_gradients(inputs)
            out.backward(torch.ones_like(out))

    for _ in range(30):
        run()
    activities = [torch.profiler.ProfilerActivity.CUDA] if torch.cuda.is_available() else []
    if cpu or not activities:
        activities.append(torch.profiler.ProfilerActivity.CPU)
    with torch.profiler.profile(activities=activities, record_shapes=True, with_stack=True) as profile:
        run()
    if verbose:
        print(profile.key_averages().table(row_limit=50))
    if trace_filename is not None:
        profile.export_chrome_trace(trace_filename)


def benchmark_memory(
    fn: Callable[..., object], *inputs: object, desc: str = "", verbose: bool = True, **kwinputs: object
) -> float:
    """The most CUDA memory allocated during a call, in GB of 2^20 * 1000 bytes."""
    torch.cuda.empty_cache()
    torch.cuda.reset_peak_memory_stats()
    torch.cuda.synchronize()
    fn(*inputs, **kwinputs)
    torch.cuda.synchronize()
    memory = torch.cuda.max_memory_allocated() / (2**20 * 1000)
    if verbose:
        print(f"{desc} max memory: {memory}GB")
    return memory
