"""What docs/fp8.md says of GPUs: its block of speeds is what fp8_forward.py measured; how far an LSE may be off."""

import sys
from pathlib import Path

import pytest
import torch
from fp8_harness import products_lse

ROOT = Path(__file__).resolve().parents[2]
sys.path.append(str(ROOT / "benchmarks"))

import fp8_forward
import fp8_page
from scores import load_stored


def measured():
    """Two lengths of one shape, another head dim, and the matrix products; one call has no e4m3 kernel."""

    def row(case, has_kernels, *rates):
        return {"id": case.id, "has_kernels": has_kernels, "tflops": dict(zip(("bf16", "fp8", "fp8 fast"), rates))}

    cases = [fp8_forward.Case(16384 // s, s, s, 16, 4, d, "bfloat16", causal) for d, s, causal in SHAPES]
    rows = [row(case, *rates) for case, rates in zip(cases, RATES)]
    rows.append({"id": "matmul-8192", "has_kernels": True, "tflops": {"matmul": 1246.3, "matmul, exact sums": 1282.4}})
    device = {"type": "cuda", "name": "NVIDIA X", "driver": "1.2"}
    versions = {"cuda": "13", "torch": "2.0", "cudnn": 9}
    return {"device": device, "versions": versions, "build": {"commit": "0123456789abcdef"}, "rows": rows}


SHAPES = ((128, 2048, True), (128, 512, True), (64, 512, False))
RATES = ((True, 600.0, 500.4, 900.0), (False, 400.0, 399.7, 200.0), (True, 500.0, 600.0))


def test_the_table_shows_what_is_fastest():
    lines = fp8_page.block(measured())
    assert [line for line in lines if line[:2] in ("| ", "- ")] == [
        "| head dim | heads | mask | s 512 | s 2048 |",
        "| 64 | 16/4 | full | 500 / **600** / – | – |",
        "| 128 | 16/4 | causal | **400** / **400** / 200† | 600 / 500 / **900** |",
        "- `fp8` against `bf16`: geometric mean 1.000x, worst 0.834x (d 128, 16/4, causal, s 2048), 2 of 3 slower",
        "- `fp8 fast` against `bf16`: geometric mean 0.866x, worst 0.500x (d 128, 16/4, causal, s 512), 1 of 2 slower",
        "- torch's product of e4m3 matrices, 8192 × 8192, TFLOPS: `matmul` 1246, `matmul, exact sums` 1282",
    ]
    text = " ".join(lines)
    assert "batch × s = 16384. " in text and "†: " in text and "cuDNN's" not in text
    assert "NVIDIA X, driver 1.2, CUDA 13, torch 2.0, cuDNN 9, commit 0123456789ab." in text


def test_the_document_has_what_was_measured():
    text = (ROOT / fp8_page.PAGE).read_text(encoding="utf-8")
    assert fp8_page.NOTHING in fp8_page.page(text, None)
    if not (ROOT / "benchmarks" / "results").is_dir():
        pytest.skip("a source distribution has no results")
    assert fp8_page.page(text, load_stored(ROOT / fp8_page.RESULT)) == text, "python benchmarks/report.py --docs"


@pytest.mark.parametrize("d", fp8_forward.HEAD_DIMS)
def test_the_lse_of_scores_of_dozens_of_nats_may_be_off_by_what_the_document_says(d):
    assert "dozens of nats may be off by 1e-2 and more" in " ".join((ROOT / fp8_page.PAGE).read_text().split())
    q = torch.full((1, 1, 1, d), (24 / d**0.5) ** 0.5, dtype=torch.float64)
    assert 1e-2 < products_lse(q, q, d**-0.5) < 1e-1
