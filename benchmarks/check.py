"""A correctness check of what is timed: some output rows against float64 attention (tests/reference.py)."""

from __future__ import annotations

import torch
from shared import attention

CHECKED_QUERIES = 256
# Rounding to bfloat16 leaves about 2e-3; a wrong mask or scale is far above this bound.
MAX_RELATIVE_ERROR = 2e-2


def relative_error(row, inputs, out):
    """||out - ref|| / ||ref|| over the last queries of the last sequence and head.

    None for dropout: the implementations draw different masks by design.
    """
    case = row.case
    if case.dropout:
        return None
    length = row.seqlens[-1] if row.seqlens else case.seqlen_k
    queries = min(CHECKED_QUERIES, length, case.seqlen_q)

    def last(tensor, count):
        sequence = tensor if row.seqlens else tensor[-1]
        return sequence[-count:, -1:].detach().unsqueeze(0)

    slopes = None if inputs.alibi_slopes is None else inputs.alibi_slopes[-1:]
    options = {"causal": case.causal, "window": case.window, "softcap": case.softcap, "alibi_slopes": slopes}
    reference = attention(last(inputs.q, queries), last(inputs.k, length), last(inputs.v, length), **options).out
    return (torch.linalg.norm(last(out, queries) - reference) / torch.linalg.norm(reference)).item()
