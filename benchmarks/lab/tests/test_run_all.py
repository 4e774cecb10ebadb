"""The list of experiments (run_all.py): their commands, and what it does with results and failures."""

from __future__ import annotations

import json
import sys
from pathlib import Path

import pytest

LAB = Path(__file__).resolve().parents[1]
sys.path += [str(LAB), str(LAB.parent)]

import implementations
import pages
import results
import rows
import run_all
import scores
from run_all import EXPERIMENTS, Experiment

NAMES = [experiment.name for experiment in EXPERIMENTS]


def ids(experiment):
    return experiment.name


def options_of(experiment):
    """{option: its words} of the command."""
    found, option = {}, None
    for word in experiment.words(Path("out")):
        if word.startswith("--"):
            option = found.setdefault(word, [])
        elif option is not None:
            option.append(word)
    return found


@pytest.mark.parametrize("experiment", [e for e in EXPERIMENTS if "benchmarks/run.py" in e.command], ids=ids)
def test_grids_measure_what_the_stored_results_hold(experiment):
    options = options_of(experiment)
    assert set(options["--mode"]) <= set(rows.MODE_FLOPS) and set(options["--groups"]) <= set(rows.ALL_GROUPS)
    peers = options["--peers"]
    assert set(peers) <= {"all", *implementations.IMPLEMENTATIONS}
    if results.stored_path(experiment.name).is_file():
        result = results.stored(experiment.name)
        assert result["groups"] == options["--groups"]
        assert sorted(scores.modes(result)) == sorted(options["--mode"])


def test_every_stored_result_has_its_experiment():
    if not results.RESULTS.is_dir():
        pytest.skip("a source distribution has no results")
    assert {path.stem for path in results.RESULTS.glob("*.json")} <= set(NAMES)


def writer(name, code, **more):
    return Experiment(name, "", f'{{python}} -c "{code}" {{out}} {{result}}', 1, "a page", **more)


def test_results_are_collected_and_a_failure_stops_nothing(tmp_path, capsys, monkeypatch):
    write = "import os, sys; open({0}, 'w').write(os.environ.get('SET', ''))"
    experiments = [
        writer("named", write.format("sys.argv[2]"), environment=(("SET", "yes"),)),
        writer("broken", "raise SystemExit(3)"),
        writer("silent", "pass"),
        writer("renamed", write.format("sys.argv[1] + '/own.json'"), written="own.json"),
    ]
    monkeypatch.setattr(run_all, "EXPERIMENTS", tuple(experiments))
    assert run_all.main(["--all", "--out", str(tmp_path)]) == 1
    text = capsys.readouterr().out
    assert "broken: FAILED, exit status 3" in text
    assert f"silent: FAILED, {tmp_path}/silent.json was not written" in text
    assert (tmp_path / "named.json").read_text() == "yes" and (tmp_path / "renamed.json").is_file()
    assert run_all.main(["named", "renamed", "--out", str(tmp_path)]) == 0


@pytest.mark.parametrize("name", ["deterministic", "accuracy", "masks", "gains"])
def test_experiments_run_in_miniature_on_a_cpu(name, tmp_path, monkeypatch, capfd):
    """One of each program that no other test runs by its command line."""
    pytest.importorskip({"gains": "transformers"}.get(name, "torch"))
    monkeypatch.setenv("OMP_NUM_THREADS", "1")
    assert run_all.main([name, "--small", "--out", str(tmp_path)]) == 0, capfd.readouterr().out
    result = results.compact(json.loads((tmp_path / f"{name}.json").read_text(encoding="utf-8")), name)
    monkeypatch.setattr(pages, "stored", lambda _: result)
    blocks = {block: lines for of_page in pages.BLOCKS.values() for block, lines in of_page.items()}
    expected = {
        "deterministic": "bwd, `ours_deterministic` |",
        "accuracy": "| `ours` |",
        "masks": "| window of 4096 |",
        "gains": "| decoding alone, 1 × 128",
    }
    assert result["rows"] and expected[name] in "\n".join(blocks[name]())
