"""The laboratory's configurable kernels (benchmarks/ablate.py): designs, cache, machine code, tables, plot. Without a
GPU; forward() is compared with float64 attention on one.
"""

from __future__ import annotations

import dataclasses
import json
import re
import shutil
import sys
from dataclasses import replace
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
sys.path[:] = [str(ROOT / "tools"), *sys.path, str(ROOT / "benchmarks")]

import ablate
import ablate_page
import ablate_report
import lab_build
import lab_designs
import lab_plan
import lab_progress
import lab_sass
import lab_sm90
import lab_tiles
from errors import BuildError
from lab_designs import FwdDesign, default_design, ladder, switches
from toolchain import find_cutlass, find_toolkit

HEAD_DIMS = lab_designs.HEAD_DIMS
FACTS = {"registers": 255, "spills": 24, "smem_bytes": 49152, "ctas_per_sm": 2, "threads": 128,
         "loop": {"all": 1300, "HMMA": 256}, "serialized": False}  # fmt: skip
needs_gxx = pytest.mark.skipif(shutil.which("g++") is None, reason="g++ is not installed")


def changed_fields(a, b):
    return {field.name for field in dataclasses.fields(a) if getattr(a, field.name) != getattr(b, field.name)}


@pytest.mark.parametrize("head_dim", HEAD_DIMS)
def test_every_design_of_the_list_exists_and_labels_are_distinct(head_dim):
    entries = lab_designs.entries(head_dim)
    assert {entry.label: entry.design.problems() for entry in entries if entry.design.problems()} == {}
    assert len({(entry.kind, entry.label) for entry in entries}) == len(entries)


@needs_gxx
@pytest.mark.parametrize("head_dim", HEAD_DIMS)
def test_the_default_design_has_the_tile_in_use(head_dim):
    row = lab_plan.shipped_row("fwd_mma_sync", head_dim)
    assert row == (head_dim, *lab_designs.TILE[head_dim])
    shipped = lab_tiles.TileDesign("fwd_mma_sync", head_dim, row)
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
    monkeypatch.setattr(lab_build.subprocess, "run", lambda *a, **k: pytest.fail("it compiled something"))
    with pytest.raises(ValueError, match=re.escape(reason)):
        lab_build.forward(design, None, None, None, None)


def test_the_header_states_the_fields_in_the_order_of_the_struct():
    text = (lab_designs.LAB / "fwd_design.h").read_text(encoding="utf-8")
    body = re.search(r"struct FwdDesign \{(.*?)\};", text, re.DOTALL)[1]
    fields = re.findall(r"(\w+);", re.sub(r"//.*", "", body))
    assert fields == [
        *("head_dim", "block_m", "block_n", "warps", "blocks_per_sm", "dtype", "async_copies", "eager_kv", "layout"),
        *("q_in_registers", "whole_fragments", "double_buffered", "lagging_max"),
    ]
    design = replace(default_design(128), layout="padded", q="registers", dtype="fp16")
    words = "128, 128, 64, 4, 2, Dtype::kFp16, true, true, Layout::kPadded, true, false, true, true"
    assert design.header() == f"#define LAB_DESIGN {{{words}}}\n"


def test_another_design_compiler_or_source_is_another_library():
    design = default_design(64)
    keys = [lab_build.cache_key(entry.design, "90", "13.0", "sources") for entry in lab_designs.entries(64)]
    assert len(set(keys)) == len(keys)
    key = lab_build.cache_key(design, "90", "13.0", "sources")
    others = [("80", "13.0", "sources"), ("90", "13.1", "sources"), ("90", "13.0", "changed")]
    assert key == keys[len(ladder(64)) - 1]
    assert key not in [lab_build.cache_key(design, *other) for other in others]


def test_libraries_depend_on_what_they_include_and_nothing_else():
    names = {path.relative_to(ROOT).as_posix() for path in lab_build.included_files(FwdDesign.launcher)}
    csrc = "csrc/flash_attn"
    assert {f"benchmarks/lab/fwd_{name}" for name in ("launcher.cu", "kernel.h", "steps.h", "design.h")} <= names
    assert {f"{csrc}/kernels/common/softmax.h", f"{csrc}/kernels/sm80/gemm.h", f"{csrc}/core/visibility.h"} <= names
    assert not [name for name in names if "sm90" in name or "bwd_kernel" in name or "decode" in name]
    hopper = {path.name for path in lab_build.included_files(lab_sm90.Sm90Design.launcher)}
    assert {"sm90_launcher.cu", "fwd_softmax_step.h", "fwd_policy_sm90.h", "tiles.h"} <= hopper


