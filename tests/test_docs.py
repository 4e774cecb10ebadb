"""What the documents name exists: files, functions, types, macros, knobs, links.

The convention, for docs/*.md, README.md, CONTRIBUTING.md, SECURITY.md and examples/**/README.md:
- a code span or a word of it that looks like a path (it has a slash or a source file's suffix) is a path of the tree,
  counted from the document, the root, csrc/flash_attn, csrc/flash_attn/src or flash_attn; a bare file name is that of
  some file of the tree. What a build makes stands under build/ and is not checked;
- `a_{b,c}` stands for two names or paths;
- `name()` is something that the sources define or call by this name, `Type::member` two names;
- any other code span that is one identifier with an underscore or a capital letter occurs in the sources as a word;
- in unlabelled code blocks the same holds for name() and for words with a slash and a source file's suffix;
- relative links lead to files, and to headings where they state one.
Names of other packages (OTHER_PACKAGES) and files of CUDA (EXTERNAL) are not checked.
"""

from __future__ import annotations

import re
from functools import cache
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parent.parent
ROOT_DOCUMENTS = [ROOT / name for name in ("README.md", "CONTRIBUTING.md", "SECURITY.md")]
DOCUMENTS = sorted([*(ROOT / "docs").glob("*.md"), *ROOT_DOCUMENTS, *(ROOT / "examples").rglob("README.md")])
BASES = ("", "csrc/flash_attn", "csrc/flash_attn/src", "flash_attn")
SOURCE_FOLDERS = ("csrc", "flash_attn", "tests", "benchmarks", "examples", "tools", ".ci")
SOURCE_FILES = ("setup.py", "pyproject.toml", "Makefile")
SUFFIXES = (".py", ".h", ".cpp", ".cu", ".sh", ".md", ".toml", ".ninja")
GENERATED = ("build/", ".venv", "build.ninja")
OTHER_PACKAGES = ("torch", "numpy", "F", "triton")
EXTERNAL = {"cuda_runtime_api.h", "crt/host_defines.h", "third_party/cutlass"}  # of CUDA, and a place for a checkout

CODE_SPAN = re.compile(r"`([^`\n]+)`")
FENCE = re.compile(r"^```([^\n]*)\n(.*?)^```", re.MULTILINE | re.DOTALL)
IDENTIFIER = re.compile(r"[A-Za-z_]\w*(?:(?:::|\.)[A-Za-z_]\w*)*")
CALL = re.compile(r"([A-Za-z_][\w:.]*)\(\)")
LINK = re.compile(r"\[[^\]]*\]\(([^)\s]+)\)")


@cache
def tree():
    """Paths of the sources, relative to the root."""
    found = [ROOT / name for name in SOURCE_FILES]
    for folder in SOURCE_FOLDERS:
        found += [path for path in (ROOT / folder).rglob("*") if path.is_file() and "__pycache__" not in path.parts]
    return [path.relative_to(ROOT) for path in found]


@cache
def sources():
    """The text of all code, without this file."""
    suffixes = (".py", ".h", ".cpp", ".cu", ".sh", ".toml", ".json", "")
    paths = [ROOT / path for path in tree() if path.suffix in suffixes and path.name != Path(__file__).name]
    return "\n".join(path.read_text(encoding="utf-8", errors="replace") for path in paths)


def is_path(word):
    return re.fullmatch(r"[\w./-]+", word) is not None and (
        word.endswith(SUFFIXES) or ("/" in word and (ROOT / word.split("/")[0]).is_dir())
    )


@cache
def has_results():
    """A source distribution has no results of benchmarks."""
    return (ROOT / "benchmarks" / "results").is_dir()


def path_exists(word, document):
    if word.startswith("benchmarks/results") and not has_results():
        return True
    if word.startswith(GENERATED) or word in EXTERNAL:
        return True
    if "/" not in word and any(path.name == word for path in tree()):
        return True
    return any((base / word).exists() for base in [document.parent, *(ROOT / base for base in BASES)])


def occurs(name):
    return re.search(rf"\b{re.escape(name)}\b", sources()) is not None


def is_called(name):
    return re.search(rf"\b{re.escape(name)}\s*(\(|<|= \[)|(class|struct) {re.escape(name)}\b", sources()) is not None


