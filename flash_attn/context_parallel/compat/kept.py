"""What is kept for a process group whose users know no plans: the last plans, and bounds that tensors hold."""

from __future__ import annotations

import weakref
from typing import NamedTuple

import torch.distributed as dist
from torch import Tensor
from torch.utils.weak import WeakTensorKeyDictionary

from flash_attn.context_parallel.agreement import agreed_communicator, compare_on_all_ranks
from flash_attn.context_parallel.plan import CpPlan
from flash_attn.context_parallel.transport import GroupTransport

MOST_PLANS = 16  # of a group


class OfTensors:
    """Ints found for tensors, until these end or are written to."""

    def __init__(self):
        self._found = WeakTensorKeyDictionary()

    def get(self, x: Tensor) -> tuple[int, ...] | None:
        version, values = self._found.get(x, (None, None))
        return values if values is not None and version == x._version else None

    def put(self, x: Tensor, values: tuple[int, ...]) -> None:
        if not x.is_inference():  # which counts no versions
            self._found[x] = x._version, values


class Kept(NamedTuple):
    """What is kept for a process group; of plans the oldest goes first, in the same order on all ranks.

    documents: bounds of all ranks' documents by a cu_seqlens_q of this one's, as the ranks told each other.
    """

    transport: GroupTransport
    plans: dict[tuple, CpPlan]
    documents: OfTensors


_groups = weakref.WeakKeyDictionary()  # a ProcessGroup has no attributes


def kept_for(group) -> Kept:
    if group is None and dist.is_available() and dist.is_initialized():
        group = dist.group.WORLD
    for known, found in _groups.items():
        if known is group:
            return found
    found = _groups[group] = Kept(agreed_communicator("flash_attn_cp_func", None, None, group), {}, OfTensors())
    return found


def plan_of(found: Kept, is_packed: bool, division: str, documents) -> CpPlan:
    """The kept one or a new one, which all ranks compare."""
    key = is_packed, division, documents
    plan = found.plans.get(key)
    if plan is None:
        spans = spans_of(division, documents, found.transport.size)
        make, lengths = (CpPlan.varlen, documents) if is_packed else (CpPlan.dense, documents[-1])
        plan = make(lengths, group=getattr(found.transport, "group", found.transport), layout=spans)
        if len(found.plans) >= MOST_PLANS:
            del found.plans[next(iter(found.plans))]
        found.plans[key] = plan
    return plan


def spans_of(division: str, documents: tuple[int, ...], ranks: int):
    """For each rank its chunks of the documents or, of "stream", of all tokens."""
    bounds = (0, documents[-1]) if division == "stream" else documents
    count = 2 * ranks if division == "zigzag" else ranks
    spans = []
    for rank in range(ranks):
        chunks = (rank, count - 1 - rank) if division == "zigzag" else (rank,)
        sizes = [(first, (last - first) // count) for first, last in zip(bounds, bounds[1:])]
        spans.append([(first + i * size, first + (i + 1) * size) for first, size in sizes for i in chunks])
    return spans


def raise_on_all_ranks(found: Kept, error: BaseException | None) -> None:
    if error is not None:  # the others are about to compare a plan or a call
        compare_on_all_ranks(found.transport, "", error, "flash_attn_cp_func")
