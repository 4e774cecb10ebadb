"""8-bit tensors: value = 8-bit value * descale. The one definition of their arithmetic and of the shapes of descales.

8-bit values are float8_e4m3fn or int8 (symmetric, -127 to 127), descales float32. Every step is one IEEE operation in
float32, rounded to nearest even, so that CPU, GPU and a kernel give the same bits:

    descale = max(min(amax, FLT_MAX) * fl(1 / 448), 2^-126)      amax = largest |x| that is no NaN; int8: 1 / 127
    stored  = rne(clamp(x * fl(1 / descale), -448, 448))                 rne: to e4m3 or to an integer

x is float32 (float64 is rounded to it, half precision is exact in it). Infinities saturate. NaN is 0x7F in
e4m3. int8 has no NaN: it is stored as 0, and a descale that is computed from it is NaN.

With a descale rounded up to a power of two, e4m3 may hold the power beyond all finite values of x's dtype, 2^16 for
float16. `largest_stored` excludes it.
"""

from __future__ import annotations

import math
from typing import NamedTuple

import torch
from torch import Tensor

E4M3, INT8 = torch.float8_e4m3fn, torch.int8
EIGHT_BIT = (E4M3, INT8)
OF_QUERIES = (E4M3,)  # q may have them if k has the same
FLOAT8 = tuple(dtype for dtype in EIGHT_BIT if dtype.is_floating_point)  # torch 2.4 cannot index them
LARGEST = {E4M3: 448.0, INT8: 127.0}
_WIDE = (torch.float16, torch.bfloat16, torch.float32, torch.float64)
_HALF = (torch.float16, torch.bfloat16)
_LARGEST_FLOAT32 = torch.finfo(torch.float32).max
SMALLEST_DESCALE = 2.0**-126
# (n, m): for amax just below 2^e and a descale rounded up to a power of two, 2^e would be stored as 2^n; m is the
# largest 8-bit value below 2^n.
_LAST_POWER = {E4M3: (8, 240.0), INT8: (6, 63.0)}
_RECIPROCAL = {
    dtype: torch.tensor(1 / largest, dtype=torch.float32, device="cpu").item() for dtype, largest in LARGEST.items()
}


# ---- arithmetic ----


def descale_of(x: Tensor, axes: tuple[int, ...], dtype: torch.dtype, power_of_two: bool = False) -> Tensor:
    """The descale of x over `axes`, which stay as axes of size 1. power_of_two: rounded up to one."""
    x = x.detach().to(torch.float32)
    if any(x.shape[axis] == 0 for axis in axes):
        shape = [1 if axis in {a % x.dim() for a in axes} else size for axis, size in enumerate(x.shape)]
        return x.new_full(shape, SMALLEST_DESCALE)
    magnitude = x.abs().nan_to_num(nan=0.0, posinf=_LARGEST_FLOAT32)
    descale = (magnitude.amax(axes, keepdim=True) * _RECIPROCAL[dtype]).clamp(min=SMALLEST_DESCALE)
    if power_of_two:
        mantissa = 0x7FFFFF
        descale = ((descale.view(torch.int32) + mantissa) & ~mantissa).view(torch.float32)
    if dtype is INT8:
        descale = descale.masked_fill(x.isnan().amax(axes, keepdim=True), float("nan"))
    return descale


def largest_stored(descale: Tensor, dtype: torch.dtype, x_dtype: torch.dtype) -> Tensor:
    """The largest 8-bit values, like descale, that a tensor of x_dtype can hold once scaled.

    descale: powers of two, of finite x. The largest value of x_dtype lies just below a power of two. Only with the
    largest descale can x be rounded up to it.
    """
    exponent = math.frexp(min(torch.finfo(x_dtype).max, _LARGEST_FLOAT32))[1]
    power, before = _LAST_POWER[dtype]
    return torch.full_like(descale, LARGEST[dtype]).masked_fill(descale == 2.0 ** (exponent - power), before)


def encode(x: Tensor, descale: Tensor, dtype: torch.dtype, most: Tensor | None = None) -> Tensor:
    """x quantised by a descale that broadcasts to it, and clamped to `most`, which is like descale."""
    scaled = x.detach().to(torch.float32) * descale.reciprocal()
    scaled = scaled.clamp(-LARGEST[dtype], LARGEST[dtype]) if most is None else scaled.clamp(-most, most)
    if dtype is INT8:
        return scaled.nan_to_num(nan=0.0).round().to(INT8)
    return scaled.masked_fill(scaled.isnan(), float("nan")).to(dtype)  # NaN of either sign has the bits of one


