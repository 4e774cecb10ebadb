"""Tables of the documents that count: names, places of a change, tiles, clocks, barriers, figures of the install.

All are computed again from the sources or stored results. What the documents name is checked by test_docs.py.
"""

from __future__ import annotations

import json
import re
import sys
import zipfile
from collections import Counter

import pytest
from test_docs import CODE_SPAN, DOCUMENTS, LOG, ROOT, cells
from test_layering import LAYERS

sys.path.append(str(ROOT / "benchmarks"))

import benchmarks_page
import lab
import scores
import step_model

CHANGES = ("A mask rule", "A score modifier with its gradient", "A dtype", "A head dim", "An architecture", "A variant")
KERNELS = ROOT / "csrc" / "flash_attn" / "kernels"
RESULTS = ROOT / "benchmarks" / "results"


def document(name):
    return (ROOT / name).read_text(encoding="utf-8")


def rows_below(text, heading):
    """The cells of the first table below a heading or a line of text, its head left out."""
    lines = text[text.index(heading) :].splitlines()
    first = next(i for i, line in enumerate(lines) if line.startswith("|"))
    table = lines[first : first + next((i for i, line in enumerate(lines[first:]) if not line.startswith("|")), None)]
    return [cells(line) for line in table[2:]]


def spans(cell):
    return CODE_SPAN.findall(cell)


def words_of(path):
    return set(re.findall(r"\w+", (ROOT / path).read_text(encoding="utf-8")))


@pytest.mark.parametrize("theirs, here, files", rows_below(document("docs/design.md"), "## Names of FlashAttention-2"))
def test_names_of_flash_attention_2_stand_where_the_table_says(theirs, here, files):
    found = {path: words_of(path) for path in spans(files)}
    names = spans(here)
    assert theirs and names and found
    assert [name for name in names if not any(name in words for words in found.values())] == []
    assert [path for path, words in found.items() if not words & set(names)] == []


def test_the_layers_are_those_that_are_held():
    names = [spans(row[0])[0].rstrip("/") for row in rows_below(document("docs/design.md"), "## Layers")]
    assert names == list(LAYERS)


@pytest.mark.parametrize("change", CHANGES)
def test_changes_are_lists_of_few_files(change):
    """Where they name a folder, the files in it are new."""
    rows = rows_below(document("docs/design.md"), f"\n### {change}\n")
    places = [path for row in rows for path in spans(row[0])]
    assert 2 <= len(places) <= 12 and len(set(places)) == len(places)
    assert [path for path in places if not (ROOT / path).exists()] == []
    folders = {path for path in places if (ROOT / path).is_dir()}
    assert folders == {path for path in places if path.endswith("/")}
    assert folders <= {f"csrc/flash_attn/{name}/" for name in ("instantiations", "kernels")}
    assert not (folders and change in ("A mask rule", "A score modifier with its gradient"))


def test_the_readme_is_short():
    text = document("README.md")
    assert len(text.splitlines()) <= 150
    headings = re.findall(r"^## (.*)$", text, re.MULTILINE)
    wanted = ["What it is not", "What it runs on", "Install", "Use", "In other libraries", "Features", "Speed", "Links"]
    assert headings == wanted


def test_the_readme_has_a_column_for_each_peer_in_every_row():
    head, *rows = [
        cells(line) for line in document("README.md").split("## Features")[1].splitlines() if line[:2] == "| "
    ]
    assert [name for name in head if "FlashAttention" in name] == [
        "FlashAttention-2 2.8.3", "FlashAttention-3", "FlashAttention-4",
    ]  # fmt: skip
    rows = rows[: next(i for i, row in enumerate(rows) if len(row) != len(head))]
    assert len(rows) > 20 and all(all(row) for row in rows)


def test_figures_of_the_install_hold_for_the_builds_that_are_there():
    minutes, gigabytes, megabytes = map(
        float,
        re.search(
            r"about (\d+) minutes.*?up to ([\d.]+) GB.*?make (\d+) MB", document("README.md"), re.DOTALL
        ).groups(),
    )
    reports = [json.loads(path.read_text()) for path in (ROOT / "build" / "kernels").glob("*/build_report.json")]
    whole = [r for r in reports if len(r["info"]["archs"]) == 1 and len(r["info"]["head_dims"]) > 5 and r["files"]]
    whole = [r for r in whole if {"fp16", "bf16"} <= set(r["info"]["dtypes"])]
    if not whole:
        pytest.skip("no archive of one architecture, with all head dims and dtypes, has been built here")
    for report in whole:
        assert report["archive_bytes"] <= 1e6 * megabytes
        assert max(file["peak_mb"] for file in report["files"]) <= 1e3 * gigabytes
        assert sum(file["cpu_seconds"] for file in report["files"]) <= 60 * minutes


