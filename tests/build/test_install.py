"""Installs: what the build finds, what it says when something is missing, and CPU-only wheels."""

import dataclasses
import json
import os
import re
import shutil
import subprocess
import sys
import zipfile
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
sys.path.insert(0, str(ROOT / "tools"))

import binding_build
import install_plan
import kernel_build
import machine
import setup_env
import target_env
import toolchain
from errors import BuildError

# ---- discovery -------------------------------------------------------------------------------------------------------


def make_cutlass(include, version="4 3 1"):
    names = zip(("MAJOR", "MINOR", "PATCH"), version.split())
    (include / "cutlass").mkdir(parents=True)
    (include / "cutlass" / "version.h").write_text("".join(f"#define CUTLASS_{n} {v}\n" for n, v in names))


def test_cutlass_is_searched_in_order(tmp_path, monkeypatch):
    monkeypatch.delenv("CUTLASS_PATH", raising=False)
    site = tmp_path / "site"
    make_cutlass(site / toolchain.CUTLASS_WHEEL_INCLUDE)
    assert toolchain.find_cutlass(tmp_path, [str(site)], tmp_path / "no").include.is_relative_to(site)
    make_cutlass(tmp_path / "third_party" / "cutlass" / "include")
    found = toolchain.find_cutlass(tmp_path, [str(site)], tmp_path / "no")
    assert found.include.is_relative_to(tmp_path / "third_party")
    assert found.version == "4.3.1"
    make_cutlass(tmp_path / "mine" / "include")
    monkeypatch.setenv("CUTLASS_PATH", str(tmp_path / "mine"))
    assert toolchain.find_cutlass(tmp_path, [str(site)], tmp_path / "no").include == tmp_path / "mine" / "include"
    monkeypatch.setenv("CUTLASS_PATH", str(tmp_path / "absent"))
    with pytest.raises(BuildError, match="CUTLASS_PATH: expected a folder with include/cutlass/version.h, got"):
        toolchain.find_cutlass(tmp_path, [str(site)], tmp_path / "no")


def test_missing_cutlass_names_all_ways(tmp_path, monkeypatch):
    monkeypatch.delenv("CUTLASS_PATH", raising=False)
    monkeypatch.setenv("PIP_NO_INDEX", "1")
    monkeypatch.setenv("PIP_FIND_LINKS", str(tmp_path))
    monkeypatch.setenv("PATH", os.defpath)
    monkeypatch.delenv("UV", raising=False)
    with pytest.raises(BuildError) as error:
        toolchain.find_cutlass(tmp_path, [], tmp_path / "download")
    pinned = toolchain.pinned_cutlass()
    for way in ("CUTLASS_PATH=", "third_party/cutlass", f"pip install --no-deps {pinned}", "index"):
        assert way in str(error.value)
    assert f'kernels = ["{pinned}"]' in (ROOT / "pyproject.toml").read_text(), "the extra installs the pinned release"


def test_cuda_headers_without_a_toolkit(tmp_path, monkeypatch):
    for name in ("CUDA_HOME", "CUDA_PATH"):
        monkeypatch.delenv(name, raising=False)
    include = tmp_path / "nvidia" / "cu98" / "include"
    (include / "crt").mkdir(parents=True)
    (include / "cuda_runtime_api.h").write_text("#define CUDART_VERSION  98020\n")
    with pytest.raises(BuildError, match=r"CUDA headers: .*\n  pip install .*'nvidia-cuda-crt==98\.\*'$"):
        monkeypatch.setattr(toolchain, "pip_toolkit_roots", lambda _: [include.parent])
        monkeypatch.setattr(toolchain.Path, "is_dir", lambda path: path == include)
        toolchain.cuda_header_dirs([str(tmp_path)], "98")
    (include / "crt" / "host_defines.h").touch()
    assert toolchain.cuda_header_dirs([str(tmp_path)], "98") == [include]


