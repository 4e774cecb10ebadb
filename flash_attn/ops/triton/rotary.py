"""Rotary position embedding (Su et al., 2021, arXiv:2104.09864) : a Triton kernel on CUDA, PyTorch elsewhere.

Importing this module needs neither triton nor a GPU.
"""

from __future__ import annotations

import torch
from torch import Tensor

from flash_attn.ops import arguments, conditions, context
from flash_attn.ops.triton.dispatch import device_of, kernel_serves, power_of_two


def apply_rotary(
    x: Tensor,
    cos: Tensor,
    sin: Tensor,
    seqlen_offsets: int | Tensor = 0,
    cu_seqlens: Tensor | None = None,
    max_seqlen: int | None = None,
    interleaved: bool = False,
    inplace: bool = False,
    conjugate: bool = False,
) -> Tensor:
    """Rotate the first rotary_dim features of every head by the angle of its row's position.

    Where x requires a gradient, by PyTorch operations; `flash_attn.layers.rotary` has the kernel's gradient.

    Arguments:
        x: (batch, seqlen, nheads, head_dim), or (total, nheads, head_dim) with cu_seqlens. Any floating point dtype.
        cos: (seqlen_rotary, rotary_dim / 2), rotary_dim <= head_dim. Any floating point dtype.
        sin: like cos.
        seqlen_offsets: int, or integer tensor (batch,): the position of the first row of each sequence. Positions
            beyond seqlen_rotary are not rotated when they come from a tensor, and an error when from an int.
        cu_seqlens: integer (batch + 1,). Sequence i has the rows cu_seqlens[i] to cu_seqlens[i + 1]; rows beyond the
            last are not rotated.
        max_seqlen: int, the longest sequence; checked against seqlen_rotary with cu_seqlens, and may be omitted.
        interleaved: pairs are features (0, 1), (2, 3), ... (GPT-J); else the two halves of rotary_dim (GPT-NeoX).
        inplace: write the result into x and return x.
        conjugate: rotate by the negative angle (the gradient of the rotation).

    Returns a tensor like x, contiguous unless in place. Sums are taken in float32 (float64 for float64 x).
    Raises RuntimeError or TypeError naming the argument that does not fit.
    """
    seqlen_offsets = _check(x, cos, sin, seqlen_offsets, cu_seqlens, max_seqlen)
    interleaved, conjugate = arguments.flag("interleaved", interleaved), arguments.flag("conjugate", conjugate)
    inplace = arguments.flag("inplace", inplace)
    rotary_dim = 2 * cos.shape[1]
    if inplace:
        context.check_writable(("x",), (x,))
    if kernel_serves(x) and not (x.requires_grad and torch.is_grad_enabled()):
        if inplace:
            context.check_distinct("x", x)
        out = x if inplace else torch.empty_like(x, memory_format=torch.contiguous_format)
        if not inplace and rotary_dim < x.shape[-1]:
            out[..., rotary_dim:].copy_(x[..., rotary_dim:])
        _launch(out, x, cos, sin, seqlen_offsets, cu_seqlens, interleaved, conjugate)
        if inplace:
            context.written((x,))
        return out
    rotated = rotate(x, cos, sin, seqlen_offsets, cu_seqlens, interleaved, conjugate)
    if inplace:
        x[..., :rotary_dim].copy_(rotated)
        return x
    out = torch.cat([rotated, x[..., rotary_dim:]], dim=-1) if rotary_dim < x.shape[-1] else rotated
    return out.contiguous()


