"""Compiles tile configurations of the forward, each into a shared library without torch, called through ctypes."""

from __future__ import annotations

import ctypes
import subprocess
import sys
import tempfile
import time
from concurrent.futures import ThreadPoolExecutor, as_completed
from dataclasses import dataclass
from pathlib import Path

from sweep_configs import Alternative

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT / "tools"))

from errors import BuildError
from kernel_build import COMPILE_FLAGS
from machine import parallel_jobs
from resources import parse_ptxas_log, spill_bytes
from toolchain import find_cutlass, find_toolkit

LAUNCHER = Path(__file__).resolve().parent / "sweep_launcher.cu"
CSRC = ROOT / "csrc" / "flash_attn"


@dataclass
class Compiled:
    """One library: its tile, its file, and what ptxas said about the kernel."""

    tile: Alternative
    library: Path
    registers: int
    spills: int
    seconds: float


def table_tile(head_dim):
    """The tile that plan/tiles.h gives the forward of a head dim."""
    program = (
        '#include <cstdio>\n#include "plan/tiles.h"\n'
        f"constexpr auto tile = flash::plan::fwd_tile({head_dim}, flash::plan::FwdVariant::kPlain);\n"
        'int main() { std::printf("%d %d %d %d", tile.block_m, tile.block_n, tile.warps, tile.blocks_per_sm); }\n'
    )
    with tempfile.TemporaryDirectory() as folder:
        binary = Path(folder, "tile")
        command = ["g++", "-std=c++17", f"-I{CSRC}", "-x", "c++", "-", "-o", str(binary)]
        built = subprocess.run(command, input=program, capture_output=True, text=True, check=False)
        if built.returncode != 0:
            raise BuildError(f"plan/tiles.h: {built.stderr}")
        printed = subprocess.run([str(binary)], capture_output=True, text=True, check=True).stdout
    return Alternative(*map(int, printed.split()))


def compile_command(head_dim, tile, arch, library, toolkit, cutlass):
    includes = [f"-I{CSRC}", f"-I{cutlass.include}"]
    gencode = f"-gencode=arch=compute_{arch},code=sm_{arch}"
    options = [gencode, *includes, f"-DSWEEP_HEAD_DIM={head_dim}", *tile.defines]
    return [str(toolkit.nvcc), *COMPILE_FLAGS, *options, "-shared", str(LAUNCHER), "-o", str(library)]


def compile_tile(head_dim, tile, arch, folder, toolkit, cutlass):
    library = folder / f"fwd_d{head_dim}_{tile.name}.so"
    start = time.monotonic()
    command = compile_command(head_dim, tile, arch, library, toolkit, cutlass)
    result = subprocess.run(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, check=False)
    if result.returncode != 0:
        raise BuildError(f"{' '.join(command)}\n{result.stdout}")
    (kernel,) = parse_ptxas_log(result.stdout)
    return Compiled(tile, library, kernel["registers"], spill_bytes(kernel), time.monotonic() - start)


def compile_all(work, arch, folder, progress):
    """Compile [(head dim, tile)] on all cores. Returns {(head dim, tile): Compiled} of what compiles."""
    toolkit = find_toolkit(sys.path)
    if toolkit is None:
        raise BuildError("nvcc: not found; set CUDA_HOME or put it on PATH")
    cutlass = find_cutlass(ROOT, sys.path, ROOT / "build" / "cutlass")
    folder.mkdir(parents=True, exist_ok=True)
    compiled = {}
    with ThreadPoolExecutor(parallel_jobs()) as pool:
        futures = {
            pool.submit(compile_tile, head_dim, tile, arch, folder, toolkit, cutlass): (head_dim, tile)
            for head_dim, tile in work
        }
        for future in as_completed(futures):
            head_dim, tile = futures[future]
            try:
                compiled[head_dim, tile] = result = future.result()
            except BuildError as error:
                progress(f"LEFT OUT: d {head_dim}, {tile}: does not compile\n{str(error)[-2000:]}")
                continue
            progress(
                f"[{len(compiled)}/{len(work)}] d {head_dim}: {tile}: {result.seconds:.0f} s, "
                f"{result.registers} registers, {result.spills} B spills"
            )
    return {job: compiled[job] for job in work if job in compiled}


class Kernel:
    """A compiled configuration, callable on contiguous bf16 tensors (b, s, h, d)."""

    def __init__(self, compiled):
        self.compiled = compiled
        library = ctypes.CDLL(str(compiled.library))
        fields = (ctypes.c_int * 5)()
        library.sweep_tile(fields)
        if Alternative(*fields[:4]) != compiled.tile:  # the overrides of plan/tiles.h did not reach the kernel
            raise BuildError(f"{compiled.library.name}: expected the tile {compiled.tile}, got {list(fields[:4])}")
        self.function = library.sweep_forward
        self.function.argtypes = [ctypes.c_void_p] * 5 + [ctypes.c_int] * 4 + [ctypes.c_void_p]

    def __call__(self, q, k, v, out, lse, causal, stream):
        """Writes out (b, s, h, d) bf16 and lse (b, h, s) fp32 on the raw CUDA stream; returns the launch status."""
        batch, seqlen, heads, _ = q.shape
        pointers = [tensor.data_ptr() for tensor in (q, k, v, out, lse)]
        return self.function(*pointers, batch, seqlen, heads, int(causal), stream)
