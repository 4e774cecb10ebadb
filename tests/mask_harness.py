"""Calls with masks and biases as data: their options, masks of random content, the reference of dense and packed ones.

Masks have rows that see nothing and keys that nothing sees. Mask heads and batch entries differ from kind to kind.
"""

from __future__ import annotations

import re
from dataclasses import MISSING, dataclass, fields

import torch
from harness import exact_keep_scale
from reference import attention

from flash_attn.masks import AttentionMask

INT_MAX = 2**31 - 1


@dataclass(kw_only=True)
class ScoreCall:
    """Options of a call that are no tensors. A test adds what it varies besides, before these."""

    causal: bool = False
    window: tuple = (-1, -1)
    softcap: float = 0.0
    alibi: bool = False
    dropout: float = 0.0
    sinks: bool = False
    heads_k: int = 2
    deterministic: bool = False
    batch_invariant: bool = False

    def __str__(self):
        """What differs from the defaults, as pytest's -k takes it."""
        shared = fields(ScoreCall)
        own = [f for f in fields(self) if f.name not in {g.name for g in shared}]
        values = [(f, getattr(self, f.name)) for f in (*own, *shared)]
        told = (f.name if x is True else f"{f.name}_{x}" for f, x in values if f.default is MISSING or x != f.default)
        return re.sub(r"\W+", "_", "_".join(told)).strip("_")


def ints(*values, device):
    return torch.tensor(values, dtype=torch.int32, device=device)


def starts(lengths, device):
    """cu_seqlens of queries and of keys."""
    return [ints(*torch.tensor([0, *n]).cumsum(0), device=device) for n in zip(*lengths)]


# ---- masks ----


def ranges_mask(batch: int, sq: int, sk: int, device) -> AttentionMask:
    """Two ranges of keys for each query, of two mask heads."""
    lo, hi, lo2, hi2 = torch.randint(-20, sk + 20, (4, batch, 2, sq), device=device).sort(0).values
    rows = torch.arange(sq, device=device) % 7 == 3
    return AttentionMask.query_ranges(lo, hi.where(~rows, 0), lo2, hi2.where(~rows, 0))


def startend_mask(batch: int, sq: int, sk: int, device) -> AttentionMask:
    """Two ranges of hidden queries for each key, of three mask heads."""
    bounds = torch.randint(0, sq + 1, (batch, 3, sk, 4), device=device)
    bounds[:, :, 5::11] = ints(0, sq, 0, 0, device=device)
    return AttentionMask.from_startend_row_indices(bounds, False, sq)


def bits_mask(sq: int, sk: int, device) -> AttentionMask:
    seen = torch.rand(1, 3, sq, sk, device=device) > 0.6
    seen[:, :, 7:60:9] = False
    seen[..., 100:103] = False
    return AttentionMask.from_tensor(seen)


