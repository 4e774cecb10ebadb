"""The implementations measured side by side, on the same tensors, laid out (batch, seqlen, heads, head_dim)."""

from __future__ import annotations

import contextlib
import math
from dataclasses import dataclass
from typing import Callable

import torch
import torch.nn.functional as F
from torch.nn.attention import SDPBackend, sdpa_kernel

NAIVE_SCORE_BYTES = 8 * 2**30


@dataclass
class Inputs:
    """q, k, v, dout: (b, s, h, d), or (total, h, d) with cu_seqlens int32 (b + 1); alibi_slopes fp32 (h) or None."""

    q: torch.Tensor
    k: torch.Tensor
    v: torch.Tensor
    dout: torch.Tensor
    cu_seqlens: torch.Tensor | None
    alibi_slopes: torch.Tensor | None


def make_inputs(row, device, requires_grad=False, seed=0):
    """Standard-normal inputs of a row, the same for every implementation and every run."""
    case = row.case
    generator = torch.Generator(device=device).manual_seed(seed)
    dtype = getattr(torch, case.dtype)
    leading_q = (sum(row.seqlens),) if row.seqlens else (case.batch, case.seqlen_q)
    leading_k = leading_q if row.seqlens else (case.batch, case.seqlen_k)

    def randn(leading, heads):
        return torch.randn(*leading, heads, case.head_dim, device=device, dtype=dtype, generator=generator)

    q, k, v = randn(leading_q, case.nheads), randn(leading_k, case.nheads_k), randn(leading_k, case.nheads_k)
    dout = randn(leading_q, case.nheads)
    cu_seqlens = None
    if row.seqlens:
        cu_seqlens = torch.tensor((0,) + row.seqlens, device=device).cumsum(0).to(torch.int32)
    slopes = None
    if case.alibi != "none":
        slopes = torch.tensor([2.0 ** (-8.0 * (i + 1) / case.nheads) for i in range(case.nheads)], device=device)
    for tensor in (q, k, v):
        tensor.requires_grad_(requires_grad)
    return Inputs(q, k, v, dout, cu_seqlens, slopes)


def windows(case):
    """(left, right) of the case with causal folded in; negative is unbounded."""
    left, right = case.window
    if case.causal:
        right = min(right, 0) if right >= 0 else 0
    return left, right


def ours(row, inputs):
    import flash_attn

    case = row.case
    options = {"dropout_p": case.dropout, "causal": case.causal, "window_size": case.window, "softcap": case.softcap}
    options["alibi_slopes"] = inputs.alibi_slopes
    q, k, v = inputs.q, inputs.k, inputs.v
    if row.seqlens:
        cu, longest = inputs.cu_seqlens, max(row.seqlens)
        return lambda: flash_attn.flash_attn_varlen_func(q, k, v, cu, cu, longest, longest, **options)
    return lambda: flash_attn.flash_attn_func(q, k, v, **options)


def sdpa(row, inputs):
    """torch's scaled_dot_product_attention on transposed views (the backend is chosen by the context)."""
    case = row.case
    q, k, v = (tensor.transpose(1, 2) for tensor in (inputs.q, inputs.k, inputs.v))
    options = {"dropout_p": case.dropout, "is_causal": case.causal}
    if case.nheads != case.nheads_k:
        options["enable_gqa"] = True
    return lambda: F.scaled_dot_product_attention(q, k, v, **options).transpose(1, 2)


def torch_flash_op(row, inputs):
    """torch's FlashAttention-2, called below SDPA, which exposes neither windows, ALiBi nor packed sequences."""
    case = row.case
    q, k, v, cu, slopes = inputs.q, inputs.k, inputs.v, inputs.cu_seqlens, inputs.alibi_slopes
    longest_q, longest_k = (max(row.seqlens),) * 2 if row.seqlens else (case.seqlen_q, case.seqlen_k)
    left, right = windows(case)
    extra = {"alibi_slopes": slopes}
    if case.window != (-1, -1):
        extra.update(window_size_left=left, window_size_right=right)
    op = torch.ops.aten._flash_attention_forward
    return lambda: op(q, k, v, cu, cu, longest_q, longest_k, case.dropout, case.causal, False, **extra)[0]


def sdpa_flash(row, inputs):
    return torch_flash_op(row, inputs) if needs_flash_op(row) else sdpa(row, inputs)


