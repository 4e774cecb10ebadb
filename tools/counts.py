"""How much of the tree is about itself: lines, words and bytes, with their limits. `python tools/counts.py`.

Lines of Python, C++, CUDA and shell; documents count by lines too. Tests of the product, of its installs and of its
builds count as product.
"""

from __future__ import annotations

import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
CODE = (".py", ".h", ".cpp", ".cu", ".cuh", ".sh")
LAB = ROOT / "benchmarks" / "lab"


def files(folder, suffixes=CODE, without=()):
    """The files below a folder of the tree, but for those below the folders `without`."""
    found = (path for path in (ROOT / folder).rglob("*") if path.is_file() and path.suffix in suffixes)
    return [path for path in found if "__pycache__" not in path.parts and not set(path.parents) & set(without)]


def lines(paths, parts=str.splitlines):
    return sum(len(parts(path.read_text(encoding="utf-8"))) for path in paths)


def counts():
    """[(what, count, limit or None)]"""
    documents = files("docs", (".md",))
    words = [lines([path], str.split) for path in documents]
    benchmarks, laboratory = lines(files("benchmarks", without=[LAB])), lines(files(LAB, without=[LAB / "tests"]))
    tools, pages = lines(files("tools")), lines(documents)
    tests = [*files("tests/benchmarks"), *files("tests/examples"), *files(LAB / "tests")]
    tests = lines([*tests, ROOT / "tests" / "build" / "test_site.py"])
    results = files("benchmarks/results", (".json", ".png"))
    return [
        ("lines of benchmarks", benchmarks, 4000),
        ("lines of the laboratory", laboratory, 4500),
        ("lines of tools", tools, None),
        ("lines of documents", pages, None),
        ("lines of tests of these", tests, None),
        ("lines about itself", benchmarks + laboratory + tools + pages + tests, 16000),
        ("words of documents", sum(words), 60000),
        ("words of the longest document", max(words), None),
        ("bytes of results", sum(path.stat().st_size for path in results), 10**6),
        ("lines of csrc", lines(files("csrc")), None),
        ("lines of the package", lines(files("flash_attn")), None),
    ]


def main():
    over = False
    for what, count, limit in counts():
        over |= limit is not None and count > limit
        print(f"{count:>8} {what}" + (f", at most {limit}" if limit else ""))
    return 1 if over else 0


if __name__ == "__main__":
    sys.exit(main())
