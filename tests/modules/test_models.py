"""Models of Hugging Face transformers with attn_implementation="flash_attention_2" against "eager".

Small and randomly initialised. The reference is the eager model in float32 with the same (rounded) weights, some
hundred times more exact than half precision; eager's softmax is in float32 anyway, and overflows for float64 masks.
Criterion: the largest error of the logits, and of every parameter's gradient its Euclidean norm, are at most twice
those of the eager model in half precision. The biases of a query, key and value projection count as one parameter, as
where they are fused: a key bias alone has no gradient but rounding, since it shifts all scores of a row alike.

transformers takes an installed distribution `flash_attn` of version 2.3.3 or newer, and CUDA. On the CPU its gates are
opened for the test, in the process only; all else is its own path: unpadding, position ids, options.
"""

from __future__ import annotations

import re

import pytest
import torch

transformers = pytest.importorskip("transformers", reason="transformers is not installed")

from transformers import DataCollatorWithFlattening
from transformers import modeling_flash_attention_utils as gates
from transformers.utils import is_flash_attn_2_available

import flash_attn
from flash_attn import bert_padding

VOCABULARY, WIDTH, SEQLEN, WINDOW, DRAWS = 61, 128, 75, 20, 3
COMMON = {
    "vocab_size": VOCABULARY, "hidden_size": WIDTH, "intermediate_size": WIDTH, "num_hidden_layers": 2,
    "num_attention_heads": 4, "max_position_embeddings": 128, "initializer_range": 0.12, "pad_token_id": 0,
}  # fmt: skip
DECODER = {**COMMON, "num_key_value_heads": 2, "head_dim": 32, "tie_word_embeddings": False}
GEMMA2 = {"sliding_window": WINDOW, "attn_logit_softcapping": 1.5, "query_pre_attn_scalar": 32}
MODELS = {
    "llama": ("LlamaConfig", DECODER),
    "mistral": ("MistralConfig", {**DECODER, "sliding_window": WINDOW}),
    "gemma2": ("Gemma2Config", {**DECODER, **GEMMA2}),
    "bert": ("BertConfig", {**COMMON, "hidden_dropout_prob": 0.0, "attention_probs_dropout_prob": 0.0}),
}
DECODERS = ("llama", "mistral", "gemma2")
FLASH = "flash_attention_2"


@pytest.fixture(autouse=True)
def _gates(request, monkeypatch):
    """transformers lets flash_attention_2 through, or the test is skipped with the reason."""
    if "device" not in request.fixturenames:
        return
    if request.getfixturevalue("device") == "cuda":
        if not is_flash_attn_2_available():
            pytest.skip("transformers finds no installed distribution flash_attn (a source tree has no metadata)")
        return
    try:
        entry = gates.FLASH_ATTENTION_COMPATIBILITY_MATRIX[2]
        monkeypatch.setitem(entry, "general_availability_check", lambda: True)
        monkeypatch.setitem(entry, "supported_devices", ((lambda: True, "cpu"),))
        monkeypatch.setattr(gates, "is_flash_attn_2_available", lambda: True)
        monkeypatch.setattr(gates, "_loaded_implementation", None)
    except (AttributeError, KeyError) as error:
        pytest.skip(f"the gates of transformers {transformers.__version__} are not those known here: {error}")


def build(name, attention, dtype, device, state=None, **changes):
    config_class, options = MODELS[name]
    config = getattr(transformers, config_class)(**{**options, **changes})
    auto = transformers.AutoModelForMaskedLM if name == "bert" else transformers.AutoModelForCausalLM
    model = auto.from_config(config, attn_implementation=attention, dtype=dtype)
    if state is not None:
        model.load_state_dict({key: value.to(dtype) for key, value in state.items()})
    return model.to(device)


def build_three(name, dtype, device, **changes):
    """(reference, eager in dtype, flash in dtype) with one set of weights; changes are for the flash model alone."""
    eager = build(name, "eager", dtype, device)
    state = eager.state_dict()
    reference = build(name, "eager", torch.float32, device, state)
    return reference, eager, build(name, FLASH, dtype, device, state, **changes)


