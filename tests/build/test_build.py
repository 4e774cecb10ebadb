"""The kernel build: environment variables, check of registers and spills, the archive. Installs: test_install.py."""

import json
import os
import pty
import queue
import re
import shutil
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from importlib.util import find_spec
from pathlib import Path

import kernel_tables
import pytest

ROOT = Path(__file__).resolve().parents[2]
sys.path.insert(0, str(ROOT / "tools"))

import build_folder
import compile_commands
import kernel_build
import kernel_manifest
import machine
import resources
import toolchain
from errors import BuildError

PTXAS_LOG = """\
ptxas info    : 0 bytes gmem
ptxas info    : Compiling entry function '_Z1kIfEvPT_' for 'sm_80'
ptxas info    : Function properties for _Z1kIfEvPT_
    40 bytes stack frame, 92 bytes spill stores, 96 bytes spill loads
ptxas info    : Used 255 registers, used 1 barriers, 40 bytes cumulative stack size, 1024 bytes smem, 592 bytes cmem[0]
ptxas info    : Compiling entry function '_Z1kIfEvPT_' for 'sm_90'
ptxas info    : Function properties for _Z1kIfEvPT_
    0 bytes stack frame, 0 bytes spill stores, 0 bytes spill loads
ptxas info    : Used 128 registers, used 1 barriers
"""

# Stands in for nvcc: writes the ptxas log of FAKE_PTXAS, lets g++ make the object, and counts its calls.
FAKE_NVCC = """\
#!/usr/bin/env python3
import os, subprocess, sys
arguments = sys.argv[1:]
if "--version" in arguments:
    print("Cuda compilation tools, release 13.0, V13.0.88")
elif "--list-gpu-arch" in arguments:
    print("compute_80\\ncompute_90")
elif "--dryrun" in arguments:
    print("#$ TOP=" + os.path.dirname(os.path.dirname(os.path.abspath(__file__))), file=sys.stderr)
else:
    with open(os.environ["FAKE_CALLS"], "a") as calls:
        calls.write(" ".join(arguments) + "\\n")
    source = arguments[arguments.index("-c") + 1]
    dropped = ("-gencode", "-Xptxas", "--use_fast_math", "--expt", "-Xcompiler", "-Xfatbin", "--compress")
    host = [a for a in arguments if not a.startswith(dropped) and a not in ("-c", source)]
    if source.endswith(".cu"):
        print(open(os.environ["FAKE_PTXAS"]).read())
    sys.exit(subprocess.call(["g++", "-x", "c++", "-c", source, *host]))
"""

FLASH_H = """\
#pragma once
using cudaError_t = int;
using cudaStream_t = void*;
constexpr int cudaErrorNotSupported = 801;
namespace flash {
enum class Dtype { kFp16, kBf16 };
struct Flash_fwd_params {};
namespace plan {
struct FwdPlan {};
}  // namespace plan
template <Dtype kDtype, int kHeadDim>
cudaError_t run_mha_fwd_(const Flash_fwd_params& params, const plan::FwdPlan& plan, cudaStream_t stream);
const char* kernel_build_info();
}  // namespace flash
"""


# ---- knobs -----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("text", ["80;90", "90, 80", "8.0 9.0", "sm_80,sm_90,80"])
def test_archs(text):
    assert kernel_manifest.parse_archs(text) == ["80", "90"]


def test_archs_sort_by_number():
    assert kernel_manifest.parse_archs("120;90;100") == ["90", "100", "120"]
    default, requested = kernel_manifest.DEFAULT_ARCHS, kernel_manifest.REQUESTED_ARCHS
    assert kernel_manifest.parse_archs("default requested") == sorted({*default, *requested}, key=int)


@pytest.mark.parametrize("text", ["75", "hopper", ";", "9"])
def test_wrong_archs(text):
    with pytest.raises(BuildError, match="^FLASH_ATTN_CUDA_ARCHS: expected"):
        kernel_manifest.parse_archs(text)


