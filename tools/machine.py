"""What this machine offers a build: cores, memory, visible GPUs, and the commit being built."""

from __future__ import annotations

import os
import resource
import shutil
import subprocess
from pathlib import Path

from errors import BuildError

# cicc and ptxas of the largest instantiation peak below this (measured with CUDA 13.0).
BYTES_PER_JOB = 3 * 2**30


def available_memory_bytes(meminfo: Path = Path("/proc/meminfo"), cgroup: Path = Path("/sys/fs/cgroup")) -> int | None:
    """Memory that new processes can take: what the kernel calls available, within the container's limit."""
    limits = []
    try:
        for line in meminfo.read_text().splitlines():
            if line.startswith("MemAvailable:"):
                limits.append(int(line.split()[1]) * 1024)
    except OSError:
        pass
    try:
        statistics = dict(line.split() for line in (cgroup / "memory.stat").read_text().splitlines())
        used = int((cgroup / "memory.current").read_text()) - int(statistics["file"])  # file pages are reclaimable
        limits.append(int((cgroup / "memory.max").read_text()) - used)
    except (OSError, ValueError, KeyError):
        pass  # no container, or one without a limit ("max")
    return min(limits) if limits else None


def parallel_jobs(environ=os.environ, memory_bytes: int | None = None) -> int:
    """Compiler processes to run at once: MAX_JOBS if set, else what both cores and memory carry."""
    requested = environ.get("MAX_JOBS")
    if requested:
        if not requested.isdigit() or int(requested) < 1:
            raise BuildError(f"MAX_JOBS: expected a positive integer, got {requested!r}")
        return int(requested)
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    memory = available_memory_bytes() if memory_bytes is None else memory_bytes
    return cores if memory is None else max(1, min(cores, memory // BYTES_PER_JOB))


def visible_gpu_archs() -> list[str]:
    """Compute capabilities of this machine's GPUs as ["80", "90"], empty without a driver."""
    smi = shutil.which("nvidia-smi")
    if smi is None:
        return []
    query = [smi, "--query-gpu=compute_cap", "--format=csv,noheader"]
    result = subprocess.run(query, capture_output=True, text=True, check=False)
    if result.returncode != 0:
        return []
    capabilities = {line.strip() for line in result.stdout.splitlines() if line.strip()}
    return sorted((c.replace(".", "") for c in capabilities if c.replace(".", "").isdigit()), key=int)


def cpu_seconds() -> float:
    """Of all processes that this one has started and that have ended."""
    usage = resource.getrusage(resource.RUSAGE_CHILDREN)
    return usage.ru_utime + usage.ru_stime


def commit_of(root: Path) -> str:
    """FLASH_ATTN_BUILD_COMMIT if set (a tree that travels without its history), else the commit checked out at `root`,
    with "-dirty" if files differ from it; "unknown" outside a checkout."""
    if os.environ.get("FLASH_ATTN_BUILD_COMMIT"):
        return os.environ["FLASH_ATTN_BUILD_COMMIT"]

    def git(*arguments: str) -> str | None:
        command = ["git", "-C", str(root), *arguments]
        try:
            result = subprocess.run(command, capture_output=True, text=True, check=False)
        except OSError:
            return None
        return result.stdout.strip() if result.returncode == 0 else None

    if not (root / ".git").exists():  # an unpacked archive inside someone else's checkout has no commit
        return "unknown"
    commit = git("rev-parse", "--short=12", "HEAD")
    if commit is None:
        return "unknown"
    return f"{commit}-dirty" if git("status", "--porcelain", "--untracked-files=no") else commit