def test_occupancy_is_limited_by_registers_memory_and_threads():
    assert lab_designs.ctas_per_sm(128, 255, 49152) == 2
    assert lab_designs.ctas_per_sm(128, 128, 24576) == 4
    assert lab_designs.ctas_per_sm(128, 32, 100 * 1024) == 2
    assert lab_designs.ctas_per_sm(1024, 32, 1024) == 2


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
    assert lab_sass.inner_loop(SASS, "HMMA", 1) == {"all": 4, "HMMA": 1}
    assert lab_sass.inner_loop(SASS, "HMMA", 2) == {"all": 4, "HMMA": 2, "LDSM": 1}
    assert lab_sass.inner_loop(SASS, "HMMA", 3) == {"all": 11, "HMMA": 4, "LDSM": 1}
    assert lab_sass.inner_loop(SASS, "HGMMA", 1) is None and lab_sass.inner_loop("", "HMMA", 1) is None


def test_mma_of_a_step():
    assert default_design(64).mma_per_step == 2 * 2 * 16 * 4  # as in its machine code
    assert ladder(128)[0].design.mma_per_step == 2 * 1 * 8 * 8


@needs_gxx
@pytest.mark.parametrize("head_dim", HEAD_DIMS)
def test_hopper_designs_exist_and_each_differs_from_the_kernel_in_use(head_dim):
    entries = lab_sm90.entries(head_dim)
    assert {entry.label: entry.design.problems() for entry in entries if entry.design.problems()} == {}
    assert len({entry.design for entry in entries}) == len({entry.label for entry in entries}) == len(entries)
    masks = [mask for entry in entries if entry.kind == "ladder" for mask in entry.design.masks]
    assert sorted(masks) == ["causal", "full"]


@needs_gxx
def test_hopper_designs_are_refused_by_the_rules_of_the_shipped_plan():
    masked = lab_sm90.shipped(128, "kMasked", ("causal",))
    assert masked.problems() == []
    assert replace(masked, kv_stages=2).problems() == ["a K/V ring this shallow would deadlock"]
    assert lab_sm90.changed(masked, plus=["kNoMask"]).problems() == ["masked calls have no other kernel"]
    assert "shared memory: " in replace(masked, kv_stages=8).problems()[0]
    assert replace(masked, block_m=64).problems()[0].startswith("register budgets exist")
    assert "features: expected" in lab_sm90.changed(masked, plus=["kFaster"]).problems()[0]


@needs_gxx
def test_the_overlay_changes_two_lookups_and_nothing_else():
    design = lab_sm90.entries(64)[1].design
    for path, text in design.overlay().items():
        shipped = (lab_plan.CSRC / path).read_text(encoding="utf-8").splitlines()
        added = [line for line in text.splitlines() if line not in shipped]
        assert len(added) == 1 and added[0].startswith("  if (head_dim > 0) return ")
        assert len(text.splitlines()) == len(shipped) + 1
    with pytest.raises(ValueError, match="expected one line"):
        lab_plan.with_first_return(lab_plan.TILES, "int missing_lookup() {\n", "0")


def fake_result():
    """Two head dims of the one family, one of the other; each rung 10 % faster than the one before."""
    flops = {"full 1024": 2e11, "full 4096": 4e11, "causal 1024": 1e11, "causal 4096": 2e11}
    facts = FACTS

    def found(entries):
        rows = []
        for index, entry in enumerate(entries):
            times = {cell: value / 1e11 * 1.1**-index for cell, value in flops.items()}
            rows.append(ablate.row(entry, facts, times, None))
        rows[-1] |= {"ms": {}, "facts": None, "failed": "does not compile"}
        rows.append({"kind": "library", "label": "library", "design": None, "facts": None, "failed": None,
                     "ms": {"full 1024": 1.0}})  # fmt: skip
        return {"flops": flops, "entries": rows}

    families = {"mma_sync": {"64": found(lab_designs.entries(64)), "128": found(lab_designs.entries(128))}}
    if shutil.which("g++"):
        families["wgmma"] = {"64": found(lab_sm90.entries(64))}
    origin = {"device": {"name": "GPU"}, "git": {"commit": "0123456789abcdef", "dirty": True}}
    return json.loads(json.dumps({**origin, "versions": {"nvcc": "13.0"}, "families": families}))


