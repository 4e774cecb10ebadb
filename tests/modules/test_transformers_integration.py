"""flash_attn.integrations.transformers: models of transformers with attn_implementation="fa_native" against "eager".

On the CPU in float32, where both agree to rounding and generate the same tokens. On the GPU in bfloat16, where the
largest error against eager in float32 is at most twice that of eager in bfloat16.
"""

from __future__ import annotations

import pytest
import torch

transformers = pytest.importorskip("transformers", reason="transformers is not installed")
pytest.importorskip("transformers.masking_utils", reason="this transformers has no AttentionMaskInterface")

from transformers_models import MODELS, VOCABULARY, WINDOW, build, cache_argument

import flash_attn
import flash_attn.integrations.transformers as ours
from flash_attn.integrations import token_layout

NAME, SEQLEN, NEW_TOKENS = "fa_native", 20, 14
CACHE = cache_argument()


@pytest.fixture(autouse=True)
def _registered():
    ours.register()


def dtype_of(device):
    return torch.float32 if device == "cpu" else torch.bfloat16


def ids_of(device, batch=3, seqlen=SEQLEN):
    return torch.randint(1, VOCABULARY, (batch, seqlen), device=device)


def mask_of(ids, side):
    """None, or padding on a side; "holes" has padding amid the tokens, "row" a row of nothing else."""
    if side is None:
        return None
    mask = torch.ones_like(ids)
    if side == "left":
        mask[0, :7], mask[2, :3] = 0, 0
    elif side == "right":
        mask[0, 13:], mask[2, 18:] = 0, 0
    elif side == "holes":
        mask[0, 5:9], mask[1, :2], mask[2, 17:] = 0, 0, 0
    else:
        mask[1] = 0
    return mask


def check_against_eager(name, device, run, allowed=1e-4):
    """run(model) -> tensors, of all three models."""
    results = {
        key: [x.double() for x in run(build(name, attention, device, dtype))]
        for key, attention, dtype in (
            ("exact", "eager", torch.float32),
            ("eager", "eager", dtype_of(device)),
            ("ours", NAME, dtype_of(device)),
        )
    }
    for exact, eager, mine in zip(*results.values()):
        error = (mine - exact).norm().item()
        limit = 2 * (eager - exact).norm().item() + allowed * exact.norm().item() * (device == "cpu")
        assert error <= limit, (error, limit)
    return results


# ---- registration ----


@pytest.mark.parametrize("name", ("flash_native", "my_sdpa", "paged|x", "org/kernel", "eager2"))
def test_names_that_mean_something_else(name):
    with pytest.raises(ValueError, match="^name: expected one without"):
        ours.register(name)


def test_another_name():
    ours.register("other_name")
    assert build("gpt_oss", "other_name").config._attn_implementation == "other_name"


# ---- logits and gradients ----


@pytest.mark.parametrize("name", MODELS)
@pytest.mark.parametrize("side", (None, "left", "right", "holes"))
def test_logits(device, name, side):
    if side == "holes" and name not in ("llama", "deepseek_v3"):
        pytest.skip("eager's window counts columns, ours tokens")
    ids = ids_of(device)
    mask = mask_of(ids, side)
    kept = torch.ones_like(ids).bool() if mask is None else mask.bool()

    def run(model):
        with torch.no_grad():
            return [model(input_ids=ids, attention_mask=mask).logits[kept]]

    check_against_eager(name, device, run)


