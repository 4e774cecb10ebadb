"""Outputs must not overlap: a call writes no element twice, and no element that it reads.

Address ranges do not tell: those of dq, dk and dv in one packed buffer interleave. Two indices with one address are
looked for instead, as csrc/flash_attn/api/strides.h does.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import NamedTuple

import torch

from .checks import require

_MAX_STEPS = 10000


class _Term(NamedTuple):
    """The multiples low .. high of a stride."""

    stride: int
    low: int
    high: int


def check_written(written: Mapping[str, torch.Tensor | None], read: Mapping[str, torch.Tensor | None]) -> None:
    """Reject tensors, by name, of which two elements share memory, or that share memory with another one of the call.

    The values are tensors or None. Costs nothing where nothing is given to write to.
    """
    targets = {name: tensor for name, tensor in written.items() if tensor is not None}
    before = {name: tensor for name, tensor in read.items() if tensor is not None} if targets else {}
    for name, tensor in targets.items():
        got = f"shape {list(tensor.shape)} with strides {list(tensor.stride())}"
        require(not overlaps_itself(tensor), name, "elements that do not overlap each other", got)
        for other_name, other in before.items():
            apart = not share_elements(tensor, other)
            require(apart, name, f"memory that does not overlap {other_name}", "elements of both")
        before[name] = tensor


def same_view(a: torch.Tensor, b: torch.Tensor) -> bool:
    """Whether two tensors are the same elements in the same order."""
    return a.data_ptr() == b.data_ptr() and a.shape == b.shape and a.stride() == b.stride()


def share_elements(a: torch.Tensor, b: torch.Tensor) -> bool:
    """Whether some element of one strided tensor shares memory with one of the other."""
    if a.numel() == 0 or b.numel() == 0 or a.data_ptr() >= _end(b) or b.data_ptr() >= _end(a):
        return False
    terms = [_Term(stride, 0, last) for stride, last in _axes(a)] + [
        _Term(stride, -last, 0) for stride, last in _axes(b)
    ]
    terms.append(_Term(1, 1 - b.element_size(), a.element_size() - 1))
    return _reaches(terms, b.data_ptr() - a.data_ptr())


def overlaps_itself(x: torch.Tensor) -> bool:
    """Whether two indices of a strided tensor share memory.

    The first axis in which they differ goes forward, in those before it they cancel out.
    """
    if x.numel() == 0 or x.is_contiguous():
        return False
    axes = [(stride, size - 1) for stride, size in zip(_byte_strides(x), x.shape) if size > 1]
    size = x.element_size()
    for i, (stride, last) in enumerate(axes):
        if stride == 0:
            return True
        rest = [_Term(other, -most, most) for other, most in axes[i + 1 :] if other > 0]
        if _reaches([_Term(stride, 1, last), *rest, _Term(1, 1 - size, size - 1)], 0):
            return True
    return False


def _byte_strides(x: torch.Tensor) -> list[int]:
    return [stride * x.element_size() for stride in x.stride()]


def _axes(x: torch.Tensor) -> list[tuple[int, int]]:
    """(stride in bytes, largest index) of the axes that move the address."""
    return [(stride, size - 1) for stride, size in zip(_byte_strides(x), x.shape) if size > 1 and stride > 0]


def _end(x: torch.Tensor) -> int:
    return x.data_ptr() + x.element_size() + sum(stride * last for stride, last in _axes(x))


def _reaches(terms: list[_Term], target: int) -> bool:
    """Whether multiples of the strides add up to target.

    Strides that nest leave one or two multiples of each to try. Of others nothing is known after _MAX_STEPS: False.
    """
    ranges: dict[int, tuple[int, int]] = {}  # by stride: multiples of one stride add up
    for stride, low, high in terms:
        least, most = ranges.get(stride, (0, 0))
        ranges[stride] = (least + low, most + high)
    terms = [_Term(stride, *ranges[stride]) for stride in sorted(ranges, reverse=True)]
    rests = [(0, 0)]
    for stride, low, high in reversed(terms):
        rests.append((rests[-1][0] + stride * low, rests[-1][1] + stride * high))
    rests = rests[-2::-1]  # of each term the least and the largest sum of those after it
    steps = 0
    open_targets = [(0, target)]
    while open_targets:
        i, target = open_targets.pop()
        if i == len(terms):
            if target == 0:
                return True
            continue
        (stride, low, high), (rest_low, rest_high) = terms[i], rests[i]
        for multiple in range(
            max(low, -((rest_high - target) // stride)), min(high, (target - rest_low) // stride) + 1
        ):
            steps += 1
            if steps > _MAX_STEPS:
                return False
            open_targets.append((i + 1, target - multiple * stride))
    return False
