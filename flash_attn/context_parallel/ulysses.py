"""Heads that move: every rank gets the tokens of all ranks for some heads, computes with them, and sends them back.

Method ulysses computes them as one GPU would. In a mesh of two dimensions the ranks are those of a row, and K and V of
the heads that a rank then has come from the other rows, by all_gather or ring.

Query heads are divided evenly, whatever their number; a K/V head whose query heads are on several ranks goes to all of
them, and its gradients are added by the owners of the tokens in the order of ranks.
"""

from __future__ import annotations

from typing import NamedTuple

import torch

from flash_attn.context_parallel import gathered
from flash_attn.context_parallel.compute import Options, sum_dtype
from flash_attn.context_parallel.layouts import Span
from flash_attn.context_parallel.passes import HeadRanks
from flash_attn.context_parallel.unshard import rows_of


class HeadCall(NamedTuple):
    """Query heads [q0, q1) and K/V heads [k0, k1) of a rank's own that form whole groups of one size."""

    q0: int
    q1: int
    k0: int
    k1: int


class Heads(NamedTuple):
    """The query and the K/V heads of every rank."""

    query: tuple[Span, ...]
    key: tuple[Span, ...]
    group: int

    @staticmethod
    def divide(heads: int, heads_k: int, ranks: int) -> Heads:
        group = heads // heads_k
        query = tuple((heads * r // ranks, heads * (r + 1) // ranks) for r in range(ranks))
        return Heads(query, tuple((a // group, -(-b // group) if a < b else a // group) for a, b in query), group)

    def calls(self, rank: int) -> list[HeadCall]:
        """A rank's heads as calls: a part of the first group, whole groups, a part of the last one."""
        (start, stop), (first_k, _) = self.query[rank], self.key[rank]
        result = []
        head = start
        while head < stop:
            end = min(stop, (head // self.group + 1) * self.group)
            if head % self.group == 0 and end - head == self.group:
                end = stop // self.group * self.group
            k0, k1 = head // self.group - first_k, (end - 1) // self.group + 1 - first_k
            result.append(HeadCall(head - start, end - start, k0, k1))
            head = end
        return result


class _AllToAll:
    """Between own tokens of all heads and all tokens of own heads."""

    def __init__(self, ranks: HeadRanks, batch: int):
        layout = ranks.layout
        self._transport, self._batch, self._spans, self._total = ranks.transport, batch, layout.spans, layout.cu[-1]
        self._counts = [layout.tokens_of(rank) for rank in range(layout.ranks)]
        self._own = self._counts[ranks.transport.rank]

    def to_heads(self, x, heads):
        """(batch * own tokens, all heads, d) -> (batch * all tokens, own heads, d)."""
        rank, parts = self._transport.rank, []
        a, b = heads[rank]
        for source, count in enumerate(self._counts):
            shape = (self._batch * count, b - a, x.shape[2])
            parts.append(x[:, a:b] if source == rank else self._transport.buffer(x, shape))
        self._exchange([x[:, c:d].contiguous() for c, d in heads], parts)
        result = x.new_empty((self._batch, self._total, b - a, x.shape[2]))
        for spans, part in zip(self._spans, parts):
            part, row = part.unflatten(0, (self._batch, -1)) if part.numel() else part, 0
            for start, stop in spans if part.numel() else ():
                result[:, start:stop] = part[:, row : row + stop - start]
                row += stop - start
        return result.flatten(0, 1)

    def to_tokens(self, x, heads, target):
        """(batch * all tokens, own heads, d) of every rank, added to target (batch * own tokens, all heads, d)."""
        rank, parts = self._transport.rank, []
        x = x.unflatten(0, (self._batch, self._total)) if x.numel() else x.new_empty((self._batch, self._total, 0, 0))
        sends = [rows_of(x.transpose(0, 1), spans).transpose(0, 1).flatten(0, 1).contiguous() for spans in self._spans]
        for source, (a, b) in enumerate(heads):
            shape = (self._batch * self._own, b - a, target.shape[2])
            parts.append(sends[rank] if source == rank else x.new_empty(shape))
        self._exchange(sends, parts)
        for (a, b), part in zip(heads, parts):
            if part.numel():
                target[:, a:b] += part
        return target

    def _exchange(self, sends, receives):
        peers = [r for r in range(self._transport.size) if r != self._transport.rank]
        outgoing = [(r, sends[r]) for r in peers if sends[r].numel()]
        incoming = [(r, receives[r]) for r in peers if receives[r].numel()]
        self._transport.exchange(outgoing, incoming).wait()


def _inputs(exchange: _AllToAll, heads: Heads, q, k, v):
    return [exchange.to_heads(x, own) for x, own in ((q, heads.query), (k, heads.key), (v, heads.key))]


def forward(ranks: HeadRanks, method, batch, q, k, v, sinks, options: Options):
    """(out, LSE (heads, rows) of this rank's tokens, what `backward` needs). method: by which K and V move, if any."""
    heads, exchange = Heads.divide(q.shape[1], k.shape[1], ranks.transport.size), _AllToAll(ranks, batch)
    full_q, full_k, full_v = _inputs(exchange, heads, q, k, v)
    full_out = full_q.new_empty((*full_q.shape[:2], v.shape[2]))
    full_lse = torch.empty(full_q.shape[:2], dtype=sum_dtype(q.dtype), device=q.device)
    first = heads.query[ranks.transport.rank][0]
    for call in heads.calls(ranks.transport.rank):
        own, keys = slice(call.q0, call.q1), slice(call.k0, call.k1)
        part = (full_q[:, own], full_k[:, keys].contiguous(), full_v[:, keys].contiguous())
        own_sinks = None if sinks is None else sinks[first + call.q0 : first + call.q1]
        own_options = _options_of(options, first, call)
        out, lse = gathered.forward(ranks.passes, method, batch, *part, own_sinks, own_options)
        full_out[:, own], full_lse[:, own] = out, lse.t()
    out = exchange.to_tokens(full_out, heads.query, q.new_zeros((*q.shape[:2], v.shape[2])))
    lse = exchange.to_tokens(full_lse.unsqueeze(-1), heads.query, full_lse.new_zeros((*q.shape[:2], 1)))
    return out, lse.squeeze(-1).t().contiguous(), (full_q, full_k, full_v, full_out, full_lse)


def kept(ranks: HeadRanks, batch, q, k, v, out, lse):
    """What `forward` keeps, sent once more."""
    heads, exchange = Heads.divide(q.shape[1], k.shape[1], ranks.transport.size), _AllToAll(ranks, batch)
    full = _inputs(exchange, heads, q, k, v)
    full_lse = exchange.to_heads(lse.t().unsqueeze(-1), heads.query).squeeze(-1)
    return (*full, exchange.to_heads(out, heads.query), full_lse)


def backward(ranks: HeadRanks, method, batch, dout, q, k, v, dlse, saved, options: Options):
    """dq, dk and dv of this rank's tokens. saved: what `forward` keeps."""
    full_q, full_k, full_v, full_out, full_lse = saved
    heads, exchange = Heads.divide(q.shape[1], k.shape[1], ranks.transport.size), _AllToAll(ranks, batch)
    full_dout = exchange.to_heads(dout, heads.query)
    full_dlse = exchange.to_heads(dlse.t().unsqueeze(-1), heads.query).squeeze(-1)
    shared = sum(b - a for a, b in heads.key) > k.shape[1]  # K/V heads on several ranks: their gradients are sums
    dq = torch.empty_like(full_q)
    dk, dv = (
        torch.empty(x.shape, dtype=sum_dtype(x.dtype) if shared else x.dtype, device=x.device)
        for x in (full_k, full_v)
    )  # fmt: skip
    first = heads.query[ranks.transport.rank][0]
    for call in heads.calls(ranks.transport.rank):
        own, keys = slice(call.q0, call.q1), slice(call.k0, call.k1)
        dq[:, own], dk[:, keys], dv[:, keys] = gathered.backward(
            ranks.passes, method, batch, full_dout[:, own], full_q[:, own], full_k[:, keys].contiguous(),
            full_v[:, keys].contiguous(), full_out[:, own], full_lse[:, own].t(), full_dlse[:, own].t(),
            _options_of(options, first, call), keeps_sums=shared,
        )  # fmt: skip
    dq = exchange.to_tokens(dq, heads.query, torch.zeros_like(q))
    dk, dv = (
        exchange.to_tokens(grad, heads.key, torch.zeros(x.shape, dtype=grad.dtype, device=x.device)).to(x.dtype)
        for grad, x in ((dk, k), (dv, v))
    )  # fmt: skip
    return dq, dk, dv


def _options_of(options: Options, first: int, call: HeadCall) -> Options:
    slopes = options.alibi_slopes
    if slopes is not None:
        slopes = slopes[..., first + call.q0 : first + call.q1].contiguous()
    return options._replace(alibi_slopes=slopes, first_head=first + call.q0)
