"""Finds what compiles the kernels: nvcc, the CUDA headers and the CUTLASS headers."""

from __future__ import annotations

import glob
import os
import platform
import re
import shutil
import subprocess
import sys
import tempfile
import zipfile
from dataclasses import dataclass
from pathlib import Path

from build_folder import alone_in
from errors import BuildError

CUTLASS_PIN = Path(__file__).resolve().parent.parent / "third_party" / "cutlass.txt"
CUTLASS_WHEEL_INCLUDE = "cutlass_library/source/include"

# How NVIDIA's pip packages lay out a toolkit: one folder per CUDA major version, or one per component (CUDA 12).
PIP_TOOLKIT_PATTERNS = ("nvidia/cu[0-9]*", "nvidia/cuda_nvcc", "nvidia/cuda_runtime")


@dataclass(frozen=True)
class CudaToolkit:
    nvcc: Path
    root: Path
    version: str  # "13.0"
    full_version: str  # "13.0.88"

    @property
    def major(self) -> str:
        return self.version.split(".")[0]

    @property
    def include(self) -> Path:
        folders = include_folders(self.root)
        return next((folder for folder in folders if (folder / "cuda_runtime_api.h").is_file()), folders[-1])


@dataclass(frozen=True)
class CutlassHeaders:
    include: Path
    version: str  # "4.2.0"


def include_folders(root: Path) -> list[Path]:
    """Where a toolkit may keep its headers: conda has them in a folder of the platform."""
    target = {"aarch64": "sbsa"}.get(platform.machine(), platform.machine())
    return [root / "targets" / f"{target}-linux" / "include", root / "include"]


def pip_toolkit_roots(site_dirs: list[str]) -> list[Path]:
    """Toolkit folders of NVIDIA's pip packages under `site_dirs`, newest CUDA first."""
    found = []
    for pattern in PIP_TOOLKIT_PATTERNS:
        for site in dict.fromkeys(site_dirs):
            found += sorted(map(Path, glob.glob(os.path.join(glob.escape(site), pattern))), reverse=True)
    return found


def chosen_roots() -> list[Path]:
    return [Path(os.environ[name]) for name in ("CUDA_HOME", "CUDA_PATH") if os.environ.get(name)]


def other_roots(site_dirs: list[str]) -> list[Path]:
    """Toolkits of NVIDIA's pip packages, of conda, and in the default folder."""
    conda = [Path(os.environ["CONDA_PREFIX"])] if os.environ.get("CONDA_PREFIX") else []
    return [*pip_toolkit_roots(site_dirs), *conda, Path("/usr/local/cuda")]


def find_toolkit(site_dirs: list[str], major: str | None = None) -> CudaToolkit | None:
    """The nvcc of CUDA_HOME; else the first of CUDA `major` on PATH or in other_roots(), else the first; else None."""
    on_path = shutil.which("nvcc")
    others = [*([Path(on_path)] if on_path else []), *(root / "bin" / "nvcc" for root in other_roots(site_dirs))]
    for nvcc in (root / "bin" / "nvcc" for root in chosen_roots()):
        if os.access(nvcc, os.X_OK):
            return describe_toolkit(nvcc)
    first = None
    for nvcc in filter(lambda path: os.access(path, os.X_OK), dict.fromkeys(others)):
        toolkit = describe_toolkit(nvcc)
        if major in (None, toolkit.major):
            return toolkit
        first = first or toolkit
    return first


def pip_toolkit(cuda: str) -> str | None:
    """The pip requirement of nvcc with all that the kernels need of CUDA `cuda`; None where no such packages exist."""
    # NVIDIA's pip packages hold nvcc itself from CUDA 13 on.
    return f"cuda-toolkit[nvcc,nvvm,crt,cccl,cudart]=={cuda}.*" if int(cuda.split(".")[0]) >= 13 else None


def nvcc_install(cuda: str) -> str:
    """The command that installs nvcc of CUDA `cuda`."""
    requirement = pip_toolkit(cuda)
    if requirement:
        return f"pip install '{requirement}'"
    package = f"cuda-toolkit-{cuda.replace('.', '-')}"
    return f"conda install -c nvidia cuda-toolkit={cuda}   (or, from NVIDIA's repository: apt-get install {package})"


def describe_toolkit(nvcc: Path) -> CudaToolkit:
    """Version and root of `nvcc`. The root is asked of nvcc itself: the nvcc on PATH may be a link or a wrapper."""
    version = subprocess.run([str(nvcc), "--version"], capture_output=True, text=True, check=False)
    release = re.search(r"release (\d+\.\d+), V([\d.]+)", version.stdout)
    if version.returncode != 0 or release is None:
        raise BuildError(f"nvcc: {nvcc} --version failed: {(version.stderr or version.stdout).strip()}")
    with tempfile.TemporaryDirectory() as folder:
        source = Path(folder, "probe.cu")
        source.touch()
        command = [str(nvcc), "--dryrun", "-c", str(source), "-o", str(Path(folder, "probe.o"))]
        dry_run = subprocess.run(command, capture_output=True, text=True, check=False)
    top = re.search(r"^#\$ TOP=(.+)$", dry_run.stderr, re.MULTILINE)
    root = Path(top.group(1).strip()) if top else nvcc.parent.parent
    return CudaToolkit(nvcc, root.resolve(), release.group(1), release.group(2))