def missing_names(name, called):
    """The parts of `name` (dotted or with ::) that the sources do not have; the last one is called."""
    parts = re.split(r"::|\.", name)
    if parts[0] in OTHER_PACKAGES:
        return []
    checked = parts if called or len(parts) > 1 or re.search(r"[_A-Z]", name[1:] + name[0]) else []
    return [part for part in checked if not (is_called(part) if called and part == parts[-1] else occurs(part))]


def span_problems(span, document):
    """What a code span names and the tree does not have."""
    alternatives = re.fullmatch(r"(.*)\{([\w,]+)\}(.*)", span)
    if alternatives:
        before, names, after = alternatives.groups()
        return [problem for name in names.split(",") for problem in span_problems(before + name + after, document)]
    words = [word for word in span.split() if is_path(word)]
    if words:
        return [word for word in words if not path_exists(word, document)]
    call = re.fullmatch(rf"({IDENTIFIER.pattern})\(.*\)", span)
    if call:
        return missing_names(call[1], called=True)
    name = re.fullmatch(rf"({IDENTIFIER.pattern})(<.*>|=\S+)?", span)
    return missing_names(name[1], called=False) if name else []


def block_problems(block, document):
    words = [word.strip("`,;:()[]") for word in block.split()]
    paths = [word for word in words if "/" in word and word.endswith(SUFFIXES) and re.fullmatch(r"[\w./-]+", word)]
    missing = [word for word in paths if not path_exists(word, document)]
    for name in CALL.findall(block):
        missing += missing_names(name, called=True)
    return missing


def problems(text, document):
    found = []
    for label, block in FENCE.findall(text):
        if not label.strip():
            found += block_problems(block, document)
    for span in CODE_SPAN.findall(FENCE.sub("", text)):
        found += span_problems(span.strip(), document)
    return found


def anchor(heading):
    """The fragment by which a heading is linked."""
    return re.sub(r"[^\w\- ]", "", heading.strip().lower()).replace(" ", "-")


def broken_links(text, document):
    found = []
    for target in LINK.findall(FENCE.sub("", text)):
        if re.match(r"[a-z]+:", target):
            continue
        place, _, fragment = target.partition("#")
        path = document.parent / place if place else document
        is_document = path.is_file() and path.suffix == ".md"
        headings = re.findall(r"^#+ (.*)$", path.read_text(encoding="utf-8"), re.MULTILINE) if is_document else []
        if "benchmarks/results" in target and not has_results():
            continue
        if not path.exists() or (fragment and fragment not in map(anchor, headings)):
            found.append(target)
    return found


@pytest.mark.parametrize("document", DOCUMENTS, ids=lambda path: path.relative_to(ROOT).as_posix())
def test_documents_name_what_exists(document):
    text = document.read_text(encoding="utf-8")
    assert problems(text, document) == []
    assert broken_links(text, document) == []


@pytest.mark.parametrize(
    "text, missing",
    [
        ("`docs/nowhere.md` and `README.md`", ["docs/nowhere.md"]),
        ("`python tools/no_tool.py --fix`", ["tools/no_tool.py"]),
        ("`plan/tiles.h`, `src/flash.h`, `fwd_mainloop.h`, `build/anything.py`", []),
        ("`no_such_function()`, `flash_attn_func(q, k, v)`, `torch.compile()`", ["no_such_function"]),
        ("`tests/{cases,no_cases}.py`, `flash_attn_{func,funk}`", ["tests/no_cases.py", "flash_attn_funk"]),
        ("`Window::middle_side`, `Window::left`", ["middle_side"]),
        ("`NO_SUCH_KNOB=1`, `MAX_JOBS`, `FwdTail`, `FwdTile`, `q`, `causal=True`", ["NO_SUCH_KNOB", "FwdTail"]),
        ("```\nrun_nothing() in src/sm80/nothing.h\n```", ["src/sm80/nothing.h", "run_nothing"]),
    ],
)
def test_the_convention_is_enforced(text, missing):
    assert problems(text, ROOT / "README.md") == missing


def test_broken_links_are_found():
    text = "[a](docs/design.md) [b](docs/design.md#layers) [c](docs/design.md#nothing) [d](gone.md) [e](https://x.org)"
    assert broken_links(text, ROOT / "README.md") == ["docs/design.md#nothing", "gone.md"]


def test_documents_are_found():
    assert {path.name for path in DOCUMENTS} >= {"how_it_works.md", "design.md", "tuning.md", "README.md"}