def test_ptx_of_the_highest_arch_when_the_default_ones_are_built():
    assert kernel_build.gencode_flags(["90"]) == ["-gencode=arch=compute_90,code=sm_90"]
    assert kernel_build.gencode_flags(["80", "90"]) == [
        "-gencode=arch=compute_80,code=sm_80",
        "-gencode=arch=compute_90,code=[sm_90,compute_90]",
    ]
    assert kernel_build.gencode_flags(["80", "90", "120"])[-1] == "-gencode=arch=compute_120,code=[sm_120,compute_120]"
    assert kernel_build.gencode_flags(["100", "120"]) == [
        "-gencode=arch=compute_100,code=sm_100",
        "-gencode=arch=compute_120,code=sm_120",
    ]
    *_, ptx = re.findall(r"compute_(\d+)", kernel_build.gencode_flags(list(kernel_manifest.DEFAULT_ARCHS))[-1])
    without_code = [arch for arch in kernel_manifest.REQUESTED_ARCHS if int(arch) < int(ptx)]
    assert not without_code, "gencode_flags() has to give PTX that these run: the default build has no code of theirs"


FIRST_NVCC = {
    "80": (11, 0),
    "86": (11, 1),
    "89": (11, 8),
    "90": (11, 8),
    "100": (12, 8),
    "103": (12, 9),
    "120": (12, 8),
}


def test_releases_are_built_by_an_nvcc_that_knows_the_default_architectures():
    workflow = ROOT / ".github" / "workflows" / "release.yml"
    if not workflow.is_file():
        pytest.skip("a source distribution has no workflows")
    text = workflow.read_text(encoding="utf-8")
    versions = re.findall(r'"([\d.]+)"', re.search(r"^ +cuda: \[(.*)\]", text, re.MULTILINE)[1])
    assert re.findall(r"--archive kernels/cu([\d.]+)\.a", text) == versions != []
    oldest = min(tuple(map(int, version.split("."))) for version in versions)
    assert [arch for arch in kernel_manifest.DEFAULT_ARCHS if FIRST_NVCC[arch] > oldest] == []


@pytest.mark.parametrize("visible, expected", [([], ["80", "90"]), (["90"], ["90"]), (["75"], ["80", "90"])])
def test_default_archs(monkeypatch, visible, expected):
    monkeypatch.setattr(kernel_build, "visible_gpu_archs", lambda: visible)
    assert kernel_build.default_archs() == expected


def test_jobs_never_exceed_memory(monkeypatch):
    monkeypatch.setattr(machine.os, "sched_getaffinity", lambda _: range(16), raising=False)
    assert machine.parallel_jobs({}, memory_bytes=10 * machine.BYTES_PER_JOB) == 10
    assert machine.parallel_jobs({}, memory_bytes=1) == 1
    assert machine.parallel_jobs({}, memory_bytes=100 * machine.BYTES_PER_JOB) == 16
    assert machine.parallel_jobs({"MAX_JOBS": "3"}, memory_bytes=1) == 3
    with pytest.raises(BuildError, match="MAX_JOBS: expected a positive integer, got 'many'"):
        machine.parallel_jobs({"MAX_JOBS": "many"})


def test_memory_is_limited_by_the_container(tmp_path):
    meminfo = tmp_path / "meminfo"
    meminfo.write_text("MemTotal: 200 kB\nMemAvailable: 100 kB\n")
    assert machine.available_memory_bytes(meminfo, tmp_path / "none") == 100 * 1024
    for name, text in {"memory.max": "5000", "memory.current": "3000", "memory.stat": "anon 2000\nfile 1000"}.items():
        (tmp_path / name).write_text(text)
    assert machine.available_memory_bytes(meminfo, tmp_path) == 3000


# ---- ptxas -----------------------------------------------------------------------------------------------------------


def test_ptxas_log():
    first, second = resources.parse_ptxas_log(PTXAS_LOG)
    assert first == {
        "name": "_Z1kIfEvPT_",
        "arch": "sm_80",
        "registers": 255,
        "spill_stores": 92,
        "spill_loads": 96,
        "stack": 40,
        "smem": 1024,
    }
    assert (second["arch"], second["registers"], resources.spill_bytes(second)) == ("sm_90", 128, 0)


@pytest.mark.parametrize("code", [7508, 7510, 7511, 7515, 7517])
def test_fatal_diagnostics_by_number(code):
    line = f"ptxas info    : (C{code}) Potential Performance Loss: something in the function 'k'"
    assert resources.fatal_diagnostics(PTXAS_LOG + line) == [line]


