"""Forward attention on CPU tensors: online softmax over tiles, or PyTorch's fused operator."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import TYPE_CHECKING, cast

import torch

from ..dropout import DropoutStreams, dropout_streams, dropout_threshold, keep_mask, keep_scale
from ..eight_bit import Descales
from . import checks, torch_flash
from .entry import entry_point
from .explain import Problem, explain_attention
from .overlap import check_written
from .scaling import EightBit, check_descales, check_operands, output_dtype, result_like, scaling_of
from .scores import LN2, LOG2E, NamedScores, Origin, ScoreOptions, ScoreRule, Tile, compute_dtype
from .tiles import HeadRange, blocks, head_ranges, tile_shape, visited_tiles

if TYPE_CHECKING:
    from typing_extensions import Unpack

DENSE_Q_AXES = "batch, seqlen, heads, head_dim"
S_DMASK_MULTIPLE = 128


@dataclass(frozen=True)
class Dropout:
    """The dropout of one call; batch indices, heads, rows and columns of the mask start at those given."""

    p: float
    seed: int
    offset: int
    first_batch: int = 0
    first_head: int = 0
    first_row: int = 0
    first_col: int = 0

    @property
    def scale(self) -> float:
        return keep_scale(self.p)

    def for_batch(self, index: int) -> Dropout:
        return Dropout(self.p, self.seed, self.offset, index)

    def at(self, origin: Origin | None) -> Dropout:
        return self if origin is None else Dropout(self.p, self.seed, self.offset, *origin)

    def streams(self, head_range: HeadRange) -> DropoutStreams:
        batches = range(self.first_batch + head_range.b0, self.first_batch + head_range.b1)
        heads = range(self.first_head + head_range.heads.start, self.first_head + head_range.heads.stop)
        return dropout_streams(self.seed, self.offset, batches, heads, "cpu")

    def dropped(self, streams: DropoutStreams, tile: Tile) -> torch.Tensor:
        row, col = self.first_row, self.first_col
        bounds = (row + tile.row0, row + tile.row1, col + tile.col0, col + tile.col1)
        return ~keep_mask(streams, *bounds, dropout_threshold(self.p))


def new_dropout(p: float, generator: torch.Generator | None) -> Dropout | None:
    """The dropout of a forward call, with a new seed; None for p = 0, which leaves the generator as it is."""
    if p == 0.0:
        return None
    seed = torch.randint(0, 2**63 - 1, (1,), generator=generator, device="cpu")
    return Dropout(p, int(seed), 0)


def dropout_of_state(p: float, rng_state: torch.Tensor | None) -> Dropout | None:
    """The dropout that the forward call of this rng_state applied."""
    return None if p == 0.0 else Dropout(p, *cast(torch.Tensor, rng_state).tolist())


def dropout_of_call(p: float, generator: torch.Generator | None, rng_state: torch.Tensor | None) -> Dropout | None:
    """A new one, or that of a given state."""
    return new_dropout(p, generator) if rng_state is None else dropout_of_state(p, rng_state)


def rng_state_of(dropout: Dropout | None) -> torch.Tensor:
    state = [0, 0] if dropout is None else [dropout.seed, dropout.offset]
    return torch.tensor(state, dtype=torch.int64, device="cpu")


def round_up(value: int, multiple: int) -> int:
    return -(-value // multiple) * multiple


def new_s_dmask(
    out: torch.Tensor, shape: tuple[int, int, int, int], return_softmax: bool, dropout: Dropout | None
) -> torch.Tensor:
    """Zeros (b, h, sq, sk) with both lengths rounded up, or an empty tensor when it is not wanted."""
    if not return_softmax or dropout is None:
        return out.new_empty(0)
    batch, heads, sq, sk = shape
    return out.new_zeros(batch, heads, round_up(sq, S_DMASK_MULTIPLE), round_up(sk, S_DMASK_MULTIPLE))


def new_max_logit(q: torch.Tensor, wanted: bool) -> torch.Tensor | None:
    """The largest logit of each head so far (h), or None."""
    return q.new_full((q.shape[-2],), -math.inf, dtype=compute_dtype(q.dtype)) if wanted else None


def attend(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    out: torch.Tensor | None,
    lse: torch.Tensor | None,
    rule: ScoreRule,
    dropout: Dropout | None = None,
    sinks: torch.Tensor | None = None,
    max_logit: torch.Tensor | None = None,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Exact attention: q (b, sq, h, d), k (b, sk, h_k, d), v (b, sk, h_k, d_v) -> out (b, sq, h, d_v) and lse
    (b, h, sq): those given, written in place, or new ones for None. k and v may be of other dtypes than q.

    sinks: None or (h). Fully masked rows: out 0, lse the sink, or +inf without one. Keys that no row sees are never
    read. max_logit: None or (h), updated in place.
    """
    is_plain = dropout is None and sinks is None and max_logit is None
    fused = torch_flash.attend(q, k, v, rule) if is_plain else None
    if fused is not None:
        return fused[0] if out is None else out.copy_(fused[0]), fused[1] if lse is None else lse.copy_(fused[1])
    out = q.new_empty(checks.output_shape(q, v)) if out is None else out
    lse = new_lse(q) if lse is None else lse
    _attend_tiled(q, k, v, out, lse, rule, dropout, sinks, max_logit)
    return out, lse


