"""Style of the tree: clang-format for C++ and CUDA, ruff and mypy for Python, check_docs.py.

`python tools/style.py [--fix]`. mypy needs torch; outside of CI it is skipped if it is not installed.
"""

from __future__ import annotations

import argparse
import os
import shutil
import subprocess
import sys
import sysconfig
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
CXX_SUFFIXES = (".h", ".cpp", ".cu", ".cuh")
CXX_FOLDERS = ("csrc", "tests", "examples", "benchmarks")
PYTHON_PATHS = ("setup.py", "flash_attn", "flash_attn_3", "flash_mla", "tests", "benchmarks", "examples", "tools")


def tool_path(name: str) -> str | None:
    """A tool of this interpreter's environment, else of PATH."""
    return shutil.which(name, path=sysconfig.get_path("scripts")) or shutil.which(name)


def cxx_files() -> list[str]:
    files = [path for folder in CXX_FOLDERS for path in (ROOT / folder).rglob("*") if path.suffix in CXX_SUFFIXES]
    return [str(path.relative_to(ROOT)) for path in sorted(files)]


def commands(fix: bool) -> dict[str, list[str]]:
    """Arguments of each check by its tool's name and purpose."""
    python = [path for path in PYTHON_PATHS if (ROOT / path).exists()]
    return {
        "clang-format": ["clang-format", *(["-i"] if fix else ["--dry-run", "-Werror"]), *cxx_files()],
        "ruff check": ["ruff", "check", *(["--fix"] if fix else []), *python],
        "ruff format": ["ruff", "format", *([] if fix else ["--diff"]), *python],
        "mypy": ["mypy"],
        "documents": [sys.executable, str(ROOT / "tools" / "check_docs.py")],
    }


def run(command: list[str]) -> subprocess.CompletedProcess:
    command = [tool_path(command[0]), *command[1:]]
    return subprocess.run(command, cwd=ROOT, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, check=False)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--fix", action="store_true", help="rewrite the files instead of checking them")
    status = 0
    for name, command in commands(parser.parse_args().fix).items():
        if tool_path(command[0]) is None:
            if name == "mypy" and os.environ.get("CI") != "true":
                print("mypy: skipped, not installed (pip install '.[style]')")
                continue
            sys.exit(f"error: {command[0]}: not found; pip install '.[style]' installs the pinned version")
        result = run(command)
        print(f"{name}: {'ok' if result.returncode == 0 else result.stdout.strip()}")
        status |= result.returncode
    sys.exit(status)


if __name__ == "__main__":
    main()
