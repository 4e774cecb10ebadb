"""Attention over a KV cache whose positions are divided among the ranks of a group."""

from __future__ import annotations

from typing import Any, TypeVar

import torch
from torch import Tensor

from flash_attn._docstrings import documented
from flash_attn._types import TensorOrTuple, WindowSize
from flash_attn.context_parallel.exchange.collectives import all_gather_tensors
from flash_attn.context_parallel.exchange.consistency import (
    Comparison,
    checked_communicator,
    raise_on_ranks_of_last_plan,
)
from flash_attn.context_parallel.exchange.groups import Group, Mesh, MeshCommunicator
from flash_attn.inference import flash_attn_combine, flash_attn_with_kvcache
from flash_attn.ops import arguments
from flash_attn.ops.lse import check_convention, converted

_Lengths = TypeVar("_Lengths", int, Tensor)


class CpCache:
    """Which positions of every sequence each rank keeps: `interleave` of them in turn, from rank 0 on.

    Position p is on rank p // interleave % size, in row p // (interleave * size) * interleave + p % interleave of the
    sequence's rows there. With an interleave of all rows of a rank its shard is contiguous. Made once by all ranks,
    used by all layers in the thread that made it.

    Attributes:
        rank, size: of the group.
        interleave: int.
    """

    def __init__(
        self, *, mesh: Mesh | None = None, group: Group | None = None, interleave: int = 1, check: str | None = None
    ):
        """Made by all ranks at once.

        Arguments:
            mesh: a DeviceMesh of one dimension.
            group: instead of mesh, a ProcessGroup or a rank of a LocalGroup. Default: all ranks of torch.distributed.
            interleave: int, at least 1, for instance the page size.
            check: equal on every rank. "calls" compares the arguments of every call across ranks (the default if the
                group has a CPU backend), "plan" those of the constructor and of the first call of each kind (the
                default otherwise: comparing waits for the GPU), "none" nothing.

        Raises RuntimeError or TypeError on every rank if one has bad or different arguments.
        """
        communicator = checked_communicator("CpCache", check, mesh, group)
        assert not isinstance(communicator, MeshCommunicator)  # which needs two dimensions
        self.transport = communicator
        self.rank, self.size = communicator.rank, communicator.size
        error = None
        try:
            self.interleave = arguments.integer("interleave", interleave, least=1)
        except Exception as raised:  # of any type: the other ranks wait for this one
            error = raised
        text = "" if error is not None else repr(interleave)
        self._comparison = Comparison(communicator, "CpCache", "shards", check, text, error)

    def local_lengths(self, lengths: _Lengths, rank: int | None = None) -> _Lengths:
        """int or Tensor, as lengths: how many of the first `lengths` positions this or another rank has. A negative
        length stays."""
        turn = self.interleave * self.size
        before = lengths // turn * self.interleave
        rest = lengths % turn - (self.rank if rank is None else rank) * self.interleave
        if isinstance(lengths, Tensor):
            return torch.where(lengths < 0, lengths, before + rest.clamp(0, self.interleave))
        return lengths if lengths < 0 else before + min(max(rest, 0), self.interleave)

    def rows(self, positions: Tensor) -> Tensor:
        """The row of each position among this rank's rows of a sequence, -1 if another rank has it."""
        is_own = positions // self.interleave % self.size == self.rank
        row = positions // (self.interleave * self.size) * self.interleave + positions % self.interleave
        return torch.where(is_own & (positions >= 0), row, -1)

    def compare(self, request: str, error: BaseException | None) -> None:
        self._comparison.call("flash_attn_cp_kvcache", request, error)


