"""The documents as a site (mkdocs.yml): it builds strictly, and each public name has a place in the reference."""

import importlib
import re
import subprocess
import sys
from pathlib import Path

import flash_attn_3_harness  # noqa: F401  # has flash_attn_interface
import pytest

ROOT = Path(__file__).resolve().parents[2]
sys.path.insert(0, str(ROOT / "flash_mla"))
INTERNAL = ("flash_attn.cpu",)  # lists what the CUDA extension has too


def public_names():
    for path in (ROOT / "flash_attn").rglob("*.py"):
        module = ".".join(path.relative_to(ROOT).with_suffix("").parts).removesuffix(".__init__")
        if re.search(r"^__all__ =", path.read_text(encoding="utf-8"), re.MULTILINE) and module not in INTERNAL:
            yield from (f"{module}.{name}" for name in importlib.import_module(module).__all__)
    for module in ("flash_attn_interface", "flash_mla"):
        yield from (f"{module}.{name}" for name in importlib.import_module(module).__all__)


def test_the_site_builds_and_has_every_public_name(tmp_path):
    pytest.importorskip("mkdocs")
    if not (ROOT / "benchmarks" / "results").is_dir():
        pytest.skip("a source distribution has no plots")
    command = [sys.executable, "-m", "mkdocs", "build", "--strict", "--site-dir", str(tmp_path)]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    pages = "".join(page.read_text(encoding="utf-8") for page in (tmp_path / "api").rglob("*.html"))
    names = set(public_names())
    assert len(names) > 60
    assert {name for name in names if f'id="{name}"' not in pages} == set()
    assert re.search(r"&lt;\w+&gt;", pages) is None  # a section of a docstring that was not filled
