"""Attention by its definition, in plain differentiable PyTorch, and the error criterion.

Every tensor operation runs in the dtype asked for: float64 gives the reference, the inputs' own dtype gives "plain
attention", whose error is the yardstick. Definition: Vaswani et al. 2017 (softmax(Q K^T) V), Press et al. 2022
(ALiBi), with masks aligned to the bottom right corner; sinks are a further column of scores, as OpenAI's gpt-oss (2025)
has them.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch


@dataclass
class Attention:
    """out (b, sq, h, d_v), lse (b, h, sq), probs (b, h, sq, sk): the softmax before dropout, max_logit (h)."""

    out: torch.Tensor
    lse: torch.Tensor
    probs: torch.Tensor
    max_logit: torch.Tensor


def visible(seqlen_q, seqlen_k, causal=False, window=(-1, -1), device=None, first=None) -> torch.Tensor:
    """Bool (sq, sk): query i sees key j iff first + i - L <= j <= first + i + R; causal makes R = 0. first: sk - sq."""
    left, right = window
    if causal:
        right = 0
    position = torch.arange(seqlen_q, device=device)[:, None] + (seqlen_k - seqlen_q if first is None else first)
    key = torch.arange(seqlen_k, device=device)[None, :]
    seen = torch.ones(seqlen_q, seqlen_k, dtype=torch.bool, device=device)
    if left >= 0:
        seen &= key >= position - left
    if right >= 0:
        seen &= key <= position + right
    return seen


def attention(
    q,
    k,
    v,
    *,
    causal=False,
    window=(-1, -1),
    softcap=0.0,
    alibi_slopes=None,
    scale=None,
    sinks=None,
    keep=None,
    rp_dropout=1.0,
    mask=None,
    attn_bias=None,
    rel_bias=None,
    first=None,
    dtype=torch.float64,
) -> Attention:
    """Dense attention. q (b, sq, h, d), k (b, sk, h_k, d), v (b, sk, h_k, d_v), alibi_slopes (h) or (b, h), finite
    sinks (h), keep bool (b, h, sq, sk); mask bool and attn_bias broadcastable to it, rel_bias (h, 2 R + 1); first: the
    position of the first query among the keys, without rel_bias, by default that of the bottom right corner."""
    sq, sk, group = q.shape[1], k.shape[1], q.shape[2] // k.shape[2]
    first = sk - sq if first is None else first
    scale = q.shape[-1] ** -0.5 if scale is None else scale
    q, k, v = (x.to(dtype).transpose(1, 2) for x in (q, k, v))
    k, v = (x.repeat_interleave(group, dim=1) for x in (k, v))
    scores = (q * scale) @ k.transpose(-1, -2)
    if softcap > 0:
        scores = softcap * torch.tanh(scores / softcap)
    if alibi_slopes is not None:
        position = torch.arange(sq, device=q.device)[:, None] + first
        distance = (position - torch.arange(sk, device=q.device)[None, :]).abs()
        scores = scores - (alibi_slopes.double()[..., None, None] * distance).to(dtype)
    seen = visible(sq, sk, causal, window, q.device, first)
    if mask is not None:
        seen = seen & mask
    if attn_bias is not None:
        seen = seen & (attn_bias != float("-inf"))
        scores = scores + attn_bias.to(dtype).masked_fill(attn_bias == float("-inf"), 0.0)
    if rel_bias is not None:
        scores = scores + rel_bias.to(dtype)[:, rel_columns(rel_bias, sq, sk)]
    scores = scores.masked_fill(~seen, float("-inf"))
    max_logit = torch.full(scores.shape[1:2], float("-inf"), dtype=dtype, device=q.device)
    if scores.numel() > 0:
        max_logit = scores.detach().amax((0, 2, 3))
    if sinks is None:
        dead_row = ~seen.any(dim=-1)
        scores = scores.masked_fill(dead_row[..., None], 0.0)
        lse = torch.logsumexp(scores, dim=-1).masked_fill(dead_row, float("inf"))
        probs = torch.softmax(scores, dim=-1).masked_fill(~seen, 0.0)
    else:
        column = sinks.to(dtype)[:, None, None].expand(*scores.shape[:3], 1)
        with_sink = torch.cat([scores, column], dim=-1)
        lse = torch.logsumexp(with_sink, dim=-1)
        probs = torch.softmax(with_sink, dim=-1)[..., :-1]
    dropped = probs if keep is None else (probs * rp_dropout).masked_fill(~keep, 0.0)
    return Attention((dropped @ v).transpose(1, 2), lse, probs, max_logit)


def with_rounded_probs(probs, v) -> torch.Tensor:
    """Out by FlashAttention-2's arithmetic, else exact: P relative to the row max is rounded where it is multiplied by
    v, not where it is summed."""
    p = probs / probs.amax(-1, keepdim=True)
    values = v.double().transpose(1, 2).repeat_interleave(p.shape[1] // v.shape[2], dim=1)
    return (p.to(v.dtype).double() @ values / p.sum(-1, keepdim=True)).transpose(1, 2).to(v.dtype)


def attention_by_rows(q, k, v, dout=None, *, causal=False, keep=None, at_once=2**27, **options):
    """attention() in float64, of as many rows at a time as have `at_once` scores: {"out", "lse" (b, h, sq), "emulated"}
    with what with_rounded_probs() gives, and, of dout, {"dq", "dk", "dv"}."""
    first, count = k.shape[1] - q.shape[1], max(1, at_once // (q.shape[0] * q.shape[2] * k.shape[1]))
    strips = {name: [] for name in ("out", "lse", "emulated", "dq")}
    dk, dv = (torch.zeros_like(x, dtype=torch.float64) for x in (k, v))
    for start in range(0, q.shape[1], count):
        rows = slice(start, min(q.shape[1], start + count))
        keys = slice(0, max(1, first + rows.stop) if causal else None)
        leaves = [x.detach().double().requires_grad_(dout is not None) for x in (q[:, rows], k[:, keys], v[:, keys])]
        kept = None if keep is None else keep[:, :, rows, keys]
        with torch.set_grad_enabled(dout is not None):
            part = attention(*leaves, causal=causal, keep=kept, first=first + start, **options)
        strips["out"].append(part.out.detach())
        strips["lse"].append(part.lse.detach().transpose(1, 2))
        strips["emulated"].append(with_rounded_probs(part.probs.detach(), v[:, keys]))
        if dout is not None:
            dq, *others = torch.autograd.grad(part.out, leaves, dout[:, rows].double())
            strips["dq"].append(dq)
            for whole, of_strip in zip((dk, dv), others, strict=True):
                whole[:, keys] += of_strip
    found = {name: torch.cat(parts, 1) for name, parts in strips.items() if parts}
    found["lse"] = found["lse"].transpose(1, 2)
    return found if dout is None else {**found, "dk": dk, "dv": dv}


def rel_columns(rel_bias, sq, sk) -> torch.Tensor:
    """The column (sq, sk) of rel_bias that belongs to each score, by the distance of key and query."""
    reach = rel_bias.shape[1] // 2
    position = torch.arange(sq, device=rel_bias.device)[:, None] + sk - sq
    return (torch.arange(sk, device=rel_bias.device) - position).clamp(-reach, reach) + reach


def gather_pages(pages, table_row, length) -> torch.Tensor:
    """The first ``length`` rows (length, h_k, d) of the sequence whose pages are listed in ``table_row``."""
    page_size = pages.shape[1]
    used = table_row[: (length + page_size - 1) // page_size].long()
    return pages[used].flatten(0, 1)[:length]


def sequence_bounds(cu_seqlens, total) -> list[int]:
    """What cu_seqlens (ints, of any contents) mean: their running maximum, within the rows that exist."""
    bounds, reached = [], 0
    for value in cu_seqlens:
        reached = max(reached, min(max(value, 0), total))
        bounds.append(reached)
    return bounds


@dataclass
class Varlen:
    """How a concatenated batch is laid out: Python ints, so that nothing has to be read back from a device."""

    starts_q: list[int]
    lens_q: list[int]
    starts_k: list[int]  # first key row used, after left padding; within the sequence's own pages when paged
    lens_k: list[int]
    total_q: int


def attention_varlen(
    q, k, v, layout: Varlen, *, block_table=None, alibi_slopes=None, keep=None, **options
) -> Attention:
    """Concatenated sequences, one at a time: out (total_q, h, d_v), lse (h, total_q); probs is None.

    Rows of no sequence have out 0 and LSE +inf. keep: bool (b, h, >= sq, >= sk).
    """
    dtype = options.get("dtype", torch.float64)
    out = torch.zeros((*q.shape[:-1], v.shape[-1]), dtype=dtype, device=q.device)
    lse = torch.full((q.shape[1], q.shape[0]), float("inf"), dtype=dtype, device=q.device)
    max_logit = torch.full((q.shape[1],), float("-inf"), dtype=dtype, device=q.device)
    for i, (sq0, sq, sk0, sk) in enumerate(zip(layout.starts_q, layout.lens_q, layout.starts_k, layout.lens_k)):
        if block_table is None:
            k_i, v_i = k[sk0 : sk0 + sk], v[sk0 : sk0 + sk]
        else:
            k_i, v_i = (gather_pages(x, block_table[i], sk0 + sk)[sk0:] for x in (k, v))
        slopes = alibi_slopes if alibi_slopes is None or alibi_slopes.dim() == 1 else alibi_slopes[i : i + 1]
        keep_i = None if keep is None else keep[i : i + 1, :, :sq, :sk]
        q_i = q[sq0 : sq0 + sq]
        part = attention(q_i[None], k_i[None], v_i[None], alibi_slopes=slopes, keep=keep_i, **options)
        out[sq0 : sq0 + sq] = part.out[0]
        lse[:, sq0 : sq0 + sq] = part.lse[0]
        max_logit = torch.maximum(max_logit, part.max_logit)
    return Attention(out, lse, None, max_logit)


def assert_same_places(predicate, ours, expected, name):
    ours_at, expected_at = predicate(ours), predicate(expected)
    wrong = ours_at ^ expected_at
    assert not wrong.any(), (
        f"{name}: {predicate.__name__} at {int(ours_at.sum())} places, expected at {int(expected_at.sum())}; "
        f"first difference at {wrong.nonzero()[0].tolist()}"
    )


def assert_accurate(ours, expected, plain, name="out", factor=2.0, slack=1e-5):
    """max |ours - expected| <= factor * max |plain - expected| + slack; NaN and infinities at the same places.

    Plain attention counts as at least one rounding of the largest value off: over a few hundred values of rows in which
    one key outweighs the others its error may be smaller by luck.
    """
    assert ours.shape == expected.shape, f"{name}: shape {tuple(ours.shape)}, expected {tuple(expected.shape)}"
    rounding = torch.finfo(plain.dtype).eps / 2
    ours, expected, plain = (x.detach().double() for x in (ours, expected, plain))
    assert_same_places(torch.isnan, ours, expected, name)
    assert_same_places(torch.isposinf, ours, expected, name)
    assert_same_places(torch.isneginf, ours, expected, name)
    if ours.numel() == 0:
        return
    finite = torch.isfinite(expected)
    error = (ours - expected).abs().masked_fill(~finite, 0.0)
    plain_error = (plain - expected).abs().masked_fill(~(finite & torch.isfinite(plain)), 0.0)
    largest = expected.abs().masked_fill(~finite, 0.0).max().item()
    yardstick = max(plain_error.max().item(), rounding * largest)
    worst = error.max().item()
    assert worst <= factor * yardstick + slack, (
        f"{name}: error {worst:.3e} > {factor:g} * {yardstick:.3e} + {slack:g} "
        f"at {list(map(int, torch.unravel_index(error.argmax(), error.shape)))}"
    )


def dlse_of_rounding(out, saved_out, dout) -> torch.Tensor:
    """(b, h, sq): a backward that takes rowsum(dout * out) from saved_out has those of a dLSE greater by this."""
    return ((out - saved_out.double()) * dout.double()).sum(-1).transpose(-1, -2)


def farther(exact, plain, other) -> torch.Tensor:
    """Of each element that of plain or other with the larger error, in plain's dtype."""
    return torch.where((other - exact).abs() > (plain.double() - exact).abs(), other.to(plain.dtype), plain)


def assert_gradient_accurate(ours, expected, plain, name):
    assert_accurate(ours, expected, plain, name, factor=3.0, slack=1e-4)
