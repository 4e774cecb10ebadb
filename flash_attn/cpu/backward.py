"""Backward attention on CPU tensors: probabilities recomputed from the log-sum-exp, or PyTorch's fused operator."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, cast

import torch

from . import checks, torch_flash
from .dq_stage import DqStage
from .entry import entry_point
from .explain import Problem, explain_attention
from .forward import DENSE_Q_AXES, S_DMASK_MULTIPLE, Dropout, dropout_of_state, part_of, round_up
from .overlap import check_written
from .score_tensors import BiasGradients
from .scores import LOG2E, NamedScores, ScoreOptions, ScoreRule, Tile, Unused, compute_dtype
from .tiles import HeadRange, blocks, head_ranges, tile_shape, visited_tiles

if TYPE_CHECKING:
    from typing_extensions import Unpack


class Sums:
    """dk and dv to which a call adds, and the parts that it computes for them."""

    def __init__(self, dtype: torch.dtype, dk: torch.Tensor | None, dv: torch.Tensor | None) -> None:
        self.dtype = compute_dtype(dtype)
        self._given = (cast(torch.Tensor, dk), cast(torch.Tensor, dv))  # as check_gradients() will have it

    @property
    def parts(self) -> list[torch.Tensor]:
        self._parts = [x.new_empty(x.shape, dtype=self.dtype) for x in self._given]
        return self._parts

    def added(self) -> list[torch.Tensor]:
        return [given.add_(part) for given, part in zip(self._given, self._parts)]


def row_deltas(
    dout: torch.Tensor,
    out: torch.Tensor,
    lse: torch.Tensor,
    dlse: torch.Tensor | None,
    first_row: int | None,
    unused: Unused | None = None,
) -> torch.Tensor:
    """rowsum(dout * out) - dlse, (b, h, sq) in the compute dtype, which the backward subtracts from dP.

    The rows before `first_row`, and those that a mask leaves `unused`, are fully masked, so their output is a constant:
    their dout is not read. None: those whose LSE is infinite.

    dlse, the gradient of the LSE or None, adds dlse * P to dS, because dLSE / dS = P. An infinite LSE is a constant.
    """
    dtype = compute_dtype(out.dtype)
    delta = (dout.to(dtype) * out.to(dtype)).sum(-1).transpose(1, 2)
    if first_row is None:
        delta.masked_fill_(lse.isinf(), 0.0)
    else:
        if first_row:
            delta[:, :, :first_row] = 0.0
        if unused is not None:
            delta.masked_fill_(unused.rows, 0.0)
    return delta if dlse is None else delta - dlse.masked_fill(lse.isinf(), 0.0)


def sink_gradient(sinks: torch.Tensor, lse: torch.Tensor, delta: torch.Tensor) -> torch.Tensor:
    """The gradient (h) of sinks, from lse and delta (b, h, sq).

    A sink is a key whose value is 0, so its dP is 0 and dS = P * (dP - delta) = -exp(sink - lse) * delta in every row.
    """
    probability = (sinks[:, None] - lse).exp_().masked_fill_(lse.isinf(), 0.0)
    return -(probability * delta).sum((0, 2)).to(sinks.dtype)


def attend_backward(
    dout: torch.Tensor,
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    out: torch.Tensor,
    lse: torch.Tensor,
    delta: torch.Tensor,
    dq: torch.Tensor | None,
    dk: torch.Tensor | None,
    dv: torch.Tensor | None,
    rule: ScoreRule,
    dropout: Dropout | None,
    may_fuse: bool,
    bias_grads: BiasGradients | None = None,
) -> list[torch.Tensor]:
    """[dq, dk, dv], like q, k, v: those given, written in place, or new ones for None. delta (b, h, sq): see
    row_deltas; may_fuse says that it is rowsum(dout * out) alone. bias_grads: None, or sums to add to.

    Dao, "FlashAttention-2" (2023), algorithm 2. lse (b, h, sq) may come from another call and may cover more keys than
    k has; rows with an infinite lse (fully masked) get no gradient. Sums over tiles and over the query heads of a group
    are taken in the compute dtype.
    """
    given = (dq, dk, dv)
    fused = torch_flash.gradients(dout, q, k, v, out, lse, rule) if may_fuse and dropout is None else None
    if fused is not None:
        return [
            new.to(q.dtype, memory_format=torch.contiguous_format) if old is None else old.copy_(new)
            for old, new in zip(given, fused)
        ]
    dq, dk, dv = (x.new_empty(x.shape) if old is None else old for old, x in zip(given, (q, k, v)))
    _attend_backward_tiled(dout, q, k, v, lse, delta, dq, dk, dv, rule, dropout, bias_grads)
    return [dq, dk, dv]


def _attend_backward_tiled(
    dout: torch.Tensor,
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    lse: torch.Tensor,
    delta: torch.Tensor,
    dq: torch.Tensor,
    dk: torch.Tensor,
    dv: torch.Tensor,
    rule: ScoreRule,
    dropout: Dropout | None,
    bias_grads: BiasGradients | None,
) -> None:
    sq, sk = q.shape[1], k.shape[1]
    first_row = rule.first_unmasked_row(sq, sk)
    dq[:, :first_row].zero_()
    if first_row == sq or q.shape[0] == 0 or q.shape[2] == 0:
        dk.zero_()
        dv.zero_()
        return
    lo, hi = rule.key_range(first_row, sq, sq, sk)
    for grad in (dk, dv):
        grad[:, :lo].zero_()
        grad[:, hi:].zero_()
    dtype = compute_dtype(q.dtype)
    group = q.shape[2] // k.shape[2]
    rows, cols = tile_shape(sq, sk, group)
    unused = rule.unused(q.shape[0], q.shape[2], k.shape[2], sq, sk)
    for head_range in head_ranges(q.shape[0], k.shape[2], group, rows, cols):
        keys, values = head_range.keys(k, lo, hi, dtype), head_range.keys(v, lo, hi, dtype)
        if unused is not None:
            for x in (keys, values):
                x.masked_fill_(head_range.key_values(unused.keys, lo, hi), 0.0)
        keys_grad, values_grad = torch.zeros_like(keys), torch.zeros_like(values)
        streams = None if dropout is None else dropout.streams(head_range)
        for row0, row1 in blocks(first_row, sq, rows):
            block = _QueryBlock(
                head_range, dout, q, lse, delta, row0, row1, rule, 1.0 if dropout is None else dropout.scale, unused
            )
            for tile, visible in visited_tiles(rule, head_range, row0, row1, cols, sq, sk):
                dropped = None if dropout is None or streams is None else dropout.dropped(streams, tile)
                operands = (x[:, tile.col0 - lo : tile.col1 - lo] for x in (keys, values, keys_grad, values_grad))
                block.process(tuple(operands), tile, sq, sk, dropped, visible, bias_grads)
            head_range.store_rows(dq, row0, row1, block.queries_grad.mul_(rule.scale))
        head_range.store_keys(dk, lo, hi, keys_grad.mul_(rule.scale_over_query_scale))
        head_range.store_keys(dv, lo, hi, values_grad)


class _QueryBlock:
    """Data common to all tiles of one block of queries: scaled queries, dout, delta, LSE, and the accumulated dq."""

    def __init__(
        self,
        head_range: HeadRange,
        dout: torch.Tensor,
        q: torch.Tensor,
        lse: torch.Tensor,
        delta: torch.Tensor,
        row0: int,
        row1: int,
        rule: ScoreRule,
        o_scale: float,
        unused: Unused | None,
    ) -> None:
        dtype = compute_dtype(q.dtype)
        self.rule, self.head_range, self.rows = rule, head_range, row1 - row0
        self.queries = head_range.queries(q, row0, row1, dtype).mul_(rule.query_scale)
        self.dout = head_range.queries(dout, row0, row1, dtype).mul_(o_scale)
        if unused is not None:
            for x in (self.queries, self.dout):
                x.masked_fill_(head_range.row_values(unused.rows, row0, row1), 0.0)
        self.delta = head_range.row_values(delta, row0, row1)
        lse_rows = head_range.row_values(lse, row0, row1).to(dtype) * LOG2E
        # Either infinity marks a fully masked row; +inf makes its probabilities exactly 0.
        self.lse = lse_rows.masked_fill(lse_rows == -math.inf, math.inf)
        self.queries_grad = torch.zeros_like(self.queries)

    def process(
        self,
        operands: tuple[torch.Tensor, ...],
        tile: Tile,
        sq: int,
        sk: int,
        dropped: torch.Tensor | None,
        visible: torch.Tensor | None,
        bias_grads: BiasGradients | None,
    ) -> None:
        """Accumulate dq, dk and dv over one more tile; dq still lacks the scale, dk is for the scaled queries.

        operands: keys, values and their gradients, of the tile.
        """
        keys, values, keys_grad, values_grad = operands
        p = torch.bmm(self.queries, keys.transpose(1, 2))
        derivative = self.rule.logits_(self.head_range.by_head(p, self.rows), tile, sq, sk, visible, True)
        p.sub_(self.lse).exp2_()
        ds = torch.bmm(self.dout, values.transpose(1, 2))
        p_dropped = p
        if dropped is not None:
            dropped = dropped.view(p.shape)
            p_dropped = p.masked_fill(dropped, 0.0)
            ds.masked_fill_(dropped, 0.0)
        values_grad.baddbmm_(p_dropped.transpose(1, 2), self.dout)
        ds.sub_(self.delta).mul_(p)
        if bias_grads is not None:
            bias_grads.add_(self.head_range.by_head(ds, self.rows), tile, self.rule.first_distance(tile, sq, sk))
        if derivative is not None:
            ds.mul_(derivative.view(ds.shape))
        self.queries_grad.baddbmm_(ds, keys)
        keys_grad.baddbmm_(ds.transpose(1, 2), self.queries)


@entry_point
def bwd(
    dout: torch.Tensor,
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    out: torch.Tensor,
    softmax_lse: torch.Tensor,
    dq: torch.Tensor | None,
    dk: torch.Tensor | None,
    dv: torch.Tensor | None,
    alibi_slopes: torch.Tensor | None,
    p_dropout: float,
    softmax_scale: float,
    is_causal: bool,
    window_left: int,
    window_right: int,
    softcap: float,
    deterministic: bool,
    gen: torch.Generator | None,
    rng_state: torch.Tensor | None,
    dlse: torch.Tensor | None = None,
    batch_invariant: bool = False,
    *,
    bias_grad: bool = True,
    explain: bool = False,
    accumulate_dkv: bool = False,
    dq_stage: str = "",
    dq_sum: torch.Tensor | None = None,
    softmax_d: torch.Tensor | None = None,
    **named: Unpack[NamedScores],
) -> list[torch.Tensor | None] | dict[str, object]:
    """Gradients of `fwd`; the arguments that `fwd` has mean the same.

    Arguments:
        dout, out: (b, sq, h, d_v), any strides; softmax_lse: (b, h, sq), any strides. out and softmax_lse may be
            combined from several calls.
        dq, dk, dv: None, or tensors like q, k, v (any strides) that are written and returned.
        rng_state: int64 (2,) from the forward call, needed when p_dropout > 0.
        deterministic, gen: accepted and without effect (the CPU backend is deterministic and needs no generator here).
        dlse: None, or the gradient of softmax_lse, like it; not read where softmax_lse is infinite.
        batch_invariant: as in the forward, of dq, dk and dv.
        bias_grad: whether attn_bias and rel_bias get gradients.
        explain: as in the forward.
        accumulate_dkv: dk and dv are given, in the compute dtype, and the call adds to them.
        dq_stage: "", or one of calls over several sets of keys, whose dq has one sum in the compute dtype: "begin"
            returns it, cleared, in dq's place, and softmax_d; "add", which is given both as dq_sum and softmax_d, adds
            the dq of its keys and has their dk and dv; "end" rounds dq_sum to dq. What a stage has not is None.
        named: as in the forward, whose softmax_lse holds the sinks.

    Returns [dq, dk, dv, softmax_d], then the gradients of sinks, attn_bias and rel_bias, of those given and wanted, in
        their shapes and dtypes: softmax_d (b, h, sq rounded up to 128) = rowsum(dout * out) - dlse, float32 (float64
        for float64 inputs), 0 beyond sq.

    Raises RuntimeError naming the argument; nothing is written then.
    """
    options = ScoreOptions(softmax_scale, softcap, is_causal, window_left, window_right, alibi_slopes, **named)
    checks.check_query(q, DENSE_Q_AXES)
    checks.check_key_value(q, k, v, DENSE_Q_AXES, batch=q.shape[0])
    sums = Sums(q.dtype, dk, dv) if accumulate_dkv else None
    checks.check_gradients(dout, q, k, v, out, dq, dk, dv, None if sums is None else sums.dtype)
    batch, sq, heads, _ = q.shape
    checks.check_lse(softmax_lse, dlse, q, [batch, heads, sq])
    options.check(q, batch, p_dropout)
    options.check_dense(q, k)
    checks.check_rng_state(rng_state, p_dropout)
    sinks = options.sinks
    read = {
        "dout": dout,
        "q": q,
        "k": k,
        "v": v,
        "out": out,
        "softmax_lse": softmax_lse,
        "dlse": dlse,
        "softmax_d": softmax_d,
        **options.tensors_read(),
    }
    stage, d_shape = DqStage(dq_stage, dq_sum, softmax_d), (batch, heads, round_up(sq, S_DMASK_MULTIPLE))
    stage.check(q, dq, dk, dv, d_shape)
    check_written({"dq": dq, "dk": dk, "dv": dv, "dq_sum": dq_sum}, read)

    rule, may_fuse = ScoreRule.create(options, batch, q), stage.may_fuse(dlse)
    if explain:
        problems = [Problem(1, sq, k.shape[1])] * batch if batch_invariant else [Problem(batch, sq, k.shape[1])]
        return explain_attention("backward", q, k, v, rule, problems, may_fuse and p_dropout == 0.0)
    if dq_stage == "end":
        return stage.end(q, dq)
    softmax_d = stage.softmax_d(q, d_shape)
    delta, dsinks = softmax_d[:, :, :sq], []
    if stage.begins:
        first_row = stage.first_row(rule.first_unmasked_row(sq, k.shape[1]))
        unused = rule.unused(batch, heads, k.shape[2], sq, k.shape[1])
        delta.copy_(row_deltas(dout, out, softmax_lse, dlse, first_row, unused))
        dsinks = [] if sinks is None else [sink_gradient(sinks, softmax_lse, delta)]
    dq = stage.new_dq(q, dq)
    if not stage.adds:
        return [dq, None, None, softmax_d, *dsinks]
    if sums is not None:
        dk, dv = sums.parts
    dropout = dropout_of_state(p_dropout, rng_state)
    bias_grads = BiasGradients.like(rule.tensors, compute_dtype(q.dtype)) if bias_grad else None
    if batch_invariant or options.origins is not None:
        dq, dk, dv = (x.new_empty(x.shape) if grad is None else grad for grad, x in ((dq, q), (dk, k), (dv, v)))
        operands = (dout, q, k, v, out, softmax_lse, delta, dq, dk, dv)
        for i, entry in enumerate(zip(*(x.split(1) for x in operands))):
            grads = None if bias_grads is None else bias_grads.entry(i)
            dout_i, q_i, k_i, v_i, out_i, lse_i, delta_i, dq_i, dk_i, dv_i = entry
            rule_i, dropout_i = part_of(i, options, rule, dropout, sq, k.shape[1])
            attend_backward(
                dout_i, q_i, k_i, v_i, out_i, lse_i, delta_i, dq_i, dk_i, dv_i, rule_i, dropout_i, may_fuse, grads
            )
    else:
        dq, dk, dv = attend_backward(
            dout, q, k, v, out, softmax_lse, delta, dq, dk, dv, rule, dropout, may_fuse, bias_grads
        )
    if sums is not None:
        dk, dv = sums.added()
    dbiases = [] if bias_grads is None else bias_grads.results(options)
    return [stage.added(dq), dk, dv, softmax_d, *dsinks, *dbiases]
