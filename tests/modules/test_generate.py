"""A real client: text generation by Hugging Face transformers gives the tokens that its own `eager` attention gives.

The models are small and random. Where the two best tokens of a step are almost equal, half precision decides between
them by rounding; so the prompts are the candidates whose every step has a clear winner in float32.

transformers refuses flash_attention_2 without a GPU. On the CPU its check is replaced, all else is its own code; but
continuous batching takes the path with a block table (`flash_attn_with_kvcache`) and CUDA graphs on a GPU only.
"""

from __future__ import annotations

import dataclasses
import functools
import os

os.environ.setdefault("HF_HUB_OFFLINE", "1")  # nothing here needs a download

import pytest
import torch

transformers = pytest.importorskip("transformers")

import flash_attn

NEW_TOKENS = 12
LENGTHS = (20, 1, 37, 3, 64)
CANDIDATES = 24
CLEAR = 0.05  # of logits with a standard deviation of 1; float16 moves them by 0.003 (standard deviation)
FUNCTIONS = ("flash_attn_func", "flash_attn_varlen_func", "flash_attn_with_kvcache")


@pytest.fixture
def calls(device, monkeypatch):
    """Lets transformers choose flash_attention_2 -> {function of ours: calls}."""
    utils = transformers.modeling_flash_attention_utils
    if device == "cpu":
        monkeypatch.setattr(utils, "is_flash_attn_2_available", lambda *args, **options: True)
        monkeypatch.setattr(transformers.PreTrainedModel, "_flash_attn_can_dispatch", lambda *args, **options: True)
    elif not transformers.utils.is_flash_attn_2_available():
        pytest.skip("transformers does not find an installed distribution flash_attn")
    counts = dict.fromkeys(FUNCTIONS, 0)

    def counted(name, function):
        @functools.wraps(function)
        def call(*args, **options):
            counts[name] += 1
            return function(*args, **options)

        return call

    for name in FUNCTIONS:
        monkeypatch.setattr(flash_attn, name, counted(name, getattr(flash_attn, name)))
    monkeypatch.setattr(utils, "_loaded_implementation", None)  # so that it imports the functions now
    return counts


def make_model(kind, implementation, device, dtype=None):
    """The same weights on every call; float16 on the GPU by default."""
    options = {"sliding_window": 16} if kind == "Mistral" else {}
    config = getattr(transformers, f"{kind}Config")(
        vocab_size=199, hidden_size=128, intermediate_size=256, num_hidden_layers=3, num_attention_heads=4,
        num_key_value_heads=2, head_dim=32, max_position_embeddings=512, initializer_range=0.1,
        tie_word_embeddings=False, pad_token_id=0, bos_token_id=1, eos_token_id=None, **options,
    )  # fmt: skip
    torch.manual_seed(0)
    model = getattr(transformers, f"{kind}ForCausalLM")(config).eval()
    with torch.no_grad():  # transformers makes the padding token's embedding 0: a stale input would look like NaN
        model.get_input_embeddings().weight[0].normal_(std=0.1)
    model.to(device, dtype or (torch.float32 if device == "cpu" else torch.float16))
    model.set_attn_implementation(implementation)
    return model


def greedy(**options):
    return transformers.GenerationConfig(
        max_new_tokens=NEW_TOKENS, do_sample=False, pad_token_id=0, disable_compile=True, **options
    )


def clear_prompts(kind, device):
    """One prompt of each length."""
    model, prompts = make_model(kind, "eager", device, torch.float32), []
    generator = torch.Generator().manual_seed(1)
    for length in LENGTHS:
        ids = torch.randint(3, 199, (CANDIDATES, length), generator=generator).to(device)
        config = greedy(return_dict_in_generate=True, output_logits=True)
        logits = torch.stack(
            model.generate(ids, attention_mask=torch.ones_like(ids), generation_config=config).logits, dim=1
        )
        best = logits.topk(2, dim=-1).values
        gaps = (best[..., 0] - best[..., 1]).amin(dim=1)
        assert gaps.max() > CLEAR, f"no clear prompt of {length} tokens"
        prompts.append(ids[gaps.argmax()].tolist())
    return prompts


