"""The plan of a decoding step: the schedule of `flash_attn_with_kvcache`, computed once for all layers."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from flash_attn._types import WindowSize
from flash_attn.batch_invariance import is_batch_invariant
from flash_attn.eight_bit import EIGHT_BIT, named
from flash_attn.limits import MAX_HEAD_DIM
from flash_attn.ops import arguments, calls, context, library
from flash_attn.ops.attention_args import KvCachePlanArgs

_SIZES = ("batch", "seqlen_q", "seqlen_new", "nheads", "nheads_k", "head_dim", "seqlen_cache")


class KvCachePlan:
    """The schedule of calls of the same sizes, lengths and mask, with the workspace that they need.

    A call of `flash_attn_with_kvcache` without a plan derives its schedule from the lengths each time. The layers of a
    model repeat the same step: build a plan once, `update` it whenever the lengths change, and pass it to the call of
    every layer. With a plan and `out` a call allocates its LSE and nothing else. Nothing here waits for the GPU;
    construction allocates, `update` does not and can be captured in a CUDA graph.

    A plan holds workspace: calls with one plan must follow each other on one stream. It must be up to date: a call
    whose lengths differ from those of the last update gives wrong results on the GPU (an error on the CPU).

    Arguments:
        cache_seqlens: int32 or int64 (batch,): keys of each sequence in the cache before the new ones, -1 for a padding
            request.
        seqlen_q: int. Queries of each sequence.
        nheads, nheads_k, head_dim: int. Of the queries and the cache.
        seqlen_cache: int. Keys that a sequence may have: k_cache.shape[1], or with pages
            block_table.shape[1] * k_cache.shape[1].
        seqlen_new: int. Rows of k and v of each sequence, 0 without them.
        causal: bool. The calls have a causal mask.
        window_size: (left, right) in keys, the calls' window; negative is unbounded.
        cache_leftpad: int32 (batch,). Rows that the calls skip at the start of each cached sequence.
        num_splits: int. The most splits of a sequence's keys, 1 for none; 0 chooses.
        batch_invariant: bool. Plan for calls whose rows do not depend on the batch.
        kv_cache_dtype: torch.dtype of the cache, where it is float8_e4m3fn or int8; None is that of the queries.
        sm_margin: int. Multiprocessors that the calls leave to other kernels; on CPU tensors no effect.
        head_dim_v: int. Head dim of qv and v_cache in calls with a qv; 0 for calls without one.

    Raises RuntimeError or TypeError that names the argument.
    """

    def __init__(
        self,
        cache_seqlens: Tensor,
        seqlen_q: int,
        nheads: int,
        nheads_k: int,
        head_dim: int,
        seqlen_cache: int,
        seqlen_new: int = 0,
        causal: bool = False,
        window_size: WindowSize = (-1, -1),
        cache_leftpad: Tensor | None = None,
        num_splits: int = 0,
        batch_invariant: bool = False,
        kv_cache_dtype: torch.dtype | None = None,
        sm_margin: int = 0,
        head_dim_v: int = 0,
    ) -> None:
        if torch.compiler.is_compiling():
            raise NotImplementedError("KvCachePlan: expected to be made outside of compiled code, got a call within")
        self._check_lengths(cache_seqlens, cache_leftpad)
        sizes = (cache_seqlens.numel(), seqlen_q, seqlen_new, nheads, nheads_k, head_dim, seqlen_cache)
        self._head_dim_v = arguments.integer("head_dim_v", head_dim_v, least=0)
        least = {"head_dim": 0 if self._head_dim_v else 1}
        self._sizes = tuple(
            arguments.integer(name, size, least=least.get(name, 0)) for name, size in zip(_SIZES, sizes)
        )
        self._check_heads(*self._sizes[3:5])
        for name, size in (("head_dim", self._sizes[5]), ("head_dim_v", self._head_dim_v)):
            if size > MAX_HEAD_DIM:
                raise RuntimeError(f"{name}: expected a head dim of at most {MAX_HEAD_DIM}, got {size}")
        self._window = arguments.normal_window(arguments.flag("causal", causal), window_size)
        self.num_splits = arguments.integer("num_splits", num_splits, least=0)
        self.batch_invariant = arguments.flag("batch_invariant", batch_invariant) or is_batch_invariant()
        if kv_cache_dtype is not None and not isinstance(kv_cache_dtype, torch.dtype):
            raise TypeError(f"kv_cache_dtype: expected None or a torch.dtype, got {arguments.shown(kv_cache_dtype)}")
        self._eight_bit = kv_cache_dtype in EIGHT_BIT
        self.sm_margin = arguments.sm_margin(sm_margin)
        args = self._args(cache_seqlens, cache_leftpad, None)
        context.reject_batched("KvCachePlan", args._fields, args)
        self.tensor: Tensor = calls.kvcache_plan(args)
        if context.is_tracing():  # what was computed so far is a constant to the trace
            self.update(cache_seqlens, cache_leftpad)

    def _args(self, cache_seqlens: Tensor, cache_leftpad: Tensor | None, plan: Tensor | None) -> KvCachePlanArgs:
        left, right = self._window
        sizes: Any = self._sizes  # mypy does not count them
        return KvCachePlanArgs(  # type: ignore[call-arg]
            cache_seqlens,
            cache_leftpad,
            plan,  # type: ignore[arg-type]  # None: a new one
            *sizes,
            right == 0,
            left,
            right,
            self.num_splits,
            self.batch_invariant,
            self._eight_bit,
            self.sm_margin,
            self._head_dim_v,
        )

    @staticmethod
    def _check_heads(nheads: int, nheads_k: int) -> None:
        if nheads % nheads_k != 0 if nheads_k > 0 else nheads != 0:
            raise RuntimeError(f"nheads: expected a multiple of nheads_k ({nheads_k}), got {nheads}")

    @staticmethod
    def _check_lengths(cache_seqlens: Tensor, cache_leftpad: Tensor | None) -> None:
        arguments.check_tensors(("cache_seqlens",), (cache_seqlens,))
        arguments.check_optional_tensors(("cache_leftpad",), (cache_leftpad,))

    def update(self, cache_seqlens: Tensor, cache_leftpad: Tensor | None = None) -> None:
        """Plan for other lengths, in place. Waits for nothing, and a CUDA graph can capture it.

        Arguments:
            cache_seqlens: int32 or int64 (batch,): keys of each sequence in the cache before the new ones.
            cache_leftpad: int32 (batch,): rows that the calls skip at the start of each cached sequence.
        """
        self._check_lengths(cache_seqlens, cache_leftpad)
        library.update_kvcache_plan(self._args(cache_seqlens, cache_leftpad, self.tensor))

    def check(
        self,
        q: Tensor,
        k_cache: Tensor,
        k: Tensor | None,
        block_table: Tensor | None,
        causal: bool,
        window_size: WindowSize,
        num_splits: int,
        batch_invariant: bool,
        sm_margin: int = 0,
        qv: Tensor | None = None,
    ) -> None:
        """Raise RuntimeError unless the plan is made for a call with these arguments."""
        seqlen_cache = k_cache.shape[1] if block_table is None else block_table.shape[1] * k_cache.shape[1]
        new = 0 if k is None else k.shape[1]
        sizes = (q.shape[0], q.shape[1], new, q.shape[2], k_cache.shape[2], q.shape[3], seqlen_cache)
        if sizes != self._sizes:
            name, made, asked = next(x for x in zip(_SIZES, self._sizes, sizes) if x[1] != x[2])
            raise RuntimeError(f"plan: expected one made for {name} {asked}, got one for {made}")
        head_dim_v = 0 if qv is None else arguments.head_dim("qv", qv)
        if head_dim_v != self._head_dim_v:
            raise RuntimeError(f"plan: expected one made for head_dim_v {head_dim_v}, got one for {self._head_dim_v}")
        if (k_cache.dtype in EIGHT_BIT) is not self._eight_bit:
            width = "8 bits" if self._eight_bit else "at least 16 bits"
            raise RuntimeError(
                f"plan: expected one made for kv_cache_dtype {named(k_cache.dtype)}, got one for {width}"
            )
        window = arguments.normal_window(causal, window_size)
        if window != self._window:
            raise RuntimeError(f"plan: expected one made for the window {window}, got one for {self._window}")
        if num_splits not in (0, self.num_splits):
            raise RuntimeError(f"plan: expected one made for num_splits {num_splits}, got one for {self.num_splits}")
        if sm_margin not in (0, self.sm_margin):
            raise RuntimeError(f"plan: expected one made for sm_margin {sm_margin}, got one for {self.sm_margin}")
        if batch_invariant and not self.batch_invariant:
            raise RuntimeError("plan: expected one made for batch_invariant True, got one for False")
