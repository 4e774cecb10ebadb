"""docs/learn.md: the commands of its checkpoints print what it says. In an expected line … stands for any text."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
TEXT = (ROOT / "docs" / "learn.md").read_text(encoding="utf-8")
CHECKPOINTS = re.findall(r"\*\*Checkpoint (\d+)\.\*\*(.*?)(?=\*\*Checkpoint|\n## |\Z)", TEXT, re.DOTALL)
COMMANDS = re.compile(r"```sh\n(.*?)```\n\n```text\n(.*?)```", re.DOTALL)
RUNNABLE = {number: COMMANDS.search(text) for number, text in CHECKPOINTS if COMMANDS.search(text)}


def matches(expected, line):
    pattern = ".*".join(re.escape(part) for part in expected.strip().split("…"))
    return re.fullmatch(pattern, line.strip()) is not None


def missing_lines(expected, output):
    """Expected lines that the output does not have in this order."""
    lines = iter(output.splitlines())
    return [line for line in expected.splitlines() if not any(matches(line, other) for other in lines)]


def test_checkpoints_are_numbered_and_answered():
    assert [int(number) for number, _ in CHECKPOINTS] == list(range(1, len(CHECKPOINTS) + 1))
    for number, text in CHECKPOINTS:
        assert "?" in text and re.search(r"^> ", text, re.MULTILINE), number
        assert number in RUNNABLE or text.strip().startswith("On a GPU:"), number


@pytest.mark.parametrize("number", RUNNABLE)
def test_commands_print_what_the_page_says(number, tmp_path):
    commands, expected = RUNNABLE[number].groups()
    if "g++" in commands and shutil.which("g++") is None:
        pytest.skip("g++ is not installed")
    commands = commands.replace("build/", f"{tmp_path}/")
    programs = tmp_path / "bin"
    programs.mkdir()
    (programs / "python").symlink_to(sys.executable)
    environment = {**os.environ, "PATH": f"{programs}{os.pathsep}{os.environ['PATH']}"}
    ran = subprocess.run(["bash", "-e", "-c", commands], cwd=ROOT, env=environment, capture_output=True, text=True)
    assert ran.returncode == 0, ran.stderr
    assert missing_lines(expected, ran.stdout) == []


def test_what_is_missing_is_found():
    assert missing_lines("a … c\nd\n", "x\n  a b c\nd\n") == []
    assert missing_lines("d\na\n", "a\nd\n") == ["a"]