def padding_mask(device, side):
    mask = torch.ones(3, SEQLEN, dtype=torch.long, device=device)
    for row, length in ((0, 40), (2, 61)):
        if side == "right":
            mask[row, length:] = 0
        elif side == "left":
            mask[row, :-length] = 0
    return mask


def batch(device, side):
    """Input ids, their mask, and the gradient of the logits: random, 0 where padding is."""
    mask = padding_mask(device, side)
    ids = torch.randint(1, VOCABULARY, mask.shape, device=device) * mask
    weights = torch.randn(*mask.shape, VOCABULARY, device=device) * 0.1 * mask[..., None]
    return ids, mask, weights


def step(model, ids, mask, weights):
    """(logits of the tokens, gradients by parameter) in float64."""
    logits = model(input_ids=ids, attention_mask=mask).logits
    model.zero_grad()
    logits.backward(weights.to(logits.dtype))
    return logits.detach()[mask.bool()].double(), gradients_of(model)


def gradients_of(model):
    """Gradients in float64; the biases of q, k and v of a layer are one parameter."""
    fused = {}
    for name, parameter in model.named_parameters():
        key = re.sub(r"\.(query|key|value)\.bias$", ".qkv.bias", name)
        fused.setdefault(key, []).append(parameter.grad.double().flatten())
    return {key: torch.cat(parts) for key, parts in fused.items()}


class Errors:
    """Errors of the two half precision models, collected over several batches."""

    def __init__(self):
        self.logits, self.gradients = [0.0, 0.0], {}

    def add(self, reference, eager, flash):
        for which, (logits, gradients) in enumerate((eager, flash)):
            assert torch.isfinite(logits).all()
            self.logits[which] = max(self.logits[which], (logits - reference[0]).abs().max().item())
            for name, gradient in gradients.items():
                squares = self.gradients.setdefault(name, [0.0, 0.0])
                squares[which] += (gradient - reference[1][name]).square().sum().item()

    def outside(self):
        """What is further from the reference than twice the eager model."""
        ratios = {name: (flash / eager) ** 0.5 for name, (eager, flash) in self.gradients.items()}
        ratios["logits"] = self.logits[1] / self.logits[0]
        return {name: ratio for name, ratio in ratios.items() if not ratio <= 2.0}


def errors_of(models, device, side, draws=DRAWS):
    errors = Errors()
    for _ in range(draws):
        errors.add(*(step(model, *arguments) for arguments in [batch(device, side)] for model in models))
    return errors


def test_transformers_calls_this_package(device):
    model = build("llama", FLASH, torch.bfloat16, device)
    functions, _ = gates.lazy_import_flash_attention(model.config._attn_implementation)
    assert functions[:2] == (flash_attn.flash_attn_func, flash_attn.flash_attn_varlen_func)
    assert functions[3:] == (bert_padding.pad_input, bert_padding.unpad_input)


@pytest.mark.parametrize("dtype,side", [("bfloat16", "none"), ("bfloat16", "left"), ("bfloat16", "right"),
                                        ("float16", "right")])  # fmt: skip
@pytest.mark.parametrize("name", MODELS)
def test_logits_and_gradients(device, name, dtype, side):
    models = build_three(name, getattr(torch, dtype), device)
    errors = errors_of(models, device, side)
    assert len(errors.gradients) > 15 and errors.outside() == {}


WRONG = {
    "mistral": {"sliding_window": WINDOW + 2},
    "gemma2": {"attn_logit_softcapping": 2.0},
}


@pytest.mark.parametrize("name", WRONG)
def test_wrong_options_are_told_apart(device, name):
    """The criterion sees a window that is two keys too wide, and a softcap that is a third too large."""
    models = build_three(name, torch.float16, device, **WRONG[name])
    assert len(errors_of(models, device, "none", draws=1).outside()) > 10


def test_ignored_padding_is_told_apart(device):
    reference, eager, flash = build_three("bert", torch.float16, device)
    ids, mask, weights = batch(device, "right")
    results = [step(model, ids, mask, weights) for model in (reference, eager)]
    unmasked = flash(input_ids=ids).logits.detach()[mask.bool()].double()
    errors = Errors()
    errors.add(*results, (unmasked, results[1][1]))
    assert list(errors.outside()) == ["logits"]


