"""Plans and document bounds cached for each process group, for functions without a `plan` argument."""

from __future__ import annotations

import weakref
from collections.abc import MutableMapping, Sequence
from typing import Any, NamedTuple

import torch.distributed as dist
from torch import Tensor
from torch.utils.weak import WeakTensorKeyDictionary

from flash_attn.context_parallel.cp_plan import CpPlan
from flash_attn.context_parallel.exchange.consistency import checked_communicator, compare_on_all_ranks
from flash_attn.context_parallel.exchange.groups import Communicator, Group
from flash_attn.context_parallel.plan.layouts import Span

MOST_PLANS = 16  # of a group

Bounds = tuple[int, ...]


class BoundsOfTensors:
    """Document bounds found for tensors, until a tensor is freed or written to."""

    def __init__(self) -> None:
        self._found: MutableMapping[Tensor, tuple[int, Bounds]] = WeakTensorKeyDictionary()

    def get(self, x: Tensor) -> Bounds | None:
        version, bounds = self._found.get(x, (None, None))
        return bounds if bounds is not None and version == x._version else None

    def put(self, x: Tensor, bounds: Bounds) -> None:
        if not x.is_inference():  # which has no version
            self._found[x] = x._version, bounds


class GroupCache(NamedTuple):
    """The cache of a process group. plans: the oldest is dropped first, in the same order on all ranks.

    documents: bounds of all ranks' documents by a cu_seqlens_q of this rank, as the ranks told each other.
    """

    communicator: Communicator
    plans: dict[tuple[bool, str, Bounds], CpPlan]
    documents: BoundsOfTensors


_groups: weakref.WeakKeyDictionary[Group | None, GroupCache] = (
    weakref.WeakKeyDictionary()
)  # a ProcessGroup has no attributes


def cache_of(group: dist.ProcessGroup | None) -> GroupCache:
    if group is None and dist.is_available() and dist.is_initialized():
        group = dist.group.WORLD
    for known, found in _groups.items():
        if known is group:
            return found
    communicator = checked_communicator("flash_attn_cp_func", None, None, group)
    found = _groups[group] = GroupCache(communicator, {}, BoundsOfTensors())
    return found


def cached_plan(cache: GroupCache, is_packed: bool, division: str, documents: Bounds) -> CpPlan:
    """The cached plan or a new one, which all ranks compare."""
    key = is_packed, division, documents
    plan = cache.plans.get(key)
    if plan is None:
        group: Any = getattr(cache.communicator, "group", cache.communicator)
        layout = _spans(division, documents, cache.communicator.size)
        if is_packed:
            plan = CpPlan.varlen(documents, group=group, layout=layout)
        else:
            plan = CpPlan.dense(documents[-1], group=group, layout=layout)
        if len(cache.plans) >= MOST_PLANS:
            del cache.plans[next(iter(cache.plans))]
        cache.plans[key] = plan
    return plan


def _spans(division: str, documents: Bounds, ranks: int) -> Sequence[Sequence[Span]]:
    """For each rank its chunks of the documents or, for "stream", of all tokens."""
    bounds = (0, documents[-1]) if division == "stream" else documents
    count = 2 * ranks if division == "zigzag" else ranks
    spans = []
    for rank in range(ranks):
        chunks = (rank, count - 1 - rank) if division == "zigzag" else (rank,)
        sizes = [(first, (last - first) // count) for first, last in zip(bounds, bounds[1:])]
        spans.append([(first + i * size, first + (i + 1) * size) for first, size in sizes for i in chunks])
    return spans


def raise_on_all_ranks(cache: GroupCache, error: BaseException | None) -> None:
    if error is not None:  # the other ranks are about to compare a plan or a call
        compare_on_all_ranks(cache.communicator, "", error, "flash_attn_cp_func")
