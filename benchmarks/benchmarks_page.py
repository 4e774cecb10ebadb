"""docs/benchmarks.md, written from the results in benchmarks/results, and the README's block of six rows."""

from __future__ import annotations

import ast
import textwrap
from dataclasses import dataclass
from pathlib import Path

import ablate_report
import cp_page
import fp8_page
import retrospective_page
import sweep_report
import theory_page
import triton_ladder_page
from markdown_tables import (
    COLUMNS,
    decode_table,
    figures_block,
    grid_tables,
    loss_table,
    rewritten,
    row_table,
    score_table,
    speed_block,
    steps_block,
    wrapped,
)
from plots import figures, plot_name
from scores import OURS, environment_line, load, load_stored, modes, overhead_lines, ratios, score_line

ROOT = Path(__file__).resolve().parents[1]
RESULTS = Path("benchmarks", "results")
PAGE = Path("docs", "benchmarks.md")
GRID = "h200_grid"
MEASURES_GRID = "python benchmarks/lab.py grid"
BEFORE_GRID = "h200_train"  # what the figures are read from until there is a grid
PAGES = (theory_page, triton_ladder_page, ablate_report, sweep_report, cp_page, fp8_page)  # each has one result
JOIN_UNNAMED = (*OURS, "sdpa_flash_deterministic")  # measured without being named as a peer

INTRODUCTION = """\
Written by `python benchmarks/report.py --docs` from the results in `benchmarks/results`; a test holds this page to
them. Every section names the device and the commit of its figures. `ours` is this package. A ratio above 1 says that it
is faster; `of plain` is its speed with a feature relative to that without, `time of decode` its time relative to that
of one token over the same cache.
"""
COMPARING = """\
`python benchmarks/compare.py NEW.json [OLD.json]` prints the scores against the peers of a run, or against an earlier
result. Runs differ in clocks by some percent: `python benchmarks/compare_builds.py --old SITE_DIR --new SITE_DIR`
measures two installs in turns in one process. The operators beside attention (cross-entropy, norms) are measured by
`python benchmarks/helpers.py`. `python benchmarks/lab.py` lists every experiment and runs it.
"""
DECODING = """\
One query token of each sequence over a KV cache, bfloat16. "One call" is the replay of a graph of one call after the L2
cache was overwritten, "a layer" a graph of 20 calls, each with a cache of its own, divided by 20. The figures of
`flash_attn_3` are those of an earlier run, `benchmarks/results/h200_decode_fa3.json`.
"""
TRAINING = """\
A character-level GPT (`examples/train_char_lm.py`) trained with each attention from one seed on the same batches. The
other rows evaluate plain attention in another order or precision: their differences to it are the noise of the dtype.
"""
EVERYONE = """\
Naive attention, our Triton comparator, SDPA's backends, FlexAttention and this package take turns on the same rows, in
one run: the cells, of 16384 tokens and heads · head dim = 2048, and a grid of batch 4 and 8 heads, whose short
sequences are little work. Where a peer is not measured, its curve ends: a cross says that memory did. FlexAttention is
compiled anew for every shape, so that it is measured at a few lengths.
"""
STEPS = """\
Forward, backward and AdamW under autocast to bfloat16, the ways in turns step by step, the median (docs/sdpa.md says
what the two ways are). In PyTorch's choice most of these calls are cuDNN's.
"""


@dataclass(frozen=True)
class Section:
    """A result with its text. tables: groups to show row by row; plot: its place below the results."""

    title: str
    result: str
    text: str = ""
    tables: tuple[str, ...] = ()
    plot: str = ""


