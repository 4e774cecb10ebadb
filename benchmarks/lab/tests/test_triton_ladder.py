"""The Triton ladder: its rungs are attention, its program measures them.

Without a GPU the kernels run by Triton's interpreter, tensor descriptors included.
"""

import json
import re
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from test_triton import TRITON_CASES, check_triton, patch_interpreter, run_interpreted
from triton_compiled import compile_launch

LAB = Path(__file__).resolve().parents[1]
sys.path += [str(LAB), str(LAB.parent)]

import triton_ladder
from triton_variants import RUNGS, Tile, Variant

BY_NAME = {rung.name: rung for rung in RUNGS}
KERNEL = dict(zip(triton_ladder.KERNELS, range(3)))


@pytest.fixture(scope="module")
def compiler():
    triton = pytest.importorskip("triton")
    if tuple(map(int, triton.__version__.split(".")[:2])) != (3, 6):
        pytest.skip("what Triton 3.6 makes of it")


def interpret(folder):
    """What test_the_program_and_its_rungs_by_the_interpreter runs in a separate process."""
    import timing
    import triton_attention

    patch_interpreter()
    timing.FEWEST_ROUNDS = 1
    options = ["--device", "cpu", "--head-dims", "64", "--seqlens", "1024"]
    assert triton_ladder.main([*options, "--out", f"{folder}/ladder.json"]) == 0
    torch.manual_seed(0)
    odd = [TRITON_CASES[2], TRITON_CASES[5]]  # more queries than keys, grouped heads, no keys
    for variant in (BY_NAME["baseline"].variant, BY_NAME["descriptors"].variant):
        check_triton(triton_attention, "cpu", torch.float16, variant, odd)


def test_the_program_and_its_rungs_by_the_interpreter(tmp_path):
    run_interpreted(f"import test_triton_ladder; test_triton_ladder.interpret({str(tmp_path)!r})")
    result = json.loads((tmp_path / "ladder.json").read_text())
    assert {"device", "versions", "git", "started"} <= set(result) and len(result["rows"]) == 4
    for row in result["rows"]:
        rungs = {rung.name for rung in RUNGS if row["mode"] in rung.modes}
        assert set(row["results"]) == rungs | {"ours", "sdpa_flash"} and row["failed"] == []
        assert all(found["relative_error"] < 2e-3 for found in row["results"].values())


def ptx(variant, kernel, head_dim, tile, causal=False):
    launch, _ = triton_ladder.make_launches(variant, head_dim, causal, "cpu", torch.bfloat16)[KERNEL[kernel]]
    return compile_launch(launch, tile).asm["ptx"]


@pytest.mark.parametrize("kernel", KERNEL)
def test_the_baseline_compiles_for_hopper(kernel, compiler):
    variant = BY_NAME["baseline"].variant
    code = ptx(variant, kernel, 128, variant.tiles[KERNEL[kernel]][0], causal=True)
    assert "wgmma.mma_async" in code and "cp.async.bulk.tensor" not in code


def test_each_kernel_loads_what_its_rung_says(compiler):
    """TMA loads of dK and dV: Q and dO, and O where delta is not shared."""
    tile = Tile(64, 64, 4, 2)
    params = [
        len(set(re.findall(r"_param_(\d+)\[128\]|_param_(\d+)\[64\]\b", ptx(variant, "dkdv", 64, tile))))
        for variant in (Variant(True), Variant(True, shared_delta=False))
    ]
    assert params == [2, 3]


def test_the_forward_waits_for_all_products_before_a_softmax(compiler):
    code = ptx(Variant(True), "forward", 128, Tile(128, 128, 8, 2))
    assert set(re.findall(r"wgmma\.wait_group\.sync\.aligned\s+(\d+)", code)) == {"0"}
    events = re.findall(r"wgmma\.commit_group|wgmma\.wait_group|ex2\.approx", code)
    first = events.index("ex2.approx.ftz.f32" if "ex2.approx.ftz.f32" in events else "ex2.approx")
    assert events[first - 2 : first] == ["wgmma.commit_group", "wgmma.wait_group"]


def test_every_kernel_is_compiled_once_and_what_fails_is_not_tried(monkeypatch):
    pytest.importorskip("triton")
    import triton_common

    wanted = triton_ladder.compilations((64,))
    assert len({job[0] for job in wanted.values()}) == len(RUNGS) and len(set(wanted.values())) == len(wanted)
    monkeypatch.setattr(triton_common, "tuned_tiles", {})
    launch = SimpleNamespace(kernel=None, kernel_key="kernel", tuning_key=("kernel", "long"))
    tiles = (Tile(64, 64, 4, 2), Tile(64, 128, 4, 2), Tile(128, 128, 8, 2))
    monkeypatch.setattr(triton_common, "milliseconds", lambda own, tried: {tile: -tile.block_m for tile in tried})
    monkeypatch.setattr(triton_common, "not_compiled", {("kernel", tiles[2])})
    assert triton_common.chosen_tile(launch, tiles) == tiles[0]
    assert triton_common.chosen_tile(launch, tiles[1:]) == tiles[1]
    with pytest.raises(RuntimeError, match="expected a tile that compiles, of 1 none does"):
        launch.kernel = SimpleNamespace(__name__="dq_kernel")
        triton_common.chosen_tile(launch, tiles[2:])


def test_the_rungs_on_the_gpu():
    pytest.importorskip("triton")
    if not torch.cuda.is_available() or torch.cuda.get_device_capability()[0] != 9:
        pytest.skip("tensor descriptors and the tiles of Hopper")
    import triton_attention

    for rung in RUNGS:
        check_triton(triton_attention, "cuda", torch.bfloat16, rung.variant, TRITON_CASES[:1])
