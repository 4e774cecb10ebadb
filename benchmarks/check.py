"""A correctness check of what is timed: some rows of it against float64 attention (tests/reference.py)."""

from __future__ import annotations

import over_cache
import torch
from shared import attention

CHECKED_QUERIES = 256
# Rounding to bfloat16 leaves about 2e-3; a wrong mask or scale is far above this bound.
MAX_RELATIVE_ERROR = 2e-2


class Sample:
    """The last queries of the last sequence, for the query heads of the last K/V head."""

    def __init__(self, row, inputs):
        case = row.case
        self.seqlens, self.heads = row.seqlens, case.nheads // case.nheads_k
        self.length = row.seqlens[-1] if row.seqlens else case.seqlen_k
        all_queries = row.seqlens[-1] if row.seqlens else case.seqlen_q
        self.queries = min(CHECKED_QUERIES, all_queries)
        self.has_all_queries = self.queries == all_queries
        options = {"causal": case.causal, "window": case.window, "softcap": case.softcap}
        options.update(alibi_slopes=self.of_heads(inputs.alibi_slopes), sinks=self.of_heads(inputs.sinks))
        options.update(inputs.sample_options(self.queries))
        self.leaves = [self.of_queries(inputs.q), self.of_keys(inputs.k), self.of_keys(inputs.v)]
        self.leaves = [leaf.double().requires_grad_() for leaf in self.leaves]
        with torch.enable_grad():
            self.out = attention(*self.leaves, **options).out

    def of_heads(self, tensor):
        return None if tensor is None else tensor[-self.heads :]

    def last(self, tensor, rows, heads):
        sequence = tensor if self.seqlens else tensor[-1]
        return sequence[-rows:, -heads:].detach().unsqueeze(0)

    def of_queries(self, tensor):
        return self.last(tensor, self.queries, self.heads)

    def of_keys(self, tensor):
        return self.last(tensor, self.length, 1)


def relative(value, reference):
    return (torch.linalg.norm(value - reference) / torch.linalg.norm(reference)).item()


def relative_error(row, inputs, mode, result):
    """||result - ref|| / ||ref|| of the output (fwd), or the largest one of the gradients (dq, dk, dv).

    dk and dv are checked where the sample holds all queries. None for dropout: the implementations draw different
    masks by design.
    """
    if row.case.dropout:
        return None
    if row.over_cache:
        return over_cache.relative_error(row, inputs, result)
    sample = Sample(row, inputs)
    if mode == "fwd":
        return relative(sample.of_queries(result), sample.out.detach())
    dq, dk, dv = torch.autograd.grad(sample.out, sample.leaves, sample.of_queries(inputs.dout).double())
    errors = [relative(sample.of_queries(result[0]), dq)]
    if sample.has_all_queries:
        errors += [relative(sample.of_keys(ours), reference) for ours, reference in zip(result[1:], (dk, dv))]
    return max(errors)