@pytest.mark.devices("cpu")  # float32, which the kernels do not take: test_gradients
@pytest.mark.parametrize("name", ("gpt_oss", "llama", "gemma2", "deepseek_v3"))
@pytest.mark.parametrize("side", (None, "left", "right"))
def test_training(device, name, side):
    """Some steps of AdamW: the gradients of each at the parameters that eager attention leads to in float32.

    Separate steps would diverge: AdamW makes much of the rounding of gradients near 0.
    """
    ids = ids_of(device)
    mask = mask_of(ids, side)
    labels = ids.clone()
    if mask is not None:  # nor the first token of a row, which padding would predict
        labels[(mask == 0) | (mask.cumsum(1) == 1)] = -100
    models = [build(name, attention, device) for attention in ("eager", NAME)]
    optimizer = torch.optim.AdamW(models[0].parameters(), lr=1e-3)
    losses = []
    for _ in range(3):
        for model in models:
            model.zero_grad()
            loss = model.train()(input_ids=ids, attention_mask=mask, labels=labels).loss
            loss.backward()
            losses.append(loss.item())
        for (key, right), mine in zip(models[0].named_parameters(), models[1].parameters()):
            if right.grad is None:
                continue
            error = (mine.grad - right.grad).norm()
            assert error <= 1e-3 * right.grad.norm() + 1e-6, key
            assert name != "gpt_oss" or "sinks" not in key or right.grad.norm() > 1e-5
        optimizer.step()
        models[1].load_state_dict(models[0].state_dict())
    assert losses[0] > losses[-1] and abs(losses[-1] - losses[-2]) < 1e-4


@pytest.mark.parametrize("name", ("gpt_oss", "gemma2", "deepseek_v3"))
def test_gradients(device, name):
    ids, weights = ids_of(device), torch.randn(3, SEQLEN, VOCABULARY, device=device)
    mask = mask_of(ids, "left")
    weights *= mask[..., None]

    def run(model):
        logits = model(input_ids=ids, attention_mask=mask).logits
        logits.backward(weights.to(logits.dtype))
        of_attention = [x.grad for key, x in model.named_parameters() if "attn" in key]
        return [torch.cat([x.flatten().float() for x in of_attention])]

    check_against_eager(name, device, run, allowed=1e-3)


def test_what_the_kernels_get(device, monkeypatch):
    """V of another head dim, K/V heads that are not repeated, sinks that require grad."""
    seen = []

    def spy(q, k, v, **options):
        seen.append((tuple(q.shape), tuple(k.shape), tuple(v.shape), options))
        return real(q, k, v, **options)

    real = flash_attn.flash_attn_func
    monkeypatch.setattr(flash_attn, "flash_attn_func", spy)
    ids = ids_of(device)
    for name in ("deepseek_v3", "gpt_oss", "gemma2"):
        build(name, NAME, device, dtype_of(device))(input_ids=ids)
    mla, sliding, full, capped = seen[0], seen[2], seen[3], seen[4]
    assert mla[:3] == ((3, SEQLEN, 4, 192), (3, SEQLEN, 4, 192), (3, SEQLEN, 4, 128))
    assert sliding[:3] == ((3, SEQLEN, 4, 16), *[(3, SEQLEN, 2, 16)] * 2)
    assert sliding[3]["sinks"].requires_grad and sliding[3]["window_size"] == (7, 0)
    assert full[3]["window_size"] == (-1, -1) and capped[3]["softcap"] == 1.5 and capped[3]["sinks"] is None


# ---- generation ----


@pytest.mark.devices("cpu")
@pytest.mark.parametrize("name", MODELS)
@pytest.mark.parametrize("side", (None, "left"))
@pytest.mark.parametrize("cache", ("dynamic", "static"))
def test_generate(device, name, side, cache):
    ids = ids_of(device)
    mask = torch.ones_like(ids) if side is None else mask_of(ids, side)
    options = {} if cache == "dynamic" else {"cache_implementation": "static"}
    sequences = [
        build(name, attention).generate(
            ids, attention_mask=mask, max_new_tokens=NEW_TOKENS, min_new_tokens=NEW_TOKENS, do_sample=False, **options
        )
        for attention in ("eager", NAME)
    ]
    assert torch.equal(*sequences) and sequences[0].shape == (3, SEQLEN + NEW_TOKENS)


