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
import time
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT / "tools"))

from errors import BuildError
from install_plan import CPU_KNOBS, KERNEL_KNOBS
from kernel_build import usable_gpu_archs
from machine import visible_gpu_archs
from toolchain import find_toolkit, nvcc_install, pip_toolkit

STATE = ROOT / "build" / "env"
OUR_VENV = ROOT / ".venv"
TORCH = os.environ.get("FLASH_ATTN_TORCH", "torch>=2.4")
# importable name -> requirement
NEEDED = {
    "setuptools": "setuptools>=64",
    "wheel": "wheel",
    "ninja": "ninja>=1.10",
    "einops": "einops",
    "numpy": "numpy",
    "pytest": "pytest>=7",
    "tqdm": "tqdm",
}
KNOBS = (*KERNEL_KNOBS, "FLASH_ATTN_KERNEL_ARCHIVE")

_FACTS = """
import importlib.metadata, importlib.util, json, sys
names = sys.argv[1:]
def version(name):
    try:
        return importlib.metadata.version(name)
    except importlib.metadata.PackageNotFoundError:
        return None
print(json.dumps({
    "missing": [n for n in names if importlib.util.find_spec(n) is None],
    "torch": version("torch"),
    "installed": version("flash_attn"),
    "setuptools": version("setuptools"),
    "site_dirs": [p for p in sys.path if p],
}))
"""


def facts(python: str) -> dict:
    """Which packages `python` has, without importing them."""
    command = [python, "-c", _FACTS, "torch", *NEEDED]
    result = subprocess.run(command, capture_output=True, text=True, check=False, cwd=STATE)
    if result.returncode != 0:
        raise BuildError(f"{python}: expected a working Python, got:\n{result.stderr.strip()}")
    return json.loads(result.stdout)


def environment_python() -> str:
    """The interpreter to set up; makes .venv if nothing else is chosen."""
    chosen = os.environ.get("FLASH_ATTN_PYTHON")
    if chosen:
        return chosen
    active = os.environ.get("VIRTUAL_ENV")
    if active:
        return str(Path(active, "bin", "python"))
    python = OUR_VENV / "bin" / "python"
    if not python.exists():
        make_venv(python)
    return str(python)


def make_venv(python: Path) -> None:
    own = facts(sys.executable)
    borrow = "torch" not in own["missing"]
    print(f"making {OUR_VENV.name}" + (f", with the packages of {sys.executable}" if borrow else ""), flush=True)
    # pip comes with the borrowed packages: Debian's python3 cannot install it without a package of its own
    options = ["--without-pip"] if borrow else []
    command = [sys.executable, "-m", "venv", *options, str(OUR_VENV)]
    result = subprocess.run(command, capture_output=True, text=True, check=False)
    if result.returncode != 0:
        output = (result.stdout + result.stderr).strip()
        raise BuildError(
            f"{OUR_VENV.name}: {' '.join(command)} failed (Debian: apt-get install python3-venv):\n{output}"
        )
    if borrow:
        site = subprocess.run(
            [str(python), "-c", "import sysconfig; print(sysconfig.get_paths()['purelib'])"],
            capture_output=True,
            text=True,
            check=True,
        ).stdout.strip()
        folders = [d for d in own["site_dirs"] if d.endswith(("site-packages", "dist-packages"))]
        Path(site, "borrowed_packages.pth").write_text("\n".join(folders) + "\n", encoding="utf-8")


def pip_install(python: str, arguments: list[str], help_text: str) -> None:
    command = [python, "-m", "pip", "install", "--disable-pip-version-check", *arguments]
    print("pip install " + " ".join(arguments), flush=True)
    result = subprocess.run(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, check=False)
    if result.returncode != 0:
        raise BuildError(f"{result.stdout.strip()[-3000:]}\n\n{help_text}")


def ensure_packages(python: str) -> dict:
    """Install what is missing of torch and the tools; returns the facts afterwards."""
    found = facts(python)
    if "torch" in found["missing"]:
        pip_install(
            python,
            [TORCH],
            f"torch: could not be installed into {python}. Without a package index, run this with a python3 that has "
            "torch (PYTHON=/path/python3 make ...), or set FLASH_ATTN_PYTHON to it.",
        )
    tools = [NEEDED[name] for name in NEEDED if name in found["missing"]]
    old_setuptools = found["setuptools"] and int(found["setuptools"].split(".")[0]) < 64
    if old_setuptools:
        tools.append(NEEDED["setuptools"])
    if tools:
        pip_install(python, tools, f"Install these into {python} by hand: {' '.join(tools)}")
    return facts(python) if tools or "torch" in found["missing"] else found