SECTIONS = (
    Section(
        "Forward with features, of packed sequences and of small problems",
        "h200_fwd_other",
        "`of plain` is the speed relative to the same call without the feature, which takes turns with it. Long calls "
        "run at the power limit, those without a slower peer beside them at lower clocks.",
        tables=("gqa", "window", "varlen", "varlen_equal", "features", "value_dim", "small", "one_wave", "small_eager"),
    ),
    Section(
        "Backward beside Triton, and deterministic",
        "h200_bwd_triton",
        "The comparator (`benchmarks/triton_attention.py`) has tuned tiles and loads them by TMA.",
        plot="plots_bwd_triton/bwd_d128.png",
    ),
    Section(
        "Forward of the mma.sync kernels, every peer",
        "h200_fwd_peers",
        "The kernels that GPUs other than Hopper run, measured on an H200 at a commit that had no others.",
        plot="plots_fwd_peers/fwd_d128.png",
    ),
    Section(
        "Forward and backward of the mma.sync kernels",
        "h200_fwd_bwd",
        "As above; all groups of rows.",
        plot="plots_fwd_bwd/bwd_d128.png",
    ),
)


def stored(name):
    return load(ROOT / RESULTS / f"{name}.json")


def method():
    """The paragraph of benchmarks/run.py on how it measures."""
    description = ast.get_docstring(ast.parse((ROOT / "benchmarks" / "run.py").read_text(encoding="utf-8")))
    paragraph = next(text for text in description.split("\n\n") if text.startswith("Method: "))
    text = paragraph.removeprefix("Method: ")
    return wrapped(text[0].upper() + text[1:])


def source_lines(result, name, command=None):
    """Where figures are from, and the command that measures them again."""
    peers = [peer for peer in result["implementations"] if peer not in JOIN_UNNAMED]
    words = ["--mode", *modes(result), "--groups", *result["groups"], "--peers", *peers]
    command = command or f"python benchmarks/run.py {' '.join(words)}"
    command = textwrap.wrap(command, COLUMNS, break_on_hyphens=False)
    return [
        *wrapped(f"{result['dtype']}, {environment_line(result)}. {peers_text(result)} From `{RESULTS / name}.json`:"),
        "",
        "```",
        *(line + " \\" for line in command[:-1]),
        command[-1],
        "```",
    ]


def peers_text(result):
    """Who the peers are."""
    titles = {name: title for name, title in result["implementations"].items() if name not in OURS}
    return "; ".join(f"`{name}` is {title}" for name, title in titles.items()) + "."


def plot_line(place):
    return f"![{Path(place).stem.replace('_', ' ')}](../{RESULTS / place})"


def section_lines(section):
    result = stored(section.result)
    lines = ["", f"## {section.title}", "", *source_lines(result, section.result), ""]
    lines += [*wrapped(section.text), ""] if section.text else []
    lines += score_table(result)
    for group in section.tables:
        lines += ["", f"### Rows of `{group}`", "", *row_table(result, group)]
    return lines + (["", plot_line(section.plot)] if section.plot else [])


def decoding_lines():
    result, recorded = stored("h200_decode"), stored("h200_decode_fa3")
    ceiling, beside = result["read_ceiling"], ratios(result, recorded, "flash_attn_3", "fwd", "decode")
    lines = ["", "## Decoding", "", *wrapped(DECODING), "", *source_lines(result, "h200_decode"), ""]
    lines += [f"- read ceiling of this run: {ceiling['gbs']:.0f} GB/s of device memory ({ceiling['method']})"]
    lines += [f"- {score_line(beside, 'one call, ours vs flash_attn_3')}", *(f"- {x}" for x in overhead_lines(result))]
    lines += ["", *decode_table(result, recorded), "", *score_table(result)]
    for group in ("decode_append", "decode_tokens", "decode_invariant", "decode_features"):
        lines += ["", f"### Rows of `{group}`", "", *row_table(result, group, base="decode")]
    for group in ("decode_eager", "prefill_cache"):
        lines += ["", f"### Rows of `{group}`", "", *row_table(result, group)]
    return [*lines, "", plot_line("plots_decode/decode_h32-8.png")]


def training_lines():
    result = stored("h200_train_char_lm")
    config = ", ".join(f"{key} {value}" for key, value in result["config"].items())
    told = f"{result['device']}, commit {result['flash_attn']['commit'][:12]}; {config}."
    lines = ["", "## Training a model", "", *wrapped(TRAINING), "", *wrapped(told), "", *loss_table(result)]
    return [*lines, "", plot_line("plots_train/train_char_lm.png")]


