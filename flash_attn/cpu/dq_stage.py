"""A backward in stages: several calls, each with other keys, whose parts of dq have one sum."""

from __future__ import annotations

from collections.abc import Sequence
from typing import cast

import torch

from . import checks
from .scores import compute_dtype

STAGES = ("", "begin", "add", "end")


class DqStage:
    """The stage of a call: all (""), the start of the sum with softmax_d, the part of its keys, or the rounding."""

    def __init__(self, stage: str, dq_sum: torch.Tensor | None, softmax_d: torch.Tensor | None) -> None:
        self.stage, self._sum, self._softmax_d = stage, dq_sum, softmax_d
        self.begins, self.adds, self.ends = (stage in ("", own) for own in STAGES[1:])

    def check(
        self,
        q: torch.Tensor,
        dq: torch.Tensor | None,
        dk: torch.Tensor | None,
        dv: torch.Tensor | None,
        softmax_d_shape: Sequence[int],
    ) -> None:
        """Each stage is given the tensors that it reads, and no output that it does not write."""
        stage = self.stage
        checks.require(stage in STAGES, "dq_stage", "'', 'begin', 'add' or 'end'", repr(stage))
        self._check_given("dq_sum", self._sum, stage in ("add", "end"))
        self._check_given("softmax_d", self._softmax_d, stage == "add")
        if not self.ends:
            self._check_given("dq", dq, False)
        if not self.adds:
            self._check_given("dk", dk, False)
            self._check_given("dv", dv, False)
        for name, x, shape in (("dq_sum", self._sum, q.shape), ("softmax_d", self._softmax_d, softmax_d_shape)):
            if x is None:
                continue
            checks.check_device(name, x)
            checks.check_dtype(name, x, compute_dtype(q.dtype))
            shape = list(shape)
            expected = f"that of dq_stage 'begin' over the same rows and sequences, contiguous of shape {shape}"
            checks.require(list(x.shape) == shape and x.is_contiguous(), name, expected, f"shape {list(x.shape)}")

    def _check_given(self, name: str, x: torch.Tensor | None, is_wanted: bool) -> None:
        expected = f"{'a tensor' if is_wanted else 'None'} at dq_stage '{self.stage}'"
        checks.require((x is not None) == is_wanted, name, expected, "None" if x is None else "a tensor")

    def first_row(self, first_unmasked: int) -> int | None:
        """For row_deltas: rows without keys in this call may have keys in other calls."""
        return None if self.stage else first_unmasked

    def may_fuse(self, dlse: torch.Tensor | None) -> bool:
        """Whether rowsum(dout * out) is all that the call subtracts from dP, as in PyTorch's fused operator."""
        return self.stage == "" and dlse is None

    def softmax_d(self, q: torch.Tensor, shape: Sequence[int]) -> torch.Tensor:
        return q.new_zeros(shape, dtype=compute_dtype(q.dtype)) if self._softmax_d is None else self._softmax_d

    def new_dq(self, q: torch.Tensor, dq: torch.Tensor | None) -> torch.Tensor | None:
        """The tensor for the call's part of dq: zeros for a sum, else dq as given, None for a new one."""
        return q.new_zeros(q.shape, dtype=compute_dtype(q.dtype)) if self.stage else dq

    def added(self, part: torch.Tensor) -> torch.Tensor:
        """The call's dq, or the sum with its part."""
        return part if self._sum is None else self._sum.add_(part)

    def end(self, q: torch.Tensor, dq: torch.Tensor | None) -> list[torch.Tensor | None]:
        dq = q.new_empty(q.shape) if dq is None else dq
        return [dq.copy_(cast(torch.Tensor, self._sum)), None, None, None]
