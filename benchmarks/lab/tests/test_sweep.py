"""The programs sweep.py and ablate.py: tiles, lists, builds and runs without a GPU."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

LAB = Path(__file__).resolve().parents[1]
ROOT = LAB.parents[1]
sys.path[:] = [str(ROOT / "tools"), *sys.path, str(LAB), str(LAB.parent)]

import ablate
import kernel_tables
import results
import study
import sweep
import tile_designs
from tile_designs import KERNELS, TileDesign
from toolchain import find_toolkit

needs_gxx = pytest.mark.skipif(shutil.which("g++") is None, reason="g++ is not installed")
HEAD_DIMS = {"fwd_mma_sync": kernel_tables.NARROW, "fwd_wgmma": kernel_tables.WGMMA}


@needs_gxx
@pytest.mark.parametrize("kernel", KERNELS)
def test_tiles_fit_and_the_first_of_a_group_is_in_use(kernel):
    groups = tile_designs.groups([kernel])
    assert {group.head_dim for group in groups} <= set(HEAD_DIMS[kernel])
    assert {group.head_dim for group in groups if group.dtype == "fp16"} == {tile_designs.FP16_HEAD_DIM}
    for group, entries in groups.items():
        assert {entry.label: entry.design.problems() for entry in entries if entry.design.problems()} == {}
        assert [entry.kind for entry in entries] == ["in use", *["other"] * (len(entries) - 1)]
        assert 1 < len({entry.design for entry in entries}) == len({entry.label for entry in entries}) == len(entries)
        assert {entry.design.dtype for entry in entries} == {group.dtype}


COMPILE = """
import ctypes, json, sys
from pathlib import Path
lab, folder, kernel, head_dim = sys.argv[1:]
sys.path.insert(0, lab)
import kernel_library, tile_designs
entries = {group.head_dim: entries for group, entries in tile_designs.groups([kernel]).items()}
design = entries[int(head_dim)][0].design
compiler = kernel_library.Compiler(folder=Path(folder))
print(json.dumps(compiler.compile(design)))
ctypes.CDLL(str(compiler.library(design)))["lab_forward"]
"""


@pytest.mark.compiles  # 20 seconds a kernel
@pytest.mark.skipif("FLASH_ATTN_KERNEL_ARCHIVE" in os.environ, reason="an install from an archive needs no CUTLASS")
@pytest.mark.skipif(
    find_toolkit(sys.path) is None or shutil.which("g++") is None, reason="nvcc or g++ is not installed"
)
@pytest.mark.parametrize("kernel, head_dim", [("fwd_mma_sync", 32), ("fwd_wgmma", 64)])
def test_launchers_compile_and_link(kernel, head_dim, tmp_path):
    """Each launcher has headers of the kernels that another one does not."""
    command = [sys.executable, "-c", COMPILE, str(LAB), str(tmp_path), kernel, str(head_dim)]
    done = subprocess.run(command, capture_output=True, text=True)
    assert done.returncode == 0, (done.stdout + done.stderr)[-4000:]
    facts = json.loads(done.stdout)
    assert facts["threads"] >= 128 and facts["smem_bytes"] > 0 and not facts["spills"] and not facts["serialized"]


class FakeCompiler:
    """Compiles all but one design."""

    left_out = TileDesign(128, 128, 128, 48, 4, 2)
    versions = {"nvcc": "13.0", "CUTLASS": "4.2"}

    def compile_all(self, designs, progress, jobs):
        facts = {"registers": 168, "spills": 0, "smem_bytes": 1024, "serialized": False}
        facts |= {"ctas_per_sm": 2, "threads": 128, "loop": {"all": 1300, "HMMA": 256}}
        return {design: facts for design in designs if design != self.left_out}


@needs_gxx
@pytest.mark.parametrize("program, options, others", [
    (sweep, "--head-dims 128 --dtypes bf16", ["fwd_wgmma", "fwd_wgmma"]),
    (ablate, "--head-dims 64", ["wgmma"]),
])  # fmt: skip
def test_a_dry_run_on_the_cpu(program, options, others, tmp_path, monkeypatch, capsys):
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
        assert [group["kernel"] for group in result["groups"][1:]] == others
        assert sorted(result["groups"][0]["flops"]) == ["causal 128", "causal 16", "full 128", "full 16"]
        left_out = "mma.sync forward, d 128 bf16, 128 × 48, 4 warps, 2 CTA an SM: does not compile"
    else:
        assert list(result["families"]) == ["mma_sync", *others]
        left_out = "- left out: mma.sync forward, head dim 64, fp16: s 20, 20, full: error"
    assert left_out in text
    as_stored = json.loads(out.read_text(), parse_float=lambda digits: float(f"{float(digits):.{results.DIGITS}g}"))
    out.write_text(json.dumps(as_stored))
    program.main(["--from-json", str(out)])
    text = capsys.readouterr().out
    program.main(["--from-json", str(results.store("stored", result, tmp_path))])  # which has no reasons
    assert [line for line in capsys.readouterr().out.splitlines() if line not in text] == []