@pytest.mark.parametrize("name", MODELS)
@pytest.mark.parametrize("cache", ("dynamic", "static"))
def test_logits_of_every_step(device, name, cache):
    """A prompt, then given tokens one by one, over a cache; left padding."""
    ids = ids_of(device, seqlen=SEQLEN + NEW_TOKENS)
    mask = torch.ones_like(ids)
    mask[0, :7] = 0
    positions = (mask.cumsum(1) - 1).clamp(min=0)

    def run(model):
        past = transformers.DynamicCache(config=model.config)
        if cache == "static":
            past = transformers.StaticCache(config=model.config, max_cache_len=64)
        logits, bounds = [], [0, SEQLEN, *range(SEQLEN + 1, SEQLEN + NEW_TOKENS + 1)]
        with torch.no_grad():
            for begin, end in zip(bounds, bounds[1:]):
                out = model(
                    input_ids=ids[:, begin:end], attention_mask=mask[:, :end], position_ids=positions[:, begin:end],
                    **{CACHE: past}, use_cache=True,
                )  # fmt: skip
                logits.append(out.logits)
        return [torch.cat(logits, 1)[mask.bool()]]

    check_against_eager(name, device, run)


@pytest.mark.parametrize("name", ("gpt_oss", "llama", "mistral"))
@pytest.mark.parametrize("whole_mask", (False, True))
def test_static_cache_beyond_its_tokens(device, name, whole_mask):
    """No key after the tokens of a static cache is seen, with a mask of the tokens or one of the whole cache."""
    prompt, length = WINDOW - 3, 2 * WINDOW
    ids = ids_of(device, seqlen=length)
    mask = torch.ones_like(ids)
    mask[0, :2] = 0
    positions = (mask.cumsum(1) - 1).clamp(min=0)

    def run(model):
        past, logits = transformers.StaticCache(config=model.config, max_cache_len=length), []
        with torch.no_grad():
            for begin, end in ((0, prompt), *((i, i + 1) for i in range(prompt, length))):
                given = mask if whole_mask else mask[:, :end]
                out = model(
                    input_ids=ids[:, begin:end], attention_mask=given, position_ids=positions[:, begin:end],
                    **{CACHE: past}, use_cache=True,
                )  # fmt: skip
                logits.append(out.logits)
                for layer in past.layers if begin == 0 else ():
                    layer.keys[:, :, prompt:], layer.values[:, :, prompt:] = 3.0, 1000.0
        return [torch.cat(logits, 1)[mask.bool()]]

    check_against_eager(name, device, run)


@pytest.mark.parametrize("name", ("gpt_oss", "mistral"))
def test_a_compiled_step(device, name):
    """A decoding step over a static cache, traced whole: no value of a tensor is read."""
    ids = ids_of(device)
    mask = mask_of(ids, "left")
    step = torch.cat([mask, torch.ones_like(mask[:, :1])], 1)

    def run(model):
        past, forward = transformers.StaticCache(config=model.config, max_cache_len=40), model.forward
        if model.config._attn_implementation == NAME:
            forward = torch.compile(forward, backend="aot_eager", fullgraph=True)
        with torch.no_grad():
            model(input_ids=ids, attention_mask=mask, **{CACHE: past})
            return [forward(input_ids=ids[:, :1], attention_mask=step, **{CACHE: past}).logits]

    check_against_eager(name, device, run)
    torch._dynamo.reset()


# ---- packed sequences ----


@pytest.mark.parametrize("name", ("gpt_oss", "llama"))
@pytest.mark.parametrize("batch", (1, 2))
@pytest.mark.parametrize("use_cache", (False, True))
def test_packed_by_position_ids(device, name, batch, use_cache):
    """Sequences packed in rows are sequences alone. (Eager attention packs neither gpt_oss nor with a cache.)"""
    ids, lengths = ids_of(device, batch), (5, 12, 3)
    positions = torch.cat([torch.arange(n, device=device) for n in lengths]).expand(batch, -1)

    def run(model):
        with torch.no_grad():
            if model.config._attn_implementation == NAME:
                return [model(input_ids=ids, position_ids=positions, use_cache=use_cache).logits]
            return [torch.cat([model(input_ids=part).logits for part in ids.split(lengths, 1)], 1)]

    check_against_eager(name, device, run)