def sdpa_lines():
    name = "h100_sdpa_step"
    command = f"python benchmarks/sdpa_step.py --out {name}.json"
    lines = ["", "## A model that calls SDPA", "", *wrapped(STEPS), "", *steps_block(stored(name))]
    return [*lines, "", *wrapped(f"From `{RESULTS / name}.json`; reproduce with `{command}`.")]


def grid_name():
    """The result that the figures of forward and backward are from."""
    return GRID if (ROOT / RESULTS / f"{GRID}.json").is_file() else BEFORE_GRID


def forward_backward_block():
    name = grid_name()
    command = MEASURES_GRID if name == GRID else None
    return figures_block(stored(name), RESULTS / f"{name}.json", command)


def grid_lines():
    """Both grids with every implementation."""
    lines = ["", "## Every implementation", "", *wrapped(EVERYONE), ""]
    if grid_name() != GRID:
        return [*lines, f"Not measured yet: `{MEASURES_GRID}` does."]
    result = stored(GRID)
    lines += [*source_lines(result, GRID, MEASURES_GRID), "", *score_table(result, ["cells", "b4h8"])]
    for title, group, grid in (("16384 tokens", "cells", ""), ("Batch 4, 8 heads", "b4h8", "b4h8")):
        lines += ["", f"### {title}", *grid_tables(result, group), ""]
        plots = [plot_name(*figure) for figure in figures(result) if figure[0] == grid]
        lines += [plot_line(f"{GRID}/{name}") for name in plots]
    return lines


def page():
    """The text of docs/benchmarks.md."""
    lines = ["# Benchmarks", "", *wrapped(INTRODUCTION), "", "## Method", "", *method(), "", *wrapped(COMPARING)]
    lines += ["", "## Forward and backward", "", *forward_backward_block()]
    lines += ["", *score_table(stored(grid_name()), ["gqa"])]
    if grid_name() != GRID:
        lines += ["", plot_line("plots_hopper/fwd_d128.png"), plot_line("plots_hopper/bwd_d128.png")]
    lines += grid_lines()
    for section in SECTIONS:
        lines += section_lines(section)
    return "\n".join([*lines, *decoding_lines(), *training_lines(), *sdpa_lines()]) + "\n"


def readme(text):
    """README.md's `text` with its blocks of figures, those that it has, written anew."""
    trained = stored(grid_name())
    plots = GRID if grid_name() == GRID else "plots_hopper"
    blocks = {
        "plot": [f"![forward, head dim 128, beside its peers]({RESULTS / plots}/fwd_d128.png)"],
        "figures": forward_backward_block(),
        "steps": steps_block(stored("h100_sdpa_step")),
        "speed": speed_block(trained, stored("h200_fwd_other"), stored("h200_decode"), stored("h200_decode_fa3")),
    }
    for name, block in blocks.items():
        if f"<!-- {name}:begin -->" in text:
            text = rewritten(text, name, block)
    return text


def write_docs():
    """Write the page, the README's blocks and those of the other pages; returns their paths."""
    (ROOT / PAGE).write_text(page(), encoding="utf-8")
    path = ROOT / "README.md"
    path.write_text(readme(path.read_text(encoding="utf-8")), encoding="utf-8")
    path = ROOT / retrospective_page.PAGE
    path.write_text(retrospective_page.page(path.read_text(encoding="utf-8"), ROOT), encoding="utf-8")
    return PAGE, Path("README.md"), *map(write_blocks, PAGES), retrospective_page.PAGE


def write_blocks(other):
    """Writes the blocks of a module's page anew; returns the page's path."""
    path = ROOT / other.PAGE
    text = other.page(path.read_text(encoding="utf-8"), load_stored(ROOT / other.RESULT))
    path.write_text(text, encoding="utf-8")
    return other.PAGE