def new_lse(q: torch.Tensor) -> torch.Tensor:
    return q.new_empty((q.shape[0], q.shape[2], q.shape[1]), dtype=compute_dtype(q.dtype))


def _attend_tiled(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    out: torch.Tensor,
    lse: torch.Tensor,
    rule: ScoreRule,
    dropout: Dropout | None,
    sinks: torch.Tensor | None,
    max_logit: torch.Tensor | None,
) -> None:
    """Dao, "FlashAttention-2" (2023), algorithm 1, on tiles."""
    sq, sk = q.shape[1], k.shape[1]
    first_row = rule.first_unmasked_row(sq, sk)
    out[:, :first_row].zero_()
    fill_fully_masked_lse(lse[:, :, :first_row], sinks)
    if first_row == sq or q.shape[0] == 0 or q.shape[2] == 0:
        return
    dtype = compute_dtype(q.dtype)
    group = q.shape[2] // k.shape[2]
    rows, cols = tile_shape(sq, sk, group)
    lo, hi = rule.key_range(first_row, sq, sq, sk)
    sink_logits = None if sinks is None else (sinks.to(dtype) * LOG2E)[None, :, None].expand(lse.shape)
    unused = rule.unused(q.shape[0], q.shape[2], k.shape[2], sq, sk)
    for head_range in head_ranges(q.shape[0], k.shape[2], group, rows, cols):
        keys, values = head_range.keys(k, lo, hi, dtype), head_range.keys(v, lo, hi, dtype)
        if unused is not None:  # a weight of 0 does not silence a value that is NaN
            values.masked_fill_(head_range.key_values(unused.keys, lo, hi), 0.0)
        streams = None if dropout is None else dropout.streams(head_range)
        for row0, row1 in blocks(first_row, sq, rows):
            queries = head_range.queries(q, row0, row1, dtype).mul_(rule.query_scale)
            state = _RowState(queries, values)
            for tile, visible in visited_tiles(rule, head_range, row0, row1, cols, sq, sk):
                part = slice(tile.col0 - lo, tile.col1 - lo)
                s = torch.bmm(queries, keys[:, part].transpose(1, 2))
                rule.logits_(head_range.by_head(s, row1 - row0), tile, sq, sk, visible)
                dropped = None if dropout is None or streams is None else dropout.dropped(streams, tile)
                state.update_(s, values[:, part], dropped)
            if max_logit is not None:
                largest = head_range.by_head(state.max_logits(), row1 - row0).amax((0, 2, 3)) * LN2
                max_logit[head_range.heads] = torch.maximum(max_logit[head_range.heads], largest)
            if sink_logits is not None:
                state.add_sink_(head_range.row_values(sink_logits, row0, row1))
            block_out, block_lse = state.finalize(1.0 if dropout is None else dropout.scale)
            head_range.store_rows(out, row0, row1, block_out)
            head_range.store_row_values(lse, row0, row1, block_lse)