def decode(stored: Tensor, descale: Tensor | None, dtype: torch.dtype) -> Tensor:
    """8-bit values * descale in `dtype`, computed in float32 (float64 for float64). descale broadcasts, None is 1."""
    if descale is None:
        return stored.to(dtype)
    wide = torch.float64 if dtype == torch.float64 else torch.float32
    return (stored.to(wide) * descale).to(dtype)


# ---- descales ----


class Descales(NamedTuple):
    """Those of a call; None is 1. v_per_channel: v's is (nheads_k, head_dim_v) or (batch, nheads_k, head_dim_v)."""

    q: Tensor | None = None
    k: Tensor | None = None
    v: Tensor | None = None
    v_per_channel: bool = False


def result_dtype(q: Tensor, v: Tensor, out_dtype: torch.dtype | None) -> torch.dtype:
    """The dtype of out: out_dtype, or else q's; of 8-bit q that of a wider v, or else bfloat16."""
    if out_dtype is not None or q.dtype not in EIGHT_BIT:
        return out_dtype or q.dtype
    return torch.bfloat16 if v.dtype in EIGHT_BIT else v.dtype


def is_by_row(descale: Tensor | None) -> bool:
    """Whether a descale is one of K or V by page or row, and not by head."""
    return descale is not None and descale.dim() == 3


def by_row(descale: Tensor, x: Tensor) -> Tensor:
    """A descale by page or row as a view of the shape of x (K or V), whose last axis has size 1."""
    if x.dim() == 3:
        return descale.expand(x.shape[0], 1, x.shape[1]).transpose(1, 2)
    return descale.expand(x.shape[:3]).unsqueeze(-1)


