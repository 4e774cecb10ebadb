"""What a GPU gives at most: the fastest read of its memory, torch's product of e4m3 matrices."""

from __future__ import annotations

import torch

MATRIX = 8192  # rows and columns


def event_ms(call, repeats):
    """The shortest time of several calls."""
    best = float("inf")
    for _ in range(repeats):
        start, stop = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
        start.record()
        call()
        stop.record()
        stop.synchronize()
        best = min(best, start.elapsed_time(stop))
    return best


def read_ceiling(device, gib=4, repeats=20):
    """{"gbs": fastest read of device memory seen, "method": how}; the share of a row is measured against it."""
    buffer = torch.ones(gib * 2**28, dtype=torch.float32, device=device)
    methods = {"torch.sum": lambda: buffer.sum(), "torch.amax": lambda: buffer.amax()}
    best = {name: buffer.numel() * 4 / event_ms(read, repeats) / 1e6 for name, read in methods.items()}
    method = max(best, key=best.get)
    return {"gbs": best[method], "method": method}


def fp8_products(device, repeats=20):
    """{"size": rows and columns, "tflops": {method: ...}} of two e4m3 matrices: what the tensor cores give a GEMM."""
    a, b = (torch.randn(MATRIX, MATRIX, device=device).to(torch.float8_e4m3fn) for _ in "ab")
    one, flops = torch.ones((), device=device), 2 * MATRIX**3

    def product(fast):
        return lambda: torch._scaled_mm(a, b.t(), one, one, out_dtype=torch.bfloat16, use_fast_accum=fast)

    methods = {"matmul": product(True), "matmul, exact sums": product(False)}
    return {"size": MATRIX, "tflops": {name: flops / event_ms(call, repeats) / 1e9 for name, call in methods.items()}}
