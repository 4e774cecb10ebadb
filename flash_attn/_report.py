"""What an issue report needs to know: this installation, its kernels, PyTorch, the GPUs, and whether it computes."""

from __future__ import annotations

import importlib
import importlib.util
import os
import platform
import sys
from pathlib import Path
from typing import Any

import torch

import flash_attn
from flash_attn import _self_check, backends

ORIGIN = "not the Dao-AILab package"
Report = dict[str, Any]  # of types that JSON knows

_CUDA_DTYPES = {"fp16": torch.float16, "bf16": torch.bfloat16}
_LEAST_CAPABILITY = (8, 0)


def kernel_families(archs: list[str]) -> list[str]:
    """The kernel families of a build for these architectures."""
    families = ["mma_sync (sm_80 and newer)"] if archs else []
    return families + (["wgmma (sm_90)"] if "90" in archs else [])


def machine_code(capability: str, archs: list[str]) -> str | None:
    """The architecture of `archs` whose machine code a GPU runs: of its major version, the newest that it knows."""
    major, minor = map(int, capability.split("."))
    known = [arch for arch in map(int, archs) if arch // 10 == major and arch % 10 <= minor]
    return f"sm_{max(known)}" if known else None


def _is_stand_in() -> bool:
    try:
        return backends.is_stand_in(importlib.import_module("flash_attn_2_cuda"))
    except ImportError:
        return False


def extension_state() -> tuple[str, bool]:
    """(where the CUDA extension is or why it is missing, whether that is as it should be)."""
    module = backends.cuda_extension()
    if module is not None:
        return str(module.__file__), True
    if importlib.util.find_spec("flash_attn_2_cuda") is None or _is_stand_in():
        return "not installed: this flash_attn has its CPU backend only", True
    try:
        backends.get("cuda")
    except RuntimeError as error:
        return f"installed, but cannot be imported: {error.__cause__}", False
    raise AssertionError("backends.get must raise where backends.cuda_extension gives None")


def gpus() -> list[Report]:
    """Of each visible GPU: index, name, compute capability, multiprocessors, memory in GiB, which code it runs."""
    found = []
    for index in range(torch.cuda.device_count()):
        properties = torch.cuda.get_device_properties(index)
        found.append(
            {
                "index": index,
                "name": properties.name,
                "capability": f"{properties.major}.{properties.minor}",
                "multiprocessors": properties.multi_processor_count,
                "memory_gib": round(properties.total_memory / 2**30, 1),
                "code": machine_code(f"{properties.major}.{properties.minor}", flash_attn.__build__["archs"]),
            }
        )
    return found


def _checks() -> list[_self_check.CheckResult]:
    """The CPU always; each GPU that the kernels of this build may run on."""
    results = _self_check.check_device("cpu", (torch.float32, torch.bfloat16), (64,))
    if backends.cuda_extension() is None:
        return results
    dtypes = tuple(_CUDA_DTYPES[name] for name in flash_attn.__build__["dtypes"] if name in _CUDA_DTYPES)
    for index in range(torch.cuda.device_count()):
        if torch.cuda.get_device_capability(index) >= _LEAST_CAPABILITY:
            head_dims = tuple(flash_attn.__build__["head_dims"])
            results += _self_check.check_device(f"cuda:{index}", dtypes, head_dims)
    return results


def collect() -> Report:
    """All of it, of types that JSON knows. "ok" is False where a check fails or the extension cannot be imported."""
    build = flash_attn.__build__
    extension, extension_ok = extension_state()
    checks = _checks()
    return {
        "ok": extension_ok and all(check.ok for check in checks),
        "package": {
            "release": build["release"],
            "api": flash_attn.__version__,
            "origin": ORIGIN,
            "location": str(Path(flash_attn.__file__).parent),
            "commit": build["commit"],
        },
        "build": {
            "backends": build["backends"],
            "extension": extension,
            "families": kernel_families(build["archs"]),
            **{name: build[name] for name in ("archs", "head_dims", "dtypes", "cuda", "torch")},
        },
        "environment": {
            "torch": torch.__version__,
            "torch_cuda": torch.version.cuda,
            "python": sys.version.split()[0],
            "platform": platform.platform(),
            "variables": {k: v for k, v in sorted(os.environ.items()) if k.startswith("FLASH_ATTN")},
        },
        "gpus": gpus(),
        "checks": [check._asdict() for check in checks],
    }


def _line(name: str, value: object) -> str:
    if isinstance(value, (list, tuple)):
        value = ", ".join(map(str, value))
    return f"{name:<12} {'none' if value in (None, '') else value}"


def _check_lines(checks: list[Report]) -> list[str]:
    """One line per device and kind of call, with the largest error; one more for each failure and each limit."""
    lines: list[str] = []
    groups: dict[tuple[str, str], list[Report]] = {}
    for check in checks:
        groups.setdefault((check["device"], check["call"]), []).append(check)
    for (device, call), members in groups.items():
        failed = [check for check in members if not check["ok"]]
        errors = [check["error"] for check in members if check["error"] is not None]
        state = f"FAILED {len(failed)} of {len(members)}" if failed else f"ok, {len(members)} calls"
        largest = f", largest error {max(errors):.1e}" if errors else ""
        lines.append(f"  {device:<8} {call:<18} {state}{largest}")
        for check in members:
            if check["message"] or not check["ok"]:
                reason = check["message"] or f"error {check['error']:.1e}"
                lines.append(f"    {check['dtype']}, head dim {check['head_dim']}: {reason}")
    return lines


def text(report: Report) -> str:
    """The report for people, to be pasted into an issue."""
    package, build, environment = report["package"], report["build"], report["environment"]
    lines = [
        f"flash_attn {package['release']}: {package['origin']}, with the API of flash_attn {package['api']}",
        _line("location", package["location"]),
        _line("commit", package["commit"]),
        _line("backends", build["backends"]),
        _line("extension", build["extension"]),
        _line("families", build["families"]),
        _line("archs", build["archs"]),
        _line("head dims", build["head_dims"]),
        _line("dtypes", build["dtypes"]),
        _line("built with", f"CUDA {build['cuda']}, torch {build['torch']}" if build["cuda"] else None),
        _line("torch", f"{environment['torch']}, CUDA {environment['torch_cuda']}"),
        _line("python", f"{environment['python']} on {environment['platform']}"),
        *(_line("variable", f"{name}={value}") for name, value in environment["variables"].items()),
        *(
            _line(
                f"GPU {gpu['index']}",
                f"{gpu['name']}, compute capability {gpu['capability']}, {gpu['multiprocessors']} multiprocessors, "
                f"{gpu['memory_gib']} GiB, {gpu['code'] or 'no'} machine code",
            )
            for gpu in report["gpus"]
        ),
        *([] if report["gpus"] else [_line("GPU", None)]),
        "self-check against float32 on the CPU:",
        *_check_lines(report["checks"]),
        "all checks passed" if report["ok"] else "SELF-CHECK FAILED",
    ]
    return "\n".join(lines)
