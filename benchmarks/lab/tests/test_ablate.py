"""The configurable kernels (ablate.py): designs, libraries, machine code, tables; on a GPU also the kernels."""

from __future__ import annotations

import dataclasses
import json
import re
import shutil
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest

LAB = Path(__file__).resolve().parents[1]
ROOT = LAB.parents[1]
sys.path[:] = [str(ROOT / "tools"), *sys.path, str(LAB), str(LAB.parent)]

import ablate
import ablate_report
import kernel_library
import plan_headers
import resumable
import sm80_designs
import sm90_designs
import study
import tile_designs
from errors import BuildError
from sm80_designs import FwdDesign, default_design, ladder, switches
from toolchain import find_cutlass, find_toolkit

HEAD_DIMS = sm80_designs.HEAD_DIMS
FACTS = {"registers": 255, "spills": 24, "smem_bytes": 49152, "ctas_per_sm": 2, "threads": 128,
         "loop": {"all": 1300, "HMMA": 256}, "serialized": False}  # fmt: skip
needs_gxx = pytest.mark.skipif(shutil.which("g++") is None, reason="g++ is not installed")


def changed_fields(a, b):
    return {field.name for field in dataclasses.fields(a) if getattr(a, field.name) != getattr(b, field.name)}


@pytest.mark.parametrize("head_dim", HEAD_DIMS)
def test_every_design_of_the_list_exists_and_labels_are_distinct(head_dim):
    entries = sm80_designs.entries(head_dim)
    assert {entry.label: entry.design.problems() for entry in entries if entry.design.problems()} == {}
    assert len({(entry.kind, entry.label) for entry in entries}) == len(entries)


@needs_gxx
@pytest.mark.parametrize("head_dim", HEAD_DIMS)
def test_the_default_design_has_the_tile_in_use(head_dim):
    row = plan_headers.shipped_row("fwd_mma_sync", head_dim)
    assert row == (head_dim, *sm80_designs.TILE[head_dim])
    shipped = tile_designs.TileDesign("fwd_mma_sync", head_dim, row)
    assert default_design(head_dim).smem_bytes == shipped.smem_bytes


@pytest.mark.parametrize("head_dim", HEAD_DIMS)
def test_the_ladder_goes_from_plain_loads_to_the_default_one_technique_a_rung(head_dim):
    designs = [entry.design for entry in ladder(head_dim)]
    tile = {"block_m", "block_n", "warps", "blocks_per_sm"}
    assert (designs[0].copies, designs[0].layout, designs[0].softmax) == ("plain", "none", "textbook")
    assert designs[-1] == default_design(head_dim)
    for before, after in zip(designs, designs[1:]):
        changed = changed_fields(before, after)
        assert len(changed) == 1 or changed <= tile, changed


@pytest.mark.parametrize("head_dim", HEAD_DIMS)
def test_switches_change_one_thing_and_all_are_tried(head_dim):
    default, tried = default_design(head_dim), set()
    for entry in switches(head_dim):
        changed = changed_fields(entry.design, default)
        assert len(changed) == 1 or changed == {"fragments", "double_buffered"} or "block" in str(changed)
        tried |= changed
    assert tried == {field.name for field in dataclasses.fields(FwdDesign)} - {"head_dim"}


@pytest.mark.parametrize(
    "change, reason",
    [
        ({"head_dim": 96}, "head_dim: expected 64 or 128, got 96"),
        ({"copies": "tma"}, "copies: expected plain or async, got 'tma'"),
        ({"softmax": "fast"}, "softmax: expected textbook or lagging"),
        ({"warps": 0}, "warps and blocks_per_sm: expected"),
        ({"block_m": 96}, "block_m: expected whole 16-row bands for each warp"),
        ({"block_n": 24}, "block_m and block_n: expected multiples of 16"),
        ({"fragments": "whole"}, "double_buffered: expected False"),
        ({"block_m": 64, "warps": 4, "block_n": 512, "blocks_per_sm": 2}, "shared memory: 2 blocks of"),
        ({"block_n": 256, "blocks_per_sm": 1}, "registers: S and O alone take 320 of 255"),
    ],
)
def test_impossible_designs_are_refused_with_a_reason_before_nvcc(change, reason, monkeypatch):
    design = replace(default_design(64), **change)
    monkeypatch.setattr(kernel_library.subprocess, "run", lambda *a, **k: pytest.fail("it compiled something"))
    with pytest.raises(ValueError, match=re.escape(reason)):
        kernel_library.forward(design, None, None, None, None)


