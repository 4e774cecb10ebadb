"""How a call would be computed, without computing it: `explain`.

A TorchDispatchMode intercepts the operators of `flash_attn.ops.library`: all checks and conversions run as usual, and
calls outside `explain` cost nothing more.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterable, Sequence
from types import ModuleType
from typing import Any, NoReturn

import torch
from torch import Tensor
from torch._ops import OpOverload
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_map_only

from flash_attn import backends
from flash_attn import flash_attn_interface as interface
from flash_attn._types import Context
from flash_attn.inference import flash_attn_with_kvcache
from flash_attn.kvcache_plan import KvCachePlan
from flash_attn.observation import EXPLAINED_BY
from flash_attn.ops import calls, context
from flash_attn.ops.attention_args import (
    AttentionArgs,
    AttentionBackwardArgs,
    KvCacheArgs,
    backward_args,
    saved_for_backward,
)

Plan = dict[str, object]  # of one pass, its fields by name; or the plans of a call

_FUNCTIONS: list[Callable[..., object]] = [
    interface.flash_attn_func,
    interface.flash_attn_qkvpacked_func,
    interface.flash_attn_kvpacked_func,
    interface.flash_attn_varlen_func,
    interface.flash_attn_varlen_qkvpacked_func,
    interface.flash_attn_varlen_kvpacked_func,
    flash_attn_with_kvcache,
]


def add_functions(*functions: Callable[..., object]) -> None:
    """Let `explain` take more functions, which must call the same operators."""
    _FUNCTIONS.extend(functions)


class Explanation(dict[str, Any]):
    """The plans of a call: {"forward": dict, "backward": dict or None}; str() makes a table of them."""

    def __str__(self) -> str:
        plans = {name: plan for name, plan in self.items() if plan is not None}
        fields = list(dict.fromkeys(field for plan in plans.values() for field in plan))
        rows = [("", *plans), *((field, *(str(plan.get(field, "")) for plan in plans.values())) for field in fields)]
        widths = [max(map(len, column)) for column in zip(*rows)]
        lines = ("  ".join(cell.ljust(width) for cell, width in zip(row, widths)).rstrip() for row in rows)
        return "\n".join(lines)


def explain(*args: object, **kwargs: object) -> Explanation:
    """How a call would be computed: its kernels, their tiles, launches and memory. Nothing is computed.

    `explain(function, ...)` takes exactly the arguments of `function`, one of flash_attn_func and its packed and varlen
    forms, flash_attn_with_kvcache, and once it is imported those of flash_attn_3; `explain(q, k, v, ...)` is that of
    flash_attn_func. The call's own checks hold. Nothing is launched, written, recorded by autograd or allocated on the
    GPU, and no random number is drawn.

    Returns a dict, which prints as a table: "forward", the plan of the forward, and but for flash_attn_with_kvcache
    "backward", that of the backward, None where the call records no gradient or has no backward. Fields of a plan
    (those that its kernel has):

        backend: "cuda" or "cpu".
        direction: "forward", "backward" or "kvcache".
        kernel: the family: "mma_sync", "wgmma" or "split_kv" on CUDA; "tiled", "torch_flash", "by_row" on the CPU;
            "none" where there is nothing to compute.
        variant, dtype, head_dim, head_dim_v: of the instantiation, whose head dims are those of the call rounded up.
        kv_dtype: "e4m3" or "int8", of 8-bit k and v on CUDA. qkv_dtype: "e4m3" if the kernel multiplies 8-bit values.
        block_m, block_n: rows and keys of a tile. tile_heads: its K/V heads ("split_kv").
        kv_stages (of a backward: stages), warps, smem_bytes: of a thread block.
        grid, num_work_tiles: thread blocks launched, and the tiles that they take.
        num_splits, split: how keys are split. row_max: "lagging" or, by FLASH_ATTN_ROW_MAX (docs/build.md), "exact" or
            "of each block".
        workspace_bytes: memory besides the results.
        stages: of a forward the launches, in order, on CUDA.
        threads: of the CPU.

    Raises the errors of the call for its arguments, and TypeError for another function.
    """
    function: Callable[..., object] = interface.flash_attn_func
    if args and callable(args[0]) and not isinstance(args[0], Tensor):
        function, *args = args  # type: ignore[assignment]
    if function not in _FUNCTIONS:
        name = getattr(function, "__name__", type(function).__name__)
        raise TypeError(f"function: expected an attention function of flash_attn, got {name}")
    context.reject_transforms("explain")
    args, kwargs = tree_map_only((Tensor, KvCachePlan), _alias, (tuple(args), kwargs))
    try:
        with _Explaining():
            function(*args, **kwargs)
    except _Answer as answer:
        return Explanation(answer.value)
    raise AssertionError("an attention function must come to its operator or raise")


class _Answer(Exception):
    """Ends a call where its result would be computed, with `value` in place of the result."""

    def __init__(self, value: Plan) -> None:
        self.value = value


class _NonLeaf(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Context, x: Tensor) -> Tensor:
        return x.data

    @staticmethod
    def backward(ctx: Context, grad: Tensor) -> Tensor:
        return grad


def _alias(x: Any) -> Any:
    """A separate tensor, or plan, of the same memory: autograd is told of writes to it, and not to x."""
    if isinstance(x, KvCachePlan):
        plan = copy.copy(x)
        plan.tensor = x.tensor.data
        return plan
    alias = x.data
    if not x.requires_grad:
        return alias
    alias.requires_grad_()
    return alias if x.is_leaf or not torch.is_grad_enabled() else _NonLeaf.apply(alias)


class _Planner:
    """A backend whose functions answer with the plan of the call."""

    def __init__(self, backend: ModuleType) -> None:
        self._backend = backend

    def __getattr__(self, name: str) -> Callable[..., NoReturn]:
        explained_by = getattr(self._backend, EXPLAINED_BY[name])

        def answer(*args: object, **kwargs: object) -> NoReturn:
            raise _Answer(explained_by(*args, **kwargs))

        return answer


def _plan(call: Callable[..., object], args: AttentionArgs | AttentionBackwardArgs | KvCacheArgs) -> Plan:
    """The plan of `call`, a function of `flash_attn.ops.calls`."""
    try:
        call(args, _Planner(backends.of(args.q)))
    except _Answer as answer:
        return {"backend": args.q.device.type, **answer.value}
    raise AssertionError("a call must come to its backend or raise")


class _Explaining(TorchDispatchMode):
    """Operators of attention answer with their plans; others on the GPU return tensors without memory."""

    device_type = "cuda"

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._records = torch.is_grad_enabled()
        self._address = 1 << 60  # of tensors without memory: no allocation has it
        core = torch.ops.flash_attn_core
        self._operators: dict[OpOverload, tuple[Callable[..., object], Callable[..., Plan]]] = {
            core.fwd.default: (AttentionArgs, self._attention),
            core.kvcache_fwd.default: (KvCacheArgs, self._kvcache),
            core.kvcache_append_fwd.default: (KvCacheArgs, self._kvcache),
        }

    @classmethod
    def _should_skip_dynamo(cls) -> bool:
        return False  # True imports the compiler

    def __torch_dispatch__(
        self,
        func: OpOverload,
        types: Sequence[type],
        args: tuple[object, ...] = (),
        kwargs: dict[str, object] | None = None,
    ) -> object:
        kwargs = kwargs or {}
        if func in self._operators:
            record, plans = self._operators[func]
            with self:
                raise _Answer(plans(record(*args)))
        device = self._device((*args, *kwargs.values()))
        if device is None:
            return func(*args, **kwargs)
        with self:
            result = func.decompose(*args, **kwargs)  # contiguous() and the like may call another operator that copies
        if result is not NotImplemented:
            return result
        if not _allocates(func):
            return func(*args, **kwargs)
        args, kwargs = tree_map_only(Tensor, _on_meta, (args, kwargs))
        if "device" in kwargs:
            kwargs["device"] = torch.device("meta")
        return tree_map_only(Tensor, lambda x: self._without_memory(x, device), func(*args, **kwargs))

    def _attention(self, args: AttentionArgs) -> Plan:
        plans: Plan = {"forward": _plan(calls.forward, args), "backward": None}
        differentiates = self._records and any(x is not None and x.requires_grad for x in args.differentiable())
        if differentiates and args.forward_only() is None:
            out, lse, _, rng_state, *_ = calls.forward_fake(args)
            tensors, options = saved_for_backward(args, out, lse, rng_state)
            plans["backward"] = _plan(calls.backward, backward_args(out, None, tensors, options))
        return plans

    def _kvcache(self, args: KvCacheArgs) -> Plan:
        return {"forward": _plan(calls.kvcache_forward, args)}

    def _device(self, values: Iterable[object]) -> torch.device | None:
        """The device of the GPU that an operator of these arguments computes on, if it does."""
        for value in values:
            if isinstance(value, (list, tuple)):
                value = next(iter(value), None)
            device = value.device if isinstance(value, Tensor) else value
            if isinstance(device, torch.device) and device.type == self.device_type:
                return device
        return None

    def _without_memory(self, x: Tensor, device: torch.device) -> Tensor:
        """A tensor of x's layout on the device, at an address that nothing reads or writes."""
        nbytes = x.untyped_storage().nbytes()
        storage = torch._C._construct_storage_from_data_pointer(self._address, device, nbytes)
        self._address += -(-nbytes // 512) * 512
        empty = torch.empty(0, dtype=x.dtype, device=device)
        return empty.set_(storage, x.storage_offset(), x.size(), x.stride())


def _allocates(func: OpOverload) -> bool:
    """Whether an operator makes new tensors, not views of its arguments or numbers."""
    return any(x.alias_info is None and "Tensor" in str(x.type) for x in func._schema.returns)


def _on_meta(x: Tensor) -> Tensor:
    return torch.empty_strided(x.size(), x.stride(), dtype=x.dtype, device="meta")