def test_tables_state_gains_resources_and_what_was_left_out():
    text = ablate_report.report(fake_result())
    assert text.startswith("GPU, commit 0123456789ab+changes; nvcc 13.0.\n")
    assert "### mma.sync forward, head dim 64" in text and "### mma.sync forward, head dim 128" in text
    cells = "| 255, 24 | 48.0 | 2 × 4 | 1300 (5.1) |"
    assert f"| plain loads, 64 × 64 tiles | 100 | 100 | 100 | 100 | – {cells}" in text
    assert f"| padded rows of shared memory | 110 | 110 | 110 | 110 | +10.0 {cells}" in text
    assert f"| plain loads | 214 | 214 | 214 | 214 | +10.0 {cells}" in text  # against the last of the ladder
    assert "Left out: 128 × 128, 4 warps, 1 CTA an SM: does not compile." in text
    assert "on the same cells: full 1024 200." in text


def test_serialised_wgmma_are_told():
    result = fake_result()
    result["families"]["mma_sync"]["64"]["entries"][0]["facts"]["serialized"] = True
    assert ablate_report.report(result).count("| 255, 24, serialised |") == 1


def test_without_the_design_in_use_switches_have_no_delta():
    result = fake_result()
    rows = result["families"]["mma_sync"]["64"]["entries"]
    rows[len(ladder(64)) - 1] |= {"ms": {}, "failed": "error 1.0"}
    text = ablate_report.section(result, "mma_sync", "64")
    assert "| plain loads | 214 | 214 | 214 | 214 | – |" in text and "today's tile: error 1.0" in text


def one_family():
    result = fake_result()
    return {**result, "families": {"mma_sync": {"64": result["families"]["mma_sync"]["64"]}}}


def test_plots_are_drawn_beside_the_json(tmp_path, capsys):
    path = tmp_path / "h200_ablate.json"
    path.write_text(json.dumps(one_family()))
    ablate.main(["--from-json", str(path)])
    assert ablate_report.report(one_family()) in capsys.readouterr().out
    pytest.importorskip("matplotlib")
    assert (tmp_path / "plots_ablate" / "mma_sync.png").read_bytes().startswith(b"\x89PNG")


def test_the_document_keeps_everything_else():
    text = (ROOT / ablate_page.PAGE).read_text(encoding="utf-8")
    new = ablate_page.page(text, one_family())
    assert "(../../benchmarks/results/plots_ablate/mma_sync.png)" in new and "| lagging row max |" in new
    begin = "<!-- ablation:begin -->"
    assert new.partition(begin)[0] == text.partition(begin)[0] and new.endswith("<!-- ablation:end -->\n")
    assert "Not measured yet" in ablate_page.page(new, None)


@needs_gxx
def test_predictions_are_of_entries_of_the_list():
    lists = {"mma_sync": lab_designs.entries, "wgmma": lab_sm90.entries}
    for prediction in ablate_page.PREDICTIONS:
        entries = lists[prediction.family](prediction.head_dim)
        assert (prediction.kind, prediction.label) in {(entry.kind, entry.label) for entry in entries}
        assert prediction.lowest or prediction.low < prediction.high


def test_predictions_stand_beside_what_was_measured():
    """Of the made-up result each row of the ladder gives 10 %, and no switch is slower than plain loads."""
    lines = ablate_page.predicted(one_family()).splitlines()
    assert "| mma.sync forward, d 64 | cp.async | +0 to +5 | +10.0 | no |" in lines
    assert "| mma.sync forward, d 64 | K and V loaded early | +15 or more | +10.0 | no |" in lines
    assert "| mma.sync forward, d 128 | cp.async | +0 to +5 | – | – |" in lines
    of_ladder = ablate_page.Prediction("mma_sync", 64, "ladder", "cp.async")
    found = one_family()["families"]["mma_sync"]["64"]
    assert (
        len(ablate_page.changes(of_ladder, found)) == len(ablate_report.measured(found, "ladder")) - 1
    )  # no row before
    (slowest,) = [line for line in lines if "d 64 | rows not swizzled | the slowest of all |" in line]
    assert slowest.endswith("| no |") and len(lines) == 6 + len(ablate_page.PREDICTIONS)


