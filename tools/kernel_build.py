"""Builds libflash_attn_kernels.a: all CUDA kernels, needing neither torch nor Python.

    python tools/kernel_build.py --archs 80,90 --head-dims 64,128 --dtypes fp16,bf16 --out build/kernels/dev

An incremental build: ninja decides by file times, compile_kernel.py by file contents.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import time
from dataclasses import dataclass
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent))

from build_folder import alone_in, build_folder
from build_log import duration, say, show
from errors import BuildError
from kernel_manifest import (
    DEFAULT_ARCHS,
    JOINED,
    auxiliary_files,
    build_info,
    interface_digest,
    kernel_files,
    left_out,
    manifest_source,
    parse_archs,
    select,
    words,
)
from machine import cpu_seconds, parallel_jobs, visible_gpu_archs
from ninja_file import escaped, run_ninja, shell
from toolchain import CudaToolkit, find_cutlass, find_toolkit, nvcc_install

ROOT = Path(__file__).resolve().parent.parent
ARCHIVE = "libflash_attn_kernels.a"
REPORT = "build_report.json"
COMPILE_FLAGS = (
    "-std=c++17",
    "-O3",
    "--use_fast_math",
    "--expt-relaxed-constexpr",
    "-Xptxas=-v",
    "-Xcompiler=-fPIC,-fvisibility=hidden",
)


def compression_flags(toolkit: CudaToolkit) -> list[str]:
    """nvcc compresses PTX by default, and machine code only if it is asked to: to 0.15 of its size."""
    has_size_mode = int(toolkit.version.split(".")[0]) >= 13  # from CUDA 12 it needs newer drivers than its code does
    return ["-Xfatbin=-compress-all", *(["--compress-mode=size"] if has_size_mode else [])]


@dataclass(frozen=True)
class KernelBuild:
    """What to build from where to where. head_dims and dtypes: a development subset; None means all."""

    source_dir: Path  # csrc/flash_attn
    out_dir: Path
    archs: list[str]
    head_dims: list[str] | None = None
    dtypes: list[str] | None = None
    jobs: int = 1
    budget: Path = ROOT / "tools" / "resource_budget.json"

    @property
    def archive(self) -> Path:
        return self.out_dir / ARCHIVE


def usable_gpu_archs() -> list[str]:
    """Architectures of the visible GPUs that kernels can be compiled for."""
    return [arch for arch in visible_gpu_archs() if int(arch) >= int(DEFAULT_ARCHS[0])]


def default_archs() -> list[str]:
    """Those of usable_gpu_archs(), else DEFAULT_ARCHS."""
    return usable_gpu_archs() or list(DEFAULT_ARCHS)


def gencode_flags(archs: list[str], only_arch: str | None = None) -> list[str]:
    """Machine code for each arch; when building for DEFAULT_ARCHS, PTX of the highest for newer GPUs too.
    only_arch: of a family that uses features of one architecture, which no other runs."""
    if only_arch is not None:
        return [f"-gencode=arch=compute_{only_arch}a,code=sm_{only_arch}a"]
    targets = {arch: f"sm_{arch}" for arch in archs}
    if set(archs) >= set(DEFAULT_ARCHS):
        targets[archs[-1]] = f"[sm_{archs[-1]},compute_{archs[-1]}]"
    return [f"-gencode=arch=compute_{arch},code={code}" for arch, code in targets.items()]


def check_archs(toolkit: CudaToolkit, archs: list[str]) -> None:
    listing = subprocess.run([str(toolkit.nvcc), "--list-gpu-arch"], capture_output=True, text=True, check=False)
    known = listing.stdout.split()
    unknown = [arch for arch in archs if f"compute_{arch}" not in known]
    if listing.returncode == 0 and unknown:
        raise BuildError(
            f"FLASH_ATTN_CUDA_ARCHS: nvcc {toolkit.version} does not know {';'.join(unknown)}; "
            f"it knows {' '.join(known)}"
        )


def write_if_changed(path: Path, text: str) -> None:
    if not path.exists() or path.read_text(encoding="utf-8") != text:
        path.write_text(text, encoding="utf-8")


def join(sources: dict[Path, list[str]], folder: Path) -> dict[Path, list[str]]:
    """The files to compile instead of `sources`: each group of JOINED is one, in `folder`, under its first name."""
    rest = dict(sources)
    joined: dict[Path, list[str]] = {}
    for stems in JOINED:
        group = [path for stem in stems for path in sources if path.stem == stem]
        if len(group) < 2:
            continue
        flags = [rest.pop(path) for path in group]
        assert all(own == flags[0] for own in flags), f"{group}: expected equal flags, got {flags}"
        target = folder / group[0].name
        folder.mkdir(parents=True, exist_ok=True)
        write_if_changed(target, "".join(f'#include "instantiations/{path.name}"\n' for path in group))
        joined[target] = flags[0]
    return joined | rest  # the largest first


def build_file(build: KernelBuild, toolkit: CudaToolkit, cutlass_include: Path, sources: dict[Path, list[str]]) -> str:
    """Text of build.ninja: one edge per kernel file, one for the manifest, one for the archive. sources: each file with
    its own flags."""
    tools = Path(__file__).resolve().parent
    source_dir = build.source_dir.resolve()
    includes = [f"-I{source_dir}"]
    nvcc = [str(toolkit.nvcc), *COMPILE_FLAGS, *compression_flags(toolkit), *includes, f"-I{cutlass_include}"]
    script = tools / "compile_kernel.py"
    compiler = [sys.executable, str(script), "--source", "$in", "--object", "$out", "--depfile", "$depfile"]
    checked = [*compiler, "--budget", str(build.budget), "--toolkit", toolkit.full_version, "--", *nvcc]
    host = [str(toolkit.nvcc), "-std=c++17", "-O2", "-Xcompiler=-fPIC,-fvisibility=hidden", *includes]
    rules = [
        f"rule kernel\n  command = {shell(checked)} $flags\n  depfile = $out.d\n  deps = gcc\n  description = $in",
        f"rule host\n  command = {shell([*host, '-c', '$in', '-o', '$out'])}\n  description = $in",
        # One object without local symbols: names and tables of all would be a tenth of an archive of compressed code.
        "rule archive\n  command = rm -f $out && ld -r -o $out.o $in && strip --strip-unneeded $out.o"
        " && ar crs $out $out.o && rm $out.o\n  description = $out",
    ]
    judges = " ".join(escaped(path) for path in (script, tools / "resources.py", build.budget))
    edges = [
        f"build {s.stem}.o: kernel {escaped(s)} | {judges}\n  depfile = {s.stem}.o.d\n  flags = {shell(flags)}"
        for s, flags in sources.items()
    ]
    edges.append(f"build kernel_manifest.o: host kernel_manifest.cpp | {escaped(source_dir / 'params' / 'flash.h')}")
    objects = " ".join([f"{s.stem}.o" for s in sources] + ["kernel_manifest.o"])
    edges.append(f"build {ARCHIVE}: archive {objects}\ndefault {ARCHIVE}")
    return "\n".join(["ninja_required_version = 1.8", *rules, *edges]) + "\n"


def report_line(finished: int, total: int, result: dict) -> str:
    if result["unchanged"]:
        return f"[{finished}/{total}] {result['file']} unchanged"
    numbers = f"max {result['registers']} registers, {result['spill_bytes']} B spills"
    return f"[{finished}/{total}] {result['file']} {result['seconds']:.1f} s, {numbers}"


def progress(finished: int, total: int, results: list[dict], seconds: float) -> str:
    """How far a build is. Its files come largest first, so that what is left takes no longer than it says."""
    compiled = sum(not result["unchanged"] for result in results)
    left = f", at most {duration(seconds / compiled * (total - finished))} left" if compiled else ""
    return f"  flash_attn: {finished} of {total} files{left}"


def run(build: KernelBuild) -> tuple[list[dict], float]:
    """Run ninja with progress lines. Returns the results of the files it visited and the CPU seconds used."""
    before = cpu_seconds()
    start = time.monotonic()
    results = []
    for finished, total, line in run_ninja(build.out_dir, build.jobs):
        if line.startswith("@result "):
            result = json.loads(line[len("@result ") :])
            results.append(result)
            say(report_line(finished, total, result))
            show(progress(finished, total, results, time.monotonic() - start), end="")
            for warning in result["warnings"]:
                say(f"    {warning}")
        elif line:
            say(line)
    return results, cpu_seconds() - before


def summary(results: list[dict], files: int, wall: float, cpu: float, archive: Path) -> list[str]:
    compiled = [r for r in results if not r["unchanged"]]
    megabytes = archive.stat().st_size / 1e6
    lines = [
        f"{files} kernel files, {len(compiled)} compiled: {wall:.0f} s, {cpu:.0f} CPU seconds, "
        f"{ARCHIVE} {megabytes:.1f} MB"
    ]
    if compiled:
        slowest = max(compiled, key=lambda r: r["seconds"])
        lines.append(f"slowest: {slowest['file']} {slowest['seconds']:.1f} s")
    return lines


def build_kernels(build: KernelBuild, toolkit: CudaToolkit, site_dirs: list[str]) -> dict:
    """Build the archive. Returns its build info; also writes build_report.json next to it."""
    check_archs(toolkit, build.archs)
    with alone_in(build.out_dir):
        return build_alone(build, toolkit, site_dirs)


def build_alone(build: KernelBuild, toolkit: CudaToolkit, site_dirs: list[str]) -> dict:
    """build_kernels() while no other process writes to build.out_dir."""
    files = kernel_files(build.source_dir)
    selected = select(files, build.head_dims, build.dtypes, build.archs)
    auxiliary = auxiliary_files(build.source_dir)
    cutlass = find_cutlass(ROOT, site_dirs, build_folder() / "cutlass")

    info = build_info(selected, build.archs, toolkit.version)
    digest = interface_digest(build.source_dir)
    missing = left_out(files, selected)
    write_if_changed(build.out_dir / "kernel_manifest.cpp", manifest_source(info, digest, missing, build.source_dir))
    largest_first = sorted(selected, key=lambda f: f.head_dim, reverse=True)
    sources = {f.path.resolve(): [*gencode_flags(build.archs, f.only_arch), *f.defines] for f in largest_first}
    sources |= {path.resolve(): gencode_flags(build.archs) for path in auxiliary}
    sources = join(sources, build.out_dir.resolve() / "joined")
    write_if_changed(build.out_dir / "build.ninja", build_file(build, toolkit, cutlass.include, sources))

    say(
        f"kernels: {len(sources)} files for sm {';'.join(build.archs)}, {build.jobs} at a time, "
        f"nvcc {toolkit.full_version}, CUTLASS {cutlass.version}"
    )
    start = time.monotonic()
    results, cpu = run(build)
    for line in summary(results, len(sources), time.monotonic() - start, cpu, build.archive):
        say(line)
    records = [json.loads((build.out_dir / f"{s.stem}.o.json").read_text(encoding="utf-8")) for s in sources]
    report = {"info": info, "archive_bytes": build.archive.stat().st_size, "files": records}
    (build.out_dir / REPORT).write_text(json.dumps(report, indent=1), encoding="utf-8")
    return info


def out_dir_for(archs: list[str]) -> Path:
    """Where an install keeps objects: one folder per set of architectures, so that changing it back costs nothing."""
    return build_folder() / "kernels" / "-".join(f"sm{arch}" for arch in archs)


def build_from_environment(site_dirs: list[str], toolkit: CudaToolkit, archs: list[str], environ=os.environ) -> Path:
    """The archive that the knobs of the environment ask for, built in build_folder()."""
    build = KernelBuild(
        source_dir=ROOT / "csrc" / "flash_attn",
        out_dir=out_dir_for(archs),
        archs=archs,
        head_dims=words(environ.get("FLASH_ATTN_HEAD_DIMS", "")) or None,
        dtypes=words(environ.get("FLASH_ATTN_DTYPES", "")) or None,
        jobs=parallel_jobs(environ),
    )
    build_kernels(build, toolkit, site_dirs)
    return build.archive


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--archs", help="like 80,90, or default or requested; of the visible GPUs, else default")
    parser.add_argument("--head-dims", default="", help="development subset, like 64,128; default: all")
    parser.add_argument("--dtypes", default="", help="development subset of fp16,bf16; default: all")
    parser.add_argument("--out", type=Path, help="folder of objects and archive; default: that of an install")
    parser.add_argument("--jobs", type=int, help="compilers at a time; default: what cores and memory carry")
    parser.add_argument("--source", type=Path, default=ROOT / "csrc" / "flash_attn")
    arguments = parser.parse_args()
    try:
        toolkit = find_toolkit(sys.path)
        if toolkit is None:
            raise BuildError(f"nvcc: not found; set CUDA_HOME, put it on PATH, or {nvcc_install('13.0')}")
        archs = parse_archs(arguments.archs) if arguments.archs else default_archs()
        build = KernelBuild(
            source_dir=arguments.source,
            out_dir=arguments.out or out_dir_for(archs),
            archs=archs,
            head_dims=words(arguments.head_dims) or None,
            dtypes=words(arguments.dtypes) or None,
            jobs=arguments.jobs or parallel_jobs(),
        )
        build_kernels(build, toolkit, sys.path)
    except BuildError as error:
        sys.exit(f"error: {error}")


if __name__ == "__main__":
    main()