def rotate(
    x: Tensor,
    cos: Tensor,
    sin: Tensor,
    seqlen_offsets: int | Tensor,
    cu_seqlens: Tensor | None,
    interleaved: bool,
    conjugate: bool,
) -> Tensor:
    """The rotated features (..., rotary_dim) of x by differentiable PyTorch operations; arguments of `apply_rotary`."""
    half = cos.shape[1]
    dtype = torch.promote_types(x.dtype, torch.float32)
    cos, sin = (table.to(dtype) for table in _rows_of_tables(x, cos, sin, seqlen_offsets, cu_seqlens))
    if conjugate:
        sin = -sin
    features = x[..., : 2 * half].to(dtype)
    pairs = (slice(0, None, 2), slice(1, None, 2)) if interleaved else (slice(0, half), slice(half, None))
    x0, x1 = (features[..., of_pair] for of_pair in pairs)
    parts = (x0 * cos - x1 * sin, x0 * sin + x1 * cos)
    rotated = torch.stack(parts, dim=-1).flatten(-2) if interleaved else torch.cat(parts, dim=-1)
    return rotated.to(x.dtype)


def _rows_of_tables(
    x: Tensor, cos: Tensor, sin: Tensor, seqlen_offsets: int | Tensor, cu_seqlens: Tensor | None
) -> tuple[Tensor, Tensor]:
    """cos and sin at the position of every row, shaped to broadcast against x."""
    if cu_seqlens is None:
        if not isinstance(seqlen_offsets, torch.Tensor):
            rows = slice(seqlen_offsets, seqlen_offsets + x.shape[1])
            return cos[rows, None], sin[rows, None]
        positions = seqlen_offsets[:, None] + torch.arange(x.shape[1], device=x.device)
    else:
        row = torch.arange(x.shape[0], device=x.device)
        starts = cu_seqlens.long()
        sequence = (
            torch.searchsorted(starts, row, right=True) - 1
        )  # not in a slice of starts: Inductor has no code for it
        inside = sequence < starts.shape[0] - 1
        sequence = sequence.clamp(0, starts.shape[0] - 2)
        shift = seqlen_offsets
        if isinstance(seqlen_offsets, torch.Tensor):
            shift = seqlen_offsets[sequence] if seqlen_offsets.shape[0] > 0 else 0
        positions = torch.where(inside, row - starts[sequence] + shift, -1)
    known = ((positions >= 0) & (positions < cos.shape[0]))[..., None]
    positions = torch.where(known[..., 0], positions, 0)
    cos, sin = torch.where(known, cos[positions], 1.0), torch.where(known, sin[positions], 0.0)
    return cos.unsqueeze(-2), sin.unsqueeze(-2)


def _check(
    x: Tensor, cos: Tensor, sin: Tensor, seqlen_offsets: int | Tensor, cu_seqlens: Tensor | None, max_seqlen: int | None
) -> int | Tensor:
    """-> seqlen_offsets, an int or a tensor."""
    arguments.check_tensors(("x", "cos", "sin"), (x, cos, sin))
    arguments.check_optional_tensors(("cu_seqlens",), (cu_seqlens,))
    dims = 4 if cu_seqlens is None else 3
    axes = "(batch, seqlen, heads, head_dim)" if cu_seqlens is None else "(total, heads, head_dim)"
    if x.dim() != dims:
        raise RuntimeError(f"x: expected {dims} dimensions {axes}, got {x.dim()}")
    for name, tensor in (("x", x), ("cos", cos), ("sin", sin)):
        arguments.check_floating(name, tensor)
    if cos.dim() != 2 or 2 * cos.shape[1] > x.shape[-1]:
        expected = f"(seqlen_rotary, rotary_dim / 2) with rotary_dim <= {x.shape[-1]}"
        raise RuntimeError(f"cos: expected shape {expected}, got {list(cos.shape)}")
    if sin.shape != cos.shape:
        raise RuntimeError(f"sin: expected shape {list(cos.shape)}, got {list(sin.shape)}")
    others = (("cos", cos), ("sin", sin), ("cu_seqlens", cu_seqlens), ("seqlen_offsets", seqlen_offsets))
    for name, other in others:
        if isinstance(other, torch.Tensor) and other.device != x.device:
            raise RuntimeError(f"{name}: expected a tensor on x's device ({x.device}), got one on {other.device}")
    if cu_seqlens is not None and (cu_seqlens.dim() != 1 or cu_seqlens.shape[0] == 0 or not _is_integral(cu_seqlens)):
        raise RuntimeError(f"cu_seqlens: expected integers of shape [batch + 1], got {arguments.shown(cu_seqlens)}")
    return _check_positions(x, cos, seqlen_offsets, cu_seqlens, max_seqlen)


