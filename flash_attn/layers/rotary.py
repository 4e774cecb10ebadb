"""Rotary position embeddings (Su et al., 2021, arXiv:2104.09864), with the xPos scaling of Sun et al. (2022,
arXiv:2212.10554), as functions and as a module. Differentiable with respect to the rotated tensor, not to cos and sin.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Optional, TypedDict

import torch
from torch import Tensor

from flash_attn._types import Context, Device
from flash_attn.ops import arguments, conditions, context
from flash_attn.ops.triton.rotary import apply_rotary
from flash_attn.utils.derived_buffers import DerivedBuffers, has_values

_Parts = Callable[[Tensor], tuple[Tensor, ...]]  # the views of a packed tensor that are rotated
_Tables = tuple[Tensor, Tensor, Optional[Tensor], Optional[Tensor]]  # cos, sin, cos_k, sin_k


class _Options(TypedDict, total=False):
    """The keyword arguments of `apply_rotary`."""

    seqlen_offsets: int | Tensor
    cu_seqlens: Tensor | None
    max_seqlen: int | None
    interleaved: bool
    conjugate: bool


class _RotateContext(Context):
    tables: tuple[Tensor, Tensor]
    options: _Options


class _RotatePartsContext(Context):
    parts: _Parts
    tables: Sequence[tuple[Tensor, Tensor]]
    options: _Options


class _Rotate(torch.autograd.Function):
    """`apply_rotary` with a gradient: the rotation by the negative angle. The options are its keyword arguments."""

    @staticmethod
    def forward(ctx: _RotateContext, x: Tensor, cos: Tensor, sin: Tensor, inplace: bool, options: _Options) -> Tensor:
        ctx.tables, ctx.options = (cos, sin), options
        out = apply_rotary(x, cos, sin, inplace=inplace, **options)
        if inplace and _may_be_dirty(x):
            ctx.mark_dirty(x)
        return out

    @staticmethod
    def backward(ctx: _RotateContext, grad: Tensor) -> tuple[Tensor | None, ...]:
        context.reject_batched_gradients(grad)
        return _Rotate.apply(grad, *ctx.tables, False, _reversed(ctx.options)), None, None, None, None


class _RotateParts(torch.autograd.Function):
    """Rotation in place of the views `parts(x)` of a packed tensor, each by its own (cos, sin) of `tables`."""

    @staticmethod
    def forward(
        ctx: _RotatePartsContext, x: Tensor, parts: _Parts, tables: Sequence[tuple[Tensor, Tensor]], options: _Options
    ) -> Tensor:
        ctx.parts, ctx.tables, ctx.options = parts, tables, options
        _rotate_parts(x, parts, tables, options)
        if _may_be_dirty(x):
            ctx.mark_dirty(x)
        return x

    @staticmethod
    def backward(ctx: _RotatePartsContext, grad: Tensor) -> tuple[Tensor | None, ...]:
        context.reject_batched_gradients(grad)
        grad = grad.clone(memory_format=torch.contiguous_format)
        return _RotateParts.apply(grad, ctx.parts, ctx.tables, _reversed(ctx.options)), None, None, None


def _may_be_dirty(x: Tensor) -> bool:
    """Whether autograd can record the rotation in place, for later uses of x and of what it is a view of.

    It cannot on leaves that require a gradient, on their views, and on views that a function returned together (unbind,
    split): these are rotated all the same, as FlashAttention-2 does, and only the result has the history.
    """
    base = x if x._base is None else x._base
    if x.requires_grad and base.is_leaf:
        return False
    return not x._is_view() or torch._C._autograd._get_creation_meta(x) == torch._C._autograd.CreationMeta.DEFAULT


def _reject_in_backward(name: str, x: Tensor) -> None:
    """Raise RuntimeError for a leaf, or a view of one, that requires a gradient in a backward.

    A reentrant checkpoint computes again there with its inputs, detached, which the forward has rotated already.
    """
    if torch._C._current_graph_task_id() == -1 or not torch.is_grad_enabled():
        return
    base = x if x._base is None else x._base
    if x.requires_grad and base.is_leaf:
        raise RuntimeError(
            f"{name}: expected a tensor that may be rotated in place, got a leaf that requires grad in a backward: "
            "a checkpoint that computes again would rotate its input twice (clone it, or use inplace=False)"
        )


def _reversed(options: _Options) -> _Options:
    return {**options, "conjugate": not options["conjugate"]}


def _rotate_parts(x: Tensor, parts: _Parts, tables: Sequence[tuple[Tensor, Tensor]], options: _Options) -> Tensor:
    for part, (cos, sin) in zip(parts(x), tables):
        apply_rotary(part, cos, sin, inplace=True, **options)
    return x


def _rotate_packed(
    name: str, x: Tensor, parts: _Parts, tables: Sequence[tuple[Tensor, Tensor]], options: _Options
) -> Tensor:
    if context.decomposes():
        return _rotate_parts(x, parts, tables, options)
    _reject_in_backward(name, x)
    for table in tables:
        _check_tables(*table)
    base = x._base
    if base is None or not _covers(x, base) or not _may_be_dirty(x):
        rotated: Tensor = _RotateParts.apply(x, parts, tables, options)
        return rotated
    # Autograd copies the gradient of a view that is written; where the view is but another shape, the base is rotated.
    shape = x.shape
    rotated = _RotateParts.apply(base, lambda base: parts(base.view(shape)), tables, options)
    return rotated.view(shape)


def _check_tables(cos: Tensor, sin: Tensor) -> None:
    arguments.check_constant("cos", cos)
    arguments.check_constant("sin", sin)


def _covers(x: Tensor, base: Tensor) -> bool:
    whole = x.numel() == base.numel() and x.storage_offset() == base.storage_offset()
    return whole and x.is_contiguous() and base.is_contiguous()


def _whole(x: Tensor) -> tuple[Tensor, ...]:
    return (x,)


def _key_of_kv(kv: Tensor) -> tuple[Tensor, ...]:
    return (kv[:, :, 0],)


def _splits(heads: int, num_heads_q: int) -> bool:
    """Whether the heads after those of q are as many of k as of v."""
    return conditions.holds(num_heads_q <= heads) and conditions.holds((heads - num_heads_q) % 2 == 0)


def _query_and_key(num_heads_q: int, joint: bool) -> _Parts:
    """The function that gives the views of q and k in qkv: one view of both if `joint`, else two."""

    def parts(qkv: Tensor) -> tuple[Tensor, ...]:
        if qkv.dim() == 5:
            q, k = qkv[:, :, 0], qkv[:, :, 1]
            mergeable = qkv.stride(2) == qkv.shape[3] * qkv.stride(3)
            return (qkv[:, :, :2].flatten(2, 3),) if joint and mergeable else (q, k)
        num_heads_k = (qkv.shape[2] - num_heads_q) // 2
        if joint:
            return (qkv.narrow(2, 0, num_heads_q + num_heads_k),)
        return qkv.narrow(2, 0, num_heads_q), qkv.narrow(2, num_heads_q, num_heads_k)

    return parts


def apply_rotary_emb(
    x: Tensor,
    cos: Tensor,
    sin: Tensor,
    interleaved: bool = False,
    inplace: bool = False,
    seqlen_offsets: int | Tensor = 0,
    cu_seqlens: Tensor | None = None,
    max_seqlen: int | None = None,
) -> Tensor:
    """Rotate the first rotary_dim features of every head of x by the angles of its positions.

    Arguments:
        x: (batch, seqlen, nheads, head_dim), or (total, nheads, head_dim) with cu_seqlens. Any floating point dtype.
        cos, sin: (seqlen_rotary, rotary_dim / 2), rotary_dim <= head_dim. Any floating point dtype. They get no
            gradient, and may not ask for one.
        interleaved: bool. Pairs are features (0, 1), (2, 3), ... (GPT-J) instead of the two halves (GPT-NeoX).
        inplace: bool. Write the result into x.
        seqlen_offsets: int, or integer tensor (batch,). Position of the first row of each sequence.
        cu_seqlens: integer (batch + 1,). Sequence i has the rows cu_seqlens[i] to cu_seqlens[i + 1] of x.
        max_seqlen: int, the longest sequence of cu_seqlens; may be omitted.

    Returns a tensor of x's shape and dtype, contiguous unless in place; sums are taken in float32. In place, autograd
    knows of the write, as of those of torch; but x may be a leaf that requires a gradient, which the result alone then
    carries. Not in a backward, where a reentrant checkpoint would rotate its input a second time.

    Raises RuntimeError or TypeError naming the argument that does not fit.
    """
    inplace = arguments.flag("inplace", inplace)
    options: _Options = {
        "seqlen_offsets": seqlen_offsets,
        "cu_seqlens": cu_seqlens,
        "max_seqlen": max_seqlen,
        "interleaved": interleaved,
        "conjugate": False,
    }
    if context.decomposes():
        return apply_rotary(x, cos, sin, inplace=inplace, **options)
    arguments.check_tensors(("x",), (x,))
    if inplace and x._is_view():
        return _rotate_packed("x", x, _whole, ((cos, sin),), options)
    if inplace:
        _reject_in_backward("x", x)
    _check_tables(cos, sin)
    out: Tensor = _Rotate.apply(x, cos, sin, inplace, options)
    return out


apply_rotary_emb_func = apply_rotary_emb


def apply_rotary_emb_qkv_(
    qkv: Tensor,
    cos: Tensor,
    sin: Tensor,
    cos_k: Tensor | None = None,
    sin_k: Tensor | None = None,
    interleaved: bool = False,
    seqlen_offsets: int | Tensor = 0,
    num_heads_q: int | None = None,
) -> Tensor:
    """Rotate q and k of a packed tensor in place, and return it.

    Arguments:
        qkv: (batch, seqlen, 3, nheads, head_dim), or (batch, seqlen, num_heads_q + 2 * num_heads_k, head_dim) with
            num_heads_q.
        cos, sin: (seqlen_rotary, rotary_dim / 2), rotary_dim <= head_dim.
        cos_k, sin_k: like cos and sin, for k; default: cos and sin (xPos has its own).
        interleaved: bool. Pairs are features (0, 1), (2, 3), ... (GPT-J) instead of the two halves (GPT-NeoX).
        seqlen_offsets: int, or integer tensor (batch,). Position of the first row.
        num_heads_q: int, needed with the second shape of qkv.
    """
    arguments.check_floating("qkv", qkv)
    arguments.check_optional_tensors(("cos_k", "sin_k"), (cos_k, sin_k))
    if num_heads_q is not None:
        num_heads_q = arguments.integer("num_heads_q", num_heads_q, least=0)
    if qkv.dim() == 5:
        if qkv.shape[2] != 3:
            raise RuntimeError(f"qkv: expected shape (batch, seqlen, 3, heads, head_dim), got {list(qkv.shape)}")
    elif qkv.dim() != 4 or num_heads_q is None or not _splits(qkv.shape[2], num_heads_q):
        raise RuntimeError(
            "qkv: expected shape (batch, seqlen, 3, heads, head_dim), or (batch, seqlen, num_heads_q + 2 * "
            f"num_heads_k, head_dim) with num_heads_q, got {list(qkv.shape)} with num_heads_q {num_heads_q}"
        )
    joint = cos_k is None and sin_k is None
    # Not read with five dimensions. Not `or`: a number from .item() has no truth value in a graph.
    parts = _query_and_key(0 if num_heads_q is None else num_heads_q, joint)
    key_tables = (cos if cos_k is None else cos_k, sin if sin_k is None else sin_k)
    options: _Options = {"seqlen_offsets": seqlen_offsets, "interleaved": interleaved, "conjugate": False}
    return _rotate_packed("qkv", qkv, parts, ((cos, sin), key_tables), options)


def apply_rotary_emb_kv_(
    kv: Tensor, cos: Tensor, sin: Tensor, interleaved: bool = False, seqlen_offsets: int | Tensor = 0
) -> Tensor:
    """Rotate k of kv (batch, seqlen, 2, nheads, head_dim) in place, and return kv. Arguments: `apply_rotary_emb`."""
    arguments.check_floating("kv", kv)
    if kv.dim() != 5 or kv.shape[2] != 2:
        raise RuntimeError(f"kv: expected shape (batch, seqlen, 2, heads, head_dim), got {list(kv.shape)}")
    options: _Options = {"seqlen_offsets": seqlen_offsets, "interleaved": interleaved, "conjugate": False}
    return _rotate_packed("kv", kv, _key_of_kv, ((cos, sin),), options)


class RotaryEmbedding(DerivedBuffers):
    """Rotary embedding of packed projections, with a table of cosines and sines that grows on demand.

    Angle i of position p is p * base^(-2 i / dim). With scale_base (xPos; 512 is usual), q is scaled by
    scale^((p - seqlen // 2) / scale_base) and k by its inverse, seqlen being the length of the table.

    Arguments:
        dim: int, the rotary_dim: number of features rotated, even and at most head_dim.
        base: float.
        interleaved: bool. Pairs are features (0, 1), (2, 3), ... (GPT-J) instead of the two halves (GPT-NeoX).
        scale_base: float or None.
        device: of the buffers.
    """

    inv_freq: Tensor
    scale: Tensor | None

    def __init__(
        self,
        dim: int,
        base: float = 10000.0,
        interleaved: bool = False,
        scale_base: float | None = None,
        device: torch.device | str | None = None,
    ) -> None:
        super().__init__()
        self.dim = dim
        self.base = float(base)
        self.interleaved = interleaved
        self.scale_base = scale_base
        self._register_derived(**self._derived(device))
        self._seq_len_cached = 0
        self._cos_cached: Tensor | None = None
        self._sin_cached: Tensor | None = None
        self._cos_k_cached: Tensor | None = None
        self._sin_k_cached: Tensor | None = None

    def _derived(self, device: Device) -> dict[str, Tensor | None]:
        exponents = torch.arange(0, self.dim, 2, device=device, dtype=torch.float32)
        scale = None if self.scale_base is None else (exponents + 0.4 * self.dim) / (1.4 * self.dim)
        return {"inv_freq": self._compute_inv_freq(device), "scale": scale}

    def _compute_inv_freq(self, device: Device = None) -> Tensor:
        exponents = torch.arange(0, self.dim, 2, device=device, dtype=torch.float32) / self.dim
        return 1.0 / self.base**exponents

    def _update_cos_sin_cache(
        self, seqlen: int, device: torch.device | None = None, dtype: torch.dtype | None = None
    ) -> None:
        """Make the tables cover positions 0 .. seqlen - 1 on `device` in `dtype`."""
        cached = self._cos_cached
        if (
            cached is not None
            and seqlen <= self._seq_len_cached
            and cached.device == device
            and cached.dtype == dtype
            and has_values(cached)
            and (not self.training or context.is_savable(cached))
        ):
            return
        self._seq_len_cached = seqlen
        positions = torch.arange(seqlen, device=device, dtype=torch.float32)
        tables = self._tables(positions, seqlen, dtype)  # type: ignore[arg-type]  # None as in flash_attn 2.8.3
        self._cos_cached, self._sin_cached, self._cos_k_cached, self._sin_k_cached = tables

    def _tables_covering(self, seqlen: int, device: torch.device, dtype: torch.dtype) -> _Tables:
        """`_tables` of the positions 0 .. seqlen - 1 at least; kept, unless compiled code learns seqlen as it runs."""
        if not conditions.is_decided(seqlen <= self._seq_len_cached):
            return self._tables(torch.arange(seqlen, device=device, dtype=torch.float32), seqlen, dtype)
        self._update_cos_sin_cache(seqlen, device=device, dtype=dtype)
        return self._kept_tables()

    def _kept_tables(self) -> _Tables:
        cos, sin = self._cos_cached, self._sin_cached
        assert cos is not None and sin is not None
        return cos, sin, self._cos_k_cached, self._sin_k_cached

    def _tables(self, positions: Tensor, seqlen: int, dtype: torch.dtype) -> _Tables:
        """(cos, sin, cos_k, sin_k) in `dtype` at positions (n,); the last two None without xPos."""
        device, positions = positions.device, positions.to(torch.float32)
        self._ensure_filled(device)
        # A module cast to half precision has rounded inv_freq too far for large positions.
        exact = self.inv_freq.dtype == torch.float32
        inv_freq = self.inv_freq.to(device) if exact else self._compute_inv_freq(device)
        angles = torch.outer(positions, inv_freq)
        cos, sin = angles.cos(), angles.sin()
        if self.scale is None or self.scale_base is None:
            return cos.to(dtype), sin.to(dtype), None, None
        power = (positions - seqlen // 2) / self.scale_base
        scale = self.scale.to(device=device, dtype=torch.float32) ** power[:, None]
        return (cos * scale).to(dtype), (sin * scale).to(dtype), (cos / scale).to(dtype), (sin / scale).to(dtype)

    def forward(
        self,
        qkv: Tensor,
        kv: Tensor | None = None,
        seqlen_offset: int | Tensor = 0,
        max_seqlen: int | None = None,
        num_heads_q: int | None = None,
    ) -> Tensor | tuple[Tensor, Tensor]:
        """Rotate q and k in place.

        Arguments:
            qkv: (batch, seqlen, 3, nheads, head_dim), or (batch, seqlen, num_heads_q + 2 * num_heads_k, head_dim) with
                num_heads_q; with kv only q, (batch, seqlen, nheads, head_dim).
            kv: (batch, seqlen, 2, nheads_k, head_dim) or None.
            seqlen_offset: int, or integer tensor (batch,). Position of the first row. With a tensor give max_seqlen,
                for the tables cannot know how far to reach.
            max_seqlen: int, an upper bound of the positions in use.
            num_heads_q: int, needed with the second shape of qkv.

        Returns qkv, or (q, kv) with kv.
        """
        arguments.check_floating("qkv", qkv)
        if qkv.dim() not in (4, 5):
            raise RuntimeError(f"qkv: expected 4 or 5 dimensions (batch, seqlen, ..., head_dim), got {qkv.dim()}")
        if not isinstance(seqlen_offset, torch.Tensor):
            expected = "an int or an integer tensor"
            seqlen_offset = arguments.integer("seqlen_offset", seqlen_offset, least=0, expected=expected)
        if max_seqlen is not None:
            tables = self._tables_covering(arguments.integer("max_seqlen", max_seqlen), qkv.device, qkv.dtype)
        elif not isinstance(seqlen_offset, torch.Tensor):
            tables = self._tables_covering(qkv.shape[1] + seqlen_offset, qkv.device, qkv.dtype)
        elif self._cos_cached is None:
            raise RuntimeError("max_seqlen: expected an int with a tensor seqlen_offset, got None")
        else:
            tables = self._kept_tables()
        cos, sin, cos_k, sin_k = tables
        if kv is None:
            return apply_rotary_emb_qkv_(
                qkv, cos, sin, cos_k, sin_k, self.interleaved, seqlen_offset, num_heads_q=num_heads_q
            )
        q = apply_rotary_emb(qkv, cos, sin, self.interleaved, inplace=True, seqlen_offsets=seqlen_offset)
        k_tables = (cos, sin) if cos_k is None or sin_k is None else (cos_k, sin_k)
        return q, apply_rotary_emb_kv_(kv, *k_tables, self.interleaved, seqlen_offset)