def build_environment(python: str, found: dict) -> dict[str, str]:
    """Environment variables of the install: CPU only without a GPU, unless kernels are asked for."""
    environment = {**os.environ, "FLASH_ATTN_PYTHON": python}
    if any(os.environ.get(name) for name in CPU_KNOBS):
        return environment
    if not usable_gpu_archs() and not any(os.environ.get(name) for name in KNOBS):
        print("no GPU visible: installing the CPU backend (FLASH_ATTN_CUDA_ARCHS=90 make ... compiles kernels)")
        return {**environment, "FLASH_ATTN_CPU_ONLY": "1"}
    if not os.environ.get("FLASH_ATTN_KERNEL_ARCHIVE") and find_toolkit(found["site_dirs"]) is None:
        ensure_nvcc(python)
    return environment


def ensure_nvcc(python: str) -> None:
    """Install nvcc of torch's own CUDA version from NVIDIA's pip packages; for a CPU build of torch it is of no use."""
    command = [python, "-c", "import torch; print(torch.version.cuda or '')"]
    cuda = subprocess.run(command, capture_output=True, text=True, check=False).stdout.strip()
    if not cuda:
        return
    help_text = (
        "nvcc: kernels are to be built, but there is no CUDA compiler and none could be installed. Install one:\n"
        f"  {nvcc_install(cuda)}\n"
        "or set CUDA_HOME to a CUDA toolkit, or FLASH_ATTN_CPU_ONLY=1 to install the CPU backend only."
    )
    requirement = pip_toolkit(cuda)
    if requirement is None:
        raise BuildError(help_text)
    pip_install(python, [requirement], help_text)


def fingerprint(found: dict, environment: dict[str, str]) -> str:
    """Digest of all that an install depends on; the Python files count only by being installed editable."""
    digest = hashlib.sha256(json.dumps([found["torch"], visible_gpu_archs()]).encode())
    for name in (*KNOBS, *CPU_KNOBS, "CUDA_HOME", "CUTLASS_PATH"):
        digest.update(f"{name}={environment.get(name)}\n".encode())
    files = [ROOT / "setup.py", ROOT / "pyproject.toml", *(ROOT / "tools").glob("*.*")]
    files += [path for path in (ROOT / "csrc").rglob("*") if path.is_file()]
    for path in sorted(files):
        digest.update(path.name.encode() + path.read_bytes())
    return digest.hexdigest()


def install(python: str, environment: dict[str, str]) -> None:
    """pip install -e ., showing the lines of build/build.log as they come."""
    command = [python, "-m", "pip", "install", "--disable-pip-version-check", "--no-build-isolation", "--no-deps"]
    print("pip install --no-build-isolation --no-deps -e .", flush=True)
    log = ROOT / "build" / "build.log"
    log.parent.mkdir(exist_ok=True)
    log.write_text("", encoding="utf-8")
    output = STATE / "pip.log"
    with output.open("w", encoding="utf-8") as sink:
        process = subprocess.Popen([*command, "-e", str(ROOT)], stdout=sink, stderr=sink, env=environment)
        shown = 0
        while True:
            ended = process.poll() is not None
            lines = log.read_text(encoding="utf-8").splitlines()
            for line in lines[shown:]:
                print(f"  {line}", flush=True)
            shown = len(lines)
            if ended:
                break
            time.sleep(0.5)
    if process.returncode != 0:
        raise BuildError(f"{output.read_text(encoding='utf-8').strip()[-6000:]}\n\nThe install failed: docs/build.md.")


def main() -> None:
    STATE.mkdir(parents=True, exist_ok=True)
    try:
        python = environment_python()
        if os.environ.get("FLASH_ATTN_SKIP_INSTALL"):
            if facts(python)["installed"] is None:
                raise BuildError(f"FLASH_ATTN_SKIP_INSTALL: expected flash_attn in {python}, found none")
        else:
            found = ensure_packages(python)
            environment = build_environment(python, found)
            stamp = STATE / (hashlib.sha256(python.encode()).hexdigest()[:16] + ".installed")
            wanted = fingerprint(found, environment)
            if found["installed"] is None or not stamp.exists() or stamp.read_text(encoding="utf-8") != wanted:
                stamp.unlink(missing_ok=True)
                install(python, environment)
                stamp.write_text(wanted, encoding="utf-8")
    except BuildError as error:
        sys.exit(f"error: {error}")
    (STATE / "python").write_text(python + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
