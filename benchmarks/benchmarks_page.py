"""docs/benchmarks.md, written from the results in benchmarks/results, and the README's block of six rows."""

from __future__ import annotations

import ast
from dataclasses import dataclass
from pathlib import Path

import ablate_page
import cp_page
import cp_virtual_page
import fp8_page
import retrospective_page
import sweep_report
import theory_page
import triton_ladder_page
from markdown_tables import (
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
from scores import OURS, RESULTS, environment_line, load, load_stored, overhead_lines, stored_path

ROOT = Path(__file__).resolve().parents[1]
PAGE = Path("docs", "benchmarks.md")
GRID, SECOND_GRID = "grid", "grid_b4h8"
PAGES = (
    theory_page,
    triton_ladder_page,
    ablate_page,
    sweep_report,
    cp_page,
    cp_virtual_page,
    fp8_page,
)  # each has one result
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
cache was overwritten, "a layer" a graph of 20 calls, each with a cache of its own, divided by 20.
"""
TRAINING = """\
A character-level GPT (`examples/train_char_lm.py`) trained with each attention from one seed on the same batches. The
other rows evaluate plain attention in another order or precision: their differences to it are the noise of the dtype.
"""
EVERYONE = """\
Naive attention, our Triton comparator, SDPA's backends, FlexAttention and this package take turns on the same rows, in
one run: the cells, of 16384 tokens and heads · head dim = 2048, and a grid of batch 4 and 8 heads, whose short
sequences are little work. Where a peer is not measured, its curve ends. FlexAttention is compiled anew for every shape,
so that it is measured at a few lengths, up to head dim 128.
"""
STEPS = """\
Forward, backward and AdamW under autocast to bfloat16, the ways in turns step by step, the median (docs/sdpa.md says
what the two ways are). In PyTorch's choice most of these calls are cuDNN's.
"""


@dataclass(frozen=True)
class Section:
    """A result with its text. tables: groups to show row by row; plot: its place below
    the results."""

    title: str
    result: str
    text: str = ""
    tables: tuple[str, ...] = ()
    plot: str = ""


SECTIONS = (
    Section(
        "Forward with features, of packed sequences and of small problems",
        "fwd_other",
        "`of plain` is the speed relative to the same call without the feature, which takes turns with it. Long calls "
        "run at the power limit, those without a slower peer beside them at lower clocks.",
        tables=("gqa", "window", "varlen", "varlen_equal", "features", "value_dim", "small", "one_wave", "small_eager"),
    ),
    Section("Deterministic backward", "deterministic", tables=("deterministic",)),
    Section(
        "Forward and backward of the mma.sync kernels",
        "fwd_bwd",
        "The kernels that GPUs other than Hopper run; all groups of rows.",
        plot="plots_fwd_bwd/bwd_d128.png",
    ),
)


def stored(name):
    """The result of an experiment."""
    return load(ROOT / stored_path(name))


def maybe_stored(name):
    """The same, or None before it is measured."""
    return load_stored(ROOT / stored_path(name))


def method():
    """The paragraph of benchmarks/run.py on how it measures."""
    description = ast.get_docstring(ast.parse((ROOT / "benchmarks" / "run.py").read_text(encoding="utf-8")))
    paragraph = next(text for text in description.split("\n\n") if text.startswith("Method: "))
    text = paragraph.removeprefix("Method: ")
    return wrapped(text[0].upper() + text[1:])


def source_lines(result, name):
    """Where figures are from, and the command that measures them again."""
    return wrapped(f"{result['dtype']}, {environment_line(result)}. {peers_text(result)} {from_line(name)}")


def from_line(name):
    """Where a result is stored, and what measures it again."""
    return f"From `{stored_path(name)}`; reproduce with `python benchmarks/lab.py {name}`."


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
    result = stored("decode")
    ceiling = result["read_ceiling"]
    lines = ["", "## Decoding", "", *wrapped(DECODING), "", *source_lines(result, "decode"), ""]
    lines += [f"- read ceiling of this run: {ceiling['gbs']:.0f} GB/s of device memory ({ceiling['method']})"]
    lines += [f"- {line}" for line in overhead_lines(result)]
    lines += ["", *decode_table(result), "", *score_table(result)]
    groups = ("decode_append", "decode_tokens", "decode_invariant", "decode_8bit", "decode_features")
    for group in groups:
        base = "decode" if group != "decode_8bit" else None
        lines += ["", f"### Rows of `{group}`", "", *row_table(result, group, base)]
    for group in ("decode_eager", "prefill_cache"):
        lines += ["", f"### Rows of `{group}`", "", *row_table(result, group)]
    return [*lines, "", plot_line("plots_decode/decode_h32-8.png")]


def training_lines():
    """The section of the loss; none before it is measured."""
    result = maybe_stored("train_char_lm")
    if result is None:
        return []
    config = ", ".join(f"{key} {value}" for key, value in result["config"].items())
    told = f"{result['device']}, commit {result['flash_attn']['commit'][:12]}; {config}. "
    told += from_line("train_char_lm")
    lines = ["", "## Training a model", "", *wrapped(TRAINING), "", *wrapped(told), "", *loss_table(result)]
    return [*lines, "", plot_line("plots_train/train_char_lm.png")]


def sdpa_lines():
    """The section of the steps; none before they are measured."""
    result = maybe_stored("sdpa_step")
    if result is None:
        return []
    lines = ["", "## A model that calls SDPA", "", *wrapped(STEPS), "", *steps_block(result)]
    return [*lines, "", *wrapped(from_line("sdpa_step"))]


def readme_steps():
    result = maybe_stored("sdpa_step")
    return retrospective_page.missing("sdpa_step") if result is None else steps_block(result)


def forward_backward_block():
    return figures_block(stored(GRID), stored_path(GRID), f"python benchmarks/lab.py {GRID}")


def grid_lines():
    """Both grids with every implementation."""
    lines = ["", "## Every implementation", "", *wrapped(EVERYONE)]
    for title, name, group in (("16384 tokens", GRID, "cells"), ("Batch 4, 8 heads", SECOND_GRID, "b4h8")):
        result = stored(name)
        lines += [
            "",
            f"### {title}",
            "",
            *source_lines(result, name),
            "",
            *score_table(result, [group]),
            *grid_tables(result, group),
            "",
        ]
        lines += [plot_line(f"plots_{name}/{plot_name(*figure)}") for figure in figures(result)]
    return lines


def page():
    """The text of docs/benchmarks.md."""
    lines = ["# Benchmarks", "", *wrapped(INTRODUCTION), "", "## Method", "", *method(), "", *wrapped(COMPARING)]
    lines += ["", "## Forward and backward", "", *forward_backward_block()]
    lines += ["", *score_table(stored(GRID), ["gqa"]), *grid_lines()]
    for section in SECTIONS:
        lines += section_lines(section)
    return "\n".join([*lines, *decoding_lines(), *training_lines(), *sdpa_lines()]) + "\n"


def readme(text):
    """README.md's `text` with its blocks of figures, those that it has, written anew."""
    blocks = {
        "plot": [f"![forward, head dim 128, beside its peers]({RESULTS / 'plots_grid'}/fwd_d128.png)"],
        "figures": forward_backward_block(),
        "steps": readme_steps(),
        "speed": speed_block(stored(GRID), stored("fwd_other"), stored("decode")),
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