LENGTHS = ((5, 12, 3), (10, 4, 6), (20,))


def positions_of(lengths, device):
    return torch.cat([torch.arange(n, device=device) for n in lengths])[None]


def sequences_alone(model, ids, lengths):
    return torch.cat([model(input_ids=part).logits for part in ids.split(lengths, 1)], 1)


@pytest.mark.parametrize("mode", (torch.no_grad, torch.inference_mode))
@pytest.mark.parametrize("refill", (torch.Tensor.copy_, lambda x, new: x.data.copy_(new)))
def test_refilled_positions(device, mode, refill):
    """One tensor of positions for every batch, of other sequences and another number of rows each time."""

    def run(model):
        torch.manual_seed(2)
        with mode():
            positions, logits = positions_of(LENGTHS[0], device), []
            for lengths, batch in zip(LENGTHS, (1, 3, 2)):
                refill(positions, positions_of(lengths, device))
                ids = ids_of(device, batch)
                packed = model.config._attn_implementation == NAME
                logits.append(
                    model(input_ids=ids, position_ids=positions).logits
                    if packed
                    else sequences_alone(model, ids, lengths)
                )
        return logits

    check_against_eager("llama", device, run)


def test_models_that_share_positions(device):
    """A second model sees the positions as they are then, although inference tensors do not count their writes."""
    ids, results = ids_of(device, 1), []
    first, second = (build("llama", NAME, device, dtype_of(device)) for _ in range(2))
    with torch.inference_mode():
        positions = positions_of(LENGTHS[0], device)
        for new in (False, True):
            first(input_ids=ids, position_ids=positions.copy_(positions_of(LENGTHS[0], device)))
            positions.copy_(positions_of(LENGTHS[1], device))
            results.append(second(input_ids=ids, position_ids=positions.clone() if new else positions).logits)
    assert torch.equal(*results)


@pytest.mark.parametrize("side", (None, "holes"))
def test_a_training_step_after_inference(device, side):
    """With the very mask and positions of an inference before: what it read of them is no inference tensor."""
    ids = ids_of(device)
    positions = positions_of(LENGTHS[0], device)
    inputs = {"input_ids": ids, "position_ids": positions} if side is None else {"attention_mask": mask_of(ids, side)}
    model = build("llama", NAME, device, dtype_of(device))
    with torch.inference_mode():
        expected = model(**{"input_ids": ids, **inputs}).logits
    logits = model(**{"input_ids": ids, **inputs}).logits
    logits.sum().backward()
    assert all(x.grad is not None for x in model.parameters())
    kept = slice(None) if side is None else mask_of(ids, side).bool()
    torch.testing.assert_close(logits[kept], expected[kept], atol=1e-4 if device == "cpu" else 5e-2, rtol=1e-2)
    assert not vars(positions)  # which would be saved and copied with them


def test_packed_by_cu_seqlens(device):
    """As DataCollatorWithFlattening(return_flash_attn_kwargs=True) has them."""
    ids = ids_of(device, 1)
    positions = torch.cat([torch.arange(n, device=device) for n in (5, 12, 3)])[None]
    cu = torch.tensor([0, 5, 17, 20], dtype=torch.int32, device=device)
    lengths = {"cu_seq_lens_q": cu, "cu_seq_lens_k": cu, "max_length_q": 12, "max_length_k": 12}
    model = build("gpt_oss", NAME, device, dtype_of(device))
    expected = model(input_ids=ids, position_ids=positions).logits
    assert torch.equal(model(input_ids=ids, position_ids=positions, **lengths).logits, expected)
    assert not torch.allclose(model(input_ids=ids).logits, expected)


