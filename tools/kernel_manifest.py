"""The kernel files of the archive, and the generated C++ file that says what the archive holds."""

from __future__ import annotations

import hashlib
import json
import re
from dataclasses import dataclass
from pathlib import Path

from errors import BuildError

SUPPORTED_ARCHS = ("80", "90", "100", "120")
DEFAULT_ARCHS = ("80", "90")  # of a build that asks for none; the others are built on request
# Of a direction: Flash_<...>_params, the header of its functions in params/.
PARAMETERS = {d: d for d in ("fwd_fp8", "fwd_jvp", "mla")}
PARAMETERS |= {"fwd": "fwd_split", "bwd": "bwd_mask", "fwd_split": "kvcache"}
HEADERS = {"fwd": "flash", "bwd": "flash", "fwd_split": "kvcache", "fwd_fp8": "fp8", "fwd_jvp": "jvp", "mla": "mla"}
PLANS = {"fwd": "FwdPlan", "bwd": "BwdPlan", "fwd_fp8": "FwdPlan", "fwd_jvp": "FwdPlan"}
DTYPES = {"fp16": "kFp16", "bf16": "kBf16"}
CACHE_DTYPES = {"e4m3": "kE4m3", "int8": "kInt8"}  # of a KV cache alone
ALL_DTYPES = {**DTYPES, **CACHE_DTYPES}
INSTANTIATION = re.compile(
    r"flash_(?P<direction>fwd|bwd|fwd_split|fwd_fp8|fwd_jvp|mla)_hdim(?P<head_dim>\d+)(_(?P<head_dim_v>\d+))?"
    rf"_(?P<dtype>{'|'.join(ALL_DTYPES)})_(?P<family>sm80|sm90)"
)
INCLUDE = re.compile(r'^[ \t]*#[ \t]*include[ \t]*["<]([^">]+)[">]', re.MULTILINE)
# Suffix of the family's functions in flash.h, and the one architecture it is compiled for (None: all that are asked).
FAMILIES = {"sm80": ("", None), "sm90": ("wgmma_", "90")}


@dataclass(frozen=True)
class KernelFile:
    path: Path
    direction: str  # fwd, bwd, fwd_split (over a KV cache), fwd_fp8 (e4m3; dtype: of the output), fwd_jvp, mla
    head_dim: int
    dtype: str  # of fwd_split: of the cache
    family: str = "sm80"
    head_dim_v: str | None = None  # of V and the output, where it is another

    @property
    def function(self) -> str:
        """The template of flash.h that the file specialises."""
        return f"run_mha_{self.direction}_{FAMILIES[self.family][0]}"

    @property
    def parameters(self) -> str:
        """The parameters of the function before the stream."""
        params = f"Flash_{PARAMETERS[self.direction]}_params"
        plan = f", const plan::{PLANS[self.direction]}&" if self.direction in PLANS else ""
        return f"const {params}&{plan}"

    @property
    def arguments(self) -> str:
        """Of the template."""
        head_dims = f"{self.head_dim}, {self.head_dim_v}" if self.head_dim_v else self.head_dim
        return f"Dtype::{ALL_DTYPES[self.dtype]}, {head_dims}"

    @property
    def only_arch(self) -> str | None:
        return FAMILIES[self.family][1]


def words(text: str) -> list[str]:
    """Items of a knob: separated by semicolons, commas or spaces."""
    return [word for word in re.split(r"[;,\s]+", text) if word]


def parse_archs(text: str) -> list[str]:
    """ "80;9.0, sm_100" -> ["80", "90", "100"], sorted, without duplicates."""
    archs = set()
    for word in words(text):
        arch = word.lower().removeprefix("sm_").replace(".", "")
        if not re.fullmatch(r"\d{2,3}", arch) or int(arch) < 80:
            raise BuildError(f"FLASH_ATTN_CUDA_ARCHS: expected architectures of at least 80, like 80;90, got {word!r}")
        archs.add(arch)
    if not archs:
        raise BuildError("FLASH_ATTN_CUDA_ARCHS: expected at least one architecture, like 80;90, got none")
    return sorted(archs, key=int)


def kernel_files(source_dir: Path) -> list[KernelFile]:
    """All instantiation files under `source_dir` (csrc/flash_attn), by head dim and dtype."""
    files = []
    for path in sorted((source_dir / "instantiations").glob("*.cu")):
        name = INSTANTIATION.fullmatch(path.stem)
        if name is None:
            raise BuildError(f"{path}: expected a name like flash_fwd_hdim128_bf16_sm80.cu")
        head_dims = {"head_dim": int(name["head_dim"]), "head_dim_v": name["head_dim_v"]}
        files.append(KernelFile(path, name["direction"], dtype=name["dtype"], family=name["family"], **head_dims))
    if not files:
        raise BuildError(f"{source_dir}: expected .cu files in instantiations, found none")
    return sorted(files, key=lambda f: (f.head_dim, f.dtype, f.direction, f.family, f.head_dim_v or ""))


def auxiliary_files(source_dir: Path) -> list[Path]:
    """The kernel files that are compiled for every architecture, head dim and dtype alike."""
    return sorted((source_dir / "kernels").glob("*/*.cu"))


