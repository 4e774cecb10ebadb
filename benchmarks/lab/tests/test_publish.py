"""Results of one run become those of the documents (benchmarks/lab_publish.py)."""

from __future__ import annotations

import json
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
sys.path.append(str(ROOT / "benchmarks"))

import lab
import lab_publish
import scores

torch = pytest.importorskip("torch")
pytest.importorskip("matplotlib")
STORED = ROOT / scores.RESULTS


@pytest.fixture
def run(tmp_path):
    """A folder as lab.py leaves it: the grid, the decode rows and the loss, of one commit and GPU."""
    if not STORED.is_dir():
        pytest.skip("a source distribution has no results")
    example = lab_publish.load_example("train_char_lm")
    small = example.Config(layers=1, heads=2, kv_heads=1, head_dim=8, context=16, batch=1, steps=2, warmup=1)
    trained, _ = example.compare(small, torch.device("cpu"))
    folder = tmp_path / "run"
    folder.mkdir()
    for name in ("grid", "decode", "train_char_lm"):
        result = trained if name == "train_char_lm" else scores.load(ROOT / scores.stored_path(name))
        if "flash_attn" in result:
            result |= {"flash_attn": {"commit": 40 * "a"}, "device": "NVIDIA H100, torch 2"}
        else:
            result |= {"build": {"commit": 40 * "a"}, "device": {**result["device"], "name": "NVIDIA H100"}}
        (folder / f"h100_{name}.json").write_text(json.dumps(result))
    return folder


def test_results_are_taken_drawn_and_replace_earlier_ones(run, tmp_path, capsys):
    results = tmp_path / "results"
    (results / "plots_grid").mkdir(parents=True)
    (results / "plots_grid" / "of_before.png").write_text("")
    for name in ("h200_grid", "h200_decode", "h100_pages_decode", "h100x2_context_parallel"):
        (results / f"{name}.json").write_text("{}")
    lab_publish.main([str(run), "--results", str(results), "--no-docs"])
    assert "taken: grid decode train_char_lm; without: " in capsys.readouterr().out
    stored = {path.name for path in results.glob("*.json")}
    taken = {"h100_grid.json", "h100_decode.json", "h100_train_char_lm.json"}
    assert stored == taken | {"h100_pages_decode.json", "h100x2_context_parallel.json"}
    assert not (results / "plots_grid" / "of_before.png").exists()
    for plot in ("plots_grid/fwd_bwd_d128.png", "plots_decode/decode_h32-8.png", "plots_train/train_char_lm.png"):
        assert (results / plot).read_bytes().startswith(b"\x89PNG")


def test_what_failed_is_taken_only_if_it_is_named(run):
    (run / lab.STATE).write_text(json.dumps({"grid": {"good": True}, "decode": {"good": False}}))
    assert set(lab_publish.of_run(run)) == {"grid", "train_char_lm"}
    assert set(lab_publish.of_run(run, ["decode"])) == {"grid", "decode", "train_char_lm"}


@pytest.mark.parametrize(
    "change, reason",
    [
        ({"build": {"commit": 40 * "b"}}, "results of one commit"),
        ({"device": {"name": "NVIDIA H200"}}, "results of one GPU"),
        ({"finished": False}, "not finished: decode"),
    ],
)
def test_results_of_several_runs_are_refused(run, tmp_path, change, reason):
    path = run / "h100_decode.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | change))
    with pytest.raises(SystemExit, match=reason):
        lab_publish.publish(run, tmp_path / "results")
    with pytest.raises(SystemExit, match="no results"):
        lab_publish.publish(tmp_path, tmp_path / "results")


def test_the_newest_result_is_read_whichever_gpu_measured_it(tmp_path):
    folder = tmp_path / scores.RESULTS
    folder.mkdir(parents=True)
    assert scores.stored_path("decode", tmp_path) == scores.RESULTS / "h100_decode.json"
    (folder / "h100_8bit_decode.json").write_text("{}")
    for gpu, started in (("h100", "2026-02-01"), ("h200", "2026-01-01")):
        (folder / f"{gpu}_decode.json").write_text(json.dumps({"started": started}))
    assert scores.stored_path("decode", tmp_path) == scores.RESULTS / "h100_decode.json"