@documented()
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
    """Exact attention of the same queries on every rank over a KV cache that is divided among the ranks. No backward.

    Each rank computes with its keys and rounds its result to q's dtype. All ranks receive all results and combine them
    in float32, in the order of ranks: out and LSE have the same bits on every rank. New keys must be in the cache
    already, in the rows that `shards.rows` gives. ALiBi is not supported. seqlen_k is a length over all ranks.
    Arguments are equal on all ranks, but for those that are this rank's.

    Arguments:
        q: (batch, seqlen_q, nheads, head_dim), the same on every rank; float16 or bfloat16, on the CPU also float32 and
            float64. The last query is the last position. Several queries with a mask see different keys: then each
            query counts as a sequence, and K and V are read once for each.
        k_cache: (batch_cache, rows, nheads_k, head_dim), or (num_pages, page_size, nheads_k, head_dim) with
            block_table: this rank's rows, of q's dtype. Any strides with a contiguous last dimension.
        v_cache: like k_cache.
        cache_seqlens: int, or int32 or int64 (batch,): lengths over all ranks, -1 for an inactive request. A length
            that exceeds the rows of a rank, equal in number on all ranks, raises if it is on the host; on the GPU its
            request is inactive.
        cache_batch_idx: int32 (batch,). The row of this rank's k_cache of each sequence. Default: 0 .. batch - 1.
        block_table: int32 (batch, max_pages). The pages of each sequence on this rank.
        <scores>
        num_splits: int. The most splits of a sequence's keys on a rank; 1 for none, 0 chooses by the lengths.
        return_softmax_lse: bool. Also return the LSE.

    Keyword arguments:
        shards: a `CpCache`, which says which positions this rank keeps.
        sinks: (nheads,) float32 or half precision. A further logit, in natural-log units, in the softmax of every row,
            without a value.
        <lse_convention>

    Returns:
        out: (batch, seqlen_q, nheads, head_dim); with return_softmax_lse (out, softmax_lse).
        softmax_lse: (batch, nheads, seqlen_q) float32 (float64 for float64).

    Raises RuntimeError, TypeError or ValueError that names the argument, on every rank as far as `shards` checks calls.
    """
    if not isinstance(shards, CpCache):
        error = TypeError(f"shards: expected a CpCache, got {arguments.shown(shards)}")
        raise_on_ranks_of_last_plan("flash_attn_cp_kvcache", error)
    part: tuple[Tensor, ...] = ()
    request, error = "", None
    try:
        check_convention(lse_convention)
        arguments.check_tensors(("q", "k_cache", "v_cache"), (q, k_cache, v_cache))
        arguments.check_kvcache_ranks(q, k_cache, None, block_table)
        window = arguments.normal_window(arguments.flag("causal", causal), window_size)
        capacity = k_cache.shape[1] * (1 if block_table is None else block_table.shape[1])
        lengths = _lengths(cache_seqlens, q, capacity, shards)
        part = _own_part(
            q.detach(),
            k_cache,
            v_cache,
            lengths,
            cache_batch_idx,
            block_table,
            window,
            shards,
            softmax_scale=softmax_scale,
            softcap=softcap,
            num_splits=num_splits,
            sinks=sinks if shards.rank == 0 else None,
        )
        kinds = [tuple(x.shape[1:]) for x in part]
        request = repr((kinds, q.shape[0], q.dtype, q.device.type, window, capacity, softmax_scale, float(softcap)))
    except Exception as raised:  # of any type: the other ranks wait for this one
        error = raised
    shards.compare(request, error)
    shards.transport.connect(q.device)
    outs, lses = (all_gather_tensors(x, shards.transport) for x in part)
    out, lse = flash_attn_combine(outs, lses)
    lse = converted(lse.transpose(1, 2).contiguous(), lse_convention)
    return (out, lse) if return_softmax_lse else out


def _lengths(cache_seqlens: int | Tensor, q: Tensor, capacity: int, shards: CpCache) -> Tensor:
    """int64 (batch,). Rank 0 has the most keys of a sequence."""
    if isinstance(cache_seqlens, Tensor):
        arguments.check_lengths("cache_seqlens", cache_seqlens, q.shape[0], q.device)
        lengths = cache_seqlens.long()
        is_beyond = shards.local_lengths(lengths, 0) > capacity
        if not q.is_cpu:
            return lengths.masked_fill(is_beyond, -1)  # an inactive request, without waiting for the GPU
        too_long = lengths[is_beyond].tolist()
    else:
        length = arguments.integer("cache_seqlens", cache_seqlens, least=-1, expected="an int or an integer tensor")
        lengths = torch.full((q.shape[0],), length, dtype=torch.int64, device=q.device)
        too_long = [length] if shards.local_lengths(length, 0) > capacity else []
    if too_long:
        raise RuntimeError(
            f"cache_seqlens: expected lengths of which no rank has more than its {capacity} rows, got {too_long[0]}"
        )
    return lengths


def _own_part(
    q: Tensor,
    k_cache: Tensor,
    v_cache: Tensor,
    lengths: Tensor,
    batch_idx: Tensor | None,
    block_table: Tensor | None,
    window: tuple[int, int],
    shards: CpCache,
    **options: Any,
) -> tuple[Tensor, Tensor]:
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
    # each query sees the keys [start, stop) of all ranks
    stop = lengths if right < 0 else torch.minimum(lengths, positions + 1 + right).clamp(min=0)
    start = None
    if left >= 0:
        start = torch.minimum((positions - left).clamp(min=0), stop.clamp(min=0))
        start = shards.local_lengths(start).int()
    stop = torch.where(lengths < 0, lengths, shards.local_lengths(stop)).int()
    out, lse = flash_attn_with_kvcache(
        q,
        k_cache,
        v_cache,
        cache_seqlens=stop,
        cache_batch_idx=batch_idx,
        cache_leftpad=start,
        block_table=block_table,
        return_softmax_lse=True,
        **options,
    )
    return out.reshape(*shape, out.shape[-1]), lse.transpose(1, 2).reshape(shape)
