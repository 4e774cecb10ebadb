"""Compile a launch of a Triton kernel for a GPU that is not there, from CPU tensors; written for Triton 3.6."""

from __future__ import annotations

import torch

ALIGNED = [["tt.divisibility", 16]]
TYPES = {torch.bfloat16: "bf16", torch.float16: "fp16", torch.float32: "fp32"}


def type_of(value):
    """How a signature calls a value."""
    if isinstance(value, torch.Tensor):
        return f"*{TYPES[value.dtype]}"
    if isinstance(value, tuple):
        return tuple(map(type_of, value))
    if isinstance(value, (int, float)):
        return "fp32" if isinstance(value, float) else "i32"
    return f"tensordesc<{TYPES[value.base.dtype]}{list(value.block_shape)}>"  # a TensorDescriptor


def is_aligned(value):
    if isinstance(value, torch.Tensor):
        return value.data_ptr() % 16 == 0
    return isinstance(value, int) and value % 16 == 0


def compile_launch(launch, tile, capability=90):
    """The compiled kernel of a Launch (triton_common.py) with a tile, specialised as Triton's JIT would."""
    import triton
    from triton.backends.compiler import GPUTarget
    from triton.compiler import ASTSource

    options = launch.options(tile)
    settings = {name: options.pop(name) for name in ("num_warps", "num_stages")}
    values = [*launch.described(tile), *launch.arguments]
    names = launch.kernel.arg_names[: len(values)]
    ones = {name: 1 for name, value in zip(names, values) if isinstance(value, int) and value == 1}
    parameters = {param.name: param.default for param in launch.kernel.params[len(values) :]}
    constants = {**parameters, **options, **ones}
    signature = {name: "constexpr" if name in constants else type_of(v) for name, v in zip(names, values)}
    signature.update(dict.fromkeys(parameters, "constexpr"))
    attributes = {(i,): ALIGNED for i, value in enumerate(values) if is_aligned(value)}
    for i, value in enumerate(values):
        if isinstance(value, tuple):
            attributes.update({(i, j): ALIGNED for j, part in enumerate(value) if is_aligned(part)})
    source = ASTSource(launch.kernel, signature, constexprs=constants, attrs=attributes)
    return triton.compile(source, target=GPUTarget("cuda", capability, 32), options=settings)