def test_the_size_of_a_wheel_holds_for_those_that_are_there():
    stated = re.search(r"the wheel of `80;90` .*? has (\d+) MB, the module in it (\d+) MB", document("docs/build.md"))
    checked = 0
    for path in (ROOT / "dist").glob("flash_attn-*torch*.whl"):
        with zipfile.ZipFile(path) as wheel:
            (name,) = [name for name in wheel.namelist() if name.endswith(".so")]
            module = wheel.read(name)
        archs = json.loads(re.search(rb'\{"archs": \[[^{}]*\}', module)[0])["archs"]
        if archs == ["80", "90"]:
            assert path.stat().st_size <= 1e6 * int(stated[1]) and len(module) <= 1e6 * int(stated[2])
            checked += 1
    if not checked:
        pytest.skip("no wheel of 80;90 has been built here")


def figures(row):
    return [float(cell) for cell in row]


def test_clocks_of_the_mma_sync_forward_follow_from_its_tiles():
    tiles = step_model.tile_rows("kFwdTiles")
    expected = []
    for _, m, n, warps, _ in (tiles[128], tiles[64]):
        d = 128 if len(expected) == 0 else 64
        reads = (4 * warps * n * d + 2 * m * d) / 128
        expected.append([4 * m * n * d / 2600, reads, 4 * n * d / 128, m * n / 16])
    rows = rows_below(document("docs/how_it_works.md"), "**Inside the SM,**")
    shown = [figures(row[3:]) for row in rows]
    assert shown == [[round(a), round(b)] for a, b in zip(*expected)]
    head = document("docs/how_it_works.md").split("**Inside the SM,**")[1]
    for d, (_, m, n, warps, _) in ((128, tiles[128]), (64, tiles[64])):
        assert f"d {d}: {m} × {n}, {warps} warps" in head


def test_bounds_of_the_hopper_forward_follow_from_its_tiles():
    tiles = step_model.tile_rows("kSm90FwdTiles")
    rows = rows_below(document("docs/hopper.md"), "## 2. Forward: the bound")
    assert [int(row[0]) for row in rows] == sorted(tiles)
    for row in rows:
        d, m, n = int(row[0]), *tiles[int(row[0])][1:3]
        assert row[1] == f"{m} × {n}"
        step = step_model.forward_step(d, m, n)
        clocks = [step.clocks[unit] for unit in ("tensor cores", "exp2", "shared memory")]
        assert figures(row[2:]) == [*clocks, round(4096 / m, 1)]


def test_bounds_of_the_hopper_backward_follow_from_its_tiles():
    tiles = step_model.tile_rows("kSm90BwdTiles")
    rows = rows_below(document("docs/hopper.md"), "## 5. Backward: the bound")
    assert [int(row[0]) for row in rows] == sorted(tiles)
    for row in rows:
        d, m, n = int(row[0]), *tiles[int(row[0])][1:3]
        assert row[1] == f"{m} × {n}"
        assert figures(row[2:]) == [*step_model.backward_step(d, m, n).clocks.values()]


def test_every_barrier_of_the_mma_sync_backward_has_its_row():
    rows = rows_below(document("docs/how_it_works.md"), "**Every barrier of it**")
    counts = Counter(path for row in rows if spans(row[0]) == ["__syncthreads()"] for path in spans(row[1]))
    own = [*(KERNELS / "sm80").glob("bwd_*.h"), KERNELS / "sm80" / "clear_rows.h"]
    sources = [*sorted(own), KERNELS / "common" / "convert_dq.h"]
    found = {path.relative_to(ROOT).as_posix(): path.read_text().count("__syncthreads()") for path in sources}
    assert counts == {path: count for path, count in found.items() if count}


