"""Heads that move: every rank receives the tokens of all ranks for some heads, computes with them, and sends them back.

Method ulysses computes them as one GPU would. In a mesh of two dimensions the ranks of a row exchange heads; K and V of
a rank's heads then come from the other rows by all_gather or ring.

Query heads are divided evenly, for any number of them. A K/V head whose query heads are on several ranks goes to all of
them; the owners of the tokens add its gradients in the order of ranks.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from flash_attn.context_parallel.compute import key_exchange
from flash_attn.context_parallel.compute.kernel_calls import BackwardInputs, ForwardInputs, Grads, Options, sum_dtype
from flash_attn.context_parallel.compute.key_exchange import KeyRanks
from flash_attn.context_parallel.exchange.collectives import HeadExchange
from flash_attn.context_parallel.exchange.groups import Transport
from flash_attn.context_parallel.plan.layouts import Layout, Spans


class HeadRanks(NamedTuple):
    """Ranks that exchange heads. layout: which of their tokens each has. key_ranks: for keys of the heads."""

    transport: Transport
    layout: Layout
    key_ranks: KeyRanks

    def heads(self, q: Tensor, k: Tensor) -> Heads:
        return Heads.divide(q.shape[1], k.shape[1], self.transport.size)

    def exchange(self, options: Options) -> HeadExchange:
        return HeadExchange(self.transport, self.layout, options.batch)


class HeadCall(NamedTuple):
    """Some query and K/V heads of a rank, in groups of one size. first: the first query head among all heads."""

    query: slice
    key: slice
    first: int

    def options(self, options: Options) -> Options:
        """The options for these heads."""
        slopes = options.alibi_slopes
        if slopes is not None:
            slopes = slopes[..., self.of_all].contiguous()
        return options._replace(alibi_slopes=slopes, first_head=self.first)

    @property
    def of_all(self) -> slice:
        """These query heads among all heads."""
        return slice(self.first, self.first + self.query.stop - self.query.start)


class Heads(NamedTuple):
    """The query and the K/V heads of every rank."""

    query: Spans
    key: Spans
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
            keys = slice(head // self.group - first_k, (end - 1) // self.group + 1 - first_k)
            result.append(HeadCall(slice(head - start, end - start), keys, head))
            head = end
        return result


def forward(ranks: HeadRanks, inputs: ForwardInputs) -> tuple[Tensor, Tensor, tuple[Tensor, ...]]:
    """(out, LSE (heads, rows) of this rank's tokens, tensors saved for `backward`)."""
    q, k, v, sinks, options = inputs
    heads, exchange = ranks.heads(q, k), ranks.exchange(options)
    full_q, full_k, full_v = _to_heads(exchange, heads, q, k, v)
    full_out = full_q.new_empty((*full_q.shape[:2], v.shape[2]))
    full_lse = torch.empty(full_q.shape[:2], dtype=sum_dtype(q.dtype), device=q.device)
    for call in heads.calls(ranks.transport.rank):
        part = full_q[:, call.query], full_k[:, call.key].contiguous(), full_v[:, call.key].contiguous()
        own_sinks = None if sinks is None else sinks[call.of_all]
        out, lse = key_exchange.forward(ranks.key_ranks, ForwardInputs(*part, own_sinks, call.options(options)))
        full_out[:, call.query], full_lse[:, call.query] = out, lse.t()
    out = exchange.add_to_tokens(full_out, heads.query, q.new_zeros((*q.shape[:2], v.shape[2])))
    lse = exchange.add_to_tokens(full_lse.unsqueeze(-1), heads.query, full_lse.new_zeros((*q.shape[:2], 1)))
    return out, lse.squeeze(-1).t().contiguous(), (full_q, full_k, full_v, full_out, full_lse)


def _to_heads(exchange: HeadExchange, heads: Heads, q: Tensor, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    return exchange.to_heads(q, heads.query), exchange.to_heads(k, heads.key), exchange.to_heads(v, heads.key)


def saved_by_forward(ranks: HeadRanks, inputs: BackwardInputs) -> tuple[Tensor, ...]:
    """What `forward` saves for the backward, exchanged once more."""
    heads, exchange = ranks.heads(inputs.q, inputs.k), ranks.exchange(inputs.options)
    full = _to_heads(exchange, heads, inputs.q, inputs.k, inputs.v)
    full_lse = exchange.to_heads(inputs.lse.t().unsqueeze(-1), heads.query).squeeze(-1)
    return (*full, exchange.to_heads(inputs.out, heads.query), full_lse)


def backward(ranks: HeadRanks, inputs: BackwardInputs, saved: Sequence[Tensor]) -> Grads:
    """dq, dk and dv of this rank's tokens. saved: by `forward`; empty: exchanged once more."""
    full_q, full_k, full_v, full_out, full_lse = saved or saved_by_forward(ranks, inputs)
    q, k, v = inputs.q, inputs.k, inputs.v
    heads, exchange = ranks.heads(q, k), ranks.exchange(inputs.options)
    full_dout = exchange.to_heads(inputs.dout, heads.query)
    dlse = torch.zeros_like(inputs.lse) if inputs.dlse is None else inputs.dlse
    full_dlse = exchange.to_heads(dlse.t().unsqueeze(-1), heads.query).squeeze(-1)
    shared = sum(b - a for a, b in heads.key) > k.shape[1]  # K/V heads on several ranks: their gradients are sums
    dtype = sum_dtype(k.dtype) if shared else k.dtype
    dq = torch.empty_like(full_q)
    dk, dv = (torch.empty(x.shape, dtype=dtype, device=x.device) for x in (full_k, full_v))
    for call in heads.calls(ranks.transport.rank):
        own, keys = call.query, call.key
        part = BackwardInputs(
            dout=full_dout[:, own],
            q=full_q[:, own],
            k=full_k[:, keys].contiguous(),
            v=full_v[:, keys].contiguous(),
            out=full_out[:, own],
            lse=full_lse[:, own].t(),
            dlse=full_dlse[:, own].t(),
            options=call.options(inputs.options),
        )
        dq[:, own], dk[:, keys], dv[:, keys] = key_exchange.backward(ranks.key_ranks, part, shared)
    dq = exchange.add_to_tokens(dq, heads.query, torch.zeros_like(q))
    dk = exchange.add_to_tokens(dk, heads.key, torch.zeros(k.shape, dtype=dtype, device=k.device))
    dv = exchange.add_to_tokens(dv, heads.key, torch.zeros(v.shape, dtype=dtype, device=v.device))
    return dq, dk.to(k.dtype), dv.to(v.dtype)