@pytest.mark.parametrize(
    "line",
    [
        "ptxas warning : setmaxnreg is ignored to maintain minimum register requirement",
        "ptxas info : wgmma.mma_async instructions are serialized due to insufficient register resources",
    ],
)
def test_fatal_diagnostics_by_text(line):
    assert resources.fatal_diagnostics(line) == [line]


def test_no_fatal_diagnostics():
    assert resources.fatal_diagnostics(PTXAS_LOG) == []


def test_spill_budget():
    kernel = resources.parse_ptxas_log(PTXAS_LOG)[0]
    rules = [{"file": "flash_fwd_hdim256_*", "kernel": "kI", "arch": "sm_80", "spill_bytes": 96, "reason": "..."}]
    budget = {"default_spill_bytes": 0, "rules": rules}
    assert resources.over_budget(budget, "flash_fwd_hdim256_sm80", [kernel]) == []
    (line,) = resources.over_budget(budget, "flash_fwd_hdim64_sm80", [kernel])
    assert line == "flash_fwd_hdim64_sm80: _Z1kIfEvPT_ (sm_80) spills 96 bytes, budget 0 bytes"


@pytest.mark.parametrize("arch", ["sm_86", "sm_89", *map("sm_{}".format, kernel_manifest.REQUESTED_ARCHS)])
def test_a_spill_stops_no_install_on_an_architecture_that_kernels_are_not_tuned_for(arch):
    """An install compiles for the GPU that it sees. Rules for one architecture say nothing of another."""
    budget = resources.load_budget(ROOT / "tools" / "resource_budget.json")
    kernel = {"name": "k", "arch": arch, "spill_stores": 100, "spill_loads": 160}
    assert resources.over_budget(budget, "flash_bwd_hdim256_sm80", [kernel]) == []
    assert resources.over_budget(budget, "flash_bwd_hdim256_sm80", [{**kernel, "spill_loads": 161}])
    assert resources.over_budget(budget, "flash_fwd_hdim32_sm80", [{**kernel, "arch": "sm_90"}])


def test_the_default_architectures_are_the_tuned_ones():
    budget = resources.load_budget(ROOT / "tools" / "resource_budget.json")
    assert {f"sm_{arch}" for arch in kernel_manifest.DEFAULT_ARCHS} == set(budget["tuned_archs"]) - {"sm_90a"}


# ---- kernel files and archive ----------------------------------------------------------------------------------------


def test_the_tree_has_every_instantiation():
    files = kernel_manifest.kernel_files(ROOT / "csrc" / "flash_attn")
    assert {(f.function, f.head_dim) for f in files if f.dtypes == tuple(kernel_manifest.CACHE_DTYPES)} == {
        ("run_mha_fwd_split_", d) for d in kernel_tables.head_dims("kKv8Tiles", "kv_tiles.h")
    }
    assert {f.head_dim for f in files if f.dtypes == tuple(kernel_manifest.DTYPES)} == set(kernel_tables.MMA_SYNC)
    assert {(f.function, *f.arguments) for f in files if f.head_dims != str(f.head_dim)} == {
        (f"run_mha_{direction}_wgmma_", f"Dtype::kFp16, {d}, {d_v}", f"Dtype::kBf16, {d}, {d_v}")
        for direction, d, d_v in (("fwd", 192, 128), ("bwd", 192, 128), ("mla", 64, 512))
    }


def test_every_file_is_named_after_its_instantiation():
    for file in kernel_manifest.kernel_files(ROOT / "csrc" / "flash_attn"):
        name = file.function.removeprefix("run_mha_").removesuffix("_").removesuffix("_wgmma")
        name += "_8bit" if "e4m3" in file.dtypes else f"_{file.dtypes[0]}" if len(file.dtypes) == 1 else ""
        family = "sm90" if file.function.endswith("_wgmma_") else "sm80"
        assert file.path.stem == f"flash_{name}_hdim{file.head_dims.replace(', ', '_')}_{family}"


