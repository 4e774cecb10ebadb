"""`qv`: queries that meet the values, in calls whose scores are softmax_scale * (q k^T + qv v^T).

So multi-head latent attention decodes: K is the rotated part of a cached row, V its latent part, and both are keys.
"""

from __future__ import annotations

from torch import Tensor

from flash_attn.ops import arguments

DEVICES = ("cpu", "meta")  # that a qv is computed on


def check_device(qv: Tensor | None, q: Tensor) -> None:
    """Raise NotImplementedError for a qv where no kernel reads it."""
    if qv is not None and q.device.type not in DEVICES:
        raise NotImplementedError(f"qv: expected None on {q.device.type}, got a tensor: only the CPU computes it yet")


def score_dim(q: Tensor, qv: Tensor) -> int:
    """How many products a score adds up: the head dim of q, which may be 0, and that of qv."""
    return (q.shape[-1] if q.dim() else 1) + arguments.head_dim("qv", qv)
