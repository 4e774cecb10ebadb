"""Facts about the torch of the environment that the package is installed into.

torch is no build requirement: an isolated build would then compile against another torch than the one it runs with.
So the build asks the target environment's interpreter. Under pip that is this interpreter without pip's overlay;
other front ends run the build in a temporary environment, and the target is the active one (VIRTUAL_ENV, CONDA_PREFIX,
PATH), or the checkout's .venv. FLASH_ATTN_PYTHON names the target otherwise.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple

from build_log import say
from errors import BuildError
from toolchain import clean_environment

_PROBE = """
import importlib.metadata, importlib.util, json, re, sys
facts = {"python": "%d.%d" % sys.version_info[:2], "site_dirs": [p for p in sys.path if p], "torch": None}
def owns(distribution):
    if re.sub("[-_.]+", "-", distribution.metadata["Name"] or "").lower() == "flash-attn":
        return distribution.files is None
    return any(str(f) == "flash_attn/__init__.py" for f in distribution.files or [])
facts["other_owners"] = [[d.metadata["Name"], (d.read_text("INSTALLER") or "").strip()]
                         for d in importlib.metadata.distributions() if owns(d)]
if importlib.util.find_spec("torch") is not None:
    import torch
    maps = open("/proc/self/maps").read().split() if sys.platform == "linux" else []
    loaded = lambda name: next((word for word in maps if "/" + name in word and ".so" in word), None)
    abi = {n: getattr(torch._C, "_PYBIND11_" + n, None) for n in ("COMPILER_TYPE", "STDLIB", "BUILD_ABI")}
    facts.update(
        torch=torch.__version__,
        torch_dir=torch.__path__[0],
        cuda=torch.version.cuda,
        hip=torch.version.hip,
        cxx11_abi=int(torch._C._GLIBCXX_USE_CXX11_ABI),
        cudart=loaded("libcudart"),
        libstdcxx=loaded("libstdc++"),
        pybind11_abi={n: v for n, v in abi.items() if v is not None},
    )
print("@facts " + json.dumps(facts))
"""


class Candidate(NamedTuple):
    """An interpreter to ask for its torch, and where it was found."""

    executable: str
    source: str


@dataclass(frozen=True)
class TargetTorch:
    """What one interpreter's torch is built from. cuda is None for a CPU build."""

    executable: str
    version: str
    torch_dir: Path
    cuda: str | None
    cxx11_abi: int
    cudart: Path | None
    libstdcxx: Path | None
    pybind11_abi: dict[str, str]
    site_dirs: list[str]
    other_owners: Sequence[tuple[str, str]] = ()  # (name, installer) of distributions with our files

    @property
    def include_dirs(self) -> list[Path]:
        include = self.torch_dir / "include"
        return [include, include / "torch" / "csrc" / "api" / "include"]

    @property
    def lib_dir(self) -> Path:
        return self.torch_dir / "lib"


def target_environment() -> dict[str, str]:
    """Environment in which the target's interpreter sees what it will see after the install."""
    environment = clean_environment()
    environment["PYTHONDONTWRITEBYTECODE"] = "1"
    return environment


def run_in_empty_folder(command: list[str]) -> subprocess.CompletedProcess:
    """Runs a command of the target, away from this source tree, where it finds no module by chance."""
    with tempfile.TemporaryDirectory() as empty:
        return subprocess.run(command, capture_output=True, text=True, check=False, env=target_environment(), cwd=empty)


def probe(executable: str) -> dict | None:
    """Facts of one interpreter; None if it does not run."""
    try:
        result = run_in_empty_folder([executable, "-c", _PROBE])
    except OSError:
        return None
    for line in result.stdout.splitlines():
        if line.startswith("@facts "):
            return json.loads(line[len("@facts ") :])
    if result.returncode != 0 and "torch" in result.stderr:
        raise BuildError(f"torch: importing it with {executable} fails:\n{result.stderr.strip()[-1500:]}")
    return None


def is_throwaway(prefix: Path) -> bool:
    """Whether `prefix` is an environment that a front end made for this build alone."""
    if sys.prefix == sys.base_prefix:
        return False
    names = prefix.parts
    return prefix.is_relative_to(tempfile.gettempdir()) or any(n.startswith(("builds-v", "build-env-")) for n in names)


def active_environments(environment: Mapping[str, str]) -> Iterator[Candidate]:
    """Environments that the variables name, by themselves or by their bin folder on PATH."""
    for name in ("VIRTUAL_ENV", "CONDA_PREFIX"):
        if environment.get(name):
            yield Candidate(str(Path(environment[name], "bin", "python")), name)
    for folder in map(Path, environment.get("PATH", "").split(os.pathsep)):
        prefix = folder.parent
        if folder.is_absolute() and ((prefix / "pyvenv.cfg").exists() or (prefix / "conda-meta").exists()):
            yield Candidate(str(folder / "python"), "PATH")


def candidate_interpreters(root: Path) -> Iterator[Candidate]:
    """Interpreters to ask, the target's most likely one first."""
    chosen = os.environ.get("FLASH_ATTN_PYTHON")
    if chosen:
        yield Candidate(chosen, "FLASH_ATTN_PYTHON")
        return
    yield Candidate(sys.executable, "the interpreter of this build")
    if is_throwaway(Path(sys.prefix)):
        yield from active_environments(os.environ)
        yield Candidate(str(root / ".venv" / "bin" / "python"), f"{root.name}/.venv")


def find_target_torch(root: Path) -> TargetTorch | None:
    """The torch of the target environment, None if it has none (or only one for other hardware)."""
    own_python = "{}.{}".format(*sys.version_info[:2])
    asked = set()
    for candidate in candidate_interpreters(root):
        if candidate.executable in asked:
            continue
        asked.add(candidate.executable)
        facts = probe(candidate.executable)
        if facts is None or facts["torch"] is None or facts["python"] != own_python or facts["hip"]:
            continue
        say(f"torch {facts['torch']} of {candidate.executable} ({candidate.source})")
        return TargetTorch(
            executable=candidate.executable,
            version=facts["torch"],
            torch_dir=Path(facts["torch_dir"]),
            cuda=facts["cuda"],
            cxx11_abi=facts["cxx11_abi"],
            cudart=Path(facts["cudart"]) if facts["cudart"] else None,
            libstdcxx=Path(facts["libstdcxx"]) if facts["libstdcxx"] else None,
            pybind11_abi=facts["pybind11_abi"],
            site_dirs=facts["site_dirs"],
            other_owners=facts.get("other_owners", ()),
        )
    return None
