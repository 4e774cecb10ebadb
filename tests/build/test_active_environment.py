"""Which interpreter a build asks for torch, and whose files it never runs to find out."""

import os
import stat
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
sys.path.insert(0, str(ROOT / "tools"))

import active_environment
import target_env
from active_environment import Candidate

# A torch with no more than the build asks of one.
TORCH = """\
import types
__version__ = "2.99.0"
version = types.SimpleNamespace(cuda="13.0", hip=None)
_C = types.SimpleNamespace(_GLIBCXX_USE_CXX11_ABI=True)
"""
FIND = (
    "import sys; sys.path.insert(0, sys.argv[1]); from pathlib import Path; from target_env import find_target_torch; "
    "found = find_target_torch(Path(sys.argv[2])); print('@found', found and found.executable)"
)
FRONT_END = (
    "import os, subprocess, sys; os.environ['VIRTUAL_ENV'] = sys.argv[1]; sys.exit(subprocess.call(sys.argv[2:]))"
)


def make_environment(folder, with_torch):
    subprocess.run([sys.executable, "-m", "venv", "--without-pip", folder], check=True)
    if with_torch:
        (package,) = folder.glob("lib/python*/site-packages")
        (package / "torch").mkdir()
        (package / "torch" / "__init__.py").write_text(TORCH)
    return folder


@pytest.fixture
def environments(tmp_path):
    """A folder of this user alone with the environment `mine`, which has a torch, and `builds-v0/x`, which has none."""
    if active_environment.replaceable_part(str(tmp_path)) is not None:
        pytest.skip(f"{tmp_path} is not this user's alone")
    make_environment(tmp_path / "mine", True)
    make_environment(tmp_path / "builds-v0" / "x", False)
    return tmp_path


def found_by_a_build(folder, **variables):
    """(interpreter taken, output) of a build in `builds-v0/x`, started by a front end that got `variables`."""
    throwaway = folder / "builds-v0" / "x"
    environment = {"PATH": os.defpath, **variables}
    command = [sys.executable, "-c", FRONT_END, throwaway, throwaway / "bin" / "python", "-c", FIND, ROOT / "tools"]
    done = subprocess.run([*command, folder / "checkout"], env=environment, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    return done.stdout.rpartition("@found ")[2].strip(), done.stdout


# ---- front ends ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "variables, source",
    [
        ({"VIRTUAL_ENV": "{mine}"}, "VIRTUAL_ENV of process "),
        ({"CONDA_PREFIX": "{mine}"}, "CONDA_PREFIX"),
        ({"PATH": "/usr/bin:{mine}/bin"}, "PATH"),
        ({"FLASH_ATTN_PYTHON": "{mine}/bin/python"}, "FLASH_ATTN_PYTHON"),
    ],
)
def test_the_environment_around_a_front_end_is_found(environments, variables, source):
    mine = environments / "mine"
    variables = {name: value.format(mine=mine) for name, value in variables.items()}
    executable, output = found_by_a_build(environments, **variables)
    assert executable == f"{mine}/bin/python"
    assert f"torch 2.99.0 of {executable} ({source}" in output


def test_nothing_is_found_where_nothing_is_active(environments):
    if list(active_environment.ancestor_environments()):
        pytest.skip("an environment is active around the tests")
    assert found_by_a_build(environments)[0] == "None"


@pytest.mark.parametrize("place", ["mine", "mine/bin", "mine/lib/python{}.{}/site-packages"])
def test_an_interpreter_that_others_can_replace_is_passed_over(environments, place):
    folder = environments / place.format(*sys.version_info[:2])
    folder.chmod(0o777)
    executable, output = found_by_a_build(environments, VIRTUAL_ENV=str(environments / "mine"))
    assert executable != f"{environments}/mine/bin/python"
    assert f"another user owns {folder} or can" in output
    assert "FLASH_ATTN_PYTHON" in output


def test_pip_builds_for_its_own_interpreter(environments, monkeypatch):
    """Its build isolation puts an overlay on PYTHONPATH, and no other environment is looked for."""
    overlay = environments / "pip-build-env-1" / "overlay"
    (overlay / "torch").mkdir(parents=True)
    (overlay / "torch" / "__init__.py").write_text(TORCH.replace("2.99.0", "2.0.0"))
    mine = environments / "mine" / "bin" / "python"
    environment = {"PATH": os.defpath, "PYTHONPATH": str(overlay)}
    command = [mine, "-c", FIND, ROOT / "tools", environments / "checkout"]
    done = subprocess.run(command, env=environment, capture_output=True, text=True)
    assert "torch 2.99.0 of" in done.stdout and done.stdout.endswith(f"@found {mine}\n")


def test_other_processes_are_looked_at_last(monkeypatch):
    """Not at all where this process's own variables name an environment with torch."""
    order = [Candidate("/own/python", "PATH"), Candidate("/checkout/.venv/bin/python", "checkout/.venv")]
    facts = {"torch": "2.99", "python": "{}.{}".format(*sys.version_info[:2]), "hip": None, "cuda": None}
    facts.update(torch_dir="/t", cxx11_abi=1, cudart=None, libstdcxx=None, pybind11_abi={}, site_dirs=[])
    asked, looked = [], []

    def ancestors():
        looked.append(True)
        yield Candidate("/ancestor/python", "VIRTUAL_ENV of process 7, uv")

    monkeypatch.delenv("FLASH_ATTN_PYTHON", raising=False)
    monkeypatch.setattr(target_env, "is_throwaway", lambda prefix: True)
    monkeypatch.setattr(target_env, "own_environments", lambda environment: order[:1])
    monkeypatch.setattr(target_env, "ancestor_environments", ancestors)
    for wanted in (order[0].executable, order[1].executable, "/ancestor/python"):
        asked.clear()
        monkeypatch.setattr(
            target_env,
            "probe",
            lambda python, wanted=wanted: asked.append(python) or (facts if python == wanted else None),
        )
        assert target_env.find_target_torch(Path("/checkout")).executable == wanted
        assert bool(looked) == (wanted == "/ancestor/python")
    assert asked == [sys.executable, "/own/python", "/checkout/.venv/bin/python", "/ancestor/python"]


