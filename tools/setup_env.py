"""All set-up for `make demo` and `make test`: an environment, torch, this package. Quick when nothing changed.

The environment is that of FLASH_ATTN_PYTHON, else the active one (VIRTUAL_ENV), else .venv, made here; if the python3
that runs this has torch, .venv borrows its packages. Needs the standard library only. Leaves the interpreter's path
in build/env/python.
"""

from __future__ import annotations

import hashlib
import json
import os
import subprocess
import sys
import sysconfig
import textwrap
import time
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT / "tools"))

from build_log import SHOWN
from errors import BuildError
from install_plan import CPU_KNOBS, KERNEL_KNOBS
from kernel_build import usable_gpu_archs
from machine import visible_gpu_archs
from toolchain import find_toolkit, pip_toolkit

STATE = ROOT / "build" / "env"
OUR_VENV = ROOT / ".venv"
TORCH = os.environ.get("FLASH_ATTN_TORCH", "torch>=2.4")  # installed only where there is none
TOOLS = ["setuptools>=64", "wheel", "ninja>=1.10", "einops", "numpy", "pytest>=7", "tqdm"]
PARALLEL_TESTS = "pytest-xdist>=3.2"  # without it `make test` runs in one process
KNOBS = (*KERNEL_KNOBS, "FLASH_ATTN_KERNEL_ARCHIVE")

_FACTS = """
import importlib.metadata, json, sys
versions = {}
for name in sys.argv[1:]:
    try:
        versions[name] = importlib.metadata.version(name)
    except importlib.metadata.PackageNotFoundError:
        versions[name] = None
print(json.dumps({"versions": versions, "site_dirs": [p for p in sys.path if p]}))
"""


def facts(python: str) -> dict:
    """Versions of torch, this package and the tools that `python` has, and its search path; imports none of them."""
    names = ["torch", "flash_attn", *(tool.split(">=")[0] for tool in TOOLS)]
    result = subprocess.run([python, "-c", _FACTS, *names], capture_output=True, text=True, check=False, cwd=STATE)
    if result.returncode != 0:
        raise BuildError(f"{python}: expected a working Python, got:\n{result.stderr.strip()}")
    return json.loads(result.stdout)


def environment_python() -> str:
    """The interpreter to set up; makes .venv if nothing else is chosen."""
    if os.environ.get("FLASH_ATTN_PYTHON"):
        return os.environ["FLASH_ATTN_PYTHON"]
    active = os.environ.get("VIRTUAL_ENV")
    python = Path(active or OUR_VENV, "bin", "python")
    if not active and not python.exists():
        make_venv()
    return str(python)


def make_venv() -> None:
    own = facts(sys.executable)
    borrow = own["versions"]["torch"] is not None
    print(f"making {OUR_VENV.name}" + (f", with the packages of {sys.executable}" if borrow else ""), flush=True)
    # pip comes with the borrowed packages: Debian's python3 cannot install it without a separate package
    command = [sys.executable, "-m", "venv", *(["--without-pip"] if borrow else []), str(OUR_VENV)]
    result = subprocess.run(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, check=False)
    if result.returncode != 0:
        tried = f"{' '.join(command)} failed (Debian: apt-get install python3-venv)"
        raise BuildError(f"{OUR_VENV.name}: {tried}:\n{result.stdout.strip()}")
    if borrow:  # by a .pth file, for --system-site-packages does not know those of a virtual environment
        site = sysconfig.get_path("purelib", "posix_prefix", vars={"base": str(OUR_VENV)})
        folders = [d for d in own["site_dirs"] if d.endswith(("site-packages", "dist-packages"))]
        Path(site, "borrowed_packages.pth").write_text("\n".join(folders) + "\n", encoding="utf-8")


def pip_install(python: str, requirements: list[str]) -> None:
    """Installs what is missing of the requirements; a package index is asked only then."""
    command = [python, "-m", "pip", "install", "--quiet", "--disable-pip-version-check", *requirements]
    print("pip install " + " ".join(requirements), flush=True)
    result = subprocess.run(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, check=False)
    if result.returncode != 0:
        raise BuildError(
            f"{result.stdout.strip()[-3000:]}\n\n{' '.join(requirements)}: could not be installed into {python}. "
            "Without a package index,\nrun this with a python3 that has them (PYTHON=/path/python3 make ...), or set "
            "FLASH_ATTN_PYTHON to it."
        )


