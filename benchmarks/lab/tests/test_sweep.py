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
import sm80_designs
import study
import sweep
from sm90_designs import shipped
from toolchain import find_toolkit

needs_gxx = pytest.mark.skipif(shutil.which("g++") is None, reason="g++ is not installed")


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
        return {design: {} for design in designs if design != sm80_designs.ladder(64)[1].design}


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
        assert f"LEFT OUT: {sm80_designs.ladder(64)[1].design.name}: does not compile" in text
        assert "| plain loads, 64 × 64 tiles |" in text and "| exact row max in every step |" in text
        assert "LEFT OUT" in text and "| padded rows of shared memory |" not in text and "| fp16 |" not in text
