"""The Triton ladder: its rungs are attention, its program measures them.

Without a GPU the kernels run by Triton's interpreter, tensor descriptors included.
"""

import json
import sys
from pathlib import Path

import torch
from test_triton import TRITON_CASES, check_triton, run_interpreted

LAB = Path(__file__).resolve().parents[1]
sys.path += [str(LAB), str(LAB.parent)]

import triton_ladder
from triton_variants import RUNGS


def interpret(folder):
    """What test_the_program_and_its_rungs_by_the_interpreter runs in a separate process."""
    import timing
    import triton_attention

    timing.FEWEST_ROUNDS = 1
    options = ["--device", "cpu", "--head-dims", "64", "--seqlens", "1024"]
    assert triton_ladder.main([*options, "--out", f"{folder}/ladder.json"]) == 0
    torch.manual_seed(0)
    variants = (*(rung.variant for rung in RUNGS), triton_attention.Variant(use_tma=False), RUNGS[-1].variant)
    for i, (variant, case) in enumerate(zip(variants, TRITON_CASES)):  # with and without descriptors, strided or not
        check_triton(triton_attention, "cpu", torch.float16, variant, (case,), (i // 2 % 2 == 0,))


def test_the_program_and_its_rungs_by_the_interpreter(tmp_path):
    run_interpreted(f"import test_triton_ladder; test_triton_ladder.interpret({str(tmp_path)!r})")
    result = json.loads((tmp_path / "ladder.json").read_text())
    assert {"device", "versions", "git", "started"} <= set(result) and len(result["rows"]) == 4
    for row in result["rows"]:
        rungs = {rung.name for rung in RUNGS if row["mode"] in rung.modes}
        assert set(row["results"]) == rungs | {"ours", "sdpa_flash"} and row["failed"] == []
        assert all(found["relative_error"] < 2e-3 for found in row["results"].values())
