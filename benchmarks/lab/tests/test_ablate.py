"""The programs ablate.py and sweep.py: designs, builds, runs without a GPU; on a GPU also the kernels."""

from __future__ import annotations

import dataclasses
import json
import os
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
import kernel_library
import kernel_tables
import plan_headers
import sm80_designs
import sm90_designs
import study
import sweep
from errors import BuildError
from sm80_designs import default_design, ladder
from sm90_designs import shipped
from toolchain import find_toolkit

HEAD_DIMS = sm80_designs.HEAD_DIMS
needs_gxx = pytest.mark.skipif(shutil.which("g++") is None, reason="g++ is not installed")


def changed_fields(a, b):
    return {field.name for field in dataclasses.fields(a) if getattr(a, field.name) != getattr(b, field.name)}


@needs_gxx
def test_every_design_exists_and_all_differ():
    entries = [entry for found in ablate.groups().values() for entry in found]
    assert {entry.label: entry.design.problems() for entry in entries if entry.design.problems()} == {}
    for head_dim in HEAD_DIMS:
        in_use = [entry.design for entry in sm90_designs.entries(head_dim) if entry.kind == "ladder"]
        assert sorted(mask for design in in_use for mask in design.masks) == ["causal", "full"]


@needs_gxx
def test_an_overlay_adds_one_return_to_a_header():
    for path, text in sm90_designs.entries(64)[1].design.overlay().items():
        shipped = (plan_headers.CSRC / path).read_text(encoding="utf-8").splitlines()
        added = [line for line in text.splitlines() if line not in shipped]
        assert len(added) == 1 and added[0].startswith("  if (head_dim > 0) return ")
        assert len(text.splitlines()) == len(shipped) + 1
    with pytest.raises(ValueError, match="expected one line"):
        plan_headers.with_first_return(plan_headers.TILES, "int missing_lookup() {\n", "0")


@needs_gxx
@pytest.mark.parametrize("head_dim", HEAD_DIMS)
def test_the_default_design_has_the_tile_in_use(head_dim):
    assert plan_headers.shipped_row("fwd_mma_sync", head_dim) == (head_dim, *sm80_designs.TILE[head_dim])


@pytest.mark.parametrize("head_dim", HEAD_DIMS)
def test_the_ladder_goes_from_plain_loads_to_the_default_one_technique_a_rung(head_dim):
    designs = [entry.design for entry in ladder(head_dim)]
    tile = {"block_m", "block_n", "warps", "blocks_per_sm"}
    assert (designs[0].copies, designs[0].layout, designs[0].softmax) == ("plain", "none", "textbook")
    assert designs[-1] == default_design(head_dim)
    for before, after in zip(designs, designs[1:]):
        changed = changed_fields(before, after)
        assert len(changed) == 1 or changed <= tile, changed


@pytest.mark.parametrize(
    "change, reason",
    [
        ({"head_dim": 96}, "head_dim: expected 64 or 128, got 96"),
        ({"slices": (0, 1, 1)}, "double_buffered: expected False"),
        ({"block_m": 64, "warps": 4, "block_n": 512, "blocks_per_sm": 2}, "shared memory: 2 CTAs of"),
        ({"block_n": 256, "blocks_per_sm": 1}, "registers: S and O alone take 320 of 255"),
    ],
)
def test_impossible_designs_are_refused_with_a_reason_before_nvcc(change, reason, monkeypatch):
    design = replace(default_design(64), **change)
    monkeypatch.setattr(kernel_library.subprocess, "run", lambda *a, **k: pytest.fail("it compiled something"))
    with pytest.raises(ValueError, match=re.escape(reason)):
        kernel_library.forward(design, None, None, None, None)


@needs_gxx
def test_hopper_designs_are_refused_by_the_rules_of_the_shipped_plan():
    masked = shipped(128, "kMasked", ("causal",))
    assert masked.problems() == []
    assert replace(masked, kv_stages=2).problems() == ["a K/V ring this shallow would deadlock"]
    assert sm90_designs.changed(masked, plus=["kNoMask"]).problems() == ["masked calls have no other kernel"]
    assert "shared memory: " in replace(masked, kv_stages=8).problems()[0]
    assert replace(masked, block_m=64).problems()[0].startswith("register budgets exist")
    assert "features: expected" in sm90_designs.changed(masked, plus=["kFaster"]).problems()[0]


def test_forward_is_exact_and_the_page_runs(monkeypatch):
    import torch

    if not torch.cuda.is_available():
        pytest.skip("no GPU")
    try:
        kernel_library.Compiler()
    except BuildError as error:
        pytest.skip(str(error))
    for entry in (ladder(64)[0], ladder(64)[-3], ladder(64)[-1]):
        assert study.refusal(entry.design) is None, entry.label
    monkeypatch.chdir(ROOT)
    for code in re.findall(r"^```python\n(.*?)^```", (LAB / "README.md").read_text(encoding="utf-8"), re.M | re.S):
        exec(code, {})