# ---- processes -------------------------------------------------------------------------------------------------------

USER = os.geteuid()


def fake_process(proc, pid, parent, prefix, users=(USER,) * 4, mode=0o755):
    """A process's folder; its variables name the environment `prefix`."""
    folder = proc / str(pid)
    folder.mkdir(parents=True)
    uid = "\t".join(map(str, users))
    (folder / "status").write_text(f"Name:\tuv\nPid:\t{pid}\nPPid:\t{parent}\nUid:\t{uid}\nGid:\t1\t1\t1\t1\n")
    (folder / "environ").write_text(f"HOME=/\0VIRTUAL_ENV={prefix}\0SECRET=x\0VIRTUAL_ENV_PROMPT=y\0")
    program = folder / "program"
    program.touch()
    program.chmod(mode)
    (folder / "exe").symlink_to(program)


def found_among(proc):
    return [candidate.executable for candidate in active_environment.ancestor_environments(30, proc)]


def test_ancestors_from_the_nearest_on(environments, tmp_path):
    proc, mine = tmp_path / "proc", environments / "mine"
    fake_process(proc, 30, 20, environments / "builds-v0" / "x")
    fake_process(proc, 20, 1, mine)
    fake_process(proc, 1, 0, tmp_path / "absent")
    assert found_among(proc) == [f"{environments}/builds-v0/x/bin/python", f"{mine}/bin/python"]
    assert set(active_environment.read_process(proc / "20").variables) == {"VIRTUAL_ENV"}


@pytest.mark.parametrize(
    "ancestor",
    [
        {"users": (USER + 1,) * 4},
        {"users": (USER + 1, USER, USER, USER)},
        {"users": (USER, USER, USER + 1, USER)},
        {"mode": 0o4755},
        {"mode": 0o2755},
    ],
    ids=["another user", "another caller", "another saved user", "set-user-ID", "set-group-ID"],
)
def test_an_ancestor_of_another_user_ends_the_search(environments, tmp_path, ancestor):
    """Of those above it, too: what it was told decides what they are."""
    proc, mine = tmp_path / "proc", environments / "mine"
    fake_process(proc, 30, 20, tmp_path / "absent")
    fake_process(proc, 20, 10, mine, **ancestor)
    fake_process(proc, 10, 0, mine)
    assert found_among(proc) == []


def test_a_process_that_is_gone_ends_the_search(tmp_path):
    fake_process(tmp_path, 30, 20, tmp_path / "absent")
    assert found_among(tmp_path) == []


# ---- paths -----------------------------------------------------------------------------------------------------------


@pytest.mark.skipif(USER == 0 and os.getegid() != 0, reason="root with another group")
@pytest.mark.parametrize(
    "kind, mode, user, group, trusted",
    [
        (stat.S_IFREG, 0o755, USER, USER, True),
        (stat.S_IFREG, 0o755, 0, 0, True),
        (stat.S_IFREG, 0o755, USER + 1, USER, False),
        (stat.S_IFLNK, 0o777, USER, USER, True),
        (stat.S_IFLNK, 0o777, USER + 1, USER, False),
        (stat.S_IFREG, 0o757, USER, USER, False),
        (stat.S_IFREG, 0o775, USER, USER + 1, False),
        (stat.S_IFDIR, 0o757, USER, USER, False),
        (stat.S_IFDIR, 0o1777, 0, 0, True),
        (stat.S_IFDIR, 0o1777, USER + 1, USER, False),
    ],
)
def test_who_decides_over_a_path(kind, mode, user, group, trusted):
    assert active_environment.is_trusted(os.stat_result((kind | mode, 1, 1, 1, user, group, 0, 0, 0, 0))) == trusted


@pytest.mark.parametrize("group, trusted", [(1000, True), (100, False)])
def test_a_group_of_one_may_write(monkeypatch, group, trusted):
    monkeypatch.setattr(active_environment.os, "geteuid", lambda: 1000)
    monkeypatch.setattr(active_environment.os, "getegid", lambda: group)
    facts = os.stat_result((stat.S_IFDIR | 0o775, 1, 1, 1, 1000, group, 0, 0, 0, 0))
    assert active_environment.is_trusted(facts) == trusted


def test_links_are_followed_through_every_folder(environments):
    """Also through one that others can write to, in which a link to a trusted program stands today."""
    shared = environments / "shared"
    shared.mkdir()
    (shared / "python").symlink_to(sys.executable)
    (environments / "inner").mkdir()
    link = environments / "inner" / "python"
    link.symlink_to("../shared/python")
    assert active_environment.replaceable_part(str(link)) == active_environment.replaceable_part(sys.executable)
    shared.chmod(0o777)
    assert active_environment.replaceable_part(str(link)) == shared


def test_paths_that_lead_nowhere(tmp_path):
    if active_environment.replaceable_part(str(tmp_path)) is not None:
        pytest.skip(f"{tmp_path} is not this user's alone")
    assert active_environment.replaceable_part("bin/python") == Path("bin/python")
    assert active_environment.replaceable_part(f"{tmp_path}/absent") == tmp_path / "absent"
    (tmp_path / "loop").symlink_to("loop")
    assert active_environment.replaceable_part(f"{tmp_path}/loop") == tmp_path / "loop"
