"""Limits of the length of files and of device functions."""

import re
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
MOST_LINES_OF_A_FILE = {"csrc": 450, "flash_attn": 600}  # of Python an argument takes a line
# The public functions, their docstrings and their autograd functions are one file, as in FlashAttention-2.
MOST_LINES_OF_THE_INTERFACE = 900
MOST_LINES_OF_A_DEVICE_FUNCTION = 60
SOURCES = sorted(p for p in (ROOT / "csrc").rglob("*") if p.suffix in (".h", ".cpp", ".cu"))
PACKAGE = sorted((ROOT / "flash_attn").rglob("*.py"))
QUALIFIER = re.compile(r"\b(__device__|__global__|FLASH_HOST_DEVICE)\b")


def body_end(lines, first):
    """The line that closes the body of the function whose declaration begins on line `first`; None without a body."""
    braces = parentheses = 0
    for number in range(first, len(lines)):
        for character in lines[number].split("//")[0]:
            if character in "()":
                parentheses += 1 if character == "(" else -1
            elif parentheses == 0 and character in "{}":
                braces += 1 if character == "{" else -1
                if braces == 0:
                    return number
            elif parentheses == 0 and braces == 0 and character == ";":
                return None
    return None


def device_functions(text):
    """(first line, count of lines) of every function that runs on a GPU."""
    lines = text.split("\n")
    number = 0
    while number < len(lines):
        end = None
        if QUALIFIER.search(lines[number]) and not lines[number].lstrip().startswith(("//", "#")):
            end = body_end(lines, number)
            if end is not None:
                yield number + 1, end - number + 1
        number = (end if end is not None else number) + 1


@pytest.mark.parametrize("folder, files", [("csrc", SOURCES), ("flash_attn", PACKAGE)])
def test_files_are_short(folder, files):
    assert files
    lengths = {p.relative_to(ROOT).as_posix(): len(p.read_text(encoding="utf-8").splitlines()) for p in files}
    assert lengths.pop("flash_attn/flash_attn_interface.py", 0) <= MOST_LINES_OF_THE_INTERFACE
    assert {name: count for name, count in lengths.items() if count > MOST_LINES_OF_A_FILE[folder]} == {}


def test_device_functions_are_short():
    found = [
        (f"{path.relative_to(ROOT).as_posix()}:{line}", count)
        for path in SOURCES
        for line, count in device_functions(path.read_text(encoding="utf-8"))
    ]
    assert len(found) > 300
    assert [item for item in found if item[1] > MOST_LINES_OF_A_DEVICE_FUNCTION] == []
