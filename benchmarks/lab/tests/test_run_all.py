"""The laboratory (benchmarks/lab.py): its list, the commands in it, what it does with results and failures."""

from __future__ import annotations

import json
import re
import sys
import tarfile
import time
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
sys.path.append(str(ROOT / "benchmarks"))

import benchmarks_page
import implementations
import lab
import lab_build
import retrospective_page
import rows
import scores
from lab import EXPERIMENTS, Experiment

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
    result = scores.load_stored(ROOT / scores.stored_path(experiment.name))
    if result:
        assert result["groups"] == options["--groups"] and sorted(scores.modes(result)) == sorted(options["--mode"])
        named = [name for name in result["implementations"] if name not in benchmarks_page.JOIN_UNNAMED]
        assert peers == ["all"] or peers == named


def test_every_result_that_the_documents_read_has_its_experiment():
    text = (ROOT / "benchmarks" / "benchmarks_page.py").read_text(encoding="utf-8")
    read = {*re.findall(r'stored\("(\w+)"\)', text), benchmarks_page.GRID, benchmarks_page.SECOND_GRID}
    read |= {section.result for section in benchmarks_page.SECTIONS}
    assert len(read) > 6 and read <= set(NAMES)
    made = {experiment.result.format(gpu=gpu) for experiment in EXPERIMENTS for gpu in ("h100", "h200")}
    assert {module.RESULT.name for module in benchmarks_page.PAGES} <= made
    assert {path.name for path in (retrospective_page.GRID,)} <= made


def test_documents_name_experiments_that_exist():
    named = set()
    for path in [ROOT / "README.md", *(ROOT / "docs").rglob("*.md")]:
        for words in re.findall(r"benchmarks/lab\.py((?: [a-z_0-9]+)+)`", path.read_text(encoding="utf-8")):
            named |= set(words.split())
    assert named and named <= set(NAMES)


def test_names_and_results_are_distinct_and_all_fits_into_25_minutes():
    assert len(set(NAMES)) == len(NAMES)
    assert len({experiment.result for experiment in EXPERIMENTS}) == len(EXPERIMENTS)
    whole = [experiment.total_seconds for experiment in EXPERIMENTS if experiment.of_the_run]
    assert sum(whole) <= 25 * 60 and max(whole) + lab.GRACE_SECONDS <= 480  # one fits into a sitting


def test_the_list_names_everything(capsys):
    assert lab.main(["--gpu", "h200"]) == 0
    text = capsys.readouterr().out
    for experiment in EXPERIMENTS:
        assert f"{experiment.name}: {experiment.shows}" in text and f"{experiment.total_seconds} s of a GPU, " in text
        assert (
            f"writes OUT/{experiment.result.format(gpu='h200')}, read by {experiment.document or 'no document'}" in text
        )