@functools.cache
def prompts_and_eager_tokens(kind, device):
    """(prompts, the new tokens of each, generated alone by eager attention)."""
    prompts = clear_prompts(kind, device)
    model, results = make_model(kind, "eager", device), []
    for prompt in prompts:
        ids = torch.tensor([prompt], device=device)
        sequence = model.generate(ids, attention_mask=torch.ones_like(ids), generation_config=greedy())[0]
        results.append(sequence[len(prompt) :].tolist())
    assert len({tuple(tokens) for tokens in results}) == len(prompts), "the prompts must give different tokens"
    return prompts, results


def left_padded(prompts, device):
    longest = max(map(len, prompts))
    ids = torch.tensor([[0] * (longest - len(prompt)) + prompt for prompt in prompts], device=device)
    mask = torch.tensor([[0] * (longest - len(p)) + [1] * len(p) for p in prompts], device=device)
    return ids, mask


@pytest.mark.parametrize("kind", ("Llama", "Mistral"))
@pytest.mark.parametrize("cache", ("dynamic", "static"))
def test_generate_of_a_left_padded_batch(device, calls, kind, cache):
    """Mistral has a sliding window of 16 tokens."""
    prompts, expected = prompts_and_eager_tokens(kind, device)
    ids, mask = left_padded(prompts, device)
    model = make_model(kind, "flash_attention_2", device)
    assert model.config._attn_implementation == "flash_attention_2"
    config = greedy(**({"cache_implementation": "static"} if cache == "static" else {}))
    sequences = model.generate(ids, attention_mask=mask, generation_config=config)
    assert [row[ids.shape[1] :].tolist() for row in sequences] == expected
    assert calls["flash_attn_varlen_func"] == 3 * NEW_TOKENS


def continuous_batching(page_size, **options):
    """The configuration, whose field for the page size has had two names.

    Without asynchronous batching: where the GPU is slower than the host, as with other processes, its captured graphs
    read inputs of another step (transformers 5.17; its eager and sdpa attention then fail by a device assertion).
    """
    config = transformers.ContinuousBatchingConfig
    names = {field.name for field in dataclasses.fields(config)}
    size = {"page_size" if "page_size" in names else "block_size": page_size}
    if "use_async_batching" in names:
        options["use_async_batching"] = False
    return config(num_blocks=4096 // page_size, max_batch_tokens=128, **size, **options)


@pytest.mark.parametrize("page_size", (16, 256))
@pytest.mark.parametrize("graphs", (False, True))
def test_generate_batch(device, calls, page_size, graphs):
    """Continuous batching: prompts enter and leave a batch while others decode, on a paged cache."""
    if device == "cpu" and graphs:
        pytest.skip("CUDA graphs need a GPU")
    if not hasattr(transformers, "ContinuousBatchingConfig"):
        pytest.skip("this transformers has no continuous batching")
    if device == "cpu" and tuple(map(int, transformers.__version__.split(".")[:2])) < (5, 23):
        pytest.importorskip("psutil", reason="this transformers sees no memory for a cache on the CPU without psutil")
    prompts, expected = prompts_and_eager_tokens("Llama", device)
    model = make_model("Llama", "flash_attention_2", device)
    results = model.generate_batch(
        prompts * 2,
        generation_config=greedy(eos_token_id=-1),
        continuous_batching_config=continuous_batching(page_size, use_cuda_graph=graphs),
        progress_bar=False,
    )
    order = sorted(results, key=lambda name: int(name.rsplit("_", 1)[1]))
    tokens = [results[name].generated_tokens for name in order]
    wrong = {i: got for i, (got, right) in enumerate(zip(tokens, expected * 2)) if got != right}
    assert not wrong and len(tokens) == 2 * len(expected), f"{wrong} instead of {expected} twice"
    assert calls["flash_attn_varlen_func"] > 0
    if device == "cuda":  # on the CPU transformers takes it or not, by whether the machine has a GPU
        assert calls["flash_attn_with_kvcache"] > 0