def test_the_header_states_the_fields_in_the_order_of_the_struct():
    text = (sm80_designs.SOURCES / "fwd_design.h").read_text(encoding="utf-8")
    body = re.search(r"struct FwdDesign \{(.*?)\};", text, re.DOTALL)[1]
    fields = re.findall(r"(\w+);", re.sub(r"//.*", "", body))
    assert fields == [
        *("head_dim", "block_m", "block_n", "warps", "blocks_per_sm", "dtype", "async_copies", "eager_kv", "layout"),
        *("q_in_registers", "whole_fragments", "double_buffered", "lagging_max"),
    ]
    design = replace(default_design(128), layout="padded", q="registers", dtype="fp16")
    words = "128, 128, 64, 4, 2, Dtype::kFp16, true, true, Layout::kPadded, true, false, true, true"
    assert design.header() == f"#define LAB_DESIGN {{{words}}}\n"


@needs_gxx
def test_layouts_of_shared_memory(tmp_path):
    program, includes = tmp_path / "layouts", [f"-I{ROOT / 'tests' / 'cpp'}", f"-I{ROOT / 'csrc' / 'flash_attn'}"]
    source = Path(__file__).with_name("test_layouts.cpp")
    subprocess.run(
        ["g++", "-std=c++17", "-O1", "-Wall", "-Wextra", "-Werror", *includes, source, "-o", program], check=True
    )
    assert " 0 failures" in subprocess.run([program], check=True, capture_output=True, text=True).stdout


def test_another_design_compiler_or_source_is_another_library():
    design = default_design(64)
    keys = [kernel_library.cache_key(entry.design, "90", "13.0", "sources") for entry in sm80_designs.entries(64)]
    assert len(set(keys)) == len(keys)
    key = kernel_library.cache_key(design, "90", "13.0", "sources")
    others = [("80", "13.0", "sources"), ("90", "13.1", "sources"), ("90", "13.0", "changed")]
    assert key == keys[len(ladder(64)) - 1]
    assert key not in [kernel_library.cache_key(design, *other) for other in others]


def test_libraries_depend_on_what_they_include_and_nothing_else():
    names = {path.relative_to(ROOT).as_posix() for path in kernel_library.included_files(FwdDesign.launcher)}
    csrc = "csrc/flash_attn"
    assert {
        f"benchmarks/lab/kernels/fwd_{name}" for name in ("launcher.cu", "kernel.h", "steps.h", "design.h")
    } <= names
    assert {f"{csrc}/kernels/common/softmax.h", f"{csrc}/kernels/sm80/gemm.h", f"{csrc}/core/visibility.h"} <= names
    assert not [name for name in names if "sm90" in name or "bwd_kernel" in name or "decode" in name]
    hopper = {path.name for path in kernel_library.included_files(sm90_designs.Sm90Design.launcher)}
    assert {"sm90_launcher.cu", "fwd_softmax_step.h", "fwd_policy_sm90.h", "tiles.h"} <= hopper


def test_occupancy_is_limited_by_registers_memory_and_threads():
    assert sm80_designs.ctas_per_sm(128, 255, 49152) == 2
    assert sm80_designs.ctas_per_sm(128, 128, 24576) == 4
    assert sm80_designs.ctas_per_sm(128, 32, 100 * 1024) == 2
    assert sm80_designs.ctas_per_sm(1024, 32, 1024) == 2