def by_head(descale: Tensor, heads: int) -> Tensor:
    """A descale of one element, of heads, or of batch and heads, as float32 (1 or batch, heads).

    Those of K/V heads are repeated for the query heads of their group.
    """
    if descale.numel() == 1:
        return descale.reshape(1, 1).expand(1, heads)
    factor = descale if descale.dim() == 2 else descale.unsqueeze(0)
    return factor if factor.shape[1] == heads else factor.repeat_interleave(heads // factor.shape[1], 1)


class Scaling(NamedTuple):
    """How the descales of a call are applied around attention, which itself computes with 8-bit values.

    Those of heads multiply the queries before it and the output after it; those of rows and pages multiply K and V.
    """

    dtype: torch.dtype  # of the operands
    query_factor: Tensor | None  # (1 or batch, heads)
    out_factor: Tensor | None  # (1 or batch, heads, 1 or head_dim_v)
    k_rows: Tensor | None  # like k with a last axis of 1
    v_rows: Tensor | None

    @staticmethod
    def of(q: Tensor, k: Tensor, v: Tensor, descales: Descales, dtype: torch.dtype) -> Scaling:
        """Of a call whose arguments are checked."""
        heads = q.shape[-2]
        k_by_row, v_by_row = is_by_row(descales.k), is_by_row(descales.v) and not descales.v_per_channel
        given = [descales.q, None if k_by_row else descales.k]
        factors = [by_head(x, heads) for x in given if x is not None]
        query_factor = factors[0] * factors[1] if len(factors) == 2 else factors[0] if factors else None
        out_factor = None
        if descales.v is not None and not v_by_row:
            if descales.v_per_channel:
                per_channel = descales.v if descales.v.dim() == 3 else descales.v.unsqueeze(0)
                out_factor = per_channel.repeat_interleave(heads // max(per_channel.shape[1], 1), 1)
            else:
                out_factor = by_head(descales.v, heads).unsqueeze(-1)
        return Scaling(
            dtype,
            query_factor,
            out_factor,
            None if descales.k is None or not k_by_row else by_row(descales.k, k),
            None if descales.v is None or not v_by_row else by_row(descales.v, v),
        )

    def queries(self, q: Tensor, sequence: int | Tensor | None = None) -> Tensor:
        """q scaled, in the operands' dtype.

        sequence: None for a batch (b, sq, h, d). Of packed rows (total_q, h, d) the index of their sequence: an int if
        all belong to one, else a tensor.
        """
        return decode(q, _of_sequences(self.query_factor, sequence, 1), self.dtype)

    def scaled(self, stored: Tensor, rows: Tensor | None) -> Tensor:
        """8-bit K or V times `rows`, the part of k_rows or v_rows for it; unchanged if that is None."""
        return stored if rows is None else decode(stored, rows, self.dtype)

    def store(self, out: Tensor, result: Tensor, sequence: int | Tensor | None = None) -> None:
        """Scale the result of the operands and store it in out. sequence: as in `queries`."""
        factor = _of_sequences(self.out_factor, sequence, 0)
        wide = torch.float64 if result.dtype == torch.float64 else torch.float32
        out.copy_(result if factor is None else result.to(wide) * factor)


def _of_sequences(factor: Tensor | None, sequence: int | Tensor | None, new_axes: int) -> Tensor | None:
    """The factor (1 or batch, heads, ...) of each row's sequence. new_axes: appended, so that it broadcasts."""
    if factor is None:
        return None
    for _ in range(new_axes):
        factor = factor.unsqueeze(-1)
    if sequence is None:
        return factor.unsqueeze(1)
    if factor.shape[0] == 1:
        return factor[0]
    return factor[sequence] if factor.shape[0] > 0 else None


# ---- rules ----


def named(dtype: torch.dtype | None) -> str:
    return str(dtype).replace("torch.", "")


def one_of(*dtypes: torch.dtype) -> str:
    """ "float16, bfloat16 or int8" """
    *first, last = map(named, dtypes)
    return f"{', '.join(first)} or {last}" if first else last


def _require(condition: bool, name: str, expected: str, got: object) -> None:
    if not condition:
        raise RuntimeError(f"{name}: expected {expected}, got {got}")


def check_dtypes(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    out_dtype: torch.dtype | None,
    dropout_p: float = 0.0,
    names: tuple[str, str] = ("k", "v"),
) -> None:
    """Check the dtypes of a call that has an 8-bit tensor, a descale or an out_dtype."""
    k_name, v_name = names
    _require(q.dtype in (*_WIDE, *OF_QUERIES), "q", f"dtype {one_of(*_HALF, *OF_QUERIES)}", named(q.dtype))
    if q.dtype in OF_QUERIES:
        _require(k.dtype is q.dtype, k_name, f"the dtype of q ({named(q.dtype)})", named(k.dtype))
        _require(v.dtype in (q.dtype, *_HALF), v_name, f"dtype {one_of(q.dtype, *_HALF)}", named(v.dtype))
        _require(out_dtype in (None, *_HALF), "out_dtype", "float16 or bfloat16", named(out_dtype))
    else:
        expected = f"the dtype of q ({named(q.dtype)}), {one_of(*EIGHT_BIT)}"
        _require(k.dtype in (q.dtype, *EIGHT_BIT), k_name, expected, named(k.dtype))
        _require(v.dtype == k.dtype, v_name, f"the dtype of {k_name} ({named(k.dtype)})", named(v.dtype))
        expected = f"None or the dtype of q ({named(q.dtype)})"
        _require(out_dtype in (None, q.dtype), "out_dtype", expected, named(out_dtype))
    some = any(x.dtype in EIGHT_BIT for x in (q, k, v))
    _require(dropout_p == 0.0 or not some, "dropout_p", "0 with 8-bit tensors", dropout_p)


def check_descales(q: Tensor, k: Tensor, v: Tensor, descales: Descales, batch: int) -> None:
    """Check the descales of q (.., heads, head_dim) and k, v (.., heads_k, head_dim): a batch, packed, or a cache."""
    heads, heads_k = q.shape[-2], k.shape[-2]
    rows = [k.shape[0], k.shape[1] if k.dim() == 4 else 1, heads_k]
    by_rows = [rows, [rows[0], 1, heads_k]]
    by_heads = [[heads_k], [batch, heads_k]]
    _check_descale("q_descale", descales.q, q, q, by_heads + [[heads], [batch, heads]])
    _check_descale("k_descale", descales.k, k, q, by_heads + by_rows)
    if descales.v_per_channel:
        channels = [heads_k, v.shape[-1]]
        _require(descales.v is not None, "v_descale", "a tensor with v_descale_axis", None)
        _check_descale("v_descale", descales.v, v, q, [channels, [batch, *channels]], one_element=False)
    else:
        _check_descale("v_descale", descales.v, v, q, by_heads + by_rows)


def _check_descale(
    name: str, descale: Tensor | None, x: Tensor, q: Tensor, shapes: list[list[int]], one_element: bool = True
) -> None:
    if descale is None:
        return
    _require(x.dtype in EIGHT_BIT, name, f"None for {name[0]} of {named(x.dtype)}", "a tensor")
    _require(descale.device == q.device, name, f"a tensor on q's device ({q.device})", f"one on {descale.device}")
    _require(descale.dtype == torch.float32, name, "dtype float32", named(descale.dtype))
    fits = list(descale.shape) in shapes or (one_element and descale.numel() == 1)
    several = list(map(list, dict.fromkeys(map(tuple, shapes))))
    expected = f"{'one element or ' if one_element else ''}shape {' or '.join(map(str, several))}"
    _require(fits, name, expected, list(descale.shape))