def test_the_wgmma_family_is_compiled_for_its_architecture_only():
    files = kernel_manifest.kernel_files(ROOT / "csrc" / "flash_attn")
    hopper = [f for f in files if f.only_arch == "90"]
    assert {(f.function, f.head_dims) for f in hopper if "," not in f.head_dims} == {
        (f"run_mha_{direction}_wgmma_", str(d))
        for direction, head_dims in (
            ("fwd", (*kernel_tables.WGMMA, 512)),
            ("fwd_modified", kernel_tables.WGMMA),
            ("fwd_listed", (64, 128, 256)),
            ("fwd_split", (64, 128)),
            ("fwd_fp8", kernel_tables.head_dims("kSm90Fp8FwdTiles", "fp8_fwd_plan.h")),
            ("fwd_jvp", kernel_tables.head_dims("kSm90JvpFwdTiles", "jvp_fwd_plan.h")),
            ("bwd", (*kernel_tables.head_dims("kSm90BwdTiles", "bwd_tiles.h"), 512)),
        )
        for d in head_dims
    }
    assert {f.only_arch for f in files} == {None, "90"}
    assert kernel_build.gencode_flags(["80", "90"], only_arch="90") == ["-gencode=arch=compute_90a,code=sm_90a"]
    assert kernel_manifest.select(files, None, None, ["80", "90"]) == files
    assert kernel_manifest.select(files, None, None, ["80"]) == [f for f in files if f.only_arch is None]


def test_the_wgmma_family_is_stubbed_where_its_architecture_is_not_built():
    files = kernel_manifest.kernel_files(ROOT / "csrc" / "flash_attn")
    for archs in (["80"], ["100"], ["80", "90"]):
        selected = kernel_manifest.select(files, ["64"], ["bf16"], archs)
        missing = kernel_manifest.left_out(files, selected)
        text = kernel_manifest.manifest_source({}, "0" * 64, missing, ROOT / "csrc" / "flash_attn")
        parameters = "const Flash_fwd_split_params& params, const plan::FwdPlan& plan, cudaStream_t"
        stub = f"cudaError_t run_mha_fwd_wgmma_<Dtype::kBf16, 64>({parameters})"
        assert (stub in text) == ("90" not in archs)
        assert "run_mha_fwd_wgmma_<Dtype::kBf16, 192, 128>(" in text
        assert text.count("return cudaErrorNotSupported;") == sum(len(f.dtypes) for f in missing)


def test_a_subset_of_dtypes_leaves_out_halves_of_files():
    files = kernel_manifest.kernel_files(ROOT / "csrc" / "flash_attn")
    selected = kernel_manifest.select(files, ["64"], ["bf16", "int8"])
    others = {"bf16": set(kernel_manifest.DTYPES) - {"bf16"}, "int8": set(kernel_manifest.CACHE_DTYPES) - {"int8"}}
    for dtype, rest in others.items():
        defines = {f"-DFLASH_WITHOUT_{name.upper()}" for name in rest}
        assert {frozenset(f.defines) for f in selected if f.dtypes == (dtype,)} == {frozenset(defines)}
    missing = {(f.head_dim, dtype) for f in kernel_manifest.left_out(files, selected) for dtype in f.dtypes}
    assert {d for d, _ in missing} == {f.head_dim for f in files}
    assert {dtype for d, dtype in missing if d == 64} == set.union(*others.values())
    assert not any(f.defines for f in kernel_manifest.select(files, None, None) if len(f.dtypes) > 1)


@pytest.mark.parametrize("archs", [["80"], ["90"], ["80", "90"]])
def test_an_archive_is_whole_with_all_head_dims_and_dtypes(archs):
    source = ROOT / "csrc" / "flash_attn"
    files = kernel_manifest.kernel_files(source)

    def is_whole(head_dims, dtypes):
        selected = kernel_manifest.select(files, head_dims, dtypes, archs)
        return kernel_manifest.is_whole(kernel_manifest.build_info(selected, archs, "13.0"), source)

    assert is_whole(None, None)
    head_dims = sorted({str(f.head_dim) for f in files})
    assert not any(is_whole([d for d in head_dims if d != left], None) for left in head_dims)
    assert not any(is_whole(None, [d for d in kernel_manifest.ALL_DTYPES if d != left]) for left in ("bf16", "int8"))


