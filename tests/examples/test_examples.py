"""The examples run: training with flash_attn and with plain attention, transformers' Trainer and server loop, the demo.

tests/attention/test_sdpa_clients.py: examples/sdpa.py; tests/decode/test_generate_paged.py: examples/generate_paged.py.
"""

from __future__ import annotations

import importlib
import importlib.util
import json
import re
import sys
from dataclasses import replace
from pathlib import Path

import cp_workers
import pytest
import torch

EXAMPLES = Path(__file__).resolve().parents[2] / "examples"
sys.path.insert(0, str(EXAMPLES))

import demo
import train_char_lm
import train_context_parallel

SMALL_ONES = (
    "nanogpt", "fp8_cache", "graph_decode", "meanflow", "second_order", "serve_vllm", "train_llama",
    "llama_context_parallel", "prefix_tree", "image_blocks", "t5",
)  # fmt: skip
OF_TRANSFORMERS = ("llama_context_parallel", "image_blocks", "t5")
SMALL = train_char_lm.Config(layers=2, heads=4, kv_heads=2, head_dim=16, window=12, context=48, steps=12, warmup=3)


@pytest.mark.parametrize("dtype", ("float32", "bfloat16"))
def test_loss_curves_agree(device, dtype, tmp_path, capsys):
    if device == "cuda" and dtype == "float32":
        pytest.skip("the kernels are for half precision")
    result, model = train_char_lm.compare(replace(SMALL, dtype=dtype), torch.device(device))
    train_char_lm.show(result)
    assert "ok" in capsys.readouterr().out.splitlines()[-1]
    assert result["agrees"] and result["learned"]
    assert all(torch.isfinite(x.grad).all() for x in model.parameters())
    train_char_lm.save(result, tmp_path)
    assert json.loads((tmp_path / "train_char_lm.json").read_text()) == json.loads(json.dumps(result))
    assert (tmp_path / "train_char_lm.png").exists() == (importlib.util.find_spec("matplotlib") is not None)


@pytest.mark.devices("cpu")
def test_context_parallel_training_has_the_loss_of_one_process(device, capsys, monkeypatch):
    if not (torch.distributed.is_available() and torch.distributed.is_gloo_available()):
        pytest.skip("torch.distributed has no gloo")
    monkeypatch.setattr(torch.multiprocessing, "spawn", cp_workers.spawn)
    options = "--ranks 2 --steps 3 --context 67 --method ring --layout balanced".split()
    assert train_context_parallel.main(options) == 0
    assert "2 processes" in capsys.readouterr().out


def test_demo(device, monkeypatch, capsys):
    monkeypatch.setattr(demo, "CONFIG", replace(SMALL, steps=4))
    status = demo.main(["--device", device, "--seqlen", "200", "--steps", "8"])
    printed = capsys.readouterr().out
    assert status == 0, printed
    assert printed.count("FAILED") == 0 and "demo ok" in printed


def test_train_transformers(device, capsys):
    pytest.importorskip("transformers.masking_utils", reason="transformers is not installed")
    pytest.importorskip("accelerate", reason="transformers' Trainer needs accelerate")
    import train_transformers

    status = train_transformers.main(["--device", device, "--steps", "6", "--batch", "3", "--longest", "40"])
    printed = capsys.readouterr().out
    assert status == 0 and "training ok" in printed, printed


@pytest.mark.parametrize("name", SMALL_ONES)
def test_small_examples(device, name, capsys, monkeypatch):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: device == "cuda")
    if name in OF_TRANSFORMERS:
        pytest.importorskip("transformers.masking_utils", reason="transformers is not installed")
    status = importlib.import_module(name).main(["--dry"] if name == "serve_vllm" else ["--device", device])
    printed = capsys.readouterr().out
    assert status == 0 and " ok" in printed, printed


@pytest.mark.devices("cpu")
def test_fsdp2(device, capsys, monkeypatch):
    if not (torch.distributed.is_available() and torch.distributed.is_gloo_available()):
        pytest.skip("torch.distributed has no gloo")
    if not hasattr(pytest.importorskip("torch.distributed.fsdp"), "fully_shard"):
        pytest.skip("this torch has no FSDP2")
    monkeypatch.setattr(torch.multiprocessing, "spawn", cp_workers.spawn)
    import fsdp2

    assert fsdp2.main(["--steps", "3"]) == 0
    assert "fsdp2 ok" in capsys.readouterr().out


def test_quick_start():
    """The cells of the notebook, one after the other, on what there is."""
    notebook = json.loads((EXAMPLES / "quick_start.ipynb").read_text(encoding="utf-8"))
    names = {}
    for cell in notebook["cells"]:
        if cell["cell_type"] == "code":
            assert cell["outputs"] == []
            exec("".join(cell["source"]), names)
    assert names["length"].tolist() == [5, 5]


def test_snippets_of_the_readme(device, monkeypatch):
    """One after the other, as they stand."""
    pytest.importorskip("transformers")
    monkeypatch.setattr(torch.cuda, "is_available", lambda: device == "cuda")
    names = {}
    text = (EXAMPLES.parent / "README.md").read_text(encoding="utf-8")
    snippets = re.findall(r"^```python\n(.*?)^```", text, re.MULTILINE | re.DOTALL)
    for snippet in snippets:
        exec(snippet, names)
    assert len(snippets) == 4 and names["out"].shape == (2, 1, 16, 128) and names["loss"].isfinite()


@pytest.mark.parametrize("model, page_size", (("gpt-oss", "5"), ("llama", "16")))
def test_serve_transformers(device, model, page_size, capsys):
    pytest.importorskip("transformers.masking_utils", reason="transformers is not installed")
    import serve_transformers

    if not serve_transformers.hands_arguments_to_the_cache():
        with pytest.raises(SystemExit):
            serve_transformers.main(["--device", "cpu"])
        pytest.skip("this release of transformers hands no keyword arguments to its cache")
    status = serve_transformers.main(["--device", device, "--model", model, "--page-size", page_size])
    printed = capsys.readouterr().out
    assert status == 0 and "serve ok" in printed, printed