def select(
    files: list[KernelFile], head_dims: list[str] | None, dtypes: list[str] | None, archs: list[str] | None = None
) -> list[KernelFile]:
    """The files of a development subset that have code for some of `archs`; None selects all."""
    known_dims = sorted({f.head_dim for f in files})
    known_dtypes = [d for d in ALL_DTYPES if any(f.dtype == d for f in files)]
    for dim in head_dims or []:
        if not dim.isdigit() or int(dim) not in known_dims:
            raise BuildError(f"FLASH_ATTN_HEAD_DIMS: expected some of {known_dims}, got {dim!r}")
    for dtype in dtypes or []:
        if dtype not in known_dtypes:
            raise BuildError(f"FLASH_ATTN_DTYPES: expected some of {known_dtypes}, got {dtype!r}")
    return [
        f
        for f in files
        if (not head_dims or str(f.head_dim) in head_dims)
        and (not dtypes or f.dtype in dtypes)
        and (archs is None or f.only_arch is None or f.only_arch in archs)
    ]


def build_info(selected: list[KernelFile], archs: list[str], cuda: str) -> dict:
    """What the archive holds; the binding adds torch and commit."""
    return {
        "archs": archs,
        "head_dims": sorted({f.head_dim for f in selected}),
        "dtypes": [d for d in ALL_DTYPES if any(f.dtype == d for f in selected)],
        "cuda": cuda,
    }


def own_includes(path: Path, source_dir: Path) -> list[Path]:
    """The files of `source_dir` that `path` includes, as the compiler finds them: next to it, in source_dir."""
    found = []
    for name in INCLUDE.findall(path.read_text(encoding="utf-8")):
        places = (folder / name for folder in (path.parent, source_dir))
        target = next((place.resolve() for place in places if place.is_file()), None)
        if target is not None and target.is_relative_to(source_dir):
            found.append(target)
    return found


def reachable(files: list[Path], source_dir: Path) -> set[Path]:
    """`files` and all of ours that they include, by real paths, so that one header counts once."""
    waiting = [path.resolve() for path in files if path.is_file()]
    seen: set[Path] = set()
    while waiting:
        path = waiting.pop()
        if path not in seen:
            seen.add(path)
            waiting += own_includes(path, source_dir)
    return seen


def shared_sources(source_dir: Path) -> list[Path]:
    """What binding and kernels must agree on, sorted: every kernel file with its headers, and those that only
    the binding includes (plan/call_plan.h, plan/explain.h)."""
    source_dir = source_dir.resolve()
    kernels = reachable([*(f.path for f in kernel_files(source_dir)), *auxiliary_files(source_dir)], source_dir)
    binding = reachable([source_dir / "flash_api.cpp"], source_dir)
    return sorted(kernels | {p for p in binding if p.relative_to(source_dir).parts[0] in ("core", "params", "plan")})


def interface_digest(source_dir: Path) -> str:
    """Digest of the names and contents of shared_sources()."""
    digest = hashlib.sha256()
    for path in shared_sources(source_dir):
        content = path.read_bytes()
        name = path.relative_to(source_dir.resolve()).as_posix()
        digest.update(f"{name} {len(content)}\n".encode() + content)
    return digest.hexdigest()


def manifest_source(info: dict, digest: str, left_out: list[KernelFile]) -> str:
    """C++ text that defines kernel_build_info(), the interface's digest for archive_info(), and a stub for each
    instantiation that a subset leaves out, so that the binding links against any archive."""
    stubs = "".join(
        f"template <>\n"
        f"cudaError_t {f.function}<{f.arguments}>("
        f"{f.parameters}, cudaStream_t) {{\n"
        f"  return cudaErrorNotSupported;\n"
        f"}}\n"
        for f in left_out
    )
    headers = sorted({"flash", *(HEADERS[f.direction] for f in left_out)})
    includes = "".join(f'#include "params/{header}.h"\n' for header in headers)
    return (
        "// Generated by tools/kernel_manifest.py.\n"
        f"{includes}\n"
        "namespace flash {\n\n"
        f'const char* kernel_build_info() {{ return R"({json.dumps(info)})"; }}\n\n'
        f'extern const char kernel_interface[] = "interface {digest}";\n\n'
        f"{stubs}\n"
        "}  // namespace flash\n"
    )


def archive_info(archive: Path, source_dir: Path) -> dict:
    """The build info inside a built archive, which must have been built from the kernel sources of `source_dir`."""
    content = archive.read_bytes()
    text = re.search(rb'\{"archs": \[[^{}]*\}', content)
    digest = re.search(rb"interface ([0-9a-f]{64})", content)
    if text is None or digest is None:
        raise BuildError(f"FLASH_ATTN_KERNEL_ARCHIVE: expected an archive of tools/kernel_build.py, got {archive}")
    if digest[1].decode() != interface_digest(source_dir):
        raise BuildError(
            f"FLASH_ATTN_KERNEL_ARCHIVE: expected an archive built from this tree's kernel sources, got {archive} of "
            "others; after any change of a kernel file, or of a header that one includes, build it again with "
            "tools/kernel_build.py"
        )
    return json.loads(text[0])