def test_joined_files_are_compiled_as_one(tmp_path):
    files = kernel_manifest.kernel_files(ROOT / "csrc" / "flash_attn")
    sources = {f.path: [f.function.endswith("wgmma_")] for f in files}
    joined = kernel_build.join(sources, tmp_path)
    stems = [stem for group in kernel_manifest.JOINED for stem in group]
    assert len(set(stems)) == len(stems) and set(stems) <= {path.stem for path in sources}
    assert sorted(path.stem for path in joined) == sorted(
        {path.stem for path in sources} - {stem for group in kernel_manifest.JOINED for stem in group[1:]}
    )
    for group in kernel_manifest.JOINED:
        target = tmp_path / f"{group[0]}.cu"
        included = re.findall(r'#include "instantiations/(\w+)\.cu"', target.read_text())
        assert included == list(group) and joined[target] == [group[0].endswith("_sm90")]
    one_dim = {path: flags for path, flags in sources.items() if path.stem.endswith("hdim128_sm90")}
    assert kernel_build.join(one_dim, tmp_path / "of one head dim") == one_dim
    assert not (tmp_path / "of one head dim").exists()


def test_unknown_subset():
    files = kernel_manifest.kernel_files(ROOT / "csrc" / "flash_attn")
    with pytest.raises(BuildError, match=r"FLASH_ATTN_HEAD_DIMS: expected some of \[32, .*512\], got '80'"):
        kernel_manifest.select(files, ["80"], None)
    with pytest.raises(BuildError, match="FLASH_ATTN_DTYPES: expected some of .*, got 'fp8'"):
        kernel_manifest.select(files, None, ["fp8"])


@pytest.fixture
def stand_in(tmp_path, monkeypatch):
    """A source tree of one kernel file and a stand-in nvcc. Returns a function that builds its fp16 half."""
    source = tmp_path / "source with space"
    instantiations = source / "instantiations"
    instantiations.mkdir(parents=True)
    (source / "params").mkdir()
    (source / "params" / "flash.h").write_text(FLASH_H)
    shutil.copy(ROOT / "csrc" / "flash_attn" / "instantiations" / "dtypes.h", instantiations)
    (instantiations / "flash_fwd_hdim64_sm80.cu").write_text(
        '#include "instantiations/dtypes.h"\n#include "params/flash.h"\ntemplate <flash::Dtype kDtype, int kHeadDim>\n'
        "int flash::run_mha_fwd_(const Flash_fwd_params&, const plan::FwdPlan&, void*) { return 0; }\n"
        "FLASH_INSTANTIATE(run_mha_fwd_, 64)\n"
    )
    cutlass = tmp_path / "cutlass" / "include" / "cutlass"
    cutlass.mkdir(parents=True)
    (cutlass / "version.h").write_text("#define CUTLASS_MAJOR 4\n#define CUTLASS_MINOR 2\n#define CUTLASS_PATCH 0\n")
    nvcc = tmp_path / "bin" / "nvcc"
    nvcc.parent.mkdir()
    nvcc.write_text(FAKE_NVCC)
    nvcc.chmod(0o755)
    monkeypatch.setenv("CUTLASS_PATH", str(tmp_path / "cutlass"))
    monkeypatch.setenv("FAKE_CALLS", str(tmp_path / "calls"))
    monkeypatch.setenv("FAKE_PTXAS", str(tmp_path / "ptxas"))
    (tmp_path / "ptxas").write_text(PTXAS_LOG.replace("92 bytes", "0 bytes").replace("96 bytes", "0 bytes"))
    toolkit = toolchain.describe_toolkit(nvcc)
    budget = tmp_path / "budget.json"
    budget.write_text('{"default_spill_bytes": 0, "rules": []}')
    build = kernel_build.KernelBuild(source, tmp_path / "out", ["90"], dtypes=["fp16"], budget=budget)
    return lambda: kernel_build.build_kernels(build, toolkit, [])


needs_ninja = pytest.mark.skipif(
    find_spec("ninja") is None and shutil.which("ninja") is None, reason="ninja is not installed"
)
needs_compiler = pytest.mark.skipif(shutil.which("g++") is None, reason="g++ is not installed")


def kernel_compilations(tmp_path):
    calls = tmp_path / "calls"
    return calls.read_text().count("hdim64_sm80.cu") if calls.exists() else 0


