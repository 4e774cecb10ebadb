"""Masks of transformers' models that are no windows, in "fa_native": images, prefixes, chunks, packed rows, functions.

As data against the dense masks that eager attention gets, and models against eager attention.
"""

from __future__ import annotations

import inspect

import pytest
import torch

transformers = pytest.importorskip("transformers", reason="transformers is not installed")
masking_utils = pytest.importorskip("transformers.masking_utils", reason="no AttentionMaskInterface")

from transformers_models import VOCABULARY, cache_argument

import flash_attn.integrations.transformers as ours
from flash_attn import AttentionMask
from flash_attn.integrations import mask_functions

NAME, SEQLEN, WINDOW, CHUNK = "fa_native", 24, 7, 5
CACHE = cache_argument()
if "block_sequence_ids" not in inspect.signature(masking_utils.create_causal_mask).parameters:
    pytest.skip("this transformers has no block_sequence_ids", allow_module_level=True)


@pytest.fixture(autouse=True)
def _registered():
    ours.register()


def blocks_of(*images, batch=2, n=SEQLEN):
    """block_sequence_ids of images [begin, end), the same in all rows."""
    ids = torch.full((batch, n), -1)
    for index, (begin, end) in enumerate(images):
        ids[:, begin:end] = index
    return ids


IMAGES = {"block_sequence_ids": blocks_of((2, 9), (9, 12), (15, 24))}
PACKED = torch.cat([torch.arange(11), torch.arange(13)]).expand(2, -1)
PREFIX = torch.where(torch.arange(SEQLEN) < torch.tensor([[9], [16]]), 0, -1)


def overlay(ids, window):
    return {
        "or_mask_function": masking_utils.blockwise_overlay(ids),
        "and_mask_function": masking_utils.sliding_window_overlay(window),
    }


CASES = {  # function that makes the mask, its options, whether ranges can say it
    "images": ("causal", IMAGES, True),
    "images in a window": ("causal", overlay(IMAGES["block_sequence_ids"], WINDOW), True),
    "images or a window": ("sliding_window_causal", IMAGES, True),
    "a prefix": ("causal", {"block_sequence_ids": PREFIX}, True),
    "no image": ("causal", {"block_sequence_ids": blocks_of()}, True),
    "a block in two parts": ("causal", {"block_sequence_ids": blocks_of((2, 5), (9, 12)).clamp(max=0)}, False),
    "blocks in another order": ("causal", {"block_sequence_ids": 7 - blocks_of((2, 5), (5, 12))}, False),
    "chunks": ("chunked_causal", {}, True),
    "chunks and images": ("chunked_causal", IMAGES, True),
    "packed images": ("causal", {**IMAGES, "position_ids": PACKED}, True),
    "packed chunks": ("chunked_causal", {"position_ids": PACKED}, True),
    "packed windows with images": ("sliding_window_causal", {**IMAGES, "position_ids": PACKED}, True),
    "a function": ("causal", {"or_mask_function": lambda b, h, q, k: (q + k) % 5 == 0}, False),
    "a function of both sides": ("bidirectional", {"and_mask_function": lambda b, h, q, k: (q - k).abs() < 4}, False),
}


def make(kind, options, attention, tokens, **given):
    config = transformers.LlamaConfig(num_hidden_layers=1, hidden_size=8, num_attention_heads=1)
    config.sliding_window, config.attention_chunk_size, config._attn_implementation = WINDOW, CHUNK, attention
    arguments = {"config": config, "inputs_embeds": torch.zeros(2, SEQLEN, 8), "attention_mask": tokens, CACHE: None}
    return getattr(masking_utils, f"create_{kind}_mask")(**{**arguments, **options, **given})


@pytest.mark.parametrize("name", CASES)
@pytest.mark.parametrize("side", (None, "left", "right"))
def test_masks(name, side):
    kind, options, has_ranges = CASES[name]
    if not set(options) <= set(inspect.signature(getattr(masking_utils, f"create_{kind}_mask")).parameters):
        pytest.skip(f"this transformers has no {', '.join(options)} for {kind}")
    tokens = None
    if side is not None:
        tokens = torch.ones(2, SEQLEN, dtype=torch.long)
        tokens[1, slice(0, 3) if side == "left" else slice(20, None)] = 0
    mask, dense = (make(kind, options, attention, tokens) for attention in (NAME, "sdpa"))
    assert isinstance(mask, AttentionMask) and mask.ndim == 4
    seen = mask.to_dense().expand(2, -1, -1, -1)
    rows = slice(None) if tokens is None else tokens.bool()  # what padding sees does not matter
    assert torch.equal(seen[:, 0][rows], dense[:, 0][rows])
    assert (mask.factors.bits is None) == has_ranges