def test_a_prediction_of_one_mask_is_of_its_cells():
    entries = [
        {"kind": kind, "label": label, "ms": {"full 1": full, "causal 1": causal}}
        for kind, label, full, causal in (
            ("ladder", "in use", 1.0, 1.0), ("switch", "one", 1.25, 2.0), ("switch", "two", 1.1, 4.0)
        )
    ]  # fmt: skip
    result = {"families": {"wgmma": {"64": {"entries": entries}}}}
    for prediction, measured, holds in (
        (ablate_page.Prediction("wgmma", 64, "switch", "one", -21, -19, mask="full"), "-20.0", "yes"),
        (ablate_page.Prediction("wgmma", 64, "switch", "one", high=-60, mask="causal"), "-50.0", "no"),
        (ablate_page.Prediction("wgmma", 64, "switch", "two", lowest=True), "-52.3", "yes"),
    ):
        assert ablate_page.row(prediction, result)[-2:] == [measured, holds]


def test_bars_are_of_one_mask():
    ladder_bars, switch_bars = ablate_report.bars(fake_result()["families"]["mma_sync"]["64"], "causal")
    assert [round(value) for _, value in ladder_bars[:2]] == [100, 110]
    assert switch_bars[0] == ("plain loads", pytest.approx(10.0))


def test_the_list_is_printed_without_nvcc(capsys, monkeypatch):
    monkeypatch.setattr(lab_build, "find_toolkit", lambda *_: pytest.fail("it looked for nvcc"))
    ablate.main(["--list", "--family", "mma_sync", "--head-dims", "64"])
    assert len(capsys.readouterr().out.splitlines()) == len(lab_designs.entries(64))


def test_designs_are_left_out_by_their_labels():
    (entries,) = ablate.work(["mma_sync"], [64], ["plain loads", "fp16"]).values()
    assert len(entries) == len(lab_designs.entries(64)) - 2 and "fp16" not in {entry.label for entry in entries}
    with pytest.raises(BuildError, match="expected labels of --list, got nothing"):
        ablate.work(["mma_sync"], [64], ["nothing"])


class FakeCompiler:
    """Compiles all but one design."""

    versions = {"nvcc": "13.0", "CUTLASS": "4.2"}

    def compile_all(self, designs, progress, jobs):
        return dict.fromkeys(designs[:-1], {**FACTS, "seconds": 1.0})


@needs_gxx
def test_a_dry_run_on_the_cpu(tmp_path, monkeypatch, capsys):
    """All but nvcc and the kernels: checks, timing, the JSON, the report, and a run that goes on."""
    import cases
    import timing
    import torch
    from reference import attention

    def forward(design, q, k, v, out, causal):
        scale = 1.1 if design.dtype == "fp16" else 1.0  # a wrong kernel
        out.copy_(scale * attention(q, k, v, causal=causal, dtype=torch.float32).out)

    small = [cases.Case(1, 32, 32, 2, 2, 64, "bfloat16", causal) for causal in (False, True)]
    monkeypatch.setattr(ablate, "DEVICE", "cpu")
    monkeypatch.setattr(ablate, "CHECKED", ((20, 20),))
    monkeypatch.setattr(ablate, "SEQLENS", (32,))
    monkeypatch.setattr(ablate, "forward", forward)
    monkeypatch.setattr(ablate, "make_compiler", FakeCompiler)
    monkeypatch.setattr(cases, "bench_cells", lambda dims: small)
    monkeypatch.setattr(timing, "CudaTimer", timing.HostTimer)
    monkeypatch.setattr(lab_progress.faulthandler, "dump_traceback_later", lambda *a, **k: None)  # of a captured stderr
    out = tmp_path / "h200_ablate.json"
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
    assert "### Hopper forward, head dim 64" in text and "| lagging row max |" in text
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
        lab_build.check_tensors(default_design(64), **tensors, causal=False)


def test_forward_is_exact(device):
    import torch
    from reference import attention

    if device != "cuda" or torch.cuda.get_device_capability()[0] != 9:
        pytest.skip("the laboratory's kernels are compiled for sm_90")
    if find_toolkit(sys.path) is None:
        pytest.skip("nvcc is not installed")
    try:
        find_cutlass(ROOT, sys.path, ROOT / "build" / "cutlass")
    except BuildError:
        pytest.skip("no CUTLASS headers")
    for entry in (ladder(64)[0], ladder(64)[-1]):
        assert ablate.refusal(torch, attention, entry.design) is None, entry.label