def fill_fully_masked_lse(lse: torch.Tensor, sinks: torch.Tensor | None) -> None:
    """The LSE (b, h, rows) of rows that see no key: the sink, or +inf without one."""
    lse[:] = math.inf if sinks is None else sinks.masked_fill(sinks == -math.inf, math.inf)[:, None]


def part_of(
    index: int, options: ScoreOptions, rule: ScoreRule, dropout: Dropout | None, sq: int, sk: int
) -> tuple[ScoreRule, Dropout | None]:
    """(rule, dropout) of one batch entry, which begins at its origin."""
    origin = options.origin(index)
    dropout = None if dropout is None else dropout.for_batch(index).at(origin)
    return rule.for_batch(index).at(origin, sq, sk), dropout


def _attend_each(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    out: torch.Tensor,
    lse: torch.Tensor,
    options: ScoreOptions,
    rule: ScoreRule,
    dropout: Dropout | None,
    sinks: torch.Tensor | None,
    max_logit: torch.Tensor | None,
) -> None:
    """`attend`, one batch entry after the other: the bits of products and sums depend on the shapes of operands."""
    for i, entry in enumerate(zip(*(x.split(1) for x in (q, k, v, out, lse)))):
        q_i, k_i, v_i, out_i, lse_i = entry
        rule_i, dropout_i = part_of(i, options, rule, dropout, q.shape[1], k.shape[1])
        attend(q_i, k_i, v_i, out_i, lse_i, rule_i, dropout_i, sinks, max_logit)


class _RowState:
    """Running row max, row sum and accumulated output of the online softmax for one block of queries."""

    def __init__(self, queries: torch.Tensor, values: torch.Tensor) -> None:
        column = (*queries.shape[:2], 1)
        self.row_max = queries.new_full(column, -math.inf)
        self.row_sum = queries.new_zeros(column)
        self.acc_o = queries.new_zeros(*queries.shape[:2], values.shape[-1])

    def update_(self, s: torch.Tensor, values: torch.Tensor, dropped: torch.Tensor | None) -> None:
        """Online softmax over one more tile of base-2 logits (n, rows, cols); s is overwritten."""
        row_max = torch.maximum(self.row_max, s.amax(-1, keepdim=True))
        # While a row is fully masked its row max is -inf; a shift of 0 keeps its weights at 0 instead of NaN.
        shift = row_max.masked_fill(row_max == -math.inf, 0.0)
        s.sub_(shift).exp2_()
        rescale = torch.exp2(self.row_max - shift)
        self.row_sum.mul_(rescale).add_(s.sum(-1, keepdim=True))
        if dropped is not None:
            s.masked_fill_(dropped.view(s.shape), 0.0)
        self.acc_o.mul_(rescale).baddbmm_(s, values)
        self.row_max = row_max

    def max_logits(self) -> torch.Tensor:
        """The largest base-2 logit so far (n, rows, 1); NaN where the row has no result."""
        return self.row_max.masked_fill(self.row_sum.isnan(), math.nan)

    def add_sink_(self, logits: torch.Tensor) -> None:
        """One more key of these base-2 logits (n, rows, 1), whose value is 0; one of +inf has all the weight."""
        row_max = torch.maximum(self.row_max, logits)
        shift = row_max.masked_fill(row_max == -math.inf, 0.0)
        rescale = torch.exp2(self.row_max - shift)
        self.row_sum.mul_(rescale).add_(torch.exp2(logits - shift).masked_fill_(logits == math.inf, 1.0))
        self.acc_o.mul_(rescale)
        self.row_max = row_max

    def finalize(self, o_scale: float) -> tuple[torch.Tensor, torch.Tensor]:
        """Normalised output (n, rows, d) and natural-log LSE (n, rows, 1)."""
        empty = self.row_sum == 0
        out = self.acc_o.mul_(o_scale / self.row_sum.masked_fill(empty, 1.0))
        lse = (self.row_max + self.row_sum.log2()).mul_(LN2)
        return out, lse.masked_fill_(empty, math.inf)