def test_a_prefix_with_padding_behind_it():
    """Tokens of padding have the same ids as the prefix, and another run of them."""
    ids, tokens = PREFIX.clone(), torch.ones(2, SEQLEN, dtype=torch.long)
    ids[0, 20:], tokens[0, 20:] = 0, 0
    mask, dense = (make("causal", {"block_sequence_ids": ids}, x, tokens) for x in (NAME, "sdpa"))
    assert mask.factors.bits is None and torch.equal(mask.to_dense()[:, 0][tokens.bool()], dense[:, 0][tokens.bool()])


@pytest.mark.parametrize("new", (1, 4))
@pytest.mark.parametrize("kind", ("causal", "chunked_causal", "sliding_window_causal"))
def test_cached_keys(new, kind):
    """Queries after the first ones; one query gets a mask of tokens."""
    function = {
        "causal": masking_utils.causal_mask_function,
        "chunked_causal": masking_utils.chunked_causal_mask_function(CHUNK, torch.tensor([0, 3])),
        "sliding_window_causal": masking_utils.sliding_window_causal_mask_function(WINDOW),
    }[kind]
    function = masking_utils.or_masks(function, masking_utils.blockwise_overlay(blocks_of((13, 16), (17, 20))))
    for offset in (9, torch.tensor(9)):
        sizes = {"batch_size": 2, "q_length": new, "kv_length": 14, "q_offset": offset + 6, "kv_offset": 6}
        tokens = torch.arange(SEQLEN) >= torch.tensor([[0], [8]])
        found = ours.padding_mask(**sizes, mask_function=function, attention_mask=tokens, device="cpu")
        dense = masking_utils.sdpa_mask(
            **sizes, mask_function=function, attention_mask=tokens, allow_is_causal_skip=False
        )
        seen = found[:, None, None] if new == 1 else found.to_dense()
        assert torch.equal(seen.expand_as(dense), dense)


def test_unknown_parts_are_evaluated():
    with pytest.raises(mask_functions._NoRanges):
        mask_functions._ranges(lambda b, h, q, k: q >= k, None)


# ---- models ----

SIZES = {"hidden_size": 64, "intermediate_size": 64, "num_attention_heads": 4, "num_hidden_layers": 2}
TEXT = {
    "vocab_size": VOCABULARY, "num_key_value_heads": 2, "head_dim": 16, "initializer_range": 0.2, "pad_token_id": 0,
    "max_position_embeddings": 128, "sliding_window": WINDOW, **SIZES,
    "layer_types": ["sliding_attention", "full_attention"],
}  # fmt: skip
VISION = {"image_size": 28, "patch_size": 14, **SIZES}
GEMMA = {**{key: x for key, x in TEXT.items() if key not in ("sliding_window", "layer_types")}, "model_type": "gemma"}
GEMMA4 = {
    **TEXT, "hidden_size_per_layer_input": 0, "global_head_dim": 16, "use_bidirectional_attention": "vision",
    "num_global_key_value_heads": 2,
}  # fmt: skip
LLAMA4 = {
    **TEXT, "layer_types": ["chunked_attention", "full_attention"], "attention_chunk_size": CHUNK,
    "sliding_window": None, "intermediate_size_mlp": 64, "num_local_experts": 1, "num_experts_per_tok": 1,
    "moe_layers": [], "no_rope_layers": [1, 0],
}  # fmt: skip
MODELS = {  # configuration, its options, name of the types of tokens, their values in images and in text
    "gemma3": ("Gemma3Config", {"text_config": TEXT, "vision_config": VISION}, ("token_type_ids", 1, 0)),
    "gemma4": ("Gemma4Config", {"text_config": GEMMA4, "vision_config": None}, ("mm_token_type_ids", 1, 0)),
    "paligemma": ("PaliGemmaConfig", {"text_config": GEMMA, "vision_config": VISION}, ("token_type_ids", 0, 1)),
    "llama4": ("Llama4TextConfig", LLAMA4, None),
}  # fmt: skip


def build(name, attention, device):
    config_class, options, types = MODELS[name]
    if not hasattr(transformers, config_class):
        pytest.skip(f"this transformers has no {config_class}")
    config = getattr(transformers, config_class)(**options)
    for ids in ("image_token_id", "image_token_index", "video_token_id", "audio_token_id", "boi_token_id"):
        if hasattr(config, ids):  # no token of these here: their features are the vision tower's matter
            setattr(config, ids, VOCABULARY - 1)
    auto = transformers.AutoModelForCausalLM if types is None else transformers.AutoModelForImageTextToText
    torch.manual_seed(1)
    model = auto.from_config(config, attn_implementation=attention, dtype=torch.float32)
    return model.to(device, torch.float32 if device == "cpu" else torch.bfloat16).eval()


def inputs_of(name, device, side=None):
    torch.manual_seed(2)
    ids = torch.randint(1, VOCABULARY - 1, (2, SEQLEN), device=device)
    given, types = {"input_ids": ids}, MODELS[name][2]
    if types is not None:
        key, image, text = types
        kinds = torch.full_like(ids, text)
        kinds[:, 0 if name == "paligemma" else 3 : 14] = image
        given[key] = kinds
    if side is not None:
        given["attention_mask"] = torch.ones_like(ids)
        given["attention_mask"][1, slice(0, 2) if side == "left" else slice(21, None)] = 0
    return given


