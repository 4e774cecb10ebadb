"""What an install makes of the machine it runs on: the CUDA extension, or the CPU backend only."""

from __future__ import annotations

import os
import shutil
import sys
from dataclasses import dataclass
from pathlib import Path

from binding_build import host_compiler
from errors import BuildError
from kernel_build import usable_gpu_archs
from kernel_manifest import archive_info
from target_env import TargetTorch, find_target_torch
from toolchain import CudaToolkit, chosen_roots, find_toolkit, nvcc_install

KERNEL_KNOBS = ("FLASH_ATTN_CUDA_ARCHS", "FLASH_ATTN_HEAD_DIMS", "FLASH_ATTN_DTYPES")
CPU_ONLY = "FLASH_ATTN_CPU_ONLY=1 installs the CPU backend only."
CPU_KNOBS = ("FLASH_ATTN_CPU_ONLY", "FLASH_ATTENTION_SKIP_CUDA_BUILD")


@dataclass(frozen=True)
class Plan:
    """What this build makes. torch None: the CPU backend only, for the reason given."""

    torch: TargetTorch | None = None
    toolkit: CudaToolkit | None = None
    archive: Path | None = None  # given ready-made
    cpu_only_reason: str = ""


def check_compiler() -> None:
    """nvcc calls a host compiler too; without one either fails after minutes, with its own words."""
    compiler = host_compiler()[0]
    if shutil.which(compiler) is None:
        conda = "conda install -c conda-forge cxx-compiler"
        packages = "apt-get install g++   (RHEL: dnf install gcc-c++; any other: set CXX)"
        raise BuildError(
            f"{compiler}: not found, and it compiles the binding. Install it, then repeat this install:",
            conda if os.environ.get("CONDA_PREFIX") else packages,
        )


def check_owners(torch: TargetTorch) -> None:
    """pip replaces a flash-attn that it installed. Two distributions with the same files break each other, and one
    without a list of its files (conda's) stops pip, after everything is compiled."""
    for name, installer in torch.other_owners:
        tool = "conda remove" if installer == "conda" else "pip uninstall -y"
        raise BuildError(
            f"{name}: installed by {installer or 'pip'} for {torch.executable}, and it has a package flash_attn too. "
            "Remove it, then repeat this install:",
            f"{tool} {name}",
        )


def is_set(name: str) -> bool:
    return os.environ.get(name, "").strip().lower() in ("1", "true", "yes", "on")


def make_plan(root: Path, source_dir: Path) -> Plan:
    """Decide between the CUDA extension and a CPU-only install, before anything is compiled.

    pip hides what a build that succeeds has to say, so a CPU-only install is made only where it is what the user wants:
    asked for, without a GPU, or with a torch that uses none. Raises BuildError where something else is missing.
    """
    for name in CPU_KNOBS:
        if is_set(name):
            return Plan(cpu_only_reason=f"{name} is set")
    torch = find_target_torch(root)
    major = torch.cuda.split(".")[0] if torch and torch.cuda else None
    toolkit = find_toolkit([*sys.path, *(torch.site_dirs if torch else [])], major)
    given = os.environ.get("FLASH_ATTN_KERNEL_ARCHIVE")
    gpus = usable_gpu_archs()
    asked = next((name for name in KERNEL_KNOBS if os.environ.get(name)), None)
    if not (given or toolkit or gpus or asked):
        return Plan(cpu_only_reason="no GPU is visible, and no nvcc is in CUDA_HOME, on PATH or among the pip packages")
    if torch is None:
        raise BuildError(
            f"torch: not found in the environment of {sys.executable}, and the CUDA extension is built against it.\n"
            "uv and other front ends may hide the active environment: FLASH_ATTN_PYTHON names its interpreter.\n"
            f"{CPU_ONLY} Else install torch, then repeat this install:",
            "pip install torch",
        )
    if torch.cuda is None:
        return Plan(cpu_only_reason=f"torch {torch.version} is a CPU build, which sees no GPU")
    if not given and toolkit is None:
        why = f"a GPU is visible (sm_{', sm_'.join(gpus)})" if gpus else f"{asked} asks for kernels"
        raise BuildError(
            f"nvcc: {why} and torch {torch.version} is a CUDA build, but there is no nvcc in CUDA_HOME, on PATH or\n"
            f"among the packages of pip and conda. {CPU_ONLY} Else install nvcc, then repeat this install:",
            nvcc_install(torch.cuda),
        )
    check_compiler()
    check_owners(torch)
    archive = Path(given) if given else None
    if archive is not None and not archive.is_file():
        raise BuildError(f"FLASH_ATTN_KERNEL_ARCHIVE: expected a file, got {archive}")
    cuda = archive_info(archive, source_dir)["cuda"] if archive else toolkit.version
    if cuda.split(".")[0] != major:
        chosen = "unset CUDA_HOME CUDA_PATH; " if chosen_roots() and not given else ""
        raise BuildError(
            f"CUDA: the kernels' CUDA is {cuda} ({archive or toolkit.nvcc}), torch {torch.version} is built for "
            f"{torch.cuda}; the major versions must agree.\n{CPU_ONLY} Else take "
            + (f"an archive of CUDA {major}:" if given else "an nvcc of torch's CUDA, then repeat this install:"),
            "FLASH_ATTN_KERNEL_ARCHIVE=..." if given else chosen + nvcc_install(torch.cuda),
        )
    return Plan(torch, toolkit, archive)
