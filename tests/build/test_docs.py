"""What the documents name exists: files, functions, types, macros, knobs, links.

The convention, for docs/**/*.md, README.md, CONTRIBUTING.md, SECURITY.md and examples/**/README.md:
- a code span or a word of it that looks like a path (it has a slash or a source file's suffix) is a path of the tree,
  counted from the document, the root, csrc/flash_attn, csrc/flash_attn/kernels or flash_attn; a bare file name is
  that of some file of the tree. What a build makes stands under build/ and is not checked;
- `a_{b,c}` stands for two names or paths;
- `name()` is something that the sources define or call by this name, `Type::member` two names;
- any other code span that is one identifier with an underscore or a capital letter occurs in the sources as a word;
- in unlabelled code blocks the same holds for name() and for words with a slash and a source file's suffix;
- relative links lead to files, and to headings or `<a id="...">` where they state one.
docs/tuning/log is closed and keeps the names of its commits: of it only the links are checked.
Names of other packages (OTHER_PACKAGES) and files of CUDA (EXTERNAL) are not checked.
test_docs_facts.py checks the tables that count.
"""

from __future__ import annotations

import re
from functools import cache
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
ROOT_DOCUMENTS = [ROOT / name for name in ("README.md", "CONTRIBUTING.md", "SECURITY.md")]
DOCUMENTS = sorted([*(ROOT / "docs").rglob("*.md"), *ROOT_DOCUMENTS, *(ROOT / "examples").rglob("README.md")])
TUNING = ROOT / "docs" / "tuning"
LOG = TUNING / "log"
TABLES = ("fwd_sm90", "bwd_sm90", "fwd_sm80", "bwd_sm80", "decode", "context_parallel", "triton")
PAGES = (
    "how_it_works", "hopper", "design", "semantics", "build", "glossary", "integrations", "theory", "learn",
    "retrospective",
)  # fmt: skip
COLUMNS = ["version", "change", "predicted", "measured, worst", "verdict", "commit, GPU"]
BASES = ("", "csrc/flash_attn", "csrc/flash_attn/kernels", "flash_attn")
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
PLACE = re.compile(r'<a id="([^"]+)"></a>')
GENERATED_BLOCK = re.compile(r"<!-- (\w+):begin -->.*?<!-- \1:end -->", re.DOTALL)


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


def anchors(path):
    """The fragments by which places of a document are linked."""
    text = path.read_text(encoding="utf-8")
    return [*map(anchor, re.findall(r"^#+ (.*)$", text, re.MULTILINE)), *PLACE.findall(text)]


def broken_links(text, document):
    found = []
    for target in LINK.findall(FENCE.sub("", text)):
        if re.match(r"[a-z]+:", target):
            continue
        place, _, fragment = target.partition("#")
        path = document.parent / place if place else document
        is_document = path.is_file() and path.suffix == ".md"
        if "benchmarks/results" in target and not has_results():
            continue
        if not path.exists() or (fragment and fragment not in (anchors(path) if is_document else [])):
            found.append(target)
    return found


@pytest.mark.parametrize("document", DOCUMENTS, ids=lambda path: path.relative_to(ROOT).as_posix())
def test_documents_name_what_exists(document):
    text = document.read_text(encoding="utf-8")
    assert broken_links(text, document) == []
    if document.parent != LOG:
        assert problems(text, document) == []


@pytest.mark.parametrize(
    "text, missing",
    [
        ("`docs/nowhere.md` and `README.md`", ["docs/nowhere.md"]),
        ("`python tools/no_tool.py --fix`", ["tools/no_tool.py"]),
        ("`plan/tiles.h`, `params/flash.h`, `fwd_mainloop.h`, `build/anything.py`", []),
        ("`no_such_function()`, `flash_attn_func(q, k, v)`, `torch.compile()`", ["no_such_function"]),
        ("`tests/{cases,no_cases}.py`, `flash_attn_{func,funk}`", ["tests/no_cases.py", "flash_attn_funk"]),
        ("`Window::middle_side`, `Window::left`", ["middle_side"]),
        ("`NO_SUCH_KNOB=1`, `MAX_JOBS`, `FwdTail`, `FwdTile`, `q`, `causal=True`", ["NO_SUCH_KNOB", "FwdTail"]),
        ("```\nrun_nothing() in kernels/sm80/nothing.h\n```", ["kernels/sm80/nothing.h", "run_nothing"]),
    ],
)
def test_the_convention_is_enforced(text, missing):
    assert problems(text, ROOT / "README.md") == missing