def needs_flash_op(row):
    return bool(row.seqlens) or row.case.window != (-1, -1) or row.case.alibi != "none"


def naive(row, inputs):
    """softmax(q k^T) v in plain tensor operations of the inputs' dtype, the score matrix in memory."""
    case = row.case
    ratio = case.nheads // case.nheads_k
    q, k, v = (tensor.transpose(1, 2) for tensor in (inputs.q, inputs.k, inputs.v))
    left, right = windows(case)
    diagonal = torch.arange(case.seqlen_q, device=q.device)[:, None] + (case.seqlen_k - case.seqlen_q)
    distance = torch.arange(case.seqlen_k, device=q.device)[None, :] - diagonal
    hidden = torch.zeros_like(distance, dtype=torch.bool)
    if left >= 0:
        hidden |= distance < -left
    if right >= 0:
        hidden |= distance > right
    bias = None if inputs.alibi_slopes is None else -inputs.alibi_slopes[:, None, None] * distance.abs()
    masked = left >= 0 or right >= 0

    def call():
        keys, values = (t.repeat_interleave(ratio, dim=1) if ratio > 1 else t for t in (k, v))
        scores = (q @ keys.transpose(-1, -2)) / math.sqrt(case.head_dim)
        if case.softcap:
            scores = case.softcap * torch.tanh(scores / case.softcap)
        if bias is not None:
            scores = scores + bias.to(scores.dtype)
        if masked:
            scores = scores.masked_fill(hidden, float("-inf"))
        return (torch.softmax(scores, dim=-1) @ values).transpose(1, 2)

    return call


def sdpa_limits(row):
    case = row.case
    if case.softcap:
        return "no softcap in SDPA"
    if needs_flash_op(row):
        return "no window, ALiBi or packed sequences in this SDPA backend"
    return None


def sdpa_flash_limits(row, device_type="cuda", mode="fwd"):
    if row.case.softcap:
        return "no softcap in torch's FlashAttention-2"
    if needs_flash_op(row) and device_type != "cuda":
        return "torch's FlashAttention-2 operator needs a GPU"
    if needs_flash_op(row) and mode != "fwd":
        return "forward only below SDPA"
    return None


def sdpa_cudnn_limits(row, device_type="cuda", mode="fwd"):
    return "cuDNN needs a GPU" if device_type != "cuda" else sdpa_limits(row)


def naive_limits(row, device_type="cuda", mode="fwd"):
    case = row.case
    if row.seqlens or case.dropout:
        return "naive attention has neither packed sequences nor dropout here"
    if 4 * case.batch * case.nheads * case.seqlen_q * case.seqlen_k > NAIVE_SCORE_BYTES:
        return "score matrix too large"
    return None


@dataclass(frozen=True)
class Implementation:
    """`build(row, inputs)` returns the call; `limits(row, device_type, mode)` why a row cannot run, or None."""

    name: str
    title: str
    build: Callable
    limits: Callable = lambda row, device_type="cuda", mode="fwd": None
    context: Callable = contextlib.nullcontext


def backend(which):
    return lambda: sdpa_kernel(which)


IMPLEMENTATIONS = {
    impl.name: impl
    for impl in (
        Implementation("ours", "flash_attn (this package)", ours),
        Implementation(
            "sdpa_flash",
            "torch SDPA, flash backend (FlashAttention-2)",
            sdpa_flash,
            sdpa_flash_limits,
            backend(SDPBackend.FLASH_ATTENTION),
        ),
        Implementation(
            "sdpa_cudnn",
            "torch SDPA, cuDNN backend",
            sdpa,
            sdpa_cudnn_limits,
            backend(SDPBackend.CUDNN_ATTENTION),
        ),
        Implementation("naive", "softmax(q k^T) v in torch operations", naive, naive_limits),
    )
}


def timed_call(forward, inputs, mode):
    """The function that is timed: the forward, the backward of one stored forward, or both."""
    if mode == "fwd":
        return forward
    leaves = (inputs.q, inputs.k, inputs.v)
    if mode == "fwd+bwd":
        return lambda: torch.autograd.grad(forward(), leaves, inputs.dout)
    out = forward()
    return lambda: torch.autograd.grad(out, leaves, inputs.dout, retain_graph=True)
