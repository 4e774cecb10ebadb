"""Whether a call may bypass the dispatcher: detects tracing, transforms, dispatch modes and autograd.

A kernel reads and writes memory without PyTorch's knowledge. Only this module asks who must see a call, take part in
it or be told of its writes.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import NoReturn

import torch
from torch import Tensor
from torch.autograd import forward_ad
from torch.autograd.graph import increment_version
from torch.nn import Parameter
from torch.utils._device import DeviceContext

from flash_attn._types import Batched, Context, VmapInfo

_is_compiling = torch.compiler.is_compiling
is_tracing = torch._C._is_tracing
transformed = torch._C._are_functorch_transforms_active  # a torch.func transform, whose tensors no backend can read
dispatch_modes = torch._C._len_torch_dispatch_stack  # how many are active: FakeTensorMode, FlopCounterMode
_in_inference_mode = torch.is_inference_mode_enabled
_function_modes = torch._C._len_torch_function_stack


def survey(names: Iterable[str], tensors: Iterable[Tensor | None], carries_tangents: bool = False) -> tuple[bool, bool]:
    """(needs_dispatch, differentiating) of a call with these tensors, of which some may be None.

    needs_dispatch: something other than eager execution on plain tensors must see the operator: torch.compile,
    torch.jit.trace, a tensor subclass, a mode. differentiating: gradients are recorded.
    Raises NotImplementedError for a tensor with a forward-mode tangent if the call must go to an operator, which drops
    tangents, or does not take them itself (carries_tangents).
    """
    plain, requires_grad = True, False
    for x in tensors:
        if x is not None:
            if type(x) is not Tensor and type(x) is not Parameter:
                plain = False
            if x.requires_grad:
                requires_grad = True
    needs_dispatch = (
        not plain
        or _is_compiling()
        or is_tracing()
        or dispatch_modes() > 0
        or (_function_modes() > 0 and _a_mode_watches())
    )
    if forward_ad._current_level >= 0 and (needs_dispatch or not carries_tangents):
        reject_tangents(names, tensors)
    return needs_dispatch, requires_grad and torch.is_grad_enabled()


def is_watched() -> bool:
    """Whether torch.jit.trace, a mode, a torch.func transform or forward-mode differentiation is on. torch.compile is
    not asked for."""
    return (
        is_tracing()
        or transformed()
        or dispatch_modes() > 0
        or forward_ad._current_level >= 0
        or (_function_modes() > 0 and _a_mode_watches())
    )


def transforms() -> bool:
    """Whether a torch.func transform or forward mode is on, which go by the rules of an autograd.Function."""
    return transformed() or forward_ad._current_level >= 0


def is_forward_mode_alone() -> bool:
    """Whether forward mode is on, by torch.autograd.forward_ad or as the only torch.func transform."""
    if forward_ad._current_level < 0:
        return False
    stack = torch._C._functorch.get_interpreter_stack() if transformed() else ()
    return not stack or [x.key() for x in stack] == [torch._C._functorch.TransformType.Jvp]


def records_gradients(*tensors: Tensor | None) -> bool:
    """Whether gradients are recorded of one of these (some None)."""
    return torch.is_grad_enabled() and any(x is not None and x.requires_grad for x in tensors)


def _a_mode_watches() -> bool:
    """Whether a function mode is active that is not a default device, which only redirects factory functions."""
    return any(not isinstance(mode, DeviceContext) for mode in torch.overrides._get_current_function_mode_stack())


def decomposes() -> bool:
    """Whether a function must use its PyTorch composition instead of its kernel, so that each operation is seen."""
    return _is_compiling() or is_tracing() or transforms()


_NO_JVP = (
    "forward-mode differentiation (torch.func.jvp, torch.autograd.forward_ad) has no rule here: eager attention has "
    "one, and flash_attn_jvp, in compiled code too"
)


def reject_tangents(names: Iterable[str], tensors: Iterable[Tensor | None]) -> None:
    """Raise NotImplementedError for a tensor with a forward-mode tangent, which would be lost."""
    if forward_ad._current_level < 0:
        return
    nested = torch._functorch.eager_transforms.JVP_NESTING > 1  # tangents of an outer transform are out of sight
    for name, x in zip(names, tensors):
        if x is None:
            continue
        hidden = nested and torch._C._functorch.is_functorch_wrapped_tensor(x)
        if hidden or forward_ad.unpack_dual(x).tangent is not None:
            raise NotImplementedError(f"{name}: expected a tensor without forward-mode tangent, got one: {_NO_JVP}")


def no_jvp(ctx: Context, *tangents: Tensor | None) -> NoReturn:
    """The jvp of every autograd.Function here: tangents of an outer transform, as in torch.func.hessian."""
    raise NotImplementedError(f"flash_attn: expected inputs without forward-mode tangents, got some: {_NO_JVP}")


def reject_forward_mode(operator: str) -> None:
    """Raise NotImplementedError within forward-mode differentiation: an operator's implementation sees no tangents.

    Not within an autograd.Function, which has a rule for them or raises.
    """
    if forward_ad._current_level >= 0 and torch._C._is_fwd_grad_enabled():
        raise NotImplementedError(f"{operator}: expected a call outside of forward-mode differentiation: {_NO_JVP}")


def reject_transforms(function: str) -> None:
    """Raise NotImplementedError within a torch.func transform, for a function that has no rule for any."""
    if transformed():
        raise NotImplementedError(f"{function}: expected a call outside of torch.func transforms, got one within")


def reject_batched(function: str, names: Iterable[str], tensors: Iterable[object]) -> None:
    """Raise NotImplementedError for one (some are no tensors) that torch.vmap has added a dimension to."""
    if not transformed():
        return
    for name, x in zip(names, tensors):
        while isinstance(x, Tensor) and torch._C._functorch.is_functorch_wrapped_tensor(x):
            if torch._C._functorch.is_batchedtensor(x):
                raise NotImplementedError(
                    f"{name}: expected a tensor without a dimension of torch.vmap, got one with it: "
                    f"{function} has no batching rule"
                )
            x = torch._C._functorch.get_unwrapped(x)


def reject_batched_gradients(*gradients: Tensor | None) -> None:
    """Raise NotImplementedError for one (some None) of a batch of backwards that autograd runs as one."""
    for gradient in gradients:
        if type(gradient) is Tensor and not _has_memory(gradient):
            raise NotImplementedError(
                "flash_attn: expected the gradients of one backward, got a batch of them (is_grads_batched=True, "
                "jacobian(vectorize=True)): torch.func.jacrev takes batches"
            )


def _has_memory(x: Tensor) -> bool:
    try:
        x.data_ptr()  # the cheapest way to ask
    except RuntimeError:
        return x.layout is not torch.strided
    return True


def by_sample(
    function: type[torch.autograd.Function],
    info: VmapInfo,
    in_dims: Sequence[int | None],
    args: Sequence[object],
) -> Batched:
    """What the vmap of an autograd.Function returns if it applies the function to each sample in turn."""
    if info.batch_size == 0:
        raise NotImplementedError("torch.vmap: expected at least one sample for attention, got 0")
    samples = [function.apply(*(_sample(x, dim, i) for x, dim in zip(args, in_dims))) for i in range(info.batch_size)]
    results = tuple(torch.stack(parts) for parts in zip(*samples))
    return results, (0,) * len(results)


def _sample(x: object, dim: int | None, i: int) -> object:
    return x.select(dim, i) if dim is not None and isinstance(x, Tensor) else x


def check_writable(names: Sequence[str], tensors: Sequence[Tensor | None]) -> None:
    """Raise RuntimeError for a tensor made in inference mode, which may not be written outside of it. None passes."""
    if _is_compiling() or _in_inference_mode():
        return
    for i, x in enumerate(tensors):
        if x is not None and x.is_inference():
            raise RuntimeError(
                f"{names[i]}: expected a tensor that may be written in place, got one made in inference mode, "
                "outside of it"
            )


def is_savable(x: Tensor) -> bool:
    """Whether autograd saves x: not one made in inference mode, which compilers do not ask for."""
    return _is_compiling() or not x.is_inference()


def check_savable(names: Sequence[str], tensors: Sequence[Tensor | None]) -> None:
    """Raise RuntimeError for a tensor that autograd does not save for a backward. None passes."""
    if _is_compiling():
        return
    for name, x in zip(names, tensors):
        if x is not None and x.is_inference():
            raise RuntimeError(
                f"{name}: expected a tensor that a backward may read, got one made in inference mode (clone it)"
            )


def savable(x: Tensor | None) -> Tensor | None:
    """x, or a copy of one made in inference mode, which autograd does not save. None passes."""
    return x if x is None or is_savable(x) else x.clone()


def all_savable(tensors: Sequence[Tensor | None]) -> Sequence[Tensor | None]:
    """`savable` of each."""
    if _is_compiling():
        return tensors
    return [x.clone() if x is not None and x.is_inference() else x for x in tensors]


def check_distinct(name: str, x: Tensor | None) -> None:
    """Raise RuntimeError for a tensor (or None) to be written of which several elements share their memory."""
    if x is not None and torch._debug_has_internal_overlap(x) == 1:
        raise RuntimeError(
            f"{name}: expected elements that share no memory, got strides {list(x.stride())} for shape {list(x.shape)}"
        )


def overwrite(name: str, x: Tensor | None) -> None:
    """Record that x loses its history to a write, as an in-place operation without a derivative.

    Only where gradients are recorded and x requires one. A backward through x then raises. Raises RuntimeError where
    autograd forbids the write: a leaf, a view of a leaf, one of the views that a function returned together.
    """
    if x is None or not x.requires_grad or not torch.is_grad_enabled():
        return
    try:
        _Overwritten.apply(x, name)
    except RuntimeError as error:
        message = f"{name}: expected a tensor that may be written in place, got one that may not: {error}"
        raise RuntimeError(message) from error


class _OverwrittenContext(Context):
    name: str


class _Overwritten(torch.autograd.Function):
    @staticmethod
    def forward(ctx: _OverwrittenContext, x: Tensor, name: str) -> Tensor:
        ctx.mark_dirty(x)
        ctx.name = name
        return x

    @staticmethod
    def backward(ctx: _OverwrittenContext, grad: Tensor) -> NoReturn:
        raise RuntimeError(f"{ctx.name}: expected no backward through a tensor that was written in place, got one")


def written(tensors: Iterable[Tensor | None]) -> None:
    """Tell autograd that a kernel wrote these tensors: a backward that saved one raises torch's error. None passes."""
    given = [x for x in tensors if x is not None]
    if _VERSIONS_IN_ONE_CALL:
        increment_version(given)
    else:
        for x in given:
            increment_version(x)


def _versions_in_one_call() -> bool:
    """Whether torch (2.6 and newer) takes several tensors at once."""
    try:
        increment_version([])
    except (TypeError, RuntimeError):  # the latter from torch 2.4
        return False
    return True


_VERSIONS_IN_ONE_CALL = _versions_in_one_call()
