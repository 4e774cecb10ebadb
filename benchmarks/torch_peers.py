"""Attention as torch itself offers it: plain operations, SDPA and its backends, FlexAttention.

Each builder takes (row, inputs) and returns the function to call; the result is laid out as q.
"""

from __future__ import annotations

import math
from operator import itemgetter

import torch
import torch.nn.functional as F
from rows import windows

# FlexAttention is compiled anew for every shape, which takes seconds: of the grids at these lengths and head dims.
COMPILED_SEQLENS = {"cells": (1024, 4096, 16384), "dims": (1024, 4096, 16384), "b4h8": (1024, 4096)}
MOST_COMPILED_HEAD_DIM = 128


def sdpa(row, inputs):
    """torch's scaled_dot_product_attention on transposed views (the backend is chosen by the context)."""
    case = row.case
    q, k, v = (tensor.transpose(1, 2) for tensor in (inputs.q, inputs.k, inputs.v))
    options = {"dropout_p": case.dropout, "is_causal": case.causal}
    if case.nheads != case.nheads_k:
        options["enable_gqa"] = True
    return lambda: F.scaled_dot_product_attention(q, k, v, **options).transpose(1, 2)


def needs_flash_op(row):
    return bool(row.seqlens) or row.case.window != (-1, -1) or row.case.alibi != "none"


def torch_flash_op(row, inputs, pick=itemgetter(0)):
    """torch's FlashAttention-2, called below SDPA, which exposes neither windows, ALiBi nor packed sequences.

    It is differentiable but for ALiBi, whose slopes its backward does not get.
    """
    case = row.case
    q, k, v, cu, slopes = inputs.q, inputs.k, inputs.v, inputs.cu_seqlens, inputs.alibi_slopes
    longest_q, longest_k = (max(row.seqlens),) * 2 if row.seqlens else (case.seqlen_q, case.seqlen_k)
    left, right = windows(case)
    extra = {"alibi_slopes": slopes}
    if case.window != (-1, -1):
        extra.update(window_size_left=left, window_size_right=right)
    op = torch.ops.aten._flash_attention_forward
    return lambda: pick(op(q, k, v, cu, cu, longest_q, longest_k, case.dropout, case.causal, False, **extra))


def sdpa_flash(row, inputs):
    return torch_flash_op(row, inputs) if needs_flash_op(row) else sdpa(row, inputs)


def sdpa_flash_limits(row, device_type, mode):
    if needs_flash_op(row) and device_type != "cuda":
        return "torch's FlashAttention-2 operator needs a GPU"
    if row.case.alibi != "none" and mode != "fwd":
        return "torch's FlashAttention-2 operator has no ALiBi backward"
    return None


def naive(row, inputs):
    """softmax(q k^T) v in plain tensor operations of the inputs' dtype, the score matrix in memory."""
    case = row.case
    ratio = case.nheads // case.nheads_k
    q, k, v = (tensor.transpose(1, 2) for tensor in (inputs.q, inputs.k, inputs.v))
    left, right = windows(case)
    diagonal = torch.arange(case.seqlen_q, device=q.device)[:, None] + (case.seqlen_k - case.seqlen_q)
    distance = torch.arange(case.seqlen_k, device=q.device)[None, :] - diagonal
    mask = torch.zeros_like(distance, dtype=torch.bool)
    if left >= 0:
        mask |= distance < -left
    if right >= 0:
        mask |= distance > right
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
            scores = scores.masked_fill(mask, float("-inf"))
        return (torch.softmax(scores, dim=-1) @ values).transpose(1, 2)

    return call


def flex_limits(row, device_type, mode):
    if row.timing != "event":
        return "compiled anew for every shape: not measured on small shapes"
    seqlens = COMPILED_SEQLENS.get(row.group)
    if seqlens and (row.case.seqlen_q not in seqlens or row.case.head_dim > MOST_COMPILED_HEAD_DIM):
        measured = f"s {', '.join(map(str, seqlens))}, head dims up to {MOST_COMPILED_HEAD_DIM}"
        return f"compiled anew for every shape: measured at {measured}"
    return None


def compiled_flex():
    """FlexAttention compiled for static shapes; what was compiled for earlier rows is dropped, so that a call does not
    have to search it."""
    import torch._dynamo
    import torch._functorch.config
    from torch.nn.attention.flex_attention import flex_attention

    torch._dynamo.reset()
    torch._functorch.config.donated_buffer = False  # a stored forward is differentiated many times
    return torch.compile(flex_attention, dynamic=False)


def flex(row, inputs):
    """FlexAttention: mask as a block mask (built outside of the timed call), softcap and ALiBi as a score function."""
    case = row.case
    attention = compiled_flex()
    packed = bool(row.seqlens)
    q, k, v = ((x.unsqueeze(0) if packed else x).transpose(1, 2) for x in (inputs.q, inputs.k, inputs.v))
    options = {"score_mod": flex_score_mod(case, inputs.alibi_slopes), "enable_gqa": case.nheads != case.nheads_k}
    options["block_mask"] = flex_block_mask(case, q.shape[2], k.shape[2], q.device)

    def call():
        out = attention(q, k, v, **options).transpose(1, 2)
        return out.squeeze(0) if packed else out

    return call


def flex_score_mod(case, slopes):
    offset = case.seqlen_k - case.seqlen_q
    if case.softcap:
        return lambda score, b, h, i, j: case.softcap * torch.tanh(score / case.softcap)
    if slopes is not None:
        return lambda score, b, h, i, j: score - slopes[h] * (i + offset - j).abs()
    return None


def flex_block_mask(case, seqlen_q, seqlen_k, device):
    from torch.nn.attention.flex_attention import and_masks, create_block_mask

    left, right = windows(case)
    offset = seqlen_k - seqlen_q
    masks = []
    if right >= 0:
        masks.append(lambda b, h, i, j: j <= i + offset + right)
    if left >= 0:
        masks.append(lambda b, h, i, j: j >= i + offset - left)
    if case.seqlens:
        numbers = torch.arange(len(case.seqlens), device=device)
        sequence = numbers.repeat_interleave(torch.tensor(case.seqlens, device=device))
        masks.append(lambda b, h, i, j: sequence[i] == sequence[j])
    if not masks:
        return None
    return create_block_mask(and_masks(*masks), None, None, seqlen_q, seqlen_k, device=device)
