"""Compiled kernels of the laboratory as one file: made where nvcc is, measured where a GPU is.

`run_all.py --build-only` writes it: the libraries of ablation and sweep, an index of what they are built from, the
program of the teaching kernels. `run_all.py --kernels FILE` unpacks it and tells the programs by
FLASH_ATTN_LAB_KERNELS.
"""

from __future__ import annotations

import hashlib
import json
import os
import subprocess
import tarfile
import time
from pathlib import Path

import ablate
import tile_designs
from kernel_library import INDEX, KERNELS, ROOT, BuildError, Compiler, by_library, source_key

MINIMAL = ROOT / "examples" / "minimal"
MINIMAL_ARCH = "sm_90a"
# Which experiments need what.
DESIGNS = {
    "ablate": lambda: [entry.design for entries in ablate.groups().values() for entry in entries],
    "sweep": lambda: [entry.design for entries in tile_designs.groups().values() for entry in entries],
}
PROGRAM = "minimal"


def program_key():
    """What the teaching program is built from."""
    digest = hashlib.sha256()
    for path in sorted([*MINIMAL.glob("*.h"), *MINIMAL.glob("*.cu"), MINIMAL / "run.sh"]):
        digest.update(path.name.encode() + path.read_bytes())
    return digest.hexdigest()[:12]


def build_program(compiler, folder):
    """The folder of the teaching program, compiled unless it is there."""
    place = folder / f"{PROGRAM}-{program_key()}"
    if not (place / "budget.md").is_file():
        environment = {**os.environ, "CUDA_HOME": str(compiler.toolkit.root), "ARCH": MINIMAL_ARCH, "BUILD_ONLY": "1"}
        subprocess.run(["bash", str(MINIMAL / "run.sh"), str(place)], env=environment, check=True)
    return place


def build(names, archive, progress=print, jobs=None, folder=KERNELS):
    """Compiles what the experiments `names` need, and packs it; returns whether everything compiled."""
    start = time.monotonic()
    compiler = Compiler(folder=folder)
    designs = [design for name in names if name in DESIGNS for design in DESIGNS[name]()]
    compiled = compiler.compile_all(designs, progress, jobs)
    program = build_program(compiler, folder) if PROGRAM in names else None
    index = {"versions": compiler.versions, "kernels": {}, "program": program_key() if program else None}
    for library, same in by_library(compiled, compiler.library).items():
        index["kernels"][source_key(same[0])] = {"file": library.name, "facts": compiled[same[0]]}
    pack(archive, index, folder, program)
    size = archive.stat().st_size / 1e6
    progress(f"{archive}: {len(index['kernels'])} kernels, {size:.1f} MB, {time.monotonic() - start:.0f} s")
    return set(compiled) == set(designs)


def pack(archive, index, folder, program):
    """xz finds in a library what the one before it has too: the CUDA runtime, most of each."""
    archive.parent.mkdir(parents=True, exist_ok=True)
    text = archive.with_suffix(".index")
    text.write_text(json.dumps(index, indent=1) + "\n", encoding="utf-8")
    with tarfile.open(archive, "w:xz", preset=6) as packed:
        packed.add(text, INDEX)
        for entry in index["kernels"].values():
            packed.add(folder / entry["file"], entry["file"])
        if program:
            packed.add(program, PROGRAM)
    text.unlink()


def unpack(archive, folder):
    """Unpacks into `folder`; BuildError if the teaching program is of other sources (libraries are looked up so)."""
    with tarfile.open(archive) as packed:
        if hasattr(tarfile, "data_filter"):
            packed.extractall(folder, filter="data")
        else:  # Python before its security fixes of 2023; an archive of one's own
            packed.extractall(folder)
    program = json.loads(Path(folder, INDEX).read_text(encoding="utf-8"))["program"]
    if program not in (None, program_key()):
        raise BuildError(f"{archive}: built from other sources of examples/minimal; build it again")