SASS = """
        /*0000*/                   MOV R1, c[0x0][0x28] ;      /* 0x1 */
        /*0010*/                   HMMA.16816.F32.BF16 R4, R8, R12, R4 ;
        /*0020*/              @!P0 BRA 0x50 ;
        /*0030*/                   FADD R4, R8, R12 ;
        /*0040*/               @P1 BRA 0x10 ;
        /*0050*/                   LDSM.16.M88.4 R4, [R2] ;
        /*0060*/                   HMMA.16816.F32.BF16 R4, R8, R12, R4 ;
        /*0070*/                   HMMA.16816.F32.BF16 R4, R8, R12, R4 ;
        /*0080*/              @!P0 BRA 0x50 ;
        /*0090*/                   HMMA.16816.F32.BF16 R4, R8, R12, R4 ;
        /*00a0*/               @P2 BRA 0x0 ;
        /*00b0*/                   BRA 0xb0;
"""


def test_the_inner_loop_is_the_shortest_with_all_mma():
    assert kernel_library.inner_loop(SASS, "HMMA", 1) == {"all": 4, "HMMA": 1}
    assert kernel_library.inner_loop(SASS, "HMMA", 2) == {"all": 4, "HMMA": 2, "LDSM": 1}
    assert kernel_library.inner_loop(SASS, "HMMA", 3) == {"all": 11, "HMMA": 4, "LDSM": 1}
    assert kernel_library.inner_loop(SASS, "HGMMA", 1) is None and kernel_library.inner_loop("", "HMMA", 1) is None


def test_mma_of_a_step():
    assert default_design(64).mma_per_step == 2 * 2 * 16 * 4  # as in its machine code
    assert ladder(128)[0].design.mma_per_step == 2 * 1 * 8 * 8


@needs_gxx
@pytest.mark.parametrize("head_dim", HEAD_DIMS)
def test_hopper_designs_exist_and_each_differs_from_the_kernel_in_use(head_dim):
    entries = sm90_designs.entries(head_dim)
    assert {entry.label: entry.design.problems() for entry in entries if entry.design.problems()} == {}
    assert len({entry.design for entry in entries}) == len({entry.label for entry in entries}) == len(entries)
    masks = [mask for entry in entries if entry.kind == "ladder" for mask in entry.design.masks]
    assert sorted(masks) == ["causal", "full"]


@needs_gxx
def test_hopper_designs_are_refused_by_the_rules_of_the_shipped_plan():
    masked = sm90_designs.shipped(128, "kMasked", ("causal",))
    assert masked.problems() == []
    assert replace(masked, kv_stages=2).problems() == ["a K/V ring this shallow would deadlock"]
    assert sm90_designs.changed(masked, plus=["kNoMask"]).problems() == ["masked calls have no other kernel"]
    assert "shared memory: " in replace(masked, kv_stages=8).problems()[0]
    assert replace(masked, block_m=64).problems()[0].startswith("register budgets exist")
    assert "features: expected" in sm90_designs.changed(masked, plus=["kFaster"]).problems()[0]


@needs_gxx
def test_the_overlay_changes_two_lookups_and_nothing_else():
    design = sm90_designs.entries(64)[1].design
    for path, text in design.overlay().items():
        shipped = (plan_headers.CSRC / path).read_text(encoding="utf-8").splitlines()
        added = [line for line in text.splitlines() if line not in shipped]
        assert len(added) == 1 and added[0].startswith("  if (head_dim > 0) return ")
        assert len(text.splitlines()) == len(shipped) + 1
    with pytest.raises(ValueError, match="expected one line"):
        plan_headers.with_first_return(plan_headers.TILES, "int missing_lookup() {\n", "0")


def fake_result():
    """Two head dims of the one family, one of the other; each rung 10 % faster than the one before."""
    flops = {"full 1024": 2e11, "full 4096": 4e11, "causal 1024": 1e11, "causal 4096": 2e11}
    facts = FACTS

    def found(entries):
        rows = []
        for index, entry in enumerate(entries):
            times = {cell: value / 1e11 * 1.1**-index for cell, value in flops.items()}
            rows.append({"kind": entry.kind, "label": entry.label, "facts": facts, "ms": times, "failed": None})
        rows[-1] |= {"ms": {}, "facts": None, "failed": "does not compile"}
        return {"flops": flops, "entries": rows}

    families = {"mma_sync": {"64": found(sm80_designs.entries(64)), "128": found(sm80_designs.entries(128))}}
    if shutil.which("g++"):
        families["wgmma"] = {"64": found(sm90_designs.entries(64))}
    origin = {"device": {"name": "GPU"}, "git": {"commit": "0123456789abcdef", "dirty": True}}
    return json.loads(json.dumps({**origin, "versions": {"nvcc": "13.0"}, "families": families}))


