"""Checks, before any launch, of the tensors that a caller gives for results. The backend checks what it sees, which may
be copies of the arguments."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence

import torch
from torch import Tensor

from flash_attn.eight_bit import named, result_dtype
from flash_attn.ops import arguments, context


def reject_gradients(out: Tensor | None, *inputs: Tensor | None) -> None:
    arguments.check_tensors(("out",), (out,))
    if context.records_gradients(out, *inputs):
        raise RuntimeError("out: expected None where gradients are recorded, got a tensor (use torch.no_grad())")


def check_result(out: Tensor, q: Tensor, v: Tensor, out_dtype: torch.dtype | None, read: Mapping[str, object]) -> None:
    """out as the result of attention of q and v. read: the arguments by name, of which tensors are read."""
    shape = (*q.shape[:-1], arguments.head_dim("v", v))
    check("out", out, shape, q, result_dtype(q, v, out_dtype))
    check_apart({"out": out}, read)


def check(name: str, given: Tensor, shape: Sequence[int], q: Tensor, dtype: torch.dtype) -> None:
    """A tensor for a result of this shape and dtype, on q's device."""
    arguments.check_tensors((name,), (given,))
    context.check_writable((name,), (given,))
    if given.device != q.device:
        raise RuntimeError(f"{name}: expected a tensor on q's device ({q.device}), got one on {given.device}")
    if given.dtype != dtype:
        expected = f"the dtype of q ({named(dtype)})" if dtype == q.dtype else f"dtype {named(dtype)}"
        raise RuntimeError(f"{name}: expected {expected}, got {named(given.dtype)}")
    arguments.check_shape(name, given, shape)


def check_apart_from_copied(written: Iterable[tuple[str, Tensor | None]], read: Mapping[str, object]) -> None:
    """Each tensor of the pairs (name, tensor or None) must not overlap the inputs, which the backend gets copies of."""
    for name, x in written:
        check_apart({name: x}, read)


def check_apart(written: Mapping[str, object], read: Mapping[str, object]) -> None:
    """Raise for tensors, by name, of which an element is written twice, or read too. Other values are left out.

    Where tensors may have no addresses, traced or transformed, nothing is checked.
    """
    written, read = ({name: x for name, x in given.items() if isinstance(x, Tensor)} for given in (written, read))
    if context.survey(written, written.values())[0] or context.survey(read, read.values())[0] or context.transformed():
        return
    from flash_attn.cpu.overlap import check_written  # not loaded for each call on a GPU

    check_written(written, read)
