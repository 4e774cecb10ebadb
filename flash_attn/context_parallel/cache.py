"""Attention over a KV cache whose positions are shared out to the ranks of a group."""

from __future__ import annotations

import torch
from torch import Tensor

from flash_attn._types import TensorOrTuple, WindowSize
from flash_attn.context_parallel.agreement import Agreement, agreed_communicator, raise_on_ranks_of_last_plan
from flash_attn.inference import flash_attn_combine, flash_attn_with_kvcache
from flash_attn.ops import arguments
from flash_attn.ops.lse import check_convention, converted


class CpCache:
    """Which positions of every sequence each rank keeps: `interleave` of them in turn, beginning with rank 0.

    Position p is on rank p // interleave % size, in row p // (interleave * size) * interleave + p % interleave of the
    sequence's own rows there. An interleave of the rows that a rank has makes its shard contiguous. Made once, by all
    ranks, and used by all layers in the thread that made it.

    Attributes:
        rank, size: of the group.
        interleave: int.
    """

    def __init__(self, *, mesh=None, group=None, interleave: int = 1, check: str | None = None):
        """mesh, group, check: as of `CpPlan.dense`. interleave: at least 1, for instance the page size.

        Raises RuntimeError or TypeError on every rank if one has bad arguments or others.
        """
        self.transport = agreed_communicator("CpCache", check, mesh, group)
        self.rank, self.size = self.transport.rank, self.transport.size
        error = None
        try:
            self.interleave = arguments.integer("interleave", interleave, least=1)
        except Exception as raised:  # of any kind: the other ranks wait to be told
            error = raised
        text = "" if error is not None else repr(interleave)
        self._agreement = Agreement(self.transport, "CpCache", "shards", check, text, error)

    def local_lengths(self, lengths: int | Tensor, rank: int | None = None) -> int | Tensor:
        """How many of the first `lengths` positions this rank has, or another one; a negative length stays."""
        turn = self.interleave * self.size
        before = lengths // turn * self.interleave
        rest = lengths % turn - (self.rank if rank is None else rank) * self.interleave
        if isinstance(lengths, Tensor):
            return torch.where(lengths < 0, lengths, before + rest.clamp(0, self.interleave))
        return lengths if lengths < 0 else before + min(max(rest, 0), self.interleave)

    def rows(self, positions: Tensor) -> Tensor:
        """The row of each position among a sequence's own rows here, -1 where another rank has it."""
        is_own = positions // self.interleave % self.size == self.rank
        row = positions // (self.interleave * self.size) * self.interleave + positions % self.interleave
        return torch.where(is_own & (positions >= 0), row, -1)

    def compare(self, request: str, error: BaseException | None) -> None:
        self._agreement.compare("flash_attn_cp_kvcache", request, error)


def flash_attn_cp_kvcache(
    q: Tensor,
    k_cache: Tensor,
    v_cache: Tensor,
    cache_seqlens: int | Tensor,
    cache_batch_idx: Tensor | None = None,
    block_table: Tensor | None = None,
    softmax_scale: float | None = None,
    causal: bool = False,
    window_size: WindowSize = (-1, -1),
    softcap: float = 0.0,
    num_splits: int = 0,
    return_softmax_lse: bool = False,
    *,
    shards: CpCache,
    sinks: Tensor | None = None,
    lse_convention: str = "fa2",
) -> TensorOrTuple:
    """`flash_attn_with_kvcache` of the same queries on every rank, which each have some of the keys. No backward.

    Each rank computes with its keys, all ranks get all results and combine them in float32, in the order of ranks: out
    and LSE have the same bits on every rank. A rank's result is rounded to q's dtype before. The new keys are in the
    cache already, in the rows that `shards.rows` names. ALiBi is not accepted.

    Arguments:
        q: (batch, seqlen_q, nheads, head_dim), the same on every rank. The last query is the last position. With
            several queries and a mask, which each see keys of their own, every query counts as a sequence: K and V
            are read once for each.
        k_cache, v_cache, cache_batch_idx, block_table: of this rank's rows, as in `flash_attn_with_kvcache`.
        cache_seqlens: int, or int32 or int64 (batch,): lengths over all ranks, -1 for a padding request. One that does
            not fit into the rows of every rank, of which all have the same number, is an error where the host sees it,
            on the GPU a padding request.
        shards: a CpCache.
        The others as in `flash_attn_with_kvcache`, and equal on all ranks.

    Returns:
        out: (batch, seqlen_q, nheads, head_dim)
        softmax_lse (with return_softmax_lse): (batch, nheads, seqlen_q) float32 (float64 for float64).

    Raises RuntimeError, TypeError or ValueError; as far as `shards` checks calls, on every rank if on one.
    """
    if not isinstance(shards, CpCache):
        error = TypeError(f"shards: expected a CpCache, got {arguments.shown(shards)}")
        raise_on_ranks_of_last_plan("flash_attn_cp_kvcache", error)
    part, request, error = None, "", None
    try:
        check_convention(lse_convention)
        arguments.check_tensors(("q", "k_cache", "v_cache"), (q, k_cache, v_cache))
        arguments.check_kvcache_ranks(q, k_cache, None, block_table)
        window = arguments.normal_window(arguments.flag("causal", causal), window_size)
        capacity = k_cache.shape[1] * (1 if block_table is None else block_table.shape[1])
        lengths = _lengths(cache_seqlens, q, capacity, shards)
        part = _own_part(
            q.detach(), k_cache, v_cache, lengths, cache_batch_idx, block_table, window, shards,
            softmax_scale=softmax_scale, softcap=softcap, num_splits=num_splits,
            sinks=sinks if shards.rank == 0 else None,
        )  # fmt: skip
        kinds = [tuple(x.shape[1:]) for x in part]
        request = repr((kinds, q.shape[0], q.dtype, q.device.type, window, capacity, softmax_scale, float(softcap)))
    except Exception as raised:  # of any kind: the other ranks wait to be told
        error = raised
    shards.compare(request, error)
    out, lse = flash_attn_combine(*(_of_all_ranks(shards.transport, x) for x in part))
    lse = converted(lse.transpose(1, 2).contiguous(), lse_convention)
    return (out, lse) if return_softmax_lse else out


