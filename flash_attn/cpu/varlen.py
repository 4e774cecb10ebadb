"""Attention over packed sequences of different lengths, with optional key lengths, left padding and paged K/V."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, NamedTuple, Optional, TypeVar

import torch

from ..eight_bit import FLOAT8, INT8, Descales
from . import checks
from .backward import Sums, attend_backward, row_deltas, sink_gradient
from .dq_stage import DqStage
from .entry import entry_point
from .explain import Problem, explain_attention
from .forward import attend, dropout_of_call, dropout_of_state, new_max_logit, new_s_dmask, rng_state_of, write_s_dmask
from .latent import check_qv
from .overlap import check_written
from .scaling import EightBit, check_descales, check_operands, output_dtype, result_like, scaling_of
from .score_tensors import BiasGradients, check_columns
from .scores import NamedScores, ScoreOptions, ScoreRule, compute_dtype

if TYPE_CHECKING:
    from typing_extensions import Unpack

MaybeTensor = TypeVar(
    "MaybeTensor", torch.Tensor, Optional[torch.Tensor]
)  # for functions that return None if given None
PACKED_AXES = "total, heads, head_dim"
PAGED_AXES = "blocks, page_size, heads, head_dim"
# softmax_d leaves this many extra rows per sequence, so that each sequence may be padded to a full m_block.
SOFTMAX_D_GAP = 128
_MOST_ROWS = 0x3FFFFFFF  # of a sequence, as on the GPU


class Sequence(NamedTuple):
    """Query rows [q0, q1) of the packed q; key rows [k0, k1) of the packed k, or of the sequence's own pages."""

    index: int  # type: ignore[assignment]
    q0: int
    q1: int
    k0: int
    k1: int


def _spans(cu_seqlens: torch.Tensor, total: int) -> list[tuple[int, int]]:
    """(start, stop) of every sequence: the running maximum of cu_seqlens, clamped to the rows that exist, so that no
    two sequences share a row, for any contents.
    """
    bounds = cu_seqlens.clamp(0, total).cummax(0).values.tolist()
    return list(zip(bounds, bounds[1:]))


def sequences(
    total_q: int,
    k: torch.Tensor,
    cu_seqlens_q: torch.Tensor,
    cu_seqlens_k: torch.Tensor,
    seqused_k: torch.Tensor | None = None,
    leftpad_k: torch.Tensor | None = None,
    block_table: torch.Tensor | None = None,
) -> list[Sequence]:
    """The rows of every sequence. With seqused_k the beginnings of the keys are those of cu_seqlens_k, in any order,
    and their lengths seqused_k, clamped to the rows that exist.
    """
    paged = block_table is not None
    capacity = k.shape[0] if block_table is None else block_table.shape[1] * k.shape[1]
    spans = _spans(cu_seqlens_k, _MOST_ROWS if paged else capacity)
    starts, used = [start for start, _ in spans], [stop - start for start, stop in spans]
    if seqused_k is not None:
        starts, used = cu_seqlens_k[:-1].clamp(0, capacity).tolist(), seqused_k.tolist()
    if paged:
        starts = [0] * len(used)
    padding = [0] * len(used) if leftpad_k is None else leftpad_k.tolist()
    result = []
    for index, (q0, q1) in enumerate(_spans(cu_seqlens_q, total_q)):
        stop = min(capacity, starts[index] + max(0, used[index]))
        start = min(stop, starts[index] + max(0, padding[index]))
        result.append(Sequence(index, q0, q1, start, stop))
    return result


def _problems(layout: list[Sequence]) -> list[Problem]:
    """A problem for each sequence that has queries."""
    return [Problem(1, s.q1 - s.q0, s.k1 - s.k0) for s in layout if s.q1 > s.q0]


