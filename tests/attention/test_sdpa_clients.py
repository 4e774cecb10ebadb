"""Models that call SDPA: transformers with attn_implementation="sdpa", by the scope and by the provider."""

from __future__ import annotations

import importlib.util
from contextlib import contextmanager
from pathlib import Path

import pytest
import torch
from reference import assert_accurate, assert_gradient_accurate
from sdpa_harness import recorded
from torch.nn import attention

import flash_attn.sdpa

transformers = pytest.importorskip("transformers")

LAYERS = 3


@contextmanager
def provider():
    if not hasattr(attention, "register_flash_attention_impl"):
        pytest.skip("this torch has no registry of flash attention implementations")
    flash_attn.sdpa.register("flash_attn_test")
    attention.activate_flash_attention_impl("flash_attn_test")
    try:
        yield
    finally:
        attention.restore_flash_attention_impl()


WAYS = {"scope": lambda: flash_attn.sdpa.use(("cuda", "cpu")), "provider": provider}


@pytest.fixture(params=WAYS)
def way(request, device):
    if request.param == "provider" and device == "cpu":
        pytest.skip("torch sends CPU tensors to no flash attention that a provider replaces")
    return WAYS[request.param]


def make_model(device, dtype):
    config = transformers.LlamaConfig(
        vocab_size=64, hidden_size=64, intermediate_size=96, num_hidden_layers=LAYERS, num_attention_heads=4,
        num_key_value_heads=2, max_position_embeddings=256, attn_implementation="sdpa",
    )  # fmt: skip
    torch.manual_seed(0)
    return transformers.LlamaForCausalLM(config).to(device=device, dtype=dtype)


def step(model, tokens):
    """Logits and the gradients of a training step."""
    model.zero_grad()
    result = model(input_ids=tokens, labels=tokens)
    result.loss.backward()
    return result.logits.detach(), {name: x.grad.clone() for name, x in model.named_parameters()}


def test_training_step(device, way):
    """As accurate as with torch's SDPA, measured from float64; every layer's attention comes here."""
    tokens = torch.randint(64, (2, 70), device=device)
    model = make_model(device, torch.bfloat16)
    with way(), recorded(device, "fwd") as forwards, recorded(device, "bwd") as backwards:
        logits, grads = step(model, tokens)
    assert len(forwards) == len(backwards) == LAYERS
    with recorded(device, "fwd") as forwards:
        plain_logits, plain_grads = step(model, tokens)
    assert forwards == []
    reference_logits, reference_grads = step(model.double(), tokens)
    assert_accurate(logits, reference_logits, plain_logits, "logits")
    for name, reference in reference_grads.items():
        assert_gradient_accurate(grads[name], reference, plain_grads[name], name)


@pytest.mark.parametrize("use_reentrant", (False, True))
def test_gradient_checkpointing(device, way, use_reentrant):
    tokens = torch.randint(64, (2, 70), device=device)
    model = make_model(device, torch.bfloat16).train()
    with way():
        _, expected = step(model, tokens)
        model.gradient_checkpointing_enable({"use_reentrant": use_reentrant})
        with recorded(device, "fwd") as forwards:
            _, grads = step(model, tokens)
    assert len(forwards) == 2 * LAYERS
    assert all(torch.equal(grads[name], expected[name]) for name in expected)


def decode(model, tokens, prefilled):
    """Logits of all tokens: a prefill, then one token a step over the cache."""
    with torch.no_grad():
        result = model(input_ids=tokens[:, :prefilled], use_cache=True)
        logits = [result.logits]
        for i in range(prefilled, tokens.shape[1]):
            result = model(input_ids=tokens[:, i : i + 1], past_key_values=result.past_key_values, use_cache=True)
            logits.append(result.logits)
    return torch.cat(logits, 1)


def test_decoding(device, way):
    """Prefill and every decode step come here, and are as accurate as with torch's SDPA."""
    model = make_model(device, torch.bfloat16).eval()
    tokens = torch.randint(64, (2, 28), device=device)
    plain = decode(model, tokens, 20)
    with way(), recorded(device, "fwd") as forwards:
        logits = decode(model, tokens, 20)
    assert len(forwards) == 9 * LAYERS
    assert_accurate(logits, decode(model.double(), tokens, 20), plain, "logits")


def test_generate(device, way):
    model = make_model(device, torch.bfloat16).eval()
    tokens = torch.randint(64, (1, 20), device=device)
    with way(), recorded(device, "fwd") as forwards:
        model.generate(tokens, max_new_tokens=8, min_new_tokens=8, do_sample=False, pad_token_id=0)
    assert len(forwards) == 8 * LAYERS


def test_padded_batches(device, way):
    """A padding mask comes here as a mask in the scope, and from the provider as a bias."""
    model = make_model(device, torch.bfloat16).eval()
    tokens = torch.randint(64, (2, 30), device=device)
    mask = torch.ones_like(tokens)
    mask[0, :9] = 0
    expected = model(input_ids=tokens, attention_mask=mask).logits
    with way(), recorded(device, "fwd") as forwards:
        logits = model(input_ids=tokens, attention_mask=mask).logits
    assert len(forwards) == LAYERS
    seen = mask.bool()  # the rows of padding see no key: what torch's backends give them differs
    torch.testing.assert_close(logits[seen], expected[seen], atol=2e-2, rtol=2e-2)


def test_packed_rows(device):
    """Training on several documents in a row, which transformers tells apart by position_ids, with the mask that it
    makes for SDPA: as accurate as with torch's."""
    tokens = torch.randint(64, (2, 40), device=device)
    positions = torch.cat([torch.arange(n, device=device) for n in (11, 25, 4)]).expand(2, -1)
    given = {"input_ids": tokens, "labels": tokens, "position_ids": positions, "use_cache": False}

    def packed_step(model):
        model.zero_grad()
        result = model(**given)
        result.loss.backward()
        return result.logits.detach(), model.model.layers[0].self_attn.k_proj.weight.grad.clone()

    model = make_model(device, torch.bfloat16)
    with flash_attn.sdpa.use(device), recorded(device, "fwd") as forwards:
        logits, grad = packed_step(model)
    plain, plain_grad = packed_step(model)
    reference, reference_grad = packed_step(model.double())
    assert len(forwards) == LAYERS
    assert_accurate(logits, reference, plain, "logits")
    assert_gradient_accurate(grad, reference_grad, plain_grad, "k_proj")


@pytest.mark.parametrize("options", ([], ["--llama"]))
def test_example(device, capsys, options):
    path = Path(__file__).resolve().parents[2] / "examples" / "sdpa.py"
    spec = importlib.util.spec_from_file_location("example_sdpa", path)
    example = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(example)
    with recorded(device, "fwd") as forwards:
        assert example.main(["--device", device, "--steps", "4", "--seqlen", "30", *options]) == 0
    printed = capsys.readouterr().out
    assert "ok" in printed.splitlines()[-1]
    ours = {"scope", "provider"} & set(example.ways(device))
    assert len(forwards) == 4 * 2 * len(ours)  # steps, layers
