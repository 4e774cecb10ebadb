"""8-bit operands of the forwards: their arguments, their checks, and the scaling that attention computes with.

8-bit keys and values stay in 8 bits: a tile converts the rows that it reads to the dtype of the scores.
"""

from __future__ import annotations

from typing import NamedTuple

import torch

from .. import eight_bit
from ..eight_bit import Descales, Scaling
from . import checks
from .scores import compute_dtype


class EightBit(NamedTuple):
    """What only calls with 8-bit tensors have."""

    descales: Descales
    out_dtype: torch.dtype | None

    @staticmethod
    def of(
        q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, descales: Descales, out_dtype: torch.dtype | None
    ) -> EightBit | None:
        """None for a call that has no 8-bit tensor and none of these arguments."""
        has_8bit = any(getattr(x, "dtype", None) in eight_bit.EIGHT_BIT for x in (q, k, v))
        given = any(x is not None for x in (descales.q, descales.k, descales.v, out_dtype)) or descales.v_per_channel
        return EightBit(descales, out_dtype) if has_8bit or given else None


def check_operands(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    axes: str,
    kv_axes: str,
    call: EightBit | None,
    p_dropout: float = 0.0,
    names: tuple[str, str] = ("k", "v"),
    same_batch: bool = False,
    has_qv: bool = False,
) -> None:
    """`check_query` and `check_key_value`, of any dtypes that go together. same_batch: k has q's batch size.
    has_qv: v has scores too, and q's head dim may be 0."""
    dtypes: tuple[torch.dtype | None, torch.dtype | None] = (None, None)
    further: tuple[torch.dtype, ...] = ()
    if call is not None:
        for name, x in zip(("q", *names), (q, k, v)):
            checks.check_on_cpu(name, x)
        eight_bit.check_dtypes(q, k, v, call.out_dtype, p_dropout, names)
        dtypes, further = (k.dtype, v.dtype), eight_bit.OF_QUERIES
    checks.check_query(q, axes, *further, least_dim=0 if has_qv else 1)
    checks.check_key_value(q, k, v, kv_axes, q.shape[0] if same_batch else None, names, dtypes)


def check_descales(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, call: EightBit | None, batch: int) -> None:
    """Of operands that `check_operands` has passed."""
    if call is not None:
        for name, x in zip(("q_descale", "k_descale", "v_descale"), call.descales[:3]):
            if x is not None:
                checks.check_device(name, x)
        eight_bit.check_descales(q, k, v, call.descales, batch)


def output_dtype(q: torch.Tensor, v: torch.Tensor, call: EightBit | None) -> torch.dtype:
    return q.dtype if call is None else eight_bit.result_dtype(q, v, call.out_dtype)


def scaling_of(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, call: EightBit | None) -> Scaling | None:
    """None where the operands are those of the call."""
    return None if call is None else Scaling.of(q, k, v, call.descales, compute_dtype(q.dtype))


def result_like(out: torch.Tensor, scaling: Scaling | None) -> torch.Tensor:
    """What attention writes to: out, or with a scaling a tensor of the dtype of the scores that it brings to out."""
    return out if scaling is None else out.new_empty(out.shape, dtype=scaling.dtype)
