"""The kernel files of the archive, and the generated C++ file that says what the archive holds."""

from __future__ import annotations

import hashlib
import json
import re
from dataclasses import dataclass, replace
from pathlib import Path

from errors import BuildError

DEFAULT_ARCHS = ("80", "90")  # of a build that asks for none, and of releases
REQUESTED_ARCHS = ("100", "120")  # built on request; .ci/run compiles a head dim for them
NAMED_ARCHS = {"default": DEFAULT_ARCHS, "requested": REQUESTED_ARCHS}
DTYPES = {"fp16": "kFp16", "bf16": "kBf16"}
CACHE_DTYPES = {"e4m3": "kE4m3", "int8": "kInt8"}  # of a KV cache alone
ALL_DTYPES = {**DTYPES, **CACHE_DTYPES}
INSTANTIATION = re.compile(r"^FLASH_INSTANTIATE(?:_(\w+))?\((run_mha_\w+_), ((\d+)(?:, \d+)?)\)$", re.MULTILINE)
INSTANTIATED = {None: tuple(DTYPES), "8BIT": tuple(CACHE_DTYPES), "FP16": ("fp16",), "BF16": ("bf16",)}
DECLARATION = re.compile(r"^cudaError_t (run_mha_\w+_)\(([^;]*),\s+cudaStream_t stream\);", re.MULTILINE)
INCLUDE = re.compile(r'^[ \t]*#[ \t]*include[ \t]*["<]([^">]+)[">]', re.MULTILINE)
# Kernel files that are compiled as one: zstd packs equal parts of their code once (docs/build.md).
JOINED = (
    ("flash_fwd_hdim192_sm90", "flash_fwd_hdim192_128_sm90", "flash_fwd_hdim256_sm90"),
    ("flash_bwd_hdim192_sm90", "flash_bwd_hdim192_128_sm90"),
    ("flash_fwd_modified_hdim192_sm90", "flash_fwd_modified_hdim256_sm90"),
    ("flash_fwd_modified_hdim64_sm90", "flash_fwd_modified_hdim96_sm90"),
    ("flash_fwd_split_hdim256_sm80", "flash_fwd_split_hdim192_sm80", "flash_fwd_split_hdim512_sm80"),
    ("flash_fwd_split_hdim64_sm90", "flash_fwd_split_hdim128_sm90"),
    ("flash_fwd_jvp_hdim64_sm80", "flash_fwd_jvp_hdim128_sm80"),
    ("flash_fwd_jvp_hdim64_sm90", "flash_fwd_jvp_hdim128_sm90"),
)
ONLY_ARCH = {"sm80": None, "sm90": "90"}  # the one architecture that a family is compiled for; None: all that are asked


@dataclass(frozen=True)
class KernelFile:
    """What a file of instantiations/ says: FLASH_INSTANTIATE(function, head_dims)."""

    path: Path
    function: str  # run_mha_..._, which a header of params/ declares
    head_dims: str  # its arguments after the dtype
    head_dim: int  # the first of them
    dtypes: tuple[str, ...]  # of a KV cache: of the cache; of the e4m3 forward: of the output

    @property
    def arguments(self) -> list[str]:
        """Of the template, for each dtype."""
        return [f"Dtype::{ALL_DTYPES[dtype]}, {self.head_dims}" for dtype in self.dtypes]

    @property
    def only_arch(self) -> str | None:
        return ONLY_ARCH[self.path.stem.rsplit("_", 1)[-1]]

    @property
    def defines(self) -> list[str]:
        """Compiler flags that leave out the other dtypes (instantiations/dtypes.h)."""
        kind = CACHE_DTYPES if self.dtypes[0] in CACHE_DTYPES else DTYPES
        return [f"-DFLASH_WITHOUT_{dtype.upper()}" for dtype in kind if dtype not in self.dtypes]


def words(text: str) -> list[str]:
    """Items of a knob: separated by semicolons, commas or spaces."""
    return [word for word in re.split(r"[;,\s]+", text) if word]


def parse_archs(text: str) -> list[str]:
    """ "80;9.0, sm_100" -> ["80", "90", "100"], sorted, without duplicates; also names of NAMED_ARCHS."""
    archs = set()
    for word in (arch for name in words(text) for arch in NAMED_ARCHS.get(name, (name,))):
        arch = word.lower().removeprefix("sm_").replace(".", "")
        if not re.fullmatch(r"\d{2,3}", arch) or int(arch) < 80:
            raise BuildError(f"FLASH_ATTN_CUDA_ARCHS: expected architectures of at least 80, like 80;90, got {word!r}")
        archs.add(arch)
    if not archs:
        raise BuildError("FLASH_ATTN_CUDA_ARCHS: expected at least one architecture, like 80;90, got none")
    return sorted(archs, key=int)