@pytest.fixture
def nvccs(tmp_path, monkeypatch):
    """Returns a function that makes an nvcc of a CUDA version in tmp_path/NAME; nothing else has one."""
    for name in ("CUDA_HOME", "CUDA_PATH", "CONDA_PREFIX"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("PATH", os.defpath)
    monkeypatch.setattr(toolchain, "other_roots", lambda sites, real=toolchain.other_roots: real(sites)[:-1])

    def make(name, version):
        nvcc = tmp_path / name / "bin" / "nvcc"
        nvcc.parent.mkdir(parents=True)
        text = f"release {version}, V{version}.1"
        nvcc.write_text(f'#!/bin/sh\n[ "$1" = --version ] && echo "{text}" || echo "#$ TOP={nvcc.parent.parent}" >&2\n')
        nvcc.chmod(0o755)
        return nvcc.parent.parent

    return make


def test_the_nvcc_of_torchs_cuda_is_taken_wherever_it_is(nvccs, tmp_path, monkeypatch):
    assert toolchain.find_toolkit([str(tmp_path)]) is None
    on_path, conda = nvccs("system", "12.4"), nvccs("conda", "13.0")
    monkeypatch.setenv("PATH", f"{on_path / 'bin'}{os.pathsep}{os.defpath}")
    assert toolchain.find_toolkit([], "13").version == "12.4", "none that fits: the plan says so"
    monkeypatch.setenv("CONDA_PREFIX", str(conda))
    assert toolchain.find_toolkit([], "13").root == conda
    assert toolchain.find_toolkit([], "12").root == toolchain.find_toolkit([]).root == on_path
    pip = nvccs("site/nvidia/cu13", "13.2")
    assert toolchain.find_toolkit([str(tmp_path / "site")], "13").root == pip
    monkeypatch.setenv("CUDA_HOME", str(on_path))
    assert toolchain.find_toolkit([], "13").root == on_path, "chosen"


def test_headers_of_a_conda_toolkit(nvccs, monkeypatch):
    conda = nvccs("conda", "13.0")
    include = (
        conda / "targets" / f"{ {'aarch64': 'sbsa'}.get(os.uname().machine, os.uname().machine) }-linux" / "include"
    )
    (conda / "include").mkdir()
    assert toolchain.describe_toolkit(conda / "bin" / "nvcc").include == conda / "include"
    (include / "crt").mkdir(parents=True)
    (include / "crt" / "host_defines.h").touch()
    (include / "cuda_runtime_api.h").write_text("#define CUDART_VERSION 13000\n")
    assert toolchain.describe_toolkit(conda / "bin" / "nvcc").include == include
    monkeypatch.setenv("CONDA_PREFIX", str(conda))
    assert toolchain.cuda_header_dirs([], "13") == [include]


def test_other_distributions_with_our_files_are_found(tmp_path, monkeypatch):
    """Those that pip does not replace; flash-attn-4 has a folder of flash_attn and no flash_attn/__init__.py."""
    for name, record in {
        "fork": "flash_attn/__init__.py,,\n", "flash_attn": "flash_attn/__init__.py,,\n", "Flash.Attn": None,
        "flash-attn-4": "flash_attn/cute/__init__.py,,\n",
    }.items():  # fmt: skip
        info = tmp_path / f"{name}-1.0.dist-info"
        info.mkdir()
        (info / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {name}\nVersion: 1.0\n")
        (info / "INSTALLER").write_text("conda\n" if record is None else "pip\n")
        if record is not None:
            (info / "RECORD").write_text(record)
    for folder in ("flash_attn", "flash_attn/cute"):  # Python 3.12 leaves out files that do not exist
        (tmp_path / folder).mkdir()
        (tmp_path / folder / "__init__.py").touch()
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    assert sorted(target_env.probe(sys.executable)["other_owners"]) == [["Flash.Attn", "conda"], ["fork", "pip"]]


def test_isolation_overlay_is_removed(monkeypatch, tmp_path):
    overlay = str(tmp_path / "pip-build-env-x" / "site")
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join([overlay, "/mine"]))
    monkeypatch.setenv("PYTHONNOUSERSITE", "1")
    environment = toolchain.clean_environment()
    assert environment["PYTHONPATH"] == "/mine"
    assert "PYTHONNOUSERSITE" not in environment


def test_target_torch_is_this_one(tmp_path, monkeypatch):
    """Stray modules in the temporary folder do not matter."""
    import torch

    (tmp_path / "dis.py").write_text("raise SystemExit(1)\n")
    monkeypatch.setattr(target_env.tempfile, "tempdir", str(tmp_path))
    found = target_env.find_target_torch(ROOT)
    assert found.version == torch.__version__
    assert found.cuda == torch.version.cuda
    assert (found.lib_dir / "libc10.so").exists()
    assert binding_build.cxx_standard(found) in ("c++17", "c++20")


def test_target_can_be_chosen(monkeypatch):
    monkeypatch.setenv("FLASH_ATTN_PYTHON", "/nonexistent/python")
    assert [c.executable for c in target_env.candidate_interpreters(ROOT)] == ["/nonexistent/python"]
    assert target_env.find_target_torch(ROOT) is None


def test_commit_outside_a_checkout(tmp_path, monkeypatch):
    monkeypatch.delenv("FLASH_ATTN_BUILD_COMMIT", raising=False)
    assert machine.commit_of(tmp_path) == "unknown"
    monkeypatch.setenv("FLASH_ATTN_BUILD_COMMIT", "abc123")
    assert machine.commit_of(tmp_path) == "abc123"


# ---- the module's run path -----------------------------------------------------------------------------------------

needs_tools = pytest.mark.skipif(
    None in map(shutil.which, ("g++", "readelf", "ar")),
    reason="g++ or binutils are not installed",
)


def make_library(path, text):
    path.parent.mkdir(parents=True, exist_ok=True)
    command = ["g++", "-shared", "-fPIC", "-x", "c++", "-", f"-Wl,-soname,{path.name}", "-o", path]
    subprocess.run(command, input=text, text=True, check=True)


@pytest.fixture
def stand_in_torch(tmp_path):
    """A torch whose libraries hold one function each, and CUDA's runtime from pip, in one site-packages."""
    site = tmp_path / "machine" / "site-packages"
    for name in binding_build.TORCH_LIBRARIES:
        make_library(site / "torch" / "lib" / f"lib{name}.so", f'extern "C" int of_{name}() {{ return 1; }}')
    cudart = site / "nvidia" / "cu13" / "lib" / "libcudart.so.13"
    make_library(cudart, 'extern "C" int of_cudart() { return 1; }')
    settings = site / "torch" / "utils" / "cpp_extension.py"
    settings.parent.mkdir()
    settings.touch()
    return target_env.TargetTorch("python", "2.99", site / "torch", "13.0", 1, cudart, None, {}, [str(site)])


def dynamic_section(module):
    """[(tag, text)] of readelf -d."""
    text = subprocess.run(["readelf", "-dW", module], capture_output=True, text=True, check=True).stdout
    return re.findall(r"\((NEEDED|RPATH|RUNPATH|SONAME)\)[^\[]*\[(.*)\]", text)


@needs_tools
def test_the_module_holds_no_path_of_the_building_machine(stand_in_torch, tmp_path, monkeypatch):
    """And finds torch's libraries in the site-packages that the wheel is unpacked into, wherever that is."""
    functions = [f"of_{name}" for name in (*binding_build.TORCH_LIBRARIES, "cudart")]
    source = tmp_path / "source"
    source.mkdir()
    text = "".join(f"int {function}();\n" for function in functions)
    total = " + ".join(f"{function}()" for function in functions)
    visible = '__attribute__((visibility("default")))'
    (source / "flash_api.cpp").write_text(f'extern "C" {{\n{text}{visible} int total() {{ return {total}; }}\n}}\n')
    archive = tmp_path / "empty.a"
    subprocess.run(["ar", "crs", archive], check=True)
    site = stand_in_torch.torch_dir.parent
    module = site / "flash_attn_2_cuda.so"
    monkeypatch.setattr(binding_build, "imported_info", lambda *_: "{}")
    binding_build.build_binding(stand_in_torch, source, archive, [], "abc", module)

    section = dynamic_section(module)
    run_path = ":".join(value for tag, value in section if tag in ("RPATH", "RUNPATH"))
    assert run_path.split(":") == ["$ORIGIN/torch/lib", "$ORIGIN/nvidia/cu13/lib"]
    assert {f"lib{name}.so" for name in binding_build.TORCH_LIBRARIES} <= {v for tag, v in section if tag == "NEEDED"}
    assert not [value for tag, value in section if value.startswith("/")]

    (tmp_path / "machine").rename(tmp_path / "another")
    moved = tmp_path / "another" / "site-packages" / module.name
    code = "import ctypes, sys; print(ctypes.CDLL(sys.argv[1]).total())"
    done = subprocess.run([sys.executable, "-c", code, moved], capture_output=True, text=True)
    assert (done.returncode, done.stdout.strip()) == (0, str(len(functions))), done.stderr


@needs_tools
@pytest.mark.parametrize("cudart", ["/usr/local/cuda/lib64/libcudart.so.13", "../other/nvidia/lib/libcudart.so.13"])
def test_no_run_path_leaves_site_packages(stand_in_torch, cudart):
    torch = dataclasses.replace(stand_in_torch, cudart=stand_in_torch.torch_dir.parent / cudart)
    assert binding_build.run_paths(torch) == ["$ORIGIN/torch/lib"]


# ---- what an install makes of a machine ------------------------------------------------------------------------------


@pytest.fixture
def machine_with(monkeypatch, tmp_path):
    """Returns a function that makes the plan of an install on a made-up machine."""

    def plan(gpus=(), torch="13.0", nvcc=None, owners=(), **variables):
        """torch: its CUDA version, "cpu" for a CPU build, None for no torch. nvcc: its CUDA version, or None."""
        others = ("FLASH_ATTN_KERNEL_ARCHIVE", "CUDA_HOME", "CUDA_PATH", "CONDA_PREFIX", "CXX")
        for name in (*install_plan.KERNEL_KNOBS, *install_plan.CPU_KNOBS, *others):
            monkeypatch.delenv(name, raising=False)
        for name, value in variables.items():
            monkeypatch.setenv(name, value)
        cuda = None if torch == "cpu" else torch
        found = target_env.TargetTorch("python", "2.99", tmp_path, cuda, 1, None, None, {}, [], owners)
        toolkit = toolchain.CudaToolkit(tmp_path / "nvcc", tmp_path, nvcc, f"{nvcc}.88") if nvcc else None
        monkeypatch.setattr(kernel_build, "visible_gpu_archs", lambda: list(gpus))
        monkeypatch.setattr(install_plan, "find_target_torch", lambda root: found if torch else None)
        monkeypatch.setattr(install_plan, "find_toolkit", lambda site_dirs, major=None: toolkit)
        return install_plan.make_plan(ROOT, ROOT / "csrc" / "flash_attn")

    return plan


@pytest.mark.parametrize(
    "machine, reason",
    [
        ({}, "no GPU is visible, and no nvcc is in CUDA_HOME"),
        ({"torch": None}, "no GPU is visible, and no nvcc is in CUDA_HOME"),
        ({"gpus": ["75"]}, "no GPU is visible, and no nvcc is in CUDA_HOME"),
        ({"gpus": ["90"], "torch": "cpu"}, "torch 2.99 is a CPU build"),
        ({"nvcc": "13.0", "torch": "cpu"}, "torch 2.99 is a CPU build"),
        ({"gpus": ["90"], "FLASH_ATTN_CPU_ONLY": "1"}, "FLASH_ATTN_CPU_ONLY is set"),
        ({"gpus": ["90"], "nvcc": "13.0", "FLASH_ATTN_CPU_ONLY": "1"}, "FLASH_ATTN_CPU_ONLY is set"),
    ],
    ids=str,
)
def test_cpu_only_where_it_is_wanted(machine_with, machine, reason):
    plan = machine_with(**machine)
    assert plan.torch is None and plan.cpu_only_reason.startswith(reason)


@pytest.mark.parametrize("gpus", [[], ["90"]])
def test_kernels_where_all_is_there(machine_with, gpus):
    plan = machine_with(gpus=gpus, nvcc="13.0")
    assert (plan.torch.version, plan.toolkit.version, plan.archive) == ("2.99", "13.0", None)


PIP_NVCC = "pip install 'cuda-toolkit[nvcc,nvvm,crt,cccl,cudart]==13.0.*'"
APT_NVCC = (
    "conda install -c nvidia cuda-toolkit=12.8   (or, from NVIDIA's repository: apt-get install cuda-toolkit-12-8)"
)
GCC = "apt-get install g++   (RHEL: dnf install gcc-c++; any other: set CXX)"
CONDA_GCC = {"nvcc": "13.0", "CXX": "no-g++", "CONDA_PREFIX": "/c"}
ARCHIVE = {"FLASH_ATTN_KERNEL_ARCHIVE": "/no/kernels.a"}


@pytest.mark.parametrize(
    "machine, first, last",
    [
        ({"gpus": ["80", "90"]}, "nvcc: a GPU is visible (sm_80, sm_90) and torch 2.99 is a CUDA", PIP_NVCC),
        ({"gpus": ["90"], "torch": "12.8"}, "nvcc: a GPU is visible (sm_90)", APT_NVCC),
        ({"FLASH_ATTN_CUDA_ARCHS": "90"}, "nvcc: FLASH_ATTN_CUDA_ARCHS asks for kernels", PIP_NVCC),
        ({"gpus": ["90"], "torch": None}, "torch: not found", "pip install torch"),
        ({"nvcc": "13.0", "torch": None}, "torch: not found", "pip install torch"),
        ({"FLASH_ATTN_CUDA_ARCHS": "90", "torch": None}, "torch: not found", "pip install torch"),
        ({"nvcc": "13.0", "torch": "12.8"}, "CUDA: the kernels' CUDA is 13.0", APT_NVCC),
        ({"nvcc": "12.8", "CUDA_HOME": "/cuda"}, "CUDA: the", f"unset CUDA_HOME CUDA_PATH; {PIP_NVCC}"),
        ({"nvcc": "13.0", "CXX": "no-g++ -m64"}, "no-g++: not found", GCC),
        (CONDA_GCC, "no-g++: not found", "conda install -c conda-forge cxx-compiler"),
        ({"nvcc": "13.0", "owners": [("fork", "pip")]}, "fork: installed by pip", "pip uninstall -y fork"),
        ({"nvcc": "13.0", "owners": [("flash-attn", "conda")]}, "flash-attn: installed", "conda remove flash-attn"),
        (ARCHIVE, "FLASH_ATTN_KERNEL_ARCHIVE: expected a file, got /no/kernels.a", None),
    ],
    ids=str,
)  # fmt: skip
def test_what_is_missing_is_said_before_anything_is_compiled(machine_with, machine, first, last):
    """And the last line is the one that helps."""
    with pytest.raises(BuildError) as error:
        machine_with(**machine)
    lines = str(error.value).splitlines()
    assert lines[0].startswith(first)
    assert last is None or lines[-1] == f"  {last}"


# ---- installs --------------------------------------------------------------------------------------------------------


def copied_tree(folder):
    """A copy of what an install reads."""
    copy = folder / "tree"
    copy.mkdir()
    for name in ("setup.py", "pyproject.toml", "MANIFEST.in", "LICENSE", "LICENSE-THIRD-PARTY", "README.md"):
        shutil.copy(ROOT / name, copy)
    for name in ("tools", "csrc", "flash_attn"):
        ignore = shutil.ignore_patterns("__pycache__", "_build_info.json")
        shutil.copytree(ROOT / name, copy / name, ignore=ignore)
    return copy


@pytest.fixture
def tree(tmp_path):
    return copied_tree(tmp_path)


def run_setup(tree, *arguments, program=("setup.py",), prefix=(), **variables):
    """setup.py with only the given knobs set. program: what runs it, if not Python itself; prefix: what runs Python."""
    knobs = ("FLASH_ATTN", "FLASH_ATTENTION", "CUDA_HOME", "CUDA_PATH", "CUTLASS_PATH", "MAX_JOBS")
    environment = {name: value for name, value in os.environ.items() if not name.startswith(knobs)}
    environment.update(variables)
    command = [*prefix, sys.executable, *program, "-q", *arguments]
    return subprocess.run(command, cwd=tree, env=environment, capture_output=True, text=True, check=False)


@pytest.mark.parametrize("knob", ["FLASH_ATTN_CPU_ONLY", "FLASH_ATTENTION_SKIP_CUDA_BUILD"])
def test_cpu_only_wheel(tree, knob):
    stale = tree / "build" / "lib" / "flash_attn" / "removed.py"
    stale.parent.mkdir(parents=True)
    stale.touch()
    result = run_setup(tree, "bdist_wheel", **{knob: "TRUE"})
    assert result.returncode == 0, result.stderr
    assert f"NOTICE: installing flash_attn with its CPU backend only: {knob} is set." in result.stdout
    assert f"{knob} is set" in (tree / "build" / "build.log").read_text()
    (wheel,) = (tree / "dist").glob("*.whl")
    assert wheel.name == "flash_attn-2.8.3-py3-none-any.whl"
    with zipfile.ZipFile(wheel) as archive:
        names = archive.namelist()
        identity = json.loads(archive.read("flash_attn/_build_info.json"))
        metadata = archive.read("flash_attn-2.8.3.dist-info/METADATA").decode()
    assert "flash_attn/flash_attn_interface.py" in names and "flash_attn/py.typed" in names
    assert not [n for n in names if n.endswith(".so") or n.endswith("removed.py")]
    assert {n.split("/")[0] for n in names} == {"flash_attn", "flash_attn_2_cuda.py", "flash_attn-2.8.3.dist-info"}
    assert {"LICENSE", "LICENSE-THIRD-PARTY"} <= {n.split("/")[-1] for n in names if ".dist-info/" in n}
    assert identity["backends"] == ["cpu"]
    assert "\nVersion: 2.8.3\n" in metadata
    assert "BSD-3-Clause" in metadata
    assert "\nRequires-Dist: torch>=2.4\n" in metadata


def pip_installs(folder, targets, prefix=()):
    """Runs `pip install --target` of one checkout for every target, all at once: [(exit status, output)]."""
    command = [*prefix, sys.executable, "-m", "pip", "install", "--no-index", "--no-deps", "--no-build-isolation"]
    environment = {**os.environ, "FLASH_ATTN_CPU_ONLY": "1", "PIP_DISABLE_PIP_VERSION_CHECK": "1"}
    installs = [
        subprocess.Popen(
            [*command, "--target", target, folder],
            env=environment,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
        )
        for target in targets
    ]
    outputs = [install.communicate()[0] for install in installs]
    return [(install.returncode, output) for install, output in zip(installs, outputs)]


def modules_of(folder):
    """Names of the Python files under `folder`, without those of an sdist that are no part of an install."""
    return {path.relative_to(folder).as_posix() for path in folder.rglob("*.py") if path.name != "setup.py"}


@pytest.mark.parametrize("project", ["flash_attn", "flash_mla"])  # flash_attn_3's setup.py is that of flash_mla
def test_installs_of_one_checkout_at_once_are_complete(tree, tmp_path, project):
    """Each in a separate folder, so that none deletes files that another is about to copy."""
    if project == "flash_attn":
        folder, expected = tree, {f"flash_attn/{name}" for name in modules_of(ROOT / "flash_attn")}
        expected.add("flash_attn_2_cuda.py")
    else:
        folder = Path(shutil.copytree(ROOT / project, tmp_path / project, ignore=shutil.ignore_patterns("build")))
        expected = modules_of(folder)
    targets = [tmp_path / "first", tmp_path / "second"]
    for target, (status, output) in zip(targets, pip_installs(folder, targets)):
        assert status == 0, output
        assert modules_of(target) == expected
    assert not list(folder.glob("build/*lib*")), "of an install, in the checkout"


def without_override():
    """What takes the power to write anywhere from the user root; nothing for others."""
    if os.geteuid() != 0:
        return []
    if shutil.which("setpriv") is None:
        pytest.skip("setpriv is not installed, and root writes to read-only folders")
    return ["setpriv", "--bounding-set=-dac_override,-dac_read_search"]


@pytest.fixture
def read_only(tree):
    """A tree that this user cannot write."""
    folders = [tree, *(path for path in tree.rglob("*") if path.is_dir())]
    for folder in folders:
        folder.chmod(0o555)
    yield tree
    for folder in folders:
        folder.chmod(0o755)


def test_a_read_only_checkout_is_installed(read_only, tmp_path):
    before = sorted(read_only.rglob("*"))
    ((status, output),) = pip_installs(read_only, [tmp_path / "target"], without_override())
    assert status == 0, output
    assert "flash_attn/flash_attn_interface.py" in modules_of(tmp_path / "target")
    assert sorted(read_only.rglob("*")) == before


def test_a_read_only_checkout_cannot_be_installed_editable(read_only, tmp_path):
    variables = {"FLASH_ATTN_CPU_ONLY": "1"}
    arguments = ("editable_wheel", "--dist-dir", str(tmp_path))
    result = run_setup(read_only, *arguments, prefix=without_override(), **variables)
    assert result.returncode != 0
    (line,) = [line for line in result.stderr.splitlines() if line.startswith("error: ")]
    assert line.startswith(f"error: editable install: expected a checkout that this user can write, got {read_only}")
    assert "pip install ." in line and "Traceback" not in result.stderr


@pytest.mark.parametrize("command", ["dist_info", "bdist_wheel"])
def test_missing_torch_stops_the_install(tree, command):
    """As pip runs it: metadata first, then what they require is downloaded, then the wheel."""
    variables = {"FLASH_ATTN_PYTHON": "/nonexistent/python", "FLASH_ATTN_KERNEL_ARCHIVE": "kernels.a"}
    result = run_setup(tree, command, **variables)
    assert result.returncode != 0
    assert "error: torch: not found" in result.stderr and result.stderr.endswith("\n  pip install torch\n")
    assert not (tree / "build" / "kernels").exists()


@pytest.mark.parametrize("command", ["dist_info", "bdist_wheel"])
def test_a_gpu_without_nvcc_stops_the_install(tree, tmp_path, command):
    """On a machine with nvidia-smi and without nvcc."""
    tools = tmp_path / "bin"
    tools.mkdir()
    facts = {"python": "{}.{}".format(*sys.version_info[:2]), "site_dirs": [], "torch": "2.99+cu130", "cuda": "13.0"}
    facts.update(torch_dir="/t", hip=None, cxx11_abi=1, cudart=None, libstdcxx=None, pybind11_abi={})
    for name, text in {"nvidia-smi": "9.0", "python": "@facts " + json.dumps(facts)}.items():
        (tools / name).write_text(f"#!/bin/sh\necho '{text}'\n")
        (tools / name).chmod(0o755)
    without_nvcc = (
        "import runpy, toolchain; toolchain.other_roots = lambda _: []; runpy.run_path('setup.py', run_name='__main__')"
    )
    variables = {"PATH": str(tools), "FLASH_ATTN_PYTHON": str(tools / "python"), "PYTHONPATH": str(tree / "tools")}
    result = run_setup(tree, command, program=("-c", without_nvcc), **variables)
    assert result.returncode != 0
    assert "error: nvcc: a GPU is visible (sm_90) and torch 2.99+cu130 is a CUDA build" in result.stderr
    assert result.stderr.endswith(f"\n  {PIP_NVCC}\n")
    assert not (tree / "dist").exists()


def test_metadata_needs_no_torch(tree):
    result = run_setup(tree, "--version", FLASH_ATTN_PYTHON="/nonexistent/python")
    assert (result.returncode, result.stdout.strip()) == (0, "2.8.3")


# ---- make ------------------------------------------------------------------------------------------------------------


@pytest.fixture
def make_on(monkeypatch):
    """Returns a function that decides what `make` installs on a machine without nvcc -> (requirements, CPU only)."""

    def decide(gpus=(), cuda="13.0", **variables):
        for name in (*setup_env.KNOBS, *install_plan.CPU_KNOBS):
            monkeypatch.delenv(name, raising=False)
        for name, value in variables.items():
            monkeypatch.setenv(name, value)
        installed = []
        answer = subprocess.CompletedProcess([], 0, f"{cuda}\n", "")
        monkeypatch.setattr(setup_env.subprocess, "run", lambda *arguments, **options: answer)
        monkeypatch.setattr(setup_env, "pip_install", lambda python, packages: installed.extend(packages))
        monkeypatch.setattr(setup_env, "find_toolkit", lambda site_dirs: None)
        monkeypatch.setattr(kernel_build, "visible_gpu_archs", lambda: list(gpus))
        environment = setup_env.build_environment("python", {"site_dirs": []})
        return installed, environment.get("FLASH_ATTN_CPU_ONLY") == "1"

    return decide


def test_make_installs_nvcc_where_it_is_needed(make_on):
    nvcc = ["cuda-toolkit[nvcc,nvvm,crt,cccl,cudart]==13.0.*"]
    assert make_on() == ([], True)
    assert make_on(["75"]) == ([], True)
    assert make_on(["90"]) == (nvcc, False)
    assert make_on(["90"], FLASH_ATTN_HEAD_DIMS="64") == (nvcc, False)
    assert make_on(FLASH_ATTN_CUDA_ARCHS="90") == (nvcc, False)
    assert make_on(["90"], FLASH_ATTN_KERNEL_ARCHIVE="kernels.a") == ([], False)
    assert make_on(["90"], FLASH_ATTN_CPU_ONLY="1") == ([], True)
    assert make_on(["90"], cuda="") == ([], False)
    assert make_on(["90"], cuda="12.8") == ([], False), "no pip package of nvcc: the install says what to do"


def test_make_needs_no_parallel_tests(monkeypatch, capsys):
    def without_index(python, requirements):
        raise setup_env.BuildError("no index")

    monkeypatch.setattr(setup_env, "pip_install", without_index)
    setup_env.install_parallel_tests("python")
    assert "`make test` will run in one process" in capsys.readouterr().out
