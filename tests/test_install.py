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

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT / "tools"))

import binding_build
import machine
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
    for way in ("CUTLASS_PATH=", "third_party/cutlass", "pip install --no-deps nvidia-cutlass==4.2.0.0", "index"):
        assert way in str(error.value)


def test_cuda_headers_without_a_toolkit(tmp_path, monkeypatch):
    for name in ("CUDA_HOME", "CUDA_PATH"):
        monkeypatch.delenv(name, raising=False)
    include = tmp_path / "nvidia" / "cu98" / "include"
    (include / "crt").mkdir(parents=True)
    (include / "cuda_runtime_api.h").write_text("#define CUDART_VERSION  98020\n")
    with pytest.raises(BuildError, match=r"CUDA headers: .*\n.*'nvidia-cuda-crt==98\.\*'"):
        monkeypatch.setattr(toolchain, "pip_toolkit_roots", lambda _: [include.parent])
        monkeypatch.setattr(toolchain.Path, "is_dir", lambda path: path == include)
        toolchain.cuda_header_dirs([str(tmp_path)], "98")
    (include / "crt" / "host_defines.h").touch()
    assert toolchain.cuda_header_dirs([str(tmp_path)], "98") == [include]


def test_isolation_overlay_is_removed(monkeypatch, tmp_path):
    overlay = str(tmp_path / "pip-build-env-x" / "site")
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join([overlay, "/mine"]))
    monkeypatch.setenv("PYTHONNOUSERSITE", "1")
    environment = toolchain.clean_environment()
    assert environment["PYTHONPATH"] == "/mine"
    assert "PYTHONNOUSERSITE" not in environment


def test_target_torch_is_this_one():
    import torch

    found = target_env.find_target_torch(ROOT)
    assert found.version == torch.__version__
    assert found.cuda == torch.version.cuda
    assert (found.lib_dir / "libc10.so").exists()
    assert binding_build.cxx_standard(found) in ("c++17", "c++20")


def test_stray_modules_in_the_temporary_folder_do_not_matter(tmp_path, monkeypatch):
    (tmp_path / "dis.py").write_text("raise SystemExit(1)\n")
    monkeypatch.setattr(target_env.tempfile, "tempdir", str(tmp_path))
    assert target_env.probe(sys.executable) is not None


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
    """A torch whose libraries hold one function each, and CUDA's runtime from pip beside it, in a site-packages."""
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


# ---- installs --------------------------------------------------------------------------------------------------------


@pytest.fixture
def tree(tmp_path):
    """A copy of what an install reads."""
    copy = tmp_path / "tree"
    copy.mkdir()
    for name in ("setup.py", "pyproject.toml", "MANIFEST.in", "LICENSE", "README.md"):
        shutil.copy(ROOT / name, copy)
    for name in ("tools", "csrc", "flash_attn"):
        ignore = shutil.ignore_patterns("__pycache__", "_build_info.json")
        shutil.copytree(ROOT / name, copy / name, ignore=ignore)
    return copy


def run_setup(tree, *arguments, **variables):
    """setup.py with only the given knobs set."""
    knobs = ("FLASH_ATTN", "FLASH_ATTENTION", "CUDA_HOME", "CUDA_PATH", "CUTLASS_PATH", "MAX_JOBS")
    environment = {name: value for name, value in os.environ.items() if not name.startswith(knobs)}
    environment.update(variables)
    command = [sys.executable, "setup.py", "-q", *arguments]
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
    assert "flash_attn/flash_attn_interface.py" in names
    assert not [n for n in names if n.endswith(".so") or n.endswith("removed.py")]
    assert not [n for n in names if n.split("/")[0] not in ("flash_attn", "flash_attn-2.8.3.dist-info")]
    assert identity["backends"] == ["cpu"]
    assert "\nVersion: 2.8.3\n" in metadata
    assert "BSD-3-Clause" in metadata
    assert "\nRequires-Dist: torch>=2.4\n" in metadata


def test_missing_torch_says_what_to_install(tree, tmp_path):
    archive = tmp_path / "kernels.a"
    archive.touch()
    variables = {"FLASH_ATTN_PYTHON": "/nonexistent/python", "FLASH_ATTN_KERNEL_ARCHIVE": str(archive)}
    result = run_setup(tree, "bdist_wheel", **variables)
    assert result.returncode != 0
    assert "error: torch: not found" in result.stderr
    assert "pip install torch" in result.stderr
    assert not (tree / "build" / "kernels").exists()


def test_metadata_needs_no_torch(tree):
    result = run_setup(tree, "--version", FLASH_ATTN_PYTHON="/nonexistent/python")
    assert (result.returncode, result.stdout.strip()) == (0, "2.8.3")


def test_torch_is_not_a_build_requirement():
    text = (ROOT / "pyproject.toml").read_text(encoding="utf-8")
    requires = re.search(r"^requires = \[(.*)\]$", text, re.MULTILINE)[1]
    assert "torch" not in requires
    assert "ninja" in requires


def test_missing_torch_is_reported_before_dependencies_are_fetched(tree):
    """pip asks for the metadata first, then downloads what they require, then builds."""
    variables = {"FLASH_ATTN_PYTHON": "/nonexistent/python", "FLASH_ATTN_KERNEL_ARCHIVE": "kernels.a"}
    result = run_setup(tree, "dist_info", **variables)
    assert result.returncode != 0
    assert "error: torch: not found" in result.stderr
