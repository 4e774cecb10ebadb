"""The laboratory (benchmarks/lab.py): its list, the commands in it, what it does with results and failures."""

from __future__ import annotations

import re
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
sys.path.append(str(ROOT / "benchmarks"))

import benchmarks_page
import cp_page
import fp8_page
import implementations
import lab
import rows
import scores
from lab import EXPERIMENTS, Experiment

RESULTS = ROOT / "benchmarks" / "results"
NOT_OURS = {"h200_decode_fa3", "h200_train"}  # of a peer that is no longer installed; read until there is a grid
NAMES = [experiment.name for experiment in EXPERIMENTS]


def ids(experiment):
    return experiment.name


def options_of(experiment):
    """{option: its words} of the command."""
    found, option = {}, None
    for word in experiment.words(Path("out"), "h200"):
        if word.startswith("--"):
            option = found.setdefault(word, [])
        elif option is not None:
            option.append(word)
    return found


@pytest.mark.parametrize("experiment", EXPERIMENTS, ids=ids)
def test_commands_are_of_programs_that_have_these_options(experiment):
    program = next(word for word in experiment.words(Path("out"), "h200") if word.endswith((".py", ".sh")))
    text = (ROOT / program).read_text(encoding="utf-8")
    assert [option for option in options_of(experiment) if f'"{option}"' not in text] == []
    assert experiment.seconds > 0 and experiment.shows
    assert not experiment.document or (ROOT / experiment.document).is_file()


@pytest.mark.parametrize("experiment", [e for e in EXPERIMENTS if "benchmarks/run.py" in e.command], ids=ids)
def test_grids_measure_what_the_stored_results_hold(experiment):
    options = options_of(experiment)
    assert set(options["--mode"]) <= set(rows.MODE_FLOPS) and set(options["--groups"]) <= set(rows.ALL_GROUPS)
    peers = options["--peers"]
    assert set(peers) <= {"all", *implementations.IMPLEMENTATIONS}
    stored = [path for path in RESULTS.glob("*.json") if path.name.split("_", 1)[1] == f"{experiment.name}.json"]
    for result in map(scores.load, stored):
        assert result["groups"] == options["--groups"] and sorted(scores.modes(result)) == sorted(options["--mode"])
        named = [name for name in result["implementations"] if name not in benchmarks_page.JOIN_UNNAMED]
        assert peers == ["all"] or peers == named


def test_every_result_that_the_documents_read_has_its_experiment():
    text = (ROOT / "benchmarks" / "benchmarks_page.py").read_text(encoding="utf-8")
    read = set(re.findall(r'"(h[12]00_\w+)"', text)) - NOT_OURS
    made = {experiment.result.format(gpu=gpu) for experiment in EXPERIMENTS for gpu in ("h100", "h200")}
    assert len(read) > 6 and {f"{name}.json" for name in read} <= made
    assert {page.RESULT.name for page in (cp_page, fp8_page)} <= made


def test_names_and_results_are_distinct_and_all_fits_into_25_minutes():
    assert len(set(NAMES)) == len(NAMES)
    assert len({experiment.result for experiment in EXPERIMENTS}) == len(EXPERIMENTS)
    assert sum(experiment.seconds for experiment in EXPERIMENTS if experiment.gpus == 1) <= 25 * 60


def test_the_list_names_everything(capsys):
    assert lab.main(["--gpu", "h200"]) == 0
    text = capsys.readouterr().out
    for experiment in EXPERIMENTS:
        assert f"{experiment.name}: {experiment.shows}" in text and f"{experiment.seconds} s of GPU time" in text
        assert (
            f"writes OUT/{experiment.result.format(gpu='h200')}, read by {experiment.document or 'no document yet'}"
            in text
        )


def test_a_dry_run_prints_the_commands_and_runs_nothing(capsys, monkeypatch, tmp_path):
    monkeypatch.setattr(lab.subprocess, "run", lambda *a, **k: pytest.fail("it ran something"))
    out = tmp_path / "results"
    assert lab.main(["--all", "--dry-run", "--gpu", "h200", "--out", str(out)]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert len(lines) == sum(experiment.gpus == 1 for experiment in EXPERIMENTS) and not out.exists()
    theory = f"--out {out}/h200_theory.json --plot {out}/plots_theory/roofline.png"
    assert f"{sys.executable} benchmarks/theory.py --measure {theory}" in lines
    assert all("{" not in line for line in lines)
    assert sum(line.startswith("FLASH_ATTN_FAMILY=mma_sync ") for line in lines) == 2
    assert lab.main(["sweep", "minimal", "--dry-run", "--gpu", "h200", "--out", str(out)]) == 0
    assert ["sweep.py" in line for line in capsys.readouterr().out.splitlines()] == [True, False]


@pytest.mark.parametrize("arguments", (["nothing"], ["--all", "theory"]))
def test_other_names_are_errors(arguments, capsys):
    with pytest.raises(SystemExit):
        lab.main([*arguments, "--gpu", "h200"])
    assert "expected --all or names of minimal, theory" in capsys.readouterr().err


def writer(name, code, **more):
    return Experiment(name, "", f'{{python}} -c "{code}" {{out}} {{gpu}}', 1, f"{{gpu}}_{name}.json", "", **more)


def test_results_are_collected_and_a_failure_stops_nothing(tmp_path, capsys, monkeypatch):
    write = "import os, sys; open(os.path.join(sys.argv[1], {0}), 'w').write(os.environ.get('SET', ''))"
    experiments = [
        writer("named", write.format("sys.argv[2] + '_named.json'"), environment=(("SET", "yes"),)),
        writer("broken", "raise SystemExit(3)"),
        writer("silent", "pass"),
        writer("renamed", write.format("'own.json'"), written="own.json"),
    ]
    monkeypatch.setattr(lab, "EXPERIMENTS", tuple(experiments))
    assert lab.main(["--all", "--out", str(tmp_path), "--gpu", "h200"]) == 1
    text = capsys.readouterr().out
    assert "broken: FAILED, exit status 3" in text
    assert f"silent: FAILED, {tmp_path}/h200_silent.json was not written" in text
    assert (tmp_path / "h200_named.json").read_text() == "yes" and (tmp_path / "h200_renamed.json").is_file()
    assert lab.main(["named", "renamed", "--out", str(tmp_path), "--gpu", "h200"]) == 0


def test_gpus_have_short_names():
    names = ("NVIDIA H200\n", "NVIDIA H100 80GB HBM3", "NVIDIA A100-SXM4-80GB", "NVIDIA GeForce RTX 4090", "llvmpipe")
    assert [lab.gpu_slug(name) for name in names] == ["h200", "h100", "a100", "4090", "gpu"]
