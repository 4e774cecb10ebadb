"""Checks the documents: links, names in code spans, generated blocks. `python tools/check_docs.py`.

- A relative link leads to a file, and to a heading where it states one; ../../actions leads to pages of the host.
- A code span that looks like a path is one of the tree, counted from the document, the root, csrc/flash_attn, its
  kernels or flash_attn; a bare file name is that of some file. What a build makes (build/...) is not checked.
- A code span `name()` is something that the sources define or call; `Type::member` and any single identifier with an
  underscore or a capital letter occur in the sources.
- The blocks between `<!-- NAME:begin -->` and `<!-- NAME:end -->` are what benchmarks/report.py writes.
- Sources name documents that exist.
"""

from __future__ import annotations

import re
import subprocess
import sys
from functools import cache
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
DOCUMENTS = ("README.md", "CONTRIBUTING.md", "SECURITY.md", "docs/**/*.md", "examples/**/*.md", "benchmarks/**/*.md")
BASES = ("", "csrc/flash_attn", "csrc/flash_attn/kernels", "flash_attn")
FOLDERS = ("csrc", "flash_attn", "flash_attn_3", "flash_mla", "tests", "benchmarks", "examples", "tools", ".ci")
FILES = ("setup.py", "pyproject.toml", "Makefile")
SUFFIXES = (".py", ".h", ".cpp", ".cu", ".sh", ".md", ".toml", ".ninja")
OTHERS = ("torch", "numpy", "F", "triton")  # packages whose names are not looked up
# Files of CUDA, a place for a checkout, and what an install leaves.
EXTERNAL = {
    "cuda_runtime_api.h", "crt/host_defines.h", "third_party/cutlass", "flash_attn_2_cuda.py",
    "flash_attn/_build_info.json",
}  # fmt: skip
FENCE = re.compile(r"^```.*?^```", re.MULTILINE | re.DOTALL)
NAME = r"[A-Za-z_]\w*(?:(?:::|\.)[A-Za-z_]\w*)*"


@cache
def tree():
    """The files of the sources."""
    found = [path for folder in FOLDERS for path in (ROOT / folder).rglob("*") if "__pycache__" not in path.parts]
    return [path for path in [*found, *(ROOT / name for name in FILES)] if path.is_file()]


@cache
def sources():
    """The text of all code but this file's."""
    suffixes = (".py", ".h", ".cpp", ".cu", ".sh", ".toml", ".json", "")
    paths = (path for path in tree() if path.suffix in suffixes and path != Path(__file__).resolve())
    return "\n".join(path.read_text(encoding="utf-8", errors="replace") for path in paths)


def documents():
    return sorted({path for pattern in DOCUMENTS for path in ROOT.glob(pattern)})


def is_path(word):
    return re.fullmatch(r"[\w./-]+", word) is not None and (
        word.endswith(SUFFIXES) or ("/" in word and (ROOT / word.split("/")[0]).is_dir())
    )


def exists(word, document):
    if word.startswith(("build/", ".venv", "build.ninja", "benchmarks/results")) or word in EXTERNAL:
        return True
    if "/" not in word and any(path.name == word for path in tree()):
        return True
    return any((base / word).exists() for base in [document.parent, *(ROOT / base for base in BASES)])


@cache
def words():
    """The identifiers that occur in the sources."""
    return set(re.findall(r"[A-Za-z_]\w*", sources()))


def missing_names(name, called=False):
    """The parts of `name` (dotted or with ::) that the sources do not have."""
    parts = re.split(r"::|\.", name)
    looked_up = called or len(parts) > 1 or re.search(r"[_A-Z]", name[1:] + name[0])
    if parts[0] in OTHERS or not looked_up:
        return []
    return [part for part in parts if part not in words()]


def span_problems(span, document):
    """What a code span names and the tree does not have; `a_{b,c}` is two names."""
    alternatives = re.fullmatch(r"(.*)\{([\w,]+)\}(.*)", span)
    if alternatives:
        before, names, after = alternatives.groups()
        return [problem for name in names.split(",") for problem in span_problems(before + name + after, document)]
    paths = [word for word in span.split() if is_path(word)]
    if paths:
        return [word for word in paths if not exists(word, document)]
    call = re.fullmatch(rf"({NAME})\(.*\)", span)
    name = call or re.fullmatch(rf"({NAME})(?:<.*>|=\S+)?", span)
    return missing_names(name[1], called=bool(call)) if name else []


@cache
def anchors(path):
    """The fragments by which a document's headings are linked."""
    headings = re.findall(r"^#+ (.*)$", path.read_text(encoding="utf-8"), re.MULTILINE)
    return {re.sub(r"[^\w\- ]", "", heading.strip().lower()).replace(" ", "-") for heading in headings}


def broken_links(text, document):
    found = []
    for target in re.findall(r"\[[^\]]*\]\(([^)\s]+)\)", FENCE.sub("", text)):
        place, _, fragment = target.partition("#")
        path = document.parent / place if place else document
        if re.match(r"[a-z]+:|\.\./\.\./actions/", target) or ("benchmarks/results" in target and not has_results()):
            continue
        if not path.exists() or (fragment and fragment not in anchors(path)):
            found.append(target)
    return found


def has_results():
    """A source distribution has none."""
    return (ROOT / "benchmarks" / "results").is_dir()


def problems(text, document):
    """What is wrong with a document's text."""
    spans = re.findall(r"`([^`\n]+)`", FENCE.sub("", text))
    names = [problem for span in spans for problem in span_problems(span.strip(), document)]
    return [f"no such name: {name}" for name in names] + [f"broken link: {x}" for x in broken_links(text, document)]


def stale_blocks():
    """What benchmarks/report.py says of the generated blocks."""
    if not has_results():
        return []
    command = [sys.executable, str(ROOT / "benchmarks" / "report.py"), "--docs", "--check"]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    return (done.stdout + done.stderr).splitlines() if done.returncode else []


def main():
    found = []
    for document in documents():
        text = document.read_text(encoding="utf-8")
        found += [f"{document.relative_to(ROOT)}: {problem}" for problem in problems(text, document)]
    named = sorted(name for name in set(re.findall(r"\bdocs/[\w/]+\.md\b", sources())) if not (ROOT / name).is_file())
    found += [f"the sources name {name}, which does not exist" for name in named]
    found += stale_blocks()
    print("\n".join(found) or "documents: ok")
    return 1 if found else 0


if __name__ == "__main__":
    sys.exit(main())
