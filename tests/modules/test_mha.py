"""The attention modules against plain PyTorch modules with the same parameters, and generation against one forward."""

from __future__ import annotations

import itertools

import pytest
import torch
from reference import assert_accurate, assert_gradient_accurate, attention

from flash_attn import AttentionMask
from flash_attn.context_parallel import CpPlan, LocalGroup
from flash_attn.modules.mha import (
    MHA,
    CrossAttention,
    FlashCrossAttention,
    FlashSelfAttention,
    LinearResidual,
    SelfAttention,
    get_alibi_slopes,
)
from flash_attn.utils.generation import InferenceParams

BATCH, SEQLEN, HEADS, HEAD_DIM = 2, 37, 4, 32
EMBED = HEADS * HEAD_DIM
LENGTHS = (5, 0, 20, 12)  # their sum is SEQLEN


def half(device):
    return torch.float16 if device == "cuda" else torch.float32


def boundaries(lengths, device):
    return torch.tensor([0, *itertools.accumulate(lengths)], dtype=torch.int32, device=device)


def rotated(x, dim, interleaved):
    """The first dim features of x (b, s, h, d), float64, turned by the angles of positions 0, 1, ..."""
    position = torch.arange(x.shape[1], device=x.device, dtype=torch.float64)
    angle = position[:, None] * 10000.0 ** -(torch.arange(0, dim, 2, device=x.device, dtype=torch.float64) / dim)
    head = x[..., :dim].double()
    pairs = head.unflatten(-1, (-1, 2)) if interleaved else head.unflatten(-1, (2, -1)).transpose(-1, -2)
    turned = torch.view_as_complex(pairs.contiguous()) * torch.polar(torch.ones_like(angle), angle)[:, None]
    turned = torch.view_as_real(turned)
    turned = turned.flatten(-2) if interleaved else turned.transpose(-1, -2).flatten(-2)
    return torch.cat([turned.to(x.dtype), x[..., dim:]], -1)


def plain_mha(module, parameters, x, x_kv=None, mask=None):
    """MHA.forward by definition, in the dtype of parameters (name -> tensor) and inputs."""
    dtype = x.dtype

    def linear(name, value):
        out = value @ parameters[f"{name}.weight"].t()
        return out + parameters[f"{name}.bias"] if f"{name}.bias" in parameters else out

    if module.cross_attn:
        q = linear("Wq", x).unflatten(-1, (-1, module.head_dim))
        k, v = linear("Wkv", x if x_kv is None else x_kv).unflatten(-1, (2, -1, module.head_dim)).unbind(2)
    else:
        heads = linear("Wqkv", x).unflatten(-1, (-1, module.head_dim))
        q, k, v = heads.split([module.num_heads, module.num_heads_kv, module.num_heads_kv], dim=2)
    if module.rotary_emb_dim:
        q, k = (rotated(y, module.rotary_emb_dim, module.rotary_emb.interleaved) for y in (q, k))
    inner = module.inner_cross_attn
    slopes, window = getattr(inner, "alibi_slopes", None), getattr(inner, "window_size", (-1, -1))
    options = {"causal": inner.causal, "scale": inner.softmax_scale, "dtype": dtype}
    if mask is None:
        out = attention(q, k, v, window=window, alibi_slopes=slopes, **options).out
    else:  # every sequence alone, without its masked keys; the tests keep the first keys
        outs = [attention(q[i : i + 1], k[i : i + 1, :n], v[i : i + 1, :n], **{**options, "causal": False}).out
                for i, n in enumerate(mask.sum(1).tolist())]  # fmt: skip
        out = torch.cat(outs)
    return linear("out_proj", out.flatten(-2).to(dtype))