@pytest.mark.parametrize("storage, heading", [("fwd", "| barrier (`FwdStorage`)"), ("bwd", "| barrier (`BwdStorage`)")])
def test_every_mbarrier_of_the_hopper_kernels_has_its_row(storage, heading):
    text = (KERNELS / "sm90" / f"{storage}_storage.h").read_text(encoding="utf-8")
    declared = ", ".join(re.findall(r"^  Barrier (.*?);", text, re.MULTILINE | re.DOTALL))
    names = set(re.findall(r"\b([a-z]\w*)\b(?=\[|,|$|\s*//)", declared))
    told = {name for row in rows_below(document("docs/hopper.md"), heading) for name in spans(row[0])}
    assert names and names - told == set()


def commit_of(result):
    """The commit of the package that a result is of, 12 digits; None where it does not say."""
    if "flash_attn" in result:
        return result["flash_attn"]["commit"][:12]
    commit = scores.measured_commit(result) if "git" in result else result.get("commit") or "unknown"
    return None if commit.startswith("unknown") else commit[:12]


def quoted_commits(documents):
    """{commit: documents} of the text `commit 0123456…`."""
    found = {}
    for path in documents:
        for commit in re.findall(r"commit\s+([0-9a-f]{7,40})\b", path.read_text(encoding="utf-8")):
            found.setdefault(commit[:12], set()).add(path.name)
    return found


def of_several_gpus(name):
    """Whether a result needs more GPUs than the one that measures all others."""
    return any(name.endswith(f"_{experiment.name}") for experiment in lab.EXPERIMENTS if experiment.gpus > 1)


def newest_commit(results):
    """Of {name: result}, that of the result of one GPU that was started last."""
    of_one = [result for name, result in results.items() if not of_several_gpus(name)]
    return commit_of(max(of_one, key=lambda result: result.get("started") or ""))


def other_commits(results, quoted):
    """Of `quoted`, those that are neither the newest nor of a result of several GPUs, whenever those were measured."""
    allowed = {newest_commit(results)} | {
        commit_of(result) for name, result in results.items() if of_several_gpus(name)
    }
    return {commit: names for commit, names in quoted.items() if commit not in allowed}


def test_quoted_figures_are_of_the_newest_results_commit():
    """All documents but the tuning tables' log and the changelog, whose figures are of the commit that each names."""
    if not RESULTS.is_dir():
        pytest.skip("a source distribution has no results")
    results = {path.stem: scores.load(path) for path in RESULTS.glob("*.json")}
    assert {name for name, result in results.items() if commit_of(result) is None} == set()
    assert {commit_of(result) for name, result in results.items() if not of_several_gpus(name)} == {
        newest_commit(results)
    }
    quoted = quoted_commits(path for path in DOCUMENTS if path.parent != LOG)
    assert newest_commit(results) in quoted and other_commits(results, quoted) == {}


def test_a_figure_of_an_earlier_commit_is_found(tmp_path):
    page = tmp_path / "page.md"
    page.write_text("NVIDIA H200, commit\n0123456789ab. Later at commit fedcba9876543210, but not of commit messages.")
    assert quoted_commits([page]) == {"0123456789ab": {"page.md"}, "fedcba987654": {"page.md"}}


def started(day):
    return {"started": f"2026-01-0{day}", "git": {"commit": 12 * str(day), "dirty": None}}


@pytest.mark.parametrize("day_of_two", (1, 3))
def test_results_of_several_gpus_may_be_older_or_newer(day_of_two):
    results = {"h100_grid": started(2), "h100_theory": {"device": "without a date"}}
    results["h100x2_context_parallel"] = started(day_of_two)
    assert newest_commit(results) == 12 * "2"
    quoted = {12 * str(day): {"page.md"} for day in (1, 2, 3)}
    assert other_commits(results, quoted) == {12 * str(4 - day_of_two): {"page.md"}}


def test_every_stored_result_is_read_by_a_document():
    if not RESULTS.is_dir():
        pytest.skip("a source distribution has no results")
    text = "".join(path.read_text(encoding="utf-8") for path in DOCUMENTS)
    read = {module.RESULT.stem for module in benchmarks_page.PAGES} | {scores.stored_path("minimal").stem}
    assert {path.stem for path in RESULTS.glob("*.json") if path.stem not in text} - read == set()
