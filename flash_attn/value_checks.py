"""FLASH_ATTN_DEBUG=1: values on the device are read and checked before a call; errors name the argument.

Without it a GPU skips entries beyond a tensor, clamps lengths and lets NaN through, and the host does not wait. A call
that a CUDA graph captures is not checked, because it must not read values.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from flash_attn.cpu import kvcache
from flash_attn.cpu.checks import require
from flash_attn.cpu.scores import is_unbounded
from flash_attn.cpu.varlen import check_pages, gather_pages, sequences

Call = dict[str, Any]  # arguments of a backend's function, by name
_planned: dict[int, tuple[list[int], list[int]]] = {}  # (cache_seqlens, cache_leftpad) of plans, by their address


def check(name: str, call: Call) -> None:
    """Raise RuntimeError for bad values among the arguments of the backend's function of this name."""
    function = _CHECKS.get(name)
    if function is not None and not _is_captured(call["q"]):
        with torch.no_grad():
            function(call)


def remember_plan(plan: Tensor, call: Call) -> None:
    """Keep the lengths that a plan is made or updated for. An update in a CUDA graph makes them unknown."""
    if _is_captured(plan):
        _planned.pop(plan.data_ptr(), None)
    else:
        batch, capacity = call["batch"], call["seqlen_cache"]
        _planned[plan.data_ptr()] = _lengths(call["seqlens_k"], batch, capacity), _lengths(call["leftpad_k"], batch, 0)


def _is_captured(x: Tensor) -> bool:
    return x.is_cuda and torch.cuda.is_current_stream_capturing()


def _on_cpu(x: Any) -> Any:
    return None if x is None else x.cpu()


def _lengths(x: Tensor | None, batch: int, otherwise: int) -> list[int]:
    return [otherwise] * batch if x is None else x.tolist()


def _check_finite(name: str, x: Tensor | None, first_row: int = 0, where: str = "") -> None:
    """Raise RuntimeError for infinities and NaN. x: the argument's rows from first_row on."""
    if x is None or not x.is_floating_point():
        return
    x = x.float() if x.element_size() == 1 else x
    wrong = torch.nonzero(~torch.isfinite(x))
    if wrong.numel() > 0:
        index = wrong[0].tolist()
        value = x[tuple(index)].item()
        index[0] += first_row
        raise RuntimeError(f"{name}: expected finite values{where}, got {value} at {index}")


# ---- dense and packed ----


def _check_dense(call: Call) -> None:
    for name in ("q", "k", "v"):
        _check_finite(name, call[name])


def _check_dense_backward(call: Call) -> None:
    _check_finite("dout", call["dout"])


def _check_cu_seqlens(name: str, cu_seqlens: Tensor, total: int, most: int, most_name: str) -> None:
    bounds = cu_seqlens.tolist()
    require(bounds[0] >= 0, name, "values >= 0", bounds[0])
    for i, (start, stop) in enumerate(zip(bounds, bounds[1:])):
        require(start <= stop, name, "values that never fall", f"{start} and {stop} from {i} on")
        require(stop - start <= most, name, f"lengths of at most {most_name} ({most})", f"{stop - start} at {i}")
    require(bounds[-1] <= total, name, f"values of at most {total}, the rows that there are", bounds[-1])


def _check_range(name: str, x: Tensor, least: int, most: int) -> None:
    for i, value in enumerate(x.tolist()):
        require(least <= value <= most, name, f"values in [{least}, {most}]", f"{value} at {i}")


