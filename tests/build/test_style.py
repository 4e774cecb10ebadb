"""clang-format, ruff, mypy and the check of documents accept the tree (tools/style.py; pins in pyproject.toml)."""

import os
import sys
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).resolve().parents[2] / "tools"))

import style


@pytest.mark.parametrize("check", ["clang-format", "ruff check", "ruff format", "mypy", "documents"])
def test_style(check):
    command = style.commands(fix=False)[check]
    if style.tool_path(command[0]) is None:
        if os.environ.get("CI") == "true" and (check != "mypy" or sys.version_info >= (3, 10)):
            pytest.fail(f"{command[0]} must be installed in CI")
        pytest.skip(f"{command[0]} is not installed (pip install '.[style]')")
    result = style.run(command)
    assert result.returncode == 0, f"{result.stdout}\nmake style, python benchmarks/report.py --docs rewrite the files"
