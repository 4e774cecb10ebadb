"""A quick check that this installation computes attention: every kind of call once, against float32 on the CPU."""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from flash_attn.flash_attn_interface import flash_attn_func, flash_attn_varlen_func
from flash_attn.inference import flash_attn_with_kvcache

BATCH, SEQLEN, NHEADS, NHEADS_K = 2, 129, 4, 2
CAUSAL_WINDOW = (64, 0)
# The largest error of a result relative to its largest entry. Sums are float32; P and out are rounded.
BOUNDS = {torch.float32: 1e-4, torch.float16: 1e-2, torch.bfloat16: 5e-2}
_LIMIT = "has too little shared memory per block for this head dim"  # as the CUDA backend says it


class CheckResult(NamedTuple):
    """One call on one device. error: the largest relative error, or None where the call raised `message`.

    ok is also True where the GPU has too little shared memory for a head dim, which is a limit and no defect.
    """

    device: str
    call: str
    dtype: str
    head_dim: int
    ok: bool
    error: float | None
    message: str = ""


def reference(q: Tensor, k: Tensor, v: Tensor, window: tuple[int, int] = (-1, -1)) -> Tensor:
    """softmax(Q K^T / sqrt(head_dim)) V in float32, (batch, seqlen, nheads, head_dim); aligned bottom right."""
    q, k, v = (x.float().transpose(1, 2) for x in (q, k, v))
    k, v = (x.repeat_interleave(q.shape[1] // x.shape[1], dim=1) for x in (k, v))
    scores = q @ k.transpose(-1, -2) * q.shape[-1] ** -0.5
    left, right = window
    position = torch.arange(q.shape[2], device=q.device)[:, None] + k.shape[2] - q.shape[2]
    key = torch.arange(k.shape[2], device=q.device)
    hidden = torch.zeros(q.shape[2], k.shape[2], dtype=torch.bool, device=q.device)
    if left >= 0:
        hidden |= key < position - left
    if right >= 0:
        hidden |= key > position + right
    out: Tensor = scores.masked_fill(hidden, float("-inf")).softmax(-1) @ v
    return out.transpose(1, 2)


def _inputs(device: str, dtype: torch.dtype, head_dim: int) -> tuple[list[Tensor], list[Tensor]]:
    generator = torch.Generator().manual_seed(0)
    shapes = ((BATCH, SEQLEN, heads, head_dim) for heads in (NHEADS, NHEADS_K, NHEADS_K))
    on_cpu = [torch.randn(shape, generator=generator, dtype=torch.float32, device="cpu").to(dtype) for shape in shapes]
    return on_cpu, [x.to(device) for x in on_cpu]


def _training(device: str, dtype: torch.dtype, head_dim: int) -> list[tuple[Tensor, Tensor]]:
    """Forward and backward of a dense batch -> pairs (result, expected)."""
    on_cpu, inputs = _inputs(device, dtype, head_dim)
    wanted = [x.float().requires_grad_() for x in on_cpu]
    inputs = [x.requires_grad_() for x in inputs]
    (q, k, v), (q_wanted, k_wanted, v_wanted) = inputs, wanted
    out, expected = flash_attn_func(q, k, v, causal=True), reference(q_wanted, k_wanted, v_wanted, (-1, 0))
    generator = torch.Generator().manual_seed(1)
    dout = torch.randn(expected.shape, generator=generator, dtype=torch.float32, device="cpu").to(dtype)
    grads = torch.autograd.grad(out, inputs, dout.to(device))
    return [(out, expected), *zip(grads, torch.autograd.grad(expected, wanted, dout.float()))]


def _varlen(device: str, dtype: torch.dtype, head_dim: int) -> list[tuple[Tensor, Tensor]]:
    """Two packed sequences of different lengths with a window."""
    on_cpu, inputs = _inputs(device, dtype, head_dim)
    lengths = (SEQLEN, 17)
    cu_seqlens = torch.tensor([0, lengths[0], sum(lengths)], dtype=torch.int32, device=device)
    q, k, v = (torch.cat([x[i, :length] for i, length in enumerate(lengths)]) for x in inputs)
    out = flash_attn_varlen_func(
        q, k, v, cu_seqlens, cu_seqlens, max(lengths), max(lengths), causal=True, window_size=CAUSAL_WINDOW
    )
    expected = []
    for i, length in enumerate(lengths):
        q, k, v = (x[i : i + 1, :length] for x in on_cpu)
        expected.append(reference(q, k, v, CAUSAL_WINDOW)[0])
    return [(out, torch.cat(expected))]


def _decode(device: str, dtype: torch.dtype, head_dim: int) -> list[tuple[Tensor, Tensor]]:
    """One new token appended to a KV cache."""
    (q, k, v), (q_device, k_device, v_device) = _inputs(device, dtype, head_dim)
    last = SEQLEN - 1
    k_cache, v_cache = (torch.full_like(x, float("nan")) for x in (k_device, v_device))
    k_cache[:, :last], v_cache[:, :last] = k_device[:, :last], v_device[:, :last]
    lengths = torch.full((BATCH,), last, dtype=torch.int32, device=device)
    out = flash_attn_with_kvcache(
        q_device[:, last:], k_cache, v_cache, k_device[:, last:], v_device[:, last:], cache_seqlens=lengths, causal=True
    )
    return [(out, reference(q[:, last:], k, v))]


_CALLS = {"forward, backward": _training, "packed batch": _varlen, "KV cache": _decode}


def _largest_error(pairs: list[tuple[Tensor, Tensor]]) -> float:
    errors: list[float] = [
        ((x.detach().cpu().float() - y.detach()).abs().max() / y.detach().abs().max()).item() for x, y in pairs
    ]
    return max(errors, key=lambda error: float("inf") if error != error else error)  # NaN is the largest


def check_device(device: str, dtypes: tuple[torch.dtype, ...], head_dims: tuple[int, ...]) -> list[CheckResult]:
    """Every kind of call on `device`, in every dtype and head dim. What a call raises is a result, not an exception."""
    results = []
    for name, call in _CALLS.items():
        for dtype in dtypes:
            for head_dim in head_dims:
                identity = (device, name, str(dtype).replace("torch.", ""), head_dim)
                try:
                    error = _largest_error(call(device, dtype, head_dim))
                except Exception as problem:
                    limited = _LIMIT in str(problem)
                    results.append(CheckResult(*identity, limited, None, f"{type(problem).__name__}: {problem}"))
                else:
                    results.append(CheckResult(*identity, error <= BOUNDS[dtype], error))
    return results