def test_tables_state_gains_resources_and_what_was_left_out():
    text = ablate_report.report(fake_result())
    assert text.startswith("GPU, commit 0123456789ab+changes; nvcc 13.0.\n")
    assert "### mma.sync forward, head dim 64: " in text and "### mma.sync forward, head dim 128: " in text
    cells = "| 255, 24 | 48.0 | 2 × 4 | 1300 (5.1) |"
    assert f"| plain loads, 64 × 64 tiles | 100 | 100 | 100 | 100 | – {cells}" in text
    assert f"| padded rows of shared memory | 110 | 110 | 110 | 110 | +10.0 {cells}" in text
    assert f"| plain loads | 214 | 214 | 214 | 214 | +10.0 {cells}" in text  # against the last of the ladder
    assert "Left out: 128 × 128, 4 warps, 1 CTA an SM: does not compile." in text


def test_head_dims_and_masks_are_columns_of_the_short_tables():
    result = fake_result()
    ladder_lines = ablate_report.ladder_table(result)
    assert ladder_lines[0] == "| each row adds | d 64 | d 128 |"
    assert ladder_lines[2:4] == [
        "| plain loads, 64 × 64 tiles | 100 | 100 |", "| padded rows of shared memory | 110 (+10.0) | 110 (+10.0) |"
    ]  # fmt: skip
    assert "| plain loads | +10.0 | +10.0 |" in ablate_report.switch_table(result, "mma_sync")
    entries = [{"kind": kind, "label": label, "ms": {f"{label.split(':')[0]} 1": ms}} for kind, label, ms in (
        ("ladder", "full: in use", 1.0), ("ladder", "causal: in use", 2.0), ("switch", "full: slower", 1.25),
        ("switch", "causal: slower", 4.0),
    )]  # fmt: skip
    lines = ablate_report.switch_table({"families": {"wgmma": {"128": {"entries": entries}}}}, "wgmma")
    assert lines[0].endswith("| d 128 full | d 128 causal |") and lines[2] == "| slower | -20.0 | -50.0 |"


def test_serialised_wgmma_are_told():
    result = fake_result()
    result["families"]["mma_sync"]["64"]["entries"][0]["facts"]["serialized"] = True
    assert ablate_report.report(result).count("| 255, 24, serialised |") == 1


def test_without_the_design_in_use_switches_have_no_delta():
    found = fake_result()["families"]["mma_sync"]["64"]
    found["entries"][len(ladder(64)) - 1] |= {"ms": {}, "failed": "error 1.0"}
    text = "\n".join(ablate_report.section(found, "mma_sync", "64"))
    assert "| plain loads | 214 | 214 | 214 | 214 | – |" in text and "today's tile: error 1.0" in text
    assert ablate_report.in_use({"entries": []}) is None


def test_the_list_is_printed_without_nvcc(capsys, monkeypatch):
    monkeypatch.setattr(kernel_library, "find_toolkit", lambda *_: pytest.fail("it looked for nvcc"))
    ablate.main(["--list", "--family", "mma_sync", "--head-dims", "64"])
    assert len(capsys.readouterr().out.splitlines()) == len(sm80_designs.entries(64))


def test_designs_are_left_out_by_their_labels():
    (entries,) = study.without(ablate.groups(["mma_sync"], [64]), ["plain loads", "fp16"]).values()
    assert len(entries) == len(sm80_designs.entries(64)) - 2 and "fp16" not in {entry.label for entry in entries}
    with pytest.raises(BuildError, match="expected names of --list, got nothing"):
        study.without(ablate.groups(["mma_sync"], [64]), ["nothing"])


class FakeCompiler:
    """Compiles all but one design."""

    versions = {"nvcc": "13.0", "CUTLASS": "4.2"}

    def compile_all(self, designs, progress, jobs):
        return dict.fromkeys(designs[:-1], {**FACTS, "seconds": 1.0})


