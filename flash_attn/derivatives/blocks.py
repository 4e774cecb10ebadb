"""First and second directional derivatives of attention, by PyTorch operations in blocks of queries, on any device.

With z = scale q.k, s = cap(z) + bias, lse = log sum exp s, P = exp(s - lse), the dropout factors m and out = (P m) v,
the derivatives along tangents of q, k, v and sinks, written z', are
    z' = scale (q'.k + q.k')    s' = cap'(z) z'    lse' = sum P s'    P' = P (s' - lse')    out' = (P' m) v + (P m) v'.
The gradients for dout and dlse are, with dP = m (dout.v) and D = sum P dP,
    dS = P (dP - D + dlse)    dz = cap'(z) dS    dq = scale dz k    dk = scale dz^T q    dv = (P m)^T dout.
`hessian_product` differentiates them along the tangents, dout and dlse held. A Hessian is symmetric: the results are
also the gradients of <dout, out'> + <dlse, lse'>, so that one pass has the second derivatives of every order of modes.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import NamedTuple, Union, cast

import torch
from torch import Tensor

from flash_attn.cpu.scores import ScoreOptions, ScoreRule, compute_dtype
from flash_attn.cpu.varlen import sequences
from flash_attn.dropout import dropout_streams, dropout_threshold, keep_mask, keep_scale
from flash_attn.ops.attention_args import AttentionArgs, AttentionBackwardArgs, Tangents
from flash_attn.ops.calls import unpack

BLOCK_ROWS = 512  # query rows of a block
BLOCK_SCORES = 2**24  # scores of a block, unless one K/V head and sequence has more
_Args = Union[AttentionArgs, AttentionBackwardArgs]


class Group(NamedTuple):
    """Sequences of one length: a dense batch, or one of packed sequences."""

    first: int  # number of the first sequence
    q_rows: slice | None = None  # in packed tensors
    k_rows: slice | None = None

    def queries(self, x: Tensor) -> Tensor:
        return x if self.q_rows is None else x[self.q_rows].unsqueeze(0)

    def keys(self, x: Tensor) -> Tensor:
        return x if self.k_rows is None else x[self.k_rows].unsqueeze(0)

    def row_values(self, x: Tensor) -> Tensor:
        return x if self.q_rows is None else x[:, self.q_rows].unsqueeze(0)


def _groups(args: _Args, q: Tensor, k: Tensor) -> list[Group]:
    """Reads the lengths of packed sequences, which waits for a GPU."""
    if args.cu_seqlens_q is None or args.cu_seqlens_k is None:
        return [Group(0)]
    layout = sequences(q.shape[0], k, args.cu_seqlens_q.cpu(), args.cu_seqlens_k.cpu())
    return [Group(x.index, slice(x.q0, x.q1), slice(x.k0, x.k1)) for x in layout if x.q1 > x.q0]


@dataclass(frozen=True)
class Block:
    """Some query rows of some sequences and K/V heads, with the keys [keys.start, keys.stop) that they may see.

    Queries are folded to (b, h_k, group * rows, d), keys to (b, h_k, cols, d), in the compute dtype.
    """

    group: Group
    batches: slice
    kv_heads: slice
    rows: slice
    keys: slice
    seqlen_q: int
    seqlen_k: int
    heads_per_kv: int
    dtype: torch.dtype

    def _heads(self, x: Tensor, axis: int) -> Tensor:
        """The heads along an axis as those of this block: (..., h_k, group, ...)."""
        heads: Tensor = x.unflatten(axis, (-1, self.heads_per_kv))
        return heads.narrow(axis, self.kv_heads.start, self.kv_heads.stop - self.kv_heads.start)

    def query_part(self, x: Tensor) -> Tensor:
        """Of (b, sq, h, d) or packed: a view (b, h_k, group, rows, d)."""
        return self._heads(self.group.queries(x)[self.batches, self.rows], 2).permute(0, 2, 3, 1, 4)

    def key_part(self, x: Tensor) -> Tensor:
        """Of (b, sk, h_k, d) or packed: a view (b, h_k, cols, d)."""
        return self.group.keys(x)[self.batches, self.keys, self.kv_heads].transpose(1, 2)

    def row_part(self, x: Tensor) -> Tensor:
        """Of (b, h, sq) or packed: a view (b, h_k, group, rows)."""
        return self._heads(self.group.row_values(x)[self.batches, :, self.rows], 1)

    def head_part(self, x: Tensor) -> Tensor:
        """Of (h): a view (h_k, group)."""
        return self._heads(x, 0)

    def queries(self, x: Tensor | None) -> Tensor | None:
        return None if x is None else self.query_part(x).to(self.dtype).flatten(2, 3)

    def keys_of(self, x: Tensor | None) -> Tensor | None:
        return None if x is None else self.key_part(x).to(self.dtype)

    def row_values(self, x: Tensor) -> Tensor:
        return self.row_part(x).to(self.dtype).flatten(2, 3).unsqueeze(-1)

    def head_values(self, x: Tensor) -> Tensor:
        """(h) as (1, h_k, group * rows, 1)."""
        rows = self.rows.stop - self.rows.start
        values = self.head_part(x).to(self.dtype)[..., None].expand(-1, -1, rows)
        return values.flatten(1, 2)[None, ..., None]

    def unfold(self, x: Tensor) -> Tensor:
        """(b, h_k, group * rows, n) as (b, h_k, group, rows, n)."""
        rows: Tensor = x.unflatten(2, (self.heads_per_kv, -1))
        return rows


def _blocks(args: _Args, q: Tensor, k: Tensor, rule: ScoreRule) -> Iterator[Block]:
    """All blocks, without the rows before the first that sees a key."""
    packed = args.cu_seqlens_q is not None
    heads, heads_k = q.shape[-2], k.shape[-2]
    if heads == 0 or heads_k == 0:
        return
    for group in _groups(args, q, k):
        batch, sq = (1, q[group.q_rows].shape[0]) if packed else q.shape[:2]
        sk = k[group.k_rows].shape[0] if packed else k.shape[1]
        together = max(1, BLOCK_SCORES // max(1, heads // heads_k * min(sq, BLOCK_ROWS) * sk))
        entries, kv_heads = max(1, together // heads_k), min(heads_k, together)
        for b in range(0, batch, entries):
            for h in range(0, heads_k, kv_heads):
                for row in range(rule.first_unmasked_row(sq, sk), sq, BLOCK_ROWS):
                    stop = min(sq, row + BLOCK_ROWS)
                    yield Block(
                        group,
                        slice(b, min(batch, b + entries)),
                        slice(h, min(heads_k, h + kv_heads)),
                        slice(row, stop),
                        slice(*rule.key_range(row, stop, sq, sk)),
                        sq,
                        sk,
                        heads // heads_k,
                        compute_dtype(q.dtype),
                    )


class Call:
    """A call with its tangents: what every block reads."""

    def __init__(self, args: _Args, tangents: Tangents, lse: Tensor, rng_state: Tensor) -> None:
        _reject_options(args)
        self.args, self.lse, self.sinks, self.t_sinks = args, lse, args.sinks, tangents.tsinks
        self.q, self.k, self.v = unpack(args.q, args.k, args.v)
        self.tq, self.tk, self.tv = unpack_tangents(args, tangents)
        options = ScoreOptions(
            softmax_scale=args.softmax_scale,
            softcap=args.softcap,
            is_causal=args.causal,
            window_left=args.window_left,
            window_right=args.window_right,
            alibi_slopes=args.alibi_slopes,
        )
        batch = self.q.shape[0] if args.cu_seqlens_q is None else args.cu_seqlens_q.shape[0] - 1
        self.rule = ScoreRule.create(options, batch, self.q)
        self.seed = rng_state.tolist() if args.dropout_p > 0 else None

    def blocks(self) -> Iterator[Block]:
        return _blocks(self.args, self.q, self.k, self.rule)


def _reject_options(args: _Args) -> None:
    """Raise NotImplementedError for a mask, a bias or any option that no block applies."""
    for name in args.named().keys() - {"sinks", "sm_margin", "bias_grad"}:
        raise NotImplementedError(f"{name}: expected None with tangents or second derivatives, got one")


def unpack_tangents(args: _Args, tangents: Tangents) -> tuple[Tensor | None, ...]:
    """Tangents (tq, tk, tv) of q, k and v from those of inputs in any packing."""
    tq, tk, tv, _ = tangents
    if args.k is None:
        return (None,) * 3 if tq is None else tq.unbind(-3)
    if args.v is None:
        return (tq, None, None) if tk is None else (tq, *tk.unbind(-3))
    return tq, tk, tv


class Scores:
    """Probabilities of a block and their derivative along the tangents, each (b, h_k, group * rows, cols)."""

    def __init__(self, call: Call, block: Block) -> None:
        self.scale = call.rule.scale
        self.q, self.tq = cast(Tensor, block.queries(call.q)), block.queries(call.tq)
        self.k, self.tk = cast(Tensor, block.keys_of(call.k)), block.keys_of(call.tk)
        self.v, self.tv = cast(Tensor, block.keys_of(call.v)), block.keys_of(call.tv)
        self.slope = self.curve = None  # first and second derivative of the softcap, None: 1 and 0
        s = self.q @ self.k.mT * self.scale
        cap = call.rule.softcap
        if cap:
            tau = torch.tanh(s / cap)
            self.slope = 1 - tau * tau
            self.curve = self.slope * tau * (-2 / cap)
            s = tau * cap
        lse = block.row_values(call.lse)
        self.p = torch.exp(_masked(s, call.rule, block) - lse)
        self.factors = _dropout_factors(call, block)
        self.sink = None if call.sinks is None else torch.exp(block.head_values(call.sinks) - lse)
        self._differentiate(None if call.t_sinks is None else block.head_values(call.t_sinks))

    def _differentiate(self, t_sink: Tensor | None) -> None:
        z = None if self.tq is None else self.tq @ self.k.mT * self.scale
        if self.tk is not None:
            z = _sum(z, self.q @ self.tk.mT * self.scale)
        s = z if z is None or self.slope is None else z * self.slope
        self.t_z, self.t_p, self.t_sink = z, None, None
        self.t_lse = None if s is None else (self.p * s).sum(-1, keepdim=True)
        if t_sink is not None and self.sink is not None:
            self.t_lse = _sum(self.t_lse, self.sink * t_sink)
        if self.t_lse is not None:
            self.t_p = self.p * (-self.t_lse if s is None else s - self.t_lse)
            if self.sink is not None:
                self.t_sink = self.sink * (-self.t_lse if t_sink is None else t_sink - self.t_lse)

    def drop(self, x: Tensor) -> Tensor:
        """x with the factors of dropout."""
        return x if self.factors is None else x * self.factors

    def t_out(self) -> Tensor | None:
        result = None if self.t_p is None else self.drop(self.t_p) @ self.v
        return result if self.tv is None else _sum(result, self.drop(self.p) @ self.tv)


def _sum(x: Tensor | None, y: Tensor) -> Tensor:
    return y if x is None else x + y


def _masked(s: Tensor, rule: ScoreRule, block: Block) -> Tensor:
    """Logits of capped scores, which may be overwritten: ALiBi, the window."""
    rows = torch.arange(block.rows.start, block.rows.stop, device=s.device)[:, None] + block.seqlen_k - block.seqlen_q
    distance = torch.arange(block.keys.start, block.keys.stop, device=s.device)[None, :] - rows
    logits = block.unfold(s)
    if rule.slopes is not None:
        first = block.group.first + block.batches.start
        slopes = rule.slopes[first : first + s.shape[0]]
        slopes = slopes.unflatten(1, (-1, block.heads_per_kv))[:, block.kv_heads]
        logits.sub_(slopes[..., None, None] * distance.abs().to(s.dtype))
    if rule.right is not None:
        logits.masked_fill_(distance > rule.right, -torch.inf)
    if rule.left is not None:
        logits.masked_fill_(distance < -rule.left, -torch.inf)
    return s


def _dropout_factors(call: Call, block: Block) -> Tensor | None:
    """0 of dropped scores, the scale of kept ones of the others; None without dropout."""
    if call.seed is None:
        return None
    p, group, heads = call.args.dropout_p, block.heads_per_kv, block.kv_heads
    batches = range(block.group.first + block.batches.start, block.group.first + block.batches.stop)
    seed, offset = call.seed
    streams = dropout_streams(seed, offset, batches, range(heads.start * group, heads.stop * group), call.q.device)
    bounds = (block.rows.start, block.rows.stop, block.keys.start, block.keys.stop)
    keep = keep_mask(streams, *bounds, dropout_threshold(p))
    kept: Tensor = keep.unflatten(1, (-1, group))
    return kept.flatten(2, 3).to(block.dtype) * keep_scale(p)


@contextmanager
def _plain_arithmetic(device: torch.device) -> Iterator[None]:
    with torch.no_grad(), torch.autocast(device.type, enabled=False):
        yield


class _Tangents:
    """out' and lse' of a call, filled block by block."""

    def __init__(self, call: Call) -> None:
        self.out = call.q.new_zeros((*call.q.shape[:-1], call.v.shape[-1]))
        self.lse = torch.zeros_like(call.lse, memory_format=torch.contiguous_format)
        if call.t_sinks is not None:  # of rows without keys, which no block has; the others are overwritten
            rows = call.t_sinks.to(self.lse.dtype)[:, None]
            self.lse += rows.masked_fill(torch.isinf(call.lse), 0.0)

    def store(self, block: Block, scores: Scores) -> None:
        t_out = scores.t_out()
        if t_out is not None:
            block.query_part(self.out).copy_(block.unfold(t_out))
        t_lse = scores.t_lse
        if t_lse is not None:
            block.row_part(self.lse).copy_(block.unfold(t_lse).squeeze(-1))


def tangents(args: AttentionArgs, given: Tangents, lse: Tensor, rng_state: Tensor) -> tuple[Tensor, Tensor]:
    """(t_out, t_lse) along the tangents of a call whose forward had lse and rng_state, like its out and lse."""
    with _plain_arithmetic(args.q.device):
        call = Call(args, given, lse, rng_state)
        results = _Tangents(call)
        for block in call.blocks():
            results.store(block, Scores(call, block))
    return results.out, results.lse


class _Gradients:
    """The derivatives of dq, dk, dv and dsinks along the tangents, summed over blocks."""

    def __init__(self, call: Call) -> None:
        self.dtype = compute_dtype(call.q.dtype)
        self.q = torch.zeros_like(call.q, memory_format=torch.contiguous_format)
        self.k, self.v = (x.new_zeros(x.shape, dtype=self.dtype) for x in (call.k, call.v))
        self.sinks = None if call.sinks is None else call.sinks.new_zeros(call.sinks.shape, dtype=self.dtype)

    def add(self, block: Block, x: Scores, dout: Tensor, dlse: Tensor | None) -> None:
        dp = x.drop(dout @ x.v.mT)
        d = (x.p * dp).sum(-1, keepdim=True)
        from_rows = -d if dlse is None else dlse - d
        t_dp = None if x.tv is None else x.drop(dout @ x.tv.mT)
        t_d = None if x.t_p is None else (x.t_p * dp).sum(-1, keepdim=True)
        if t_dp is not None:
            t_d = _sum(t_d, (x.p * t_dp).sum(-1, keepdim=True))
        if t_d is None:  # no tangents
            return
        t_ds = x.p * (-t_d if t_dp is None else t_dp - t_d)
        if x.t_p is not None:
            t_ds += x.t_p * (dp + from_rows)
        dz, t_dz = x.p * (dp + from_rows), t_ds
        if x.slope is not None:
            t_dz = t_ds * x.slope
            if x.t_z is not None:
                t_dz += cast(Tensor, x.curve) * x.t_z * dz
            dz = dz * x.slope
        dq, dk = t_dz @ x.k, t_dz.mT @ x.q
        if x.tk is not None:
            dq += dz @ x.tk
        if x.tq is not None:
            dk += dz.mT @ x.tq
        block.query_part(self.q).copy_(block.unfold(dq * x.scale))
        block.key_part(self.k).add_(dk, alpha=x.scale)
        if x.t_p is not None:
            block.key_part(self.v).add_(x.drop(x.t_p).mT @ dout)
        if self.sinks is not None and x.sink is not None:
            rows = -x.sink * t_d if x.t_sink is None else x.t_sink * from_rows - x.sink * t_d
            block.head_part(self.sinks).add_(block.unfold(rows).sum((0, 3, 4)))


def hessian_product(args: AttentionBackwardArgs, given: Tangents) -> list[Tensor]:
    """[t_out, t_lse], then along the tangents the derivatives of the gradients of those of q, k, v and sinks that are
    given, in their packing: dout and dlse are held."""
    with _plain_arithmetic(args.q.device):
        call = Call(args, given, args.lse, args.rng_state)
        results, gradients = _Tangents(call), _Gradients(call)
        for block in call.blocks():
            scores = Scores(call, block)
            results.store(block, scores)
            dout = cast(Tensor, block.queries(args.dout))
            gradients.add(block, scores, dout, None if args.dlse is None else block.row_values(args.dlse))
        q, k, v = gradients.q, *(x.to(call.q.dtype) for x in (gradients.k, gradients.v))
        if args.k is None:
            packed = [torch.stack((q, k, v), -3)]
        else:
            packed = [q, torch.stack((k, v), -3)] if args.v is None else [q, k, v]
        dsinks = [] if gradients.sinks is None else [gradients.sinks.to(cast(Tensor, args.sinks).dtype)]
    return [results.out, results.lse, *packed, *dsinks]