@needs_ninja
@needs_compiler
def test_archive_of_a_subset_links_and_tells_what_it_holds(stand_in, tmp_path, capfd):
    info = stand_in()
    archive = tmp_path / "out" / kernel_build.ARCHIVE
    assert info["archs"] == ["90"]
    assert (info["head_dims"], info["dtypes"], info["cuda"]) == ([64], ["fp16"], "13.0")
    assert kernel_manifest.archive_info(archive, tmp_path / "source with space") == info

    output = capfd.readouterr().out
    assert re.search(r"\[\d/3\] flash_fwd_hdim64_sm80\.cu [\d.]+ s, max 255 registers, 0 B spills", output)
    assert re.search(r"1 kernel files, 1 compiled: \d+ s, \d+ CPU seconds, libflash_attn_kernels\.a \d+\.\d MB", output)

    user = tmp_path / "user.cpp"
    user.write_text(
        '#include <cstdio>\n#include "params/flash.h"\nusing namespace flash;\nint main() {\n'
        "  const int kernel = run_mha_fwd_<Dtype::kFp16, 64>({}, {}, nullptr);\n"
        "  const int stub = run_mha_fwd_<Dtype::kBf16, 64>({}, {}, nullptr);\n"
        '  std::printf("%d %d %s\\n", kernel, stub, kernel_build_info());\n}\n'
    )
    program = tmp_path / "user"
    include = tmp_path / "source with space"
    subprocess.run(["g++", "-std=c++17", f"-I{include}", user, archive, "-o", program], check=True)
    printed = subprocess.run([program], capture_output=True, text=True, check=True).stdout
    kernel, stub, text = printed.split(" ", 2)
    assert (kernel, stub) == ("0", "801")
    assert json.loads(text) == info


def test_progress_is_seen_on_the_terminal_of_an_install_that_pip_keeps_quiet(tmp_path):
    """One line that moves, and the last one stays; none where the output itself is seen."""
    program = (
        "import sys; sys.path.insert(0, ''); import build_log, kernel_build\n"
        "results = [{'unchanged': False}, {'unchanged': True}]\n"
        "build_log.show(kernel_build.progress(2, 12, results, 30), end='')\n"
        "build_log.announce('built')\n"
    )
    command = f'{sys.executable} -c "{program}"'
    seen = []
    for redirection in (f" > {tmp_path / 'output'}", ""):
        process, terminal = pty.fork()
        if process == 0:
            os.chdir(ROOT / "tools")
            os.execv("/bin/sh", ["sh", "-c", command + redirection])
        os.waitpid(process, 0)
        seen.append(os.read(terminal, 1000).decode())
        os.close(terminal)
    assert seen[0].split("\r\033[K") == ["\r\n  flash_attn: 2 of 12 files, at most 5 min left", "built\r\n"]
    assert (tmp_path / "output").read_text() == seen[1].replace("\r", "") == "built\n"


@needs_ninja
@needs_compiler
def test_compile_commands_are_those_of_the_compiler(stand_in, tmp_path):
    stand_in()
    entries = {Path(entry["file"]).name: entry for entry in compile_commands.entries_of(tmp_path / "out")}
    assert set(entries) == {"flash_fwd_hdim64_sm80.cu", "kernel_manifest.cpp"}
    entry = entries["flash_fwd_hdim64_sm80.cu"]
    assert Path(entry["directory"]) == tmp_path / "out"
    assert entry["arguments"][0] == str(tmp_path / "bin" / "nvcc") and "-std=c++17" in entry["arguments"]
    assert entry["arguments"][-4:] == ["-c", entry["file"], "-o", "flash_fwd_hdim64_sm80.o"]


@needs_ninja
@needs_compiler
def test_rebuild_follows_contents_not_times(stand_in, tmp_path, capfd):
    stand_in()
    assert kernel_compilations(tmp_path) == 1
    header = tmp_path / "source with space" / "params" / "flash.h"
    os.utime(header, (2**31, 2**31 - 60))
    stand_in()
    assert kernel_compilations(tmp_path) == 1
    assert "flash_fwd_hdim64_sm80.cu unchanged" in capfd.readouterr().out
    header.write_text(FLASH_H + "// changed\n")
    stand_in()
    assert kernel_compilations(tmp_path) == 2


@needs_ninja
@needs_compiler
def test_builds_of_one_folder_take_turns(stand_in, tmp_path, monkeypatch):
    """Two installs of one checkout share its objects: one compiles them, the other waits and finds them."""
    said: queue.SimpleQueue[str] = queue.SimpleQueue()
    monkeypatch.setattr(build_folder, "say", said.put)
    with ThreadPoolExecutor() as pool:
        with build_folder.alone_in(tmp_path / "out"):
            builds = [pool.submit(stand_in) for _ in range(2)]
            for _ in builds:
                assert said.get(timeout=300).startswith("waiting for another build in")
            assert not (tmp_path / "out" / "build.ninja").exists()
        first, second = [build.result() for build in builds]
    assert first == second and kernel_compilations(tmp_path) == 1