def blocks_mask(sq: int, sk: int, size, device) -> AttentionMask:
    """Lists of blocks, some of which lie outside of the scores."""
    nq, nk = -(-sq // size[0]), -(-sk // size[1])
    counts = torch.randint(0, 3, (1, 6, nq), device=device)
    indices = torch.randint(0, nk + 1, (1, 6, nq, 3), device=device)
    return AttentionMask.from_block_lists(counts, indices, block_size=size, seqlen_q=sq, seqlen_k=sk)


def block_map_mask(batch: int, sq: int, sk: int, device) -> AttentionMask:
    """Whole, partial and hidden blocks."""
    kinds = torch.randint(0, 3, (batch, 1, -(-sq // 128), -(-sk // 64)), dtype=torch.uint8, device=device)
    bits = AttentionMask.from_tensor(torch.rand(1, 1, sq, sk, device=device) > 0.8).factors.bits
    factors = blocks_mask(sq, sk, (64, 128), device).factors
    return AttentionMask(factors._replace(bits=bits, block_map=kinds, block_size=(128, 64)), sq, sk)


def make_mask(kind: str, batch: int, sq: int, sk: int, device, block_size=(64, 128)) -> AttentionMask:
    if kind == "all":
        parts = (make_mask(name, batch, sq, sk, device, block_size) for name in ("bits", "blocks", "ranges"))
        bits, blocks, ranges = parts
        return bits & blocks & ranges
    return {
        "documents": lambda: AttentionMask.documents(ints(3, sq // 2 - 9, sq // 2 - 8, sq - 5, device=device), sq),
        "ranges": lambda: ranges_mask(batch, sq, sk, device),
        "startend": lambda: startend_mask(batch, sq, sk, device),
        "padding": lambda: AttentionMask.key_padding(ints([1] * (sk - 40) + [0] * 40, [0] * sk, device=device)),
        "blocks": lambda: blocks_mask(sq, sk, block_size, device),
        "sparse blocks": lambda: block_map_mask(batch, sq, sk, device),
        "bits": lambda: bits_mask(sq, sk, device),
        "nothing": lambda: AttentionMask.key_padding(torch.zeros(sk, dtype=torch.bool, device=device)),
        "everything": lambda: AttentionMask.query_ranges(*ints([-5] * sq, [INT_MAX] * sq, device=device)),
    }[kind]()


def packed_mask(kind: str, lengths, device) -> AttentionMask:
    """Mask heads divide 6."""
    total_q, total_k = (sum(n) for n in zip(*lengths))
    longest_q, longest_k = (max(n) for n in zip(*lengths))
    if kind == "ranges":
        bounds = torch.randint(-3, longest_k + 9, (2, 3, total_q), device=device)
        return AttentionMask.query_ranges(*bounds.sort(0).values, packed=True)
    if kind == "startend":
        bounds = torch.randint(0, longest_q + 10, (2, total_k, 4), device=device)
        return AttentionMask.from_startend_row_indices(bounds, False)
    return AttentionMask.from_tensor(torch.rand(6, total_q, longest_k, device=device) > 0.4, packed=True)


def dense_of(mask: AttentionMask, sq: int, sk: int, batch: int, heads: int) -> torch.Tensor:
    dense = mask.to_dense(sq, sk)
    return dense.repeat_interleave(heads // dense.shape[1], 1).expand(batch, heads, sq, sk)


# ---- the reference ----


def _differentiate(out, lse, leaves, dout, dlse):
    """Gradients of (out, LSE); the LSE of rows that see nothing is a constant."""
    lse_grad = dlse.to(out.dtype).masked_fill(lse.isinf(), 0.0)
    return torch.autograd.grad((out, lse), list(leaves), (dout.to(out.dtype), lse_grad), allow_unused=True)


def _options(call, keep=None):
    scale = exact_keep_scale(call.dropout) if call.dropout else 1.0
    return {"causal": call.causal, "window": call.window, "softcap": call.softcap, "keep": keep, "rp_dropout": scale}


def expected(call, leaves, dense, keep, dout, dlse, dtype, **options):
    """(Attention, gradients by name) of a call by the definition, in a dtype. leaves: q, k, v, sinks and biases."""
    given = {name: x.detach().to(dtype).requires_grad_() for name, x in leaves.items()}
    result = attention(**given, **_options(call, keep), mask=dense, dtype=dtype, **options)
    return result, dict(zip(given, _differentiate(result.out, result.lse, given.values(), dout, dlse)))


def packed_expected(call, lengths, leaves, mask, dout, dlse, dtype, **options):
    """(out, LSE, gradients by name) of packed sequences by the definition, one sequence after the other."""
    given = {name: x.detach().to(dtype).requires_grad_() for name, x in leaves.items()}
    heads, outs, lses, q0, k0 = given["q"].shape[1], [], [], 0, 0
    for sq, sk in lengths:
        rows, keys = slice(q0, q0 + sq), slice(k0, k0 + sk)
        named = {"rel_bias": given["rel_bias"]} if "rel_bias" in given else {}
        if "attn_bias" in given:
            named["attn_bias"] = given["attn_bias"][None, :, rows, :sk]
        if mask is not None:
            dense = mask.sequence(q0, q0 + sq, k0, k0 + sk).to_dense()
            named["mask"] = dense.repeat_interleave(heads // dense.shape[1], 1)
        operands = (given["q"][None, rows], *(given[name][None, keys] for name in "kv"))
        part = attention(*operands, **_options(call), dtype=dtype, **named, **options)
        outs.append(part.out[0])
        lses.append(part.lse[0])
        q0, k0 = q0 + sq, k0 + sk
    out, lse = torch.cat(outs), torch.cat(lses, 1)
    return out, lse, dict(zip(given, _differentiate(out, lse, given.values(), dout, dlse)))
