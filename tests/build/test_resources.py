"""Registers, spills and interior-loop instructions of the kernels that were built here may not grow unnoticed."""

import fnmatch
import json
import re
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
sys.path.insert(0, str(ROOT / "tools"))

import compile_kernel
import kernel_build
import kernel_manifest
import resources
import sass

CUOBJDUMP = sass.find_cuobjdump()
BUDGET = resources.load_budget(ROOT / "tools" / "resource_budget.json")
REPORTS = sorted((ROOT / "build" / "kernels").glob("*/build_report.json"))
MAX_REGISTERS = 255  # what one thread can hold on every architecture so far


def built_kernels():
    """(name to show, source stem, kernel record) of each kernel of the builds found."""
    for report in REPORTS:
        for record in json.loads(report.read_text(encoding="utf-8"))["files"]:
            for kernel in record["kernels"]:
                yield f"{report.parent.name}/{record['file']}", Path(record["file"]).stem, kernel


needs_build = pytest.mark.skipif(not REPORTS, reason="no kernels were built here (make kernels)")


@needs_build
def test_registers():
    over = [(name, k["name"], k["registers"]) for name, _, k in built_kernels() if k["registers"] > MAX_REGISTERS]
    assert over == []


@needs_build
def test_spills():
    over = [line for _, stem, kernel in built_kernels() for line in resources.over_budget(BUDGET, stem, [kernel])]
    assert over == []


@needs_build
def test_every_kernel_file_holds_a_kernel_for_every_arch():
    for report in REPORTS:
        content = json.loads(report.read_text(encoding="utf-8"))
        wanted = {f"sm_{arch}" for arch in content["info"]["archs"]}
        for record in content["files"]:
            archs = {"sm_90a"} if record["file"].endswith("_sm90.cu") else wanted
            assert {kernel["arch"] for kernel in record["kernels"]} == archs, record["file"]


@needs_build
def test_whole_archives_are_small():
    for report in REPORTS:
        content = json.loads(report.read_text(encoding="utf-8"))
        info, archs = content["info"], ";".join(content["info"]["archs"])
        if kernel_manifest.is_whole(info, ROOT / "csrc" / "flash_attn") and archs in BUDGET["archive_megabytes"]:
            assert content["archive_bytes"] <= 1e6 * BUDGET["archive_megabytes"][archs], report.parent.name


KINDS = (("-lelf", "cubin"), ("-lptx", "ptx"))


def machine_code_of(file, option, kind):
    """The architecture of each piece of machine code (or PTX) in a file; sm_90a counts as sm_90."""
    done = subprocess.run([str(CUOBJDUMP), option, str(file)], capture_output=True, text=True, check=True)
    return re.findall(rf"\.sm_(\d+)a?\.{kind}$", done.stdout, re.MULTILINE)


@needs_build
@pytest.mark.skipif(CUOBJDUMP is None, reason="no cuobjdump (CUDA toolkit or triton)")
def test_the_archive_holds_machine_code_of_every_arch_and_ptx_of_the_newest():
    """sm_80 machine code is what 8.6, 8.7 and 8.9 run (test_main.py); PTX is for GPUs newer than all."""
    for report in REPORTS:
        content = json.loads(report.read_text(encoding="utf-8"))
        archs = content["info"]["archs"]
        newest = [archs[-1]] if {"80", "90"} <= set(archs) else []
        in_objects = []
        for record in content["files"]:
            stem = Path(record["file"]).stem
            code, ptx = (machine_code_of(report.parent / f"{stem}.o", *kind) for kind in KINDS)
            assert sorted(code) == (["90"] if stem.endswith("_sm90") else sorted(archs)), stem
            assert ptx == ([] if stem.endswith("_sm90") else newest), stem
            in_objects += code
        archive = report.parent / kernel_build.ARCHIVE
        assert sorted(machine_code_of(archive, *KINDS[0])) == sorted(in_objects)


def test_every_rule_gives_its_reason():
    for rule in BUDGET["rules"]:
        assert rule["spill_bytes"] > BUDGET["default_spill_bytes"]
        assert len(rule["reason"]) > 20, rule


