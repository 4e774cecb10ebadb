"""The source distribution, continuous integration, pins of the style."""

import re
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
sys.path.insert(0, str(ROOT / "tools"))

from kernel_manifest import SUPPORTED_ARCHS, parse_archs


def text_of(name):
    return (ROOT / name).read_text(encoding="utf-8")


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


def test_pre_commit_has_the_pins_of_the_extra():
    extra = re.search(r"^style = \[(.*)\]$", text_of("pyproject.toml"), re.MULTILINE)[1]
    hook = re.search(r"^ +additional_dependencies: \[(.*)\]$", text_of(".pre-commit-config.yaml"), re.MULTILINE)[1]
    pins = re.findall(r'"(.*?)"', extra)
    assert all(re.fullmatch(r"[\w-]+==[\d.]+(; python_version >= '3.10')?", pin) for pin in pins)
    assert re.findall(r'"(.*?)"', hook) == [pin for pin in pins if not pin.startswith("mypy")]  # which needs torch


def test_continuous_integration_compiles_for_every_supported_architecture():
    lists = re.findall(r'(?:FLASH_ATTN_CUDA_ARCHS="|--archs )([\d;,]+)', text_of(".ci/run"))
    assert {arch for archs in lists for arch in parse_archs(archs)} == set(SUPPORTED_ARCHS)
