"""Compiles the laboratory's kernels on demand, one shared library for each design, and calls them.

    from kernel_library import forward
    from sm80_designs import default_design
    forward(default_design(64), q, k, v, out, causal=True)

Libraries lie in build/lab/kernels by the hash of design, sources and compiler. Needs nvcc and the CUTLASS headers. A
design says what is in a kernel: header() and overlay() its headers, launcher its file.
"""

from __future__ import annotations

import ctypes
import functools
import hashlib
import json
import os
import subprocess
import sys
import time
from concurrent.futures import ThreadPoolExecutor, as_completed
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
sys.path.insert(0, str(ROOT / "tools"))

from errors import BuildError
from gpu import gpu
from kernel_build import COMPILE_FLAGS
from machine import parallel_jobs
from resources import fatal_diagnostics, parse_ptxas_log, spill_bytes
from sm80_designs import SOURCES
from toolchain import find_cutlass, find_toolkit

CSRC = ROOT / "csrc" / "flash_attn"
KERNELS = ROOT / "build" / "lab" / "kernels"
DTYPE_NAMES = {"bf16": "torch.bfloat16", "fp16": "torch.float16"}


def check(design):
    """Raises ValueError with every reason why there is no such kernel."""
    problems = design.problems()
    if problems:
        raise ValueError(f"design {design.name}: {'; '.join(problems)}")


@functools.lru_cache(None)
def sources_digest():
    """Of the laboratory's sources and all headers of the kernels."""
    digest = hashlib.sha256()
    for path in sorted([*SOURCES.iterdir(), *CSRC.rglob("*.h")]):
        digest.update(f"{path.relative_to(ROOT)}\n".encode() + path.read_bytes())
    return digest.hexdigest()


def cache_key(design, arch, compiler, sources):
    """What a library's name ends in: another design, source text, compiler or flag is another key."""
    parts = [design.header(), sorted(design.overlay().items()), arch + design.arch_suffix, compiler,
             COMPILE_FLAGS, sources]  # fmt: skip
    return hashlib.sha256(json.dumps(parts).encode()).hexdigest()[:12]


def by_library(designs, library):
    """{library: the designs that are launches of its one kernel}."""
    found = {}
    for design in dict.fromkeys(designs):
        found.setdefault(library(design), []).append(design)
    return found


def run_compiler(command):
    """What it says; BuildError if it fails."""
    done = subprocess.run(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, check=False)
    if done.returncode != 0:
        raise BuildError(f"{' '.join(command)}\n{done.stdout[-3000:]}")
    return done.stdout


def facts_of(log):
    """Registers and spills, and whether ptxas made each wgmma wait for the one before or ignored setmaxnreg."""
    (kernel,) = parse_ptxas_log(log)
    serialized = bool(fatal_diagnostics(log))
    return {"registers": kernel["registers"], "spills": spill_bytes(kernel), "serialized": serialized}


class Compiler:
    """nvcc and the headers; BuildError if they are missing."""

    def __init__(self, arch=None, folder=KERNELS):
        self.toolkit = find_toolkit(sys.path)
        if self.toolkit is None:
            raise BuildError("nvcc: not found; set CUDA_HOME or put it on PATH")
        self.cutlass = find_cutlass(ROOT, sys.path, ROOT / "build" / "cutlass")
        self.versions = {"nvcc": self.toolkit.full_version, "CUTLASS": self.cutlass.version}
        self.arch, self.folder = arch or gpu().arch, folder

    def library(self, design):
        key = cache_key(design, self.arch, ", ".join(self.versions.values()), sources_digest())
        return self.folder / f"{design.name}-{key}.so"

    def command(self, design, folder, library):
        options = ["-include", str(folder / "lab_design.h"), "-shared", str(design.launcher)]
        return [*self.nvcc(self.arch + design.arch_suffix, f"-I{folder}"), *options, "-o", str(library)]

    def nvcc(self, arch, *includes):
        """The compiler's call as far as the files; `includes` come first."""
        others = [f"-I{SOURCES}", f"-I{CSRC}", f"-I{self.cutlass.include}"]
        gencode = f"-gencode=arch=compute_{arch},code=sm_{arch}"
        return [str(self.toolkit.nvcc), *COMPILE_FLAGS, gencode, *includes, *others]

    def compile(self, design):
        """Compiles a design unless its library exists. Returns what is known of the kernel, as JSON holds it."""
        check(design)
        library = self.library(design)
        record = library.with_suffix(".json")
        if library.exists() and record.exists():
            return json.loads(record.read_text(encoding="utf-8"))
        folder = library.with_suffix("")
        for path, text in {"lab_design.h": design.header(), **design.overlay()}.items():
            (folder / path).parent.mkdir(parents=True, exist_ok=True)
            (folder / path).write_text(text, encoding="utf-8")
        start = time.monotonic()
        unfinished = folder / "kernel.so"
        facts = facts_of(run_compiler(self.command(design, folder, unfinished)))
        facts["seconds"] = round(time.monotonic() - start, 1)
        os.replace(unfinished, library)
        record.write_text(json.dumps(facts, indent=1) + "\n", encoding="utf-8")
        return facts

    def compile_all(self, designs, progress, jobs=None):
        """{design: facts} of those that compile; `progress` hears of each, and why one was left out."""
        libraries, found = by_library(designs, self.library), {}
        with ThreadPoolExecutor(jobs or parallel_jobs()) as pool:
            futures = {pool.submit(self.compile, same[0]): same for same in libraries.values()}
            for done, future in enumerate(as_completed(futures), 1):
                same = futures[future]
                try:
                    facts = future.result()
                except (BuildError, ValueError) as error:
                    progress(f"LEFT OUT: {same[0].name}: {error}")
                    continue
                found.update((design, facts) for design in same)
                told = f"{facts['seconds']} s, {facts['registers']} registers, {facts['spills']} B spills"
                progress(f"[{done}/{len(libraries)}] {same[0].name}: {told}" + ", serialised" * facts["serialized"])
        return found