def check_pages(block_table: torch.Tensor, row: int, start: int, stop: int, page_size: int, pages: int) -> None:
    """The table entries that rows [start, stop) of a sequence use must name existing pages."""
    if start >= stop:
        return
    used = block_table[row, start // page_size : -(-stop // page_size)]
    lowest, highest = used.min().item(), used.max().item()
    wrong = lowest if lowest < 0 else highest
    valid = lowest >= 0 and highest < pages
    checks.require(valid, "block_table", f"entries in [0, {pages}) for the pages in use", f"{wrong} for sequence {row}")


def gather_pages(cache: torch.Tensor, block_table: torch.Tensor, row: int, start: int, stop: int) -> torch.Tensor:
    """Rows [start, stop) of a sequence from its pages: (stop - start, h_k, d). Rows of pages that do not exist are 0:
    check_pages() says which may be missing."""
    page_size = cache.shape[1]
    if start >= stop:
        return cache.new_empty(0, *cache.shape[2:])
    if cache.dtype in FLOAT8:
        return gather_pages(cache.view(INT8), block_table, row, start, stop).view(cache.dtype)
    first = start // page_size
    pages = block_table[row, first : -(-stop // page_size)].long()
    missing = (pages < 0) | (pages >= cache.shape[0])
    rows = cache[pages.masked_fill(missing, 0)]
    if missing.any():
        rows[missing] = 0
    return rows.flatten(0, 1)[start - first * page_size : stop - first * page_size]


def _sequence_keys(x: MaybeTensor, block_table: torch.Tensor | None, sequence: Sequence) -> MaybeTensor:
    """The keys or values of one sequence as a batch of one, (1, sk, h_k, d), or None for None."""
    if x is None:
        return None
    if block_table is None:
        return x[sequence.k0 : sequence.k1].unsqueeze(0)
    return gather_pages(x, block_table, sequence.index, sequence.k0, sequence.k1).unsqueeze(0)


@entry_point
def varlen_fwd(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    out: torch.Tensor | None,
    cu_seqlens_q: torch.Tensor,
    cu_seqlens_k: torch.Tensor,
    seqused_k: torch.Tensor | None,
    leftpad_k: torch.Tensor | None,
    block_table: torch.Tensor | None,
    alibi_slopes: torch.Tensor | None,
    max_seqlen_q: int,
    max_seqlen_k: int,
    p_dropout: float,
    softmax_scale: float,
    zero_tensors: bool,
    is_causal: bool,
    window_left: int,
    window_right: int,
    softcap: float,
    return_softmax: bool,
    gen: torch.Generator | None,
    num_splits: int = 0,
    return_max_logit: bool = False,
    batch_invariant: bool = False,
    *,
    explain: bool = False,
    q_descale: torch.Tensor | None = None,
    k_descale: torch.Tensor | None = None,
    v_descale: torch.Tensor | None = None,
    v_per_channel: bool = False,
    out_dtype: torch.dtype | None = None,
    rng_state: torch.Tensor | None = None,
    qv: torch.Tensor | None = None,
    **named: Unpack[NamedScores],
) -> list[torch.Tensor | None] | dict[str, object]:
    """Forward attention of packed sequences; the arguments that `fwd` has mean the same.

    Arguments:
        q: (total_q, h, d); k: (total_k, h_k, d), or (blocks, page_size, h_k, d) with a block_table; v: like k, or with
            another head dim d_v.
        cu_seqlens_q, cu_seqlens_k: int32 (b + 1), cumulative lengths.
        seqused_k: None or int32 (b): key rows in use of each sequence; leftpad_k: None or int32 (b): key rows to skip
            at its start. The keys are rows leftpad .. seqused. Lengths are clamped to the rows that exist; with
            seqused_k the keys of a sequence may lie beyond the beginning of the next one.
        block_table: None or int32 (b, max_blocks): the pages of each sequence; only entries in use are read.
        max_seqlen_q, max_seqlen_k: size S_dmask and nothing else; too small a value skips no row.
        zero_tensors, num_splits, batch_invariant: accepted and without effect (padding rows are always written; there
            are no splits; each sequence is computed by itself).
        qv: None or (total_q, h, d_v), whose products with the values add to the scores; d_v is then up to 512, and d
            may be 0. Not with dropout.

    Returns [out, lse, S_dmask, rng_state]: out (total_q, h, d_v), lse (h, total_q), S_dmask as in `fwd` with b
        sequences of max_seqlen_q x max_seqlen_k. Rows that belong to no sequence: out 0, lse +inf.

    Raises RuntimeError naming the argument; nothing is written then.
    """
    options = ScoreOptions(softmax_scale, softcap, is_causal, window_left, window_right, alibi_slopes, **named)
    call = EightBit.of(q, k, v, Descales(q_descale, k_descale, v_descale, v_per_channel), out_dtype)
    kv_axes = PACKED_AXES if block_table is None else PAGED_AXES
    check_operands(q, k, v, PACKED_AXES, kv_axes, call, p_dropout, has_qv=qv is not None)
    check_qv(qv, q, v, call)
    checks.require(qv is None or p_dropout == 0.0, "dropout_p", "0 with qv", p_dropout)
    batch = _check_packed(cu_seqlens_q, cu_seqlens_k, block_table, max_seqlen_q, max_seqlen_k)
    check_descales(q, k, v, call, batch)
    checks.check_lengths("seqused_k", seqused_k, [batch])
    checks.check_lengths("leftpad_k", leftpad_k, [batch])
    options.check(q, batch, p_dropout)
    options.check_packed(q, k, max_seqlen_k)
    if out is not None:
        checks.check_like_query("out", out, q, checks.output_shape(q, v), dtype=output_dtype(q, v, call))
    checks.check_generator(gen)
    if rng_state is not None:
        checks.check_rng_state(rng_state, p_dropout)
    sinks = options.sinks
    read = {
        "q": q,
        "k": k,
        "v": v,
        "cu_seqlens_q": cu_seqlens_q,
        "cu_seqlens_k": cu_seqlens_k,
        "seqused_k": seqused_k,
        "leftpad_k": leftpad_k,
        "block_table": block_table,
        "qv": qv,
        **options.tensors_read(),
    }
    check_written({"out": out}, read)
    layout = sequences(q.shape[0], k, cu_seqlens_q, cu_seqlens_k, seqused_k, leftpad_k, block_table)
    check_columns(options, layout, max_seqlen_k)
    if block_table is not None:
        for sequence in layout:
            check_pages(block_table, sequence.index, sequence.k0, sequence.k1, k.shape[1], k.shape[0])

    total_q, heads, _ = q.shape
    rule = ScoreRule.create(options, batch, q)
    if explain:
        is_plain = p_dropout == 0.0 and sinks is None and not return_max_logit and call is None and qv is None
        return explain_attention("forward", q, k, v, rule, _problems(layout), is_plain)
    dropout = dropout_of_call(p_dropout, gen, rng_state)
    if out is None:
        out = q.new_empty(checks.output_shape(q, v), dtype=output_dtype(q, v, call))
    out.zero_()
    scaling = scaling_of(q, k, v, call)
    lse = q.new_full((heads, total_q), math.inf, dtype=compute_dtype(q.dtype))
    max_logit = new_max_logit(q, return_max_logit)
    s_dmask = new_s_dmask(out, (batch, heads, max_seqlen_q, max_seqlen_k), return_softmax, dropout)
    for sequence in layout:
        i, rows = sequence.index, slice(sequence.q0, sequence.q1)
        if sequence.q0 == sequence.q1:
            continue
        keys, values = _sequence_keys(k, block_table, sequence), _sequence_keys(v, block_table, sequence)
        queries, rows_out, row_lse = q[rows].unsqueeze(0), out[rows].unsqueeze(0), lse[:, rows].unsqueeze(0)
        if scaling is not None:
            queries = scaling.queries(queries, i)
            keys = scaling.scaled(keys, _sequence_keys(scaling.k_rows, block_table, sequence))
            values = scaling.scaled(values, _sequence_keys(scaling.v_rows, block_table, sequence))
        if qv is not None:
            queries, keys = torch.cat([queries, qv[rows].unsqueeze(0)], -1), torch.cat([keys, values], -1)
        result = result_like(rows_out, scaling)
        origin = options.origin(i)
        rule_i = rule.for_sequence(*sequence).at(origin, len(queries[0]), len(keys[0]))
        dropout_i = None if dropout is None else dropout.for_batch(i).at(origin)
        attend(queries, keys, values, result, row_lse, rule_i, dropout_i, sinks, max_logit)
        if scaling is not None:
            scaling.store(rows_out, result, i)
        if s_dmask.numel() and dropout_i is not None:
            write_s_dmask(queries, keys, row_lse, rule_i, dropout_i, s_dmask[i : i + 1])
    return [out, lse, s_dmask, rng_state_of(dropout), *([max_logit] if return_max_logit else [])]


def _check_packed(
    cu_seqlens_q: torch.Tensor,
    cu_seqlens_k: torch.Tensor,
    block_table: torch.Tensor | None,
    max_seqlen_q: int,
    max_seqlen_k: int,
) -> int:
    """The checks that forward and backward have in common; returns the number of sequences."""
    batch = checks.check_cu_seqlens(cu_seqlens_q, cu_seqlens_k)
    checks.check_block_table(block_table, batch)
    checks.check_max_seqlen("max_seqlen_q", max_seqlen_q)
    checks.check_max_seqlen("max_seqlen_k", max_seqlen_k)
    return batch


@entry_point
def varlen_bwd(
    dout: torch.Tensor,
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    out: torch.Tensor,
    softmax_lse: torch.Tensor,
    dq: torch.Tensor | None,
    dk: torch.Tensor | None,
    dv: torch.Tensor | None,
    cu_seqlens_q: torch.Tensor,
    cu_seqlens_k: torch.Tensor,
    alibi_slopes: torch.Tensor | None,
    max_seqlen_q: int,
    max_seqlen_k: int,
    p_dropout: float,
    softmax_scale: float,
    zero_tensors: bool,
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
    """Gradients of `varlen_fwd` (without pages); the arguments that `bwd` has mean the same.

    Returns [dq, dk, dv, softmax_d] and further gradients as `bwd` does: dq, dk and dv like q, k and v; rows that belong
        to no sequence are 0; softmax_d (h, total_q + 128 * b), sequence i starting at column cu_seqlens_q[i] + 128 * i.
    """
    options = ScoreOptions(softmax_scale, softcap, is_causal, window_left, window_right, alibi_slopes, **named)
    check_operands(q, k, v, PACKED_AXES, PACKED_AXES, None)
    batch = _check_packed(cu_seqlens_q, cu_seqlens_k, None, max_seqlen_q, max_seqlen_k)
    total_q, heads, _ = q.shape
    sums = Sums(q.dtype, dk, dv) if accumulate_dkv else None
    checks.check_gradients(dout, q, k, v, out, dq, dk, dv, None if sums is None else sums.dtype)
    softmax_lse = checks.without_padding(softmax_lse, total_q)
    checks.check_lse(softmax_lse, dlse, q, [heads, total_q])
    options.check(q, batch, p_dropout)
    options.check_packed(q, k, max_seqlen_k)
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
    stage, d_shape = DqStage(dq_stage, dq_sum, softmax_d), (heads, total_q + SOFTMAX_D_GAP * batch)
    stage.check(q, dq, dk, dv, d_shape)
    check_written({"dq": dq, "dk": dk, "dv": dv, "dq_sum": dq_sum}, read)

    rule, may_fuse = ScoreRule.create(options, batch, q), stage.may_fuse(dlse)
    layout = sequences(total_q, k, cu_seqlens_q, cu_seqlens_k)
    check_columns(options, layout, max_seqlen_k)
    if explain:
        return explain_attention("backward", q, k, v, rule, _problems(layout), may_fuse and p_dropout == 0.0)
    if dq_stage == "end":
        return stage.end(q, dq)
    dropout = dropout_of_state(p_dropout, rng_state)
    dq = stage.new_dq(q, dq)
    grads = [q.new_zeros(q.shape) if dq is None else dq.zero_()]
    if stage.adds:
        if sums is not None:
            dk, dv = sums.parts
        grads[1:] = (x.new_zeros(x.shape) if grad is None else grad.zero_() for grad, x in ((dk, k), (dv, v)))
    bias_grads = BiasGradients.like(rule.tensors, compute_dtype(q.dtype)) if bias_grad and stage.adds else None
    dsinks = [torch.zeros_like(sinks)] if sinks is not None and stage.begins else []
    softmax_d = stage.softmax_d(q, d_shape)
    for sequence in layout:
        i, rows, cols = sequence.index, slice(sequence.q0, sequence.q1), slice(sequence.k0, sequence.k1)
        d0 = sequence.q0 + SOFTMAX_D_GAP * i
        row_lse = softmax_lse[:, rows].unsqueeze(0)
        row_dlse = None if dlse is None else dlse[:, rows].unsqueeze(0)
        delta = softmax_d[:, d0 : d0 + sequence.q1 - sequence.q0].unsqueeze(0)
        sq, sk, origin = sequence.q1 - sequence.q0, sequence.k1 - sequence.k0, options.origin(i)
        rule_i = rule.for_sequence(*sequence)
        if stage.begins:
            first_row = stage.first_row(rule.first_unmasked_row(sq, sk))
            unused = rule_i.unused(1, heads, k.shape[1], sq, sk)
            delta.copy_(
                row_deltas(dout[rows].unsqueeze(0), out[rows].unsqueeze(0), row_lse, row_dlse, first_row, unused)
            )
            if sinks is not None:
                dsinks[0] += sink_gradient(sinks, row_lse, delta)
        if not stage.adds:
            continue
        dout_i, q_i, out_i = (x[rows].unsqueeze(0) for x in (dout, q, out))
        k_i, v_i = (x[cols].unsqueeze(0) for x in (k, v))
        dq_i, dk_i, dv_i = (grad[span].unsqueeze(0) for grad, span in zip(grads, (rows, cols, cols)))
        attend_backward(
            dout_i,
            q_i,
            k_i,
            v_i,
            out_i,
            row_lse,
            delta,
            dq_i,
            dk_i,
            dv_i,
            rule_i.at(origin, sq, sk),
            None if dropout is None else dropout.for_batch(i).at(origin),
            may_fuse,
            None if bias_grads is None else bias_grads.sequence(*sequence[1:]),
        )
    grads[0] = stage.added(grads[0])
    if sums is not None:
        grads[1:] = sums.added()
    dbiases = [] if bias_grads is None else bias_grads.results(options)
    return [*grads, *([] if stage.adds else [None, None]), softmax_d, *dsinks, *dbiases]