def _check_positions(
    x: Tensor, cos: Tensor, seqlen_offsets: int | Tensor, cu_seqlens: Tensor | None, max_seqlen: int | None
) -> int | Tensor:
    batch = x.shape[0] if cu_seqlens is None else cu_seqlens.shape[0] - 1
    if isinstance(seqlen_offsets, torch.Tensor):
        if not _is_integral(seqlen_offsets):
            got = arguments.shown(seqlen_offsets)
            raise TypeError(f"seqlen_offsets: expected an int or an integer tensor, got {got}")
        if tuple(seqlen_offsets.shape) != (batch,):
            raise RuntimeError(f"seqlen_offsets: expected shape [{batch}], got {list(seqlen_offsets.shape)}")
        return seqlen_offsets
    expected = "an int or an integer tensor"
    seqlen_offsets = arguments.integer("seqlen_offsets", seqlen_offsets, least=0, expected=expected)
    longest = x.shape[1]
    if cu_seqlens is not None:
        longest = 0 if max_seqlen is None else arguments.integer("max_seqlen", max_seqlen)
    if not conditions.holds(longest + seqlen_offsets <= cos.shape[0]):
        raise RuntimeError(f"cos: expected at least {longest + seqlen_offsets} rows, got {cos.shape[0]}")
    return seqlen_offsets


def _is_integral(tensor: Tensor) -> bool:
    return not (tensor.is_floating_point() or tensor.is_complex() or tensor.dtype == torch.bool)


def _launch(
    out: Tensor,
    x: Tensor,
    cos: Tensor,
    sin: Tensor,
    seqlen_offsets: int | Tensor,
    cu_seqlens: Tensor | None,
    interleaved: bool,
    conjugate: bool,
) -> None:
    from flash_attn.ops.triton.rotary_kernel import rotary_kernel

    if out.numel() == 0 or cos.shape[1] == 0:
        return
    if x.stride(-1) != 1 or out.stride(-1) != 1:
        source = x.contiguous()
        target = torch.empty_like(source)
        _launch(target, source, cos, sin, seqlen_offsets, cu_seqlens, interleaved, conjugate)
        rotary_dim = 2 * cos.shape[1]
        out[..., :rotary_dim].copy_(target[..., :rotary_dim])
        return
    varlen = cu_seqlens is not None
    offset, offsets = (0, seqlen_offsets) if isinstance(seqlen_offsets, torch.Tensor) else (seqlen_offsets, None)
    x4, out4 = (x[None], out[None]) if varlen else (x, out)
    batches, seqlen, heads, _ = x4.shape
    batch = batches if cu_seqlens is None else cu_seqlens.shape[0] - 1
    half = cos.shape[1]
    block_half = max(power_of_two(half), 2)
    block_heads = 2 if heads > 1 else 1
    block_rows = max(1, 2048 // (block_half * block_heads))
    grid = (-(-batches * seqlen // block_rows), -(-heads // block_heads))
    with device_of(x):
        rotary_kernel[grid](
            out4,
            x4,
            cos.contiguous(),
            sin.contiguous(),
            None if cu_seqlens is None else cu_seqlens.contiguous(),
            None if offsets is None else offsets.contiguous(),
            batches * seqlen,
            seqlen,
            heads,
            half,
            batch,
            cos.shape[0],
            offset,
            *out4.stride()[:3],
            *x4.stride()[:3],
            IS_VARLEN=varlen,
            HAS_OFFSETS=offsets is not None,
            SEARCH_STEPS=batch.bit_length(),
            INTERLEAVED=interleaved,
            CONJUGATE=conjugate,
            BLOCK_ROWS=block_rows,
            BLOCK_HEADS=block_heads,
            BLOCK_HALF=block_half,
        )