@needs_gxx
def test_a_dry_run_on_the_cpu(tmp_path, monkeypatch, capsys):
    """All but nvcc and the kernels: checks, timing, the JSON, the report, and a run that goes on."""
    import cases
    import shared
    import timing
    import torch
    from reference import attention

    def forward(design, q, k, v, out, causal):
        scale = 1.1 if design.dtype == "fp16" else 1.0  # a wrong kernel
        out.copy_(scale * attention(q, k, v, causal=causal, dtype=torch.float32).out)

    small = [cases.Case(1, 32, 32, 2, 2, 64, "bfloat16", causal) for causal in (False, True)]
    monkeypatch.setattr(study, "DEVICE", "cpu")
    monkeypatch.setattr(study, "CHECKED", ((20, 20),))
    monkeypatch.setattr(ablate, "SEQLENS", (32,))
    monkeypatch.setattr(study, "forward", forward)
    monkeypatch.setattr(study, "make_compiler", FakeCompiler)
    monkeypatch.setattr(shared, "bench_cells", lambda dims: small)
    monkeypatch.setattr(timing, "CudaTimer", timing.HostTimer)
    monkeypatch.setattr(resumable.faulthandler, "dump_traceback_later", lambda *a, **k: None)  # of a captured stderr
    out = tmp_path / "ablate.json"
    arguments = ["--head-dims", "64", "--min-ms", "0", "--out", str(out)]
    ablate.main(arguments)
    result, text = json.loads(out.read_text()), capsys.readouterr().out
    assert result["finished"] and {family: list(dims) for family, dims in result["families"].items()} == {
        "mma_sync": ["64"], "wgmma": ["64"]
    }  # fmt: skip
    reasons = {row["label"]: row["failed"] for row in result["families"]["mma_sync"]["64"]["entries"] if row["failed"]}
    assert list(reasons) == ["fp16"] and "error" in reasons["fp16"]
    assert [row["failed"] for row in result["families"]["wgmma"]["64"]["entries"] if row["failed"]] == [
        "does not compile"
    ]
    assert "### Hopper forward, head dim 64: " in text and "| lagging row max |" in text
    del result["families"]["wgmma"]["64"]
    out.write_text(json.dumps({**result, "finished": False}))
    ablate.main(arguments)
    assert "mma_sync d 64" not in capsys.readouterr().out.split("### ")[0]
    assert json.loads(out.read_text())["families"]["wgmma"]["64"]["entries"]


@pytest.mark.parametrize(
    "field, change, reason",
    [
        ("k", {"heads": 4}, "k: expected the shape (2, 16, 3, 64), got (2, 16, 4, 64)"),
        ("out", {"length": 8}, "out: expected the shape (2, 16, 3, 64), got (2, 8, 3, 64)"),
        ("q", {"head_dim": 128}, "q: expected head dim 64, got 128"),
        ("q", {}, "q: expected a contiguous CUDA tensor of torch.bfloat16"),
    ],
)
def test_other_tensors_are_errors(field, change, reason):
    import torch

    sizes = {"batch": 2, "length": 16, "heads": 3, "head_dim": 64}
    shapes = {name: sizes | (change if name == field else {}) for name in ("q", "k", "v", "out")}
    tensors = {name: torch.empty(tuple(shape.values()), dtype=torch.bfloat16) for name, shape in shapes.items()}
    with pytest.raises(ValueError, match=re.escape(reason)):
        kernel_library.check_tensors(default_design(64), **tensors, causal=False)


def test_forward_is_exact():
    import torch

    if not torch.cuda.is_available() or torch.cuda.get_device_capability()[0] != 9:
        pytest.skip("the laboratory's kernels are compiled for sm_90")
    if find_toolkit(sys.path) is None:
        pytest.skip("nvcc is not installed")
    try:
        find_cutlass(ROOT, sys.path, ROOT / "build" / "cutlass")
    except BuildError:
        pytest.skip("no CUTLASS headers")
    for entry in (ladder(64)[0], ladder(64)[-1]):
        assert study.refusal(entry.design) is None, entry.label