@needs_ninja
@needs_compiler
@pytest.mark.parametrize(
    "log, message",
    [
        (PTXAS_LOG, r"k<float>\(float\*\) \(sm_80\) spills 96 bytes, budget 0 bytes"),
        ("ptxas info : (C7510) wgmma.mma_async instructions are serialized", r"ptxas: .*\(C7510\)"),
    ],
)
def test_bad_kernels_are_refused_every_time(stand_in, tmp_path, log, message):
    (tmp_path / "ptxas").write_text(log)
    for _ in range(2):
        with pytest.raises(BuildError, match=message):
            stand_in()
        assert not (tmp_path / "out" / kernel_build.ARCHIVE).exists()


@needs_ninja
@needs_compiler
def test_spills_of_another_cuda_than_the_tuned_one_are_warnings(stand_in, tmp_path, capfd):
    """torch decides which CUDA a user has; ptxas of 12 spills where that of 13 does not."""
    (tmp_path / "ptxas").write_text(PTXAS_LOG)
    (tmp_path / "budget.json").write_text('{"default_spill_bytes": 0, "tuned_cuda": "14", "rules": []}')
    stand_in()
    assert re.search(r"^    .*\(sm_80\) spills 96 bytes, budget 0 bytes$", capfd.readouterr().out, re.MULTILINE)


@needs_ninja
@needs_compiler
def test_compile_errors_are_shown(stand_in, tmp_path):
    (tmp_path / "source with space" / "params" / "flash.h").write_text(f"#error broken header\n{FLASH_H}")
    with pytest.raises(BuildError, match="broken header"):
        stand_in()


@pytest.mark.parametrize("version, mode", [("12.4", []), ("12.9", []), ("13.0", ["--compress-mode=size"])])
def test_machine_code_is_compressed_for_every_driver_of_its_cuda(version, mode):
    """Code of CUDA 12 in mode size needs a driver of 550.54, which CUDA 12.0 to 12.3 do not."""
    toolkit = toolchain.CudaToolkit(Path("nvcc"), Path("/"), version, f"{version}.1")
    assert kernel_build.compression_flags(toolkit) == ["-Xfatbin=-compress-all", *mode]


def test_unknown_arch_is_refused(stand_in, tmp_path):
    toolkit = toolchain.describe_toolkit(tmp_path / "bin" / "nvcc")
    with pytest.raises(BuildError, match=r"FLASH_ATTN_CUDA_ARCHS: nvcc 13\.0 does not know 999"):
        kernel_build.check_archs(toolkit, ["90", "999"])


def test_other_archives_are_refused(tmp_path):
    (tmp_path / "other.a").write_bytes(b"!<arch>\n")
    with pytest.raises(BuildError, match="FLASH_ATTN_KERNEL_ARCHIVE: expected an archive"):
        kernel_manifest.archive_info(tmp_path / "other.a", ROOT / "csrc" / "flash_attn")


@needs_ninja
@needs_compiler
def test_archives_of_another_interface_are_refused(stand_in, tmp_path):
    """Else the binding would hand the kernels a struct of another layout."""
    stand_in()
    source = tmp_path / "source with space"
    (source / "params" / "flash.h").write_text(
        FLASH_H.replace("struct Flash_fwd_params {}", "struct Flash_fwd_params { int b; }")
    )
    message = "FLASH_ATTN_KERNEL_ARCHIVE: expected an archive built from this tree's kernel sources, .* build it again"
    with pytest.raises(BuildError, match=message):
        kernel_manifest.archive_info(tmp_path / "out" / kernel_build.ARCHIVE, source)


# ---- the archive's digest --------------------------------------------------------------------------------------------

CSRC = ROOT / "csrc" / "flash_attn"


@pytest.fixture
def sources(tmp_path):
    """A copy of the sources to change."""
    return Path(shutil.copytree(CSRC, tmp_path / "csrc"))


def includes(files, *options):
    """Names of what the preprocessor of nvcc's host pass includes, or with the macro in `options` the device pass's."""
    command = ["g++", "-x", "c++", "-std=c++17", "-M", "-MG", *options, f"-I{CSRC}", *map(str, files)]
    rules = subprocess.run(command, capture_output=True, text=True, check=True).stdout
    return {word for word in rules.replace("\\\n", " ").split() if not word.endswith(".o:")}