def _lengths(cache_seqlens, q, capacity: int, shards: CpCache) -> Tensor:
    """int64 (batch,). The first rank has the most keys: what does not fit there fits nowhere, as on one GPU."""
    if isinstance(cache_seqlens, Tensor):
        arguments.check_lengths("cache_seqlens", cache_seqlens, q.shape[0], q.device)
        lengths = cache_seqlens.long()
        is_beyond = shards.local_lengths(lengths, 0) > capacity
        if not q.is_cpu:
            return lengths.masked_fill(is_beyond, -1)  # a padding request, without waiting for the GPU
        longest = lengths[is_beyond].tolist()
    else:
        length = arguments.integer("cache_seqlens", cache_seqlens, least=-1, expected="an int or an integer tensor")
        lengths = torch.full((q.shape[0],), length, dtype=torch.int64, device=q.device)
        longest = [length] if shards.local_lengths(length, 0) > capacity else []
    if longest:
        raise RuntimeError(
            f"cache_seqlens: expected lengths of which no rank has more than its {capacity} rows, got {longest[0]}"
        )
    return lengths


def _own_part(q, k_cache, v_cache, lengths, batch_idx, block_table, window, shards: CpCache, **options):
    """out (batch, seqlen_q, heads, d) and LSE (batch, seqlen_q, heads) over this rank's keys."""
    (left, right), (batch, seqlen_q) = window, q.shape[:2]
    shape, repeats = q.shape[:3], 1
    if seqlen_q > 1 and (left >= 0 or right >= 0):
        repeats = seqlen_q
        q = q.reshape(batch * seqlen_q, 1, *q.shape[2:])
        if block_table is not None:
            block_table = block_table.repeat_interleave(repeats, 0)
        else:
            batch_idx = torch.arange(batch, dtype=torch.int32, device=q.device) if batch_idx is None else batch_idx
            batch_idx = batch_idx.repeat_interleave(repeats, 0)
    positions = (lengths[:, None] + torch.arange(-repeats, 0, device=q.device)).flatten()
    lengths = lengths.repeat_interleave(repeats, 0)
    # keys [start, stop) of all ranks that a query sees
    stop = lengths if right < 0 else torch.minimum(lengths, positions + 1 + right).clamp(min=0)
    start = None
    if left >= 0:
        start = torch.minimum((positions - left).clamp(min=0), stop.clamp(min=0))
        start = shards.local_lengths(start).int()
    stop = torch.where(lengths < 0, lengths, shards.local_lengths(stop)).int()
    out, lse = flash_attn_with_kvcache(
        q, k_cache, v_cache, cache_seqlens=stop, cache_batch_idx=batch_idx, cache_leftpad=start,
        block_table=block_table, return_softmax_lse=True, **options,
    )  # fmt: skip
    return out.reshape(*shape, out.shape[-1]), lse.transpose(1, 2).reshape(shape)


def _of_all_ranks(transport, x: Tensor) -> Tensor:
    """(size, ...): x of every rank."""
    everyone = x.new_empty((transport.size, *x.shape))
    everyone[transport.rank] = x
    transport.connect(x.device)
    if x.numel():
        others = [rank for rank in range(transport.size) if rank != transport.rank]
        sends = [(rank, everyone[transport.rank]) for rank in others]
        transport.exchange(sends, [(rank, everyone[rank]) for rank in others]).wait()
    return everyone