def write_s_dmask(
    q: torch.Tensor, k: torch.Tensor, lse: torch.Tensor, rule: ScoreRule, dropout: Dropout, s_dmask: torch.Tensor
) -> None:
    """Normalised probabilities (b, h, sq, sk) in place, before the dropout scaling; dropped entries become negative.

    A dropped probability P is stored as -max(P, smallest subnormal), so that the sign alone tells the mask. Scores that
    lie outside s_dmask (whose size the caller states) are omitted.
    """
    sq, sk = q.shape[1], k.shape[1]
    stop_row, stop_col = min(sq, s_dmask.shape[2]), min(sk, s_dmask.shape[3])
    if q.numel() == 0 or k.numel() == 0:
        return
    dtype = compute_dtype(q.dtype)
    limits = torch.finfo(q.dtype)
    smallest = limits.smallest_normal * limits.eps
    group = q.shape[2] // k.shape[2]
    rows, cols = tile_shape(sq, sk, group)
    for head_range in head_ranges(q.shape[0], k.shape[2], group, rows, cols):
        streams = dropout.streams(head_range)
        keys = head_range.keys(k, 0, stop_col, dtype)
        for row0, row1 in blocks(0, stop_row, rows):
            queries = head_range.queries(q, row0, row1, dtype).mul_(rule.query_scale)
            lse_rows = head_range.row_values(lse, row0, row1).to(dtype) * LOG2E
            for col0, col1 in blocks(0, stop_col, cols):
                tile = head_range.tile(row0, row1, col0, col1)
                s = torch.bmm(queries, keys[:, col0:col1].transpose(1, 2))
                rule.logits_(head_range.by_head(s, row1 - row0), tile, sq, sk, rule.visible(tile, sq, sk))
                p = head_range.by_head(s.sub_(lse_rows).exp2_(), row1 - row0).to(q.dtype)
                p = torch.where(dropout.dropped(streams, tile), -p.clamp(min=smallest), p)
                s_dmask[tile.batches, tile.heads, row0:row1, col0:col1] = p