def compare(module, x, **inputs):
    """Output and gradients of module against float64, plain PyTorch in the module's dtype being the yardstick."""
    call = {"key_padding_mask" if name == "mask" else name: value for name, value in inputs.items()}
    x = x.requires_grad_()
    out = module(x, **call)
    names, values = zip(*module.named_parameters())
    results = []
    for dtype in (torch.float64, x.dtype):
        parameters = {name: value.detach().to(dtype).requires_grad_() for name, value in zip(names, values)}
        source = x.detach().to(dtype).requires_grad_()
        cast = {name: value.to(dtype) if value.is_floating_point() else value for name, value in inputs.items()}
        results.append((plain_mha(module, parameters, source, **cast), [source, *parameters.values()]))
    (expected, exact_leaves), (yardstick, plain_leaves) = results
    assert_accurate(out, expected, yardstick)
    dout = torch.randn_like(out)
    grads = torch.autograd.grad(out, (x, *values), dout)
    exact = torch.autograd.grad(expected, exact_leaves, dout.double())
    rough = torch.autograd.grad(yardstick, plain_leaves, dout)
    for name, *triple in zip(("x", *names), grads, exact, rough):
        assert_gradient_accurate(*triple, f"d{name}")
    return out


MODULES = {
    "plain": {},
    "causal": {"causal": True},
    "grouped": {"num_heads_kv": 2, "causal": True},
    "one kv head": {"num_heads_kv": 1},
    "rotary": {"rotary_emb_dim": 16, "causal": True},
    "rotary interleaved": {"rotary_emb_dim": 32, "rotary_emb_interleaved": True},
    "rotary grouped": {"rotary_emb_dim": 24, "num_heads_kv": 2, "causal": True},
    "scale, no bias": {"softmax_scale": 0.3, "qkv_proj_bias": False, "out_proj_bias": False},
    "checkpointing": {"checkpointing": True, "causal": True},
    "checkpointing grouped": {"checkpointing": True, "num_heads_kv": 2},
    "alibi": {"use_alibi": True, "causal": True},
    "window": {"window_size": (9, 4)},
    "window grouped": {"window_size": (5, 0), "num_heads_kv": 2, "causal": True},
}


def cases(modules):
    """(name, whether by flash_attn) of modules, those by definition where they know the options."""
    needs_flash = {name for name, options in modules.items() if {"use_alibi", "window_size"} & set(options)}
    return [(name, flash) for name in modules for flash in (False, True) if flash or name not in needs_flash]


@pytest.mark.parametrize("name,flash", cases(MODULES))
def test_self_attention(device, name, flash):
    module = MHA(EMBED, HEADS, use_flash_attn=flash, device=device, dtype=half(device), **MODULES[name])
    compare(module, torch.randn(BATCH, SEQLEN, EMBED, device=device, dtype=half(device)))


@pytest.mark.parametrize("flash", (False, True), ids=("definition", "flash"))
@pytest.mark.parametrize("options", ({}, {"num_heads_kv": 2, "causal": True}), ids=("plain", "grouped"))
def test_cross_attention(device, flash, options):
    dtype = half(device)
    module = MHA(EMBED, HEADS, cross_attn=True, use_flash_attn=flash, device=device, dtype=dtype, **options)
    x, x_kv = (torch.randn(BATCH, n, EMBED, device=device, dtype=dtype) for n in (SEQLEN, 51))
    out = compare(module, x, x_kv=x_kv)
    if "causal" not in options:
        torch.testing.assert_close(module(x, x_kv, mixer_subset=slice(3, 9)), out[:, 3:9], rtol=2e-3, atol=2e-3)
        torch.testing.assert_close(module(x), module(x, x))


@pytest.mark.parametrize("cross", (False, True), ids=("self", "cross"))
def test_key_padding_mask(device, cross):
    module = MHA(EMBED, HEADS, cross_attn=cross, device=device, dtype=half(device))
    x = torch.randn(BATCH, SEQLEN, EMBED, device=device, dtype=half(device))
    lengths = torch.tensor([[SEQLEN - 8], [3]], device=device)
    compare(module, x, mask=torch.arange(SEQLEN, device=device) < lengths)