def cuda_header_dirs(site_dirs: list[str], cuda_major: str) -> list[Path]:
    """Include folders that together hold the CUDA runtime headers of `cuda_major`, without asking for nvcc."""
    roots = [*chosen_roots(), *other_roots(site_dirs)]
    includes = [include for root in roots for include in include_folders(root) if include.is_dir()]
    runtime = [d for d in includes if _runtime_major(d) == cuda_major]
    compiler = [d for d in includes if (d / "crt" / "host_defines.h").is_file()]
    if runtime and (runtime[0] / "crt" / "host_defines.h").is_file():
        return runtime[:1]
    if runtime and compiler:
        return [runtime[0], compiler[0]]
    raise BuildError(
        f"CUDA headers: expected cuda_runtime_api.h and crt/host_defines.h of CUDA {cuda_major}, found not all",
        f"pip install {' '.join(map(repr, header_packages(cuda_major)))}",
    )


def header_packages(cuda_major: str) -> list[str]:
    """The pip requirements of the headers that the binding needs."""
    if cuda_major == "12":
        return ["nvidia-cuda-runtime-cu12", "nvidia-cuda-nvcc-cu12"]
    return [f"nvidia-cuda-runtime=={cuda_major}.*", f"nvidia-cuda-crt=={cuda_major}.*"]


def _runtime_major(include: Path) -> str | None:
    header = include / "cuda_runtime_api.h"
    if not header.is_file():
        return None
    version = re.search(r"#define\s+CUDART_VERSION\s+(\d+)", header.read_text(errors="replace"))
    return str(int(version.group(1)) // 1000) if version else None


def find_cutlass(root: Path, site_dirs: list[str], download_dir: Path) -> CutlassHeaders:
    """CUTLASS headers: CUTLASS_PATH, third_party/cutlass, the installed wheel, else the pinned wheel, downloaded."""
    chosen = os.environ.get("CUTLASS_PATH")
    if chosen:
        for include in (Path(chosen, "include"), Path(chosen)):
            if (include / "cutlass" / "version.h").is_file():
                return _describe_cutlass(include)
        raise BuildError(f"CUTLASS_PATH: expected a folder with include/cutlass/version.h, got {chosen}")
    places = [root / "third_party" / "cutlass" / "include"]
    places += [Path(site, CUTLASS_WHEEL_INCLUDE) for site in site_dirs]
    unpacked = download_dir / CUTLASS_WHEEL_INCLUDE
    for include in [*places, unpacked]:
        if (include / "cutlass" / "version.h").is_file():
            return _describe_cutlass(include)
    with alone_in(download_dir):
        if not (unpacked / "cutlass" / "version.h").is_file():
            _download_cutlass(download_dir)
    return _describe_cutlass(unpacked)


def pinned_cutlass() -> str:
    """The pinned pip package, as "nvidia-cutlass==VERSION"."""
    lines = CUTLASS_PIN.read_text(encoding="utf-8").splitlines()
    return next(line.split()[0] for line in lines if line and not line.startswith("#"))


def _describe_cutlass(include: Path) -> CutlassHeaders:
    text = (include / "cutlass" / "version.h").read_text(encoding="utf-8")
    numbers = [re.search(rf"#define CUTLASS_{part}\s+(\d+)", text) for part in ("MAJOR", "MINOR", "PATCH")]
    if not all(numbers):
        raise BuildError(f"CUTLASS: expected version numbers in {include}/cutlass/version.h, found none")
    return CutlassHeaders(include.resolve(), ".".join(n.group(1) for n in numbers))


def _download_cutlass(folder: Path) -> None:
    """Fetch the pinned wheel with pip (or uv, where there is no pip), check its hash, unpack the headers only."""
    arguments = ["--quiet", "--no-deps", "--require-hashes", "-r", str(CUTLASS_PIN)]
    pip = [sys.executable, "-m", "pip", "download", "--disable-pip-version-check", *arguments, "-d", str(folder)]
    attempts = [(pip, clean_environment())]
    uv = os.environ.get("UV") or shutil.which("uv")
    if uv:
        attempts.append(([uv, "pip", "install", *arguments, "--target", str(folder)], dict(os.environ)))
    failures = []
    for command, environment in attempts:
        result = subprocess.run(command, capture_output=True, text=True, check=False, env=environment)
        if result.returncode == 0:
            for wheel in folder.glob("nvidia_cutlass-*.whl"):
                _unpack_headers(wheel, folder)
            return
        failures.append(result.stderr.strip()[-400:])
    requirement = pinned_cutlass()
    raise BuildError(
        "CUTLASS headers: found none, and the download failed. Give them in one of these ways:\n"
        "  1. CUTLASS_PATH=/folder/of/a/cutlass/checkout (4.2 or newer)\n"
        "  2. a checkout (or a link to one) at third_party/cutlass\n"
        f"  3. pip install --no-deps {requirement}\n"
        f"  4. a package index that pip reaches, for the download of {requirement}\n"
        + "\n".join(f"The download said: {failure}" for failure in failures)
    )


def _unpack_headers(wheel: Path, folder: Path) -> None:
    with zipfile.ZipFile(wheel) as archive:
        headers = [n for n in archive.namelist() if n.startswith(CUTLASS_WHEEL_INCLUDE + "/") or "LICENSE" in n]
        archive.extractall(folder, headers)
    wheel.unlink()


def clean_environment() -> dict[str, str]:
    """This process's environment without the overlay that pip's build isolation puts on PYTHONPATH."""
    environment = dict(os.environ)
    entries = environment.get("PYTHONPATH", "").split(os.pathsep)
    kept = [entry for entry in entries if entry and "pip-build-env-" not in entry]
    if len(kept) != len([entry for entry in entries if entry]):
        environment.pop("PYTHONNOUSERSITE", None)
    environment.pop("PYTHONPATH", None)
    if kept:
        environment["PYTHONPATH"] = os.pathsep.join(kept)
    return environment
