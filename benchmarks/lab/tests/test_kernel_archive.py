"""Kernels of the laboratory that are compiled elsewhere (kernel_archive.py) are found, and not mixed up."""

from __future__ import annotations

import shutil
import sys
from dataclasses import replace
from pathlib import Path

import pytest

LAB = Path(__file__).resolve().parents[1]
ROOT = LAB.parents[1]
sys.path[:] = [str(ROOT / "tools"), *sys.path, str(LAB), str(LAB.parent)]

import kernel_archive
import kernel_library
import sm90_designs
from errors import BuildError
from sm80_designs import default_design

FACTS = {"registers": 168, "spills": 0}


class FakeCompiler:
    """Writes the name of a design in place of its library."""

    versions = {"nvcc": "13.0", "CUTLASS": "4.2"}

    class toolkit:
        root = Path("cuda")

    def __init__(self, folder):
        self.folder = folder

    def library(self, design):
        return self.folder / f"{design.name}-{kernel_library.source_key(design)}.so"

    def compile_all(self, designs, progress, jobs):
        for design in designs:
            self.library(design).write_text(design.name)
        return dict.fromkeys(designs, FACTS)


@pytest.fixture
def archive(tmp_path, monkeypatch):
    """(path, designs): the default design, and two launches of one kernel of the other family."""
    designs = [default_design(64)]
    if shutil.which("g++"):
        shipped = sm90_designs.shipped(64, "kPlain", ("full", "causal"))
        designs += [shipped, replace(shipped, scheduler="kNone")]
    monkeypatch.setattr(kernel_archive, "Compiler", FakeCompiler)
    monkeypatch.setattr(kernel_archive, "DESIGNS", {"ablate": lambda: designs})

    def build_program(compiler, place):
        place.mkdir()
        (place / "minimal").write_text("program")

    monkeypatch.setattr(kernel_archive, "build_program", build_program)
    kernels, path = tmp_path / "kernels", tmp_path / "kernels.tar.xz"
    kernels.mkdir()
    assert kernel_archive.build(["ablate", "minimal", "grid"], path, lambda line: None, folder=kernels)
    return path, designs


def test_libraries_are_found_without_a_compiler(archive, tmp_path, monkeypatch):
    path, designs = archive
    kernel_archive.unpack(path, tmp_path / "unpacked")
    monkeypatch.setenv(kernel_library.PREBUILT, str(tmp_path / "unpacked"))
    monkeypatch.setattr(kernel_library, "find_toolkit", lambda *_: pytest.fail("it looked for nvcc"))
    built = kernel_library.make_compiler()
    assert built.versions == FakeCompiler.versions
    assert built.compile_all(designs, print) == dict.fromkeys(designs, FACTS)
    assert [built.library(design).read_text() for design in designs] == [design.name for design in designs]
    assert len(built.kernels) == len({design.name for design in designs})  # a kernel of two launches once
    assert (tmp_path / "unpacked" / "minimal" / "minimal").read_text() == "program"


def test_other_sources_are_other_kernels(archive, tmp_path, monkeypatch):
    path, (design, *_) = archive
    kernel_archive.unpack(path, tmp_path)
    monkeypatch.setattr(kernel_library, "sources_digest", lambda *files: "changed")
    with pytest.raises(BuildError, match="built from other sources"):
        kernel_library.Prebuilt(tmp_path).library(design)
    monkeypatch.setattr(kernel_archive, "program_key", lambda: "changed")
    with pytest.raises(BuildError, match="other sources of examples/minimal"):
        kernel_archive.unpack(path, tmp_path)