def kernel_files(source_dir: Path) -> list[KernelFile]:
    """All instantiation files under `source_dir` (csrc/flash_attn), by head dim."""
    files = []
    for path in sorted((source_dir / "instantiations").glob("*.cu")):
        line = INSTANTIATION.search(path.read_text(encoding="utf-8"))
        if line is None or line[1] not in INSTANTIATED or path.stem.rsplit("_", 1)[-1] not in ONLY_ARCH:
            raise BuildError(f"{path}: expected FLASH_INSTANTIATE(run_mha_..., ...) and a name that ends in _sm80.cu")
        files.append(KernelFile(path, *line.group(2, 3), int(line[4]), INSTANTIATED[line[1]]))
    if not files:
        raise BuildError(f"{source_dir}: expected .cu files in instantiations, found none")
    return sorted(files, key=lambda f: (f.head_dim, f.path))


def auxiliary_files(source_dir: Path) -> list[Path]:
    """The kernel files that are compiled for every architecture, head dim and dtype alike."""
    return sorted((source_dir / "kernels").glob("*/*.cu"))


def select(
    files: list[KernelFile], head_dims: list[str] | None, dtypes: list[str] | None, archs: list[str] | None = None
) -> list[KernelFile]:
    """The files of a development subset that have code for some of `archs`, with the dtypes to compile; None selects
    all."""
    known_dims = sorted({f.head_dim for f in files})
    known_dtypes = dtypes_of(files)
    for dim in head_dims or []:
        if not dim.isdigit() or int(dim) not in known_dims:
            raise BuildError(f"FLASH_ATTN_HEAD_DIMS: expected some of {known_dims}, got {dim!r}")
    for dtype in dtypes or []:
        if dtype not in known_dtypes:
            raise BuildError(f"FLASH_ATTN_DTYPES: expected some of {known_dtypes}, got {dtype!r}")
    wanted = [
        replace(f, dtypes=tuple(d for d in f.dtypes if not dtypes or d in dtypes))
        for f in files
        if (not head_dims or str(f.head_dim) in head_dims)
        and (archs is None or f.only_arch is None or f.only_arch in archs)
    ]
    return [f for f in wanted if f.dtypes]


def left_out(files: list[KernelFile], selected: list[KernelFile]) -> list[KernelFile]:
    """The files, each with the dtypes that `selected` lacks."""
    held = {f.path: f.dtypes for f in selected}
    rest = [replace(f, dtypes=tuple(d for d in f.dtypes if d not in held.get(f.path, ()))) for f in files]
    return [f for f in rest if f.dtypes]


def dtypes_of(files: list[KernelFile]) -> list[str]:
    return [dtype for dtype in ALL_DTYPES if any(dtype in f.dtypes for f in files)]


def build_info(selected: list[KernelFile], archs: list[str], cuda: str) -> dict:
    """What the archive holds; the binding adds torch and commit."""
    return {
        "archs": archs,
        "head_dims": sorted({f.head_dim for f in selected}),
        "dtypes": dtypes_of(selected),
        "cuda": cuda,
    }


def is_whole(info: dict, source_dir: Path) -> bool:
    """Whether an archive with this build info has all head dims and dtypes of its architectures."""
    everything = build_info(select(kernel_files(source_dir), None, None, info["archs"]), info["archs"], info["cuda"])
    return info == everything


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


def manifest_source(info: dict, digest: str, missing: list[KernelFile], source_dir: Path) -> str:
    """C++ text that defines kernel_build_info(), the interface's digest for archive_info(), and a stub for each
    instantiation that a subset leaves out, so that the binding links against any archive."""
    headers = {path.name: path.read_text(encoding="utf-8") for path in sorted((source_dir / "params").glob("*.h"))}
    parameters = {name: text for header in headers.values() for name, text in DECLARATION.findall(header)}
    stubs = "".join(
        f"template <>\n"
        f"cudaError_t {f.function}<{arguments}>({parameters[f.function]}, cudaStream_t) {{\n"
        f"  return cudaErrorNotSupported;\n"
        f"}}\n"
        for f in missing
        for arguments in f.arguments
    )
    includes = "".join(f'#include "params/{name}"\n' for name, text in headers.items() if DECLARATION.search(text))
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