def packed(device, lengths):
    """A padding-free batch as transformers' collator makes it, and the sequences alone."""
    sequences = [torch.randint(1, VOCABULARY, (n,)).tolist() for n in lengths]
    collator = DataCollatorWithFlattening(return_flash_attn_kwargs=True)
    features = {
        key: value.to(device) if isinstance(value, torch.Tensor) else value
        for key, value in collator([{"input_ids": ids} for ids in sequences]).items()
        if key != "labels"
    }
    return features, [torch.tensor([ids], device=device) for ids in sequences]


@pytest.mark.parametrize("name", DECODERS)
@pytest.mark.parametrize("lengths_given", (False, True))
def test_padding_free_batch(device, name, lengths_given):
    """Sequences in one row, told apart by position ids alone, or by the collator's cu_seq_lens too; the eager models
    see them one by one."""
    reference, eager, flash = build_three(name, torch.bfloat16, device)
    errors = Errors()
    for _ in range(DRAWS):
        features, sequences = packed(device, (33, 1, 70, 52))
        if not lengths_given:
            features = {key: features[key] for key in ("input_ids", "position_ids")}
        weights = torch.randn(1, features["input_ids"].shape[1], VOCABULARY, device=device) * 0.1
        results = []
        for model in (reference, eager):
            model.zero_grad()
            logits = torch.cat([model(input_ids=ids).logits for ids in sequences], dim=1)
            logits.backward(weights.to(logits.dtype))
            results.append((logits.detach().double(), gradients_of(model)))
        flash.zero_grad()
        logits = flash(**features).logits
        logits.backward(weights.to(logits.dtype))
        errors.add(*results, (logits.detach().double(), gradients_of(flash)))
    assert errors.outside() == {}


@torch.no_grad()
@pytest.mark.parametrize("name", DECODERS)
def test_decoding_with_left_padding(device, name):
    """A prompt, then one token, then several (as speculative decoding does) on transformers' own cache."""
    models = build_three(name, torch.bfloat16, device)
    mask = padding_mask(device, "left")
    ids = torch.randint(1, VOCABULARY, mask.shape, device=device) * mask
    parts = (ids.split([SEQLEN - 6, 1, 5], dim=1), (SEQLEN - 6, SEQLEN - 5, SEQLEN))
    results = []
    for model in models:
        cache, logits = None, []
        for part, seen in zip(*parts):
            output = model(input_ids=part, attention_mask=mask[:, :seen], past_key_values=cache, use_cache=True)
            cache = output.past_key_values
            logits.append(output.logits)
        results.append((torch.cat(logits, dim=1)[mask.bool()].double(), {}))
    errors = Errors()
    errors.add(*results)
    assert errors.outside() == {}


@pytest.mark.parametrize("use_reentrant", (False, True))
def test_gradient_checkpointing_with_attention_dropout(device, use_reentrant):
    """transformers recomputes every layer in the backward, with the dropout of the forward."""
    model = build("llama", FLASH, torch.bfloat16, device, attention_dropout=0.2).train()
    ids, mask, weights = batch(device, "right")
    results = []
    for enabled in (False, True):
        if enabled:
            model.gradient_checkpointing_enable({"use_reentrant": use_reentrant})
        torch.manual_seed(5)
        results.append(step(model, ids, mask, weights))
    assert torch.equal(results[0][0], results[1][0])
    assert all(torch.equal(results[0][1][name], gradient) for name, gradient in results[1][1].items())


def test_float32_model_under_autocast(device):
    """Mixed precision training: weights in float32, matrix products and attention in bfloat16."""
    reference = build("llama", "eager", torch.float32, device)
    models = [
        build("llama", attention, torch.float32, device, reference.state_dict()) for attention in ("eager", FLASH)
    ]
    errors = Errors()
    for _ in range(DRAWS):
        arguments = batch(device, "right")
        expected = step(reference, *arguments)
        with torch.autocast(device, torch.bfloat16):
            errors.add(expected, *(step(model, *arguments) for model in models))
    assert errors.outside() == {}