@entry_point
def fwd(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    out: torch.Tensor | None,
    alibi_slopes: torch.Tensor | None,
    p_dropout: float,
    softmax_scale: float,
    is_causal: bool,
    window_left: int,
    window_right: int,
    softcap: float,
    return_softmax: bool,
    gen: torch.Generator | None,
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
    **named: Unpack[NamedScores],
) -> list[torch.Tensor | None] | dict[str, object]:
    """Forward attention of equally long sequences.

    Arguments:
        q: (b, sq, h, d), float16, bfloat16, float32 or float64, d <= 512; k: (b, sk, h_k, d), h divisible by h_k;
            v: (b, sk, h_k, d_v), d_v <= 512. k and v also float8_e4m3fn or int8; q also float8_e4m3fn, with k of it.
        out: None or a tensor (b, sq, h, d_v) (any strides) that is written and returned.
        alibi_slopes: None or float32 (h) or (b, h): bias -slope * |i + sk - sq - j|.
        p_dropout: drop probability in [0, 1); gen: None or the CPU generator that makes the seed.
        softmax_scale: factor of q·k; softcap: 0 for none, else logits are softcap * tanh(scaled / softcap).
        is_causal, window_left, window_right: see ScoreRule; negative is unbounded; causal sets the right side to 0.
        return_softmax: return S_dmask (only with dropout).
        batch_invariant: compute each batch entry by itself, with the bits that it has in every batch, dense or packed.
        q_descale, k_descale, v_descale: None or float32 factors of 8-bit tensors, in the shapes of
            `eight_bit.check_descales`; v_per_channel says that v's is (h_k, d_v) or (b, h_k, d_v).
        out_dtype: None, or float16 or bfloat16 where q has 8 bits.
        explain: check the arguments and return the plan alone, a dict (see `explain.explain_attention`).
        rng_state: None, or int64 (2,): the dropout of that [seed, offset] instead of a new one.
        named: the options of ScoreOptions that have a default.
            sinks: None or float32 (h), float64 too for float64 inputs: a logit of each head that joins every softmax.
            origins: None or int64 (b, 4): see scores.Origin. On CUDA with dropout columns are multiples of 16.
            mask: None or a MaskFactors, which hides scores as the window does.
            attn_bias: None or (b | 1, h | 1, sq | 1, sk | 1), of q's dtype or float32: added to the scores after
                softcap. An entry of -inf hides the score.
            rel_bias: None or float32 (h, 2 R + 1), float64 too for float64 inputs: its column
                R + clamp(j - i - sk + sq, -R, R) is added to the score of query i and key j.

    Returns [out, lse, S_dmask, rng_state]: out (b, sq, h, d_v); lse (b, h, sq), natural log, float32 (float64 for
        float64 inputs), for a fully masked row the sink, or +inf without one; S_dmask empty or (b, h, sq, sk)
        rounded up to 128, see write_s_dmask; rng_state int64 (2,). With return_max_logit also the largest logit of each
        head (h), in the dtype of lse: over all rows and visible keys, after softcap and ALiBi, without the sink; -inf
        for none.

    Raises RuntimeError naming the argument; nothing is written then.
    """
    options = ScoreOptions(softmax_scale, softcap, is_causal, window_left, window_right, alibi_slopes, **named)
    call = EightBit.of(q, k, v, Descales(q_descale, k_descale, v_descale, v_per_channel), out_dtype)
    check_operands(q, k, v, DENSE_Q_AXES, DENSE_Q_AXES, call, p_dropout, same_batch=True)
    check_descales(q, k, v, call, q.shape[0])
    if out is not None:
        checks.check_like_query("out", out, q, checks.output_shape(q, v), dtype=output_dtype(q, v, call))
    batch, sq, heads, _ = q.shape
    options.check(q, batch, p_dropout)
    options.check_dense(q, k)
    checks.check_generator(gen)
    if rng_state is not None:
        checks.check_rng_state(rng_state, p_dropout)
    sinks = options.sinks
    check_written({"out": out}, {"q": q, "k": k, "v": v, **options.tensors_read()})
    rule = ScoreRule.create(options, batch, q)
    if explain:
        problems = [Problem(1, sq, k.shape[1])] * batch if batch_invariant else [Problem(batch, sq, k.shape[1])]
        is_plain = p_dropout == 0.0 and sinks is None and not return_max_logit and call is None
        return explain_attention("forward", q, k, v, rule, problems, is_plain)
    dropout = dropout_of_call(p_dropout, gen, rng_state)
    by_entry = batch_invariant or options.origins is not None
    if out is None and (by_entry or call is not None):
        out = q.new_empty(checks.output_shape(q, v), dtype=output_dtype(q, v, call))
    scaling = scaling_of(q, k, v, call)
    if scaling is not None:
        q, k, v = scaling.queries(q), scaling.scaled(k, scaling.k_rows), scaling.scaled(v, scaling.v_rows)
    result = None if out is None else result_like(out, scaling)
    max_logit = new_max_logit(q, return_max_logit)
    if by_entry:
        lse = new_lse(q)
        assert result is not None
        _attend_each(q, k, v, result, lse, options, rule, dropout, sinks, max_logit)
    else:
        result, lse = attend(q, k, v, result, None, rule, dropout, sinks, max_logit)
    if scaling is None:
        out = result
    else:
        assert out is not None
        scaling.store(out, result)
    s_dmask = new_s_dmask(out, (batch, heads, sq, k.shape[1]), return_softmax, dropout)
    if s_dmask.numel():
        for i, entry in enumerate(zip(*(x.split(1) for x in (q, k, lse)))):
            q_i, k_i, lse_i = entry
            rule_i, dropout_i = part_of(i, options, rule, dropout, sq, k.shape[1])
            write_s_dmask(q_i, k_i, lse_i, rule_i, cast(Dropout, dropout_i), s_dmask[i : i + 1])
    return [out, lse, s_dmask, rng_state_of(dropout), *([max_logit] if return_max_logit else [])]