def compiler_dependencies(files):
    """What both passes read of csrc/flash_attn for `files`; headers that are not found are skipped."""
    paths = {Path(word).resolve() for word in includes(files) | includes(files, "-D__CUDA_ARCH__=900")}
    return {path for path in paths if path.is_relative_to(CSRC) and path.is_file()}


def files_of_families():
    """An instantiation of each family: the others are the same but for numbers."""
    return list(
        {tuple(kernel_manifest.own_includes(f.path, CSRC)): f.path for f in kernel_manifest.kernel_files(CSRC)}.values()
    )


@needs_compiler
def test_the_host_pass_of_launches_leaves_cute_out():
    """It would take longer than the kernels of some files."""
    for path in files_of_families():
        libraries = {name for name in includes([path]) if name.startswith(("cute/", "cutlass/"))}
        assert libraries == {"cute/int_tuple.hpp", "cute/underscore.hpp"}, path.name
        assert "cute/tensor.hpp" in includes([path], "-D__CUDA_ARCH__=900"), path.name


@needs_compiler
def test_the_digest_covers_what_the_compiler_reads():
    files = [*files_of_families(), *kernel_manifest.auxiliary_files(CSRC)]
    covered = set(kernel_manifest.shared_sources(CSRC))
    assert {CSRC / "plan" / name for name in ("grid.h", "decode_plan.h", "tiles.h")} <= covered
    read = compiler_dependencies(files)
    assert {CSRC / "plan" / "grid.h", CSRC / "kernels" / "sm90" / "fwd_mainloop.h"} <= read
    assert read <= covered
    assert not [path for path in covered if CSRC / "api" in path.parents], "headers of the binding alone"


def test_a_header_of_each_folder_changes_the_digest(sources, monkeypatch):
    found = kernel_manifest.shared_sources(sources)
    assert {"params/flash.h", "params/kvcache.h", "plan/grid.h", "core/kv_schedule.h", "kernels/sm90/gemm.h"} <= {
        path.relative_to(sources).as_posix() for path in found
    }
    digests = {kernel_manifest.interface_digest(sources)}
    monkeypatch.setattr(kernel_manifest, "shared_sources", lambda source_dir: found)  # a line more includes nothing new
    changed = list({path.parent: path for path in found}.values())
    for path in changed:
        content = path.read_bytes()
        path.write_bytes(content + b"\n")
        digests.add(kernel_manifest.interface_digest(sources))
        path.write_bytes(content)
    assert len(digests) == 1 + len(changed) > 5


@pytest.mark.parametrize(
    "line, place",
    [
        ('#include "new.h"', "instantiations/new.h"),
        ('#include "params/new.h"', "params/new.h"),
        ('  #  include "plan/new.h"', "plan/new.h"),
        ('#include "../plan/new.h"', "plan/new.h"),
        ("#include <kernels/common/new.h>", "kernels/common/new.h"),
    ],
)
def test_new_headers_change_the_digest(sources, line, place):
    """Whatever the form of their include, through another header too."""
    kernel = sorted((sources / "instantiations").glob("*.cu"))[0]
    kernel.write_text(f"{line}\n{kernel.read_text()}")
    (sources / place).write_text('#include "core/newer.h"\n')
    (sources / "core" / "newer.h").write_text("constexpr int kRows = 64;\n")
    before = kernel_manifest.interface_digest(sources)
    assert {sources / place, sources / "core" / "newer.h"} <= set(kernel_manifest.shared_sources(sources))
    (sources / "core" / "newer.h").write_text("constexpr int kRows = 96;\n")
    assert kernel_manifest.interface_digest(sources) != before


def test_the_digest_needs_neither_the_place_of_the_tree_nor_the_binding(sources, tmp_path):
    before = kernel_manifest.interface_digest(sources)
    (sources / "flash_api.cpp").write_text((sources / "flash_api.cpp").read_text() + "// changed\n")
    (sources / "api" / "checks.h").write_text((sources / "api" / "checks.h").read_text() + "// changed\n")
    (tmp_path / "link").symlink_to(sources)
    assert kernel_manifest.interface_digest(tmp_path / "link") == before
    assert kernel_manifest.interface_digest(CSRC) == before
