"""Compiled kernels of the laboratory as one file: made where nvcc is, measured where a GPU is.

`run_all.py --build-only` writes it: the libraries of ablation and sweep, an index of what they are built from, the
program of the teaching kernels. `run_all.py --kernels FILE` unpacks it and tells the programs by
FLASH_ATTN_LAB_KERNELS.
"""

from __future__ import annotations

import hashlib
import json
import os
import shutil
import subprocess
import tempfile
import time
from pathlib import Path

import ablate
import tile_designs
from kernel_library import INDEX, KERNELS, ROOT, BuildError, Compiler, library_file, source_key

MINIMAL = ROOT / "examples" / "minimal"
MINIMAL_ARCH = "sm_90a"
# Which experiments need what.
DESIGNS = {
    "ablate": lambda: [entry.design for entries in ablate.groups().values() for entry in entries],
    "sweep": lambda: [entry.design for entries in tile_designs.groups().values() for entry in entries],
}
PROGRAM, SUFFIX = "minimal", ".tar.xz"


def program_key():
    """What the teaching program is built from."""
    digest = hashlib.sha256()
    for path in sorted([*MINIMAL.glob("*.h"), *MINIMAL.glob("*.cu"), MINIMAL / "run.sh"]):
        digest.update(path.name.encode() + path.read_bytes())
    return digest.hexdigest()[:12]


def build_program(compiler, place):
    """Compiles the teaching program into a folder."""
    environment = {**os.environ, "CUDA_HOME": str(compiler.toolkit.root), "ARCH": MINIMAL_ARCH, "BUILD_ONLY": "1"}
    subprocess.run(["bash", str(MINIMAL / "run.sh"), str(place)], env=environment, check=True)


def build(names, archive, progress=print, jobs=None, folder=KERNELS):
    """Compiles what the experiments `names` need, and packs it; returns whether everything compiled."""
    start = time.monotonic()
    compiler = Compiler(folder=folder)
    designs = [design for name in names if name in DESIGNS for design in DESIGNS[name]()]
    compiled = compiler.compile_all(designs, progress, jobs)
    index = {"versions": compiler.versions, "kernels": {source_key(d): facts for d, facts in compiled.items()}}
    with tempfile.TemporaryDirectory() as packed:
        for design in compiled:
            shutil.copy(compiler.library(design), library_file(packed, design))
        if PROGRAM in names:
            build_program(compiler, Path(packed, PROGRAM))
            index["program"] = program_key()
        Path(packed, INDEX).write_text(json.dumps(index, indent=1) + "\n", encoding="utf-8")
        archive.parent.mkdir(parents=True, exist_ok=True)
        shutil.make_archive(str(archive).removesuffix(SUFFIX), "xztar", packed)  # xz: libraries have much in common
    size = archive.stat().st_size / 1e6
    progress(f"{archive}: {len(index['kernels'])} kernels, {size:.1f} MB, {time.monotonic() - start:.0f} s")
    return set(compiled) == set(designs)


def unpack(archive, folder):
    """Unpacks into `folder`; BuildError if the teaching program is of other sources (libraries are looked up so)."""
    shutil.unpack_archive(archive, folder)
    program = json.loads(Path(folder, INDEX).read_text(encoding="utf-8")).get("program")
    if program not in (None, program_key()):
        raise BuildError(f"{archive}: built from other sources of examples/minimal; build it again")