@needs_gxx
def test_tiles_fit_and_the_first_of_a_group_is_in_use():
    for entries in sweep.groups().values():
        designs = [entry.design for entry in entries]
        assert {design.head_dim for design in designs} <= set(kernel_tables.WGMMA)
        assert {entry.label: entry.design.problems() for entry in entries if entry.design.problems()} == {}
        assert entries[0].kind == "in use" and 1 < len(set(designs)) == len({entry.label for entry in entries})


COMPILE = """
import ctypes, json, sys
from pathlib import Path
lab, folder, family, head_dim = sys.argv[1:]
sys.path.insert(0, lab)
import ablate, kernel_library
design = ablate.FAMILIES[family](int(head_dim))[0].design
compiler = kernel_library.Compiler(folder=Path(folder))
print(json.dumps(compiler.compile(design)))
ctypes.CDLL(str(compiler.library(design)))["lab_forward"]
"""


@pytest.mark.compiles  # 20 seconds a kernel
@pytest.mark.skipif("FLASH_ATTN_KERNEL_ARCHIVE" in os.environ, reason="an install from an archive needs no CUTLASS")
@pytest.mark.skipif(
    find_toolkit(sys.path) is None or shutil.which("g++") is None, reason="nvcc or g++ is not installed"
)
@pytest.mark.parametrize("family", ablate.FAMILIES)
def test_launchers_compile_and_link(family, tmp_path):
    """Each launcher has headers of the kernels that another one does not."""
    command = [sys.executable, "-c", COMPILE, str(LAB), str(tmp_path), family, "64"]
    done = subprocess.run(command, capture_output=True, text=True)
    assert done.returncode == 0, (done.stdout + done.stderr)[-4000:]
    facts = json.loads(done.stdout)
    assert facts["registers"] > 0 and not facts["spills"] and not facts["serialized"]


class FakeCompiler:
    """Compiles all but one design."""

    versions = {"nvcc": "13.0", "CUTLASS": "4.2"}

    def compile_all(self, designs, progress, jobs):
        return {design: {} for design in designs if design != ladder(64)[1].design}


@needs_gxx
@pytest.mark.parametrize("program, options", [(sweep, "--head-dims 128"), (ablate, "--head-dims 64")])
def test_a_dry_run_on_the_cpu(program, options, tmp_path, monkeypatch, capsys):
    """All but nvcc and the kernels: checks, timing, the JSON, the report."""
    import cases
    import shared
    import timing
    import torch
    from reference import attention

    def wrong_in_fp16(design, q, k, v, out, causal):
        scale = 1.1 if design.dtype == "fp16" else 1.0
        out.copy_(scale * attention(q, k, v, causal=causal, dtype=torch.float32).out)

    dim = int(options.split()[1])
    small = [cases.Case(1, s, s, 2, 2, dim, "bfloat16", causal) for causal in (False, True) for s in (16, 128)]
    monkeypatch.setattr(study, "DEVICE", "cpu")
    monkeypatch.setattr(study, "CHECKED", ((20, 20),))
    monkeypatch.setattr(study, "forward", wrong_in_fp16)
    monkeypatch.setattr(study, "Compiler", FakeCompiler)
    monkeypatch.setattr(program, "SEQLENS", (16, 128))
    monkeypatch.setattr(shared, "bench_cells", lambda dims: small)
    monkeypatch.setattr(timing, "CudaTimer", timing.HostTimer)
    out = tmp_path / "result.json"
    program.main([*options.split(), "--min-ms", "0", "--out", str(out)])
    result, text = json.loads(out.read_text()), capsys.readouterr().out
    if program is sweep:
        tile = shipped(128, "kPlain", ("full",))
        in_use = f"{tile.block_m} × {tile.block_n}, {tile.kv_stages} stages"
        assert f"| d 128 bf16, full | {in_use} | " in text and "| d 128 fp16, full | – | – | – |" in text
        assert [list(group["flops"]) for group in result["groups"][:2]] == [
            ["full 16", "full 128"], ["causal 16", "causal 128"],
        ]  # fmt: skip
    else:
        assert list(result["families"]) == ["mma_sync", "wgmma"]
        assert f"LEFT OUT: {ladder(64)[1].design.name}: does not compile" in text
        assert "| plain loads, 64 × 64 tiles |" in text and "| exact row max in every step |" in text
        assert "LEFT OUT" in text and "| padded rows of shared memory |" not in text and "| fp16 |" not in text
