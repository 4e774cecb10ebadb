"""`cross_entropy_loss` as a module."""

from __future__ import annotations

import torch
from torch import Tensor

from flash_attn.ops.triton.cross_entropy import cross_entropy_loss


class CrossEntropyLoss(torch.nn.Module):
    """Cross-entropy of rows of logits, reduced over the rows that are not ignored.

    Arguments:
        ignore_index: int. Rows with this label contribute nothing.
        reduction: "mean" (over the rows not ignored; NaN if there are none), "sum" or "none".
        label_smoothing: float in [0, 1], the weight given to all classes alike.
        logit_scale: float, factor of the logits; gets no gradient.
        lse_square_scale: float, factor of the squared log-sum-exp that is added to the loss (z-loss).
        inplace_backward: bool. The kernel writes the gradient over the logits, which saves their memory.
        process_group: torch.distributed group over which the classes are split, or None.
        return_z_loss: bool. Also return the z-loss, which is part of the loss.

    Raises NotImplementedError for another reduction.
    """

    def __init__(
        self,
        ignore_index: int = -100,
        reduction: str = "mean",
        label_smoothing: float = 0.0,
        logit_scale: float = 1.0,
        lse_square_scale: float = 0.0,
        inplace_backward: bool = False,
        process_group: torch.distributed.ProcessGroup | None = None,
        return_z_loss: bool = False,
    ) -> None:
        super().__init__()
        if reduction not in ("mean", "none", "sum"):
            raise NotImplementedError(f"reduction: expected 'mean', 'none' or 'sum', got {reduction!r}")
        self.ignore_index = ignore_index
        self.reduction = reduction
        self.label_smoothing = label_smoothing
        self.logit_scale = logit_scale
        self.lse_square_scale = lse_square_scale
        self.inplace_backward = inplace_backward
        self.process_group = process_group
        self.return_z_loss = return_z_loss

    def forward(
        self, input: Tensor, target: Tensor, precomputed_lse: Tensor | None = None
    ) -> Tensor | tuple[Tensor, Tensor]:
        """
        Arguments:
            input: (batch, classes), any floating point dtype; with process_group this process's part of the classes.
            target: int64 or int32 (batch,), in [0, classes) or ignore_index.
            precomputed_lse: float32 (batch,), the log-sum-exp of input, or None.

        Returns the loss, float32: 0-d, or (batch,) with reduction "none"; with return_z_loss (loss, z_loss), the
        second not differentiable.
        """
        loss, z_loss = cross_entropy_loss(
            input,
            target,
            precomputed_lse=precomputed_lse,
            label_smoothing=self.label_smoothing,
            logit_scale=self.logit_scale,
            lse_square_scale=self.lse_square_scale,
            ignore_index=self.ignore_index,
            inplace_backward=self.inplace_backward,
            process_group=self.process_group,
        )
        if self.reduction == "none":
            return (loss, z_loss) if self.return_z_loss else loss
        count = (target != self.ignore_index).sum() if self.reduction == "mean" else 1
        loss = loss.sum() / count
        return (loss, z_loss.sum() / count) if self.return_z_loss else loss