def _check_packed(call: Call) -> None:
    q, k, v = call["q"], call["k"], call["v"]
    index = ("cu_seqlens_q", "cu_seqlens_k", "seqused_k", "leftpad_k", "block_table")
    cu_q, cu_k, used, padding, table = (_on_cpu(call.get(name)) for name in index)
    if cu_q is None:  # of e4m3 kernels, which have both forms
        return _check_dense(call)
    capacity = k.shape[0] if table is None else table.shape[1] * k.shape[1]
    most_q, most_k = call.get("max_seqlen_q", q.shape[0]), call.get("max_seqlen_k", capacity)
    _check_cu_seqlens("cu_seqlens_q", cu_q, q.shape[0], most_q, "max_seqlen_q")
    if used is None:
        total = capacity if table is None else max(cu_k.tolist())
        _check_cu_seqlens("cu_seqlens_k", cu_k, total, min(most_k, capacity), "max_seqlen_k")
    else:
        _check_range("seqused_k", used, 0, min(most_k, capacity))
        if table is None:
            _check_range("cu_seqlens_k", cu_k[:-1], 0, capacity)
    if padding is not None:
        _check_range("leftpad_k", padding, 0, capacity)
    for rows in sequences(q.shape[0], k, cu_q, cu_k, used, padding, table):
        _check_finite("q", q[rows.q0 : rows.q1], rows.q0)
        if table is not None:
            check_pages(table, rows.index, rows.k0, rows.k1, k.shape[1], k.shape[0])
        for name, x in (("k", k), ("v", v)):
            if table is None:
                _check_finite(name, x[rows.k0 : rows.k1], rows.k0)
            else:
                keys = gather_pages(x, table, rows.index, rows.k0, rows.k1)
                _check_finite(name, keys, rows.k0, f" in sequence {rows.index}")


def _check_packed_backward(call: Call) -> None:
    dout, cu_q = call["dout"], _on_cpu(call["cu_seqlens_q"])
    if dout is not None:
        for start, stop in zip(cu_q.tolist(), cu_q.tolist()[1:]):
            _check_finite("dout", dout[start:stop], start)


# ---- KV cache ----


def _check_cache(call: Call) -> None:
    q, k = call["q"], call["k"]
    caches = {"k_cache": call["kcache"], "v_cache": call["vcache"]}
    lengths, rows, padding, table = (
        _on_cpu(call[name]) for name in ("seqlens_k", "cache_batch_idx", "leftpad_k", "block_table")
    )
    number = torch.empty((), device="cpu", dtype=torch.float32)
    shape = number.expand(call["kcache"].shape)  # for rules that ask for sizes
    cache = kvcache.Cache(shape, shape, table)
    entries = kvcache.check_entries(q, cache, k, lengths, rows, padding, call["window_left"])
    if call["rotary_cos"] is not None and k is not None:
        sides = call["window_left"], call["window_right"]
        one_position = not call["is_causal"] and all(map(is_unbounded, sides))
        kvcache.check_rotary_rows(q, k, entries, call["rotary_cos"], one_position)
    if call.get("plan") is not None:
        batch = q.shape[0]
        _check_plan(call["plan"], _lengths(lengths, batch, cache.capacity), _lengths(padding, batch, 0))
    for entry in entries:
        if not entry.is_padding:
            where = f" in sequence {entry.index}"
            for name, x in (("q", q), ("k", k), ("v", call["v"])):
                _check_finite(name, None if x is None else x[entry.index], 0, where)
            for name, x in caches.items():
                _check_finite(name, _cached_rows(x, table, entry), entry.needed, where)


def _cached_rows(x: Tensor, table: Tensor | None, entry: kvcache.CacheEntry) -> Tensor:
    """The cached rows of x that some query sees."""
    stop = max(entry.needed, entry.cached)
    if table is None:
        return x[entry.row, entry.needed : stop]
    return gather_pages(x, table, entry.row, entry.needed, stop)


def _check_plan(plan: Tensor, lengths: list[int], padding: list[int]) -> None:
    planned = _planned.get(plan.data_ptr(), (lengths, padding))
    for name, made, asked in zip(("cache_seqlens", "cache_leftpad"), planned, (lengths, padding)):
        require(made == asked, "plan", f"one updated for {name} {asked}", f"one for {made}")


_CHECKS: dict[str, Callable[[Call], None]] = {
    "fwd": _check_dense,
    "bwd": _check_dense_backward,
    "varlen_fwd": _check_packed,
    "varlen_bwd": _check_packed_backward,
    "fwd_kvcache": _check_cache,
}
