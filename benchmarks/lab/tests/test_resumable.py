"""What the laboratory measures part by part (resumable.py): kernels that hang, runs that go on."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

LAB = Path(__file__).resolve().parents[1]
sys.path.append(str(LAB))

import resumable
from resumable import Ended, Progress, under_way

ORIGIN = {"git": {"commit": "0123"}}


@pytest.fixture(autouse=True)
def no_dumps(monkeypatch):
    """faulthandler needs a real stderr."""
    monkeypatch.setattr(resumable.faulthandler, "dump_traceback_later", lambda *a, **k: None)


def test_an_unfinished_result_of_the_commit_goes_on(tmp_path):
    path = tmp_path / "new" / "h100_sweep.json"
    progress = Progress(path, ORIGIN, {"groups": []})
    progress.result["groups"].append(1)
    progress.write()
    assert Progress(path, ORIGIN, {"groups": []}).result["groups"] == [1]
    assert Progress(path, {"git": {"commit": "4567"}}, {"groups": [2]}).result["groups"] == [2]
    progress.finish()
    assert json.loads(path.read_text())["finished"]
    assert Progress(path, ORIGIN, {"groups": []}).result["groups"] == []


def test_what_ended_a_run_is_left_out_of_the_next(tmp_path):
    path = tmp_path / "h100_sweep.json"
    progress = Progress(path, ORIGIN, {})
    with progress.watched("checking a"):
        assert under_way(path).read_text() == "checking a"
    with pytest.raises(RuntimeError), progress.watched("checking b"):
        raise RuntimeError("the context is broken")
    again = Progress(path, ORIGIN, {})
    assert again.result["ended_by"] == ["checking b"] and not under_way(path).exists()
    with again.watched("checking a"):
        pass
    with pytest.raises(Ended, match="hung, or ended the program"), again.watched("checking b"):
        pytest.fail("it ran again")
    assert Progress(path, ORIGIN, {}).result["ended_by"] == ["checking b"]


def test_a_hang_ends_the_program_and_names_what_hung(tmp_path):
    code = (
        "import sys, time; from pathlib import Path; sys.path.insert(0, sys.argv[1]); import resumable\n"
        "resumable.HANG_SECONDS = 0.2\n"
        "with resumable.Progress(Path(sys.argv[2]), {'git': {}}, {}).watched('checking d64'): time.sleep(30)"
    )
    path = tmp_path / "h100_ablate.json"
    command = [sys.executable, "-c", code, str(LAB), str(path)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=25)
    assert done.returncode == 1 and done.stdout == "checking d64\n" and "Timeout" in done.stderr
    assert under_way(path).read_text() == "checking d64"
