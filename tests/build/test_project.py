"""The source distribution."""

import re
import subprocess
import sys
from pathlib import Path

import pytest

import flash_attn

ROOT = Path(__file__).resolve().parents[2]


@pytest.fixture(scope="module")
def sdist_files(tmp_path_factory):
    """What the source distribution of this tree would hold."""
    folder = tmp_path_factory.mktemp("sdist")
    command = [sys.executable, "setup.py", "-q", "egg_info", "--egg-base", str(folder)]
    subprocess.run(command, cwd=ROOT, check=True, capture_output=True, text=True)
    return (folder / "flash_attn.egg-info" / "SOURCES.txt").read_text().splitlines()


def test_the_sdist_has_what_builds_and_tests_it(sdist_files):
    needed = {"setup.py", "pyproject.toml", "Makefile", "LICENSE", "CONTRIBUTING.md", "SECURITY.md", "CITATION.cff"}
    needed |= {"mkdocs.yml", ".ci/run", ".clang-format", ".pre-commit-config.yaml", ".github/workflows/ci.yml"}
    sources = (".py", ".h", ".cu", ".cpp", ".sh", ".md")
    for folder in ("csrc", "tools", "tests", "docs", "benchmarks", "examples", *ROOT.glob("flash_*")):
        paths = (path for path in (ROOT / folder).rglob("*") if path.suffix in sources)
        needed |= {path.relative_to(ROOT).as_posix() for path in paths}
    assert needed - set(sdist_files) == set()


def test_the_sdist_holds_neither_benchmark_results_nor_what_was_built(sdist_files):
    folders = ("benchmarks/results/", "build/", "dist/", ".venv", "third_party/cutlass/")
    built = re.compile(r"__pycache__|\.(pyc|so|o|a)$")
    assert [name for name in sdist_files if name.startswith(folders) or built.search(name)] == []


def test_the_release_has_one_number():
    """Of the sources, the citation and the newest dated section of the changelog."""
    citation = (ROOT / "CITATION.cff").read_text(encoding="utf-8")
    changelog = (ROOT / "CHANGELOG.md").read_text(encoding="utf-8")
    cited = re.search(r"^version: (\S+)\ndate-released: (\S+)$", citation, re.MULTILINE).groups()
    assert cited == re.search(r"^## (\S+) \((\S+)\)$", changelog, re.MULTILINE).groups()
    assert cited[0] == flash_attn.__build__["release"]