def test_every_rule_names_a_file_that_exists():
    stems = {path.stem for path in (ROOT / "csrc" / "flash_attn").rglob("*.cu")}
    stems -= {stem for group in kernel_manifest.JOINED for stem in group[1:]}  # they have no objects
    stated = {rule["file"] for rule in (*BUDGET["rules"], *BUDGET["interior_loops"]) if "file" in rule}
    assert [pattern for pattern in sorted(stated) if not fnmatch.filter(stems, pattern)] == []


def test_every_rule_names_a_variant_that_exists():
    variants = resources.variants_of((ROOT / "csrc" / "flash_attn").rglob("*.h"))
    assert "kDropout" in variants["flash::plan::FwdVariant"]
    assert {f"flash::{family}::BwdVariant" for family in ("plan", "sm80", "sm90")} <= set(variants)
    stated = {rule["variant"] for rule in (*BUDGET["rules"], *BUDGET["interior_loops"]) if "variant" in rule}
    assert stated <= {name for names in variants.values() for name in names}


def test_variants_are_named(tmp_path):
    header = tmp_path / "config.h"
    header.write_text(
        "namespace flash {\nnamespace sm80 {\nenum class FwdVariant { kPlain };\n}  // namespace sm80\n"
        "namespace plan {\nenum class FwdVariant { kPlain, kShort, kDropout };\n}\n}\n"
    )
    variants = resources.variants_of([str(header)])
    assert variants["flash::sm80::FwdVariant"] == ["kPlain"]
    name = resources.with_variant_names("void kernel<Config<(Dtype)1, 64, (flash::plan::FwdVariant)2> >()", variants)
    assert name == "void kernel<Config<(Dtype)1, 64, FwdVariant::kDropout> >()"
    assert resources.with_variant_names("kernel<(KvVariant)1>", variants) == "kernel<(KvVariant)1>"
    assert resources.is_kernel_of({"variant": "kDropout"}, name)
    assert resources.is_kernel_of({"kernel": "kernel<"}, name)
    assert resources.is_kernel_of({"kernel": "Config<*, 64, "}, name)
    assert not resources.is_kernel_of({"kernel": "Config<*, 128, "}, name)
    assert not resources.is_kernel_of({"variant": "kDrop"}, name)
    assert not resources.is_kernel_of({"variant": "kDropout", "kernel": "heads_kernel<"}, name)


def smallest_matrix_loop(code):
    """Instruction count of the shortest loop with tensor-core instructions: the interior loop; None without one.

    Of a kernel with wgmma those count (HGMMA of 16 bits, QGMMA of e4m3): where it falls back on mma.sync, that is a
    loop within the interior one.
    """
    wgmma, mma = r"\b[HQ]GMMA\b", r"\bHMMA\b"
    product = wgmma if any(re.search(wgmma, text) for _, text in code) else mma
    counts = [len(loop) for loop in sass.loops(code) if any(re.search(product, text) for text in loop)]
    return min(counts, default=None)


@needs_build
@pytest.mark.skipif(CUOBJDUMP is None, reason="no cuobjdump (CUDA toolkit or triton)")
@pytest.mark.parametrize("rule", BUDGET["interior_loops"], ids=lambda rule: f"{rule['file']}-{rule['arch']}")
def test_interior_loop_instructions(rule):
    objects = [report.parent / f"{rule['file']}.o" for report in REPORTS]
    objects = [path for path in objects if path.exists() and rule["arch"][3:5] in path.parent.name]
    if not objects:
        pytest.skip(f"{rule['file']} was not built here for {rule['arch']}")
    for path in objects:
        functions = sass.functions(sass.listing(CUOBJDUMP, path, "-arch", rule["arch"]))
        variants = resources.variants_of(compile_kernel.dependencies(path.with_name(f"{path.name}.deps")))
        names = [resources.with_variant_names(name, variants) for name in compile_kernel.demangled(list(functions))]
        counts = {
            name: smallest_matrix_loop(code)
            for name, code in zip(names, functions.values())
            if resources.is_kernel_of(rule, name)
        }
        assert counts, f"{path.name} has no kernel of {rule}"
        for name, count in counts.items():
            assert count is not None, f"{name} has no loop with tensor-core instructions"
            assert count <= rule["instructions"], f"{name}: {count} instructions, budget {rule['instructions']}"