def test_a_dry_run_prints_the_commands_and_runs_nothing(capsys, monkeypatch, tmp_path):
    monkeypatch.setattr(lab.subprocess, "run", lambda *a, **k: pytest.fail("it ran something"))
    out = tmp_path / "results"
    assert lab.main(["--all", "--dry-run", "--gpu", "h200", "--out", str(out)]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert len(lines) == sum(experiment.of_the_run for experiment in EXPERIMENTS) and not out.exists()
    assert f"{sys.executable} benchmarks/theory.py --measure --out {out}/h200_theory.json" in lines
    assert all("{" not in line for line in lines)
    assert sum(line.startswith("FLASH_ATTN_FAMILY=mma_sync ") for line in lines) == 1
    assert lab.main(["sweep", "minimal", "--dry-run", "--gpu", "h200", "--out", str(out)]) == 0
    assert ["sweep.py" in line for line in capsys.readouterr().out.splitlines()] == [True, False]


@pytest.mark.parametrize("arguments", (["nothing"], ["--all", "theory"]))
def test_other_names_are_errors(arguments, capsys):
    with pytest.raises(SystemExit):
        lab.main([*arguments, "--gpu", "h200"])
    assert "expected --all or names of triton_ladder, grid" in capsys.readouterr().err


def writer(name, code, **more):
    return Experiment(name, "", f'{{python}} -c "{code}" {{out}} {{gpu}}', 1, f"{{gpu}}_{name}.json", "a page", **more)


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


WRITES = "import os, sys; open(os.path.join(sys.argv[1], sys.argv[2] + '_{0}.json'), 'w').write('{1}')"


def test_a_run_goes_on_in_another_sitting(tmp_path, capsys, monkeypatch):
    first, second = (writer(name, WRITES.format(name, "{}".replace("{}", "{{}}"))) for name in ("first", "second"))
    long = Experiment("long", "", "{python} -c 0", 1000, "{gpu}_long.json", "a page")
    monkeypatch.setattr(lab, "EXPERIMENTS", (first, long, second))
    out, archive = tmp_path / "out", tmp_path / "run.tgz"
    arguments = ["--all", "--resume", "--gpu", "h100", "--out", str(out), "--archive", str(archive), "--within", "600"]
    assert lab.main(arguments) == 0
    text = capsys.readouterr().out
    assert "== for another sitting: long" in text and "== second: " in text
    with tarfile.open(archive) as packed:
        assert sorted(packed.getnames()) == ["h100_first.json", "h100_second.json", "lab.json"]
        assert json.load(packed.extractfile("lab.json"))["first"]["good"]
    assert lab.main(arguments) == 0
    text = capsys.readouterr().out
    assert "first: measured already" in text and "second: measured already" in text
    assert lab.main(["first", "--gpu", "h100", "--out", str(out)]) == 0
    assert "measured already" not in capsys.readouterr().out


def test_what_takes_too_long_is_ended_with_all_that_it_started(tmp_path, monkeypatch, capsys):
    (tmp_path / "child.py").write_text(f"import time; time.sleep(1.5); open('{tmp_path}/survived', 'w')")
    start = f"import subprocess, sys, time; subprocess.Popen([sys.executable, '{tmp_path}/child.py']); time.sleep(60)"
    slow = writer("slow", start)
    monkeypatch.setattr(lab, "EXPERIMENTS", (slow,))
    monkeypatch.setattr(lab, "CPU_SECONDS", 0.5)
    assert lab.main(["slow", "--gpu", "h100", "--out", str(tmp_path)]) == 1
    assert "slow: FAILED, not finished after 0 s" in capsys.readouterr().out
    time.sleep(1.5)
    assert not (tmp_path / "survived").exists()


def test_a_program_that_a_kernel_ended_is_tried_again(tmp_path, monkeypatch):
    """As long as it says what was under way, and goes on."""
    code = (
        "import os, sys; path = os.path.join(sys.argv[1], 'h100_hanging.json'); now = path[:-5] + '.now'; "
        "tries = len(open(path).read()) if os.path.exists(path) else 0; open(path, 'w').write('x' * (tries + 1)); "
        "open(now, 'w') if tries < 2 else os.remove(now); sys.exit(tries < 2)"
    )
    monkeypatch.setattr(lab, "EXPERIMENTS", (writer("hanging", code),))
    assert lab.main(["hanging", "--gpu", "h100", "--out", str(tmp_path)]) == 0
    assert (tmp_path / "h100_hanging.json").read_text() == "xxx"


def test_one_name_of_the_variable_that_tells_of_built_kernels():
    assert lab.PREBUILT == lab_build.PREBUILT
    assert lab.PREBUILT in (ROOT / "examples" / "minimal" / "run.sh").read_text(encoding="utf-8")


SMALL = [experiment for experiment in EXPERIMENTS if experiment.small]


@pytest.mark.parametrize("experiment", SMALL, ids=ids)
def test_experiments_run_in_miniature_on_a_cpu(experiment, tmp_path, monkeypatch, capfd):
    """Each by its own command. Ablation, sweep, the Triton ladder and the teaching kernels are tried in their tests."""
    pytest.importorskip({"sdpa_step": "transformers"}.get(experiment.name, "torch"))
    monkeypatch.setenv("OMP_NUM_THREADS", "1")
    assert lab.main([experiment.name, "--small", "--gpu", "cpu", "--out", str(tmp_path)]) == 0, capfd.readouterr().out
    result = json.loads((tmp_path / f"cpu_{experiment.name}.json").read_text(encoding="utf-8"))
    assert result.get("rows") or result.get("runs")


def test_all_but_the_kernels_own_experiments_run_in_miniature():
    of_the_run = {experiment.name for experiment in EXPERIMENTS if experiment.of_the_run}
    assert of_the_run - {experiment.name for experiment in SMALL} == {"minimal", "ablate", "sweep", "triton_ladder"}


def test_gpus_have_short_names():
    names = ("NVIDIA H200\n", "NVIDIA H100 80GB HBM3", "NVIDIA A100-SXM4-80GB", "NVIDIA GeForce RTX 4090", "llvmpipe")
    assert [lab.gpu_slug(name) for name in names] == ["h200", "h100", "a100", "4090", "gpu"]
