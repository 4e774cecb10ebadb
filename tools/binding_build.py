"""Builds the extension module flash_attn_2_cuda: flash_api.cpp, by the host compiler, linked to a kernel archive."""

from __future__ import annotations

import os
import re
import sysconfig
import time
from pathlib import Path

from build_log import say
from errors import BuildError
from machine import cpu_seconds
from ninja_file import escaped, run_ninja, shell
from target_env import TargetTorch, run_in_empty_folder

MODULE = "flash_attn_2_cuda"
OLD_GLIBC = Path(__file__).resolve().parent / "glibc_2_28.h"
TORCH_LIBRARIES = ("c10", "torch", "torch_cpu", "torch_python", "c10_cuda", "torch_cuda")


def host_compiler() -> list[str]:
    return os.environ.get("CXX", "g++").split()


def compile_command(torch: TargetTorch, source_dir: Path, cuda_includes: list[Path], commit: str) -> list[str]:
    system = [*torch.include_dirs, *cuda_includes, Path(sysconfig.get_paths()["include"])]
    defines = {
        "TORCH_EXTENSION_NAME": MODULE,
        "TORCH_API_INCLUDE_EXTENSION_H": "",
        "_GLIBCXX_USE_CXX11_ABI": str(torch.cxx11_abi),
        "FLASH_ATTN_BUILD_COMMIT": f'"{commit}"',
        # torch and its extensions share one set of pybind11 types only if these names agree
        **{f"PYBIND11_{name}": f'"{value}"' for name, value in torch.pybind11_abi.items()},
    }
    return [
        *host_compiler(),
        f"-std={cxx_standard(torch)}",
        "-O2",
        "-fPIC",
        "-fvisibility=hidden",
        *(f"-D{name}={value}" if value else f"-D{name}" for name, value in defines.items()),
        f"-I{source_dir}",
        *(f"-isystem{path}" for path in system),
        *("-include", str(OLD_GLIBC)),
    ]


def cxx_standard(torch: TargetTorch) -> str:
    """The C++ standard that torch's headers ask for: the one torch builds extensions with (2.12 went to C++20)."""
    text = (torch.torch_dir / "utils" / "cpp_extension.py").read_text(encoding="utf-8")
    standard = re.search(r"common_cflags \+= .*-std=c\+\+(\d+)", text)
    return f"c++{standard[1]}" if standard else "c++17"


def link_command(torch: TargetTorch, archive: Path, run_paths: list[str]) -> list[str]:
    libraries = [torch.lib_dir / f"lib{name}.so" for name in TORCH_LIBRARIES]
    missing = [str(path) for path in libraries if not path.exists()]
    if missing or torch.cudart is None:
        raise BuildError(f"torch {torch.version}: expected {', '.join(missing) or 'a loaded libcudart'}, found none")
    return [
        *host_compiler(),
        "-shared",
        "-s",  # no table of local symbols: 0.4 MB of the module
        "$in",
        str(archive),
        *map(str, libraries),
        str(torch.cudart),
        # Some toolchains have no libstdc++.so at the compiler and would link a second, static copy into the module.
        *([str(torch.libstdcxx)] if torch.libstdcxx else []),
        *(f"-Wl,-rpath,{path}" for path in run_paths),
        "-o",
        "$out",
    ]


def run_paths(torch: TargetTorch) -> list[str]:
    """Where the module finds torch's libraries: next to itself in site-packages, and nowhere else. A path of the
    building machine would travel with the wheel, and whoever owns that path elsewhere would own the module. Outside of
    torch's site-packages (an editable install) the libraries are those that `import torch` has loaded before."""
    found = ["$ORIGIN/torch/lib"]
    site, cudart_dir = torch.torch_dir.parent.resolve(), torch.cudart.parent.resolve()
    if cudart_dir.is_relative_to(site):
        found.append(f"$ORIGIN/{cudart_dir.relative_to(site).as_posix()}")
    return found


def build_binding(
    torch: TargetTorch, source_dir: Path, archive: Path, cuda_includes: list[Path], commit: str, module_file: Path
) -> str:
    """Compile and link `module_file`, then import it in the target environment. Returns its build info as JSON text."""
    folder = (module_file.parent / f"{MODULE}.build").resolve()
    folder.mkdir(parents=True, exist_ok=True)
    compiler = [*compile_command(torch, source_dir.resolve(), cuda_includes, commit), "-MD", "-MF", "$depfile"]
    compiler += ["-c", "$in", "-o", "$out"]
    linker = link_command(torch, archive.resolve(), run_paths(torch))
    text = (
        f"rule cxx\n  command = {shell(compiler)}\n  depfile = $out.d\n  deps = gcc\n  description = $in\n"
        f"rule link\n  command = {shell(linker)}\n  description = $out\n"
        f"build flash_api.o: cxx {escaped(source_dir.resolve() / 'flash_api.cpp')}\n  depfile = flash_api.o.d\n"
        f"build {escaped(module_file.resolve())}: link flash_api.o | {escaped(archive.resolve())}\n"
    )
    (folder / "build.ninja").write_text(text, encoding="utf-8")
    start, before = time.monotonic(), cpu_seconds()
    for _, _, line in run_ninja(folder, jobs=1):
        if line:
            say(line)
    info = imported_info(torch, module_file)
    seconds, used = time.monotonic() - start, cpu_seconds() - before
    say(f"binding: compiled, linked and imported for torch {torch.version} in {seconds:.1f} s, {used:.1f} CPU seconds")
    return info


def imported_info(torch: TargetTorch, module_file: Path) -> str:
    """build_info() of the built module, imported where it is going to run: shows missing symbols at build time."""
    program = (
        "import importlib.util, sys, torch\n"
        f"spec = importlib.util.spec_from_file_location({MODULE!r}, sys.argv[1])\n"
        "module = importlib.util.module_from_spec(spec)\n"
        "spec.loader.exec_module(module)\n"
        "print('@info ' + module.build_info())\n"
    )
    result = run_in_empty_folder([torch.executable, "-c", program, str(module_file.resolve())])
    for line in result.stdout.splitlines():
        if line.startswith("@info "):
            return line[len("@info ") :]
    raise BuildError(f"{MODULE}: the built module cannot be imported:\n{result.stderr.strip()[-2000:]}")
