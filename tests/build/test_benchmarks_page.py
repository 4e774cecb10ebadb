"""The published figures: docs/benchmarks.md and the README's blocks are what the report program writes."""

import re
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
sys.path.append(str(ROOT / "benchmarks"))

import benchmarks_page
import markdown_tables
import scores

pytestmark = pytest.mark.skipif(
    not (ROOT / benchmarks_page.RESULTS).is_dir(), reason="a source distribution has no results"
)
AGAIN = "python benchmarks/report.py --docs writes it anew"


def test_the_page_is_what_the_results_say():
    assert (ROOT / benchmarks_page.PAGE).read_text(encoding="utf-8") == benchmarks_page.page(), AGAIN


def test_the_readme_has_the_figures_of_the_results():
    text = (ROOT / "README.md").read_text(encoding="utf-8")
    assert re.search(r"<!-- (figures|speed):begin -->", text)
    assert benchmarks_page.readme(text) == text, AGAIN


def test_every_section_names_device_and_commit():
    sections = benchmarks_page.page().split("\n## ")[2:]
    assert len(sections) == len(benchmarks_page.SECTIONS) + 4
    for section in sections:
        assert re.search(r"NVIDIA H[12]00.*commit\s[0-9a-f]{12}", section, re.DOTALL), section.splitlines()[0]


def test_prose_is_not_wider_than_the_code():
    prose = [line for line in benchmarks_page.page().splitlines() if not line.startswith(("|", "!", "- ", "bfloat16"))]
    assert [line for line in prose if len(line) > 120] == []


def test_the_readmes_rows_of_speed():
    text = "before\n<!-- speed:begin -->\nold\n<!-- speed:end -->\nafter\n"
    written = benchmarks_page.readme(text)
    assert written.startswith("before\n") and written.endswith("after\n") and "old" not in written
    rows = [line for line in written.splitlines() if line.startswith("| ")][1:]
    assert len(rows) == 6
    trained = scores.load(ROOT / "benchmarks/results/h200_train.json")
    ratios = [ratio for _, ratio in scores.ratios(trained, trained, "sdpa_flash", "bwd")]
    cells = rows[1].split(" | ")
    assert cells[0] == "| backward, 36 shapes"
    assert cells[2] == f"{markdown_tables.geometric_mean(ratios):.2f}× ({min(ratios):.2f}×)"


def test_markers_are_needed():
    with pytest.raises(SystemExit, match="<!-- speed:begin -->"):
        markdown_tables.rewritten("no markers", "speed", [])


def test_wrapped_text_keeps_code_whole():
    span = "`python benchmarks/run.py --mode fwd`"
    lines = benchmarks_page.wrapped("word " * 20 + span + " word" * 20)
    assert any(span in line for line in lines) and max(map(len, lines)) <= benchmarks_page.COLUMNS