@pytest.mark.parametrize("name", MODELS)
@pytest.mark.parametrize("side", (None, "left", "right"))
def test_models(device, name, side):
    """Logits and the gradient of the first layer's keys."""
    results = {}
    given = inputs_of(name, device, side)
    kept = given.get("attention_mask", torch.ones_like(given["input_ids"])).bool()
    labels = given["input_ids"].masked_fill(
        ~kept | (kept.cumsum(1) == 1), -100
    )  # padding would predict the first token
    for attention in ("eager", NAME):
        model = build(name, attention, device).train()
        result = model(**given, labels=labels)
        result.loss.backward()
        gradients = {key: x.grad for key, x in model.named_parameters() if x.grad is not None and "k_proj" in key}
        results[attention] = (result.logits[kept], *gradients.values())
        assert len(gradients) >= 2
    allowed = 1e-4 if device == "cpu" else 5e-2
    for eager, mine in zip(*results.values()):
        assert (mine.double() - eager.double()).norm() <= allowed * eager.double().norm()


@pytest.mark.parametrize("name", MODELS)
def test_images_and_chunks_matter(name):
    """The models above see more, or less, than a causal mask shows."""
    given = inputs_of(name, "cpu")
    model = build(name, NAME, "cpu")
    expected = model(**given).logits
    if MODELS[name][2] is None:
        model.config.attention_chunk_size = SEQLEN
        others = model(**given).logits
    else:
        key, _, text = MODELS[name][2]
        others = model(**{**given, key: torch.full_like(given[key], text)}).logits
    assert (others - expected).abs().max() > 1e-3


@pytest.mark.devices("cpu")  # float32, where both agree to rounding
@pytest.mark.parametrize("name", MODELS)
@pytest.mark.parametrize("cache", ("dynamic", "static"))
def test_generate(device, name, cache):
    """Token for token."""
    given = inputs_of(name, device, "left")
    options = {"max_new_tokens": 12, "min_new_tokens": 12, "do_sample": False, "disable_compile": True}
    options["cache_implementation"] = None if cache == "dynamic" else "static"
    tokens = [build(name, attention, device).generate(**given, **options) for attention in ("eager", NAME)]
    assert torch.equal(*tokens)


@pytest.mark.devices("cpu")
def test_a_compiled_step_of_chunks(device):
    """Whose mask is evaluated: compiled code cannot tell chunks from a window."""
    ids = inputs_of("llama4", device)["input_ids"]
    results = {}
    for attention in ("eager", NAME):
        model = build("llama4", attention, device)
        cache = transformers.StaticCache(config=model.config, max_cache_len=40)
        with torch.no_grad():
            model(input_ids=ids, **{CACHE: cache})
            step = torch.compile(model.forward, backend="aot_eager") if attention == NAME else model
            logits = [step(input_ids=ids[:, i : i + 1], **{CACHE: cache}).logits for i in range(7)]
        results[attention] = torch.cat(logits, 1)
    torch.testing.assert_close(results[NAME], results["eager"], atol=1e-3, rtol=1e-3)


@pytest.mark.devices("cpu")
def test_compiled_images(device):
    given = inputs_of("gemma3", device, "left")
    kept = given["attention_mask"].bool()
    model, eager = build("gemma3", NAME, device), build("gemma3", "eager", device)
    with torch.no_grad():
        logits = torch.compile(model.forward, backend="aot_eager")(**given).logits
        torch.testing.assert_close(logits[kept], eager(**given).logits[kept], atol=1e-3, rtol=1e-3)


# ---- masks of scores ----


class Layer(torch.nn.Module):
    is_causal = True


@pytest.mark.parametrize("kind", ("bool", "numbers", "of heads"))
def test_masks_of_scores(device, kind):
    """Of a model or of the caller: they say all, causal too. Fewer columns than keys are those of the first ones."""
    dtype = torch.float32 if device == "cpu" else torch.bfloat16
    q, k, v = (torch.randn(2, h, SEQLEN, 16, device=device, dtype=dtype) for h in (4, 2, 2))
    seen = torch.rand(2, 4 if kind == "of heads" else 1, SEQLEN, 20, device=device) < 0.6
    seen[..., 0] = True
    mask = torch.where(seen, 0.0, torch.finfo(dtype).min).to(dtype) if kind == "numbers" else seen
    layer = Layer()
    results = [ours.attention(layer, q, k, v, mask, sliding_window=3)[0] for _ in range(2)]
    expected = torch.nn.functional.scaled_dot_product_attention(
        q.float(), k[:, :, :20].float(), v[:, :, :20].float(), attn_mask=seen, enable_gqa=True
    ).transpose(1, 2)
    for out in results:
        torch.testing.assert_close(out.float(), expected, atol=1e-5 if device == "cpu" else 2e-2, rtol=1e-2)
