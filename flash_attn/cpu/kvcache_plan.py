"""The plan of a step of decoding. On the CPU nothing is scheduled: a plan records its sizes, options and lengths."""

from __future__ import annotations

from typing import NamedTuple

import torch

from flash_attn.limits import MAX_HEAD_DIM

from . import checks
from .entry import entry_point
from .overlap import check_written
from .scores import is_unbounded


class PlanKey(NamedTuple):
    """The sizes and options that a plan is made for; a causal mask is the window (left, 0), -1 is unbounded."""

    batch: int
    seqlen_q: int
    seqlen_new: int
    heads: int
    heads_k: int
    head_dim: int
    seqlen_cache: int
    window_left: int
    window_right: int
    num_splits: int
    batch_invariant: bool
    head_dim_v: int

    @staticmethod
    def of(
        sizes: tuple[int, int, int, int, int, int, int],
        causal: bool,
        window: tuple[int, int],
        num_splits: int,
        batch_invariant: bool,
        head_dim_v: int,
    ) -> PlanKey:
        """Equal for equal plans: causal is part of the window, and what is unbounded is -1. sizes: the first seven."""
        left, right = (-1 if is_unbounded(side) else side for side in window)
        splits = min(num_splits, checks.MAX_INT)
        return PlanKey(*sizes, left, 0 if causal else right, splits, bool(batch_invariant), head_dim_v)

    @property
    def elements(self) -> int:
        """Size of the plan: the key, and length and left padding of every sequence."""
        return len(self) + 2 * self.batch


@entry_point
def kvcache_plan(
    seqlens_k: torch.Tensor | None,
    leftpad_k: torch.Tensor | None,
    batch: int,
    seqlen_q: int,
    seqlen_new: int,
    heads: int,
    heads_k: int,
    head_dim: int,
    seqlen_cache: int,
    causal: bool,
    window_left: int,
    window_right: int,
    num_splits: int,
    batch_invariant: bool,
    plan: torch.Tensor | None = None,
    *,
    head_dim_v: int = 0,
) -> torch.Tensor:
    """The plan for calls of `fwd_kvcache` with these sizes, options and lengths, whose arguments mean the same.

    seqlens_k None: every sequence has seqlen_cache keys. plan: None, or an earlier plan of the same sizes, which is
    overwritten. head_dim_v: that of the calls' qv, 0 for none. Returns int32 (n,), n a function of the sizes alone.
    Raises RuntimeError naming the argument.
    """
    sizes = {
        "batch": batch,
        "seqlen_q": seqlen_q,
        "seqlen_new": seqlen_new,
        "nheads": heads,
        "nheads_k": heads_k,
        "seqlen_cache": seqlen_cache,
    }
    for name, size in sizes.items():
        checks.require(0 <= size <= checks.MAX_INT, name, "a size in [0, 2^31)", size)
    least = 0 if head_dim_v else 1
    for name, dim, smallest in (("head_dim", head_dim, least), ("head_dim_v", head_dim_v, 0)):
        in_range = smallest <= dim <= MAX_HEAD_DIM
        checks.require(in_range, name, f"a value from {smallest} to {MAX_HEAD_DIM}", dim)
    divisible = heads % heads_k == 0 if heads_k > 0 else heads == 0
    checks.require(divisible, "nheads", f"a head count divisible by the K/V head count {heads_k}", heads)
    if heads_k > 0:
        checks.check_at_most("seqlen_q", seqlen_q * (heads // heads_k), "rows for each K/V head")
    of_key = batch, seqlen_q, seqlen_new, heads, heads_k, head_dim, seqlen_cache
    key = PlanKey.of(of_key, causal, (window_left, window_right), num_splits, batch_invariant, head_dim_v)
    checks.require(num_splits >= 0, "num_splits", "a value >= 0", num_splits)
    checks.check_lengths("cache_seqlens", seqlens_k, [batch])
    checks.check_lengths("cache_leftpad", leftpad_k, [batch])
    if plan is None:
        plan = torch.empty(key.elements, dtype=torch.int32, device="cpu")
    _check_size(plan, key)
    check_written({"plan": plan}, {"cache_seqlens": seqlens_k, "cache_leftpad": leftpad_k})
    header, lengths, leftpad = plan.split((len(key), batch, batch))
    header.copy_(plan.new_tensor(key))
    lengths.fill_(seqlen_cache) if seqlens_k is None else lengths.copy_(seqlens_k)
    leftpad.zero_() if leftpad_k is None else leftpad.copy_(leftpad_k)
    return plan


def check_plan(plan: torch.Tensor, key: PlanKey, lengths: list[int], leftpad_k: torch.Tensor | None) -> None:
    """Reject a plan of other sizes, options or lengths than those of the call."""
    _check_size(plan, key)
    header, planned_lengths, planned_leftpad = (x.tolist() for x in plan.split((len(key), key.batch, key.batch)))
    for name, planned, value in zip(key._fields, header, key):
        checks.require(planned == int(value), "plan", f"one made for {name} {int(value)}", f"one for {planned}")
    leftpad = [0] * key.batch if leftpad_k is None else leftpad_k.tolist()
    for name, planned, values in (
        ("cache_seqlens", planned_lengths, lengths),
        ("cache_leftpad", planned_leftpad, leftpad),
    ):
        checks.require(planned == values, "plan", f"one updated for {name} {values}", f"one for {planned}")


def _check_size(plan: torch.Tensor, key: PlanKey) -> None:
    checks.check_device("plan", plan)
    fits = plan.dtype == torch.int32 and plan.is_contiguous() and plan.numel() == key.elements
    expected = f"{key.elements} contiguous int32 elements (made for the same sizes)"
    checks.require(fits, "plan", expected, f"{plan.numel()} of {plan.dtype}".replace("torch.", ""))
