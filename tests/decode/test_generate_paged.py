"""examples/generate_paged.py: text from a paged cache, whose logits are those of the whole text at once."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

sys.path.append(str(Path(__file__).resolve().parents[2] / "examples"))

import generate_paged

SMALL = ["--steps", "3", "--requests", "5", "--slots", "3", "--new-tokens", "9"]


@pytest.mark.parametrize("page_size", (7, 16))
@pytest.mark.parametrize("graph", (False, True))
def test_requests_share_pages(device, page_size, graph, capsys):
    if device == "cpu" and graph:
        pytest.skip("CUDA graphs need a GPU")
    options = ["--device", device, "--page-size", str(page_size), *([] if graph else ["--no-graph"])]
    status = generate_paged.main([*SMALL, *options])
    printed = capsys.readouterr().out
    assert status == 0 and "FAILED" not in printed
    assert f"on {device}, {'graph replay' if graph else 'eager'}" in printed


def test_a_wrong_page_is_noticed(device, monkeypatch, capsys):
    """One page that two requests write: the CPU backend sees the table and refuses it, a GPU's result fails the check
    at the end."""
    grow = generate_paged.PagedDecoder.grow

    def shared(decoder, slot, length):
        grow(decoder, slot, length)
        decoder.table[slot, 0] = 0

    monkeypatch.setattr(generate_paged.PagedDecoder, "grow", shared)
    if device == "cpu":
        with pytest.raises(RuntimeError, match="block_table"):
            generate_paged.main([*SMALL, "--device", device, "--no-graph"])
        return
    assert generate_paged.main([*SMALL, "--device", device, "--no-graph"]) == 1
    assert "FAILED" in capsys.readouterr().out


def test_texts_that_are_too_long_are_refused(capsys):
    with pytest.raises(SystemExit):
        generate_paged.main(["--steps", "0", "--new-tokens", "600"])
    assert "--new-tokens: expected" in capsys.readouterr().err