@functools.lru_cache(None)
def compiler():
    return Compiler()


@functools.lru_cache(None)
def library(design):
    """A design's library, which is compiled if need be."""
    check(design)
    compiler().compile(design)
    return ctypes.CDLL(str(compiler().library(design)))


@functools.lru_cache(None)
def kernel(design):
    """A function that launches a design's forward."""
    own = library(design)
    own.lab_forward.argtypes = [ctypes.c_void_p] * 4 + [ctypes.c_int] * 5 + [ctypes.c_void_p]
    if not design.options:
        return own.lab_forward
    own.lab_options.argtypes = [ctypes.c_int, ctypes.c_float]

    def launch(*arguments):
        own.lab_options(*design.options)
        return own.lab_forward(*arguments)

    return launch


def check_tensors(design, q, k, v, out, causal):
    """Raises ValueError unless the design's kernel takes these tensors."""
    batch, _, heads, head_dim = q.shape
    keys, queries = (batch, k.shape[1], heads, head_dim), tuple(q.shape)
    expected = {"q": queries, "k": keys, "v": keys, "out": queries}
    if head_dim != design.head_dim:
        raise ValueError(f"q: expected head dim {design.head_dim}, got {head_dim}")
    if ("causal" if causal else "full") not in design.masks:
        raise ValueError(f"causal: this design is of a kernel for {design.masks[0]} attention")
    tensors = {"q": q, "k": k, "v": v, "out": out}
    for name, tensor in tensors.items():
        if tuple(tensor.shape) != expected[name]:
            raise ValueError(f"{name}: expected the shape {expected[name]}, got {tuple(tensor.shape)}")
    for name, tensor in tensors.items():
        if str(tensor.dtype) != DTYPE_NAMES[design.dtype] or not tensor.is_contiguous() or not tensor.is_cuda:
            raise ValueError(f"{name}: expected a contiguous CUDA tensor of {DTYPE_NAMES[design.dtype]}")


def launch(design, function, pointers, q, k, causal):
    """Calls a launcher's function on the stream of q's device; RuntimeError: a CUDA error."""
    import torch

    batch, seqlen_q, heads, _ = q.shape
    with torch.cuda.device(q.device):
        stream = torch.cuda.current_stream().cuda_stream
        status = function(*pointers, batch, seqlen_q, k.shape[1], heads, int(causal), stream)
    if status != 0:
        raise RuntimeError(f"design {design.name}: CUDA error {status}")


def forward(design, q, k, v, out, causal=False):
    """Writes attention of q (b, s_q, h, d), k, v (b, s_k, h, d) into out (b, s_q, h, d), contiguous tensors of the
    design's dtype on one GPU, with scale d^-1/2; a causal mask is aligned to the last query and key. Compiles the
    kernel on first use. ValueError: no such kernel, or not for these tensors; RuntimeError: a CUDA error."""
    function = kernel(design)
    check_tensors(design, q, k, v, out, causal)
    launch(design, function, [tensor.data_ptr() for tensor in (q, k, v, out)], q, k, causal)
