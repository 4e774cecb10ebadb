"""What stands around the code: the source distribution, continuous integration, templates, pins, citation."""

import os
import re
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest

from flash_attn._build import RELEASE

ROOT = Path(__file__).resolve().parents[2]
sys.path.insert(0, str(ROOT / "tools"))

from kernel_manifest import SUPPORTED_ARCHS, parse_archs

TEMPLATES = ("ISSUE_TEMPLATE/bug.yml", "ISSUE_TEMPLATE/performance.yml", "pull_request_template.md")


def text_of(name):
    return (ROOT / name).read_text(encoding="utf-8")


def loaded(name):
    return pytest.importorskip("yaml").safe_load(text_of(name))


@pytest.fixture(scope="module")
def sdist_files(tmp_path_factory):
    """What the source distribution of this tree would hold."""
    folder = tmp_path_factory.mktemp("sdist")
    command = [sys.executable, "setup.py", "-q", "egg_info", "--egg-base", str(folder)]
    subprocess.run(command, cwd=ROOT, check=True, capture_output=True, text=True)
    return (folder / "flash_attn.egg-info" / "SOURCES.txt").read_text().splitlines()


def test_the_sdist_has_what_builds_and_tests_it(sdist_files):
    needed = {"setup.py", "pyproject.toml", "Makefile", "LICENSE", "CONTRIBUTING.md", "SECURITY.md", "CITATION.cff"}
    needed |= {".ci/run", ".clang-format", ".pre-commit-config.yaml", ".github/workflows/ci.yml"}
    sources = (".py", ".h", ".cu", ".cpp", ".sh", ".md")
    for folder in ("csrc", "tools", "tests", "docs", "benchmarks", "examples", "flash_attn", "flash_attn_3"):
        paths = (path for path in (ROOT / folder).rglob("*") if path.suffix in sources)
        needed |= {path.relative_to(ROOT).as_posix() for path in paths}
    assert needed - set(sdist_files) == set()


def test_the_sdist_holds_neither_benchmark_results_nor_what_was_built(sdist_files):
    folders = ("benchmarks/results/", "build/", "dist/", ".venv", "third_party/cutlass/")
    built = re.compile(r"__pycache__|\.(pyc|so|o|a)$")
    assert [name for name in sdist_files if name.startswith(folders) or built.search(name)] == []


def test_pre_commit_runs_the_check_of_the_suite_with_its_pins():
    pins = re.search(r"^style = (\[.*\])$", text_of("pyproject.toml"), re.MULTILINE)[1]
    text = text_of(".pre-commit-config.yaml")
    assert re.search(r"^ +additional_dependencies: (\[.*\])$", text, re.MULTILINE)[1] == pins
    assert all(re.fullmatch(r"[\w-]+==[\d.]+", pin) for pin in re.findall(r'"(.*?)"', pins))
    (hook,) = loaded(".pre-commit-config.yaml")["repos"][0]["hooks"]
    assert hook["entry"] == "python tools/style.py --fix" and hook["pass_filenames"] is False


def test_the_workflow_calls_the_script_and_nothing_else():
    workflow = loaded(".github/workflows/ci.yml")
    assert workflow["concurrency"]["group"] and workflow["permissions"] == {"contents": "read"}
    (job,) = workflow["jobs"].values()
    assert [step["run"] for step in job["steps"] if "run" in step] == [".ci/run"]
    assert os.access(ROOT / ".ci" / "run", os.X_OK)


def test_continuous_integration_compiles_for_every_supported_architecture():
    lists = re.findall(r'(?:FLASH_ATTN_CUDA_ARCHS="|--archs )([\d;,]+)', text_of(".ci/run"))
    assert {arch for archs in lists for arch in parse_archs(archs)} == set(SUPPORTED_ARCHS)


@pytest.mark.parametrize("name", TEMPLATES)
def test_templates_ask_what_the_package_says_of_itself(name):
    assert "`python -m flash_attn`" in text_of(f".github/{name}")


@pytest.mark.parametrize("path", sorted((ROOT / ".github" / "ISSUE_TEMPLATE").glob("[!c]*.yml")), ids=lambda p: p.name)
def test_issue_forms_are_valid(path):
    form = loaded(path.relative_to(ROOT))
    assert form["name"] and form["description"]
    ids = [field["id"] for field in form["body"]]
    assert len(ids) == len(set(ids)) and all(field["attributes"]["label"] for field in form["body"])


def test_the_citation_is_of_this_release():
    citation = loaded("CITATION.cff")
    assert citation["cff-version"] == "1.2.0" and citation["version"] == RELEASE
    assert citation["license"] == "BSD-3-Clause" and citation["authors"]
    assert all(entry["title"] and entry["authors"] for entry in citation["references"])


# ---- make test ----


def make_test_options():
    recipe = re.search(r"^test: env\n\t\$\(ENV_PYTHON\) -m pytest (.*)$", text_of("Makefile"), re.MULTILINE)[1]
    return recipe.replace("$(PYTEST_ARGS)", "").split()


def test_make_test_runs_without_parallel_tests():
    command = [sys.executable, "-m", "pytest", *make_test_options(), "-p", "no:xdist", "-p", "no:cacheprovider"]
    command[command.index("tests")] = "tests/build/test_sizes.py"
    result = subprocess.run([*command, "--collect-only"], cwd=ROOT, capture_output=True, text=True, timeout=300)
    assert result.returncode == 0, result.stdout + result.stderr


@pytest.mark.parametrize(
    "chosen, gpu_gib, expected",
    [("all", None, 8), ("cpu", 24, 8), ("all", 80, 8), ("all", 24, 3), ("cuda", 4, 1)],
)
def test_processes_of_tests_share_the_memory_of_a_gpu(monkeypatch, chosen, gpu_gib, expected):
    import conftest

    gpu = SimpleNamespace(total_memory=(gpu_gib or 0) << 30)
    monkeypatch.setattr(conftest.torch.cuda, "is_available", lambda: gpu_gib is not None)
    monkeypatch.setattr(conftest.torch.cuda, "get_device_properties", lambda device: gpu)
    monkeypatch.setattr(conftest.os, "sched_getaffinity", lambda process: range(16))
    config = SimpleNamespace(getoption={"--device": chosen}.get)
    assert conftest.pytest_xdist_auto_num_workers(config) == expected
