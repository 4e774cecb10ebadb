"""Kernels of the laboratory that are compiled elsewhere (benchmarks/lab_archive.py) are found, and not mixed up."""

from __future__ import annotations

import shutil
import sys
from dataclasses import replace
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
sys.path[:] = [str(ROOT / "tools"), *sys.path, str(ROOT / "benchmarks")]

import ablate
import lab_archive
import lab_build
import lab_sm90
from errors import BuildError
from lab_designs import default_design

needs_gxx = pytest.mark.skipif(shutil.which("g++") is None, reason="g++ is not installed")
FACTS = {"registers": 168, "spills": 0}


class FakeCompiler:
    """Writes the name of a design in place of its library."""

    versions = {"nvcc": "13.0", "CUTLASS": "4.2"}

    class toolkit:
        root = Path("cuda")

    def __init__(self, folder):
        self.folder = folder

    def library(self, design):
        return self.folder / f"{design.name}-{lab_build.source_key(design)}.so"

    def compile_all(self, designs, progress, jobs):
        for design in designs:
            self.library(design).write_text(design.name)
        return dict.fromkeys(designs, FACTS)


@pytest.fixture
def archive(tmp_path, monkeypatch):
    """(path, designs): the default design, and two launches of one kernel of the other family."""
    designs = [default_design(64)]
    if shutil.which("g++"):
        shipped = lab_sm90.shipped(64, "kPlain", ("full", "causal"))
        designs += [shipped, replace(shipped, scheduler="kNone")]
    monkeypatch.setattr(lab_archive, "Compiler", FakeCompiler)
    monkeypatch.setattr(lab_archive, "DESIGNS", {"ablate": lambda: designs})

    def build_program(compiler, folder):
        place = folder / "minimal-key"
        place.mkdir()
        (place / "minimal").write_text("program")
        return place

    monkeypatch.setattr(lab_archive, "build_program", build_program)
    kernels, path = tmp_path / "kernels", tmp_path / "kernels.tar.xz"
    kernels.mkdir()
    assert lab_archive.build(["ablate", "minimal", "theory"], path, lambda line: None, folder=kernels)
    return path, designs


def test_libraries_are_found_without_a_compiler(archive, tmp_path, monkeypatch):
    path, designs = archive
    lab_archive.unpack(path, tmp_path / "unpacked")
    monkeypatch.setenv(lab_build.PREBUILT, str(tmp_path / "unpacked"))
    monkeypatch.setattr(lab_build, "find_toolkit", lambda *_: pytest.fail("it looked for nvcc"))
    built = lab_build.make_compiler()
    assert built.versions == FakeCompiler.versions
    assert built.compile_all(designs, print) == dict.fromkeys(designs, FACTS)
    assert [built.library(design).read_text() for design in designs] == [design.name for design in designs]
    assert len(built.kernels) == len({design.name for design in designs})  # a kernel of two launches once
    assert (tmp_path / "unpacked" / "minimal" / "minimal").read_text() == "program"


def test_what_was_not_built_is_left_out(archive, tmp_path):
    path, designs = archive
    lab_archive.unpack(path, tmp_path)
    other, told = default_design(128), []
    assert lab_build.Prebuilt(tmp_path).compile_all([designs[0], other], told.append) == {designs[0]: FACTS}
    assert told == [f"LEFT OUT: {other.name}: not among the built kernels, or built from other sources"]


def test_other_sources_are_other_kernels(archive, tmp_path, monkeypatch):
    path, (design, *_) = archive
    lab_archive.unpack(path, tmp_path)
    monkeypatch.setattr(lab_build, "sources_digest", lambda *files: "changed")
    with pytest.raises(BuildError, match="built from other sources"):
        lab_build.Prebuilt(tmp_path).library(design)
    monkeypatch.setattr(lab_archive, "program_key", lambda: "changed")
    with pytest.raises(BuildError, match="other sources of examples/minimal"):
        lab_archive.unpack(path, tmp_path)


@needs_gxx
def test_what_is_built_fits_into_half_an_hour_of_two_cores():
    """By about how long a kernel of each kind takes one core, sources of a kind being alike."""
    seconds = {"FwdDesign": 26, "Sm90Design": 38, "fwd_mma_sync": 24, "bwd_mma_sync": 32, "bwd_wgmma": 20}
    designs = {}
    for make in lab_archive.DESIGNS.values():
        designs.update((lab_build.source_key(design), design) for design in make())
    total = sum(seconds[getattr(design, "kernel", type(design).__name__)] for design in designs.values())
    assert len(designs) <= 140 and total <= 2 * 35 * 60


@needs_gxx
def test_designs_have_words_that_tell_them_apart():
    entries = [entry for found in ablate.work(ablate.FAMILIES, (64, 128)).values() for entry in found]
    designs = {entry.design for entry in entries}
    assert len({ablate.identity(design) for design in designs}) == len(designs)
