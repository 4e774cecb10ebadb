"""Cross-entropy over a large vocabulary: Triton kernels on CUDA, PyTorch elsewhere. Importing this needs no triton.

With scores s = logit_scale * logits over C classes, a label y and the smoothing e of Szegedy et al. (2016,
arXiv:1512.00567), the loss of a row is

    lse(s) - (1 - e) s_y - e / C * sum_c s_c + lse_square_scale * lse(s)^2;

the last term is the z-loss of Chowdhery et al. (2022, arXiv:2204.02311). Its gradient needs only s and lse(s), so
that nothing of the logits' size is kept besides the logits. A vocabulary that is split over processes (Shoeybi et al.,
2019, arXiv:1909.08053) exchanges two numbers per row.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
from torch import Tensor

from flash_attn._types import Context
from flash_attn.ops import arguments, context
from flash_attn.ops.triton.dispatch import device_of, kernel_serves, once_differentiable, power_of_two


class _Loss(NamedTuple):
    """What is computed from the logits, and which classes this process has: first_class onwards, of `classes`."""

    smoothing: float
    logit_scale: float
    lse_square_scale: float
    ignore_index: int
    first_class: int
    classes: int


def cross_entropy_loss(
    logits: Tensor,
    labels: Tensor,
    precomputed_lse: Tensor | None = None,
    label_smoothing: float = 0.0,
    logit_scale: float = 1.0,
    lse_square_scale: float = 0.0,
    ignore_index: int = -100,
    inplace_backward: bool = False,
    process_group: torch.distributed.ProcessGroup | None = None,
) -> tuple[Tensor, Tensor]:
    """Cross-entropy of every row, with a gradient for the logits. Sums are taken in float32 (float64 for float64).

    Arguments:
        logits: (batch, classes), any floating point dtype and strides; a class dimension with a stride other than 1
            costs a copy. With process_group: (batch, classes / processes), the part of this process, ranks in order,
            of the same size on each.
        labels: int64 or int32 (batch,), in [0, classes), or ignore_index. Another label gives a RuntimeError on CPU
            tensors; on CUDA, where looking costs a synchronisation, a NaN loss and a NaN gradient of its row.
        precomputed_lse: float32 (batch,), the log-sum-exp of the logits given, or None. Not differentiable; computed
            all the same if logit_scale is not 1 or label_smoothing not 0.
        label_smoothing: float in [0, 1], the weight given to all classes alike.
        logit_scale: float, factor of the logits; gets no gradient.
        lse_square_scale: float, factor of the squared log-sum-exp that is added to the loss (z-loss).
        ignore_index: int. Rows with this label have loss and gradient 0, for any logits.
        inplace_backward: bool. The kernel writes the gradient over the logits, which saves their memory; a second
            backward raises then. Without effect where the kernel is not used or rows of logits overlap in memory.
        process_group: torch.distributed group over which the classes are split, or None.

    Returns:
        losses: (batch,) float32 (float64 for float64 logits), z-loss included.
        z_losses: like losses, the z-loss alone; not differentiable.

    Raises RuntimeError or TypeError naming the argument that does not fit. Not twice differentiable.
    """
    context.reject_transforms("cross_entropy_loss")
    context.reject_tangents(("logits",), (logits,))
    label_smoothing = arguments.number("label_smoothing", label_smoothing)
    logit_scale = arguments.number("logit_scale", logit_scale)
    lse_square_scale = arguments.number("lse_square_scale", lse_square_scale)
    ignore_index = arguments.integer("ignore_index", ignore_index)
    inplace_backward = arguments.flag("inplace_backward", inplace_backward)
    losses: tuple[Tensor, Tensor] = CrossEntropyLoss.apply(
        logits,
        labels,
        precomputed_lse,
        label_smoothing,
        logit_scale,
        lse_square_scale,
        ignore_index,
        inplace_backward,
        process_group,
    )
    return losses


class _LossContext(Context):
    rule: _Loss
    inplace: bool


class CrossEntropyLoss(torch.autograd.Function):
    """`cross_entropy_loss`, with its arguments in its order."""

    @staticmethod
    def forward(
        ctx: _LossContext,
        logits: Tensor,
        labels: Tensor,
        precomputed_lse: Tensor | None = None,
        smoothing: float = 0.0,
        logit_scale: float = 1.0,
        lse_square_scale: float = 0.0,
        ignore_index: int = -100,
        inplace_backward: bool = False,
        process_group: torch.distributed.ProcessGroup | None = None,
    ) -> tuple[Tensor, Tensor]:
        rank, world = 0, 1
        if process_group is not None:
            rank = torch.distributed.get_rank(process_group)
            world = torch.distributed.get_world_size(process_group)
        _check_shapes(logits, labels, precomputed_lse, smoothing)
        columns = logits.shape[1]
        numbers = (float(smoothing), float(logit_scale), float(lse_square_scale), int(ignore_index))
        rule = _Loss(*numbers, first_class=rank * columns, classes=world * columns)
        _check_labels(labels, rule)
        logits = logits if logits.stride(1) == 1 or columns == 1 else logits.contiguous()
        lse = precomputed_lse if logit_scale == 1.0 and smoothing == 0.0 else None
        losses, z_losses, lse = _losses(logits, labels, lse, rule, process_group, world)
        ctx.save_for_backward(logits, context.savable(labels), lse)
        ctx.rule, ctx.inplace = rule, inplace_backward
        ctx.mark_non_differentiable(z_losses)
        return losses, z_losses

    @staticmethod
    @once_differentiable("cross_entropy_loss")
    def backward(ctx: _LossContext, dlosses: Tensor, dz_losses: Tensor | None) -> tuple[Tensor | None, ...]:
        logits, labels, lse = ctx.saved_tensors
        if not kernel_serves(logits):
            dlogits = _compose_backward(dlosses, logits, labels, lse, ctx.rule)
        elif ctx.inplace and (logits.stride(0) >= logits.shape[1] or logits.shape[0] == 1):
            dlogits = logits.detach()
            _launch_backward(dlogits, dlosses, logits, labels, lse, ctx.rule)
            torch.autograd.graph.increment_version(logits)
        else:
            dlogits = torch.empty_like(logits, memory_format=torch.contiguous_format)
            _launch_backward(dlogits, dlosses, logits, labels, lse, ctx.rule)
        return dlogits, *(None,) * 8


def _check_shapes(logits: Tensor, labels: Tensor, lse: Tensor | None, smoothing: float) -> None:
    arguments.check_floating("logits", logits)
    arguments.check_tensors(("labels",), (labels,))
    arguments.check_optional_tensors(("precomputed_lse",), (lse,))
    if logits.dim() != 2 or logits.shape[1] == 0:
        raise RuntimeError(f"logits: expected shape (batch, classes) with at least one class, got {list(logits.shape)}")
    if labels.shape != logits.shape[:1] or labels.dtype not in (torch.int64, torch.int32):
        raise RuntimeError(
            f"labels: expected int64 or int32 of shape [{logits.shape[0]}], "
            f"got {str(labels.dtype)[6:]} {list(labels.shape)}"
        )
    if lse is not None and lse.shape != labels.shape:
        raise RuntimeError(f"precomputed_lse: expected shape {list(labels.shape)}, got {list(lse.shape)}")
    for name, tensor in (("labels", labels), ("precomputed_lse", lse)):
        if tensor is not None and tensor.device != logits.device:
            raise RuntimeError(f"{name}: expected a tensor on logits' device ({logits.device}), got {tensor.device}")
    if not 0.0 <= smoothing <= 1.0:
        raise RuntimeError(f"label_smoothing: expected a value in [0, 1], got {smoothing}")


def _check_labels(labels: Tensor, rule: _Loss) -> None:
    if labels.is_cpu and type(labels) is Tensor and not torch.compiler.is_compiling():  # fake ones have no values
        wrong = labels[(labels != rule.ignore_index) & ~_known(labels, rule)]
        if wrong.numel() > 0:
            expected = f"values in [0, {rule.classes}) or ignore_index {rule.ignore_index}"
            raise RuntimeError(f"labels: expected {expected}, got {wrong[0].item()}")


def _known(labels: Tensor, rule: _Loss) -> Tensor:
    return (labels >= 0) & (labels < rule.classes)


def _losses(
    logits: Tensor,
    labels: Tensor,
    lse: Tensor | None,
    rule: _Loss,
    process_group: torch.distributed.ProcessGroup | None,
    world: int,
) -> tuple[Tensor, Tensor, Tensor]:
    """-> (losses, z_losses, lse). `subtracted`: the loss is the LSE of all logits minus it."""
    if kernel_serves(logits) and world == 1:
        return _launch_forward(logits, labels, lse, rule)
    if kernel_serves(logits):
        subtracted, _, lse = _launch_forward(logits, labels, lse, rule, partial=True)
    else:
        lse, subtracted = _compose_forward(logits, labels, lse, rule)
    if world > 1:
        parts = [torch.empty_like(lse) for _ in range(world)]
        torch.distributed.all_gather(parts, lse.contiguous(), group=process_group)
        torch.distributed.all_reduce(subtracted, group=process_group)
        lse = torch.stack(parts).logsumexp(0)
    z_losses = rule.lse_square_scale * lse.square()
    losses = torch.where(_known(labels, rule), lse - subtracted + z_losses, float("nan"))
    ignored = labels == rule.ignore_index
    return losses.masked_fill(ignored, 0.0), z_losses.masked_fill(ignored, 0.0), lse


def _scores(logits: Tensor, rule: _Loss) -> Tensor:
    return logits.to(torch.promote_types(logits.dtype, torch.float32)) * rule.logit_scale


def _label_columns(labels: Tensor, columns: int, rule: _Loss) -> tuple[Tensor, Tensor]:
    """The column of every label as (batch, 1), and whether this process has it."""
    column = labels.long() - rule.first_class
    here = (column >= 0) & (column < columns) & (labels != rule.ignore_index)
    return column.clamp(0, columns - 1)[:, None], here[:, None]


def _compose_forward(logits: Tensor, labels: Tensor, lse: Tensor | None, rule: _Loss) -> tuple[Tensor, Tensor]:
    """-> (lse, subtracted), of the logits here alone."""
    scores = _scores(logits, rule)
    lse = torch.logsumexp(scores, dim=1) if lse is None else lse.to(scores.dtype)
    column, here = _label_columns(labels, logits.shape[1], rule)
    subtracted = torch.where(here, scores.gather(1, column), 0.0)[:, 0]
    if rule.smoothing > 0.0:
        subtracted = (1.0 - rule.smoothing) * subtracted + rule.smoothing / rule.classes * scores.sum(1)
    return lse, subtracted


def _compose_backward(dlosses: Tensor, logits: Tensor, labels: Tensor, lse: Tensor, rule: _Loss) -> Tensor:
    grad = torch.exp(_scores(logits, rule) - lse[:, None])
    grad = grad * (1.0 + 2.0 * rule.lse_square_scale * lse)[:, None] - rule.smoothing / rule.classes
    column, here = _label_columns(labels, logits.shape[1], rule)
    grad = grad.scatter_add(1, column, here.to(grad.dtype) * (rule.smoothing - 1.0))
    factor = torch.where(_known(labels, rule), dlosses * rule.logit_scale, float("nan"))
    grad = torch.where((labels == rule.ignore_index)[:, None], 0.0, grad * factor[:, None])
    return grad.to(logits.dtype)


def _launch_forward(
    logits: Tensor, labels: Tensor, lse: Tensor | None, rule: _Loss, partial: bool = False
) -> tuple[Tensor, Any, Tensor]:
    """-> (losses, z_losses, lse), or with partial (subtracted, None, lse) of the logits here alone."""
    from flash_attn.ops.triton.cross_entropy_kernels import cross_entropy_forward_kernel

    rows, columns = logits.shape
    losses = torch.empty(rows, dtype=torch.float32, device=logits.device)
    z_losses = None if partial else torch.empty_like(losses)
    lse_given = lse is not None
    lse = torch.empty_like(losses) if lse is None else lse.float().contiguous()
    vector = 16 // logits.element_size()  # elements that a thread loads at once
    block = min(max(power_of_two(columns), 32 * vector), 4096)
    if rows > 0:
        with device_of(logits):
            cross_entropy_forward_kernel[(rows,)](
                losses,
                z_losses,
                lse,
                logits,
                labels.contiguous(),
                logits.stride(0),
                columns,
                rule.first_class,
                rule.classes,
                rule.ignore_index,
                rule.logit_scale,
                rule.smoothing,
                rule.lse_square_scale,
                HAS_SMOOTHING=rule.smoothing > 0.0,
                LSE_GIVEN=lse_given,
                PARTIAL=partial,
                BLOCK=block,
                VECTOR=vector,
                STAGES=3,
                num_warps=max(block // 1024, 1),
            )
    return losses, z_losses, lse


def _launch_backward(
    dlogits: Tensor, dlosses: Tensor, logits: Tensor, labels: Tensor, lse: Tensor, rule: _Loss
) -> None:
    from flash_attn.ops.triton.cross_entropy_kernels import cross_entropy_backward_kernel

    context.reject_batched_gradients(dlosses)
    rows, columns = logits.shape
    block = min(power_of_two(columns), 4096)
    if rows > 0:
        with device_of(logits):
            cross_entropy_backward_kernel[(rows, -(-columns // block))](
                dlogits,
                dlosses,
                logits,
                lse,
                labels.contiguous(),
                dlogits.stride(0),
                dlosses.stride(0),
                logits.stride(0),
                columns,
                rule.first_class,
                rule.classes,
                rule.ignore_index,
                rule.logit_scale,
                rule.smoothing,
                rule.lse_square_scale,
                BLOCK=block,
                num_warps=4,
            )
