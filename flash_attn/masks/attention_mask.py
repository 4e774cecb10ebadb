"""AttentionMask: which keys each query sees, as data on the device."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Sequence
from typing import TYPE_CHECKING, Any, Optional

import torch
from torch import Tensor
from torch.utils import _pytree

from . import blocks, ranges
from .checks import INTEGERS, check_length, check_tensor, dtype_name, require
from .conjunction import conjunction
from .factors import INT_MAX, WHOLE, MaskFactors, pack_bits

if TYPE_CHECKING:
    from torch.nn.attention.flex_attention import BlockMask

# (batch, query heads, query, key), each a tensor of one index -> a bool tensor: whether the query sees the key.
MaskMod = Callable[[Tensor, Tensor, Tensor, Tensor], Tensor]


class AttentionMask:
    """Which keys each query sees. Constructors marked "complete" need no `causal=True` in the call. Causal and window
    of a call only hide more.

    Constructors do not wait for the GPU, unless they say so, and do not read values that lie on one: those outside of a
    sequence mean nothing, inverted ranges are empty. They keep what they are given where they need no copy. The tensors
    of `factors` may be changed in place, also between replays of a CUDA graph: calls read them when they run. A
    backward after such a change raises, as of any tensor that autograd saved.

    Leading axes: b_m is 1 or the batch size; h_m divides the number h of query heads, and head i has mask head
    i // (h / h_m). Packed masks are for variable-length functions; positions count from the first row of a sequence.

    seqlen_q, seqlen_k: int, where they are known (dense masks).
    """

    def __init__(self, factors: MaskFactors, seqlen_q: int | None = None, seqlen_k: int | None = None) -> None:
        if not isinstance(factors, MaskFactors):
            raise TypeError(f"factors: expected MaskFactors, got {type(factors).__name__}")
        require(len(factors.tensors()) > 0, "factors", "at least one tensor", "none")
        self._factors, self.seqlen_q, self.seqlen_k = factors, seqlen_q, seqlen_k
        # Of documents: int32 (b_m, n + 1), rising from 0 to seqlen_q at most, whose ranges the factors are.
        self._documents: Tensor | None = None

    # ---- ranges of keys for each query ----

    @staticmethod
    def query_ranges(
        lo: Tensor, hi: Tensor, lo2: Tensor | None = None, hi2: Tensor | None = None, *, packed: bool = False
    ) -> AttentionMask:
        """Query i sees keys j with lo <= j < hi or lo2 <= j < hi2.

        lo, hi, lo2, hi2: integers (sq,), (b_m, sq) or (b_m, h_m, sq); packed: (total_q,) or (h_m, total_q).
        """
        require((lo2 is None) == (hi2 is None), "hi2", "a second range of lo2 and hi2", "one of both")
        axes = ("total_q", "h_m, total_q") if packed else ("sq", "b_m, sq", "b_m, h_m, sq")
        bounds = {"lo": lo, "hi": hi} if lo2 is None or hi2 is None else {"lo": lo, "hi": hi, "lo2": lo2, "hi2": hi2}
        for name, x in bounds.items():
            check_tensor(name, x, INTEGERS, axes)
            require(x.shape == lo.shape, name, f"the shape of lo {list(lo.shape)}", list(x.shape))
        factor = _with_heads(ranges.stacked(*bounds.values()), packed)
        return AttentionMask(MaskFactors(query_ranges=factor), None if packed else factor.shape[2])

    @staticmethod
    def documents(cu_seqlens: Tensor, seqlen: int) -> AttentionMask:
        """Tokens see the tokens of their document; with `causal=True` of the call, those up to their own.

        cu_seqlens: integers (n + 1,) or (b_m, n + 1): document i is tokens cu_seqlens[i] to cu_seqlens[i + 1] of the
            row. Tokens of no document see nothing. seqlen: int, tokens of a row.
        """
        check_tensor("cu_seqlens", cu_seqlens, INTEGERS, ("n + 1", "b_m, n + 1"))
        require(cu_seqlens.shape[-1] > 0, "cu_seqlens", "shape [n + 1] or [b_m, n + 1]", list(cu_seqlens.shape))
        seqlen = check_length("seqlen", seqlen)
        cu = cu_seqlens.long().clamp(0, seqlen).cummax(-1).values
        mask = AttentionMask.query_ranges(*ranges.document_bounds(cu, seqlen))._with_keys(seqlen)
        mask._documents = ranges.as_int32(torch.atleast_2d(cu)).contiguous()
        return mask

    @staticmethod
    def document_ids(ids: Tensor) -> AttentionMask:
        """Tokens see the neighbours that have their id: a document is a run of equal ids.

        ids: integers (s,) or (b_m, s).
        """
        check_tensor("ids", ids, INTEGERS, ("s", "b_m, s"))
        return AttentionMask.query_ranges(*ranges.run_bounds(ids))._with_keys(ids.shape[-1])

    @staticmethod
    def prefix_lm(
        prefix: Tensor,
        seqlen_q: int,
        seqlen_k: int | None = None,
        *,
        cu_seqlens_q: Tensor | None = None,
        cu_seqlens_k: Tensor | None = None,
    ) -> AttentionMask:
        """Causal, but all queries see the first `prefix` keys. Complete: the call has no `causal=True`.

        prefix: integers (), or (b,). seqlen_q, seqlen_k: ints; seqlen_k is seqlen_q by default. Packed where
        cu_seqlens_q (b + 1,) is given: seqlen_q is total_q, cu_seqlens_k is cu_seqlens_q by default.
        """
        check_tensor("prefix", prefix, INTEGERS, ("", "b"))
        seqlen_q = check_length("seqlen_q", seqlen_q)
        if cu_seqlens_q is not None:
            diagonal, rows = _packed_diagonal("qk", cu_seqlens_q, cu_seqlens_k, seqlen_q)
            if prefix.dim() > 0:
                sequences = cu_seqlens_q.shape[0] - 1
                require(prefix.shape[0] == sequences, "prefix", f"shape [{sequences}]", list(prefix.shape))
                prefix = torch.nn.functional.pad(prefix, (0, 1))[rows.index]  # 0 where there are no sequences
            end = torch.maximum(prefix.long(), diagonal + 1)
            return AttentionMask.query_ranges(torch.zeros_like(end), end, packed=True)
        seqlen_k = seqlen_q if seqlen_k is None else check_length("seqlen_k", seqlen_k)
        diagonal = torch.arange(seqlen_q, device=prefix.device) + (seqlen_k - seqlen_q)
        end = torch.maximum(prefix.long()[..., None], diagonal + 1)
        return AttentionMask.query_ranges(torch.zeros_like(end), end)._with_keys(seqlen_k)

    @staticmethod
    def from_ranges(
        q_ranges: Tensor | Sequence[Sequence[int]],
        k_ranges: Tensor | Sequence[Sequence[int]],
        attn_type_map: Tensor | Sequence[int],
        seqlen_q: int | None = None,
        seqlen_k: int | None = None,
        device: torch.device | str | None = None,
    ) -> AttentionMask:
        """Slices of the scores, as MagiAttention has them: queries of q_ranges[i] see keys of k_ranges[i].

        q_ranges, k_ranges: integers (n, 2), or lists of pairs. attn_type_map: integers (n,): 0 full, 1 causal (aligned
        at the slice's bottom right), 2 inverse causal (at its top left), 3 both. seqlen_q, seqlen_k: ints, by default
        the largest ends. device: of the mask, by default that of q_ranges.

        The ranges of a query are united; one that needs more than two is an error. So tensors on a GPU are waited for.
        """
        device = q_ranges.device if device is None and isinstance(q_ranges, Tensor) else device
        given = {"q_ranges": q_ranges, "k_ranges": k_ranges, "attn_type_map": attn_type_map}
        q_ranges, k_ranges, types = (_on_host(name, x) for name, x in given.items())
        n = types.numel()
        for name, x in (("q_ranges", q_ranges), ("k_ranges", k_ranges)):
            require(list(x.shape) == [n, 2] or x.numel() == n == 0, name, f"shape [{n}, 2]", list(x.shape))
        require(bool(((types >= 0) & (types <= 3)).all()), "attn_type_map", "values from 0 to 3", types.tolist())
        q_ranges, k_ranges = (x.view(n, 2).clamp(0, INT_MAX) for x in (q_ranges, k_ranges))
        ends = [int(x[:, 1].max()) if n else 0 for x in (q_ranges, k_ranges)]
        seqlen_q = ends[0] if seqlen_q is None else check_length("seqlen_q", seqlen_q)
        seqlen_k = ends[1] if seqlen_k is None else check_length("seqlen_k", seqlen_k)
        require(seqlen_q >= ends[0], "seqlen_q", f"at least the largest end of q_ranges, {ends[0]}", seqlen_q)
        factor = ranges.merged_slices(*ranges.slice_rows(q_ranges, k_ranges, types), seqlen_q)
        return AttentionMask(MaskFactors(query_ranges=factor[None, None].to(device)), seqlen_q, seqlen_k)

    # ---- ranges of queries for each key ----

    @staticmethod
    def key_padding(keep: Tensor) -> AttentionMask:
        """No query sees a key of padding. keep: bool or integer (sk,) or (b_m, sk), not 0 where the key is one."""
        check_tensor("keep", keep, (torch.bool, *INTEGERS), ("sk", "b_m, sk"))
        return AttentionMask._of_keys(keep.bool())

    @staticmethod
    def _of_keys(keep: Tensor) -> AttentionMask:
        hidden_until = torch.where(keep, 0, INT_MAX)
        factor = _with_heads(ranges.stacked(torch.zeros_like(hidden_until), hidden_until), packed=False)
        return AttentionMask(MaskFactors(key_hidden=factor), None, factor.shape[2])

    @staticmethod
    def prefix_tree(
        tin: Tensor, tout: Tensor, causal: bool = True, *, cu_seqlens: Tensor | None = None
    ) -> AttentionMask:
        """Tokens of a tree of sequences, in depth-first order, see their node and its ancestors: key k is seen by the
        queries q with tin[k] <= tin[q] < tout[k], and with `causal` (then complete) by none before it.

        tin, tout: integers (s,) or (b_m, s): when the traversal enters and leaves the node of the token. tin must not
        decrease along a sequence; on a GPU that is not checked. Packed where cu_seqlens (b + 1,) is given: (total,),
        values beyond 32 bits count as the nearest ones.
        """
        axes = ("s", "b_m, s") if cu_seqlens is None else ("total",)
        for name, x in (("tin", tin), ("tout", tout)):
            check_tensor(name, x, INTEGERS, axes)
            require(x.shape == tin.shape, name, f"the shape of tin {list(tin.shape)}", list(x.shape))
        size = tin.shape[-1]
        rows = None
        if cu_seqlens is not None:
            rows = ranges.PackedRows(ranges.sequence_bounds("cu_seqlens", cu_seqlens), size)
        if rows is not None:
            tin = tin.where(rows.inside, 0)
        if tin.device.type == "cpu" and type(tin) is Tensor and not torch.compiler.is_compiling():  # not a fake
            falls = tin[..., 1:] < tin[..., :-1]
            if rows is not None:
                falls = falls & (rows.segment[1:] == rows.segment[:-1])
            require(not falls.any(), "tin", "depth-first order (values that do not decrease)", "smaller ones later")
        begin, end = ranges.tree_queries(tin, tout, rows)
        if causal:
            position = torch.arange(size, device=tin.device) if rows is None else rows.position
            begin = torch.maximum(begin, position)
        zero, largest = torch.zeros_like(begin), torch.full_like(begin, INT_MAX)
        factor = _with_heads(ranges.stacked(zero, begin, end, largest), packed=rows is not None)
        lengths = (size, size) if rows is None else (None, None)
        return AttentionMask(MaskFactors(key_hidden=factor), *lengths)

    @staticmethod
    def from_startend_row_indices(
        startend_row_indices: Tensor,
        causal: bool,
        seqlen_q: int | None = None,
        *,
        cu_seqlens_q: Tensor | None = None,
        cu_seqlens_k: Tensor | None = None,
    ) -> AttentionMask:
        """Rows from which each key is hidden, as FlashMask has them. Complete.

        startend_row_indices: integers (b_m, h_m, sk, n), or packed (h_m, total_k, n). With `causal` key j is hidden
        from the queries before it and, n = 1, from LTS on; n = 2, from [LTS, LTE). Without, n = 2: from LTS on and
        before UTE; n = 4: from [LTS, LTE) and [UTS, UTE).
        seqlen_q: int, sk by default: with `causal` the last query is at the last key. Packed masks with `causal` need
        cu_seqlens_k (b + 1,); cu_seqlens_q is cu_seqlens_k by default.
        """
        t = startend_row_indices
        check_tensor("startend_row_indices", t, INTEGERS, ("b_m, h_m, sk, n", "h_m, total_k, n"))
        sizes, packed = ((1, 2) if causal else (2, 4)), t.dim() == 3
        seqlen_q = None if seqlen_q is None else check_length("seqlen_q", seqlen_q)
        expected = f"{sizes[0]} or {sizes[1]} values for each key with causal={bool(causal)}"
        require(t.shape[-1] in sizes, "startend_row_indices", expected, f"shape {list(t.shape)}")
        bounds = list(t.unbind(-1))
        zero, largest = torch.zeros_like(bounds[0]), torch.full_like(bounds[0].long(), INT_MAX)
        if causal:
            bounds = [*bounds, largest][:2]
            if packed:
                given = cu_seqlens_k is not None
                require(given, "cu_seqlens_k", "the cumulative lengths of a packed mask with causal", None)
                assert cu_seqlens_k is not None
                diagonal = _packed_diagonal("kq", cu_seqlens_k, cu_seqlens_q, t.shape[1])[0]
            else:
                sk = t.shape[2]
                diagonal = torch.arange(sk, device=t.device) + ((sk if seqlen_q is None else seqlen_q) - sk)
            bounds += [zero, diagonal]
        elif len(bounds) == 2:
            bounds = [bounds[0], largest, zero, bounds[1]]
        lengths = (None, None) if packed else (seqlen_q, t.shape[2])
        return AttentionMask(MaskFactors(key_hidden=ranges.stacked(*bounds)), *lengths)

    # ---- blocks ----

    @staticmethod
    def from_block_lists(
        cnt: Tensor,
        idx: Tensor,
        full_cnt: Tensor | None = None,
        full_idx: Tensor | None = None,
        block_size: tuple[int, int] = (128, 128),
        *,
        seqlen_q: int,
        seqlen_k: int,
    ) -> AttentionMask:
        """Blocks of scores that take part: of query block i the key blocks idx[..., i, :cnt[..., i]], in any order.

        cnt: integers (b_m, h_m, nq); idx: integers (b_m, h_m, nq, most). full_cnt, full_idx: a second list, of the same
        meaning here. Blocks that are listed twice, or in both, take part once; indices of no block mean nothing.
        block_size: queries and keys of a block; on CUDA multiples of 64. seqlen_q, seqlen_k: ints.
        """
        nq, nk = _num_blocks(block_size, seqlen_q, seqlen_k)
        lists = [("cnt", cnt, "idx", idx)]
        require((full_cnt is None) == (full_idx is None), "full_idx", "full_cnt and full_idx", "one of both")
        if full_cnt is not None and full_idx is not None:
            lists.append(("full_cnt", full_cnt, "full_idx", full_idx))
        for cnt_name, count, idx_name, indices in lists:
            check_tensor(cnt_name, count, INTEGERS, ("b_m, h_m, nq",))
            check_tensor(idx_name, indices, INTEGERS, ("b_m, h_m, nq, most",))
            shape = [*cnt.shape[:2], nq]
            require(list(count.shape) == shape, cnt_name, f"shape {shape}", list(count.shape))
            require(list(indices.shape[:-1]) == shape, idx_name, f"shape {[*shape, 'most']}", list(indices.shape))
        kinds = blocks.block_map([(WHOLE, count, indices) for _, count, _, indices in lists], nk)
        return AttentionMask(
            MaskFactors(block_map=kinds, block_size=(block_size[0], block_size[1])), seqlen_q, seqlen_k
        )

    @staticmethod
    def from_block_mask(block_mask: BlockMask) -> AttentionMask:
        """A BlockMask of torch.nn.attention.flex_attention. Its mask_mod is evaluated by torch once, in partial blocks,
        which are known after a wait for the GPU; with a noop_mask nothing is evaluated.
        """
        from torch.nn.attention import flex_attention

        noop_mask = getattr(flex_attention, "noop_mask", None)  # torch 2.5 has none
        sq, sk = getattr(block_mask, "seq_lengths", block_mask.shape[-2:])
        (block_q, block_k), mask_mod = block_mask.BLOCK_SIZE, block_mask.mask_mod
        block_size = (block_q, block_k)
        lists = [(blocks.PARTIAL, block_mask.kv_num_blocks, block_mask.kv_indices)]
        if block_mask.full_kv_num_blocks is not None and block_mask.full_kv_indices is not None:
            lists.append((WHOLE, block_mask.full_kv_num_blocks, block_mask.full_kv_indices))
        kinds = blocks.block_map(lists, _num_blocks(block_size, sq, sk)[1])
        bits = None
        if getattr(mask_mod, "fn", mask_mod) is not noop_mask:
            bits = blocks.partial_block_bits(mask_mod, kinds, block_size, sq, sk)
        return AttentionMask(MaskFactors(bits=bits, block_map=kinds, block_size=block_size), sq, sk)

    # ---- bits ----

    @staticmethod
    def from_function(
        mask_mod: MaskMod,
        b: int | None,
        h: int | None,
        seqlen_q: int,
        seqlen_k: int,
        device: torch.device | str | None = None,
    ) -> AttentionMask:
        """mask_mod(b, h, q_idx, kv_idx), tensors of one index each, is True where the query sees the key: a mask_mod of
        FlexAttention. It is evaluated once for all scores, by torch, in strips of rows.

        b, h: ints, sizes of the mask, None for 1. seqlen_q, seqlen_k: ints. device: by default torch's.
        """
        b, h, seqlen_q, seqlen_k = (
            check_length(name, 1 if value is None else value)
            for name, value in (("b", b), ("h", h), ("seqlen_q", seqlen_q), ("seqlen_k", seqlen_k))
        )
        bits = blocks.function_bits(mask_mod, b, h, seqlen_q, seqlen_k, device)
        return AttentionMask(MaskFactors(bits=bits), seqlen_q, seqlen_k)

    @staticmethod
    def from_tensor(mask: Tensor, seqlen_q: int | None = None, *, packed: bool = False) -> AttentionMask:
        """True where the query sees the key. Axes that broadcast, of size 1 or stride 0, cost no memory.

        mask: bool, broadcastable to (b, h, sq, sk), or packed (h_m, total_q, max_seqlen_k). seqlen_q: int, needed only
        where the mask has one row and one column. A float mask of 0 and -inf is an `attn_bias`, not a mask.
        """
        if packed:
            check_tensor("mask", mask, (torch.bool,), ("h_m, total_q, max_seqlen_k",))
            return AttentionMask(MaskFactors(bits=pack_bits(mask)))
        check_tensor("mask", mask, (torch.bool,), ("sk", "sq, sk", "h, sq, sk", "b, h, sq, sk"))
        mask = mask[(None,) * (4 - mask.dim())]
        for axis in (0, 1):
            mask = mask.narrow(axis, 0, 1) if _is_broadcast(mask, axis) else mask
        _, _, sq, sk = mask.shape
        if _is_broadcast(mask, 2) and not (_is_broadcast(mask, 3) and sk == 1):
            return AttentionMask._of_keys(mask[:, :, 0])._with_queries(seqlen_q if sq == 1 else sq)
        if _is_broadcast(mask, 3):
            rows = mask[:, :, :, 0]
            if sq == 1:
                rows = rows.expand(*rows.shape[:2], check_length("seqlen_q", seqlen_q))
            end = torch.where(rows, INT_MAX, 0)
            return AttentionMask.query_ranges(torch.zeros_like(end), end)._with_keys(None if sk == 1 else sk)
        return AttentionMask(MaskFactors(bits=pack_bits(mask)), sq, sk)

    # ---- use ----

    @property
    def factors(self) -> MaskFactors:
        """The normal form. Its reader may change its tensors: a mask of documents is one of ranges from then on."""
        self._documents = None
        return self._factors

    def _with_keys(self, seqlen_k: int | None) -> AttentionMask:
        self.seqlen_k = seqlen_k
        return self

    def _with_queries(self, seqlen_q: int | None) -> AttentionMask:
        self.seqlen_q = seqlen_q
        return self

    def __and__(self, other: AttentionMask) -> AttentionMask:
        """What both masks leave visible. Two masks of two ranges a query, and others that the normal form cannot hold
        together, become bits: dense masks of known lengths only.
        """
        if not isinstance(other, AttentionMask):
            return NotImplemented
        require(self.is_packed == other.is_packed, "mask", "two dense or two packed masks", "one of each")
        lengths = {}
        for name in ("seqlen_q", "seqlen_k"):
            mine, theirs = getattr(self, name), getattr(other, name)
            require(None in (mine, theirs) or mine == theirs, "mask", f"one {name} of both masks", f"{mine}, {theirs}")
            lengths[name] = theirs if mine is None else mine
        return AttentionMask(conjunction(self._own_factors(), other._own_factors(), **lengths), **lengths)

    def _own_factors(self) -> MaskFactors:
        """Factors that another mask may hold. Its readers may change them, so a mask of documents gives copies."""
        if self._documents is None:
            return self._factors
        return self._factors.with_tensors({name: x.clone() for name, x in self._factors.tensors().items()})

    @property
    def is_packed(self) -> bool:
        return self._factors.is_packed

    @property
    def shape(self) -> tuple[int | None, ...]:
        """The shape of `to_dense()`, None where it is not known: callers tell it from a token mask by it."""
        require(not self.is_packed, "mask", "a dense mask", "a packed one")
        tensors = self._factors.tensors().values()
        return (
            max(x.shape[0] for x in tensors),
            math.lcm(*(x.shape[1] for x in tensors)),
            self.seqlen_q,
            self.seqlen_k,
        )

    @property
    def ndim(self) -> int:
        return len(self.shape)

    @property
    def device(self) -> torch.device:
        return next(iter(self._factors.tensors().values())).device

    @property
    def state(self) -> tuple[tuple[int, int], ...]:
        """Addresses and versions of the factors: equal only while nothing has changed them. Key of plans."""
        return tuple((x.data_ptr(), x._version) for x in self._factors.tensors().values())

    def to(self, device: torch.device | str) -> AttentionMask:
        """The mask on a device; itself where it is there."""
        tensors = self._factors.tensors()
        moved = {name: x.to(device) for name, x in tensors.items()}
        if all(moved[name] is x for name, x in tensors.items()):
            return self
        mask = AttentionMask(self._factors.with_tensors(moved), self.seqlen_q, self.seqlen_k)
        mask._documents = None if self._documents is None else self._documents.to(device)
        return mask

    def sequence(self, q0: int, q1: int, k0: int, k1: int) -> AttentionMask:
        """The dense mask (b_m = 1) of one sequence of a packed one: query rows [q0, q1) and key rows [k0, k1)."""
        require(self.is_packed, "mask", "a packed mask", "a dense one")
        return AttentionMask(self._factors.sequence(q0, q1, k0, k1), q1 - q0, k1 - k0)

    def to_dense(self, seqlen_q: int | None = None, seqlen_k: int | None = None) -> Tensor:
        """Bool (b_m, h_m, seqlen_q, seqlen_k): True where the query sees the key. For tests and small problems."""
        require(not self.is_packed, "mask", "a dense mask; see `sequence`", "a packed one")
        sq = check_length("seqlen_q", self.seqlen_q if seqlen_q is None else seqlen_q)
        sk = check_length("seqlen_k", self.seqlen_k if seqlen_k is None else seqlen_k)
        batch, heads, *_ = self.shape
        assert batch is not None and heads is not None
        seen = self._factors.visible(slice(0, batch), slice(0, heads), slice(0, sq), slice(0, sk), heads)
        assert seen is not None  # some factor hides
        return seen

    def __repr__(self) -> str:
        parts = [f"{name}={list(x.shape)}" for name, x in self._factors.tensors().items()]
        if self._factors.block_map is not None:
            parts.append(f"block_size={self._factors.block_size}")
        return f"AttentionMask({', '.join(parts)}, device={str(self.device)!r})"


def _with_heads(x: Tensor, packed: bool) -> Tensor:
    """(..., rows, n) with the axes of batch and heads before them, those of batch first."""
    if packed:
        return x if x.dim() == 3 else x[None]
    return (x[None, None], x[:, None], x)[x.dim() - 2].contiguous()


def _on_host(name: str, x: object) -> Tensor:
    """Integers as int64 on the CPU; an empty list has no dtype."""
    values = torch.as_tensor(x, device="cpu")
    integral = values.dtype in (torch.bool, *INTEGERS) or values.numel() == 0
    require(integral, name, "an integer dtype", dtype_name(values.dtype))
    return values.long()


def _packed_diagonal(
    names: str, cu_seqlens: Tensor, cu_seqlens_other: Tensor | None, total: int
) -> tuple[Tensor, ranges.PackedRows]:
    """Of each of `total` packed rows, the position in the other lengths that is at the same distance from the end.

    names: "qk" or "kq", whose lengths are the first and the other ones.
    """
    own, other = (f"cu_seqlens_{name}" for name in names)
    rows = ranges.PackedRows(ranges.sequence_bounds(own, cu_seqlens), total)
    if cu_seqlens_other is None:
        return rows.position, rows
    cu = ranges.sequence_bounds(other, cu_seqlens_other)
    require(cu.shape == rows.cu.shape, other, f"the shape of {own} {list(rows.cu.shape)}", list(cu.shape))
    return rows.position + (cu[rows.index + 1] - cu[rows.index]) - rows.length, rows


def _num_blocks(block_size: Sequence[int], seqlen_q: int, seqlen_k: int) -> tuple[int, int]:
    pair = isinstance(block_size, (tuple, list)) and [isinstance(x, int) and x > 0 for x in block_size] == [True, True]
    require(pair, "block_size", "two positive ints (queries, keys)", block_size)
    block_q, block_k = block_size
    return -(-check_length("seqlen_q", seqlen_q) // block_q), -(-check_length("seqlen_k", seqlen_k) // block_k)


def _is_broadcast(x: Tensor, axis: int) -> bool:
    return x.shape[axis] == 1 or (x.stride(axis) == 0 and x.shape[axis] > 1)


_DOCUMENTS = "documents"  # name of that leaf
# names of the leaves, block_size, seqlen_q, seqlen_k
_Context = tuple[tuple[str, ...], tuple[int, int], Optional[int], Optional[int]]


def _flatten(mask: AttentionMask) -> tuple[list[Tensor], _Context]:
    tensors = mask._factors.tensors()
    if mask._documents is not None:
        tensors = {**tensors, _DOCUMENTS: mask._documents}
    return list(tensors.values()), (tuple(tensors), mask._factors.block_size, mask.seqlen_q, mask.seqlen_k)


def _flatten_with_keys(mask: AttentionMask) -> tuple[list[tuple[_pytree.KeyEntry, Any]], _Context]:
    tensors, context = _flatten(mask)
    return [(_pytree.MappingKey(name), x) for name, x in zip(context[0], tensors)], context


def _unflatten(tensors: Iterable[Tensor], context: _Context) -> AttentionMask:
    names, block_size, seqlen_q, seqlen_k = context
    mask, leaves = object.__new__(AttentionMask), dict(zip(names, tensors))  # torch passes placeholders of tensors too
    mask._documents = leaves.pop(_DOCUMENTS, None)
    mask._factors = MaskFactors(**leaves, block_size=block_size)
    mask.seqlen_q, mask.seqlen_k = seqlen_q, seqlen_k
    return mask


_pytree.register_pytree_node(
    AttentionMask,
    _flatten,
    _unflatten,
    serialized_type_name="flash_attn.masks.AttentionMask",
    flatten_with_keys_fn=_flatten_with_keys,  # of torch.export
)
