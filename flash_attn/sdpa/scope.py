"""A scope in which torch.nn.functional.scaled_dot_product_attention is computed by these kernels."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import cache
from threading import Lock

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.autograd import forward_ad
from torch.nn.attention.bias import CausalBias, CausalVariant

from flash_attn.flash_attn_interface import flash_attn_func
from flash_attn.limits import MAX_HEAD_DIM
from flash_attn.masks.arguments import DEVICES
from flash_attn.ops import arguments, context
from flash_attn.scoped import Scoped

_TENSOR_TYPES = (Tensor, torch.nn.Parameter)
_DTYPES = (torch.float16, torch.bfloat16)

_scope: Scoped[tuple[str, ...]] = Scoped("flash_attn.sdpa.devices")
_lock = Lock()
_open_scopes = 0  # of all threads
# SDPA of torch.nn.functional before the first open scope, and what has its place since
_original: Callable[..., Tensor] = F.scaled_dot_product_attention
_installed: Callable[..., Tensor] | None = None


@contextmanager
def use(devices: str | Sequence[str] = ("cuda",)) -> Iterator[None]:
    """Compute `torch.nn.functional.scaled_dot_product_attention` by these kernels within a `with` block.

    Calls that they support come here, all others go to PyTorch as before. Supported: query, key and value of four
    dimensions, float16 or bfloat16 (or cast to them by torch.autocast), head dims up to 512, of plain tensors outside
    of torch.func transforms. attn_mask may be one of `torch.nn.attention.bias`, a tensor of numbers, or a bool one.
    is_causal is aligned to the top left corner, as PyTorch's,
    whatever the lengths.

    The scope is that of the thread or asyncio task; while one is open anywhere, checkpoints that a backward on a GPU
    recomputes belong to it. It reaches callers that look the function up in torch.nn.functional at each call, as
    transformers, diffusers and torch.nn.MultiheadAttention do. Enter it outside of compiled functions.

    Arguments:
        devices: type of the devices whose tensors come here, "cuda" or "cpu", or several of them.
    """
    devices = _device_types(devices)
    _install()
    _scope.enter(devices)
    try:
        yield
    finally:
        _scope.leave(devices)
        _uninstall()


def _device_types(devices: str | Sequence[str]) -> tuple[str, ...]:
    types = (devices,) if isinstance(devices, str) else devices
    if not isinstance(types, (tuple, list, set, frozenset)) or not all(isinstance(x, str) for x in types):
        raise TypeError(f"devices: expected 'cuda', 'cpu' or several of them, got {arguments.shown(devices)}")
    unknown = [device for device in types if device not in ("cuda", "cpu")]
    if unknown:
        raise RuntimeError(f"devices: expected 'cuda', 'cpu' or several of them, got {', '.join(map(repr, unknown))}")
    return tuple(types)


def _install() -> None:
    global _original, _installed, _open_scopes
    with _lock:
        _open_scopes += 1
        if F.scaled_dot_product_attention is not _installed:  # also where another package has put its own over ours
            _original = F.scaled_dot_product_attention
            F.scaled_dot_product_attention = _installed = _replacement(_original)


def _uninstall() -> None:
    global _open_scopes
    with _lock:
        _open_scopes -= 1
        if not _open_scopes and F.scaled_dot_product_attention is _installed:
            F.scaled_dot_product_attention = _original


@cache
def _replacement(original: Callable[..., Tensor]) -> Callable[..., Tensor]:
    """The function that stands in for `original`; one for each, so that compiled code finds the one it knows."""

    def scaled_dot_product_attention(
        query: Tensor,
        key: Tensor,
        value: Tensor,
        attn_mask: Tensor | None = None,
        dropout_p: float = 0.0,
        is_causal: bool = False,
        *,
        scale: float | None = None,
        enable_gqa: bool = False,
    ) -> Tensor:
        devices = _scope.value
        if devices:
            inputs = _served_inputs(devices, query, key, value, attn_mask, dropout_p, is_causal, scale, enable_gqa)
            if inputs is not None:
                q, k, v, mask = inputs
                return _attention(q, k, v, mask, dropout_p, is_causal, scale)
        options = {"scale": scale, "enable_gqa": True} if enable_gqa else {"scale": scale}  # torch 2.4 has no GQA
        if isinstance(attn_mask, CausalBias):  # compares the function with the one in torch.nn.functional
            arguments = (query, key, value, attn_mask, dropout_p, is_causal)
            types = (type(attn_mask),)
            out: Tensor = attn_mask.__torch_function__(F.scaled_dot_product_attention, types, arguments, options)
            return out
        return original(query, key, value, attn_mask, dropout_p, is_causal, **options)

    return scaled_dot_product_attention


def _served_inputs(
    devices: tuple[str, ...],
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attn_mask: Tensor | None,
    dropout_p: float,
    is_causal: bool,
    scale: float | None,
    enable_gqa: bool,
) -> tuple[Tensor, Tensor, Tensor, Tensor | None] | None:
    """(query, key, value, attn_mask) in the dtype of autocast, or None for a call that goes to PyTorch, as invalid ones
    do."""
    if attn_mask is not None and is_causal:
        return None
    for x in (query, key, value):
        if type(x) not in _TENSOR_TYPES or x.is_nested or x.dim() != 4:
            return None
    device = "cuda" if query.is_cuda else "cpu" if query.is_cpu else None
    if device not in devices or not _plain_execution():
        return None
    assert device is not None
    if torch.is_autocast_enabled(device):
        dtype = torch.get_autocast_dtype(device)
        query, key, value = _autocast(dtype, query, key, value)
        if attn_mask is not None and type(attn_mask) in _TENSOR_TYPES:
            (attn_mask,) = _autocast(dtype, attn_mask)
    dtype = query.dtype
    if dtype not in _DTYPES or key.dtype != dtype or value.dtype != dtype:
        return None
    batch, heads, seqlen_q, head_dim = query.shape
    heads_k, seqlen_k, value_dim = key.shape[1], key.shape[2], value.shape[3]
    fits = (
        key.shape == (batch, heads_k, seqlen_k, head_dim)
        and value.shape == (batch, heads_k, seqlen_k, value_dim)
        and (heads == heads_k or (enable_gqa and heads_k > 0 and heads % heads_k == 0))
        and 0 < head_dim <= MAX_HEAD_DIM
        and 0 < value_dim <= MAX_HEAD_DIM
        and heads > 0
        and seqlen_q > 0
        and seqlen_k > 0  # of no batch cuDNN returns None
        and (attn_mask is None or _mask_fits(attn_mask, query, seqlen_k))
        and 0.0 <= dropout_p < 1.0
        and (scale is None or math.isfinite(scale))
    )
    return (query, key, value, attn_mask) if fits else None


def _mask_fits(attn_mask: Tensor, query: Tensor, seqlen_k: int) -> bool:
    """Whether flash_attn_func takes this mask for this query and number of keys."""
    if type(attn_mask) is CausalBias:
        return query.shape[2] == attn_mask.seq_len_q and seqlen_k == attn_mask.seq_len_kv
    if type(attn_mask) not in _TENSOR_TYPES or attn_mask.layout is not torch.strided or attn_mask.is_nested:
        return False
    sizes = (seqlen_k, *query.shape[2::-1])
    fits: bool = (
        attn_mask.device == query.device
        and attn_mask.dtype in (torch.bool, torch.float32, query.dtype)
        and query.device.type in DEVICES
        and 2 <= attn_mask.dim() <= 4
        and all(n in (1, full) for n, full in zip(attn_mask.shape[::-1], sizes))
    )
    return fits


def _plain_execution() -> bool:
    """Whether no torch.func transform and no forward-mode level is active, through which our operators do not go."""
    return torch.compiler.is_compiling() or not (context.transformed() or forward_ad._current_level >= 0)


def _autocast(dtype: torch.dtype, *tensors: Tensor) -> list[Tensor]:
    """Floating point tensors in the dtype of autocast; float64 ones stay."""
    return [x.to(dtype) if x.is_floating_point() and x.dtype != torch.float64 else x for x in tensors]


def _attention(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attn_mask: Tensor | None,
    dropout_p: float,
    causal: bool,
    scale: float | None,
) -> Tensor:
    """SDPA (batch, heads, seqlen, head_dim) by the public function, whose positions are aligned bottom right."""
    q, k, v = query.transpose(1, 2), key.transpose(1, 2), value.transpose(1, 2)
    mask = bias = None
    bottom_right = False
    if type(attn_mask) is CausalBias:
        causal, bottom_right = True, attn_mask.variant == CausalVariant.LOWER_RIGHT
    elif attn_mask is not None:
        mask, bias = (attn_mask, None) if attn_mask.dtype == torch.bool else (None, attn_mask)
    window = (-1, -1)
    ahead = q.shape[1] - k.shape[1]
    if causal and not bottom_right and ahead != 0:
        if ahead > 0:  # key j <= row i is j <= position(i) + ahead
            causal, window = False, (-1, ahead)
        else:  # no row sees a key beyond the last row
            k, v = k[:, : q.shape[1]], v[:, : q.shape[1]]
    deterministic = torch.are_deterministic_algorithms_enabled()
    out: Tensor = flash_attn_func(
        q, k, v, dropout_p, scale, causal, window, deterministic=deterministic, mask=mask, attn_bias=bias
    )
    return out.transpose(1, 2)