# ---- the function by itself ----


class Layer(torch.nn.Module):
    is_causal = True


def call(device, mask=None, causal=True, seqlen_k=SEQLEN, heads=4, layer=None, **options):
    generator = torch.Generator(device=device).manual_seed(3)
    q, k, v = (
        torch.randn(3, h, n, 16, generator=generator, device=device, dtype=dtype_of(device))
        for h, n in ((heads, SEQLEN), (2, seqlen_k), (2, seqlen_k))
    )
    return (q, k, v), ours.attention(layer or Layer(), q, k, v, mask, is_causal=causal, **options)[0]


@pytest.mark.parametrize("given,missing", (("cu_seq_lens_k", "cu_seq_lens_q"), ("cu_seq_lens_q", "cu_seq_lens_k")))
def test_lengths_of_one_side_alone(device, given, missing):
    cu = torch.tensor([0, 20, 60], dtype=torch.int32, device=device)
    with pytest.raises(TypeError, match=f"^{missing}: expected a Tensor, for the other of the two is given, got None$"):
        call(device, **{given: cu})


def test_dropout(device):
    torch.manual_seed(5)
    (q, k, v), out = call(device, dropout=0.5, scaling=0.3, softcap=2.0)
    torch.manual_seed(5)
    q, k, v = (x.transpose(1, 2) for x in (q, k, v))
    expected = flash_attn.flash_attn_func(q, k, v, dropout_p=0.5, softmax_scale=0.3, softcap=2.0, causal=True)
    assert torch.equal(out, expected) and not torch.equal(out, call(device)[1])


def test_a_row_of_padding_alone(device):
    mask = mask_of(torch.ones(3, SEQLEN, device=device, dtype=torch.long), "row").bool()
    out = call(device, mask)[1]
    assert torch.equal(out[[0, 2]], call(device)[1][[0, 2]]) and (out[1] == 0).all()


def test_cross_attention(device):
    """Keys with padding, queries without: all of them see the tokens of their row, whatever the lengths."""
    for seqlen_k in (SEQLEN, 31):
        mask = torch.ones(3, seqlen_k, dtype=torch.bool, device=device)
        mask[0, 9:], mask[1, 4:6] = False, False
        (q, k, v), out = call(device, mask, causal=False, seqlen_k=seqlen_k)
        for row in range(3):
            expected = torch.nn.functional.scaled_dot_product_attention(
                *(x[row : row + 1].float() for x in (q, k[:, :, mask[row]], v[:, :, mask[row]])), enable_gqa=True
            ).transpose(1, 2)
            torch.testing.assert_close(out[row : row + 1].float(), expected, atol=2e-2, rtol=1e-2)


def test_float32_norms(device):
    """Queries and keys that norms left in float32, with half precision values."""
    (q, k, v), out = call(device)
    mixed, _ = ours.attention(Layer(), q.double(), k.double(), v, None)
    assert mixed.dtype == v.dtype and torch.equal(mixed, out)


@pytest.mark.parametrize("mode", (torch.no_grad, torch.inference_mode))
def test_a_refilled_mask(device, mode):
    layers = Layer(), Layer()
    with mode():
        mask = torch.ones(3, SEQLEN, dtype=torch.bool, device=device)
        for first in (0, 5, 9):
            mask[1, :first] = False
            for layer in layers:
                assert torch.equal(call(device, mask, layer=layer)[1], call(device, mask.clone())[1])