def install_parallel_tests(python: str) -> None:
    """Where it can be installed: nothing else needs it."""
    try:
        pip_install(python, [PARALLEL_TESTS])
    except BuildError:
        print(f"{PARALLEL_TESTS}: could not be installed, `make test` will run in one process", flush=True)


def build_environment(python: str, found: dict) -> dict[str, str]:
    """Environment variables of the install: CPU only without a GPU, unless kernels are asked for. Installs nvcc where
    kernels are to be built without one."""
    environment = {**os.environ, "FLASH_ATTN_PYTHON": python}
    if any(os.environ.get(name) for name in CPU_KNOBS):
        return environment
    if not usable_gpu_archs() and not any(os.environ.get(name) for name in KNOBS):
        print("no GPU visible: installing the CPU backend (FLASH_ATTN_CUDA_ARCHS=90 make ... compiles kernels)")
        return {**environment, "FLASH_ATTN_CPU_ONLY": "1"}
    if not os.environ.get("FLASH_ATTN_KERNEL_ARCHIVE") and find_toolkit(found["site_dirs"]) is None:
        command = [python, "-c", "import torch; print(torch.version.cuda or '')"]
        cuda = subprocess.run(command, capture_output=True, text=True, check=False).stdout.strip()
        nvcc = pip_toolkit(cuda) if cuda else None
        if nvcc is not None:  # else the install itself says what is missing
            pip_install(python, [nvcc])
    return environment


def fingerprint(found: dict, environment: dict[str, str]) -> str:
    """Digest of all that an install depends on; the Python files count only by being installed editable."""
    digest = hashlib.sha256(json.dumps([found["versions"]["torch"], visible_gpu_archs()]).encode())
    for name in (*KNOBS, *CPU_KNOBS, "CUDA_HOME", "CUTLASS_PATH"):
        digest.update(f"{name}={environment.get(name)}\n".encode())
    files = [ROOT / "setup.py", ROOT / "pyproject.toml", *(ROOT / "tools").glob("*.*")]
    files += [path for path in (ROOT / "csrc").rglob("*") if path.is_file()]
    for path in sorted(files):
        digest.update(path.name.encode() + path.read_bytes())
    return digest.hexdigest()


def install(python: str, environment: dict[str, str]) -> None:
    """pip install -e ., showing build/build.log as it grows, for pip keeps a build's output to itself."""
    command = [python, "-m", "pip", "install", "--disable-pip-version-check", "--no-build-isolation", "--no-deps", "-e"]
    print("pip install --no-build-isolation --no-deps -e .", flush=True)
    log, output = ROOT / "build" / "build.log", STATE / "pip.log"
    log.write_text("", encoding="utf-8")
    with output.open("w", encoding="utf-8") as sink, log.open(encoding="utf-8") as lines:
        environment = {**environment, SHOWN: "1"}
        process = subprocess.Popen([*command, str(ROOT)], stdout=sink, stderr=sink, env=environment)
        ended = False
        while not ended:
            ended = process.poll() is not None  # asked first, so that the last lines are shown too
            print(textwrap.indent(lines.read(), "  "), end="", flush=True)
            time.sleep(0 if ended else 0.5)
    if process.returncode != 0:
        raise BuildError(f"{output.read_text(encoding='utf-8').strip()[-6000:]}\n\nThe install failed: docs/build.md.")


def set_up(python: str) -> None:
    """Packages and this checkout, as far as something is missing or has changed."""
    found = facts(python)
    if os.environ.get("FLASH_ATTN_SKIP_INSTALL"):
        if found["versions"]["flash_attn"] is None:
            raise BuildError(f"FLASH_ATTN_SKIP_INSTALL: expected flash_attn in {python}, found none")
        return
    stamp = STATE / (hashlib.sha256(python.encode()).hexdigest()[:16] + ".installed")
    if None in found["versions"].values() or not stamp.exists():
        pip_install(python, [*([] if found["versions"]["torch"] else [TORCH]), *TOOLS])
        install_parallel_tests(python)
        found = facts(python)
    environment = build_environment(python, found)
    wanted = fingerprint(found, environment)
    if found["versions"]["flash_attn"] is None or not stamp.exists() or stamp.read_text(encoding="utf-8") != wanted:
        stamp.unlink(missing_ok=True)
        install(python, environment)
        stamp.write_text(wanted, encoding="utf-8")


def main() -> None:
    STATE.mkdir(parents=True, exist_ok=True)
    try:
        python = environment_python()
        set_up(python)
    except BuildError as error:
        sys.exit(f"error: {error}")
    (STATE / "python").write_text(python + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
