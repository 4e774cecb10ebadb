"""Host C++ tests: every tests/cpp/test_*.cpp is compiled with warnings as errors and run."""

from __future__ import annotations

import shutil
import subprocess
from pathlib import Path

import pytest
import torch

ROOT = Path(__file__).resolve().parents[2]
SOURCES = sorted((ROOT / "tests" / "cpp").glob("test_*.cpp"))
# Without checks of each pointer, which take a third of the time: a null pointer ends the program anyway.
SANITIZERS = ["-fsanitize=undefined", "-fno-sanitize=null,pointer-overflow,object-size", "-fno-sanitize-recover=all"]
FLAGS = ["-std=c++17", "-Wall", "-Wextra", "-Werror", *SANITIZERS]
HOST_FLAGS = [*FLAGS, "-fno-sanitize=alignment"]  # a fifth of compiling: only kernels cast pointers to vectors
# Programs that run longer than the optimiser does: they compare with brute force, or run every thread of a block.
LONG = {"test_arithmetic", "test_block_lists", "test_block_range", "test_bwd_schedule", "test_equal_choice",
        "test_mask_factors", "test_mask_types", "test_plan_limits", "test_row_order", "test_score_bias",
        "test_varlen_slots"}  # fmt: skip
INCLUDES = [f"-I{ROOT / 'csrc' / 'flash_attn'}"]

pytestmark = pytest.mark.skipif(shutil.which("g++") is None, reason="g++ is not installed")


def compile_program(source: Path, folder: Path) -> Path:
    program = folder / source.stem
    optimised = ["-O1"] if source.stem in LONG else []
    command = ["g++", *HOST_FLAGS, *optimised, *INCLUDES, str(source), "-o", str(program)]
    result = subprocess.run(command, capture_output=True, text=True)
    assert result.returncode == 0, result.stderr[-4000:]
    return program


@pytest.mark.parametrize("source", SOURCES, ids=lambda path: path.stem)
def test_host_program(source, tmp_path):
    result = subprocess.run([str(compile_program(source, tmp_path))], capture_output=True, text=True)
    assert result.returncode == 0, (result.stdout + result.stderr)[-4000:]
    assert " 0 failures" in result.stdout


EMULATED = [
    "hopper_attention",
    "emulated_jvp",
    "emulated_kv_wgmma",
    "emulated_mask_bits",
    "emulated_mask_plan",
    "emulated_mla",
    "emulated_softmax",
    "emulated_wide_bwd",
    "emulated_wide_fwd",
]


@pytest.mark.parametrize("name", EMULATED)
def test_emulated_kernels(name, tmp_path):
    program, cpp = tmp_path / name, ROOT / "tests" / "cpp"
    flags = [*FLAGS, "-O1", "-Wno-unknown-pragmas", f"-I{cpp / 'stand_ins'}", f"-I{cpp}", *INCLUDES]
    built = subprocess.run(
        ["g++", *flags, str(cpp / f"{name}.cpp"), "-o", str(program)], capture_output=True, text=True
    )
    assert built.returncode == 0, built.stderr[-4000:]
    result = subprocess.run([str(program)], capture_output=True, text=True)
    assert result.returncode == 0, (result.stdout + result.stderr)[-4000:]


def test_host_programs_exist():
    assert len(SOURCES) >= 4 and {source.stem for source in SOURCES} > LONG


def test_dropout_mask_is_the_same_in_cpp_and_python(tmp_path):
    from flash_attn import dropout_mask

    program = compile_program(ROOT / "tests" / "cpp" / "dropout_bits.cpp", tmp_path)
    for seed, offset, p in [(0, 0, 0.5), (1234567890123456789, 7, 0.17), (2**63 - 1, 2**33 + 5, 0.999), (5, 1, 1e-3)]:
        rows, columns, batch, heads = 45, 83, 2, 3
        threshold = min(round(p * 2**32), 2**32 - 1)
        rng_state = torch.tensor([seed, offset], dtype=torch.int64)
        mask = dropout_mask(rng_state, p, batch, heads, rows, columns)
        assert mask.dtype == torch.bool and mask.shape == (batch, heads, rows, columns)
        for b in range(batch):
            for h in range(heads):
                arguments = [seed, offset, b, h, rows, columns, threshold, 0, 0]
                text = subprocess.run([str(program), *map(str, arguments)], capture_output=True, text=True, check=True)
                expected = torch.tensor([[c == "1" for c in line] for line in text.stdout.split()])
                assert torch.equal(mask[b, h], expected), (seed, offset, p, b, h)
