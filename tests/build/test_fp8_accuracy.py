"""The model of e4m3 arithmetic behind the table of docs/fp8.md: its roundings, and the figures of the document."""

from __future__ import annotations

import sys
from pathlib import Path

import numpy as np
import pytest
import torch

ROOT = Path(__file__).resolve().parents[2]
sys.path.append(str(ROOT / "benchmarks"))

import fp8_accuracy as model

DOCUMENT = (ROOT / "docs" / "fp8.md").read_text(encoding="utf-8")


def test_roundings_are_those_of_torch():
    x = np.random.default_rng(1).standard_normal(20000).astype(np.float32) * np.exp2(np.arange(20000) % 24 - 14)
    x = x.astype(np.float32).astype(np.float64)
    wide = torch.from_numpy(x)
    assert torch.equal(torch.from_numpy(model.to_e4m3(x)), wide.clamp(-448, 448).to(torch.float8_e4m3fn).double())
    assert torch.equal(torch.from_numpy(model.to_bf16(x)), wide.to(torch.bfloat16).double())


def test_linear_codes_are_exact_at_powers_of_two():
    octaves = np.arange(-6, 9)
    assert (model.linear_e4m3(octaves) == np.exp2(octaves)).all()
    between = model.linear_e4m3(np.linspace(-6, 8, 1000)) / np.exp2(np.linspace(-6, 8, 1000))
    assert 0.93 < between.min() and between.max() < 1.13  # a sixteenth by rounding, 6 % by linearity


def test_tensor_core_cuts_to_13_bits():
    """Small products vanish beside a large accumulator, and what is left is cut towards zero."""
    p, v = np.zeros((1, model.STEP)), np.zeros((model.STEP, 1))
    p[0, 0], v[0, 0] = 1.0, 1.0
    for total, expected in (
        (2.0**12, 2.0**12 + 1),
        (2.0**13, 2.0**13 + 1),
        (2.0**14, 2.0**14),
        (-(2.0**14), -(2.0**14)),
    ):
        assert model.add_on_tensor_core(np.array([[total]]), p, v)[0, 0] == expected
    v[0, 0] = 1.5
    assert model.add_on_tensor_core(np.array([[2.0**13]]), p, v)[0, 0] == 2.0**13 + 1


def test_long_sums_shrink_unless_they_are_flushed():
    rng = np.random.default_rng(0)
    scores, v = rng.standard_normal((4, 8192)), model.to_e4m3(rng.standard_normal((8192, 8)) + 0.5)
    p = np.exp2(scores)
    expected = p @ v / p.sum(1, keepdims=True)
    ours, _, without = (model.attend(form, scores, v) for form in model.FORMS)
    assert model.relative_rmse(ours, expected) < 5e-3
    assert (without < expected).all() and model.relative_rmse(without, expected) > 2e-2


@pytest.mark.parametrize("inputs", model.ROWS, ids=str)
def test_document_has_the_figures_of_the_model(inputs):
    """Within what another libm may change."""
    assert model.heading() in DOCUMENT
    found = model.errors(inputs)
    lines = [x for x in DOCUMENT.splitlines() if x.startswith(f"| {inputs.name} | {inputs.keys} | ")]
    assert len(lines) == 1
    given = [float(x) for x in lines[0].split("|")[3:-1]]
    assert given == pytest.approx([found[name] for name in model.COLUMNS], rel=0.06)