def test_broken_links_are_found():
    text = "[a](docs/design.md) [b](docs/design.md#layers) [c](docs/design.md#nothing) [d](gone.md) [e](https://x.org)"
    assert broken_links(text, ROOT / "README.md") == ["docs/design.md#nothing", "gone.md"]


def test_sources_name_documents_that_exist():
    named = set(re.findall(r"\bdocs/[\w/]+\.md\b", sources()))
    assert named and [name for name in named if not (ROOT / name).is_file()] == []


def test_documents_are_found():
    paths = {path.relative_to(ROOT).as_posix() for path in DOCUMENTS}
    assert paths >= {"docs/how_it_works.md", "docs/design.md", "docs/tuning/findings.md", "README.md"}
    assert paths >= {f"docs/tuning/{name}.md" for name in TABLES}


def cells(line):
    return [cell.strip() for cell in re.split(r"(?<!\\)\|", line)[1:-1]]


def prose(text):
    """The lines of a document that are neither of a table nor of a code block."""
    return [line for line in FENCE.sub("", text).splitlines() if not line.startswith("|")]


@pytest.mark.parametrize("name", TABLES)
def test_tuning_tables_have_their_columns(name):
    text = GENERATED_BLOCK.sub("", (TUNING / f"{name}.md").read_text(encoding="utf-8"))
    head, rule, *rows = [line for line in text.splitlines() if line.startswith("|")]
    assert cells(head) == COLUMNS and set(rule) <= set("|-")
    assert rows
    for row in map(cells, rows):
        assert len(row) == len(COLUMNS) and all(row), row
        assert LINK.search(row[0]), f"no link to where it is told: {row[0]}"
    versions = [cells(row)[0] for row in rows]
    assert len(set(versions)) == len(versions)


def findings():
    """The rules of findings.md: {their number: their text}."""
    text = (TUNING / "findings.md").read_text(encoding="utf-8")
    parts = re.split(r"^(\d+)\. ", text, flags=re.MULTILINE)[1:]
    return {int(number): rule.split("\n\n")[0] for number, rule in zip(parts[::2], parts[1::2], strict=True)}


def test_findings_are_short():
    text = (TUNING / "findings.md").read_text(encoding="utf-8")
    assert len(text.splitlines()) <= 150
    assert list(findings()) == list(range(1, len(findings()) + 1))
    assert len(findings()) >= 20


def test_each_finding_has_a_figure_and_a_link():
    for number, rule in findings().items():
        targets = LINK.findall(rule)
        assert targets and all("#" in target for target in targets), f"finding {number} links to no place"
        assert re.search(r"\d → \d|\d\.\d{2}", LINK.sub("", rule)), f"finding {number} has no figure"


@pytest.mark.parametrize(
    "name",
    ["README.md", "examples/minimal/README.md", *(f"docs/{name}.md" for name in PAGES)]
    + [f"docs/tuning/{name}.md" for name in ("README", "findings", *TABLES, "log/README")],
)
def test_lines_of_prose_are_short(name):
    text = GENERATED_BLOCK.sub("", (ROOT / name).read_text(encoding="utf-8"))
    assert [line for line in prose(text) if len(line) > 120] == []


@pytest.mark.parametrize("path", sorted(LOG.glob("*.md")), ids=lambda path: path.name)
def test_the_log_says_that_it_is_closed(path):
    text = path.read_text(encoding="utf-8")
    assert re.search(r"^Closed.*\b[0-9a-f]{7}\b", text, re.MULTILINE)
    places = PLACE.findall(text)
    assert len(set(places)) == len(places)


def test_each_entry_of_the_log_has_a_row():
    tables = "".join((TUNING / f"{name}.md").read_text(encoding="utf-8") for name in TABLES)
    linked = set(LINK.findall(tables))
    entries = {f"log/{path.name}#{place}" for path in LOG.glob("*.md") for place in PLACE.findall(path.read_text())}
    assert entries and entries <= linked


def test_sources_cite_measurements_that_exist():
    """Comments and policy rows name places of the tuning documents."""
    cited = re.compile(r'(?:docs/tuning/|")((?:log/)?\w+\.md)#([\w-]+)')
    places = {
        (path.name, document, fragment)
        for path in (ROOT / "csrc").rglob("*.h")
        for document, fragment in cited.findall(path.read_text(encoding="utf-8"))
    }
    assert {name for name, _, _ in places} >= {"fwd_policy_sm90.h", "fwd_config.h"}
    assert sorted(p for p in places if p[2] not in anchors(TUNING / p[1])) == []
