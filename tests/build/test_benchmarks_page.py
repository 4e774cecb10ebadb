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
    later = [name for name in ("train_char_lm", "sdpa_step") if (ROOT / scores.stored_path(name)).is_file()]
    assert len(sections) == len(benchmarks_page.SECTIONS) + 3 + len(later)
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
    trained = benchmarks_page.stored(benchmarks_page.GRID)
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
    assert any(span in line for line in lines) and max(map(len, lines)) <= markdown_tables.COLUMNS


@pytest.fixture
def grid(monkeypatch):
    """The grid's cells again as the second grid, where one peer runs out of memory."""
    found = benchmarks_page.stored(benchmarks_page.GRID)
    rows = [{**row, "group": "b4h8"} for row in found["rows"] if row["group"] == "cells" and row["head_dim"] == 64]
    for row in rows:
        if row["seqlen_k"] == 16384:
            row["results"] = {name: entry for name, entry in row["results"].items() if name != "sdpa_flash"}
            row["notes"] = {"sdpa_flash": scores.OUT_OF_MEMORY}
    second, loaded = {**found, "groups": ["b4h8"], "rows": rows}, benchmarks_page.stored
    monkeypatch.setattr(benchmarks_page, "stored", lambda name: second if name == "grid_b4h8" else loaded(name))


def test_the_grids_are_told_with_every_implementation(grid):
    page, readme = benchmarks_page.page(), benchmarks_page.readme((ROOT / "README.md").read_text(encoding="utf-8"))
    assert "](benchmarks/results/plots_grid/fwd_d128.png)" in readme
    assert "reproduce with `python benchmarks/lab.py grid`." in page
    section = page.split("## Every implementation")[1].split("\n## ")[0]
    assert "| `b4h8` bwd | `ours` | `sdpa_cudnn` |" in section
    assert "reproduce with `python benchmarks/lab.py grid_b4h8`." in section.replace("\n", " ")
    label = "d64 full b1 s16384"
    second = section.split("### Batch 4, 8 heads")[1]
    lines = [line for line in second.splitlines() if line.startswith(f"| {label} | ")]
    assert len(lines) == 3 and all("| out of memory |" in line for line in lines)
    assert "](../benchmarks/results/plots_grid_b4h8/b4h8_fwd_bwd_d64.png)" in section