@pytest.mark.parametrize("mode", (torch.no_grad, torch.inference_mode, torch.enable_grad))
def test_one_layout_for_all_layers(device, monkeypatch, mode):
    """The host reads a mask, or positions, once a forward, and once more where layers are computed again."""
    made = []

    def counted(name, real):
        def read(*args):
            made.append(name)
            return real(*args)

        return read

    reads = token_layout.PaddingLayout.__init__, token_layout._read_sequences, token_layout.tokens_of
    monkeypatch.setattr(token_layout.PaddingLayout, "__init__", counted("mask", reads[0]))
    monkeypatch.setattr(token_layout, "_read_sequences", counted("positions", reads[1]))
    monkeypatch.setattr(token_layout, "tokens_of", counted("tokens", reads[2]))
    model = build("llama", NAME, device, dtype_of(device), num_hidden_layers=4)
    with mode():
        ids = ids_of(device)
        for side in ("left", "right"):
            model(input_ids=ids, attention_mask=mask_of(ids, side))
        # Queries are gathered where the last column is padding, and all tokens where gradients are recorded.
        left = ["mask", "tokens"] if mode is torch.enable_grad else ["mask"]
        assert made == [*left, "mask", "tokens"]
        made.clear()
        positions = positions_of(LENGTHS[0], device)
        for _ in range(2):
            logits = model(input_ids=ids, position_ids=positions).logits
        assert made == ["positions"] * 2
    if mode is torch.enable_grad:
        model.train().gradient_checkpointing_enable({"use_reentrant": False})
        logits = model(input_ids=ids, position_ids=positions, use_cache=False).logits
        made.clear()
        logits.sum().backward()
        assert made == ["positions"]


def t5(device, attention):
    config = transformers.T5Config(
        vocab_size=VOCABULARY, d_model=32, d_kv=8, d_ff=32, num_layers=2, num_heads=4, dropout_rate=0.0,
        relative_attention_num_buckets=8, relative_attention_max_distance=16, decoder_start_token_id=0, pad_token_id=0,
        eos_token_id=1,
    )  # fmt: skip
    torch.manual_seed(1)
    model = transformers.T5ForConditionalGeneration._from_config(config, attn_implementation=attention)
    for table in (model.encoder, model.decoder):  # not the small numbers that training begins with
        torch.nn.init.normal_(table.block[0].layer[0].SelfAttention.relative_attention_bias.weight)
    return model.to(device).eval()


@pytest.mark.devices("cpu")  # in float32
@pytest.mark.parametrize("side", (None, "left", "right"))
def test_t5(device, side):
    """Gradients with those of the tables of position biases, and generated tokens, as eager attention has them."""
    ids, labels = ids_of(device), ids_of(device, seqlen=9)
    mask = mask_of(ids, side)
    models = [t5(device, attention) for attention in ("eager", NAME)]
    for model in models:
        model(input_ids=ids, attention_mask=mask, labels=labels).loss.backward()
    for (key, right), mine in zip(models[0].named_parameters(), models[1].parameters()):
        assert right.grad.norm() > 0, key
        torch.testing.assert_close(
            mine.grad, right.grad, rtol=1e-3, atol=1e-5, msg=lambda text, key=key: f"{key}: {text}"
        )
    options = {"max_new_tokens": 7, "min_new_tokens": 7, "do_sample": False}
    tokens = [model.generate(ids, attention_mask=mask, **options) for model in models]
    assert torch.equal(*tokens)


def test_position_bias_of_packed_sequences_and_pages_is_refused(device):
    bias, cu = torch.zeros(1, 4, SEQLEN, SEQLEN), torch.tensor([0, 60], dtype=torch.int32)
    with pytest.raises(NotImplementedError, match="^cu_seq_lens_q: expected None with position_bias, got Tensor"):
        call(device, position_bias=bias, cu_seq_lens_q=cu, cu_seq_lens_k=cu)


def test_unsupported_arguments_are_named(device):
    with pytest.raises(NotImplementedError, match="^head_mask: expected None, got Tensor"):
        call(device, head_mask=torch.zeros(1))
    with pytest.raises(NotImplementedError, match="^output_attentions: expected None, got bool"):
        call(device, output_attentions=True)
