"""Names of flash_attn 2.8.3 that can be imported, so that a model's file loads, and raise when they are used."""

from __future__ import annotations

_PARALLEL = "torch.distributed.tensor.parallel.parallelize_module"


def tensor_parallel_class(name: str, module: str, styles: str) -> type:
    """A class that raises NotImplementedError: torch shards `module` itself, by the parallel `styles`."""

    def __init__(self: object, *args: object, **kwargs: object) -> None:
        raise NotImplementedError(
            f"{name}: expected {module} with {_PARALLEL} ({styles}), got {name}: it is not supported"
        )

    return type(name, (), {"__init__": __init__, "__doc__": f"Not supported: {module} with {_PARALLEL} ({styles})."})


def refuse_process_group(process_group: object) -> None:
    """Raise NotImplementedError for one that is not None."""
    if process_group is not None:
        raise NotImplementedError(f"process_group: expected None ({_PARALLEL} shards the module), got a group")