@pytest.mark.parametrize("causal", (False, True))
def test_masks_of_attention_by_definition(device, causal):
    """Masked keys at any place; queries that see no key have output 0; causal ends at the last key that is kept."""
    qkv = torch.randn(2, 6, 3, 2, 8, device=device)
    mask = torch.tensor([[0, 1, 1, 0, 1, 1], [1, 1, 1, 1, 0, 0]], device=device).bool()
    out = SelfAttention(causal=causal)(qkv, key_padding_mask=mask)
    for b in range(2):
        for i in range(6):
            seen = mask[b] & (torch.arange(6, device=device) <= i) if causal else mask[b]
            if not seen.any():
                assert not out[b, i].any()
                continue
            q, (k, v) = qkv[b : b + 1, i : i + 1, 0], qkv[b : b + 1, seen, 1:].unbind(2)
            torch.testing.assert_close(out[b, i].double(), attention(q, k, v).out[0, 0], rtol=1e-5, atol=1e-5)
    right_padded = torch.arange(6, device=device) < torch.tensor([[4], [6]], device=device)
    crossed = CrossAttention(causal=causal)(qkv[:, :3, 0], qkv[:, :, 1:], key_padding_mask=right_padded)
    for b, n in enumerate((4, 6)):
        k, v = qkv[b : b + 1, :n, 1:].unbind(2)
        expected = attention(qkv[b : b + 1, :3, 0], k, v, causal=causal).out
        torch.testing.assert_close(crossed[b : b + 1].double(), expected, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("options", ({}, {"num_heads_kv": 2}, {"use_alibi": True}), ids=("plain", "grouped", "alibi"))
def test_sequences_of_different_lengths(device, options):
    dtype = half(device)
    module = MHA(EMBED, HEADS, causal=True, use_flash_attn=True, device=device, dtype=dtype, **options)
    x = torch.randn(SEQLEN, EMBED, device=device, dtype=dtype)
    out = module(x, cu_seqlens=boundaries(LENGTHS, device), max_seqlen=max(LENGTHS))
    alone = torch.cat([module(part[None])[0] for part in x.split(LENGTHS)])
    torch.testing.assert_close(out, alone, rtol=2e-3, atol=2e-3)
    cross = MHA(EMBED, HEADS, cross_attn=True, use_flash_attn=True, device=device, dtype=dtype)
    keys = (9, 3, 7, 1)
    x_kv = torch.randn(sum(keys), EMBED, device=device, dtype=dtype)
    out = cross(
        x, x_kv, cu_seqlens=boundaries(LENGTHS, device), max_seqlen=20, cu_seqlens_k=boundaries(keys, device),
        max_seqlen_k=9,
    )  # fmt: skip
    alone = torch.cat([cross(a[None], b[None])[0] for a, b in zip(x.split(LENGTHS), x_kv.split(keys))])
    torch.testing.assert_close(out, alone, rtol=2e-3, atol=2e-3)


@pytest.mark.parametrize("cross", (False, True), ids=("self", "cross"))
def test_return_residual(device, cross):
    torch.manual_seed(0)
    module = MHA(EMBED, HEADS, cross_attn=cross, return_residual=True, device=device)
    plain = MHA(EMBED, HEADS, cross_attn=cross, device=device)
    plain.load_state_dict(module.state_dict())
    x, x_kv = torch.randn(2, BATCH, SEQLEN, EMBED, device=device).unbind(0)
    for inputs in ((x,), (x, x_kv)) if cross else ((x,),):
        out, residual = module(*inputs)
        assert torch.equal(out, plain(*inputs)) and residual is x
    linear = LinearResidual(4, 3, device=device)
    assert linear(x[..., :4])[1].shape[-1] == 4 and linear(x[..., :4])[0].shape[-1] == 3


GENERATING = {
    "plain": {},
    "rotary": {"rotary_emb_dim": 32},
    "rotary grouped": {"rotary_emb_dim": 16, "num_heads_kv": 2, "rotary_emb_interleaved": True},
    "odd rotary": {"rotary_emb_dim": 24},
    "xpos": {"rotary_emb_dim": 32, "rotary_emb_scale_base": 64},
    "alibi": {"use_alibi": True},
    "window": {"window_size": (6, 0)},
}


def skip_where_decoding_is_not_built(device):
    if device == "cuda":
        import flash_attn

        q, cache = torch.zeros(1, 1, 1, 32, device=device), torch.zeros(1, 4, 1, 32, device=device)
        try:
            flash_attn.flash_attn_with_kvcache(q.half(), cache.half(), cache.half())
        except NotImplementedError as error:
            pytest.skip(f"flash_attn_with_kvcache: {error}")


@pytest.mark.parametrize("name,flash", cases(GENERATING))
@torch.inference_mode()
def test_generation_equals_one_forward(device, name, flash):
    """A prompt, tokens one by one and a few at once, by the cache: as if computed together."""
    if flash:
        skip_where_decoding_is_not_built(device)
    dtype = half(device)
    module = MHA(
        EMBED, HEADS, causal=True, layer_idx=3, use_flash_attn=flash, device=device, dtype=dtype, **GENERATING[name]
    ).eval()
    x = torch.randn(BATCH, SEQLEN, EMBED, device=device, dtype=dtype)
    expected = module(x)
    params = InferenceParams(max_seqlen=SEQLEN + 3, max_batch_size=BATCH + 2, batch_size_offset=1)
    for allocated in (False, True):
        if allocated:
            params.reset(SEQLEN + 3, BATCH + 2)
            params.key_value_memory_dict[3] = module.allocate_inference_cache(BATCH + 2, SEQLEN + 3)
        outs = []
        for chunk in x.split([10, *[1] * 12, 5, *[1] * 10], dim=1):
            outs.append(module(chunk, inference_params=params))
            params.seqlen_offset += chunk.shape[1]
        torch.testing.assert_close(torch.cat(outs, 1), expected, rtol=3e-3, atol=3e-3)
    assert params.key_value_memory_dict[3].shape == (BATCH + 2, SEQLEN + 3, 2, module.num_heads_kv, HEAD_DIM)


@pytest.mark.parametrize("name", ("rotary", "odd rotary", "alibi"))
@torch.inference_mode()
def test_generation_of_sequences_of_different_lengths(device, name):
    skip_where_decoding_is_not_built(device)
    dtype, prompts = half(device), (10, 4)
    module = MHA(
        EMBED, HEADS, causal=True, layer_idx=0, use_flash_attn=True, device=device, dtype=dtype, **GENERATING[name]
    ).eval()
    x = torch.randn(BATCH, 16, EMBED, device=device, dtype=dtype)
    params = InferenceParams(max_seqlen=20, max_batch_size=BATCH)
    module(x[:, : max(prompts)], inference_params=params)  # what lies beyond the shorter prompt is overwritten
    params.seqlen_offset = max(prompts)
    params.lengths_per_sample = torch.tensor(prompts, dtype=torch.int32, device=device)
    for step in range(3):
        tokens = torch.stack([x[b, n + step] for b, n in enumerate(prompts)])[:, None]
        out = module(tokens, inference_params=params)
        for b, n in enumerate(prompts):
            expected = module(x[b : b + 1, : n + step + 1])[:, -1]
            torch.testing.assert_close(out[b], expected, rtol=3e-3, atol=3e-3)
        params.lengths_per_sample += 1
        params.seqlen_offset += 1
    params.reset(20, BATCH)
    assert params.seqlen_offset == 0 and not params.lengths_per_sample.any()


def test_inner_attention(device):
    """What the modules hand on: dropout in training alone, and every option of theirs."""
    dtype = half(device)
    qkv = torch.randn(BATCH, SEQLEN, 3, HEADS, HEAD_DIM, device=device, dtype=dtype)
    slopes = torch.tensor(get_alibi_slopes(HEADS), device=device)
    options = {"softmax_scale": 0.2, "window_size": (7, 2), "alibi_slopes": slopes, "deterministic": True}
    for causal, override in itertools.product((False, True), (None, False, True)):
        q, k, v = qkv.unbind(2)
        effective = causal if override is None else override
        expected = attention(q, k, v, causal=effective, window=(7, 2), alibi_slopes=slopes, scale=0.2).out
        flash = FlashSelfAttention(causal, attention_dropout=0.5, **options).eval()(qkv, override)
        cross = FlashCrossAttention(causal, attention_dropout=0.5, **options).eval()(q, qkv[:, :, 1:], override)
        for out in (flash, cross):
            torch.testing.assert_close(out.double(), expected, rtol=3e-3, atol=3e-3)
    dropping = FlashSelfAttention(attention_dropout=0.5).train()
    assert not torch.equal(dropping(qkv), dropping(qkv))
    dropping = SelfAttention(attention_dropout=0.5).train()
    assert not torch.equal(dropping(qkv), dropping(qkv))


def test_alibi_slopes():
    assert get_alibi_slopes(8) == [2.0**-i for i in range(1, 9)]
    assert get_alibi_slopes(1) == [2.0**-8]
    twelve = get_alibi_slopes(12)
    assert twelve[:8] == get_alibi_slopes(8) and twelve[8:] == get_alibi_slopes(16)[0:8:2]


def test_alibi_slopes_stay_exact_in_half_precision(device):
    module = MHA(12 * 16, 12, use_alibi=True, use_flash_attn=True, device=device).to(torch.bfloat16)
    assert module.out_proj.weight.dtype == torch.bfloat16
    for inner in (module.inner_attn, module.inner_cross_attn):
        assert inner.alibi_slopes.dtype == torch.float32
        assert torch.equal(inner.alibi_slopes, torch.tensor(get_alibi_slopes(12), device=device))
    assert not any("alibi" in name for name in module.state_dict())


def test_parameter_names():
    """Those of checkpoints made with FlashAttention-2's module."""
    assert set(MHA(32, 2, rotary_emb_dim=16).state_dict()) == {
        "Wqkv.weight", "Wqkv.bias", "out_proj.weight", "out_proj.bias",
    }  # fmt: skip
    assert {name.split(".")[0] for name in MHA(32, 2, cross_attn=True).state_dict()} == {"Wq", "Wkv", "out_proj"}


def test_bad_arguments(device):
    x = torch.randn(1, 4, 32, device=device)
    params = InferenceParams(max_seqlen=3, max_batch_size=1)
    plain = MHA(32, 2, layer_idx=0, device=device)
    flash = MHA(32, 2, use_flash_attn=True, layer_idx=0, device=device)
    cu_seqlens = torch.tensor([0, 4], dtype=torch.int32, device=device)
    cases = [
        (lambda: MHA(30, 4), "embed_dim: expected a multiple of num_heads (4), got 30"),
        (lambda: MHA(32, 4, 3), "num_heads_kv: expected a divisor of num_heads (4), got 3"),
        (lambda: MHA(32, 4, use_alibi=True), "use_alibi: expected False without use_flash_attn, got True"),
        (lambda: MHA(32, 4, window_size=(1, 0)), "window_size: expected (-1, -1) without use_flash_attn, got (1, 0)"),
        (lambda: MHA(32, 4, cross_attn=True, rotary_emb_dim=8), "rotary_emb_dim: expected 0 with cross_attn, got 8"),
        (lambda: plain(x, cu_seqlens=cu_seqlens), "cu_seqlens: expected None without use_flash_attn, got a tensor"),
        (lambda: flash(x[0], cu_seqlens=cu_seqlens), "max_seqlen: expected a value with cu_seqlens, got None"),
        (lambda: flash(x, key_padding_mask=x[..., 0] > 0),
         "key_padding_mask: expected None with use_flash_attn, got a value"),
        (lambda: plain(x, x), "x_kv: expected None without cross_attn, got a value"),
        (lambda: plain(x, inference_params=params), "seqlen: expected at most 3 tokens in the cache, got 4"),
        (lambda: plain(x.expand(2, 4, 32)[:, :2], inference_params=params),
         "batch: expected at most 1 sequences in the cache, got 2"),
        (lambda: MHA(32, 2, device=device)(x, inference_params=params),
         "layer_idx: expected an int in the constructor for inference_params, got None"),
        (lambda: flash(x[:, :1], inference_params=InferenceParams(9, 1, seqlen_offset=2)),
         "key_value_memory_dict: expected a cache of layer 0, got []"),
        (lambda: FlashCrossAttention()(x[0, :, None], x[0, :, None, None], cu_seqlens=cu_seqlens, max_seqlen=4),
         "cu_seqlens_k: expected a value with cu_seqlens, got None"),
    ]  # fmt: skip
    for call, message in cases:
        with pytest.raises(RuntimeError) as caught:
            call()
        assert str(caught.value) == message
    with pytest.raises(NotImplementedError, match="^dwconv: expected False, got True"):
        MHA(32, 4, dwconv=True)


@pytest.mark.parametrize("heads_k", (HEADS, 2))
def test_masks_and_biases(device, heads_k):
    """As the module by definition has it; without use_flash_attn, over a cache or ranks they are refused by name."""
    module = MHA(EMBED, HEADS, heads_k, causal=True, use_flash_attn=True, device=device, dtype=half(device))
    x = torch.randn(BATCH, SEQLEN, EMBED, device=device, dtype=half(device))
    ids = torch.randint(0, 3, (BATCH, SEQLEN), device=device).sort(-1).values
    attn_bias = torch.randn(HEADS, SEQLEN, SEQLEN, device=device, dtype=half(device)).requires_grad_()
    out = module(x, mask=AttentionMask.document_ids(ids), attn_bias=attn_bias)
    heads = module.Wqkv(x).unflatten(-1, (-1, HEAD_DIM)).double()
    q, k, v = heads.split([HEADS, heads_k, heads_k], dim=2)
    same = (ids[:, None, :, None] == ids[:, None, None]).expand(-1, HEADS, -1, -1)
    context = attention(q, k, v, causal=True, mask=same, attn_bias=attn_bias.double()[None]).out
    expected = module.out_proj(context.flatten(-2).to(half(device)))
    torch.testing.assert_close(out, expected, atol=2e-3, rtol=2e-3)
    dout = torch.randn_like(out)
    ours, right = (torch.autograd.grad(y, attn_bias, dout, retain_graph=True)[0] for y in (out, expected))
    torch.testing.assert_close(ours, right, atol=2e-3, rtol=2e-3)


@pytest.mark.parametrize("name", ("mask", "attn_bias", "rel_bias"))
def test_masks_and_biases_are_not_dropped(device, name):
    module = MHA(EMBED, HEADS, use_flash_attn=True, layer_idx=0, device=device, dtype=half(device))
    x = torch.randn(1, 4, EMBED, device=device, dtype=half(device))
    given = {name: torch.ones(4, 4, device=device)}
    with pytest.raises(RuntimeError, match=f"^{name}: expected None with inference_params"):
        module(x, inference_params=InferenceParams(4, 1), **given)
    with pytest.raises(RuntimeError, match=f"{name}: expected None with context parallelism"):
        LocalGroup(1).run(lambda rank: module(x, cp_plan=CpPlan.dense(4, group=rank), **given))
    plain = MHA(EMBED, HEADS, device=device, dtype=half(device))
    with pytest.raises(RuntimeError, match=f"^{name}: expected None without use_flash_attn"):
        plain(x, **given)
