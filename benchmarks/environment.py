"""What a result was measured on: device, driver, versions, commit."""

from __future__ import annotations

import contextlib
import datetime
import importlib.metadata
import platform
import sys

import torch
from shared import ROOT
from timing import read_nvidia_smi

sys.path.append(str(ROOT / "tools"))

from machine import commit_of

PEER_PACKAGES = ("triton", "flash_attn_3", "flash-attn-4", "nvidia-cudnn-frontend")


def git_state():
    """(commit, whether files differ from it) of this tree; (None, None) outside a checkout."""
    commit = commit_of(ROOT)
    return (None, None) if commit == "unknown" else (commit.removesuffix("-dirty"), commit.endswith("-dirty"))


def describe_device(device):
    if device.type != "cuda":
        return {"type": "cpu", "name": platform.processor() or platform.machine(), "threads": torch.get_num_threads()}
    properties = torch.cuda.get_device_properties(device)
    return {
        "type": "cuda",
        "name": properties.name,
        "capability": f"{properties.major}.{properties.minor}",
        "multiprocessors": properties.multi_processor_count,
        "memory_gib": round(properties.total_memory / 2**30, 1),
        "driver": read_nvidia_smi("driver_version", device),
        "power_limit_w": read_nvidia_smi("power.limit", device),
    }


def describe_versions():
    import flash_attn

    versions = {
        "flash_attn": flash_attn.__version__,
        "python": platform.python_version(),
        "torch": torch.__version__,
        "cuda": torch.version.cuda,
        "cudnn": torch.backends.cudnn.version() if torch.backends.cudnn.is_available() else None,
    }
    for package in PEER_PACKAGES:
        with contextlib.suppress(importlib.metadata.PackageNotFoundError):
            versions[package] = importlib.metadata.version(package)
    return versions, flash_attn.__build__


def describe_run(device, versions):
    """When, on what device, which versions, of which commit."""
    commit, dirty = git_state()
    return {
        "started": datetime.datetime.now(datetime.timezone.utc).isoformat(timespec="seconds"),
        "device": describe_device(device),
        "versions": versions,
        "git": {"commit": commit, "dirty": dirty},
    }


def describe_origin(device):
    """What every result of the package begins with: its build too, which knows the commit of a tree without history."""
    versions, build = describe_versions()
    run = describe_run(device, versions)
    run["git"]["commit"] = run["git"]["commit"] or build.get("commit")
    return {**run, "build": build}
